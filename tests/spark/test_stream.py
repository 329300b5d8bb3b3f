"""spark.readStream.format("logstore"): micro-batches, their limits, restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark_logstore.options import OptionError, SourceOptions
from pyspark_logstore.schema import source_schema
from pyspark_logstore.stream import StreamReader

import logstore
from logstore import Groups, Record, Store
from tests.kit import wait_until
from tests.spark import direct
from tests.spark.collected import Collected, offset_in
from tests.spark.conftest import CONNECTOR

MakeStore = Callable[..., Store]


def fill(store: Store, topic: str, number: int, count: int, size: int = 10) -> None:
    log = store[topic][number]
    first = log.end_offset
    log.extend(Record(b"%d-%d" % (number, first + i) + b"." * size) for i in range(count))


def load(spark: SparkSession, store: Store, **options: Any) -> DataFrame:
    given = {"subscribe": "orders", "startingOffsets": "earliest", **options}
    return spark.readStream.format("logstore").options(**given).load(str(store.path))


def every(*counts: int) -> list[tuple[int, int]]:
    return [(number, i) for number, count in enumerate(counts) for i in range(count)]


# ---- what is read ----


def test_available_now_reads_all_once_and_goes_on_from_there(
    spark: SparkSession, store: Store, collected: Collected
) -> None:
    store.create_topic("orders", partitions=2)
    fill(store, "orders", 0, 5)
    fill(store, "orders", 1, 3)
    collected.run(load(spark, store))
    assert collected.rows == every(5, 3)
    fill(store, "orders", 1, 2)
    progress = collected.run(load(spark, store))
    assert collected.rows == every(5, 5)
    offset = offset_in(progress[-1]["sources"][0]["endOffset"])
    assert offset["orders"] == {"0": 5, "1": 5}, "as Spark's Kafka source writes it"
    assert offset["@ids"] == {"orders": str(store["orders"].id)}


def test_a_stream_starts_at_the_end_by_default_or_where_it_is_told(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    store.create_topic("orders", partitions=2)
    for number in range(2):
        store["orders"][number].extend(Record(b"x", timestamp=1000 + i) for i in range(10))
    for options, wanted in (
        ({"startingOffsets": "latest"}, []),
        ({"startingOffsets": '{"orders":{"0":8,"1":-1}}'}, [(0, 8), (0, 9)]),
        ({"startingTimestamp": "1009"}, [(0, 9), (1, 9)]),
        ({"startingOffsets": "last:1"}, [(0, 9), (1, 9)]),
    ):
        collected = Collected(spark, tmp_path / str(options))
        collected.run(load(spark, store, **options))
        assert collected.rows == wanted, options


def test_new_partitions_are_read_from_their_start(
    spark: SparkSession, store: Store, collected: Collected
) -> None:
    store.create_topic("orders", partitions=1)
    fill(store, "orders", 0, 3)
    collected.run(load(spark, store, startingOffsets="latest"))
    store["orders"].add_partitions(1)
    fill(store, "orders", 1, 4)
    fill(store, "orders", 0, 1)
    collected.run(load(spark, store, startingOffsets="latest"))
    assert collected.rows == [(0, 3), *((1, i) for i in range(4))]


# ---- limits ----


def test_max_offsets_are_shared_in_proportion_to_what_waits(
    spark: SparkSession, store: Store, collected: Collected
) -> None:
    store.create_topic("orders", partitions=3)
    for number, count in enumerate((60, 30, 10)):
        fill(store, "orders", number, count)
    collected.run(load(spark, store, maxOffsetsPerTrigger=20))
    assert [len(batch) for batch in collected.batches if batch] == [20] * 5
    assert Counter(number for number, _ in collected.batches[0]) == {0: 12, 1: 6, 2: 2}
    assert collected.rows == every(60, 30, 10)


def test_max_bytes_bound_a_micro_batch(
    spark: SparkSession, store: Store, collected: Collected
) -> None:
    topic = store.create_topic("orders", partitions=1)
    for _ in range(50):
        fill(store, "orders", 0, 10, size=2000)
    size = sum(segment.size_bytes for segment in topic[0].segments)
    collected.run(load(spark, store, maxBytesPerTrigger=size // 5))
    sizes = [len(batch) for batch in collected.batches if batch]
    assert len(sizes) >= 5 and max(sizes) <= 110, "a tenth more, where the index is coarse"
    assert collected.rows == every(500)


def test_min_offsets_wait_for_more_or_for_the_delay(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    """Without Spark, which would ask at times of its own."""
    store.create_topic("orders", partitions=1)
    fill(store, "orders", 0, 5)
    given = {"path": str(store.path), "subscribe": "orders", "startingOffsets": "earliest"}
    options = SourceOptions.parse(
        {**given, "minOffsetsPerTrigger": "10", "maxTriggerDelay": "1h"}, streaming=True
    )
    reader = StreamReader(options, source_schema(options))
    limit = reader.getDefaultReadLimit()
    start = reader.initialOffset()
    first = reader.latestOffset(start, limit)
    assert first["orders"] == {"0": 5}, "the first one does not wait"
    fill(store, "orders", 0, 9)
    assert reader.latestOffset(first, limit) == first
    fill(store, "orders", 0, 1)
    assert reader.latestOffset(first, limit)["orders"] == {"0": 15}
    fill(store, "orders", 0, 1)
    second = reader.latestOffset(first, limit)
    assert second["orders"] == {"0": 16}
    reader.stop()

    options = SourceOptions.parse(
        {**given, "minOffsetsPerTrigger": "10", "maxTriggerDelay": "1ms"}, streaming=True
    )
    reader = StreamReader(options, source_schema(options))
    after = reader.latestOffset(first, limit)
    assert after["orders"] == {"0": 16}
    fill(store, "orders", 0, 1)
    wait_until(lambda: reader.latestOffset(after, limit) != after, "the delay has passed: it")
    reader.stop()


def test_read_all_available_goes_beyond_the_options(store: Store) -> None:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    store.create_topic("orders", partitions=1)
    fill(store, "orders", 0, 50)
    options = SourceOptions.parse(
        {
            **{"path": str(store.path), "subscribe": "orders", "startingOffsets": "earliest"},
            **{"maxOffsetsPerTrigger": "10", "minOffsetsPerTrigger": "100"},
        },
        streaming=True,
    )
    reader = StreamReader(options, source_schema(options))
    start = reader.initialOffset()
    assert reader.latestOffset(start, reader.getDefaultReadLimit())["orders"] == {"0": 10}
    assert reader.latestOffset(start, ReadAllAvailable())["orders"] == {"0": 50}
    assert reader.reportLatestOffset()["orders"] == {"0": 50}
    reader.stop()


def test_spark_before_4_2_names_no_start_and_the_limits_hold(store: Store) -> None:
    store.create_topic("orders", partitions=1)
    fill(store, "orders", 0, 25)
    given = {"path": str(store.path), "subscribe": "orders", "startingOffsets": "earliest"}
    options = SourceOptions.parse({**given, "maxOffsetsPerTrigger": "10"}, streaming=True)
    reader = StreamReader(options, source_schema(options))
    reader.initialOffset()
    ends = [reader.latestOffset()["orders"]["0"] for _ in range(4)]
    assert ends == [10, 20, 25, 25]
    reader.stop()


def test_progress_tells_how_far_behind_a_query_is(
    spark: SparkSession, store: Store, collected: Collected
) -> None:
    store.create_topic("orders", partitions=1)
    fill(store, "orders", 0, 30)
    progress = collected.run(load(spark, store, maxOffsetsPerTrigger=10))
    source = next(p for p in progress if p["numInputRows"])["sources"][0]
    assert source["numInputRows"] == 10
    ends = [offset_in(source[name]) for name in ("endOffset", "latestOffset")]
    assert [end["orders"]["0"] for end in ends] == [10, 30]


def test_progress_has_the_loss_when_the_query_goes_on_after_it_failed(
    spark: SparkSession, store: Store, collected: Collected
) -> None:
    log = store.create_topic("orders", partitions=1)[0]
    fill(store, "orders", 0, 40)
    collected.run(load(spark, store))
    fill(store, "orders", 0, 60)
    log.trim(60)
    with pytest.raises(PySparkException, match="failOnDataLoss"):
        collected.run(load(spark, store))
    progress = collected.run(load(spark, store, failOnDataLoss="false"))
    assert collected.rows == [(0, offset) for offset in (*range(40), *range(60, 100))]
    batch = next(each for each in progress if each["numInputRows"])
    assert offset_in(batch["sources"][0]["latestOffset"])["@lost"] == {"orders-0": 20}


# ---- groups ----


def test_a_group_is_told_how_far_the_query_is(store: Store) -> None:
    store.create_topic("orders", partitions=2)
    fill(store, "orders", 0, 5)
    fill(store, "orders", 1, 3)
    store.close()  # committing for a group takes the store's lock for a moment
    given = {"path": str(store.path), "subscribe": "orders", "kafka.group.id": "lag-tool"}
    options = SourceOptions.parse(given, streaming=True)
    reader = StreamReader(options, source_schema(options))
    reader.commit(reader.latestOffset(reader.initialOffset()))
    reader.stop()
    with logstore.open(store.path, durability="os") as again:
        committed = Groups(again).committed("lag-tool")
        found = {tuple(which): known.offset for which, known in committed.items()}
        assert found == {("orders", 0): 5, ("orders", 1): 3}
        fill(again, "orders", 1, 4)
    rest = direct.read(store.path, subscribe="orders", startingOffsets="group:lag-tool")
    assert rest["offset"].to_pylist() == [3, 4, 5, 6]
    with pytest.raises(OptionError, match="group 'nobody' has committed no offset"):
        direct.splits(store.path, subscribe="orders", startingOffsets="group:nobody")


def test_a_group_that_cannot_be_told_now_is_told_later(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.create_topic("orders", partitions=1)
    fill(store, "orders", 0, 5)
    given = {"path": str(store.path), "subscribe": "orders", "kafka.group.id": "late"}
    options = SourceOptions.parse(given, streaming=True)
    reader = StreamReader(options, source_schema(options))
    end = reader.latestOffset(reader.initialOffset())
    for _ in range(3):
        reader.commit(end)  # this process has the store open for writing: nothing fails
    assert caplog.text.count("group late was not told how far this query is") == 1
    store.close()
    reader.stop()
    with logstore.open(store.path, readonly=True) as again:
        (known,) = Groups(again).committed("late").values()
        assert known.offset == 5


# ---- errors ----


def test_a_topic_made_again_is_refused(
    spark: SparkSession, store: Store, collected: Collected
) -> None:
    store.create_topic("orders", partitions=1)
    fill(store, "orders", 0, 3)
    collected.run(load(spark, store))
    store.delete_topic("orders")
    store.create_topic("orders", partitions=1)
    fill(store, "orders", 0, 9)
    for forgiving in ("true", "false"):
        with pytest.raises(PySparkException, match="was deleted and made again since this query"):
            collected.run(load(spark, store, failOnDataLoss=forgiving))
    assert collected.rows == every(3)


QUERY = """
import sys, time
from pathlib import Path
from pyspark_logstore import local_session, register

