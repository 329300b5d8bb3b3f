"""LogstoreDataSource: what Spark asks for readers and writers by the name ``logstore``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

__all__ = ["LogstoreDataSource"]


class LogstoreDataSource(DataSource):
    """``format("logstore")``.  Options and schema are those of Spark's Kafka source, and a few."""

    @classmethod
    def name(cls) -> str:
        """What users write in ``format()``."""
        return "logstore"

    def schema(self) -> StructType:
        """The columns when the user gave no schema."""
        from pyspark_logstore.options import SourceOptions
        from pyspark_logstore.schema import source_schema

        return source_schema(SourceOptions.parse(self.options, streaming=None))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``."""
        from pyspark_logstore.batch import reader_class
        from pyspark_logstore.options import SourceOptions

        return reader_class()(SourceOptions.parse(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For ``spark.readStream``."""
        from pyspark_logstore.options import SourceOptions
        from pyspark_logstore.stream import StreamReader

        return StreamReader(SourceOptions.parse(self.options, streaming=True), schema)

    # ---- sinks ----

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For ``df.write``."""
        from pyspark_logstore.sink import BatchSink
        from pyspark_logstore.sink_options import SinkOptions

        return BatchSink(SinkOptions.parse(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """For ``df.writeStream``."""
        from pyspark_logstore.sink import StreamSink
        from pyspark_logstore.sink_options import SinkOptions

        return StreamSink(SinkOptions.parse(self.options), schema, overwrite)
