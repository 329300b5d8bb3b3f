"""Strands against a model: the invariants W1 to W7, over random histories of a partition.

The machine is the reader, the handlers, the committer and the crash.  The model is a dict of
offset to the state that the user can see.

    W1  handlers of one strand run one after the other, in the order of offsets
    W2  a record has at most one handler at a time
    W3  the committed offset is at most the least open one, and only grows
    W4  after a crash, the records that are handed out are those not finished in the last commit
    W5  each record ends once
    W6  open records and bytes are within their limits
    W7  the metadata fits
"""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from logstore import Outgoing, PoisonRecordError, Record, TopicPartition
from logstore.workers.items import (
    DONE,
    SKIPPED,
    Failed,
    Item,
    Limits,
    Outputs,
    State,
    Work,
)
from logstore.workers.progress import Place, Progress
from logstore.workers.strands import Strands

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
PLACE = Place("g", uuid.UUID(int=1), 0)
LIMITS = Limits(records=12, bytes=400, crashes=3)
OUT = Outputs((Outgoing("out", b"x"),))


def record(offset: int, key: bytes | None = None, size: int = 3) -> Record:
    made = Record(b"v" * size, key=key)
    return made.replace(offset=offset) if hasattr(made, "replace") else _at(made, offset)


class _Numbered:
    """A record with an offset, as a log returns it."""

    def __init__(self, base: Record, offset: int) -> None:
        self.value, self.key, self.headers = base.value, base.key, base.headers
        self.offset = offset


def _at(base: Record, offset: int) -> Record:
    return _Numbered(base, offset)  # type: ignore[return-value]


def rows(offsets: Iterable[int], key: Hashable = None) -> list[tuple[Record, Hashable]]:
    return [(record(offset), key) for offset in offsets]


def check(strands: Strands) -> None:
    """Assert what holds between any two calls."""
    ready = [*strands._ready, *strands.probation.gated, *strands.probation._opened]
    listed = ready + [strand for held in strands.held.values() for strand in held.aside]
    assert len(listed) == len(set(map(id, listed))), "a strand is listed twice"
    assert not any(strand.busy or not strand.queue for strand in listed)
    items = [item for held in strands.held.values() for item in held.items.values()]
    assert strands.bytes == sum(item.size for item in items)
    assert strands.waiting == sum(item.state is State.WAITING for item in items)
    assert {item.work for item in items if item.work} == set(strands.running)
    for held in strands.held.values():
        assert sorted([*held.items, *held.restored]) == list(held.progress)
        assert held.running == sum(item.work is not None for item in held.items.values())
        assert held.waiting == sum(i.state is State.WAITING for i in held.items.values())
        assert len(held.items) <= strands.limits.records
    waiting = {id(item.strand) for item in items if item.state is State.WAITING}
    at_work = (State.RUNNING, State.FAILED, State.BLOCKED)
    busy = {id(item.strand) for item in items if item.state in at_work}
    assert waiting - busy == {id(strand) for strand in listed}, "a strand would never start"


def strands_of(*offsets: int, limits: Limits = LIMITS, key: Hashable = None) -> Strands:
    strands = Strands(limits)
    strands.assign(T0, PLACE, Progress(offsets[0] if offsets else 0))
    assert strands.offer(T0, rows(offsets, key)) is None
    return strands


def offsets_of(works: list[Work]) -> list[int]:
    return [work.item.offset for work in works]


# ---- each invariant, alone ----


def test_w1_a_strand_starts_its_next_record_only_after_the_one_before_has_ended() -> None:
    strands = strands_of(0, 1, 2, key=b"k")
    (first,) = strands.take(1, 0.0)
    assert strands.take(9, 0.0) == []
    strands.finish(first, DONE)
    # A chunk of one strand is taken in order, for one thread.
    chunk = strands.take(9, 0.0)
    assert offsets_of(chunk) == [1, 2]
    strands.finish(chunk[0], Failed(ValueError()))
    strands.put_back(chunk[1:])
    assert strands.take(9, 0.0) == []  # the failed record keeps the strand
    ((item, _),) = strands.collect()
    strands.retry(item, due=5.0)
    assert strands.wake(4.9) == 0 and strands.take(9, 4.9) == []
    assert strands.wake(5.0) == 1
    assert offsets_of(strands.take(9, 5.0)) == [1, 2]
    check(strands)


