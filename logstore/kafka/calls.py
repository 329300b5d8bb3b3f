"""Call: one request, as a handler gets it; Pending: an answer that comes later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logstore.kafka.broker import Broker
    from logstore.kafka.connection import Connection, Slot

__all__ = ["Call", "NotNowError", "Pending"]


class NotNowError(Exception):
    """The handler would have to wait: it is called again in a worker's thread."""


class Call:
    """A request.  `may_wait`: whether the handler runs in a worker's thread."""

    __slots__ = (
        *("body", "broker", "client_id", "connection", "correlation_id", "dropped", "key"),
        *("may_wait", "released", "slot", "version"),
    )

    def __init__(
        self,
        broker: Broker,
        connection: Connection,
        slot: Slot,
        key: int,
        version: int,
        correlation_id: int,
        client_id: str,
        body: dict[str, Any],
    ) -> None:
        self.broker = broker
        self.connection = connection
        self.slot = slot
        self.key = key
        self.version = version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.body = body
        self.may_wait = False
        self.dropped = False  # a fault: the connection is closed instead of the answer
        self.released = False  # the next request of the connection may begin

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
