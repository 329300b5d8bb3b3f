"""The records that a consumer returns."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

__all__ = ["ConsumedRecord", "ReceivedRecord"]


class ReceivedRecord(Protocol):
    """A record of a consumer: a Record, or with a deserializer a ConsumedRecord."""

    @property
    def value(self) -> Any:
        """The result of the value deserializer; without one bytes, or None."""

    @property
    def key(self) -> Any:
        """The result of the key deserializer; without one bytes, or None."""

    @property
    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        """Names and values."""

    @property
    def timestamp(self) -> int:
        """Milliseconds since 1970."""

    @property
    def offset(self) -> int:
        """Its number in the partition."""

    @property
    def partition(self) -> int:
        """The partition's number."""

    @property
    def topic(self) -> str:
        """The topic's name."""


class ConsumedRecord(NamedTuple):
    """A record of a consumer with a key or value deserializer."""

    value: Any
    key: Any
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int
    offset: int
    partition: int
    topic: str
