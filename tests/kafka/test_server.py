"""KafkaServer: its start and end, with its store, in forks, and on a readonly store."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logstore
import logstore.kafka
from logstore import KafkaConfig, KafkaServer, LockedError, Store
from logstore.kafka.faults import Faults
from logstore.kafka.protocol.errors import ErrorCode
from tests.kafka.peer import Peer, batch, fetch_body, produce_body
from tests.kit import wait_until

PRODUCE, FETCH, LIST_OFFSETS, METADATA, JOIN_GROUP = 0, 1, 2, 3, 11
API_VERSIONS, CREATE_TOPICS, INIT_PRODUCER_ID = 18, 19, 22


def until(holds: Callable[[], object], seconds: float = 10.0) -> None:
    wait_until(holds, patience=seconds)


def error_of_produce(answer: dict[str, Any]) -> int:
    code: int = answer["responses"][0]["partition_responses"][0]["error_code"]
    return code


def join_body(group: str = "g", member: str = "", *, timeout_ms: int = 10_000) -> dict[str, Any]:
    return {
        "group_id": group,
        "session_timeout_ms": timeout_ms,
        "rebalance_timeout_ms": timeout_ms,
        "member_id": member,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"m"}],
    }


def values(store: Store, topic: str = "t") -> list[bytes | None]:
    return [record.value for record in store[topic][0]]


# ---- start ----


def test_the_public_names() -> None:
    assert logstore.kafka.KafkaServer is KafkaServer is logstore.KafkaServer
    assert logstore.kafka.KafkaConfig is KafkaConfig is logstore.KafkaConfig
    with pytest.raises(AttributeError, match="nothing"):
        logstore.kafka.nothing  # noqa: B018


def test_a_server_starts_on_a_free_port_and_has_an_address(store: Store) -> None:
    server = KafkaServer(store)
    with pytest.raises(logstore.ClosedError, match="not started"):
        _ = server.bootstrap_servers
    assert server.start() is server
    assert server.start() is server, "a second start does nothing"
    host, port = server.address
    assert server.bootstrap_servers == f"{host}:{port}"
    assert server.addresses == {"PLAINTEXT": (host, port)}
    assert server.bootstrap_servers in repr(server)
    with Peer(server.address) as peer:
        assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
        assert server.connections == 1
    server.close()
    server.close()
    assert server.closed
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=5)
    with pytest.raises(logstore.ClosedError):
        server.start()


def test_several_listeners(store: Store) -> None:
    with KafkaServer(store, ["127.0.0.1:0", "OTHER://127.0.0.1:0"]) as server:
        assert set(server.addresses) == {"PLAINTEXT", "OTHER"}
        for address in server.addresses.values():
            with Peer(address) as peer:
                assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
                broker = peer.ask(METADATA, 1, {"topics": []})["brokers"][0]
                assert (broker["host"], broker["port"]) == address


def test_a_port_that_is_taken_is_named_and_the_server_can_start_later(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = KafkaServer(store, f"127.0.0.1:{port}", maintain=True)
        with pytest.raises(OSError, match=str(port)) as caught:
            server.start()
        assert caught.value.errno == errno.EADDRINUSE
        assert not [each for each in threading.enumerate() if "logstore kafka" in each.name]
    with server:
        assert server.address[1] == port


def test_a_thread_that_cannot_begin_fails_the_start(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patched:
        patched.setattr("logstore.kafka.server.Acceptor.start", fails)
        server = KafkaServer(store)
        with pytest.raises(MemoryError, match="no more"):
            server.start()
    with server, Peer(server.address) as peer:
        assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address, timeout=5)


# ---- the store ----


def test_a_store_has_one_server(store: Store) -> None:
    with KafkaServer(store) as first:
        with pytest.raises(LockedError, match=first.bootstrap_servers) as caught:
            KafkaServer(store).start()
        assert caught.value.pid == os.getpid()
        assert first.connections == 0
    with KafkaServer(store) as second, Peer(second.address) as peer:
        assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0


def test_closing_the_store_closes_its_server_first(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "s") as store:
        store.create_topic("t")
        server = KafkaServer(store).start()
        with Peer(server.address) as peer:
            # The coordinators are made after the server, and close after it nevertheless.
            peer.ask(JOIN_GROUP, 3, join_body())
            row = peer.ask(PRODUCE, 9, produce_body("t", batch(b"a")))
            assert error_of_produce(row) == 0
            store.close()
            assert server.closed
            assert peer.is_closed()
        with pytest.raises(logstore.ClosedError):
            KafkaServer(store).start()
    with logstore.open(tmp_path / "s") as store:
        assert store.recovery.clean
        assert values(store) == [b"a"]


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_every_acknowledged_record_is_there_after_a_close_under_load(
    tmp_path: Path, durability: str
) -> None:
    """Each peer sends ahead of the answers; the store is closed meanwhile."""
    acknowledged: list[bytes] = []
    unanswered = 0
    lock = threading.Lock()
    with logstore.open(tmp_path / "s", durability=durability) as store:
        store.create_topic("t")
        server = KafkaServer(store).start()

        def load(number: int) -> None:
            nonlocal unanswered
            sent: list[bytes] = []
            with Peer(server.address) as peer:
                try:
                    while True:
                        while len(sent) < 4:
                            value = b"%d-%d" % (number, peer.correlation_id)
                            peer.send(PRODUCE, 9, produce_body("t", batch(value)))
                            sent.append(value)
                        assert error_of_produce(peer.receive(PRODUCE, 9)) == 0
                        with lock:
                            acknowledged.append(sent.pop(0))
                except (EOFError, OSError):
                    with lock:
                        unanswered += len(sent)

        threads = [threading.Thread(target=load, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        until(lambda: len(acknowledged) > 50)
        store.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    with logstore.open(tmp_path / "s", readonly=True) as store:
        written = values(store)
    assert len(written) == len(set(written))
    assert set(acknowledged) <= set(written)
    assert len(written) <= len(acknowledged) + unanswered


def test_waiting_fetches_and_joins_do_not_hold_the_close_up(store: Store) -> None:
    store.create_topic("t")
    server = KafkaServer(store).start()
    with (
        Peer(server.address) as fetching,
        Peer(server.address) as first,
        Peer(server.address) as second,
    ):
        joined = first.ask(JOIN_GROUP, 3, join_body())
        assert joined["error_code"] == 0
        fetching.send(FETCH, 11, fetch_body("t", 0, max_wait_ms=600_000))
        second.send(JOIN_GROUP, 3, join_body())  # waits for the first member to join again
        until(lambda: server.metrics()['purgatory_size{kind="fetch"}'] == 1)
        until(lambda: server.metrics().get('requests_total{api="JoinGroup"}') == 2)
        server.close()
        assert fetching.receive(FETCH, 11)["responses"][0]["partitions"][0]["error_code"] == 0
        assert fetching.is_closed()
        assert second.is_closed()


def test_a_request_that_takes_longer_than_the_drain_is_cut_off(store: Store) -> None:
    server = KafkaServer(store).start()
    server.faults.delay("Metadata", 600.0)
    with Peer(server.address) as peer:
        peer.send(METADATA, 1, {"topics": []})
        until(lambda: server.metrics().get('requests_total{api="Metadata"}') == 1)
        began = time.monotonic()
        server.close(timeout=0.2)
        assert time.monotonic() - began >= 0.2
        assert peer.is_closed()


def test_a_second_close_ends_the_drain(store: Store) -> None:
    server = KafkaServer(store).start()
    server.faults.delay("Metadata", 30.0)
    with Peer(server.address) as peer:
        peer.send(METADATA, 1, {"topics": []})
        until(lambda: server.metrics().get('requests_total{api="Metadata"}') == 1)
        draining = threading.Thread(target=server.close, args=(30.0,))
        draining.start()
        until(lambda: server.closed)
        server.close()
        draining.join(5)
        assert not draining.is_alive()
        assert peer.is_closed()


def test_serve_forever_returns_after_a_close(store: Store) -> None:
    server = KafkaServer(store)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    until(lambda: server.addresses)
    with Peer(server.address) as peer:
        peer.ask(API_VERSIONS, 0, {})
    server.close()
    serving.join(5)
    assert not serving.is_alive()


def test_no_thread_is_left(store: Store) -> None:
    store.create_topic("t")
    before = set(threading.enumerate())
    with KafkaServer(store, maintain=True) as server, Peer(server.address) as peer:
        peer.ask(PRODUCE, 9, produce_body("t", batch(b"x", compression="gzip")))
    assert set(threading.enumerate()) == before


# ---- forks ----


def test_a_child_process_holds_no_socket_and_harms_none(server: KafkaServer) -> None:
    with Peer(server.address) as peer:
        assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                server.close()  # returns at once, and ends nothing of the parent
                if server.closed and not server.connections and not server.faults.disconnect():
                    code = 0
                os.close(go)
                os.read(ready, 1)
            finally:
                os._exit(code)
        os.close(ready)
        assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
        with Peer(server.address) as other:
            assert other.ask(API_VERSIONS, 0, {})["error_code"] == 0
        server.close()
        assert peer.is_closed(), "the child would keep the connection open"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address, timeout=5)
        os.close(go)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


# ---- readonly ----


def test_a_readonly_store_is_served(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "s", durability="os") as store:
        store.create_topic("t")[0].append(b"x")
    with (
        logstore.open(tmp_path / "s", readonly=True) as store,
        KafkaServer(store) as server,
        Peer(server.address) as peer,
    ):
        rows = peer.ask(FETCH, 11, fetch_body("t", 0))["responses"][0]["partitions"]
        assert rows[0]["error_code"] == 0
        assert rows[0]["records"]
        partition = {"partition_index": 0, "timestamp": -1, "current_leader_epoch": -1}
        asked = {"replica_id": -1, "topics": [{"name": "t", "partitions": [partition]}]}
        answer = peer.ask(LIST_OFFSETS, 5, asked)
        assert answer["topics"][0]["partitions"][0]["offset"] == 1
        topics = peer.ask(METADATA, 8, {"topics": None})["topics"]
        assert [topic["name"] for topic in topics] == ["t"]
        asked = {"topics": [{"name": "new"}], "allow_auto_topic_creation": True}
        assert peer.ask(METADATA, 8, asked)["topics"][0]["error_code"] != 0
        code = error_of_produce(peer.ask(PRODUCE, 9, produce_body("t", batch(b"y"))))
        assert code == ErrorCode.KAFKA_STORAGE_ERROR
        code = peer.ask(JOIN_GROUP, 3, join_body())["error_code"]
        assert code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        asked = {"transactional_id": None, "transaction_timeout_ms": 1000}
        code = peer.ask(INIT_PRODUCER_ID, 1, asked)["error_code"]
        assert code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        new = {"name": "new", "num_partitions": 1, "replication_factor": 1}
        answer = peer.ask(CREATE_TOPICS, 5, {"topics": [new], "timeout_ms": 1000})
        assert answer["topics"][0]["error_code"] == ErrorCode.POLICY_VIOLATION


# ---- metrics ----


def test_metrics_count_what_happened(store: Store, server: KafkaServer) -> None:
    store.create_topic("t")
    with Peer(server.address) as peer:
        asked = {"client_software_name": "peer", "client_software_version": "1.0"}
        peer.ask(API_VERSIONS, 3, asked)
        peer.ask(PRODUCE, 9, produce_body("t", batch(b"x")))
        peer.ask(PRODUCE, 9, produce_body("missing", batch(b"x")))
        found = server.metrics()
        assert found['requests_total{api="Produce"}'] == 2
        name = 'errors_total{api="Produce",error="UNKNOWN_TOPIC_OR_PARTITION"}'
        assert found[name] == 1
        assert found["connections"] == found["connections_accepted_total"] == 1
        assert found['clients{software="peer 1.0"}'] == 1
        assert found["request_bytes_total"] > 100
        assert found["response_bytes_total"] > 100
        assert found["memory_in_use_bytes"] == found["worker_busy"] == 0
    until(lambda: server.metrics()["connections"] == 0)
    assert server.metrics()['connections_closed_total{reason="peer"}'] == 1
    assert server.metrics()["request_bytes_total"] == found["request_bytes_total"]


def test_metrics_count_fsyncs(tmp_path: Path) -> None:
    with (
        logstore.open(tmp_path / "s", durability="fsync") as store,
        KafkaServer(store) as server,
        Peer(server.address) as peer,
    ):
        store.create_topic("t")
        for _ in range(3):
            peer.ask(PRODUCE, 9, produce_body("t", batch(b"x")))
        found = server.metrics()
        assert 1 <= found["syncs_total"] <= found["appends_synced_total"] == 3


def test_a_server_that_is_not_started_has_no_metrics(store: Store) -> None:
    server = KafkaServer(store)
    assert server.metrics() == {}
    assert isinstance(server.faults, Faults)
    assert server.faults.disconnect() == 0
