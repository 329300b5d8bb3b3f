"""Retention: the decision of a policy with its reason, and the files that enforcing it leaves."""

from __future__ import annotations

import datetime
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore import (
    ClosedError,
    ConfigError,
    ManualClock,
    OffsetOutOfRangeError,
    Partition,
    PartitionConfig,
    ReadOnlyError,
    RetentionDecision,
    RetentionPolicy,
)
from logstore.clock import ClockGuard
from logstore.log.retention import SegmentFacts
from tests.conftest import MakeLog

DAY = 86_400_000
NOW = 1_700_000_000_000


def facts(*segments: tuple[int, int, int]) -> list[SegmentFacts]:
    """(records, bytes, newest timestamp) each, from offset 0 on."""
    found: list[SegmentFacts] = []
    for records, size, newest in segments:
        base = found[-1].end_offset if found else 0
        found.append(
            SegmentFacts(
                base_offset=base, end_offset=base + records, size_bytes=size, max_timestamp=newest
            )
        )
    return found


def going(decisions: list[RetentionDecision]) -> list[int]:
    return [decision.base_offset for decision in decisions if decision.delete]


# ---- the rules ----


def test_no_limit_keeps_everything_and_says_so() -> None:
    decisions = RetentionPolicy().plan(facts((5, 100, 0), (5, 100, 0)), NOW)
    assert going(decisions) == []
    assert decisions[0].reason == "no limit is set"
    assert decisions[1].reason == "the segment at 0 before it stays"
    assert [decision.eligible_at_ms for decision in decisions] == [None, None]


def test_a_segment_goes_when_its_newest_record_is_older_than_allowed() -> None:
    policy = RetentionPolicy(max_age_ms=DAY)
    segments = facts((5, 100, NOW - DAY - 1), (5, 100, NOW - DAY), (5, 100, NOW))
    decisions = policy.plan(segments, NOW)
    assert going(decisions) == [0]
    assert decisions[0].rule == "age"
    assert f"{DAY + 1} ms old, max_age_ms is {DAY}" in decisions[0].reason
    assert decisions[1].eligible_at_ms == NOW + 1
    assert decisions[2].eligible_at_ms == NOW + DAY + 1
    assert going(policy.plan(segments, NOW + 1)) == [0, 5]


def test_an_old_segment_behind_a_young_one_stays() -> None:
    decisions = RetentionPolicy(max_age_ms=DAY).plan(
        facts((5, 100, NOW), (5, 100, NOW - 9 * DAY), (1, 10, NOW)), NOW
    )
    assert going(decisions) == []
    assert decisions[1].reason == "the segment at 0 before it stays"
    assert decisions[1].eligible_at_ms == NOW + DAY + 1  # when the one before it lets it


def test_size_keeps_at_least_the_limit_and_less_than_a_segment_more() -> None:
    segments = facts((5, 100, 0), (5, 100, 0), (5, 100, 0), (5, 50, 0))
    for limit, expected in ((0, [0, 5, 10, 15]), (50, [0, 5, 10]), (51, [0, 5]), (149, [0, 5]),
                            (150, [0, 5]), (151, [0]), (350, []), (1000, [])):  # fmt: skip
        assert going(RetentionPolicy(max_bytes=limit).plan(segments, NOW)) == expected, limit


def test_records_count_from_the_start_offset() -> None:
    segments = facts((10, 100, 0), (10, 100, 0), (10, 100, 0))
    assert going(RetentionPolicy(max_records=20).plan(segments, NOW)) == [0]
    assert going(RetentionPolicy(max_records=21).plan(segments, NOW)) == []
    decisions = RetentionPolicy(max_records=20).plan(segments, NOW, start_offset=4)
    assert decisions[0].reason == (
        "26 records in all; without its 6 there are still 20, at least max_records 20"
    )


