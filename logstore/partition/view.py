"""View: what the readers of an open log go by.

Its segments, as one immutable snapshot; where it starts; the producers of its transactions.
Readers take no lock: they take the snapshot as it is, and go no further into a file than what was
published after it was written.

`lock` is the one lock of a log: it serialises appends, rolls and cuts, and whoever changes what is
here holds it.  A reader takes it only to note which sealed segments are in use, and to load what
nobody has asked for before.  `_appended` is for waiting alone; nothing else is taken under it that
could wait for an append.

A view knows no way to change a log: see WritableLog.  One beside a writer is a BesideWriter.
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
from logstore.errors import ClosedError, CorruptLogError, ForkedHandleError
from logstore.files.directory import Directory
from logstore.files.names import directory_name, parse_partition_name, segment_name
from logstore.log.producer_files import Producers
from logstore.log.segment import Segment
from logstore.recovery.loader import LoadedLog
from logstore.recovery.report import RecoveryReport
from logstore.waking import Notice

__all__ = ["Cut", "View"]

WARM_SEGMENTS = 32  # sealed segments that keep descriptor and indexes in memory
RECENT_CUTS = 16  # truncations that a reader in another process may miss and still locate


class Cut:
    """One truncation of a log, linked to the truncations after it.

    `View.cut` is the newest.  A reader keeps the Cut that was the newest when it chose its
    position.  The log was truncated since if `View.cut` is another object, and `lowest_since` is
    the lowest offset that the log ended at since.  Cuts that no reader keeps are freed.
    """

    __slots__ = ("_next", "number", "offset", "recent")

    def __init__(self, offset: int, number: int, recent: tuple[int, ...]) -> None:
        self.offset = offset  # the end of the log after this truncation
        self.number = number  # truncations of the log so far
        self.recent = recent[-RECENT_CUTS:]  # the offsets of the newest ones, oldest first
        self._next: Cut | None = None  # assigned once, by `View.add_cut`

    def lowest_since(self) -> int | None:
        """Return the lowest offset of the truncations after this one; None if there is none."""
        lowest, later = None, self._next
        while later is not None:
            lowest = later.offset if lowest is None else min(lowest, later.offset)
            later = later._next
        return lowest


class View:
    """The log as its own process sees it: whoever changes it, changes this with it."""

    readonly = False

    def __init__(self, directory: Directory, config: PartitionConfig, clock: Clock) -> None:
        self.directory = directory
        self.topic, self.number = parse_partition_name(directory_name(directory.path))
        self.config = config
        self.clock = clock
        self.lock = threading.RLock()
        self.closed = False
        self.forked = False
        self.report = RecoveryReport()
        self.start_offset = 0
        self.dense_from = 0  # from here on no offset is missing, but by damage
        self.version = 0  # moves with every change that is more than an append
        self.cut = Cut(0, 0, ())  # replaced by every truncation, once the records are gone
        self.aborts_known = True  # no list of aborted transactions is missing
        self.limit = INT64_MAX  # after a failed fsync: what lies above was perhaps never written
        self.recovery_point = 0  # all below was checked, and is on stable storage
        # Replaced as one: base offsets, and the segments that have them.
        self._snapshot: tuple[list[int], tuple[Segment, ...]] = ([], ())
        self._warm: collections.OrderedDict[int, Segment] = collections.OrderedDict()
        self.producers = self._new_producers(readonly=True)
        self._producers_loaded = False
        self.followers = 0  # threads that wait for more
        self._following = threading.Lock()  # of followers and listeners, for moments only
        self._appended = Notice()
        self._listeners: tuple[Callable[[], object], ...] = ()

    @property
    def name(self) -> str:
        """``topic-N``."""
        return f"{self.topic}-{self.number}"

    def check_usable(self) -> None:
        """Raise unless it is open, in the process that opened it."""
        if self.forked:
            raise ForkedHandleError(
                f"{self.name} was opened before a fork: open it again in this process "
                f"(one process may write, any number may use readonly=True)"
            )
        if self.closed:
            raise ClosedError(f"{self.name} is closed")

    def abandon_in_child(self) -> None:
        """After fork: locks may be held by threads that do not exist here."""
        self.forked = True
        self.lock = threading.RLock()
        self._following = threading.Lock()  # of followers and listeners, for moments only
        self._appended = Notice()

    # ---- keeping up ----

    def look(self) -> None:
        """Take in what happened to the log since.  Here, whoever did it has told us."""

    @property
    def generation(self) -> int:
        """Moves when the log changed by more than an append."""
        return self.version

    def moved_since(self, generation: int) -> bool:
        """Whether the log was cut, trimmed or rewritten since."""
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
        """What loading found, but for the segments."""
        self.report = loaded.report
        self.start_offset = loaded.start_offset
        self.dense_from = loaded.dense_from
        self.version = loaded.version
        self.recovery_point = loaded.recovery_point
        self.aborts_known = loaded.aborts_known
        self._adopt_cuts(loaded)

    def _adopt_cuts(self, loaded: LoadedLog) -> None:
        recent = loaded.cut_offsets
        self.cut = Cut(recent[-1] if recent else 0, loaded.cuts, recent)

    # ---- segments ----

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The snapshot; the last is the one appended to."""
        return self._snapshot[1]

    def publish(self, segments: Iterable[Segment]) -> None:
        """Replace the snapshot that readers use."""
        ordered = tuple(segments)
        self._snapshot = ([segment.base_offset for segment in ordered], ordered)

    def number_of(self, offset: int) -> int:
        """Which segment `segment_for` would return; for someone who holds the lock."""
        return max(0, bisect.bisect_right(self._snapshot[0], offset) - 1)

    def segment_for(self, offset: int) -> Segment:
        """The segment with the greatest base offset at or below `offset`."""
        self.check_usable()
        return self.find_segment(offset)

    def find_segment(self, offset: int) -> Segment:
        """The same, of a view that was found usable just now."""
        bases, segments = self._snapshot
        segment = segments[max(0, bisect.bisect_right(bases, offset) - 1)]
        if segment.next_base is not None:
            self.keep_warm(segment)
        return segment

    def make_segment(self, base_offset: int, dense: bool) -> Segment:
        """A segment of this log; not one of the snapshot yet."""
        return Segment(self.directory, base_offset, topic=self.topic, number=self.number,
                       config=self.config, dense=dense)  # fmt: skip

    def keep_warm(self, segment: Segment) -> None:
        """Bound the descriptors and indexes that sealed segments hold."""
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
        """Whether its files have been opened through `keep_warm`, and not been let go since."""
        return segment.base_offset in self._warm

    def let_cool(self, segments: Iterable[Segment]) -> None:
        """These are no segments of the log any more, or have other files."""
        for segment in segments:
            self._warm.pop(segment.base_offset, None)

    def close_files(self) -> None:
        """Close what the segments hold open; whoever reads from them then raises ClosedError."""
        for segment in self.segments:
            if segment._file is not None:
                segment._file.close()
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
        """Producer state at the end of the log; needs the segments' files, not the writer."""
        producers = self._new_producers(readonly=readonly)
        names = list(names)
        trusted = self.recovery_point
        last = self.segments[-1].base_offset
        if not self.aborts_known:
            trusted = self.segments[0].base_offset
        elif not clean and segment_name(last, ".txnindex") not in names:
            # Whether it never had one or lost it, nothing tells: its batches do.
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
        self.producers = producers  # only now: readers use it
        self._producers_loaded = True

    def known_producers(self) -> Producers:
        """The producer state.  Most readers never ask for it: the first to do so loads it."""
        self.check_usable()
        while not self._producers_loaded:
            with self.lock:
                if not self._producers_loaded:
                    generation = self.generation
                    try:
                        # One that is written has loaded it on opening: this one writes nothing.
                        end = self.segments[-1].end_offset
                        self.load_producers(end, self.directory.names(), readonly=True, clean=False)
                    except (CorruptLogError, FileNotFoundError):
                        # Beside a writer that cuts: then there is a new end, and a new try.
                        if not self.moved_since(generation):
                            raise
        return self.producers

    # ---- following ----

    def wait_until(self, reached: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until appends have `reached` something; False: the time is up."""
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
        """Let those who wait look again."""
        with self._following:
            self._appended.wake()
            listeners = self._listeners
        for heard in listeners:
            heard()

    def listen(self, heard: Callable[[], object]) -> None:
        """Have `heard` called after every append, and when the log is closed.

        It is called by whoever appends, perhaps under the log's lock: it must only pass on that
        something happened.
        """
        with self._following:
            self._listeners += (heard,)
            self.followers += 1

    def unlisten(self, heard: Callable[[], object]) -> None:
        """Call it no more; one that does not listen is no error."""
        with self._following:
            left = tuple(each for each in self._listeners if each != heard)
            gone = len(self._listeners) - len(left)
            self.followers -= gone
            self._listeners = left
