"""Ranges: the start and end offset of each partition to read.

Options name earliest, latest, times or offsets; a Range has offsets only.  A range outside of the
log is data loss: it raises an error with the numbers, or with ``failOnDataLoss=false`` it is
clamped to the log.  Clamping never widens a range, so no record is read twice.

Only names, indexes and the ends of logs are read here, and for a time a few KiB of the log.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from logstore import Partition
from pyspark_logstore.options import EARLIEST, LATEST, Bound, OptionError, SourceOptions
from pyspark_logstore.topics import Subscription, TopicPartition

__all__ = ["DataLossError", "Range", "clamped", "end_of", "resolve", "resolve_start"]

log = logging.getLogger("pyspark_logstore")

Partitions = Mapping[TopicPartition, Partition]


class DataLossError(RuntimeError):
    """Records that a query was to read are gone, and ``failOnDataLoss`` is true."""


class Range(NamedTuple):
    """Offsets [start, end) of one partition."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """How many offsets; fewer records where the log has gaps."""
        return self.end - self.start


def end_of(partition: Partition, committed: bool) -> int:
    """As far as a query may read now."""
    return partition.last_stable_offset if committed else partition.end_offset


def resolve(
    options: SourceOptions,
    partitions: Partitions,
    names: Collection[TopicPartition] | None = None,
) -> dict[TopicPartition, Range]:
    """What a batch query reads of each partition.

    `names` are all that are subscribed, where `partitions` are only those that are wanted of them.
    """
    names = partitions if names is None else names
    start_of = _resolver(options.start, options, partitions, names)
    stop_of = _resolver(options.end, options, partitions, names)
    ranges = {}
    for which, partition in partitions.items():
        start, end = start_of(which), stop_of(which)
        explicit = options.start.kind == options.end.kind == "offsets"
        if explicit and start > end:
            raise OptionError(
                options.end.option, f"{which} ends at {end}, before its start at {start}"
            )
        ranges[which] = clamped(which, partition, Range(start, max(start, end)), options)
    return ranges


def resolve_start(options: SourceOptions, partitions: Partitions) -> dict[TopicPartition, int]:
    """Where a new stream starts in each partition."""
    start_of = _resolver(options.start, options, partitions, partitions)
    starts = {}
    for which, partition in partitions.items():
        start = start_of(which)
        starts[which] = clamped(which, partition, Range(start, start), options).start
    return starts


def clamped(
    which: TopicPartition, partition: Partition, wanted: Range, options: SourceOptions
) -> Range:
    """The part of a range that the log has; DataLossError unless losing the rest is accepted."""
    low, high = partition.start_offset, partition.end_offset
    start, end = min(max(wanted.start, low), high), max(min(wanted.end, high), low)
    if (start, end) == wanted:
        return wanted
    lost = _loss(which, partition, wanted, low, high)
    if options.fail_on_data_loss:
        raise DataLossError(
            f"{lost}. Choose a start within the log, or set failOnDataLoss to false to read on "
            f"from what there is"
        )
    log.warning("%s; failOnDataLoss is false: reading [%d, %d)", lost, start, max(start, end))
    return Range(start, max(start, end))


def _loss(which: TopicPartition, partition: Partition, wanted: Range, low: int, high: int) -> str:
    changed = datetime.datetime.fromtimestamp(partition.path.stat().st_mtime, datetime.UTC)
    if wanted.start < low:
        first = min(low, max(wanted.end, wanted.start + 1))
        what = (
            f"offsets {wanted.start} to {first - 1} ({first - wanted.start} of them) are gone: "
            f"the log starts at {low}"
        )
    else:
        what = (
            f"offset {max(wanted.start, wanted.end - 1)} was asked for, but the log ends at "
            f"{high}: it was cut, or is another one"
        )
    return (
        f"{which}: {what} (expected [{wanted.start}, {wanted.end}), there is [{low}, {high}); its "
        f"directory last changed at {changed:%Y-%m-%dT%H:%M:%SZ})"
    )


def _resolver(
    bound: Bound,
    options: SourceOptions,
    partitions: Partitions,
    names: Collection[TopicPartition],
) -> Callable[[TopicPartition], int]:
    _match(bound, names)
    groups = _committed(bound.group, options) if bound.kind == "group" else {}

    def resolved(which: TopicPartition) -> int:
        partition = partitions[which]
        if bound.kind == "earliest":
            return partition.start_offset
        if bound.kind == "latest":
            return end_of(partition, options.committed)
        if bound.kind == "last":
            return max(partition.start_offset, end_of(partition, options.committed) - bound.number)
        if bound.kind == "group":
            return groups.get(which, partition.start_offset)
        if bound.kind == "offsets":
            offset = bound.by_partition[which.topic][which.number]
            if offset == EARLIEST:
                return partition.start_offset
            return end_of(partition, options.committed) if offset == LATEST else offset
        when = bound.number
        if bound.kind == "times":
            when = bound.by_partition[which.topic][which.number]
        return _at_time(bound, which, partition, when, options)

    return resolved


def _at_time(
    bound: Bound, which: TopicPartition, partition: Partition, when: int, options: SourceOptions
) -> int:
    end = end_of(partition, options.committed)
    found = min(partition.offset_for_time(when), end)
    starting = bound.option.startswith("starting")
    if starting and found == end and not options.latest_without_match:
        raise OptionError(
            bound.option,
            f"{which} has no record at or after {when} ms; choose an earlier time, or set "
            f"startingOffsetsByTimestampStrategy to latest",
        )
    return found


def _committed(group: str, options: SourceOptions) -> dict[TopicPartition, int]:
    """Where a group stands; partitions it never committed are not in it."""
    with Subscription(options) as subscription:
        found = subscription.committed(group)
    if not found:
        raise OptionError(
            options.start.option,
            f"group {group!r} has committed no offset in {options.path}: use earliest, or a group "
            f"that has",
        )
    return found


def _match(bound: Bound, partitions: Collection[TopicPartition]) -> None:
    """A map must name just the partitions that are read: a slip would lose or repeat some."""
    if bound.kind not in ("offsets", "times"):
        return
    named = {
        TopicPartition(topic, number)
        for topic, numbers in bound.by_partition.items()
        for number in numbers
    }
    missing, extra = sorted(set(partitions) - named), sorted(named - set(partitions))
    if missing:
        raise OptionError(
            bound.option,
            f"names no offset for {', '.join(map(str, missing))}: every partition that is read "
            f"needs one",
        )
    if extra:
        raise OptionError(
            bound.option,
            f"names {', '.join(map(str, extra))}, which is not read: read are "
            f"{', '.join(map(str, partitions)) or 'none'}",
        )