def test_what_lies_below_the_start_goes_under_any_policy_and_frees_the_way() -> None:
    """Kafka's idempotency test: pass 1 unblocks deletion by time of the next segment."""
    segments = facts((5, 100, NOW), (5, 100, NOW - 9 * DAY), (1, 10, NOW))
    assert going(RetentionPolicy(max_age_ms=DAY).plan(segments, NOW)) == []
    decisions = RetentionPolicy(max_age_ms=DAY).plan(segments, NOW, start_offset=5)
    assert [decision.rule for decision in decisions] == ["start", "age", None]
    assert decisions[0].reason == "it ends at 5; the log starts at 5"


def test_the_active_segment_goes_after_a_roll_unless_it_is_empty() -> None:
    policy = RetentionPolicy(max_age_ms=DAY)
    decisions = policy.plan(facts((5, 100, 1 << 40), (5, 100, 1 << 40)), NOW)
    assert [(decision.delete, decision.roll) for decision in decisions] == [
        (True, False),
        (True, True),
    ]
    decisions = policy.plan(facts((5, 100, 1 << 40), (0, 0, -1)), NOW)
    assert going(decisions) == [0]
    assert "empty" in decisions[1].reason


def test_nothing_above_the_high_watermark_goes() -> None:
    segments = facts((10, 100, 1 << 40), (10, 100, 1 << 40), (10, 100, 1 << 40))
    policy = RetentionPolicy(max_age_ms=DAY)
    assert going(policy.plan(segments, NOW, high_watermark=0)) == []
    decisions = policy.plan(segments, NOW, high_watermark=25)
    assert going(decisions) == [0, 10]
    assert decisions[2].reason == "it ends at 30, above the high watermark 25"
    assert going(policy.plan(segments, NOW, high_watermark=30)) == [0, 10, 20]


