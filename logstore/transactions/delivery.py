"""Delivery: what `send` returns, and the pack that it is one record of.

Records travel in packs: all that a lane holds when it is written.  A pack learns where it is, or
why it is nowhere, once for all its records; a Delivery is only its pack and a number.  So a future
costs one small object, and nobody is woken who does not wait.

Threads share all of it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

from logstore import _native
from logstore.topic import Position

__all__ = ["Callbacks", "Carrier", "Delivery", "Pack", "holding"]

log = logging.getLogger("logstore.producer")

_changes = threading.Lock()  # of callbacks and waiters, for moments only


class Carrier(Protocol):
    """What a pack needs of its lane."""

    topic: str
    number: int

    def hurry(self) -> None:
        """Someone waits: write what is held soon."""


class Pack:
    """Records that are written together.

    `first_offset` is -1 until they are in the log.  `done`: as durable as asked for, or failed with
    `error`.
    """

    __slots__ = ("_callbacks", "_woken", "carrier", "count", "done", "error", "first_offset")

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.count = 0
        self.first_offset = -1
        self.done = False
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] | None = None
        self._woken: threading.Event | None = None

    @property
    def end_offset(self) -> int:
        return self.first_offset + self.count

    def finish(self, error: BaseException | None = None) -> list[Callable[[], object]]:
        """It is where it belongs, or will never be; the callbacks that are due now."""
        with _changes:
            if self.done:
                return []
            self.error = error
            self.done = True
            callbacks, self._callbacks = self._callbacks, None
            if self._woken is not None:
                self._woken.set()
            return callbacks or []

    def when_done(self, call: Callable[[], object]) -> None:
        """Have it called, at once if it is over."""
        with _changes:
            if not self.done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(call)
                return
        call_safely(call)

    def wait(self, timeout: float | None) -> None:
        """Return when it is done; TimeoutError when that takes too long."""
        with _changes:
            if self.done:
                return
            if self._woken is None:
                self._woken = threading.Event()
            woken = self._woken
        self.carrier.hurry()
        if not woken.wait(timeout):
            raise TimeoutError(
                f"no answer from {self.carrier.topic}-{self.carrier.number} after {timeout} s: "
                f"the record is still on its way"
            )


class _Thread(threading.local):
    """What a thread is about."""

    locks = 0  # that it has by `holding`
    calling = 0  # callbacks that it is in

    def __init__(self) -> None:
        self.due: list[Callbacks] = []  # for when it has none of them any more


_thread = _Thread()


@contextlib.contextmanager
def holding(lock: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Hold a lock of ours.  What comes due meanwhile is called when the thread has none any more.

    Callbacks are the user's, and may send, wait or take locks of their own: under a lock of ours
    they would wait for each other.
    """
    _thread.locks += 1
    try:
        with lock:
            yield
    finally:
        _thread.locks -= 1
        while _thread.due and not _thread.locks:
            _thread.due.pop(0).call()


class Callbacks:
    """Callbacks of a lane that are due.

    Invariant: they are called in the order in which they came due, one at a time, by a thread that
    holds no lock of ours.
    """

    def __init__(self) -> None:
        self._due: collections.deque[Callable[[], object]] = collections.deque()
        self.count = 0  # of those that were called so far
        self._calling = False  # a thread is at it, and takes along what comes meanwhile
        self._called = threading.Condition(_changes)

    def add(self, calls: list[Callable[[], object]]) -> None:
        """Return the callbacks that are due; a caller that holds a lock calls them afterwards."""
        if calls:
            self._due.extend(calls)
            _thread.due.append(self)

    def call(self) -> None:
        """Call all that are due, unless another thread does."""
        with _changes:
            if self._calling:
                return
            self._calling = True
        _thread.calling += 1
        interrupt = None
        try:
            while self._due or not self._rest():
                try:
                    call_safely(self._due.popleft())
                except KeyboardInterrupt as error:
                    interrupt = error  # the others are called all the same
                self.count += 1
        except BaseException:  # an interrupt between two calls: the next to come goes on
            with _changes:
                self._calling = False
                self._called.notify_all()
            raise
        finally:
            _thread.calling -= 1
        if interrupt is not None:
            raise interrupt

    def _rest(self) -> bool:
        """Stop calling, unless something came due since."""
        with _changes:
            if self._due:
                return False
            self._calling = False
            self._called.notify_all()
            return True

    def wait(self) -> None:
        """Return when all that were due have been called; in a callback, at once."""
        self.call()
        with _changes:
            while self._calling and not _thread.calling:
                self._called.wait()


def call_safely(call: Callable[[], object]) -> None:
    """Call back; what it raises is its own, and logged.  Only Ctrl-C is raised to the caller."""
    try:
        call()
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("a callback of a delivery failed")


class Delivery(_native.Delivery):
    """The future of one record that was sent.  Made by `Producer.send`; can be awaited.

    As of `concurrent.futures.Future`: `result`, `exception`, `done`, `add_done_callback`.  It
    cannot be cancelled: what was sent is sent.
    """

    __slots__ = ()

    _pack: Pack

    @property
    def topic(self) -> str:
        """The topic it was sent to."""
        return self._pack.carrier.topic

    @property
    def partition(self) -> int:
        """The partition that was chosen for it."""
        return self._pack.carrier.number

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._pack.done

    def cancelled(self) -> bool:
        """Never."""
        return False

    def cancel(self) -> bool:
        """Never: False."""
        return False

    def result(self, timeout: float | None = None) -> Position:
        """Where the record is, once it is as durable as asked for; or raises why it is not."""
        pack = self._pack
        if not pack.done:
            pack.wait(timeout)
        if pack.error is not None:
            raise pack.error
        return Position(pack.carrier.topic, pack.carrier.number, pack.first_offset + self._index)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why it failed; None when it did not."""
        if not self._pack.done:
            self._pack.wait(timeout)
        return self._pack.error

    def add_done_callback(self, call: Callable[[Delivery], object]) -> None:
        """Have `call` called with this delivery when it is over; by whichever thread finds out."""
        self._pack.when_done(lambda: call(self))

    def __await__(self) -> Generator[Any, None, Position]:
        """Wait in an event loop.  The loop is woken once; no thread is made."""
        if not self._pack.done:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()

            def woken() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            def wake() -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(woken)

            self._pack.when_done(wake)
            self._pack.carrier.hurry()
            yield from waiter
        return self.result(0)

    def __repr__(self) -> str:
        pack = self._pack
        where = f"{pack.carrier.topic}-{pack.carrier.number}"
        if not pack.done:
            return f"<Delivery to {where} pending>"
        if pack.error is not None:
            return f"<Delivery to {where} failed: {pack.error!r}>"
        return f"<Delivery to {where} offset {pack.first_offset + self._index}>"
