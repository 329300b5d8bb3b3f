"""Router: which rows of a task go to which partition, column by column.

Explicit partition numbers first, then the key's hash, then, for rows without either, one partition
for all such rows of an Arrow batch, and another for the next.
"""

from __future__ import annotations

import random
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import logstore
from logstore import BytesColumn, KeyPartitioner, PartitionConfig
from pyspark_logstore.commits import SinkError
from pyspark_logstore.prepared import PreparedWriter
from pyspark_logstore.sink_options import SinkOptions

__all__ = ["Router"]

NOW = -(1 << 63)


class Router:
    """Hands the rows of one task to a PreparedWriter.  Reads the store for its topics only."""

    def __init__(self, options: SinkOptions, writer: PreparedWriter) -> None:
        self._options = options
        self._writer = writer
        self._store = logstore.open(options.root, readonly=True)
        self._topics: dict[str, tuple[int, PartitionConfig | None]] = {}
        self._keys = KeyPartitioner()
        self._own = options.partitioner_function()
        self._random = random.Random()
        self._turn = self._random.randrange(1 << 30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._store.close()

    def add(self, batch: pa.RecordBatch) -> None:
        """Encode the rows of an Arrow batch."""
        if not batch.num_rows:
            return
        columns = {name: batch.column(name) for name in batch.schema.names}
        values = BytesColumn.from_arrow(columns["value"])
        keys = BytesColumn.from_arrow(columns["key"]) if "key" in columns else None
        times = self._times(columns.get("timestamp"))
        headers = columns.get("headers") if self._options.includeHeaders else None
        if headers is not None and pc.sum(pc.list_value_length(headers)).as_py() in (None, 0):
            headers = None
        for topic, rows in self._by_topic(columns.get("topic"), batch.num_rows):
            for partition, chosen in self._by_partition(topic, rows, values, keys, columns):
                config = self._topic(topic)[1]
                if headers is not None:
                    self._add_rows(topic, partition, config, chosen, values, keys, times, headers)
                    continue
                self._writer.append_columns(
                    topic, partition, values, keys=keys, timestamps=times, rows=chosen,
                    config=config,
                )  # fmt: skip

    def _times(self, column: Any) -> Any:
        if column is None or self._options.timestamps == "now":
            return None
        milliseconds = pc.divide(column.cast(pa.timestamp("us")).cast(pa.int64()), 1000)
        return pc.fill_null(milliseconds, pa.scalar(NOW, pa.int64())).to_numpy(zero_copy_only=False)

    def _by_topic(self, column: Any, count: int) -> list[tuple[str, Any]]:
        """(topic, its rows); rows None: all of them."""
        if self._options.topic is not None:
            return [(self._options.topic, None)]
        if column.null_count:
            raise SinkError(
                "a row has no topic: fill the column 'topic', or set the option topic for all rows"
            )
        encoded = column.dictionary_encode()
        names = encoded.dictionary.to_pylist()
        if len(names) == 1:
            return [(names[0], None)]
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        return [(name, np.flatnonzero(codes == code)) for code, name in enumerate(names)]

    def _topic(self, name: str) -> tuple[int, PartitionConfig | None]:
        """Number of partitions and settings; of one that will be made, what it will have."""
        known = self._topics.get(name)
        if known is None:
            if name in self._store:
                topic = self._store[name]
                known = (len(topic), topic.config)
            elif self._options.createTopic:
                known = (self._options.partitions, None)
            else:
                raise SinkError(
                    f"there is no topic {name!r} in {self._options.root}: create it, or set the "
                    f"option createTopic to true"
                )
            self._topics[name] = known
        return known

    def _by_partition(
        self, topic: str, rows: Any, values: BytesColumn, keys: BytesColumn | None, columns: Any
    ) -> list[tuple[int, Any]]:
        count = self._topic(topic)[0]
        explicit = columns.get("partition")
        if count == 1 and explicit is None and self._own is None:
            return [(0, rows)]
        numbers = np.full(len(values), -1, np.int64)
        if explicit is not None:
            numbers = pc.fill_null(explicit, -1).to_numpy(zero_copy_only=False).astype(np.int64)
            given = explicit.is_valid().to_numpy(zero_copy_only=False)
            if rows is not None:
                given = given & np.isin(np.arange(len(values)), rows)
            wrong = np.flatnonzero(given & ((numbers < 0) | (numbers >= count)))
            if len(wrong):
                raise SinkError(
                    f"a row names partition {numbers[wrong[0]]} of topic {topic!r}, which has "
                    f"{count}, 0 to {count - 1}: correct the column, leave it null to choose by "
                    f"key, or add partitions"
                )
        self._choose(numbers, count, values, keys)
        wanted = np.arange(len(values)) if rows is None else rows
        mine = numbers[wanted]
        return [
            (int(number), np.ascontiguousarray(wanted[mine == number], np.int64))
            for number in np.unique(mine)
        ]

    def _choose(
        self, numbers: Any, count: int, values: BytesColumn, keys: BytesColumn | None
    ) -> None:
        """Fill in the partitions that rows do not name."""
        open_rows = np.flatnonzero(numbers < 0)
        if not len(open_rows):
            return
        if self._own is not None:
            for row in open_rows:
                row_number = int(row)
                key = None if keys is None else keys[row_number]
                number: object = self._own(key, values[row_number], count)
                if not isinstance(number, int) or not 0 <= number < count:
                    raise SinkError(
                        f"the partitioner {self._options.partitioner!r} chose {number!r}: it must "
                        f"be an int from 0 to {count - 1}"
                    )
                numbers[row] = number
            return
        if self._options.kind_of_partitioner == "roundRobin":
            numbers[open_rows] = (self._turn + np.arange(len(open_rows))) % count
            self._turn += len(open_rows)
            return
        if keys is not None:
            numbers[open_rows] = self._keys.of_keys(keys, count)[open_rows]
            open_rows = np.flatnonzero(numbers < 0)
        if len(open_rows):
            self._turn += 1 + self._random.randrange(max(1, count - 1))
            numbers[open_rows] = self._turn % count

    def _add_rows(self, topic: str, partition: int, config: Any, rows: Any, values: BytesColumn,
                  keys: BytesColumn | None, times: Any, headers: Any) -> None:  # fmt: skip
        """One by one: headers have no columns of their own in a batch."""
        encoder = self._writer.encoder(topic, partition, config)
        keyless = False
        chosen = range(len(values)) if rows is None else map(int, rows)
        added = 0
        for row in chosen:
            key = None if keys is None else keys[row]
            keyless = keyless or key is None
            pairs = [(str(pair["key"]), pair["value"]) for pair in headers[row].as_py() or ()]
            time = None if times is None or times[row] == NOW else int(times[row])
            encoder.append(values[row], key=key, headers=pairs, timestamp=time)
            added += 1
        self._writer.added(topic, partition, added, keyless=keyless)
