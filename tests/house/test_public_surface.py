"""The names and signatures people hold in their hands.

A failure here means that a promise changed: change this file only together with CHANGELOG.md.
Additions are fine, and are added below; what is listed does not go away quietly.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

import logstore
from logstore import (
    Columns,
    Compactor,
    Maintenance,
    OffsetIndex,
    Partition,
    Producer,
    Record,
    Scan,
    Segment,
    Store,
    TimeIndex,
    Topic,
    Writer,
)

NAMES = {
    *("BytesColumn", "Columns", "OffsetIndex", "Partition", "Record", "Scan", "Segment"),
    *("TimeIndex", "Where", "WhereError", "Writer"),
    *("CompactedSegment", "CompactionReport", "Compactor"),
    *("Clock", "GuardedClock", "ManualClock", "SystemClock"),
    *("ConfigError", "PartitionConfig"),
    *("Damage", "RecoveryReport", "Skipped", "TornTail"),
    *("Maintenance", "MaintenanceAct", "MaintenanceFault", "MaintenanceReport"),
    *("EpochEnd", "LeaderEpochs", "RetentionDecision", "RetentionPolicy"),
    *("ClosedError", "CorruptLogError", "DiskFullError", "FailedLogError", "FencedError"),
    *("CodecUnavailableError", "ForkedHandleError"),
    *("IndeterminateAppendError", "InterruptedAppendError", "InvalidNameError"),
    *("InvalidRecordError", "LockedError", "LogStoreError", "LogTruncatedError", "NotALogError"),
    "NotLeaderError",
    *("OffsetOutOfRangeError", "ReadOnlyError", "RecordNotFoundError", "RecordTooLargeError"),
    *("TopicExistsError", "UnknownTopicError", "UnsafeFileSystemError", "UnsupportedFormatError"),
    *("Position", "Store", "StoreRecovery", "Topic", "open", "open_member"),
    *("KeyPartitioner", "Partitioner", "PartitionDescription", "TopicDescription"),
    *("AbortedTransaction", "AppendedBatches", "BatchHeader", "DiscardedSnapshot"),
    *("OngoingTransaction", "TransactionIndex"),
    *("Problem", "ProblemKind", "Repair", "RepairStep", "Severity", "repair"),
    *("BatchEncoder", "LocatedBatch", "with_producer"),
    *("ConsumerInterceptor", "Delivery", "Outgoing", "Producer", "ProducerInterceptor"),
    *("RandomPartitioner", "RoundRobinPartitioner", "Serde", "SerializationError"),
    *("AsyncProducer", "AsyncTransaction"),
    *("Transaction", "TransactionDescription", "Transactions"),
    *("ConcurrentTransactionsError", "TransactionStateError"),
    *("ConflictError", "OutOfOrderSequenceError", "TransactionAbortedError"),
    *("Assignor", "CommittedOffset", "GroupDescription", "GroupMember", "GroupMemberDescription"),
    *("GroupState", "Groups", "Lag", "OffsetReset", "RebalanceError", "TopicPartition"),
    *("AsyncConsumer", "ConsumedRecord", "Consumer", "ReceivedRecord", "Transition"),
    *("ClusterMismatchError", "CorruptMetadataError", "MetadataUnavailableError"),
    "ClusterMemberError",
    "NodeIdInUseError",
    *("Cluster", "ClusterPartition", "ClusterStatus", "ClusterTopic", "Node", "NodeConfig"),
    *("NodeStatus", "PartitionStatus", "Reassignment"),
    *("KafkaConfig", "KafkaServer", "KafkaSource"),
    *("DivergedError", "Follow", "FollowStatus", "FollowedPartition"),
    *("NotEnoughReplicasError", "ReplicaOfflineError"),
    *("CoordinatorError", "CoordinatorLoadingError", "CoordinatorNotAvailableError"),
    "NotCoordinatorError",
    *("DrainTimeoutError", "HandlerTimeoutError", "PoisonRecordError", "StuckWorkersError"),
    *("AsyncWorkers", "Context", "Dead", "RetryLater", "Running", "Skip", "WorkerStats", "Workers"),
    *("DelayedRecord", "ScheduleError", "Scheduler", "Ticket", "UnknownTicketError"),
    *("AsyncQueue", "LeaseLostError", "Message", "Queue", "QueueSize", "StdQueue"),
}

SIGNATURES = [
    (
        Partition.open,
        "(path, *, readonly=False, create=True, durability='fsync', config=None, clock=None, "
        "progress=None, reserve_bytes=262144, allow_unsafe_fs=False)",
    ),
    (
        logstore.open,
        "(path, *, readonly=False, create=True, durability='fsync', config=None, clock=None, "
        "partitioner=None, progress=None, reserve_bytes=1048576, allow_unsafe_fs=False)",
    ),
    (
        Store.create_topic,
        "(self, name, partitions=1, *, config=None, exist_ok=False, partitioner=None, "
        "topic_id=None)",
    ),
    (
        Producer.append,
        "(self, topic, value, *, key=None, headers=(), timestamp=None, partition=None, "
        "dedupe_id=None)",
    ),
    (
        Producer.send,
        "(self, /, topic, value, *, key=None, headers=(), timestamp=None, partition=None, "
        "callback=None, dedupe_id=None)",
    ),
    (Producer.flush, "(self)"),
    (Producer.close, "(self)"),
    (Store.alter_topic, "(self, name, config)"),
    (Store.delete_topic, "(self, name)"),
    (Store.describe, "(self)"),
    (Store.sync, "(self)"),
    (Store.checkpoint, "(self)"),
    (Store.check, "(self, *, deep=True, on_corrupt='raise', progress=None)"),
    (Store.close, "(self)"),
    (
        Topic.append,
        "(self, value, *, key=None, headers=(), timestamp=None, partition=None, durability=None)",
    ),
    (Topic.extend, "(self, records, *, partition=None, durability=None)"),
    (Topic.get, "(self, key, *, isolation='read_uncommitted')"),
    (Topic.alter, "(self, config)"),
    (Topic.add_partitions, "(self, count)"),
    (Topic.describe, "(self)"),
    (
        Partition.append,
        "(self, value, *, key=None, headers=(), timestamp=None, durability=None, "
        "expect_offset=None)",
    ),
    (Partition.extend, "(self, records, *, durability=None, expect_offset=None)"),
    (
        Partition.append_batch,
        "(self, raw, *, origin='leader', durability=None, verify_transaction=True)",
    ),
    (
        Partition.end_transaction,
        "(self, producer_id, producer_epoch, *, commit, coordinator_epoch=0, durability=None)",
    ),
    (Partition.aborted_transactions, "(self, start=None, stop=None)"),
    (
        Partition.writer,
        "(self, *, batch_bytes=65536, compression=None, compression_level=None, linger=1.0, "
        "durability=None)",
    ),
    (
        Partition.scan,
        "(self, start=None, stop=None, *, isolation='read_uncommitted', follow=False, "
        "timeout=None, max_records=None, on_corrupt='raise', on_lost='raise')",
    ),
    (Partition.tail, "(self, n, *, isolation='read_uncommitted')"),
    (Partition.get, "(self, key, *, isolation='read_uncommitted')"),
    (Partition.offset_for_time, "(self, when)"),
    (
        Partition.read_batches,
        "(self, offset, max_bytes=1048576, *, isolation='read_uncommitted')",
    ),
    (Partition.truncate, "(self, end_offset)"),
    (Partition.trim, "(self, start_offset)"),
    (Partition.enforce, "(self, policy=None, *, now=None, dry_run=False)"),
    (Partition.become_leader, "(self, epoch)"),
    (Partition.expire_producers, "(self, now=None)"),
    (Maintenance.run_once, "(self, now=None)"),
    (Maintenance.start, "(self)"),
    (Maintenance.stop, "(self)"),
    (Partition.end_offset_for_epoch, "(self, epoch)"),
    (Partition.truncate_to_epoch, "(self, answer)"),
    (Partition.roll, "(self)"),
    (Partition.sync, "(self)"),
    (Partition.close, "(self)"),
    (Partition.check, "(self, *, deep=True, on_corrupt='raise', progress=None)"),
    (
        Compactor,
        "(partition, *, memory_bytes=134217728, delete_retention_ms=None, min_lag_ms=None, "
        "max_lag_ms=None, min_cleanable_dirty_ratio=None, io_bytes=524288, progress=None)",
    ),
    (Compactor.run, "(self, dry_run=False)"),
    (Compactor.purge, "(self, key, *, dry_run=False)"),
    (Scan.columns, "(self, rows=65536, *, fields=None)"),
    (Scan.batches, "(self)"),
    (Scan.to_arrow, "(self, *, fields=None)"),
    (Scan.to_pandas, "(self, *, fields=None)"),
    (Writer.append, "(self, /, value, *, key=None, headers=(), timestamp=None)"),
    (Writer.flush, "(self)"),
    (Writer.close, "(self)"),
    (Segment.check, "(self)"),
    (OffsetIndex.lookup, "(self, offset)"),
    (TimeIndex.lookup, "(self, timestamp)"),
]

ATTRIBUTES = {
    Partition: {
        *("path", "topic", "number", "closed", "readonly", "config"),
        *("start_offset", "end_offset", "durable_offset", "high_watermark", "last_stable_offset"),
        *("segments", "recovery", "leader_epoch", "leader_epochs", "first_dirty_offset"),
        "ongoing_transactions",
    },
    Store: {"path", "closed", "readonly", "recovery", "identity"},
    Topic: {"name", "id", "config", "partitioner"},
    Scan: {"next_offset"},
    Writer: {"closed"},
    Record: {"value", "key", "headers", "timestamp", "offset", "partition", "topic"},
    Columns: {"offsets", "timestamps", "keys", "values"},
    Segment: {
        *("base_offset", "end_offset", "size_bytes", "max_timestamp", "sealed"),
        *("offset_index", "time_index"),
    },
}

# All public names of a Store.  A new one is a promise to every user: think first whether it can be
# on one of the parts, which only other packages of logstore use.
STORE_NAMES = {
    *("path", "closed", "readonly", "durability", "clock", "recovery", "identity"),
    *("get", "items", "keys", "values"),
    *("create_topic", "alter_topic", "delete_topic", "describe"),
    *("sync", "checkpoint", "enforce", "check", "close"),
}
STORE_PARTS = {"access", "companions", "producer_ids", "topic_changes"}

# What `except` can rely on, besides LogStoreError.
CAUGHT_AS = {
    "ConcurrentTransactionsError": logstore.TransactionStateError,
    "SerializationError": ValueError,
    "WhereError": ValueError,
    "TransactionStateError": RuntimeError,
    "ClosedError": ValueError,
    "ConfigError": ValueError,
    "ConflictError": RuntimeError,
    "CorruptLogError": ValueError,
    "DiskFullError": OSError,
    "DivergedError": RuntimeError,
    "DrainTimeoutError": TimeoutError,
    "Dead": logstore.LogStoreError,
    "FailedLogError": logstore.ClosedError,
    "FencedError": ValueError,
    "ForkedHandleError": logstore.ClosedError,
    "HandlerTimeoutError": TimeoutError,
    "IndeterminateAppendError": OSError,
    "InterruptedAppendError": KeyboardInterrupt,
    "InvalidNameError": ValueError,
    "InvalidRecordError": ValueError,
    "LeaseLostError": RuntimeError,
    "LockedError": OSError,
    "LogTruncatedError": logstore.OffsetOutOfRangeError,
    "NotALogError": ValueError,
    "NotLeaderError": RuntimeError,
    "OffsetOutOfRangeError": IndexError,
    "OutOfOrderSequenceError": ValueError,
    "PoisonRecordError": RuntimeError,
    "ReadOnlyError": ValueError,
    "RecordNotFoundError": LookupError,
    "RecordTooLargeError": ValueError,
    "RetryLater": logstore.LogStoreError,
    "Skip": logstore.LogStoreError,
    "StuckWorkersError": RuntimeError,
    "TopicExistsError": ValueError,
    "ScheduleError": ValueError,
    "UnknownTicketError": LookupError,
    "UnknownTopicError": KeyError,
    "UnsafeFileSystemError": ValueError,
    "TransactionAbortedError": RuntimeError,
    "RebalanceError": RuntimeError,
    "CoordinatorError": RuntimeError,
    "CoordinatorLoadingError": logstore.CoordinatorError,
    "CoordinatorNotAvailableError": logstore.CoordinatorError,
    "NotCoordinatorError": logstore.CoordinatorError,
    "NotEnoughReplicasError": RuntimeError,
    "NodeIdInUseError": RuntimeError,
    "ClusterMemberError": ValueError,
    "ClusterMismatchError": ValueError,
    "CorruptMetadataError": logstore.CorruptLogError,
    "MetadataUnavailableError": TimeoutError,
    "ReplicaOfflineError": OSError,
    "UnsupportedFormatError": ValueError,
    "CodecUnavailableError": logstore.UnsupportedFormatError,
}


def shape(function: Callable[..., object]) -> str:
    """The signature without its annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_the_public_names_are_these() -> None:
    assert set(logstore.__all__) == NAMES
    assert len(logstore.__all__) == len(NAMES)
    assert all(hasattr(logstore, name) for name in NAMES)


