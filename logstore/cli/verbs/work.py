"""`logstore work`: run a command for each record of a topic, many at once, as a member of a group.

The value is the standard input of the command, and the other fields are in its environment.  Exit
code 0 finishes the record, 75 (EX_TEMPFAIL) and all others try it again after a growing delay.
SIGTERM and Ctrl-C wait for the commands that run; a second one does not.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from logstore.cli.session import Session, pass_session, verb

if TYPE_CHECKING:
    from logstore.interceptors import Outgoing
    from logstore.record import Record
    from logstore.workers.context import Context

__all__ = ["work_verb"]

TEMPORARY = 75  # EX_TEMPFAIL of sysexits.h
NOT_IN_A_NAME = re.compile(r"[^A-Z0-9_]")


@verb("work")
@click.argument("topics", nargs=1, metavar="TOPIC[,TOPIC]")
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND [ARGUMENT]...")
@click.option("--group", "-g", required=True, metavar="NAME", help="The consumer group.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), default=8, show_default=True,
              help="Commands that run at once.")  # fmt: skip
@click.option("--order", type=click.Choice(["key", "partition", "none"]), default="key",
              show_default=True, help="Records that run one after the other.")  # fmt: skip
@click.option("--timeout", metavar="DURATION",
              help="Kill a command after this time (30s, 5m), and try it again.")  # fmt: skip
@click.option("--to", "target", metavar="TOPIC",
              help="Append each line of the output to this topic, exactly once.")  # fmt: skip
@click.option("--idle", type=click.FloatRange(min=0), metavar="SECONDS",
              help="End after so many seconds without a record.")  # fmt: skip
@pass_session  # fmt: skip
def work_verb(
    session: Session,
    topics: str,
    command: tuple[str, ...],
    group: str,
    jobs: int,
    order: str,
    timeout: str | None,
    target: str | None,
    idle: float | None,
) -> None:
    """Run COMMAND for each record: its value on stdin, the key and others in the environment.

    LOGSTORE_TOPIC, _PARTITION, _OFFSET, _TIMESTAMP, _KEY, _ATTEMPT and _HEADER_name.  Exit code 0
    finishes the record; after any other one it is tried again, with a growing delay.
    """
    from logstore.times import parse_duration
    from logstore.workers.workers import Workers

    seconds = None if timeout is None else parse_duration(timeout) / 1000
    with session.writing() as store:
        workers = Workers(
            store, *topics.split(","), group_id=group, order=order, concurrency=jobs,
            handler=handler(command, seconds, target),
        )  # fmt: skip
        workers.run(timeout=idle)
        session.output.line(str(workers.stats()))


def handler(
    command: tuple[str, ...], timeout: float | None, target: str | None
) -> Callable[[Record, Context], list[Outgoing] | None]:
    """Return a handler that runs the command."""

    def run(record: Record, context: Context) -> list[Outgoing] | None:
        from logstore.interceptors import Outgoing

        ended = subprocess.run(
            command,
            input=record.value or b"",
            env={**os.environ, **environment(record, context.attempt)},
            stdout=subprocess.PIPE if target else None,
            timeout=timeout,  # kills the command
            check=False,
        )
        if ended.returncode:
            how = "temporary failure, " if ended.returncode == TEMPORARY else ""
            raise ChildProcessError(f"{command[0]}: {how}exit code {ended.returncode}")
        if target is None:
            return None
        return [Outgoing(target, line, record.key) for line in ended.stdout.splitlines()]

    return run


def environment(record: Record, attempt: int) -> dict[str, str]:
    """Return the fields of a record as variables; bytes that are not UTF-8 are kept as they are."""
    found = {
        "LOGSTORE_TOPIC": str(record.topic),
        "LOGSTORE_PARTITION": str(record.partition),
        "LOGSTORE_OFFSET": str(record.offset),
        "LOGSTORE_TIMESTAMP": str(record.timestamp),
        "LOGSTORE_ATTEMPT": str(attempt),
    }
    fields: list[tuple[str, bytes | None]] = []
    if record.key is not None:
        fields.append(("KEY", record.key))
    for name, value in record.headers:
        fields.append((f"HEADER_{NOT_IN_A_NAME.sub('_', name.upper())}", value))
    for name, raw in fields:
        # A variable cannot have a zero byte.
        found[f"LOGSTORE_{name}"] = os.fsdecode((raw or b"").replace(b"\0", b""))
    return found
