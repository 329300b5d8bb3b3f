"""Committer: commits the progress of all partitions, and the outputs of handlers with it.

Without outputs it is a plain commit.  Outputs and the progress that finishes their records are
written in one transaction, so each output is in the log exactly once for `read_committed` readers.
A transaction has the outputs of records that are processed, and waits for no other record.

Only the control thread uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from logstore.config import ConfigError
from logstore.consumer.consumer import Consumer
from logstore.coordinators.offset_records import CommittedOffset, TopicPartition
from logstore.errors import (
    InvalidNameError,
    InvalidRecordError,
    RebalanceError,
    RecordTooLargeError,
    TransactionAbortedError,
    UnknownTopicError,
)
from logstore.producer.producer import Producer
from logstore.producer.transaction import Transaction
from logstore.serialization import SerializationError
from logstore.store.store import Store
from logstore.workers.desk import Desk
from logstore.workers.items import Item

__all__ = ["Committer"]

log = logging.getLogger("logstore.workers")

# Errors of `send` that are the fault of one output: its record has failed, and no other.
FAULTS = (
    *(UnknownTopicError, InvalidRecordError, InvalidNameError, RecordTooLargeError),
    *(SerializationError, ConfigError, TypeError, IndexError),
)


class _Offsets:
    """The offsets of one commit, for `Transaction.commit_offsets`."""

    def __init__(self, consumer: Consumer, offsets: dict[TopicPartition, CommittedOffset]) -> None:
        self._consumer = consumer
        self._offsets = offsets
        self.group_id = consumer.group_id

    def commit_in_transaction(self, *, producer_id: int, producer_epoch: int) -> None:
        self._consumer.commit_in_transaction(producer_id, producer_epoch, self._offsets)


class _FaultyOutputError(Exception):
    """An output that cannot be sent: aborts the transaction."""

    def __init__(self, item: Item, error: BaseException) -> None:
        self.item = item
        self.error = error


class Committer:
    """The commits of one Workers."""

    def __init__(self, store: Store, desk: Desk, consumer: Consumer, transactional_id: str) -> None:
        self._store = store
        self._desk = desk
        self._consumer = consumer
        self._transactional_id = transactional_id
        self._producer: Producer | None = None

    def commit(
        self, *, clean: Collection[TopicPartition] = (), durability: str | None = None
    ) -> bool:
        """Commit what changed; return False if the group refuses it for now.

        `clean`: the partitions of which no record starts any more.  `durability` "os" commits
        progress only: no outputs.
        """
        desk = self._desk
        try:
            with desk.lock:
                desk.strands.unsaved = 0
                outputs = desk.strands.leaving > 0 and durability is None
            while outputs:
                try:
                    self._commit_outputs(clean)
                    return True
                except _FaultyOutputError as fault:
                    with desk.lock:
                        desk.strands.fail_leaving(fault.item, fault.error)
                        outputs = desk.strands.leaving > 0
            with desk.lock:
                snapshot = desk.strands.snapshot(clean=clean)
            if snapshot.offsets:
                self._consumer.commit(snapshot.offsets, durability=durability)
                with desk.lock:
                    desk.strands.saved(snapshot)
        except (RebalanceError, TransactionAbortedError) as error:
            # The next poll takes part in the rebalance; or the outputs are in the next transaction.
            log.warning("%s: not committed: %s", self._consumer.group_id, error)
            return False
        return True

    def _commit_outputs(self, clean: Collection[TopicPartition]) -> None:
        """Send the outputs of all leaving records, and commit, in one transaction."""
        strands, lock = self._desk.strands, self._desk.lock
        if self._producer is None:
            self._producer = Producer(self._store, self._transactional_id)
        transaction = self._producer.transaction()
        with lock:
            items = strands.depart()
            snapshot = strands.snapshot(clean=clean)
        try:
            with transaction:
                for item in items:
                    _send(transaction, item)
                transaction.commit_offsets(_Offsets(self._consumer, snapshot.offsets))
        except BaseException:
            # "committed": the decision is in the log, and only markers are missing.
            if transaction.over != "committed":
                with lock:
                    strands.stay(items)
                raise
            log.warning("%s: markers are missing", self._transactional_id, exc_info=True)
        with lock:
            strands.gone(items)
            strands.saved(snapshot)

    def close(self) -> None:
        """Close the producer, if one was made."""
        if self._producer is not None:
            self._producer.close()


def _send(transaction: Transaction, item: Item) -> None:
    for topic, value, key, headers, timestamp, partition in item.outputs:
        try:
            transaction.send(topic, value, key=key, headers=headers, timestamp=timestamp,
                             partition=partition)  # fmt: skip
        except FAULTS as error:
            raise _FaultyOutputError(item, error) from error
