"""Answers that a real broker gives as well; tests/interop compares them with one."""

from __future__ import annotations

from typing import Any

import logstore
from logstore import Store
from tests.kafka.peer import Peer, batch, fetch_body, produce_body


def begin(peer: Peer, name: str) -> dict[str, Any]:
    """Return the fields that name a producer with a transactional id."""
    made = peer.ask(22, 4, {"transactional_id": name, "transaction_timeout_ms": 60_000})
    return {"transactional_id": name, "producer_id": made["producer_id"], "producer_epoch": 0}


def test_a_topic_that_is_named_by_name_and_by_id_is_not_deleted(peer: Peer, store: Store) -> None:
    topic = store.create_topic("t")
    assert topic.id is not None
    rows = [
        {"name": "t", "topic_id": bytes(16)},
        {"name": None, "topic_id": topic.id.bytes},
    ]
    [row] = peer.ask(20, 6, {"topics": rows, "timeout_ms": 1000})["responses"]
    assert (row["name"], row["topic_id"], row["error_code"]) == ("t", topic.id.bytes, 42)
    assert "t" in store


def test_a_cursor_of_a_topic_that_is_not_asked_for_is_refused(peer: Peer, store: Store) -> None:
    store.create_topic("a")
    cursor = {"topic_name": "b", "partition_index": 0}
    body = {"topics": [{"name": "a"}], "response_partition_limit": 9, "cursor": cursor}
    assert [row["error_code"] for row in peer.ask(75, 0, body)["topics"]] == [42]


def test_a_fetch_of_a_replica_is_refused(peer: Peer, store: Store) -> None:
    store.create_topic("t")
    answer = peer.ask(1, 11, fetch_body("t", 0) | {"replica_id": 5})
    [row] = answer["responses"][0]["partitions"]
    assert (row["error_code"], row["aborted_transactions"]) == (6, None)


def test_a_sync_of_version_5_names_the_protocol(peer: Peer) -> None:
    body = {"group_id": "g", "generation_id": 1, "member_id": "m", "assignments": []}
    assert peer.ask(14, 5, body)["error_code"] == 23
    assert peer.ask(14, 4, body)["error_code"] == 25


def test_the_epoch_before_the_first_is_fenced(peer: Peer) -> None:
    mine = begin(peer, "tx")
    added = {f"v3_and_below_{name}": value for name, value in mine.items()}
    peer.ask(24, 3, added | {"v3_and_below_topics": []})
    assert peer.ask(26, 4, mine | {"committed": True})["error_code"] == 0
    assert peer.ask(26, 4, mine | {"committed": True})["error_code"] == 0
    older = mine | {"producer_epoch": -1, "committed": True}
    assert peer.ask(26, 4, older)["error_code"] == 90


def test_a_batch_of_another_producer_id_is_refused(peer: Peer, store: Store) -> None:
    store.create_topic("t")
    mine = begin(peer, "tx")
    raw = batch(b"a", producer=(mine["producer_id"] + 1, 0, 0), transactional=True)
    answer = peer.ask(0, 9, produce_body("t", raw, transactional_id="tx"))
    [row] = answer["responses"][0]["partition_responses"]
    assert row["error_code"] == 49


def test_offsets_of_unknown_partitions_are_not_deleted(peer: Peer, store: Store) -> None:
    store.create_topic("t")
    row = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
    rows = [{"name": "t", "partitions": [row]}]
    commit = {"group_id": "g", "generation_id_or_member_epoch": -1, "topics": rows}
    assert peer.ask(8, 7, commit)["topics"][0]["partitions"][0]["error_code"] == 0
    asked = [{"partition_index": 0}, {"partition_index": 7}]
    body = {"group_id": "g", "topics": [{"name": "t", "partitions": asked}]}
    [topic] = peer.ask(47, 0, body)["topics"]
    assert [each["error_code"] for each in topic["partitions"]] == [0, 3]


def test_a_setting_of_the_node_that_was_never_set_can_be_deleted(peer: Peer, store: Store) -> None:
    """kafka-reassign-partitions deletes its throttles, and fails if it cannot."""

    def altered(name: str, operation: int, value: str | None) -> int:
        config = {"name": "leader.replication.throttled.rate"}
        config |= {"config_operation": operation, "value": value}
        row = {"resource_type": 4, "resource_name": name, "configs": [config]}
        code: int = peer.ask(44, 1, {"resources": [row]})["responses"][0]["error_code"]
        return code

    node = str(store.identity.node_id)
    assert [altered(node, 1, None), altered("", 1, None), altered(node, 0, "1")] == [0, 0, 40]


def test_settings_are_checked_before_the_topic_is_looked_for(peer: Peer) -> None:
    for name, code in (("no.such", 40), ("retention.ms", 3)):
        setting = {"name": name, "config_operation": 0, "value": "1000000"}
        row = {"resource_type": 2, "resource_name": "never-made", "configs": [setting]}
        answer = peer.ask(44, 1, {"resources": [row], "validate_only": False})
        assert answer["responses"][0]["error_code"] == code


def test_an_offset_below_zero_is_committed_and_is_no_position(peer: Peer, store: Store) -> None:
    """kafkajs commits -2 or -1 for "the start" or "the end" if its offset is out of range."""
    store.create_topic("t")
    store["t"][0].extend([b"a", b"b"])
    row = {"partition_index": 0, "committed_offset": -2, "committed_metadata": ""}
    rows = [{"name": "t", "partitions": [row]}]
    commit = {"group_id": "g", "generation_id_or_member_epoch": -1, "topics": rows}
    assert peer.ask(8, 7, commit)["topics"][0]["partitions"][0]["error_code"] == 0
    asked = {"group_id": "g", "topics": [{"name": "t", "partition_indexes": [0]}]}
    assert peer.ask(9, 7, asked)["topics"][0]["partitions"][0]["committed_offset"] == -2
    place = logstore.TopicPartition("t", 0)
    with logstore.Consumer(store, "t", group_id="g", timeout=5, auto_commit=False) as consumer:
        assert next(iter(consumer)).offset == 0, "it begins at its start"
        assert consumer.committed(place) == {place: None}
    assert logstore.Groups(store).lag("g") == {}
