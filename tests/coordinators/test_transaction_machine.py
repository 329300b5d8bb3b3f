"""The transaction coordinator, without I/O: its records, its rules, and crashes at every step.

The machine at the end runs the shipped state machine over a log in memory and partitions that admit
batches by the shipped producer state.  It stops after any effect, even between two markers, loads
what is in the log, and continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from logstore.config import ConfigError
from logstore.coordinators.transaction_machine import Append, Effect, Mark, TransactionMachine
from logstore.coordinators.transaction_state import (
    EPOCH_MAX,
    TransactionMetadata,
    TransactionState,
    decode_key,
    encode_key,
)
from logstore.errors import (
    ConcurrentTransactionsError,
    FencedError,
    InvalidNameError,
    InvalidRecordError,
    OutOfOrderSequenceError,
    TransactionAbortedError,
    TransactionStateError,
)
from logstore.format.batch import BatchHeader, EndMarker
from logstore.log.producer_state import ProducerState

S = TransactionState

# ---- records --------------------------------------------------------------------------------


def metadata(**changes: Any) -> TransactionMetadata:
    return dataclasses.replace(TransactionMetadata("t", 7, 3, 60_000), **changes)


def test_a_value_is_byte_for_byte_kafkas() -> None:
    ongoing = metadata(
        state=S.ONGOING,
        partitions=frozenset({("a", 1), ("a", 0), ("b", 5)}),
        last_update_ms=1000,
        start_ms=900,
    )
    assert ongoing.encode().hex() == (
        "0001" "0000000000000007" "0003" "0000ea60" "01"
        "03" "0261" "03" "00000000" "00000001" "00" "0262" "02" "00000005" "00"
        "00000000000003e8" "0000000000000384" "01" "02" "02" "0002"
    )  # fmt: skip
    # Nothing but Empty has no array of partitions at all.
    assert metadata().encode().hex() == (
        "0001" "0000000000000007" "0003" "0000ea60" "00" "00"
        "ffffffffffffffff" "ffffffffffffffff" "01" "02" "02" "0002"
    )  # fmt: skip
    assert encode_key("tx").hex() == "000000027478"


def test_version_0_is_read() -> None:
    raw = bytes.fromhex(
        "0000" "0000000000000007" "0003" "0000ea60" "02"
        "00000001" "0001" "61" "00000002" "00000000" "00000004"
        "00000000000003e8" "0000000000000384"
    )  # fmt: skip
    assert TransactionMetadata.decode("t", raw) == metadata(
        state=S.PREPARE_COMMIT,
        partitions=frozenset({("a", 0), ("a", 4)}),
        last_update_ms=1000,
        start_ms=900,
        client_version=0,
    )


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
int64 = st.integers(-1, 2**63 - 1)
states = st.sampled_from([s for s in S if s not in (S.DEAD, S.PREPARE_EPOCH_FENCE)])


@given(
    st.builds(
        TransactionMetadata,
        transactional_id=names,
        producer_id=int64,
        producer_epoch=st.integers(-1, EPOCH_MAX),
        timeout_ms=st.integers(0, 2**31 - 1),
        state=states,
        partitions=st.frozensets(st.tuples(names, st.integers(0, 2**31 - 1)), max_size=6),
        last_update_ms=int64,
        start_ms=int64,
        previous_producer_id=int64,
        next_producer_id=int64,
        client_version=st.integers(0, 2),
        in_process=st.booleans(),
    )
)
@settings(max_examples=60)
def test_what_is_written_is_read_again(known: TransactionMetadata) -> None:
    if known.state is S.EMPTY:
        known = dataclasses.replace(known, partitions=frozenset())
    assert decode_key(encode_key(known.transactional_id)) == known.transactional_id
    read = TransactionMetadata.decode(known.transactional_id, known.encode(), known.headers)
    assert read == known


RECORD = TransactionMetadata(
    "t", 7, 3, 60_000, S.ONGOING, frozenset({("a", 0), ("a", 2), ("b", 1)}), 12, 5, 6, 8, 2
)
STATE_AT = 2 + 8 + 2 + 4  # after the version, the producer's id and epoch, and the time-out


def nearly(whole: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, or a record of which a piece is replaced."""
    places = st.tuples(st.integers(0, len(whole)), st.integers(0, 3), st.binary(max_size=3))
    replaced = places.map(lambda at: whole[: at[0]] + at[2] + whole[at[0] + at[1] :])
    return st.binary(max_size=80) | replaced


