"""Appender: appends records to a log, for any number of threads.

One record at a time, many at once, through a buffered Writer, or as raw batches that were encoded
elsewhere.  Records are encoded without a lock, written under the view's lock, and synced without
it.

An append has three outcomes: it returns the offset; it raises, and nothing is in the log; or it
raises IndeterminateAppendError with the offsets that may be in the log.

State: builders for reuse, which threads pop and append without a lock; the writers that `close`
closes; and, under the view's lock, the last timestamp of LogAppendTime.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, cast

from logstore import _native
from logstore.config import (
    INT16_MAX,
    INT32_MAX,
    INT64_MAX,
    ConfigError,
    PartitionConfig,
    wants_fsync,
)
from logstore.errors import (
    ConflictError,
    DiskFullError,
    IndeterminateAppendError,
    InterruptedAppendError,
    InvalidRecordError,
)
from logstore.format import validation
from logstore.format.batch import HEADER_BYTES, BatchHeader, EndMarker
from logstore.format.encoder import Batches, codec_number
from logstore.format.validation import AppendedBatches
from logstore.log.producer_state import Origin
from logstore.partition.active_log import ActiveLog
from logstore.partition.writer import Writer, Writers
from logstore.record import Record

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Appender"]

BATCH_BYTES = 64 << 10  # what a buffered writer fills before it starts the next batch


class _MarkerAppended(Exception):
    """A transaction ended after a batch was verified: verify the batch again."""


class Appender:
    """Appends to one log.

    `explain_full` adds to a DiskFullError what could be freed: `Cutter.explain_full`.
    """

    def __init__(
        self, active: ActiveLog, explain_full: Callable[[DiskFullError, int], None]
    ) -> None:
        self._active = active
        self._view = active.view
        self._durability = active.durability
        self._leadership = active.leadership
        self._explain_full = explain_full
        self.writers = Writers()  # closed with the log
        self._markers = 0  # counts transaction markers before they are written, under the lock
        # In a store: raises unless a producer's id and epoch have a transaction open here.
        self.transaction_check: Callable[[int, int], None] | None = None
        self._apply(active.view.config)

    # ---- settings ----

    @property
    def name(self) -> str:
        """``topic-N``."""
        return self._view.name

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

    # ---- raw batches and transactions ----

    def append_batch(
        self,
        raw: Buffer,
        *,
        origin: str = "leader",
        durability: str | None = None,
        verify_transaction: bool = True,
        wait: bool = True,
    ) -> AppendedBatches:
        """See Partition.append_batch.

        `raw` may be any buffer; it must not change before the call returns.  With ``wait=False``
        nothing is waited for: raise BlockingIOError, with nothing appended, if another thread has
        the log's lock, if a segment has to be rolled or a file has to be written first, or if a
        transaction has to be verified.
        """
        fsync = self._durability.fsync if durability is None else wants_fsync(durability)
        if not wait and (fsync or origin == "follower"):
            raise ConfigError(
                "wait=False needs durability='os', because an fsync waits for the disk, and is not "
                "for copies from a leader"
            )
        if origin == "follower":
            return self._append_copied(bytes(raw), fsync)
        if origin not in ("leader", "coordinator"):
            raise ConfigError(
                f"origin must be 'leader', 'coordinator' or 'follower', not {origin!r}"
            )
        view, now_ms = self._view, self._view.clock.time_ms()
        in_place = (
            None if self._append_time else validation.check_in_place(raw, view.config, now_ms)
        )
        if in_place is not None:
            batches: list[tuple[BatchHeader, bytes]] = []
            checked = [in_place[0]]
        else:
            batches = validation.check_produced(bytes(raw), view.config, now_ms)
            checked = [header for header, _ in batches]
        to_verify: list[BatchHeader] = []
        if origin == "leader" and verify_transaction and self.transaction_check is not None:
            to_verify = [header for header in checked if header.transactional]
        if to_verify and not wait:
            raise BlockingIOError(f"{self.name}: a transaction has to be verified")
        markers = -1

        def place_locked(tried: list[range]) -> AppendedBatches:
            if to_verify and markers != self._markers:
                raise _MarkerAppended
            if not wait and not self._active.ready:
                raise BlockingIOError(f"{self.name}: a file has to be written before an append")
            end = self._active.next_offset()
            append_time = self._active.time_of_append() if self._append_time else -1
            epoch = self._leadership.epoch
            self._leadership.note([(epoch, end)])
            headers: list[tuple[BatchHeader, EndMarker | None]]
            if in_place is not None:
                header, oldest = in_place
                headers = [(header._replace(base_offset=end, leader_epoch=epoch), None)]

                def write(writer: _native.SegmentWriter, now: int) -> bool:
                    return writer.append_placed(raw, end, epoch, oldest, now)

            else:
                data, headers = validation.place(batches, end, epoch, append_time)

                def write(writer: _native.SegmentWriter, now: int) -> bool:
                    return writer.append_raw(data, now)

            if self._abort_older_locked(headers, cast(Origin, origin)):
                return place_locked(tried)  # again, after the marker
            return self._append_raw_locked(
                write, headers, cast(Origin, origin), append_time, tried, may_roll=wait
            )

        try:
            while True:
                # A client that keeps its epoch (client version 0 or 1) could end its transaction
                # between the check and the append.  The batch would then open a transaction after
                # the marker, and nothing would end it.  So a batch is verified again if a marker
                # was appended since.  Not under the lock: see the lock order.
                markers = self._markers
                for header in to_verify:
                    cast(Callable[[int, int], None], self.transaction_check)(
                        header.producer_id, header.producer_epoch
                    )
                with contextlib.suppress(_MarkerAppended):
                    return self._append_raw(place_locked, fsync, wait=wait)
        except DiskFullError as error:
            self._explain_full(error, memoryview(raw).nbytes)
            raise

    def _append_copied(self, raw: bytes, fsync: bool) -> AppendedBatches:
        headers = validation.check_copied(raw)

        def copy_locked(tried: list[range]) -> AppendedBatches:
            end = self._active.next_offset()
            if not headers:
                return AppendedBatches(range(end, end), -1, False)
            first = headers[0][0].base_offset
            if first < end:
                raise ConflictError(first, end, where=self.name)
            self._active.allow_gaps(headers, end)
            self._markers += 1  # the copied batches may have markers
            self._leadership.note(
                (header.leader_epoch, header.base_offset) for header, _ in headers
            )
            return self._append_raw_locked(
                lambda writer, now: writer.append_raw(raw, now), headers, "follower", -1, tried
            )

        return self._append_raw(copy_locked, fsync)

    def end_transaction(
        self,
        producer_id: int,
        producer_epoch: int,
        *,
        commit: bool,
        coordinator_epoch: int = 0,
        durability: str | None = None,
    ) -> int:
        """See Partition.end_transaction."""
        fsync = self._durability.fsync if durability is None else wants_fsync(durability)
        if not 0 <= producer_id <= INT64_MAX or not 0 <= producer_epoch <= INT16_MAX:
            raise InvalidRecordError(
                f"no transaction of producer {producer_id}, epoch {producer_epoch}"
            )
        if not 0 <= coordinator_epoch <= INT32_MAX:
            raise ValueError(
                f"a coordinator's epoch is an int from 0 to {INT32_MAX}, not {coordinator_epoch}"
            )
        marker = EndMarker(commit, coordinator_epoch)

        def end_locked(tried: list[range]) -> AppendedBatches:
            return self._end_transaction_locked(producer_id, producer_epoch, marker, tried)

        return self._append_raw(end_locked, fsync).offsets.start

    def _end_transaction_locked(
        self, producer_id: int, producer_epoch: int, marker: EndMarker, tried: list[range]
    ) -> AppendedBatches:
        self._leadership.note([(self._leadership.epoch, self._active.next_offset())])
        raw = marker.encode(
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            timestamp=self._view.clock.time_ms(),
            base_offset=self._active.next_offset(),
            leader_epoch=self._leadership.epoch,
        )
        headers: list[tuple[BatchHeader, EndMarker | None]] = [(BatchHeader.parse(raw), marker)]
        self._markers += 1  # also if the write fails: then a batch is verified once more
        return self._append_raw_locked(
            lambda writer, now: writer.append_raw(raw, now), headers, "coordinator", -1, tried
        )

    def _abort_older_locked(
        self, headers: Sequence[tuple[BatchHeader, EndMarker | None]], origin: Origin
    ) -> bool:
        """Append the ABORT marker that is missing before a producer's next epoch; False if none is.

        A truncation removed the marker, so that a transaction of the epoch before is open again.
        Without a marker, a broker would read it as a part of the transaction that begins now.
        """
        header = headers[0][0]
        open_one = self._view.producers.state.get(header.producer_id)
        if (
            open_one is None
            or open_one.transaction_start < 0
            or header.producer_epoch <= open_one.epoch
        ):
            return False
        self._view.producers.admit(headers, origin)  # raises if the batches are refused
        marker = EndMarker(False, max(0, open_one.coordinator_epoch))
        self._end_transaction_locked(header.producer_id, open_one.epoch, marker, [])
        return True

    def _append_raw(
        self, act: Callable[[list[range]], AppendedBatches], fsync: bool, *, wait: bool = True
    ) -> AppendedBatches:
        """Call `act` under the lock, then wait for the sync.

        With ``wait=False``, raise BlockingIOError if another thread has the lock.

        `act` appends the offsets that it is about to write to the list.  From them an interrupt
        knows whether the batches are written.
        """
        tried: list[range] = []
        appended: AppendedBatches | None = None
        try:
            with self._view.lock if wait else self._view.lock_now():
                try:
                    appended = act(tried)
                except KeyboardInterrupt as interrupt:
                    # Under the lock: no other thread can have written there.
                    if tried and self._active.is_written(tried[0].stop):
                        raise InterruptedAppendError(offsets=tried[0]) from interrupt
                    raise
            if fsync and appended.offsets:
                # A duplicate too: the sync of its first append may not have ended.
                self._durability.commit.wait_for(appended.offsets.stop, appended.offsets.start)
        except InterruptedAppendError:
            raise
        except KeyboardInterrupt as interrupt:
            if appended is not None and appended.offsets:
                raise InterruptedAppendError(offsets=appended.offsets) from interrupt
            raise
        except IndeterminateAppendError as error:
            if self._durability.commit.failed:
                self._active.fail(error)
            raise
        return appended

    def _append_raw_locked(
        self,
        write: Callable[[_native.SegmentWriter, int], bool],
        headers: list[tuple[BatchHeader, EndMarker | None]],
        origin: Origin,
        append_time: int,
        tried: list[range],
        *,
        may_roll: bool = True,
    ) -> AppendedBatches:
        """Write batches that have their offsets, unless the producer state refuses them.

        ``write(writer, now)`` returns False if the segment has to be rolled first.
        """
        admission = self._view.producers.admit(headers, origin)
        if admission.duplicate is not None:
            span = admission.duplicate
            return AppendedBatches(span.offsets, span.timestamp if append_time >= 0 else -1, True)
        offsets = range(headers[0][0].base_offset, headers[-1][0].next_offset)
        active = self._active
        now = -1 if active.ask_time is None else active.ask_time()
        writer = cast(_native.SegmentWriter, active.writer)
        try:
            self._view.producers.begin(admission, offsets.stop)
            tried.append(offsets)
            if not write(writer, now):
                if not may_roll:
                    raise BlockingIOError(f"{self.name}: the segment has to be rolled")
                active.roll_before(offsets.start)
                writer = cast(_native.SegmentWriter, active.writer)
                if not write(writer, now):
                    size = sum(header.size_bytes for header, _ in headers)
                    raise InvalidRecordError(f"{size} bytes do not fit a segment")
        except IndeterminateAppendError as error:
            active.fail(error)
            raise
        finally:
            if active.writer is not None:
                self._active.settle(offsets)
        if self._view.followers:
            self._view.wake_followers()
        return AppendedBatches(offsets, append_time, False)

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
