"""Small functions that tests of several packages use: read a log, damage a file, wait for a thread.

`tests.conftest` has the fixtures; this module has plain functions, which a test imports by name.
"""

from __future__ import annotations

import gc
import shutil
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import crc32c
import pytest

from logstore import Partition, Store
from logstore.store.store import abandon_store

PATIENCE = 180.0  # seconds that a test waits for a thread or a process before it fails


def values(records: Iterable[Any]) -> list[Any]:
    """Return the value of each record; a Partition iterates over its records."""
    return [record.value for record in records]


def committed(log: Partition) -> list[bytes | None]:
    return values(log.scan(isolation="read_committed"))


def topic_values(
    store: Store, topic: str, isolation: Any = "read_uncommitted"
) -> list[bytes | None]:
    """Return the values of one partition after the other."""
    return [value for log in store[topic] for value in values(log.scan(isolation=isolation))]


def bases(log: Partition) -> list[int]:
    """Return the base offset of each segment."""
    return [segment.base_offset for segment in log.segments]


def flip(path: Path, position: int, bits: int = 0x10) -> None:
    """Change bits of one byte of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= bits
    path.write_bytes(content)


def with_crc(batch: bytes | bytearray) -> bytes:
    """Return a batch whose fields were changed, with the CRC of its new bytes."""
    return bytes(batch[:17]) + struct.pack(">I", crc32c.crc32c(batch[21:])) + bytes(batch[21:])


def peer_encode(module: str, records: Iterable[Any], codec: int, **producer: int) -> bytes:
    """Return a batch that the ``default_records`` module of another client encodes."""
    builder = pytest.importorskip(module).DefaultRecordBatchBuilder(
        magic=2,
        compression_type=codec,
        is_transactional=producer.get("transactional", 0),
        producer_id=producer.get("producer_id", -1),
        producer_epoch=producer.get("producer_epoch", -1),
        base_sequence=producer.get("base_sequence", -1),
        batch_size=1 << 24,
    )
    for offset, record in enumerate(records):
        builder.append(
            offset,
            timestamp=record.timestamp,
            key=record.key,
            value=record.value,
            headers=list(record.headers),
        )
    return bytes(builder.build())


def crash(log: Partition, to: str | Path = "crashed-0") -> Path:
    """Copy the directory of an open log to `to`, which is next to it, and return the copy.

    The copy is what a killed process leaves: the log was not closed.
    """
    return Path(shutil.copytree(log.path, log.path.parent / to))


def kill(store: Store) -> None:
    """Drop a store as a killed process does: nothing is written, and its lock is released."""
    for partition in store._opened_partitions():
        partition.parts.discard()
    abandon_store(store)


def wait_until(
    condition: Callable[[], object],
    what: str = "the condition",
    *,
    patience: float = PATIENCE,
    between: Callable[[], object] = lambda: time.sleep(0.005),
) -> None:
    """Return when the condition is true; fail if it is not within `patience` seconds.

    `between` is called after each look that found it false.  A pause of the whole machine counts
    as a second: nothing had the time to become true in it.
    """
    waited, last = 0.0, time.monotonic()
    while not condition():
        now = time.monotonic()
        waited += min(now - last, 1.0)
        last = now
        assert waited < patience, f"{what} did not become true in {patience:.0f} s"
        between()


def join(threads: Iterable[threading.Thread]) -> None:
    """Wait for the end of the threads; fail if one does not end."""
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def wait_until_freed(*references: weakref.ref[Any]) -> None:
    """Collect garbage until no object is left.

    A round of a background thread that is under way has a strong reference to its object.  close()
    does not wait for the thread, so one collection may be too early.
    """

    def freed() -> bool:
        gc.collect()
        return all(reference() is None for reference in references)

    wait_until(freed, "that the objects are freed")


def node_threads() -> set[threading.Thread]:
    """The threads of nodes and of their metadata trees."""
    names = ("logstore node", "logstore cluster", "logstore-metadata")
    return {each for each in threading.enumerate() if each.name.startswith(names)}
