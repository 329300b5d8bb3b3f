"""Consumers: reading, positions, commits, groups, callbacks and errors."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import itertools
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import (
    AsyncConsumer,
    ClosedError,
    CommittedOffset,
    ConfigError,
    Consumer,
    CorruptLogError,
    Groups,
    OffsetOutOfRangeError,
    ReadOnlyError,
    RebalanceError,
    Record,
    Store,
    TopicPartition,
    UnknownTopicError,
)
from logstore.clock import ManualClock
from logstore.consumer.membership import Membership
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS
from logstore.serialization import SerializationError
from logstore.testing import encode_batch, interrupt_at
from tests.kit import values, wait_until

START = 1_700_000_000_000
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def filled(store: Store) -> Store:
    """Topic t of two partitions with ten records each, one a second."""
    for log in store.create_topic("t", partitions=2):
        log.extend([Record(b"%d-%d" % (log.number, n), key=b"%d" % n, timestamp=START + n * 1000)
                    for n in range(10)])  # fmt: skip
    return store


def everything() -> list[bytes]:
    return [b"%d-%d" % (p, n) for p in range(2) for n in range(10)]


def eventually(so: Callable[[], object], *consumers: Consumer) -> None:
    """Poll the consumers until it is so: a consumer takes part in a rebalance in its own polls."""

    def poll() -> None:
        for consumer in consumers:
            consumer.poll(timeout=0.005)

    wait_until(so, between=poll)


# ---- alone ----


def test_it_reads_every_partition_in_order(filled: Store) -> None:
    with Consumer(filled, "t", timeout=0) as consumer:
        records = list(consumer)
    assert sorted(values(records)) == sorted(everything())
    for number in range(2):
        assert [r.offset for r in records if r.partition == number] == list(range(10))
    with Consumer(filled, "t", start="latest", timeout=0) as consumer:
        assert list(consumer) == []


def test_poll_returns_at_most_what_was_asked_for(filled: Store) -> None:
    with Consumer(filled, "t") as consumer:
        found: list[bytes] = []
        while batch := consumer.poll(max_records=3, timeout=0):
            assert len(batch) <= 3
            found += values(batch)
        assert sorted(found) == sorted(everything())
        assert consumer.positions() == {T0: 10, T1: 10}
        with pytest.raises(ValueError, match="max_records"):
            consumer.poll(max_records=0)


def test_leaving_a_loop_leaves_the_position_behind_the_last_record(filled: Store) -> None:
    with Consumer(filled, timeout=0) as consumer:
        consumer.assign([T0])
        for record in consumer:
            assert consumer.position(T0) == record.offset + 1
            if record.offset == 3:
                break
        assert consumer.position(T0) == 4
        assert values(consumer.poll(max_records=2, timeout=0)) == [b"0-4", b"0-5"]
        iterator = iter(consumer)
        assert next(iterator).offset == 6
        assert [record.offset for record in consumer.poll(timeout=0)] == [7, 8, 9]
        assert list(iterator) == []


def test_seek_takes_effect_at_the_next_record_of_a_loop(filled: Store) -> None:
    with Consumer(filled, timeout=0) as consumer:
        consumer.assign([T0])
        seen = []
        for record in consumer:
            seen.append(record.offset)
            if seen == [0, 1, 2]:
                consumer.seek(T0, 8)
            elif len(seen) == 5:
                consumer.seek(T0, "beginning")
            elif len(seen) == 7:
                consumer.seek(T0, "end")
        assert seen == [0, 1, 2, 8, 9, 0, 1]


def test_seek_by_time(filled: Store) -> None:
    when = datetime.datetime.fromtimestamp(START / 1000 + 6, datetime.UTC)
    with Consumer(filled, "t", timeout=0) as consumer:
        consumer.seek_to_time(when)
        assert [record.offset for record in consumer] == [6, 7, 8, 9] * 2
        consumer.seek(T0, when)
        consumer.seek_to_time(START + 8_500, T1)
        assert sorted(values(list(consumer))) == [b"0-6", b"0-7", b"0-8", b"0-9", b"1-9"]
        consumer.seek_to_beginning()
        assert consumer.positions() == {T0: 0, T1: 0}
        consumer.seek_to_end(T1)
        assert consumer.positions() == {T0: 0, T1: 10}
        for wrong in (1.5, True, None):
            with pytest.raises(TypeError):
                consumer.seek(T0, wrong)  # type: ignore[arg-type]
        with pytest.raises(OffsetOutOfRangeError):
            consumer.seek(T0, -1)
        with pytest.raises(ValueError, match=r"t-7 is not assigned.*t-0, t-1"):
            consumer.seek(("t", 7), 0)


def test_start_at_a_time(filled: Store) -> None:
    with Consumer(filled, "t", start=START + 9_000, timeout=0) as consumer:
        assert sorted(values(list(consumer))) == [b"0-9", b"1-9"]


def test_pause_in_a_loop_and_resume(filled: Store) -> None:
    with Consumer(filled, "t", timeout=0) as consumer:
        seen = []
        for record in consumer:
            seen.append(record)
            if len(seen) == 3:
                consumer.pause(TopicPartition("t", record.partition))
        first = seen[0].partition
        assert [r.offset for r in seen if r.partition == first] == [0, 1, 2]
        assert [r.offset for r in seen if r.partition != first] == list(range(10))
        assert consumer.paused() == [("t", first)]
        consumer.resume()
        assert [record.offset for record in consumer] == list(range(3, 10))


def test_a_waiting_consumer_wakes_on_append(store: Store) -> None:
    log = store.create_topic("t")[0]
    seen: list[bytes] = []
    waiting = threading.Event()

    def read() -> None:
        with Consumer(store, "t") as consumer:
            waiting.set()
            for record in consumer:
                seen.append(record.value)
                if record.value == b"last":
                    return

    thread = threading.Thread(target=read)
    thread.start()
    waiting.wait()
    for number in range(20):
        log.append(b"%d" % number)
    log.append(b"last")
    thread.join(60)
    assert not thread.is_alive()
    assert seen == [*(b"%d" % number for number in range(20)), b"last"]


def test_wake_ends_a_wait_in_another_thread(store: Store) -> None:
    store.create_topic("t")
    consumer = Consumer(store, "t")
    done = threading.Event()

    def read() -> None:
        consumer.poll(timeout=0.001)
        consumer._wait(None)
        done.set()

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: consumer.wake() or done.wait(0.01))
    thread.join(60)
    consumer.close()


def test_topics_by_pattern_and_partitions_that_come_later(store: Store) -> None:
    store.create_topic("orders.de").append(b"de")
    store.create_topic("other").append(b"other")
    with Consumer(store, re.compile(r"^orders\.")) as consumer:
        assert consumer.subscription() == ["orders.de"]
        assert values(consumer.poll(timeout=0)) == [b"de"]
        store.create_topic("orders.fr").append(b"fr")
        store["orders.de"].add_partitions(1)
        store["orders.de"].append(b"new", partition=1)
        found: list[bytes] = []
        eventually(lambda: found.extend(values(consumer.poll(timeout=0.01))) or len(found) == 2)
        assert sorted(found) == [b"fr", b"new"]
        store.delete_topic("orders.fr")
        store["orders.de"].append(b"x", partition=1)
        assert values(consumer.poll(timeout=5)) == [b"x"]
        eventually(lambda: len(consumer.assignment()) == 2, consumer)


def test_what_is_no_topic_is_named(store: Store) -> None:
    store.create_topic("orders")
    with pytest.raises(UnknownTopicError, match="did you mean 'orders'"):
        Consumer(store, "order")
    with pytest.raises(TypeError, match="a name or a compiled pattern"):
        Consumer(store, 3)  # type: ignore[arg-type]
    with Consumer(store) as consumer, pytest.raises(IndexError):
        consumer.assign([("orders", 4)])


@pytest.mark.parametrize(
    "options",
    [
        {"start": "first"},
        {"start": True},
        {"isolation": "serializable"},
        {"on_corrupt": "ignore"},
        {"session_timeout": 0},
        {"group_id": "g", "assignor": "best"},
        {"group_id": "g", "assignor": []},
        {"value_deserializer": "xml"},
    ],
)
def test_settings_are_checked(filled: Store, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Consumer(filled, "t", **options)


def test_a_position_outside_of_the_log_goes_where_start_says(
    filled: Store, caplog: pytest.LogCaptureFixture
) -> None:
    log = filled["t"][0]
    with Consumer(filled, timeout=0) as consumer:
        consumer.assign([T0])
        log.trim(5)
        assert [record.offset for record in consumer] == [5, 6, 7, 8, 9]
        assert "reading on from 5" in caplog.text
        log.truncate(7)
        assert [record.offset for record in consumer.poll(timeout=0)] == [5, 6]
    with Consumer(filled, start="none", timeout=0) as consumer:
        consumer.assign([T1])
        with pytest.raises(ConfigError, match="or set start"):
            consumer.poll()
    with Consumer(filled, start="latest", timeout=0) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 1)
        assert list(consumer) == [] and consumer.position(T0) == 7


def test_damage_is_met_after_what_lies_before_it(make_store: Callable[..., Store]) -> None:
    store = make_store()
    log = store.create_topic("t")[0]
    for number in range(5):
        log.append(b"%d" % number)
    log.roll()
    log.append(b"5")
    segment = log.segments[0]
    raw = bytearray(segment.path.read_bytes())
    raw[3 * len(raw) // 5 + 65] ^= 1
    segment.path.write_bytes(raw)
    for plain in (True, False):
        options: dict[str, Any] = {} if plain else {"value_deserializer": "string"}
        with Consumer(store, "t", timeout=0, **options) as consumer:
            seen = []
            with pytest.raises(CorruptLogError):
                for record in consumer:
                    seen.append(record.offset)
            assert seen == [0, 1, 2] and consumer.position(T0) == 3
            consumer.seek(T0, 5)
            assert [record.offset for record in consumer] == [5]
    with Consumer(store, "t", timeout=0, on_corrupt="skip") as consumer:
        assert [record.offset for record in consumer] == [0, 1, 2, 4, 5]


def test_read_committed_shows_nothing_open_or_aborted(store: Store) -> None:
    log = store.create_topic("t")[0]
    log.append(b"plain")
    for producer, end in ((1, True), (2, False), (3, None)):
        records = [Record(b"of %d" % producer, timestamp=START)]
        log.append_batch(encode_batch(records, transactional=True, producer_id=producer,
                                      producer_epoch=0, base_sequence=0),
                         verify_transaction=False)  # fmt: skip
        if end is not None:
            log.end_transaction(producer, 0, commit=end)
    log.append(b"behind")
    with Consumer(store, "t", isolation="read_committed", timeout=0) as consumer:
        assert values(list(consumer)) == [b"plain", b"of 1"]
        assert consumer.lag()[T0].records == 0
        log.end_transaction(3, 0, commit=True)
        assert values(list(consumer)) == [b"of 3", b"behind"]
    with Consumer(store, "t", timeout=0) as consumer:
        assert len(list(consumer)) == 5


def test_lag_in_records_bytes_and_seconds(make_store: Callable[..., Store]) -> None:
    clock = ManualClock(START + 60_000)
    store = make_store(clock=clock, config={"segment.bytes": 2048, "index.interval.bytes": 100})
    log = store.create_topic("t")[0]
    for n in range(100):
        log.append(b"x" * 50, timestamp=START + n * 100)
    sizes = sum(segment.size_bytes for segment in log.segments)
    with Consumer(store, "t", timeout=0) as consumer:
        lag = consumer.lag()[T0]
        assert (lag.records, lag.bytes, lag.seconds) == (100, sizes, 60.0)
        assert lag.rate is None and lag.catch_up_seconds is None
        consumer.poll(max_records=50)
        clock.advance(5_000)
        lag = consumer.lag()[T0]
        assert lag.records == 50 and lag.seconds == 60.0 and lag.rate == 10.0
        assert lag.catch_up_seconds == 5.0 and 0 < lag.bytes <= sizes * 0.6
        list(consumer)
        lag = consumer.lag()[T0]
        assert (lag.records, lag.bytes, lag.seconds, lag.catch_up_seconds) == (0, 0, 0.0, 0.0)


def test_a_readonly_store_is_read_without_a_group(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "s", durability="os") as store:
        log = store.create_topic("t")[0]
        log.append(b"0")
        with logstore.open(tmp_path / "s", readonly=True) as reader:
            with pytest.raises(ReadOnlyError, match="without group_id"):
                Consumer(reader, "t", group_id="g")
            with Consumer(reader, "t", timeout=5) as consumer:
                records = iter(consumer)
                assert next(records).value == b"0"
                log.append(b"1")
                assert next(records).value == b"1"


# ---- deserializers, interceptors ----


def test_values_are_deserialized_and_the_bad_one_is_named(store: Store) -> None:
    log = store.create_topic("t")[0]
    for value in (b"1", b"2", b"three", b"4"):
        log.append(value, key=b"k")
    log.append(None, key=b"k")
    with Consumer(
        store, "t", timeout=0, value_deserializer=int, key_deserializer="string"
    ) as consumer:
        seen = []
        with pytest.raises(SerializationError, match="offset 2") as caught:
            for record in consumer:
                seen.append((record.key, record.value, record.offset))
        assert seen == [("k", 1, 0), ("k", 2, 1)]
        assert consumer.position(T0) == caught.value.offset == 2
        with pytest.raises(SerializationError):
            consumer.poll()
        consumer.seek(T0, 3)
        assert [record.value for record in consumer.poll()] == [4, None]
        consumer.seek(T0, 0)
        assert [record.value for record in consumer.poll()] == [1, 2]


class Upper:
    """An interceptor that leaves out what is small, and can fail."""

    def __init__(self) -> None:
        self.fails = False
        self.commits: list[dict[TopicPartition, int]] = []

    def on_consume(self, records: Sequence[Record]) -> Sequence[Record]:
        if self.fails:
            raise RuntimeError("as planned")
        return [record for record in records if record.value.isupper()]

    def on_commit(self, offsets: dict[TopicPartition, int]) -> None:
        self.commits.append(offsets)


def test_interceptors_see_records_and_commits(store: Store) -> None:
    store.create_topic("t")[0].extend([b"a", b"B", b"c", b"D", b"e"])
    upper = Upper()
    with Consumer(store, "t", group_id="g", timeout=0, interceptors=[upper]) as consumer:
        upper.fails = True
        with pytest.raises(RuntimeError, match="as planned"):
            consumer.poll()
        with pytest.raises(RuntimeError, match="as planned"):
            next(iter(consumer))
        upper.fails = False
        assert values(list(consumer)) == [b"B", b"D"]
        consumer.commit()
    assert upper.commits == [{T0: 5}]


# ---- in a group ----


def test_a_group_goes_on_where_it_was(filled: Store, make_store: Callable[..., Store]) -> None:
    with Consumer(filled, "t", group_id="g", timeout=0) as consumer:
        for count, _ in enumerate(consumer, 1):
            if count == 12:
                break
        assert consumer.assignment() == [T0, T1] and consumer.generation == 1
    filled.close()
    store = make_store()
    with Consumer(store, "t", group_id="g", timeout=0) as consumer:
        assert len(list(consumer)) == 8
    with Consumer(store, "t", group_id="g", timeout=0) as consumer:
        assert list(consumer) == []
        assert [c.offset for c in consumer.committed().values() if c] == [10, 10]


def test_a_record_whose_processing_failed_comes_again(filled: Store) -> None:
    def work(fail_at: int, *, polling: bool) -> list[int]:
        done: list[int] = []
        with (
            pytest.raises(ZeroDivisionError),
            Consumer(filled, group_id=f"g{polling}", timeout=0) as consumer,
        ):
            consumer.assign([T0])
            if polling:
                while True:
                    for record in consumer.poll(max_records=2):
                        1 // (record.offset != fail_at)
                        done.append(record.offset)
            for record in consumer:
                1 // (record.offset != fail_at)
                done.append(record.offset)
        return done

    assert work(4, polling=False) == [0, 1, 2, 3]
    assert work(7, polling=False) == [4, 5, 6]
    # Of a poll it cannot be known which were done: all of its records come again.
    assert work(5, polling=True) == [0, 1, 2, 3, 4]
    assert work(6, polling=True) == [4, 5]


def test_what_is_committed_by_hand_is_all_that_is_committed(filled: Store) -> None:
    with Consumer(filled, "t", group_id="g", auto_commit=False, timeout=0) as consumer:
        list(consumer)
    with Consumer(filled, "t", group_id="g", auto_commit=False, timeout=0) as consumer:
        assert len(list(consumer)) == 20
        consumer.commit({T0: 3, T1: CommittedOffset(4, "half")})
        consumer.commit_later({T0: 5}).result(60)
        assert consumer.committed(T1) == {T1: consumer.committed()[T1]}
    with Consumer(filled, "t", group_id="g", auto_commit=False, timeout=0) as consumer:
        assert len(list(consumer)) == 5 + 6
        committed = consumer.committed(T1)[T1]
        assert committed is not None and committed.metadata == "half"


def test_commit_inside_a_loop_includes_the_record_at_hand(filled: Store) -> None:
    with Consumer(filled, group_id="g", auto_commit=False, timeout=0) as consumer:
        consumer.assign([T0])
        for record in consumer:
            if record.offset == 6:
                consumer.commit()
                break
    assert Groups(filled).committed("g")[T0].offset == 7


def test_without_a_group_there_is_nothing_to_commit_to(filled: Store) -> None:
    with Consumer(filled, "t") as consumer:
        for act in (consumer.commit, consumer.committed, consumer.commit_later):
            with pytest.raises(ConfigError, match="group_id"):
                act()
    with pytest.raises(ClosedError):
        consumer.poll()
    with pytest.raises(ClosedError):
        consumer.commit()


def test_auto_commit_in_a_loop_commits_what_was_processed(filled: Store) -> None:
    groups = Groups(filled)
    with Consumer(filled, group_id="g", auto_commit_interval=1e-6, timeout=0) as consumer:
        consumer.assign([T0])
        seen = 0
        for record in consumer:
            seen += 1
            consumer._fetcher.interrupt()  # as the timer does
            before = groups.committed("g").get(T0)
            assert (before.offset if before else 0) == record.offset
        assert seen == 10


def test_two_members_share_and_hand_over_in_two_steps(filled: Store) -> None:
    log: list[tuple[str, list[TopicPartition]]] = []
    options: dict[str, Any] = {
        "group_id": "g",
        "on_assigned": lambda tps: log.append(("assigned", tps)),
        "on_revoked": lambda tps: log.append(("revoked", tps)),
    }
    with Consumer(filled, "t", **options) as first:
        first.poll(timeout=0)
        assert log == [("assigned", [T0, T1])]
        with Consumer(filled, "t", group_id="g") as second:
            second.poll(timeout=0)
            assert second.assignment() == []  # not before the first has given it back
            assert first.generation == 2 and first.assignment() == [T0, T1]
            first.poll(timeout=0)
            assert log[1:] == [("revoked", [T1])]
            second.poll(timeout=0)
            assert (first.assignment(), second.assignment()) == ([T0], [T1])
            filled["t"].append(b"new", partition=1)
            assert values(second.poll(timeout=60)) == [b"new"]
        first.poll(timeout=0)
        assert first.assignment() == [T0, T1]
        assert first.position(T1) == 11
    reasons = [change.reason for change in Groups(filled).history("g")]
    assert any("gave back 1 partitions" in reason for reason in reasons)
    assert any("it was closed" in reason for reason in reasons)


@pytest.mark.parametrize("assignor", ["range", "roundrobin", "sticky"])
def test_eager_members_give_everything_back_first(filled: Store, assignor: str) -> None:
    log: list[tuple[str, list[TopicPartition]]] = []
    with Consumer(filled, "t", group_id="g", assignor=assignor,
                  on_revoked=lambda tps: log.append(("revoked", tps))) as first:  # fmt: skip
        first.poll(timeout=0)
        with Consumer(filled, "t", group_id="g", assignor=[assignor, "range"]) as second:
            second.poll(timeout=0)
            assert log == []
            first.poll(timeout=0)
            assert log == [("revoked", [T0, T1])]
            second.poll(timeout=0)
            held = [first.assignment(), second.assignment()]
            assert sorted(held) == [[T0], [T1]]
            assert Groups(filled).describe("g").protocol == assignor


def test_members_without_a_common_assignor_are_refused(filled: Store) -> None:
    with Consumer(filled, "t", group_id="g", assignor="range") as first:
        first.poll(timeout=0)
        with Consumer(filled, "t", group_id="g", assignor="sticky") as second:
            with pytest.raises(RebalanceError, match="no assignor that all") as caught:
                second.poll(timeout=0)
            assert caught.value.code == "INCONSISTENT_GROUP_PROTOCOL"
        assert first.assignment() == [T0, T1]


def test_a_callable_assigns_and_its_error_is_raised(filled: Store) -> None:
    def all_to_the_last(
        partitions: dict[str, list[int]], members: list[Any]
    ) -> dict[str, list[tuple[str, int]]]:
        last = max(member.member_id for member in members)
        return {last: [(topic, n) for topic, numbers in partitions.items() for n in numbers]}

    with Consumer(filled, "t", group_id="g", assignor=all_to_the_last) as consumer:
        assert len(consumer.poll()) == 20
    assert Groups(filled).describe("g").state == "Empty"

    def broken(partitions: object, members: object) -> dict[str, list[tuple[str, int]]]:
        raise LookupError("as planned")

    with Consumer(filled, "t", group_id="h", assignor=broken) as consumer:
        with pytest.raises(LookupError, match="as planned"):
            consumer.poll()
        assert Groups(filled).describe("h").members == ()


def test_a_member_that_was_put_out_joins_again_and_cannot_commit(filled: Store) -> None:
    lost: list[TopicPartition] = []
    with Consumer(filled, "t", group_id="g", auto_commit=False, on_lost=lost.extend) as consumer:
        consumer.poll(max_records=5)
        Groups(filled).remove_member("g", member_id=consumer.member_id)
        with pytest.raises(RebalanceError):
            consumer.commit()
        assert len(consumer.poll(timeout=0)) == 20
        assert lost == [T0, T1]
        consumer.commit()
    assert Groups(filled).committed("g")[T0].offset == 10


def test_a_group_that_someone_else_moved_on_refuses_an_old_generation(filled: Store) -> None:
    with Consumer(filled, "t", group_id="g", auto_commit=False) as consumer:
        consumer.poll(timeout=0)
        coordinator = GroupCoordinator.of(filled)
        with pytest.raises(RebalanceError) as caught:
            coordinator.commit("g", {T0: 1}, member_id=consumer.member_id, generation=0)
        assert caught.value.code == "ILLEGAL_GENERATION"
        with pytest.raises(RebalanceError) as caught:
            coordinator.commit("g", {T0: 1}, member_id="someone", generation=1)
        assert caught.value.code == "UNKNOWN_MEMBER_ID"
        assert Groups(filled).committed("g") == {}


def test_a_static_member_comes_back_without_a_rebalance(filled: Store) -> None:
    options: dict[str, Any] = {"group_id": "g", "instance_id": "i1", "auto_commit": False}
    with Consumer(filled, "t", **options) as consumer:
        consumer.poll(timeout=0)
        generation, first = consumer.generation, consumer.member_id
    (member,) = Groups(filled).describe("g").members
    assert member.instance_id == "i1"
    with Consumer(filled, "t", **options) as consumer:
        assert len(consumer.poll(timeout=0)) == 20
        assert consumer.generation == generation and consumer.member_id != first
        with Consumer(filled, "t", **options) as usurper:
            usurper.poll(timeout=0)
            with pytest.raises(RebalanceError, match="same instance_id"):
                consumer.commit()
            usurper.commit()
    Groups(filled).remove_member("g", instance_id="i1")
    assert Groups(filled).describe("g").state == "Empty"


# ---- time ----


@pytest.fixture
def timed(make_store: Callable[..., Store]) -> Store:
    """A store whose groups live by a clock that stands still."""
    store = make_store(clock=ManualClock(START))
    for log in store.create_topic("t", partitions=2):
        log.extend([b"%d" % n for n in range(3)])
    return store


def let_pass(store: Store, seconds: float) -> None:
    """Time passes, and the timers run as their thread would."""
    clock = store.clock
    assert isinstance(clock, ManualClock)
    timers = GroupCoordinator.of(store).timers
    for _ in range(round(seconds)):
        clock.advance(1_000)
        timers.run_due()


def test_a_slow_consumer_stays_in_its_group(timed: Store) -> None:
    with Consumer(timed, "t", group_id="g", auto_commit=False) as consumer:
        for _ in consumer:
            let_pass(timed, 3_600)
            break
        consumer.commit()
        assert consumer.generation == 1
        assert Groups(timed).describe("g").state == "Stable"


def test_a_slow_consumer_holds_nobody_up_and_loses_nothing_it_works_on(timed: Store) -> None:
    with Consumer(timed, "t", group_id="g", auto_commit=False) as slow:
        for _ in slow:
            with Consumer(timed, "t", group_id="g") as other:
                other.poll(timeout=0)
                let_pass(timed, 1_000)
                # The group has gone on with both; what is to move waits until it is given back.
                assert Groups(timed).describe("g").state == "Stable"
                assert slow.generation == other.generation == 2
                assert other.assignment() == [] and slow.assignment() == [T0, T1]
                slow.commit()
                slow.poll(timeout=0)
                other.poll(timeout=0)
                assert len(other.assignment()) == len(slow.assignment()) == 1
            break


def test_max_processing_time_names_the_record(
    timed: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("logstore.consumer.consumer.time.monotonic", lambda: now[0])
    lost: list[TopicPartition] = []
    consumer = Consumer(timed, "t", group_id="g", max_processing_time=60, auto_commit=False,
                        timeout=0, on_lost=lost.extend)  # fmt: skip
    with consumer:
        for record in consumer:
            if record.offset == 1:
                now[0] += 61
                let_pass(timed, 4)
                break
        assert Groups(timed).describe("g").state == "Empty"
        with pytest.raises(RebalanceError, match=r"t-0 offset 1 is being processed for 61.0 s"):
            consumer.commit()
        consumer.poll(timeout=0)
        assert lost == [T0, T1] and consumer.assignment() == [T0, T1]
    assert any("t-0 offset 1" in change.reason for change in Groups(timed).history("g"))


def test_a_consumer_that_nobody_holds_loses_its_place(timed: Store) -> None:
    consumer = Consumer(timed, "t", group_id="g", auto_commit=False)
    consumer.poll(timeout=0)
    del consumer
    gc.collect()
    let_pass(timed, 44)
    assert Groups(timed).describe("g").state == "Stable"
    let_pass(timed, 5)
    description = Groups(timed).describe("g")
    assert description.state == "Empty"
    assert "was not heard of for 45000 ms" in description.history[-2].reason


def test_a_member_whose_thread_ended_loses_its_place(timed: Store) -> None:
    consumers = []

    def use() -> None:
        consumer = Consumer(timed, "t", group_id="g", auto_commit=False)
        consumers.append(consumer)
        consumer.poll(timeout=0)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    let_pass(timed, 50)
    assert Groups(timed).describe("g").state == "Empty"
    consumers[0].poll(timeout=0)  # this thread uses it from now on: it joins again
    assert Groups(timed).describe("g").state == "Stable"
    consumers[0].close()


def test_members_of_a_process_that_is_gone_are_taken_out(
    timed: Store, make_store: Callable[..., Store]
) -> None:
    consumer = Consumer(timed, "t", group_id="g", auto_commit=False)
    consumer.poll(timeout=0)
    # As a crash leaves it: the record of the group lists a member.
    timed.close()
    store = make_store()
    assert Groups(store).committed("g") == {}
    description = Groups(store).describe("g")
    assert description.state == "Empty" and description.generation == 2
    with Consumer(store, "t", group_id="g", timeout=0) as other:
        assert len(list(other)) == 6
        assert other.generation == 3


def test_new_partitions_are_noticed_by_the_leader(timed: Store) -> None:
    with Consumer(timed, "t", re.compile("^u"), group_id="g", auto_commit=False) as consumer:
        consumer.poll(timeout=0)
        timed["t"].add_partitions(1)
        timed.create_topic("u")
        let_pass(timed, 4)
        consumer.poll(timeout=0)
        let_pass(timed, 4)
        consumer.poll(timeout=0)
        assert consumer.assignment() == [T0, T1, ("t", 2), ("u", 0)]


# ---- transactions ----


def test_offsets_in_a_transaction_wait_for_its_end(filled: Store) -> None:
    with Consumer(filled, "t", group_id="g", auto_commit=False) as consumer:
        consumer.poll()
        consumer.commit_in_transaction(7, 0)
        topic, number = consumer.offsets_partition
        assert topic == CONSUMER_OFFSETS
        assert consumer.committed() == {T0: None, T1: None}
    with Consumer(filled, "t", group_id="g", auto_commit=False) as consumer:
        assert consumer.poll(timeout=0) == []  # the start is not known yet
        with pytest.raises(RebalanceError, match="a transaction that is still open"):
            consumer.position(T0)
        filled[topic][number].end_transaction(7, 0, commit=True)
        assert consumer.poll(timeout=0) == []
        assert consumer.positions() == {T0: 10, T1: 10}


# ---- asyncio ----


def test_async_consumers_wake_on_appends_of_other_threads(filled: Store) -> None:
    async def read() -> list[bytes]:
        found: list[bytes] = []
        async with AsyncConsumer(filled, "t", group_id="g") as consumer:
            async for record in consumer:
                found.append(record.value)
                if len(found) == 20:
                    threading.Thread(target=filled["t"].append, args=(b"late",)).start()
                if record.value == b"late":
                    break
            await consumer.commit()
            assert sum(consumer.position(tp) for tp in consumer.assignment()) == 21
            committed = consumer.committed().values()
            assert sum(each.offset for each in committed if each) == 21
            assert await consumer.poll(timeout=0.01) == []
        return found

    found = asyncio.run(read())
    assert sorted(found[:20]) == sorted(everything()) and found[20:] == [b"late"]


def test_many_async_consumers_share_one_loop_and_no_thread_waits(filled: Store) -> None:
    async def main() -> None:
        threads = set(threading.enumerate())
        consumers = [AsyncConsumer(filled, "t", start="latest") for _ in range(50)]
        tasks = [asyncio.create_task(consumer.poll()) for consumer in consumers]
        await asyncio.sleep(0.01)
        assert set(threading.enumerate()) <= threads  # those of others may end meanwhile
        await asyncio.to_thread(filled["t"].append, b"x")
        for found in await asyncio.gather(*tasks):
            assert values(found) == [b"x"]
        for consumer in consumers:
            await consumer.close()

    asyncio.run(main())


def test_an_async_iteration_ends_after_its_idle_time(filled: Store) -> None:
    async def main() -> list[bytes]:
        async with AsyncConsumer(filled, "t", timeout=0.01) as consumer:
            return [record.value async for record in consumer]

    assert sorted(asyncio.run(main())) == sorted(everything())


def test_a_commit_goes_into_the_generation_that_came_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may come and go between the question for the generation and the commit."""
    store.create_topic("orders").extend([b"a", b"b", b"c"])
    consumer = Consumer(store, "orders", group_id="workers", timeout=0)
    assert len(list(consumer)) == 3
    commit, missed = consumer._coordinator.commit, 0

    def late(*arguments: Any, **options: Any) -> None:
        nonlocal missed
        if not missed:
            with Consumer(store, "orders", group_id="workers", auto_commit=False) as other:
                other.poll(timeout=0)
            missed = consumer.generation - options["generation"]
        commit(*arguments, **options)

    monkeypatch.setattr(consumer._coordinator, "commit", late)
    consumer.close()
    committed = Groups(store).committed("workers")
    assert [each.offset for each in committed.values()] == [3]
    assert missed > 0, "nobody came meanwhile"


