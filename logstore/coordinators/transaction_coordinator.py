"""Transactions: the transaction coordinator of a store.

A TransactionMachine decides; this class carries out its effects.  It appends records to the
partition of ``__transaction_state`` that Kafka would choose, and writes markers into the partitions
of the transaction.

Crash order: the record that names a partition is durable before the first batch is written there;
all data before Prepare*; Prepare* before the first marker; all markers before Complete*.  Complete*
itself need not be durable: without it, the markers are written again, which changes nothing.  With
durability="os" the sequence is the same, without fsync.

The log is the only state.  If an effect fails, the state of its id is read from the log again.

Threads share it.  `_lock` guards the machine and is not held while an effect is carried out.
Requests of one id are done one after the other; `_drivers` has the thread that carries out an id's
effects.  Requests of different ids run concurrently and share fsyncs.
"""

from __future__ import annotations

import contextlib
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
    TransactionDescription,
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

__all__ = ["Transactions"]

log = logging.getLogger("logstore.transactions")


class LiveProducer(Protocol):
    """A transactional producer of this process."""

    def abandon(self, error: BaseException, /) -> None:
        """Fail the open transaction: the store is about to close."""


class Transactions(Closeable):
    """The transactions of a store; each store has one: `Transactions.of`.

    ``list()``, ``describe(transactional_id)`` and ``abort(transactional_id)`` are for operators.
    The first two also work on a store that is open readonly.
    """

    def __init__(self, store: Store) -> None:
        """Use `Transactions.of`."""
        self._store = store
        self._clock: Clock = store.clock or SystemClock()
        self._guarded_clock = GuardedClock.of(store.clock)
        self._lock = threading.RLock()
        self._changed = Notice()  # an effect is done or has failed
        self._machine = TransactionMachine()
        self._timers = Timers(store.clock, name="logstore transactions")
        self._time_outs: dict[str, Timeout] = {}
        self._producers: weakref.WeakSet[LiveProducer] = weakref.WeakSet()
        self._highest_id = -1
        self._closing = False
        # By transactional id: the thread that carries out its effects.
        self._drivers: dict[str, int] = {}
        # By number: partitions of __transaction_state that cannot be read.  Requests for their
        # transactional ids raise the error.
        self.unreadable: dict[int, LogStoreError | OSError] = {}
        self._load()

    @classmethod
    def of(cls, store: Store) -> Transactions:
        """Return the transactions of a store; they are closed with the store."""
        return store.companions.of(cls)

    # ---- the log ----

    def _load(self) -> None:
        """Read the log and set time-outs; `recover` finishes and aborts transactions."""
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
        lock: no other request can change the state in between.
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
        """Handle an effect that failed or may have failed.  With the lock held."""
        self._changed.wake()
        self._machine.failed(effect)
        self._read_again(effect)
        # Last: after an interrupt before it, `_driving` still knows that the id is ours.
        self._drivers.pop(effect.transactional_id, None)

    @contextlib.contextmanager
    def _driving(
        self, transactional_id: str, look: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Wrap a request and its effects, so that an interrupt leaves no effect under way.

        An interrupt can stop at any instruction, also after the machine has returned an effect and
        before `_drive` has begun.  Other threads would then wait for ever for the effect's end.
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
            # These need no fsync: after a power cut without them, the markers are written again.
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
        """Write the markers of a transaction, then make all of them durable."""
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
                continue  # the partition was deleted, and its records with it
            except FencedError:
                continue  # the marker is there already: the producer has a later epoch
            except (LogStoreError, OSError) as error:
                errors.append(error)  # mark the other partitions first; all are marked again later
            else:
                marked.append((partition, at))
        for partition, at in marked:
            if partition.durability == "fsync":
                partition.parts.appender.make_durable(range(at, at + 1))
        if errors:
            raise errors[0]

    def _read_again(self, effect: Effect) -> None:
        """Read the state of an id from the log after a failed append.  With the lock held."""
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
            # The record is in the log, although the append raised.  Use the effect's own metadata:
            # it has `last_epoch`, which is not stored.
            self._machine.replay(name, effect.metadata)

    def _when_settled(
        self, transactional_id: str, request: Callable[[], Effect | None]
    ) -> Effect | None:
        """Call `request` under the lock, and return its result.

        Before that, wait while another thread carries out an effect of the id.  If the transaction
        is decided and no thread writes its markers, write them.
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
        """Call the machine with a request, and carry out its effects.

        Return the state after the last effect.  Callers have to use this state: another request may
        have changed the machine's by the time this returns.
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
        """Raise if the store is closing, or the log of the id cannot be read."""
        if self._closing:
            raise ClosedError(f"the store {self._store.path} is closed")
        unreadable = self.unreadable.get(self._number_of(transactional_id))
        if unreadable is not None:
            raise unreadable

    # ---- for producers ----

    def join(self, producer: LiveProducer) -> None:
        """Register a producer of this process: `close` calls its `abandon`.  Kept weakly."""
        self._producers.add(producer)

    def init_producer(
        self,
        transactional_id: str,
        timeout_ms: int,
        *,
        expected: tuple[int, int] | None = None,
        client_version: int = 2,
    ) -> tuple[int, int]:
        """Fence every other producer of an id, and abort its open transaction.

        Return the producer id and epoch of the new producer.  A `client_version` below 2 is a
        Kafka client, in another process: see `TransactionMachine`.
        """
        self._store.access.check_writable()
        was_open = False

        def request(now: int) -> Effect | None:
            nonlocal was_open
            known = self._machine.get(transactional_id)
            was_open = known is not None and known.state is TransactionState.ONGOING
            return self._machine.init_producer(
                transactional_id, timeout_ms, now, fresh_id=self._fresh_id, expected=expected,
                client_version=client_version,
            )  # fmt: skip

        known = self._ask(transactional_id, request)
        while was_open:  # the first request only aborted the open transaction: repeat it
            known = self._ask(transactional_id, request)
        assert known is not None
        return known.identity

    def add_partitions(
        self,
        transactional_id: str,
        identity: tuple[int, int],
        partitions: Iterable[tuple[str, int]],
    ) -> None:
        """Add partitions to the transaction; that is durable when this returns."""
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
        """Commit or abort; return the producer id and epoch for the next transaction.

        `decided` is called after the decision to commit is in the log, before the markers are
        written.  After an error the call can be repeated; it then writes the missing markers.
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
        assert known is not None
        return known.identity

    def check(self, transactional_id: str, identity: tuple[int, int]) -> None:
        """Raise TransactionAbortedError or FencedError if a producer's epoch has ended."""
        with self._lock:
            self._machine.check(transactional_id, *identity)

    def producer_id_of(self, transactional_id: str) -> int | None:
        """Return the producer id of a transactional id; None if the id is not known."""
        with self._lock:
            known = self._machine.get(transactional_id)
            return None if known is None else known.producer_id

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
            # One millisecond more: the machine aborts if more than `timeout_ms` have passed.
            whole = known.timeout_ms + 1
            left = known.start_ms + whole - self._guarded_clock.now_ms()
            # At most the whole time-out: the clock may have been ahead when the transaction began.
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
                return  # the transaction of this time-out has ended
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
        """Abort transactions that have timed out.  For a manual clock; else a thread does it."""
        return self._timers.run_due()

    # ---- after a crash, and at the end ----

    def recover(self, *, abort_ongoing: bool) -> tuple[str, ...]:
        """Write the markers of decided transactions, and abort open ones; return their ids.

        `abort_ongoing`: also abort the open transactions of this library's producers, because their
        process has ended.  Those of Kafka's clients are aborted only if they have timed out: a
        client may still continue.
        """
        with self._lock:
            now = self._guarded_clock.now_ms()
            open_ids = [
                known.transactional_id
                for known in self._machine
                if known.state is TransactionState.ONGOING and known.client_version >= 2
            ]
            names = self._machine.unfinished() + self._machine.timed_out(now)
            if abort_ongoing:
                names = [*dict.fromkeys(names + open_ids)]
        errors: dict[str, LogStoreError | OSError] = {}
        for name in names:
            try:
                self._finish(name)
            except (LogStoreError, OSError) as error:
                errors[name] = error  # raised after the other ids were finished
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
            return  # another thread ends it

    def close(self) -> None:
        """Abort the open transactions of producers that use this store, which is closing."""
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
        """Return all transactional ids, sorted, or only those with an open transaction."""
        with self._lock:
            if self._store.readonly:
                self.unreadable.clear()
                self._load()
            for error in self.unreadable.values():
                raise error
            found = [self._described(known) for known in self._machine]
        return tuple(each for each in found if each.is_open or not open_only)

    def describe(self, transactional_id: str) -> TransactionDescription:
        """Return the state of a transactional id.  Raises LookupError if it is unknown."""
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
        """Abort an open transaction; the next call of its producer raises TransactionAbortedError.

        Raises TransactionStateError if there is no open transaction.
        """
        self._store.access.check_writable()
        self._ask(transactional_id, lambda now: self._machine.abort(transactional_id, now))
        return self.describe(transactional_id)

    def expire(self) -> tuple[str, ...]:
        """Delete ids that were not used for a week, as Kafka does; return them."""
        with self._lock:
            names = self._machine.expired(self._guarded_clock.now_ms())
        for name in names:
            self._ask(name, functools.partial(self._forget, name))
        return tuple(names)

    def _forget(self, name: str, now: int) -> Effect:
        return self._machine.forget(name)
