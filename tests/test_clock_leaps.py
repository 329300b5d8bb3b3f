"""A wall clock that leaps ahead makes nothing old: no record, producer, offset or transaction."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logstore
from logstore import (
    Compactor,
    Groups,
    ManualClock,
    Producer,
    TopicPartition,
    TransactionAbortedError,
    Transactions,
)
from logstore.clock import ClockGuard, GuardedClock, SystemClock
from logstore.coordinators.group_coordinator import GroupCoordinator
from tests.conftest import MakeLog
from tests.partition.test_transactions_in_log import Producing
from tests.upkeep.test_compaction import batches_of, compact, pairs

DAY = 86_400_000
NOW = 1_700_000_000_000


# ---- the guard ----


def test_a_clock_that_runs_fast_is_a_leap_in_small_steps() -> None:
    """Each step is within the tolerance, all of them are not."""
    guard = ClockGuard(NOW, 0.0)
    for second in range(1, 2001):
        now = guard.look(NOW + second * 200_000, float(second))
    assert now - NOW <= 2_000_000 + 300_000 + 20_000


def test_a_second_leap_has_to_last_for_a_day_of_its_own() -> None:
    guard = ClockGuard(NOW, 0.0)
    guard.look(NOW + DAY // 24, 0.0)
    almost = 86_399.0
    assert guard.look(NOW + DAY // 24 + 86_399_000 + 8 * DAY, almost) == NOW + 86_399_000
    assert guard.look(NOW + DAY // 24 + DAY + 8 * DAY, almost + 1) == NOW + DAY
    later = NOW + DAY // 24 + 86_399_000 + 9 * DAY
    assert guard.look(later, almost + 86_400) == later


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

    `believe_after_ms` is never reached here.
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


# ---- what is not forgotten ----


def test_one_append_at_a_leap_forgets_no_producer(make_log: MakeLog) -> None:
    clock = ManualClock(NOW)
    log = make_log(clock=clock)
    one, other = Producing(log, 1), Producing(log, 2)
    one.send(b"a")
    other.send(b"b")
    clock.leap(2 * DAY)
    assert log.append_batch(other.sent[0]).duplicate
    assert log.expire_producers() == []
    clock.leap(-2 * DAY)
    assert log.append_batch(one.sent[0]).duplicate
    assert log.end_offset == 2
    clock.advance(2 * DAY)
    assert log.expire_producers() == [1, 2]


def test_a_log_that_is_opened_at_a_leap_forgets_no_producer(make_log: MakeLog) -> None:
    clock = ManualClock(NOW)
    other = make_log("other-0", clock=clock)
    log = make_log(clock=clock)
    one = Producing(log, 1)
    one.send(b"a")
    log.close()
    clock.leap(2 * DAY)
    log = make_log(clock=clock)
    assert log.append_batch(one.sent[0]).duplicate
    assert not other.closed


def test_a_producer_of_old_records_is_not_silent(make_log: MakeLog) -> None:
    """Its records carry times of years ago; it appended them just now."""
    clock = ManualClock(NOW + 1000 * DAY)
    log = make_log(clock=clock)
    one = Producing(log, 1)
    for value in (b"a", b"b", b"c"):
        one.send(value)
    assert log.append_batch(one.sent[0]).duplicate
    assert log.expire_producers() == []
    clock.advance(DAY - 1)
    assert log.append_batch(one.sent[1]).duplicate
    clock.advance(1)
    assert log.expire_producers() == [1]


def test_a_record_of_the_far_future_makes_no_other_producer_old(make_log: MakeLog) -> None:
    clock = ManualClock(NOW)
    log = make_log(clock=clock)
    one = Producing(log, 1)
    one.send(b"a")
    log.append(b"b", timestamp=NOW + 10_000 * DAY)
    clock.advance(DAY // 2)
    assert log.append_batch(one.sent[0]).duplicate
    assert log.expire_producers() == []


def test_offsets_outlast_a_leap(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    with logstore.open(tmp_path, clock=clock, durability="os") as store:
        store.create_topic("t").append(b"a")
        groups = Groups(store)
        groups.commit("g", {("t", 0): 1})
        timers = GroupCoordinator.of(store).timers
        clock.leap(8 * DAY)
        clock.advance(700_000)
        assert timers.run_due() > 0
        assert groups.expire_offsets() == {}
        clock.leap(-8 * DAY)
        assert groups.committed("g")[TopicPartition("t", 0)].offset == 1
        assert groups.expire_offsets(now=clock.time_ms()) == {}
        clock.advance(8 * DAY)
        assert groups.expire_offsets() == {"g": [("t", 0)]}


def test_transactional_ids_outlast_a_leap(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    with logstore.open(tmp_path, clock=clock, durability="os") as store:
        with Producer(store, "x"):
            pass
        clock.leap(8 * DAY)
        assert Transactions.of(store).expire() == ()
        clock.leap(-8 * DAY)
        clock.advance(8 * DAY)
        assert Transactions.of(store).expire() == ("x",)


@pytest.mark.parametrize("leap", [2 * DAY, -2 * DAY], ids=["ahead", "back"])
@pytest.mark.parametrize("begins", ["before the leap", "at the leap"])
def test_a_transaction_times_out_by_the_time_that_passes(
    tmp_path: Path, leap: int, begins: str
) -> None:
    clock = ManualClock(NOW)
    with logstore.open(tmp_path, clock=clock, durability="os") as store:
        store.create_topic("t")
        transactions = Transactions.of(store)
        with Producer(store, "x", transaction_timeout=5) as producer:
            if begins == "at the leap":
                clock.leap(leap)
            tx = producer.transaction()
            tx.append("t", b"open")
            clock.leap(leap if begins == "before the leap" else -leap)
            clock.advance(4_999)
            transactions.run_due()
            assert transactions.describe("x").state == "Ongoing"
            clock.advance(2)
            transactions.run_due()
            assert transactions.describe("x").state == "CompleteAbort"
            with pytest.raises(TransactionAbortedError):
                tx.commit()
            with producer.transaction() as tx:
                tx.append("t", b"next")
        log = store["t"][0]
        assert log.last_stable_offset == log.end_offset


def test_tombstones_outlast_a_leap(make_log: MakeLog) -> None:
    clock = ManualClock(NOW)
    log = make_log(clock=clock, delete_retention_ms=DAY)
    log.append(b"value", key=b"k")
    log.append(None, key=b"k")
    log.roll()
    compact(log)
    clock.leap(2 * DAY)
    log.append(b"x", key=b"a")
    log.roll()
    compact(log)
    assert (1, b"k", None) in pairs(log)
    clock.leap(-2 * DAY)
    clock.advance(DAY)
    log.append(b"x", key=b"b")
    log.roll()
    assert Compactor(log, min_cleanable_dirty_ratio=0).run().tombstones_dropped == 1


def test_a_tombstone_that_is_met_at_a_leap_has_its_whole_time(make_log: MakeLog) -> None:
    """The clock may be right, and the guard a day late."""
    clock = ManualClock(NOW)
    log = make_log(clock=clock, delete_retention_ms=2 * DAY)
    log.append(None, key=b"k")
    log.roll()
    clock.leap(9 * DAY)
    compact(log)
    (met,) = [batch for batch in batches_of(log.path) if batch.records]
    assert met.delete_horizon == clock.time_ms() + 2 * DAY


def test_young_records_wait_for_the_minimum_lag_at_a_leap(make_log: MakeLog) -> None:
    clock = ManualClock(NOW)
    log = make_log(clock=clock, min_compaction_lag_ms=DAY)
    log.append(b"1", key=b"k")
    log.append(b"2", key=b"k")
    log.roll()
    clock.leap(2 * DAY)
    compact(log)
    assert len(pairs(log)) == 2


def test_a_dedupe_id_outlasts_a_leap(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    with logstore.open(tmp_path, clock=clock, durability="os") as store:
        store.create_topic("t")
        with Producer(store, dedupe_window=60.0) as producer:
            first = producer.append("t", b"a", dedupe_id="1")
            clock.leap(2 * DAY)
            assert producer.append("t", b"a", dedupe_id="1") == first
            producer.append("t", b"b", dedupe_id="2")
            assert store["t"][0][-1].timestamp == clock.time_ms(), "the wall clock may be right"
            clock.leap(-2 * DAY)
            assert producer.append("t", b"a", dedupe_id="1") == first
            clock.advance(60_001)
            assert producer.append("t", b"a", dedupe_id="1") != first
