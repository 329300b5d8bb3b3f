"""Transactions of partitions that move between nodes, and appends and markers that end later."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import logstore
from logstore import (
    ConcurrentTransactionsError,
    CoordinatorLoadingError,
    CoordinatorNotAvailableError,
    FencedError,
    LogStoreError,
    ManualClock,
    NotCoordinatorError,
    Store,
    UnknownTopicError,
)
from logstore.coordinators.internal_topics import TRANSACTION_STATE, coordinator_partition
from logstore.coordinators.quorum.outcome import Outcome
from logstore.coordinators.transaction_coordinator import Transactions
from logstore.coordinators.transaction_machine import TransactionMachine
from logstore.coordinators.transaction_state import TransactionMetadata, decode_key, encode_key

from .holding import HoldingQuorum, Place

A0, B0 = ("a", 0), ("b", 0)


def place_of(name: str) -> Place:
    return TRANSACTION_STATE, coordinator_partition(name, 50)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with logstore.open(tmp_path / "store", durability="os", clock=clock) as store:
        for name in "ab":
            store.create_topic(name)
        yield store


@pytest.fixture
def quorum(store: Store) -> HoldingQuorum:
    return HoldingQuorum(store)


@pytest.fixture
def transactions(store: Store, quorum: HoldingQuorum) -> Transactions:
    """The transactions of a node that leads the partition of the id x, in epoch 1."""
    transactions = Transactions.of(store)
    quorum.lead(place_of("x"), 1)
    assert transactions.load(place_of("x")[1], 1)
    return transactions


@pytest.fixture(autouse=True)
def no_call_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What is called with the answer of the quorum never raises."""
    yield
    assert "failed" not in caplog.text


def lose(transactions: Transactions, quorum: HoldingQuorum, name: str = "x") -> int:
    place = place_of(name)
    epoch = quorum.lose(place)
    assert transactions.drop(place[1], epoch)
    return epoch


def move(transactions: Transactions, quorum: HoldingQuorum, name: str = "x") -> None:
    """Lose the partition of an id, and lead it again in the next epoch."""
    place, epoch = place_of(name), lose(transactions, quorum, name)
    quorum.lead(place, epoch + 1)
    assert transactions.load(place[1], epoch + 1)


def begun(transactions: Transactions, quorum: HoldingQuorum) -> tuple[int, int]:
    """Begin a transaction of the id x with two partitions; return its producer."""
    made = transactions.init_producer_later("x", 60_000)
    quorum.commit(place_of("x"))
    identity = made.result()
    added = transactions.add_partitions_later("x", identity, [A0, B0])
    quorum.commit(place_of("x"))
    added.result()
    return identity


def written(quorum: HoldingQuorum, name: str = "x") -> list[TransactionMetadata]:
    """Return the records of an id in the log."""
    found = []
    for record in quorum.log(place_of(name)):
        assert record.key is not None
        if decode_key(record.key) == name and record.value is not None:
            found.append(TransactionMetadata.decode(name, record.value, record.headers))
    return found


def states(quorum: HoldingQuorum) -> list[str]:
    return [each.state.kafka_name for each in written(quorum)]


def test_prepare_is_committed_before_the_markers_and_these_before_complete(
    transactions: Transactions, quorum: HoldingQuorum
) -> None:
    identity = begun(transactions, quorum)
    ended = transactions.end_later("x", identity, commit=True)
    assert (quorum.markers, ended.over) == ([], False)  # Prepare waits
    quorum.commit(place_of("x"))
    (markers,) = quorum.markers
    assert (markers.partitions, markers.commit, markers.coordinator_epoch) == ([A0, B0], True, 1)
    assert quorum.places() == []  # Complete is not appended yet
    assert states(quorum) == ["Empty", "Ongoing", "PrepareCommit"]
    quorum.write_markers()
    assert not ended.over
    quorum.commit(place_of("x"))
    assert ended.result() == (identity[0], identity[1] + 1)
    assert states(quorum) == ["Empty", "Ongoing", "PrepareCommit", "CompleteCommit"]


