"""Readers of a log that is truncated below their position: an error with the new end, no gap."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

import logstore
from logstore import (
    Consumer,
    LogTruncatedError,
    Partition,
    Producer,
    Record,
    Store,
    TopicPartition,
)
from logstore.recovery.truncation_plan import TruncationPlan
from tests.conftest import MakeLog
from tests.kit import committed

T0 = TopicPartition("t", 0)
ISOLATIONS = ("read_uncommitted", "read_committed")


def truncated_to(records: Iterator[Record]) -> int:
    """Return the end of the log that the next read of an iteration reports."""
    with pytest.raises(LogTruncatedError) as caught:
        next(records)
    return caught.value.truncated_to


def fill(log: Partition, generation: bytes, count: int) -> None:
    log.extend([Record(b"%s-%d" % (generation, n)) for n in range(count)])


def offsets(records: Iterator[Record], count: int) -> list[int]:
    return [next(records).offset for _ in range(count)]


@pytest.fixture(params=["same process", "other process"])
def pair(make_log: MakeLog, request: pytest.FixtureRequest) -> tuple[Partition, Partition]:
    """A writer, and a handle to read from: its own, or one that knows only the files."""
    writer = make_log()
    if request.param == "same process":
        return writer, writer
    fill(writer, b"old", 0)
    return writer, make_log(readonly=True)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_follower_past_a_cut_gets_the_new_end(
    pair: tuple[Partition, Partition], isolation: str
) -> None:
    writer, log = pair
    fill(writer, b"old", 10)
    records = iter(log.scan(follow=True, timeout=5, isolation=isolation))
    assert offsets(records, 10) == list(range(10))
    writer.truncate(5)
    fill(writer, b"new", 20)
    with pytest.raises(LogTruncatedError) as caught:
        next(records)
    error = caught.value
    assert (error.offset, error.truncated_to, error.start, error.end) == (10, 5, 0, 25)
    assert "truncated to offset 5" in str(error)
    assert [record.value for record in log.scan(error.truncated_to, 7)] == [b"new-0", b"new-1"]
    writer.check()


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("segment_bytes", [1 << 20, 1 << 30])
def test_a_follower_below_a_cut_reads_on(
    make_log: MakeLog, isolation: str, segment_bytes: int
) -> None:
    log = make_log(segment_bytes=segment_bytes)
    for _ in range(20):
        log.append(b"old" * 100_000)  # more than a scan reads ahead
    records = iter(log.scan(follow=True, timeout=0, isolation=isolation))
    assert offsets(records, 3) == [0, 1, 2]
    log.truncate(15)
    fill(log, b"new", 5)
    found = list(records)
    assert [record.offset for record in found] == list(range(3, 20))
    assert [record.value for record in found[12:]] == [b"new-%d" % n for n in range(5)]


def test_a_follower_at_the_cut_reads_on(pair: tuple[Partition, Partition]) -> None:
    writer, log = pair
    fill(writer, b"old", 5)
    records = iter(log.scan(follow=True, timeout=5))
    assert offsets(records, 5) == list(range(5))
    fill(writer, b"old", 5)
    writer.truncate(5)
    fill(writer, b"new", 5)
    assert next(records).value in (b"new-0", b"old-0")  # it may have read ahead


def test_the_lowest_of_many_cuts_counts(pair: tuple[Partition, Partition]) -> None:
    writer, log = pair
    fill(writer, b"old", 10)
    records = iter(log.scan(follow=True, timeout=5))
    assert offsets(records, 10) == list(range(10))
    for end in (8, 3, 7):
        writer.truncate(end)
        fill(writer, b"new", 10)
    assert truncated_to(records) == 3


def test_a_reader_that_missed_too_many_cuts_starts_over(make_log: MakeLog) -> None:
    writer = make_log()
    fill(writer, b"old", 10)
    records = iter(make_log(readonly=True).scan(follow=True, timeout=5))
    assert offsets(records, 10) == list(range(10))
    for _ in range(40):
        writer.truncate(9)
        fill(writer, b"new", 1)
    assert truncated_to(records) == 0


def test_a_waiting_follower_is_woken_by_a_cut(pair: tuple[Partition, Partition]) -> None:
    writer, log = pair
    fill(writer, b"old", 10)
    caught: list[BaseException] = []
    reached = threading.Event()

    def follow() -> None:
        try:
            for record in log.scan(follow=True):
                if record.offset == 9:
                    reached.set()
        except LogTruncatedError as error:
            caught.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    assert reached.wait(30)
    writer.truncate(4)
    thread.join(30)
    alive = thread.is_alive()
    if alive:
        fill(writer, b"new", 10)
        writer.close()
        log.close()
        thread.join()
    assert not alive
    assert [error.truncated_to for error in caught] == [4]  # type: ignore[attr-defined]


def test_columns_of_a_follower_past_a_cut(log: Partition) -> None:
    fill(log, b"old", 10)
    chunks = log.scan(follow=True, timeout=5).columns()
    assert list(next(chunks).offsets) == list(range(10))
    log.truncate(5)
    fill(log, b"new", 20)
    with pytest.raises(LogTruncatedError):
        next(chunks)


def test_a_cut_that_opening_finishes_is_seen_by_a_reader(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = make_log()
    fill(writer, b"old", 10)
    reader = make_log(readonly=True)
    records = iter(reader.scan(follow=True, timeout=5))
    assert offsets(records, 10) == list(range(10))

    def stopped(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(TruncationPlan, "apply", stopped)
        with pytest.raises(MemoryError) as failure:
            writer.truncate(5)
    failure.value.__traceback__ = None  # the writer keeps the error, and so this frame
    writer.close()
    writer = make_log()
    assert writer.end_offset == 5
    fill(writer, b"new", 20)
    assert truncated_to(records) == 5


def test_opening_again_is_no_cut(make_log: MakeLog) -> None:
    writer = make_log()
    fill(writer, b"old", 10)
    writer.truncate(8)
    reader = make_log(readonly=True)
    records = iter(reader.scan(follow=True, timeout=5))
    assert offsets(records, 8) == list(range(8))
    writer.close()
    writer = make_log()
    fill(writer, b"new", 5)
    assert next(records).value == b"new-0"


# ---- consumers ----


def by_poll(consumer: Consumer) -> list[bytes]:
    return [record.value for record in consumer.poll(timeout=0)]


def by_loop(consumer: Consumer) -> list[bytes]:
    return [record.value for record in consumer]


@pytest.mark.parametrize("start", ["earliest", "latest"])
@pytest.mark.parametrize("read", [by_poll, by_loop])
def test_a_consumer_past_a_cut_is_reset_and_misses_nothing(
    store: Store, read: Callable[[Consumer], list[bytes]], start: str
) -> None:
    log = store.create_topic("t")[0]
    with Consumer(store, "t", start=start, timeout=0) as consumer:
        assert read(consumer) == []
        fill(log, b"old", 10)
        assert len(read(consumer)) == 10
        log.truncate(5)
        fill(log, b"new", 20)
        kept = [b"old-%d" % n for n in range(5)] if start == "earliest" else []
        assert read(consumer) == kept + [b"new-%d" % n for n in range(20)]
        assert consumer.position(T0) == 25


@pytest.mark.parametrize("read", [by_poll, by_loop])
def test_a_consumer_without_a_reset_policy_gets_the_error(
    store: Store, read: Callable[[Consumer], list[bytes]]
) -> None:
    log = store.create_topic("t")[0]
    fill(log, b"old", 10)
    with Consumer(store, start="none", timeout=0) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 0)
        assert len(read(consumer)) == 10
        log.truncate(5)
        fill(log, b"new", 20)
        for _ in range(2):
            with pytest.raises(LogTruncatedError) as caught:
                read(consumer)
            assert caught.value.truncated_to == 5
        consumer.seek(T0, 5)
        assert len(read(consumer)) == 20


def test_a_cut_in_the_middle_of_a_loop_is_noticed(store: Store) -> None:
    log = store.create_topic("t")[0]
    fill(log, b"old", 10)
    seen: list[bytes | None] = []
    with Consumer(store, start="latest", timeout=0) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 0)
        for record in consumer:
            seen.append(record.value)
            if seen == [b"old-%d" % n for n in range(8)]:
                log.truncate(5)
                fill(log, b"new", 20)
    read_ahead = len([value for value in seen if value in (b"old-8", b"old-9")])
    assert seen[8 + read_ahead :] == [b"new-%d" % n for n in range(20)]


def test_a_consumer_of_another_process_past_a_cut_reads_on_at_the_cut(store: Store) -> None:
    log = store.create_topic("t")[0]
    fill(log, b"old", 10)
    with (
        logstore.open(store.path, readonly=True) as beside,
        Consumer(beside, start="latest", timeout=0) as consumer,
    ):
        consumer.assign([T0])
        consumer.seek(T0, 0)
        assert len(by_poll(consumer)) == 10
        log.truncate(5)
        fill(log, b"new", 20)
        assert by_poll(consumer) == [b"new-%d" % n for n in range(20)]


# ---- transactions ----


def test_a_producer_whose_marker_was_cut_off_shows_nothing_of_what_it_aborted(store: Store) -> None:
    log = store.create_topic("t")[0]

    with Producer(store, "id") as producer:
        with contextlib.suppress(KeyError), producer.transaction():
            producer.append("t", b"aborted")
            raise KeyError
        assert log.end_offset == 2
        log.truncate(1)
        with producer.transaction():
            producer.send("t", b"kept")
        assert committed(log) == [b"kept"]
        with logstore.open(store.path, readonly=True) as beside:
            assert committed(beside["t"][0]) == [b"kept"]
    assert log.check() == []
    store.close()
    with logstore.open(store.path) as again:
        assert committed(again["t"][0]) == [b"kept"]
        assert again["t"][0].check() == []
