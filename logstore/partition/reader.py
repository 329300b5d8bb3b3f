"""ReadableLog: reading an open log by offset, slice, key and time.

All its state is a View, which knows the segments and keeps up with whoever writes: this room turns
what the view shows into records.  It takes no lock but where the state of producers is asked for.

What looks like damage is looked at again when the log has moved meanwhile: a cut, a trim or a
rewritten segment may lie under a reader's feet.
"""

from __future__ import annotations

import collections
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, overload

from logstore.clock import Clock
from logstore.config import INT64_MAX, ConfigError, PartitionConfig
from logstore.errors import (
    CorruptLogError,
    OffsetOutOfRangeError,
    RecordNotFoundError,
)
from logstore.files.directory import Directory
from logstore.format.index import AbortedTransaction
from logstore.log.producer_state import OngoingTransaction, ProducerEntry
from logstore.log.segment import Segment
from logstore.partition.scan import Scan
from logstore.partition.view import Cut, View
from logstore.record import Record
from logstore.recovery.report import RecoveryReport

if TYPE_CHECKING:  # imported by those who look for damage
    from logstore.checking.partition_check import CheckProgress
    from logstore.checking.problem import Problem

__all__ = ["ReadableLog", "milliseconds"]


def check_int(what: str, number: object) -> None:
    """Offsets and epochs end up in files: a float or a bool would be found there much later."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{what} is an int, not {type(number).__name__}")


def milliseconds(when: int | datetime.datetime) -> int:
    """A time as a person gives it, in milliseconds since 1970."""
    if isinstance(when, datetime.datetime):
        if when.tzinfo is None:
            raise ValueError("a datetime without a time zone is ambiguous: give it one")
        return round(when.timestamp() * 1000)
    if not isinstance(when, int):
        raise TypeError(f"a time is int milliseconds or a datetime with a time zone, not {when!r}")
    return when


def is_committed(isolation: str) -> bool:
    """Whether this is "read_committed"; ConfigError unless it is one of Kafka's two levels."""
    if isolation not in ("read_uncommitted", "read_committed"):
        raise ConfigError(
            f"isolation must be 'read_uncommitted' or 'read_committed', not {isolation!r}"
        )
    return isolation == "read_committed"


