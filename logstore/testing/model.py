"""The model of a partition: what its log means, with a plain list and no files.

A test drives a ``Partition`` and a ``LogModel`` with the same calls and compares what can be seen.
The model says nothing of batches, segments, durability or time: a caller gives every timestamp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from logstore.testing.reference import RecordLike, ReferenceRecord

__all__ = ["LogModel", "as_reference"]


def as_reference(record: RecordLike) -> ReferenceRecord:
    """The record by value alone, so that records of different classes can be compared."""
    offset = getattr(record, "offset", None)
    return ReferenceRecord(
        value=record.value,
        key=record.key,
        headers=tuple((name, value) for name, value in record.headers),
        timestamp=-1 if record.timestamp is None else record.timestamp,
        offset=-1 if offset is None else offset,
    )


class LogModel:
    """Records in offset order in ``[start_offset, end_offset)``; O(n) wherever that is plainer."""

    def __init__(self, start_offset: int = 0) -> None:
        self.start_offset = start_offset
        self.end_offset = start_offset
        self.records: list[ReferenceRecord] = []

    def __repr__(self) -> str:
        return f"<LogModel [{self.start_offset}, {self.end_offset}) {len(self.records)} records>"

    def append(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        timestamp: int,
    ) -> int:
        """Add a record and return its offset."""
        offset = self.end_offset
        self.records.append(ReferenceRecord(value, key, tuple(headers), timestamp, offset))
        self.end_offset += 1
        return offset

    def extend(self, records: Iterable[RecordLike]) -> range:
        """Add records that have timestamps and return their offsets."""
        start = self.end_offset
        for record in records:
            assert record.timestamp is not None, "the model has no clock"
            self.append(
                record.value, key=record.key, headers=record.headers, timestamp=record.timestamp
            )
        return range(start, self.end_offset)

    def truncate(self, end_offset: int) -> None:
        """Forget all records at and above ``end_offset``, which becomes the next to be assigned."""
        if end_offset < self.end_offset:
            self.records = [record for record in self.records if record.offset < end_offset]
            self.end_offset = end_offset
            self.start_offset = min(self.start_offset, end_offset)

    def trim(self, start_offset: int) -> None:
        """Forget all records below ``start_offset``."""
        if start_offset > self.start_offset:
            self.records = [record for record in self.records if record.offset >= start_offset]
            self.start_offset = start_offset

    def scan(self, start: int | None = None, stop: int | None = None) -> list[ReferenceRecord]:
        """The records of the half-open range of offsets."""
        low = self.start_offset if start is None else start
        high = self.end_offset if stop is None else stop
        return [record for record in self.records if low <= record.offset < high]

    def __getitem__(self, offset: int) -> ReferenceRecord:
        """The record at ``offset``, which counts from the end if negative; else IndexError."""
        if offset < 0:
            offset += self.end_offset
        if not self.start_offset <= offset < self.end_offset:
            raise IndexError(f"offset {offset} is outside {self!r}")
        for record in self.records:
            if record.offset == offset:
                return record
        raise LookupError(f"no record at offset {offset} of {self!r}")

    def tail(self, count: int) -> list[ReferenceRecord]:
        """The last ``count`` records, or all if there are fewer."""
        return self.records[max(0, len(self.records) - count) :]

    def offset_for_time(self, timestamp: int) -> int:
        """The first offset whose record is that late or later; ``end_offset`` if there is none."""
        for record in self.records:
            if record.timestamp >= timestamp:
                return record.offset
        return self.end_offset
