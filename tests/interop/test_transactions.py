"""Transactions that logstore wrote, in Kafka's hands: its dump tool, and a broker that takes over.

The broker first makes its own topics, so that the cluster knows their ids; their directories are
thrown away and logstore writes new ones.  A process of logstore then dies with two transactions
open: one the broker has to abort by itself, when its time is up, and one when a producer asks for
its transactional id.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import logstore
from logstore import Producer, Transactions
from logstore.coordinators.internal_topics import (
    CONSUMER_OFFSETS,
    INTERNAL_TOPICS,
    TRANSACTION_STATE,
)
from logstore.coordinators.offset_book import OffsetBook
from logstore.coordinators.transaction_state import TransactionState

from .kafka import Broker, dump_log, require_kafka
from .rows import Row

pytestmark = pytest.mark.interop

TOPICS = ("events", CONSUMER_OFFSETS, TRANSACTION_STATE)
PATIENCE = 180.0


def write_and_die(log_dir: Path, ids: dict[str, uuid.UUID]) -> None:
    """In a process of its own: transactions of every ending, and two of none."""
    store = logstore.open(log_dir)
    store.create_topic("events", topic_id=ids["events"])
    for name in (CONSUMER_OFFSETS, TRANSACTION_STATE):
        store.create_topic(name, config=INTERNAL_TOPICS[name], topic_id=ids[name])
    with Producer(store, "copier") as copier:
        for n in range(3):
            with copier.transaction() as tx:
                for m in range(4):
                    tx.send("events", b"committed %d %d" % (n, m), key=b"k")
                tx.commit_offsets({("source", 0): 40 + n, ("source", 1): 7}, group_id="workers")
        tx = copier.transaction()
        tx.append("events", b"aborted")
        tx.commit_offsets({("source", 0): 1}, group_id="workers")
        tx.abort()
    with Producer(store) as plain:
        plain.append("events", b"plain")
    asked_for = Producer(store, "asked-for")
    asked_for.transaction().append("events", b"hanging until asked for")
    timed_out = Producer(store, "timed-out", transaction_timeout=2.0)
    timed_out.transaction().append("events", b"hanging until its time is up")
    with Producer(store) as plain:
        plain.append("events", b"behind the hanging ones")
    store.sync()
    os._exit(7)


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that is not running yet, and what a dead process of logstore left for it."""
    require_kafka()
    confluent_kafka = pytest.importorskip("confluent_kafka")
    settings = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 200}
    broker = Broker(tmp_path_factory.mktemp("transactions"), settings)
    with broker:
        broker.create_topic("events", {"retention.ms": -1})
        client = {"bootstrap.servers": broker.bootstrap}
        warm = confluent_kafka.Producer({**client, "transactional.id": "warm"})
        warm.init_transactions(PATIENCE)
        consumer = confluent_kafka.Consumer({**client, "group.id": "warm"})
        consumer.commit(
            offsets=[confluent_kafka.TopicPartition("events", 0, 0)], asynchronous=False
        )
        consumer.close()
        del warm, consumer  # with their threads: this process forks
    with logstore.open(broker.log_dir, readonly=True) as store:
        ids = {name: store[name].id for name in TOPICS}
    for name in TOPICS:
        shutil.rmtree(broker.partition_dir(name))
    child = multiprocessing.get_context("fork").Process(
        target=write_and_die, args=(broker.log_dir, ids)
    )
    child.start()
    child.join(120)
    assert child.exitcode == 7
    yield broker
    broker.kill()


def test_kafkas_tool_decodes_the_states(left_behind: Broker) -> None:
    text = dump_log([left_behind.partition_dir(TRANSACTION_STATE)], decode_transactions=True)
    found = re.findall(r'"transactionalId":"([\w-]+)".*"transactionStatus":(\d)', text)
    states = [(name, TransactionState(int(number)).kafka_name) for name, number in found]
    copier = [state for name, state in states if name == "copier"]
    assert copier[0] == "Empty", text
    assert copier.count("PrepareCommit") == copier.count("CompleteCommit") == 3
    assert copier[-2:] == ["PrepareAbort", "CompleteAbort"]
    assert [state for name, state in states if name == "timed-out"] == ["Empty", "Ongoing"]
    assert '{"topic":"events","partitionIds":[0]}' in text
    assert text.count('"clientTransactionVersion":2') == len(states)


