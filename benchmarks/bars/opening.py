"""P8: opening a cleanly closed partition of many segments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from benchmarks import engine, process
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_most
from benchmarks.peers import syscalls
from benchmarks.sizes import MIB
from benchmarks.values import random_values

SMALL_RECORDS, LARGE_RECORDS = 10, 2_500  # a segment: some 1 KiB, some 256 KiB

# Read besides the side files: /proc itself.  Less than one batch header of every segment.
READ_ALLOWANCE_BYTES = 4 << 10

# Memory is given out in arenas: what two equal opens may differ by.
MEMORY_NOISE_MIB = 1


@bar("P8", "clean open of many segments", needs_engine=True)
def clean_open(bench: Bench) -> Iterator[Figure]:
    with bench.workspace.scratch("small") as small, bench.workspace.scratch("large") as large:
        for home, records in ((small, SMALL_RECORDS), (large, LARGE_RECORDS)):
            bench.progress.step("writing segments")
            write_segments(home / "bench-0", bench.sizes.segments, records)
        path = large / "bench-0"
        bench.workspace.settle()
        # The race wants rates: opens a second.
        rates = bench.race(
            {
                OURS: lambda: open_rate(path),
                "scandir+stat": lambda: syscalls.list_and_stat(path),
            },
            rounds=2 * bench.sizes.rounds,
        )
        seconds = {name: 1e3 / rate for name, rate in rates.items()}
        yield Figure.compared(
            f"open, {bench.sizes.segments:,} segments",
            seconds,
            against="scandir+stat",
            limit=at_most(3.0),
            unit="ms",
        )
        small_grown, _ = process.isolated(open_cost, small / "bench-0")
        large_grown, read = process.isolated(open_cost, path)
        allowed = engine.side_bytes(path) + READ_ALLOWANCE_BYTES
        yield Figure(
            name="bytes read by open",
            value=read / MIB,
            unit="MiB",
            peers={
                "side files": engine.side_bytes(path) / MIB,
                "log": engine.log_bytes(path) / MIB,
            },
            limit=at_most(round(allowed / MIB, 3), "MiB"),
        )
        yield Figure(
            name="memory of open, 256 KiB segments over 1 KiB",
            value=(large_grown - small_grown) / MIB,
            unit="MiB",
            peers={"256 KiB": large_grown / MIB, "1 KiB": small_grown / MIB},
            limit=at_most(MEMORY_NOISE_MIB, "MiB"),
        )


def write_segments(path: Path, segments: int, records: int) -> None:
    values = random_values(records)
    with engine.open_log(path) as log:
        for _ in range(segments - 1):
            log.extend(values)
            log.roll()
        log.extend(values)
    assert len(engine.log_files(path)) == segments


def open_rate(path: Path) -> float:
    started = perf_counter()
    log = engine.open_log(path)
    elapsed = perf_counter() - started
    log.close()
    return 1 / elapsed


def open_cost(path: Path) -> tuple[int, int]:
    """Resident bytes and read bytes that one open adds to this process."""
    with engine.open_log(path.parent / "warm-0") as warm:  # imports are not the open's
        warm.append(b"warm")
    memory, read = process.resident_bytes(), process.bytes_read()
    with engine.open_log(path):
        read = process.bytes_read() - read
        return process.resident_bytes() - memory, read
