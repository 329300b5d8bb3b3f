"""Records of ``__consumer_offsets`` for groups of the consumer protocol (KIP-848).

The version of the key is the kind of the record, as for the other records of the topic.  Values are
those of Kafka 4.3, version 0 with tagged fields:

| kind | key | value |
|---:|---|---|
| 3 | group | GroupEpoch: the epoch of the group, a hash of the topics that its members read |
| 5 | group, member | MemberSubscription: the settings and the subscription of a member |
| 6 | group | TargetEpoch: the group epoch for which the assignor ran last |
| 7 | group, member | TargetAssignment: the partitions that the assignor gave to a member |
| 8 | group, member | CurrentAssignment: the epoch, the state and the partitions of a member |
| 16 | group, pattern | ResolvedRegex: the topics that match a regular expression |

Kind 4 is of Kafka before 4.1, and not read.  A ConsumerGroupState is a group in memory: the newest
value of each key.  The group's machine and the replay of the log change it by the same method.
"""

from __future__ import annotations

import dataclasses
import enum
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from logstore.errors import InvalidRecordError
from logstore.format.wire_types import FieldReader, FieldWriter

__all__ = [
    "ConsumerGroupKey",
    "ConsumerGroupState",
    "CurrentAssignment",
    "GroupEpoch",
    "MemberState",
    "MemberSubscription",
    "ResolvedRegex",
    "TargetAssignment",
    "TargetEpoch",
    "TopicIdPartition",
    "Value",
]

GROUP, MEMBER, TARGET_EPOCH, TARGET, CURRENT, REGEX = 3, 5, 6, 7, 8, 16
NAMED = frozenset({MEMBER, TARGET, CURRENT, REGEX})  # keys with a second name
VALUE_VERSION = 0
NOT_CLASSIC = b"\0"  # the tagged field of a member that does not use the classic protocol

TopicIdPartition: TypeAlias = tuple[uuid.UUID, int]


class Value(Protocol):
    """The value of a record."""

    def encode(self) -> bytes: ...


class ConsumerGroupKey(NamedTuple):
    """The key of a record: its kind, the group, and the member or the regular expression."""

    kind: int
    group: str
    name: str = ""

    def encode(self) -> bytes:
        """
        >>> ConsumerGroupKey(5, "g", "m").encode().hex()
        '000500016700016d'
        """
        out = FieldWriter().int16(self.kind).string(self.group)
        return (out.string(self.name) if self.kind in NAMED else out).take()

    @classmethod
    def read(cls, kind: int, fields: FieldReader) -> ConsumerGroupKey | None:
        """Return the key after its version; None if it is of another kind."""
        if kind not in DECODERS:
            return None
        return cls(kind, fields.string(), fields.string() if kind in NAMED else "")

    def decode(self, raw: bytes) -> Value:
        """Decode the value of a record with this key.  Raises InvalidRecordError."""
        fields = FieldReader(raw)
        version = fields.int16()
        if version != VALUE_VERSION:
            raise InvalidRecordError(f"a value of version {version} for a key of kind {self.kind}")
        return DECODERS[self.kind](fields)


class MemberState(enum.IntEnum):
    """How far a member is on its way to its target assignment; the values are Kafka's."""

    STABLE = 0
    UNREVOKED_PARTITIONS = 1  # it has to give partitions back first
    UNRELEASED_PARTITIONS = 2  # other members still hold partitions of its target
    UNKNOWN = 127


@dataclasses.dataclass(frozen=True, slots=True)
class GroupEpoch:
    """The epoch of a group.  It grows when subscriptions, members or topics change."""

    epoch: int
    metadata_hash: int = 0

    def encode(self) -> bytes:
        tags = [(0, FieldWriter().int64(self.metadata_hash).take())] if self.metadata_hash else []
        return _value().int32(self.epoch).tags(tags).take()

    @classmethod
    def read(cls, fields: FieldReader) -> GroupEpoch:
        return cls(fields.int32(), _tagged_int64(fields.tags()))


