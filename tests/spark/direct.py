"""The source without Spark: plans and reads in this process, through the same calls."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType
from pyspark_logstore.batch import BatchReader, PushDownReader
from pyspark_logstore.options import SourceOptions
from pyspark_logstore.plan import Split
from pyspark_logstore.schema import source_schema


def reader(path: Path, schema: StructType | None = None, **options: Any) -> PushDownReader:
    """A reader, pickled once, as it is on its way to a task."""
    given = {name.replace("__", "."): str(value) for name, value in options.items()}
    parsed = SourceOptions.parse({"path": str(path), **given})
    made = PushDownReader(parsed, source_schema(parsed) if schema is None else schema)
    return pickle.loads(pickle.dumps(made))


def splits(path: Path, **options: Any) -> list[Split]:
    found = reader(path, **options).partitions()
    assert all(isinstance(split, Split) for split in found)
    return found  # type: ignore[return-value]


def read(path: Path, schema: StructType | None = None, **options: Any) -> pa.Table:
    """All rows, split after split."""
    made = reader(path, schema, **options)
    return table(made)


def table(made: BatchReader) -> pa.Table:
    planned = pickle.loads(pickle.dumps(made.partitions()))
    batches = [batch for split in planned for batch in made.read(split)]
    return pa.Table.from_batches(batches) if batches else pa.table({"offset": []})


def offsets(path: Path, **options: Any) -> list[int]:
    return read(path, **options)["offset"].to_pylist()
