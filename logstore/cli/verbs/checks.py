"""`logstore verify` and `repair`: every problem of a store, what it means, and what mends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from logstore.cli import exits
from logstore.cli.completion import topic_names
from logstore.cli.output import plain
from logstore.cli.progress import Progress
from logstore.cli.session import Session, pass_session, verb

if TYPE_CHECKING:
    from logstore import Problem

__all__ = ["repair_verb", "verify_verb"]


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
    rows = [
        {**p.as_json(), "remedy": exits.as_advice(p.remedy)}
        for p in problems
        if notes or p.severity != "note"
    ]
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


@verb("repair")
@click.option("--accept-loss", is_flag=True, help="Give up records that cannot be saved.")
@click.option("--yes", is_flag=True, help="Do it; without this, only say what it would do.")
@pass_session
def repair_verb(session: Session, accept_loss: bool, yes: bool) -> int:
    """Make a damaged store sound again, with the smallest change.

    What can be made anew from the log is.  Records are given up only with --accept-loss.  What is
    cut or replaced stays beside its file, and a receipt says what was done.  Exit code 4 when
    errors are left.
    """
    from logstore.upkeep.repair import repair

    with Progress("looking", unit="bytes") as progress:
        done = repair(
            session.path, dry_run=not yes, accept_loss=accept_loss, progress=progress.reached
        )
    session.output.one(done.as_json(), words=exits.as_advice(str(done)).splitlines())
    code = session.output.dry_run() if done.steps and not yes else exits.OK
    return exits.CORRUPT if any(p.severity == "error" for p in done.left) else code
