"""TransactionMachine: Kafka's state machine for transactions, without I/O.

Requests go in with the time, and an *effect* comes out: something that someone else has to do, a
record to append to the coordinator's log or markers to write into the partitions of a transaction.
`done` takes the news that it was done, and answers with the next one, until there is none.  So all
waiting, writing and failing is elsewhere, and a crash is to stop between two effects.

    Append(Ongoing) | Append(PrepareCommit) -> Mark -> Append(CompleteCommit)

Invariant: the state is that of the newest record in the log; it changes when that record is
appended and not before.  Once Prepare* is in the log, the transaction ends in that way: whoever
loads the log later goes on with its markers.

One epoch a transaction (KIP-890): the markers carry the next epoch, which fences everything that is
still under way from the transaction that they end.

Callers serialise; an id whose effect is under way refuses others with ConcurrentTransactionsError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from logstore.config import ConfigError
from logstore.coordinators.transaction_state import EPOCH_MAX, TransactionMetadata, TransactionState
from logstore.errors import (
    ConcurrentTransactionsError,
    FencedError,
    InvalidNameError,
    TransactionAbortedError,
    TransactionStateError,
)

__all__ = ["Append", "Effect", "Mark", "TransactionMachine"]

MAX_TIMEOUT_MS = 900_000  # transaction.max.timeout.ms
EXPIRATION_MS = 7 * 86_400_000  # transactional.id.expiration.ms
LAST_EPOCH = EPOCH_MAX - 1  # of a producer id that can begin a transaction
ID_LENGTH_MAX = 10_000  # as a string that fits its record with room to spare

S = TransactionState


@dataclasses.dataclass(frozen=True, slots=True)
class Append:
    """Append the state of an id to the log; `metadata` None: its tombstone."""

    transactional_id: str
    metadata: TransactionMetadata | None


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """Write the marker that ends a transaction into each of its partitions."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    commit: bool
    partitions: frozenset[tuple[str, int]]


Effect: TypeAlias = Append | Mark


