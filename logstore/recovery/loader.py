"""Recovery: makes segments that can be read and appended to from a directory in any state.

`torn_tail` recovers one segment: it decides between a torn tail and damage.  The loader decides
which segments are recovered, and finishes the changes that an earlier process left half done.

Invariant: an I/O error while reading is no evidence of a torn tail or of damage.  It is raised, and
no file is changed.  Recovery may be killed at any point and run again.  A cleanly closed log is
opened from file names, sizes and the indexes of the active segment; no record data is read.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Callable
from typing import NamedTuple

from logstore import _native
from logstore.errors import NotALogError
from logstore.files.boot import boot_id
from logstore.files.directory import Directory
from logstore.files.disk_reserve import RESERVE_NAME
from logstore.files.names import SEGMENT_SUFFIXES, TEMPORARY_SUFFIXES, base_offset_of, segment_name
from logstore.log.epochs import LeaderEpochs, read_leader_epochs
from logstore.log.segment import Segment
from logstore.log.segment_contents import SegmentContents, contents_from_indexes, empty_contents
from logstore.log.state import (
    CleanerCheckpoint,
    DurableMark,
    PartitionState,
    StartMark,
    lists_of_aborts,
)
from logstore.recovery.failed_sync import FailedSync, forget_cached, write_to_new_file
from logstore.recovery.report import Damage, RecoveryProgress, RecoveryReport
from logstore.recovery.swap_plan import SWAP_PLAN, SwapPlan
from logstore.recovery.torn_tail import BESIDE_LOG, DAMAGE_MESSAGE, SegmentRecovery
from logstore.recovery.truncation_plan import TRUNCATION_PLAN, TruncationPlan
from logstore.recovery.wide_segments import split_wide_segments

__all__ = ["load"]

log = logging.getLogger("logstore.recovery")


INT64_MAX = (1 << 63) - 1


@dataclasses.dataclass(slots=True)
class LoadedLog:
    """The segments by base offset, and the contents of the last one."""

    segments: list[Segment]
    contents: SegmentContents  # of the last segment
    start_offset: int
    recovery_point: int
    durable_offset: int
    dense_from: int
    report: RecoveryReport
    version: int = 0
    names: list[str] = dataclasses.field(default_factory=list)  # of files about producers
    quiet_from: int = INT64_MAX  # segments from this base on have no batch of a producer
    lost_end: int = -1  # readonly: records up to here were durable and are gone
    needs_roll: bool = False  # the last segment ends in damage: append to a new one
    epochs: LeaderEpochs = dataclasses.field(default_factory=LeaderEpochs)
    leader_epoch: int = 0  # the newest epoch that was begun
    aborts_known: bool = True  # no list of aborted transactions is missing
    cuts: int = 0  # truncations so far
    cut_offsets: tuple[int, ...] = ()  # of the newest truncations, oldest first
    unsynced_gone: bool = False  # records that no fsync covered may be gone
    was_lossy: bool = False  # the state file says so
    untouched: bool = False  # the files are as a clean close left them: nothing to write yet


MakeSegment = Callable[[int, bool], Segment]  # base offset, dense


class Claims(NamedTuple):
    """The offsets of a partition in the root's checkpoints.  Used only if it has no state file.

    A broker writes these checkpoints and no state file.  `only`: a broker wrote here after the
    state file was written, so the state file is ignored.
    """

    recovery_point: int = 0
    start_offset: int = 0
    first_dirty_offset: int = -1  # of compaction
    only: bool = False

    def as_state(self, version: int) -> PartitionState:
        return PartitionState(
            clean=False,
            version=version,
            boot="",
            recovery_point=self.recovery_point,
            start_offset=self.start_offset,
            end_offset=0,
            dense_from=1 << 62,
            segments=0,
            active_base=0,
            active_bytes=0,
            active_indexes_crc=0,
            first_timestamp=-1,
        )


def refuse_foreign(directory: Directory) -> None:
    """Raise NotALogError if the directory is not a log's.  Called before any file is created."""
    names = directory.names()
    if any(name.endswith(".log") for name in names):
        return
    known = {".lock", PartitionState.NAME, DurableMark.NAME, "leader-epoch-checkpoint",
             "partition.metadata", TRUNCATION_PLAN, SWAP_PLAN, CleanerCheckpoint.NAME,
             StartMark.NAME, RESERVE_NAME, FailedSync.NAME}  # fmt: skip
    for name in sorted(names):
        recognised = name.endswith((*SEGMENT_SUFFIXES, *TEMPORARY_SUFFIXES))
        if name not in known and not recognised and ".torn-" not in name:
            raise NotALogError(
                f"{directory.path} is not a log: it has no .log file but others, such as "
                f"{name!r}; choose an empty or a new directory"
            )


