"""Interceptors: code of the user's that sees every record on its way in or out.

They form a chain and are called in the order given; each gets what the one before it returned.

- `on_send` and `on_consume` may replace what they get.  One that raises ends the call: nothing is
  sent, or returned, and the consumer stays where it was.  (Kafka logs the error and goes on without
  the interceptor; but then one that redacts a field would silently not do so.)
- `on_acknowledgement` and `on_commit` only watch.  One that raises is logged; the others are still
  called, and the record or commit is what it is.

An interceptor has those of the methods that it wants; the chains leave out what it does not have.
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
    """A record on its way out, before its key and value are serialized.

    ``outgoing._replace(headers=...)`` makes the one to send instead.
    """

    topic: str
    value: Any
    key: Any = None
    headers: Iterable[tuple[str, bytes | None]] = ()
    timestamp: Any = None
    partition: int | None = None


class ProducerInterceptor(Protocol):
    """What a producer calls."""

    def on_send(self, outgoing: Outgoing, /) -> Outgoing:
        """The record to send; before it is serialized and gets its partition."""

    def on_acknowledgement(
        self, position: tuple[str, int, int] | None, error: BaseException | None, /
    ) -> None:
        """A record is in the log, as durable as asked for; or will not be, and why.

        Called by whichever thread finds out: be quick.
        """


class ConsumerInterceptor(Protocol):
    """What a consumer calls."""

    def on_consume(self, records: Sequence[Record], /) -> Sequence[Record]:
        """The records to return from a poll."""

    def on_commit(self, offsets: Mapping[tuple[str, int], int], /) -> None:
        """Offsets were committed, by topic and partition."""


class InterceptorChain:
    """Interceptors in order; a hook that none of them has is an empty tuple, and costs nothing."""

    def __init__(self, interceptors: Iterable[object] = ()) -> None:
        given = tuple(interceptors)
        for each in given:
            if not any(callable(getattr(each, hook, None)) for hook in HOOKS):
                raise ConfigError(f"{each!r} is no interceptor: it has none of {', '.join(HOOKS)}")
        self.senders = self._hooks(given, "on_send")
        self.acknowledgers = self._hooks(given, "on_acknowledgement")
        self.receivers = self._hooks(given, "on_consume")
        self.commit_watchers = self._hooks(given, "on_commit")

    @staticmethod
    def _hooks(given: tuple[object, ...], name: str) -> tuple[Callable[..., Any], ...]:
        found = (getattr(each, name, None) for each in given)
        return tuple(hook for hook in found if callable(hook))

    def on_send(self, outgoing: Outgoing) -> Outgoing:
        """What is to be sent.  Raises what an interceptor raises."""
        for hook in self.senders:
            outgoing = hook(outgoing)
            if not isinstance(outgoing, Outgoing):
                raise TypeError(f"{_name(hook)} must return an Outgoing, not {outgoing!r}")
        return outgoing

    def on_acknowledgement(
        self, position: tuple[str, int, int] | None, error: BaseException | None
    ) -> None:
        """Tell all of them; their errors are logged."""
        _tell(self.acknowledgers, position, error)

    def on_consume(self, records: Sequence[Record]) -> Sequence[Record]:
        """What is to be returned.  Raises what an interceptor raises."""
        for hook in self.receivers:
            records = hook(records)
            if not isinstance(records, Sequence):
                raise TypeError(f"{_name(hook)} must return a sequence of records, not {records!r}")
        return records

    def on_commit(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Tell all of them; their errors are logged."""
        _tell(self.commit_watchers, offsets)


def _tell(hooks: tuple[Callable[..., Any], ...], *what: object) -> None:
    for hook in hooks:
        try:
            hook(*what)
        except Exception:
            log.exception("%s failed", _name(hook))


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", repr(hook))
