"""ConsumerGroupMachine: events of KIP-848, step by step and as random walks."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest

from logstore.coordinators.consumer_group.machine import (
    ConsumerGroupConfig,
    ConsumerGroupMachine,
    Heartbeat,
    HeartbeatReply,
    TopicInfo,
)
from logstore.coordinators.consumer_group.records import (
    ConsumerGroupKey,
    ConsumerGroupState,
    MemberState,
    TopicIdPartition,
)
from logstore.coordinators.group_events import Arm, Effect, StoreRecords
from logstore.errors import RebalanceError
from logstore.format.wire_types import FieldReader

T, U = uuid.UUID(int=1 << 64), uuid.UUID(int=2 << 64)


class Group:
    """A machine, the records that it wrote, and what each member owns."""

    def __init__(self, topics: dict[str, TopicInfo] | None = None, **config: Any) -> None:
        self.topics = topics or {"t": TopicInfo(T, 4)}
        self.config = ConsumerGroupConfig(**config)
        self.machine = ConsumerGroupMachine("g", self.topics, self.config)
        self.log: list[tuple[bytes, bytes | None]] = []
        self.epochs: dict[str, int] = {}
        self.owned: dict[str, frozenset[TopicIdPartition]] = {}
        self.armed: dict[tuple[str, str], int] = {}
        self.now = 1_000

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, StoreRecords):
                self.log += [
                    (key.encode(), None if value is None else value.encode())
                    for key, value in effect.records
                ]
            elif isinstance(effect, Arm):
                self.armed[effect.key] = effect.delay_ms
            else:
                self.armed.pop(effect.key, None)  # type: ignore[union-attr]

    def beat(self, member: str, epoch: int | None = None, **fields: Any) -> HeartbeatReply:
        """Send a heartbeat with the member's epoch; the member keeps what the answer gives it."""
        epoch = self.epochs[member] if epoch is None else epoch
        if epoch == 0:
            fields = {"topics": ("t",), "rebalance_timeout_ms": 500, "owned": frozenset()} | fields
        try:
            reply, effects = self.machine.heartbeat(
                Heartbeat(member_id=member, epoch=epoch, **fields), self.now
            )
        except RebalanceError:
            self.machine.undo()
            raise
        self.carry_out(effects)
        self.epochs[member] = reply.epoch
        if reply.assignment is not None:
            self.owned[member] = reply.assignment
        return reply

    def report(self, member: str) -> HeartbeatReply:
        """Send a heartbeat of a member that has given back what it was asked for."""
        return self.beat(member, owned=self.owned[member])

    def settle(self, *members: str) -> None:
        for _ in range(4):
            for member in members:
                self.report(member)

    def refused(self, member: str, epoch: int, **fields: Any) -> str:
        before = self.machine.state.copy()
        with pytest.raises(RebalanceError) as refused:
            self.beat(member, epoch, **fields)
        assert self.machine.state == before
        return refused.value.code

    def replayed(self) -> ConsumerGroupState:
        state = ConsumerGroupState()
        for raw, value in self.log:
            fields = FieldReader(raw)
            key = ConsumerGroupKey.read(fields.int16(), fields)
            assert key is not None
            state.put(key.kind, key.name, None if value is None else key.decode(value))
        return state

    def numbers(self, member: str) -> list[int]:
        return sorted(number for _, number in self.owned[member])


def test_a_partition_is_given_back_before_another_member_gets_it() -> None:
    group = Group()
    assert group.beat("a", 0) == ("a", 2, 5000, {(T, n) for n in range(4)})
    assert group.beat("b", 0) == ("b", 3, 5000, frozenset())
    assert group.machine.state_name == "Reconciling"
    shrunk = group.beat("a")  # without a report: it is asked to give back
    assert (shrunk.epoch, len(shrunk.assignment or ())) == (2, 2)
    assert ("rebalance", "a") in group.armed
    assert group.beat("b").assignment is None
    assert group.report("a").epoch == 3
    assert ("rebalance", "a") not in group.armed
    assert group.beat("b").assignment == {(T, n) for n in range(4)} - group.owned["a"]
    assert group.machine.state_name == "Stable"


def test_a_member_that_leaves_or_is_silent_frees_its_partitions() -> None:
    group = Group()
    group.beat("a", 0)
    group.beat("b", 0)
    group.settle("a", "b")
    assert group.beat("b", -1) == ("b", -1, 0, None)
    assert (group.machine.epoch, group.machine.state_name) == (4, "Assigning")
    group.settle("a")
    assert group.numbers("a") == [0, 1, 2, 3]
    group.carry_out(group.machine.expire(("session", "a"), group.now))
    assert (group.machine.state_name, group.machine.epoch) == ("Empty", 5)
    assert not group.armed


