"""A disk that is full or that fails: the right error, other partitions go on, no ack is a lie."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import KafkaServer, Store
from logstore.kafka.protocol.errors import ErrorCode
from logstore.testing.io import inject_io
from logstore.testing.io_calls import SYNCS, Fault
from tests.kafka.peer import Peer, batch, fetch_body, produce_body
from tests.kafka.test_server import error_of_produce, until

PRODUCE, FETCH, METADATA, API_VERSIONS, CREATE_TOPICS = 0, 1, 3, 18, 19
STORAGE = ErrorCode.KAFKA_STORAGE_ERROR


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A disk that fails is no mistake of the server: no traceback."""
    yield
    found = [each for each in caplog.get_records("call") if each.levelno >= logging.ERROR]
    assert [each for each in found if each.name in ("asyncio", "logstore.kafka")] == []


@pytest.fixture(params=["os", "fsync"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    with logstore.open(tmp_path / "store", durability=request.param) as opened:
        for name in ("bad", "good"):
            opened.create_topic(name)
        yield opened


def produced(peer: Peer, topic: str, *values: bytes, **options: Any) -> int:
    return error_of_produce(peer.ask(PRODUCE, 9, produce_body(topic, batch(*values, **options))))


def fetched(peer: Peer, topic: str, offset: int = 0) -> tuple[int, int]:
    """Return the error and the size of what is read."""
    row = peer.ask(FETCH, 11, fetch_body(topic, offset))["responses"][0]["partitions"][0]
    return row["error_code"], len(row["records"])


def values(store: Store, topic: str) -> list[bytes | None]:
    return [record.value for record in store[topic][0]]


# ---- full ----


@pytest.mark.parametrize("compression", [None, "gzip"])  # in the loop, and by a worker
def test_a_full_disk_is_answered_and_ends_when_there_is_space(
    store: Store, server: KafkaServer, peer: Peer, compression: str | None
) -> None:
    assert produced(peer, "bad", b"before") == 0
    assert produced(peer, "good", b"before") == 0
    full = Fault.fail(errno.ENOSPC, ("pwrite", "allocate"), "*bad-0/*", forever=True)
    with inject_io(full, root=store.path):
        for _ in range(3):
            assert produced(peer, "bad", b"lost", compression=compression) == STORAGE
        assert produced(peer, "good", b"after", compression=compression) == 0
        assert fetched(peer, "bad")[0] == 0
        assert fetched(peer, "bad")[1] > 0, "what is there is read"
    assert produced(peer, "bad", b"after", compression=compression) == 0
    assert values(store, "bad") == values(store, "good") == [b"before", b"after"]
    assert store["bad"][0].check() == []


def test_a_request_for_several_partitions_of_which_one_is_full(
    store: Store, server: KafkaServer, peer: Peer
) -> None:
    body = produce_body("bad", batch(b"x"))
    body["topic_data"] += produce_body("good", batch(b"x"))["topic_data"]
    full = Fault.fail(errno.ENOSPC, ("pwrite", "allocate"), "*bad-0/*", forever=True)
    with inject_io(full, root=store.path):
        answer = peer.ask(PRODUCE, 9, body)
    codes = [row["partition_responses"][0]["error_code"] for row in answer["responses"]]
    assert codes == [STORAGE, 0]
    assert values(store, "bad") == []
    assert values(store, "good") == [b"x"]


def test_a_topic_that_cannot_be_made(store: Store, server: KafkaServer, peer: Peer) -> None:
    new = {"name": "new", "num_partitions": 1, "replication_factor": 1}
    asked = {"topics": [new], "timeout_ms": 1000}
    body = {"topics": [{"name": "auto"}], "allow_auto_topic_creation": True}
    full = Fault.fail(errno.ENOSPC, ("mkdir", "pwrite", "allocate"), forever=True)
    with inject_io(full, root=store.path):
        assert peer.ask(CREATE_TOPICS, 5, asked)["topics"][0]["error_code"] == STORAGE
        assert peer.ask(METADATA, 8, body)["topics"][0]["error_code"] == STORAGE
    assert peer.ask(CREATE_TOPICS, 5, asked)["topics"][0]["error_code"] == 0
    assert peer.ask(METADATA, 8, body)["topics"][0]["error_code"] == 0
    assert {"new", "auto"} <= set(store)


def test_no_path_of_the_server_is_told(store: Store, server: KafkaServer, peer: Peer) -> None:
    new = {"name": "new", "num_partitions": 1, "replication_factor": 1}
    full = Fault.fail(errno.ENOSPC, ("mkdir", "pwrite", "allocate"), forever=True)
    with inject_io(full, root=store.path):
        answer = peer.ask(PRODUCE, 9, produce_body("bad", batch(b"x")))
        refused = [answer["responses"][0]["partition_responses"][0]]
        refused += peer.ask(CREATE_TOPICS, 5, {"topics": [new], "timeout_ms": 1000})["topics"]
    for row in refused:
        assert row["error_code"] == STORAGE
        assert "No space left" in row["error_message"]
        assert str(store.path.parent) not in row["error_message"]


def test_coordinators_on_a_full_disk_are_not_available(
    store: Store, server: KafkaServer, peer: Peer
) -> None:
    """As a broker's: clients look for the coordinator and try again, and do not give up."""
    row = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
    commit = {"group_id": "g", "topics": [{"name": "good", "partitions": [row]}]}
    init = {"transactional_id": "tx", "transaction_timeout_ms": 60_000}
    heartbeat = {
        "group_id": "new", "member_id": "m", "member_epoch": 0, "rebalance_timeout_ms": 9_000,
        "subscribed_topic_names": ["good"], "topic_partitions": [],
    }  # fmt: skip

    def codes() -> list[int]:
        committed = peer.ask(8, 7, commit)["topics"][0]["partitions"][0]["error_code"]
        others = (peer.ask(22, 4, init), peer.ask(68, 1, heartbeat))
        return [committed, *(each["error_code"] for each in others)]

    full = Fault.fail(errno.ENOSPC, ("mkdir", "pwrite", "allocate"), forever=True)
    with inject_io(full, root=store.path):
        assert codes() == [ErrorCode.COORDINATOR_NOT_AVAILABLE] * 3
    assert codes() == [0, 0, 0]


def test_acks_0_on_a_full_disk_closes_the_connection(store: Store, server: KafkaServer) -> None:
    full = Fault.fail(errno.ENOSPC, ("pwrite", "allocate"), "*bad-0/*", forever=True)
    with inject_io(full, root=store.path), Peer(server.address) as silent:
        silent.send(PRODUCE, 9, produce_body("bad", batch(b"x"), acks=0))
        assert silent.is_closed()


def test_a_real_producer_survives_a_full_disk(store: Store, server: KafkaServer) -> None:
    kafka = pytest.importorskip("confluent_kafka")
    failed: list[object] = []
    producer = kafka.Producer(
        {
            "bootstrap.servers": server.bootstrap_servers,
            "enable.idempotence": True,
            "retry.backoff.ms": 20,
            "retry.backoff.max.ms": 50,
            "message.timeout.ms": 30_000,
        }
    )

    def produce(*numbers: int) -> None:
        for number in numbers:
            producer.produce(
                "bad", b"%d" % number,
                on_delivery=lambda error, _: failed.append(error) if error else None,
            )  # fmt: skip

    produce(0, 1)
    assert producer.flush(20) == 0
    name = f'errors_total{{api="Produce",error="{STORAGE.name}"}}'
    full = Fault.fail(errno.ENOSPC, ("pwrite", "allocate"), "*bad-0/*", forever=True)
    with inject_io(full, root=store.path):
        produce(2, 3)
        until(lambda: producer.poll(0.01) or server.metrics().get(name, 0) >= 2, 20)
    assert producer.flush(30) == 0
    assert failed == []
    assert values(store, "bad") == [b"0", b"1", b"2", b"3"]


# ---- failed fsync ----


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Store]:
    with logstore.open(tmp_path / "durable", durability="fsync") as opened:
        for name in ("bad", "good"):
            opened.create_topic(name)
        yield opened


def test_a_failed_fsync_is_answered_to_all_that_wait_and_until_the_store_is_opened_again(
    tmp_path: Path, durable: Store
) -> None:
    with KafkaServer(durable) as server, Peer(server.address) as peer:
        assert produced(peer, "bad", b"durable") == 0
        assert produced(peer, "good", b"durable") == 0
        peers = [Peer(server.address) for _ in range(5)]
        codes: list[int] = []
        with inject_io(Fault.fail(errno.EIO, SYNCS, "*bad-0/*.log"), root=durable.path) as injected:
            threads = [
                threading.Thread(target=lambda each=each: codes.append(produced(each, "bad", b"?")))
                for each in peers
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert injected.fired == 1, "it is not asked a second time: the pages are gone"
        assert codes == [STORAGE] * 5
        for each in peers:
            assert produced(each, "bad", b"later") == STORAGE, "the connection stays"
            assert produced(each, "good", b"other") == 0
            each.socket.close()
        code, _ = fetched(peer, "good")
        assert code == 0
        code, size = fetched(peer, "bad", 1)
        assert (code, size) in ((STORAGE, 0), (0, 0)), "what failed is not read as if it were there"
    durable.close()
    with (
        logstore.open(tmp_path / "durable", durability="fsync") as store,
        KafkaServer(store) as server,
        Peer(server.address) as peer,
    ):
        assert produced(peer, "bad", b"again") == 0
        found = values(store, "bad")
        assert (found[0], found[-1]) == (b"durable", b"again")
        assert b"later" not in found


# ---- reads ----


def test_an_error_of_a_read_closes_that_connection_and_no_other(
    store: Store, server: KafkaServer, peer: Peer
) -> None:
    for name in ("bad", "good"):
        assert produced(peer, name, bytes(100_000)) == 0
    fault = Fault.fail(errno.EIO, "pread", "*bad-0/*.log", forever=True)
    with inject_io(fault, root=store.path), Peer(server.address) as other:
        other.send(FETCH, 11, fetch_body("bad", 0))
        try:
            row = other.receive(FETCH, 11)["responses"][0]["partitions"][0]
        except (EOFError, ConnectionResetError):
            pass
        else:
            assert row["error_code"] == STORAGE
        assert fetched(peer, "good")[0] == 0
        assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
    code, size = fetched(peer, "bad")
    assert code == 0
    assert size > 100_000
