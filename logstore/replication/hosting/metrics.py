"""Counts: what a node's replication has done since its start; metrics_of: that, and what it has.

The names are those of Kafka's MBeans in Prometheus' spelling: `UnderReplicatedPartitions` is
``under_replicated_partitions``, `IsrShrinksPerSec` is ``isr_shrinks_total``.  Gauges are read from
the replicas and from the node's image when they are asked for: nothing is kept for them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

from logstore.replication.machines.decisions import partition_state, preferred_leaders
from logstore.replication.machines.in_sync import NEVER
from logstore.replication.machines.leader_and_isr import NO_LEADER, LeaderAndIsr

if TYPE_CHECKING:
    from logstore.replication.machines.image import ClusterImage, Key
    from logstore.replication.machines.leader import LeaderReplica
    from logstore.replication.node import Node

__all__ = ["MEANINGS", "Counts", "metrics_of"]

LAGGING_MAX = 100  # followers that are listed one by one: those with the greatest lag

_COUNTED = {
    "isr_shrinks_total": "replicas left the in-sync set of a partition that this node leads",
    "isr_expands_total": "replicas joined it",
    "failed_isr_updates_total": "changes of an in-sync set that were refused, or had no answer",
    "replication_bytes_in_total": "bytes of batches copied from leaders",
    "replication_bytes_out_total": "bytes of batches sent to followers",
    "leader_elections_total": "leaders that this node elected as the controller",
    "unclean_leader_elections_total": "those of them that may miss committed records",
    "session_expires_total": "sessions with the metadata service that were lost",
    "metadata_writes_total": "writes to the metadata tree",
    "metadata_write_seconds_total": "time until they were answered",
    "truncated_records_total": "records that were cut because the leader did not have them",
    "committed_records_cut_total": "committed records among them: only after an unclean election",
    "indeterminate_appends_total": "appends that were answered before their fate was known",
    "lossy_restarts_total": "starts after which acknowledged records may be missing",
}

MEANINGS = {
    **_COUNTED,
    "partition_count": "replicas on this node",
    "leader_count": "partitions that this node leads",
    "under_replicated_partitions": "led here, with a replica that is not in sync",
    "under_min_isr_partition_count": "led here, with fewer in sync than min.insync.replicas",
    "at_min_isr_partition_count": "led here, with as many in sync as min.insync.replicas",
    "offline_replica_count": "replicas that this node cannot read or write",
    "reassigning_partitions": "led here, with replicas that are being moved",
    "replica_max_lag": "the most records that a follower of this node misses",
    "replica_lag_records": "records that a follower misses, by partition and node",
    "replica_lag_seconds": "time since that follower had the whole log",
    "metadata_connected": "1 if the metadata service can be reached",
    "active_controller_count": "1 if this node is the controller",
    "offline_partitions_count": "partitions without a leader; of the controller",
    "preferred_replica_imbalance_count": "partitions not led by their first replica; same",
    "global_topic_count": "topics of the cluster; same",
    "global_partition_count": "partitions of the cluster; same",
}


class Counts:
    """Counters since the start of a node.  Any thread may add; a number only grows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # innermost: nothing else is taken under it
        self._values: dict[str, float] = dict.fromkeys(_COUNTED, 0)

    def add(self, name: str, amount: float = 1) -> None:
        """Count something."""
        with self._lock:
            self._values[name] += amount

    def add_change(self, before: Collection[int], after: Collection[int]) -> None:
        """Count the nodes that left and joined an in-sync set."""
        self.add("isr_shrinks_total", len(set(before) - set(after)))
        self.add("isr_expands_total", len(set(after) - set(before)))

    def add_election(self, before: LeaderAndIsr | None, after: LeaderAndIsr | None) -> None:
        """Count a decision of the controller, if it elected a leader."""
        if before is None or after is None or after.leader == NO_LEADER:
            return
        if after.leader != before.leader or after.leader_epoch != before.leader_epoch:
            self.add("leader_elections_total")
            clean = after.leader in {*before.isr, *before.elr}
            self.add("unclean_leader_elections_total", not clean)

    def read(self) -> dict[str, float]:
        """Return all counters by name."""
        with self._lock:
            return dict(self._values)


class _Lag(NamedTuple):
    """A follower that misses records."""

    records: int
    seconds: float  # since it had all; -1: not since this leader was elected
    key: Key
    node: int


def metrics_of(node: Node) -> dict[str, float]:
    """Return the counters of a node and the gauges of its replicas, by name."""
    session = node.membership.session
    leaders = [each for each in (row.machine.leader for row in node.partitions.all()) if each]
    lagging = sorted(_lags(leaders, node.now()), reverse=True)
    found = node.counts.read() | {
        "partition_count": len(node.partitions.replicas),
        "leader_count": len(leaders),
        "under_replicated_partitions": sum(
            len(each.view.isr) < len(each.assignment.origin) for each in leaders
        ),
        "under_min_isr_partition_count": sum(
            len(each.view.isr) < each.view.min_isr for each in leaders
        ),
        "at_min_isr_partition_count": sum(
            len(each.view.isr) == each.view.min_isr for each in leaders
        ),
        "offline_replica_count": len(node.offline_keys()),
        "reassigning_partitions": sum(each.assignment.moving for each in leaders),
        "replica_max_lag": lagging[0].records if lagging else 0,
        "metadata_connected": session is not None and session.state == "connected",
        "active_controller_count": node.controller.active,
    }
    for lag in lagging[:LAGGING_MAX]:
        labels = f'{{topic="{lag.key[0]}",partition="{lag.key[1]}",node="{lag.node}"}}'
        found[f"replica_lag_records{labels}"] = lag.records
        if lag.seconds >= 0:
            found[f"replica_lag_seconds{labels}"] = lag.seconds
    if node.controller.active:
        with node.lock:
            found |= _of_cluster(node.image)
    return {name: value + 0 for name, value in found.items()}  # a bool is 0 or 1


def _lags(leaders: list[LeaderReplica], now: int) -> Iterator[_Lag]:
    for leader in leaders:
        for number in leader.assignment.replicas:
            progress = leader.progress_of(number)
            if progress is not None and progress.end < leader.end:
                records = leader.end - max(progress.end, leader.start)
                seconds = (now - progress.caught_up_ms) / 1000
                known = progress.caught_up_ms > NEVER
                yield _Lag(records, seconds if known else -1, leader.key, number)


def _of_cluster(image: ClusterImage) -> dict[str, float]:
    keys = image.keys()
    return {
        "global_topic_count": len(image.topics),
        "global_partition_count": len(keys),
        "offline_partitions_count": sum(
            partition_state(image, key) != "OnlinePartition" for key in keys
        ),
        "preferred_replica_imbalance_count": sum(
            not leads for _, leads in preferred_leaders(image, keys)
        ),
    }
