"""`logstore verify`: every file looked at, every problem with what it means and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from logstore.cli import exits
from logstore.cli.output import plain
from logstore.cli.progress import Progress
from logstore.cli.session import Session, pass_session, topic_names, verb

if TYPE_CHECKING:
    from logstore import Problem

__all__ = ["verify_verb"]


@verb("verify")
@click.argument("topics", shell_complete=topic_names, nargs=-1, metavar="[TOPIC]...")
@click.option("--quick", is_flag=True, help="Sizes, names and small files only; no batch is read.")
@click.option("--notes", is_flag=True, help="Also what is worth knowing and not wrong.")
@pass_session
def verify_verb(session: Session, topics: tuple[str, ...], quick: bool, notes: bool) -> int:
    """Look at every file of the store; nothing is written.

    Checksums, offsets, indexes, snapshots, checkpoints, digests.  Exit code 4 when a problem is an
    error; what opening for writing mends by itself is a warning.
    """
    with session.reading() as store, Progress("verifying", unit="bytes") as progress:
        problems: list[Problem] = []
        if topics:
            for name in topics:
                for log in store[name]:
                    problems += log.check(
                        deep=not quick, on_corrupt="report", progress=progress.reached
                    )
        else:
            problems = store.check(deep=not quick, on_corrupt="report", progress=progress.reached)
    rows = [p.as_json() for p in problems if notes or p.severity != "note"]
    columns = (
        plain("severity"),
        plain("kind"),
        plain("path"),
        plain("detail"),
        plain("meaning"),
        plain("remedy"),
    )
    session.output.rows(rows, columns, empty="all is as it should be")
    return exits.CORRUPT if any(p.severity == "error" for p in problems) else exits.OK
