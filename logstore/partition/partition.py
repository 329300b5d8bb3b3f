"""Partition: an ordered, durable sequence of records in one directory.

A facade: it has the public signatures, and calls the parts that do the work.  LogView has the
segments, Reader reads, ActiveLog has the end of the log, Appender appends, Cutter trims and
truncates, Rewriter replaces segments.  Parts loads and closes them.

Lifetime: no part refers to its Partition.  A Scan or a Writer refers to a part, and each part to
ActiveLog, which keeps the files open and the directory locked.  So a Partition that is dropped
without close releases its lock at once, unless a Scan or a Writer still uses the log.

Locks: the view's lock serialises appends, rolls and cuts.  Readers take none.  Every other lock of
a log is taken after the view's.

Not here: topics and partitioning by key (Store), consumer positions (Consumer), retention rules.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from logstore.clock import Clock
from logstore.closeable import Closeable
from logstore.config import PartitionConfig, wants_fsync
from logstore.errors import CorruptLogError, OffsetOutOfRangeError, RecordNotFoundError
from logstore.files.directory import Directory
from logstore.files.disk_reserve import PARTITION_RESERVE_BYTES, Reserve
from logstore.files.filesystem import require_safe
from logstore.files.lock import DirectoryLock
from logstore.files.names import directory_name, parse_partition_name
from logstore.format.index import AbortedTransaction
from logstore.format.validation import AppendedBatches
from logstore.log.epochs import EpochEnd, LeaderEpochs
from logstore.log.producer_state import OngoingTransaction
from logstore.log.segment import Segment
from logstore.partition.appender import BATCH_BYTES, Appender
from logstore.partition.parts import Parts
from logstore.partition.reader import Reader
from logstore.partition.scan import Scan
from logstore.partition.writer import Writer
from logstore.record import Record
from logstore.recovery.loader import Claims, refuse_foreign
from logstore.recovery.report import RecoveryProgress, RecoveryReport

if TYPE_CHECKING:  # imported on first use: opening a log needs neither
    from logstore.checking.partition_check import CheckProgress
    from logstore.checking.problem import Problem
    from logstore.log.retention import RetentionDecision, RetentionPolicy

__all__ = ["Partition", "open_in_store"]


class Partition(Closeable):
    """One partition of a topic: a directory named ``topic-N``.  Open one with `Partition.open`.

    ``topic`` and ``number`` are the two parts of its name.  ``recovery`` reports what opening found
    and repaired.  There is no ``len()``: offsets run from ``start_offset`` to ``end_offset``.

    Threads may share a Partition.  One process at a time may have it open for writing, any number
    with ``readonly=True``.

    ``parts`` holds the objects that do the work, for other packages of logstore.  Its names may
    change in any release.
    """

    def __init__(self, directory: Directory, *, readonly: bool, durability: str,
                 config: PartitionConfig, clock: Clock | None,
                 claims: Claims | None = None) -> None:  # fmt: skip
        """Use `Partition.open`."""
        self.parts = parts = Parts(directory, readonly=readonly, durability=durability,
                                   config=config, clock=clock, claims=claims)  # fmt: skip
        self.topic, self.number = parts.view.topic, parts.view.number
        self._view, self._active, self._reader = parts.view, parts.active, parts.reader
        # The hot calls, without a frame of this class.  The parts do not refer to the Partition, so
        # this makes no reference cycle.
        for name in ("append", "scan"):
            setattr(self, name, getattr(parts, name))
        parts.complete()

    # ---- opening ----

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
        reserve_bytes: int = PARTITION_RESERVE_BYTES,
        allow_unsafe_fs: bool = False,
    ) -> Partition:
        """Open a partition directory, creating it if it is missing.

        After a crash the unchecked end of the log is verified and repaired.  `progress` is called
        with (bytes checked, bytes in all), and ``partition.recovery`` reports what was found.
        `reserve_bytes` of the disk are kept for deleting and closing when the disk is full.
        Raises LockedError if another handle has it open for writing, FileNotFoundError if it is
        missing and may not be created, NotALogError, InvalidNameError, and UnsafeFileSystemError on
        a network file system, unless ``allow_unsafe_fs=True``.
        """
        path = Path(path)
        parse_partition_name(directory_name(path))
        settings = PartitionConfig.of(config)
        wants_fsync(durability)
        directory = Directory(path, create=create and not readonly)
        self = cls(directory, readonly=readonly, durability=durability, config=settings,
                   clock=clock)  # fmt: skip
        try:
            refuse_foreign(directory)
            if not readonly:
                require_safe(directory, allow_unsafe=allow_unsafe_fs)
                self.parts.lock_alone()
                directory.room = reserve = Reserve(directory, reserve_bytes)
                reserve.fill()
            self.parts.load(progress)
        except BaseException:
            self.parts.drop()
            raise
        return self

    # ---- closing ----

    def close(self) -> None:
        """Close its writers, make everything durable and release the directory.

        Raises, and stays open, if a writer cannot write what it holds.  Closing twice is harmless,
        and finishes a close that was interrupted.  Scans and appends of other threads then raise
        ClosedError.
        """
        self.parts.close()

    def __repr__(self) -> str:
        return repr(self._view)

    # ---- what it is ----

    @property
    def path(self) -> Path:
        """The directory."""
        return self._view.directory.path

    @property
    def name(self) -> str:
        """``topic-N``."""
        return self._view.name

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._view.closed

    @property
    def readonly(self) -> bool:
        """Whether it was opened with ``readonly=True``."""
        return self._view.readonly

    @property
    def config(self) -> PartitionConfig:
        """The settings it was opened with."""
        return self._view.config

    @property
    def clock(self) -> Clock:
        """The clock it was opened with."""
        return self._view.clock

    @property
    def durability(self) -> str:
        """The level of an append that names none: "fsync" or "os"."""
        return self._active.durability.level

    @property
    def recovery(self) -> RecoveryReport:
        """What opening found and repaired."""
        return self._view.report

    @property
    def failure(self) -> BaseException | None:
        """The error that ended appends through this handle; None if there was none."""
        return self._active.failure

    @property
    def start_offset(self) -> int:
        """The first offset that can be read."""
        return self._reader.start_offset

    @property
    def end_offset(self) -> int:
        """The offset that the next record gets."""
        writer = self._active.writer  # as Reader does, without its frame: callers poll this
        return writer.next_offset if writer is not None else self._view.end_offset

    @property
    def durable_offset(self) -> int:
        """Every record below this offset is on stable storage."""
        return self._active.durable_offset

    @property
    def high_watermark(self) -> int:
        """The end of what readers see: without replicas, ``end_offset``."""
        return self._reader.readable_end

    @property
    def last_stable_offset(self) -> int:
        """The end of what read_committed consumers may read: the oldest open transaction."""
        return self._reader.last_stable_offset

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments as they are now; the last is the one appended to."""
        return self._reader.segments

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
        on_lost: str = "raise",
    ) -> Scan:
        """Return the records with offsets in [start, stop), lazily; by default all of them.

        Without a `start` it begins at the first record.  A `start` below ``start_offset`` raises
        OffsetOutOfRangeError: these records were deleted.  A scan under way raises it if retention
        or `trim` deletes records before the scan has read them.  ``on_lost="skip"`` continues at
        ``start_offset`` instead.  A `start` beyond the end finds nothing; for offsets from the end
        use a slice, ``log[-10:]``.  At most `max_records` are returned.
        `isolation`: "read_uncommitted" returns every record as soon as it is written;
        "read_committed" returns none of an aborted transaction, and none at or beyond
        ``last_stable_offset``.
        ``follow=True`` waits for more at the end, for ever or until no record arrives for `timeout`
        seconds.  ``on_corrupt="skip"`` skips damage and lists it in ``scan.skipped``.
        """
        return self._reader.scan(start, stop, isolation=isolation, follow=follow, timeout=timeout,
                                 max_records=max_records, on_corrupt=on_corrupt,
                                 on_lost=on_lost)  # fmt: skip

    @overload
    def __getitem__(self, offset: int) -> Record: ...
    @overload
    def __getitem__(self, offset: slice) -> Scan: ...

    def __getitem__(self, offset: int | slice) -> Record | Scan:
        """Return the record at an offset; negative counts from the end; a slice is a lazy Scan.

        Raises OffsetOutOfRangeError outside the log, RecordNotFoundError for a record that was
        compacted away.
        """
        # Here and not in Reader: one frame more for each record would be measurable.
        if isinstance(offset, slice):
            return self._reader.sliced(offset)
        if not isinstance(offset, int):
            raise TypeError(f"an offset is an int, not {type(offset).__name__}")
        view = self._view
        while True:
            generation = view.generation
            try:
                view.look()
                view.check_usable()
                end = min(view.segments[-1].end_offset, view.limit)
                wanted = offset + end if offset < 0 else offset
                if not view.start_offset <= wanted < end:
                    raise OffsetOutOfRangeError(
                        offset, start=view.start_offset, end=end, where=self.name
                    )
                record = view.find_segment(wanted).get(wanted)
                if record is None:
                    raise RecordNotFoundError(wanted, where=self.name)
            except (CorruptLogError, FileNotFoundError, LookupError):
                # Also an offset out of range: a writer of another process that replaces files may
                # make the log look shorter for a moment.
                if not view.moved_since(generation):
                    raise
            else:
                return record

    def __iter__(self) -> Iterator[Record]:
        return iter(self._reader.scan())

    def get(self, key: bytes, *, isolation: str = "read_uncommitted") -> Record | None:
        """Return the newest record of a key; None if there is none, or it is a tombstone.

        There is no index of keys: segments are read from the newest back to the first that has the
        key, and all of them if none has it.  `isolation` is as in `scan`: with "read_committed",
        the newest record that is of no aborted or open transaction.
        """
        return self._reader.get(key, isolation=isolation)

    def tail(self, n: int, *, isolation: str = "read_uncommitted") -> list[Record]:
        """Return the last `n` records, oldest first; fewer if the log has fewer."""
        return self._reader.tail(n, isolation=isolation)

    def offset_for_time(self, when: int | datetime.datetime) -> int:
        """Return the offset of the first record at or after a time; the end if there is none.

        `when` is a datetime with a time zone, or int milliseconds since 1970.
        """
        return self._reader.offset_for_time(when)

    def read_batches(
        self, offset: int, max_bytes: int = 1 << 20, *, isolation: str = "read_uncommitted"
    ) -> list[bytes]:
        """Return raw batches from the one that holds `offset` on; at least one, if there is any.

        With "read_committed" none at or beyond ``last_stable_offset``.  Batches of aborted
        transactions are included, as a Kafka consumer expects: see `aborted_transactions`.
        """
        return self._reader.read_batches(offset, max_bytes, isolation=isolation)

    @property
    def ongoing_transactions(self) -> list[OngoingTransaction]:
        """Transactions that are neither committed nor aborted, oldest first.

        If its producer never ends it, a transaction holds the last stable offset back until
        `end_transaction` aborts it.
        """
        return self._reader.ongoing_transactions

    def aborted_transactions(
        self, start: int | None = None, stop: int | None = None
    ) -> list[AbortedTransaction]:
        """Return aborted transactions with records or a marker in [start, stop), by marker."""
        return self._reader.aborted_transactions(start, stop)

    # ---- appending ----

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

        With `expect_offset` the record gets exactly that offset, or ConflictError is raised.
        Raises RecordTooLargeError, InvalidRecordError, TypeError for a record that can never be
        stored; DiskFullError with nothing appended; IndeterminateAppendError if it is unknown
        whether the record is in the log.
        """
        return self.parts.appender.append(value, key=key, headers=headers, timestamp=timestamp,
                                          durability=durability,
                                          expect_offset=expect_offset)  # fmt: skip

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
        return self.parts.appender.extend(
            records, durability=durability, expect_offset=expect_offset
        )

    def writer(
        self,
        *,
        batch_bytes: int = BATCH_BYTES,
        compression: str | None = None,
        compression_level: int | None = None,
        linger: float | None = 1.0,
        durability: str | None = None,
    ) -> Writer:
        """Return a buffered writer: millions of records a second, in batches of `batch_bytes`.

        `compression`: none, gzip, snappy, lz4 or zstd.  `linger`: seconds after which a partly
        filled buffer is written anyway; None leaves that to `flush` and `close`.  With
        durability="fsync", `flush` and `close` (and the linger time) end with an fsync.
        """
        return self.parts.appender.writer(
            batch_bytes=batch_bytes,
            compression=compression,
            compression_level=compression_level,
            linger=linger,
            durability=durability,
        )

    def append_batch(
        self,
        raw: bytes,
        *,
        origin: str = "leader",
        durability: str | None = None,
        verify_transaction: bool = True,
    ) -> AppendedBatches:
        """Append raw Kafka record batches; return their offsets, and if they are duplicates.

        With origin="leader" they are a client's.  Everything in them is checked, and they get
        offsets and leader epoch here.  A batch of an idempotent producer is appended once: if it is
        sent again, its offsets and ``duplicate=True`` are returned.  "coordinator" is the same
        without the rules for sequences.  With origin="follower" they are copied from another log:
        offsets and epochs stay, must not decrease, and may have gaps.

        In a store, a client's transactional batch needs a transaction that its producer has open
        and that this partition was added to (KIP-890): a batch of no transaction would hold back
        the last stable offset until `end_transaction` is called.  With verify_transaction=False the
        caller coordinates the transaction and calls `end_transaction`, as for a Partition that was
        opened without a store.

        Raises InvalidRecordError, RecordTooLargeError, UnsupportedFormatError for a batch that can
        never be appended; FencedError and OutOfOrderSequenceError for a producer that has to stop
        or to send another batch first; TransactionStateError and TransactionAbortedError for a
        batch of no open transaction; ConflictError for a copy that starts below the log's end.
        """
        return self.parts.appender.append_batch(
            raw, origin=origin, durability=durability, verify_transaction=verify_transaction
        )

    def end_transaction(
        self,
        producer_id: int,
        producer_epoch: int,
        *,
        commit: bool,
        coordinator_epoch: int = 0,
        durability: str | None = None,
    ) -> int:
        """Append the marker that commits or aborts a producer's transaction; return its offset.

        For a transaction coordinator.  Raises FencedError if the producer's or the coordinator's
        epoch is older than the newest in the log.
        """
        return self.parts.appender.end_transaction(
            producer_id,
            producer_epoch,
            commit=commit,
            coordinator_epoch=coordinator_epoch,
            durability=durability,
        )

    def roll(self) -> None:
        """Seal the active segment and start a new one.  Nothing happens if it is empty."""
        self._active.roll()

    def sync(self) -> None:
        """Make all records so far durable, also those appended with durability="os"."""
        self._active.sync()

    def expire_producers(self, now: int | None = None) -> list[int]:
        """Forget idempotent producers silent for ``producer.id.expiration.ms``; return their ids.

        Those with an open transaction stay.  `now` is in milliseconds; by default it is the
        clock's time without a leap of the clock.
        """
        return self._active.expire_producers(now)

    # ---- removing ----

    def trim(self, start_offset: int) -> None:
        """Delete all records below `start_offset`; whole segments below it are removed."""
        self.parts.cutter.trim(start_offset)

    def enforce(
        self,
        policy: RetentionPolicy | None = None,
        *,
        now: int | datetime.datetime | None = None,
        dry_run: bool = False,
    ) -> list[RetentionDecision]:
        """Delete the oldest segments that a policy selects; return a decision for every segment.

        Without a policy, the partition's own settings decide: ``cleanup.policy``, ``retention.ms``
        and ``retention.bytes``.  `dry_run` deletes nothing.  Ages are measured at `now`; by default
        at the clock's time without a leap of the clock.  A `now` that is given is used unchanged.
        A scan that reads a deleted segment reads it to its end.
        """
        return self.parts.cutter.enforce(policy, now=now, dry_run=dry_run)

    def truncate(self, end_offset: int) -> None:
        """Cut the log so that `end_offset` is the next offset.  All records below it stay.

        Safe against a crash at any point: the cut is planned in a file first.  A scan that has
        read beyond keeps its records, and raises LogTruncatedError when it reads more.
        """
        self.parts.cutter.truncate(end_offset)

    @property
    def first_dirty_offset(self) -> int:
        """The end of what compaction has cleaned; the start of the log if it has cleaned none."""
        return self.parts.rewriter.first_dirty_offset

    # ---- leader epochs ----

    @property
    def leader_epoch(self) -> int:
        """The epoch that appends carry."""
        return self._active.leader_epoch

    @property
    def leader_epochs(self) -> LeaderEpochs:
        """Which epoch started at which offset; a copy."""
        return self._active.leader_epochs

    def become_leader(self, epoch: int) -> None:
        """Begin an epoch: records from here on carry it.  It is on disk when this returns.

        Raises FencedError if a higher one has begun; the same epoch again is no error.
        """
        self._active.become_leader(epoch)

    def end_offset_for_epoch(self, epoch: int) -> EpochEnd | None:
        """Return where an epoch ended here: a leader's answer to a follower.

        The answer has the greatest epoch up to the one asked for; None if the log does not know it.
        """
        return self._active.end_offset_for_epoch(epoch)

    def truncate_to_epoch(self, answer: EpochEnd) -> bool:
        """Cut a follower's log by the leader's answer about its last epoch.

        The epoch to ask for is ``leader_epochs.latest``.  False: histories still differ; ask again.
        """
        return self.parts.cutter.truncate_to_epoch(answer)

    # ---- checking ----

    def check(
        self,
        *,
        deep: bool = True,
        on_corrupt: str = "raise",
        progress: CheckProgress | None = None,
    ) -> list[Problem]:
        """Check every file; return the problems, segments first.  Nothing is written.

        ``deep=True`` reads every batch, record and index entry, and checks that every aborted
        transaction is indexed; otherwise only cheap checks are made.  ``on_corrupt="raise"`` raises
        CorruptLogError for the first problem of severity "error", with all of them as its
        ``.problems``; "report" returns these like the others.  `progress` is called with (done, in
        all); an exception that it raises ends the check.
        """
        from logstore.checking.partition_check import (
            check_choice,
            find_problems,
            raise_first_error,
        )

        problems = find_problems(self._view, deep=deep, progress=progress)
        if check_choice(on_corrupt) == "raise":
            raise_first_error(problems)
        return problems


# help(log.append) shows the bound method of the part: give it the text of the public method.
Appender.append.__doc__ = Partition.append.__doc__
Reader.scan.__doc__ = Partition.scan.__doc__


def open_in_store(
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
    """Open a partition of a Store, which holds `lock` on the root; None opens it readonly.

    A partition that was closed cleanly sleeps until its first change: it holds one descriptor, and
    its files stay unchanged.
    """
    partition = Partition(root.below(name), readonly=lock is None, durability=durability,
                          config=config, clock=clock, claims=claims)  # fmt: skip
    try:
        partition.parts.active.owner = None if lock is None else lock.share()
        partition.parts.load(progress)
    except BaseException:
        partition.parts.drop()
        raise
    return partition