@dataclasses.dataclass(frozen=True, slots=True)
class MemberSubscription:
    """A member as its heartbeats describe it; `regex` is "" if it has none."""

    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    topics: tuple[str, ...]
    regex: str
    rebalance_timeout_ms: int
    assignor: str | None

    def encode(self) -> bytes:
        out = _value().compact_string(self.instance_id).compact_string(self.rack_id)
        out.compact_string(self.client_id).compact_string(self.client_host)
        out.compact_array(self.topics, FieldWriter.compact_string).compact_string(self.regex)
        out.int32(self.rebalance_timeout_ms).compact_string(self.assignor)
        return out.tags([(0, NOT_CLASSIC)]).take()

    @classmethod
    def read(cls, fields: FieldReader) -> MemberSubscription:
        """Read a member.  A member of the classic protocol has a tagged field, which is dropped."""
        instance_id, rack_id = fields.compact_string(), fields.compact_string()
        client_id, client_host = fields.compact_string() or "", fields.compact_string() or ""
        topics = fields.compact_array(lambda fields: fields.compact_string() or "") or []
        regex, rebalance_ms = fields.compact_string() or "", fields.int32()
        return cls(instance_id, rack_id, client_id, client_host, tuple(topics), regex,
                   rebalance_ms, fields.compact_string())  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class TargetEpoch:
    """The group epoch for which the assignor ran last, and the time of that run."""

    epoch: int
    timestamp: int = 0

    def encode(self) -> bytes:
        tags = [(0, FieldWriter().int64(self.timestamp).take())] if self.timestamp else []
        return _value().int32(self.epoch).tags(tags).take()

    @classmethod
    def read(cls, fields: FieldReader) -> TargetEpoch:
        return cls(fields.int32(), _tagged_int64(fields.tags()))


@dataclasses.dataclass(frozen=True, slots=True)
class TargetAssignment:
    """The partitions that a member is to get."""

    partitions: frozenset[TopicIdPartition] = frozenset()

    def encode(self) -> bytes:
        out = _value()
        _write_rows(out, dict.fromkeys(self.partitions, 0), with_epochs=False)
        return out.tags().take()

    @classmethod
    def read(cls, fields: FieldReader) -> TargetAssignment:
        return cls(frozenset(_read_rows(fields, 0)))


@dataclasses.dataclass(frozen=True, slots=True)
class CurrentAssignment:
    """What a member holds: each partition with the member epoch at which it was assigned.

    The member may use `assigned`.  It must give back `revoking`; until it has, no other member gets
    these partitions.
    """

    epoch: int = 0
    previous_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: Mapping[TopicIdPartition, int] = dataclasses.field(default_factory=dict)
    revoking: Mapping[TopicIdPartition, int] = dataclasses.field(default_factory=dict)

    def encode(self) -> bytes:
        out = _value().int32(self.epoch).int32(self.previous_epoch).int8(self.state)
        _write_rows(out, self.assigned, with_epochs=True)
        _write_rows(out, self.revoking, with_epochs=True)
        return out.tags().take()

    @classmethod
    def read(cls, fields: FieldReader) -> CurrentAssignment:
        epoch, previous, number = fields.int32(), fields.int32(), fields.int8()
        known = number in MemberState._value2member_map_
        state = MemberState(number) if known else MemberState.UNKNOWN
        return cls(epoch, previous, state, _read_rows(fields, epoch), _read_rows(fields, epoch))


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedRegex:
    """The topics that matched a regular expression, at a version of the cluster's metadata."""

    topics: tuple[str, ...]
    version: int = 0
    timestamp: int = 0

    def encode(self) -> bytes:
        out = _value().compact_array(self.topics, FieldWriter.compact_string)
        return out.int64(self.version).int64(self.timestamp).tags().take()

    @classmethod
    def read(cls, fields: FieldReader) -> ResolvedRegex:
        topics = fields.compact_array(lambda fields: fields.compact_string() or "") or []
        return cls(tuple(topics), fields.int64(), fields.int64())


