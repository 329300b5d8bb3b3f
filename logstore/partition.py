"""Partition: an ordered, durable sequence of records in one directory.

Ordered segments, the last of which is appended to.  One lock serialises appends, rolls and cuts;
readers take none: they use an immutable snapshot of the segments, and go no further into a file
than what was published after it was written.

Three outcomes of an append, never more: an offset; an exception, and provably nothing in the log;
or IndeterminateAppendError with the offsets in question.

Not here: topics and partitioning by key (Store), who reads what (Consumer), retention rules.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import datetime
import logging
import os
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast, overload

from logstore import _native, codecs, incoming
from logstore._files import (
    SEGMENT_SUFFIXES,
    Directory,
    DirectoryLock,
    boot_id,
    parse_partition_name,
    segment_name,
)
from logstore.batch import BatchHeader, EndMarker
from logstore.checkpoint import (
    CleanerCheckpoint,
    DurableMark,
    PartitionState,
    read_leader_epochs,
    write_leader_epochs,
)
from logstore.clock import Clock, SystemClock
from logstore.commit import GroupCommit
from logstore.config import INT64_MAX, ConfigError, PartitionConfig, wants_fsync
from logstore.epochs import EpochEnd, LeaderEpochs
from logstore.errors import (
    ClosedError,
    ConflictError,
    CorruptLogError,
    FencedError,
    ForkedHandleError,
    IndeterminateAppendError,
    InterruptedAppendError,
    InvalidRecordError,
    NotALogError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    RecordNotFoundError,
)
from logstore.incoming import AppendedBatches
from logstore.index import AbortedTransaction
from logstore.producer_state import OngoingTransaction, Origin
from logstore.producers import Producers
from logstore.record import Record
from logstore.recovery import (
    DAMAGE_MESSAGE,
    TRUNCATION_PLAN,
    Claims,
    LoadedLog,
    RecoveryProgress,
    RecoveryReport,
    TruncationPlan,
    load,
    refuse_foreign,
)
from logstore.retention import ClockGuard, RetentionDecision, RetentionPolicy
from logstore.scan import Scan
from logstore.segment import Segment, SegmentContents, decompress, empty_contents
from logstore.swap import SWAP_PLAN, RewrittenSegment, SwapPlan
from logstore.writer import Writer, buffer_sizes, codec_number, packing

__all__ = ["Partition"]

log = logging.getLogger("logstore.partition")

EXTEND_BYTES = 16 << 20  # extend() is all or nothing up to this many encoded bytes
BATCH_BYTES = 64 << 10  # what a buffered writer fills before it starts the next batch
WARM_SEGMENTS = 32  # sealed segments that keep descriptor and indexes in memory
UNSYNCED_SEGMENTS = 4  # sealed files that durability="os" may leave to the kernel
MARK_SECONDS = 0.05  # how late the durable mark may be
EPOCH_MAX = (1 << 31) - 1
SETTLE_SECONDS = 0.5  # how long a reader waits for a truncation in another process
POLL_SECONDS = 0.02  # how often a reader looks for what another process appended
# What a reader finds a writer at; SWAP_AHEAD: planned, and the old files are still in their places.
NO_PLAN, CUTTING, SWAP_AHEAD, SWAPPING = range(4)
NEVER_DENSE = 1 << 62  # a `dense_from` beyond every offset

_open_partitions: weakref.WeakSet[Partition] = weakref.WeakSet()


class _Batches(_native.Builder):
    """Records of one append() or extend(), on their way into the log.

    What does not fit into one write waits in `full`; nothing is written before all is encoded.
    """

    full: list[_native.Builder]

    def _hand_over(self) -> None:
        self._take(self.full)


class Partition:
    """One partition of a topic: a directory named ``topic-N``.  Open one with `Partition.open`.

    ``topic`` and ``number`` are its name's parts; ``recovery`` tells what opening found and did.
    There is no ``len()``: offsets run from ``start_offset`` to ``end_offset``.

    Threads share a Partition freely; one process at a time may have it open for writing, any number
    with ``readonly=True``.
    """

    def __init__(self, directory: Directory, *, readonly: bool, durability: str,
                 config: PartitionConfig, clock: Clock | None) -> None:  # fmt: skip
        """Use `Partition.open`."""
        self.topic, self.number = parse_partition_name(_name_of(directory.path))
        self._fsync = wants_fsync(durability)
        self._durability = durability
        self._directory = directory
        self._config = config
        self._clock: Clock = clock or SystemClock()
        # None lets C ask the system's clock, which is much faster than calling back.
        self._ask_time = None if isinstance(self._clock, SystemClock) else self._clock.time_ms
        self._readonly = readonly
        self._append_time = config.message_timestamp_type == "LogAppendTime"
        # Appends need no time from Python: neither an injected clock nor LogAppendTime.
        self._plain = self._may_be_plain()
        self._last_append_time = 0
        self._lock = threading.RLock()
        # Guards what is to be synced, and the state file; taken last, held for moments.
        self._syncing = threading.Lock()
        self._appended = threading.Condition(threading.Lock())
        # Held while segments are rewritten: one compaction or purge at a time.
        self._rewriting = threading.Lock()
        self._cuts = 0  # truncations so far: what was read before one may not hold behind it
        self._followers = 0
        self._spare: list[_Batches] = []
        self._writers: weakref.WeakSet[Writer] = weakref.WeakSet()
        self._warm: collections.OrderedDict[int, Segment] = collections.OrderedDict()
        self._unsynced: list[_native.File] = []
        # Creations and renames so far, and how many of them the last directory sync covered.
        self._directory_changes = 0
        self._directory_synced = 0
        self._closed = False
        self._forked = False
        self._failure: BaseException | None = None
        self._owner: DirectoryLock | None = None
        self._mark: DurableMark | None = None
        self._mark_due = 0.0
        self._writer: _native.SegmentWriter | None = None
        # Of a store: what was loaded, until the first change makes it a log that is written.
        self._asleep: LoadedLog | None = None
        self._claims: Claims | None = None
        # What readers use, replaced as one: base offsets, and the segments that have them.
        self._view: tuple[list[int], tuple[Segment, ...]] = ([], ())
        # A roll that an interrupt may have stopped half-way: finished by whoever comes next.
        self._rolling: tuple[Segment, Segment] | None = None
        self._start_offset = 0
        self._dense_from = 0
        self._version = 0
        # A reader beside a writer: how often it loaded, and amid which change of files.
        self._loads = 0
        self._plan_seen = NO_PLAN
        self._recovery_point = 0
        # The epoch that appends carry.  An append needs it to be the latest of `_epochs`.
        self._epoch = 0
        self._epochs = LeaderEpochs()
        self._clock_guard = ClockGuard(self._clock.time_ms(), self._clock.monotonic())
        self._commit = GroupCommit(_sync_written_of(weakref.ref(self)), 0)
        self._producers = self._new_producers()
        self._producers_loaded = False
        self._codec = codec_number(None, config)
        self.recovery = RecoveryReport()

    # ---- opening and closing ----

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        readonly: bool = False,
        create: bool = True,
        durability: str = "fsync",
        config: PartitionConfig | Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        progress: RecoveryProgress | None = None,
    ) -> Partition:
        """Open a partition directory, creating it if it is missing.

        After a crash the unchecked end of the log is verified and repaired; `progress` is called
        with (bytes checked, bytes in all), and ``partition.recovery`` tells what was found.
        Raises LockedError when another handle has it open for writing, FileNotFoundError when it is
        missing and may not be created, NotALogError, InvalidNameError.
        """
        path = Path(path)
        parse_partition_name(_name_of(path))
        settings = PartitionConfig.of(config)
        wants_fsync(durability)
        directory = Directory(path, create=create and not readonly)
        self = cls(directory, readonly=readonly, durability=durability, config=settings,
                   clock=clock)  # fmt: skip
        try:
            refuse_foreign(directory)
            if not readonly:
                self._owner = DirectoryLock(directory)
            self._load(progress)
        except BaseException:
            self._drop()
            raise
        _open_partitions.add(self)
        return self

    @classmethod
    def open_in_store(
        cls,
        root: Directory,
        name: str,
        *,
        lock: DirectoryLock | None,
        durability: str,
        config: PartitionConfig,
        clock: Clock | None,
        claims: Claims,
        progress: RecoveryProgress | None = None,
    ) -> Partition:
        """A partition of a Store, which holds `lock` on the root; None is readonly.

        One that was closed cleanly sleeps until its first change: it holds one descriptor, and its
        files stay as they are.
        """
        self = cls(root.below(name), readonly=lock is None, durability=durability, config=config,
                   clock=clock)  # fmt: skip
        try:
            self._claims = claims
            self._owner = None if lock is None else lock.share()
            self._load(progress)
        except BaseException:
            self._drop()
            raise
        _open_partitions.add(self)
        return self

    def _new_producers(self) -> Producers:
        return Producers(
            self._directory,
            readonly=self._readonly or self._asleep is not None,
            expiration_ms=self._config.producer_id_expiration_ms,
            time_ms=self._clock.time_ms,
        )

    def _make_segment(self, base_offset: int, dense: bool) -> Segment:
        return Segment(self._directory, base_offset, topic=self.topic, number=self.number,
                       config=self._config, dense=dense)  # fmt: skip

    def _load(self, progress: RecoveryProgress | None) -> None:
        if self._readonly:
            loaded = self._load_settled(progress)
        else:
            loaded = load(
                self._directory,
                self._make_segment,
                readonly=False,
                progress=progress,
                claims=self._claims,
            )
        self.recovery = loaded.report
        self._start_offset = loaded.start_offset
        self._dense_from = loaded.dense_from
        self._version = loaded.version
        self._recovery_point = loaded.recovery_point
        if self._readonly:
            self._load_readonly(loaded)
        elif self._claims is not None and loaded.untouched:
            self._asleep = loaded
            self._epochs, self._epoch = loaded.epochs, loaded.leader_epoch
            loaded.segments[-1].seen_end_offset = loaded.contents.next_offset
            self._commit.durable_offset = loaded.durable_offset
            self._publish(loaded.segments)
        else:
            self._load_writable(loaded)

    def _wake_up(self) -> None:
        """Make a sleeping log one that can be changed; for someone who holds the lock."""
        self._check_usable()
        loaded, self._asleep = self._asleep, None
        assert loaded is not None
        try:
            self._load_writable(loaded)
        except BaseException:
            # Nothing was appended: the files are as they were, or look like after a crash.
            self._writer, self._asleep = None, loaded
            raise

    def _load_readonly(self, loaded: LoadedLog) -> None:
        active = loaded.segments[-1]
        with contextlib.suppress(FileNotFoundError):  # a directory without any segment yet
            active.file.end = loaded.contents.position
        active.seen_end_offset = loaded.contents.next_offset
        active.durable_end = loaded.lost_end
        self._commit.durable_offset = loaded.durable_offset
        # Most readers never ask about transactions: who does, makes us look.
        self._producers_loaded = False
        self._publish(loaded.segments)

    def _load_producers(
        self, end: int, names: Iterable[str], *, clean: bool, quiet_from: int = INT64_MAX
    ) -> None:
        """Producer state at the end of the log; needs the segments' files, not the writer."""
        producers = self._new_producers()
        producers.load(
            self._segments,
            end=end,
            trusted=self._recovery_point,
            names=names,
            clean=clean,
            quiet_from=quiet_from,
        )
        self.recovery.snapshots_discarded += producers.discarded
        self._producers = producers  # only now: readers use it
        self._producers_loaded = True

    def _load_writable(self, loaded: LoadedLog) -> None:
        active = loaded.segments[-1]
        created = not self._directory.exists(segment_name(active.base_offset, ".log"))
        if created:
            self._create_log_file(active.base_offset)
        self._load_epochs(loaded)
        self._mark = DurableMark(self._directory)
        self._publish(loaded.segments)
        self._load_producers(
            loaded.contents.next_offset,
            loaded.names,
            clean=loaded.report.clean,
            quiet_from=loaded.quiet_from,
        )
        self._activate(active, loaded.contents)
        if loaded.needs_roll:
            self._roll_locked(loaded.contents.next_offset)
        self._commit.durable_offset = loaded.durable_offset
        # Before anything can change: from now on a crash finds "not clean".
        self._version += 1
        self._write_state(clean=False, sync=True)
        if not loaded.report.clean or created:
            # What recovery kept was perhaps never synced; make its acceptance durable.
            self._directory_changes += 1
            self._commit.wait_for(self._next_offset(), loaded.durable_offset)
        self._mark.write(self._commit.durable_offset)

    def _load_epochs(self, loaded: LoadedLog) -> None:
        epochs = self._epochs = loaded.epochs
        # What was promised stays so, even if no record of that epoch is there (yet, or any more).
        self._epoch = loaded.leader_epoch
        epochs.truncate_from_end(loaded.contents.next_offset)
        epochs.truncate_from_start(loaded.start_offset)
        if epochs.latest != self._epoch:
            epochs.assign(self._epoch, loaded.contents.next_offset)
        if read_leader_epochs(self._directory) != epochs.entries:
            write_leader_epochs(self._directory, epochs.entries)

    def _create_log_file(self, base_offset: int) -> None:
        name = segment_name(base_offset, ".log")
        try:
            self._directory.open(name, write=True, create=True, exclusive=True).close()
        except FileExistsError:
            if self._directory.size(name):
                raise
        self._directory_changes += 1

    def _activate(self, segment: Segment, contents: SegmentContents) -> None:
        self._prepare(segment, contents)
        self._writer = segment.writer

    def _prepare(self, segment: Segment, contents: SegmentContents) -> None:
        """Ready a segment for appends, as far as it alone is concerned."""
        jitter = min(self._config.segment_jitter_ms, self._config.segment_ms)
        segment.activate(
            contents,
            now_ms=self._clock.time_ms(),
            jitter_ms=random.randrange(jitter) if jitter else 0,
        )

    def _publish(self, segments: Iterable[Segment]) -> None:
        """Replace the snapshot that readers use."""
        ordered = tuple(segments)
        self._view = ([segment.base_offset for segment in ordered], ordered)

    @property
    def _segments(self) -> tuple[Segment, ...]:
        return self._view[1]

    def _write_state(self, *, clean: bool, sync: bool) -> None:
        with self._syncing:
            if self._closed and not clean:
                return  # a sync that ended late must not undo a clean close
            self._state(clean).write(self._directory, sync=sync)

    def _state(self, clean: bool) -> PartitionState:
        active = self._segments[-1]
        writer = active.writer
        return PartitionState(
            clean=clean,
            version=self._version,
            boot=boot_id(),
            recovery_point=self._recovery_point,
            start_offset=self._start_offset,
            end_offset=active.end_offset,
            dense_from=self._dense_from,
            segments=len(self._segments),
            active_base=active.base_offset,
            active_bytes=active.size_bytes,
            active_indexes_crc=active.indexes_crc() if clean else 0,
            first_timestamp=-1 if writer is None else writer.first_timestamp,
            leader_epoch=self._epoch,
        )

    def close(self) -> None:
        """Close its writers, make everything durable and give the directory back.

        Raises, and stays open, when a writer cannot hand over what it holds.  Closing twice is
        harmless.  Scans and appends of other threads then raise ClosedError.
        """
        if not self._forked:
            for writer in list(self._writers):
                writer.close()
        with self._lock:
            if self._closed:
                return
            self._finish_roll()
            self._closed = True
            try:
                if self._writer is not None and self._failure is None and not self._forked:
                    self._close_cleanly()
            finally:
                self._drop()
        with self._appended:
            self._appended.notify_all()

    def _close_cleanly(self) -> None:
        end = self._next_offset()
        active = self._segments[-1]
        active.flush_indexes(sync=True, final=True)
        more = self._producers.close(self._segments, end)
        with self._syncing:
            self._unsynced += more
        self._directory_changes += 1
        self._commit.wait_for(end, end)
        self._sync_written()
        self._recovery_point = end
        self._write_state(clean=True, sync=True)

    def discard(self) -> None:
        """Close without writing anything: for a store that deletes it or has failed."""
        with self._lock:
            self._closed = True
            self._drop()
        self._wake_followers()

    def _drop(self) -> None:
        """Close all descriptors; nothing is written."""
        self._asleep = None
        self._writer = None
        for segment in self._segments:
            if segment._file is not None:
                segment._file.close()
            segment.writer = None
        for file in self._unsynced:
            file.close()
        if self._mark is not None:
            self._mark.close()
        self._directory.close()
        if self._owner is not None:
            self._owner.release()
        _open_partitions.discard(self)

    def _abandon_in_child(self) -> None:
        """After fork: locks may be held by threads that do not exist here; the files are not ours.

        Only descriptors are closed, so that the parent's lock does not outlive the parent here.
        """
        self._forked = True
        self._writer = None
        self._lock = threading.RLock()
        self._syncing = threading.Lock()
        self._rewriting = threading.Lock()
        self._appended = threading.Condition(threading.Lock())
        if self._owner is not None:
            self._owner.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_writer") is not None and not self._closed:
            warnings.warn(
                f"{self!r} was dropped without close(): the next open will check its end",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        if self._closed:
            return f"<Partition {self.name} closed>"
        mode = " readonly" if self._readonly else ""
        segments = self._segments
        end = segments[-1].end_offset if segments else 0
        return f"<Partition {self.name} [{self._start_offset}, {end}){mode}>"

    # ---- what it is ----

    @property
    def path(self) -> Path:
        """The directory."""
        return self._directory.path

    @property
    def name(self) -> str:
        """``topic-N``."""
        return f"{self.topic}-{self.number}"

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def readonly(self) -> bool:
        """Whether it was opened with ``readonly=True``."""
        return self._readonly

    @property
    def config(self) -> PartitionConfig:
        """The settings it was opened with."""
        return self._config

    @property
    def clock(self) -> Clock:
        """The clock it was opened with."""
        return self._clock

    @property
    def directory(self) -> Directory:
        """The open directory; for the rooms that work on its files."""
        return self._directory

    @property
    def durability(self) -> str:
        """The level an append has when it names none: "fsync" or "os"."""
        return self._durability

    @property
    def failure(self) -> BaseException | None:
        """What ended appending through this handle; None while all is well."""
        return self._failure

    @property
    def asleep(self) -> bool:
        """Whether its files are still as a clean close left them.  Only in a store."""
        return self._asleep is not None

    @property
    def start_offset(self) -> int:
        """The first offset that can be read."""
        if self._readonly:
            self._refresh()
        return self._start_offset

    @property
    def end_offset(self) -> int:
        """The offset the next record will get."""
        writer = self._writer
        if writer is not None:
            return writer.next_offset
        if self._readonly and not self._closed:
            self._refresh()
        self._check_usable()
        return self._segments[-1].end_offset

    @property
    def durable_offset(self) -> int:
        """Everything below this is on stable storage."""
        if self._readonly and not self._closed:
            return max(DurableMark.read(self._directory), self._recovery_point)
        return self._commit.durable_offset

    @property
    def high_watermark(self) -> int:
        """What consumers may read: without replicas, all of it."""
        return self.end_offset

    @property
    def last_stable_offset(self) -> int:
        """What read_committed consumers may read: up to the oldest open transaction."""
        end = self.end_offset  # first: a transaction that opens now lies behind it
        return max(min(end, self._known_producers().unstable_offset), self._start_offset)

    @property
    def ongoing_transactions(self) -> list[OngoingTransaction]:
        """Transactions that are neither committed nor aborted, oldest first.

        One whose producer is gone for good holds the last stable offset back until someone aborts
        it with `end_transaction`.
        """
        with self._lock:
            _ = self.end_offset  # a reader looks again
            return self._known_producers().state.ongoing

    def aborted_transactions(
        self, start: int | None = None, stop: int | None = None
    ) -> list[AbortedTransaction]:
        """Aborted transactions with records or a marker in [start, stop), by their markers."""
        end = self.end_offset
        first = self._start_offset if start is None else start
        last = end if stop is None else stop
        return self._known_producers().aborted(self._segments, first, last)

    def producer_ends(self) -> list[tuple[int, int, int]]:
        """(producer id, epoch, last offset of its data or -1), by id; for Compactor."""
        with self._lock:
            return [
                (entry.producer_id, entry.epoch, entry.last_offset)
                for entry in self._known_producers().state
            ]

    def expire_producers(self, now: int | None = None) -> list[int]:
        """Forget idempotent producers silent for ``producer.id.expiration.ms``; their ids.

        Those with an open transaction stay.  `now` is in milliseconds; by default it is the
        clock's time, less what the clock may have leapt ahead.
        """
        if now is None:
            now = self._clock_guard.look(self._clock.time_ms(), self._clock.monotonic())
        with self._lock:
            self._check_usable()
            if self._readonly:
                self._refuse()
            if self._asleep is not None:
                return []  # loading them forgets the silent ones
            self._next_offset()
            return self._producers.state.expire(now, self._config.producer_id_expiration_ms)

    def _known_producers(self) -> Producers:
        self._check_usable()
        if not self._producers_loaded:
            with self._lock:
                if not self._producers_loaded:
                    end = self._segments[-1].end_offset
                    self._load_producers(end, self._directory.names(), clean=False)
        return self._producers

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments as they are now; the last is the one appended to."""
        if self._readonly:
            self._refresh()
        return self._segments

    def _next_offset(self) -> int:
        """The end, for someone who means to change the log and holds the lock."""
        self._finish_roll()
        if self._asleep is not None:
            self._wake_up()
        if self._writer is None:
            self._refuse()
        end = cast(_native.SegmentWriter, self._writer).next_offset
        self._producers.settle(end, self._segments[-1])
        return end

    def _check_usable(self) -> None:
        if self._forked:
            raise ForkedHandleError(
                f"{self.name} was opened before a fork: open it again in this process "
                f"(one process may write, any number may use readonly=True)"
            )
        if self._closed:
            raise ClosedError(f"{self.name} is closed")

    def _refuse(self) -> None:
        """Why nothing can be appended here.  Always raises."""
        self._check_usable()
        if self._readonly:
            raise ReadOnlyError(f"{self.name} was opened with readonly=True")
        raise ClosedError(f"{self.name} cannot be appended to: {self._failure}; open it again")

    # ---- appending ----

    def _batches(self) -> _Batches:
        """An empty builder; they are reused, because fresh memory is slow."""
        with contextlib.suppress(IndexError):
            return self._spare.pop()
        batches = _Batches(
            **buffer_sizes(self._config, self._config.max_message_bytes, EXTEND_BYTES, self._codec),
            **packing(self._config, self._codec),
            before_max_ms=self._config.message_timestamp_before_max_ms,
            after_max_ms=self._config.message_timestamp_after_max_ms,
            clock=self._ask_time,
        )
        batches.full = []
        return batches

    def _may_be_plain(self) -> bool:
        return self._ask_time is None and not self._append_time

    def _write_locked(self, batches: _native.Builder) -> range:
        """Append sealed batches behind the last record; roll first if they do not fit."""
        self._finish_roll()
        if self._asleep is not None:
            self._wake_up()
        writer = self._writer
        if writer is None:
            self._refuse()
            raise AssertionError("unreachable")
        if self._epochs.latest != self._epoch:
            self._assign_epoch_locked(self._epoch, writer.next_offset)
            self._plain = self._may_be_plain()
        append_time = self._time_of_append() if self._append_time else -1
        now = -1 if self._ask_time is None else self._ask_time()
        try:
            first = writer.append(batches, self._epoch, append_time, now)
            if first < 0:
                self._roll_locked(writer.next_offset)
                writer = cast(_native.SegmentWriter, self._writer)
                first = writer.append(batches, self._epoch, append_time, now)
                if first < 0:
                    raise InvalidRecordError(f"{batches._size_bytes} bytes do not fit a segment")
        except IndeterminateAppendError as error:
            self._fail(error)  # whether its bytes are there cannot be known: no more appends
            raise
        if self._followers:
            self._wake_followers()
        return range(first, writer.next_offset)

    def _wake_followers(self) -> None:
        with self._appended:
            self._appended.notify_all()

    def _fail(self, error: BaseException) -> None:
        """No appends through this handle any more; readers go on."""
        self._failure = self._failure or error
        self._plain = False
        self._writer = None

    def _time_of_append(self) -> int:
        # A clock that steps back must not make the log's own times decrease.
        self._last_append_time = max(self._last_append_time, self._clock.time_ms())
        return self._last_append_time

    def append(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp: int | datetime.datetime | None = None,
        durability: str | None = None,
        expect_offset: int | None = None,
    ) -> int:
        """Append one record and return its offset, once it is as durable as asked for.

        With `expect_offset` it is appended at just that offset, or ConflictError is raised.
        Raises RecordTooLargeError, InvalidRecordError, TypeError for what can never be stored;
        DiskFullError with nothing appended; IndeterminateAppendError when it cannot be known.
        """
        fsync = self._fsync if durability is None else wants_fsync(durability)
        spare = self._spare  # this list, even when other settings bring a new one
        try:
            batches = spare.pop()
        except IndexError:
            batches = self._batches()
        batches.append(value, key=key, headers=headers, timestamp=timestamp)
        if self._codec:
            batches._seal()
        first = -1
        try:
            with self._lock:
                writer = self._writer
                if writer is not None:
                    first = writer.next_offset
                if expect_offset is not None:
                    self._expect(expect_offset)
                # The common case without another call: same as _write_locked.
                if (
                    not self._plain
                    or writer is None
                    or writer.append(batches, self._epoch, -1, -1) < 0
                ):
                    first = self._write_locked(batches).start
            spare.append(batches)
            if self._followers:
                self._wake_followers()
            if fsync:
                self._commit.wait_for(first + 1, first)
        except KeyboardInterrupt as interrupt:
            if batches._records == 0:
                raise InterruptedAppendError(offsets=range(first, first + 1)) from interrupt
            raise
        except IndeterminateAppendError as error:
            self._fail(error)
            raise
        return first

    def _expect(self, offset: int) -> None:
        """Raise ConflictError unless the log ends there; under the lock of the append."""
        end = self._next_offset()
        if end != offset:
            raise ConflictError(offset, end, where=self.name)

    def extend(
        self,
        records: Iterable[bytes | Record],
        *,
        durability: str | None = None,
        expect_offset: int | None = None,
    ) -> range:
        """Append many records, bytes or Record, and return their offsets.  One fsync for all.

        All are encoded in memory before the first is written, so a bad record means that none is
        appended; use `writer` for a stream.  Up to max.message.bytes they are a single batch, and
        then all or none after a crash as well.  With `expect_offset` the first gets that offset, or
        ConflictError is raised.
        """
        fsync = self._fsync if durability is None else wants_fsync(durability)
        self._check_usable()
        spare = self._spare
        batches = self._batches()
        batches.extend(records)
        pieces = [*batches.full, batches]
        for piece in pieces:
            piece._seal()
        first = -1
        total = sum(piece._records for piece in pieces)
        try:
            with self._lock:
                if expect_offset is not None:
                    self._expect(expect_offset)
                first = self._next_offset()
                for piece in pieces:
                    self._write_locked(piece)
            batches.full.clear()
            spare.append(batches)
            if fsync and total:
                self._commit.wait_for(first + total, first)
        except KeyboardInterrupt as interrupt:
            if first >= 0 and pieces[0]._records == 0 < total:
                raise InterruptedAppendError(offsets=range(first, first + total)) from interrupt
            raise
        except OSError as error:
            if len(pieces) > 1 and pieces[0]._records == 0:
                raise IndeterminateAppendError(
                    f"{error}, after a part of the records was written",
                    offsets=range(first, first + total),
                ) from error
            raise
        return range(first, first + total)

    # ---- raw batches and transactions ----

    def append_batch(
        self, raw: bytes, *, origin: str = "leader", durability: str | None = None
    ) -> AppendedBatches:
        """Append raw Kafka record batches; where they are, and whether they were there before.

        As "leader" they are a client's: everything in them is checked, they get offsets and leader
        epoch here, and the batch of an idempotent producer is appended once, however often it is
        sent: a repeated one is answered with its offsets and ``duplicate=True``.  "coordinator" is
        the same without the rules for sequences.  As "follower" they are copied from another log:
        offsets and epochs stay, must not go back, and may have gaps.

        Raises InvalidRecordError, RecordTooLargeError, UnsupportedFormatError for what can never
        be appended; FencedError and OutOfOrderSequenceError for a producer that has to stop or to
        send something else first; ConflictError for a copy that does not lie behind the log's end.
        """
        fsync = self._fsync if durability is None else wants_fsync(durability)
        if origin == "follower":
            return self._append_copied(bytes(raw), fsync)
        if origin not in ("leader", "coordinator"):
            raise ConfigError(
                f"origin must be 'leader', 'coordinator' or 'follower', not {origin!r}"
            )
        batches = incoming.check_produced(bytes(raw), self._config, self._clock.time_ms())
        with self._lock:
            end = self._next_offset()
            append_time = self._time_of_append() if self._append_time else -1
            self._note_epochs([(self._epoch, end)])
            data, headers = incoming.place(batches, end, self._epoch, append_time)
            appended = self._append_raw_locked(data, headers, cast(Origin, origin), append_time)
        return self._appended_durably(appended, fsync)

    def _append_copied(self, raw: bytes, fsync: bool) -> AppendedBatches:
        headers = incoming.check_copied(raw)
        with self._lock:
            end = self._next_offset()
            if not headers:
                return AppendedBatches(range(end, end), -1, False)
            first = headers[0][0].base_offset
            if first < end:
                raise ConflictError(first, end, where=self.name)
            self._allow_gaps(headers, end)
            self._note_epochs((header.leader_epoch, header.base_offset) for header, _ in headers)
            appended = self._append_raw_locked(raw, headers, "follower", -1)
        return self._appended_durably(appended, fsync)

    def end_transaction(
        self,
        producer_id: int,
        producer_epoch: int,
        *,
        commit: bool,
        coordinator_epoch: int = 0,
        durability: str | None = None,
    ) -> int:
        """Append the marker that commits or aborts a producer's transaction; the marker's offset.

        For who coordinates transactions.  Raises FencedError when the producer's or the
        coordinator's epoch is older than what the log has seen.
        """
        fsync = self._fsync if durability is None else wants_fsync(durability)
        if producer_id < 0 or producer_epoch < 0:
            raise InvalidRecordError(
                f"no transaction of producer {producer_id}, epoch {producer_epoch}"
            )
        marker = EndMarker(commit, coordinator_epoch)
        with self._lock:
            self._note_epochs([(self._epoch, self._next_offset())])
            raw = marker.encode(
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                timestamp=self._clock.time_ms(),
                base_offset=self._next_offset(),
                leader_epoch=self._epoch,
            )
            headers: list[tuple[BatchHeader, EndMarker | None]] = [(BatchHeader.parse(raw), marker)]
            appended = self._append_raw_locked(raw, headers, "coordinator", -1)
        return self._appended_durably(appended, fsync).offsets.start

    def _append_raw_locked(
        self,
        data: bytes,
        headers: list[tuple[BatchHeader, EndMarker | None]],
        origin: Origin,
        append_time: int,
    ) -> AppendedBatches:
        """Write batches that have their place, unless the producer state is against it."""
        admission = self._producers.admit(headers, origin)
        if admission.duplicate is not None:
            span = admission.duplicate
            return AppendedBatches(span.offsets, span.timestamp if append_time >= 0 else -1, True)
        offsets = range(headers[0][0].base_offset, headers[-1][0].next_offset)
        now = -1 if self._ask_time is None else self._ask_time()
        writer = cast(_native.SegmentWriter, self._writer)
        self._producers.begin(admission, offsets.stop)
        try:
            if not writer.append_raw(data, now):
                self._roll_before(offsets.start)
                writer = cast(_native.SegmentWriter, self._writer)
                if not writer.append_raw(data, now):
                    raise InvalidRecordError(f"{len(data)} bytes do not fit a segment")
        except IndeterminateAppendError as error:
            self._fail(error)
            raise
        except KeyboardInterrupt as interrupt:
            if self._writer is not None and self._writer.next_offset >= offsets.stop:
                raise InterruptedAppendError(offsets=offsets) from interrupt
            raise
        finally:
            if self._writer is not None:
                self._settle_locked(offsets)
        if self._followers:
            self._wake_followers()
        return AppendedBatches(offsets, append_time, False)

    def _roll_before(self, offset: int) -> None:
        """Roll for batches that start at `offset`, at or behind the end."""
        end = cast(_native.SegmentWriter, self._writer).next_offset
        self._roll_locked(max(offset, end))
        if offset > end:
            # Readers in other processes look for a segment at the end: tell them to start over.
            self._version += 1
            self._write_state(clean=False, sync=False)

    def _note_epochs(self, starts: Iterable[tuple[int, int]]) -> None:
        """Known before the batches that carry them can be seen."""
        for epoch, offset in starts:
            if epoch != self._epochs.latest:
                self._assign_epoch_locked(epoch, offset)
                self._epoch = max(self._epoch, epoch)
                self._plain = self._may_be_plain() and self._epoch == self._epochs.latest

    def _settle_locked(self, offsets: range) -> None:
        try:
            self._next_offset()
        except OSError as error:
            # The batches are in the log, but not in the index of aborted transactions: committed
            # readers stay below, and opening again writes the index anew.
            failure = IndeterminateAppendError(
                f"{error} while noting an aborted transaction; close the log and open it again",
                offsets=offsets,
            )
            self._fail(failure)
            raise failure from error

    def _appended_durably(self, appended: AppendedBatches, fsync: bool) -> AppendedBatches:
        if fsync and appended.offsets:
            # A duplicate, too: its first append may still be on its way to the disk.
            try:
                self._commit.wait_for(appended.offsets.stop, appended.offsets.start)
            except KeyboardInterrupt as interrupt:
                raise InterruptedAppendError(offsets=appended.offsets) from interrupt
            except IndeterminateAppendError as error:
                self._fail(error)
                raise
        return appended

    def _allow_gaps(self, headers: list[tuple[BatchHeader, EndMarker | None]], end: int) -> None:
        """Offsets are missing in what is copied: from now on that is no sign of damage here."""
        if self._dense_from >= NEVER_DENSE:
            return
        for header, _ in headers:
            if header.base_offset != end:
                break
            end = header.next_offset
        else:
            return
        # Known before the gap can be met; scans that are under way end in their own segment.
        self._dense_from = NEVER_DENSE
        self._write_state(clean=False, sync=True)
        self._segments[-1].dense = False
        if self._segments[-1].size_bytes:
            self._roll_before(headers[0][0].base_offset)

    def writer(
        self,
        *,
        batch_bytes: int = BATCH_BYTES,
        compression: str | None = None,
        compression_level: int | None = None,
        linger: float | None = 1.0,
        durability: str | None = None,
    ) -> Writer:
        """A buffered writer: millions of records a second, in batches of `batch_bytes`.

        `compression`: none, gzip, snappy, lz4 or zstd.  `linger`: seconds after which a partly
        filled buffer is handed over anyway; None leaves that to `flush` and `close`.  With
        durability="fsync", `flush` and `close` (and the linger time) end with an fsync.
        """
        with self._lock:
            self._next_offset()
        writer = Writer(
            self,
            self._config,
            self._ask_time,
            batch_bytes=batch_bytes,
            compression=compression,
            compression_level=compression_level,
            linger=linger,
            durability=self._durability if durability is None else durability,
        )
        self._writers.add(writer)
        return writer

    def write_batches(self, batches: _native.Builder) -> range:
        """Append the batches of a builder; for Writer."""
        batches._seal()
        with self._lock:
            return self._write_locked(batches)

    # ---- durability ----

    def make_durable(self, offsets: range) -> None:
        """Return when everything below the end of the range is on stable storage."""
        self._commit.wait_for(offsets.stop, offsets.start)

    def sync(self) -> None:
        """Make all records so far durable, whatever their durability level was."""
        with self._lock:
            if self._asleep is not None:
                self._check_usable()
                return  # as durable as a clean close left it
            end = self._next_offset()
            self._segments[-1].flush_indexes()
        self._commit.wait_for(end, self._commit.durable_offset)
        with self._syncing:
            if self._mark is not None:
                self._mark.write(self._commit.durable_offset)

    def _sync_written(self) -> int:
        """Sync every file with unsynced bytes; the end offset that is durable now."""
        # Never takes the append lock: close and truncate wait for a sync while they hold it.
        with self._syncing:
            sealed = list(self._unsynced)
            changes = self._directory_changes
            active = self._segments[-1]
            end = active.end_offset
        try:
            for file in (*sealed, active.file):
                file.datasync()
            if changes != self._directory_synced:
                self._directory.sync()
        except OSError as error:
            self._fail(error)
            raise
        # Only now: an interrupt above leaves everything still to be synced.
        with self._syncing:
            self._directory_synced = changes
            self._unsynced = [file for file in self._unsynced if file not in sealed]
        self._note_durable(end, active.base_offset)
        return end

    def _note_durable(self, end: int, base_offset: int) -> None:
        """Write down how much is durable.  A claim may be late, or missing on a full disk."""
        if time.monotonic() < self._mark_due and base_offset <= self._recovery_point:
            return  # written each time it would slow the syncs themselves down
        before = self._recovery_point
        try:
            with self._syncing:
                self._mark_due = time.monotonic() + MARK_SECONDS
                if self._mark is not None:
                    self._mark.write(end)
            if base_offset > before:
                self._recovery_point = base_offset
                self._write_state(clean=False, sync=True)
        except OSError as error:
            self._recovery_point = before
            log.warning("%s: could not write down what is durable: %s", self.name, error)

    # ---- settings ----

    def reconfigure(self, config: PartitionConfig) -> None:
        """Take over other settings; a change of segment or index settings starts a new segment.

        Writers that were made before keep theirs.
        """
        with self._lock:
            self._check_usable()
            before, self._config = self._config, config
            self._append_time = config.message_timestamp_type == "LogAppendTime"
            self._codec = codec_number(None, config)
            self._spare = []  # builders hold limits and codec
            noted = self._epochs.latest == self._epoch and self._failure is None
            self._plain = noted and self._may_be_plain()
            for segment in self._segments:
                segment.config = config
            if self._writer is not None and _layout(before) != _layout(config):
                self.roll()

    # ---- rolling and cutting ----

    def roll(self) -> None:
        """Seal the active segment and start a new one.  Nothing to do when it is empty."""
        with self._lock:
            end = self._next_offset()
            if self._segments[-1].size_bytes:
                self._roll_locked(end)

    def _roll_locked(self, base_offset: int) -> None:
        """Start a segment at `base_offset`.

        Nothing is synced here: whoever asks for durability next syncs the old file, the new one and
        the directory before it is told so.
        """
        old = self._segments[-1]
        assert old.writer is not None
        if old.base_offset == base_offset:
            raise InvalidRecordError(f"the segment at {base_offset} is empty and cannot be rolled")
        # Nobody may append meanwhile, not even a signal handler of this thread.
        writer, self._writer = self._writer, None
        try:
            old.flush_indexes(final=True)
            self._create_log_file(base_offset)
            new = self._make_segment(base_offset, base_offset >= self._dense_from)
            self._prepare(new, empty_contents(base_offset))
            more = self._producers.roll(old, base_offset)
            with self._syncing:
                self._unsynced += [old.file, *more]
            self._rolling = (old, new)
        except BaseException:
            self._abandon_roll(base_offset, writer)
            raise
        self._finish_roll()
        log.info("%s rolled at offset %d", self.name, base_offset)
        while len(self._unsynced) > UNSYNCED_SEGMENTS:
            oldest = self._unsynced[0]
            oldest.datasync()
            with self._syncing:
                self._unsynced = [file for file in self._unsynced if file is not oldest]

    def _abandon_roll(self, base_offset: int, writer: _native.SegmentWriter | None) -> None:
        """Go on with the old segment; an empty file of the new one must not stay behind."""
        name = segment_name(base_offset, ".log")
        with contextlib.suppress(OSError, NotALogError):
            if self._rolling is None and self._directory.size(name) == 0:
                self._directory.unlink(name)
        if self._rolling is None:
            self._writer = writer

    def _finish_roll(self) -> None:
        """The part of a roll that must happen as one; may be repeated after an interrupt."""
        if self._rolling is None:
            return
        old, new = self._rolling
        old.seal(new.base_offset)
        if self._segments[-1] is not new:
            self._publish((*self._segments, new))
        self._writer = new.writer
        self._keep_warm(old)
        self._rolling = None

    def trim(self, start_offset: int) -> None:
        """Forget all records below `start_offset`; whole segments below it are deleted."""
        with self._lock:
            end = self._next_offset()
            if not 0 <= start_offset <= end:
                raise OffsetOutOfRangeError(
                    start_offset, start=self._start_offset, end=end, where=self.name
                )
            if start_offset <= self._start_offset:
                return
            self._forget_below_locked(start_offset)

    def _forget_below_locked(self, start_offset: int) -> None:
        """Raise the start, durably; then the segments wholly below it lose their names."""
        if start_offset > self._start_offset:
            before = self._start_offset, self._version, self._recovery_point
            self._start_offset = start_offset
            self._version += 1
            self._recovery_point = max(self._recovery_point, start_offset)
            try:
                self._write_state(clean=False, sync=True)
            except BaseException:
                self._start_offset, self._version, self._recovery_point = before
                raise
            self._commit.raise_to(start_offset)
        keep = max(0, bisect.bisect_right(self._view[0], self._start_offset) - 1)
        dropped, kept = self._segments[:keep], self._segments[keep:]
        self._publish(kept)
        self._delete_segments(dropped)
        if self._epochs.truncate_from_start(self._start_offset):
            try:
                write_leader_epochs(self._directory, self._epochs.entries)
            except OSError as error:  # the next open does the same to what it reads
                log.warning("%s: could not write its leader epochs: %s", self.name, error)

    def enforce(
        self,
        policy: RetentionPolicy | None = None,
        *,
        now: int | datetime.datetime | None = None,
        dry_run: bool = False,
    ) -> list[RetentionDecision]:
        """Delete the oldest segments as far as a policy wants it; a decision for every segment.

        Without a policy, the partition's own settings decide: ``cleanup.policy``, ``retention.ms``
        and ``retention.bytes``.  `dry_run` deletes nothing.  Ages are judged at `now`; by default
        at the clock's time, less what the clock may have leapt ahead: a `now` that is given is
        believed.  Whoever is reading a deleted segment reads it to its end.
        """
        if policy is None:
            policy = RetentionPolicy.of(self._config)
        leap_ms = 0
        if now is None:
            now = self._clock_guard.look(self._clock.time_ms(), self._clock.monotonic())
            leap_ms = self._clock_guard.leap_ms
            if leap_ms:
                log.warning("%s: the clock leapt %d ms ahead; ages are judged without that",
                            self.name, leap_ms)  # fmt: skip
        else:
            now = _milliseconds(now)
        if dry_run:
            return self._decide(policy, now, leap_ms)
        self._check_usable()
        if self._readonly or self._failure is not None:
            self._refuse()
        # What costs reading happens before the lock is taken; the answers are kept.
        planned = self._decide(policy, now, leap_ms)
        if not any(decision.delete for decision in planned):
            return planned
        with self._lock:
            end = self._next_offset()
            decisions = self._decide(policy, now, leap_ms)
            going = sum(decision.delete for decision in decisions)
            if going:
                if decisions[going - 1].roll:
                    self._roll_locked(end)
                first = self._segments[going].base_offset
                self._forget_below_locked(max(first, self._start_offset))
        for decision in decisions[:going]:
            log.info("%s: deleted [%d, %d): %s", self.name, decision.base_offset,
                     decision.end_offset, decision.reason)  # fmt: skip
        return decisions

    def _decide(self, policy: RetentionPolicy, now: int, leap_ms: int) -> list[RetentionDecision]:
        """What a policy says; an age that would cost a segment is read from the log itself."""
        while True:
            segments = self.segments
            try:
                decisions = policy.plan(segments, now, start_offset=self._start_offset,
                                        high_watermark=self.high_watermark,
                                        leap_ms=leap_ms)  # fmt: skip
                old = [segment for segment, decision in zip(segments, decisions, strict=True)
                       if decision.rule == "age"]  # fmt: skip
                before = [segment.max_timestamp for segment in old]
                if before == [segment.confirm_max_timestamp() for segment in old]:
                    return decisions
            except FileNotFoundError:
                # Deleted meanwhile, by another thread or process: there is a new list then.
                if segments == self.segments:
                    raise

    def _delete_segments(self, segments: Iterable[Segment]) -> None:
        """Readers that have a file open keep it; the name goes first, so a crash is finished."""
        names = []
        for segment in segments:
            self._warm.pop(segment.base_offset, None)
            segment.release()
            for suffix in SEGMENT_SUFFIXES:
                name = segment_name(segment.base_offset, suffix)
                if self._directory.exists(name):
                    self._directory.rename(name, f"{name}.deleted")
                    names.append(f"{name}.deleted")
            log.info("%s: deleted the segment at offset %d", self.name, segment.base_offset)
        if names:
            self._directory.sync()
            for name in names:
                self._directory.unlink(name)

    def truncate(self, end_offset: int) -> None:
        """Cut the log so that `end_offset` is the next offset.  Records below it stay, all of them.

        Safe against a crash at any point: the cut is planned in a file first.  Scans that have
        already read beyond keep what they have.
        """
        with self._lock:
            end = self._next_offset()
            if not self._start_offset <= end_offset <= end:
                raise OffsetOutOfRangeError(
                    end_offset, start=self._start_offset, end=end, where=self.name
                )
            if end_offset == end:
                self._cut_epochs_locked(end)
                return
            try:
                self._truncate_locked(end_offset)
            except BaseException as error:
                # Whatever stopped it half-way, the plan is on disk: opening again finishes the cut.
                self._fail(error)
                raise

    def _truncate_locked(self, end_offset: int) -> None:
        number = max(0, bisect.bisect_right(self._view[0], end_offset) - 1)
        last = self._segments[number]
        if end_offset == last.base_offset and number > 0:
            # Nothing of this segment stays, but its base is where the log goes on: keep it, empty.
            position, batch = 0, b""
        else:
            position, batch = self._cut_at(last, end_offset)
        later = self._segments[number + 1 :]
        # Claims are lowered before the data is cut, and readers told to look again.
        self._cuts += 1
        CleanerCheckpoint.lower(self._directory, end_offset)
        self._version += 1
        self._recovery_point = min(self._recovery_point, last.base_offset)
        self._commit.lower(last.base_offset)
        assert self._mark is not None
        self._mark.write(last.base_offset)
        self._write_state(clean=False, sync=True)
        self._cut_epochs_locked(end_offset)
        plan = TruncationPlan(
            last.base_offset,
            position,
            batch,
            tuple(segment.base_offset for segment in later),
            end_offset,
        )
        plan.write(self._directory)
        with self._syncing:
            self._unsynced = []
        last.file.end = position  # readers stop there before the bytes go
        plan.apply(self._directory)
        for segment in (last, *later):
            self._warm.pop(segment.base_offset, None)
            segment.writer = None
            segment.release()
        last.next_base = None
        contents = last.walk()
        self._publish(self._segments[: number + 1])
        self._load_producers(contents.next_offset, self._directory.names(), clean=True)
        self._activate(last, contents)
        if contents.next_offset < end_offset:
            # The kept records end before it (a gap): go on in a segment of its own.
            if contents.position:
                self._roll_locked(end_offset)
            else:
                self._replace_empty(last, end_offset)
        # Readers take the plan, and the version once it is gone, for the sign of a cut.
        self._version += 1
        self._write_state(clean=False, sync=True)
        self._directory.unlink(TRUNCATION_PLAN)
        self._directory_changes += 1
        self._commit.wait_for(end_offset, end_offset)

    def _replace_empty(self, segment: Segment, base_offset: int) -> None:
        """An empty segment under another base offset."""
        self._create_log_file(base_offset)
        new = self._make_segment(base_offset, base_offset >= self._dense_from)
        self._activate(new, empty_contents(base_offset))
        segment.writer = None
        self._publish((*self._segments[:-1], new))
        self._producers.snapshot(base_offset)  # one at the old base goes
        self._delete_segments([segment])

    def _cut_at(self, segment: Segment, end_offset: int) -> tuple[int, bytes]:
        """Where to cut a file, and the batch to put there: the kept part of a straddling one."""
        scan = segment.scan(end_offset, segment.end_offset)
        raw = scan.next_raw()
        if raw is None:
            return segment.size_bytes, b""
        position = scan.position - len(raw)
        base = int.from_bytes(raw[:8], "big")
        if base >= end_offset:
            return position, b""
        kept = _native.batch_below(raw, end_offset, decompress, codecs.compress,
                                   self._config.max_decompressed_message_bytes)  # fmt: skip
        return position, kept

    # ---- leader epochs ----

    @property
    def leader_epoch(self) -> int:
        """The epoch that appends carry."""
        if self._readonly:
            return LeaderEpochs(read_leader_epochs(self._directory)).latest or 0
        return self._epoch

    @property
    def leader_epochs(self) -> LeaderEpochs:
        """Which epoch started where; a copy."""
        if self._readonly:
            self._check_usable()
            return LeaderEpochs(read_leader_epochs(self._directory))
        with self._lock:
            return LeaderEpochs(self._epochs.entries)

    def become_leader(self, epoch: int) -> None:
        """Begin an epoch: records from here on carry it.  On disk when this returns.

        Raises FencedError when a higher one has begun; the same again is fine.
        """
        if not 0 <= epoch <= EPOCH_MAX:
            raise ValueError(f"an epoch is an int from 0 to {EPOCH_MAX}, not {epoch!r}")
        with self._lock:
            end = self._next_offset()
            if epoch < self._epoch:
                raise FencedError(epoch, self._epoch, where=self.name)
            if epoch > self._epoch or self._epochs.latest != epoch:
                self._assign_epoch_locked(epoch, end)
                self._epoch = epoch
                self._plain = self._may_be_plain()

    def end_offset_for_epoch(self, epoch: int) -> EpochEnd | None:
        """Where an epoch ended here: what a leader answers a follower that may have diverged.

        The answer names the greatest epoch up to the one asked for; None when the log cannot tell.
        """
        with self._lock:
            return self.leader_epochs.end_offset_for(epoch, self.end_offset)

    def truncate_to_epoch(self, answer: EpochEnd) -> bool:
        """A follower's part: cut by what the leader answered about our last epoch.

        The epoch to ask for is ``leader_epochs.latest``.  False: histories still differ; ask again.
        """
        with self._lock:
            cut = self._epochs.cut_for(answer, self._next_offset())
            self.truncate(max(cut.offset, self._start_offset))
            return cut.agreed or self._epochs.latest is None

    def _assign_epoch_locked(self, epoch: int, offset: int) -> None:
        """Write down that `epoch` starts at `offset`: before the first record that carries it."""
        changed = LeaderEpochs(self._epochs.entries)
        if changed.assign(epoch, offset):
            write_leader_epochs(self._directory, changed.entries)
            self._epochs = changed

    def _cut_epochs_locked(self, end_offset: int) -> None:
        """Forget epochs that start at or above a cut: before it is made, even if it cuts nothing.

        The next append puts its own back, at the offset it then has.
        """
        changed = LeaderEpochs(self._epochs.entries)
        if changed.truncate_from_end(end_offset):
            self._write_state(clean=False, sync=True)  # what was promised outlives its entry
            write_leader_epochs(self._directory, changed.entries)
            self._epochs = changed
            self._plain = False

    # ---- rewriting ----

    @property
    def first_dirty_offset(self) -> int:
        """Compaction has been over everything below this; the start of the log when it has not."""
        start, end = self.start_offset, self.end_offset
        offset = CleanerCheckpoint.read(self._directory)
        if offset < 0 and self._claims is not None:
            offset = self._claims.first_dirty_offset  # as a broker left it
        return offset if start <= offset <= end else start

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[int]:
        """Nobody else rewrites segments meanwhile; for Compactor.

        Appends, rolls, cuts and reads go on; the number it gives tells `was_cut_since` where it
        began.  Raises ReadOnlyError, ClosedError, or ValueError when a compaction is under way.
        """
        with self._lock:
            self._next_offset()
            cuts = self._cuts
        if not self._rewriting.acquire(blocking=False):
            raise ValueError(f"{self.name} is being compacted or purged already")
        try:
            yield cuts
        finally:
            self._rewriting.release()

    def was_cut_since(self, cuts: int) -> bool:
        """Whether records that were read then may be gone now; for Compactor."""
        return self._cuts != cuts

    def replace_segments(self, old: Sequence[Segment], new: RewrittenSegment, cuts: int) -> bool:
        """Put a rewritten segment in the place of sealed ones in a row; for Compactor.

        False, with nothing changed, when the log was cut since, or when `old` are not its segments
        any more.  Readers that are in the old files stay there.  Safe against a crash at any point.
        """
        with self._lock:
            self._next_offset()
            if self._cuts != cuts or not self._has_in_a_row(old):
                return False
            plan = SwapPlan(new, tuple(segment.base_offset for segment in old))
            try:
                self._replace_locked(old, plan)
            except KeyboardInterrupt:
                try:
                    self._replace_locked(old, plan)  # half a swap helps nobody
                except BaseException as error:
                    self._fail(error)
                    raise
                raise
        log.info("%s: rewrote the segments from offset %d to %d", self.name, new.base_offset,
                 cast(int, old[-1].next_base))  # fmt: skip
        return True

    def _has_in_a_row(self, segments: Sequence[Segment]) -> bool:
        try:
            first = self._segments.index(segments[0])
        except ValueError:
            return False
        here = self._segments[first : first + len(segments)]
        return here == tuple(segments) and all(segment.sealed for segment in here)

    def _replace_locked(self, old: Sequence[Segment], plan: SwapPlan) -> None:
        end = cast(int, old[-1].next_base)
        for segment in old:
            segment.retire()
        try:
            # Before a name changes: offsets may be missing from here on, readers must look again.
            self._version += 1
            self._dense_from = max(self._dense_from, end)
            self._write_state(clean=False, sync=True)
            plan.write(self._directory)
        except OSError:
            self._directory.unlink(SWAP_PLAN)
            for segment in old:
                segment.reinstate()
            raise
        try:
            plan.apply(self._directory)
            new = self._make_segment(plan.new.base_offset, False)
            new.next_base = end
            for segment in old:
                self._warm.pop(segment.base_offset, None)
            rest = [segment for segment in self._segments if segment.base_offset not in plan.old]
            self._producers.replaced(
                plan.old, plan.new.base_offset, indexed=".txnindex" in plan.new.suffixes
            )
            self._publish(sorted([*rest, new], key=lambda segment: segment.base_offset))
            self._version += 1
            self._write_state(clean=False, sync=True)
            plan.finish(self._directory)
        except OSError as error:
            self._fail(error)  # the plan is on disk: opening again finishes it
            raise

    def note_cleaned(self, offset: int, cuts: int) -> None:
        """Write down that compaction has been over everything below an offset; for Compactor.

        Nothing is noted when the log was cut since.
        """
        with self._lock:
            if self._cuts == cuts and offset <= self._next_offset():
                CleanerCheckpoint.write(self._directory, offset)

    # ---- reading ----

    def scan(
        self,
        start: int | None = None,
        stop: int | None = None,
        *,
        isolation: str = "read_uncommitted",
        follow: bool = False,
        timeout: float | None = None,
        max_records: int | None = None,
        on_corrupt: str = "raise",
    ) -> Scan:
        """Records with offsets in [start, stop), lazily; from the first to the last by default.

        A `start` below the log begins at its first record, one beyond its end finds nothing; for
        offsets from the end use a slice, ``log[-10:]``.  At most `max_records` are returned.
        `isolation`: "read_uncommitted" shows every record as soon as it is there;
        "read_committed" shows none of an aborted transaction, and nothing at or beyond
        ``last_stable_offset``.
        ``follow=True`` waits for more at the end, for ever or until `timeout` seconds bring
        nothing.  ``on_corrupt="skip"`` passes over damage and lists it in ``scan.skipped``.
        """
        self._check_usable()
        if isolation not in ("read_uncommitted", "read_committed"):
            raise ConfigError(
                f"isolation must be 'read_uncommitted' or 'read_committed', not {isolation!r}"
            )
        for bound in (start, stop):
            if bound is not None and bound < 0:
                raise OffsetOutOfRangeError(
                    bound, start=self._start_offset, end=self.end_offset, where=self.name
                )
        return Scan(self, start, stop, follow=follow, timeout=timeout, max_records=max_records,
                    on_corrupt=on_corrupt, committed=isolation == "read_committed")  # fmt: skip

    @overload
    def __getitem__(self, offset: int) -> Record: ...
    @overload
    def __getitem__(self, offset: slice) -> Scan: ...

    def __getitem__(self, offset: int | slice) -> Record | Scan:
        """The record at an offset, negative counting from the end; a slice is a lazy Scan.

        Raises OffsetOutOfRangeError outside the log, RecordNotFoundError for a record that was
        compacted away.
        """
        if isinstance(offset, slice):
            return self._slice(offset)
        if not isinstance(offset, int):
            raise TypeError(f"an offset is an int, not {type(offset).__name__}")
        while True:
            generation = self.generation
            try:
                return self._get(offset)
            except (CorruptLogError, FileNotFoundError, RecordNotFoundError):
                if not self.moved_since(generation):
                    raise

    def _get(self, offset: int) -> Record:
        end = self.end_offset
        wanted = offset + end if offset < 0 else offset
        if not self._start_offset <= wanted < end:
            raise OffsetOutOfRangeError(offset, start=self._start_offset, end=end, where=self.name)
        record = self.segment_for(wanted).get(wanted)
        if record is None:
            raise RecordNotFoundError(wanted, where=self.name)
        return record

    def get(self, key: bytes) -> Record | None:
        """The newest record of a key; None when there is none, or it is a tombstone.

        There is no index of keys: segments are read from the newest back to the first that has the
        key, and all of them when none does.
        """
        if not isinstance(key, bytes):
            raise TypeError(f"a key is bytes, not {type(key).__name__}")
        while True:
            generation = self.generation
            try:
                return self._newest_of(key)
            except (CorruptLogError, FileNotFoundError):
                if not self.moved_since(generation):
                    raise

    def _newest_of(self, key: bytes) -> Record | None:
        start, offset = self.start_offset, self.end_offset
        while offset > start:
            segment = self.segment_for(offset - 1)
            found = segment.newest_of(key, start)
            if found >= 0:
                record = segment.get(found)
                return None if record is None or record.value is None else record
            offset = segment.base_offset
        return None

    def _slice(self, offsets: slice) -> Scan:
        if offsets.step not in (None, 1):
            raise ValueError("a slice of a log has no step")
        end = self.end_offset

        def bound(offset: int | None) -> int | None:
            return max(0, offset + end) if offset is not None and offset < 0 else offset

        return self.scan(bound(offsets.start), bound(offsets.stop))

    def __iter__(self) -> Iterator[Record]:
        return iter(self.scan())

    def tail(self, n: int, *, isolation: str = "read_uncommitted") -> list[Record]:
        """The last `n` records, oldest first; fewer when the log has fewer."""
        if n < 0:
            raise ValueError(f"n must not be negative, not {n}")
        end, first = self.end_offset, self._start_offset
        n = min(n, end - first)
        span = n
        while n:
            # Offsets without a record (compaction, control batches) make a look further back.
            start = max(first, end - span)
            records = collections.deque(self.scan(start, end, isolation=isolation), maxlen=n)
            if len(records) == n or start == first:
                return list(records)
            span *= 4
        return []

    def offset_for_time(self, when: int | datetime.datetime) -> int:
        """The offset of the first record at or after a time; the end when nothing is that late.

        `when` is a datetime with a time zone, or int milliseconds since 1970.
        """
        when = _milliseconds(when)
        while True:
            generation = self.generation
            try:
                return self._offset_for_time(when)
            except (CorruptLogError, FileNotFoundError):
                if not self.moved_since(generation):
                    raise

    def _offset_for_time(self, when: int) -> int:
        end, start = self.end_offset, self.start_offset
        if when > INT64_MAX:
            return end
        when = max(when, -INT64_MAX)
        for segment in self.segments:
            if segment.end_offset <= start:
                continue
            found = segment.offset_for_time(when, start)
            if found is not None and found < end:
                return found
        return end

    def read_batches(
        self, offset: int, max_bytes: int = 1 << 20, *, isolation: str = "read_uncommitted"
    ) -> list[bytes]:
        """Raw batches from the one that holds `offset` on; at least one, if there is any.

        With "read_committed" none at or beyond ``last_stable_offset``.  Those of aborted
        transactions are among them, as a Kafka consumer expects: see `aborted_transactions`.
        """
        end = self.end_offset
        if not self._start_offset <= offset <= end:
            raise OffsetOutOfRangeError(offset, start=self._start_offset, end=end, where=self.name)
        batches: list[bytes] = []
        size = 0
        stop = self.last_stable_offset if isolation == "read_committed" else end
        for batch in self.scan(offset, stop).batches():
            if batches and size + len(batch) > max_bytes:
                break
            batches.append(batch)
            size += len(batch)
        return batches

    def check(self) -> None:
        """Verify every batch, record and index entry; raise CorruptLogError at the first fault.

        Where there are transactions, also that every aborted one is known as such.
        """
        while True:
            self._check_usable()
            generation = self.generation
            try:
                end = self.end_offset
                found = [segment.verified().producers for segment in self.segments]
                if any(found):
                    self._known_producers().check(self._segments, end)
            except (CorruptLogError, FileNotFoundError):
                if not self.moved_since(generation):
                    raise
            else:
                return

    @property
    def dense_from(self) -> int:
        """From this offset on none is missing, but by damage."""
        return self._dense_from

    def segment_for(self, offset: int) -> Segment:
        """The segment with the greatest base offset at or below `offset`."""
        self._check_usable()
        bases, segments = self._view
        segment = segments[max(0, bisect.bisect_right(bases, offset) - 1)]
        if segment.sealed:
            if self._readonly and segment.base_offset not in self._warm and not self._hold(segment):
                return self.segment_for(offset)
            self._keep_warm(segment)
        return segment

    def _hold(self, segment: Segment) -> bool:
        """Open a sealed segment's files while they are still those of the log we know.

        False when the writer has put others in their place: then the log was loaded anew.
        """
        try:
            segment.file  # noqa: B018  opened, and kept
            segment.offset_index  # noqa: B018
        except FileNotFoundError:
            if not self._is_outdated():
                raise
        if not self._is_outdated():
            return True
        with self._lock:
            self._reload()
        return False

    def _is_outdated(self) -> bool:
        # The plan first: when it is gone again, the version has moved before.
        if self._plan_now() != self._plan_seen:
            return True
        state = PartitionState.read(self._directory)
        return state is not None and state.version != self._version

    def _keep_warm(self, segment: Segment) -> None:
        """Bound the descriptors and indexes that sealed segments hold."""
        warm = self._warm
        base = segment.base_offset
        if base in warm:
            with contextlib.suppress(KeyError):
                warm.move_to_end(base)
            return
        with self._lock:
            warm[base] = segment
            while len(warm) > WARM_SEGMENTS:
                _, coldest = warm.popitem(last=False)
                if coldest is not segment:
                    coldest.release()

    # ---- following ----

    def wait_beyond(self, offset: int, timeout: float | None, *, committed: bool = False) -> bool:
        """Wait until the end (the last stable offset) is beyond `offset`; False: the time is up."""
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._readonly:
            return self._poll_beyond(offset, deadline, committed)
        with self._appended:
            self._followers += 1
            try:
                while self._readable_end(committed) <= offset:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return False
                    self._appended.wait(left)
            finally:
                self._followers -= 1
        return True

    def _readable_end(self, committed: bool) -> int:
        return self.last_stable_offset if committed else self.end_offset

    def _poll_beyond(self, offset: int, deadline: float | None, committed: bool) -> bool:
        while self._readable_end(committed) <= offset:
            left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, POLL_SECONDS))
        return True

    # ---- beside a writer in another process ----

    def _refresh(self) -> None:
        """See what another process has appended, rolled, trimmed or cut since the last look."""
        self._check_usable()
        with self._lock:
            state = PartitionState.read(self._directory)
            if state is not None and state.version != self._version:
                self._reload()
                return
            while True:
                active = self._segments[-1]
                try:
                    file = active.file
                except FileNotFoundError:
                    return  # nothing was ever written
                size = file.size()
                rolled = self._directory.exists(segment_name(active.seen_end_offset, ".log"))
                if size < file.end:
                    self._reload()
                    return
                if size > file.end:
                    found = active.walk(file.end, limit=size, next_offset=active.seen_end_offset)
                    if found.position > file.end:
                        file.end = found.position
                        if found.producers and self._producers_loaded:
                            # Before the end moves: what is seen is judged by what is known.
                            self._producers.see(active, active.seen_end_offset, found.next_offset)
                        active.seen_end_offset = found.next_offset
                        continue
                if not rolled or active.seen_end_offset == active.base_offset:
                    return
                self._see_roll(active)

    def _see_roll(self, active: Segment) -> None:
        base = active.seen_end_offset
        new = self._make_segment(base, base >= self._dense_from)
        new.file.end = 0
        active.next_base = base
        self._publish((*self._segments, new))

    @property
    def generation(self) -> int:
        """Moves when the log changed by more than an append."""
        return self._loads if self._readonly else self._version

    def moved_since(self, generation: int) -> bool:
        """Whether the log was cut, trimmed or opened anew; a reader has loaded it again by then.

        What looked like damage before may have been a cut: a writer announces one before it cuts.
        """
        self._check_usable()
        with self._lock:
            deadline = time.monotonic() + SETTLE_SECONDS
            while self._readonly and self._loads == generation:
                plan = self._plan_now()  # first: when it is gone again, the version has moved
                state = PartitionState.read(self._directory)
                if plan != self._plan_seen or (state and state.version != self._version):
                    self._reload()
                elif plan != CUTTING:
                    break
                elif time.monotonic() > deadline:
                    # Its writer died, or is slow: what it has cut since we looked is no damage.
                    before = self._shape()
                    self._reload()
                    return self._shape() != before
                else:
                    time.sleep(SETTLE_SECONDS / 100)
            return self.generation != generation

    def _shape(self) -> list[tuple[int, int]]:
        return [(segment.base_offset, segment.seen_end_offset) for segment in self._segments]

    def _load_settled(self, progress: RecoveryProgress | None) -> LoadedLog:
        """Load beside a writer: what was changed meanwhile is loaded again.

        A truncation under way is waited for; if its writer died, the log without what it was about
        to cut is what there is until the next writer.
        """
        self._loads += 1
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            in_time = time.monotonic() < deadline
            plan = self._plan_now()
            try:
                loaded = load(
                    self._directory,
                    self._make_segment,
                    readonly=True,
                    progress=progress,
                    claims=self._claims,
                )
            except (CorruptLogError, FileNotFoundError):
                if not in_time:
                    raise
            else:
                state = PartitionState.read(self._directory)
                self._plan_seen = self._plan_now()
                same = state is None or state.version == loaded.version
                if not in_time or (same and plan == self._plan_seen != CUTTING):
                    for damage in loaded.report.damage:
                        log.warning(DAMAGE_MESSAGE, damage.path, damage.position, damage.reason)
                    return loaded
            time.sleep(SETTLE_SECONDS / 100)

    def _plan_now(self) -> int:
        """Which change of files, planned by a writer, is under way."""
        if self._directory.exists(TRUNCATION_PLAN):
            return CUTTING
        if self._directory.exists(SWAP_PLAN):
            plan = SwapPlan.read(self._directory)
            return SWAPPING if plan is not None and plan.counts(self._directory) else SWAP_AHEAD
        return NO_PLAN

    def _reload(self) -> None:
        for segment in self._segments:
            segment.release()
        self._warm.clear()
        self._load(None)


def _sync_written_of(partition: weakref.ref[Partition]) -> Callable[[], int]:
    """Its group commit must not keep a partition alive: dropped, it gives its lock back at once."""

    def sync_written() -> int:
        owner = partition()
        if owner is None:
            raise ClosedError("the partition is gone")
        return owner._sync_written()

    return sync_written


def _milliseconds(when: int | datetime.datetime) -> int:
    """A time as a person gives it, in milliseconds since 1970."""
    if isinstance(when, datetime.datetime):
        if when.tzinfo is None:
            raise ValueError("a datetime without a time zone is ambiguous: give it one")
        return round(when.timestamp() * 1000)
    if not isinstance(when, int):
        raise TypeError(f"a time is int milliseconds or a datetime with a time zone, not {when!r}")
    return when


def _name_of(path: Path) -> str:
    """The directory's own name, also where the path is relative or ends in a dot."""
    return path.name or path.absolute().name


def _layout(config: PartitionConfig) -> tuple[int, ...]:
    """What an active segment is laid out by."""
    return (
        config.segment_bytes,
        config.segment_ms,
        config.segment_jitter_ms,
        config.segment_index_bytes,
        config.index_interval_bytes,
    )


def _after_fork_in_child() -> None:
    _native.after_fork_in_child()
    for partition in list(_open_partitions):
        partition._abandon_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
