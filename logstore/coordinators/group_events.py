"""The data types of a group machine: states, members, requests, replies and effects.

An *effect* is an instruction of the machine to the coordinator: to answer a request, set a timer,
write a record or nudge a member.  Members only stores; GroupMachine decides when a member is added,
replaced or removed, and returns the effects.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from logstore.coordinators.consumer_group.records import ConsumerGroupKey, Value
from logstore.coordinators.offset_records import GroupMetadata, MemberMetadata

__all__ = [
    "Answer",
    "Arm",
    "Disarm",
    "Effect",
    "GroupConfig",
    "GroupState",
    "JoinReply",
    "JoinRequest",
    "Member",
    "Members",
    "Nudge",
    "Request",
    "StoreGroup",
    "StoreRecords",
    "SyncReply",
    "Transition",
]


# Kafka's names of the errors of a request.
MEMBER_ID_REQUIRED = "MEMBER_ID_REQUIRED"

UNKNOWN_MEMBER_ID = "UNKNOWN_MEMBER_ID"

ILLEGAL_GENERATION = "ILLEGAL_GENERATION"

REBALANCE_IN_PROGRESS = "REBALANCE_IN_PROGRESS"

FENCED_INSTANCE_ID = "FENCED_INSTANCE_ID"

INCONSISTENT_GROUP_PROTOCOL = "INCONSISTENT_GROUP_PROTOCOL"

INVALID_SESSION_TIMEOUT = "INVALID_SESSION_TIMEOUT"

GROUP_MAX_SIZE_REACHED = "GROUP_MAX_SIZE_REACHED"

COORDINATOR_NOT_AVAILABLE = "COORDINATOR_NOT_AVAILABLE"

COORDINATOR_LOAD_IN_PROGRESS = "COORDINATOR_LOAD_IN_PROGRESS"

NOT_COORDINATOR = "NOT_COORDINATOR"


class GroupState(enum.Enum):
    """The states of a group; the values are Kafka's names."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"

    def __str__(self) -> str:
        return self.value


