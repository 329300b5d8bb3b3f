"""SharedSyncs: fsyncs that many appends share, without a thread for each waiting log.

For each log there is at most one fsync under way; all that is appended meanwhile is covered by the
next one.  Logs are synced at the same time, by the few threads of a pool.

The module knows neither logs nor files: a caller gives the function that syncs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a slow import, for the types only
    from concurrent.futures import Executor

__all__ = ["Done", "SharedSyncs"]

# Called with None when the offsets are durable, else with the error.
Done = Callable[[BaseException | None], object]


class _Queue:
    """The appends of one log that wait for an fsync."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.running = False
        self.waiting: list[tuple[range, Done]] = []


class SharedSyncs:
    """Makes appended records durable, and calls back.

    `make_pool` makes the threads at the first use.  `deliver` gets a function that calls the
    callbacks of one fsync; by default the thread of the pool calls it.
    """

    def __init__(
        self,
        make_pool: Callable[[], Executor],
        deliver: Callable[[Callable[[], None]], object] = lambda call: call(),
    ) -> None:
        self._make_pool = make_pool
        self._deliver = deliver
        self._lock = threading.Lock()
        self._queues: dict[Hashable, _Queue] = {}
        self._pool: Executor | None = None
        self.count = 0  # fsyncs
        self.seconds = 0.0  # that they took
        self.appends = 0  # appends that they made durable

    def add(self, key: Hashable, sync: Callable[[range], None], offsets: range, done: Done) -> None:
        """Call ``done(None)`` when `offsets` are durable; with the error if `sync` raises one.

        `sync` makes a range of offsets durable.  It is the same function for every call with this
        `key`.
        """
        with self._lock:
            if self._pool is None:
                self._pool = self._make_pool()
            queue = self._queues.setdefault(key, _Queue())
            queue.waiting.append((offsets, done))
            if queue.running:
                return
            queue.running = True
            self._pool.submit(self._run, key, sync, queue)

    def _run(self, key: Hashable, sync: Callable[[range], None], queue: _Queue) -> None:
        while True:
            with self._lock:
                batch, queue.waiting = queue.waiting, []
                if not batch:
                    queue.running = False
                    if self._queues.get(key) is queue:
                        del self._queues[key]
                    return
            error: BaseException | None = None
            start = min(offsets.start for offsets, _ in batch)
            stop = max(offsets.stop for offsets, _ in batch)
            began = time.monotonic()
            try:
                sync(range(start, stop))
            except BaseException as raised:  # noqa: BLE001  passed on to the callers
                error = raised
            with self._lock:
                self.count += 1
                self.seconds += time.monotonic() - began
                self.appends += len(batch)

            def tell(
                batch: list[tuple[range, Done]] = batch, error: BaseException | None = error
            ) -> None:
                for _, done in batch:
                    done(error)

            self._deliver(tell)

    def close(self) -> None:
        """Wait for the fsyncs under way."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
