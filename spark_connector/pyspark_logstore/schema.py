"""The columns of the source: those of Spark's Kafka source, in its order, and a few on request.

A reader gets the schema of the query: the one below, or the user's.  Only its columns are decoded.
A user prunes columns with a schema, because Spark does not push down a projection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pyspark_logstore.options import OptionError

if TYPE_CHECKING:
    from pyspark_logstore.options import SourceOptions

__all__ = ["HEADERS", "METADATA", "check_schema", "source_schema"]

HEADERS = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)
RECORD: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
}
METADATA: dict[str, DataType] = {
    "leaderEpoch": IntegerType(),
    "batchOffset": LongType(),
    "producerId": LongType(),
    "sequence": IntegerType(),
    "isControl": BooleanType(),
    "segment": StringType(),
    "position": LongType(),
    "compressionType": StringType(),
}
# The types that a user's schema may have instead, for the same bytes.
ALSO: dict[str, tuple[DataType, ...]] = {
    "key": (StringType(),),
    "value": (StringType(),),
    "timestamp": (TimestampNTZType(),),
}


def source_schema(options: SourceOptions) -> StructType:
    """What the source shows when the user gave no schema."""
    types = dict(RECORD)
    if options.headers:
        types["headers"] = HEADERS
    if options.metadata:
        types.update(METADATA)
    if options.columns:
        types = {name: _type_of(name) for name in map(_canonical, options.columns)}
    return StructType([StructField(name, type_) for name, type_ in types.items()])


def check_schema(schema: StructType) -> dict[str, str]:
    """The source's column for each of a schema's; OptionError names one that cannot be."""
    columns = {}
    for column in schema.fields:
        name = _canonical(column.name)
        allowed = (_type_of(name), *ALSO.get(name, ()))
        if not any(_same(column.dataType, type_) for type_ in allowed):
            raise OptionError(
                "schema",
                f"column {column.name!r} cannot be {column.dataType.simpleString()}: it is "
                f"{' or '.join(type_.simpleString() for type_ in allowed)}",
            )
        columns[column.name] = name
    if len(set(columns.values())) < len(columns):
        raise OptionError("schema", "names a column twice")
    return columns


def _canonical(name: str) -> str:
    """Return a column's name in the source's spelling.  Spark ignores the case of names."""
    known = {column.lower(): column for column in (*RECORD, "headers", *METADATA)}
    found = known.get(name.lower())
    if found is None:
        raise OptionError("columns", f"there is no {name!r}: known are {_listed(known.values())}")
    return found


def _type_of(name: str) -> DataType:
    return HEADERS if name == "headers" else {**RECORD, **METADATA}[name]


def _same(given: DataType, wanted: DataType) -> bool:
    return given.simpleString() == wanted.simpleString()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