def test_a_request_during_an_effect_is_concurrent_and_a_repeated_end_has_its_result(
    transactions: Transactions, quorum: HoldingQuorum
) -> None:
    identity = begun(transactions, quorum)
    ended = transactions.end_later("x", identity, commit=True)
    asks: list[Callable[[], Outcome[object]]] = [
        lambda: transactions.end_later("x", identity, commit=True).map(lambda _: None),
        lambda: transactions.add_partitions_later("x", identity, [A0]).map(lambda _: None),
        lambda: transactions.init_producer_later("x", 60_000).map(lambda _: None),
    ]
    for stage in (lambda: quorum.commit(place_of("x")), quorum.write_markers):
        for ask in asks:
            assert isinstance(ask().error, ConcurrentTransactionsError)
        stage()
    assert not ended.over
    quorum.commit(place_of("x"))
    again = transactions.end_later("x", identity, commit=True)
    assert again.result() == ended.result()


def test_a_late_end_hits_no_later_transaction(
    transactions: Transactions, quorum: HoldingQuorum
) -> None:
    """KAFKA-17754: the retry of an end arrives after the next transaction has begun, elsewhere."""
    identity = begun(transactions, quorum)
    ended = transactions.end_later("x", identity, commit=True)
    quorum.commit_all()
    following = ended.result()
    transactions.add_partitions_later("x", following, [A0])
    quorum.commit_all()
    move(transactions, quorum)
    late = transactions.end_later("x", identity, commit=False)
    assert isinstance(late.error, FencedError)
    assert states(quorum)[-1] == "Ongoing"


def test_requests_get_loading_and_not_coordinator(store: Store, quorum: HoldingQuorum) -> None:
    transactions, place = Transactions.of(store), place_of("x")
    assert isinstance(transactions.init_producer_later("x", 1000).error, NotCoordinatorError)
    with pytest.raises(NotCoordinatorError):
        transactions.state_of("x")
    quorum.lead(place, 1)
    assert isinstance(transactions.init_producer_later("x", 1000).error, CoordinatorLoadingError)
    with pytest.raises(CoordinatorLoadingError):
        transactions.state_of("x")
    assert transactions.load(place[1], 1)
    assert transactions.state_of("x") is None


def test_a_refused_append_changes_nothing(
    transactions: Transactions, quorum: HoldingQuorum
) -> None:
    identity = begun(transactions, quorum)
    refused = transactions.end_later("x", identity, commit=True)
    quorum.refuse(place_of("x"))
    assert isinstance(refused.error, CoordinatorNotAvailableError)
    known = transactions.state_of("x")
    assert known is not None
    assert (known.identity, known.state.kafka_name) == (identity, "Ongoing")
    again = transactions.end_later("x", identity, commit=True)
    quorum.commit_all()
    assert again.result() == (identity[0], identity[1] + 1)


def test_a_refused_complete_is_written_again_though_nobody_asks(
    transactions: Transactions, quorum: HoldingQuorum, clock: ManualClock
) -> None:
    identity = begun(transactions, quorum)
    ended = transactions.end_later("x", identity, commit=True)
    quorum.commit(place_of("x"))
    quorum.write_markers()
    quorum.refuse(place_of("x"))
    assert isinstance(ended.error, CoordinatorNotAvailableError)
    clock.advance(1000)
    transactions.run_due()
    assert len(quorum.markers) == 1
    quorum.commit_all()
    assert states(quorum)[-1] == "CompleteCommit"
    assert transactions.end_later("x", identity, commit=True).error is None


def test_markers_are_written_again_where_they_are_missing_until_they_are_committed(
    transactions: Transactions, quorum: HoldingQuorum, clock: ManualClock
) -> None:
    identity = begun(transactions, quorum)
    ended = transactions.end_later("x", identity, commit=True)
    quorum.commit(place_of("x"))
    quorum.write_markers(failing=[A0])
    for _ in range(20):
        assert (quorum.markers, quorum.places(), ended.over) == ([], [], False)
        clock.advance(1000)
        transactions.run_due()
        assert [each.partitions for each in quorum.markers] == [[A0]]
        quorum.write_markers(failing=[A0], error=ConnectionResetError())
    clock.advance(1000)
    transactions.run_due()
    quorum.commit_all()
    assert ended.error is None


