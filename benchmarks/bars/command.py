"""P15: the `logstore` command: how soon it answers, and how fast it counts.

A bytecode cache is given to every process, whatever the environment says: an installed command has
one.  What an interpreter takes to start at all is shown beside.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks import engine
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least, at_most
from benchmarks.values import random_values

TOPICS = 10
START_MS = 100.0


@bar("P15", "the logstore command: start-up, counting", needs_engine=True)
def command(bench: Bench) -> Iterator[Figure]:
    values = random_values(bench.sizes.records)
    with bench.workspace.scratch("command") as home:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(home / "bytecode")
        path = home / "store"
        with engine.open_store(path) as store:
            for number in range(TOPICS):
                store.create_topic(f"topic-{number}").append(b"value", durability="os")
            with store.create_topic("large")[0].writer() as out:
                out.extend(values)
        bench.workspace.settle()
        nothing = partial(runs_a_second, environment, "-c", "pass")
        for words in (("--help",), ("topic", "ls")):
            rates = bench.race(
                {
                    OURS: partial(
                        runs_a_second, environment, "-m", "logstore", "-s", str(path), *words
                    ),
                    "python -c pass": nothing,
                },
                rounds=2 * bench.sizes.rounds,
            )
            taken = {name: 1e3 / rate for name, rate in rates.items()}
            yield Figure(
                name=f"logstore {' '.join(words)}, from start to end",
                value=taken[OURS],
                unit="ms",
                limit=at_most(START_MS, "ms"),
                peers={"python -c pass": taken["python -c pass"]},
            )
        rates = bench.race(
            {
                OURS: lambda: counted_a_second(environment, path, len(values)),
                "scan().columns() in process": lambda: scanned_a_second(path, len(values)),
            }
        )
        yield Figure.compared(
            "logstore read --count, start-up included",
            rates,
            against="scan().columns() in process",
            limit=at_least(0.02),
            unit="M records/s",
            scale=1e6,
        )


def runs_a_second(environment: dict[str, str], *words: str) -> float:
    started = perf_counter()
    subprocess.run([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, check=True)
    return 1 / (perf_counter() - started)


def counted_a_second(environment: dict[str, str], path: Path, records: int) -> float:
    started = perf_counter()
    line = [sys.executable, "-m", "logstore", "-s", str(path), "read", "large", "--count"]
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, check=True)
    elapsed = perf_counter() - started
    assert int(done.stdout) == records
    return records / elapsed


def scanned_a_second(path: Path, records: int) -> float:
    with engine.open_store(path) as store:
        started = perf_counter()
        count = sum(len(chunk) for chunk in store["large"][0].scan().columns(fields=["offset"]))
        elapsed = perf_counter() - started
    assert count == records
    return records / elapsed
