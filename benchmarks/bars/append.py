"""P1-P4: writing.  Clocks stop when the data has reached what the durability promises."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from benchmarks import engine
from benchmarks.bench import Bench, bar
from benchmarks.crew import spread
from benchmarks.figure import OURS, Figure, at_least
from benchmarks.peers import (
    framed_file,
    lmdb_store,
    persist_queue,
    rocksdb_store,
    sqlite_table,
    syscalls,
)
from benchmarks.values import VALUE_BYTES, chunked, random_values

LIST_RECORDS = 10_000
THREADS = 16
RECORDS = "M records/s"
MILLION = 1e6

# Header and record framing of a batch that holds one 100-byte value.
SINGLE_BATCH_BYTES = engine.BATCH_HEADER_BYTES + VALUE_BYTES + engine.RECORD_OVERHEAD_BYTES


@bar("P1", "Writer.append, record by record")
def buffered_appends(bench: Bench) -> Iterator[Figure]:
    values = random_values(bench.sizes.records)
    keys = lmdb_store.keys(len(values))
    scratch = bench.workspace.scratch

    def ours() -> float:
        with scratch("log") as path, engine.open_log(path / "bench-0") as log:
            return engine.write_buffered(log, values)

    def framed() -> float:
        with scratch("framed") as path:
            return framed_file.write(path / "file", values)

    def lmdb() -> float:
        with scratch("lmdb") as path:
            return lmdb_store.write(path, keys, values)

    def rocksdb() -> float:
        with scratch("rocksdb") as path:
            return rocksdb_store.write(path, keys, values)

    def sqlite() -> float:
        with scratch("sqlite") as path:
            return sqlite_table.write(path / "table", values)

    peers = {
        "framed file": (framed, 2.0),
        "LMDB put": (lmdb, 4.0),
        "RocksDB batch": (rocksdb, 4.0),
        "SQLite executemany": (sqlite, 15.0),
    }
    rates = bench.race({OURS: ours} | {name: run for name, (run, _) in peers.items()}, writes=True)
    for name, (_, bound) in peers.items():
        yield Figure.compared(
            f"Writer.append, against {name}",
            rates,
            against=name,
            limit=at_least(bound),
            unit=RECORDS,
            scale=MILLION,
        )


@bar("P2", f"extend of {LIST_RECORDS:,}-record lists, durability os")
def extends(bench: Bench) -> Iterator[Figure]:
    values = random_values(bench.sizes.records)
    lists = chunked(values, LIST_RECORDS)
    keys = lmdb_store.keys(len(values))
    scratch = bench.workspace.scratch
    produced = bytes(len(values) * (VALUE_BYTES + engine.RECORD_OVERHEAD_BYTES))
    if bench.has_engine:
        with scratch("log") as path:
            engine.fill(path / "bench-0", lists)
            produced = b"".join(file.read_bytes() for file in engine.log_files(path / "bench-0"))

    def ours() -> float:
        with scratch("log") as path, engine.open_log(path / "bench-0") as log:
            extend = log.extend
            started = perf_counter()
            for records in lists:
                extend(records)
            return len(produced) / (perf_counter() - started)

    def raw() -> float:
        with scratch("raw") as path:
            return syscalls.write_in_chunks(path / "file", produced)

    def lmdb() -> float:
        with scratch("lmdb") as path:
            rate = lmdb_store.write_many(path, keys, values)
            return rate * len(produced) / len(values)

    yield Figure.compared(
        f"extend of {LIST_RECORDS:,} records",
        bench.race({OURS: ours, "write 1 MiB": raw, "LMDB putmulti": lmdb}, writes=True),
        against="write 1 MiB",
        beside=("LMDB putmulti",),
        limit=at_least(0.5),
        unit="MB/s",
        scale=MILLION,
    )


@bar("P3", "append, one record a call, durability os")
def single_appends(bench: Bench) -> Iterator[Figure]:
    values = random_values(bench.sizes.records)[: bench.sizes.single_appends]
    few = values[: bench.sizes.slow_puts]
    pieces = single_batches(bench, values)
    scratch = bench.workspace.scratch

    def ours() -> float:
        with scratch("log") as path, engine.open_log(path / "bench-0") as log:
            return engine.append_each(log, values)

    def write() -> float:
        with scratch("raw") as path:
            return syscalls.write_each(path / "file", pieces)

    def pwrite() -> float:
        with scratch("raw") as path:
            return syscalls.pwrite_each(path / "file", pieces)

    def sqlite() -> float:
        with scratch("sqlite") as path:
            return sqlite_table.write_each(path / "table", few)

    def queue() -> float:
        with scratch("queue") as path:
            return persist_queue.write(path / "queue", few)

    entrants = {
        OURS: ours,
        "os.write": write,
        "os.pwrite": pwrite,
        "SQLite insert": sqlite,
        "persist-queue put": queue,
    }
    yield Figure.compared(
        "append, one record a call",
        bench.race(entrants, writes=True),
        against="os.write",
        beside=("os.pwrite", "SQLite insert", "persist-queue put"),
        limit=at_least(0.5),
        unit=RECORDS,
        scale=MILLION,
    )


@bar("P4", "append, durability fsync")
def synced_appends(bench: Bench) -> Iterator[Figure]:
    values = random_values(bench.sizes.records)[: bench.sizes.synced_appends]
    more = random_values(bench.sizes.records)[: 4 * bench.sizes.synced_appends]
    pieces = single_batches(bench, values)
    scratch = bench.workspace.scratch

    def one_thread() -> float:
        with scratch("log") as path, engine.open_log(path / "bench-0", durability="fsync") as log:
            return engine.append_each(log, values)

    def many_threads() -> float:
        with scratch("log") as path, engine.open_log(path / "bench-0", durability="fsync") as log:
            return spread(log.append, more, THREADS)

    def bare() -> float:
        with scratch("raw") as path:
            return syscalls.write_and_sync_each(path / "file", pieces)

    def bare_threads() -> float:
        with scratch("raw") as path:
            return syscalls.write_and_sync_in_threads(path / "file", pieces, THREADS)

    many = f"{OURS}, {THREADS} threads"
    bare_many = f"write+fdatasync in {THREADS}"
    entrants = {
        OURS: one_thread,
        "write+fdatasync": bare,
        many: many_threads,
        bare_many: bare_threads,
    }
    rates = bench.race(entrants, writes=True)
    yield Figure.compared(
        "append, one thread",
        rates,
        against="write+fdatasync",
        limit=at_least(0.9),
        unit="records/s",
    )
    yield Figure.compared(
        f"append, {THREADS} threads, against one",
        {"one thread" if name == OURS else name: rate for name, rate in rates.items()},
        against="one thread",
        beside=(bare_many,),
        limit=at_least(3.0),
        unit="records/s",
        ours=many,
    )


def single_batches(bench: Bench, values: list[bytes]) -> list[bytes]:
    """As many pieces as values, each of the size that we write for one record."""
    size = SINGLE_BATCH_BYTES
    if bench.has_engine:
        with bench.workspace.scratch("log") as path:
            engine.fill(path / "bench-0", [[value] for value in values[:100]])
            size = engine.log_bytes(path / "bench-0") // len(values[:100])
    return [value.ljust(size, b"\0") for value in values]
