"""Splits: which task reads which offsets.

A partition is split by bytes, not by offsets: whole segments are combined up to
``maxBytesPerPartition``, and larger segments are split by their offset index.  Planning reads only
names, sizes and indexes.  Splits of a partition do not overlap and have no gap between them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from logstore import Partition, Segment
from pyspark_logstore.filters import INT64_MIN, Pushed
from pyspark_logstore.offsets import Range
from pyspark_logstore.topics import TopicPartition

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pyspark_logstore.options import SourceOptions

__all__ = ["ByteMap", "Chain", "Split", "plan"]


class Split(InputPartition):
    """What one task reads: offsets [start, end) of the partition in a directory."""

    def __init__(self, path: str, which: TopicPartition, wanted: Range) -> None:
        super().__init__((path, *which, *wanted))
        self.path = path
        self.which = which
        self.wanted = wanted

    def __repr__(self) -> str:
        return f"Split({self.which}[{self.wanted.start}:{self.wanted.end}])"


class Chain(InputPartition):
    """Splits that one task reads one after the other, until it has enough rows."""

    def __init__(self, splits: Sequence[Split], rows_max: int) -> None:
        super().__init__((tuple(split.value for split in splits), rows_max))
        self.splits = tuple(splits)
        self.rows_max = rows_max

    def __repr__(self) -> str:
        return f"Chain({self.rows_max} rows of {', '.join(map(repr, self.splits))})"


class ByteMap:
    """How many bytes lie between two offsets of neighbouring segments, and the other way round.

    Exact at the ends of segments; between two entries of an index, and where a segment's index was
    not worth reading, a straight line.
    """

    def __init__(self, segments: Sequence[Segment], *, finer_than: int) -> None:
        import numpy

        self._base = segments[0].base_offset
        offsets: list[npt.NDArray[np.float64]] = []
        positions: list[npt.NDArray[np.float64]] = []
        total = 0
        for segment in segments:
            size = segment.size_bytes
            start = segment.base_offset - self._base
            points = [numpy.array([[0, 0]])]
            if size > finer_than:
                entries = numpy.frombuffer(segment.offset_index.entries, ">i4").reshape(-1, 2)
                # An entry leads to the batch that ends at its offset.
                points.append(entries[(entries[:, 1] > 0) & (entries[:, 1] < size)])
            found = numpy.concatenate(points).astype(numpy.float64)
            offsets.append(found[:, 0] + start)
            positions.append(found[:, 1] + total)
            total += size
        offsets.append(numpy.array([segments[-1].end_offset - self._base], numpy.float64))
        positions.append(numpy.array([total], numpy.float64))
        self._offsets = numpy.concatenate(offsets)
        self._positions = numpy.concatenate(positions)

    def position(self, offset: int) -> float:
        """Bytes before an offset."""
        import numpy

        return float(numpy.interp(offset - self._base, self._offsets, self._positions))

    def offset(self, position: float) -> int:
        """The offset at that many bytes."""
        import numpy

        return self._base + int(numpy.interp(position, self._positions, self._offsets))


def plan(
    ranges: Mapping[TopicPartition, Range],
    partitions: Mapping[TopicPartition, Partition],
    options: SourceOptions,
    pushed: Pushed | None = None,
) -> list[Split]:
    """The tasks that read these ranges, narrowed by what was pushed down."""
    pushed = Pushed() if pushed is None else pushed
    runs: list[tuple[TopicPartition, Range, ByteMap]] = []
    finer = options.partition_bytes_max
    if options.min_partitions is not None:
        sizes = sum(
            segment.size_bytes for which in ranges for segment in partitions[which].segments
        )
        finer = min(finer, sizes // options.min_partitions)
    for which, wanted in ranges.items():
        if not pushed.wants(which):
            continue
        narrowed = Range(max(wanted.start, pushed.start), min(wanted.end, pushed.end))
        for run in _runs(partitions[which], narrowed, pushed):
            bytes_of = ByteMap([segment for segment, _ in run], finer_than=finer)
            covered = Range(run[0][1].start, run[-1][1].end)
            runs.append((which, covered, bytes_of))
    most = options.partition_bytes_max
    if options.min_partitions is not None:
        total = sum(
            bytes_of.position(run.end) - bytes_of.position(run.start) for _, run, bytes_of in runs
        )
        most = max(1, min(most, int(total / options.min_partitions)))
    splits = []
    for which, covered, bytes_of in runs:
        path = os.path.abspath(partitions[which].path)  # tasks may run in another directory
        for piece in _cut(covered, bytes_of, most, options.partition_records_max):
            splits.append(Split(path, which, piece))
    return splits


def _runs(
    partition: Partition, wanted: Range, pushed: Pushed
) -> Iterator[list[tuple[Segment, Range]]]:
    """Neighbouring segments with the part of each that may hold wanted rows."""
    run: list[tuple[Segment, Range]] = []
    for segment in partition.segments:
        part = Range(max(wanted.start, segment.base_offset), min(wanted.end, segment.end_offset))
        if part.size > 0 and pushed.timed:
            part = _in_time(segment, part, pushed, first=not run)
        if part.size > 0:
            run.append((segment, part))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _in_time(segment: Segment, part: Range, pushed: Pushed, *, first: bool) -> Range:
    """Return a part without the records that are provably too old or too new.

    Times may be out of order.  The time index proves that all records up to an offset are too old;
    records are provably too new only if the whole segment is.
    """
    nothing = Range(part.start, part.start)
    least = segment.min_timestamp
    if pushed.time_end <= pushed.time_start or (least is not None and least >= pushed.time_end):
        return nothing
    if pushed.time_start == INT64_MIN:
        return part
    if segment.sealed and segment.max_timestamp < pushed.time_start:
        return nothing
    if not first:
        return part
    found = segment.offset_for_time(pushed.time_start, part.start)
    return nothing if found is None or found >= part.end else Range(found, part.end)


def _cut(
    covered: Range, bytes_of: ByteMap, bytes_max: int, records_max: int | None
) -> Iterable[Range]:
    """A range in pieces of about equal bytes, none above either bound."""
    first, last = bytes_of.position(covered.start), bytes_of.position(covered.end)
    count = max(1, min(covered.size, -int(-(last - first) // bytes_max)))
    cuts = {bytes_of.offset(first + (last - first) * number / count) for number in range(1, count)}
    edges = [
        covered.start,
        *sorted(c for c in cuts if covered.start < c < covered.end),
        covered.end,
    ]
    for start, end in itertools.pairwise(edges):
        pieces = 1 if records_max is None else -(-(end - start) // records_max)
        for number in range(pieces):
            yield Range(
                start + (end - start) * number // pieces,
                start + (end - start) * (number + 1) // pieces,
            )
