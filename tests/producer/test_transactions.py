"""Transactions on a store: whole or not at all, fenced, timed out, and stopped at every step."""

from __future__ import annotations

import contextlib
import errno
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

import logstore
from logstore import (
    BatchEncoder,
    ClosedError,
    ConfigError,
    CorruptLogError,
    DiskFullError,
    FencedError,
    InvalidNameError,
    ManualClock,
    Partition,
    Producer,
    Store,
    TransactionAbortedError,
    Transactions,
    TransactionStateError,
    with_producer,
)
from logstore.coordinators.internal_topics import TRANSACTION_STATE, coordinator_partition
from logstore.coordinators.offset_book import OffsetBook
from logstore.coordinators.transaction_state import (
    TransactionMetadata,
    TransactionState,
    decode_key,
)
from logstore.format.batch import EndMarker, split
from logstore.partition.appender import Appender
from logstore.testing import Fault, inject_io
from tests.kit import kill, wait_until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with logstore.open(tmp_path / "store", durability="os") as opened:
        opened.create_topic("a", partitions=2)
        opened.create_topic("b")
        yield opened


def committed(store: Store, topic: str) -> list[bytes | None]:
    return [r.value for log in store[topic] for r in log.scan(isolation="read_committed")]


def everything(store: Store, topic: str) -> list[bytes | None]:
    return [record.value for log in store[topic] for record in log.scan()]


def offsets_of(store: Store, group: str) -> dict[tuple[str, int], int]:
    found = OffsetBook.of(store).committed(group)
    return {tuple(where): each.offset for where, each in found.items()}  # type: ignore[misc]


def states(store: Store) -> list[tuple[str, TransactionState]]:
    found = []
    for log in store[TRANSACTION_STATE]:
        for record in log:
            assert record.key is not None
            name = decode_key(record.key)
            assert name is not None
            assert log.number == coordinator_partition(name, 50)
            assert record.value is not None
            found.append((name, TransactionMetadata.decode(name, record.value).state))
    return found


# ---- whole, or not at all -------------------------------------------------------------------


def test_records_and_offsets_are_committed_together(store: Store) -> None:
    with Producer(store, "copy", linger=600.0) as producer:
        with producer.transaction() as tx:
            sent = tx.send("a", b"1", partition=0)
            tx.send("a", b"2", partition=1)
            assert tx.append("b", b"3").offset == 0
            tx.commit_offsets({("source", 0): 42}, group_id="workers")
            assert everything(store, "b") == [b"3"]
            assert committed(store, "b") == []
            assert offsets_of(store, "workers") == {}
        assert committed(store, "a") == [b"1", b"2"]
        assert committed(store, "b") == [b"3"]
        assert offsets_of(store, "workers") == {("source", 0): 42}
        assert sent.result(0).offset == 0
        assert producer.producer_epoch == 1
    assert [state for _, state in states(store)] == [
        TransactionState.EMPTY,
        TransactionState.ONGOING,  # with b, then with the group's offsets, then with a
        TransactionState.ONGOING,
        TransactionState.ONGOING,
        TransactionState.PREPARE_COMMIT,
        TransactionState.COMPLETE_COMMIT,
    ]


def test_a_block_that_raises_leaves_nothing_to_see(store: Store) -> None:
    with Producer(store, "copy", linger=600.0) as producer:
        with pytest.raises(ZeroDivisionError), producer.transaction() as tx:
            tx.append("a", b"written", partition=0)
            held = tx.send("a", b"held", partition=1)
            tx.commit_offsets({("source", 0): 1}, group_id="workers")
            _ = 1 / 0
        assert isinstance(held.exception(0), TransactionAbortedError)
        assert committed(store, "a") == []
        assert everything(store, "a") == [b"written"]
        assert offsets_of(store, "workers") == {}
        with producer.transaction() as tx:
            tx.send("a", b"next", partition=0)
        assert committed(store, "a") == [b"next"]
        assert store["a"][0].last_stable_offset == store["a"][0].end_offset


def test_a_transaction_of_nothing_writes_nothing(store: Store) -> None:
    with Producer(store, "copy") as producer:
        for _ in range(3):
            with producer.transaction():
                pass
        with pytest.raises(KeyError), producer.transaction():
            raise KeyError
        assert producer.producer_epoch == 0
    assert len(states(store)) == 1


