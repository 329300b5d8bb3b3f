"""Subscription and Assignment: the messages between members of a group, as Kafka encodes them.

A member sends a Subscription to the leader with its join, and gets an Assignment with its sync.
The coordinator does not decode either for the protocol; it stores both in the group's record, where
Kafka's tools read them.  Version 3 is written; later versions are read as version 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from logstore.coordinators.offset_records import TopicPartition
from logstore.errors import InvalidRecordError
from logstore.format.wire_types import FieldReader, FieldWriter

__all__ = ["PROTOCOL_TYPE", "Assignment", "Subscription", "by_topic"]

PROTOCOL_TYPE = "consumer"
VERSION = 3


def by_topic(partitions: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Return partition numbers by topic, both sorted."""
    found: dict[str, list[int]] = {}
    for topic, number in sorted(partitions):
        found.setdefault(topic, []).append(number)
    return found


def _write_partitions(out: FieldWriter, partitions: Iterable[tuple[str, int]]) -> None:
    out.array(
        by_topic(partitions).items(),
        lambda out, item: out.string(item[0]).array(item[1], FieldWriter.int32),
    )


def _read_partitions(fields: FieldReader) -> tuple[TopicPartition, ...]:
    found = fields.array(lambda fields: (fields.string(), fields.array(FieldReader.int32)))
    return tuple(TopicPartition(topic, number) for topic, numbers in found for number in numbers)


def _version(fields: FieldReader, what: str) -> int:
    version = fields.int16()
    if version < 0:
        raise InvalidRecordError(f"{what} of version {version}")
    # A newer version only adds fields at the end, which are not read.
    return min(version, VERSION)


@dataclasses.dataclass(frozen=True, slots=True)
class Subscription:
    """The topics that a member wants to read, and the partitions that it owns."""

    topics: tuple[str, ...]
    user_data: bytes | None = None
    owned: tuple[TopicPartition, ...] = ()
    generation: int = -1
    rack: str | None = None

    def encode(self) -> bytes:
        out = FieldWriter().int16(VERSION).array(sorted(self.topics), FieldWriter.string)
        out.nullable_blob(self.user_data)
        _write_partitions(out, self.owned)
        return out.int32(self.generation).nullable_string(self.rack).take()

    @classmethod
    def decode(cls, raw: bytes) -> Subscription:
        """Decode a subscription.  Raises InvalidRecordError."""
        fields = FieldReader(raw)
        version = _version(fields, "a subscription")
        topics = tuple(fields.array(FieldReader.string))
        user_data = fields.nullable_blob()
        owned = _read_partitions(fields) if version >= 1 else ()
        generation = fields.int32() if version >= 2 else -1
        rack = fields.nullable_string() if version >= 3 else None
        return cls(topics, user_data, owned, generation, rack)


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """The partitions that a member gets."""

    partitions: tuple[TopicPartition, ...] = ()
    user_data: bytes | None = None

    def encode(self) -> bytes:
        out = FieldWriter().int16(VERSION)
        _write_partitions(out, self.partitions)
        return out.nullable_blob(self.user_data).take()

    @classmethod
    def decode(cls, raw: bytes) -> Assignment:
        """Decode an assignment; no bytes are an empty one.  Raises InvalidRecordError."""
        # A member that the leader left out gets no bytes.
        if not raw:
            return cls()
        fields = FieldReader(raw)
        _version(fields, "an assignment")
        return cls(_read_partitions(fields), fields.nullable_blob())
