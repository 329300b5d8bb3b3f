"""Committed offsets and group metadata, in Kafka's own topic ``__consumer_offsets``.

records: what a key and a value of that topic say, byte for byte.
ledger: one partition of it, replayed; pure.
book: all of it for one store: reading, committing, alone or as a part of a transaction.
"""

from logstore.offsets.book import OffsetBook, Offsets, as_committed
from logstore.offsets.ledger import Ledger
from logstore.offsets.records import (
    CommittedOffset,
    GroupKey,
    GroupMetadata,
    MemberMetadata,
    OffsetKey,
    TopicPartition,
    check_text,
)

__all__ = [
    "CommittedOffset",
    "GroupKey",
    "GroupMetadata",
    "Ledger",
    "MemberMetadata",
    "OffsetBook",
    "OffsetKey",
    "Offsets",
    "TopicPartition",
    "as_committed",
    "check_text",
]
