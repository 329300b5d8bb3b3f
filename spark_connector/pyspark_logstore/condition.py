"""The option ``where``: select the records of a chunk by a condition.

The condition is in logstore's language and may use every field of a record, its headers and its
JSON.  It is evaluated for each record, which takes a few microseconds.  A filter that Spark can
push down is faster.  In a stream Spark pushes nothing down; there ``where`` avoids the transfer of
records to Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from logstore import Columns, Record, Where
from pyspark_logstore.topics import TopicPartition

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Condition"]

FIELDS = frozenset({"offset", "timestamp", "key", "value", "headers"})


class _Row:
    """A row of a chunk, with a record's names.  What is not asked for is not made."""

    __slots__ = ("_chunk", "partition", "row", "topic")

    def __init__(self, chunk: Columns, which: TopicPartition) -> None:
        self._chunk = chunk
        self.row = 0
        self.topic = which.topic
        self.partition = which.number

    @property
    def offset(self) -> int:
        return int(self._chunk.offsets[self.row])

    @property
    def timestamp(self) -> int:
        return int(self._chunk.timestamps[self.row])

    @property
    def key(self) -> bytes | None:
        key: bytes | None = self._chunk.keys[self.row]
        return key

    @property
    def value(self) -> bytes | None:
        value: bytes | None = self._chunk.values[self.row]
        return value

    @property
    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        return self._chunk.headers(self.row)


class Condition:
    """A condition, and the partition whose records it is asked about."""

    def __init__(self, text: str, now_ms: int, which: TopicPartition) -> None:
        self._test = Where(text, now_ms=now_ms)
        self._which = which

    def mask(self, chunk: Columns) -> npt.NDArray[np.bool_]:
        """Whether each row of a chunk, which has all FIELDS, is picked."""
        import numpy

        mask = numpy.empty(len(chunk), numpy.bool_)
        row = _Row(chunk, self._which)
        for number in range(len(chunk)):
            row.row = number
            mask[number] = self._test(cast(Record, row))
        return mask
