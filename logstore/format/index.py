"""OffsetIndex, TimeIndex, TransactionIndex: sorted entries of a fixed width.

    .index      relative offset i32, position i32
    .timeindex  timestamp i64, relative offset i32
    .txnindex   version i16, producer id i64, first offset i64, last offset i64,
                last stable offset i64

All fields are big-endian, as in Kafka; relative offsets count from the segment's base offset.  The
layout in memory is that of the file: `entries` is the contents of the file.

Invariant: the log is authoritative.  OffsetIndex and TimeIndex are hints: a reader checks the batch
that an entry leads to, and a missing or damaged index is rebuilt from the log.  TransactionIndex
lists aborted transactions; where it was not durable, it is rebuilt from the log as well.

The classes do no I/O and have no lock.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterable, Iterator
from typing import ClassVar, Generic, NamedTuple, TypeVar

from logstore import _native

__all__ = ["AbortedTransaction", "OffsetIndex", "TimeIndex", "TransactionIndex", "used_entries"]

_OFFSET = struct.Struct(">ii")
_TIME = struct.Struct(">qi")
_ABORTED = struct.Struct(">hqqqq")
_RANGE = struct.Struct(">qqq")
_RELATIVE_MAX = (1 << 31) - 1


_Entry = TypeVar("_Entry")


class _Entries(Generic[_Entry]):
    """Entries of one width, back to back, in the order in which they were added."""

    ENTRY_BYTES: ClassVar[int]

    def __init__(self, base_offset: int, entries: bytes = b"") -> None:
        self.base_offset = base_offset
        # A crash may leave a partial entry at the end: ignore it.
        self.entries = bytes(entries[: len(entries) // self.ENTRY_BYTES * self.ENTRY_BYTES])

    def _entry_at(self, position: int) -> _Entry:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.entries) // self.ENTRY_BYTES

    def __getitem__(self, number: int) -> _Entry:
        if not -len(self) <= number < len(self):
            raise IndexError(f"entry {number} of {len(self)}")
        return self._entry_at((number % len(self)) * self.ENTRY_BYTES)

    def __iter__(self) -> Iterator[_Entry]:
        return (self[number] for number in range(len(self)))

    def _keep(self, count: int) -> None:
        self.entries = self.entries[: count * self.ENTRY_BYTES]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} base={self.base_offset} entries={len(self)}>"


class _Hints(_Entries[tuple[int, int]]):
    """Pairs, up to a capacity; if the index is full, the segment must roll."""

    def __init__(
        self, base_offset: int, entries: bytes = b"", *, max_bytes: int = 10_485_760
    ) -> None:
        super().__init__(base_offset, entries)
        self.capacity = max_bytes // self.ENTRY_BYTES


class OffsetIndex(_Hints):
    """Offset -> byte position in the segment, one entry for every few KiB of log."""

    ENTRY_BYTES = 8

    def _entry_at(self, position: int) -> tuple[int, int]:
        relative, where = _OFFSET.unpack_from(self.entries, position)
        return self.base_offset + relative, where

    @property
    def full(self) -> bool:
        """Return whether no entry can be added: the segment must roll."""
        return len(self) >= self.capacity

    @property
    def last_offset(self) -> int:
        """Return the offset of the newest entry, or the segment's base offset."""
        return self[-1][0] if self.entries else self.base_offset

    def lookup(self, offset: int) -> tuple[int, int]:
        """Return the greatest entry at or below `offset`, or (base offset, 0).  O(log n)."""
        number = _native.offset_index_lookup(self.entries, offset - self.base_offset)
        return (self.base_offset, 0) if number < 0 else self[number]

    def upper_bound(self, position: int) -> tuple[int, int] | None:
        """Return the first entry at or after a byte position, or None."""
        number = bisect.bisect_left(self, position, key=lambda entry: entry[1])
        return self[number] if number < len(self) else None

    def append(self, offset: int, position: int) -> None:
        """Add an entry at the end; raise ValueError if the index is full or the order is broken."""
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
        self._keep(kept)


class TimeIndex(_Hints):
    """Timestamp -> offset: every record up to that offset has at most that timestamp."""

    ENTRY_BYTES = 12

    def _entry_at(self, position: int) -> tuple[int, int]:
        timestamp, relative = _TIME.unpack_from(self.entries, position)
        return timestamp, self.base_offset + relative

    @property
    def full(self) -> bool:
        """Return whether only the slot reserved for the final entry is left."""
        return len(self) >= self.capacity - 1

    @property
    def last_entry(self) -> tuple[int, int]:
        """Return the newest entry, or (-1, base offset)."""
        return self[-1] if self.entries else (-1, self.base_offset)

    def lookup(self, timestamp: int) -> tuple[int, int]:
        """Return the greatest entry at or below `timestamp`, or (-1, base offset).  O(log n)."""
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
        # An equal timestamp is no new maximum: the entry that first reached it stays.
        if timestamp > last_timestamp:
            self.entries += _TIME.pack(timestamp, offset - self.base_offset)

    def truncate_to(self, offset: int) -> None:
        """Keep the entries below `offset`."""
        kept = len(self)
        while kept and self[kept - 1][1] >= offset:
            kept -= 1
        self._keep(kept)


