"""Real Kafka clients, and logstore's own, with the same few methods for the tests.

A client makes producers and consumers.  The settings have the same names for all of them; a test is
then written once and runs with each client, or with two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import aiokafka
import confluent_kafka
import kafka
from aiokafka.coordinator.assignors import range as aio_range
from aiokafka.coordinator.assignors import roundrobin as aio_roundrobin
from aiokafka.coordinator.assignors.sticky import sticky_assignor as aio_sticky
from confluent_kafka import KafkaException
from kafka.coordinator.assignors import cooperative_sticky as py_cooperative
from kafka.coordinator.assignors import range as py_range
from kafka.coordinator.assignors import roundrobin as py_roundrobin
from kafka.coordinator.assignors.sticky import sticky_assignor as py_sticky

import logstore
from logstore.kafka.server import KafkaServer
from tests import kit

T = TypeVar("T")

TIMEOUT = 120.0
SESSION_MS = 10_000
HEARTBEAT_MS = 200  # how soon a member learns of a rebalance
START_MS = 1_700_000_000_000


class Sent(NamedTuple):
    """A record to send."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp: int = START_MS


class Got(NamedTuple):
    """A record that a consumer returned."""

    topic: str
    partition: int
    offset: int
    sent: Sent

    @property
    def value(self) -> bytes | None:
        return self.sent.value


Place = tuple[str, int]


class Producing(Protocol):
    """A producer.  `flush` raises the error of a record that was not delivered."""

    def send(self, topic: str, sent: Sent, partition: int = 0) -> None: ...
    def flush(self) -> None: ...
    def begin(self) -> None: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...
    def send_offsets(self, offsets: dict[Place, int], consumer: Any) -> None: ...
    def close(self) -> None: ...


class Consuming(Protocol):
    """A consumer.  One thread uses it."""

    def assign(self, place: Place, at: int | str) -> None:
        """Read one partition from an offset, or from "start" or "end"."""

    def offset_at(self, place: Place, timestamp: int) -> int | None: ...
    def poll(self, timeout: float) -> list[Got]: ...
    def assignment(self) -> set[Place]: ...
    def commit(self) -> None: ...
    def committed(self, place: Place) -> int | None: ...
    def close(self) -> None: ...


class Client(Protocol):
    """A library."""

    name: str
    assignors: tuple[str, ...]

    def producer(
        self, *, compression: str = "none", acks: int = -1, idempotence: bool = False,
        transactional_id: str | None = None, request_max_bytes: int = 1 << 20,
    ) -> Producing: ...  # fmt: skip

    def consumer(
        self, *topics: str, group: str | None = None, assignor: str = "range",
        instance: str | None = None, isolation: str = "read_uncommitted", start: str = "earliest",
    ) -> Consuming: ...  # fmt: skip


# ---- librdkafka ----


class Confluent:
    name = "confluent-kafka"
    assignors = ("range", "roundrobin", "cooperative-sticky")

    def __init__(self, server: KafkaServer) -> None:
        self.address = server.bootstrap_servers

    def producer(self, *, compression: str = "none", acks: int = -1, idempotence: bool = False,
                 transactional_id: str | None = None,
                 request_max_bytes: int = 1 << 20) -> Producing:  # fmt: skip
        settings: dict[str, Any] = {
            "bootstrap.servers": self.address, "compression.type": compression, "acks": acks,
            "linger.ms": 5, "enable.idempotence": idempotence,
            "message.max.bytes": request_max_bytes,
        }  # fmt: skip
        if transactional_id is not None:
            settings |= {"transactional.id": transactional_id, "enable.idempotence": True}
        return _ConfluentProducer(settings)

    def consumer(self, *topics: str, group: str | None = None, assignor: str = "range",
                 instance: str | None = None, isolation: str = "read_uncommitted",
                 start: str = "earliest") -> Consuming:  # fmt: skip
        settings: dict[str, Any] = {
            "bootstrap.servers": self.address, "group.id": group or "none",
            "auto.offset.reset": start, "isolation.level": isolation, "enable.auto.commit": False,
            "partition.assignment.strategy": assignor, "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": HEARTBEAT_MS,
            "log_level": 0, "fetch.wait.max.ms": 100,
        }  # fmt: skip
        if instance is not None:
            settings["group.instance.id"] = instance
        return _ConfluentConsumer(settings, topics)


