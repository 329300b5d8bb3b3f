"""Partitioner: which partition of a topic a record goes to.

A key always leads to the same partition, the one a Java client would choose, as long as the number
of partitions stays.  Without a key, records stay with one partition for a batch's worth of bytes
and then move on at random, so that batches are large and all partitions get their share.

A partitioner is any callable of (key, value, number of partitions).  It is not stored: whoever
opens the store for writing says again which one to use.
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

BATCH_BYTES = 16_384  # what Kafka's producer collects before it changes the partition


class Partitioner(Protocol):
    """What chooses a partition."""

    def __call__(self, key: bytes | None, value: bytes | None, partitions: int, /) -> int:
        """A number from 0 to `partitions` - 1."""


def partition_for_key(key: bytes, partitions: int) -> int:
    """Kafka's choice for a key.

    >>> partition_for_key(b"foobar", 1000)
    166
    """
    return (murmur2(key) & 0x7FFFFFFF) % partitions


class KeyPartitioner:
    """The default: by the key's hash, as Kafka's Java client; without a key, sticky.

    `seed` makes the choices without a key repeatable.  Threads may share one: a race costs at most
    a change of partition a record early or late.
    """

    def __init__(self, *, batch_bytes: int = BATCH_BYTES, seed: int | None = None) -> None:
        if batch_bytes <= 0:
            raise ValueError(f"batch_bytes must be positive, not {batch_bytes}")
        self._batch_bytes = batch_bytes
        self._random = random.Random(seed)
        self._current = -1
        self._left = 0

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
        """The same choice for a whole column of keys; -1 where there is no key."""
        import numpy

        return numpy.frombuffer(partitions_of_keys(*keys.buffers, partitions), numpy.int32)

    @property
    def batch_bytes(self) -> int:
        """How long records without a key stay with one partition."""
        return self._batch_bytes

    def move(self, partitions: int) -> int:
        """Leave the partition that records without a key go to; the next one."""
        self._move(partitions)
        return self._current

    def _move(self, partitions: int) -> None:
        """To any other partition, if there is one."""
        previous = self._current
        if 0 <= previous < partitions and partitions > 1:
            self._current = (previous + 1 + self._random.randrange(partitions - 1)) % partitions
        else:
            self._current = self._random.randrange(partitions)
        self._left = self._batch_bytes

    def __repr__(self) -> str:
        return f"KeyPartitioner(batch_bytes={self._batch_bytes})"


class RoundRobinPartitioner:
    """Every record to the next partition in turn, whatever its key.

    Threads may share one: each record takes one turn.
    """

    def __init__(self) -> None:
        self._turns = itertools.count()

    def __call__(self, key: bytes | None, value: bytes | None, partitions: int, /) -> int:
        return next(self._turns) % partitions

    def __repr__(self) -> str:
        return "RoundRobinPartitioner()"


class RandomPartitioner:
    """Every record anywhere, whatever its key; `seed` makes it repeatable."""

    def __init__(self, *, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def __call__(self, key: bytes | None, value: bytes | None, partitions: int, /) -> int:
        return self._random.randrange(partitions)

    def __repr__(self) -> str:
        return "RandomPartitioner()"
