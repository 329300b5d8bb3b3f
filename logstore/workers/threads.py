"""ThreadPool: calls the handler in threads.

A thread takes a chunk of starts at once and brings the outcomes back together, so that a fast
handler pays for one lock per chunk.  The chunk doubles while it takes less than FAST seconds, and
is one record again after a slow one.  Starts that wait behind a slow handler are taken back by the
control thread (`reclaim`), so that a slow record delays no other strand.

A chunk is a deque: its thread pops on the left and the control thread on the right.  Both are
single calls in C, so no start is taken by both.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque

from logstore.waking import uninterrupted
from logstore.workers.context import Runner
from logstore.workers.desk import Desk
from logstore.workers.items import DONE, Outcome, Work

__all__ = ["ThreadPool"]

CHUNK_MAX = 64
FAST = 0.001  # seconds
LOOK_SECONDS = 0.01  # how often the control thread looks for chunks that wait


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
        self._chunks: dict[threading.Thread, tuple[float, deque[Work]]] = {}
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
        results: list[tuple[Work, Outcome]] = []
        back: list[Work] = []
        limit = 1
        while True:
            with desk.lock:
                self._chunks.pop(me, None)
                self.stuck.difference_update(work for work, _ in results)
                orphans = desk.put_locked(results, back)
                works = [] if orphans or self._too_many() else desk.take_locked(limit)
                if not works and not orphans:
                    if self._too_many():
                        self._count -= 1
                        return
                    self._idle += 1
                    self._filled.wait()
                    self._idle -= 1
                chunk = deque(works)
                if works:
                    self._began_locked(me, chunk)
            if orphans:
                desk.pass_on(orphans)
            results, back = [], []
            if chunk:
                limit = self._run(chunk, results, back, limit)

    def _began_locked(self, me: threading.Thread, chunk: deque[Work]) -> None:
        if self._desk.strands.ready:
            # One thread wakes the next, so that no thread is woken without need.
            if self._idle:
                self._filled.notify()
            elif self._count < self._target + len(self.stuck):
                self._desk.bell.ring()  # the control thread starts another one
        if len(chunk) > 1:
            if not self._chunks:
                self._desk.bell.ring()  # the control thread watches from now on
            self._chunks[me] = self._desk.clock.monotonic(), chunk

    def _run(
        self,
        chunk: deque[Work],
        results: list[tuple[Work, Outcome]],
        back: list[Work],
        limit: int,
    ) -> int:
        """Call the handler for a chunk; return the size of the next one."""
        now = self._desk.clock.monotonic
        me = threading.current_thread()
        began, full = now(), len(chunk) == limit
        while chunk:
            try:
                work = chunk.popleft()
            except IndexError:
                break  # the control thread took the rest back
            if not work.may_begin:
                back.append(work)
                break
            work.where = me
            work.started_at = now()
            outcome = self._runner.run(work)
            results.append((work, outcome))
            # The rest of a chunk of one strand must not run after a failed record.
            if outcome is not DONE or now() - began > FAST:
                break
        while chunk:
            try:
                back.append(chunk.popleft())
            except IndexError:
                break
        if now() - began > FAST:
            return 1
        return min(CHUNK_MAX, 2 * limit) if full else limit

    def overdue(self, work: Work) -> None:
        with self._desk.lock:
            if work in self._desk.strands.running:
                self.stuck.add(work)
        self.nudge()

    def reclaim(self, now: float) -> float | None:
        with self._desk.lock:
            for since, chunk in self._chunks.values():
                back: list[Work] = []
                while now - since > LOOK_SECONDS and chunk:
                    try:
                        back.append(chunk.pop())
                    except IndexError:
                        break
                self._desk.strands.put_back(back[::-1])
            waiting = any(chunk for _, chunk in self._chunks.values())
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
