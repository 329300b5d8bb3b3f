"""Failures: the errors of records that were not delivered, until the next flush raises them.

Only the first errors are kept, and the others counted: a program may use only callbacks and never
flush.  Threads share it.
"""

from __future__ import annotations

import threading

from logstore.errors import FencedError, TransactionAbortedError

__all__ = ["Failures"]

KEPT = 100


class Failures:
    """The failures of one producer since its last flush."""

    def __init__(self) -> None:
        self._kept: list[BaseException] = []
        self._more = 0  # how many were not kept
        self._lock = threading.Lock()  # guards the two; nothing is called under it

    def note(self, error: BaseException) -> None:
        """Keep an error, or count it."""
        with self._lock:
            if len(self._kept) < KEPT:
                self._kept.append(error)
            else:
                self._more += 1

    def take(self) -> tuple[list[BaseException], int]:
        """Return the failures since the last call, and how many were not kept; drop both."""
        with self._lock:
            # One step for a signal handler: an interrupt loses no failure.
            taken = self._kept, self._more
            self._kept, self._more = [], 0
        return taken

    def raise_all(self, *, in_transaction: bool) -> None:
        """Raise the failures since the last call, once."""
        failures, more = self.take()
        if in_transaction:
            # An epoch that has ended fails every pack alike: raise one error for the transaction.
            ends = (FencedError, TransactionAbortedError)
            over: list[BaseException] = [each for each in failures if isinstance(each, ends)]
            if over:
                raise over[0]
        if len(failures) == 1:
            raise failures[0]
        if failures:
            text = f"{len(failures) + more} packs of records failed"
            if more:
                text += f"; {more} of the errors are not listed here"
            raise BaseExceptionGroup(text, failures)

    def add_to(self, error: BaseException) -> None:
        """Add the failures since the last call to an error, as notes."""
        failures, more = self.take()
        for failure in failures:
            error.add_note(f"and then: {failure}")
        if more:
            error.add_note(f"and then: {more} more packs of records failed")
