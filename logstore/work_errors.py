"""The exceptions of workers, delays and queues.

LogStoreError
  HandlerTimeoutError         TimeoutError   a handler took longer than its time-out
  DrainTimeoutError           TimeoutError   handlers still ran at the end of a drain
  StuckWorkersError           RuntimeError   too many handlers do not return
  PoisonRecordError           RuntimeError   a record that ended its process several times
  LeaseLostError              RuntimeError   a message of a queue that another getter may have
  UnknownTicketError          LookupError    no delayed record of this ticket waits
  ScheduleError               ValueError     a time of delivery is missing, or too late
"""

from __future__ import annotations

from logstore.errors import LogStoreError

__all__ = [
    "DrainTimeoutError",
    "HandlerTimeoutError",
    "LeaseLostError",
    "PoisonRecordError",
    "ScheduleError",
    "StuckWorkersError",
    "UnknownTicketError",
]


class HandlerTimeoutError(LogStoreError, TimeoutError):
    """The handler of ``.record`` took longer than ``.seconds``."""

    record: object = None
    seconds: float = 0.0


class DrainTimeoutError(LogStoreError, TimeoutError):
    """Handlers still ran at the end of a drain: ``.records`` are processed again."""

    records: tuple[object, ...] = ()


class StuckWorkersError(LogStoreError, RuntimeError):
    """More handlers than ``stuck_max`` exceeded their time-out and did not return."""


class PoisonRecordError(LogStoreError, RuntimeError):
    """The process ended ``crash_limit`` times while a handler had ``.record``."""

    record: object = None


class LeaseLostError(LogStoreError, RuntimeError):
    """The message of a queue is not leased to the caller any more: nothing was changed.

    Its visibility time-out has passed, its queue was closed, or it was acknowledged or given back
    before.  ``.offset`` is the offset of its record, ``.attempts`` the attempt that was lost.
    """

    def __init__(self, offset: int, *, attempts: int) -> None:
        super().__init__(
            f"the lease of the message at offset {offset} has ended (attempt {attempts}): another "
            f"getter may have it.  Call extend() before the deadline, or raise visibility="
        )
        self.offset = offset
        self.attempts = attempts


class UnknownTicketError(LogStoreError, LookupError):
    """No delayed record of this ticket waits: ``.ticket`` is its id."""

    def __init__(self, ticket: str) -> None:
        super().__init__(
            f"no record waits for ticket {ticket!r}: it was delivered, cancelled or never scheduled"
        )
        self.ticket = ticket


class ScheduleError(LogStoreError, ValueError):
    """A time of delivery is missing, or is later than the scheduler takes."""
