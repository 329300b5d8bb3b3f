"""What goes into a group machine and what comes out of it: requests, replies, effects, states."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import TypeAlias

from logstore.coordinators.offset_records import GroupMetadata

__all__ = [
    "Answer",
    "Arm",
    "Disarm",
    "Effect",
    "GroupConfig",
    "GroupState",
    "JoinReply",
    "Member",
    "Nudge",
    "Request",
    "StoreGroup",
    "SyncReply",
    "Transition",
]


# Kafka's names of what can be wrong with a request.
MEMBER_ID_REQUIRED = "MEMBER_ID_REQUIRED"

UNKNOWN_MEMBER_ID = "UNKNOWN_MEMBER_ID"

ILLEGAL_GENERATION = "ILLEGAL_GENERATION"

REBALANCE_IN_PROGRESS = "REBALANCE_IN_PROGRESS"

FENCED_INSTANCE_ID = "FENCED_INSTANCE_ID"

INCONSISTENT_GROUP_PROTOCOL = "INCONSISTENT_GROUP_PROTOCOL"

INVALID_SESSION_TIMEOUT = "INVALID_SESSION_TIMEOUT"

GROUP_MAX_SIZE_REACHED = "GROUP_MAX_SIZE_REACHED"

COORDINATOR_NOT_AVAILABLE = "COORDINATOR_NOT_AVAILABLE"


class GroupState(enum.Enum):
    """Where a group stands; the values are Kafka's names."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True, slots=True)
class Transition:
    """A change of state, and why."""

    at_ms: int
    source: GroupState
    target: GroupState
    generation: int
    reason: str

    def __str__(self) -> str:
        return f"generation {self.generation}: {self.source} -> {self.target}: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """What a broker configures for all groups; Kafka's defaults, in milliseconds."""

    # How long the first join of an empty group waits for others.  In one process they come at
    # once, so that Kafka's 3 seconds would only be waited for: the coordinator has less.
    initial_rebalance_delay_ms: int = 3_000
    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    max_size: int = (1 << 31) - 1
    # A new member whose join waits for others is not kept for longer than this.
    new_member_timeout_ms: int = 300_000


class Request:
    """Something a member waits for: a join or a sync.  `done` gets the one answer."""

    __slots__ = ("done",)

    def __init__(self, done: Callable[[JoinReply | SyncReply], object]) -> None:
        self.done = done


@dataclasses.dataclass(frozen=True, slots=True)
class JoinReply:
    """The answer to a join; `error` is "" or Kafka's name of what is wrong.

    Only the leader gets `members`: their ids, instance ids and subscriptions.
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
    """The answer to a sync: the member's assignment."""

    assignment: bytes = b""
    error: str = ""
    protocol: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Answer a request."""

    request: Request
    reply: JoinReply | SyncReply


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """Call `expire` with this key when the time is up; one timer of the key replaces another."""

    key: tuple[str, str]
    delay_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class Disarm:
    """Forget the timer of this key."""

    key: tuple[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class StoreGroup:
    """Write the group's record, then call `stored`."""

    metadata: GroupMetadata


@dataclasses.dataclass(frozen=True, slots=True)
class Nudge:
    """Tell a member that it should join again: it would learn so from its next heartbeat."""

    member_id: str


Effect: TypeAlias = Answer | Arm | Disarm | StoreGroup | Nudge


@dataclasses.dataclass(slots=True)
class Member:
    """One member."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]  # by preference
    assignment: bytes = b""
    joining: Request | None = None
    syncing: Request | None = None
    is_new: bool = True
    generation: int = -1  # the latest that it joined; a static member may miss some

    def supports(self, protocol: str) -> bool:
        return any(name == protocol for name, _ in self.protocols)

    def subscription(self, protocol: str | None) -> bytes:
        """What it said about itself to this protocol."""
        return next((metadata for name, metadata in self.protocols if name == protocol), b"")
