"""Access: the lock of a store, and whether the store may be used and changed.

Lock order: `Access.lock`, then `Topic._lock`, then the locks of a partition.  A thread that holds
one of these never takes an earlier one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from logstore.errors import ClosedError, ForkedHandleError, ReadOnlyError
from logstore.waking import uninterrupted

__all__ = ["Access"]

T = TypeVar("T")


class Access:
    """The lock of one store and its three states: readonly, closed and forked.

    Only the Store sets `closed`.  Topics, coordinators, producers and consumers call the checks.
    """

    def __init__(self, path: Path, *, readonly: bool) -> None:
        self.path = path
        self.readonly = readonly
        self.closed = False  # set under `lock`; read without it by every check
        self.forked = False  # this process is a child of the process that opened the store
        self.lock = threading.RLock()

    def check_usable(self) -> None:
        """Raise ClosedError if the store is closed, ForkedHandleError in a child process."""
        if self.forked:
            raise ForkedHandleError(
                f"{self.path} was opened before a fork: open it again in this process "
                f"(one process may write, any number may use readonly=True)"
            )
        if self.closed:
            raise ClosedError(f"the store {self.path} is closed")

    def check_writable(self) -> None:
        """As `check_usable`; also raise ReadOnlyError if the store is readonly."""
        self.check_usable()
        if self.readonly:
            raise ReadOnlyError(f"{self.path} was opened with readonly=True")

    def change(self, act: Callable[[], T]) -> T:
        """Call `act` with the lock held, if the store is writable; return its result.

        An interrupt does not stop `act`, so that no topic is left half made.
        """

        def locked() -> T:
            with self.lock:
                self.check_writable()  # under the lock: `close` may have run since
                return act()

        # `uninterrupted` uses another thread, which would wait for a lock that this thread holds.
        owned: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        return locked() if owned() else uninterrupted(locked)

    def abandon_in_child(self) -> None:
        """After a fork: refuse all use.  The lock is new: no thread of the parent unlocks it."""
        self.forked = True
        self.lock = threading.RLock()
