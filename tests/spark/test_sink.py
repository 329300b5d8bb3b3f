"""The sinks on a real Spark: columns, options, modes, failures, replays."""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, BinaryType, StringType, StructType, TimestampType
from pyspark_logstore.commits import Committer, SinkError
from pyspark_logstore.sink import StreamSink
from pyspark_logstore.sink_options import SinkOptions

import logstore
from logstore import KeyPartitioner, Record
from tests.kit import wait_until

UTC = datetime.timezone.utc  # noqa: UP017
HEADERS = "array<struct<key:string,value:binary>>"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with logstore.open(tmp_path / "store") as store:
        store.create_topic("one")
        store.create_topic("four", partitions=4)
    return tmp_path / "store"


def save(frame: DataFrame, root: Path, mode: str = "append", **options: object) -> None:
    writer = frame.write.format("logstore").mode(mode).option("path", str(root))
    for name, value in options.items():
        writer = writer.option(name, str(value))
    writer.save()


def records(root: Path, topic: str, isolation: str = "read_committed") -> list[list[Record]]:
    with logstore.open(root, readonly=True) as store:
        return [list(partition.scan(isolation=isolation)) for partition in store[topic]]


def values(root: Path, topic: str) -> list[bytes | None]:
    return sorted((r.value for part in records(root, topic) for r in part), key=repr)


def leftovers(root: Path) -> list[str]:
    return [n for n in os.listdir(root) if n.endswith((".prepared", ".plan", ".tmp"))]


def refused(message: str) -> Any:
    return pytest.raises(Exception, match=re.compile(message, re.DOTALL))


# ---- columns ----


@pytest.mark.parametrize("kind", ["string", "binary"])
def test_keys_and_values_of_either_type(spark: SparkSession, root: Path, kind: str) -> None:
    rows = [("k1", "v1"), (None, "v2"), ("k3", None), ("", "")]
    frame = spark.createDataFrame(rows, "key string, value string").select(
        f.col("key").cast(kind), f.col("value").cast(kind)
    )
    save(frame.coalesce(1), root, topic="one")
    (written,) = records(root, "one")
    assert [(r.key, r.value) for r in written] == [
        (b"k1", b"v1"),
        (None, b"v2"),
        (b"k3", None),
        (b"", b""),
    ]
    assert leftovers(root) == []


def test_all_columns(spark: SparkSession, root: Path) -> None:
    when = datetime.datetime(2024, 5, 1, 12, 0, 0, 123000, tzinfo=UTC)
    rows = [
        (b"k", b"v", [("h", b"1"), ("h", None), ("", b"")], "four", 2, when),
        (None, b"w", None, "one", None, None),
        (b"21", None, [], "four", None, when),
    ]
    schema = f"key binary, value binary, headers {HEADERS}, topic string, partition int, " \
             "timestamp timestamp, other string"  # fmt: skip
    frame = spark.createDataFrame([(*row, "ignored") for row in rows], schema)
    save(frame, root)
    ms = int(when.timestamp() * 1000)
    # Java's murmur2 of "21" is -973932308; without its sign bit, modulo 4, that is partition 0.
    (tombstone,), none, (r,), none_either = records(root, "four")
    assert (none, none_either) == ([], [])
    assert (r.key, r.value, r.timestamp) == (b"k", b"v", ms)
    assert r.headers == (("h", b"1"), ("h", None), ("", b""))
    assert (tombstone.key, tombstone.value, tombstone.headers) == (b"21", None, ())
    assert (tombstone.partition, tombstone.timestamp) == (0, ms)
    (plain,) = records(root, "one")[0]
    assert plain.value == b"w"
    assert plain.timestamp > ms
    assert plain.headers == ()


def test_the_option_topic_wins_and_headers_and_times_can_be_left_out(
    spark: SparkSession, root: Path
) -> None:
    old = datetime.datetime(2001, 1, 1, tzinfo=UTC)
    frame = spark.createDataFrame(
        [("v", "elsewhere", [("h", b"1")], old)],
        f"value string, topic string, headers {HEADERS}, timestamp timestamp",
    )
    save(frame, root, topic="one", includeHeaders="false", timestamps="now")
    (written,) = records(root, "one")[0]
    assert written.headers == ()
    assert written.timestamp > 1_600_000_000_000
    with logstore.open(root, readonly=True) as store:
        assert list(store) == ["four", "one"]