store, out, checkpoint, marker = sys.argv[1:]
spark = local_session(2, spark__driver__memory="512m", spark__log__level="ERROR")
register(spark)

def write(batch, number):
    # Idempotent by its number, as Spark asks of foreachBatch.
    rows = [f"{row.partition} {row.offset}\\n" for row in batch.collect()]
    if number == 2 and not Path(marker).exists():
        Path(out, f"{number}.half").write_text("".join(rows[: len(rows) // 2]))
        Path(marker).touch()
        time.sleep(600)  # in the middle of a batch: killed here
    Path(out, f"{number}.tmp").write_text("".join(rows))
    Path(out, f"{number}.tmp").rename(Path(out, str(number)))

query = (
    spark.readStream.format("logstore").option("subscribe", "orders")
    .option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "100").load(store)
    .writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    .trigger(availableNow=True).start()
)
query.awaitTermination()
"""


@pytest.mark.slow  # two more JVMs
def test_killed_in_mid_batch_a_query_loses_nothing_and_repeats_nothing(
    store: Store, tmp_path: Path
) -> None:
    store.create_topic("orders", partitions=2)
    fill(store, "orders", 0, 300)
    fill(store, "orders", 1, 150)
    out, checkpoint, marker = (tmp_path / name for name in ("out", "checkpoint", "marker"))
    out.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(CONNECTOR), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-c", QUERY, *map(str, (store.path, out, checkpoint, marker))]

    first = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while not marker.exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        os.killpg(first.pid, signal.SIGKILL)  # the driver, its JVM and its workers
        first.wait()
    assert sorted(path.name for path in out.iterdir()) == ["0", "1", "2.half"]
    fill(store, "orders", 0, 50)  # what came meanwhile is no part of the batch that is repeated
    subprocess.run(command, env=environment, check=True, timeout=240)
    lines = [
        tuple(map(int, line.split()))
        for path in out.iterdir()
        if path.name.isdigit()
        for line in path.read_text().splitlines()
    ]
    assert sorted(lines) == every(350, 150)
    half = (out / "2.half").read_text().splitlines()
    again = (out / "2").read_text().splitlines()
    assert set(half) < set(again) and len(again) == 100, "the same rows in the same batch"


def test_logstore_is_open_only_while_a_query_runs(store: Store) -> None:
    store.create_topic("orders", partitions=1)
    options = SourceOptions.parse({"path": str(store.path), "subscribe": "orders"}, streaming=True)
    reader = StreamReader(options, source_schema(options))
    reader.initialOffset()
    reader.stop()
    reader.stop()
    assert logstore.open(store.path, readonly=True).close() is None