class _ConfluentProducer:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.failed: list[Any] = []
        self.producer = confluent_kafka.Producer(settings | {"log_level": 0})
        if "transactional.id" in settings:
            self.producer.init_transactions(TIMEOUT)

    def send(self, topic: str, sent: Sent, partition: int = 0) -> None:
        self.producer.produce(
            topic, sent.value, sent.key, partition=partition, headers=list(sent.headers),
            timestamp=sent.timestamp, on_delivery=self._delivered,
        )  # fmt: skip

    def _delivered(self, error: Any, _: Any) -> None:
        if error is not None:
            self.failed.append(error)

    def flush(self) -> None:
        try:
            left = self.producer.flush(TIMEOUT)
        except SystemError as error:  # its fatal error is raised while a callback runs
            raise KafkaException(str(error.__cause__ or error)) from error
        assert left == 0, "not sent in time"
        if self.failed:
            raise KafkaException(self.failed.pop())

    def begin(self) -> None:
        self.producer.begin_transaction()

    def commit(self) -> None:
        self.producer.commit_transaction(TIMEOUT)

    def abort(self) -> None:
        self.producer.abort_transaction(TIMEOUT)

    def send_offsets(self, offsets: dict[Place, int], consumer: Any) -> None:
        self.producer.send_offsets_to_transaction(
            [confluent_kafka.TopicPartition(*place, offset) for place, offset in offsets.items()],
            consumer.consumer.consumer_group_metadata(),
            TIMEOUT,
        )

    def close(self) -> None:
        self.producer.purge()
        self.producer.flush(TIMEOUT)


class _ConfluentConsumer:
    def __init__(self, settings: dict[str, Any], topics: tuple[str, ...]) -> None:
        self.consumer = confluent_kafka.Consumer(settings)
        if topics:
            self.consumer.subscribe(list(topics))

    def assign(self, place: Place, at: int | str) -> None:
        special = {"start": confluent_kafka.OFFSET_BEGINNING, "end": confluent_kafka.OFFSET_END}
        offset = special[at] if isinstance(at, str) else at
        self.consumer.assign([confluent_kafka.TopicPartition(*place, offset)])

    def offset_at(self, place: Place, timestamp: int) -> int | None:
        asked = confluent_kafka.TopicPartition(*place, timestamp)
        [found] = self.consumer.offsets_for_times([asked], TIMEOUT)
        return found.offset if found.offset >= 0 else None

    def poll(self, timeout: float) -> list[Got]:
        rows = []
        for message in self.consumer.consume(500, timeout):
            if message.error() is not None:
                raise KafkaException(message.error())
            headers = tuple((name, value) for name, value in message.headers() or ())
            sent = Sent(message.value(), message.key(), headers, message.timestamp()[1])
            rows.append(Got(message.topic(), message.partition(), message.offset(), sent))
        return rows

    def assignment(self) -> set[Place]:
        return {(each.topic, each.partition) for each in self.consumer.assignment()}

    def commit(self) -> None:
        self.consumer.commit(asynchronous=False)

    def committed(self, place: Place) -> int | None:
        [found] = self.consumer.committed([confluent_kafka.TopicPartition(*place)], TIMEOUT)
        return found.offset if found.offset >= 0 else None

    def close(self) -> None:
        self.consumer.close()


# ---- kafka-python ----


class KafkaPython:
    name = "kafka-python"
    assignors = ("range", "roundrobin", "sticky", "cooperative-sticky")

    def __init__(self, server: KafkaServer) -> None:
        self.address = server.bootstrap_servers

    def producer(self, *, compression: str = "none", acks: int = -1, idempotence: bool = False,
                 transactional_id: str | None = None,
                 request_max_bytes: int = 1 << 20) -> Producing:  # fmt: skip
        return _PythonProducer(
            bootstrap_servers=self.address, acks=acks, linger_ms=5,
            compression_type=None if compression == "none" else compression,
            enable_idempotence=idempotence or transactional_id is not None,
            transactional_id=transactional_id, max_request_size=request_max_bytes,
        )  # fmt: skip

    def consumer(self, *topics: str, group: str | None = None, assignor: str = "range",
                 instance: str | None = None, isolation: str = "read_uncommitted",
                 start: str = "earliest") -> Consuming:  # fmt: skip
        strategy = {
            "range": py_range.RangePartitionAssignor,
            "roundrobin": py_roundrobin.RoundRobinPartitionAssignor,
            "sticky": py_sticky.StickyPartitionAssignor,
            "cooperative-sticky": py_cooperative.CooperativeStickyAssignor,
        }[assignor]
        return _PythonConsumer(
            *topics, bootstrap_servers=self.address, group_id=group, group_instance_id=instance,
            partition_assignment_strategy=[strategy], isolation_level=isolation,
            auto_offset_reset=start, enable_auto_commit=False, session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS, fetch_max_wait_ms=100,
        )  # fmt: skip


