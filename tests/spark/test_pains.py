"""Problems that users of Kafka sources for Spark report: each test shows that this one is free."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import max as max_
from pyspark.sql.functions import min as min_
from pyspark.sql.functions import spark_partition_id
from pyspark_logstore.offsets import DataLossError
from pyspark_logstore.options import SourceOptions
from pyspark_logstore.schema import source_schema
from pyspark_logstore.stream import StreamReader

import logstore
from logstore import Compactor, Partition, Record, Store
from tests.spark import direct
from tests.spark.collected import Collected, offset_in
from tests.spark.counting import CountingSource, counted

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def stream(store: Store, **options: Any) -> StreamReader:
    given = {"path": str(store.path), "subscribe": "orders", "startingOffsets": "earliest"}
    parsed = SourceOptions.parse({**given, **options}, streaming=True)
    return StreamReader(parsed, source_schema(parsed))


def load(spark: SparkSession, store: Store, **options: Any) -> DataFrame:
    given = {"subscribe": "orders", **options}
    return spark.read.format("logstore").options(**given).load(str(store.path))


def follow(spark: SparkSession, store: Store, **options: Any) -> DataFrame:
    given = {"subscribe": "orders", "startingOffsets": "earliest", **options}
    return spark.readStream.format("logstore").options(**given).load(str(store.path))


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


def test_gaps_are_normal_and_count_counts_records(spark: SparkSession, tmp_path: Path) -> None:
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


def test_losing_data_never_repeats_any(
    spark: SparkSession, store: Store, collected: Collected
) -> None:
    """And how much was lost is in the progress of the query, by partition."""
    log = make_orders(store, 40)
    collected.run(follow(spark, store, failOnDataLoss="false"))
    assert collected.rows == [(0, offset) for offset in range(40)]
    log.extend([b"more"] * 60)
    log.trim(60)
    progress = collected.run(follow(spark, store, failOnDataLoss="false"))
    there = [*range(40), *range(60, 100)]
    assert collected.rows == [(0, offset) for offset in there], "nothing below 40 again"
    batch = next(each for each in progress if each["numInputRows"])
    assert offset_in(batch["sources"][0]["latestOffset"])["@lost"] == {"orders-0": 20}


def test_what_a_deleted_topic_takes_along_is_in_the_progress(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    make_orders(store, 40)
    store.create_topic("other").append(b"stays")
    options = {"subscribe": "orders,other", "maxOffsetsPerTrigger": "11"}
    reader = stream(store, failOnDataLoss="false", **options)
    first = reader.latestOffset(reader.initialOffset())
    read = first["orders"]["0"]
    assert 0 < read < 40
    store.delete_topic("orders")
    for _ in range(2):  # it is counted once
        assert reader.latestOffset(first)["orders"] == {"0": read}
        assert reader.reportLatestOffset()["@lost"] == {"orders-0": 40 - read}
    assert caplog.text.count("orders-0 of") == 1, "and logged once, not with every look"
    reader.stop()


def test_what_is_wholly_lost_is_not_read_from_the_earliest(store: Store) -> None:
    log = make_orders(store, 100)
    reader = stream(store, failOnDataLoss="false")
    start = reader.initialOffset()
    middle = {**start, "orders": {"0": 40}}
    assert "@lost" not in reader.reportLatestOffset()
    log.trim(60)
    wholly_lost = {**start, "orders": {"0": 50}}
    for _ in range(2):  # planned again after a failure, it was not lost twice
        assert rows_between(reader, middle, wholly_lost) == []
        assert reader.reportLatestOffset()["@lost"] == {"orders-0": 10}
    reader.stop()


def test_data_loss_says_what_was_lost(spark: SparkSession, store: Store) -> None:
    log = make_orders(store, 100)
    log.trim(60)
    said = (
        r"orders-0: offsets 40 to 59 \(20 of them\) are gone: the log starts at 60 "
        r"\(expected \[40, 100\), there is \[60, 100\); its directory last changed at 20..-.*"
        r"set failOnDataLoss to false"
    )
    with pytest.raises(PySparkException, match=said):
        load(spark, store, startingOffsets='{"orders":{"0":40}}').count()
    beyond = r"orders-0: offset 400 was asked for, but the log ends at 100: it was cut, or"
    with pytest.raises(PySparkException, match=beyond):
        load(spark, store, startingOffsets='{"orders":{"0":400}}').count()


def test_a_task_finds_out_that_its_records_were_deleted(store: Store) -> None:
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


def test_a_topic_made_again_is_another_topic(
    spark: SparkSession, store: Store, collected: Collected
) -> None:
    make_orders(store, 10)
    collected.run(follow(spark, store))
    store.delete_topic("orders")
    make_orders(store, 50)
    said = r"deleted and made again.*a new checkpoint location"
    with pytest.raises(PySparkException, match=said):
        collected.run(follow(spark, store, failOnDataLoss="false"))
    assert collected.rows == [(0, offset) for offset in range(10)]


def test_an_empty_answer_is_no_sign_of_new_partitions(
    spark: SparkSession, store: Store, collected: Collected, tmp_path: Path
) -> None:
    """The directory is gone for a moment, as when a file system is not mounted."""
    make_orders(store, 10, partitions=2)
    store.close()
    collected.run(follow(spark, store))
    before = collected.rows
    away = tmp_path / "away"
    for forgiving in ("true", "false"):
        store.path.rename(away)
        store.path.mkdir()
        with pytest.raises(PySparkException, match=r"none of the partitions .* is it mounted"):
            collected.run(follow(spark, store, failOnDataLoss=forgiving))
        store.path.rmdir()
        away.rename(store.path)
    collected.run(follow(spark, store))
    assert collected.rows == before, "what is back is not new"


def test_new_partitions_start_at_the_earliest_and_missing_ones_fail(store: Store) -> None:
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


def test_a_topic_that_is_gone_fails_or_is_left_where_it_was(store: Store) -> None:
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
def test_maps_match_the_partitions_exactly(
    option: str, offsets: str, said: str, spark: SparkSession, store: Store
) -> None:
    make_orders(store, 10, partitions=2)
    with pytest.raises(PySparkException, match=said):
        load(spark, store, **{option: offsets}).count()


def test_offsets_below_minus_two_are_refused(spark: SparkSession, store: Store) -> None:
    make_orders(store)
    with pytest.raises(PySparkException, match="orders-0 has offset -3"):
        load(spark, store, startingOffsets='{"orders":{"0":-3}}').count()


def test_a_time_that_no_record_reaches_is_an_error_or_the_end(
    spark: SparkSession, store: Store
) -> None:
    make_orders(store, 10)
    with pytest.raises(PySparkException, match="orders-0 has no record at or after 1010 ms"):
        load(spark, store, startingTimestamp=1010).count()
    latest = {"startingOffsetsByTimestampStrategy": "latest"}
    assert load(spark, store, startingTimestamp=1010, **latest).count() == 0
    assert load(spark, store, endingTimestamp=1010).count() == 10


def test_ranges_to_earliest_and_latest_are_split_too(spark: SparkSession, store: Store) -> None:
    make_orders(store, 100)
    frame = load(
        spark,
        store,
        startingOffsets='{"orders":{"0":-2}}',
        endingOffsets='{"orders":{"0":-1}}',
        maxRecordsPerPartition=30,
    )
    tasks = frame.groupBy(spark_partition_id()).agg(min_("offset"), max_("offset")).collect()
    found = sorted((first, last) for _, first, last in tasks)
    assert found == [(0, 24), (25, 49), (50, 74), (75, 99)]


def test_headers_keep_nulls_duplicates_and_order(spark: SparkSession, tmp_path: Path) -> None:
    headers = [("b", b"1"), ("a", None), ("b", b""), ("a", b"\xff"), ("ключ", b"x")]
    with Partition.open(tmp_path / "t-0", durability="os") as log:
        log.extend([Record(b"v", headers=headers), Record(b"w"), Record(b"x", headers=headers[:1])])
    frame = spark.read.format("logstore").option("includeHeaders", "true")
    rows = frame.load(str(tmp_path / "t-0")).orderBy("offset").select("headers").collect()
    found = [
        None if row.headers is None else [(h.key, h.value and bytes(h.value)) for h in row.headers]
        for row in rows
    ]
    assert found[1] is None
    assert found[0] == [(name, value) for name, value in headers]
    assert found[2] == headers[:1]


def test_a_skewed_partition_is_split_by_its_bytes(spark: SparkSession, store: Store) -> None:
    topic = store.create_topic("orders", partitions=2)
    for _ in range(100):
        topic[0].extend([b"x" * 10_000] * 10)
        topic[1].extend([b"x"] * 10)
    frame = load(spark, store, minPartitions=10).groupBy("partition", spark_partition_id()).count()
    tasks = [row.partition for row in frame.collect()]
    assert tasks.count(1) == 1 and tasks.count(0) >= 9, "both have 1,000 records"


def test_a_task_that_cannot_see_the_path_says_so(
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


def test_planning_reads_no_record(spark: SparkSession, tmp_path: Path) -> None:
    """By the kernel's count, in the process that plans."""
    with logstore.open(tmp_path / "store", durability="os") as store:
        topic = store.create_topic("orders", partitions=4, config={"segment.bytes": 1 << 20})
        for number in range(4):
            for _ in range(50):
                topic[number].extend([b"x" * 10_000] * 10)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    logs = sum(path.stat().st_size for path in files if path.suffix == ".log")
    others = sum(path.stat().st_size for path in files if path.suffix != ".log")
    assert logs > 20_000_000
    spark.dataSource.register(CountingSource)
    (tmp_path / "counts").mkdir()
    options = {"subscribe": "orders", "minPartitions": 50, "counts": str(tmp_path / "counts")}
    frame = spark.read.format("logstore_counting").options(**options).load(str(tmp_path / "store"))
    assert frame.rdd.getNumPartitions() >= 50
    read = counted(tmp_path / "counts")
    assert 0 < read["plan"] < 4 * others + 100_000, "indexes and names, perhaps twice"
    assert read["task"] == 0
    splits = direct.splits(tmp_path / "store", subscribe="orders")
    assert os.path.isabs(splits[0].path)
