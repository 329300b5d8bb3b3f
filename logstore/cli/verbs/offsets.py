"""`logstore offsets`: the offsets of partitions, and the offset of a time."""

from __future__ import annotations

from typing import Any

import click

from logstore.cli.bounds import TIME
from logstore.cli.completion import topic_names
from logstore.cli.output import known_time, number, plain
from logstore.cli.session import Session, partition_option, partitions_of, pass_session, verb

__all__ = ["offsets_verb"]


@verb("offsets")
@click.argument("topics", shell_complete=topic_names, nargs=-1, metavar="[TOPIC]...")
@partition_option
@click.option(
    "--at", type=TIME, metavar="TIME", help="Also show the first offset at or after this time."
)
@pass_session
def offsets_verb(
    session: Session, topics: tuple[str, ...], partition: tuple[int, ...], at: int | None
) -> None:
    """Show start, end, durable and stable offsets of every partition.

    end: the offset of the next record.  durable: records below it survive a power failure.
    stable: read_committed readers read up to it.  max time at: the offset of the record with the
    latest timestamp.
    """
    with session.reading() as store:
        rows = []
        for name in topics or tuple(store):
            for log in partitions_of(store[name], partition):
                newest = max((s.max_timestamp for s in log.segments), default=-1)
                row: dict[str, Any] = {
                    "topic": name,
                    "partition": log.number,
                    "start_offset": log.start_offset,
                    "end_offset": log.end_offset,
                    "durable_offset": log.durable_offset,
                    "last_stable_offset": log.last_stable_offset,
                    "max_timestamp": known_time(newest),
                    "max_timestamp_offset": None if newest < 0 else log.offset_for_time(newest),
                }
                if at is not None:
                    row["offset_at"] = log.offset_for_time(at)
                rows.append(row)
        columns = [
            plain("topic"),
            number("partition"),
            number("start_offset", "start"),
            number("end_offset", "end"),
            number("durable_offset", "durable"),
            number("last_stable_offset", "stable"),
            number("max_timestamp_offset", "max time at"),
        ]
        if at is not None:
            columns.append(number("offset_at", "at time"))
        session.output.rows(rows, columns, empty=f"{store.path} has no topics yet")
