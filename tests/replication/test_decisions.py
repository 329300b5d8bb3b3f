"""LeaderAndIsr and decide: each rule by a test, all of them against invariants of Kafka's models.

Names such as LeaderInIsr are those of the TLA+ models.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.replication.machines.assignment import Assignment
from logstore.replication.machines.decisions import decide, holds_damaged, is_move_done
from logstore.replication.machines.image import (
    ClusterImage,
    Registration,
    TopicImage,
    config_path,
    state_path,
    topic_path,
)
from logstore.replication.machines.leader_and_isr import NO_LEADER, LeaderAndIsr
from logstore.replication.machines.registration import plan
from logstore.replication.metadata import Create, Set
from tests.replication.kit import KEY


def image(
    state: LeaderAndIsr | None,
    *,
    replicas: tuple[int, ...] = (1, 2, 3),
    live: tuple[int, ...] = (1, 2, 3),
    minimum: int = 2,
    assignment: Assignment | None = None,
    wanted: list[int] | None = None,
    **flags: set[int],
) -> ClusterImage:
    """A tree with one partition.  `flags`: lossy, unwilling, offline, restarted nodes."""
    found = ClusterImage()
    found.topics["t"] = TopicImage(4, "id", {0: assignment or Assignment(replicas)})
    found.configs["topics", "t"] = ({"min.insync.replicas": str(minimum)}, 0)
    for node in live:
        found.nodes[node] = Registration(
            node,
            epoch=2 if node in flags.get("restarted", ()) else 1,
            lossy=node in flags.get("lossy", ()),
            unwilling=node in flags.get("unwilling", ()),
            offline=frozenset([KEY] if node in flags.get("offline", ()) else []),
        )
    if state is not None:
        found.states[KEY] = state
    if wanted is not None:
        row = {"topic": "t", "partition": 0, "replicas": wanted}
        found.reassign = ({"partitions": [row]}, 0)
    return found


def state(isr: tuple[int, ...] = (1, 2, 3), elr: tuple[int, ...] = (), **more: Any) -> LeaderAndIsr:
    leader = more.pop("leader", isr[0] if isr else NO_LEADER)
    return LeaderAndIsr(
        version=8,
        leader=leader,
        leader_epoch=5,
        leader_broker_epoch=-1 if leader == NO_LEADER else 1,
        isr=isr,
        elr=elr,
        min_isr=more.pop("min_isr", 2),
        **more,
    )


def next_state(found: ClusterImage, **asked: Any) -> LeaderAndIsr | None:
    decision = decide(found, KEY, **asked)
    if decision is None:
        return None
    for op in decision.ops:
        if isinstance(op, Set | Create) and op.path == state_path(KEY):
            return LeaderAndIsr.decode(op.data, 9)
    return None


# ---- the rules ----


def test_a_partition_that_is_as_it_should_be_is_left_alone() -> None:
    assert decide(image(state()), KEY) is None


def test_r2_the_first_live_replica_leads_a_new_partition() -> None:
    made = next_state(image(None, live=(2, 3)))
    assert made is not None
    assert (made.leader, made.isr, made.leader_epoch, made.min_isr) == (2, (2, 3), 0, 2)


def test_r3_a_lossy_member_leaves_both_sets() -> None:
    made = next_state(image(state(), lossy={2}))
    assert made is not None
    assert (made.isr, made.elr) == ((1, 3), ())
    made = next_state(image(state((1,), (2, 3)), lossy={2}))
    assert made is not None
    assert (made.isr, made.elr) == ((1,), (3,))


def test_r3_the_last_lossy_member_is_remembered_for_the_operator() -> None:
    made = next_state(image(state((1,)), lossy={1}, restarted={1}))
    assert made is not None
    assert (made.leader, made.isr, made.elr, made.last_known) == (NO_LEADER, (), (), (1,))


def test_r3_with_a_minimum_of_one_the_last_member_stays_and_counts_as_handled() -> None:
    found = image(state((1,), min_isr=1), minimum=1, lossy={1})
    assert decide(found, KEY) is None
    assert not holds_damaged(found, KEY, 1)


def test_r4_the_next_member_is_elected_and_the_dead_one_leaves() -> None:
    made = next_state(image(state(), live=(2, 3)))
    assert made is not None
    assert (made.leader, made.isr, made.elr, made.leader_epoch) == (2, (2, 3), (), 6)


def test_r4_a_restarted_leader_gets_a_new_epoch() -> None:
    made = next_state(image(state(), restarted={1}))
    assert made is not None
    assert (made.leader, made.leader_epoch, made.leader_broker_epoch) == (1, 6, 2)


def test_r4_the_elr_is_asked_after_the_isr_and_unwilling_nodes_last() -> None:
    made = next_state(image(state((1,), (2, 3)), live=(2, 3), unwilling={2}))
    assert made is not None
    assert (made.leader, made.isr, made.elr) == (3, (3,), (2, 1))
    made = next_state(image(state((1,), (2,)), live=(2,), unwilling={2}))
    assert made is not None
    assert made.leader == 2


def test_r4_without_a_candidate_nobody_leads_and_all_stay_candidates() -> None:
    made = next_state(image(state((1, 2)), live=(3,)))
    assert made is not None
    assert (made.leader, made.isr, set(made.elr)) == (NO_LEADER, (), {1, 2})


def test_r5_an_unwilling_leader_hands_over() -> None:
    made = next_state(image(state(), unwilling={1}))
    assert made is not None
    assert (made.leader, made.isr) == (2, (2, 3))
    assert decide(image(state((1,), (2,)), unwilling={1}), KEY) is None


def test_r6_members_that_are_not_registered_leave() -> None:
    made = next_state(image(state(), live=(1, 2)))
    assert made is not None
    assert (made.isr, made.elr, made.leader_epoch) == ((1, 2), (), 5)
    made = next_state(image(state(), live=(1,)))
    assert made is not None
    assert (made.isr, set(made.elr)) == ((1,), {2, 3})


def test_r7_a_move_that_only_adds_replicas_leaves_the_state_alone() -> None:
    decision = decide(image(state((1, 2)), replicas=(1, 2), wanted=[2, 3]), KEY)
    assert decision is not None
    (written,) = decision.ops
    assert isinstance(written, Set)
    assert TopicImage.decode(written.data, 5).partitions[0] == Assignment((2, 3, 1), (3,), (1,))


def test_r7_a_request_that_drops_a_replica_of_the_last_one_begins_a_new_epoch() -> None:
    """The leader may have taken it into the set, and it may be added again with an empty log."""
    moving = Assignment((2, 3, 1), (3,), (1,))
    found = image(state((1, 2)), assignment=moving, live=(1, 2, 3, 4), wanted=[2, 4])
    decision = decide(found, KEY)
    assert decision is not None
    topic, written = decision.ops
    assert isinstance(topic, Set)
    assert isinstance(written, Set)
    assert (topic.version, written.version) == (4, 8)
    made = LeaderAndIsr.decode(written.data, 9)
    assert (made.leader, made.isr, made.leader_epoch) == (1, (1, 2), 6)


def test_r3_a_log_that_failed_leaves_with_a_new_epoch() -> None:
    """Its node begins again with an empty log in the same life: late fetches must not count."""
    made = next_state(image(state(), offline={2}))
    assert made is not None
    assert (made.leader, made.isr, made.leader_epoch) == (1, (1, 3), 6)


def test_r7_a_move_waits_for_every_target_and_then_drops_the_rest() -> None:
    moving = Assignment((3, 4, 1, 2), (3, 4), (1, 2))
    live = (1, 2, 3, 4)
    assert decide(image(state((1, 2, 3)), assignment=moving, live=live), KEY) is None
    made = next_state(image(state((1, 2, 3, 4)), assignment=moving, live=live))
    assert made is not None
    assert (made.leader, made.isr, made.leader_epoch) == (3, (3, 4), 6)


def test_r7_a_cancelled_move_needs_a_live_member_of_the_origin() -> None:
    moving = Assignment((3, 4, 1, 2), (3, 4), (1, 2))
    found = image(state((3, 4), leader=3), assignment=moving, live=(1, 2, 3, 4), wanted=[])
    assert decide(found, KEY) is None
    found = image(state((1, 3)), assignment=moving, live=(1, 2, 3, 4), wanted=[])
    made = next_state(found)
    assert made is not None
    assert (made.leader, made.isr, made.leader_epoch) == (1, (1,), 6)
    assert not is_move_done(found, KEY)


def test_r8_a_changed_minimum_settles_the_elr_in_the_same_write() -> None:
    made = next_state(image(state((1,), (2,)), minimum=1))
    assert made is not None
    assert (made.min_isr, made.elr) == (1, ())


def test_r9_members_outside_of_the_replicas_leave_before_any_other_rule() -> None:
    """An image with a new assignment and an old state shows this: no rule may trip over it."""
    made = next_state(image(state((1, 2, 3)), replicas=(1, 2), minimum=1))
    assert made is not None
    assert made.isr == (1, 2)


def test_r10_the_preferred_leader_is_elected_if_asked() -> None:
    found = image(state(leader=2))
    assert decide(found, KEY) is None
    made = next_state(found, preferred=True)
    assert made is not None
    assert (made.leader, made.isr) == (1, (1, 2, 3))


def test_an_unclean_election_is_asked_for_and_never_happens_by_itself() -> None:
    dead = state((1,), min_isr=1)
    assert next_state(image(dead, live=(3,), minimum=1)).leader == NO_LEADER  # type: ignore
    made = next_state(image(dead, live=(3,), minimum=1), unclean=3)
    assert made is not None
    assert (made.leader, made.isr, made.recovering) == (3, (3,), True)
    found = image(dead, live=(3,), minimum=1)
    found.configs["topics", "t"] = ({"unclean.leader.election.enable": "true"}, 0)
    made = next_state(found)
    assert made is not None
    assert made.recovering


# ---- any tree ----

NODES = st.sets(st.integers(1, 5))


@st.composite
def trees(draw: st.DrawFn) -> tuple[ClusterImage, LeaderAndIsr]:
    replicas = tuple(draw(st.permutations(sorted(draw(st.sets(st.integers(1, 5), min_size=1))))))
    members = draw(st.sets(st.sampled_from(replicas)))
    minimum = draw(st.integers(1, 3))
    isr = tuple(
        sorted(draw(st.sets(st.sampled_from(sorted(members))) if members else st.just(set())))
    )
    elr = tuple(sorted(members - set(isr))) if len(isr) < minimum else ()
    leader = draw(st.sampled_from([NO_LEADER, *isr]))
    found = image(
        state(isr, elr, leader=leader, min_isr=minimum),
        replicas=replicas,
        live=tuple(sorted(draw(NODES))),
        minimum=draw(st.integers(1, 3)),
        lossy=draw(NODES) if draw(st.booleans()) else set(),
        unwilling=draw(NODES),
        offline=draw(NODES) if draw(st.booleans()) else set(),
        restarted=draw(NODES),
        wanted=draw(st.sampled_from([None, [], [1, 2], [2, 3, 4], [5]])),
    )
    return found, found.states[KEY]


@given(trees(), st.booleans())
def test_decisions_keep_the_invariants_of_the_models(
    tree: tuple[ClusterImage, LeaderAndIsr], preferred: bool
) -> None:
    found, before = tree
    decision = decide(found, KEY, preferred=preferred)
    if decision is None:
        return
    after, topic = before, found.topics["t"]
    conditional = False
    for op in decision.ops:
        if isinstance(op, Set) and op.path == state_path(KEY):
            after = LeaderAndIsr.decode(op.data, before.version + 1)
            conditional = op.version == before.version
        elif isinstance(op, Set) and op.path == topic_path("t"):
            topic = TopicImage.decode(op.data, 5)
    assert conditional or after == before
    replicas = topic.partitions[0].replicas
    after.check(replicas)  # LeaderInIsr, ValidControllerIsrAndElr
    if (after.leader, after.leader_broker_epoch) != (before.leader, before.leader_broker_epoch):
        assert after.leader_epoch > before.leader_epoch
    assert after.leader_epoch >= before.leader_epoch
    members = {*before.isr, *before.elr}
    # LeaderCandidateCompleteness: nobody becomes a member who was none.
    assert {*after.isr, *after.elr} <= members
    if after.leader != NO_LEADER and after.leader != before.leader:
        assert found.nodes[after.leader].epoch == after.leader_broker_epoch
        assert not found.nodes[after.leader].lossy or found.states[KEY].min_isr == 1
    # MinIsr: a member is dropped for good only if it lost records, was moved away, is not needed
    # because enough stay, or because the minimum is lower now.
    lost = members - {*after.isr, *after.elr}
    for node in lost & set(replicas):
        damaged = found.nodes[node].lossy or KEY in found.nodes[node].offline if (
            node in found.nodes) else False  # fmt: skip
        assert damaged or len(after.isr) >= after.min_isr


@given(trees())
def test_deciding_again_and_again_ends(tree: tuple[ClusterImage, LeaderAndIsr]) -> None:
    """The controller is a function of the tree: applied to its own results it comes to rest."""
    found, _ = tree
    for _ in range(12):
        decision = decide(found, KEY)
        if decision is None:
            return
        for op in decision.ops:
            if isinstance(op, Set) and op.path == state_path(KEY):
                found.states[KEY] = LeaderAndIsr.decode(op.data, op.version + 1)
            elif isinstance(op, Set):
                found.topics["t"] = TopicImage.decode(op.data, op.version + 1)
    pytest.fail(f"still deciding: {decision}")


@given(trees())
def test_the_state_survives_its_json(tree: tuple[ClusterImage, LeaderAndIsr]) -> None:
    before = tree[1]
    assert LeaderAndIsr.decode(before.encode(), before.version) == before


# ---- what a node has ----


def test_one_stale_read_deletes_nothing() -> None:
    """A partition that is not assigned is set aside; only a listed topic id is deleted."""
    found = image(None, replicas=(2, 3))
    local = {KEY: "id", ("gone", 0): "x", ("other", 0): "y"}
    found.deleted["x"] = ({"nodes": [1]}, 0)
    made = plan(found, 1, local)
    assert made.set_aside == [("other", 0), KEY]
    assert made.delete == [(("gone", 0), "x")]
    assert plan(found, 2, {}).make == [(KEY, "id")]


def test_a_name_that_is_used_again_is_another_topic() -> None:
    made = plan(image(None), 1, {KEY: "older"})
    assert made.set_aside == [KEY]
    assert made.make == [(KEY, "id")]
    assert config_path("topics", "t") == "/config/topics/t"
