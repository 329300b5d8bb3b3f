"""Write tests/golden-log-directory again: a whole log directory, as a stopped broker left it.

    python -m tests.golden.make_log_directory      (from the checkout; needs java and mvn)

Internal topics, a topic that is being deleted, a log that starts inside its first segment, and
KRaft's own files are in it; `expected.json` next to it has what a consumer read.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.golden.make_golden import await_true
from tests.interop.clients import TIMEOUT, producer
from tests.interop.kafka import VERSION, Broker

TARGET = Path(__file__).parent.parent / "golden-log-directory"
START_MS = 1_700_000_000_000
TOPICS = {"orders": 3, "trimmed": 1, "empty": 1, "going": 1}
SETTINGS = {"retention.ms": "-1", "segment.index.bytes": "480"}
KEYS = [b"alice", b"bob", b"carol", b"dave", b"erin", b"frank", b"grace", b"heidi"]


def fill(broker: Broker) -> dict[str, list[dict[str, object]]]:
    """Records by ``topic-N``, with the partitions that the client's own partitioner chose."""
    written: dict[str, list[dict[str, object]]] = {}

    def delivered(error: object, message: object) -> None:
        assert error is None, error
        row = {"offset": message.offset(), "timestamp": message.timestamp()[1],
               "key": message.key().decode(), "value": message.value().decode()}  # fmt: skip
        written.setdefault(f"{message.topic()}-{message.partition()}", []).append(row)

    client = producer(broker.bootstrap, partitioner="murmur2_random")  # as the Java client
    for i in range(40):
        client.produce("orders", b"order %d" % i, KEYS[i % len(KEYS)], timestamp=START_MS + i,
                       on_delivery=delivered)  # fmt: skip
    for topic in ("trimmed", "going"):
        for i in range(10):
            client.produce(topic, b"%d" % i, b"k", timestamp=START_MS + i, on_delivery=delivered)
            client.flush(TIMEOUT)  # each a batch of its own
    transactional = producer(broker.bootstrap, transactional_id="golden")
    transactional.init_transactions(TIMEOUT)
    transactional.begin_transaction()
    transactional.produce("orders", b"in a transaction", b"alice", partition=0,
                          timestamp=START_MS + 100, on_delivery=delivered)  # fmt: skip
    transactional.commit_transaction(TIMEOUT)
    return written


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        with Broker(scratch) as broker:
            admin = AdminClient({"bootstrap.servers": broker.bootstrap})
            new = [NewTopic(name, count, 1, config=SETTINGS) for name, count in TOPICS.items()]
            for done in admin.create_topics(new).values():
                done.result(TIMEOUT)
            records = fill(broker)
            group = {"bootstrap.servers": broker.bootstrap, "group.id": "readers"}
            consumer = Consumer(group)
            consumer.commit(offsets=[TopicPartition("orders", 1, 5)], asynchronous=False)
            consumer.close()
            admin.delete_records([TopicPartition("trimmed", 0, 4)])
            await_true("trimming", lambda: watermark(broker, "trimmed") == 4)
            admin.delete_topics(["going"])["going"].result(TIMEOUT)
            await_true("deletion", lambda: bool(list(broker.log_dir.glob("going-0.*-delete"))))
        records["trimmed-0"] = records["trimmed-0"][4:]
        del records["going-0"]
        for rows in records.values():
            rows.sort(key=lambda row: row["offset"])
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(broker.log_dir, TARGET / "log")
        expected = {"kafka": VERSION, "records": dict(sorted(records.items()))}
        (TARGET / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    size = sum(file.stat().st_size for file in TARGET.rglob("*") if file.is_file())
    print(f"{TARGET}: {size} bytes")
    return 0


def watermark(broker: Broker, topic: str) -> int:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "golden"})
    try:
        low, _ = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=TIMEOUT)
        return low
    finally:
        consumer.close()


if __name__ == "__main__":
    sys.exit(main())
