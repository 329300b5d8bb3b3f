"""A wall clock that leaps ahead makes nothing old: no record, producer, offset or transaction."""

from __future__ import annotations

import logging


import pytest
from hypothesis import given
from hypothesis import strategies as st

import logstore
from logstore import Compactor, Groups, ManualClock, Producer, TopicPartition, Transactions
from logstore.clock import ClockGuard, GuardedClock, SystemClock
from logstore.groups.coordinator import GroupCoordinator
from tests.conftest import MakeLog
from tests.test_compaction import batches_of, compact, pairs
from tests.test_transactions_in_log import Producing

DAY = 86_400_000
NOW = 1_700_000_000_000


# ---- the guard ----


def test_a_clock_that_runs_fast_is_a_leap_in_small_steps() -> None:
    """Each step is within the tolerance, all of them are not."""
    guard = ClockGuard(NOW, 0.0)
    for second in range(1, 2001):
        now = guard.look(NOW + second * 200_000, float(second))
    assert now - NOW <= 2_000_000 + 300_000 + 20_000


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 20_000_000),
            st.sampled_from([0, 0, 0, 1, -1, 40, -DAY, DAY, 9 * DAY, 299_000, -299_000]),
        ),
        max_size=40,
    )
)
def test_guarded_time_is_never_late_and_gains_little(steps: list[tuple[int, int]]) -> None:
    """It is never after the wall clock, and gains at most the tolerance and 1 % of steady time.

    `believe_after_ms` is out of reach here.
    """
    guard = ClockGuard(NOW, 0.0, believe_after_ms=10**15)
    wall, steady, lowest = NOW, 0, NOW
    for passed, leap in steps:
        wall, steady = wall + passed + leap, steady + passed
        now = guard.look(wall, steady / 1000)
        assert now <= wall
        assert now - steady <= lowest + 300_000 + steady // 100 + 1
        lowest = min(lowest, now - steady)
        assert guard.leap_ms == wall - now


def test_all_uses_of_a_clock_share_one_guard() -> None:
    clock = ManualClock()
    assert GuardedClock.of(clock) is not GuardedClock.of(ManualClock())
    one = GuardedClock.of(clock)
    assert GuardedClock.of(clock) is one
    assert GuardedClock.of(None) is GuardedClock.of(SystemClock())


def test_a_leap_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    guarded = GuardedClock.of(clock)
    clock.leap(2 * DAY)
    with caplog.at_level(logging.WARNING, "logstore.clock"):
        for _ in range(3):
            guarded.now_ms()
            clock.advance(1000)
    assert len(caplog.records) == 1
    assert f"leapt {2 * DAY} ms ahead" in caplog.text
