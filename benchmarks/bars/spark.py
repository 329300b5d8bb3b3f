"""P11: a log as a DataFrame, beside Spark's own scan of the same rows in Parquet."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks import engine
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least
from benchmarks.sizes import MIB
from benchmarks.values import VALUE_BYTES, random_values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSource
    from pyspark.sql.types import StructType

PARTITIONS = 2
SEGMENT_BYTES = 32 * MIB
FIRST_TIME = 1_700_000_000_000
PARQUET, HANDOVER = "Parquet", "Python source without work"
ALL, SUBSET, RANGE, STREAM, SINK = (
    f"{OURS} {what}" for what in ("all columns", "subset", "1 % of the time", "stream", "sink")
)
HANDOVER_ROWS = 32_768  # of a batch, as ours
SINK_SHARE = 8  # the sink writes a part of the records only


@bar("P11", "Spark", needs_engine=True)
def spark(bench: Bench) -> Iterator[Figure]:
    if bench.left_out("P11", why_not()):
        return
    from pyspark_logstore import local_session, register

    records = bench.sizes.spark_records
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # Spark plans each query in a new process; an installed package is not compiled again in each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with bench.workspace.scratch("spark") as home:
        bench.progress.step("writing")
        write(home / "store", records)
        session = local_session(
            PARTITIONS,
            spark__driver__memory="2g",
            spark__log__level="ERROR",
            spark__ui__showConsoleProgress="false",
            spark__local__dir=str(home / "local"),
            spark__sql__warehouse__dir=str(home / "warehouse"),
        )
        try:
            register(session)
            rates = measured(bench, session, home, records)
        finally:
            session.stop()
    yield compared(f"count, sum(length(value)), {records / 1e6:g} M rows", rates, OURS, 1.0)
    yield compared("the same, all columns read", rates, ALL, 0.5)
    for name, what in (
        (SUBSET, "count, sum(offset), schema of key and offset"),
        (RANGE, "the first, 1 % of the time by push-down"),
        (STREAM, "the stream source, to nowhere"),
        (SINK, "the sink, exactly once, synced"),
    ):
        yield Figure(name=what, value=rates[name] / 1e6, unit="M rows/s")


def why_not() -> str | None:
    try:
        from pyspark_logstore import java_version
    except ImportError as error:
        return str(error)
    found = java_version()
    return None if found is not None and found >= 17 else "there is no Java 17 or newer"


def compared(name: str, rates: dict[str, float], ours: str, bound: float) -> Figure:
    return Figure.compared(
        name,
        rates,
        against=PARQUET,
        limit=at_least(bound),
        beside=(HANDOVER,),
        unit="M rows/s",
        scale=1e6,
        ours=ours,
    )


def write(path: Path, records: int) -> None:
    values = random_values(100_000)
    with engine.open_store(path) as store:
        topic = store.create_topic(
            "bench", partitions=PARTITIONS, config={"segment.bytes": SEGMENT_BYTES}
        )
        for partition in topic:
            with partition.writer(durability="os") as out:
                for number in range(records // PARTITIONS):
                    out.append(
                        values[number % len(values)],
                        key=b"key-%08d" % number,
                        timestamp=FIRST_TIME + number,
                    )


def measured(bench: Bench, session: SparkSession, home: Path, records: int) -> dict[str, float]:
    path = str(home / "store")
    bench.progress.step("writing Parquet")
    log_of(session).load(path).write.parquet(str(home / "parquet"))
    per_partition = records // PARTITIONS
    start, end = (FIRST_TIME + per_partition * percent // 100 for percent in (50, 51))
    wanted = f"timestamp >= timestamp_millis({start}) AND timestamp < timestamp_millis({end})"

    def lengths(frame: DataFrame, rows: int) -> float:
        started = perf_counter()
        (row,) = frame.selectExpr("count(1)", "sum(length(value))").collect()
        elapsed = perf_counter() - started
        assert tuple(row) == (rows, rows * VALUE_BYTES), row
        return records / elapsed

    def subset() -> float:
        started = perf_counter()
        frame = log_of(session).schema("key binary, offset bigint").load(path)
        (row,) = frame.selectExpr("count(1)", "sum(offset)").collect()
        elapsed = perf_counter() - started
        assert row[0] == records
        return records / elapsed

    def stream() -> float:
        checkpoint = home / f"checkpoint-{perf_counter()}"
        started = perf_counter()
        query = (
            session.readStream.format("logstore")
            .option("subscribe", "bench")
            .option("startingOffsets", "earliest")
            .load(path)
            .writeStream.format("noop")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return records / (perf_counter() - started)

    def sink() -> float:
        target, rows = home / "sink", records // SINK_SHARE
        shutil.rmtree(target, ignore_errors=True)
        value = f"cast(repeat('v', {VALUE_BYTES}) as binary) as value"
        frame = session.range(0, rows, 1, PARTITIONS).selectExpr("cast(id as string) as key", value)
        started = perf_counter()
        (
            frame.write.format("logstore")
            .mode("append")
            .option("topic", "sink")
            .option("partitions", PARTITIONS)
            .save(str(target))
        )
        return rows / (perf_counter() - started)

    session.dataSource.register(source_without_work())
    return bench.race(
        {
            OURS: lambda: lengths(log_of(session).schema("value binary").load(path), records),
            PARQUET: lambda: lengths(session.read.parquet(str(home / "parquet")), records),
            HANDOVER: lambda: lengths(
                session.read.format("without_work").option("rows", records).load(), records
            ),
            ALL: lambda: lengths(log_of(session).load(path), records),
            SUBSET: subset,
            RANGE: lambda: lengths(
                log_of(session).load(path).where(wanted), (end - start) * PARTITIONS
            ),
            STREAM: stream,
            SINK: sink,
        }
    )


def source_without_work() -> type[DataSource]:
    """A source that hands the same Arrow batch over and over: what Spark leaves to any of them.

    Made in a function, so that it travels to Spark's processes by value.
    """
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    class Reader(DataSourceReader):
        def __init__(self, rows: int) -> None:
            self.rows = rows

        def partitions(self) -> list[InputPartition]:
            return [InputPartition(self.rows // PARTITIONS)] * PARTITIONS

        def read(self, partition: InputPartition) -> Iterator[Any]:
            import pyarrow as pa

            value = pa.scalar(bytes(VALUE_BYTES), pa.binary())
            batch = pa.record_batch({"value": pa.repeat(value, HANDOVER_ROWS)})
            left: int = partition.value
            while left > 0:
                yield batch if left >= HANDOVER_ROWS else batch.slice(0, left)
                left -= HANDOVER_ROWS

    class WithoutWork(DataSource):
        @classmethod
        def name(cls) -> str:
            return "without_work"

        def schema(self) -> str:
            return "value binary"

        def reader(self, schema: StructType) -> DataSourceReader:
            return Reader(int(self.options["rows"]))

    return WithoutWork


def log_of(session: SparkSession) -> Any:
    return session.read.format("logstore").option("subscribe", "bench")
