"""Reserve: disk space for the small writes that a full disk must not stop.

``logstore.reserve`` is a file of allocated blocks without contents.  Retention, close and recovery
write small files (a state, a checkpoint, a plan).  If the disk is full, `Directory.with_room`
truncates the reserve by one piece and repeats the write.

Appends do not use the reserve: they raise DiskFullError.  While the reserve is short, most appends
raise it even if the disk has space again: the space first fills the reserve.

Invariant: no file depends on the reserve.  If it is missing, short or of another size, the next
open for writing makes it again; if the disk is full, logstore works without it.
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
    """The reserve of one directory and of those below it.  A lock makes it thread-safe."""

    def __init__(self, directory: Directory, size_bytes: int) -> None:
        # Weak, because the directory refers to the reserve: without a cycle, a directory that is
        # no longer used is closed at once.
        self._owner = weakref.ref(directory)
        self._size_bytes = size_bytes
        self._left = 0  # bytes that the file still has
        self._shut = 0  # number of `shut` blocks that are active
        self._lock = threading.Lock()
        self.short = False  # the file is smaller than `_size_bytes`
        # Returns how many bytes retention could free.  Set by a store.
        self.reclaimable: Callable[[], int] | None = None

    @property
    def _directory(self) -> Directory:
        directory = self._owner()
        if directory is None:
            raise ClosedError("the directory of this reserve is gone")
        return directory

    def fill(self) -> bool:
        """Allocate the whole reserve; return False if the disk has no space for it."""
        with self._lock:
            if self._size_bytes == 0:
                return True
            try:
                self._allocate()
            except OSError as error:
                if is_wrong_type(error):
                    raise  # the name is not a file: free space would not help
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
                    self._left = size  # an earlier handle left this much
                    raise
                except OSError:  # the file system has no fallocate: write zeros
                    file.append_at(bytes(self._size_bytes - size), size)
            self._left = self._size_bytes
        finally:
            file.close()

    def make_room(self) -> bool:
        """Free one piece of the reserve; return False if none is left or `shut` is active."""
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
        """Keep the reserve during the block, for work that does not free space.

        Raise DiskFullError at once if the reserve is short and cannot be filled.
        """
        self.require()
        self._shut += 1
        try:
            yield
        finally:
            self._shut -= 1

    def require(self, needed_bytes: int = 0) -> None:
        """Raise DiskFullError if the reserve is short and cannot be filled."""
        if self.short and not self.fill():
            error = DiskFullError(
                28, "No space left on device (the reserve is in use)", str(self._directory.path)
            )
            error.needed_bytes = needed_bytes
            raise error

    def restore(self) -> None:
        """Fill the reserve if it is short.  Called after files were deleted."""
        if self.short:
            self.fill()


def free_bytes(directory: Directory) -> int:
    """Return the free bytes of the file system that an unprivileged process may use."""
    with directory as fd:
        status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize
