"""Reader: reads an open log by offset, key and time.

It has no state of its own.  LogView has the segments and follows changes by another process; Reader
turns them into records.  It takes the log's lock only where it reads the producer state.

A cut, a trim or a replaced segment may change the log during a read.  So an error that looks like
damage is raised only if the log did not change meanwhile: see `LogView.moved_since`.
"""

from __future__ import annotations

import collections
import datetime
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from logstore.config import INT64_MAX, ConfigError
from logstore.errors import CorruptLogError, OffsetOutOfRangeError
from logstore.format.index import AbortedTransaction
from logstore.log.producer_state import OngoingTransaction, ProducerEntry
from logstore.log.segment import Segment
from logstore.log.segment_slice import Slice
from logstore.partition.scan import Scan
from logstore.record import Record

if TYPE_CHECKING:
    from logstore.partition.active_log import ActiveLog
    from logstore.partition.view import Cut, LogView

__all__ = ["Reader", "TimedOffset", "check_int", "milliseconds"]


def check_int(what: str, number: object) -> None:
    """Raise TypeError unless `number` is an int.  Offsets and epochs are written to files."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{what} is an int, not {type(number).__name__}")


def milliseconds(when: int | datetime.datetime) -> int:
    """Return a time in milliseconds since 1970."""
    if isinstance(when, datetime.datetime):
        if when.tzinfo is None:
            raise ValueError("a datetime without a time zone is ambiguous: give it one")
        return round(when.timestamp() * 1000)
    if not isinstance(when, int):
        raise TypeError(f"a time is int milliseconds or a datetime with a time zone, not {when!r}")
    return when


# For replicas: up to the end of the log, also above the high watermark.  Not for consumers.
LOG_END = "log_end"


def is_committed(isolation: str) -> bool:
    """Whether this is "read_committed"; ConfigError unless it is one that exists."""
    if isolation not in ("read_uncommitted", "read_committed", LOG_END):
        raise ConfigError(
            f"isolation must be 'read_uncommitted' or 'read_committed', not {isolation!r}"
        )
    return isolation == "read_committed"


class TimedOffset(NamedTuple):
    """A record that was found by its time."""

    offset: int
    timestamp: int
    leader_epoch: int  # -1 if the log has none for this offset


class Reader:
    """Reads one log.  Each Scan refers to its Reader.

    `active` is asked for the end of the log, and a Scan keeps it alive through the Reader: a log
    stays locked as long as a Scan reads it, also if its Partition was dropped.
    """

    def __init__(self, view: LogView, active: ActiveLog) -> None:
        self._view = view
        self._active = active

    # ---- what a Scan needs ----

    @property
    def name(self) -> str:
        """``topic-N``."""
        return self._view.name

    @property
    def readonly(self) -> bool:
        """Whether another process may write the log."""
        return self._view.readonly

    @property
    def start_offset(self) -> int:
        """The first offset that can be read."""
        self._view.look()
        return self._view.start_offset

    @property
    def end_offset(self) -> int:
        """The offset that the next record gets."""
        writer = self._active.writer  # the short way: no segment has to be asked
        return writer.next_offset if writer is not None else self._view.end_offset

    @property
    def readable_end(self) -> int:
        """The end of the records that readers see: the high watermark of a replicated log."""
        writer = self._active.writer
        if writer is None:
            return self._view.readable_end
        end, limit = writer.next_offset, self._view.limit
        return end if end < limit else limit

    @property
    def bounded(self) -> bool:
        """Whether the log has a high watermark: then it has records that readers do not see."""
        return self._view.high_watermark is not None

    def end_for(self, isolation: str) -> int:
        """Return the end of the records that a reader of this isolation sees now."""
        if is_committed(isolation):
            return self.last_stable_offset
        return self.end_offset if isolation == LOG_END else self.readable_end

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments; the last is the active one."""
        self._view.look()
        return self._view.segments

    @property
    def generation(self) -> int:
        """A number that changes when the log changed by more than an append."""
        return self._view.generation

    def moved_since(self, generation: int) -> bool:
        """Whether the log was cut, trimmed or rewritten since `generation` was read."""
        return self._view.moved_since(generation)

    @property
    def cut(self) -> Cut:
        """The newest truncation."""
        return self._view.cut

    def segment_for(self, offset: int) -> Segment:
        """Return the segment with the greatest base offset at or below `offset`."""
        return self._view.segment_for(offset)

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
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        deadline = None if timeout is None else time.monotonic() + timeout

        def reached() -> bool:
            return self.end_for(isolation) > offset or (
                cut is not None and self._view.cut is not cut
            )

        # `reached` is called again after each wake-up: a truncation can lower the end once more.
        return self._view.wait_until(reached, deadline)

    # ---- transactions ----

    @property
    def last_stable_offset(self) -> int:
        """The end for read_committed consumers: the start of the oldest open transaction.

        It is at most the high watermark.
        """
        view = self._view
        while True:
            unstable = view.known_producers().unstable
            end = min(self.end_offset, view.limit)
            # `unstable` is immutable.  If it is another object now, a transaction began or ended
            # between the two reads, and `end` may be inside of it: read both again.
            if view.known_producers().unstable is unstable:
                return max(min(end, unstable.offset), view.start_offset)

    @property
    def ongoing_transactions(self) -> list[OngoingTransaction]:
        """Open transactions, oldest first."""
        with self._view.lock:
            _ = self.end_offset  # a ReadOnlyView takes in new batches
            return self._view.known_producers().state.ongoing

    def known_producer(self, producer_id: int) -> ProducerEntry | None:
        """Return the state of a producer in this log; None if it has none."""
        with self._view.lock:
            _ = self.end_offset  # a ReadOnlyView takes in new batches
            return self._view.known_producers().state.get(producer_id)

    def producers(self) -> tuple[ProducerEntry, ...]:
        """Return what the log remembers of each producer, by id."""
        with self._view.lock:
            _ = self.end_offset  # a reader looks again
            return tuple(self._view.known_producers().state)

    def aborted_transactions(
        self, start: int | None = None, stop: int | None = None
    ) -> list[AbortedTransaction]:
        """Return the aborted transactions with records or a marker in [start, stop)."""
        end = self.end_offset
        first = self._view.start_offset if start is None else start
        # `end` was read first: of a readonly log it takes in the newest batches.
        last = end if stop is None else stop
        return self._view.known_producers().aborted(self._view.segments, first, last)

    # ---- reading ----

    def scan(
        self,
        start: int | None = None,
        stop: int | None = None,
        *,
        isolation: str = "read_uncommitted",
        follow: bool = False,
        timeout: float | None = None,
        max_records: int | None = None,
        on_corrupt: str = "raise",
        on_lost: str = "raise",
    ) -> Scan:
        """See Partition.scan."""
        self._view.check_usable()
        is_committed(isolation)  # raises for an isolation that does not exist
        for bound in (start, stop):
            if bound is not None and not isinstance(bound, int):
                raise TypeError(f"an offset is an int, not {type(bound).__name__}")
            if bound is not None and bound < 0:
                raise self._out_of_range(bound)
        # Checked here as well, so that a caller gets the error from `scan` and not from the first
        # record.
        if start is not None and start < self._view.start_offset and on_lost == "raise":
            raise self._out_of_range(start)
        return Scan(self, start, stop, follow=follow, timeout=timeout, max_records=max_records,
                    on_corrupt=on_corrupt, on_lost=on_lost, isolation=isolation)  # fmt: skip

    def _out_of_range(self, offset: int) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            offset, start=self._view.start_offset, end=self.readable_end, where=self.name
        )

    def sliced(self, offsets: slice) -> Scan:
        """Return a Scan of a slice; negative offsets count from the end."""
        if offsets.step not in (None, 1):
            raise ValueError("a slice of a log has no step")
        end, first = self.readable_end, self._view.start_offset

        def bound(offset: int | None) -> int | None:
            # As for a list: a slice that begins before the first record begins at it.
            return max(first, offset + end) if offset is not None and offset < 0 else offset

        return self.scan(bound(offsets.start), bound(offsets.stop))

    def get(self, key: bytes, *, isolation: str = "read_uncommitted") -> Record | None:
        """See Partition.get."""
        if not isinstance(key, bytes):
            raise TypeError(f"a key is bytes, not {type(key).__name__}")
        is_committed(isolation)
        while True:
            generation = self._view.generation
            try:
                record = self._newest_of(key, isolation)
            except (CorruptLogError, FileNotFoundError, OffsetOutOfRangeError):
                if not self._view.moved_since(generation):
                    raise
                continue
            # A record that was found may be old by now, but was the newest when `get` was called.
            # One that was not found may have been compacted away because a newer one was appended.
            if record is not None or not self._view.moved_since(generation):
                return None if record is None or record.value is None else record

    def _newest_of(self, key: bytes, isolation: str) -> Record | None:
        start, end = self.start_offset, self.end_for(isolation)
        offset = end
        while offset > start:
            segment = self._view.segment_for(offset - 1)
            if segment.base_offset >= offset:
                break  # a trim or retention has deleted the segments below
            # Newest segment first: most keys are found without reading the older ones.
            found = segment.newest_of(key, start)
            if found >= 0:
                record = (
                    self._newest_below(key, max(start, segment.base_offset), found, end, isolation)
                    if found >= end or is_committed(isolation)
                    else segment.get(found)
                )
                if record is not None:
                    return record
            offset = segment.base_offset
        return None

    def _newest_below(
        self, key: bytes, start: int, found: int, end: int, isolation: str
    ) -> Record | None:
        """Return the newest record of a key in [start, found], below `end`."""
        for first in (found, start):  # mostly it is the one at `found`
            newest = None
            scan = self.scan(first, min(found + 1, end), isolation=isolation, on_lost="skip")
            for record in scan:
                if record.key == key:
                    newest = record
            if newest is not None:
                return newest
        return None

    def tail(self, n: int, *, isolation: str = "read_uncommitted") -> list[Record]:
        """See Partition.tail."""
        if n < 0:
            raise ValueError(f"n must not be negative, not {n}")
        end, first = self.readable_end, self._view.start_offset
        n = min(n, end - first)
        span = n
        while n:
            # Offsets without a record (compaction, control batches): start further back.
            start = max(first, end - span)
            scan = self.scan(start, end, isolation=isolation, on_lost="skip")
            records = collections.deque(scan, maxlen=n)
            if len(records) == n or start == first:
                return list(records)
            span *= 4
        return []

    def offset_for_time(self, when: int | datetime.datetime) -> int:
        """See Partition.offset_for_time."""
        when = milliseconds(when)
        while True:
            generation = self._view.generation
            try:
                return self._offset_for_time(when)
            except (CorruptLogError, FileNotFoundError):
                if not self._view.moved_since(generation):
                    raise

    def _offset_for_time(self, when: int) -> int:
        end, start = self.readable_end, self.start_offset
        if when > INT64_MAX:
            return end
        when = max(when, -INT64_MAX)  # a timestamp is an int64
        for segment in self.segments:
            if segment.end_offset <= start:
                continue
            found = segment.offset_for_time(when, start)
            # Not a record that was appended after `end` was read: the result is of one moment.
            if found is not None and found < end:
                return found
        return end

    def find_time(self, when: int, *, isolation: str = "read_uncommitted") -> TimedOffset | None:
        """Return the first record at or after `when`, in milliseconds; None if there is none.

        With "read_committed", None if that record is not below the last stable offset.
        """
        end = self.end_for(isolation)
        while True:
            generation = self._view.generation
            try:
                offset = self._offset_for_time(when)
                if offset >= end:
                    return None
                record = self._view.segment_for(offset).get(offset)
            except (CorruptLogError, FileNotFoundError):
                if not self._view.moved_since(generation):
                    raise
                continue
            if record is not None:
                epoch = self._active.leader_epochs.epoch_for(offset)
                return TimedOffset(offset, record.timestamp, -1 if epoch is None else epoch)
            if not self._view.moved_since(generation):
                return None

    def latest_time(self, *, isolation: str = "read_uncommitted") -> TimedOffset | None:
        """Return the first record with the greatest timestamp; None if no record has a time."""
        newest = max((segment.max_timestamp for segment in self.segments), default=-1)
        return None if newest < 0 else self.find_time(newest, isolation=isolation)

    def read_batches(
        self, offset: int, max_bytes: int = 1 << 20, *, isolation: str = "read_uncommitted"
    ) -> list[bytes]:
        """See Partition.read_batches; for replicas ``isolation="log_end"``, as in `read_slice`."""
        end = self.end_offset  # above the high watermark there is nothing yet: that is no error
        if not self._view.start_offset <= offset <= end:
            raise OffsetOutOfRangeError(
                offset, start=self._view.start_offset, end=end, where=self.name
            )
        batches: list[bytes] = []
        size = 0
        stop = min(self.end_for(isolation), end)
        beyond = LOG_END if isolation == LOG_END else "read_uncommitted"
        for batch in self.scan(offset, stop, isolation=beyond).batches():
            if batches and size + len(batch) > max_bytes:
                break
            batches.append(batch)
            size += len(batch)
        return batches

    def read_slice(
        self,
        offset: int,
        max_bytes: int,
        *,
        isolation: str = "read_uncommitted",
        whole_first: bool = True,
    ) -> Slice | None:
        """Return the raw batches that `read_batches` returns, as a part of one file.

        None if there is no batch at or above `offset`, or if the first one exceeds `max_bytes` and
        ``whole_first=False``.  A slice ends with its segment.  The bytes are read by `Slice.read`;
        their checksums are not verified.  A replica reads with ``isolation="log_end"``: up to the
        end of the log, also above the high watermark.
        """
        view = self._view
        while True:
            generation = view.generation
            end = min(self.end_offset, view.lost_from)
            if not view.start_offset <= offset <= end:
                raise self._out_of_range(offset)
            stop = min(self.end_for(isolation), end)
            try:
                return self._slice(offset, stop, max_bytes, whole_first)
            except (CorruptLogError, FileNotFoundError):
                if not view.moved_since(generation):
                    raise

    def _slice(self, offset: int, stop: int, max_bytes: int, whole_first: bool) -> Slice | None:
        while offset < stop:
            segment = self._view.segment_for(offset)
            found = segment.slice(offset, stop, max_bytes, whole_first=whole_first)
            if found is not None:
                return found if found.size_bytes else None
            if segment.next_base is None:
                break
            offset = segment.next_base  # compaction removed the last batches of this segment
        return None
