"""export_parquet: topics into partitioned Parquet, incrementally and exactly once.

Every run reads the records since the last run and writes them below ``<target>/_logstore/``, which
Parquet readers ignore.  Then one file, the plan, is written: it names the new files and the start
of the next run.  The files are moved to their places, the position is stored, the plan is deleted.
A run that is killed before the plan is written has no effect; one that is killed later is finished
by the next run.  No reader sees a record twice or a part of a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import logstore
from logstore import Store
from pyspark_logstore.pipelines.reports import (
    PipelineError,
    Progress,
    Report,
    quiet,
    read_topics,
    units,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["ExportReport", "export_parquet"]

ASIDE, POSITION, PLAN = "_logstore", "position.json", "plan.json"
GRAINS = {"day": "yyyy-MM-dd", "hour": "yyyy-MM-dd-HH", "none": None}


@dataclasses.dataclass(frozen=True)
class ExportReport(Report):
    """What this run added: records, files, bytes, and the offsets [from, to) of each partition."""

    target: str
    records: int
    files: int
    size_bytes: int
    offsets: dict[str, dict[str, tuple[int, int]]]
    finished: bool  # an earlier run was finished first
    seconds: float

    def __str__(self) -> str:
        first = "finished an earlier run; " if self.finished else ""
        return (
            f"{first}{self.records} records in {self.files} files, {units(self.size_bytes)}, "
            f"in {self.seconds:.1f} s"
        )


def export_parquet(
    spark: SparkSession,
    store: str | Path,
    target: str | Path,
    topics: list[str],
    *,
    by: str = "day",
    decode: bool = False,
    compression: str = "zstd",
    allow_loss: bool = False,
    progress: Progress = quiet,
) -> ExportReport:
    """Export the committed records since the last run to Parquet files below `target`.

    Files are in ``topic=.../date=...`` (`by` "day", "hour" or "none", of the records' times in
    UTC).  `decode` writes keys and values as text if they are UTF-8.  `allow_loss` continues if
    retention has deleted records that were never exported.
    """
    from pyspark.sql import functions as f

    if by not in GRAINS:
        raise PipelineError(f"by must be one of {', '.join(GRAINS)}, not {by!r}")
    begun = time.monotonic()
    root = Path(target).absolute()
    aside = root / ASIDE
    aside.mkdir(parents=True, exist_ok=True)
    with _alone(aside):
        finished = _finish(root)
        for left in aside.glob("run-*"):  # of runs that never got as far as a plan
            shutil.rmtree(left)
        ranges, ids = _ranges(Path(store), topics, _position(aside), allow_loss, progress)
        new = sum(end - start for parts in ranges.values() for start, end in parts.values())
        if not new:
            _write_position(aside, ranges, ids)
            return ExportReport(
                str(root), 0, 0, 0, _named(ranges), finished, time.monotonic() - begun
            )
        progress(f"{new} offsets of {', '.join(topics)}")
        frame = read_topics(
            spark,
            store,
            topics,
            startingOffsets=json.dumps(_bounds(ranges, 0)),
            endingOffsets=json.dumps(_bounds(ranges, 1)),
            isolationLevel="read_committed",
            includeHeaders="true",
        )
        if decode:
            for column in ("key", "value"):
                frame = frame.withColumn(column, f.decode(f.col(column), "UTF-8"))
        layout = ["topic"]
        pattern = GRAINS[by]
        if pattern is not None:
            zone = spark.conf.get("spark.sql.session.timeZone") or "UTC"
            utc = f.to_utc_timestamp("timestamp", zone)
            frame = frame.withColumn("date", f.date_format(utc, pattern))
            layout.append("date")
        run = aside / f"run-{uuid.uuid4().hex}"
        writer = frame.write.option("compression", compression).partitionBy(*layout)
        writer.parquet(f"file://{run}")
        files = sorted(str(p.relative_to(run)) for p in run.rglob("*.parquet"))
        records, size = _count(run, files)
        progress(f"{records} records in {len(files)} files, {units(size)}: moving")
        for name in files:
            _sync(run / name)
        plan = {"run": run.name, "files": files, "next": _bounds(ranges, 1), "ids": ids}
        _replace(aside / PLAN, plan)  # the decision
        _finish(root)
    return ExportReport(
        str(root), records, len(files), size, _named(ranges), finished, time.monotonic() - begun
    )


# ---- what there is to do ----


def _ranges(
    store: Path, topics: list[str], position: dict[str, Any], allow_loss: bool, progress: Progress
) -> tuple[dict[str, dict[int, tuple[int, int]]], dict[str, str]]:
    ranges: dict[str, dict[int, tuple[int, int]]] = {}
    ids: dict[str, str] = {}
    with logstore.open(store, readonly=True) as opened:
        for topic in topics:
            ids[topic] = str(opened[topic].id)
            known = position["ids"].get(topic)
            if known not in (None, ids[topic]):
                raise PipelineError(
                    f"topic {topic!r} was deleted and made again since the last export: export it "
                    f"to another directory"
                )
            ranges[topic] = _ranges_of(opened, topic, position, allow_loss, progress)
    return ranges, {**position["ids"], **ids}


def _ranges_of(
    store: Store, topic: str, position: dict[str, Any], allow_loss: bool, progress: Progress
) -> dict[int, tuple[int, int]]:
    found = {}
    for partition in store[topic]:
        reached = position["next"].get(topic, {}).get(str(partition.number))
        start = partition.start_offset if reached is None else max(reached, partition.start_offset)
        if reached is not None and start > reached:
            lost = (
                f"{topic}-{partition.number}: offsets {reached} to {start - 1} were deleted before "
                f"they were exported"
            )
            if not allow_loss:
                raise PipelineError(f"{lost}: export more often, or allow the loss")
            progress(lost)
        found[partition.number] = (start, max(start, partition.last_stable_offset))
    return found


def _bounds(ranges: dict[str, dict[int, tuple[int, int]]], side: int) -> dict[str, dict[str, int]]:
    return {
        topic: {str(number): ends[side] for number, ends in parts.items()}
        for topic, parts in ranges.items()
    }


def _named(
    ranges: dict[str, dict[int, tuple[int, int]]],
) -> dict[str, dict[str, tuple[int, int]]]:
    return {t: {str(n): ends for n, ends in parts.items()} for t, parts in ranges.items()}


def _count(run: Path, files: list[str]) -> tuple[int, int]:
    from pyarrow import parquet

    rows = sum(parquet.read_metadata(run / name).num_rows for name in files)
    return rows, sum((run / name).stat().st_size for name in files)


# ---- files ----


@contextlib.contextmanager
def _alone(aside: Path) -> Iterator[None]:
    """One export at a time into a directory."""
    with open(aside / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(
                f"another export writes to {aside.parent}: wait for its end"
            ) from None
        yield


def _finish(root: Path) -> bool:
    """Carry out the plan, if there is one; return whether.  Idempotent from any point."""
    aside = root / ASIDE
    try:
        plan = json.loads((aside / PLAN).read_bytes())
    except FileNotFoundError:
        return False
    run = aside / plan["run"]
    directories = {root}
    for name in plan["files"]:
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        directories |= {place.parent, place.parent.parent}
        if (run / name).exists():
            os.replace(run / name, place)
        elif not place.exists():
            raise PipelineError(
                f"{run / name} is missing, which a decided export needs: put it back from a copy, "
                f"or remove {aside / PLAN} to export its records again"
            )
    for directory in directories:
        _sync(directory)
    position = _position(aside)
    _replace(
        aside / POSITION,
        {"next": {**position["next"], **plan["next"]}, "ids": {**position["ids"], **plan["ids"]}},
    )
    (aside / PLAN).unlink()
    shutil.rmtree(run, ignore_errors=True)
    return True


def _position(aside: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((aside / POSITION).read_bytes())
    except FileNotFoundError:
        return {"next": {}, "ids": {}}
    return found


def _write_position(
    aside: Path, ranges: dict[str, dict[int, tuple[int, int]]], ids: dict[str, str]
) -> None:
    known = _position(aside)
    _replace(aside / POSITION, {"next": {**known["next"], **_bounds(ranges, 1)}, "ids": ids})


def _replace(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
