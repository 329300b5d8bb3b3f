"""TransactionDriver: the transactional ids in memory, and the effects of their machine.

An effect is carried out through the Quorum of the store.  If the quorum does not answer later, the
thread of a request carries out its effects, one after the other.  Otherwise each effect is begun,
and the next one follows in the thread that brings the answer.

Sequence: Prepare* is committed before the first marker is written, and all markers are committed
before Complete* is appended.  In a cluster, markers are written again until they are committed, at
the node that leads their partition then.

In a cluster an id is loaded with its partition of ``__transaction_state``.  `drop` forgets it: the
requests that wait get NotCoordinatorError, and a late answer of the quorum finds that its effect is
not under way any more.

Threads share it.  `_lock` guards the machine and is not held while an effect is carried out.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

from logstore.clock import Clock, GuardedClock, SystemClock
from logstore.closeable import Closeable
from logstore.coordinators.internal_topics import (
    TRANSACTION_STATE,
    coordinator_partition,
    internal_topic,
)
from logstore.coordinators.quorum.outcome import Outcome
from logstore.coordinators.quorum.quorum import Coordination, refusal
from logstore.coordinators.quorum.seats import Seats
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
    IndeterminateAppendError,
    InvalidRecordError,
    LogStoreError,
    NotCoordinatorError,
    UnknownTopicError,
)
from logstore.partition.partition import Partition
from logstore.record import Record
from logstore.store.store import Store
from logstore.timers import Timeout, Timers
from logstore.waking import Gate, Notice

__all__ = ["TransactionDriver"]

log = logging.getLogger("logstore.transactions")

RETRY_SECONDS = 0.1  # between two tries to write what other nodes have not committed
COMPLETE = (TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT)
# Errors of a marker that is not needed: the partition was deleted, and its records with it; or the
# producer has a later epoch, so that the marker is there already.
NOT_NEEDED = (UnknownTopicError, IndexError, FencedError)

State: TypeAlias = "Outcome[TransactionMetadata | None]"
Look: TypeAlias = Callable[[], None]


def nothing() -> None:
    """Do nothing."""


class _Waiting(NamedTuple):
    """The request of an effect whose answer comes later."""

    look: Look
    outcome: State


class TransactionDriver(Closeable):
    """The ids of the partitions that this node coordinates."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._clock: Clock = store.clock or SystemClock()
        self._guarded_clock = GuardedClock.of(store.clock)
        coordination = Coordination.of(store)
        self._quorum = coordination.quorum
        self._take_producer_id = coordination.take_producer_id
        self._seats = Seats(TRANSACTION_STATE, self._quorum)
        self._lock = threading.RLock()
        self._changed = Notice()  # an effect is done or has failed
        self._machine = TransactionMachine()
        self._timers = Timers(store.clock, name="logstore transactions")
        self._time_outs: dict[str, Timeout] = {}
        self._highest_id = -1
        self._closing = False
        # By transactional id: the thread that carries out its effects.
        self._drivers: dict[str, int] = {}
        # By transactional id: the requests of effects that are answered later.
        self._waiting: dict[str, _Waiting] = {}
        # By number: partitions of __transaction_state that cannot be read.  Requests for their
        # transactional ids raise the error.
        self.unreadable: dict[int, LogStoreError | OSError] = {}
        if self._seats.all_taken:
            self._load()

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
                    self.unreadable[number] = error  # the other partitions can be used
        self._machine = machine
        for known in machine:
            self._learn(known)

    def _learn(self, known: TransactionMetadata) -> None:
        """Note the producer ids of a state that was loaded, and set its time-out."""
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
                known = None
                if record.value is not None:
                    known = TransactionMetadata.decode(name, record.value, record.headers)
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
        count = self._quorum.partition_count(TRANSACTION_STATE)
        return coordinator_partition(transactional_id, count)

    def _fresh_id(self) -> int:
        return self._take_producer_id(self._highest_id)

    # ---- partitions that move ----

    def load(self, partition: int, epoch: int) -> bool:
        """Load the ids of a partition that this node leads in `epoch`, and finish what is decided.

        Call it after the high watermark has reached the end that the log had when the epoch began:
        then no replayed record can be truncated.  Until it returns, requests raise
        CoordinatorLoadingError.  It reads the whole log, in the caller's thread.  Return False if
        the epoch is over.
        """
        self.drop(partition, epoch - 1)
        with self._lock:
            if not self._seats.begin(partition, epoch):
                return False
        loaded = TransactionMachine()
        try:
            self._replay(self._store[TRANSACTION_STATE][partition], loaded)
        except BaseException:
            with self._lock:
                self._seats.leave(partition, epoch)
            raise
        with self._lock:
            if not self._seats.take(partition, epoch):
                return False
            for known in loaded:
                self._machine.replay(known.transactional_id, known)
                self._learn(known)
        for name in loaded.unfinished():
            self._resume(name)
        return True

    def drop(self, partition: int, epoch: int) -> bool:
        """Forget the ids of a partition that this node has lost; return whether it was loaded.

        Requests that wait get NotCoordinatorError at once.
        """
        with self._lock:
            if not self._seats.leave(partition, epoch):
                return False
            self._changed.wake()
            lost = [n for n in self._machine.names() if self._number_of(n) == partition]
            waiting = [self._waiting.pop(name) for name in lost if name in self._waiting]
            for name in lost:
                self._drop_time_out(name)
            self._machine.drop(lost)
        for each in waiting:
            each.outcome.settle(NotCoordinatorError(TRANSACTION_STATE, partition))
        return True

    def _resume(self, transactional_id: str) -> None:
        """Write the markers of a decided transaction, unless they are being written."""
        with self._lock:
            known = self._machine.get(transactional_id)
            under_way = self._machine.is_under_way(transactional_id)
            if self._closing or known is None or not known.state.is_prepared or under_way:
                return
            effect = self._machine.resume(transactional_id)
        self._drive(effect)

    # ---- carrying out effects ----

    def _drive(self, effect: Effect, look: Look = nothing, outcome: State | None = None) -> None:
        """Carry out an effect and all that follow from it; `outcome` gets the state after the last.

        `look` is called after each effect.  The state is read, and `look` is called, under the
        lock: no other request can change the state in between.  If the quorum answers later,
        return after the first effect has begun.
        """
        outcome = outcome or Outcome()
        if self._quorum.answers_later:
            self._begin(effect, look, outcome)
            return
        following: Effect | None = effect
        state: TransactionMetadata | None = None
        while following is not None:
            effect = following
            try:
                self._carry_out(effect)
            except BaseException:
                with self._lock:
                    self._failed(effect)
                    look()
                raise
            with self._lock:
                following = self._done(effect, look)
                if following is None:
                    self._drivers.pop(effect.transactional_id, None)
                    state = self._machine.get(effect.transactional_id)
        outcome.settle(state)

    def _done(self, effect: Effect, look: Look) -> Effect | None:
        """Note that an effect was carried out; return the next one.  With the lock held."""
        self._changed.wake()
        following = self._machine.done(effect, self._clock.time_ms())
        look()
        if isinstance(effect, Append):
            self._appended(effect)
        return following

    def _failed(self, effect: Effect) -> None:
        """Handle an effect that failed or may have failed.  With the lock held."""
        self._changed.wake()
        self._machine.failed(effect)
        self._read_again(effect)
        # Last: after an interrupt before it, `_driving` still knows that the id is ours.
        self._drivers.pop(effect.transactional_id, None)

    @contextlib.contextmanager
    def _driving(self, transactional_id: str, look: Look = nothing) -> Iterator[None]:
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
            self._append(effect)
        else:
            self._mark(effect)

    def _append(self, effect: Append) -> None:
        known, name = effect.metadata, effect.transactional_id
        record = Record(
            None if known is None else known.encode(),
            key=encode_key(name),
            headers=() if known is None else tuple(known.headers),
        )
        # These need no fsync: after a power cut without them, the markers are written again.
        late = known is None or known.state in COMPLETE
        number = self._number_of(name)
        finish = self._quorum.append(
            TRANSACTION_STATE, number, self._seats.check(number), [record],
            partial(self._ended, effect), durability="os" if late else None,
        )  # fmt: skip
        finish()

    def _mark(self, effect: Mark) -> None:
        number = self._number_of(effect.transactional_id)
        if self._seats.all_taken:
            epoch = self._partition_of(effect.transactional_id).leader_epoch
        else:
            epoch = self._seats.check(number)
        self._mark_at(effect, effect.partitions, number, epoch)

    def _mark_at(
        self, effect: Mark, partitions: Collection[tuple[str, int]], number: int, epoch: int
    ) -> None:
        """Write markers into some partitions of a transaction."""
        self._quorum.mark(
            partitions,
            producer_id=effect.producer_id,
            producer_epoch=effect.producer_epoch,
            commit=effect.commit,
            coordinator_epoch=epoch,
            done=partial(self._marked, effect, number, epoch),
        )

    def _marked(
        self, effect: Mark, number: int, epoch: int, failed: Mapping[tuple[str, int], BaseException]
    ) -> None:
        """Handle the end of `_mark_at`: the markers of the partitions in `failed` are missing."""
        missing = {at: error for at, error in failed.items() if not isinstance(error, NOT_NEEDED)}
        if not self._quorum.answers_later:
            for error in missing.values():
                raise error  # all are marked again later
        elif any(isinstance(error, NotCoordinatorError) for error in missing.values()):
            self.drop(number, epoch)  # a coordinator with a later epoch has written there
        elif missing:
            at, error = next(iter(missing.items()))
            log.info("%r: %d markers are missing, of %s-%d: %s; written again",
                     effect.transactional_id, len(missing), *at, error)  # fmt: skip
            self._after_a_while(partial(self._mark_again, effect, tuple(missing), number, epoch))
        else:
            self._ended(effect, None)

    def _mark_again(
        self, effect: Mark, partitions: Collection[tuple[str, int]], number: int, epoch: int
    ) -> None:
        with self._lock:
            if self._closing or not self._is_under_way(effect):
                return
        try:
            self._mark_at(effect, partitions, number, epoch)
        except (LogStoreError, OSError) as error:
            self._marked(effect, number, epoch, dict.fromkeys(partitions, error))

    def _after_a_while(self, act: Callable[[], object]) -> None:
        self._timers.after(RETRY_SECONDS, act)
        self._timers.start()

    def _is_under_way(self, effect: Effect) -> bool:
        # Another coordinator, or this one in a later epoch, may have an equal effect under way.
        return self._machine.under_way(effect.transactional_id) is effect

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

    # ---- effects that are answered later ----

    def _begin(self, effect: Effect, look: Look, outcome: State) -> None:
        name = effect.transactional_id
        with self._lock:
            self._drivers.pop(name, None)  # no thread: an interrupt of the caller changes nothing
            begun = self._is_under_way(effect)
            if begun:
                self._waiting[name] = _Waiting(look, outcome)
        if not begun:
            outcome.settle(NotCoordinatorError(TRANSACTION_STATE, self._number_of(name)))
            return
        try:
            self._carry_out(effect)
        except (LogStoreError, OSError) as error:
            self._ended(effect, error)

    def _ended(self, effect: Effect, result: range | BaseException | None) -> None:
        """Handle the answer of the quorum to an effect."""
        if not self._quorum.answers_later:
            return  # `_drive` continues
        name, number = effect.transactional_id, self._number_of(effect.transactional_id)
        following: Effect | None = None
        ended: TransactionMetadata | BaseException | None = None
        with self._lock:
            if not self._is_under_way(effect):
                return  # the partition was lost since
            epoch = self._seats.epoch(number)
            look, outcome = self._waiting[name]
            lost = isinstance(result, IndeterminateAppendError)
            if not lost:
                if isinstance(result, BaseException):
                    ended = self._refused(effect, number, result)
                    look()
                else:
                    following = self._done(effect, look)
                    ended = self._machine.get(name)
                if following is None:
                    del self._waiting[name]
        if lost:
            # The reign has ended: the record is committed or truncated by the next leader.
            self.drop(number, epoch)
        elif following is not None:
            self._begin(following, look, outcome)
        else:
            outcome.settle(ended)

    def _refused(self, effect: Effect, number: int, error: BaseException) -> BaseException:
        """Handle an effect of which nothing was written.  With the lock held."""
        self._changed.wake()
        self._machine.failed(effect)
        known = self._machine.get(effect.transactional_id)
        if known is not None and known.state.is_prepared:
            self._after_a_while(partial(self._resume, known.transactional_id))
        elif known is not None and known.state is TransactionState.ONGOING:
            self._set_time_out(known, least=RETRY_SECONDS)
        return refusal(TRANSACTION_STATE, number, error)

    # ---- one request of an id at a time ----

    def _when_settled(
        self, transactional_id: str, request: Callable[[], Effect | None], *, wait: bool = True
    ) -> Effect | None:
        """Call `request` under the lock, and return its result.

        Before that, wait while another thread carries out an effect of the id.  If the transaction
        is decided and no thread writes its markers, write them.  ``wait=False``: raise
        ConcurrentTransactionsError instead of waiting.
        """
        while True:
            gate: Gate | None = None
            effect: Effect | None = None
            with self._lock:
                if self._machine.is_under_way(transactional_id):
                    gate = self._changed.gate()
                else:
                    self._drivers[transactional_id] = threading.get_ident()
                    known = self._machine.get(transactional_id)
                    if known is None or not known.state.is_prepared:
                        return request()
                    effect = self._machine.resume(transactional_id)
            if effect is not None:
                resumed: State = Outcome()
                self._drive(effect, outcome=resumed)
                if wait:
                    resumed.result()
            elif wait and gate is not None:
                gate.wait()
            if not wait:
                raise ConcurrentTransactionsError(
                    f"a transaction of {transactional_id!r} is being ended: ask again"
                )

    # ---- time-outs ----

    def _set_time_out(self, known: TransactionMetadata, least: float = 0.0) -> None:
        name = known.transactional_id
        if name not in self._time_outs:
            # One millisecond more: the machine aborts if more than `timeout_ms` have passed.
            whole = known.timeout_ms + 1
            left = known.start_ms + whole - self._guarded_clock.now_ms()
            # At most the whole time-out: the clock may have been ahead when the transaction began.
            self._time_outs[name] = self._timers.after(
                max(least, min(max(0, left), whole) / 1000), lambda: self._time_out(name)
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
                self._set_time_out(known, RETRY_SECONDS if self._quorum.answers_later else 0.0)
                return
            self._drivers[transactional_id] = threading.get_ident()
            effect = self._machine.abort(transactional_id, self._clock.time_ms())
        log.warning("%r: aborted, open for more than %d ms", transactional_id, known.timeout_ms)
        with contextlib.suppress(ClosedError):  # the next open of the store aborts it
            self._drive(effect)

    def run_due(self) -> int:
        """Abort transactions that have timed out.  For a manual clock; else a thread does it."""
        return self._timers.run_due()
