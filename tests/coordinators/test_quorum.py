"""Outcome and Seats: results that come later, and partitions that move."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logstore
from logstore import CoordinatorLoadingError, NotCoordinatorError
from logstore.coordinators.offset_book import OffsetBook
from logstore.coordinators.quorum.outcome import Outcome
from logstore.coordinators.quorum.quorum import Coordination
from logstore.coordinators.quorum.seats import Seats

from .holding import HoldingQuorum


def test_an_outcome_is_settled_once() -> None:
    outcome: Outcome[int] = Outcome()
    seen: list[object] = []
    outcome.then(lambda: seen.append(outcome.value_or_error()))
    outcome.settle(1)
    outcome.settle(2)
    outcome.settle(ValueError("late"))
    assert (outcome.result(), outcome.error, seen) == (1, None, [1])
    outcome.then(lambda: seen.append("after"))
    assert seen == [1, "after"]


def test_a_call_that_fails_keeps_no_other_from_being_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcome: Outcome[int] = Outcome()
    seen: list[int] = []
    outcome.then(lambda: seen.append(1 // 0))
    outcome.then(lambda: seen.append(2))
    outcome.settle(1)
    assert seen == [2]
    assert "failed" in caplog.text


def test_an_error_is_raised_by_result_and_passed_on() -> None:
    failed: Outcome[int] = Outcome.failed(KeyError("x"))
    with pytest.raises(KeyError):
        failed.result()
    with pytest.raises(KeyError):
        failed.map(str).result()
    with pytest.raises(ZeroDivisionError):
        Outcome.of(0).map(lambda value: 1 // value).result()
    with pytest.raises(ZeroDivisionError):
        Outcome.of(0).and_then(lambda value: Outcome.of(1 // value)).result()
    assert Outcome.of(2).and_then(lambda value: Outcome.of(value + 1)).result() == 3


@given(st.permutations(range(4)))
def test_all_of_waits_for_the_last_and_keeps_the_sequence(order: list[int]) -> None:
    outcomes: list[Outcome[int]] = [Outcome() for _ in order]
    both = Outcome.all_of(outcomes)
    for number in order:
        assert not both.over
        outcomes[number].settle(number if number else ValueError("first"))
    first, *others = both.result()
    assert isinstance(first, ValueError)
    assert others == [1, 2, 3]
    assert Outcome.all_of([]).result() == []


def test_every_call_is_made_once_though_threads_race() -> None:
    for _ in range(300):
        outcome: Outcome[int] = Outcome()
        made: list[int] = []
        start = threading.Barrier(3)

        def add(number: int, outcome: Outcome[int] = outcome, made: list[int] = made,
                start: threading.Barrier = start) -> None:  # fmt: skip
            start.wait()
            outcome.then(lambda: made.append(number))

        threads = [threading.Thread(target=add, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        start.wait()
        outcome.settle(1)
        for thread in threads:
            thread.join()
        assert sorted(made) == [0, 1]


def test_a_waiting_thread_gets_the_result_of_another() -> None:
    outcome: Outcome[str] = Outcome()
    waiter = threading.Timer(0.01, outcome.settle, ["done"])
    waiter.start()
    assert outcome.result() == "done"
    waiter.join()


# ---- seats ----


def test_a_seat_is_loading_until_it_is_taken_in_the_epoch_that_leads(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "store", durability="os") as store:
        quorum = HoldingQuorum(store)
        seats = Seats("__consumer_offsets", quorum)
        place = "__consumer_offsets", 3
        with pytest.raises(NotCoordinatorError) as caught:
            seats.check(3)
        assert (caught.value.topic, caught.value.partition) == place
        quorum.lead(place, 5)
        with pytest.raises(CoordinatorLoadingError):
            seats.check(3)
        assert seats.begin(3, 5)
        assert not seats.begin(3, 5)
        assert not seats.begin(3, 4)
        with pytest.raises(CoordinatorLoadingError):
            seats.check(3)
        assert seats.take(3, 5)
        assert seats.check(3) == 5
        assert not seats.leave(3, 4)
        quorum.lead(place, 6)  # `drop` of epoch 5 has not been called yet
        with pytest.raises(CoordinatorLoadingError):
            seats.check(3)
        assert seats.leave(3, 5)
        assert seats.numbers() == []


def test_a_load_that_is_overtaken_takes_no_seat(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "store", durability="os") as store:
        seats = Seats("__consumer_offsets", HoldingQuorum(store))
        assert seats.begin(3, 5)
        assert not seats.leave(3, 5)  # dropped while it was being loaded
        assert not seats.take(3, 5)
        assert seats.begin(3, 6)
        assert seats.begin(3, 7)
        assert not seats.take(3, 6)
        assert seats.take(3, 7)


def test_a_quorum_is_replaced_before_the_first_coordinator_only(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "store", durability="os") as store:
        OffsetBook.of(store)
        with pytest.raises(ValueError, match="in use"):
            HoldingQuorum(store)
        assert not Coordination.of(store).quorum.answers_later
