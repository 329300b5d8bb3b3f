"""P5, P6, P12: reading a whole log, and what it costs in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from time import perf_counter

from benchmarks import engine, process
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least, at_most
from benchmarks.peers import framed_file, lmdb_store, rocksdb_store, sqlite_table, syscalls
from benchmarks.sizes import MIB
from benchmarks.values import VALUE_BYTES, chunked, random_values

MILLION = 1e6


@bar("P5", "scan to Records")
def record_scan(bench: Bench) -> Iterator[Figure]:
    values = random_values(bench.sizes.records)
    keys = lmdb_store.keys(len(values))
    with ExitStack() as stack:
        home = stack.enter_context(bench.workspace.scratch("scan"))
        framed_file.write(home / "framed", values)
        lmdb_store.write(home / "lmdb", keys, values)
        rocksdb_store.write(home / "rocksdb", keys, values)
        sqlite_table.write(home / "sqlite", values)
        lmdb = stack.enter_context(closing(lmdb_store.Reader(home / "lmdb")))
        rocksdb = stack.enter_context(closing(rocksdb_store.Reader(home / "rocksdb")))
        sqlite = stack.enter_context(closing(sqlite_table.Reader(home / "sqlite")))
        entrants = {
            "LMDB cursor": lmdb.scan,
            "LMDB values only": lmdb.scan_values,
            "framed file": lambda: framed_file.scan(home / "framed"),
            "RocksDB iterator": rocksdb.scan,
            "SQLite select": sqlite.scan,
        }
        if bench.has_engine:
            write_buffered(home / "bench-0", values)
            log = stack.enter_context(engine.open_log(home / "bench-0"))

            def ours() -> float:
                total = 0
                started = perf_counter()
                for record in log.scan():
                    total += len(record.value)
                elapsed = perf_counter() - started
                assert total == len(values) * VALUE_BYTES
                return len(values) / elapsed

            entrants = {OURS: ours} | entrants
        bench.workspace.settle()
        rates = bench.race(entrants)
    beside = {"LMDB cursor": ("LMDB values only",), "framed file": FRAMED_BESIDE}
    for name, bound in (("LMDB cursor", 2.5), ("framed file", 2.0)):
        yield Figure.compared(
            f"scan to Records, against {name}",
            rates,
            against=name,
            beside=beside[name],
            limit=at_least(bound),
            unit="M records/s",
            scale=MILLION,
        )


FRAMED_BESIDE = ("RocksDB iterator", "SQLite select")


@bar("P6", "scan to columns, CRC checked")
def column_scan(bench: Bench) -> Iterator[Figure]:
    values = random_values(bench.sizes.records)
    with ExitStack() as stack:
        home = stack.enter_context(bench.workspace.scratch("scan"))
        if not bench.has_engine:
            framed_file.write(home / "stand-in", values)
            rates = bench.race({"preadv 1 MiB": lambda: syscalls.read([home / "stand-in"])})
        else:
            path = home / "bench-0"
            write_buffered(path, values)
            log = stack.enter_context(engine.open_log(path))
            bench.workspace.settle()
            entrants = {
                OURS: lambda: columns_rate(log, path),
                "preadv 1 MiB": lambda: syscalls.read(engine.log_files(path)),
            }
            rates = bench.race(entrants, rounds=2 * bench.sizes.rounds)
    yield Figure.compared(
        "scan to columns",
        rates,
        against="preadv 1 MiB",
        limit=at_least(0.45),
        unit="MB/s",
        scale=MILLION,
    )


@bar("P12", "resident memory while scanning", needs_engine=True)
def scan_memory(bench: Bench) -> Iterator[Figure]:
    with bench.workspace.scratch("scan") as home:
        path = home / "bench-0"
        values = random_values(bench.sizes.records)
        lists = chunked(values, 10_000)
        with engine.open_log(path) as log:
            while engine.log_bytes(path) < bench.sizes.scan_bytes:
                for records in lists:
                    log.extend(records)
        size = engine.log_bytes(path) / (1 << 30)
        for kind in ("Records", "columns"):
            bench.progress.step(f"as {kind}")
            grown = process.isolated(peak_growth, path, kind)
            yield Figure(
                name=f"peak growth, {size:.2f} GiB as {kind}",
                value=grown / MIB,
                unit="MiB",
                limit=at_most(64, "MiB"),
            )


def write_buffered(path: Path, values: list[bytes]) -> None:
    with engine.open_log(path) as log:
        engine.write_buffered(log, values)


def columns_rate(log: engine.Log, path: Path) -> float:
    """Bytes of log a second."""
    rows = 0
    started = perf_counter()
    for columns in log.scan().columns():
        rows += len(columns)
    elapsed = perf_counter() - started
    assert rows == log.end_offset - log.start_offset
    return engine.log_bytes(path) / elapsed


def peak_growth(path: Path, kind: str) -> int:
    """Bytes that a full scan adds to this process at its worst moment."""
    with engine.open_log(path) as log:
        for _ in log.scan(0, 1_000):  # whatever is loaded once is not the scan's
            pass
        process.forget_peak()
        before = process.resident_bytes()
        total = 0
        if kind == "Records":
            for record in log.scan():
                total += len(record.value)
        else:
            for columns in log.scan().columns():
                total += len(columns)
        assert total >= log.end_offset - log.start_offset
        return process.peak_resident_bytes() - before
