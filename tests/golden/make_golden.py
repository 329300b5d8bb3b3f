"""Remake tests/golden: partition directories written by a real broker, and what a consumer read.

    python -m tests.golden.make_golden         (from the checkout; needs java, mvn, confluent-kafka)

Segments are rolled by time: `segment.ms` is half an hour and each group of records is a day
later, so that a few hundred bytes make several segments.  Index entries are dense likewise.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from tests.interop.clients import offset_range, produce, producer, read_all, send
from tests.interop.kafka import VERSION, Broker, dump_log
from tests.interop.rows import Expected, Row, awkward_rows, plain_rows, save_expected

GOLDEN = Path(__file__).parent
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

DAY_MS = 86_400_000
START_MS = 1_700_000_000_000
ROLLED_DAILY = {"segment.ms": 1_800_000, "index.interval.bytes": 128, "retention.ms": -1}
BROKER = {
    "log.cleaner.backoff.ms": 100,
    "log.retention.check.interval.ms": 200,
    "log.initial.task.delay.ms": 100,
}
POLL_TIMEOUT = 60.0


def make_codec(broker: Broker, codec: str) -> str:
    """Half of the batches as librdkafka compressed them, half as the broker itself did."""
    stored = "uncompressed" if codec == "none" else codec
    broker.create_topic(codec, {**ROLLED_DAILY, "compression.type": stored})
    long = 40 if codec == "none" else 3000  # crosses the blocks of snappy (32 KiB), lz4 (64 KiB)
    for day in range(4):
        now = START_MS + day * DAY_MS
        by_client = awkward_rows(now, f"client {day}")
        by_broker = awkward_rows(now + 100, f"broker {day}") + plain_rows(now + 200, "plain", 12)
        if day == 1:
            pattern = bytes(range(48))
            by_client.append(Row(timestamp=now, key=b"long", value=pattern * long))
            by_broker.append(Row(timestamp=now, key=b"long", value=pattern[::-1] * long))
        produce(broker.bootstrap, codec, by_client, compression_type=codec)
        produce(broker.bootstrap, codec, by_broker, compression_type="none")
    return codec


def make_log_append_time(broker: Broker) -> str:
    topic = "log-append-time"
    settings = {"message.timestamp.type": "LogAppendTime", "index.interval.bytes": 128}
    broker.create_topic(topic, {**settings, "segment.ms": 1, "retention.ms": -1})
    for codec in ("none", "lz4", "none", "zstd"):
        rows = awkward_rows(START_MS, codec)
        produce(broker.bootstrap, topic, rows, compression_type=codec)
    return topic


def make_idempotent(broker: Broker) -> str:
    """Two producers in turn; the second half, after a restart, is in the next leader epoch."""
    topic = "idempotent"
    if not broker.partition_dir(topic).exists():
        broker.create_topic(topic, ROLLED_DAILY)
        first_day = 0
    else:
        first_day = 2
    clients = [producer(broker.bootstrap, enable_idempotence=True) for _ in range(2)]
    for day in range(first_day, first_day + 2):
        for number, client in enumerate(clients):
            now = START_MS + day * DAY_MS + number
            send(client, topic, plain_rows(now, f"producer {number} day {day}", 5))
            send(client, topic, awkward_rows(now, f"producer {number}")[:3])
    return topic


def make_transactional(broker: Broker) -> str:
    """Committed, aborted, interleaved and plain; one abort reaches back into an older segment."""
    topic = "transactional"
    broker.create_topic(topic, ROLLED_DAILY)
    one = producer(broker.bootstrap, transactional_id="one")
    two = producer(broker.bootstrap, transactional_id="two", compression_type="lz4")
    for client in (one, two):
        client.init_transactions(30)

    one.begin_transaction()
    send(one, topic, plain_rows(START_MS, "committed", 4))
    one.commit_transaction(30)

    one.begin_transaction()
    send(one, topic, plain_rows(START_MS + 10, "aborted", 3))
    one.abort_transaction(30)
    produce(broker.bootstrap, topic, plain_rows(START_MS + 20, "plain", 2))

    one.begin_transaction()
    two.begin_transaction()
    send(one, topic, plain_rows(START_MS + 30, "aborted over two segments", 3))
    send(two, topic, plain_rows(START_MS + 40, "committed meanwhile", 3))
    # The segment began with a marker of the present, and a broker takes up to an hour from now.
    future = int(time.time() * 1000) + 3_000_000
    send(one, topic, plain_rows(future, "aborted over two segments", 2))
    one.abort_transaction(30)
    send(two, topic, plain_rows(future, "committed meanwhile", 2))
    two.commit_transaction(30)
    produce(broker.bootstrap, topic, plain_rows(START_MS + 50, "plain", 2))
    return topic


def make_compacted(broker: Broker) -> str:
    """Gaps in batches, whole batches gone, an empty batch kept for its producer, tombstones."""
    topic = "compacted"
    cleaning = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.01}
    settings = {**ROLLED_DAILY, **cleaning, "internal.segment.bytes": 1500}
    broker.create_topic(topic, {**settings, "file.delete.delay.ms": 1})
    idempotent = producer(broker.bootstrap, enable_idempotence=True)
    superseded = [Row(timestamp=START_MS + i, key=b"%d" % i, value=b"old") for i in range(10)]
    send(idempotent, topic, superseded)
    for day in range(1, 6):
        now = START_MS + day * DAY_MS
        value = f"day {day} ".encode() * 4
        rows = [
            Row(timestamp=now + i, key=b"%d" % i, value=value, headers=(("day", b"%d" % day),))
            for i in range(0, 30, day)
        ]
        rows.append(Row(timestamp=now, key=b"%d" % (day * 3)))  # a tombstone
        codec = CODECS[day % len(CODECS)]
        produce(broker.bootstrap, topic, rows[: len(rows) // 2], compression_type=codec)
        produce(broker.bootstrap, topic, rows[len(rows) // 2 :], compression_type="none")
    active = max(base_offsets(broker.partition_dir(topic)))
    checkpoint = broker.log_dir / "cleaner-offset-checkpoint"
    cleaned = f"{topic} 0 {active}"
    await_true("the cleaner", lambda: checkpoint.exists() and cleaned in checkpoint.read_text())
    await_settled(broker.partition_dir(topic))
    return topic


def make_trimmed(broker: Broker) -> str:
    """The first two segments deleted: the log starts at an offset other than 0."""
    topic = "trimmed"
    broker.create_topic(topic, {**ROLLED_DAILY, "file.delete.delay.ms": 1})
    for day in range(4):
        rows = plain_rows(START_MS + day * DAY_MS, f"day {day}", 6)
        produce(broker.bootstrap, topic, rows, compression_type="gzip")
    start = base_offsets(broker.partition_dir(topic))[2]
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for done in admin.delete_records([TopicPartition(topic, 0, start)]).values():
        done.result(30)
    directory = broker.partition_dir(topic)
    await_true("retention", lambda: base_offsets(directory)[0] == start)
    await_settled(directory)
    return topic


def make_unclean(broker: Broker) -> str:
    """For a broker that will be killed: index files end in zeros, nothing is trimmed."""
    topic = "unclean"
    broker.create_topic(topic, {**ROLLED_DAILY, "segment.index.bytes": 480})
    for day in range(3):
        now = START_MS + day * DAY_MS
        for part in range(3):
            produce(broker.bootstrap, topic, awkward_rows(now + part, f"day {day}.{part}"))
    return topic


def base_offsets(directory: Path) -> list[int]:
    return sorted(int(file.stem) for file in directory.glob("*.log"))


def await_true(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + POLL_TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not finish in {POLL_TIMEOUT:.0f} s")
        time.sleep(0.05)


def await_settled(directory: Path) -> None:
    passing = (".deleted", ".cleaned", ".swap")
    await_true("cleaning up", lambda: not any(f.suffix in passing for f in directory.iterdir()))


def read_expected(broker: Broker, topic: str) -> Expected:
    everything = read_all(broker.bootstrap, topic)
    committed = {
        row.offset for row in read_all(broker.bootstrap, topic, isolation="read_committed")
    }
    offsets = offset_range(broker.bootstrap, topic)
    markers = dump_log(broker.partition_dir(topic).glob("*.log"), allow_gaps=True)
    control = re.findall(r"^\| offset: (\d+) .*endTxnMarker: ", markers, flags=re.MULTILINE)
    return Expected(
        topic=topic,
        start_offset=offsets.start,
        end_offset=offsets.stop,
        control=frozenset(map(int, control)),
        aborted=frozenset(row.offset for row in everything) - committed,
        rows=everything,
    )


def store(broker: Broker, expected: Expected) -> None:
    """Copy the partition directory of a stopped broker to golden/<topic>/<topic>-0."""
    assert not broker.running
    case = GOLDEN / expected.topic
    shutil.rmtree(case, ignore_errors=True)
    source = broker.partition_dir(expected.topic)
    shutil.copytree(source, case / source.name)
    save_expected(case / "expected.json", expected, kafka=VERSION)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        broker = Broker(scratch, BROKER)
        with broker:
            topics = [make_codec(broker, codec) for codec in CODECS]
            topics += [make_log_append_time(broker), make_transactional(broker)]
            topics += [make_compacted(broker), make_trimmed(broker)]
            make_idempotent(broker)
            found = [read_expected(broker, topic) for topic in topics]
        for expected in found:
            store(broker, expected)
        with broker:
            idempotent = read_expected(broker, make_idempotent(broker))
        store(broker, idempotent)
        with broker:
            unclean = read_expected(broker, make_unclean(broker))
            broker.kill()
        store(broker, unclean)
    for expected in [*found, idempotent, unclean]:
        bases = base_offsets(GOLDEN / expected.topic / f"{expected.topic}-0")
        print(f"{expected.topic}: {len(expected.rows)} records in segments {bases}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
