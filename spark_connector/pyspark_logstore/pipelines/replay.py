"""replay: write a time range of a topic to another topic.

Records keep their keys, headers and times, and also their partition and order if the target has as
many partitions; `transform` may change their contents.  A replay has a name and is done once per
name: if it runs again after a crash, it continues or does nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import logstore
from pyspark_logstore.commits import Committer
from pyspark_logstore.pipelines.reports import (
    PipelineError,
    Progress,
    Report,
    quiet,
    read_topics,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["ReplayReport", "replay"]


@dataclasses.dataclass(frozen=True)
class ReplayReport(Report):
    """What was written.  ``records`` is 0 and ``repeated`` true when it had been done before."""

    name: str
    source: str
    target: str
    records: int
    repeated: bool
    seconds: float

    def __str__(self) -> str:
        if self.repeated:
            return f"{self.name}: done before; give another name to do it again"
        return (
            f"{self.name}: {self.records} records of {self.source} into {self.target} "
            f"in {self.seconds:.1f} s"
        )


def replay(
    spark: SparkSession,
    store: str | Path,
    topic: str,
    to: str,
    *,
    start: str | int | None = None,
    end: str | int | None = None,
    target: str | Path | None = None,
    name: str | None = None,
    transform: Callable[[DataFrame], DataFrame] | None = None,
    progress: Progress = quiet,
) -> ReplayReport:
    """Write the committed records with times in [start, end) to topic `to` of `target`.

    `start` and `end`: milliseconds, ISO-8601 with a zone, or "-10m"; None means all.  `transform`
    gets a DataFrame with the source's columns and returns one with at least `value`.
    """
    begun = time.monotonic()
    target = Path(store if target is None else target)
    if target.resolve() == Path(store).resolve() and to == topic:
        raise PipelineError(f"topic {topic!r} cannot be replayed into itself: name another with to")
    with logstore.open(store, readonly=True) as opened:
        partitions = len(opened[topic])
    name = name or f"replay {topic} to {to} from {start} to {end}"
    if done_before(target, name):
        return ReplayReport(name, topic, to, 0, True, time.monotonic() - begun)
    there = partitions_of(target, to)
    frame = read_topics(
        spark,
        store,
        [topic],
        startingTimestamp=start,
        endingTimestamp=end,
        startingOffsetsByTimestampStrategy="latest",
        isolationLevel="read_committed",
        includeHeaders="true",
    )
    if transform is not None:
        frame = transform(frame)
    drop = ["topic", "offset", "timestampType"]
    if there and there != partitions:
        progress(f"{to} has {there} partitions, {topic} has {partitions}: chosen by key")
        drop.append("partition")
    progress(f"{name}: writing")
    written = write_once(frame.drop(*drop), target, to, partitions, name)
    return ReplayReport(name, topic, to, written, False, time.monotonic() - begun)


def done_before(store: Path, name: str) -> bool:
    """Whether a write of this name is in the store."""
    return store.is_dir() and Committer(store).last_batch(name) >= 0


def partitions_of(store: Path, topic: str) -> int:
    """Of a topic in a store; 0 when there is none yet."""
    if not store.is_dir():
        return 0
    with logstore.open(store, readonly=True) as opened:
        return len(opened[topic]) if topic in opened else 0


def write_once(frame: DataFrame, store: Path, topic: str, partitions: int, name: str) -> int:
    """Append to a topic under a name, once; the number of records."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    seen = Observation()
    counted = frame.observe(seen, f.count(f.lit(1)).alias("records"))
    writer = counted.write.format("logstore").mode("append")
    writer = writer.option("path", str(store)).option("topic", topic)
    writer = writer.option("partitions", str(partitions))
    writer.option("txnAppId", name).option("txnVersion", "0").save()
    return int(seen.get["records"])