class ReadableLog:
    """What every open log can do, whoever writes it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.topic, self.number = view.topic, view.number

    # ---- what it is ----

    @property
    def path(self) -> Path:
        """The directory."""
        return self._view.directory.path

    @property
    def name(self) -> str:
        """``topic-N``."""
        return self._view.name

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._view.closed

    @property
    def readonly(self) -> bool:
        """Whether it was opened with ``readonly=True``."""
        return self._view.readonly

    @property
    def config(self) -> PartitionConfig:
        """The settings it was opened with."""
        return self._view.config

    @property
    def clock(self) -> Clock:
        """The clock it was opened with."""
        return self._view.clock

    @property
    def directory(self) -> Directory:
        """The open directory; for the rooms that work on its files."""
        return self._view.directory

    @property
    def recovery(self) -> RecoveryReport:
        """What opening found and did."""
        return self._view.report

    @property
    def start_offset(self) -> int:
        """The first offset that can be read."""
        self._view.look()
        return self._view.start_offset

    @property
    def end_offset(self) -> int:
        """The offset the next record will get."""
        view = self._view
        view.look()
        view.check_usable()
        return min(view.segments[-1].end_offset, view.limit)

    @property
    def high_watermark(self) -> int:
        """What consumers may read: without replicas, all of it."""
        return self.end_offset

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments as they are now; the last is the one appended to."""
        self._view.look()
        return self._view.segments

    @property
    def dense_from(self) -> int:
        """From this offset on none is missing, but by damage."""
        return self._view.dense_from

    # ---- transactions ----

    @property
    def last_stable_offset(self) -> int:
        """What read_committed consumers may read: up to the oldest open transaction."""
        view = self._view
        while True:
            unstable = view.known_producers().unstable
            end = self.end_offset
            # An end that lay inside a transaction is no end for whoever then finds it decided.
            if view.known_producers().unstable is unstable:
                return max(min(end, unstable.offset), view.start_offset)

    @property
    def ongoing_transactions(self) -> list[OngoingTransaction]:
        """Transactions that are neither committed nor aborted, oldest first.

        One whose producer is gone for good holds the last stable offset back until someone aborts
        it with `end_transaction`.
        """
        with self._view.lock:
            _ = self.end_offset  # a reader looks again
            return self._view.known_producers().state.ongoing

    def known_producer(self, producer_id: int) -> ProducerEntry | None:
        """What the log remembers of a producer; None: nothing."""
        with self._view.lock:
            _ = self.end_offset  # a reader looks again
            return self._view.known_producers().state.get(producer_id)

    def aborted_transactions(
        self, start: int | None = None, stop: int | None = None
    ) -> list[AbortedTransaction]:
        """Aborted transactions with records or a marker in [start, stop), by their markers."""
        end = self.end_offset
        first = self._view.start_offset if start is None else start
        last = end if stop is None else stop
        return self._view.known_producers().aborted(self._view.segments, first, last)

    def producer_ends(self) -> list[tuple[int, int, int]]:
        """(producer id, epoch, last offset of its data or -1), by id; for Compactor."""
        with self._view.lock:
            return [
                (entry.producer_id, entry.epoch, entry.last_offset)
                for entry in self._view.known_producers().state
            ]

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
        """Records with offsets in [start, stop), lazily; from the first to the last by default.

        Without a `start` it begins at the first record.  A `start` below ``start_offset`` raises
        OffsetOutOfRangeError: these records were deleted.  A scan under way raises it when
        retention or `trim` overtakes it.  ``on_lost="skip"`` reads on at ``start_offset`` instead.
        A `start` beyond the end finds nothing; for offsets from the end use a slice,
        ``log[-10:]``.  At most `max_records` are returned.
        `isolation`: "read_uncommitted" shows every record as soon as it is there;
        "read_committed" shows none of an aborted transaction, and nothing at or beyond
        ``last_stable_offset``.
        ``follow=True`` waits for more at the end, for ever or until `timeout` seconds bring
        nothing.  ``on_corrupt="skip"`` passes over damage and lists it in ``scan.skipped``.
        """
        self._view.check_usable()
        committed = is_committed(isolation)
        for bound in (start, stop):
            if bound is not None and not isinstance(bound, int):
                raise TypeError(f"an offset is an int, not {type(bound).__name__}")
            if bound is not None and bound < 0:
                raise OffsetOutOfRangeError(
                    bound, start=self._view.start_offset, end=self.end_offset, where=self.name
                )
        if start is not None and start < self._view.start_offset and on_lost == "raise":
            raise OffsetOutOfRangeError(
                start, start=self._view.start_offset, end=self.end_offset, where=self.name
            )
        return Scan(self, start, stop, follow=follow, timeout=timeout, max_records=max_records,
                    on_corrupt=on_corrupt, on_lost=on_lost, committed=committed)  # fmt: skip

    @overload
    def __getitem__(self, offset: int) -> Record: ...
    @overload
    def __getitem__(self, offset: slice) -> Scan: ...

    def __getitem__(self, offset: int | slice) -> Record | Scan:
        """The record at an offset, negative counting from the end; a slice is a lazy Scan.

        Raises OffsetOutOfRangeError outside the log, RecordNotFoundError for a record that was
        compacted away.
        """
        if isinstance(offset, slice):
            return self._slice(offset)
        if not isinstance(offset, int):
            raise TypeError(f"an offset is an int, not {type(offset).__name__}")
        view = self._view
        while True:
            generation = view.generation
            try:
                view.look()
                view.check_usable()
                end = min(view.segments[-1].end_offset, view.limit)
                wanted = offset + end if offset < 0 else offset
                if not view.start_offset <= wanted < end:
                    raise OffsetOutOfRangeError(
                        offset, start=view.start_offset, end=end, where=self.name
                    )
                record = view.find_segment(wanted).get(wanted)
                if record is None:
                    raise RecordNotFoundError(wanted, where=self.name)
            except (CorruptLogError, FileNotFoundError, LookupError):
                # Also an offset out of range: beside a writer that swaps files the log may have
                # looked shorter for a moment.
                if not view.moved_since(generation):
                    raise
            else:
                return record

    def get(self, key: bytes, *, isolation: str = "read_uncommitted") -> Record | None:
        """The newest record of a key; None when there is none, or it is a tombstone.

        There is no index of keys: segments are read from the newest back to the first that has the
        key, and all of them when none does.  `isolation` as in `scan`: with "read_committed", the
        newest record that is of no aborted or open transaction.
        """
        if not isinstance(key, bytes):
            raise TypeError(f"a key is bytes, not {type(key).__name__}")
        committed = is_committed(isolation)
        while True:
            generation = self._view.generation
            try:
                record = self._newest_of(key, committed)
            except (CorruptLogError, FileNotFoundError, OffsetOutOfRangeError):
                if not self._view.moved_since(generation):
                    raise
                continue
            # A record that was found may be old by now, but was the newest when `get` was called.
            # One that was not found may have been compacted away because a newer one was appended.
            if record is not None or not self._view.moved_since(generation):
                return None if record is None or record.value is None else record

    def _newest_of(self, key: bytes, committed: bool) -> Record | None:
        start, end = self.start_offset, self.end_offset
        if committed:
            end = self.last_stable_offset
        offset = end
        while offset > start:
            segment = self._view.segment_for(offset - 1)
            found = segment.newest_of(key, start)
            if found >= 0:
                record = (
                    self._newest_committed(key, max(start, segment.base_offset), found, end)
                    if committed
                    else segment.get(found)
                )
                if record is not None:
                    return record
            offset = segment.base_offset
        return None

    def _newest_committed(self, key: bytes, start: int, found: int, end: int) -> Record | None:
        """The newest committed record of a key in [start, found], below `end`."""
        for first in (found, start):  # mostly it is the one at `found`
            newest = None
            scan = self.scan(first, min(found + 1, end), isolation="read_committed", on_lost="skip")
            for record in scan:
                if record.key == key:
                    newest = record
            if newest is not None:
                return newest
        return None

    def _slice(self, offsets: slice) -> Scan:
        if offsets.step not in (None, 1):
            raise ValueError("a slice of a log has no step")
        end, first = self.end_offset, self._view.start_offset

        def bound(offset: int | None) -> int | None:
            return max(first, offset + end) if offset is not None and offset < 0 else offset

        return self.scan(bound(offsets.start), bound(offsets.stop))

    def __iter__(self) -> Iterator[Record]:
        return iter(self.scan())

    def tail(self, n: int, *, isolation: str = "read_uncommitted") -> list[Record]:
        """The last `n` records, oldest first; fewer when the log has fewer."""
        if n < 0:
            raise ValueError(f"n must not be negative, not {n}")
        end, first = self.end_offset, self._view.start_offset
        n = min(n, end - first)
        span = n
        while n:
            # Offsets without a record (compaction, control batches) make a look further back.
            start = max(first, end - span)
            scan = self.scan(start, end, isolation=isolation, on_lost="skip")
            records = collections.deque(scan, maxlen=n)
            if len(records) == n or start == first:
                return list(records)
            span *= 4
        return []

    def offset_for_time(self, when: int | datetime.datetime) -> int:
        """The offset of the first record at or after a time; the end when nothing is that late.

        `when` is a datetime with a time zone, or int milliseconds since 1970.
        """
        when = milliseconds(when)
        while True:
            generation = self._view.generation
            try:
                return self._offset_for_time(when)
            except (CorruptLogError, FileNotFoundError):
                if not self._view.moved_since(generation):
                    raise

    def _offset_for_time(self, when: int) -> int:
        end, start = self.end_offset, self.start_offset
        if when > INT64_MAX:
            return end
        when = max(when, -INT64_MAX)
        for segment in self.segments:
            if segment.end_offset <= start:
                continue
            found = segment.offset_for_time(when, start)
            if found is not None and found < end:
                return found
        return end

    def read_batches(
        self, offset: int, max_bytes: int = 1 << 20, *, isolation: str = "read_uncommitted"
    ) -> list[bytes]:
        """Raw batches from the one that holds `offset` on; at least one, if there is any.

        With "read_committed" none at or beyond ``last_stable_offset``.  Those of aborted
        transactions are among them, as a Kafka consumer expects: see `aborted_transactions`.
        """
        end = self.end_offset
        if not self._view.start_offset <= offset <= end:
            raise OffsetOutOfRangeError(
                offset, start=self._view.start_offset, end=end, where=self.name
            )
        batches: list[bytes] = []
        size = 0
        stop = self.last_stable_offset if isolation == "read_committed" else end
        for batch in self.scan(offset, stop).batches():
            if batches and size + len(batch) > max_bytes:
                break
            batches.append(batch)
            size += len(batch)
        return batches

    def check(
        self,
        *,
        deep: bool = True,
        on_corrupt: str = "raise",
        progress: CheckProgress | None = None,
    ) -> list[Problem]:
        """Look at every file; what is wrong, the log first.  Nothing is written.

        ``deep=True`` reads every batch, record and index entry, and where there are transactions
        makes sure that every aborted one is known as such; otherwise only what is cheap is looked
        at.  ``on_corrupt="raise"`` raises CorruptLogError for the first problem of severity
        "error", with all of them as its ``.problems``; "report" returns these like the others.
        `progress` is called with (done, in all); what it raises ends the check.
        """
        from logstore.checking.partition_check import check_choice, raise_first_error

        problems = self.find_problems(deep=deep, progress=progress)
        if check_choice(on_corrupt) == "raise":
            raise_first_error(problems)
        return problems

    def find_problems(self, *, deep: bool, progress: CheckProgress | None = None) -> list[Problem]:
        """What `check` reports."""
        from logstore.checking.partition_check import find_problems

        return find_problems(self._view, deep=deep, progress=progress)

    # ---- what a scan needs ----

    @property
    def generation(self) -> int:
        """Moves when the log changed by more than an append."""
        return self._view.generation

    def moved_since(self, generation: int) -> bool:
        """Whether the log was cut, trimmed or opened anew; a reader has loaded it again by then.

        What looked like damage before may have been a cut: a writer announces one before it cuts.
        """
        return self._view.moved_since(generation)

    @property
    def cut(self) -> Cut:
        """The newest truncation.  Keep it together with an offset, and compare it later: see Cut.

        A reader of another process's log gets a new one when it looks, for example at the end.
        """
        return self._view.cut

    def segment_for(self, offset: int) -> Segment:
        """The segment with the greatest base offset at or below `offset`."""
        return self._view.segment_for(offset)

    def wait_beyond(
        self, offset: int, timeout: float | None, *, committed: bool = False, cut: Cut | None = None
    ) -> bool:
        """Wait until the end (the last stable offset) is beyond `offset`; False: the time is up.

        With `cut`, a truncation after it ends the wait as well.
        """
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        deadline = None if timeout is None else time.monotonic() + timeout

        def reached() -> bool:
            end = self.last_stable_offset if committed else self.end_offset
            return end > offset or (cut is not None and self._view.cut is not cut)

        return self._view.wait_until(reached, deadline)

    def listen(self, heard: Callable[[], object]) -> None:
        """Call `heard` after every append: a thread can wait for several logs at once.

        It runs in the appending thread, perhaps under the log's lock, and must only pass it on.
        Nobody calls it for appends of another process: there, look again from time to time.
        """
        self._view.listen(heard)

    def unlisten(self, heard: Callable[[], object]) -> None:
        """Call it no more."""
        self._view.unlisten(heard)
