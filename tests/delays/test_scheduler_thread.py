"""The thread of a scheduler: it delivers, sleeps, tries again, and ends with its store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from logstore import Scheduler, Store, Ticket
from logstore.delays.courier import Courier
from tests.kit import PATIENCE, committed

MakeStore = Callable[..., Store]


def is_running(scheduler: Scheduler) -> bool:
    return scheduler.running  # mypy takes a property for a constant


def next_value(store: Store, start: int) -> bytes | None:
    scan = store["t"][0].scan(start, follow=True, timeout=PATIENCE, isolation="read_committed")
    return next(iter(scan)).value


def test_the_thread_delivers_what_is_due_and_sleeps_in_between(make_store: MakeStore) -> None:
    store = make_store()
    log = store.create_topic("t")[0]
    scheduler = Scheduler.of(store)
    assert not is_running(scheduler)
    scheduler.schedule("t", b"before", deliver_after=0)
    with scheduler:
        assert is_running(scheduler) and scheduler.start() is scheduler
        assert next_value(store, 0) == b"before"
        at = log.end_offset
        ticket = scheduler.schedule("t", b"soon", deliver_after=0.05)
        assert next_value(store, at) == b"soon"
        assert log[at].timestamp >= ticket.due_ms
    assert not is_running(scheduler) and scheduler.failure is None
    scheduler.schedule("t", b"after", deliver_after=0)
    assert scheduler.count() == 1  # it accepts, and does not deliver
    at = log.end_offset
    with scheduler:
        assert next_value(store, at) == b"after"
        store.close()  # ends the thread
        assert not is_running(scheduler)


def test_threads_schedule_and_cancel_while_it_delivers(make_store: MakeStore) -> None:
    store = make_store()
    log = store.create_topic("t")[0]
    scheduler = Scheduler.of(store, loaded_max=20, batch_max=7)
    kept: list[Ticket] = []
    cancelled: list[Ticket] = []

    def work(offset: int) -> None:
        for number in range(60):
            ticket = scheduler.schedule("t", b"v", deliver_after=(number + offset) % 5 / 1000)
            if number % 3 == 0 and scheduler.cancel(ticket):
                cancelled.append(ticket)
            else:
                kept.append(ticket)

    with scheduler:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        last = scheduler.schedule("t", b"last", deliver_after=0.01)
        scan = log.scan(0, follow=True, timeout=PATIENCE, isolation="read_committed")
        got = []
        for record in scan:
            got.append((dict(record.headers)["logstore.delay.id"] or b"").decode())
            if len(got) == len(kept) + 1:
                break
    assert sorted(got) == sorted(ticket.id for ticket in [*kept, last])
    assert not {ticket.id for ticket in cancelled} & set(got)
    assert scheduler.count() == 0


def test_a_failure_of_the_thread_is_shown_and_tried_again(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    store.create_topic("t")
    scheduler = Scheduler.of(store)
    monkeypatch.setattr("logstore.delays.scheduler.RETRY", 0.01)
    failed = threading.Event()
    deliver = Courier.deliver

    def fail_once(self: Courier, *arguments: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("not now")
        deliver(self, *arguments)

    monkeypatch.setattr(Courier, "deliver", fail_once)
    with scheduler:
        scheduler.schedule("t", b"v", deliver_after=0)
        assert failed.wait(PATIENCE)
        assert next_value(store, 0) == b"v"
    assert committed(store["t"][0]) == [b"v"]
