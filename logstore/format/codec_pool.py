"""A small pool of codec contexts: making one costs more than compressing a small batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_CONTEXTS_KEPT: Final = 8  # idle contexts kept per codec; more threads than this only cost time


def borrow(pool: list[Any], create: Callable[[], Any]) -> Any:
    try:
        return pool.pop()
    except IndexError:
        return create()


def give_back(pool: list[Any], context: Any) -> None:
    if len(pool) < _CONTEXTS_KEPT:
        pool.append(context)
