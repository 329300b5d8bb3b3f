"""Directory: an open directory, and every access to the files in it.

Invariant: a file is opened by its name relative to the directory's descriptor, and never through a
symbolic link.  So a link that is planted in the directory cannot redirect a read or a write.  Files
are created with mode 0600, directories with 0700.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from logstore import _native
from logstore.errors import DiskFullError, NotALogError

__all__ = ["Directory", "copy_bytes"]

T = TypeVar("T")

COPY_BYTES = 1 << 20  # of memory for a copy of a file of any size
NO_DIRECTORY = -1  # for the native functions: the name is a path, relative to the process


def _exists(path: Path) -> bool:
    try:
        _native.stat(NO_DIRECTORY, str(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


# The errno of an open if the name belongs to something other than a file: see native/core/io.h.
_NOT_REGULAR = {
    errno.ELOOP: "not a regular file but a symbolic link",
    errno.EISDIR: "not a regular file but a directory",
    errno.ENXIO: "not a regular file but a FIFO, a socket or a device",
}


def is_wrong_type(error: OSError) -> bool:
    """Return whether `error` means that the name does not belong to a regular file."""
    return error.errno in _NOT_REGULAR


def _with_type(error: OSError, path: str) -> OSError:
    """Return `error`, with a clearer text if it means that `path` is not a regular file."""
    text = _NOT_REGULAR.get(error.errno or 0)
    return error if text is None else OSError(error.errno, text, path)


class Room(Protocol):
    """The reserve of disk space, as Directory uses it: see `disk_reserve.Reserve`."""

    short: bool

    def make_room(self) -> bool:
        """Free some space; return False if there is none left to free."""

    def require(self, needed_bytes: int = 0) -> None:
        """Raise DiskFullError while appends are refused, because the reserve is not full."""

    def restore(self) -> None:
        """Fill the reserve again.  Called after files were deleted."""

    @property
    def reclaimable(self) -> Callable[[], int] | None:
        """Return a function that returns how many bytes retention could free."""


class Directory(_native.OpenDirectory):
    """An open directory.  `path` is used in messages only; every access uses the descriptor.

    ``with directory as fd`` pins the descriptor for the block: if another thread calls `close`, the
    descriptor is closed after the block.  So the number cannot be reused for another file while it
    is in use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        root: Directory | None = None,
    ) -> None:
        """Open a directory; with `create`, make it and its missing parents.

        If `root`, the open parent directory, is given, the directory is opened relative to it.
        """
        # Held while a segment opens its file and keeps it, and while a segment is truncated: no
        # descriptor that was opened before a truncation is kept after it.
        self.opening = threading.RLock()
        self.path = Path(path)
        self.room: Room | None = root.room if root is not None else None
        # Called if the process runs out of descriptors: closes some that are idle, or returns
        # False if there are none.
        self.close_idle: Callable[[], bool] | None = root.close_idle if root is not None else None
        self._text = str(self.path)  # joining Path objects is slower than opening a file
        if create and not _exists(self.path):
            self._create()
        try:
            if root is None:
                # The path of the directory itself may contain links; names inside it may not.
                self._open(NO_DIRECTORY, self._text)
            else:
                self._open_below(root)
        except NotADirectoryError:
            raise NotALogError(f"{self.path} is not a directory") from None

    def _open_below(self, root: Directory) -> None:
        while True:
            try:
                with root as above:
                    return self._open(above, self.path.name)
            except OSError as error:
                # Each round closes an idle partition, so the loop ends.
                if not self._freed_descriptor(error):
                    raise

    def _freed_descriptor(self, error: OSError) -> bool:
        """Return whether a call that opens a file failed for want of descriptors, and may be
        repeated, since idle ones are closed now."""
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return False
        return self.close_idle is not None and self.close_idle()

    def below(self, name: str) -> Directory:
        """Open a directory in this one.  A chdir of the process has no effect on it."""
        return Directory(f"{self._text}/{name}", root=self)

    def _create(self) -> None:
        missing = [self.path]
        while not _exists(missing[-1].parent):
            missing.append(missing[-1].parent)
        # Parents first.  Each new name is synced in its parent before the next is made.
        for path in reversed(missing):
            # Another process may create the same directories now; both sync the parents.
            with contextlib.suppress(FileExistsError):
                _native.make_directory(NO_DIRECTORY, str(path))
            parent = Directory(path.parent)
            try:
                parent.sync()
            finally:
                parent.close()

    def names(self) -> list[str]:
        return self._list(directories_only=False)

    def directories(self) -> list[str]:
        """Return the names of the directories in this one, without symbolic links."""
        return self._list(directories_only=True)

    def _list(self, *, directories_only: bool) -> list[str]:
        while True:
            try:
                with self as fd:
                    return _native.list_directory(fd, directories_only)
            except OSError as error:
                if not self._freed_descriptor(error):
                    raise

    def make_directory(self, name: str) -> None:
        with self as fd:
            _native.make_directory(fd, name)

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory, if it exists."""
        with contextlib.suppress(FileNotFoundError), self as fd:
            _native.remove_directory(fd, name)

    def size(self, name: str) -> int:
        """Return the size of a regular file; raise NotALogError for anything else."""
        with self as fd:
            regular, _, size, _, _ = _native.stat(fd, name)
        if not regular:
            raise NotALogError(f"{self.path / name} is not a regular file")
        return size

    def times_ns(self, name: str = "") -> tuple[int, int]:
        """Return access and modification time of a file, or of the directory itself."""
        with self as fd:
            _, _, _, accessed, modified = _native.stat(fd, name)
        return accessed, modified

    def set_times_ns(self, name: str, times: tuple[int, int]) -> None:
        with self as fd:
            _native.set_times(fd, name, *times)

    def is_regular(self, name: str) -> bool:
        """Return whether the name is a regular file, and no link, directory or device."""
        with self as fd:
            return bool(_native.stat(fd, name)[0])

    def modified_ms(self, name: str) -> int:
        """Return the modification time of a file in milliseconds."""
        return self.times_ns(name)[1] // 1_000_000

    def exists(self, name: str) -> bool:
        try:
            with self as fd:
                _native.stat(fd, name)
        except FileNotFoundError:
            return False
        return True

    def open(
        self, name: str, *, write: bool = False, create: bool = False, exclusive: bool = False
    ) -> _native.File:
        path = f"{self._text}/{name}"
        while True:
            try:
                with self as fd:
                    return _native.File(
                        fd, name, path, write=write, create=create, exclusive=exclusive
                    )
            except OSError as error:
                if not self._freed_descriptor(error):
                    raise _with_type(error, path) from None

    def read(self, name: str, max_bytes: int = 1 << 31) -> bytes:
        """Return the first `max_bytes` bytes of a small file; a longer one is cut without an error.

        Faster than `open`, which allocates a buffer.
        """
        path = f"{self._text}/{name}"
        while True:
            try:
                with self as fd:
                    return _native.read_file(fd, name, path, max_bytes)
            except OSError as error:
                if not self._freed_descriptor(error):
                    raise _with_type(error, path) from None

    def with_room(self, act: Callable[[], T]) -> T:
        """Call `act`; while the disk is full, free a piece of the reserve and call it again.

        `act` must need little space, and must be safe to repeat.
        """
        while True:
            try:
                return act()
            except DiskFullError:
                if self.room is None or not self.room.make_room():
                    raise

    def write(self, name: str, data: bytes, *, sync: bool) -> None:
        """Overwrite a file in place: only for hints that recovery can rebuild.

        A crash may leave a mix of old and new bytes.  The reserve is not used for them: on a full
        disk the write fails.
        """
        file = self.open(name, write=True, create=True)
        try:
            if data:
                file.append_at(data, 0)
            if file.size() != len(data):  # the old file was longer
                file.truncate(len(data))
            if sync:
                file.sync()
        finally:
            file.close()

    def replace(self, name: str, data: bytes, *, sync: bool = True) -> None:
        """Replace a file atomically: after a crash it has the old or the new contents."""
        self.with_room(lambda: self._replace(name, data, sync))

    def _replace(self, name: str, data: bytes, sync: bool) -> None:
        # Order: sync the bytes, rename, sync the directory.  If the rename reached the disk before
        # the bytes, a power loss would leave an empty file under the final name.
        temporary = f"{name}.{os.getpid()}.tmp"
        self.unlink(temporary)
        # Exclusive: what was there is unlinked above, and a link that appears since is not
        # followed.
        file = self.open(temporary, write=True, create=True, exclusive=True)
        try:
            file.append_at(data, 0)
            if sync:
                file.sync()
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise
        file.close()
        self.rename(temporary, name)
        if sync:
            self.sync()

    def rename(self, source: str, target: str) -> None:
        self.with_room(lambda: self._rename(source, target))

    def _rename(self, source: str, target: str) -> None:
        try:
            with self as fd:
                _native.rename(fd, source, target)
        except IsADirectoryError as error:
            raise _with_type(error, f"{self._text}/{target}") from None

    def unlink(self, name: str) -> None:
        try:
            with self as fd:
                _native.unlink(fd, name)
        except FileNotFoundError:
            return
        except IsADirectoryError as error:
            raise _with_type(error, f"{self._text}/{name}") from None

    def sync(self) -> None:
        with self as fd:
            _native.sync_directory(fd)


def copy_bytes(
    source: _native.File, start: int, end: int, target: _native.File, position: int
) -> int:
    """Copy the bytes [start, end) to `position`; return the position after them.

    Stops at the end of `source`.  Does not sync.
    """
    while start < end and (piece := source.pread(min(COPY_BYTES, end - start), start)):
        target.append_at(piece, position)
        start += len(piece)
        position += len(piece)
    return position
