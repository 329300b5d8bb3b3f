"""Syncs: fsyncs that many requests share.

A produced batch is appended at once and answered when it is durable.  For each partition there is
at most one fsync under way; all that is appended meanwhile is covered by the next one.  Partitions
are synced at the same time, by at most SYNC_THREADS threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from logstore.kafka.workers import LoopCalls
from logstore.partition.partition import Partition

__all__ = ["Syncs"]

SYNC_THREADS = 4


class _Queue:
    """The appends of one partition that wait for an fsync."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.running = False
        self.waiting: list[tuple[range, Callable[[BaseException | None], object]]] = []


class Syncs:
    """Makes appended batches durable, and calls back."""

    def __init__(self, calls: LoopCalls) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._queues: dict[Partition, _Queue] = {}
        self._pool: ThreadPoolExecutor | None = None
        self.count = 0  # fsyncs
        self.appends = 0  # appends that they made durable

    def add(
        self,
        partition: Partition,
        offsets: range,
        done: Callable[[BaseException | None], object],
    ) -> None:
        """Call ``done(None)`` in the loop's thread when `offsets` are durable.

        If the fsync fails, `done` gets the error.
        """
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(SYNC_THREADS, "logstore kafka sync")
            queue = self._queues.setdefault(partition, _Queue())
            queue.waiting.append((offsets, done))
            if queue.running:
                return
            queue.running = True
            self._pool.submit(self._run, partition, queue)

    def _run(self, partition: Partition, queue: _Queue) -> None:
        while True:
            with self._lock:
                batch, queue.waiting = queue.waiting, []
                if not batch:
                    queue.running = False
                    if self._queues.get(partition) is queue:
                        del self._queues[partition]
                    return
            error: BaseException | None = None
            start = min(offsets.start for offsets, _ in batch)
            stop = max(offsets.stop for offsets, _ in batch)
            try:
                partition.parts.appender.make_durable(range(start, stop))
            except BaseException as raised:  # noqa: BLE001  passed on to the requests
                error = raised
            with self._lock:
                self.count += 1
                self.appends += len(batch)

            def tell(
                batch: list[tuple[range, Callable[[BaseException | None], object]]] = batch,
                error: BaseException | None = error,
            ) -> None:
                for _, done in batch:
                    done(error)

            self._calls.put(tell)

    def close(self) -> None:
        """Wait for the fsyncs under way."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