def test_every_name_is_fetched_from_the_module_that_the_type_checker_sees() -> None:
    source = Path(logstore.__file__).with_suffix(".pyi").read_text("utf-8")
    seen = {
        alias.name: node.module
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    fetched = {name: f"logstore.{module}" for name, module in logstore._MODULE_OF.items()}  # type: ignore[attr-defined]
    assert fetched == seen
    assert set(fetched) == set(logstore.__all__)


def test_importing_the_package_imports_no_engine() -> None:
    loaded = "import logstore, sys; print(*[m for m in sys.modules if m.startswith('logstore.')])"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, check=True)
    assert done.stdout.split() == []


def test_an_unknown_name_is_an_attribute_error_and_dir_knows_the_others() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'opne'"):
        _ = logstore.opne  # type: ignore[attr-defined]
    assert set(logstore.__all__) <= set(dir(logstore))


@pytest.mark.parametrize(
    ("function", "expected"), SIGNATURES, ids=[f.__qualname__ for f, _ in SIGNATURES]
)
def test_a_signature_stays_as_it_is(function: Callable[..., object], expected: str) -> None:
    assert shape(function) == expected


@pytest.mark.parametrize("name", sorted(CAUGHT_AS))
def test_an_error_is_caught_by_its_family_and_by_its_builtin(name: str) -> None:
    error = getattr(logstore, name)
    assert issubclass(error, logstore.LogStoreError)
    assert issubclass(error, CAUGHT_AS[name])


