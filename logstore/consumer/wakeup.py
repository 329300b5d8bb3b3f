"""Bell: wakes one thread, or one task of an event loop.

The waiter calls `clear`, looks for work, and then calls `wait`.  A `ring` after `clear` ends the
wait, so no ring is lost.  To ring a bell that has already rung is one comparison, so that every
append can ring it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from logstore.waking import Wake

__all__ = ["Bell"]


class Bell:
    """Rung by any thread; waited for by one thread or one task."""

    __slots__ = ("_lock", "_loop", "_rung", "_task_wakes", "_wake")

    def __init__(self) -> None:
        self._rung = False  # written under `_lock`, except by `clear`, which only the waiter calls
        self._lock = threading.Lock()
        self._wake = Wake()
        self._loop: asyncio.AbstractEventLoop | None = None  # set while a task waits; under `_lock`
        self._task_wakes: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """End the current wait, or the next one."""
        if self._rung:
            return
        with self._lock:
            self._wake.set()
            if self._loop is not None and self._task_wakes is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
                    self._loop.call_soon_threadsafe(_wake, self._task_wakes)
            # Set `_rung` last: if an interrupt stops this ring, the next one still wakes.
            self._loop = None
            self._rung = True

    def clear(self) -> None:
        """Forget earlier rings.  Call it before looking for work."""
        self._rung = False

    def wait(self, timeout: float | None) -> bool:
        """Wait for a ring since `clear`; return False after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + min(timeout, LONGEST)
        while True:
            with self._lock:
                if self._rung:
                    return True
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            # A ring between the look above and this line has set the Wake: this returns at once.
            self._wake.wait(left)

    async def wait_in_loop(self, timeout: float | None) -> bool:
        """Like `wait`, for a task of an event loop; no thread is blocked."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._rung:
                return True
            # Under the lock: a ring after this line finds the future, one before it was seen above.
            waiting = self._task_wakes = loop.create_future()
            self._loop = loop
        try:
            await asyncio.wait_for(waiting, timeout)
        except TimeoutError:
            return self._rung  # a ring may have been too late for the future
        finally:
            with self._lock:
                self._loop = self._task_wakes = None
        return True


LONGEST = threading.TIMEOUT_MAX


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
