"""TaskPool: awaits the handler in tasks of an event loop.

The loop is the caller's, or one in a thread of its own.  Starts are taken in the loop, one task for
each, so that no lock is held across an await.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback

from logstore.waking import uninterrupted
from logstore.workers.context import Runner
from logstore.workers.desk import Desk
from logstore.workers.items import Work

__all__ = ["TaskPool"]


class TaskPool:
    """Up to `concurrency` tasks, and one more for each that was cancelled and does not end."""

    def __init__(
        self,
        desk: Desk,
        runner: Runner,
        name: str,
        concurrency: int,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._desk = desk
        self._runner = runner
        self._target = concurrency
        self.stuck: set[Work] = set()
        self._tasks: dict[Work, asyncio.Task[None]] = {}  # used in the loop only
        self._called = False  # `_start` is scheduled; set before it is, cleared when it runs
        self._closed = False
        self._thread: threading.Thread | None = None
        self._loop = loop or asyncio.new_event_loop()
        if loop is None:
            self._thread = threading.Thread(target=self._run_loop, name=f"{name} loop", daemon=True)
            uninterrupted(self._thread.start)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def nudge(self) -> None:
        if not self._called and not self._closed and self._desk.strands.ready:
            self._called = True
            self._loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        """Make tasks for records that are ready.  In the loop."""
        self._called = False
        if self._closed:
            return
        works: list[Work] = []
        with self._desk.lock:
            room = self._target + len(self.stuck) - len(self._tasks)
            # One by one: a task has one record, and the next of its strand waits for it.
            while len(works) < room and (taken := self._desk.take_locked(1)):
                works += taken
        for work in works:
            self._tasks[work] = self._loop.create_task(self._run(work))

    async def _run(self, work: Work) -> None:
        desk = self._desk
        work.where = asyncio.current_task()
        work.started_at = desk.clock.monotonic()
        outcome = await self._runner.run_in_loop(work)
        with desk.lock:
            self.stuck.discard(work)
            orphans = desk.put_locked([(work, outcome)])
        desk.pass_on(orphans)
        del self._tasks[work]
        self._start()

    def resize(self, concurrency: int) -> None:
        self._target = concurrency
        self.nudge()

    def overdue(self, work: Work) -> None:
        with self._desk.lock:
            if work in self._desk.strands.running:
                self.stuck.add(work)
        if isinstance(work.where, asyncio.Task):
            self._loop.call_soon_threadsafe(work.where.cancel)
        self.nudge()

    def reclaim(self, now: float) -> float | None:
        return None

    def stack(self, work: Work) -> tuple[str, str]:
        task = work.where
        if not isinstance(task, asyncio.Task):
            return "", ""
        frames = task.get_stack()  # of a task that waits: one
        return task.get_name(), "".join(traceback.format_stack(frames[-1])) if frames else ""

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._end_loop)

    def _end_loop(self) -> None:
        """Cancel what still runs, and stop the loop when it has ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        ending = asyncio.gather(*tasks, return_exceptions=True)
        ending.add_done_callback(lambda _: self._loop.stop())
