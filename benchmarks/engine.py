"""Engine: how the bars reach logstore, and what they read back from the files it wrote.

The only place that imports logstore, so that peers can be measured without it.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

# The engine may be missing, and is then Any to the type checker as well.
Log = Any

# The start of a v2 batch: base offset, length of what follows these twelve bytes.
_PREFIX = struct.Struct(">qi")
BATCH_HEADER_BYTES = 61
_RECORD_COUNT = struct.Struct(">i")
_RECORD_COUNT_AT = 57

# Per value, in a large batch of plain records: what a stand-in assumes before there is an engine.
RECORD_OVERHEAD_BYTES = 8


def installed() -> bool:
    try:
        return hasattr(importlib.import_module("logstore"), "Partition")
    except ImportError:
        return False


def open_log(path: Path, *, durability: str = "os", **config: object) -> Log:
    """A Partition; `path` ends in `topic-number`."""
    logstore = importlib.import_module("logstore")
    return logstore.Partition.open(
        path, durability=durability, config=logstore.PartitionConfig(**config)
    )


def open_store(path: Path, *, durability: str = "os") -> Log:
    """A Store; with `durability="os"`, as `open_log`."""
    return importlib.import_module("logstore").open(path, durability=durability)


def open_cluster(path: Path) -> Log:
    """Three nodes in this process."""
    return importlib.import_module("logstore").Cluster(path, nodes=3, durability="os")


def consumer(store: Log, topic: str, **options: object) -> Log:
    return importlib.import_module("logstore").Consumer(store, topic, **options)


def timing_wheel() -> Any:
    return importlib.import_module("logstore.timers").TimingWheel()


def producer(store: Log, transactional_id: str | None = None) -> Any:
    return importlib.import_module("logstore").Producer(store, transactional_id)


def encoded(values: list[bytes]) -> bytes:
    """One batch of at most 1 MiB."""
    encoder = importlib.import_module("logstore").BatchEncoder(batch_bytes=1 << 20)
    for value in values:
        encoder.append(value)
    return bytes(encoder.take())


def compactor(log: Log, *, memory_bytes: int) -> Any:
    return importlib.import_module("logstore").Compactor(log, memory_bytes=memory_bytes)


def fill(path: Path, lists: Iterable[list[bytes]]) -> None:
    """A cleanly closed partition that holds these lists, each handed over in one `extend`."""
    with open_log(path) as log:
        for values in lists:
            log.extend(values)


def write_buffered(log: Log, values: list[bytes]) -> float:
    """Records a second through a Writer, its close included."""
    started = perf_counter()
    with log.writer() as out:
        append = out.append
        for value in values:
            append(value)
    return len(values) / (perf_counter() - started)


def append_each(log: Log, values: list[bytes]) -> float:
    """Records a second, one call of `append` for each."""
    append = log.append
    started = perf_counter()
    for value in values:
        append(value)
    return len(values) / (perf_counter() - started)


def log_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.log"))


def log_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in log_files(path))


def side_bytes(path: Path) -> int:
    """Everything beside the records: indexes, snapshots, checkpoints."""
    files = (file for file in path.parent.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files if file.suffix != ".log")


@dataclass(frozen=True, slots=True)
class Batch:
    header: bytes
    records: bytes  # compressed, if the batch is

    @property
    def record_count(self) -> int:
        (count,) = _RECORD_COUNT.unpack_from(self.header, _RECORD_COUNT_AT)
        return int(count)


def batches(path: Path) -> Iterator[Batch]:
    """Every batch of a partition, as it is on disk."""
    for file in log_files(path):
        data = file.read_bytes()
        position = 0
        while position + BATCH_HEADER_BYTES <= len(data):
            _, length = _PREFIX.unpack_from(data, position)
            body = position + BATCH_HEADER_BYTES
            end = position + _PREFIX.size + length
            if length <= 0:
                break  # preallocated, not written yet
            yield Batch(data[position:body], data[body:end])
            position = end


def records_per_batch(path: Path) -> float:
    counts = [batch.record_count for batch in batches(path)]
    return sum(counts) / len(counts)
