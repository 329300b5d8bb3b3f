"""ActiveLog: the active segment of a log that this process may change.

Every change starts with `next_offset`, under the view's lock.  `next_offset` finishes a roll that
an interrupt stopped, wakes a sleeping log, raises if nothing may be written, and returns the end.

State, guarded by the view's lock: the writer of the active segment, the roll under way, the failure
that ended appends, and, in a store, what was loaded while nothing has changed since a clean close.
One exception: Durability calls `fail` without the lock when an fsync fails.

ActiveLog is the object that keeps a log open.  Each Scan and each Writer refers to it through its
Reader or Appender, and it refers to the directory lock.  So the lock is released when the last
of them is dropped, by reference counting: no object below ActiveLog refers back to it strongly.

ActiveLog does not append records (Appender) and does not remove them (Cutter, Rewriter).
"""

from __future__ import annotations

import logging
import random
import warnings
import weakref
from typing import NoReturn

from logstore import _native
from logstore.clock import GuardedClock, SystemClock
from logstore.errors import (
    ClosedError,
    ConflictError,
    DiskFullError,
    FailedLogError,
    FencedError,
    IndeterminateAppendError,
    InvalidRecordError,
    NotALogError,
    ReadOnlyError,
)
from logstore.files.lock import DirectoryLock
from logstore.files.names import segment_name
from logstore.log.epochs import EpochEnd, LeaderEpochs, read_leader_epochs
from logstore.log.segment import Segment
from logstore.log.segment_contents import SegmentContents, empty_contents
from logstore.log.state import CleanerCheckpoint
from logstore.partition.durability import Durability
from logstore.partition.leadership import EPOCH_MAX, Leadership
from logstore.partition.reader import check_int
from logstore.partition.reader_view import ReadOnlyView
from logstore.partition.view import LogView
from logstore.recovery.loader import Claims, LoadedLog

__all__ = ["ActiveLog", "ReadOnlyLog"]

log = logging.getLogger("logstore.partition")

NEVER_DENSE = 1 << 62  # a `dense_from` beyond every offset


