"""Courier: moves due records to their targets, each batch in one transaction.

The transaction has the records for the targets and the tombstones of their tickets.  So committed
readers get a record once, or the ticket is still pending.  A record whose target does not exist or
refuses it is written to ``logstore-undelivered``, with the reason in a header.

One thread at a time uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from logstore.coordinators.internal_topics import DELAYED
from logstore.delays.ticket import (
    ID,
    REASON,
    TOPIC,
    DelayedRecord,
    generation_of,
    tombstone,
)
from logstore.errors import InvalidNameError, InvalidRecordError, RecordTooLargeError
from logstore.producer.producer import Producer
from logstore.producer.transaction import Transaction
from logstore.store.store import Store

__all__ = ["UNDELIVERED", "Courier"]

log = logging.getLogger("logstore.delays")

TRANSACTIONAL_ID = "logstore.delays"
UNDELIVERED = "logstore-undelivered"
# A record that its target refuses.  UnknownTopicError and a missing partition are LookupErrors.
REFUSED = (LookupError, InvalidNameError, InvalidRecordError, RecordTooLargeError)


class Courier:
    """The transactional producer of a scheduler."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._producer: Producer | None = None

    def deliver(
        self, records: Iterable[DelayedRecord], refuse: Callable[[DelayedRecord], str | None]
    ) -> None:
        """Deliver records and end their tickets, all or none.

        `refuse` returns the reason for which a record is not delivered, or None.  With the reason
        "" its ticket only ends.
        """

        def send(tx: Transaction) -> None:
            for record in records:
                reason = refuse(record)
                if reason is None:
                    reason = self._send(tx, record)
                if reason:
                    self._set_aside(tx, record, reason)
                number = record.ticket.number
                tx.send_internal(DELAYED, generation_of(number), tombstone(number))

        self._transact(send)

    def replace(self, old: DelayedRecord, new: DelayedRecord) -> None:
        """End one ticket and schedule another, both or none."""

        def send(tx: Transaction) -> None:
            for record in (tombstone(old.ticket.number), new.encode()):
                generation = generation_of(int.from_bytes(record.key or b""))
                tx.send_internal(DELAYED, generation, record)

        self._transact(send)

    def _transact(self, send: Callable[[Transaction], None]) -> None:
        if self._producer is None:
            self._producer = Producer(self._store, TRANSACTIONAL_ID)
        tx = self._producer.transaction()
        try:
            with tx:
                send(tx)
        except BaseException:
            # Decided, and only markers are missing: the coordinator writes them later.
            if tx.over == "committed":
                log.warning("delivered records are seen when their markers are written")
                return
            raise

    def _send(self, tx: Transaction, record: DelayedRecord) -> str | None:
        """Send a record to its target; return the reason if the target refuses it."""
        try:
            tx.send(
                record.topic, record.value, key=record.key, headers=record.delivered_headers(),
                partition=record.partition,
            )  # fmt: skip
        except REFUSED as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _set_aside(self, tx: Transaction, record: DelayedRecord, reason: str) -> None:
        log.warning("ticket %s is not delivered to %s: %s", record.ticket, record.topic, reason)
        self._store.create_topic(
            UNDELIVERED, config={"max.message.bytes": (1 << 31) - 1}, exist_ok=True
        )
        headers = record.delivered_headers(
            (TOPIC, record.topic.encode()), (REASON, reason.encode())
        )
        # A tombstone without key is not possible; the id is as good as any.
        key = record.key if record.value is not None else record.key or ID.encode()
        tx.send(UNDELIVERED, record.value, key=key, headers=headers)

    def close(self) -> None:
        """Close the producer; an open transaction is aborted."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()
