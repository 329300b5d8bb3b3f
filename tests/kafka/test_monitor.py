"""Metrics and health over HTTP, the pace of new connections, listeners, calls of the loop."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import logstore
from logstore import KafkaServer, Store
from logstore.kafka.control import ControlServer
from logstore.kafka.monitor import Monitor
from logstore.kafka.network import acceptor
from tests.kafka.peer import Peer, batch, produce_body
from tests.kafka.test_server import until

PRODUCE, METADATA, API_VERSIONS = 0, 3, 18


@pytest.fixture
def monitor(server: KafkaServer) -> Iterator[Monitor]:
    made = Monitor(server, "127.0.0.1:0").start()
    yield made
    made.close()


def get(monitor: Monitor, path: str, method: str = "GET") -> tuple[int, str, str]:
    host, _, port = monitor.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


def test_metrics_and_health_over_http(server: KafkaServer, monitor: Monitor, peer: Peer) -> None:
    peer.ask(API_VERSIONS, 0, {})
    status, kind, text = get(monitor, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'logstore_kafka_requests_total{api="ApiVersions"} 1\n' in text
    assert "# TYPE logstore_kafka_request_seconds histogram\n" in text
    assert get(monitor, "/health")[::2] == (200, "ok\n")
    assert get(monitor, "/other")[0] == 404
    assert get(monitor, "/metrics", "POST")[0] == 501
    server.close()
    assert get(monitor, "/health")[::2] == (503, "the server is closed\n")


def test_a_monitor_is_on_loopback_unless_it_has_a_host(server: KafkaServer) -> None:
    for address in ("0", ":0"):
        made = Monitor(server, address).start()
        assert made.address.startswith("127.0.0.1:")
        made.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen on {address}"):
            Monitor(server, address)


def test_a_stuck_loop_is_reported(server: KafkaServer, monitor: Monitor) -> None:
    assert server._loop is not None
    go = threading.Event()
    try:
        server._loop.call_soon_threadsafe(go.wait, 30)
        assert "did not answer within 0.05 s" in server.trouble(0.05)
        status, _, text = get(monitor, "/health")
        assert (status, "event loop" in text) == (503, True)
        assert get(monitor, "/metrics")[0] == 200
    finally:
        go.set()
    until(lambda: get(monitor, "/health")[0] == 200)


def test_a_failed_fsync_is_reported(tmp_path: Path) -> None:
    with (
        logstore.open(tmp_path / "s", durability="fsync") as store,
        KafkaServer(store) as server,
        Peer(server.address) as peer,
    ):
        partition = store.create_topic("t")[0]
        peer.ask(PRODUCE, 9, produce_body("t", batch(b"x")))
        assert server.trouble() == ""
        partition.parts.active.durability.fail(OSError(5, "broken"))
        assert server.trouble() == "an fsync of t-0 failed: open the store again"


def test_call_every_is_called_by_the_loop(server: KafkaServer) -> None:
    threads: list[str] = []
    server.call_every(0.001, lambda: threads.append(threading.current_thread().name))
    until(lambda: len(threads) > 3)
    assert set(threads) == {"logstore kafka"}
    server.close()
    with pytest.raises(logstore.ClosedError):
        KafkaServer(server.store).call_every(1, lambda: None)


# ---- connections ----


def test_an_address_that_connects_too_often_is_held(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loopback counts as another machine here.  A held peer is served later, and not closed."""
    monkeypatch.setattr(acceptor, "is_loopback", lambda host: False)
    with KafkaServer(store, config={"max.connection.creation.rate": 2}) as server:
        peers = [Peer(server.address) for _ in range(3)]
        for peer in peers:
            peer.send(API_VERSIONS, 0, {})
        for peer in peers[:2]:
            assert peer.receive(API_VERSIONS, 0)["error_code"] == 0
        until(lambda: server.metrics()["connections_held"] == 1)
        assert server.metrics()["connections"] == 2
        assert peers[2].receive(API_VERSIONS, 0)["error_code"] == 0
        assert server.metrics()["connections_held"] == 0
        late = Peer(server.address)
        until(lambda: server.metrics()["connections_held"] == 1)
        server.close()
        assert late.is_closed()
        for peer in (*peers, late):
            peer.socket.close()


def test_held_connections_count_for_the_limits(server: KafkaServer) -> None:
    assert server._acceptor is not None
    server._acceptor.held_by_ip["10.1.2.3"] = server.config.max_connections_per_ip
    assert server._may_accept("10.1.2.3") is False
    assert server._may_accept("10.1.2.4") is True
    server._acceptor.held_by_ip["10.1.2.3"] = server.config.max_connections
    assert server._may_accept("127.0.0.1") is None
    server._acceptor.held_by_ip.clear()


def test_a_listening_socket_is_taken_and_listeners_have_different_names(store: Store) -> None:
    given = socket.create_server(("127.0.0.1", 0))
    address = given.getsockname()
    with KafkaServer(store, [given, "127.0.0.1:0", "OTHER://127.0.0.1:0"]) as server:
        assert list(server.addresses) == ["PLAINTEXT", "PLAINTEXT_2", "OTHER"]
        assert server.address == address
        for each in server.addresses.values():
            with Peer(each) as peer:
                assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0


# ---- the control listener ----


def test_operators_are_served_while_the_listener_is_at_its_limits(store: Store) -> None:
    config = {"max.connections": 1, "num.io.threads": 1, "advertised.listeners": "far.example:1"}
    store.create_topic("t")
    with (
        contextlib.ExitStack() as stack,
        KafkaServer(store, config=config) as server,
        ControlServer(store, "127.0.0.1:0", config=config) as control,
        Peer(server.address) as client,
        Peer(control.address) as operator,
    ):
        until(lambda: server.connections == 1)
        late = stack.enter_context(Peer(server.address))
        assert list(control.addresses) == ["CONTROL"]
        server.faults.delay("DeleteGroups", 30.0)  # keeps the only connection busy
        client.send(42, 0, {"groups_names": ["g"]})
        late.send(API_VERSIONS, 0, {})
        new = {"name": "made", "num_partitions": 1, "replication_factor": 1}
        answer = operator.ask(19, 5, {"topics": [new], "timeout_ms": 1000})
        assert answer["topics"][0]["error_code"] == 0
        broker = operator.ask(METADATA, 1, {"topics": []})["brokers"][0]
        assert (broker["host"], broker["port"]) == control.address, "it is not sent elsewhere"
        assert server.connections == 1
        with pytest.raises(logstore.LockedError, match=control.bootstrap_servers):
            ControlServer(store, "127.0.0.1:0").start()
        server.close(timeout=0)
    assert "made" in store


def test_the_store_closes_both_listeners(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "s") as store:
        server = KafkaServer(store).start()
        control = ControlServer(store, "127.0.0.1:0").start()
        store.close()
        assert server.closed
        assert control.closed
