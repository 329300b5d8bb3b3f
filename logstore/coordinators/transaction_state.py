"""TransactionMetadata: the state of one transactional id, and its record.

A record of ``__transaction_state`` has the transactional id as its key and the state as its value,
in Kafka's format: version 1, with tagged fields at the end.  Version 0, from before Kafka 3.8, is
read as well.  The newest record of an id is its state; a tombstone deletes it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from logstore.errors import InvalidRecordError
from logstore.format.wire_types import FieldReader, FieldWriter

__all__ = [
    "EPOCH_MAX",
    "TransactionDescription",
    "TransactionMetadata",
    "TransactionState",
    "decode_key",
    "encode_key",
]

KEY_VERSION, VALUE_VERSION = 0, 1
IN_PROCESS = "logstore.in.process"  # the key of the header
EPOCH_MAX = (1 << 15) - 1
PREVIOUS_ID, NEXT_ID, CLIENT_VERSION = 0, 1, 2  # tagged fields


class TransactionState(enum.IntEnum):
    """Kafka's states, with the numbers that are stored."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6  # never stored
    PREPARE_EPOCH_FENCE = 7  # never stored

    @property
    def is_prepared(self) -> bool:
        """Whether the end is decided, and markers may be missing in some partitions."""
        return self in (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)

    @property
    def is_over(self) -> bool:
        """Whether no transaction is open."""
        return self in (
            TransactionState.EMPTY,
            TransactionState.COMPLETE_COMMIT,
            TransactionState.COMPLETE_ABORT,
        )

    @property
    def kafka_name(self) -> str:
        """The name in Kafka's tools, such as ``PrepareCommit``."""
        return "".join(word.capitalize() for word in self.name.split("_"))


@dataclasses.dataclass(frozen=True, slots=True)
class TransactionMetadata:
    """The state of one transactional id.  `partitions` are those of its open transaction."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState = TransactionState.EMPTY
    partitions: frozenset[tuple[str, int]] = frozenset()
    last_update_ms: int = -1
    start_ms: int = -1
    previous_producer_id: int = -1
    next_producer_id: int = -1
    client_version: int = 2  # each transaction has its own epoch (KIP-890)
    last_epoch: int = -1  # the epoch before, if its producer may repeat a request; not stored
    # Whether the producer is one of this library and ends with its process.  It is a header of the
    # record and not in the value, which is Kafka's.
    in_process: bool = False

    def encode(self) -> bytes:
        """Return the value of the record."""
        writer = FieldWriter().int16(VALUE_VERSION)
        writer.int64(self.producer_id).int16(self.producer_epoch).int32(self.timeout_ms)
        writer.int8(self.state)
        by_topic: dict[str, list[int]] = {}
        # Sorted: `_read_again` compares encoded states byte by byte.
        for topic, number in sorted(self.partitions):
            by_topic.setdefault(topic, []).append(number)
        # Kafka writes null, not an empty array, for a producer without a transaction.
        empty = self.state is TransactionState.EMPTY
        writer.compact_array(None if empty else by_topic.items(), _write_topic)
        writer.int64(self.last_update_ms).int64(self.start_ms)
        tags = []
        if self.previous_producer_id != -1:
            tags.append((PREVIOUS_ID, FieldWriter().int64(self.previous_producer_id).take()))
        if self.next_producer_id != -1:
            tags.append((NEXT_ID, FieldWriter().int64(self.next_producer_id).take()))
        if self.client_version != 0:
            tags.append((CLIENT_VERSION, FieldWriter().int16(self.client_version).take()))
        return writer.tags(tags).take()

    @property
    def headers(self) -> list[tuple[str, bytes | None]]:
        """The headers of the record."""
        return [(IN_PROCESS, None)] if self.in_process else []

    @property
    def identity(self) -> tuple[int, int]:
        """The producer id and epoch."""
        return self.producer_id, self.producer_epoch

    def described(self, coordinator_partition: int) -> TransactionDescription:
        """Return what operators get."""
        return TransactionDescription(
            self.transactional_id,
            self.state.kafka_name,
            self.producer_id,
            self.producer_epoch,
            self.timeout_ms,
            self.start_ms,
            self.last_update_ms,
            tuple(sorted(self.partitions)),
            coordinator_partition,
        )

    @classmethod
    def decode(
        cls, transactional_id: str, value: bytes, headers: Iterable[tuple[str, bytes | None]] = ()
    ) -> TransactionMetadata:
        """Decode a record.  Raises InvalidRecordError."""
        reader = FieldReader(value)
        version = reader.int16()
        if version not in (0, VALUE_VERSION):
            raise InvalidRecordError(f"version {version} of a transaction's state is not known")
        producer_id, epoch, timeout = reader.int64(), reader.int16(), reader.int32()
        number = reader.int8()
        try:
            state = TransactionState(number)
        except ValueError:
            raise InvalidRecordError(f"a transaction has no state {number}") from None
        compact = version > 0
        topics = reader.compact_array(_read_topic) if compact else reader.array(_read_old_topic)
        last_update, start = reader.int64(), reader.int64()
        tags = reader.tags() if compact else {}
        return cls(
            transactional_id,
            producer_id,
            epoch,
            timeout,
            state,
            frozenset((topic, each) for topic, numbers in topics or () for each in numbers),
            last_update,
            start,
            FieldReader(tags[PREVIOUS_ID]).int64() if PREVIOUS_ID in tags else -1,
            FieldReader(tags[NEXT_ID]).int64() if NEXT_ID in tags else -1,
            # Kafka omits a tag that has its default: a state without this one is of a client below
            # version 2.
            FieldReader(tags[CLIENT_VERSION]).int16() if CLIENT_VERSION in tags else 0,
            in_process=any(key == IN_PROCESS for key, _ in headers),
        )


def _write_topic(writer: FieldWriter, topic: tuple[str, list[int]]) -> None:
    writer.compact_string(topic[0]).compact_array(topic[1], FieldWriter.int32).tags()


def _read_topic(reader: FieldReader) -> tuple[str, list[int]]:
    name, numbers = reader.compact_string(), reader.compact_array(FieldReader.int32)
    reader.tags()
    return name or "", numbers or []


def _read_old_topic(reader: FieldReader) -> tuple[str, list[int]]:
    return reader.string(), reader.array(FieldReader.int32)


def encode_key(transactional_id: str) -> bytes:
    """Return the key of a transactional id's records."""
    return FieldWriter().int16(KEY_VERSION).string(transactional_id).take()


def decode_key(key: bytes) -> str | None:
    """Return the transactional id of a record's key; None for a key of another version."""
    reader = FieldReader(key)
    return reader.string() if reader.int16() == KEY_VERSION else None


@dataclasses.dataclass(frozen=True, slots=True)
class TransactionDescription:
    """The state of a transactional id.  Times are milliseconds, -1 if there is none."""

    transactional_id: str
    state: str  # by Kafka's name
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    start_ms: int
    last_update_ms: int
    partitions: tuple[tuple[str, int], ...]
    coordinator_partition: int

    @property
    def is_open(self) -> bool:
        """Whether `read_committed` readers have to wait for it."""
        return self.state in ("Ongoing", "PrepareCommit", "PrepareAbort")
