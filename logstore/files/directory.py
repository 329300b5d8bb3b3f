"""Files of a partition: their names, an open directory, atomic replacement, the lock.

Everything inside a directory is reached through its descriptor and never through a symbolic link,
so that nothing outside can be touched by planting one.  Files are created 0600, directories 0700.
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

__all__ = ["Directory"]

T = TypeVar("T")

NO_DIRECTORY = -1  # to the native functions: the name is a path of the user's own


def _exists(path: Path) -> bool:
    try:
        _native.stat(NO_DIRECTORY, str(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


# What opening gives where something else has the name of a file: see native/core/io.h.
_NOT_REGULAR = {
    errno.ELOOP: "not a regular file but a symbolic link",
    errno.EISDIR: "not a regular file but a directory",
    errno.ENXIO: "not a regular file but a FIFO, a socket or a device",
}


def is_wrong_type(error: OSError) -> bool:
    """Whether it means that something else has the name of a file."""
    return error.errno in _NOT_REGULAR


def _with_type(error: OSError, path: str) -> OSError:
    """Return `error`, in words of its own if it means that `path` is not a regular file."""
    text = _NOT_REGULAR.get(error.errno or 0)
    return error if text is None else OSError(error.errno, text, path)


class Room(Protocol):
    """Where space for a small file comes from when the disk is full: see logstore.reserve."""

    short: bool

    def make_room(self) -> bool:
        """Free some space; False when that is not possible."""

    def require(self, needed_bytes: int = 0) -> None:
        """Raise DiskFullError while records are not welcome."""

    def restore(self) -> None:
        """Something was freed."""

    @property
    def reclaimable(self) -> Callable[[], int] | None:
        """How many bytes retention could free."""


class Directory(_native.OpenDirectory):
    """An open directory.  `path` is for messages only; access goes through the descriptor.

    ``with directory as fd`` keeps the descriptor open for the block: another thread's close takes
    effect behind it, so that no number is used that may mean another directory by then.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        root: Directory | None = None,
    ) -> None:
        """`root` is the open directory right above, when what is inside that is wanted."""
        # Held to open a segment's file and note it down, and while a segment is cut.
        self.opening = threading.RLock()
        self.path = Path(path)
        self.room: Room | None = root.room if root is not None else None
        # Closes what is idle when descriptors run out; False when there is nothing more to close.
        self.close_idle: Callable[[], bool] | None = root.close_idle if root is not None else None
        self._text = str(self.path)  # joining paths costs more than opening files
        if create and not _exists(self.path):
            self._create()
        try:
            if root is None:
                # The directory itself may be reached through a link; what is inside may not.
                self._open(NO_DIRECTORY, self._text)
            else:
                self._with_descriptor(lambda: self._open_below(root))
        except NotADirectoryError:
            raise NotALogError(f"{self.path} is not a directory") from None

    def _open_below(self, root: Directory) -> None:
        with root as above:
            self._open(above, self.path.name)

    def _with_descriptor(self, act: Callable[[], T]) -> T:
        """Do something that opens a file; when descriptors run out, idle ones are closed first."""
        while True:
            try:
                return act()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if self.close_idle is None or not self.close_idle():
                    raise

    def below(self, name: str) -> Directory:
        """A directory in this one, wherever the process has gone since this was opened."""
        return Directory(f"{self._text}/{name}", root=self)

    def _create(self) -> None:
        missing = [self.path]
        while not _exists(missing[-1].parent):
            missing.append(missing[-1].parent)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                _native.make_directory(NO_DIRECTORY, str(path))
            parent = Directory(path.parent)
            try:
                parent.sync()
            finally:
                parent.close()

    def names(self) -> list[str]:
        return self._with_descriptor(lambda: self._list(directories_only=False))

    def directories(self) -> list[str]:
        """Names of what is a directory in this one; a link is not."""
        return self._with_descriptor(lambda: self._list(directories_only=True))

    def _list(self, *, directories_only: bool) -> list[str]:
        with self as fd:
            return _native.list_directory(fd, directories_only)

    def make_directory(self, name: str) -> None:
        with self as fd:
            _native.make_directory(fd, name)

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory."""
        with contextlib.suppress(FileNotFoundError), self as fd:
            _native.remove_directory(fd, name)

    def size(self, name: str) -> int:
        """Size of a regular file; a link or anything else is refused."""
        with self as fd:
            regular, _, size, _, _ = _native.stat(fd, name)
        if not regular:
            raise NotALogError(f"{self.path / name} is not a regular file")
        return size

    def times_ns(self, name: str = "") -> tuple[int, int]:
        """When a file, or the directory itself, was last read and last changed."""
        with self as fd:
            _, _, _, accessed, modified = _native.stat(fd, name)
        return accessed, modified

    def set_times_ns(self, name: str, times: tuple[int, int]) -> None:
        with self as fd:
            _native.set_times(fd, name, *times)

    def is_regular(self, name: str) -> bool:
        """Whether it is a file, and no link, directory or anything else."""
        with self as fd:
            return bool(_native.stat(fd, name)[0])

    def modified_ms(self, name: str) -> int:
        """When a file was last written to."""
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

        def act() -> _native.File:
            with self as fd:
                return _native.File(fd, name, path, write=write, create=create, exclusive=exclusive)

        try:
            return self._with_descriptor(act)
        except OSError as error:
            raise _with_type(error, path) from None

    def read(self, name: str, max_bytes: int = 1 << 31) -> bytes:
        """The contents of a small file: without the window that a `_native.File` reads through."""
        path = f"{self._text}/{name}"

        def act() -> bytes:
            with self as fd:
                return _native.read_file(fd, name, path, max_bytes)

        try:
            return self._with_descriptor(act)
        except OSError as error:
            raise _with_type(error, path) from None

    def with_room(self, act: Callable[[], T]) -> T:
        """Do something small that may be repeated; on a full disk, with the reserve's help."""
        while True:
            try:
                return act()
            except DiskFullError:
                if self.room is None or not self.room.make_room():
                    raise

    def write(self, name: str, data: bytes, *, sync: bool) -> None:
        """Replace a file's contents in place: for hints that recovery can rebuild.

        The reserve is not for these: on a full disk it is better to do without.
        """
        file = self.open(name, write=True, create=True)
        try:
            if data:
                file.append_at(data, 0)
            if file.size() != len(data):
                file.truncate(len(data))
            if sync:
                file.sync()
        finally:
            file.close()

    def replace(self, name: str, data: bytes, *, sync: bool = True) -> None:
        """Replace a file atomically: after a crash it is the old one or the new one, whole."""
        self.with_room(lambda: self._replace(name, data, sync))

    def _replace(self, name: str, data: bytes, sync: bool) -> None:
        temporary = f"{name}.{os.getpid()}.tmp"
        self.unlink(temporary)
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
