"""Call: one request, as a handler gets it; Pending: an answer that comes later; `answer_when`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from logstore.coordinators.quorum.outcome import Outcome
from logstore.kafka.protocol.errors import ErrorCode, error_code

if TYPE_CHECKING:
    from logstore.kafka.broker import Broker
    from logstore.kafka.network.connection import Connection, Slot

__all__ = ["Call", "NotNowError", "Pending", "answer_when"]

T = TypeVar("T")

log = logging.getLogger("logstore.kafka")


class NotNowError(Exception):
    """The handler would have to wait: it is called again in a worker's thread."""


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """A request.  Times are those of the loop's clock."""

    broker: Broker
    connection: Connection
    slot: Slot
    key: int
    version: int
    correlation_id: int
    client_id: str
    body: dict[str, Any]
    received: int  # bytes
    began: float  # when the request was whole
    started: float  # when its handler began
    handled: float = 0.0  # when the handler returned
    sent: int = 0  # bytes
    may_wait: bool = False  # the handler runs in a worker's thread
    dropped: bool = False  # a fault: the connection is closed instead of the answer
    released: bool = False  # the next request of the connection may begin
    over: bool = False  # it is answered: the buffer belongs to the next request
    # Topic, bytes and records of each batch.
    appended: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)

    def wait(self) -> None:
        """Raise NotNowError unless this thread may wait."""
        if not self.may_wait:
            raise NotNowError


class Pending:
    """The answer of a call that is given later, once, from any thread.

    `early`: the bytes of the request are not needed any more, so that the next Produce request of
    the connection may begin before this one is answered.
    """

    __slots__ = ("_call", "_done", "early")

    def __init__(self, call: Call, *, early: bool = False) -> None:
        self._call = call
        self._done = False
        self.early = early

    def answer(self, body: dict[str, Any] | None) -> None:
        """Send the answer; None sends nothing.  A second call is ignored."""
        if not self._done:
            self._done = True
            self._call.broker.complete(self._call, body)

    def fail(self, error: BaseException) -> None:
        """Answer with what an exception of the handler would be answered with."""
        if not self._done:
            self._done = True
            self._call.broker.complete(self._call, error)

    def when_lost(self, cancel: Callable[[], object]) -> None:
        """Have `cancel` called, in the loop's thread, if the connection ends before."""
        self._call.slot.cancel = cancel


def answer_when(
    call: Call,
    outcome: Outcome[T],
    answer: Callable[[T | BaseException], dict[str, Any]],
    seconds: float,
) -> dict[str, Any] | Pending:
    """Answer a call with the result of a coordinator, now or later; no thread waits for it.

    `answer` converts the value or the error, in any thread.  After `seconds` it gets TimeoutError;
    the act goes on, and the client asks again.
    """

    def body(settled: Outcome[T]) -> dict[str, Any]:
        error = settled.error
        if error is not None and error_code(error) is ErrorCode.UNKNOWN_SERVER_ERROR:
            log.error("a coordinator failed", exc_info=error)
        return answer(settled.value_or_error())

    if outcome.over:
        return body(outcome)
    pending, loop = Pending(call), call.broker.loop
    first: Outcome[T] = Outcome()  # the result or the time-out

    def give() -> None:
        try:
            pending.answer(body(first))
        except Exception as error:  # noqa: BLE001  answered with its code
            pending.fail(error)

    first.then(give)

    def arm() -> None:
        late = TimeoutError(f"not committed after {seconds:g} s; it may still be")
        timer = loop.call_later(seconds, first.settle, late)
        first.then(lambda: call.broker.calls.put(timer.cancel))

    call.broker.calls.put(arm)
    outcome.then_settle(first)
    return pending