def load(
    directory: Directory,
    make_segment: MakeSegment,
    *,
    readonly: bool,
    progress: RecoveryProgress | None = None,
    claims: Claims | None = None,
) -> LoadedLog:
    """Open the segments of a partition directory; repair the effects of a crash.

    With `readonly` nothing is written: bytes that a writer would cut off are not shown.
    """
    return _Loader(directory, make_segment, readonly, progress, claims).load()


class _Loader:
    def __init__(
        self,
        directory: Directory,
        make_segment: MakeSegment,
        readonly: bool,
        progress: RecoveryProgress | None,
        claims: Claims | None,
    ) -> None:
        self.claims = claims
        self.state_lost = False  # the state file is missing or cannot be read
        self.own_state = True  # the state is the partition's own, not made from claims
        self.directory = directory
        self.make_segment = make_segment
        self.readonly = readonly
        self.report = RecoveryReport()
        self.tail = SegmentRecovery(directory, self.report, readonly, progress)
        self.mark = -1
        self.epochs = LeaderEpochs()
        self.state: PartitionState | None = None
        # The mark of a failed fsync: cached pages may differ from the disk and are not used.
        self.failed: FailedSync | None = None
        self.staged: set[int] = set()  # readonly: segments that are still named .swap
        self.truncated_to: int | None = None  # a truncation was finished here

    def load(self) -> LoadedLog:
        if self.readonly:
            # Before the listing: a writer appends first and then moves the mark, so the files
            # that are listed later have at least the records up to the mark.
            self.mark = DurableMark.read(self.directory)
        self.failed = FailedSync.read(self.directory)
        state = PartitionState.read(self.directory)
        self.state_lost = state is None
        cuts, cut_offsets = (0, ()) if state is None else (state.cuts, state.cut_offsets)
        self.epochs = LeaderEpochs(read_leader_epochs(self.directory))
        epochs_known = self.epochs.latest is not None
        if self.claims is not None and (state is None or self.claims.only):
            self.own_state = False
            state = self.claims.as_state(state.version if state else 0)
        loaded = self.load_from(state)
        if not epochs_known and not self.readonly:
            self.rebuild_epochs(loaded)
        loaded.epochs = self.epochs
        loaded.leader_epoch = max(self.epochs.latest or 0, state.leader_epoch if state else 0)
        loaded.version = state.version if state else 0
        loaded.was_lossy = state is not None and state.lossy
        finished = () if self.truncated_to is None else (self.truncated_to,)
        loaded.cuts, loaded.cut_offsets = cuts + len(finished), (*cut_offsets, *finished)
        return loaded

    def load_from(self, state: PartitionState | None) -> LoadedLog:
        names = self.directory.names()
        while self.readonly and sorted(names) != sorted(again := self.directory.names()):
            names = again  # a listing that races with a roll may miss a name
        if self.readonly and SWAP_PLAN in names:
            names = self.as_planned(names)
        if not self.readonly:
            if SWAP_PLAN in names:
                self.finish_planned_swap()
                names = self.directory.names()
            if TRUNCATION_PLAN in names:
                state = self.finish_truncation(state)
                names = self.directory.names()
            self.state = state
            names = self.sweep(names)
            state = self.state
            if (state is None or not self.own_state) and split_wide_segments(self.directory, names):
                names = self.directory.names()
        bases = self.segment_bases(names)
        if self.readonly and TRUNCATION_PLAN in names:
            bases, state = self.as_cut(bases, state)
        if self.readonly and state is not None:
            # Segments that end at or below the start are about to be deleted.
            bases = bases[max(0, bisect.bisect_right(bases, state.start_offset) - 1) :]
        if not bases:
            start = state.start_offset if state else 0
            self.report.clean = not names or state is not None
            start = self.without_segments(state, start)
            for name in names:
                if name.endswith(".snapshot") and not self.readonly:
                    self.remove(name)  # of a log that is gone
            segment = self.make_segment(start, True)
            return LoadedLog([segment], empty_contents(start), start, start, start,
                             state.dense_from if state else 0, self.report)  # fmt: skip
        dense_from = state.dense_from if state else 1 << 62
        segments = [self.make_segment(base, base >= dense_from) for base in bases]
        for segment, following in zip(segments, bases[1:], strict=False):
            segment.next_base = following
        for segment in segments:
            segment.stage = ".swap" if segment.base_offset in self.staged else ""
        start = max(bases[0], state.start_offset if state else 0)
        believed = state is not None and state.clean and self.failed is None
        if believed and state is not None and self.matches(state, segments):
            loaded = self.load_clean(state, segments, set(names))
            loaded.untouched = not self.report.removed
        else:
            loaded = self.load_unclean(state, segments)
        if self.state_lost or not self.own_state:
            # A broker's start is at or above ours: it began with ours, and a start only grows.
            noted = StartMark.read(self.directory)
            start = max(start, noted if noted <= loaded.contents.next_offset else 0)
        loaded.start_offset = start
        if state is not None and self.own_state and state.aborts >= 0:
            indexed = {base_offset_of(name) for name in names if name.endswith(".txnindex")}
            spans = [(segment.base_offset, segment.next_base) for segment in segments]
            found = lists_of_aborts(spans, indexed, state.start_offset, state.recovery_point,
                                    state.clean)  # fmt: skip
            loaded.aborts_known = found == state.aborts
            if not loaded.aborts_known:
                log.warning("%s: a list of aborted transactions is missing: made from the log",
                            self.directory.path)  # fmt: skip
        loaded.names = [name for name in names if name.endswith((".snapshot", ".txnindex"))]
        if state is None or not self.own_state:
            loaded.dense_from = loaded.contents.next_offset
        if loaded.contents.next_offset < start:
            same_boot = state is not None and bool(boot_id()) and state.boot == boot_id()
            whole = not self.report.torn and not self.report.set_aside
            if whole and (not self.own_state or (same_boot and self.failed is None)):
                # Nothing was cut off and there was no power cut: the start is of another log.
                log.warning("%s: a start at offset %d is beyond the end %d: ignored",
                            self.directory.path, start, loaded.contents.next_offset)  # fmt: skip
                loaded.start_offset = bases[0]
                return loaded
            return self.restart_at(start, loaded)
        return loaded

    def without_segments(self, state: PartitionState | None, start: int) -> int:
        """Return the next offset of a log that has no files left: the end it was known to have.

        A broker's checkpoints (`own_state` is false) do not have the end.
        """
        if not self.own_state:
            return start
        end = max(DurableMark.read(self.directory), state.end_offset if state else 0)
        if end <= start:
            return start
        path = self.directory.path / segment_name(start, ".log")
        damage = Damage(path, 0, 0, range(start, end), "all segments are missing")
        self.report.clean = False
        self.report.damage.append(damage)
        if not self.readonly:
            log.warning(DAMAGE_MESSAGE, damage.path, damage.position, damage.reason)
        return end

    # ---- the directory ----

    def segment_bases(self, names: list[str]) -> list[int]:
        return sorted(base_offset_of(name) for name in names if name.endswith(".log"))

    def as_cut(
        self, bases: list[int], state: PartitionState | None
    ) -> tuple[list[int], PartitionState | None]:
        """Leave out the segments that an unfinished truncation deletes: some may be gone."""
        try:
            plan = TruncationPlan.read(self.directory)
        except FileNotFoundError:
            return bases, state  # finished just now
        if plan is None:
            return bases, state
        if plan.restart and state is not None:
            state = plan.restarted(state)
        return [base for base in bases if base not in plan.segments], state

    def remove(self, name: str) -> None:
        self.directory.unlink(name)
        self.report.removed.append(self.directory.path / name)

    def sweep(self, names: list[str]) -> list[str]:
        """Finish or undo the changes that an earlier process left half done.

        Remove index files without a .log file.  Return the names that are left.
        """
        if not any(name.endswith(TEMPORARY_SUFFIXES) for name in names):
            self.sweep_orphans(names)
            return self.directory.names() if self.report.removed else names
        for name in names:
            if name.endswith((".deleted", ".tmp")):
                self.remove(name)
        cleaned = [base_offset_of(name) for name in names if name.endswith(".cleaned")]
        for name in names:
            unfinished = name.endswith(".swap") and cleaned and base_offset_of(name) >= min(cleaned)
            if name.endswith(".cleaned") or unfinished:
                self.remove(name)
        self.finish_swap([name for name in self.directory.names() if name.endswith(".swap")])
        names = self.directory.names()
        self.sweep_orphans(names)
        return self.directory.names()

    def finish_swap(self, swapped: list[str]) -> None:
        """Rename complete .swap files; by Kafka's rule they replace the segments they span."""
        if not swapped:
            return
        # Without a plan they are a broker's, and the broker may have renamed some already.
        self.allow_gaps(max(map(base_offset_of, swapped)) + 1)
        logs = [name for name in swapped if name.endswith(".log.swap")]
        if logs:
            first = min(map(base_offset_of, logs))
            end = max(self.end_of_swapped(name) for name in logs)
            self.allow_gaps(end)
            for name in self.directory.names():
                if name.endswith(SEGMENT_SUFFIXES) and first <= base_offset_of(name) < end:
                    self.remove(name)
        for name in swapped:
            self.directory.rename(name, name.removesuffix(".swap"))
        self.directory.sync()

    def allow_gaps(self, end: int) -> None:
        """Write into the state that offsets below `end` may be missing.

        Called before the first file is replaced, so that a crash leaves no gap unexplained.
        """
        if self.own_state and self.state is not None and self.state.dense_from < end:
            self.state = dataclasses.replace(self.state, dense_from=end)
            self.state.write(self.directory)

    def end_of_swapped(self, name: str) -> int:
        file = self.directory.open(name)
        base = base_offset_of(name)
        found = _native.scan_prefix(file, base, 0, file.size(), base, 4096, False, None)
        return int(found["next_offset"])

    def sweep_orphans(self, names: list[str]) -> None:
        logs = {base_offset_of(name) for name in names if name.endswith(".log")}
        for name in names:
            index = name.endswith(BESIDE_LOG)
            if index and base_offset_of(name) not in logs:
                self.remove(name)

    # ---- after a clean close ----

    def matches(self, state: PartitionState, segments: list[Segment]) -> bool:
        """Return whether the segments are those of the moment when the state was written."""
        return (
            len(segments) == state.segments
            and segments[-1].base_offset == state.active_base
            and segments[-1].size_bytes == state.active_bytes
            and segments[-1].indexes_crc() == state.active_indexes_crc
        )

    def load_clean(
        self, state: PartitionState, segments: list[Segment], names: set[str]
    ) -> LoadedLog:
        for segment in segments:
            if segment_name(segment.base_offset, ".index") not in names:
                self.rebuild_indexes(segment)
        active = segments[-1]
        contents = contents_from_indexes(
            active.offset_index,
            active.time_index,
            size=state.active_bytes,
            next_offset=state.end_offset,
            first_timestamp=state.first_timestamp,
        )
        return LoadedLog(segments, contents, state.start_offset, state.end_offset,
                         state.end_offset, state.dense_from, self.report)  # fmt: skip

    def rebuild_indexes(self, segment: Segment) -> None:
        contents = self.tail.walk(segment)
        if not self.readonly:
            self.tail.write_indexes(segment, contents, sync=False)
        self.report.indexes_rebuilt.append(segment.path.with_suffix(".index"))

    # ---- after a crash ----

    def load_unclean(self, state: PartitionState | None, segments: list[Segment]) -> LoadedLog:
        self.report.clean = False
        if state is not None and self.own_state and state.start_offset < segments[0].base_offset:
            self.report.damage.append(
                Damage(
                    segments[0].path,
                    0,
                    0,
                    range(state.start_offset, segments[0].base_offset),
                    "the segments before this one are missing",
                )
            )
        recovery_point = state.recovery_point if state else 0
        if not self.readonly:
            self.mark = DurableMark.read(self.directory)
        # The mark counts even if the state file is lost, but not if a broker wrote here later.
        mark = -1 if self.claims is not None and self.claims.only else self.mark
        durable = max(mark, recovery_point)
        same_boot = state is not None and bool(boot_id()) and state.boot == boot_id()
        if self.failed is not None:
            same_boot = False  # as after a power cut: any page may have its old contents
        first = max(
            (i for i, s in enumerate(segments) if s.base_offset <= recovery_point), default=0
        )
        if self.readonly:
            first = len(segments) - 1  # sealed segments are checked when they are read
        if (
            len(segments) > 1
            and not self.readonly
            and segments[-1].base_offset != recovery_point
            and not segments[-1].size_bytes
        ):
            first = self.drop_empty_last(segments, first)
        self.tail.total_bytes = sum(segment.size_bytes for segment in segments[first:])
        needs_roll = False
        producers = 0
        contents = empty_contents(segments[first].base_offset)
        for number in range(first, len(segments)):
            segment = segments[number]
            last = number == len(segments) - 1
            if not self.readonly and (self.failed is not None or (same_boot and mark >= 0)):
                # Without a mark no sync has finished here: the log is read from the page cache.
                # With a mark, the bytes above it are read from the device.
                forget_cached(segment, self.directory, durable if self.failed is None else -1)
            found, damaged_tail, cut = self.tail.recover(segment, last, durable, same_boot)
            contents = found
            self.note_epochs(found)
            producers += found.producers
            needs_roll = last and damaged_tail
            known_end = durable if self.own_state else mark  # a broker's claims are not ours
            if last and not needs_roll and contents.next_offset < known_end:
                # Every batch that is left is valid, but durable batches after them are gone.
                lost = contents._replace(reason="the file ends before its records do")
                self.tail.note_damage(segment, lost, contents.position, durable)
                needs_roll = True
            if cut and not last:
                for later in segments[number + 1 :]:
                    self.tail.set_aside(later, "a power cut lost records before it")
                segments = segments[: number + 1]
                segment.next_base = None
                break
        if self.failed is not None and not self.readonly:
            for segment in segments[first:]:
                write_to_new_file(segment, self.directory)
                self.report.rewritten.append(segment.path)
            FailedSync.remove(self.directory)
        lost_end = durable if needs_roll else -1
        if needs_roll and not self.readonly:
            contents = contents._replace(next_offset=max(contents.next_offset, durable))
        durable = min(durable, contents.next_offset)
        recovery_point = min(recovery_point, contents.next_offset)
        dense_from = state.dense_from if state else 0
        quiet_from = INT64_MAX if producers else segments[first].base_offset
        return LoadedLog(segments, contents, 0, recovery_point, durable, dense_from, self.report,
                         needs_roll=needs_roll, lost_end=lost_end, quiet_from=quiet_from,
                         unsynced_gone=not same_boot)  # fmt: skip

    # ---- leader epochs ----

    def note_epochs(self, contents: SegmentContents) -> None:
        """Add the epochs of a checked segment that are newer than those of the epoch file."""
        for epoch, offset in contents.leader_epochs:
            if self.epochs.latest is None or epoch > self.epochs.latest:
                self.epochs.assign(epoch, offset)

    def rebuild_epochs(self, loaded: LoadedLog) -> None:
        """Find in the log where the epoch changes: the epoch file is lost.

        Epochs only grow along the log.  So a segment that starts with the same epoch as the next
        segment has no other epoch; only the other segments are walked.
        """
        self.epochs = LeaderEpochs()
        segments = [segment for segment in loaded.segments if self.holds_batch(segment)]
        first = [int.from_bytes(s.file.pread(16, 0)[12:], "big", signed=True) for s in segments]
        for number, (segment, epoch) in enumerate(zip(segments, first, strict=True)):
            if first[number + 1 : number + 2] == [epoch]:
                if epoch >= 0 and (self.epochs.latest is None or epoch > self.epochs.latest):
                    self.epochs.assign(epoch, segment.base_offset)
            else:
                self.note_epochs(segment.walk())
            segment.release()

    def holds_batch(self, segment: Segment) -> bool:
        try:
            return segment.size_bytes >= 61
        except FileNotFoundError:  # the segment is about to be created
            return False

    def drop_empty_last(self, segments: list[Segment], first: int) -> int:
        """Remove an empty last segment whose base is inside the range of the one before it.

        A roll that failed half way may leave such a file.
        """
        last, previous = segments[-1], segments[-2]
        if previous.walk().next_offset > last.base_offset:
            self.remove(segment_name(last.base_offset, ".log"))
            segments.pop()
            previous.next_base = None
        return min(first, len(segments) - 1)

    def restart_at(self, start: int, loaded: LoadedLog) -> LoadedLog:
        """Set all segments aside and start an empty log: the log ends below its own start."""
        for segment in loaded.segments:
            if not self.readonly:
                segment.release()
                self.tail.set_aside(segment, f"the log ends below its start offset {start}")
        if not self.readonly:
            for name in self.directory.names():
                if name.endswith(".snapshot"):
                    self.remove(name)
        segment = self.make_segment(start, True)
        return LoadedLog([segment], empty_contents(start), start, start, start, start, self.report)

    # ---- an interrupted swap ----

    def finish_planned_swap(self) -> None:
        plan = SwapPlan.read(self.directory)
        if plan is None:
            self.directory.unlink(SWAP_PLAN)  # not written in full: nothing was renamed yet
            self.directory.sync()
            return
        if plan.is_sound(self.directory):
            plan.apply(self.directory)
            self.report.swap_finished = True
        else:
            log.warning(
                "%s: a rewritten segment is damaged; the old ones stay", self.directory.path
            )
            plan.revert(self.directory)
        plan.finish(self.directory)

    def as_planned(self, names: list[str]) -> list[str]:
        """Return the names that a reader uses while a swap of segments is unfinished."""
        plan = SwapPlan.read(self.directory)
        if plan is None or any(f"{name}.cleaned" in names for name in plan.new.names()):
            return names  # all old files still exist
        new = plan.new.base_offset
        log_name = segment_name(new, ".log")
        if f"{log_name}.swap" in names:
            self.staged.add(new)
        hidden = {segment_name(base, suffix) for base in plan.old for suffix in SEGMENT_SUFFIXES}
        return [name for name in names if name not in hidden] + plan.new.names()

    # ---- an interrupted truncation ----

    def finish_truncation(self, state: PartitionState | None) -> PartitionState | None:
        """Carry out a plan that is complete; return the state of the log after it."""
        plan = TruncationPlan.read(self.directory)
        if plan is not None:
            plan.apply(self.directory)
            self.report.truncation_finished = True
            self.truncated_to = plan.end_offset
            if plan.restart:
                self.epochs = LeaderEpochs()
                state = None if state is None else plan.restarted(state)
                if state is not None and self.own_state:
                    # Before the plan is gone: the old state has a start that may be above the end.
                    state.write(self.directory)
        self.directory.unlink(TRUNCATION_PLAN)
        self.directory.sync()
        return state
