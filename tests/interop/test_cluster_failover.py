"""Leaders that are killed, stopped in turn, or paused, under load: nothing is lost or doubled."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.campaign import sized

from .clusters import Loaded, VoidRun
from .zookeeper import Ensemble

pytestmark = [pytest.mark.interop, pytest.mark.slow]

KILLS = sized(2, 10, 500)
ROUNDS = sized(1, 2, 50)
PAUSES = sized(1, 5, 100)
IN = ("in", 0)


def test_a_killed_leader(tmp_path: Path, zookeeper: Ensemble) -> None:
    chance = random.Random(1)
    with Loaded(tmp_path, zookeeper) as loaded:
        loaded.produce()
        loaded.read(topic="in")
        for number in range(KILLS):
            leader = loaded.leader()
            loaded.fault(f"kill {number}", loaded.cluster.kill, leader, moves=IN)
            loaded.cluster.start(leader)
            if chance.random() < 0.5:
                loaded.tree.await_in_sync()  # otherwise the next leader is killed meanwhile
        loaded.finish(least=KILLS, read=["in"])


def test_a_rolling_restart(tmp_path: Path, zookeeper: Ensemble) -> None:
    """No record is refused or indeterminate after the retries of the producers."""
    with Loaded(tmp_path, zookeeper, pace=0.06) as loaded:
        for _ in range(3):
            loaded.produce()
        loaded.read(topic="in")
        before = loaded.tree.await_leader(*IN)
        for number in range(ROUNDS):
            for node in loaded.cluster.numbers:
                moves = IN if loaded.leader() == node else None
                loaded.fault(
                    f"restart of node {node}, round {number}",
                    loaded.cluster.terminate,
                    node,
                    moves=moves,
                )
                loaded.cluster.start(node)
                loaded.tree.await_in_sync()
        moved = loaded.tree.await_leader(*IN).leader_epoch - before.leader_epoch
        if moved < ROUNDS:  # in a round every node ends once, the leader too
            raise VoidRun(f"the leader has moved {moved} times in {ROUNDS} rounds")
        loaded.finish(least=3 * ROUNDS, read=["in"])


def test_a_paused_leader(tmp_path: Path, zookeeper: Ensemble) -> None:
    """The leader is stopped for longer than its session, and continues as if nothing had been."""
    with Loaded(tmp_path, zookeeper) as loaded:
        loaded.produce()
        loaded.read(topic="in")
        for number in range(PAUSES):
            leader = loaded.leader()
            loaded.fault(f"pause {number}", loaded.cluster.pause, leader, moves=IN)
            loaded.cluster.resume(leader)
            loaded.tree.await_in_sync()
        loaded.finish(least=PAUSES, read=["in"])
