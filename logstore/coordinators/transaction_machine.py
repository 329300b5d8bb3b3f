"""TransactionMachine: Kafka's state machine for transactions, without I/O.

A request returns an *effect*, which the caller has to carry out: append a record to the
coordinator's log, or write markers into the partitions of a transaction.  The caller then calls
`done(effect)`, which returns the next effect or None; or `failed(effect)`.  The machine does not
wait, write or retry.  A crash is the same as a stop between two effects.

    Append(Ongoing) | Append(PrepareCommit) -> Mark -> Append(CompleteCommit)

Invariant: the state of an id is that of its newest record in the log.  It changes in `done`, after
the record was appended.  After Prepare* is in the log, the transaction can only end in that way: a
process that loads the log later writes the markers again.

Each transaction has its own epoch (KIP-890).  The markers have the next epoch, which fences batches
of the ended transaction that arrive late.  A `client_version` below 2 is a Kafka client from before
KIP-890: its epoch stays the same from one transaction to the next, and its markers have that epoch.
Kafka's clients give their version with each request; None is a producer of this library.

The caller serialises all calls.  While an effect of an id is under way, other requests for the id
raise ConcurrentTransactionsError.
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
LAST_EPOCH = EPOCH_MAX - 1  # the last in which a transaction can begin: its markers need one more
ID_LENGTH_MAX = 10_000  # characters; in UTF-8 it fits into a string of a record

S = TransactionState


@dataclasses.dataclass(frozen=True, slots=True)
class Append:
    """Effect: append the state of an id to the log; `metadata` None is a tombstone."""

    transactional_id: str
    metadata: TransactionMetadata | None


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """Effect: write the marker that ends a transaction into each of its partitions."""

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
        # The effect of each id that was returned and is neither done nor failed.
        self._under_way: dict[str, Effect] = {}

    # ---- the state ----

    def __iter__(self) -> Iterator[TransactionMetadata]:
        """Iterate over the states of all ids, sorted by id."""
        return iter([self._known[each] for each in sorted(self._known)])

    def get(self, transactional_id: str) -> TransactionMetadata | None:
        """Return the state of an id, or None."""
        return self._known.get(transactional_id)

    def under_way(self, transactional_id: str) -> Effect | None:
        """Return the effect of an id that is neither done nor failed, or None."""
        return self._under_way.get(transactional_id)

    def is_under_way(self, transactional_id: str) -> bool:
        """Return whether an effect of the id is neither done nor failed."""
        return transactional_id in self._under_way

    def replay(self, transactional_id: str, metadata: TransactionMetadata | None) -> None:
        """Take a record of the log.  Call it in the sequence of the log."""
        if metadata is None:
            # A tombstone: the id has expired.  Its next producer gets a new producer id.
            before = self._known.pop(transactional_id, None)
            if before is not None:
                self._names.pop(before.producer_id, None)
        else:
            # The entry of an earlier producer id stays: `verify` then finds the id and raises
            # FencedError, which is more exact than "unknown".
            self._names[metadata.producer_id] = transactional_id
            self._known[transactional_id] = metadata

    def names(self) -> list[str]:
        """Return all ids, also those whose first record is under way, sorted."""
        return sorted({*self._known, *self._under_way})

    def drop(self, transactional_ids: Iterable[str]) -> None:
        """Forget ids, as another machine has them now; their effects are not under way any more."""
        gone = set(transactional_ids)
        for name in gone:
            self._under_way.pop(name, None)
            self._known.pop(name, None)
        self._names = {number: name for number, name in self._names.items() if name not in gone}

    def check(self, transactional_id: str, producer_id: int, epoch: int) -> TransactionMetadata:
        """Return the state of an id, for the producer that has it.

        Raises TransactionAbortedError if this epoch's transaction was aborted by a time-out or an
        operator; FencedError if another producer has the id.
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

        An empty string if a later transaction of the id has begun: then this one has ended, and its
        markers are in the partitions.
        """
        known = self._known.get(transactional_id)
        if known is None:
            return ""
        if (known.producer_id, known.producer_epoch) == (producer_id, epoch):
            return "open"
        # The decision raised the epoch, so the ended transaction has the epoch before.
        if _is_last(known, producer_id, epoch):
            if known.state in (S.PREPARE_COMMIT, S.COMPLETE_COMMIT):
                return "committed"
            if known.state in (S.PREPARE_ABORT, S.COMPLETE_ABORT):
                return "aborted"
        return ""

    def knows_producer(self, producer_id: int) -> bool:
        """Return whether one of the ids has, or had, this producer id."""
        return producer_id in self._names

    def verify(self, producer_id: int, epoch: int, partition: tuple[str, int]) -> None:
        """Raise unless the producer has a transaction open that the partition was added to.

        It is Kafka's AddPartitionsToTxn with verifyOnly (KIP-890).
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
        in_process: bool = True,
    ) -> Effect | None:
        """Make the caller the only producer of an id.

        If the last producer has left a transaction open, the effects abort it, and the caller has
        to call again.  `expected` is the id and epoch of a producer that continues: it gets the
        epoch after its own, or is fenced.  Return None if it has its new epoch already.
        `in_process`: the producer is one of this library, not a Kafka client.
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
        client_version = 2 if in_process else 0  # of a Kafka client: until it adds a partition
        if known is None:
            new = TransactionMetadata(transactional_id, fresh_id(), 0, timeout_ms,
                                      last_update_ms=now_ms, client_version=client_version,
                                      in_process=in_process)  # fmt: skip
            return self._append(new)
        if expected is not None and expected != (known.producer_id, known.producer_epoch):
            if not (_is_last(known, *expected) and known.state.is_over):
                raise FencedError(expected[1], known.producer_epoch, where=_named(known))
            # The state has the epoch after that of the caller: of a call whose reply was lost, or
            # of an abort.
            if known.producer_epoch <= LAST_EPOCH:
                if known.state is S.EMPTY:
                    return None
                # As Kafka does: an EndTxn that follows finds no transaction that it could repeat.
                return self._append(
                    dataclasses.replace(
                        known, state=S.EMPTY, partitions=frozenset(), start_ms=-1,
                        timeout_ms=timeout_ms, last_update_ms=now_ms,
                    )
                )  # fmt: skip
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
                # Kept, so that a repeated request of the old id is recognised: see `_is_last`.
                previous_producer_id=known.producer_id if exhausted else -1,
                next_producer_id=-1,
                client_version=client_version,
                last_epoch=-1 if expected is None else known.producer_epoch,
                in_process=in_process,
            )
        )

    def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Iterable[tuple[str, int]],
        now_ms: int,
        *,
        client_version: int | None = None,
    ) -> Effect | None:
        """Add partitions to the transaction, before the first record is written there.

        Return None if all of them belong to it already.
        """
        known = self._of(transactional_id, producer_id, producer_epoch)
        wanted = known.partitions if known.state is S.ONGOING else frozenset()
        wanted |= frozenset(partitions)
        # No record, no fsync: most sends are to a partition that was added before.
        if known.state is S.ONGOING and wanted == known.partitions:
            return None
        return self._append(
            dataclasses.replace(
                known,
                state=S.ONGOING,
                partitions=wanted,
                last_update_ms=now_ms,
                # The time-out counts from the first partition, not from the last.
                start_ms=known.start_ms if known.state is S.ONGOING else now_ms,
                previous_producer_id=-1,
                client_version=_version(known, client_version),
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
        client_version: int | None = None,
    ) -> Effect | None:
        """Commit or abort.  Return None if the transaction has ended in this way already.

        A Kafka client of version 2 may abort without a partition, and gets a new epoch for it.
        """
        known = self._known.get(transactional_id)
        ended = S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT
        if (
            known is not None
            and client_version is None
            and known.state is ended
            and _is_last(known, producer_id, producer_epoch)
        ):
            return None
        if known is not None and client_version == 2 and _ended(known, producer_id, producer_epoch):
            if known.state is ended:
                return None
            raise TransactionStateError(
                f"the transaction of {_named(known)} has ended: it is {known.state.kafka_name}"
            )
        known = self._of(transactional_id, producer_id, producer_epoch)
        version = _version(known, client_version)
        # A client below version 2 gets no epoch in the reply: it continues with its own.
        keeps_epoch = version < 2
        if keeps_epoch and known.state is ended:
            return None
        is_open = known.state is S.ONGOING
        if not is_open and (commit or client_version != 2):
            raise TransactionStateError(
                f"{_named(known)} has no transaction to {'commit' if commit else 'abort'}: it is "
                f"{known.state.kafka_name}"
            )
        # The decision.  After this record is durable, the transaction ends this way, also after a
        # crash: `unfinished` lists it, and `resume` writes the markers.
        prepared = S.PREPARE_COMMIT if commit else S.PREPARE_ABORT
        if keeps_epoch:
            return self._append(
                dataclasses.replace(
                    known,
                    state=prepared,
                    last_epoch=-1,
                    last_update_ms=now_ms,
                    client_version=version,
                )
            )
        exhausted = known.producer_epoch >= LAST_EPOCH
        return self._append(
            dataclasses.replace(
                known,
                state=prepared,
                producer_epoch=known.producer_epoch + 1,
                last_epoch=known.producer_epoch,
                # Stored with the decision: after a crash the markers still carry the old id, and
                # `_completed` moves to the new one.
                next_producer_id=fresh_id() if exhausted else -1,
                last_update_ms=now_ms,
                start_ms=known.start_ms if is_open else now_ms,
                client_version=version,
            )
        )

    def abort(self, transactional_id: str, now_ms: int) -> Effect:
        """Abort a transaction after a time-out or for an operator; its producer's epoch ends."""
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
        """Return the ids whose transaction is open for longer than its time-out."""
        return [
            known.transactional_id
            for known in self._known.values()
            if known.state is S.ONGOING
            and known.start_ms + known.timeout_ms < now_ms
            and known.transactional_id not in self._under_way
        ]

    def unfinished(self) -> list[str]:
        """Return the ids with a decided transaction, whose markers are not being written."""
        return [
            known.transactional_id
            for known in self._known.values()
            if known.state.is_prepared and known.transactional_id not in self._under_way
        ]

    def expired(self, now_ms: int) -> list[str]:
        """Return the ids without an open transaction that were not used for `expiration_ms`."""
        return [
            known.transactional_id
            for known in self._known.values()
            if known.state.is_over
            and known.last_update_ms <= now_ms - self.expiration_ms
            and known.transactional_id not in self._under_way
        ]

    def forget(self, transactional_id: str) -> Effect:
        """Delete an id that has no open transaction; its next producer gets a new producer id."""
        known = self._idle(transactional_id)
        if known is None or not known.state.is_over:
            raise TransactionStateError(f"{transactional_id!r} has a transaction, or is not known")
        return self._start(Append(transactional_id, None))

    # ---- effects ----

    def resume(self, transactional_id: str) -> Effect:
        """Write the markers of a decided transaction again."""
        known = self._known[transactional_id]
        assert known.state.is_prepared
        assert transactional_id not in self._under_way
        return self._start(_markers_of(known))

    def done(self, effect: Effect, now_ms: int) -> Effect | None:
        """Note that an effect was carried out; return the next effect or None."""
        name = effect.transactional_id
        # An id has one effect under way; the coordinator carries it out without its lock.
        assert self._under_way.get(name) is effect
        following: Effect | None = None
        if isinstance(effect, Append):
            self.replay(name, effect.metadata)
            if effect.metadata is not None and effect.metadata.state.is_prepared:
                following = _markers_of(effect.metadata)
        else:
            # Only after the markers: this record drops the list of partitions that need one.
            following = Append(name, _completed(self._known[name], now_ms))
        # Last, in one step: after an interrupt before it, this effect is still under way.
        if following is None:
            del self._under_way[name]
        else:
            self._under_way[name] = following
        return following

    def failed(self, effect: Effect) -> None:
        """Note that an effect failed.  The caller reads the log to find out if it took effect."""
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
        """Return the state of an id for its producer; raise for any other one or while it ends."""
        known = self.check(name, producer_id, epoch)
        self._idle(name)
        return known


def _is_last(known: TransactionMetadata, producer_id: int, epoch: int) -> bool:
    """Return whether this producer id and epoch are those before the current epoch."""
    before = known.previous_producer_id if known.previous_producer_id >= 0 else known.producer_id
    return epoch >= 0 and (before, known.last_epoch) == (producer_id, epoch)


def _ended(known: TransactionMetadata, producer_id: int, epoch: int) -> bool:
    """Return whether the last transaction of the id ended and had this producer id and epoch.

    It is Kafka's rule for a request of version 2 that is repeated.  It needs only what is stored:
    a client can repeat a request after a restart.
    """
    if known.state not in (S.COMPLETE_COMMIT, S.COMPLETE_ABORT):
        return False
    if known.producer_epoch == 0:
        return (known.previous_producer_id, LAST_EPOCH) == (producer_id, epoch)
    return (known.producer_id, known.producer_epoch - 1) == (producer_id, epoch)


def _version(known: TransactionMetadata, client_version: int | None) -> int:
    return known.client_version if client_version is None else client_version


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
        # A repeated `end` of the old producer id finds its result by this field.
        previous_producer_id=known.producer_id,
    )


def _named(known: TransactionMetadata) -> str:
    return f"transactional id {known.transactional_id!r}"
