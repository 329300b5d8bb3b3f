"""Maintenance: by hand, under a clock that stands still; and its thread."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

import logstore
from logstore import Maintenance, ManualClock, Partition, Record, Store
from logstore.testing.reference import ReferenceRecord, encode_batch
from tests.conftest import MakeLog
from tests.kit import wait_until, wait_until_freed

DAY = 86_400_000


@pytest.fixture
def store(tmp_path: Path, fake_clock: ManualClock) -> Iterator[Store]:
    with logstore.open(tmp_path / "data", durability="os", clock=fake_clock) as opened:
        yield opened


# ---- a round by hand ----


def test_retention_deletes_by_each_topics_own_settings(
    store: Store, fake_clock: ManualClock
) -> None:
    short = store.create_topic("short", config={"retention.ms": DAY})
    keep = store.create_topic("keep", config={"retention.ms": -1})
    for topic in (short, keep):
        topic[0].append(b"old")
        topic[0].roll()
    fake_clock.advance(2 * DAY)
    for topic in (short, keep):
        topic[0].append(b"new")
    report = Maintenance(store, clock=fake_clock).run_once()
    (act,) = [act for act in report.acts if act.task == "retention"]
    assert act.where == "short-0"
    assert "1 segments" in act.what and "now from 1" in act.what
    assert (short[0].start_offset, keep[0].start_offset) == (1, 0)
    assert report.faults == []


def test_a_topic_that_set_nothing_keeps_everything(store: Store, fake_clock: ManualClock) -> None:
    """A log of events may be the only copy: a replay finds all of them years later."""
    account = store.create_topic("account")
    for amount in (b"+1000", b"-100"):
        account[0].append(amount)
        account[0].roll()
        fake_clock.advance(8 * DAY)
        Maintenance(store, clock=fake_clock).run_once()
    fake_clock.advance(3650 * DAY)
    account[0].append(b"-50")
    report = Maintenance(store, clock=fake_clock).run_once()
    assert [act.what for act in report.acts if act.task == "retention"] == []
    assert [record.value for record in account[0]] == [b"+1000", b"-100", b"-50"]
    assert account[0].parts.cutter.reclaimable_bytes() == 0
    account.alter({"retention.ms": 7 * DAY})
    Maintenance(store, clock=fake_clock).run_once()
    assert account[0].start_offset == 2
    account.alter({"retention.ms": None})
    assert account.config.retention_ms == -1


def test_a_task_is_done_when_it_is_due_and_says_when_that_is(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    log = make_log(clock=fake_clock, retention_ms=1000)
    maintenance = Maintenance([log], clock=fake_clock, retention=300.0, compaction=None)
    report = maintenance.run_once()
    assert report.due["retention"] == 300.0
    assert report.due["compaction"] is report.due["checkpoint"] is None
    log.append(b"a")
    fake_clock.advance(299_999)
    assert maintenance.run_once().acts == []
    assert maintenance.run_once().due["retention"] == pytest.approx(0.001, abs=1e-6)
    fake_clock.advance(1)
    assert [act.task for act in maintenance.run_once().acts] == ["retention"]
    assert log.start_offset == 1


def test_a_named_time_makes_everything_due(make_log: MakeLog, fake_clock: ManualClock) -> None:
    log = make_log(clock=fake_clock, retention_ms=7 * DAY)
    log.append(b"a")
    maintenance = Maintenance([log], clock=fake_clock)
    maintenance.run_once()
    assert maintenance.run_once().acts == []
    report = maintenance.run_once(now=fake_clock.time_ms() + 8 * DAY)
    assert [act.task for act in report.acts] == ["retention"]


def test_compaction_runs_for_topics_that_ask_for_it(store: Store, fake_clock: ManualClock) -> None:
    compacted = store.create_topic("compacted", config={"cleanup.policy": "compact"})
    plain = store.create_topic("plain", config={"retention.ms": -1})
    for topic in (compacted, plain):
        topic[0].extend([Record(b"%d" % i, key=b"k") for i in range(10)])
        topic[0].roll()
    report = Maintenance(store, clock=fake_clock, memory_bytes=1 << 20).run_once()
    assert [(act.task, act.where) for act in report.acts] == [("compaction", "compacted-0")]
    assert [record.value for record in compacted[0]] == [b"9"]
    assert len(list(plain[0])) == 10


def test_flush_ms_and_flush_messages_bound_what_a_power_cut_takes(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    by_time = make_log("time-0", clock=fake_clock, flush_ms=5000)
    by_count = make_log("count-0", clock=fake_clock, flush_messages=10)
    never = make_log("never-0", clock=fake_clock)
    maintenance = Maintenance([by_time, by_count, never], clock=fake_clock, sync=1.0)
    maintenance.run_once()
    for log in (by_time, by_count, never):
        log.extend([b"x"] * 9)
    fake_clock.advance(4000)
    assert maintenance.run_once().acts == []
    by_count.append(b"x")
    fake_clock.advance(1000)
    report = maintenance.run_once()
    assert {(act.where, act.what) for act in report.acts} == {
        ("time-0", "9 records made durable"),
        ("count-0", "10 records made durable"),
    }
    assert [log.durable_offset for log in (by_time, by_count, never)] == [9, 10, 0]
    fake_clock.advance(9000)
    assert maintenance.run_once().acts == []


def test_a_store_gets_its_checkpoints(store: Store, fake_clock: ManualClock) -> None:
    topic = store.create_topic("orders")
    topic[0].extend([b"a", b"b"], durability="fsync")
    Maintenance(store, clock=fake_clock).run_once()
    content = (store.path / "recovery-point-offset-checkpoint").read_text()
    assert "orders 0 2" in content


def test_silent_producers_are_forgotten(make_log: MakeLog, fake_clock: ManualClock) -> None:
    log = make_log(clock=fake_clock, producer_id_expiration_ms=1000)
    batch = encode_batch(
        [ReferenceRecord(b"v", timestamp=fake_clock.time_ms(), offset=0)],
        producer_id=7, producer_epoch=0, base_sequence=0,
    )  # fmt: skip
    log.append_batch(batch)
    maintenance = Maintenance([log], clock=fake_clock, retention=None)
    assert maintenance.run_once().acts == []
    assert [ends[0] for ends in log.parts.rewriter.producer_ends()] == [7]
    fake_clock.advance(600_000)
    (act,) = maintenance.run_once().acts
    assert (act.task, act.what) == ("producers", "1 silent producers forgotten")
    assert log.parts.rewriter.producer_ends() == []


def test_an_error_stops_nobody_else_and_is_seen(
    make_log: MakeLog,
    fake_clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = (
        make_log(name, clock=fake_clock, retention_ms=7 * DAY) for name in ("bad-0", "good-0")
    )
    for log in (bad, good):
        log.append(b"a")
    fake_clock.advance(30 * DAY)

    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    maintenance = Maintenance([bad, good], clock=fake_clock)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "logstore.maintenance"):
        patch.setattr(bad, "enforce", broken)
        report = maintenance.run_once()
    assert (bad.start_offset, good.start_offset) == (0, 1)
    (fault,) = report.faults
    assert (fault.task, fault.where, type(fault.error)) == ("retention", "bad-0", OSError)
    assert maintenance.errors == [fault]
    assert "retention of bad-0" in caplog.text
    fake_clock.advance(300_000)
    assert maintenance.run_once().faults == []  # tried again, and it went well
    assert bad.start_offset == 1
    assert maintenance.errors == [fault]


def test_closed_and_readonly_partitions_are_left_alone(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    log = make_log(clock=fake_clock)
    log.append(b"a")
    log.close()
    reader = make_log(readonly=True)
    report = Maintenance([log, reader], clock=fake_clock).run_once(now=1 << 50)
    assert (report.acts, report.faults) == ([], [])


def test_a_topic_deleted_in_the_middle_of_a_round_is_no_error(
    store: Store, fake_clock: ManualClock
) -> None:
    store.create_topic("gone")
    maintenance = Maintenance(store, clock=fake_clock)
    work = maintenance._work_of("retention", None)
    _, act = next(work)
    store.delete_topic("gone")
    assert act() == ""


def test_intervals_are_checked() -> None:
    with pytest.raises(ValueError, match="retention: an interval is more than 0 seconds, not 0"):
        Maintenance([], retention=0)


# ---- the thread ----


def test_the_thread_does_the_same_and_stops(make_log: MakeLog) -> None:
    log = make_log(flush_messages=1)
    with Maintenance([log], sync=0.01, retention=None, compaction=None) as maintenance:
        assert maintenance.running
        log.append(b"a")
        wait_until(lambda: log.durable_offset == 1)
        maintenance.start()  # already runs
        assert len([t for t in threading.enumerate() if t.name == "logstore maintenance"]) == 1
    assert not maintenance.running
    maintenance.stop()
    assert maintenance.errors == []


def test_the_thread_survives_the_close_of_its_store_and_ends(tmp_path: Path) -> None:
    store = logstore.open(tmp_path / "data", durability="os")
    store.create_topic("orders", partitions=3)[0].append(b"a")
    maintenance = Maintenance(store, sync=0.01, retention=0.01, checkpoint=0.01).start()
    for _ in range(20):
        store["orders"].append(b"x")
    store.close()
    wait_until(lambda: not maintenance.running)
    assert maintenance.errors == []
    maintenance.stop()


def test_a_dropped_maintenance_keeps_nothing_alive(make_log: MakeLog) -> None:
    log = make_log()
    maintenance = Maintenance([log], sync=0.01).start()
    thread, ref = maintenance._thread, weakref.ref(maintenance)
    assert thread is not None
    del maintenance
    wait_until_freed(ref)
    wait_until(lambda: not thread.is_alive())


def test_rounds_by_hand_and_in_the_thread_do_not_meet(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=4096, flush_messages=1, retention_bytes=20_000)
    with Maintenance([log], sync=0.001, retention=0.001, compaction=0.001) as maintenance:
        for i in range(300):
            log.append(b"x" * 200)
            if i % 10 == 0:
                maintenance.run_once(now=1)
    maintenance.run_once(now=1)
    assert maintenance.errors == []
    assert sum(segment.size_bytes for segment in log.segments) < 20_000 + 4096
    log.check()


def test_a_thread_that_stops_itself_does_not_wait_for_itself(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    maintenance = Maintenance([log], sync=0.01)
    monkeypatch.setattr(maintenance, "_sync", lambda *_: maintenance.stop() or "")
    maintenance.start()
    wait_until(lambda: not maintenance.running)


def test_partition_is_what_a_list_may_hold(log: Partition) -> None:
    assert repr(Maintenance([log])) == "<Maintenance of 1 partitions>"