def test_commit_and_abort_by_hand(store: Store) -> None:
    with Producer(store, "copy") as producer:
        tx = producer.transaction()
        assert repr(tx) == "<Transaction of 0 partitions, open>"
        tx.send("b", b"1")
        tx.commit()
        for act in (tx.commit, tx.abort, lambda: tx.append("b", b"x"), lambda: tx.send("b", b"x"),
                    lambda: tx.commit_offsets({}, group_id="g")):  # fmt: skip
            with pytest.raises(TransactionStateError, match="it was committed"):
                act()
        with producer.transaction() as tx:
            tx.send("b", b"2")
            tx.abort()
        with producer.transaction() as tx:
            producer.send("b", b"3")  # the producer's own are in it as well
            with pytest.raises(TransactionStateError, match="commit or abort it first"):
                producer.transaction()
        with pytest.raises(TransactionStateError, match=r"with producer\.transaction"):
            producer.send("b", b"4")
        with pytest.raises(TransactionStateError):
            producer.append("b", b"4")
    assert committed(store, "b") == [b"1", b"3"]


def test_many_batches_and_many_transactions_are_numbered_right(store: Store) -> None:
    with Producer(store, "copy", batch_bytes=500, compression="lz4", linger=0.001) as producer:
        for n in range(6):
            with producer.transaction() as tx:
                for m in range(200):
                    tx.send("a", b"%d %d" % (n, m) * 5, key=b"%d" % m)
                if n % 3 == 2:
                    tx.abort()
    kept = [b"%d %d" % (n, m) * 5 for n in (0, 1, 3, 4) for m in range(200)]
    assert sorted(v for v in committed(store, "a") if v) == sorted(kept)
    store.check()


