"""Closeable: a base class for objects that a ``with`` block closes."""

from __future__ import annotations

from typing import Self

__all__ = ["Closeable"]


class Closeable:
    """Calls `close` at the end of a ``with`` block, also after an exception."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()
