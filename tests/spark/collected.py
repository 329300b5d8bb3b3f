"""A streaming query that is run to its end, and what came out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession


class Collected:
    """Runs a query to where the logs end now; keeps the rows of every micro-batch."""

    def __init__(self, spark: SparkSession, tmp_path: Path) -> None:
        self.spark = spark
        self.checkpoint = tmp_path / "checkpoint"
        self.batches: list[list[tuple[int, int]]] = []

    def run(self, frame: DataFrame, **trigger: Any) -> list[dict[str, Any]]:
        def keep(batch: DataFrame, number: int) -> None:
            rows = [(row.partition, row.offset) for row in batch.collect()]
            self.batches.append(sorted(rows))

        query = (
            frame.select("partition", "offset")
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(**(trigger or {"availableNow": True}))
            .start()
        )
        try:
            assert query.awaitTermination(120), query.lastProgress
        finally:
            query.stop()
        return [json.loads(progress.json) for progress in query.recentProgress]

    @property
    def rows(self) -> list[tuple[int, int]]:
        return sorted(row for batch in self.batches for row in batch)


def offset_in(progress: Any) -> Any:
    """An offset of a progress report, where Spark may have it as text."""
    return json.loads(progress) if isinstance(progress, str) else progress
