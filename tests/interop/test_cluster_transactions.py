"""Coordinators and leaders that are killed under a copy in transactions with its offsets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign import sized

from .clusters import Loaded
from .zookeeper import Ensemble

pytestmark = [pytest.mark.interop, pytest.mark.slow]

ROUNDS = sized(1, 2, 100)  # of three kills
GROUP, TRANSACTION = 0, 1
IN = ("in", 0)


def test_killed_coordinators_and_leaders(tmp_path: Path, zookeeper: Ensemble) -> None:
    with Loaded(tmp_path, zookeeper, topics=("in", "out"), pace=0.05) as loaded:
        clients = loaded.clients
        loaded.produce()
        loaded.read(clients.copy)
        loaded.read(topic="out")
        loaded.read(topic="out")
        loaded.read(clients.ask, groups=("copy",))
        loaded.await_acked(0)
        loaded.tree.await_in_sync()  # the internal topics too
        for number in range(ROUNDS):
            kill(loaded, f"group coordinator, round {number}", loaded.coordinator("copy", GROUP))
            kill(loaded, f"leader, round {number}", loaded.leader())
            kill(
                loaded,
                f"transaction coordinator and leader, round {number}",
                loaded.coordinator("copy", TRANSACTION),
                loaded.leader(),
            )
        loaded.finish(least=3 * ROUNDS, copies={"out": "in"})


def kill(loaded: Loaded, name: str, *victims: int) -> None:
    """Kill nodes, see transactions committed after that, and wait until all is in sync."""
    cluster = loaded.cluster

    def act() -> None:
        for victim in set(victims):
            cluster.kill(victim)
        if len(set(victims)) > 1:  # one node alone is less than min.insync.replicas
            for victim in set(victims):
                cluster.start(victim)

    committed = len(loaded.clients.committed)
    moves = IN if victims == (loaded.leader(),) else None
    loaded.fault(name, act, moves=moves)
    loaded.await_committed(committed, name)
    for victim in set(victims):
        if not cluster.nodes[victim].running:
            cluster.start(victim)
    loaded.tree.await_in_sync()
