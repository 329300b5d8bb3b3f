"""Transactions of version 2 (KIP-890) by raw frames; tests/interop compares them with a broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import Store
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS, TRANSACTION_STATE
from logstore.coordinators.transaction_coordinator import Transactions
from logstore.coordinators.transaction_state import TransactionMetadata, decode_key
from logstore.kafka.protocol.errors import ErrorCode
from logstore.kafka.server import KafkaServer
from logstore.testing.fixtures import KafkaServerUnderTest
from logstore.testing.io import record_io
from tests.kafka.peer import Peer, batch, produce_body


class Client:
    """A transactional producer that sends what a Java client of version 4 sends."""

    def __init__(self, peer: Peer, name: str = "tx") -> None:
        self.peer = peer
        self.name = name
        made = peer.ask(22, 5, {"transactional_id": name, "transaction_timeout_ms": 60_000})
        assert made["error_code"] == 0
        self.producer = made["producer_id"], made["producer_epoch"]
        self.sequences: dict[int, int] = {}

    @property
    def fields(self) -> dict[str, Any]:
        producer_id, epoch = self.producer
        return {"transactional_id": self.name, "producer_id": producer_id, "producer_epoch": epoch}

    def body(self, *partitions: int, topic: str = "t") -> dict[str, Any]:
        """Return a Produce request with a batch of one record for each partition."""
        rows = []
        for number in partitions:
            sequence = self.sequences.get(number, 0)
            self.sequences[number] = sequence + 1
            raw = batch(b"a", producer=(*self.producer, sequence), transactional=True)
            rows.append({"index": number, "records": raw})
        body = produce_body(topic, None, transactional_id=self.name)
        body["topic_data"][0]["partition_data"] = rows
        return body

    def produce(self, *partitions: int) -> list[int]:
        answer = self.peer.ask(0, 12, self.body(*partitions))
        return [row["error_code"] for row in answer["responses"][0]["partition_responses"]]

    def commit_offset(self, group: str, offset: int) -> int:
        row = {"partition_index": 0, "committed_offset": offset, "committed_metadata": ""}
        topics = [{"name": "t", "partitions": [row]}]
        answer = self.peer.ask(28, 5, self.fields | {"group_id": group, "topics": topics})
        code: int = answer["topics"][0]["partitions"][0]["error_code"]
        return code

    def end(self, *, commit: bool) -> dict[str, Any]:
        answer = self.peer.ask(26, 5, self.fields | {"committed": commit})
        return {name: answer[name] for name in ("error_code", "producer_id", "producer_epoch")}

    def next(self, answer: dict[str, Any]) -> None:
        assert answer["error_code"] == 0
        self.producer = answer["producer_id"], answer["producer_epoch"]
        self.sequences.clear()


def states(store: Store, only: str | None = None) -> list[TransactionMetadata]:
    """Return the records of the coordinator, of one transactional id or of all."""
    found = []
    for partition in store[TRANSACTION_STATE]:
        for record in partition:
            assert record.key is not None and record.value is not None
            name = decode_key(record.key)
            if name is not None and only in (None, name):
                found.append(TransactionMetadata.decode(name, record.value, record.headers))
    return found


def test_the_versions_name_the_feature(peer: Peer) -> None:
    name = {"client_software_name": "peer", "client_software_version": "1"}
    old, new = peer.ask(18, 3, name), peer.ask(18, 4, name)
    supported = {row["name"]: (row["min_version"], row["max_version"])
                 for row in new["supported_features"]}  # fmt: skip
    assert supported["transaction.version"] == (0, 2)
    assert all(row["min_version"] > 0 for row in old["supported_features"])
    for answer in (old, new):
        assert answer["finalized_features_epoch"] >= 0
        levels = {row["name"]: (row["min_version_level"], row["max_version_level"])
                  for row in answer["finalized_features"]}  # fmt: skip
        assert levels["transaction.version"] == (2, 2)


def test_a_produce_adds_its_partitions_with_one_record(peer: Peer, store: Store) -> None:
    store.create_topic("t", partitions=3)
    client = Client(peer)
    assert client.produce(0, 1) == [0, 0]
    assert client.produce(0, 1) == [0, 0]
    assert client.produce(2) == [0]
    found = states(store)
    assert [len(each.partitions) for each in found] == [0, 2, 3]
    assert [each.client_version for each in found] == [0, 2, 2]
    client.next(client.end(commit=True))
    assert client.producer[1] == 1
    assert {each.producer_epoch for each in states(store)[3:]} == {1}, "of Prepare and Complete"
    assert client.produce(0) == [0]
    assert store["t"][0].last_stable_offset == 3


def test_the_record_is_durable_before_the_first_batch_is_appended(tmp_path: Path) -> None:
    with (
        record_io(tmp_path) as trace,
        logstore.open(tmp_path / "store") as store,
        KafkaServer(store) as server,
    ):
        store.create_topic("t")
        with Peer(server.address) as peer:
            client = Client(peer)
            trace.mark("begun")
            assert client.produce(0) == [0]
            trace.mark("produced")
    marks = [number for number, call in enumerate(trace.operations) if call.kind == "mark"]
    calls = [
        (call.kind, call.path.split("/")[-2])
        for call in trace.operations[marks[0] : marks[1]]
        if call.path.endswith(".log") and call.kind in ("pwrite", "datasync", "sync")
    ]
    state = next(name for _, name in calls if name.startswith(TRANSACTION_STATE))
    assert calls == [("pwrite", state), ("datasync", state), ("pwrite", "t-0"), ("datasync", "t-0")]


def test_offsets_are_added_by_their_commit(peer: Peer, store: Store) -> None:
    store.create_topic("t")
    client = Client(peer)
    groups = logstore.Groups(store)
    for commit in (False, True):
        assert client.commit_offset("g", 7) == 0
        assert [name for name, _ in states(store)[-1].partitions] == ["__consumer_offsets"]
        assert groups.committed("g") == {}
        client.next(client.end(commit=commit))
    assert groups.committed("g")[logstore.TopicPartition("t", 0)].offset == 7


@pytest.mark.parametrize("topic", [CONSUMER_OFFSETS, TRANSACTION_STATE])
def test_no_client_adds_an_internal_topic(peer: Peer, store: Store, topic: str) -> None:
    """Else its EndTxn would write markers into the records of the coordinators."""
    store.create_topic("t")
    client = Client(peer)
    assert client.commit_offset("g", 1) == 0
    client.next(client.end(commit=True))
    number = store[topic].partition_numbers[0]
    asked = {f"v3_and_below_{name}": value for name, value in client.fields.items()}
    asked["v3_and_below_topics"] = [
        {"name": topic, "partitions": [number]},
        {"name": "t", "partitions": [0]},
    ]
    internal, other = peer.ask(24, 3, asked)["results_by_topic_v3_and_below"]
    [row] = internal["results_by_partition"]
    assert row["partition_error_code"] == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    [row] = other["results_by_partition"]
    assert row["partition_error_code"] == ErrorCode.OPERATION_NOT_ATTEMPTED


@pytest.mark.parametrize("given", [(7, -1), (-1, 3)])
def test_half_an_identity_is_no_identity(peer: Peer, given: tuple[int, int]) -> None:
    asked: dict[str, Any] = {"transactional_id": None, "transaction_timeout_ms": 60_000}
    asked["producer_id"], asked["producer_epoch"] = given
    for name in (None, "tx"):
        answer = peer.ask(22, 4, asked | {"transactional_id": name})
        assert answer["error_code"] == ErrorCode.INVALID_REQUEST
        assert (answer["producer_id"], answer["producer_epoch"]) == (-1, -1)


def test_a_batch_that_does_not_begin_at_0_is_refused(peer: Peer, store: Store) -> None:
    store.create_topic("t")
    client = Client(peer)
    client.sequences[0] = 5
    assert client.produce(0) == [45]
    assert store["t"][0].end_offset == 0
    client.sequences[0] = 0
    assert client.produce(0) == [0]


def test_an_end_is_repeated_and_a_late_batch_is_fenced(peer: Peer, store: Store) -> None:
    store.create_topic("t")
    client = Client(peer)
    assert client.produce(0) == [0]
    ended = client.end(commit=True)
    assert client.end(commit=True) == ended
    assert client.end(commit=False)["error_code"] == 48
    assert client.produce(0) == [47]
    assert client.commit_offset("g", 7) == 47
    client.next(ended)
    assert client.produce(0) == [0]


@pytest.mark.parametrize("ended", [True, False])
def test_a_transaction_of_a_client_continues_after_a_crash(tmp_path: Path, ended: bool) -> None:
    """The transaction of a producer of the process that crashed is aborted."""
    with KafkaServerUnderTest(tmp_path / "server") as under_test:
        under_test.store.create_topic("t")
        ours = logstore.Producer(under_test.store, "ours").transaction()
        ours.append("t", b"ours")
        with Peer(under_test.server.address) as peer:
            client = Client(peer)
            assert client.produce(0) == [0]
            answer = client.end(commit=True) if ended else None
        store = under_test.crash()
        described = {each.transactional_id: each for each in Transactions.of(store).list()}
        assert described["ours"].state == "CompleteAbort"
        with Peer(under_test.server.address) as client.peer:
            if ended:
                assert client.end(commit=True) == answer
            else:
                assert described["tx"].state == "Ongoing"
                assert client.produce(0) == [0]
                client.next(client.end(commit=True))
        values = [record.value for record in store["t"][0].scan(isolation="read_committed")]
        assert values == [b"a"] * (1 if ended else 2)


def test_a_client_is_not_aborted_when_the_store_closes(tmp_path: Path) -> None:
    with logstore.open(tmp_path, durability="os") as store, KafkaServer(store) as server:
        store.create_topic("t")
        with Peer(server.address) as peer:
            client = Client(peer)
            assert client.produce(0) == [0]
    with logstore.open(tmp_path, durability="os") as store, KafkaServer(store) as server:
        with Peer(server.address) as client.peer:
            assert client.end(commit=True)["producer_epoch"] == 1
        assert [r.value for r in store["t"][0].scan(isolation="read_committed")] == [b"a"]


def test_a_marker_of_version_2_needs_a_newer_epoch(peer: Peer, store: Store) -> None:
    store.create_topic("t")
    client = Client(peer)
    assert client.produce(0) == [0]
    producer_id, epoch = client.producer
    marker = {
        "producer_id": producer_id, "producer_epoch": epoch, "transaction_result": False,
        "coordinator_epoch": 0, "topics": [{"name": "t", "partition_indexes": [0]}],
    }  # fmt: skip
    for version, change, code in ((2, 0, 47), (2, 1, 0), (2, 1, 0), (0, 1, 0)):
        row = marker | {"transaction_version": version, "producer_epoch": epoch + change}
        [answer] = peer.ask(27, 2, {"markers": [row]})["markers"]
        assert answer["topics"][0]["partitions"][0]["error_code"] == code
