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

__all__ = ["Companions"]

C = TypeVar("C", bound=Closeable)


class Companions:
    """One object of each kind, made on first use.  Refers to the store weakly."""

    def __init__(self, store: Store, access: Access) -> None:
        self._store = weakref.ref(store)
        self._access = access
        self._made: dict[Callable[[Store], Closeable], Closeable] = {}

    def of(self, kind: Callable[[Store], C]) -> C:
        """Return the store's single `kind`; make it with ``kind(store)`` if there is none."""
        store = self._store()
        assert store is not None  # the caller has the store
        with self._access.lock:
            self._access.check_usable()
            found = self._made.get(kind)
            if found is None:
                found = self._made[kind] = kind(store)
            return cast(C, found)

    def close(self) -> list[BaseException]:
        """Close all, the newest first; return the errors.

        The caller does not hold the lock of the store: a companion's thread may need the lock
        before it ends.  If an interrupt stops a companion's `close`, the companion stays listed
        and the next call closes it.
        """
        errors: list[BaseException] = []
        while self._made:
            kind, companion = next(reversed(self._made.items()))
            try:
                companion.close()
            except Exception as error:  # noqa: BLE001  the store raises it, with the others
                errors.append(error)
            self._made.pop(kind, None)
        return errors

    def forget(self) -> None:
        """Drop all without closing them: after a fork they are the parent's."""
        self._made = {}
