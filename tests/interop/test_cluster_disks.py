"""Disks that are full or damaged, one node at a time: nothing is lost, replicas are refilled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign import sized

from .clusters import Loaded
from .zookeeper import Ensemble

pytestmark = [pytest.mark.interop, pytest.mark.slow]

FULL_ROUNDS = sized(1, 1, 20)
DAMAGE_ROUNDS = sized(1, 1, 20)
DISK_BYTES = 96 << 20
IN = ("in", 0)


def follower(loaded: Loaded) -> int:
    """Return a node that follows."""
    leader = loaded.leader()
    return next(node for node in loaded.cluster.numbers if node != leader)


def test_a_full_disk(tmp_path: Path, zookeeper: Ensemble) -> None:
    disks = dict.fromkeys(range(1, 4), DISK_BYTES)
    try:
        made = Loaded(
            tmp_path, zookeeper, disk_bytes=disks, topic_config={"segment.bytes": "1048576"}
        )
    except PermissionError as error:
        pytest.skip(str(error))
    with made as loaded:
        loaded.produce(pad=2000)
        loaded.read(topic="in")
        loaded.await_acked(0)
        for _ in range(FULL_ROUNDS):
            leader = loaded.leader()
            loaded.fault("full disk of the leader", loaded.cluster.fill_disk, leader, moves=IN)
            loaded.cluster.free_disk(leader)
            loaded.tree.await_in_sync()
            node = follower(loaded)
            loaded.fault("full disk of a follower", fill, loaded, node)
            loaded.cluster.free_disk(node)
            loaded.tree.await_in_sync()
        loaded.finish(least=2 * FULL_ROUNDS, read=["in"])


def fill(loaded: Loaded, node: int) -> None:
    """Fill the disk of a follower, and wait until it has left the ISR."""
    loaded.cluster.fill_disk(node)
    loaded.tree.wait(
        lambda: node not in loaded.tree.await_leader(*IN).isr, f"node {node} stays in the ISR"
    )


def test_a_damaged_end_of_a_log(tmp_path: Path, zookeeper: Ensemble) -> None:
    """A bit in the last segment of a follower, then of the leader, is flipped while it is down.

    Recovery finds it.  The log is set aside, and the replica is refilled by the leader.
    """
    with Loaded(tmp_path, zookeeper, topic_config={"segment.bytes": "65536"}) as loaded:
        loaded.produce(pad=1000)
        loaded.read(topic="in")
        loaded.await_acked(0, 400)  # several segments
        for _ in range(DAMAGE_ROUNDS):
            damage(loaded, follower(loaded), -1)
            damage(loaded, loaded.leader(), -1)
        loaded.finish(least=2 * DAMAGE_ROUNDS, read=["in"], strays=True)


def test_a_damaged_old_segment(tmp_path: Path, zookeeper: Ensemble) -> None:
    """A bit in the first segment of a node that leads afterwards is flipped while it is down.

    Recovery does not read old segments.  A replica that begins with nothing reads them all: the
    leader finds the damage, sends none of it, and another node leads.
    """
    with Loaded(tmp_path, zookeeper, topic_config={"segment.bytes": "65536"}) as loaded:
        loaded.produce(pad=1000)
        loaded.read(topic="in")
        loaded.await_acked(0, 400)
        for _ in range(DAMAGE_ROUNDS):
            damaged, empty, _ = loaded.tree.partitions()[IN]
            damage(loaded, damaged, 0)
            loaded.elect_preferred(*IN)
            loaded.fault("an empty replica", refill, loaded, empty, moves=IN)
            loaded.tree.await_in_sync()
        loaded.finish(least=2 * DAMAGE_ROUNDS, read=["in"], strays=True)


def refill(loaded: Loaded, node: int) -> None:
    """Start a node again without its files."""
    loaded.cluster.kill(node)
    loaded.cluster.wipe(node)
    loaded.cluster.start(node)


def damage(loaded: Loaded, node: int, segment: int) -> None:
    """Kill a node, flip a bit of its log, and start it."""
    cluster = loaded.cluster
    leads = loaded.leader() == node
    loaded.fault(f"kill of node {node}", cluster.kill, node, moves=IN if leads else None)
    path, position = cluster.flip_bit(node, *IN, segment=segment)
    cluster.start(node)
    loaded.tree.await_in_sync()
    print(f"node {node}: bit of {path.name} at {position}")
