"""Scheduler on real stores, by a clock that the test moves: D1 to D6, settings, errors."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

import logstore
from logstore import (
    Compactor,
    ConfigError,
    InvalidNameError,
    InvalidRecordError,
    ManualClock,
    Producer,
    ScheduleError,
    Scheduler,
    Store,
    UnknownTicketError,
    UnknownTopicError,
)
from logstore.coordinators.internal_topics import DELAYED
from logstore.delays.agenda import Agenda
from logstore.delays.courier import UNDELIVERED, Courier
from tests.kit import committed

MakeStore = Callable[..., Store]
HOUR = 3_600_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(make_store: MakeStore, clock: ManualClock) -> Store:
    store = make_store(clock=clock)
    store.create_topic("t")
    return store


def delivered(store: Store, topic: str = "t") -> list[bytes | None]:
    return [value for log in store[topic] for value in committed(log)]


def values(scheduler: Scheduler, **options: Any) -> list[bytes | None]:
    return [record.value for record in scheduler.pending(**options)]


# ---- the invariants ----


def test_d1_a_record_is_delivered_once_or_cancelled(store: Store, clock: ManualClock) -> None:
    scheduler = Scheduler.of(store, batch_max=3)
    tickets = [scheduler.schedule("t", b"%d" % n, deliver_after=1) for n in range(10)]
    assert [scheduler.cancel(ticket) for ticket in tickets[::3]] == [True] * 4
    assert scheduler.cancel(tickets[0]) is False  # cancelled before
    clock.advance(1000)
    assert scheduler.run_once() == 6
    assert scheduler.run_once() == 0
    assert delivered(store) == [b"%d" % n for n in range(10) if n % 3]
    assert not any(scheduler.cancel(ticket) for ticket in tickets)  # delivered before
    assert scheduler.count() == 0


def test_d1_a_delivery_that_fails_is_repeated_whole(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler.of(store, batch_max=4)
    for number in range(6):
        scheduler.schedule("t", b"%d" % number, deliver_after=0)
    send = Courier._send

    def fail_at_the_third(self: Courier, tx: Any, record: Any) -> str | None:
        if record.value == b"2":
            raise OSError("the cable was pulled")
        return send(self, tx, record)

    with monkeypatch.context() as patch:
        patch.setattr(Courier, "_send", fail_at_the_third)
        with pytest.raises(OSError, match="cable"):
            scheduler.run_once()
    assert delivered(store) == [] and scheduler.count() == 6
    assert scheduler.run_once() == 6
    assert delivered(store) == [b"%d" % n for n in range(6)]


def test_d1_a_cancel_during_the_delivery_is_too_late(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler.of(store)
    ticket = scheduler.schedule("t", b"v", deliver_after=0)
    answers = []
    deliver = Courier.deliver

    def cancel_first(self: Courier, *arguments: Any) -> None:
        answers.append(scheduler.cancel(ticket))
        deliver(self, *arguments)

    monkeypatch.setattr(Courier, "deliver", cancel_first)
    scheduler.run_once()
    assert answers == [False] and delivered(store) == [b"v"]


def test_d2_nothing_is_delivered_early(store: Store, clock: ManualClock) -> None:
    scheduler = Scheduler.of(store)
    ticket = scheduler.schedule("t", b"v", deliver_after="1.5s")
    assert ticket.due_ms == clock.now_ms + 1500
    clock.advance(1499)
    assert scheduler.run_once() == 0
    clock.advance(1)
    assert scheduler.run_once() == 1
    (record,) = store["t"][0].scan(isolation="read_committed")
    assert record.timestamp >= ticket.due_ms  # the time of delivery
    assert dict(record.headers) == {
        "logstore.delay.due": b"%d" % ticket.due_ms,
        "logstore.delay.id": ticket.id.encode(),
    }


def test_d2_a_clock_that_leaps_delivers_nothing_early_and_nothing_twice(
    store: Store, clock: ManualClock
) -> None:
    scheduler = Scheduler.of(store)
    scheduler.schedule("t", b"a", deliver_after=1)
    scheduler.schedule("t", b"b", deliver_after="2h")
    clock.leap(10 * HOUR)
    assert scheduler.run_once() == 0
    clock.advance(1000)
    assert scheduler.run_once() == 1
    clock.leap(-20 * HOUR)  # now it is too early, even for the one that was delivered
    assert scheduler.run_once() == 0
    clock.advance(12 * HOUR)
    assert scheduler.run_once() == 1
    assert delivered(store) == [b"a", b"b"]


def test_d3_records_of_a_partition_are_in_the_order_of_ids(
    store: Store, clock: ManualClock
) -> None:
    scheduler = Scheduler.of(store, loaded_max=7, batch_max=5)
    delays = [(number * 37) % 100 for number in range(100)] + [5] * 20
    tickets = {
        b"%d" % n: scheduler.schedule("t", b"%d" % n, deliver_after=after)
        for n, after in enumerate(delays)
    }
    clock.advance(100_000)
    scheduler.run_once()
    got = [tickets[value or b""] for value in delivered(store)]
    assert got == sorted(tickets.values()) and len(got) == 120


def test_d4_memory_is_bounded_by_loaded_max_whatever_is_pending(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler.of(store, loaded_max=50, batch_max=10)
    sizes = []
    for name in ("load", "take_in", "take"):
        act = getattr(Agenda, name)

        def watched(self: Agenda, *arguments: Any, act: Any = act) -> Any:
            result = act(self, *arguments)
            sizes.append(len(self))
            return result

        monkeypatch.setattr(Agenda, name, watched)
    scheduler.run_once()  # the window is everything now
    many = ({"topic": "t", "value": b"%d" % n, "deliver_after": n % 100} for n in range(3000))
    tickets = scheduler.schedule_many(many)
    assert len(set(tickets)) == 3000
    assert scheduler.count() == 3000
    clock.advance(50_000)
    assert scheduler.run_once() == 1530  # a backlog, which is loaded piece by piece
    assert scheduler.count() == 1470
    clock.advance(50_000)
    assert scheduler.run_once() == 1470
    assert 50 <= max(sizes) <= 100


def test_d5_a_load_equals_a_naive_filter_of_the_log(store: Store, clock: ManualClock) -> None:
    """With tickets of open, aborted and committed transactions, and segments to skip."""
    scheduler = Scheduler.of(store, loaded_max=5)
    expected = set()
    with (
        Producer(store, "a") as first,
        Producer(store, "b") as second,
        Producer(store, "c") as third,
    ):
        kept = third.transaction()
        scheduler.schedule("t", b"open", deliver_after=9, transaction=kept)
        third.flush()
        for number in range(60):
            after = (number * 17) % 40 + (0, 7200, 200_000)[number % 3]
            ticket = scheduler.schedule("t", b"%d" % number, deliver_after=after)
            expected.add(ticket)
            if number % 4 == 0:
                assert scheduler.cancel(ticket)
                expected.discard(ticket)
            if number % 10 == 0:
                with first.transaction() as tx:
                    expected.add(scheduler.schedule("t", b"c", deliver_after=after, transaction=tx))
            if number % 15 == 0:
                tx = second.transaction()
                scheduler.schedule("t", b"aborted", deliver_after=after, transaction=tx)
                second.flush()
                tx.abort()
                for log in store[DELAYED]:
                    log.roll()
        assert [record.ticket for record in scheduler.pending(limit=999)] == sorted(expected)
        assert scheduler.count() == len(expected)
        for ticket in sorted(expected)[::9]:
            assert scheduler.get(ticket).ticket == ticket
        kept.commit()
        assert scheduler.count() == len(expected) + 1
    clock.advance(400_000_000)
    assert scheduler.run_once() == len(expected) + 1
    assert scheduler.count() == 0


def test_d6_after_a_reopen_the_log_alone_has_what_is_pending(
    make_store: MakeStore, store: Store, clock: ManualClock
) -> None:
    scheduler = Scheduler.of(store)
    tickets = [scheduler.schedule("t", b"%d" % n, deliver_after=n) for n in range(10)]
    scheduler.cancel(tickets[7])
    tickets.append(scheduler.reschedule(tickets[8], deliver_after="40d"))
    clock.advance(4000)
    scheduler.run_once()
    store.close()
    store = make_store(clock=clock)
    scheduler = Scheduler.of(store)
    assert values(scheduler) == [b"5", b"6", b"9", b"8"]
    # Ids of the new run are not those of the old one.
    assert scheduler.schedule("t", b"new", deliver_after=6) not in tickets
    clock.advance(41 * 24 * HOUR)
    assert scheduler.run_once() == 5
    assert sorted(map(bytes, filter(None, delivered(store)))) == sorted(
        [*(b"%d" % n for n in (0, 1, 2, 3, 4, 5, 6, 8, 9)), b"new"]
    )


# ---- transactions ----


def test_a_record_of_a_transaction_counts_when_it_commits(store: Store, clock: ManualClock) -> None:
    scheduler = Scheduler.of(store)
    with Producer(store, "id") as producer:
        with producer.transaction() as tx:
            ticket = scheduler.schedule("t", b"in", deliver_after=1, transaction=tx)
            producer.flush()
            clock.advance(2000)
            scheduler.schedule("t", b"not in it", deliver_after=0)
            assert scheduler.run_once() == 1  # does not wait for the open transaction
            assert scheduler.cancel(ticket) is False
            with pytest.raises(UnknownTicketError):
                scheduler.get(ticket)
        assert scheduler.run_once() == 1
        with pytest.raises(RuntimeError), producer.transaction() as tx:
            scheduler.schedule("t", b"aborted", deliver_after=0, transaction=tx)
            producer.flush()
            raise RuntimeError
    assert scheduler.run_once() == 0
    assert delivered(store) == [b"not in it", b"in"]


def test_a_ticket_cancelled_before_its_transaction_commits_is_not_delivered(
    store: Store, clock: ManualClock
) -> None:
    scheduler = Scheduler.of(store, loaded_max=1)
    for number in range(4):
        scheduler.schedule("t", b"%d" % number, deliver_after=1)
    scheduler.run_once()  # the window ends before the next ticket
    with Producer(store, "id") as producer, producer.transaction() as tx:
        ticket = scheduler.schedule("t", b"in", deliver_after=9, transaction=tx)
        producer.flush()
        assert scheduler.cancel(ticket) is True  # it is beyond the window
        clock.advance(1000)
        assert scheduler.run_once() == 4  # now it would be in the window
    clock.advance(10_000)
    assert scheduler.run_once() == 0
    assert delivered(store) == [b"0", b"1", b"2", b"3"]


# ---- the calls ----


def test_a_record_keeps_its_key_headers_and_partition(
    make_store: MakeStore, clock: ManualClock
) -> None:
    store = make_store(clock=clock)
    topic = store.create_topic("many", partitions=3)
    scheduler = Scheduler.of(store)
    headers = [("h", b"1"), ("h", None), ("logstore.delay.key", b"mine")]
    scheduler.schedule("many", b"v", headers=headers, partition=2, deliver_after=0)
    scheduler.schedule("many", None, key=b"k", partition=1, deliver_after=0)
    scheduler.schedule("many", b"", key=b"", deliver_after=0)
    (first, second, third) = scheduler.pending()
    assert (first.headers, first.partition, first.scheduled_ms) == (
        tuple(headers), 2, clock.now_ms,
    )  # fmt: skip
    assert (second.value, second.key) == (None, b"k")
    assert (third.value, third.key, third.partition) == (b"", b"", None)
    scheduler.run_once()
    (record,) = topic[2].scan(isolation="read_committed")
    assert record.value == b"v" and record.headers[:3] == tuple(headers)
    assert topic[1][0].value is None and topic[1][0].key == b"k"
    assert sum(len(committed(log)) for log in topic) == 3


def test_pending_is_sorted_and_filtered(store: Store, clock: ManualClock) -> None:
    store.create_topic("other")
    scheduler = Scheduler.of(store, loaded_max=3)
    for number in range(10):
        scheduler.schedule(
            ("t", "other")[number % 2], b"%d" % number, deliver_after=20 - 2 * number
        )
    assert values(scheduler, limit=3) == [b"9", b"8", b"7"]
    assert values(scheduler, topic="other") == [b"9", b"7", b"5", b"3", b"1"]
    assert values(scheduler, before=clock.now_ms + 6000) == [b"9", b"8"]
    when = datetime.datetime.fromtimestamp((clock.now_ms + 6001) / 1000, datetime.UTC)
    assert values(scheduler, before=when) == [b"9", b"8", b"7"]


def test_a_ticket_is_moved_in_both_directions(store: Store, clock: ManualClock) -> None:
    scheduler = Scheduler.of(store)
    ticket = scheduler.schedule("t", b"v", key=b"k", deliver_after=10)
    later = scheduler.reschedule(ticket.id, deliver_after="30d")
    assert later.due_ms == clock.now_ms + 30 * 24 * HOUR and later.topic == "t"
    with pytest.raises(UnknownTicketError, match="delivered, cancelled"):
        scheduler.reschedule(ticket, deliver_after=1)
    clock.advance(10_000)
    assert scheduler.run_once() == 0
    sooner = scheduler.reschedule(later, deliver_at=clock.now_ms + 1)
    assert scheduler.count() == 1 and scheduler.get(sooner).key == b"k"
    clock.advance(1)
    assert scheduler.run_once() == 1
    with pytest.raises(UnknownTicketError):
        scheduler.get(sooner)
    assert delivered(store) == [b"v"]


def test_a_ticket_far_in_the_future_is_found_and_cancelled(store: Store) -> None:
    scheduler = Scheduler.of(store, loaded_max=2)
    tickets = [scheduler.schedule("t", b"%d" % n, deliver_after=f"{n}d") for n in range(1, 9)]
    scheduler.run_once()
    assert scheduler.get(tickets[-1].id).value == b"8"
    assert scheduler.cancel(tickets[-1]) is True
    with pytest.raises(UnknownTicketError):
        scheduler.get(tickets[-1])
    assert scheduler.count() == 7


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, ScheduleError),
        ({"deliver_after": 1, "deliver_at": 1}, ScheduleError),
        ({"deliver_after": -1}, ScheduleError),
        ({"deliver_after": "tomorrow"}, ScheduleError),
        ({"deliver_after": float("nan")}, ScheduleError),
        ({"deliver_after": "3651d"}, ScheduleError),
        ({"deliver_at": 10**15}, ScheduleError),
        ({"deliver_at": datetime.datetime(2030, 1, 1)}, ScheduleError),
        ({"deliver_at": "now"}, ScheduleError),
        ({"deliver_after": 1, "topic": "unknown"}, UnknownTopicError),
        ({"deliver_after": 1, "topic": DELAYED}, InvalidNameError),
        ({"deliver_after": 1, "value": None}, InvalidRecordError),
        ({"deliver_after": 1, "value": "text"}, TypeError),
    ],
)
def test_what_cannot_be_scheduled_is_refused(
    store: Store, options: dict[str, Any], error: type[Exception]
) -> None:
    scheduler = Scheduler.of(store)
    with pytest.raises(error):
        scheduler.schedule(**{"topic": "t", "value": b"v", **options})
    with pytest.raises(error):
        scheduler.schedule_many([{"topic": "t", "value": b"v", **options}])
    assert scheduler.count() == 0


def test_schedule_many_names_a_wrong_keyword(store: Store) -> None:
    with pytest.raises(TypeError, match="keywords of schedule"):
        Scheduler.of(store).schedule_many([{"topic": "t", "value": b"", "dellay": 4}])


def test_a_store_has_one_scheduler_with_one_set_of_settings(store: Store) -> None:
    scheduler = Scheduler.of(store, loaded_max=10)
    assert Scheduler.of(store) is scheduler
    assert Scheduler.of(store, loaded_max=10) is scheduler
    with pytest.raises(ConfigError, match="other settings"):
        Scheduler.of(store, loaded_max=11)
    for wrong in ({"loaded_max": 0}, {"late": "soon"}, {"max_delay": "x"}, {"colour": 1},
                  {"batch_ms": -1}):  # fmt: skip
        with pytest.raises(ConfigError):
            Scheduler.of(store, **wrong)
    store.close()
    with pytest.raises(logstore.ClosedError):
        scheduler.schedule("t", b"v", deliver_after=1)


# ---- late and undelivered ----


@pytest.mark.parametrize(
    ("late", "expected", "aside"),
    [
        ("deliver", [b"old", b"recent", b"new"], []),
        ("skip", [b"new"], []),
        ("1h", [b"recent", b"new"], [b"old"]),
    ],
)
def test_what_came_due_while_nothing_ran(
    make_store: MakeStore,
    clock: ManualClock,
    late: str,
    expected: list[bytes],
    aside: list[bytes],
) -> None:
    store = make_store(clock=clock)
    store.create_topic("t")
    scheduler = Scheduler.of(store, late=late)
    scheduler.schedule("t", b"old", key=b"k", deliver_after=1)
    scheduler.schedule("t", b"recent", deliver_after="119m")
    clock.advance(2 * HOUR)
    scheduler.run_once()
    scheduler.schedule("t", b"new", deliver_after="2h")
    clock.advance(2 * HOUR + 1)  # the scheduler was running: this one is not late
    scheduler.run_once()
    assert delivered(store) == expected and scheduler.count() == 0
    if aside:
        (record,) = store[UNDELIVERED][0].scan(isolation="read_committed")
        headers = dict(record.headers)
        assert (record.key, record.value) == (b"k", b"old")
        assert headers["logstore.delay.topic"] == b"t"
        assert (headers["logstore.delay.reason"] or b"").startswith(b"late: it was due 7199000 ms")


def test_a_target_that_is_gone_or_refuses_holds_up_no_other(
    store: Store, clock: ManualClock
) -> None:
    scheduler = Scheduler.of(store)
    store.create_topic("small", config={"max.message.bytes": 200})
    store.create_topic("gone")
    scheduler.schedule("gone", b"a", deliver_after=0)
    scheduler.schedule("small", b"b" * 500, deliver_after=0)
    scheduler.schedule("t", b"c", partition=7, deliver_after=0)
    scheduler.schedule("gone", None, key=b"k", deliver_after=0)
    scheduler.schedule("t", b"d", deliver_after=0)
    store.delete_topic("gone")
    assert scheduler.run_once() == 5
    assert delivered(store) == [b"d"]
    assert delivered(store, UNDELIVERED) == [b"a", b"b" * 500, b"c", None]
    reasons = [dict(record.headers)["logstore.delay.reason"] or b""
               for record in store[UNDELIVERED][0].scan(isolation="read_committed")]  # fmt: skip
    assert [reason.partition(b":")[0] for reason in reasons] == [
        b"UnknownTopicError", b"RecordTooLargeError", b"IndexError", b"UnknownTopicError",
    ]  # fmt: skip


# ---- the log ----


def test_segments_of_ended_tickets_are_deleted_and_those_of_live_ones_stay(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logstore.delays.scheduler.RECLAIM_EVERY", 10)
    scheduler = Scheduler.of(store, loaded_max=5)
    first = scheduler.schedule("t", b"late", deliver_after=3000)
    for _ in range(3):
        for number in range(10):
            scheduler.schedule("t", b"%d" % number, deliver_after=1)
        clock.advance(1000)
        assert scheduler.run_once() == 10
        store[DELAYED][0].roll()
    log = store[DELAYED][0]
    assert log.start_offset == 0 and len(log.segments) > 3  # one is live
    clock.advance(3_000_000)
    assert scheduler.get(first).value == b"late"
    scheduler.run_once()
    for number in range(10):
        scheduler.schedule("t", b"%d" % number, deliver_after=0)
    scheduler.run_once()
    assert log.start_offset > 0
    assert scheduler.count() == 0 and len(delivered(store)) == 41


def test_compaction_keeps_what_is_pending(
    make_store: MakeStore, store: Store, clock: ManualClock
) -> None:
    scheduler = Scheduler.of(store)
    for number in range(30):
        scheduler.schedule("t", b"%d" % number, deliver_after=number)
    clock.advance(20_500)
    scheduler.run_once()
    log = store[DELAYED][0]
    log.roll()
    Compactor(log, delete_retention_ms=0).run()
    assert sum(1 for _ in log.scan()) < 51
    expected = [b"%d" % n for n in range(21, 30)]
    assert values(scheduler) == expected
    store.close()
    scheduler = Scheduler.of(store := make_store(clock=clock))
    assert values(scheduler) == expected
    clock.advance(30_000)
    assert scheduler.run_once() == 9 and len(delivered(store)) == 30


def test_due_times_that_are_years_apart_make_no_segments(store: Store) -> None:
    scheduler = Scheduler.of(store)
    for years in range(9):
        scheduler.schedule("t", b"v", deliver_after=f"{years * 365}d")
    assert [len(log.segments) for log in store[DELAYED]] == [1, 1]


def test_a_readonly_store_shows_what_is_pending_and_changes_nothing(
    make_store: MakeStore, store: Store
) -> None:
    ticket = Scheduler.of(store).schedule("t", b"v", deliver_after=1)
    store.close()
    scheduler = Scheduler.of(make_store(readonly=True))
    assert values(scheduler) == [b"v"] and scheduler.count() == 1
    for act in (
        scheduler.start,
        lambda: scheduler.schedule("t", b"v", deliver_after=1),
        lambda: scheduler.cancel(ticket),
        lambda: scheduler.run_once(ticket.due_ms),
    ):
        with pytest.raises(logstore.ReadOnlyError):
            act()
    assert values(scheduler) == [b"v"]  # a change that failed leaves the agenda whole
