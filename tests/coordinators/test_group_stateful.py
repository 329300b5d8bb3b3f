"""Groups against models: the state machine alone, and consumers of a store step by step.

Alone: members that join, ask, beat, leave, die and come back under the same name, in any order and
with any delay.  Together: real consumers on a clock that stands still, whose every step is chosen.
"""

from __future__ import annotations

import gc
import itertools
import random
import tempfile
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import logstore
from logstore import Consumer, Groups, Store, TopicPartition
from logstore.clock import ManualClock
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.group_events import (
    ALLOWED_FROM,
    Answer,
    Arm,
    Disarm,
    Effect,
    GroupConfig,
    GroupState,
    JoinReply,
    Nudge,
    Request,
    StoreGroup,
    SyncReply,
)
from logstore.coordinators.group_machine import GroupMachine
from tests.machines import fast_directory

PARTITIONS = range(5)
SESSION, REBALANCE = 10_000, 4_000  # a static member may be away for longer than a rebalance


class Client:
    """A member as it sees itself."""

    def __init__(self, name: str, instance: str | None) -> None:
        self.name = name
        self.instance = instance
        self.member_id = ""
        self.generation = -1
        self.leads: tuple[tuple[str, str | None, bytes], ...] | None = None
        self.waits: Request | None = None
        self.owned: frozenset[int] | None = None


