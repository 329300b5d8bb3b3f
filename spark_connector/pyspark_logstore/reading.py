"""A task: the records of one split as Arrow batches, made from column buffers.

No Python object is made for a record.  Keys, values, offsets and headers are handed on as they lie
in the decoder's memory; topic, partition and timestampType are made once and sliced; times are
multiplied, milliseconds to Spark's microseconds.  Only what the schema names is decoded.

Runs in Spark's worker processes: it opens the partition by its path, reads and closes it.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from logstore import Columns, OffsetOutOfRangeError, Partition
from pyspark_logstore.condition import FIELDS, Condition
from pyspark_logstore.filters import INT64_MAX, INT64_MIN, Pushed
from pyspark_logstore.metadata import BatchMetadata
from pyspark_logstore.offsets import Range, clamped
from pyspark_logstore.schema import METADATA, check_schema
from pyspark_logstore.topics import cannot_see

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pyspark_logstore.options import SourceOptions
    from pyspark_logstore.plan import Chain, Split

__all__ = ["read_chain", "read_split"]

log = logging.getLogger("pyspark_logstore")

DECODED = ("offset", "timestamp", "key", "value", "headers")


def read_split(
    split: Split, schema: StructType, options: SourceOptions, pushed: Pushed
) -> Iterator[pa.RecordBatch]:
    """The rows of a split, at most ``rowsPerBatch`` at a time."""
    batches = ArrowBatches(schema, split, options.batch_rows)
    spare_the_collector()
    fields = batches.fields
    if pushed.timed:
        fields = fields | {"timestamp"}
    if batches.metadata:
        fields = fields | {"offset"}
    condition = None
    if options.where is not None:
        condition = Condition(options.where, options.now_ms, split.which)
        fields = fields | FIELDS
    try:
        partition = Partition.open(split.path, readonly=True)
    except FileNotFoundError:
        raise cannot_see(split.path, "a task") from None
    with partition:
        wanted = clamped(split.which, partition, split.wanted, options)
        if batches.metadata:
            batches.follow(BatchMetadata(partition, wanted))
        for chunk in _chunks(partition, wanted, sorted(fields), split, options):
            mask = _mask(chunk, pushed) if pushed.timed else None
            if condition is not None:
                picked = condition.mask(chunk)
                mask = picked if mask is None else mask & picked
            if mask is None or mask.any():
                batch = batches.batch(chunk)
                yield batch if mask is None else _where(batch, mask)


@functools.cache
def spare_the_collector() -> None:
    """Take what this process has imported out of the collector's sight; once, when all is there.

    Spark's worker collects garbage after every task, while the next task waits for it.  Among the
    objects of all imported modules that takes longer than planning a query.
    """
    gc.freeze()


def read_chain(
    chain: Chain, schema: StructType, options: SourceOptions, pushed: Pushed
) -> Iterator[pa.RecordBatch]:
    """The rows of splits one after the other, until there are enough."""
    left = chain.rows_max
    for split in chain.splits:
        for batch in read_split(split, schema, options, pushed):
            yield batch if batch.num_rows <= left else batch.slice(0, left)
            left -= batch.num_rows
            if left <= 0:
                return


def _chunks(
    partition: Partition, wanted: Range, fields: list[str], split: Split, options: SourceOptions
) -> Iterator[Columns]:
    while wanted.size > 0:
        try:
            scan = partition.scan(
                wanted.start,
                wanted.end,
                isolation=options.isolation,
                on_corrupt="skip" if options.skip_corrupt else "raise",
            )
        except OffsetOutOfRangeError:
            wanted = clamped(split.which, partition, wanted, options)
            continue
        try:
            yield from scan.columns(options.batch_rows, fields=fields)
        except OffsetOutOfRangeError:
            # Deleted while we were reading: what is left is another range.
            rest = Range(max(wanted.start, scan.next_offset), wanted.end)
            wanted = clamped(split.which, partition, rest, options)
            continue
        for passed in scan.skipped:
            log.warning("%s: passed over damage: %s", split.which, passed)
        return


def _mask(chunk: Columns, pushed: Pushed) -> npt.NDArray[np.bool_]:
    import numpy

    times = chunk.timestamps
    assert times is not None
    mask = numpy.ones(len(times), numpy.bool_)
    if pushed.time_start > INT64_MIN:
        mask &= times >= pushed.time_start
    if pushed.time_end < INT64_MAX:
        mask &= times < pushed.time_end
    return mask


def _where(batch: pa.RecordBatch, mask: npt.NDArray[np.bool_]) -> pa.RecordBatch:
    """The rows that are wanted, without a copy where they lie side by side."""
    import numpy

    (rows,) = numpy.nonzero(mask)
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return batch.slice(first, len(rows))
    return batch.filter(_boolean(mask))


# pyarrow.array and pyarrow.scalar import pandas, which takes a third of a second in each worker:
# arrays are made from their buffers here.


def _boolean(mask: npt.NDArray[np.bool_]) -> pa.Array:
    import numpy
    import pyarrow as pa

    bits = numpy.packbits(mask, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, pa.py_buffer(bits)])


def _constant(value: int | str, type_: pa.DataType, rows: int) -> pa.Array:
    import numpy
    import pyarrow as pa

    if isinstance(value, int):
        numbers = numpy.full(rows, value, numpy.int32)
        return pa.Array.from_buffers(type_, rows, [None, pa.py_buffer(numbers)])
    text = value.encode()
    ends = numpy.arange(0, len(text) * (rows + 1), len(text), dtype=numpy.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(text * rows)]
    return pa.Array.from_buffers(type_, rows, buffers)


def arrow_schema_of(schema: StructType) -> pa.Schema:
    """The schema that Spark compares a batch with."""
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # Spark 4.0 and 4.1 know no other zone
        return to_arrow_schema(schema)


class ArrowBatches:
    """Chunks of columns as Arrow batches of a schema.  Holds what is the same for all of them."""

    def __init__(self, schema: StructType, split: Split, rows: int) -> None:
        self.schema = arrow_schema_of(schema)
        self.columns = check_schema(schema)
        wanted = set(self.columns.values())
        self.metadata = bool(wanted & set(METADATA))
        self.fields = {name for name in DECODED if name in wanted}
        constants: dict[str, int | str] = {
            "topic": split.which.topic,
            "partition": split.which.number,
        }
        self._batches: BatchMetadata | None = None
        self._made: list[Callable[[Columns, Any], pa.Array]] = []
        for field, name in zip(self.schema, self.columns.values(), strict=True):
            if name in constants:
                self._made.append(_sliced(_constant(constants[name], field.type, rows)))
            elif name == "timestampType":
                kinds = [_constant(kind, field.type, rows) for kind in (0, 1)]
                self._made.append(_by_kind(kinds))
            elif name in METADATA:
                self._made.append(_from_metadata(name, field.type))
            else:
                self._made.append(MAKERS[name](field.type))

    def follow(self, batches: BatchMetadata) -> None:
        """Take the metadata columns from here."""
        self._batches = batches

    def batch(self, chunk: Columns) -> pa.RecordBatch:
        """One chunk as a batch, on the chunk's memory."""
        import pyarrow as pa

        decoded = chunk.to_arrow()
        decoded = {name: decoded.column(name) for name in decoded.schema.names}
        if self._batches is not None:
            decoded.update(self._batches.columns(chunk.offsets))
        arrays = [make(chunk, decoded) for make in self._made]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


