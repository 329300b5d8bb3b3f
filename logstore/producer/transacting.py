"""TransactionClient: the part of a producer that calls the transaction coordinator.

It has the state of the transactional id: the open transaction, and whether the producer's epoch has
ended.  It uses the producer's lanes to write and to drop records, and does not own them.

Invariant: `current` is the only open transaction.  It is cleared in the same step in which the
transaction ends, so an interrupt leaves the transaction either open or ended.

Order of a commit: the coordinator learns all partitions; all lanes are written; the written records
are durable; the coordinator writes its decision.  A crash before the decision aborts the
transaction, and a crash after it leaves only markers to write.

Only the thread that has the transaction calls its methods, except `enlist` and `explain`, which any
thread that writes a lane may call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from logstore.config import ConfigError
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS
from logstore.coordinators.offset_book import OffsetBook, as_committed
from logstore.coordinators.transaction_coordinator import Transactions
from logstore.errors import FencedError, TransactionAbortedError, TransactionStateError
from logstore.producer.lane import Lane
from logstore.producer.routing import Route, Router
from logstore.producer.transaction import Sends, Transaction
from logstore.record import Record
from logstore.store.store import Store

__all__ = ["TransactionClient", "TransactionalProducer"]

T = TypeVar("T")


class TransactionalProducer(Sends, Protocol):
    """What a TransactionClient needs of its producer."""

    identity: tuple[int, int]
    _router: Router
    _quick: bool  # whether `send` may put bytes straight into a batch

    @property
    def fsync(self) -> bool: ...
    def _check_usable(self) -> None: ...
    def _takes_bytes(self) -> bool: ...
    def _write_blocking(self, lane: Lane, /) -> None: ...
    def _put_on(self, route: Route, value: Any, key: Any, headers: Any, timestamp: Any,
                partition: int | None, /) -> object: ...  # fmt: skip
    def _blocking(self, act: Callable[[], T], /) -> T: ...
    def _raise_failures(self) -> None: ...
    def _forget_failures(self) -> None: ...


class TransactionClient:
    """The transactional id of one producer."""

    def __init__(
        self, producer: TransactionalProducer, store: Store, name: str, timeout_ms: int
    ) -> None:
        self._producer = producer
        self._store = store
        self.name = name
        self._timeout_ms = timeout_ms
        self.current: Transaction | None = None
        self.fenced: FencedError | None = None
        # The producer's epoch has ended, and no other producer has the next one, as far as known.
        # `begin` then asks the coordinator for the next epoch.
        self._stale = False
        self._transactions = Transactions.of(store)
        producer.identity = self._transactions.init_producer(name, timeout_ms)
        self._transactions.join(self)

    def check_begun(self) -> None:
        """Raise unless a transaction is open."""
        if self.current is None:
            raise self.fenced or TransactionStateError(
                f"a producer with a transactional id ({self.name!r}) writes in "
                f"transactions only: with producer.transaction() as tx: tx.send(...)"
            )

    def begin(self) -> Transaction:
        """Begin a transaction; raise FencedError if another producer has the id by now."""
        self._producer._check_usable()
        if self.current is not None:
            self._replace_unused(self.current)
        if self.fenced is not None:
            raise self.fenced
        # An interrupt may have stopped the last abort before it dropped the records.
        self._drop_unwritten(TransactionAbortedError("the transaction was aborted"))
        if self._stale:
            with self._noticing_fences():
                self._renew()
        self._producer._forget_failures()
        for lane in self._producer._router.lanes():
            lane.begin()
        made = Transaction(self, self._producer)
        quick = self._producer._takes_bytes()
        # Last, in one step: after an interrupt before this line no transaction is open.
        self.current, self._producer._quick = made, quick
        return made

    def _replace_unused(self, transaction: Transaction) -> None:
        """End an unused transaction: an interrupt came before its ``with`` block was entered."""
        if (
            transaction.entered
            or transaction.enlisted
            or any(lane.unsettled for lane in self._producer._router.lanes())
        ):
            raise TransactionStateError("a transaction is open: commit or abort it first")
        transaction.end("replaced by another before it was used")
        self.current = None

    def _renew(self) -> None:
        """Get the next epoch after the coordinator ended this one, or raise FencedError.

        `expected` is our last epoch: the coordinator refuses if another producer took the id since.
        """
        self._producer.identity = self._transactions.init_producer(
            self.name, self._timeout_ms, expected=self._producer.identity
        )
        self._stale = False

    @contextlib.contextmanager
    def _noticing_fences(self) -> Iterator[None]:
        """Set `fenced` if another producer has the id; `_stale` after any other error."""
        try:
            yield
        except FencedError as error:
            reason = self.explain(error)
            if not isinstance(reason, FencedError):
                self._stale = True
                raise reason from error
            self.fenced = reason
            raise
        except BaseException:
            self._stale = True
            raise

    def commit(self, transaction: Transaction) -> None:
        """Commit the open transaction, or raise and abort it."""
        self._check_mine(transaction)
        self._producer._quick = False
        try:
            with self._noticing_fences():
                lanes = [lane for lane in self._producer._router.lanes() if lane.unsettled]
                self._enlist(transaction, {(lane.topic, lane.number) for lane in lanes})
                for lane in lanes:
                    self._producer._write_blocking(lane)
                self._producer._raise_failures()
                self._commit_written(transaction)
        except BaseException as error:
            self._give_up(transaction, error)
            raise
        # One step without a call: an interrupt leaves the transaction either open or ended.
        transaction.over, self.current = "committed", None
        transaction.end("committed")

    def _commit_written(self, transaction: Transaction) -> None:
        if not transaction.enlisted:
            return  # nothing was sent
        if self._producer.fsync:
            for lane in self._producer._router.lanes():
                if (lane.topic, lane.number) in transaction.enlisted:
                    lane.make_durable()
        try:
            self._producer.identity = self._producer._blocking(
                lambda: self._transactions.end(
                    self.name,
                    self._producer.identity,
                    commit=True,
                    decided=lambda: transaction.end("committed"),
                )
            )
        except FencedError as error:
            if not transaction.over:
                raise
            # The commit was decided.  The producer that has the id now wrote the missing markers
            # before it got its epoch, so the transaction is committed and this call succeeds.
            self.fenced = error

    def _give_up(self, transaction: Transaction, error: BaseException) -> None:
        """Abort a transaction whose commit raised `error`, unless the commit is decided."""
        if transaction.over == "committed":
            self.current = None
            error.add_note(
                "the transaction is committed: that is decided, and the markers that are missing "
                "will be written before the next one of its id, or when the store is closed"
            )
            return
        if self.current is not transaction:
            return
        try:
            self.abort(transaction)
        except Exception as failure:  # noqa: BLE001  the commit's error is raised, with a note
            error.add_note(f"and it could not be aborted now: {failure}")

    def abort(self, transaction: Transaction) -> None:
        """Abort the open transaction."""
        self._check_mine(transaction)
        self._producer._quick = False
        # After an interrupt below this line, the next `begin` gets another epoch.
        stale, self._stale = self._stale, self.fenced is None
        transaction.over, self.current = "aborted", None
        transaction.end("aborted")
        self._drop_unwritten(TransactionAbortedError("the transaction was aborted"))
        self._producer._forget_failures()  # of records that are aborted now
        # Only now: until its lane was locked above, the producer's thread could still enlist a
        # partition and write there.
        if transaction.enlisted and self.fenced is None:
            with self._noticing_fences():
                self._producer.identity = self._transactions.end(
                    self.name, self._producer.identity, commit=False
                )
            stale = False
        self._stale = stale

    def commit_offsets(
        self, transaction: Transaction, offsets: object, group_id: str | None
    ) -> None:
        """Commit offsets of a group as a part of the open transaction."""
        self._check_mine(transaction)
        given: Any = offsets
        if isinstance(given, Mapping):
            as_committed(given, 0)  # raises for invalid offsets before anything is written
        elif not hasattr(given, "commit_in_transaction"):
            raise TypeError(f"offsets by partition, or a Consumer, not {type(given).__name__}")
        name = group_id if isinstance(given, Mapping) else given.group_id
        if not name:
            raise ConfigError("offsets are committed for a group: name it with group_id=")
        book = OffsetBook.of(self._store)
        producer_id, epoch = self._producer.identity
        with self._noticing_fences():
            self._enlist(transaction, {(CONSUMER_OFFSETS, book.partition_of(name))})
            if isinstance(given, Mapping):
                book.commit_in_transaction(
                    name, given, producer_id=producer_id, producer_epoch=epoch
                )
            else:
                given.commit_in_transaction(producer_id=producer_id, producer_epoch=epoch)

    def send_internal(
        self, transaction: Transaction, topic: str, partition: int, record: Record
    ) -> None:
        """Send a record to an internal topic, whose partition exists, in the open transaction."""
        self._check_mine(transaction)
        route = self._producer._router.find(topic, internal=True)
        self._producer._put_on(
            route, record.value, record.key, record.headers, record.timestamp, partition
        )

    def _check_mine(self, transaction: Transaction) -> None:
        self._producer._check_usable()
        if self.current is not transaction:
            raise TransactionStateError("the transaction has ended")

    def _drop_unwritten(self, error: BaseException) -> None:
        for lane in self._producer._router.lanes():
            lane.fail_unwritten(error)

    def abandon(self, error: BaseException) -> None:
        """End the open transaction, if any: the store aborts it because it closes."""
        transaction, self.current = self.current, None
        if transaction is not None and not transaction.over:
            self._producer._quick = False
            transaction.end("aborted, as its store was closed")
            self._drop_unwritten(error)

    # ---- for lanes ----

    def explain(self, error: BaseException) -> BaseException:
        """Return the coordinator's reason for a FencedError; any other error unchanged.

        A partition only compares epochs; the coordinator knows whether the transaction timed out or
        another producer took the id.
        """
        if isinstance(error, FencedError):
            try:
                self._transactions.check(self.name, self._producer.identity)
            except (FencedError, TransactionAbortedError) as reason:
                return reason
        return error

    def enlist(self, lane: Lane) -> None:
        """Add the partition of a lane to the open transaction, before the lane writes there."""
        if self.current is None:
            raise TransactionStateError("the transaction has ended: this record was sent too late")
        self._enlist(self.current, {(lane.topic, lane.number)})

    def _enlist(self, transaction: Transaction, partitions: set[tuple[str, int]]) -> None:
        # The coordinator learns a partition before the first record is written there: otherwise a
        # crash would leave records without a marker, which block `read_committed` readers.
        new = partitions - transaction.enlisted
        if new:
            self._transactions.add_partitions(self.name, self._producer.identity, new)
            transaction.enlisted |= new
