"""Reserve: room on the disk that is kept for getting out of a full one.

``logstore.reserve`` holds nothing but allocated blocks.  Deleting, closing and recovering need a
few of them (a state file, a checkpoint, a plan); when the disk has none left, the reserve gives
some of its own, piece by piece, to whoever asks through `Directory.room`.  Appends never ask: they
get DiskFullError, and while the reserve is short most of them get it even before the disk is full
again, so that what was freed is not eaten by the next record.  It is filled up as soon as there is
space.

Invariant: nothing depends on the file.  Missing, short or of another size, it is made again at the
next open for writing, or never, if the disk stays full.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from logstore.errors import ClosedError, DiskFullError
from logstore.files.directory import Directory, is_wrong_type

__all__ = ["PARTITION_RESERVE_BYTES", "RESERVE_NAME", "STORE_RESERVE_BYTES", "Reserve"]

log = logging.getLogger("logstore.reserve")

RESERVE_NAME = "logstore.reserve"
STORE_RESERVE_BYTES = 1 << 20
PARTITION_RESERVE_BYTES = 256 << 10  # of a partition that is opened alone
PIECE_BYTES = 64 << 10


class Reserve:
    """The reserve of one directory and of those below it.  Threads share it."""

    def __init__(self, directory: Directory, size_bytes: int) -> None:
        self._owner = weakref.ref(directory)  # which has us: a dropped one goes at once
        self._size_bytes = size_bytes
        self._left = 0
        self._shut = 0
        self._lock = threading.Lock()
        self.short = False  # some of it was given away
        # How many bytes retention could free; a store knows.
        self.reclaimable: Callable[[], int] | None = None

    @property
    def _directory(self) -> Directory:
        directory = self._owner()
        if directory is None:
            raise ClosedError("the directory of this reserve is gone")
        return directory

    def fill(self) -> bool:
        """Make it whole, or again what it was; False when the disk has no room for it."""
        with self._lock:
            if self._size_bytes == 0:
                return True
            try:
                self._allocate()
            except OSError as error:
                if is_wrong_type(error):
                    raise  # space would not help
                if not self.short:
                    log.warning(
                        "%s: no reserve could be made: %s", self._directory.path, str(error)
                    )
                self.short = True
                return False
            self.short = False
            return True

    def _allocate(self) -> None:
        file = self._directory.open(RESERVE_NAME, write=True, create=True)
        try:
            size = file.size()
            if size > self._size_bytes:
                file.truncate(self._size_bytes)
            elif size < self._size_bytes:
                try:
                    file.allocate(size, self._size_bytes - size)
                except DiskFullError:
                    file.truncate(size)
                    self._left = size  # what an earlier handle has left of it
                    raise
                except OSError:  # a file system that cannot: bytes do the same
                    file.append_at(bytes(self._size_bytes - size), size)
            self._left = self._size_bytes
        finally:
            file.close()

    def make_room(self) -> bool:
        """Give a piece away; False when there is none left."""
        with self._lock:
            if self._left == 0 or self._shut:
                return False
            self._left = max(0, self._left - PIECE_BYTES)
            self.short = True
            with contextlib.suppress(FileNotFoundError):
                file = self._directory.open(RESERVE_NAME, write=True)
                try:
                    file.truncate(self._left)
                finally:
                    file.close()
            log.warning("%s: the disk is full; %d bytes of reserve left",
                        self._directory.path, self._left)  # fmt: skip
            return True

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        """For what is no way out of a full disk: nothing is given away meanwhile."""
        self.require()
        self._shut += 1
        try:
            yield
        finally:
            self._shut -= 1

    def require(self, needed_bytes: int = 0) -> None:
        """Raise DiskFullError while it is short and cannot be filled."""
        if self.short and not self.fill():
            error = DiskFullError(
                28, "No space left on device (the reserve is in use)", str(self._directory.path)
            )
            error.needed_bytes = needed_bytes
            raise error

    def restore(self) -> None:
        """Something was freed: fill it up, if it is short."""
        if self.short:
            self.fill()


def free_bytes(directory: Directory) -> int:
    """What the file system has left for us."""
    with directory as fd:
        status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize
