"""LogstoreDataSource: what Spark asks for readers and writers by the name ``logstore``."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource

__all__ = ["LogstoreDataSource"]


class LogstoreDataSource(DataSource):
    """``format("logstore")``.  Options and schema are those of Spark's Kafka source, and a few."""

    @classmethod
    def name(cls) -> str:
        """What users write in ``format()``."""
        return "logstore"
