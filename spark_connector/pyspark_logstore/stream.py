"""StreamReader: what ``spark.readStream`` uses.

An offset of the stream is ``{"orders": {"0": 17, "1": 4}, "@ids": {"orders": "..."}}``: for each
partition the next offset to read, as Spark's Kafka source writes it, and the ids of the topics: a
topic that was made again is another log.  Spark keeps it in the checkpoint, and compares it as
text, so it is always written in the same order.

The driver keeps one reader for the life of a query, and asks it how far a micro-batch may reach and
for its splits; the same range gives the same rows again after a restart.  New partitions are read
from their start; one that disappears is an error, and is never taken for new when it is back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from pyspark_logstore.filters import Pushed
from pyspark_logstore.offsets import DataLossError, Range, clamped, end_of, resolve_start
from pyspark_logstore.options import SourceOptions
from pyspark_logstore.plan import ByteMap, Split, plan
from pyspark_logstore.reading import read_split
from pyspark_logstore.schema import check_schema
from pyspark_logstore.topics import Subscription, TopicPartition

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # before Spark 4.2: no limits from the engine, and no such trigger

    class ReadLimit: ...  # type: ignore[no-redef]

    class ReadAllAvailable(ReadLimit): ...  # type: ignore[no-redef]

    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        max_rows = 0

    class ReadMaxBytes(ReadLimit):  # type: ignore[no-redef]
        max_bytes = 0

    class ReadMinRows(ReadLimit): ...  # type: ignore[no-redef]

    class SupportsTriggerAvailableNow: ...  # type: ignore[no-redef]


if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from logstore import Partition

__all__ = ["StreamReader"]

log = logging.getLogger("pyspark_logstore")

IDS, LOST = "@ids", "@lost"  # no topic can have such a name

Ends = dict[TopicPartition, int]
StreamOffset = dict[str, Any]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads partitions from where the last micro-batch ended."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._opened: Subscription | None = None
        self._target: Ends | None = None  # where an AvailableNow query ends
        self._last_end: StreamOffset | None = None
        self._last_batch: float | None = None
        # Offsets that were gone, by where a batch began: it may be planned again.
        self._gone: dict[tuple[TopicPartition, int], int] = {}
        self._ends: Ends = {}  # last seen end of every partition: shows what a deletion loses
        self._warned: set[str] = set()
        self._uncommitted: Ends | None = None  # ends that are not yet committed for the group
        self._told_of_lock = False

    def __getstate__(self) -> dict[str, Any]:
        """Tasks read by path: what the driver has open stays there."""
        return {**self.__dict__, "_opened": None}

    def _subscription(self) -> Subscription:
        if self._opened is None:
            self._opened = Subscription(self._options)
        return self._opened

    # ---- where to start, how far to go ----

    def initialOffset(self) -> StreamOffset:
        """Where a query without a checkpoint starts."""
        subscription = self._subscription()
        start = resolve_start(self._options, subscription.partitions())
        self._last_end = _write(start, subscription.ids())
        return self._last_end

    def latestOffset(
        self, start: StreamOffset | None = None, limit: ReadLimit | None = None
    ) -> StreamOffset:
        """Where the next micro-batch ends, as far as the limits let it.

        Spark before 4.2 gives neither argument: then the end of the last micro-batch is the start.
        """
        if start is None:
            start = self._last_end
        ids = self._ids(start)
        begun = None if start is None else _read(start)
        ranges = self._backlog(begun)
        if begun is not None and not isinstance(limit, ReadAllAvailable):
            ranges = self._admitted(ranges, limit)
        self._note_gone(ranges)
        if any(wanted.size for wanted in ranges.values()):
            self._last_batch = time.monotonic()
        ends = {**(begun or {}), **{which: wanted.end for which, wanted in ranges.items()}}
        self._last_end = _write(ends, ids)
        return self._last_end

    def _note_gone(self, ranges: Mapping[TopicPartition, Range]) -> None:
        """Count what these ranges ask for below the starts of the logs, for the progress.

        Raises DataLossError before Spark writes the batch into the checkpoint, unless losing it is
        accepted: a restart would run that batch without asking for `latestOffset`.
        """
        there = self._subscription().partitions(missing_ok=True)
        for which, wanted in ranges.items():
            if which in there:
                gone = min(there[which].start_offset, wanted.end) - wanted.start
                if gone > 0:
                    if self._options.fail_on_data_loss:
                        clamped(which, there[which], wanted, self._options)
                    self._gone[which, wanted.start] = gone

    def _backlog(self, begun: Ends | None) -> dict[TopicPartition, Range]:
        """What could be read of each partition now."""
        partitions = self._partitions(begun)
        ranges = {}
        for which, partition in partitions.items():
            end = self._ends[which] = end_of(partition, self._options.committed)
            if self._target is not None:
                end = min(end, self._target.get(which, 0))
            first = partition.start_offset if begun is None or which not in begun else begun[which]
            if end < first and self._target is None and partition.end_offset < first:
                self._lost(
                    f"{which} ends at {partition.end_offset}, before offset {first} that was "
                    f"read up to: it was cut, or made again"
                )
            ranges[which] = Range(first, max(first, end))
        if self._target is not None and begun is not None:
            for which in set(ranges) - set(begun) - set(self._target):
                del ranges[which]  # it came after the query's end was fixed
        return ranges

    def _partitions(self, begun: Ends | None) -> dict[TopicPartition, Partition]:
        """What is there now, and nothing that was read before is missing."""
        partitions = self._subscription().partitions(missing_ok=begun is not None)
        missing = sorted(set(begun or ()) - set(partitions))
        if missing:
            names = ", ".join(map(str, missing))
            if len(missing) == len(begun or ()):
                # All at once is no deletion: a file system that is not mounted, or a moved store.
                raise DataLossError(
                    f"none of the partitions that were read is at {self._options.path} any more "
                    f"({names}): is it mounted? Nothing was skipped; start the query again when "
                    f"they are back"
                )
            self._lost(f"{names} of {self._options.path} are gone")
            for which in missing:
                first = (begun or {})[which]
                if self._ends.get(which, first) > first:
                    self._gone[which, first] = self._ends[which] - first
        return partitions

    def _lost(self, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLossError(
                f"{what}. Bring them back, or start a new checkpoint, or set failOnDataLoss to "
                f"false to go on with what there is"
            )
        if what not in self._warned:  # Spark asks many times a second
            self._warned.add(what)
            log.warning("%s; failOnDataLoss is false: going on", what)

    def _ids(self, start: StreamOffset | None) -> dict[str, str]:
        """The topics' ids; DataLossError when one is not the topic it was."""
        now = self._subscription().ids()
        before: Mapping[str, str] = {} if start is None else start.get(IDS, {})
        for topic, known in before.items():
            if now.get(topic, known) != known:
                raise DataLossError(
                    f"topic {topic!r} was deleted and made again since this query read it (its id "
                    f"was {known} and is {now[topic]}): its offsets mean other records now. Start "
                    f"the query with a new checkpoint location"
                )
        return {**before, **now}

    # ---- limits ----

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the read limit of the options; `latestOffset` applies all of them."""
        options = self._options
        if options.trigger_offsets_max is not None:
            return ReadMaxRows(options.trigger_offsets_max)
        if options.trigger_bytes_max is not None:
            return ReadMaxBytes(options.trigger_bytes_max)
        if options.trigger_offsets_min is not None:
            return ReadMinRows(options.trigger_offsets_min)
        return ReadAllAvailable()

    def _admitted(
        self, ranges: dict[TopicPartition, Range], limit: ReadLimit | None
    ) -> dict[TopicPartition, Range]:
        options = self._options
        total = sum(wanted.size for wanted in ranges.values())
        if self._waits_for_more(total):
            return {which: Range(wanted.start, wanted.start) for which, wanted in ranges.items()}
        most = options.trigger_offsets_max
        if isinstance(limit, ReadMaxRows):
            most = limit.max_rows if most is None else min(most, limit.max_rows)
        if most is not None:
            shares = _shares({which: wanted.size for which, wanted in ranges.items()}, most)
            ranges = {
                which: Range(wanted.start, wanted.start + shares[which])
                for which, wanted in ranges.items()
            }
        most = options.trigger_bytes_max
        if isinstance(limit, ReadMaxBytes):
            most = limit.max_bytes if most is None else min(most, limit.max_bytes)
        return ranges if most is None else self._within_bytes(ranges, most)

    def _waits_for_more(self, total: int) -> bool:
        least = self._options.trigger_offsets_min
        if least is None or total >= least or self._target is not None:
            return False
        if self._last_batch is None:
            return False  # the first one does not wait, so that a restart catches up
        return (time.monotonic() - self._last_batch) * 1000 < self._options.trigger_delay_ms

    def _within_bytes(
        self, ranges: dict[TopicPartition, Range], most: int
    ) -> dict[TopicPartition, Range]:
        partitions = self._subscription().partitions(missing_ok=True)
        maps = {}
        sizes = {}
        for which, wanted in ranges.items():
            segments = [
                segment
                for segment in partitions[which].segments
                if wanted.start < segment.end_offset and segment.base_offset < wanted.end
            ] if which in partitions else []  # fmt: skip
            if wanted.size and segments:
                maps[which] = ByteMap(segments, finer_than=most)
                sizes[which] = int(
                    maps[which].position(wanted.end) - maps[which].position(wanted.start)
                )
        if sum(sizes.values()) <= most:
            return ranges
        shares = _shares(sizes, most)
        within = dict(ranges)
        for which, bytes_of in maps.items():
            wanted = ranges[which]
            reached = bytes_of.offset(bytes_of.position(wanted.start) + shares[which])
            within[which] = Range(wanted.start, min(max(reached, wanted.start), wanted.end))
        if not any(wanted.size for wanted in within.values()):
            # Less than one record's bytes: one record all the same, or nothing would ever move.
            which = max(sizes, key=sizes.__getitem__)
            within[which] = Range(ranges[which].start, ranges[which].start + 1)
        return within

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the query: what is there now."""
        partitions = self._subscription().partitions(missing_ok=True)
        self._target = {
            which: end_of(partition, self._options.committed)
            for which, partition in partitions.items()
        }

    def reportLatestOffset(self) -> StreamOffset:
        """The ends of the logs, for the query's progress; and how many offsets were lost so far."""
        subscription = self._subscription()
        ends = {
            which: end_of(partition, self._options.committed)
            for which, partition in subscription.partitions(missing_ok=True).items()
        }
        report = _write(ends, subscription.ids())
        lost: dict[str, int] = {}
        for (which, _), count in sorted(self._gone.items()):
            lost[str(which)] = lost.get(str(which), 0) + count
        return {**report, LOST: lost} if lost else report

    # ---- a micro-batch ----

    def partitions(self, start: StreamOffset, end: StreamOffset) -> list[InputPartition]:
        """The splits between two offsets."""
        self._ids(start)
        self._ids(end)
        begun, ends = _read(start), _read(end)
        self._last_end = end
        there = self._partitions(begun)
        ranges = {}
        for which, stop in ends.items():
            if which not in there:
                first = begun.get(which, 0)
                if first != stop:
                    self._lost(f"{which} of {self._options.path} is gone")
                    self._gone[which, first] = stop - first
                continue
            first = begun.get(which, there[which].start_offset)
            if first < stop:
                wanted = Range(first, stop)
                ranges[which] = clamped(which, there[which], wanted, self._options)
                if ranges[which] != wanted:
                    self._gone[which, first] = wanted.size - ranges[which].size
        return list(plan(ranges, there, self._options))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split; in a task."""
        if not isinstance(partition, Split):
            return iter(())
        return read_split(partition, self._schema, self._options, Pushed())

    # ---- the group ----

    def commit(self, end: StreamOffset) -> None:
        """Handle the end of a batch: the checkpoint has it; commit its ends for the group."""
        if self._options.group is not None:
            self._uncommitted = _read(end)
            self._tell_group(self._options.group)

    def _tell_group(self, group: str) -> None:
        """Commit offsets for those who watch the group's lag; the query itself needs none of it.

        The store is opened for writing for a moment.  Where another process has it, or where it
        cannot be written, the next batch tries again.
        """
        import logstore
        from logstore import Groups, LogStoreError

        path, ends = self._subscription().store, self._uncommitted
        if path is None or not ends:
            return
        there = set(self._subscription().names(missing_ok=True))
        offsets = {(each.topic, each.number): ends[each] for each in sorted(there & set(ends))}
        try:
            with logstore.open(path, create=False) as store:
                Groups(store).commit(group, offsets)
        except (LogStoreError, OSError) as error:
            if not self._told_of_lock:
                log.warning("group %s was not told how far this query is: %s", group, error)
                self._told_of_lock = True
            return
        self._uncommitted = None
        self._told_of_lock = False

    def stop(self) -> None:
        """Close what is open."""
        if self._uncommitted and self._options.group is not None:
            self._tell_group(self._options.group)
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _write(ends: Ends, ids: Mapping[str, str]) -> StreamOffset:
    offset: StreamOffset = {}
    for (topic, number), end in sorted(ends.items()):
        offset.setdefault(topic, {})[str(number)] = end
    offset[IDS] = dict(sorted(ids.items()))
    return offset


def _read(offset: StreamOffset) -> Ends:
    ends = {}
    for topic, numbers in offset.items():
        if topic not in (IDS, LOST):
            for number, end in numbers.items():
                ends[TopicPartition(topic, int(number))] = int(end)
    return ends


def _shares(sizes: Mapping[TopicPartition, int], most: int) -> dict[TopicPartition, int]:
    """`most` over the sizes in proportion, none above its size, all of it given out."""
    total = sum(sizes.values())
    if total <= most:
        return dict(sizes)
    shares = {which: most * size // total for which, size in sizes.items()}
    left = most - sum(shares.values())
    # What rounding left over: to those who lost most by it.
    for which in sorted(sizes, key=lambda which: -(most * sizes[which] % total))[:left]:
        shares[which] += 1
    return shares