class _PythonProducer:
    def __init__(self, **settings: Any) -> None:
        self.producer = kafka.KafkaProducer(**settings)
        self.futures: list[Any] = []
        if settings["transactional_id"] is not None:
            self.producer.init_transactions()

    def send(self, topic: str, sent: Sent, partition: int = 0) -> None:
        self.futures.append(
            self.producer.send(
                topic, sent.value, sent.key, headers=list(sent.headers), partition=partition,
                timestamp_ms=sent.timestamp,
            )
        )  # fmt: skip

    def flush(self) -> None:
        self.producer.flush(TIMEOUT)
        futures, self.futures = self.futures, []
        for future in futures:
            future.get(TIMEOUT)

    def begin(self) -> None:
        self.producer.begin_transaction()

    def commit(self) -> None:
        self.producer.commit_transaction()

    def abort(self) -> None:
        self.producer.abort_transaction()

    def send_offsets(self, offsets: dict[Place, int], consumer: Any) -> None:
        self.producer.send_offsets_to_transaction(
            {
                kafka.TopicPartition(*place): kafka.structs.OffsetAndMetadata(offset, "", -1)
                for place, offset in offsets.items()
            },
            consumer.consumer.group_metadata(),
        )

    def close(self) -> None:
        self.producer.close(timeout=TIMEOUT)


class _PythonConsumer:
    def __init__(self, *topics: str, **settings: Any) -> None:
        self.consumer = kafka.KafkaConsumer(*topics, **settings)
        for topic in topics:
            # A leader whose metadata arrives between its join and its assignment assigns nothing.
            self.consumer.partitions_for_topic(topic)

    def assign(self, place: Place, at: int | str) -> None:
        partition = kafka.TopicPartition(*place)
        self.consumer.assign([partition])
        if at == "start":
            self.consumer.seek_to_beginning(partition)
        elif at == "end":
            self.consumer.seek_to_end(partition)
            self.consumer.position(partition)
        else:
            self.consumer.seek(partition, at)

    def offset_at(self, place: Place, timestamp: int) -> int | None:
        partition = kafka.TopicPartition(*place)
        found = self.consumer.offsets_for_times({partition: timestamp})[partition]
        return None if found is None else found.offset

    def poll(self, timeout: float) -> list[Got]:
        return [_got(each) for rows in self.consumer.poll(timeout * 1000).values() for each in rows]

    def assignment(self) -> set[Place]:
        return {tuple(each) for each in self.consumer.assignment()}

    def commit(self) -> None:
        self.consumer.commit()

    def committed(self, place: Place) -> int | None:
        found: int | None = self.consumer.committed(kafka.TopicPartition(*place))
        return found

    def close(self) -> None:
        self.consumer.close()


def _got(record: Any) -> Got:
    headers = tuple((name, value) for name, value in record.headers)
    sent = Sent(record.value, record.key, headers, record.timestamp)
    return Got(record.topic, record.partition, record.offset, sent)


# ---- aiokafka ----


