"""Topic: the partitions of one name; chooses the partition of each record.

A topic opens a partition when it is first used.  The Store owns the directory, and creates, changes
and deletes topics.

`_lock` is held while a partition is opened or closed, so that each partition is opened once.  It is
taken after the lock of the store and before those of a partition.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsIndex, overload

from logstore.config import ConfigError, PartitionConfig, wants_fsync
from logstore.errors import (
    ClosedError,
    InvalidNameError,
    LogStoreError,
    OffsetOutOfRangeError,
    UnknownTopicError,
)
from logstore.files.names import TOPIC
from logstore.log.segment import Segment
from logstore.partition.partition import Partition
from logstore.partitioner import Partitioner
from logstore.record import Record
from logstore.root.catalogue import NEVER_TOPICS
from logstore.store.access import Access

__all__ = ["PartitionDescription", "Position", "Topic", "TopicDescription", "check_topic_name"]

log = logging.getLogger("logstore.store")

TOPIC_LENGTH_MAX = 249


class Position(NamedTuple):
    """The position of a record: topic, partition, offset."""

    topic: str
    partition: int
    offset: int


def partition_number(number: object) -> int:
    """Return the number of a partition as a plain int.

    Raises TypeError for True and 1.0: both are equal to 1, so a lookup would find partition 1.
    """
    if type(number) is int:
        return number
    if isinstance(number, bool) or not isinstance(number, SupportsIndex):
        raise TypeError(f"a partition is chosen by its number, an int, not {number!r}")
    return operator.index(number)


class PartitionDescription(NamedTuple):
    """The sizes, offsets and times of one partition.  Timestamps are -1 if it has no record."""

    partition: int
    start_offset: int
    end_offset: int
    durable_offset: int
    segments: int
    size_bytes: int
    first_timestamp: int  # of the first record
    last_timestamp: int  # the greatest


class TopicDescription(NamedTuple):
    """A topic: its settings that are not the default, and a description of each partition."""

    name: str
    id: uuid.UUID | None
    config: Mapping[str, Any]
    partitions: tuple[PartitionDescription, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of all its logs."""
        return sum(partition.size_bytes for partition in self.partitions)


def check_topic_name(name: object, existing: Iterable[str] = ()) -> str:
    """Return `name` if Kafka accepts it for a new topic, else raise InvalidNameError.

    `existing` are the topics that exist.
    """
    if not isinstance(name, str):
        raise InvalidNameError(f"a topic's name is a str, not {name!r}")
    if not 1 <= len(name) <= TOPIC_LENGTH_MAX:
        raise InvalidNameError(
            f"a topic's name has 1 to {TOPIC_LENGTH_MAX} characters, not {len(name)}: {name[:40]!r}"
        )
    if name in NEVER_TOPICS:
        raise InvalidNameError(f"a topic cannot be named {name!r}")
    if not TOPIC.match(name):
        wrong = sorted({letter for letter in name if not TOPIC.match(letter)})
        raise InvalidNameError(
            f"{name!r} is not a topic's name: it may hold a-z A-Z 0-9 . _ - only, not "
            f"{' '.join(map(repr, wrong))}"
        )
    # Kafka's metrics write '.' as '_': Kafka refuses two names that differ only in that.
    alike = name.replace(".", "_")
    for other in existing:
        if other != name and other.replace(".", "_") == alike:
            raise InvalidNameError(
                f"topic {name!r} collides with {other!r}: '.' and '_' count as the same"
            )
    return name


class Home(Protocol):
    """The members of a Store that a topic uses."""

    @property
    def path(self) -> Path: ...
    @property
    def access(self) -> Access: ...
    def alter_topic(self, name: str, config: Mapping[str, Any]) -> PartitionConfig: ...
    def _look_again(self) -> None: ...
    def _topic_id(self, name: str, number: int) -> uuid.UUID | None: ...
    def _open_partition(self, topic: Topic, number: int) -> Partition: ...
    def _add_partitions(self, topic: Topic, count: int) -> None: ...