@given(nearly(RECORD.encode()), nearly(encode_key("orders")))
@settings(max_examples=500)
def test_bytes_that_are_no_record_are_refused(value: bytes, key: bytes) -> None:
    """What is not refused with InvalidRecordError is a record: written again, it is the same."""
    with contextlib.suppress(InvalidRecordError):
        known = TransactionMetadata.decode("t", value)
        assert value[:2] in (b"\0\0", b"\0\1")
        assert value[STATE_AT] == known.state
        if known.state is S.EMPTY:
            known = dataclasses.replace(known, partitions=frozenset())
        assert TransactionMetadata.decode("t", known.encode()) == known
    with contextlib.suppress(InvalidRecordError):
        name = decode_key(key)
        assert key[:2] != b"\0\0" if name is None else key.startswith(encode_key(name))


def test_pieces_of_a_record_and_versions_to_come_are_refused() -> None:
    whole = RECORD.encode()
    assert TransactionMetadata.decode("t", whole) == RECORD
    for end in range(len(whole)):
        with pytest.raises(InvalidRecordError):
            TransactionMetadata.decode("t", whole[:end])
    for version in (-1, 2, 300):
        with pytest.raises(InvalidRecordError, match=f"version {version} "):
            TransactionMetadata.decode("t", version.to_bytes(2, "big", signed=True) + whole[2:])
    assert whole[STATE_AT] == S.ONGOING
    with pytest.raises(InvalidRecordError, match="no state 8"):
        TransactionMetadata.decode("t", whole[:STATE_AT] + b"\x08" + whole[STATE_AT + 1 :])
    key = encode_key("orders")
    for end in range(len(key)):
        with pytest.raises(InvalidRecordError):
            decode_key(key[:end])
    assert decode_key(b"\x00\x01" + key[2:]) is None


# ---- rules ----------------------------------------------------------------------------------

ids = itertools.count(1000)


def fresh() -> int:
    return next(ids)


class Driven:
    """A coordinator whose effects always succeed."""

    def __init__(self) -> None:
        self.machine = TransactionMachine()
        self.effects: list[Effect] = []

    def drive(self, effect: Effect | None, now: int = 0) -> None:
        while effect is not None:
            self.effects.append(effect)
            effect = self.machine.done(effect, now)

    def restart(self) -> None:
        """Load what is stored."""
        known = self.machine.get("t")
        assert known is not None
        self.machine = TransactionMachine()
        self.machine.replay("t", TransactionMetadata.decode("t", known.encode(), known.headers))

    def init_client(self) -> tuple[int, int]:
        """Make a Kafka client the producer."""
        self.drive(self.machine.init_producer("t", 1000, 0, fresh_id=fresh, in_process=False))
        known = self.machine.get("t")
        assert known is not None and not known.in_process
        return known.identity

    def init(self, expected: tuple[int, int] | None = None) -> tuple[int, int]:
        before = self.machine.get("t")
        if before is not None and before.state is S.ONGOING:
            self.drive(self.machine.init_producer("t", 1000, 0, fresh_id=fresh, expected=expected))
            expected = None
        self.drive(self.machine.init_producer("t", 1000, 0, fresh_id=fresh, expected=expected))
        known = self.machine.get("t")
        assert known is not None
        return known.producer_id, known.producer_epoch

    def add(self, who: tuple[int, int], *partitions: tuple[str, int], now: int = 0,
            version: int | None = None) -> None:  # fmt: skip
        self.drive(self.machine.add_partitions("t", *who, partitions, now, client_version=version))

    def end(self, who: tuple[int, int], *, commit: bool = True,
            version: int | None = None) -> tuple[int, int]:  # fmt: skip
        self.drive(
            self.machine.end("t", *who, 0, commit=commit, fresh_id=fresh, client_version=version)
        )
        known = self.machine.get("t")
        assert known is not None
        return known.producer_id, known.producer_epoch

    @property
    def state(self) -> TransactionState:
        known = self.machine.get("t")
        assert known is not None
        return known.state


