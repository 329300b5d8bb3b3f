"""ProducerState: what the log knows of its producers, and the snapshot that says so in a file.

For every producer id: the newest epoch, the last five batches (so that a retry is recognised and
answered with the offsets it got the first time), and the first offset of its open transaction.  All
of it can be computed from the batches in the log; a snapshot only saves reading them again.

Pure: batches go in by their headers, decisions come out, nothing is read or written and nobody asks
what time it is.  `admit` decides without changing anything; `commit` applies what it decided, once
the batches are in the log.  Callers serialise all of it with the partition's lock.
"""

from __future__ import annotations

import dataclasses
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

__all__ = [
    "Admission",
    "BatchSpan",
    "CorruptSnapshotError",
    "OngoingTransaction",
    "ProducerEntry",
    "ProducerState",
]

# leader: a client's batch, all rules.  coordinator: one of the log's own, no rule for sequences.
# follower: the leader has decided; only what cannot be is refused.  replay: read from the log, and
# so taken as it is.
Origin = Literal["leader", "coordinator", "follower", "replay"]

WINDOW = 5  # batches of a producer whose retries are recognised
_VERSION = 1
_HEAD = struct.Struct(">hIi")  # version, checksum of what follows it, number of entries
_ENTRY = struct.Struct(">qhiqiqiq")
_AT_CRC, _AT_COUNT = 2, 6


class CorruptSnapshotError(LogStoreError, ValueError):
    """A snapshot that is not what was written.  The log itself, or an older one, has the answer."""


class BatchSpan(NamedTuple):
    """One batch of a producer, as far as a retry of it has to be recognised."""

    last_sequence: int
    last_offset: int
    offset_delta: int  # from its first offset or sequence to its last
    timestamp: int

    @property
    def first_sequence(self) -> int:
        return decrement_sequence(self.last_sequence, self.offset_delta)

    @property
    def offsets(self) -> range:
        """The offsets it has in the log."""
        return range(self.last_offset - self.offset_delta, self.last_offset + 1)


class ProducerEntry(NamedTuple):
    """What is known of one producer."""

    producer_id: int
    epoch: int = -1  # -1: none yet
    coordinator_epoch: int = -1
    timestamp: int = -1  # of its newest batch or marker
    transaction_start: int = -1  # first offset of its open transaction; -1: none
    batches: tuple[BatchSpan, ...] = ()  # newest last

    @property
    def last_sequence(self) -> int:
        """-1: none, and then the next is 0."""
        return self.batches[-1].last_sequence if self.batches else -1

    @property
    def last_offset(self) -> int:
        """Of its newest data; -1: only markers are known."""
        return self.batches[-1].last_offset if self.batches else -1

    def find(self, header: BatchHeader) -> BatchSpan | None:
        """The batch in the window that this one repeats."""
        if header.producer_epoch == self.epoch:
            for span in self.batches:
                if (span.first_sequence, span.last_sequence) == (
                    header.base_sequence,
                    header.last_sequence,
                ):
                    return span
        return None


class OngoingTransaction(NamedTuple):
    """A transaction that is neither committed nor aborted: it holds the last stable offset back."""

    producer_id: int
    producer_epoch: int
    first_offset: int
    last_timestamp: int  # of its producer's newest batch: nothing has come since then


class CompletedTransaction(NamedTuple):
    """A transaction and the marker that ended it."""

    producer_id: int
    first_offset: int
    last_offset: int
    aborted: bool


@dataclasses.dataclass(slots=True)
class Admission:
    """What appending some batches will mean.  Nothing has changed yet."""

    entries: dict[int, ProducerEntry] = dataclasses.field(default_factory=dict)
    opened: dict[int, int] = dataclasses.field(default_factory=dict)  # first offset -> producer
    completed: list[CompletedTransaction] = dataclasses.field(default_factory=list)
    duplicate: BatchSpan | None = None  # the batch is in the log already, here


class ProducerState:
    """The producers of one partition.  Iterate it for their entries, in the order of their ids."""

    def __init__(self, entries: Iterable[ProducerEntry] = ()) -> None:
        self._entries = {entry.producer_id: entry for entry in entries}
        # First offset -> producer id.  Transactions open in the order of their offsets, and a dict
        # keeps that order: the first key is the oldest.
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
        """What is known of a producer."""
        return self._entries.get(producer_id)

    @property
    def first_unstable_offset(self) -> int | None:
        """The first offset of the oldest open transaction."""
        return next(iter(self._ongoing), None)

    @property
    def ongoing(self) -> list[OngoingTransaction]:
        """The open transactions, oldest first."""
        found = []
        for first, producer_id in self._ongoing.items():
            entry = self._entries[producer_id]
            found.append(OngoingTransaction(producer_id, entry.epoch, first, entry.timestamp))
        return found

    # ---- appending ----

    def admit(
        self, batches: Iterable[tuple[BatchHeader, EndMarker | None]], origin: Origin
    ) -> Admission:
        """Whether these batches may be appended; raises when they may not.

        Headers carry the offsets the batches will have.  A control batch comes with its marker;
        one without (of another kind, or emptied by compaction) has no effect.
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
        """Apply what was admitted and is in the log now; the transactions that it aborted."""
        for entry in admission.entries.values():
            self._entries[entry.producer_id] = entry
        self._ongoing.update(admission.opened)
        aborted = []
        for done in admission.completed:
            self._ongoing.pop(done.first_offset, None)
            if done.aborted:
                # What was open when the marker was written: some may have opened behind it.
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
        """Take in a batch that is in the log; the transactions that it aborted."""
        return self.commit(self.admit([(header, marker)], "replay"))

    def expire(
        self, now_ms: int, expiration_ms: int, heard: Mapping[int, int] | None = None
    ) -> list[int]:
        """Forget producers that were silent for so long; those with an open transaction stay.

        A producer is silent since its newest timestamp, or since the time in `heard`, if later.
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
        """The contents of a snapshot file.  Of each producer, only the newest batch is kept."""
        body = struct.pack(">i", len(self)) + b"".join(map(_encode_entry, self))
        return struct.pack(">hI", _VERSION, _native.crc32c(body)) + body

    @classmethod
    def decode(cls, data: bytes) -> ProducerState:
        """The state that a snapshot file holds; CorruptSnapshotError when it is not sound."""
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
    """Kafka's rules for a batch of data, in Kafka's order."""
    if origin in ("leader", "coordinator") and header.producer_epoch < entry.epoch:
        raise FencedError(header.producer_epoch, entry.epoch, where=f"producer {entry.producer_id}")
    # Of a producer that the log does not know (any more), any sequence is taken.
    if origin == "leader" and entry.epoch >= 0:
        same = header.producer_epoch == entry.epoch
        last = entry.last_sequence if same else -1
        expected = 0 if last == SEQUENCE_MAX else last + 1
        if header.base_sequence != expected:
            raise OutOfOrderSequenceError(
                "it does not follow the last batch, and is none of the last "
                f"{WINDOW}: a batch is missing, or this one is too old to be answered for"
                if same
                else "a new epoch starts at 0",
                producer_id=entry.producer_id,
                sequence=header.base_sequence,
                expected=expected,
            )
    if entry.transaction_start >= 0 and not header.transactional and origin != "replay":
        raise InvalidRecordError(
            f"producer {entry.producer_id} has a transaction open since offset "
            f"{entry.transaction_start}: end it before it appends outside of one"
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
        # An epoch begins behind the marker that ends what was open: damage hides this one, and
        # how it ended is not known.  What may have been aborted is not shown.
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
