"""Memory: how many bytes the requests of all connections may hold at once.

A connection at rest has a small buffer of its own.  A request that does not fit asks for more here,
and gives it back when it is answered.  If the budget is spent, the connection stops reading and
waits in a queue; the first in the queue goes on when enough was given back.

A connection that waits may hold a buffer, because buffers grow with the bytes that arrive.  If all
charged bytes belong to connections that wait, none would ever be given back.  Then the one that
holds the most goes on, above the budget: it alone, until it gives its buffer back.  So no request
waits for ever, and at most one request is above the budget.

Only the thread of the event loop uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Memory"]

_POOLED = (64 << 10, 256 << 10, 1 << 20)
_POOL_MAX = 16  # buffers of each size that are kept


class _Waiter(NamedTuple):
    """A connection that waits for a larger buffer."""

    size_bytes: int
    held_bytes: int
    later: Callable[[bytearray], object]


class Memory:
    """A budget in bytes, and a pool of buffers.

    >>> memory = Memory(1 << 20)
    >>> buffer = memory.take(100_000, print)
    >>> len(buffer), memory.in_use_bytes
    (262144, 262144)
    >>> memory.give_back(buffer)
    >>> memory.in_use_bytes
    0
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self._pools: dict[int, list[bytearray]] = {size: [] for size in _POOLED}
        self._waiting: deque[_Waiter] = deque()
        self._held_bytes = 0  # of the connections that wait
        self._serving = False

    @property
    def waiting(self) -> int:
        """How many connections wait for memory."""
        return len(self._waiting)

    def take(
        self, size_bytes: int, later: Callable[[bytearray], object], *, held_bytes: int = 0
    ) -> bytearray | None:
        """Return a buffer of at least this size.

        If the budget is spent, return None; `later` gets the buffer when it is free, perhaps before
        this method returns.  `held_bytes`: the size of the buffer that the caller gives back when
        it has the larger one.
        """
        size = next((each for each in _POOLED if each >= size_bytes), size_bytes)
        if not self._waiting and self._fits(size):
            return self._charge(size)
        self._waiting.append(_Waiter(size, held_bytes, later))
        self._held_bytes += held_bytes
        self._serve()
        return None

    def give_back(self, buffer: bytearray) -> None:
        """Return a buffer.  No view of it may be in use any more."""
        self.in_use_bytes -= len(buffer)
        pool = self._pools.get(len(buffer))
        if pool is not None and len(pool) < _POOL_MAX:
            pool.append(buffer)
        self._serve()

    def withdraw(self, later: Callable[[bytearray], object]) -> None:
        """Forget a connection that waits: it was closed."""
        self._waiting = deque(each for each in self._waiting if each.later != later)
        self._held_bytes = sum(each.held_bytes for each in self._waiting)
        self._serve()

    def _serve(self) -> None:
        """Let connections go on.  Each gives its smaller buffer back: a nested call returns."""
        if self._serving:
            return
        self._serving = True
        try:
            while self._waiting:
                first = self._waiting[0]
                if not self._fits(first.size_bytes):
                    if self.in_use_bytes > self._held_bytes:
                        return
                    first = max(self._waiting, key=lambda each: each.held_bytes)
                self._waiting.remove(first)
                self._held_bytes -= first.held_bytes
                first.later(self._charge(first.size_bytes))
        finally:
            self._serving = False

    def _fits(self, size: int) -> bool:
        return self.in_use_bytes == 0 or self.in_use_bytes + size <= self.limit_bytes

    def _charge(self, size: int) -> bytearray:
        self.in_use_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        pool = self._pools.get(size)
        return pool.pop() if pool else bytearray(size)
