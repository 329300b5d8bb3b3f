"""Syncs: fsyncs that many requests share.

A produced batch is appended at once and answered when it is durable, in the thread of the event
loop.  `logstore.shared_syncs` has the queues; at most SYNC_THREADS partitions are synced at a time.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from logstore.kafka.workers import LoopCalls
from logstore.partition.partition import Partition
from logstore.shared_syncs import Done, SharedSyncs

__all__ = ["Syncs"]

SYNC_THREADS = 4


class Syncs:
    """Makes appended batches durable, and calls back."""

    def __init__(self, calls: LoopCalls) -> None:
        self._shared = SharedSyncs(
            lambda: ThreadPoolExecutor(SYNC_THREADS, "logstore kafka sync"), deliver=calls.put
        )

    def add(self, partition: Partition, offsets: range, done: Done) -> None:
        """Call ``done(None)`` in the loop's thread when `offsets` are durable.

        If the fsync fails, `done` gets the error.
        """
        appender = partition.parts.appender
        self._shared.add(partition, lambda each: appender.make_durable(each), offsets, done)

    @property
    def count(self) -> int:
        """The number of fsyncs."""
        return self._shared.count

    @property
    def seconds(self) -> float:
        """The time that they took."""
        return self._shared.seconds

    @property
    def appends(self) -> int:
        """The number of appends that they made durable."""
        return self._shared.appends

    def close(self) -> None:
        """Wait for the fsyncs under way."""
        self._shared.close()
