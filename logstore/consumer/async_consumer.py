"""AsyncConsumer: a Consumer for asyncio, with the same engine.

What waits, waits in the event loop: an append in any thread wakes the task, and no thread sits
there meanwhile.  Reading itself happens in the loop; it is as quick as the page cache.  Commits
are carried out by the one background thread of the store, since a disk can be slow.

Not for tasks to share; each has its own.
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
    """As `Consumer`, whose arguments it takes: ``async for record in consumer``, ``await poll()``.

    ``async with`` closes it.  What does not wait (seek, position, pause, lag) is not awaited.
    """

    def __init__(self, store: Store, *topics: Topics, **options: Any) -> None:
        self.consumer = Consumer(store, *topics, **options)

    # ---- reading ----

    async def poll(
        self, *, max_records: int = 500, timeout: float | None = None
    ) -> list[ReceivedRecord]:
        """The next records, at most `max_records`; none when `timeout` seconds bring none."""
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
        """Until there is something to do; False: the time is up."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        consumer = self.consumer
        await consumer._bell.wait_in_loop(consumer._nap(left))
        return True

    async def __aiter__(self) -> AsyncIterator[ReceivedRecord]:
        """Records one by one; ends when nothing comes for `timeout` seconds."""
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
                consumer._positions.settle()
            await asyncio.sleep(0)  # others have their turn, however much there is to read

    # ---- committing ----

    async def commit(self, offsets: Offsets | None = None) -> None:
        """Commit where this consumer is, or the given offsets; durable when it returns."""
        await asyncio.wrap_future(self.consumer.commit_later(offsets))

    def committed(
        self, *partitions: tuple[str, int]
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """What the group has committed."""
        return self.consumer.committed(*partitions)

    # ---- the same ----

    def subscribe(self, *topics: Topics) -> None:
        """Read these topics from now on."""
        self.consumer.subscribe(*topics)

    def assign(self, partitions: list[tuple[str, int]]) -> None:
        """Read just these partitions."""
        self.consumer.assign(partitions)

    def assignment(self) -> list[TopicPartition]:
        """The partitions that it reads now."""
        return self.consumer.assignment()

    def seek(self, partition: tuple[str, int], offset: Any) -> None:
        """Read on at an offset, "beginning", "end", or a datetime."""
        self.consumer.seek(partition, offset)

    def position(self, partition: tuple[str, int]) -> int:
        """The offset of the record that comes next."""
        return self.consumer.position(partition)

    def pause(self, *partitions: tuple[str, int]) -> None:
        """Hand out nothing of these, or of all, until `resume`."""
        self.consumer.pause(*partitions)

    def resume(self, *partitions: tuple[str, int]) -> None:
        """Go on with these, or with all."""
        self.consumer.resume(*partitions)

    def lag(self) -> Mapping[TopicPartition, Lag]:
        """How far behind the end each partition is."""
        return self.consumer.lag()

    # ---- closing ----

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self.consumer.closed

    async def close(self) -> None:
        """Commit what was handed out, if it commits by itself, and leave the group."""
        self.consumer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.consumer.__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        return f"<Async{repr(self.consumer)[1:]}"
