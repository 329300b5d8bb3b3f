"""Transaction: records in many partitions, and offsets, that are committed together or not at all.

Made by `Producer.transaction`.  It is committed at the end of its ``with`` block, or aborted if the
block raises.  Readers with ``isolation="read_committed"`` see its records only after a commit, not
after an abort.  Readers with ``"read_uncommitted"`` see the records as soon as they are written.

A transaction is used by one thread at a time, and a producer has one transaction at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Self, TypedDict, Unpack

from logstore.errors import TransactionStateError
from logstore.producer.delivery import Delivery
from logstore.record import Record
from logstore.store.topic import Position

__all__ = ["OffsetCommitter", "RecordOptions", "Transaction"]


class OffsetCommitter(Protocol):
    """What a transaction needs of a consumer whose offsets it commits."""

    @property
    def group_id(self) -> str | None: ...
    def commit_in_transaction(self, *, producer_id: int, producer_epoch: int) -> None:
        """Commit the consumer's positions as a part of that producer's transaction."""


class RecordOptions(TypedDict, total=False):
    """The keywords of `Producer.append`."""

    key: Any
    headers: Iterable[tuple[str, bytes | None]]
    timestamp: Any
    partition: int | None
    dedupe_id: str | bytes | None


class Sends(Protocol):
    """What a transaction needs of its producer."""

    @property
    def send(self) -> Callable[..., Delivery]: ...
    @property
    def append(self) -> Callable[..., Position]: ...


class TransactionOwner(Protocol):
    """The TransactionClient, which commits or aborts a transaction."""

    def commit(self, transaction: Transaction, /) -> None: ...
    def abort(self, transaction: Transaction, /) -> None: ...
    def commit_offsets(self, transaction: Transaction, offsets: object,
                       group_id: str | None, /) -> None: ...  # fmt: skip
    def send_internal(self, transaction: Transaction, topic: str, partition: int,
                      record: Record, /) -> None: ...  # fmt: skip


class Transaction:
    """An open transaction.  Use it in a ``with`` block, or call `commit` or `abort`."""

    def __init__(self, owner: TransactionOwner, producer: Sends) -> None:
        """Use `Producer.transaction`."""
        self._owner = owner
        self._producer = producer
        self.enlisted: set[tuple[str, int]] = set()  # partitions that the coordinator knows of
        self.over = ""  # how it ended; "" while it is open
        self.entered = False  # it is in a ``with`` block, which ends it
        # The producer's own method, without a call in between.  `end` deletes the attribute, and
        # `__getattr__` then raises TransactionStateError.
        self.send: Callable[..., Delivery] = producer.send

    def __repr__(self) -> str:
        return f"<Transaction of {len(self.enlisted)} partitions, {self.over or 'open'}>"

    def __getattr__(self, name: str) -> Any:
        if name == "send":
            self.check_open()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def check_open(self) -> None:
        """Raise TransactionStateError if the transaction has ended."""
        if self.over:
            raise TransactionStateError(f"the transaction has ended: it was {self.over}")

    def append(self, topic: str, value: Any, **options: Unpack[RecordOptions]) -> Position:
        """As `Producer.append`; the record is durable when the transaction is."""
        self.check_open()
        return self._producer.append(topic, value, **options)

    def commit_offsets(
        self,
        offsets: OffsetCommitter | Mapping[tuple[str, int], Any],
        *,
        group_id: str | None = None,
    ) -> None:
        """Commit offsets of a group together with the records of this transaction.

        `offsets` is a Consumer, whose positions are committed; or a mapping of (topic, partition)
        to the next offset to read, and then `group_id` names the group.
        """
        self.check_open()
        self._owner.commit_offsets(self, offsets, group_id)

    def send_internal(self, topic: str, partition: int, record: Record) -> None:
        """Send a record to a partition of an internal topic.  For the object that owns the topic.

        Serializers and interceptors of the producer do not see the record.
        """
        self.check_open()
        self._owner.send_internal(self, topic, partition, record)

    def commit(self) -> None:
        """Make all records and offsets of the transaction visible and durable.

        Raises TransactionAbortedError or FencedError if the transaction is not committed and never
        will be.  After any other error look at `over`: it is "committed" if the decision is in the
        log, and the missing markers are written later.
        """
        self.check_open()
        self._owner.commit(self)

    def abort(self) -> None:
        """Abort: `read_committed` readers never see the records and offsets."""
        self.check_open()
        self._owner.abort(self)

    def end(self, how: str) -> None:
        """Set how the transaction ended, and disable `send`.  For its TransactionClient."""
        self.over = how
        self.__dict__.pop("send", None)

    def __enter__(self) -> Self:
        self.check_open()
        self.entered = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.over:
            return
        if error is None:
            self.commit()
            return
        try:
            self.abort()
        except Exception as failure:  # noqa: BLE001  the block's own error is raised, with a note
            error.add_note(f"and the transaction could not be aborted: {failure}")
