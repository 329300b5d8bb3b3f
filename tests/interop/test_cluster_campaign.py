"""Random faults of every kind, one after the other, under every kind of client.

A seed gives the faults and the nodes that they hit.  LOGSTORE_CAMPAIGN sets how many there are.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.campaign import sized
from tests.kafka.recorded_clients import java_copier

from .clusters import Loaded
from .zookeeper import Ensemble

pytestmark = [pytest.mark.interop, pytest.mark.slow]

SEEDS = range(sized(1, 1, 3))
FAULTS = sized(3, 15, 100)  # for each seed
HELD_SECONDS = (0.0, 3.0)  # how long a fault lasts after the clients have continued


class Nemesis:
    """Chooses faults by a seed.  A method carries one out and returns its name."""

    def __init__(self, loaded: Loaded, seed: int) -> None:
        self.loaded = loaded
        self.cluster = loaded.cluster
        self.chance = random.Random(seed)
        self.kinds = (
            self.kill,
            self.kill_twice,
            self.terminate,
            self.pause,
            self.isolate,
            self.cut_metadata,
            self.cut_pair,
            self.slow_pair,
            self.reset_pair,
            self.expire,
        )

    def node(self) -> int:
        """Return a node; every other time the leader of a partition."""
        if self.chance.random() < 0.5:
            return self.loaded.leader("in", self.chance.randrange(2))
        return self.chance.choice(list(self.cluster.numbers))

    def pair(self) -> tuple[int, int]:
        one, other = self.chance.sample(list(self.cluster.numbers), 2)
        return one, other

    def kill(self) -> str:
        node = self.node()
        self.cluster.kill(node)
        return f"kill of node {node}"

    def kill_twice(self) -> str:
        """Kill a node again while it starts."""
        node = self.node()
        self.cluster.kill(node)
        self.cluster.nodes[node].begin()
        time.sleep(self.chance.uniform(0.0, 1.0))
        self.cluster.kill(node)
        return f"two kills of node {node}"

    def terminate(self) -> str:
        node = self.node()
        self.cluster.terminate(node)
        return f"shutdown of node {node}"

    def pause(self) -> str:
        node = self.node()
        self.cluster.pause(node)
        return f"pause of node {node}"

    def isolate(self) -> str:
        node = self.node()
        self.cluster.isolate(node)
        return f"isolation of node {node}"

    def cut_metadata(self) -> str:
        node = self.node()
        self.cluster.cut_metadata(node)
        return f"node {node} without metadata"

    def cut_pair(self) -> str:
        one, other = self.pair()
        one_way = self.chance.random() < 0.5
        self.cluster.cut(one, other, one_way=one_way)
        return f"cut from {one} to {other}, one way: {one_way}"

    def slow_pair(self) -> str:
        one, other = self.pair()
        self.cluster.slow(one, other, self.chance.choice([20, 200, 1000]))
        return f"{one} and {other} are slow"

    def reset_pair(self) -> str:
        one, other = self.pair()
        self.cluster.reset(one, other)
        return f"resets between {one} and {other}"

    def expire(self) -> str:
        node = self.node()
        self.cluster.expire_session(node)
        return f"expired session of node {node}"

    def next(self) -> None:
        """Carry out a fault, hold it, and end it; one in three is followed at once by the next."""
        kind = self.chance.choice(self.kinds)
        self.loaded.fault(kind.__name__, kind)
        time.sleep(self.chance.uniform(*HELD_SECONDS))
        self.loaded.heal(in_sync=self.chance.random() < 0.7)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults(tmp_path: Path, zookeeper: Ensemble, seed: int) -> None:
    with (
        Loaded(tmp_path, zookeeper, topics=("in", "out", "java"), pace=0.05) as loaded,
        java_copier(tmp_path, loaded.cluster.bootstrap_servers) as java,
    ):
        loaded.produce()
        loaded.read(loaded.clients.copy)
        for _ in range(2):
            loaded.read(topic="out")
        loaded.read(loaded.clients.ask, groups=("copy",) if java is None else ("copy", "java"))
        loaded.await_acked(0)
        loaded.tree.await_in_sync()
        nemesis = Nemesis(loaded, seed)
        for _ in range(FAULTS):
            nemesis.next()
            if java is not None:
                java.check()
        loaded.finish(least=FAULTS, copies={"out": "in"}, java=java)
