"""Waiting: fetches that wait for records.

A partition that some fetch waits for has one listener.  The listener runs in the thread that
appends, perhaps under the log's lock: it only adds the partition to a set, and wakes the loop if
the set was empty.  The loop then asks the fetches that wait for these partitions whether they have
enough.  So many appends cost one wake-up, and nothing else happens under the log's lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

from logstore.kafka.workers import LoopCalls
from logstore.partition.partition import Partition

__all__ = ["Wait", "Waiting"]

FORGET_SECONDS = 60.0


class Wait:
    """One fetch that waits.  In the loop's thread only."""

    __slots__ = ("_done", "_partitions", "_ready", "_timer", "over")

    def __init__(
        self,
        partitions: tuple[Partition, ...],
        ready: Callable[[], bool],
        done: Callable[[], object],
    ) -> None:
        self._partitions = partitions
        self._ready = ready
        self._done = done
        self._timer: asyncio.TimerHandle | None = None
        self.over = False


class Waiting:
    """The fetches that wait, by partition."""

    def __init__(self, calls: LoopCalls, loop: asyncio.AbstractEventLoop) -> None:
        self._calls = calls
        self._loop = loop
        self._waits: dict[Partition, dict[Wait, None]] = {}
        self._listeners: dict[Partition, Callable[[], object]] = {}
        self._lock = threading.Lock()
        self._changed: set[Partition] = set()  # guarded by the lock
        self._ended = False  # the server drains
        self.count = 0  # fetches that wait

    def wait(
        self,
        partitions: Iterable[Partition],
        seconds: float,
        ready: Callable[[], bool],
        done: Callable[[], object],
    ) -> Wait:
        """Call `done` when `ready` returns True after an append, or when the time is up.

        `ready` is asked again here: records may have come since the caller looked.
        """
        wait = Wait(tuple(dict.fromkeys(partitions)), ready, done)
        self.count += 1
        for partition in wait._partitions:
            self._waits.setdefault(partition, {})[wait] = None
            if partition not in self._listeners:
                self._listen(partition)
        wait._timer = self._loop.call_later(seconds, self._end, wait)
        if self._ended or ready():
            self._end(wait)
        return wait

    def cancel(self, wait: Wait) -> None:
        """Forget a fetch whose connection is lost."""
        if not wait.over:
            self._remove(wait)

    def end_all(self) -> None:
        """Have every fetch answered now, those that follow included."""
        self._ended = True
        for wait in [wait for waits in self._waits.values() for wait in waits]:
            self._end(wait)
        for partition in list(self._listeners):
            self._unlisten(partition)

    def _end(self, wait: Wait) -> None:
        if not wait.over:
            self._remove(wait)
            wait._done()

    def _remove(self, wait: Wait) -> None:
        wait.over = True
        self.count -= 1
        if wait._timer is not None:
            wait._timer.cancel()
        for partition in wait._partitions:
            waits = self._waits.get(partition)
            if waits is not None:
                waits.pop(wait, None)
                if not waits:
                    del self._waits[partition]
                    self._loop.call_later(FORGET_SECONDS, self._forget, partition)

    def _listen(self, partition: Partition) -> None:
        def heard() -> None:
            with self._lock:
                first = not self._changed
                self._changed.add(partition)
            if first:
                self._calls.put(self._wake)

        self._listeners[partition] = heard
        partition.parts.view.listen(heard)

    def _wake(self) -> None:
        with self._lock:
            changed, self._changed = self._changed, set()
        for partition in changed:
            for wait in list(self._waits.get(partition, ())):
                if not wait.over and wait._ready():
                    self._end(wait)

    def _forget(self, partition: Partition) -> None:
        if partition not in self._waits:
            self._unlisten(partition)

    def _unlisten(self, partition: Partition) -> None:
        heard = self._listeners.pop(partition, None)
        if heard is not None:
            partition.parts.view.unlisten(heard)
