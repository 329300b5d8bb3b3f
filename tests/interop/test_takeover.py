"""A real broker takes over a directory that logstore wrote, appends, and hands it back.

The cluster must know a topic before it accepts its directory, so the broker first creates the
topics and stops; their directories are thrown away and logstore writes new ones with the same topic
ids.  From then on the broker has nothing but what logstore wrote.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import logstore
from logstore import Compactor, Partition, Record, Store
from logstore.testing import encode_batch

from .kafka import Broker, require_kafka
from .rows import Row, awkward_rows, plain_rows, row_of

pytestmark = pytest.mark.interop

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
START_MS = 1_700_000_000_000
SMALL = {"segment.bytes": 4_000, "index.interval.bytes": 200, "retention.ms": -1}
COMPACTED = {**SMALL, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": 1.0}
FROM_BROKER = plain_rows(START_MS + 900_000, "from the broker", 20)


def topic_ids(broker: Broker, topics: list[str]) -> dict[str, uuid.UUID]:
    with logstore.open(broker.log_dir, readonly=True) as store:
        return {name: store[name].id for name in topics}


def append_rows(log: Partition, rows: list[Row], codec: str = "none") -> None:
    """As Kafka's clients may: a record with neither key nor value is one they can write."""
    with log.writer(compression=codec, batch_bytes=2_000) as out:
        for row in rows:
            if row.value is not None or row.key is not None:
                out.append(row.value, key=row.key, headers=row.headers, timestamp=row.timestamp)


def our_rows(log: Partition, isolation: str = "read_uncommitted") -> list[Row]:
    return [row_of(record) for record in log.scan(isolation=isolation)]


def write_plain(store: Store, ids: dict[str, uuid.UUID]) -> dict[str, list[Row]]:
    """One topic for each codec, of several segments, with everything a record may be."""
    written: dict[str, list[Row]] = {}
    for codec in CODECS:
        topic = store.create_topic(codec, config=SMALL, topic_id=ids[codec])
        for part in range(4):
            now = START_MS + part * 1_000
            rows = [*awkward_rows(now, codec), *plain_rows(now, f"{codec} {part}", 100)]
            append_rows(topic[0], rows, codec)
        topic[0].extend([Record(b"%d" % n, timestamp=START_MS + 5_000) for n in range(30)])
        topic[0].roll()
        assert len(topic[0].segments) > 2
        written[codec] = our_rows(topic[0])
    return written


class Transactions:
    """Transactional producers without a coordinator: raw batches and markers."""

    def __init__(self, log: Partition) -> None:
        self.log = log
        self.sequences: dict[int, int] = {}

    def send(self, producer: int, rows: list[Row], codec: str = "none") -> None:
        sequence = self.sequences.get(producer, 0)
        records = [
            Record(row.value, key=row.key, headers=row.headers, timestamp=row.timestamp)
            for row in rows
        ]
        raw = encode_batch(records, transactional=True, producer_id=producer, producer_epoch=3,
                           base_sequence=sequence, codec=CODECS.index(codec))  # fmt: skip
        assert not self.log.append_batch(raw, verify_transaction=False).duplicate
        assert self.log.append_batch(raw, verify_transaction=False).duplicate
        self.sequences[producer] = sequence + len(rows)

    def end(self, producer: int, commit: bool) -> None:
        self.log.end_transaction(producer, 3, commit=commit)


def write_transactional(store: Store, topic_id: uuid.UUID) -> None:
    """Committed, aborted, interleaved and plain; one abort reaches over three segments."""
    log = store.create_topic("transactional", config=SMALL, topic_id=topic_id)[0]
    clients = Transactions(log)
    append_rows(log, plain_rows(START_MS, "plain", 5))
    clients.send(1000, plain_rows(START_MS, "committed", 7))
    clients.end(1000, commit=True)
    clients.send(1000, plain_rows(START_MS, "aborted", 3), "zstd")
    clients.end(1000, commit=False)
    clients.send(1001, plain_rows(START_MS, "aborted over segments", 20))
    clients.send(1002, plain_rows(START_MS, "committed meanwhile", 20), "lz4")
    log.roll()
    append_rows(log, plain_rows(START_MS, "plain", 50))
    log.roll()
    clients.end(1002, commit=True)
    clients.send(1001, plain_rows(START_MS, "aborted over segments", 2))
    clients.end(1001, commit=False)
    append_rows(log, plain_rows(START_MS, "plain", 5))


def write_compacted(store: Store, topic_id: uuid.UUID) -> None:
    """Several rounds over the same keys, tombstones and a transaction among them; compacted."""
    log = store.create_topic("compacted", config=COMPACTED, topic_id=topic_id)[0]
    clients = Transactions(log)
    for part in range(6):
        now = START_MS + part
        append_rows(log, plain_rows(now, "keys", 40), CODECS[part % len(CODECS)])
        append_rows(log, [Row(timestamp=now, key=b"%d" % key, value=b"%d" % part)
                          for key in range(part, 60, part + 1)])  # fmt: skip
        append_rows(log, [Row(timestamp=now, key=b"%d" % (part * 7))])
        clients.send(1000, [Row(timestamp=now, key=b"txn", value=b"%d" % part)])
        clients.end(1000, commit=part % 2 == 0)
        log.roll()
    before = sum(1 for _ in log)
    report = Compactor(log, min_cleanable_dirty_ratio=0).run()
    after = sum(1 for _ in log)
    assert report.superseded > 0 and after < before / 2
    append_rows(log, plain_rows(START_MS + 100, "not compacted", 5))


