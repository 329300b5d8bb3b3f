"""Quorum: the one way in which coordinators write, and learn which partitions are theirs.

The records of a coordinator are in a partition of an internal topic.  In a cluster the leader of
that partition is the coordinator, and a record counts when it is committed: in the logs of all
replicas that are in sync.  A store alone leads all its partitions, and a record counts when it is
as durable as the store asks: LocalQuorum.

Coordination is the companion of a store that has its quorum.  A node of a cluster replaces the
quorum before the first coordinator is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

from logstore.closeable import Closeable
from logstore.coordinators.quorum.local import LocalQuorum
from logstore.errors import (
    CoordinatorError,
    CoordinatorNotAvailableError,
    InvalidRecordError,
    RecordTooLargeError,
)
from logstore.record import Record
from logstore.store.store import Store

__all__ = ["Appended", "Coordination", "Marked", "Quorum", "refusal"]

# Called once, while no lock is held: with the offsets of committed records, or with an error.
Appended: TypeAlias = Callable[[range | BaseException], object]
# Called once, while no lock is held: with the partitions that have no committed marker, and why.
Marked: TypeAlias = Callable[[Mapping[tuple[str, int], BaseException]], object]


def refusal(topic: str, partition: int, error: BaseException) -> BaseException:
    """Return what a client gets for an append of which nothing was written."""
    if isinstance(error, CoordinatorError | InvalidRecordError | RecordTooLargeError):
        return error
    why = f"could not be written by its coordinator: {error}"
    refused = CoordinatorNotAvailableError(topic, partition, why)
    refused.__cause__ = error
    return refused


class Quorum(Protocol):
    """The replicas of this node's partitions, as coordinators see them."""

    @property
    def answers_later(self) -> bool:
        """Whether appends and markers may end after the call.

        If not, they end in the caller's thread, and their errors are raised.  If so, coordinators
        have the partitions that `load` was called for, and no others.
        """

    def owned_epoch(self, topic: str, partition: int) -> int | None:
        """Return the epoch in which this node leads a partition; None if another node does."""

    def partition_count(self, topic: str) -> int:
        """Return how many partitions an internal topic has, or will have."""

    def append(
        self,
        topic: str,
        partition: int,
        epoch: int,
        records: Sequence[Record],
        done: Appended,
        *,
        producer: tuple[int, int] | None = None,
        durability: str | None = None,
    ) -> Callable[[], object]:
        """Append records, all or none, if this node leads the partition in this epoch.

        Appends to one partition are in the log in the sequence of the calls.  Return a function
        that the caller calls once, after it has released its locks: it may wait for the disk.
        `done` is called by that function or by another thread, never before.

        `producer`: the records are a part of the transaction of this producer id and epoch.
        `durability` "os": the caller does not need the records after a power loss; a quorum that
        answers later ignores it.

        An IndeterminateAppendError means that the epoch has ended, and that the records may or may
        not be committed.  After any other error they are not in the log.  NotCoordinatorError means
        that this node does not lead in this epoch; FencedError, that `producer` has a later epoch.
        """

    def mark(
        self,
        partitions: Collection[tuple[str, int]],
        *,
        producer_id: int,
        producer_epoch: int,
        commit: bool,
        coordinator_epoch: int,
        done: Marked,
    ) -> None:
        """Write the markers of a transaction at the leaders of its partitions.

        Errors with a meaning: UnknownTopicError and IndexError, the partition was deleted;
        FencedError, the producer has a later epoch there; NotCoordinatorError, a coordinator with a
        later epoch has written there.  After any other error the marker is written again.
        """


class Coordination(Closeable):
    """The quorum of a store, and the source of producer ids: `Coordination.of`."""

    def __init__(self, store: Store) -> None:
        """Use `Coordination.of`."""
        self._quorum: Quorum = LocalQuorum(store)
        self._used = False
        # Called with the highest id that is known: returns a greater one that was never given out.
        # It may raise CoordinatorNotAvailableError if there is none at the moment.
        self.take_producer_id: Callable[[int], int] = lambda above: store.producer_ids.take(above)

    @classmethod
    def of(cls, store: Store) -> Coordination:
        """Return the coordination of a store."""
        return store.companions.of(cls)

    @property
    def quorum(self) -> Quorum:
        """The quorum.  It cannot be replaced after a coordinator has asked for it."""
        self._used = True
        return self._quorum

    def replace(self, quorum: Quorum, take_producer_id: Callable[[int], int] | None = None) -> None:
        """Have all coordinators of the store use another quorum, and other producer ids."""
        if self._used:
            raise ValueError("a coordinator of this store is in use: replace the quorum before it")
        self._quorum = quorum
        self.take_producer_id = take_producer_id or self.take_producer_id

    def close(self) -> None:
        """Do nothing: a quorum belongs to the node that made it."""
