"""logstore: Kafka's log as a Python library.

>>> from logstore import Partition                                              # doctest: +SKIP
>>> with Partition.open("data/orders-0") as log:                                # doctest: +SKIP
...     log.append(b"hello")
0

`import logstore` imports no other module: a public name is imported when it is first used.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

# Every public name, by the module that defines it.  `__init__.pyi` has the same names for type
# checkers; tests/house/test_public_surface.py compares the two.
_PUBLIC = {
    "clock": (
        "Clock",
        "GuardedClock",
        "ManualClock",
        "SystemClock",
    ),
    "config": (
        "ConfigError",
        "PartitionConfig",
    ),
    "errors": (
        "ClosedError",
        "ClusterMemberError",
        "ClusterMismatchError",
        "CodecUnavailableError",
        "ConcurrentTransactionsError",
        "ConflictError",
        "CoordinatorError",
        "CoordinatorLoadingError",
        "CoordinatorNotAvailableError",
        "CorruptLogError",
        "CorruptMetadataError",
        "DiskFullError",
        "DivergedError",
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
        "MetadataUnavailableError",
        "NodeIdInUseError",
        "NotALogError",
        "NotCoordinatorError",
        "NotEnoughReplicasError",
        "NotLeaderError",
        "OffsetOutOfRangeError",
        "OutOfOrderSequenceError",
        "ReadOnlyError",
        "RebalanceError",
        "RecordNotFoundError",
        "RecordTooLargeError",
        "ReplicaOfflineError",
        "TopicExistsError",
        "TransactionAbortedError",
        "TransactionStateError",
        "UnknownTopicError",
        "UnsafeFileSystemError",
        "UnsupportedFormatError",
    ),
    "interceptors": (
        "ConsumerInterceptor",
        "Outgoing",
        "ProducerInterceptor",
    ),
    "opening": ("open", "open_member"),
    "partitioner": (
        "KeyPartitioner",
        "Partitioner",
        "RandomPartitioner",
        "RoundRobinPartitioner",
    ),
    "record": (
        "BytesColumn",
        "Columns",
        "Record",
    ),
    "serialization": (
        "Serde",
        "SerializationError",
    ),
    "work_errors": (
        "DrainTimeoutError",
        "HandlerTimeoutError",
        "LeaseLostError",
        "PoisonRecordError",
        "ScheduleError",
        "StuckWorkersError",
        "UnknownTicketError",
    ),
    "where": (
        "Where",
        "WhereError",
    ),
    "checking.problem": (
        "Problem",
        "ProblemKind",
        "Severity",
    ),
    "consumer.assignors": (
        "Assignor",
        "GroupMember",
    ),
    "consumer.async_consumer": ("AsyncConsumer",),
    "consumer.consumer": ("Consumer",),
    "consumer.received": ("ConsumedRecord", "ReceivedRecord"),
    "coordinators.group_admin": (
        "GroupDescription",
        "GroupMemberDescription",
        "Groups",
        "OffsetReset",
    ),
    "coordinators.group_events": (
        "GroupState",
        "Transition",
    ),
    "coordinators.lag": ("Lag",),
    "coordinators.offset_records": (
        "CommittedOffset",
        "TopicPartition",
    ),
    "coordinators.transaction_coordinator": ("Transactions",),
    "coordinators.transaction_state": ("TransactionDescription",),
    "delays.scheduler": ("Scheduler",),
    "delays.ticket": ("DelayedRecord", "Ticket"),
    "format.batch": (
        "BatchHeader",
        "with_producer",
    ),
    "format.encoder": ("BatchEncoder",),
    "format.index": (
        "AbortedTransaction",
        "OffsetIndex",
        "TimeIndex",
        "TransactionIndex",
    ),
    "format.validation": ("AppendedBatches",),
    "kafka.config": ("KafkaConfig",),
    "kafka.server": ("KafkaServer",),
    "kafka.source": ("KafkaSource",),
    "log.epochs": (
        "EpochEnd",
        "LeaderEpochs",
    ),
    "log.producer_files": ("DiscardedSnapshot",),
    "log.producer_state": ("OngoingTransaction",),
    "log.retention": (
        "RetentionDecision",
        "RetentionPolicy",
    ),
    "log.segment": ("Segment",),
    "partition.partition": ("Partition",),
    "partition.scan": (
        "LocatedBatch",
        "Scan",
        "Skipped",
    ),
    "partition.writer": ("Writer",),
    "producer.async_producer": (
        "AsyncProducer",
        "AsyncTransaction",
    ),
    "producer.delivery": ("Delivery",),
    "producer.producer": ("Producer",),
    "producer.transaction": ("Transaction",),
    "queues.async_queue": ("AsyncQueue",),
    "queues.message": ("Message",),
    "queues.queue": ("Queue", "QueueSize"),
    "queues.std_queue": ("StdQueue",),
    "recovery.report": (
        "Damage",
        "RecoveryReport",
        "TornTail",
    ),
    "replication.follow": (
        "Follow",
        "FollowStatus",
        "FollowedPartition",
    ),
    "replication.cluster": ("Cluster",),
    "replication.cluster_topic": (
        "ClusterPartition",
        "ClusterTopic",
        "Reassignment",
    ),
    "replication.config": ("NodeConfig",),
    "replication.node": ("Node",),
    "replication.status": (
        "ClusterStatus",
        "NodeStatus",
        "PartitionStatus",
    ),
    "store.recovery_report": ("StoreRecovery",),
    "store.store": ("Store",),
    "store.topic": (
        "PartitionDescription",
        "Position",
        "Topic",
        "TopicDescription",
    ),
    "upkeep.compaction": ("Compactor",),
    "upkeep.compaction_report": (
        "CompactedSegment",
        "CompactionReport",
    ),
    "upkeep.maintenance": (
        "Maintenance",
        "MaintenanceAct",
        "MaintenanceFault",
        "MaintenanceReport",
    ),
    "upkeep.repair": ("repair",),
    "upkeep.repair_report": (
        "Repair",
        "RepairStep",
    ),
    "workers.context": (
        "Context",
        "Dead",
        "RetryLater",
        "Skip",
    ),
    "workers.stats": (
        "Running",
        "WorkerStats",
    ),
    "workers.workers": (
        "AsyncWorkers",
        "Workers",
    ),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Import the module of a public name, and keep the name here: this is called once a name."""
    home = _MODULE_OF.get(name)
    if home is None and name != "_native":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{home or name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}._native":
            raise
        raise ImportError(
            f"the C extension of logstore is not built in {__path__[0]}.  In a checkout, the "
            "source directory hides an installed logstore: run Python in another directory, or "
            "build the extension in the checkout with: pip install -e ."
        ) from None
    value = module if home is None else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