def test_w2_a_start_that_was_abandoned_cannot_end_the_next_one() -> None:
    strands = strands_of(0)
    (old,) = strands.take(1, 0.0)
    strands.finish(old, Failed(TimeoutError()))
    ((item, _),) = strands.collect()
    strands.retry(item, due=0.0)
    strands.wake(0.0)
    (new,) = strands.take(1, 0.0)
    assert not strands.finish(old, DONE)
    assert strands.running == {new: None}
    assert strands.finish(new, DONE)
    check(strands)


def test_w3_the_committed_offset_stays_at_the_least_open_one() -> None:
    strands = strands_of(0, 1, 2)
    works = strands.take(9, 0.0)
    strands.finish(works[2], DONE)
    strands.finish(works[1], SKIPPED)
    assert strands.snapshot().offsets[T0].offset == 0
    strands.finish(works[0], DONE)
    snapshot = strands.snapshot()
    assert snapshot.offsets[T0].offset == 3
    strands.saved(snapshot)
    assert strands.snapshot().offsets == {}
    assert strands.counts.closed == {DONE: 2, SKIPPED: 1}


def test_w4_a_restart_hands_out_what_was_not_finished_in_the_commit() -> None:
    strands = strands_of(*range(10))
    works = strands.take(99, 0.0)
    for work in works[2:4] + works[6:]:
        strands.finish(work, DONE)
    commit = strands.snapshot().offsets[T0]
    again = Strands(LIMITS)
    again.assign(T0, PLACE, Progress.decode(commit.metadata, PLACE, commit.offset))
    # The log has offset 5 no more: compaction removed it.
    assert again.offer(T0, rows([0, 1, 2, 3, 4, 6, 7, 8, 9, 10])) is None
    assert offsets_of(again.take(99, 0.0)) == [0, 1, 4, 10]
    check(again)


def test_w4_a_record_with_outputs_is_open_until_its_transaction_commits() -> None:
    strands = strands_of(0, 1)
    first, second = strands.take(9, 0.0)
    strands.finish(first, OUT)
    strands.finish(second, DONE)
    assert strands.snapshot().offsets[T0].offset == 0  # a plain commit does not finish it
    items = strands.depart()
    assert strands.snapshot().offsets[T0].offset == 2
    strands.stay(items)
    assert strands.snapshot().offsets[T0].offset == 0
    check(strands)
    items = strands.depart()
    snapshot = strands.snapshot()
    strands.gone(items)
    strands.saved(snapshot)
    assert strands.snapshot().offsets == {} and len(strands) == 0
    check(strands)


def test_w5_outputs_that_cannot_be_sent_fail_their_record_alone() -> None:
    strands = strands_of(0, 1, 2, key=b"k")
    (work,) = strands.take(1, 0.0)
    strands.finish(work, OUT)
    strands.fail_leaving(work.item, ValueError())
    assert strands.leaving == 0 and strands.take(9, 0.0) == []
    check(strands)
    ((item, _),) = strands.collect()
    strands.close(item, SKIPPED)
    assert offsets_of(strands.take(9, 0.0)) == [1, 2]
    check(strands)


def test_w6_records_without_room_are_refused_by_their_offset() -> None:
    strands = strands_of(limits=Limits(records=3, bytes=10))
    assert strands.offer(T0, rows(range(9))) == 3
    assert strands.room(T0) == 0
    (work, *_) = strands.take(9, 0.0)
    strands.finish(work, DONE)
    assert strands.room(T0) == 1
    assert strands.offer(T0, [(record(3, size=5), None)]) == 3  # 6 of 10 bytes are taken
    # A record that is larger than the limit is taken alone.
    for each in list(strands.running):
        strands.finish(each, DONE)
    assert strands.offer(T0, [(record(3, size=99), None), (record(4), None)]) == 4
    assert strands.room(T0) == 0
    check(strands)


