"""Assignors: who of a group reads which partition.

Run by the group's leader, on what the members said about themselves; names and results are those of
Kafka's clients, so that members of both kinds can share a group.  Pure functions: the same members
in any order get the same.

An *eager* assignor expects that everybody has given everything back before; a *cooperative* one
moves a partition in two steps: the owner gives it back first, and the next rebalance hands it on.

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
    generation: int = -1  # in which it got what it owns
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
    """Topic by topic: every member gets a contiguous piece, the first ones one more."""
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
    """All partitions of all topics, dealt out one by one."""
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
    """As balanced as can be, and of that what moves the least."""
    there = {TopicPartition(topic, n) for topic, numbers in partitions.items() for n in numbers}
    owned = _valid_claims(there, members)
    wanted = {topic for member in members for topic in member.topics if topic in partitions}
    if all(wanted <= set(member.topics) for member in members):
        wanted_partitions = [tp for tp in there if tp.topic in wanted]
        return _equal_subscriptions(wanted_partitions, members, owned)
    return _unequal_subscriptions(there, members, owned)


def cooperative_sticky(partitions: Partitions, members: Sequence[GroupMember]) -> Assigned:
    """As `sticky`; what has to move from a member that is there is left out for now.

    Its owner sees that it lost it, gives it back and joins again; then it is assigned.
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
    """What each member owns for sure.

    The claim of the newest generation counts; two of the same generation cannot both be right, and
    then neither is.  What is gone, or not subscribed to any more, is not owned.
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
    """All want the same: everybody gets the floor of the share, some one more."""
    assigned: Assigned = {member.member_id: [] for member in members}
    if not members:
        return assigned
    least, more = divmod(len(partitions), len(members))
    # Who holds most goes first, so that what is one too many stays where it is.
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
    """Each wants something else: keep what is held, give the rest to who has least, even out."""
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
    # Topics that few can read first: later these may have enough already.
    for tp in sorted(free, key=lambda tp: (len(readers[tp.topic]), tp)):
        give(least_of(tp.topic), tp)
    before = {tp: member for member, held in owned.items() for tp in held}
    moved = True
    while moved:  # each move makes the loads more equal, so that there is an end
        moved = False
        for giver in sorted(assigned, key=lambda m: (-len(assigned[m]), m)):
            for tp in sorted(assigned[giver], key=lambda tp: (tp in before, tp)):
                least = least_of(tp.topic)
                if len(assigned[giver]) < len(assigned[least]) + 2:
                    continue
                # Rather back to where it was, if that evens out as well.
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
    """An assignor with the name under which members agree on it.

    `assign` gets partition numbers by topic and the members, and returns the partitions of each
    member id; one that it leaves out gets none.
    """

    name: str
    assign: Assign
    cooperative: bool = False

    def user_data(self, owned: Iterable[TopicPartition], generation: int) -> bytes | None:
        """What Kafka's assignor of that name sends along with a subscription."""
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
        """A member, as its subscription tells."""
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
                pass  # someone else's idea of that name: what the subscription says is enough
        return GroupMember(member_id, said.topics, owned, generation, instance_id)

    def run(self, partitions: Partitions, members: Sequence[GroupMember]) -> Assigned:
        """Assign, and check that no partition was given twice, or to who did not ask for it."""
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
    """The assignor that is meant: one of Kafka's by its name, or a callable of the user's."""
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
