"""Source: reads one assigned partition of a consumer.

It returns records in runs, which are iterators of the partition's scan.  `position` is the next
offset to read, or None if it is not known yet.

Invariant: no record is skipped without an exception.  If the position is outside of the log,
reading raises OffsetOutOfRangeError; if the log was truncated below the position, it raises
LogTruncatedError, even if other records have been appended since.  The Fetcher decides where to
continue.

Only the consumer's thread uses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from logstore import _native
from logstore.coordinators.lag import Pace
from logstore.coordinators.offset_records import TopicPartition
from logstore.errors import LogTruncatedError, OffsetOutOfRangeError
from logstore.partition.partition import Partition
from logstore.partition.scan import Scan
from logstore.partition.view import Cut
from logstore.record import Record

__all__ = ["Source"]

INT64_MAX = (1 << 63) - 1


class Source:
    """Reads one partition from a position on."""

    __slots__ = ("_committed", "_cut", "_on_corrupt", "_records", "_scan", "committed_offset",
                 "log", "pace", "partition", "paused", "position")  # fmt: skip

    def __init__(self, partition: TopicPartition, log: Partition, *, committed: bool,
                 on_corrupt: str) -> None:  # fmt: skip
        self.partition = partition
        self.log = log
        self.position: int | None = None  # None until the committed offset is known
        self.committed_offset = -1  # the offset that this consumer committed last
        self.paused = False
        self.pace = Pace()
        self._committed = committed
        self._on_corrupt = on_corrupt
        self._scan: Scan | None = None
        self._records: Iterator[Record] | None = None
        self._cut = log.parts.view.cut  # the newest truncation when the position was chosen

    @property
    def end(self) -> int:
        """The end of the records that may be read now, as `isolation` allows."""
        return self.log.last_stable_offset if self._committed else self.log.high_watermark

    def seek(self, position: int | None, cut: Cut | None = None) -> None:
        """Set the position.

        `cut` is the newest truncation, read before the position was chosen.  Leave it out if the
        position was derived from records of this source.
        """
        self.position = position
        self._scan = self._records = None
        if cut is not None:
            self._cut = cut

    def read(self, limit: int) -> list[Record]:
        """Return the next records, at most `limit`; an empty list if there are none yet.

        If an error follows some records, return the records; the next call raises the error.
        """
        position = self.position
        assert position is not None
        records: list[Record] = []
        try:
            if self._records is None and not self._open(position):
                return records
            assert self._records is not None
            records.extend(itertools.islice(self._records, limit))
        # The iterator cannot be continued after an error: the next call opens a new one.
        except BaseException:
            self._scan = self._records = None
            if not records:
                raise
        if records:
            self.position = records[-1].offset + 1
        if len(records) < limit:
            if self._scan is not None and not records:
                # The scan has passed offsets without a record, such as markers, aborted
                # transactions or compacted records: do not read them again.
                self.position = max(position, self._scan.next_offset)
            self._scan = self._records = None
        return records

    def run(self, limit: int) -> _native.SegmentScan | None:
        """Return the scan's own iterator of the next `limit` offsets; None if there is none.

        From now on the iterator's ``next_offset`` is the position, and `position` is not updated.
        The caller calls `seek` with ``next_offset`` at the end.
        """
        position = self.position
        assert position is not None
        if not self._open(position):
            return None
        log = self.log
        # Within one segment the scan is a single C iterator: see Scan._only_segment_scan.
        ends = log.parts.view.segment_for(position).end_offset
        stop = min(self.end, position + limit, ends if ends > position else INT64_MAX)
        self._scan = self._records = None
        scan = iter(
            log.scan(position, stop, isolation=self._isolation, on_corrupt=self._on_corrupt)
        )
        return scan if isinstance(scan, _native.SegmentScan) else None

    @property
    def _isolation(self) -> str:
        return "read_committed" if self._committed else "read_uncommitted"

    def _open(self, position: int) -> bool:
        """Start a scan at a position; return False if there is no record yet.

        Raises if the position is outside of the log, or was truncated.
        """
        log = self.log
        end = self.end
        # `end` was read first: a truncation after it is found here, one before it lowered `end`.
        if log.parts.view.cut is not self._cut:
            self._check_cuts(position)
        if position >= end:
            # At the end exactly there is nothing yet; beyond it, the position is wrong.
            if position > log.end_offset:
                raise self._outside(position)
            return False
        if position < log.start_offset:
            raise self._outside(position)
        self._scan = log.scan(position, isolation=self._isolation, on_corrupt=self._on_corrupt)
        self._records = iter(self._scan)
        return True

    def _check_cuts(self, position: int) -> None:
        """Raise LogTruncatedError if the log was truncated below the position since `_cut`."""
        # Read the newest cut first: one that is added in between is checked again by the next call.
        newest, lowest = self.log.parts.view.cut, self._cut.lowest_since()
        if lowest is not None and lowest < position:
            raise LogTruncatedError(position, truncated_to=lowest, start=self.log.start_offset,
                                    end=self.log.end_offset, where=self.log.name)  # fmt: skip
        self._cut = newest

    def _outside(self, position: int) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            position, start=self.log.start_offset, end=self.log.end_offset, where=self.log.name
        )
