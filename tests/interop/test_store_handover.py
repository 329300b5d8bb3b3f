"""One directory, owned in turn by a real broker and by a store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import logstore
from logstore import LockedError, Record

from .kafka import Broker, require_kafka
from .rows import Row, awkward_rows, plain_rows, row_of

pytestmark = pytest.mark.interop

NOW = 1_700_000_000_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    require_kafka()
    pytest.importorskip("confluent_kafka")
    broker = Broker(tmp_path / "broker")
    yield broker
    broker.kill()


def records(rows: list[Row]) -> list[Record]:
    return [
        Record(row.value, key=row.key, headers=row.headers, timestamp=row.timestamp)
        for row in rows
        if row.value is not None or row.key is not None
    ]


def test_a_directory_goes_from_broker_to_store_and_back(broker: Broker) -> None:
    """Clean both ways: each trusts what the other left, and serves all of it."""
    from .clients import produce, read_all

    with broker:
        broker.create_topic("handed", {"retention.ms": -1})
        produce(broker.bootstrap, "handed", awkward_rows(NOW, "broker"), compression_type="lz4")
        with pytest.raises(LockedError, match="locked by process"):
            logstore.open(broker.log_dir)
        with logstore.open(broker.log_dir, readonly=True) as reader:
            beside = [row_of(record) for record in reader["handed"][0]]
        assert beside == read_all(broker.bootstrap, "handed")

    with logstore.open(broker.log_dir) as store:
        topic = store["handed"]
        assert [row_of(record) for record in topic[0]] == beside
        topic.extend(records(plain_rows(NOW + 1000, "store", 20)))
        with topic[0].writer(compression="zstd") as out:
            for record in records(plain_rows(NOW + 2000, "writer", 500)):
                out.append(record.value, key=record.key, timestamp=record.timestamp)
        topic[0].roll()
        topic.append(b"last", key=b"k", timestamp=NOW + 3000)
        ours = [row_of(record) for record in topic[0]]
        with pytest.raises(RuntimeError, match="exited at once"):
            broker.start()  # the lock works the other way round, too
    broker.kill()

    with broker:
        assert read_all(broker.bootstrap, "handed") == ours
        produce(broker.bootstrap, "handed", plain_rows(NOW + 4000, "broker again", 30))
        final = read_all(broker.bootstrap, "handed")
        assert final[: len(ours)] == ours and len(final) == len(ours) + 30
        assert not list(broker.log_dir.glob("*-stray"))

    with logstore.open(broker.log_dir) as store:
        assert [row_of(record) for record in store["handed"][0]] == final
        store.check()


@pytest.mark.slow
def test_crashes_on_both_sides_lose_nothing(broker: Broker) -> None:
    from .clients import produce, read_all

    with broker:
        broker.create_topic("handed", {"retention.ms": -1})
        produce(broker.bootstrap, "handed", plain_rows(NOW, "broker", 50))
        broker.kill()
    with logstore.open(broker.log_dir) as store:
        assert not store.recovery.clean
        store["handed"].extend(records(plain_rows(NOW + 1000, "store", 50)))
        ours = [row_of(record) for record in store["handed"][0]]
        # A copy of an open store is what a kill leaves.
        crashed = Path(shutil.copytree(broker.log_dir, broker.directory / "crashed"))
    shutil.rmtree(broker.log_dir)
    crashed.rename(broker.log_dir)
    with broker:
        assert read_all(broker.bootstrap, "handed") == ours
        produce(broker.bootstrap, "handed", plain_rows(NOW + 2000, "broker", 10))
    with logstore.open(broker.log_dir) as store:
        assert store["handed"][0].end_offset == len(ours) + 10
