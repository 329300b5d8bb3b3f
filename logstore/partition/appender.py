"""Appender: appends records to a log, for any number of threads.

One record at a time, many at once, through a buffered Writer, or as raw batches: see RawAppender.
Records are encoded without a lock, written under the view's lock, and synced without it.

An append has three outcomes: it returns the offset; it raises, and nothing is in the log; or it
raises IndeterminateAppendError with the offsets that may be in the log.

State: builders for reuse, which threads pop and append without a lock; the writers that `close`
closes; and, under the view's lock, the last timestamp of LogAppendTime.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from logstore import _native
from logstore.config import (
    PartitionConfig,
    wants_fsync,
)
from logstore.errors import (
    DiskFullError,
    IndeterminateAppendError,
    InterruptedAppendError,
    InvalidRecordError,
)
from logstore.format.batch import HEADER_BYTES, BatchHeader, EndMarker
from logstore.format.encoder import Batches, codec_number
from logstore.format.validation import AppendedBatches
from logstore.log.producer_state import Origin
from logstore.partition.active_log import ActiveLog
from logstore.partition.raw.raw_appender import RawAppender
from logstore.partition.writer import Writer, Writers
from logstore.record import Record

if TYPE_CHECKING:
    pass

__all__ = ["Appender"]

BATCH_BYTES = 64 << 10  # what a buffered writer fills before it starts the next batch


class Appender(RawAppender):
    """Appends records to one log, and raw batches: see RawAppender."""

    def __init__(
        self, active: ActiveLog, explain_full: Callable[[DiskFullError, int], None]
    ) -> None:
        super().__init__(active, explain_full)
        self.writers = Writers()  # closed with the log
        self._apply(active.view.config)

    # ---- settings ----

    def _apply(self, config: PartitionConfig) -> None:
        self._append_time = config.message_timestamp_type == "LogAppendTime"
        # Whether appends need no time from Python: no injected clock, no LogAppendTime.
        self._plain = self._active.ask_time is None and not self._append_time
        self._codec = codec_number(None, config)
        self._spare: list[Batches] = []  # a new list: builders hold limits and codec

    def reconfigure(self, config: PartitionConfig) -> None:
        """Use other settings.  A change of segment or index settings starts a new segment.

        Writers that were made before keep theirs.
        """
        view, active = self._view, self._active
        with view.lock:
            view.check_usable()
            needs_roll = view.reconfigure(config)
            self._apply(config)
            if active.writer is not None and needs_roll:
                active.roll()

    # ---- appending ----

    def _batches(self) -> Batches:
        """Return an empty builder.  Builders are reused: fresh memory is slow."""
        with contextlib.suppress(IndexError):
            return self._spare.pop()
        return Batches.of(self._view.config, self._codec, self._active.ask_time)

    def _write_locked(self, batches: _native.Builder) -> range:
        """Append sealed batches; roll first if they do not fit into the active segment."""
        active = self._active
        active.finish_roll()
        if active.asleep:
            active.wake_up()
        writer = active.writer
        if writer is None:
            active.refuse()
        room = self._view.directory.room
        if room is not None and room.short:
            room.require(batches._size_bytes)
        leadership = self._leadership
        if not leadership.noted:
            leadership.assign(leadership.epoch, writer.next_offset)
        append_time = self._active.time_of_append() if self._append_time else -1
        now = -1 if active.ask_time is None else active.ask_time()
        try:
            first = writer.append(batches, leadership.epoch, append_time, now)
            if first < 0:
                active.roll_locked(writer.next_offset)
                writer = cast(_native.SegmentWriter, active.writer)
                first = writer.append(batches, leadership.epoch, append_time, now)
                if first < 0:
                    raise InvalidRecordError(f"{batches._size_bytes} bytes do not fit a segment")
        except IndeterminateAppendError as error:
            active.fail(error)  # the bytes may be in the file: no more appends
            raise
        if self._view.followers:
            self._view.wake_followers()
        return range(first, writer.next_offset)

    def append(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp: int | datetime.datetime | None = None,
        durability: str | None = None,
        expect_offset: int | None = None,
    ) -> int:
        """See Partition.append."""
        active, view = self._active, self._view
        fsync = self._durability.fsync if durability is None else wants_fsync(durability)
        spare = self._spare  # this list, even if `reconfigure` replaces it before the end
        try:
            batches = spare.pop()
        except IndexError:
            batches = self._batches()
        batches.append(value, key=key, headers=headers, timestamp=timestamp)
        if self._codec:
            batches._seal()
        first = -1
        try:
            with view.lock:
                writer = active.writer
                leadership = self._leadership
                if writer is not None:
                    first = writer.next_offset
                if expect_offset is not None:
                    self._active.expect(expect_offset)
                # The common case without another call; else _write_locked does the same.
                if (
                    writer is None
                    or not (self._plain and leadership.noted)
                    or writer.append(batches, leadership.epoch, -1, -1) < 0
                ):
                    first = self._write_locked(batches).start
            if view.followers:
                view.wake_followers()
            if fsync:
                self._durability.commit.wait_for(first + 1, first)
            # Only here: the except blocks test `_records == 0` to know that it was written.
            spare.append(batches)
        except KeyboardInterrupt as interrupt:
            if batches._records == 0:
                raise InterruptedAppendError(offsets=range(first, first + 1)) from interrupt
            raise
        except IndeterminateAppendError as error:
            if batches._records or self._durability.commit.failed:
                active.fail(error)
            raise  # else it was written, and another thread truncated it: the log is valid
        except DiskFullError as error:
            writer = None  # see Cutter.explain_full
            self._explain_full(error, batches._size_bytes)
            raise
        return first

    def extend(
        self,
        records: Iterable[bytes | Record],
        *,
        durability: str | None = None,
        expect_offset: int | None = None,
    ) -> range:
        """See Partition.extend."""
        fsync = self._durability.fsync if durability is None else wants_fsync(durability)
        self._view.check_usable()
        spare = self._spare
        batches = self._batches()
        batches.extend(records)
        pieces = [*batches.full, batches]
        for piece in pieces:
            piece._seal()
        first = -1
        total = sum(piece._records for piece in pieces)
        try:
            with self._view.lock:
                if expect_offset is not None:
                    self._active.expect(expect_offset)
                first = self._active.next_offset()
                for piece in pieces:
                    self._write_locked(piece)
            if fsync and total:
                self._durability.commit.wait_for(first + total, first)
            batches.full.clear()
            spare.append(batches)  # only here, as in `append`
        except KeyboardInterrupt as interrupt:
            if first >= 0 and pieces[0]._records == 0 < total:
                raise InterruptedAppendError(offsets=range(first, first + total)) from interrupt
            raise
        except OSError as error:
            if isinstance(error, DiskFullError):
                self._explain_full(error, sum(piece._size_bytes for piece in pieces))
            if len(pieces) > 1 and pieces[0]._records == 0:
                raise IndeterminateAppendError(
                    f"{error}, after a part of the records was written",
                    offsets=range(first, first + total),
                ) from error
            raise
        return range(first, first + total)

    # ---- for producers and writers ----

    def write_produced(
        self,
        batches: _native.Builder,
        *,
        producer_id: int,
        producer_epoch: int,
        sequence: int,
        transactional: bool = False,
        origin: Origin = "leader",
        tried: list[int] | None = None,
    ) -> AppendedBatches:
        """Append the batches of a builder for a producer, with sequences from `sequence` on.

        Does not sync: see `make_durable`.  If the log has these batches already, returns their
        offsets.  The builder is empty afterwards, also after an interrupt, if and only if the
        batches are in the log, from ``tried[0]`` on.
        """
        batches._seal()
        records = batches._records
        with self._view.lock:
            while True:
                first = self._active.next_offset()
                leadership = self._leadership
                leadership.note([(leadership.epoch, first)])
                _, heads = batches._stamp(
                    producer_id, producer_epoch, sequence, transactional, first, leadership.epoch
                )
                headers: list[tuple[BatchHeader, EndMarker | None]] = [
                    (BatchHeader.parse(heads, at), None)
                    for at in range(0, len(heads), HEADER_BYTES)
                ]
                if not self._abort_older_locked(headers, origin):
                    break
            offsets = range(first, first + records)
            admission = self._view.producers.admit(headers, origin)
            if admission.duplicate is not None:
                start = admission.duplicate.offsets.start
                if tried is not None:
                    tried[0] = start
                batches._drop()
                return AppendedBatches(range(start, start + records), -1, True)
            if tried is not None:
                tried[0] = first
            try:
                self._view.producers.begin(admission, offsets.stop)
                self._write_locked(batches)
            except KeyboardInterrupt as interrupt:
                if batches._records == 0 < records:
                    raise InterruptedAppendError(offsets=offsets) from interrupt
                raise
            finally:
                if self._active.writer is not None:
                    self._active.settle(offsets)
        return AppendedBatches(offsets, -1, False)

    def writer(
        self,
        *,
        batch_bytes: int = BATCH_BYTES,
        compression: str | None = None,
        compression_level: int | None = None,
        linger: float | None = 1.0,
        durability: str | None = None,
    ) -> Writer:
        """See Partition.writer."""
        with self._view.lock:
            self._active.next_offset()
        writer = Writer(
            self,
            self._view.config,
            self._active.ask_time,
            batch_bytes=batch_bytes,
            compression=compression,
            compression_level=compression_level,
            linger=linger,
            durability=self._durability.level if durability is None else durability,
        )
        self.writers.add(writer)
        return writer

    def make_durable(self, offsets: range) -> None:
        """Return when every record below the end of the range is on stable storage."""
        self._durability.make_durable(offsets)

    def write_batches(self, batches: _native.Builder, tried: list[int] | None = None) -> range:
        """Append the batches of a builder.  Does not sync.  `tried` is as in `write_produced`."""
        batches._seal()
        try:
            with self._view.lock:
                if tried is not None:
                    tried[0] = self._active.next_offset()
                return self._write_locked(batches)
        except DiskFullError as error:
            self._explain_full(error, batches._size_bytes)
            raise
