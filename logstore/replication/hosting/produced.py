"""Produced: the outcome of an append at its leader; Waiter: the producer that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from logstore.format.validation import AppendedBatches

__all__ = ["Produced", "Waiter"]

OK = 0  # an error code of Kafka


class Produced(NamedTuple):
    """The outcome of an append.

    `code` is 0: acknowledged.  Else, if `offsets` is empty, the append was refused and nothing is
    in the log; if it is not, the records are in the log and may be committed later, or cut.
    """

    code: int
    offsets: range = range(0)
    timestamp: int = -1
    leader_epoch: int = -1
    error: BaseException | None = None  # the reason, if the engine refused it
    start: int = -1  # of the log


class Waiter:
    """The token of an append: whom to answer, and with what.  Used under the replica's lock."""

    __slots__ = ("_appended", "_done", "_epoch", "_start", "code", "timer")

    def __init__(
        self, done: Callable[[Produced], object], appended: AppendedBatches, epoch: int, start: int
    ) -> None:
        self._done = done
        self._appended = appended
        self._epoch = epoch
        self._start = start
        self.timer: Callable[[], object] | None = None  # cancels the time-out
        self.code = OK  # set before `answer`

    def answer(self) -> None:
        if self.timer is not None:
            self.timer()
        offsets, timestamp, _ = self._appended
        self._done(Produced(self.code, offsets, timestamp, self._epoch, None, self._start))
