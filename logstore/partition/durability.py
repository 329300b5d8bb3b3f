"""StableStorage: what of a log is on stable storage, and what was written down about it.

Three files keep the claims: the state file (how far recovery need not look), the durable mark (what
was durable at the last look) and, on a clean close, the promise that nothing has to be looked at.
A claim is written after the sync that makes it true, and lowered before the data is cut.

State: the group commit that appends wait for, files and names that nobody has synced yet, and the
open mark.  `_lock` guards the latter and the writing of the state file.  It is taken last and held
for moments.  A sync holds neither it nor the log's own lock: close and truncate wait for a sync
while they hold that one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable

from logstore import _native
from logstore.files.boot import boot_id
from logstore.files.names import base_offset_of
from logstore.log.state import DurableMark, PartitionState, lists_of_aborts
from logstore.partition.group_commit import GroupCommit
from logstore.partition.leadership import Leadership
from logstore.partition.view import View

__all__ = ["StableStorage"]

log = logging.getLogger("logstore.partition")

UNSYNCED_FILES = 12  # of sealed segments, that durability="os" may leave to the kernel
MARK_SECONDS = 0.05  # how late the durable mark may be


class StableStorage:
    """The disk below a log that is written."""

    def __init__(self, view: View, leadership: Leadership, sync: Callable[[], int]) -> None:
        """`sync` is to call `sync_written`, for a log that may be gone by then."""
        self.commit = GroupCommit(sync, 0)
        self._view = view
        self._leadership = leadership
        self._lock = threading.Lock()
        self._unsynced: list[_native.File] = []
        # Creations and renames so far, and how many of them the last directory sync covered.
        self._names_changed = 0
        self._names_synced = 0
        self._mark: DurableMark | None = None
        self._mark_due = 0.0

    def begin(self) -> None:
        """Open what claims are written to: the log is about to be changed."""
        if self._mark is None:  # it is open if this was tried before
            self._mark = DurableMark(self._view.directory)

    def close(self) -> None:
        """Close all descriptors; nothing is written."""
        for file in self._unsynced:
            file.close()
        if self._mark is not None:
            self._mark.close()

    def abandon_in_child(self) -> None:
        """After fork: the lock may be held by a thread that does not exist here."""
        self._lock = threading.Lock()

    # ---- what is to be synced ----

    def add(self, files: Iterable[_native.File]) -> None:
        """These have bytes that no sync has covered."""
        with self._lock:
            self._unsynced += files

    def forget(self, base_offsets: Collection[int]) -> None:
        """These segments are deleted: an open file would keep their blocks from a full disk."""
        with self._lock:
            self._unsynced = [
                file
                for file in self._unsynced
                if file.path.endswith(".snapshot")
                or base_offset_of(os.path.basename(file.path)) not in base_offsets
            ]

    def names_changed(self) -> None:
        """A file was created, renamed or removed: the directory is to be synced as well."""
        self._names_changed += 1

    def sync_surplus(self) -> None:
        """Sync the oldest files while there are many: bounds what a crash leaves to recovery."""
        while len(self._unsynced) > UNSYNCED_FILES:
            oldest = self._unsynced[0]
            oldest.datasync()
            with self._lock:
                self._unsynced = [file for file in self._unsynced if file is not oldest]

    def sync_written(self) -> int:
        """Sync every file with unsynced bytes; the end offset that is durable now."""
        with self._lock:
            sealed = list(self._unsynced)
            changes = self._names_changed
            active = self._view.segments[-1]
            end = active.end_offset
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

    # ---- what is written down ----

    def _note_durable(self, end: int, base_offset: int) -> None:
        """Write down how much is durable.  A claim may be late, or missing on a full disk."""
        view = self._view
        if time.monotonic() < self._mark_due and base_offset <= view.recovery_point:
            return  # written each time it would slow the syncs themselves down
        before = view.recovery_point
        try:
            with self._lock:
                self._mark_due = time.monotonic() + MARK_SECONDS
                if self._mark is not None:
                    self._mark.write(end)
            if base_offset > before:
                view.recovery_point = base_offset
                self.write_state(sync=True)
        except OSError as error:
            view.recovery_point = before
            log.warning("%s: could not write down what is durable: %s", view.name, str(error))

    def write_mark(self, *, sync: bool = False) -> None:
        """Write down what is durable now; with `sync`, because less is from now on."""
        with self._lock:
            mark = self._mark
            if mark is not None:
                # Asked for under the lock: a cut lowers it first, and then comes here.
                offset = self.commit.durable_offset
                self._view.directory.with_room(lambda: mark.write(offset, sync=sync))

    def write_state(self, *, clean: bool = False, sync: bool) -> None:
        """Write the state file; `clean` promises that there is nothing for recovery to do."""
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
        )
