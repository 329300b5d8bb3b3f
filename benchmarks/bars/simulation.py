"""B11: the machines of replication, in the simulated cluster."""

from __future__ import annotations

from collections.abc import Iterator
from time import process_time

from benchmarks.bench import Bench, bar
from benchmarks.figure import Figure, at_most

SEEDS = 200


@bar("B11", "simulated cluster", needs_engine=True)
def simulation(bench: Bench) -> Iterator[Figure]:
    from logstore.testing.simulation import simulate

    simulate(0)  # imports, and the first calls
    steps = 0
    started = process_time()
    for seed in range(SEEDS):
        steps += simulate(seed).steps
    elapsed = process_time() - started
    yield Figure(
        name=f"{SEEDS} seeds, an event with its checks",
        value=1e6 * elapsed / steps,
        unit="us",
        limit=at_most(25, "us"),
    )
