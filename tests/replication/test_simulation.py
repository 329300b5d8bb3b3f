"""A simulated cluster with faults keeps its promises (see logstore/testing/simulation)."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from logstore.testing.simulation import SimulationFailure, simulate
from tests.campaign import SIZE, sized

SEEDS, LANES = sized(300, 10_000, 200_000), 2
# The range of a campaign moves with the date, so that the days do not repeat each other.
FIRST = 0 if SIZE == "small" else datetime.date.today().toordinal() * 1_000_000


@pytest.mark.campaign
def test_no_seed_of_a_range_breaks_an_invariant_and_the_range_covers_every_row() -> None:
    command = [sys.executable, "-m", "logstore.testing.simulation"]
    command += ["--first", str(FIRST), "--seeds", str(SEEDS), "--lanes", str(LANES)]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-12_000:]
    result = json.loads(done.stdout)
    print(f"{result['runs']} seeds from {result['first']}, {result['us']} us for each event")
    assert result["runs"] == SEEDS


@pytest.mark.parametrize("seed", [3, 17])
def test_a_seed_is_the_same_run_in_every_process(seed: int) -> None:
    runs = []
    for salt in ("1", "2"):
        code = f"from logstore.testing.simulation import simulate\nprint(simulate({seed}).marks)"
        command = [sys.executable, "-c", code]
        environment = {**os.environ, "PYTHONHASHSEED": salt}
        runs.append(subprocess.run(command, capture_output=True, env=environment, check=True))
    assert runs[0].stdout == runs[1].stdout


def test_a_calm_cluster_acknowledges_and_changes_no_leader() -> None:
    run = simulate(5, nemesis=0.0, loss=0.0, answers_lost=0.0)
    assert run.marks["acknowledged"] > 20
    assert "leader change" not in run.marks
    assert "truncation" not in run.marks


def test_a_failure_names_its_seed_its_settings_and_its_last_events() -> None:
    from logstore.replication.machines.leader import LeaderReplica

    advance = LeaderReplica._advance
    try:
        LeaderReplica._advance = _too_far  # type: ignore[method-assign]
        with pytest.raises(SimulationFailure) as failure:
            simulate(5, nemesis=0.0)
    finally:
        LeaderReplica._advance = advance  # type: ignore[method-assign]
    assert "seed 5" in str(failure.value)
    assert "lag_ms=" in str(failure.value)
    assert "ms  " in str(failure.value)
    assert "--trace" in str(failure.value)


def _too_far(self, now, actions):  # type: ignore[no-untyped-def]
    from logstore.replication.machines.actions import SetHighWatermark

    if self.end > self.hw:
        self.hw = self.end
        actions.append(SetHighWatermark(self.hw))


def test_a_trace_has_every_event() -> None:
    run = simulate(5, nemesis=0.0, steps=200, trace=True)
    assert len(run.trace) >= run.steps
