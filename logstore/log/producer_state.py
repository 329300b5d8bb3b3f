"""ProducerState: the producers of a log, and the bytes of the snapshot file that holds them.

The state has one entry per producer id: the newest epoch, the last five batches, and the first
offset of the open transaction.  The batches let the log recognise a retry and answer it with the
offsets of the first attempt.  The state can be computed from the batches in the log; a snapshot
only saves reading them again.

Invariant: the state changes only for batches that are in the log.  `admit` decides from the headers
and changes nothing; `commit` applies its decision after the batches are written.

The module does no I/O and reads no clock.  Callers hold the partition's lock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from logstore import _native
from logstore.errors import (
    FencedError,
    InvalidRecordError,
    LogStoreError,
    OutOfOrderSequenceError,
)
from logstore.format.batch import SEQUENCE_MAX, BatchHeader, EndMarker, decrement_sequence
from logstore.format.index import AbortedTransaction
from logstore.format.validation import WINDOW

__all__ = [
    "Admission",
    "BatchSpan",
    "CorruptSnapshotError",
    "OngoingTransaction",
    "ProducerEntry",
    "ProducerState",
]

# Where a batch is from decides which rules are applied to it:
# leader: a client appends it; all rules.
# coordinator: the library itself appends it; no rule for sequences.
# follower: a leader has accepted it; no rule for epochs and sequences.
# replay: it is read from the log; no rule at all.
Origin = Literal["leader", "coordinator", "follower", "replay"]

_VERSION = 1
# A snapshot file, as Kafka writes it: a head, then one entry per producer, all big-endian.
# The CRC-32C covers the bytes after it: the number of entries and the entries.
_HEAD = struct.Struct(">hIi")  # version, CRC-32C, number of entries
# producer id, epoch, last sequence, last offset, offset delta, timestamp, coordinator epoch,
# first offset of the open transaction
_ENTRY = struct.Struct(">qhiqiqiq")
_AT_CRC, _AT_COUNT = 2, 6


class CorruptSnapshotError(LogStoreError, ValueError):
    """A snapshot file is damaged.  The state can be replayed from an older one and the log."""


class BatchSpan(NamedTuple):
    """The sequences and offsets of one batch: enough to recognise a retry of it."""

    last_sequence: int
    last_offset: int
    offset_delta: int  # from its first offset or sequence to its last
    timestamp: int

    @property
    def first_sequence(self) -> int:
        return decrement_sequence(self.last_sequence, self.offset_delta)

    @property
    def offsets(self) -> range:
        """Return the batch's offsets in the log."""
        return range(self.last_offset - self.offset_delta, self.last_offset + 1)


class ProducerEntry(NamedTuple):
    """The state of one producer.  Immutable: a change makes a new entry."""

    producer_id: int
    epoch: int = -1  # -1: none yet
    coordinator_epoch: int = -1
    timestamp: int = -1  # of its newest batch or marker
    transaction_start: int = -1  # first offset of its open transaction; -1: none
    batches: tuple[BatchSpan, ...] = ()  # newest last

    @property
    def last_sequence(self) -> int:
        """Return the last sequence of its newest batch; -1 without one: the next sequence is 0."""
        return self.batches[-1].last_sequence if self.batches else -1

    @property
    def last_offset(self) -> int:
        """Return the last offset of its newest batch of data; -1 if only markers are known."""
        return self.batches[-1].last_offset if self.batches else -1

    def find(self, header: BatchHeader) -> BatchSpan | None:
        """Return the batch in the window that `header` repeats, or None."""
        if header.producer_epoch == self.epoch:
            for span in self.batches:
                if (span.first_sequence, span.last_sequence) == (
                    header.base_sequence,
                    header.last_sequence,
                ):
                    return span
        return None


class OngoingTransaction(NamedTuple):
    """A transaction without a marker: the last stable offset is at most its first offset."""

    producer_id: int
    producer_epoch: int
    first_offset: int
    last_timestamp: int  # of its producer's newest batch


class CompletedTransaction(NamedTuple):
    """A transaction that ended: `last_offset` is that of its marker."""

    producer_id: int
    first_offset: int
    last_offset: int
    aborted: bool


class Admission:
    """The changes that `commit` makes once the admitted batches are in the log."""

    __slots__ = ("completed", "duplicate", "entries", "opened")

    def __init__(self, duplicate: BatchSpan | None = None) -> None:
        self.entries: dict[int, ProducerEntry] = {}
        self.opened: dict[int, int] = {}  # first offset -> producer
        self.completed: list[CompletedTransaction] = []
        self.duplicate = duplicate  # where the log holds the batch already


