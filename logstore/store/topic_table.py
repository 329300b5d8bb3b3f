"""TopicTable: the topics of a root directory, from its catalogue and the names of its directories.

The Store that owns the table holds its lock for every call that changes the table.  A topic refers
to the store; the table refers to it weakly, so that a store without topics is freed when its last
reference is dropped.
"""

from __future__ import annotations

import contextlib
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from logstore.config import PartitionConfig
from logstore.files.directory import Directory
from logstore.log.topic_id import read_topic_id
from logstore.partition.partition import Partition
from logstore.partitioner import KeyPartitioner, Partitioner
from logstore.root.catalogue import (
    Catalogue,
    TopicEntry,
    partition_directories,
)
from logstore.store.topic import Home, Topic

__all__ = ["TopicTable"]

T = TypeVar("T")

SETTLED_NS = 1_000_000_000  # a later change gives the directory a time that differs


class TopicTable:
    """The topics of one root directory, by name, and their catalogue."""

    def __init__(
        self,
        store: Home,
        directory: Directory,
        config: PartitionConfig,
        partitioner: Partitioner | None,
    ) -> None:
        self._store = weakref.ref(store)  # the store holds the table
        self.directory = directory
        self.config = config  # of topics without settings
        self.catalogue = Catalogue(directory, {})
        self.topics: dict[str, Topic] = {}
        self._partitioner = partitioner
        self._seen: tuple[int, ...] = ()  # times of the last `refresh`; () forces the next one

    def read(self) -> None:
        """Read the catalogue and list the directories."""
        self.catalogue = Catalogue.read(self.directory)
        self.look_around()

    def topics_now(self) -> list[Topic]:
        """Return a copy of the list of topics; other threads may change the table."""
        return list(self.topics.values())

    def opened_partitions(self) -> list[Partition]:
        """Return the partitions that are open."""
        return [p for topic in self.topics_now() for p in topic._opened_partitions()]

    def numbers_of(self, name: str) -> list[int]:
        return partition_directories(self.directories()).get(name, [])

    def directories(self) -> list[str]:
        """Return the names of the directories at the root, without links."""
        return self.directory.directories()

    def look_around(self) -> None:
        """Update the topics from the directory's present names and from the catalogue."""
        found = partition_directories(self.directories())
        for name, entry in self.catalogue.entries.items():
            if entry.deleting or entry.creating_from == 0:
                found.pop(name, None)
            elif entry.creating_from > 0:
                found[name] = list(range(entry.creating_from))
            else:  # a missing directory is damage; a broker may have added directories
                found[name] = sorted({*entry.numbers, *found.get(name, ())})
        topics = {}
        for name, numbers in found.items():
            known = self.catalogue.entries.get(name)
            topic = self.topics.get(name)
            # Another id: the topic was deleted and created again.  Old handles must not see the new
            # one.
            if topic is None or (known and topic._id not in (None, known.id)):
                topic = self.make(name, numbers, known)
            topic._adopt(numbers, id=known.id if known else None, config=self.config_of(known))
            topics[name] = topic
        for name, topic in self.topics.items():
            if topics.get(name) is not topic:
                topic._forget()
        # One assignment: other threads read the old table or the new one, never a mix.
        self.topics = topics

    def topic_id(self, name: str, number: int) -> uuid.UUID | None:
        return self.in_partition(name, number, read_topic_id)

    def in_partition(self, name: str, number: int, act: Callable[[Directory], T]) -> T:
        """Call `act` with a partition's directory; the partition is not opened."""
        directory = self.directory.below(f"{name}-{number}")
        try:
            return act(directory)
        finally:
            directory.close()

    def make(self, name: str, numbers: Sequence[int], entry: TopicEntry | None) -> Topic:
        store = self._store()
        assert store is not None  # the caller has the store
        return Topic(
            store,
            name,
            numbers,
            id=entry.id if entry else None,
            config=self.config_of(entry),
            partitioner=self._partitioner or KeyPartitioner(),
        )

    def add(self, name: str, numbers: Sequence[int], entry: TopicEntry) -> Topic:
        """Make a topic and list it."""
        topic = self.topics[name] = self.make(name, numbers, entry)
        return topic

    def config_of(self, entry: TopicEntry | None) -> PartitionConfig:
        if entry is None or not entry.settings:
            return self.config
        return self.config.with_settings(entry.settings)

    def refresh(self) -> None:
        """Update the topics if another process has made, changed or deleted some."""
        seen = self._change_times()
        if seen == self._seen:
            return
        # A topic is in the catalogue before its directories exist and until they are gone.  So a
        # listing between two equal readings of the catalogue has every topic whole.
        catalogue = Catalogue.read(self.directory)
        while True:
            self.catalogue = catalogue
            self.look_around()
            catalogue = Catalogue.read(self.directory)
            if catalogue.entries == self.catalogue.entries:
                break
        # File times are coarse: a change right after this listing may have the same time.
        settled = time.time_ns() - max(seen) > SETTLED_NS
        self._seen = seen if settled else ()

    def _change_times(self) -> tuple[int, ...]:
        times = [self.directory.times_ns()[1]]
        with contextlib.suppress(FileNotFoundError):
            times.append(self.directory.times_ns(Catalogue.NAME)[1])
        return tuple(times)
