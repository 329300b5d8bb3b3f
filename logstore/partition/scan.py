"""Scan: a lazy view of the records in [start, stop), read when it is iterated.

Each iteration starts at the beginning and reads the log as it is then.  C iterators, one for each
segment, return records, columns and raw batches; they are chained without a Python frame for each
record.  A scan needs one read window (a few while a long scan reads ahead) and, for columns, one
chunk.  Its memory does not depend on the size of the log.

A scan is a view, not a cursor: threads must not share one iteration.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from logstore import _native
from logstore.errors import LogTruncatedError, OffsetOutOfRangeError
from logstore.format.batch import BatchHeader
from logstore.format.index import AbortedTransaction, pack_aborted
from logstore.log.segment import Segment
from logstore.record import Columns, Record, arrow_schema, field_mask, needed

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from logstore.partition.view import Cut

__all__ = ["LocatedBatch", "Scan", "Skipped", "producer_batches"]

INT64_MAX = (1 << 63) - 1
ROWS_MAX = 1 << 24  # memory for the rows of a chunk is allocated before it is filled
CHUNK_BYTES = 8 << 20  # a chunk of columns with more bytes is full, even with few rows


class Skipped(NamedTuple):
    """A damaged range of a file that ``on_corrupt="skip"`` skipped."""

    path: str
    position: int
    end_position: int
    offsets: range
    reason: str


class LocatedBatch(NamedTuple):
    """A raw record batch, with its file and position."""

    path: str
    position: int
    raw: bytes


class Readable(Protocol):
    """The interface of Reader that a scan uses."""

    @property
    def name(self) -> str: ...
    @property
    def readonly(self) -> bool: ...
    @property
    def start_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    @property
    def readable_end(self) -> int:
        """The end of the records that readers see."""

    @property
    def bounded(self) -> bool:
        """Whether there may be records at and above `readable_end`."""

    @property
    def generation(self) -> int:
        """A number that changes when the log changed by more than an append."""

    def moved_since(self, generation: int) -> bool:
        """Whether it changed since; then an error that looks like damage may be a change."""

    @property
    def cut(self) -> Cut:
        """The newest truncation."""

    def segment_for(self, offset: int) -> Segment:
        """Return the segment with the greatest base offset at or below `offset`."""

    def end_for(self, isolation: str) -> int:
        """Return the end of the records that a reader of this isolation sees now."""

    def aborted_transactions(self, start: int, stop: int) -> list[AbortedTransaction]: ...
    def wait_beyond(
        self,
        offset: int,
        timeout: float | None,
        *,
        isolation: str = "read_uncommitted",
        cut: Cut | None = None,
    ) -> bool:
        """Wait until the end for this isolation is beyond `offset`; False on timeout.

        With `cut`, a truncation after it ends the wait as well.
        """


class Scan:
    """Records of a partition, lazily.  Made by ``partition.scan()`` and by slices."""

    def __init__(
        self,
        source: Readable,
        start: int | None,
        stop: int | None,
        *,
        follow: bool = False,
        timeout: float | None = None,
        max_records: int | None = None,
        on_corrupt: str = "raise",
        on_lost: str = "raise",
        isolation: str = "read_uncommitted",
    ) -> None:
        if on_corrupt not in ("raise", "skip"):
            raise ValueError(f"on_corrupt must be 'raise' or 'skip', not {on_corrupt!r}")
        if on_lost not in ("raise", "skip"):
            raise ValueError(f"on_lost must be 'raise' or 'skip', not {on_lost!r}")
        if max_records is not None and max_records < 0:
            raise ValueError(f"max_records must not be negative, not {max_records}")
        self._source = source
        # No offset is greater than INT64_MAX: the limit changes no result.
        self._start = None if start is None else min(start, INT64_MAX)
        self._stop = None if stop is None else min(stop, INT64_MAX)
        self._follow = follow
        self._timeout = timeout
        self._max_records = None if max_records is None else min(max_records, sys.maxsize)
        self._on_corrupt = on_corrupt
        self._skips_lost = on_lost == "skip"
        self._isolation = isolation
        self._committed = isolation == "read_committed"
        self._plain = isolation == "read_uncommitted"
        self._current: _native.SegmentScan | None = None
        self._reached: int | None = None  # the position of an iteration between two segments
        self._skipped: list[Skipped] = []
        self._raw_stop = INT64_MAX  # raw batches end at or below it

    def __repr__(self) -> str:
        stop = "" if self._stop is None else self._stop
        start = "" if self._start is None else self._start
        return f"<Scan {self._source.name}[{start}:{stop}]{' follow' if self._follow else ''}>"

    @property
    def next_offset(self) -> int:
        """The offset after the last record of the latest iteration: start the next scan here."""
        if self._current is not None:
            return self._current.next_offset
        if self._reached is not None:
            return self._reached
        return self._source.start_offset if self._start is None else self._start

    @property
    def skipped(self) -> list[Skipped]:
        """The damage that the latest iteration skipped, with ``on_corrupt="skip"``."""
        current = [] if self._current is None else self._skipped_by(self._current)
        return self._skipped + current

    # ---- records ----

    def __iter__(self) -> Iterator[Record]:
        if not self._follow and self._max_records is None:
            only = self._only_segment_scan()
            if only is not None:
                return only
        records = itertools.chain.from_iterable(self._segment_scans())
        if self._max_records is None:
            return records
        return itertools.islice(records, self._max_records)

    # ---- columns ----

    def columns(
        self,
        rows: int = 65536,
        *,
        fields: Sequence[str] | None = None,
    ) -> Iterator[Columns]:
        """Yield chunks of at most `rows` records as arrays; `fields` limits what is decoded.

        A chunk ends early beyond 8 MiB of keys or values.  Long scans read ahead in a thread of
        their own.
        """
        mask = field_mask(fields)
        if rows < 1:
            raise ValueError(f"rows must be at least 1, not {rows}")
        rows = min(rows, ROWS_MAX)
        return self._chunks(rows, mask)

    def _chunks(self, rows: int, mask: int) -> Iterator[Columns]:
        left = INT64_MAX if self._max_records is None else self._max_records
        hint = 0
        chunk = _native.ColumnBuilder(mask, max(1, min(rows, left)), CHUNK_BYTES, hint)
        for scan in self._segment_scans():
            while left > 0 and scan.fill(chunk):
                hint = chunk.value_bytes + (chunk.value_bytes >> 3)
                left -= chunk.rows
                yield Columns(chunk.finish())
                chunk = _native.ColumnBuilder(mask, max(1, min(rows, left)), CHUNK_BYTES, hint)
            if left <= 0:
                return
            if self._follow and chunk.rows:
                # Yield the rows that have arrived before waiting for more.
                left -= chunk.rows
                yield Columns(chunk.finish())
                chunk = _native.ColumnBuilder(mask, max(1, min(rows, left)), CHUNK_BYTES, hint)
        if chunk.rows:
            yield Columns(chunk.finish())

    def _only_segment_scan(self) -> _native.SegmentScan | None:
        """Return the C iterator itself if the whole range is in one segment, else None."""
        start = self._first_offset()
        stop = start + self._span()
        if start >= stop:
            return None
        if self._source.readonly:
            return None  # another process may cut the log: _segment_scans checks for that
        segment = self._source.segment_for(start)
        if segment.base_offset > start or segment.end_offset < stop:
            return None
        self._skipped, self._reached = [], start
        try:
            self._current = self._open(segment, start, stop)
        except FileNotFoundError:
            return None  # deleted just now: _segment_scans finds out why
        return self._current

    def _span(self) -> int:
        """Return how many offsets this scan covers now."""
        stop = self._end()
        return (stop if self._stop is None else min(stop, self._stop)) - self._first_offset()

    def to_arrow(self, *, fields: Sequence[str] | None = None) -> pa.Table:
        """Return all records as one Arrow table: offset, timestamp, key, value, headers."""
        self._must_end("to_arrow")
        pa = needed("pyarrow", "to_arrow", "arrow")
        batches = [chunk.to_arrow() for chunk in self.columns(fields=fields)]
        return pa.Table.from_batches(batches, schema=arrow_schema(fields))

    def to_pandas(self, *, fields: Sequence[str] | None = None) -> pd.DataFrame:
        """Return all records as a pandas DataFrame; values and keys are bytes objects."""
        self._must_end("to_pandas")
        needed("pandas", "to_pandas", "pandas")
        return self.to_arrow(fields=fields).to_pandas()

    def _must_end(self, what: str) -> None:
        if self._follow and self._timeout is None and self._max_records is None:
            raise ValueError(f"{what}() of a scan that follows for ever: give it a timeout")

    # ---- raw ----

    def batches(self) -> Iterator[bytes]:
        """Yield the raw record batches of the files, control batches too.

        With isolation "read_committed", batches of aborted transactions are left out.
        """
        return (batch.raw for batch in self.located_batches())

    def located_batches(self) -> Iterator[LocatedBatch]:
        """Yield the same batches as `batches`, with the file and the byte position of each."""
        for scan in self._segment_scans():
            path, stop = scan.path, self._raw_stop
            while (raw := scan.next_raw()) is not None:
                if stop < INT64_MAX and BatchHeader.parse(raw).next_offset > stop:
                    break  # a part of the batch is above the high watermark
                yield LocatedBatch(path, scan.position - len(raw), raw)

    # ---- segment by segment ----

    def _end(self) -> int:
        """Return the offset up to which this scan may read now."""
        # The common case without another call.
        return self._source.readable_end if self._plain else self._source.end_for(self._isolation)

    def _is_bounded(self) -> bool:
        """Whether the files may have records at and above `_end`."""
        return self._committed or (self._plain and self._source.bounded)

    def _first_offset(self) -> int:
        """Return the first offset; raise if it was deleted, unless `on_lost` is "skip"."""
        start = self._source.start_offset
        if self._start is None:
            return start
        if self._start < start and not self._skips_lost:
            raise self._deleted_error(self._start)
        return max(self._start, start)

    def _skipped_by(self, scan: _native.SegmentScan) -> list[Skipped]:
        path = scan.path
        return [
            Skipped(path, position, end, range(first, stop), reason)
            for position, end, first, stop, reason in scan.skipped
        ]

    def _segment_scans(self) -> Iterator[_native.SegmentScan]:
        """Yield a C iterator for each segment; if following, the same again when it has more."""
        source = self._source
        cut = source.cut  # before the first read: later truncations are noticed
        offset = self._first_offset()
        stop = self._stop
        if stop is None:
            stop = INT64_MAX if self._follow else self._end()
        elif not self._follow:
            stop = min(stop, self._end())
        self._skipped = []
        self._current, self._reached = None, offset
        while offset < stop:
            limit = self._end()
            cut = self._after_cuts(cut, offset)
            if offset >= limit:
                if not self._follow or not self._wait_beyond(offset, cut):
                    return
                continue
            if offset < source.start_offset:
                if not self._skips_lost:
                    raise self._deleted_error(offset)
                offset = self._reached = source.start_offset
                continue
            # The file may have more.  Which transactions were aborted is known up to `limit` only.
            # Open again after it.
            bounded = self._is_bounded()
            self._raw_stop = limit if bounded else INT64_MAX
            limit = min(stop, limit) if bounded else stop
            generation = source.generation
            try:
                segment = source.segment_for(offset)
                file = segment.file
                scan = self._open(segment, offset, limit)
            except FileNotFoundError:
                lost = offset < source.start_offset
                if not source.moved_since(generation) or (lost and not self._skips_lost):
                    raise self._deleted_error(offset) from None
                continue
            scan.moved = functools.partial(source.moved_since, generation)
            self._current = scan
            while True:
                yield scan
                offset = max(offset, scan.next_offset)
                if self._is_stale(scan, cut):
                    break  # it ended at a cut: look for the segment again from here
                if bounded:
                    ends = segment.next_base
                    offset = max(offset, limit if ends is None else min(limit, ends))
                    break
                if segment.sealed:
                    # Records that were appended just before the roll are in this segment.
                    yield scan
                    offset = max(offset, scan.next_offset)
                    if not self._is_stale(scan, cut):
                        offset = max(offset, segment.end_offset)
                    break
                if offset >= stop or not self._follow:
                    return
                if not self._wait_beyond(offset, cut):
                    return
                if source.segment_for(offset) is not segment or segment.open_file is not file:
                    break  # the log was cut or loaded again: its end is in another file now
                if self._is_bounded():
                    break  # the log has a high watermark now
            self._skipped += self._skipped_by(scan)
            self._current, self._reached = None, offset

    def _wait_beyond(self, offset: int, cut: Cut) -> bool:
        return self._source.wait_beyond(offset, self._timeout, isolation=self._isolation, cut=cut)

    def _is_stale(self, scan: _native.SegmentScan, cut: Cut) -> bool:
        return scan.stale or self._source.cut is not cut

    def _after_cuts(self, cut: Cut, offset: int) -> Cut:
        """Return the newest Cut; raise if a truncation since `cut` is below the position."""
        newest = self._source.cut
        if newest is not cut:
            lowest = cut.lowest_since()
            if lowest is not None and lowest < offset:
                source = self._source
                raise LogTruncatedError(offset, truncated_to=lowest, start=source.start_offset,
                                        end=source.end_offset, where=source.name)  # fmt: skip
        return newest

    def _open(self, segment: Segment, offset: int, stop: int) -> _native.SegmentScan:
        aborted = b""
        if self._committed:
            end = stop if segment.next_base is None else min(stop, segment.next_base)
            aborted = pack_aborted(self._source.aborted_transactions(offset, end))
        return segment.scan(offset, stop, on_corrupt=self._on_corrupt, aborted=aborted)

    def _deleted_error(self, offset: int) -> OffsetOutOfRangeError:
        """Return the error for records that were deleted before this scan read them."""
        source = self._source
        return OffsetOutOfRangeError(
            offset, start=source.start_offset, end=source.end_offset, where=source.name
        )


def producer_batches(scan: Scan) -> Iterator[bytes]:
    """Yield the headers of batches with a producer id; control batches whole.

    Not a method: Scan is public, and this is for the coordinators.
    """
    for each in scan._segment_scans():
        while (raw := each.next_producer()) is not None:
            yield raw
