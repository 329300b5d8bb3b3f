"""BatchReader: what ``spark.read`` uses.

The driver makes one in a process of its own, which plans and sends the splits away; tasks get a
pickled copy for reading.  So it holds plain values only.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from pyspark_logstore.filters import Pushed
from pyspark_logstore.offsets import resolve
from pyspark_logstore.options import SourceOptions
from pyspark_logstore.plan import Chain, Split, plan
from pyspark_logstore.reading import read_chain, read_split
from pyspark_logstore.schema import check_schema
from pyspark_logstore.session import PUSH_DOWN
from pyspark_logstore.topics import Subscription

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

__all__ = ["BatchReader", "PushDownReader", "reader_class"]

log = logging.getLogger("pyspark_logstore")

PUSH_DOWN_PROCESS = "pyspark.sql.worker.data_source_pushdown_filters"
LIMIT_MAX = 1_000_000  # rows: more of them are better read side by side


class BatchReader(DataSourceReader):
    """Reads a range of each partition, once."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._columns = check_schema(schema)
        self._options = options
        self._schema = schema
        self._pushed = Pushed()

    def partitions(self) -> list[InputPartition]:
        """The splits.  Reads names, sizes and indexes, and only where something is wanted."""
        with Subscription(self._options) as subscription:
            names = subscription.names()
            partitions = subscription.partitions(wanted=self._pushed.wants)
            ranges = resolve(self._options, partitions, names)
            splits = plan(ranges, partitions, self._options, self._pushed)
        limits = (self._options.records_max, self._pushed.rows_max)
        known = [limit for limit in limits if limit is not None]
        if known and splits:
            return [Chain(splits, min(known))]
        return list(splits)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split; in a task."""
        if isinstance(partition, Chain):
            return read_chain(partition, self._schema, self._options, self._pushed)
        if not isinstance(partition, Split):
            return iter(())  # Spark makes one task of its own when there is no split
        return read_split(partition, self._schema, self._options, self._pushed)


class PushDownReader(BatchReader):
    """The same, for a process that hands filters down.

    Spark refuses to plan for a reader that has this method while push-down is switched off, as it
    is by default; then `reader_class` chooses the other one.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take what narrows the scan exactly; return what Spark must still do."""
        return self._pushed.push(filters, self._columns)

    def pushLimit(self, limit: int) -> bool:
        """Read no more than so many rows, in one task.  Spark asks for it from 5.0 on."""
        if limit > LIMIT_MAX:
            return False
        self._pushed.rows_max = limit
        return True


def reader_class() -> type[BatchReader]:
    """The reader for this process: Spark hands filters down in one that runs nothing else."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if PUSH_DOWN_PROCESS in sys.modules or getattr(main, "name", None) == PUSH_DOWN_PROCESS:
        return PushDownReader
    if _push_down_is_off():
        _tell_how_to_push_down()
    return BatchReader


def _push_down_is_off() -> bool:
    """Return whether Spark plans without push-down.  Only our caller's frame has this argument."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_main" and "enable_pushdown" in frame.f_locals:
            return frame.f_locals["enable_pushdown"] is False
        frame = frame.f_back
    return False


@functools.cache  # once in a process, and the process plans many queries
def _tell_how_to_push_down() -> None:
    log.warning(
        "filters on topic, partition, offset and timestamp are not pushed down, so that all of the "
        'log is read: spark.conf.set("%s", "true")',
        PUSH_DOWN,
    )