class Topic(Sequence[Partition]):
    """A topic of a store: the sequence of its partitions, by number.

    ``topic[2]`` is partition 2.  ``len()`` counts the partitions in this directory: a broker's
    directory may have only some of them, and then ``append`` needs ``partition=``.  ``partitioner``
    may be replaced at any time.
    """

    def __init__(self, store: Home, name: str, numbers: Sequence[int], *, id: uuid.UUID | None,
                 config: PartitionConfig, partitioner: Partitioner) -> None:  # fmt: skip
        """Made by a Store."""
        self.name = name
        self.partitioner = partitioner
        self._store = store
        self._deleted = False
        self._lock = threading.RLock()  # held while a partition is opened, and to change `_opened`
        self._config = config
        self._id = id
        # Replaced as a whole, so that other threads read it without the lock.
        self._numbers = tuple(numbers)
        self._opened: dict[int, Partition] = {}
        self._dense = self._numbers == tuple(range(len(self._numbers)))

    # ---- what it is ----

    @property
    def config(self) -> PartitionConfig:
        """The settings in use: its own, else the store's, else Kafka's defaults."""
        return self._config

    @property
    def id(self) -> uuid.UUID | None:
        """Kafka's id of the topic; None if the directory was written before Kafka had ids."""
        if self._id is None and self._numbers:
            # Read at first use, and kept: a topic never changes its id.  Two threads read the same.
            self._id = self._store._topic_id(self.name, self._numbers[0])
        return self._id

    @property
    def partition_numbers(self) -> tuple[int, ...]:
        """The sorted numbers of the partitions in this directory.  Opens no partition."""
        self._store._look_again()
        return self._numbers

    @property
    def deleted(self) -> bool:
        """Whether the topic was deleted, by this process or another."""
        return self._deleted

    def __repr__(self) -> str:
        return f"<Topic {self.name!r} of {len(self._numbers)} partitions>"

    def __len__(self) -> int:
        self._store._look_again()
        return len(self._numbers)

    def __bool__(self) -> bool:
        return True

    @overload
    def __getitem__(self, number: int) -> Partition: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Partition]: ...

    def __getitem__(self, number: int | slice) -> Partition | Sequence[Partition]:
        """Return a partition by its number; a negative number counts from the end."""
        if isinstance(number, slice):
            self._store._look_again()
            return [self[each] for each in self._numbers[number]]
        number = partition_number(number)
        if number < 0 and -number <= len(self):
            # By position, not ``len + number``: a directory of a broker may have only some numbers.
            number = self._numbers[number]
        partition = self._opened.get(number)
        if partition is None or partition.closed:
            return self._open_partition(number)
        return partition

    def opened(self, number: int) -> Partition | None:
        """Return a partition that is open; None for one that would have to be opened first."""
        partition = self._opened.get(number)
        return None if partition is None or partition.closed else partition

    def __iter__(self) -> Iterator[Partition]:
        self._store._look_again()
        for number in self._numbers:
            yield self[number]

    def _open_partition(self, number: int) -> Partition:
        """Open a partition for the first time, or again after it was closed."""
        self._check_usable()
        if number not in self._numbers:
            self._store._look_again()
        if number not in self._numbers:
            count = len(self._numbers)
            there = f"0 to {count - 1}" if self._dense else ", ".join(map(str, self._numbers))
            raise IndexError(f"topic {self.name!r} has no partition {number}: it has {there}")
        with self._lock:
            self._check_usable()
            # Looked up again under the lock: another thread may have opened it since.
            partition = self._opened.get(number)
            if partition is None or partition.closed:
                partition = self._opened[number] = self._store._open_partition(self, number)
            return partition

    # ---- for the store ----

    def _adopt(
        self, numbers: Sequence[int], *, id: uuid.UUID | None, config: PartitionConfig
    ) -> None:
        """Set numbers and settings from the root; if `id` is None, keep the known id."""
        self._id = self._id if id is None else id
        self._numbers = tuple(numbers)
        self._dense = self._numbers == tuple(range(len(self._numbers)))
        self._config = config

    def _add_number(self, number: int, *, of: int) -> None:
        """Add the number of a new partition; `of` partitions are declared."""
        self._numbers = tuple(sorted({*self._numbers, number}))
        self._dense = len(self._numbers) == of

    def _set_numbers(self, numbers: Sequence[int], *, of: int) -> None:
        """Set the numbers of the partitions that are here; `of` partitions are declared."""
        self._numbers = tuple(numbers)
        self._dense = len(self._numbers) == of

    def _drop(self, number: int, *, keep: bool) -> None:
        """Close a partition that leaves the topic; `keep`: its files stay, and are closed cleanly.

        If it cannot be closed cleanly, its files are as after a crash.
        """
        with self._lock:
            partition = self._opened.pop(number, None)
            if partition is not None and keep and partition.failure is None:
                try:
                    partition.close()
                except (LogStoreError, OSError) as error:
                    log.warning("%s: not closed cleanly: %s", partition.name, str(error))
            if partition is not None and not partition.closed:
                partition.parts.discard()

    def _reconfigure(self, config: PartitionConfig) -> None:
        with self._lock:
            # Under the lock: a partition that is being opened gets the old settings, and then
            # these.
            before, self._config = self._config, config
            if config != before:
                for partition in self._opened.values():
                    # A closed partition gets the settings when it is opened again.
                    with contextlib.suppress(ClosedError):
                        partition.parts.appender.reconfigure(config)

    def _hold(self, partition: Partition) -> None:
        """List a partition that the store has opened."""
        self._opened[partition.number] = partition

    def _opened_partitions(self) -> list[Partition]:
        return list(self._opened.values())

    def _wait(self) -> None:
        """Return when no other thread is opening a partition."""
        with self._lock:
            pass

    def _close_idle(self, close: Callable[[Partition], None], *, asleep: bool) -> bool:
        """Close one partition that only this topic refers to; return False if there is none."""
        # Do not wait: the thread that holds the lock may wait for a lock that this thread holds.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            for number in list(self._opened):
                # First remove it from the topic: from now on no other thread can get a new
                # reference, so the count below is final.
                partition = self._opened.pop(number)
                if (
                    sys.getrefcount(partition) > 2  # the variable and the argument
                    or partition.parts.in_use
                    or partition.parts.active.asleep != asleep
                    or partition.failure is not None
                ):
                    self._opened[number] = partition
                    continue
                try:
                    close(partition)
                except (LogStoreError, OSError) as error:
                    log.warning("%s: closed because descriptors ran out, and not cleanly: %s",
                                partition.name, str(error))  # fmt: skip
                return True
            return False
        finally:
            self._lock.release()

    def _forget(self) -> None:
        """Close all partitions: the topic was deleted, by this process or another."""
        with self._lock:
            self._deleted = True
            for partition in self._opened.values():
                # No close: nothing needs to be written to files that are about to be deleted.
                partition.parts.discard()
            self._opened.clear()

    def _check_usable(self) -> None:
        self._store.access.check_usable()
        if self._deleted:
            raise UnknownTopicError(self.name, where=f"{self._store.path}: it was deleted")

    # ---- appending ----

    def append(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp: int | None = None,
        partition: int | None = None,
        durability: str | None = None,
    ) -> Position:
        """Append one record, to the partition of its key unless `partition` names one.

        Returns the record's position when it is as durable as `durability` requires.  Raises the
        errors of `Partition.append`.
        """
        number = (
            self.choose_partition(key, value) if partition is None else partition_number(partition)
        )
        # As `self[number]`, without its frame.  One lookup in a dict needs no lock.
        log = self._opened.get(number)
        if log is None or log.closed:
            log = self._open_partition(number)
        offset = log.append(
            value, key=key, headers=headers, timestamp=timestamp, durability=durability
        )
        return Position(self.name, number, offset)

    def extend(
        self,
        records: Iterable[bytes | Record],
        *,
        partition: int | None = None,
        durability: str | None = None,
    ) -> list[Position]:
        """Append many records, each to the partition of its key; return their positions.

        Within a partition all are appended or none, as by `Partition.extend`.  If an error occurs
        after the records of some partitions were appended, a note of the error lists these.  There
        is one fsync for each partition.
        """
        given = list(records)
        if partition is not None:
            partition = partition_number(partition)
        shares: dict[int, list[int]] = {}
        for place, record in enumerate(given):
            number = partition
            if number is None:
                if isinstance(record, Record):
                    number = self.choose_partition(record.key, record.value)
                else:
                    number = self.choose_partition(None, record)
            shares.setdefault(number, []).append(place)
        # Opens all before the first append: a partition that cannot be opened fails the whole call.
        logs = {number: self[number] for number in shares}
        fsync = None if durability is None else wants_fsync(durability)
        positions: list[Position | None] = [None] * len(given)
        done: dict[int, range] = {}
        try:
            for number, places in shares.items():
                alone = len(shares) == 1
                offsets = logs[number].extend(
                    [given[place] for place in places], durability=durability if alone else "os"
                )
                done[number] = offsets  # noted at once: an interrupt may follow
                for place, offset in zip(places, offsets, strict=True):
                    positions[place] = Position(self.name, number, offset)
            if len(shares) > 1:
                # All records are in the files now: sync all partitions at the end.
                for number, offsets in done.items():
                    if fsync or (fsync is None and logs[number].durability == "fsync"):
                        logs[number].parts.appender.make_durable(offsets)
        except BaseException as error:
            for number, offsets in done.items():
                error.add_note(
                    f"already in {self.name}-{number}: offsets {offsets.start} to "
                    f"{offsets.stop - 1}"
                )
            raise
        return [position for position in positions if position is not None]

    def choose_partition(
        self, key: bytes | None, value: bytes | None, partitioner: Partitioner | None = None
    ) -> int:
        """Return the number of the partition for a record, as `partitioner` or the topic's chooses.

        Raises ConfigError if the directory has only some of the topic's partitions, and ValueError
        if the partitioner returns a number that the topic does not have.
        """
        if not self._dense:
            self._check_usable()
            raise ConfigError(
                f"topic {self.name!r} is here with partitions "
                f"{', '.join(map(str, self._numbers))} only: choose one with partition="
            )
        count = len(self._numbers)
        number: object = (partitioner or self.partitioner)(key, value, count)
        if not isinstance(number, int) or not 0 <= number < count:
            raise ValueError(
                f"the partitioner of {self.name!r} chose {number!r}: "
                f"it must be an int from 0 to {count - 1}"
            )
        return int(number)

    # ---- by key ----

    def get(self, key: bytes, *, isolation: str = "read_uncommitted") -> Record | None:
        """Return the newest record of a key; None if there is none, or if it is a tombstone.

        Only for topics that keep the newest record of every key: raises ConfigError unless
        ``cleanup.policy`` contains ``compact``.  Reads the partition that the partitioner chooses
        for the key now.  For the time that it takes see `Partition.get`.
        """
        if not self._config.compacts:
            self._check_usable()
            raise ConfigError(
                f"topic {self.name!r} has cleanup.policy={self._config.cleanup_policy}, and may "
                f"have lost the newest record of a key: use cleanup.policy=compact, or scan it"
            )
        return self[self.choose_partition(key, b"")].get(key, isolation=isolation)

    # ---- settings and size ----

    def alter(self, config: Mapping[str, Any]) -> PartitionConfig:
        """Change settings, and store them; a value of None restores the default.

        The change has an effect at once; other segment or index settings start a new segment.
        """
        return self._store.alter_topic(self.name, config)

    def add_partitions(self, count: int) -> None:
        """Add `count` partitions.  The partitioner may choose other partitions for keys then."""
        self._store._add_partitions(self, count)

    def describe(self) -> TopicDescription:
        """Return sizes, offsets and times of every partition."""
        partitions = tuple(_describe(partition) for partition in self)
        return TopicDescription(self.name, self.id, self._config.changed(), partitions)


