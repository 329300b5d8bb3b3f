"""SegmentContents: the valid prefix of a .log file, and the indexes rebuilt from its batches.

`Segment.walk` returns it after a scan in C.  After a clean close `contents_from_indexes` makes one
from the index files without reading the log.
"""

from __future__ import annotations

import itertools
import struct
from typing import NamedTuple

from logstore.files.directory import Directory
from logstore.format import codecs
from logstore.format.index import OffsetIndex, TimeIndex, used_entries

__all__ = ["SegmentContents"]


_EPOCH = struct.Struct(">iq")

READ_BYTES = 256 << 10


def decompress(codec: int, payload: memoryview, max_bytes: int) -> bytes:
    """Decompress the payload of a batch.  The scan in C calls this.

    The scan treats a ValueError as damage of the batch, unless it is an UnsupportedFormatError.
    """
    return codecs.decompress(codec, payload, max_bytes)


def read_indexes(
    directory: Directory, index: str, timeindex: str, bound: int
) -> tuple[bytes, bytes] | None:
    """Return the entries of the two index files; None if one is missing or has more than `bound`.

    Without its last entries, a time index makes a search skip records.
    """
    try:
        offsets = used_entries(directory.read(index, bound + 8), 8)
        times = used_entries(directory.read(timeindex, bound + 12), 12)
    except FileNotFoundError:
        return None
    return None if max(len(offsets), len(times)) > bound else (offsets, times)


class SegmentContents(NamedTuple):
    """The result of a walk over a .log file."""

    position: int  # end of the valid prefix: every batch before it was checked
    next_offset: int  # the offset after the last record of the prefix
    batches: int
    producers: int  # how many of the batches have a producer id or are control batches
    first_timestamp: int
    max_timestamp: int
    max_timestamp_offset: int
    last_indexed_position: int
    offsets: bytes  # the entries of the .index file
    times: bytes  # the entries of the .timeindex file, without the last one: see `final_times`
    stopped: str  # why the walk stopped: "end", "bad" (damage) or "legacy" (an old format)
    reason: str
    epochs: bytes = b""  # 12 bytes for each change of the leader epoch: epoch, offset

    @property
    def leader_epochs(self) -> list[tuple[int, int]]:
        """Return (epoch, offset of its first record) pairs, ascending.

        The checksum of a batch does not cover its leader epoch.  Epochs never decrease in a log:
        if the next batch has a lower epoch, the greater one is a flipped bit and is left out.
        """
        found = [(epoch, offset) for epoch, offset in _EPOCH.iter_unpack(self.epochs)]
        after = [epoch for epoch, _ in found[1:]]
        kept: list[tuple[int, int]] = []
        for (epoch, offset), following in itertools.zip_longest(found, after):
            taken_back = following is not None and following < epoch
            if not taken_back and epoch > (kept[-1][0] if kept else -1):
                kept.append((epoch, offset))
        return kept

    def final_times(self, base_offset: int) -> bytes:
        """Return the entries of the .timeindex file of a segment that is not appended to."""
        times = TimeIndex(base_offset, self.times)
        if self.max_timestamp > times.last_entry[0]:
            times.maybe_append(self.max_timestamp, self.max_timestamp_offset, final=True)
        return times.entries

    def followed_by(self, later: SegmentContents) -> SegmentContents:
        """Return the contents of both: `later` was found after a damaged part of the file."""
        newest = later if later.max_timestamp > self.max_timestamp else self
        times = TimeIndex(0, self.times)
        for timestamp, offset in TimeIndex(0, later.times):
            if timestamp > times.last_entry[0]:
                times.maybe_append(timestamp, offset, final=True)
        return later._replace(
            batches=self.batches + later.batches,
            producers=self.producers + later.producers,
            first_timestamp=self.first_timestamp if self.batches else later.first_timestamp,
            max_timestamp=newest.max_timestamp,
            max_timestamp_offset=newest.max_timestamp_offset,
            offsets=self.offsets + later.offsets,
            times=times.entries,
            epochs=self.epochs + later.epochs,
        )


def empty_contents(base_offset: int) -> SegmentContents:
    """Return the contents of an empty file."""
    return SegmentContents(
        position=0,
        next_offset=base_offset,
        batches=0,
        producers=0,
        first_timestamp=-1,
        max_timestamp=-1,
        max_timestamp_offset=base_offset,
        last_indexed_position=0,
        offsets=b"",
        times=b"",
        stopped="end",
        reason="",
    )


def contents_from_indexes(
    offsets: OffsetIndex, times: TimeIndex, *, size: int, next_offset: int, first_timestamp: int
) -> SegmentContents:
    """Return the contents of a cleanly closed segment, from its index files."""
    timestamp, offset = times.last_entry
    return SegmentContents(
        position=size,
        next_offset=next_offset,
        batches=0,
        producers=0,
        first_timestamp=first_timestamp,
        max_timestamp=timestamp,
        max_timestamp_offset=offset,
        last_indexed_position=offsets[-1][1] if len(offsets) else 0,
        offsets=offsets.entries,
        times=times.entries,
        stopped="end",
        reason="",
    )
