"""Delivery: what `send` returns, and the pack that it is one record of.

Records travel in packs: all that a lane holds when it is written.  A pack learns where it is, or
why it is nowhere, once for all its records; a Delivery is only its pack and a number.  So a future
costs one small object, and nobody is woken who does not wait.

Threads share all of it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from typing import Any, Protocol

from logstore import _native
from logstore.topic import Position

__all__ = ["Carrier", "Delivery", "Pack"]

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

    def finish(self, error: BaseException | None = None) -> None:
        """It is where it belongs, or will never be.  Calls back."""
        with _changes:
            if self.done:
                return
            self.error = error
            self.done = True
            callbacks, self._callbacks = self._callbacks, None
            if self._woken is not None:
                self._woken.set()
        for call in callbacks or ():
            call_safely(call)

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


def call_safely(call: Callable[[], object]) -> None:
    """Call back; what it raises is its own, and logged."""
    try:
        call()
    except Exception:
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
