"""`logstore topic`: list, show, create, alter, delete and copy topics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from logstore.cli import exits
from logstore.cli.command import Verbs
from logstore.cli.completion import setting_names, topic_names
from logstore.cli.output import known_time, moment, number, plain, size
from logstore.cli.progress import Progress
from logstore.cli.session import (
    Integer,
    Session,
    output_option,
    pass_session,
    store_option,
    verb,
)
from logstore.cli.text import parse_size, size_text, span_text
from logstore.errors import LogStoreError
from logstore.times import parse_duration, time_text

if TYPE_CHECKING:
    from logstore import Partition, Topic

__all__ = ["topic_verb"]

COPY_BYTES = 4 << 20  # raw batches in one append

TOPIC_VERBS = {
    "ls": ("topic", "List the topics of a store."),
    "show": ("topic", "Show one topic: partitions, offsets, sizes, times, settings."),
    "create": ("topic", "Create a topic, and the store if it is missing."),
    "alter": ("topic", "Change settings, or add partitions."),
    "rm": ("topic", "Delete a topic and its records."),
    "clone": ("topic", "Copy a topic to a new name, with its offsets."),
}


@click.group(
    "topic",
    cls=Verbs,
    verbs=TOPIC_VERBS,
    params=[store_option(), output_option()],
    no_args_is_help=True,
)
def topic_verb() -> None:
    """List, show, create, alter, delete and copy topics."""


def settings_of(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse ``name=value`` pairs into settings; ``name=`` resets to the default.

    A setting in ms takes a duration (7d), one in bytes takes a size (1MiB).
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise click.UsageError(f"a setting is NAME=VALUE, not {pair!r}")
        settings[name.strip()] = _in_units(name.strip(), value.strip()) or None
    return settings


def _in_units(name: str, value: str) -> str:
    """Return a duration as milliseconds and a size as bytes, where the setting is one."""
    if name.replace("_", ".").endswith(".ms") and value[-1:].isalpha():
        return str(parse_duration(value))
    if name.replace("_", ".").endswith(".bytes") and value[-1:].isalpha():
        return str(parse_size(value))
    return value


def totals(topic: Topic) -> dict[str, Any]:
    """Return the totals of a topic as one row."""
    partitions = topic.describe().partitions
    firsts = [p.first_timestamp for p in partitions if p.first_timestamp >= 0]
    lasts = [p.last_timestamp for p in partitions if p.last_timestamp >= 0]
    return {
        "topic": topic.name,
        "partitions": len(partitions),
        "offsets": sum(p.end_offset - p.start_offset for p in partitions),
        "size_bytes": sum(p.size_bytes for p in partitions),
        "segments": sum(p.segments for p in partitions),
        "oldest": min(firsts, default=None),
        "newest": max(lasts, default=None),
        "cleanup_policy": topic.config.cleanup_policy,
    }


@verb("ls")
@click.option("-q", "--quiet", is_flag=True, help="Print only names, one per line.")
@pass_session
def ls_verb(session: Session, quiet: bool) -> int:
    """List the topics of a store.

    OFFSETS is the end minus the start.  Compaction, aborts and markers leave fewer records than
    offsets; `logstore read TOPIC --count` counts the records.  If a topic cannot be read, a column
    shows the error and the exit code is that of the error.
    """
    code = exits.OK
    with session.reading() as store:
        if quiet:
            for name in store:
                session.output.line(name)
            return code
        rows: list[dict[str, Any]] = []
        for name in store:
            try:
                rows.append(totals(store[name]))
            except (LogStoreError, OSError) as error:
                rows.append({"topic": name, "error": exits.message_of(error)})
                code = max(code, exits.exit_code(error))
        columns = [
            plain("topic"),
            number("partitions"),
            number("offsets"),
            size("size_bytes", "size"),
            moment("oldest"),
            moment("newest"),
            plain("cleanup_policy", "cleanup"),
        ]
        if code:
            names = list(dict.fromkeys([name for row in rows for name in row if name != "error"]))
            rows = [{name: row.get(name) for name in (*names, "error")} for row in rows]
            columns.append(plain("error"))
        session.output.rows(rows, columns, empty=f"{store.path} has no topics yet")
    return code


@verb("show")
@click.argument("topic", shell_complete=topic_names)
@pass_session
def show_verb(session: Session, topic: str) -> None:
    """Show one topic: partitions, offsets, sizes, times, settings."""
    with session.reading() as store:
        found = store[topic]
        now = time.time_ns() // 1_000_000
        description = found.describe()
        partitions = [_partition_row(found[p.partition], p) for p in description.partitions]
        output = session.output
        row = {
            **totals(found),
            "id": str(description.id) if description.id else None,
            "config": dict(description.config),
            "next_deletion": min(
                (p["next_deletion"] for p in partitions if p["next_deletion"] is not None),
                default=None,
            ),
            "partition_list": partitions,
        }
        if output.kind != "table":
            output.one(row)
            return
        words = [
            ("topic", topic),
            ("id", row["id"] or "-"),
            ("size", f"{size_text(row['size_bytes'])} in {row['segments']:,} segments"),
            ("offsets", f"{row['offsets']:,}"),
            ("times", f"{_when(row['oldest'])} to {_when(row['newest'])}"),
            ("rate", _rate(row)),
            ("cleanup", row["cleanup_policy"]),
            ("next deletion", _deletion(row["next_deletion"], now)),
        ]
        words += [(name, str(value)) for name, value in sorted(row["config"].items())]
        width = max(len(name) for name, _ in words) + 1
        output.one(row, words=(f"{name:<{width}}{text}" for name, text in words))
        output.line("")
        columns = (
            number("partition"),
            number("start_offset", "start"),
            number("end_offset", "end"),
            number("durable_offset", "durable"),
            number("segments"),
            size("size_bytes", "size"),
            moment("oldest"),
            moment("newest"),
        )
        output.rows(partitions, columns)


def _when(time_ms: int | None) -> str:
    return "-" if time_ms is None else time_text(time_ms)


def _rate(row: dict[str, Any]) -> str:
    span = (row["newest"] or 0) - (row["oldest"] or 0)
    if span <= 0:
        return "-"
    rate = row["offsets"] * 1000 / span
    return f"{rate:,.1f} offsets/s between oldest and newest, {span_text(span)}"


def _deletion(when: int | None, now: int) -> str:
    if when is None:
        return "none in sight"
    return "due" if when <= now else f"{time_text(when)}, in {span_text(when - now)}"


def _partition_row(log: Partition, description: Any) -> dict[str, Any]:
    decisions = log.enforce(dry_run=True)
    due = [0 if each.delete else each.eligible_at_ms for each in decisions]
    times = [each for each in due if each is not None]
    return {
        "partition": description.partition,
        "start_offset": description.start_offset,
        "end_offset": description.end_offset,
        "durable_offset": description.durable_offset,
        "last_stable_offset": log.last_stable_offset,
        "segments": description.segments,
        "size_bytes": description.size_bytes,
        "oldest": known_time(description.first_timestamp),
        "newest": known_time(description.last_timestamp),
        "next_deletion": min(times, default=None),
    }


def config_option(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option("-c", "--config", multiple=True, metavar="NAME=VALUE",
                        shell_complete=setting_names, help=help)  # fmt: skip


@verb("create")
@click.argument("topic", shell_complete=topic_names)
@click.option("-p", "--partitions", type=Integer(1), default=1, show_default=True)
@config_option("A setting, by Kafka's name: retention.ms=7d, segment.bytes=64MiB.")
@click.option("--replication-factor", type=Integer(1), default=1, hidden=True)
@click.option("--if-not-exists", is_flag=True, help="Do nothing if the topic exists.")
@pass_session
def create_verb(
    session: Session,
    topic: str,
    partitions: int,
    config: tuple[str, ...],
    replication_factor: int,
    if_not_exists: bool,
) -> None:
    """Create a topic, and the store if it is missing."""
    if replication_factor > 1:
        raise click.UsageError(
            f"one store has one copy of each record, not {replication_factor}; in a cluster: "
            f"`logstore cluster create {topic} --replication-factor {replication_factor}`"
        )
    settings = settings_of(config)
    with session.writing(create=True) as store:
        there = topic in store
        if there and not if_not_exists:
            raise exits.CommandError(
                exits.BUSY,
                f"topic {topic!r} exists in {store.path}; --if-not-exists accepts it unchanged",
            )
        made = store.create_topic(topic, partitions, config=settings, exist_ok=True)
        row = {"topic": topic, "partitions": len(made), "created": not there}
        did = "exists already" if there else "created"
        session.output.one(row, words=[f"{topic}: {did}, {len(made)} partitions"])


@verb("alter")
@click.argument("topic", shell_complete=topic_names)
@config_option("A setting; NAME= resets it to the default.")
@click.option("--add-partitions", type=Integer(1), metavar="N", help="Add N partitions.")
@pass_session
def alter_verb(
    session: Session, topic: str, config: tuple[str, ...], add_partitions: int | None
) -> None:
    """Change settings, or add partitions.

    With more partitions, a key may be written to another partition than before.
    """
    settings = settings_of(config)
    if not settings and add_partitions is None:
        raise click.UsageError("nothing to change: give -c NAME=VALUE or --add-partitions N")
    with session.writing() as store:
        found = store[topic]
        before = found.config.as_dict()
        if settings:
            found.alter(settings)
        if add_partitions is not None:
            found.add_partitions(add_partitions)
        after = found.config.as_dict()
        changed = {name: after[name] for name in after if after[name] != before[name]}
        row = {"topic": topic, "partitions": len(found), "changed": changed}
        words = [f"{name}: {before[name]} -> {after[name]}" for name in changed]
        if add_partitions is not None:
            words.append(f"partitions: {len(found) - add_partitions} -> {len(found)}")
        session.output.one(row, words=words or ["no setting changed"])


@verb("rm")
@click.argument("topics", shell_complete=topic_names, nargs=-1, required=True, metavar="TOPIC...")
@click.option("--yes", is_flag=True, help="Delete; without this, only show what would be deleted.")
@pass_session
def rm_verb(session: Session, topics: tuple[str, ...], yes: bool) -> int:
    """Delete topics and their records.

    Without --yes only shows what would be deleted; the exit code is 7.
    """
    store = session.writing() if yes else session.reading()
    with store:
        rows = [{**totals(store[name]), "deleted": yes} for name in topics]
        if yes:
            for name in topics:
                store.delete_topic(name)
        columns = (plain("topic"), number("partitions"), number("offsets"),
                   size("size_bytes", "size"), plain("deleted"))  # fmt: skip
        session.output.rows(rows, columns)
    return exits.OK if yes else session.output.dry_run("nothing was deleted: repeat it with --yes")


@verb("clone")
@click.argument("source", shell_complete=topic_names)
@click.argument("target")
@pass_session
def clone_verb(session: Session, source: str, target: str) -> None:
    """Copy a topic to a new name, with its offsets and settings.

    Batches are copied byte for byte.  The copy is independent of the original.  If the command is
    interrupted the copy is incomplete; delete it with `topic rm`.
    """
    with session.writing() as store:
        original = store[source]
        settings = original.config.changed()
        numbers = [
            log.number for log in original
        ]  # a broker's directory may hold only some of the partitions
        copy = store.create_topic(target, max(numbers) + 1, config=settings)
        total = original.describe().size_bytes
        copied = 0
        with Progress("copying", unit="bytes", total=total) as progress:
            for log in original:
                copied += _copy(log, copy[log.number], progress)
        row = {"source": source, "target": target, "partitions": len(copy), "size_bytes": copied}
        session.output.one(row, words=[f"{target}: {size_text(copied)} copied"])


def _copy(source: Partition, target: Partition, progress: Progress) -> int:
    held: list[bytes] = []
    size_bytes = copied = 0

    def hand_over() -> None:
        target.append_batch(b"".join(held), origin="follower", durability="os")
        held.clear()

    for raw in source.scan().batches():
        held.append(raw)
        size_bytes += len(raw)
        progress.add(len(raw))
        if size_bytes >= COPY_BYTES:
            hand_over()
            copied, size_bytes = copied + size_bytes, 0
    if held:
        hand_over()
    if source.start_offset <= target.end_offset:
        target.trim(source.start_offset)
    target.sync()
    return copied + size_bytes
