"""KafkaPeer: requests and answers, and every way in which a peer can be gone."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from logstore import KafkaServer, Store
from logstore.kafka.client import KafkaPeer, PeerGoneError, parse_servers
from tests.kafka.peer import batch, produce_body

PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS, OFFSET_FOR_EPOCH = 0, 1, 2, 3, 18, 23


@pytest.fixture
def client(server: KafkaServer) -> Iterator[KafkaPeer]:
    host, port = server.address
    with KafkaPeer(host, port) as peer:
        yield peer


def test_versions_are_asked_for_when_it_connects(client: KafkaPeer) -> None:
    assert client.versions[FETCH] == (4, 18)
    assert client.version(FETCH, 12, 16) == 16
    assert client.version(FETCH, 12, 30) == 18
    with pytest.raises(PeerGoneError, match="versions 4 to 18 of API 1, not 19 to 30"):
        client.version(FETCH, 19, 30)


def test_requests_are_answered(client: KafkaPeer, store: Store) -> None:
    topic = store.create_topic("orders")
    sent = batch(b"a", b"b")
    answer = client.request(PRODUCE, 9, produce_body("orders", sent))
    assert answer["responses"][0]["partition_responses"][0]["error_code"] == 0
    found = client.request(METADATA, 12, {"topics": None})
    assert found["topics"][0]["topic_id"] == topic.id.bytes if topic.id else None
    row = {"partition_index": 0, "timestamp": -1, "current_leader_epoch": -1}
    body = {"replica_id": -1, "topics": [{"name": "orders", "partitions": [row]}]}
    answer = client.request(LIST_OFFSETS, 7, body)
    assert answer["topics"][0]["partitions"][0]["offset"] == 2
    row = {"partition": 0, "leader_epoch": 0, "current_leader_epoch": -1}
    body = {"replica_id": -1, "topics": [{"topic": "orders", "partitions": [row]}]}
    answer = client.request(OFFSET_FOR_EPOCH, 4, body)
    assert answer["topics"][0]["partitions"][0]["end_offset"] == 2


@pytest.mark.parametrize("version", range(12, 17))
def test_fetch_has_records_and_the_diverging_epoch(
    client: KafkaPeer, store: Store, version: int
) -> None:
    topic = store.create_topic("orders")
    log = topic[0]
    log.extend([b"a", b"b"])
    log.become_leader(5)
    log.append(b"c")
    assert topic.id is not None

    def fetched(offset: int, last_epoch: int) -> dict[str, object]:
        assert topic.id is not None
        row = {
            "partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20,
            "current_leader_epoch": 5, "last_fetched_epoch": last_epoch,
        }  # fmt: skip
        asked = {"topic": "orders", "topic_id": topic.id.bytes, "partitions": [row]}
        answer = client.request(FETCH, version, {"max_bytes": 1 << 20, "topics": [asked]})
        found: dict[str, object] = answer["responses"][0]["partitions"][0]
        return found

    assert bytes(fetched(2, 0)["records"]) == log.read_batches(2)[0]  # type: ignore[arg-type]
    assert fetched(3, 2)["diverging_epoch"] == {"epoch": 0, "end_offset": 2}


def test_halves_of_a_request_let_a_caller_ask_two_peers_at_once(server: KafkaServer) -> None:
    host, port = server.address
    with KafkaPeer(host, port) as one, KafkaPeer(host, port) as two:
        for each in (one, two):
            each.send(METADATA, 12, {"topics": None})
        assert one.receive()["topics"] == two.receive()["topics"] == []


def test_a_peer_that_does_not_listen_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PeerGoneError) as caught:
        KafkaPeer("127.0.0.1", port)
    assert (caught.value.host, caught.value.port) == ("127.0.0.1", port)
    assert isinstance(caught.value, ConnectionError)


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Accept one connection, read a request, and call `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(65536)
                answer(accepted)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "closed the connection"),
        (b"\0\0\0\x10half", "closed the connection"),
        (struct.pack(">i", 1 << 30), "an answer of 1073741824 bytes"),
        (struct.pack(">i", -5), "an answer of -5 bytes"),
        (struct.pack(">ii", 4, 77), "answer 77 to request 1"),
        (struct.pack(">iihi", 10, 1, 0, 1 << 28), "cannot be read"),
        (struct.pack(">iihbibb", 13, 1, 0, 1, 0, 0, 7), "bytes after its end"),
        (struct.pack(">iihbib", 12, 1, 35, 1, 0, 0), "refuses ApiVersions: UNSUPPORTED_VERSION"),
    ],
)
def test_an_answer_that_is_none_ends_the_connection(raw: bytes, reason: str) -> None:
    with (
        answering(lambda accepted: accepted.sendall(raw)) as port,
        pytest.raises(PeerGoneError, match=reason),
    ):
        KafkaPeer("127.0.0.1", port)


def test_a_peer_that_does_not_answer_in_time_is_gone() -> None:
    done = threading.Event()
    with answering(lambda accepted: done.wait(20) and None) as port:
        try:
            with pytest.raises(PeerGoneError, match="no answer in time"):
                KafkaPeer("127.0.0.1", port, timeout=0.2)
        finally:
            done.set()


def test_a_connection_that_ended_is_not_used_again(client: KafkaPeer, server: KafkaServer) -> None:
    server.close()
    with pytest.raises(PeerGoneError):
        client.request(METADATA, 12, {"topics": None})
    assert client.closed
    with pytest.raises(PeerGoneError, match="the connection is closed"):
        client.request(METADATA, 12, {"topics": None})


def test_close_in_another_thread_ends_a_wait(client: KafkaPeer, store: Store) -> None:
    topic = store.create_topic("orders")
    assert topic.id is not None
    row = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1}
    asked = {"topic_id": topic.id.bytes, "partitions": [row]}
    timer = threading.Timer(0.2, client.close)
    timer.start()
    with pytest.raises(PeerGoneError):
        client.request(FETCH, 16, {"max_wait_ms": 60_000, "min_bytes": 1, "topics": [asked]})
    timer.join()


def test_servers_are_parsed() -> None:
    assert parse_servers("kafka://a:1,b:2/") == [("a", 1), ("b", 2)]
    assert parse_servers("[::1]:9092") == [("::1", 9092)]
    for wrong in ("kafka://", "kafka://a", "a:b", "a:0", "a:70000", ":9"):
        with pytest.raises(ValueError, match="no address"):
            parse_servers(wrong)
