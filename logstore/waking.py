"""Gate, Wake, Notice, uninterrupted: threads that wait for each other, and Ctrl-C meanwhile.

`threading.Event` and `threading.Condition` are Python code around a lock.  An interrupt inside of
them leaves the lock taken, and the next call waits for ever.  Here each change is one call of a
lock that is written in C; an interrupt comes before it or after it.

CPython looks for signals where a function begins, after a call, and where a loop jumps back.
Statements without a call between them are one step for a signal handler; the methods below, and
code that uses them, depend on that.  `logstore.testing.explore_interrupts` shows that it is so.
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
    """Closed until it is opened, once and for all.  Any number of threads waits for that."""

    __slots__ = ("lock", "opened")

    def __init__(self) -> None:
        self.opened = False
        self.lock = threading.Lock()  # taken while the gate is closed
        self.lock.acquire()

    def open(self) -> None:
        """Let all threads pass.  Opening twice is harmless."""
        self.opened = True
        try:  # noqa: SIM105  contextlib.suppress is Python code, and can be interrupted
            self.lock.release()
        except RuntimeError:
            pass  # open already

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the gate is open; False: the time is up."""
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
    """Wakes one thread, again and again.  A `set` while nobody waits ends the next `wait`."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()  # taken unless it is set
        self._lock.acquire()

    def set(self) -> None:
        """Wake the thread that waits, or will."""
        try:  # noqa: SIM105
            self._lock.release()
        except RuntimeError:
            pass  # set already

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a `set` since the last `wait`; False: the time is up."""
        return self._lock.acquire(True, _seconds(timeout))


class Notice:
    """Wakes all threads that wait for a state to change.

    The state has a lock.  To wait: with the lock held, look at the state and take the `gate`; then
    release the lock, wait for the gate, and look again.  To change the state: take the lock, call
    `wake`, and only then change the state.  So an interrupt between the two wakes threads in vain,
    but never leaves one asleep.
    """

    __slots__ = ("_gate",)

    def __init__(self) -> None:
        self._gate: Gate | None = None

    def gate(self) -> Gate:
        """The gate that the next `wake` opens.  With the lock held."""
        gate = self._gate
        if gate is None or gate.opened:
            gate = self._gate = Gate()
        return gate

    def wake(self) -> None:
        """Wake all threads that wait.  With the lock held, before the state changes."""
        gate = self._gate
        if gate is not None:
            gate.open()


def uninterrupted(act: Callable[[], T]) -> T:
    """Call `act` in a thread that no signal interrupts; return what it returns, or raise it.

    An interrupt of the thread that waits does not stop `act`: it is raised when `act` has ended; a
    second one at once.  Not with a lock held that `act` takes.  Also for `Thread.start`, which
    waits for an Event.
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
        # Unlike Thread.start, one step for a signal handler.
        started = _thread.start_new_thread(run, ()) != 0
        done.wait()
    except RuntimeError:  # the interpreter ends
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
