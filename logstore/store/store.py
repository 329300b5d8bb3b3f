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
import resource
import sys
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from logstore.clock import Clock, SystemClock
from logstore.closeable import Closeable
from logstore.config import ConfigError, PartitionConfig, wants_fsync
from logstore.errors import (
    ClosedError,
    ForkedHandleError,
    LogStoreError,
    NotALogError,
    ReadOnlyError,
    TopicExistsError,
    UnknownTopicError,
)
from logstore.files.directory import Directory
from logstore.files.disk_reserve import RESERVE_NAME, STORE_RESERVE_BYTES, Reserve
from logstore.files.filesystem import require_safe
from logstore.files.lock import DirectoryLock
from logstore.files.names import segment_name
from logstore.log.epochs import LEADER_EPOCHS
from logstore.log.segment_digest import DIGEST_SUFFIX
from logstore.log.state import CleanerCheckpoint, DurableMark, PartitionState
from logstore.log.topic_id import PARTITION_METADATA, new_uuid, read_topic_id, topic_id_text
from logstore.partition.active_log import WritableLog
from logstore.partition.partition import Partition
from logstore.partitioner import KeyPartitioner, Partitioner
from logstore.recovery.report import RecoveryProgress, RecoveryReport
from logstore.root.catalogue import (
    PARTITIONS_MAX,
    Catalogue,
    TopicEntry,
    is_deleted,
    partition_directories,
)
from logstore.root.checkpoint_twin import CheckpointTwin
from logstore.root.checkpoints import CHECKPOINTS, TopicPartition
from logstore.root.clean_shutdown import CleanShutdown
from logstore.root.identity import NodeIdentity
from logstore.root.producer_ids import ProducerIds
from logstore.store.root_checkpoints import RootCheckpoints
from logstore.store.topic import Topic, TopicDescription, check_topic_name
from logstore.waking import uninterrupted

if TYPE_CHECKING:  # imported by those who look for damage, or delete
    from logstore.checking.partition_check import CheckProgress
    from logstore.checking.problem import Problem
    from logstore.log.retention import RetentionDecision

__all__ = ["Store", "StoreRecovery", "open"]

T = TypeVar("T")
C = TypeVar("C", bound=Closeable)

log = logging.getLogger("logstore.store")

RECOVERY_THREADS = min(8, 2 * (os.cpu_count() or 1))
FILES_PER_PARTITION = 4  # descriptors of one that is written: directory, log, mark, one to spare
FILES_RESERVED = 128  # for everything else in the process
FILES_SPARE = 3  # what closing one partition needs at once
SETTLED_NS = 1_000_000_000  # a directory's time that is older than this tells of every change

COMMITTED_OFFSETS = "__consumer_offsets"  # where offsets of deleted topics have to go as well

_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()


@dataclasses.dataclass(slots=True)
class StoreRecovery:
    """What opening found.  ``store.recovery``.

    `partitions`: the report of each that had to be checked; `failed`: those that could not be
    opened, and why.  Using one of these raises that error; all others can be used.  `unfinished`:
    directories and topics on their way out that could not be removed, and why; they are out of
    sight, and the next open tries again.
    """

    clean: bool = True
    partitions: dict[str, RecoveryReport] = dataclasses.field(default_factory=dict)
    failed: dict[str, BaseException] = dataclasses.field(default_factory=dict)
    removed: list[str] = dataclasses.field(default_factory=list)  # creations and deletions undone
    unfinished: dict[str, OSError] = dataclasses.field(default_factory=dict)


