"""audit: what is in topics, hour by hour, and what is missing between them.

The first topic is the reference.  For every other, keys are followed from it: how long after their
first record in the reference they first appear (the delay end to end), which never do, which come
without having been there, and which come more than once.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import logstore
from pyspark_logstore.pipelines.page import audit_page
from pyspark_logstore.pipelines.reports import Progress, Report, quiet, read_topics, units

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["AuditReport", "audit"]

EXAMPLES = 5


@dataclasses.dataclass(frozen=True)
class TopicAudit:
    """A topic as a whole.  `holes`: offsets that hold no record (markers, compaction, aborts)."""

    topic: str
    partitions: int
    records: int
    size_bytes: int
    holes: int
    keyless: int
    tombstones: int
    duplicate_keys: int
    missing_keys: int  # of the reference; 0 for itself
    extra_keys: int
    missing_examples: tuple[str, ...]
    duplicate_examples: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class HourAudit:
    """One hour of a topic, by the records' own times.  Delays are None without common keys."""

    topic: str
    hour: datetime.datetime
    records: int
    size_bytes: int
    delay_p50_ms: float | None = None
    delay_p95_ms: float | None = None
    delay_max_ms: float | None = None


@dataclasses.dataclass(frozen=True)
class AuditReport(Report):
    """All of it; `tables` and `page` are the files that were written."""

    reference: str
    topics: tuple[TopicAudit, ...]
    hours: tuple[HourAudit, ...]
    tables: tuple[str, ...]
    page: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no key of the reference is missing anywhere."""
        return not any(topic.missing_keys for topic in self.topics)

    def __str__(self) -> str:
        lines = [
            f"{t.topic}: {t.records} records, {units(t.size_bytes)}, {t.partitions} partitions, "
            f"{t.holes} holes, {t.duplicate_keys} duplicate keys"
            + (
                ""
                if t.topic == self.reference
                else f", {t.missing_keys} keys of {self.reference} missing, {t.extra_keys} extra"
            )
            for t in self.topics
        ]
        return "\n".join([*lines, f"{self.page} in {self.seconds:.1f} s"])


def audit(
    spark: SparkSession,
    store: str | Path,
    topics: list[str],
    out: str | Path,
    *,
    start: str | int | None = None,
    end: str | int | None = None,
    progress: Progress = quiet,
) -> AuditReport:
    """Audit topics, the first as the reference, into `out`: Parquet and CSV tables and a page."""
    begun = time.monotonic()
    frame = read_topics(
        spark,
        store,
        topics,
        startingTimestamp=start,
        endingTimestamp=end,
        startingOffsetsByTimestampStrategy="latest",
        isolationLevel="read_committed",
    ).select("topic", "partition", "offset", "timestamp", "key", "value")
    progress(f"counting {', '.join(topics)}")
    hours = _hours(frame)
    totals = {row["topic"]: row for row in _totals(frame)}
    progress("following keys")
    firsts = _firsts(frame).persist()
    try:
        delays = _delays(firsts, topics)
        found = []
        for topic in topics:
            found.append(_topic(store, topic, topics[0], totals.get(topic), firsts))
            progress(f"{topic}: done")
    finally:
        firsts.unpersist()
    audited = tuple(
        dataclasses.replace(hour, **delays.get((hour.topic, hour.hour), {})) for hour in hours
    )
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    tables = _write_tables(directory, found, audited)
    page = directory / "audit.html"
    page.write_text(audit_page(topics[0], found, audited), encoding="utf-8")
    return AuditReport(
        topics[0], tuple(found), audited, tables, str(page), time.monotonic() - begun
    )


# ---- figures ----


def _size() -> Any:
    from pyspark.sql import functions as f

    zero = f.lit(0)
    key = f.coalesce(f.length("key"), zero)
    return (key + f.coalesce(f.length("value"), zero)).cast("long")


def _hour() -> Any:
    """Seconds of the hour's start: the same in every session's time zone."""
    from pyspark.sql import functions as f

    return f.floor(f.unix_timestamp("timestamp") / 3600) * 3600


def _moment(seconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _hours(frame: DataFrame) -> list[HourAudit]:
    from pyspark.sql import functions as f

    rows = (
        frame.groupBy("topic", _hour().alias("hour"))
        .agg(f.count("*").alias("records"), f.sum(_size()).alias("size"))
        .orderBy("topic", "hour")
        .collect()
    )
    return [HourAudit(r["topic"], _moment(r["hour"]), r["records"], r["size"]) for r in rows]


def _totals(frame: DataFrame) -> list[Any]:
    from pyspark.sql import functions as f

    return (
        frame.groupBy("topic")
        .agg(
            f.count("*").alias("records"),
            f.sum(_size()).alias("size"),
            f.count_if(f.isnull("key")).alias("keyless"),
            f.count_if(f.isnull("value")).alias("tombstones"),
        )
        .collect()
    )


def _firsts(frame: DataFrame) -> DataFrame:
    """Of every key in every topic: how often, and when first."""
    from pyspark.sql import functions as f

    return (
        frame.where("key is not null")
        .groupBy("topic", "key")
        .agg(f.count("*").alias("times"), f.min("timestamp").alias("first"))
    )


def _delays(
    firsts: DataFrame, topics: list[str]
) -> dict[tuple[str, datetime.datetime], dict[str, Any]]:
    """By the hour of the other topic's record."""
    from pyspark.sql import functions as f

    reference = firsts.where(f.col("topic") == topics[0]).select("key", f.col("first").alias("was"))
    others = firsts.where(f.col("topic") != topics[0])
    delay = (f.unix_millis("first") - f.unix_millis("was")).cast("double")
    rows = (
        others.join(reference, "key")
        .select("topic", f.col("first").alias("timestamp"), delay.alias("delay"))
        .groupBy("topic", _hour().alias("hour"))
        .agg(
            f.percentile_approx("delay", [0.5, 0.95], f.lit(10_000)).alias("percentiles"),
            f.max("delay").alias("greatest"),
        )
        .collect()
    )
    return {
        (row["topic"], _moment(row["hour"])): {
            "delay_p50_ms": row["percentiles"][0],
            "delay_p95_ms": row["percentiles"][1],
            "delay_max_ms": row["greatest"],
        }
        for row in rows
    }


