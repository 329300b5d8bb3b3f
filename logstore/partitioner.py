"""Partitioner: chooses the partition of a record.

A key always has the same partition, that of Kafka's Java client, as long as the number of
partitions does not change.  Records without a key stay with one partition until they fill a batch,
then another partition is chosen at random.  So batches are large and all partitions get records.

A partitioner is any callable of (key, value, number of partitions).  The store does not keep it on
disk: pass it again with every open for writing.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Protocol

from logstore._native import murmur2, partitions_of_keys
from logstore.record import BytesColumn

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "KeyPartitioner",
    "Partitioner",
    "RandomPartitioner",
    "RoundRobinPartitioner",
    "partition_for_key",
]

BATCH_BYTES = 16_384  # bytes after which Kafka's producer changes the partition


class Partitioner(Protocol):
    """A callable that chooses a partition."""

    def __call__(self, key: bytes | None, value: bytes | None, partitions: int, /) -> int:
        """Return a number from 0 to `partitions` - 1."""


def partition_for_key(key: bytes, partitions: int) -> int:
    """Return the partition that Kafka's Java client chooses for a key.

    >>> partition_for_key(b"foobar", 1000)
    166
    """
    # As in Kafka, the sign bit is cleared: not the absolute value.
    return (murmur2(key) & 0x7FFFFFFF) % partitions


class KeyPartitioner:
    """The default: by the key's hash, as Kafka's Java client; without a key, sticky.

    `seed` makes the choices without a key repeatable.  Threads may share one without a lock: a race
    only changes the partition one record too early or too late.
    """

    def __init__(self, *, batch_bytes: int = BATCH_BYTES, seed: int | None = None) -> None:
        if batch_bytes <= 0:
            raise ValueError(f"batch_bytes must be positive, not {batch_bytes}")
        self._batch_bytes = batch_bytes
        self._random = random.Random(seed)
        self._current = -1  # the partition of records without a key; -1: none chosen yet
        self._left = 0  # bytes until the next change

    def __call__(self, key: bytes | None, value: bytes | None, partitions: int, /) -> int:
        if key is not None:
            try:
                return (murmur2(key) & 0x7FFFFFFF) % partitions
            except TypeError:
                raise TypeError(
                    f"key must be bytes, not {type(key).__name__}: encode it, as in text.encode()"
                ) from None
        if self._left <= 0 or self._current >= partitions:
            self._move(partitions)
        self._left -= 1 if value is None else max(1, len(value))
        return self._current

    def of_keys(self, keys: BytesColumn, partitions: int) -> npt.NDArray[np.int32]:
        """Return the choices for a column of keys; -1 for a row without a key."""
        import numpy

        return numpy.frombuffer(partitions_of_keys(*keys.buffers, partitions), numpy.int32)

    @property
    def batch_bytes(self) -> int:
        """Return the bytes after which records without a key change the partition."""
        return self._batch_bytes

    def move(self, partitions: int) -> int:
        """Choose another partition for records without a key; return it."""
        self._move(partitions)
        return self._current

    def _move(self, partitions: int) -> None:
        """Choose any other partition, if there is one."""
        previous = self._current
        if 0 <= previous < partitions and partitions > 1:
            self._current = (previous + 1 + self._random.randrange(partitions - 1)) % partitions
        else:
            self._current = self._random.randrange(partitions)
        self._left = self._batch_bytes

    def __repr__(self) -> str:
        return f"KeyPartitioner(batch_bytes={self._batch_bytes})"


class RoundRobinPartitioner:
    """Each record to the next partition in turn; the key is ignored.

    Threads may share one: `next` of a count is atomic, so each record gets its own turn.
    """

    def __init__(self) -> None:
        self._turns = itertools.count()

    def __call__(self, key: bytes | None, value: bytes | None, partitions: int, /) -> int:
        return next(self._turns) % partitions

    def __repr__(self) -> str:
        return "RoundRobinPartitioner()"


class RandomPartitioner:
    """Each record to a random partition; the key is ignored.  `seed` makes it repeatable."""

    def __init__(self, *, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def __call__(self, key: bytes | None, value: bytes | None, partitions: int, /) -> int:
        return self._random.randrange(partitions)

    def __repr__(self) -> str:
        return "RandomPartitioner()"
