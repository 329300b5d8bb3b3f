"""Timers: the wheel against a heap, timers on a clock, operations that end exactly once."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from logstore.clock import ManualClock
from logstore.timers import LEVELS, Purgatory, Timeout, Timers, TimingWheel

DELAYS = st.one_of(
    st.integers(-5, 70),
    st.integers(0, 5_000),
    st.integers(0, 1 << 40),
    st.sampled_from([63, 64, 65, 4095, 4096, 4097, 262_143, 262_144, (1 << 63) - 1]),
)


def nothing() -> None:
    pass


class WheelAgainstHeap(RuleBasedStateMachine):
    """Every timeout fires at the time of a heap, in the heap's sequence, and none twice."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000
        self.wheel = TimingWheel(self.now)
        self.heap: list[tuple[int, int]] = []
        self.timeouts: dict[int, Timeout] = {}
        self.count = 0

    @rule(delay=DELAYS)
    def add(self, delay: int) -> None:
        due = min(self.now + delay, (1 << 63) - 1)
        self.count += 1
        self.timeouts[self.count] = self.wheel.add(due, nothing)
        heapq.heappush(self.heap, (max(due, self.now), self.count))

    @precondition(lambda self: self.timeouts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.timeouts)))
        timeout = self.timeouts.pop(number)
        self.heap = [entry for entry in self.heap if entry[1] != number]
        heapq.heapify(self.heap)
        assert timeout.pending
        assert self.wheel.cancel(timeout)
        assert not timeout.pending
        assert not self.wheel.cancel(timeout)

    @rule(step=DELAYS)
    def advance(self, step: int) -> None:
        self.now = max(self.now, min(self.now + step, (1 << 63) - 1))
        wanted = []
        while self.heap and self.heap[0][0] <= self.now:
            wanted.append(self.timeouts.pop(heapq.heappop(self.heap)[1]))
        due = self.wheel.advance(self.now)
        assert due == wanted
        assert not any(timeout.pending for timeout in due)

    @rule()
    def advance_as_told(self) -> None:
        """A thread that sleeps until the time that the wheel returns misses no timeout."""
        due = self.wheel.next_due_ms()
        if due is not None:
            self.advance(due - self.now)

    @invariant()
    def holds_the_same(self) -> None:
        assert len(self.wheel) == len(self.heap)
        assert set(self.wheel) == set(self.timeouts.values())
        due = self.wheel.next_due_ms()
        if self.heap:
            assert due is not None and self.now <= due <= self.heap[0][0]
        else:
            assert due is None


TestWheelAgainstHeap = WheelAgainstHeap.TestCase
TestWheelAgainstHeap.settings = settings(max_examples=150, stateful_step_count=40)


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_who_follows_the_wheel_needs_few_steps_however_far_the_timeout(
    now: int, delay: int
) -> None:
    wheel = TimingWheel(now)
    timeout = wheel.add(now + delay, nothing)
    steps = 0
    while timeout.pending:
        due = wheel.next_due_ms()
        assert due is not None
        wheel.advance(due)
        steps += 1
    assert steps <= LEVELS
    assert wheel.now_ms == now + delay


def test_a_clock_that_goes_back_changes_nothing() -> None:
    wheel = TimingWheel(1_000)
    timeout = wheel.add(1_010, nothing)
    assert wheel.advance(500) == []
    assert wheel.now_ms == 1_000
    assert wheel.advance(1_010) == [timeout]


# ---- on a clock ----


def test_timers_call_what_is_due_and_no_more(fake_clock: ManualClock) -> None:
    timers = Timers(fake_clock)
    called: list[str] = []
    timers.after(0.5, lambda: called.append("half"))
    late = timers.after(2, lambda: called.append("two"))
    timers.after(1, lambda: called.append("one"))
    assert timers.run_due() == 0 and timers.next_in() is not None
    fake_clock.advance(499)
    assert timers.run_due() == 0
    fake_clock.advance(1)
    assert timers.run_due() == 1 and called == ["half"]
    assert timers.cancel(late) and not timers.cancel(late)
    fake_clock.advance(10_000)
    timers.run_due()
    assert called == ["half", "one"]
    assert timers.next_in() is None


