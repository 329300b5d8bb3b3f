"""Other clients over the kills of a leader: kafka-python, aiokafka, kcat."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiokafka
import pytest

from logstore.testing import Assign, Poll, Read
from tests.campaign import sized

from .clusters import PARTITIONS, TIMEOUT, Loaded
from .zookeeper import Ensemble

with warnings.catch_warnings():  # its own business
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka
    import kafka.errors

pytestmark = [pytest.mark.interop, pytest.mark.slow]

KILLS = sized(1, 3, 50)
IN = ("in", 0)


def kafka_python(loaded: Loaded) -> None:
    """An idempotent producer and a member of a group."""
    clients = loaded.clients

    def produce(name: str, ended: threading.Event) -> None:
        producer = kafka.KafkaProducer(
            bootstrap_servers=loaded.cluster.bootstrap_servers.split(","),
            enable_idempotence=True,
            request_timeout_ms=3000,
            max_block_ms=60_000,
            delivery_timeout_ms=120_000,
            metadata_max_age_ms=1000,
            linger_ms=1,
        )
        clients.acked_by[name] = 0

        def acknowledged(sent: Any, row: Any) -> None:
            sent.acknowledged(row.offset)
            sent.ok()
            clients.acked_by[name] += 1

        def failed(sent: Any, error: BaseException) -> None:
            clients.unacked.append((name, error))
            sent.info()

        number = 0
        while not ended.wait(0.02):
            for _ in range(10):
                value, partition = f"{name} {number}".encode(), number % PARTITIONS
                sent = clients.recorder.send((name, number), ("in", partition), value)
                future = producer.send("in", value, partition=partition)
                future.add_callback(lambda row, sent=sent: acknowledged(sent, row))
                future.add_errback(lambda error, sent=sent: failed(sent, error))
                number += 1
        producer.flush(TIMEOUT)
        producer.close(TIMEOUT)

    def read(name: str, ended: threading.Event) -> None:
        consumer = kafka.KafkaConsumer(
            bootstrap_servers=loaded.cluster.bootstrap_servers.split(","),
            group_id="kafka-python",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level="read_committed",
            session_timeout_ms=10_000,
            heartbeat_interval_ms=200,
            request_timeout_ms=15_000,
            metadata_max_age_ms=1000,
        )
        listener = _Assignments(clients, name)
        consumer.subscribe(["in"], listener=listener)
        got = clients.read.setdefault("in", set())
        while not ended.is_set():
            rows = [row for each in consumer.poll(200).values() for row in each]
            reads = tuple(Read((r.topic, r.partition), r.offset, r.value) for r in rows)
            clients.recorder.done(name, Poll(name, reads, "read_committed"))
            got.update((row.partition, row.offset) for row in rows)
            if rows:
                # A rebalance, or no coordinator: the records are read again.
                with contextlib.suppress(kafka.errors.KafkaError):
                    consumer.commit()
        consumer.close(autocommit=False)

    loaded.produce(produce)
    loaded.read(read)


class _Assignments(kafka.ConsumerRebalanceListener):  # type: ignore[misc]
    """Records each assignment of a consumer of kafka-python."""

    def __init__(self, clients: Any, name: str) -> None:
        self.clients = clients
        self.name = name

    def on_partitions_assigned(self, assigned: Any) -> None:
        owned = frozenset((each.topic, each.partition) for each in assigned)
        self.clients.recorder.done((self.name, "assignment"), Assign(self.name, owned))

    def on_partitions_revoked(self, revoked: Any) -> None:
        self.on_partitions_assigned(())


def aio_kafka(loaded: Loaded) -> None:
    """An idempotent producer; the reader is confluent-kafka's."""
    clients = loaded.clients

    async def send(name: str, ended: threading.Event) -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=loaded.cluster.bootstrap_servers,
            enable_idempotence=True,
            request_timeout_ms=20_000,
            metadata_max_age_ms=1000,
            linger_ms=1,
        )
        await producer.start()
        clients.acked_by[name] = 0

        async def one(number: int) -> None:
            value, partition = f"{name} {number}".encode(), number % PARTITIONS
            sent = clients.recorder.send((name, number), ("in", partition), value)
            row = await producer.send_and_wait("in", value, partition=partition)
            sent.acknowledged(row.offset)
            sent.ok()
            clients.acked_by[name] += 1

        waiting: set[asyncio.Task[None]] = set()
        number = 0
        while not ended.is_set():
            for _ in range(10):
                waiting.add(asyncio.create_task(one(number)))
                number += 1
            await asyncio.sleep(0.02)
            done = {task for task in waiting if task.done()}
            waiting -= done
            await asyncio.gather(*done)
            while len(waiting) > 1000:  # no broker takes records for a long time
                await asyncio.sleep(0.1)
                waiting = {task for task in waiting if not task.done()}
        await asyncio.gather(*waiting)
        await producer.stop()

    def produce(name: str, ended: threading.Event) -> None:
        asyncio.run(send(name, ended))

    loaded.produce(produce)
    loaded.read(topic="in")


def kcat(loaded: Loaded) -> None:
    """kcat sends lines; an exit status of 0 acknowledges all of them."""
    if shutil.which("kcat") is None:
        pytest.skip("kcat is not installed")
    clients = loaded.clients

    def produce(name: str, ended: threading.Event) -> None:
        clients.acked_by[name] = 0
        number = 0
        while not ended.is_set():
            values = [f"{name} {number + each}".encode() for each in range(50)]
            sends = [clients.recorder.send((name, value), ("in", 0), value) for value in values]
            command = ["kcat", "-P", "-b", loaded.cluster.bootstrap_servers, "-t", "in", "-p", "0"]
            command += ["-X", "enable.idempotence=true", "-X", "socket.timeout.ms=3000", "-q"]
            done = subprocess.run(command, input=b"\n".join(values), timeout=TIMEOUT)
            for sent in sends:
                sent.ok() if done.returncode == 0 else sent.info()
            if done.returncode == 0:
                clients.acked_by[name] += len(values)
            number += len(values)

    loaded.produce(produce)
    loaded.read(topic="in")


# aiokafka leaves a socket open if a connection is refused.
UNCLOSED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("start", [kafka_python, pytest.param(aio_kafka, marks=UNCLOSED), kcat])
def test_a_killed_leader(
    tmp_path: Path, zookeeper: Ensemble, start: Callable[[Loaded], None]
) -> None:
    with Loaded(tmp_path, zookeeper) as loaded:
        start(loaded)
        loaded.await_acked(0)
        for number in range(KILLS):
            leader = loaded.leader()
            loaded.fault(f"kill {number}", loaded.cluster.kill, leader, moves=IN)
            loaded.cluster.start(leader)
            loaded.tree.await_in_sync()
        loaded.finish(least=KILLS, read=["in"])
    gc.collect()  # now, and not in the next test