# For each state, the states from which a group may enter it.
ALLOWED_FROM = {
    GroupState.EMPTY: {GroupState.PREPARING_REBALANCE},
    GroupState.PREPARING_REBALANCE: {
        GroupState.EMPTY,
        GroupState.COMPLETING_REBALANCE,
        GroupState.STABLE,
    },
    GroupState.COMPLETING_REBALANCE: {GroupState.PREPARING_REBALANCE},
    GroupState.STABLE: {GroupState.COMPLETING_REBALANCE},
    GroupState.DEAD: set(GroupState),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Transition:
    """A change of a group's state, and its reason."""

    at_ms: int
    source: GroupState
    target: GroupState
    generation: int
    reason: str

    def __str__(self) -> str:
        return f"generation {self.generation}: {self.source} -> {self.target}: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """The settings of all groups; the defaults are Kafka's, in milliseconds."""

    # How long the first join of an empty group waits for more members.  The members of one process
    # join at once, so the coordinator sets it to 0.
    initial_rebalance_delay_ms: int = 3_000
    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    max_size: int = (1 << 31) - 1
    # A new member is removed if its first join waits for longer than this.
    new_member_timeout_ms: int = 300_000


class Request:
    """A join or a sync of a member.  `done` is called once, with the reply."""

    __slots__ = ("done",)

    def __init__(self, done: Callable[[JoinReply | SyncReply], object]) -> None:
        self.done = done


@dataclasses.dataclass(frozen=True, slots=True)
class JoinReply:
    """The reply to a join; `error` is "" or Kafka's name of the error.

    Only the leader gets `members`: member ids, instance ids and subscriptions.  `skip_assignment`:
    the leader does not assign, since the group's assignment is still valid.
    """

    member_id: str
    error: str = ""
    generation: int = -1
    protocol: str | None = None
    leader: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    skip_assignment: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SyncReply:
    """The reply to a sync: the member's assignment."""

    assignment: bytes = b""
    error: str = ""
    protocol: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Effect: answer a request."""

    request: Request
    reply: JoinReply | SyncReply


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """Effect: call `expire` with this key after `delay_ms`; replace an earlier timer of the key."""

    key: tuple[str, str]
    delay_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class Disarm:
    """Effect: cancel the timer of this key."""

    key: tuple[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class StoreGroup:
    """Effect: write the group's record, then call `stored`."""

    metadata: GroupMetadata


@dataclasses.dataclass(frozen=True, slots=True)
class StoreRecords:
    """Effect: write records of a consumer group, all or none, before any other effect."""

    records: tuple[tuple[ConsumerGroupKey, Value | None], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Nudge:
    """Effect: make a member join again now, without waiting for its next heartbeat."""

    member_id: str


Effect: TypeAlias = Answer | Arm | Disarm | StoreGroup | StoreRecords | Nudge


@dataclasses.dataclass(slots=True)
class Member:
    """One member of a group."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]  # the preferred one first
    assignment: bytes = b""
    joining: Request | None = None  # its join that waits for the other members
    syncing: Request | None = None  # its sync that waits for the leader
    is_new: bool = True  # it has not completed a join yet
    generation: int = -1  # the latest that it joined; a static member may miss some

    def supports(self, protocol: str) -> bool:
        return any(name == protocol for name, _ in self.protocols)

    def subscription(self, protocol: str | None) -> bytes:
        """Return the subscription that it sent for this protocol."""
        return next((metadata for name, metadata in self.protocols if name == protocol), b"")


class JoinRequest(NamedTuple):
    """The data of a join; the fields are those of Member, in the same sequence."""

    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


class Members(Mapping[str, Member]):
    """The members of one group, by id, in the order of joining.

    Invariants: `static` maps the instance id of each static member to its current member id.
    `pending` has the ids that were given out and have not joined yet; none of them is a member.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Member] = {}
        self.static: dict[str, str] = {}  # instance id -> member id
        self.pending: dict[str, None] = {}
        self.leader: str | None = None

    def __getitem__(self, member_id: str) -> Member:
        return self._by_id[member_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    # ---- changes ----

    def load(self, metadata: GroupMetadata) -> None:
        """Add the members of a group's record; its leader leads."""
        for saved in metadata.members:
            member = Member(
                saved.member_id, saved.instance_id, saved.client_id, saved.client_host,
                saved.session_timeout_ms, saved.rebalance_timeout_ms,
                ((metadata.protocol or "", saved.subscription),), saved.assignment, is_new=False,
                generation=metadata.generation,
            )  # fmt: skip
            self._put(member)
        # Not by `add`: the record decides, even if its leader is none of the members.
        self.leader = metadata.leader

    def saved(self, protocol: str | None) -> tuple[MemberMetadata, ...]:
        """Return the members as a group's record has them."""
        return tuple(
            MemberMetadata(
                member.member_id, member.instance_id, member.client_id, member.client_host,
                member.rebalance_timeout_ms, member.session_timeout_ms,
                member.subscription(protocol), member.assignment,
            )
            for member in self._by_id.values()
        )  # fmt: skip

    def add(self, member: Member) -> None:
        """Add a member; it leads if no other member does."""
        self._put(member)
        if self.leader is None or self.leader not in self._by_id:
            self.leader = member.member_id

    def _put(self, member: Member) -> None:
        self._by_id[member.member_id] = member
        if member.instance_id is not None:
            self.static[member.instance_id] = member.member_id

    def replace(self, old_id: str, new: Member) -> None:
        """Put a static member in the place of its former id; the order of joining stays."""
        assert new.instance_id is not None
        # Built again: an insertion would move the member to the end, and the order of joining
        # decides which member leads next.
        self._by_id = {
            (new.member_id if key == old_id else key): (new if key == old_id else member)
            for key, member in self._by_id.items()
        }
        self.static[new.instance_id] = new.member_id
        if self.leader == old_id:
            self.leader = new.member_id

    def remove(self, member: Member) -> None:
        """Remove a member; if it was the leader, the member that joined first leads."""
        self._by_id.pop(member.member_id, None)
        instance_id = member.instance_id
        # A static member that came back has replaced this id: leave its entry.
        if instance_id is not None and self.static.get(instance_id) == member.member_id:
            del self.static[instance_id]
        if self.leader == member.member_id:
            self.leader = next(iter(self._by_id), None)

    # ---- questions ----

    def check(self, member_id: str, instance_id: str | None) -> str:
        """Return "" if this is a member, or Kafka's name of the error."""
        if instance_id is not None:
            known = self.static.get(instance_id)
            if known is None:
                return UNKNOWN_MEMBER_ID
            if known != member_id:
                return FENCED_INSTANCE_ID
        return "" if member_id in self._by_id else UNKNOWN_MEMBER_ID

    def is_known(self, member_id: str, instance_id: str | None) -> bool:
        """Return whether one of the two is that of a member."""
        return member_id in self._by_id or (instance_id is not None and instance_id in self.static)

    def is_full(
        self, max_size: int, member_id: str, instance_id: str | None, *, preparing: bool
    ) -> bool:
        """Return whether a group of at most `max_size` members has no place for a join.

        While a rebalance is prepared, only the members that have joined again count.
        """
        if self.is_known(member_id, instance_id):
            return False
        return (len(self.joined()) if preparing else len(self)) >= max_size

    def subscriptions(self, protocol: str | None) -> tuple[tuple[str, str | None, bytes], ...]:
        """Return (member id, instance id, subscription) of each member, for the leader."""
        return tuple(
            (each.member_id, each.instance_id, each.subscription(protocol))
            for each in self._by_id.values()
        )

    def joined(self) -> list[Member]:
        """Return the members whose join waits for the next generation."""
        return [member for member in self._by_id.values() if member.joining is not None]

    def all_joined(self) -> bool:
        """Return whether the join of each member, and of each pending id, is here."""
        # A pending id counts: its owner joins again at once, or a timer drops the id.
        return not self.pending and all(m.joining is not None for m in self._by_id.values())

    def allow(
        self, member_id: str, joining: JoinRequest, protocol_type: str, *, of_group: str | None
    ) -> bool:
        """Return whether the other members, if any, support one of the protocols of a join.

        `of_group`: the protocol type of the group, which the join must have; None allows any.
        """
        if not protocol_type or not joining.protocols:
            return False
        if of_group is not None and protocol_type != of_group:
            return False  # also for the only member
        replaced = None if joining.instance_id is None else self.static.get(joining.instance_id)
        others = [m for m in self._by_id.values() if m.member_id not in (member_id, replaced)]
        return not others or any(
            all(other.supports(name) for other in others) for name, _ in joining.protocols
        )

    def choose_protocol(self, otherwise: str) -> str:
        """Return the protocol that all support and most prefer; on a tie, the first one's choice.

        `otherwise`: the answer if no protocol is supported by all.
        """
        common = [
            name
            for name, _ in next(iter(self._by_id.values())).protocols
            if all(member.supports(name) for member in self._by_id.values())
        ]
        votes: dict[str, int] = dict.fromkeys(common, 0)
        for member in self._by_id.values():
            favourite = next((name for name, _ in member.protocols if name in votes), None)
            if favourite is not None:
                votes[favourite] += 1
        return max(common, key=lambda name: votes[name]) if common else otherwise

    def rebalance_timeout_ms(self) -> int:
        """Return the rebalance time-out of the group: the longest that a member asked for."""
        return max((member.rebalance_timeout_ms for member in self._by_id.values()), default=0)