class AioKafka:
    name = "aiokafka"
    assignors = ("range", "roundrobin", "sticky")

    def __init__(self, server: KafkaServer) -> None:
        self.address = server.bootstrap_servers
        self.loop = _Loop()

    def close(self) -> None:
        self.loop.close()

    def producer(self, *, compression: str = "none", acks: int = -1, idempotence: bool = False,
                 transactional_id: str | None = None,
                 request_max_bytes: int = 1 << 20) -> Producing:  # fmt: skip
        return _AioProducer(
            self.loop, bootstrap_servers=self.address, linger_ms=5,
            compression_type=None if compression == "none" else compression,
            transactional_id=transactional_id, max_request_size=request_max_bytes,
            **({"enable_idempotence": True} if idempotence or transactional_id else {"acks": acks}),
        )  # fmt: skip

    def consumer(self, *topics: str, group: str | None = None, assignor: str = "range",
                 instance: str | None = None, isolation: str = "read_uncommitted",
                 start: str = "earliest") -> Consuming:  # fmt: skip
        strategy = {
            "range": aio_range.RangePartitionAssignor,
            "roundrobin": aio_roundrobin.RoundRobinPartitionAssignor,
            "sticky": aio_sticky.StickyPartitionAssignor,
        }[assignor]
        return _AioConsumer(
            self.loop, topics, bootstrap_servers=self.address, group_id=group,
            group_instance_id=instance, partition_assignment_strategy=[strategy],
            isolation_level=isolation, auto_offset_reset=start, enable_auto_commit=False,
            session_timeout_ms=SESSION_MS, heartbeat_interval_ms=HEARTBEAT_MS,
            fetch_max_wait_ms=100,
        )  # fmt: skip


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(TIMEOUT)

    def call(self, act: Callable[[], T]) -> T:
        async def now() -> T:
            return act()

        return self.run(now())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class _AioProducer:
    def __init__(self, loop: _Loop, **settings: Any) -> None:
        self.loop = loop
        self.futures: list[Any] = []
        self.producer = loop.call(lambda: aiokafka.AIOKafkaProducer(**settings))
        loop.run(self.producer.start())

    def send(self, topic: str, sent: Sent, partition: int = 0) -> None:
        self.futures.append(
            self.loop.run(
                self.producer.send(
                    topic, sent.value, sent.key, partition, sent.timestamp, list(sent.headers)
                )
            )
        )

    def flush(self) -> None:
        futures, self.futures = self.futures, []

        async def all_done() -> None:
            await self.producer.flush()
            for future in futures:
                await future

        self.loop.run(all_done())

    def begin(self) -> None:
        self.loop.run(self.producer.begin_transaction())

    def commit(self) -> None:
        self.loop.run(self.producer.commit_transaction())

    def abort(self) -> None:
        self.loop.run(self.producer.abort_transaction())

    def send_offsets(self, offsets: dict[Place, int], consumer: Any) -> None:
        named = {aiokafka.TopicPartition(*place): offset for place, offset in offsets.items()}
        self.loop.run(self.producer.send_offsets_to_transaction(named, consumer.group))

    def close(self) -> None:
        self.loop.run(self.producer.stop())


class _AioConsumer:
    def __init__(self, loop: _Loop, topics: tuple[str, ...], **settings: Any) -> None:
        self.loop = loop
        self.group = settings["group_id"]
        self.consumer = loop.call(lambda: aiokafka.AIOKafkaConsumer(*topics, **settings))
        loop.run(self.consumer.start())

    def assign(self, place: Place, at: int | str) -> None:
        partition = aiokafka.TopicPartition(*place)
        if at == "start":
            at = self.loop.run(self.consumer.beginning_offsets([partition]))[partition]
        elif at == "end":
            at = self.loop.run(self.consumer.end_offsets([partition]))[partition]

        def assign() -> None:
            # In one step: between the two, aiokafka would begin to look up its own start, and a
            # late answer would win over the seek.
            self.consumer.assign([partition])
            self.consumer.seek(partition, at)

        self.loop.call(assign)

    def offset_at(self, place: Place, timestamp: int) -> int | None:
        partition = aiokafka.TopicPartition(*place)
        found = self.loop.run(self.consumer.offsets_for_times({partition: timestamp}))[partition]
        return None if found is None else found.offset

    def poll(self, timeout: float) -> list[Got]:
        batches = self.loop.run(self.consumer.getmany(timeout_ms=round(timeout * 1000)))
        return [_got(each) for rows in batches.values() for each in rows]

    def assignment(self) -> set[Place]:
        return {tuple(each) for each in self.loop.call(self.consumer.assignment)}

    def commit(self) -> None:
        self.loop.run(self.consumer.commit())

    def committed(self, place: Place) -> int | None:
        return self.loop.run(self.consumer.committed(aiokafka.TopicPartition(*place)))

    def close(self) -> None:
        self.loop.run(self.consumer.stop())


# ---- in process ----


class InProcess:
    name = "in process"
    assignors = ("range", "roundrobin", "sticky", "cooperative-sticky")

    def __init__(self, server: KafkaServer) -> None:
        self.store = server.store

    def producer(self, *, compression: str = "none", acks: int = -1, idempotence: bool = False,
                 transactional_id: str | None = None,
                 request_max_bytes: int = 1 << 20) -> Producing:  # fmt: skip
        return _OwnProducer(
            logstore.Producer(self.store, transactional_id, compression=compression)
        )

    def consumer(self, *topics: str, group: str | None = None, assignor: str = "range",
                 instance: str | None = None, isolation: str = "read_uncommitted",
                 start: str = "earliest") -> Consuming:  # fmt: skip
        options: dict[str, Any] = {} if group is None else {"group_id": group, "assignor": assignor}
        return _OwnConsumer(
            logstore.Consumer(
                self.store, *topics, instance_id=instance, isolation=isolation, start=start,
                auto_commit=False, session_timeout=SESSION_MS / 1000,
                heartbeat_interval=HEARTBEAT_MS / 1000, **options,
            )
        )  # fmt: skip


