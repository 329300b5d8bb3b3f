"""The side file that `logstore serve` writes: where the listener of a store is.

``logstore.served`` in the root is JSON: pid, listeners, the address of the metrics.  It is a hint
for `doctor` and `ui`, which run in other processes.  A killed server leaves it; so it counts only
while the process that it names holds the store's lock.  It is not synced.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
from pathlib import Path
from typing import Any

from logstore.files.directory import Directory
from logstore.files.lock import DirectoryLock, has_writer
from logstore.kafka.metrics import PREFIX

__all__ = ["cluster_of", "find_listener", "forget_listener", "name_listener"]

NAME = "logstore.served"
BYTES_MAX = 64 << 10
ASK_SECONDS = 1.0
METADATA, DESCRIBE_CLUSTER = 3, 60
ROWS_MAX = 200  # partitions that `cluster_of` lists
INTERNAL_REPLICAS = 3  # of internal topics, if there were as many nodes when they were made


def name_listener(store: Path, about: dict[str, Any]) -> None:
    """Write the file.  A failure is ignored: the file is a hint, and half of it is no JSON."""
    with contextlib.suppress(OSError):
        (store / NAME).write_text(json.dumps(about) + "\n", "utf-8")


def forget_listener(store: Path) -> None:
    """Remove the file.  Called while this process holds the store's lock."""
    with contextlib.suppress(OSError):
        os.unlink(store / NAME)


def find_listener(store: Path) -> dict[str, Any] | None:
    """Return what `name_listener` wrote, if that process serves the store now.

    If it has an address for metrics, ``connections``, ``requests`` and ``requests_per_second``
    since its start are added.
    """
    try:
        with (store / NAME).open("rb") as file:
            about = json.loads(file.read(BYTES_MAX))
        holder = (store / DirectoryLock.NAME).read_text("ascii").split()
        directory = Directory(store)
    except (OSError, ValueError):
        return None
    try:
        if not isinstance(about, dict) or holder[:1] != [str(about.get("pid"))]:
            return None
        if not has_writer(directory):
            return None
    finally:
        directory.close()
    if about.get("metrics"):
        about |= _asked(str(about["metrics"]))
    return about


def _asked(address: str) -> dict[str, float]:
    """Return the load of a server, from its metrics; nothing if it does not answer."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=ASK_SECONDS)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    finally:
        connection.close()

    def total(name: str) -> float:
        found = re.findall(rf"^{PREFIX}{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    requests, seconds = total("requests_total"), total("up_seconds")
    return {
        "connections": int(total("connections")),
        "requests": int(requests),
        "requests_per_second": round(requests / seconds, 1) if seconds else 0.0,
    }


def cluster_of(listener: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return nodes and troubled partitions as the node of a listener knows them.

    None if the listener is not one of a cluster's node.  ``error`` if it does not answer.
    """
    if listener is None or "node" not in listener:
        return None
    from logstore.kafka.client import KafkaPeer, PeerGoneError
    from logstore.kafka.network.acceptor import parse_address

    _, host, port = parse_address(next(iter(listener["listeners"].values())))
    body = {"topics": None, "allow_auto_topic_creation": False}
    try:
        with KafkaPeer(host, port, timeout=ASK_SECONDS) as peer:
            answer = peer.request(METADATA, peer.version(METADATA, 4, 9), body)
            # Metadata also lists nodes that were there a moment ago.
            version = peer.version(DESCRIBE_CLUSTER, 0, 1)
            brokers = peer.request(DESCRIBE_CLUSTER, version, {})["brokers"]
    except (PeerGoneError, OSError) as error:
        return {"error": str(error)}
    return _as_cluster(answer, {each["broker_id"]: each for each in brokers})


def _as_cluster(answer: dict[str, Any], alive: dict[int, dict[str, Any]]) -> dict[str, Any]:
    counts: dict[int, dict[str, int]] = {}
    rows, few = [], []
    troubled = {"under_replicated": 0, "offline": 0}
    for topic in answer["topics"]:
        least = min((len(each["replica_nodes"]) for each in topic["partitions"]), default=0)
        if topic["is_internal"] and 0 < least < min(INTERNAL_REPLICAS, len(alive)):
            few.append({"topic": topic["name"], "replicas": least})
        for each in topic["partitions"]:
            replicas, isr, leader = each["replica_nodes"], each["isr_nodes"], each["leader_id"]
            for node in replicas:
                count = counts.setdefault(node, {"leads": 0, "replicas": 0, "out_of_sync": 0})
                count["replicas"] += 1
                count["leads"] += node == leader
                count["out_of_sync"] += node not in isr
            if leader < 0 or len(isr) < len(replicas):
                troubled["offline"] += leader < 0
                troubled["under_replicated"] += len(isr) < len(replicas)
                rows.append(
                    {"topic": topic["name"], "partition": each["partition_index"],
                     "leader": leader, "replicas": replicas, "isr": isr}
                )  # fmt: skip
    nodes = []
    for number in sorted({*alive, *counts}):
        found = alive.get(number, {})
        nodes.append(
            {"node": number, "alive": number in alive, "rack": found.get("rack"),
             "address": f"{found['host']}:{found['port']}" if found else None,
             **counts.get(number, {"leads": 0, "replicas": 0, "out_of_sync": 0})}
        )  # fmt: skip
    rows.sort(key=lambda row: (row["leader"] >= 0, row["topic"], row["partition"]))
    return {
        "controller": answer["controller_id"],
        "nodes": nodes,
        **troubled,
        "partitions": rows[:ROWS_MAX],
        "few_replicas": few,
    }