def test_keys_go_where_a_java_client_would_send_them(spark: SparkSession, root: Path) -> None:
    frame = spark.range(2000).selectExpr("concat('k', id % 97) as key", "string(id) as value")
    save(frame, root, topic="four")
    parts = records(root, "four")
    choose = KeyPartitioner()
    assert all(choose(r.key, None, 4) == n for n, part in enumerate(parts) for r in part)
    assert values(root, "four") == sorted((b"%d" % n for n in range(2000)), key=repr)


def first_partition(key: bytes | None, value: bytes | None, partitions: int) -> int:
    return partitions - 1


@pytest.mark.parametrize(
    ("partitioner", "filled"),
    [("roundRobin", {100}), ("json:loads", None), ("key", None)],
)
def test_partitioners(
    spark: SparkSession, root: Path, partitioner: str, filled: set[int] | None
) -> None:
    frame = spark.range(400).selectExpr("string(id) as value").coalesce(1)
    if partitioner == "json:loads":  # a function, but not one that chooses partitions
        with refused(r"loads"):
            save(frame, root, topic="four", partitioner=partitioner)
        assert leftovers(root) == []
        return
    save(frame, root, topic="four", **{"kafka.partitioner.class": partitioner})
    sizes = {len(part) for part in records(root, "four")}
    assert filled is None or sizes == filled
    assert values(root, "four") == sorted((b"%d" % n for n in range(400)), key=repr)


# ---- refusals ----


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("id", {"topic": "one"}, "no column 'value' among id"),
        ("id as value", {"topic": "one"}, "column 'value' is bigint.*to_json"),
        ("'v' as value, id as key", {"topic": "one"}, "column 'key' is bigint.*cast"),
        ("'v' as value, id as partition", {"topic": "one"}, r"column 'partition' is bigint.*cast"),
        ("'v' as value, 1 as topic", {}, "column 'topic' is int, but must be string"),
        ("'v' as value, array('a') as headers", {"topic": "one"}, r"'headers' must be array<str"),
        ("'v' as value, id as timestamp", {"topic": "one"}, "'timestamp' is bigint.*timestamps=no"),
        ("'v' as value", {}, "no topic: set the option topic"),
        ("'v' as value", {"topic": "one", "tpoic": "x"}, "unknown option 'tpoic'.*did you mean 't"),
        ("'v' as value", {"topic": "one", "createTopic": "si"}, "must be true or false, not 'si'"),
        ("'v' as value", {"topic": "one", "partitions": "0"}, "partitions must be at least 1"),
        ("'v' as value", {"topic": "one", "durability": "no"}, "durability must be one of fsync"),
        ("'v' as value", {"topic": "one", "compression": "rar"}, "compression must be one of none"),
        ("'v' as value", {"topic": "one", "partitioner": "x"}, "partitioner must be one of key"),
        ("'v' as value", {"topic": "one", "txnVersion": "1"}, "needs txnAppId"),
        ("'v' as value", {"topic": "one", "txnAppId": "a"}, "txnAppId without txnVersion"),
        ("'v' as value", {"topic": "one", "kafka.bootstrap.servers": "b:9092"}, "option.'path'"),
        ("'v' as value", {"topic": "one", "kafka.key.serializer": "X"}, "cannot be set"),
        ("'v' as value", {"topic": "new", "createTopic": "false"}, "no topic 'new'.*createTopic"),
        ("'v' as value, 9 as partition", {"topic": "four"}, "partition 9 of topic 'four'.*0 to 3"),
        ("'v' as value, string(null) as topic", {}, "a row has no topic"),
        ("string(null) as value", {"topic": "one"}, "needs a key"),
    ],
)
def test_what_cannot_be_written_is_refused_with_the_remedy(
    spark: SparkSession, root: Path, columns: str, options: dict[str, str], message: str
) -> None:
    frame = spark.range(3).selectExpr(*re.split(r",\s*(?![^(]*\))", columns))
    with refused(message):
        save(frame, root, **options)
    assert values(root, "one") == values(root, "four") == []
    assert leftovers(root) == []


def test_a_path_that_is_no_file_system_is_refused(spark: SparkSession) -> None:
    with refused("s3: is no file system"):
        save(spark.range(1).selectExpr("'v' as value"), Path("s3://bucket/x"), topic="t")


# ---- batch: modes, options ----


