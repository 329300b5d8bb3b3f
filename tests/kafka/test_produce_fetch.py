"""Produce and Fetch, request by request."""

from __future__ import annotations

import struct
import threading
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import Partition, Producer, Record, Store
from logstore.clock import SystemClock
from logstore.kafka.calls import Pending
from logstore.kafka.protocol.errors import ErrorCode
from logstore.kafka.server import KafkaServer
from logstore.kafka.syncs import Syncs
from tests.kafka.peer import Peer, batch, fetch_body, produce_body

PRODUCE, FETCH = 0, 1


def produce(peer: Peer, topic: str, raw: bytes | None, *, version: int = 9,
            **options: Any) -> dict[str, Any]:  # fmt: skip
    answer = peer.ask(PRODUCE, version, produce_body(topic, raw, **options))
    row: dict[str, Any] = answer["responses"][0]["partition_responses"][0]
    return row


def fetch(peer: Peer, topic: str, offset: int, *, version: int = 11, **options: Any) -> Any:
    answer = peer.ask(FETCH, version, fetch_body(topic, offset, **options))
    return answer["responses"][0]["partitions"][0]


def values(store: Store, topic: str, number: int = 0) -> list[bytes | None]:
    return [record.value for record in store[topic][number]]


@pytest.mark.parametrize("version", range(3, 13))
def test_every_version_of_produce_by_name_appends(store: Store, peer: Peer, version: int) -> None:
    store.create_topic("t")
    for number in range(3):
        row = produce(peer, "t", batch(b"a", b"b"), version=version)
        assert (row["error_code"], row["base_offset"]) == (0, 2 * number)
    assert values(store, "t") == [b"a", b"b"] * 3


def test_produce_by_topic_id(store: Store, peer: Peer) -> None:
    topic = store.create_topic("t")
    assert topic.id is not None
    body = produce_body("", batch(b"x"))
    for topic_id, code in ((topic.id.bytes, 0), (bytes(15) + b"\7", 100), (bytes(16), 100)):
        body["topic_data"][0]["topic_id"] = topic_id
        [answer] = peer.ask(PRODUCE, 13, body)["responses"]
        assert answer["topic_id"] == topic_id
        assert answer["partition_responses"][0]["error_code"] == code
    assert values(store, "t") == [b"x"]
    store.delete_topic("t")
    body["topic_data"][0]["topic_id"] = topic.id.bytes
    [answer] = peer.ask(PRODUCE, 13, body)["responses"]
    assert answer["partition_responses"][0]["error_code"] == ErrorCode.UNKNOWN_TOPIC_ID


def test_offsets_by_topic_id(store: Store, peer: Peer) -> None:
    topic = store.create_topic("t")
    assert topic.id is not None
    unknown = bytes(15) + b"\7"
    row = {"partition_index": 0, "committed_offset": 5, "committed_metadata": "m"}
    topics = [{"topic_id": each, "partitions": [row]} for each in (topic.id.bytes, unknown)]
    answer = peer.ask(8, 10, {"group_id": "g", "topics": topics})
    codes = {each["topic_id"]: each["partitions"][0]["error_code"] for each in answer["topics"]}
    assert codes == {topic.id.bytes: 0, unknown: 100}
    rows = [{"topic_id": each, "partition_indexes": [0]} for each in (topic.id.bytes, unknown)]
    groups = [{"group_id": "g", "topics": rows}, {"group_id": "g", "topics": None}]
    named, everything = peer.ask(9, 10, {"groups": groups})["groups"]
    found = [(each["topic_id"], each["partitions"][0]) for each in named["topics"]]
    assert [(id_bytes, each["committed_offset"], each["error_code"]) for id_bytes, each in found] \
        == [(topic.id.bytes, 5, 0), (unknown, -1, 100)]  # fmt: skip
    assert [each["topic_id"] for each in everything["topics"]] == [topic.id.bytes]


@pytest.mark.parametrize("version", range(4, 13))
def test_every_version_of_fetch_by_name_reads(store: Store, peer: Peer, version: int) -> None:
    store.create_topic("t")
    store["t"][0].extend([b"x", b"y"])
    row = fetch(peer, "t", 0, version=version)
    assert (row["error_code"], row["high_watermark"]) == (0, 2)
    assert bytes(row["records"]) == b"".join(store["t"][0].read_batches(0))


