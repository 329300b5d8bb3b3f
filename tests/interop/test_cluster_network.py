"""A network that is cut in six shapes, with acks=all and acks=1 on topics of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaign import sized

from .clusters import Loaded
from .zookeeper import Ensemble

pytestmark = [pytest.mark.interop, pytest.mark.slow]

ROUNDS = sized(1, 1, 50)
IN = ("in", 0)

Shape = Callable[[Loaded, int], None]


def isolated(loaded: Loaded, leader: int) -> None:
    """The leader reaches neither the followers nor the metadata: another node leads."""
    loaded.fault("isolated leader", loaded.cluster.isolate, leader, moves=IN)


def without_metadata(loaded: Loaded, leader: int) -> None:
    """The leader reaches the followers, and its session ends: another node leads."""
    loaded.fault("leader without metadata", loaded.cluster.cut_metadata, leader, moves=IN)


def expired(loaded: Loaded, leader: int) -> None:
    """The session of the leader ends, and it makes a new one at once."""
    loaded.fault("expired session", loaded.cluster.expire_session, leader, moves=IN)


def without_followers(loaded: Loaded, leader: int) -> None:
    """The leader keeps its session: it leads alone, and refuses records, until the heal."""
    loaded.fault("leader without followers", alone, loaded, leader, loaded.cluster.cut_peers)


def mute(loaded: Loaded, leader: int) -> None:
    """Nothing that the leader sends reaches a follower."""

    def cut(leader: int) -> None:
        for node in loaded.cluster.numbers:
            if node != leader:
                loaded.cluster.cut(leader, node, one_way=True)

    loaded.fault("leader that is not heard", alone, loaded, leader, cut)


def deaf(loaded: Loaded, leader: int) -> None:
    """Nothing that a follower sends reaches the leader."""

    def cut(leader: int) -> None:
        for node in loaded.cluster.numbers:
            if node != leader:
                loaded.cluster.cut(node, leader, one_way=True)

    loaded.fault("leader that does not hear", alone, loaded, leader, cut)


def alone(loaded: Loaded, leader: int, cut: Callable[[int], None]) -> None:
    """Cut, wait until the leader is alone in the ISR, and heal: nobody takes over."""
    before = loaded.tree.await_leader(*IN)
    cut(leader)
    loaded.tree.wait(
        lambda: loaded.tree.await_leader(*IN).isr == (leader,), "the ISR does not shrink"
    )
    after = loaded.tree.await_leader(*IN)
    assert (after.leader, after.leader_epoch) == (leader, before.leader_epoch)
    loaded.cluster.heal()


SHAPES: tuple[Shape, ...] = (
    isolated,
    without_metadata,
    expired,
    without_followers,
    mute,
    deaf,
)


def test_six_shapes_of_a_cut(tmp_path: Path, zookeeper: Ensemble) -> None:
    with Loaded(tmp_path, zookeeper, topics=("in", "one")) as loaded:
        loaded.produce()
        loaded.produce(loaded.clients.produce_to_leader)
        loaded.read(topic="in")
        loaded.read(topic="one")
        for _ in range(ROUNDS):
            for shape in SHAPES:
                shape(loaded, loaded.leader())
                loaded.heal()
        loaded.finish(least=ROUNDS * len(SHAPES), read=["in"])


def test_slow_and_reset_connections(tmp_path: Path, zookeeper: Ensemble) -> None:
    """No leader changes, and the clients continue."""
    with Loaded(tmp_path, zookeeper) as loaded:
        loaded.produce()
        loaded.read(topic="in")
        leader = loaded.leader()
        one, other = (node for node in loaded.cluster.numbers if node != leader)

        def slow() -> None:
            for node in (one, other):
                loaded.cluster.slow(leader, node, 100)

        loaded.fault("slow followers", slow)
        loaded.cluster.heal()
        loaded.fault("a follower whose connections are reset", loaded.cluster.reset, leader, one)
        loaded.heal()
        assert loaded.leader() == leader
        loaded.finish(least=2, read=["in"])
