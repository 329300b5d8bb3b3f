"""verify: every checksum, record, gap and index of a store, segment by segment, in parallel.

Each task opens the store read-only and reads segment by segment.  Damage is recorded with its
position, and reading continues after it.  A gap is a problem only in a topic that is never
compacted, because its offsets are consecutive.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import logstore
from logstore import BatchHeader, CorruptLogError, LogStoreError, Partition
from pyspark_logstore.pipelines.reports import PipelineError, Progress, Report, quiet, units

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

__all__ = ["Fault", "VerifyReport", "verify"]

SCHEMA = (
    "topic string, partition int, base long, records long, bytes long, kind string, "
    "first long, last long, what string"
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something wrong: damage, gap, index or unreadable; its offsets, and what it is."""

    topic: str
    partition: int
    kind: str
    first_offset: int
    last_offset: int
    what: str

    def __str__(self) -> str:
        return (
            f"{self.kind:<10} {self.topic}-{self.partition} offsets {self.first_offset} to "
            f"{self.last_offset}: {self.what}"
        )


@dataclasses.dataclass(frozen=True)
class VerifyReport(Report):
    """What was read, and every fault in the order of topics and offsets."""

    topics: int
    partitions: int
    segments: int
    records: int
    size_bytes: int
    faults: tuple[Fault, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        lines = [
            f"{self.topics} topics, {self.partitions} partitions, {self.segments} segments: "
            f"{self.records} records, {units(self.size_bytes)} in {self.seconds:.1f} s",
            *map(str, self.faults),
            f"{len(self.faults)} faults" if self.faults else "all sound",
        ]
        return "\n".join(lines)


def verify(
    spark: SparkSession,
    store: str | Path,
    topics: list[str] | None = None,
    *,
    progress: Progress = quiet,
) -> VerifyReport:
    """Read and check these topics, or all; return a report of the problems."""
    begun = time.monotonic()
    path = str(Path(store).absolute())
    work: list[tuple[str, int, int, int, int]] = []
    faults: list[Fault] = []
    partitions = 0
    with logstore.open(path, readonly=True) as opened:
        names = list(opened) if topics is None else topics
        for topic in names:
            for number in range(len(opened[topic])):
                partitions += 1
                try:
                    log = opened[topic][number]
                    for segment in log.segments:
                        work.append(
                            (topic, number, segment.base_offset, segment.end_offset,
                             segment.size_bytes)
                        )  # fmt: skip
                except (LogStoreError, OSError) as error:
                    faults.append(Fault(topic, number, "unreadable", -1, -1, str(error)))
    if not names:
        raise PipelineError(f"there is no topic in {path}")
    total = sum(size for *_, size in work)
    progress(f"{len(work)} segments, {units(total)}")
    rows = []
    if work:
        # The largest first, dealt round: tasks end at about the same time.
        work.sort(key=lambda item: -item[4])
        slices = max(1, min(len(work), 4 * spark.sparkContext.defaultParallelism))
        frame = spark.createDataFrame(work, "topic string, partition int, base long, stop long, "
                                            "bytes long")  # fmt: skip

        def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from check_segments(path, batches)

        rows = frame.repartition(slices).mapInArrow(check, SCHEMA).collect()
    records = sum(row["records"] for row in rows if row["kind"] == "read")
    size = sum(row["bytes"] for row in rows if row["kind"] == "read")
    faults += [
        Fault(row["topic"], row["partition"], row["kind"], row["first"], row["last"], row["what"])
        for row in rows
        if row["kind"] != "read"
    ]
    faults += _gaps_between(work, path)
    faults.sort(key=lambda fault: (fault.topic, fault.partition, fault.first_offset, fault.kind))
    return VerifyReport(
        len(names), partitions, len(work), records, size, tuple(faults), time.monotonic() - begun
    )


def _gaps_between(work: list[tuple[str, int, int, int, int]], path: str) -> list[Fault]:
    """Offsets that are missing between two segments: a file is gone."""
    faults = []
    ends: dict[tuple[str, int], int] = {}
    with logstore.open(path, readonly=True) as opened:
        for topic, number, base, end, _ in sorted(work):
            before = ends.get((topic, number), base)
            if base > before and not opened[topic].config.compacts:
                what = "no segment holds these offsets: a file is missing"
                faults.append(Fault(topic, number, "gap", before, base - 1, what))
            ends[topic, number] = max(before, end)
    return faults


# ---- in a task ----


def check_segments(path: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For mapInArrow: rows of what was read and of what is wrong."""
    import pyarrow as pa

    kinds = {"string": pa.string(), "int": pa.int32(), "long": pa.int64()}
    columns = [column.split() for column in SCHEMA.split(", ")]
    schema = pa.schema([(name, kinds[kind]) for name, kind in columns])
    try:
        store = logstore.open(path, readonly=True)
    except FileNotFoundError as error:
        raise PipelineError(
            f"a task cannot see {path}: all executors need the store under the same path"
        ) from error
    with store:
        for batch in batches:
            for item in batch.to_pylist():
                log = store[item["topic"]][item["partition"]]
                rows = list(_check_segment(log, item))
                yield pa.RecordBatch.from_pylist(rows, schema)


def _check_segment(log: Partition, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    place = {"topic": item["topic"], "partition": item["partition"], "base": item["base"]}
    records, faults, gaps = 0, [], False
    start, stop = max(item["base"], log.start_offset), max(item["stop"], log.start_offset)
    try:
        scan = log.scan(start, stop, on_corrupt="skip", on_lost="skip")
        expected = start
        for chunk in scan.columns(fields=["offset"]):
            offsets = chunk.offsets
            assert offsets is not None
            records += len(offsets)
            gaps = gaps or int(offsets[-1]) - expected + 1 != len(offsets)
            expected = int(offsets[-1]) + 1
        gaps = gaps or expected < stop
        faults = [
            ("damage", skip.offsets.start, skip.offsets.stop - 1,
             f"{skip.reason} ({skip.path} at byte {skip.position})")
            for skip in scan.skipped
        ]  # fmt: skip
        if gaps and not faults and not log.config.compacts:
            faults += _gaps(log, start, stop)
        if not faults:
            faults += _index_faults(log, item["base"])
    except (LogStoreError, OSError) as error:
        faults.append(("unreadable", start, stop - 1, str(error)))
    yield {**place, "records": records, "bytes": item["bytes"], "kind": "read", "first": start,
           "last": stop - 1, "what": ""}  # fmt: skip
    for kind, first, last, what in faults:
        yield {**place, "records": 0, "bytes": 0, "kind": kind, "first": first, "last": last,
               "what": what}  # fmt: skip


def _gaps(log: Partition, start: int, stop: int) -> list[tuple[str, int, int, str]]:
    """Offsets that no batch covers; markers of transactions and aborted records are batches too."""
    found, expected = [], start
    for raw in log.scan(start, stop, on_corrupt="skip", on_lost="skip").batches():
        header = BatchHeader.parse(raw)
        if header.base_offset > expected:
            found.append(("gap", expected, header.base_offset - 1, "no batch holds these offsets"))
        expected = max(expected, header.next_offset)
    if expected < stop:
        found.append(("gap", expected, stop - 1, "no batch holds these offsets"))
    return found


def _index_faults(log: Partition, base: int) -> list[tuple[str, int, int, str]]:
    for segment in log.segments:
        if segment.base_offset == base:
            try:
                segment.check()
            except CorruptLogError as error:
                return [("index", base, segment.end_offset - 1, str(error))]
    return []
