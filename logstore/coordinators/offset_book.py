"""OffsetBook: the committed offsets and the groups of one store, read from ``__consumer_offsets``.

The log is the only state.  A partition is replayed into a Ledger at the first use of one of its
groups.  Every later read first replays the records that were appended since, by any writer.  So a
transaction's marker needs no message to the book: it takes effect when it is in the log.

Invariant: the book returns only offsets below the high watermark, and with durability="fsync" only
durable ones.  So neither a new leader nor a power cut can take back an offset that a caller has
seen.

Records are written through the Quorum of the store.  If it answers later, the book has the
partitions that `load` was called for, and methods that end in ``_later`` return before the records
are committed.

Threads share a book.  A *shelf* is one partition with its ledger and its lock.  Locks are taken in
this order: the lock of a Guard (a group), `_deletions`, a shelf's `lock`, those of the partition.
No shelf's lock is held during an fsync, so that concurrent commits share one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

from logstore.clock import Clock, SystemClock
from logstore.closeable import Closeable
from logstore.coordinators.consumer_group.records import (
    ConsumerGroupKey,
    ConsumerGroupState,
    Value,
)
from logstore.coordinators.internal_topics import (
    CONSUMER_OFFSETS,
    coordinator_partition,
    internal_topic,
    plain_records,
)
from logstore.coordinators.offset_ledger import GroupEntry, Ledger
from logstore.coordinators.offset_records import (
    CommittedOffset,
    GroupKey,
    GroupMetadata,
    OffsetKey,
    TopicPartition,
    check_text,
)
from logstore.coordinators.quorum.outcome import Outcome
from logstore.coordinators.quorum.quorum import Coordination, refusal
from logstore.coordinators.quorum.seats import Seats
from logstore.errors import (
    FencedError,
    IndeterminateAppendError,
    InvalidRecordError,
    NotCoordinatorError,
)
from logstore.partition.partition import Partition
from logstore.record import Record
from logstore.store.store import Store

__all__ = ["OffsetBook", "Offsets", "as_committed"]

METADATA_MAX = 4096  # characters of a committed offset's metadata
INT32_MAX, INT64_MAX = (1 << 31) - 1, (1 << 63) - 1

Offsets: TypeAlias = (
    Mapping[tuple[str, int], CommittedOffset | int] | Mapping[TopicPartition, CommittedOffset | int]
)


class Guard(NamedTuple):
    """The permission to append: `check` raises if not allowed; it is valid while `lock` is held."""

    lock: contextlib.AbstractContextManager[object]
    check: Callable[[], None]


# A commit without a group coordinator: no lock, always allowed.
_FREE = Guard(contextlib.nullcontext(), lambda: None)


def as_committed(
    offsets: Offsets, now_ms: int, metadata: str = ""
) -> dict[TopicPartition, CommittedOffset]:
    """Return a user's offsets as CommittedOffsets, checked, with `now_ms` as their timestamp.

    An int is an offset with the given metadata.  Raises TypeError, ConfigError or
    InvalidRecordError.
    """
    told: object = offsets
    if not isinstance(told, Mapping):
        raise TypeError(f"offsets are a dict of offsets by (topic, partition), not {told!r}")
    found = {}
    for key, said in told.items():
        committed = CommittedOffset(said, metadata) if isinstance(said, int) else said
        if not isinstance(committed, CommittedOffset) or not _is_int(committed.offset):
            raise TypeError(f"an offset is an int or a CommittedOffset, not {said!r}")
        if not isinstance(key, tuple) or len(key) != 2 or not _is_int(key[1]):
            raise TypeError(f"a partition is (topic, number), not {key!r}")
        where = TopicPartition(check_text("a topic", key[0]), key[1])
        if not 0 <= where.partition <= INT32_MAX:
            raise InvalidRecordError(f"{where.topic} cannot have a partition {where.partition}")
        # A client of Kafka may commit an offset below 0; a plain number below 0 is a mistake.
        least = -INT64_MAX - 1 if said is committed else 0
        if not least <= committed.offset <= INT64_MAX:
            raise InvalidRecordError(f"offset {committed.offset} of {where} cannot be committed")
        check_text("the metadata of an offset", committed.metadata)
        if len(committed.metadata) > METADATA_MAX:
            raise InvalidRecordError(
                f"the metadata of {where} has {len(committed.metadata)} characters; at most "
                f"{METADATA_MAX} are allowed (offset.metadata.max.bytes)"
            )
        if committed.timestamp < 0:
            committed = dataclasses.replace(committed, timestamp=now_ms)
        found[where] = committed
    return found


def _is_int(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


class _Shelf:
    """One partition of the topic: its ledger, and its log if there is one.  `lock` guards all."""

    def __init__(self, number: int, epoch: int = 0) -> None:
        self.number = number
        self.epoch = epoch  # that it was loaded in
        self.dropped = False
        self.waiting: set[Outcome[range]] = set()  # of records that are not committed yet
        self.lock = threading.RLock()
        self.ledger = Ledger()
        self.log: Partition | None = None


class OffsetBook(Closeable):
    """The committed offsets of a store.  A store has one book: `OffsetBook.of`.

    The book of a store that is open readonly can be read, and has the commits of other processes.
    """

    def __init__(self, store: Store) -> None:
        """Use `OffsetBook.of`."""
        self._store = store
        self._clock: Clock = store.clock or SystemClock()
        self._lock = threading.Lock()  # guards `_shelves`, not the shelves themselves
        self._shelves: dict[int, _Shelf] = {}
        self._quorum = Coordination.of(store).quorum
        self._seats = Seats(CONSUMER_OFFSETS, self._quorum)
        # Called with a partition and an epoch that has ended, as an append has shown.
        self.when_lost: Callable[[int, int], object] = self.drop
        self._deletions = threading.Lock()  # one thread writes tombstones of deleted topics
        self._count = 0  # of partitions; 0 until the topic exists, then read once

    @classmethod
    def of(cls, store: Store) -> OffsetBook:
        """Return the book of a store; it is closed with the store."""
        return store.companions.of(cls)

    def close(self) -> None:
        """Do nothing: the store closes the partitions."""

    # ---- where ----

    @property
    def partitions(self) -> int:
        """The partition count of the topic; 0 if it does not exist and the store is readonly."""
        if self._count == 0 and not self._seats.all_taken:
            self._count = self._quorum.partition_count(CONSUMER_OFFSETS)
        elif self._count == 0:
            if not self._store.readonly:
                # Declares the topic, which makes no partition yet.
                internal_topic(self._store, CONSUMER_OFFSETS)
            if CONSUMER_OFFSETS in self._store:
                topic = self._store[CONSUMER_OFFSETS]
                self._count = self._store.topic_changes.declared_partitions(topic)
        return self._count

    def partition_of(self, group: str) -> int:
        """Return the partition that stores a group.

        A transaction that commits offsets of the group has to include this partition.
        """
        return coordinator_partition(check_text("a group's name", group), self.partitions)

    def check_here(self, group: str) -> None:
        """Raise CoordinatorError if another node coordinates a group, or it is being loaded."""
        if not self._seats.all_taken:
            self._seats.check(self.partition_of(group))

    def _shelf_of(self, group: str) -> _Shelf:
        check_text("a group's name", group)
        return self._shelf(self.partition_of(group) if self.partitions else 0)

    def _shelf(self, number: int) -> _Shelf:
        """Return a shelf.  Raises CoordinatorError if this node does not coordinate it."""
        self._seats.check(number)
        with self._lock:
            shelf = self._shelves.get(number)
            if shelf is None:
                if not self._seats.all_taken:
                    raise NotCoordinatorError(CONSUMER_OFFSETS, number)  # dropped since
                shelf = self._shelves[number] = _Shelf(number)
            return shelf

    # ---- partitions that move ----

    def load(self, partition: int, epoch: int) -> bool:
        """Replay a partition that this node leads in `epoch`; return False if that is over.

        Call it after the high watermark has reached the end that the log had when the epoch began:
        then no replayed record can be truncated.  Until it returns, requests raise
        CoordinatorLoadingError.  It reads the whole log, in the caller's thread.
        """
        self.drop(partition, epoch - 1)
        with self._lock:
            if not self._seats.begin(partition, epoch):
                return False
        shelf = _Shelf(partition, epoch)
        try:
            with shelf.lock:
                self._taken_in(shelf)
        except BaseException:
            with self._lock:
                self._seats.leave(partition, epoch)
            raise
        with self._lock:
            if not self._seats.take(partition, epoch):
                return False
            self._shelves[partition] = shelf
        return True

    def drop(self, partition: int, epoch: int, first: Callable[[], object] = lambda: None) -> bool:
        """Forget a partition that this node has lost; return whether it was loaded.

        Commits that wait get NotCoordinatorError at once, after `first` was called.  A later answer
        to them has no effect.
        """
        with self._lock:
            if not self._seats.leave(partition, epoch):
                return False
            shelf = self._shelves.pop(partition)
        with shelf.lock:
            shelf.dropped = True
            waiting, shelf.waiting = shelf.waiting, set()
        first()
        for outcome in waiting:
            outcome.settle(NotCoordinatorError(CONSUMER_OFFSETS, partition))
        return True

    def drop_all(self) -> None:
        """Forget all partitions that were loaded."""
        for number in self._seats.numbers():
            self.drop(number, self._seats.epoch(number))

    def groups_of(self, partition: int) -> list[str]:
        """Return the groups with records in a partition that is loaded."""
        shelf = self._shelf(partition)
        with shelf.lock:
            return sorted(self._taken_in(shelf).groups)

    # ---- reading ----

    def _taken_in(self, shelf: _Shelf) -> Ledger:
        """Replay new records, and return the ledger.  With the shelf's lock held."""
        self._store.access.check_usable()
        log = shelf.log
        if log is None or log.closed:
            if CONSUMER_OFFSETS not in self._store:
                return shelf.ledger
            topic = self._store[CONSUMER_OFFSETS]
            if shelf.number not in topic.partition_numbers:
                return shelf.ledger
            log = shelf.log = topic[shelf.number]
        end = log.high_watermark
        if not log.readonly and log.durability == "fsync":
            # A power loss must not take back an offset that a reader has seen: records that are not
            # synced yet are not replayed.
            end = min(end, log.durable_offset)
        if end < shelf.ledger.next_offset:
            shelf.ledger = Ledger()  # the log was truncated or replaced: replay all of it
        if end > shelf.ledger.next_offset:
            _replay(log, shelf.ledger, end)
        return shelf.ledger

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Return the committed offsets of a group, without those of open transactions."""
        shelf = self._shelf_of(group)
        self._forget_deleted_topics()
        with shelf.lock:
            return self._taken_in(shelf).committed(group)

    def pending(self, group: str) -> set[TopicPartition]:
        """Return the partitions for which an open transaction has committed an offset."""
        shelf = self._shelf_of(group)
        with shelf.lock:
            entry = self._taken_in(shelf).groups.get(group)
            return {tp for offsets in entry.pending.values() for tp in offsets} if entry else set()

    def metadata(self, group: str) -> GroupMetadata | None:
        """Return the latest metadata record of a group, or None."""
        shelf = self._shelf_of(group)
        with shelf.lock:
            entry = self._taken_in(shelf).groups.get(group)
            return None if entry is None else entry.metadata

    def consumer_group(self, group: str) -> ConsumerGroupState | None:
        """Return a copy of the records of a group of the consumer protocol, or None."""
        shelf = self._shelf_of(group)
        with shelf.lock:
            entry = self._taken_in(shelf).groups.get(group)
            return None if entry is None or entry.consumer is None else entry.consumer.copy()

    def knows(self, group: str) -> bool:
        """Return whether the log has offsets or metadata of a group."""
        shelf = self._shelf_of(group)
        with shelf.lock:
            return group in self._taken_in(shelf).groups

    def groups(self) -> list[str]:
        """Return the names of all groups with offsets or metadata, sorted; read all partitions."""
        return sorted(name for name, _ in self._entries())

    def _entries(self) -> Iterator[tuple[str, GroupEntry]]:
        for number in self._numbers():
            shelf = self._shelf(number)
            with shelf.lock:
                found = list(self._taken_in(shelf).groups.items())
            yield from found

    def _numbers(self) -> list[int]:
        if not self._seats.all_taken:
            return self._seats.numbers()
        if CONSUMER_OFFSETS not in self._store:
            return []
        return [*self._store[CONSUMER_OFFSETS].partition_numbers]

    def log_of(self, group: str) -> Partition:
        """Return the log that stores a group, to listen for appends; make it if necessary."""
        shelf = self._shelf_of(group)
        topic = self._store[CONSUMER_OFFSETS]
        shelf.log = self._store.topic_changes.make_partition(topic, shelf.number)
        return shelf.log  # the reference keeps it from being closed as idle

    # ---- writing ----

    def commit(self, group: str, offsets: Offsets, *, guard: Guard | None = None,
               durability: str | None = None) -> None:  # fmt: skip
        """Commit offsets, all or none; they are durable when it returns, as `durability` asks.

        The lock of `guard` is held only during the append, and taken before any lock of the book.
        """
        self.commit_later(group, offsets, guard=guard, durability=durability).result()

    def commit_later(self, group: str, offsets: Offsets, *, guard: Guard | None = None,
                     durability: str | None = None) -> Outcome[range]:  # fmt: skip
        """Like `commit`, without waiting for other nodes."""
        check_text("a group's name", group)
        self._forget_deleted_topics()
        return self._append(group, self._records(group, offsets), guard, durability)

    def _records(self, group: str, offsets: Offsets) -> list[Record]:
        now = self._clock.time_ms()
        return [
            Record(committed.encode(), key=OffsetKey(group, *tp).encode(), timestamp=now)
            for tp, committed in as_committed(offsets, now).items()
        ]

    def commit_in_transaction(
        self,
        group: str,
        offsets: Offsets,
        *,
        producer_id: int,
        producer_epoch: int,
        guard: Guard | None = None,
    ) -> None:
        """Commit offsets as a part of a producer's transaction; they count after its commit.

        The caller has added partition ``partition_of(group)`` of ``__consumer_offsets`` to the
        transaction, so that its marker is written there.  Raises FencedError if the producer's
        epoch has ended.
        """
        producer = producer_id, producer_epoch
        self.commit_in_transaction_later(group, offsets, producer=producer, guard=guard).result()

    def commit_in_transaction_later(
        self, group: str, offsets: Offsets, *, producer: tuple[int, int], guard: Guard | None = None
    ) -> Outcome[range]:
        """Like `commit_in_transaction`, without waiting for other nodes."""
        check_text("a group's name", group)
        self._forget_deleted_topics()
        return self._append(group, self._records(group, offsets), guard, producer=producer)

    def delete_offsets(self, group: str, partitions: Iterable[tuple[str, int]]) -> Outcome[range]:
        """Write a tombstone for each partition, even if it has no committed offset."""
        now = self._clock.time_ms()
        keys = [OffsetKey(group, topic, number).encode() for topic, number in partitions]
        return self._append(group, [Record(None, key=key, timestamp=now) for key in keys])

    def write_group(self, group: str, metadata: GroupMetadata | None) -> Outcome[range]:
        """Write the metadata record of a group; None writes its tombstone."""
        value = None if metadata is None else metadata.encode()
        now = self._clock.time_ms()
        return self._append(group, [Record(value, key=GroupKey(group).encode(), timestamp=now)])

    def write_consumer_group(
        self, group: str, records: Iterable[tuple[ConsumerGroupKey, Value | None]]
    ) -> Outcome[range]:
        """Write records of a group of the consumer protocol, all or none; None is a tombstone."""
        now = self._clock.time_ms()
        made = [
            Record(None if value is None else value.encode(), key=key.encode(), timestamp=now)
            for key, value in records
        ]
        return self._append(group, made)

    def delete_group(self, group: str, *, with_offsets: bool = True) -> Outcome[range]:
        """Write tombstones for the group, of either protocol, and all its offsets."""
        now = self._clock.time_ms()
        offsets = self.committed(group) if with_offsets else ()
        keys = [OffsetKey(group, *tp).encode() for tp in offsets]
        keys.append(GroupKey(group).encode())
        consumer = self.consumer_group(group) or ConsumerGroupState()
        keys += [ConsumerGroupKey(kind, group, name).encode() for kind, name in consumer]
        return self._append(group, [Record(None, key=key, timestamp=now) for key in keys])

    def _append(
        self,
        group: str,
        records: list[Record],
        guard: Guard | None = None,
        durability: str | None = None,
        producer: tuple[int, int] | None = None,
    ) -> Outcome[range]:
        """Append records for a group.

        Raises what the guard raises, and, if the quorum does not answer later, what an append
        raises.
        """
        outcome: Outcome[range] = Outcome()
        if not records:
            outcome.settle(range(0))
            return outcome
        shelf = self._shelf_of(group)
        guard = guard or _FREE
        plain = records if producer is None else None
        with guard.lock, shelf.lock:
            guard.check()
            if shelf.dropped:
                raise NotCoordinatorError(CONSUMER_OFFSETS, shelf.number)
            if not self._seats.all_taken:
                shelf.waiting.add(outcome)
            finish = self._quorum.append(
                CONSUMER_OFFSETS, shelf.number, shelf.epoch, records,
                partial(self._appended, shelf, outcome, plain),
                producer=producer, durability=durability,
            )  # fmt: skip
        # The fsync is outside of the locks.  Until it has ended, readers do not see the records:
        # `_taken_in` replays up to `durable_offset`.
        finish()
        return outcome

    def _appended(
        self,
        shelf: _Shelf,
        outcome: Outcome[range],
        records: list[Record] | None,
        result: range | BaseException,
    ) -> None:
        """Handle the end of an append; `records` are those that are not part of a transaction."""
        if isinstance(result, IndeterminateAppendError):
            self.when_lost(shelf.number, shelf.epoch)  # settles the outcome, with all others
            return
        with shelf.lock:
            shelf.waiting.discard(outcome)
            if isinstance(result, range) and records:
                ledger = shelf.ledger
                # If no other record was appended or replayed since, take ours without reading them.
                if ledger.next_offset == result.start and len(records) == len(result):
                    for offset, record in zip(result, records, strict=True):
                        ledger.see(offset, record.key, record.value)
                    ledger.next_offset = result.stop
        fenced = isinstance(result, FencedError) and records is None
        if isinstance(result, range) or fenced:
            outcome.settle(result)
        else:
            outcome.settle(refusal(CONSUMER_OFFSETS, shelf.number, result))

    # ---- deleted topics ----

    def _forget_deleted_topics(self) -> None:
        """Write tombstones for offsets of deleted topics.

        Otherwise a group would start at an old offset in a new topic with the same name.
        """
        changes = self._store.topic_changes
        if self._store.readonly or not changes.deleted or not self._seats.all_taken:
            return  # in a cluster, nodes call `forget_topic`: the topic may be on other nodes
        with self._deletions:
            # Read under the lock: a thread that waited here finds the names gone.
            names = set(changes.deleted)
            for group, entry in list(self._entries()):
                gone = [tp for tp in entry.offsets if tp.topic in names]
                if gone:
                    self.delete_offsets(group, gone).check()
            # Last: after a crash before it, the catalogue still has the names, and the tombstones
            # are written again.
            changes.forget_deleted(names)

    def forget_topic(self, name: str) -> list[Outcome[range]]:
        """Write tombstones for all offsets of a topic that was deleted in the cluster."""
        gone = {
            group: [tp for tp in entry.offsets if tp.topic == name]
            for group, entry in list(self._entries())
        }
        return [self.delete_offsets(group, tps) for group, tps in gone.items() if tps]


def _replay(log: Partition, ledger: Ledger, end: int) -> None:
    """Replay the log from the ledger's next offset to `end`.

    Only the newest record of each key is decoded.  If that fails, the newest readable one counts.
    """
    start = max(ledger.next_offset, log.start_offset)
    newest = {record.key: record for record in plain_records(log, ledger, start, end)}
    unread = {
        record.key
        for record in sorted(newest.values(), key=lambda record: record.offset)
        if not ledger.see(record.offset, record.key, record.value)
    }
    if unread:
        # An empty ledger, because the real one has taken the transactions in the first pass.
        for record in plain_records(log, Ledger(), start, end):
            if record.key in unread:
                ledger.see(record.offset, record.key, record.value)
    ledger.next_offset = end
