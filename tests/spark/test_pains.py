"""Fourteen things that hurt users of Kafka sources, each with the test that it does not here."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore[spark]"')

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark_logstore.offsets import DataLossError
from pyspark_logstore.options import OptionError, SourceOptions
from pyspark_logstore.schema import source_schema
from pyspark_logstore.stream import StreamReader

import logstore
from logstore import Compactor, Partition, Record, Store
from tests.spark import direct
from tests.spark.counting import bytes_read

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def stream(store: Store, **options: Any) -> StreamReader:
    given = {"path": str(store.path), "subscribe": "orders", "startingOffsets": "earliest"}
    parsed = SourceOptions.parse({**given, **options}, streaming=True)
    return StreamReader(parsed, source_schema(parsed))


def rows_between(reader: StreamReader, start: Any, end: Any) -> list[int]:
    return [
        offset
        for split in reader.partitions(start, end)
        for batch in reader.read(split)
        for offset in batch.column("offset").to_pylist()
    ]


def make_orders(store: Store, count: int = 10, partitions: int = 1) -> Partition:
    log = store.create_topic("orders", partitions=partitions)[0]
    log.extend(Record(b"%d" % i, key=b"k", timestamp=1000 + i) for i in range(count))
    return log


def test_01_gaps_are_normal_and_count_counts_records(spark: SparkSession, tmp_path: Path) -> None:
    """Holes at the start, in the middle and at the end, a batch that is all hole, markers."""
    log = tmp_path / "t-0"
    with Partition.open(log, durability="os", config={"cleanup.policy": "compact"}) as partition:
        for number in range(40):
            partition.extend(Record(b"%d" % i, key=b"k%d" % (i % 4)) for i in range(5))
            if number % 10 == 9:
                partition.roll()
        Compactor(partition).run()
        left = [record.offset for record in partition]
        assert 0 < len(left) < 200 and left[0] > 0
    frame = spark.read.format("logstore").load(str(log))
    assert frame.count() == len(left)
    for start in range(0, 200, 37):
        for end in range(start, 200, 41):
            found = direct.offsets(
                log,
                startingOffsets=f'{{"t":{{"0":{start}}}}}',
                endingOffsets=f'{{"t":{{"0":{end}}}}}',
                maxRecordsPerPartition=3,
            )
            assert found == [offset for offset in left if start <= offset < end]
    transactional = GOLDEN / "transactional" / "transactional-0"
    assert len(direct.offsets(transactional)) == 21, "four markers of 25 offsets"
    committed = direct.offsets(transactional, isolationLevel="read_committed")
    assert len(committed) == 13, "and eight that were aborted"


def test_02_losing_data_never_repeats_any(store: Store) -> None:
    log = make_orders(store, 100)
    reader = stream(store, failOnDataLoss="false")
    start = reader.initialOffset()
    middle = {**start, "orders": {"0": 40}}
    assert rows_between(reader, start, middle) == list(range(40))
    log.trim(60)
    end = reader.latestOffset(middle)
    assert end["orders"] == {"0": 100}
    assert rows_between(reader, middle, end) == list(range(60, 100)), "nothing below 40 again"
    wholly_lost = {**start, "orders": {"0": 50}}
    assert rows_between(reader, middle, wholly_lost) == [], "not reset to the earliest"
    reader.stop()


def test_03_data_loss_says_what_was_lost(store: Store) -> None:
    log = make_orders(store, 100)
    log.trim(60)
    said = (
        r"orders-0: offsets 40 to 59 \(20 of them\) are gone: the log starts at 60 "
        r"\(expected \[40, 100\), there is \[60, 100\); its directory last changed at 20..-.*"
        r"set failOnDataLoss to false"
    )
    with pytest.raises(DataLossError, match=said):
        direct.splits(store.path, subscribe="orders", startingOffsets='{"orders":{"0":40}}')
    beyond = r"orders-0: offset 400 was asked for, but the log ends at 100: it was cut, or"
    with pytest.raises(DataLossError, match=beyond):
        direct.splits(store.path, subscribe="orders", startingOffsets='{"orders":{"0":400}}')


def test_03_a_task_finds_out_that_its_records_were_deleted(store: Store) -> None:
    log = make_orders(store, 100)
    for forgiving in ("true", "false"):
        made = direct.reader(store.path, subscribe="orders", failOnDataLoss=forgiving)
        (split,) = made.partitions()
        log.trim(log.start_offset + 10)
        if forgiving == "true":
            with pytest.raises(DataLossError, match=r"offsets 0 to 9 \(10 of them\) are gone"):
                list(made.read(split))
        else:
            (batch,) = made.read(split)
            assert batch.column("offset").to_pylist() == list(range(20, 100))


def test_04_a_topic_made_again_is_another_topic(store: Store) -> None:
    make_orders(store, 10)
    reader = stream(store, failOnDataLoss="false")
    end = reader.latestOffset(reader.initialOffset())
    store.delete_topic("orders")
    make_orders(store, 50)
    with pytest.raises(DataLossError, match=r"deleted and made again.*a new checkpoint location"):
        reader.latestOffset(end)
    reader.stop()


def test_05_an_empty_answer_is_no_sign_of_new_partitions(store: Store, tmp_path: Path) -> None:
    """The directory is gone for a moment, as when a file system is not mounted."""
    make_orders(store, 10, partitions=2)
    reader = stream(store)
    end = reader.latestOffset(reader.initialOffset())
    store.close()
    away = tmp_path / "away"
    for forgiving in ("true", "false"):
        reader.stop()
        reader = stream(store, failOnDataLoss=forgiving)
        store.path.rename(away)
        store.path.mkdir()
        with pytest.raises(DataLossError, match=r"none of the partitions .* is it mounted"):
            reader.latestOffset(end)
        reader.stop()
        store.path.rmdir()
        away.rename(store.path)
        reader = stream(store, failOnDataLoss=forgiving)
        assert reader.latestOffset(end) == end, "what is back is not new"
    reader.stop()


def test_06_new_partitions_start_at_the_earliest_and_missing_ones_fail(store: Store) -> None:
    make_orders(store, 10, partitions=2)
    reader = stream(store, startingOffsets="latest")
    start = reader.initialOffset()
    store["orders"].add_partitions(1)
    store["orders"][2].extend([b"new", b"newer"])
    reader.prepareForTriggerAvailableNow()
    end = reader.latestOffset(start)
    assert end["orders"] == {"0": 10, "1": 0, "2": 2}
    assert rows_between(reader, start, end) == [0, 1]
    store["orders"].add_partitions(1)
    store["orders"][3].append(b"too late for a query that ends")
    assert reader.latestOffset(end) == end
    reader.stop()
    store.close()
    shutil.rmtree(store.path / "orders-1")
    reader = stream(store)
    with pytest.raises(FileNotFoundError, match="this partition's directory is gone"):
        reader.latestOffset(end)
    reader.stop()


def test_06_a_topic_that_is_gone_fails_or_is_left_where_it_was(store: Store) -> None:
    make_orders(store, 10)
    store.create_topic("payments", partitions=1)[0].extend([b"a", b"b"])
    both = {"subscribe": "orders,payments"}
    reader = stream(store, **both)
    end = reader.latestOffset(reader.initialOffset())
    store.delete_topic("payments")
    store["orders"][0].append(b"one more")
    with pytest.raises(DataLossError, match=r"payments-0 of .* are gone\. Bring them back, or"):
        reader.latestOffset(end)
    reader.stop()
    reader = stream(store, failOnDataLoss="false", **both)
    later = reader.latestOffset(end)
    assert later["orders"] == {"0": 11} and later["payments"] == {"0": 2}, "not new when it is back"
    assert rows_between(reader, end, later) == [10]
    assert reader.reportLatestOffset()["orders"] == {"0": 11}
    reader.stop()


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ('{"orders":{"0":1}}', "names no offset for orders-1"),
        ('{"orders":{"0":1,"1":1,"2":1}}', "names orders-2, which is not read"),
        ('{"orders":{"0":1,"1":1},"ordres":{"0":1}}', "names ordres-0, which is not read"),
    ],
)
@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsetsByTimestamp"])
def test_07_maps_match_the_partitions_exactly(
    option: str, offsets: str, said: str, store: Store
) -> None:
    make_orders(store, 10, partitions=2)
    with pytest.raises(OptionError, match=said):
        direct.splits(store.path, subscribe="orders", **{option: offsets})


def test_08_offsets_below_minus_two_are_refused(store: Store) -> None:
    make_orders(store)
    with pytest.raises(OptionError, match="orders-0 has offset -3"):
        direct.splits(store.path, subscribe="orders", startingOffsets='{"orders":{"0":-3}}')


def test_09_a_time_that_no_record_reaches_is_an_error_or_the_end(store: Store) -> None:
    make_orders(store, 10)
    options = {"subscribe": "orders", "startingTimestamp": 1010}
    with pytest.raises(OptionError, match="orders-0 has no record at or after 1010 ms"):
        direct.splits(store.path, **options)
    options["startingOffsetsByTimestampStrategy"] = "latest"
    assert direct.splits(store.path, **options) == []
    assert direct.offsets(store.path, subscribe="orders", endingTimestamp=1010) == [*range(10)]


def test_10_ranges_to_earliest_and_latest_are_split_too(store: Store) -> None:
    make_orders(store, 100)
    options = {
        "subscribe": "orders",
        "startingOffsets": '{"orders":{"0":-2}}',
        "endingOffsets": '{"orders":{"0":-1}}',
    }
    splits = direct.splits(store.path, maxRecordsPerPartition=30, **options)
    assert [tuple(split.wanted) for split in splits] == [(0, 25), (25, 50), (50, 75), (75, 100)]


def test_11_headers_keep_nulls_duplicates_and_order(tmp_path: Path) -> None:
    headers = [("b", b"1"), ("a", None), ("b", b""), ("a", b"\xff"), ("ключ", b"x")]
    with Partition.open(tmp_path / "t-0", durability="os") as log:
        log.extend([Record(b"v", headers=headers), Record(b"w"), Record(b"x", headers=headers[:1])])
    found = direct.read(tmp_path / "t-0", includeHeaders="true")["headers"].to_pylist()
    as_dicts = [{"key": name, "value": value} for name, value in headers]
    assert found == [as_dicts, None, as_dicts[:1]]


def test_12_a_skewed_partition_is_split_by_its_bytes(store: Store) -> None:
    topic = store.create_topic("orders", partitions=2)
    for _ in range(100):
        topic[0].extend([b"x" * 10_000] * 10)
        topic[1].extend([b"x"] * 10)
    splits = direct.splits(store.path, subscribe="orders", minPartitions=10)
    tasks = [split.which.number for split in splits]
    assert tasks.count(1) == 1 and tasks.count(0) >= 9, "both have 1,000 records"


def test_13_a_task_that_cannot_see_the_path_says_so(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    make_orders(store)
    frame = spark.read.format("logstore").option("subscribe", "orders").load(str(store.path))
    frame.count()
    made = direct.reader(store.path, subscribe="orders")
    (split,) = made.partitions()
    store.close()
    store.path.rename(tmp_path / "elsewhere")
    said = r"a task on host .* cannot see .*orders-0: the path must be there, under the same name"
    with pytest.raises(FileNotFoundError, match=said):
        list(made.read(split))
    with pytest.raises(PySparkException, match="cannot see"):
        frame.count()


def test_14_planning_reads_no_record(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "store", durability="os") as store:
        topic = store.create_topic("orders", partitions=4, config={"segment.bytes": 1 << 20})
        for number in range(4):
            for _ in range(50):
                topic[number].extend([b"x" * 10_000] * 10)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    logs = sum(path.stat().st_size for path in files if path.suffix == ".log")
    others = sum(path.stat().st_size for path in files if path.suffix != ".log")
    assert logs > 20_000_000
    options = {"subscribe": "orders", "minPartitions": 50}
    direct.splits(tmp_path / "store", **options)  # imports, once
    before = bytes_read()
    splits = direct.splits(tmp_path / "store", **options)
    read = bytes_read() - before
    assert len(splits) >= 50
    assert read < 4 * others + 100_000, "indexes and names, perhaps twice"
    assert os.path.isabs(splits[0].path)
