"""Pipelines: jobs over whole stores, each a function that takes a Spark session.

    export_parquet   topics into partitioned Parquet, incrementally, exactly once
    replay           a range of time of a topic into another topic: rewind and recompute
    verify           every checksum, gap and index of a store, in parallel
    audit            counts, bytes, completeness, delays, missing and duplicate keys; table and page
    compact          the newest (or first) record of every key, into another topic
    finish           complete interrupted commits of sinks, and delete their leftover files

Each returns a report; ``python -m pyspark_logstore.pipelines`` runs them from a shell.  The same
job runs on ``local[*]`` and on a cluster whose machines share the store's directory.
"""

from __future__ import annotations

from pyspark_logstore.pipelines.audit import AuditReport, audit
from pyspark_logstore.pipelines.compact import CompactReport, compact
from pyspark_logstore.pipelines.export import ExportReport, export_parquet
from pyspark_logstore.pipelines.finish import FinishReport, finish
from pyspark_logstore.pipelines.replay import ReplayReport, replay
from pyspark_logstore.pipelines.reports import PipelineError
from pyspark_logstore.pipelines.verify import Fault, VerifyReport, verify

__all__ = [
    "AuditReport",
    "CompactReport",
    "ExportReport",
    "Fault",
    "FinishReport",
    "PipelineError",
    "ReplayReport",
    "VerifyReport",
    "audit",
    "compact",
    "export_parquet",
    "finish",
    "replay",
    "verify",
]
