"""RawAppender: appends batches that were encoded elsewhere, and transaction markers.

A client's batch is checked and gets its offsets here.  A coordinator's batch is the same, without
the rules for sequences.  A copy of a leader's batches keeps every byte.

A replicated log has two conditions, checked under the log's lock.  `leader_epoch`: batches are
appended only in the epoch that the log has begun, so a deposed leader appends nothing.
`expect_end`: a follower appends an answer only if its log still ends at the offset that it asked
for; the answer to an older question would leave a hole.

State, under the view's lock: the number of transaction markers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from logstore import _native
from logstore.config import INT16_MAX, INT32_MAX, INT64_MAX, ConfigError, wants_fsync
from logstore.errors import (
    ConflictError,
    DiskFullError,
    IndeterminateAppendError,
    InterruptedAppendError,
    InvalidRecordError,
    NotLeaderError,
)
from logstore.format import validation
from logstore.format.batch import BatchHeader, EndMarker
from logstore.format.validation import AppendedBatches
from logstore.log.producer_state import Origin
from logstore.partition.active_log import ActiveLog

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["RawAppender"]


class _MarkerAppended(Exception):
    """A transaction ended after a batch was verified: verify the batch again."""


class RawAppender:
    """Appends raw batches to one log.

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
        self._append_time = False  # whether the log sets the time of its records
        self._markers = 0  # counts transaction markers before they are written, under the lock
        # In a store: raises unless a producer's id and epoch have a transaction open here.
        self.transaction_check: Callable[[int, int], None] | None = None

    @property
    def name(self) -> str:
        """``topic-N``."""
        return self._view.name

    def append_batch(
        self,
        raw: Buffer,
        *,
        origin: str = "leader",
        durability: str | None = None,
        verify_transaction: bool = True,
        wait: bool = True,
        leader_epoch: int | None = None,
        expect_end: int | None = None,
    ) -> AppendedBatches:
        """See Partition.append_batch.

        `raw` may be any buffer; it must not change before the call returns.  With ``wait=False``
        nothing is waited for: raise BlockingIOError, with nothing appended, if another thread has
        the log's lock, if a segment has to be rolled or a file has to be written first, or if a
        transaction has to be verified.

        `leader_epoch` is for a leader of a replicated log: NotLeaderError, with nothing appended,
        unless it is the epoch that the log has begun (`ActiveLog.begin_epoch`).  `expect_end` is
        for a follower: ConflictError, with nothing appended, unless the log ends there.
        """
        fsync = self._durability.fsync if durability is None else wants_fsync(durability)
        if not wait and (fsync or origin == "follower"):
            raise ConfigError(
                "wait=False needs durability='os', because an fsync waits for the disk, and is not "
                "for copies from a leader"
            )
        if (leader_epoch if origin == "follower" else expect_end) is not None:
            raise ConfigError(
                "leader_epoch is for batches that a leader places, expect_end for a follower's"
            )
        if origin == "follower":
            return self._append_copied(bytes(raw), fsync, expect_end)
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
        verify = origin == "leader" and verify_transaction and self.transaction_check is not None
        to_verify = [header for header in checked if verify and header.transactional]
        if to_verify and not wait:
            raise BlockingIOError(f"{self.name}: a transaction has to be verified")
        markers = -1

        def place_locked(tried: list[range]) -> AppendedBatches:
            if leader_epoch is not None:
                self.require_epoch_locked(leader_epoch)
            if to_verify and markers != self._markers:
                raise _MarkerAppended
            if not wait and not self._active.ready:
                raise BlockingIOError(f"{self.name}: a file has to be written before an append")
            end = self._active.next_offset()
            append_time = self._active.time_of_append() if self._append_time else -1
            epoch = self._leadership.epoch
            if wait:  # else it is noted: the log is ready
                self._leadership.note([(epoch, end)])
            headers: list[tuple[BatchHeader, EndMarker | None]]
            if in_place is not None:
                header, oldest = in_place
                headers = [(header.placed(end, epoch), None)]

                def write(writer: _native.SegmentWriter, now: int) -> bool:
                    return writer.append_placed(raw, end, epoch, oldest, now)

            else:
                data, headers = validation.place(batches, end, epoch, append_time)

                def write(writer: _native.SegmentWriter, now: int) -> bool:
                    return writer.append_raw(data, now)

            if self._abort_older_locked(headers, cast(Origin, origin)):
                return place_locked(tried)  # again, after the marker
            return self._append_raw_locked(
                write,
                headers,
                _offsets_of(headers),
                cast(Origin, origin),
                append_time,
                tried,
                may_roll=wait,
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
                # Not `with suppress`: an interrupt at its exit, a call, would lose the offsets.
                try:
                    return self._append_raw(place_locked, fsync, wait=wait)
                except _MarkerAppended:
                    continue
        except DiskFullError as error:
            self._explain_full(error, memoryview(raw).nbytes)
            raise

    def require_epoch_locked(self, leader_epoch: int) -> None:
        """Raise NotLeaderError unless this is the epoch that the log has begun."""
        if leader_epoch != self._leadership.epoch:
            raise NotLeaderError(self.name, epoch=self._leadership.epoch, asked=leader_epoch)

    def _append_copied(self, raw: bytes, fsync: bool, expect_end: int | None) -> AppendedBatches:
        copied = validation.check_copied(raw)

        def copy_locked(tried: list[range]) -> AppendedBatches:
            end = self._active.next_offset()
            if expect_end is not None and expect_end != end:
                raise ConflictError(expect_end, end, where=self.name)
            if copied is None:
                return AppendedBatches(range(end, end), -1, False)
            first = copied.offsets.start
            if first < end:
                raise ConflictError(first, end, where=self.name)
            if first > end or not copied.dense:
                self._active.allow_gaps(first)
            self._markers += 1  # the copied batches may have markers
            self._leadership.note(copied.epochs)
            return self._append_raw_locked(
                lambda writer, now: writer.append_raw(raw, now),
                copied.producers,
                copied.offsets,
                "follower",
                -1,
                tried,
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
        leader_epoch: int | None = None,
    ) -> int:
        """See Partition.end_transaction.  `leader_epoch` is as in `append_batch`."""
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
            if leader_epoch is not None:
                self.require_epoch_locked(leader_epoch)
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
            lambda writer, now: writer.append_raw(raw, now),
            headers,
            _offsets_of(headers),
            "coordinator",
            -1,
            tried,
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
        offsets: range,
        origin: Origin,
        append_time: int,
        tried: list[range],
        *,
        may_roll: bool = True,
    ) -> AppendedBatches:
        """Write batches that have their offsets, unless the producer state refuses them.

        `headers` are those that the producer state needs, `offsets` the range of all batches.
        ``write(writer, now)`` returns False if the segment has to be rolled first.
        """
        admission = self._view.producers.admit(headers, origin)
        if admission.duplicate is not None:
            span = admission.duplicate
            return AppendedBatches(span.offsets, span.timestamp, True)
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
                    raise InvalidRecordError(
                        f"the batches of offsets {offsets.start} to {offsets.stop - 1} do not fit "
                        f"a segment"
                    )
        except IndeterminateAppendError as error:
            active.fail(error)
            raise
        finally:
            if admission.entries and active.writer is not None:
                self._active.settle(offsets)
        if self._view.followers:
            self._view.wake_followers()
        return AppendedBatches(offsets, append_time, False)


def _offsets_of(headers: Sequence[tuple[BatchHeader, EndMarker | None]]) -> range:
    return range(headers[0][0].base_offset, headers[-1][0].next_offset)
