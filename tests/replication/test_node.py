"""One node: its directory, its registration, and what it does with the partitions of its store."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import logstore
from logstore.errors import ClusterMemberError, ClusterMismatchError, NodeIdInUseError
from logstore.opening import open_member
from logstore.replication.cluster import Cluster
from logstore.replication.config import NodeConfig
from logstore.replication.embedded import EmbeddedTree
from logstore.replication.hosting.local_peers import LocalNetwork
from logstore.replication.machines.image import Registration, broker_path
from logstore.replication.metadata import Create
from logstore.replication.node import Node
from logstore.store.store import set_member
from tests.kit import node_threads
from tests.replication.cluster_kit import SETTINGS, eventually, running, values


def node_of(path: Path, tree: EmbeddedTree, node_id: int = 1, **settings: int) -> Node:
    network = LocalNetwork()
    config = NodeConfig.of({**SETTINGS, **{k.replace("_", "."): v for k, v in settings.items()}})
    node = Node(
        open_member(path, durability="os"),
        node_id=node_id,
        metadata=tree.session,
        peers=network.peers(node_id),
        config=config,
    )
    network.members[node_id] = node
    return node


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_the_topics_of_a_store_that_was_alone_become_topics_of_the_new_cluster(tmp_path):
    with logstore.open(tmp_path / "store") as store:
        topic = store.create_topic("orders", 2, config={"min.insync.replicas": 1})
        topic[0].become_leader(7)
        for number in range(5):
            topic[0].append(b"%d" % number)
        topic_id = topic.id
    with EmbeddedTree(tmp_path / "tree") as tree, node_of(tmp_path / "store", tree) as node:
        node.start()
        eventually(lambda: len(node.leads()) == 2, "it leads what it had")
        state = node.leader_of(("orders", 0))
        assert state is not None
        assert state.leader_epoch > 7
        log = node.store["orders"][0]
        assert node.store["orders"].id == topic_id
        eventually(lambda: log.high_watermark == 5)
        assert [record.value for record in log.scan()] == [b"%d" % number for number in range(5)]
        assert not node.store.topic_changes.strays()


def test_a_directory_of_another_cluster_is_refused_and_nothing_is_changed(tmp_path):
    with running(tmp_path / "one", nodes=1) as cluster:
        cluster.create_topic("orders").append(b"x")
    with EmbeddedTree() as tree, running(tmp_path / "two", nodes=1) as other:
        other.create_topic("more")
        node = Node(
            open_member(tmp_path / "one" / "node-1", durability="os"),
            node_id=1,
            metadata=other._tree.session if other._tree else tree.session,
            peers=LocalNetwork().peers(1),
        )
        with pytest.raises(ClusterMismatchError):
            node.start()
    with running(tmp_path / "one", nodes=1) as cluster:
        assert values(cluster, "orders") == [b"x"]


def test_a_directory_of_another_node_is_refused(tmp_path):
    with running(tmp_path / "data", nodes=2) as cluster:
        cluster.create_topic("orders").append(b"x")
    (tmp_path / "data" / "node-2").rename(tmp_path / "data" / "node-3")
    with (
        running(tmp_path / "data", nodes=1) as cluster,
        pytest.raises(ClusterMismatchError, match=r"start it as node 2 \(--node 2, node.id=2\)"),
    ):
        cluster.start(3)


def test_a_store_that_was_node_1_does_not_become_node_2_of_a_new_cluster(tmp_path):
    with logstore.open(tmp_path / "store") as store:
        store.create_topic("orders")[0].append(b"x")
    with EmbeddedTree() as tree:
        with pytest.raises(ClusterMismatchError, match="node 2"):
            node_of(tmp_path / "store", tree, node_id=2).start()
        session = tree.session()
        session.start(["/"], lambda path: None, lambda state: None)
        assert session.read("/cluster/id") is None


def test_an_id_that_another_process_has_is_refused_after_two_time_outs(tmp_path):
    with EmbeddedTree() as tree:
        other = tree.session()
        other.start(["/"], lambda path: None, lambda state: None)
        held = Registration(1, 0, host="elsewhere", port=9092, boot="of another machine")
        done = threading.Event()
        other.commit([Create(broker_path(1), held.encode(), True)], lambda outcome: done.set())
        assert done.wait(10)
        node = node_of(tmp_path / "store", tree, zookeeper_session_timeout_ms=100)
        with pytest.raises(NodeIdInUseError) as caught:
            node.start()
        assert (caught.value.node, caught.value.host) == (1, "elsewhere:9092")
        other.close()
    assert not node_threads()


def test_a_partition_that_is_not_assigned_is_set_aside_and_kept(tmp_path):
    with running(tmp_path / "data", nodes=3) as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2]})
        topic.append(b"x")
        cluster.kill(2)
        with cluster.reassign({("orders", 0): [1, 3]}) as moving:
            moving.wait(20)
        cluster.start(2)
        eventually(lambda: not (tmp_path / "data" / "node-2" / "orders-0").exists())
        (stray,) = cluster.nodes[2].store.topic_changes.strays()
        assert (stray.topic, stray.number) == ("orders", 0)


def test_close_during_appends_answers_all_of_them_and_leaves_no_thread(tmp_path):
    cluster = Cluster(tmp_path / "data", durability="os", config=SETTINGS, timeout=5)
    topic = cluster.create_topic("orders", config={"min.insync.replicas": 2})
    ended: list[type[BaseException]] = []

    def work() -> None:
        try:
            while True:
                topic.append(b"x")
        except logstore.LogStoreError as error:
            ended.append(type(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: topic[0].ends[1] > 20)
    cluster.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(ended) == 3
    assert not node_threads()
    with running(tmp_path / "data") as again:
        assert len(values(again, "orders")) > 20


def test_a_member_is_opened_as_a_node_or_readonly_only(tmp_path):
    """What is appended without the cluster would be cut at the next start of the node."""
    with running(tmp_path / "data", nodes=1) as cluster:
        cluster.create_topic("orders").append(b"x")
    path = tmp_path / "data" / "node-1"
    with pytest.raises(ClusterMemberError, match="cluster leave") as caught:
        logstore.open(path)
    assert caught.value.node == 1
    with logstore.open(path, readonly=True) as store:
        assert store["orders"][0].end_offset == 1
    file = path / "logstore.member"
    whole = file.read_bytes()
    for damaged in (b"", b"{}", whole[:-5], flipped(whole, 3)):
        file.write_bytes(damaged)
        with pytest.raises(ClusterMemberError):
            logstore.open(path)
    with running(tmp_path / "data", nodes=1) as cluster:
        assert values(cluster, "orders") == [b"x"]
    assert file.read_bytes() == whole
    with open_member(path) as store:
        set_member(store, None)
    with logstore.open(path) as store:
        assert store["orders"][0].append(b"y") == 1


def test_a_member_refuses_an_empty_tree(tmp_path):
    """A wrong chroot: the node would lead its partitions alone, and acknowledge records."""
    with EmbeddedTree(tmp_path / "tree") as tree, node_of(tmp_path / "store", tree) as node:
        node.start()
    with EmbeddedTree() as other:
        with pytest.raises(ClusterMemberError, match="empty"):
            node_of(tmp_path / "store", other).start()
        session = other.session()
        session.start(["/"], lambda path: None, lambda state: None)
        assert session.read("/cluster/id") is None
    with EmbeddedTree(tmp_path / "tree") as tree, node_of(tmp_path / "store", tree) as node:
        node.start()
