"""Rolling, and the two indexes: Kafka's rules, case by case.

The cases are those that Kafka's own tests check.
"""

from __future__ import annotations

import gzip
import os
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from logstore import ManualClock, OffsetIndex, Partition, Record, TimeIndex, _native
from logstore.testing import Fault, inject_io
from logstore.testing.reference import ReferenceRecord, encode_batch
from tests.conftest import MakeLog
from tests.kit import bases

DAY = 86_400_000


# ---- rolling ----


def test_roll_by_size(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    for _ in range(10):
        log.append(b"x" * 400)
    assert bases(log) == [0, 2, 4, 6, 8]
    assert all(segment.size_bytes <= 1024 for segment in log.segments)
    assert [segment.sealed for segment in log.segments] == [True] * 4 + [False]
    assert all(a.end_offset == b.base_offset for a, b in pairwise(log.segments))


def test_roll_by_the_time_of_records_not_of_the_clock(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    log = make_log(clock=fake_clock, segment_ms=DAY)
    log.append(b"a", timestamp=1000)
    fake_clock.advance(30 * DAY)
    log.append(b"b", timestamp=1000 + DAY)
    assert bases(log) == [0], "the clock alone rolls nothing, nor does the very end of the time"
    log.append(b"c", timestamp=1001 + DAY)
    assert bases(log) == [0, 2]
    log.append(b"d", timestamp=5)
    assert bases(log) == [0, 2], "older records do not roll"


def test_jitter_makes_rolls_by_time_earlier(make_log: MakeLog, fake_clock: ManualClock) -> None:
    log = make_log(clock=fake_clock, segment_ms=1000, segment_jitter_ms=1000)
    log.append(b"a", timestamp=0)
    log.append(b"b", timestamp=1001)
    assert bases(log) == [0, 1]


def test_roll_when_an_index_is_full(make_log: MakeLog) -> None:
    log = make_log(segment_index_bytes=80, index_interval_bytes=0)
    for i in range(30):
        log.append(b"x", timestamp=i)
    assert len(log.segments) > 3
    assert all(len(s.offset_index) <= 10 for s in log.segments)
    assert all(len(s.time_index) <= 6 for s in log.segments)
    by_offsets = make_log("same-time-0", segment_index_bytes=80, index_interval_bytes=0)
    for _ in range(30):
        by_offsets.append(b"x", timestamp=7)
    assert bases(by_offsets) == [0, 11, 22], "entry 0 needs no index: ten more fill it"


def test_roll_before_a_relative_offset_overflows(tmp_path: Path) -> None:
    """A record whose offset is too far from the base offset is the first of a new segment."""
    path = tmp_path / "orders-0"
    path.mkdir()
    last = (1 << 31) - 2  # one more fits relative to base 0
    record = ReferenceRecord(offset=last, timestamp=1, key=b"k", value=b"far", headers=())
    (path / f"{0:020d}.log").write_bytes(encode_batch([record], base_offset=last))
    with Partition.open(path, durability="os") as log:
        assert log.append(b"fits", timestamp=1) == last + 1
        assert bases(log) == [0]
        assert log.append(b"does not", timestamp=1) == last + 2
        assert bases(log) == [0, last + 2]
        assert [r.value for r in log] == [b"far", b"fits", b"does not"]


def test_an_explicit_roll_of_an_empty_segment_is_nothing(log: Partition) -> None:
    """There is still one segment, and appends work."""
    log.roll()
    assert bases(log) == [0]
    log.append(b"a")
    log.roll()
    log.roll()
    assert bases(log) == [0, 1]
    log.append(b"b")
    assert log[1].value == b"b"


def test_an_empty_file_in_the_way_of_a_roll_is_used(log: Partition) -> None:
    log.append(b"a")
    (log.path / f"{1:020d}.log").touch()
    log.roll()
    assert log.append(b"b") == 1


def test_a_file_with_data_in_the_way_of_a_roll_is_not_overwritten(log: Partition) -> None:
    log.append(b"a")
    stranger = log.path / f"{1:020d}.log"
    stranger.write_bytes(b"someone's data")
    with pytest.raises(FileExistsError):
        log.roll()
    assert stranger.read_bytes() == b"someone's data"
    stranger.unlink()
    assert log.append(b"b") == 1


# ---- reading over segments ----


def test_read_at_the_gap_between_segments(make_log: MakeLog) -> None:
    """The segment with the next lower base ends before the offset; the next one has the record."""
    log = make_log()
    log.append(b"a")
    log.roll()
    log.append(b"b")
    assert [record.offset for record in log.scan(1)] == [1]
    assert log[1].value == b"b"


def test_read_batches_gives_at_least_one(log: Partition) -> None:
    """A batch that is larger than the limit is returned whole."""
    log.append(b"x" * 1000)
    assert [len(batch) for batch in log.read_batches(0, max_bytes=1)] == [
        log.segments[0].size_bytes
    ]


def test_reading_outside_the_log(make_log: MakeLog) -> None:
    """A read at the end is empty; a read after the end or before the start is an error."""
    log = make_log()
    log.extend([b"x"] * 1025)
    log.trim(1024)
    assert [record.offset for record in log.scan(1024)] == [1024]
    assert log.read_batches(1025) == []
    for offset in (0, 1023, 1026):
        with pytest.raises(IndexError):
            log.read_batches(offset)
    for offset in (0, 1023, 1025):
        with pytest.raises(IndexError):
            log[offset]


def test_rolled_indexes_are_trimmed_to_their_entries(make_log: MakeLog) -> None:
    """An index file of a rolled segment holds its entries and no preallocated bytes."""
    log = make_log(index_interval_bytes=100)
    for i in range(50):
        log.append(b"x" * 40, timestamp=i)
    log.roll()
    first = log.segments[0]
    index = first.path.with_suffix(".index").read_bytes()
    times = first.path.with_suffix(".timeindex").read_bytes()
    assert index == first.offset_index.entries
    assert times == first.time_index.entries
    assert len(first.offset_index) > 10
    assert first.time_index.last_entry == (49, 49)
    log.truncate(0)
    assert bases(log) == [0]
    log.extend([b"y"] * 10)
    assert bases(log) == [0]


def test_the_worked_example_of_index_entries(make_log: MakeLog) -> None:
    """Batches of 3000 bytes and an interval of 4096: entries at the third, fifth, ..."""
    log = make_log(index_interval_bytes=4096)
    for first in range(0, 60, 10):
        fill = b"x" * ((3000 - 61) // 10 - 9)
        log.extend([fill] * 9 + [fill + b"x" * ((3000 - 61) - 10 * (len(fill) + 9) + 0)])
        del first
    size = log.segments[0].size_bytes // 6
    assert list(log.segments[0].offset_index) == [(29, 2 * size), (49, 4 * size)]
    assert log.segments[0].offset_index.lookup(35) == (29, 2 * size)
    assert log.segments[0].offset_index.lookup(25) == (0, 0)


@pytest.mark.parametrize("end", [0, 1, 2])
def test_truncate_at_a_gap_and_to_nothing(make_log: MakeLog, end: int) -> None:
    """Records below the cut stay, those above are deleted, and an emptied segment takes appends."""
    log = make_log(index_interval_bytes=0)
    for i in range(3):
        log.append(b"%d" % i, timestamp=i)
    log.truncate(end)
    assert [record.value for record in log] == [b"%d" % i for i in range(end)]
    segment = log.segments[-1]
    assert segment.max_timestamp == end - 1
    assert not segment.offset_index.full
    assert log.append(b"again", timestamp=9) == end
    assert log.offset_for_time(9) == end


# ---- the index objects ----


def test_offset_index_look_ups_at_the_extremes() -> None:
    """An offset below the first entry, at the last and above it."""
    index = OffsetIndex(100, max_bytes=40)
    assert index.lookup(0) == index.lookup(500) == (100, 0)
    assert index.last_offset == 100
    for offset, position in ((103, 10), (105, 20), (110, 30)):
        index.append(offset, position)
    assert index.lookup(102) == (100, 0)
    assert index.lookup(103) == index.lookup(104) == (103, 10)
    assert index.lookup(1 << 60) == (110, 30)
    assert index.upper_bound(20) == (105, 20)
    assert index.upper_bound(21) == (110, 30)
    assert index.upper_bound(31) is None
    index.truncate_to(200)
    assert len(index) == 3
    index.truncate_to(105)
    assert list(index) == [(103, 10)]
    index.truncate_to(100)
    assert list(index) == []


def test_offset_index_refuses_what_is_out_of_order_far_or_too_much() -> None:
    index = OffsetIndex(100, max_bytes=16)
    index.append(105, 1)
    for offset in (105, 104):
        with pytest.raises(ValueError, match="not above"):
            index.append(offset, 2)
    with pytest.raises(ValueError, match="too far"):
        OffsetIndex(0).append(1 << 31, 0)
    index.append(106, 2)
    assert index.full
    with pytest.raises(ValueError, match="full"):
        index.append(107, 3)


def test_time_index_keeps_a_slot_for_the_final_entry() -> None:
    """The entry for the largest time is added when the segment is sealed, even to a full index."""
    index = TimeIndex(0, max_bytes=36)
    assert index.last_entry == (-1, 0)
    index.maybe_append(10, 1)
    index.maybe_append(10, 2)
    assert list(index) == [(10, 1)], "an equal timestamp adds nothing"
    index.maybe_append(20, 5)
    assert index.full
    with pytest.raises(ValueError, match="full"):
        index.maybe_append(30, 6)
    index.maybe_append(30, 6, final=True)
    assert list(index) == [(10, 1), (20, 5), (30, 6)]
    assert index.lookup(9) == (-1, 0)
    assert index.lookup(20) == (20, 5)
    assert index.lookup(99) == (30, 6)
    with pytest.raises(ValueError, match="below"):
        index.maybe_append(40, 4, final=True)
    with pytest.raises(ValueError, match="below"):
        index.maybe_append(5, 9, final=True)
    index.truncate_to(6)
    assert list(index) == [(10, 1), (20, 5)]


def test_a_partial_last_entry_is_no_entry() -> None:
    assert len(OffsetIndex(0, b"\0" * 13)) == 1
    assert len(TimeIndex(0, b"\0" * 23)) == 1


# ---- the least time of a segment ----


def test_the_least_time_is_known_of_what_was_written_here(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "t-0", durability="os") as log:
        assert log.segments[0].min_timestamp is None
        log.extend([Record(b"x", timestamp=time) for time in (500, 300, 900)])
        log.append(b"y", timestamp=400)
        assert log.segments[0].min_timestamp == 300
        log.roll()
        assert log.segments[0].min_timestamp == 300 and log.segments[1].min_timestamp is None
        with log.writer(compression="lz4") as out:
            for time in (800, 700, 750):
                out.append(b"z", timestamp=time)
        assert log.segments[1].min_timestamp == 700
    with Partition.open(tmp_path / "t-0", durability="os") as log:
        assert [segment.min_timestamp for segment in log.segments] == [300, 700]
        log.append(b"older", timestamp=5)
        assert log.segments[1].min_timestamp == 5
    with Partition.open(tmp_path / "t-0", readonly=True) as log:
        assert [segment.min_timestamp for segment in log.segments] == [300, 5]


def test_the_least_time_of_raw_batches_is_known_unless_they_are_compressed(tmp_path: Path) -> None:
    def batch(*times: int, offset: int, **settings: int) -> bytes:
        records = [Record(b"x", timestamp=time) for time in times]
        return encode_batch(records, base_offset=offset, **settings)

    with Partition.open(tmp_path / "t-0", durability="os") as log:
        log.append_batch(batch(50, 20, 70, offset=0), origin="follower")
        assert log.segments[0].min_timestamp == 20
        log.append_batch(batch(90, 10, offset=3, append_time=60), origin="follower")
        assert log.segments[0].min_timestamp == 20, "the times of that batch are the log's"
        log.append_batch(batch(50, 10, offset=5, codec=3), origin="follower")
        assert log.segments[0].min_timestamp is None


def test_a_summary_of_another_size_or_with_a_flipped_byte_tells_nothing(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "t-0", durability="os") as log:
        log.append(b"x", timestamp=7)
    summary = tmp_path / "t-0" / f"{0:020}.summary"
    content = summary.read_bytes()
    for damaged in (content[:-5], content.replace(b"7", b"6"), b"", b"\xff" * 40, b"0 {}"):
        summary.write_bytes(damaged)
        with Partition.open(tmp_path / "t-0", readonly=True) as log:
            assert log.segments[0].min_timestamp is None
    summary.write_bytes(content)
    with (tmp_path / "t-0" / f"{0:020}.log").open("ab") as file:
        file.write(encode_batch([Record(b"y", timestamp=1)], base_offset=1))
    with Partition.open(tmp_path / "t-0", readonly=True) as log:
        assert log.end_offset == 2 and log.segments[0].min_timestamp is None


def test_summaries_go_with_their_segments(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "t-0", durability="os") as log:
        for _ in range(3):
            log.extend([Record(b"x", timestamp=7)] * 5)
            log.roll()
        log.truncate(7)
        assert [segment.min_timestamp for segment in log.segments] == [7, None]
        log.roll()
        log.trim(5)
        assert not (log.path / f"{0:020}.summary").exists()
    (tmp_path / "t-0" / f"{99:020}.summary").write_bytes(b"an orphan")
    (tmp_path / "t-0" / "logstore.state").unlink()
    with Partition.open(tmp_path / "t-0"):
        assert not (tmp_path / "t-0" / f"{99:020}.summary").exists()


# ---- descriptors ----


@pytest.mark.parametrize("readonly", [False, True])
def test_what_passes_all_segments_keeps_no_descriptor_of_them(
    make_log: MakeLog, readonly: bool
) -> None:
    """A log may have more segments than a process has descriptors."""
    with make_log(segment_bytes=1024) as log:
        for number in range(100):
            log.append(b"x" * 900, timestamp=1_700_000_000_000 + number)
    log = make_log(readonly=readonly)
    assert len(log.segments) == 100
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert log.offset_for_time(1_700_000_000_099) == 99
        assert log.offset_for_time(1_700_000_000_100) == 100
        assert log.check() == log.check(deep=False) == []
    assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_a_time_is_found_in_a_segment_that_was_passed_and_then_written_again(
    make_log: MakeLog,
) -> None:
    log = make_log()
    log.extend([Record(b"old", timestamp=1000)] * 4)
    log.roll()
    assert log.offset_for_time(2000) == 4
    log.truncate(2)
    log.append(b"new", timestamp=2000)
    log.roll()
    assert log.offset_for_time(2000) == 2


def test_an_index_file_longer_than_is_read_hides_no_record(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log(index_interval_bytes=0, segment_bytes=8000)
    for n in range(200):
        log.append(b"x" * 20, timestamp=1000 + n)
    log.close()
    monkeypatch.setattr("logstore.log.segment.INDEX_BYTES_READ", 0)
    log = make_log(segment_index_bytes=120)
    assert len(log.segments) > 1
    assert [log.offset_for_time(1000 + n) for n in range(200)] == list(range(200))


# ---- one record, while the file is cut ----


def test_a_record_of_a_verified_batch_is_not_mixed_with_bytes_after_a_cut(
    make_log: MakeLog, tmp_path: Path
) -> None:
    """The rest of a verified batch is read without a checksum, after its header."""
    log = make_log()
    for _ in range(2):
        log.extend([b"A" * 1000] * 15)
    assert log[8].value == log[20].value == b"A" * 1000, "the first batch is now a verified one"
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(log[8].value))
    # The first read has 8 KiB, which end inside the record; the second read has the rest.
    with inject_io(Fault.delay(1, "pread", "*.log", call=2), root=tmp_path) as injected:
        reader.start()
        while not injected.fired:
            time.sleep(0.01)
        log.truncate(0)
        log.extend([b"B" * 1000] * 15)
        reader.join()
    assert got in ([b"A" * 1000], [b"B" * 1000])
    assert log[8].value == b"B" * 1000


def test_a_read_during_a_cut_leaves_no_old_bytes_for_the_next(tmp_path: Path) -> None:
    def batch(value: bytes) -> bytes:
        return encode_batch([ReferenceRecord(value, None, (), 1, 0)], codec=1)

    directory = os.open(tmp_path, os.O_RDONLY)
    file = _native.File(directory, "0.log", "0.log", write=True, create=True)
    os.close(directory)

    def write(value: bytes) -> None:
        file.truncate(0)
        file.append_at(batch(value), 0)
        file.end = len(batch(value))

    def read(*, cut: bool) -> bytes:
        def decompress(codec: int, payload: memoryview, limit: int) -> bytes:
            if cut:
                write(b"new")
            return gzip.decompress(payload)

        record = _native.SegmentScan.get(file, None, 0, 0, None, 0, decompress, 1 << 20)
        assert record is not None
        return record.value

    write(b"old")
    assert read(cut=True) == b"old", "read before the cut"
    assert read(cut=False) == b"new"
    file.close()
