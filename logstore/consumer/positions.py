"""Positions: the partitions of a consumer, and how far it has come in each.

`sources` has a Source for each partition that is assigned.  What was handed out last may still be
processed by the user: `handed` has the offsets from before it, and `running` is the source whose
run is being iterated.  While `run` is a scan of C, it knows the position; `settle` ends it.

Used by the consumer's thread alone.
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
    """Where a consumer is."""

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
        self.turn: list[Source] = []  # whose turn it is, first first
        self.running: Source | None = None  # an iteration is in a run of it
        self.run: _native.SegmentScan | None = None  # that run
        self.run_began = 0
        self.current: Any = None  # the record that was handed out last, or the first of a poll
        self.handed: dict[TopicPartition, int] = {}

    def start_from(self, group_id: str, book: OffsetBook) -> None:
        """Begin where the group has committed."""
        self._group_id, self._book = group_id, book

    def exists(self, tp: TopicPartition) -> bool:
        """Return whether the partition is there."""
        try:
            self._store[tp.topic][tp.partition]
        except (UnknownTopicError, IndexError):
            return False
        return True

    def add(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions, too."""
        for tp in partitions:
            log = self._store[tp.topic][tp.partition]
            source = Source(tp, log, committed=self._committed_only, on_corrupt=self._on_corrupt)
            source.log.listen(self._bell.ring)
            self.sources[tp] = source
            self.turn.append(source)
        if self.start != "none":
            self.place()

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions no more."""
        for tp in partitions:
            source = self.sources.pop(tp, None)
            if source is not None:
                self.turn.remove(source)
                source.log.unlisten(self._bell.ring)
                self.handed.pop(tp, None)
                if self.running is source:
                    self.running = self.current = self.run = None

    def place(self) -> None:
        """Find the position of partitions that have none yet."""
        lost = [source for source in self.sources.values() if source.position is None]
        if not lost:
            return
        committed: Mapping[TopicPartition, CommittedOffset] = {}
        pending: set[TopicPartition] = set()
        if self._book is not None and self._group_id is not None:
            pending = self._book.pending(self._group_id)
            committed = self._book.committed(self._group_id)
        for source in lost:
            tp = source.partition
            if tp in pending:
                continue  # a transaction decides soon where it starts: its marker rings the bell
            known = committed.get(tp)
            if known is not None:
                source.seek(known.offset)
                source.committed_offset = known.offset
            else:
                cut = source.log.cut
                source.seek(self.start_of(source), cut)

    def start_of(self, source: Source) -> int:
        """Return where to begin without a committed offset, as `start` has it."""
        start = self.start
        if start == "earliest":
            return source.log.start_offset
        if start == "latest":
            return source.end
        if isinstance(start, int | datetime.datetime):
            return source.log.offset_for_time(start)
        raise ConfigError(
            f"no committed offset for {source.partition} of group {self._group_id!r}, and start is "
            f"'none': commit one, or say where to start"
        )

    def next_turn(self, source: Source) -> None:
        """The others first, before it is this one's turn again."""
        if self.turn and self.turn[0] is source:
            self.turn = self.turn[1:] + self.turn[:1]

    # ---- what is handed out ----

    def finish(self) -> None:
        """What was handed out is processed."""
        self.settle()
        self.handed = {}
        self.running = self.current = None

    def settle(self) -> None:
        """End the scan that is being iterated, if any; its partition is where that stands."""
        run, source = self.run, self.running
        if run is None or source is None:
            return
        run.end()
        self.run = None
        before = self.run_began
        source.seek(max(before, run.next_offset))
        if source.position != before:
            self.handed[source.partition] = max(before, run.next_offset - 1)
        self.running = None

    def reached(self, source: Source) -> int | None:
        """Return the offset after what was handed out; None: where it starts is not known yet."""
        if self.running is source:
            if self.run is not None:
                return max(self.run_began, self.run.next_offset)
            if self.current is not None:
                return int(self.current.offset) + 1
        return source.position

    def processed(self, source: Source) -> int:
        """Where it was before what was handed out last."""
        if self.running is source and self.run is not None:
            return max(self.run_began, self.run.next_offset - 1)
        if self.running is source and self.current is not None:
            return int(self.current.offset)
        assert source.position is not None
        return self.handed.get(source.partition, source.position)

    def moved(
        self, partitions: Iterable[TopicPartition], *, everything: bool
    ) -> dict[TopicPartition, CommittedOffset | int]:
        """Return the offsets to commit, of those that have moved since the last commit.

        `everything`: also what is being processed.
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
        cut = log.cut
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
        self.settle()  # a run under way ends here
        source.seek(offset, cut)
        self.handed.pop(source.partition, None)
        if self.running is source:
            self.running = self.current = None

    def of(self, source: Source) -> int:
        """The offset of the record that comes next: behind the last one that was handed out."""
        if self.reached(source) is None:
            self.place()
        position = self.reached(source)
        if position is None:
            raise explain(
                self._group_id or "", "UNSTABLE_OFFSET_COMMIT",
                f"a transaction that is not over has committed an offset of {source.partition}",
            )  # fmt: skip
        return position

    def known(self) -> dict[TopicPartition, int]:
        """The positions of all partitions that have one."""
        return {
            tp: self.of(source)
            for tp, source in sorted(self.sources.items())
            if source.position is not None
        }
