"""logstore: Kafka's log as a Python library.

>>> from logstore import Partition                                              # doctest: +SKIP
>>> with Partition.open("data/orders-0") as log:                                # doctest: +SKIP
...     log.append(b"hello")
0

Names are fetched from their rooms when they are first used: `import logstore` itself is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logstore.batch import BatchHeader, with_producer
    from logstore.clock import Clock, GuardedClock, ManualClock, SystemClock
    from logstore.compaction import CompactedSegment, CompactionReport, Compactor
    from logstore.config import ConfigError, PartitionConfig
    from logstore.encoder import BatchEncoder
    from logstore.epochs import EpochEnd, LeaderEpochs
    from logstore.errors import (
        ClosedError,
        CodecUnavailableError,
        ConcurrentTransactionsError,
        ConflictError,
        CorruptLogError,
        DiskFullError,
        FailedLogError,
        FencedError,
        ForkedHandleError,
        IndeterminateAppendError,
        InterruptedAppendError,
        InvalidNameError,
        InvalidRecordError,
        LockedError,
        LogStoreError,
        LogTruncatedError,
        NotALogError,
        OffsetOutOfRangeError,
        OutOfOrderSequenceError,
        ReadOnlyError,
        RebalanceError,
        RecordNotFoundError,
        RecordTooLargeError,
        TopicExistsError,
        TransactionAbortedError,
        TransactionStateError,
        UnknownTopicError,
        UnsafeFileSystemError,
        UnsupportedFormatError,
    )
    from logstore.groups import (
        Assignor,
        AsyncConsumer,
        ConsumedRecord,
        Consumer,
        GroupDescription,
        GroupMember,
        GroupMemberDescription,
        Groups,
        GroupState,
        Lag,
        OffsetReset,
        ReceivedRecord,
        Transition,
    )
    from logstore.incoming import AppendedBatches
    from logstore.index import AbortedTransaction, OffsetIndex, TimeIndex, TransactionIndex
    from logstore.interceptors import ConsumerInterceptor, Outgoing, ProducerInterceptor
    from logstore.maintenance import (
        Maintenance,
        MaintenanceAct,
        MaintenanceFault,
        MaintenanceReport,
    )
    from logstore.mending import Repair, RepairStep, repair
    from logstore.offsets import CommittedOffset, TopicPartition
    from logstore.opening import open
    from logstore.partition import Partition
    from logstore.partitioner import (
        KeyPartitioner,
        Partitioner,
        RandomPartitioner,
        RoundRobinPartitioner,
    )
    from logstore.problem import Problem, ProblemKind, Severity
    from logstore.producer_state import OngoingTransaction
    from logstore.producers import DiscardedSnapshot
    from logstore.record import BytesColumn, Columns, Record
    from logstore.recovery import Damage, RecoveryReport, TornTail
    from logstore.retention import RetentionDecision, RetentionPolicy
    from logstore.scan import LocatedBatch, Scan, Skipped
    from logstore.segment import Segment
    from logstore.serialization import Serde, SerializationError
    from logstore.store import Store, StoreRecovery
    from logstore.topic import PartitionDescription, Position, Topic, TopicDescription
    from logstore.transactions.async_producer import AsyncProducer, AsyncTransaction
    from logstore.transactions.delivery import Delivery
    from logstore.transactions.producer import Producer
    from logstore.transactions.service import TransactionDescription, Transactions
    from logstore.transactions.transaction import Transaction
    from logstore.where import Where, WhereError
    from logstore.writer import Writer

__version__ = "0.1.0"

__all__ = [
    "AbortedTransaction",
    "AppendedBatches",
    "Assignor",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncTransaction",
    "BatchEncoder",
    "BatchHeader",
    "BytesColumn",
    "Clock",
    "ClosedError",
    "Columns",
    "CommittedOffset",
    "CompactedSegment",
    "CompactionReport",
    "Compactor",
    "CodecUnavailableError",
    "ConcurrentTransactionsError",
    "ConfigError",
    "ConflictError",
    "ConsumedRecord",
    "Consumer",
    "ConsumerInterceptor",
    "CorruptLogError",
    "Damage",
    "Delivery",
    "DiscardedSnapshot",
    "DiskFullError",
    "EpochEnd",
    "FailedLogError",
    "FencedError",
    "ForkedHandleError",
    "GroupDescription",
    "GroupMember",
    "GroupMemberDescription",
    "Groups",
    "GroupState",
    "GuardedClock",
    "IndeterminateAppendError",
    "InterruptedAppendError",
    "InvalidNameError",
    "InvalidRecordError",
    "KeyPartitioner",
    "Lag",
    "LeaderEpochs",
    "LocatedBatch",
    "LockedError",
    "LogStoreError",
    "LogTruncatedError",
    "Maintenance",
    "MaintenanceAct",
    "MaintenanceFault",
    "MaintenanceReport",
    "ManualClock",
    "NotALogError",
    "OffsetIndex",
    "OffsetOutOfRangeError",
    "OffsetReset",
    "OngoingTransaction",
    "Outgoing",
    "OutOfOrderSequenceError",
    "Partition",
    "PartitionConfig",
    "PartitionDescription",
    "Partitioner",
    "Position",
    "Problem",
    "ProblemKind",
    "Producer",
    "ProducerInterceptor",
    "RandomPartitioner",
    "ReadOnlyError",
    "RebalanceError",
    "ReceivedRecord",
    "Record",
    "RecordNotFoundError",
    "RecordTooLargeError",
    "RecoveryReport",
    "Repair",
    "RepairStep",
    "RetentionDecision",
    "RetentionPolicy",
    "RoundRobinPartitioner",
    "Scan",
    "Segment",
    "Serde",
    "SerializationError",
    "Severity",
    "Skipped",
    "Store",
    "StoreRecovery",
    "SystemClock",
    "TimeIndex",
    "Topic",
    "TopicDescription",
    "TopicExistsError",
    "TopicPartition",
    "TornTail",
    "Transaction",
    "TransactionAbortedError",
    "TransactionDescription",
    "TransactionIndex",
    "Transactions",
    "TransactionStateError",
    "Transition",
    "UnknownTopicError",
    "UnsafeFileSystemError",
    "UnsupportedFormatError",
    "Where",
    "WhereError",
    "Writer",
    "open",
    "repair",
    "with_producer",
]

# The room of every public name.  A test holds this, the imports above and __all__ together.
_ROOMS = {
    "batch": ("BatchHeader", "with_producer"),
    "clock": ("Clock", "GuardedClock", "ManualClock", "SystemClock"),
    "compaction": ("CompactedSegment", "CompactionReport", "Compactor"),
    "config": ("ConfigError", "PartitionConfig"),
    "encoder": ("BatchEncoder",),
    "epochs": ("EpochEnd", "LeaderEpochs"),
    "errors": (
        "ClosedError",
        "CodecUnavailableError",
        "ConcurrentTransactionsError",
        "ConflictError",
        "CorruptLogError",
        "DiskFullError",
        "FailedLogError",
        "FencedError",
        "ForkedHandleError",
        "IndeterminateAppendError",
        "InterruptedAppendError",
        "InvalidNameError",
        "InvalidRecordError",
        "LockedError",
        "LogStoreError",
        "LogTruncatedError",
        "NotALogError",
        "OffsetOutOfRangeError",
        "OutOfOrderSequenceError",
        "ReadOnlyError",
        "RebalanceError",
        "RecordNotFoundError",
        "RecordTooLargeError",
        "TopicExistsError",
        "TransactionAbortedError",
        "TransactionStateError",
        "UnknownTopicError",
        "UnsafeFileSystemError",
        "UnsupportedFormatError",
    ),
    "groups": (
        "Assignor",
        "AsyncConsumer",
        "ConsumedRecord",
        "Consumer",
        "GroupDescription",
        "GroupMember",
        "GroupMemberDescription",
        "GroupState",
        "Groups",
        "Lag",
        "OffsetReset",
        "ReceivedRecord",
        "Transition",
    ),
    "incoming": ("AppendedBatches",),
    "index": ("AbortedTransaction", "OffsetIndex", "TimeIndex", "TransactionIndex"),
    "interceptors": ("ConsumerInterceptor", "Outgoing", "ProducerInterceptor"),
    "maintenance": ("Maintenance", "MaintenanceAct", "MaintenanceFault", "MaintenanceReport"),
    "mending": ("Repair", "RepairStep", "repair"),
    "offsets": ("CommittedOffset", "TopicPartition"),
    "opening": ("open",),
    "partition": ("Partition",),
    "partitioner": ("KeyPartitioner", "Partitioner", "RandomPartitioner", "RoundRobinPartitioner"),
    "problem": ("Problem", "ProblemKind", "Severity"),
    "producer_state": ("OngoingTransaction",),
    "producers": ("DiscardedSnapshot",),
    "record": ("BytesColumn", "Columns", "Record"),
    "recovery": ("Damage", "RecoveryReport", "TornTail"),
    "retention": ("RetentionDecision", "RetentionPolicy"),
    "scan": ("LocatedBatch", "Scan", "Skipped"),
    "segment": ("Segment",),
    "serialization": ("Serde", "SerializationError"),
    "store": ("Store", "StoreRecovery"),
    "topic": ("PartitionDescription", "Position", "Topic", "TopicDescription"),
    "transactions.async_producer": ("AsyncProducer", "AsyncTransaction"),
    "transactions.delivery": ("Delivery",),
    "transactions.producer": ("Producer",),
    "transactions.service": ("TransactionDescription", "Transactions"),
    "transactions.transaction": ("Transaction",),
    "where": ("Where", "WhereError"),
    "writer": ("Writer",),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> object:
    """Import the room of a public name, once: from then on the module has it itself."""
    room = _HOMES.get(name)
    if room is None and name != "_native":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{room or name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}._native":
            raise
        raise ImportError(
            f"the C extension of logstore is not built in {__path__[0]}.  In a checkout, the "
            "source directory hides an installed logstore: run Python in another directory, or "
            "build the extension in the checkout with: pip install -e ."
        ) from None
    value = module if room is None else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
