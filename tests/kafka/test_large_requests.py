"""Small requests with large answers, and large requests: the loop serves the others meanwhile."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from logstore import KafkaServer, Store
from logstore.kafka import broker
from logstore.kafka.apis import APIS
from logstore.kafka.handlers import metadata
from logstore.kafka.protocol.errors import ErrorCode
from tests.campaign import sized
from tests.kafka.peer import Peer, batch, fetch_body, produce_body, request
from tests.kafka.test_server import until

PRODUCE, FETCH, METADATA, OFFSET_COMMIT, DESCRIBE_GROUPS, API_VERSIONS = 0, 1, 3, 8, 15, 18


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    found = [each for each in caplog.get_records("call") if each.levelno >= logging.ERROR]
    assert [each for each in found if each.name in ("asyncio", "logstore.kafka")] == []


def names(count: int) -> list[dict[str, Any]]:
    return [{"name": f"topic-{number}"} for number in range(count)]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return the names of the threads that decode, handle and encode."""
    used: dict[str, list[str]] = {"decode": [], "encode": []}
    for what, name in (("decode", "_decode"), ("encode", "_encoded")):
        real = getattr(broker, name)

        def noted(*given: Any, what: str = what, real: Any = real) -> Any:
            used[what].append(threading.current_thread().name)
            return real(*given)

        monkeypatch.setattr(broker, name, noted)
    return used


def test_a_large_request_is_decoded_and_its_answer_encoded_by_a_worker(
    server: KafkaServer, threads: dict[str, list[str]]
) -> None:
    with Peer(server.address) as peer:
        asked = {"topics": names(3000), "allow_auto_topic_creation": False}
        rows = peer.ask(METADATA, 8, asked)["topics"]
        assert len(rows) == 3000
        assert "io" in threads["decode"][0]
        assert "io" in threads["encode"][0]
        peer.ask(METADATA, 8, {"topics": [], "allow_auto_topic_creation": False})
        assert threads["decode"][1] == threads["encode"][1] == "logstore kafka"


@pytest.mark.parametrize("what", ["topics", "partitions"])
def test_metadata_of_many_topics_or_partitions_is_made_by_a_worker(
    store: Store,
    server: KafkaServer,
    threads: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    monkeypatch.setattr(metadata, f"INLINE_{what.upper()}", 3)
    if what == "topics":
        for each in names(4):
            store.create_topic(each["name"])
    else:
        store.create_topic("t", partitions=4)
    with Peer(server.address) as peer:
        topics = peer.ask(METADATA, 8, {"topics": None})["topics"]
        assert sum(len(each["partitions"]) for each in topics) == 4
        assert "io" in threads["encode"][-1]


@pytest.mark.parametrize("cut", [True, False])
def test_a_large_malformed_request_is_closed(server: KafkaServer, cut: bool) -> None:
    whole = bytearray(request(METADATA, 8, {"topics": names(3000)}))
    if cut:
        del whole[-50:]
        whole[:4] = struct.pack(">i", len(whole) - 4)
    else:
        whole[5000:5004] = b"\xff" * 4
    with Peer(server.address) as peer, Peer(server.address) as other:
        peer.socket.sendall(whole + request(API_VERSIONS, 0, {}))
        assert peer.is_closed()
        name = 'connections_closed_total{reason="malformed"}'
        until(lambda: server.metrics().get(name) == 1)
        assert other.ask(API_VERSIONS, 0, {})["error_code"] == 0
        until(lambda: server.metrics()["memory_in_use_bytes"] == 0)


def test_a_topic_that_is_asked_for_a_thousand_times_is_answered_once(
    store: Store, server: KafkaServer
) -> None:
    """Otherwise a request of a few KB has an answer of gigabytes."""
    store.create_topic("t", partitions=50)
    with Peer(server.address) as peer:
        asked = [{"name": "t"}, {"name": "u"}] * 1000
        body = {"topics": asked, "allow_auto_topic_creation": False}
        topics = peer.ask(METADATA, 8, body)["topics"]
        assert [(each["name"], each["error_code"]) for each in topics] == [("t", 0), ("u", 3)]
        assert store["t"].id is not None
        asked = [{"name": None, "topic_id": store["t"].id.bytes}] * 1000
        assert [each["name"] for each in peer.ask(METADATA, 12, {"topics": asked})["topics"]] == [
            "t"
        ]


@pytest.mark.parametrize("version", [10, 11])
@pytest.mark.parametrize("row", [{"name": None}, {"name": "t", "topic_id": bytes(15) + b"1"}])
def test_metadata_without_names_before_version_12(
    server: KafkaServer, version: int, row: dict[str, Any]
) -> None:
    """The schema allows it, and the answer has no null name: Kafka answers 42 for all topics."""
    with Peer(server.address) as peer:
        answer = peer.ask(METADATA, version, {"topics": [{"name": "u"}, row]})
        rows = [(each["name"], each["error_code"]) for each in answer["topics"]]
        code = ErrorCode.INVALID_REQUEST
        assert rows == [("u", code), (row["name"] or "", code)]


def test_an_offset_that_is_kept_for_ever(store: Store, server: KafkaServer) -> None:
    """The largest retention time, added to the time of today, is more than a timestamp holds."""
    store.create_topic("t")
    row = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
    asked = {
        "group_id": "g",
        "generation_id_or_member_epoch": -1,
        "retention_time_ms": 2**63 - 1,
        "topics": [{"name": "t", "partitions": [row]}],
    }
    with Peer(server.address) as peer:
        answer = peer.ask(OFFSET_COMMIT, 4, asked)
        assert answer["topics"][0]["partitions"][0]["error_code"] == 0


def test_handlers_that_make_long_answers_do_not_run_in_the_loop() -> None:
    assert APIS[32].where == APIS[75].where == APIS[DESCRIBE_GROUPS].where == "worker"


@pytest.mark.campaign
def test_many_partitions_in_one_fetch(store: Store, server: KafkaServer) -> None:
    count = sized(100, 2000, 2000)
    store.create_topic("t", partitions=count)
    partitions = [
        fetch_body("t", 0, partition=number)["topics"][0]["partitions"][0]
        for number in range(count)
    ]
    with Peer(server.address) as peer:
        raw = batch(bytes(200_000))
        answer = peer.ask(PRODUCE, 9, produce_body("t", raw, partition=count - 1))
        assert answer["responses"][0]["partition_responses"][0]["error_code"] == 0
        body = fetch_body("t", 0, max_wait_ms=30_000)
        body["topics"][0]["partitions"] = partitions
        [topic] = peer.ask(FETCH, 11, body)["responses"]
        found = {row["partition_index"]: len(row["records"]) for row in topic["partitions"]}
        assert len(found) == count
        assert found[count - 1] == len(raw)
        assert sum(found.values()) == len(raw)
        partitions[count - 1]["fetch_offset"] = 1
        peer.send(FETCH, 11, body)
        until(lambda: server.metrics()['purgatory_size{kind="fetch"}'] == 1)
        store["t"][count // 2].append(b"late")
        [topic] = peer.receive(FETCH, 11)["responses"]
        found = {row["partition_index"]: len(row["records"]) for row in topic["partitions"]}
        assert [number for number, size in found.items() if size] == [count // 2]
