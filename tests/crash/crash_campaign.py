"""The crash explorer on all scenarios, in two processes: `make crash`, and a test of its own.

A task is a part of one scenario's calls.  Where one round does not come to the number of states
that is asked for, another tries other torn writes and other subsets.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from logstore.testing.crash import Exploration, explore, explore_recovery
from logstore.testing.crash_states import Crash, crash_states
from logstore.testing.io import record_io
from logstore.testing.io_calls import Trace
from logstore.testing.oracle import judge
from logstore.testing.sandbox import Sandbox, another_boot
from tests.crash.crash_scenarios import SCENARIOS

SHARDS = 4  # parts of one scenario's calls; `--one-in N` makes N times as many, and runs these
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

# Made before the workers are, who inherit them.
TRACES: dict[str, Trace] = {}


@dataclass
class Figures:
    """What a campaign came to."""

    per_scenario: dict[str, Exploration] = field(default_factory=dict)

    def add(self, name: str, result: Exploration) -> None:
        self.per_scenario.setdefault(name, Exploration()).add(result)

    @property
    def distinct(self) -> int:
        return len(set().union(*(each.digests for each in self.per_scenario.values())))

    @property
    def violations(self) -> list[str]:
        return [
            f"{name}: {violation}"
            for name, each in self.per_scenario.items()
            for violation in each.violations
        ]


def record_all(names: list[str] | None = None) -> None:
    for name in names or list(SCENARIOS):
        if name not in TRACES:
            with tempfile.TemporaryDirectory(dir=MEMORY) as root:
                TRACES[name] = SCENARIOS[name].record(root)


@dataclass(frozen=True)
class Task:
    scenario: str
    shard: tuple[int, int]  # its number, of how many
    per_step: int | None
    seed: int
    skip: frozenset[bytes] = frozenset()
    firsts: int | None = None  # second crashes: after this many first ones, spread over the calls


def _explore(task: Task) -> tuple[str, Exploration]:
    scenario = SCENARIOS[task.scenario]
    with Sandbox() as sandbox:
        result = explore(
            TRACES[task.scenario],
            scenario.recover,
            judge,
            per_step=task.per_step,
            seed=task.seed * 1_000_003,
            shard=task.shard,
            sandbox=sandbox,
            skip=task.skip,
        )
    return task.scenario, result


def _signature(trace: Trace) -> tuple[object, ...]:
    """What a recovery did, but not with which bytes."""
    kinds = ("pwrite", "truncate", "rename", "unlink", "mkdir", "rmdir", "sync", "datasync")
    return tuple((c.kind, c.path, c.target) for c in trace.operations if c.kind in kinds)


def _first_crashes(task: Task, sandbox: Sandbox) -> Iterator[Crash]:
    """States from which recovery does different things; one for each thing that it does."""
    scenario = SCENARIOS[task.scenario]
    seen: set[object] = set()
    known: set[tuple[bytes, bool]] = set()
    trace = TRACES[task.scenario]
    apart = len(trace.operations) // task.firsts if task.firsts is not None else 0
    step, tried, from_step = -1, 0, 0
    for crash in crash_states(trace, per_step=2, seed=task.seed, shard=task.shard):
        if crash.step < from_step:
            continue
        if crash.step != step:
            step, tried = crash.step, 0
        power = crash.model != "kill"
        key = crash.digest, power
        if key in known or tried >= 6:
            continue
        known.add(key)
        tried += 1
        sandbox.put(crash.tree)
        with (
            another_boot("the first recovery" if power else None),
            record_io(sandbox.path) as recovery,
        ):
            scenario.only_recover(sandbox.path, crash)
        signature = (power, _signature(recovery))
        if signature not in seen:
            seen.add(signature)
            from_step = crash.step + apart
            yield crash


def _explore_twice(task: Task) -> tuple[str, Exploration]:
    scenario = SCENARIOS[task.scenario]
    total = Exploration()
    with Sandbox() as sandbox, Sandbox() as other:
        for crash in _first_crashes(task, other):
            total.add(
                explore_recovery(
                    crash,
                    scenario.only_recover,
                    judge,
                    per_step=task.per_step,
                    seed=task.seed,
                    sandbox=sandbox,
                )
            )
            if len(total.violations) > 3:
                break
    return task.scenario, total


Act = Callable[[Task], tuple[str, Exploration]]


def _prepare_worker() -> None:
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


def _run(act: Act, tasks: list[Task], workers: int) -> Iterator[tuple[str, Exploration]]:
    context = multiprocessing.get_context("fork")
    with context.Pool(workers, _prepare_worker, maxtasksperchild=40) as pool:
        yield from pool.imap_unordered(act, tasks)


def shards(one_in: int) -> list[tuple[int, int]]:
    """The shards that are run when one call in `one_in` is to be crashed."""
    return [(number * one_in, SHARDS * one_in) for number in range(SHARDS)]


def campaign(
    target: int,
    *,
    per_step: int,
    one_in: int = 1,
    workers: int = 2,
    rounds: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> Figures:
    """Crash every scenario until there are `target` distinct states, at most `rounds` times."""
    record_all()
    figures = Figures()
    for number in range(rounds):
        tasks = []
        for shard in shards(one_in):
            for name in SCENARIOS:
                known = figures.per_scenario.get(name)
                skip = frozenset(known.digests) if known is not None else frozenset()
                tasks.append(Task(name, shard, per_step, number, skip))
        _collect(figures, _explore, tasks, workers, f"round {number + 1}", say)
        if figures.distinct >= target or figures.violations:
            break
    return figures


def second_crashes(
    *,
    per_step: int,
    firsts: int | None,
    one_in: int = 1,
    workers: int = 2,
    say: Callable[[str], None] = lambda _: None,
) -> Figures:
    """Crash again inside recovery, for everything, or `firsts` things, that it is seen to do."""
    record_all()
    figures = Figures()
    tasks = [
        Task(name, shard, per_step, 0, firsts=firsts)
        for shard in shards(one_in)
        for name in SCENARIOS
    ]
    _collect(figures, _explore_twice, tasks, workers, "inside recovery", say)
    return figures


def _collect(
    figures: Figures,
    act: Callable[[Task], tuple[str, Exploration]],
    tasks: list[Task],
    workers: int,
    when: str,
    say: Callable[[str], None],
) -> None:
    """Run the tasks, add their results to the figures, and report from time to time."""
    for done, (name, result) in enumerate(_run(act, tasks, workers), 1):
        figures.add(name, result)
        for violation in result.violations:
            say(f"{name}: {violation}")
        if done % 10 == 0 or done == len(tasks):
            states = sum(each.distinct for each in figures.per_scenario.values())
            say(f"{when}: {done} of {len(tasks)} tasks, {states} states")


def main() -> int:
    parser = argparse.ArgumentParser(description="Crash every protocol at every call.")
    parser.add_argument("--states", type=int, default=1_000_000, help="distinct ones, in all")
    parser.add_argument("--one-in", type=int, default=1, help="crash one call in so many")
    parser.add_argument("--per-step", type=int, default=120, help="torn writes after one call")
    parser.add_argument("--per-recovery", type=int, default=20, help="the same inside recovery")
    parser.add_argument("--firsts", type=int, help="first crashes of a task that are followed up")
    parser.add_argument("--rounds", type=int, default=50, help="at most")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", choices=("too", "only", "no"), default="too",
                        help="crash once more inside recovery")  # fmt: skip
    options = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:8.0f} s  {text}", flush=True)

    logging.disable(logging.CRITICAL)
    figures, again = Figures(), Figures()
    if options.again != "only":
        figures = campaign(options.states, per_step=options.per_step, rounds=options.rounds,
                           one_in=options.one_in, workers=options.workers, say=say)  # fmt: skip
    if options.again != "no":
        again = second_crashes(per_step=options.per_recovery, firsts=options.firsts,
                               one_in=options.one_in, workers=options.workers, say=say)  # fmt: skip
    for name in SCENARIOS:
        first = figures.per_scenario.get(name, Exploration())
        second = again.per_scenario.get(name, Exploration())
        say(f"{name:28} {first.distinct:8} states, {second.distinct:7} inside recovery")
    violations = [*figures.violations, *again.violations]
    say(
        f"{figures.distinct} distinct crash states, {again.distinct} inside recovery, "
        f"{len(violations)} violations"
    )
    counts = {
        "distinct": figures.distinct,
        "inside_recovery": again.distinct,
        "violations": len(violations),
        "scenarios": len(SCENARIOS),
    }
    print(json.dumps(counts))
    missing = options.again != "only" and figures.distinct < options.states
    return 1 if violations or missing else 0


if __name__ == "__main__":
    sys.exit(main())
