"""B5: an asynchronous copy from directory to directory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from benchmarks import engine
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least
from benchmarks.sizes import MIB
from benchmarks.values import chunked, random_values

CP = "cp, fsync"


@bar("B5", "follow, directory to directory", needs_engine=True)
def follow(bench: Bench) -> Iterator[Figure]:
    for name, batch_bytes, share in (("64 KiB", 64 << 10, 1), ("4 KiB", 4 << 10, 8)):
        with bench.workspace.scratch("follow") as home:
            source, target = home / "source", home / "target"
            bench.progress.step(f"writing batches of {name}")
            write_source(source, bench.sizes.unclean_bytes // share, batch_bytes)
            size = engine.log_bytes(source / "bench-0")

            def copied(source: Path = source, target: Path = target, size: int = size) -> float:
                shutil.rmtree(target, ignore_errors=True)
                return size / follow_once(source, target)

            def cp(source: Path = source, target: Path = target, size: int = size) -> float:
                shutil.rmtree(target, ignore_errors=True)
                return size / cp_and_sync(source, target)

            rates = bench.race({OURS: copied, CP: cp}, writes=True)
        yield Figure.compared(
            f"follow, {size / MIB:,.0f} MiB in batches of {name}",
            rates,
            against=CP,
            limit=at_least(0.5),
            unit="MB/s",
            scale=1e6,
        )


def write_source(path: Path, size: int, batch_bytes: int) -> None:
    import logstore

    lists = chunked(random_values(100_000), 1_000)
    with logstore.open(path, durability="os") as store:
        log = store.create_topic("bench")[0]
        with log.writer(batch_bytes=batch_bytes) as out:
            while engine.log_bytes(log.path) < size:
                for records in lists:
                    out.extend(records)


def follow_once(source: Path, target: Path) -> float:
    """Return the seconds until the copy is level and on the disk."""
    from logstore import Follow

    started = perf_counter()
    with Follow(source, target) as copy:
        copy.catch_up()
    return perf_counter() - started


def cp_and_sync(source: Path, target: Path) -> float:
    """Return the seconds of `cp` of the same files, and an fsync of each."""
    started = perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for file in target.rglob("*"):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return perf_counter() - started
