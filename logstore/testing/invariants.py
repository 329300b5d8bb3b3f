"""The checker: the invariants of a partition that has no writer at the moment.

The files are decoded by the reference codec, which shares no code with the engine.  Every way to
read through the public API must give exactly these records.  A violation raises AssertionError
with the rule, the file and the numbers.

The whole log is read several times: use it in tests, not in production.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logstore.testing.model import as_reference
from logstore.testing.reference import ReferenceBatch, ReferenceRecord, read_log

if TYPE_CHECKING:
    from logstore import Columns, Partition, Segment

__all__ = ["check_invariants"]

_SAMPLES: Final = 64  # at most this many single reads, at the edges of batches
_OFFSET_ENTRY: Final = struct.Struct(">ii")
_TIME_ENTRY: Final = struct.Struct(">qi")


def check_invariants(partition: Partition) -> None:
    """Raise AssertionError unless the files and every way of reading them agree.

    The partition must be open.  No append, retention or compaction may run during the check.
    """
    start, durable, end = partition.start_offset, partition.durable_offset, partition.end_offset
    _require(
        0 <= start <= durable <= end,
        f"start {start}, durable {durable} and end {end} are not in order",
    )
    batches = list(_check_files(partition))
    expected = [
        record
        for batch in batches
        if not batch.control
        for record in batch.records
        if start <= record.offset < end
    ]
    _check_scans(partition, expected)
    _check_lookups(partition, expected, batches)
    _check_times(partition, expected)


def _require(truth: bool, message: str) -> None:
    # Not an assert statement: the checker must work under python -O.
    if not truth:
        raise AssertionError(message)


# ----------------------------------------------------------------------------------------- files


def _check_files(partition: Partition) -> Iterator[ReferenceBatch]:
    """Yield the batches of all segments, each file checked."""
    directory = Path(partition.path)
    segments = partition.segments
    _require(bool(segments), "no segments: even an empty log has its active one")
    names = sorted(path.name for path in directory.glob("*.log"))
    bases = [segment.base_offset for segment in segments]
    _require(
        names == [f"{base:020d}.log" for base in bases],
        f"the segments start at {bases}, the files are {names}",
    )
    _require(
        bases[0] <= partition.start_offset,
        f"the log starts at {partition.start_offset}, before its first segment at {bases[0]}",
    )
    for index, segment in enumerate(segments):
        last = index == len(segments) - 1
        limit = partition.end_offset if last else bases[index + 1]
        path = directory / f"{segment.base_offset:020d}.log"
        batches = read_log(path)
        size = path.stat().st_size
        _require(
            segment.size_bytes == size,
            f"{path.name} has {size} bytes, its segment has {segment.size_bytes}",
        )
        _require(
            segment.base_offset <= segment.end_offset <= limit,
            f"{path.name} ends at {segment.end_offset}, outside [{segment.base_offset}, {limit}]",
        )
        if batches:
            after = batches[-1].next_offset
            _require(
                after <= segment.end_offset,
                f"{path.name} ends at {segment.end_offset}, its last batch at {after}",
            )
        if last:
            _require(
                segment.end_offset == partition.end_offset,
                f"{path.name} ends at {segment.end_offset}, the log at {partition.end_offset}",
            )
        _check_indexes(path, segment, batches)
        yield from batches


def _check_indexes(path: Path, segment: Segment, batches: Sequence[ReferenceBatch]) -> None:
    """Check the indexes of a segment, and of a sealed segment also its index files.

    The index files of the active segment may have fewer entries than its indexes in memory.
    """
    base = segment.base_offset
    offsets, times = list(segment.offset_index), list(segment.time_index)
    _check_offset_index(f"{path.name} offset index", offsets, batches)
    _check_time_index(f"{path.name} time index", times, batches, sealed=segment.sealed)
    if segment.sealed:
        held = [(base + offset, at) for offset, at in _entries(path, ".index", _OFFSET_ENTRY)]
        _require(held == offsets, f"{path.name}: its .index holds {held}, not {offsets}")
        held = [(at, base + offset) for at, offset in _entries(path, ".timeindex", _TIME_ENTRY)]
        _require(held == times, f"{path.name}: its .timeindex holds {held}, not {times}")


def _entries(path: Path, suffix: str, layout: struct.Struct) -> list[tuple[int, int]]:
    path = path.with_suffix(suffix)
    data = path.read_bytes()
    _require(
        len(data) % layout.size == 0,
        f"{path.name} has {len(data)} bytes, which is no multiple of {layout.size}",
    )
    return [(first, second) for first, second in layout.iter_unpack(data)]


def _check_offset_index(
    name: str, entries: Sequence[tuple[int, int]], batches: Sequence[ReferenceBatch]
) -> None:
    """Check that a scan from the position of an entry cannot miss the entry's offset."""
    at = {batch.position: batch for batch in batches}
    ends = {batch.last_offset for batch in batches}
    previous = -1, -1
    for number, (offset, position) in enumerate(entries):
        where = f"{name}, entry {number} ({offset}, {position})"
        _require(
            offset > previous[0] and position > previous[1], f"{where} does not follow {previous}"
        )
        previous = offset, position
        _require(position in at, f"{where} points at no batch")
        first = at[position].base_offset
        _require(first <= offset, f"{where} points after its offset: that batch has {first}")
        _require(offset in ends, f"{where} names an offset that ends no batch")


