"""kill -9 of `logstore serve` under load: clients go on, and nothing is lost or doubled."""

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
TIMEOUT = 30.0


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
        command += ["--create-topic", f"in:{PARTITIONS}"]
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
        self.common: dict[str, Any] = {
            "bootstrap.servers": address, "log_level": 0, "reconnect.backoff.max.ms": 100,
        }  # fmt: skip
        self.acked: dict[bytes, tuple[int, int]] = {}  # value: partition, offset
        self.unacked: list[Any] = []
        self.read: list[tuple[int, int, bytes]] = []  # by the group
        self.positions: dict[int, list[int]] = collections.defaultdict(list)

    def __repr__(self) -> str:
        counts = (self.acked, self.unacked, self.read)
        return "acked {}, unacked {}, read {}".format(*map(len, counts))

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

    def watch(self, ended: threading.Event) -> None:
        """A member of the group that reads "in"."""
        consumer = self._consumer("watch")
        consumer.subscribe(["in"])
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
        """Ask for the committed offsets of the group, again and again."""
        consumer = self._consumer("watch")
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


def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    served = Served(tmp_path / "store")
    served.start()
    clients = Clients(served.address)
    acts = [clients.produce, clients.watch, clients.watch, clients.ask]
    work = [Work(f"{act.__name__} {number}", act) for number, act in enumerate(acts)]
    try:
        for each in work:
            each.start()
        for _ in range(KILLS):
            time.sleep(BETWEEN_SECONDS)
            served.kill()
            served.start()
        acked, read = len(clients.acked), len(clients.read)
        deadline = time.monotonic() + TIMEOUT
        while len(clients.acked) == acked or len(clients.read) == read:
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
    stored = {(*place, value) for value, place in found.items()}
    assert set(clients.read) <= stored, "a reader saw what is not in the log"
    for offsets in clients.positions.values():
        assert offsets == sorted(offsets), "a committed offset went back"
    assert clients.acked and clients.read and clients.positions
