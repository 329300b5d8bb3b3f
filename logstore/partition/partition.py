"""Partition: an ordered, durable sequence of records in one directory.

What it can do lies in the rooms below, each of which is a log with one more ability: ReadableLog,
WritableLog, AppendableLog, RewritableLog.  Here it is opened, owned and closed.

Ordered segments, the last of which is appended to.  One lock, the view's, serialises appends, rolls
and cuts; readers take none.  Every other lock is taken below that one.

Not here: topics and partitioning by key (Store), who reads what (Consumer), retention rules.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logstore import _native
from logstore.clock import Clock, SystemClock
from logstore.closeable import Closeable
from logstore.config import PartitionConfig, wants_fsync
from logstore.files.directory import Directory
from logstore.files.disk_reserve import PARTITION_RESERVE_BYTES, Reserve
from logstore.files.filesystem import require_safe
from logstore.files.lock import DirectoryLock
from logstore.files.names import directory_name, parse_partition_name
from logstore.partition.cutter import RewritableLog
from logstore.partition.reader_view import BesideWriter
from logstore.partition.view import View
from logstore.recovery.loader import Claims, load, refuse_foreign
from logstore.recovery.report import RecoveryProgress
from logstore.root.checkpoints import CLEANER_OFFSETS, RECOVERY_POINTS, START_OFFSETS, read_offsets
from logstore.root.clean_shutdown import CleanShutdown

__all__ = ["Partition"]

log = logging.getLogger("logstore.partition")

CLOSE_DIGEST_BYTES = 16 << 20  # of sealed segments that close() reads for their digests

_open_partitions: weakref.WeakSet[Partition] = weakref.WeakSet()


class Partition(RewritableLog, Closeable):
    """One partition of a topic: a directory named ``topic-N``.  Open one with `Partition.open`.

    ``topic`` and ``number`` are its name's parts; ``recovery`` tells what opening found and did.
    There is no ``len()``: offsets run from ``start_offset`` to ``end_offset``.

    Threads share a Partition freely; one process at a time may have it open for writing, any number
    with ``readonly=True``.
    """

    def __init__(self, directory: Directory, *, readonly: bool, durability: str,
                 config: PartitionConfig, clock: Clock | None,
                 claims: Claims | None = None) -> None:  # fmt: skip
        """Use `Partition.open`."""
        clock = clock or SystemClock()
        view = (
            BesideWriter(directory, config, clock, claims)
            if readonly
            else View(directory, config, clock)
        )
        super().__init__(view, durability, claims)
        self._owner: DirectoryLock | None = None
        self._dropped = False  # every descriptor is closed

    # ---- opening ----

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        readonly: bool = False,
        create: bool = True,
        durability: str = "fsync",
        config: PartitionConfig | Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        progress: RecoveryProgress | None = None,
        reserve_bytes: int = PARTITION_RESERVE_BYTES,
        allow_unsafe_fs: bool = False,
    ) -> Partition:
        """Open a partition directory, creating it if it is missing.

        After a crash the unchecked end of the log is verified and repaired; `progress` is called
        with (bytes checked, bytes in all), and ``partition.recovery`` tells what was found.
        `reserve_bytes` of the disk are kept for deleting and closing when it is full.
        Raises LockedError when another handle has it open for writing, FileNotFoundError when it is
        missing and may not be created, NotALogError, InvalidNameError, and UnsafeFileSystemError on
        a network file system, unless ``allow_unsafe_fs=True``.
        """
        path = Path(path)
        parse_partition_name(directory_name(path))
        settings = PartitionConfig.of(config)
        wants_fsync(durability)
        directory = Directory(path, create=create and not readonly)
        self = cls(directory, readonly=readonly, durability=durability, config=settings,
                   clock=clock)  # fmt: skip
        try:
            refuse_foreign(directory)
            if not readonly:
                require_safe(directory, allow_unsafe=allow_unsafe_fs)
                self._claims = _claims_of(directory)
                self._owner = DirectoryLock(
                    directory, under_parent=CleanShutdown.clear_for_partition
                )
                directory.room = reserve = Reserve(directory, reserve_bytes)
                reserve.fill()
            self._load(progress)
        except BaseException:
            self._drop()
            raise
        _open_partitions.add(self)
        return self

    @classmethod
    def open_in_store(
        cls,
        root: Directory,
        name: str,
        *,
        lock: DirectoryLock | None,
        durability: str,
        config: PartitionConfig,
        clock: Clock | None,
        claims: Claims,
        progress: RecoveryProgress | None = None,
    ) -> Partition:
        """A partition of a Store, which holds `lock` on the root; None is readonly.

        One that was closed cleanly sleeps until its first change: it holds one descriptor, and its
        files stay as they are.
        """
        self = cls(root.below(name), readonly=lock is None, durability=durability, config=config,
                   clock=clock, claims=claims)  # fmt: skip
        try:
            self._owner = None if lock is None else lock.share()
            self._load(progress)
        except BaseException:
            self._drop()
            raise
        _open_partitions.add(self)
        return self

    def _load(self, progress: RecoveryProgress | None) -> None:
        view = self._view
        if isinstance(view, BesideWriter):
            view.load(progress)
            return
        loaded = load(
            view.directory,
            view.make_segment,
            readonly=False,
            progress=progress,
            claims=self._claims,
        )
        view.adopt(loaded)
        if (
            self._claims is not None
            and self._claims.first_dirty_offset > loaded.contents.next_offset
        ):
            # Of another log of this name: it must not come true when this one has grown.
            self._claims = self._claims._replace(first_dirty_offset=-1)
        if self._claims is not None and loaded.untouched:
            self._sleep(loaded)
        else:
            self._begin(loaded)

    # ---- closing ----

    def close(self) -> None:
        """Close its writers, make everything durable and give the directory back.

        Raises, and stays open, when a writer cannot hand over what it holds.  Closing twice is
        harmless, and finishes a close that was interrupted.  Scans and appends of other threads
        then raise ClosedError.
        """
        view = self._view
        if not view.forked:
            for writer in list(self._writers):
                writer.close()
        with view.lock:
            if view.closed:
                if not self._dropped:
                    self._drop()  # an interrupt stopped the first close on its way
                return
            self._finish_roll()
            view.closed = True
            try:
                if self._writer is not None and self._failure is None and not view.forked:
                    self._close_cleanly()
                    self._digest_on_close()
            finally:
                self._drop()
        view.wake_followers()

    def _digest_on_close(self) -> None:
        """As far as that takes no time; Maintenance does the rest."""
        try:
            self._digest_sealed(CLOSE_DIGEST_BYTES)
        except OSError as error:
            log.warning("%s: no digests were noted: %s", self.name, str(error))

    def discard(self) -> None:
        """Close without writing anything: for a store that deletes it or has failed."""
        with self._view.lock:
            self._view.closed = True
            self._drop()
        self._view.wake_followers()

    def _drop(self) -> None:
        """Close all descriptors; nothing is written."""
        self._asleep = None
        self._writer = None
        self._view.close_files()
        self._stable.close()
        self._view.directory.close()
        if self._owner is not None:
            self._owner.release()
        _open_partitions.discard(self)
        self._dropped = True

    def _abandon_in_child(self) -> None:
        """After fork: descriptors are closed, so that the lock does not outlive the parent here."""
        super()._abandon_in_child()
        if self._owner is not None:
            self._owner.release()

    def __del__(self) -> None:
        if getattr(self, "_writer", None) is not None and not self.closed:
            warnings.warn(
                f"{self!r} was dropped without close(): the next open will check its end",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        view = self._view
        if view.closed:
            return f"<Partition {self.name} closed>"
        mode = " readonly" if view.readonly else ""
        end = view.segments[-1].end_offset if view.segments else 0
        return f"<Partition {self.name} [{view.start_offset}, {end}){mode}>"


def _claims_of(directory: Directory) -> Claims | None:
    """Claims for a partition that is opened alone, below a root that a broker has owned since.

    Its own state is out of date then; and opening it takes the broker's marker away, so what is
    left there must say the same to whoever opens the others.
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
    for partition in list(_open_partitions):
        partition._abandon_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
