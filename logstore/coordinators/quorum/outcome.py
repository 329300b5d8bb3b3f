"""Outcome: the result of an act that ends now or later.

An act of a coordinator ends in the caller's thread if the store is alone, and later, in another
thread, if its records are replicated first.  Callers that must not wait pass a function to `then`;
others call `result`.

Invariant: an outcome is settled once; later calls of `settle` change nothing.  So a coordinator
that lost its partition settles what waits, and a late answer of the replicas has no effect.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from logstore.waking import Gate

__all__ = ["Outcome"]

log = logging.getLogger("logstore.coordinators")

T = TypeVar("T")
U = TypeVar("U")


class Outcome(Generic[T]):
    """A value or an error, or neither yet.  Threads share it."""

    __slots__ = ("_calls", "_once", "_value", "error", "over")

    def __init__(self) -> None:
        self.over = False
        self.error: BaseException | None = None
        self._value: T | None = None
        self._once = threading.Lock()  # taken by the first `settle`, and never released
        self._calls: list[Callable[[], object]] = []

    @classmethod
    def of(cls, value: T) -> Outcome[T]:
        """Return an outcome that has its value."""
        made = cls()
        made.settle(value)
        return made

    @classmethod
    def failed(cls, error: BaseException) -> Outcome[T]:
        """Return an outcome that has an error."""
        made = cls()
        made.settle(error)
        return made

    def settle(self, result: T | BaseException) -> None:
        """Set the value or the error, and make the calls of `then`.  The caller holds no lock."""
        if not self._once.acquire(blocking=False):
            return
        if isinstance(result, BaseException):
            self.error = result
        else:
            self._value = result
        self.over = True
        self._make_calls()

    def then(self, call: Callable[[], object]) -> None:
        """Have `call` called after the outcome is settled; at once, here, if it is settled."""
        self._calls.append(call)
        # Either `settle` finds the call in the list, or this thread sees `over`.
        if self.over:
            self._make_calls()

    def _make_calls(self) -> None:
        while True:
            try:
                call = self._calls.pop(0)  # one thread gets it
            except IndexError:
                return
            try:
                call()
            except Exception:  # the other calls are made; the caller of `settle` has no part in it
                log.exception("a call after an outcome failed")

    def check(self) -> None:
        """Raise the error, if there is one by now."""
        if self.error is not None:
            raise self.error

    def result(self) -> T:
        """Wait for the end; return the value or raise the error."""
        if not self.over:
            gate = Gate()
            self.then(gate.open)
            gate.wait()
        self.check()
        return self._value  # type: ignore[return-value]  # set if there is no error

    def value_or_error(self) -> T | BaseException:
        """Return the result.  The outcome is settled."""
        assert self.over
        return self.error or self._value  # type: ignore[return-value]

    def then_settle(self, other: Outcome[T]) -> None:
        """Have another outcome settled with the same result."""
        self.then(lambda: other.settle(self.value_or_error()))

    @classmethod
    def all_of(cls, outcomes: Sequence[Outcome[U]]) -> Outcome[list[U | BaseException]]:
        """Return the results of several outcomes, when all of them are settled."""
        results: Outcome[list[U | BaseException]] = Outcome()
        left = list(outcomes)

        def look() -> None:
            while left and left[0].over:
                left.pop(0)
            if left:
                left[0].then(look)
            else:
                results.settle([each.value_or_error() for each in outcomes])

        look()
        return results

    def and_then(self, act: Callable[[T], Outcome[U]]) -> Outcome[U]:
        """Return the outcome of another act that begins with the value of this one."""
        last: Outcome[U] = Outcome()

        def settled() -> None:
            try:
                act(self.result()).then_settle(last)
            except Exception as error:  # noqa: BLE001  passed on
                last.settle(error)

        self.then(settled)
        return last

    def map(self, convert: Callable[[T], U]) -> Outcome[U]:
        """Return the outcome with its value converted; an error of `convert` is its error."""
        converted: Outcome[U] = Outcome()

        def settled() -> None:
            try:
                result: U | BaseException = convert(self.result())
            except Exception as error:  # noqa: BLE001  passed on
                result = error
            converted.settle(result)

        self.then(settled)
        return converted
