"""require_safe: which file systems a log may be written on.

On a network or user-space file system, locks may not exclude another machine, a rename may not be
atomic and an fsync may not reach stable storage.  Opening a log for writing there raises an error,
unless the caller passes ``allow_unsafe_fs=True`` or sets LOGSTORE_ALLOW_UNSAFE_FS=1 in the
environment.  A file system in memory is allowed, with one warning.  Readers are not checked.
"""

from __future__ import annotations

import logging
import os

from logstore import _native
from logstore.errors import UnsafeFileSystemError
from logstore.files.directory import Directory

__all__ = ["UNSAFE", "require_safe"]

log = logging.getLogger("logstore.filesystem")

UNSAFE = frozenset({"nfs", "smb", "smbfs", "cifs", "9p", "fuse", "ceph", "afs", "lustre", "webdav"})
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
VARIABLE = "LOGSTORE_ALLOW_UNSAFE_FS"

_mentioned: set[str] = set()


def require_safe(directory: Directory, *, allow_unsafe: bool) -> None:
    """Raise UnsafeFileSystemError if the directory is on an unsafe file system."""
    with directory as fd:
        name = _native.filesystem_name(fd)
    if name in UNSAFE and not allow_unsafe and os.environ.get(VARIABLE, "") not in ("1", "true"):
        raise UnsafeFileSystemError(name, path=directory.path)
    if (name in IN_MEMORY or name in UNSAFE) and name not in _mentioned:
        _mentioned.add(name)
        what = "survives no restart" if name in IN_MEMORY else "may break durability and locks"
        log.warning("%s is on %s, which %s", directory.path, name, what)
