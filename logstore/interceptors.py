"""Interceptors: the user's code that a producer or a consumer calls for every record.

They form a chain and are called in their order.  Each gets the result of the one before it.

- `on_send` and `on_consume` may return another record.  If one raises, the call fails: nothing is
  sent or returned, and the consumer keeps its position.  (Kafka logs the error and continues
  without the interceptor.  An interceptor that redacts a field would then silently not do so.)
- `on_acknowledgement` and `on_commit` only observe.  If one raises, the error is logged and the
  others are called; the record or the commit is not affected.

An interceptor may leave out any of the methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from logstore.config import ConfigError
from logstore.record import Record

__all__ = ["ConsumerInterceptor", "InterceptorChain", "Outgoing", "ProducerInterceptor"]

log = logging.getLogger("logstore.interceptors")

HOOKS = ("on_send", "on_acknowledgement", "on_consume", "on_commit")


class Outgoing(NamedTuple):
    """A record that is being sent, before its key and value are serialized.

    ``outgoing._replace(headers=...)`` returns a changed copy.
    """

    topic: str
    value: Any
    key: Any = None
    headers: Iterable[tuple[str, bytes | None]] = ()
    timestamp: Any = None
    partition: int | None = None


class ProducerInterceptor(Protocol):
    """The methods that a producer calls."""

    def on_send(self, outgoing: Outgoing, /) -> Outgoing:
        """Return the record to send.  Called before serialization and partitioning."""

    def on_acknowledgement(
        self, position: tuple[str, int, int] | None, error: BaseException | None, /
    ) -> None:
        """A record is in the log with the requested durability, or `error` is why it is not.

        Called in the thread that completes the send, which may be the producer's own: be quick.
        """


class ConsumerInterceptor(Protocol):
    """The methods that a consumer calls."""

    def on_consume(self, records: Sequence[Record], /) -> Sequence[Record]:
        """Return the records that poll returns."""

    def on_commit(self, offsets: Mapping[tuple[str, int], int], /) -> None:
        """Offsets were committed, by topic and partition."""


class InterceptorChain:
    """The methods of all interceptors by name, in order.  A method that none has costs nothing."""

    def __init__(self, interceptors: Iterable[object] = ()) -> None:
        given = tuple(interceptors)
        for each in given:
            if not any(callable(getattr(each, hook, None)) for hook in HOOKS):
                raise ConfigError(f"{each!r} is no interceptor: it has none of {', '.join(HOOKS)}")
        # Bound once: a producer without hooks stays on the path in C.
        self.senders = self._hooks(given, "on_send")
        self.acknowledgers = self._hooks(given, "on_acknowledgement")
        self.receivers = self._hooks(given, "on_consume")
        self.commit_watchers = self._hooks(given, "on_commit")

    @staticmethod
    def _hooks(given: tuple[object, ...], name: str) -> tuple[Callable[..., Any], ...]:
        found = (getattr(each, name, None) for each in given)
        return tuple(hook for hook in found if callable(hook))

    def on_send(self, outgoing: Outgoing) -> Outgoing:
        """Return the record to send.  Raise what an interceptor raises."""
        for hook in self.senders:
            outgoing = hook(outgoing)
            if not isinstance(outgoing, Outgoing):
                raise TypeError(f"{_name(hook)} must return an Outgoing, not {outgoing!r}")
        return outgoing

    def on_acknowledgement(
        self, position: tuple[str, int, int] | None, error: BaseException | None
    ) -> None:
        """Call all of them; their errors are logged."""
        _tell(self.acknowledgers, position, error)

    def on_consume(self, records: Sequence[Record]) -> Sequence[Record]:
        """Return the records for the caller of poll.  Raise what an interceptor raises."""
        for hook in self.receivers:
            records = hook(records)
            if not isinstance(records, Sequence):
                raise TypeError(f"{_name(hook)} must return a sequence of records, not {records!r}")
        return records

    def on_commit(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Call all of them; their errors are logged."""
        _tell(self.commit_watchers, offsets)


def _tell(hooks: tuple[Callable[..., Any], ...], *what: object) -> None:
    for hook in hooks:
        try:
            hook(*what)
        except Exception:  # a hook that only observes must not fail the send or the commit
            log.exception("%s failed", _name(hook))


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", repr(hook))