def test_a_member_that_does_not_give_back_in_time_is_removed() -> None:
    group = Group()
    group.beat("a", 0)
    group.beat("b", 0)
    group.beat("a")
    assert group.armed["rebalance", "a"] == 500
    group.carry_out(group.machine.expire(("rebalance", "a"), group.now))
    assert group.refused("a", 2) == "UNKNOWN_MEMBER_ID"
    group.settle("b")
    assert group.numbers("b") == [0, 1, 2, 3]


def test_a_static_member_returns_to_its_partitions() -> None:
    group = Group()
    group.beat("a", 0, instance_id="i")
    group.beat("b", 0)
    group.settle("a", "b")
    kept, epoch = group.numbers("a"), group.machine.epoch
    assert group.refused("c", 0, instance_id="i") == "UNRELEASED_INSTANCE_ID"
    assert group.refused("c", 3, instance_id="i") == "FENCED_INSTANCE_ID"
    assert group.refused("a", 3, instance_id="j") == "UNKNOWN_MEMBER_ID"
    assert group.beat("a", -2, instance_id="i") == ("a", -2, 0, None)
    assert group.refused("a", 3) == "FENCED_MEMBER_EPOCH"
    assert ("session", "a") in group.armed
    group.beat("c", 0, instance_id="i")
    assert (group.numbers("c"), group.machine.epoch) == (kept, epoch)
    assert group.refused("a", 3, instance_id="i") == "FENCED_INSTANCE_ID"
    group.beat("c", -1, instance_id="i")
    group.settle("b")
    assert group.numbers("b") == [0, 1, 2, 3]


def test_a_lost_answer_is_repeated_and_a_wrong_epoch_is_fenced() -> None:
    group = Group()
    group.beat("a", 0)
    group.topics["t"] = TopicInfo(T, 5)
    owned = group.owned["a"]
    assert group.report("a").epoch == 3
    assert group.refused("a", 2) == "FENCED_MEMBER_EPOCH"  # no report of what it owns
    assert group.refused("a", 2, owned=owned | {(T, 9)}) == "FENCED_MEMBER_EPOCH"
    assert group.refused("a", 4) == "FENCED_MEMBER_EPOCH"
    assert group.beat("a", 2, owned=owned).epoch == 3
    assert len(group.beat("a", 0).assignment or ()) == 5  # it joins again, with its id


def test_a_request_that_cannot_be_served_is_refused() -> None:
    group = Group(max_size=1)
    assert group.refused("a", 1) == "GROUP_ID_NOT_FOUND"
    assert group.refused("a", 0, assignor="none") == "UNSUPPORTED_ASSIGNOR"
    assert group.refused("a", 0, regex="(") == "INVALID_REGULAR_EXPRESSION"
    group.beat("a", 0)
    assert group.refused("b", 0) == "GROUP_MAX_SIZE_REACHED"
    assert group.refused("a", 2, regex="a**") == "INVALID_REGULAR_EXPRESSION"


def test_topics_that_change_begin_an_epoch() -> None:
    group = Group()
    group.beat("a", 0, topics=("t", "later"))
    assert group.machine.epoch == 2
    group.beat("a")
    assert group.machine.epoch == 2
    group.topics["later"] = TopicInfo(U, 2)
    assert len(group.report("a").assignment or ()) == 6
    del group.topics["t"]
    group.settle("a")
    assert group.owned["a"] == {(U, 0), (U, 1)}
    assert (group.machine.epoch, group.machine.state_name) == (4, "Stable")


def test_an_expression_is_resolved_again_when_topics_change() -> None:
    group = Group({"orders": TopicInfo(T, 1), "other": TopicInfo(U, 1)})
    group.beat("a", 0, topics=None, regex="orders.*")
    assert group.owned["a"] == {(T, 0)}
    eu = uuid.UUID(int=7)
    group.topics["orders.eu"] = TopicInfo(eu, 1)
    group.settle("a")
    assert group.owned["a"] == {(T, 0), (eu, 0)}
    group.beat("a", regex="", topics=("other",))
    assert not group.machine.state.regexes
    group.settle("a")
    assert group.owned["a"] == {(U, 0)}


