"""ConsumerGroupMachine: one group of Kafka's consumer protocol (KIP-848), without I/O.

A member sends heartbeats only.  The group has an *epoch*, which grows when a member, a subscription
or a topic changes.  Then the assignor computes a *target assignment* for that epoch.  Each member
moves to the target on its own, with its next heartbeats:

    Stable --partitions to give back--> UnrevokedPartitions --given back--+
      ^ |                                                                 |
      | +--------- nothing to give back ------+---------------------------+
      |                                       v
      +-- all free -- next member epoch -- others still hold some --> UnreleasedPartitions
      ^                                                                   |
      +------------------------ they were released -----------------------+

Invariants: no partition is held by two members, counting those that a member has to give back.
Epochs only grow, except -2 for a static member that is away.  The state is a function of the
records: an event changes it only by `_put`, which adds a record to the effects.  The caller writes
the records before it answers, and calls `undo` if that fails.

Threads must not share a machine: the coordinator has a lock for each group.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import uuid
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from logstore.coordinators.consumer_group.assignment import SERVER_ASSIGNORS, GroupMember
from logstore.coordinators.consumer_group.records import (
    CURRENT,
    GROUP,
    MEMBER,
    REGEX,
    TARGET,
    TARGET_EPOCH,
    ConsumerGroupKey,
    ConsumerGroupState,
    CurrentAssignment,
    GroupEpoch,
    MemberState,
    MemberSubscription,
    ResolvedRegex,
    TargetAssignment,
    TargetEpoch,
    TopicIdPartition,
    Value,
)
from logstore.coordinators.consumer_group.topic_pattern import (
    InvalidPatternError,
    TopicPattern,
    matching,
)
from logstore.coordinators.group_events import Arm, Disarm, Effect, StoreRecords
from logstore.coordinators.offset_records import TopicPartition
from logstore.errors import RebalanceError

__all__ = [
    "ConsumerGroupConfig",
    "ConsumerGroupMachine",
    "Heartbeat",
    "HeartbeatReply",
    "TopicInfo",
]

JOIN, LEAVE, LEAVE_STATIC = 0, -1, -2  # member epochs with a meaning
FIRST_EPOCH = 1  # of a new group, before its first member subscribes
_NEW = CurrentAssignment()
_NONE: frozenset[TopicIdPartition] = frozenset()
# The fields of a heartbeat that stay as they were if they are None or -1.
_KEPT = ("instance_id", "rack_id", "topics", "regex", "rebalance_timeout_ms", "assignor")


class TopicInfo(NamedTuple):
    """A topic that exists."""

    id: uuid.UUID
    partitions: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroupConfig:
    """The settings of all groups; times are milliseconds, and the defaults are Kafka's."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = (1 << 31) - 1
    assignors: tuple[str, ...] = tuple(SERVER_ASSIGNORS)  # the first one is the default
    # The least time between two runs of the assignor.  Kafka: 1000.
    assignment_interval_ms: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A heartbeat.  A field that is None (or -1) has not changed since the one before."""

    member_id: str
    epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = -1
    topics: tuple[str, ...] | None = None
    regex: str | None = None
    assignor: str | None = None
    owned: frozenset[TopicIdPartition] | None = None
    client_id: str = ""
    client_host: str = ""

    @property
    def full(self) -> bool:
        """Whether it has all fields: then the answer has the assignment."""
        subscribes = self.topics is not None or self.regex is not None
        sent = self.rebalance_timeout_ms != -1 and subscribes and self.owned is not None
        return self.epoch == JOIN or sent


class HeartbeatReply(NamedTuple):
    """The answer to a heartbeat; `assignment` is None if it has not changed."""

    member_id: str
    epoch: int
    interval_ms: int = 0
    assignment: frozenset[TopicIdPartition] | None = None


class ConsumerGroupMachine:
    """One group.  `topics` is a live view of the store's topics."""

    def __init__(
        self,
        group_id: str,
        topics: Mapping[str, TopicInfo],
        config: ConsumerGroupConfig | None = None,
        state: ConsumerGroupState | None = None,
    ) -> None:
        self.group_id = group_id
        self.topics = topics
        self.config = config or ConsumerGroupConfig()
        self.state = state or ConsumerGroupState()
        self._records: list[tuple[ConsumerGroupKey, Value | None]] = []  # of the current event
        self._before: list[tuple[int, str, Value | None]] = []  # what `undo` puts back
        self._effects: list[Effect] = []
        self._names: list[str] | None = None  # topics for which the expressions are resolved
        self._reads: frozenset[str] | None = None  # the result of `subscribed`, if it is known

    # ---- the group ----

    @property
    def members(self) -> Mapping[str, MemberSubscription]:
        return self.state.members

    @property
    def epoch(self) -> int:
        """The epoch of the group; 0 before its first record."""
        head = self.state.groups.get("")
        return 0 if head is None else head.epoch

    @property
    def target_epoch(self) -> int:
        """The epoch of the target assignment."""
        target = self.state.target_epochs.get("")
        return 0 if target is None else target.epoch

    @property
    def state_name(self) -> str:
        """Kafka's name of the group's state."""
        if not self.members:
            return "Empty"
        if self.epoch > self.target_epoch:
            return "Assigning"
        done = all(_reconciled(self.current(each), self.target_epoch) for each in self.members)
        return "Stable" if done else "Reconciling"

    @property
    def assignor(self) -> str:
        """The assignor that most members ask for; otherwise the first of the settings."""
        votes = collections.Counter(
            each.assignor for each in self.members.values() if each.assignor in SERVER_ASSIGNORS
        )
        return votes.most_common(1)[0][0] or "" if votes else self.config.assignors[0]

    def current(self, member_id: str) -> CurrentAssignment:
        return self.state.assignments.get(member_id, _NEW)

    def target(self, member_id: str) -> frozenset[TopicIdPartition]:
        target = self.state.targets.get(member_id)
        return _NONE if target is None else target.partitions

    def subscribed(self) -> frozenset[str]:
        """Return the topics that members read; they may not exist."""
        if self._reads is None:
            self._reads = frozenset().union(*(self.topics_of(each) for each in self.members))
        return self._reads

    def topics_of(self, member_id: str) -> set[str]:
        """Return the topics that a member reads, by name or by its expression."""
        member = self.members[member_id]
        resolved = self.state.regexes.get(member.regex)
        return {*member.topics, *(() if resolved is None else resolved.topics)}

    def named(self, partitions: Iterable[TopicIdPartition]) -> list[TopicPartition]:
        """Return partitions by the names of their topics, sorted; without deleted topics."""
        names = {info.id: name for name, info in self.topics.items()}
        return sorted(TopicPartition(names[id_], n) for id_, n in partitions if id_ in names)

    # ---- events ----

    def load(self) -> list[Effect]:
        """Set the timers of the members, after the state was read from the log."""
        effects: list[Effect] = []
        for member_id, each in self.members.items():
            effects.append(Arm(("session", member_id), self.config.session_timeout_ms))
            if self.current(member_id).state is MemberState.UNREVOKED_PARTITIONS:
                effects.append(Arm(("rebalance", member_id), each.rebalance_timeout_ms))
        return effects

    def heartbeat(self, beat: Heartbeat, now_ms: int) -> tuple[HeartbeatReply, list[Effect]]:
        """Handle a heartbeat: a join, a leave, or the sign of life of a member.

        Raises RebalanceError with Kafka's name of the error.  Then call `undo`.
        """
        self._begin()
        self._check_request(beat)
        if beat.epoch in (LEAVE, LEAVE_STATIC):
            return self._leave(beat), self._take()
        before = self._checked_member(beat)
        changed = self._subscribe(beat)
        self._grow_epoch(now_ms, changed)
        if self._assignment_is_due(now_ms):
            self._assign(now_ms)
        self._reconcile(beat.member_id, beat.owned, changed)
        self._effects.append(Arm(("session", beat.member_id), self.config.session_timeout_ms))
        current = self.current(beat.member_id)
        shown = beat.full or before.assigned.keys() != current.assigned.keys()
        given = frozenset(current.assigned) if shown else None
        interval = self.config.heartbeat_interval_ms
        return HeartbeatReply(beat.member_id, current.epoch, interval, given), self._take()

    def remove(self, *, member_id: str = "", instance_id: str | None = None) -> list[Effect]:
        """Remove a member; an instance id without a member id removes a static member."""
        self._begin()
        self._forget(self._known(member_id, instance_id))
        return self._take()

    def expire(self, key: tuple[str, str], now_ms: int) -> list[Effect]:
        """Handle a timer that has expired: a member is silent, or does not give back in time."""
        self._begin()
        kind, member_id = key
        late = self.current(member_id).state is MemberState.UNREVOKED_PARTITIONS
        if member_id in self.members and (kind == "session" or late):
            self._forget(member_id)
        return self._take()

    def rebalance(self) -> list[Effect]:
        """Have the assignor run again."""
        self._begin()
        if self.members:
            self._put(GROUP, "", GroupEpoch(self.epoch + 1, self._metadata_hash()))
        return self._take()

    def undo(self) -> None:
        """Take back the changes of the last event: it was refused, or could not be written."""
        for kind, name, value in reversed(self._before):
            self.state.put(kind, name, value)
        self._names = self._reads = None
        self._begin()

    def check_member(self, member_id: str, epoch: int) -> None:
        """Raise RebalanceError unless a member with this epoch may fetch committed offsets."""
        self._require(member_id)
        if epoch != self.current(member_id).epoch:
            raise self._refusal("STALE_MEMBER_EPOCH", self._epochs_differ(member_id, epoch))

    def check_commit(
        self, member_id: str, epoch: int, partitions: Iterable[tuple[str, int]], *,
        transactional: bool = False,
    ) -> None:  # fmt: skip
        """Raise RebalanceError unless a member with this epoch may commit these partitions.

        An earlier epoch is allowed if the member has held the partitions since that epoch.  A
        commit without a member is allowed if the group has none, or as a part of a transaction.
        """
        if epoch < 0 and (not self.members or (transactional and not member_id)):
            return
        self._require(member_id)
        current = self.current(member_id)
        if epoch == current.epoch:
            return
        if epoch < current.epoch:
            infos = [(self.topics.get(topic), number) for topic, number in partitions]
            since = [
                None if info is None else current.assigned.get((info.id, number))
                for info, number in infos
            ]
            if all(each is not None and each <= epoch for each in since):
                return
        code = "ILLEGAL_GENERATION" if transactional else "STALE_MEMBER_EPOCH"
        raise self._refusal(code, self._epochs_differ(member_id, epoch))

    # ---- checks of a heartbeat ----

    def _check_request(self, beat: Heartbeat) -> None:
        if beat.assignor is not None and beat.assignor not in self.config.assignors:
            raise self._refusal(
                "UNSUPPORTED_ASSIGNOR",
                f"ServerAssignor {beat.assignor} is not supported. "
                f"Supported assignors: {', '.join(self.config.assignors)}.",
            )
        if not self.state and beat.epoch != JOIN:
            raise self._refusal("GROUP_ID_NOT_FOUND", f"Consumer group {self.group_id} not found.")
        full = len(self.members) >= self.config.max_size
        if full and beat.epoch >= 0 and beat.member_id not in self.members:
            raise self._refusal(
                "GROUP_MAX_SIZE_REACHED",
                f"The consumer group has reached its maximum capacity of "
                f"{self.config.max_size} members.",
            )

    def _checked_member(self, beat: Heartbeat) -> CurrentAssignment:
        """Check that the sender is a member, or may join; return its assignment until now."""
        if beat.epoch == JOIN:
            former = self._find_static(beat.instance_id)
            self._check_regex(beat.regex)
            if former is not None:
                if self.current(former).epoch != LEAVE_STATIC:
                    raise self._refusal(
                        "UNRELEASED_INSTANCE_ID",
                        f"Static member {beat.member_id} with instance id {beat.instance_id} cannot"
                        f" join the group because the instance id is owned by {former} member.",
                    )
                self._replace(former, beat.member_id)
            return self.current(beat.member_id)
        self._known(beat.member_id, beat.instance_id)
        current = self.current(beat.member_id)
        # The answer with the latest epoch may be lost: then the member still has the one before.
        repeated = beat.epoch == current.previous_epoch < current.epoch and beat.owned is not None
        if beat.epoch != current.epoch and not (
            repeated and (beat.owned or _NONE) <= current.assigned.keys()
        ):
            raise self._refusal(
                "FENCED_MEMBER_EPOCH",
                self._epochs_differ(beat.member_id, beat.epoch)
                + " The member must abandon all its partitions and rejoin.",
            )
        self._check_regex(beat.regex)
        return current

    def _check_regex(self, regex: str | None) -> None:
        if regex:
            try:
                TopicPattern(regex)
            except InvalidPatternError as error:
                raise self._refusal(
                    "INVALID_REGULAR_EXPRESSION",
                    f"SubscribedTopicRegex `{regex}` is not a valid regular expression: {error}.",
                ) from None

    def _require(self, member_id: str) -> None:
        if member_id not in self.members:
            raise self._refusal(
                "UNKNOWN_MEMBER_ID", f"Member {member_id} is not a member of group {self.group_id}."
            )

    def _find_static(self, instance_id: str | None) -> str | None:
        if instance_id is None:
            return None
        found = (m for m, each in self.members.items() if each.instance_id == instance_id)
        return next(found, None)

    def _known(self, member_id: str, instance_id: str | None) -> str:
        """Return the id of a member, which is that of its instance id if it has one."""
        if instance_id is None:
            self._require(member_id)
            return member_id
        found = self._find_static(instance_id)
        if found is None:
            raise self._refusal("UNKNOWN_MEMBER_ID", f"Instance id {instance_id} is unknown.")
        if member_id and found != member_id:
            raise self._refusal(
                "FENCED_INSTANCE_ID",
                f"Static member {member_id} with instance id {instance_id} was fenced by member "
                f"{found}.",
            )
        return found

    def _epochs_differ(self, member_id: str, epoch: int) -> str:
        known = self.current(member_id).epoch
        kind = "greater" if epoch > known else "smaller"
        return (
            f"The consumer group member has a {kind} member epoch ({epoch}) than the one known by "
            f"the group coordinator ({known})."
        )

    def _refusal(self, code: str, text: str) -> RebalanceError:
        return RebalanceError(text, group=self.group_id, code=code)

    # ---- steps of the events; they change the state by `_put` ----

    def _leave(self, beat: Heartbeat) -> HeartbeatReply:
        member_id = self._known(beat.member_id, beat.instance_id)
        if beat.epoch == LEAVE:
            self._forget(member_id)
            return HeartbeatReply(member_id, LEAVE)
        # The member keeps its partitions until it returns, or until its session ends.
        away = dataclasses.replace(self.current(member_id), epoch=LEAVE_STATIC, revoking={})
        self._put(CURRENT, member_id, away)
        self._effects.append(Disarm(("rebalance", member_id)))
        return HeartbeatReply(member_id, LEAVE_STATIC)

    def _replace(self, former: str, member_id: str) -> None:
        """Give a static member that returns its new id; its partitions and its target stay."""
        subscription, target = self.members[former], self.state.targets.get(former)
        current = dataclasses.replace(self.current(former), epoch=0, previous_epoch=0)
        self._drop(former)
        self._put(MEMBER, member_id, subscription)
        self._put(TARGET, member_id, target)
        self._put(CURRENT, member_id, current)

    def _drop(self, member_id: str) -> None:
        for kind in (CURRENT, TARGET, MEMBER):
            self._put(kind, member_id, None)
        self._effects += [Disarm(("session", member_id)), Disarm(("rebalance", member_id))]

    def _forget(self, member_id: str) -> None:
        """Remove a member; what it held is free at once."""
        self._drop(member_id)
        self._drop_regexes()
        self._put(GROUP, "", GroupEpoch(self.epoch + 1, self._metadata_hash()))

    def _subscribe(self, beat: Heartbeat) -> bool:
        """Store the settings of a member; return whether its subscription is another one."""
        old = self.members.get(beat.member_id)
        new = MemberSubscription(
            instance_id=beat.instance_id,
            rack_id=beat.rack_id,
            client_id=beat.client_id,
            client_host=beat.client_host,
            topics=tuple(sorted(set(beat.topics or ()))),
            regex=beat.regex or "",
            rebalance_timeout_ms=beat.rebalance_timeout_ms,
            assignor=beat.assignor,
        )
        if old is not None:
            unsent = [name for name in _KEPT if getattr(beat, name) in (None, -1)]
            new = dataclasses.replace(new, **{name: getattr(old, name) for name in unsent})
        self._put(MEMBER, beat.member_id, new)
        known = ((), "") if old is None else (old.topics, old.regex)
        return known != (new.topics, new.regex)

    def _grow_epoch(self, now_ms: int, changed: bool) -> None:
        """Begin the next epoch if a subscription has changed, or a topic that a member reads."""
        self._resolve(now_ms)
        head = self.state.groups.get("") or GroupEpoch(FIRST_EPOCH)
        found = self._metadata_hash()
        grown = changed or found != head.metadata_hash
        self._put(GROUP, "", GroupEpoch(head.epoch + grown, found))

    def _resolve(self, now_ms: int) -> None:
        """Find the topics that match the members' expressions, if expressions or topics changed."""
        self._drop_regexes()
        wanted = {each.regex for each in self.members.values() if each.regex}
        if not wanted:
            return
        names = sorted(self.topics)
        for regex in sorted(wanted):
            known = self.state.regexes.get(regex)
            if known is None or names != self._names:
                topics = matching(regex, names)
                if known is None or known.topics != topics:
                    self._put(REGEX, regex, ResolvedRegex(topics, timestamp=now_ms))
        self._names = names

    def _drop_regexes(self) -> None:
        wanted = {each.regex for each in self.members.values()}
        for regex in [each for each in self.state.regexes if each not in wanted]:
            self._put(REGEX, regex, None)

    def _metadata_hash(self) -> int:
        """Return a hash of the topics that the members read: ids and partition counts.

        Kafka's is another function of the same.  So the first heartbeat after a broker has taken
        over the directory, or the other way round, begins an epoch.
        """
        rows = [(name, self.topics.get(name)) for name in sorted(self.subscribed())]
        text = "".join(f"{name} {info.id} {info.partitions}\n" for name, info in rows if info)
        if not text:
            return 0
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)

    def _assignment_is_due(self, now_ms: int) -> bool:
        last = self.state.target_epochs.get("")
        waited = last is None or now_ms - last.timestamp >= self.config.assignment_interval_ms
        return self.epoch > self.target_epoch and waited

    def _assign(self, now_ms: int) -> None:
        """Compute the target assignment of this epoch."""
        infos = {name: self.topics.get(name) for name in self.subscribed()}
        there = {name: info for name, info in infos.items() if info is not None}
        names = {info.id: name for name, info in there.items()}
        members = [
            GroupMember(
                member_id,
                tuple(name for name in self.topics_of(member_id) if name in there),
                tuple(TopicPartition(names[i], n) for i, n in self.target(member_id) if i in names),
                instance_id=each.instance_id,
            )
            for member_id, each in self.members.items()
        ]
        numbers = {name: range(info.partitions) for name, info in there.items()}
        for member_id, given in SERVER_ASSIGNORS[self.assignor](numbers, members).items():
            target = frozenset((there[topic].id, number) for topic, number in given)
            if target or member_id in self.state.targets:
                self._put(TARGET, member_id, TargetAssignment(target))
        self._put(TARGET_EPOCH, "", TargetEpoch(self.epoch, now_ms))

    def _reconcile(
        self, member_id: str, owned: frozenset[TopicIdPartition] | None, changed: bool
    ) -> None:
        """Move a member towards its target, as far as other members allow it.

        `owned`: the partitions that the member reports; None: no report.
        """
        current, epoch = self.current(member_id), self.target_epoch
        if _reconciled(current, epoch) and not changed:
            return
        member_epoch = current.epoch
        if current.state is MemberState.UNREVOKED_PARTITIONS:
            if owned is None or not owned.isdisjoint(current.revoking):
                return
            member_epoch = min(current.epoch + 1, epoch)
        elif current.state is MemberState.UNKNOWN and owned != _NONE:
            raise self._refusal("FENCED_MEMBER_EPOCH", "The member is in an unknown state.")
        infos = (self.topics.get(name) for name in self.topics_of(member_id))
        readable = {info.id for info in infos if info is not None}
        target = {each for each in self.target(member_id) if each[0] in readable}
        kept = {each: since for each, since in current.assigned.items() if each in target}
        revoking = {each: n for each, n in current.assigned.items() if each not in target}
        if revoking and (owned is None or not owned.isdisjoint(revoking)):
            state, next_epoch = MemberState.UNREVOKED_PARTITIONS, member_epoch
        else:
            revoking = {}
            missing = target - kept.keys()
            free = missing - self._held_by_others(member_id) if missing else missing
            kept |= dict.fromkeys(free, epoch)
            waits = free != missing
            state = MemberState.UNRELEASED_PARTITIONS if waits else MemberState.STABLE
            next_epoch = epoch
        made = CurrentAssignment(next_epoch, current.epoch, state, kept, revoking)
        if self._put(CURRENT, member_id, made):
            key = ("rebalance", member_id)
            timeout = self.members[member_id].rebalance_timeout_ms
            self._effects.append(Arm(key, timeout) if revoking else Disarm(key))

    def _held_by_others(self, member_id: str) -> set[TopicIdPartition]:
        held: set[TopicIdPartition] = set()
        for other in self.members:
            if other != member_id:
                current = self.current(other)
                held.update(current.assigned, current.revoking)
        return held

    def _put(self, kind: int, name: str, value: Value | None) -> bool:
        """Change the state, and add the record to the effects; return whether it is a change."""
        before = self.state.put(kind, name, value)
        if before == value:
            return False
        if kind in (MEMBER, REGEX):
            self._reads = None
        self._before.append((kind, name, before))
        self._records.append((ConsumerGroupKey(kind, self.group_id, name), value))
        return True

    def _begin(self) -> None:
        self._before, self._effects, self._records = [], [], []

    def _take(self) -> list[Effect]:
        """End the event: return its effects, the records first."""
        if self._records:
            return [StoreRecords(tuple(self._records)), *self._effects]
        return self._effects

    def __repr__(self) -> str:
        members = f"{len(self.members)} members in epoch {self.epoch}"
        return f"<ConsumerGroupMachine {self.group_id!r} {self.state_name} with {members}>"


def _reconciled(current: CurrentAssignment, epoch: int) -> bool:
    return current.state is MemberState.STABLE and current.epoch == epoch
