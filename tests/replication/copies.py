"""Functions for tests of copies: the bytes of a log, and whether one is the start of another."""

from __future__ import annotations

from pathlib import Path

from logstore.replication.source import whole_batches

__all__ = ["is_prefix", "raw_log"]


def raw_log(path: Path) -> bytes:
    """Return the whole batches of a partition's directory, from the files."""
    data = _files(path)
    return data[: whole_batches(memoryview(data))[0]]


def _files(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(path.glob("*.log")))


def is_prefix(copy: Path, source: Path) -> bool:
    """Whether the batches of the copy are the first of the source.  Read in this order."""
    made = raw_log(copy)
    return _files(source).startswith(made)
