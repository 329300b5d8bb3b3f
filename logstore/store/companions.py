"""Companions: the coordinators and other objects of which a store has one each.

They belong to the store and not to their first caller: the store closes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from logstore.closeable import Closeable
from logstore.store.access import Access

if TYPE_CHECKING:
    from logstore.store.store import Store

__all__ = ["Companions", "expect_store"]

CLUSTER = (
    "append with cluster[topic].append() and read with .scan(); groups and transactions need nodes "
    "that are served, see docs/replication.md"
)

C = TypeVar("C", bound=Closeable)
K = TypeVar("K")


class Companions:
    """One object of each kind, made on first use.  Refers to the store weakly."""

    def __init__(self, store: Store, access: Access) -> None:
        self._store = weakref.ref(store)
        self._access = access
        self._made: dict[Callable[[Store], Closeable], Closeable] = {}  # in the order of making
        self._attached: dict[type[Closeable], Closeable] = {}

    def of(self, kind: Callable[[Store], C]) -> C:
        """Return the store's single `kind`; make it with ``kind(store)`` if there is none."""
        store = self._store()
        assert store is not None  # the caller has the store
        with self._access.lock:
            self._access.check_usable()
            found = self._made.get(kind)
            if found is None:
                # Under the lock: two threads would make two.  `kind` may call `of` for another
                # kind, because the lock is an RLock; the inner one is then listed first and closed
                # last.
                found = self._made[kind] = kind(store)
            return cast(C, found)

    def made(self, kind: Callable[[Store], C]) -> C | None:
        """Return the store's single `kind`, or None if it is not made yet."""
        return cast(C | None, self._made.get(kind))

    def attach(self, companion: C) -> C:
        """Have the store close `companion`, before the objects that `of` makes.

        Return `companion`, or the object of its class that is attached already.
        """
        with self._access.lock:
            self._access.check_usable()
            return cast(C, self._attached.setdefault(type(companion), companion))

    def detach(self, companion: Closeable) -> None:
        """Forget an attached object: it is closed.  Does nothing if it is not attached."""
        if self._attached.get(type(companion)) is companion:
            del self._attached[type(companion)]

    def close(self) -> list[BaseException]:
        """Close all, the attached ones first, then the newest first; return the errors.

        The caller does not hold the lock of the store: a companion's thread may need the lock
        before it ends.  If an interrupt stops a companion's `close`, the companion stays listed
        and the next call closes it.
        """
        errors: list[BaseException] = []
        while self._attached:
            _close(next(reversed(self._attached.items())), self._attached, errors)
        while self._made:
            _close(next(reversed(self._made.items())), self._made, errors)
        return errors

    def forget(self) -> None:
        """Drop all without closing them: after a fork they are the parent's."""
        self._made = {}
        self._attached = {}


def _close(
    item: tuple[K, Closeable], listed: dict[K, Closeable], errors: list[BaseException]
) -> None:
    kind, companion = item
    try:
        companion.close()
    except Exception as error:  # noqa: BLE001  the store raises it, with the others
        errors.append(error)
    # Also after an error: a companion that fails to close is not tried for ever.  An interrupt is
    # no Exception, and leaves it listed.
    listed.pop(kind, None)


def expect_store(value: Store, taker: str) -> Store:
    """Return the store; raise TypeError for an object of another kind.  `taker` takes stores."""
    if isinstance(getattr(value, "companions", None), Companions):
        return value
    kind = type(value).__name__
    # By name: the package of Cluster is above this one.
    hint = CLUSTER if kind == "Cluster" else "logstore.open(directory) returns one"
    raise TypeError(f"{taker} takes a Store, not a {kind}: {hint}")
