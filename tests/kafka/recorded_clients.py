"""Real clients that record what they did and saw: producers, transactional copies, consumers.

Each act of `Clients` runs in a `Work` until it is stopped, through any fault of the server.
`logstore.testing.history` checks the records, with the contents of the store at the end.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from logstore.testing import Assign, Commit, Committed, Poll, Read, Recorder, Seek, Send
from tests.campaign import SIZE

confluent_kafka = pytest.importorskip("confluent_kafka")

TIMEOUT = 180.0
JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
       "-Dorg.slf4j.simpleLogger.defaultLogLevel=off")  # fmt: skip


class Work(threading.Thread):
    """A client in a thread; its first error fails the test."""

    def __init__(self, name: str, act: Callable[[str, threading.Event], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.act = act
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.act(self.name, self.ended)
        except BaseException as error:  # noqa: BLE001  raised by the test's thread
            self.error = error

    def stop(self) -> None:
        self.ended.set()
        self.join(TIMEOUT)
        assert not self.is_alive(), f"{self.name} did not end"
        if self.error is not None:
            raise self.error


class Clients:
    """The load, and what each client saw.

    Topics have `partitions` each.  `settings` are librdkafka's, for every client.  A producer sends
    10 records each `pace` seconds; a consumer takes at most `most` records in one poll.
    """

    def __init__(
        self,
        address: str,
        partitions: int = 2,
        settings: Mapping[str, Any] | None = None,
        *,
        pace: float = 0.02,
        most: int = 50,
    ) -> None:
        # While all brokers are down, librdkafka by default bootstraps again; a request for the
        # offsets of a transaction then waits for the broker object that it has given up.
        self.common: dict[str, Any] = {
            "bootstrap.servers": address, "log_level": 0, "reconnect.backoff.max.ms": 100,
            "metadata.recovery.strategy": "none", **(settings or {}),
        }  # fmt: skip
        self.partitions = partitions
        self.pace = pace
        self.most = most
        self.recorder = Recorder()
        # Deliveries by producer: each is counted by the thread of that producer.
        self.acked_by: dict[str, int] = {}
        self.unacked: list[Any] = []
        self.committed: dict[int, int] = {}  # number of a transaction: its size
        self.aborted: set[int] = set()
        # By topic: partitions and offsets that the watchers got.
        self.read: dict[str, set[tuple[int, int]]] = {}

    @property
    def acked(self) -> int:
        """How many records were acknowledged."""
        return sum(list(self.acked_by.values()))

    def __repr__(self) -> str:
        return (
            f"acked {self.acked}, not {self.unacked[:3]}, committed {len(self.committed)} with "
            f"{sum(self.committed.values())}, aborted {len(self.aborted)}, read "
            + ", ".join(f"{len(places)} of {topic}" for topic, places in self.read.items())
        )

    def produce(self, name: str, ended: threading.Event, topic: str = "in", pad: int = 0) -> None:
        """An idempotent producer of records of at least `pad` bytes."""
        producer = confluent_kafka.Producer(
            self.common | {"enable.idempotence": True, "linger.ms": 1}
        )
        self.acked_by[name] = 0

        def delivered(sent: Any, error: Any, message: Any) -> None:
            if error is not None:
                self.unacked.append((message.value(), error))
                sent.info()
                return
            sent.acknowledged(message.offset())
            sent.ok()
            self.acked_by[name] += 1

        self._send(producer, name, ended, topic, delivered, pad)

    def produce_to_leader(self, name: str, ended: threading.Event, topic: str = "one") -> None:
        """A producer with acks=1 that sends each record once.

        A fail-over may lose what it sent, so no outcome is recorded: its records only must not
        change, or be in the log twice.
        """
        producer = confluent_kafka.Producer(
            self.common | {"acks": 1, "linger.ms": 1, "message.send.max.retries": 0}
        )

        def delivered(sent: Any, error: Any, message: Any) -> None:
            sent.info()

        self._send(producer, name, ended, topic, delivered)

    def _send(
        self,
        producer: Any,
        name: str,
        ended: threading.Event,
        topic: str,
        delivered: Callable[[Any, Any, Any], None],
        pad: int = 0,
    ) -> None:
        number = 0
        while not ended.wait(self.pace):
            for _ in range(10):
                value, partition = f"{name} {number}".encode(), number % self.partitions
                value += b"." * (pad - len(value))
                # Deliveries overlap, and a process of the history does one thing at a time.
                sent = self.recorder.send((name, number), (topic, partition), value)
                while True:
                    try:
                        producer.produce(
                            topic, value, partition=partition,
                            on_delivery=functools.partial(delivered, sent),
                        )  # fmt: skip
                        break
                    except BufferError:  # no broker takes records for a long time
                        producer.poll(0.1)
                number += 1
            producer.poll(0)
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

    def _subscribe(self, consumer: Any, topic: str, name: str) -> None:
        """Join the group; each assignment is recorded, and gives new positions."""

        def assigned(_: Any, places: list[Any]) -> None:
            owned = frozenset((each.topic, each.partition) for each in places)
            self.recorder.done((name, "assignment"), Assign(name, owned))

        consumer.subscribe(
            [topic], on_assign=assigned, on_revoke=lambda consumer, _: assigned(consumer, [])
        )

    def _poll(self, consumer: Any, name: str) -> list[Any]:
        rows = [each for each in consumer.consume(self.most, 0.2) if each.error() is None]
        reads = tuple(Read((r.topic(), r.partition()), r.offset(), r.value()) for r in rows)
        self.recorder.done(name, Poll(name, reads, "read_committed"))
        return rows

    def copy(self, name: str, ended: threading.Event) -> None:
        """Copy "in" to "out" in transactions with the offsets; abort every fourth."""
        # librdkafka keeps a record whose request failed during an abort until its time is up.  That
        # must be before the transaction's time is up: then the coordinator ends the producer.
        producer = confluent_kafka.Producer(
            self.common
            | {
                "transactional.id": "copy", "transaction.timeout.ms": 30_000,
                "message.timeout.ms": 10_000,
            }
        )  # fmt: skip
        producer.init_transactions(TIMEOUT)
        consumer = self._consumer("copy")
        self._subscribe(consumer, "in", name)
        number = 0
        while not ended.is_set():
            messages = self._poll(consumer, name)
            if not messages:
                continue
            number += 1
            if self._copied(producer, consumer, messages, number, name):
                self.committed[number] = len(messages)
            else:
                self.aborted.add(number)
                self._rewind(consumer, name)
        consumer.close()

    def _copied(
        self, producer: Any, consumer: Any, messages: list[Any], number: int, name: str
    ) -> bool:
        """Run one transaction; return whether it was committed."""
        transaction = self.recorder.transaction((name, "transaction"))
        sends: dict[int, Send] = {}

        def delivered(place: int, error: Any, message: Any) -> None:
            if error is None:
                where = ("out", message.partition())
                sends[place] = Send(where, message.value(), message.offset())

        try:
            producer.begin_transaction()
            for place, each in enumerate(messages):
                sends[place] = Send(("out", each.partition()), each.value())
                producer.produce(
                    "out", each.value(), b"%d %d" % (number, len(messages)),
                    partition=each.partition(), on_delivery=functools.partial(delivered, place),
                )  # fmt: skip
            positions = consumer.position(consumer.assignment())
            metadata = consumer.consumer_group_metadata()
            producer.send_offsets_to_transaction(positions, metadata, TIMEOUT)
            if number % 4 == 0:
                producer.abort_transaction(TIMEOUT)
                transaction.add(*sends.values())
                transaction.fail()
                return False
            transaction.prepare()
            while True:
                try:
                    producer.commit_transaction(TIMEOUT)
                    break
                except confluent_kafka.KafkaException as error:
                    if not error.args[0].retriable():
                        raise
        except confluent_kafka.KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            producer.abort_transaction(TIMEOUT)
            transaction.add(*sends.values())
            transaction.fail()
            return False
        offsets = tuple((("in", p.partition), p.offset) for p in positions if p.offset >= 0)
        transaction.add(*sends.values(), Commit("copy", offsets))
        transaction.ok()
        return True

    def _rewind(self, consumer: Any, name: str) -> None:
        """Go back to the committed offsets."""
        places = consumer.assignment()
        self.recorder.done((name, "seek"), Seek(name))
        for each in consumer.committed(places, TIMEOUT) if places else []:
            offset = each.offset if each.offset >= 0 else confluent_kafka.OFFSET_BEGINNING
            consumer.seek(confluent_kafka.TopicPartition(each.topic, each.partition, offset))

    def watch(self, name: str, ended: threading.Event, topic: str = "out") -> None:
        """A member of the group that reads a topic."""
        consumer = self._consumer(f"watch {topic}")
        self._subscribe(consumer, topic, name)
        read = self.read.setdefault(topic, set())
        while not ended.is_set():
            rows = self._poll(consumer, name)
            read.update((each.partition(), each.offset()) for each in rows)
            if rows:
                # A rebalance, or no server: the records are read again.
                with contextlib.suppress(confluent_kafka.KafkaException):
                    consumer.commit(asynchronous=False)
        consumer.close()

    def ask(
        self, name: str, ended: threading.Event, groups: tuple[str, ...] = ("copy", "java")
    ) -> None:
        """Ask for the committed offsets of the copies, again and again."""
        consumers = {group: self._consumer(group) for group in groups}
        places = [confluent_kafka.TopicPartition("in", n) for n in range(self.partitions)]
        while not ended.wait(0.05):
            for group, consumer in consumers.items():
                asked = self.recorder.invoke((name, group))
                try:
                    found = consumer.committed(places, 2.0)
                except confluent_kafka.KafkaException:
                    asked.info()
                    continue
                offsets = tuple(
                    (("in", each.partition), each.offset)
                    for each in found
                    if each.error is None and each.offset >= 0
                )
                asked.add(Committed(group, offsets))
                asked.ok()
        for consumer in consumers.values():
            consumer.close()


class JavaCopier:
    """Kafka's Java client, which uses transaction version 2, copies "in" to "java"."""

    def __init__(self, class_path: str, address: str, log: Path) -> None:
        self.committed: dict[int, int] = {}
        self.aborted: set[int] = set()
        self._log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                ["java", *JVM, "-cp", class_path, "Copier", address, "java"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return (
            f"Java: committed {len(self.committed)} with {sum(self.committed.values())}, aborted "
            f"{len(self.aborted)}"
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            kind, number, *size = line.split()
            if kind == "commit":
                self.committed[int(number)] = int(size[0])
            else:
                self.aborted.add(int(number))

    def check(self) -> None:
        assert self.process.poll() is None, self._log.read_text()

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            assert self.process.wait(TIMEOUT) == 0, self._log.read_text()
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(TIMEOUT)
            self.process.stdout.close()


@contextlib.contextmanager
def java_copier(directory: Path, address: str) -> Iterator[JavaCopier | None]:
    """Start the Java client, a copy of "in"; None in the small size, and without Java."""
    from tests.interop.kafka import VERSION
    from tests.interop.tools import compiled

    try:
        if SIZE == "small":
            pytest.skip("a JVM takes long to start")
        class_path = compiled("Copier.java", VERSION, directory / "classes")
    except pytest.skip.Exception:
        yield None
        return
    copier = JavaCopier(class_path, address, directory / "java.log")
    try:
        yield copier
    except BaseException:
        copier.process.kill()
        raise
    finally:
        if copier.process.poll() is None:
            copier.stop()
