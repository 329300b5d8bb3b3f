"""Kafka's own tools on a cluster of ours: topics, configs, elections, moves, records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import wait_until

from .nodes import Nodes
from .tools import CONFIGS, CONSOLE_CONSUMER, GROUPS, PACKAGE, TOPICS, Tools
from .zookeeper import require_zookeeper

pytestmark = [pytest.mark.interop, pytest.mark.campaign, pytest.mark.slow]

OFFSETS = PACKAGE + "GetOffsetShell"
REASSIGN = PACKAGE + "reassign.ReassignPartitionsCommand"
ELECT = PACKAGE + "LeaderElectionCommand"
PRODUCER = PACKAGE + "ConsoleProducer"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    require_zookeeper()
    with Nodes(tmp_path_factory.mktemp("nodes")) as started:
        yield started


def described(tools: Tools, nodes: Nodes, topic: str) -> list[dict[str, str]]:
    """The rows of `kafka-topics --describe`, by the names of their columns."""
    text = tools.run(nodes.bootstrap, TOPICS, "--describe", "--topic", topic)
    rows = [line for line in text.splitlines() if line.startswith("\tTopic:")]
    pairs = [[each.partition(": ") for each in row.strip().split("\t")] for row in rows]
    return [{name.strip(): value.strip() for name, _, value in row} for row in pairs]


def create(tools: Tools, nodes: Nodes, topic: str, *options: str) -> None:
    made = ("--create", "--topic", topic, "--replication-factor", "3")
    assert f"Created topic {topic}" in tools.run(nodes.bootstrap, TOPICS, *made, *options)


def test_topics_are_created_described_grown_and_deleted(tools: Tools, nodes: Nodes) -> None:
    create(tools, nodes, "a", "--partitions", "3", "--config", "min.insync.replicas=2")
    rows = described(tools, nodes, "a")
    assert [row["Partition"] for row in rows] == ["0", "1", "2"]
    assert sorted(row["Leader"] for row in rows) == ["1", "2", "3"]
    for row in rows:
        assert sorted(row["Replicas"].split(",")) == ["1", "2", "3"]
        assert sorted(row["Isr"].split(",")) == ["1", "2", "3"]
        assert row["Replicas"].split(",")[0] == row["Leader"]
    tools.run(nodes.bootstrap, TOPICS, "--alter", "--topic", "a", "--partitions", "5")
    assert len(described(tools, nodes, "a")) == 5
    status, text = tools.ask(nodes.bootstrap, TOPICS, "--create", "--topic", "b",
                             "--replication-factor", "4")  # fmt: skip
    assert status == 1
    assert "4 replicas need 4 nodes; 3 are registered" in text
    tools.run(nodes.bootstrap, TOPICS, "--delete", "--topic", "a")
    assert "a" not in tools.run(nodes.bootstrap, TOPICS, "--list").split()


def test_settings_are_changed_on_all_nodes(tools: Tools, nodes: Nodes) -> None:
    create(tools, nodes, "settings")
    entity = ("--entity-type", "topics", "--entity-name", "settings")
    tools.run(nodes.bootstrap, CONFIGS, "--alter", *entity,
              "--add-config", "retention.ms=12345678")  # fmt: skip
    for address in nodes.addresses.values():
        wait_until(
            lambda address=address: (
                "retention.ms=12345678" in tools.run(address, CONFIGS, "--describe", *entity)
            )
        )


def test_records_are_written_and_read_through_any_node(tools: Tools, nodes: Nodes) -> None:
    create(tools, nodes, "records", "--partitions", "2")
    lines = "".join(f"line {number}\n" for number in range(50))
    tools.run(nodes.addresses[1], PRODUCER, "--topic", "records", stdin=lines)
    wanted = ("--from-beginning", "--max-messages", "50", "--group", "g")
    text = tools.run(nodes.addresses[2], CONSOLE_CONSUMER, "--topic", "records", *wanted)
    assert sorted(each for each in text.splitlines() if each.startswith("line")) == sorted(
        lines.splitlines()
    )
    ends = tools.run(nodes.addresses[3], OFFSETS, "--topic", "records")
    assert sum(int(line.split(":")[2]) for line in ends.split()) == 50
    shown = tools.run(nodes.bootstrap, GROUPS, "--describe", "--group", "g")
    assert [line.split()[5] for line in shown.splitlines() if line.startswith("g ")] == ["0", "0"]


def test_replicas_are_moved_and_leaders_elected(tools: Tools, nodes: Nodes, tmp_path: Path) -> None:
    create(tools, nodes, "moved")
    (row,) = described(tools, nodes, "moved")
    wanted = row["Replicas"].split(",")[::-1]
    path = tmp_path / "moves.json"
    rows = [{"topic": "moved", "partition": 0, "replicas": list(map(int, wanted))}]
    path.write_text(json.dumps({"version": 1, "partitions": rows}))
    file = ("--reassignment-json-file", str(path))
    text = tools.run(nodes.bootstrap, REASSIGN, "--execute", *file)
    assert "Successfully started partition reassignment for moved-0" in text
    wait_until(
        lambda: (
            "Reassignment of partition moved-0 is completed"
            in tools.run(nodes.bootstrap, REASSIGN, "--verify", *file)
        ),
        patience=60,
    )
    assert described(tools, nodes, "moved")[0]["Replicas"].split(",") == wanted
    place = ("--topic", "moved", "--partition", "0")
    preferred = ("--election-type", "preferred", *place)
    text = tools.run(nodes.bootstrap, ELECT, *preferred)
    assert "Successfully completed leader election (PREFERRED)" in text
    assert described(tools, nodes, "moved")[0]["Leader"] == wanted[0]
    assert "Valid replica already elected" in tools.run(nodes.bootstrap, ELECT, *preferred)


def test_the_topic_of_the_command_is_seen_by_the_tools(tools: Tools, nodes: Nodes) -> None:
    nodes.command("create", "ours", "-p", 2, "-r", 2)
    rows = described(tools, nodes, "ours")
    found = {row["partition"]: row for row in nodes.command("partitions", "ours")}
    for row in rows:
        ours = found[int(row["Partition"])]
        assert row["Leader"] == str(ours["leader"])
        assert row["Replicas"] == ",".join(map(str, ours["replicas"]))
