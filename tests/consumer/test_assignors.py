"""Assignors: balance, stickiness, and a hand-over in two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from logstore import ConfigError, GroupMember, TopicPartition
from logstore.consumer.assignors import (
    ASSIGNORS,
    Assigned,
    assignor_of,
    cooperative_sticky,
    range_,
    round_robin,
    sticky,
)
from logstore.coordinators.group_protocol import Assignment, Subscription

TOPICS = ("a", "b", "c", "d")


def tps(topic: str, *numbers: int) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in numbers]


@st.composite
def partitions(draw: st.DrawFn) -> dict[str, Sequence[int]]:
    counts = draw(st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 9), min_size=1))
    return {topic: range(count) for topic, count in counts.items()}


@st.composite
def groups(
    draw: st.DrawFn, equal: bool | None = None
) -> tuple[dict[str, Sequence[int]], list[GroupMember]]:
    """Partitions and members; what these claim to own may overlap, be gone, or be too much."""
    there = draw(partitions())
    same = draw(st.booleans()) if equal is None else equal
    wanted = st.lists(st.sampled_from(TOPICS), min_size=1, unique=True).map(tuple)
    shared = draw(wanted)
    claims = st.lists(
        st.tuples(st.sampled_from(TOPICS), st.integers(0, 9)).map(lambda tp: TopicPartition(*tp)),
        unique=True,
        max_size=12,
    ).map(tuple)
    members = [
        GroupMember(
            f"m{number}",
            shared if same else draw(wanted),
            draw(claims),
            draw(st.integers(-1, 3)),
            draw(st.sampled_from([None, f"i{9 - number}"])),
        )
        for number in range(draw(st.integers(1, 6)))
    ]
    return there, draw(st.permutations(members))


def check_owners(
    there: Mapping[str, Sequence[int]], members: Sequence[GroupMember], assigned: Assigned
) -> dict[TopicPartition, str]:
    """No partition twice, none to who did not ask; the owner of each."""
    owners: dict[TopicPartition, str] = {}
    topics = {member.member_id: member.topics for member in members}
    assert set(assigned) == set(topics)
    for member, held in assigned.items():
        for tp in held:
            assert tp not in owners and tp.topic in topics[member]
            assert tp.partition in there[tp.topic]
            owners[tp] = member
    return owners


def wanted_partitions(
    there: Mapping[str, Sequence[int]], members: Sequence[GroupMember]
) -> set[TopicPartition]:
    topics = {topic for member in members for topic in member.topics}
    return {TopicPartition(t, n) for t, numbers in there.items() if t in topics for n in numbers}


@pytest.mark.parametrize("assign", [range_, round_robin, sticky])
@given(group=groups())
def test_every_partition_that_someone_wants_has_one_owner(assign, group) -> None:  # type: ignore[no-untyped-def]
    there, members = group
    owners = check_owners(there, members, assign(there, members))
    assert set(owners) == wanted_partitions(there, members)


@pytest.mark.parametrize("assign", [range_, round_robin, sticky, cooperative_sticky])
@given(group=groups())
def test_the_order_of_members_does_not_matter(assign, group) -> None:  # type: ignore[no-untyped-def]
    there, members = group
    backwards = list(reversed(members))
    assert assign(there, members) == assign(there, backwards)


@given(group=groups(equal=True))
def test_equal_subscriptions_are_balanced_and_keep_all_that_can_be_kept(
    group: tuple[dict[str, Sequence[int]], list[GroupMember]],
) -> None:
    there, members = group
    assigned = sticky(there, members)
    sizes = [len(held) for held in assigned.values()]
    assert max(sizes) - min(sizes) <= 1
    # Of what is surely owned, as much is kept as a balanced assignment can keep.
    claims = sure_claims(there, members)
    least, more = divmod(sum(sizes), len(members))
    keepable = sum(min(len(held), least) for held in claims.values())
    keepable += min(more, sum(len(held) > least for held in claims.values()))
    kept = sum(len(claims[member] & set(held)) for member, held in assigned.items())
    assert kept >= keepable


def sure_claims(
    there: Mapping[str, Sequence[int]], members: Sequence[GroupMember]
) -> dict[str, set[TopicPartition]]:
    """By the definition: the one claim of the highest generation."""
    claims: dict[str, set[TopicPartition]] = {member.member_id: set() for member in members}
    for tp in wanted_partitions(there, members):
        claimants = [m for m in members if tp in m.owned and tp.topic in m.topics]
        newest = max((m.generation for m in claimants), default=None)
        best = [m for m in claimants if m.generation == newest]
        if len(best) == 1:
            claims[best[0].member_id].add(tp)
    return claims


@given(group=groups(equal=False))
def test_unequal_subscriptions_cannot_be_evened_out_by_a_move(
    group: tuple[dict[str, Sequence[int]], list[GroupMember]],
) -> None:
    there, members = group
    assigned = sticky(there, members)
    for member in members:
        for tp in assigned[member.member_id]:
            for other in members:
                if tp.topic in other.topics:
                    assert len(assigned[member.member_id]) <= len(assigned[other.member_id]) + 1


@settings(max_examples=150)
@given(there=partitions(), data=st.data())
def test_sticky_settles_and_cooperative_hands_nothing_over_before_it_is_given_back(
    there: dict[str, Sequence[int]], data: st.DataObject
) -> None:
    """A group through joins and departures; between two owners a partition has none."""
    owned: dict[str, tuple[TopicPartition, ...]] = {}
    wanted = {f"m{n}": data.draw(st.lists(st.sampled_from(TOPICS), min_size=1, unique=True))
              for n in range(4)}  # fmt: skip
    for generation in range(data.draw(st.integers(1, 4))):
        present = data.draw(st.lists(st.sampled_from(sorted(wanted)), min_size=1, unique=True))
        owned = {member: owned.get(member, ()) for member in present}
        for round_ in range(10):
            members = [
                GroupMember(m, tuple(wanted[m]), held, generation * 10 + round_)
                for m, held in owned.items()
            ]
            before = {tp: m for m, held in owned.items() for tp in held}
            assigned = cooperative_sticky(there, members)
            owners = check_owners(there, members, assigned)
            for tp, member in owners.items():
                assert before.get(tp, member) == member, f"{tp} was handed over"
            settled = all(set(owned[m]) == set(assigned[m]) for m in owned)
            owned = {m: tuple(held) for m, held in assigned.items()}
            if settled and set(owners) == wanted_partitions(there, members):
                break
        else:
            raise AssertionError("it never settles")
        # Once settled, nothing moves any more, eager or not.
        assert {m: set(h) for m, h in sticky(there, members).items()} == {
            m: set(h) for m, h in owned.items()
        }


# ---- Kafka's examples ----


def test_range_gives_contiguous_pieces_topic_by_topic() -> None:
    members = [GroupMember("c1", ("t0", "t1")), GroupMember("c0", ("t0", "t1"))]
    assert range_({"t0": range(3), "t1": range(3)}, members) == {
        "c0": [*tps("t0", 0, 1), *tps("t1", 0, 1)],
        "c1": [*tps("t0", 2), *tps("t1", 2)],
    }


def test_static_members_come_first() -> None:
    members = [GroupMember("a", ("t",)), GroupMember("z", ("t",), instance_id="1")]
    assert range_({"t": range(3)}, members) == {"z": tps("t", 0, 1), "a": tps("t", 2)}


def test_round_robin_skips_who_has_not_subscribed() -> None:
    members = [
        GroupMember("c0", ("t0",)),
        GroupMember("c1", ("t0", "t1")),
        GroupMember("c2", ("t0", "t1", "t2")),
    ]
    assert round_robin({"t0": range(1), "t1": range(2), "t2": range(3)}, members) == {
        "c0": tps("t0", 0),
        "c1": tps("t1", 0),
        "c2": [*tps("t1", 1), *tps("t2", 0, 1, 2)],
    }


def test_sticky_moves_only_what_a_new_member_needs() -> None:
    held = [GroupMember("c0", ("t",), tuple(tps("t", 0, 1, 2)), 1),
            GroupMember("c1", ("t",), tuple(tps("t", 3, 4, 5)), 1)]  # fmt: skip
    assigned = sticky({"t": range(6)}, [*held, GroupMember("c2", ("t",))])
    assert assigned == {"c0": tps("t", 0, 1), "c1": tps("t", 3, 4), "c2": tps("t", 2, 5)}
    first = cooperative_sticky({"t": range(6)}, [*held, GroupMember("c2", ("t",))])
    assert first == {"c0": tps("t", 0, 1), "c1": tps("t", 3, 4), "c2": []}


# ---- by name, and a user's own ----


def test_assignors_are_found_by_kafkas_names() -> None:
    assert set(ASSIGNORS) == {"range", "roundrobin", "sticky", "cooperative-sticky"}
    assert [name for name, each in ASSIGNORS.items() if each.cooperative] == ["cooperative-sticky"]
    with pytest.raises(ConfigError, match="no assignor 'Range'"):
        assignor_of("Range")
    with pytest.raises(ConfigError, match="a name or a callable"):
        assignor_of(3)  # type: ignore[arg-type]


def test_a_callable_is_checked() -> None:
    members = [GroupMember("m0", ("t",)), GroupMember("m1", ("u",))]
    there = {"t": range(2), "u": range(1)}

    def mine(partitions: object, members: object) -> dict[str, list[tuple[str, int]]]:
        return answers[-1]

    answers: list[dict[str, list[tuple[str, int]]]] = [{"m0": [("t", 0), ("t", 1)]}]
    assignor = assignor_of(mine)
    assert assignor.name == "mine" and not assignor.cooperative
    assert assignor.run(there, members) == {"m0": tps("t", 0, 1), "m1": []}
    for answer, why in (
        ({"m0": [("t", 0)], "m1": [("t", 0)]}, "not subscribed"),
        ({"m0": [("t", 9)]}, "does not exist"),
        ({"m0": [("t", 0), ("t", 0)]}, "to both"),
        ({"x": []}, "no member"),
    ):
        answers.append(answer)
        with pytest.raises(ConfigError, match=why):
            assignor.run(there, members)


# ---- the bytes ----


def test_subscriptions_and_assignments_are_kafkas_bytes() -> None:
    subscription = Subscription(("t",), None, tuple(tps("t", 1)), 4, None)
    raw = subscription.encode()
    assert raw.hex() == ("0003" "00000001" "000174" "ffffffff" "00000001" "000174" "00000001"
                         "00000001" "00000004" "ffff")  # fmt: skip
    assert Subscription.decode(raw) == subscription
    assert Subscription.decode(bytes.fromhex("000000000001000174ffffffff")) == (
        Subscription(("t",))
    )
    assignment = Assignment(tuple(tps("t", 0, 2)))
    raw = assignment.encode()
    assert raw.hex() == "000300000001000174000000020000000000000002ffffffff"
    assert Assignment.decode(raw) == assignment
    assert Assignment.decode(b"") == Assignment()


def test_what_a_member_owns_travels_as_kafkas_assignors_send_it() -> None:
    owned = tuple(tps("t", 0, 1))
    for name in ("sticky", "cooperative-sticky"):
        assignor = ASSIGNORS[name]
        raw = Subscription(
            ("t",), assignor.user_data(owned, 7), owned if assignor.cooperative else (), 7
        ).encode()
        member = assignor.member("m", None, raw)
        assert (member.owned, member.generation) == (owned, 7)
    assert ASSIGNORS["range"].user_data(owned, 7) is None
