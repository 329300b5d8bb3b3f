"""P11: a log as a DataFrame, beside Spark's own scan of the same rows in Parquet."""

from __future__ import annotations

import os
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

PARTITIONS = 2
SEGMENT_BYTES = 32 * MIB
FIRST_TIME = 1_700_000_000_000
PARQUET, SUBSET, RANGE, STREAM = "Parquet", "subset", "1 % of the time", "stream"
ALL = f"{OURS} all columns"


@bar("P11", "Spark", needs_engine=True)
def spark(bench: Bench) -> Iterator[Figure]:
    reason = why_not()
    if reason is not None:
        bench.progress.note(f"P11 is left out: {reason}")
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
    ):
        yield Figure(name=what, value=rates[f"{OURS} {name}"] / 1e6, unit="M rows/s")


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

    return bench.race(
        {
            OURS: lambda: lengths(log_of(session).schema("value binary").load(path), records),
            PARQUET: lambda: lengths(session.read.parquet(str(home / "parquet")), records),
            ALL: lambda: lengths(log_of(session).load(path), records),
            f"{OURS} {SUBSET}": subset,
            f"{OURS} {RANGE}": lambda: lengths(
                log_of(session).load(path).where(wanted), (end - start) * PARTITIONS
            ),
            f"{OURS} {STREAM}": stream,
        }
    )


def log_of(session: SparkSession) -> Any:
    return session.read.format("logstore").option("subscribe", "bench")