class Owners:
    """The owner of each partition, by the callbacks; no partition may have two owners."""

    def __init__(self) -> None:
        self.of: dict[TopicPartition, str] = {}
        self.twice: list[tuple[TopicPartition, str, str]] = []

    def callbacks(self, name: str) -> dict[str, Callable[[list[TopicPartition]], None]]:
        def assigned(partitions: list[TopicPartition]) -> None:
            for tp in partitions:
                if tp in self.of:
                    self.twice.append((tp, self.of[tp], name))
                self.of[tp] = name

        def gone(partitions: list[TopicPartition]) -> None:
            for tp in partitions:
                if self.of.get(tp) == name:
                    del self.of[tp]

        return {"on_assigned": assigned, "on_revoked": gone, "on_lost": gone}


@pytest.mark.parametrize("at", [0, 1])
def test_what_is_taken_up_is_owned_for_whoever_joins_meanwhile(
    filled: Store, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Others join right after an assignment was taken, before anything was done about it."""
    owners, take, members, turns = Owners(), Membership.take_assignment, [], 0

    def member(name: str) -> Consumer:
        callbacks = owners.callbacks(name)
        consumer = Consumer(filled, "t", group_id="g", auto_commit=False, **callbacks)
        members.append(consumer)
        return consumer

    def taken(membership: Membership) -> tuple[TopicPartition, ...] | None:
        nonlocal turns
        assigned = take(membership)
        if assigned is not None and membership is first._membership:
            turns += 1
            if turns == at + 1:
                member("b").poll(timeout=0)
                member("c").poll(timeout=0)
        return assigned

    monkeypatch.setattr(Membership, "take_assignment", taken)
    first = member("a")
    if at:
        first.poll(timeout=0)
        member("d")
    for _ in range(5):
        for each in list(members):
            each.poll(timeout=0)
    assert turns > at and len(members) > 2, "nobody came meanwhile"
    assert owners.twice == []
    eventually(lambda: sorted(owners.of) == [T0, T1], *members)
    for each in members:
        each.close()
    assert owners.twice == [] and owners.of == {}


def test_an_assignment_is_not_taken_up_after_a_newer_join(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Consumer(filled, "t", group_id="g") as consumer:
        membership = consumer._membership
        assert membership is not None
        membership.join("the first time")
        assert not membership.settled, "its assignment waits to be taken"
        with monkeypatch.context() as patch:
            patch.setattr(membership.coordinator, "join", lambda *_, **__: None)
            membership.join("a rebalance is under way")
        assert membership.take_assignment() is None


def test_a_late_commit_of_what_is_not_held_is_refused(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition may change its owner in the next generation: commit only what is held then."""
    consumer = Consumer(filled, "t", group_id="g", auto_commit=False)
    other = Consumer(filled, "t", group_id="g", auto_commit=False)
    eventually(lambda: consumer.assignment() and other.assignment(), consumer, other)
    (mine,), (theirs,) = consumer.assignment(), other.assignment()
    commit, third = consumer._coordinator.commit, []

    def late(*arguments: Any, **options: Any) -> None:
        third.append(Consumer(filled, "t", group_id="g", auto_commit=False))
        third[-1].poll(timeout=0)
        monkeypatch.undo()
        commit(*arguments, **options)

    monkeypatch.setattr(consumer._coordinator, "commit", late)
    with pytest.raises(RebalanceError) as caught:
        consumer.commit({theirs: 7})
    assert caught.value.code == "ILLEGAL_GENERATION"
    monkeypatch.setattr(consumer._coordinator, "commit", late)
    consumer.commit({mine: 5})
    assert {tp: each.offset for tp, each in Groups(filled).committed("g").items()} == {mine: 5}
    for each in (consumer, other, *third):
        each.close()


COMMITS: dict[str, Callable[[Consumer], object]] = {
    "commit": Consumer.commit,
    "commit_later": lambda consumer: consumer.commit_later().result(30),
    "commit_in_transaction": lambda consumer: consumer.commit_in_transaction(7, 0),
    "close": Consumer.close,
}


@pytest.mark.parametrize("how", COMMITS)
def test_a_member_commits_before_it_learns_the_new_generation(
    filled: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The group is in the next generation; the answer to this member's join is not delivered."""
    consumer = Consumer(filled, "t", group_id="g", auto_commit=how == "close")
    other = Consumer(filled, "t", group_id="g", auto_commit=False)
    eventually(lambda: consumer.assignment() and other.assignment(), consumer, other)
    eventually(lambda: sum(consumer.positions().values()) == 10, consumer)
    (mine,) = consumer.assignment()
    machine, membership = GroupCoordinator.of(filled).machine("g"), consumer._membership
    generation, joined, behind = consumer.generation, Membership._joined, []

    def delivered(to: Membership, *answer: Any) -> None:
        if to is membership and not behind:
            behind.append(machine.generation - consumer.generation)
            COMMITS[how](consumer)
        joined(to, *answer)

    monkeypatch.setattr(Membership, "_joined", delivered)
    other.close()
    assert behind == [1], "the commit did not come before the answer"
    assert machine.generation > generation
    if how == "commit_in_transaction":
        topic, number = consumer.offsets_partition
        filled[topic][number].end_transaction(7, 0, commit=True)
    assert Groups(filled).committed("g")[mine].offset == 10
    assert caplog.messages == []
    consumer.close()


def test_a_member_commits_while_the_leader_has_not_assigned(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that a cooperative member holds has no other owner, even if it is reassigned."""
    consumer = Consumer(filled, "t", group_id="g", auto_commit=False)
    consumer.poll()
    other = Consumer(filled, "t", group_id="g", auto_commit=False)
    assign, states = Membership._assign, []
    machine = GroupCoordinator.of(filled).machine("g")

    def slow(leader: Membership, reply: Any) -> list[tuple[str, bytes]]:
        states.append(str(machine.state))
        consumer.commit()
        return assign(leader, reply)

    monkeypatch.setattr(Membership, "_assign", slow)
    other.poll(timeout=0)
    assert states == ["CompletingRebalance"]
    assert [each.offset for each in Groups(filled).committed("g").values()] == [10, 10]
    consumer.close()
    other.close()


def test_a_static_member_that_missed_a_generation_cannot_commit(timed: Store) -> None:
    """The group went on without its answer: what it held may be another's by now."""
    members: list[Consumer] = []

    def use() -> None:
        absent = Consumer(timed, "t", group_id="g", instance_id="i", auto_commit=False,
                          session_timeout=1_000, rebalance_timeout=10)  # fmt: skip
        members.append(absent)
        absent.poll(timeout=0)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()  # a member whose thread has ended does not join again
    absent = members[0]
    held = absent.assignment()
    assert held == [T0, T1]
    with Consumer(timed, "t", group_id="g", auto_commit=False, rebalance_timeout=10) as other:
        other.poll(timeout=0)
        let_pass(timed, 12)
        other.poll(timeout=0)
        assert other.generation > absent.generation
        assert absent.member_id in GroupCoordinator.of(timed).machine("g").members
        assert absent._membership is not None and absent._membership.holds(held, absent.generation)
        with pytest.raises(RebalanceError) as caught:
            absent.commit()
        assert caught.value.code == "ILLEGAL_GENERATION"
    absent.close()


def test_a_commit_in_the_background_is_refused_when_the_partition_was_given_back_meanwhile(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held again by then, but others may have committed more in between."""
    consumer = Consumer(filled, "t", group_id="g", auto_commit=False)
    consumer.poll(max_records=5)
    later: list[Callable[[], None]] = []
    with monkeypatch.context() as patch:
        patch.setattr(consumer._coordinator, "in_background", later.append)
        consumer.commit_later({T0: 1})
        consumer.commit_later({T1: 1})
    with Consumer(filled, "t", group_id="g", auto_commit=False) as other:
        eventually(lambda: other.assignment() and consumer.assignment(), consumer, other)
        (moved,) = other.assignment()
        other.commit({moved: 7})
    eventually(lambda: consumer.assignment() == [T0, T1], consumer)
    for act in later if moved == T1 else reversed(later):
        if act is later[moved.partition]:
            with pytest.raises(RebalanceError) as caught:
                act()
            assert caught.value.code == "ILLEGAL_GENERATION"
        else:
            act()
    committed = {tp: each.offset for tp, each in Groups(filled).committed("g").items()}
    assert committed == {T0: 1, T1: 1, moved: 7}
    consumer.close()


@pytest.mark.parametrize("why", ["put out", "store closed"])
def test_a_commit_that_close_cannot_make_is_logged(
    filled: Store, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    consumer = Consumer(filled, "t", group_id="g")
    consumer.poll(max_records=5)
    if why == "put out":
        Groups(filled).remove_member("g", member_id=consumer.member_id)
    else:
        filled.close()
    consumer.close()
    (message,) = caplog.messages
    assert "g: not committed on closing" in message
    assert "t-0" in message or "t-1" in message


def test_close_logs_nothing_when_nothing_is_left_to_commit(
    filled: Store, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = Consumer(filled, "t", group_id="g")
    consumer.poll()
    consumer.commit()
    filled.close()
    consumer.close()
    assert caplog.messages == []


def test_a_consumer_that_is_interrupted_while_it_is_made_is_dropped_quietly(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: unraisable.append(hook.exc_value))
    gc.freeze()  # each collection looks at new objects only
    try:
        for place in itertools.count(1):
            with contextlib.suppress(KeyboardInterrupt):
                if not interrupt_at(place, lambda: Consumer(filled, "t", group_id="g")):
                    break
            gc.collect()
            assert unraisable == [], place
    finally:
        gc.unfreeze()
    assert place > 20


def test_offsets_can_be_committed_in_on_revoked_on_closing(filled: Store) -> None:
    consumer = Consumer(filled, "t", group_id="g", auto_commit=False,
                        on_revoked=lambda held: consumer.commit())  # fmt: skip
    assert len(consumer.poll()) == 20
    consumer.close()
    assert consumer.closed
    assert [each.offset for each in Groups(filled).committed("g").values()] == [10, 10]


@pytest.mark.parametrize("assignor", ["cooperative-sticky", "range"])
@pytest.mark.parametrize("callback", ["on_revoked", "on_assigned"])
def test_a_callback_that_raises_keeps_nobody_from_its_share(
    store: Store, assignor: str, callback: str
) -> None:
    store.create_topic("four", partitions=4)
    told: list[list[TopicPartition]] = []
    armed = False

    def fails_once(partitions: list[TopicPartition]) -> None:
        nonlocal armed
        told.append(partitions)
        if armed:
            armed = False
            raise LookupError("the user's own")

    options: dict[str, Any] = {"assignor": assignor, "group_id": "g", "timeout": 0}
    with (
        Consumer(store, "four", **{callback: fails_once}, **options) as first,
        Consumer(store, "four", **options) as second,
    ):
        eventually(lambda: len(first.assignment()) == 4, first)
        told.clear()
        armed = True
        second.poll()
        if assignor == "cooperative-sticky" and callback == "on_assigned":
            eventually(lambda: len(first.assignment()) == 2, first, second)
            second.close()
        with pytest.raises(LookupError):
            eventually(lambda: False, first, second)
        if second.closed:
            eventually(lambda: len(first.assignment()) == 4, first)
        else:
            eventually(
                lambda: len(first.assignment()) == len(second.assignment()) == 2, first, second
            )
        assert len({tp for each in told for tp in each}) == sum(map(len, told)), "told twice"


def test_what_is_given_back_is_told_even_if_it_cannot_be_committed(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoked: list[TopicPartition] = []
    with (
        Consumer(filled, "t", group_id="g", timeout=0, on_revoked=revoked.extend) as first,
        Consumer(filled, "t", group_id="g", timeout=0) as second,
    ):
        assert len(first.poll()) == 20
        second.poll()
        with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):

            def full(*_: object, **__: object) -> None:
                raise OSError("the disk is full")

            patch.setattr(first._coordinator, "commit", full)
            eventually(lambda: False, first)
        assert len(revoked) == 1
        eventually(lambda: second.assignment() == revoked, first, second)


def test_a_topic_that_is_left_is_given_back_before_others_get_it(filled: Store) -> None:
    """A consumer that subscribes to fewer topics joins again: others get the rest at once."""
    filled.create_topic("u")
    owners = Owners()
    with (
        Consumer(filled, "t", group_id="g", timeout=0, **owners.callbacks("a")) as first,
        Consumer(filled, "t", "u", group_id="g", timeout=0, **owners.callbacks("b")) as second,
    ):
        eventually(lambda: len(owners.of) == 3, first, second)
        assert "a" in owners.of.values()
        first.subscribe("u")
        assert "a" not in owners.of.values()
        assert first._membership is not None
        first._membership.join("somebody came")
        for _ in range(5):
            second.poll()
        first.poll()
        assert owners.twice == []
        eventually(lambda: sorted(owners.of)[:2] == [T0, T1] and len(owners.of) == 3, first, second)


def test_an_assignment_of_topics_that_were_left_is_not_read(filled: Store) -> None:
    filled.create_topic("u")
    told: list[TopicPartition] = []
    with Consumer(filled, "t", group_id="g", timeout=0, on_assigned=told.extend) as consumer:
        assert consumer._membership is not None
        consumer._membership.join("somebody came")
        consumer.subscribe("u")
        eventually(lambda: consumer.assignment() == [TopicPartition("u", 0)], consumer)
    assert told == [TopicPartition("u", 0)]


LONG, LONE = "x" * 32_768, "\ud800"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"group_id": 5}, TypeError),
        ({"group_id": b"g"}, TypeError),
        ({"group_id": ""}, ConfigError),
        ({"group_id": LONG}, ConfigError),
        ({"group_id": LONE}, ConfigError),
        ({"instance_id": 5}, TypeError),
        ({"instance_id": ""}, ConfigError),
        ({"instance_id": LONG[40:]}, None),
        ({"instance_id": LONG[30:]}, ConfigError),
        ({"client_id": b"c"}, TypeError),
        ({"client_id": LONE}, ConfigError),
        ({"client_id": LONG[40:]}, None),
        ({"client_id": LONG[30:]}, ConfigError),
        ({"session_timeout": float("inf")}, ConfigError),
        ({"session_timeout": "5"}, TypeError),
        ({"heartbeat_interval": float("inf")}, ConfigError),
        ({"rebalance_timeout": float("inf")}, ConfigError),
        ({"rebalance_timeout": float("nan")}, ConfigError),
        ({"rebalance_timeout": 2_147_483}, None),
        ({"auto_commit_interval": float("inf")}, None),
    ],
)
def test_what_a_member_says_of_itself_is_checked(
    filled: Store, given: dict[str, Any], error: type[Exception] | None
) -> None:
    if error is None:
        with Consumer(filled, "t", **{"group_id": "g", **given}) as consumer:
            assert len(consumer.poll(timeout=0)) == 20
    else:
        with pytest.raises(error, match=next(iter(given))):
            Consumer(filled, "t", **{"group_id": "g", **given})
        assert Groups(filled).names() == []


def test_partitions_are_assigned_by_their_own_numbers(filled: Store) -> None:
    with Consumer(filled) as consumer, pytest.raises(IndexError, match="no partition -1"):
        consumer.assign([("t", -1)])