def test_every_error_has_a_builtin_family() -> None:
    errors = {
        name
        for name in logstore.__all__
        if inspect.isclass(found := getattr(logstore, name)) and issubclass(found, BaseException)
    }
    assert errors - {"LogStoreError"} == set(CAUGHT_AS)


def test_the_named_attributes_are_there(log: Partition, store: Store) -> None:
    log.append(b"value", key=b"key")
    topic = store.create_topic("topic")
    scan = log.scan()
    with log.writer() as writer:
        examples = [log, scan, writer, log[0], next(scan.columns()), log.segments[0]]
        examples += [store, topic]
        for example in examples:
            (kind,) = [kind for kind in ATTRIBUTES if isinstance(example, kind)]
            missing = {name for name in ATTRIBUTES[kind] if not hasattr(example, name)}
            assert not missing, kind


def test_a_store_has_these_public_names_and_no_others(store: Store) -> None:
    found = {name for name in dir(store) if not name.startswith("_")}
    assert found == STORE_NAMES | STORE_PARTS


def test_the_reference_leaves_out_the_parts_of_a_store_for_other_packages() -> None:
    assert not STORE_PARTS & set(dir(Store))  # docs/reference.py prints what the class has
    assert all(f"`{part}`" in (Store.__doc__ or "") for part in STORE_PARTS)