def test_a_timeout_that_fails_stops_no_other(
    fake_clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    timers = Timers(fake_clock)
    called: list[int] = []

    def fail() -> None:
        raise RuntimeError("as planned")

    timers.after(1, fail)
    timers.after(1, lambda: called.append(1))
    fake_clock.advance(1_000)
    assert timers.run_due() == 2
    assert called == [1]
    assert "as planned" in caplog.text


def test_a_timeout_may_add_another(fake_clock: ManualClock) -> None:
    timers = Timers(fake_clock)
    called: list[int] = []

    def again() -> None:
        called.append(fake_clock.now_ms)
        timers.after(1, again)

    timers.after(1, again)
    for _ in range(3):
        fake_clock.advance(1_000)
        timers.run_due()
    assert len(called) == 3


def test_the_thread_notices_an_earlier_timeout_and_ends() -> None:
    timers = Timers()
    first = threading.Event()
    timers.after(3600, nothing)
    with timers:
        timers.start()
        timers.start()
        timers.after(0.01, first.set)
        assert first.wait(60)
        assert timers.running
    assert not timers.running
    timers.start()
    assert not timers.running


# ---- purgatory ----


class Door:
    """Something to wait for."""

    def __init__(self, purgatory: Purgatory) -> None:
        self.purgatory = purgatory
        self.open = False
        self.ended: list[bool] = []

    def wait(self, timeout: float) -> Callable[[], bool]:
        operation = self.purgatory.wait(["door"], timeout, lambda: self.open, self.ended.append)
        return lambda: operation.over


def test_what_is_so_already_ends_at_once(fake_clock: ManualClock) -> None:
    timers = Timers(fake_clock)
    door = Door(Purgatory(timers))
    door.open = True
    assert door.wait(5)()
    assert door.ended == [True]
    assert len(timers) == len(door.purgatory) == 0


def test_an_operation_ends_by_its_event_and_not_again_by_its_time(fake_clock: ManualClock) -> None:
    timers = Timers(fake_clock)
    door = Door(Purgatory(timers))
    over = door.wait(5)
    assert door.purgatory.notify("door") == 0 and not over()
    door.open = True
    assert door.purgatory.notify("window") == 0 and not over()
    assert door.purgatory.notify("door") == 1 and over()
    fake_clock.advance(10_000)
    timers.run_due()
    assert door.purgatory.notify("door") == 0
    assert door.ended == [True]
    assert len(timers) == len(door.purgatory) == 0


def test_an_operation_ends_by_its_time_and_not_again_by_its_event(fake_clock: ManualClock) -> None:
    timers = Timers(fake_clock)
    door = Door(Purgatory(timers))
    over = door.wait(5)
    fake_clock.advance(5_000)
    timers.run_due()
    assert over() and door.ended == [False]
    door.open = True
    assert door.purgatory.notify("door") == 0
    assert door.ended == [False]


def test_an_operation_that_is_cancelled_calls_nobody(fake_clock: ManualClock) -> None:
    timers = Timers(fake_clock)
    purgatory = Purgatory(timers)
    ended: list[bool] = []
    operation = purgatory.wait(["a", "b"], 5, lambda: False, ended.append)
    assert len(purgatory) == 2
    assert purgatory.cancel(operation) and not purgatory.cancel(operation)
    fake_clock.advance(5_000)
    timers.run_due()
    assert ended == [] and len(timers) == len(purgatory) == 0


def test_of_many_threads_that_end_an_operation_one_does() -> None:
    timers = Timers()
    purgatory = Purgatory(timers)
    for _ in range(200):
        ended: list[bool] = []
        so = threading.Event()
        operation = purgatory.wait(["x"], 60, so.is_set, ended.append)
        start = threading.Barrier(4)

        def race(so: threading.Event = so, start: threading.Barrier = start) -> None:
            start.wait()
            so.set()
            purgatory.notify("x")

        threads = [threading.Thread(target=race) for _ in range(3)]
        for thread in threads:
            thread.start()
        start.wait()
        purgatory._expire(operation)
        for thread in threads:
            thread.join()
        assert len(ended) == 1
    assert len(timers) == len(purgatory) == 0
