"""Sizes: how much work a bar does.  Ratios are only worth reading from a `FULL` run."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    rounds: int  # timed rounds after one warm-up; the best one counts
    records: int  # bulk writes and scans
    single_appends: int  # one write(2) each
    synced_appends: int  # one fdatasync(2) each, per round
    slow_puts: int  # for peers below 0.1 M records/s
    lookups: int
    segments: int
    topics: int  # of four partitions each
    unclean_bytes: int
    sealed_bytes: int
    scan_bytes: int
    document_bytes: int
    burst_bytes: int
    growth_bytes: int
    growth_records: tuple[int, int]
    compaction_records: int
    compaction_keys: int
    spark_records: int
    wire_rounds: int  # the median counts
    wire_bytes: int  # produced and consumed by a Kafka client in one turn
    wire_through_bytes: int  # through a server before its memory is read
    wire_singles: int  # requests of one record
    wire_connections: int  # idle ones; a fifth of them for long polls
    wire_topics: int
    wire_transactions: int
    wire_seconds: float  # of idleness


FULL = Sizes(
    rounds=5,
    records=1_000_000,
    single_appends=200_000,
    synced_appends=1_000,
    slow_puts=2_000,
    lookups=50_000,
    segments=1_000,
    topics=200,
    unclean_bytes=GIB,
    sealed_bytes=64 * MIB,
    scan_bytes=2 * GIB,
    document_bytes=64 * MIB,
    burst_bytes=256 * MIB,
    growth_bytes=10 * GIB,
    growth_records=(1_000_000, 10_000_000),
    compaction_records=10_000_000,
    compaction_keys=1_000_000,
    spark_records=4_000_000,
    wire_rounds=5,
    wire_bytes=96 * MIB,
    wire_through_bytes=2 * GIB,
    wire_singles=2000,
    wire_connections=990,
    wire_topics=1000,
    wire_transactions=100,
    wire_seconds=5.0,
)

QUICK = Sizes(
    rounds=2,
    records=50_000,
    single_appends=10_000,
    synced_appends=100,
    slow_puts=200,
    lookups=5_000,
    segments=100,
    topics=20,
    unclean_bytes=16 * MIB,
    sealed_bytes=4 * MIB,
    scan_bytes=128 * MIB,
    document_bytes=8 * MIB,
    burst_bytes=8 * MIB,
    growth_bytes=64 * MIB,
    growth_records=(10_000, 100_000),
    compaction_records=200_000,
    compaction_keys=20_000,
    spark_records=200_000,
    wire_rounds=1,
    wire_bytes=4 * MIB,
    wire_through_bytes=16 * MIB,
    wire_singles=50,
    wire_connections=50,
    wire_topics=20,
    wire_transactions=10,
    wire_seconds=0.5,
)
