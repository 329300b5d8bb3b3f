"""What a handler gets and raises: Context, RetryLater, Dead, Skip; and Runner, which calls it."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from logstore.config import ConfigError
from logstore.consumer.received import ReceivedRecord, deserialized
from logstore.errors import LogStoreError
from logstore.interceptors import Outgoing
from logstore.serialization import Deserializer
from logstore.times import parse_duration
from logstore.work_errors import HandlerTimeoutError
from logstore.workers.items import DONE, SKIPPED, Failed, Outcome, Outputs, Work

__all__ = ["Context", "Dead", "RetryLater", "Runner", "Skip", "seconds"]


def seconds(name: str, duration: float | str) -> float:
    """Return a duration in seconds: a number, or a text such as "1h30m"."""
    if isinstance(duration, str):
        return parse_duration(duration) / 1000
    if not isinstance(duration, int | float):
        raise TypeError(f"{name} is seconds or a text such as '10m', not {duration!r}")
    if not duration >= 0:
        raise ConfigError(f"{name} must be at least 0 seconds, not {duration!r}")
    return float(duration)


class RetryLater(LogStoreError):
    """Raised by a handler: try the record again, not before `after` ("10m", or seconds)."""

    def __init__(self, after: float | str) -> None:
        self.after = seconds("after", after)
        super().__init__(f"try again after {self.after:g} s")


class Dead(LogStoreError):
    """Raised by a handler: no other attempt can succeed.  The text is the reason."""


class Skip(LogStoreError):
    """Raised by a handler: the record needs no processing, and is finished."""


class Context:
    """The second argument of a handler: the attempt, its time limit, and its outputs.

    `attempt` is 1 for the first one since the record was assigned to these workers.  `deadline` is
    the time at which `cancelled` is set, on the clock of the store, or None.  One handler uses it,
    in one thread or task.
    """

    __slots__ = ("_cancelled", "_event", "attempt", "deadline", "outputs", "record")

    def __init__(self, record: ReceivedRecord, attempt: int, deadline: float | None) -> None:
        self.record = record
        self.attempt = attempt
        self.deadline = deadline
        self.outputs: list[Outgoing] = []
        self._cancelled = False
        self._event: threading.Event | None = None

    @property
    def topic(self) -> str:
        """The topic of the record."""
        return self.record.topic

    @property
    def partition(self) -> int:
        """The partition of the record."""
        return self.record.partition

    @property
    def cancelled(self) -> threading.Event:
        """An event that is set when the time of the handler is over: return then."""
        if self._event is None:
            self._event = threading.Event()
        # `cancel` sets the flag before it looks for the event: one of the two sees the other.
        if self._cancelled:
            self._event.set()
        return self._event

    def cancel(self) -> None:
        """Set `cancelled`.  Any thread may call it."""
        self._cancelled = True
        event = self._event
        if event is not None:
            event.set()

    def send(
        self,
        topic: str,
        value: Any,
        *,
        key: Any = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp: Any = None,
        partition: int | None = None,
    ) -> None:
        """Send a record in the transaction that commits this one, if the handler returns."""
        self.outputs.append(Outgoing(topic, value, key, headers, timestamp, partition))


class Runner:
    """Calls a handler for one start, and returns its outcome.  Threads share it."""

    def __init__(
        self,
        handler: Callable[..., Any],
        *,
        key_deserializer: Deserializer | None,
        value_deserializer: Deserializer | None,
        timeout: float | None,
    ) -> None:
        self._handler = handler
        self._key_deserializer = key_deserializer
        self._value_deserializer = value_deserializer
        self._timeout = timeout
        self._takes_context = takes_context(handler)

    def _arguments(self, work: Work) -> tuple[Any, ...]:
        record: Any = work.record
        if self._key_deserializer is not None or self._value_deserializer is not None:
            record = deserialized(record, self._key_deserializer, self._value_deserializer)
        if not self._takes_context:
            return (record,)
        assert work.started_at is not None
        deadline = None if self._timeout is None else work.started_at + self._timeout
        work.context = Context(record, work.attempt, deadline)
        if work.timed_out:
            work.context.cancel()
        return record, work.context

    def run(self, work: Work) -> Outcome:
        """Call the handler in this thread."""
        try:
            return outcome_of(work, self._handler(*self._arguments(work)))
        except BaseException as error:  # noqa: BLE001  it is the outcome
            return self._failed(work, error)

    async def run_in_loop(self, work: Work) -> Outcome:
        """Await the handler."""
        try:
            made: Awaitable[Any] = self._handler(*self._arguments(work))
            return outcome_of(work, await made)
        except asyncio.CancelledError as error:
            return self._failed(work, error)
        except BaseException as error:  # noqa: BLE001
            return self._failed(work, error)

    def _failed(self, work: Work, error: BaseException) -> Outcome:
        if isinstance(error, Skip):
            return SKIPPED
        if work.timed_out and not isinstance(error, RetryLater | Dead):
            late = timed_out(work, self._timeout or 0.0)
            late.__cause__ = error
            return Failed(late)
        return Failed(error)


def timed_out(work: Work, limit: float) -> HandlerTimeoutError:
    """Return the error of a start that took longer than `limit` seconds."""
    item = work.item
    error = HandlerTimeoutError(
        f"the handler of {item.partition} offset {item.offset} took longer than {limit:g} s"
    )
    error.record, error.seconds = work.record, limit
    return error


def outcome_of(work: Work, result: Any) -> Outcome:
    """Return the outcome of a handler that returned `result`."""
    outputs = [] if work.context is None else work.context.outputs
    if result is None:
        if not outputs:
            return DONE
    elif isinstance(result, Outgoing):
        outputs = [*outputs, result]
    elif isinstance(result, list | tuple) and all(isinstance(each, Outgoing) for each in result):
        outputs = [*outputs, *result]
    else:
        raise TypeError(
            f"a handler returns None, an Outgoing or a list of them, not {type(result).__name__}"
        )
    # The headers may be an iterator: they are counted, and sent once for each try of the commit.
    made = tuple(each._replace(headers=tuple(each.headers)) for each in outputs)
    return Outputs(made) if made else DONE


def takes_context(handler: Callable[..., Any]) -> bool:
    """Return whether a handler has a second positional parameter, or one that is named context."""
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):
        return False  # a builtin: it gets the record
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(places) < 2:
        return False
    return places[1].default is places[1].empty or places[1].name == "context"


def is_async(handler: object) -> bool:
    """Return whether a call of the handler returns an awaitable."""
    call = getattr(handler, "__call__", None)  # noqa: B004  the method, of an object
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)
