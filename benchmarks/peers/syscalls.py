"""The system calls alone: what any log must pay to the kernel for the same bytes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from benchmarks.crew import spread

CHUNK_BYTES = 1 << 20
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


@contextmanager
def descriptor(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def write_in_chunks(path: Path, data: bytes) -> float:
    """Bytes a second of 1 MiB `write`s into a new file."""
    view = memoryview(data)
    pieces = [view[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return write_each(path, pieces) * len(data) / len(pieces)


def write_each(path: Path, pieces: Sequence[bytes | memoryview]) -> float:
    """Calls a second of one `write` a piece, into a new file."""
    write = os.write
    with descriptor(path, NEW) as fd:
        started = perf_counter()
        for piece in pieces:
            write(fd, piece)
        return len(pieces) / (perf_counter() - started)


def pwrite_each(path: Path, pieces: Sequence[bytes]) -> float:
    pwrite = os.pwrite
    position = 0
    with descriptor(path, NEW) as fd:
        started = perf_counter()
        for piece in pieces:
            position += pwrite(fd, piece, position)
        return len(pieces) / (perf_counter() - started)


def write_and_sync_each(path: Path, pieces: Sequence[bytes]) -> float:
    """Calls a second of one `write` and one `fdatasync` a piece, into a new file."""
    write, fdatasync = os.write, os.fdatasync
    with descriptor(path, NEW) as fd:
        started = perf_counter()
        for piece in pieces:
            write(fd, piece)
            fdatasync(fd)
        return len(pieces) / (perf_counter() - started)


def write_and_sync_in_threads(path: Path, pieces: Sequence[bytes], threads: int) -> float:
    """The same from many threads on one descriptor, each syncing for itself."""
    with descriptor(path, NEW | os.O_APPEND) as fd:

        def work(piece: bytes) -> None:
            os.write(fd, piece)
            os.fdatasync(fd)

        return spread(work, pieces, threads)


def read(files: Sequence[Path]) -> float:
    """Bytes a second of `preadv` into one reused, page-aligned 1 MiB buffer.

    A bytearray would begin 16 bytes into a page, and some processors then copy five times slower.
    """
    preadv = os.preadv
    total, elapsed = 0, 0.0
    with mmap.mmap(-1, CHUNK_BYTES) as buffer:
        buffer.write(bytes(CHUNK_BYTES))  # its pages are faulted in before the clock starts
        for file in files:
            with descriptor(file, os.O_RDONLY) as fd:
                position = 0
                started = perf_counter()
                while got := preadv(fd, [buffer], position):
                    position += got
                elapsed += perf_counter() - started
                total += position
    return total / elapsed


def list_and_stat(path: Path) -> float:
    """Directories a second: list one, and stat every file in it."""
    started = perf_counter()
    with os.scandir(path) as entries:
        total = sum(entry.stat().st_size for entry in entries)
    elapsed = perf_counter() - started
    assert total > 0
    return 1 / elapsed


def list_and_stat_below(path: Path) -> float:
    """The same for a directory and all directories in it."""
    started = perf_counter()
    total = 0
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir():
                with os.scandir(entry.path) as files:
                    total += sum(file.stat().st_size for file in files)
            else:
                total += entry.stat().st_size
    elapsed = perf_counter() - started
    assert total > 0
    return 1 / elapsed