@pytest.mark.parametrize("error", [UnknownTopicError("a"), FencedError(1, 2, where="producer 9")])
def test_a_marker_that_is_not_needed_counts_as_written(
    transactions: Transactions, quorum: HoldingQuorum, error: LogStoreError
) -> None:
    identity = begun(transactions, quorum)
    ended = transactions.end_later("x", identity, commit=True)
    quorum.commit(place_of("x"))
    quorum.write_markers(failing=[A0], error=error)
    quorum.commit_all()
    assert ended.error is None


def test_a_fenced_coordinator_epoch_ends_the_coordinator_of_the_partition(
    transactions: Transactions, quorum: HoldingQuorum
) -> None:
    identity = begun(transactions, quorum)
    ended = transactions.end_later("x", identity, commit=True)
    quorum.commit(place_of("x"))
    quorum.write_markers(failing=[A0], error=NotCoordinatorError(*place_of("x")))
    assert isinstance(ended.error, NotCoordinatorError)
    assert quorum.places() == []
    with pytest.raises(CoordinatorLoadingError):
        transactions.state_of("x")


def test_an_indeterminate_append_ends_the_coordinator_of_the_partition(
    transactions: Transactions, quorum: HoldingQuorum
) -> None:
    identity = begun(transactions, quorum)
    ended = transactions.end_later("x", identity, commit=True)
    quorum.break_off(place_of("x"))
    assert isinstance(ended.error, NotCoordinatorError)


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("stage", range(4))
def test_a_coordinator_that_is_lost_at_any_stage_is_continued_by_the_next(
    transactions: Transactions, quorum: HoldingQuorum, stage: int, commit: bool
) -> None:
    identity = begun(transactions, quorum)
    ended = transactions.end_later("x", identity, commit=commit)
    steps: list[Callable[[], object]] = [
        lambda: quorum.commit(place_of("x")),
        quorum.write_markers,
        lambda: quorum.commit(place_of("x")),
    ]
    for step in steps[:stage]:
        step()
    held = [*quorum.markers]
    move(transactions, quorum)
    if stage < 3:
        assert isinstance(ended.error, NotCoordinatorError)
    quorum.answer_late()
    for markers in held:  # those of the last epoch are answered, too
        quorum.markers.remove(markers)
        markers.done({})
    if stage == 0:  # Prepare was lost: the client decides again
        ended = transactions.end_later("x", identity, commit=commit)
    quorum.commit_all()
    word = "Commit" if commit else "Abort"
    assert states(quorum)[2:] == [f"Prepare{word}", f"Complete{word}"]
    final = transactions.end_later("x", identity, commit=commit, client_version=2)
    assert final.result() == (identity[0], identity[1] + 1)
    assert not any(log.ongoing_transactions for name in "ab" for log in quorum.store[name])


def test_a_first_producer_that_waits_is_answered_when_the_partition_is_lost(
    transactions: Transactions, quorum: HoldingQuorum
) -> None:
    made = transactions.init_producer_later("x", 60_000)
    epoch = lose(transactions, quorum)
    assert isinstance(made.error, NotCoordinatorError)
    quorum.lead(place_of("x"), epoch + 1)
    transactions.load(place_of("x")[1], epoch + 1)
    quorum.answer_late()
    assert transactions.state_of("x") is None
    assert transactions.list() == ()


def test_a_producer_takes_an_id_with_an_open_transaction_after_it_is_aborted(
    transactions: Transactions, quorum: HoldingQuorum
) -> None:
    identity = begun(transactions, quorum)
    taken = transactions.init_producer_later("x", 60_000)
    assert not taken.over
    quorum.commit_all()
    assert taken.result() == (identity[0], identity[1] + 2)
    assert states(quorum)[2:] == ["PrepareAbort", "CompleteAbort", "Empty"]
    assert isinstance(transactions.end_later("x", identity, commit=True).error, FencedError)