def test_what_is_asked_for_is_checked(store: Store) -> None:
    with pytest.raises(ConfigError, match="my-transactional-id"):
        Producer(store).transaction()
    with pytest.raises(ConfigError, match="idempotence"):
        Producer(store, "x", idempotence=False)
    with pytest.raises(ConfigError, match="900000"):
        Producer(store, "x", transaction_timeout=10_000)
    producer = Producer(store, "x")
    with producer, pytest.raises(ConfigError, match="group_id"), producer.transaction() as tx:
        tx.commit_offsets({("a", 0): 1})


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ("\ud800", ConfigError, "transactional id has to be Unicode text"),
        (5, TypeError, "transactional id is a str, not 5"),
        (b"x", TypeError, "transactional id is a str, not b'x'"),
        ("", InvalidNameError, "not empty"),
        ("x" * 10_001, InvalidNameError, "at most 10000"),
    ],
)
def test_a_transactional_id_is_text(
    store: Store, wrong: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Producer(store, wrong)
    if not wrong or (isinstance(wrong, str) and len(wrong) > 1):
        error, match = TransactionStateError, "nothing is known"
    with pytest.raises(error, match=match):
        Transactions.of(store).abort(wrong)
    with pytest.raises(error, match=match):
        Transactions.of(store).add_partitions(wrong, (1, 0), [("b", 0)])


# ---- fencing and time-outs ------------------------------------------------------------------


def test_a_new_producer_of_the_id_fences_the_old(store: Store) -> None:
    old = Producer(store, "job", linger=600.0)
    with old.transaction() as tx:
        tx.send("b", b"1")
    zombie = old.transaction()
    zombie.append("b", b"lost")
    held = zombie.send("b", b"held back")
    new = Producer(store, "job")
    assert new.producer_id == old.producer_id and new.producer_epoch > old.producer_epoch
    assert committed(store, "b") == [b"1"]
    assert store["b"][0].ongoing_transactions == []
    with pytest.raises(FencedError):
        zombie.commit()
    assert held.exception(60) is not None
    with pytest.raises(FencedError):
        old.transaction()
    with new.transaction() as tx:
        tx.send("b", b"2")
    old.close()
    new.close()
    assert committed(store, "b") == [b"1", b"2"]


def test_a_transaction_that_stays_open_is_aborted(tmp_path: Path) -> None:
    clock = ManualClock()
    with logstore.open(tmp_path, clock=clock, durability="os") as store:
        store.create_topic("b")
        transactions = Transactions.of(store)
        with Producer(store, "slow", transaction_timeout=5) as producer:
            tx = producer.transaction()
            tx.append("b", b"late")
            clock.advance(5_000)
            transactions.run_due()
            assert transactions.describe("slow").state == "Ongoing"
            clock.advance(2)
            transactions.run_due()
            assert transactions.describe("slow").state == "CompleteAbort"
            with pytest.raises(TransactionAbortedError, match="5000 ms"):
                tx.commit()
            assert committed(store, "b") == []
            with producer.transaction() as tx:  # no other producer has the id: it may continue
                tx.append("b", b"in time")
            clock.advance(60_000)
            assert transactions.run_due() == 0
        assert committed(store, "b") == [b"in time"]


@pytest.mark.parametrize("packs", [1, 2])
@pytest.mark.parametrize("act", ["commit", "flush", "append", "commit_offsets"])
def test_records_that_come_after_the_time_out_are_told_of_it(
    tmp_path: Path, packs: int, act: str
) -> None:
    clock = ManualClock()
    with logstore.open(tmp_path, clock=clock, durability="os") as store:
        store.create_topic("a", partitions=2)
        producer = Producer(store, "slow", transaction_timeout=5, linger=600.0)
        tx = producer.transaction()
        for number in range(packs):
            tx.append("a", b"late", partition=number)
        tx.commit_offsets({("a", 0): 1}, group_id="workers")
        clock.advance(5_001)
        Transactions.of(store).run_due()
        later = [tx.send("a", b"later", partition=number) for number in range(packs)]
        if act == "append":
            with pytest.raises(TransactionAbortedError, match="5000 ms"):
                tx.append("a", b"later", partition=0)
        elif act == "flush":
            with pytest.raises(TransactionAbortedError, match="5000 ms"):
                producer.flush()
        elif act == "commit_offsets":
            with pytest.raises(TransactionAbortedError, match="5000 ms"):
                tx.commit_offsets({("a", 0): 2}, group_id="workers")
        with pytest.raises(TransactionAbortedError, match="5000 ms"):
            tx.commit()
        for delivery in later:
            assert isinstance(delivery.exception(0), TransactionAbortedError)
        with producer.transaction() as tx:  # no other producer has the id
            tx.send("a", b"in time", partition=0)
        assert committed(store, "a") == [b"in time"]
        tx = producer.transaction()
        tx.append("a", b"fenced", partition=0)
        Producer(store, "slow").close()
        tx.send("a", b"later", partition=0)
        with pytest.raises(FencedError):
            tx.commit()
        with pytest.raises(FencedError):
            producer.transaction()
        producer.close()


def test_a_thread_watches_the_time(store: Store) -> None:
    with Producer(store, "slow", transaction_timeout=0.05) as producer:
        tx = producer.transaction()
        tx.append("b", b"late")
        wait_until(lambda: Transactions.of(store).describe("slow").state == "CompleteAbort")
        with pytest.raises(TransactionAbortedError):
            tx.commit()
    assert committed(store, "b") == []


# ---- operators ------------------------------------------------------------------------------


def test_transactions_can_be_listed_described_and_aborted(store: Store) -> None:
    assert Transactions.of(store).list() == ()
    with Producer(store, "one") as one, Producer(store, "two") as two:
        with one.transaction() as tx:
            tx.send("b", b"1")
        tx = two.transaction()
        tx.append("a", b"2", partition=1)
        transactions = Transactions.of(store)
        assert [each.transactional_id for each in transactions.list()] == ["one", "two"]
        assert [each.transactional_id for each in transactions.list(open_only=True)] == ["two"]
        shown = transactions.describe("two")
        assert (shown.state, shown.partitions, shown.is_open) == ("Ongoing", (("a", 1),), True)
        assert shown.producer_id == two.producer_id and shown.start_ms > 0
        with logstore.open(store.path, readonly=True) as reader:
            assert Transactions.of(reader).describe("two") == shown
            with pytest.raises(logstore.ReadOnlyError):
                Transactions.of(reader).abort("two")
        assert transactions.abort("two").state == "CompleteAbort"
        with pytest.raises(TransactionStateError, match="it is CompleteAbort"):
            transactions.abort("two")
        with pytest.raises(LookupError):
            transactions.describe("three")
        with pytest.raises(TransactionAbortedError):
            tx.append("b", b"x")
        with pytest.raises(TransactionAbortedError):
            tx.commit()
    assert committed(store, "a") == []


def test_ids_that_nobody_uses_are_forgotten(tmp_path: Path) -> None:
    clock = ManualClock()
    with logstore.open(tmp_path, clock=clock, durability="os") as store:
        with Producer(store, "old"):
            pass
        clock.advance(8 * 86_400_000)
        with Producer(store, "new"):
            pass
        assert Transactions.of(store).expire() == ("old",)
        assert [each.transactional_id for each in Transactions.of(store).list()] == ["new"]
    with logstore.open(tmp_path, clock=clock) as store:
        assert [each.transactional_id for each in Transactions.of(store).list()] == ["new"]


# ---- ends -----------------------------------------------------------------------------------


def test_an_abort_ends_what_the_producers_thread_enlists_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may be between its look at the transaction and its first write."""
    with Producer(store, "mine", linger=0.001) as producer:
        client = producer._client
        assert client is not None
        looked, aborting = threading.Event(), threading.Event()
        enlist = type(client)._enlist

        def late(self: Any, transaction: Any, partitions: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                looked.set()
                assert aborting.wait(20)
            enlist(self, transaction, partitions)

        monkeypatch.setattr(type(client), "_enlist", late)
        transaction = producer.transaction()
        end = transaction.end
        monkeypatch.setattr(transaction, "end", lambda how: (end(how), aborting.set()))
        transaction.send("a", b"aborted", partition=0)
        assert looked.wait(20)
        transaction.abort()
        monkeypatch.undo()
        with producer.transaction() as following:
            following.send("a", b"committed", partition=0)
    assert committed(store, "a") == [b"committed"]


def test_closing_the_store_aborts_what_is_open(tmp_path: Path) -> None:
    store = logstore.open(tmp_path, durability="os")
    store.create_topic("b")
    producer = Producer(store, "x", linger=600.0)
    tx = producer.transaction()
    tx.append("b", b"written")
    held = tx.send("b", b"held")
    store.close()
    assert isinstance(held.exception(0), ClosedError)
    with pytest.raises(TransactionStateError, match="its store was closed"):
        tx.commit()
    with logstore.open(tmp_path) as store:
        assert store.recovery.clean
        assert committed(store, "b") == []
        assert store["b"][0].ongoing_transactions == []
        assert Transactions.of(store).describe("x").state == "CompleteAbort"


def test_closing_the_producer_aborts_what_is_open(store: Store) -> None:
    producer = Producer(store, "x")
    tx = producer.transaction()
    tx.append("b", b"1")
    producer.close()
    assert committed(store, "b") == [] and store["b"][0].ongoing_transactions == []
    assert tx.over == "aborted"


def test_a_topic_that_is_deleted_meanwhile_keeps_nobody(store: Store) -> None:
    with Producer(store, "x") as producer, producer.transaction() as tx:
        tx.append("a", b"1", partition=0)
        tx.append("b", b"2")
        store.delete_topic("a")
    assert committed(store, "b") == [b"2"]
    assert Transactions.of(store).describe("x").state == "CompleteCommit"


# ---- stopped at every step ------------------------------------------------------------------


class Stopped(BaseException):
    """The process is gone."""


STEPS = ("append", "append_batch", "end_transaction", "write_produced")


class Stop:
    """Lets a number of appends to any log happen, and none after that.

    `torn`: the last of them is in the log, but its append raises.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1 << 30
        self.torn = False
        for name in STEPS:
            monkeypatch.setattr(Appender, name, self._counted(getattr(Appender, name)))

    def _counted(self, real: Any) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            if self.left <= 0:
                raise Stopped
            self.left -= 1
            result = real(*args, **kwargs)
            if self.left == 0 and self.torn:
                raise Stopped
            return result

        return act


def two_transactions(store: Store) -> list[str]:
    """What happened, as far as the process got to know."""
    known = []
    producer = Producer(store, "job", linger=600.0)
    with producer.transaction() as tx:
        for number in (0, 1):
            tx.send("a", b"first", partition=number)
        tx.append("b", b"first")
        tx.commit_offsets({("source", 0): 1}, group_id="g")
        known.append("begun")
    known.append("committed")
    tx = producer.transaction()
    tx.append("b", b"second")
    tx.send("a", b"second", partition=0)
    tx.abort()
    known.append("aborted")
    return known


def fresh_copy(base: Path, path: Path) -> Store:
    """A store with all its topics, quickly."""
    if not base.exists():
        with logstore.open(base, durability="os") as store:
            store.create_topic("a", partitions=2)
            store.create_topic("b")
            OffsetBook.of(store).log_of("g")
            Transactions.of(store)._partition_of("job")
    shutil.copytree(base, path)
    return logstore.open(path, durability="os")


@pytest.mark.parametrize("torn", [False, True])
def test_a_process_that_stops_anywhere_leaves_nothing_half_done(
    tmp_path: Path, torn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop(monkeypatch)
    outcomes = set()
    for steps in range(1, 60):
        store = fresh_copy(tmp_path / "base", path := tmp_path / str(steps))
        stop.left, stop.torn = steps, torn
        known: list[str] = []
        with contextlib.suppress(Stopped):
            known = two_transactions(store)
        over = stop.left > 0
        stop.left = 1 << 30
        kill(store)
        with logstore.open(path, durability="os") as store:
            seen = [*committed(store, "a"), *committed(store, "b")]
            offsets = offsets_of(store, "g")
            assert (seen, offsets) in (
                ([], {}),
                ([b"first"] * 3, {("source", 0): 1}),
            ), f"after {steps} steps"
            outcomes.add(len(seen))
            for topic in store:
                for log in store[topic]:
                    assert log.ongoing_transactions == [], f"{log.name} after {steps} steps"
            # The next transaction works.
            with Producer(store, "job") as producer, producer.transaction() as tx:
                tx.send("b", b"third")
            assert committed(store, "b")[-1] == b"third"
            store.check()
        if over:
            break
    assert known == ["begun", "committed", "aborted"]
    assert outcomes == {0, 3}
    assert steps > 15


def _remembering(opened: list[Store], real: Any = Store._take_over) -> Any:
    def take_over(self: Store, *args: Any) -> None:
        opened.append(self)
        real(self, *args)

    return take_over


def test_a_recovery_that_stops_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop(monkeypatch)
    for committing in (8, 9, 10):
        for steps in range(5):
            path = tmp_path / f"{committing}-{steps}"
            store = fresh_copy(tmp_path / "base", path)
            stop.left = committing
            with pytest.raises(Stopped):
                two_transactions(store)
            stop.left = 1 << 30
            kill(store)
            opened: list[Store] = []
            with monkeypatch.context() as patched:
                patched.setattr(Store, "_take_over", _remembering(opened))
                patched.setattr(Store, "close", lambda self: None)
                stop.left = steps
                with contextlib.suppress(Stopped):
                    logstore.open(path, durability="os")
                stop.left = 1 << 30
            kill(opened[0])
            with logstore.open(path, durability="os") as store:
                seen = [*committed(store, "a"), *committed(store, "b")]
                assert seen in ([], [b"first"] * 3)
                assert (offsets_of(store, "g") == {}) == (seen == [])
                assert all(not log.ongoing_transactions for t in store for log in store[t])


def test_an_error_after_the_decision_does_not_change_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Partition.end_transaction
    broken = True

    def marker(self: Any, *args: Any, **kwargs: Any) -> int:
        if broken and self.topic == "b":
            raise OSError(5, "EIO")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Partition, "end_transaction", marker)
    with Producer(store, "x") as producer:
        with pytest.raises(OSError, match="EIO") as caught, producer.transaction() as tx:
            tx.send("a", b"1", partition=0)
            tx.send("b", b"1")
        assert not isinstance(caught.value, TransactionAbortedError)
        assert Transactions.of(store).describe("x").state == "PrepareCommit"
        broken = False
        with producer.transaction() as tx:  # ends what was decided first
            tx.send("b", b"2")
    assert committed(store, "a") == [b"1"]
    assert committed(store, "b") == [b"1", b"2"]


def test_a_marker_that_finds_no_room_once_is_written_again(store: Store) -> None:
    producer = Producer(store, "x", linger=600.0)
    tx = producer.transaction()
    tx.send("b", b"pay")
    with inject_io(Fault.fail(errno.ENOSPC, "pwrite", "*b-0/*.log", call=2), root=store.path) as io:
        tx.commit()
    assert io.fired
    assert tx.over == "committed"
    with producer.transaction() as tx:
        tx.send("b", b"next")
    producer.close()
    assert committed(store, "b") == [b"pay", b"next"]


def test_what_is_decided_is_committed_though_no_marker_finds_room(store: Store) -> None:
    producer = Producer(store, "x", linger=600.0, max_block=0.1)
    tx = producer.transaction()
    sent = tx.send("b", b"pay", dedupe_id="order-1")
    full = Fault.fail(errno.ENOSPC, "pwrite", "*b-0/*.log", call=2, forever=True)
    with inject_io(full, root=store.path):
        with pytest.raises(DiskFullError) as caught:
            tx.commit()
        assert any("is committed" in note for note in caught.value.__notes__)
        assert tx.over == "committed"
        assert Transactions.of(store).describe("x").state == "PrepareCommit"
        with pytest.raises(TransactionStateError, match="committed"):
            tx.abort()
        with pytest.raises(DiskFullError):
            producer.transaction()
    with Producer(store, "y") as other, other.transaction() as again:
        assert again.append("b", b"pay", dedupe_id="order-1") == sent.result(0)
    with producer.transaction() as tx:
        tx.send("b", b"next")
    producer.close()
    assert committed(store, "b") == [b"pay", b"next"]


def test_who_takes_the_id_after_the_decision_has_finished_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Partition.end_transaction
    others: list[Producer] = []

    def marker(self: Any, *args: Any, **kwargs: Any) -> int:
        if not others:
            others.append(cast(Producer, None))
            raise DiskFullError(28, "ENOSPC")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Partition, "end_transaction", marker)
    monkeypatch.setattr(
        "logstore.producer.producer.time.sleep", lambda _: others.append(Producer(store, "x"))
    )
    producer = Producer(store, "x")
    tx = producer.transaction()
    tx.append("b", b"1")
    tx.commit()
    assert (tx.over, committed(store, "b")) == ("committed", [b"1"])
    with pytest.raises(FencedError):
        producer.transaction()
    with others[1].transaction() as tx:
        tx.append("b", b"2")
    assert committed(store, "b") == [b"1", b"2"]