# ---- columns ----


def _sliced(column: pa.Array) -> Callable[[Columns, Any], pa.Array]:
    return lambda chunk, decoded: column.slice(0, len(chunk))


def _by_kind(columns: list[pa.Array]) -> Callable[[Columns, Any], pa.Array]:
    return lambda chunk, decoded: columns[chunk.timestamp_type].slice(0, len(chunk))


def _offset(type_: pa.DataType) -> Callable[[Columns, Any], pa.Array]:
    return lambda chunk, decoded: decoded["offset"]


def _bytes(name: str) -> Callable[[Any], Callable[[Columns, Any], pa.Array]]:
    def of_type(type_: pa.DataType) -> Callable[[Columns, Any], pa.Array]:
        # A string column has the same layout; like CAST, this does not look at the bytes.
        return lambda chunk, decoded: decoded[name].view(type_)

    return of_type


def _timestamp(type_: pa.DataType) -> Callable[[Columns, Any], pa.Array]:
    def make(chunk: Columns, decoded: Any) -> pa.Array:
        import pyarrow as pa

        times = chunk.timestamps * 1000
        return pa.Array.from_buffers(type_, len(times), [None, pa.py_buffer(times)])

    return make


def _headers(type_: pa.DataType) -> Callable[[Columns, Any], pa.Array]:
    """Null for a record without headers, as Spark's Kafka source has it."""

    def make(chunk: Columns, decoded: Any) -> pa.Array:
        import numpy
        import pyarrow as pa

        lists = decoded["headers"]
        ends = lists.offsets
        numbers = numpy.frombuffer(ends.buffers()[1], numpy.int32)[: len(ends)]
        none = _boolean(numpy.diff(numbers) == 0)
        return pa.ListArray.from_arrays(ends, lists.values, type=type_, mask=none)

    return make


def _from_metadata(name: str, type_: pa.DataType) -> Callable[[Columns, Any], pa.Array]:
    return lambda chunk, decoded: decoded[name].cast(type_)


MAKERS: dict[str, Callable[[Any], Callable[[Columns, Any], Any]]] = {
    "offset": _offset,
    "key": _bytes("key"),
    "value": _bytes("value"),
    "timestamp": _timestamp,
    "headers": _headers,
}