def test_kafkas_tool_decodes_the_offsets(left_behind: Broker) -> None:
    text = dump_log([left_behind.partition_dir(CONSUMER_OFFSETS)], decode_offsets=True)
    assert '"group":"workers"' in text and '"offset":42' in text
    assert text.count("COMMIT") >= 3 and "ABORT" in text


@pytest.fixture(scope="module")
def taken_over(left_behind: Broker) -> Broker:
    left_behind.start()
    return left_behind


def read_committed(broker: Broker) -> list[Row]:
    from .clients import read_all

    return read_all(broker.bootstrap, "events", isolation="read_committed")


def test_a_broker_ends_what_was_left_open(taken_over: Broker) -> None:
    import confluent_kafka

    committed = [b"committed %d %d" % (n, m) for n in range(3) for m in range(4)]
    client = {"bootstrap.servers": taken_over.bootstrap}
    # The id that no producer uses: it times out, and the broker aborts by itself.
    # The other one: a new producer of the id makes the broker abort it, and continues.
    producer = confluent_kafka.Producer({**client, "transactional.id": "asked-for"})
    producer.init_transactions(PATIENCE)
    expected = [*committed, b"plain", b"behind the hanging ones"]
    deadline = time.monotonic() + PATIENCE
    while (seen := [row.value for row in read_committed(taken_over)]) != expected:
        assert time.monotonic() < deadline, f"{seen}\n{taken_over._tail()}"
        time.sleep(0.2)
    producer.begin_transaction()
    producer.produce("events", b"by the broker's client")
    producer.commit_transaction(PATIENCE)
    assert [row.value for row in read_committed(taken_over)] == [
        *expected,
        b"by the broker's client",
    ]


def test_a_broker_knows_the_offsets_of_our_transactions(taken_over: Broker) -> None:
    import confluent_kafka

    client = {"bootstrap.servers": taken_over.bootstrap, "group.id": "workers"}
    consumer = confluent_kafka.Consumer(client)
    wanted = [confluent_kafka.TopicPartition("source", number) for number in (0, 1)]
    found = consumer.committed(wanted, timeout=PATIENCE)
    consumer.close()
    assert [each.offset for each in found] == [42, 7]


def test_a_broker_goes_on_with_our_transactional_id(taken_over: Broker) -> None:
    import confluent_kafka

    client = {"bootstrap.servers": taken_over.bootstrap, "transactional.id": "copier"}
    producer = confluent_kafka.Producer(client)
    producer.init_transactions(PATIENCE)
    producer.begin_transaction()
    producer.produce("events", b"by another copier")
    assert producer.flush(PATIENCE) == 0
    producer.abort_transaction(PATIENCE)
    assert b"by another copier" not in [row.value for row in read_committed(taken_over)]


def test_logstore_goes_on_when_it_gets_the_directory_back(taken_over: Broker) -> None:
    seen = [row.value for row in read_committed(taken_over)]
    taken_over.stop()
    with logstore.open(taken_over.log_dir) as store:
        log = store["events"][0]
        assert [r.value for r in log.scan(isolation="read_committed")] == seen
        assert log.ongoing_transactions == []
        states = {each.transactional_id: each.state for each in Transactions.of(store).list()}
        assert states["timed-out"] == states["copier"] == "CompleteAbort"
        assert states["asked-for"] == "CompleteCommit"
        for name in ("copier", "timed-out", "asked-for"):
            with Producer(store, name) as producer, producer.transaction() as tx:
                tx.send("events", name.encode())
                tx.commit_offsets({("source", 0): 100}, group_id="workers")
        assert [r.value for r in log.scan(isolation="read_committed")] == [
            *seen, b"copier", b"timed-out", b"asked-for",
        ]  # fmt: skip
        committed = OffsetBook.of(store).committed("workers")
        assert {tuple(where): each.offset for where, each in committed.items()} == {
            ("source", 0): 100,
            ("source", 1): 7,
        }
        # Ids of our own producers are never those that a broker gives out.
        assert Producer(store).producer_id > 1 << 48
