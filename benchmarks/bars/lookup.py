"""P7: one record by its offset, at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from time import perf_counter

from benchmarks import engine
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least
from benchmarks.peers import lmdb_store
from benchmarks.values import SEED, chunked, random_values


@bar("P7", "random log[offset]")
def random_lookups(bench: Bench) -> Iterator[Figure]:
    values = random_values(bench.sizes.records)
    wanted = random_offsets(len(values), bench.sizes.lookups)
    keys = [lmdb_store.key(offset) for offset in wanted]
    for batch_records, bound in ((1, 0.25), (1_000, 0.05)):
        with ExitStack() as stack:
            home = stack.enter_context(bench.workspace.scratch("lookup"))
            lmdb_store.write(home / "lmdb", lmdb_store.keys(len(values)), values)
            lmdb = stack.enter_context(closing(lmdb_store.Reader(home / "lmdb")))
            entrants = {"LMDB get": partial(lmdb.get, keys)}
            if bench.has_engine:
                path = home / "bench-0"
                engine.fill(path, chunked(values, batch_records))
                assert engine.records_per_batch(path) == batch_records
                log = stack.enter_context(engine.open_log(path))
                # A lookup in a large batch decodes much: fewer of them take as long.
                some = wanted if batch_records == 1 else wanted[: len(wanted) // 10]
                entrants[OURS] = partial(lookup_rate, log, some)
            bench.workspace.settle()
            rates = bench.race(entrants)
        yield Figure.compared(
            f"random log[offset], batches of {batch_records:,}",
            rates,
            against="LMDB get",
            limit=at_least(bound),
            unit="K records/s",
            scale=1e3,
        )


def random_offsets(end_offset: int, count: int) -> list[int]:
    return random.Random(SEED).choices(range(end_offset), k=count)


def lookup_rate(log: engine.Log, offsets: Sequence[int]) -> float:
    total = 0
    started = perf_counter()
    for offset in offsets:
        total += len(log[offset].value)
    elapsed = perf_counter() - started
    assert total > 0
    return len(offsets) / elapsed
