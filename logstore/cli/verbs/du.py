"""`logstore du`: disk usage, and how much of it can be deleted."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from logstore.cli.completion import topic_names
from logstore.cli.output import Column, known_time, number, plain, size
from logstore.cli.progress import Progress
from logstore.cli.session import Session, partitions_of, pass_session, verb

if TYPE_CHECKING:
    from logstore import Partition, Segment

__all__ = ["du_verb"]

_SEGMENT_FILE = re.compile(r"([0-9]{1,20})\.(log|index|timeindex|txnindex|snapshot|summary|sum)\Z")
_LEFT_OVER = re.compile(r".*\.(deleted|cleaned|swap|tmp)\Z")


@verb("du")
@click.argument("topics", shell_complete=topic_names, nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--by",
    type=click.Choice(["topic", "partition", "segment"]),
    default="topic",
    show_default=True,
    help="One row for each of these.",
)
@click.option("--ratio", is_flag=True, help="Also show the compression ratio; reads all batches.")
@pass_session  # fmt: skip
def du_verb(session: Session, topics: tuple[str, ...], by: str, ratio: bool) -> None:
    """Show the disk usage of records, indexes and other files.

    reclaimable: the bytes that retention would delete now, and the leftover files of operations
    that were interrupted.
    """
    with session.reading() as store:
        rows: list[dict[str, Any]] = []
        for name in topics or tuple(store):
            parts = [_partition(log, ratio=ratio) for log in partitions_of(store[name])]
            if by == "segment":
                rows += [
                    {"topic": name, "partition": part["partition"], **segment}
                    for part in parts
                    for segment in part["segment_list"]
                ]
            elif by == "partition":
                rows += [
                    {"topic": name, **{k: v for k, v in part.items() if k != "segment_list"}}
                    for part in parts
                ]
            else:
                rows.append({"topic": name, **_sum(parts, ratio=ratio)})
        columns: list[Column] = [plain("topic")]
        if by != "topic":
            columns.append(number("partition"))
        if by == "segment":
            columns += [number("base_offset", "from"), number("end_offset", "to")]
        else:
            columns.append(number("segments"))
        columns += [
            number("offsets"),
            size("log_bytes", "log"),
            size("index_bytes", "indexes"),
            size("other_bytes", "other"),
            size("total_bytes", "total"),
            size("reclaimable_bytes", "reclaimable"),
        ]
        if ratio:
            columns.append(Column("compression_ratio", "ratio", _ratio_text, right=True))
        session.output.rows(rows, columns, empty=f"{store.path} has no topics yet")


def _ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


_SUMS = ("segments", "offsets", "log_bytes", "index_bytes", "other_bytes", "total_bytes",
         "reclaimable_bytes", "uncompressed_bytes")  # fmt: skip


def _sum(parts: Iterable[dict[str, Any]], *, ratio: bool) -> dict[str, Any]:
    parts = list(parts)
    names = [name for name in _SUMS if ratio or name != "uncompressed_bytes"]
    total: dict[str, Any] = {name: sum(part[name] for part in parts) for name in names}
    return _with_ratio({"partitions": len(parts), **total}) if ratio else {
        "partitions": len(parts), **total}  # fmt: skip


def _with_ratio(row: dict[str, Any]) -> dict[str, Any]:
    stored = row["log_bytes"]
    row["compression_ratio"] = round(row["uncompressed_bytes"] / stored, 4) if stored else None
    return row


def _files(path: str | os.PathLike[str]) -> Iterator[tuple[str, int]]:
    """Yield names and sizes of the regular files of a directory.  Links are not followed."""
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # deleted since the listing
            if stat.S_ISREG(found.st_mode):
                yield entry.name, found.st_size


def _partition(log: Partition, *, ratio: bool) -> dict[str, Any]:
    decisions = {each.base_offset: each for each in log.enforce(dry_run=True)}
    indexes: dict[int, int] = {}
    other = left_over = 0
    for name, found in _files(log.path):
        match = _SEGMENT_FILE.match(name)
        if _LEFT_OVER.match(name):
            left_over += found
        elif match is None:
            other += found
        elif match[2] != "log":
            base = int(match[1])
            indexes[base] = indexes.get(base, 0) + found
    segments = []
    for segment in log.segments:
        log_bytes = segment.size_bytes
        index_bytes = indexes.pop(segment.base_offset, 0)
        decision = decisions.get(segment.base_offset)
        going = decision is not None and decision.delete
        row = {
            "base_offset": segment.base_offset,
            "end_offset": segment.end_offset,
            "sealed": segment.sealed,
            "offsets": max(0, segment.end_offset - max(segment.base_offset, log.start_offset)),
            "log_bytes": log_bytes,
            "index_bytes": index_bytes,
            "other_bytes": 0,
            "total_bytes": log_bytes + index_bytes,
            "reclaimable_bytes": log_bytes + index_bytes if going else 0,
            "max_timestamp": known_time(segment.max_timestamp),
        }
        if ratio:
            row["uncompressed_bytes"] = _uncompressed(segment)
            _with_ratio(row)
        segments.append(row)
    other += sum(indexes.values())  # indexes and snapshots that belong to no segment
    total: dict[str, Any] = {
        "partition": log.number,
        "segments": len(segments),
        **{
            name: sum(row[name] for row in segments)
            for name in _SUMS[1:]
            if ratio or name != "uncompressed_bytes"
        },
        "segment_list": segments,
    }
    total["other_bytes"] += other + left_over
    total["total_bytes"] += other + left_over
    total["reclaimable_bytes"] += left_over
    return _with_ratio(total) if ratio else total


def _uncompressed(segment: Segment) -> int:
    """Return the size that the segment's batches would have without compression."""
    from logstore.format.batch import HEADER_BYTES, BatchHeader
    from logstore.format.codecs import decompress

    total = 0
    limit = segment.config.max_decompressed_message_bytes
    scan = segment.scan(on_corrupt="skip")
    with Progress("reading", unit="bytes", total=segment.size_bytes) as progress:
        while (raw := scan.next_raw()) is not None:
            progress.add(len(raw))
            header = BatchHeader.parse(raw)
            if header.codec:
                payload = decompress(header.codec, memoryview(raw)[HEADER_BYTES:], limit)
                total += HEADER_BYTES + len(payload)
            else:
                total += len(raw)
    return total
