"""Three nodes in one process: appends, fail-over, restarts, elections, reassignment, deletion."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from logstore import Consumer, KafkaServer, Producer
from logstore.config import ConfigError
from logstore.errors import (
    ClosedError,
    IndeterminateAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    TopicExistsError,
    UnknownTopicError,
)
from logstore.replication.cluster import Cluster
from logstore.replication.hosting.local_peers import LocalNetwork
from tests.kit import node_threads
from tests.replication.cluster_kit import (
    assert_same_logs,
    eventually,
    in_sync,
    raw_log,
    running,
    values,
)

TWO = {"min.insync.replicas": 2}


@pytest.fixture(params=[True, False], ids=["direct", "batched"])
def network(request) -> LocalNetwork:
    """Fetches in one process, and as they are over TCP: one request for all partitions."""
    return LocalNetwork(direct=request.param)


@pytest.fixture
def cluster(tmp_path: Path, network):
    with running(tmp_path / "data", network=network) as made:
        yield made


# ---- appending ----


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_acks_all_returns_when_every_replica_in_sync_has_the_record(tmp_path, durability, network):
    with running(tmp_path / "data", durability=durability, network=network) as cluster:
        topic = cluster.create_topic("orders", replication_factor=3, config=TWO)
        for number in range(20):
            position = topic.append(b"%d" % number)
            assert position == ("orders", 0, number)
            assert set(cluster.partition("orders", 0).ends.values()) == {number + 1}
        assert values(cluster, "orders") == [b"%d" % number for number in range(20)]
        assert_same_logs(cluster, "orders")
        if durability == "fsync":
            for node in cluster.nodes.values():
                assert node.store["orders"][0].durable_offset == 20


def test_records_of_one_key_are_in_one_partition_and_in_order(cluster):
    topic = cluster.create_topic("orders", 4)
    placed = {topic.append(b"%d" % number, key=b"alice").partition for number in range(10)}
    assert len(placed) == 1
    assert values(cluster, "orders", placed.pop()) == [b"%d" % number for number in range(10)]


def test_extend_returns_one_position_for_each_record(cluster):
    topic = cluster.create_topic("orders", 2)
    positions = topic.extend([b"a", b"b", b"c"], partition=1)
    assert [each[1:] for each in positions] == [(1, 0), (1, 1), (1, 2)]
    assert values(cluster, "orders", 1) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("acks", [0, 1, "all", -1])
def test_every_acks_appends(cluster, acks):
    topic = cluster.create_topic("orders")
    topic.append(b"x", acks=acks)
    eventually(lambda: values(cluster, "orders") == [b"x"])


def test_other_acks_are_refused_and_nothing_is_appended(cluster):
    topic = cluster.create_topic("orders")
    with pytest.raises(ConfigError):
        topic.append(b"x", acks=2)  # type: ignore[arg-type]
    assert values(cluster, "orders") == []


def test_an_append_that_the_log_refuses_leaves_the_partition_usable(cluster):
    topic = cluster.create_topic("orders", config={"max.message.bytes": 1000})
    with pytest.raises(ValueError, match="1000"):
        topic.append(b"x" * 5000)
    assert topic.append(b"small").offset == 0


def test_appends_of_many_threads_are_all_there_once(cluster):
    topic = cluster.create_topic("orders", config=TWO)

    def work(name: int) -> None:
        for number in range(50):
            topic.append(b"%d.%d" % (name, number))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = {b"%d.%d" % (name, number) for name in range(4) for number in range(50)}
    found = values(cluster, "orders")
    assert len(found) == 200
    assert set(found) == wanted
    assert_same_logs(cluster, "orders")


def test_readers_do_not_see_records_above_the_high_watermark(cluster):
    topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
    topic.append(b"committed")
    for node in (2, 3):
        cluster.network.cut.add(frozenset((1, node)))
    with pytest.raises(IndeterminateAppendError) as caught:
        topic.append(b"not committed", timeout=0.1)
    assert caught.value.offsets == range(1, 2)
    assert caught.value.leader_epoch == 0
    leader = cluster.nodes[1].store["orders"][0]
    assert (leader.high_watermark, leader.end_offset) == (1, 2)
    assert [record.value for record in leader.scan()] == [b"committed"]


# ---- fail-over ----


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_killed_leader_fails_over_and_nothing_is_lost(tmp_path, durability, network):
    with running(tmp_path / "data", durability=durability, network=network) as cluster:
        topic = cluster.create_topic("orders", config=TWO)
        wanted = [b"%d" % number for number in range(30)]
        for value in wanted:
            topic.append(value)
        old = cluster.partition("orders", 0).leader
        cluster.kill(old)
        topic.append(b"after")
        partition = cluster.partition("orders", 0)
        assert partition.leader not in (old, -1)
        assert partition.leader_epoch >= 1
        assert values(cluster, "orders") == [*wanted, b"after"]
        cluster.start(old)
        in_sync(cluster, "orders")
        assert_same_logs(cluster, "orders")


def test_every_node_is_killed_in_turn_under_load_and_nothing_is_lost(tmp_path, network):
    with running(tmp_path / "data", network=network) as cluster:
        topic = cluster.create_topic("orders", 2, config=TWO)
        acknowledged: list[bytes] = []
        done = threading.Event()

        def work() -> None:
            number = 0
            while not done.is_set():
                value = b"%d" % number
                number += 1
                try:
                    topic.append(value, key=value)
                except (IndeterminateAppendError, NotEnoughReplicasError, NotLeaderError):
                    continue
                acknowledged.append(value)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for node in (1, 2, 3, 1, 2, 3):
                count = len(acknowledged)
                eventually(lambda count=count: len(acknowledged) > count + 10)
                cluster.kill(node)
                count = len(acknowledged)
                eventually(lambda count=count: len(acknowledged) > count + 10)
                cluster.start(node)
                for number in range(2):
                    in_sync_count(cluster, number, 3)
        finally:
            done.set()
            thread.join()
        for number in range(2):
            assert_same_logs(cluster, "orders", number)
        found = [*values(cluster, "orders", 0), *values(cluster, "orders", 1)]
        assert set(acknowledged) <= set(found)
        counted = [value for value in found if found.count(value) > 1]
        assert not counted  # nothing is there twice


def in_sync_count(cluster: Cluster, number: int, count: int) -> None:
    eventually(lambda: len(cluster.partition("orders", number).isr) == count, "back in sync")


def test_the_tail_of_a_deposed_leader_is_cut(tmp_path):
    with running(tmp_path / "data") as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
        topic.append(b"committed")
        for node in (2, 3):
            cluster.network.cut.add(frozenset((1, node)))
        for number in range(3):
            topic.append(b"only at node 1: %d" % number, acks=1)
        cluster.kill(1)
        cluster.network.cut.clear()
        topic.append(b"in the next epoch")
        cluster.start(1)
        in_sync(cluster, "orders")
        assert values(cluster, "orders") == [b"committed", b"in the next epoch"]
        assert_same_logs(cluster, "orders")


def test_an_append_that_waits_when_its_leader_dies_is_indeterminate(tmp_path):
    with running(tmp_path / "data") as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
        for node in (2, 3):
            cluster.network.cut.add(frozenset((1, node)))
        raised: list[BaseException] = []

        def work() -> None:
            try:
                topic.append(b"x")
            except IndeterminateAppendError as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        eventually(lambda: cluster.nodes[1].store["orders"][0].end_offset == 1)
        cluster.kill(1)
        thread.join()
        (error,) = raised
        assert isinstance(error, IndeterminateAppendError)
        assert (error.offsets, error.leader_epoch) == (range(1), 0)


def test_a_stopped_leader_moves_its_leaderships_first(cluster):
    topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
    topic.append(b"x")
    cluster.stop(1)
    partition = cluster.partition("orders", 0)
    assert partition.leader in (2, 3)
    assert values(cluster, "orders") == [b"x"]
    cluster.start(1)
    in_sync(cluster, "orders")


def test_fewer_replicas_than_the_minimum_refuse_acks_all_and_accept_acks_1(cluster):
    topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
    topic.append(b"a")
    cluster.kill(2)
    cluster.kill(3)
    eventually(lambda: len(cluster.partition("orders", 0).isr) == 1)
    with pytest.raises(NotEnoughReplicasError) as caught:
        topic.append(b"refused")
    assert (caught.value.isr, caught.value.minimum) == (1, 2)
    topic.append(b"b", acks=1)
    # The first that left could not miss a committed record; the second is in the ELR.
    assert len(cluster.partition("orders", 0).elr) == 1
    assert values(cluster, "orders") == [b"a"]
    cluster.start(2)
    eventually(lambda: values(cluster, "orders") == [b"a", b"b"], "committed with two in sync")
    assert cluster.partition("orders", 0).elr == ()


def test_a_follower_that_lags_leaves_the_in_sync_set_and_returns(cluster):
    topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
    topic.append(b"a")
    cluster.network.cut.add(frozenset((1, 3)))
    topic.append(b"b")  # waits until node 3 is out
    assert sorted(cluster.partition("orders", 0).isr) == [1, 2]
    cluster.network.cut.clear()
    in_sync(cluster, "orders")
    assert_same_logs(cluster, "orders")


def test_the_controller_fails_over(cluster):
    cluster.create_topic("a")
    old = cluster.status().controller
    cluster.kill(old)
    eventually(lambda: cluster.status().controller not in (old, -1))
    cluster.create_topic("b", replication_factor=2)
    cluster.start(old)
    assert sorted(cluster) == ["a", "b"]


def test_a_lost_session_ends_leading_and_the_node_registers_again(cluster):
    topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
    topic.append(b"a")
    node = cluster.nodes[1]
    session = node.membership.session
    assert session is not None
    session.expire()  # type: ignore[attr-defined]
    eventually(lambda: node.status()["broker_epoch"] == 1, "registered again")
    in_sync(cluster, "orders")
    topic.append(b"b")
    assert values(cluster, "orders") == [b"a", b"b"]


# ---- restarts ----


@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_whole_cluster_restarts_from_its_directory(tmp_path, end):
    with running(tmp_path / "data") as cluster:
        topic = cluster.create_topic("orders", 2, config=TWO)
        wanted = [b"%d" % number for number in range(10)]
        for value in wanted:
            topic.append(value, partition=0)
        cluster_id = cluster.image.cluster_id
        if end == "kill":
            for node in (1, 2, 3):
                cluster.kill(node)
    with running(tmp_path / "data") as cluster:
        assert cluster.image.cluster_id == cluster_id
        in_sync(cluster, "orders")
        assert values(cluster, "orders") == wanted
        cluster["orders"].append(b"after", partition=0)
        assert_same_logs(cluster, "orders")


def test_a_clean_restart_keeps_the_in_sync_set(tmp_path):
    with running(tmp_path / "data") as cluster:
        cluster.create_topic("orders", config=TWO).append(b"x")
    with running(tmp_path / "data", nodes=1) as cluster:
        state = cluster.image.states["orders", 0]
        assert len(state.isr) + len(state.elr) >= 1
        eventually(lambda: cluster.partition("orders", 0).leader == 1)
        assert values(cluster, "orders") == [b"x"] or state.min_isr == 2


def test_the_high_watermark_of_a_restarted_node_is_the_one_of_its_checkpoint(tmp_path):
    with running(tmp_path / "data") as cluster:
        topic = cluster.create_topic("orders", config=TWO)
        for number in range(5):
            topic.append(b"%d" % number)
    checkpoint = tmp_path / "data" / "node-1" / "replication-offset-checkpoint"
    rows = checkpoint.read_text().splitlines()
    watermark = int(next(row for row in rows if row.startswith("orders 0 ")).split()[2])
    assert 0 <= watermark <= 5


# ---- topics ----


def test_a_wrong_argument_is_refused_and_the_cluster_goes_on(cluster):
    """Also in the main thread, whose calls another thread makes."""
    topic = cluster.create_topic("orders", config=TWO)
    with pytest.raises(IndexError):
        cluster.elect("orders", 9)
    with pytest.raises(ConfigError):
        cluster.create_topic("more", config={"min.insync.replica": 2})
    with pytest.raises((IndexError, LookupError)):
        cluster.reassign({("orders", 9): [1]})
    assert topic.append(b"x") == ("orders", 0, 0)
    assert values(cluster, "orders") == [b"x"]


def test_a_topic_that_exists_is_refused(cluster):
    cluster.create_topic("orders")
    with pytest.raises(TopicExistsError):
        cluster.create_topic("orders")


def test_more_replicas_than_nodes_are_refused(cluster):
    with pytest.raises(ValueError, match="4 nodes"):
        cluster.create_topic("orders", replication_factor=4)
    assert "orders" not in cluster


def test_an_unknown_topic_is_named(cluster):
    with pytest.raises(UnknownTopicError):
        cluster["orders"]


def test_a_deleted_topic_is_gone_on_every_node_and_its_name_can_be_used_again(cluster):
    topic = cluster.create_topic("orders", config=TWO)
    topic.append(b"old")
    cluster.delete_topic("orders")
    for node in (1, 2, 3):
        directory = cluster.path / f"node-{node}" / "orders-0"
        eventually(lambda directory=directory: not directory.exists(), "the directory is deleted")
    eventually(lambda: not cluster.image.deleted, "no node has anything left")
    again = cluster.create_topic("orders", config=TWO)
    assert again.append(b"new").offset == 0
    assert values(cluster, "orders") == [b"new"]


def test_a_node_that_was_down_deletes_a_deleted_topic_when_it_starts(cluster):
    cluster.create_topic("orders").append(b"old")
    cluster.kill(3)
    cluster.delete_topic("orders")
    again = cluster.create_topic("orders", replication_factor=2)
    again.append(b"new")
    cluster.start(3)
    eventually(lambda: not cluster.image.deleted, "node 3 has deleted its part")
    assert not (cluster.path / "node-3" / "orders-0").exists()
    assert values(cluster, "orders") == [b"new"]


def test_partitions_are_added(cluster):
    topic = cluster.create_topic("orders", 1)
    cluster.create_partitions("orders", 3)
    assert len(topic) == 3
    assert topic.append(b"x", partition=2).offset == 0


def test_settings_reach_every_node(cluster):
    cluster.create_topic("orders", config={"segment.bytes": 1 << 20})
    cluster.alter_topic("orders", {"segment.bytes": 1 << 21, "min.insync.replicas": 2})
    for node in cluster.nodes.values():
        eventually(lambda node=node: node.store["orders"].config.segment_bytes == 1 << 21)
    eventually(lambda: cluster.image.states["orders", 0].min_isr == 2)


# ---- moving ----


def test_a_reassignment_copies_the_records_and_deletes_nothing_before(tmp_path):
    with running(tmp_path / "data", nodes=4) as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
        for number in range(10):
            topic.append(b"%d" % number)
        with cluster.reassign({("orders", 0): [4, 3, 2]}) as moving:
            moving.wait(timeout=20)
        partition = cluster.partition("orders", 0)
        assert set(partition.isr) == {2, 3, 4}
        assert partition.leader in (2, 3, 4)
        assert values(cluster, "orders") == [b"%d" % number for number in range(10)]
        assert raw_log(cluster, 4, "orders") == raw_log(cluster, 2, "orders")
        eventually(lambda: not (cluster.path / "node-1" / "orders-0").exists())
        topic.append(b"after")


def test_a_preferred_election_returns_the_leadership(cluster):
    topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
    topic.append(b"x")
    cluster.stop(1)
    cluster.start(1)
    in_sync(cluster, "orders")
    assert cluster.partition("orders", 0).leader != 1
    cluster.elect("orders", 0)
    eventually(lambda: cluster.partition("orders", 0).leader == 1)


def test_an_unclean_election_loses_records_only_when_it_is_asked_for(cluster):
    topic = cluster.create_topic("orders", assignment={0: [1, 2]}, config=TWO)
    topic.append(b"both")
    cluster.network.cut.add(frozenset((1, 2)))
    cluster.kill(2)
    eventually(lambda: cluster.partition("orders", 0).isr == (1,))
    cluster.alter_topic("orders", {"min.insync.replicas": 1})
    eventually(lambda: cluster.image.states["orders", 0].min_isr == 1)
    topic.append(b"only node 1")
    cluster.kill(1)
    cluster.network.cut.clear()
    cluster.start(2)
    eventually(lambda: cluster.partition("orders", 0).leader == -1)
    with pytest.raises(NotLeaderError):
        topic.append(b"x", timeout=0.05)
    cluster.elect("orders", 0, kind="unclean", node=2)
    assert values(cluster, "orders") == [b"both"]
    cluster.start(1)
    in_sync(cluster, "orders", count=2)
    assert values(cluster, "orders") == [b"both"]
    rows = cluster.metrics()
    assert rows[1]["truncated_records_total"] == 1
    assert sum(row["unclean_leader_elections_total"] for row in rows.values()) == 1


def test_an_unclean_election_is_refused_if_nothing_has_to_be_lost(cluster):
    cluster.create_topic("orders", assignment={0: [1, 2]})
    with pytest.raises(ConfigError, match="orders-0 has a leader, node 1: nothing has to be lost"):
        cluster.elect("orders", 0, kind="unclean", node=2)
    cluster.kill(1)
    cluster.kill(2)
    eventually(lambda: cluster.partition("orders", 0).leader == -1)
    for node in (2, 3, 9):
        words = f"node {node} is not alive, or has no replica of orders-0"
        with pytest.raises(ConfigError, match=words):
            cluster.elect("orders", 0, kind="unclean", node=node)


# ---- mistakes of a caller ----


def test_exist_ok_takes_a_topic_as_it_is(cluster):
    topic = cluster.create_topic("orders", 2, exist_ok=True)
    assert cluster.create_topic("orders", 5, exist_ok=True) is topic
    assert len(topic) == 2
    with pytest.raises(TopicExistsError, match="exist_ok=True takes it as it is"):
        cluster.create_topic("orders", 2)


@pytest.mark.parametrize("act", ["stop", "kill"])
def test_a_node_that_does_not_run_cannot_be_stopped(cluster, act):
    cluster.kill(2)
    for number in (2, 9):
        words = rf"node {number} does not run; those that run: \[1, 3\]"
        with pytest.raises(ConfigError, match=words):
            getattr(cluster, act)(number)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"partitions": "2"}, "partitions must be an int, not '2'"),
        ({"partitions": 0}, "partitions must be at least 1, not 0"),
        ({"replication_factor": 0}, "replication_factor must be at least 1, not 0"),
        ({"replication_factor": "3"}, "replication_factor must be an int, not '3'"),
    ],
)
def test_counts_of_a_new_topic_are_numbers_from_1(cluster, arguments, words):
    with pytest.raises(ConfigError, match=words):
        cluster.create_topic("orders", **arguments)
    assert list(cluster) == []


def test_a_move_names_partitions_and_lists_of_nodes(cluster):
    cluster.create_topic("orders")
    with pytest.raises(ConfigError, match=r"such as \('orders', 0\), not 'orders'"):
        cluster.reassign({"orders": [1, 2]})
    with pytest.raises(ConfigError, match="orders-0: replicas are a list of nodes, not '12'"):
        cluster.reassign({("orders", 0): "12"})


@pytest.mark.parametrize("taker", [Producer, KafkaServer, lambda each: Consumer(each, "orders")])
def test_what_takes_a_store_refuses_a_cluster_and_says_what_to_use(cluster, taker):
    words = r"takes a Store, not a Cluster: append with cluster\[topic\].append\(\)"
    with pytest.raises(TypeError, match=words):
        taker(cluster)


# ---- the end ----


def test_close_twice_and_every_call_after_it_is_refused(tmp_path):
    cluster = Cluster(tmp_path / "data", nodes=2, durability="os")
    topic = cluster.create_topic("orders")
    cluster.close()
    cluster.close()
    with pytest.raises(ClosedError):
        topic.append(b"x", timeout=0.05)
    assert not node_threads()


def test_status_prints_a_table(cluster):
    cluster.create_topic("orders", assignment={0: [1, 2, 3]})
    text = str(cluster.status())
    assert "orders-0" in text
    assert "controller: node" in text
    assert not cluster.status().offline
