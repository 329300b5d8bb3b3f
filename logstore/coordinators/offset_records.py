"""Records of ``__consumer_offsets``: a key and a value for each committed offset and each group.

The version of the key is the kind of the record; the value has a version of its own.  Records are
written as by Kafka 4: the key of an offset has version 1, that of a group version 2, their values
version 3.  Values of versions 0 to 4 are read.  The records of groups of the consumer protocol are
in `consumer_group.records`.  Keys of other kinds are skipped.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from logstore.config import ConfigError
from logstore.coordinators.consumer_group.records import ConsumerGroupKey
from logstore.errors import InvalidRecordError
from logstore.format.wire_types import STRING_MAX, FieldReader, FieldWriter

__all__ = [
    "CommittedOffset",
    "GroupKey",
    "GroupMetadata",
    "MemberMetadata",
    "OffsetKey",
    "TopicPartition",
    "check_text",
    "parse_key",
]

# The version of a key is the kind of the record; the version of a value is its layout.
OFFSET_VERSION, GROUP_VERSION = 1, 2
VALUE_VERSION, VALUE_VERSION_WITH_EXPIRY, VALUE_VERSION_COMPACT = 3, 1, 4


def check_text(what: str, text: object, *, room: int = 0) -> str:
    """Return a text that fits into a record with `room` more bytes.

    Raises TypeError or ConfigError if it is not such a text.
    """
    if not isinstance(text, str):
        raise TypeError(f"{what} is a str, not {text!r}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{what} has to be Unicode text, not {text[:100]!r}") from None
    if size > STRING_MAX - room:
        raise ConfigError(f"{what} has {size} bytes; at most {STRING_MAX - room} are allowed")
    return text


def _value_version(fields: FieldReader, what: str) -> int:
    """Return the version at the start of a record's value."""
    version = fields.int16()
    if not 0 <= version <= VALUE_VERSION_COMPACT:
        raise InvalidRecordError(
            f"{what} of version {version}; 0 to {VALUE_VERSION_COMPACT} are known"
        )
    return version


class TopicPartition(NamedTuple):
    """A partition of a topic; every method that takes one accepts a plain tuple as well."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclasses.dataclass(frozen=True, slots=True)
class CommittedOffset:
    """The position of a group in a partition: the next offset to read.

    `metadata` is any text of the program that commits.  `leader_epoch` is the epoch of the record
    before the offset, or -1.  `timestamp` is the time of the commit; at `expires` the offset is
    deleted even if the group is used.  Both are milliseconds, -1 if not set.
    """

    offset: int  # below 0, from a client of Kafka: it is kept, and is not a position
    metadata: str = ""
    leader_epoch: int = -1
    timestamp: int = -1
    expires: int = -1

    def encode(self) -> bytes:
        """Return the value of the record."""
        if self.expires >= 0:
            out = FieldWriter().int16(VALUE_VERSION_WITH_EXPIRY).int64(self.offset)
            return out.string(self.metadata).int64(self.timestamp).int64(self.expires).take()
        out = FieldWriter().int16(VALUE_VERSION).int64(self.offset).int32(self.leader_epoch)
        return out.string(self.metadata).int64(self.timestamp).take()

    @classmethod
    def decode(cls, raw: bytes) -> CommittedOffset:
        """Decode a record's value of version 0 to 4.  Raises InvalidRecordError."""
        fields = FieldReader(raw)
        version = _value_version(fields, "an offset's value")
        offset = fields.int64()
        epoch = fields.int32() if version >= 3 else -1
        if version == VALUE_VERSION_COMPACT:
            metadata = fields.compact_string() or ""
        else:
            metadata = fields.string()
        timestamp = fields.int64()
        expires = fields.int64() if version == VALUE_VERSION_WITH_EXPIRY else -1
        return cls(offset, metadata, epoch, timestamp, expires)


class OffsetKey(NamedTuple):
    """The key of a committed offset: group, topic and partition."""

    group: str
    topic: str
    partition: int

    def encode(self) -> bytes:
        """
        >>> OffsetKey("g", "t", 3).encode().hex()
        '000100016700017400000003'
        """
        out = FieldWriter().int16(OFFSET_VERSION).string(self.group).string(self.topic)
        return out.int32(self.partition).take()


