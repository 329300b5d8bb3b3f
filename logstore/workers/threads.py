"""ThreadPool: calls the handler in threads.

A thread takes a chunk of starts at once and brings the outcomes back together, so that a fast
handler pays for one lock per chunk.  The chunk doubles while it takes less than FAST seconds, and
is one record again after a slow one.  If a handler in the middle of a chunk is slow, the control
thread takes the outcomes before it and the starts after it (`reclaim`): a slow record delays no
other strand.

Both threads pop from the deques of a chunk.  A pop is one call in C, so each start and each outcome
is taken by one of them.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from typing import TypeVar

from logstore.waking import uninterrupted
from logstore.workers.context import Runner
from logstore.workers.desk import Desk
from logstore.workers.items import Failed, Outcome, Work

__all__ = ["ThreadPool"]

T = TypeVar("T")

CHUNK_MAX = 64
FAST = 0.001  # seconds
LOOK_SECONDS = 0.01  # how often the control thread looks for chunks that wait


class Chunk:
    """Starts that one thread has taken at once."""

    __slots__ = ("done", "since", "todo")

    def __init__(self, works: list[Work], since: float) -> None:
        self.todo = deque(works)
        self.done: deque[tuple[Work, Outcome]] = deque()
        self.since = since


def drained(queue: deque[T]) -> list[T]:
    """Pop all; another thread may pop at the same time."""
    found: list[T] = []
    while True:
        try:
            found.append(queue.popleft())
        except IndexError:
            return found


class ThreadPool:
    """Up to `concurrency` threads, and one more for each handler that does not return."""

    def __init__(self, desk: Desk, runner: Runner, name: str, concurrency: int) -> None:
        self._desk = desk
        self._runner = runner
        self._name = name
        self._target = concurrency
        self.stuck: set[Work] = set()
        # All below are guarded by the lock of the desk.
        self._filled = threading.Condition(desk.lock)
        self._count = self._idle = self._number = 0
        self._chunks: dict[threading.Thread, Chunk] = {}
        self._closed = False

    def nudge(self) -> None:
        with self._desk.lock:
            ready = self._desk.strands.ready
            woken = min(ready, self._idle)
            self._filled.notify(woken)
            room = self._target + len(self.stuck) - self._count
            made = 0 if self._closed else max(0, min(ready - woken, room))
            self._count += made
        for _ in range(made):
            self._number += 1
            name = f"{self._name} {self._number}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            uninterrupted(thread.start)

    def resize(self, concurrency: int) -> None:
        with self._desk.lock:
            self._target = concurrency
            self._filled.notify_all()  # those that are too many end
        self.nudge()

    def _too_many(self) -> bool:
        return self._closed or self._count > self._target + len(self.stuck)

    def _work(self) -> None:
        """Take, call the handler, bring back; until the pool is closed or too large."""
        desk, me = self._desk, threading.current_thread()
        chunk = Chunk([], 0.0)
        limit = 1
        while True:
            with desk.lock:
                self._chunks.pop(me, None)
                orphans = self._put_locked(chunk)
                works = [] if orphans or self._too_many() else desk.take_locked(limit)
                if not works and not orphans:
                    if self._too_many():
                        self._count -= 1
                        return
                    self._idle += 1
                    self._filled.wait()
                    self._idle -= 1
                chunk = Chunk(works, desk.clock.monotonic())
                if works:
                    self._began_locked(me, chunk)
            if orphans:
                desk.pass_on(orphans)
            if works:
                limit = self._run(chunk, limit)

    def _put_locked(self, chunk: Chunk) -> list[tuple[Work, Outcome]]:
        """Bring back what a chunk has done, and what it has not begun."""
        results, back = drained(chunk.done), drained(chunk.todo)
        self.stuck.difference_update(work for work, _ in results)
        return self._desk.put_locked(results, back)

    def _began_locked(self, me: threading.Thread, chunk: Chunk) -> None:
        if self._desk.strands.ready:
            # One thread wakes the next, so that no thread is woken without need.
            if self._idle:
                self._filled.notify()
            elif self._count < self._target + len(self.stuck):
                self._desk.bell.ring()  # the control thread starts another one
        if len(chunk.todo) > 1:
            if not self._chunks:
                self._desk.bell.ring()  # the control thread watches from now on
            self._chunks[me] = chunk

    def _run(self, chunk: Chunk, limit: int) -> int:
        """Call the handler for a chunk; return the size of the next one."""
        now, strands = self._desk.clock.monotonic, self._desk.strands
        me = threading.current_thread()
        full = len(chunk.todo) == limit
        while True:
            try:
                work = chunk.todo.popleft()
            except IndexError:
                break  # the end, or the control thread took the rest back
            if not work.may_begin or strands.stopping:
                chunk.todo.appendleft(work)
                break
            work.where = me
            work.started_at = now()
            outcome = self._runner.run(work)
            chunk.done.append((work, outcome))
            # The rest of a chunk of one strand must not run after a failed record.
            if isinstance(outcome, Failed) or now() - chunk.since > FAST:
                break
        if now() - chunk.since > FAST:
            return 1
        return min(CHUNK_MAX, 2 * limit) if full else limit

    def overdue(self, work: Work) -> None:
        with self._desk.lock:
            if work in self._desk.strands.running:
                self.stuck.add(work)
        self.nudge()

    def reclaim(self, now: float) -> float | None:
        orphans: list[tuple[Work, Outcome]] = []
        with self._desk.lock:
            for chunk in self._chunks.values():
                if now - chunk.since > LOOK_SECONDS:
                    orphans += self._put_locked(chunk)
            waiting = any(chunk.todo or chunk.done for chunk in self._chunks.values())
        self._desk.pass_on(orphans)
        return now + LOOK_SECONDS if waiting else None

    def stack(self, work: Work) -> tuple[str, str]:
        thread = work.where
        if not isinstance(thread, threading.Thread):
            return "", ""
        frame = sys._current_frames().get(thread.ident or 0)
        return thread.name, "" if frame is None else "".join(traceback.format_stack(frame))

    def close(self) -> None:
        with self._desk.lock:
            self._closed = True
            self._filled.notify_all()