class _OwnProducer:
    def __init__(self, producer: logstore.Producer) -> None:
        self.producer = producer
        self.transaction: Any = None

    def send(self, topic: str, sent: Sent, partition: int = 0) -> None:
        self.producer.send(
            topic, sent.value, key=sent.key, headers=sent.headers, timestamp=sent.timestamp,
            partition=partition,
        )  # fmt: skip

    def flush(self) -> None:
        self.producer.flush()

    def begin(self) -> None:
        self.transaction = self.producer.transaction()

    def commit(self) -> None:
        self.transaction.commit()

    def abort(self) -> None:
        self.transaction.abort()

    def send_offsets(self, offsets: dict[Place, int], consumer: Any) -> None:
        self.transaction.commit_offsets(offsets, group_id=consumer.consumer.group_id)

    def close(self) -> None:
        self.producer.close()


class _OwnConsumer:
    def __init__(self, consumer: logstore.Consumer) -> None:
        self.consumer = consumer

    def assign(self, place: Place, at: int | str) -> None:
        self.consumer.assign([place])
        if at == "start":
            self.consumer.seek_to_beginning(place)
        elif at == "end":
            self.consumer.seek_to_end(place)
        else:
            self.consumer.seek(place, at)

    def offset_at(self, place: Place, timestamp: int) -> int | None:
        self.consumer.seek_to_time(timestamp, place)
        return self.consumer.position(place)

    def poll(self, timeout: float) -> list[Got]:
        return [_got(each) for each in self.consumer.poll(timeout=timeout)]

    def assignment(self) -> set[Place]:
        return {tuple(each) for each in self.consumer.assignment()}

    def commit(self) -> None:
        self.consumer.commit()

    def committed(self, place: Place) -> int | None:
        found = self.consumer.committed(place).get(logstore.TopicPartition(*place))
        return None if found is None else found.offset

    def close(self) -> None:
        self.consumer.close()


WIRE: dict[str, Any] = {each.name: each for each in (Confluent, KafkaPython, AioKafka)}
CLIENTS = WIRE | {InProcess.name: InProcess}


def has_codec(client: str, codec: str) -> bool:
    """Whether the modules that the client needs for a codec are installed."""
    if client == KafkaPython.name and codec == "zstd":
        return importlib.util.find_spec("zstandard") is not None
    return True


@contextlib.contextmanager
def client(name: str, server: KafkaServer) -> Iterator[Any]:
    """Make a client and close it."""
    made = CLIENTS[name](server)
    try:
        yield made
    finally:
        if isinstance(made, AioKafka):
            made.close()


def read(consumer: Consuming, count: int, *, timeout: float = TIMEOUT) -> list[Got]:
    """Poll until there are `count` records, and once more."""
    got: list[Got] = []
    deadline = time.monotonic() + timeout
    while len(got) < count:
        assert time.monotonic() < deadline, f"{len(got)} of {count} records"
        got += consumer.poll(0.2)
    return got + consumer.poll(0.15)


def wait_until(true: Callable[[], bool], what: str, *, timeout: float = TIMEOUT) -> None:
    kit.wait_until(true, what, patience=timeout, between=lambda: time.sleep(0.02))


class Member:
    """A consumer of a group that polls and commits in a thread of its own, in a `with` block."""

    def __init__(self, make: Callable[[], Consuming]) -> None:
        self.make = make
        self.got: list[Got] = []
        self.places: set[Place] = set()
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            consumer = self.make()
            try:
                while not self._stop.is_set():
                    rows = consumer.poll(0.1)
                    self.got += rows
                    if rows:
                        self._commit(consumer)
                    self.places = consumer.assignment()
            finally:
                consumer.close()
        except BaseException as error:  # noqa: BLE001  raised by the test's thread
            self.error = error

    def _commit(self, consumer: Consuming) -> None:
        # A commit is refused if a rebalance began: the next owner reads the records again.
        with contextlib.suppress(
            KafkaException, kafka.errors.KafkaError, aiokafka.errors.KafkaError,
            logstore.RebalanceError,
        ):  # fmt: skip
            consumer.commit()

    def leave(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive(), "the consumer did not close"
        if self.error is not None:
            raise self.error

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.leave()
        else:
            self._stop.set()
            self._thread.join(5)
