"""P10: compaction of a log in which every key was written ten times."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from benchmarks import engine, process
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least, at_most
from benchmarks.sizes import MIB
from benchmarks.values import SEED, VALUE_BYTES

SEGMENT_BYTES = 128 * MIB
MAP_BYTES = 64 * MIB
# Beside the map: a read window, a write buffer, indexes, and what the interpreter takes meanwhile.
ALLOWANCE_BYTES = 8 * MIB
ROUNDS = 2  # of several seconds each


@bar("P10", "compaction", needs_engine=True)
def compaction(bench: Bench) -> Iterator[Figure]:
    records, keys = bench.sizes.compaction_records, bench.sizes.compaction_keys
    with bench.workspace.scratch("compaction") as home:
        source = home / "bench-0"
        bench.progress.step("writing")
        write(source, records, keys)

        def compact() -> float:
            path = fresh(source, home)
            with engine.open_log(path, segment_bytes=SEGMENT_BYTES) as log:
                bench.workspace.settle()
                started = perf_counter()
                report = engine.compactor(log, memory_bytes=MAP_BYTES).run()
                elapsed = perf_counter() - started
                assert report.records_after == keys, report
            return records / elapsed

        def scan() -> float:
            total = 0
            with engine.open_log(source, segment_bytes=SEGMENT_BYTES) as log:
                started = perf_counter()
                for record in log.scan():
                    total += len(record.value)
                elapsed = perf_counter() - started
            assert total == records * VALUE_BYTES
            return records / elapsed

        rates = bench.race({OURS: compact, "scan to Records": scan}, rounds=ROUNDS)
        yield Figure.compared(
            f"compaction, {records / 1e6:g} M records, {keys / 1e6:g} M keys",
            rates,
            against="scan to Records",
            limit=at_least(0.15),
            unit="M records/s",
            scale=1e6,
        )
        bench.progress.step("memory")
        grown = process.isolated(peak_growth, fresh(source, home))
    yield Figure(
        name=f"peak growth, map of {MAP_BYTES // MIB} MiB",
        value=grown / MIB,
        unit="MiB",
        limit=at_most((MAP_BYTES + ALLOWANCE_BYTES) / MIB, "MiB"),
    )


def write(path: Path, records: int, keys: int) -> None:
    """Rounds of all keys, each in another order; then a roll, so that all of it is sealed."""
    rng = random.Random(SEED)
    names = [b"user-%08d" % number for number in range(keys)]
    values = [rng.randbytes(VALUE_BYTES) for _ in range(1024)]
    with engine.open_log(path, segment_bytes=SEGMENT_BYTES) as log:
        with log.writer() as out:
            for number in range(records):
                if number % keys == 0:
                    rng.shuffle(names)
                out.append(values[number & 1023], key=names[number % keys])
        log.roll()


def fresh(source: Path, home: Path) -> Path:
    """The log as it was written: its segments are only ever replaced, so links to them do."""
    path = home / "copy" / source.name
    shutil.rmtree(path.parent, ignore_errors=True)
    path.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".log" and file.stat().st_size:
            os.link(file, path / file.name)
        elif file.name != ".lock":
            shutil.copy(file, path / file.name)
    return path


def peak_growth(path: Path) -> int:
    """Bytes that compaction adds to this process at its worst moment."""
    with engine.open_log(path, segment_bytes=SEGMENT_BYTES) as log:
        for _ in log.scan(0, 1_000):  # whatever is loaded once is not compaction's
            pass
        process.forget_peak()
        before = process.resident_bytes()
        engine.compactor(log, memory_bytes=MAP_BYTES).run()
        return process.peak_resident_bytes() - before
