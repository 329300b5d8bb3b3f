"""Queue end to end: every invariant by name, crashes, dead letters, several groups, waking."""

from __future__ import annotations

import asyncio
import queue as std
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import AsyncQueue, ConfigError, LeaseLostError, Message, Queue, QueueSize, Store
from logstore.clock import ManualClock
from logstore.queues.share_groups import ShareGroups
from logstore.queues.share_state import SHARE_GROUP_STATE
from tests.kit import PATIENCE, committed, topic_values, wait_until

SMALL = {"segment.bytes": 16384}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed(make_store: Callable[..., Store], clock: ManualClock) -> Store:
    """A store whose time stands still; `pass_time` moves it."""
    return make_store(clock=clock)


def crash_store(store: Store, to: Path) -> Path:
    """Copy the directory of an open store: what a killed process leaves."""
    return Path(shutil.copytree(store.path, to))


def pass_time(store: Store, ms: int) -> None:
    clock = store.clock
    assert isinstance(clock, ManualClock)
    clock.advance(ms)
    timers = ShareGroups.of(store).timers
    while timers.run_due():
        pass


def drained(jobs: Queue) -> list[Any]:
    """Get and acknowledge all that is ready."""
    found = []
    while (job := jobs.try_get()) is not None:
        found.append(job.value)
        job.ack()
    return found


def got(jobs: Queue) -> Message:
    job = jobs.try_get()
    assert job is not None
    return job


def letters(store: Store, topic: str = "jobs") -> list[bytes | None]:
    name = f"{topic}-dlt"
    return topic_values(store, name, "read_committed") if name in store else []


# ---- the ordinary way ----


def test_put_get_ack(store: Store) -> None:
    jobs = Queue(store, "jobs")
    position = jobs.put(b"resize 7.jpg", key=b"user-7", headers=[("a", b"b")])
    with jobs.get(timeout=5) as job:
        assert (job.value, job.key, job.attempts) == (b"resize 7.jpg", b"user-7", 1)
        assert job.position == position and ("a", b"b") in job.headers
    with pytest.raises(std.Empty):
        jobs.get(timeout=0)
    assert jobs.size() == QueueSize(0, 0, 0, 0)


def test_a_block_that_raises_gives_the_message_back(timed: Store) -> None:
    jobs = Queue(timed, "jobs", nack_delay=1)
    jobs.put(b"a")

    def work() -> None:
        with jobs.get(timeout=0):
            raise KeyError("no such image")

    with pytest.raises(KeyError):
        work()
    assert jobs.try_get() is None and jobs.size().delayed == 1
    pass_time(timed, 1000)
    assert got(jobs).attempts == 2


def test_iteration_acknowledges_when_the_next_one_is_asked_for(store: Store) -> None:
    jobs = Queue(store, "jobs", timeout=0)
    jobs.put_many([b"a", b"b", b"c"])
    assert [job.value for job in jobs] == [b"a", b"b", b"c"]
    assert jobs.join(timeout=0)
    jobs.put(b"d")
    for _ in jobs:
        break
    assert got(jobs).attempts == 2  # the loop did not ask for another one


def test_get_many_peek_and_size(store: Store) -> None:
    jobs = Queue(store, "jobs", partitions=2)
    for number in range(6):
        jobs.put(b"%d" % number, key=b"k%d" % number)
    assert len(jobs.peek(4)) == 4
    assert {record.value for record in jobs.peek(100)} == {b"%d" % n for n in range(6)}
    held = jobs.get_many(4)
    assert len({job.value for job in held}) == 4
    assert jobs.size() == QueueSize(ready=2, delayed=0, in_flight=4, dead=0)
    assert len(jobs.get_many(100)) == 2 and jobs.get_many(1) == []


def test_priorities_are_handed_out_in_order(store: Store) -> None:
    jobs = Queue(store, "jobs", priorities=3)
    for priority in (2, 0, 1, 0):
        jobs.put(b"%d" % priority, priority=priority)
    assert drained(jobs) == [b"0", b"0", b"1", b"2"]
    with pytest.raises(ConfigError, match="priority"):
        jobs.put(b"", priority=3)


def test_a_dedupe_id_is_put_once(store: Store) -> None:
    jobs = Queue(store, "jobs")
    assert jobs.put(b"a", dedupe_id="job-7") == jobs.put(b"a", dedupe_id="job-7")
    assert drained(jobs) == [b"a"]
    jobs.close()


