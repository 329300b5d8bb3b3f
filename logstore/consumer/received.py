"""The records that a consumer returns."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from logstore.record import Record
from logstore.serialization import Deserializer, SerializationError

__all__ = ["ConsumedRecord", "ReceivedRecord", "deserialized"]


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


def deserialized(
    record: Record,
    key_deserializer: Deserializer | None,
    value_deserializer: Deserializer | None,
) -> ConsumedRecord:
    """Return a record with its key and value deserialized.  Raises SerializationError."""
    topic, partition = record.topic or "", record.partition or 0
    made: list[Any] = []
    for part, call in (("value", value_deserializer), ("key", key_deserializer)):
        raw = getattr(record, part)
        if call is not None and raw is not None:
            try:
                raw = call(raw)
            except Exception as error:
                raise SerializationError(
                    error, part=part, topic=topic, data=getattr(record, part),
                    partition=partition, offset=record.offset,
                ) from error  # fmt: skip
        made.append(raw)
    return ConsumedRecord(made[0], made[1], record.headers, record.timestamp, record.offset,
                          partition, topic)  # fmt: skip
