"""compact: one record of every key, into another topic, at any size.

`Compactor` compacts in place on one machine; this is a Spark shuffle.  The newest record of every
key (or the first, to remove duplicates) is written to a new topic, with its partition, time and
headers, in offset order.  Records without a key are kept.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

import logstore
from pyspark_logstore.pipelines.replay import done_before, partitions_of, write_once
from pyspark_logstore.pipelines.reports import (
    PipelineError,
    Progress,
    Report,
    quiet,
    read_topics,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["CompactReport", "compact"]


@dataclasses.dataclass(frozen=True)
class CompactReport(Report):
    """Records read and kept."""

    source: str
    target: str
    read: int
    kept: int
    repeated: bool
    seconds: float

    def __str__(self) -> str:
        if self.repeated:
            return f"{self.target}: done before; give another name to do it again"
        share = f"{100 * self.kept / self.read:.1f} %" if self.read else "none to keep"
        return (
            f"{self.source}: {self.read} records, {self.kept} kept in {self.target} ({share}) "
            f"in {self.seconds:.1f} s"
        )


def compact(
    spark: SparkSession,
    store: str | Path,
    topic: str,
    to: str,
    *,
    keep: str = "last",
    by: str = "key",
    drop_tombstones: bool = False,
    target: str | Path | None = None,
    name: str | None = None,
    progress: Progress = quiet,
) -> CompactReport:
    """Write the last (or first) record of every key of `topic` to topic `to` of `target`.

    `by`: "key" compares keys within a partition, as Kafka does; "key,value" removes only records
    with equal key and value, in any partition.  `drop_tombstones` leaves out keys whose last record
    has no value.
    """
    from pyspark.sql import functions as f

    if keep not in ("last", "first"):
        raise PipelineError(f"keep must be last or first, not {keep!r}")
    if by not in ("key", "key,value"):
        raise PipelineError(f"by must be key or key,value, not {by!r}")
    begun = time.monotonic()
    target = Path(store if target is None else target)
    if target.resolve() == Path(store).resolve() and to == topic:
        raise PipelineError(
            f"topic {topic!r} cannot be compacted into itself here: name another with to, or use "
            f"logstore.Compactor"
        )
    with logstore.open(store, readonly=True) as opened:
        partitions = len(opened[topic])
    name = name or f"compact {topic} to {to}, {keep} by {by}"
    if done_before(target, name):
        return CompactReport(topic, to, 0, 0, True, time.monotonic() - begun)
    there = partitions_of(target, to)
    if there and there < partitions:
        raise PipelineError(
            f"{to} has {there} partitions, {topic} has {partitions}: add partitions to "
            f"{to}, or choose a new topic"
        )
    frame = read_topics(
        spark, store, [topic], isolationLevel="read_committed", includeHeaders="true"
    )
    progress(f"counting {topic}")
    read = frame.count()
    keyed = frame.where("key is not null") if by == "key" else frame
    groups = ["partition", "key"] if by == "key" else ["key", "value"]
    choose = f.max_by if keep == "last" else f.min_by
    order = f.struct("timestamp", "partition", "offset") if by != "key" else f.col("offset")
    rest = [column for column in frame.columns if column not in groups]
    kept = (
        keyed.groupBy(*groups)
        .agg(choose(f.struct(*rest), order).alias("record"))
        .select(*groups, "record.*")
        .select(*frame.columns)
    )
    if drop_tombstones:
        kept = kept.where("value is not null")
    if by == "key":
        kept = kept.unionByName(frame.where("key is null"))
    # Ranges of (partition, offset): tasks follow one another as the records did.
    ordered = kept.repartitionByRange("partition", "offset").sortWithinPartitions(
        "partition", "offset"
    )
    progress(f"{name}: writing")
    columns = ordered.drop("topic", "offset", "timestampType")
    kept_count = write_once(columns, target, to, partitions, name)
    return CompactReport(topic, to, read, kept_count, False, time.monotonic() - begun)