DECODERS: dict[int, Callable[[FieldReader], Value]] = {
    GROUP: GroupEpoch.read,
    MEMBER: MemberSubscription.read,
    TARGET_EPOCH: TargetEpoch.read,
    TARGET: TargetAssignment.read,
    CURRENT: CurrentAssignment.read,
    REGEX: ResolvedRegex.read,
}


class ConsumerGroupState:
    """The newest value of each key of a group.  `put` is the only change."""

    __slots__ = ("_tables", "assignments", "groups", "members", "regexes", "target_epochs",
                 "targets")  # fmt: skip

    def __init__(self) -> None:
        self.groups: dict[str, GroupEpoch] = {}  # by "", as `target_epochs`
        self.members: dict[str, MemberSubscription] = {}  # by member id, as the next two
        self.targets: dict[str, TargetAssignment] = {}
        self.assignments: dict[str, CurrentAssignment] = {}
        self.target_epochs: dict[str, TargetEpoch] = {}
        self.regexes: dict[str, ResolvedRegex] = {}
        self._tables: dict[int, dict[str, Any]] = {
            GROUP: self.groups, MEMBER: self.members, TARGET_EPOCH: self.target_epochs,
            TARGET: self.targets, CURRENT: self.assignments, REGEX: self.regexes,
        }  # fmt: skip

    def put(self, kind: int, name: str, value: Value | None) -> Value | None:
        """Set a value, or remove it if it is None; return the former one."""
        table = self._tables[kind]
        before: Value | None = table.get(name)
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value
        return before

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield the kind and the name of each value."""
        for kind, table in self._tables.items():
            for name in table:
                yield kind, name

    def copy(self) -> ConsumerGroupState:
        made = ConsumerGroupState()
        for kind, table in self._tables.items():
            made._tables[kind].update(table)
        return made

    def __bool__(self) -> bool:
        return any(self._tables.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConsumerGroupState) and self._tables == other._tables

    __hash__ = None  # type: ignore[assignment]


# ---- fields ----


def _value() -> FieldWriter:
    return FieldWriter().int16(VALUE_VERSION)


def _tagged_int64(tags: dict[int, bytes]) -> int:
    return FieldReader(tags[0]).int64() if 0 in tags else 0


def _write_rows(
    out: FieldWriter, epochs: Mapping[TopicIdPartition, int], *, with_epochs: bool
) -> None:
    """Write partitions by topic; with their epochs in a tagged field of each topic."""
    rows: dict[uuid.UUID, list[int]] = {}
    for topic_id, number in sorted(epochs):
        rows.setdefault(topic_id, []).append(number)

    def write(out: FieldWriter, row: tuple[uuid.UUID, list[int]]) -> None:
        topic_id, numbers = row
        out.unique_id(topic_id).compact_array(numbers, FieldWriter.int32)
        tags: Iterable[tuple[int, bytes]] = ()
        if with_epochs:
            each = FieldWriter()
            each.compact_array([epochs[topic_id, n] for n in numbers], FieldWriter.int32)
            tags = [(0, each.take())]
        out.tags(tags)

    out.compact_array(rows.items(), write)


def _read_rows(fields: FieldReader, epoch: int) -> dict[TopicIdPartition, int]:
    """Read partitions with their epochs; `epoch` is that of a topic without the tagged field."""
    found: dict[TopicIdPartition, int] = {}

    def read(fields: FieldReader) -> None:
        topic_id = fields.unique_id()
        numbers = fields.compact_array(FieldReader.int32) or []
        tags = fields.tags()
        given = FieldReader(tags[0]).compact_array(FieldReader.int32) if 0 in tags else None
        epochs = given if given is not None and len(given) == len(numbers) else None
        for place, number in enumerate(numbers):
            found[topic_id, number] = epoch if epochs is None else epochs[place]

    fields.compact_array(read)
    return found
