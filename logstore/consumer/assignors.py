"""Assignors: distribute the partitions of topics among the members of a group.

The group's leader runs the assignor on the subscriptions that the members sent.  Names and results
are those of Kafka's clients, so that members of both kinds can share a group.  Assignors are pure
functions: the result does not depend on the sequence of the members.

With an *eager* assignor every member gives all its partitions back before a rebalance.  A
*cooperative* assignor moves a partition in two rebalances: in the first the owner gives it back, in
the second another member gets it.

A user's own assignor is any callable of (partitions by topic, members); see `Assignor`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from sortedcontainers import SortedSet

from logstore.config import ConfigError
from logstore.coordinators.group_protocol import Subscription, by_topic
from logstore.coordinators.offset_records import TopicPartition
from logstore.errors import InvalidRecordError
from logstore.format.wire_types import FieldReader, FieldWriter

__all__ = [
    "ASSIGNORS",
    "Assignor",
    "GroupMember",
    "assignor_of",
    "cooperative_sticky",
    "range_",
    "round_robin",
    "sticky",
]


@dataclasses.dataclass(frozen=True, slots=True)
class GroupMember:
    """A member as an assignor sees it."""

    member_id: str
    topics: tuple[str, ...]
    owned: tuple[TopicPartition, ...] = ()
    generation: int = -1  # of the assignment that it owns
    instance_id: str | None = None

    @property
    def order(self) -> tuple[bool, str]:
        """Static members first, by their instance ids; then the others by their ids."""
        if self.instance_id is not None:
            return (False, self.instance_id)
        return (True, self.member_id)


Partitions = Mapping[str, Sequence[int]]
Assigned = dict[str, list[TopicPartition]]
Assign = Callable[[Partitions, Sequence[GroupMember]], Mapping[str, Iterable[tuple[str, int]]]]


def range_(partitions: Partitions, members: Sequence[GroupMember]) -> Assigned:
    """Give every member a contiguous range of each topic; the first members get one more."""
    assigned: Assigned = {member.member_id: [] for member in members}
    for topic in sorted(partitions):
        readers = [m for m in sorted(members, key=lambda m: m.order) if topic in m.topics]
        numbers = sorted(partitions[topic])
        at = 0
        for place, member in enumerate(readers):
            share, more = divmod(len(numbers), len(readers))
            count = share + (place < more)
            piece = numbers[at : at + count]
            assigned[member.member_id] += [TopicPartition(topic, number) for number in piece]
            at += count
    return assigned


def round_robin(partitions: Partitions, members: Sequence[GroupMember]) -> Assigned:
    """Give the partitions of all topics to the members one by one, in turn."""
    assigned: Assigned = {member.member_id: [] for member in members}
    ordered = sorted(members, key=lambda m: m.order)
    turn = 0
    for topic in sorted(partitions):
        if not any(topic in member.topics for member in ordered):
            continue
        for number in sorted(partitions[topic]):
            while topic not in ordered[turn % len(ordered)].topics:
                turn += 1
            assigned[ordered[turn % len(ordered)].member_id].append(TopicPartition(topic, number))
            turn += 1
    return assigned


def sticky(partitions: Partitions, members: Sequence[GroupMember]) -> Assigned:
    """Assign as evenly as possible, and move as few partitions as possible."""
    there = {TopicPartition(topic, n) for topic, numbers in partitions.items() for n in numbers}
    owned = _valid_claims(there, members)
    wanted = {topic for member in members for topic in member.topics if topic in partitions}
    if all(wanted <= set(member.topics) for member in members):
        wanted_partitions = [tp for tp in there if tp.topic in wanted]
        return _equal_subscriptions(wanted_partitions, members, owned)
    return _unequal_subscriptions(there, members, owned)


def cooperative_sticky(partitions: Partitions, members: Sequence[GroupMember]) -> Assigned:
    """Like `sticky`, but do not assign a partition that another member still owns.

    Its owner sees that the partition is missing from its assignment, gives it back and joins again.
    The next rebalance assigns it.
    """
    there = {TopicPartition(topic, n) for topic, numbers in partitions.items() for n in numbers}
    owner = {tp: member for member, held in _valid_claims(there, members).items() for tp in held}
    return {
        member: [tp for tp in given if owner.get(tp, member) == member]
        for member, given in sticky(partitions, members).items()
    }


def _valid_claims(
    there: set[TopicPartition], members: Sequence[GroupMember]
) -> dict[str, list[TopicPartition]]:
    """Return the partitions that each member owns without doubt.

    If several members claim a partition, the claim of the newest generation is valid; of two
    claims with the same generation, neither is.  A claim is not valid if the partition does not
    exist or the member has not subscribed to its topic.
    """
    best: dict[TopicPartition, tuple[int, str]] = {}
    torn: dict[TopicPartition, int] = {}
    for member in sorted(members, key=lambda m: m.member_id):
        for tp in member.owned:
            if tp not in there or tp.topic not in member.topics:
                continue
            generation, _ = best.get(tp, (-2, ""))
            if member.generation > generation:
                best[tp] = (member.generation, member.member_id)
            elif member.generation == generation:
                torn[tp] = generation
    claims: dict[str, list[TopicPartition]] = {member.member_id: [] for member in members}
    for tp in sorted(best, key=lambda tp: (tp.partition, tp.topic)):
        generation, owner = best[tp]
        if torn.get(tp, -2) != generation:
            claims[owner].append(tp)
    return claims


def _equal_subscriptions(partitions: list[TopicPartition], members: Sequence[GroupMember],
                         owned: dict[str, list[TopicPartition]]) -> Assigned:  # fmt: skip
    """Assign if all subscriptions are equal: each member gets an equal share, some one more."""
    assigned: Assigned = {member.member_id: [] for member in members}
    if not members:
        return assigned
    least, more = divmod(len(partitions), len(members))
    # Members with the most partitions first: they may keep the one that exceeds the floor.
    for member in sorted(assigned, key=lambda m: (-len(owned[m]), m)):
        held = owned[member]
        if len(held) > least and more > 0:
            assigned[member] = held[: least + 1]
            more -= 1
        else:
            assigned[member] = held[:least]
    taken = {tp for held in assigned.values() for tp in held}
    free = collections.deque(sorted(tp for tp in partitions if tp not in taken))
    order = sorted(assigned)
    while free and any(len(assigned[member]) < least for member in order):
        for member in order:
            if free and len(assigned[member]) < least:
                assigned[member].append(free.popleft())
    for member in order:
        if free and len(assigned[member]) == least:
            assigned[member].append(free.popleft())
    assert not free, "shares that do not add up"
    return assigned


def _unequal_subscriptions(there: set[TopicPartition], members: Sequence[GroupMember],
                           owned: dict[str, list[TopicPartition]]) -> Assigned:  # fmt: skip
    """Assign if subscriptions differ.

    Members keep what they own.  A free partition is given to the subscribed member with the fewest.
    Then partitions move until no move makes two members more equal.
    """
    assigned: Assigned = {member.member_id: list(owned[member.member_id]) for member in members}
    readers: dict[str, set[str]] = {}
    for member in members:
        for topic in member.topics:
            readers.setdefault(topic, set()).add(member.member_id)
    loads = SortedSet((len(held), member_id) for member_id, held in assigned.items())

    def least_of(topic: str) -> str:
        """Return the member with the fewest partitions among those that read the topic."""
        found: str = next(member_id for _, member_id in loads if member_id in readers[topic])
        return found

    def give(member_id: str, tp: TopicPartition) -> None:
        held = assigned[member_id]
        loads.remove((len(held), member_id))
        held.append(tp)
        loads.add((len(held), member_id))

    taken = {tp for held in assigned.values() for tp in held}
    free = [tp for tp in there if tp not in taken and tp.topic in readers]
    # Topics with few readers first: later these readers may have many partitions already.
    for tp in sorted(free, key=lambda tp: (len(readers[tp.topic]), tp)):
        give(least_of(tp.topic), tp)
    before = {tp: member for member, held in owned.items() for tp in held}
    moved = True
    while moved:  # each move lowers the sum of the squared loads, so the loop ends
        moved = False
        for giver in sorted(assigned, key=lambda m: (-len(assigned[m]), m)):
            for tp in sorted(assigned[giver], key=lambda tp: (tp in before, tp)):
                least = least_of(tp.topic)
                if len(assigned[giver]) < len(assigned[least]) + 2:
                    continue
                # Prefer the previous owner if it has as few partitions.
                home = before.get(tp)
                if home is not None and len(assigned[home]) == len(assigned[least]):
                    least = home
                loads.remove((len(assigned[giver]), giver))
                assigned[giver].remove(tp)
                loads.add((len(assigned[giver]), giver))
                give(least, tp)
                moved = True
    return assigned


# ---- by name ----


@dataclasses.dataclass(frozen=True, slots=True)
class Assignor:
    """An assignor and its name; the members of a group use one that all of them have.

    `assign` gets the partition numbers by topic and the members, and returns the partitions of each
    member id.  A member that is missing in the result gets none.
    """

    name: str
    assign: Assign
    cooperative: bool = False

    def user_data(self, owned: Iterable[TopicPartition], generation: int) -> bytes | None:
        """Return the user data that Kafka's assignor of that name adds to a subscription."""
        if self.name == "sticky":
            out = FieldWriter().array(
                by_topic(owned).items(),
                lambda out, item: out.string(item[0]).array(item[1], FieldWriter.int32),
            )
            return out.int32(generation).take()
        if self.name == "cooperative-sticky":
            return FieldWriter().int32(generation).take()
        return None

    def member(self, member_id: str, instance_id: str | None, raw: bytes) -> GroupMember:
        """Return a member, decoded from its subscription."""
        said = Subscription.decode(raw)
        owned, generation = said.owned, said.generation
        if said.user_data is not None:
            fields = FieldReader(said.user_data)
            try:
                if self.name == "sticky":
                    pairs = fields.array(lambda f: (f.string(), f.array(FieldReader.int32)))
                    owned = tuple(TopicPartition(t, n) for t, numbers in pairs for n in numbers)
                    generation = fields.int32() if fields.left else -1
                elif self.name == "cooperative-sticky":
                    generation = fields.int32()
            except InvalidRecordError:
                pass  # user data of another assignor with that name: use the subscription's fields
        return GroupMember(member_id, said.topics, owned, generation, instance_id)

    def run(self, partitions: Partitions, members: Sequence[GroupMember]) -> Assigned:
        """Assign; raise ConfigError if a partition is assigned twice or without subscription."""
        given = self.assign(partitions, members)
        asked = {member.member_id: set(member.topics) for member in members}
        owner: dict[TopicPartition, str] = {}
        assigned: Assigned = {member.member_id: [] for member in members}
        for member_id, held in given.items():
            if member_id not in asked:
                raise ConfigError(f"assignor {self.name!r} assigned to {member_id!r}: no member")
            for topic, number in held:
                tp = TopicPartition(topic, number)
                if number not in partitions.get(topic, ()) or topic not in asked[member_id]:
                    raise ConfigError(
                        f"assignor {self.name!r} gave {tp} to {member_id!r}, which has not "
                        f"subscribed to it, or it does not exist"
                    )
                if tp in owner:
                    raise ConfigError(
                        f"assignor {self.name!r} gave {tp} to both {owner[tp]!r} and {member_id!r}"
                    )
                owner[tp] = member_id
                assigned[member_id].append(tp)
        return assigned


ASSIGNORS: Mapping[str, Assignor] = {
    assignor.name: assignor
    for assignor in (
        Assignor("range", range_),
        Assignor("roundrobin", round_robin),
        Assignor("sticky", sticky),
        Assignor("cooperative-sticky", cooperative_sticky, cooperative=True),
    )
}


def assignor_of(given: str | Assign | Assignor) -> Assignor:
    """Return an assignor: one of Kafka's by its name, or one that calls the user's callable."""
    if isinstance(given, Assignor):
        return given
    if isinstance(given, str):
        if given in ASSIGNORS:
            return ASSIGNORS[given]
        raise ConfigError(
            f"no assignor {given!r}: it is one of {', '.join(ASSIGNORS)}, or a callable"
        )
    if not callable(given):
        raise ConfigError(f"an assignor is a name or a callable, not {given!r}")
    return Assignor(str(getattr(given, "__name__", type(given).__name__)), given)
