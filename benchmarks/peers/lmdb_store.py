"""LMDB: values under 8-byte big-endian integer keys.

Not synced at commit, and written through the map: the fastest it can be asked to be, and still
as safe against a killed process as durability="os".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import lmdb


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def keys(count: int) -> list[bytes]:
    return [key(number) for number in range(count)]


def _open(path: Path, record_count: int) -> lmdb.Environment:
    map_size = max(1 << 26, record_count * 256)
    return lmdb.open(str(path), map_size=map_size, sync=False, metasync=False, writemap=True)


def write(path: Path, keys: Sequence[bytes], values: Sequence[bytes]) -> float:
    """One transaction, one append put a record, the keys made beforehand."""
    environment = _open(path, len(values))
    try:
        started = perf_counter()
        with environment.begin(write=True) as transaction:
            put = transaction.put
            for key, value in zip(keys, values, strict=True):
                put(key, value, append=True)
        return len(values) / (perf_counter() - started)
    finally:
        environment.close()


def write_many(path: Path, keys: Sequence[bytes], values: Sequence[bytes]) -> float:
    """One transaction, all records in one `putmulti`."""
    environment = _open(path, len(values))
    try:
        started = perf_counter()
        with environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(zip(keys, values, strict=True), append=True)
        return len(values) / (perf_counter() - started)
    finally:
        environment.close()


class Reader:
    """Returned values are bytes: measured, they are quicker here than `buffers=True`."""

    def __init__(self, path: Path) -> None:
        self._environment = lmdb.open(str(path), readonly=True, lock=False)

    def close(self) -> None:
        self._environment.close()

    def scan(self) -> float:
        total = 0
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            started = perf_counter()
            for _key, value in cursor:
                total += len(value)
            elapsed = perf_counter() - started
            count = transaction.stat()["entries"]
        assert total > 0
        return count / elapsed

    def scan_values(self) -> float:
        """Values without their keys, hence without their offsets."""
        total = 0
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            started = perf_counter()
            for value in cursor.iternext(keys=False, values=True):
                total += len(value)
            elapsed = perf_counter() - started
            count = transaction.stat()["entries"]
        assert total > 0
        return count / elapsed

    def get(self, keys: Sequence[bytes]) -> float:
        total = 0
        with self._environment.begin() as transaction:
            get = transaction.get
            started = perf_counter()
            for key in keys:
                total += len(get(key, b""))
            elapsed = perf_counter() - started
        assert total > 0
        return len(keys) / elapsed
