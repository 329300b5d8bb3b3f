"""GroupRoom: one group in memory, of the classic or of the consumer protocol.

A group has the machine of one protocol.  An empty group takes the other protocol when a member of
that protocol joins; its committed offsets stay.  Members of both protocols at once are not allowed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from logstore.coordinators.consumer_group.machine import ConsumerGroupMachine, TopicInfo
from logstore.coordinators.group_events import (
    COORDINATOR_NOT_AVAILABLE,
    FENCED_INSTANCE_ID,
    GROUP_MAX_SIZE_REACHED,
    ILLEGAL_GENERATION,
    INCONSISTENT_GROUP_PROTOCOL,
    INVALID_SESSION_TIMEOUT,
    NOT_COORDINATOR,
    REBALANCE_IN_PROGRESS,
    UNKNOWN_MEMBER_ID,
    Answer,
    Effect,
    GroupState,
)
from logstore.coordinators.group_machine import GroupMachine
from logstore.coordinators.group_protocol import PROTOCOL_TYPE, Subscription
from logstore.coordinators.offset_book import OffsetBook
from logstore.coordinators.offset_records import TopicPartition
from logstore.coordinators.quorum.outcome import Outcome
from logstore.errors import LogStoreError, RebalanceError
from logstore.store.store import Store
from logstore.timers import Timeout

__all__ = ["GroupRoom", "StoreTopics", "Turn", "explain"]

T = TypeVar("T")

_WORDS = {
    UNKNOWN_MEMBER_ID: "the member is not in the group any more",
    ILLEGAL_GENERATION: "a rebalance has begun a new generation since",
    REBALANCE_IN_PROGRESS: "a rebalance is under way; poll, and try again",
    FENCED_INSTANCE_ID: "another consumer has taken over the same instance_id",
    INCONSISTENT_GROUP_PROTOCOL: (
        "no assignor that all its members know: give this one theirs; a group with members of the "
        "consumer protocol (KIP-848) has none"
    ),
    INVALID_SESSION_TIMEOUT: "session_timeout is outside of what the group allows",
    GROUP_MAX_SIZE_REACHED: "it is full",
    COORDINATOR_NOT_AVAILABLE: "it was deleted, or the store is being closed",
    NOT_COORDINATOR: "another node coordinates it",
}


def explain(group: str, code: str, more: str = "") -> RebalanceError:
    """Return the exception for one of Kafka's error names."""
    reason = _WORDS.get(code, "refused")
    return RebalanceError(f"{reason}; {more}" if more else reason, group=group, code=code)


