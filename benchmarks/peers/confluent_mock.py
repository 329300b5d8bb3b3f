"""confluent-kafka: its producer on librdkafka's own mock cluster, in the memory of this process."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from confluent_kafka import Producer


def send(values: Sequence[bytes]) -> float:
    """Acknowledged by the mock's only broker; its queue is full at 100,000 by default."""
    producer = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused", "log_level": 3})
    produce = producer.produce
    produce("warm", b"up")
    producer.flush()
    started = perf_counter()
    for value in values:
        try:
            produce("bench", value)
        except BufferError:
            while True:
                producer.poll(0.01)
                try:
                    produce("bench", value)
                except BufferError:
                    continue
                break
    producer.flush()
    return len(values) / (perf_counter() - started)
