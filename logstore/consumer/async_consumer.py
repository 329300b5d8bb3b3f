"""AsyncConsumer: a Consumer for asyncio, with the same engine.

A task waits for records in the event loop: an append in any thread wakes it, and no thread is
blocked.  Records are read in the loop, usually from the page cache.  The background thread of the
store does the commits, because an fsync can be slow.

Tasks must not share a consumer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

from logstore.consumer.consumer import Consumer
from logstore.consumer.rebalancing import Topics
from logstore.consumer.received import ReceivedRecord
from logstore.coordinators.lag import Lag
from logstore.coordinators.offset_book import Offsets
from logstore.coordinators.offset_records import CommittedOffset, TopicPartition
from logstore.store.store import Store

__all__ = ["AsyncConsumer"]


class AsyncConsumer:
    """A `Consumer` for asyncio: ``async for record in consumer``, ``await consumer.poll()``.

    The arguments are those of Consumer.  ``async with`` closes it.  Methods that do not wait (seek,
    position, pause, lag) are plain functions.
    """

    def __init__(self, store: Store, *topics: Topics, **options: Any) -> None:
        self.consumer = Consumer(store, *topics, **options)

    # ---- reading ----

    async def poll(
        self, *, max_records: int = 500, timeout: float | None = None
    ) -> list[ReceivedRecord]:
        """Return the next records, at most `max_records`; an empty list after `timeout` seconds."""
        consumer = self.consumer
        limit = consumer.timeout if timeout is None else timeout
        deadline = None if limit is None else time.monotonic() + limit
        while True:
            records = consumer._try_poll(max_records)
            if records:
                return records
            if not await self._wait(deadline):
                return []

    async def _wait(self, deadline: float | None) -> bool:
        """Wait until the bell rings; return False at the deadline."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        consumer = self.consumer
        await consumer._bell.wait_in_loop(consumer._nap(left))
        return True

    async def __aiter__(self) -> AsyncIterator[ReceivedRecord]:
        """Yield records one by one; end after `timeout` seconds without a record."""
        consumer = self.consumer
        while True:
            deadline = None if consumer.timeout is None else time.monotonic() + consumer.timeout
            run = consumer._try_run()
            while run is None:
                if not await self._wait(deadline):
                    return
                run = consumer._try_run()
            try:
                for record in run:
                    yield record
            finally:
                # Also if the task is cancelled at `yield`: the position is after the last record it
                # got.
                consumer._positions.settle()
            await asyncio.sleep(0)  # let other tasks run, even if there are always more records

    # ---- committing ----

    async def commit(self, offsets: Offsets | None = None) -> None:
        """Commit the positions, or the given offsets; they are durable when it returns."""
        # The fsync is in the background thread of the store.
        await asyncio.wrap_future(self.consumer.commit_later(offsets))

    def committed(
        self, *partitions: tuple[str, int]
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Return the group's committed offsets."""
        return self.consumer.committed(*partitions)

    # ---- the methods of Consumer that do not wait ----

    def subscribe(self, *topics: Topics) -> None:
        """Read these topics from now on."""
        self.consumer.subscribe(*topics)

    def assign(self, partitions: list[tuple[str, int]]) -> None:
        """Read only these partitions."""
        self.consumer.assign(partitions)

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that it reads now."""
        return self.consumer.assignment()

    def seek(self, partition: tuple[str, int], offset: Any) -> None:
        """Read on at an offset, "beginning", "end", or a datetime."""
        self.consumer.seek(partition, offset)

    def position(self, partition: tuple[str, int]) -> int:
        """Return the offset that is read next."""
        return self.consumer.position(partition)

    def pause(self, *partitions: tuple[str, int]) -> None:
        """Return no records of the named partitions, or of all, until `resume`."""
        self.consumer.pause(*partitions)

    def resume(self, *partitions: tuple[str, int]) -> None:
        """Return records of the named partitions, or of all, again."""
        self.consumer.resume(*partitions)

    def lag(self) -> Mapping[TopicPartition, Lag]:
        """Return the distance of each partition's position to its end."""
        return self.consumer.lag()

    # ---- closing ----

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self.consumer.closed

    async def close(self) -> None:
        """Commit the returned records' offsets if `auto_commit` is set, and leave the group."""
        self.consumer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.consumer.__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        return f"<Async{repr(self.consumer)[1:]}"