class ActiveLog:
    """The end of a log that is written.

    `writer` appends to the active segment; None if nothing may be appended now.  `failure` is the
    error that ended appends.  `owner` is the lock on the directory.
    """

    def __init__(
        self, view: LogView, durability: Durability, leadership: Leadership, claims: Claims | None
    ) -> None:
        self.view = view
        self.durability = durability
        self.leadership = leadership
        self.claims = claims  # from the checkpoint files of the root
        self._last_append_time = 0
        self.owner: DirectoryLock | None = None
        self.writer: _native.SegmentWriter | None = None
        self.failure: BaseException | None = None
        clock = view.clock
        # None lets C read the system's clock, which is much faster than a call of Python.
        self.ask_time = None if isinstance(clock, SystemClock) else clock.time_ms
        self.guarded_clock = GuardedClock.of(clock)
        # In a store: what was loaded, until the first change.
        self._asleep: LoadedLog | None = None
        # (old, new) of a roll that an interrupt may have stopped; `finish_roll` finishes it.
        self._rolling: tuple[Segment, Segment] | None = None
        # A roll that failed before its new segment was published: the writer of the old segment,
        # and the base offset of the new one, whose file must be removed.
        self._abandoned: tuple[_native.SegmentWriter | None, int] | None = None
        durability.end_appends = weakref.WeakMethod(self.fail)

    def __del__(self) -> None:
        if getattr(self, "writer", None) is not None and not self.view.closed:
            warnings.warn(
                f"{self.view!r} was dropped without close(): the next open will check its end",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    @property
    def name(self) -> str:
        """``topic-N``."""
        return self.view.name

    @property
    def asleep(self) -> bool:
        """Whether the files are as a clean close left them.  Only in a store."""
        return self._asleep is not None

    @property
    def ready(self) -> bool:
        """Whether the next append writes to the active segment only.  Requires the lock.

        False for a sleeping log, a failed one, a roll that is not finished, and if the leader epoch
        is not in its file yet.
        """
        unfinished = self._rolling is not None or self._abandoned is not None
        return self.writer is not None and not unfinished and self.leadership.noted

    @property
    def durable_offset(self) -> int:
        """Every record below this offset is on stable storage."""
        return self.durability.durable_offset

    # ---- beginning and ending ----

    def sleep(self, loaded: LoadedLog) -> None:
        """Leave the files of a log that was closed cleanly as they are, until the first change."""
        self._asleep = loaded
        self.leadership.adopt(loaded)
        loaded.segments[-1].seen_end_offset = loaded.contents.next_offset
        self.durability.commit.durable_offset = loaded.durable_offset
        self.view.publish(loaded.segments)

    def wake_up(self) -> None:
        """Begin a sleeping log.  Requires the lock."""
        self.view.check_usable()
        loaded, self._asleep = self._asleep, None
        assert loaded is not None
        try:
            self.begin(loaded)
        except BaseException:
            # Nothing was appended: the files are unchanged, or look like after a crash.
            self.writer, self._asleep = None, loaded
            raise

    def begin(self, loaded: LoadedLog) -> None:
        """Make a loaded log ready for changes.  The caller has the lock, or is opening."""
        view, durability = self.view, self.durability
        active = loaded.segments[-1]
        created = not view.directory.exists(segment_name(active.base_offset, ".log"))
        if created:
            self.create_log_file(active.base_offset)
        self.leadership.begin(loaded)
        durability.begin()
        view.publish(loaded.segments)
        view.load_producers(
            loaded.contents.next_offset,
            loaded.names,
            readonly=False,
            clean=loaded.report.clean,
            quiet_from=loaded.quiet_from,
        )
        self.activate(active, loaded.contents)
        if loaded.needs_roll:
            self.roll_locked(loaded.contents.next_offset)
        durability.commit.durable_offset = loaded.durable_offset
        # Before anything can change: from now on a crash leaves a state that is not clean.
        view.next_version()
        durability.write_state(sync=True)
        if not loaded.report.clean or created:
            # The batches that recovery kept may never have been synced: sync them now.
            for segment in loaded.segments[:-1]:
                if segment.end_offset > loaded.recovery_point:
                    segment.sync()
            durability.names_changed()
            durability.commit.wait_for(self.next_offset(), loaded.durable_offset)
        durability.write_mark()

    def close_cleanly(self) -> None:
        """Sync everything and write a clean state.  Requires the lock and a writer."""
        view, durability = self.view, self.durability
        end = self.next_offset()
        active = view.segments[-1]
        try:
            view.directory.with_room(lambda: active.flush_indexes(sync=True, final=True))
            durability.add(view.producers.close(view.segments, end))
            durability.names_changed()
            durability.commit.wait_for(end, end)
            durability.sync_written()
            view.move_recovery_point(end)
            durability.write_state(clean=True, sync=True)
        except DiskFullError as error:
            # Recovery can rebuild indexes and state; only the records must be durable.
            log.warning("%s: no room to close it cleanly, the next open checks it: %s",
                        self.name, str(error))  # fmt: skip
            durability.commit.wait_for(end, end)

    def drop(self) -> None:
        """Close all descriptors and release the directory lock.  Write nothing."""
        self._asleep = None
        self.writer = None
        self.view.close_files()
        self.durability.close()
        self.view.directory.close()
        if self.owner is not None:
            self.owner.release()

    def abandon_in_child(self) -> None:
        """After fork: the files belong to the parent, and locks may be held by its threads.

        Write nothing and wait for no lock from now on.  Close the lock's descriptors, so that the
        child does not keep the directory locked after the parent has ended.
        """
        self.writer = None
        self.view.abandon_in_child()
        self.durability.abandon_in_child()
        if self.owner is not None:
            self.owner.release()

    # ---- whether it may be changed ----

    def next_offset(self) -> int:
        """Return the end of the log, ready for a change; raise if none is possible.

        Requires the lock.
        """
        self.finish_roll()
        if self._asleep is not None:
            self.wake_up()
        if self.writer is None:
            self.refuse()
        end = self.writer.next_offset
        self.view.producers.settle(end, self.view.segments[-1])
        return end

    def is_written(self, end_offset: int) -> bool:
        """Whether the active segment ends at or above `end_offset`.  Requires the lock."""
        self.finish_roll()
        return self.writer is not None and self.writer.next_offset >= end_offset

    def require_writable(self) -> None:
        """Raise if the log is closed, or was opened with readonly=True."""
        self.view.check_usable()

    def refuse(self) -> NoReturn:
        """Raise the reason why nothing can be appended."""
        self.require_writable()
        why = f"{self.name} cannot be appended to: {self.failure}; open it again"
        if self.durability.commit.failed:
            raise FailedLogError(why, offsets=range(0))
        raise ClosedError(why)

    def fail(self, error: BaseException) -> None:
        """End appends through this handle.  Readers continue."""
        self.failure = self.failure or error
        self.writer = None

    def expire_producers(self, now: int | None = None) -> list[int]:
        """See Partition.expire_producers."""
        if now is None:
            now = self.guarded_clock.now_ms()
        with self.view.lock:
            self.require_writable()
            if self._asleep is not None:
                return []  # `begin` forgets the silent ones when it loads the producers
            self.next_offset()
            return self.view.producers.expire(now)

    def clear_lossy(self) -> None:
        """Note, durably, that nothing is missing any more: see `RecoveryReport.lossy`.

        For a replica that its leader has filled again.
        """
        with self.view.lock:
            self.next_offset()
            if self.view.report.lossy:
                self.view.report.lossy = False
                self.durability.write_state(sync=True)

    def cleaned_offset(self) -> int:
        """Return the end of what compaction has cleaned; -1 if no file records it.

        The partition's own file is used first, then the root's checkpoint, which a broker writes.
        """
        offset = CleanerCheckpoint.read(self.view.directory)
        if offset < 0 and self.claims is not None:
            return self.claims.first_dirty_offset
        return offset

    def sync(self) -> None:
        """See Partition.sync."""
        with self.view.lock:
            if self._asleep is not None:
                self.view.check_usable()
                return  # a clean close has synced it
            end = self.next_offset()
            self.view.segments[-1].flush_indexes()
        commit = self.durability.commit
        commit.wait_for(end, commit.durable_offset)
        self.durability.write_mark()

    # ---- the active segment ----

    def roll(self) -> None:
        """See Partition.roll."""
        with self.view.lock:
            end = self.next_offset()
            if self.view.segments[-1].size_bytes:
                self.roll_locked(end)

    def roll_locked(self, base_offset: int) -> None:
        """Seal the active segment and start one at `base_offset`.

        Syncs nothing, except when many files are unsynced.  The next sync covers the old file, the
        new one and the directory.
        """
        view = self.view
        old = view.segments[-1]
        assert old.writer is not None
        if old.base_offset == base_offset:
            raise InvalidRecordError(f"the segment at {base_offset} is empty and cannot be rolled")
        view.producers.settle_written(old.writer.next_offset, old)
        # No append until the roll is finished, not even by a signal handler of this thread.
        writer, self.writer = self.writer, None
        try:
            old.flush_indexes(final=True)
            self.create_log_file(base_offset)
            new = view.make_segment(base_offset, base_offset >= view.dense_from)
            self._prepare(new, empty_contents(base_offset))
            more = view.producers.roll(old, base_offset)
            # Indexes too: recovery does not check those below the recovery point again.
            self.durability.add([old.file, *old.index_files(), *more])
            self._rolling = (old, new)
        except BaseException:
            if self._rolling is None:
                self._abandoned = (writer, base_offset)
            self.finish_roll()
            raise
        self.finish_roll()
        log.info("%s rolled at offset %d", self.name, base_offset)
        self.durability.sync_surplus()

    def roll_before(self, offset: int) -> None:
        """Roll for batches that start at `offset`, at or above the end.  Requires a writer."""
        assert self.writer is not None
        end = self.writer.next_offset
        self.roll_locked(max(offset, end))
        if offset > end:
            # Readers of other processes look for a segment at the end: make them load again.
            self.view.next_version()
            self.durability.write_state(sync=False)

    def finish_roll(self) -> None:
        """Publish the new segment of a roll.  After an interrupt it can be repeated."""
        if self._abandoned is not None:
            self._undo_roll(*self._abandoned)
        if self._rolling is None:
            return
        old, new = self._rolling
        old.seal(new.base_offset)
        if self.view.segments[-1] is not new:
            self.view.publish((*self.view.segments, new))
        self.writer = new.writer
        self.view.keep_warm(old)
        self._rolling = None

    def _undo_roll(self, writer: _native.SegmentWriter | None, base_offset: int) -> None:
        """Go on with the old segment; remove the empty file of the new one.

        If the file cannot be removed, appends end: recovery would look there for the next records.
        """
        directory, name = self.view.directory, segment_name(base_offset, ".log")
        try:
            if directory.size(name) == 0:
                directory.unlink(name)
        except (FileNotFoundError, NotALogError):
            pass
        except OSError as error:
            self.fail(error)
            writer = None
        self.writer, self._abandoned = writer, None

    def create_log_file(self, base_offset: int) -> None:
        """Create an empty .log file; an empty one that exists is used."""
        directory, name = self.view.directory, segment_name(base_offset, ".log")
        try:
            directory.open(name, write=True, create=True, exclusive=True).close()
        except FileExistsError:
            if directory.size(name):
                raise
        self.durability.names_changed()

    def activate(self, segment: Segment, contents: SegmentContents) -> None:
        """Append to this segment from now on."""
        self._prepare(segment, contents)
        self.writer = segment.writer

    def _prepare(self, segment: Segment, contents: SegmentContents) -> None:
        """Give a segment its writer.  Nothing else changes."""
        config = self.view.config
        jitter = min(config.segment_jitter_ms, config.segment_ms)
        segment.activate(
            contents,
            now_ms=self.view.clock.time_ms(),
            jitter_ms=random.randrange(jitter) if jitter else 0,
        )

    def expect(self, offset: int) -> None:
        """Raise ConflictError unless the log ends at `offset`.  With the lock held."""
        end = self.next_offset()
        if end != offset:
            raise ConflictError(offset, end, where=self.view.name)

    def time_of_append(self) -> int:
        """Return the time for records of a log with LogAppendTime.  With the lock held."""
        # A clock that steps back must not make the timestamps of the log decrease.
        self._last_append_time = max(self._last_append_time, self.view.clock.time_ms())
        return self._last_append_time

    def settle(self, offsets: range) -> None:
        """Note the transactions that a write has ended.  With the lock held."""
        try:
            self.next_offset()
        except OSError as error:
            # The batches are in the log, but not in the index of aborted transactions.  Committed
            # readers stay below them, and the next open writes the index again.
            failure = IndeterminateAppendError(
                f"{error} while noting an aborted transaction; close the log and open it again",
                offsets=offsets,
            )
            self.fail(failure)
            raise failure from error

    def allow_gaps(self, first_offset: int) -> None:
        """Allow gaps in this log from now on: offsets are missing in copied batches.

        `first_offset` is that of the first batch.
        """
        if self.view.dense_from >= NEVER_DENSE:
            return
        # Before the gap can be read.  A scan that has begun ends with the segment, which is rolled.
        self.view.allow_gaps_below(NEVER_DENSE)
        self.durability.write_state(sync=True)
        self.view.segments[-1].dense = False
        if self.view.segments[-1].size_bytes:
            self.roll_before(first_offset)

    # ---- leader epochs ----

    @property
    def leader_epoch(self) -> int:
        """The epoch that appends carry."""
        return self.leadership.epoch

    @property
    def leader_epochs(self) -> LeaderEpochs:
        """Which epoch started at which offset; a copy."""
        return LeaderEpochs(self.leadership.history.entries)

    def last_record_epoch(self) -> int | None:
        """Return the epoch of the last record; None if the log has no record.  Takes no lock."""
        history, end = self._history_and_end()
        return history.epoch_for(end - 1) if end > self.view.start_offset else None

    def _history_and_end(self) -> tuple[LeaderEpochs, int]:
        """Return the published history and the log's end, both of one moment."""
        leadership = self.leadership
        while True:
            history = leadership.history
            writer = self.writer
            end = self.view.end_offset if writer is None else writer.next_offset
            # An epoch is in the history before its first record is in the log.  The same object:
            # `end` is not after a record of a later epoch.
            if leadership.history is history:
                return history, end

    def become_leader(self, epoch: int) -> None:
        """See Partition.become_leader."""
        self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> int:
        """Begin an epoch, as Partition.become_leader; return the end of the log at its begin.

        The epoch is on disk when this returns, also if no record follows.  Raises FencedError if a
        higher epoch was begun here, or if a record of a higher epoch is in the log.
        """
        check_int("an epoch", epoch)
        if not 0 <= epoch <= EPOCH_MAX:
            raise ValueError(f"an epoch is an int from 0 to {EPOCH_MAX}, not {epoch!r}")
        with self.view.lock:
            end = self.next_offset()
            leadership = self.leadership
            if epoch < leadership.epoch:
                raise FencedError(epoch, leadership.epoch, where=self.name)
            if epoch > leadership.epoch or not leadership.noted:
                leadership.assign(epoch, end)
                self.view.wake_followers()
            return end

    def end_offset_for_epoch(self, epoch: int) -> EpochEnd | None:
        """See Partition.end_offset_for_epoch.  Takes no lock."""
        history, end = self._history_and_end()
        found = history.end_offset_for(epoch, end)
        # During a truncation the history may have epochs that the log has no records of any more.
        return None if found is None else found._replace(end_offset=min(found.end_offset, end))


class ReadOnlyLog(ActiveLog):
    """The ActiveLog of a log that was opened with readonly=True.

    It never has a writer, so every change ends in `refuse`, which raises ReadOnlyError.
    """

    view: ReadOnlyView

    @property
    def durable_offset(self) -> int:
        """The durable offset in the writer's files."""
        return self.view.durable_offset

    def require_writable(self) -> None:
        """Raise ReadOnlyError."""
        self.view.check_usable()
        raise ReadOnlyError(f"{self.name} was opened with readonly=True")

    @property
    def leader_epoch(self) -> int:
        """The latest epoch in the writer's file."""
        return LeaderEpochs(read_leader_epochs(self.view.directory)).latest or 0

    @property
    def leader_epochs(self) -> LeaderEpochs:
        """Which epoch started at which offset, in the writer's file."""
        self.view.check_usable()
        return LeaderEpochs(read_leader_epochs(self.view.directory))

    def _history_and_end(self) -> tuple[LeaderEpochs, int]:
        """Return the history in the writer's file, and the end that is seen now."""
        return self.leader_epochs, self.view.end_offset
