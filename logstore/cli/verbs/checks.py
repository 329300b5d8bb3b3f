"""`logstore verify` and `repair`: find the problems of a store, and repair them."""

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
@click.option("--quick", is_flag=True, help="Check sizes, names and small files; read no batch.")
@click.option("--notes", is_flag=True, help="Also print notes, which are not problems.")
@pass_session
def verify_verb(session: Session, topics: tuple[str, ...], quick: bool, notes: bool) -> int:
    """Check every file of the store, or of TOPICs.  Nothing is written.

    Checks checksums, offsets, indexes, snapshots, checkpoints and digests.  The exit code is 4 if a
    problem is an error.  A problem that the next open for writing repairs is a warning.
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
    session.output.rows(rows, columns, empty="no problems found")
    return exits.CORRUPT if any(p.severity == "error" for p in problems) else exits.OK


@verb("repair")
@click.option("--accept-loss", is_flag=True, help="Allow the loss of records that cannot be read.")
@click.option("--yes", is_flag=True, help="Repair; without this, only show the steps.")
@pass_session
def repair_verb(session: Session, accept_loss: bool, yes: bool) -> int:
    """Repair a damaged store with the smallest change.

    Indexes, snapshots and checkpoints are rebuilt from the log.  Records are lost only with
    --accept-loss.  Bytes that are cut or replaced are kept in a file in the same directory, and a
    receipt lists the steps.  The exit code is 4 if errors remain.
    """
    from logstore.upkeep.repair import repair

    with Progress("checking", unit="bytes") as progress:
        done = repair(
            session.path, dry_run=not yes, accept_loss=accept_loss, progress=progress.reached
        )
    session.output.one(done.as_json(), words=exits.as_advice(str(done)).splitlines())
    code = session.output.dry_run() if done.steps and not yes else exits.OK
    return exits.CORRUPT if any(p.severity == "error" for p in done.left) else code