class TransactionMachine:
    """The transactional ids of a store, or of some partitions of its log."""

    def __init__(
        self, *, max_timeout_ms: int = MAX_TIMEOUT_MS, expiration_ms: int = EXPIRATION_MS
    ) -> None:
        self.max_timeout_ms = max_timeout_ms
        self.expiration_ms = expiration_ms
        self._known: dict[str, TransactionMetadata] = {}
        self._names: dict[int, str] = {}  # transactional ids, by producer id; some are outdated
        self._under_way: dict[str, Effect] = {}

    # ---- what is known ----

    def __iter__(self) -> Iterator[TransactionMetadata]:
        """All ids, by name."""
        return iter([self._known[each] for each in sorted(self._known)])

    def get(self, transactional_id: str) -> TransactionMetadata | None:
        """What is known of an id."""
        return self._known.get(transactional_id)

    def under_way(self, transactional_id: str) -> Effect | None:
        """What is being carried out for an id."""
        return self._under_way.get(transactional_id)

    def is_under_way(self, transactional_id: str) -> bool:
        """Whether an effect of it was given out and not answered."""
        return transactional_id in self._under_way

    def replay(self, transactional_id: str, metadata: TransactionMetadata | None) -> None:
        """Take in a record of the log, in its order."""
        if metadata is None:
            before = self._known.pop(transactional_id, None)
            if before is not None:
                self._names.pop(before.producer_id, None)
        else:
            self._names[metadata.producer_id] = transactional_id
            self._known[transactional_id] = metadata

    def check(self, transactional_id: str, producer_id: int, epoch: int) -> TransactionMetadata:
        """Return the state of an id, for the producer that has it.

        Raises TransactionAbortedError when this epoch's transaction was aborted by a time-out or
        an operator; FencedError when another producer has the id.
        """
        known = self._known.get(transactional_id)
        if known is None:
            raise TransactionStateError(
                f"nothing is known of transactional id {transactional_id!r}"
            )
        if (known.producer_id, known.producer_epoch) != (producer_id, epoch):
            if self.outcome(transactional_id, producer_id, epoch) == "aborted":
                raise TransactionAbortedError(
                    f"the transaction of {transactional_id!r} was aborted: it was open for longer "
                    f"than its time-out of {known.timeout_ms} ms, or an operator ended it"
                )
            raise FencedError(epoch, known.producer_epoch, where=_named(known))
        return known

    def outcome(self, transactional_id: str, producer_id: int, epoch: int) -> str:
        """Return how the transaction of an epoch ended: "committed", "aborted", or "open".

        An empty string if the state of the id has moved on since: the transaction is over, and its
        markers are in the partitions.
        """
        known = self._known.get(transactional_id)
        if known is None:
            return ""
        if (known.producer_id, known.producer_epoch) == (producer_id, epoch):
            return "open"
        if _is_last(known, producer_id, epoch):
            if known.state in (S.PREPARE_COMMIT, S.COMPLETE_COMMIT):
                return "committed"
            if known.state in (S.PREPARE_ABORT, S.COMPLETE_ABORT):
                return "aborted"
        return ""

    def verify(self, producer_id: int, epoch: int, partition: tuple[str, int]) -> None:
        """Raise unless the producer has a transaction open that the partition was added to.

        As AddPartitionsToTxn with verifyOnly (KIP-890).
        """
        name = self._names.get(producer_id)
        known = None if name is None else self.check(name, producer_id, epoch)
        if known is None or known.state is not S.ONGOING or partition not in known.partitions:
            raise TransactionStateError(
                f"a transactional batch of producer {producer_id}, epoch {epoch}: the coordinator "
                f"has no open transaction of it with {partition[0]}-{partition[1]}, and nothing "
                f"would ever end one"
            )

    # ---- requests ----

    def init_producer(
        self,
        transactional_id: str,
        timeout_ms: int,
        now_ms: int,
        *,
        fresh_id: Callable[[], int],
        expected: tuple[int, int] | None = None,
    ) -> Effect | None:
        """Make the caller the only producer of an id.

        When its last one has left a transaction open, the effects abort it, and the caller has to
        ask again.  `expected` is the id and epoch of a producer that goes on: it gets the epoch
        after its own, or is fenced.  None: it has its new epoch already.
        """
        name: object = transactional_id
        if not isinstance(name, str) or not name:
            raise InvalidNameError(f"a transactional id is a str that is not empty, not {name!r}")
        if len(transactional_id) > ID_LENGTH_MAX:
            raise InvalidNameError(f"a transactional id has at most {ID_LENGTH_MAX} characters")
        if not 0 < timeout_ms <= self.max_timeout_ms:
            raise ConfigError(
                f"a transaction's time-out must be more than 0 and at most {self.max_timeout_ms} "
                f"ms, not {timeout_ms}"
            )
        known = self._idle(transactional_id)
        if known is None:
            new = TransactionMetadata(transactional_id, fresh_id(), 0, timeout_ms,
                                      last_update_ms=now_ms)  # fmt: skip
            return self._append(new)
        if expected is not None and expected != (known.producer_id, known.producer_epoch):
            if not (_is_last(known, *expected) and known.state.is_over):
                raise FencedError(expected[1], known.producer_epoch, where=_named(known))
            if known.producer_epoch <= LAST_EPOCH:
                return None
        if known.state is S.ONGOING:
            return self._abort(known, now_ms)
        exhausted = known.producer_epoch >= LAST_EPOCH
        return self._append(
            dataclasses.replace(
                known,
                producer_id=fresh_id() if exhausted else known.producer_id,
                producer_epoch=0 if exhausted else known.producer_epoch + 1,
                timeout_ms=timeout_ms,
                state=S.EMPTY,
                partitions=frozenset(),
                last_update_ms=now_ms,
                start_ms=-1,
                previous_producer_id=known.producer_id if exhausted else -1,
                next_producer_id=-1,
                client_version=2,
                last_epoch=-1 if expected is None else known.producer_epoch,
            )
        )

    def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Iterable[tuple[str, int]],
        now_ms: int,
    ) -> Effect | None:
        """Before the first record goes there.  None: they belong to the transaction already."""
        known = self._of(transactional_id, producer_id, producer_epoch)
        wanted = known.partitions if known.state is S.ONGOING else frozenset()
        wanted |= frozenset(partitions)
        if known.state is S.ONGOING and wanted == known.partitions:
            return None
        return self._append(
            dataclasses.replace(
                known,
                state=S.ONGOING,
                partitions=wanted,
                last_update_ms=now_ms,
                start_ms=known.start_ms if known.state is S.ONGOING else now_ms,
                previous_producer_id=-1,
                last_epoch=-1,
            )
        )

    def end(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        now_ms: int,
        *,
        commit: bool,
        fresh_id: Callable[[], int],
    ) -> Effect | None:
        """Commit or abort.  None: it was ended in this way before."""
        known = self._known.get(transactional_id)
        ended = S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT
        if (
            known is not None
            and known.state is ended
            and _is_last(known, producer_id, producer_epoch)
        ):
            return None
        known = self._of(transactional_id, producer_id, producer_epoch)
        if known.state is not S.ONGOING:
            raise TransactionStateError(
                f"{_named(known)} has no transaction to {'commit' if commit else 'abort'}: it is "
                f"{known.state.kafka_name}"
            )
        exhausted = known.producer_epoch >= LAST_EPOCH
        return self._append(
            dataclasses.replace(
                known,
                state=S.PREPARE_COMMIT if commit else S.PREPARE_ABORT,
                producer_epoch=known.producer_epoch + 1,
                last_epoch=known.producer_epoch,
                next_producer_id=fresh_id() if exhausted else -1,
                last_update_ms=now_ms,
            )
        )

    def abort(self, transactional_id: str, now_ms: int) -> Effect:
        """End a transaction for its producer, whose epoch is over then: a time-out, an operator."""
        known = self._idle(transactional_id)
        if known is None:
            raise TransactionStateError(
                f"nothing is known of transactional id {transactional_id!r}"
            )
        if known.state is not S.ONGOING:
            raise TransactionStateError(
                f"{_named(known)} has no transaction to abort: it is {known.state.kafka_name}"
            )
        return self._abort(known, now_ms)

    def _abort(self, known: TransactionMetadata, now_ms: int) -> Effect:
        return self._append(
            dataclasses.replace(
                known,
                state=S.PREPARE_ABORT,
                producer_epoch=known.producer_epoch + 1,
                last_epoch=known.producer_epoch,
                last_update_ms=now_ms,
            )
        )

    def timed_out(self, now_ms: int) -> list[str]:
        """Ids whose transaction is open for longer than it may be."""
        return [
            known.transactional_id
            for known in self._known.values()
            if known.state is S.ONGOING
            and known.start_ms + known.timeout_ms < now_ms
            and known.transactional_id not in self._under_way
        ]

    def unfinished(self) -> list[str]:
        """Ids whose transaction is decided, and whose markers nobody is writing."""
        return [
            known.transactional_id
            for known in self._known.values()
            if known.state.is_prepared and known.transactional_id not in self._under_way
        ]

    def expired(self, now_ms: int) -> list[str]:
        """Ids without a transaction that nobody used for so long."""
        return [
            known.transactional_id
            for known in self._known.values()
            if known.state.is_over
            and known.last_update_ms <= now_ms - self.expiration_ms
            and known.transactional_id not in self._under_way
        ]

    def forget(self, transactional_id: str) -> Effect:
        """Forget an id that has no transaction: the next producer of it is a new one."""
        known = self._idle(transactional_id)
        if known is None or not known.state.is_over:
            raise TransactionStateError(f"{transactional_id!r} has a transaction, or is not known")
        return self._start(Append(transactional_id, None))

    # ---- effects ----

    def resume(self, transactional_id: str) -> Effect:
        """Go on with the markers of a transaction that is decided."""
        known = self._known[transactional_id]
        assert known.state.is_prepared
        assert transactional_id not in self._under_way
        return self._start(_markers_of(known))

    def done(self, effect: Effect, now_ms: int) -> Effect | None:
        """It was done; the next one."""
        name = effect.transactional_id
        assert self._under_way.get(name) is effect
        following: Effect | None = None
        if isinstance(effect, Append):
            self.replay(name, effect.metadata)
            if effect.metadata is not None and effect.metadata.state.is_prepared:
                following = _markers_of(effect.metadata)
        else:
            following = Append(name, _completed(self._known[name], now_ms))
        # Last, in one step: until then an interrupt finds this effect under way.
        if following is None:
            del self._under_way[name]
        else:
            self._under_way[name] = following
        return following

    def failed(self, effect: Effect) -> None:
        """It was not done, or nobody can tell: the log says which, see `replay`."""
        assert self._under_way.pop(effect.transactional_id) is effect

    def _append(self, metadata: TransactionMetadata) -> Effect:
        return self._start(Append(metadata.transactional_id, metadata))

    def _start(self, effect: Effect) -> Effect:
        self._under_way[effect.transactional_id] = effect
        return effect

    def _idle(self, transactional_id: str) -> TransactionMetadata | None:
        known = self._known.get(transactional_id)
        prepared = known is not None and known.state.is_prepared
        if prepared or transactional_id in self._under_way:
            raise ConcurrentTransactionsError(
                f"a transaction of {transactional_id!r} is being ended: ask again"
            )
        return known

    def _of(self, name: str, producer_id: int, epoch: int) -> TransactionMetadata:
        """What is known of an id, for its producer; anyone else is fenced."""
        known = self.check(name, producer_id, epoch)
        self._idle(name)
        return known


def _is_last(known: TransactionMetadata, producer_id: int, epoch: int) -> bool:
    """Whether this is who had the id before it got its present epoch."""
    before = known.previous_producer_id if known.previous_producer_id >= 0 else known.producer_id
    return (before, known.last_epoch) == (producer_id, epoch)


def _markers_of(known: TransactionMetadata) -> Mark:
    return Mark(
        known.transactional_id,
        known.producer_id,
        known.producer_epoch,
        known.state is S.PREPARE_COMMIT,
        known.partitions,
    )


def _completed(known: TransactionMetadata, now_ms: int) -> TransactionMetadata:
    commit = known.state is S.PREPARE_COMMIT
    done = dataclasses.replace(
        known,
        state=S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT,
        partitions=frozenset(),
        last_update_ms=now_ms,
        next_producer_id=-1,
    )
    if known.next_producer_id < 0:
        return done
    return dataclasses.replace(
        done,
        producer_id=known.next_producer_id,
        producer_epoch=0,
        previous_producer_id=known.producer_id,
    )


def _named(known: TransactionMetadata) -> str:
    return f"transactional id {known.transactional_id!r}"
