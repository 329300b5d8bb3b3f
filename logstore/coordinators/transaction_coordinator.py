"""Transactions: the coordinator of a store at work.

It carries out what the state machine asks for: records go to the partition of
``__transaction_state`` that Kafka would choose, markers to the partitions of the transaction.

What is durable when: the record that names a partition before the first batch there; all data
before Prepare*; Prepare* before the first marker; all markers before Complete*, which may come
late: without it, the markers are written once more, and change nothing.  A store opened with
durability="os" does the same in that order, and leaves the disk to the kernel.

The log is the state.  When an effect fails half-way, the id is read again from the log.

Threads share it: requests of one id take turns, those of different ids share their syncs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from logstore.clock import Clock, GuardedClock, SystemClock
from logstore.closeable import Closeable
from logstore.coordinators.internal_topics import (
    TRANSACTION_STATE,
    coordinator_partition,
    internal_topic,
)
from logstore.coordinators.offset_records import check_text
from logstore.coordinators.transaction_machine import Append, Effect, Mark, TransactionMachine
from logstore.coordinators.transaction_state import (
    TransactionMetadata,
    TransactionState,
    decode_key,
    encode_key,
)
from logstore.errors import (
    ClosedError,
    ConcurrentTransactionsError,
    FencedError,
    InvalidRecordError,
    LogStoreError,
    TransactionStateError,
    UnknownTopicError,
)
from logstore.partition.partition import Partition
from logstore.store.store import Store
from logstore.timers import Timeout, Timers
from logstore.waking import Notice

__all__ = ["TransactionDescription", "Transactions"]

log = logging.getLogger("logstore.transactions")


class LiveProducer(Protocol):
    """A transactional producer of this process."""

    def abandon(self, error: BaseException, /) -> None:
        """The store is about to close: give up the transaction."""


@dataclasses.dataclass(frozen=True, slots=True)
class TransactionDescription:
    """A transactional id in figures.  Times are milliseconds, -1 when there is none."""

    transactional_id: str
    state: str  # by Kafka's name
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    start_ms: int
    last_update_ms: int
    partitions: tuple[tuple[str, int], ...]
    coordinator_partition: int

    @property
    def is_open(self) -> bool:
        """Whether it holds back readers of committed records."""
        return self.state in ("Ongoing", "PrepareCommit", "PrepareAbort")


class Transactions(Closeable):
    """The transactions of a store: `Transactions.of` gives the one there is.

    ``list()``, ``describe(transactional_id)`` and ``abort(transactional_id)`` are for operators; of
    a store that is open readonly the first two can be asked.
    """

    def __init__(self, store: Store) -> None:
        """Use `Transactions.of`."""
        self._store = store
        self._clock: Clock = store.clock or SystemClock()
        self._guarded_clock = GuardedClock.of(store.clock)
        self._lock = threading.RLock()
        self._changed = Notice()  # of what is under way
        self._machine = TransactionMachine()
        self._timers = Timers(store.clock, name="logstore transactions")
        self._time_outs: dict[str, Timeout] = {}
        self._producers: weakref.WeakSet[LiveProducer] = weakref.WeakSet()
        self._highest_id = -1
        self._closing = False
        # By id: the thread that carries out what is under way for it.
        self._drivers: dict[str, int] = {}
        # By number: partitions of the log that cannot be read.  Their ids cannot be used.
        self.unreadable: dict[int, LogStoreError | OSError] = {}
        self._load()

    @classmethod
    def of(cls, store: Store) -> Transactions:
        """The transactions of a store; closed with it."""
        return store.companions.of(cls)

    # ---- the log ----

    def _load(self) -> None:
        """Read the log; what is open, and what to do about it, is `recover`'s to say."""
        machine = TransactionMachine(
            max_timeout_ms=self._machine.max_timeout_ms, expiration_ms=self._machine.expiration_ms
        )
        if TRANSACTION_STATE in self._store:
            topic = self._store[TRANSACTION_STATE]
            for number in topic.partition_numbers:
                try:
                    self._replay(topic[number], machine)
                except (LogStoreError, OSError) as error:
                    self.unreadable[number] = error
        self._machine = machine
        for known in machine:
            self._highest_id = max(self._highest_id, known.producer_id, known.next_producer_id)
            if known.state is TransactionState.ONGOING and not self._store.readonly:
                self._set_time_out(known)

    def _replay(self, partition: Partition, machine: TransactionMachine,
                only: str | None = None) -> None:  # fmt: skip
        for record in partition.scan():
            try:
                name = None if record.key is None else decode_key(record.key)
                if name is None or only not in (None, name):
                    continue
                value = record.value
                known = None if value is None else TransactionMetadata.decode(name, value)
                machine.replay(name, known)
            except InvalidRecordError as error:
                log.warning(
                    "%s offset %d: %s; passed over", partition.name, record.offset, str(error)
                )

    def _partition_of(self, transactional_id: str) -> Partition:
        topic = internal_topic(self._store, TRANSACTION_STATE)
        number = self._number_of(transactional_id)
        return self._store.topic_changes.make_partition(topic, number)

    def _number_of(self, transactional_id: str) -> int:
        if TRANSACTION_STATE not in self._store:
            return coordinator_partition(transactional_id, 50)
        topic = self._store[TRANSACTION_STATE]
        count = self._store.topic_changes.declared_partitions(topic)
        return coordinator_partition(transactional_id, count)

    def _fresh_id(self) -> int:
        return self._store.producer_ids.take(above=self._highest_id)

    # ---- carrying out effects ----

    def _drive(
        self, effect: Effect | None, look: Callable[[], None] = lambda: None
    ) -> TransactionMetadata | None:
        """Carry out an effect and all that follow from it; return the state after the last one.

        `look` is called after each effect.  The state is read, and `look` is called, under the
        lock: no other request can change the state before.
        """
        while effect is not None:
            try:
                self._carry_out(effect)
            except BaseException:
                with self._lock:
                    self._failed(effect)
                    look()
                raise
            with self._lock:
                self._changed.wake()
                following = self._machine.done(effect, self._clock.time_ms())
                look()
                if isinstance(effect, Append):
                    self._appended(effect)
                if following is None:
                    self._drivers.pop(effect.transactional_id, None)
                    return self._machine.get(effect.transactional_id)
            effect = following
        return None

    def _failed(self, effect: Effect) -> None:
        """An effect was not carried out, or nobody can tell; under the lock."""
        self._changed.wake()
        self._machine.failed(effect)
        self._read_again(effect)
        self._drivers.pop(effect.transactional_id, None)  # last: until then an interrupt finds us

    @contextlib.contextmanager
    def _driving(
        self, transactional_id: str, look: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Around a request and what follows from it: an interrupt leaves nothing under way.

        It may come at any instruction, also between the machine's answer and the first step.
        """
        try:
            yield
        except BaseException:
            with self._lock:
                effect = self._machine.under_way(transactional_id)
                ours = self._drivers.get(transactional_id) == threading.get_ident()
                if effect is not None and ours:
                    self._failed(effect)
                    look()
            raise

    def _appended(self, effect: Append) -> None:
        known = effect.metadata
        if known is not None and known.state is TransactionState.ONGOING:
            self._set_time_out(known)
        else:
            self._drop_time_out(effect.transactional_id)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Append):
            known = effect.metadata
            # A power cut may take these back: the markers would be written once more.
            late = known is None or known.state in (
                TransactionState.COMPLETE_COMMIT,
                TransactionState.COMPLETE_ABORT,
            )
            self._partition_of(effect.transactional_id).append(
                None if known is None else known.encode(),
                key=encode_key(effect.transactional_id),
                durability="os" if late else None,
            )
        else:
            self._mark(effect)

    def _mark(self, effect: Mark) -> None:
        coordinator_epoch = self._partition_of(effect.transactional_id).leader_epoch
        marked: list[tuple[Partition, int]] = []
        errors: list[LogStoreError | OSError] = []
        for topic, number in sorted(effect.partitions):
            try:
                partition = self._store[topic][number]
                at = partition.end_transaction(
                    effect.producer_id,
                    effect.producer_epoch,
                    commit=effect.commit,
                    coordinator_epoch=coordinator_epoch,
                    durability="os",
                )
            except (UnknownTopicError, IndexError):
                continue  # deleted since, and its records with it
            except FencedError:
                continue  # the marker was written before, and the producer went on
            except (LogStoreError, OSError) as error:
                errors.append(error)  # the others get theirs; all are tried again
            else:
                marked.append((partition, at))
        for partition, at in marked:
            if partition.durability == "fsync":
                partition.make_durable(range(at, at + 1))
        if errors:
            raise errors[0]

    def _read_again(self, effect: Effect) -> None:
        """What the log says of an id, after an effect that failed; under the lock."""
        name = effect.transactional_id
        if not isinstance(effect, Append):
            return
        try:
            machine = TransactionMachine()
            self._replay(self._partition_of(name), machine, name)
        except (LogStoreError, OSError) as error:
            log.warning("the state of %r cannot be read again: %s", name, str(error))
            return
        found = machine.get(name)
        if found is None or effect.metadata is None:
            self._machine.replay(name, found)
        elif found.encode() == effect.metadata.encode():
            self._machine.replay(name, effect.metadata)  # it is in the log after all

    def _when_settled(
        self, transactional_id: str, request: Callable[[], Effect | None]
    ) -> Effect | None:
        """Call `request` under the lock, and return what it returns.

        Before that, wait while an effect is under way; write markers that no thread writes.
        """
        while True:
            gate = effect = None
            with self._lock:
                if self._machine.is_under_way(transactional_id):
                    gate = self._changed.gate()
                else:
                    self._drivers[transactional_id] = threading.get_ident()
                    known = self._machine.get(transactional_id)
                    if known is None or not known.state.is_prepared:
                        return request()
                    effect = self._machine.resume(transactional_id)
            if gate is not None:
                gate.wait()
            else:
                self._drive(effect)

    def _ask(
        self,
        transactional_id: str,
        request: Callable[[int], Effect | None],
        look: Callable[[], None] = lambda: None,
    ) -> TransactionMetadata | None:
        """Have the machine answer a request, and carry out what it says.

        Return the state that the request leads to.  A later request may have changed the state
        when this returns: what the caller gets must be taken from this result.
        """
        check_text("a transactional id", transactional_id)
        state: TransactionMetadata | None = None

        def ask() -> Effect | None:
            nonlocal state
            self._check_answers(transactional_id)
            effect = request(self._clock.time_ms())
            state = self._machine.get(transactional_id)
            return effect

        with self._driving(transactional_id, look):
            self._check_answers(transactional_id)
            effect = self._when_settled(transactional_id, ask)
            return state if effect is None else self._drive(effect, look)

    def _check_answers(self, transactional_id: str) -> None:
        """Raise if nothing can be asked about an id."""
        if self._closing:
            raise ClosedError(f"the store {self._store.path} is closed")
        unreadable = self.unreadable.get(self._number_of(transactional_id))
        if unreadable is not None:
            raise unreadable

    # ---- for producers ----

    def join(self, producer: LiveProducer) -> None:
        """A producer of this process is there: it is told when the store closes."""
        self._producers.add(producer)

    def init_producer(
        self,
        transactional_id: str,
        timeout_ms: int,
        *,
        expected: tuple[int, int] | None = None,
    ) -> tuple[int, int]:
        """Fence every other producer of an id, abort what it left open; a new id and epoch."""
        self._store.access.check_writable()
        was_open = False

        def request(now: int) -> Effect | None:
            nonlocal was_open
            known = self._machine.get(transactional_id)
            was_open = known is not None and known.state is TransactionState.ONGOING
            return self._machine.init_producer(
                transactional_id, timeout_ms, now, fresh_id=self._fresh_id, expected=expected
            )

        known = self._ask(transactional_id, request)
        while was_open:  # and was aborted: ask again, as the machine wants it
            known = self._ask(transactional_id, request)
        return _identity(known)

    def add_partitions(
        self,
        transactional_id: str,
        identity: tuple[int, int],
        partitions: Iterable[tuple[str, int]],
    ) -> None:
        """Partitions belong to the transaction; on disk when this returns."""
        wanted = list(partitions)
        self._ask(
            transactional_id,
            lambda now: self._machine.add_partitions(transactional_id, *identity, wanted, now),
        )

    def end(
        self,
        transactional_id: str,
        identity: tuple[int, int],
        *,
        commit: bool,
        decided: Callable[[], None] | None = None,
    ) -> tuple[int, int]:
        """Commit or abort, everywhere; the producer's id and epoch for its next transaction.

        `decided` is called once a commit is in the log, whatever becomes of its markers; after an
        error the same may be asked for again, and goes on with them.
        """

        def look() -> None:
            known = self._machine.get(transactional_id)
            done = known is not None and known.state is TransactionState.PREPARE_COMMIT
            if done and decided is not None:
                decided()

        known = self._ask(
            transactional_id,
            lambda now: self._machine.end(
                transactional_id, *identity, now, commit=commit, fresh_id=self._fresh_id
            ),
            look,
        )
        return _identity(known)

    def check(self, transactional_id: str, identity: tuple[int, int]) -> None:
        """Raise TransactionAbortedError or FencedError if a producer's epoch is over."""
        with self._lock:
            self._machine.check(transactional_id, *identity)

    def outcome(self, transactional_id: str, producer_id: int, epoch: int) -> str:
        """Return how the transaction of an epoch ended; see `TransactionMachine.outcome`."""
        with self._lock:
            return self._machine.outcome(transactional_id, producer_id, epoch)

    def verify(self, producer_id: int, epoch: int, partition: tuple[str, int]) -> None:
        """Raise unless the producer has a transaction open that the partition was added to.

        Raises TransactionStateError, FencedError or TransactionAbortedError.
        """
        with self._lock:
            try:
                self._machine.verify(producer_id, epoch, partition)
            except TransactionStateError:
                for unreadable in self.unreadable.values():
                    raise unreadable from None
                raise

    # ---- time-outs ----

    def _set_time_out(self, known: TransactionMetadata) -> None:
        name = known.transactional_id
        if name not in self._time_outs:
            # One more: it is over when its time-out has passed, not when it has come.
            whole = known.timeout_ms + 1
            left = known.start_ms + whole - self._guarded_clock.now_ms()
            # Never more than all of it: the clock may have been ahead when the transaction began.
            self._time_outs[name] = self._timers.after(
                min(max(0, left), whole) / 1000, lambda: self._time_out(name)
            )
            self._timers.start()

    def _drop_time_out(self, transactional_id: str) -> None:
        timeout = self._time_outs.pop(transactional_id, None)
        if timeout is not None:
            self._timers.cancel(timeout)

    def _time_out(self, transactional_id: str) -> None:
        with self._lock:
            timeout = self._time_outs.get(transactional_id)
            if timeout is None or timeout.pending:
                return  # the transaction of this time-out is over
            del self._time_outs[transactional_id]
            known = self._machine.get(transactional_id)
            if self._closing or known is None or known.state is not TransactionState.ONGOING:
                return
            if self._machine.under_way(transactional_id) is not None:
                self._set_time_out(known)
                return
            self._drivers[transactional_id] = threading.get_ident()
            effect = self._machine.abort(transactional_id, self._clock.time_ms())
        log.warning("%r: aborted, open for more than %d ms", transactional_id, known.timeout_ms)
        self._drive(effect)

    def run_due(self) -> int:
        """Abort what has timed out, for callers with a manual clock; else a thread does it."""
        return self._timers.run_due()

    # ---- after a crash, and at the end ----

    def recover(self, *, abort_ongoing: bool) -> tuple[str, ...]:
        """Finish what is decided, and abort what is open; the ids that were concerned.

        With `abort_ongoing`, transactions of a process that is gone; otherwise only those that have
        timed out: their producers may be elsewhere, and come back.
        """
        with self._lock:
            now = self._guarded_clock.now_ms()
            open_ids = [
                known.transactional_id
                for known in self._machine
                if known.state is TransactionState.ONGOING
            ]
            names = self._machine.unfinished()
            names += open_ids if abort_ongoing else self._machine.timed_out(now)
        errors: dict[str, LogStoreError | OSError] = {}
        for name in names:
            try:
                self._finish(name)
            except (LogStoreError, OSError) as error:
                errors[name] = error  # what keeps one id keeps no other
        for name, first in errors.items():
            first.add_note(f"while finishing the transaction of {name!r}, one of {len(errors)}")
            raise first
        return tuple(sorted(names))

    def _finish(self, transactional_id: str) -> None:

        def abort() -> Effect | None:
            known = self._machine.get(transactional_id)
            if known is None or known.state is not TransactionState.ONGOING:
                return None
            return self._machine.abort(transactional_id, self._clock.time_ms())

        try:
            with self._driving(transactional_id):
                self._drive(self._when_settled(transactional_id, abort))
        except ConcurrentTransactionsError:
            return  # someone else ends it

    def close(self) -> None:
        """Abort what is open: its producers are of this process, and lose their store."""
        if self._closing:
            return
        gone = ClosedError(f"the store {self._store.path} is closed")
        for producer in list(self._producers):
            producer.abandon(gone)
        if not (self._store.readonly or self._store.closed):
            self.recover(abort_ongoing=True)
        with self._lock:
            self._closing = True
        self._timers.close()

    # ---- for operators ----

    def list(self, *, open_only: bool = False) -> tuple[TransactionDescription, ...]:
        """All transactional ids, by name; or those whose transaction is not over."""
        with self._lock:
            if self._store.readonly:
                self.unreadable.clear()
                self._load()
            for error in self.unreadable.values():
                raise error
            found = [self._described(known) for known in self._machine]
        return tuple(each for each in found if each.is_open or not open_only)

    def describe(self, transactional_id: str) -> TransactionDescription:
        """One transactional id; LookupError when nothing is known of it."""
        for each in self.list():
            if each.transactional_id == transactional_id:
                return each
        raise LookupError(f"nothing is known of transactional id {transactional_id!r}")

    def _described(self, known: TransactionMetadata) -> TransactionDescription:
        return TransactionDescription(
            known.transactional_id,
            known.state.kafka_name,
            known.producer_id,
            known.producer_epoch,
            known.timeout_ms,
            known.start_ms,
            known.last_update_ms,
            tuple(sorted(known.partitions)),
            self._number_of(known.transactional_id),
        )

    def abort(self, transactional_id: str) -> TransactionDescription:
        """Abort an open transaction; its producer gets TransactionAbortedError when it goes on.

        Raises TransactionStateError when there is none.
        """
        self._store.access.check_writable()
        self._ask(transactional_id, lambda now: self._machine.abort(transactional_id, now))
        return self.describe(transactional_id)

    def expire(self) -> tuple[str, ...]:
        """Forget ids that nobody used for a week, as Kafka does; which."""
        with self._lock:
            names = self._machine.expired(self._guarded_clock.now_ms())
        for name in names:
            self._ask(name, functools.partial(self._forget, name))
        return tuple(names)

    def _forget(self, name: str, now: int) -> Effect:
        return self._machine.forget(name)


def _identity(known: TransactionMetadata | None) -> tuple[int, int]:
    """The producer id and epoch of a state."""
    assert known is not None
    return known.producer_id, known.producer_epoch