class ProducerState:
    """The producers of one partition.  Iteration yields their entries, ordered by producer id."""

    def __init__(self, entries: Iterable[ProducerEntry] = ()) -> None:
        self._entries = {entry.producer_id: entry for entry in entries}
        # First offset -> producer id of every open transaction.  Transactions open in the order of
        # their offsets, and a dict keeps that order: the first key is the lowest offset.
        self._ongoing = {
            entry.transaction_start: entry.producer_id
            for entry in sorted(self._entries.values(), key=lambda e: e.transaction_start)
            if entry.transaction_start >= 0
        }

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ProducerEntry]:
        return (self._entries[producer_id] for producer_id in sorted(self._entries))

    def __repr__(self) -> str:
        return f"<ProducerState {len(self)} producers, {len(self._ongoing)} open transactions>"

    def get(self, producer_id: int) -> ProducerEntry | None:
        """Return the entry of a producer, or None."""
        return self._entries.get(producer_id)

    @property
    def first_unstable_offset(self) -> int | None:
        """Return the first offset of the oldest open transaction, or None."""
        return next(iter(self._ongoing), None)

    @property
    def ongoing(self) -> list[OngoingTransaction]:
        """Return the open transactions, oldest first."""
        found = []
        for first, producer_id in self._ongoing.items():
            entry = self._entries[producer_id]
            found.append(OngoingTransaction(producer_id, entry.epoch, first, entry.timestamp))
        return found

    # ---- appending ----

    def admit(
        self, batches: Iterable[tuple[BatchHeader, EndMarker | None]], origin: Origin
    ) -> Admission:
        """Return the changes that appending these batches makes; raise if one is refused.

        Headers carry the offsets that the batches will have.  A control batch is given with its
        marker.  One without a marker (of another kind, or emptied by compaction) has no effect.
        If a batch repeats one of the window, the result only names that `duplicate`.
        """
        admission = Admission()
        for header, marker in batches:
            if not header.has_producer:
                continue
            known = admission.entries.get(header.producer_id) or self._entries.get(
                header.producer_id
            )
            entry = known or ProducerEntry(header.producer_id)
            if header.control:
                if marker is not None:
                    changed = _after_marker(entry, header, marker, origin, admission)
                    admission.entries[header.producer_id] = changed
                continue
            if origin == "leader" and (span := entry.find(header)) is not None:
                return Admission(duplicate=span)
            _check_data(entry, header, origin)
            admission.entries[header.producer_id] = _after_data(entry, header, origin, admission)
        return admission

    def commit(self, admission: Admission) -> list[AbortedTransaction]:
        """Apply an admission whose batches are in the log; return the transactions it aborted."""
        for entry in admission.entries.values():
            self._entries[entry.producer_id] = entry
        self._ongoing.update(admission.opened)
        aborted = []
        for done in admission.completed:
            self._ongoing.pop(done.first_offset, None)
            if done.aborted:
                # The last stable offset when the marker was written.  A transaction that opened
                # after the marker does not count.
                stable = next(
                    (first for first in self._ongoing if first < done.last_offset),
                    done.last_offset + 1,
                )
                aborted.append(
                    AbortedTransaction(
                        done.producer_id, done.first_offset, done.last_offset, stable
                    )
                )
        return aborted

    def replay(self, header: BatchHeader, marker: EndMarker | None) -> list[AbortedTransaction]:
        """Apply a batch that is read from the log; return the transactions that it aborted."""
        return self.commit(self.admit([(header, marker)], "replay"))

    def expire(
        self, now_ms: int, expiration_ms: int, heard: Mapping[int, int] | None = None
    ) -> list[int]:
        """Remove the producers without a batch for `expiration_ms`; return their ids.

        The age counts from the producer's newest timestamp, or from its time in `heard` if that is
        later.  A producer with an open transaction stays.
        """
        since = heard or {}
        silent = [
            entry.producer_id
            for entry in self._entries.values()
            if entry.transaction_start < 0
            and now_ms - max(entry.timestamp, since.get(entry.producer_id, -1)) >= expiration_ms
        ]
        for producer_id in silent:
            del self._entries[producer_id]
        return silent

    # ---- snapshots ----

    def encode(self) -> bytes:
        """Return the contents of a snapshot file: of each producer, only the newest batch."""
        body = struct.pack(">i", len(self)) + b"".join(map(_encode_entry, self))
        return struct.pack(">hI", _VERSION, _native.crc32c(body)) + body

    @classmethod
    def decode(cls, data: bytes) -> ProducerState:
        """Return the state in a snapshot file; raise CorruptSnapshotError if it is not valid."""
        if len(data) < _HEAD.size:
            raise CorruptSnapshotError(f"{len(data)} bytes are too few for a snapshot")
        version, crc, count = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise CorruptSnapshotError(f"a snapshot of version {version}; only {_VERSION} is known")
        found = _native.crc32c(memoryview(data)[_AT_COUNT:])
        if found != crc:
            raise CorruptSnapshotError(f"the checksum is {found:08x}, but should be {crc:08x}")
        if count < 0 or len(data) != _HEAD.size + count * _ENTRY.size:
            raise CorruptSnapshotError(f"{len(data)} bytes do not hold {count} producers")
        return cls(map(_decode_entry, _ENTRY.iter_unpack(data[_HEAD.size :])))