def test_append_and_overwrite(spark: SparkSession, root: Path) -> None:
    for number in range(2):
        save(spark.range(10).selectExpr(f"'{number}' as value"), root, topic="four")
    assert len(values(root, "four")) == 20
    with logstore.open(root, readonly=True) as store:
        ends = sum(p.end_offset for p in store["four"])
    save(spark.range(3).selectExpr("'new' as value"), root, "overwrite", topic="four")
    assert values(root, "four") == [b"new"] * 3
    with logstore.open(root, readonly=True) as store:
        assert sum(p.end_offset for p in store["four"]) > ends, "offsets go on"
    save(spark.range(0).selectExpr("'none' as value"), root, "overwrite", topic="four")
    assert values(root, "four") == []


def test_a_new_store_and_topic_are_made(spark: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "new"
    save(spark.range(10).selectExpr("string(id) as value"), root, topic="made", partitions=3)
    assert len(records(root, "made")) == 3
    assert len(values(root, "made")) == 10
    with refused("there is no store at"):
        frame = spark.range(1).selectExpr("'v' as value")
        save(frame, tmp_path / "none", topic="t", createTopic="false")


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_compression_and_batch_size(spark: SparkSession, root: Path, compression: str) -> None:
    frame = spark.range(5000).selectExpr("repeat('x', 100) as value").coalesce(1)
    save(frame, root, topic="one", compression=compression, batchBytes=10_000, durability="os")
    assert len(values(root, "one")) == 5000
    with logstore.open(root, readonly=True) as store:
        (log,) = store["one"]
        batches = log.read_batches(0, 1 << 30)
    assert len(batches) > 40
    assert sum(map(len, batches)) < 200_000


def test_a_batch_write_with_a_number_is_written_once(spark: SparkSession, root: Path) -> None:
    for version in (0, 0, 1, 1, 0):
        frame = spark.range(3).selectExpr(f"'{version}' as value")
        save(frame, root, topic="one", txnAppId="nightly", txnVersion=version)
    assert values(root, "one") == [b"0"] * 3 + [b"1"] * 3


def test_a_failed_task_leaves_nothing(spark: SparkSession, root: Path) -> None:
    frame = spark.range(0, 20_000, 1, 4).selectExpr(
        "if(id = 19999, raise_error('planned'), string(id)) as value"
    )
    with refused("planned"):
        save(frame, root, topic="four")
    assert records(root, "four", "read_uncommitted") == [[], [], [], []]

    def is_swept() -> bool:
        # Other tasks of the job may still run, or were killed after the abort.
        Committer(root, orphan_age=0).finish()
        return leftovers(root) == []

    wait_until(is_swept, "that no file of the job is left")


# ---- streams ----


def stream(spark: SparkSession, source: Path, **options: str) -> DataFrame:
    reader = spark.readStream.schema("key string, value string").format("json")
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load(str(source))


def run(
    frame: DataFrame, root: Path, checkpoint: Path, mode: str = "append", **options: str
) -> Any:
    writer = frame.writeStream.format("logstore").outputMode(mode).trigger(availableNow=True)
    writer = writer.option("path", str(root)).option("checkpointLocation", str(checkpoint))
    for name, value in options.items():
        writer = writer.option(name, value)
    query = writer.start()
    query.awaitTermination()
    return query


def feed(source: Path, number: int) -> None:
    source.mkdir(exist_ok=True)
    lines = "".join(f'{{"key": "k{n}", "value": "{number}.{n}"}}\n' for n in range(20))
    (source / f"{number}.json").write_text(lines)


def fed(*numbers: int) -> list[bytes | None]:
    return sorted((b"%d.%d" % (m, n) for m in numbers for n in range(20)), key=repr)


def test_a_stream_replayed_from_any_checkpoint_writes_once(
    spark: SparkSession, root: Path, tmp_path: Path
) -> None:
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    feed(source, 0)
    feed(source, 1)
    frame = stream(spark, source, maxFilesPerTrigger="1")
    query = run(frame, root, checkpoint, topic="four")
    assert query.lastProgress["batchId"] == 1
    assert values(root, "four") == fed(0, 1)
    # The driver died between the sink's commit and its own: Spark runs batch 1 again.
    (checkpoint / "commits" / "1").unlink()
    (checkpoint / "commits" / ".1.crc").unlink(missing_ok=True)
    feed(source, 2)
    run(frame, root, checkpoint, topic="four")
    assert values(root, "four") == fed(0, 1, 2)
    assert leftovers(root) == []
    # ... and both.
    for number in (1, 2):
        (checkpoint / "commits" / str(number)).unlink()
        (checkpoint / "commits" / f".{number}.crc").unlink(missing_ok=True)
    run(frame, root, checkpoint, topic="four")
    assert values(root, "four") == fed(0, 1, 2)


def test_a_new_checkpoint_is_a_new_query(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    feed(source, 0)
    frame = stream(spark, source)
    run(frame, root, tmp_path / "one", topic="four")
    run(frame, root, tmp_path / "two", topic="four")
    assert values(root, "four") == fed(0, 0)
    run(frame, root, tmp_path / "three", topic="one", txnAppId="mine")
    with refused("choose another txnAppId"):
        run(frame, root, tmp_path / "four", topic="one", txnAppId="mine")
    assert values(root, "one") == fed(0)


def test_a_stream_whose_tasks_fail_leaves_nothing_and_goes_on(
    spark: SparkSession, root: Path, tmp_path: Path
) -> None:
    source, checkpoint, switch = tmp_path / "in", tmp_path / "checkpoint", tmp_path / "fail"
    feed(source, 0)
    feed(source, 1)

    path = str(switch)
    switch.touch()
    fragile = f.udf(lambda text: text if not os.path.exists(path) or text[-2:] != "19" else 1 / 0)
    frame = stream(spark, source).select("key", fragile("value").alias("value"))
    with refused("ZeroDivision"):
        run(frame, root, checkpoint, topic="four")
    assert records(root, "four", "read_uncommitted") == [[], [], [], []]
    switch.unlink()
    run(frame, root, checkpoint, topic="four")
    assert values(root, "four") == fed(0, 1)
    assert leftovers(root) == []


def test_complete_mode_replaces_what_was_there(
    spark: SparkSession, root: Path, tmp_path: Path
) -> None:
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    for number in range(2):
        feed(source, number)
        frame = stream(spark, source).groupBy("key").count()
        frame = frame.select("key", f.col("count").cast("string").alias("value"))
        run(frame, root, checkpoint, "complete", topic="one")
        assert values(root, "one") == [b"%d" % (number + 1)] * 20


def test_a_stream_refuses_a_version(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    feed(tmp_path / "in", 0)
    with refused("a stream numbers its batches itself"):
        run(stream(spark, tmp_path / "in"), root, tmp_path / "c", topic="one", txnAppId="a",
            txnVersion="1")  # fmt: skip


# ---- in a task, without Spark ----


def sink_of(root: Path, **options: str) -> StreamSink:
    schema = (
        StructType()
        .add("key", StringType())
        .add("value", BinaryType())
        .add("headers", ArrayType(StructType().add("key", StringType()).add("value", BinaryType())))
        .add("timestamp", TimestampType())
    )
    return StreamSink(SinkOptions.parse({"path": str(root), **options}), schema, False)


def test_rows_instead_of_arrow_batches(root: Path) -> None:
    """What Spark 4.0 hands to the writer of a stream."""
    when = datetime.datetime(2024, 5, 1, tzinfo=UTC)
    pair = Row("key", "value")
    row = Row("key", "value", "headers", "timestamp")
    rows = [row(f"k{n}", b"%d" % n, [pair("h", b"1")], when) for n in range(12_000)]
    sink = sink_of(root, topic="one")
    prepared = sink._prepare(iter(rows), "app", "", 0)
    Committer(root).commit("app", 0, [prepared.file] if prepared.file else [])
    (written,) = records(root, "one")
    assert [r.value for r in written] == [b"%d" % n for n in range(12_000)]
    assert written[5].headers == (("h", b"1"),)
    assert written[5].timestamp == int(when.timestamp() * 1000)


def test_a_task_that_cannot_see_the_store_says_so(root: Path) -> None:
    sink = sink_of(root, topic="one")
    root.rename(root.with_name("moved"))
    with pytest.raises(SinkError, match=r"the task on .* cannot see .*all executors share"):
        sink._prepare(iter(()), "app", "", 0)


def test_a_file_uri_is_a_path(root: Path) -> None:
    for text in (f"file:{root}", f"file://{root}", f"FILE:{root}", str(root)):
        assert SinkOptions.parse({"PATH": text, "topic": "one"}).root == root
    with pytest.raises(SinkError, match="option path is missing"):
        SinkOptions.parse({"topic": "one"})
