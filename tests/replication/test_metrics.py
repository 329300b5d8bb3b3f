"""The metrics of a node: each counter and gauge after an event that changes it."""

from __future__ import annotations

import re
from pathlib import Path

from logstore.replication.cluster import Cluster
from logstore.replication.hosting.metrics import MEANINGS, Counts
from logstore.replication.machines.leader_and_isr import NO_LEADER, LeaderAndIsr
from tests.replication.cluster_kit import eventually, in_sync, running

PAGE = Path(__file__).resolve().parents[2] / "docs" / "replication.md"


def total(cluster: Cluster, name: str) -> float:
    return sum(found[name] for found in cluster.metrics().values())


def state(leader: int, epoch: int, *isr: int, elr: tuple[int, ...] = ()) -> LeaderAndIsr:
    return LeaderAndIsr(0, leader, epoch, 1, isr, 1, 1)._replace(elr=elr)


def test_a_cluster_at_rest(tmp_path: Path) -> None:
    with running(tmp_path) as cluster:
        cluster.create_topic("t", partitions=4, replication_factor=3)
        for number in range(4):
            cluster["t"].append(b"x" * 1000, partition=number)
            in_sync(cluster, "t", number)
        rows = cluster.metrics()
        assert sorted(rows) == [1, 2, 3]
        assert {row["partition_count"] for row in rows.values()} == {4}
        assert total(cluster, "leader_count") == 4
        assert total(cluster, "active_controller_count") == 1
        eventually(lambda: total(cluster, "under_replicated_partitions") == 0)
        for name in ("under_min_isr_partition_count", "offline_replica_count",
                     "reassigning_partitions", "truncated_records_total",
                     "committed_records_cut_total", "unclean_leader_elections_total",
                     "lossy_restarts_total"):  # fmt: skip
            assert total(cluster, name) == 0, name
        assert total(cluster, "metadata_connected") == 3
        # Two followers copy each batch.
        copied = total(cluster, "replication_bytes_in_total")
        assert copied >= 2 * 4 * 1000
        assert total(cluster, "replication_bytes_out_total") >= copied
        assert total(cluster, "metadata_writes_total") > 0
        assert total(cluster, "metadata_write_seconds_total") > 0
        controller = next(row for row in rows.values() if row["active_controller_count"])
        assert controller["global_topic_count"] == 1
        assert controller["global_partition_count"] == 4
        assert controller["offline_partitions_count"] == 0
        others = [row for row in rows.values() if row is not controller]
        assert not any("global_topic_count" in row for row in others)
        # A name without a meaning would break the page for Prometheus.
        names = {name.partition("{")[0] for row in rows.values() for name in row}
        assert names <= MEANINGS.keys()


def test_a_dead_node_is_seen(tmp_path: Path) -> None:
    settings = {"min.insync.replicas": 2}
    with running(tmp_path) as cluster:
        cluster.create_topic("t", replication_factor=3, config=settings,
                             assignment={0: [1, 2, 3]})  # fmt: skip
        in_sync(cluster, "t")
        cluster.kill(3)
        eventually(lambda: total(cluster, "under_replicated_partitions") == 1)
        eventually(lambda: total(cluster, "at_min_isr_partition_count") == 1)
        cluster["t"].append(b"while it is dead")
        lag = 'replica_lag_records{topic="t",partition="0",node="3"}'
        eventually(lambda: cluster.metrics()[1].get(lag) == 1)
        assert cluster.metrics()[1]["replica_max_lag"] == 1
        cluster.start(3)
        in_sync(cluster, "t")
        eventually(lambda: total(cluster, "under_replicated_partitions") == 0)
        assert lag not in cluster.metrics()[1]
        # The controller took it out, and it joined again: its leader saw both.
        assert total(cluster, "isr_shrinks_total") >= 1
        assert total(cluster, "isr_expands_total") >= 1


def test_an_election_is_counted_by_the_controller(tmp_path: Path) -> None:
    with running(tmp_path) as cluster:
        controller = cluster.status().controller
        leader, other = (number for number in (1, 2, 3) if number != controller)
        cluster.create_topic("t", assignment={0: [leader, other, controller]})
        in_sync(cluster, "t")
        cluster.elect("t", 0)  # it leads already: nothing to count
        assert total(cluster, "leader_elections_total") == 0
        cluster.kill(leader)
        eventually(lambda: cluster.metrics()[controller]["leader_elections_total"] == 1)
        assert total(cluster, "unclean_leader_elections_total") == 0


def test_an_unclean_election() -> None:
    counts = Counts()
    counts.add_election(state(1, 5, 1, 2), state(2, 6, 2))
    counts.add_election(state(NO_LEADER, 6, elr=(2,)), state(2, 7, 2))
    assert counts.read()["unclean_leader_elections_total"] == 0
    counts.add_election(state(NO_LEADER, 7, elr=(2,)), state(3, 8, 3))
    counts.add_election(state(3, 8, 3), state(3, 8, 3, 1))  # a follower joined: no election
    counts.add_election(None, state(3, 0, 3))  # the partition is new
    counts.add_election(state(3, 8, 3), state(NO_LEADER, 9))
    found = counts.read()
    assert found["unclean_leader_elections_total"] == 1
    assert found["leader_elections_total"] == 3


def test_the_page_lists_every_metric_with_its_meaning() -> None:
    table = PAGE.read_text("utf-8").split("\n### Metrics\n")[1].split("\n### ")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE)) == MEANINGS
