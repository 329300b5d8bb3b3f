"""The internal topics: Kafka's two for groups and transactions, and those of logstore.

The names of Kafka's topics, their partition counts and the choice of a partition are Kafka's, so
that a broker that opens the directory finds groups and transactions.  Their segments are smaller
than Kafka's 100 MiB, because the active segment is never compacted and is read at the first use of
a group.  If a topic exists, its partition count and its settings are used unchanged.

Producers, the Kafka listener and subscriptions by pattern refuse or skip internal topics.  The
objects that own one write it with `Partition.append`, or with `Transaction.send_internal`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from logstore.format.batch import BatchHeader, EndMarker
from logstore.partition.partition import Partition
from logstore.partition.scan import producer_batches
from logstore.record import Record
from logstore.store.store import Store
from logstore.store.topic import Topic

__all__ = [
    "CONSUMER_OFFSETS",
    "DELAYED",
    "INTERNAL_TOPICS",
    "NOTES",
    "RESERVED_TOPICS",
    "TRANSACTION_STATE",
    "coordinator_partition",
    "internal_partitions",
    "internal_topic",
    "plain_records",
]

CONSUMER_OFFSETS = "__consumer_offsets"
TRANSACTION_STATE = "__transaction_state"
NOTES = "__logstore_notes"
DELAYED = "__logstore_delayed"
# Kafka's default.  The count decides in which partition a group is: a topic that exists keeps its
# own.
PARTITIONS = 50
SEGMENT_BYTES = 4 << 20  # about 40,000 commits
# The topics of logstore, which Kafka does not know.
RESERVED_TOPICS: Mapping[str, Mapping[str, Any]] = {
    NOTES: {
        "cleanup.policy": "compact",
        "compression.type": "producer",
        "message.timestamp.type": "CreateTime",
        "segment.bytes": SEGMENT_BYTES,
    },
    DELAYED: {
        "cleanup.policy": "compact",
        "compression.type": "producer",
        "message.timestamp.type": "CreateTime",
        "segment.bytes": 16 << 20,
        # Timestamps are due times, years apart: a roll by time would make a segment of each.
        "segment.ms": (1 << 63) - 1,
    },
}
INTERNAL_TOPICS: Mapping[str, Mapping[str, Any]] = {
    CONSUMER_OFFSETS: {
        "cleanup.policy": "compact",
        "compression.type": "producer",
        "segment.bytes": SEGMENT_BYTES,
    },
    TRANSACTION_STATE: {
        "cleanup.policy": "compact",
        "compression.type": "uncompressed",
        "segment.bytes": SEGMENT_BYTES,
    },
    **RESERVED_TOPICS,
}
_RESERVED_PARTITIONS = {NOTES: 8, DELAYED: 3}


def internal_partitions(name: str) -> int:
    """Return how many partitions an internal topic gets."""
    return _RESERVED_PARTITIONS.get(name, PARTITIONS)


def coordinator_partition(name: str, partitions: int) -> int:
    """Return the partition that stores a group or a transactional id: Java's hash of the name.

    >>> coordinator_partition("group1", 50), coordinator_partition("my-group", 50)
    (40, 12)
    """
    # Java's String.hashCode counts UTF-16 units, and wraps at 32 bits.
    units = name.encode("utf-16-be", "surrogatepass")
    code = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        code = (31 * code + (high << 8 | low)) & 0xFFFFFFFF
    # Kafka's Utils.abs: the absolute value of the signed hash, and 0 for the least int.
    if code >= 1 << 31:
        code = (1 << 32) - code
    return (0 if code == 1 << 31 else code) % partitions


def internal_topic(store: Store, name: str) -> Topic:
    """Return an internal topic; declare it if it does not exist.

    Its partitions are made by the first write: `TopicChanges.make_partition`.
    """
    partitions = internal_partitions(name)
    return store.topic_changes.declare(name, partitions, config=INTERNAL_TOPICS[name])


class Ledger(Protocol):
    """What the replay of an internal topic gives the records of transactions to."""

    def see(
        self, offset: int, key: bytes | None, value: bytes | None, *, producer_id: int = -1
    ) -> object:
        """Take a record of an open transaction."""

    def go_on(self, producer_id: int, epoch: int) -> None:
        """Note that a producer appends to its transaction, or begins one."""

    def end_transaction(self, producer_id: int, commit: bool) -> None:
        """Take the marker of a producer's transaction."""


def plain_records(log: Partition, ledger: Ledger, start: int, end: int) -> Iterator[Record]:
    """Yield the records that are not part of a transaction; the ledger sees those that are."""
    # Two scans of one range, side by side: one decodes records, the other reads only headers of
    # batches with a producer id.  Most records have none.
    records = iter(log.scan(start, end, on_lost="skip"))
    record = next(records, None)
    for raw in producer_batches(log.scan(start, end, on_lost="skip")):
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
