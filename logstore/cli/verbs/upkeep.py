"""`logstore retain`, `compact`, `purge`: delete records, and show what is deleted and why.

Without ``--yes`` all three only show the plan.  `retain` plans on a readonly store, concurrently
with a writer.  `compact` and `purge --key` need the store's lock even to plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from logstore.cli import exits
from logstore.cli.bounds import BOUND, DURATION, TIME, Bound
from logstore.cli.completion import topic_names
from logstore.cli.output import moment, number, plain, size
from logstore.cli.progress import Progress
from logstore.cli.session import (
    Integer,
    Session,
    partition_option,
    partitions_of,
    pass_session,
    verb,
)

if TYPE_CHECKING:
    from logstore import CompactionReport, Partition, RetentionDecision, RetentionPolicy, Store

__all__ = ["compact_verb", "purge_verb", "retain_verb"]


def chosen(store: Store, topics: Sequence[str], partitions: Sequence[int]) -> list[Partition]:
    """Return the partitions of the given topics; of all topics if none are given."""
    return [
        log for name in topics or tuple(store) for log in partitions_of(store[name], partitions)
    ]


# ---- retain ----


def decision_row(decision: RetentionDecision, *, by_settings: bool) -> dict[str, Any]:
    """Return a decision as a row.

    `by_settings`: the limits are the topic's settings, so the reason uses Kafka's names for them.
    """
    row = dataclasses.asdict(decision)
    if by_settings:
        reason = decision.reason.replace("max_age_ms", "retention.ms")
        row["reason"] = reason.replace("max_bytes", "retention.bytes")
    return row


@verb("retain")
@click.argument("topics", shell_complete=topic_names, nargs=-1, metavar="[TOPIC]...")
@partition_option
@click.option(
    "--max-age", type=DURATION, metavar="DURATION", help="Instead of the topic's setting."
)
@click.option("--max-bytes", type=Integer(0), metavar="N", help="Instead of the topic's setting.")
@click.option("--max-records", type=Integer(0), metavar="N", help="Keep at least N records.")
@click.option("--now", type=TIME, metavar="TIME", help="Compute ages as of this time.")
@click.option("--deleted", is_flag=True, help="Show only segments to delete.")
@click.option("--yes", is_flag=True, help="Delete; without this, only show what would be deleted.")
@pass_session
def retain_verb(
    session: Session,
    topics: tuple[str, ...],
    partition: tuple[int, ...],
    max_age: int | None,
    max_bytes: int | None,
    max_records: int | None,
    now: int | None,
    deleted: bool,
    yes: bool,
) -> int:
    """Delete segments by retention, with a decision and its reason for every segment.

    The limits are the topic's retention.ms and retention.bytes unless options give others.
    """
    policy: RetentionPolicy | None = None
    if (max_age, max_bytes, max_records) != (None, None, None):
        from logstore import RetentionPolicy

        policy = RetentionPolicy(max_age_ms=max_age, max_bytes=max_bytes, max_records=max_records)
    with session.writing() if yes else session.reading() as store:
        rows = []
        for log in chosen(store, topics, partition):
            for decision in log.enforce(policy, now=now, dry_run=not yes):
                if decision.delete or not deleted:
                    place = {"topic": log.topic, "partition": log.number}
                    rows.append({**place, **decision_row(decision, by_settings=policy is None)})
        columns = (
            plain("topic"),
            number("partition"),
            number("base_offset", "from"),
            number("end_offset", "to"),
            size("size_bytes", "size"),
            plain("decision"),
            moment("eligible_at_ms", "due at"),
            plain("reason"),
        )
        shown = [{**row, "decision": "delete" if row["delete"] else "keep"} for row in rows]
        output = session.output
        output.rows(shown if output.kind == "table" else rows, columns, empty="nothing to delete")
        going = sum(row["size_bytes"] for row in rows if row["delete"])
        if going and not yes:
            return output.dry_run(
                f"{going:,} bytes would be deleted; nothing was changed: repeat it with --yes"
            )
        return exits.OK


# ---- compact ----


def report_row(log: Partition, report: CompactionReport) -> dict[str, Any]:
    """Return a compaction report as one row."""
    row = {"topic": log.topic, "partition": log.number, **dataclasses.asdict(report)}
    row["explanation"] = str(report)
    return row


@verb("compact")
@click.argument("topics", shell_complete=topic_names, nargs=-1, metavar="[TOPIC]...")
@partition_option
@click.option("--force", is_flag=True, help="Ignore cleanup.policy and min.cleanable.dirty.ratio.")
@click.option(
    "--memory",
    type=Integer(64),
    default=128 << 20,
    metavar="BYTES",
    help="Memory for the map of keys.",
)
@click.option("--yes", is_flag=True, help="Compact; without this, only show the plan.")
@pass_session  # fmt: skip
def compact_verb(
    session: Session,
    topics: tuple[str, ...],
    partition: tuple[int, ...],
    force: bool,
    memory: int,
    yes: bool,
) -> int:
    """Keep the newest record of every key, in topics with cleanup.policy=compact.

    The active segment is never compacted.  Without --yes only shows what one pass would do; the
    exit code is 7.
    """
    from logstore.upkeep.compaction import Compactor

    with session.writing() as store:
        rows = []
        output = session.output
        for log in chosen(store, topics, partition):
            if not (force or log.config.compacts):
                if topics:
                    output.note(
                        f"{log.name}: cleanup.policy is {log.config.cleanup_policy}; "
                        f"--force compacts it anyway"
                    )
                continue
            ratio = 0.0 if force else None
            with Progress(f"compacting {log.name}", unit="bytes") as progress:
                compactor = Compactor(
                    log,
                    memory_bytes=memory,
                    min_cleanable_dirty_ratio=ratio,
                    progress=progress.reached,
                )
                rows.append(report_row(log, compactor.run(dry_run=not yes)))
        columns = (
            plain("topic"),
            number("partition"),
            number("records_before"),
            number("records_after"),
            size("bytes_before"),
            size("bytes_after"),
            plain("explanation"),
        )
        output.rows(rows, columns, empty="no topic here has cleanup.policy=compact")
        return output.dry_run() if rows and not yes else exits.OK


# ---- purge ----


@verb("purge")
@click.argument("topic", shell_complete=topic_names)
@partition_option
@click.option("--before", type=BOUND, metavar="WHERE", help="Records below this offset or time.")
@click.option("--key", metavar="KEY", help="Records with this key.")
@click.option("--key-hex", metavar="HEX", help="Records with this key, in hex.")
@click.option("--yes", is_flag=True, help="Delete; without this, only show what would be deleted.")
@pass_session
def purge_verb(
    session: Session,
    topic: str,
    partition: tuple[int, ...],
    before: Bound | None,
    key: str | None,
    key_hex: str | None,
    yes: bool,
) -> int:
    """Delete records now: all before an offset or a time, or all of one key.

    By key, the segments are rewritten and no record of the key is left in the log's files.
    """
    if sum(given is not None for given in (before, key, key_hex)) != 1:
        raise click.UsageError("give one of --before, --key and --key-hex")
    if before is not None:
        _purge_before(session, topic, partition, before, yes)
    else:
        _purge_key(session, topic, partition, _key_bytes(key, key_hex), yes)
    return exits.OK if yes else session.output.dry_run()


def _key_bytes(key: str | None, key_hex: str | None) -> bytes:
    if key is not None:
        return key.encode("utf-8", "surrogateescape")
    try:
        return bytes.fromhex(key_hex or "")
    except ValueError as error:
        raise click.UsageError(f"--key-hex: {error}") from None


def _purge_before(
    session: Session, topic: str, partitions: Sequence[int], before: Bound, yes: bool
) -> None:
    with session.writing() if yes else session.reading() as store:
        rows = []
        logs = partitions_of(store[topic], partitions)
        ends = {log.number: log.end_offset for log in logs}
        bounds = {log.number: before.of(log) for log in logs}
        # Check the bounds of all partitions before the first deletion.
        if all(bounds[number] > end for number, end in ends.items()):
            from logstore.errors import OffsetOutOfRangeError

            last = max(logs, key=lambda log: ends[log.number])
            raise OffsetOutOfRangeError(bounds[last.number], start=last.start_offset,
                                        end=ends[last.number], where=last.name)  # fmt: skip
        for log in logs:
            start = log.start_offset
            wanted = min(bounds[log.number], ends[log.number])
            freed = sum(s.size_bytes for s in log.segments if s.sealed and s.end_offset <= wanted)
            if yes:
                log.trim(max(start, wanted))
            rows.append(
                {
                    "topic": topic,
                    "partition": log.number,
                    "start_offset": start,
                    "new_start_offset": max(start, wanted),
                    "offsets": max(0, wanted - start),
                    "freed_bytes": freed,
                    "done": yes,
                }
            )
        columns = (
            number("partition"),
            number("start_offset", "start"),
            number("new_start_offset", "new start"),
            number("offsets"),
            size("freed_bytes", "freed"),
            plain("done"),
        )
        session.output.rows(rows, columns)


def _purge_key(
    session: Session, topic: str, partitions: Sequence[int], key: bytes, yes: bool
) -> None:
    from logstore.upkeep.compaction import Compactor

    with session.writing() as store:
        rows = []
        for log in partitions_of(store[topic], partitions):
            with Progress(f"searching {log.name}", unit="bytes") as progress:
                report = Compactor(log, progress=progress.reached).purge(key, dry_run=not yes)
            rows.append(report_row(log, report))
        columns = (
            number("partition"),
            number("purged"),
            number("records_before"),
            number("records_after"),
            size("bytes_before"),
            size("bytes_after"),
        )
        session.output.rows(rows, columns)
