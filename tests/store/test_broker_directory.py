"""A whole log directory that a real broker left, opened as a store."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import Partition, Position
from logstore.partitioner import partition_for_key

GOLDEN = Path(__file__).parent.parent / "golden-log-directory"
EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((GOLDEN / "expected.json").read_text())[
    "records"
]
INTERNAL = {"__consumer_offsets", "__transaction_state"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "log", tmp_path / "log"))


def digests(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.rglob("*")
        if file.is_file()
    }


def rows(partition: Partition) -> list[dict[str, object]]:
    return [
        {
            "offset": record.offset,
            "timestamp": record.timestamp,
            "key": (record.key or b"").decode(),
            "value": (record.value or b"").decode(),
        }
        for record in partition
    ]


def ends(path: Path) -> dict[tuple[str, int], int]:
    lines = (path / "recovery-point-offset-checkpoint").read_text().splitlines()[2:]
    return {(t, int(n)): int(offset) for t, n, offset in map(str.split, lines)}


@pytest.mark.parametrize("readonly", [True, False])
def test_a_brokers_directory_is_a_store(directory: Path, readonly: bool) -> None:
    expected_ends = ends(directory)
    with logstore.open(directory, readonly=readonly) as store:
        assert set(store) == {"orders", "trimmed", "empty"} | INTERNAL, "not the metadata log"
        assert len(store["orders"]) == 3
        assert store.recovery.clean and not store.recovery.failed
        for topic in store.values():
            assert topic.id is not None
            assert topic.config.changed() == {}
            for partition in topic:
                assert partition.end_offset == expected_ends[topic.name, partition.number]
                assert not partition.recovery.damage and not partition.recovery.torn
                if topic.name not in INTERNAL:
                    assert rows(partition) == EXPECTED.get(partition.name, [])
        assert store["trimmed"][0].start_offset == 4, "from log-start-offset-checkpoint"
        assert store.identity.node_id == 1 and len(store.identity.cluster_id) == 22
        store.check()


def test_reading_changes_nothing(directory: Path) -> None:
    before = digests(directory)
    with logstore.open(directory, readonly=True) as store:
        store.describe()
        store.check()
    assert digests(directory) == before


def test_keys_lead_to_the_partitions_that_another_client_chose() -> None:
    """Written through librdkafka with the Java client's hash."""
    for name, records in EXPECTED.items():
        if name.startswith("orders"):
            for row in records:
                if row["value"] != "in a transaction":
                    chosen = partition_for_key(row["key"].encode(), 3)
                    assert name == f"orders-{chosen}"


def test_taking_over_keeps_identity_and_finishes_what_the_broker_began(directory: Path) -> None:
    identity = (directory / "meta.properties").read_bytes()
    metadata = digests(directory / "__cluster_metadata-0")
    assert list(directory.glob("going-0.*-delete"))
    with logstore.open(directory) as store:
        assert not list(directory.glob("going-0*")), "its deletion is finished"
        assert not (directory / ".kafka_cleanshutdown").exists()
        topic_id = store["orders"].id
        position = store["orders"].append(b"ours", key=b"alice")
        assert position == Position("orders", partition_for_key(b"alice", 3), 17)
        store["orders"].alter({"retention.ms": 5})
    assert (directory / "meta.properties").read_bytes() == identity
    assert digests(directory / "__cluster_metadata-0") == metadata
    after = ends(directory)
    assert after["orders", 0] == 18
    assert after["orders", 1] == 15 and after["__consumer_offsets", 0] == 1, "kept as they were"
    assert (directory / "log-start-offset-checkpoint").read_text() == "0\n1\ntrimmed 0 4\n"
    with logstore.open(directory) as store:
        assert store["orders"].id == topic_id and store["orders"].config.retention_ms == 5
        assert store["orders"][0][-1].value == b"ours"
        assert rows(store["trimmed"][0]) == EXPECTED["trimmed-0"]


def test_recovery_begins_at_the_brokers_checkpoint(directory: Path) -> None:
    """After a crash, too: records below the checkpoint were durable and are not read again."""
    (directory / ".kafka_cleanshutdown").unlink()
    log = directory / "orders-0" / "00000000000000000000.log"
    damaged = bytearray(log.read_bytes())
    damaged[-1] ^= 0xFF
    log.write_bytes(damaged)  # in the sealed segment, below the recovery point of 17
    with logstore.open(directory) as store:
        report = store.recovery.partitions["orders-0"]
        assert report.segments_checked == 1 and not report.damage
        assert store["orders"][0].end_offset == 17
    with logstore.open(directory) as store, pytest.raises(logstore.CorruptLogError):
        store.check()


def test_without_checkpoints_everything_is_checked(directory: Path) -> None:
    (directory / ".kafka_cleanshutdown").unlink()
    (directory / "recovery-point-offset-checkpoint").unlink()
    (directory / "log-start-offset-checkpoint").unlink()
    with logstore.open(directory) as store:
        assert store.recovery.partitions["orders-0"].segments_checked == 2
        assert store["trimmed"][0].start_offset == 0, "nothing says otherwise"
        assert rows(store["trimmed"][0])[4:] == EXPECTED["trimmed-0"]


def test_a_checkpoint_beyond_the_end_is_not_believed(directory: Path) -> None:
    checkpoint = directory / "recovery-point-offset-checkpoint"
    checkpoint.write_text(checkpoint.read_text().replace("orders 1 15", "orders 1 1500"))
    with logstore.open(directory) as store:
        assert store["orders"][1].end_offset == 15
        assert not store["orders"][1].recovery.damage
        assert store["orders"].append(b"next", partition=1).offset == 15
