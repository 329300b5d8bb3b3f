"""AsyncQueue: a Queue for asyncio, with the same engine.

A task waits for a message in the event loop: an append in any thread wakes it, and no thread is
blocked.  Messages are read in the loop, usually from the page cache.  Calls that wait for an fsync
run in the loop's thread pool.

Tasks may share a queue.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import time
from collections.abc import AsyncIterator
from typing import Any, Self

from logstore.consumer.wakeup import Bell
from logstore.queues.message import Message, one_turn
from logstore.queues.queue import Queue, QueueSize
from logstore.record import Record
from logstore.store.store import Store
from logstore.store.topic import Position

__all__ = ["AsyncQueue"]


class AsyncQueue:
    """A `Queue` for asyncio: ``async for job in AsyncQueue(store, "jobs")``.

    The arguments are those of Queue.  ``async with`` closes it.  A Message is used as with Queue:
    its `ack` does not wait; `flush` makes all acknowledgements durable.
    """

    def __init__(self, store: Store, topic: str, **options: Any) -> None:
        self.queue = Queue(store, topic, **options)

    async def put(self, value: Any, **options: Any) -> Position:
        """Append a message; see `Queue.put`."""
        return await asyncio.to_thread(functools.partial(self.queue.put, value, **options))

    async def get(self, timeout: float | None = None) -> Message:
        """Lease the next message; wait for one, for at most `timeout` seconds.

        Raises queue.Empty after the timeout.  A task that is cancelled leaves no message leased.
        """
        found = self.queue.try_get()
        if found is not None:
            return found
        deadline = None if timeout is None else time.monotonic() + timeout
        bell, line = Bell(), self.queue.line
        while True:
            bell.clear()
            line.add(bell)
            try:
                found = self.queue.try_get()
                if found is not None:
                    return found
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not await bell.wait_in_loop(left):
                    raise queue.Empty
            finally:
                # Also if the task is cancelled: its ring is for the next one then.
                line.leave(bell)

    async def get_many(self, count: int, timeout: float | None = 0) -> list[Message]:
        """Lease up to `count` messages; wait only for the first one."""
        try:
            found = [await self.get(timeout)] if count > 0 else []
        except queue.Empty:
            return []
        while len(found) < count and (more := self.queue.try_get()) is not None:
            found.append(more)
        return found

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages; each is acknowledged when the loop asks for the next one."""
        while True:
            try:
                message = await self.get(self.queue.timeout)
            except queue.Empty:
                return
            with one_turn(message):
                yield message
            await asyncio.sleep(0)  # let other tasks run, even if there are always more messages

    def peek(self, count: int = 1) -> list[Record]:
        """Return the records of the next messages, without a lease."""
        return self.queue.peek(count)

    def size(self) -> QueueSize:
        """Return how many messages the queue has, for its group."""
        return self.queue.size()

    async def join(self, timeout: float | None = None) -> bool:
        """Wait until every message is acknowledged or archived; return False after `timeout`."""
        return await asyncio.to_thread(self.queue.join, timeout)

    async def flush(self) -> None:
        """Make all acknowledgements so far durable."""
        await asyncio.to_thread(self.queue.flush)

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self.queue.closed

    async def close(self) -> None:
        """Give back the leased messages, and make all acknowledgements durable."""
        await asyncio.to_thread(self.queue.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        await self.close()
