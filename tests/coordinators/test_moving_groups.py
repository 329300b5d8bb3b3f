"""Groups and offsets of partitions that move between nodes, and appends that end later."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import logstore
from logstore import (
    CoordinatorLoadingError,
    CoordinatorNotAvailableError,
    ManualClock,
    NotCoordinatorError,
    RebalanceError,
    Store,
)
from logstore.coordinators.consumer_group.heartbeats import ConsumerGroups
from logstore.coordinators.consumer_group.machine import Heartbeat, HeartbeatReply
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.group_events import JoinReply, SyncReply
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS, coordinator_partition
from logstore.coordinators.offset_book import OffsetBook
from logstore.coordinators.offset_records import TopicPartition
from logstore.coordinators.quorum.outcome import Outcome

from .holding import HoldingQuorum, Place

T0 = TopicPartition("t", 0)
SUBSCRIPTION = b"\x00\x00\x00\x00\x00\x01\x00\x01t\xff\xff\xff\xff"


def place_of(group: str) -> Place:
    return CONSUMER_OFFSETS, coordinator_partition(group, 50)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with logstore.open(tmp_path / "store", durability="os", clock=clock) as store:
        store.create_topic("t", 4)
        yield store


@pytest.fixture
def quorum(store: Store) -> HoldingQuorum:
    return HoldingQuorum(store)


@pytest.fixture
def groups(store: Store, quorum: HoldingQuorum) -> GroupCoordinator:
    """The groups of a node that leads the partition of group g, in epoch 1."""
    groups = GroupCoordinator.of(store)
    quorum.lead(place_of("g"), 1)
    assert groups.load(place_of("g")[1], 1)
    return groups


@pytest.fixture(autouse=True)
def no_call_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What is called with the answer of the quorum never raises."""
    yield
    assert "failed" not in caplog.text


def move(groups: GroupCoordinator, quorum: HoldingQuorum, group: str = "g") -> None:
    """Lose the partition of a group, and lead it again in the next epoch."""
    place = place_of(group)
    epoch = quorum.lose(place)
    assert groups.drop(place[1], epoch)
    quorum.lead(place, epoch + 1)
    assert groups.load(place[1], epoch + 1)


class Member:
    """A member of the classic protocol; its replies are in `joined` and `synced`."""

    def __init__(self, groups: GroupCoordinator, name: str, instance: str | None = None) -> None:
        self.groups = groups
        self.name = name
        self.instance = instance
        self.member_id = ""
        self.joined: list[JoinReply] = []
        self.synced: list[SyncReply] = []

    def join(self, group: str = "g") -> None:
        self.groups.join(
            group, self.joined.append, member_id=self.member_id, instance_id=self.instance,
            client_id=self.name, session_timeout_ms=10_000, rebalance_timeout_ms=10_000,
            protocols=[("range", SUBSCRIPTION)], client_host="/10.0.0.1",
        )  # fmt: skip
        if self.joined:
            self.member_id = self.joined[-1].member_id

    def sync(self, group: str = "g", **assignments: bytes) -> None:
        reply = self.joined[-1]
        self.groups.sync(
            group, self.synced.append, member_id=reply.member_id, generation=reply.generation,
            instance_id=self.instance, assignments=list(assignments.items()),
        )  # fmt: skip


# ---- offsets ----


