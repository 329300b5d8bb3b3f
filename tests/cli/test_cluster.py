"""`logstore cluster`: three nodes with listeners in this process, and the tree that they share."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore.cli import observing
from logstore.cli.served import cluster_of, name_listener
from logstore.cli.verbs.ui import UiServer
from logstore.kafka.clustering.served_node import ServedNode
from logstore.kafka.protocol.errors import ErrorCode
from logstore.opening import open_member
from logstore.replication.embedded import EmbeddedTree
from tests.cli.conftest import Command
from tests.kafka.peer import Peer, batch, produce_body
from tests.kit import PATIENCE, wait_until

PRODUCE, LIST_OFFSETS, FIND_COORDINATOR = 0, 2, 10
OFFSETS = "__consumer_offsets"
SETTINGS = {"replica.lag.time.max.ms": 1000, "replica.fetch.wait.max.ms": 100}


class Cluster:
    """The nodes, and the command on their tree."""

    def __init__(self, path: Path, command: Command) -> None:
        self.path = path
        self.tree = EmbeddedTree(None)
        self.up: dict[int, ServedNode] = {}
        self._command = command

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self.up[number] = ServedNode(
                open_member(self.path / str(number), durability="os"),
                node_id=number,
                metadata=self.tree.session,
                listen="127.0.0.1:0",
                node_config=SETTINGS,
            ).start()

    def kill(self, number: int) -> None:
        self.up.pop(number).kill()

    def __call__(self, *arguments: object, code: int = 0) -> Any:
        return self._command("cluster", *arguments, "--zookeeper", "the:1/tree", code=code)

    def rows(self, *arguments: object, code: int = 0) -> list[dict[str, Any]]:
        return list(self(*arguments, code=code).rows)

    def produce(self, topic: str, count: int, number: int = 0) -> None:
        leader = self.rows("partitions", f"{topic}:{number}")[0]["leader"]
        raw = batch(*(b"%d" % i for i in range(count)))
        with Peer(self.up[leader].server.address) as peer:

            def is_appended() -> bool:  # refused with 6 until the node has seen that it leads
                answer = peer.ask(PRODUCE, 9, produce_body(topic, raw, partition=number))
                code: int = answer["responses"][0]["partition_responses"][0]["error_code"]
                assert code in (ErrorCode.NONE, ErrorCode.NOT_LEADER_OR_FOLLOWER)
                return code == 0

            wait_until(is_appended)

    def in_sync(self, topic: str) -> set[int]:
        node = next(iter(self.up.values())).node
        return set(node.image.states[topic, 0].isr)


@pytest.fixture
def cluster(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "nodes", command)
    monkeypatch.setattr(observing, "session_with", lambda servers: made.tree.session())
    monkeypatch.delenv("LOGSTORE_ZOOKEEPER", raising=False)
    yield made
    for number in list(made.up):
        made.kill(number)
    made.tree.close()


@pytest.fixture
def three(cluster: Cluster) -> Cluster:
    cluster.start(1, 2, 3)
    return cluster


# ---- looking ----


def test_status_counts_nodes_and_partitions(three: Cluster) -> None:
    three("create", "t", "-p", 4, "-r", 3, "-c", "min.insync.replicas=2")
    (row,) = three.rows("status")
    assert (row["topics"], row["partitions"], row["under_replicated"]) == (1, 4, 0)
    assert (row["offline"], row["under_minimum"], row["moving"]) == (0, 0, 0)
    assert row["controller"] in (1, 2, 3)
    assert [(node["node"], node["alive"], node["replicas"]) for node in row["nodes"]] == [
        (1, True, 4), (2, True, 4), (3, True, 4),
    ]  # fmt: skip
    assert sum(node["leads"] for node in row["nodes"]) == 4
    assert row["partition_list"] == []
    table = three("status", "-o", "table").text
    assert "4 partitions: 0 under-replicated" in table
    assert [line.split()[0] for line in table.splitlines()[4:]] == ["1", "2", "3"]


def test_status_shows_what_a_dead_node_leaves(three: Cluster) -> None:
    three("create", "t", "-r", 3, "-c", "min.insync.replicas=3")
    three("create", "one", "-r", 1)
    alone = three.rows("partitions", "one")[0]["leader"]
    three.kill(alone)
    wait_until(lambda: alone not in three.in_sync("t"))
    found = {row["topic"]: row for row in three.rows("status", "--under-replicated", code=3)}
    assert set(found["t"]["isr"]) == {1, 2, 3} - {alone}
    assert found["t"]["elr"] == [alone]
    (offline,) = three.rows("status", "--offline", code=3)
    assert (offline["topic"], offline["state"]) == ("one", "OfflinePartition")
    (row,) = three.rows("status", code=3)
    assert (row["under_replicated"], row["under_minimum"], row["offline"]) == (2, 2, 1)
    (dead,) = [node for node in three.rows("nodes") if not node["alive"]]
    assert (dead["node"], dead["notes"]) == (alone, "not registered")
    assert "one-0      none" in three("status", "-o", "table", code=3).text


def test_partitions_shows_the_end_of_every_log(three: Cluster) -> None:
    three("create", "t", "-r", 3)
    three.produce("t", 7)
    (row,) = three.rows("partitions", "t")
    assert row["ends"] == {"1": 7, "2": 7, "3": 7}
    assert row["lag"] == {"1": 0, "2": 0, "3": 0}
    assert row["high_watermark"] == 7
    assert sorted(row["isr"]) == [1, 2, 3]
    follower = next(node for node in (1, 2, 3) if node != row["leader"])
    three.kill(follower)
    (row,) = three.rows("partitions", "t:0")
    assert sorted(row["ends"]) == sorted(str(node) for node in three.up)
    assert "1:7" in three("partitions", "t", "-o", "table").text or follower == 1


def test_a_follower_tells_its_end_only_to_who_asks_any_replica(three: Cluster) -> None:
    three("create", "t", "-r", 3)
    three.produce("t", 3)
    leader = three.rows("partitions", "t")[0]["leader"]
    follower = next(node for node in three.up if node != leader)
    rows = [{"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}]
    body = {"isolation_level": 0, "topics": [{"name": "t", "partitions": rows}]}
    with Peer(three.up[follower].server.address) as peer:
        codes = {}
        for who in (-1, -2):
            answer = peer.ask(LIST_OFFSETS, 7, {"replica_id": who, **body})
            found = answer["topics"][0]["partitions"][0]
            codes[who] = found["error_code"], found["offset"]
    assert codes == {-1: (ErrorCode.NOT_LEADER_OR_FOLLOWER, -1), -2: (0, 3)}


def test_the_nodes_are_listed_with_their_addresses(three: Cluster) -> None:
    rows = three.rows("nodes")
    assert [row["address"] for row in rows] == [
        f"127.0.0.1:{node.server.address[1]}" for node in three.up.values()
    ]
    assert [row["notes"] for row in rows].count("controller") == 1


# ---- topics ----


def test_a_topic_is_created_on_three_nodes_and_deleted(three: Cluster) -> None:
    assert three.rows("create", "t", "-p", 2, "--replication-factor", 3) == [
        {"topic": "t", "partitions": 2, "replication_factor": 3, "min_insync_replicas": 1}
    ]
    assert "with 2 every record has two" in three("create", "u", "-o", "table").text
    assert "exists in the cluster" in three("create", "t", code=3).err
    assert "4 replicas need 4 nodes" in three("create", "v", "-r", 4, code=1).err
    assert "did you mean" in three("create", "v", "-c", "retention.sm=1", code=1).err
    asked = three("delete", "t", code=7)
    assert asked.rows == [{"topic": "t", "partitions": 2, "deleted": False}]
    assert "--yes" in asked.err
    assert three.rows("delete", "t", "--yes")[0]["deleted"] is True
    assert "no topic 't'" in three("partitions", "t", code=2).err
    three("create", "t")


def test_topic_create_points_to_the_cluster(command: Command) -> None:
    refused = command("topic", "create", "t", "--replication-factor", 3, code=1)
    assert "`logstore cluster create t --replication-factor 3`" in refused.err
    assert not command.store.exists()
    command("topic", "create", "t", "--replication-factor", 1)


# ---- leaders ----


def test_the_preferred_leader_is_elected(three: Cluster) -> None:
    three("create", "t", "-r", 3)
    first = three.rows("partitions", "t")[0]["replicas"][0]
    assert three.rows("elect", "t")[0]["outcome"] == "leads already"
    three.kill(first)
    wait_until(lambda: first not in three.in_sync("t"))
    (row,) = three.rows("elect", "t:0", code=3)
    assert row["outcome"] == f"node {first} is not alive and in sync"
    three.start(first)
    wait_until(lambda: first in three.in_sync("t"))
    (row,) = three.rows("elect", "t", "--preferred")
    assert (row["outcome"], row["after"].split("@")[0]) == ("done", str(first))
    assert row["before"] != row["after"]


def test_an_unclean_election_shows_the_loss_before_it_is_accepted(three: Cluster) -> None:
    three("create", "t", "-r", 2)
    (row,) = three.rows("partitions", "t")
    leader, follower = row["replicas"]
    assert "has a leader" in three("elect", "t", "--unclean", follower, "--yes", code=3).err
    three.produce("t", 3)
    three.kill(follower)
    wait_until(lambda: three.in_sync("t") == {leader})
    three.produce("t", 5)
    three.kill(leader)
    three.start(follower)
    outside = next(node for node in (1, 2, 3) if node not in (leader, follower))
    assert "no replica" in three("elect", "t", "--unclean", outside, code=2).err
    shown = three("elect", "t", "--unclean", follower, code=7)
    assert shown.rows == [
        {"topic": "t", "partition": 0, "node": follower, "last_epoch": 0, "end": 3, "cut": 0,
         "elected": True}
    ]  # fmt: skip
    assert "are lost" in shown.err
    assert three.rows("status", "--offline", code=3)
    (done,) = three.rows("elect", "t", "--unclean", follower, "--yes")
    assert (done["before"], done["outcome"]) == ("none", "done")
    assert three.rows("status", "--offline") == []
    assert "not both" in three("elect", "t", "--preferred", "--unclean", 1, code=1).err


def test_the_controller_moves(three: Cluster) -> None:
    (before,) = three.rows("controller")
    assert three("controller", "--move", code=7).rows == [before]
    (after,) = three.rows("controller", "--move", "--yes")
    assert after["epoch"] == before["epoch"] + 1
    assert after["controller"] in three.up


# ---- moving ----


def test_replicas_move_to_other_nodes(three: Cluster) -> None:
    three("create", "t", "-r", 2)
    three.produce("t", 9)
    (row,) = three.rows("partitions", "t")
    spare = next(node for node in (1, 2, 3) if node not in row["replicas"])
    move = f"t:0={spare},{row['replicas'][0]}"
    (asked,) = three.rows("reassign", move, "--dry-run", code=7)
    assert (asked["before"], asked["state"]) == (row["replicas"], "not moved")
    assert three.rows("partitions", "t")[0]["replicas"] == row["replicas"]
    assert three.rows("reassign", move, "--verify", code=3)[0]["state"] == "not moved"
    (done,) = three.rows("reassign", move)
    assert done["state"] == "done"
    assert three.rows("reassign", move, "--verify")[0]["state"] == "done"
    (after,) = three.rows("partitions", "t")
    assert after["replicas"] == [spare, row["replicas"][0]]
    assert after["ends"][str(spare)] == 9
    assert three.rows("reassign", move)[0]["state"] == "done"
    assert three.rows("reassign", move, "--cancel")[0]["cancelled"] is False


def test_a_move_to_a_dead_node_waits_and_can_be_cancelled(three: Cluster) -> None:
    three("create", "t", "-r", 2)
    home, dead = three.rows("partitions", "t")[0]["replicas"]
    spare = next(node for node in (1, 2, 3) if node not in (home, dead))
    three.kill(dead)
    wait_until(lambda: dead not in three.in_sync("t"))
    move = f"t:0={spare},{dead}"
    late = three("reassign", move, "--timeout", "0.5", code=5)
    assert late.rows[0]["state"] == "moving"
    assert "still moving after 0.5 s" in late.err
    assert three.rows("reassign", move, "--verify", code=3)[0]["state"] == "moving"
    assert three.rows("status")[0]["moving"] == 1
    assert three.rows("reassign", move, "--cancel")[0]["cancelled"] is True
    (row,) = three.rows("partitions", "t")
    assert (sorted(row["replicas"]), row["adding"]) == (sorted([home, dead]), [])


def test_a_move_with_a_throttle_ends_without_one(three: Cluster) -> None:
    three("create", "t", "-r", 2)
    three.produce("t", 9)
    (row,) = three.rows("partitions", "t")
    home, dead = row["replicas"]
    spare = next(node for node in (1, 2, 3) if node not in row["replicas"])
    three.kill(dead)
    wait_until(lambda: dead not in three.in_sync("t"))
    image = three.up[home].node.image

    def rates() -> set[str | None]:
        return {image.configs.get(("brokers", str(node)), ({}, 0))[0].get(
            "leader.replication.throttled.rate") for node in (1, 2, 3)}  # fmt: skip

    move = f"t:0={spare},{dead}"
    three("reassign", move, "--throttle", "1MiB", "--no-wait")
    wait_until(lambda: rates() == {"1048576"})
    listed = image.configs["topics", "t"][0]
    assert listed["follower.replication.throttled.replicas"] == f"0:{spare}"
    three("reassign", move, "--throttle", "2000", "--no-wait")
    wait_until(lambda: rates() == {"2000"})
    three("reassign", move, "--cancel")
    wait_until(lambda: rates() == {None})
    assert "follower.replication.throttled.replicas" not in image.configs["topics", "t"][0]
    assert three.rows("reassign", f"t:0={spare},{home}", "--throttle", "10MB")[0]["state"] == "done"
    wait_until(lambda: rates() == {None})


def test_a_file_of_kafkas_format_is_read_and_printed(three: Cluster, tmp_path: Path) -> None:
    three("create", "t", "-p", 6, "-r", 2)
    printed = three("plan", "--nodes", "1,2")
    plan = json.loads(printed.text)
    assert plan["version"] == 1
    assert all(set(row["replicas"]) == {1, 2} for row in plan["partitions"])
    assert "replicas are copied" in printed.err
    path = tmp_path / "plan.json"
    path.write_text(printed.text)
    three("reassign", path, "--timeout", 30)
    rows = three.rows("partitions", "t")
    assert all(set(row["replicas"]) == {1, 2} for row in rows)
    firsts = [row["replicas"][0] for row in rows]
    assert (firsts.count(1), firsts.count(2)) == (3, 3)
    assert json.loads(three("plan", "t", "--nodes", "2,1").text)["partitions"] == []
    path.write_text('{"partitions": [{"topic": "t"}]}')
    assert "KeyError: 'partition'" in three("reassign", path, code=1).err
    assert "nodes [7] are not registered" in three("plan", "--nodes", "1,7", code=2).err
    assert "2 replicas need 2 nodes" in three("plan", "--nodes", "1", code=1).err
    assert "such as 1,2,4" in three("plan", "--nodes", "a", code=1).err


def test_a_node_is_decommissioned(three: Cluster) -> None:
    three("create", "t", "-p", 6, "-r", 2)
    assert len(three.rows("decommission", 3, code=7)) == 4
    moved = three.rows("decommission", 3, "--yes")
    assert {row["state"] for row in moved} == {"done"}
    assert {node["node"]: node["replicas"] for node in three.rows("nodes")} == {1: 6, 2: 6, 3: 0}
    assert "has no replicas" in three("decommission", 3, "--yes").err
    assert "no node 9" in three("decommission", 9, code=2).err
    three.kill(3)
    wait_until(lambda: len(three.rows("nodes")) == 2)
    words = three("decommission", 2, "--yes", code=1).err
    assert "2 replicas need 2 nodes; there are 1: start another node first, or reassign" in words


def test_what_was_moved_away_is_kept_as_a_stray(three: Cluster, command: Command) -> None:
    three("create", "t", "-r", 1)
    three.produce("t", 3)
    (home,) = three.rows("partitions", "t")[0]["replicas"]
    away = next(node for node in (1, 2, 3) if node != home)
    three("reassign", f"t:0={away}")
    store = three.path / str(home)
    wait_until(lambda: list(store.glob("t-0.*-stray")))
    (row,) = command("cluster", "strays", "-s", store).rows
    assert (row["topic"], row["partition"], row["deleted"]) == ("t", 0, False)
    assert row["size_bytes"] > 0
    assert command("cluster", "strays", "-s", store, "--delete", code=7).rows == [row]
    assert (
        "already open" in command("cluster", "strays", "-s", store, "--delete", "--yes", code=3).err
    )
    three.kill(home)
    assert command("cluster", "strays", "-s", store, "--delete", "--yes").rows[0]["deleted"] is True
    assert not list(store.glob("t-0.*-stray"))


def test_doctor_knows_a_node_and_advises(command: Command, tmp_path: Path) -> None:
    with logstore.Cluster(tmp_path / "c", nodes=2) as inside:
        inside.create_topic("t", replication_factor=2)
    rows = command("doctor", "--no-fsync", "-s", tmp_path / "c" / "node-1").rows
    (found,) = [row for row in rows if row["check"] == "cluster"]
    assert "node-1 of the cluster in" in found["found"]
    assert "min.insync.replicas=2" in found["advice"]
    (risky,) = [row for row in rows if row["check"] == "topic t"]
    assert (risky["status"], risky["found"]) == ("warn", "min.insync.replicas is 1")
    command("topic", "create", "x")
    assert not [row for row in command("doctor", "--no-fsync").rows if row["check"] == "cluster"]


def test_internal_topics_of_a_cluster_that_has_grown(cluster: Cluster, command: Command) -> None:
    cluster.start(1)
    with Peer(cluster.up[1].server.address) as peer:  # makes __consumer_offsets, with one replica
        asked = {"key_type": 0, "coordinator_keys": ["g"]}
        wait_until(
            lambda: peer.ask(FIND_COORDINATOR, 4, asked)["coordinators"][0]["error_code"] == 0
        )
    cluster.start(2, 3)
    wait_until(lambda: len(cluster.up[1].node.image.nodes) == 3)
    page_of(cluster, 1)  # writes the side file of `logstore serve`

    def warned() -> list[dict[str, Any]]:
        rows = command("doctor", "--no-fsync", "-s", cluster.path / "1").rows
        return [row for row in rows if row["check"] == f"topic {OFFSETS}"]

    (row,) = warned()
    assert (row["status"], row["found"]) == ("warn", "1 of 3 nodes have a replica")
    assert f"`logstore cluster plan {OFFSETS} --nodes 1,2,3 -r 3 > plan.json`" in row["advice"]
    plan = cluster("plan", OFFSETS, "--nodes", "1,2,3", "-r", 3)
    (cluster.path / "plan.json").write_text(plan.text)
    cluster("reassign", cluster.path / "plan.json")
    assert warned() == []
    image = cluster.up[1].node.image
    assert {len(state.isr) for key, state in image.states.items() if key[0] == OFFSETS} == {3}


# ---- mistakes ----


@pytest.mark.parametrize(
    ("line", "code", "answer"),
    [
        ("partitions nope", 2, "no topic 'nope' in the cluster"),
        ("partitions orers", 2, "did you mean 'orders'?"),
        ("partitions orders:7", 2, "no partition 7"),
        ("elect orders:x", 1, "TOPIC:NUMBER"),
        ("reassign orders:0=1,1", 1, "different nodes"),
        ("reassign orders:0=9", 1, "nodes [9] are not registered"),
        ("reassign orders:0=1 orders:0=2", 1, "named twice"),
        ("reassign orders=1", 1, "TOPIC:PARTITION=NODE,NODE"),
        ("reassign orders:5=1", 2, "no partition 5"),
        ("reassign orders:0=1 --verify --cancel", 1, "only one of"),
        ("reassign orders:0=1 --throttle fast", 1, "such as 10MiB, not 'fast'; leave it out"),
        ("reassign orders:0=1 --throttle 0", 1, "at least 1 byte per second"),
        ("reassign orders:0=1 --throttle 1MiB --cancel", 1, "it ends by itself"),
        ("reassign no-such-file", 2, "no-such-file"),
        ("stats", 1, "did you mean 'status'?"),
    ],
)
def test_a_wrong_turn_changes_nothing(cluster: Cluster, line: str, code: int, answer: str) -> None:
    cluster.start(1)
    cluster("create", "orders")
    before = cluster.rows("partitions", "orders")
    assert answer in cluster(*line.split(), code=code).err
    assert cluster.rows("partitions", "orders") == before


def test_a_tree_without_a_cluster_says_how_one_begins(cluster: Cluster) -> None:
    assert "`logstore serve --node 1" in cluster("status", code=2).err


def test_the_zookeeper_has_to_be_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGSTORE_ZOOKEEPER", raising=False)
    assert "$LOGSTORE_ZOOKEEPER" in command("cluster", "status", code=1).err


def test_a_zookeeper_that_is_not_there(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "CONNECT_SECONDS", 0.5)
    monkeypatch.setenv("LOGSTORE_ZOOKEEPER", "127.0.0.1:1/c")
    assert "do they run" in command("cluster", "status", code=5).err


def test_without_kazoo_the_package_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kazoo", None)
    refused = command("cluster", "status", "--zookeeper", "127.0.0.1:1", code=1)
    assert 'pip install "logstore-engine[zookeeper]"' in refused.err


def test_the_store_of_a_stopped_node_is_written_only_after_it_has_left(
    cluster: Cluster, command: Command, tmp_path: Path
) -> None:
    cluster.start(1)
    cluster("create", "orders")
    cluster.produce("orders", 3)
    cluster.kill(1)
    store = tmp_path / "nodes" / "1"
    for line in (f"-s {store} topic create rogue", f"-s {store} serve --listen 127.0.0.1:0"):
        assert "is node 1 of the cluster" in command(*line.split(), code=3).err
    assert command("cluster", "leave", "-s", store, code=7).rows[0]["left"] is False
    assert command("cluster", "leave", "-s", store, "--yes").rows[0]["left"] is True
    assert "is no node" in command("cluster", "leave", "-s", store, "--yes", code=2).err
    command("-s", store, "topic", "create", "mine")
    assert command("-s", store, "read", "orders", "--count").out == b"3\n"


# ---- the page ----


def page_of(cluster: Cluster, number: int) -> dict[str, Any]:
    """What the page of a node's directory has about its cluster."""
    path = cluster.path / str(number)
    host, port = cluster.up[number].server.address
    listeners = {"PLAINTEXT": f"{host}:{port}"}
    about = {"pid": os.getpid(), "listeners": listeners, "node": number, "zookeeper": "the:1/tree"}
    name_listener(path, about)
    with logstore.open(path, readonly=True) as store, UiServer(store) as page:
        serving = threading.Thread(target=page.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        try:
            with urllib.request.urlopen(f"{page.url}api/cluster", timeout=30) as answer:
                return dict(json.load(answer)["cluster"])
        finally:
            page.shutdown()
            serving.join()


def test_the_page_shows_nodes_and_under_replicated_partitions(three: Cluster) -> None:
    three("create", "t", "-p", 2, "-r", 3, "-c", "min.insync.replicas=2")
    three("create", "alone", "-r", 1)
    wait_until(lambda: len(three.up[1].node.image.states) == 3)
    (victim,) = three.in_sync("alone")
    seen_by = 1 if victim != 1 else 2
    wait_until(lambda: len(three.up[seen_by].node.image.states) == 3)
    found = page_of(three, seen_by)
    assert {each["node"]: each["replicas"] for each in found["nodes"]} == {
        number: 3 if number == victim else 2 for number in (1, 2, 3)
    }
    assert all(each["alive"] for each in found["nodes"])
    assert found["controller"] in (1, 2, 3)
    three.kill(victim)
    image = three.up[seen_by].node.image
    wait_until(lambda: all(victim not in state.isr for state in list(image.states.values())))
    found = page_of(three, seen_by)
    assert (found["under_replicated"], found["offline"]) == (3, 1)
    (dead,) = (each for each in found["nodes"] if not each["alive"])
    assert (dead["node"], dead["leads"], dead["out_of_sync"]) == (victim, 0, 3)
    # Those without a leader first.
    rows = [(each["topic"], each["leader"] >= 0) for each in found["partitions"]]
    assert rows == [("alone", False), ("t", True), ("t", True)]


def test_the_page_of_a_node_that_does_not_answer(three: Cluster) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        host, port = closed.getsockname()
        found = cluster_of({"node": 1, "listeners": {"PLAINTEXT": f"{host}:{port}"}})
    assert found is not None
    assert str(port) in found["error"]
    assert cluster_of({"listeners": {"PLAINTEXT": f"{host}:{port}"}}) is None
    assert cluster_of(None) is None


def test_no_zookeeper_is_one_message_and_no_line_of_the_client(tmp_path: Path) -> None:
    """In a process of its own: here pytest has handlers for every logger."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        host, port = closed.getsockname()
        script = (
            "from logstore.cli import main, observing\n"
            "observing.CONNECT_SECONDS = 0.5\n"
            f"raise SystemExit(main(['cluster', 'status', '--zookeeper', '{host}:{port}/x']))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE,
            cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert f"no ZooKeeper server of {host}:{port}/x answered within" in line
