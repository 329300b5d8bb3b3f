"""The outbox: a database row and an event, both or neither, without a distributed transaction.

    python examples/outbox.py [directory]

The application writes the order and the event about it in one SQLite transaction.  A relay then
moves events into the log.  It may be killed between the append and the note that it was done; what
it does then is ask the log: the last record's header tells which event came last, so that a restart
repeats nothing and leaves nothing out.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import tempfile
from pathlib import Path

import logstore
from logstore import Partition, Record

SCHEMA = """
create table if not exists orders (id integer primary key, item text, amount integer);
create table if not exists outbox (id integer primary key autoincrement, key text, body text);
"""


def place_order(database: sqlite3.Connection, item: str, amount: int) -> None:
    """One transaction: the order and what the world is to know of it."""
    with database:
        row = database.execute("insert into orders (item, amount) values (?, ?)", (item, amount))
        body = json.dumps({"order": row.lastrowid, "item": item, "amount": amount})
        database.execute("insert into outbox (key, body) values (?, ?)", (item, body))


def last_relayed(log: Partition) -> int:
    """The outbox id of the newest event in the log; the log itself is the relay's memory."""
    newest = log.tail(1)
    return int(dict(newest[0].headers)["outbox-id"] or b"0") if newest else 0


def relay(database: sqlite3.Connection, log: Partition, *, die_before_note: bool = False) -> int:
    """Move what is new into the log; how many events that were."""
    rows = database.execute(
        "select id, key, body from outbox where id > ? order by id", (last_relayed(log),)
    ).fetchall()
    # One batch: after a crash all of it is there, or nothing.
    log.extend(
        Record(body.encode(), key=key.encode(), headers=[("outbox-id", b"%d" % number)])
        for number, key, body in rows
    )
    if die_before_note:
        return len(rows)  # as if killed right here: in the log, and still in the table
    with database:
        database.execute("delete from outbox where id <= ?", (last_relayed(log),))
    return len(rows)


def run(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(directory / "shop.db")
    database.executescript(SCHEMA)
    with logstore.open(directory / "log") as store:
        log = store.create_topic("orders", exist_ok=True)[0]
        for item, amount in [("tea", 3), ("milk", 1), ("bread", 2)]:
            place_order(database, item, amount)
        try:
            with database:  # a failed order leaves no event, since it is the same transaction
                database.execute("insert into outbox (key, body) values ('ghost', '{}')")
                raise ValueError("the card was declined")
        except ValueError as error:
            print(f"order refused: {error}")
        print(f"relayed {relay(database, log, die_before_note=True)}, then killed before the note")
        place_order(database, "jam", 5)
        print(f"after the restart relayed {relay(database, log)}")
        for record in log:
            print(f"  {record.offset}: {(record.value or b'').decode()}")
        assert [record.key for record in log] == [b"tea", b"milk", b"bread", b"jam"]
    database.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
