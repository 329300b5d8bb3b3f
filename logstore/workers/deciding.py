"""What happens to a record whose handler failed: a Policy decides, and is the only one to do so.

`InPlace` is the policy of workers without another one.  It loses nothing and hands nothing over: a
failed record is tried again in its place, with a growing delay, and keeps its strand.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from logstore.record import Record
from logstore.serialization import SerializationError
from logstore.work_errors import PoisonRecordError
from logstore.workers.context import Dead, RetryLater

__all__ = ["Again", "InPlace", "Policy", "Stop", "Verdict"]

FIRST_DELAY = 0.1  # seconds
LONGEST_DELAY = 60.0


class Again(NamedTuple):
    """Try the record again after so many seconds; its strand waits."""

    after: float


class Stop(NamedTuple):
    """Stop the workers with this error; the record stays open."""

    error: BaseException


Verdict = Again | Stop


class Policy(Protocol):
    """Decides on failed records.  The control thread calls it, and holds no lock."""

    def decide(self, record: Record, error: BaseException, attempt: int) -> Verdict:
        """Return what to do after attempt number `attempt` of a record raised `error`."""


class InPlace:
    """Try again in place, after 0.1 s, 0.2 s and so on, at most a minute."""

    def decide(self, record: Record, error: BaseException, attempt: int) -> Verdict:
        if isinstance(error, RetryLater):
            return Again(error.after)
        if isinstance(error, Dead | SerializationError | PoisonRecordError):
            error.add_note(
                f"{record.topic}-{record.partition} offset {record.offset} is not finished: the "
                f"workers stopped, and the record is processed again when they are started"
            )
            return Stop(error)
        return Again(min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(attempt - 1, 20)))
