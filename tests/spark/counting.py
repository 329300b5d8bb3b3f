"""A source that counts: how many bytes planning and each task read, by the kernel's account."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType
from pyspark_logstore import LogstoreDataSource
from pyspark_logstore.batch import BatchReader, PushDownReader, reader_class
from pyspark_logstore.options import SourceOptions


def bytes_read() -> int:
    """What this process has read from files so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.removeprefix("rchar:"))
    raise AssertionError("the kernel does not count")


class CountingReader(BatchReader):
    def __init__(self, counts: str, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._counts = counts

    def partitions(self) -> list[InputPartition]:
        super().partitions()  # once before, so that importing does not count
        before = bytes_read()
        found = super().partitions()
        self._note("plan", bytes_read() - before)
        return found

    def read(self, partition: InputPartition) -> Iterator[Any]:
        import numpy  # noqa: F401
        import pyarrow.compute  # noqa: F401

        for _ in super().read(partition):
            break
        before = bytes_read()
        yield from super().read(partition)
        self._note("task", bytes_read() - before)

    def _note(self, what: str, count: int) -> None:
        Path(self._counts, f"{what}-{uuid.uuid4()}").write_text(str(count))


class CountingPushDownReader(CountingReader, PushDownReader): ...


class CountingSource(LogstoreDataSource):
    """``format("logstore_counting")``, with the directory for its counts in `counts`."""

    @classmethod
    def name(cls) -> str:
        return "logstore_counting"

    def _parsed(self) -> tuple[str, SourceOptions]:
        options = dict(self.options)
        counts = options.pop("counts")
        return counts, SourceOptions.parse(options)

    def schema(self) -> StructType:
        from pyspark_logstore.schema import source_schema

        return source_schema(self._parsed()[1])

    def reader(self, schema: StructType) -> CountingReader:
        pushes = reader_class() is PushDownReader
        return (CountingPushDownReader if pushes else CountingReader)(*self._parsed(), schema)


def counted(directory: Path) -> dict[str, int]:
    """Bytes by what they were read for."""
    sums = {"plan": 0, "task": 0}
    for path in directory.iterdir():
        sums[path.name.split("-")[0]] += int(path.read_text())
    return sums
