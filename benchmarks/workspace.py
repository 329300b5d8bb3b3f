"""Workspace: the one directory a run writes to, gone when the run ends, however it ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}


class Workspace:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.until_end = ExitStack()  # what runs until the run ends; closed before the directory is

    @classmethod
    @contextmanager
    def open(cls, parent: Path | None) -> Iterator[Workspace]:
        """A new directory in `parent`, by default beside the checkout; removed on the way out."""
        with tempfile.TemporaryDirectory(
            prefix="logstore-benchmarks-",
            dir=parent or default_parent(),
            ignore_cleanup_errors=True,
        ) as name:
            workspace = cls(Path(name))
            with workspace.until_end:
                yield workspace

    def kept(self, name: str) -> Path:
        """A new directory that stays until the run ends."""
        path = self.path / name
        path.mkdir()
        return path

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """An empty directory of that name, removed when the block ends."""
        path = self.path / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def settle(self) -> None:
        """Let no write-back of what came before reach into what comes next."""
        os.sync()

    def has_room(self, size_bytes: int) -> bool:
        return shutil.disk_usage(self.path).free > size_bytes


def default_parent() -> Path:
    """The directory that holds the checkout: the same file system, and outside the checkout."""
    for parent in (CHECKOUT.parent, CHECKOUT, Path(tempfile.gettempdir())):
        if os.access(parent, os.W_OK) and file_system(parent) not in MEMORY_FILE_SYSTEMS:
            return parent
    raise SystemExit("no writable directory on a disk was found: pass --dir")


def file_system(path: Path) -> str:
    """The type of the file system that holds `path` ("ext4"), or "unknown"."""
    best, kind = "", "unknown"
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8") as mounts:
        for line in mounts:
            _, mount_point, mount_kind, *_ = line.split()
            if len(mount_point) >= len(best) and path.resolve().is_relative_to(mount_point):
                best, kind = mount_point, mount_kind
    return kind


def evict(path: Path) -> None:
    """Drop the clean pages of every file under `path` from the page cache (sync first)."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
