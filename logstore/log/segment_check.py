"""verify: read every batch, every record and every index entry of one segment.

The first fault raises CorruptLogError.  `logstore.checking` lists all faults of a partition.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from logstore import _native
from logstore.errors import CorruptLogError
from logstore.files.names import segment_name

if TYPE_CHECKING:
    from logstore.log.segment import Segment

__all__ = ["greatest_time", "is_reached_at", "times_agree", "verify"]

HEADER_BYTES = 61  # of a batch


def verify(segment: Segment) -> None:
    """Raise CorruptLogError unless all of a segment is valid."""
    limit = segment.file.end if not segment.sealed else segment.file.size()
    contents = segment.walk(limit=limit)
    if contents.stopped != "end":
        raise CorruptLogError(
            contents.reason,
            path=segment.path,
            position=contents.position,
            start_offset=contents.next_offset,
            end_offset=segment.end_offset,
        )
    chunk = _native.ColumnBuilder(0, 1 << 16, 1 << 30, 0)
    scan = segment.scan()
    while scan.fill(chunk):
        chunk = _native.ColumnBuilder(0, 1 << 16, 1 << 30, 0)
    # If another process appends to this segment, its index files may lag after a truncation.
    if segment.sealed or segment.writer is not None:
        _check_index_entries(segment)


def _check_index_entries(segment: Segment) -> None:
    path = segment.path.parent / segment_name(segment.base_offset, ".index")
    for offset, position in segment.offset_index:
        header = segment.file.pread(HEADER_BYTES, position) if position >= 0 else b""
        # An entry holds the last offset of its batch: base offset plus last offset delta.
        base = int.from_bytes(header[:8], "big")
        last = base + int.from_bytes(header[23:27], "big")
        if len(header) < HEADER_BYTES or last != offset:
            raise CorruptLogError(
                f"an index entry for offset {offset} leads to a batch of {base} to {last}",
                path=path,
                position=position,
            )


# ---- the time index ----

# An index that is damaged, or that has lost its last entries, makes a segment seem older than it
# is: a search would skip it, and retention would delete it.


def is_reached_at(segment: Segment, timestamp: int, offset: int) -> bool:
    """Return whether a time index entry is right.

    A batch must end at `offset` and have `timestamp` as its greatest.
    """
    try:
        raw = segment.scan(offset, offset + 1, on_corrupt="skip").next_raw()
    except ValueError:
        return False
    if raw is None:
        return False
    base, last = int.from_bytes(raw[:8], "big"), int.from_bytes(raw[23:27], "big")
    return base + last == offset and int.from_bytes(raw[35:43], "big") == timestamp


def times_agree(segment: Segment) -> bool:
    """Return whether the time index is ordered and its last entry agrees with the log.

    The last entry matters most: because of it a search skips the whole segment.
    """
    entries = list(segment.time_index)
    if not entries:
        return False
    in_order = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(entries))
    first_time, first_offset = entries[0]
    if not in_order or first_time < 0 or first_offset < segment.base_offset:
        return False
    return is_reached_at(segment, *entries[-1])


def greatest_time(segment: Segment) -> int:
    """Return the greatest time of a sealed segment; read the batches after the last index entry."""
    newest, offset = segment.time_index.last_entry
    position = 0
    if len(segment.time_index):
        scan = segment.scan(offset, offset + 1, on_corrupt="skip")
        position = scan.position if scan.next_raw() is not None else 0
    found = segment.walk(position, next_offset=offset + 1 if position else None)
    newest = max(newest, found.max_timestamp)
    if found.stopped != "end":
        newest = max(newest, segment.modified_ms)  # damage may hide a later time
    return newest
