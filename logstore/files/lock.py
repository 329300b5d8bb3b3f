"""DirectoryLock: makes one process the only writer of a directory, by a lock on its .lock file.

Invariant: the kernel holds the lock for an open file, so the lock ends with its process.  The text
in the .lock file (pid and boot id) is used in error messages only.

Readers take no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

from logstore import _native
from logstore.errors import LockedError
from logstore.files.boot import boot_id
from logstore.files.directory import Directory

__all__ = ["DirectoryLock"]


# F_OFD_SETLK: the lock belongs to the open file description, not to the process.  It conflicts with
# the lock of a Java broker and with a second open in this process.  It stays if unrelated code
# closes another descriptor of the same file.
_OFD_SETLK = getattr(fcntl, "F_OFD_SETLK", None)

_FLOCK = struct.Struct("hhqqixxxx")


def _set_lock(fd: int, kind: int) -> bool:
    try:
        if _OFD_SETLK is not None:
            fcntl.fcntl(fd, _OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
        else:  # macOS: flock has the same ownership rule
            operation = fcntl.LOCK_EX if kind == fcntl.F_WRLCK else fcntl.LOCK_SH
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _give_lock_back(fd: int) -> None:
    with contextlib.suppress(OSError):
        if _OFD_SETLK is not None:
            fcntl.fcntl(fd, _OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
        else:
            fcntl.flock(fd, fcntl.LOCK_UN)


class DirectoryLock:
    """An exclusive lock on the ``.lock`` file of a directory, held until `release`.

    The lock of a partition also takes a shared lock on the ``.lock`` file of the parent directory,
    if there is one.  So several partitions can be open at once, but no store or broker can lock the
    parent at the same time.  `under_parent` is called with the parent while that lock is held.
    ``root=True`` makes the lock of a store: its holder alone may write in the directory and in all
    partitions below it.  `created` is True if there was no lock file before.
    """

    NAME = ".lock"

    def __init__(
        self,
        directory: Directory,
        *,
        root: bool = False,
        under_parent: Callable[[Directory], None] = lambda parent: None,
    ) -> None:
        self._files: list[_native.File] = []
        self._named = False  # whether the first of them holds our pid
        self._pid = os.getpid()
        self._root: DirectoryLock | None = None  # a shared lock keeps the store's lock alive
        self.created = root and not directory.exists(self.NAME)
        try:
            file = self._acquire(directory, fcntl.F_WRLCK, create=True)
            with contextlib.suppress(OSError):  # for messages only: may fail on a full disk
                file.truncate(0)
                file.append_at(f"{os.getpid()} {boot_id()}\n".encode(), 0)
                self._named = True
            if not root:
                self._take_part(directory.path.absolute().parent, under_parent)
        except BaseException:
            self.release()
            raise

    def _take_part(self, path: Path, under_parent: Callable[[Directory], None]) -> None:
        parent = Directory(path)
        try:
            if parent.exists(self.NAME):
                self._acquire(parent, fcntl.F_RDLCK, create=False)
            under_parent(parent)
        finally:
            parent.close()

    def share(self) -> DirectoryLock:
        """Return a lock for a partition below this root: the root's lock covers it.

        The new lock holds no file of its own, and keeps the root's lock alive.
        """
        shared = DirectoryLock.__new__(DirectoryLock)
        shared._files, shared._named, shared._root, shared.created = [], False, self, False
        shared._pid = self._pid
        return shared

    def check_free(self, directory: Directory) -> None:
        """Raise LockedError if another handle holds the own lock of a partition below this root.

        Such a handle opened the partition before the root had a .lock file.
        """
        if directory.exists(self.NAME):
            shared = self.share()
            try:
                shared._acquire(directory, fcntl.F_WRLCK, create=False)
            finally:
                shared.release()

    def _acquire(self, directory: Directory, kind: int, *, create: bool) -> _native.File:
        file = directory.open(self.NAME, write=True, create=create)
        self._files.append(file)
        if not _set_lock(file.fileno(), kind):
            pid, holder = _holder(file)
            raise LockedError(directory.path / self.NAME, pid=pid, holder=holder)
        return file

    def release(self) -> None:
        """Unlock and close the files.

        A close alone would not unlock: a forked child may still have the file open.  In the child
        itself this only closes, because the lock belongs to the parent.
        """
        self._root = None
        ours = self._pid == os.getpid()
        # A file is removed from the list after its close: if an interrupt stops this call, the
        # next one continues with the same file.
        while self._files:
            file = self._files[0]
            if ours and not file.closed:
                if self._named:
                    # Clear our pid before unlocking; otherwise LockedError would name us as the
                    # holder until the next owner writes its pid.
                    with contextlib.suppress(OSError):
                        file.truncate(0)
                self._named = False  # the other files are the parent's: they hold no pid of ours
                _give_lock_back(file.fileno())
            file.close()
            del self._files[0]

    def __del__(self) -> None:
        if hasattr(self, "_files"):  # an interrupt may stop __init__ before it is set
            self.release()


def has_writer(directory: Directory) -> bool:
    """Return whether a process has the lock of a directory for writing.  Takes no lock.

    False if the operating system has no locks of open files, as macOS: it cannot be asked there.
    """
    if _OFD_SETLK is None:
        return False
    try:
        file = directory.open(DirectoryLock.NAME)
    except OSError:
        return False
    try:
        # A shared lock conflicts with an exclusive one only: partitions that are open alone share
        # the lock of their parent.
        asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        found: int = _FLOCK.unpack(fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, asked))[0]
        return found != fcntl.F_UNLCK
    except OSError:
        return False
    finally:
        file.close()


def _holder(file: _native.File) -> tuple[int | None, str]:
    """Return pid and command of the lock's holder.

    The kernel reports the pid of a broker; for an open-file-description lock the file holds it.
    """
    pid = -1
    if _OFD_SETLK is not None:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        with contextlib.suppress(OSError):
            pid = _FLOCK.unpack(fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, asked))[4]
    if pid <= 0:  # the kernel reports no pid for an open-file-description lock
        words = file.pread(256, 0).split()
        if not words or not words[0].isdigit():
            return None, ""
        pid = int(words[0])
    command = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as line:
        command = line.read(4096).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return pid, command
