"""TopicChanges: creates, declares, grows, alters and deletes topics, each crash-atomically.

A topic of a cluster is declared with the cluster's id; `make_partition`, `drop_partition` and
`set_aside_partition` change which of its partitions are in this directory.

Invariant: an entry with `creating_from` or `deleting` is durable in the catalogue before the first
directory changes, and is replaced after the last directory is durable.  After a crash `finish`
undoes the creation or completes the deletion.

Every change holds the store's lock and checks that the store is writable; an interrupt stops none
of them.  Packages above the store declare their topics here and make partitions on demand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from logstore.config import ConfigError, PartitionConfig
from logstore.errors import TopicExistsError
from logstore.files.disk_reserve import Reserve
from logstore.files.names import segment_name
from logstore.log.epochs import LEADER_EPOCHS
from logstore.log.state import PartitionState
from logstore.log.topic_id import PARTITION_METADATA, new_uuid, read_topic_id, topic_id_text
from logstore.partition.partition import Partition
from logstore.root.catalogue import (
    PARTITIONS_MAX,
    TopicEntry,
    is_deleted,
    stray_of,
)
from logstore.store.access import Access
from logstore.store.recovery_report import StoreRecovery
from logstore.store.root_checkpoints import RootCheckpoints
from logstore.store.topic import Topic, check_topic_name
from logstore.store.topic_table import TopicTable

__all__ = ["Stray", "TopicChanges"]

log = logging.getLogger("logstore.store")

COMMITTED_OFFSETS = "__consumer_offsets"  # has offsets of deleted topics, which are removed later


class Stray(NamedTuple):
    """A partition that was set aside: its directory, its old place, and the id of its topic."""

    name: str
    topic: str
    number: int
    topic_id: uuid.UUID | None


class TopicChanges:
    """The changes of the topics of one table.  Keeps no state of its own.

    `reserve` is the disk space that the store keeps free; the store sets it when it has the lock
    of the directory.
    """

    def __init__(self, table: TopicTable, checkpoints: RootCheckpoints, access: Access) -> None:
        self._table = table
        self._checkpoints = checkpoints
        self._access = access
        self.reserve = Reserve(table.directory, 0)

    # ---- create and grow ----

    def create(
        self,
        name: str,
        partitions: int,
        *,
        config: PartitionConfig | Mapping[str, Any] | None,
        exist_ok: bool,
        topic_id: uuid.UUID | None,
    ) -> Topic:
        """Make a topic with all its partitions; see `Store.create_topic`."""
        settings = own_settings(config)
        self._table.config.with_settings(settings)
        if not hasattr(partitions, "__index__"):
            raise ConfigError(f"partitions must be an int, not {partitions!r}")
        _check_partitions(partitions)
        if not isinstance(topic_id, uuid.UUID | None):
            raise TypeError(f"topic_id must be a uuid.UUID, not {topic_id!r}")

        def create() -> Topic:
            table = self._table
            known = table.topics.get(name)
            if known is not None:
                if not exist_ok:
                    raise TopicExistsError(name, where=str(table.directory.path))
                return known
            check_topic_name(name, table.topics)
            entry = TopicEntry(topic_id or new_uuid(), partitions, settings)
            # The topic is listed after its directories are durable: no thread opens a half-made
            # partition.
            self._make_partitions(name, entry, 0)
            log.info("created topic %s with %d partitions", name, partitions)
            return table.add(name, range(partitions), entry)

        return self._access.change(create)

    def grow(self, topic: Topic, count: int) -> None:
        """Add `count` partitions to a topic, after those that exist."""
        if count < 1:
            raise ConfigError(f"count must be at least 1, not {count!r}")

        def grow() -> None:
            topic._check_usable()
            _require_all(topic)
            first = len(topic)
            if first + count > PARTITIONS_MAX:
                raise ConfigError(f"a topic has at most {PARTITIONS_MAX} partitions")
            entry = self._entry_of(topic)
            self._make_partitions(
                topic.name, dataclasses.replace(entry, partitions=first + count), first
            )
            self._table.look_around()

        self._access.change(grow)

    # ---- declared topics ----

    def declare(
        self,
        name: str,
        partitions: int,
        *,
        config: Mapping[str, Any] | None = None,
        topic_id: uuid.UUID | None = None,
    ) -> Topic:
        """Make a topic without partitions: `make_partition` makes each when it is first needed.

        For topics that hold the state of a coordinator: few of their many partitions are ever
        used.  Return a topic that exists unchanged.
        """
        settings = own_settings(config)

        def declare() -> Topic:
            known = self._table.topics.get(name)
            if known is not None:
                return known
            check_topic_name(name, self._table.topics)
            # Rows of an earlier topic of this name: a new log must not start at their offsets.
            self._forget_offsets(name, range(partitions))
            entry = TopicEntry(topic_id or new_uuid(), partitions, settings, made=())
            self._table.catalogue.put(name, entry)
            log.info("declared topic %s of %d partitions", name, partitions)
            return self._table.add(name, (), entry)

        # The first look is without the lock: nearly always the topic exists.
        return self._table.topics.get(name) or self._access.change(declare)

    def declare_topic(
        self,
        name: str,
        *,
        topic_id: uuid.UUID,
        partitions: int,
        local: Iterable[int] = (),
        config: Mapping[str, Any] | None = None,
    ) -> Topic:
        """Make a topic of a cluster: of its `partitions` only those in `local` are here.

        A topic that exists with this id keeps its settings and partitions; missing ones of `local`
        are made, and its number of partitions is raised to `partitions`.  Raises TopicExistsError
        for a topic of this name with another id: set its partitions aside and delete it first.
        """
        _check_partitions(partitions)

        def declare() -> Topic:
            topic = self.declare(name, partitions, config=config, topic_id=topic_id)
            if topic.id != topic_id:
                raise TopicExistsError(name, where=f"{self._table.directory.path}, as {topic.id}")
            if partitions > self.declared_partitions(topic):
                self.raise_partitions(topic, partitions)
            for number in local:
                self.make_partition(topic, number)
            return topic

        return self._access.change(declare)

    def raise_partitions(self, topic: Topic, count: int) -> None:
        """Raise the number of partitions of a topic; make none of them.  It is never lowered."""
        _check_partitions(count)

        def raise_them() -> None:
            topic._check_usable()
            entry = self._entry_of(topic)
            if count < entry.partitions:
                raise ConfigError(
                    f"topic {topic.name!r} has {entry.partitions} partitions, and keeps them: "
                    f"not {count}"
                )
            made = tuple(sorted(topic._numbers))
            self._table.catalogue.put(
                topic.name, dataclasses.replace(entry, partitions=count, made=made)
            )
            topic._set_numbers(made, of=count)

        self._access.change(raise_them)

    def drop_partition(self, topic: Topic, number: int) -> None:
        """Delete one partition and its records, durably.  Other partitions of the topic stay."""

        def drop() -> None:
            self._leave_out(topic, number, keep=False)
            self._set_aside(topic.name, [number])
            self._forget_offsets(topic.name, [number])
            self._remove_deleted()
            self.reserve.restore()
            log.info("deleted partition %s-%d", topic.name, number)

        self._access.change(drop)

    def set_aside_partition(self, topic: Topic, number: int) -> Stray:
        """Close one partition and rename its directory as Kafka does: ``...-stray``.

        The files stay: `strays` lists them, `remove_stray` deletes one.  The partition can be made
        again at once.
        """

        def set_aside() -> Stray:
            self._leave_out(topic, number, keep=True)
            (name,) = self._set_aside(topic.name, [number], "stray")
            self._forget_offsets(topic.name, [number])
            log.warning("partition %s-%d was set aside as %s", topic.name, number, name)
            return self._stray(name)

        return self._access.change(set_aside)

    def strays(self) -> list[Stray]:
        """Return the partitions that were set aside, by logstore or by a broker."""
        names = self._table.directories()
        return [self._stray(name) for name in sorted(names) if stray_of(name) is not None]

    def remove_stray(self, stray: Stray) -> None:
        """Delete a partition that was set aside."""

        def remove() -> None:
            # Renamed first: after a crash the next open removes the rest.
            self._table.directory.rename(stray.name, f"{stray.name.removesuffix('stray')}delete")
            self._table.directory.sync()
            for error in self._remove_deleted().values():
                raise error

        self._access.change(remove)

    def _stray(self, name: str) -> Stray:
        named = stray_of(name)
        assert named is not None
        directory = self._table.directory.below(name)
        try:
            return Stray(name, *named, read_topic_id(directory))
        finally:
            directory.close()

    def _leave_out(self, topic: Topic, number: int, *, keep: bool) -> None:
        """Close a partition and remove it from the catalogue; its directory is there still.

        A crash before the directory is renamed leaves the partition as it was: a directory that
        the catalogue does not list counts as a partition of the topic.
        """
        topic._check_usable()
        if number not in topic._numbers:
            raise IndexError(f"topic {topic.name!r} has no partition {number} here")
        entry = self._entry_of(topic)
        left = tuple(each for each in sorted(topic._numbers) if each != number)
        self._table.catalogue.put(topic.name, dataclasses.replace(entry, made=left))
        topic._drop(number, keep=keep)
        topic._set_numbers(left, of=entry.partitions)

    # ---- high watermarks ----

    def checkpointed_high_watermark(self, topic: str, number: int) -> int | None:
        """Return the high watermark in the root's checkpoint when the store was opened.

        None if there was none, and for a partition that was deleted since.  A replica begins with
        it, within the bounds of its log.
        """
        return self._checkpoints.left_watermark((topic, number))

    def keep_high_watermarks(self) -> None:
        """From now on leave the row of a partition alone until its high watermark is set.

        For a node of a cluster, before its partitions are used.  Otherwise the row of a partition
        without a high watermark is the end of its log.
        """
        with self._access.lock:
            self._checkpoints.keep_watermarks = True

    def declared_partitions(self, topic: Topic) -> int:
        """Return how many partitions a topic has, with those that are not made yet."""
        entry = self._table.catalogue.entries.get(topic.name)
        there = max(topic._numbers, default=-1) + 1
        return there if entry is None else max(entry.partitions, there)

    def make_partition(self, topic: Topic, number: int) -> Partition:
        """Return a partition of a declared topic; make it, durably, if it does not exist."""

        def make() -> None:
            entry = self._table.catalogue.entries.get(topic.name)
            # Looked up again under the lock: another thread may have made it.
            if number not in topic._numbers and entry is not None and entry.made is not None:
                self._make_on_demand(topic, entry, number)

        if number not in topic._numbers:
            self._access.change(make)
        return topic[number]

    def stored_settings(self, topic: Topic) -> Mapping[str, Any]:
        """Return the settings that the catalogue has for a topic, by their dotted names."""
        entry = self._table.catalogue.entries.get(topic.name)
        return {} if entry is None else entry.settings

    # ---- directories ----

    def _make_on_demand(self, topic: Topic, entry: TopicEntry, number: int) -> None:
        if not 0 <= number < entry.partitions:
            raise IndexError(f"topic {topic.name!r} has no partition {number}")
        directory, name = self._table.directory, f"{topic.name}-{number}"
        # A directory with the final name is whole: an earlier call made it, and failed later.
        if not directory.exists(name):
            # Rows of an earlier partition, if a crash came between its removal and theirs.
            self._forget_offsets(topic.name, [number])
            # Until then the directory has a name that the next open removes.
            unfinished = f"{name}.{uuid.uuid4().hex}-delete"
            self._make_partition(unfinished, entry.id)
            directory.rename(unfinished, name)
        directory.sync()
        # The directory is durable before the catalogue lists it: a listed one that is missing is
        # damage.
        made = tuple(sorted({*(entry.made or ()), number}))
        self._table.catalogue.put(topic.name, dataclasses.replace(entry, made=made))
        topic._add_number(number, of=entry.partitions)

    def _make_partitions(self, name: str, entry: TopicEntry, first: int) -> None:
        """Make the directories from number `first` on, and write the entry of the catalogue."""
        self._forget_offsets(name, range(first, entry.partitions))
        # The intention first, durably: after a crash the next open removes the new directories.
        begun = dataclasses.replace(entry, creating_from=first)
        self._table.catalogue.put(name, begun)
        try:
            with self.reserve.shut():
                for number in range(first, entry.partitions):
                    self._make_partition(f"{name}-{number}", entry.id)
                self._table.directory.sync()
                # The commit point: before it a crash undoes the creation, after it the topic
                # exists.
                self._table.catalogue.put(name, entry)
        except BaseException:
            # Undo now if possible; otherwise the next open finds the entry and does it.  The entry
            # must be durable before a directory is renamed: without `creating_from` in it, a
            # missing directory would be damage.
            with contextlib.suppress(OSError):
                self._table.catalogue.put(name, begun)
                self._undo_creation(name, entry, first)
                self._remove_deleted()
            raise

    def _make_partition(self, name: str, topic_id: uuid.UUID) -> None:
        self._table.directory.make_directory(name)
        directory = self._table.directory.below(name)
        try:
            # The files need not be replaced atomically: until the directory is whole, the next
            # open removes it.
            for suffix in (".log", ".index", ".timeindex"):
                directory.write(segment_name(0, suffix), b"", sync=False)
            directory.write(LEADER_EPOCHS, b"0\n1\n0 0\n", sync=True)
            directory.write(PartitionState.NAME, PartitionState.of_new().encode(), sync=True)
            directory.write(PARTITION_METADATA, topic_id_text(topic_id), sync=True)
            directory.sync()
        finally:
            directory.close()

    def _undo_creation(self, name: str, entry: TopicEntry, first: int) -> None:
        # Renamed before the entry is removed: directories without an entry would be a topic of a
        # broker.
        self._set_aside(name, [n for n in self._table.numbers_of(name) if n >= first])
        if first == 0:
            self._table.catalogue.remove(name)
        else:
            kept = dataclasses.replace(entry, partitions=first, creating_from=-1)
            self._table.catalogue.put(name, kept)

    def _entry_of(self, topic: Topic) -> TopicEntry:
        """Return the entry of a topic; make one for a broker's topic."""
        entry = self._table.catalogue.entries.get(topic.name)
        return entry or TopicEntry(topic.id or new_uuid(), max(topic._numbers) + 1)

    # ---- alter ----

    def alter(self, topic: Topic, config: Mapping[str, Any]) -> PartitionConfig:
        """Change settings of a topic, and store them; None restores the default."""
        with self._access.lock:
            self._access.check_writable()
            return self._alter(topic, config)

    def _alter(self, topic: Topic, config: Mapping[str, Any]) -> PartitionConfig:
        topic._check_usable()
        entry = self._entry_of(topic)
        if entry.made is None:
            _require_all(topic)
        settings = {**entry.settings, **own_settings(config)}
        settings = {key: value for key, value in settings.items() if value is not None}
        after = self._table.config.with_settings(settings)
        # Stored before it has an effect: a crash in between loses nothing that was in use.
        self._table.catalogue.put(topic.name, dataclasses.replace(entry, settings=settings))
        topic._reconfigure(after)
        return after

    # ---- delete ----

    def delete(self, topic: Topic) -> None:
        """Delete a topic; see `Store.delete_topic`."""
        self._access.change(lambda: self._delete(topic))

    @property
    def deleted(self) -> tuple[str, ...]:
        """Topics that were deleted and still have committed offsets."""
        return self._table.catalogue.deleted

    def forget_deleted(self, names: Collection[str]) -> None:
        """Remove names from `deleted`: their committed offsets are gone."""
        with self._access.lock:
            self._access.check_writable()
            self._table.catalogue.forget_deleted(names)

    def _delete(self, topic: Topic) -> None:
        topic._check_usable()
        name = topic.name
        entry = dataclasses.replace(self._entry_of(topic), deleting=True)
        noted = COMMITTED_OFFSETS in self._table.topics and name != COMMITTED_OFFSETS
        # The commit point: after a crash from here on, the next open finishes the deletion.
        self._table.catalogue.begin_deletion(name, entry, noted=noted)
        del self._table.topics[name]
        topic._forget()
        # Renamed before the entry is removed, as in `_undo_creation`.
        aside = self._set_aside(name, topic._numbers)
        self._table.catalogue.remove(name)
        self._forget_offsets(name, topic._numbers)
        left = self._remove_deleted()
        self.reserve.restore()
        log.info("deleted topic %s", name)
        for error in [left[each] for each in aside if each in left]:
            error.add_note(f"topic {name!r} is deleted: only what could not be removed is left")
            raise error

    def _set_aside(self, name: str, numbers: Iterable[int], how: str = "delete") -> list[str]:
        """Rename directories, durably; the next open deletes those named ``-delete``.

        Return the new names.
        """
        targets = []
        for number in numbers:
            source = f"{name}-{number}"
            suffix = f".{uuid.uuid4().hex}-{how}"
            # A name has at most 255 characters: the topic's part is shortened, as in Kafka.
            target = f"{name[: 255 - len(suffix) - len(str(number)) - 1]}-{number}{suffix}"
            with contextlib.suppress(FileNotFoundError):
                self._table.directory.rename(source, target)
            targets.append(target)
        self._table.directory.sync()
        return targets

    def _remove_deleted(self) -> dict[str, OSError]:
        """Remove the renamed directories; return the errors of those that could not be removed."""
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
        """Remove a directory and its files.

        If one file cannot be removed, remove the others and raise the first error.
        """
        faults = []
        directory = self._table.directory.below(name)
        try:
            for inside in directory.names():
                try:
                    directory.unlink(inside)
                except OSError as error:
                    error.filename = str(directory.path / inside)  # the C call knows the name only
                    faults.append(error)
        finally:
            directory.close()
        if faults:
            raise faults[0]
        self._table.directory.remove_directory(name)

    def _forget_offsets(self, name: str, numbers: Iterable[int]) -> None:
        if self._checkpoints.forget([(name, number) for number in numbers]):
            self.reserve.restore()
            self._checkpoints.write(self._table.opened_partitions())

    # ---- after a crash ----

    def finish(self, report: StoreRecovery) -> bool:
        """Undo the creations and finish the deletions that a crash interrupted.

        Return whether the directories changed.  A change that cannot be finished is listed in the
        report, and the other topics can be used.
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


def _check_partitions(partitions: int) -> None:
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise ConfigError(f"partitions must be from 1 to {PARTITIONS_MAX}, not {partitions!r}")


def _require_all(topic: Topic) -> None:
    if not topic._dense:
        raise ConfigError(f"topic {topic.name!r} is here with some of its partitions only")


def own_settings(config: PartitionConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings that the catalogue stores: those of `config`, by their dotted names."""
    if isinstance(config, Mapping):
        checked = PartitionConfig.of(config).as_dict()
        names = (str(name).replace("_", ".") for name in config)
        return {
            name: None if value is None else checked[name]
            for name, value in zip(names, config.values(), strict=True)
        }
    return PartitionConfig.of(config).changed()
