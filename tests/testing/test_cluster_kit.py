"""ClusterUnderTest with nodes that are alone: processes, ports, disks; the cluster is elsewhere."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

import logstore
from logstore.testing.cluster import ClusterUnderTest
from logstore.testing.link import Links
from logstore.testing.node_process import NodeProcess, free_ports
from tests.kafka.peer import Peer, batch, produce_body

PRODUCE = 0
STORAGE_ERROR = 56
TOPIC = ("--create-topic", "orders")


def endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def produce(address: str, value: bytes, *, timeout: float = 20.0) -> int:
    """Append a record; return the error code."""
    with Peer(endpoint(address), timeout=timeout) as peer:
        answer = peer.ask(PRODUCE, 9, produce_body("orders", batch(value)))
    code: int = answer["responses"][0]["partition_responses"][0]["error_code"]
    return code


def values(cluster: ClusterUnderTest, node: int) -> list[bytes | None]:
    with logstore.open(cluster.store(node), readonly=True) as store:
        return [record.value for record in store["orders"][0]]


def test_a_killed_node_starts_again_on_its_port_and_directory(tmp_path: Path) -> None:
    with ClusterUnderTest(tmp_path, nodes=2, arguments=TOPIC) as cluster:
        pids = {node.pid for node in cluster.nodes.values()}
        assert len(pids) == 2
        assert cluster.up == [1, 2]
        assert produce(cluster.address(1), b"a") == 0
        cluster.kill(1)
        assert cluster.up == [2]
        with pytest.raises(ConnectionRefusedError):
            produce(cluster.address(1), b"lost")
        assert produce(cluster.address(2), b"other") == 0
        cluster.start(1)
        assert cluster.nodes[1].pid not in pids
        assert cluster.nodes[1].starts == 2
        assert produce(cluster.address(1), b"b") == 0
        cluster.terminate_all()
        assert cluster.up == []
        assert values(cluster, 1) == [b"a", b"b"]
        assert values(cluster, 2) == [b"other"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_paused_node_answers_after_it_is_resumed(tmp_path: Path) -> None:
    with ClusterUnderTest(tmp_path, nodes=1, arguments=TOPIC) as cluster:
        cluster.pause(1)
        assert cluster.up == []
        with pytest.raises(TimeoutError):
            produce(cluster.address(1), b"late", timeout=0.3)
        cluster.resume(1)
        assert produce(cluster.address(1), b"b") == 0
        cluster.pause(1)  # a paused process is ended too
    assert not cluster.nodes[1].running


def test_a_process_that_ends_by_itself_is_an_error(tmp_path: Path) -> None:
    with ClusterUnderTest(tmp_path, nodes=1) as cluster:
        os.kill(cluster.nodes[1].pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="node 1 ended with -9"):
            cluster.nodes[1].await_end()
        with pytest.raises(RuntimeError, match="node 1 ended by itself"):
            cluster.kill(1)


def test_a_node_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"node 1 ended(.|\n)*No such option"):
        ClusterUnderTest(tmp_path, nodes=1, arguments=["--no-such-option"])


def test_a_node_that_is_not_ready_in_time_shows_its_log(tmp_path: Path) -> None:
    node = NodeProcess(1, ["sh", "-c", "echo waiting >&2; sleep 60"], tmp_path / "log")
    try:
        with pytest.raises(RuntimeError, match=r"is not ready after 0.3 s(.|\n)*waiting"):
            node.start(timeout=0.3)
    finally:
        node.close()


def test_a_node_through_a_link(tmp_path: Path) -> None:
    with ClusterUnderTest(tmp_path, nodes=1, arguments=TOPIC) as cluster, Links() as links:
        link = links.link(cluster.address(1))
        assert produce(link.address, b"a") == 0
        link.half_open()
        with pytest.raises(TimeoutError):
            produce(link.address, b"never", timeout=0.3)  # a new connection: no handshake
        link.heal()
        with Peer(endpoint(link.address), timeout=1.0) as peer:
            peer.ask(PRODUCE, 9, produce_body("orders", batch(b"b")))
            link.half_open()
            with pytest.raises(TimeoutError):
                peer.ask(PRODUCE, 9, produce_body("orders", batch(b"appended, not answered")))
        cluster.terminate(1)
        assert values(cluster, 1) == [b"a", b"b", b"appended, not answered"]


def test_a_bit_is_flipped_and_a_store_is_wiped_while_the_node_is_down(tmp_path: Path) -> None:
    with ClusterUnderTest(tmp_path, nodes=1, arguments=TOPIC) as cluster:
        for number in range(20):
            assert produce(cluster.address(1), b"%d" % number) == 0
        with pytest.raises(AssertionError, match="node 1 runs"):
            cluster.flip_bit(1, "orders")
        cluster.terminate(1)
        path, position = cluster.flip_bit(1, "orders")
        assert path.suffix == ".log" and 0 < position < path.stat().st_size
        with logstore.open(cluster.store(1), readonly=True) as store:
            assert store.check(on_corrupt="report") != []
        cluster.wipe(1)
        cluster.start(1)
        cluster.terminate(1)
        assert values(cluster, 1) == []


def test_a_disk_that_is_full_and_free_again(tmp_path: Path) -> None:
    disk = {1: 48 << 20}
    try:
        cluster = ClusterUnderTest(tmp_path, nodes=1, arguments=TOPIC, disk_bytes=disk)
    except PermissionError as error:
        pytest.skip(str(error))
    with cluster:
        assert produce(cluster.address(1), b"a") == 0
        cluster.fill_disk(1)
        assert STORAGE_ERROR in {produce(cluster.address(1), bytes(100_000)) for _ in range(100)}
        cluster.free_disk(1)
        assert produce(cluster.address(1), b"b") == 0
    assert not cluster.home(1).is_mount()


def test_free_ports_are_different_and_not_for_outgoing_connections() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()
    bounds = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if bounds.exists():
        assert max(ports) < int(bounds.read_text().split()[0])