def test_a_transaction_goes_through_kafkas_states() -> None:
    driven = Driven()
    who = driven.init()
    assert (who[1], driven.state) == (0, S.EMPTY)
    driven.add(who, ("a", 0))
    driven.add(who, ("a", 0))  # known already: nothing to write
    driven.add(who, ("b", 1))
    after = driven.end(who)
    appended = [e.metadata.state for e in driven.effects if isinstance(e, Append) and e.metadata]
    assert appended == [S.EMPTY, S.ONGOING, S.ONGOING, S.PREPARE_COMMIT, S.COMPLETE_COMMIT]
    (mark,) = [effect for effect in driven.effects if isinstance(effect, Mark)]
    # The markers carry the next epoch: what is left of the transaction is fenced by them.
    assert mark == Mark("t", who[0], 1, True, frozenset({("a", 0), ("b", 1)}))
    assert after == (who[0], 1)
    assert driven.end(who) == after  # asked twice, answered twice
    with pytest.raises(FencedError):
        driven.end(who, commit=False)
    with pytest.raises(FencedError):
        driven.add(who, ("a", 0))


def test_an_end_that_comes_late_does_not_hit_the_next_transaction() -> None:
    driven = Driven()
    first = driven.init()
    driven.add(first, ("a", 0))
    second = driven.end(first)
    driven.add(second, ("a", 0))
    for commit in (True, False):
        with pytest.raises(FencedError):
            driven.end(first, commit=commit)
    assert driven.state is S.ONGOING


def test_a_new_producer_fences_the_old_and_aborts_what_it_left() -> None:
    driven = Driven()
    old = driven.init()
    driven.add(old, ("a", 0))
    new = driven.init()
    assert new == (old[0], 2)
    assert [e.commit for e in driven.effects if isinstance(e, Mark)] == [False]
    for act in (
        lambda: driven.add(old, ("b", 0)),
        lambda: driven.end(old),
        lambda: driven.init(old),
    ):
        with pytest.raises(FencedError):
            act()
    driven.add(new, ("a", 0))
    driven.end(new)


def test_a_time_out_aborts_and_its_producer_may_go_on() -> None:
    driven = Driven()
    who = driven.init()
    driven.add(who, ("a", 0), now=5000)
    assert driven.machine.timed_out(6000) == []
    assert driven.machine.timed_out(6001) == ["t"]
    driven.drive(driven.machine.abort("t", 6001))
    for act in (lambda: driven.end(who), lambda: driven.add(who, ("a", 0))):
        with pytest.raises(TransactionAbortedError, match="1000 ms"):
            act()
    assert driven.init(expected=who) == (who[0], 1)
    with pytest.raises(TransactionStateError, match="no transaction to commit"):
        driven.end((who[0], 1))
    driven.init()
    with pytest.raises(FencedError):
        driven.init(expected=who)


@pytest.mark.parametrize("epoch", [EPOCH_MAX - 2, EPOCH_MAX - 1])
@pytest.mark.parametrize("commit", [True, False])
def test_epochs_that_run_out_give_a_new_id(epoch: int, commit: bool) -> None:
    driven = Driven()
    pid, _ = driven.init()
    driven.machine.replay("t", metadata(producer_id=pid, producer_epoch=epoch, timeout_ms=1000))
    who = (pid, epoch)
    for _ in range(3):
        driven.add(who, ("a", 0))
        after = driven.end(who, commit=commit)
        assert after == driven.end(who, commit=commit)
        assert (after[0] == who[0] and after[1] == who[1] + 1) or (
            after[0] != who[0] and after[1] == 0
        )
        who = after
    assert who[0] != pid
    assert max(e.producer_epoch for e in driven.effects if isinstance(e, Mark)) <= EPOCH_MAX


def test_an_epoch_that_runs_out_at_init_gives_a_new_id() -> None:
    driven = Driven()
    driven.machine.replay("t", metadata(producer_epoch=EPOCH_MAX - 1, timeout_ms=1000))
    again = driven.init(expected=(7, EPOCH_MAX - 1))
    assert again[1] == 0 and again[0] != 7
    assert driven.init(expected=(7, EPOCH_MAX - 1)) == again