def open(
    path: str | os.PathLike[str],
    *,
    readonly: bool = False,
    create: bool = True,
    durability: str = "fsync",
    config: PartitionConfig | Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    partitioner: Partitioner | None = None,
    progress: RecoveryProgress | None = None,
    reserve_bytes: int = STORE_RESERVE_BYTES,
    allow_unsafe_fs: bool = False,
) -> Store:
    """Open a directory of topics, creating it if it is missing.

    `config` is what topics without a setting of their own use; like `partitioner`, which chooses
    partitions for all topics, it is not stored.  `progress` is called with (bytes checked, bytes
    found so far) while partitions are recovered after a crash, from several threads.
    `reserve_bytes` of the disk are kept for deleting, closing and recovering when it is full.

    Raises LockedError when another process, store, partition or broker writes there,
    FileNotFoundError when it is missing and may not be created, NotALogError for a directory that
    holds something else, and UnsafeFileSystemError on a network file system, unless
    ``allow_unsafe_fs=True``.
    """
    return Store._open(Path(path), readonly=readonly, create=create, durability=durability,
                       config=config, clock=clock, partitioner=partitioner,
                       progress=progress, reserve_bytes=reserve_bytes,
                       allow_unsafe_fs=allow_unsafe_fs)  # fmt: skip


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
        self._config = config
        self._clock = clock
        self._partitioner = partitioner
        self._lock = threading.RLock()
        self._owner: DirectoryLock | None = None
        self._reserve = Reserve(directory, 0)
        self._closed = False
        self._dropped = False  # nothing is open any more
        self._forked = False
        self._topics: dict[str, Topic] = {}
        self._catalogue = Catalogue(directory, {})
        self._left = CleanShutdown(clean=False, foreign=False)
        self._checkpoints = RootCheckpoints(directory)
        self._seen: tuple[int, ...] = ()
        self._partitions_opened = 0
        self._companions: dict[Callable[[Store], Closeable], Closeable] = {}
        # Of the transactions above: raises unless a producer's id and epoch have one open there.
        self.verify_transaction: Callable[[Store, int, int, TopicPartition], None] | None = None
        # Descriptors for closing partitions when the process may open no more.
        self._spare: list[Directory] = []
        self._spare_open = False  # whether a partition is being closed to free descriptors
        self._evicting = threading.RLock()
        self.identity = NodeIdentity("", -1, "")
        self.recovery = StoreRecovery()

    # ---- opening ----

    @classmethod
    def _open(cls, path: Path, *, readonly: bool, create: bool, durability: str,
              config: PartitionConfig | Mapping[str, Any] | None, clock: Clock | None,
              partitioner: Partitioner | None, progress: RecoveryProgress | None,
              reserve_bytes: int, allow_unsafe_fs: bool) -> Store:  # fmt: skip
        settings = PartitionConfig.of(config)
        wants_fsync(durability)
        directory = Directory(path, create=create and not readonly)
        self = cls(directory, readonly=readonly, durability=durability, config=settings,
                   clock=clock, partitioner=partitioner)  # fmt: skip
        try:
            self._spare += [Directory(path) for _ in range(FILES_SPARE)]
            directory.close_idle = _close_idle_of(weakref.ref(self))
            _refuse_foreign(directory)
            if readonly:
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
        return self

    def _load_root(self) -> None:
        directory = self._directory
        self._left = CleanShutdown.read(directory)
        if self._checkpoints.read():
            # A broker that came after a crash, of ours or its own, and left no other trace.
            self._left = dataclasses.replace(self._left, foreign=True)
        self._catalogue = Catalogue.read(directory)
        identity = NodeIdentity.read(directory)
        if identity is not None:
            self.identity = identity
        self._look_around()

    def _take_over(self, progress: RecoveryProgress | None) -> None:
        """Become the owner: from the first change on, the directory is not closed cleanly."""
        directory, owner = self._directory, self._owner
        self._load_root()
        assert owner is not None
        if owner.created:
            # Without a lock before, nobody who opened a partition alone could be noticed yet.
            for topic in self._topics.values():
                for number in topic._numbers:
                    with contextlib.suppress(FileNotFoundError):
                        self._in_partition(topic.name, number, owner.check_free)
        new = not self._topics and not directory.exists(NodeIdentity.NAME)
        if self._left.foreign:
            self._forget_own_state()
        CleanShutdown.clear(directory)
        if not directory.exists(NodeIdentity.NAME):
            self.identity = NodeIdentity.new()
            self.identity.write(directory)
        self._sweep_temporary()
        self._finish_changes()
        self.recovery.clean = self._left.clean or new
        if not self.recovery.clean:
            self._recover(progress)

    def _sweep_temporary(self) -> None:
        """Files that a crash left half-written, before they got their name."""
        ours = (NodeIdentity.NAME, Catalogue.NAME, ProducerIds.NAME, CheckpointTwin.NAME)
        names = (*CHECKPOINTS, *ours, *CleanShutdown.NAMES)
        for name in self._directory.names():
            if name.endswith(".tmp") and name.startswith(names):
                self._directory.unlink(name)

    def _forget_own_state(self) -> None:
        """A broker has been here since: what we wrote down of the partitions is out of date."""
        for name, entry in list(self._catalogue.entries.items()):
            numbers = self._numbers_of(name)
            if not numbers or self._topic_id(name, numbers[0]) not in (None, entry.id):
                self._catalogue.remove(name)  # deleted, perhaps made again
        self._look_around()
        for topic in self._topics.values():
            for number in topic._numbers:
                with contextlib.suppress(FileNotFoundError):
                    self._in_partition(topic.name, number, _forget_state)

    def _finish_changes(self) -> None:
        """Undo creations and finish deletions that a crash cut short.

        What cannot be finished stays as it is, and keeps nobody from the rest of the store.
        """
        report = self.recovery
        deleted = [name for name in self._directories() if is_deleted(name)]
        for name, entry in list(self._catalogue.entries.items()):
            try:
                if entry.deleting:
                    self._set_aside(name, self._numbers_of(name))
                    self._catalogue.remove(name)
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
            self._look_around()

    def _recover(self, progress: RecoveryProgress | None) -> None:
        wanted = [(topic, number) for topic in self._topics.values() for number in topic._numbers]
        plenty = _make_room_for_files(len(wanted))
        checked: dict[TopicPartition, tuple[int, int]] = {}

        def open_one(topic: Topic, number: int) -> None:
            def moved(done: int, total: int) -> None:
                checked[topic.name, number] = (done, total)
                if progress is not None:
                    sums = list(checked.values())
                    progress(sum(done for done, _ in sums), sum(total for _, total in sums))

            name = f"{topic.name}-{number}"
            try:
                partition = self._open_partition(topic, number, progress=moved)
            except (LogStoreError, OSError) as error:
                log.warning("%s cannot be opened: %s", name, str(error))
                self.recovery.failed[name] = error
                return
            topic._opened[number] = partition
            if not partition.recovery.clean:
                self.recovery.partitions[name] = partition.recovery

        tasks = [functools.partial(open_one, topic, number) for topic, number in wanted]
        _at_once(tasks, threads=RECOVERY_THREADS if plenty else 1)

    def _open_partition(
        self, topic: Topic, number: int, *, progress: RecoveryProgress | None = None
    ) -> Partition:
        self._check_usable()
        name = topic.name
        only = self._readonly and self._left.foreign
        self._partitions_opened += 1
        if self._partitions_opened % 64 == 0:
            _make_room_for_files(self._partitions_opened + 64)
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

    # ---- what is there ----

    def _numbers_of(self, name: str) -> list[int]:
        return partition_directories(self._directories()).get(name, [])

    def _directories(self) -> list[str]:
        """Names of what is a directory at the root; a link is not."""
        return self._directory.directories()

    def _look_around(self) -> None:
        """Bring the topics up to what directory and catalogue say now."""
        found = partition_directories(self._directories())
        for name, entry in self._catalogue.entries.items():
            if entry.deleting or entry.creating_from == 0:
                found.pop(name, None)
            elif entry.creating_from > 0:
                found[name] = list(range(entry.creating_from))
            else:  # one that is missing is damage; a broker may have added some
                found[name] = sorted({*entry.numbers, *found.get(name, ())})
        topics = {}
        for name, numbers in found.items():
            known = self._catalogue.entries.get(name)
            topic = self._topics.get(name)
            if topic is None or (known and topic._id not in (None, known.id)):
                topic = self._make_topic(name, numbers, known)
            topic._id = known.id if known else topic._id
            topic._numbers = numbers
            topic._dense = numbers == list(range(len(numbers)))
            topic._config = self._config_of(known)
            topics[name] = topic
        for name, topic in self._topics.items():
            if topics.get(name) is not topic:
                topic._forget()
        self._topics = topics

    def _topic_id(self, name: str, number: int) -> uuid.UUID | None:
        return self._in_partition(name, number, read_topic_id)

    def _in_partition(self, name: str, number: int, act: Callable[[Directory], T]) -> T:
        """Do something in a partition's directory without opening the partition."""
        directory = self._directory.below(f"{name}-{number}")
        try:
            return act(directory)
        finally:
            directory.close()

    def _make_topic(self, name: str, numbers: Sequence[int], entry: TopicEntry | None) -> Topic:
        return Topic(
            self,
            name,
            numbers,
            id=entry.id if entry else None,
            config=self._config_of(entry),
            partitioner=self._partitioner or KeyPartitioner(),
        )

    def _config_of(self, entry: TopicEntry | None) -> PartitionConfig:
        if entry is None or not entry.settings:
            return self._config
        return self._config.with_settings(entry.settings)

    def _refresh(self) -> None:
        """See the topics that another process has made, changed or deleted."""
        with self._lock:
            seen = self._change_times()
            if seen == self._seen:
                return
            # A topic is in the catalogue before its directories come, and until they are gone: a
            # listing between two looks that agree shows no half of one.
            catalogue = Catalogue.read(self._directory)
            while True:
                self._catalogue = catalogue
                self._look_around()
                catalogue = Catalogue.read(self._directory)
                if catalogue.entries == self._catalogue.entries:
                    break
            # Times are coarse: a change right after this look may leave them as they are.
            settled = time.time_ns() - max(seen) > SETTLED_NS
            self._seen = seen if settled else ()

    def _change_times(self) -> tuple[int, ...]:
        times = [self._directory.times_ns()[1]]
        with contextlib.suppress(FileNotFoundError):
            times.append(self._directory.times_ns(Catalogue.NAME)[1])
        return tuple(times)

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

    def _look_again(self) -> None:
        """Beside a writer, see what it did; for a Topic."""
        if self._readonly and not self._closed:
            self._refresh()

    def _now(self) -> dict[str, Topic]:
        self._check_usable()
        if self._readonly:
            self._refresh()
        return self._topics

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
        return f"<Store {str(self.path)!r} of {len(self._topics)} topics{mode}>"

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

    # ---- topics come, change and go ----

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
        settings = _own_settings(config)
        self._config.with_settings(settings)
        if not hasattr(partitions, "__index__"):
            raise ConfigError(f"partitions must be an int, not {partitions!r}")
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise ConfigError(f"partitions must be from 1 to {PARTITIONS_MAX}, not {partitions!r}")
        if not isinstance(topic_id, uuid.UUID | None):
            raise TypeError(f"topic_id must be a uuid.UUID, not {topic_id!r}")

        def create() -> Topic:
            with self._lock:
                self._writable()
                topic = self._topics.get(name)
                if topic is not None:
                    if not exist_ok:
                        raise TopicExistsError(name, where=str(self.path))
                else:
                    check_topic_name(name, self._topics)
                    entry = TopicEntry(topic_id or new_uuid(), partitions, settings)
                    self._make_partitions(name, entry, 0)
                    log.info("created topic %s with %d partitions", name, partitions)
                    topic = self._topics[name] = self._make_topic(name, range(partitions), entry)
                if partitioner is not None:
                    topic.partitioner = partitioner
                return topic

        return self._to_the_end(create)

    def _to_the_end(self, act: Callable[[], T]) -> T:
        """Change the topics: an interrupt does not stop it, so that none is left half made."""
        owned: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        return act() if owned() else uninterrupted(act)

    def declare_topic(
        self, name: str, partitions: int, *, config: Mapping[str, Any] | None = None
    ) -> Topic:
        """A topic of which a partition is made when it is first needed: see `make_partition`.

        For topics that a coordinator keeps its state in: of many partitions few are ever used.  One
        that exists is taken as it is.
        """
        settings = _own_settings(config)

        def declare() -> Topic:
            with self._lock:
                self._writable()
                topic = self._topics.get(name)
                if topic is None:
                    check_topic_name(name, self._topics)
                    self._forget_offsets(name, range(partitions))
                    entry = TopicEntry(new_uuid(), partitions, settings, made=())
                    self._catalogue.put(name, entry)
                    log.info("declared topic %s of %d partitions", name, partitions)
                    topic = self._topics[name] = self._make_topic(name, (), entry)
                return topic

        return self._topics.get(name) or self._to_the_end(declare)

    def declared_partitions(self, name: str) -> int:
        """How many partitions a topic has, made or not."""
        topic = self[name]
        entry = self._catalogue.entries.get(name)
        there = max(topic._numbers, default=-1) + 1
        return there if entry is None else max(entry.partitions, there)

    def make_partition(self, name: str, number: int) -> Partition:
        """A partition of a declared topic, made durably if it is not there yet."""
        topic = self[name]

        def make() -> None:
            with self._lock:
                self._writable()
                entry = self._catalogue.entries.get(name)
                if number not in topic._numbers and entry is not None and entry.made is not None:
                    self._make_on_demand(topic, entry, number)

        if number not in topic._numbers:
            self._to_the_end(make)
        return topic[number]

    def _make_on_demand(self, topic: Topic, entry: TopicEntry, number: int) -> None:
        if not 0 <= number < entry.partitions:
            raise IndexError(f"topic {topic.name!r} has no partition {number}")
        # Until it is whole it has the name of one on its way out, which the next open removes.
        unfinished = f"{topic.name}-{number}.{uuid.uuid4().hex}-delete"
        self._make_partition(unfinished, entry.id)
        self._directory.rename(unfinished, f"{topic.name}-{number}")
        self._directory.sync()
        made = tuple(sorted({*(entry.made or ()), number}))
        self._catalogue.put(topic.name, dataclasses.replace(entry, made=made))
        topic._numbers = sorted({*topic._numbers, number})
        topic._dense = len(topic._numbers) == entry.partitions

    def _make_partitions(self, name: str, entry: TopicEntry, first: int) -> None:
        """Make the directories from number `first` on; the catalogue brackets them."""
        self._forget_offsets(name, range(first, entry.partitions))
        self._catalogue.put(name, dataclasses.replace(entry, creating_from=first))
        try:
            with self._reserve.shut():
                for number in range(first, entry.partitions):
                    self._make_partition(f"{name}-{number}", entry.id)
                self._directory.sync()
                self._catalogue.put(name, entry)
        except BaseException:
            # Undone now if it can be; otherwise the next open finds the entry and does it.
            with contextlib.suppress(OSError):
                self._undo_creation(name, entry, first)
                self._remove_deleted()
            raise

    def _make_partition(self, name: str, topic_id: uuid.UUID) -> None:
        self._directory.make_directory(name)
        directory = self._directory.below(name)
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
        self._set_aside(name, [n for n in self._numbers_of(name) if n >= first])
        if first == 0:
            self._catalogue.remove(name)
        else:
            kept = dataclasses.replace(entry, partitions=first, creating_from=-1)
            self._catalogue.put(name, kept)

    def _add_partitions(self, topic: Topic, count: int) -> None:
        if count < 1:
            raise ConfigError(f"count must be at least 1, not {count!r}")
        self._to_the_end(lambda: self._add_partitions_now(topic, count))

    def _add_partitions_now(self, topic: Topic, count: int) -> None:
        with self._lock:
            self._writable()
            topic._check_usable()
            if not topic._dense:
                raise ConfigError(f"topic {topic.name!r} is here with some of its partitions only")
            first = len(topic)
            if first + count > PARTITIONS_MAX:
                raise ConfigError(f"a topic has at most {PARTITIONS_MAX} partitions")
            entry = self._entry_of(topic)
            self._make_partitions(
                topic.name, dataclasses.replace(entry, partitions=first + count), first
            )
            self._look_around()

    def _entry_of(self, topic: Topic) -> TopicEntry:
        """Its entry, or for a broker's topic the one it would have."""
        entry = self._catalogue.entries.get(topic.name)
        return entry or TopicEntry(topic.id or new_uuid(), max(topic._numbers) + 1)

    def alter_topic(self, name: str, config: Mapping[str, Any]) -> PartitionConfig:
        """Change settings of a topic, and keep them; a value of None goes back to the default."""
        with self._lock:
            self._writable()
            topic = self[name]
            if not topic._dense:
                raise ConfigError(f"topic {name!r} is here with some of its partitions only")
            entry = self._entry_of(topic)
            asked = _own_settings(config)
            settings = {**entry.settings, **asked}
            settings = {key: value for key, value in settings.items() if value is not None}
            before, after = topic._config, self._config.with_settings(settings)
            entry = dataclasses.replace(entry, settings=settings)
            self._catalogue.put(name, entry)
            with topic._lock:
                topic._config = after
                if after != before:
                    for partition in topic._opened.values():
                        # One that someone closed takes them over when it is opened again.
                        with contextlib.suppress(ClosedError):
                            partition.reconfigure(after)
            return after

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its records, durably.  Handles on its partitions are closed.

        Raises OSError when something in its directories cannot be removed, such as a directory that
        somebody put there.  The topic is gone all the same, and the next open tries again.
        """
        self._to_the_end(lambda: self._delete_topic(name))

    def _delete_topic(self, name: str) -> None:
        with self._lock:
            self._writable()
            topic = self[name]
            entry = dataclasses.replace(self._entry_of(topic), deleting=True)
            noted = COMMITTED_OFFSETS in self._topics and name != COMMITTED_OFFSETS
            self._catalogue.begin_deletion(name, entry, noted=noted)
            del self._topics[name]
            topic._forget()
            aside = self._set_aside(name, topic._numbers)
            self._catalogue.remove(name)
            self._forget_offsets(name, topic._numbers)
            left = self._remove_deleted()
            self._reserve.restore()
            log.info("deleted topic %s", name)
            for error in [left[each] for each in aside if each in left]:
                error.add_note(f"topic {name!r} is deleted: only what could not be removed is left")
                raise error

    @property
    def deleted_topics(self) -> tuple[str, ...]:
        """Topics that were deleted, and whose committed offsets are still to go."""
        return self._catalogue.deleted

    def forget_deleted_topics(self, names: Collection[str]) -> None:
        """Forget the committed offsets of deleted topics."""
        with self._lock:
            self._writable()
            self._catalogue.forget_deleted(names)

    @property
    def clock(self) -> Clock | None:
        """The clock it was opened with; None: the machine's own."""
        return self._clock

    def _set_aside(self, name: str, numbers: Iterable[int]) -> list[str]:
        """Give directories the name under which they are deleted, whoever opens next."""
        targets = []
        for number in numbers:
            source = f"{name}-{number}"
            suffix = f".{uuid.uuid4().hex}-delete"
            # A directory's name ends at 255 characters; the topic's part gives way, as in Kafka.
            target = f"{name[: 255 - len(suffix) - len(str(number)) - 1]}-{number}{suffix}"
            with contextlib.suppress(FileNotFoundError):
                self._directory.rename(source, target)
            targets.append(target)
        self._directory.sync()
        return targets

    def _remove_deleted(self) -> dict[str, OSError]:
        """Remove directories that were set aside; those that could not be removed, and why."""
        left = {}
        for name in self._directories():
            if is_deleted(name):
                try:
                    self._remove_directory(name)
                except OSError as error:
                    log.warning("%s cannot be removed: %s", self.path / name, str(error))
                    left[name] = error
        return left

    def _remove_directory(self, name: str) -> None:
        """Remove a directory, or at least all files in it; then the first error is raised."""
        faults = []
        directory = self._directory.below(name)
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
        self._directory.remove_directory(name)

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
        _at_once(tasks, threads=RECOVERY_THREADS)
        self.checkpoint()

    def checkpoint(self) -> None:
        """Write Kafka's four checkpoints: recovery points, starts, high watermarks, cleaning."""
        with self._lock:
            self._writable()
            self._write_checkpoints()

    def _opened_partitions(self) -> list[Partition]:
        return [p for topic in list(self._topics.values()) for p in list(topic._opened.values())]

    def _forget_offsets(self, name: str, numbers: Iterable[int]) -> None:
        if self._checkpoints.forget([(name, number) for number in numbers]):
            self._write_checkpoints()

    def _write_checkpoints(self) -> None:
        """Each only after what it claims is durable."""
        self._reserve.restore()
        self._checkpoints.write(
            partition
            for partition in self._opened_partitions()
            if not partition.closed and partition.failure is None
        )

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
                for topic in self._topics.values():
                    if not self._forked:  # there, a lock may be held by a thread that is no more
                        with topic._lock:
                            pass
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
        plenty = _make_room_for_files(len(partitions))
        for partition in partitions:
            if partition.asleep or self._readonly:  # nothing to wait for
                close_one(partition)
        tasks = [functools.partial(close_one, each) for each in partitions if not each.closed]
        _at_once(tasks, threads=RECOVERY_THREADS if plenty else 1)
        return errors

    def _close_partition(self, partition: Partition) -> None:
        if not (self._readonly or self._forked or partition.failure or partition.closed):
            self._checkpoints.note(partition)
        partition.close()
        self._checkpoints.note_closed(partition)

    def _close_idle(self) -> bool:
        """Free some descriptors: close a partition that only its topic refers to.

        The next use of the topic opens the partition again.  Closing needs descriptors itself: for
        that alone there are spare ones.
        """
        if self._forked:
            return False
        with self._evicting:  # held across no wait for another thread but the one that closes
            if self._closed or self._spare_open:
                if not self._spare:
                    return False
                self._spare.pop().close()
                return True
            self._spare_open = True
            try:
                topics = list(self._topics.values())
                return any(self._close_idle_of(topic, asleep=True) for topic in topics) or any(
                    self._close_idle_of(topic, asleep=False) for topic in topics
                )
            finally:
                self._spare_open = False
                with contextlib.suppress(OSError):
                    while len(self._spare) < FILES_SPARE:
                        self._spare.append(Directory(self.path))

    def _close_idle_of(self, topic: Topic, *, asleep: bool) -> bool:
        # Not waiting: the thread that has the lock may wait for one that this thread has.
        if not topic._lock.acquire(blocking=False):
            return False
        try:
            for number in list(topic._opened):
                # Out of the topic first: no other thread can get at it now, only have it already.
                partition = topic._opened.pop(number)
                if (
                    sys.getrefcount(partition) > 2  # ours and the argument's
                    or partition.asleep != asleep
                    or partition.failure is not None
                ):
                    topic._opened[number] = partition
                    continue
                try:
                    self._close_partition(partition)
                except (LogStoreError, OSError) as error:
                    log.warning("%s: closed because descriptors ran out, and not cleanly: %s",
                                partition.name, str(error))  # fmt: skip
                return True
            return False
        finally:
            topic._lock.release()

    def _drop(self) -> None:
        """Close descriptors; nothing is written."""
        for partition in self._opened_partitions():
            partition.discard()
        while self._spare:
            self._spare.pop().close()
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


