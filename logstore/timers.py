"""TimingWheel, Timers, Purgatory: time-outs, and operations that wait for an event or a time-out.

TimingWheel is a hierarchical timing wheel.  It has no lock and reads no clock: `advance` gets the
time and returns the timeouts that are due.  Timers adds a lock, a clock and, after `start`, one
thread.  Purgatory holds operations that end by an event or by a time-out, exactly once.

The wheel has levels of 64 slots.  A slot of level 0 is one millisecond; a slot of level n is as
long as the whole level n - 1.  A timeout is at the level of the highest base-64 digit in which its
time differs from the wheel's time.  When the wheel's time reaches its slot, the timeout moves to a
lower level.  So `add` and `cancel` take constant time, and a timeout moves at most once per level.

Invariant: a timeout in the wheel is later than the wheel's time, or is in `_overdue`.  At each
level, all occupied slots are after the slot of the wheel's time.
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
LEVELS = 11  # 66 bits: enough for every int64 of milliseconds
TIME_MAX = (1 << 63) - 1
_OVERDUE, _OUT = -1, -2  # for Timeout._at: in `_overdue`; in no wheel
LONGEST_SLEEP = 1.0  # seconds; the thread then checks whether its Timers still exist


class Timeout:
    """A call of `act` at `due_ms`, unless it is cancelled before."""

    __slots__ = ("_at", "act", "due_ms")

    def __init__(self, due_ms: int, act: Callable[[], object]) -> None:
        self.due_ms = due_ms
        self.act = act
        self._at = _OUT  # level * SLOTS + slot, or _OVERDUE, or _OUT

    @property
    def pending(self) -> bool:
        """Return whether it is in the wheel: neither handed out nor cancelled."""
        return self._at != _OUT

    def __repr__(self) -> str:
        state = "pending" if self.pending else "over"
        return f"<Timeout at {self.due_ms} ms {state}>"


class TimingWheel:
    """Timeouts by their time.  It calls no timeout and reads no clock.

    Times are integer milliseconds of one monotonic clock.  Threads must not share it: see Timers.

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
        # A slot's dict is made at its first use, and keeps the order of adding.  Bit n of
        # `_occupied[level]` is set if slot n of that level is not empty.
        self._slots: list[dict[Timeout, None] | None] = [None] * (LEVELS * SLOTS)
        self._occupied = [0] * LEVELS
        self._overdue: dict[Timeout, None] = {}  # added with a time that had passed
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def now_ms(self) -> int:
        """Return the wheel's time: `advance` has returned every timeout up to it."""
        return self._now

    def add(self, due_ms: int, act: Callable[[], object]) -> Timeout:
        """Add a timeout.  If its time has passed, the next `advance` returns it.  O(1)."""
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
        # The highest base-64 digit in which the two times differ.
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
        """Remove a timeout; return False if it was handed out or cancelled before.  O(1)."""
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
        """Return the time of the next useful `advance`, or None if the wheel is empty.

        It is never later than the first timeout.  It is earlier if that one first has to move to a
        lower level.
        """
        if self._overdue:
            return self._now
        found = self._first_slot()
        return None if found is None else found[0]

    def _first_slot(self) -> tuple[int, int, int] | None:
        """Return (start time, level, slot) of the first slot that is not empty, or None."""
        now = self._now
        for level, occupied in enumerate(self._occupied):
            if occupied:
                # By the invariant, all occupied slots are after `now` and have the same higher
                # digits as `now`.  The lowest level with a slot has the first one.
                slot = (occupied & -occupied).bit_length() - 1
                shift = level * BITS
                return ((now >> (shift + BITS)) << (shift + BITS)) | (slot << shift), level, slot
        return None

    def advance(self, now_ms: int) -> list[Timeout]:
        """Advance to `now_ms`; return the timeouts that are due, earliest first.

        Timeouts of the same time are in the order of adding.  A time before the wheel's time
        changes nothing.
        """
        due: list[Timeout] = []  # overdue ones are first: their time is the earliest
        if self._overdue:
            due += self._overdue
            self._overdue.clear()
        while now_ms > self._now:
            found = self._first_slot()
            # Empty slots are not visited: a long sleep costs as much as a short one.
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
            # Now that the wheel's time is the start of the slot, each of its timeouts differs from
            # it in a lower digit, or is due.
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
    """A timing wheel with a lock and a clock: threads may share it.

    `after` adds a timeout, and `run_due` calls those that are due.  `start` calls `run_due` in a
    daemon thread, which sleeps until the first timeout is due; without it, the caller does.  A
    timeout is called without the lock and never too early.  If it raises, the error is logged and
    the others are called.

    The thread drops its reference to the Timers after each sleep of at most a second.  So it ends
    at most a second after the last other reference is dropped.
    """

    def __init__(self, clock: Clock | None = None, *, name: str = "logstore timers") -> None:
        self._clock = clock or SystemClock()
        self._name = name
        self._lock = threading.Lock()
        self._wheel = TimingWheel(self._now())
        self._wake = threading.Condition(self._lock)
        # The time that the thread sleeps until; -1: it does not sleep.  `after` wakes the thread
        # only for an earlier timeout.
        self._sleeps_until: float = -1
        self._thread: threading.Thread | None = None
        self._closed = False

    def _now(self) -> int:
        return math.floor(self._clock.monotonic() * 1000)

    def __len__(self) -> int:
        return len(self._wheel)

    def after(self, seconds: float, act: Callable[[], object]) -> Timeout:
        """Add a call of `act` in `seconds`; ``math.inf`` is never."""
        with self._lock:
            # Rounded up, so that a timeout is never a millisecond too early.
            due = (self._clock.monotonic() + seconds) * 1000
            timeout = self._wheel.add(math.ceil(min(due, TIME_MAX)), act)
            if timeout.due_ms < self._sleeps_until:  # most timeouts are later than the first one
                self._wake.notify()
            return timeout

    def cancel(self, timeout: Timeout) -> bool:
        """Remove a timeout; return False if it was due or cancelled before."""
        with self._lock:
            return self._wheel.cancel(timeout)

    def run_due(self) -> int:
        """Call the timeouts that are due, in this thread; return their number."""
        with self._lock:
            # Only the wheel needs the lock: a timeout may add and cancel others.
            due = self._wheel.advance(self._now())
        for timeout in due:
            try:
                timeout.act()
            except Exception:
                log.exception("a timeout failed: %r", timeout.act)
        return len(due)

    def next_in(self) -> float | None:
        """Return the seconds until `run_due` has work, or None if there is no timeout."""
        with self._lock:
            due = self._wheel.next_due_ms()
        return None if due is None else max(0.0, due / 1000 - self._clock.monotonic())

    def start(self) -> None:
        """Start the thread, unless it runs or this is closed."""
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
        """Return whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """End the thread and wait for it.  Timeouts that are not due yet are not called."""
        with self._lock:
            self._closed = True
            self._wake.notify_all()  # the thread then sees `_closed`
            thread = self._thread
        # A timeout may close the Timers: a thread cannot wait for itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _wait(self) -> None:
        """Sleep until a timeout is due, in seconds of the real clock, at most LONGEST_SLEEP."""
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
    """Call due timeouts until the Timers are closed or collected.  The function of the thread."""
    while True:
        this = timers()
        if this is None or this._closed:
            return
        this.run_due()
        this._wait()
        del this  # the only strong reference of this thread: the Timers may be collected here


class DelayedOperation:
    """An operation that waits in a Purgatory.  It ends once: by its event or by its time-out."""

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
        """Return whether it has ended."""
        return self._over

    def _end(self) -> bool:
        """End the operation; return False if another call ended it before.

        The lock makes this the one decision between event, time-out and `cancel`.
        """
        with self._lock:
            if self._over:
                return False
            self._over = True
            return True


class Purgatory:
    """Operations that wait for a condition or for a time-out.

    A thread that changes a state calls `notify` with its key.  Operations that are ready then end
    in that thread.  No notification is lost: `wait` checks the condition again after it has
    registered the operation.  An operation never ends twice: see `DelayedOperation._end`.
    """

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, dict[DelayedOperation, None]] = {}

    def __len__(self) -> int:
        """Return the number of keys with a waiting operation."""
        return len(self._waiting)

    def wait(
        self,
        keys: Iterable[Hashable],
        timeout: float,
        ready: Callable[[], bool],
        done: Callable[[bool], object],
    ) -> DelayedOperation:
        """Call ``done(True)`` when `ready` returns True, ``done(False)`` after `timeout` seconds.

        `ready` is called now, and after every `notify` of one of the `keys`.  It must be cheap, and
        several threads may call it at once.
        """
        operation = DelayedOperation(tuple(keys), ready, done)
        # An operation that is ready now is never registered.
        if self._try(operation):
            return operation
        with self._lock:
            for key in operation._keys:
                self._waiting.setdefault(key, {})[operation] = None
        operation._timeout = self._timers.after(timeout, lambda: self._expire(operation))
        # Again: a `notify` before the registration above did not find this operation.
        self._try(operation)
        # Another thread may have ended it before `_timeout` was set, and so did not cancel it.
        if operation._over:
            self._timers.cancel(operation._timeout)
        return operation

    def notify(self, key: Hashable) -> int:
        """End the operations that wait for `key` and are ready; return their number."""
        with self._lock:
            # A copy: `ready` and `done` run without the lock, and may wait or notify.
            waiting = list(self._waiting.get(key, ()))
        return sum(self._try(operation) for operation in waiting)

    def cancel(self, operation: DelayedOperation) -> bool:
        """End an operation without calling `done`; return False if it had ended before."""
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