def test_an_epoch_that_runs_out_at_a_time_out_gives_a_new_id() -> None:
    driven = Driven()
    driven.machine.replay("t", metadata(producer_epoch=EPOCH_MAX - 1, timeout_ms=1000))
    driven.add((7, EPOCH_MAX - 1), ("a", 0))
    driven.drive(driven.machine.abort("t", 1))
    again = driven.init(expected=(7, EPOCH_MAX - 1))
    assert again[1] == 0 and again[0] != 7
    driven.add(again, ("a", 0))
    driven.end(again)


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("epoch", [0, EPOCH_MAX - 1])
def test_a_client_of_version_2_repeats_an_end_after_a_restart(epoch: int, commit: bool) -> None:
    driven = Driven()
    pid, _ = driven.init_client()
    driven.machine.replay(
        "t", metadata(producer_id=pid, producer_epoch=epoch, timeout_ms=1000, client_version=0)
    )
    who = (pid, epoch)
    driven.add(who, ("a", 0), version=2)
    after = driven.end(who, commit=commit, version=2)
    assert after == (pid, epoch + 1) if epoch == 0 else after[0] != pid
    driven.restart()
    assert driven.end(who, commit=commit, version=2) == after
    with pytest.raises(TransactionStateError, match="has ended: it is Complete"):
        driven.end(who, commit=not commit, version=2)
    driven.add(after, ("a", 0), version=2)
    driven.restart()
    with pytest.raises(FencedError):
        driven.end(who, commit=commit, version=2)
    assert driven.state is S.ONGOING


def test_a_client_of_version_2_aborts_without_a_partition() -> None:
    driven = Driven()
    who = driven.init_client()
    with pytest.raises(TransactionStateError, match="it is Empty"):
        driven.end(who, commit=True, version=2)
    for epoch in (1, 2):
        after = driven.end(who, commit=False, version=2)
        assert after == (who[0], epoch) and driven.state is S.COMPLETE_ABORT
        assert driven.end(who, commit=False, version=2) == after
        who = after
    with pytest.raises(TransactionStateError, match="it is CompleteAbort"):
        driven.end(who, commit=True, version=2)
    driven.add(who, ("a", 0), version=2)
    assert driven.end(who, version=2) == (who[0], 3)


def test_the_version_of_a_request_decides_if_the_epoch_stays() -> None:
    driven = Driven()
    who = driven.init_client()
    driven.add(who, ("a", 0), version=2)
    assert driven.end(who, version=0) == who
    assert driven.end(who, version=0) == who
    driven.add(who, ("a", 0), version=0)
    assert driven.end(who, version=2) == (who[0], who[1] + 1)


def test_a_client_of_version_0_whose_transaction_timed_out_is_fenced() -> None:
    driven = Driven()
    who = driven.init_client()
    driven.add(who, ("a", 0), version=0)
    driven.drive(driven.machine.abort("t", 6001))
    for commit in (True, False):
        with pytest.raises(TransactionAbortedError):
            driven.end(who, commit=commit, version=0)
    assert driven.end(who, commit=False, version=2) == (who[0], who[1] + 1)


def test_while_one_effect_is_under_way_others_wait() -> None:
    machine = TransactionMachine()
    effect = machine.init_producer("t", 1000, 0, fresh_id=fresh)
    with pytest.raises(ConcurrentTransactionsError):
        machine.init_producer("t", 1000, 0, fresh_id=fresh)
    assert effect is not None
    machine.failed(effect)
    assert machine.get("t") is None
    machine.done(machine.init_producer("t", 1000, 0, fresh_id=fresh), 0)  # type: ignore[arg-type]
    with pytest.raises(InvalidNameError):
        machine.init_producer("", 1000, 0, fresh_id=fresh)
    for timeout in (0, -1, 900_001):
        with pytest.raises(ConfigError, match="900000"):
            machine.init_producer("u", timeout, 0, fresh_id=fresh)
    with pytest.raises(TransactionStateError):
        machine.add_partitions("nobody", 1, 0, [("a", 0)], 0)
    with pytest.raises(TransactionStateError):
        machine.abort("nobody", 0)


