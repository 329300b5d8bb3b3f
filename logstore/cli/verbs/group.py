"""`logstore group`: consumer groups, their members, offsets and lag."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from logstore.cli import exits
from logstore.cli.bounds import DURATION, TIME
from logstore.cli.command import Verbs
from logstore.cli.completion import group_names, topic_names
from logstore.cli.output import Column, number, plain, size
from logstore.cli.session import Integer, Session, output_option, pass_session, store_option, verb
from logstore.cli.text import span_text

if TYPE_CHECKING:
    from logstore.coordinators.group_admin import Groups, OffsetReset

__all__ = ["group_verb"]

GROUP_VERBS = {
    "ls": ("group", "List the groups of a store with their lag."),
    "show": ("group", "Show one group: offsets, lag, members, history."),
    "reset": ("group", "Move a group's committed offsets, in one of Kafka's eight ways."),
    "rm": ("group", "Delete groups and their committed offsets."),
    "rm-offsets": ("group", "Delete committed offsets of some topics."),
    "copy": ("group", "Copy the committed offsets of a group to another."),
}


@click.group(
    "group",
    cls=Verbs,
    verbs=GROUP_VERBS,
    params=[store_option(), output_option()],
    no_args_is_help=True,
)
def group_verb() -> None:
    """List, show, move and delete consumer groups.

    Lag is given in records, in bytes, and in seconds (the age of the oldest unread record).
    """


def _seconds(name: str, heading: str) -> Column:
    show = lambda value: "-" if value is None else span_text(round(value * 1000))  # noqa: E731
    return Column(name, heading, show, right=True)


def _known(groups: Groups, group: str) -> None:
    if group not in groups:
        near = ", ".join(sorted(groups)[:5]) or "none"
        raise exits.CommandError(exits.NOT_FOUND, f"no group {group!r}; there are {near}")


def _offsets(groups: Groups, group: str) -> list[dict[str, Any]]:
    """Return a row for every partition with a committed offset of the group."""
    from logstore.workers.progress import described

    lags = groups.lag(group)
    members = {
        (tp.topic, tp.partition): member.client_id or member.member_id
        for member in groups.describe(group).members
        for tp in member.assignment
    }
    rows = []
    for tp, committed in sorted(groups.committed(group).items()):
        lag = lags.get(tp)
        rows.append(
            {
                "group": group,
                "topic": tp.topic,
                "partition": tp.partition,
                "committed_offset": committed.offset,
                "end_offset": None if lag is None else committed.offset + lag.records,
                "lag_records": None if lag is None else lag.records,
                "lag_bytes": None if lag is None else lag.bytes,
                "lag_seconds": None if lag is None else lag.seconds,
                "member": members.get((tp.topic, tp.partition)),
                "metadata": committed.metadata,
                "progress": described(committed.metadata, committed.offset),
            }
        )
    return rows


@verb("ls")
@pass_session
def ls_verb(session: Session) -> None:
    """List the groups of a store with their lag."""
    from logstore.coordinators.group_admin import Groups

    with session.reading() as store:
        groups = Groups(store)
        rows = []
        for name in sorted(groups):
            description = groups.describe(name)
            offsets = _offsets(groups, name)
            known = [row for row in offsets if row["lag_records"] is not None]
            rows.append(
                {
                    "group": name,
                    "type": description.group_type,
                    "state": description.state,
                    "members": len(description.members),
                    "topics": len({row["topic"] for row in offsets}),
                    "partitions": len(offsets),
                    "lag_records": sum(row["lag_records"] for row in known),
                    "lag_bytes": sum(row["lag_bytes"] for row in known),
                    "lag_seconds": max((row["lag_seconds"] for row in known), default=0.0),
                }
            )
        columns = (
            plain("group"),
            plain("type"),
            plain("state"),
            number("members"),
            number("topics"),
            number("partitions"),
            number("lag_records", "lag"),
            size("lag_bytes", "bytes"),
            _seconds("lag_seconds", "behind"),
        )
        session.output.rows(rows, columns, empty="no groups yet")


@verb("show")
@click.argument("group", shell_complete=group_names)
@click.option("--members", is_flag=True, help="Show the members instead.")
@click.option("--history", is_flag=True, help="Show the changes of its state instead.")
@pass_session
def show_verb(session: Session, group: str, members: bool, history: bool) -> None:
    """Show one group: committed offsets and lag by partition.

    The history is kept in the process that runs the group, not in the store.
    """
    from logstore.coordinators.group_admin import Groups

    with session.reading() as store:
        groups = Groups(store)
        _known(groups, group)
        description = groups.describe(group)
        output = session.output
        if members:
            rows = [
                {**dataclasses.asdict(member), "assignment": [list(tp) for tp in member.assignment]}
                for member in description.members
            ]
            shown = ("member_id", "instance_id", "client_id", "client_host", "topics", "assignment")
            output.rows(rows, [plain(name) for name in shown], empty="it has no members now")
            return
        if history:
            steps = [dataclasses.asdict(step) for step in description.history]
            fields = [plain(name) for name in (steps[0] if steps else ())]
            output.rows(steps, fields, empty="no history in this process")
            return
        offsets = _offsets(groups, group)
        columns = (
            plain("topic"),
            number("partition"),
            number("committed_offset", "committed"),
            number("end_offset", "end"),
            number("lag_records", "lag"),
            size("lag_bytes", "bytes"),
            _seconds("lag_seconds", "behind"),
            plain("member"),
            # Of workers: which records after the committed offset are finished.
            *([plain("progress")] if any(row["progress"] for row in offsets) else []),
        )
        if output.kind == "table":
            word = "generation" if description.group_type == "classic" else "epoch"
            output.line(
                f"{group}: {description.state}, {len(description.members)} members, "
                f"{word} {description.generation}"
            )
        output.rows(offsets, columns, empty="nothing is committed")


def scope_of(words: Iterable[str]) -> list[str | tuple[str, int]]:
    """Parse ``topic`` and ``topic:0,2`` into topics and (topic, partition) pairs."""
    scope: list[str | tuple[str, int]] = []
    for word in words:
        topic, colon, numbers = word.partition(":")
        if not colon:
            scope.append(topic)
            continue
        for text in numbers.split(","):
            if not (text.isascii() and text.isdigit()):
                raise click.UsageError(f"TOPIC:0,1 names partitions by numbers, not {word!r}")
            scope.append((topic, int(text)))
    return scope


@verb("reset")
@click.argument("group", shell_complete=group_names)
@click.argument("scope", shell_complete=topic_names, nargs=-1, metavar="[TOPIC[:0,1]]...")
@click.option("--to-earliest", is_flag=True, help="To the start of the log.")
@click.option("--to-latest", is_flag=True, help="To the end of the log.")
@click.option("--to-current", is_flag=True, help="To the committed offset, clamped to the log.")
@click.option("--to-offset", type=Integer(0), metavar="N", help="To this offset.")
@click.option("--shift-by", type=int, metavar="N", help="Forwards by N, or backwards if negative.")
@click.option(
    "--to-datetime", type=TIME, metavar="TIME", help="To the first record at or after TIME."
)
@click.option(
    "--by-duration",
    type=DURATION,
    metavar="DURATION",
    help="To the first record of the last DURATION.",
)
@click.option(
    "--from-file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="CSV",
    help="To the offsets in this file, as --export prints them.",
)
@click.option("--export", is_flag=True, help="Print topic,partition,offset lines for --from-file.")
@click.option("--yes", is_flag=True, help="Apply the change; without this, only show it.")
@pass_session
def reset_verb(
    session: Session,
    group: str,
    scope: tuple[str, ...],
    to_earliest: bool,
    to_latest: bool,
    to_current: bool,
    to_offset: int | None,
    shift_by: int | None,
    to_datetime: int | None,
    by_duration: int | None,
    from_file: str | None,
    export: bool,
    yes: bool,
) -> int:
    """Move a group's committed offsets, for the given topics or for all.

    Refused while the group has members.
    """
    from logstore.coordinators.group_admin import Groups

    places = {"earliest": to_earliest, "latest": to_latest, "current": to_current}
    ways: dict[str, Any] = {
        **{f"--to-{name}": name for name, given in places.items() if given},
        "--to-offset": to_offset,
        "--shift-by": shift_by,
        "--to-datetime": to_datetime,
        "--by-duration": by_duration,
        "--from-file": from_file,
    }
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise click.UsageError(
            "give one of --to-earliest, --to-latest, --to-current, --to-offset, --shift-by, "
            "--to-datetime, --by-duration, --from-file"
        )
    with session.writing() if yes else session.reading() as store:
        groups = Groups(store)
        if not scope and from_file is None:
            _known(groups, group)
        resets = groups.reset_offsets(
            group,
            scope_of(scope) or None,
            to=next((name for name, chosen in places.items() if chosen), None),
            offset=to_offset,
            shift=shift_by,
            at=to_datetime,
            ago=None if by_duration is None else by_duration / 1000,
            file=from_file,
            dry_run=not yes,
        )
        return _print_resets(session, group, resets, export=export, done=yes)


def _print_resets(
    session: Session, group: str, resets: list[OffsetReset], *, export: bool, done: bool
) -> int:
    output = session.output
    if export:
        for each in resets:
            output.line(f"{each.partition.topic},{each.partition.partition},{each.after}")
        return exits.OK
    rows = [
        {
            "group": group,
            "topic": each.partition.topic,
            "partition": each.partition.partition,
            "before": each.before,
            "after": each.after,
            "start_offset": each.start,
            "end_offset": each.end,
            "done": done,
        }
        for each in resets
    ]
    columns = (
        plain("topic"),
        number("partition"),
        number("before"),
        number("after"),
        number("start_offset", "start"),
        number("end_offset", "end"),
        plain("done"),
    )
    if not rows:
        raise click.UsageError(
            "nothing to reset: the group has no committed offsets there; name topics"
        )
    output.rows(rows, columns)
    return exits.OK if done else output.dry_run()


@verb("rm")
@click.argument("names", shell_complete=group_names, nargs=-1, required=True, metavar="GROUP...")
@click.option("--yes", is_flag=True, help="Delete; without this, only show what would be deleted.")
@pass_session
def rm_verb(session: Session, names: tuple[str, ...], yes: bool) -> int:
    """Delete groups and their committed offsets.  Refused while a group has members."""
    from logstore.coordinators.group_admin import Groups

    with session.writing() if yes else session.reading() as store:
        groups = Groups(store)
        for name in names:
            _known(groups, name)
        rows = [{"group": n, "partitions": len(groups.committed(n)), "deleted": yes} for n in names]
        if yes:
            for name in names:
                groups.delete(name)
        columns = (plain("group"), number("partitions"), plain("deleted"))
        session.output.rows(rows, columns)
    return exits.OK if yes else session.output.dry_run("nothing was deleted: repeat it with --yes")


@verb("rm-offsets")
@click.argument("group", shell_complete=group_names)
@click.argument(
    "scope", shell_complete=topic_names, nargs=-1, required=True, metavar="TOPIC[:0,1]..."
)
@click.option("--yes", is_flag=True, help="Delete; without this, only show what would be deleted.")
@pass_session
def rm_offsets_verb(session: Session, group: str, scope: tuple[str, ...], yes: bool) -> int:
    """Delete committed offsets of some topics.  Refused while a member reads them."""
    from logstore.coordinators.group_admin import Groups

    wanted = scope_of(scope)
    with session.writing() if yes else session.reading() as store:
        groups = Groups(store)
        _known(groups, group)
        chosen = [
            (tp, committed)
            for tp, committed in sorted(groups.committed(group).items())
            if tp.topic in wanted or (tp.topic, tp.partition) in wanted
        ]
        if yes and chosen:
            groups.delete_offsets(group, [(tp.topic, tp.partition) for tp, _ in chosen])
        rows = [
            {
                "group": group,
                "topic": tp.topic,
                "partition": tp.partition,
                "committed_offset": committed.offset,
                "deleted": yes,
            }
            for tp, committed in chosen
        ]
        columns = (
            plain("topic"),
            number("partition"),
            number("committed_offset", "committed"),
            plain("deleted"),
        )
        session.output.rows(rows, columns, empty=f"{group} has committed nothing there")
    return exits.OK if yes else session.output.dry_run("nothing was deleted: repeat it with --yes")


@verb("copy")
@click.argument("source", shell_complete=group_names)
@click.argument("target")
@click.option("--yes", is_flag=True, help="Apply the change; without this, only show it.")
@pass_session
def copy_verb(session: Session, source: str, target: str, yes: bool) -> int:
    """Copy the committed offsets of group SOURCE to TARGET.  Refused while TARGET has members."""
    from logstore.coordinators.group_admin import Groups

    with session.writing() if yes else session.reading() as store:
        groups = Groups(store)
        _known(groups, source)
        wanted, before = groups.committed(source), groups.committed(target)
        if yes and wanted:
            groups.commit(target, dict(wanted))
        rows = []
        for tp, committed in sorted(wanted.items()):
            known = before.get(tp)
            rows.append(
                {
                    "group": target,
                    "topic": tp.topic,
                    "partition": tp.partition,
                    "before": None if known is None else known.offset,
                    "after": committed.offset,
                    "done": yes,
                }
            )
        columns = (plain("topic"), number("partition"), number("before"), number("after"),
                   plain("done"))  # fmt: skip
        session.output.rows(rows, columns, empty=f"{source} has committed nothing")
    return exits.OK if yes else session.output.dry_run()
