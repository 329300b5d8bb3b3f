"""librdkafka (confluent-kafka) as producer and consumer of a running broker."""

from __future__ import annotations

import time
from collections.abc import Iterable

import confluent_kafka
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition

from .rows import Row

TIMEOUT = 120.0


def producer(bootstrap: str, **settings: object) -> Producer:
    """A producer that sends only when flushed; `linger_ms=5` means linger.ms=5."""
    dotted = {name.replace("_", "."): value for name, value in settings.items()}
    return Producer({"bootstrap.servers": bootstrap, "linger.ms": 10_000, **dotted})


def send(client: Producer, topic: str, rows: Iterable[Row]) -> None:
    """Send `rows`, in one batch where they fit, and return when the broker has them all."""
    failures: set[str] = set()

    def delivered(error: KafkaError | None, _: confluent_kafka.Message) -> None:
        if error is not None:
            failures.add(str(error))

    for row in rows:
        client.produce(
            topic,
            row.value,
            row.key,
            partition=0,
            on_delivery=delivered,
            timestamp=row.timestamp,
            headers=list(row.headers),
        )
    unsent = client.flush(TIMEOUT)
    assert unsent == 0 and not failures, f"{unsent} unsent to {topic}; {failures}"


def produce(bootstrap: str, topic: str, rows: Iterable[Row], **settings: object) -> None:
    """Send `rows` through a producer of their own."""
    send(producer(bootstrap, **settings), topic, rows)


def read_all(bootstrap: str, topic: str, *, isolation: str = "read_uncommitted") -> list[Row]:
    """Every record of partition 0 of `topic` that a consumer of that isolation level is shown."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "interop",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": isolation,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        return list(_until_end(consumer))
    finally:
        consumer.close()


def offset_range(bootstrap: str, topic: str) -> range:
    """[start offset, high watermark) of partition 0 of `topic`."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "interop"})
    try:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=TIMEOUT)
        return range(low, high)
    finally:
        consumer.close()


def _until_end(consumer: Consumer) -> Iterable[Row]:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is None:
            continue
        error = message.error()
        if error is None:
            yield _row(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            return
        else:
            raise RuntimeError(f"consuming failed: {error}")
    raise TimeoutError("the consumer did not reach the end of the partition")


def _row(message: confluent_kafka.Message) -> Row:
    offset, headers = message.offset(), message.headers() or []
    assert offset is not None
    return Row(
        offset=offset,
        timestamp=message.timestamp()[1],
        key=message.key(),
        value=message.value(),
        headers=tuple((name, value) for name, value in headers),
    )