def test_ids_that_nobody_uses_are_forgotten() -> None:
    driven = Driven()
    driven.init()
    week = driven.machine.expiration_ms
    assert driven.machine.expired(week - 1) == []
    assert driven.machine.expired(week) == ["t"]
    driven.drive(driven.machine.forget("t"))
    assert driven.machine.get("t") is None
    assert driven.effects[-1] == Append("t", None)


# ---- the machine ----------------------------------------------------------------------------


class Crash(Exception):
    """The process is gone."""


class Log:
    """A partition: batches of data and markers, admitted as the engine admits them."""

    def __init__(self) -> None:
        self.state = ProducerState()
        self.open: dict[int, list[int]] = {}  # producer -> transactions with data since a marker
        self.committed: list[int] = []
        self.aborted: list[int] = []
        self.end = 0

    def _header(self, pid: int, epoch: int, sequence: int, attributes: int) -> BatchHeader:
        return BatchHeader(self.end, 100, 0, 2, 0, attributes, 0, 0, 0, pid, epoch, sequence, 1)

    def write(self, pid: int, epoch: int, transaction: int) -> None:
        entry = self.state.get(pid)
        same = entry is not None and entry.epoch == epoch
        sequence = entry.last_sequence + 1 if same and entry is not None else 0
        header = self._header(pid, epoch, sequence, 0x10)
        self.state.commit(self.state.admit([(header, None)], "leader"))
        self.open.setdefault(pid, []).append(transaction)
        self.end += 1

    def mark(self, pid: int, epoch: int, commit: bool) -> None:
        header = self._header(pid, epoch, -1, 0x30)
        self.state.commit(self.state.admit([(header, EndMarker(commit, 0))], "coordinator"))
        (self.committed if commit else self.aborted).extend(self.open.pop(pid, []))
        self.end += 1


@dataclasses.dataclass
class Client:
    """A producer as its process sees it."""

    name: str
    identity: tuple[int, int]
    transaction: int = -1
    added: set[int] = dataclasses.field(default_factory=set)


