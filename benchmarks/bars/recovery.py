"""P9: opening a partition whose process died."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from benchmarks import engine, process
from benchmarks.bars.scan import columns_rate
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least, at_most
from benchmarks.sizes import MIB
from benchmarks.values import chunked, random_values

LARGEST_SEGMENT_BYTES = 2**31 - 1
READ_ALLOWANCE_BYTES = 64 << 10
SEALED_SEGMENTS = 4


@bar("P9", "recovery of an unclean active segment", needs_engine=True)
def recovery(bench: Bench) -> Iterator[Figure]:
    with bench.workspace.scratch("unclean") as home:
        path = home / "bench-0"
        bench.progress.step("writing, then dying")
        process.isolated(write_and_die, path, bench.sizes.unclean_bytes, 0)
        wreck = Wreck(home)
        size = engine.log_bytes(path)

        def recover() -> float:
            wreck.restore()
            started = perf_counter()
            log = engine.open_log(path, segment_bytes=LARGEST_SEGMENT_BYTES)
            elapsed = perf_counter() - started
            log.close()
            assert engine.log_bytes(path) == size, "recovery cut a whole log"
            return size / elapsed

        def scan() -> float:
            with engine.open_log(path, segment_bytes=LARGEST_SEGMENT_BYTES) as log:
                return columns_rate(log, path)

        bench.workspace.settle()
        rates = bench.race({OURS: recover, "scan to columns": scan}, writes=True)
    yield Figure.compared(
        f"recovery, {size / MIB:,.0f} MiB unclean",
        rates,
        against="scan to columns",
        limit=at_least(0.5),
        unit="MB/s",
        scale=1e6,
    )
    with bench.workspace.scratch("unclean") as home:
        path = home / "bench-0"
        process.isolated(write_and_die, path, bench.sizes.sealed_bytes, SEALED_SEGMENTS)
        side = engine.side_bytes(path)
        total = engine.log_bytes(path)
        active = engine.log_files(path)[-1].stat().st_size
        read = process.isolated(recovery_reads, path)
    # Once: a second pass over the active segment would cost as much as reading a sealed one.
    allowed = active + side + READ_ALLOWANCE_BYTES
    yield Figure(
        name=f"bytes read, {SEALED_SEGMENTS} sealed segments beside",
        value=read / MIB,
        unit="MiB",
        peers={"active": active / MIB, "sealed": (total - active) / MIB},
        limit=at_most(round(allowed / MIB, 3), "MiB"),
    )


class Wreck:
    """A partition as its process left it.  Recovery changes the side files, not a whole log."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._files = {file: file.read_bytes() for file in self._side_files()}

    def _side_files(self) -> list[Path]:
        files = (file for file in self._home.rglob("*") if file.is_file())
        return [file for file in files if file.suffix != ".log"]

    def restore(self) -> None:
        for file in self._side_files():
            file.unlink()
        for file, data in self._files.items():
            file.write_bytes(data)


def write_and_die(path: Path, segment_bytes: int, sealed: int) -> None:
    """`sealed` synced segments, then an active one that is neither synced nor closed."""
    lists = chunked(random_values(100_000), 1_000)
    log = engine.open_log(path, segment_bytes=LARGEST_SEGMENT_BYTES)
    for number in range(sealed + 1):
        while log.segments[-1].size_bytes < segment_bytes:
            for records in lists:
                log.extend(records)
        if number < sealed:
            log.roll()
            log.sync()
    process.exit_uncleanly()


def recovery_reads(path: Path) -> int:
    """Bytes that recovery reads in this process."""
    with engine.open_log(path.parent / "warm-0") as warm:
        warm.append(b"warm")
    before = process.bytes_read()
    with engine.open_log(path, segment_bytes=LARGEST_SEGMENT_BYTES):
        return process.bytes_read() - before