class MachineAgainstModel(RuleBasedStateMachine):
    @initialize(delay=st.sampled_from([0, 3_000]))
    def start(self, delay: int) -> None:
        self.now = 1_000
        ids = itertools.count()
        config = GroupConfig(initial_rebalance_delay_ms=delay)
        self.machine = GroupMachine("g", config, now_ms=self.now, new_id=lambda: f"{next(ids):04d}")
        self.clients: list[Client] = []
        self.timers: dict[tuple[str, str], int] = {}
        self.answered: set[int] = set()
        self.asked: dict[int, Request] = {}
        self.last_generation = 0
        self.owners: dict[tuple[int, int], str] = {}  # (generation, partition) -> member
        self.fail_next_store = False

    # ---- carrying out ----

    def carry_out(self, effects: list[Effect]) -> None:
        queue = list(effects)
        while queue:
            effect = queue.pop(0)
            if isinstance(effect, Arm):
                assert effect.delay_ms >= 0
                self.timers[effect.key] = self.now + effect.delay_ms
            elif isinstance(effect, Disarm):
                self.timers.pop(effect.key, None)
            elif isinstance(effect, StoreGroup):
                error, self.fail_next_store = ("disk" if self.fail_next_store else ""), False
                queue += self.machine.stored(self.now, error)
            elif isinstance(effect, Answer):
                number = id(effect.request)
                assert number in self.asked and number not in self.answered
                self.answered.add(number)
                effect.request.done(effect.reply)
            else:
                assert isinstance(effect, Nudge)
                assert effect.member_id in self.machine.members

    def request(self, client: Client) -> Request:
        def done(reply: JoinReply | SyncReply) -> None:
            if client.waits is not request:
                return  # it gave up
            client.waits = None
            if isinstance(reply, JoinReply):
                self.joined(client, reply)
            else:
                self.synced(client, reply)

        request = client.waits = Request(done)
        self.asked[id(request)] = request  # kept: an id is not used twice
        return request

    def joined(self, client: Client, reply: JoinReply) -> None:
        if reply.error:
            client.generation, client.owned = -1, None
            if reply.error != "REBALANCE_IN_PROGRESS":
                client.member_id = reply.member_id if reply.error == "MEMBER_ID_REQUIRED" else ""
            return
        client.member_id, client.generation = reply.member_id, reply.generation
        client.owned = None
        client.leads = reply.members if reply.leader == reply.member_id else None
        if reply.skip_assignment:
            client.leads = None

    def synced(self, client: Client, reply: SyncReply) -> None:
        if reply.error:
            client.owned = None
            if reply.error in ("UNKNOWN_MEMBER_ID", "FENCED_INSTANCE_ID"):
                client.member_id = ""
            return
        client.owned = frozenset(reply.assignment)
        for partition in client.owned:
            key = (client.generation, partition)
            # A static member that came back has the place of the one before it.
            owner = client.instance or client.member_id
            assert self.owners.setdefault(key, owner) == owner, "two owners in one generation"

    # ---- what happens ----

    @rule(static=st.booleans())
    def arrive(self, static: bool) -> None:
        if len(self.clients) < 5:
            number = len(self.clients)
            self.clients.append(Client(f"c{number}", f"i{number}" if static else None))

    def some(self, data: st.DataObject, **wanted: Any) -> Client | None:
        found = [c for c in self.clients if all(getattr(c, k) == v for k, v in wanted.items())]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data(), metadata=st.sampled_from([b"x", b"y"]), id_first=st.booleans())
    def join(self, data: st.DataObject, metadata: bytes, id_first: bool) -> None:
        client = self.some(data, waits=None)
        if client is None:
            return
        self.carry_out(self.machine.join(
            self.request(client), self.now, member_id=client.member_id,
            instance_id=client.instance, client_id=client.name, client_host="h",
            session_timeout_ms=SESSION, rebalance_timeout_ms=REBALANCE, protocol_type="consumer",
            protocols=[("range", metadata), ("other", b"")], id_first=id_first,
        ))  # fmt: skip

    @rule(data=st.data())
    def sync(self, data: st.DataObject) -> None:
        client = self.some(data, waits=None)
        if client is None or not client.member_id:
            return
        assignments: dict[str, bytes] = {}
        if client.leads is not None:
            members = sorted(member_id for member_id, _, _ in client.leads)
            for partition in PARTITIONS:
                member = members[partition % len(members)]
                assignments[member] = assignments.get(member, b"") + bytes([partition])
        self.carry_out(self.machine.sync(
            self.request(client), self.now, member_id=client.member_id,
            generation=client.generation, instance_id=client.instance,
            assignments=assignments.items(),
        ))  # fmt: skip

    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        client = self.some(data)
        if client is None or not client.member_id:
            return
        error, effects = self.machine.heartbeat(
            self.now,
            member_id=client.member_id,
            generation=client.generation,
            instance_id=client.instance,
        )
        self.carry_out(effects)
        if not error:
            assert self.timers[("session", client.member_id)] == self.now + SESSION

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = self.some(data)
        if client is not None and client.member_id:
            error, effects = self.machine.leave(self.now, member_id=client.member_id)
            self.carry_out(effects)
            if not error:
                client.member_id = ""

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """The process of a member is gone: the answer that it waited for is dropped."""
        client = self.some(data)
        if client is not None:
            self.clients[self.clients.index(client)] = Client(client.name, client.instance)

    @rule(ms=st.sampled_from([1, 2_999, 3_000, SESSION - 1, SESSION, REBALANCE]))
    def wait(self, ms: int) -> None:
        until = self.now + ms
        while True:
            due = sorted((at, key) for key, at in self.timers.items() if at <= until)
            if not due:
                break
            self.now, key = due[0]
            del self.timers[key]
            self.carry_out(self.machine.expire(key, self.now))
        self.now = until

    @rule()
    def disk_fails(self) -> None:
        self.fail_next_store = True

    @rule()
    def reload(self) -> None:
        """The coordinator is another one now: it knows what was stored of a stable group."""
        old = self.machine
        if old.state not in (GroupState.STABLE, GroupState.EMPTY) or old.members.pending:
            return
        if any(client.waits for client in self.clients):
            return
        self.timers.clear()
        self.machine = GroupMachine("g", old.config, now_ms=self.now, new_id=old._new_id)
        self.carry_out(self.machine.load(old.metadata(), self.now))
        assert self.machine.metadata() == old.metadata()

    # ---- what must be so ----

    @invariant()
    def generations_only_grow(self) -> None:
        if hasattr(self, "machine"):
            assert self.machine.generation >= self.last_generation
            self.last_generation = self.machine.generation

    @invariant()
    def a_stable_group_has_an_owner_for_everything(self) -> None:
        machine = getattr(self, "machine", None)
        if machine is None or machine.state is not GroupState.STABLE:
            return
        given = [p for member in machine.members.values() for p in member.assignment]
        assert sorted(given) == list(PARTITIONS)
        assert machine.members.leader in machine.members

    @invariant()
    def states_mean_what_they_say(self) -> None:
        machine = getattr(self, "machine", None)
        if machine is None:
            return
        members = machine.members.values()
        if machine.state is GroupState.EMPTY:
            assert not members
        if machine.state is not GroupState.PREPARING_REBALANCE:
            assert not any(member.joining for member in members)
        else:
            assert ("join", "") in self.timers, "a rebalance that nothing would end"
        if machine.state is GroupState.COMPLETING_REBALANCE:
            assert ("sync", "") in self.timers
        for member in members:
            waits = member.joining is not None or member.syncing is not None
            assert waits or ("session", member.member_id) in self.timers, "a lease without an end"
        assert set(machine.members.static.values()) <= set(machine.members)
        for change in machine.history:
            assert change.reason and change.source in ALLOWED_FROM[change.target]
        for before, after in itertools.pairwise(machine.history):
            assert before.target is after.source and before.at_ms <= after.at_ms

    @invariant()
    def nobody_waits_for_an_answer_that_cannot_come(self) -> None:
        machine = getattr(self, "machine", None)
        if machine is None:
            return
        parked = {id(r) for m in machine.members.values() for r in (m.joining, m.syncing) if r}
        assert set(self.asked) - self.answered == parked

    @invariant()
    def only_members_of_this_generation_commit(self) -> None:
        machine = getattr(self, "machine", None)
        for client in self.clients if machine is not None else ():
            if client.member_id and client.generation >= 0:
                error = machine.check_commit(client.member_id, client.generation, client.instance)
                if not error:
                    assert client.member_id in machine.members
                    assert client.generation == machine.generation
        if machine is not None:
            outside = machine.check_commit("", -1)
            assert (outside == "") == (machine.state is GroupState.EMPTY)


