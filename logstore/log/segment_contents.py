"""SegmentContents: the batches of a .log file, from which the indexes are rebuilt."""

from __future__ import annotations

import itertools
import struct
from typing import NamedTuple

from logstore.format import codecs
from logstore.format.index import OffsetIndex, TimeIndex

__all__ = ["SegmentContents"]


_EPOCH = struct.Struct(">iq")

READ_BYTES = 256 << 10


def decompress(codec: int, payload: memoryview, max_bytes: int) -> bytes:
    """The C scan calls this for a compressed batch.

    For the scan a ValueError is damage, unless it is an UnsupportedFormatError.
    """
    return codecs.decompress(codec, payload, max_bytes)


class SegmentContents(NamedTuple):
    """What a walk over a .log file found: its valid prefix and the indexes that belong to it."""

    position: int  # everything below is sound
    next_offset: int
    batches: int
    producers: int  # of these, batches with a producer id and control batches
    first_timestamp: int
    max_timestamp: int
    max_timestamp_offset: int
    last_indexed_position: int
    offsets: bytes
    times: bytes
    stopped: str  # "end", "bad" or "legacy"
    reason: str
    epochs: bytes = b""  # 12 bytes wherever the leader epoch changes: epoch, offset

    @property
    def leader_epochs(self) -> list[tuple[int, int]]:
        """(epoch, offset) where a leader's reign begins, ascending.

        The field lies outside the batch's checksum: an epoch that the next batch takes back is a
        flipped bit, and is left out.
        """
        found = [(epoch, offset) for epoch, offset in _EPOCH.iter_unpack(self.epochs)]
        after = [epoch for epoch, _ in found[1:]]
        kept: list[tuple[int, int]] = []
        for (epoch, offset), following in itertools.zip_longest(found, after):
            taken_back = following is not None and following < epoch
            if not taken_back and epoch > (kept[-1][0] if kept else -1):
                kept.append((epoch, offset))
        return kept

    def followed_by(self, later: SegmentContents) -> SegmentContents:
        """The contents when `later` was found behind a damaged stretch."""
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
    """What `walk` finds in an empty file."""
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
    """Return what `walk` would find, taken from the index files after a clean close."""
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
