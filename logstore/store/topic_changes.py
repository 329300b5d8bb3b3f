"""TopicChanges: creates, declares, grows, alters and deletes topics, each crash-atomically.

Invariant: the catalogue brackets every change.  An entry with `creating_from` or `deleting` is
written before the first directory changes, and replaced after the last one is durable; `finish`
undoes or completes what a crash cut short.

The Store holds its lock for every call, and has checked that it may write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from logstore.config import ConfigError, PartitionConfig
from logstore.files.disk_reserve import Reserve
from logstore.files.names import segment_name
from logstore.log.epochs import LEADER_EPOCHS
from logstore.log.state import PartitionState
from logstore.log.topic_id import PARTITION_METADATA, new_uuid, topic_id_text
from logstore.root.catalogue import (
    PARTITIONS_MAX,
    TopicEntry,
    is_deleted,
)
from logstore.store.recovery_report import StoreRecovery
from logstore.store.root_checkpoints import RootCheckpoints
from logstore.store.topic import Home, Topic, check_topic_name
from logstore.store.topic_table import TopicTable

__all__ = ["TopicChanges"]

log = logging.getLogger("logstore.store")

COMMITTED_OFFSETS = "__consumer_offsets"  # where offsets of deleted topics have to go as well


class TopicChanges:
    """The changes of the topics of one table.  Keeps no state of its own."""

    def __init__(self, table: TopicTable, checkpoints: RootCheckpoints, reserve: Reserve) -> None:
        self._table = table
        self._checkpoints = checkpoints
        self._reserve = reserve

    # ---- create and grow ----

    def create(self, home: Home, name: str, entry: TopicEntry) -> Topic:
        """Make a topic with all its partitions."""
        check_topic_name(name, self._table.topics)
        self._make_partitions(name, entry, 0)
        log.info("created topic %s with %d partitions", name, entry.partitions)
        return self._table.add(home, name, range(entry.partitions), entry)

    def declare(self, home: Home, name: str, partitions: int, settings: Mapping[str, Any]) -> Topic:
        """Make a topic of which a partition is made when it is first needed."""
        check_topic_name(name, self._table.topics)
        self._forget_offsets(name, range(partitions))
        entry = TopicEntry(new_uuid(), partitions, settings, made=())
        self._table.catalogue.put(name, entry)
        log.info("declared topic %s of %d partitions", name, partitions)
        return self._table.add(home, name, (), entry)

    def make_declared(self, topic: Topic, number: int) -> None:
        """Make a partition of a declared topic, unless it is there."""
        entry = self._table.catalogue.entries.get(topic.name)
        if number not in topic._numbers and entry is not None and entry.made is not None:
            self._make_on_demand(topic, entry, number)

    def grow(self, topic: Topic, count: int) -> None:
        """Add partitions to a topic.  The table lists them after its next `look_around`."""
        topic._check_usable()
        _require_all(topic)
        first = len(topic)
        if first + count > PARTITIONS_MAX:
            raise ConfigError(f"a topic has at most {PARTITIONS_MAX} partitions")
        entry = self._entry_of(topic)
        self._make_partitions(
            topic.name, dataclasses.replace(entry, partitions=first + count), first
        )

    def _make_on_demand(self, topic: Topic, entry: TopicEntry, number: int) -> None:
        if not 0 <= number < entry.partitions:
            raise IndexError(f"topic {topic.name!r} has no partition {number}")
        # Until it is whole it has the name of one on its way out, which the next open removes.
        unfinished = f"{topic.name}-{number}.{uuid.uuid4().hex}-delete"
        self._make_partition(unfinished, entry.id)
        self._table.directory.rename(unfinished, f"{topic.name}-{number}")
        self._table.directory.sync()
        made = tuple(sorted({*(entry.made or ()), number}))
        self._table.catalogue.put(topic.name, dataclasses.replace(entry, made=made))
        topic._add_number(number, of=entry.partitions)

    def _make_partitions(self, name: str, entry: TopicEntry, first: int) -> None:
        """Make the directories from number `first` on; the catalogue brackets them."""
        self._forget_offsets(name, range(first, entry.partitions))
        self._table.catalogue.put(name, dataclasses.replace(entry, creating_from=first))
        try:
            with self._reserve.shut():
                for number in range(first, entry.partitions):
                    self._make_partition(f"{name}-{number}", entry.id)
                self._table.directory.sync()
                self._table.catalogue.put(name, entry)
        except BaseException:
            # Undone now if it can be; otherwise the next open finds the entry and does it.
            with contextlib.suppress(OSError):
                self._undo_creation(name, entry, first)
                self._remove_deleted()
            raise

    def _make_partition(self, name: str, topic_id: uuid.UUID) -> None:
        self._table.directory.make_directory(name)
        directory = self._table.directory.below(name)
        try:
            # Not one by one atomic: the catalogue says that the whole directory is being made.
            for suffix in (".log", ".index", ".timeindex"):
                directory.write(segment_name(0, suffix), b"", sync=False)
            directory.write(LEADER_EPOCHS, b"0\n1\n0 0\n", sync=True)
            directory.write(PartitionState.NAME, PartitionState.of_new().encode(), sync=True)
            directory.write(PARTITION_METADATA, topic_id_text(topic_id), sync=True)
            directory.sync()
        finally:
            directory.close()

    def _undo_creation(self, name: str, entry: TopicEntry, first: int) -> None:
        self._set_aside(name, [n for n in self._table.numbers_of(name) if n >= first])
        if first == 0:
            self._table.catalogue.remove(name)
        else:
            kept = dataclasses.replace(entry, partitions=first, creating_from=-1)
            self._table.catalogue.put(name, kept)

    def _entry_of(self, topic: Topic) -> TopicEntry:
        """Its entry, or for a broker's topic the one it would have."""
        entry = self._table.catalogue.entries.get(topic.name)
        return entry or TopicEntry(topic.id or new_uuid(), max(topic._numbers) + 1)

    # ---- alter ----

    def alter(self, topic: Topic, config: Mapping[str, Any]) -> PartitionConfig:
        """Change settings of a topic, and keep them; None goes back to the default."""
        _require_all(topic)
        entry = self._entry_of(topic)
        settings = {**entry.settings, **own_settings(config)}
        settings = {key: value for key, value in settings.items() if value is not None}
        after = self._table.config.with_settings(settings)
        self._table.catalogue.put(topic.name, dataclasses.replace(entry, settings=settings))
        topic._reconfigure(after)
        return after

    # ---- delete ----

    def delete(self, topic: Topic) -> None:
        """Delete a topic.  Raises OSError for what could not be removed: the topic is gone."""
        name = topic.name
        entry = dataclasses.replace(self._entry_of(topic), deleting=True)
        noted = COMMITTED_OFFSETS in self._table.topics and name != COMMITTED_OFFSETS
        self._table.catalogue.begin_deletion(name, entry, noted=noted)
        del self._table.topics[name]
        topic._forget()
        aside = self._set_aside(name, topic._numbers)
        self._table.catalogue.remove(name)
        self._forget_offsets(name, topic._numbers)
        left = self._remove_deleted()
        self._reserve.restore()
        log.info("deleted topic %s", name)
        for error in [left[each] for each in aside if each in left]:
            error.add_note(f"topic {name!r} is deleted: only what could not be removed is left")
            raise error

    def _set_aside(self, name: str, numbers: Iterable[int]) -> list[str]:
        """Give directories the name under which they are deleted, whoever opens next."""
        targets = []
        for number in numbers:
            source = f"{name}-{number}"
            suffix = f".{uuid.uuid4().hex}-delete"
            # A directory's name ends at 255 characters; the topic's part gives way, as in Kafka.
            target = f"{name[: 255 - len(suffix) - len(str(number)) - 1]}-{number}{suffix}"
            with contextlib.suppress(FileNotFoundError):
                self._table.directory.rename(source, target)
            targets.append(target)
        self._table.directory.sync()
        return targets

    def _remove_deleted(self) -> dict[str, OSError]:
        """Remove directories that were set aside; those that could not be removed, and why."""
        left = {}
        for name in self._table.directories():
            if is_deleted(name):
                try:
                    self._remove_directory(name)
                except OSError as error:
                    log.warning(
                        "%s cannot be removed: %s", self._table.directory.path / name, str(error)
                    )
                    left[name] = error
        return left

    def _remove_directory(self, name: str) -> None:
        """Remove a directory, or at least all files in it; then the first error is raised."""
        faults = []
        directory = self._table.directory.below(name)
        try:
            for inside in directory.names():
                try:
                    directory.unlink(inside)
                except OSError as error:
                    error.filename = str(directory.path / inside)
                    faults.append(error)
        finally:
            directory.close()
        if faults:
            raise faults[0]
        self._table.directory.remove_directory(name)

    def _forget_offsets(self, name: str, numbers: Iterable[int]) -> None:
        if self._checkpoints.forget([(name, number) for number in numbers]):
            self._reserve.restore()
            self._checkpoints.write(self._table.opened_partitions())

    # ---- after a crash ----

    def finish(self, report: StoreRecovery) -> bool:
        """Undo creations and finish deletions that a crash cut short.

        Return whether the directories changed.  What cannot be finished stays as it is: the rest of
        the store can be used.
        """
        deleted = [name for name in self._table.directories() if is_deleted(name)]
        for name, entry in list(self._table.catalogue.entries.items()):
            try:
                if entry.deleting:
                    self._set_aside(name, self._table.numbers_of(name))
                    self._table.catalogue.remove(name)
                elif entry.creating_from >= 0:
                    self._undo_creation(name, entry, entry.creating_from)
                else:
                    continue
            except OSError as error:
                log.warning("topic %s cannot be removed: %s", name, str(error))
                report.unfinished[name] = error
            else:
                report.removed.append(name)
        if deleted or report.removed or report.unfinished:
            report.unfinished.update(self._remove_deleted())
            return True
        return False


def _require_all(topic: Topic) -> None:
    if not topic._dense:
        raise ConfigError(f"topic {topic.name!r} is here with some of its partitions only")


def own_settings(config: PartitionConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """What is stored of a topic's settings: those that were named, by their dotted names."""
    if isinstance(config, Mapping):
        checked = PartitionConfig.of(config).as_dict()
        names = (str(name).replace("_", ".") for name in config)
        return {
            name: None if value is None else checked[name]
            for name, value in zip(names, config.values(), strict=True)
        }
    return PartitionConfig.of(config).changed()
