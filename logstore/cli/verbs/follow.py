"""`logstore follow`: copy the topics of a directory or of a Kafka into a directory, and keep level.

Every `--every` seconds one row is printed: what was copied, and the lag in records, bytes and
seconds.  SIGINT and SIGTERM end the copy after the step under way; a second one interrupts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from logstore.cli import exits
from logstore.cli.output import number, plain, size
from logstore.cli.session import Session, durability_option, pass_session, verb
from logstore.cli.text import size_text

if TYPE_CHECKING:
    from logstore.replication.follow import Follow, FollowStatus
    from logstore.replication.source import Source

__all__ = ["follow_verb"]


@verb("follow")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=click.Path(file_okay=False))
@click.option("--topics", multiple=True, metavar="PATTERN",
              help="Only topics with this name or pattern (orders*); repeatable.")  # fmt: skip
@click.option("--once", is_flag=True, help="End when DST has what SRC had at the start.")
@click.option("--allow-truncate", is_flag=True,
              help="Cut records from DST that SRC does not have.")  # fmt: skip
@click.option("--trim", is_flag=True, help="Delete in DST what retention deleted in SRC.")
@click.option("--every", type=click.FloatRange(min=0.1), default=10.0, show_default=True,
              metavar="SECONDS", help="How often to print progress and lag.")  # fmt: skip
@durability_option("fsync: DST is synced every second; os: the kernel decides.")
@pass_session  # fmt: skip
def follow_verb(
    session: Session,
    source: str,
    target: str,
    topics: tuple[str, ...],
    once: bool,
    allow_truncate: bool,
    trim: bool,
    every: float,
    durability: str,
) -> None:
    """Copy the topics of SRC into the directory DST, and go on as records arrive.

    SRC is a store's directory, also while another process writes it, or kafka://host:port.  DST
    gets the same batches with the same offsets, and must not be written by anything else.

    \b
    logstore follow data copy
    logstore follow kafka://localhost:9092 copy --topics 'orders*' --once
    """
    from logstore.replication.follow import Follow

    with Follow(
        _source(source), target, topics=topics, allow_truncate=allow_truncate, trim=trim,
        durability=durability,
    ) as follow, _until_signal(follow):  # fmt: skip
        report = _Report(session, follow, every)
        run = follow.catch_up if once else follow.run
        status = run(tick=report.tick)
        if once:
            _check_topics(session, source, topics, status)
        report.end(status)


def _check_topics(
    session: Session, source: str, patterns: tuple[str, ...], status: FollowStatus
) -> None:
    """Refuse patterns of which none fits a topic, and note one that does not."""
    names = {each.topic for each in status.partitions}
    missed = [each for each in patterns if not fnmatch.filter(names, each)]
    if missed:
        words = f"{source} has no topic that fits --topics {' '.join(missed)}"
        if not names:
            raise exits.CommandError(exits.NOT_FOUND, words)
        session.output.note(words)


def _source(text: str) -> str | Source:
    if not text.startswith("kafka://"):
        return text
    from logstore.kafka.source import KafkaSource

    return KafkaSource(text)


@contextlib.contextmanager
def _until_signal(follow: Follow) -> Iterator[None]:
    """End the copy at the first SIGINT or SIGTERM; the second interrupts it."""
    seen = 0

    def signalled(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            raise KeyboardInterrupt
        follow.stop()

    try:
        before = {each: signal.signal(each, signalled) for each in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:
        before = {}  # signal handlers can be set in the main thread only
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class _Report:
    """Prints progress: a line for people, an object with every partition for programs."""

    def __init__(self, session: Session, follow: Follow, every: float) -> None:
        self._output = session.output
        self._follow = follow
        self._every = every
        self._due = time.monotonic() + every

    def tick(self) -> None:
        """Print a row if it is time."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            self._print(self._follow.status())
            self._output.flush()

    def end(self, status: FollowStatus) -> None:
        """Print the last row, and in a table every partition."""
        self._print(status)
        if self._output.kind == "table":
            columns = [
                plain("topic"), number("partition"), number("end_offset", "end"),
                number("source_end_offset", "source end"), number("lag_records", "lag"),
                size("lag_bytes", "lag bytes"), number("copied_records", "copied"),
                number("truncated_records", "cut"),
            ]  # fmt: skip
            rows = [dataclasses.asdict(each) for each in status.partitions]
            self._output.rows(rows, columns, empty="no topic to copy")

    def _print(self, status: FollowStatus) -> None:
        row: dict[str, Any] = {
            "copied_records": status.copied_records,
            "copied_bytes": status.copied_bytes,
            "truncated_records": status.truncated_records,
            "lag_records": status.lag_records,
            "lag_bytes": status.lag_bytes,
            "lag_seconds": round(status.lag_seconds, 3),
            "unreachable_seconds": round(status.unreachable_seconds, 3),
        }
        words = (
            f"copied {status.copied_records:,} records, {size_text(status.copied_bytes)}; behind "
            f"by {status.lag_records:,} records, {_size(status.lag_bytes)}, "
            f"{status.lag_seconds:.1f} s"
        )
        if status.truncated_records:
            words += f"; cut {status.truncated_records:,} records"
        if status.unreachable_seconds:
            words += f"; the source cannot be reached since {status.unreachable_seconds:.1f} s"
        if self._output.kind != "csv":
            row["partitions"] = [
                {**dataclasses.asdict(each), "lag_seconds": round(each.lag_seconds, 3)}
                for each in status.partitions
            ]
        self._output.one(row, words=[words])


def _size(count: int | None) -> str:
    return "? bytes" if count is None else size_text(count)