def test_fetch_by_topic_id(store: Store, peer: Peer) -> None:
    topic = store.create_topic("t")
    topic[0].append(b"x")
    assert topic.id is not None
    body = fetch_body("", 0)
    body["topics"][0]["topic_id"] = topic.id.bytes
    for version in (13, 14, 15, 16):
        row = peer.ask(FETCH, version, body)["responses"][0]["partitions"][0]
        assert row["error_code"] == 0
        assert bytes(row["records"])
    body["topics"][0]["topic_id"] = bytes(15) + b"\7"
    row = peer.ask(FETCH, 16, body)["responses"][0]["partitions"][0]
    assert row["error_code"] == ErrorCode.UNKNOWN_TOPIC_ID


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_the_bytes_of_a_client_are_the_bytes_in_the_log(
    store: Store, peer: Peer, codec: str
) -> None:
    store.create_topic("t")
    raw = batch(*[b"value %d" % n for n in range(100)], compression=codec)
    assert produce(peer, "t", raw)["error_code"] == 0
    [written] = store["t"][0].read_batches(0)
    assert written[16:] == raw[16:]
    assert bytes(fetch(peer, "t", 0)["records"]) == written


def without_crc(raw: bytes) -> bytes:
    return raw[:17] + bytes([raw[17] ^ 1]) + raw[18:]


def with_magic(raw: bytes, magic: int) -> bytes:
    return raw[:16] + bytes([magic]) + raw[17:]


