"""Store: a directory of topics, laid out as a broker's log directory, with one owner at a time.

``logstore.open(path)`` opens one.  It maps names to Topics; a Topic is a sequence of Partitions.

After a clean shutdown open reads only the root: a partition is opened when it is first used, and
its files do not change until its first change.  After a crash every partition is recovered before
`open` returns, several at a time.

Invariant: the root's checkpoints and the marker of a clean shutdown are written after the files of
the partitions that they describe are durable, and the marker is removed before any file changes.

Threads may share a Store and its Topics.  Lock order: see `Access`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import logging
import os
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from logstore.clock import Clock, SystemClock
from logstore.closeable import Closeable
from logstore.config import PartitionConfig, wants_fsync
from logstore.errors import (
    UnknownTopicError,
)
from logstore.files.directory import Directory
from logstore.files.disk_reserve import Reserve
from logstore.files.filesystem import require_safe
from logstore.files.lock import DirectoryLock
from logstore.partition.partition import Partition, open_in_store
from logstore.partitioner import Partitioner
from logstore.recovery.report import RecoveryProgress
from logstore.root.catalogue import Catalogue
from logstore.root.clean_shutdown import CleanShutdown
from logstore.root.identity import NodeIdentity
from logstore.root.member import ClusterMember
from logstore.root.producer_ids import ProducerIds
from logstore.store.access import Access
from logstore.store.callbacks import (
    TransactionCheck,
    check_transaction_of,
    reclaimable_of,
    suspect_others_of,
)
from logstore.store.companions import Companions
from logstore.store.descriptors import IdlePartitions, make_room_for_files
from logstore.store.recovery_pool import at_once, recover_partitions
from logstore.store.recovery_report import StoreRecovery
from logstore.store.root_checkpoints import RootCheckpoints
from logstore.store.root_files import forget_state, refuse_foreign, sweep_temporary
from logstore.store.topic import Topic, TopicDescription
from logstore.store.topic_changes import TopicChanges
from logstore.store.topic_table import TopicTable

if TYPE_CHECKING:  # imported at run time by check() and enforce() only
    from logstore.checking.partition_check import CheckProgress
    from logstore.checking.problem import Problem
    from logstore.log.retention import RetentionDecision

__all__ = ["Store", "abandon_store", "has_space", "open_store", "set_member"]

log = logging.getLogger("logstore.store")

# For fork: the child gives up the stores of its parent.  Weak: a dropped store is freed at once.
_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()


class Store(Mapping[str, Topic], Closeable):
    """A directory of topics.  Open one with `logstore.open`; ``with`` closes it.

    ``store["orders"]`` is a Topic; iterating gives the names.  One process may have it open for
    writing, any number with ``readonly=True``: these see new topics, partitions and records.

    `access`, `companions`, `producer_ids` and `topic_changes` are parts for other packages of
    logstore, not for applications: they may change in any release.
    """

    def __init__(self, directory: Directory, *, readonly: bool, durability: str,
                 config: PartitionConfig, clock: Clock | None,
                 partitioner: Partitioner | None,
                 check_transaction: TransactionCheck | None) -> None:  # fmt: skip
        """Use `logstore.open`."""
        self._directory = directory
        self._durability = durability
        self._clock = clock
        self._check_transaction = check_transaction
        self._owner: DirectoryLock | None = None  # of the root; None if readonly
        self._reserve = Reserve(directory, 0)  # replaced in `_start`, under the directory lock
        self._dropped = False  # no descriptor is open any more
        self.access = Access(directory.path, readonly=readonly)
        self._table = TopicTable(self, directory, config, partitioner)
        self._suspect_others = suspect_others_of(self._table)
        self._left = CleanShutdown(clean=False, foreign=False)
        self._checkpoints = RootCheckpoints(directory)
        self._partitions_opened = 0
        self._idle = IdlePartitions(directory.path)
        self.companions = Companions(self, self.access)
        self.producer_ids = ProducerIds(
            directory, (clock or SystemClock()).time_ms, check=self.access.check_writable
        )
        self.topic_changes = TopicChanges(self._table, self._checkpoints, self.access)
        self.identity = NodeIdentity("", -1, "")
        self.recovery = StoreRecovery()

    # ---- opening ----

    def _start(
        self, progress: RecoveryProgress | None, reserve_bytes: int, *, allow_unsafe_fs: bool
    ) -> None:
        """Read the root; unless it is readonly, take its lock."""
        directory = self._directory
        try:
            self._idle.fill()  # first: later opens may run out of descriptors
            directory.close_idle = _close_idle_of(weakref.ref(self))
            # Before the lock, which creates a file: a directory of another program stays unchanged.
            refuse_foreign(directory)
            if self.access.readonly:
                self._load_root()
            else:
                require_safe(directory, allow_unsafe=allow_unsafe_fs)
                # From here on no other process opens the root, or a partition of it, for writing.
                self._owner = DirectoryLock(directory, root=True)
                directory.room = self._reserve = Reserve(directory, reserve_bytes)
                self.topic_changes.reserve = self._reserve
                self._reserve.reclaimable = reclaimable_of(self._table)
                self._reserve.fill()
                self._take_over(progress)
            _open_stores.add(self)
        except BaseException:
            self.access.closed = True
            self._drop()
            raise

    def _load_root(self) -> None:
        directory = self._directory
        self._left = CleanShutdown.read(directory)
        if self._checkpoints.read():
            # A broker wrote a checkpoint.  It started after a crash, or crashed itself, and left
            # no other trace.
            self._left = dataclasses.replace(self._left, foreign=True)
        self.recovery.foreign = self._left.foreign
        self._table.read()
        if self._table.topics and self._checkpoints.lost_catalogue:
            log.warning("%s is gone: every topic has the default settings now",
                        self.path / Catalogue.NAME)  # fmt: skip
        identity = NodeIdentity.read(directory)
        if identity is not None:
            self.identity = identity

    def _take_over(self, progress: RecoveryProgress | None) -> None:
        """Prepare the root for changes: remove the marker, finish changes, recover partitions.

        The caller has the lock of the root.
        """
        directory, owner = self._directory, self._owner
        self._load_root()
        assert owner is not None
        if owner.created:
            # The root had no lock file: a process that opened a partition alone before has only
            # the partition's lock.
            for topic in self._table.topics.values():
                for number in topic._numbers:
                    with contextlib.suppress(FileNotFoundError):
                        self._table.in_partition(topic.name, number, owner.check_free)
        new = not self._table.topics and not directory.exists(NodeIdentity.NAME)
        if self._left.foreign:
            # Before the marker is removed: after a crash in here the next open still finds
            # `foreign`.
            self._forget_own_state()
        # Before the first change: from now on a crash leaves a root that is not clean.
        CleanShutdown.clear(directory)
        if not directory.exists(NodeIdentity.NAME):
            self.identity = NodeIdentity.new()
            self.identity.write(directory)
        # Under the lock of the root: a temporary file is of a process that has ended.
        sweep_temporary(directory)
        if self.topic_changes.finish(self.recovery):
            self._table.look_around()
        self.recovery.clean = self._left.clean or new
        if not self.recovery.clean:
            wanted = [(t, n) for t in self._table.topics.values() for n in t._numbers]
            recover_partitions(wanted, self._open_partition, self.recovery, progress)

    def _forget_own_state(self) -> None:
        """Delete logstore's own state of topics and partitions: a broker has changed them since."""
        for name, entry in list(self._table.catalogue.entries.items()):
            numbers = self._table.numbers_of(name)
            if not numbers or self._table.topic_id(name, numbers[0]) not in (None, entry.id):
                self._table.catalogue.remove(name)  # the broker deleted the topic
        self._table.look_around()
        for topic in self._table.topics.values():
            for number in topic._numbers:
                with contextlib.suppress(FileNotFoundError):
                    self._table.in_partition(topic.name, number, forget_state)

    def _open_partition(
        self, topic: Topic, number: int, progress: RecoveryProgress | None = None
    ) -> Partition:
        self.access.check_usable()
        name = topic.name
        # For writing, `_forget_own_state` has removed the outdated state; a reader writes nothing
        # and ignores it.
        only = self.access.readonly and self._left.foreign
        self._partitions_opened += 1
        if self._partitions_opened % 64 == 0:
            make_room_for_files(self._partitions_opened + 64)
        try:
            partition = open_in_store(
                self._directory,
                f"{name}-{number}",
                lock=self._owner,
                durability=self._durability,
                config=topic.config,
                clock=self._clock,
                claims=self._checkpoints.claims((name, number), only=only),
                progress=progress,
            )
            parts = partition.parts
            # Both callbacks refer to the store weakly: a partition does not keep its store open.
            parts.active.durability.sync_failed = self._suspect_others
            if self._check_transaction is not None:
                parts.appender.transaction_check = check_transaction_of(
                    self, self._check_transaction, (name, number)
                )
            return partition
        except FileNotFoundError:
            # A file inside is missing: that is damage of the partition, not a missing partition.
            if self._directory.exists(f"{name}-{number}"):
                raise
            raise FileNotFoundError(
                errno.ENOENT,
                "this partition's directory is gone: put it back from a copy, or delete the topic",
                str(self.path / f"{name}-{number}"),
            ) from None

    @property
    def path(self) -> Path:
        """The directory of the store."""
        return self._directory.path

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self.access.closed

    @property
    def durability(self) -> str:
        """The durability it was opened with: what an append waits for by default."""
        return self._durability

    @property
    def readonly(self) -> bool:
        """Whether it was opened with ``readonly=True``."""
        return self.access.readonly

    def _refresh(self) -> None:
        with self.access.lock:
            self._table.refresh()

    def _topic_id(self, name: str, number: int) -> uuid.UUID | None:
        return self._table.topic_id(name, number)

    def _look_again(self) -> None:
        """Update the topics from the disk if the store is readonly.  Called by Topic."""
        if self.access.readonly and not self.access.closed:
            self._refresh()

    def _now(self) -> dict[str, Topic]:
        self.access.check_usable()
        if self.access.readonly:
            self._refresh()
        return self._table.topics

    def __getitem__(self, name: str) -> Topic:
        topics = self._now()
        try:
            return topics[name]
        except KeyError:
            import difflib  # only for an error

            near = difflib.get_close_matches(str(name), list(topics), n=3)
            raise UnknownTopicError(name, near=tuple(near), where=str(self.path)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._now()))

    def __len__(self) -> int:
        return len(self._now())

    def __contains__(self, name: object) -> bool:
        return name in self._now()

    def __bool__(self) -> bool:
        return True

    # Identity, not Mapping's equality: two stores are not compared topic by topic.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        if self.access.closed:
            return f"<Store {str(self.path)!r} closed>"
        mode = " readonly" if self.access.readonly else ""
        return f"<Store {str(self.path)!r} of {len(self._table.topics)} topics{mode}>"

    def describe(self) -> dict[str, TopicDescription]:
        """Return sizes, offsets and times of every partition, by topic."""
        return {name: self[name].describe() for name in self}

    def check(
        self,
        *,
        deep: bool = True,
        on_corrupt: str = "raise",
        progress: CheckProgress | None = None,
    ) -> list[Problem]:
        """Check the root's files and every file of every partition; return the problems.

        As `Partition.check`: with ``on_corrupt="raise"`` CorruptLogError is raised for the first
        problem of severity "error", with all problems in ``.problems``.  Nothing is written.
        """
        from logstore.store.store_check import check_store

        topics = (topic for _, topic in self.items())
        return check_store(
            self._directory, topics, deep=deep, on_corrupt=on_corrupt, progress=progress
        )

    # ---- topics ----

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        config: PartitionConfig | Mapping[str, Any] | None = None,
        exist_ok: bool = False,
        partitioner: Partitioner | None = None,
        topic_id: uuid.UUID | None = None,
    ) -> Topic:
        """Create a topic, durably: after a crash it exists with all its partitions, or not at all.

        `config` is stored with the topic, by Kafka's names.  `partitioner` is not stored: set it
        again after opening (``topic.partitioner = ...``).  With ``exist_ok=True`` a topic that
        exists is returned unchanged, with its own partitions and settings.  `topic_id` is for a
        topic that exists in a Kafka cluster which will own the directory: a broker sets partitions
        with another id aside.  Raises TopicExistsError, InvalidNameError, ConfigError.
        """
        topic = self.topic_changes.create(
            name, partitions, config=config, exist_ok=exist_ok, topic_id=topic_id
        )
        if partitioner is not None:
            topic.partitioner = partitioner
        return topic

    def _add_partitions(self, topic: Topic, count: int) -> None:
        self.topic_changes.grow(topic, count)

    def alter_topic(self, name: str, config: Mapping[str, Any]) -> PartitionConfig:
        """Change settings of a topic, and store them; a value of None restores the default."""
        self.access.check_writable()
        return self.topic_changes.alter(self[name], config)

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its records, durably.  Handles on its partitions are closed.

        Raises OSError if a file or directory of the topic cannot be removed, such as a directory
        that another program made there.  The topic is deleted nevertheless, and the next open tries
        again to remove the rest.  If the deletion cannot be written to ``logstore.topics``, the
        topic stays.
        """
        self.access.check_writable()
        self.topic_changes.delete(self[name])

    @property
    def clock(self) -> Clock | None:
        """The clock it was opened with; None: the clock of the machine."""
        return self._clock

    def enforce(
        self, *, now: int | datetime.datetime | None = None, dry_run: bool = False
    ) -> dict[str, list[RetentionDecision]]:
        """Delete the segments that retention no longer keeps; return the decisions by partition.

        Works on a full disk, and frees space there.  See `Partition.enforce`.
        """
        if not dry_run:
            self.access.check_writable()
        decisions = {}
        for name, topic in self.items():
            for number in topic.partition_numbers:
                decisions[f"{name}-{number}"] = topic[number].enforce(now=now, dry_run=dry_run)
        return decisions

    # ---- durability ----

    def sync(self) -> None:
        """Make all records of all partitions durable, and write the checkpoints."""
        self.access.check_writable()
        # A partition that is not open has nothing to sync: closing it made its records durable.
        tasks = [partition.sync for partition in self._opened_partitions()]
        at_once(tasks)
        self.checkpoint()

    def checkpoint(self) -> None:
        """Write Kafka's four checkpoints: recovery points, starts, high watermarks, cleaner."""
        with self.access.lock:
            self.access.check_writable()
            self._write_checkpoints()

    def _opened_partitions(self) -> list[Partition]:
        return self._table.opened_partitions()

    def _write_checkpoints(self) -> None:
        """Write the checkpoints.  Each has only offsets that are durable."""
        self._reserve.restore()  # the checkpoints may use it
        self._checkpoints.write(self._opened_partitions())

    # ---- closing ----

    def close(self) -> None:
        """Make all records durable, close every partition and release the directory.

        If one partition cannot be closed, the others are closed nevertheless.  All errors are
        raised at the end, as an ExceptionGroup if there are several, and the next open recovers.
        A second call does nothing.
        """
        access = self.access
        errors: list[BaseException] = []
        if not (access.closed or access.forked):
            errors = self.companions.close()
        with access.lock:
            if access.closed:
                if not self._dropped:  # an interrupt stopped the call before
                    self._drop()
                return
            try:
                access.closed = True  # from now on no partition is opened
                for topic in self._table.topics.values():
                    # In a child process a thread that no longer exists may hold the lock.
                    if not access.forked:
                        topic._wait()
                # Partitions before the checkpoints, and the marker last: each claims what the step
                # before made durable.
                errors += self._close_partitions()
                if any(not partition.closed for partition in self._opened_partitions()):
                    access.closed = False  # a writer holds records: the next close() retries
                elif self._is_whole(errors):
                    self._write_checkpoints()
                    CleanShutdown.write(self._directory)
            except OSError as error:
                errors.append(error)
            except KeyboardInterrupt:
                access.closed = False  # producers may hold records: the next close() continues
                raise
            finally:
                if access.closed:
                    self._drop()
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} errors while closing {self.path}", errors)

    def _is_whole(self, errors: list[BaseException]) -> bool:
        """Return whether every partition is as a marker of a clean shutdown requires."""
        access = self.access
        return not (access.readonly or access.forked or errors or self.recovery.failed) and all(
            partition.failure is None for partition in self._opened_partitions()
        )

    def _close_partitions(self) -> list[BaseException]:
        errors: list[BaseException] = []

        def close_one(partition: Partition) -> None:
            try:
                self._close_partition(partition)
            except BaseException as error:  # noqa: BLE001  all are raised at the end
                errors.append(error)

        partitions = self._opened_partitions()
        plenty = make_room_for_files(len(partitions))
        for partition in partitions:
            if partition.parts.active.asleep or self.access.readonly:  # closing writes nothing
                close_one(partition)
        tasks = [functools.partial(close_one, each) for each in partitions if not each.closed]
        at_once(tasks, plenty=plenty)
        return errors

    def _close_partition(self, partition: Partition) -> None:
        access = self.access
        if not (access.readonly or access.forked or partition.failure or partition.closed):
            # Before `close`, which ends most calls; then `note_closed` raises the offsets.
            self._checkpoints.note(partition)
        partition.close()
        self._checkpoints.note_closed(partition)

    def _drop(self) -> None:
        """Close all descriptors and release the lock.  Writes nothing."""
        for partition in self._opened_partitions():
            partition.parts.discard()
        self._idle.drop()  # the spare descriptors
        # The descriptors before the lock: the next owner may delete or replace every file.
        self._directory.close()
        if self._owner is not None:
            self._owner.release()
        _open_stores.discard(self)
        self._dropped = True

    def _abandon_in_child(self) -> None:
        """After a fork: the directory and the companions are the parent's."""
        self.access.abandon_in_child()
        self.companions.forget()
        if self._owner is not None:
            self._owner.release()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store cannot be pickled: open it again where it is needed")

    def __del__(self) -> None:
        if getattr(self, "_owner", None) is None:  # __init__ failed, or readonly
            return
        if not self.access.closed and not self.access.forked:
            warnings.warn(
                f"{self!r} was dropped without close(): the next open will check it",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


def open_store(path: Path, *, readonly: bool, create: bool, durability: str,
               config: PartitionConfig | Mapping[str, Any] | None, clock: Clock | None,
               partitioner: Partitioner | None, progress: RecoveryProgress | None,
               reserve_bytes: int, allow_unsafe_fs: bool,
               check_transaction: TransactionCheck | None = None) -> Store:  # fmt: skip
    """Open a store as `logstore.open` does, but leave the open transactions as they are."""
    settings = PartitionConfig.of(config)
    wants_fsync(durability)
    directory = Directory(path, create=create and not readonly)
    store = Store(directory, readonly=readonly, durability=durability, config=settings,
                  clock=clock, partitioner=partitioner,
                  check_transaction=check_transaction)  # fmt: skip
    store._start(progress, reserve_bytes, allow_unsafe_fs=allow_unsafe_fs)
    return store


def abandon_store(store: Store) -> None:
    """Close the descriptors of a store and write nothing, as if its process were killed."""
    store.companions.forget()
    store.access.closed = True
    store._drop()


def set_member(store: Store, member: ClusterMember | None) -> None:
    """Make a store a node of a cluster; None: a store of its own again."""

    def change() -> None:
        if member is None:
            return ClusterMember.remove(store._directory)
        member.write(store._directory)  # first: after a kill between both it is a member already
        store.identity = dataclasses.replace(store.identity, **member._asdict())
        return store.identity.write(store._directory)

    store.access.change(change)


def has_space(store: Store) -> bool:
    """Return whether the reserve of the disk could be filled again."""
    store._reserve.restore()
    return not store._reserve.short


def _close_idle_of(store: weakref.ref[Store]) -> Callable[[], bool]:
    def close_idle() -> bool:
        # A weak reference: the directory is part of the store, and a strong one would be a cycle.
        held = store()
        return held is not None and not held.access.forked and held._idle.free(held)

    return close_idle


def _after_fork_in_child() -> None:
    for store in list(_open_stores):
        store._abandon_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
