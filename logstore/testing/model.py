"""The model of a partition: a plain list of records, without files.

A test makes the same calls on a ``Partition`` and a ``LogModel`` and compares the results.  The
model has no batches, segments, durability or clock: the caller gives every timestamp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from logstore.testing.reference import RecordLike, ReferenceRecord

__all__ = ["LogModel", "as_reference"]


def as_reference(record: RecordLike) -> ReferenceRecord:
    """Return the record as a ReferenceRecord, to compare records of different classes."""
    offset = getattr(record, "offset", None)
    return ReferenceRecord(
        value=record.value,
        key=record.key,
        headers=tuple((name, value) for name, value in record.headers),
        timestamp=-1 if record.timestamp is None else record.timestamp,
        offset=-1 if offset is None else offset,
    )


class LogModel:
    """Records in offset order in ``[start_offset, end_offset)``.  Most calls are O(n)."""

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
        """Delete all records at and above ``end_offset``, which becomes the next offset."""
        if end_offset < self.end_offset:
            self.records = [record for record in self.records if record.offset < end_offset]
            self.end_offset = end_offset
            self.start_offset = min(self.start_offset, end_offset)

    def trim(self, start_offset: int) -> None:
        """Delete all records below ``start_offset``."""
        if start_offset > self.start_offset:
            self.records = [record for record in self.records if record.offset >= start_offset]
            self.start_offset = start_offset

    def scan(self, start: int | None = None, stop: int | None = None) -> list[ReferenceRecord]:
        """Return the records with offsets in ``[start, stop)``."""
        low = self.start_offset if start is None else start
        high = self.end_offset if stop is None else stop
        return [record for record in self.records if low <= record.offset < high]

    def __getitem__(self, offset: int) -> ReferenceRecord:
        """Return the record at ``offset``, from the end if negative.  Raises IndexError."""
        if offset < 0:
            offset += self.end_offset
        if not self.start_offset <= offset < self.end_offset:
            raise IndexError(f"offset {offset} is outside {self!r}")
        for record in self.records:
            if record.offset == offset:
                return record
        raise LookupError(f"no record at offset {offset} of {self!r}")

    def tail(self, count: int) -> list[ReferenceRecord]:
        """Return the last ``count`` records, or all if there are fewer."""
        return self.records[max(0, len(self.records) - count) :]

    def offset_for_time(self, timestamp: int) -> int:
        """Return the first offset with at least this timestamp, else ``end_offset``."""
        for record in self.records:
            if record.timestamp >= timestamp:
                return record.offset
        return self.end_offset
