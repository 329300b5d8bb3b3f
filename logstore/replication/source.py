"""Source: the log that a copy is made of.  DirectorySource: a store that another process writes.

A source answers with raw batches, byte for byte, and only with those that no crash of the source
can remove: below the durable offset of a directory, below the high watermark of a Kafka.

DirectorySource opens the store readonly and takes no lock.  A writer notes its durable offset at
most every 50 ms, and with durability="os" much later.  So if the note is behind the end for longer
than SYNC_AFTER_SECONDS, the source syncs the files of the log itself: a descriptor for reading is
enough for that.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from logstore.errors import (
    CorruptLogError,
    InvalidRecordError,
    OffsetOutOfRangeError,
    UnknownTopicError,
)
from logstore.files.disk_reserve import STORE_RESERVE_BYTES
from logstore.format.batch import HEADER_BYTES, OVERHEAD_BYTES, BatchHeader
from logstore.log.epochs import EpochEnd
from logstore.partition.partition import Partition
from logstore.partition.view import Cut
from logstore.recovery.failed_sync import FailedSync
from logstore.store.store import open_store

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "DirectorySource",
    "Fetched",
    "Place",
    "Source",
    "SourceTopic",
    "Wanted",
    "whole_batches",
]

POLL_SECONDS = 0.02  # between two looks at a directory
REST = 5  # and at least this many times as long as a look takes: many partitions use little CPU
SYNC_AFTER_SECONDS = 0.2
FETCH_BYTES = 16 << 20  # of all partitions in one answer
_SIZE = struct.Struct(">qi")
_DELTA = struct.Struct(">i")
AT_DELTA = 23


class Place(NamedTuple):
    """A partition, by topic and number."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class SourceTopic(NamedTuple):
    """A topic of a source."""

    id: uuid.UUID | None  # None: the source has no id for it
    partitions: tuple[int, ...]


class Wanted(NamedTuple):
    """A request for batches: from `offset` on, after a record of `last_epoch` (-1: none)."""

    place: Place
    offset: int
    last_epoch: int
    max_bytes: int


class Fetched(NamedTuple):
    """The answer for one partition."""

    place: Place
    start_offset: int
    end_offset: int  # of what may be copied now
    log_end_offset: int  # of what can be read; above `end_offset` if it is not durable yet
    batches: Buffer = b""  # whole batches
    diverging: EpochEnd | None = None  # the end of the newest common epoch, at the source
    cut_to: int | None = None  # the source was truncated to this offset since the last answer
    is_full: bool = False  # no batches, because those of other partitions filled the answer
    out_of_range: bool = False  # the source has no such offset, or not with this epoch


class Source(Protocol):
    """The methods that `Follow` calls, in one thread.  ConnectionError: try again later."""

    name: str
    refresh_seconds: float  # how often to ask for new topics

    def topics(self) -> dict[str, SourceTopic]:
        """Return every topic that can be copied; never the internal ones."""

    def settings(self, topic: str) -> Mapping[str, Any]:
        """Return the settings of a topic that are not the default."""

    def fetch(self, wanted: Sequence[Wanted], wait: float) -> list[Fetched]:
        """Return batches; wait up to `wait` seconds if there are none."""

    def bounds(self, place: Place) -> tuple[int, int]:
        """Return the start offset and the end of what can be read."""

    def batch_at(self, place: Place, offset: int) -> bytes | None:
        """Return the batch that holds `offset`, or the next one; None if there is none."""

    def end_of_epoch(self, place: Place, epoch: int) -> EpochEnd | None:
        """Return where an epoch ended; None if the source knows no epoch at or above it."""

    def bytes_from(self, place: Place, offset: int) -> int | None:
        """Return the size of the batches from `offset` on; None if that is not known."""

    def close(self) -> None:
        """Release files or connections."""


def whole_batches(data: memoryview, stop: int | None = None) -> tuple[int, int]:
    """Return the size of the whole batches at the start of `data`, and the position of the last.

    With `stop`, only batches that end at or below this offset count.
    """
    at, last, size = 0, 0, len(data)
    while at + HEADER_BYTES <= size:
        base, length = _SIZE.unpack_from(data, at)
        if length < HEADER_BYTES - OVERHEAD_BYTES:
            raise InvalidRecordError(f"a batch of length {length} at offset {base} is impossible")
        after = at + OVERHEAD_BYTES + length
        if after > size:
            break
        if stop is not None and base + _DELTA.unpack_from(data, at + AT_DELTA)[0] >= stop:
            break
        at, last = after, at
    return at, last


