"""GroupCommit: many threads wait, one of them calls fsync for all.

Whoever needs its records durable syncs for all, or waits for the end of the sync that is running
and looks again.  So while one sync runs, any number of appends gather behind it and share the next.

A failed sync is final: the kernel may have dropped the pages and would report success the next
time, so nobody is told "durable" by this object again.

The lock is taken by `with` alone, so that an interrupt at any point leaves nothing held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from logstore.errors import ClosedError, IndeterminateAppendError

__all__ = ["GroupCommit"]


class GroupCommit:
    """`sync` makes everything written so far durable and returns the end offset it covered."""

    def __init__(self, sync: Callable[[], int], durable_offset: int) -> None:
        self._sync = sync
        self._turn = threading.Lock()  # held by the thread that syncs
        self._gates: list[threading.Lock] = []  # one per waiting thread, opened after a sync
        self._failure: OSError | None = None
        self.durable_offset = durable_offset

    @property
    def failed(self) -> bool:
        """Whether a sync has failed: nothing becomes durable by this object any more."""
        return self._failure is not None

    def fail(self, error: OSError) -> None:
        """Another sync of these files failed: whoever waits is told so."""
        self._failure = self._failure or error

    def wait_for(self, end_offset: int, first_offset: int) -> None:
        """Return when all offsets below `end_offset` are durable; raise if that cannot be known."""
        while self.durable_offset < end_offset:
            if self._failure is not None:
                raise IndeterminateAppendError(
                    f"fsync failed: {self._failure}; close the log and open it again",
                    offsets=range(first_offset, end_offset),
                ) from self._failure
            if self._turn.locked():
                self._wait_for_turn()
            elif self._lead(end_offset) < end_offset and self._failure is None:
                raise IndeterminateAppendError(
                    "the log was truncated before they were durable",
                    offsets=range(first_offset, end_offset),
                )

    def _wait_for_turn(self) -> None:
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        # A leader opens gates after it has given the turn back: look again, or it may be too late.
        if self._turn.locked():
            # The bound only matters if an interrupt kept a leader from opening it.
            gate.acquire(timeout=0.1)

    def _lead(self, end_offset: int) -> int:
        """Sync; the end of what is durable now."""
        leading = False
        try:
            with self._turn:
                leading = True
                if self.durable_offset < end_offset and self._failure is None:
                    self.durable_offset = max(self.durable_offset, self._sync())
        except OSError as error:
            self._failure = error
        except ClosedError:
            # Closed meanwhile; a clean close has made everything durable itself.
            if self.durable_offset < end_offset:
                raise
        finally:
            if leading:
                # After the turn is given back, so that whoever wakes up can take it.
                while self._gates:
                    self._gates.pop().release()
        return self.durable_offset

    def raise_to(self, offset: int) -> None:
        """Everything below `offset` is durable, or gone for good."""
        with self._turn:
            self.durable_offset = max(self.durable_offset, offset)

    def lower(self, offset: int) -> None:
        """The log was cut: nothing above `offset` exists, durable or not."""
        with self._turn:
            self.durable_offset = min(self.durable_offset, offset)
