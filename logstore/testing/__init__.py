"""The public test kit: an oracle, a model and a checker for logs, and strategies to feed them.

``reference``    encodes and decodes Kafka's record batches in plain Python
``compaction``   what one pass of compaction leaves, in plain Python
``model``        ``LogModel``: what a partition means, as a list
``transactions`` ``TransactionModel``: the same for producers and transactions
``invariants``   ``check_invariants(partition)``: everything that must hold of a quiet partition
``crash``        ``explore``: every state a crash may leave, recovered from and judged
``io``           ``record_io`` and ``inject_io``: the calls to the disk, written down or spoiled
``interrupts``   ``explore_interrupts``: Ctrl-C at every place of an operation, then a check
``history``      what clients were told: a recorder, and a checker with the anomalies of Jepsen's
                 Kafka tests; ``operations`` is the format
``fixtures``     pytest fixtures: a store that can be crashed, a clock, a recorder; needs pytest
``strategies``   Hypothesis strategies for records and batches; needs the hypothesis package
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logstore.testing.compaction import CompactionRules, reference_compaction
from logstore.testing.crash import (
    Crash,
    CrashViolation,
    Exploration,
    Sandbox,
    another_boot,
    crash_states,
    explore,
    explore_recovery,
)
from logstore.testing.history import Finding, History, HistoryViolation, Recorder, assert_clean
from logstore.testing.interrupts import (
    InterruptExploration,
    InterruptViolation,
    explore_interrupts,
    interrupt_at,
)
from logstore.testing.invariants import check_invariants
from logstore.testing.io import Fault, Injected, Operation, Trace, inject_io, record_io
from logstore.testing.model import LogModel, as_reference
from logstore.testing.reference import (
    FormatViolation,
    ReferenceBatch,
    ReferenceRecord,
    decode_batch,
    encode_batch,
    read_log,
)
from logstore.testing.transactions import ModelBatch, ModelProducer, TransactionModel

if TYPE_CHECKING:
    from logstore.testing.strategies import batches, record_lists, records

__all__ = [
    "CompactionRules",
    "Crash",
    "CrashViolation",
    "Exploration",
    "Fault",
    "Finding",
    "FormatViolation",
    "History",
    "HistoryViolation",
    "Injected",
    "InterruptExploration",
    "InterruptViolation",
    "LogModel",
    "ModelBatch",
    "ModelProducer",
    "Operation",
    "Recorder",
    "ReferenceBatch",
    "ReferenceRecord",
    "Sandbox",
    "Trace",
    "TransactionModel",
    "another_boot",
    "as_reference",
    "assert_clean",
    "batches",
    "check_invariants",
    "crash_states",
    "decode_batch",
    "encode_batch",
    "explore",
    "explore_interrupts",
    "explore_recovery",
    "inject_io",
    "interrupt_at",
    "read_log",
    "record_io",
    "record_lists",
    "records",
    "reference_compaction",
]


def __getattr__(name: str) -> object:
    # Only who asks for a strategy needs hypothesis.
    if name in ("batches", "record_lists", "records"):
        from logstore.testing import strategies

        return getattr(strategies, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
