"""Gate, Wake, Notice, uninterrupted: waiting between threads that a Ctrl-C cannot break.

`threading.Event` and `threading.Condition` are Python code around a lock.  An interrupt inside of
them may leave the lock taken, and the next call waits for ever.  Here each change is one call of a
lock that is written in C: an interrupt is handled before or after it.

Invariant: CPython handles signals only where a function begins, after a call, and where a loop
jumps back.  So statements without a call between them are one step for a signal handler.  The
methods below, and code that uses them, depend on that.  `logstore.testing.explore_interrupts` tests
it.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Gate", "Notice", "Wake", "uninterrupted"]

T = TypeVar("T")


class _Shield(threading.local):
    up = False  # this thread runs for `uninterrupted`


_shield = _Shield()


class Gate:
    """Closed until it is opened; then it stays open.  Any number of threads may wait for it."""

    __slots__ = ("lock", "opened")

    def __init__(self) -> None:
        self.opened = False
        self.lock = threading.Lock()  # taken while the gate is closed
        self.lock.acquire()

    def open(self) -> None:
        """Open the gate: all waiting threads continue.  Does nothing if it is open."""
        self.opened = True
        try:  # noqa: SIM105  contextlib.suppress is Python code, and can be interrupted
            self.lock.release()
        except RuntimeError:
            pass  # open already

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the gate is open; return False after `timeout` seconds."""
        if not self.opened:
            try:
                self.lock.acquire(True, _seconds(timeout))
            finally:
                # The lock was taken by the thread that passes: release it for the next one.
                if self.opened:
                    try:  # type: ignore[unreachable]  # noqa: SIM105
                        self.lock.release()
                    except RuntimeError:
                        pass  # another thread did
        return self.opened


class Wake:
    """Wakes one thread, any number of times.  If no thread waits, `set` ends the next `wait`."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()  # taken unless it is set
        self._lock.acquire()

    def set(self) -> None:
        """Wake the thread that waits, or end the next `wait`."""
        try:  # noqa: SIM105
            self._lock.release()
        except RuntimeError:
            pass  # set already

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a `set` since the last `wait`; return False after `timeout` seconds."""
        return self._lock.acquire(True, _seconds(timeout))


class Notice:
    """Wakes all threads that wait for a state to change.

    The state has a lock.  To wait: with the lock held, read the state and call `gate`; then release
    the lock, wait for the gate, and read the state again.  To change the state: take the lock, call
    `wake`, and only then change the state.  So an interrupt between the two wakes threads without
    need, but never leaves one asleep.
    """

    __slots__ = ("_gate",)

    def __init__(self) -> None:
        self._gate: Gate | None = None

    def gate(self) -> Gate:
        """Return the gate that the next `wake` opens.  The caller holds the lock."""
        gate = self._gate
        if gate is None or gate.opened:
            gate = self._gate = Gate()
        return gate

    def wake(self) -> None:
        """Wake all waiting threads.  The caller holds the lock, and has not changed the state."""
        gate = self._gate
        if gate is not None:
            gate.open()


def uninterrupted(act: Callable[[], T]) -> T:
    """Call `act` in a thread that no signal interrupts; return its result or raise its error.

    An interrupt of the calling thread does not stop `act`: it is raised after `act` has ended.  A
    second interrupt is raised at once.  The caller must not hold a lock that `act` takes.  Also
    used for `Thread.start`, which waits for an Event.
    """
    if _shield.up:
        return act()
    done = Gate()
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        _shield.up = True
        try:
            returned.append(act())
        except BaseException as error:  # noqa: BLE001  raised by the thread that waits
            raised.append(error)
        finally:
            done.open()

    started = False
    try:
        # Not Thread.start: this call is one step for a signal handler.
        started = _thread.start_new_thread(run, ()) != 0
        done.wait()
    except RuntimeError:  # no thread can be started, because the interpreter is shutting down
        if started:
            raise
        return act()
    except KeyboardInterrupt:
        done.wait()
        raise
    if raised:
        raise raised[0]
    return returned[0]


def _seconds(timeout: float | None) -> float:
    return -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
