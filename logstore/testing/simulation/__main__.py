"""python -m logstore.testing.simulation: run one seed, or a range of seeds.

``SEED --trace`` prints every event of one run.  ``--seeds 10000 --lanes 2`` runs a range in two
processes, prints a line of JSON, and fails if a seed fails or if the range misses coverage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter

from logstore.testing.simulation.coverage import EXPECTED, missing
from logstore.testing.simulation.run import SimulationFailure, run_range, simulate


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m logstore.testing.simulation")
    parser.add_argument("seed", nargs="?", type=int, help="run this seed")
    parser.add_argument("--trace", action="store_true", help="print every event of the run")
    parser.add_argument("--seeds", type=int, default=0, help="run so many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed of a range")
    parser.add_argument("--stride", type=int, default=1, help="the distance between two seeds")
    parser.add_argument("--lanes", type=int, default=1, help="processes that share a range")
    parser.add_argument("--steps", type=int, help="events of each run before everything is healed")
    arguments = parser.parse_args()
    settings = {} if arguments.steps is None else {"steps": arguments.steps}
    if arguments.seed is not None:
        return run_one(arguments.seed, arguments.trace, settings)
    if arguments.lanes > 1:
        return run_lanes(arguments.first, arguments.seeds, arguments.lanes, arguments.steps)
    first, stride = arguments.first, arguments.stride
    seeds = range(first, first + arguments.seeds * stride, stride)
    seen, runs, steps, seconds = run_range(seeds, **settings)
    print(json.dumps({"seen": seen, "runs": runs, "steps": steps, "seconds": round(seconds, 1)}))
    return 0


def run_one(seed: int, trace: bool, settings: dict[str, int]) -> int:
    """Run one seed."""
    try:
        run = simulate(seed, trace=trace, **settings)
    except SimulationFailure as failure:
        print(failure)
        return 1
    print("\n".join(run.trace))
    print(f"seed {seed}: {run.steps} events, {run.virtual_ms} virtual ms, {run.settings}")
    return 0


def run_lanes(first: int, seeds: int, lanes: int, steps: int | None) -> int:
    """Run a range in several processes."""
    command = [sys.executable, "-m", "logstore.testing.simulation", "--stride", str(lanes)]
    if steps is not None:
        command += ["--steps", str(steps)]
    processes = [
        subprocess.Popen(
            [*command, "--first", str(first + lane), "--seeds", str(seeds // lanes)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for lane in range(lanes)
    ]
    seen: Counter[str] = Counter()
    runs = done = 0
    seconds = 0.0
    failed = False
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            failed = True
            continue
        lane_of = json.loads(output)
        seen.update(lane_of["seen"])
        runs += lane_of["runs"]
        done += lane_of["steps"]
        seconds += lane_of["seconds"]
    short = missing(seen, runs) if runs else []
    for line in short:
        print(line, file=sys.stderr)
    shares = {name: round(100 * seen[name] / max(1, runs), 2) for name in EXPECTED}
    print(json.dumps({"first": first, "runs": runs, "steps": done, "us": _us(seconds, done),
                      "shares": shares}))  # fmt: skip
    return 1 if failed or short else 0


def _us(seconds: float, steps: int) -> float:
    return round(1e6 * seconds / max(1, steps), 1)


if __name__ == "__main__":
    sys.exit(main())