def test_a_partition_has_few_names(log: Partition) -> None:
    """`parts` is one name: what other packages need is below it."""
    names = {name for name in (*dir(Partition), *dir(log)) if not name.startswith("_")}
    assert len(names) <= 45, sorted(names)


def test_help_of_a_bound_method_is_the_public_text(log: Partition) -> None:
    for method in (log.append, log.scan):
        public = getattr(Partition, method.__name__)
        assert method.__doc__ == public.__doc__ and len(method.__doc__ or "") > 200
        assert shape(method) == shape(public).replace("(self, ", "(")


def test_every_public_class_says_what_it_is() -> None:
    silent = [
        name for name in logstore.__all__ if not (getattr(logstore, name).__doc__ or "").strip()
    ]
    assert not silent


def test_a_record_cannot_be_changed(log: Partition) -> None:
    log.append(b"value")
    record = log[0]
    with pytest.raises(AttributeError):
        record.value = b"other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        record.extra = 1  # type: ignore[attr-defined]
    assert record.value == b"value"


def test_a_partition_has_no_length_and_is_not_pickled(log: Partition) -> None:
    with pytest.raises(TypeError):
        len(log)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pickle.dumps(log)


def test_the_version_has_one_home() -> None:
    assert metadata.version("logstore-engine") == logstore.__version__


def test_the_package_is_typed() -> None:
    assert (Path(logstore.__file__).parent / "py.typed").is_file()