REFUSED = {
    "no batch": (None, {}, ErrorCode.INVALID_RECORD),
    "an empty set": (b"", {}, ErrorCode.INVALID_RECORD),
    "two batches": (batch(b"a") + batch(b"b"), {}, ErrorCode.INVALID_RECORD),
    "a wrong checksum": (without_crc(batch(b"a")), {}, ErrorCode.CORRUPT_MESSAGE),
    "format 1": (with_magic(batch(b"a"), 1), {}, ErrorCode.INVALID_RECORD),
    "format 5": (with_magic(batch(b"a"), 5), {}, ErrorCode.CORRUPT_MESSAGE),
    "cut short": (batch(b"abc")[:-1], {}, ErrorCode.INVALID_RECORD),
    "another partition": (batch(b"a"), {"partition": 7}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    "acks of 2": (batch(b"a"), {"acks": 2}, ErrorCode.INVALID_REQUIRED_ACKS),
    "zstd before version 7": (
        batch(b"a", compression="zstd"), {"version": 6}, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
    ),
    "transactional without an id": (
        batch(b"a", producer=(1, 0, 0), transactional=True), {},
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_produce_refuses(store: Store, peer: Peer, what: str) -> None:
    store.create_topic("t")
    raw, options, code = REFUSED[what]
    row = produce(peer, "t", raw, **options)
    assert (row["error_code"], row["base_offset"]) == (code, -1)
    assert values(store, "t") == []
    assert produce(peer, "t", batch(b"fine"))["error_code"] == 0, "the connection stays"


def test_produce_to_topics_that_are_not_there(store: Store, peer: Peer) -> None:
    assert produce(peer, "nope", batch(b"a"))["error_code"] == 3
    assert produce(peer, "__consumer_offsets", batch(b"a"))["error_code"] == 17


@pytest.mark.parametrize("version", [3, 9, 12])
@pytest.mark.parametrize("apart", [False, True])
def test_a_partition_that_is_named_twice_gets_no_batch(
    store: Store, peer: Peer, version: int, apart: bool
) -> None:
    """Clients keep answers by partition: of two answers they would see one."""
    store.create_topic("t", partitions=2)
    rows = [{"index": number, "records": batch(b"x")} for number in (0, 1, 0)]
    topics = [rows[:2], rows[2:]] if apart else [rows]
    body = produce_body("t", None)
    body["topic_data"] = [{"name": "t", "partition_data": each} for each in topics]
    answer = peer.ask(PRODUCE, version, body)
    rows = [row for each in answer["responses"] for row in each["partition_responses"]]
    assert [row["error_code"] for row in rows] == [ErrorCode.INVALID_REQUEST] * 3
    assert values(store, "t") == values(store, "t", 1) == []


def test_a_topic_may_be_named_twice(store: Store, peer: Peer) -> None:
    store.create_topic("t", partitions=2)
    body = produce_body("t", batch(b"x"))
    body["topic_data"] += produce_body("t", batch(b"y"), partition=1)["topic_data"]
    answer = peer.ask(PRODUCE, 9, body)
    assert [each["partition_responses"][0]["error_code"] for each in answer["responses"]] == [0, 0]
    assert values(store, "t") + values(store, "t", 1) == [b"x", b"y"]


def test_settings_of_the_topic_decide(store: Store, peer: Peer) -> None:
    store.create_topic("small", config={"max.message.bytes": 200})
    row = produce(peer, "small", batch(bytes(500)))
    assert row["error_code"] == ErrorCode.MESSAGE_TOO_LARGE
    assert "200" in row["error_message"]
    store.create_topic("compacted", config={"cleanup.policy": "compact"})
    assert produce(peer, "compacted", batch(b"a"))["error_code"] == ErrorCode.INVALID_RECORD
    store.create_topic("stamped", config={"message.timestamp.type": "LogAppendTime"})
    row = produce(peer, "stamped", batch(Record(b"a", timestamp=5)))
    assert row["log_append_time_ms"] == store["stamped"][0][0].timestamp > 5
    store.create_topic("dated", config={"message.timestamp.before.max.ms": 1000})
    row = produce(peer, "dated", batch(Record(b"a", timestamp=5)))
    assert row["error_code"] == ErrorCode.INVALID_TIMESTAMP


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_refused_records_are_named(store: Store, peer: Peer, codec: str) -> None:
    store.create_topic("compacted", config={"cleanup.policy": "compact"})
    raw = batch(Record(b"a", key=b"k"), Record(b"b"), b"c", compression=codec)
    row = produce(peer, "compacted", raw)
    assert row["error_code"] == ErrorCode.INVALID_RECORD
    assert [each["batch_index"] for each in row["record_errors"]] == [1, 2]
    assert "key" in row["record_errors"][0]["batch_index_error_message"]
    assert row["error_message"]
    store.create_topic("dated", config={"message.timestamp.before.max.ms": 1000})
    now = store.clock or SystemClock()
    rows = [Record(b"a", timestamp=now.time_ms()), Record(b"b", timestamp=5)]
    row = produce(peer, "dated", batch(*rows, compression=codec))
    assert row["error_code"] == ErrorCode.INVALID_TIMESTAMP
    assert [each["batch_index"] for each in row["record_errors"]] == [1]
    assert produce(peer, "dated", batch(*rows), version=7)["error_code"] == 32


def test_a_duplicate_has_the_time_of_its_batch(store: Store, peer: Peer) -> None:
    store.create_topic("t")
    raw = batch(Record(b"a", timestamp=7), Record(b"b", timestamp=9), producer=(7, 0, 0))
    assert produce(peer, "t", raw)["log_append_time_ms"] == -1
    assert produce(peer, "t", raw)["log_append_time_ms"] == 9


def test_an_idempotent_producer_is_appended_once(store: Store, peer: Peer) -> None:
    """The answers of Apache Kafka 4.3.1 to the same requests."""
    store.create_topic("t")

    def send(epoch: int, sequence: int, count: int = 1, producer: int = 7) -> tuple[int, int]:
        values = [b"v"] * count
        row = produce(peer, "t", batch(*values, producer=(producer, epoch, sequence)))
        return row["error_code"], row["base_offset"]

    assert send(0, 0, 2) == (0, 0)
    assert send(0, 0, 2) == (0, 0)
    assert send(0, 5) == (45, -1)
    assert send(0, 2, 2) == (0, 2)
    assert send(1, 5) == (45, -1)
    assert send(1, 0) == (0, 4)
    assert send(0, 4) == (47, -1)
    assert send(0, 9, producer=8) == (0, 5)
    assert store["t"][0].end_offset == 6


def test_acks_of_0_gets_no_answer_and_an_error_closes(store: Store, server: KafkaServer) -> None:
    store.create_topic("t")
    with Peer(server.address) as peer:
        peer.send(PRODUCE, 9, produce_body("t", batch(b"a"), acks=0))
        assert produce(peer, "t", batch(b"b"))["base_offset"] == 1
        peer.send(PRODUCE, 9, produce_body("nope", batch(b"a"), acks=0))
        assert peer.is_closed()


def test_what_is_acknowledged_is_durable(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "s", durability="fsync") as store, KafkaServer(store) as server:
        store.create_topic("t", partitions=2)
        with Peer(server.address) as peer:
            for number in range(20):
                row = produce(peer, "t", batch(b"v"), partition=number % 2)
                assert store["t"][number % 2].durable_offset > row["base_offset"]


def test_a_request_is_answered_after_its_last_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An fsync that ends before the next one is asked for must not answer the request."""
    synced: list[str] = []
    synced_before_the_answer: list[list[str]] = []
    answer = Pending.answer

    def add(_: Syncs, partition: Partition, offsets: range, done: Any) -> None:
        synced.append(partition.name)
        done(None)

    def noted(pending: Pending, body: dict[str, Any] | None) -> None:
        synced_before_the_answer.append(list(synced))
        answer(pending, body)

    monkeypatch.setattr(Syncs, "add", add)
    monkeypatch.setattr(Pending, "answer", noted)
    with logstore.open(tmp_path / "s", durability="fsync") as store, KafkaServer(store) as server:
        store.create_topic("t", partitions=3)
        body = produce_body("t", batch(b"v"))
        [row] = body["topic_data"][0]["partition_data"]
        body["topic_data"][0]["partition_data"] = [row | {"index": n} for n in range(3)]
        with Peer(server.address) as peer:
            assert peer.ask(PRODUCE, 9, body)["responses"]
    assert synced_before_the_answer == [["t-0", "t-1", "t-2"]]


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "s", durability="fsync") as store, KafkaServer(store) as server:
        store.create_topic("t")
        with Peer(server.address) as peer:
            for number in range(50):
                peer.send(PRODUCE, 9, produce_body("t", batch(b"%d" % number)))
            peer.send(18, 3, {"client_software_name": "a", "client_software_version": "1"})
            for number in range(50):
                answer = peer.receive(PRODUCE, 9)
                row = answer["responses"][0]["partition_responses"][0]
                assert row["base_offset"] == number
            assert peer.receive(18, 3)["api_keys"]
        assert values(store, "t") == [b"%d" % number for number in range(50)]


# ---- fetching ----


def test_what_fetch_refuses(store: Store, peer: Peer) -> None:
    store.create_topic("t")
    store["t"][0].extend([b"x"] * 8)
    store["t"][0].trim(2)
    for offset in (9, 1, -3):
        row = fetch(peer, "t", offset)
        assert (row["error_code"], row["high_watermark"]) == (1, -1)
    assert fetch(peer, "t", 8)["error_code"] == 0
    assert fetch(peer, "nope", 0)["error_code"] == 3
    for number in (4, -1, -2):  # no number counts from the end
        assert fetch(peer, "t", 2, partition=number)["error_code"] == 3
    assert fetch(peer, "t", 2, current_leader_epoch=5)["error_code"] == 75
    assert fetch(peer, "t", 2, version=12, last_fetched_epoch=3)["error_code"] == 1
    store["t"][0].become_leader(4)
    assert fetch(peer, "t", 2, current_leader_epoch=1)["error_code"] == 74
    body = fetch_body("t", 2) | {"session_id": 12345, "session_epoch": 3}
    assert peer.ask(FETCH, 11, body)["error_code"] == ErrorCode.FETCH_SESSION_ID_NOT_FOUND


def test_a_fetch_that_ends_with_a_segment_does_not_wait_for_more(store: Store, peer: Peer) -> None:
    store.create_topic("t", config={"segment.bytes": 1 << 14})
    for number in range(40):
        store["t"][0].append(b"%d" % number * 500)
    bases = [segment.base_offset for segment in store["t"][0].segments]
    assert len(bases) > 2
    row = fetch(peer, "t", 0, min_bytes=1 << 19, max_wait_ms=600_000)  # the peer waits for less
    sent = b"".join(store["t"][0].read_batches(0, 1 << 20))
    assert bytes(row["records"]) == sent[: store["t"][0].segments[0].size_bytes]


def test_min_bytes_are_counted_without_reading(
    store: Store, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_topic("t")
    store["t"][0].append(b"x" * 100)

    def refuse(*_: object, **__: object) -> bytes:
        raise AssertionError("a record was read")

    monkeypatch.setattr(Partition, "read_batches", refuse)
    peer.send(FETCH, 11, fetch_body("t", 0, min_bytes=5000, max_wait_ms=30_000))
    for _ in range(60):
        store["t"][0].append(b"x" * 100)
    answer = peer.receive(FETCH, 11)
    assert len(answer["responses"][0]["partitions"][0]["records"]) >= 5000


def test_a_produce_request_does_not_wait_in_the_loop_for_a_lock(
    store: Store, server: KafkaServer
) -> None:
    """While a thread has the lock of one partition, the loop serves other connections."""
    store.create_topic("t")
    store["t"][0].append(b"first")
    with Peer(server.address) as blocked, Peer(server.address) as other:
        with store["t"][0].parts.view.lock:
            blocked.send(PRODUCE, 9, produce_body("t", batch(b"second")))
            for _ in range(5):
                assert other.ask(18, 0, {})["error_code"] == 0
        row = blocked.receive(PRODUCE, 9)["responses"][0]["partition_responses"][0]
        assert (row["error_code"], row["base_offset"]) == (0, 1)
    assert values(store, "t") == [b"first", b"second"]


def test_the_first_batch_is_sent_however_large(store: Store, peer: Peer) -> None:
    store.create_topic("t")
    store["t"][0].append(bytes(50_000))
    store["t"][0].append(bytes(50_000))
    row = fetch(peer, "t", 0, max_bytes=10)
    assert len(row["records"]) == len(store["t"][0].read_batches(0, 1)[0])


def test_a_fetch_waits_for_the_next_append_of_anyone(store: Store, server: KafkaServer) -> None:
    store.create_topic("t")
    appends = [
        lambda: store["t"][0].append(b"by the partition"),
        lambda: store["t"].append(b"by the topic"),
    ]
    with Producer(store) as producer, Peer(server.address) as peer, Peer(server.address) as other:
        appends.append(lambda: producer.append("t", b"by a producer"))
        appends.append(lambda: produce(other, "t", batch(b"by a client")))
        for offset, append in enumerate(appends):
            peer.send(FETCH, 11, fetch_body("t", offset, max_wait_ms=60_000))
            produce(other, "t", b"")  # refused, and answered after the fetch has begun to wait
            thread = threading.Thread(target=append)
            thread.start()
            answer = peer.receive(FETCH, 11)
            thread.join()
            assert answer["responses"][0]["partitions"][0]["high_watermark"] == offset + 1


def test_a_fetch_that_waits_is_answered_when_its_time_is_up(store: Store, peer: Peer) -> None:
    store.create_topic("t")
    row = fetch(peer, "t", 0, max_wait_ms=50)
    assert (row["error_code"], bytes(row["records"])) == (0, b"")


def test_a_fetch_waits_for_enough_bytes(store: Store, server: KafkaServer) -> None:
    store.create_topic("t")
    with Peer(server.address) as peer:
        peer.send(FETCH, 11, fetch_body("t", 0, max_wait_ms=60_000, min_bytes=1000))
        for _ in range(30):
            store["t"][0].append(bytes(100))
        row = peer.receive(FETCH, 11)["responses"][0]["partitions"][0]
        assert len(row["records"]) >= 1000


def test_a_topic_that_is_deleted_ends_the_fetch(store: Store, server: KafkaServer) -> None:
    store.create_topic("t")
    with Peer(server.address) as peer:
        fetch(peer, "t", 0)
        peer.send(FETCH, 11, fetch_body("t", 0, max_wait_ms=60_000))
        with Peer(server.address) as other:
            produce(other, "nope", b"")
        store.delete_topic("t")
        row = peer.receive(FETCH, 11)["responses"][0]["partitions"][0]
        assert row["error_code"] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_only_decided_transactions_are_read_committed(store: Store, peer: Peer) -> None:
    store.create_topic("t")
    with Producer(store, "x") as producer:
        with producer.transaction() as tx:
            tx.append("t", b"committed")
        aborted = producer.transaction()
        aborted.append("t", b"aborted")
        aborted.abort()
        open_one = producer.transaction()
        open_one.append("t", b"open")
        row = fetch(peer, "t", 0, isolation=1)
        assert row["last_stable_offset"] == 4
        assert [each["first_offset"] for each in row["aborted_transactions"]] == [2]
        whole = bytes(row["records"])
        end = struct.unpack_from(">q", whole, len(whole) - 78)
        assert b"open" not in whole
        assert end
        row = fetch(peer, "t", 0)
        assert row["aborted_transactions"] is None
        assert b"open" in bytes(row["records"])
        open_one.abort()


def test_a_fetch_stops_at_the_high_watermark(store: Store, peer: Peer) -> None:
    log = store.create_topic("t")[0]
    for _ in range(5):
        log.append(b"x")
    log.parts.view.set_high_watermark(3)
    for version in (11, 4):
        row = fetch(peer, "t", 0, version=version)
        assert (row["error_code"], row["high_watermark"], row["last_stable_offset"]) == (0, 3, 3)
        assert bytes(row["records"]) == b"".join(log.parts.reader.read_batches(0))
        assert len(log.parts.reader.read_batches(0)) == 3
    for offset, code in ((3, 0), (5, 0), (6, 1)):
        row = fetch(peer, "t", offset, max_wait_ms=0)
        assert row["error_code"] == code and not row["records"]
