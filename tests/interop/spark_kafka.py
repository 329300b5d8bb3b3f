"""Spark's own Kafka source and sink on the listener, compared with logstore's data source.

A program: `python -m tests.interop.spark_kafka DIRECTORY JAR...`.  It prints a line for each
comparison.  It has a process of its own, because a process has one Spark session and its jars.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark_logstore import local_session

import logstore
from logstore import Store
from logstore.kafka.server import KafkaServer

T0 = 1_700_000_000_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def fill(store: Store) -> None:
    """Make a topic with every codec, nulls, headers, and transactions of both endings."""
    topic = store.create_topic("orders", partitions=3)
    for number, codec in enumerate(CODECS):
        with logstore.Producer(store, compression=codec) as producer:
            for each in range(60):
                producer.send(
                    "orders", None if each % 5 == 1 else b"%s %d" % (codec.encode(), each),
                    key=None if each % 5 == 0 else b"k%d" % each, partition=each % 3,
                    headers=(("h", b"1"), ("h", None)) if each % 4 == 0 else (),
                    timestamp=T0 + 1000 * (60 * number + each),
                )  # fmt: skip
            producer.flush()
    with logstore.Producer(store, "id") as producer:
        for ending in ("commit", "abort", "commit"):
            transaction = producer.transaction()
            for number in range(3):
                transaction.append(
                    "orders", ending.encode(), partition=number, timestamp=T0 + 400_000
                )
            getattr(transaction, ending)()
    topic[2].trim(5)


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    rows = frame.orderBy("topic", "partition", "offset").collect()
    return [tuple(bytes(v) if isinstance(v, bytearray) else v for v in row) for row in rows]


def in_order(batches: list[list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """Return the rows of all micro-batches by partition and offset."""
    return sorted(itertools.chain.from_iterable(batches), key=lambda row: row[3:5])


class Both:
    """The two sources on one store."""

    def __init__(self, spark: SparkSession, store: Store, server: KafkaServer) -> None:
        self.spark, self.store = spark, store
        self.bootstrap = {"kafka.bootstrap.servers": server.bootstrap_servers}

    def batches(self, options: dict[str, str]) -> tuple[DataFrame, DataFrame]:
        common = {"subscribe": "orders", "includeHeaders": "true"} | options
        kafka = self.spark.read.format("kafka").options(**self.bootstrap, **common).load()
        ours = self.spark.read.format("logstore").options(**common).load(str(self.store.path))
        return kafka, ours

    def streams(self, options: dict[str, str]) -> tuple[DataFrame, DataFrame]:
        common = {"subscribe": "orders", "startingOffsets": "earliest"} | options
        kafka = self.spark.readStream.format("kafka").options(**self.bootstrap, **common).load()
        reader = self.spark.readStream.format("logstore").options(**common)
        return kafka, reader.load(str(self.store.path))


def streamed(frame: DataFrame, folder: Path) -> list[list[tuple[Any, ...]]]:
    """Run a query to the end of the logs; return the rows of each micro-batch."""
    found = []
    query = (
        frame.writeStream.foreachBatch(lambda batch, _: found.append(rows_of(batch)))
        .option("checkpointLocation", str(folder))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(120), query.lastProgress
    finally:
        query.stop()
    return found


def compare(both: Both, folder: Path) -> None:
    at = json.dumps({"orders": {"0": T0 + 50_000, "1": T0 + 150_000, "2": T0 + 250_000}})
    start = json.dumps({"orders": {"0": 7, "1": -2, "2": 20}})
    end = json.dumps({"orders": {"0": 60, "1": -1, "2": 30}})
    for name, options in {
        "everything": {},
        "committed": {"kafka.isolation.level": "read_committed"},
        "by offset": {"startingOffsets": start, "endingOffsets": end},
        "by time": {"startingOffsetsByTimestamp": at},
        "more tasks": {"minPartitions": "7"},
        "a lost start": {
            "startingOffsets": json.dumps({"orders": {"0": 0, "1": 0, "2": 0}}),
            "failOnDataLoss": "false",
        },
    }.items():
        kafka, ours = both.batches(options)
        theirs = rows_of(kafka)
        assert theirs == rows_of(ours) and theirs, name
        print("batch", name, len(theirs))
    for name, options in {
        "everything": {},
        "committed": {"kafka.isolation.level": "read_committed"},
        "in parts": {"maxOffsetsPerTrigger": "60"},
    }.items():
        kafka, ours = both.streams(options)
        theirs = streamed(kafka, folder / f"kafka {name}")
        mine = streamed(ours, folder / f"ours {name}")
        assert in_order(theirs) == in_order(mine), name
        assert (len(theirs) > 1) == (name == "in parts")
        print("stream", name, sum(map(len, theirs)))


def write(both: Both, folder: Path) -> None:
    """Copy the topic by Spark's sink, in a batch and by a stream; read both copies in process."""
    kafka, _ = both.batches({})
    columns = ("partition", "key", "value", "headers")
    kafka.select(*columns).write.format("kafka").options(
        **both.bootstrap, topic="batch", includeHeaders="true"
    ).save()
    kafka, _ = both.streams({"includeHeaders": "true"})
    query = (
        kafka.select(*columns).writeStream.format("kafka")
        .options(**both.bootstrap, topic="stream", includeHeaders="true")
        .option("checkpointLocation", str(folder / "sink"))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    assert query.awaitTermination(120), query.lastProgress
    query.stop()
    for name in ("batch", "stream"):
        for number in range(3):
            source, copy = both.store["orders"][number], both.store[name][number]
            assert [(r.key, r.value, r.headers) for r in copy] == [
                (r.key, r.value, r.headers) for r in source
            ], (name, number)
        print("sink", name, sum(len(list(each)) for each in both.store[name]))


def main() -> None:
    folder, *jars = sys.argv[1:]
    spark = local_session(
        2, spark__jars=",".join(jars), spark__sql__shuffle__partitions="2",
        spark__sql__session__timeZone="UTC", spark__log__level="ERROR",
        spark__driver__memory="1g", spark__local__dir=f"{folder}/local",
    )  # fmt: skip
    try:
        with logstore.open(Path(folder) / "store", durability="os") as store:
            fill(store)
            for name in ("batch", "stream"):
                store.create_topic(name, partitions=3)
            with KafkaServer(store) as server:
                both = Both(spark, store, server)
                compare(both, Path(folder))
                write(both, Path(folder))
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