TestMachineAgainstModel = MachineAgainstModel.TestCase
TestMachineAgainstModel.settings = settings(max_examples=200, stateful_step_count=50)


class ConsumersStepByStep(RuleBasedStateMachine):
    """Real consumers on a real store.  No two hold one partition; no offset decreases."""

    @initialize(assignor=st.sampled_from(["cooperative-sticky", "range", "sticky"]))
    def open(self, assignor: str) -> None:
        self.directory = tempfile.TemporaryDirectory(dir=fast_directory())
        self.clock = ManualClock()
        self.store: Store = logstore.open(self.directory.name, durability="os", clock=self.clock)
        self.topic = self.store.create_topic("t", partitions=4)
        self.assignor = assignor
        self.consumers: list[Consumer] = []
        self.processed: dict[tuple[int, int], int] = {}
        self.committed: dict[TopicPartition, int] = {}
        self.generation = 0
        self.appended = 0

    @property
    def open_now(self) -> bool:
        return hasattr(self, "store")

    @precondition(lambda self: self.open_now and len(self.consumers) < 4)
    @rule(count=st.integers(1, 3))
    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.consumers.append(Consumer(
                self.store, "t", group_id="g", assignor=self.assignor, auto_commit_interval=1e9,
                timeout=0, session_timeout=10.0, rebalance_timeout=20.0, heartbeat_interval=3.0,
            ))  # fmt: skip

    @precondition(lambda self: self.open_now and self.consumers)
    @rule(order=st.randoms(use_true_random=False), times=st.integers(1, 4))
    def everybody_polls(self, order: random.Random, times: int) -> None:
        for _ in range(times):
            for consumer in order.sample(self.consumers, len(self.consumers)):
                self.step(consumer, 3)

    @precondition(lambda self: self.open_now)
    @rule(partition=st.integers(0, 3), count=st.integers(1, 5))
    def append(self, partition: int, count: int) -> None:
        self.topic[partition].extend([b"x"] * count)
        self.appended += count

    @precondition(lambda self: self.open_now and self.consumers)
    @rule(data=st.data(), records=st.integers(1, 6))
    def poll(self, data: st.DataObject, records: int) -> None:
        self.step(data.draw(st.sampled_from(self.consumers)), records)

    def step(self, consumer: Consumer, records: int) -> None:
        for record in consumer.poll(max_records=records):
            key = (record.partition, record.offset)
            self.processed[key] = self.processed.get(key, 0) + 1
        self.no_partition_has_two_holders()

    @precondition(lambda self: self.open_now and self.consumers)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(self.consumers))
        try:
            consumer.commit()
        except logstore.RebalanceError:
            assert not consumer.member_id or consumer._membership.loss  # type: ignore[union-attr]

    @precondition(lambda self: self.open_now and self.consumers)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(self.consumers))
        self.consumers.remove(consumer)
        consumer.close()

    @precondition(lambda self: self.open_now and self.consumers)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Drop a consumer without close(): its session expires; others go on from its commit."""
        self.consumers.remove(data.draw(st.sampled_from(self.consumers)))
        gc.collect()

    @precondition(lambda self: self.open_now)
    @rule(seconds=st.sampled_from([1, 5, 25]))
    def wait(self, seconds: int) -> None:
        timers = GroupCoordinator.of(self.store).timers
        for _ in range(seconds):
            self.clock.advance(1_000)
            timers.run_due()

    @invariant()
    def no_partition_has_two_holders(self) -> None:
        if not self.open_now:
            return
        held = [
            tp
            for consumer in self.consumers
            if not consumer._membership.loss  # type: ignore[union-attr]
            for tp in consumer.assignment()
        ]
        assert len(held) == len(set(held)), held

    @invariant()
    def offsets_and_generations_never_go_back(self) -> None:
        if not self.open_now:
            return
        groups = Groups(self.store)
        now = {tp: c.offset for tp, c in groups.committed("g").items()}
        for tp, offset in self.committed.items():
            assert now[tp] >= offset
        self.committed = now
        generation = groups.describe("g").generation
        assert generation >= self.generation
        self.generation = generation

    def teardown(self) -> None:
        if not self.open_now:
            return
        try:
            # In the end one consumer is left, and nothing was left out.
            for consumer in self.consumers:
                consumer.close()
            self.consumers.clear()
            gc.collect()
            self.wait(25)
            self.arrive(1)
            for _ in range(100):
                self.step(self.consumers[0], 100)
                if sum(map(len, [self.consumers[0].assignment()])) == 4 and not any(
                    lag.records for lag in self.consumers[0].lag().values()
                ):
                    break
            else:
                raise AssertionError(f"stuck: {Groups(self.store).history('g')}")
            wanted = {(log.number, n) for log in self.topic for n in range(log.end_offset)}
            assert set(self.processed) == wanted
        finally:
            for consumer in self.consumers:
                consumer.close()
            self.store.close()
            self.directory.cleanup()


TestConsumersStepByStep = ConsumersStepByStep.TestCase
TestConsumersStepByStep.settings = settings(max_examples=40, stateful_step_count=40)
