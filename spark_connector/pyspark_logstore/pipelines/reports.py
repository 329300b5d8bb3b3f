"""Progress and reports of pipelines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["PipelineError", "Progress", "Report", "quiet", "read_topics", "units"]

Progress = Callable[[str], None]


class PipelineError(RuntimeError):
    """A job that cannot go on, with the remedy in the message."""


def quiet(_: str) -> None:
    """A Progress that prints nothing."""


class Report:
    """The base of all reports: frozen dataclasses of plain values."""

    @property
    def ok(self) -> bool:
        """Return whether there is no problem; decides the exit code of the command."""
        return True

    def as_json(self) -> str:
        """All fields."""
        fields: Any = self
        return json.dumps(dataclasses.asdict(fields), indent=1, default=str)


def units(size: float) -> str:
    """Bytes for people.

    >>> units(1_300_000)
    '1.3 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def read_topics(
    spark: SparkSession, store: str | Path, topics: list[str], **options: object
) -> DataFrame:
    """The records of topics as a DataFrame; `options` are the source's."""
    if not topics:
        raise PipelineError("name at least one topic")
    reader = spark.read.format("logstore").option("path", str(store))
    reader = reader.option("subscribe", ",".join(topics))
    for name, value in options.items():
        if value is not None:
            reader = reader.option(name, str(value))
    return reader.load()
