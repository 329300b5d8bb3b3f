"""A cluster under faults of disks, power and processes: what is promised of each."""

from __future__ import annotations

import errno
import signal
import threading
from pathlib import Path

import pytest

from logstore.errors import IndeterminateAppendError, NotLeaderError
from logstore.files import boot
from logstore.replication.machines.follower import Offer
from logstore.replication.peers import FetchRow
from logstore.testing import Fault, inject_io
from tests.kit import flip
from tests.replication.cluster_kit import (
    assert_same_logs,
    eventually,
    in_sync,
    raw_log,
    running,
    values,
)

TWO = {"min.insync.replicas": 2}


def log_file(cluster_path: Path, node: int) -> Path:
    (file,) = (cluster_path / f"node-{node}" / "orders-0").glob("*.log")
    return file


# ---- power ----


def test_a_node_that_lost_records_in_a_power_cut_is_not_elected(tmp_path, monkeypatch):
    with running(tmp_path / "data") as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2]}, config=TWO)
        for number in range(5):
            topic.append(b"%d" % number)
        cluster.kill(2)
        eventually(lambda: cluster.partition("orders", 0).elr == (2,))
    file = log_file(tmp_path / "data", 2)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 3 // 5 // 73 * 73])  # its last pages were never written
    monkeypatch.setattr(boot, "boot_override", "another boot")
    with running(tmp_path / "data", nodes=2) as cluster:
        in_sync(cluster, "orders", count=2)
        assert values(cluster, "orders") == [b"%d" % number for number in range(5)]
        assert_same_logs(cluster, "orders")
        status = cluster.status()
        assert not any(node.lossy for node in status.nodes)
        log = cluster.nodes[2].store["orders"][0]
        eventually(lambda: not log.recovery.lossy, "a leader has filled it again")


def test_a_lossy_member_of_the_elr_waits_for_the_last_one_in_sync(tmp_path, monkeypatch):
    with running(tmp_path / "data") as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2]}, config=TWO)
        topic.append(b"kept")
        cluster.kill(2)
        eventually(lambda: cluster.partition("orders", 0).elr == (2,))
        cluster.kill(1)
        eventually(lambda: cluster.partition("orders", 0).leader == -1)
        log_file(tmp_path / "data", 2).write_bytes(b"")
        with monkeypatch.context() as patched:
            patched.setattr(boot, "boot_override", "another boot")
            cluster.start(2)
        eventually(lambda: 2 not in cluster.image.states["orders", 0].elr, "it may miss records")
        assert cluster.partition("orders", 0).leader == -1
        with pytest.raises(NotLeaderError):
            topic.append(b"x", timeout=0.05)
        cluster.start(1)
        in_sync(cluster, "orders", count=2)
        assert values(cluster, "orders") == [b"kept"]


def test_a_power_cut_of_all_nodes_loses_nothing_that_was_synced(tmp_path, monkeypatch):
    with running(tmp_path / "data", durability="fsync") as cluster:
        topic = cluster.create_topic("orders", config=TWO)
        for number in range(5):
            topic.append(b"%d" % number)
        for node in (1, 2, 3):
            cluster.kill(node)
    monkeypatch.setattr(boot, "boot_override", "another boot")
    with running(tmp_path / "data", durability="fsync") as cluster:
        in_sync(cluster, "orders")
        assert values(cluster, "orders") == [b"%d" % number for number in range(5)]


# ---- damage ----


def test_a_damaged_replica_is_set_aside_and_filled_from_the_leader(tmp_path):
    with running(tmp_path / "data", durability="fsync") as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
        for number in range(5):
            topic.append(b"%d" % number * 100)
        cluster.kill(3)
        flip(log_file(tmp_path / "data", 3), 100)
        cluster.start(3)
        in_sync(cluster, "orders")
        assert_same_logs(cluster, "orders")
        strays = cluster.nodes[3].store.topic_changes.strays()
        assert [(stray.topic, stray.number) for stray in strays] == [("orders", 0)]
        assert not cluster.nodes[3].partitions.offline_keys