def test_w7_records_are_refused_before_the_text_is_full() -> None:
    strands = strands_of(limits=Limits(records=10**6, bytes=10**9))
    refused = strands.offer(T0, rows(range(0, 100_000, 200)) + rows(range(100_000, 200_000)))
    assert refused is not None
    assert 2_900 < strands.held.get(T0).progress.size <= 3_000  # type: ignore[union-attr]
    assert len(strands.snapshot().offsets[T0].metadata) <= 4_096


# ---- partitions ----


def test_a_paused_partition_starts_nothing_and_another_goes_on() -> None:
    strands = strands_of(0, 1)
    strands.assign(T1, PLACE, Progress(0))
    strands.offer(T1, rows([0]))
    strands.pause([T0], paused=True)
    assert [work.item.partition for work in strands.take(9, 0.0)] == [T1]
    assert strands.room(T0) == 0
    check(strands)
    strands.pause([T0], paused=False)
    assert offsets_of(strands.take(9, 0.0)) == [0, 1]
    check(strands)


def test_the_next_owner_keeps_a_strand_busy_until_the_old_handler_ends() -> None:
    old = strands_of(0, 1, key=b"k")
    (running,) = old.take(1, 0.0)
    old.revoke([T0])
    assert old.take(9, 0.0) == [] and old.own_running([T0]) == [running]
    (left,) = old.release(T0)
    assert left is running and not old.finish(running, DONE)
    for order in ("offered first", "ended first"):
        new = Strands(LIMITS)
        new.assign(T0, PLACE, Progress(0))
        new.adopt(T0, [left])
        if order == "ended first":
            new.inherit(T0, 0, DONE)
        new.offer(T0, rows([0, 1, 2], b"k"))
        if order == "offered first":
            assert new.take(9, 0.0) == [] and len(new.running) == 1
            assert new.own_running() == []
            new.inherit(T0, 0, DONE)
        new.inherit(T0, 0, DONE)  # a second time changes nothing
        assert offsets_of(new.take(9, 0.0)) == [1, 2]
        check(new)


def test_a_start_is_adopted_through_several_owners() -> None:
    old = strands_of(0, key=b"k")
    (running,) = old.take(1, 0.0)
    works = old.release(T0)
    for reached in (True, False, True):
        owner = Strands(LIMITS)
        owner.assign(T0, PLACE, Progress(0))
        owner.adopt(T0, works)
        if reached:
            owner.offer(T0, rows([0], b"k"))
        check(owner)
        works = owner.release(T0)
        assert works == [running]


def test_a_truncated_log_replaces_the_records_that_were_read() -> None:
    strands = strands_of(*range(6), key=b"k")
    (work,) = strands.take(1, 0.0)
    strands.finish(work, DONE)
    strands.take(1, 0.0)
    assert strands.offer(T0, rows([3, 4], b"k")) is None
    check(strands)
    progress = strands.held.get(T0).progress  # type: ignore[union-attr]
    assert (list(progress), progress.seen) == ([1, 2, 3, 4], 5)
    assert strands.offer(T0, rows([1], b"k")) is None
    check(strands)
    assert offsets_of(strands.take(9, 0.0)) == [1]


def test_the_reader_jumps_over_finished_records() -> None:
    strands = Strands(LIMITS)
    strands.assign(T0, PLACE, Progress(5_000, [10, 4_000]))
    assert strands.read_to(T0, 10) == 10
    strands.offer(T0, rows([10]))
    assert strands.read_to(T0, 11) == 4_000
    strands.offer(T0, rows([4_000]))
    assert strands.read_to(T0, 4_001) == 5_000
    assert strands.read_to(T0, 7_000) == 7_000  # a gap without records
    assert strands.held.get(T0).progress.seen == 7_000  # type: ignore[union-attr]
    check(strands)


