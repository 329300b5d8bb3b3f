"""librdkafka, by confluent-kafka: the client that most programs outside Java use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from time import perf_counter
from typing import Any

from benchmarks.wire.servers import Server

SECONDS_MAX = 300.0


def produce(
    server: Server,
    topic: str,
    records: int,
    record_bytes: int,
    compression: str = "none",
    acks: str = "all",
    settings: dict[str, Any] | None = None,
) -> float:
    """Return records a second, until the last one is acknowledged."""
    from confluent_kafka import Producer

    value = os.urandom(record_bytes // 2) * 2
    producer = Producer(
        {
            "bootstrap.servers": server.address,
            "acks": acks,
            "linger.ms": 5,
            "compression.type": compression,
            "queue.buffering.max.messages": 1_000_000,
            "queue.buffering.max.kbytes": 1 << 20,
            "log_level": 0,
            **(settings or {}),
        }
    )
    producer.list_topics(topic, timeout=30)
    began = perf_counter()
    for _ in range(records):
        while True:
            try:
                producer.produce(topic, value, partition=0)
                break
            except BufferError:
                producer.poll(0.01)
    left = producer.flush(SECONDS_MAX)
    assert left == 0, f"{left} records were not acknowledged"
    return records / (perf_counter() - began)


def consume(server: Server, topic: str, records: int) -> float:
    """Return records a second, from the first one to the last."""
    from confluent_kafka import TopicPartition

    consumer = _consumer(
        server,
        {
            "fetch.wait.max.ms": 100,
            "queued.min.messages": 1_000_000,
            "queued.max.messages.kbytes": 1 << 20,
            "fetch.message.max.bytes": 8 << 20,
        },
    )
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        got = len(consumer.consume(1, timeout=30))  # metadata and the first fetch
        began = perf_counter()
        while got < records:
            got += len(consumer.consume(min(10_000, records - got), timeout=1.0))
            assert perf_counter() - began < SECONDS_MAX, f"{got} of {records} records came"
        return records / (perf_counter() - began)
    finally:
        consumer.close()


def single_sends(server: Server, topic: str, count: int, acks: str = "all") -> Iterator[float]:
    """Send one record at a time; yield how long each takes to be acknowledged."""
    from confluent_kafka import Producer

    producer = Producer(
        {"bootstrap.servers": server.address, "linger.ms": 0, "acks": acks, "log_level": 0}
    )
    value = os.urandom(100)
    for number in range(count + count // 10):
        began = perf_counter()
        producer.produce(topic, value, partition=0)
        producer.flush(60)
        if number >= count // 10:
            yield perf_counter() - began


def end_to_end(server: Server, topic: str, count: int, pause: float) -> list[float]:
    """Return how long records take from `produce` to a consumer that polls."""
    from confluent_kafka import Producer, TopicPartition

    producer = Producer({"bootstrap.servers": server.address, "linger.ms": 0, "log_level": 0})
    consumer = _consumer(server)
    taken = []
    try:
        start = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)[1]
        consumer.assign([TopicPartition(topic, 0, start)])
        for number in range(count + count // 10):
            time.sleep(pause)
            began = perf_counter()
            producer.produce(topic, b"x" * 100, partition=0)
            producer.poll(0)
            message = consumer.poll(30)
            assert message is not None, "the record did not come"
            assert message.error() is None
            if number >= count // 10:
                taken.append(perf_counter() - began)
        producer.flush(30)
        return taken
    finally:
        consumer.close()


def commits(server: Server, topic: str, count: int) -> float:
    """Return commits a second, one after the other."""
    from confluent_kafka import TopicPartition

    consumer = _consumer(server, {"group.id": "bench-commits"})
    try:
        for number in range(count + count // 10):
            if number == count // 10:
                began = perf_counter()
            offset = TopicPartition(topic, 0, number)
            consumer.commit(offsets=[offset], asynchronous=False)
        return count / (perf_counter() - began)
    finally:
        consumer.close()


def transactions(server: Server, topic: str, count: int, records: int) -> float:
    """Return transactions a second: some records and an offset each, one after the other."""
    from confluent_kafka import Producer, TopicPartition

    producer = Producer(
        {
            "bootstrap.servers": server.address,
            "transactional.id": f"bench-{topic}-{time.time_ns()}",
            "linger.ms": 0,
            "log_level": 0,
        }
    )
    consumer = _consumer(server, {"group.id": f"bench-{topic}"})
    try:
        producer.init_transactions(60)
        group = consumer.consumer_group_metadata()
        for number in range(count + count // 10):
            if number == count // 10:
                began = perf_counter()
            producer.begin_transaction()
            for _ in range(records):
                producer.produce(topic, b"x" * 100, partition=0)
            offset = TopicPartition(topic, 0, number)
            producer.send_offsets_to_transaction([offset], group, 60)
            producer.commit_transaction(60)
        return count / (perf_counter() - began)
    finally:
        consumer.close()


def _consumer(server: Server, settings: dict[str, Any] | None = None) -> Any:
    from confluent_kafka import Consumer

    return Consumer(
        {
            "bootstrap.servers": server.address,
            "group.id": "bench",
            "enable.auto.commit": False,
            "log_level": 0,
            **(settings or {}),
        }
    )
