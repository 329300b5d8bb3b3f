"""Records of ``__consumer_offsets``: the version of the key says what it is, the value has its own.

Written as Kafka 4 writes them: an offset's key as version 1, a group's as version 2, their values
as version 3.  Older and newer values are read; keys of the other kinds (a broker keeps its newer
kind of groups here, too) are nobody's business here and are passed over.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from logstore.config import ConfigError
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

OFFSET_VERSION, GROUP_VERSION = 1, 2
VALUE_VERSION, VALUE_VERSION_WITH_EXPIRY, VALUE_VERSION_COMPACT = 3, 1, 4


def check_text(what: str, text: object, *, room: int = 0) -> str:
    """A text that a record can hold, with `room` bytes to spare; else TypeError, ConfigError."""
    if not isinstance(text, str):
        raise TypeError(f"{what} is a str, not {text!r}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{what} has to be Unicode text, not {text[:100]!r}") from None
    if size > STRING_MAX - room:
        raise ConfigError(f"{what} has {size} bytes; at most {STRING_MAX - room} are allowed")
    return text


class TopicPartition(NamedTuple):
    """A partition of a topic; a plain tuple of the two will do wherever one is asked for."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclasses.dataclass(frozen=True, slots=True)
class CommittedOffset:
    """Where a group is in a partition: the offset of the record it wants next.

    `metadata` is any text of the committer's.  `leader_epoch` is that of the last record before
    it, -1 when nobody said.  `timestamp` is when it was committed, `expires` when it goes whatever
    happens to the group; both milliseconds, -1: not said.
    """

    offset: int
    metadata: str = ""
    leader_epoch: int = -1
    timestamp: int = -1
    expires: int = -1

    def encode(self) -> bytes:
        """The value that says so."""
        if self.expires >= 0:
            out = FieldWriter().int16(VALUE_VERSION_WITH_EXPIRY).int64(self.offset)
            return out.string(self.metadata).int64(self.timestamp).int64(self.expires).take()
        out = FieldWriter().int16(VALUE_VERSION).int64(self.offset).int32(self.leader_epoch)
        return out.string(self.metadata).int64(self.timestamp).take()

    @classmethod
    def decode(cls, raw: bytes) -> CommittedOffset:
        """Decode a record's value of version 0 to 4.  Raises InvalidRecordError."""
        fields = FieldReader(raw)
        version = fields.int16()
        if not 0 <= version <= VALUE_VERSION_COMPACT:
            raise InvalidRecordError(f"an offset's value of version {version}; 0 to 4 are known")
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
    """Whose offset, of which partition."""

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
    """Which group."""

    group: str

    def encode(self) -> bytes:
        return FieldWriter().int16(GROUP_VERSION).string(self.group).take()


def parse_key(raw: bytes) -> OffsetKey | GroupKey | None:
    """What a record is about; None for kinds that are not kept here."""
    fields = FieldReader(raw)
    version = fields.int16()
    if version in (0, OFFSET_VERSION):
        return OffsetKey(fields.string(), fields.string(), fields.int32())
    if version == GROUP_VERSION:
        return GroupKey(fields.string())
    return None


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
    timestamp: int = -1  # when the group came into its state; -1: not said
    members: tuple[MemberMetadata, ...] = ()

    def encode(self) -> bytes:
        """The value that says so."""
        out = FieldWriter().int16(VALUE_VERSION).string(self.protocol_type)
        out.int32(self.generation).nullable_string(self.protocol).nullable_string(self.leader)
        out.int64(self.timestamp)
        out.array(self.members, lambda out, member: member._write(out))
        return out.take()

    @classmethod
    def decode(cls, raw: bytes) -> GroupMetadata:
        """Decode a record's value of version 0 to 4.  Raises InvalidRecordError."""
        fields = FieldReader(raw)
        version = fields.int16()
        if not 0 <= version <= VALUE_VERSION_COMPACT:
            raise InvalidRecordError(f"a group's value of version {version}; 0 to 4 are known")
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
