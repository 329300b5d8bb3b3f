"""Delivery: what `send` returns, and the pack that it is one record of.

Records travel in packs: all that a lane holds when it is written.  A pack learns where it is, or
why it is nowhere, once for all its records; a Delivery is only its pack and a number.  So a future
costs one small object, and nobody is woken who does not wait.

Threads share all of it.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import functools
import logging
import threading
from collections.abc import Callable, Generator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from logstore import _native
from logstore.store.topic import Position
from logstore.waking import Gate

__all__ = ["Callbacks", "Carrier", "Delivery", "Pack", "Place", "answering"]

log = logging.getLogger("logstore.producer")

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

_changes = threading.Lock()  # of callbacks and waiters, for moments only


class Carrier(Protocol):
    """What a pack needs of its lane."""

    topic: str
    number: int

    def hurry(self) -> None:
        """Someone waits: write what is held soon."""


class Place:
    """The carrier of a pack that is done: the names of its lane, which may be gone."""

    __slots__ = ("number", "topic")

    def __init__(self, topic: str, number: int) -> None:
        self.topic = topic
        self.number = number

    def hurry(self) -> None:
        """Nothing is on its way."""


class Pack:
    """Records that are written together.

    `first_offset` is -1 until they are in the log.  `done`: as durable as asked for, or failed with
    `error`; the pack then holds its lane, and with it the producer, no longer.
    """

    __slots__ = ("_callbacks", "_woken", "carrier", "count", "done", "error", "first_offset")

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.count = 0
        self.first_offset = -1
        self.done = False
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] | None = None
        self._woken: Gate | None = None

    @property
    def end_offset(self) -> int:
        return self.first_offset + self.count

    def finish(self, callbacks: Callbacks, error: BaseException | None = None) -> None:
        """It is where it belongs, or will never be: its callbacks are due.

        Repeated after an interrupt, it does what is left; the first error stays.
        """
        with _changes:
            due = callbacks.due
            if not self.done:
                place = Place(self.carrier.topic, self.carrier.number)
                self.error = None if error is None else _without_frames(error)
                self.done = True
                self.carrier = place
            if self._woken is not None:
                self._woken.open()
            calls, self._callbacks = self._callbacks, None
            if calls is not None:  # no interrupt comes between these lines
                due.extend(calls)

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
                self._woken = Gate()
            woken = self._woken
        self.carrier.hurry()
        if not woken.wait(timeout):
            raise TimeoutError(
                f"no answer from {self.carrier.topic}-{self.carrier.number} after {timeout} s: "
                f"the record is still on its way"
            )


def _without_frames(error: BaseException) -> BaseException:
    """Return a copy of an error, without its traceback.

    A pack never holds frames: they may hold deliveries of the pack, and the garbage collector does
    not see deliveries.
    """
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001 -- its __init__ takes more than its args
        same = type(error).__new__(type(error))
    same.args = error.args
    same.__dict__.update(error.__dict__)
    if isinstance(error, OSError) and isinstance(same, OSError):
        same.errno, same.strerror = error.errno, error.strerror
        same.filename, same.filename2 = error.filename, error.filename2
    return same


class _Thread(threading.local):
    """What a thread is about."""

    answering = 0  # calls of methods that are `answering`
    calling = 0  # callbacks that it is in

    def __init__(self) -> None:
        self.due: list[Callbacks] = []  # for when it holds no lock of ours any more


_thread = _Thread()


def answering(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """For a method that holds locks of ours.  Callbacks that come due meanwhile are called at the
    end of the first such method that the thread is in.

    Callbacks are the user's, and may send, wait or take locks of their own: under a lock of ours
    they would wait for each other.  The locks are taken by ``with`` of the lock itself: Python code
    around it could be interrupted, and leave it taken.
    """

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **options: P.kwargs) -> T:
        _thread.answering += 1
        try:
            return method(self, *args, **options)
        finally:
            _thread.answering -= 1
            while _thread.due and not _thread.answering:
                first = _thread.due[0]
                first.call()
                # Its callbacks may have come here, too.
                if _thread.due and _thread.due[0] is first:
                    del _thread.due[0]

    return call


class Callbacks:
    """Callbacks of a lane that are due.

    Invariant: they are called in the order in which they came due, one at a time, by a thread that
    holds no lock of ours.
    """

    def __init__(self) -> None:
        self.due: collections.deque[Callable[[], object]] = collections.deque()
        self.count = 0  # of those that were called so far
        self._calling = False  # a thread is at it, and takes along what comes meanwhile
        self._rested: Gate | None = None  # opened when it is not any more

    def finish(self, pack: Pack, error: BaseException | None = None) -> None:
        """A pack is over.  For a method that is `answering`."""
        if not _thread.due or _thread.due[-1] is not self:
            _thread.due.append(self)
        pack.finish(self, error)

    def call(self) -> None:
        """Call all that are due, unless another thread does."""
        # Again: one may have come due while a thread, this or another, was about to rest.
        while self.due and not self._calling:
            self._call_due()

    def _call_due(self) -> None:
        interrupt = None
        mine = False
        try:
            with _changes:
                if self._calling:
                    return
                self._calling = mine = True
                _thread.calling += 1
            while self.due:
                try:
                    call_safely(self.due.popleft())
                except KeyboardInterrupt as error:
                    interrupt = error  # the others are called all the same
                self.count += 1
        finally:
            # No interrupt comes between these lines: see `logstore.waking`.
            if mine:
                _thread.calling -= 1
                self._calling = False
                rested = self._rested
                if rested is not None and not rested.opened:
                    rested.opened = True
                    rested.lock.release()
        if interrupt is not None:
            raise interrupt

    def wait(self) -> None:
        """Return when all that were due have been called; in a callback, at once."""
        self.call()
        while self._calling and not _thread.calling:
            with _changes:
                rested = self._rested
                if rested is None or rested.opened:
                    rested = self._rested = Gate()
            if self._calling:
                rested.wait()


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
            raise _without_frames(pack.error)
        return Position(pack.carrier.topic, pack.carrier.number, pack.first_offset + self._index)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why it failed; None when it did not.  Each call returns an object of its own."""
        pack = self._pack
        if not pack.done:
            pack.wait(timeout)
        return None if pack.error is None else _without_frames(pack.error)

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
