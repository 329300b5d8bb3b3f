"""Delivery with one step changed: a named test must notice each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from logstore import ManualClock, Scheduler, Store
from logstore.delays import journal
from logstore.delays.agenda import Agenda
from logstore.delays.courier import Courier
from logstore.delays.ticket import generation_of, tombstone
from tests.delays import test_scheduler as tests

Patch = pytest.MonkeyPatch


def end_tickets_before_the_transaction(patch: Patch) -> None:
    """The tombstones are not in the transaction of the delivery."""
    deliver = Courier.deliver

    def mutant(self: Courier, records: list[Any], refuse: Any) -> None:
        for record in records:
            number = record.ticket.number
            log = self._store["__logstore_delayed"][generation_of(number)]
            log.extend([tombstone(number)])
        deliver(self, records, refuse)

    patch.setattr(Courier, "deliver", mutant)


def forget_what_is_being_delivered(patch: Patch) -> None:
    patch.setattr(Agenda, "cancel", lambda self, number: self._remove(number) or None)


def deliver_by_the_wall_clock(patch: Patch) -> None:
    patch.setattr("logstore.clock.GuardedClock.now_ms", lambda self: self.clock.time_ms())


def ignore_cancellations_before_the_commit(patch: Patch) -> None:
    committed = journal._committed

    def mutant(*arguments: Any) -> Any:
        for rows in committed(*arguments):
            yield rows.where(~rows.dead)

    patch.setattr(journal, "_committed", mutant)


def read_open_transactions(patch: Patch) -> None:
    headers = journal._producer_headers
    patch.setattr(
        journal, "_producer_headers",
        lambda *arguments: (each for each in headers(*arguments) if each[1] is not None),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mutate", "killer"),
    [
        (end_tickets_before_the_transaction, tests.test_d1_a_delivery_that_fails_is_repeated_whole),
        (forget_what_is_being_delivered, tests.test_d1_a_cancel_during_the_delivery_is_too_late),
        (
            deliver_by_the_wall_clock,
            tests.test_d2_a_clock_that_leaps_delivers_nothing_early_and_nothing_twice,
        ),
        (
            ignore_cancellations_before_the_commit,
            tests.test_a_ticket_cancelled_before_its_transaction_commits_is_not_delivered,
        ),
        (read_open_transactions, tests.test_a_record_of_a_transaction_counts_when_it_commits),
    ],
)
def test_a_changed_step_is_noticed(
    make_store: Callable[..., Store],
    monkeypatch: Patch,
    mutate: Callable[[Patch], None],
    killer: Callable[..., None],
) -> None:
    clock = ManualClock()
    store = make_store(clock=clock)
    store.create_topic("t")
    given = {"store": store, "clock": clock, "monkeypatch": monkeypatch}
    wanted = killer.__code__.co_varnames[: killer.__code__.co_argcount]
    with monkeypatch.context() as patch:
        mutate(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            killer(**{name: given[name] for name in wanted})
    assert Scheduler.of(store) is not None
