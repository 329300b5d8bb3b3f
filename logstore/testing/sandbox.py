"""Sandbox: a directory in memory into which crash states are written for recovery."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Final

from logstore.files import boot
from logstore.testing.disk_model import (
    Tree,
)

__all__ = ["Sandbox", "another_boot"]


def directory_in_memory(prefix: str) -> str:
    """Create a temporary directory, in memory if there is a tmpfs; return its path."""
    memory = "/dev/shm"
    usable = os.path.isdir(memory) and os.access(memory, os.W_OK)
    return tempfile.mkdtemp(prefix=prefix, dir=memory if usable else None)


_LONG_AGO: Final = 1_500_000_000_000_000_000  # ns: the mtime of every file until it is changed


class Sandbox:
    """A directory that holds one tree after another.  Only the differences are written.

    Without a path it is a temporary directory, in memory if there is a tmpfs.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._temporary = path is None
        self.path = directory_in_memory("logstore-crash-") if path is None else os.fspath(path)
        self._held: dict[str, tuple[bytes, int]] = {}  # contents and inode

    def put(self, tree: Tree) -> None:
        """Make the directory hold `tree` and nothing else."""
        kept: set[str] = set()
        self._clear(self.path, "", tree, kept)
        for path in sorted(tree):
            content = tree[path]
            if path in kept:
                continue
            full = f"{self.path}/{path}"
            if content is None:
                os.mkdir(full)
                continue
            fd = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if content:
                    os.write(fd, content)
                os.utime(fd, ns=(_LONG_AGO, _LONG_AGO))
                self._held[path] = content, os.fstat(fd).st_ino
            finally:
                os.close(fd)

    def _clear(self, above: str, prefix: str, tree: Tree, kept: set[str]) -> None:
        with os.scandir(above) as entries:
            found = list(entries)
        for entry in found:
            path = f"{prefix}{entry.name}"
            wanted = tree.get(path, b"")
            if entry.is_dir(follow_symlinks=False):
                if path in tree and wanted is None:
                    kept.add(path)
                    self._clear(entry.path, f"{path}/", tree, kept)
                else:
                    shutil.rmtree(entry.path)
            elif path in tree and self._is_still(path, entry, wanted):
                kept.add(path)
            else:
                os.unlink(entry.path)
                self._held.pop(path, None)

    def _is_still(self, path: str, entry: os.DirEntry[str], wanted: bytes | None) -> bool:
        held = self._held.get(path)
        if held is None or (held[0] is not wanted and held[0] != wanted):
            return False
        status = entry.stat(follow_symlinks=False)
        return status.st_mtime_ns == _LONG_AGO and status.st_ino == held[1]

    def close(self) -> None:
        """Remove the directory, if it is a temporary one."""
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def another_boot(name: str | None = "after a power cut") -> Iterator[None]:
    """Make logstore read another boot id until the block ends, as after a reboot.

    With None logstore reads the machine's real boot id.
    """
    before = boot.boot_override
    boot.boot_override = name
    try:
        yield
    finally:
        boot.boot_override = before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence logstore's log messages, because recovery would log thousands of them."""
    logger = logging.getLogger("logstore")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