def test_an_offset_is_shown_when_it_is_committed_and_not_before(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    first = groups.commit_later("g", {T0: 1})
    second = groups.commit_later("g", {T0: 2})
    assert not first.over
    assert groups.book.committed("g") == {}
    quorum.commit(place_of("g"))
    assert (first.over, second.over) == (True, False)
    assert groups.book.committed("g")[T0].offset == 1
    quorum.commit(place_of("g"))
    assert groups.book.committed("g")[T0].offset == 2


def test_requests_get_loading_and_not_coordinator(store: Store, quorum: HoldingQuorum) -> None:
    groups, place = GroupCoordinator.of(store), place_of("g")
    asks: list[Callable[[], object]] = [
        lambda: groups.commit_later("g", {T0: 1}),
        lambda: groups.book.committed("g"),
        lambda: groups.knows("g"),
        lambda: Member(groups, "a").join(),
        lambda: groups.heartbeat("g", member_id="m", generation=1, instance_id=None),
        lambda: groups.leave_later("g", member_id="m"),
        lambda: groups.delete_group("g"),
        lambda: ConsumerGroups(groups).heartbeat_later("g", beat("m", 0)),
    ]
    for ask in asks:
        with pytest.raises(NotCoordinatorError):
            ask()
    quorum.lead(place, 1)
    for ask in asks:
        with pytest.raises(CoordinatorLoadingError):
            ask()
    assert groups.load(place[1], 1)
    assert groups.book.committed("g") == {}
    assert groups.book.groups() == []


def test_a_refused_commit_is_not_available_and_a_repeated_one_succeeds(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    refused = groups.commit_later("g", {T0: 1})
    quorum.refuse(place_of("g"))
    with pytest.raises(CoordinatorNotAvailableError, match="in sync") as caught:
        refused.result()
    assert isinstance(caught.value.__cause__, logstore.NotEnoughReplicasError)
    again = groups.commit_later("g", {T0: 1})
    quorum.commit(place_of("g"))
    assert again.error is None
    assert groups.book.committed("g")[T0].offset == 1


def test_a_resigned_coordinator_answers_not_coordinator(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    """KAFKA-20634: a high watermark that passes over other records must complete no write."""
    waiting = groups.commit_later("g", {T0: 7})
    place = place_of("g")
    epoch = quorum.lose(place)
    assert groups.drop(place[1], epoch)
    assert isinstance(waiting.error, NotCoordinatorError)
    with pytest.raises(NotCoordinatorError):
        groups.commit_later("g", {T0: 8})
    quorum.lead(place, epoch + 1)
    assert groups.load(place[1], epoch + 1)
    quorum.answer_late()
    assert isinstance(waiting.error, NotCoordinatorError)
    assert groups.book.committed("g") == {}
    assert not groups.drop(place[1], epoch)  # late, too
    groups.commit_later("g", {T0: 9})
    quorum.commit(place)
    assert groups.book.committed("g")[T0].offset == 9


def test_a_group_in_memory_is_refused_before_the_partition_is_dropped(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    member = Member(groups, "a")
    member.join()
    quorum.lose(place_of("g"))
    with pytest.raises(NotCoordinatorError):
        groups.heartbeat("g", member_id=member.member_id, generation=1, instance_id=None)
    with pytest.raises(NotCoordinatorError):
        groups.knows("g")


def test_what_the_next_leader_committed_of_the_last_reign_is_shown(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    waiting = groups.commit_later("g", {T0: 7})
    place = place_of("g")
    groups.drop(place[1], quorum.lose(place))
    assert isinstance(waiting.error, NotCoordinatorError)
    quorum.write(quorum.late[0])  # it was on the replica that leads now
    quorum.lead(place, 2)
    assert groups.load(place[1], 2)
    assert groups.book.committed("g")[T0].offset == 7


def test_an_indeterminate_append_ends_the_coordinator_of_its_partition(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    first, second = (groups.commit_later("g", {T0: offset}) for offset in (1, 2))
    quorum.break_off(place_of("g"))
    assert isinstance(first.error, NotCoordinatorError)
    assert isinstance(second.error, NotCoordinatorError)
    with pytest.raises(CoordinatorLoadingError):
        groups.book.committed("g")


def test_offsets_in_a_transaction_wait_for_the_marker_across_a_move(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    place = place_of("g")
    within = groups.commit_later("g", {T0: 5}, producer=(9, 0))
    quorum.commit(place)
    assert within.error is None
    move(groups, quorum)
    assert groups.book.committed("g") == {}
    assert groups.book.pending("g") == {T0}
    quorum.log(place).end_transaction(9, 0, commit=True, coordinator_epoch=1)
    assert groups.book.committed("g")[T0].offset == 5


def test_tombstones_of_a_deleted_topic_are_written_in_the_partitions_that_are_loaded(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    groups.commit_later("g", {T0: 5, ("u", 0): 6})
    quorum.commit_all()
    (gone,) = groups.book.forget_topic("t")
    assert groups.book.committed("g").keys() == {T0, ("u", 0)}
    quorum.commit_all()
    assert gone.error is None
    assert groups.book.committed("g").keys() == {("u", 0)}


# ---- the classic protocol ----


def test_an_assignment_is_given_out_when_its_record_is_committed(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    leader = Member(groups, "a")
    leader.join()
    leader.sync(**{leader.member_id: b"mine"})
    assert leader.synced == []
    assert str(groups.machine("g").state) == "CompletingRebalance"
    quorum.commit(place_of("g"))
    assert leader.synced == [SyncReply(b"mine", "", "range")]
    move(groups, quorum)
    machine = groups.machine("g")
    assert (str(machine.state), machine.generation) == ("Stable", 1)
    assert machine.members[leader.member_id].assignment == b"mine"
    error = groups.heartbeat("g", member_id=leader.member_id, generation=1, instance_id=None)
    assert error == ""


def test_a_record_of_an_earlier_generation_completes_no_later_one(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    first, second = Member(groups, "a"), Member(groups, "b")
    first.join()
    first.sync(**{first.member_id: b"all"})  # its record waits
    second.join()
    assert first.synced == [SyncReply(error="REBALANCE_IN_PROGRESS")]
    first.join()
    assert first.joined[-1].generation == 2
    second.member_id = second.joined[-1].member_id
    first.sync(**{first.member_id: b"half", second.member_id: b"other half"})
    second.sync()
    quorum.commit(place_of("g"))  # of generation 1
    assert (len(first.synced), second.synced) == (1, [])
    assert str(groups.machine("g").state) == "CompletingRebalance"
    quorum.commit(place_of("g"))
    assert first.synced[-1].assignment == b"half"
    assert second.synced[-1].assignment == b"other half"


def test_a_refused_assignment_is_answered_and_joined_again(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    leader = Member(groups, "a")
    leader.join()
    leader.sync(**{leader.member_id: b"mine"})
    quorum.refuse(place_of("g"))
    assert leader.synced == [SyncReply(error="COORDINATOR_NOT_AVAILABLE")]
    leader.join()
    leader.sync(**{leader.member_id: b"mine"})
    quorum.commit(place_of("g"))
    assert leader.synced[-1] == SyncReply(b"mine", "", "range")


def test_a_static_member_gets_its_new_id_when_the_record_with_it_is_committed(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    first = Member(groups, "a", instance="i")
    first.join()
    first.sync(**{first.member_id: b"mine"})
    quorum.commit_all()
    again = Member(groups, "a", instance="i")
    again.join()
    assert again.joined == []
    quorum.commit(place_of("g"))
    assert again.joined[-1].error == ""
    lost = Member(groups, "a", instance="i")
    lost.join()
    place = place_of("g")
    groups.drop(place[1], quorum.lose(place))
    assert [reply.error for reply in lost.joined] == ["NOT_COORDINATOR"]


def test_joins_and_syncs_that_wait_are_answered_when_the_partition_is_lost(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    place = place_of("g")
    leader, follower = Member(groups, "a"), Member(groups, "b")
    leader.join()
    follower.join()  # waits for the leader to join again
    groups.drop(place[1], quorum.lose(place))
    assert [reply.error for reply in follower.joined] == ["NOT_COORDINATOR"]
    quorum.lead(place, 2)
    groups.load(place[1], 2)
    leader = Member(groups, "a")
    leader.join()
    leader.sync(**{leader.member_id: b"mine"})
    groups.drop(place[1], quorum.lose(place))
    assert [reply.error for reply in leader.synced] == ["NOT_COORDINATOR"]
    quorum.answer_late()
    assert len(leader.synced) == 1


def test_members_have_a_whole_session_after_a_move(
    groups: GroupCoordinator, quorum: HoldingQuorum, clock: ManualClock
) -> None:
    member = Member(groups, "a")
    member.join()
    member.sync(**{member.member_id: b"mine"})
    quorum.commit_all()
    clock.advance(9_000)
    move(groups, quorum)
    clock.advance(9_000)
    groups.timers.run_due()
    assert list(groups.machine("g").members) == [member.member_id]
    clock.advance(2_000)
    groups.timers.run_due()
    quorum.commit_all()
    assert list(groups.machine("g").members) == []


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_lost_group_has_no_timers(
    groups: GroupCoordinator, quorum: HoldingQuorum, clock: ManualClock, protocol: str
) -> None:
    if protocol == "classic":
        Member(groups, "a").join()
    else:
        ConsumerGroups(groups).heartbeat_later("g", beat("a", 0))
        quorum.commit_all()
    with groups.locked_room("g") as room:
        assert room.timeouts
    groups.drop(place_of("g")[1], quorum.lose(place_of("g")))
    assert room.timeouts == {}
    clock.advance(3600_000)
    groups.timers.run_due()
    assert quorum.places() == []


# ---- the consumer protocol (KIP-848) ----


def beat(member: str, epoch: int, *, owned: frozenset[tuple[uuid.UUID, int]] | None = None,
         topics: tuple[str, ...] | None = ("t",)) -> Heartbeat:  # fmt: skip
    return Heartbeat(
        member_id=member, epoch=epoch, rebalance_timeout_ms=10_000 if epoch == 0 else -1,
        topics=topics if epoch == 0 else None, owned=frozenset() if epoch == 0 else owned,
    )  # fmt: skip


def test_heartbeats_take_turns_and_are_answered_when_they_are_committed(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    consumers = ConsumerGroups(groups)
    first, second = (consumers.heartbeat_later("g", beat(name, 0)) for name in "ab")
    assert (first.over, second.over) == (False, False)
    assert len(quorum.held[place_of("g")]) == 1  # the second waits for its turn
    quorum.commit(place_of("g"))
    assert (first.result().epoch, second.over) == (2, False)
    quorum.commit(place_of("g"))
    assert second.result().epoch == 3
    fresh = groups.book.consumer_group("g")
    assert fresh is not None
    assert fresh.members.keys() == {"a", "b"}


def test_a_refused_heartbeat_is_undone_and_the_next_turn_runs(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    consumers = ConsumerGroups(groups)
    first, second = (consumers.heartbeat_later("g", beat(name, 0)) for name in "ab")
    quorum.refuse(place_of("g"))
    assert isinstance(first.error, CoordinatorNotAvailableError)
    quorum.commit(place_of("g"))
    assert second.result() == HeartbeatReply("b", 2, 5000, second.result().assignment)
    with groups.locked_room("g") as room:
        assert room.consumer is not None
        assert list(room.consumer.members) == ["b"]
    with pytest.raises(RebalanceError):
        consumers.heartbeat_later("g", beat("a", 1)).result()


def test_heartbeats_that_wait_are_answered_when_the_partition_is_lost(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    consumers, place = ConsumerGroups(groups), place_of("g")
    waiting = [consumers.heartbeat_later("g", beat(name, 0)) for name in "ab"]
    left = groups.leave_later("g", member_id="a")
    groups.drop(place[1], quorum.lose(place))
    assert all(isinstance(each.error, NotCoordinatorError) for each in (*waiting, left))
    quorum.answer_late()
    quorum.lead(place, 2)
    assert groups.load(place[1], 2)
    assert groups.book.consumer_group("g") is None
    joined = consumers.heartbeat_later("g", beat("a", 0))
    quorum.commit_all()
    assert joined.result().epoch == 2


def test_a_silent_member_is_removed_after_the_move_and_again_if_that_is_refused(
    groups: GroupCoordinator, quorum: HoldingQuorum, clock: ManualClock
) -> None:
    consumers = ConsumerGroups(groups)
    consumers.heartbeat_later("g", beat("a", 0))
    quorum.commit_all()
    move(groups, quorum)
    for answer in (quorum.refuse, quorum.commit):
        clock.advance(46_000)
        groups.timers.run_due()
        assert len(quorum.held[place_of("g")]) == 1
        answer(place_of("g"))
    with groups.locked_room("g") as room:
        assert room.consumer is not None
        assert list(room.consumer.members) == []


def test_a_group_takes_the_other_protocol_after_its_records_are_committed(
    groups: GroupCoordinator, quorum: HoldingQuorum
) -> None:
    consumers = ConsumerGroups(groups)
    consumers.heartbeat_later("g", beat("a", 0))
    quorum.commit_all()
    left = groups.leave_later("g", member_id="a")
    early = Member(groups, "c")
    early.join()
    assert [reply.error for reply in early.joined] == ["COORDINATOR_LOAD_IN_PROGRESS"]
    quorum.commit_all()
    assert left.result() == ""
    later = Member(groups, "c")
    later.join()
    quorum.commit_all()
    assert later.joined[-1].error == ""
    later.sync(**{later.member_id: b"mine"})
    quorum.commit_all()
    move(groups, quorum)
    assert list(groups.machine("g").members) == [later.member_id]


# ---- any sequence ----

GROUPS = ("g", "h", "my-group", "group1")


class MovingOffsets(RuleBasedStateMachine):
    """Commits to several partitions, which are committed, refused, lost and led again."""

    @initialize()
    def begin(self) -> None:
        self.home = tempfile.TemporaryDirectory()
        self.store = logstore.open(self.home.name, durability="os")
        self.store.create_topic("t", 4)
        self.quorum = HoldingQuorum(self.store)
        self.groups = GroupCoordinator.of(self.store)
        self.epoch = 0
        self.waiting: list[tuple[str, int, Outcome[range]]] = []
        self.acknowledged: dict[str, int] = {}
        self.number = 0
        for group in GROUPS:
            self.lead(group)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.home.cleanup()

    @rule(group=st.sampled_from(GROUPS))
    def commit(self, group: str) -> None:
        self.number += 1
        try:
            begun = self.groups.commit_later(group, {T0: self.number})
        except (NotCoordinatorError, CoordinatorLoadingError):
            assert place_of(group) not in self.quorum.epochs
        else:
            self.waiting.append((group, self.number, begun))

    @precondition(lambda self: self.quorum.places())
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.quorum.places()))
        data.draw(st.sampled_from([self.quorum.commit, self.quorum.refuse]))(place)

    @rule(group=st.sampled_from(GROUPS))
    def lose(self, group: str) -> None:
        place = place_of(group)
        if place in self.quorum.epochs:
            assert self.groups.drop(place[1], self.quorum.lose(place))

    @rule(group=st.sampled_from(GROUPS))
    def lead(self, group: str) -> None:
        place = place_of(group)
        if place not in self.quorum.epochs:
            self.epoch += 1
            self.quorum.lead(place, self.epoch)
            assert self.groups.load(place[1], self.epoch)

    @rule()
    def answer_late(self) -> None:
        self.quorum.answer_late()

    @invariant()
    def acknowledged_offsets_are_shown_and_nothing_waits_for_a_lost_partition(self) -> None:
        for group, number, begun in list(self.waiting):
            if begun.over:
                self.waiting.remove((group, number, begun))
                if begun.error is None:
                    self.acknowledged[group] = max(number, self.acknowledged.get(group, 0))
            else:
                assert place_of(group) in self.quorum.epochs
        for group in GROUPS:
            if place_of(group) in self.quorum.epochs:
                shown = self.groups.book.committed(group)
                assert (shown[T0].offset if shown else 0) == self.acknowledged.get(group, 0)

    @rule()
    def a_fresh_book_shows_the_same(self) -> None:
        with logstore.open(self.home.name, readonly=True) as fresh:
            book = OffsetBook.of(fresh)
            for group in GROUPS:
                if place_of(group) in self.quorum.epochs:
                    assert self.groups.book.committed(group) == book.committed(group)


MovingOffsets.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestMovingOffsets = MovingOffsets.TestCase
