"""File descriptors of a store: the limit of the process, and closing partitions to free some."""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from logstore.files.directory import Directory

if TYPE_CHECKING:
    from logstore.store.store import Store


__all__ = ["IdlePartitions", "make_room_for_files"]

log = logging.getLogger("logstore.store")

FILES_PER_PARTITION = 4  # descriptors of one that is written: directory, log, mark, one to spare
FILES_RESERVED = 128  # for everything else in the process
FILES_SPARE = 3  # closing one partition needs at most these at the same time


def make_room_for_files(partitions: int) -> bool:
    """Raise the soft limit of open files, up to the hard limit, if `partitions` need it.

    Return False if even the hard limit is too low.
    """
    wanted = partitions * FILES_PER_PARTITION + FILES_RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return True
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            log.info("raised the limit of open files from %d to %d", soft, allowed)
    return allowed >= wanted


class IdlePartitions:
    """Frees descriptors: closes partitions that only their topic refers to.

    The next use of the topic opens the partition again.  Closing needs descriptors itself: only for
    that, spare ones are kept open.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spare: list[Directory] = []
        self._closing = False  # whether a partition is being closed to free descriptors
        self._lock = threading.RLock()  # held while a partition is closed

    def fill(self) -> None:
        """Open the spare descriptors."""
        while len(self._spare) < FILES_SPARE:
            self._spare.append(Directory(self._path))

    def drop(self) -> None:
        """Close the spare descriptors."""
        while self._spare:
            self._spare.pop().close()

    def free(self, store: Store) -> bool:
        """Free some descriptors of a store; return False if there are none to free."""
        with self._lock:
            if store.closed or self._closing:
                if not self._spare:
                    return False
                self._spare.pop().close()
                return True
            self._closing = True
            close = store._close_partition
            try:
                topics = list(store._table.topics.values())
                return any(topic._close_idle(close, asleep=True) for topic in topics) or any(
                    topic._close_idle(close, asleep=False) for topic in topics
                )
            finally:
                self._closing = False
                with contextlib.suppress(OSError):
                    self.fill()
