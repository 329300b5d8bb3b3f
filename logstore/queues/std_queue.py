"""StdQueue: the interface of the standard library's ``queue.Queue``, on a Queue.

For programs that use ``queue.Queue`` and want their items to survive the process.  An item that was
got is leased until `task_done`, which acknowledges the oldest item that was got and is not done:
``queue.Queue`` does not name it.  Use `Queue` if items can fail.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from typing import Any

from logstore.queues.message import Message
from logstore.queues.queue import Queue

__all__ = ["StdQueue"]


class StdQueue:
    """A `Queue` with the methods of ``queue.Queue``.  Items are bytes, unless it has a serializer.

    `maxsize` limits the items that wait, for the puts of this object: 0 is no limit.  An item is
    done when `task_done` is called.  The visibility time-out of the queue applies: items that are
    not done by then come again.
    """

    def __init__(self, jobs: Queue, maxsize: int = 0) -> None:
        self.maxsize = maxsize
        self._jobs = jobs
        self._got: collections.deque[Message] = collections.deque()
        self._room = threading.Condition()

    def qsize(self) -> int:
        """Return how many items wait."""
        size = self._jobs.size()
        return size.ready + size.delayed

    def empty(self) -> bool:
        """Return whether no item waits."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Return whether `maxsize` items wait."""
        return 0 < self.maxsize <= self.qsize()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put an item; wait for room if the queue is full.  Raises queue.Full, ValueError."""
        if block and timeout is not None and timeout < 0:
            raise ValueError("'timeout' must be a non-negative number")
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._room:
            while self.full():
                left = None if deadline is None else deadline - time.monotonic()
                if not block or (left is not None and left <= 0):
                    raise queue.Full
                self._room.wait(left)
            self._jobs.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next item; wait for one.  Raises queue.Empty, ValueError."""
        if block and timeout is not None and timeout < 0:
            raise ValueError("'timeout' must be a non-negative number")
        message = self._jobs.get(timeout if block else 0)
        self._got.append(message)
        with self._room:
            self._room.notify()
        return message.value

    def put_nowait(self, item: Any) -> None:
        """Put an item, or raise queue.Full."""
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        """Return the next item, or raise queue.Empty."""
        return self.get(block=False)

    def task_done(self) -> None:
        """Acknowledge the oldest item that is not done.  Raises ValueError if there is none."""
        try:
            message = self._got.popleft()
        except IndexError:
            raise ValueError("task_done() called too many times") from None
        message.ack()

    def join(self) -> None:
        """Wait until every item is done."""
        self._jobs.join()