def test_values_are_serialized(store: Store) -> None:
    jobs = Queue(store, "jobs", value_serializer="json", value_deserializer="json")
    jobs.put({"image": 7})
    assert got(jobs).value == {"image": 7}


def test_purge_archives_what_is_not_leased(store: Store) -> None:
    jobs = Queue(store, "jobs")
    jobs.put_many([b"a", b"b", b"c"])
    held = got(jobs)
    assert jobs.purge(dry_run=True) == 2 and jobs.size().ready == 2
    assert jobs.purge() == 2
    assert jobs.try_get() is None
    held.ack()
    jobs.put(b"d")
    assert drained(jobs) == [b"d"]


@pytest.mark.parametrize(
    "wrong",
    [{"order": "time"}, {"max_attempts": 0}, {"in_flight_max": 30_000}, {"visibility": 0},
     {"on_expired": "delete"}, {"priorities": 0}],
)  # fmt: skip
def test_a_wrong_setting_is_refused(store: Store, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Queue(store, "jobs", **wrong)


def test_queues_of_one_group_share_their_settings(store: Store) -> None:
    Queue(store, "jobs", max_attempts=3)
    with pytest.raises(ConfigError, match="other settings"):
        Queue(store, "jobs", max_attempts=4)
    Queue(store, "jobs", max_attempts=4, group="other")


# ---- invariants ----


def test_q1_a_message_is_leased_to_one_getter(timed: Store) -> None:
    jobs, other = Queue(timed, "jobs", visibility=30), Queue(timed, "jobs", visibility=30)
    jobs.put(b"a")
    job = got(jobs)
    assert other.try_get() is None
    pass_time(timed, 29_999)
    assert other.try_get() is None
    pass_time(timed, 1)
    again = got(other)
    assert again.attempts == 2
    acts: list[Callable[[], None]] = [job.ack, job.nack, job.reject, lambda: job.extend(5)]
    for act in acts:
        with pytest.raises(LeaseLostError):
            act()
    again.ack()


def test_a_lease_that_is_extended_lasts(timed: Store) -> None:
    jobs = Queue(timed, "jobs", visibility=30)
    jobs.put(b"a")
    job = got(jobs)
    job.extend("5m")
    pass_time(timed, 299_999)
    assert jobs.try_get() is None
    job.ack()


def test_q2_what_is_acknowledged_and_durable_never_comes_again(
    make_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = make_store(durability="fsync")
    jobs = Queue(store, "jobs")
    jobs.put_many([b"%d" % number for number in range(10)])
    held = jobs.get_many(10)
    for job in held[::2]:
        job.ack()
    held[1].ack(wait=True)  # one fsync for all of them
    with logstore.open(crash_store(store, tmp_path / "killed")) as again:
        assert drained(Queue(again, "jobs")) == [b"3", b"5", b"7", b"9"]


def test_q3_a_message_fails_max_attempts_times_and_is_one_letter(timed: Store) -> None:
    jobs = Queue(timed, "jobs", max_attempts=3, nack_delay=0)
    jobs.put(b"bad", key=b"k", headers=[("trace", b"1")])
    for attempt in (1, 2, 3):
        assert letters(timed) == []
        job = got(jobs)
        assert job.attempts == attempt
        job.nack(reason="it is bad")
    assert jobs.try_get() is None and jobs.join(timeout=0)
    (letter,) = timed["jobs-dlt"][0].scan(isolation="read_committed")
    assert (letter.value, letter.key) == (b"bad", b"k")
    headers = dict(letter.headers)
    assert headers["trace"] == b"1"
    assert headers["__dlq.errors.topic"] == b"jobs"
    assert headers["__dlq.errors.offset"] == b"0"
    assert headers["__dlq.errors.group"] == b"default"
    assert headers["__dlq.errors.delivery.count"] == b"3"
    assert headers["__dlq.errors.message"] == b"it is bad"
    assert jobs.size().dead == 1


def test_q3_a_getter_that_never_answers_uses_up_the_attempts(timed: Store) -> None:
    jobs = Queue(timed, "jobs", max_attempts=2, visibility=10)
    jobs.put(b"bad")
    for _ in range(2):
        got(jobs)
        pass_time(timed, 10_000)
    assert jobs.try_get() is None
    assert letters(timed) == [b"bad"] and jobs.join(timeout=0)


def test_a_rejected_message_is_a_letter_at_once_and_after_a_crash(
    store: Store, tmp_path: Path
) -> None:
    jobs = Queue(store, "jobs")
    jobs.put_many([b"bad", b"good"])
    got(jobs).reject("bad input")
    assert letters(store) == [b"bad"]
    with logstore.open(crash_store(store, tmp_path / "killed")) as again:
        jobs = Queue(again, "jobs")
        assert drained(jobs) == [b"good"]
        assert letters(again) == [b"bad"]


def test_a_letter_that_cannot_be_written_leaves_its_message(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The letter and the end of the message are one transaction: both, or none."""
    from logstore.producer.transacting import TransactionClient

    jobs = Queue(store, "jobs")
    jobs.put(b"bad")
    job = got(jobs)

    def fail(self: object, transaction: object) -> None:
        raise OSError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(TransactionClient, "_commit_written", fail)
        with pytest.raises(OSError, match="fire"):
            job.reject("bad input")
    assert letters(store) == []
    with logstore.open(crash_store(store, tmp_path / "killed")) as again:
        jobs = Queue(again, "jobs")
        got(jobs).reject("bad input")
        assert letters(again) == [b"bad"]


def test_q4_the_start_of_a_group_is_its_first_unfinished_message(store: Store) -> None:
    jobs = Queue(store, "jobs")
    jobs.put_many([b"%d" % number for number in range(5)])
    held = jobs.get_many(5)
    machine = jobs._shares[0].machine
    starts = []
    for number in (3, 1, 0, 4, 2):
        held[number].ack()
        starts.append(machine.start)
    assert starts == [0, 0, 2, 2, 5]


def test_q5_messages_of_a_key_are_handed_out_one_by_one_in_order(timed: Store) -> None:
    jobs = Queue(timed, "jobs", order="key", nack_delay=0)
    for value in (b"a1", b"a2", b"b1", b"a3", b"b2"):
        jobs.put(value, key=value[:1])
    a1, b1 = jobs.get_many(5)
    assert (a1.value, b1.value) == (b"a1", b"b1")
    a1.nack()
    again = got(jobs)
    assert again.value == b"a1" and jobs.try_get() is None  # a2 waits for it
    again.reject("bad")
    assert got(jobs).value == b"a2"
    b1.ack()
    assert got(jobs).value == b"b2"


def test_q6_in_flight_stays_within_its_bound(store: Store) -> None:
    jobs = Queue(store, "jobs", in_flight_max=3)
    jobs.put_many([b"%d" % number for number in range(10)])
    held = jobs.get_many(10)
    assert len(held) == 3 and jobs.try_get() is None
    held[1].ack()
    assert got(jobs).value == b"3" and jobs.try_get() is None


def test_q7_bytes_return_to_one_segment_behind_the_slowest_group(store: Store) -> None:
    store.create_topic("jobs", config=SMALL)
    fast, slow = Queue(store, "jobs"), Queue(store, "jobs", group="slow")
    fast.put_many([b"x" * 1000 for _ in range(100)])
    log = store["jobs"][0]
    while log.segments[-1].size_bytes > 4000:  # so that the last segment is a small one
        fast.put(b"x" * 1000)
    count = len(log.segments)
    assert count > 3
    assert len(drained(fast)) == log.end_offset
    fast.flush()
    assert len(log.segments) == count  # the other group has read nothing
    drained(slow)
    slow.flush()
    assert len(log.segments) == 1


def test_a_history_that_is_kept_is_not_trimmed(store: Store) -> None:
    store.create_topic("jobs", config=SMALL)
    jobs = Queue(store, "jobs", keep="7d")
    jobs.put_many([b"x" * 1000 for _ in range(100)])
    drained(jobs)
    jobs.flush()
    assert store["jobs"][0].start_offset == 0


def test_t1_an_expired_message_is_never_handed_out(timed: Store) -> None:
    jobs = Queue(timed, "jobs", on_expired="dead-letter")
    jobs.put(b"old", ttl="1s")
    jobs.put(b"late", ttl="1s", delay="10s")  # its time begins with its delivery
    jobs.put(b"good", ttl="1d")
    pass_time(timed, 1000)
    assert jobs.peek(5)[0].value == b"good"
    assert drained(jobs) == [b"good"]
    pass_time(timed, 9000)
    assert letters(timed) == [b"old"]
    assert drained(jobs) == [b"late"]


def test_an_expired_message_is_skipped_unless_letters_are_asked_for(timed: Store) -> None:
    jobs = Queue(timed, "jobs", ttl=1)
    jobs.put(b"old")
    pass_time(timed, 1000)
    assert jobs.try_get() is None
    assert letters(timed) == [] and jobs.join(timeout=0)


# ---- time ----


def test_a_delayed_message_is_handed_out_at_its_time_also_after_a_restart(
    make_store: Callable[..., Store], clock: ManualClock
) -> None:
    store = make_store(clock=clock)
    Queue(store, "jobs").put(b"later", delay="10m")
    store.close()
    clock.advance(599_999)
    store = make_store(clock=clock)
    jobs = Queue(store, "jobs")
    assert jobs.try_get() is None and jobs.size().delayed == 1
    pass_time(store, 1)
    assert got(jobs).value == b"later"


def test_a_clock_that_leaps_neither_ends_a_lease_nor_expires_a_message(timed: Store) -> None:
    jobs = Queue(timed, "jobs", visibility=30)
    jobs.put(b"a", ttl="1d")
    jobs.put(b"b")
    held = got(jobs)
    clock = timed.clock
    assert isinstance(clock, ManualClock)
    clock.leap(30 * 86_400_000)
    assert got(jobs).value == b"b" and jobs.try_get() is None
    held.nack(0)
    assert got(jobs).value == b"a"


# ---- crash and reopen ----


def test_leases_die_with_their_process_and_attempts_are_counted_after_it(
    store: Store, tmp_path: Path
) -> None:
    jobs = Queue(store, "jobs", max_attempts=3)
    jobs.put(b"poison")
    got(jobs)
    attempts = []
    path = crash_store(store, tmp_path / "killed-0")
    for number in range(1, 4):  # each process is killed while it has the message
        with logstore.open(path, durability="os") as again:
            attempts.append(got(Queue(again, "jobs", max_attempts=3)).attempts)
            path = crash_store(again, tmp_path / f"killed-{number}")
    # The first process noted nothing, because there had been no crash before.
    assert attempts == [1, 2, 3]
    with logstore.open(path, durability="os") as again:
        jobs = Queue(again, "jobs", max_attempts=3)
        assert jobs.try_get() is None
        assert jobs.join(timeout=PATIENCE)  # the thread of the timers writes the letter
        assert letters(again) == [b"poison"]


def test_the_state_is_pruned_to_one_segment(store: Store) -> None:
    store.topic_changes.declare(SHARE_GROUP_STATE, 1, config={"segment.bytes": 16384})
    idle = Queue(store, "idle")
    idle.put_many([b"a", b"b"])
    idle.get_many(2)[1].ack(wait=True)
    jobs = Queue(store, "jobs")
    for number in range(600):
        jobs.put(b"%d" % number)
        got(jobs).ack(wait=True)
    state = store[SHARE_GROUP_STATE][0]
    assert state.start_offset > 0 and len(state.segments) <= 2
    path = store.path
    store.close()
    with logstore.open(path) as again:
        assert drained(Queue(again, "jobs")) == []
        assert drained(Queue(again, "idle")) == [b"a"]


def test_a_state_beyond_the_end_of_a_log_that_lost_records_is_cut(store: Store) -> None:
    jobs = Queue(store, "jobs")
    jobs.put_many([b"a", b"b", b"c"])
    for job in jobs.get_many(3)[:2]:
        job.ack()
    jobs.flush()
    store["jobs"][0].truncate(1)  # as a power cut with durability="os" may do
    path = store.path
    store.close()
    for value in (b"new", b"newer"):
        with logstore.open(path) as again:
            jobs = Queue(again, "jobs")
            jobs.put(value)
            assert drained(jobs) == [value]


def test_a_topic_that_is_made_again_begins_anew(store: Store) -> None:
    jobs = Queue(store, "jobs")
    jobs.put(b"old")
    drained(jobs)
    jobs.close()
    store.delete_topic("jobs")
    jobs = Queue(store, "jobs")
    jobs.put(b"new")
    assert drained(jobs) == [b"new"]


def test_records_of_an_aborted_transaction_are_not_messages(store: Store) -> None:
    jobs = Queue(store, "jobs")
    with logstore.Producer(store, "orders") as producer:
        with producer.transaction() as tx:
            tx.append("jobs", b"committed")
        tx = producer.transaction()
        tx.append("jobs", b"aborted")
        tx.abort()
    assert drained(jobs) == [b"committed"] and jobs.join(timeout=0)
    assert committed(store["jobs"][0]) == [b"committed"]


# ---- threads and tasks ----


def test_a_put_wakes_a_getter(store: Store) -> None:
    jobs = Queue(store, "jobs")
    found: list[bytes] = []

    def work() -> None:
        with jobs.get(timeout=PATIENCE) as job:
            found.append(job.value)

    getters = [threading.Thread(target=work) for _ in range(4)]
    for getter in getters:
        getter.start()
    store["jobs"].append(b"by topic")
    jobs.put_many([b"1", b"2", b"3"])
    for getter in getters:
        getter.join(PATIENCE)
        assert not getter.is_alive()
    assert sorted(found) == [b"1", b"2", b"3", b"by topic"]


@pytest.mark.parametrize("options", [{"in_flight_max": 1}, {"order": "key"}])
def test_an_acknowledgement_wakes_a_getter_that_it_makes_room_for(
    store: Store, options: dict[str, Any]
) -> None:
    jobs = Queue(store, "jobs", visibility=600, **options)
    jobs.put_many([b"1", b"2"], key=b"k")
    held = got(jobs)
    found: list[bytes] = []
    getter = threading.Thread(target=lambda: found.append(jobs.get(timeout=PATIENCE).value))
    getter.start()
    wait_until(lambda: len(jobs.line._waiting) > 0)
    held.ack()
    getter.join(PATIENCE)
    assert found == [b"2"]


def test_the_end_of_a_lease_wakes_a_getter(store: Store) -> None:
    jobs = Queue(store, "jobs", visibility=0.05)
    jobs.put(b"a")
    got(jobs)
    assert jobs.get(timeout=PATIENCE).attempts >= 2


def test_threads_handle_each_message_once_and_join_waits_for_them(store: Store) -> None:
    jobs = Queue(store, "jobs", visibility=600, timeout=PATIENCE)
    done: list[bytes] = []

    def work() -> None:
        for job in jobs:
            if job.value == b"stop":
                job.ack()
                return
            done.append(job.value)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for number in range(200):
        jobs.put(b"%d" % number)
    for _ in workers:
        jobs.put(b"stop")
    for worker in workers:
        worker.join(PATIENCE)
        assert not worker.is_alive()
    assert jobs.join(timeout=PATIENCE)
    assert sorted(done) == sorted(b"%d" % number for number in range(200))


def test_close_gives_back_what_the_queue_has_leased(store: Store) -> None:
    one, other = Queue(store, "jobs"), Queue(store, "jobs")
    one.put(b"a")
    job = got(one)
    one.close()
    assert got(other).attempts == 2
    with pytest.raises(LeaseLostError):
        job.ack()
    with pytest.raises(logstore.ClosedError):
        one.get()


def test_a_getter_that_waits_ends_with_its_store(store: Store) -> None:
    jobs = Queue(store, "jobs")
    raised: list[BaseException] = []
    waiting = threading.Event()

    def work() -> None:
        try:
            waiting.set()
            jobs.get()
        except logstore.ClosedError as error:
            raised.append(error)

    getter = threading.Thread(target=work)
    getter.start()
    assert waiting.wait(PATIENCE)
    jobs.close()
    getter.join(PATIENCE)
    assert not getter.is_alive() and raised


def test_tasks_share_an_async_queue(store: Store) -> None:
    async def main() -> list[bytes]:
        done: list[bytes] = []

        async def work(jobs: AsyncQueue) -> None:
            async for job in jobs:
                if job.value == b"stop":
                    job.ack()
                    return
                done.append(job.value)

        async with AsyncQueue(store, "jobs", timeout=PATIENCE) as jobs:
            tasks = [asyncio.create_task(work(jobs)) for _ in range(3)]
            for number in range(30):
                await jobs.put(b"%d" % number)
            for _ in tasks:
                await jobs.put(b"stop")
            await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
            assert await jobs.join(PATIENCE)
            with pytest.raises(std.Empty):
                await jobs.get(timeout=0)
            assert jobs.size() == QueueSize(0, 0, 0, 0)
        return done

    assert sorted(asyncio.run(main())) == sorted(b"%d" % number for number in range(30))


def test_a_cancelled_task_passes_its_ring_on(store: Store) -> None:
    async def main() -> bytes:
        async with AsyncQueue(store, "jobs") as jobs:
            first = asyncio.create_task(jobs.get())
            second = asyncio.create_task(jobs.get())
            await asyncio.sleep(0)  # both wait
            jobs.queue.put(b"a")  # rings the first, which does not run before it is cancelled
            first.cancel()
            job = await asyncio.wait_for(second, PATIENCE)
            job.ack()
            assert first.cancelled()
            return bytes(job.value)

    assert asyncio.run(main()) == b"a"
