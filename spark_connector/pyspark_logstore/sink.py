"""The sinks: ``df.write`` and ``df.writeStream`` with ``format("logstore")``.

Tasks encode rows into prepared files; the driver commits them (see `commits`).  Rows have the
columns of Spark's Kafka sink: `value` (string or binary), and if wanted `key`, `headers`, `topic`,
`partition`; also `timestamp`.  Other columns are not written.

A writer is pickled and used in other processes: it holds options and a schema, nothing that is
open.
"""

from __future__ import annotations

import dataclasses
import socket
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from pyspark_logstore.commits import Committer, SinkError
from pyspark_logstore.prepared import PreparedFile
from pyspark_logstore.sink_options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

__all__ = ["BatchSink", "StreamSink", "check_columns"]

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclasses.dataclass
class Prepared(WriterCommitMessage):
    """The message of a task to the driver: its prepared file."""

    file: PreparedFile | None
    application: str
    query_id: str


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Refuse rows that cannot be written, before the first is: SinkError with the remedy."""
    from pyspark.sql import types as t

    text = (t.StringType, t.BinaryType)
    columns = {field.name: field.dataType for field in schema.fields}
    if "value" not in columns:
        raise SinkError(
            f"there is no column 'value' among {', '.join(columns) or 'no columns at all'}: "
            f"select it, for example with to_json(struct('*')).alias('value')"
        )
    _expect(columns, "value", text, "string or binary: use to_json(struct(...)) or a cast")
    _expect(columns, "key", text, "string or binary: use a cast")
    _expect(columns, "topic", (t.StringType,), "string")
    _expect(columns, "partition", (t.IntegerType,), "int: use col('partition').cast('int')")
    if options.timestamps == "keep":
        _expect(columns, "timestamp", (t.TimestampType,),
                "timestamp: use a cast, or the option timestamps=now")  # fmt: skip
    if "headers" in columns and options.includeHeaders:
        wanted = "array<struct<key:string,value:binary>>"
        found = columns["headers"].simpleString()
        if found != wanted:
            raise SinkError(f"column 'headers' must be {wanted}, not {found}")
    if options.topic is None and "topic" not in columns:
        raise SinkError("no topic: set the option topic, or give rows a column 'topic'")


def _expect(columns: dict[str, DataType], name: str, kinds: tuple[type, ...], wanted: str) -> None:
    found = columns.get(name)
    if found is not None and not isinstance(found, kinds):
        raise SinkError(f"column {name!r} is {found.simpleString()}, but must be {wanted}")


class _Sink:
    """What both sinks share."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        check_columns(schema, options)
        self.options = options
        self.schema = schema
        self.overwrite = overwrite
        self._make_store()

    def _make_store(self) -> None:
        import logstore

        root = self.options.root
        if root.is_dir() and any(root.iterdir()):
            return
        if not self.options.createTopic:
            raise SinkError(f"there is no store at {root}: check the path, or let createTopic=true")
        logstore.open(root).close()

    def _prepare(
        self, batches: Iterable[Any], application: str, query_id: str, batch_id: int | None
    ) -> Prepared:
        """In a task: rows into a prepared file."""
        from pyspark_logstore.prepared import PreparedWriter
        from pyspark_logstore.routing import Router

        options = self.options
        root = options.root
        if not root.is_dir():
            raise SinkError(
                f"the task on {socket.gethostname()} cannot see {root}, where the driver has the "
                f"store: use a path on storage that all executors share"
            )
        with PreparedWriter(
            root,
            application,
            batch_id,
            compression=options.compression,
            batch_bytes=options.batchBytes,
            fsync=options.durability == "fsync",
        ) as writer:
            with Router(options, writer) as router:
                for batch in self._as_arrow(batches):
                    router.add(batch)
            return Prepared(writer.finish(), application, query_id)

    def _as_arrow(self, batches: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        """Arrow batches as they are; rows, which Spark 4.0 gives to streams, in chunks."""
        import pyarrow as pa

        rows: list[Any] = []
        for item in batches:
            if isinstance(item, pa.RecordBatch):
                yield item
                continue
            rows.append(item.asDict(recursive=True))
            if len(rows) == 10_000:
                yield self._batch_of(rows)
                rows = []
        if rows:
            yield self._batch_of(rows)

    def _batch_of(self, rows: list[Any]) -> pa.RecordBatch:
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema

        return pa.RecordBatch.from_pylist(rows, to_arrow_schema(self.schema, timezone="UTC"))

    def _committer(self) -> Committer:
        options = self.options
        return Committer(
            options.root,
            fsync=options.durability == "fsync",
            lock_timeout=options.lockTimeout,
            orphan_age=options.orphanAge,
        )

    def _commit(self, messages: Sequence[Any], application: str, batch_id: int, *,
                query_id: str, once: bool) -> None:  # fmt: skip
        files = [m.file for m in messages if m is not None and m.file is not None]
        topics = sorted({extent.topic for file in files for extent in file.extents})
        if self.options.topic is not None:
            topics = [self.options.topic]
        self._committer().commit(
            application,
            batch_id,
            files,
            query_id=query_id,
            once=once,
            create=dict.fromkeys(topics, self.options.partitions)
            if self.options.createTopic
            else {},
            overwrite=topics if self.overwrite else (),
        )

    def _abort(self, messages: Sequence[Any], application: str, batch_id: int | None) -> None:
        files = [None if message is None else message.file for message in messages]
        self._committer().abort(files, application=application, batch_id=batch_id)


class BatchSink(_Sink, DataSourceArrowWriter):
    """``df.write.format("logstore")``: mode append or overwrite."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        _Sink.__init__(self, options, schema, overwrite)
        self.application = options.txnAppId or f"job {uuid.uuid4().hex}"
        if options.txnAppId is not None and options.txnVersion is None:
            raise SinkError(
                "txnAppId without txnVersion: give the number of this write, which grows with "
                "each; the same number again changes nothing"
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._prepare(iterator, self.application, "", self.options.txnVersion)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        version = self.options.txnVersion
        once = version is None
        self._commit(messages, self.application, version or 0, query_id="", once=once)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(messages, self.application, self.options.txnVersion)


# Spark 4.0 hands rows to streams; later ones Arrow batches.
_StreamWriter: Any = getattr(
    datasource, "DataSourceStreamArrowWriter", datasource.DataSourceStreamWriter
)


class StreamSink(_Sink, _StreamWriter):  # type: ignore[misc]
    """``df.writeStream.format("logstore")``: exactly once."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        _Sink.__init__(self, options, schema, overwrite)
        if options.txnVersion is not None:
            raise SinkError("txnVersion is for batch writes: a stream numbers its batches itself")

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        from pyspark import TaskContext

        context = TaskContext.get()
        query_id = batch_id = None
        if context is not None:
            query_id = context.getLocalProperty(QUERY_ID)
            batch_id = context.getLocalProperty(BATCH_ID)
        application = self.options.txnAppId or query_id
        if not application:
            raise SinkError("Spark does not tell the query's id here: set the option txnAppId")
        number = None if batch_id is None else int(batch_id)
        return self._prepare(iterator, application, query_id or "", number)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        told = [message for message in messages if isinstance(message, Prepared)]
        if told:
            self._commit(messages, told[0].application, batchId,
                         query_id=told[0].query_id, once=False)  # fmt: skip

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        told = [message for message in messages if isinstance(message, Prepared)]
        name = self.options.txnAppId or (told[0].application if told else "")
        self._abort(messages, name, batchId)
