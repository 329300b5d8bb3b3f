"""Files of a partition: their names, an open directory, atomic replacement, the lock.

Everything inside a directory is reached through its descriptor and never through a symbolic link,
so that nothing outside can be touched by planting one.  Files are created 0600, directories 0700.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from logstore import _native
from logstore.errors import DiskFullError, InvalidNameError, LockedError, NotALogError

__all__ = [
    "Directory",
    "DirectoryLock",
    "boot_id",
    "directory_name",
    "either_copy",
    "parse_partition_name",
    "remove_clean_marker",
    "segment_name",
    "twice",
    "with_checksum",
    "without_checksum",
]

T = TypeVar("T")

TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}\Z")
SEGMENT_SUFFIXES = (".log", ".index", ".timeindex", ".txnindex", ".snapshot", ".summary", ".sum")
# At a root: the last owner of the whole directory closed in order.  See logstore.root.
CLEAN_MARKER, CLEAN_TWIN = ".kafka_cleanshutdown", "logstore.clean"
FOREIGN_TWIN = b"foreign\n"  # matches no marker: a broker owned the directory, and we know
TEMPORARY_SUFFIXES = (".deleted", ".cleaned", ".swap")


def directory_name(path: Path) -> str:
    """The directory's own name, also where the path is relative or ends in a dot."""
    return path.name or path.absolute().name


def parse_partition_name(name: str) -> tuple[str, int]:
    """Topic and number of a directory named ``topic-N``.

    >>> parse_partition_name("my-orders-3")
    ('my-orders', 3)
    """
    topic, dash, number = name.rpartition("-")
    if (
        not dash
        or not TOPIC.match(topic)
        or topic in (".", "..")
        or not re.fullmatch(r"0|[1-9]\d{0,9}", number)
        or int(number) > 0x7FFFFFFF
    ):
        raise InvalidNameError(
            f"{name!r} is not a partition directory: name it topic-N, such as 'orders-0' "
            f"(topic: 1 to 249 of a-z A-Z 0-9 . _ -; N: a number)"
        )
    return topic, int(number)


def segment_name(base_offset: int, suffix: str) -> str:
    """File name of a segment's part: the base offset in 20 digits."""
    return f"{base_offset:020d}{suffix}"


def base_offset_of(name: str) -> int:
    """The offset in front of the first dot of a recognised file's name."""
    digits, dot, _ = name.partition(".")
    plain = dot and len(digits) <= 20 and digits.isascii() and digits.isdigit()
    if not plain or int(digits) > (1 << 63) - 1:
        raise NotALogError(
            f"{name!r} has the suffix of a segment file but no offset in front of it"
        )
    return int(digits)


# What a decoder of JSON may raise when the bytes are not what was written: a value of another kind,
# one that is missing, a number or a nesting that Python refuses.
MISREAD = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)


def with_checksum(body: bytes) -> bytes:
    """The contents of a small file that tells when it is not what was written."""
    return b"%08x %b\n" % (_native.crc32c(body), body)


def without_checksum(content: bytes) -> bytes:
    """What `with_checksum` was given; ValueError when it is that no more."""
    checksum, _, body = content.rstrip(b"\n").partition(b" ")
    if int(checksum, 16) != _native.crc32c(body):
        raise ValueError("the checksum is wrong")
    return body


def twice(body: bytes) -> bytes:
    """The contents of a file that stays readable when a byte of it is damaged: two copies."""
    return b"%08x\n%b" % (_native.crc32c(body), body) * 2


def either_copy(content: bytes) -> bytes | None:
    """What `twice` was given, from whichever copy is sound; also from one that stands alone."""
    half = len(content) // 2
    for copy in (content[:half], content[half:], content):
        checksum, _, body = copy.partition(b"\n")
        if checksum == b"%08x" % _native.crc32c(body):
            return body
    return None


boot_override: str | None = None  # a test that simulates power cuts names another boot


def boot_id() -> str:
    """Names the current boot of the machine; empty where that cannot be told."""
    return _boot_id() if boot_override is None else boot_override


@functools.cache
def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


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


