"""`logstore txn`: list transactions, and abort those that hold the last stable offset back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from logstore.cli import exits
from logstore.cli.command import Verbs
from logstore.cli.output import Column, known_time, moment, number, plain
from logstore.cli.session import Integer, Session, output_option, pass_session, store_option, verb
from logstore.cli.text import span_text

if TYPE_CHECKING:
    from logstore.coordinators.transaction_coordinator import Transactions
    from logstore.coordinators.transaction_state import TransactionDescription

__all__ = ["txn_verb"]

TXN_VERBS = {
    "ls": ("txn", "List transactional ids and their states; find hanging transactions."),
    "show": ("txn", "Show one transactional id."),
    "abort": ("txn", "Abort an open transaction."),
}


@click.group(
    "txn",
    cls=Verbs,
    verbs=TXN_VERBS,
    params=[store_option(), output_option()],
    no_args_is_help=True,
)
def txn_verb() -> None:
    """List, show and abort transactions."""


def _row(found: TransactionDescription) -> dict[str, Any]:
    now = time.time_ns() // 1_000_000
    return {
        "transactional_id": found.transactional_id,
        "state": found.state,
        "open": found.is_open,
        "producer_id": found.producer_id,
        "producer_epoch": found.producer_epoch,
        "timeout_ms": found.timeout_ms,
        "started": known_time(found.start_ms),
        "updated": known_time(found.last_update_ms),
        "open_ms": max(0, now - found.start_ms) if found.is_open and found.start_ms >= 0 else None,
        "partitions": [f"{topic}-{partition}" for topic, partition in found.partitions],
        "coordinator_partition": found.coordinator_partition,
    }


_COLUMNS = (
    plain("transactional_id", "id"),
    plain("state"),
    plain("producer_id", "producer"),
    number("producer_epoch", "epoch"),
    moment("started"),
    Column("open_ms", "open for", lambda v: "-" if v is None else span_text(v), right=True),
    Column("partitions", "partitions", lambda names: " ".join(names)),
)


def _described(transactions: Transactions, name: str) -> TransactionDescription:
    try:
        return transactions.describe(name)
    except LookupError as error:
        raise exits.CommandError(exits.NOT_FOUND, str(error)) from None


@verb("ls")
@click.option("--open", "open_only", is_flag=True, help="Only open transactions.")
@click.option("--hanging", is_flag=True, help="Open transactions in the logs without an id.")
@pass_session
def ls_verb(session: Session, open_only: bool, hanging: bool) -> None:
    """List transactional ids and their states.

    --hanging reads the logs for open transactions that belong to no transactional id.  Such a
    transaction holds the last stable offset back until it is aborted.
    """
    from logstore.coordinators.transaction_coordinator import Transactions

    with session.reading() as store:
        known = Transactions.of(store).list()
        if not hanging:
            rows = [_row(each) for each in known if each.is_open or not open_only]
            session.output.rows(rows, _COLUMNS, empty="no transactions")
            return
        accounted = {(each.producer_id, place) for each in known if each.is_open
                     for place in each.partitions}  # fmt: skip
        rows = []
        for name in store:
            for log in store[name]:
                for each in log.ongoing_transactions:
                    if (each.producer_id, (name, log.number)) not in accounted:
                        last = known_time(each.last_timestamp)
                        rows.append({"topic": name, "partition": log.number, **each._asdict(),
                                     "last_timestamp": last})  # fmt: skip
        columns = (plain("topic"), number("partition"), plain("producer_id", "producer"),
                   number("producer_epoch", "epoch"), number("first_offset", "since offset"),
                   moment("last_timestamp", "last record"))  # fmt: skip
        session.output.rows(rows, columns, empty="no hanging transactions")


@verb("show")
@click.argument("name", metavar="ID")
@pass_session
def show_verb(session: Session, name: str) -> None:
    """Show one transactional id: state, producer, times, partitions."""
    from logstore.coordinators.transaction_coordinator import Transactions

    with session.reading() as store:
        session.output.one(_row(_described(Transactions.of(store), name)))


@verb("abort")
@click.argument("name", metavar="[ID]", required=False)
@click.option("--topic", help="With --partition and --producer: a hanging transaction.")
@click.option("--partition", type=Integer(0))
@click.option("--producer", type=Integer(0), metavar="PRODUCER_ID")
@click.option("--yes", is_flag=True, help="Abort; without this, only show what would be aborted.")
@pass_session
def abort_verb(
    session: Session,
    name: str | None,
    topic: str | None,
    partition: int | None,
    producer: int | None,
    yes: bool,
) -> int:
    """Abort the open transaction of a transactional id, or a hanging one in a log.

    Opening the store for writing also finishes transactions that a killed process left.
    """
    from logstore.coordinators.transaction_coordinator import Transactions

    place = (topic, partition, producer)
    by_id = name is not None and place == (None, None, None)
    if not by_id and (name is not None or None in place):
        raise click.UsageError("give an ID, or --topic, --partition and --producer")
    with session.writing() if yes else session.reading() as store:
        if name is not None:
            transactions = Transactions.of(store)
            found = _described(transactions, name)
            if not found.is_open:
                raise exits.CommandError(
                    exits.NOT_FOUND, f"{name!r} has no open transaction: its state is {found.state}"
                )
            if yes:
                found = transactions.abort(name)
            session.output.one({**_row(found), "aborted": yes})
        else:
            assert topic is not None
            log = store[topic][partition or 0]
            ongoing = [t for t in log.ongoing_transactions if t.producer_id == producer]
            if not ongoing:
                raise exits.CommandError(
                    exits.NOT_FOUND, f"{log.name} has no open transaction of producer {producer}"
                )
            row = {"topic": topic, "partition": log.number, **ongoing[0]._asdict()}
            if yes:
                row["marker_offset"] = log.end_transaction(
                    ongoing[0].producer_id, ongoing[0].producer_epoch, commit=False
                )
            session.output.one({**row, "aborted": yes})
    return exits.OK if yes else session.output.dry_run()
