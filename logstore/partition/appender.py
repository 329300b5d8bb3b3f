"""AppendableLog: how records come into the log.

One at a time, many at once, through a buffered Writer, and as raw batches that were encoded
elsewhere.  What is encoded first is written under the view's lock, and waited for without it.

Three outcomes of an append, never more: an offset; an exception, and provably nothing in the log;
or IndeterminateAppendError with the offsets in question.

State: builders for reuse, which threads take and put back as they are; the writers that have to be
closed with the log; and, under the view's lock, the last time that was stamped on a record.
"""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast

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
    LogStoreError,
)
from logstore.files.disk_reserve import free_bytes
from logstore.format import validation
from logstore.format.batch import HEADER_BYTES, BatchHeader, EndMarker
from logstore.format.encoder import builder_settings, codec_number
from logstore.format.validation import AppendedBatches
from logstore.log.producer_state import Origin
from logstore.partition.active_log import WritableLog
from logstore.partition.view import View
from logstore.partition.writer import Writer
from logstore.record import Record

__all__ = ["AppendableLog"]

EXTEND_BYTES = 16 << 20  # extend() is all or nothing up to this many encoded bytes
BATCH_BYTES = 64 << 10  # what a buffered writer fills before it starts the next batch
NEVER_DENSE = 1 << 62  # a `dense_from` beyond every offset


class _Batches(_native.Builder):
    """Records of one append() or extend(), on their way into the log.

    What does not fit into one write waits in `full`; nothing is written before all is encoded.
    """

    full: list[_native.Builder]

    def _hand_over(self) -> None:
        self._take(self.full)


class Buffered(Protocol):
    """What holds records for a log, and hands them over when it is closed."""

    def close(self) -> None: ...


