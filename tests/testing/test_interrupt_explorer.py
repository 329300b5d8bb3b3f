"""Ctrl-C at the places of every operation of the store, and then: go on, close, reopen.

A sample of the places is tried; ``-m slow`` tries all of them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import (
    Compactor,
    Consumer,
    InterruptedAppendError,
    Partition,
    Producer,
    Store,
)
from logstore.testing import check_invariants, explore_interrupts, interrupt_at
from tests.kit import topic_values

SAMPLE = 30
CODE = (str(Path(logstore.__file__).parent), str(Path(threading.__file__).parent))
CONFIG = {"segment.bytes": 1024}


# ---- counter-proofs: a planted fault is found ----


class Pair:
    """Two numbers that are equal, unless an interrupt is between."""

    def __init__(self, _: str) -> None:
        self.left = self.right = 0
        self.lock = threading.Lock()
        self.event = threading.Event()

    def split(self) -> None:
        self.left = abs(1)
        self.right = abs(1)

    def whole(self) -> None:
        self.left, self.right = abs(1), abs(1)

    def leak(self) -> None:
        self.lock.acquire()
        try:
            self.split()
        finally:
            self.lock.release()

    def ring(self) -> None:
        self.event.set()

    def misreport(self) -> None:
        try:
            self.whole()
        except KeyboardInterrupt:
            raise ValueError("something else") from None

    def check(self, _: BaseException | None) -> None:
        assert self.left == self.right, "split in two"


def test_a_garbage_collection_does_not_change_the_numbers_of_places() -> None:
    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            abs(1)

    def operate(pair: Pair) -> None:
        for _ in range(50):
            Garbage()
        pair.split()

    before = gc.get_threshold()
    gc.set_threshold(10)
    try:
        result = explore_interrupts(Pair, operate, Pair.check)
    finally:
        gc.set_threshold(*before)
    assert [each.kind for each in result.violations] == ["check"], result


def test_a_change_of_state_in_two_statements_is_found() -> None:
    result = explore_interrupts(Pair, Pair.split, Pair.check)
    (found,) = result.violations
    assert found.kind == "check"
    assert "in Pair.split" in found.where
    assert "split in two" in repr(result.violations)
    assert result.tried == result.places


def test_a_change_of_state_in_one_statement_is_no_finding() -> None:
    result = explore_interrupts(Pair, Pair.whole, Pair.check)
    assert result.violations == []
    assert result.tried == result.places > 1
    assert result.swallowed == 0


def test_a_lock_that_stays_taken_is_found_as_a_hang_with_the_stacks() -> None:
    def check(pair: Pair, _: BaseException | None) -> None:
        with pair.lock:
            pass

    result = explore_interrupts(Pair, Pair.leak, check, timeout=0.2)
    (found,) = result.violations
    assert found.kind == "hang"
    assert "in Pair.leak" in found.where
    assert "with pair.lock" in found.error


def test_a_lock_inside_of_the_standard_library_is_found() -> None:
    def check(pair: Pair, _: BaseException | None) -> None:
        pair.event.set()

    result = explore_interrupts(Pair, Pair.ring, check, timeout=0.2)
    assert [found.kind for found in result.violations] == ["hang"]
    assert "threading.py" in result.violations[0].where


def test_another_error_than_the_interrupt_is_found() -> None:
    result = explore_interrupts(Pair, Pair.misreport, Pair.check)
    assert {found.kind for found in result.violations} == {"error"}
    assert "ValueError: something else" in result.violations[0].error


def test_a_sample_is_the_same_for_the_same_seed_and_has_every_line_first() -> None:
    tried: list[set[str]] = []

    def loop(seen: list[int]) -> None:
        for number in range(100):
            seen.append(number)
        seen.clear()

    def check(seen: list[int], _: object) -> None:
        tried[-1].add(repr(seen))

    for seed in (1, 1, 2):
        tried.append(set())
        explore_interrupts(lambda _: [], loop, check, limit=9, seed=seed)
    assert tried[0] == tried[1] != tried[2]
    assert "[]" in tried[2]


# ---- operations on a partition ----


@dataclass
class Log:
    """A partition with records, and what is promised of them."""

    path: str
    log: Partition
    before: dict[int, bytes | None]
    promised: dict[int, bytes | None] = field(default_factory=dict)


def contents(log: Partition) -> dict[int, bytes | None]:
    return {record.offset: record.value for record in log}


def filled(directory: str, **options: Any) -> Log:
    log = Partition.open(
        f"{directory}/orders-0", durability="os",
        config={**CONFIG, "cleanup.policy": "compact,delete", "retention.ms": "1000"}, **options,
    )  # fmt: skip
    for number in range(24):
        log.append(b"%d" % number * 20, key=b"k%d" % (number % 5))
    return Log(f"{directory}/orders-0", log, contents(log))


def usable(this: Log, error: BaseException | None) -> None:
    assert this.log.failure is None
    check_log(this, error)


def check_log(this: Log, error: BaseException | None) -> None:
    log = this.log
    if isinstance(error, InterruptedAppendError):
        assert error.offsets.stop == log.end_offset
        assert len(error.offsets) > 0
    if not log.closed and log.failure is None:
        offset = log.append(b"after", key=b"k1")
        assert log[offset].value == b"after"
        check_invariants(log)
        this.promised[offset] = b"after"
        found = contents(log)
        log.close()
    else:
        log.close()  # finishes what the interrupt stopped
        found = None
    with Partition.open(this.path, config=CONFIG) as again:
        assert not again.recovery.damage
        assert found is None or contents(again).items() >= found.items()
        assert contents(again).items() >= this.promised.items()
        check_invariants(again)


def kept(this: Log, error: BaseException | None) -> None:
    """All that was there before is still there."""
    this.promised.update(this.before)
    usable(this, error)


def write_buffered(this: Log) -> None:
    with this.log.writer(linger=None) as out:
        for number in range(5):
            out.append(b"buffered %d" % number)


def aborted(this: Log) -> None:
    raw = logstore.BatchEncoder()
    raw.append(b"of a transaction", key=b"t")
    this.log.append_batch(
        logstore.with_producer(
            raw.take(), producer_id=7, producer_epoch=0, base_sequence=0, transactional=True
        )
    )
    this.log.end_transaction(7, 0, commit=False)


ON_A_LOG: dict[str, tuple[Callable[[Log], object], Callable[..., object]]] = {
    "append": (lambda this: this.log.append(b"new"), kept),
    "append, durable": (lambda this: this.log.append(b"new", durability="fsync"), kept),
    "append, roll": (lambda this: this.log.append(b"x" * 600), kept),
    "extend": (lambda this: this.log.extend([b"one", b"two"], durability="fsync"), kept),
    "writer": (write_buffered, kept),
    "transaction, aborted": (aborted, kept),
    "compaction": (lambda this: Compactor(this.log).run(), usable),
    "retention": (lambda this: this.log.enforce(), usable),
    "truncate": (lambda this: this.log.truncate(9), check_log),  # to be opened again
    "trim": (lambda this: this.log.trim(9), usable),
    "close": (lambda this: this.log.close(), kept),
}


# ---- operations on a store ----


@dataclass
class World:
    """A store with a producer, and what is promised of its records."""

    path: str
    store: Store
    producer: Producer
    sent: dict[bytes, Any] = field(default_factory=dict)
    consumer: Consumer | None = None
    transaction: Any = None
    seen: set[bytes | None] = field(default_factory=set)


def opened(path: str) -> Store:
    return logstore.open(f"{path}/store", durability="os", config=CONFIG, reserve_bytes=0)


def world(directory: str, transactional_id: str | None = None) -> World:
    store = opened(directory)
    store.create_topic("orders", partitions=2)
    store["orders"][1].append(b"old")
    producer = Producer(store, transactional_id, linger=0.001)
    return World(directory, store, producer)


def busy(directory: str) -> World:
    """With a producer that has sent before, and has something to send."""
    this = world(directory)
    this.producer.append("orders", b"first", partition=0)
    for number in range(3):
        value = b"sent %d" % number
        this.sent[value] = this.producer.send("orders", value, partition=0)
    return this


def in_transaction(directory: str) -> World:
    this = world(directory, "mine")
    with this.producer.transaction() as before:
        before.send("orders", b"committed before", partition=0)
    this.transaction = this.producer.transaction()
    for number in range(3):
        this.transaction.send("orders", b"transaction %d" % number, partition=number % 2)
    return this


def grouped(directory: str) -> World:
    this = busy(directory)
    this.producer.flush()
    this.consumer = Consumer(this.store, "orders", group_id="readers", auto_commit=False)
    return this


def check_world(this: World, _: BaseException | None) -> None:
    producer, store = this.producer, this.store
    if this.consumer is not None:
        this.consumer.close()
    if not store.closed:
        if not producer.closed:
            use(this)
            for value, delivery in this.sent.items():
                place = delivery.result(5)
                assert store["orders"][place.partition][place.offset].value == value
        producer.close()
        store["orders"][1].append(b"last")
        for partition in store["orders"]:
            check_invariants(partition)
    store.close()
    with opened(this.path) as again:
        assert not again.recovery.failed
        for partition in again["orders"]:
            check_invariants(partition)
        found = topic_values(again, "orders")
        assert b"old" in found
        assert len(found) == len(set(found)), "nothing is there twice"
        assert {*found} >= {*this.sent}
        committed = topic_values(again, "orders", "read_committed")
        ours = [value for value in committed if value and value.startswith(b"transaction")]
        assert len(ours) in (0, 3), "all of a transaction or nothing"
        with Producer(again, producer.transactional_id) as another:
            assert use(World(this.path, again, another)) is None


def use(this: World) -> None:
    """A normal operation of the producer."""
    producer = this.producer
    value = b"after %d" % id(producer)
    if producer.transactional_id is None:
        place = producer.append("orders", value, partition=0)
    else:
        transaction = this.transaction
        if transaction is not None and not transaction.over:
            transaction.abort()
        with producer.transaction() as own:
            sent = own.send("orders", value, partition=0)
        place = sent.result(0)
    assert this.store["orders"][place.partition][place.offset].value == value


def send(this: World) -> None:
    for number in range(3):
        value = b"more %d" % number
        this.sent[value] = this.producer.send("orders", value, partition=0)


def append(this: World) -> None:
    this.producer.append("orders", b"more", partition=0)


def append_elsewhere(this: World) -> None:
    this.producer.append("orders", b"more", partition=1)


def once(this: World) -> None:
    this.producer.append("orders", b"more", partition=0, dedupe_id="one")


def wait(this: World) -> None:
    this.sent[b"sent 2"].result()


def transact(this: World) -> None:
    with this.producer.transaction() as transaction:
        this.transaction = transaction
        for number in range(3):
            transaction.send("orders", b"transaction %d" % number, partition=number % 2)


def begin(this: World) -> None:
    with this.producer.transaction() as transaction:
        this.transaction = transaction


def fence(this: World) -> None:
    """Another producer takes the id.  The world uses that one from now on."""
    this.producer, this.transaction = Producer(this.store, "mine"), None


def check_fence(this: World, error: BaseException | None) -> None:
    if this.transaction is not None:  # no other came to be; the first is fenced, or is not
        with contextlib.suppress(logstore.FencedError, logstore.TransactionAbortedError):
            this.transaction.abort()
        this.producer, this.transaction = Producer(this.store, "mine"), None
    check_world(this, error)


def poll(this: World) -> None:
    assert this.consumer is not None
    poll_all(this.consumer, this.seen)


def poll_and_commit(this: World) -> None:
    poll(this)
    assert this.consumer is not None
    this.consumer.commit()


def check_group(this: World, error: BaseException | None) -> None:
    """The group continues where it was: in the end it has read everything."""
    assert this.consumer is not None
    if not this.consumer.closed:
        poll_all(this.consumer, this.seen)
        this.consumer.commit()
    this.consumer.close()
    with Consumer(this.store, "orders", group_id="readers") as other:
        poll_all(other, this.seen)
    assert this.seen == {*topic_values(this.store, "orders")}
    this.consumer = None
    check_world(this, error)


def poll_all(consumer: Consumer, seen: set[bytes | None]) -> None:
    """Poll until a poll returns nothing."""
    for _ in range(100):
        polled = consumer.poll(timeout=0.02)
        seen.update(record.value for record in polled)
        if not polled and len(consumer.assignment()) == 2:
            break
    else:
        raise AssertionError(f"it is assigned {consumer.assignment()} only")


def open_again(this: World) -> None:
    this.store = opened(this.path)
    this.store["orders"][1].end_offset  # noqa: B018


def closed(directory: str) -> World:
    this = world(directory)
    this.producer.close()
    this.store.close()
    return this


def create(this: World) -> None:
    this.store.create_topic("created", partitions=2)
    this.store["created"][0].append(b"one")


def delete(this: World) -> None:
    this.store.delete_topic("extra")


def extra(directory: str) -> World:
    this = world(directory)
    this.store.create_topic("extra", partitions=2)
    this.store["extra"][0].append(b"one")
    return this


def check_topics(this: World, error: BaseException | None) -> None:
    for name in ("created", "extra"):
        if name in this.store:
            this.store[name][1].append(b"usable")
            this.store.delete_topic(name)
        this.store.create_topic(name)
        this.store[name][0].append(b"usable")
        assert this.store[name][0].end_offset == 1
    check_world(this, error)


mine = functools.partial(world, transactional_id="mine")
ON_A_STORE: dict[str, tuple[Callable[[str], World], Callable[[World], object], Any]] = {
    "Producer()": (world, lambda this: Producer(this.store), check_world),
    "send": (busy, send, check_world),
    "send, first": (world, send, check_world),
    "append": (busy, append, check_world),
    "append, first": (world, append, check_world),
    "append to another partition": (busy, append_elsewhere, check_world),
    "append with a dedupe id": (busy, once, check_world),
    "result": (busy, wait, check_world),
    "flush": (busy, lambda this: this.producer.flush(), check_world),
    "close": (busy, lambda this: this.producer.close(), check_world),
    "transaction": (mine, transact, check_world),
    "begin": (mine, begin, check_world),
    "commit": (in_transaction, lambda this: this.transaction.commit(), check_world),
    "abort": (in_transaction, lambda this: this.transaction.abort(), check_world),
    "close in a transaction": (in_transaction, lambda this: this.producer.close(), check_world),
    "fence": (in_transaction, fence, check_fence),
    "poll": (grouped, poll, check_group),
    "poll and commit": (grouped, poll_and_commit, check_group),
    "close of a consumer": (grouped, lambda this: this.consumer.close(), check_group),
    "open": (closed, open_again, check_world),
    "close of a store": (busy, lambda this: this.store.close(), check_world),
    "create": (world, create, check_topics),
    "delete": (extra, delete, check_topics),
}

LIMITS = [pytest.param(None, marks=pytest.mark.slow, id="all"), pytest.param(SAMPLE, id="some")]
QUIET = pytest.mark.filterwarnings("ignore::ResourceWarning")


@QUIET
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", ON_A_LOG)
def test_a_log_goes_on_after_an_interrupt_anywhere(name: str, limit: int | None) -> None:
    operate, check = ON_A_LOG[name]
    result = explore_interrupts(filled, operate, check, limit=limit, only=CODE)
    assert not result.violations, result
    assert result.tried > 5


@QUIET
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", ON_A_STORE)
def test_a_store_goes_on_after_an_interrupt_anywhere(name: str, limit: int | None) -> None:
    prepare, operate, check = ON_A_STORE[name]
    result = explore_interrupts(prepare, operate, check, limit=limit, only=CODE)
    assert not result.violations, result
    assert result.tried > 5 or name == "send"  # one call of C code


def test_a_return_of_a_called_function_is_no_place() -> None:
    """An interrupt there cannot be told from one after the outer function has returned."""
    done: list[int] = []

    def inner() -> None:
        done.append(1)

    def outer() -> None:
        return inner()

    for place in range(1, 100):
        done.clear()
        try:
            if not interrupt_at(place, outer, only=[__file__]):
                break
        except KeyboardInterrupt as interrupt:
            frames = {frame.name for frame in traceback.extract_tb(interrupt.__traceback__)}
            assert "inner" in frames or not done
    else:
        raise AssertionError("there is always one more place")
