"""LogView: the state of an open log that readers use.

It holds the segments as one immutable snapshot, the start offset, and the state of the producers.
Readers take no lock.  They take the snapshot as it is at that moment, and read a file only up to
the end that was published after the bytes were written.

`lock` is the lock of the log.  It serialises appends, rolls and cuts, and every change of a field
here happens under it, through a method.  A reader takes it only to note which sealed segments are
in use, and to load the producer state on first use.  `_following` is held for moments, to wake and
to count threads that wait for an append, and to set `limit`.

A log that is replicated has a high watermark: readers see the records below it, which are in the
logs of all replicas that are in sync.  A log without one has a `limit` above every offset, so that
readers make the same comparison and no other.

A view cannot change the log: see ActiveLog.  The view of a log that another process writes is a
ReadOnlyView.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from logstore.clock import Clock, GuardedClock
from logstore.config import INT64_MAX, PartitionConfig
from logstore.errors import (
    ClosedError,
    CorruptLogError,
    ForkedHandleError,
    OffsetOutOfRangeError,
)
from logstore.files.directory import Directory
from logstore.files.names import directory_name, parse_partition_name, segment_name
from logstore.format.validation import plain_rules
from logstore.log.producer_files import Producers
from logstore.log.segment import Segment
from logstore.recovery.loader import LoadedLog
from logstore.recovery.report import RecoveryReport
from logstore.waking import Notice

__all__ = ["Cut", "LogView"]

WARM_SEGMENTS = 32  # sealed segments that keep descriptor and indexes in memory
RECENT_CUTS = 16  # truncations that a reader in another process may miss and still locate


class Cut:
    """One truncation of a log, linked to the truncations after it.

    `LogView.cut` is the newest.  A reader keeps the Cut that was the newest when it chose its
    position.  The log was truncated since if `LogView.cut` is another object, and `lowest_since` is
    the lowest offset that the log ended at since.  Cuts that no reader keeps are freed.
    """

    __slots__ = ("_next", "number", "offset", "recent")

    def __init__(self, offset: int, number: int, recent: tuple[int, ...]) -> None:
        self.offset = offset  # the end of the log after this truncation
        self.number = number  # truncations of the log so far
        self.recent = recent[-RECENT_CUTS:]  # the offsets of the newest ones, oldest first
        self._next: Cut | None = None  # assigned once, by `LogView.add_cut`

    def lowest_since(self) -> int | None:
        """Return the lowest offset of the truncations after this one; None if there is none."""
        lowest, later = None, self._next
        while later is not None:
            lowest = later.offset if lowest is None else min(lowest, later.offset)
            later = later._next
        return lowest


class _Held:
    """A lock that is held already, for `with`.  A generator would take three times as long."""

    __slots__ = ("_lock",)

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        self._lock.release()


class LogView:
    """The view of a log that this process writes.  ActiveLog changes it with each change."""

    readonly = False

    def __init__(self, directory: Directory, config: PartitionConfig, clock: Clock) -> None:
        self.directory = directory
        self.topic, self.number = parse_partition_name(directory_name(directory.path))
        self.config = config
        self.plain_rules = plain_rules(config)  # of a batch that is written as it is
        self.clock = clock
        self.lock = threading.RLock()
        self.closed = False
        self.forked = False
        self.report = RecoveryReport()
        self.start_offset = 0
        self.dense_from = 0  # every offset >= dense_from exists unless the log is corrupt
        self.version = 0  # raised by every change that is more than an append
        self.cut = Cut(0, 0, ())  # replaced by every truncation, once the records are gone
        self.aborts_known = True  # no list of aborted transactions is missing
        # Readers see records below `limit`, which is the lower of the two after it.
        self.limit = INT64_MAX
        self.lost_from = INT64_MAX  # after a failed fsync: records above may not be on the disk
        self.high_watermark: int | None = None  # of a replicated log; None: readers see all
        self.recovery_point = 0  # all batches below it are valid and on stable storage
        # Base offsets, and the segments that have them; replaced together.
        self._snapshot: tuple[list[int], tuple[Segment, ...]] = ([], ())
        self._warm: collections.OrderedDict[int, Segment] = collections.OrderedDict()
        self.producers = self._new_producers(readonly=True)
        self._producers_loaded = False
        self.followers = 0  # threads and listeners that wait for an append
        self._following = threading.Lock()  # guards followers and listeners
        self._appended = Notice()
        self._listeners: tuple[Callable[[], object], ...] = ()

    @property
    def name(self) -> str:
        """``topic-N``."""
        return f"{self.topic}-{self.number}"

    def __repr__(self) -> str:
        if self.closed:
            return f"<Partition {self.name} closed>"
        mode = " readonly" if self.readonly else ""
        end = self.segments[-1].end_offset if self.segments else 0
        return f"<Partition {self.name} [{self.start_offset}, {end}){mode}>"

    def check_usable(self) -> None:
        """Raise unless the log is open, in the process that opened it."""
        if self.forked:
            raise ForkedHandleError(
                f"{self.name} was opened before a fork: open it again in this process "
                f"(one process may write, any number may use readonly=True)"
            )
        if self.closed:
            raise ClosedError(f"{self.name} is closed")

    def abandon_in_child(self) -> None:
        """After fork: replace the locks, which threads that do not exist here may hold."""
        self.forked = True
        self.lock = threading.RLock()
        self._following = threading.Lock()
        self._appended = Notice()

    def lock_now(self) -> _Held:
        """Acquire the lock; raise BlockingIOError if another thread has it.  `with` releases it."""
        lock = self.lock  # this one, even if a fork replaces it
        if not lock.acquire(blocking=False):
            raise BlockingIOError(f"another thread uses {self.name}")
        return _Held(lock)

    # ---- keeping up ----

    def look(self) -> None:
        """Notice changes by another process.  There are none here: this process is the writer."""

    @property
    def end_offset(self) -> int:
        """The offset that the next record gets."""
        self.look()
        self.check_usable()
        return min(self.segments[-1].end_offset, self.lost_from)

    @property
    def readable_end(self) -> int:
        """The end of the records that readers see: the high watermark of a replicated log."""
        return min(self.end_offset, self.limit)

    @property
    def generation(self) -> int:
        """A number that changes when the log changed by more than an append."""
        return self.version

    def moved_since(self, generation: int) -> bool:
        """Whether the log was cut, trimmed or rewritten since `generation` was read."""
        self.check_usable()
        with self.lock:
            return self.generation != generation

    def add_cut(self, cut: Cut) -> None:
        """Publish a truncation.  Requires the lock.  Call it before anything is appended after it.

        The records above the cut are not readable any more: a reader that keeps the new Cut never
        reads one of them.
        """
        self.cut._next = cut
        self.cut = cut

    def adopt(self, loaded: LoadedLog) -> None:
        """Take what loading found, except the segments: see `publish`."""
        self.report = loaded.report
        self.start_offset = loaded.start_offset
        self.dense_from = loaded.dense_from
        self.version = loaded.version
        self.recovery_point = loaded.recovery_point
        self.aborts_known = loaded.aborts_known
        self._adopt_cuts(loaded)

    # ---- changes.  Each requires the lock, except `limit_to`: see Durability.fail ----

    def close(self) -> None:
        """Refuse every use from now on.  Files stay open: see `close_files`."""
        self.closed = True

    def next_version(self) -> None:
        """Announce a change that is more than an append to readers of this process."""
        self.version += 1

    def bounds(self) -> tuple[int, int, int]:
        """Return start offset, version and recovery point, for `restore`."""
        return self.start_offset, self.version, self.recovery_point

    def restore(self, bounds: tuple[int, int, int]) -> None:
        """Undo a change of them that could not be made durable."""
        self.start_offset, self.version, self.recovery_point = bounds

    def advance_start(self, start_offset: int) -> None:
        """Raise the start offset.  It never falls."""
        self.start_offset = max(self.start_offset, start_offset)

    def restart_at(self, start_offset: int) -> None:
        """Set the start offset of a log that is empty now.  It may fall."""
        self.start_offset = start_offset

    def move_recovery_point(self, offset: int) -> None:
        """Set the recovery point: raise it after a sync, lower it before a cut."""
        self.recovery_point = offset

    def allow_gaps_below(self, offset: int) -> None:
        """Raise `dense_from`: offsets below `offset` may be missing without damage."""
        self.dense_from = max(self.dense_from, offset)

    def limit_to(self, offset: int) -> None:
        """Hide the records at and above `offset`: an fsync failed."""
        with self._following:  # two threads may set the two bounds
            self.lost_from = offset
            self._set_limit()

    def set_high_watermark(self, offset: int | None) -> None:
        """Let readers see the records below `offset` only; takes the lock.

        From now on it bounds every reader, retention, compaction and `trim`; `end_offset` stays the
        end of the log, and replicas read up to it with ``isolation="log_end"``.  Only a truncation
        lowers it by itself.  None: the log is not replicated any more, and readers see all of it.
        Wakes followers and listeners as an append does.  A scan that follows a log which had no
        high watermark is bounded from its next wait on.  Raises OffsetOutOfRangeError unless
        `offset` is in [start, end of the log].
        """
        with self.lock:
            self.check_usable()
            if offset is not None:
                end = self.segments[-1].end_offset
                if not self.start_offset <= offset <= end:
                    raise OffsetOutOfRangeError(
                        offset, start=self.start_offset, end=end + 1, where=self.name
                    )
            self.move_high_watermark(offset)
        if self.followers:
            self.wake_followers()

    def move_high_watermark(self, offset: int | None) -> None:
        """Set it, without a check: the caller has the lock, and is perhaps cutting the log."""
        with self._following:
            self.high_watermark = offset
            self._set_limit()

    def lower_high_watermark(self, offset: int) -> None:
        """Lower it to `offset` if it is above: the log is about to end there."""
        if self.high_watermark is not None and self.high_watermark > offset:
            self.move_high_watermark(offset)

    def _set_limit(self) -> None:
        seen = INT64_MAX if self.high_watermark is None else self.high_watermark
        self.limit = min(self.lost_from, seen)

    def reconfigure(self, config: PartitionConfig) -> bool:
        """Replace the settings; True if the active segment cannot have them: it is to be rolled."""
        before, self.config = self.config, config
        self.plain_rules = plain_rules(config)
        for segment in self.segments:
            segment.config = config
        return _layout(before) != _layout(config)

    def _adopt_cuts(self, loaded: LoadedLog) -> None:
        recent = loaded.cut_offsets
        self.cut = Cut(recent[-1] if recent else 0, loaded.cuts, recent)

    # ---- segments ----

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The snapshot; the last segment is the active one."""
        return self._snapshot[1]

    def publish(self, segments: Iterable[Segment]) -> None:
        """Replace the snapshot that readers use."""
        ordered = tuple(segments)
        self._snapshot = ([segment.base_offset for segment in ordered], ordered)

    def number_of(self, offset: int) -> int:
        """Return the index of the segment that `segment_for` returns.  Requires the lock."""
        return max(0, bisect.bisect_right(self._snapshot[0], offset) - 1)

    def segment_for(self, offset: int) -> Segment:
        """Return the segment with the greatest base offset at or below `offset`."""
        self.check_usable()
        return self.find_segment(offset)

    def find_segment(self, offset: int) -> Segment:
        """The same, without `check_usable`: the caller has called it."""
        bases, segments = self._snapshot
        segment = segments[max(0, bisect.bisect_right(bases, offset) - 1)]
        if segment.next_base is not None:
            self.keep_warm(segment)
        return segment

    def make_segment(self, base_offset: int, dense: bool) -> Segment:
        """Return a segment of this log that is not in the snapshot yet."""
        return Segment(self.directory, base_offset, topic=self.topic, number=self.number,
                       config=self.config, dense=dense)  # fmt: skip

    def keep_warm(self, segment: Segment) -> None:
        """Keep the files of a sealed segment open; close those of the least recently used one."""
        warm = self._warm
        base = segment.base_offset
        if base in warm:
            with contextlib.suppress(KeyError):
                warm.move_to_end(base)
            return
        with self.lock:
            warm[base] = segment
            while len(warm) > WARM_SEGMENTS:
                _, coldest = warm.popitem(last=False)
                if coldest is not segment:
                    coldest.release()

    def is_warm(self, segment: Segment) -> bool:
        """Whether `keep_warm` holds its files open."""
        return segment.base_offset in self._warm

    def let_cool(self, segments: Iterable[Segment]) -> None:
        """Forget segments that are deleted or have other files now."""
        for segment in segments:
            self._warm.pop(segment.base_offset, None)

    def close_files(self) -> None:
        """Close the files of all segments.  A scan that reads from them raises ClosedError."""
        for segment in self.segments:
            if (file := segment.open_file) is not None:
                file.close()
            segment.writer = None

    # ---- producers ----

    def _new_producers(self, *, readonly: bool) -> Producers:
        return Producers(
            self.directory,
            readonly=readonly,
            expiration_ms=self.config.producer_id_expiration_ms,
            clock=GuardedClock.of(self.clock),
        )

    def load_producers(
        self,
        end: int,
        names: Iterable[str],
        *,
        readonly: bool,
        clean: bool,
        quiet_from: int = INT64_MAX,
    ) -> None:
        """Load the producer state at the end of the log.  Reads the segments' files."""
        producers = self._new_producers(readonly=readonly)
        names = list(names)
        trusted = self.recovery_point
        last = self.segments[-1].base_offset
        if not self.aborts_known:
            trusted = self.segments[0].base_offset
        elif not clean and segment_name(last, ".txnindex") not in names:
            # The index may never have existed, or a crash lost it: read the batches instead.
            trusted = min(trusted, last)
        producers.load(
            self.segments,
            end=end,
            trusted=trusted,
            names=names,
            clean=clean,
            quiet_from=quiet_from,
        )
        self.report.snapshots_discarded += producers.discarded
        self.producers = producers  # only when loaded: readers use it without a lock
        self._producers_loaded = True

    def known_producers(self) -> Producers:
        """Return the producer state.  The first reader that needs it loads it."""
        self.check_usable()
        while not self._producers_loaded:
            with self.lock:
                if not self._producers_loaded:
                    generation = self.generation
                    try:
                        # A log that is written has loaded it when it was opened: write nothing.
                        end = self.segments[-1].end_offset
                        self.load_producers(end, self.directory.names(), readonly=True, clean=False)
                    except (CorruptLogError, FileNotFoundError):
                        # The writer of another process cut the log: try again with its new end.
                        if not self.moved_since(generation):
                            raise
        return self.producers

    # ---- following ----

    def wait_until(self, reached: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until `reached()` is true; False if `deadline` passed.  Appends wake this thread."""
        counted = False
        try:
            with self._following:
                self.followers += 1
                counted = True
            while True:
                with self._following:
                    gate = self._appended.gate()
                if reached():
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                gate.wait(left)
        finally:
            if counted:
                with self._following:
                    self.followers -= 1

    def wake_followers(self) -> None:
        """Make the threads that wait check again, and call the listeners."""
        with self._following:
            self._appended.wake()
            listeners = self._listeners
        for heard in listeners:
            heard()

    def listen(self, heard: Callable[[], object]) -> None:
        """Call `heard` after every append, when start offset or leader epoch move, and at close.

        `heard` runs in the thread that appends, perhaps under the log's lock: it must return at
        once, for example after it set a flag.  Appends of another process do not call it.
        """
        with self._following:
            self._listeners += (heard,)
            self.followers += 1

    def unlisten(self, heard: Callable[[], object]) -> None:
        """Stop calling `heard`.  One that does not listen is no error."""
        with self._following:
            left = tuple(each for each in self._listeners if each != heard)
            gone = len(self._listeners) - len(left)
            self.followers -= gone
            self._listeners = left


def _layout(config: PartitionConfig) -> tuple[int, ...]:
    """Return the settings that an active segment cannot change."""
    return (
        config.segment_bytes,
        config.segment_ms,
        config.segment_jitter_ms,
        config.segment_index_bytes,
        config.index_interval_bytes,
    )
