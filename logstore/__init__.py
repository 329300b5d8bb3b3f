"""logstore: Kafka's log as a Python library.

>>> from logstore import Partition                                              # doctest: +SKIP
>>> with Partition.open("data/orders-0") as log:                                # doctest: +SKIP
...     log.append(b"hello")
0
"""

from logstore.clock import Clock, ManualClock, SystemClock
from logstore.compaction import CompactedSegment, CompactionReport, Compactor
from logstore.config import ConfigError, PartitionConfig
from logstore.epochs import EpochEnd, LeaderEpochs
from logstore.errors import (
    ClosedError,
    CorruptLogError,
    DiskFullError,
    FencedError,
    ForkedHandleError,
    IndeterminateAppendError,
    InterruptedAppendError,
    InvalidNameError,
    InvalidRecordError,
    LockedError,
    LogStoreError,
    NotALogError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    RecordNotFoundError,
    RecordTooLargeError,
    TopicExistsError,
    UnknownTopicError,
    UnsupportedFormatError,
)
from logstore.index import OffsetIndex, TimeIndex
from logstore.partition import Partition
from logstore.partitioner import KeyPartitioner, Partitioner
from logstore.record import BytesColumn, Columns, Record
from logstore.recovery import Damage, RecoveryReport, TornTail
from logstore.retention import RetentionDecision, RetentionPolicy
from logstore.scan import Scan, Skipped
from logstore.segment import Segment
from logstore.store import Store, StoreRecovery, open
from logstore.topic import PartitionDescription, Position, Topic, TopicDescription
from logstore.writer import Writer

__version__ = "0.1.0"

__all__ = [
    "BytesColumn",
    "Clock",
    "ClosedError",
    "Columns",
    "CompactedSegment",
    "CompactionReport",
    "Compactor",
    "ConfigError",
    "CorruptLogError",
    "Damage",
    "DiskFullError",
    "EpochEnd",
    "FencedError",
    "ForkedHandleError",
    "IndeterminateAppendError",
    "InterruptedAppendError",
    "InvalidNameError",
    "InvalidRecordError",
    "LeaderEpochs",
    "KeyPartitioner",
    "LockedError",
    "LogStoreError",
    "ManualClock",
    "NotALogError",
    "OffsetIndex",
    "OffsetOutOfRangeError",
    "Partition",
    "PartitionConfig",
    "PartitionDescription",
    "Partitioner",
    "Position",
    "ReadOnlyError",
    "Record",
    "RecordNotFoundError",
    "RecordTooLargeError",
    "RecoveryReport",
    "RetentionDecision",
    "RetentionPolicy",
    "Scan",
    "Segment",
    "Skipped",
    "Store",
    "StoreRecovery",
    "SystemClock",
    "TimeIndex",
    "Topic",
    "TopicDescription",
    "TopicExistsError",
    "TornTail",
    "UnknownTopicError",
    "UnsupportedFormatError",
    "Writer",
    "open",
]
