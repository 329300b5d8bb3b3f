"""WritableLog: the active segment of a log that this process may change.

Every change starts at `_next_offset`, under the view's lock: it finishes what an interrupt stopped
half-way, wakes a sleeping log, refuses where nothing may be written, and tells where the log ends.

State, all of it guarded by the view's lock: the writer of the active segment, the roll under way,
what ended appending, and, in a store, the files as a clean close left them while nothing has
changed.  `_stable` and `_leadership` have their own rules.  A readonly log has all of this too, and
refuses.

Nothing here knows how records come into the log, or how they are cut off again.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable
from typing import NoReturn

from logstore import _native
from logstore.clock import GuardedClock, SystemClock
from logstore.config import wants_fsync
from logstore.errors import (
    ClosedError,
    DiskFullError,
    FailedLogError,
    FencedError,
    InvalidRecordError,
    NotALogError,
    ReadOnlyError,
)
from logstore.files.names import segment_name
from logstore.log.epochs import EpochEnd, LeaderEpochs, read_leader_epochs
from logstore.log.segment import Segment
from logstore.log.segment_contents import SegmentContents, empty_contents
from logstore.partition.durability import StableStorage
from logstore.partition.leadership import EPOCH_MAX, Leadership
from logstore.partition.reader import ReadableLog, check_int
from logstore.partition.reader_view import BesideWriter
from logstore.partition.view import View
from logstore.recovery.failed_sync import FailedSync
from logstore.recovery.loader import LoadedLog

__all__ = ["WritableLog"]

log = logging.getLogger("logstore.partition")


class WritableLog(ReadableLog):
    """A log with an end that moves: by rolls here, by appends and truncation in subclasses."""

    def __init__(self, view: View, durability: str) -> None:
        super().__init__(view)
        clock = view.clock
        self._fsync = wants_fsync(durability)
        self._durability = durability
        # None lets C ask the system's clock, which is much faster than calling back.
        self._ask_time = None if isinstance(clock, SystemClock) else clock.time_ms
        self._guarded_clock = GuardedClock.of(clock)
        self._leadership = Leadership(view.directory)
        self._stable = StableStorage(view, self._leadership, _sync_written_of(weakref.ref(self)))
        self._failure: BaseException | None = None
        self._writer: _native.SegmentWriter | None = None
        # Of a store: what was loaded, until the first change makes it a log that is written.
        self._asleep: LoadedLog | None = None
        # A roll that an interrupt may have stopped half-way: finished by whoever comes next.
        self._rolling: tuple[Segment, Segment] | None = None
        # One that failed, and whose traces are not gone yet: the writer to go on with, the base.
        self._abandoned: tuple[_native.SegmentWriter | None, int] | None = None
        # Told when an fsync failed: others on the same device may be hit as well.
        self.sync_failed: Callable[[WritableLog], None] | None = None
        self._suspected = False

    # ---- what it is ----

    @property
    def durability(self) -> str:
        """The level an append has when it names none: "fsync" or "os"."""
        return self._durability

    @property
    def failure(self) -> BaseException | None:
        """What ended appending through this handle; None while all is well."""
        return self._failure

    @property
    def asleep(self) -> bool:
        """Whether its files are still as a clean close left them.  Only in a store."""
        return self._asleep is not None

    @property
    def end_offset(self) -> int:
        """The offset the next record will get."""
        writer = self._writer  # the short way: no segment has to be asked
        return writer.next_offset if writer is not None else super().end_offset

    @property
    def durable_offset(self) -> int:
        """Everything below this is on stable storage."""
        view = self._view
        if isinstance(view, BesideWriter):
            return view.durable_offset
        # What was trimmed is gone for good, also where an interrupt kept `raise_to` from noting it.
        return max(self._stable.commit.durable_offset, view.start_offset)

    # ---- beginning and ending ----

    def _sleep(self, loaded: LoadedLog) -> None:
        """Take a log that was closed cleanly as it is, until the first change."""
        self._asleep = loaded
        self._leadership.adopt(loaded)
        loaded.segments[-1].seen_end_offset = loaded.contents.next_offset
        self._stable.commit.durable_offset = loaded.durable_offset
        self._view.publish(loaded.segments)

    def _wake_up(self) -> None:
        """Make a sleeping log one that can be changed; for someone who holds the lock."""
        self._view.check_usable()
        loaded, self._asleep = self._asleep, None
        assert loaded is not None
        try:
            self._begin(loaded)
        except BaseException:
            # Nothing was appended: the files are as they were, or look like after a crash.
            self._writer, self._asleep = None, loaded
            raise

    def _begin(self, loaded: LoadedLog) -> None:
        """Make a loaded log one that can be changed."""
        view, stable = self._view, self._stable
        active = loaded.segments[-1]
        created = not view.directory.exists(segment_name(active.base_offset, ".log"))
        if created:
            self._create_log_file(active.base_offset)
        self._leadership.begin(loaded)
        stable.begin()
        view.publish(loaded.segments)
        view.load_producers(
            loaded.contents.next_offset,
            loaded.names,
            readonly=False,
            clean=loaded.report.clean,
            quiet_from=loaded.quiet_from,
        )
        self._activate(active, loaded.contents)
        if loaded.needs_roll:
            self._roll_locked(loaded.contents.next_offset)
        stable.commit.durable_offset = loaded.durable_offset
        # Before anything can change: from now on a crash finds "not clean".
        view.version += 1
        stable.write_state(sync=True)
        if not loaded.report.clean or created:
            # What recovery kept was perhaps never synced; make its acceptance durable.
            for segment in loaded.segments[:-1]:
                if segment.end_offset > loaded.recovery_point:
                    segment.sync()
            stable.names_changed()
            stable.commit.wait_for(self._next_offset(), loaded.durable_offset)
        stable.write_mark()

    def _close_cleanly(self) -> None:
        view, stable = self._view, self._stable
        end = self._next_offset()
        active = view.segments[-1]
        try:
            view.directory.with_room(lambda: active.flush_indexes(sync=True, final=True))
            stable.add(view.producers.close(view.segments, end))
            stable.names_changed()
            stable.commit.wait_for(end, end)
            self._sync_written()
            view.recovery_point = end
            stable.write_state(clean=True, sync=True)
        except DiskFullError as error:
            # Indexes and state can be made again; the records are what has to be safe.
            log.warning("%s: no room to close it cleanly, the next open checks it: %s",
                        self.name, str(error))  # fmt: skip
            stable.commit.wait_for(end, end)

    def _abandon_in_child(self) -> None:
        """After fork: locks may be held by threads that do not exist here; the files are not ours.

        Nothing is written here any more, and nobody waits for a lock.
        """
        self._writer = None
        self._view.abandon_in_child()
        self._stable.abandon_in_child()

    # ---- whether it may be changed ----

    def _next_offset(self) -> int:
        """The end, for someone who means to change the log and holds the lock."""
        self._finish_roll()
        if self._asleep is not None:
            self._wake_up()
        if self._writer is None:
            self._refuse()
        end = self._writer.next_offset
        self._view.producers.settle(end, self._view.segments[-1])
        return end

    def _refuse(self) -> NoReturn:
        """Why nothing can be appended here."""
        self._view.check_usable()
        if self.readonly:
            raise ReadOnlyError(f"{self.name} was opened with readonly=True")
        why = f"{self.name} cannot be appended to: {self._failure}; open it again"
        if self._stable.commit.failed:
            raise FailedLogError(why, offsets=range(0))
        raise ClosedError(why)

    def _fail(self, error: BaseException) -> None:
        """No appends through this handle any more; readers go on."""
        self._failure = self._failure or error
        self._writer = None

    def expire_producers(self, now: int | None = None) -> list[int]:
        """Forget idempotent producers silent for ``producer.id.expiration.ms``; their ids.

        Those with an open transaction stay.  `now` is in milliseconds; by default it is the
        clock's time, less what the clock may have leapt ahead.
        """
        if now is None:
            now = self._guarded_clock.now_ms()
        view = self._view
        with view.lock:
            view.check_usable()
            if view.readonly:
                self._refuse()
            if self._asleep is not None:
                return []  # loading them forgets the silent ones
            self._next_offset()
            return view.producers.expire(now)

    # ---- durability ----

    def make_durable(self, offsets: range) -> None:
        """Return when everything below the end of the range is on stable storage."""
        self._stable.commit.wait_for(offsets.stop, offsets.start)

    def sync(self) -> None:
        """Make all records so far durable, whatever their durability level was."""
        with self._view.lock:
            if self._asleep is not None:
                self._view.check_usable()
                return  # as durable as a clean close left it
            end = self._next_offset()
            self._view.segments[-1].flush_indexes()
        commit = self._stable.commit
        commit.wait_for(end, commit.durable_offset)
        self._stable.write_mark()

    def _sync_written(self) -> int:
        try:
            end = self._stable.sync_written()
        except OSError as error:
            self._fail_sync(error)
            raise
        if self._suspected:
            self._suspected, self._fsync = False, wants_fsync(self._durability)
        return end

    def _fail_sync(self, error: OSError) -> None:
        """An fsync failed: what lies above the durable offset was perhaps never written.

        The lock may be held by whoever waits for this sync: it is not taken here.
        """
        if self._stable.commit.failed:
            return  # said so already
        durable = self._stable.commit.durable_offset
        self._stable.commit.fail(error)
        self._fail(error)
        self._view.limit = durable
        log.error("%s: an fsync failed: %s; readers go up to offset %d until it is opened again",
                  self.name, str(error), durable)  # fmt: skip
        FailedSync(durable, str(error)).leave(self.directory)
        self._view.wake_followers()
        if self.sync_failed is not None:
            self.sync_failed(self)

    def suspect(self) -> None:
        """An fsync failed elsewhere on the device: the next append here ends with one."""
        self._suspected = self._fsync = True

    # ---- the active segment ----

    def roll(self) -> None:
        """Seal the active segment and start a new one.  Nothing to do when it is empty."""
        with self._view.lock:
            end = self._next_offset()
            if self._view.segments[-1].size_bytes:
                self._roll_locked(end)

    def _roll_locked(self, base_offset: int) -> None:
        """Start a segment at `base_offset`.

        Nothing is synced here: whoever asks for durability next syncs the old file, the new one and
        the directory before it is told so.
        """
        old = self._view.segments[-1]
        assert old.writer is not None
        if old.base_offset == base_offset:
            raise InvalidRecordError(f"the segment at {base_offset} is empty and cannot be rolled")
        self._view.producers.settle_written(old.writer.next_offset, old)
        # Nobody may append meanwhile, not even a signal handler of this thread.
        writer, self._writer = self._writer, None
        try:
            old.flush_indexes(final=True)
            self._create_log_file(base_offset)
            new = self._view.make_segment(base_offset, base_offset >= self._view.dense_from)
            self._prepare(new, empty_contents(base_offset))
            more = self._view.producers.roll(old, base_offset)
            # Also the indexes: those below the recovery point are believed without another look.
            self._stable.add([old.file, *old.index_files(), *more])
            self._rolling = (old, new)
        except BaseException:
            if self._rolling is None:
                self._abandoned = (writer, base_offset)
            self._finish_roll()
            raise
        self._finish_roll()
        log.info("%s rolled at offset %d", self.name, base_offset)
        try:
            self._stable.sync_surplus()
        except OSError as error:
            self._fail_sync(error)
            raise

    def _finish_roll(self) -> None:
        """The part of a roll that must happen as one; may be repeated after an interrupt."""
        if self._abandoned is not None:
            self._go_on_without_roll(*self._abandoned)
        if self._rolling is None:
            return
        old, new = self._rolling
        old.seal(new.base_offset)
        if self._view.segments[-1] is not new:
            self._view.publish((*self._view.segments, new))
        self._writer = new.writer
        self._view.keep_warm(old)
        self._rolling = None

    def _go_on_without_roll(self, writer: _native.SegmentWriter | None, base_offset: int) -> None:
        """Go on with the old segment; an empty file of the new one must not stay behind.

        Where it cannot be removed nothing is appended any more: whoever finds the file would look
        there for what follows.
        """
        name = segment_name(base_offset, ".log")
        try:
            if self.directory.size(name) == 0:
                self.directory.unlink(name)
        except (FileNotFoundError, NotALogError):
            pass
        except OSError as error:
            self._fail(error)
            writer = None
        self._writer, self._abandoned = writer, None

    def _create_log_file(self, base_offset: int) -> None:
        name = segment_name(base_offset, ".log")
        try:
            self.directory.open(name, write=True, create=True, exclusive=True).close()
        except FileExistsError:
            if self.directory.size(name):
                raise
        self._stable.names_changed()

    def _activate(self, segment: Segment, contents: SegmentContents) -> None:
        self._prepare(segment, contents)
        self._writer = segment.writer

    def _prepare(self, segment: Segment, contents: SegmentContents) -> None:
        """Ready a segment for appends, as far as it alone is concerned."""
        jitter = min(self.config.segment_jitter_ms, self.config.segment_ms)
        segment.activate(
            contents,
            now_ms=self.clock.time_ms(),
            jitter_ms=random.randrange(jitter) if jitter else 0,
        )

    # ---- leader epochs ----

    @property
    def leader_epoch(self) -> int:
        """The epoch that appends carry."""
        if self.readonly:
            return LeaderEpochs(read_leader_epochs(self.directory)).latest or 0
        return self._leadership.epoch

    @property
    def leader_epochs(self) -> LeaderEpochs:
        """Which epoch started where; a copy."""
        if self.readonly:
            self._view.check_usable()
            return LeaderEpochs(read_leader_epochs(self.directory))
        with self._view.lock:
            return LeaderEpochs(self._leadership.history.entries)

    def become_leader(self, epoch: int) -> None:
        """Begin an epoch: records from here on carry it.  On disk when this returns.

        Raises FencedError when a higher one has begun; the same again is fine.
        """
        check_int("an epoch", epoch)
        if not 0 <= epoch <= EPOCH_MAX:
            raise ValueError(f"an epoch is an int from 0 to {EPOCH_MAX}, not {epoch!r}")
        with self._view.lock:
            end = self._next_offset()
            leadership = self._leadership
            if epoch < leadership.epoch:
                raise FencedError(epoch, leadership.epoch, where=self.name)
            if epoch > leadership.epoch or not leadership.noted:
                leadership.assign(epoch, end)

    def end_offset_for_epoch(self, epoch: int) -> EpochEnd | None:
        """Where an epoch ended here: what a leader answers a follower that may have diverged.

        The answer names the greatest epoch up to the one asked for; None when the log cannot tell.
        """
        with self._view.lock:
            return self.leader_epochs.end_offset_for(epoch, self.end_offset)


def _sync_written_of(owner: weakref.ref[WritableLog]) -> Callable[[], int]:
    """Its group commit must not keep a log alive: dropped, it gives its lock back at once."""

    def sync_written() -> int:
        held = owner()
        if held is None:
            raise ClosedError("the partition is gone")
        return held._sync_written()

    return sync_written
