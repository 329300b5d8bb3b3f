"""A Kafka client and Python code on one store: no broker, no JVM.

    python examples/kafka_server.py [DIRECTORY]

needs `pip install confluent-kafka`.
"""

from __future__ import annotations

import sys
import tempfile

import confluent_kafka

import logstore
from logstore.kafka import KafkaServer


def main(directory: str) -> None:
    with logstore.open(directory) as store, KafkaServer(store) as server:
        print("listening on", server.bootstrap_servers)
        producer = confluent_kafka.Producer({"bootstrap.servers": server.bootstrap_servers})
        for number in range(3):
            producer.produce("orders", f"{number} EUR".encode(), key=b"alice")
        producer.flush()
        # The same log, at once.
        print([record.value for record in store["orders"][0]])

        store["orders"].append(b"by the Python API", key=b"bob")
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": server.bootstrap_servers,
                "group.id": "readers",
                "auto.offset.reset": "earliest",
            }
        )
        consumer.subscribe(["orders"])
        seen: list[bytes] = []
        while len(seen) < 4:
            for message in consumer.consume(10, timeout=10.0):
                assert message.error() is None
                seen.append(message.value() or b"")
        consumer.close()  # commits its offsets
        print(seen)
        [committed] = logstore.Groups(store).committed("readers").values()
        print("the group continues at offset", committed.offset)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else scratch)
