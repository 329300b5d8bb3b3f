"""Bill customers in parallel: slow calls at once, each customer's orders in their order.

    python examples/parallel_workers.py DIRECTORY

Each order needs a call of a payment service that takes 5 ms.  One after the other, 400 orders take
2 seconds.  With 32 workers and order="key", the orders of one customer are billed one after the
other, and those of different customers at once.  The receipts are records, too: each is committed
with its order, so no crash writes a receipt twice.
"""

from __future__ import annotations

import sys
import time

import logstore
from logstore import Outgoing, Producer, Record, Workers

ORDERS, CUSTOMERS = 400, 80


def pay(customer: bytes, order: bytes) -> bytes:
    """Call the payment service: the thread waits for the network."""
    time.sleep(0.005)
    return b"receipt of %b for %b" % (order, customer)


def bill(record: Record) -> Outgoing:
    assert record.key is not None
    assert record.value is not None
    return Outgoing("receipts", pay(record.key, record.value), key=record.key)


def main(directory: str) -> None:
    with logstore.open(directory) as store:
        store.create_topic("orders", partitions=4, exist_ok=True)
        store.create_topic("receipts", partitions=4, exist_ok=True)
        with Producer(store) as producer:
            for number in range(ORDERS):
                customer = b"customer %d" % (number % CUSTOMERS)
                producer.send("orders", b"order %d" % number, key=customer)

        began = time.monotonic()
        with Workers(store, "orders", group_id="billing", handler=bill, concurrency=32) as workers:
            workers.wait(until="idle", timeout=60)
            print(workers.stats())
        seconds = time.monotonic() - began
        print(f"{ORDERS / seconds:.0f} orders a second; one after the other: 200")

        receipts = [r for log in store["receipts"] for r in log.scan(isolation="read_committed")]
        in_order = True
        for customer in {receipt.key for receipt in receipts}:
            mine = [r.value or b"" for r in receipts if r.key == customer]
            numbers = [int(value.split()[3]) for value in mine]
            in_order = in_order and numbers == sorted(numbers)
        print(f"{len(receipts)} receipts; each customer's in order: {in_order}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "data")
