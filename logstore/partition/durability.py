"""Durability: which records of a log are on stable storage, and the files that record it.

Three files hold the claims: the state file (how far recovery need not read), the durable mark (the
durable offset at the last sync) and, after a failed fsync, ``logstore.failed``.  A claim is written
after the sync that makes it true.  It is lowered before the data is cut.

State: the group commit that appends wait for, the files and names that no sync has covered yet, and
the open mark.  `_lock` guards these files and the writing of the state file.  It is taken after
every other lock of a log and held for moments.  A sync holds neither `_lock` nor the log's lock:
close and truncate wait for a sync while they hold the log's lock.

A failed fsync is final.  It ends appends through this handle, hides what is above the durable
offset, and leaves ``logstore.failed`` for the next open.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from logstore import _native
from logstore.config import wants_fsync
from logstore.errors import ClosedError, IndeterminateAppendError
from logstore.files.boot import boot_id
from logstore.files.names import base_offset_of
from logstore.log.state import DurableMark, PartitionState, lists_of_aborts
from logstore.partition.leadership import Leadership
from logstore.partition.view import LogView
from logstore.recovery.failed_sync import FailedSync
from logstore.shared_syncs import Done, SharedSyncs

if TYPE_CHECKING:
    from concurrent.futures import Executor

__all__ = ["Durability", "GroupCommit"]

log = logging.getLogger("logstore.partition")

UNSYNCED_FILES = 12  # of sealed segments, that durability="os" may leave to the kernel
MARK_SECONDS = 0.05  # how late the durable mark may be
SYNC_THREADS = 4  # logs that `when_durable` syncs at the same time, in the whole process


class GroupCommit:
    """Many threads wait, and one of them calls `sync` for all.

    `sync` makes everything written so far durable and returns the end offset that it covered.  A
    thread that needs its records durable leads a sync.  If a sync is running, the thread waits for
    its end and checks again.  So any number of appends that arrive during one sync share the next.

    A failed sync is final: the kernel may have dropped the pages and would report success the next
    time.  After a failure `wait_for` never returns for offsets that are not durable yet: it raises.

    The lock is taken only by `with`, so that an interrupt at any point leaves no lock held.
    """

    def __init__(self, sync: Callable[[], int], durable_offset: int) -> None:
        self._sync = sync
        self._turn = threading.Lock()  # held by the thread that syncs
        self._gates: list[threading.Lock] = []  # one per waiting thread, opened after a sync
        self._failure: OSError | None = None
        self.durable_offset = durable_offset

    @property
    def failed(self) -> bool:
        """Whether a sync has failed: no more offsets become durable."""
        return self._failure is not None

    def fail(self, error: OSError) -> None:
        """Note a failed sync of these files: threads that wait raise."""
        self._failure = self._failure or error

    def wait_for(self, end_offset: int, first_offset: int) -> None:
        """Return when all offsets below `end_offset` are durable; raise if that cannot be known."""
        while self.durable_offset < end_offset:
            if self._failure is not None:
                raise IndeterminateAppendError(
                    f"fsync failed: {self._failure}; close the log and open it again",
                    offsets=range(first_offset, end_offset),
                ) from self._failure
            if self._turn.locked():
                self._wait_for_turn()
            elif self._lead(end_offset) < end_offset and self._failure is None:
                raise IndeterminateAppendError(
                    "the log was truncated before they were durable",
                    offsets=range(first_offset, end_offset),
                )

    def _wait_for_turn(self) -> None:
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        # A leader opens the gates after it has released the turn.  Check the turn again: the leader
        # may have opened all gates before this one was in the list.
        if self._turn.locked():
            # The timeout matters only if an interrupt kept a leader from opening the gate.
            gate.acquire(timeout=0.1)

    def _lead(self, end_offset: int) -> int:
        """Sync; return the end of what is durable now."""
        leading = False
        try:
            with self._turn:
                leading = True
                if self.durable_offset < end_offset and self._failure is None:
                    self.durable_offset = max(self.durable_offset, self._sync())
        except OSError as error:
            self._failure = error
        except ClosedError:
            # Another thread closed the log: a clean close has made everything durable.
            if self.durable_offset < end_offset:
                raise
        finally:
            if leading:
                # After the turn is released, so that a thread that wakes up can take it.
                while self._gates:
                    self._gates.pop().release()
        return self.durable_offset

    def raise_to(self, offset: int) -> None:
        """Note that every record below `offset` is durable or deleted."""
        with self._turn:
            self.durable_offset = max(self.durable_offset, offset)

    def lower(self, offset: int) -> None:
        """Note that the log was cut: no record at or above `offset` exists."""
        with self._turn:
            self.durable_offset = min(self.durable_offset, offset)


class Durability:
    """What is durable in one log.

    `level` is the durability of an append that names none: "fsync" or "os".  `fsync` is whether
    such an append ends with an fsync; `suspect` sets it until the next sync.
    """

    def __init__(self, view: LogView, leadership: Leadership, level: str) -> None:
        self.level = level
        self.fsync = wants_fsync(level)
        self.commit = GroupCommit(_sync_written_of(weakref.ref(self)), 0)
        # Called with this object after a failed fsync: the store suspects its other logs.
        self.sync_failed: Callable[[Durability], None] | None = None
        # Ends appends.  Weak: ActiveLog refers to this object, and there must be no cycle.
        self.end_appends: weakref.WeakMethod[Callable[[BaseException], None]] | None = None
        self._view = view
        self._leadership = leadership
        self._suspected = False
        self._lock = threading.Lock()
        self._unsynced: list[_native.File] = []
        # Creations and renames so far, and how many of them the last directory sync covered.
        self._names_changed = 0
        self._names_synced = 0
        self._mark: DurableMark | None = None
        self._mark_due = 0.0

    def begin(self) -> None:
        """Open the durable mark: the log is about to be changed."""
        if self._mark is None:  # an earlier call that failed later may have opened it
            self._mark = DurableMark(self._view.directory)

    def close(self) -> None:
        """Close all descriptors.  Write nothing."""
        for file in self._unsynced:
            file.close()
        if self._mark is not None:
            self._mark.close()

    def abandon_in_child(self) -> None:
        """After fork: replace the lock, which a thread that does not exist here may hold."""
        self._lock = threading.Lock()

    # ---- what is durable ----

    @property
    def durable_offset(self) -> int:
        """Every record below this offset is on stable storage."""
        # Trimmed records count as durable, also if an interrupt stopped `raise_to` after a trim.
        return max(self.commit.durable_offset, self._view.start_offset)

    def make_durable(self, offsets: range) -> None:
        """Return when every record below the end of the range is on stable storage."""
        self.commit.wait_for(offsets.stop, offsets.start)

    def when_durable(self, offset: int, done: Done) -> None:
        """Call ``done(None)`` once every record below `offset` is on stable storage.

        `done` gets the error if that cannot be known: the fsync failed, or the log was truncated.
        It is called in a thread of the process-wide pool that syncs, or in this thread if the
        records are durable already.  It must not wait.  Callers of one log share fsyncs.
        """
        durable = self.durable_offset
        if durable >= offset:
            done(None)
        else:
            _syncs.add(self, self.make_durable, range(durable, offset), done)

    def suspect(self) -> None:
        """End the next append with an fsync: one failed elsewhere on the device."""
        self._suspected = self.fsync = True

    def fail(self, error: OSError) -> None:
        """Note that an fsync failed: records above the durable offset may not be on the disk.

        Does not take the log's lock: the thread that waits for this sync may hold it.
        """
        if self.commit.failed:
            return  # noted already
        view, durable = self._view, self.commit.durable_offset
        self.commit.fail(error)
        end_appends = None if self.end_appends is None else self.end_appends()
        if end_appends is not None:
            end_appends(error)
        view.limit_to(durable)
        log.error("%s: an fsync failed: %s; readers go up to offset %d until it is opened again",
                  view.name, str(error), durable)  # fmt: skip
        FailedSync(durable, str(error)).leave(view.directory)
        view.wake_followers()
        if self.sync_failed is not None:
            self.sync_failed(self)

    # ---- syncing ----

    def add(self, files: Iterable[_native.File]) -> None:
        """Add files with bytes that no sync has covered."""
        with self._lock:
            self._unsynced += files

    def forget(self, base_offsets: Collection[int]) -> None:
        """Drop the files of deleted segments: an open file would keep its blocks on a full disk."""
        with self._lock:
            self._unsynced = [
                file
                for file in self._unsynced
                if file.path.endswith(".snapshot")
                or base_offset_of(os.path.basename(file.path)) not in base_offsets
            ]

    def names_changed(self) -> None:
        """Have the next sync cover the directory: a file was created, renamed or removed."""
        self._names_changed += 1

    def sync_surplus(self) -> None:
        """Sync the oldest files while there are many: bounds what a crash leaves to recovery."""
        try:
            while len(self._unsynced) > UNSYNCED_FILES:
                oldest = self._unsynced[0]
                oldest.datasync()
                with self._lock:
                    self._unsynced = [file for file in self._unsynced if file is not oldest]
        except OSError as error:
            self.fail(error)
            raise

    def sync_written(self) -> int:
        """Sync every file with unsynced bytes; return the end offset that is durable now."""
        try:
            end = self._sync_files()
        except OSError as error:
            self.fail(error)
            raise
        if self._suspected:
            self._suspected, self.fsync = False, wants_fsync(self.level)
        return end

    def _sync_files(self) -> int:
        with self._lock:
            sealed = list(self._unsynced)
            changes = self._names_changed
            active = self._view.segments[-1]
            end = active.end_offset  # before the sync: later records are perhaps not covered
        for file in (*sealed, active.file):
            file.datasync()
        if changes != self._names_synced:
            self._view.directory.sync()
        # Only now: an interrupt above leaves everything still to be synced.
        with self._lock:
            self._names_synced = changes
            self._unsynced = [file for file in self._unsynced if file not in sealed]
        self._note_durable(end, active.base_offset)
        return end

    # ---- the files that record it ----

    def _note_durable(self, end: int, base_offset: int) -> None:
        """Write the durable offset.  The claim may be late, or missing on a full disk."""
        view = self._view
        if time.monotonic() < self._mark_due and base_offset <= view.recovery_point:
            return  # one write for each sync would slow the syncs down
        before = view.recovery_point
        try:
            with self._lock:
                self._mark_due = time.monotonic() + MARK_SECONDS
                if self._mark is not None:
                    self._mark.write(end)
            if base_offset > before:
                view.move_recovery_point(base_offset)
                self.write_state(sync=True)
        except OSError as error:
            view.move_recovery_point(before)
            log.warning("%s: could not write down what is durable: %s", view.name, str(error))

    def write_mark(self, *, sync: bool = False) -> None:
        """Write the durable offset; with `sync`, because it is lower from now on."""
        with self._lock:
            mark = self._mark
            if mark is not None:
                # Read under `_lock`: a cut lowers it first, and then calls this.
                offset = self.commit.durable_offset
                self._view.directory.with_room(lambda: mark.write(offset, sync=sync))

    def write_state(self, *, clean: bool = False, sync: bool) -> None:
        """Write the state file; `clean` claims that recovery has nothing to do."""
        with self._lock:
            if self._view.closed and not clean:
                return  # a sync that ended late must not undo a clean close
            self._state(clean).write(self._view.directory, sync=sync)

    def _state(self, clean: bool) -> PartitionState:
        view = self._view
        active = view.segments[-1]
        writer = active.writer
        return PartitionState(
            clean=clean,
            version=view.version,
            boot=boot_id(),
            recovery_point=view.recovery_point,
            start_offset=view.start_offset,
            end_offset=active.end_offset,
            dense_from=view.dense_from,
            segments=len(view.segments),
            active_base=active.base_offset,
            active_bytes=active.size_bytes,
            active_indexes_crc=active.indexes_crc() if clean else 0,
            first_timestamp=-1 if writer is None else writer.first_timestamp,
            leader_epoch=self._leadership.epoch,
            aborts=lists_of_aborts(
                [(segment.base_offset, segment.next_base) for segment in view.segments],
                view.producers.indexed,
                view.start_offset,
                view.recovery_point,
                clean,
            ),
            cuts=view.cut.number,
            cut_offsets=view.cut.recent,
            lossy=view.report.lossy,
        )


def _sync_written_of(owner: weakref.ref[Durability]) -> Callable[[], int]:
    """Weak: a cycle of Durability and its GroupCommit would keep files of a dropped log open."""

    def sync_written() -> int:
        held = owner()
        if held is None:
            raise ClosedError("the partition is gone")
        return held.sync_written()

    return sync_written


def _make_pool() -> Executor:
    from concurrent.futures import ThreadPoolExecutor  # imported on first use: it is slow

    return ThreadPoolExecutor(SYNC_THREADS, "logstore sync")


_syncs = SharedSyncs(_make_pool)


def _after_fork_in_child() -> None:
    """The threads of the pool exist in the parent only."""
    global _syncs
    _syncs = SharedSyncs(_make_pool)


os.register_at_fork(after_in_child=_after_fork_in_child)