def remove_clean_marker(root: Directory) -> None:
    """Remove the marker of a clean shutdown, durably, and its twin before it.

    A twin without a marker means that a broker took the marker away: it must never be what a kill
    or a power cut of ours leaves.
    """
    root.unlink(CLEAN_TWIN)
    if root.exists(CLEAN_MARKER):
        root.sync()
        root.unlink(CLEAN_MARKER)
    root.sync()


# F_OFD_SETLK: the lock belongs to the open file, not to the process.  It conflicts with the lock
# of a Java broker and with a second open in this process, and does not vanish when unrelated code
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
    """The right to write in a directory, held on its ``.lock`` file until released.

    The lock of a partition also takes part in the lock of its parent, when there is one: shared, so
    that several partitions can be open at once, yet a broker or store that owns the whole
    directory is kept out.  ``root=True`` is that of such a store: it alone may write anywhere
    below, and `created` tells that nobody before it could have noticed.
    """

    NAME = ".lock"

    def __init__(self, directory: Directory, *, root: bool = False) -> None:
        self._files: list[_native.File] = []
        self._named = False  # whether the first of them says whose lock it is
        self._pid = os.getpid()
        self._root: DirectoryLock | None = None  # kept alive by those who share it
        self.created = root and not directory.exists(self.NAME)
        try:
            file = self._acquire(directory, fcntl.F_WRLCK, create=True)
            with contextlib.suppress(OSError):  # for messages only: a full disk may refuse it
                file.truncate(0)
                file.append_at(f"{os.getpid()} {boot_id()}\n".encode(), 0)
                self._named = True
            if not root:
                self._take_part(directory.path.absolute().parent)
        except BaseException:
            self.release()
            raise

    def _take_part(self, path: Path) -> None:
        parent = Directory(path)
        try:
            if parent.exists(self.NAME):
                self._acquire(parent, fcntl.F_RDLCK, create=False)
            if parent.exists(CLEAN_MARKER):
                # It speaks for every partition below, and one of them is about to change.
                if self._is_foreign(parent):
                    parent.unlink(CLEAN_MARKER)  # the twin alone tells of the broker
                    parent.sync()
                else:
                    remove_clean_marker(parent)
        finally:
            parent.close()

    def _is_foreign(self, parent: Directory) -> bool:
        """Whether someone has noted that a broker owned the directory: see logstore.partition."""
        with contextlib.suppress(FileNotFoundError):
            return parent.read(CLEAN_TWIN, 64) == FOREIGN_TWIN
        return False

    def share(self) -> DirectoryLock:
        """For a partition below the root that this lock is for: the root's lock serves it, too."""
        shared = DirectoryLock.__new__(DirectoryLock)
        shared._files, shared._named, shared._root, shared.created = [], False, self, False
        shared._pid = self._pid
        return shared

    def check_free(self, directory: Directory) -> None:
        """Raise LockedError when someone took a partition's own lock before there was a root's."""
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
        """Give the lock back: a child that was forked and did not run yet has the file open, too.

        The child itself only closes: the lock is its parent's.  The name goes first: whoever gets
        the lock next is not taken for us until it has written its own.
        """
        self._root = None
        ours = self._pid == os.getpid()
        # A file leaves the list when it is closed: after an interrupt the next call goes on.
        while self._files:
            file = self._files[0]
            if ours and not file.closed:
                if self._named:
                    with contextlib.suppress(OSError):
                        file.truncate(0)
                self._named = False  # the others are of the parent
                _give_lock_back(file.fileno())
            file.close()
            del self._files[0]

    def __del__(self) -> None:
        if hasattr(self, "_files"):  # an interrupt may come before it is set
            self.release()


def _holder(file: _native.File) -> tuple[int | None, str]:
    """Process and command of whoever holds a lock: the kernel knows a broker, the file us."""
    pid = -1
    if _OFD_SETLK is not None:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        with contextlib.suppress(OSError):
            pid = _FLOCK.unpack(fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, asked))[4]
    if pid <= 0:  # an open-file-description lock has no process
        words = file.pread(256, 0).split()
        if not words or not words[0].isdigit():
            return None, ""
        pid = int(words[0])
    command = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as line:
        command = line.read(200).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return pid, command