class GroupKey(NamedTuple):
    """The key of a group's metadata."""

    group: str

    def encode(self) -> bytes:
        return FieldWriter().int16(GROUP_VERSION).string(self.group).take()


def parse_key(raw: bytes) -> OffsetKey | GroupKey | ConsumerGroupKey | None:
    """Return the decoded key of a record; None for other kinds of records."""
    fields = FieldReader(raw)
    version = fields.int16()
    if version in (0, OFFSET_VERSION):
        return OffsetKey(fields.string(), fields.string(), fields.int32())
    if version == GROUP_VERSION:
        return GroupKey(fields.string())
    return ConsumerGroupKey.read(version, fields)


@dataclasses.dataclass(frozen=True, slots=True)
class MemberMetadata:
    """One member of a group, as the group's record has it."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes

    def _write(self, out: FieldWriter) -> None:
        out.string(self.member_id).nullable_string(self.instance_id)
        out.string(self.client_id).string(self.client_host)
        out.int32(self.rebalance_timeout_ms).int32(self.session_timeout_ms)
        out.blob(self.subscription).blob(self.assignment)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupMetadata:
    """A group of the classic protocol: its generation, leader and members."""

    protocol_type: str
    generation: int
    protocol: str | None
    leader: str | None
    timestamp: int = -1  # when the group entered its state; -1: not known
    members: tuple[MemberMetadata, ...] = ()

    def encode(self) -> bytes:
        """Return the value of the record."""
        out = FieldWriter().int16(VALUE_VERSION).string(self.protocol_type)
        out.int32(self.generation).nullable_string(self.protocol).nullable_string(self.leader)
        out.int64(self.timestamp)
        out.array(self.members, lambda out, member: member._write(out))
        return out.take()

    @classmethod
    def decode(cls, raw: bytes) -> GroupMetadata:
        """Decode a record's value of version 0 to 4.  Raises InvalidRecordError."""
        fields = FieldReader(raw)
        version = _value_version(fields, "a group's value")
        if version == VALUE_VERSION_COMPACT:
            return cls._decode_compact(fields)
        protocol_type, generation = fields.string(), fields.int32()
        protocol, leader = fields.nullable_string(), fields.nullable_string()
        timestamp = fields.int64() if version >= 2 else -1
        members = fields.array(lambda fields: _member(fields, version))
        return cls(protocol_type, generation, protocol, leader, timestamp, tuple(members))

    @classmethod
    def _decode_compact(cls, fields: FieldReader) -> GroupMetadata:
        protocol_type, generation = fields.compact_string() or "", fields.int32()
        protocol, leader = fields.compact_string(), fields.compact_string()
        timestamp = fields.int64()
        members = fields.compact_array(_compact_member) or []
        return cls(protocol_type, generation, protocol, leader, timestamp, tuple(members))


def _member(fields: FieldReader, version: int) -> MemberMetadata:
    member_id = fields.string()
    instance_id = fields.nullable_string() if version >= 3 else None
    client_id, client_host = fields.string(), fields.string()
    rebalance_ms = fields.int32() if version >= 1 else -1
    session_ms = fields.int32()
    if rebalance_ms < 0:
        rebalance_ms = session_ms
    return MemberMetadata(member_id, instance_id, client_id, client_host, rebalance_ms,
                          session_ms, fields.blob(), fields.blob())  # fmt: skip


def _compact_member(fields: FieldReader) -> MemberMetadata:
    member_id, instance_id = fields.compact_string() or "", fields.compact_string()
    client_id, client_host = fields.compact_string() or "", fields.compact_string() or ""
    rebalance_ms, session_ms = fields.int32(), fields.int32()
    subscription, assignment = fields.compact_blob() or b"", fields.compact_blob() or b""
    fields.tags()
    return MemberMetadata(member_id, instance_id, client_id, client_host, rebalance_ms,
                          session_ms, subscription, assignment)  # fmt: skip
