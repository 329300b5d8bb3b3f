"""Workers with real stores: order, commits, failures, outputs, time-outs, drains, rebalances."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import (
    CommittedOffset,
    ConfigError,
    Consumer,
    Context,
    Dead,
    DrainTimeoutError,
    Groups,
    HandlerTimeoutError,
    Outgoing,
    Producer,
    Record,
    RetryLater,
    SerializationError,
    Skip,
    Store,
    StuckWorkersError,
    TopicPartition,
    Workers,
)
from logstore.errors import ClosedError
from logstore.workers.deciding import Again, InPlace
from logstore.workers.progress import Place, Progress, described
from tests.kit import PATIENCE, committed, flip, join, wait_until
from tests.workers.ledger import Gatekeeper, Ledger

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def topic(store: Store) -> Store:
    store.create_topic("t", partitions=1)
    return store


def fill(store: Store, count: int, keys: int = 0, topic: str = "t") -> list[bytes]:
    """Append records 0, 1, ... with keys k0, k1, ...; return their values."""
    values = [b"%d" % n for n in range(count)]
    for number, log in enumerate(store[topic]):
        log.extend([
            Record(value, key=b"k%d" % (int(value) % keys) if keys else None)
            for value in values[number :: len(store[topic])]
        ])  # fmt: skip
    return values


def progress_of(store: Store, group: str = "g", where: TopicPartition = T0) -> Progress:
    found = Groups(store).committed(group)[where]
    place = Place(group, store[where.topic].id, where.partition)
    return Progress.decode(found.metadata, place, found.offset)


def idle(workers: Workers) -> None:
    assert workers.wait(until="idle", timeout=PATIENCE)


# ---- W1 to W7, with threads ----


@pytest.mark.parametrize("order", ["key", "partition", "none"])
def test_w1_w2_w5_many_threads_process_each_record_once_in_order(store: Store, order: str) -> None:
    store.create_topic("t", partitions=3)
    values = fill(store, 1500, keys=40)
    ledger = Ledger()
    with Workers(
        store, "t", group_id="g", handler=ledger.handler(), order=order, concurrency=8,
        buffer_records=64, commit_interval=0,
    ) as workers:  # fmt: skip
        idle(workers)
        assert workers.stats().done == 1500 and workers.stats().lag == 0
    ledger.assert_each_once(values)
    if order == "key":
        ledger.check_order()
    if order == "partition":
        for number in range(3):
            starts = [r.offset for kind, r in ledger.events if r.partition == number]
            assert starts == [offset for offset in range(500) for _ in ("start", "end")]
    for number in range(3):
        found = progress_of(store, where=TopicPartition("t", number))
        assert (found.committed, found.clean) == (500, True)


def test_w1_other_keys_go_on_while_one_is_slow(topic: Store) -> None:
    fill(topic, 40, keys=4)
    ledger, gate = Ledger(), Gatekeeper(b"0")
    with Workers(topic, "t", group_id="g", handler=ledger.handler(gate), concurrency=2) as workers:
        ledger.wait_for(30)  # all of the three other keys, by the other thread
        assert {int(value) % 4 for value in ledger.values()} == {1, 2, 3}
        gate.open()
        idle(workers)
    ledger.check_order()
    assert len(ledger.values()) == 40


def test_a_key_function_gives_the_order(topic: Store) -> None:
    topic["t"][0].extend([Record(b"%d" % n, key=b"%d" % n) for n in range(20)])
    ledger = Ledger()
    with Workers(topic, "t", group_id="g", handler=ledger.handler(),
                 key=lambda record: int(record.value) % 2) as workers:  # fmt: skip
        idle(workers)
    for parity in range(2):
        ended = [int(value) for value in ledger.values() if int(value) % 2 == parity]
        assert ended == sorted(ended)


def test_w3_w4_a_killed_process_repeats_only_what_was_not_finished_at_the_commit(
    tmp_path: Path,
) -> None:
    gate, ledger = Gatekeeper(b"3", b"4"), Ledger()
    with logstore.open(tmp_path / "data") as store:
        store.create_topic("t", partitions=1)
        fill(store, 10)
        with Workers(
            store, "t", group_id="g", handler=ledger.handler(gate), commit_interval=0
        ) as workers:

            def two_open() -> bool:
                return T0 in Groups(store).committed("g") and [*progress_of(store)] == [3, 4]

            wait_until(two_open, "a commit with the two that run")
            copy = shutil.copytree(tmp_path / "data", tmp_path / "killed")
            gate.open()
            idle(workers)
    assert len(ledger.values()) == 10
    with logstore.open(copy) as store:
        found = progress_of(store)
        assert (found.committed, found.seen, found.clean) == (3, 10, False)
        store["t"].append(b"10")
        again = Ledger()
        with Workers(store, "t", group_id="g", handler=again.handler()) as workers:
            idle(workers)
        again.assert_each_once([b"3", b"4", b"10"])
        # A plain consumer of the group starts at the committed offset, and sees no more.
        with Consumer(store, "t", group_id="g", timeout=0) as consumer:
            assert list(consumer) == []


def test_w6_reading_stops_when_the_buffer_is_full(topic: Store) -> None:
    fill(topic, 100)
    gate = Gatekeeper(b"0")
    with Workers(topic, "t", group_id="g", handler=gate, order="partition",
                 buffer_records=7) as workers:  # fmt: skip
        wait_until(lambda: workers.stats().waiting == 6, "a full buffer")
        assert workers.stats().running == 1
        gate.open()
        idle(workers)
        assert workers.stats().done == 100


def test_w6_the_bytes_of_all_open_records_are_bounded(topic: Store) -> None:
    topic["t"][0].extend([b"%d" % n + b"x" * 999 for n in range(10)])
    gate = threading.Event()
    with Workers(topic, "t", group_id="g", handler=lambda record: gate.wait(PATIENCE) and None,
                 buffer_bytes=3_500) as workers:  # fmt: skip
        wait_until(lambda: workers.stats().running == 3, "three records of a thousand bytes")
        assert workers.stats().waiting == 0
        gate.set()
        idle(workers)
        assert workers.stats().done == 10


def test_w7_a_straggler_does_not_stop_the_others(topic: Store) -> None:
    values = fill(topic, 6000)
    ledger, gate = Ledger(), Gatekeeper(b"0")
    with Workers(topic, "t", group_id="g", handler=ledger.handler(gate), commit_interval=0,
                 buffer_records=50) as workers:  # fmt: skip
        ledger.wait_for(5999)
        wait_until(lambda: progress_of(topic).finished_above == 5999, "the commit")
        text = Groups(topic).committed("g")[T0].metadata
        assert described(text, 0) == "1 open, 5,999 finished above" and len(text) < 20
        gate.open()
        idle(workers)
    ledger.assert_each_once(values)


# ---- failures ----


def test_a_failed_record_is_tried_again_in_place_and_holds_its_key_only(topic: Store) -> None:
    fill(topic, 9, keys=3)
    attempts: list[int] = []

    def handle(record: Record, context: Context) -> None:
        if record.value == b"0":
            attempts.append(context.attempt)
            if context.attempt == 1:
                raise RetryLater(after="0s")
            if context.attempt == 2:
                raise ValueError("not yet")

    ledger = Ledger()
    with Workers(topic, "t", group_id="g", handler=lambda record, context: ledger.handler(
        lambda record: handle(record, context))(record)) as workers:  # fmt: skip
        idle(workers)
        stats = workers.stats()
    assert attempts == [1, 2, 3]
    assert (stats.done, stats.failed) == (9, 2)
    assert stats.last_error == "t-0 offset 0: ValueError: not yet"
    ledger.check_order()


def test_the_delay_of_a_failed_record_grows_to_a_minute() -> None:
    record: Any = None
    delays = [InPlace().decide(record, ValueError(), n) for n in (1, 2, 3, 30)]
    assert delays == [Again(0.1), Again(0.2), Again(0.4), Again(60.0)]
    assert InPlace().decide(record, RetryLater("10m"), 1) == Again(600.0)


def test_skip_finishes_a_record(topic: Store) -> None:
    fill(topic, 3)

    def handle(record: Record) -> None:
        raise Skip("not for us")

    with Workers(topic, "t", group_id="g", handler=handle) as workers:
        idle(workers)
        assert (workers.stats().skipped, workers.stats().done) == (3, 0)
    assert progress_of(topic).committed == 3


def test_a_dead_record_stops_the_run_with_its_name_and_is_not_lost(topic: Store) -> None:
    fill(topic, 5)
    ledger = Ledger()

    def handle(record: Record) -> None:
        if record.value == b"2":
            raise Dead("no such customer")

    workers = Workers(topic, "t", group_id="g", handler=ledger.handler(handle), order="partition")
    with pytest.raises(Dead, match="no such customer") as caught:
        workers.run()
    assert "t-0 offset 2 is not finished" in caught.value.__notes__[0]
    assert ledger.values() == [b"0", b"1"]
    assert workers.closed
    again = Ledger()
    with Workers(topic, "t", group_id="g", handler=again.handler()) as workers:
        idle(workers)
    assert sorted(again.values()) == [b"2", b"3", b"4"]


def test_a_value_that_cannot_be_deserialized_stops_the_run(topic: Store) -> None:
    topic["t"][0].extend([b'{"a": 1}', b"{"])
    seen: list[object] = []
    workers = Workers(topic, "t", group_id="g", order="partition", value_deserializer="json",
                      handler=lambda record: seen.append(record.value))  # fmt: skip
    with pytest.raises(SerializationError) as caught:
        workers.run()
    assert seen == [{"a": 1}]
    assert caught.value.offset == 1 and caught.value.data == b"{"


def test_run_returns_after_it_was_idle_for_its_timeout(topic: Store) -> None:
    fill(topic, 5)
    ledger = Ledger()
    workers = Workers(topic, "t", group_id="g", handler=ledger.handler())
    workers.run(timeout=0.05)
    assert len(ledger.values()) == 5 and progress_of(topic).clean


def test_a_handler_may_stop_the_workers(topic: Store) -> None:
    fill(topic, 50)
    ledger = Ledger()
    workers = Workers(
        topic, "t", group_id="g", order="partition",
        handler=ledger.handler(lambda r: workers.stop() if r.value == b"7" else None),
    )  # fmt: skip
    workers.run()
    done = len(ledger.values())
    assert 8 <= done < 50
    assert progress_of(topic).committed == done


# ---- outputs ----


def test_outputs_are_committed_with_their_records(topic: Store) -> None:
    topic.create_topic("out", partitions=1)
    values = fill(topic, 300, keys=7)

    def handle(record: Record, context: Context) -> list[Outgoing]:
        context.send("out", b"sent " + (record.value or b""), key=record.key)
        return [Outgoing("out", b"returned " + (record.value or b""), headers=iter([("h", b"")]))]

    with Workers(topic, "t", group_id="g", handler=handle, commit_records=50) as workers:
        idle(workers)
    expected = [kind + value for value in values for kind in (b"sent ", b"returned ")]
    written = committed(topic["out"][0])
    assert sorted(written) == sorted(expected)  # type: ignore[type-var]
    for key in range(7):  # outputs of one key are in its order
        mine = [int(v[5:]) for v in written if v and v[:5] == b"sent " and int(v[5:]) % 7 == key]
        assert mine == sorted(mine)
    assert progress_of(topic).committed == 300


def test_an_output_that_cannot_be_sent_fails_its_record_and_no_other(topic: Store) -> None:
    topic.create_topic("out", partitions=1)
    fill(topic, 6)

    def handle(record: Record, context: Context) -> Outgoing:
        faulty = record.value == b"3" and context.attempt == 1
        return Outgoing("nowhere" if faulty else "out", record.value)

    with Workers(topic, "t", group_id="g", handler=handle, commit_interval=0) as workers:
        idle(workers)
        assert "nowhere" in workers.stats().last_error
    assert sorted(committed(topic["out"][0])) == [b"%d" % n for n in range(6)]  # type: ignore[type-var]


def test_a_handler_that_returns_something_else_has_failed(topic: Store) -> None:
    fill(topic, 1)
    results: list[Any] = [5, None]
    with Workers(topic, "t", group_id="g", handler=lambda record: results.pop(0)) as workers:
        idle(workers)
        assert "returns None, an Outgoing" in workers.stats().last_error


def test_the_outputs_of_a_failed_attempt_are_not_sent(topic: Store) -> None:
    topic.create_topic("out", partitions=1)
    fill(topic, 1)

    def handle(record: Record, context: Context) -> None:
        context.send("out", b"attempt %d" % context.attempt)
        if context.attempt == 1:
            raise RetryLater(0)

    with Workers(topic, "t", group_id="g", handler=handle) as workers:
        idle(workers)
    assert committed(topic["out"][0]) == [b"attempt 2"]


def test_records_of_an_open_transaction_are_not_handed_out(topic: Store) -> None:
    ledger = Ledger()
    with (
        Producer(topic, "writer") as producer,
        Workers(topic, "t", group_id="g", handler=ledger.handler(),
                isolation="read_committed") as workers,
    ):  # fmt: skip
        with producer.transaction() as tx:
            tx.append("t", b"a")
            idle(workers)
            assert ledger.values("start") == []
        ledger.wait_for(1)
        idle(workers)


# ---- time-outs ----


def test_a_slow_handler_is_cancelled_and_a_spare_thread_takes_its_place(topic: Store) -> None:
    fill(topic, 8, keys=2)
    ledger = Ledger()
    freed = threading.Event()
    names: set[str] = set()

    def handle(record: Record, context: Context) -> None:
        names.add(threading.current_thread().name)
        if record.value == b"0" and context.attempt == 1:
            assert context.deadline is not None
            assert context.cancelled.wait(PATIENCE)
            assert freed.wait(PATIENCE)
            raise OSError("the socket was closed")

    with Workers(topic, "t", group_id="g", concurrency=1, timeout=0.02, stuck_max=9,
                 handler=lambda record, context: ledger.handler(
                     lambda record: handle(record, context))(record)) as workers:  # fmt: skip
        ledger.wait_for(4)  # the other key, although the only thread does not return
        assert ledger.values() == [b"1", b"3", b"5", b"7"]
        # On a slow machine, a quick handler may be over its time for a moment, too.
        wait_until(lambda: [each.record.value for each in workers.stuck()] == [b"0"])
        (stuck,) = workers.stuck()
        assert "handle(record, context)" in stuck.stack
        assert stuck.thread.startswith("logstore workers g ") and stuck.seconds > 0.02
        assert workers.stats().stuck == 1
        freed.set()
        idle(workers)
        assert "HandlerTimeoutError: the handler of t-0 offset 0" in workers.stats().last_error
        assert workers.stats().stuck == 0
    ledger.check_order()
    assert len(names) >= 2


def test_a_slow_handler_that_succeeds_has_succeeded(topic: Store) -> None:
    fill(topic, 1)
    with Workers(topic, "t", group_id="g", timeout=0.01, handler=lambda record, context:
                 context.cancelled.wait(PATIENCE) and None) as workers:  # fmt: skip
        idle(workers)
        assert (workers.stats().done, workers.stats().failed) == (1, 0)


def test_too_many_stuck_handlers_stop_the_run(topic: Store) -> None:
    fill(topic, 3)
    gate = threading.Event()
    workers = Workers(topic, "t", group_id="g", timeout=0.01, stuck_max=2, drain_timeout=0,
                      handler=lambda record: gate.wait(PATIENCE) and None)  # fmt: skip
    with pytest.raises(StuckWorkersError, match="3 handlers"):
        workers.run()
    gate.set()
    assert progress_of(topic).committed == 0


def test_an_abandoned_attempt_is_tried_again_and_its_late_result_is_ignored(topic: Store) -> None:
    fill(topic, 1)
    gate = threading.Event()
    ended: list[int] = []

    def handle(record: Record, context: Context) -> None:
        if context.attempt == 1:
            assert gate.wait(PATIENCE)
        ended.append(context.attempt)

    with Workers(topic, "t", group_id="g", timeout=0.01, abandon_after=0.01,
                 handler=handle) as workers:  # fmt: skip
        wait_until(lambda: 2 in ended, "the second attempt")
        idle(workers)
        gate.set()
        wait_until(lambda: 1 in ended, "the first attempt")
        wait_until(lambda: workers.stats().stuck == 0, "the thread")
        assert workers.stats().done == 1
        error = workers.stats().last_error
    assert HandlerTimeoutError.__name__ in error


# ---- ending ----


def test_close_waits_for_running_handlers_and_starts_no_other(topic: Store) -> None:
    fill(topic, 10)
    ledger, gate = Ledger(), Gatekeeper(b"0")
    workers = Workers(topic, "t", group_id="g", handler=ledger.handler(gate), order="partition")
    workers.start()
    ledger.wait_for(1, "start")
    closing = threading.Thread(target=workers.close)
    closing.start()
    wait_until(lambda: workers._desk is not None and workers._desk.strands.stopping)
    gate.open()
    join([closing])
    assert ledger.values("start") == [b"0"]
    assert progress_of(topic).committed == 1 and progress_of(topic).clean
    with pytest.raises(ClosedError):
        workers.start()


def test_a_drain_that_ends_too_early_names_the_records_and_they_are_processed_again(
    topic: Store,
) -> None:
    fill(topic, 3)
    ledger, gate = Ledger(), Gatekeeper(b"1")
    workers = Workers(topic, "t", group_id="g", handler=ledger.handler(gate))
    workers.start()
    ledger.wait_for(2)
    with pytest.raises(DrainTimeoutError, match="t-0 offset 1") as caught:
        workers.drain(timeout=0)
    assert [record.value for record in caught.value.records] == [b"1"]  # type: ignore[attr-defined]
    assert [*progress_of(topic)] == [1] and not progress_of(topic).clean
    again = Ledger()
    with Workers(topic, "t", group_id="g", handler=again.handler()) as workers:
        # The old handler still runs: its record is not started a second time.
        wait_until(lambda: workers.assignment() == [T0])
        assert not workers.wait(timeout=0.05)
        gate.open()
        idle(workers)
    assert again.values("start") == []  # the new owner took the old handler's result
    assert progress_of(topic).committed == 3 and progress_of(topic).clean


def test_closing_the_store_ends_the_workers(tmp_path: Path) -> None:
    store = logstore.open(tmp_path / "data")
    store.create_topic("t", partitions=1)
    fill(store, 5)
    ledger = Ledger()
    workers = Workers(store, "t", group_id="g", handler=ledger.handler())
    workers.start()
    ledger.wait_for(5)
    store.close()
    with pytest.raises(ClosedError):
        workers.wait()
    workers.close()
    with logstore.open(tmp_path / "data") as store:
        assert progress_of(store).committed == 5 and progress_of(store).clean


# ---- rebalances ----


@pytest.fixture
def two(store: Store) -> Store:
    store.create_topic("t", partitions=4)
    return store


def test_two_workers_share_a_group_and_process_each_record_once(two: Store) -> None:
    values = fill(two, 1200, keys=30)
    ledger, gate = Ledger(), Gatekeeper(b"0")
    handler = ledger.handler(gate)
    with Workers(two, "t", group_id="g", handler=handler, commit_interval=0) as first:
        ledger.wait_for(100)
        with Workers(two, "t", group_id="g", handler=handler) as second:
            wait_until(lambda: len(second.assignment()) == 2, "two partitions")
            gate.open()
            idle(first)
            idle(second)
        wait_until(lambda: len(first.assignment()) == 4, "the others back")
        two["t"].append(b"last", partition=3)
        ledger.wait_for(1201)
        idle(first)
    ledger.assert_each_once([*values, b"last"])
    ledger.check_order()


def test_a_partition_that_is_asked_back_waits_for_its_handlers(two: Store) -> None:
    fill(two, 40, keys=1)
    ledger, gate = Ledger(), Gatekeeper(*(b"%d" % n for n in range(4)))
    with Workers(two, "t", group_id="g", handler=ledger.handler(gate),
                 revoke_timeout=PATIENCE) as first:  # fmt: skip
        ledger.wait_for(4, "start")
        with Workers(two, "t", group_id="g", handler=ledger.handler()) as second:
            assert first._desk is not None
            held = first._desk.strands.held
            wait_until(lambda: any(each.revoking for each in list(held.values())), "the rebalance")
            assert second.assignment() == [] and len(ledger.values("start")) == 4
            gate.open()
            wait_until(lambda: len(second.assignment()) == 2, "two partitions")
            idle(first)
            idle(second)
    ledger.check_order()
    ledger.assert_each_once([b"%d" % n for n in range(40)])


def test_a_new_owner_waits_for_a_handler_of_the_old_one(two: Store) -> None:
    """The old owner gave its partition back at `revoke_timeout`, and its handler still runs."""
    ledger = Ledger()
    fill(two, 40, keys=1)
    gate = Gatekeeper(*(b"%d" % n for n in range(4)))  # the first record of each partition
    with Workers(two, "t", group_id="g", handler=ledger.handler(gate),
                 revoke_timeout=0) as first:  # fmt: skip
        ledger.wait_for(4, "start")
        with Workers(two, "t", group_id="g", handler=ledger.handler()) as second:
            wait_until(lambda: len(second.assignment()) == 2, "two partitions")
            # Their first records run in threads of `first`; nothing of `second` may start.
            assert not second.wait(timeout=0.05)
            assert len(ledger.values("start")) == 4
            gate.open()
            idle(first)
            idle(second)
    ledger.check_order()
    ledger.assert_each_once([b"%d" % n for n in range(40)])


def test_a_member_that_was_removed_loses_its_partitions_and_joins_again(two: Store) -> None:
    fill(two, 40)
    ledger = Ledger()
    with Workers(two, "t", group_id="g", handler=ledger.handler()) as workers:
        idle(workers)
        (member,) = Groups(two).describe("g").members
        Groups(two).remove_member("g", member_id=member.member_id)
        wait_until(lambda: [m.member_id for m in Groups(two).describe("g").members]
                   not in ([], [member.member_id]), "another membership")  # fmt: skip
        two["t"].append(b"after", partition=0)
        ledger.wait_for(41)
        idle(workers)
    assert set(ledger.values()) == {*(b"%d" % n for n in range(40)), b"after"}


# ---- settings and views ----


def test_pause_and_resume_one_partition(store: Store) -> None:
    store.create_topic("t", partitions=2)
    ledger = Ledger()
    with Workers(store, "t", group_id="g", handler=ledger.handler()) as workers:
        wait_until(lambda: workers.assignment() == [T0, T1])
        workers.pause(T0)
        fill(store, 10)
        idle(workers)
        assert len(ledger.values()) == 5 and {r.partition for _, r in ledger.events} == {1}
        workers.resume()
        ledger.wait_for(10)
        idle(workers)


def test_the_concurrency_can_be_changed(topic: Store) -> None:
    fill(topic, 30)
    barrier = threading.Barrier(5)
    alone = threading.Semaphore(1)
    crowded = True

    def handle(record: Record) -> None:
        if crowded:
            barrier.wait(PATIENCE)  # needs five threads at once
        else:
            assert alone.acquire(blocking=False), "two handlers at once"
            alone.release()

    with Workers(topic, "t", group_id="g", handler=handle, concurrency=1) as workers:
        workers.set_concurrency(5)
        idle(workers)
        workers.set_concurrency(1)
        wait_until(lambda: workers._control is not None and workers._control.pool._count == 1)  # type: ignore[attr-defined]
        crowded = False
        fill(topic, 100)
        idle(workers)
        assert workers.stats().done == 130 and workers.stats().failed == 0
        with pytest.raises(ConfigError, match="at least 1"):
            workers.set_concurrency(0)


def test_caught_up_does_not_wait_for_later_records(topic: Store) -> None:
    fill(topic, 5)
    gate = Gatekeeper(b"late")
    with Workers(topic, "t", group_id="g", handler=gate) as workers:
        assert workers.wait(until="caught_up", timeout=PATIENCE)
        topic["t"].append(b"late")
        wait_until(lambda: workers.stats().running == 1)
        assert not workers.wait(until="caught_up", timeout=0.01)
        gate.open()
        assert workers.wait(until="caught_up", timeout=PATIENCE)
        with pytest.raises(ValueError, match="until"):
            workers.wait(until="done")


def test_a_damaged_partition_stops_and_the_others_go_on(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "data") as store:
        store.create_topic("t", partitions=2)
        fill(store, 10)
        log = store["t"][0].segments[0].path
    flip(log, 70)
    with logstore.open(tmp_path / "data") as store:
        ledger = Ledger()
        with Workers(store, "t", group_id="g", handler=ledger.handler()) as workers:
            wait_until(lambda: workers.stats().stopped, "the damage")
            idle(workers)
            assert [*workers.stats().stopped] == [T0]
        assert {record.partition for _, record in ledger.events} == {1}


@pytest.mark.parametrize("text", ["a note of another program", "ls1:AAAA", "ls1:"])
def test_a_metadata_text_that_is_not_ours_skips_no_record(
    topic: Store, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(topic, 5)
    Groups(topic).commit("g", {T0: CommittedOffset(2, text)})
    ledger = Ledger()
    with (
        caplog.at_level(logging.WARNING, "logstore.workers"),
        Workers(topic, "t", group_id="g", handler=ledger.handler()) as workers,
    ):
        idle(workers)
    assert sorted(ledger.values()) == [b"2", b"3", b"4"]
    assert ("is ignored" in caplog.text) == text.startswith("ls1:")


def test_records_that_compaction_removed_do_not_hold_the_commit(topic: Store) -> None:
    topic.create_topic("c", partitions=1, config={"cleanup.policy": "compact"})
    log = topic["c"][0]
    log.extend([Record(b"%d" % n, key=b"%d" % (n % 3)) for n in range(9)])
    place = Place("g", topic["c"].id, 0)
    open_ = Progress(9, [1, 4, 8])
    Groups(topic).commit("g", {TopicPartition("c", 0): CommittedOffset(1, open_.encode(place))})
    log.roll()
    logstore.Compactor(log, min_lag_ms=0).run()
    ledger = Ledger()
    with Workers(topic, "c", group_id="g", handler=ledger.handler()) as workers:
        idle(workers)
    assert ledger.values() == [b"8"]
    assert progress_of(topic, where=TopicPartition("c", 0)).committed == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "offset"}, "order must be"),
        ({"executor": "process"}, "ProcessPoolExecutor"),
        ({"executor": "greenlet"}, "executor must be"),
        ({"executor": "asyncio"}, "coroutine function"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"key": len, "order": "none"}, "key= is for"),
        ({"rate": 0}, "rate must be"),
        ({"timeout": -1}, "timeout must be"),
        ({"timeout": "soon"}, "not a duration"),
        ({"group_id": ""}, "group_id="),
    ],
)
def test_settings_that_cannot_work_are_refused(
    topic: Store, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Workers(topic, "t", **{"group_id": "g", "handler": print, **options})


def test_an_unknown_topic_is_refused_by_start(topic: Store) -> None:
    workers = Workers(topic, "orders", group_id="g", handler=print)
    with pytest.raises(logstore.UnknownTopicError):
        workers.start()
    with pytest.raises(ClosedError, match="not started"):
        workers.stats()
    workers.close()
