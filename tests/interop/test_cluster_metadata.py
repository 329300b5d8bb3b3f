"""ZooKeeper servers that fail: the data plane continues with the leaders that it has."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaign import sized

from .clusters import Loaded
from .zookeeper import Ensemble, require_zookeeper

pytestmark = [pytest.mark.interop, pytest.mark.slow]

ROUNDS = sized(1, 1, 15)
OUTAGE_SECONDS = sized(5, 20, 20)  # longer than a session
IN = ("in", 0)


@pytest.fixture
def ensemble(tmp_path: Path) -> Iterator[Ensemble]:
    """Three servers of its own: the test kills them."""
    require_zookeeper()
    with Ensemble(tmp_path / "zookeeper", servers=3) as servers:
        yield servers


def test_zookeeper_servers_that_are_killed(tmp_path: Path, ensemble: Ensemble) -> None:
    with Loaded(tmp_path / "nodes", ensemble) as loaded:
        loaded.produce()
        loaded.read(topic="in")
        cluster = loaded.cluster
        for _ in range(ROUNDS):
            follower = next(each for each in ensemble.numbers if each != ensemble.leader)
            loaded.fault("kill of one server", cluster.kill_zookeeper, follower)
            cluster.restart_zookeeper()
            loaded.fault("kill of the leader", cluster.kill_zookeeper, ensemble.leader)
            cluster.restart_zookeeper()
            before = loaded.tree.await_leader(*IN)
            loaded.fault("kill of all servers", outage, loaded)
            after = loaded.tree.await_leader(*IN)
            assert after.leader_epoch == before.leader_epoch, "sessions outlive the servers"
            for server in ensemble.numbers:
                loaded.fault(f"restart of {server}", cluster.kill_zookeeper, server)
                cluster.restart_zookeeper()
        # The metadata can be changed again: a leader that is killed is replaced.
        leader = loaded.leader()
        loaded.fault("kill of a node", cluster.kill, leader, moves=IN)
        loaded.finish(least=6 * ROUNDS + 1, read=["in"])


def outage(loaded: Loaded) -> None:
    """Kill all servers; records are acknowledged all the time; start them again."""
    loaded.cluster.kill_zookeeper()
    end = time.monotonic() + OUTAGE_SECONDS
    while time.monotonic() < end:
        loaded.await_acked(loaded.clients.acked, what="without ZooKeeper")
        time.sleep(0.2)
    loaded.cluster.restart_zookeeper()
