"""`logstore cluster` with a real ZooKeeper and nodes that are processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.kit import wait_until

from .nodes import Nodes
from .zookeeper import Ensemble, require_zookeeper

pytestmark = [pytest.mark.interop, pytest.mark.campaign, pytest.mark.slow]


def produce(nodes: Nodes, topic: str, count: int) -> None:
    """Append records with acks=all to all partitions, and wait for every acknowledgement."""
    failed: list[object] = []
    settings = {"bootstrap.servers": nodes.bootstrap, "acks": "all", "log_level": 0}
    producer = Producer(settings)
    for number in range(count):
        producer.produce(topic, b"%d" % number, on_delivery=lambda error, _: failed.append(error))
        producer.poll(0)
    assert producer.flush(60) == 0
    assert not [each for each in failed if each is not None]


def test_a_cluster_is_seen_changed_and_repaired_by_the_command(tmp_path: Path) -> None:
    require_zookeeper()
    with Nodes(tmp_path) as nodes:
        nodes.command("create", "t", "-p", 3, "-r", 3, "-c", "min.insync.replicas=2")
        produce(nodes, "t", 3000)
        rows = nodes.command("partitions", "t")
        assert sum(row["high_watermark"] for row in rows) == 3000
        assert all(len(row["isr"]) == 3 and set(row["lag"].values()) == {0} for row in rows)

        nodes.kill(2)
        wait_until(lambda: len(nodes.command("status", "--under-replicated")) == 3, patience=60)
        (status,) = nodes.command("status")
        assert (status["offline"], status["under_minimum"]) == (0, 0)
        assert [node["alive"] for node in status["nodes"]] == [True, False, True]
        produce(nodes, "t", 300)

        nodes.start(2)
        wait_until(lambda: not nodes.command("status", "--under-replicated"), patience=60)
        elected = nodes.command("elect", "t")
        assert sorted(row["after"].split("@")[0] for row in elected) == ["1", "2", "3"]

        nodes.start(4)
        moves = [f"t:{number}=4,{number + 1}" for number in range(3)]
        moved = nodes.command("reassign", *moves)
        assert {row["state"] for row in moved} == {"done"}
        rows = nodes.command("partitions", "t")
        assert [row["replicas"] for row in rows] == [[4, 1], [4, 2], [4, 3]]
        assert sum(row["ends"]["4"] for row in rows) == 3300
        assert {row["state"] for row in nodes.command("decommission", 4, "--yes")} == {"done"}
        nodes.kill(4)
        produce(nodes, "t", 30)
        (controller,) = nodes.command("controller", "--move", "--yes")
        assert controller["epoch"] >= 2
        nodes.command("delete", "t", "--yes")
        assert nodes.command("status")[0]["topics"] == 0

        nodes.ensemble.kill(1)
        assert nodes.command("status", code=5) == []


def test_the_example_loses_nothing(tmp_path: Path) -> None:
    require_zookeeper()
    example = Path(__file__).parent.parent.parent / "examples" / "cluster.py"
    with Ensemble(tmp_path / "zookeeper", 1) as ensemble:
        place = f"127.0.0.1:{ensemble.ports[1]}/example"
        line = [sys.executable, str(example), str(tmp_path / "data"), place]
        shown = subprocess.run(line, stdout=subprocess.PIPE, text=True, timeout=200, check=True)
    assert "2000 read: nothing lost" in shown.stdout
