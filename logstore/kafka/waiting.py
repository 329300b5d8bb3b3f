"""Waiting: fetches that wait for records, and the partitions that change.

A partition that a fetch waits for has one listener.  The listener runs in the thread that
appends, perhaps under the log's lock: it only adds the partition to a set, and wakes the loop if
the set was empty.  The loop then asks the fetches that wait for these partitions whether they have
enough.  So many appends cost one wake-up, and nothing else happens under the log's lock.

A fetch session has a Watch instead of one registration for each fetch: the Watch notes the
partitions that changed, so that the next fetch of the session looks at these only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

from logstore.kafka.workers import LoopCalls
from logstore.partition.partition import Partition

__all__ = ["Wait", "Waiting", "Watch"]

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


class Watch:
    """The changes of some partitions, for a fetch session.  In the loop's thread only."""

    __slots__ = ("changed", "wait")

    def __init__(self) -> None:
        self.changed: dict[Partition, None] = {}  # since the session looked, in that order
        self.wait: Wait | None = None  # the fetch of the session; a change asks whether it is ready


class Waiting:
    """The fetches that wait, and the partitions that they and the fetch sessions listen to."""

    def __init__(self, calls: LoopCalls, loop: asyncio.AbstractEventLoop) -> None:
        self._calls = calls
        self._loop = loop
        self._waits: dict[Partition, dict[Wait, None]] = {}
        self._watches: dict[Partition, dict[Watch, None]] = {}
        self._all: dict[Wait, None] = {}
        self._listeners: dict[Partition, Callable[[], object]] = {}
        self._lock = threading.Lock()
        self._changed: set[Partition] = set()  # guarded by the lock
        self._ended = False  # the server drains
        self._forgetting = False  # a timer will remove the listeners that are not used
        self.expired = 0  # fetches whose time was up

    @property
    def count(self) -> int:
        """How many fetches wait."""
        return len(self._all)

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
        self._all[wait] = None
        for partition in wait._partitions:
            self._waits.setdefault(partition, {})[wait] = None
            self._listen(partition)
        wait._timer = self._loop.call_later(seconds, self._expire, wait)
        if self._ended or self._is_ready(wait):
            self.end(wait)
        return wait

    def cancel(self, wait: Wait) -> None:
        """Forget a fetch whose connection is lost."""
        if not wait.over:
            self._remove(wait)

    def _expire(self, wait: Wait) -> None:
        self.expired += not wait.over
        self.end(wait)

    def end(self, wait: Wait | None) -> None:
        """Have a fetch answered now, unless it is answered already."""
        if wait is not None and not wait.over:
            self._remove(wait)
            wait._done()

    def watch(self, partition: Partition, watch: Watch) -> None:
        """Note the changes of a partition from now on."""
        self._watches.setdefault(partition, {})[watch] = None
        self._listen(partition)

    def unwatch(self, partition: Partition, watch: Watch) -> None:
        """Stop noting the changes of a partition."""
        watch.changed.pop(partition, None)
        watches = self._watches.get(partition)
        if watches is not None:
            watches.pop(watch, None)
            if not watches:
                del self._watches[partition]
                self._forget_later()

    def end_all(self) -> None:
        """Have every fetch answered now, those that follow included."""
        self._ended = True
        for wait in list(self._all):
            self.end(wait)
        for partition in list(self._listeners):
            self._unlisten(partition)

    def _remove(self, wait: Wait) -> None:
        wait.over = True
        del self._all[wait]
        if wait._timer is not None:
            wait._timer.cancel()
        for partition in wait._partitions:
            waits = self._waits.get(partition)
            if waits is not None:
                waits.pop(wait, None)
                if not waits:
                    del self._waits[partition]
                    self._forget_later()

    def _listen(self, partition: Partition) -> None:
        if partition in self._listeners:
            return

        def heard() -> None:
            with self._lock:
                first = not self._changed
                self._changed.add(partition)
            if first:
                self._calls.put(self.wake)

        self._listeners[partition] = heard
        partition.parts.view.listen(heard)

    def wake(self) -> None:
        """Note the changes that the listeners reported, and end the fetches that have enough."""
        with self._lock:
            changed, self._changed = self._changed, set()
        waits: dict[Wait, None] = {}
        for partition in changed:
            for watch in self._watches.get(partition, ()):
                watch.changed[partition] = None
                if watch.wait is not None:
                    waits[watch.wait] = None
            waits.update(self._waits.get(partition, {}))
        for wait in waits:
            if not wait.over and self._is_ready(wait):
                self.end(wait)

    def _is_ready(self, wait: Wait) -> bool:
        """Ask a fetch.  If it fails, it ends, and is answered with the error; the others go on."""
        try:
            return wait._ready()
        except Exception:  # noqa: BLE001  the last look of the fetch finds it again
            return True

    def _forget_later(self) -> None:
        """Remove unused listeners after a while: the next fetch may need the same ones."""
        if not self._forgetting:
            self._forgetting = True
            self._loop.call_later(FORGET_SECONDS, self._forget)

    def _forget(self) -> None:
        self._forgetting = False
        used = self._waits.keys() | self._watches.keys()
        for partition in self._listeners.keys() - used:
            self._unlisten(partition)

    def _unlisten(self, partition: Partition) -> None:
        heard = self._listeners.pop(partition, None)
        if heard is not None:
            partition.parts.view.unlisten(heard)