def test_a_time_out_counts_from_the_record_also_after_a_move(
    transactions: Transactions, quorum: HoldingQuorum, clock: ManualClock
) -> None:
    begun(transactions, quorum)
    clock.advance(50_000)
    move(transactions, quorum)
    clock.advance(9_000)
    transactions.run_due()
    assert quorum.places() == []
    clock.advance(2_000)
    transactions.run_due()
    quorum.refuse(place_of("x"))  # and it is tried again
    clock.advance(1_000)
    transactions.run_due()
    quorum.commit_all()
    assert states(quorum)[2:] == ["PrepareAbort", "CompleteAbort"]


def test_the_time_out_of_a_lost_transaction_ends_no_later_one(
    transactions: Transactions, quorum: HoldingQuorum, clock: ManualClock
) -> None:
    begun(transactions, quorum)
    epoch = lose(transactions, quorum)
    clock.advance(50_000)
    # Another node has ended it meanwhile, and the next one began there.
    newest = dataclasses.replace(
        written(quorum)[-1], producer_epoch=2, start_ms=clock.time_ms(), timeout_ms=60_000
    )
    quorum.log(place_of("x")).append(
        newest.encode(), key=encode_key("x"), headers=newest.headers, durability="os"
    )
    quorum.lead(place_of("x"), epoch + 2)
    assert transactions.load(place_of("x")[1], epoch + 2)
    clock.advance(11_000)
    transactions.run_due()
    assert quorum.places() == []
    clock.advance(50_000)
    transactions.run_due()
    assert quorum.places() == [place_of("x")]


def test_ids_of_other_partitions_stay(transactions: Transactions, quorum: HoldingQuorum) -> None:
    quorum.lead(place_of("y"), 4)
    transactions.load(place_of("y")[1], 4)
    assert place_of("x") != place_of("y")
    made = transactions.init_producer_later("y", 60_000)
    begun(transactions, quorum)
    lose(transactions, quorum)
    quorum.commit(place_of("y"))
    assert made.error is None
    assert [each.transactional_id for each in transactions.list()] == ["y"]


def test_producers_of_other_coordinators_are_not_refused_by_the_partition(
    transactions: Transactions, quorum: HoldingQuorum
) -> None:
    identity = begun(transactions, quorum)
    transactions.verify(*identity, A0)
    with pytest.raises(logstore.TransactionStateError):
        transactions.verify(*identity, ("c", 0))
    transactions.verify(999_999, 0, A0)  # another node may know it


def test_a_thread_of_this_process_waits_for_the_other_nodes(
    transactions: Transactions, quorum: HoldingQuorum
) -> None:
    found: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: found.append(transactions.init_producer("x", 60_000)))
    thread.start()
    while not quorum.places():
        assert thread.is_alive()
    assert found == []
    quorum.commit(place_of("x"))
    thread.join()
    assert len(found) == 1


# ---- any sequence ----

NAMES = ("x", "y", "z")


