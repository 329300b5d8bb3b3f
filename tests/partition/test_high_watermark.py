"""The high watermark of a replicated log: every reader stops there, replicas read to the end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from logstore import (
    Consumer,
    OffsetOutOfRangeError,
    Partition,
    PartitionConfig,
    RetentionPolicy,
    Store,
)
from logstore.format.batch import BatchHeader
from logstore.testing import ReferenceRecord, encode_batch
from tests.conftest import MakeLog
from tests.kit import PATIENCE, join, values, wait_until
from tests.machines import PartitionMachine

NOW = 1_700_000_000_000
UNLIMITED = 1 << 30
TINY = PartitionConfig(segment_bytes=1 << 14, index_interval_bytes=100)


def batch(*values: bytes, **options: Any) -> bytes:
    return encode_batch([ReferenceRecord(value, timestamp=NOW) for value in values], **options)


def watermark(log: Partition, offset: int | None) -> None:
    log.parts.view.set_high_watermark(offset)


def filled(make_log: MakeLog, count: int = 10) -> Partition:
    """Records 0 to count - 1; the key is the last digit, the time is the offset."""
    log = make_log()
    for n in range(count):
        log.append(b"%d" % n, key=b"%d" % (n % 3), timestamp=NOW + n)
    return log


def test_a_log_without_one_shows_everything(log: Partition) -> None:
    log.extend([b"a", b"b"])
    assert log.high_watermark == log.end_offset == 2
    assert log.parts.view.high_watermark is None


def test_every_way_of_reading_stops_there(make_log: MakeLog) -> None:
    log = filled(make_log)
    watermark(log, 6)
    expected = [b"%d" % n for n in range(6)]
    assert (log.high_watermark, log.end_offset, log.last_stable_offset) == (6, 10, 6)
    assert values(log) == values(log.scan()) == values(log[0:]) == expected
    assert values(log.scan(2, 9)) == expected[2:]
    assert values(log.scan(isolation="read_committed")) == expected
    assert log.scan().to_arrow().column("value").to_pylist() == expected
    assert values(log[-2:]) == values(log.tail(2)) == expected[-2:]
    assert log[-1].value == b"5" and log[5].value == b"5"
    with pytest.raises(OffsetOutOfRangeError, match=r"\[0, 6\)"):
        log[6]
    assert values(log.scan(6)) == []
    found = [log.get(b"%d" % n) for n in range(3)]
    assert [record and record.value for record in found] == [b"3", b"4", b"5"]
    assert log.offset_for_time(NOW + 5) == 5
    assert log.offset_for_time(NOW + 7) == 6
    reader = log.parts.reader
    assert reader.find_time(NOW + 7) is None
    assert len(log.read_batches(0, UNLIMITED)) == 6
    assert log.read_batches(6) == log.read_batches(9) == []
    found_slice = reader.read_slice(0, UNLIMITED)
    assert found_slice is not None and found_slice.end_offset == 6
    assert reader.read_slice(6, UNLIMITED) is None


def test_a_replica_reads_to_the_end(make_log: MakeLog) -> None:
    log = filled(make_log)
    watermark(log, 6)
    reader = log.parts.reader
    found = reader.read_slice(3, UNLIMITED, isolation="log_end")
    assert found is not None and found.end_offset == 10
    assert len(reader.read_batches(3, UNLIMITED, isolation="log_end")) == 7
    assert len(values(reader.scan(isolation="log_end"))) == 10
    assert reader.wait_beyond(9, 0.0, isolation="log_end")
    assert not reader.wait_beyond(6, 0.0)


def test_a_batch_across_it_is_not_read(log: Partition) -> None:
    for _ in range(3):
        log.append_batch(batch(b"a", b"b", b"c"))
    watermark(log, 4)
    assert len(values(log)) == 4
    assert [BatchHeader.parse(raw).base_offset for raw in log.read_batches(0)] == [0]
    assert [BatchHeader.parse(raw).base_offset for raw in log.scan().batches()] == [0]
    found = log.parts.reader.read_slice(0, UNLIMITED)
    assert found is not None and found.end_offset == 3
    assert log.parts.reader.read_slice(3, UNLIMITED) is None


def test_it_is_inside_of_the_log(make_log: MakeLog) -> None:
    log = filled(make_log)
    watermark(log, 8)
    log.trim(3)
    for wrong in (2, 11):
        with pytest.raises(OffsetOutOfRangeError):
            watermark(log, wrong)
    assert log.high_watermark == 8
    watermark(log, 3)
    watermark(log, 10)
    assert log.high_watermark == 10
    log.append(b"x")
    assert log.high_watermark == 10
    watermark(log, None)
    assert log.high_watermark == 11 == log[-1].offset + 1


def test_records_above_it_are_not_trimmed(make_log: MakeLog) -> None:
    log = filled(make_log)
    watermark(log, 6)
    with pytest.raises(OffsetOutOfRangeError):
        log.trim(7)
    log.trim(6)
    assert (log.start_offset, log.end_offset) == (6, 10)


def test_retention_keeps_what_is_above_it(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1 << 14)
    for n in range(2000):
        log.append(b"x" * 100, timestamp=NOW + n)
    ends = [segment.end_offset for segment in log.segments]
    watermark(log, ends[1] + 1)
    log.enforce(RetentionPolicy(max_bytes=0))
    assert log.start_offset == ends[1]


def test_setting_it_wakes_a_scan_that_follows(make_log: MakeLog) -> None:
    log = filled(make_log)
    watermark(log, 4)
    seen: list[int] = []

    def follow() -> None:
        for record in log.scan(follow=True, max_records=9, timeout=PATIENCE):
            seen.append(record.offset)

    thread = threading.Thread(target=follow)
    thread.start()
    wait_until(lambda: len(seen) == 4)
    log.append(b"x")
    watermark(log, 7)
    wait_until(lambda: len(seen) == 7)
    watermark(log, 11)
    join([thread])
    assert seen == list(range(9))


def test_a_scan_that_follows_already_stops_at_the_first_one(log: Partition) -> None:
    log.append(b"0")
    records = iter(log.scan(follow=True, timeout=PATIENCE))
    assert next(records).offset == 0
    watermark(log, 1)
    threading.Timer(0.05, lambda: (log.append(b"1"), log.append(b"2"))).start()
    threading.Timer(0.3, lambda: watermark(log, 2)).start()
    assert next(records).offset == 1
    assert log.high_watermark == 2


def test_setting_it_calls_the_listeners(make_log: MakeLog) -> None:
    log = filled(make_log)
    heard: list[int] = []
    view = log.parts.view

    def hear() -> None:
        heard.append(view.limit)

    view.listen(hear)
    watermark(log, 3)
    watermark(log, 5)
    view.unlisten(hear)
    assert heard == [3, 5]


def test_the_last_stable_offset_is_at_most_the_watermark(log: Partition) -> None:
    log.append(b"plain")
    producer = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    log.append_batch(batch(b"a", b"b", base_sequence=0, **producer))
    watermark(log, 1)
    assert log.last_stable_offset == 1
    watermark(log, 3)
    assert log.last_stable_offset == 1  # the transaction is open
    log.end_transaction(7, 0, commit=True)
    assert log.last_stable_offset == 3  # its marker is above the watermark
    watermark(log, 4)
    assert log.last_stable_offset == 4


def test_a_consumer_reads_below_it_and_waits_above(store: Store) -> None:
    log = store.create_topic("t")[0]
    log.extend([b"%d" % n for n in range(6)])
    watermark(log, 4)
    with Consumer(store) as consumer:
        consumer.assign([("t", 0)])
        consumer.seek_to_beginning()
        assert len(consumer.poll(timeout=0)) == 4
        assert consumer.poll(timeout=0) == []
        assert [lag.records for lag in consumer.lag().values()] == [0]
        watermark(log, 6)
        assert len(consumer.poll(timeout=PATIENCE)) == 2


def test_a_truncation_lowers_it(make_log: MakeLog) -> None:
    log = filled(make_log)
    watermark(log, 8)
    assert log.parts.cutter.truncate(9) == 9
    assert log.high_watermark == 8
    log.parts.cutter.truncate(5)
    assert log.high_watermark == log.end_offset == 5


# ---- whole batches ----


def test_a_batch_across_a_cut_is_removed_whole(make_log: MakeLog) -> None:
    log = make_log()
    for _ in range(3):
        log.append_batch(batch(b"a", b"b", b"c"))
    before = log.read_batches(0, UNLIMITED)
    assert log.parts.cutter.truncate(7, whole_batches=True) == 6
    assert log.end_offset == 6
    assert log.read_batches(0, UNLIMITED) == before[:2]
    assert log.parts.cutter.truncate(6, whole_batches=True) == 6
    assert log.parts.cutter.truncate(1, whole_batches=True) == 0
    assert log.append(b"x") == 0
    assert not log.check()


def test_a_cut_inside_of_the_first_batch_keeps_the_start(make_log: MakeLog) -> None:
    log = make_log()
    log.append_batch(batch(*[b"x"] * 10))
    log.trim(4)
    assert log.parts.cutter.truncate(7, whole_batches=True) == 4
    assert (log.start_offset, log.end_offset) == (4, 4)
    assert values(log) == []
    log.close()
    again = make_log()
    assert (again.start_offset, again.end_offset) == (4, 4)
    assert again.append(b"y") == 4
    assert values(again) == [b"y"]


def test_an_epoch_without_a_record_is_removed_though_nothing_is_cut(log: Partition) -> None:
    log.append(b"a")
    log.become_leader(4)
    assert log.leader_epochs.entries == [(0, 0), (4, 1)]
    assert log.parts.cutter.truncate(1, whole_batches=True) == 1
    assert log.leader_epochs.entries == [(0, 0)]
    assert log.leader_epoch == 4  # the promise stays


# ---- any history ----


class WatermarkMachine(PartitionMachine):
    """Batches of one to four records; after each step every reader sees what the model has."""

    def __init__(self) -> None:
        super().__init__()
        self.log = Partition.open(self.path, durability="os", config=TINY)
        self.batches: list[tuple[int, int]] = []  # (base, next offset)
        self.start = self.end = 0
        self.mark: int | None = None

    @rule(count=st.integers(1, 4), size=st.sampled_from([1, 1500]))
    def append(self, count: int, size: int) -> None:
        offsets = self.log.append_batch(batch(*[b"x" * size] * count)).offsets
        assert offsets == range(self.end, self.end + count)
        self.batches.append((self.end, self.end + count))
        self.end += count

    @rule(share=st.floats(0, 1), clear=st.integers(0, 9))
    def move(self, share: float, clear: int) -> None:
        self.mark = None if clear == 0 else self.start + round(share * (self.end - self.start))
        watermark(self.log, self.mark)

    @rule(share=st.floats(0, 1))
    def cut(self, share: float) -> None:
        wanted = self.start + round(share * (self.end - self.start))
        straddled = [base for base, stop in self.batches if base < wanted < stop]
        expected = max(straddled[0] if straddled else wanted, self.start)
        assert self.log.parts.cutter.truncate(wanted, whole_batches=True) == expected
        self.end = expected
        self.batches = [each for each in self.batches if each[1] <= expected]
        if self.mark is not None:
            self.mark = min(self.mark, expected)

    @rule(share=st.floats(0, 1))
    def trim(self, share: float) -> None:
        self.start += round(share * (self.stop - self.start))
        self.log.trim(self.start)

    @rule()
    @precondition(lambda self: self.end > self.start)
    def reopen(self) -> None:
        self.log.close()
        self.log = Partition.open(self.path, durability="os", config=TINY)
        self.mark = None

    def teardown(self) -> None:
        if not self.log.closed:
            watermark(self.log, None)  # the invariants compare readers with the files
        super().teardown()

    @property
    def stop(self) -> int:
        return self.end if self.mark is None else self.mark

    @invariant()
    def readers_see_the_model(self) -> None:
        log, stop = self.log, self.stop
        assert (log.start_offset, log.high_watermark, log.end_offset) == (
            self.start,
            stop,
            self.end,
        )
        offsets = list(range(self.start, stop))
        assert [record.offset for record in log] == offsets
        assert [record.offset for record in log.tail(3)] == offsets[-3:]
        if offsets:
            assert log[-1].offset == stop - 1
        whole = [base for base, end in self.batches if end > self.start and end <= stop]
        assert [BatchHeader.parse(raw).base_offset for raw in log.scan().batches()] == whole
        found = log.read_batches(self.start, UNLIMITED)
        assert [BatchHeader.parse(raw).base_offset for raw in found] == whole


def test_readers_stop_at_the_watermark_in_any_history() -> None:
    run_state_machine_as_test(
        WatermarkMachine, settings=settings(max_examples=30, stateful_step_count=20)
    )
