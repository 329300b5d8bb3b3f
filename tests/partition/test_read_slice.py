"""read_slice: whole batches as a part of a file.  `read_batches` is the oracle."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from logstore import ConfigError, CorruptLogError, OffsetOutOfRangeError, Partition
from logstore.errors import ClosedError
from logstore.format.batch import BatchHeader
from logstore.log.segment_slice import NotCachedError, Slice
from logstore.testing import Fault, ReferenceRecord, encode_batch, inject_io, record_io
from tests.conftest import MakeLog
from tests.kit import flip

NOW = 1_700_000_000_000
UNLIMITED = 1 << 30


def batch(*values: bytes, **options: Any) -> bytes:
    return encode_batch([ReferenceRecord(value, timestamp=NOW) for value in values], **options)


def read_slice(log: Partition, *args: Any, **options: Any) -> Slice | None:
    return log.parts.reader.read_slice(*args, **options)


def whole_slice(log: Partition) -> Slice:
    """Return the slice from offset 0 to the end of the first segment."""
    found = read_slice(log, 0, UNLIMITED)
    assert found is not None
    return found


def content(slice_: Slice | None) -> bytes:
    return b"" if slice_ is None else slice_.read(0, slice_.size_bytes, wait=True)


def fill(log: Partition, *, seed: int = 0, batches: int = 300) -> None:
    """Append batches of 1 to 20 records, of 70 to 40,000 bytes."""
    rng = random.Random(seed)
    for _ in range(batches):
        size = rng.choice((1, 30, 200, 2000))
        log.append_batch(batch(*[b"x" * size] * rng.randrange(1, 20)))


@pytest.mark.parametrize("interval", [0, 1000, 4096, 1 << 20])
def test_a_slice_holds_what_read_batches_returns(make_log: MakeLog, interval: int) -> None:
    log = make_log(index_interval_bytes=interval)
    fill(log)
    rng = random.Random(1)
    for _ in range(300):
        offset = rng.randrange(log.end_offset)
        max_bytes = rng.choice((0, 1, 70, 5000, 50_000, 400_000, UNLIMITED))
        expected = log.read_batches(offset, max_bytes)
        found = read_slice(log, offset, max_bytes)
        assert found is not None
        assert content(found) == b"".join(expected)
        assert found.end_offset == BatchHeader.parse(expected[-1]).next_offset
        bounded = read_slice(log, offset, max_bytes, whole_first=False)
        if len(expected[0]) > max_bytes:
            assert bounded is None
        else:
            assert content(bounded) == content(found)


def test_a_slice_ends_with_its_segment(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=60_000)
    fill(log, batches=200)
    bases = [segment.base_offset for segment in log.segments]
    assert len(bases) > 4
    offset, parts = 0, []
    while (found := read_slice(log, offset, UNLIMITED)) is not None:
        parts.append(content(found))
        assert found.end_offset == [*bases, log.end_offset][len(parts)]
        offset = found.end_offset
    assert b"".join(parts) == b"".join(log.read_batches(0, UNLIMITED))
    assert offset == log.end_offset


def test_the_end_and_what_is_outside(make_log: MakeLog) -> None:
    log = make_log()
    assert read_slice(log, 0, 100) is None
    log.extend([b"a", b"b"])
    assert read_slice(log, 2, 100) is None
    for offset in (-1, 3):
        with pytest.raises(OffsetOutOfRangeError):
            read_slice(log, offset, 100)
    with pytest.raises(ConfigError):
        read_slice(log, 0, 100, isolation="dirty")


def test_a_committed_slice_stops_at_the_last_stable_offset(make_log: MakeLog) -> None:
    log = make_log(index_interval_bytes=0, segment_ms=1 << 60)
    log.append_batch(batch(b"a", b"b"))
    produced = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    log.append_batch(batch(b"c", base_sequence=0, **produced))
    log.append_batch(batch(b"d"))
    assert log.last_stable_offset == 2
    found = read_slice(log, 0, UNLIMITED, isolation="read_committed")
    assert content(found) == b"".join(log.read_batches(0, UNLIMITED, isolation="read_committed"))
    assert found is not None and found.end_offset == 2
    assert read_slice(log, 2, UNLIMITED, isolation="read_committed") is None
    log.end_transaction(7, 0, commit=True)
    found = read_slice(log, 2, UNLIMITED, isolation="read_committed")
    assert found is not None and found.end_offset == 5


def test_records_that_a_failed_sync_hides_are_in_no_slice(make_log: MakeLog) -> None:
    log = make_log()
    for value in (b"a", b"b", b"c"):
        log.append(value)
    log.parts.view.limit_to(2)
    found = read_slice(log, 0, UNLIMITED)
    assert found is not None and found.end_offset == 2


def test_offsets_that_compaction_removed_lead_to_the_next_segment(make_log: MakeLog) -> None:
    log = make_log()
    log.append_batch(batch(b"a", base_offset=0, leader_epoch=0), origin="follower")
    log.append_batch(batch(b"b", base_offset=10, leader_epoch=0), origin="follower")
    for offset in range(1, 11):
        found = read_slice(log, offset, UNLIMITED)
        assert content(found) == log.read_batches(offset)[0]


@pytest.mark.parametrize("state", ["open", "reopened", "readonly"])
def test_every_way_to_open_a_log(make_log: MakeLog, tmp_path: Path, state: str) -> None:
    log = make_log(segment_bytes=60_000)
    fill(log, batches=120)
    expected = b"".join(log.read_batches(0, UNLIMITED))
    if state == "reopened":
        log.close()
        log = make_log(segment_bytes=60_000)
    reader = Partition.open(log.path, readonly=True) if state == "readonly" else log
    with reader:
        offset, parts = 0, []
        while (found := read_slice(reader, offset, 7000)) is not None:
            parts.append(content(found))
            offset = found.end_offset
    assert b"".join(parts) == expected


# ---- the index is a hint ----


@pytest.mark.parametrize("damage", ["offsets", "positions", "empty", "missing"])
def test_a_wrong_index_costs_only_time(make_log: MakeLog, damage: str) -> None:
    log = make_log(segment_bytes=200_000, index_interval_bytes=1000)
    fill(log)
    log.close()
    index = sorted(log.path.glob("*.index"))[0]
    entries = bytearray(index.read_bytes())
    assert len(entries) > 80
    for at in range(0, len(entries), 8):
        field = at + (4 if damage == "positions" else 0)
        number = int.from_bytes(entries[field : field + 4], "big")
        entries[field : field + 4] = (number + 1).to_bytes(4, "big")
    if damage == "missing":
        index.unlink()
    else:
        index.write_bytes(b"" if damage == "empty" else entries)
    with Partition.open(log.path, readonly=True) as reader:
        for offset in range(0, 1500, 37):
            for max_bytes in (100, 30_000, 100_000):
                found = read_slice(reader, offset, max_bytes)
                expected = b"".join(reader.read_batches(offset, max_bytes))
                assert found is not None
                assert content(found) == expected[: found.size_bytes]


def test_damage_of_the_first_header_is_raised_and_later_damage_ends_a_slice(
    make_log: MakeLog,
) -> None:
    log = make_log(index_interval_bytes=1 << 20)
    for value in (b"a", b"b", b"c"):
        log.append(value)
    first = read_slice(log, 0, 1)
    assert first is not None
    path = log.segments[0].path
    log.close()
    flip(path, first.size_bytes + 16)  # the magic byte of the second batch
    with Partition.open(log.path, readonly=True) as reader:
        found = read_slice(reader, 0, UNLIMITED)
        assert found is not None and found.end_offset == 1
        with pytest.raises(CorruptLogError):
            read_slice(reader, 1, UNLIMITED)


# ---- reading a slice ----


def test_a_slice_is_read_in_parts(make_log: MakeLog) -> None:
    log = make_log()
    fill(log, batches=20)
    found = whole_slice(log)
    whole = content(found)
    for wait in (True, False):
        assert found.read(10, 3, wait=wait) == whole[10:13]
        assert found.read(found.size_bytes, 0, wait=wait) == b""
    for at, size in ((-1, 5), (0, found.size_bytes + 1), (found.size_bytes, 1), (5, -1)):
        with pytest.raises(ValueError, match="are not in a slice"):
            found.read(at, size, wait=True)


def test_what_is_not_in_the_page_cache_is_not_waited_for(make_log: MakeLog) -> None:
    log = make_log()
    fill(log)
    log.sync()
    found = whole_slice(log)
    file = log.segments[0].file
    file.forget(0, 0)
    try:
        found.read(found.size_bytes - 100_000, 100_000, wait=False)
    except NotCachedError:
        pass
    else:
        pytest.skip("this file system keeps the pages")
    assert len(found.read(0, found.size_bytes, wait=True)) == found.size_bytes
    assert len(found.read(0, found.size_bytes, wait=False)) == found.size_bytes


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault.short(10, "pread"), NotCachedError),
        (Fault.fail(errno.EAGAIN, "pread"), NotCachedError),
        (Fault.fail(errno.EIO, "pread"), OSError),
    ],
)
def test_reads_that_fail(make_log: MakeLog, fault: Fault, expected: type[OSError]) -> None:
    log = make_log()
    fill(log, batches=5)
    found = whole_slice(log)
    with inject_io(fault), pytest.raises(expected) as caught:
        found.read(0, found.size_bytes, wait=False)
    assert (type(caught.value) is NotCachedError) is (expected is NotCachedError)


def test_a_deleted_segment_stays_readable(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=60_000)
    fill(log, batches=120)
    found = read_slice(log, 0, UNLIMITED)
    before = content(found)
    log.trim(log.segments[2].base_offset)
    assert not log.path.joinpath(f"{0:020}.log").exists()
    assert content(found) == before
    with pytest.raises(OffsetOutOfRangeError):
        read_slice(log, 0, UNLIMITED)


def test_a_truncation_below_a_slice_is_an_eof(make_log: MakeLog) -> None:
    log = make_log()
    fill(log, batches=120)
    found = whole_slice(log)
    log.truncate(1)
    with pytest.raises(NotCachedError):
        found.read(0, found.size_bytes, wait=False)
    with pytest.raises(EOFError):
        found.read(0, found.size_bytes, wait=True)
    assert content(read_slice(log, 0, UNLIMITED)) == b"".join(log.read_batches(0))


def test_a_closed_log_ends_its_slices(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"a")
    found = read_slice(log, 0, UNLIMITED)
    log.close()
    assert found is not None
    for wait in (True, False):
        with pytest.raises(ClosedError):
            found.read(0, 10, wait=wait)


def test_finding_a_slice_reads_headers_near_its_ends_only(make_log: MakeLog) -> None:
    log = make_log()
    for _ in range(20):
        log.extend([b"x" * 100] * 2000)
        log.append(b"small")
    with record_io(log.path) as recording:
        found = read_slice(log, 0, UNLIMITED)
    assert found is not None and found.size_bytes > 4_000_000
    reads = [call for call in recording.operations if call.kind == "pread"]
    assert len(reads) <= 4
    assert sum(call.size for call in reads) <= 40_000
