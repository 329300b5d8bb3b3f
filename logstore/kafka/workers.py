"""Workers: threads for handlers that wait, and the way back to the loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["LoopCalls", "Workers"]


class LoopCalls:
    """Calls from other threads that the loop's thread carries out, in order.

    Many calls cost one wake-up of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._woken = False

    def put(self, call: Callable[[], object]) -> None:
        """Have something called in the loop's thread.  After the loop has ended it is dropped."""
        with self._lock:
            self._calls.append(call)
            if self._woken:
                return
            self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._run)
        except RuntimeError:  # the loop is closed
            self._calls.clear()

    def _run(self) -> None:
        with self._lock:
            self._woken = False
            calls, self._calls = self._calls, deque()
        for call in calls:
            try:
                call()
            except Exception as error:  # noqa: BLE001  logged; the other calls are made
                self._loop.call_exception_handler({"message": "a call failed", "exception": error})


class Workers:
    """A pool of threads.  Each connection has at most one request here."""

    def __init__(self, threads: int, calls: LoopCalls) -> None:
        self._pool = ThreadPoolExecutor(threads, "logstore kafka io")
        self._calls = calls
        self._threads = threads
        self._under_way = 0  # changed by the loop's thread only

    @property
    def busy(self) -> int:
        """How many threads work."""
        return min(self._under_way, self._threads)

    @property
    def queued(self) -> int:
        """How many requests wait for a thread."""
        return self._under_way - self.busy

    def submit(
        self, act: Callable[[], object], done: Callable[[object, BaseException | None], object]
    ) -> None:
        """Call `act` in a worker's thread, then ``done(result, error)`` in the loop's."""

        def run() -> None:
            try:
                result, error = act(), None
            except BaseException as raised:  # noqa: BLE001  passed on to `done`
                result, error = None, raised
            self._calls.put(lambda: ended(result, error))

        def ended(result: object, error: BaseException | None) -> None:
            self._under_way -= 1
            done(result, error)

        self._under_way += 1
        self._pool.submit(run)

    def close(self) -> None:
        """Wait for the threads to end."""
        self._pool.shutdown(wait=True)
