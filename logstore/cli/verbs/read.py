"""`logstore read`: print the records of a topic.

Each record is printed when it is read, so memory does not grow with the size of the topic.
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
COLUMNS_FROM_BYTES = (
    16 << 20
)  # counting more bytes than this is faster with numpy, including its import


class Selection:
    """The records to read: partitions, a range of offsets in each, a condition."""

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
        self.notes: list[str] = []  # offsets that retention or a truncation removed

    @property
    def logs(self) -> list[Partition]:
        """Return the selected partitions."""
        return partitions_of(self.topic, self.numbers)

    def stretch(self, log: Partition) -> tuple[int, int]:
        """Return the selected start and end offset in a partition, for its current range."""
        end = log.end_offset
        stop = end if self.stop is None else min(end, self.stop.of(log))
        return self._kept(log, self.start.of(log)), stop

    def _kept(self, log: Partition, offset: int) -> int:
        """Return the offset, or the log start if it is higher, with a note."""
        start = log.start_offset
        if offset < start:
            text = (
                f"{log.name} starts at offset {start}: offsets {offset} to {start - 1} are deleted"
            )
            if text not in self.notes:
                self.notes.append(text)
        return max(offset, start)

    def of(self, log: Partition, start: int, stop: int | None) -> Iterator[Record]:
        """Yield the records of one partition that match the condition."""
        scan = log.scan(start, stop, isolation=self.isolation, on_corrupt=self.on_corrupt)
        where = self.where
        yield from scan if where is None else filter(where, scan)
        self._note_skipped(scan)

    def _note_skipped(self, scan: Scan) -> None:
        """Add the ranges that the scan skipped, each only once."""
        for s in scan.skipped:
            offsets = f"offsets {s.offsets.start} to {s.offsets.stop - 1}"
            text = f"{s.path} at byte {s.position}: {offsets}: {s.reason}"
            if text not in self.skipped:
                self.skipped.append(text)

    def __iter__(self) -> Iterator[Record]:
        """Yield the selected records, partition by partition."""
        for log in self.logs:
            yield from self.of(log, *self.stretch(log))

    def by_time(self) -> Iterator[Record]:
        """Yield the selected records, merged by their timestamps."""
        parts = [self.of(log, *self.stretch(log)) for log in self.logs]
        return heapq.merge(*parts, key=_time)

    def last(self, count: int, ends: Mapping[int, int] | None = None) -> list[Record]:
        """Return the last `count` records of all partitions, below `ends`, oldest first."""
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
                span *= 8  # too few matches in this span: read a longer one
        found.sort(key=lambda record: (record.timestamp, record.partition or 0, record.offset))
        return found[-count:] if count else []

    def follow(self, timeout: float | None, *, last: int | None = None) -> Iterator[Record | None]:
        """Yield the selected records, or the `last` ones, then new ones; None if none is new."""
        from logstore.errors import LogTruncatedError, OffsetOutOfRangeError

        positions: dict[int, int] = {}
        cuts: dict[int, Cut] = {}
        if last is not None:
            # Fix the ends first: following starts at them, so no record is printed twice or missed.
            cuts = {log.number: log.parts.view.cut for log in self.logs}
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
                    # A partition that was added later is read from its start.
                    cuts[number] = log.parts.view.cut
                    start = self.start.of(log) if first else log.start_offset
                    positions[number] = self._kept(log, start)
                bound = self.stop
                if bound is not None and bound.kind != "end" and number not in stops:
                    stops[number] = bound.of(log)
                try:
                    _ = log.end_offset  # refreshes a readonly log; raises if it was truncated
                    cut, lowest = log.parts.view.cut, cuts[number].lowest_since()
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
                    cuts[number] = log.parts.view.cut
                    positions[number] = max(error.truncated_to, log.start_offset)
                except OffsetOutOfRangeError as error:
                    gone = log.start_offset - error.offset
                    self.notes.append(
                        f"{log.name}: {gone} offsets were deleted before they were read"
                    )
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
        """Return the number of selected records."""
        total = 0
        with Progress("counting") as progress:
            for log in self.logs:
                start, stop = self.stretch(log)
                scan = log.scan(start, stop, isolation=self.isolation, on_corrupt=self.on_corrupt)
                if self.where is not None:
                    for record in scan:
                        total += self.where(record)
                        progress.add()  # counts records read, not only matches
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
    help="Start here: start, end, an offset, -N (N offsets before the end), a time.",
)
@click.option("--to", "stop", type=BOUND, metavar="WHERE", help="Stop before this.")
@click.option("--last", type=Integer(0), metavar="N", help="The last N records by timestamp.")
@click.option("-n", "--max", "most", type=Integer(0), metavar="N", help="At most N records.")
@click.option(
    "--follow",
    is_flag=True,
    help="Print all records, then wait for new ones until Ctrl-C.  With --last N as "
    "`tail -n N -f`; with --from end only new records.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="With --follow: stop if no record arrives for this long; exit code 5 below -n records.",
)
@click.option(
    "--where",
    "condition",
    metavar="EXPRESSION",
    help="""Only records that match, for example
              'key == "x" and header.a =~ /b/ and $.id > 3'.""",
)
@click.option(
    "-f", "--format", "layout", metavar="FORMAT", help=r"kcat's format: '%t %p %o %k %s\n'."
)
@click.option("--decode", type=click.Choice(DECODERS), default="auto", help="Decoder for values.")
@click.option("--decode-key", type=click.Choice(DECODERS), default="auto", help="Decoder for keys.")
@click.option("--count", is_flag=True, help="Print only the number of records.")
@click.option("--by-time", is_flag=True, help="Merge partitions by timestamp.")
@click.option("--committed", is_flag=True, help="Without records of open or aborted transactions.")
@click.option(
    "--skip-corrupt", is_flag=True, help="Skip damaged batches, and list them at the end."
)
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

    JSON lines are lossless: `logstore write --format jsonl` reads them back.
    """
    if by_time and (last is not None or follow):
        raise click.UsageError("--by-time cannot be used with --last or --follow")
    if timeout is not None and not follow:
        raise click.UsageError("--timeout needs --follow")
    if count and (follow or last is not None or most is not None or layout is not None):
        raise click.UsageError("--count cannot be used with --follow, --last, -n or -f")
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
                output.note(f"only {reached:,} of {most:,} records arrived in time")
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
    """Yield at most `most` records; flush the output whenever the stream pauses."""
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
    """Return a function that prints records and returns how many it printed."""
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
