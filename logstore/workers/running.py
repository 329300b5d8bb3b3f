"""RunningStrands: the handlers that still run for partitions that were given back.

A thread cannot be stopped.  If a partition is revoked or lost while a handler runs, the next owner
must not start another record of the same strand, nor the same record, before that handler has
ended.  All members of a group that use workers are in one process, so the store knows both owners:
an owner claims a partition here, and takes over the starts of the one before.

The lock is taken before the lock of a Desk, and never while one is held.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Protocol

from logstore.closeable import Closeable
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.offset_records import TopicPartition
from logstore.coordinators.transaction_coordinator import Transactions
from logstore.store.store import Store
from logstore.workers.items import Outcome, Work

__all__ = ["RunningStrands"]


class Owner(Protocol):
    """The Desk of one Workers."""

    def give_up(self, partition: TopicPartition, /) -> list[Work]:
        """Forget a partition; return the starts whose handlers still run."""


class Stoppable(Protocol):
    """One Workers."""

    def stop_with_store(self) -> None:
        """End, without waiting for handlers: the store is being closed."""


class RunningStrands(Closeable):
    """The owners of partitions, and their handlers that still run.  A store has one."""

    def __init__(self, store: Store) -> None:
        """Use `RunningStrands.of`."""
        # The store closes them after this object, which uses them until it is closed.
        GroupCoordinator.of(store)
        Transactions.of(store)
        self._lock = threading.Lock()
        self._owners: dict[tuple[str, TopicPartition], Owner] = {}
        self._left: dict[tuple[str, TopicPartition], list[Work]] = {}
        self._numbers: dict[str, set[int]] = {}  # of each group's transactional ids in use
        self._workers: dict[Stoppable, None] = {}

    @classmethod
    def of(cls, store: Store) -> RunningStrands:
        """Return the one of a store; it is closed with the store."""
        return store.companions.of(cls)

    def claim(
        self,
        group: str,
        partition: TopicPartition,
        owner: Owner,
        heir: Callable[[int, Outcome], object],
    ) -> list[Work]:
        """Become the owner; return the starts of former owners whose handlers still run.

        `heir` is called with the offset and the outcome when such a handler ends, in its thread; or
        during this call, if it has ended already.
        """
        key = group, partition
        with self._lock:
            self._release(key)  # a former owner may not know yet that it has lost the partition
            self._owners[key] = owner
            works = self._left.pop(key, [])
            for work in works:
                work.heir = _bound(heir, work)
                if work.outcome is not None:
                    work.heir(work.outcome)
        return works

    def leave(self, group: str, partition: TopicPartition, owner: Owner) -> None:
        """Give a partition up, if it is still this owner's."""
        with self._lock:
            if self._owners.get((group, partition)) is owner:
                self._release((group, partition))

    def _release(self, key: tuple[str, TopicPartition]) -> None:
        owner = self._owners.pop(key, None)
        if owner is None:
            return
        works = owner.give_up(key[1])
        for work in works:
            work.heir = None
        if works:
            self._left.setdefault(key, []).extend(works)

    def ended(self, work: Work, outcome: Outcome) -> None:
        """Take the outcome of a handler whose partition was given up."""
        with self._lock:
            work.outcome = outcome
            if work.heir is not None:
                work.heir(outcome)

    # ---- workers of the store ----

    def enter(self, workers: Stoppable, group: str) -> int:
        """Have the store stop these workers; return a number that no other one of the group has."""
        with self._lock:
            self._workers[workers] = None
            taken = self._numbers.setdefault(group, set())
            number = next(each for each in itertools.count() if each not in taken)
            taken.add(number)
            return number

    def depart(self, workers: Stoppable, group: str, number: int) -> None:
        """Forget workers that have ended."""
        with self._lock:
            self._workers.pop(workers, None)
            self._numbers[group].discard(number)

    def close(self) -> None:
        """Stop all workers of the store."""
        while True:
            with self._lock:
                workers = next(iter(self._workers), None)
            if workers is None:
                return
            workers.stop_with_store()
            with self._lock:
                self._workers.pop(workers, None)


def _bound(heir: Callable[[int, Outcome], object], work: Work) -> Callable[[Outcome], object]:
    return lambda outcome: heir(work.item.offset, outcome)