class AbortedTransaction(NamedTuple):
    """An aborted transaction: read_committed readers skip its producer's data in these offsets."""

    producer_id: int
    first_offset: int  # of its data; may be in an earlier segment
    last_offset: int  # of the ABORT marker
    # At the time of the abort: the first offset of the oldest transaction that was still open, or
    # the offset after the marker.
    last_stable_offset: int


class TransactionIndex(_Entries[AbortedTransaction]):
    """The aborted transactions whose markers are in one segment, in the order of the markers."""

    ENTRY_BYTES = 34

    def __init__(self, base_offset: int, entries: bytes = b"") -> None:
        super().__init__(base_offset, entries)
        # Not a hint like the other two: a lost entry would show aborted records to committed
        # readers.
        self.cut_short = len(entries) != len(self.entries)

    def _entry_at(self, position: int) -> AbortedTransaction:
        return AbortedTransaction(*_ABORTED.unpack_from(self.entries, position)[1:])

    def __iter__(self) -> Iterator[AbortedTransaction]:
        return (AbortedTransaction._make(e[1:]) for e in _ABORTED.iter_unpack(self.entries))

    def fault(self) -> str | None:
        """Return why this cannot be the index of its segment, or None if it is plausible."""
        if self.cut_short:
            return f"the file ends inside its entry {len(self)}"
        previous = self.base_offset - 1
        for at in range(0, len(self.entries), self.ENTRY_BYTES):
            if self.entries[at]:
                return f"entry of version {self.entries[at]} at byte {at}; only 0 is known"
            _, producer_id, first, last, stable = _ABORTED.unpack_from(self.entries, at)
            if last <= previous or producer_id < 0 or not 0 <= first <= last or stable < 0:
                return (
                    f"entry ({producer_id}, {first}, {last}, {stable}) at byte {at} is out of order"
                )
            previous = last
        return None

    def append(self, aborted: AbortedTransaction) -> None:
        """Add an entry at the end; raise ValueError if its marker is not after all the others."""
        last = self[-1].last_offset if self.entries else self.base_offset - 1
        if aborted.last_offset <= last:
            raise ValueError(f"marker {aborted.last_offset} is not above the last entry's {last}")
        self.entries += _ABORTED.pack(0, *aborted)

    def _first_ending_at(self, offset: int) -> int:
        """Return the number of the first entry whose marker is at or above `offset`.  O(log n)."""
        return bisect.bisect_left(self, offset, key=lambda entry: entry.last_offset)

    def find(self, last_offset: int) -> AbortedTransaction | None:
        """Return the transaction whose marker is at an offset, or None.  O(log n)."""
        at = self._first_ending_at(last_offset)
        return self[at] if at < len(self) and self[at].last_offset == last_offset else None

    def collect(self, start: int, stop: int) -> tuple[list[AbortedTransaction], bool]:
        """Return the transactions with data or a marker in [start, stop), and whether that is all.

        If the second is False, the next segment may list more of them.
        """
        found = []
        from_byte = self._first_ending_at(start) * self.ENTRY_BYTES
        for entry in _ABORTED.iter_unpack(memoryview(self.entries)[from_byte:]):
            if entry[2] < stop:
                found.append(AbortedTransaction._make(entry[1:]))
            # No transaction that was open when this entry was added has data below its last stable
            # offset, so no later entry has either.
            if entry[4] >= stop:
                return found, True
        return found, False

    def truncate_to(self, offset: int) -> None:
        """Keep the entries whose markers are below `offset`."""
        self._keep(self._first_ending_at(offset))


def pack_aborted(aborted: Iterable[AbortedTransaction]) -> bytes:
    """Return the ranges that a scan in C skips: (producer id, first, last offset), sorted."""
    # Big-endian and not negative, so that sorted bytes are sorted numbers: C searches them.
    pack = _RANGE.pack
    return b"".join(sorted([pack(entry[0], entry[1], entry[2]) for entry in aborted]))


def used_entries(entries: bytes, entry_bytes: int) -> bytes:
    """Return `entries` without the zeros at the end.

    A broker allocates its index files at full size, and truncates them only at a roll or a close.
    """
    if len(entries) <= entry_bytes or not entries.endswith(b"\0" * entry_bytes):
        return entries  # a single entry of zeros is time 0 at the base offset
    used = len(entries.rstrip(b"\0"))
    return entries[: -(-used // entry_bytes) * entry_bytes]
