"""kill -9 of `logstore serve` under load: clients go on, and nothing is lost, doubled or torn."""

from __future__ import annotations

import collections
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logstore
from tests.campaign import sized

confluent_kafka = pytest.importorskip("confluent_kafka")

pytestmark = pytest.mark.campaign

KILLS = sized(3, 20, 200)
BETWEEN_SECONDS = 1.0  # the time that the clients have between two kills
PARTITIONS = 2
TIMEOUT = 20.0


class Served:
    """`logstore serve` in a process, on the same port and directory after every kill."""

    def __init__(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.directory = directory
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "logstore", "-s", str(self.directory), "serve"]
        command += ["--listen", self.address, "--durability", "os"]
        command += ["--create-topic", f"in:{PARTITIONS}", "--create-topic", f"out:{PARTITIONS}"]
        log = (self.directory.parent / "serve.log").open("a")
        with log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=dict(os.environ)
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line and json.loads(line)["ready"], "the server did not start"

    def kill(self) -> None:
        assert self.process is not None
        assert self.process.poll() is None, "the server ended by itself"
        self.process.kill()
        self.end()

    def end(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.wait(TIMEOUT)
        self.process.stdout.close()


class Work(threading.Thread):
    """A client in a thread; its first error fails the test."""

    def __init__(self, name: str, act: Callable[[threading.Event], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.act = act
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.act(self.ended)
        except BaseException as error:  # noqa: BLE001  raised by the test's thread
            self.error = error

    def stop(self) -> None:
        self.ended.set()
        self.join(TIMEOUT)
        assert not self.is_alive(), f"{self.name} did not end"
        if self.error is not None:
            raise self.error


class Clients:
    """The load, and what each client saw."""

    def __init__(self, address: str) -> None:
        # While all brokers are down, librdkafka by default bootstraps again; a request for the
        # offsets of a transaction then waits for the broker object that it has given up.
        self.common: dict[str, Any] = {
            "bootstrap.servers": address, "log_level": 0, "reconnect.backoff.max.ms": 100,
            "metadata.recovery.strategy": "none",
        }  # fmt: skip
        self.acked: dict[bytes, tuple[int, int]] = {}  # value: partition, offset
        self.unacked: list[Any] = []
        self.committed: list[int] = []  # numbers of transactions that were committed
        self.aborted: set[int] = set()
        self.read: list[tuple[int, int, bytes]] = []  # by the group of "out"
        self.positions: dict[int, list[int]] = collections.defaultdict(list)

    def __repr__(self) -> str:
        counts = (self.acked, self.unacked, self.committed, self.aborted, self.read)
        return "acked {}, unacked {}, committed {}, aborted {}, read {}".format(*map(len, counts))

    def produce(self, ended: threading.Event) -> None:
        """An idempotent producer of "in"."""
        producer = confluent_kafka.Producer(
            self.common | {"enable.idempotence": True, "linger.ms": 1}
        )

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                self.unacked.append((message.value(), error))
            else:
                assert message.value() not in self.acked
                self.acked[message.value()] = (message.partition(), message.offset())

        number = 0
        while not ended.is_set():
            for _ in range(20):
                producer.produce(
                    "in", b"%d" % number, partition=number % PARTITIONS, on_delivery=delivered
                )
                number += 1
            producer.poll(0)
            time.sleep(0.01)
        assert producer.flush(TIMEOUT) == 0

    def _consumer(self, group: str) -> Any:
        return confluent_kafka.Consumer(
            self.common
            | {
                "group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False,
                "isolation.level": "read_committed", "session.timeout.ms": 10_000,
                "heartbeat.interval.ms": 200, "fetch.wait.max.ms": 100,
            }
        )  # fmt: skip

    def copy(self, ended: threading.Event) -> None:
        """Copy "in" to "out" in transactions with the offsets; abort every fourth."""
        producer = confluent_kafka.Producer(
            self.common | {"transactional.id": "copy", "transaction.timeout.ms": 30_000}
        )
        producer.init_transactions(TIMEOUT)
        consumer = self._consumer("copy")
        consumer.subscribe(["in"])
        number = 0
        while not ended.is_set():
            messages = [each for each in consumer.consume(50, 0.2) if each.error() is None]
            if not messages:
                continue
            number += 1
            if self._copied(producer, consumer, messages, number, abort=number % 4 == 0):
                self.committed.append(number)
            else:
                self.aborted.add(number)
                self._rewind(consumer)
        consumer.close()

    def _copied(
        self, producer: Any, consumer: Any, messages: list[Any], number: int, *, abort: bool
    ) -> bool:
        """Run one transaction; return whether it was committed."""
        try:
            producer.begin_transaction()
            for each in messages:
                value = json.dumps([number, len(messages), int(each.value())]).encode()
                producer.produce("out", value, partition=each.partition())
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()),
                consumer.consumer_group_metadata(),
                TIMEOUT,
            )
            if abort:
                producer.abort_transaction(TIMEOUT)
                return False
            while True:
                try:
                    producer.commit_transaction(TIMEOUT)
                    return True
                except confluent_kafka.KafkaException as error:
                    if not error.args[0].retriable():
                        raise
        except confluent_kafka.KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            producer.abort_transaction(TIMEOUT)
            return False

    def _rewind(self, consumer: Any) -> None:
        """Go back to the committed offsets."""
        places = consumer.assignment()
        for each in consumer.committed(places, TIMEOUT) if places else []:
            offset = each.offset if each.offset >= 0 else confluent_kafka.OFFSET_BEGINNING
            consumer.seek(confluent_kafka.TopicPartition(each.topic, each.partition, offset))

    def watch(self, ended: threading.Event) -> None:
        """A member of the group that reads "out"."""
        consumer = self._consumer("watch")
        consumer.subscribe(["out"])
        while not ended.is_set():
            rows = [each for each in consumer.consume(100, 0.2) if each.error() is None]
            self.read += [(each.partition(), each.offset(), each.value()) for each in rows]
            if rows:
                try:
                    consumer.commit(asynchronous=False)
                except confluent_kafka.KafkaException:
                    continue  # a rebalance, or no server: the records are read again
        consumer.close()

    def ask(self, ended: threading.Event) -> None:
        """Ask for the committed offsets of the copy, again and again."""
        consumer = self._consumer("copy")
        places = [confluent_kafka.TopicPartition("in", number) for number in range(PARTITIONS)]
        while not ended.wait(0.05):
            try:
                found = consumer.committed(places, 2.0)
            except confluent_kafka.KafkaException:
                continue
            for each in found:
                if each.error is None and each.offset >= 0:
                    self.positions[each.partition].append(each.offset)
        consumer.close()


def test_nothing_is_lost_doubled_or_torn(tmp_path: Path) -> None:
    served = Served(tmp_path / "store")
    served.start()
    clients = Clients(served.address)
    acts = [clients.produce, clients.copy, clients.watch, clients.watch, clients.ask]
    work = [Work(f"{act.__name__} {number}", act) for number, act in enumerate(acts)]
    try:
        for each in work:
            each.start()
        for _ in range(KILLS):
            time.sleep(BETWEEN_SECONDS)
            served.kill()
            served.start()
        acked, copied = len(clients.acked), len(clients.committed)
        deadline = time.monotonic() + TIMEOUT
        while len(clients.acked) == acked or len(clients.committed) < copied + 2:
            assert time.monotonic() < deadline, f"the clients do not go on: {clients}"
            for each in work:
                if each.error is not None:
                    raise each.error
            time.sleep(0.05)
        for each in work:
            each.stop()
    finally:
        for each in work:
            each.ended.set()
        served.kill()
    check(clients, tmp_path / "store")


def check(clients: Clients, directory: Path) -> None:
    """Compare what the clients saw with the store."""
    with logstore.open(directory, durability="os") as store:
        assert clients.unacked == []
        found: dict[bytes, tuple[int, int]] = {}
        for partition in store["in"]:
            for record in partition:
                assert record.value not in found, "appended twice"
                found[record.value] = (partition.number, record.offset)
        assert found == clients.acked, "an acknowledged record is lost, or is somewhere else"
        with logstore.Consumer(store, "out", isolation="read_committed", timeout=0) as consumer:
            out = [(each.partition, each.offset, each.value) for each in consumer]
    copies: dict[int, list[int]] = collections.defaultdict(list)
    sizes: dict[int, int] = {}
    for _, _, value in out:
        number, size, copy = json.loads(value)
        copies[number].append(copy)
        sizes[number] = size
    assert set(copies) == set(clients.committed), "committed transactions, and no other"
    assert not clients.aborted & set(copies)
    for number, rows in copies.items():
        assert len(rows) == sizes[number], "a transaction is torn"
    everything = [copy for rows in copies.values() for copy in rows]
    assert len(set(everything)) == len(everything), "a record was copied twice"
    assert set(clients.read) <= set(out), "a reader saw what is not committed"
    for offsets in clients.positions.values():
        assert offsets == sorted(offsets), "a committed offset went back"
    assert clients.committed and clients.aborted and clients.acked and clients.read