def test_the_assignor_is_that_of_most_members_and_waits_for_its_interval() -> None:
    group = Group({"t": TopicInfo(T, 3), "u": TopicInfo(U, 3)}, assignment_interval_ms=100)
    group.beat("a", 0, topics=("t", "u"), assignor="range")
    group.beat("b", 0, topics=("t", "u"), assignor="range")
    assert (group.machine.assignor, group.machine.state_name) == ("range", "Assigning")
    group.now += 100
    group.settle("a", "b")
    assert group.owned["a"] == {(T, 0), (T, 1), (U, 0), (U, 1)}  # two of each topic: range


def test_commits_are_checked_by_the_epoch_of_each_partition() -> None:
    group = Group()
    group.beat("a", 0)
    check = group.machine.check_commit
    check("a", 2, [("t", 0)])
    group.beat("b", 0)
    group.settle("a", "b")
    assert group.epochs == {"a": 3, "b": 3}
    mine = [("t", number) for number in group.numbers("a")]
    theirs = [("t", number) for number in group.numbers("b")]
    check("a", 2, mine)  # held since epoch 2
    check("a", 3, theirs)  # as Kafka: only the epoch counts
    for member, epoch, partitions, code in (
        ("a", 2, theirs, "STALE_MEMBER_EPOCH"),
        ("a", 2, mine + theirs, "STALE_MEMBER_EPOCH"),
        ("a", 1, mine, "STALE_MEMBER_EPOCH"),
        ("a", 4, mine, "STALE_MEMBER_EPOCH"),
        ("b", 2, theirs, "STALE_MEMBER_EPOCH"),
        ("", -1, mine, "UNKNOWN_MEMBER_ID"),
        ("x", 3, mine, "UNKNOWN_MEMBER_ID"),
    ):
        with pytest.raises(RebalanceError) as refused:
            check(member, epoch, partitions)
        assert refused.value.code == code
    check("", -1, mine, transactional=True)
    with pytest.raises(RebalanceError) as refused:
        check("a", 1, mine, transactional=True)
    assert refused.value.code == "ILLEGAL_GENERATION"
    group.beat("a", -1)
    group.beat("b", -1)
    check("", -1, mine)


def test_a_write_that_fails_changes_nothing() -> None:
    group = Group()
    group.beat("a", 0)
    before = group.machine.state.copy()
    group.machine.heartbeat(
        Heartbeat(member_id="b", epoch=0, topics=("t",), owned=frozenset(),
                  rebalance_timeout_ms=500), 0,
    )  # fmt: skip
    assert group.machine.state != before
    group.machine.undo()
    assert group.machine.state == before == group.replayed()


def test_a_loaded_group_goes_on_and_its_timers_are_set() -> None:
    group = Group()
    group.beat("a", 0)
    group.beat("b", 0)
    group.beat("a")
    machine = ConsumerGroupMachine("g", group.topics, group.config, group.replayed())
    armed = {each.key for each in machine.load() if isinstance(each, Arm)}
    assert armed == {("session", "a"), ("session", "b"), ("rebalance", "a")}
    group.machine = machine
    group.settle("a", "b")
    assert (machine.state_name, machine.epoch) == ("Stable", 3)


