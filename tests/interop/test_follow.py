"""Follow with a real Kafka as its source: over the wire, and from its directory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import logstore
from logstore import DivergedError, Follow, KafkaSource
from tests.kit import committed, values, wait_until
from tests.replication.copies import is_prefix, raw_log

from .kafka import Broker, require_kafka
from .rows import plain_rows

pytestmark = pytest.mark.interop

START_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    require_kafka()
    pytest.importorskip("confluent_kafka")
    with Broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


def source(broker: Broker) -> KafkaSource:
    return KafkaSource(f"kafka://{broker.bootstrap}", refresh_seconds=0.2)


def produced(broker: Broker, topic: str, count: int, codec: str = "none") -> None:
    from .clients import produce

    rows = plain_rows(START_MS, topic, count)
    produce(broker.bootstrap, topic, rows, compression_type=codec, batch_size=1 << 14)


def copied(broker: Broker, target: Path, topic: str, **options: bool) -> logstore.FollowStatus:
    with Follow(source(broker), target, topics=[topic], **options) as follow:
        return follow.catch_up()


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_copy_of_a_real_kafka_has_the_same_bytes(
    broker: Broker, tmp_path: Path, codec: str
) -> None:
    topic = f"bytes-{codec}"
    broker.create_topic(topic, {"retention.ms": -1, "internal.segment.bytes": 1 << 16})
    produced(broker, topic, 3000, codec)
    status = copied(broker, tmp_path / "copy", topic)
    assert (status.copied_records, status.lag_records) == (3000, 0)
    assert raw_log(tmp_path / "copy" / f"{topic}-0") == raw_log(broker.partition_dir(topic))
    assert copied(broker, tmp_path / "copy", topic).copied_records == 0
    with logstore.open(tmp_path / "copy", readonly=True) as copy:
        assert copy[topic].config.retention_ms == -1
        assert copy.check() == []
        metadata = (broker.partition_dir(topic) / "partition.metadata").read_bytes()
        assert (tmp_path / "copy" / f"{topic}-0" / "partition.metadata").read_bytes() == metadata


def test_transactions_of_a_real_kafka_are_copied_as_they_are(
    broker: Broker, tmp_path: Path
) -> None:
    from confluent_kafka import Producer

    broker.create_topic("transactions")
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "follow"})
    producer.init_transactions(30)
    for number, commit in enumerate((True, False, True)):
        producer.begin_transaction()
        producer.produce("transactions", b"%d" % number)
        (producer.commit_transaction if commit else producer.abort_transaction)(30)
    copied(broker, tmp_path / "copy", "transactions")
    made = raw_log(tmp_path / "copy" / "transactions-0")
    assert made == raw_log(broker.partition_dir("transactions"))
    with logstore.open(tmp_path / "copy", readonly=True) as copy:
        assert committed(copy["transactions"][0]) == [b"0", b"2"]


def test_a_copy_goes_on_after_the_broker_was_killed_and_restarted(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    require_kafka()
    pytest.importorskip("confluent_kafka")
    with Broker(tmp_path_factory.mktemp("killed")) as broker:
        broker.create_topic("orders")
        produced(broker, "orders", 500)
        with Follow(source(broker), tmp_path / "copy") as follow:
            follow.catch_up()
            thread = threading.Thread(target=follow.run)
            thread.start()
            try:
                for total in (1000, 1500):
                    broker.kill()
                    wait_until(lambda: follow.status().unreachable_seconds > 0)
                    broker.start()
                    produced(broker, "orders", 500)

                    def level(total: int = total) -> bool:
                        rows = follow.status().partitions
                        return bool(rows) and rows[0].end_offset == total

                    wait_until(level)
                    assert is_prefix(tmp_path / "copy" / "orders-0", broker.partition_dir("orders"))
            finally:
                follow.stop()
                thread.join()
        # Each start of the broker began a leader epoch; the copy has all of them.
        with logstore.open(tmp_path / "copy", readonly=True) as copy:
            assert len(copy["orders"][0].leader_epochs.entries) == 3
        made = raw_log(tmp_path / "copy" / "orders-0")
        assert made == raw_log(broker.partition_dir("orders"))


def test_retention_of_a_real_kafka_is_followed_with_trim(broker: Broker, tmp_path: Path) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    broker.create_topic("retained")
    produced(broker, "retained", 100)
    copied(broker, tmp_path / "copy", "retained")
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    place = TopicPartition("retained", 0, 60)
    admin.delete_records([place])[TopicPartition("retained", 0)].result(30)
    copied(broker, tmp_path / "copy", "retained", trim=True)
    copied(broker, tmp_path / "new", "retained")
    with (
        logstore.open(tmp_path / "copy", readonly=True) as copy,
        logstore.open(tmp_path / "new", readonly=True) as new,
    ):
        assert copy["retained"][0].start_offset == new["retained"][0].start_offset == 60
        assert values(copy["retained"][0]) == values(new["retained"][0])


def test_another_history_of_a_real_kafka_is_noticed(broker: Broker, tmp_path: Path) -> None:
    broker.create_topic("parted")
    produced(broker, "parted", 10)
    copied(broker, tmp_path / "copy", "parted")
    with logstore.open(tmp_path / "copy") as copy:  # an epoch that the broker has never had
        log = copy["parted"][0]
        log.become_leader(log.leader_epoch + 5)
        log.append(b"foreign")
    with pytest.raises(DivergedError, match="same up to offset 10"):
        copied(broker, tmp_path / "copy", "parted")
    produced(broker, "parted", 10)
    assert copied(broker, tmp_path / "copy", "parted", allow_truncate=True).truncated_records == 1
    made = raw_log(tmp_path / "copy" / "parted-0")
    assert made == raw_log(broker.partition_dir("parted"))


def test_the_directory_of_a_running_broker_is_copied(broker: Broker, tmp_path: Path) -> None:
    broker.create_topic("local")
    produced(broker, "local", 200)
    with Follow(broker.log_dir, tmp_path / "copy", topics=["local"]) as follow:
        assert follow.catch_up().copied_records == 200
    made = raw_log(tmp_path / "copy" / "local-0")
    assert made == raw_log(broker.partition_dir("local"))
