"""Message: one message of a queue, leased to the program that got it.

A ``with`` block acknowledges it at the end, or gives it back if the block raises.  All that a
message does to its queue needs its lease: after the deadline every method raises LeaseLostError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, Self

from logstore.queues.leasing import Share
from logstore.queues.share import Lease
from logstore.record import Record
from logstore.store.topic import Position
from logstore.times import parse_duration
from logstore.work_errors import LeaseLostError

__all__ = ["Message", "duration_ms", "one_turn"]


def duration_ms(value: float | str) -> int:
    """Return a duration in milliseconds: seconds, or a text such as "5m".

    >>> duration_ms(1.5), duration_ms("5m")
    (1500, 300000)
    """
    if isinstance(value, str):
        return parse_duration(value)
    if value < 0:
        raise ValueError(f"a duration is not negative: {value!r}")
    return round(value * 1000)


class Holder(Protocol):
    """What a message needs of its queue."""

    nack_delay_ms: int

    def deserialize(self, value: bytes | None) -> Any: ...
    def flush(self) -> None: ...
    def deadline_ms(self, duration_ms: int) -> int: ...


class Message:
    """A message that `Queue.get` returned.  Threads must not share it.

    `record` is the record in the log, `attempts` counts the acquisitions with this one, and
    `deadline` is the wall clock's time, in milliseconds, at which the lease ends.
    """

    __slots__ = ("_lease", "_queue", "_settled", "_share", "attempts", "deadline", "record")

    def __init__(
        self, queue: Holder, share: Share, record: Record, lease: Lease, deadline: int
    ) -> None:
        """Made by `Queue.get`."""
        self._queue = queue
        self._share = share
        self._lease = lease
        self._settled = False
        self.record = record
        self.attempts = lease.attempts
        self.deadline = deadline

    def __repr__(self) -> str:
        return f"<Message {self.position} attempt {self.attempts}>"

    @property
    def value(self) -> Any:
        """The value: bytes, or what the queue's `value_deserializer` makes of them."""
        return self._queue.deserialize(self.record.value)

    @property
    def key(self) -> bytes | None:
        """The key, or None."""
        return self.record.key

    @property
    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        """The headers of the record."""
        return tuple(self.record.headers)

    @property
    def timestamp(self) -> int:
        """When it was put, in milliseconds since 1970."""
        return self.record.timestamp

    @property
    def position(self) -> Position:
        """Topic, partition and offset of the record."""
        return Position(self._share.topic.name, self._share.key.partition, self._lease.offset)

    @property
    def settled(self) -> bool:
        """Whether it was acknowledged, given back or rejected by this object."""
        return self._settled

    def ack(self, *, wait: bool = False) -> None:
        """Finish the message: the group never gets it again.

        It is durable after the queue's `ack_linger`, together with others; with `wait` when this
        returns.  A crash before that hands the message out again.  Raises LeaseLostError.
        """
        self._share.acknowledge(self._lease)
        self._settled = True
        if wait:
            self._queue.flush()

    def nack(self, delay: float | str | None = None, *, reason: str = "") -> None:
        """Give the message back; it is available again after `delay`, or the `nack_delay`.

        At the last of `max_attempts`, it becomes a dead letter with this reason.  The delay is kept
        in memory: after a restart the message may be available earlier.  Raises LeaseLostError.
        """
        ms = self._queue.nack_delay_ms if delay is None else duration_ms(delay)
        self._share.release(self._lease, ms, reason or f"attempt {self.attempts} failed")
        self._settled = True

    def reject(self, reason: str = "rejected") -> None:
        """Move the message to the dead letters, durably, at any attempt.  Raises LeaseLostError."""
        self._share.reject(self._lease, reason)
        self._settled = True

    def extend(self, duration: float | str) -> None:
        """Set the deadline to `duration` from now; there is no limit.  Raises LeaseLostError."""
        ms = duration_ms(duration)
        self._share.extend(self._lease, ms)
        self.deadline = self._queue.deadline_ms(ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._settled:
            return
        if error is None:
            self.ack()
            return
        try:
            self.nack(reason=f"{type(error).__name__}: {error}")
        except LeaseLostError as lost:
            error.add_note(str(lost))


@contextlib.contextmanager
def one_turn(message: Message) -> Iterator[None]:
    """Acknowledge a message after its turn of a loop; if the loop ends in it, give it back."""
    try:
        yield
    except BaseException:
        if not message.settled:
            message.nack(0)
        raise
    if not message.settled:
        message.ack()
