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

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from logstore.config import ConfigError
from logstore.coordinators.consumer_group.assignment import (
    Assign,
    Assigned,
    GroupMember,
    Partitions,
    range_,
    sticky,
    valid_claims,
)
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


def cooperative_sticky(partitions: Partitions, members: Sequence[GroupMember]) -> Assigned:
    """Like `sticky`, but do not assign a partition that another member still owns.

    Its owner sees that the partition is missing from its assignment, gives it back and joins again.
    The next rebalance assigns it.
    """
    there = {TopicPartition(topic, n) for topic, numbers in partitions.items() for n in numbers}
    owner = {tp: member for member, held in valid_claims(there, members).items() for tp in held}
    return {
        member: [tp for tp in given if owner.get(tp, member) == member]
        for member, given in sticky(partitions, members).items()
    }


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
        given = self.assign(partitions, members)  # code of the user: no lock is held
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