class MovingTransactions(RuleBasedStateMachine):
    """Requests of three ids, whose partitions and answers move in any sequence."""

    @initialize()
    def begin(self) -> None:
        self.home = tempfile.TemporaryDirectory()
        self.clock = ManualClock(1_700_000_000_000)
        self.store = logstore.open(self.home.name, durability="os", clock=self.clock)
        for name in "ab":
            self.store.create_topic(name)
        self.quorum = HoldingQuorum(self.store)
        self.transactions = Transactions.of(self.store)
        self.epoch = 0
        self.identities: dict[str, tuple[int, int]] = {}
        self.waiting: list[tuple[str, Outcome[object]]] = []
        for name in NAMES:
            self.lead(name)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.home.cleanup()

    def asked(self, name: str, outcome: Outcome[object]) -> None:
        if not outcome.over:
            self.waiting.append((name, outcome))

    @rule(name=st.sampled_from(NAMES))
    def take(self, name: str) -> None:
        made = self.transactions.init_producer_later(name, 60_000)
        made.then(lambda: made.error or self.identities.__setitem__(name, made.result()))
        self.asked(name, made.map(lambda _: None))

    @rule(name=st.sampled_from(NAMES), topic=st.sampled_from("ab"))
    def add(self, name: str, topic: str) -> None:
        if name in self.identities:
            added = self.transactions.add_partitions_later(
                name, self.identities[name], [(topic, 0)]
            )
            self.asked(name, added.map(lambda _: None))

    @rule(name=st.sampled_from(NAMES), commit=st.booleans())
    def end(self, name: str, commit: bool) -> None:
        if name in self.identities:
            ended = self.transactions.end_later(name, self.identities[name], commit=commit)
            ended.then(lambda: ended.error or self.identities.__setitem__(name, ended.result()))
            self.asked(name, ended.map(lambda _: None))

    @precondition(lambda self: self.quorum.places())
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.quorum.places()))
        acts = [self.quorum.commit, self.quorum.commit, self.quorum.refuse, self.quorum.break_off]
        act = data.draw(st.sampled_from(acts))
        if act == self.quorum.break_off:
            # The reign ends; the record is at the next leader, or not.
            held = self.quorum.held[place][0]
            if data.draw(st.booleans()):
                self.quorum.write(held)
            self.quorum.break_off(place)
            self.quorum.lose(place)
        else:
            act(place)

    @precondition(lambda self: self.quorum.markers)
    @rule(failing=st.sets(st.sampled_from([A0, B0])))
    def mark(self, failing: set[Place]) -> None:
        self.quorum.write_markers(failing)

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        place = place_of(name)
        if place in self.quorum.epochs:
            assert self.transactions.drop(place[1], self.quorum.lose(place))

    @rule(name=st.sampled_from(NAMES))
    def lead(self, name: str) -> None:
        place = place_of(name)
        if place not in self.quorum.epochs:
            self.epoch += 1
            self.quorum.lead(place, self.epoch)
            assert self.transactions.load(place[1], self.epoch)

    @rule()
    def answer_late(self) -> None:
        self.quorum.answer_late()

    @rule()
    def wait(self) -> None:
        self.clock.advance(5_000)
        self.transactions.run_due()

    @invariant()
    def requests_wait_only_for_partitions_that_are_led(self) -> None:
        self.waiting = [each for each in self.waiting if not each[1].over]
        for name, _ in self.waiting:
            assert place_of(name) in self.quorum.epochs

    @invariant()
    def the_states_are_those_of_the_log(self) -> None:
        for name in NAMES:
            place = place_of(name)
            if place in self.quorum.epochs:
                fresh = TransactionMachine()
                for each in written(self.quorum, name):
                    fresh.replay(name, each)
                found, known = fresh.get(name), self.transactions.state_of(name)
                assert (found and found.encode()) == (known and known.encode())

    @invariant()
    def records_follow_each_other(self) -> None:
        allowed = {
            "Empty": {"Empty", "Ongoing", "PrepareAbort"},
            "Ongoing": {"Ongoing", "PrepareCommit", "PrepareAbort"},
            "PrepareCommit": {"CompleteCommit"},
            "PrepareAbort": {"CompleteAbort"},
            "CompleteCommit": {"Empty", "Ongoing", "PrepareAbort"},
            "CompleteAbort": {"Empty", "Ongoing", "PrepareAbort"},
        }
        for name in NAMES:
            before = None
            for each in written(self.quorum, name):
                assert before is None or each.state.kafka_name in allowed[before]
                before = each.state.kafka_name

    @rule()
    def everything_ends(self) -> None:
        """Once all partitions are led and all answers arrive, no decided transaction is left."""
        for name in NAMES:
            self.lead(name)
        for _ in range(4):
            self.clock.advance(1_000)
            self.transactions.run_due()
            self.quorum.commit_all()
        assert not any(state.kafka_name.startswith("Prepare") for state in (
            each.state for name in NAMES for each in written(self.quorum, name)[-1:]))  # fmt: skip
        self.requests_wait_only_for_partitions_that_are_led()
        assert self.waiting == []


MovingTransactions.TestCase.settings = settings(
    max_examples=30, stateful_step_count=50, deadline=None
)
TestMovingTransactions = MovingTransactions.TestCase