@dataclasses.dataclass(slots=True)
class _Cursor:
    """Where reading stopped in a log: the next batch is at `position` of the segment at `base`.

    The index of an active segment is in the memory of its writer.  Without a cursor each read would
    search the file from its start.
    """

    partition: weakref.ref[Partition]
    generation: int
    base: int
    position: int
    offset: int


class DirectorySource:
    """The topics of a directory.  `Follow` closes it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        self.refresh_seconds = 1.0
        self._store = open_store(
            Path(path), readonly=True, create=False, durability="os", config=None, clock=None,
            partitioner=None, progress=None, reserve_bytes=STORE_RESERVE_BYTES,
            allow_unsafe_fs=True,
        )  # fmt: skip
        self._cursors: dict[Place, _Cursor] = {}
        self._cuts: dict[Place, Cut] = {}
        self._behind: dict[Place, tuple[int, float]] = {}  # the durable offset, and since when
        self._synced: dict[Place, int] = {}  # durable, because this source synced the files

    @property
    def path(self) -> Path:
        """The directory."""
        return self._store.path

    def close(self) -> None:
        """Close the files."""
        self._store.close()

    def _partition(self, place: Place) -> Partition:
        return self._store[place.topic][place.partition]

    # ---- topics ----

    def topics(self) -> dict[str, SourceTopic]:
        """See Source."""
        return {
            name: SourceTopic(topic.id, topic.partition_numbers)
            for name, topic in self._store.items()
            if not name.startswith("__")
        }

    def settings(self, topic: str) -> Mapping[str, Any]:
        """See Source."""
        return self._store[topic].config.changed()

    # ---- reading ----

    def fetch(self, wanted: Sequence[Wanted], wait: float) -> list[Fetched]:
        """See Source."""
        deadline = time.monotonic() + wait
        while True:
            began = time.monotonic()
            answers, left = [], FETCH_BYTES
            for each in wanted:
                if left <= 0:
                    break
                try:
                    answer = self._fetched(each, left)
                except (UnknownTopicError, IndexError, FileNotFoundError):
                    if not self._is_gone(each.place):
                        raise
                    continue  # the topic was deleted: the next `topics` does not have it
                left -= memoryview(answer.batches).nbytes
                answers.append(answer)
            now = time.monotonic()
            news = left < FETCH_BYTES or any(
                each.cut_to is not None or each.out_of_range for each in answers
            )
            if news or now >= deadline:
                return answers
            time.sleep(min(max(POLL_SECONDS, REST * (now - began)), deadline - now))

    def _is_gone(self, place: Place) -> bool:
        topic = self._store.get(place.topic)
        return topic is None or place.partition not in topic.partition_numbers

    def _fetched(self, wanted: Wanted, left: int) -> Fetched:
        place, offset = wanted.place, wanted.offset
        partition = self._partition(place)
        end = partition.end_offset  # first: it takes in what the writer has done
        cut_to = self._new_cut(place, partition)
        start = partition.start_offset
        stop = self._stop(place, partition, end)
        if cut_to is not None or not start <= offset <= end:
            return Fetched(place, start, stop, end, cut_to=cut_to,
                           out_of_range=not start <= offset <= end)  # fmt: skip
        if offset >= stop:
            return Fetched(place, start, stop, end)
        generation = partition.parts.view.generation
        try:
            batches = self._read(place, partition, range(offset, stop), end,
                                 min(wanted.max_bytes, left))  # fmt: skip
        except (ValueError, FileNotFoundError, EOFError, OffsetOutOfRangeError) as error:
            cursor = self._cursors.pop(place, None)
            if not partition.parts.view.moved_since(generation):
                if not isinstance(error, InvalidRecordError):
                    raise
                raise CorruptLogError(
                    str(error), path=partition.path, position=cursor.position if cursor else -1
                ) from error
            batches = b""  # the next call reads the log as it is now
        return Fetched(place, start, stop, end, batches)

    def _new_cut(self, place: Place, partition: Partition) -> int | None:
        """Return where the log was truncated since the last call; None if it was not."""
        cut = partition.parts.view.cut
        before = self._cuts.get(place)
        self._cuts[place] = cut
        if before is None or cut is before:
            return None
        lowest = before.lowest_since()
        missed = cut.number - before.number
        if lowest is None and missed > 0:  # the partition was closed and opened since
            lowest = min(cut.recent[-missed:]) if missed <= len(cut.recent) else 0
        if lowest is not None:
            self._synced.pop(place, None)
        return lowest

    def _read(
        self, place: Place, partition: Partition, offsets: range, end: int, max_bytes: int
    ) -> Buffer:
        """Return whole batches of one segment, from the start of `offsets` on."""
        view, offset = partition.parts.view, offsets.start
        cursor = self._cursors.get(place)
        segment = view.segment_for(offset)
        if (
            cursor is None
            or cursor.partition() is not partition
            or (cursor.generation, cursor.offset) != (view.generation, offset)
            or cursor.base != segment.base_offset
            or (segment.sealed and cursor.position >= segment.size_bytes)
        ):
            found = partition.parts.reader.read_slice(offset, max_bytes)
            if found is None:
                return b""
            # Not always that of `offset`: compaction may have removed the rest of a segment.
            segment = view.segment_for(found.end_offset - 1)
            cursor = _Cursor(weakref.ref(partition), view.generation, segment.base_offset,
                             found.position, offset)  # fmt: skip
            self._cursors[place] = cursor
        left = segment.size_bytes - cursor.position
        data = segment.file.pread(min(max(max_bytes, HEADER_BYTES), left), cursor.position)
        size, last = whole_batches(memoryview(data), offsets.stop)
        if not size:  # one batch is larger than `max_bytes`, or has records that are not durable
            header = BatchHeader.parse(data)
            if header.size_bytes > left or not offset <= header.last_offset < end:
                raise CorruptLogError(
                    f"a batch of {header.size_bytes} bytes and offsets {header.base_offset} to "
                    f"{header.last_offset}, and the file has {left} bytes and the log ends at "
                    f"{end}",
                    path=segment.path, position=cursor.position,
                )  # fmt: skip
            data = segment.file.pread(header.size_bytes, cursor.position)
            size, last = whole_batches(memoryview(data), offsets.stop)
        if not size:
            return b""
        cursor.offset = BatchHeader.parse(data, last).next_offset
        cursor.position += size
        return data if size == len(data) else memoryview(data)[:size]

    # ---- what is durable ----

    def _stop(self, place: Place, partition: Partition, end: int) -> int:
        """Return the end of what is durable; sync the files if the writer's note is late."""
        durable = max(partition.durable_offset, self._synced.get(place, 0))
        if durable >= end:
            self._behind.pop(place, None)
            return min(durable, end)
        noted, since = self._behind.setdefault(place, (durable, time.monotonic()))
        if noted != durable:
            self._behind[place] = (durable, time.monotonic())
        elif time.monotonic() - since >= SYNC_AFTER_SECONDS:
            self._behind.pop(place)
            return self._sync(place, partition, durable, end)
        return durable

    def _sync(self, place: Place, partition: Partition, durable: int, end: int) -> int:
        view = partition.parts.view
        generation = view.generation
        for segment in view.segments:
            if segment.end_offset > durable:
                segment.file.datasync()
        view.directory.sync()
        # After an fsync of the writer has failed, ours may succeed without a write.
        if FailedSync.read(view.directory) is not None or view.generation != generation:
            return durable
        self._synced[place] = end
        return end

    # ---- comparing ----

    def bounds(self, place: Place) -> tuple[int, int]:
        """See Source."""
        partition = self._partition(place)
        end = partition.end_offset
        return partition.start_offset, end

    def batch_at(self, place: Place, offset: int) -> bytes | None:
        """See Source."""
        return next(iter(self._partition(place).read_batches(offset, 1)), None)

    def end_of_epoch(self, place: Place, epoch: int) -> EpochEnd | None:
        """See Source."""
        partition = self._partition(place)
        end = partition.end_offset
        history = partition.leader_epochs
        if history.latest is None:
            return EpochEnd(epoch, end)  # the log has no history to compare
        return history.end_offset_for(epoch, end)

    def bytes_from(self, place: Place, offset: int) -> int | None:
        """See Source."""
        partition = self._partition(place)
        total = 0
        for segment in partition.segments:
            if segment.base_offset >= offset:
                total += segment.size_bytes
            elif segment.end_offset > offset:
                cursor = self._cursors.get(place)
                if cursor is not None and (cursor.base, cursor.offset) == (
                    segment.base_offset, offset
                ):  # fmt: skip
                    total += max(0, segment.size_bytes - cursor.position)
                else:
                    found = segment.slice(offset, segment.end_offset, 1 << 40, whole_first=True)
                    total += 0 if found is None else found.size_bytes
        return total