def write_and_die(log_dir: Path, topic_id: uuid.UUID) -> None:
    """In a process of its own: acknowledged records, a torn tail, and no close()."""
    store = logstore.open(log_dir)
    topic = store.create_topic("unclean", config=SMALL, topic_id=topic_id)
    append_rows(topic[0], plain_rows(START_MS, "before the crash", 300))
    topic[0].sync()
    active = topic[0].segments[-1]
    with open(active.path, "ab") as file:
        file.write(b"\0\0\0\0\0\0\1\0torn")
    os._exit(7)


class TakenOver(NamedTuple):
    broker: Broker
    written: dict[str, list[Row]]
    committed: dict[str, list[Row]]  # what of these no aborted transaction wrote


@pytest.fixture(scope="module")
def taken_over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TakenOver]:
    """A broker that runs on logstore's directories; and the rows that logstore wrote."""
    require_kafka()
    pytest.importorskip("confluent_kafka")
    broker = Broker(tmp_path_factory.mktemp("takeover"))
    committed: dict[str, list[Row]] = {}
    topics = [*CODECS, "unclean", "transactional", "compacted"]
    with broker:
        for topic in topics:
            settings = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 1.0}
            broker.create_topic(topic, settings if topic == "compacted" else {"retention.ms": -1})
    ids = topic_ids(broker, topics)
    for topic in topics:
        shutil.rmtree(broker.partition_dir(topic))
    with logstore.open(broker.log_dir) as store:
        assert not set(topics) & set(store)
        written = write_plain(store, ids)
        write_transactional(store, ids["transactional"])
        write_compacted(store, ids["compacted"])
        for topic in ("transactional", "compacted"):
            written[topic] = our_rows(store[topic][0])
            committed[topic] = our_rows(store[topic][0], "read_committed")
    child = multiprocessing.get_context("fork").Process(
        target=write_and_die, args=(broker.log_dir, ids["unclean"])
    )
    child.start()
    child.join(60)
    assert child.exitcode == 7
    assert not (broker.log_dir / ".kafka_cleanshutdown").exists()
    written["unclean"] = [
        Row(**{**vars_of(row), "offset": offset})
        for offset, row in enumerate(plain_rows(START_MS, "before the crash", 300))
    ]
    with broker:
        yield TakenOver(broker, written, committed)


def vars_of(row: Row) -> dict[str, object]:
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}


def stray(broker: Broker) -> list[str]:
    return [path.name for path in broker.log_dir.iterdir() if path.name.endswith("-stray")]


@pytest.mark.parametrize("topic", [*CODECS, "unclean", "transactional", "compacted"])
def test_a_broker_reads_what_logstore_wrote(taken_over: TakenOver, topic: str) -> None:
    from .clients import offset_range, read_all

    broker, written, _ = taken_over
    assert stray(broker) == []
    assert read_all(broker.bootstrap, topic) == written[topic]
    assert offset_range(broker.bootstrap, topic) == range(written[topic][-1].offset + 1)


@pytest.mark.parametrize("topic", ["transactional", "compacted"])
def test_a_broker_hides_what_was_aborted_in_logstore(taken_over: TakenOver, topic: str) -> None:
    from .clients import read_all

    broker, written, committed = taken_over
    assert read_all(broker.bootstrap, topic, isolation="read_committed") == committed[topic]
    assert not any(b"aborted" in (row.value or b"") for row in committed[topic])
    assert topic == "compacted" or len(committed[topic]) < len(written[topic])


@pytest.fixture(scope="module")
def handed_back(taken_over: TakenOver) -> tuple[Broker, dict[str, list[Row]]]:
    """The broker appended to every topic and stopped; the rows its consumer saw then."""
    from .clients import produce, read_all

    broker, written, _ = taken_over
    seen: dict[str, list[Row]] = {}
    for topic in written:
        codec = topic if topic in CODECS else "lz4"
        produce(broker.bootstrap, topic, FROM_BROKER, compression_type=codec)
        seen[topic] = read_all(broker.bootstrap, topic)
        assert seen[topic][: len(written[topic])] == written[topic]
        assert len(seen[topic]) == len(written[topic]) + len(FROM_BROKER)
    broker.stop()
    return broker, seen


def test_logstore_reads_both_parts_when_it_gets_the_directory_back(
    handed_back: tuple[Broker, dict[str, list[Row]]],
) -> None:
    broker, seen = handed_back
    with logstore.open(broker.log_dir) as store:
        assert store.recovery.clean
        for topic, rows in seen.items():
            log = store[topic][0]
            log.check()
            assert our_rows(log) == rows
            assert log.last_stable_offset == log.end_offset
            assert log.append(b"ours again", key=b"k") == rows[-1].offset + 1
            assert log.offset_for_time(FROM_BROKER[0].timestamp) == rows[-20].offset
            assert log.leader_epoch > 0  # the broker led, and its batches have its epoch


def test_a_broker_that_was_killed_leaves_what_logstore_can_read(
    handed_back: tuple[Broker, dict[str, list[Row]]],
) -> None:
    from .clients import produce, read_all

    broker, seen = handed_back
    broker.start()
    try:
        for topic in ("none", "zstd"):
            produce(broker.bootstrap, topic, FROM_BROKER)
        expected = {topic: read_all(broker.bootstrap, topic) for topic in ("none", "zstd")}
    finally:
        broker.kill()
    with logstore.open(broker.log_dir) as store:
        assert not store.recovery.clean
        for topic, rows in expected.items():
            assert len(rows) >= len(seen[topic]) + len(FROM_BROKER)
            assert our_rows(store[topic][0]) == rows
            store[topic].append(b"after the crash")
            store[topic][0].extend([Record(b"x", key=b"k")])