def test_an_interrupt_while_committing_decides_by_the_log(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop(monkeypatch)
    for torn in (False, True):
        for steps in range(1, 8):
            producer = Producer(store, "x", linger=600.0)
            before = committed(store, "b")
            stop.left, stop.torn = steps, torn
            with pytest.raises(Stopped):
                with producer.transaction() as tx:
                    tx.append("b", b"%d %d" % (torn, steps))
                    tx.send("a", b"%d %d" % (torn, steps), partition=0)
                stop.left = 0
                raise Stopped
            stop.left = 1 << 30
            with producer.transaction() as tx:
                tx.send("b", b"next")
            producer.close()
            new = committed(store, "b")[len(before) :]
            mine = b"%d %d" % (torn, steps)
            assert new in ([b"next"], [mine, b"next"])
            assert (mine in new) == (mine in committed(store, "a"))
            assert all(not log.ongoing_transactions for t in store for log in store[t])


def test_damage_in_the_states_of_some_ids_leaves_the_others_alone(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what could not be finished is finished once the file is whole again."""
    with Producer(store, "P") as producer, producer.transaction() as tx:
        tx.send("b", b"of P")
    killed = tmp_path / "killed"
    mark = Transactions._mark

    def copy_first(self: Transactions, effect: Any) -> None:
        if not killed.exists():
            shutil.copytree(store.path, killed)
        mark(self, effect)

    numbers = {name: coordinator_partition(name, 50) for name in "PQR"}
    assert len(set(numbers.values())) == 3
    monkeypatch.setattr(Transactions, "_mark", copy_first)
    with Producer(store, "Q") as producer, producer.transaction() as tx:
        tx.send("b", b"of Q")
    log_of_p = killed / f"{TRANSACTION_STATE}-{numbers['P']}" / f"{0:020d}.log"
    good = log_of_p.read_bytes()
    log_of_p.write_bytes(good[:80] + bytes([good[80] ^ 1]) + good[81:])
    with logstore.open(killed) as again:
        assert list(again.recovery.failed) == [f"{TRANSACTION_STATE}-{numbers['P']}"]
        assert committed(again, "b") == [b"of P", b"of Q"]
        with pytest.raises(CorruptLogError):
            Producer(again, "P")
        with pytest.raises(CorruptLogError):
            Transactions.of(again).list()
        with Producer(again, "R") as producer, producer.transaction() as tx:
            tx.send("b", b"of R")
        assert committed(again, "b") == [b"of P", b"of Q", b"of R"]
    log_of_p.write_bytes(good)
    with logstore.open(killed) as again:
        assert not again.recovery.clean  # it was not forgotten
        assert not again.recovery.failed
        assert Transactions.of(again).describe("P").state == "CompleteCommit"


def test_offsets_of_an_aborted_transaction_stay_out_when_damage_hides_its_marker(
    store: Store,
) -> None:
    with Producer(store, "P") as producer:
        for number, offset in enumerate((10, 666, 30)):
            with contextlib.suppress(ZeroDivisionError), producer.transaction() as tx:
                tx.commit_offsets({("a", number): offset}, group_id="g")
                producer.flush()
                if offset == 666:
                    raise ZeroDivisionError
    wanted = {("a", 0): 10, ("a", 2): 30}
    assert offsets_of(store, "g") == wanted
    store.close()
    (directory,) = store.path.glob("__consumer_offsets-*")
    path = directory / f"{0:020d}.log"
    content = bytearray(path.read_bytes())
    position = 0
    for header, raw in split(bytes(content)):
        marker = EndMarker.parse(raw) if header.control else None
        if marker is not None and not marker.commit:
            content[position + header.size_bytes - 2] ^= 1
        position += header.size_bytes
    path.write_bytes(content)
    with logstore.open(store.path) as again, pytest.raises(CorruptLogError):
        offsets_of(again, "g")
    logstore.repair(store.path, dry_run=False, accept_loss=True)
    with logstore.open(store.path) as again:
        assert offsets_of(again, "g") == wanted


def test_an_interrupt_before_the_first_step_leaves_nothing_under_way(store: Store) -> None:
    with Producer(store, "P") as producer:
        for wanted in range(1, 4):
            calls = 0

            def trace(frame: FrameType, event: str, argument: object, wanted: int = wanted) -> None:
                nonlocal calls
                if frame.f_code is Transactions._drive.__code__ and event == "call":
                    calls += 1
                    if calls == wanted:
                        sys.settrace(None)
                        raise KeyboardInterrupt

            sys.settrace(trace)
            with contextlib.suppress(KeyboardInterrupt), producer.transaction() as tx:
                tx.send("b", b"%d" % wanted)
            sys.settrace(None)
            with producer.transaction() as tx:
                tx.send("b", b"after %d" % wanted)
    assert [value for value in committed(store, "b") if value and value.startswith(b"after")] == [
        b"after 1",
        b"after 2",
        b"after 3",
    ]


def test_one_partition_that_cannot_be_opened_keeps_no_other_transaction_open(
    store: Store, tmp_path: Path
) -> None:
    store.create_topic("bad")
    producers = [Producer(store, name) for name in "AB"]
    for producer, topics in zip(producers, (("bad", "a"), ("b",)), strict=True):
        transaction = producer.transaction()
        transaction.__enter__()
        for topic in topics:
            transaction.send(topic, b"open", partition=0).result()
    killed = shutil.copytree(store.path, tmp_path / "killed")
    shutil.rmtree(killed / "bad-0")
    again = logstore.open(killed)
    for topic in "ab":
        again[topic].append(b"later", partition=0)
        assert [r.value for r in again[topic][0].scan(isolation="read_committed")] == [b"later"]
    assert TRANSACTION_STATE in again.recovery.failed
    with pytest.raises(FileNotFoundError):
        again.close()


class _Gate:
    """The lock of the transactions; another producer takes the id right after its n-th release.

    Only releases with nothing under way count: otherwise the other one would wait.
    """

    def __init__(self, transactions: Transactions, number: int) -> None:
        self._transactions = transactions
        self._lock: Any = transactions._lock
        self._left = number
        self._depth = 0
        self.others: list[tuple[int, int]] = []
        transactions._lock = self  # type: ignore[assignment]

    def acquire(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1
        self._lock.release()
        known = self._transactions._machine.get("x")
        ending = known is not None and known.state.is_prepared
        busy = ending or self._transactions._machine.is_under_way("x")
        if self._depth == 0 and not busy and self._left > 0:
            self._left -= 1
            if self._left == 0:
                self.others.append(self._transactions.init_producer("x", 1000))

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def remove(self) -> None:
        self._transactions._lock = self._lock


def test_two_that_take_an_id_at_once_never_get_the_same_epoch(store: Store) -> None:
    transactions = Transactions.of(store)
    for number in range(1, 9):
        gate = _Gate(transactions, number)
        mine = transactions.init_producer("x", 1000)
        gate.remove()
        assert mine not in gate.others
        if not gate.others:
            break
    assert number > 1


def begun(transactions: Transactions, number: int) -> tuple[Any, _Gate]:
    """Begin a transaction of the id x; return its producer and a gate that is armed after it."""
    mine = transactions.init_producer("x", 1000)
    transactions.add_partitions("x", mine, [("b", 0)])
    return mine, _Gate(transactions, number)


@pytest.mark.parametrize("commit", [True, False])
def test_who_ends_a_transaction_does_not_get_the_epoch_of_another(
    store: Store, commit: bool
) -> None:
    transactions = Transactions.of(store)
    for number in range(1, 9):
        mine, gate = begun(transactions, number)
        with contextlib.suppress(FencedError):
            mine = transactions.end("x", mine, commit=commit)
        gate.remove()
        assert mine not in gate.others
        if not gate.others:
            break
    assert number > 1


def test_a_producer_that_goes_on_after_an_abort_fences_nobody_newer(store: Store) -> None:
    transactions = Transactions.of(store)
    for number in range(1, 9):
        mine, gate = begun(transactions, number)
        with contextlib.suppress(FencedError):
            mine = transactions.init_producer("x", 1000, expected=mine)
        gate.remove()
        if not gate.others:
            break
        transactions.add_partitions("x", gate.others[0], [("b", 0)])  # not fenced
        transactions.end("x", gate.others[0], commit=True)
    assert number > 1


# ---- raw batches ----------------------------------------------------------------------------


def raw_batch(identity: tuple[int, int], sequence: int = 0) -> bytes:
    encoder = BatchEncoder()
    encoder.append(b"raw")
    return with_producer(encoder.take(), producer_id=identity[0], producer_epoch=identity[1],
                         base_sequence=sequence, transactional=True)  # fmt: skip


def test_a_raw_batch_of_no_transaction_is_refused(store: Store) -> None:
    log = store["b"][0]
    transactions = Transactions.of(store)
    with pytest.raises(TransactionStateError, match="no open transaction of it with b-0"):
        log.append_batch(raw_batch((4711, 0)))
    mine = transactions.init_producer("x", 60_000)
    with pytest.raises(TransactionStateError, match="no open transaction"):
        log.append_batch(raw_batch(mine))
    transactions.add_partitions("x", mine, [("a", 0)])
    with pytest.raises(TransactionStateError, match="no open transaction"):
        log.append_batch(raw_batch(mine))
    transactions.add_partitions("x", mine, [("b", 0)])
    log.append_batch(raw_batch(mine))
    log.append_batch(raw_batch(mine, 1))
    assert log.append_batch(raw_batch(mine, 1)).duplicate
    after = transactions.end("x", mine, commit=True)
    with pytest.raises(FencedError):
        log.append_batch(raw_batch(mine, 2))
    with pytest.raises(TransactionStateError, match="no open transaction"):
        log.append_batch(raw_batch(after))
    transactions.add_partitions("x", after, [("b", 0)])
    transactions.abort("x")
    with pytest.raises(TransactionAbortedError):
        log.append_batch(raw_batch(after))
    log.append(b"plain")
    assert committed(store, "b") == [b"raw", b"raw", b"plain"]
    assert log.last_stable_offset == log.end_offset


def test_who_coordinates_a_raw_transaction_says_so(store: Store, tmp_path: Path) -> None:
    log = store["b"][0]
    log.append_batch(raw_batch((4711, 0)), verify_transaction=False)
    log.end_transaction(4711, 0, commit=True)
    log.append_batch(raw_batch((4711, 1)), origin="coordinator")
    log.end_transaction(4711, 1, commit=True)
    copy = store["a"][0]
    for batch in log.scan().batches():
        copy.append_batch(batch, origin="follower")
    assert committed(store, "b") == committed(store, "a") == [b"raw", b"raw"]
    with logstore.Partition.open(tmp_path / "alone-0", durability="os") as alone:
        alone.append_batch(raw_batch((4711, 0)))


def test_a_raw_batch_is_verified_after_the_store_was_opened_again(tmp_path: Path) -> None:
    with logstore.open(tmp_path, durability="os") as store:
        store.create_topic("b")
        store["b"][0].append(b"plain")
    with logstore.open(tmp_path, durability="os") as store:
        with pytest.raises(TransactionStateError, match="no open transaction"):
            store["b"][0].append_batch(raw_batch((4711, 0)))
        assert committed(store, "b") == [b"plain"]
