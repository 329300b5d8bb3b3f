"""Progress: which records of one partition are processed, and the text that keeps it in a commit.

`seen` is the position of the reader.  The *open* offsets are those of records that were read and
are not finished.  An offset below `seen` that is not open is finished, or has no record: gaps of
compaction and markers need no rule.

Invariant: the committed offset is the least open offset, or `seen` if none is open.  The metadata
of the commit has the other open offsets, so a record that was finished before the commit is not
processed again, and every other record is.

The text is ``ls1:`` and base64url without padding of these fields, where a varint is unsigned, with
7 bits in each byte, the lowest first:

    varint  seen - committed offset
    uint8   flags: 1 closed cleanly, 2 starts follow
    varint  number of open offsets
    varint  for each open offset but the first: distance to the one before - 1
    varint  number of starts; then for each, with flag 2 only:
            varint index among the open offsets, varint starts that did not end
    uint32  CRC-32C, big-endian, of group, topic id, partition, committed offset and all of the
            above

`size` is exact: adding or removing an offset changes two distances.  An offset is added only while
the fields have at most BYTES_MAX bytes, so the text always fits into Kafka's 4,096 characters.

Pure: no I/O, no thread, no clock.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Self

from sortedcontainers import SortedList

from logstore import _native
from logstore.errors import LogStoreError

__all__ = ["BadProgressError", "Place", "Progress", "is_progress"]

PREFIX = "ls1:"
CLEAN, STARTS = 1, 2
BYTES_MAX = 3_000  # of the fields, when an offset is added
# Of the fields, at any time: 4,092 characters.  `seen` and the starts may grow into the difference.
LIMIT = 3_069
STARTS_MAX = 127  # a number of starts is one byte
VARINT_MAX = (1 << 63) - 1
_TEXT = re.compile(r"ls1:[A-Za-z0-9_-]+\Z")


class BadProgressError(LogStoreError, ValueError):
    """The metadata of a committed offset begins as ours and is damaged.  It is ignored."""


class Place(NamedTuple):
    """The names that a checksum binds a text to: it is valid nowhere else."""

    group: str
    topic_id: uuid.UUID | None
    partition: int

    def bytes(self) -> bytes:
        group = self.group.encode()
        topic = b"" if self.topic_id is None else self.topic_id.bytes
        return b"%d:%b%d:%b%d" % (len(group), group, len(topic), topic, self.partition)


def varint(number: int) -> bytes:
    """Return a number >= 0 with 7 bits in each byte, the lowest first.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def varint_size(number: int) -> int:
    """Return the number of bytes of `varint(number)`."""
    return max(1, (number.bit_length() + 6) // 7)


class Progress:
    """The progress of one partition.  `starts` counts, by open offset, starts without an end.

    >>> progress = Progress(100)
    >>> for offset in range(100, 110):
    ...     progress.add(offset)
    >>> for offset in (101, 102, 105, 106, 107, 108, 109):
    ...     progress.finish(offset)
    >>> progress.committed, progress.seen, list(progress)
    (100, 110, [100, 103, 104])
    """

    __slots__ = ("_distances", "_open", "clean", "seen", "starts")

    def __init__(
        self, seen: int, open_: Iterable[int] = (), starts: Mapping[int, int] | None = None
    ) -> None:
        self.seen = seen
        self.clean = False  # as decoded: the workers before us ended cleanly
        self.starts = dict(starts or {})
        self._open: SortedList[int] = SortedList(open_)
        offsets = list(self._open)
        # Bytes of the distances between the open offsets.
        self._distances = sum(
            varint_size(after - before - 1) for before, after in itertools.pairwise(offsets)
        )

    def __len__(self) -> int:
        """Return how many offsets are open."""
        return len(self._open)

    def __iter__(self) -> Iterator[int]:
        return iter(self._open)

    def __contains__(self, offset: object) -> bool:
        return offset in self._open

    @property
    def committed(self) -> int:
        """The offset to commit: the least open one, or `seen`."""
        return self._open[0] if self._open else self.seen

    @property
    def finished_above(self) -> int:
        """Offsets from the committed one to `seen` that are not open."""
        return self.seen - self.committed - len(self._open)

    @property
    def size(self) -> int:
        """Bytes of the fields of the text.  O(1) without starts."""
        return (
            varint_size(self.seen - self.committed)
            + 1
            + varint_size(len(self._open))
            + self._distances
            + len(self._encoded_starts())
            + 4
        )

    # ---- changes ----

    def fits(self, offset: int) -> bool:
        """Return whether `add(offset)` leaves at most BYTES_MAX bytes.  O(1) without starts."""
        size = self.size
        if self._open:
            grown = varint_size(offset + 1 - self.committed) - varint_size(
                self.seen - self.committed
            )
            size += grown + varint_size(offset - self._open[-1] - 1)
        return size + 1 <= BYTES_MAX  # one more for the number of open offsets

    def add(self, offset: int) -> None:
        """Open an offset at or above `seen`; the reader is after it.  O(log n)."""
        assert offset >= self.seen
        if self._open:
            self._distances += varint_size(offset - self._open[-1] - 1)
        self._open.add(offset)
        self.seen = offset + 1

    def advance(self, seen: int) -> None:
        """Note that the reader has passed offsets without a record."""
        self.seen = max(self.seen, seen)

    def finish(self, offset: int) -> None:
        """Close an open offset: its record needs no more processing.  O(log n)."""
        at = self._open.index(offset)  # raises ValueError if it is not open
        self._unlink(at)
        self.starts.pop(offset, None)

    def _unlink(self, at: int) -> None:
        offset = self._open.pop(at)
        before = self._open[at - 1] if at else None
        after = self._open[at] if at < len(self._open) else None
        self._distances -= self._between(before, offset) + self._between(offset, after)
        self._distances += self._between(before, after)

    def reopen(self, offset: int) -> None:
        """Undo `finish`: the transaction that was to commit it was aborted.  O(log n)."""
        at = self._open.bisect_left(offset)
        before = self._open[at - 1] if at else None
        after = self._open[at] if at < len(self._open) else None
        self._distances -= self._between(before, after)
        self._distances += self._between(before, offset) + self._between(offset, after)
        self._open.add(offset)

    @staticmethod
    def _between(before: int | None, after: int | None) -> int:
        return 0 if before is None or after is None else varint_size(after - before - 1)

    def cut(self, offset: int) -> list[int]:
        """Forget offsets from `offset` on: the log was truncated.  Return those that were open."""
        gone = list(self._open.irange(offset))
        for each in gone:
            self.finish(each)
        self.seen = min(self.seen, offset)
        return gone

    def next_open(self, offset: int) -> int:
        """Return the least open offset at or above `offset`, or `seen`."""
        at = self._open.bisect_left(offset)
        return self._open[at] if at < len(self._open) else max(self.seen, offset)

    def count_start(self, offset: int) -> bool:
        """Count a start of an open offset; return False if the text has no room for it."""
        before = self.starts.get(offset, 0)
        self.starts[offset] = min(before + 1, STARTS_MAX)
        if before or self.size <= LIMIT:
            return True
        del self.starts[offset]
        return False

    def end_start(self, offset: int) -> None:
        """Undo `count_start`: the start ended, and the process did not."""
        left = self.starts.get(offset, 0) - 1
        if left > 0:
            self.starts[offset] = left
        else:
            self.starts.pop(offset, None)

    # ---- the text ----

    def _encoded_starts(self) -> bytes:
        if not self.starts:
            return b""
        counted = [(self._open.index(offset), n) for offset, n in sorted(self.starts.items())]
        return varint(len(counted)) + b"".join(varint(at) + varint(n) for at, n in counted)

    def encode(self, place: Place, *, clean: bool = False) -> str:
        """Return the metadata of a commit of `committed`."""
        offsets = list(self._open)
        parts = [
            varint(self.seen - self.committed),
            bytes([CLEAN * clean | (STARTS if self.starts else 0)]),
            varint(len(offsets)),
            *(varint(b - a - 1) for a, b in itertools.pairwise(offsets)),
            self._encoded_starts(),
        ]
        fields = b"".join(parts)
        fields += _checksum(place, self.committed, fields)
        assert len(fields) == self.size <= LIMIT
        return PREFIX + base64.urlsafe_b64encode(fields).rstrip(b"=").decode()

    @classmethod
    def decode(cls, text: str, place: Place, committed: int, *, end: int | None = None) -> Self:
        """Return the progress that `encode` wrote for this place and committed offset.

        `end` is the end of the log.  Raises BadProgressError for any other text.
        """
        return cls._parse(_fields_of(text, place, committed), committed, end)

    @classmethod
    def _parse(cls, fields: bytes, committed: int, end: int | None) -> Self:
        numbers = _Numbers(fields)
        seen = committed + numbers.take()
        flags = numbers.byte()
        if flags & ~(CLEAN | STARTS):
            raise BadProgressError(f"unknown flags {flags}")
        count = numbers.take()
        if count > len(fields) or (count == 0) != (seen == committed):
            raise BadProgressError(f"{count} open offsets of {seen - committed}")
        offsets = [committed] if count else []
        for _ in range(count - 1):
            offsets.append(offsets[-1] + 1 + numbers.take())
        if offsets and offsets[-1] >= seen:
            raise BadProgressError(f"offset {offsets[-1]} is open and not below {seen}")
        if end is not None and seen > end:
            raise BadProgressError(f"the reader was at {seen} of a log that ends at {end}")
        starts = {}
        if flags & STARTS:
            for _ in range(numbers.take(len(offsets))):
                index, number = numbers.take(len(offsets) - 1), numbers.take(STARTS_MAX)
                starts[offsets[index]] = number
        numbers.check_end()
        made = cls(seen, offsets, starts)
        made.clean = bool(flags & CLEAN)
        return made

    def __repr__(self) -> str:
        return f"<Progress {self.committed}: {self}>"

    def __str__(self) -> str:
        """Return it for a person.

        >>> str(Progress(110, [100, 103, 104]))
        '3 open, 7 finished above'
        """
        return f"{len(self._open):,} open, {self.finished_above:,} finished above"


def is_progress(text: str) -> bool:
    """Return whether the metadata of a commit is a Progress, by its prefix."""
    return text.startswith(PREFIX)


def _fields_of(text: str, place: Place | None, committed: int) -> bytes:
    """Return the fields without their checksum; `place` None does not check it."""
    if not _TEXT.match(text):
        raise BadProgressError("not base64url")
    encoded = text[len(PREFIX) :].encode()
    try:
        raw = base64.urlsafe_b64decode(encoded + b"=" * (-len(encoded) % 4))
    except binascii.Error as error:
        raise BadProgressError(str(error)) from error
    # The last character has bits that are not used: another text must not mean the same.
    if base64.urlsafe_b64encode(raw).rstrip(b"=") != encoded:
        raise BadProgressError("bits after the end")
    if len(raw) < 4 + 3 or len(raw) > LIMIT:
        raise BadProgressError(f"{len(raw)} bytes")
    fields, checksum = raw[:-4], raw[-4:]
    if place is not None and _checksum(place, committed, fields) != checksum:
        raise BadProgressError("its checksum is wrong")
    return fields


def described(text: str, committed: int) -> str:
    """Return a Progress text for a person, without its checksum; "" if it cannot be read."""
    if not is_progress(text):
        return ""
    try:
        return str(Progress._parse(_fields_of(text, None, committed), committed, None))
    except BadProgressError:
        return ""


def _checksum(place: Place, committed: int, fields: bytes) -> bytes:
    covered = place.bytes() + b":%d:" % committed + fields
    return _native.crc32c(covered).to_bytes(4, "big")


class _Numbers:
    """Reads varints; every length was checked against the bytes that are there."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    def byte(self) -> int:
        if self._at >= len(self._raw):
            raise BadProgressError("it ends too early")
        self._at += 1
        return self._raw[self._at - 1]

    def take(self, most: int = VARINT_MAX) -> int:
        number = shift = 0
        while True:
            byte = self.byte()
            number |= (byte & 0x7F) << shift
            if number > most:
                raise BadProgressError(f"{number} is more than {most}")
            if byte < 0x80:
                break
            shift += 7
        if byte == 0 and shift:
            raise BadProgressError("a number has a needless byte")
        return number

    def check_end(self) -> None:
        if self._at != len(self._raw):
            raise BadProgressError(f"{len(self._raw) - self._at} bytes too many")
