"""Memory: how many bytes the requests of all connections may hold at once.

A connection at rest has a small buffer of its own.  A request that does not fit asks for more here,
and gives it back when it is answered.  If the budget is spent, the connection stops reading and
waits in a queue; the first in the queue goes on when enough was given back.  A request that is
larger than the budget goes on when nothing else is charged, so that no request waits for ever.

Only the thread of the event loop uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["Memory"]

_POOLED = (64 << 10, 256 << 10, 1 << 20)
_POOL_MAX = 16  # buffers of each size that are kept


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
        self._waiting: deque[tuple[int, Callable[[bytearray], object]]] = deque()

    @property
    def waiting(self) -> int:
        """How many connections wait for memory."""
        return len(self._waiting)

    def take(self, size_bytes: int, later: Callable[[bytearray], object]) -> bytearray | None:
        """Return a buffer of at least this size.

        If the budget is spent, return None; `later` gets the buffer when it is free.
        """
        size = next((each for each in _POOLED if each >= size_bytes), size_bytes)
        if self._waiting or not self._fits(size):
            self._waiting.append((size, later))
            return None
        return self._charge(size)

    def give_back(self, buffer: bytearray) -> None:
        """Return a buffer.  No view of it may be in use any more."""
        self.in_use_bytes -= len(buffer)
        pool = self._pools.get(len(buffer))
        if pool is not None and len(pool) < _POOL_MAX:
            pool.append(buffer)
        self._serve()

    def withdraw(self, later: Callable[[bytearray], object]) -> None:
        """Forget a connection that waits: it was closed."""
        self._waiting = deque(each for each in self._waiting if each[1] != later)
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, later = self._waiting.popleft()
            later(self._charge(size))

    def _fits(self, size: int) -> bool:
        return self.in_use_bytes == 0 or self.in_use_bytes + size <= self.limit_bytes

    def _charge(self, size: int) -> bytearray:
        self.in_use_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        pool = self._pools.get(size)
        return pool.pop() if pool else bytearray(size)
