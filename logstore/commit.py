"""GroupCommit: many threads wait, one of them calls fsync for all.

Whoever needs its records durable either finds that they are, or becomes the leader and syncs
everything that has been written by then, or waits for the leader and looks again.  A failed sync is
final: the kernel may have dropped the pages and would report success the next time, so nobody is
told "durable" by this object again.
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
        self._changed = threading.Condition(threading.Lock())
        self._leading = False
        self._failure: OSError | None = None
        self.durable_offset = durable_offset

    @property
    def failure(self) -> OSError | None:
        """The error of the sync that failed, if one did."""
        return self._failure

    def wait_for(self, end_offset: int, first_offset: int) -> None:
        """Return when all offsets below `end_offset` are durable; raise if that cannot be known."""
        changed = self._changed
        while True:
            with changed:
                while True:
                    if self.durable_offset >= end_offset:
                        return
                    if self._failure is not None:
                        raise IndeterminateAppendError(
                            f"fsync failed: {self._failure}; close the log and open it again",
                            offsets=range(first_offset, end_offset),
                        ) from self._failure
                    if not self._leading:
                        self._leading = True
                        break
                    changed.wait()
            self._lead()

    def _lead(self) -> None:
        durable, failure = self.durable_offset, None
        try:
            durable = self._sync()
        except OSError as error:
            failure = error
        finally:
            with self._changed:
                self._leading = False
                self._failure = self._failure or failure
                if self._failure is None and durable > self.durable_offset:
                    self.durable_offset = durable
                self._changed.notify_all()

    def lower(self, offset: int) -> None:
        """The log was cut: nothing above `offset` exists, durable or not."""
        with self._changed:
            self.durable_offset = min(self.durable_offset, offset)