def test_every_rule_that_keeps_a_segment_is_named() -> None:
    (decision,) = RetentionPolicy(max_age_ms=DAY, max_bytes=500, max_records=90).plan(
        facts((5, 100, NOW)), NOW
    )
    assert "max_bytes 500" in decision.reason
    assert "max_records 90" in decision.reason
    assert f"max_age_ms is {DAY}" in decision.reason


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"max_bytes must be from 0 .* not -1; None is no limit"):
        RetentionPolicy(max_bytes=-1)
    with pytest.raises(ConfigError, match=r"max_age_ms must be an int or None, not 1\.5"):
        RetentionPolicy(max_age_ms=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        RetentionPolicy(max_records=True)


def test_the_settings_of_a_topic_make_a_policy() -> None:
    assert RetentionPolicy.of(PartitionConfig()) == RetentionPolicy()
    config = PartitionConfig(retention_ms=7 * DAY)
    assert RetentionPolicy.of(config) == RetentionPolicy(max_age_ms=7 * DAY)
    config = PartitionConfig(retention_ms=-1, retention_bytes=1000)
    assert RetentionPolicy.of(config) == RetentionPolicy(max_bytes=1000)
    config = PartitionConfig(cleanup_policy="compact", retention_bytes=1000)
    assert RetentionPolicy.of(config) == RetentionPolicy()
    config = PartitionConfig(cleanup_policy="compact,delete", retention_ms=0)
    assert RetentionPolicy.of(config) == RetentionPolicy(max_age_ms=0)


@st.composite
def segment_lists(draw: st.DrawFn) -> list[SegmentFacts]:
    times = st.integers(-1, 30) | st.integers(-1, 10**13)
    shapes = st.tuples(st.integers(1, 20), st.integers(1, 500), times)
    empty = draw(st.sampled_from([[], [(0, 0, -1)]]))
    return facts(*draw(st.lists(shapes, min_size=0 if empty else 1, max_size=8)), *empty)


limits = st.none() | st.integers(0, 40) | st.integers(0, 2000)


@given(
    segments=segment_lists(),
    age=limits,
    size=limits,
    records=limits,
    now=st.integers(0, 10**13),
    start=st.integers(0, 60),
)
def test_a_plan_is_a_prefix_and_what_stays_is_within_the_limits(
    segments: list[SegmentFacts],
    age: int | None,
    size: int | None,
    records: int | None,
    now: int,
    start: int,
) -> None:
    policy = RetentionPolicy(max_age_ms=age, max_bytes=size, max_records=records)
    decisions = policy.plan(segments, now, start_offset=start)
    assert [d.base_offset for d in decisions] == [s.base_offset for s in segments]
    flags = [decision.delete for decision in decisions]
    assert flags == sorted(flags, reverse=True)
    assert all(decision.reason for decision in decisions)
    kept = [s for s, decision in zip(segments, decisions, strict=True) if not decision.delete]
    # No more than one segment beyond a limit stays, and never less than the limit.
    total = sum(segment.size_bytes for segment in segments)
    left = sum(segment.size_bytes for segment in kept)
    if size is not None and kept and kept[0].size_bytes:
        assert left - kept[0].size_bytes < size
    if size is not None and all(d.rule in ("bytes", None) for d in decisions):
        assert left >= min(size, total)
    if age is not None and kept and kept[0].max_timestamp >= 0 and kept[0].size_bytes:
        assert now - kept[0].max_timestamp <= age
    # Doing it again, with what stayed, deletes nothing more.
    if kept:
        again = policy.plan(kept, now, start_offset=max(start, kept[0].base_offset))
        assert going(again) == []
    # A kept segment is deleted at the time that its decision names, if age alone decides.
    if size is None and records is None:
        for segment, decision in zip(segments, decisions, strict=True):
            if decision.eligible_at_ms is not None:
                moment = decision.eligible_at_ms
                assert segment.base_offset not in going(policy.plan(segments, moment - 1))
                assert segment.base_offset in going(
                    policy.plan(segments, moment, start_offset=start)
                )


# ---- clocks and times that cannot be right ----


def test_a_clock_that_leaps_does_not_make_everything_old() -> None:
    guard = ClockGuard(NOW, 0.0)
    assert guard.look(NOW + 60_000, 60.0) == NOW + 60_000
    leapt = NOW + 15 * 365 * DAY
    assert guard.look(leapt, 120.0) == NOW + 120_000
    assert guard.leap_ms == leapt - NOW - 120_000
    assert guard.look(leapt + 60_000, 180.0) == NOW + 180_000


def test_a_leap_that_is_taken_back_is_forgotten_and_one_that_lasts_is_believed() -> None:
    guard = ClockGuard(NOW, 0.0)
    guard.look(NOW + 9 * DAY, 1.0)
    assert guard.look(NOW + 2_000, 2.0) == NOW + 2_000
    assert guard.leap_ms == 0
    guard.look(NOW + 9 * DAY, 3.0)
    assert guard.leap_ms
    assert guard.look(NOW + 10 * DAY, 3.0 + 86_399) == NOW + DAY + 3_000
    assert guard.look(NOW + 10 * DAY + 1_000, 3.0 + 86_400) == NOW + 10 * DAY + 1_000
    assert guard.leap_ms == 0


def test_drift_and_small_steps_are_no_leap_and_a_clock_set_back_is_believed() -> None:
    guard = ClockGuard(NOW, 0.0)
    assert guard.look(NOW + 300_000, 0.0) == NOW + 300_000
    assert (
        guard.look(NOW + 300_000 + DAY + DAY // 200, 86_400.0) == NOW + 300_000 + DAY + DAY // 200
    )
    assert guard.look(NOW - DAY, 86_401.0) == NOW - DAY
    assert guard.leap_ms == 0


def test_a_decision_names_the_leap_that_saved_a_segment() -> None:
    (decision,) = RetentionPolicy(max_age_ms=DAY).plan(
        facts((5, 100, NOW - 1000)), NOW, leap_ms=9 * DAY
    )
    assert not decision.delete
    assert f"the clock leapt {9 * DAY} ms ahead" in decision.reason
    assert "pass now= to use its time" in decision.reason


def test_a_timestamp_that_is_no_plausible_time_counts_as_none() -> None:
    """Seconds where milliseconds belong, or a zero: the records look as old as Unix."""
    seconds = NOW // 1000
    segment = SegmentFacts(
        base_offset=0, end_offset=5, size_bytes=9, max_timestamp=seconds, modified_ms=NOW - 10
    )
    (decision,) = RetentionPolicy(max_age_ms=DAY).plan([segment], NOW)
    assert not decision.delete
    assert f"its newest timestamp {seconds} is no plausible time" in decision.reason
    assert decision.eligible_at_ms == NOW - 10 + DAY + 1
    (decision,) = RetentionPolicy(max_age_ms=DAY).plan([segment], NOW + DAY)
    assert decision.delete
    (decision,) = RetentionPolicy(max_age_ms=DAY, plausible_from_ms=0).plan([segment], NOW)
    assert decision.delete


def test_a_time_in_the_future_is_kept_and_named() -> None:
    (decision,) = RetentionPolicy(max_age_ms=DAY).plan(facts((5, 100, NOW + 5 * DAY)), NOW)
    assert f"is {5 * DAY} ms in the future" in decision.reason
    assert decision.eligible_at_ms == NOW + 6 * DAY + 1


# ---- a partition ----


def fill(log: Partition, segments: int, *, records: int = 10, step_ms: int = DAY) -> None:
    """Sealed segments of `records` each, and one more that is active; times `step_ms` apart."""
    clock = log.clock
    assert isinstance(clock, ManualClock)
    for number in range(segments):
        if number:
            log.roll()
            clock.advance(step_ms)
        log.extend([b"%d" % number] * records)


@pytest.fixture
def dated(make_log: MakeLog, fake_clock: ManualClock) -> Partition:
    """Five segments of ten records, a day apart; the last is of now."""
    log = make_log(clock=fake_clock)
    fill(log, 5)
    return log


def test_enforcing_deletes_what_the_plan_says_and_nothing_else(dated: Partition) -> None:
    policy = RetentionPolicy(max_age_ms=2 * DAY)
    planned = dated.enforce(policy, dry_run=True)
    assert dated.start_offset == 0 and len(dated.segments) == 5
    assert dated.enforce(policy) == planned
    assert going(planned) == [0, 10]
    assert dated.start_offset == 20
    assert [record.offset for record in dated] == list(range(20, 50))
    names = sorted(name for name in os.listdir(dated.path) if name.endswith(".log"))
    assert [int(name[:20]) for name in names] == [20, 30, 40]
    assert not [name for name in os.listdir(dated.path) if name.endswith(".deleted")]
    assert going(dated.enforce(policy)) == []
    dated.check()


def test_when_all_is_expired_one_empty_segment_stays_at_the_end(dated: Partition) -> None:
    assert isinstance(dated.clock, ManualClock)
    dated.clock.advance(30 * DAY)
    decisions = dated.enforce(RetentionPolicy(max_age_ms=DAY))
    assert going(decisions) == [0, 10, 20, 30, 40]
    assert decisions[-1].roll
    assert dated.start_offset == dated.end_offset == 50
    assert [segment.base_offset for segment in dated.segments] == [50]
    assert dated.append(b"next") == 50
    assert dated.leader_epochs.entries == [(0, 50)]


def test_without_a_policy_the_settings_decide(make_log: MakeLog, fake_clock: ManualClock) -> None:
    log = make_log(clock=fake_clock, retention_ms=2 * DAY)
    fill(log, 5)
    assert going(log.enforce()) == [0, 10]
    kept = make_log("kept-0", clock=fake_clock, cleanup_policy="compact", retention_ms=0)
    fill(kept, 3)
    assert going(kept.enforce(now=NOW + 1000 * DAY)) == []


def test_a_time_may_be_named_as_a_datetime_with_a_zone(dated: Partition) -> None:
    later = datetime.datetime.fromtimestamp(NOW / 1000, datetime.UTC) + datetime.timedelta(days=30)
    policy = RetentionPolicy(max_age_ms=DAY)
    assert len(going(dated.enforce(policy, now=later, dry_run=True))) == 5
    with pytest.raises(ValueError, match="time zone"):
        dated.enforce(policy, now=later.replace(tzinfo=None))
    with pytest.raises(TypeError, match="a time is int milliseconds"):
        dated.enforce(policy, now=1.5)  # type: ignore[arg-type]


def test_a_leaping_clock_empties_no_log_until_somebody_believes_it(dated: Partition) -> None:
    clock = dated.clock
    assert isinstance(clock, ManualClock)
    policy = RetentionPolicy(max_age_ms=10 * DAY)
    clock.leap(15 * 365 * DAY)
    decisions = dated.enforce(policy)
    assert going(decisions) == []
    assert "the clock leapt" in decisions[0].reason
    clock.advance(3_600_000)
    assert going(dated.enforce(policy)) == []
    assert going(dated.enforce(policy, now=clock.time_ms(), dry_run=True)) == [0, 10, 20, 30, 40]
    clock.leap(-15 * 365 * DAY)
    assert going(dated.enforce(policy)) == []
    clock.advance(20 * DAY)
    assert len(going(dated.enforce(policy))) == 5


def test_retention_survives_a_reopen_and_a_crash_before_the_files_went(
    dated: Partition, make_log: MakeLog, tmp_path: Path
) -> None:
    """The start is durable before a file is renamed: a file that is left is not served again."""
    copies = {path.name: path.read_bytes() for path in dated.path.glob("*0000*")}
    dated.enforce(RetentionPolicy(max_age_ms=2 * DAY))
    dated.close()
    for name, content in copies.items():
        if int(name[:20]) < 20:
            (dated.path / name).write_bytes(content)
    log = make_log()
    assert log.start_offset == 20
    assert log.recovery.damage == []
    assert [record.offset for record in log] == list(range(20, 50))
    with pytest.raises(OffsetOutOfRangeError) as caught:
        log[19]
    assert caught.value.start == 20
    decisions = log.enforce(RetentionPolicy())
    assert [decision.rule for decision in decisions[:3]] == ["start", "start", None]
    assert min(path.name for path in log.path.glob("*.log")) == f"{20:020d}.log"


def test_a_reader_finishes_the_segment_it_is_in_and_then_learns_the_new_start(
    dated: Partition,
) -> None:
    records = iter(dated.scan())
    assert next(records).offset == 0
    dated.enforce(RetentionPolicy(max_age_ms=2 * DAY))
    seen = []
    with pytest.raises(OffsetOutOfRangeError) as caught:
        seen.extend(record.offset for record in records)
    assert (caught.value.offset, caught.value.start, caught.value.end) == (10, 20, 50)


def test_a_reader_in_the_segment_before_the_survivors_misses_nothing(dated: Partition) -> None:
    records = iter(dated.scan(15))
    assert next(records).offset == 15
    dated.enforce(RetentionPolicy(max_age_ms=2 * DAY))
    assert [record.offset for record in records] == list(range(16, 50))


def test_a_readonly_reader_beside_it_learns_the_new_start(
    dated: Partition, make_log: MakeLog
) -> None:
    reader = make_log(readonly=True)
    records = iter(reader.scan(5))
    next(records)
    dated.enforce(RetentionPolicy(max_records=15))
    assert reader.start_offset == 30
    with pytest.raises(OffsetOutOfRangeError) as caught:
        list(records)
    assert caught.value.start == 30
    assert [record.offset for record in reader] == list(range(30, 50))
    assert reader.enforce(RetentionPolicy(max_records=1), dry_run=True)[0].delete
    with pytest.raises(ReadOnlyError):
        reader.enforce(RetentionPolicy(max_records=1))


def test_looking_up_a_record_while_its_segment_goes_tells_the_start(dated: Partition) -> None:
    """Between finding the segment and opening its file, another thread may have deleted it."""
    segment = dated.segments[0]
    dated.enforce(RetentionPolicy(max_records=15))
    dated._view.publish((segment, *dated.segments))
    dated._view.start_offset = 0
    original = segment.get

    def late(offset: int) -> object:
        dated._view.start_offset = 30
        dated._view.version += 1
        return original(offset)

    segment.get = late  # type: ignore[method-assign, assignment]
    with pytest.raises(OffsetOutOfRangeError) as caught:
        dated[3]
    assert caught.value.start == 30


def test_an_index_that_lost_its_last_entry_does_not_age_a_segment(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    log = make_log(clock=fake_clock, index_interval_bytes=0)
    log.append(b"old", timestamp=NOW - 3 * DAY)
    log.append(b"older", timestamp=NOW - 4 * DAY)
    log.append(b"new", timestamp=NOW)
    log.roll()
    log.append(b"active", timestamp=NOW)
    path = log.segments[0].path.with_suffix(".timeindex")
    log.close()
    path.write_bytes(path.read_bytes()[:12])
    log = make_log(clock=fake_clock)
    assert log.segments[0].max_timestamp == NOW - 3 * DAY
    decisions = log.enforce(RetentionPolicy(max_age_ms=DAY))
    assert going(decisions) == []
    assert log.segments[0].max_timestamp == NOW


def test_records_without_times_age_by_their_file(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"a", timestamp=0)
    log.roll()
    log.append(b"b", timestamp=0)
    os.utime(log.segments[0].path, (1_000_000_000, 1_000_000_000))
    decisions = log.enforce(RetentionPolicy(max_age_ms=DAY))
    assert going(decisions) == [0]
    assert "1000000000000 (2001-09-09 01:46:40 UTC)" in decisions[0].reason
    assert "no plausible time" in decisions[1].reason


def test_enforcing_a_closed_log_is_refused(dated: Partition) -> None:
    dated.close()
    with pytest.raises(ClosedError):
        dated.enforce(RetentionPolicy())


def test_appends_readers_and_retention_in_threads(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=4096)
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                offset = log.start_offset
                try:
                    for record in log.scan(offset, max_records=200):
                        assert record.value == b"%d" % record.offset * 10
                    log[log.start_offset]
                except OffsetOutOfRangeError as error:
                    assert error.start <= log.start_offset  # noqa: PT017
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for first in range(0, 4000, 10):
            log.extend([b"%d" % offset * 10 for offset in range(first, first + 10)])
            log.enforce(RetentionPolicy(max_records=300))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures
    assert 300 <= log.end_offset - log.start_offset < 500
    log.check()


def test_a_segment_that_is_cut_and_written_again_has_its_new_time(make_log: MakeLog) -> None:
    """`enforce` keeps the greatest time of a sealed segment; a truncation reopens the segment."""
    log = make_log()
    for minute in range(3):
        log.append(b"old", timestamp=NOW + minute)
        log.append(b"old", timestamp=NOW + minute)
        log.roll()
    by_age = RetentionPolicy(max_age_ms=1000)
    assert going(log.enforce(by_age, now=NOW + DAY, dry_run=True)) == [0, 2, 4]
    log.truncate(3)
    assert log.append(b"new", timestamp=NOW + DAY) == 3
    log.roll()
    assert log.segments[1].max_timestamp == NOW + DAY
    assert log.offset_for_time(NOW + DAY) == 3
    assert going(log.enforce(by_age, now=NOW + DAY)) == [0]
    assert log[3].value == b"new"