# ---- probation, rate ----


def test_a_record_on_probation_starts_after_its_start_is_committed() -> None:
    strands = Strands(LIMITS)
    strands.assign(T0, PLACE, Progress(2, [0, 1], {0: 2, 1: 3}), probation=True)
    strands.offer(T0, rows([0, 1, 2]))
    assert strands.take(9, 0.0) == [] and strands.probation.waits
    assert strands.count_starts(limit=9)
    assert strands.take(9, 0.0) == []
    ((poisoned, error),) = strands.collect()
    assert poisoned.offset == 1 and isinstance(error, PoisonRecordError)
    written = strands.snapshot().offsets[T0]
    assert Progress.decode(written.metadata, PLACE, 0).starts == {0: 3, 1: 3}
    strands.open_gate()
    (work,) = strands.take(9, 0.0)
    assert work.item.offset == 0
    # An attempt that ends without a crash is not counted.
    strands.finish(work, Failed(ValueError()))
    assert strands.held.get(T0).progress.starts == {0: 2, 1: 3}  # type: ignore[union-attr]
    check(strands)


def test_a_suspect_starts_alone_so_that_it_alone_is_blamed() -> None:
    strands = Strands(LIMITS)
    strands.assign(T0, PLACE, Progress(3, [0, 1, 2], {0: 1, 1: 1}), probation=True)
    strands.offer(T0, rows([0, 1, 2, 3]))
    for suspect in (0, 1):
        assert strands.count_starts(limit=9)
        strands.open_gate()
        (work,) = strands.take(9, 0.0)
        assert work.item.offset == suspect
        assert not strands.count_starts(limit=9)
        strands.finish(work, DONE)
    assert strands.count_starts(limit=9)
    strands.open_gate()
    assert offsets_of(strands.take(9, 0.0)) == [2, 3]  # these have not been started before
    check(strands)


def test_a_clean_commit_counts_no_start_that_did_not_begin() -> None:
    strands = Strands(LIMITS)
    strands.assign(T0, PLACE, Progress(0), probation=True)
    strands.offer(T0, rows([0]))
    strands.count_starts(limit=9)
    strands.revoke([T0])
    strands.open_gate()
    (written,) = strands.snapshot(clean=[T0]).offsets.values()
    found = Progress.decode(written.metadata, PLACE, 0)
    assert found.clean and found.starts == {}


def test_the_rate_is_a_bound_over_every_second() -> None:
    strands = Strands(Limits(records=1000), rate=50.0)
    strands.assign(T0, PLACE, Progress(0))
    strands.offer(T0, rows(range(1000)))
    started, now = [], 0.0
    while now < 4.0:
        started += [now] * len(strands.take(64, now))
        due = strands.next_due()
        assert due is not None and due > now
        now = due
    assert max(sum(t <= each < t + 1.0 for each in started) for t in started) <= 55
    assert len(started) == pytest.approx(4 * 50, abs=6)


# ---- random histories ----


