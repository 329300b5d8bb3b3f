"""Parts: the objects below one Partition, and how they are loaded, closed and left after a fork.

References run in one direction: Partition -> Parts -> Appender, Cutter, Rewriter -> Reader ->
ActiveLog -> Durability -> LogView.  There is no cycle, so reference counting frees a log at once.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref

from logstore import _native
from logstore.clock import Clock, SystemClock
from logstore.config import PartitionConfig
from logstore.files.directory import Directory
from logstore.files.lock import DirectoryLock
from logstore.files.names import directory_name, parse_partition_name
from logstore.partition.active_log import ActiveLog, ReadOnlyLog
from logstore.partition.appender import Appender
from logstore.partition.cutter import Cutter
from logstore.partition.durability import Durability
from logstore.partition.leadership import Leadership
from logstore.partition.reader import Reader
from logstore.partition.reader_view import ReadOnlyView
from logstore.partition.rewriter import Rewriter
from logstore.partition.view import LogView
from logstore.recovery.loader import Claims, load
from logstore.recovery.report import RecoveryProgress
from logstore.root.checkpoints import CLEANER_OFFSETS, RECOVERY_POINTS, START_OFFSETS, read_offsets
from logstore.root.clean_shutdown import CleanShutdown

__all__ = ["Parts"]

log = logging.getLogger("logstore.partition")

CLOSE_DIGEST_BYTES = 16 << 20  # of sealed segments that close() reads for their digests

# For fork.  Weak, and of ActiveLog: a Scan may keep the log open after its Partition is dropped.
_open_logs: weakref.WeakSet[ActiveLog] = weakref.WeakSet()


class Parts:
    """The parts of one open log, for Partition and for other packages of logstore."""

    __slots__ = (
        *("view", "active", "durability", "reader", "cutter", "rewriter", "appender"),
        *("append", "scan", "_dropped", "_references"),
    )

    def __init__(self, directory: Directory, *, readonly: bool, durability: str,
                 config: PartitionConfig, clock: Clock | None,
                 claims: Claims | None) -> None:  # fmt: skip
        clock = clock or SystemClock()
        leadership = Leadership(directory)
        view: LogView
        if readonly:
            view = ReadOnlyView(directory, config, clock, claims)
        else:
            view = LogView(directory, config, clock)
        kind = ReadOnlyLog if readonly else ActiveLog
        self.durability = Durability(view, leadership, durability)
        active = kind(view, self.durability, leadership, claims)
        self.view = view
        self.active = active
        self.reader = Reader(view, active)
        self.cutter = Cutter(active, self.reader)
        self.rewriter = Rewriter(active, self.reader)
        self.appender = Appender(active, self.cutter.explain_full)
        # The hot calls: bound once, so that an instance of Partition calls them without a frame.
        self.append = self.appender.append
        self.scan = self.reader.scan
        self._dropped = False  # every descriptor is closed
        self._references = 0

    # ---- references ----

    def _count(self) -> int:
        parts = (self.view, self.active, self.reader, self.cutter, self.rewriter, self.appender)
        return sum(map(sys.getrefcount, (*parts, self.append, self.scan)))

    def complete(self) -> None:
        """Count the references of a Partition that is not in use yet, for `in_use`."""
        self._references = self._count()

    @property
    def in_use(self) -> bool:
        """Whether a Scan, a Writer, a bound method or a call of another thread holds a part."""
        return self._count() > self._references

    # ---- opening ----

    def lock_alone(self) -> None:
        """Lock a partition that is opened without a store."""
        directory = self.view.directory
        self.active.claims = _claims_of(directory)
        self.active.owner = DirectoryLock(directory, under_parent=CleanShutdown.clear_for_partition)

    def load(self, progress: RecoveryProgress | None) -> None:
        """Read the log from its files, and repair its end after a crash."""
        view, active = self.view, self.active
        if isinstance(view, ReadOnlyView):
            view.load(progress)
        else:
            loaded = load(
                view.directory,
                view.make_segment,
                readonly=False,
                progress=progress,
                claims=active.claims,
            )
            view.adopt(loaded)
            report = loaded.report
            # Before the state file is written again: a second crash must not hide the loss.
            report.lossy = (
                loaded.was_lossy
                or (loaded.unsynced_gone and self.durability.level == "os")
                or bool(report.damage or report.set_aside)
            )
            claims = active.claims
            if claims is not None and claims.first_dirty_offset > loaded.contents.next_offset:
                # Of a deleted log of this name: the claim must not apply once this one has grown.
                active.claims = claims._replace(first_dirty_offset=-1)
            if claims is not None and loaded.untouched:
                active.sleep(loaded)
            else:
                active.begin(loaded)
        _open_logs.add(active)

    # ---- closing ----

    def close(self) -> None:
        """See Partition.close."""
        view, active = self.view, self.active
        if not view.forked:
            self.appender.writers.close()
        with view.lock:
            if view.closed:
                if not self._dropped:
                    self.drop()  # an interrupt stopped the first close
                return
            active.finish_roll()
            view.close()
            try:
                if active.writer is not None and active.failure is None and not view.forked:
                    active.close_cleanly()
                    self._digest_on_close()
            finally:
                self.drop()
        view.wake_followers()

    def _digest_on_close(self) -> None:
        """Write digests as far as that takes no time; Maintenance writes the rest."""
        try:
            self.rewriter.digest_sealed(CLOSE_DIGEST_BYTES)
        except OSError as error:
            log.warning("%s: no digests were noted: %s", self.view.name, str(error))

    def discard(self) -> None:
        """Close without writing: the store deletes the partition, or has failed."""
        with self.view.lock:
            self.view.close()
            self.drop()
        self.view.wake_followers()

    def drop(self) -> None:
        """Close all descriptors.  Write nothing."""
        self.active.drop()
        _open_logs.discard(self.active)
        self._dropped = True


def _claims_of(directory: Directory) -> Claims | None:
    """Return Claims for a partition that is opened alone, if a broker owned its root since.

    Then its own state is out of date.  Opening it removes the broker's marker, so write FOREIGN:
    the next open of the other partitions must see that a broker was here, too.
    """
    try:
        root = Directory(directory.path.absolute().parent)
    except OSError:
        return None
    try:
        left = CleanShutdown.read(root)
        if not left.foreign:
            return None
        root.replace(CleanShutdown.TWIN, CleanShutdown.FOREIGN)
        topic, number = parse_partition_name(directory_name(directory.path))
        points = read_offsets(root, RECOVERY_POINTS)
        starts = read_offsets(root, START_OFFSETS)
        cleaned = read_offsets(root, CLEANER_OFFSETS)
        key = (topic, number)
        return Claims(points.get(key, 0), starts.get(key, 0), cleaned.get(key, -1), only=True)
    finally:
        root.close()


def _after_fork_in_child() -> None:
    _native.after_fork_in_child()
    for active in list(_open_logs):
        active.abandon_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
