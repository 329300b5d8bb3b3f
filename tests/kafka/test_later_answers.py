"""Requests to coordinators whose records are committed later, by other nodes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import Store
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.internal_topics import (
    CONSUMER_OFFSETS,
    TRANSACTION_STATE,
    coordinator_partition,
)
from logstore.coordinators.transaction_coordinator import Transactions
from logstore.kafka import broker
from logstore.kafka.apis import handler
from logstore.kafka.calls import Call, Pending
from logstore.kafka.handlers import transactions as handlers
from logstore.kafka.network.connection import Connection
from logstore.kafka.server import KafkaServer
from tests.coordinators.holding import HoldingQuorum, Place
from tests.kafka.peer import Peer
from tests.kit import wait_until

OFFSETS: Place = CONSUMER_OFFSETS, coordinator_partition("g", 50)
STATES: Place = TRANSACTION_STATE, coordinator_partition("tx", 50)
PATIENCE = 120.0
DESCRIBE_GROUPS, LIST_GROUPS = 15, 16


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with logstore.open(tmp_path / "store", durability="os") as store:
        store.create_topic("t")
        yield store


@pytest.fixture
def quorum(store: Store) -> HoldingQuorum:
    return HoldingQuorum(store)


@pytest.fixture
def server(store: Store, quorum: HoldingQuorum) -> Iterator[KafkaServer]:
    with KafkaServer(store, config={"num.io.threads": 1}) as server:
        yield server


@pytest.fixture
def peer(server: KafkaServer) -> Iterator[Peer]:
    with Peer(server.address) as peer:
        yield peer


def lead(store: Store, quorum: HoldingQuorum, epoch: int = 1) -> None:
    """Lead both partitions, and load their coordinators."""
    quorum.lead(OFFSETS, epoch)
    quorum.lead(STATES, epoch)
    assert GroupCoordinator.of(store).load(OFFSETS[1], epoch)
    assert Transactions.of(store).load(STATES[1], epoch)


def commit_body(offset: int, group: str = "g") -> dict[str, Any]:
    row = {
        "partition_index": 0, "committed_offset": offset, "committed_leader_epoch": -1,
        "committed_metadata": "",
    }  # fmt: skip
    return {
        "group_id": group, "generation_id_or_member_epoch": -1, "member_id": "",
        "group_instance_id": None, "retention_time_ms": -1,
        "topics": [{"name": "t", "partitions": [row]}],
    }  # fmt: skip


def code_of(answer: dict[str, Any]) -> int:
    code: int = answer["topics"][0]["partitions"][0]["error_code"]
    return code


INIT = {
    "transactional_id": "tx", "transaction_timeout_ms": 60_000, "producer_id": -1,
    "producer_epoch": -1,
}  # fmt: skip


def test_many_commits_wait_and_no_thread_does(
    store: Store, quorum: HoldingQuorum, server: KafkaServer, peer: Peer
) -> None:
    lead(store, quorum)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(server.address)) for _ in range(20)]
        for number, each in enumerate(peers):
            each.send(8, 8, commit_body(number))
        wait_until(lambda: len(quorum.held[OFFSETS]) == 20)
        # The only worker is free: it answers another group's request at once.
        found = peer.ask(16, 4, {"states_filter": []})
        assert found["groups"] == []
        while quorum.places():
            quorum.commit(OFFSETS)
        assert [code_of(each.receive(8, 8)) for each in peers] == [0] * 20


def test_the_codes_of_loading_moving_and_refusing(
    store: Store, quorum: HoldingQuorum, peer: Peer
) -> None:
    def codes() -> tuple[int, int, int, int]:
        fetched = peer.ask(
            9, 8, {"groups": [{"group_id": "g", "topics": None}], "require_stable": False}
        )
        described = peer.ask(15, 5, {"groups": ["g"], "include_authorized_operations": False})
        return (
            code_of(peer.ask(8, 8, commit_body(1))),
            fetched["groups"][0]["error_code"],
            described["groups"][0]["error_code"],
            peer.ask(22, 4, INIT)["error_code"],
        )

    assert codes() == (16, 16, 16, 16)
    quorum.lead(OFFSETS, 1)
    quorum.lead(STATES, 1)
    assert codes() == (14, 14, 14, 14)
    assert GroupCoordinator.of(store).load(OFFSETS[1], 1)
    assert Transactions.of(store).load(STATES[1], 1)
    for answer, code in ((quorum.refuse, 15), (quorum.break_off, 16)):
        peer.send(8, 8, commit_body(1))
        wait_until(quorum.places)
        answer(OFFSETS)
        assert code_of(peer.receive(8, 8)) == code
        peer.send(22, 4, INIT)
        wait_until(quorum.places)
        answer(STATES)
        assert peer.receive(22, 4)["error_code"] == code


def test_what_waits_is_answered_when_the_partitions_are_lost(
    store: Store, quorum: HoldingQuorum, server: KafkaServer
) -> None:
    lead(store, quorum)
    with Peer(server.address) as first, Peer(server.address) as second:
        first.send(8, 8, commit_body(1))
        second.send(22, 4, INIT)
        wait_until(lambda: len(quorum.places()) == 2)
        GroupCoordinator.of(store).drop(OFFSETS[1], quorum.lose(OFFSETS))
        Transactions.of(store).drop(STATES[1], quorum.lose(STATES))
        assert code_of(first.receive(8, 8)) == 16
        assert second.receive(22, 4)["error_code"] == 16
        quorum.answer_late()
        lead(store, quorum, 2)
        answer = first.ask(
            9, 8, {"groups": [{"group_id": "g", "topics": None}], "require_stable": False}
        )
        assert answer["groups"] == [{"group_id": "g", "topics": [], "error_code": 0}]


def test_a_time_out_is_7_and_the_retry_51_until_the_transaction_has_ended(
    store: Store, quorum: HoldingQuorum, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead(store, quorum)
    peer.send(22, 4, INIT)
    wait_until(quorum.places)
    quorum.commit(STATES)
    made = peer.receive(22, 4)
    fields = {
        "transactional_id": "tx", "producer_id": made["producer_id"],
        "producer_epoch": made["producer_epoch"],
    }  # fmt: skip
    peer.send(24, 3, {
        "v3_and_below_transactional_id": "tx", "v3_and_below_producer_id": made["producer_id"],
        "v3_and_below_producer_epoch": made["producer_epoch"],
        "v3_and_below_topics": [{"name": "t", "partitions": [0]}],
    })  # fmt: skip
    wait_until(quorum.places)
    quorum.commit(STATES)
    added = peer.receive(24, 3)["results_by_topic_v3_and_below"][0]["results_by_partition"]
    assert [row["partition_error_code"] for row in added] == [0]
    monkeypatch.setattr(handlers, "ANSWER_SECONDS", 0.05)
    assert peer.ask(26, 4, fields | {"committed": True})["error_code"] == 7
    assert peer.ask(26, 4, fields | {"committed": True})["error_code"] == 51
    quorum.commit(STATES)
    assert peer.ask(26, 4, fields | {"committed": True})["error_code"] == 51
    quorum.commit_all()
    assert peer.ask(26, 4, fields | {"committed": True})["error_code"] == 0


def test_a_heartbeat_of_the_consumer_protocol_is_answered_when_it_is_committed(
    store: Store, quorum: HoldingQuorum, peer: Peer
) -> None:
    lead(store, quorum)
    peer.send(68, 1, {
        "group_id": "g", "member_id": "m", "member_epoch": 0, "instance_id": None,
        "rack_id": None, "rebalance_timeout_ms": 1000, "subscribed_topic_names": ["t"],
        "subscribed_topic_regex": None, "server_assignor": None, "topic_partitions": [],
    })  # fmt: skip
    wait_until(quorum.places)
    assert GroupCoordinator.of(store).book.consumer_group("g") is None
    quorum.commit(OFFSETS)
    assert peer.receive(68, 1)["member_epoch"] == 2


def test_a_marker_of_an_old_coordinator_is_fenced(
    store: Store, quorum: HoldingQuorum, peer: Peer
) -> None:
    marker = {
        "producer_id": 7, "producer_epoch": 3, "transaction_result": True, "coordinator_epoch": 5,
        "topics": [{"name": "t", "partition_indexes": [0]}], "transaction_version": 0,
    }  # fmt: skip
    for change, code in (
        ({}, 0),
        ({"coordinator_epoch": 4}, 52),
        ({"producer_epoch": 2}, 47),
        ({"coordinator_epoch": 6}, 0),
    ):
        [answer] = peer.ask(27, 1, {"markers": [marker | change]})["markers"]
        assert answer["topics"][0]["partitions"][0]["error_code"] == code


def test_an_answer_that_is_faster_than_its_handler_returns(
    server: KafkaServer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer belongs to the next request then: it must not be returned once more."""
    late: list[bool] = []
    answered = threading.Event()

    def slow(call: Call) -> Pending:
        call.wait()
        pending = Pending(call)
        pending.answer({"error_code": 0, "groups": []})
        assert answered.wait(PATIENCE)  # the client has the answer before this returns
        return pending

    decoded = Connection.decoded

    def spied(connection: Connection) -> None:
        late.append(not connection._busy)
        decoded(connection)

    monkeypatch.setattr(broker, "handler", lambda key: slow if key == LIST_GROUPS else handler(key))
    monkeypatch.setattr(Connection, "decoded", spied)
    body = {"states_filter": [], "types_filter": []}
    assert peer.ask(LIST_GROUPS, 5, body)["error_code"] == 0
    answered.set()
    # The one worker makes this answer after it has returned from the handler above.
    peer.ask(DESCRIBE_GROUPS, 5, {"groups": ["g"], "include_authorized_operations": False})
    assert not late
