"""Desk: where the control thread and the handlers' threads or tasks meet.

The control thread puts records into `strands`.  A pool takes starts and brings their outcomes back.
`lock` guards `strands`; it is held for short times, and never while a handler or a commit runs.
The bell wakes the control thread, only if there is something for it to do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from logstore.clock import Clock
from logstore.consumer.wakeup import Bell
from logstore.coordinators.offset_records import TopicPartition
from logstore.workers.items import Failed, Outcome, Work
from logstore.workers.running import RunningStrands
from logstore.workers.strands import Strands

__all__ = ["Desk", "Pool"]


class Pool(Protocol):
    """The threads or tasks that call the handler."""

    stuck: set[Work]  # starts over their time whose handlers have not returned; under the lock

    def nudge(self) -> None:
        """Start handlers for records that are ready.  The control thread calls it."""

    def resize(self, concurrency: int) -> None:
        """Run at most so many handlers at once."""

    def overdue(self, work: Work) -> None:
        """The time of a handler is over: cancel it if possible, and replace its thread."""

    def reclaim(self, now: float) -> float | None:
        """Give back starts that wait for a slow handler; return when to look again, or None."""

    def stack(self, work: Work) -> tuple[str, str]:
        """Return the name of the thread or task of a start, and its stack."""

    def close(self) -> None:
        """Start nothing any more.  Handlers that run are left alone."""


class Desk:
    """The shared state of one Workers."""

    def __init__(self, strands: Strands, registry: RunningStrands, bell: Bell, clock: Clock,
                 commit_records: int) -> None:  # fmt: skip
        self.lock = threading.Lock()
        self.strands = strands
        self.bell = bell
        self.clock = clock
        self.inherited: deque[tuple[TopicPartition, int, Outcome]] = deque()
        self.waiters: set[Bell] = set()  # of threads and tasks that wait for a state of the workers
        # Written by the control thread, read by `put` under the lock.
        self.ring_always = False  # it waits for the end of handlers
        self.hungry = False  # it stopped reading because there was no room
        self._registry = registry
        self._commit_records = commit_records

    def take_locked(self, limit: int) -> list[Work]:
        """Return up to `limit` starts."""
        return self.strands.take(limit, self.clock.monotonic())

    def put_locked(
        self, results: Sequence[tuple[Work, Outcome]], back: Sequence[Work] = ()
    ) -> list[tuple[Work, Outcome]]:
        """Take outcomes, and starts that did not begin.

        Return those of partitions that were given up: the caller calls `pass_on` for them after it
        has released the lock.
        """
        strands = self.strands
        unsaved = strands.unsaved + strands.leaving
        orphans = [each for each in results if not strands.finish(*each)]
        strands.put_back(back)
        if (
            self.ring_always
            or self.waiters
            or (results and not unsaved)  # the time of the next commit is to be set
            or strands.unsaved + strands.leaving >= self._commit_records
            or (self.hungry and 2 * strands.waiting <= strands.limits.records)
            or not strands.waiting
            or strands.probation.waits
            or any(isinstance(outcome, Failed) for _, outcome in results)
        ):
            self.bell.ring()
        return orphans

    def pass_on(self, orphans: Sequence[tuple[Work, Outcome]]) -> None:
        """Give outcomes to the owners that have the partitions now."""
        for work, outcome in orphans:
            self._registry.ended(work, outcome)

    def inherit(self, partition: TopicPartition, offset: int, outcome: Outcome) -> None:
        """Take the outcome of a handler of a former owner; any thread calls it, without a lock."""
        self.inherited.append((partition, offset, outcome))
        self.bell.ring()

    def give_up(self, partition: TopicPartition) -> list[Work]:
        """Forget a partition; return the starts whose handlers still run."""
        with self.lock:
            return self.strands.release(partition)

    def tell_waiters(self) -> None:
        """Wake threads and tasks that wait for a state of the workers."""
        for bell in list(self.waiters):
            bell.ring()
