"""The public test kit: models, checkers and fault injection for logs, and test data strategies.

``reference``    encodes and decodes Kafka's record batches in plain Python
``compaction``   a reference for one pass of compaction, in plain Python
``model``        ``LogModel``: a partition as a plain list of records
``transactions`` ``TransactionModel``: the same with producers and transactions
``invariants``   ``check_invariants(partition)``: checks a partition that has no writer
``crash``        ``explore``: recovers from every disk state that a crash may leave
``io``           ``record_io`` and ``inject_io``: record file system calls, or inject faults
``interrupts``   ``explore_interrupts``: raises Ctrl-C at every place of an operation
``history``      a recorder of client operations, and a checker for the anomalies of Jepsen's
                 Kafka tests; ``operations`` is the format
``cluster``      ``ClusterUnderTest``: nodes in processes of their own; every fault is a method;
                 ``link`` is the network between them, ``replica_files`` compares the logs
``simulation``   ``simulate``: a cluster in virtual time, with faults, that runs the machines of
                 `logstore.replication`
``fixtures``     pytest fixtures: a store that can be crashed, a clock, a recorder, a listener for
                 Kafka's clients; needs pytest
``strategies``   Hypothesis strategies for records and batches; needs the hypothesis package

Import from here: ``from logstore.testing import Recorder, check, explore, StoreUnderTest``.
``Operation`` is a file system call; a client's is ``logstore.testing.history.Operation``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from logstore.testing.cluster import ClusterUnderTest, ZooKeeperServers
from logstore.testing.cluster_tree import ClusterTree, PartitionState
from logstore.testing.compaction import CompactionRules, reference_compaction
from logstore.testing.crash import CrashViolation, Exploration, explore, explore_recovery
from logstore.testing.crash_states import Crash, Model, crash_states
from logstore.testing.history import ALL_KINDS, DEFAULT_KINDS, assert_clean, check
from logstore.testing.history_findings import Copy, Finding, HistoryViolation
from logstore.testing.interrupts import (
    InterruptExploration,
    InterruptViolation,
    explore_interrupts,
    interrupt_at,
)
from logstore.testing.invariants import check_invariants
from logstore.testing.io import inject_io, record_io
from logstore.testing.io_calls import (
    KINDS,
    MUTATIONS,
    READS,
    SYNCS,
    Fault,
    Injected,
    Operation,
    Trace,
    tree_of,
)
from logstore.testing.link import Link, Links
from logstore.testing.model import LogModel, as_reference
from logstore.testing.node_process import NodeProcess
from logstore.testing.operations import (
    Act,
    Assign,
    Commit,
    Committed,
    End,
    Event,
    History,
    MalformedHistoryError,
    Pending,
    Poll,
    Read,
    Recorder,
    Seek,
    Send,
    Snapshot,
    reads_of,
)
from logstore.testing.reference import (
    FormatViolation,
    ReferenceBatch,
    ReferenceRecord,
    decode_batch,
    encode_batch,
    read_log,
)
from logstore.testing.replica_files import replica_problems
from logstore.testing.sandbox import Sandbox, another_boot
from logstore.testing.transactions import ModelBatch, ModelProducer, TransactionModel

if TYPE_CHECKING:
    from logstore.testing.fixtures import (
        KafkaServerUnderTest,
        StoreUnderTest,
        kafka_options,
        kafka_server,
        logstore_clock,
        logstore_history,
        logstore_options,
        logstore_store,
    )
    from logstore.testing.strategies import (
        batches,
        payloads,
        record_lists,
        records,
        reference_records,
        timestamps,
    )

__all__ = [
    "ALL_KINDS",
    "DEFAULT_KINDS",
    "KINDS",
    "MUTATIONS",
    "READS",
    "SYNCS",
    "Act",
    "Assign",
    "ClusterTree",
    "ClusterUnderTest",
    "Commit",
    "Committed",
    "CompactionRules",
    "Copy",
    "Crash",
    "CrashViolation",
    "End",
    "Event",
    "Exploration",
    "Fault",
    "Finding",
    "FormatViolation",
    "History",
    "HistoryViolation",
    "Injected",
    "InterruptExploration",
    "InterruptViolation",
    "KafkaServerUnderTest",
    "Link",
    "Links",
    "LogModel",
    "MalformedHistoryError",
    "Model",
    "ModelBatch",
    "ModelProducer",
    "NodeProcess",
    "Operation",
    "PartitionState",
    "Pending",
    "Poll",
    "Read",
    "Recorder",
    "ReferenceBatch",
    "ReferenceRecord",
    "Sandbox",
    "Seek",
    "Send",
    "Snapshot",
    "StoreUnderTest",
    "Trace",
    "TransactionModel",
    "ZooKeeperServers",
    "another_boot",
    "as_reference",
    "assert_clean",
    "batches",
    "check",
    "check_invariants",
    "crash_states",
    "decode_batch",
    "encode_batch",
    "explore",
    "explore_interrupts",
    "explore_recovery",
    "inject_io",
    "interrupt_at",
    "kafka_options",
    "kafka_server",
    "logstore_clock",
    "logstore_history",
    "logstore_options",
    "logstore_store",
    "payloads",
    "read_log",
    "reads_of",
    "record_io",
    "record_lists",
    "records",
    "reference_compaction",
    "reference_records",
    "replica_problems",
    "timestamps",
    "tree_of",
]


# These need pytest or hypothesis, so they are imported when they are first used.
_LAZY: Final = {
    "fixtures": (
        *("KafkaServerUnderTest", "StoreUnderTest", "kafka_options", "kafka_server"),
        *("logstore_clock", "logstore_history", "logstore_options", "logstore_store"),
    ),
    "strategies": (
        *("batches", "payloads", "record_lists", "records", "reference_records", "timestamps"),
    ),
}


def __getattr__(name: str) -> object:
    """Import the module of a name that needs another package, when it is first used."""
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
