"""Faults on demand, and the shape of an error for every API."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from logstore import KafkaServer, Store
from logstore.config import ConfigError
from logstore.errors import RebalanceError
from logstore.kafka import broker
from logstore.kafka.apis import APIS, Api
from logstore.kafka.protocol.codec import decoder, default_of, encoder
from logstore.kafka.protocol.errors import ErrorCode
from logstore.kafka.protocol.refusal import error_codes, refusal
from logstore.kafka.protocol.schema import Field, message
from tests.kafka.peer import Peer, batch, fetch_body, produce_body

PRODUCE, FETCH, METADATA, HEARTBEAT, JOIN_GROUP, API_VERSIONS = 0, 1, 3, 12, 11, 18
CREATE_TOPICS, DELETE_TOPICS, END_TXN = 19, 20, 26
BUSY = ErrorCode.NOT_LEADER_OR_FOLLOWER


def produce(peer: Peer, topic: str = "t", value: bytes = b"x", **options: Any) -> dict[str, Any]:
    answer = peer.ask(PRODUCE, 9, produce_body(topic, batch(value), **options))
    row: dict[str, Any] = answer["responses"][0]["partition_responses"][0]
    return row


def values(store: Store, topic: str = "t") -> list[bytes | None]:
    return [record.value for record in store[topic][0]]


@pytest.fixture(autouse=True)
def topics(store: Store) -> None:
    for name in ("t", "other"):
        store.create_topic(name)


# ---- the shape of an error ----


def request_of(fields: tuple[Field, ...], version: int) -> dict[str, Any]:
    """A request with one element in each array."""

    def one(field: Field) -> object:
        if field.fields:
            return request_of(field.fields, version)
        samples = {"string": field.name, "bytes": b"x", "records": b"x", "uuid": bytes(15) + b"\1"}
        return samples.get(field.type, True if field.type == "bool" else 7)

    return {
        each.name: default_of(each, version)
        if version not in each.versions
        else [one(each)]
        if each.array
        else one(each)
        for each in fields
    }


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_every_version_of_every_api_has_a_shape_for_an_error(api: Api) -> None:
    for version in range(api.first, api.last + 1):
        raw = bytearray()
        asked = request_of(message(api.key, "request").fields, version)
        encoder(api.key, "request", version)(asked, raw, [])
        body, _ = decoder(api.key, "request", version)(memoryview(bytes(raw)), 0, len(raw))
        out = bytearray()
        refused = refusal(api.key, version, body, ErrorCode.NOT_CONTROLLER, "why")
        encoder(api.key, "response", version)(refused, out, [])
        answer, end = decoder(api.key, "response", version)(memoryview(bytes(out)), 0, len(out))
        assert end == len(out)
        assert error_codes(api.key, answer) == [ErrorCode.NOT_CONTROLLER], (api.name, version)


def test_the_rows_of_a_request_are_repeated_in_its_error() -> None:
    body = produce_body("t", b"") | {}
    body["topic_data"][0]["partition_data"].append({"index": 3, "records": b""})
    body["topic_data"].append({"name": "u", "partition_data": [{"index": 5, "records": b""}]})
    answer = refusal(PRODUCE, 9, body, BUSY, None)
    rows = [
        (topic["name"], row["index"], row["error_code"], row["base_offset"])
        for topic in answer["responses"]
        for row in topic["partition_responses"]
    ]
    assert rows == [("t", 0, BUSY, -1), ("t", 3, BUSY, -1), ("u", 5, BUSY, -1)]
    answer = refusal(DELETE_TOPICS, 4, {"topics": [], "topic_names": ["a", "b"]}, BUSY, None)
    assert [row["name"] for row in answer["responses"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("api", "ask"),
    [
        ("Produce", lambda peer: produce(peer)["error_code"]),
        ("Heartbeat", lambda peer: peer.ask(HEARTBEAT, 3, HEART)["error_code"]),
        (
            "CreateTopics",
            lambda peer: peer.ask(CREATE_TOPICS, 5, NEW)["topics"][0]["error_code"],
        ),
    ],
)
def test_an_unexpected_error_is_answered_and_the_connection_stays(
    server: KafkaServer,
    peer: Peer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    api: str,
    ask: Callable[[Peer], int],
) -> None:
    def breaks(call: object) -> None:
        raise ZeroDivisionError("a mistake")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "logstore.kafka"):
        patched.setattr(broker, "handler", lambda key: breaks)
        assert ask(peer) == ErrorCode.UNKNOWN_SERVER_ERROR
    assert "a mistake" in caplog.text
    assert ask(peer) != ErrorCode.UNKNOWN_SERVER_ERROR
    assert server.metrics()[f'errors_total{{api="{api}",error="UNKNOWN_SERVER_ERROR"}}'] == 1


HEART = {"group_id": "g", "generation_id": 1, "member_id": "m"}
NEW = {
    "topics": [{"name": "new", "num_partitions": 1, "replication_factor": 1}],
    "timeout_ms": 1000,
}


# ---- fail ----


def test_fail_answers_so_many_requests_and_does_nothing_else(
    store: Store, server: KafkaServer, peer: Peer
) -> None:
    server.faults.fail("Produce", "NOT_LEADER_OR_FOLLOWER", times=2)
    assert [produce(peer)["error_code"] for _ in range(3)] == [BUSY, BUSY, 0]
    assert values(store) == [b"x"]
    assert server.faults.rules is None, "a request is compared with None again"
    assert server.metrics()['errors_total{api="Produce",error="NOT_LEADER_OR_FOLLOWER"}'] == 2


def test_fail_for_one_topic(store: Store, server: KafkaServer, peer: Peer) -> None:
    server.faults.fail("Produce", 6, topic="t")
    assert produce(peer, "other")["error_code"] == 0
    assert produce(peer, "t")["error_code"] == BUSY
    assert produce(peer, "t")["error_code"] == 0
    server.faults.fail("Fetch", "OFFSET_OUT_OF_RANGE", topic="t")
    topic_id = store["t"].id
    assert topic_id is not None
    body = fetch_body("", 0)
    body["topics"][0]["topic_id"] = topic_id.bytes
    row = peer.ask(FETCH, 16, body)["responses"][0]["partitions"][0]
    assert row["error_code"] == ErrorCode.OFFSET_OUT_OF_RANGE


def test_fail_until_clear(server: KafkaServer, peer: Peer) -> None:
    server.faults.fail("Metadata", "LEADER_NOT_AVAILABLE", times=None)
    for _ in range(5):
        row = peer.ask(METADATA, 8, {"topics": [{"name": "t"}]})["topics"][0]
        assert row["error_code"] == ErrorCode.LEADER_NOT_AVAILABLE
    assert produce(peer)["error_code"] == 0, "another API"
    server.faults.clear()
    row = peer.ask(METADATA, 8, {"topics": [{"name": "t"}]})["topics"][0]
    assert row["error_code"] == 0


def test_a_failed_request_without_acks_closes_the_connection(
    store: Store, server: KafkaServer, peer: Peer
) -> None:
    server.faults.fail("Produce", "KAFKA_STORAGE_ERROR")
    peer.send(PRODUCE, 9, produce_body("t", batch(b"x"), acks=0))
    assert peer.is_closed()
    assert values(store) == []


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda faults: faults.fail("Produse"), "no API 'Produse'"),
        (lambda faults: faults.fail("Produce", "NOPE"), "no error 'NOPE'"),
        (lambda faults: faults.fail("Produce", 12345), "no error 12345"),
        (lambda faults: faults.fail("Produce", "NONE"), "not an error"),
        (lambda faults: faults.fail("Produce", times=0), "times"),
        (lambda faults: faults.delay("Produce", -1), "0 seconds or more"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(
    server: KafkaServer, act: Callable[[Any], None], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        act(server.faults)
    assert server.faults.rules is None


# ---- rules as text ----


@pytest.mark.parametrize(
    ("spec", "kind", "key", "times", "topic"),
    [
        ("fail:Produce", "fail", PRODUCE, 1, None),
        (
            "fail:Produce,error=NOT_LEADER_OR_FOLLOWER,times=3,topic=t",
            *("fail", PRODUCE, 3, "t"),
        ),
        ("fail:Fetch, error=6, times=all", "fail", FETCH, None, None),
        ("delay:Fetch,seconds=0.5", "delay", FETCH, None, None),
        ("drop:EndTxn", "drop", END_TXN, 1, None),
        ("drop:EndTxn,after=true,times=2", "drop", END_TXN, 2, None),
    ],
)
def test_a_rule_as_text(
    server: KafkaServer, spec: str, kind: str, key: int, times: int | None, topic: str | None
) -> None:
    server.faults.add(spec)
    assert server.faults.rules is not None
    (rule,) = server.faults.rules
    assert (rule.fault.kind, rule.key, rule.times, rule.topic) == (kind, key, times, topic)
    if "error=" in spec:
        assert rule.fault.code == BUSY
    assert rule.fault.seconds == (0.5 if kind == "delay" else 0)
    assert rule.fault.after is ("after=true" in spec)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("", "fail:API, delay:API or drop:API"),
        ("Produce", "fail:API, delay:API or drop:API"),
        ("break:Produce", "fail:API"),
        ("fail:Produse", "no API 'Produse'"),
        ("fail:Produce,error=NOPE", "no error 'NOPE'"),
        ("fail:Produce,seconds=1", "fail has times, topic and error"),
        ("delay:Fetch", "seconds is missing, such as delay:Fetch,seconds=0.5"),
        ("delay:Fetch,seconds=x", "cannot have 'seconds=x'"),
        ("drop:Fetch,after=maybe", "cannot have 'after=maybe'"),
        ("drop:Fetch,times=0", "times"),
    ],
)
def test_a_text_that_is_no_rule_is_refused(server: KafkaServer, spec: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        server.faults.add(spec)
    assert server.faults.rules is None


# ---- delay, drop, disconnect ----


def test_delay(store: Store, server: KafkaServer, peer: Peer) -> None:
    server.faults.delay("Produce", 0.2, times=1)
    began = time.monotonic()
    peer.send(PRODUCE, 9, produce_body("t", batch(b"late")))
    with Peer(server.address) as other:
        assert produce(other, value=b"first")["error_code"] == 0, "one connection waits, no other"
        peer.receive(PRODUCE, 9)
    assert time.monotonic() - began >= 0.2
    assert values(store) == [b"first", b"late"]


def test_drop_before_and_after_the_request(store: Store, server: KafkaServer) -> None:
    for after, kept in ((False, []), (True, [b"x"])):
        server.faults.drop("Produce", after=after)
        with Peer(server.address) as peer:
            peer.send(PRODUCE, 9, produce_body("t", batch(b"x")))
            assert peer.is_closed()
        assert values(store) == kept
    with Peer(server.address) as peer:
        assert produce(peer)["error_code"] == 0
    assert server.metrics()['connections_closed_total{reason="fault"}'] == 2
    assert server.metrics()["memory_in_use_bytes"] == 0


def test_disconnect_by_client_id(server: KafkaServer) -> None:
    with Peer(server.address) as first, Peer(server.address) as second:
        first.ask(API_VERSIONS, 0, {}, client="one")
        second.ask(API_VERSIONS, 0, {}, client="two")
        assert server.faults.disconnect("nothing") == 0
        assert server.faults.disconnect("one") == 1
        assert first.is_closed()
        assert second.ask(API_VERSIONS, 0, {}, client="two")["error_code"] == 0
        assert server.faults.disconnect() == 1
        assert second.is_closed()


def test_rebalance(server: KafkaServer, peer: Peer) -> None:
    asked = {
        "group_id": "g",
        "session_timeout_ms": 10_000,
        "rebalance_timeout_ms": 10_000,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"m"}],
    }
    joined = peer.ask(JOIN_GROUP, 3, asked)
    member = {"group_id": "g", "generation_id": 1, "member_id": joined["member_id"]}
    assignment = {"member_id": joined["member_id"], "assignment": b"a"}
    assert peer.ask(14, 3, member | {"assignments": [assignment]})["error_code"] == 0
    assert peer.ask(HEARTBEAT, 3, member)["error_code"] == 0
    with pytest.raises(RebalanceError, match="group 'nogroup': it does not exist"):
        server.faults.rebalance("nogroup")
    server.faults.rebalance("g")
    assert peer.ask(HEARTBEAT, 3, member)["error_code"] == ErrorCode.REBALANCE_IN_PROGRESS
    again = peer.ask(JOIN_GROUP, 3, asked | {"member_id": joined["member_id"]})
    assert (again["error_code"], again["generation_id"]) == (0, 2)


def test_rules_set_before_the_start_apply(store: Store) -> None:
    server = KafkaServer(store)
    server.faults.fail("ApiVersions", "UNKNOWN_SERVER_ERROR")
    with server, Peer(server.address) as peer:
        assert peer.ask(API_VERSIONS, 0, {})["error_code"] == -1
        assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0


# ---- a real client ----


def test_a_real_producer_tries_again(store: Store, server: KafkaServer) -> None:
    kafka = pytest.importorskip("confluent_kafka")
    producer = kafka.Producer(
        {"bootstrap.servers": server.bootstrap_servers, "retry.backoff.ms": 10, "linger.ms": 0}
    )
    server.faults.fail("Produce", "NOT_LEADER_OR_FOLLOWER", times=3, topic="t")
    errors: list[object] = []
    producer.produce("t", b"x", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(20) == 0
    assert errors == [None]
    assert values(store) == [b"x"]


def test_a_real_idempotent_producer_writes_once_if_its_answer_is_lost(
    store: Store, server: KafkaServer
) -> None:
    kafka = pytest.importorskip("confluent_kafka")
    producer = kafka.Producer(
        {
            "bootstrap.servers": server.bootstrap_servers,
            "enable.idempotence": True,
            "retry.backoff.ms": 10,
            "reconnect.backoff.ms": 10,
        }
    )
    server.faults.drop("Produce", after=True)
    producer.produce("t", b"once")
    assert producer.flush(20) == 0
    assert values(store) == [b"once"]
    assert server.metrics()['requests_total{api="Produce"}'] == 2


def test_a_real_consumer_gets_a_fatal_error(store: Store, server: KafkaServer) -> None:
    kafka = pytest.importorskip("confluent_kafka")
    store["t"].append(b"x")
    consumer = kafka.Consumer(
        {"bootstrap.servers": server.bootstrap_servers, "group.id": "g",
         "auto.offset.reset": "earliest"}
    )  # fmt: skip
    try:
        server.faults.fail("Fetch", "TOPIC_AUTHORIZATION_FAILED", times=1)
        consumer.assign([kafka.TopicPartition("t", 0, 0)])
        got = consumer.poll(20)
        assert got.error().code() == kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED
        got = consumer.poll(20)
        assert got.value() == b"x"
    finally:
        consumer.close()


def test_a_real_transaction_is_committed_once_if_the_answer_of_its_end_is_lost(
    store: Store, server: KafkaServer
) -> None:
    kafka = pytest.importorskip("confluent_kafka")
    producer = kafka.Producer(
        {"bootstrap.servers": server.bootstrap_servers, "transactional.id": "tx",
         "retry.backoff.ms": 10, "reconnect.backoff.ms": 10, "log_level": 0}
    )  # fmt: skip
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce("t", b"once")
    server.faults.drop("EndTxn", after=True)
    producer.commit_transaction(20)
    assert server.metrics()['requests_total{api="EndTxn"}'] == 2
    committed = [record.value for record in store["t"][0].scan(isolation="read_committed")]
    assert committed == [b"once"]


def test_a_real_consumer_joins_again_after_a_rebalance_and_a_lost_connection(
    store: Store, server: KafkaServer
) -> None:
    kafka = pytest.importorskip("confluent_kafka")
    store["t"].append(b"first")
    consumer = kafka.Consumer(
        {"bootstrap.servers": server.bootstrap_servers, "group.id": "g", "client.id": "app",
         "auto.offset.reset": "earliest", "heartbeat.interval.ms": 50, "log_level": 0,
         "reconnect.backoff.ms": 10, "fetch.wait.max.ms": 50}
    )  # fmt: skip
    assigned: list[int] = []
    read: list[bytes] = []

    def poll_until(holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < end, "not in time"
            message = consumer.poll(0.05)
            if message is not None and message.error() is None:
                read.append(message.value())

    consumer.subscribe(["t"], on_assign=lambda _, partitions: assigned.append(len(partitions)))
    try:
        poll_until(lambda: read == [b"first"])
        assert assigned == [1]
        server.faults.rebalance("g")
        poll_until(lambda: len(assigned) == 2)
        assert server.faults.disconnect("app") >= 1
        assert server.faults.disconnect("another") == 0
        store["t"].append(b"second")
        poll_until(lambda: b"second" in read)
    finally:
        consumer.close()