def _check_data(entry: ProducerEntry, header: BatchHeader, origin: Origin) -> None:
    """Apply Kafka's rules for a batch of data, in Kafka's order; raise for the first broken one."""
    if origin in ("leader", "coordinator") and header.producer_epoch < entry.epoch:
        raise FencedError(header.producer_epoch, entry.epoch, where=f"producer {entry.producer_id}")
    # A producer without an entry (new, or expired) may start with any sequence.
    if origin == "leader" and entry.epoch >= 0:
        same = header.producer_epoch == entry.epoch
        last = entry.last_sequence if same else -1
        expected = 0 if last == SEQUENCE_MAX else last + 1
        if header.base_sequence != expected:
            raise OutOfOrderSequenceError(
                "it does not follow the last batch, and is none of the last "
                f"{WINDOW}: a batch is missing, or this one is too old to be known as a retry"
                if same
                else "a new epoch starts at 0",
                producer_id=entry.producer_id,
                sequence=header.base_sequence,
                expected=expected,
            )
    if entry.transaction_start >= 0 and not header.transactional and origin != "replay":
        raise InvalidRecordError(
            f"producer {entry.producer_id} has a transaction open since offset "
            f"{entry.transaction_start}: end the transaction before an append without one",
            reason="transaction",
        )


def _after_data(
    entry: ProducerEntry, header: BatchHeader, origin: Origin, admission: Admission
) -> ProducerEntry:
    span = BatchSpan(
        header.last_sequence, header.last_offset, header.last_offset_delta, header.max_timestamp
    )
    before = entry.batches if header.producer_epoch == entry.epoch else ()
    start = entry.transaction_start
    if start >= 0 and header.producer_epoch > entry.epoch and origin == "replay":
        # A producer starts a new epoch only after the marker of its open transaction.  The marker
        # is missing, so it was damaged.  Count the transaction as aborted: a read_committed reader
        # must not get records that may have been aborted.
        admission.completed.append(
            CompletedTransaction(entry.producer_id, start, header.base_offset - 1, True)
        )
        start = -1
    if header.transactional and start < 0:
        start = header.base_offset
        admission.opened[start] = entry.producer_id
    return entry._replace(
        epoch=header.producer_epoch,
        timestamp=header.max_timestamp,
        transaction_start=start,
        batches=(*before, span)[-WINDOW:],
    )


def _after_marker(
    entry: ProducerEntry,
    header: BatchHeader,
    marker: EndMarker,
    origin: Origin,
    admission: Admission,
) -> ProducerEntry:
    decided = origin in ("follower", "replay")
    if header.producer_epoch < entry.epoch and not decided:
        raise FencedError(header.producer_epoch, entry.epoch, where=f"producer {entry.producer_id}")
    if marker.coordinator_epoch < entry.coordinator_epoch and not decided:
        raise FencedError(
            marker.coordinator_epoch,
            entry.coordinator_epoch,
            where=f"the coordinator of producer {entry.producer_id}",
        )
    if entry.transaction_start >= 0:
        admission.completed.append(
            CompletedTransaction(
                entry.producer_id, entry.transaction_start, header.last_offset, not marker.commit
            )
        )
    return entry._replace(
        epoch=header.producer_epoch,
        coordinator_epoch=marker.coordinator_epoch,
        timestamp=header.max_timestamp,
        transaction_start=-1,
        batches=entry.batches if header.producer_epoch == entry.epoch else (),
    )


def _encode_entry(entry: ProducerEntry) -> bytes:
    last = entry.batches[-1] if entry.batches else BatchSpan(-1, -1, 0, -1)
    return _ENTRY.pack(
        entry.producer_id,
        entry.epoch,
        last.last_sequence,
        last.last_offset,
        last.offset_delta,
        entry.timestamp,
        entry.coordinator_epoch,
        entry.transaction_start,
    )


def _decode_entry(fields: tuple[int, ...]) -> ProducerEntry:
    producer_id, epoch, sequence, offset, delta, timestamp, coordinator_epoch, start = fields
    batches = (BatchSpan(sequence, offset, delta, timestamp),) if offset >= 0 else ()
    return ProducerEntry(producer_id, epoch, coordinator_epoch, timestamp, start, batches)