def _check_time_index(
    name: str,
    entries: Sequence[tuple[int, int]],
    batches: Sequence[ReferenceBatch],
    *,
    sealed: bool,
) -> None:
    """Check that an entry's batch is the first with its time, and no batch before is later."""
    by_end = {batch.last_offset: number for number, batch in enumerate(batches)}
    previous = -1, -1
    for number, (timestamp, offset) in enumerate(entries):
        where = f"{name}, entry {number} ({timestamp}, {offset})"
        _require(
            timestamp > previous[0] and offset >= previous[1], f"{where} does not follow {previous}"
        )
        previous = timestamp, offset
        _require(offset in by_end, f"{where} names an offset that ends no batch")
        batch = by_end[offset]
        times = [other.max_timestamp for other in batches[: batch + 1]]
        _require(times[-1] == timestamp, f"{where} names a batch with the time {times[-1]}")
        _require(
            max(times[:-1], default=-1) < timestamp,
            f"{where} is not the first that late: {max(times[:-1], default=-1)} came before",
        )
    if sealed:
        latest = max((batch.max_timestamp for batch in batches), default=-1)
        _require(
            latest < 0 or previous[0] == latest,
            f"{name} ends with time {previous[0]}, the sealed segment with {latest}",
        )


# ----------------------------------------------------------------------------------------- reads


def _check_scans(partition: Partition, expected: Sequence[ReferenceRecord]) -> None:
    _compare("scan()", [as_reference(record) for record in partition.scan()], expected)
    for rows in (7, 65_536):
        found = [record for columns in partition.scan().columns(rows) for record in _rows(columns)]
        _compare(f"scan().columns({rows})", found, expected)
    for count in {0, 1, 2, len(expected), len(expected) + 1}:
        tail = [as_reference(record) for record in partition.tail(count)]
        _compare(f"tail({count})", tail, expected[max(0, len(expected) - count) :])


def _rows(columns: Columns) -> Iterator[ReferenceRecord]:
    offsets, timestamps = columns.offsets, columns.timestamps
    keys, values = columns.keys, columns.values
    for row in range(len(columns)):
        yield ReferenceRecord(
            value=values[row],
            key=keys[row],
            headers=columns.headers(row),
            timestamp=int(timestamps[row]),
            offset=int(offsets[row]),
        )


def _check_lookups(
    partition: Partition, expected: Sequence[ReferenceRecord], batches: Sequence[ReferenceBatch]
) -> None:
    offsets = [record.offset for record in expected]
    edges = {batch.base_offset for batch in batches} | {batch.last_offset for batch in batches}
    inside = sorted(edges & set(offsets))
    end = partition.end_offset
    for offset in inside[:: len(inside) // _SAMPLES + 1] + offsets[-1:]:
        index = bisect.bisect_left(offsets, offset)
        record = expected[index]
        _compare(f"log[{offset}]", [as_reference(partition[offset])], [record])
        _compare(f"log[{offset - end}]", [as_reference(partition[offset - end])], [record])
        found = [as_reference(other) for other in partition.scan(offset, offset + 3)]
        _compare(
            f"scan({offset}, {offset + 3})",
            found,
            [other for other in expected[index : index + 3] if other.offset < offset + 3],
        )


def _check_times(partition: Partition, expected: Sequence[ReferenceRecord]) -> None:
    """Check that offset_for_time returns the first offset with at least the given time."""
    records: list[tuple[int, int]] = []  # (time, offset) of each record with a new latest time
    for record in expected:
        if not records or record.timestamp > records[-1][0]:
            records.append((record.timestamp, record.offset))
    for timestamp, offset in records[:: len(records) // _SAMPLES + 1] + records[-1:]:
        if timestamp < 0:
            continue
        found = partition.offset_for_time(timestamp)
        _require(found == offset, f"offset_for_time({timestamp}) is {found}, not {offset}")
        # one millisecond later: the next new latest time, or the end
        later = next((entry[1] for entry in records if entry[0] > timestamp), partition.end_offset)
        found = partition.offset_for_time(timestamp + 1)
        _require(found == later, f"offset_for_time({timestamp + 1}) is {found}, not {later}")


def _compare(
    what: str, found: Sequence[ReferenceRecord], expected: Sequence[ReferenceRecord]
) -> None:
    for number, (have, want) in enumerate(zip(found, expected, strict=False)):
        _require(have == want, f"{what}: record {number} is {have}, the files hold {want}")
    if len(found) != len(expected):
        spare = (found if len(found) > len(expected) else expected)[min(len(found), len(expected))]
        raise AssertionError(
            f"{what} gives {len(found)} records, the files hold {len(expected)}; "
            f"the first that differs is {spare}"
        )
