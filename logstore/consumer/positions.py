"""Positions: the assigned partitions of a consumer, and the next offset to read of each.

`sources` has a Source for each assigned partition.  The user may still process the records that
were returned last.  `handed` has the offsets before those records; an auto-commit after an error
uses them.  A *run* is an iterator of records of one partition; `running` is the source of the run
that is being iterated.  If `run` is set, it is a scan in C, and the position is in the scan:
`settle` ends the scan and copies the position into the source.

Only the consumer's thread uses it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from logstore import _native
from logstore.config import ConfigError
from logstore.consumer.source import Source
from logstore.consumer.wakeup import Bell
from logstore.coordinators.group_coordinator import explain
from logstore.coordinators.offset_book import OffsetBook
from logstore.coordinators.offset_records import CommittedOffset, TopicPartition
from logstore.errors import OffsetOutOfRangeError, UnknownTopicError
from logstore.partition.reader import milliseconds
from logstore.store.store import Store

__all__ = ["Positions", "Start"]

Start: TypeAlias = "str | int | datetime.datetime"


class Positions:
    """The positions of one consumer."""

    def __init__(
        self,
        store: Store,
        bell: Bell,
        *,
        start: Start,
        committed_only: bool,
        on_corrupt: str,
    ) -> None:
        self._store = store
        self._bell = bell
        self.start = start
        self._committed_only = committed_only
        self._on_corrupt = on_corrupt
        self._group_id: str | None = None
        self._book: OffsetBook | None = None
        self.sources: dict[TopicPartition, Source] = {}
        self.turn: list[Source] = []  # the sources; the one that is read next is the first
        self.running: Source | None = None  # the source of the run that is being iterated
        self.run: _native.SegmentScan | None = None  # that run, if it is a scan in C
        self.run_began = 0  # the position at the begin of `run`
        self.current: Any = None  # the record that was returned last, or the first of a poll
        self.handed: dict[TopicPartition, int] = {}  # positions before the last returned records

    def start_from(self, group_id: str, book: OffsetBook) -> None:
        """Start at the offsets that a group has committed, as `book` has them."""
        self._group_id, self._book = group_id, book

    def exists(self, tp: TopicPartition) -> bool:
        """Return whether the partition exists."""
        try:
            self._store[tp.topic][tp.partition]
        except (UnknownTopicError, IndexError):
            return False
        return True

    def add(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions as well."""
        for tp in partitions:
            log = self._store[tp.topic][tp.partition]
            source = Source(tp, log, committed=self._committed_only, on_corrupt=self._on_corrupt)
            # Before the first look: an append between the look and `listen` would not wake the
            # consumer.
            source.log.parts.view.listen(self._bell.ring)
            self.sources[tp] = source
            self.turn.append(source)
        if self.start != "none":
            self.place()

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions."""
        for tp in partitions:
            source = self.sources.pop(tp, None)
            if source is not None:
                self.turn.remove(source)
                source.log.parts.view.unlisten(self._bell.ring)
                self.handed.pop(tp, None)
                if self.running is source:
                    self.running = self.current = self.run = None

    def place(self) -> None:
        """Set the position of partitions that have none: the committed offset, or `start`."""
        lost = [source for source in self.sources.values() if source.position is None]
        if not lost:
            return
        committed: Mapping[TopicPartition, CommittedOffset] = {}
        pending: set[TopicPartition] = set()
        if self._book is not None and self._group_id is not None:
            # `pending` first: in the other order, a transaction that ends in between would be in
            # neither.
            pending = self._book.pending(self._group_id)
            committed = self._book.committed(self._group_id)
        for source in lost:
            tp = source.partition
            if tp in pending:
                # An open transaction has committed an offset.  Wait for its end: its marker is
                # appended to __consumer_offsets, which rings the bell.
                continue
            known = committed.get(tp)
            if known is not None and known.offset >= 0:
                source.seek(known.offset)
                source.committed_offset = known.offset
            else:
                # Read `cut` first: a truncation after it is then noticed by the next read.
                cut = source.log.parts.view.cut
                source.seek(self.start_of(source), cut)

    def start_of(self, source: Source) -> int:
        """Return the offset that `start` stands for; raise ConfigError if it is "none"."""
        start = self.start
        if start == "earliest":
            return source.log.start_offset
        if start == "latest":
            return source.end
        if isinstance(start, int | datetime.datetime):
            return source.log.offset_for_time(start)
        raise ConfigError(
            f"no committed offset for {source.partition} of group {self._group_id!r}, and start is "
            f"'none': commit an offset, or set start"
        )

    def next_turn(self, source: Source) -> None:
        """Move a source to the end of `turn`, so that the others are read first."""
        if self.turn and self.turn[0] is source:
            self.turn = self.turn[1:] + self.turn[:1]

    # ---- returned records ----

    def finish(self) -> None:
        """Note that all returned records are processed."""
        self.settle()
        self.handed = {}
        self.running = self.current = None

    def settle(self) -> None:
        """End the scan that is being iterated, if any, and copy its position into its source.

        The last record that the scan returned may still be processed: `handed` gets its offset.
        """
        run, source = self.run, self.running
        if run is None or source is None:
            return
        run.end()  # a loop that still holds the iterator gets no more records
        self.run = None
        before = self.run_began
        source.seek(max(before, run.next_offset))
        # The last record is perhaps not processed: an auto-commit stops before it.
        if source.position != before:
            self.handed[source.partition] = max(before, run.next_offset - 1)
        self.running = None

    def reached(self, source: Source) -> int | None:
        """Return the offset after the last returned record; None if there is no position yet."""
        if self.running is source:
            if self.run is not None:
                return max(self.run_began, self.run.next_offset)
            if self.current is not None:
                return int(self.current.offset) + 1
        return source.position

    def processed(self, source: Source) -> int:
        """Return the offset after the last processed record, without the last returned ones."""
        if self.running is source and self.run is not None:
            return max(self.run_began, self.run.next_offset - 1)
        if self.running is source and self.current is not None:
            return int(self.current.offset)
        assert source.position is not None
        return self.handed.get(source.partition, source.position)

    def moved(
        self, partitions: Iterable[TopicPartition], *, everything: bool
    ) -> dict[TopicPartition, CommittedOffset | int]:
        """Return the offsets to commit: of the partitions that moved since the last commit.

        `everything`: include the records that are being processed.
        """
        moved: dict[TopicPartition, CommittedOffset | int] = {}
        for tp in partitions:
            source = self.sources.get(tp)
            if source is None or source.position is None:
                continue
            at = self.reached(source) if everything else self.processed(source)
            if at is not None and at != source.committed_offset:
                moved[tp] = at
        return moved

    # ---- for the user ----

    def source(self, partition: tuple[str, int]) -> Source:
        """Return the source of a partition that is assigned, or raise ValueError."""
        tp = TopicPartition(*partition)
        source = self.sources.get(tp)
        if source is None:
            held = ", ".join(map(str, sorted(self.sources))) or "none"
            raise ValueError(f"{tp} is not assigned to this consumer; it reads {held}")
        return source

    def seek(self, source: Source, offset: int | datetime.datetime | str) -> None:
        """Read on at an offset, "beginning", "end", or the first record at or after a datetime."""
        log = source.log
        cut = log.parts.view.cut
        if isinstance(offset, datetime.datetime):
            offset = log.offset_for_time(milliseconds(offset))
        elif offset == "beginning":
            offset = log.start_offset
        elif offset == "end":
            offset = source.end
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise TypeError(
                f"seek to an int offset, 'beginning', 'end' or a datetime, not {offset!r}"
            )
        if offset < 0:
            raise OffsetOutOfRangeError(
                offset, start=log.start_offset, end=log.end_offset, where=log.name
            )
        self.settle()  # first, since it sets the position of the source whose run it ends
        source.seek(offset, cut)
        self.handed.pop(source.partition, None)
        if self.running is source:
            self.running = self.current = None

    def of(self, source: Source) -> int:
        """Return the offset that is read next; raise if an open transaction decides it."""
        if self.reached(source) is None:
            self.place()
        position = self.reached(source)
        if position is None:
            raise explain(
                self._group_id or "", "UNSTABLE_OFFSET_COMMIT",
                f"a transaction that is still open has committed an offset of {source.partition}",
            )  # fmt: skip
        return position

    def known(self) -> dict[TopicPartition, int]:
        """Return the positions of all partitions that have one."""
        return {
            tp: self.of(source)
            for tp, source in sorted(self.sources.items())
            if source.position is not None
        }