def _forget_state(directory: Directory) -> None:
    directory.unlink(PartitionState.NAME)
    directory.unlink(DurableMark.NAME)
    directory.unlink(CleanerCheckpoint.NAME)
    for name in directory.names():
        if name.endswith(DIGEST_SUFFIX):
            directory.unlink(name)
    directory.sync()


def _refuse_foreign(directory: Directory) -> None:
    """Raise NotALogError for a directory that holds something else; before anything is created."""
    names = directory.names()
    known = {NodeIdentity.NAME, Catalogue.NAME, CheckpointTwin.NAME, *CHECKPOINTS}
    if known & set(names):
        return
    if any(name.endswith(".log") and name[:-4].isdigit() for name in names):
        raise NotALogError(
            f"{directory.path} is a partition, not a store: open the directory above it, or this "
            f"one with Partition.open"
        )
    for name in sorted(names):
        there = partition_directories([name]) or is_deleted(name) or name.endswith(".tmp")
        if not there and not name.startswith(".") and name not in ("lost+found", RESERVE_NAME):
            raise NotALogError(
                f"{directory.path} is not a store: it holds {name!r}; choose an empty or a new "
                f"directory"
            )


def _own_settings(config: PartitionConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """What is stored of a topic's settings: those that were named, by their dotted names."""
    if isinstance(config, Mapping):
        checked = PartitionConfig.of(config).as_dict()
        names = (str(name).replace("_", ".") for name in config)
        return {
            name: None if value is None else checked[name]
            for name, value in zip(names, config.values(), strict=True)
        }
    return PartitionConfig.of(config).changed()


def _at_once(tasks: Sequence[Callable[[], object]], *, threads: int) -> None:
    """Run tasks in a few threads; the first error is raised when all have ended."""
    if len(tasks) < 2 or threads < 2:
        for task in tasks:
            task()
        return
    import concurrent.futures  # not for a store that was closed in order

    def run() -> None:
        with concurrent.futures.ThreadPoolExecutor(threads, "logstore") as pool:
            futures = [pool.submit(task) for task in tasks]
        for future in futures:
            future.result()

    uninterrupted(run)  # an executor waits by conditions, which an interrupt breaks


def _make_room_for_files(partitions: int) -> bool:
    """Raise the soft limit of open files towards the hard one, if so many partitions need it.

    False when even the hard limit is too low.
    """
    wanted = partitions * FILES_PER_PARTITION + FILES_RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return True
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            log.info("raised the limit of open files from %d to %d", soft, allowed)
    return allowed >= wanted


def _close_idle_of(store: weakref.ref[Store]) -> Callable[[], bool]:
    def close_idle() -> bool:
        held = store()
        return held is not None and held._close_idle()

    return close_idle


def _after_fork_in_child() -> None:
    for store in list(_open_stores):
        store._abandon_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
