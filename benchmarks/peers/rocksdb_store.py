"""RocksDB, by rocksdict: raw bytes, write-ahead log on and not synced, no compression.

The memtable is large enough that nothing is flushed inside the clock; before a scan everything
is flushed and compacted into one level.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from rocksdict import DBCompressionType, Options, Rdict, ReadOptions, WriteBatch

BATCH_RECORDS = 1_000
MEMTABLE_BYTES = 256 << 20
READAHEAD_BYTES = 4 << 20


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(MEMTABLE_BYTES)
    options.set_compression_type(DBCompressionType.none())
    return options


def write(path: Path, keys: Sequence[bytes], values: Sequence[bytes]) -> float:
    store = Rdict(str(path), _options())
    try:
        started = perf_counter()
        for start in range(0, len(values), BATCH_RECORDS):
            end = start + BATCH_RECORDS
            batch = WriteBatch(raw_mode=True)
            put = batch.put
            for key, value in zip(keys[start:end], values[start:end], strict=True):
                put(key, value)
            store.write(batch)
        return len(values) / (perf_counter() - started)
    finally:
        store.close()


class Reader:
    def __init__(self, path: Path) -> None:
        self._store = Rdict(str(path), _options())
        self._store.flush()
        self._store.compact_range(None, None)

    def close(self) -> None:
        self._store.close()

    def scan(self) -> float:
        options = ReadOptions()
        options.set_readahead_size(READAHEAD_BYTES)
        total = count = 0
        started = perf_counter()
        for _key, value in self._store.items(read_opt=options):
            total += len(value)
            count += 1
        elapsed = perf_counter() - started
        assert total > 0
        return count / elapsed