def _topic(
    store: str | Path, topic: str, reference: str, totals: Any, firsts: DataFrame
) -> TopicAudit:
    from pyspark.sql import functions as f

    with logstore.open(store, readonly=True) as opened:
        partitions = list(opened[topic])
        span = sum(p.last_stable_offset - p.start_offset for p in partitions)
    mine = firsts.where(f.col("topic") == topic)
    twice = mine.where("times > 1")
    missing = extra = 0
    lost: tuple[str, ...] = ()
    if topic != reference:
        theirs = firsts.where(f.col("topic") == reference).select("key")
        absent = theirs.join(mine.select("key"), "key", "left_anti")
        missing = absent.count()
        lost = _examples(absent) if missing else ()
        extra = mine.select("key").join(theirs, "key", "left_anti").count()
    records = totals["records"] if totals else 0
    return TopicAudit(
        topic=topic,
        partitions=len(partitions),
        records=records,
        size_bytes=totals["size"] if totals else 0,
        holes=max(0, span - records),
        keyless=totals["keyless"] if totals else 0,
        tombstones=totals["tombstones"] if totals else 0,
        duplicate_keys=twice.count(),
        missing_keys=missing,
        extra_keys=extra,
        missing_examples=lost,
        duplicate_examples=_examples(twice),
    )


def _examples(frame: DataFrame) -> tuple[str, ...]:
    rows = frame.select("key").orderBy("key").limit(EXAMPLES).collect()
    return tuple(bytes(row["key"]).decode("utf-8", "backslashreplace") for row in rows)


# ---- tables ----


def _write_tables(
    directory: Path, topics: list[TopicAudit], hours: tuple[HourAudit, ...]
) -> tuple[str, ...]:
    import pyarrow as pa
    from pyarrow import csv, parquet

    text, whole, real = pa.string(), pa.int64(), pa.float64()
    names = pa.list_(text)
    kinds = {"topic": text, "hour": pa.timestamp("s", tz="UTC"), "missing_examples": names,
             "duplicate_examples": names, "delay_p50_ms": real, "delay_p95_ms": real,
             "delay_max_ms": real}  # fmt: skip
    written = []
    for name, kind, rows in (("topics", TopicAudit, topics), ("hours", HourAudit, hours)):
        schema = pa.schema([(x.name, kinds.get(x.name, whole)) for x in dataclasses.fields(kind)])
        table = pa.Table.from_pylist([dataclasses.asdict(row) for row in rows], schema)
        parquet.write_table(table, directory / f"{name}.parquet")
        flat = [field.name for field in schema if not pa.types.is_list(field.type)]
        csv.write_csv(table.select(flat), directory / f"{name}.csv")
        written += [str(directory / f"{name}.parquet"), str(directory / f"{name}.csv")]
    return tuple(written)
