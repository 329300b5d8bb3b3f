"""ReadOnlyView: the view of a log that another process may write.

The reader shares no lock with the writer.  It watches three things in the directory: the version in
the state file, which the writer raises before and after every change that is more than an append;
the plan file of a cut or a replacement; and the sizes of files.  If one of them changed during a
load, the view loads the log again.  It reports damage only if none of the three changed between the
start and the end of the read.

State of its own, guarded by `lock`: the number of loads, and the plan that the last load saw.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import time
from collections.abc import Callable

from logstore.clock import Clock
from logstore.config import INT64_MAX, PartitionConfig
from logstore.errors import CorruptLogError
from logstore.files.directory import Directory
from logstore.files.names import segment_name
from logstore.log.segment import Segment
from logstore.log.state import DurableMark, PartitionState
from logstore.partition.view import Cut, LogView
from logstore.recovery.failed_sync import FailedSync
from logstore.recovery.loader import Claims, LoadedLog, load
from logstore.recovery.report import RecoveryProgress
from logstore.recovery.swap_plan import SWAP_PLAN, SwapPlan
from logstore.recovery.torn_tail import DAMAGE_MESSAGE
from logstore.recovery.truncation_plan import TRUNCATION_PLAN

__all__ = ["ReadOnlyView"]

log = logging.getLogger("logstore.partition")

SETTLE_SECONDS = 0.5  # how long a reader waits for a truncation in another process
POLL_SECONDS = 0.02  # how often a reader looks for what another process appended
# The plan file that is there; SWAP_AHEAD: planned, but the old files still have their names.
NO_PLAN, CUTTING, SWAP_AHEAD, SWAPPING = range(4)


class ReadOnlyView(LogView):
    """Follows the appends, rolls, trims, cuts and replacements of another process."""

    readonly = True

    def __init__(
        self, directory: Directory, config: PartitionConfig, clock: Clock, claims: Claims | None
    ) -> None:
        super().__init__(directory, config, clock)
        self._claims = claims
        self._loads = 0
        self._plan_seen = NO_PLAN
        self._durable_when_loaded = 0

    # ---- loading ----

    def load(self, progress: RecoveryProgress | None) -> None:
        """Load the log.  Called again after every change that is more than an append."""
        loaded = self._load_settled(progress)
        self.adopt(loaded)
        active = loaded.segments[-1]
        with contextlib.suppress(FileNotFoundError):  # a directory without any segment yet
            active.file.end = loaded.contents.position
        active.seen_end_offset = loaded.contents.next_offset
        active.durable_end = loaded.lost_end
        self._durable_when_loaded = loaded.durable_offset
        failed = FailedSync.read(self.directory)
        self.limit_to(INT64_MAX if failed is None else failed.durable_offset)
        self._producers_loaded = False
        self.publish(loaded.segments)

    def _adopt_cuts(self, loaded: LoadedLog) -> None:
        """Publish the truncations since the last load as one, at the lowest of their offsets."""
        if not self.segments:  # the first load
            super()._adopt_cuts(loaded)
            return
        missed = loaded.cuts - self.cut.number
        end = loaded.contents.next_offset
        if missed > len(loaded.cut_offsets):
            lowest = 0  # too many: some of their offsets are not recorded any more
        elif missed > 0:
            lowest = min(loaded.cut_offsets[-missed:])
        elif end < self.segments[-1].seen_end_offset:
            lowest = end  # not by truncate: a broker has cut the log, or recovery after a failure
        else:
            return
        self.add_cut(Cut(lowest, loaded.cuts, loaded.cut_offsets))

    def _reload(self) -> None:
        for segment in self.segments:
            segment.release()
        self._warm.clear()
        self.load(None)

    def _load_settled(self, progress: RecoveryProgress | None) -> LoadedLog:
        """Load the log; load it again if the writer changed it during the load.

        Waits for the end of a truncation.  If the writer died during it, the log ends before the
        records that it was about to cut, until the next writer opens the log.
        """
        self._loads += 1
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            in_time = time.monotonic() < deadline
            plan = self._plan_now()
            try:
                loaded = load(
                    self.directory,
                    self.make_segment,
                    readonly=True,
                    progress=progress,
                    claims=self._claims,
                )
            except (CorruptLogError, FileNotFoundError):
                if not in_time:
                    raise
            else:
                state = PartitionState.read(self.directory)
                self._plan_seen = self._plan_now()
                same = state is None or state.version == loaded.version
                if not in_time or (same and plan == self._plan_seen != CUTTING):
                    for damage in loaded.report.damage:
                        log.warning(DAMAGE_MESSAGE, damage.path, damage.position, damage.reason)
                    return loaded
            time.sleep(SETTLE_SECONDS / 100)

    def _plan_now(self) -> int:
        """Return which change of files a writer has planned and not finished."""
        if self.directory.exists(TRUNCATION_PLAN):
            return CUTTING
        if self.directory.exists(SWAP_PLAN):
            plan = SwapPlan.read(self.directory)
            return SWAPPING if plan is not None and plan.counts(self.directory) else SWAP_AHEAD
        return NO_PLAN

    def _version_moved(self) -> bool:
        state = PartitionState.read(self.directory)
        return state is not None and state.version != self.version

    def _is_outdated(self) -> bool:
        # Check the plan first: the writer raises the version before it removes the plan.
        return self._plan_now() != self._plan_seen or self._version_moved()

    # ---- keeping up ----

    def look(self) -> None:
        """Notice what another process has appended, rolled, trimmed or cut since the last call."""
        self.check_usable()
        with self.lock:
            if self._version_moved():
                self._reload()
                return
            while True:
                active = self.segments[-1]
                try:
                    file = active.file
                except FileNotFoundError:
                    return  # nothing was ever written
                size = file.size()
                rolled = self.directory.exists(segment_name(active.seen_end_offset, ".log"))
                if size < file.end:
                    self._reload()
                    return
                if size > file.end:
                    found = active.walk(file.end, limit=size, next_offset=active.seen_end_offset)
                    if found.position > file.end:
                        file.end = found.position
                        if found.producers and self._producers_loaded:
                            # Before the end moves: a reader of the new batches needs this state.
                            self.producers.see(active, active.seen_end_offset, found.next_offset)
                        active.seen_end_offset = found.next_offset
                        continue
                if not rolled or active.seen_end_offset == active.base_offset:
                    return
                self._see_roll(active)

    def _see_roll(self, active: Segment) -> None:
        base = active.seen_end_offset
        new = self.make_segment(base, base >= self.dense_from)
        new.file.end = 0
        active.next_base = base
        self.publish((*self.segments, new))

    @property
    def durable_offset(self) -> int:
        """The durable offset in the writer's files."""
        if self.closed:
            return self._durable_when_loaded
        return max(DurableMark.read(self.directory), self.recovery_point)

    @property
    def generation(self) -> int:
        """A number that changes when the log was loaded again."""
        return self._loads

    def moved_since(self, generation: int) -> bool:
        """Whether the log was cut, trimmed or rewritten; if so, it has been loaded again.

        What the reader took for damage may be a cut: the writer announces a cut before it cuts.
        """
        self.check_usable()
        with self.lock:
            deadline = time.monotonic() + SETTLE_SECONDS
            while self._loads == generation:
                plan = self._plan_now()  # before the version: see _is_outdated
                if plan != self._plan_seen or self._version_moved():
                    self._reload()
                elif plan != CUTTING:
                    break
                elif time.monotonic() > deadline:
                    # The writer died or is slow: what it cut since the last load is no damage.
                    before = self._shape()
                    self._reload()
                    return self._shape() != before
                else:
                    time.sleep(SETTLE_SECONDS / 100)
            return self._loads != generation

    def _shape(self) -> list[tuple[int, int]]:
        return [(segment.base_offset, segment.seen_end_offset) for segment in self.segments]

    # ---- reading ----

    def segment_for(self, offset: int) -> Segment:
        """As in LogView; the files of a sealed segment are open and known to be the right ones."""
        while True:
            self.check_usable()
            bases, segments = self._snapshot  # once: another thread may replace it
            segment = segments[max(0, bisect.bisect_right(bases, offset) - 1)]
            if not segment.sealed:
                return segment
            if self.is_warm(segment) or self._hold(segment):
                self.keep_warm(segment)
                return segment

    def _hold(self, segment: Segment) -> bool:
        """Open a sealed segment's files; True if they are those of the log that was loaded.

        False if the writer has replaced them: then the log is loaded again.
        """
        try:
            segment.file  # noqa: B018  opened, and kept
            segment.offset_index  # noqa: B018
        except FileNotFoundError:
            if not self._is_outdated():
                raise
        if not self._is_outdated():
            return True
        with self.lock:
            self._reload()
        return False

    def wait_until(self, reached: Callable[[], bool], deadline: float | None) -> bool:
        """Poll `reached`: appends of another process do not wake this one."""
        while not reached():
            left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, POLL_SECONDS))
        return True
