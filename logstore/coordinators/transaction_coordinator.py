"""Transactions: the transaction coordinator of a store.

A TransactionMachine decides; TransactionDriver, the base of this class, carries out its effects.
It appends records to the partition of ``__transaction_state`` that Kafka would choose, and writes
markers into the partitions of the transaction.  Here are the requests: of producers, and of
operators.

Crash order: the record that names a partition is durable before the first batch is written there;
all data before Prepare*; Prepare* before the first marker; all markers before Complete*.  Complete*
itself need not be durable: without it, the markers are written again, which changes nothing.  With
durability="os" the sequence is the same, without fsync.

The log is the only state.  If an effect fails, the state of its id is read from the log again.

Threads share it.  Requests of one id are done one after the other; those of different ids run
concurrently and share fsyncs.  Methods that end in ``_later`` return before other nodes have
committed the records.  While they have not, a further request for the id gets
ConcurrentTransactionsError.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from logstore.coordinators.offset_records import check_text
from logstore.coordinators.quorum.outcome import Outcome
from logstore.coordinators.transaction.driver import TransactionDriver, nothing
from logstore.coordinators.transaction_machine import Effect
from logstore.coordinators.transaction_state import (
    TransactionDescription,
    TransactionMetadata,
    TransactionState,
)
from logstore.errors import (
    ClosedError,
    ConcurrentTransactionsError,
    LogStoreError,
    TransactionStateError,
)
from logstore.store.store import Store
from logstore.waking import uninterrupted

__all__ = ["Transactions"]


class LiveProducer(Protocol):
    """A transactional producer of this process."""

    def abandon(self, error: BaseException, /) -> None:
        """Fail the open transaction: the store is about to close."""


class Transactions(TransactionDriver):
    """The transactions of a store; each store has one: `Transactions.of`.

    ``list()``, ``describe(transactional_id)`` and ``abort(transactional_id)`` are for operators.
    The first two also work on a store that is open readonly.
    """

    def __init__(self, store: Store) -> None:
        """Use `Transactions.of`."""
        super().__init__(store)
        self._producers: weakref.WeakSet[LiveProducer] = weakref.WeakSet()

    @classmethod
    def of(cls, store: Store) -> Transactions:
        """Return the transactions of a store; they are closed with the store."""
        return store.companions.of(cls)

    # ---- requests ----

    def _ask(
        self,
        transactional_id: str,
        request: Callable[[int], Effect | None],
        look: Callable[[], None] = nothing,
    ) -> TransactionMetadata | None:
        """Call the machine with a request, and carry out its effects.

        Return the state after the last effect.  Callers have to use this state: another request may
        have changed the machine's by the time this returns.
        """
        if self._quorum.answers_later:
            # An interrupt of this thread must not come between the machine and the quorum.
            begin = functools.partial(self._begin_request, transactional_id, request, look)
            return uninterrupted(begin).result()
        return self._begin_request(transactional_id, request, look).result()

    def _ask_later(
        self,
        transactional_id: str,
        request: Callable[[int], Effect | None],
        look: Callable[[], None] = nothing,
    ) -> Outcome[TransactionMetadata | None]:
        """Like `_ask`, without waiting for other nodes; also not for the end of another request."""
        try:
            wait = not self._quorum.answers_later
            return self._begin_request(transactional_id, request, look, wait=wait)
        except (LogStoreError, OSError) as error:
            return Outcome.failed(error)

    def _begin_request(
        self,
        transactional_id: str,
        request: Callable[[int], Effect | None],
        look: Callable[[], None],
        *,
        wait: bool = True,
    ) -> Outcome[TransactionMetadata | None]:
        check_text("a transactional id", transactional_id)
        outcome: Outcome[TransactionMetadata | None] = Outcome()
        state: TransactionMetadata | None = None

        def ask() -> Effect | None:
            nonlocal state
            self._check_answers(transactional_id)
            effect = request(self._clock.time_ms())
            state = self._machine.get(transactional_id)
            return effect

        with self._driving(transactional_id, look):
            self._check_answers(transactional_id)
            effect = self._when_settled(transactional_id, ask, wait=wait)
            if effect is None:
                outcome.settle(state)
            else:
                self._drive(effect, look, outcome)
        return outcome

    def _check_answers(self, transactional_id: str) -> None:
        """Raise if the store is closing, or the log of the id cannot be read or is not ours."""
        if self._closing:
            raise ClosedError(f"the store {self._store.path} is closed")
        if self.unreadable or not self._seats.all_taken:
            number = self._number_of(transactional_id)
            unreadable = self.unreadable.get(number)
            if unreadable is not None:
                raise unreadable
            self._seats.check(number)

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
        in_process: bool = True,
    ) -> tuple[int, int]:
        """Fence every other producer of an id, and abort its open transaction.

        Return the producer id and epoch of the new producer.  `in_process`: the producer is one of
        this library; after a crash its open transaction is aborted.  That of a Kafka client, in
        another process, stays open until the client ends it or its time-out has passed.
        """
        self._store.access.check_writable()
        request, was_open = self._init_request(transactional_id, timeout_ms, expected, in_process)
        known = self._ask(transactional_id, request)
        while was_open():  # the first request only aborted the open transaction: repeat it
            known = self._ask(transactional_id, request)
        assert known is not None
        return known.identity

    def init_producer_later(
        self,
        transactional_id: str,
        timeout_ms: int,
        *,
        expected: tuple[int, int] | None = None,
        in_process: bool = True,
    ) -> Outcome[tuple[int, int]]:
        """Like `init_producer`, without waiting for other nodes."""
        request, was_open = self._init_request(transactional_id, timeout_ms, expected, in_process)
        outcome: Outcome[tuple[int, int]] = Outcome()

        def ask() -> None:
            asked = self._ask_later(transactional_id, request)
            asked.then(lambda: ended(asked))

        def ended(asked: Outcome[TransactionMetadata | None]) -> None:
            if asked.error is None and was_open():
                ask()
            else:
                asked.map(_identity).then_settle(outcome)

        ask()
        return outcome

    def _init_request(
        self,
        transactional_id: str,
        timeout_ms: int,
        expected: tuple[int, int] | None,
        in_process: bool,
    ) -> tuple[Callable[[int], Effect | None], Callable[[], bool]]:
        """Return the request, and a function: whether it found an open transaction."""
        was_open = False

        def request(now: int) -> Effect | None:
            nonlocal was_open
            self._store.access.check_writable()
            known = self._machine.get(transactional_id)
            was_open = known is not None and known.state is TransactionState.ONGOING
            return self._machine.init_producer(
                transactional_id, timeout_ms, now, fresh_id=self._fresh_id, expected=expected,
                in_process=in_process,
            )  # fmt: skip

        return request, lambda: was_open

    def add_partitions(
        self,
        transactional_id: str,
        identity: tuple[int, int],
        partitions: Iterable[tuple[str, int]],
        *,
        client_version: int | None = None,
    ) -> None:
        """Add partitions to the transaction; that is durable when this returns.

        `client_version` is that of a Kafka client's request: see `TransactionMachine`.
        """
        request = self._add_request(transactional_id, identity, partitions, client_version)
        self._ask(transactional_id, request)

    def add_partitions_later(
        self,
        transactional_id: str,
        identity: tuple[int, int],
        partitions: Iterable[tuple[str, int]],
        *,
        client_version: int | None = None,
    ) -> Outcome[TransactionMetadata | None]:
        """Like `add_partitions`, without waiting for other nodes."""
        request = self._add_request(transactional_id, identity, partitions, client_version)
        return self._ask_later(transactional_id, request)

    def _add_request(
        self,
        name: str,
        identity: tuple[int, int],
        partitions: Iterable[tuple[str, int]],
        version: int | None,
    ) -> Callable[[int], Effect | None]:
        wanted = list(partitions)
        return lambda now: self._machine.add_partitions(
            name, *identity, wanted, now, client_version=version
        )

    def end(
        self,
        transactional_id: str,
        identity: tuple[int, int],
        *,
        commit: bool,
        decided: Callable[[], None] | None = None,
        client_version: int | None = None,
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

        request = self._end_request(transactional_id, identity, commit, client_version)
        return _identity(self._ask(transactional_id, request, look))

    def end_later(
        self,
        transactional_id: str,
        identity: tuple[int, int],
        *,
        commit: bool,
        client_version: int | None = None,
    ) -> Outcome[tuple[int, int]]:
        """Like `end`, without waiting for other nodes."""
        request = self._end_request(transactional_id, identity, commit, client_version)
        return self._ask_later(transactional_id, request).map(_identity)

    def _end_request(
        self, name: str, identity: tuple[int, int], commit: bool, version: int | None
    ) -> Callable[[int], Effect | None]:
        return lambda now: self._machine.end(
            name, *identity, now, commit=commit, fresh_id=self._fresh_id, client_version=version
        )

    def check(self, transactional_id: str, identity: tuple[int, int]) -> None:
        """Raise TransactionAbortedError or FencedError if a producer's epoch has ended."""
        with self._lock:
            self._machine.check(transactional_id, *identity)

    def state_of(self, transactional_id: str) -> TransactionMetadata | None:
        """Return the state of a transactional id; None if the id is not known."""
        if not self._seats.all_taken:
            self._seats.check(self._number_of(transactional_id))
        with self._lock:
            return self._machine.get(transactional_id)

    def outcome(self, transactional_id: str, producer_id: int, epoch: int) -> str:
        """Return how the transaction of an epoch ended; see `TransactionMachine.outcome`."""
        with self._lock:
            return self._machine.outcome(transactional_id, producer_id, epoch)

    def verify(self, producer_id: int, epoch: int, partition: tuple[str, int]) -> None:
        """Raise unless the producer has a transaction open that the partition was added to.

        Raises TransactionStateError, FencedError or TransactionAbortedError.  In a cluster a
        producer that is not known is allowed: another node may coordinate it.
        """
        with self._lock:
            if not self._seats.all_taken and not self._machine.knows_producer(producer_id):
                return
            try:
                self._machine.verify(producer_id, epoch, partition)
            except TransactionStateError:
                for unreadable in self.unreadable.values():
                    raise unreadable from None
                raise

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
                if known.state is TransactionState.ONGOING and known.in_process
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
                ended: Outcome[TransactionMetadata | None] = Outcome()
                effect = self._when_settled(transactional_id, abort)
                if effect is not None:
                    self._drive(effect, outcome=ended)
                    ended.result()
        except ConcurrentTransactionsError:
            return  # another thread ends it

    def close(self) -> None:
        """Abort the open transactions of producers that use this store, which is closing."""
        if self._closing:
            return
        gone = ClosedError(f"the store {self._store.path} is closed")
        for producer in list(self._producers):
            producer.abandon(gone)
        if self._seats.all_taken and not (self._store.readonly or self._store.closed):
            self.recover(abort_ongoing=True)
        with self._lock:
            self._closing = True
        self._timers.close()
        for number in self._seats.numbers():
            self.drop(number, self._seats.epoch(number))  # another node finishes its transactions

    # ---- for operators ----

    def list(self, *, open_only: bool = False) -> tuple[TransactionDescription, ...]:
        """Return all transactional ids, sorted, or only those with an open transaction."""
        with self._lock:
            if self._store.readonly:
                self.unreadable.clear()
                self._load()
            for error in self.unreadable.values():
                raise error
            found = [
                known.described(self._number_of(known.transactional_id)) for known in self._machine
            ]
        return tuple(each for each in found if each.is_open or not open_only)

    def describe(self, transactional_id: str) -> TransactionDescription:
        """Return the state of a transactional id.  Raises LookupError if it is unknown."""
        for each in self.list():
            if each.transactional_id == transactional_id:
                return each
        raise LookupError(f"nothing is known of transactional id {transactional_id!r}")

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


def _identity(known: TransactionMetadata | None) -> tuple[int, int]:
    assert known is not None
    return known.identity
