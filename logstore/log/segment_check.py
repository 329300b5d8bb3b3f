"""verify: read every batch, every record and every index entry of one segment.

The first fault raises CorruptLogError.  `logstore.checking` lists all faults of a partition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logstore import _native
from logstore.errors import CorruptLogError
from logstore.files.names import segment_name

if TYPE_CHECKING:
    from logstore.log.segment import Segment

__all__ = ["verify"]

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
