"""Kafka's own tools accept what compaction leaves: gaps, emptied batches, horizons, indexes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from logstore import Compactor, ManualClock, Partition, PartitionConfig
from logstore.testing import ReferenceRecord, encode_batch

from .kafka import require_kafka
from .rows import Row
from .test_kafka_reads_ours import (
    CODECS,
    START_MS,
    assert_kafka_sees,
    printable_rows,
    segment_count,
    write,
)

pytestmark = pytest.mark.interop

SETTINGS = PartitionConfig(segment_bytes=1 << 14, index_interval_bytes=512, delete_retention_ms=60)


@pytest.fixture(autouse=True)
def kafka() -> None:
    require_kafka()


def newest(rows: Iterable[Row]) -> list[Row]:
    """What is left of rows that were all compacted: the newest of every key, none without one."""
    by_key = {row.key: row for row in rows if row.key is not None}
    return sorted(by_key.values(), key=lambda row: row.offset)


def test_compacted_segments_pass_every_check_of_the_dumper(tmp_path: Path) -> None:
    written: dict[Path, list[Row]] = {}
    for codec in CODECS:
        clock = ManualClock(START_MS)
        directory = tmp_path / codec / "orders-0"
        with Partition.open(directory, config=SETTINGS, clock=clock) as log:
            rows = printable_rows(1500)
            write(log, rows, codec)
            log.roll()
            Compactor(log).run()
            more = printable_rows(700, start=1500)
            write(log, more, codec)
            log.roll()
            clock.advance(30)
            # A small map: several passes, and segments merged between them.
            report = Compactor(log, memory_bytes=24 * 30, min_cleanable_dirty_ratio=0).run()
            assert report.passes > 1
            left = newest(rows + more)
            last = printable_rows(20, start=2200)
            write(log, last, codec)
            assert [record.offset for record in log] == [row.offset for row in left + last]
            before = segment_count(directory)
            log.check()
        written[directory] = left + last
        assert before > 1
    batches = assert_kafka_sees(written)
    for codec, directory in zip(CODECS, written, strict=True):
        assert {batch.codec for batch in batches[directory]} <= {codec, "none"}
        assert any(batch.last_offset - batch.base_offset >= len(batch.records)
                   for batch in batches[directory])  # fmt: skip


def test_tombstones_gone_and_emptied_batches_pass_the_dumper(tmp_path: Path) -> None:
    directory = tmp_path / "orders-0"
    clock = ManualClock(START_MS)
    with Partition.open(directory, config=SETTINGS, clock=clock) as log:
        rows = printable_rows(300)
        write(log, rows)
        log.roll()
        Compactor(log).run()
        clock.advance(61)
        write(log, (row for row in printable_rows(1, start=300)))
        log.roll()
        assert Compactor(log, min_cleanable_dirty_ratio=0).run().tombstones_dropped > 0
        left = [row for row in newest([*rows, *printable_rows(1, start=300)]) if row.value]
        assert Compactor(log).purge(b"key 7").purged == 1
        left = [row for row in left if row.key != b"key 7"]
        empty_key = [row for row in newest(rows) if row.value == b""]
        left = sorted({*left, *empty_key}, key=lambda row: row.offset)
    assert_kafka_sees({directory: left})


def test_an_emptied_batch_of_a_producer_passes_the_dumper(tmp_path: Path) -> None:
    directory = tmp_path / "orders-0"
    directory.mkdir()
    superseded = encode_batch(
        # Older: an entry of the time index that leads to a batch without records is what Kafka's
        # own cleaner writes as well, and what its dumper then complains about.
        [ReferenceRecord(b"old", b"k", (), START_MS - 1)],
        producer_id=3,
        producer_epoch=0,
        base_sequence=7,
    )
    (directory / f"{0:020d}.log").write_bytes(superseded)
    with Partition.open(directory, clock=ManualClock(START_MS)) as log:
        assert log.append(b"new", key=b"k") == 1
        log.roll()
        Compactor(log).run()
        assert log.parts.rewriter.producer_ends() == [(3, 0, 0)]
    rows = [Row(offset=1, timestamp=START_MS, key=b"k", value=b"new")]
    batches = assert_kafka_sees({directory: rows})
    assert [len(batch.records) for batch in batches[directory]] == [0, 1]
    assert batches[directory][0].size == 61
