"""Seats: the partitions of one internal topic that this node coordinates.

A seat is free, being loaded, or taken, in an epoch.  With a quorum that does not answer later every
seat is taken.  Otherwise `load` and `drop` of a coordinator change them.

Invariant: an event of an epoch that is not the newest of its partition changes nothing.
"""

from __future__ import annotations

from logstore.coordinators.quorum.quorum import Quorum
from logstore.errors import CoordinatorLoadingError, NotCoordinatorError

__all__ = ["Seats"]


class Seats:
    """The caller serialises `begin`, `take` and `leave`; `check` needs no lock."""

    def __init__(self, topic: str, quorum: Quorum) -> None:
        self.topic = topic
        self._quorum = quorum
        self.all_taken = not quorum.answers_later
        self._taken: dict[int, int] = {}  # epochs, by partition
        self._loading: dict[int, int] = {}

    def check(self, partition: int) -> int:
        """Return the epoch of a seat that is taken.

        Raises CoordinatorLoadingError if it is being loaded, or will be, and NotCoordinatorError if
        another node leads the partition.  The epoch is 0 with a quorum that does not answer later.
        """
        if self.all_taken:
            return 0
        epoch = self._taken.get(partition)
        owned = self._quorum.owned_epoch(self.topic, partition)
        if owned is None:
            raise NotCoordinatorError(self.topic, partition)
        if owned != epoch:
            raise CoordinatorLoadingError(self.topic, partition)
        return epoch

    def epoch(self, partition: int) -> int:
        """Return the epoch of a seat that `take` was called for; -1 if it is not taken."""
        return self._taken.get(partition, -1)

    def numbers(self) -> list[int]:
        """Return the partitions whose seats are taken; only those that `take` was called for."""
        return sorted(self._taken)

    def begin(self, partition: int, epoch: int) -> bool:
        """Begin to load; return False if this or a later epoch has begun already."""
        newest = max(self._taken.get(partition, -1), self._loading.get(partition, -1))
        if epoch <= newest:
            return False
        self._loading[partition] = epoch
        return True

    def take(self, partition: int, epoch: int) -> bool:
        """End the load; return False if the seat was left since, or another load has begun."""
        if self._loading.get(partition) != epoch:
            return False
        del self._loading[partition]
        self._taken[partition] = epoch
        return True

    def leave(self, partition: int, epoch: int) -> bool:
        """Free a seat of this or an earlier epoch; return whether it was taken."""
        if self._loading.get(partition, epoch + 1) <= epoch:
            del self._loading[partition]
        if self._taken.get(partition, epoch + 1) > epoch:
            return False
        del self._taken[partition]
        return True