class StrandsMachine(RuleBasedStateMachine):
    """One partition with its reader, handlers, commits, crashes and owners."""

    KEYS = (None, b"a", b"b", b"c")

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Record, Hashable]] = []  # offsets are dense
        self.now = 0.0
        self.commit: tuple[int, str] | None = None
        self.done_at_commit: set[int] = set()
        self.finished: set[int] = set()  # what this life, or a commit before, has finished
        self.handlers: dict[int, Work] = {}  # that run, also for owners before
        self.last_end: dict[Hashable, int] = {}  # of a key: the offset whose handler ended last
        self.started: dict[int, int] = {}
        self.outputs: set[int] = set()
        self.orphans: dict[int, Work] = {}
        self._begin(crashed=False)

    def _begin(self, *, crashed: bool) -> None:
        self.strands = Strands(LIMITS)
        progress = Progress(0)
        if self.commit is not None:
            offset, text = self.commit
            progress = Progress.decode(text, PLACE, offset, end=len(self.log))
            assert progress.committed == offset
        self.strands.assign(T0, PLACE, progress, probation=crashed and self.commit is not None)
        self.position = progress.committed
        self.committed = progress.committed
        self.outputs = set()
        self.ended: dict[int, object] = {}
        if crashed:
            self.handlers, self.orphans = {}, {}
        self.strands.adopt(T0, self.orphans.values())
        # W4: finished are those of the last commit, and no others.
        self.finished = set(self.done_at_commit)

    # ---- what happens ----

    @rule(key=st.sampled_from(KEYS), size=st.integers(0, 150), count=st.integers(1, 5))
    def append(self, key: bytes | None, size: int, count: int) -> None:
        for _ in range(count):
            self.log.append((record(len(self.log), key, size), key))

    @rule(count=st.integers(1, 20))
    def read(self, count: int) -> None:
        records = self.log[self.position : self.position + count]
        refused = self.strands.offer(T0, records)
        self.position = len(records) + self.position if refused is None else refused
        held = self.strands.held.get(T0)
        assert held is not None
        # W6
        assert len(held.items) <= LIMITS.records
        assert self.strands.bytes <= max(LIMITS.bytes + 1, *(i.size for i in held.items.values()),
                                         0, 0) or len(held.items) == 1 or self.outputs  # fmt: skip
        self.position = max(self.position, self.strands.read_to(T0, self.position))
        for offset in [each for each in self.ended if each < self.position]:
            self._note(offset, self.ended.pop(offset))
        self._decide(0)

    @rule(limit=st.integers(1, 6))
    def take(self, limit: int) -> None:
        if self.strands.count_starts(limit):
            self._save()
        self.strands.open_gate()
        works = self.strands.take(limit, self.now)
        began: list[Work] = []
        back: list[Work] = []
        for work in works:
            offset, key = work.item.offset, self.log[work.item.offset][1]
            if any(self.log[each.item.offset][1] == key is not None for each in began):
                # The rest of a chunk of one strand: its thread has not come to it.
                back.append(work)
                continue
            # W2, W5
            assert offset not in self.handlers and offset not in self.finished
            if key is not None:
                # W1: none of the strand runs, and none was passed over.
                assert not any(self.log[each][1] == key for each in self.handlers)
                assert all(self.log[each][1] != key or each in self.finished or
                           each in self.outputs for each in range(offset))  # fmt: skip
            self.handlers[offset] = work
            began.append(work)
        # In two parts: the thread and the control thread may both give back a part.
        for part in (back[1::2], back[::2]):
            self.strands.put_back(part)

    def _end(self, data: st.DataObject, outcome: object) -> None:
        offset = data.draw(st.sampled_from(sorted(self.handlers)))
        work = self.handlers.pop(offset)
        taken = self.strands.finish(work, outcome)  # type: ignore[arg-type]
        assert taken == (offset not in self.orphans)
        if not taken:
            del self.orphans[offset]
            self.strands.inherit(T0, offset, outcome)  # type: ignore[arg-type]
            if offset >= self.position:
                self.ended[offset] = outcome  # it counts when the reader of the new owner is there
                return
        self._note(offset, outcome)

    def _note(self, offset: int, outcome: object) -> None:
        if outcome in (DONE, SKIPPED):
            self.finished.add(offset)
        elif isinstance(outcome, Outputs):
            self.outputs.add(offset)

    @precondition(lambda self: self.handlers)
    @rule(data=st.data(), outcome=st.sampled_from([DONE, SKIPPED, OUT]))
    def end(self, data: st.DataObject, outcome: object) -> None:
        self._end(data, outcome)

    @precondition(lambda self: self.handlers)
    @rule(data=st.data(), delay=st.integers(0, 3))
    def fail(self, data: st.DataObject, delay: int) -> None:
        self._end(data, Failed(ValueError()))
        self._decide(delay)

    def _decide(self, delay: int) -> None:
        for item, error in self.strands.collect():
            if isinstance(error, PoisonRecordError):
                self.strands.close(item, SKIPPED)
                self.finished.add(item.offset)
            else:
                self.strands.retry(item, self.now + delay)

    @precondition(lambda self: self.handlers)
    @rule(data=st.data())
    def time_out_and_abandon(self, data: st.DataObject) -> None:
        """The handler still runs; its outcome is ignored, as the user has chosen."""
        offset = data.draw(st.sampled_from(sorted(self.handlers)))
        if offset in self.orphans:
            return
        work = self.handlers.pop(offset)
        self.strands.finish(work, Failed(TimeoutError()))
        self._decide(0)
        assert not self.strands.finish(work, DONE)

    @rule(seconds=st.integers(0, 2))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.strands.wake(self.now)
        self._decide(0)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.strands.pause([T0], paused=paused)

    # ---- commits ----

    def _save(self) -> None:
        snapshot = self.strands.snapshot()
        for committed in snapshot.offsets.values():
            # W3, W7
            assert committed.offset >= self.committed
            assert len(committed.metadata) <= 4096
            self.committed = committed.offset
            self.commit = committed.offset, committed.metadata
            self.done_at_commit = set(self.finished)
        self.strands.saved(snapshot)

    @rule()
    def commit_plainly(self) -> None:
        self._save()

    @rule(aborted=st.booleans())
    def commit_in_a_transaction(self, aborted: bool) -> None:
        items: list[Item] = self.strands.depart()
        assert {item.offset for item in items} == self.outputs
        if aborted:
            self.strands.stay(items)
            return
        self.finished |= self.outputs
        self.outputs = set()
        self._save()
        self.strands.gone(items)

    # ---- other owners ----

    @rule(data=st.data())
    def crash_and_restart(self, data: st.DataObject) -> None:
        self._begin(crashed=True)

    @rule(waits=st.booleans())
    def revoke_and_assign(self, waits: bool) -> None:
        self.strands.revoke([T0])
        assert self.strands.take(9, self.now) == []
        if waits:
            for offset in sorted(set(self.handlers) - set(self.orphans)):
                assert self.strands.finish(self.handlers.pop(offset), DONE)
                self.finished.add(offset)
        self._decide(0)
        self._save()
        self._release()

    @rule()
    def lose_and_assign(self) -> None:
        self._release()

    def _release(self) -> None:
        works = self.strands.release(T0)
        assert {work.item.offset for work in works} == set(self.handlers)
        assert len(self.strands) == self.strands.bytes == self.strands.waiting == 0
        self.orphans = {work.item.offset: work for work in works}
        self._begin(crashed=False)
        # What the old owner had finished after its last commit is processed again, unless it runs.
        assert not self.finished & set(self.handlers)

    @invariant()
    def it_is_consistent(self) -> None:
        check(self.strands)
        held = self.strands.held.get(T0)
        assert held is not None
        ended = {o for o, each in held.foreign.items() if not isinstance(each, Work)}
        # Every offset that is not open is finished; those above `seen` are not read yet.
        closed = set(range(held.progress.seen)) - set(held.progress)
        assert closed - ended == self.finished - ended

    def teardown(self) -> None:
        """Everything ends: with enough turns, each record is processed."""
        self.strands.pause([T0], paused=False)
        turns = 0
        while len(self.finished) < len(self.log) or self.strands.snapshot().offsets:
            turns += 1
            assert turns < 20 * len(self.log) + 20, "a record is never processed"
            self.now += 10
            self.strands.wake(self.now)
            self.read(20)
            self.take(6)
            self._decide(0)
            for offset in sorted(self.handlers):
                work = self.handlers.pop(offset)
                if not self.strands.finish(work, DONE):
                    del self.orphans[offset]
                    self.strands.inherit(T0, offset, DONE)
                    if offset >= self.position:
                        self.ended[offset] = DONE
                        continue
                self.finished.add(offset)
            self.commit_in_a_transaction(False)
        assert self.commit is not None and self.commit[0] == len(self.log)


TestStrands = StrandsMachine.TestCase
TestStrands.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
