"""GroupCommit: many threads wait, one of them calls fsync for all.

Whoever needs its records durable queues for the right to sync; when its turn comes it mostly finds
that a sync before it has covered its records already.  So while one sync runs, any number of
appends gather behind it and share the next one.

A failed sync is final: the kernel may have dropped the pages and would report success the next
time, so nobody is told "durable" by this object again.

The only lock is taken by `with`, so that an interrupt at any point leaves nothing held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from logstore.errors import IndeterminateAppendError

__all__ = ["GroupCommit"]


class GroupCommit:
    """`sync` makes everything written so far durable and returns the end offset it covered."""

    def __init__(self, sync: Callable[[], int], durable_offset: int) -> None:
        self._sync = sync
        self._turn = threading.Lock()
        self._failure: OSError | None = None
        self.durable_offset = durable_offset

    def wait_for(self, end_offset: int, first_offset: int) -> None:
        """Return when all offsets below `end_offset` are durable; raise if that cannot be known."""
        if self.durable_offset >= end_offset:
            return
        with self._turn:
            if self.durable_offset >= end_offset:
                return
            if self._failure is None:
                try:
                    self.durable_offset = max(self.durable_offset, self._sync())
                except OSError as error:
                    self._failure = error
            if self._failure is not None:
                raise IndeterminateAppendError(
                    f"fsync failed: {self._failure}; close the log and open it again",
                    offsets=range(first_offset, end_offset),
                ) from self._failure

    def lower(self, offset: int) -> None:
        """The log was cut: nothing above `offset` exists, durable or not."""
        with self._turn:
            self.durable_offset = min(self.durable_offset, offset)