class TransactionModel(RuleBasedStateMachine):
    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.machine = TransactionMachine()
        self.log: list[tuple[bytes, bytes | None]] = []
        self.partitions = [Log() for _ in range(3)]
        self.now = 0
        self.numbers = itertools.count()
        self.ids = itertools.count(1)
        self.wrote: dict[int, list[int]] = {}  # transaction -> partitions, one for each record
        self.told: dict[int, bool] = {}  # the outcome that its client got: committed or not
        self.current: dict[str, Client] = {}
        self.fuel = -1  # effects until the crash; -1: none

    # ---- carrying out ----

    def burn(self) -> None:
        if self.fuel == 0:
            raise Crash
        self.fuel -= 1

    def drive(self, effect: Effect | None) -> None:
        while effect is not None:
            if isinstance(effect, Append):
                self.burn()
                value = None if effect.metadata is None else effect.metadata.encode()
                self.log.append((encode_key(effect.transactional_id), value))
            else:
                for _, number in sorted(effect.partitions):
                    self.burn()
                    try:
                        self.partitions[number].mark(
                            effect.producer_id, effect.producer_epoch, effect.commit
                        )
                    except FencedError:
                        # Only a marker that is there already, from before a crash.
                        assert effect.producer_id not in self.partitions[number].open
            self.burn()
            effect = self.machine.done(effect, self.now)

    def crash(self) -> None:
        """All memory is gone: load the log, finish, abort what was open."""
        self.fuel = -1
        self.machine = TransactionMachine()
        for key, value in self.log:
            name = decode_key(key)
            assert name is not None
            self.machine.replay(
                name, None if value is None else TransactionMetadata.decode(name, value)
            )
        for name in self.machine.unfinished():
            self.drive(self.machine.resume(name))
        for known in list(self.machine):
            if known.state is S.ONGOING:
                self.drive(self.machine.abort(known.transactional_id, self.now))
        self.current.clear()
        for partition in self.partitions:
            assert not partition.open, "a transaction hangs"

    # ---- rules ----

    @rule(target=clients, name=st.sampled_from("xy"), fuel=st.integers(-1, 12))
    def init(self, name: str, fuel: int) -> Client:
        self.fuel = fuel if fuel < 8 else -1
        try:
            while True:
                self.drive(self.machine.init_producer(name, 1000, self.now, fresh_id=self.fresh_id))
                known = self.machine.get(name)
                assert known is not None
                if known.state is S.EMPTY:
                    break
        except Crash:
            self.crash()
            return Client(name, (-1, -1))
        self.fuel = -1
        client = Client(name, (known.producer_id, known.producer_epoch))
        self.current[name] = client
        return client

    def fresh_id(self) -> int:
        return next(self.ids)

    @rule(client=clients, numbers=st.lists(st.integers(0, 2), min_size=1, max_size=4),
          fuel=st.integers(-1, 20))  # fmt: skip
    def send(self, client: Client, numbers: list[int], fuel: int) -> None:
        mine = self.current.get(client.name) is client
        self.fuel = fuel if fuel < 4 else -1
        if client.transaction < 0:
            client.transaction = next(self.numbers)
            client.added = set()
            self.wrote[client.transaction] = []
        try:
            for number in numbers:
                if number not in client.added:
                    self.drive(
                        self.machine.add_partitions(
                            client.name, *client.identity, [("p", number)], self.now
                        )
                    )
                    client.added.add(number)
                self.partitions[number].write(*client.identity, client.transaction)
                self.wrote[client.transaction].append(number)
        except Crash:
            self.crash()
        except (FencedError, TransactionAbortedError, TransactionStateError):
            known = self.machine.get(client.name)
            fenced = known is None or (known.producer_id, known.producer_epoch) != client.identity
            assert not mine or fenced
        except OutOfOrderSequenceError:
            assert not mine
        finally:
            self.fuel = -1

    @rule(client=clients, commit=st.booleans(), fuel=st.integers(-1, 24))
    def end(self, client: Client, commit: bool, fuel: int) -> None:
        transaction = client.transaction
        self.fuel = fuel if fuel < 14 else -1
        try:
            self.drive(
                self.machine.end(
                    client.name, *client.identity, self.now, commit=commit, fresh_id=self.fresh_id
                )
            )
        except Crash:
            self.crash()
            client.transaction = -1
            return
        except (FencedError, TransactionAbortedError, TransactionStateError):
            # This client may not end it; the records are aborted now or later.
            if transaction >= 0:
                known = self.machine.get(client.name)
                gone = known is None or (known.producer_id, known.producer_epoch) != client.identity
                if gone:
                    self.told.setdefault(transaction, False)
                    client.transaction = -1
            return
        finally:
            self.fuel = -1
        known = self.machine.get(client.name)
        assert known is not None
        if transaction >= 0:
            assert self.told.setdefault(transaction, commit) == commit
        client.transaction = -1
        client.identity = (known.producer_id, known.producer_epoch)

    @rule(ms=st.integers(1, 900))
    def time_passes(self, ms: int) -> None:
        self.now += ms
        for name in self.machine.timed_out(self.now):
            self.drive(self.machine.abort(name, self.now))

    @rule(client=consumes(clients))
    def crash_now(self, client: Client) -> None:
        self.crash()

    # ---- what must hold ----

    @invariant()
    def committed_whole_or_invisible(self) -> None:
        for transaction, numbers in self.wrote.items():
            for number, partition in enumerate(self.partitions):
                count = numbers.count(number)
                visible = partition.committed.count(transaction)
                hidden = partition.aborted.count(transaction)
                is_open = sum(each.count(transaction) for each in partition.open.values())
                assert visible + hidden + is_open == count
                if transaction in self.told:
                    expected = count if self.told[transaction] else 0
                    assert visible == expected, (transaction, number, self.told[transaction])
            outcomes = {
                transaction in partition.committed
                for number, partition in enumerate(self.partitions)
                if number in numbers
            }
            assert len(outcomes) <= 1, "committed in one partition and not in another"

    @invariant()
    def epochs_only_grow(self) -> None:
        last: dict[tuple[str, int], int] = {}
        for key, value in self.log:
            if value is not None:
                name = decode_key(key)
                assert name is not None
                known = TransactionMetadata.decode(name, value)
                mine = (name, known.producer_id)
                assert known.producer_epoch >= last.get(mine, -1)
                last[mine] = known.producer_epoch


TransactionModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None
)
TestTransactions = TransactionModel.TestCase
