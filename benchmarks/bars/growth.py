"""P14: what a large log costs that a small one does not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks import engine
from benchmarks.bars.lookup import lookup_rate, random_offsets
from benchmarks.bench import Bench, bar
from benchmarks.figure import Figure, at_least
from benchmarks.peers import lmdb_store, syscalls
from benchmarks.sizes import GIB
from benchmarks.values import VALUE_BYTES, chunked, random_values
from benchmarks.workspace import evict

BURST_LIST_RECORDS = 262_144
BATCH_RECORDS = 10
NOISE = 0.9


@bar("P14", "growth", needs_engine=True)
def growth(bench: Bench) -> Iterator[Figure]:
    yield from append_growth(bench)
    yield from lookup_growth(bench)


def append_growth(bench: Bench) -> Iterator[Figure]:
    """A burst at the end of a long log against one in an empty log; a bare burst is the control.

    Between bursts everything is synced, so that no burst waits for another's write-back, and
    evicted, so that every burst is given pages that were used before.
    """
    sizes = bench.sizes
    if not bench.workspace.has_room(2 * sizes.growth_bytes):
        bench.progress.note(f"P14: {2 * sizes.growth_bytes / GIB:.0f} GiB of disk are not free")
        return
    values = random_values(min(BURST_LIST_RECORDS, sizes.burst_bytes // VALUE_BYTES))
    times = max(1, sizes.burst_bytes // (len(values) * VALUE_BYTES))
    control = b"".join(values) * times
    scratch = bench.workspace.scratch
    with scratch("long") as home:
        path = home / "bench-0"
        with engine.open_log(path) as log:
            grow(bench, log, path)

            def at_end() -> float:
                evict(home)
                return burst_rate(log, values, times)

            def at_start() -> float:
                with scratch("short") as short, engine.open_log(short / "bench-0") as empty:
                    return burst_rate(empty, values, times)

            def raw() -> float:
                with scratch("raw") as path:
                    return syscalls.write_in_chunks(path / "file", control)

            long = f"at {sizes.growth_bytes / GIB:.3g} GiB"
            rates = bench.race({"at 0": at_start, long: at_end, "raw": raw}, writes=True)
    shown = {name: rate if name == "raw" else rate * VALUE_BYTES for name, rate in rates.items()}
    yield Figure.compared(
        f"append burst, {long}, against 0",
        shown,
        against="at 0",
        beside=("raw",),
        limit=at_least(0.9),
        unit="MB/s",
        scale=1e6,
        ours=long,
    )


def grow(bench: Bench, log: engine.Log, path: Path) -> None:
    lists = chunked(random_values(BURST_LIST_RECORDS), 10_000)
    while (size := engine.log_bytes(path)) < bench.sizes.growth_bytes:
        bench.progress.step(f"growing, {size / GIB:.1f} GiB")
        for _ in range(10):
            for records in lists:
                log.extend(records)
        bench.workspace.settle()
        evict(path)


def burst_rate(log: engine.Log, values: list[bytes], times: int) -> float:
    started = perf_counter()
    with log.writer() as out:
        append = out.append
        for _ in range(times):
            for value in values:
                append(value)
    return times * len(values) / (perf_counter() - started)


def lookup_growth(bench: Bench) -> Iterator[Figure]:
    """`log[offset]` in a log of ten times as many records; LMDB's own growth is the control."""
    entrants = {}
    with ExitStack() as stack:
        for count in bench.sizes.growth_records:
            home = stack.enter_context(bench.workspace.scratch(f"lookup-{count}"))
            bench.progress.step(f"writing {count:,} records")
            values = random_values(min(count, 1_000_000)) * max(1, count // 1_000_000)
            path = home / "bench-0"
            engine.fill(path, chunked(values, BATCH_RECORDS))
            lmdb_store.write(home / "lmdb", lmdb_store.keys(count), values)
            log = stack.enter_context(engine.open_log(path))
            lmdb = stack.enter_context(closing(lmdb_store.Reader(home / "lmdb")))
            offsets = random_offsets(count, bench.sizes.lookups)
            keys = [lmdb_store.key(offset) for offset in offsets]
            entrants[f"{count:,}"] = partial(lookup_rate, log, offsets)
            entrants[f"LMDB {count:,}"] = partial(lmdb.get, keys)
        bench.workspace.settle()
        rates = bench.race(entrants)
    few, many = bench.sizes.growth_records
    # n grew tenfold and a lookup may take log n longer.
    bound = NOISE * math.log(few) / math.log(many)
    yield Figure.compared(
        f"log[offset], {many:,} records, against {few:,}",
        rates,
        against=f"{few:,}",
        beside=(f"LMDB {few:,}", f"LMDB {many:,}"),
        limit=at_least(round(bound, 2)),
        unit="K records/s",
        scale=1e3,
        ours=f"{many:,}",
    )
