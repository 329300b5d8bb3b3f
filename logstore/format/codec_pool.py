"""A pool of codec contexts: making a context takes longer than compressing a small batch.

Invariant: a context is in one pool or is used by one caller.  list.pop and list.append are atomic,
so no lock is needed.  A caller that failed does not return its context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_CONTEXTS_KEPT: Final = 8  # idle contexts per pool; a thread that finds none makes a new one


def borrow(pool: list[Any], create: Callable[[], Any]) -> Any:
    try:
        return pool.pop()
    except IndexError:
        return create()


def give_back(pool: list[Any], context: Any) -> None:
    if len(pool) < _CONTEXTS_KEPT:
        pool.append(context)