class StoreTopics(Mapping[str, TopicInfo]):
    """A live view of a store's topics, for consumer groups; without topics that have no id."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, name: str) -> TopicInfo:
        topic = self._store.get(name)
        if topic is None or topic.id is None:
            raise KeyError(name)
        return TopicInfo(topic.id, self._store.topic_changes.declared_partitions(topic))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._store if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Turn(Generic[T]):
    """An event of a group of the consumer protocol; the group has one at a time.

    ``run(now)`` calls the machine and returns its effects.  If their records are written, `outcome`
    gets the result of ``ended()``.  If not, or if `run` raises, ``undo()`` is called.
    """

    __slots__ = ("ended", "outcome", "run", "undo")

    def __init__(
        self,
        run: Callable[[int], list[Effect]],
        undo: Callable[[], object],
        ended: Callable[[], T],
    ) -> None:
        self.run = run
        self.undo = undo
        self.ended = ended
        self.outcome: Outcome[T] = Outcome()


class GroupRoom:
    """One group of the coordinator: its machine, lock and timers.  `lock` guards all fields."""

    def __init__(self, machine: GroupMachine) -> None:
        self.machine = machine  # has no members if `consumer` is not None
        self.consumer: ConsumerGroupMachine | None = None  # of a group of the consumer protocol
        self.lock = threading.RLock()
        self.timeouts: dict[tuple[str, str], Timeout] = {}
        self.nudges: dict[str, Callable[[], None]] = {}  # by member id
        # Answers that wait until a record of the group is committed, by the outcome of its append.
        self.held: dict[Outcome[range], list[Answer]] = {}
        self.turns: deque[Turn[Any]] = deque()  # the others wait for the first one
        self.writing: Outcome[range] | None = None  # the append of the first turn
        self.expelled: dict[str, str] = {}  # why members were removed by `expel`, by member id

    @property
    def group_type(self) -> str:
        """Kafka's name of the protocol of the members."""
        return "classic" if self.consumer is None else "consumer"

    @property
    def protocol_type(self) -> str:
        """Kafka's protocol type; "" if no member has ever joined."""
        return (self.machine.protocol_type or "") if self.consumer is None else PROTOCOL_TYPE

    @property
    def state_name(self) -> str:
        """Kafka's name of the state."""
        return str(self.machine.state) if self.consumer is None else self.consumer.state_name

    @property
    def member_count(self) -> int:
        return len(self.machine.members if self.consumer is None else self.consumer.members)

    @property
    def empty(self) -> bool:
        """Whether the group has no members; of the classic protocol, also none that join."""
        return self.member_count == 0 and self.machine.state is GroupState.EMPTY

    def check_alive(self) -> None:
        """Raise RebalanceError if the group was deleted while a thread waited for its lock.

        A group that is used after that is loaded into another room.
        """
        if self.machine.state is GroupState.DEAD:
            raise explain(self.machine.group_id, COORDINATOR_NOT_AVAILABLE)

    def subscribed(self) -> set[str] | None:
        """Return the topics that the members subscribed to; None if they cannot be decoded."""
        if self.consumer is not None:
            return set(self.consumer.subscribed())
        if not self.machine.members:
            return set()
        if self.machine.protocol_type != PROTOCOL_TYPE:
            return None
        topics: set[str] = set()
        for member in self.machine.members.values():
            for _, raw in member.protocols:
                try:
                    topics.update(Subscription.decode(raw).topics)
                except LogStoreError:
                    return None
        return topics

    def check_commit(
        self, member_id: str, generation: int, instance_id: str | None,
        partitions: Iterable[tuple[str, int]], *, transactional: bool, held: bool,
    ) -> None:  # fmt: skip
        """Raise RebalanceError unless offsets of these partitions may be committed."""
        if self.consumer is not None:
            self.check_alive()
            self.consumer.check_commit(
                member_id, generation, partitions, transactional=transactional
            )
            return
        error = self.machine.check_commit(
            member_id, generation, instance_id, transactional=transactional, held=held
        )
        if error:
            more = self.expelled.get(member_id, "")
            if not member_id and not more:
                more = f"it has {self.member_count} members: only they commit; stop them first"
            raise explain(self.machine.group_id, error, more)

    # ---- expiry of offsets ----

    def expired_offsets(self, book: OffsetBook, now: int, retention: int) -> list[TopicPartition]:
        """Return the partitions whose committed offsets are older than the retention time."""
        machine = self.machine
        pending = book.pending(machine.group_id)
        read = self.subscribed()
        found = []
        for tp, committed in book.committed(machine.group_id).items():
            if tp in pending:
                continue
            if committed.expires >= 0:
                over = now >= committed.expires
            elif self.consumer is None and machine.state is GroupState.EMPTY:
                known = machine.protocol_type is not None
                since = machine.state_since_ms if known else committed.timestamp
                over = max(since, committed.timestamp) + retention <= now
            elif self.consumer is not None or machine.state is GroupState.STABLE:
                unread = read is not None and tp.topic not in read
                over = unread and committed.timestamp + retention <= now
            else:
                over = False
            if over:
                found.append(tp)
        return sorted(found)

    def is_over(self, book: OffsetBook, now: int, retention: int, expired: bool) -> bool:
        """Return whether the group has neither members nor offsets, for the retention time."""
        machine = self.machine
        if not self.empty or machine.members.pending:
            return False
        if book.committed(machine.group_id) or book.pending(machine.group_id):
            return False
        return expired or machine.state_since_ms + retention <= now
