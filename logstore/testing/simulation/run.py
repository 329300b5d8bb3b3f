"""simulate: one seed, one run of a cluster with faults; and ranges of seeds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from logstore.testing.history import check
from logstore.testing.operations import Event, Read, Snapshot
from logstore.testing.simulation.oracle import Violation
from logstore.testing.simulation.settings import Settings
from logstore.testing.simulation.world import World

__all__ = ["Run", "SimulationFailure", "run_range", "simulate"]

SETTLE_MS = 60_000  # virtual time in which a healed cluster must be in sync
LOOK_MS = 250


class SimulationFailure(AssertionError):
    """A run that violates an invariant: its seed, its settings and its last events."""

    def __init__(self, seed: int, settings: Settings, error: BaseException, world: World) -> None:
        lines = "\n".join(world.lines()[-60:])
        super().__init__(
            f"{lines}\n\nseed {seed}, step {world.steps}, {settings}\n"
            f"{type(error).__name__}: {error}\n"
            f"python -m logstore.testing.simulation {seed} --trace shows every event"
        )
        self.seed = seed
        self.name = error.name if isinstance(error, Violation) else type(error).__name__


@dataclass(frozen=True, slots=True)
class Run:
    """What one seed did."""

    seed: int
    settings: Settings
    steps: int
    virtual_ms: int
    marks: dict[str, int] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)


def simulate(seed: int, *, trace: bool = False, **settings: object) -> Run:
    """Run one seed; raise SimulationFailure if an invariant does not hold.

    Settings that are not given are drawn from the seed.
    """
    drawn = Settings.drawn(Random(f"settings {seed}"), **settings)
    world = World(seed, drawn, trace=trace)
    try:
        world.start()
        world.run(drawn.steps)
        world.heal()
        _settle(world)
        world.oracle.finish()
        _check_history(world)
    except Exception as error:
        raise SimulationFailure(seed, drawn, error, world) from error
    lines = world.lines() if trace else []
    return Run(seed, drawn, world.steps, world.now // 1000, world.marks, lines)


def _settle(world: World) -> None:
    """Run a healed cluster until clients and replicas are quiet (I18)."""
    until = world.now + SETTLE_MS * 1000
    world.run_for(2000)
    world.clients.stop()
    why = "a send has no outcome"
    while world.now < until:
        world.run_for(LOOK_MS)
        if world.clients.idle:
            why = world.oracle.unsettled()
            if not why:
                return
    raise Violation("I18", f"after {SETTLE_MS} virtual ms without a fault: {why}")


def _check_history(world: World) -> None:
    events = world.clients.events
    for key, truth in world.oracle.truths.items():
        reads = tuple(
            Read(key, batch.base_offset + n, value)
            for batch in truth.batches
            for n, value in enumerate(batch.values)
        )
        process = f"snapshot {key}"
        events.append(Event("invoke", process, ()))
        events.append(Event("ok", process, (Snapshot(key, reads),)))
    found = check(events)
    if found:
        raise Violation("history", "\n".join(map(str, found[:5])))


def run_range(seeds: Iterable[int], **settings: Any) -> tuple[Counter[str], int, int, float]:
    """Run seeds; return how many saw each mark, the runs, the steps and the seconds."""
    seen: Counter[str] = Counter()
    runs = steps = 0
    started = time.perf_counter()
    for seed in seeds:
        run = simulate(seed, **settings)
        seen.update(run.marks.keys())
        runs += 1
        steps += run.steps
    return seen, runs, steps, time.perf_counter() - started