def _describe(partition: Partition) -> PartitionDescription:
    while True:
        view = partition.parts.view
        # Read before the files, so that a change during the reads is noticed below.
        generation, segments = view.generation, partition.segments
        start = partition.start_offset
        try:
            return _describe_once(partition, segments)
        except (FileNotFoundError, OffsetOutOfRangeError):
            # Another thread or process deleted or replaced a segment: read again.
            moved = view.moved_since(generation)
            if not moved and (segments, start) == (partition.segments, partition.start_offset):
                raise


def _describe_once(partition: Partition, segments: Sequence[Segment]) -> PartitionDescription:
    start, end = partition.start_offset, partition.end_offset
    first = next(iter(partition.scan(start, end, max_records=1)), None)
    last = next(iter(partition.scan(max(start, end - 1), end)), None)
    return PartitionDescription(
        partition=partition.number,
        start_offset=start,
        end_offset=end,
        durable_offset=partition.durable_offset,
        segments=len(segments),
        size_bytes=sum(segment.size_bytes for segment in segments),
        first_timestamp=-1 if first is None else first.timestamp,
        # A reader may see an older index than the records that another process appended.
        last_timestamp=max(
            *(segment.max_timestamp for segment in segments),
            -1 if last is None else last.timestamp,
        ),
    )
