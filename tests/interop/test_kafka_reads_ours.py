"""Kafka's own tools accept all that logstore writes: every codec, every history of a log.

Each case builds a partition directory and returns its rows.  Kafka's dumper then decodes every
batch, checks every CRC and compares every index entry with the log.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from logstore import Partition, PartitionConfig, Record

from .dumped import DumpedBatch, Printed, batches_of, parse_dump
from .kafka import dump_log, require_kafka
from .rows import Row, row_of

pytestmark = pytest.mark.interop

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
START_MS = 1_700_000_000_000
SMALL_SEGMENTS = PartitionConfig(segment_bytes=1 << 14, index_interval_bytes=512)


@pytest.fixture(autouse=True)
def kafka() -> None:
    require_kafka()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "orders-0"


def printable_rows(count: int, start: int = 0) -> list[Row]:
    """Rows with consecutive offsets from `start`, of every printable kind."""
    return [_printable_row(offset) for offset in range(start, start + count)]


def _printable_row(offset: int) -> Row:
    text = hashlib.sha256(b"%d" % offset).hexdigest()  # does not compress well: segments do roll
    row = Row(
        offset=offset,
        timestamp=START_MS + offset * 10 - (offset % 3) * 25,  # not in order
        key=b"key %d" % (offset % 50),
        value=text.encode(),
    )
    headers = (("h", b"1"), ("h", None), ("ключ", b""), ("", b"\x00\xff"))
    variants = {
        3: replace(row, key=None),
        4: replace(row, value=None),
        5: replace(row, key=b"", value=b""),
        6: replace(row, headers=headers),
        7: replace(row, value="värde 🔑".encode(), headers=headers[:1]),
    }
    return variants.get(offset % 10, row)


def records(rows: Iterable[Row]) -> list[Record]:
    return [
        Record(row.value, key=row.key, headers=row.headers, timestamp=row.timestamp) for row in rows
    ]


def write(log: Partition, rows: Iterable[Row], compression: str = "none") -> None:
    with log.writer(compression=compression, batch_bytes=2048) as out:
        for row in rows:
            out.append(row.value, key=row.key, headers=row.headers, timestamp=row.timestamp)


def assert_kafka_sees(written: Mapping[Path, Iterable[Row]]) -> dict[Path, list[DumpedBatch]]:
    """Run every check the dumper has; each directory must hold exactly its rows.

    Returns the batches of each.  One call for many directories: it starts two JVMs.
    """
    dump_log(written, verify_index=True, print_data=False, allow_gaps=True)
    dump = parse_dump(dump_log(written, index_sanity=True, allow_gaps=True))
    for path, batches in dump.items():
        ends = [batch.position + batch.size for batch in batches]
        assert [batch.position for batch in batches] == [0, *ends[:-1]][: len(batches)]
        assert path.stat().st_size == (ends[-1] if ends else 0)
    found = {directory: list(batches_of(dump, directory)) for directory in written}
    for directory, rows in written.items():
        batches = found[directory]
        assert segment_count(directory) > 0, f"no .log file in {directory}"
        assert all(left.last_offset < right.base_offset for left, right in pairwise(batches))
        printed = [record for batch in batches for record in batch.records]
        assert printed == [Printed.of(row) for row in rows], f"in {directory}"
    return found


def segment_count(directory: Path) -> int:
    return len(list(directory.glob("*.log")))


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_is_decoded(directory: Path, codec: str) -> None:
    rows = printable_rows(1500)
    rows[40] = replace(rows[40], value=b"longer than any block of a codec. " * 5000)
    config = replace(SMALL_SEGMENTS, segment_bytes=1 << 18)  # the long record fits uncompressed
    with Partition.open(directory, config=config) as log:
        write(log, rows, codec)
        log.roll()
        rows += printable_rows(100, start=len(rows))
        write(log, rows[1500:], codec)
    batches = assert_kafka_sees({directory: rows})[directory]
    assert {batch.codec for batch in batches} == {codec}
    assert segment_count(directory) >= 2
    assert any(path.stat().st_size for path in directory.glob("*.index")), "no index entry at all"


def test_codecs_may_change_within_a_log(directory: Path) -> None:
    with Partition.open(directory) as log:
        for number, codec in enumerate(CODECS):
            write(log, printable_rows(60, start=60 * number), codec)
    batches = assert_kafka_sees({directory: printable_rows(300)})[directory]
    assert {batch.codec for batch in batches} == set(CODECS)


def test_single_appends_and_lists_are_decoded(directory: Path) -> None:
    rows = printable_rows(60)
    with Partition.open(directory) as log:
        for row in rows[:20]:
            log.append(row.value, key=row.key, headers=row.headers, timestamp=row.timestamp)
        log.extend(records(rows[20:]))
    assert_kafka_sees({directory: rows})


def test_log_append_time_is_marked_and_rules(directory: Path) -> None:
    config = PartitionConfig(message_timestamp_type="LogAppendTime")
    with Partition.open(directory, config=config) as log:
        log.extend(records(printable_rows(20)))
        write(log, printable_rows(20, start=20), "lz4")
        shown = [row_of(record) for record in log.scan()]
    assert all(row.timestamp > START_MS + 1_000_000 for row in shown), "the client's time was kept"
    batches = assert_kafka_sees({directory: shown})[directory]
    assert {batch.timestamp_type for batch in batches} == {"LogAppendTime"}


def test_an_empty_log_is_accepted(directory: Path) -> None:
    Partition.open(directory).close()
    assert_kafka_sees({directory: []})


def test_rolled_and_reopened_logs_are_accepted(directory: Path) -> None:
    for start in range(0, 500, 100):
        with Partition.open(directory, config=SMALL_SEGMENTS) as log:
            log.extend(records(printable_rows(50, start=start)))
            log.roll()
            write(log, printable_rows(50, start=start + 50))
    assert_kafka_sees({directory: printable_rows(500)})
    assert segment_count(directory) >= 5


def test_a_log_that_ends_in_an_empty_segment_is_accepted(directory: Path) -> None:
    with Partition.open(directory) as log:
        log.extend(records(printable_rows(30)))
        log.roll()
    assert_kafka_sees({directory: printable_rows(30)})


@pytest.mark.parametrize("reopened", [False, True], ids=["at-once", "after-reopening"])
def test_truncated_logs_are_accepted_then_and_after_more_appends(
    tmp_path: Path, reopened: bool
) -> None:
    written: dict[Path, list[Row]] = {}
    for keep in (0, 50, 100, 150, 250):
        directory = tmp_path / f"{keep}-kept" / "orders-0"
        with Partition.open(directory, config=SMALL_SEGMENTS) as log:
            for start in range(0, 300, 50):
                log.extend(records(printable_rows(50, start=start)))
                if start == 100:
                    log.roll()
            if not reopened:
                log.truncate(keep)
        if reopened:
            with Partition.open(directory, config=SMALL_SEGMENTS) as log:
                log.truncate(keep)
        written[directory] = printable_rows(keep)
        longer = tmp_path / f"{keep}-kept-and-more" / "orders-0"
        shutil.copytree(directory, longer)
        with Partition.open(longer, config=SMALL_SEGMENTS) as log:
            log.extend(records(printable_rows(50, start=keep)))
        written[longer] = printable_rows(keep + 50)
    assert_kafka_sees(written)


def test_a_log_truncated_inside_a_batch_is_accepted(directory: Path) -> None:
    with Partition.open(directory) as log:
        for start in (0, 50, 100):
            log.extend(records(printable_rows(50, start=start)))
        log.truncate(75)
        assert log.end_offset == 75
        log.extend(records(printable_rows(10, start=75)))
        shown = [row_of(record) for record in log.scan()]
    rows = printable_rows(85)
    assert shown[:50] == rows[:50] and shown[-10:] == rows[75:], "only that batch may lose records"
    assert_kafka_sees({directory: shown})


def _cut(count: int) -> Callable[[Path], None]:
    def cut(directory: Path) -> None:
        log = max(directory.glob("*.log"))
        log.write_bytes(log.read_bytes()[:-count])

    return cut


def _zero_tail(directory: Path) -> None:
    with max(directory.glob("*.log")).open("ab") as log:
        log.write(bytes(4096))


def _half_written_batch(directory: Path) -> None:
    log = max(directory.glob("*.log"))
    first = min(directory.glob("*.log")).read_bytes()
    log.write_bytes(log.read_bytes() + first[:100])


def _empty_indexes(directory: Path) -> None:
    for suffix in ("index", "timeindex"):
        max(directory.glob(f"*.{suffix}")).write_bytes(b"")


def _zero_filled_indexes(directory: Path) -> None:
    for suffix, width in (("index", 8), ("timeindex", 12)):
        with max(directory.glob(f"*.{suffix}")).open("ab") as index:
            index.write(bytes(width * 100))


def _indexes_ahead_of_the_log(directory: Path) -> None:
    log = max(directory.glob("*.log"))
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])


CRASHES: dict[str, Callable[[Path], None]] = {
    "nothing-lost": lambda directory: None,
    "one-byte-cut": _cut(1),
    "a-header-cut": _cut(700),
    "tail-of-zeros": _zero_tail,
    "half-a-batch": _half_written_batch,
    "indexes-empty": _empty_indexes,
    "indexes-zero-filled": _zero_filled_indexes,
    "indexes-ahead": _indexes_ahead_of_the_log,
}


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_logs_recovered_from_crashes_are_accepted_then_and_after_more_appends(
    directory: Path, tmp_path: Path, codec: str
) -> None:
    rows = printable_rows(700)
    config = replace(SMALL_SEGMENTS, segment_bytes=1 << 18)
    with Partition.open(directory, config=config, durability="os") as log:
        write(log, rows[:300], codec)
        log.roll()
        write(log, rows[300:], codec)
        for crash, damage in CRASHES.items():
            damage(Path(shutil.copytree(directory, tmp_path / crash / directory.name)))

    written: dict[Path, list[Row]] = {}
    for crash in CRASHES:
        crashed = tmp_path / crash / directory.name
        with Partition.open(crashed, config=config) as log:
            survivors = [row_of(record) for record in log.scan()]
            assert log.end_offset == len(survivors), crash
        assert survivors == rows[: len(survivors)], crash
        assert len(survivors) >= 300, f"{crash}: the sealed segment lost records"
        written[crashed] = survivors
        longer = tmp_path / f"{crash}-and-more" / directory.name
        shutil.copytree(crashed, longer)
        with Partition.open(longer, config=config) as log:
            write(log, printable_rows(20, start=len(survivors)), codec)
        written[longer] = printable_rows(len(survivors) + 20)
    assert_kafka_sees(written)
    lossless = ("nothing-lost", "tail-of-zeros", "half-a-batch", "indexes-empty")
    assert all(len(written[tmp_path / crash / directory.name]) == 700 for crash in lossless)
