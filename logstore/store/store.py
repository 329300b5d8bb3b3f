"""Store: a directory of topics, laid out as a broker's log directory, with one owner at a time.

``logstore.open(path)`` opens one.  It maps names to Topics; a Topic is a sequence of Partitions.

After a clean shutdown nothing but the root is read: a partition is opened when it is first used,
and its files stay as they are until it is first changed.  After anything else every partition is
recovered before `open` returns, several at a time.

Invariant: whatever the root claims of its partitions (recovery points, the marker of a clean
shutdown) was true of the files before it was written, and the marker goes before anything changes.

Threads share a Store and its Topics freely.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import logging
import os
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from logstore.clock import Clock, SystemClock
from logstore.closeable import Closeable
from logstore.config import ConfigError, PartitionConfig, wants_fsync
from logstore.errors import (
    ClosedError,
    ForkedHandleError,
    LogStoreError,
    ReadOnlyError,
    TopicExistsError,
    UnknownTopicError,
)
from logstore.files.directory import Directory
from logstore.files.disk_reserve import Reserve
from logstore.files.filesystem import require_safe
from logstore.files.lock import DirectoryLock
from logstore.log.topic_id import new_uuid
from logstore.partition.active_log import WritableLog
from logstore.partition.partition import Partition
from logstore.partitioner import Partitioner
from logstore.recovery.report import RecoveryProgress
from logstore.root.catalogue import (
    PARTITIONS_MAX,
    TopicEntry,
)
from logstore.root.checkpoints import TopicPartition
from logstore.root.clean_shutdown import CleanShutdown
from logstore.root.identity import NodeIdentity
from logstore.root.producer_ids import ProducerIds
from logstore.store.descriptors import IdlePartitions, make_room_for_files
from logstore.store.recovery_pool import at_once, recover_partitions
from logstore.store.recovery_report import StoreRecovery
from logstore.store.root_checkpoints import RootCheckpoints
from logstore.store.root_files import forget_state, refuse_foreign, sweep_temporary
from logstore.store.topic import Topic, TopicDescription
from logstore.store.topic_changes import TopicChanges, own_settings
from logstore.store.topic_table import TopicTable
from logstore.waking import uninterrupted

if TYPE_CHECKING:  # imported by those who look for damage, or delete
    from logstore.checking.partition_check import CheckProgress
    from logstore.checking.problem import Problem
    from logstore.log.retention import RetentionDecision

__all__ = ["Store", "open_store"]

T = TypeVar("T")
C = TypeVar("C", bound=Closeable)

log = logging.getLogger("logstore.store")

_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()


class Store(Mapping[str, Topic], Closeable):
    """A directory of topics.  Open one with `logstore.open`; ``with`` closes it.

    ``store["orders"]`` is a Topic; iterating gives the names.  One process may have it open for
    writing, any number with ``readonly=True``: these see new topics, partitions and records.
    """

    def __init__(self, directory: Directory, *, readonly: bool, durability: str,
                 config: PartitionConfig, clock: Clock | None,
                 partitioner: Partitioner | None) -> None:  # fmt: skip
        """Use `logstore.open`."""
        self._directory = directory
        self._readonly = readonly
        self._durability = durability
        self._clock = clock
        self._lock = threading.RLock()
        self._owner: DirectoryLock | None = None
        self._reserve = Reserve(directory, 0)
        self._closed = False
        self._dropped = False  # nothing is open any more
        self._forked = False
        self._table = TopicTable(directory, config, partitioner)
        self._left = CleanShutdown(clean=False, foreign=False)
        self._checkpoints = RootCheckpoints(directory)
        self._partitions_opened = 0
        self._companions: dict[Callable[[Store], Closeable], Closeable] = {}
        # Of the transactions above: raises unless a producer's id and epoch have one open there.
        self.verify_transaction: Callable[[Store, int, int, TopicPartition], None] | None = None
        self._idle = IdlePartitions(directory.path)
        self.identity = NodeIdentity("", -1, "")
        self.recovery = StoreRecovery()

    # ---- opening ----

    def _start(
        self, progress: RecoveryProgress | None, reserve_bytes: int, *, allow_unsafe_fs: bool
    ) -> None:
        """Read the root and, unless it is readonly, become its owner."""
        directory = self._directory
        try:
            self._idle.fill()
            directory.close_idle = _close_idle_of(weakref.ref(self))
            refuse_foreign(directory)
            if self._readonly:
                self._load_root()
            else:
                require_safe(directory, allow_unsafe=allow_unsafe_fs)
                self._owner = DirectoryLock(directory, root=True)
                directory.room = self._reserve = Reserve(directory, reserve_bytes)
                self._reserve.reclaimable = _reclaimable_of(weakref.ref(self))
                self._reserve.fill()
                self._take_over(progress)
            _open_stores.add(self)
        except BaseException:
            self._closed = True
            self._drop()
            raise

    def _load_root(self) -> None:
        directory = self._directory
        self._left = CleanShutdown.read(directory)
        if self._checkpoints.read():
            # A broker that came after a crash, of ours or its own, and left no other trace.
            self._left = dataclasses.replace(self._left, foreign=True)
        self.recovery.foreign = self._left.foreign
        self._table.read(self)
        identity = NodeIdentity.read(directory)
        if identity is not None:
            self.identity = identity

    def _take_over(self, progress: RecoveryProgress | None) -> None:
        """Become the owner: from the first change on, the directory is not closed cleanly."""
        directory, owner = self._directory, self._owner
        self._load_root()
        assert owner is not None
        if owner.created:
            # Without a lock before, nobody who opened a partition alone could be noticed yet.
            for topic in self._table.topics.values():
                for number in topic._numbers:
                    with contextlib.suppress(FileNotFoundError):
                        self._table.in_partition(topic.name, number, owner.check_free)
        new = not self._table.topics and not directory.exists(NodeIdentity.NAME)
        if self._left.foreign:
            self._forget_own_state()
        CleanShutdown.clear(directory)
        if not directory.exists(NodeIdentity.NAME):
            self.identity = NodeIdentity.new()
            self.identity.write(directory)
        sweep_temporary(directory)
        if self._changes.finish(self.recovery):
            self._table.look_around(self)
        self.recovery.clean = self._left.clean or new
        if not self.recovery.clean:
            wanted = [(t, n) for t in self._table.topics.values() for n in t._numbers]
            recover_partitions(wanted, self._open_partition, self.recovery, progress)

    def _forget_own_state(self) -> None:
        """A broker has been here since: what we wrote down of the partitions is out of date."""
        for name, entry in list(self._table.catalogue.entries.items()):
            numbers = self._table.numbers_of(name)
            if not numbers or self._table.topic_id(name, numbers[0]) not in (None, entry.id):
                self._table.catalogue.remove(name)  # deleted, perhaps made again
        self._table.look_around(self)
        for topic in self._table.topics.values():
            for number in topic._numbers:
                with contextlib.suppress(FileNotFoundError):
                    self._table.in_partition(topic.name, number, forget_state)

    def _open_partition(
        self, topic: Topic, number: int, progress: RecoveryProgress | None = None
    ) -> Partition:
        self._check_usable()
        name = topic.name
        only = self._readonly and self._left.foreign
        self._partitions_opened += 1
        if self._partitions_opened % 64 == 0:
            make_room_for_files(self._partitions_opened + 64)
        try:
            partition = Partition.open_in_store(
                self._directory,
                f"{name}-{number}",
                lock=self._owner,
                durability=self._durability,
                config=topic.config,
                clock=self._clock,
                claims=self._checkpoints.claims((name, number), only=only),
                progress=progress,
            )
            partition.sync_failed = _suspect_others_of(weakref.ref(self))
            partition.transaction_check = _transaction_check_of(weakref.ref(self), (name, number))
            return partition
        except FileNotFoundError:
            if self._directory.exists(f"{name}-{number}"):
                raise
            raise FileNotFoundError(
                errno.ENOENT,
                "this partition's directory is gone: put it back from a copy, or delete the topic",
                str(self.path / f"{name}-{number}"),
            ) from None

    @property
    def path(self) -> Path:
        """The directory."""
        return self._directory.path

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def readonly(self) -> bool:
        """Whether it was opened with ``readonly=True``."""
        return self._readonly

    def _refresh(self) -> None:
        with self._lock:
            self._table.refresh(self)

    def _topic_id(self, name: str, number: int) -> uuid.UUID | None:
        return self._table.topic_id(name, number)

    def _look_again(self) -> None:
        """Beside a writer, see what it did; for a Topic."""
        if self._readonly and not self._closed:
            self._refresh()

    def _now(self) -> dict[str, Topic]:
        self._check_usable()
        if self._readonly:
            self._refresh()
        return self._table.topics

    def __getitem__(self, name: str) -> Topic:
        topics = self._now()
        try:
            return topics[name]
        except KeyError:
            import difflib  # for an error alone

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

    # A handle is equal to itself alone; two stores are not compared topic by topic.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        if self._closed:
            return f"<Store {str(self.path)!r} closed>"
        mode = " readonly" if self._readonly else ""
        return f"<Store {str(self.path)!r} of {len(self._table.topics)} topics{mode}>"

    def describe(self) -> dict[str, TopicDescription]:
        """Sizes, offsets and times of every partition, by topic."""
        return {name: self[name].describe() for name in self}

    def check(
        self,
        *,
        deep: bool = True,
        on_corrupt: str = "raise",
        progress: CheckProgress | None = None,
    ) -> list[Problem]:
        """Look at the root's files and at every file of every partition; what is wrong.

        As `Partition.check`: with ``on_corrupt="raise"`` CorruptLogError is raised for the first
        problem of severity "error", and has all of them in ``.problems``.  Nothing is written.
        """
        from logstore.checking.partition_check import (
            bytes_to_inspect,
            check_choice,
            raise_first_error,
        )
        from logstore.checking.problem import Problem, ProblemKind
        from logstore.checking.root_check import RootInspection

        check_choice(on_corrupt)
        problems = RootInspection(self._directory).run()
        unopened: BaseException | None = None
        done = total = 0

        def moved(now: int, in_all: int) -> None:
            if progress is not None:
                progress(done + now, total + in_all)

        for name, topic in self.items():
            for number in list(topic._numbers):
                where = self.path / f"{name}-{number}"
                try:
                    partition = topic[number]
                    size = bytes_to_inspect(partition.segments, deep=deep)
                    problems += partition.find_problems(deep=deep, progress=moved)
                except UnknownTopicError:
                    break  # deleted meanwhile
                except ClosedError:
                    raise
                except (LogStoreError, OSError) as error:
                    unopened = unopened or error
                    if not any(problem.path == where for problem in problems):
                        kind = ProblemKind.UNOPENABLE_PARTITION
                        problems.append(Problem(kind, where, str(error)))
                    continue
                done, total = done + size, total + size
        if on_corrupt == "raise":
            if unopened is not None:
                raise unopened
            raise_first_error(problems)
        return problems

    # ---- topics ----

    def _writable(self) -> None:
        self._check_usable()
        if self._readonly:
            raise ReadOnlyError(f"{self.path} was opened with readonly=True")

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
        """Make a topic, durably: after a crash it is there with all its partitions, or not at all.

        `config` is stored with it, by Kafka's names; `partitioner` is not: say it again after
        opening (``topic.partitioner = ...``).  ``exist_ok=True`` returns a topic that exists as it
        is, whatever its partitions and settings.  `topic_id` is for a topic that a Kafka cluster
        knows already and will take over: a broker sets aside what has another id.  Raises
        TopicExistsError, InvalidNameError, ConfigError.
        """
        settings = own_settings(config)
        self._table.config.with_settings(settings)
        if not hasattr(partitions, "__index__"):
            raise ConfigError(f"partitions must be an int, not {partitions!r}")
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise ConfigError(f"partitions must be from 1 to {PARTITIONS_MAX}, not {partitions!r}")
        if not isinstance(topic_id, uuid.UUID | None):
            raise TypeError(f"topic_id must be a uuid.UUID, not {topic_id!r}")

        def create() -> Topic:
            topic = self._table.topics.get(name)
            if topic is None:
                entry = TopicEntry(topic_id or new_uuid(), partitions, settings)
                topic = self._changes.create(self, name, entry)
            elif not exist_ok:
                raise TopicExistsError(name, where=str(self.path))
            if partitioner is not None:
                topic.partitioner = partitioner
            return topic

        return self._change(create)

    @property
    def _changes(self) -> TopicChanges:
        return TopicChanges(self._table, self._checkpoints, self._reserve)

    def _change(self, act: Callable[[], T]) -> T:
        """Change the topics: an interrupt does not stop it, so that none is left half made."""

        def locked() -> T:
            with self._lock:
                self._writable()
                return act()

        owned: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        return locked() if owned() else uninterrupted(locked)

    def declare_topic(
        self, name: str, partitions: int, *, config: Mapping[str, Any] | None = None
    ) -> Topic:
        """A topic of which a partition is made when it is first needed: see `make_partition`.

        For topics that a coordinator keeps its state in: of many partitions few are ever used.  One
        that exists is taken as it is.
        """
        settings = own_settings(config)

        def declare() -> Topic:
            known = self._table.topics.get(name)
            return known or self._changes.declare(self, name, partitions, settings)

        return self._table.topics.get(name) or self._change(declare)

    def declared_partitions(self, name: str) -> int:
        """How many partitions a topic has, made or not."""
        topic = self[name]
        entry = self._table.catalogue.entries.get(name)
        there = max(topic._numbers, default=-1) + 1
        return there if entry is None else max(entry.partitions, there)

    def make_partition(self, name: str, number: int) -> Partition:
        """A partition of a declared topic, made durably if it is not there yet."""
        topic = self[name]
        if number not in topic._numbers:
            self._change(lambda: self._changes.make_declared(topic, number))
        return topic[number]

    def _add_partitions(self, topic: Topic, count: int) -> None:
        if count < 1:
            raise ConfigError(f"count must be at least 1, not {count!r}")

        def grow() -> None:
            self._changes.grow(topic, count)
            self._table.look_around(self)

        self._change(grow)

    def alter_topic(self, name: str, config: Mapping[str, Any]) -> PartitionConfig:
        """Change settings of a topic, and keep them; a value of None goes back to the default."""
        with self._lock:
            self._writable()
            return self._changes.alter(self[name], config)

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its records, durably.  Handles on its partitions are closed.

        Raises OSError when something in its directories cannot be removed, such as a directory that
        somebody put there.  The topic is gone all the same, and the next open tries again.
        """
        self._change(lambda: self._changes.delete(self[name]))

    @property
    def deleted_topics(self) -> tuple[str, ...]:
        """Topics that were deleted, and whose committed offsets are still to go."""
        return self._table.catalogue.deleted

    def forget_deleted_topics(self, names: Collection[str]) -> None:
        """Forget the committed offsets of deleted topics."""
        with self._lock:
            self._writable()
            self._table.catalogue.forget_deleted(names)

    @property
    def clock(self) -> Clock | None:
        """The clock it was opened with; None: the machine's own."""
        return self._clock

    def enforce(
        self, *, now: int | datetime.datetime | None = None, dry_run: bool = False
    ) -> dict[str, list[RetentionDecision]]:
        """Let every partition delete what its settings no longer keep; decisions by partition.

        Works on a full disk, and is the way out of one.  See `Partition.enforce`.
        """
        if not dry_run:
            self._writable()
        decisions = {}
        for name, topic in self.items():
            for number in list(topic._numbers):
                decisions[f"{name}-{number}"] = topic[number].enforce(now=now, dry_run=dry_run)
        return decisions

    # ---- durability ----

    def sync(self) -> None:
        """Make all records of all partitions durable, and write down that they are."""
        self._writable()
        tasks = [partition.sync for partition in self._opened_partitions()]
        at_once(tasks)
        self.checkpoint()

    def checkpoint(self) -> None:
        """Write Kafka's four checkpoints: recovery points, starts, high watermarks, cleaning."""
        with self._lock:
            self._writable()
            self._write_checkpoints()

    def _opened_partitions(self) -> list[Partition]:
        return self._table.opened_partitions()

    def _write_checkpoints(self) -> None:
        """Each only after what it claims is durable."""
        self._reserve.restore()
        self._checkpoints.write(self._opened_partitions())

    # ---- producers ----

    @functools.cached_property
    def _producer_ids(self) -> ProducerIds:
        return ProducerIds(self._directory, (self._clock or SystemClock()).time_ms)

    def take_producer_id(self, above: int = -1) -> int:
        """An id for a producer that nobody had before, here or at a broker; see `ProducerIds`."""
        with self._lock:
            self._writable()
            return self._producer_ids.take(above)

    # ---- companions ----

    def companion(self, kind: Callable[[Store], C]) -> C:
        """The one `kind` of this store: made when it is first asked for, closed with the store.

        For packages above the store: a coordinator belongs to the store, not to its first caller.
        """
        with self._lock:
            self._check_usable()
            found = self._companions.get(kind)
            if found is None:
                found = self._companions[kind] = kind(self)
            return cast(C, found)

    # ---- closing ----

    def close(self) -> None:
        """Make everything durable, close every partition and give the directory back.

        What cannot be closed does not keep others from it: all errors are raised together, as an
        ExceptionGroup when there are several, and the next open recovers.  Closing twice is
        harmless.
        """
        errors: list[BaseException] = []
        if not (self._closed or self._forked):
            # The newest first, and without the lock: their threads may need it to come to an end.
            # One that an interrupt stops stays, and is closed when close() is called again.
            while self._companions:
                kind, companion = next(reversed(self._companions.items()))
                try:
                    companion.close()
                except Exception as error:  # noqa: BLE001  raised below, with the others
                    errors.append(error)
                self._companions.pop(kind, None)
        with self._lock:
            if self._closed:
                if not self._dropped:  # an interrupt came before the end
                    self._drop()
                return
            try:
                self._closed = True  # from now on no partition is opened
                for topic in self._table.topics.values():
                    if not self._forked:  # there, a lock may be held by a thread that is no more
                        topic._wait()
                errors += self._close_partitions()
                if any(not partition.closed for partition in self._opened_partitions()):
                    self._closed = False  # a writer holds records: closing again tries again
                elif self._is_whole(errors):
                    self._write_checkpoints()
                    CleanShutdown.write(self._directory)
            except OSError as error:
                errors.append(error)
            except KeyboardInterrupt:
                self._closed = False  # producers may hold records: closing again goes on
                raise
            finally:
                if self._closed:
                    self._drop()
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} errors while closing {self.path}", errors)

    def _is_whole(self, errors: list[BaseException]) -> bool:
        """Whether all that a clean shutdown vouches for is so."""
        return not (self._readonly or self._forked or errors or self.recovery.failed) and all(
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
            if partition.asleep or self._readonly:  # nothing to wait for
                close_one(partition)
        tasks = [functools.partial(close_one, each) for each in partitions if not each.closed]
        at_once(tasks, plenty=plenty)
        return errors

    def _close_partition(self, partition: Partition) -> None:
        if not (self._readonly or self._forked or partition.failure or partition.closed):
            self._checkpoints.note(partition)
        partition.close()
        self._checkpoints.note_closed(partition)

    def _drop(self) -> None:
        """Close descriptors; nothing is written."""
        for partition in self._opened_partitions():
            partition.discard()
        self._idle.drop()
        self._directory.close()
        if self._owner is not None:
            self._owner.release()
        _open_stores.discard(self)
        self._dropped = True

    def _check_usable(self) -> None:
        if self._forked:
            raise ForkedHandleError(
                f"{self.path} was opened before a fork: open it again in this process "
                f"(one process may write, any number may use readonly=True)"
            )
        if self._closed:
            raise ClosedError(f"the store {self.path} is closed")

    def _abandon_in_child(self) -> None:
        """After fork: the directory is the parent's; see Partition."""
        self._forked = True
        self._lock = threading.RLock()
        self._companions = {}
        if self._owner is not None:
            self._owner.release()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store cannot be pickled: open it again where it is needed")

    def __del__(self) -> None:
        if getattr(self, "_owner", None) is not None and not self._closed and not self._forked:
            warnings.warn(
                f"{self!r} was dropped without close(): the next open will check it",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


def open_store(path: Path, *, readonly: bool, create: bool, durability: str,
               config: PartitionConfig | Mapping[str, Any] | None, clock: Clock | None,
               partitioner: Partitioner | None, progress: RecoveryProgress | None,
               reserve_bytes: int, allow_unsafe_fs: bool) -> Store:  # fmt: skip
    """Open a store without its coordinators: `logstore.open` without their part."""
    settings = PartitionConfig.of(config)
    wants_fsync(durability)
    directory = Directory(path, create=create and not readonly)
    store = Store(directory, readonly=readonly, durability=durability, config=settings,
                  clock=clock, partitioner=partitioner)  # fmt: skip
    store._start(progress, reserve_bytes, allow_unsafe_fs=allow_unsafe_fs)
    return store


def _close_idle_of(store: weakref.ref[Store]) -> Callable[[], bool]:
    def close_idle() -> bool:
        held = store()
        return held is not None and not held._forked and held._idle.free(held)

    return close_idle


def _suspect_others_of(owner: weakref.ref[Store]) -> Callable[[WritableLog], None]:
    """After a failed fsync, the next append of every other partition ends with one of its own."""

    def suspect(failed: WritableLog) -> None:
        held = owner()
        for partition in [] if held is None else held._opened_partitions():
            if partition is not failed and not partition.closed and not partition.readonly:
                partition.suspect()

    return suspect


def _transaction_check_of(
    owner: weakref.ref[Store], where: TopicPartition
) -> Callable[[int, int], None]:
    """For the raw batches of producers; a partition keeps no store alive."""

    def check(producer_id: int, producer_epoch: int) -> None:
        held = owner()
        if held is not None and held.verify_transaction is not None:
            held.verify_transaction(held, producer_id, producer_epoch, where)

    return check


def _reclaimable_of(owner: weakref.ref[Store]) -> Callable[[], int]:
    """What retention could free in all partitions that are open; a reserve keeps no store alive."""

    def reclaimable() -> int:
        held = owner()
        partitions = [] if held is None else held._opened_partitions()
        return sum(p.reclaimable_bytes() for p in partitions if not p.closed)

    return reclaimable


def _after_fork_in_child() -> None:
    for store in list(_open_stores):
        store._abandon_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
