"""Timers: a hierarchical timing wheel, and operations that wait for an event or a time-out.

TimingWheel is the whole of it and does no I/O: someone tells it what time it is, and it answers
with what is due.  Timers puts it behind a lock, asks a clock, and runs one thread if it is told to.
Purgatory holds operations that end when something has happened or when their time is up, whichever
is first, and exactly once.

The wheel has levels of 64 slots.  A slot of level 0 is one millisecond, a slot of level n is as
long as all of level n - 1.  A timeout lies at the level of the highest digit (to base 64) in which
its time differs from now; when the wheel gets there, it moves down.  So adding and cancelling take
constant time, and a timeout is touched at most once for each level before it is due.

Invariant: every timeout in the wheel is later than the wheel's own time, or in `_overdue`; and all
of one slot of level n > 0 lie ahead of the slot that the wheel's time is in.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator

from logstore.clock import Clock, SystemClock
from logstore.closeable import Closeable
from logstore.waking import uninterrupted

__all__ = ["DelayedOperation", "Purgatory", "Timeout", "Timers", "TimingWheel"]

log = logging.getLogger("logstore.timer")

BITS = 6
SLOTS = 1 << BITS
MASK = SLOTS - 1
LEVELS = 11  # 66 bits: whatever an int64 of milliseconds can say
TIME_MAX = (1 << 63) - 1
_OVERDUE, _OUT = -1, -2
LONGEST_SLEEP = 1.0  # seconds; by then a thread of timers that were dropped ends


class Timeout:
    """Something that is to happen at `due_ms`, unless it is cancelled before."""

    __slots__ = ("_at", "act", "due_ms")

    def __init__(self, due_ms: int, act: Callable[[], object]) -> None:
        self.due_ms = due_ms
        self.act = act
        self._at = _OUT  # the number of its slot

    @property
    def pending(self) -> bool:
        """Whether it lies ahead: neither due nor cancelled."""
        return self._at != _OUT

    def __repr__(self) -> str:
        state = "pending" if self.pending else "over"
        return f"<Timeout at {self.due_ms} ms {state}>"


class TimingWheel:
    """Timeouts by their time.  Pure: it calls nobody and asks nobody for the time.

    Times are integer milliseconds of one steady clock.  Not for threads to share: see Timers.

    >>> wheel = TimingWheel()
    >>> tea = wheel.add(200, print)
    >>> wheel.advance(199), wheel.next_due_ms()
    ([], 200)
    >>> wheel.advance(200) == [tea]
    True
    """

    __slots__ = ("_count", "_now", "_occupied", "_overdue", "_slots")

    def __init__(self, now_ms: int = 0) -> None:
        self._now = now_ms
        # A slot is made when it is first used; a set bit of a level means that it holds something.
        self._slots: list[dict[Timeout, None] | None] = [None] * (LEVELS * SLOTS)
        self._occupied = [0] * LEVELS
        self._overdue: dict[Timeout, None] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def now_ms(self) -> int:
        """The time up to which everything has been handed out."""
        return self._now

    def add(self, due_ms: int, act: Callable[[], object]) -> Timeout:
        """A new timeout.  One whose time has come already is due at the next `advance`.  O(1)."""
        timeout = Timeout(due_ms if due_ms < TIME_MAX else TIME_MAX, act)
        self._count += 1
        self._place(timeout)
        return timeout

    def _place(self, timeout: Timeout) -> None:
        due, now = timeout.due_ms, self._now
        if due <= now:
            timeout._at = _OVERDUE
            self._overdue[timeout] = None
            return
        level = ((due ^ now).bit_length() - 1) // BITS
        slot = (due >> (level * BITS)) & MASK
        at = timeout._at = (level << BITS) | slot
        held = self._slots[at]
        if held:
            held[timeout] = None
            return
        if held is None:
            held = self._slots[at] = {}
        held[timeout] = None
        self._occupied[level] |= 1 << slot

    def cancel(self, timeout: Timeout) -> bool:
        """Take a timeout out; False when it was due, or cancelled, before.  O(1)."""
        at = timeout._at
        if at == _OUT:
            return False
        timeout._at = _OUT
        self._count -= 1
        if at == _OVERDUE:
            del self._overdue[timeout]
            return True
        held = self._slots[at]
        assert held is not None
        del held[timeout]
        if not held:
            self._occupied[at >> BITS] &= ~(1 << (at & MASK))
        return True

    def next_due_ms(self) -> int | None:
        """When to call `advance` next; None when nothing is held.

        Never later than the first timeout; it may be earlier, when one has to move down a level.
        """
        if self._overdue:
            return self._now
        found = self._first_slot()
        return None if found is None else found[0]

    def _first_slot(self) -> tuple[int, int, int] | None:
        """(start time, level, slot) of the first slot that holds something."""
        now = self._now
        for level, occupied in enumerate(self._occupied):
            if occupied:
                # Slots of this level ahead of now, in the turn that now is in: see the invariant.
                slot = (occupied & -occupied).bit_length() - 1
                shift = level * BITS
                return ((now >> (shift + BITS)) << (shift + BITS)) | (slot << shift), level, slot
        return None

    def advance(self, now_ms: int) -> list[Timeout]:
        """Move on to a time; what is due by then, earliest first, then in the order of adding.

        A time before the last one changes nothing.
        """
        due: list[Timeout] = []
        if self._overdue:
            due += self._overdue
            self._overdue.clear()
        while now_ms > self._now:
            found = self._first_slot()
            if found is None or found[0] > now_ms:
                self._now = now_ms
                break
            start, level, slot = found
            held = self._slots[(level << BITS) | slot]
            assert held is not None
            self._occupied[level] &= ~(1 << slot)
            self._now = start
            if level == 0:
                due += held
                held.clear()
                continue
            moving = list(held)
            held.clear()
            for timeout in moving:
                if timeout.due_ms == start:
                    due.append(timeout)
                else:
                    self._place(timeout)
        for timeout in due:
            timeout._at = _OUT
        self._count -= len(due)
        return due

    def __iter__(self) -> Iterator[Timeout]:
        yield from self._overdue
        for held in self._slots:
            if held:
                yield from held

    def __repr__(self) -> str:
        return f"<TimingWheel at {self._now} ms with {self._count} timeouts>"


class Timers(Closeable):
    """A timing wheel for threads, on a clock.

    `after` says what is to be called, `run_due` calls what is due.  `start` does that in a daemon
    thread, which sleeps until the first timeout is due; without it nothing is called by itself.
    Nothing is called under the lock, and never too early; an error is logged and stops nobody.

    The thread ends with the Timers: a second after they are dropped, at the latest.
    """

    def __init__(self, clock: Clock | None = None, *, name: str = "logstore timers") -> None:
        self._clock = clock or SystemClock()
        self._name = name
        self._lock = threading.Lock()
        self._wheel = TimingWheel(self._now())
        self._wake = threading.Condition(self._lock)
        self._sleeps_until: float = -1  # what the thread waits for; -1: it does not wait
        self._thread: threading.Thread | None = None
        self._closed = False

    def _now(self) -> int:
        return math.floor(self._clock.monotonic() * 1000)

    def __len__(self) -> int:
        return len(self._wheel)

    def after(self, seconds: float, act: Callable[[], object]) -> Timeout:
        """Have `act` called when `seconds` have passed; never is ``math.inf``."""
        with self._lock:
            # Rounded up: a timeout that comes a millisecond early would be a surprise.
            due = (self._clock.monotonic() + seconds) * 1000
            timeout = self._wheel.add(math.ceil(min(due, TIME_MAX)), act)
            if timeout.due_ms < self._sleeps_until:
                self._wake.notify()
            return timeout

    def cancel(self, timeout: Timeout) -> bool:
        """Take it back; False when it was due or cancelled before."""
        with self._lock:
            return self._wheel.cancel(timeout)

    def run_due(self) -> int:
        """Call what is due now, in this thread; how many were called."""
        with self._lock:
            due = self._wheel.advance(self._now())
        for timeout in due:
            try:
                timeout.act()
            except Exception:
                log.exception("a timeout failed: %r", timeout.act)
        return len(due)

    def next_in(self) -> float | None:
        """Seconds until `run_due` has something to do; None: nothing is waited for."""
        with self._lock:
            due = self._wheel.next_due_ms()
        return None if due is None else max(0.0, due / 1000 - self._clock.monotonic())

    def start(self) -> None:
        """Run the thread.  Starting twice is harmless."""
        with self._lock:
            if self._closed or (self._thread is not None and self._thread.is_alive()):
                return
            thread = threading.Thread(
                target=_run, args=(weakref.ref(self),), name=self._name, daemon=True
            )
            uninterrupted(thread.start)
            self._thread = thread

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """End the thread, after the call it is in.  What was not due yet is not called."""
        with self._lock:
            self._closed = True
            self._wake.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _wait(self) -> None:
        """Sleep until something is due; by the real clock, whatever the injected one says."""
        with self._lock:
            if self._closed:
                return
            due = self._wheel.next_due_ms()
            if due is None:
                self._sleeps_until = math.inf
                self._wake.wait(LONGEST_SLEEP)
            elif (left := due / 1000 - self._clock.monotonic()) > 0:
                self._sleeps_until = due
                self._wake.wait(min(left, LONGEST_SLEEP))
            self._sleeps_until = -1

    def __repr__(self) -> str:
        return f"<Timers with {len(self)} timeouts{' running' if self.running else ''}>"


def _run(timers: weakref.ref[Timers]) -> None:
    """The thread.  Between two naps it asks whether anybody still holds the timers."""
    while True:
        this = timers()
        if this is None or this._closed:
            return
        this.run_due()
        this._wait()
        del this


class DelayedOperation:
    """An operation that waits in a Purgatory.  It ends once: by its event, or by its time-out."""

    __slots__ = ("_done", "_keys", "_lock", "_over", "_ready", "_timeout")

    def __init__(self, keys: tuple[Hashable, ...], ready: Callable[[], bool],
                 done: Callable[[bool], object]) -> None:  # fmt: skip
        self._keys = keys
        self._ready = ready
        self._done = done
        self._over = False
        self._lock = threading.Lock()
        self._timeout: Timeout | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over

    def _end(self) -> bool:
        """Whether it is this call that ends it."""
        with self._lock:
            if self._over:
                return False
            self._over = True
            return True


class Purgatory:
    """Operations that wait until something is so, or until their time is up.

    Whoever changes something that others may wait for calls `notify` with its key; operations that
    are ready then end, in that thread.  Neither a notification between the first look and the
    waiting, nor one beside the time-out, is lost or counted twice.
    """

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, dict[DelayedOperation, None]] = {}

    def __len__(self) -> int:
        """How many keys are waited for."""
        return len(self._waiting)

    def wait(
        self,
        keys: Iterable[Hashable],
        timeout: float,
        ready: Callable[[], bool],
        done: Callable[[bool], object],
    ) -> DelayedOperation:
        """Call ``done(True)`` when `ready` says so, ``done(False)`` after `timeout` seconds.

        `ready` is asked now, and after every `notify` of one of the `keys`; it must be cheap, and
        may be asked by several threads at once.
        """
        operation = DelayedOperation(tuple(keys), ready, done)
        if self._try(operation):
            return operation
        with self._lock:
            for key in operation._keys:
                self._waiting.setdefault(key, {})[operation] = None
        operation._timeout = self._timers.after(timeout, lambda: self._expire(operation))
        # Again: it may have become ready before it could be notified.
        self._try(operation)
        if operation._over:
            self._timers.cancel(operation._timeout)
        return operation

    def notify(self, key: Hashable) -> int:
        """Something happened to `key`: end what is ready by it; how many ended."""
        with self._lock:
            waiting = list(self._waiting.get(key, ()))
        return sum(self._try(operation) for operation in waiting)

    def cancel(self, operation: DelayedOperation) -> bool:
        """End it without calling anybody; False when it was over before."""
        if not operation._end():
            return False
        self._forget(operation)
        return True

    def _try(self, operation: DelayedOperation) -> bool:
        if operation._over or not operation._ready() or not operation._end():
            return False
        self._forget(operation)
        operation._done(True)
        return True

    def _expire(self, operation: DelayedOperation) -> None:
        if operation._end():
            self._forget(operation)
            operation._done(False)

    def _forget(self, operation: DelayedOperation) -> None:
        with self._lock:
            for key in operation._keys:
                waiting = self._waiting.get(key)
                if waiting is not None:
                    waiting.pop(operation, None)
                    if not waiting:
                        del self._waiting[key]
        if operation._timeout is not None:
            self._timers.cancel(operation._timeout)
