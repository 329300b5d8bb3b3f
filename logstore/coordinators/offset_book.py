"""OffsetBook: the committed offsets and the groups of one store, read from ``__consumer_offsets``.

The log is the only state.  A partition is replayed into a Ledger at the first use of one of its
groups.  Every later read first replays the records that were appended since, by any writer.  So a
transaction's marker needs no message to the book: it takes effect when it is in the log.

Invariant: with durability="fsync" the book returns only durable offsets, so that a power cut cannot
take back an offset that a caller has seen.

Threads share a book.  A *shelf* is one partition with its ledger and its lock.  Locks are taken in
this order: the lock of a Guard (a group), `_deletions`, a shelf's `lock`, those of the partition.
No shelf's lock is held during an fsync, so that concurrent commits share one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from logstore.clock import Clock, SystemClock
from logstore.closeable import Closeable
from logstore.coordinators.internal_topics import (
    CONSUMER_OFFSETS,
    coordinator_partition,
    internal_topic,
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
from logstore.errors import InvalidRecordError
from logstore.format.batch import BatchHeader, EndMarker, split, with_producer
from logstore.format.encoder import BatchEncoder
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
        if not 0 <= committed.offset <= INT64_MAX:
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
    """One partition of the topic: its ledger, and its log if there is one.  `lock` guards both."""

    def __init__(self, number: int) -> None:
        self.number = number
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
        self._lock = threading.Lock()
        self._shelves: dict[int, _Shelf] = {}
        self._deletions = threading.Lock()
        self._count = 0

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
        if self._count == 0:
            if not self._store.readonly:
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

    def _shelf_of(self, group: str) -> _Shelf:
        check_text("a group's name", group)
        return self._shelf(self.partition_of(group) if self.partitions else 0)

    def _shelf(self, number: int) -> _Shelf:
        with self._lock:
            shelf = self._shelves.get(number)
            if shelf is None:
                shelf = self._shelves[number] = _Shelf(number)
            return shelf

    def _writable_log(self, shelf: _Shelf) -> Partition:
        topic = self._store[CONSUMER_OFFSETS]
        log = self._store.topic_changes.make_partition(topic, shelf.number)
        shelf.log = log
        return log

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
        end = log.end_offset
        if not log.readonly and log.durability == "fsync":
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
        if CONSUMER_OFFSETS not in self._store:
            return []
        return [*self._store[CONSUMER_OFFSETS]._numbers]

    def log_of(self, group: str) -> Partition:
        """Return the log that stores a group, to listen for appends; make it if necessary."""
        return self._writable_log(self._shelf_of(group))

    # ---- writing ----

    def commit(self, group: str, offsets: Offsets, *, guard: Guard | None = None,
               durability: str | None = None) -> None:  # fmt: skip
        """Commit offsets, all or none; they are durable when it returns, as `durability` asks.

        The lock of `guard` is held only during the append, and taken before any lock of the book.
        """
        check_text("a group's name", group)
        self._forget_deleted_topics()
        now = self._clock.time_ms()
        records = [
            Record(committed.encode(), key=OffsetKey(group, *tp).encode(), timestamp=now)
            for tp, committed in as_committed(offsets, now).items()
        ]
        self._append(group, records, guard, durability)

    def delete_offsets(self, group: str, partitions: Iterable[tuple[str, int]]) -> None:
        """Write a tombstone for each partition, even if it has no committed offset."""
        now = self._clock.time_ms()
        keys = [OffsetKey(group, topic, number).encode() for topic, number in partitions]
        self._append(group, [Record(None, key=key, timestamp=now) for key in keys])

    def write_group(self, group: str, metadata: GroupMetadata | None) -> None:
        """Write the metadata record of a group; None writes its tombstone."""
        value = None if metadata is None else metadata.encode()
        now = self._clock.time_ms()
        self._append(group, [Record(value, key=GroupKey(group).encode(), timestamp=now)])

    def delete_group(self, group: str) -> None:
        """Write tombstones for the group and all its offsets."""
        now = self._clock.time_ms()
        keys = [OffsetKey(group, *tp).encode() for tp in self.committed(group)]
        keys.append(GroupKey(group).encode())
        self._append(group, [Record(None, key=key, timestamp=now) for key in keys])

    def _append(
        self,
        group: str,
        records: list[Record],
        guard: Guard | None = None,
        durability: str | None = None,
    ) -> None:
        if not records:
            return
        shelf = self._shelf_of(group)
        log = self._writable_log(shelf)
        level = durability or log.durability
        guard = guard or _FREE
        with guard.lock, shelf.lock:
            guard.check()
            known = shelf.ledger.next_offset
            offsets = log.extend(records, durability="os")
        # The fsync is outside of the locks.  Until it has ended, readers do not see the records:
        # `_taken_in` replays up to `durable_offset`.
        if level == "fsync":
            log.parts.appender.make_durable(offsets)
        with shelf.lock:
            if shelf.ledger.next_offset == known == offsets.start:
                # No other record was appended or replayed since: take ours without reading them.
                for offset, record in zip(offsets, records, strict=True):
                    shelf.ledger.see(offset, record.key, record.value)
                shelf.ledger.next_offset = offsets.stop

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
        check_text("a group's name", group)
        self._forget_deleted_topics()
        now = self._clock.time_ms()
        encoder = BatchEncoder()
        for tp, committed in as_committed(offsets, now).items():
            encoder.append(committed.encode(), key=OffsetKey(group, *tp).encode(), timestamp=now)
        shelf = self._shelf_of(group)
        log = self._writable_log(shelf)
        guard = guard or _FREE
        with guard.lock, shelf.lock:
            guard.check()
            start = log.end_offset
            for _, raw in split(encoder.take()):
                batch = with_producer(raw, producer_id=producer_id, producer_epoch=producer_epoch,
                                      base_sequence=0, transactional=True)  # fmt: skip
                log.append_batch(batch, origin="coordinator", durability="os")
            end = log.end_offset
        if log.durability == "fsync":
            log.parts.appender.make_durable(range(start, end))

    # ---- deleted topics ----

    def _forget_deleted_topics(self) -> None:
        """Write tombstones for offsets of deleted topics.

        Otherwise a group would start at an old offset in a new topic with the same name.
        """
        changes = self._store.topic_changes
        if self._store.readonly or not changes.deleted:
            return
        with self._deletions:
            names = set(changes.deleted)
            for group, entry in list(self._entries()):
                gone = [tp for tp in entry.offsets if tp.topic in names]
                if gone:
                    self.delete_offsets(group, gone)
            changes.forget_deleted(names)


def _replay(log: Partition, ledger: Ledger, end: int) -> None:
    """Replay the log from the ledger's next offset to `end`.

    Only the newest record of each key is decoded.  If that fails, the newest readable one counts.
    """
    start = max(ledger.next_offset, log.start_offset)
    newest = {record.key: record for record in _plain_records(log, ledger, start, end)}
    unread = {
        record.key
        for record in sorted(newest.values(), key=lambda record: record.offset)
        if not ledger.see(record.offset, record.key, record.value)
    }
    if unread:
        for record in _plain_records(log, Ledger(), start, end):
            if record.key in unread:
                ledger.see(record.offset, record.key, record.value)
    ledger.next_offset = end


def _plain_records(log: Partition, ledger: Ledger, start: int, end: int) -> Iterator[Record]:
    """Yield the records that are not part of a transaction; the ledger sees those that are."""
    records = iter(log.scan(start, end, on_lost="skip"))
    record = next(records, None)
    for raw in log.scan(start, end, on_lost="skip")._producer_batches():
        header = BatchHeader.parse(raw)
        if header.control:
            marker = EndMarker.parse(raw)
            if marker is not None:
                ledger.end_transaction(header.producer_id, marker.commit)
        elif header.transactional:
            ledger.go_on(header.producer_id, header.producer_epoch)
            while record is not None and record.offset < header.next_offset:
                if record.offset < header.base_offset:
                    yield record
                else:
                    ledger.see(record.offset, record.key, record.value,
                               producer_id=header.producer_id)  # fmt: skip
                record = next(records, None)
    if record is not None:
        yield record
        yield from records
