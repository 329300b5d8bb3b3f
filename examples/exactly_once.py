"""Read, process, write, exactly once: the results and the offsets are committed together.

    python examples/exactly_once.py [directory]

The copier crashes in the middle of a transaction; the next one finds neither half a result nor an
offset that is ahead of the results.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import logstore
from logstore import Consumer, Producer, Store

ORDERS = 100


class Crash(Exception):
    """The process dies, as far as the log is concerned."""


def bill(store: Store, *, crash_after: int | None = None) -> None:
    """Turn orders into bills; stops when there are no more."""
    consumer = Consumer(store, "orders", group_id="billing", auto_commit=False)
    producer = Producer(store, "billing")
    with consumer, producer:
        billed = 0
        while records := consumer.poll(max_records=10, timeout=1.0):
            with producer.transaction() as tx:
                for record in records:
                    assert record.value is not None
                    tx.send("bills", b"bill for " + record.value, partition=record.partition)
                    billed += 1
                    if billed == crash_after:
                        raise Crash
                tx.commit_offsets(consumer)


def run(directory: Path) -> None:
    with logstore.open(directory) as store:
        store.create_topic("orders", partitions=2)
        store.create_topic("bills", partitions=2)
        with Producer(store) as producer:
            for number in range(ORDERS):
                producer.send("orders", b"order %d" % number, partition=number % 2)
        try:
            bill(store, crash_after=37)
        except Crash:
            print("crashed in the middle of a transaction")
        bill(store)
        bills = [
            record.value
            for log in store["bills"]
            for record in log.scan(isolation="read_committed")
        ]
        written = sum(1 for log in store["bills"] for _ in log)
        print(f"{written} bills written, {len(bills)} committed, {len(set(bills))} different")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        run(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