def test_damage_that_a_follower_would_copy_takes_the_leader_offline(tmp_path):
    with running(tmp_path / "data", durability="fsync") as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
        for number in range(5):
            topic.append(b"%d" % number * 100)
        cluster.kill(3)
        topic.append(b"six")
        # The damage is below what node 3 has; a new node would copy it.
        flip(log_file(tmp_path / "data", 1), 100)
        (stale,) = (tmp_path / "data" / "node-3" / "orders-0").glob("*.log")
        for file in stale.parent.iterdir():
            file.unlink()
        stale.parent.rmdir()
        cluster.start(3)
        eventually(lambda: cluster.partition("orders", 0).leader in (2, 3), "node 1 resigned")
        in_sync(cluster, "orders")
        assert_same_logs(cluster, "orders")
        assert values(cluster, "orders")[-1] == b"six"
        assert cluster.nodes[1].store.topic_changes.strays()


# ---- the disk fails ----


def test_a_failed_fsync_of_the_leader_is_indeterminate_and_the_next_leader_serves(tmp_path):
    with running(tmp_path / "data", durability="fsync") as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
        topic.append(b"first")
        fault = Fault.fail(errno.EIO, "datasync", "node-1/orders-0/*.log", forever=True)
        with inject_io(fault, root=tmp_path / "data"):
            with pytest.raises(IndeterminateAppendError) as caught:
                topic.append(b"second")
            assert caught.value.offsets == range(1, 2)
            eventually(lambda: cluster.partition("orders", 0).leader in (2, 3))
        topic.append(b"third")
        assert values(cluster, "orders")[0] == b"first"
        assert values(cluster, "orders")[-1] == b"third"
        in_sync(cluster, "orders")
        assert_same_logs(cluster, "orders")


def test_a_full_disk_of_the_leader_refuses_and_moves_the_leadership(tmp_path):
    with running(tmp_path / "data") as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
        topic.append(b"first")
        fault = Fault.fail(errno.ENOSPC, "pwrite", "node-1/orders-0/*.log", forever=True)
        with inject_io(fault, root=tmp_path / "data"):
            with pytest.raises(OSError, match=r"space|full"):
                topic.append(b"refused")
            eventually(lambda: cluster.partition("orders", 0).leader in (2, 3))
            topic.append(b"second")
        assert values(cluster, "orders") == [b"first", b"second"]


# ---- races ----


def test_a_leader_that_was_deposed_during_a_read_answers_no_records(tmp_path):
    with running(tmp_path / "data") as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
        topic.append(b"x")
        replica = cluster.nodes[1].replica(("orders", 0))
        assert replica is not None
        epoch = cluster.nodes[2].status()["broker_epoch"]
        row = FetchRow(("orders", 0), replica.topic_id, Offer(0, 1, 0, 0, -1, 0), 1 << 20)
        served = replica.serve(2, epoch, row, again=True)
        assert replica.read(served, 0, 1 << 20).raw
        replica.session_lost()
        assert replica.read(served, 0, 1 << 20) == (6, -1, -1, None, b"")


def test_records_that_retention_deleted_are_not_fetched(tmp_path):
    small = {**TWO, "segment.bytes": 1 << 14, "retention.bytes": 1 << 14}
    with running(tmp_path / "data") as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=small)
        cluster.kill(3)
        for _ in range(40):
            topic.append(b"x" * 2000)
        cluster.nodes[1].store.enforce()
        start = cluster.partition("orders", 0).start_offset
        assert start > 0
        cluster.start(3)
        in_sync(cluster, "orders")
        assert cluster.nodes[3].store["orders"][0].start_offset >= start
        assert raw_log(cluster, 3, "orders")[-2000:] == raw_log(cluster, 1, "orders")[-2000:]


def test_an_interrupt_of_an_append_leaves_the_cluster_usable(tmp_path):
    with running(tmp_path / "data") as cluster:
        topic = cluster.create_topic("orders", assignment={0: [1, 2, 3]}, config=TWO)
        topic.append(b"first")
        for node in (2, 3):
            cluster.network.cut.add(frozenset((1, node)))

        def interrupt() -> None:
            eventually(lambda: cluster.nodes[1].store["orders"][0].end_offset == 2)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            topic.append(b"interrupted")
            thread.join(10)
        thread.join()
        cluster.network.cut.clear()
        in_sync(cluster, "orders")
        topic.append(b"last")
        assert values(cluster, "orders") == [b"first", b"interrupted", b"last"]
