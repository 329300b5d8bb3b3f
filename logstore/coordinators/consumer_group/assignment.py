"""Distribute the partitions of topics among the members of a group: pure functions.

The results are those of Kafka's assignors, and do not depend on the sequence of the members.  The
coordinator runs SERVER_ASSIGNORS for groups of the consumer protocol (KIP-848).  The leader of a
classic group runs one of `logstore.consumer.assignors`, which has these functions and more.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from sortedcontainers import SortedSet

from logstore.coordinators.offset_records import TopicPartition

__all__ = ["SERVER_ASSIGNORS", "GroupMember", "range_", "sticky"]


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


def sticky(partitions: Partitions, members: Sequence[GroupMember]) -> Assigned:
    """Assign as evenly as possible, and move as few partitions as possible."""
    there = {TopicPartition(topic, n) for topic, numbers in partitions.items() for n in numbers}
    owned = valid_claims(there, members)
    wanted = {topic for member in members for topic in member.topics if topic in partitions}
    if all(wanted <= set(member.topics) for member in members):
        wanted_partitions = [tp for tp in there if tp.topic in wanted]
        return _equal_subscriptions(wanted_partitions, members, owned)
    return _unequal_subscriptions(there, members, owned)


def valid_claims(
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


# By Kafka's names.  The first one is the default of a group whose members ask for none.
SERVER_ASSIGNORS: Mapping[str, Assign] = {"uniform": sticky, "range": range_}
