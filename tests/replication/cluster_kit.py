"""What the tests of a cluster share: small settings, waits, and a comparison of the logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from logstore.replication.cluster import Cluster
from tests.kit import node_threads, wait_until

# Short times, so that a test does not wait for a lag or a long poll.
SETTINGS = {
    "replica.lag.time.max.ms": 500,
    "replica.fetch.wait.max.ms": 50,
    "replica.fetch.backoff.ms": 100,
}


def eventually(holds: Callable[[], object], what: str = "", timeout: float = 20.0) -> None:
    """Return when `holds` is true; it is asked again and again."""
    wait_until(holds, what or str(holds), patience=timeout)


@contextmanager
def running(path: Path, nodes: int = 3, **options: Any) -> Iterator[Cluster]:
    """A cluster of the test; at its end no thread of it is left."""
    options.setdefault("durability", "os")
    options.setdefault("config", SETTINGS)
    before = node_threads()
    with Cluster(path, nodes=nodes, **options) as cluster:
        yield cluster
    assert node_threads() <= before


def in_sync(cluster: Cluster, topic: str, number: int = 0, *, count: int = 3) -> None:
    """Wait until `count` replicas are in sync, all have the same end, and all is committed."""

    def holds() -> bool:
        row = cluster.partition(topic, number).status
        return (
            row.state == "OnlinePartition"
            and len(row.isr) == count
            and {row.ends.get(node) for node in row.isr} == {row.high_watermark}
        )

    eventually(holds, f"{topic}-{number} has {count} replicas in sync")


def raw_log(cluster: Cluster, node: int, topic: str, number: int = 0) -> bytes:
    """The bytes of all segments of a replica."""
    directory = cluster.path / f"node-{node}" / f"{topic}-{number}"
    return b"".join(file.read_bytes() for file in sorted(directory.glob("*.log")))


def values(cluster: Cluster, topic: str, number: int = 0) -> list[bytes | None]:
    """The values of the committed records, as the leader has them."""
    return [record.value for record in cluster.partition(topic, number).scan()]


def assert_same_logs(cluster: Cluster, topic: str, number: int = 0) -> None:
    """All replicas that run have the same bytes."""
    in_sync(cluster, topic, number, count=len(cluster.nodes))
    logs = {node: raw_log(cluster, node, topic, number) for node in cluster.nodes}
    assert len(set(logs.values())) == 1, {node: len(log) for node, log in logs.items()}
