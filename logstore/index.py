"""OffsetIndex and TimeIndex: sorted, sparse, fixed-width entries that tell where to look.

Hints.  The log is the truth: whoever lands by an entry checks what is there, and a lost or damaged
index is rebuilt from the log.  The layout is Kafka's, in memory as in the file, so that writing
one is writing `entries`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from logstore import _native

__all__ = ["OffsetIndex", "TimeIndex"]

_OFFSET = struct.Struct(">ii")
_TIME = struct.Struct(">qi")
_RELATIVE_MAX = (1 << 31) - 1


class OffsetIndex:
    """Offset -> byte position in the segment, one entry for every few KiB of log."""

    ENTRY_BYTES = 8

    def __init__(
        self, base_offset: int, entries: bytes = b"", *, max_bytes: int = 10_485_760
    ) -> None:
        self.base_offset = base_offset
        # A trailing partial entry is what a crash left: not an entry.
        self.entries = bytes(entries[: len(entries) // self.ENTRY_BYTES * self.ENTRY_BYTES])
        self.capacity = max_bytes // self.ENTRY_BYTES

    def __len__(self) -> int:
        return len(self.entries) // self.ENTRY_BYTES

    def __getitem__(self, number: int) -> tuple[int, int]:
        if not -len(self) <= number < len(self):
            raise IndexError(f"entry {number} of {len(self)}")
        relative, position = _OFFSET.unpack_from(
            self.entries, (number % len(self)) * self.ENTRY_BYTES
        )
        return self.base_offset + relative, position

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (self[number] for number in range(len(self)))

    @property
    def full(self) -> bool:
        """Whether the next entry does not fit: then the segment must roll."""
        return len(self) >= self.capacity

    @property
    def last_offset(self) -> int:
        """The offset of the newest entry, or the base of the segment."""
        return self[-1][0] if self.entries else self.base_offset

    def lookup(self, offset: int) -> tuple[int, int]:
        """The greatest entry at or below `offset`, or (base offset, 0).  O(log n)."""
        number = _native.offset_index_lookup(self.entries, offset - self.base_offset)
        return (self.base_offset, 0) if number < 0 else self[number]

    def upper_bound(self, position: int) -> tuple[int, int] | None:
        """The first entry at or behind a byte position, or None."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self[middle][1] < position else (low, middle)
        return self[low] if low < len(self) else None

    def append(self, offset: int, position: int) -> None:
        """Add an entry behind all others; ValueError when full or out of order."""
        relative = offset - self.base_offset
        if self.full:
            raise ValueError(f"the index is full: {len(self)} entries")
        if self.entries and offset <= self.last_offset:
            raise ValueError(f"offset {offset} is not above the last entry's {self.last_offset}")
        if not 0 <= relative <= _RELATIVE_MAX:
            raise ValueError(f"offset {offset} is too far from the base {self.base_offset}")
        self.entries += _OFFSET.pack(relative, position)

    def truncate_to(self, offset: int) -> None:
        """Keep the entries below `offset`."""
        kept = _native.offset_index_lookup(self.entries, offset - 1 - self.base_offset) + 1
        self.entries = self.entries[: kept * self.ENTRY_BYTES]

    def __repr__(self) -> str:
        return f"<OffsetIndex base={self.base_offset} entries={len(self)}>"


class TimeIndex:
    """Timestamp -> offset: the greatest timestamp up to there was first reached at that offset."""

    ENTRY_BYTES = 12

    def __init__(
        self, base_offset: int, entries: bytes = b"", *, max_bytes: int = 10_485_760
    ) -> None:
        self.base_offset = base_offset
        self.entries = bytes(entries[: len(entries) // self.ENTRY_BYTES * self.ENTRY_BYTES])
        self.capacity = max_bytes // self.ENTRY_BYTES

    def __len__(self) -> int:
        return len(self.entries) // self.ENTRY_BYTES

    def __getitem__(self, number: int) -> tuple[int, int]:
        if not -len(self) <= number < len(self):
            raise IndexError(f"entry {number} of {len(self)}")
        timestamp, relative = _TIME.unpack_from(
            self.entries, (number % len(self)) * self.ENTRY_BYTES
        )
        return timestamp, self.base_offset + relative

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (self[number] for number in range(len(self)))

    @property
    def full(self) -> bool:
        """Whether only the slot reserved for the final entry is left."""
        return len(self) >= self.capacity - 1

    @property
    def last_entry(self) -> tuple[int, int]:
        """The newest entry, or (-1, base offset)."""
        return self[-1] if self.entries else (-1, self.base_offset)

    def lookup(self, timestamp: int) -> tuple[int, int]:
        """The greatest entry at or below `timestamp`, or (-1, base offset).  O(log n)."""
        number = _native.time_index_lookup(self.entries, timestamp)
        return (-1, self.base_offset) if number < 0 else self[number]

    def maybe_append(self, timestamp: int, offset: int, *, final: bool = False) -> None:
        """Add an entry if the timestamp is a new maximum.  `final` may use the reserved slot."""
        if self.full and not final:
            raise ValueError(f"the index is full: {len(self)} entries")
        last_timestamp, last_offset = self.last_entry
        if self.entries and offset < last_offset:
            raise ValueError(f"offset {offset} is below the last entry's {last_offset}")
        if self.entries and timestamp < last_timestamp:
            raise ValueError(f"timestamp {timestamp} is below the last entry's {last_timestamp}")
        if timestamp > last_timestamp:
            self.entries += _TIME.pack(timestamp, offset - self.base_offset)

    def truncate_to(self, offset: int) -> None:
        """Keep the entries below `offset`."""
        kept = len(self)
        while kept and self[kept - 1][1] >= offset:
            kept -= 1
        self.entries = self.entries[: kept * self.ENTRY_BYTES]

    def __repr__(self) -> str:
        return f"<TimeIndex base={self.base_offset} entries={len(self)}>"
