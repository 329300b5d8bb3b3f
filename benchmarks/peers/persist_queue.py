"""persist-queue: its file queue, one `put` a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from persistqueue import Queue


def write(path: Path, values: Sequence[bytes]) -> float:
    # The temporary directory must be on the queue's own file system.
    temporary = path / "temporary"
    temporary.mkdir(parents=True)
    put = Queue(str(path), tempdir=str(temporary)).put
    started = perf_counter()
    for value in values:
        put(value)
    return len(values) / (perf_counter() - started)
