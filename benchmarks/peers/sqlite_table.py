"""SQLite in WAL mode: a table of (offset, value), no fsync and no checkpoint inside the clock."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("CREATE TABLE IF NOT EXISTS log (offset INTEGER PRIMARY KEY, value BLOB)")
    return connection


def write(path: Path, values: Sequence[bytes]) -> float:
    """One `executemany` in one transaction."""
    connection = _connect(path)
    try:
        started = perf_counter()
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO log VALUES (?, ?)", enumerate(values))
        connection.execute("COMMIT")
        elapsed = perf_counter() - started
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return len(values) / elapsed
    finally:
        connection.close()


def write_each(path: Path, values: Sequence[bytes]) -> float:
    """One transaction a record."""
    connection = _connect(path)
    try:
        execute = connection.execute
        started = perf_counter()
        for value in values:
            execute("INSERT INTO log (value) VALUES (?)", (value,))
        return len(values) / (perf_counter() - started)
    finally:
        connection.close()


class Reader:
    def __init__(self, path: Path) -> None:
        self._connection = _connect(path)
        self._connection.execute("PRAGMA mmap_size = 1073741824")

    def close(self) -> None:
        self._connection.close()

    def scan(self) -> float:
        total = count = 0
        started = perf_counter()
        rows = self._connection.execute("SELECT offset, value FROM log ORDER BY offset")
        for _offset, value in rows:
            total += len(value)
            count += 1
        elapsed = perf_counter() - started
        assert total > 0
        return count / elapsed
