"""`logstore read`: records of a topic, printed as they are read.

Nothing is collected: memory stays at a few read windows, however large the topic.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import click

from logstore.cli import exits
from logstore.cli.bounds import BOUND, Bound
from logstore.cli.completion import topic_names
from logstore.cli.messages import DECODERS, formatter, line_of, record_to_json
from logstore.cli.output import Output
from logstore.cli.progress import Progress
from logstore.cli.session import (
    Integer,
    Session,
    partition_option,
    partitions_of,
    pass_session,
    verb,
)
from logstore.cli.text import json_text
from logstore.record import Record

if TYPE_CHECKING:
    from logstore import Partition, Scan, Topic
    from logstore.partition.view import Cut
    from logstore.where import Where

__all__ = ["Selection", "read_verb"]

POLL_SECONDS = 0.05
COLUMNS_FROM_BYTES = 16 << 20  # counting more than this is worth loading numpy


class Selection:
    """Which records: partitions, a stretch of each, a condition.  Used by `read` and `export`."""

    def __init__(
        self,
        topic: Topic,
        *,
        partitions: Iterable[int] = (),
        start: Bound | None = None,
        stop: Bound | None = None,
        where: Where | None = None,
        committed: bool = False,
        skip_corrupt: bool = False,
    ) -> None:
        self.topic = topic
        self.numbers = tuple(partitions)
        self.start = start or Bound("start")
        self.stop = stop
        self.where = where
        self.isolation = "read_committed" if committed else "read_uncommitted"
        self.on_corrupt = "skip" if skip_corrupt else "raise"
        self.skipped: list[str] = []
        self.notes: list[str] = []  # what was deleted or truncated: no damage

    @property
    def logs(self) -> list[Partition]:
        """The partitions that are meant."""
        return partitions_of(self.topic, self.numbers)

    def stretch(self, log: Partition) -> tuple[int, int]:
        """The offsets that are meant in a partition, as it is now."""
        end = log.end_offset
        stop = end if self.stop is None else min(end, self.stop.of(log))
        return self._kept(log, self.start.of(log)), stop

    def _kept(self, log: Partition, offset: int) -> int:
        """The offset, or the first that was not deleted, with a note."""
        start = log.start_offset
        if offset < start:
            text = f"{log.name} starts at offset {start}: offsets {offset} to {start - 1} are gone"
            if text not in self.notes:
                self.notes.append(text)
        return max(offset, start)

    def of(self, log: Partition, start: int, stop: int | None) -> Iterator[Record]:
        """Records of one partition that meet the condition."""
        scan = log.scan(start, stop, isolation=self.isolation, on_corrupt=self.on_corrupt)
        where = self.where
        yield from scan if where is None else filter(where, scan)
        self._note_skipped(scan)

    def _note_skipped(self, scan: Scan) -> None:
        """Each damaged stretch once, however often it was passed over."""
        for s in scan.skipped:
            offsets = f"offsets {s.offsets.start} to {s.offsets.stop - 1}"
            text = f"{s.path} at byte {s.position}: {offsets}: {s.reason}"
            if text not in self.skipped:
                self.skipped.append(text)

    def __iter__(self) -> Iterator[Record]:
        """All of them, partition by partition."""
        for log in self.logs:
            yield from self.of(log, *self.stretch(log))

    def by_time(self) -> Iterator[Record]:
        """All of them, merged by their times."""
        parts = [self.of(log, *self.stretch(log)) for log in self.logs]
        return heapq.merge(*parts, key=_time)

    def last(self, count: int, ends: Mapping[int, int] | None = None) -> list[Record]:
        """The last so many of all partitions together, below `ends` if given, oldest first."""
        found: list[Record] = []
        for log in self.logs:
            start, stop = self.stretch(log)
            if ends is not None:
                stop = min(stop, ends.get(log.number, stop))
            span = max(1, count)
            while count and start < stop:
                first = max(start, stop - span)
                held = collections.deque(self.of(log, first, stop), maxlen=count)
                if len(held) == count or first == start:
                    found += held
                    break
                span *= 8  # offsets without a record, or without one that is meant
        found.sort(key=lambda record: (record.timestamp, record.partition or 0, record.offset))
        return found[-count:] if count else []

    def follow(self, timeout: float | None, *, last: int | None = None) -> Iterator[Record | None]:
        """All of them, or the `last` so many, and those to come; None if nothing is new."""
        from logstore.errors import LogTruncatedError, OffsetOutOfRangeError

        positions: dict[int, int] = {}
        cuts: dict[int, Cut] = {}
        if last is not None:
            # Later records are read from these ends, whatever is appended meanwhile.
            cuts = {log.number: log.cut for log in self.logs}
            committed = self.isolation == "read_committed"
            positions = {
                log.number: log.last_stable_offset if committed else log.end_offset
                for log in self.logs
            }
            yield from self.last(last, positions)
        stops: dict[int, int] = {}
        idle_from = time.monotonic()
        first = True
        while True:
            for log in self.logs:
                number = log.number
                if number not in positions:
                    # A partition that came later is read from its start.
                    cuts[number] = log.cut
                    start = self.start.of(log) if first else log.start_offset
                    positions[number] = self._kept(log, start)
                bound = self.stop
                if bound is not None and bound.kind != "end" and number not in stops:
                    stops[number] = bound.of(log)
                try:
                    _ = log.end_offset  # a reader looks: a truncation is noticed here
                    cut, lowest = log.cut, cuts[number].lowest_since()
                    if lowest is not None and lowest < positions[number]:
                        raise LogTruncatedError(positions[number], truncated_to=lowest,
                                                start=log.start_offset, end=log.end_offset,
                                                where=log.name)  # fmt: skip
                    cuts[number] = cut
                    for record in self._new(log, positions, stops.get(number)):
                        idle_from = time.monotonic()
                        yield record
                except LogTruncatedError as error:
                    self.notes.append(str(error))
                    cuts[number] = log.cut
                    positions[number] = max(error.truncated_to, log.start_offset)
                except OffsetOutOfRangeError as error:
                    gone = log.start_offset - error.offset
                    self.notes.append(f"{log.name}: {gone} offsets were deleted unread")
                    positions[number] = log.start_offset
            first = False
            if stops and all(positions[n] >= stop for n, stop in stops.items()):
                return
            yield None
            if timeout is not None and time.monotonic() - idle_from >= timeout:
                return
            time.sleep(POLL_SECONDS)

    def _new(self, log: Partition, positions: dict[int, int], stop: int | None) -> Iterator[Record]:
        start = positions[log.number]
        scan = log.scan(start, stop, isolation=self.isolation, on_corrupt=self.on_corrupt)
        where = self.where
        for record in scan:
            positions[log.number] = record.offset + 1
            if where is None or where(record):
                yield record
        positions[log.number] = max(start, scan.next_offset)
        self._note_skipped(scan)

    def count(self) -> int:
        """How many there are."""
        total = 0
        with Progress("counting") as progress:
            for log in self.logs:
                start, stop = self.stretch(log)
                scan = log.scan(start, stop, isolation=self.isolation, on_corrupt=self.on_corrupt)
                if self.where is not None:
                    for record in scan:
                        total += self.where(record)
                        progress.add()  # what is looked at: that is the work
                elif _size(log) < COLUMNS_FROM_BYTES:
                    numbers = itertools.count()
                    collections.deque(zip(scan, numbers), maxlen=0)  # noqa: B905
                    total += next(numbers)
                else:
                    for chunk in scan.columns(fields=["offset"]):
                        total += len(chunk)
                        progress.add(len(chunk))
                self._note_skipped(scan)
        return total


def _time(record: Record) -> int:
    return record.timestamp


def _size(log: Partition) -> int:
    return sum(segment.size_bytes for segment in log.segments)


@verb("read")
@click.argument("topic", shell_complete=topic_names)
@partition_option
@click.option(
    "--from",
    "start",
    type=BOUND,
    metavar="WHERE",
    help="Begin here: start, end, an offset, -N (so many before the end), a time.",
)
@click.option("--to", "stop", type=BOUND, metavar="WHERE", help="End before this.")
@click.option("--last", type=Integer(0), metavar="N", help="The last N, by their times.")
@click.option("-n", "--max", "most", type=Integer(0), metavar="N", help="At most N.")
@click.option(
    "--follow",
    is_flag=True,
    help="Print all, then wait for more; with --last N as `tail -n N -f`, with "
    "--from end only what is new.  Ctrl-C ends it.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="With --follow: end when nothing came for so long; exit code 5 if -n was not reached.",
)
@click.option(
    "--where",
    "condition",
    metavar="EXPRESSION",
    help="""Only those, for example
              'key == "x" and header.a =~ /b/ and $.id > 3'.""",
)
@click.option("-f", "--format", "layout", metavar="FORMAT", help=r"kcat's: '%t %p %o %k %s\n'.")
@click.option("--decode", type=click.Choice(DECODERS), default="auto", help="Show values as this.")
@click.option(
    "--decode-key", type=click.Choice(DECODERS), default="auto", help="Show keys as this."
)
@click.option("--count", is_flag=True, help="Print how many there are, and nothing else.")
@click.option("--by-time", is_flag=True, help="Merge partitions by the records' times.")
@click.option("--committed", is_flag=True, help="Nothing of open or aborted transactions.")
@click.option("--skip-corrupt", is_flag=True, help="Pass over damage; tell at the end what it was.")
@pass_session  # fmt: skip
def read_verb(
    session: Session,
    topic: str,
    partition: tuple[int, ...],
    start: Bound | None,
    stop: Bound | None,
    last: int | None,
    most: int | None,
    follow: bool,
    timeout: float | None,
    condition: str | None,
    layout: str | None,
    decode: str,
    decode_key: str,
    count: bool,
    by_time: bool,
    committed: bool,
    skip_corrupt: bool,
) -> int:
    """Print the records of TOPIC.

    \b
    logstore read orders --last 10
    logstore read orders --last 10 --follow
    logstore read orders --from -15m --where '$.total > 100'
    logstore read orders -f '%k:%s\\n' | logstore write copy -K:

    JSON lines lose nothing: `logstore write --format jsonl` takes them back.
    """
    if by_time and (last is not None or follow):
        raise click.UsageError("--by-time goes with neither --last nor --follow")
    if timeout is not None and not follow:
        raise click.UsageError("--timeout goes with --follow")
    if count and (follow or last is not None or most is not None or layout is not None):
        raise click.UsageError("--count goes with neither --follow, --last, -n nor -f")
    output = session.output
    printed = _printer(output, layout, decode_key, decode)
    where = None
    if condition is not None:
        from logstore.where import Where

        where = Where(condition)
    with session.reading() as store:
        chosen = Selection(
            store[topic],
            partitions=partition,
            start=start,
            stop=stop,
            where=where,
            committed=committed,
            skip_corrupt=skip_corrupt,
        )
        if count:
            _print_count(session, topic, chosen.count())
        elif follow:
            reached = printed(_limited(chosen.follow(timeout, last=last), most, output))
            if most is not None and reached < most:
                output.note(f"only {reached:,} of {most:,} records came in time")
                return exits.TIMEOUT
        else:
            records: Iterable[Record] = chosen
            if last is not None:
                records = chosen.last(last)
            elif by_time:
                records = chosen.by_time()
            printed(itertools.islice(records, most))
        if start is not None and start.kind == "offset" and not follow:
            end = max((log.end_offset for log in chosen.logs), default=0)
            if start.number > end:
                output.note(f"nothing from offset {start.number} on: all end at {end} or before")
        for text in chosen.notes:
            output.note(text)
        for text in chosen.skipped:
            output.note(f"skipped {text}")
        return exits.CORRUPT if chosen.skipped and skip_corrupt else exits.OK


def _print_count(session: Session, topic: str, count: int) -> None:
    if session.format in (None, "table"):
        session.output.line(str(count))
    else:
        session.output.one({"topic": topic, "records": count})


def _limited(
    records: Iterator[Record | None], most: int | None, output: Output
) -> Iterator[Record]:
    """Records of a stream that may pause: whatever was printed is seen meanwhile."""
    left = -1 if most is None else most
    while left:
        record = next(records, _END)
        if record is None:
            output.flush()
        elif isinstance(record, Record):
            left -= 1
            yield record
        else:
            return


_END = object()


def _printer(
    output: Output, layout: str | None, key: str, value: str
) -> Callable[[Iterable[Record]], int]:
    """What prints records and tells how many there were."""
    write = output.stream.write
    if layout is not None:
        bytes_of = formatter(layout, safe=output.terminal)
    elif output.kind == "jsonl":

        def bytes_of(record: Record) -> bytes:
            return json_text(record_to_json(record, key=key, value=value)).encode() + b"\n"
    elif output.kind == "table":

        def bytes_of(record: Record) -> bytes:
            return line_of(record, key=key, value=value).encode() + b"\n"
    else:
        rows = output.rows

        def whole(records: Iterable[Record]) -> int:
            numbers = itertools.count()
            found = (record_to_json(r, key=key, value=value) for r, _ in zip(records, numbers))  # noqa: B905
            rows(found, ())
            return next(numbers)

        return whole

    def one_by_one(records: Iterable[Record]) -> int:
        count = 0
        for record in records:
            write(bytes_of(record))
            count += 1
        return count

    return one_by_one
