"""Delivery: the future that `send` returns, and Pack: the records that a lane writes together.

A pack has one result for all its records: the first offset, or an error.  A Delivery is a pack and
the index of a record in it.  So a future costs one small object, and a thread is woken only if it
waits.

Invariant: `Pack.done` changes once, from False to True, under `_changes`; `error` and
`first_offset` do not change after that.  Threads may share all objects of this module.
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

# Held while a pack's callbacks, its gate or its end change.  It is the last lock that a thread
# takes: nothing is called under it that takes another lock or waits.
_changes = threading.Lock()


class Carrier(Protocol):
    """What a pack needs of its lane."""

    topic: str
    number: int

    def hurry(self) -> None:
        """Write without lingering: a caller waits for a delivery."""


class Place:
    """The carrier of a pack that is done: topic and partition number of its lane, without it."""

    __slots__ = ("number", "topic")

    def __init__(self, topic: str, number: int) -> None:
        self.topic = topic
        self.number = number

    def hurry(self) -> None:
        """Do nothing: the pack is done."""


class Pack:
    """Records that are written together.

    `first_offset` is -1 until they are in the log.  `done` means that they are as durable as the
    producer's `durability` asks, or have failed with `error`.  A pack that is done has no reference
    to its lane: a Delivery that the user keeps does not keep the producer alive.
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
        """Set the result, wake the threads that wait, and move the callbacks to `callbacks.due`.

        If an interrupt stopped the call, another call does the rest; the first error stays.
        """
        with _changes:
            due = callbacks.due
            if not self.done:
                place = Place(self.carrier.topic, self.carrier.number)
                self.error = None if error is None else _without_frames(error)
                self.done = True
                self.carrier = place  # drops the lane: see the docstring
            if self._woken is not None:
                self._woken.open()
            calls, self._callbacks = self._callbacks, None
            # No call between the swap above and `extend`: an interrupt cannot lose the callbacks.
            if calls is not None:
                due.extend(calls)

    def when_done(self, call: Callable[[], object]) -> None:
        """Call `call` when the pack is done; at once if it is done already."""
        with _changes:
            if not self.done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(call)
                return
        call_safely(call)  # without `_changes`: code of the user

    def wait(self, timeout: float | None) -> None:
        """Return when the pack is done; raise TimeoutError after `timeout` seconds."""
        with _changes:
            if self.done:
                return
            if self._woken is None:
                self._woken = Gate()
            # After the lock is released the pack may become done: the Gate is then open.
            woken = self._woken
        self.carrier.hurry()
        if not woken.wait(timeout):
            raise TimeoutError(
                f"no answer from {self.carrier.topic}-{self.carrier.number} after {timeout} s: "
                f"the record is still pending"
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
    """State of one thread."""

    answering = 0  # how many methods that are decorated with `answering` the thread is in
    calling = 0  # how many callbacks the thread is in

    def __init__(self) -> None:
        self.due: list[Callbacks] = []  # to be called when `answering` is 0


_thread = _Thread()


def answering(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a method that takes locks of the producer: it calls due callbacks at its end.

    Callbacks that become due inside of the method are called after the outermost decorated method
    of the thread has released its locks.  A callback is code of the user: it may send, wait or take
    locks.  Under one of our locks it could wait for a thread that waits for that lock.

    A decorated method takes a lock by ``with`` of the lock object itself.  A context manager in
    Python could be interrupted after it took the lock, and would not release it.
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
                # A callback may have called a decorated method, which has then deleted `first`.
                if _thread.due and _thread.due[0] is first:
                    del _thread.due[0]

    return call


class Callbacks:
    """Callbacks of a lane whose packs are done.

    Invariant: they are called one at a time, in the order in which their packs were finished, by a
    thread that holds no lock of the producer.
    """

    def __init__(self) -> None:
        self.due: collections.deque[Callable[[], object]] = collections.deque()
        self.count = 0  # how many were called so far
        self._calling = False  # a thread calls them, including those that become due until its end
        self._rested: Gate | None = None  # opened when `_calling` becomes False

    def finish(self, pack: Pack, error: BaseException | None = None) -> None:
        """Finish a pack.  Only for a method that is decorated with `answering`."""
        if not _thread.due or _thread.due[-1] is not self:
            _thread.due.append(self)
        pack.finish(self, error)

    def call(self) -> None:
        """Call all that are due, unless another thread does."""
        # A loop: a callback may become due after the calling thread has seen `due` empty and before
        # it clears `_calling`.
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
                    interrupt = error  # raised after the other callbacks were called
                self.count += 1
        finally:
            # No call before `release`: an interrupt cannot stop between these lines.  See
            # `logstore.waking`.
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
        """Return when all callbacks that are due were called; in a callback, return at once."""
        self.call()
        while self._calling and not _thread.calling:
            with _changes:
                rested = self._rested
                if rested is None or rested.opened:
                    rested = self._rested = Gate()
            if self._calling:
                rested.wait()


def call_safely(call: Callable[[], object]) -> None:
    """Call a callback; log what it raises.  Only KeyboardInterrupt is raised to the caller."""
    try:
        call()
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("a callback of a delivery failed")


class Delivery(_native.Delivery):
    """The future of one record that was sent.  Made by `Producer.send`; can be awaited.

    It has the methods of `concurrent.futures.Future`: `result`, `exception`, `done`,
    `add_done_callback`.  It cannot be cancelled.
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
        """Return whether the record is delivered or has failed."""
        return self._pack.done

    def cancelled(self) -> bool:
        """Return False: a delivery cannot be cancelled."""
        return False

    def cancel(self) -> bool:
        """Return False: a delivery cannot be cancelled."""
        return False

    def result(self, timeout: float | None = None) -> Position:
        """Return the record's position after it is as durable as asked for; raise if it failed."""
        pack = self._pack
        if not pack.done:
            pack.wait(timeout)
        if pack.error is not None:
            raise _without_frames(pack.error)
        return Position(pack.carrier.topic, pack.carrier.number, pack.first_offset + self._index)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return why the record failed, or None.  Each call returns a new exception object."""
        pack = self._pack
        if not pack.done:
            pack.wait(timeout)
        return None if pack.error is None else _without_frames(pack.error)

    def add_done_callback(self, call: Callable[[Delivery], object]) -> None:
        """Call `call` with this delivery when it is done; any thread of the process may call it."""
        self._pack.when_done(lambda: call(self))

    def __await__(self) -> Generator[Any, None, Position]:
        """Wait in an event loop.  The loop is woken once; no thread is started."""
        if not self._pack.done:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()

            def woken() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            def wake() -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(woken)

            # `wake` runs in the thread of the producer, hence call_soon_threadsafe; a closed loop
            # has no task left.
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
