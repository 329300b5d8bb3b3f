"""Maintenance: the periodic tasks of a log, in one optional thread.

The tasks are retention, compaction, syncing by ``flush.ms`` and ``flush.messages``, checkpoints of
a store, digests of sealed segments, and the expiration of idle producers.  A log is correct without
any of them.  A program without the thread calls `run_once`, or the methods of Partition and
Compactor, itself.

Invariant: a failure affects one task of one partition.  The error is kept in `errors` and logged,
the other tasks run, and the failed task runs again when it is next due.  The clock's monotonic
seconds decide when a task is due.  The wall time, which `Partition.enforce` guards against leaps,
decides how old a record is.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, Self

from logstore.clock import Clock, SystemClock
from logstore.config import INT64_MAX
from logstore.errors import ClosedError, UnknownTopicError
from logstore.partition.partition import Partition
from logstore.store.store import Store
from logstore.store.topic import Topic
from logstore.upkeep.compaction import MAP_BYTES, Compactor
from logstore.waking import Gate, uninterrupted

__all__ = ["Maintenance", "MaintenanceAct", "MaintenanceFault", "MaintenanceReport"]

log = logging.getLogger("logstore.maintenance")

Task = Literal["retention", "compaction", "sync", "producers", "checkpoint", "digests"]

ERRORS_KEPT = 100
LONGEST_SLEEP = 60.0  # seconds; a partition that is opened during a sleep waits at most this long
SHORTEST_SLEEP = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class MaintenanceAct:
    """One change that a task made."""

    task: Task
    where: str  # the partition, or the store's path
    what: str  # a text for people

    def __str__(self) -> str:
        return f"{self.task} of {self.where}: {self.what}"


@dataclasses.dataclass(frozen=True, slots=True)
class MaintenanceFault:
    """One failure of a task.  The task runs again when it is next due."""

    task: Task
    where: str
    at_ms: int
    error: Exception

    def __str__(self) -> str:
        return f"{self.task} of {self.where}: {type(self.error).__name__}: {self.error}"


@dataclasses.dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """The result of one round.  `due` is the seconds until each task is due; None: never."""

    acts: list[MaintenanceAct]
    faults: list[MaintenanceFault]
    due: dict[Task, float | None]

    def __str__(self) -> str:
        return "; ".join(map(str, [*self.acts, *self.faults])) or "nothing to do"


class Maintenance:
    """Maintains the partitions of a store, or those that are given.

    ``with Maintenance(store): ...`` runs a daemon thread during the block; so do `start` and
    `stop`.  Without a thread, only `run_once` does something.  Intervals are seconds; None turns a
    task off.  The configuration of a partition decides what the tasks do.

    The thread ends by itself when the store, or every partition, is closed.  It holds only a weak
    reference to this object, so an object that is no longer used ends the thread, too.
    """

    def __init__(
        self,
        target: Store | Iterable[Partition],
        *,
        clock: Clock | None = None,
        retention: float | None = 300.0,
        compaction: float | None = 15.0,
        sync: float | None = 1.0,
        checkpoint: float | None = 60.0,
        producers: float | None = 600.0,
        digests: float | None = 30.0,
        memory_bytes: int = MAP_BYTES,
    ) -> None:
        self._store = target if isinstance(target, Store) else None
        # Strong references: partitions that are given are not closed as idle while this runs.
        self._given = () if isinstance(target, Store) else tuple(target)
        self._clock = clock or SystemClock()
        self._memory_bytes = memory_bytes
        self._every: dict[Task, float | None] = {
            "retention": retention,
            "compaction": compaction,
            "sync": sync,
            "producers": producers,
            "digests": digests,
            "checkpoint": checkpoint if self._store is not None else None,
        }
        for task, seconds in self._every.items():
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{task}: an interval is more than 0 seconds, not {seconds}")
        self._due: dict[Task, float] = dict.fromkeys(self._every, float("-inf"))
        # For each partition, the time at which all of its records were last durable.
        self._durable_at: weakref.WeakKeyDictionary[Partition, float]
        self._durable_at = weakref.WeakKeyDictionary()
        self._round = threading.Lock()  # one round at a time: the thread's or a caller's
        self._stopped = Gate()
        self._thread: threading.Thread | None = None
        self._faults: collections.deque[MaintenanceFault]
        self._faults = collections.deque(maxlen=ERRORS_KEPT)

    # ---- a round ----

    def run_once(self, now: int | datetime.datetime | None = None) -> MaintenanceReport:
        """Run the tasks that are due; return what they did and when each is next due.

        With `now`, a wall time, every task is due, and ages are computed with it.
        """
        acts: list[MaintenanceAct] = []
        faults: list[MaintenanceFault] = []
        with self._round:
            for task in self._tasks_due(now is not None):
                for where, act in self._work_of(task, now):
                    self._attempt(task, where, act, acts, faults)
            return MaintenanceReport(acts, faults, self._due_in())

    def _tasks_due(self, all_of_them: bool) -> list[Task]:
        steady = self._clock.monotonic()
        found: list[Task] = []
        for task, every in self._every.items():
            if every is not None and (all_of_them or steady >= self._due[task]):
                # Before the work: a task that fails is tried again after its interval, not at once.
                self._due[task] = steady + every
                found.append(task)
        return found

    def _due_in(self) -> dict[Task, float | None]:
        steady = self._clock.monotonic()
        return {
            task: None if every is None else max(0.0, self._due[task] - steady)
            for task, every in self._every.items()
        }

    def _work_of(
        self, task: Task, now: int | datetime.datetime | None
    ) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield (name, function) for each partition or store of a task.

        The function does the work and returns a text, or "" if there was nothing to do.
        """
        if task == "checkpoint":
            store = self._store
            assert store is not None
            if not store.closed and not store.readonly:
                yield str(store.path), functools.partial(_checkpoint, store)
            return
        for where, partition in self._partitions():
            yield where, functools.partial(self._do, task, partition, now)

    def _partitions(self) -> Iterator[tuple[str, Callable[[], Partition]]]:
        """Yield (name, function that returns the partition).

        The function may open the partition; if that fails, only this partition is affected.
        """
        for partition in self._given:
            yield partition.name, functools.partial(_itself, partition)
        store = self._store
        if store is None or store.closed:
            return
        # A copy: topics may be created and deleted during the round.
        for name, topic in list(store.items()):
            for number in topic.partition_numbers:
                yield f"{name}-{number}", functools.partial(_numbered, topic, number)

    def _do(
        self, task: Task, get: Callable[[], Partition], now: int | datetime.datetime | None
    ) -> str:
        try:
            partition = get()
        except UnknownTopicError:
            return ""  # deleted since the round began
        if partition.readonly or _is_closed(partition):
            return ""
        try:
            return self._do_to(partition, task, now)
        except ClosedError:
            if not _is_closed(partition):
                raise
            return ""  # another thread closed the partition

    def _do_to(self, partition: Partition, task: Task, now: int | datetime.datetime | None) -> str:
        if task == "retention":
            return _enforce(partition, now)
        if task == "compaction":
            return self._compact(partition)
        if task == "sync":
            return self._sync(partition, now is not None)
        if task == "digests":
            parts = partition.parts
            # A log that is asleep has no new segment: do not wake it.
            noted = 0 if parts.active.asleep else parts.rewriter.write_digests()
            return f"digests of {noted} sealed segments noted" if noted else ""
        forgotten = partition.expire_producers()
        return f"{len(forgotten)} silent producers forgotten" if forgotten else ""

    def _attempt(
        self,
        task: Task,
        where: str,
        act: Callable[[], str],
        acts: list[MaintenanceAct],
        faults: list[MaintenanceFault],
    ) -> None:
        try:
            what = act()
        except Exception as error:  # any error: the other tasks and partitions must run
            # The store was closed during the round: that is no fault.
            if isinstance(error, ClosedError) and self._is_over():
                return
            fault = MaintenanceFault(task, where, self._clock.time_ms(), error)
            self._faults.append(fault)
            faults.append(fault)
            log.error("%s", fault, exc_info=error)
            return
        if what:
            acts.append(MaintenanceAct(task, where, what))
            log.debug("%s", acts[-1])

    # ---- the tasks ----

    def _compact(self, partition: Partition) -> str:
        if not partition.config.compacts:
            return ""
        report = Compactor(partition, memory_bytes=self._memory_bytes).run()
        return str(report) if report.segments else ""

    def _sync(self, partition: Partition, at_once: bool) -> str:
        """Sync if flush.ms or flush.messages is reached.

        flush.ms counts from the last time at which all records were durable.
        """
        steady = self._clock.monotonic()
        # The end first: an append in between makes the difference too small, and the next round
        # sees it.
        behind = partition.end_offset - partition.durable_offset
        if behind <= 0:
            self._durable_at[partition] = steady
            return ""
        waited_ms = (steady - self._durable_at.setdefault(partition, steady)) * 1000
        flush_ms, flush_messages = partition.config.flush_ms, partition.config.flush_messages
        by_time = flush_ms < INT64_MAX and (at_once or waited_ms >= flush_ms)
        if not by_time and behind < flush_messages:
            return ""
        partition.sync()
        self._durable_at[partition] = steady
        return f"{behind} records made durable"

    # ---- the thread ----

    def start(self) -> Self:
        """Run rounds in a thread until `stop`.  Does nothing if the thread runs."""
        if self._thread is None or not self._thread.is_alive():
            self._stopped = Gate()
            thread = threading.Thread(
                target=_run, args=(weakref.ref(self), self._stopped),
                name="logstore maintenance", daemon=True,
            )  # fmt: skip
            uninterrupted(thread.start)
            self._thread = thread
        return self

    def stop(self) -> None:
        """End the thread and wait for it; the round that it is in is finished first.

        Does nothing if no thread runs.
        """
        self._stopped.open()  # a Gate stays open: `start` makes a new one
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            self._thread = None

    @property
    def running(self) -> bool:
        """Return whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def errors(self) -> list[MaintenanceFault]:
        """Return the last hundred failures, oldest first."""
        return list(self._faults)

    def _is_over(self) -> bool:
        """Return whether the store, or every partition, is closed."""
        if self._store is not None:
            return self._store.closed
        return all(partition.closed for partition in self._given)

    def _sleep_seconds(self) -> float:
        left = [seconds for seconds in self._due_in().values() if seconds is not None]
        return min(max(min(left, default=LONGEST_SLEEP), SHORTEST_SLEEP), LONGEST_SLEEP)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        what = self._store if self._store is not None else f"{len(self._given)} partitions"
        return f"<Maintenance of {what}{' running' if self.running else ''}>"


def _run(maintenance: weakref.ref[Maintenance], stopped: Gate) -> None:
    """Run rounds until stopped.  The function of the thread.

    While it sleeps it holds only the weak reference, so that the Maintenance can be collected.
    """
    while not stopped.opened:
        this = maintenance()
        if this is None or this._is_over():
            return
        began = time.monotonic()
        this.run_once()
        seconds = this._sleep_seconds()
        del this  # its only strong reference: see the docstring
        # Sleep as long as the round took, up to a second: short rounds take at most half of the
        # time.
        stopped.wait(max(seconds, min(time.monotonic() - began, 1.0)))


def _enforce(partition: Partition, now: int | datetime.datetime | None) -> str:
    going = [decision for decision in partition.enforce(now=now) if decision.delete]
    if not going:
        return ""
    size = sum(decision.size_bytes for decision in going)
    return f"{len(going)} segments with {size} bytes deleted; now from {partition.start_offset}"


def _checkpoint(store: Store) -> str:
    store.checkpoint()
    return ""


def _is_closed(partition: Partition) -> bool:
    return partition.closed


def _itself(partition: Partition) -> Partition:
    return partition


def _numbered(topic: Topic, number: int) -> Partition:
    return topic[number]
