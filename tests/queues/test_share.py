"""SharePartition against a dict: Q1 to Q6, with leases, delays, crashes, trims and two groups."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from logstore import LeaseLostError
from logstore.queues.share import (
    ACKNOWLEDGED,
    ARCHIVED,
    AVAILABLE,
    Changes,
    Lease,
    SharePartition,
    StateBatch,
)
from logstore.queues.share_state import (
    SNAPSHOT,
    UPDATE,
    ShareKey,
    ShareState,
    encode_snapshot,
    encode_update,
)
from tests.campaign import sized

VISIBILITY = 30


@dataclasses.dataclass
class Job:
    """A message as the model sees it: for one group."""

    key: bytes | None
    due: int = 0
    attempts: int = 0  # of leases that have ended
    lease: Lease | None = None
    deadline: int = 0
    over: str = ""  # "acknowledged", "archived"; "dying" until its letter is written

    @property
    def live(self) -> bool:
        return self.over in ("", "dying")


class Group:
    """One share group: the machine, the model, and what a log would keep."""

    def __init__(self, in_flight_max: int, max_attempts: int, ordered: bool) -> None:
        self.options: dict[str, Any] = {
            "in_flight_max": in_flight_max,
            "max_attempts": max_attempts,
            "ordered": ordered,
        }
        self.max_attempts = max_attempts
        self.ordered = ordered
        self.machine = SharePartition(**self.options)
        self.jobs: dict[int, Job] = {}
        self.log: list[tuple[int, bytes]] = [
            (SNAPSHOT, encode_snapshot(Changes(0, []), epoch=0, finished=0, created_ms=1, now_ms=1))
        ]
        self.stale: list[Lease] = []
        self.start = 0
        self.letters: list[int] = []

    def flush(self) -> None:
        if self.machine.needs_snapshot:
            self.snapshot()
        elif self.machine.changed:
            changes = self.machine.take_changes()
            self.log.append((UPDATE, encode_update(changes, epoch=0, finished=0)))

    def snapshot(self) -> None:
        value = encode_snapshot(self.machine.snapshot(), epoch=1,
                                finished=self.machine.finished, created_ms=1, now_ms=2)  # fmt: skip
        self.log.append((SNAPSHOT, value))

    def ended(self, job: Job, now: int, due: int) -> None:
        """The lease of a job ended without an acknowledgement."""
        assert job.lease is not None
        self.stale.append(job.lease)
        job.lease = None
        job.attempts += 1
        job.due = due
        if job.attempts >= self.max_attempts:
            job.over = "dying"

    def expire(self, now: int) -> None:
        for job in self.jobs.values():
            if job.lease is not None and job.deadline <= now:
                self.ended(job, now, now)

    def blocked(self, offset: int) -> bool:
        key = self.jobs[offset].key
        return self.ordered and key is not None and any(
            job.live for other, job in self.jobs.items() if other < offset and job.key == key
        )  # fmt: skip

    def ready(self, now: int) -> set[int]:
        return {
            offset for offset, job in self.jobs.items()
            if not job.over and job.lease is None and job.due <= now and not self.blocked(offset)
        }  # fmt: skip


class ShareMachine(RuleBasedStateMachine):
    @initialize(room=st.integers(1, 6), attempts=st.integers(1, 3), ordered=st.booleans())
    def begin(self, room: int, attempts: int, ordered: bool) -> None:
        self.now = 100
        self.log: dict[int, tuple[bytes | None, int]] = {}  # offset -> key, due
        self.end = 0
        self.trimmed = 0
        self.groups = [Group(room, attempts, ordered), Group(room, attempts, False)]

    # ---- the log ----

    @rule(keys=st.lists(st.sampled_from([None, b"a", b"b"]), min_size=1, max_size=4),
          delay=st.sampled_from([0, 0, 0, 40]), gap=st.sampled_from([0, 0, 2]))  # fmt: skip
    def put_some(self, keys: list[bytes | None], delay: int, gap: int) -> None:
        self.put(keys, delay, gap)

    def put(self, keys: list[bytes | None], delay: int, gap: int) -> None:
        self.end += gap  # markers of transactions have offsets, too
        for key in keys:
            self.log[self.end] = key, (self.now + delay if delay else 0)
            self.end += 1

    def fill(self, group: Group) -> None:
        machine = group.machine
        while machine.room > 0:
            offset = next((each for each in sorted(self.log) if each >= machine.end), None)
            if offset is None:
                machine.pass_over(self.end)
                return
            key, due = self.log[offset]
            taken = machine.take_in(offset, self.now, key=key, due=due)
            known = group.jobs.get(offset)
            assert taken == (known is None or known.live)
            if known is None:
                group.jobs[offset] = Job(key, due)

    def trim(self) -> None:
        """Retention deletes the oldest records, finished or not."""
        self.trimmed = min(self.end, max(self.trimmed, min(self.log, default=0) + 1))
        self.log = {offset: each for offset, each in self.log.items() if offset >= self.trimmed}
        for group in self.groups:
            group.machine.trim(self.trimmed)
            for offset, job in group.jobs.items():
                if offset < self.trimmed and job.live:
                    job.over = "archived"
                    if job.lease is not None:
                        group.stale.append(job.lease)
                        job.lease = None

    # ---- leases ----

    @rule(which=st.integers(0, 1), count=st.integers(1, 3), key=st.sampled_from([None, b"a"]))
    def put_and_acquire(self, which: int, count: int, key: bytes | None) -> None:
        self.put([key] * count, 0, 0)
        self.acquire(which, count)

    @rule(which=st.integers(0, 1), count=st.integers(1, 3))
    def acquire(self, which: int, count: int) -> None:
        group = self.groups[which]
        for _ in range(count):
            group.machine.advance(self.now)
            group.expire(self.now)
            self.fill(group)
            ready = group.ready(self.now)
            lease = group.machine.acquire(self.now, self.now + VISIBILITY, owner=count)
            if lease is None:
                assert not ready
                return
            job = group.jobs[lease.offset]
            assert lease.offset in ready  # Q1, Q2, Q3, Q5: it was free
            assert job.attempts < group.max_attempts  # Q3
            assert lease.attempts == job.attempts + 1
            job.lease, job.deadline = lease, self.now + VISIBILITY

    def held(self, group: Group) -> list[int]:
        return [offset for offset, job in group.jobs.items() if job.lease is not None]

    @precondition(lambda self: any(self.held(group) for group in self.groups))
    @rule(data=st.data(), act=st.sampled_from(["ack", "nack", "nack", "reject", "extend"]),
          count=st.integers(1, 3), time=st.sampled_from([0, 0, 10, 100]))  # fmt: skip
    def settle(self, data: Any, act: str, count: int, time: int) -> None:
        group = data.draw(st.sampled_from([each for each in self.groups if self.held(each)]))
        for offset in self.held(group)[:count]:
            job = group.jobs[offset]
            lease = job.lease
            assert lease is not None
            if act == "extend":
                job.deadline = self.now + time + 1
                group.machine.extend(lease, job.deadline)
            elif act == "nack":
                dies = group.machine.release(lease, self.now, time)
                group.ended(job, self.now, self.now + time)
                assert dies == (job.over == "dying")
            else:
                if act == "ack":
                    group.machine.acknowledge(lease)
                else:
                    group.machine.reject(lease, "bad input")
                group.stale.append(lease)
                job.lease, job.over = None, "acknowledged" if act == "ack" else "dying"

    @rule(which=st.integers(0, 1))
    def write_letters(self, which: int) -> None:
        group = self.groups[which]
        dying = [offset for offset, job in group.jobs.items() if job.over == "dying"]
        assert sorted(group.machine.dying) == sorted(dying)
        for offset in dying:
            group.machine.archive(offset)
            group.jobs[offset].over = "archived"
            group.letters.append(offset)
        group.flush()  # the state is in the transaction of the letters

    def owner_is_gone(self, group: Group, owner: int) -> None:
        before = {offset: group.jobs[offset] for offset in self.held(group)}
        group.machine.leave(owner, self.now)
        for job in before.values():
            try:
                assert job.lease is not None
                group.machine.check(job.lease)
            except LeaseLostError:
                group.ended(job, self.now, self.now)

    @rule(which=st.integers(0, 1), act=st.sampled_from(["trim", "purge", "leave", "leave"]),
          owner=st.integers(1, 3))  # fmt: skip
    def tidy(self, which: int, act: str, owner: int) -> None:
        if act == "trim":
            self.trim()
        elif act == "purge":
            self.purge(self.groups[which])
        else:
            self.owner_is_gone(self.groups[which], owner)

    def purge(self, group: Group) -> None:
        known = {offset for offset, job in group.jobs.items() if not job.over and not job.lease}
        taken = [offset for offset in known if offset < group.machine.end]
        assert group.machine.purge(self.end) == len(taken)
        for offset in self.log:
            job = group.jobs.setdefault(offset, Job(*self.log[offset]))
            if not job.over and job.lease is None:
                job.over = "archived"

    @rule(ms=st.sampled_from([1, 10, 31, 200]))
    def advance(self, ms: int) -> None:
        self.now += ms
        for group in self.groups:
            group.machine.advance(self.now)
            group.expire(self.now)

    @precondition(lambda self: any(group.stale for group in self.groups))
    @rule(data=st.data())
    def a_lost_lease_changes_nothing(self, data: Any) -> None:
        group = data.draw(st.sampled_from([each for each in self.groups if each.stale]))
        lease = data.draw(st.sampled_from(group.stale))
        before = (group.machine.start, group.machine.acquired, sorted(group.machine.dying))
        with pytest.raises(LeaseLostError) as lost:
            data.draw(st.sampled_from([
                lambda: group.machine.acknowledge(lease),
                lambda: group.machine.release(lease, self.now),
                lambda: group.machine.reject(lease, ""),
                lambda: group.machine.extend(lease, self.now + 99),
            ]))()  # fmt: skip
        assert lost.value.attempts == lease.attempts
        assert before == (group.machine.start, group.machine.acquired, sorted(group.machine.dying))

    # ---- the state in the log ----

    @rule(which=st.integers(0, 1), whole=st.booleans(), dies=st.booleans())
    def flush(self, which: int, whole: bool, dies: bool) -> None:
        group = self.groups[which]
        if whole:
            group.snapshot()
        else:
            group.flush()
        if dies:
            self.crash(group)

    def crash(self, group: Group) -> None:
        """A new machine from the records: leases are gone, and with them their attempts."""
        state = ShareState()
        for offset, (kind, value) in enumerate(group.log):
            state.see(kind, value, offset)
        assert state.start == group.machine.start
        group.machine = SharePartition(state.start, state.batches, **group.options)
        for offset, job in group.jobs.items():
            if job.lease is not None:
                group.stale.append(job.lease)
                job.lease = None
            job.due = 0 if offset not in self.log else self.log[offset][1]
            if job.over == "dying" and job.attempts < group.max_attempts:
                job.over = ""  # a rejected one, without its letter: it is handed out again
        group.stale.clear()  # a new process has other leases, with the same numbers
        self.fill(group)
        # The window is shorter than before: the model forgets what the machine has not read again.
        for offset in [each for each in group.jobs if each >= group.machine.end]:
            if group.jobs[offset].live and not group.jobs[offset].attempts:
                del group.jobs[offset]

    # ---- what holds always ----

    @invariant()
    def q4_the_start_grows_and_passes_no_live_message(self) -> None:
        for group in getattr(self, "groups", ()):
            start = group.machine.start
            assert start >= group.start
            group.start = start
            assert not [o for o, job in group.jobs.items() if job.live and o < start]

    @invariant()
    def q6_in_flight_stays_within_its_bound(self) -> None:
        for group in getattr(self, "groups", ()):
            machine = group.machine
            unfinished = machine.ready + machine.delayed + machine.acquired + len(machine.dying)
            assert unfinished <= group.options["in_flight_max"]
            assert group.machine.acquired == len(self.held(group))

    @invariant()
    def q3_there_is_one_letter_for_a_message(self) -> None:
        for group in getattr(self, "groups", ()):
            assert len(group.letters) == len(set(group.letters))

    @invariant()
    def memory_follows_the_messages_and_not_the_history(self) -> None:
        for group in getattr(self, "groups", ()):
            assert len(group.machine._times) <= 64 + 2 * group.options["in_flight_max"] + 1


TestShareMachine = ShareMachine.TestCase
TestShareMachine.settings = settings(
    max_examples=sized(300, 1_000, 20_000), stateful_step_count=40, deadline=None
)


def filled(count: int = 3, **options: Any) -> SharePartition:
    machine = SharePartition(**options)
    for offset in range(count):
        machine.take_in(offset, 0)
    return machine


def test_q1_a_message_is_acquired_by_one_at_a_time() -> None:
    machine = filled(2)
    leases = [machine.acquire(0, 30) for _ in range(3)]
    assert [lease and lease.offset for lease in leases] == [0, 1, None]
    again = machine.acquire(30, 60)  # at its deadline a lease has ended
    assert again is not None and (again.offset, again.attempts) == (0, 2)
    assert leases[0] is not None
    with pytest.raises(LeaseLostError):
        machine.acknowledge(leases[0])


def test_a_message_given_back_gets_every_second_place() -> None:
    machine = filled(6)
    first = machine.acquire(0, 1000)
    assert first is not None
    machine.release(first, 0)
    order = []
    for _ in range(6):
        lease = machine.acquire(1, 1000)
        assert lease is not None
        order.append(lease.offset)
        if lease.offset == 0 and lease.attempts < 4:
            machine.release(lease, 1)
    assert order == [0, 1, 0, 2, 0, 3]


def test_an_expired_lease_of_the_last_attempt_waits_for_its_letter() -> None:
    machine = filled(1, max_attempts=1)
    machine.acquire(0, 30)
    machine.advance(30)
    assert list(machine.dying) == [0] and machine.start == 0
    assert machine.acquire(31, 60) is None
    machine.archive(0)
    assert machine.start == 1 and not machine.dying


def test_an_attempt_that_is_noted_survives_a_crash() -> None:
    machine = filled(2)
    lease = machine.acquire(0, 30)
    assert lease is not None
    machine.note_attempt(lease)
    changes = machine.take_changes()
    again = SharePartition(changes.start, changes.batches, max_attempts=2)
    again.take_in(0, 0)
    second = again.acquire(0, 30)
    assert second is not None and second.attempts == 2


# ---- records ----


def test_updates_are_applied_over_a_snapshot() -> None:
    state = ShareState()
    whole = Changes(2, [StateBatch(4, 9, ACKNOWLEDGED, 1), StateBatch(12, 12, AVAILABLE, 3)])
    state.see(SNAPSHOT, encode_snapshot(whole, epoch=7, finished=6, created_ms=5, now_ms=6), 40)
    assert (state.start, state.epoch, state.created_ms, state.snapshot_at) == (2, 7, 5, 40)
    update = Changes(3, [StateBatch(6, 7, ARCHIVED, 5), StateBatch(9, 13, ACKNOWLEDGED, 1)])
    value = encode_update(update, epoch=7, finished=9)
    for _ in range(2):  # twice is as good as once
        state.see(UPDATE, value, 41)
        assert state.start == 3
        assert state.batches == [
            StateBatch(4, 5, ACKNOWLEDGED, 1),
            StateBatch(6, 7, ARCHIVED, 5),
            StateBatch(8, 8, ACKNOWLEDGED, 1),
            StateBatch(9, 13, ACKNOWLEDGED, 1),
        ]
    assert state.updates == 2


@pytest.mark.parametrize("kind", [SNAPSHOT, UPDATE])
def test_a_key_is_read_as_it_was_written(kind: int) -> None:
    import uuid

    key = ShareKey("workers", uuid.uuid4(), 3)
    assert ShareKey.decode(key.encode(kind)) == (kind, key)
    assert ShareKey.decode(b"\0\x05") is None


def reopened(machine: SharePartition, changes: Changes) -> SharePartition:
    return SharePartition(changes.start, changes.batches, in_flight_max=machine.in_flight_max)


def test_a_purge_with_a_leased_message_is_kept_as_a_snapshot() -> None:
    machine = filled(2, in_flight_max=2)
    machine.acquire(0, 30)
    assert machine.purge(10) == 1
    assert machine.needs_snapshot
    again = reopened(machine, machine.snapshot())
    assert again.take_in(0, 0)
    assert again.end == 10 and again.start == 0


def test_a_snapshot_keeps_states_that_were_not_read_again_yet() -> None:
    kept = [StateBatch(1, 4, ACKNOWLEDGED, 1), StateBatch(6, 6, AVAILABLE, 2)]
    machine = SharePartition(0, kept, in_flight_max=1)
    machine.take_in(0, 0)  # there is no room for more
    assert reopened(machine, machine.snapshot()).snapshot() == Changes(0, kept)
