"""BatchReader: what ``spark.read`` uses.

The driver makes one in a process of its own, which plans and sends the splits away; tasks get a
pickled copy for reading.  So it holds plain values only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from pyspark_logstore.filters import Pushed
from pyspark_logstore.offsets import resolve
from pyspark_logstore.options import SourceOptions
from pyspark_logstore.plan import Split, plan
from pyspark_logstore.reading import read_split
from pyspark_logstore.schema import check_schema
from pyspark_logstore.topics import Subscription

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

__all__ = ["BatchReader", "PushDownReader", "reader_class"]

PUSH_DOWN_PROCESS = "pyspark.sql.worker.data_source_pushdown_filters"


class BatchReader(DataSourceReader):
    """Reads a range of each partition, once."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._columns = check_schema(schema)
        self._options = options
        self._schema = schema
        self._pushed = Pushed()

    def partitions(self) -> list[InputPartition]:
        """The splits.  Reads names, sizes and indexes."""
        with Subscription(self._options) as subscription:
            partitions = subscription.partitions()
            ranges = resolve(self._options, partitions)
            return list(plan(ranges, partitions, self._options, self._pushed))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split; in a task."""
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


def reader_class() -> type[BatchReader]:
    """The reader for this process: Spark hands filters down in one that runs nothing else."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if PUSH_DOWN_PROCESS in sys.modules or getattr(main, "name", None) == PUSH_DOWN_PROCESS:
        return PushDownReader
    return BatchReader