class AppendableLog(WritableLog):
    """A log that records are added to, by any number of threads."""

    def __init__(self, view: View, durability: str) -> None:
        super().__init__(view, durability)
        self._last_append_time = 0
        self._writers: weakref.WeakSet[Writer | Buffered] = weakref.WeakSet()
        # Of a store: raises unless a producer's id and epoch have a transaction open here.
        self.transaction_check: Callable[[int, int], None] | None = None
        self._go_by(view.config)

    # ---- settings ----

    def _go_by(self, config: PartitionConfig) -> None:
        self._append_time = config.message_timestamp_type == "LogAppendTime"
        # Appends need no time from Python: neither an injected clock nor LogAppendTime.
        self._plain = self._ask_time is None and not self._append_time
        self._codec = codec_number(None, config)
        self._spare: list[_Batches] = []  # builders hold limits and codec

    def reconfigure(self, config: PartitionConfig) -> None:
        """Take over other settings; a change of segment or index settings starts a new segment.

        Writers that were made before keep theirs.
        """
        view = self._view
        with view.lock:
            view.check_usable()
            before, view.config = view.config, config
            self._go_by(config)
            for segment in view.segments:
                segment.config = config
            if self._writer is not None and _layout(before) != _layout(config):
                self.roll()

    # ---- appending ----

    def _batches(self) -> _Batches:
        """An empty builder; they are reused, because fresh memory is slow."""
        with contextlib.suppress(IndexError):
            return self._spare.pop()
        settings = builder_settings(
            self.config,
            self._codec,
            None,
            batch_bytes=self.config.max_message_bytes,
            write_bytes=EXTEND_BYTES,
        )
        batches = _Batches(**settings, clock=self._ask_time)
        batches.full = []
        return batches

    def _write_locked(self, batches: _native.Builder) -> range:
        """Append sealed batches behind the last record; roll first if they do not fit."""
        self._finish_roll()
        if self._asleep is not None:
            self._wake_up()
        writer = self._writer
        if writer is None:
            self._refuse()
        room = self._view.directory.room
        if room is not None and room.short:
            room.require(batches._size_bytes)
        leadership = self._leadership
        if not leadership.noted:
            leadership.assign(leadership.epoch, writer.next_offset)
        append_time = self._time_of_append() if self._append_time else -1
        now = -1 if self._ask_time is None else self._ask_time()
        try:
            first = writer.append(batches, leadership.epoch, append_time, now)
            if first < 0:
                self._roll_locked(writer.next_offset)
                writer = cast(_native.SegmentWriter, self._writer)
                first = writer.append(batches, leadership.epoch, append_time, now)
                if first < 0:
                    raise InvalidRecordError(f"{batches._size_bytes} bytes do not fit a segment")
        except IndeterminateAppendError as error:
            self._fail(error)  # whether its bytes are there cannot be known: no more appends
            raise
        if self._view.followers:
            self._view.wake_followers()
        return range(first, writer.next_offset)

    def _time_of_append(self) -> int:
        # A clock that steps back must not make the log's own times decrease.
        self._last_append_time = max(self._last_append_time, self.clock.time_ms())
        return self._last_append_time

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
        """Append one record and return its offset, once it is as durable as asked for.

        With `expect_offset` it is appended at just that offset, or ConflictError is raised.
        Raises RecordTooLargeError, InvalidRecordError, TypeError for what can never be stored;
        DiskFullError with nothing appended; IndeterminateAppendError when it cannot be known.
        """
        fsync = self._fsync if durability is None else wants_fsync(durability)
        view = self._view
        spare = self._spare  # this list, even when other settings bring a new one
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
                writer = self._writer
                leadership = self._leadership
                if writer is not None:
                    first = writer.next_offset
                if expect_offset is not None:
                    self._expect(expect_offset)
                # The common case without another call: same as _write_locked.
                if (
                    writer is None
                    or not (self._plain and leadership.noted)
                    or writer.append(batches, leadership.epoch, -1, -1) < 0
                ):
                    first = self._write_locked(batches).start
            if view.followers:
                view.wake_followers()
            if fsync:
                self._stable.commit.wait_for(first + 1, first)
            spare.append(batches)  # not before: whether it is empty tells what has happened
        except KeyboardInterrupt as interrupt:
            if batches._records == 0:
                raise InterruptedAppendError(offsets=range(first, first + 1)) from interrupt
            raise
        except IndeterminateAppendError as error:
            if batches._records or self._stable.commit.failed:
                self._fail(error)
            raise  # else it was written and then cut off by someone: the log is sound
        except DiskFullError as error:
            writer = None  # see _explain_full
            self._explain_full(error, batches._size_bytes)
            raise
        return first

    def _explain_full(self, error: DiskFullError, needed_bytes: int) -> None:
        """Tell how full the disk is, and what could be freed.  Not under the lock."""
        import traceback  # for an error alone

        # A caller that keeps the error keeps its frames.  A segment's writer in one of them would
        # keep the file open, and the blocks on the disk, when the segment is deleted.
        traceback.clear_frames(error.__traceback__)
        if error.remedy:
            return
        error.needed_bytes = needed_bytes
        room = self._view.directory.room
        ask = None if room is None else room.reclaimable
        with contextlib.suppress(OSError, LogStoreError):
            error.free_bytes = free_bytes(self._view.directory)
            mine = self.reclaimable_bytes()
            error.reclaimable_bytes = mine if ask is None else max(mine, ask())
            sealed = sum(segment.size_bytes for segment in self.segments if segment.sealed)
            how = "enforce() of this partition" if error.reclaimable_bytes == mine else "enforce()"
            error.remedy = (
                f"{how} would free {error.reclaimable_bytes} bytes now"
                if error.reclaimable_bytes
                else f"retention would free nothing now: trim() could free up to {sealed} bytes "
                f"here, delete_topic() a whole topic, or set a lower retention.bytes"
            )

    def reclaimable_bytes(self) -> int:
        """What retention could delete here now."""
        return 0

    def _expect(self, offset: int) -> None:
        """Raise ConflictError unless the log ends there; under the lock of the append."""
        end = self._next_offset()
        if end != offset:
            raise ConflictError(offset, end, where=self.name)

    def extend(
        self,
        records: Iterable[bytes | Record],
        *,
        durability: str | None = None,
        expect_offset: int | None = None,
    ) -> range:
        """Append many records, bytes or Record, and return their offsets.  One fsync for all.

        All are encoded in memory before the first is written, so a bad record means that none is
        appended; use `writer` for a stream.  Up to max.message.bytes they are a single batch, and
        then all or none after a crash as well.  With `expect_offset` the first gets that offset, or
        ConflictError is raised.
        """
        fsync = self._fsync if durability is None else wants_fsync(durability)
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
                    self._expect(expect_offset)
                first = self._next_offset()
                for piece in pieces:
                    self._write_locked(piece)
            if fsync and total:
                self._stable.commit.wait_for(first + total, first)
            batches.full.clear()
            spare.append(batches)  # not before: whether it is empty tells what has happened
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
        raw: bytes,
        *,
        origin: str = "leader",
        durability: str | None = None,
        verify_transaction: bool = True,
    ) -> AppendedBatches:
        """Append raw Kafka record batches; where they are, and whether they were there before.

        As "leader" they are a client's: everything in them is checked, they get offsets and leader
        epoch here, and the batch of an idempotent producer is appended once, however often it is
        sent: a repeated one is answered with its offsets and ``duplicate=True``.  "coordinator" is
        the same without the rules for sequences.  As "follower" they are copied from another log:
        offsets and epochs stay, must not go back, and may have gaps.

        In a store, a client's transactional batch needs a transaction that its producer has open
        and that this partition was added to (KIP-890): a batch of no transaction would hold back
        the last stable offset until `end_transaction` is called.  With verify_transaction=False the
        caller coordinates the transaction and calls `end_transaction`, as for a Partition that was
        opened without a store.

        Raises InvalidRecordError, RecordTooLargeError, UnsupportedFormatError for what can never
        be appended; FencedError and OutOfOrderSequenceError for a producer that has to stop or to
        send something else first; TransactionStateError and TransactionAbortedError for a batch of
        no open transaction; ConflictError for a copy that does not lie behind the log's end.
        """
        fsync = self._fsync if durability is None else wants_fsync(durability)
        if origin == "follower":
            return self._append_copied(bytes(raw), fsync)
        if origin not in ("leader", "coordinator"):
            raise ConfigError(
                f"origin must be 'leader', 'coordinator' or 'follower', not {origin!r}"
            )
        batches = validation.check_produced(bytes(raw), self.config, self.clock.time_ms())
        if origin == "leader" and verify_transaction and self.transaction_check is not None:
            # Not under the lock.  A transaction that ends now leaves a marker here with a greater
            # epoch, and the batch is fenced.
            for header, _ in batches:
                if header.transactional:
                    self.transaction_check(header.producer_id, header.producer_epoch)

        def place_locked(tried: list[range]) -> AppendedBatches:
            end = self._next_offset()
            append_time = self._time_of_append() if self._append_time else -1
            self._leadership.note([(self._leadership.epoch, end)])
            data, headers = validation.place(batches, end, self._leadership.epoch, append_time)
            if self._abort_older_locked(headers, cast(Origin, origin)):
                return place_locked(tried)  # one offset higher
            return self._append_raw_locked(data, headers, cast(Origin, origin), append_time, tried)

        try:
            return self._append_raw(place_locked, fsync)
        except DiskFullError as error:
            self._explain_full(error, len(raw))
            raise

    def _append_copied(self, raw: bytes, fsync: bool) -> AppendedBatches:
        headers = validation.check_copied(raw)

        def copy_locked(tried: list[range]) -> AppendedBatches:
            end = self._next_offset()
            if not headers:
                return AppendedBatches(range(end, end), -1, False)
            first = headers[0][0].base_offset
            if first < end:
                raise ConflictError(first, end, where=self.name)
            self._allow_gaps(headers, end)
            self._leadership.note(
                (header.leader_epoch, header.base_offset) for header, _ in headers
            )
            return self._append_raw_locked(raw, headers, "follower", -1, tried)

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
        """Append the marker that commits or aborts a producer's transaction; the marker's offset.

        For who coordinates transactions.  Raises FencedError when the producer's or the
        coordinator's epoch is older than what the log has seen.
        """
        fsync = self._fsync if durability is None else wants_fsync(durability)
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
        self._leadership.note([(self._leadership.epoch, self._next_offset())])
        raw = marker.encode(
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            timestamp=self.clock.time_ms(),
            base_offset=self._next_offset(),
            leader_epoch=self._leadership.epoch,
        )
        headers: list[tuple[BatchHeader, EndMarker | None]] = [(BatchHeader.parse(raw), marker)]
        return self._append_raw_locked(raw, headers, "coordinator", -1, tried)

    def _abort_older_locked(
        self, headers: Sequence[tuple[BatchHeader, EndMarker | None]], origin: Origin
    ) -> bool:
        """Append the ABORT marker that is missing before a producer's next epoch, if it is.

        A truncation cut the marker off, so that a transaction of the epoch before is open again.
        Without a marker, a broker would take it for a part of the transaction that begins now.
        """
        header = headers[0][0]
        open_one = self._view.producers.state.get(header.producer_id)
        if (
            open_one is None
            or open_one.transaction_start < 0
            or header.producer_epoch <= open_one.epoch
        ):
            return False
        self._view.producers.admit(headers, origin)  # raises if nothing is to be appended
        marker = EndMarker(False, max(0, open_one.coordinator_epoch))
        self._end_transaction_locked(header.producer_id, open_one.epoch, marker, [])
        return True

    def _append_raw(
        self, act: Callable[[list[range]], AppendedBatches], fsync: bool
    ) -> AppendedBatches:
        """Do it under the lock, then wait for the disk; an interrupt tells whether it is written.

        `act` puts the offsets that it is about to write into the list it gets.
        """
        tried: list[range] = []
        appended: AppendedBatches | None = None
        try:
            with self._view.lock:
                try:
                    appended = act(tried)
                except KeyboardInterrupt as interrupt:
                    # Under the lock: nobody else can have written there.
                    if tried and self._is_written_locked(tried[0].stop):
                        raise InterruptedAppendError(offsets=tried[0]) from interrupt
                    raise
            if fsync and appended.offsets:
                # A duplicate, too: its first append may still be on its way to the disk.
                self._stable.commit.wait_for(appended.offsets.stop, appended.offsets.start)
        except InterruptedAppendError:
            raise
        except KeyboardInterrupt as interrupt:
            if appended is not None and appended.offsets:
                raise InterruptedAppendError(offsets=appended.offsets) from interrupt
            raise
        except IndeterminateAppendError as error:
            if self._stable.commit.failed:
                self._fail(error)
            raise
        return appended

    def _is_written_locked(self, end_offset: int) -> bool:
        self._finish_roll()
        return self._writer is not None and self._writer.next_offset >= end_offset

    def _append_raw_locked(
        self,
        data: bytes,
        headers: list[tuple[BatchHeader, EndMarker | None]],
        origin: Origin,
        append_time: int,
        tried: list[range],
    ) -> AppendedBatches:
        """Write batches that have their place, unless the producer state is against it."""
        admission = self._view.producers.admit(headers, origin)
        if admission.duplicate is not None:
            span = admission.duplicate
            return AppendedBatches(span.offsets, span.timestamp if append_time >= 0 else -1, True)
        offsets = range(headers[0][0].base_offset, headers[-1][0].next_offset)
        now = -1 if self._ask_time is None else self._ask_time()
        writer = cast(_native.SegmentWriter, self._writer)
        try:
            self._view.producers.begin(admission, offsets.stop)
            tried.append(offsets)
            if not writer.append_raw(data, now):
                self._roll_before(offsets.start)
                writer = cast(_native.SegmentWriter, self._writer)
                if not writer.append_raw(data, now):
                    raise InvalidRecordError(f"{len(data)} bytes do not fit a segment")
        except IndeterminateAppendError as error:
            self._fail(error)
            raise
        finally:
            if self._writer is not None:
                self._settle_locked(offsets)
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
        """Append the batches of a builder as a producer's, with sequences from `sequence` on.

        For Producer.  Not waited for: see `make_durable`.  The same batches again are answered with
        the offsets they have; an empty builder afterwards means that they are in the log, from
        ``tried[0]`` on, also after an interrupt.
        """
        batches._seal()
        records = batches._records
        with self._view.lock:
            while True:
                first = self._next_offset()
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
                if self._writer is not None:
                    self._settle_locked(offsets)
        return AppendedBatches(offsets, -1, False)

    def _roll_before(self, offset: int) -> None:
        """Roll for batches that start at `offset`, at or behind the end."""
        end = cast(_native.SegmentWriter, self._writer).next_offset
        self._roll_locked(max(offset, end))
        if offset > end:
            # Readers in other processes look for a segment at the end: tell them to start over.
            self._view.version += 1
            self._stable.write_state(sync=False)

    def _settle_locked(self, offsets: range) -> None:
        try:
            self._next_offset()
        except OSError as error:
            # The batches are in the log, but not in the index of aborted transactions: committed
            # readers stay below, and opening again writes the index anew.
            failure = IndeterminateAppendError(
                f"{error} while noting an aborted transaction; close the log and open it again",
                offsets=offsets,
            )
            self._fail(failure)
            raise failure from error

    def _allow_gaps(self, headers: list[tuple[BatchHeader, EndMarker | None]], end: int) -> None:
        """Offsets are missing in what is copied: from now on that is no sign of damage here."""
        if self._view.dense_from >= NEVER_DENSE:
            return
        for header, _ in headers:
            if header.base_offset != end:
                break
            end = header.next_offset
        else:
            return
        # Known before the gap can be met; scans that are under way end in their own segment.
        self._view.dense_from = NEVER_DENSE
        self._stable.write_state(sync=True)
        self._view.segments[-1].dense = False
        if self._view.segments[-1].size_bytes:
            self._roll_before(headers[0][0].base_offset)

    def writer(
        self,
        *,
        batch_bytes: int = BATCH_BYTES,
        compression: str | None = None,
        compression_level: int | None = None,
        linger: float | None = 1.0,
        durability: str | None = None,
    ) -> Writer:
        """A buffered writer: millions of records a second, in batches of `batch_bytes`.

        `compression`: none, gzip, snappy, lz4 or zstd.  `linger`: seconds after which a partly
        filled buffer is handed over anyway; None leaves that to `flush` and `close`.  With
        durability="fsync", `flush` and `close` (and the linger time) end with an fsync.
        """
        with self._view.lock:
            self._next_offset()
        writer = Writer(
            self,
            self.config,
            self._ask_time,
            batch_bytes=batch_bytes,
            compression=compression,
            compression_level=compression_level,
            linger=linger,
            durability=self._durability if durability is None else durability,
        )
        self._writers.add(writer)
        return writer

    def close_with(self, writer: Buffered) -> None:
        """Have a writer that was made elsewhere closed with the log, as its own are."""
        self._writers.add(writer)

    def write_batches(self, batches: _native.Builder, tried: list[int] | None = None) -> range:
        """Append the batches of a builder; for Writer.  `tried`: as of `write_produced`."""
        batches._seal()
        try:
            with self._view.lock:
                if tried is not None:
                    tried[0] = self._next_offset()
                return self._write_locked(batches)
        except DiskFullError as error:
            self._explain_full(error, batches._size_bytes)
            raise


def _layout(config: PartitionConfig) -> tuple[int, ...]:
    """What an active segment is laid out by."""
    return (
        config.segment_bytes,
        config.segment_ms,
        config.segment_jitter_ms,
        config.segment_index_bytes,
        config.index_interval_bytes,
    )