class RandomWalk(Group):
    """Members that join, report late, forget to report, lose answers, leave and are removed."""

    def __init__(self, seed: int) -> None:
        super().__init__({"t": TopicInfo(T, 5), "u": TopicInfo(U, 3)})
        self.random = random.Random(seed)
        self.made = 0
        self.ids = {"t": T, "u": U}
        self.highest = 0
        self.seen: dict[str, int] = {}
        self.lost: set[str] = set()  # members that did not get the last answer

    def step(self) -> None:
        act = self.random.choice([self.join, self.late, self.give_back, self.give_back, self.lose,
                                  self.change, self.leave, self.away, self.expire, self.topic,
                                  self.crash])  # fmt: skip
        act()
        self.check()

    def any(self) -> str | None:
        return self.random.choice(sorted(self.epochs)) if self.epochs else None

    def join(self) -> None:
        self.made += 1
        instance = self.random.choice([None, None, "i", "j"])
        fields: dict[str, Any] = {"topics": self.random.choice([("t",), ("u",), ("t", "u")])}
        if self.random.random() < 0.2:
            fields = {"topics": None, "regex": "t|u"}
        if len(self.epochs) < 6:
            try:
                self.beat(f"m{self.made}", 0, instance_id=instance, **fields)
            except RebalanceError as refused:
                if refused.code != "UNRELEASED_INSTANCE_ID":
                    raise

    def late(self) -> None:
        self._of(lambda member: self.beat(member))

    def give_back(self) -> None:
        self._of(self.report)

    def lose(self) -> None:
        """The answer is lost: the member repeats its report with the epoch that it knows."""

        def act(member: str) -> None:
            epoch, owned = self.epochs[member], self.owned[member]
            self.report(member)
            self.epochs[member], self.owned[member] = epoch, owned
            self.lost.add(member)

        self._of(act)

    def report(self, member: str) -> HeartbeatReply:
        """As a client: after a lost answer all fields are sent, and the assignment is answered."""
        if member not in self.lost or member not in self.machine.members:
            return super().report(member)
        topics = self.machine.members[member].topics
        reply = self.beat(member, owned=self.owned[member], rebalance_timeout_ms=500, topics=topics)
        self.lost.discard(member)
        return reply

    def change(self) -> None:
        topics = self.random.choice([("t",), ("u",), ("t", "u"), ()])
        self._of(lambda member: self.beat(member, topics=topics, owned=self.owned[member]))

    def leave(self) -> None:
        if self.random.random() < 0.3:
            self._of(lambda member: self.beat(member, -1))

    def away(self) -> None:
        def act(member: str) -> None:
            known = self.machine.members.get(member)
            instance = None if known is None else known.instance_id
            if instance is not None:
                self.beat(member, -2, instance_id=instance)

        self._of(act)

    def expire(self) -> None:
        if self.armed and self.random.random() < 0.3:
            self.carry_out(self.machine.expire(self.random.choice(sorted(self.armed)), self.now))

    def topic(self) -> None:
        name = self.random.choice(["t", "u"])
        info = self.topics.pop(name, None)
        if info is None:
            self.ids[name] = uuid.UUID(int=self.random.getrandbits(128))
            self.topics[name] = TopicInfo(self.ids[name], self.random.randint(1, 5))
        elif self.random.random() < 0.7:
            self.topics[name] = TopicInfo(info.id, info.partitions + 1)

    def crash(self) -> None:
        state = self.replayed()
        assert state == self.machine.state
        self.machine = ConsumerGroupMachine("g", self.topics, self.config, state)
        self.armed.clear()
        self.carry_out(self.machine.load())

    def _of(self, act: Any) -> None:
        """Do something as a member.  One that is fenced or unknown drops what it owns."""
        member = self.any()
        if member is None:
            return
        try:
            act(member)
        except RebalanceError as refused:
            if refused.code not in ("FENCED_MEMBER_EPOCH", "UNKNOWN_MEMBER_ID"):
                raise
            self.epochs[member] = -1
        if self.epochs[member] < 0:
            del self.epochs[member]
            self.owned.pop(member, None)

    def check(self) -> None:
        machine = self.machine
        held = [
            each
            for member in machine.members
            for each in (*machine.current(member).assigned, *machine.current(member).revoking)
        ]
        assert len(held) == len(set(held)), "a partition of two members"
        assert machine.epoch >= self.highest
        self.highest = machine.epoch
        for member in machine.members:
            current = machine.current(member)
            assert current.epoch <= machine.target_epoch <= machine.epoch
            assert current.epoch == -2 or current.epoch >= self.seen.get(member, 0)
            self.seen[member] = current.epoch
            assert bool(current.revoking) == (
                current.state is MemberState.UNREVOKED_PARTITIONS
            ) or (current.epoch == -2)
            assert ("session", member) in self.armed
        if machine.state_name == "Stable":
            for member in machine.members:
                assert machine.current(member).assigned.keys() == machine.target(member)

    def finish(self) -> None:
        """Have all members report until the group is stable: then every partition is owned."""
        for key in [k for k in self.armed if k[0] == "session" and k[1] not in self.epochs]:
            self.carry_out(self.machine.expire(key, self.now))
        for _ in range(8):
            for member in sorted(self.epochs):
                try:
                    self.report(member)
                except RebalanceError:
                    self.beat(member, 0)
                self.check()
        if self.machine.members:
            assert self.machine.state_name == "Stable"
            wanted = {
                (self.topics[name].id, number)
                for name in self.machine.subscribed() if name in self.topics
                for number in range(self.topics[name].partitions)
            }  # fmt: skip
            held = [each for member in self.epochs for each in self.owned[member]]
            assert sorted(held) == sorted(wanted)
        assert self.replayed() == self.machine.state


@pytest.mark.parametrize("seed", range(40))
def test_a_random_walk_never_gives_a_partition_to_two_members(seed: int) -> None:
    walk = RandomWalk(seed)
    for _ in range(150):
        walk.step()
    walk.finish()
