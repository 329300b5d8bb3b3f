"""Bell: wakes whoever waits, a thread or a task of an event loop.

The one who waits clears it, looks whether there is something to do, and only then waits: a ring in
between is not lost.  Ringing a bell that has rung costs next to nothing, so that it can be done
after every append.
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
        self._rung = False
        self._lock = threading.Lock()
        self._wake = Wake()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task_wakes: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake whoever waits, or will."""
        if self._rung:
            return
        with self._lock:
            self._wake.set()
            if self._loop is not None and self._task_wakes is not None:
                with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits any more
                    self._loop.call_soon_threadsafe(_wake, self._task_wakes)
            # Last: a ring that an interrupt stops does not keep the next one from waking.
            self._loop = None
            self._rung = True

    def clear(self) -> None:
        """From now on a ring counts."""
        self._rung = False

    def wait(self, timeout: float | None) -> bool:
        """Wait for a ring since `clear`; False: the time is up."""
        deadline = None if timeout is None else time.monotonic() + min(timeout, LONGEST)
        while True:
            with self._lock:
                if self._rung:
                    return True
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._wake.wait(left)

    async def wait_in_loop(self, timeout: float | None) -> bool:
        """As `wait`, for a task: no thread waits meanwhile."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._rung:
                return True
            waiting = self._task_wakes = loop.create_future()
            self._loop = loop
        try:
            await asyncio.wait_for(waiting, timeout)
        except TimeoutError:
            return self._rung
        finally:
            with self._lock:
                self._loop = self._task_wakes = None
        return True


LONGEST = threading.TIMEOUT_MAX


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
