"""How long a value takes from one thread to another: through a queue, and through librdkafka.

Each returns the times in seconds, one for each value; values go one by one, with a pause between.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from time import perf_counter
from typing import Any

PAUSE = 0.0005  # so that the reader waits when the next value comes


def measure(put: Callable[[bytes], object], take: Callable[[], bytes | None], count: int,
            ) -> list[float]:  # fmt: skip
    """`put` in this thread, `take` in another; None from `take` means: nothing yet."""
    times: list[float] = []

    def read() -> None:
        while len(times) < count:
            value = take()
            if value is not None:
                times.append(perf_counter() - float(value))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(count):
        put(b"%.9f" % perf_counter())
        time.sleep(PAUSE)
    reader.join()
    return times


def through_queue(count: int) -> list[float]:
    held: queue.Queue[bytes] = queue.Queue()
    return measure(held.put, held.get, count)


class MockCluster:
    """librdkafka's broker in memory: the protocol over loopback, nothing on disk."""

    def __init__(self) -> None:
        from confluent_kafka import Producer

        settings: dict[str, Any] = {
            "bootstrap.servers": "unused",
            "test.mock.num.brokers": 1,
            "linger.ms": 0,
            "log_level": 0,
        }
        self.producer = Producer(settings)
        broker = next(iter(self.producer.list_topics(timeout=10).brokers.values()))
        self.address = f"{broker.host}:{broker.port}"

    def consumer(self, topic: str) -> Any:
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer({"bootstrap.servers": self.address, "group.id": "bench",
                             "auto.offset.reset": "earliest", "log_level": 0,
                             "fetch.wait.max.ms": 1})  # fmt: skip
        consumer.assign([TopicPartition(topic, 0, 0)])
        return consumer

    def fill(self, topic: str, values: list[bytes]) -> None:
        for value in values:
            while True:
                try:
                    self.producer.produce(topic, value, partition=0)
                    break
                except BufferError:
                    self.producer.poll(0.1)
        self.producer.flush()

    def scan(self, topic: str, count: int) -> float:
        """Records a second, a thousand at a time."""
        consumer = self.consumer(topic)
        try:
            while not (found := len(consumer.consume(1, 1.0))):
                pass
            started = perf_counter()
            total = 0
            while found < count:
                messages = consumer.consume(min(1000, count - found), 10.0)
                if not messages:
                    raise TimeoutError(f"{found} of {count} records came from the mock cluster")
                for message in messages:
                    total += len(message.value())
                    found += 1
            return found / (perf_counter() - started)
        finally:
            consumer.close()

    def handing_over(self, count: int) -> list[float]:
        consumer = self.consumer("latency")
        self.fill("latency", [b"0"])
        while consumer.poll(1.0) is None:
            pass

        def put(value: bytes) -> None:
            self.producer.produce("latency", value, partition=0)
            self.producer.poll(0)

        def take() -> bytes | None:
            message = consumer.poll(1.0)
            return None if message is None or message.error() else bytes(message.value())

        try:
            return measure(put, take, count)
        finally:
            consumer.close()
