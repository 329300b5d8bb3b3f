"""Cutter: removes records at the start of a log (trim, retention) and at its end (truncate).

A change of several files is planned in a file first, so that the next open finishes it.  Claims
about the log (durable offset, recovery point, cleaned offset) are lowered before the data is cut.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from logstore import _native
from logstore.config import INT64_MAX
from logstore.errors import (
    CorruptLogError,
    DiskFullError,
    LogStoreError,
    OffsetOutOfRangeError,
    UnsupportedFormatError,
)
from logstore.files.disk_reserve import free_bytes
from logstore.files.names import SEGMENT_SUFFIXES, segment_name
from logstore.format import codecs
from logstore.log.epochs import EpochEnd
from logstore.log.segment import Segment
from logstore.log.segment_contents import decompress, empty_contents
from logstore.log.state import CleanerCheckpoint, StartMark
from logstore.partition.active_log import ActiveLog
from logstore.partition.reader import Reader, check_int, milliseconds
from logstore.partition.view import Cut
from logstore.recovery.truncation_plan import TRUNCATION_PLAN, TruncationPlan

if TYPE_CHECKING:
    from logstore.log.retention import RetentionDecision, RetentionPolicy

__all__ = ["Cutter"]

log = logging.getLogger("logstore.partition")


class Cutter:
    """Makes one log shorter, at both ends.  It has no state of its own."""

    def __init__(self, active: ActiveLog, reader: Reader) -> None:
        self._active = active
        self._view = active.view
        self._durability = active.durability
        self._directory = active.view.directory
        self._reader = reader
        self._name = active.name

    # ---- trimming and retention ----

    def reclaimable_bytes(self) -> int:
        """Return the bytes that retention, by the partition's own settings, could delete now."""
        return sum(each.size_bytes for each in self.enforce(dry_run=True) if each.delete)

    def explain_full(self, error: DiskFullError, needed_bytes: int) -> None:
        """Add to the error how full the disk is and what could be freed.  Not under the lock."""
        import traceback  # only for an error: start-up does without it

        # A caller that keeps the error keeps its frames.  A segment's writer in one of them would
        # keep the file open, and its blocks on the disk, after the segment is deleted.
        traceback.clear_frames(error.__traceback__)
        if error.remedy:
            return
        error.needed_bytes = needed_bytes
        room = self._directory.room
        ask = None if room is None else room.reclaimable
        with contextlib.suppress(OSError, LogStoreError):
            error.free_bytes = free_bytes(self._directory)
            mine = self.reclaimable_bytes()
            error.reclaimable_bytes = mine if ask is None else max(mine, ask())
            sealed = sum(segment.size_bytes for segment in self._view.segments if segment.sealed)
            how = "enforce() of this partition" if error.reclaimable_bytes == mine else "enforce()"
            error.remedy = (
                f"{how} would free {error.reclaimable_bytes} bytes now"
                if error.reclaimable_bytes
                else f"retention would free nothing now: trim() could free up to {sealed} bytes "
                f"here, delete_topic() a whole topic, or set a lower retention.bytes"
            )

    def trim(self, start_offset: int) -> None:
        """See Partition.trim."""
        check_int("an offset", start_offset)
        view = self._view
        with view.lock:
            self._active.next_offset()
            end = view.readable_end  # records that are not in sync yet must not be deleted
            if not 0 <= start_offset <= end:
                raise OffsetOutOfRangeError(
                    start_offset, start=view.start_offset, end=end, where=self._name
                )
            if start_offset > view.start_offset:
                self._forget_below_locked(start_offset)

    def _forget_below_locked(self, start_offset: int) -> None:
        """Raise the start offset durably, then delete the segments that are wholly below it."""
        view = self._view
        if start_offset > view.start_offset:
            before = view.bounds()
            try:
                view.advance_start(start_offset)
                view.next_version()
                view.move_recovery_point(max(view.recovery_point, start_offset))
                if view.segments[view.number_of(start_offset)].base_offset < start_offset:
                    StartMark.write(self._directory, start_offset)
                self._durability.write_state(sync=True)
            except BaseException:
                view.restore(before)
                raise
            self._durability.commit.raise_to(start_offset)
        keep = view.number_of(view.start_offset)
        dropped, kept = view.segments[:keep], view.segments[keep:]
        view.publish(kept)
        self._delete_segments(dropped)
        if self._directory.room is not None:
            self._directory.room.restore()
        self._active.leadership.forget_below(view.start_offset, self._name)
        view.wake_followers()

    def enforce(
        self,
        policy: RetentionPolicy | None = None,
        *,
        now: int | datetime.datetime | None = None,
        dry_run: bool = False,
    ) -> list[RetentionDecision]:
        """See Partition.enforce."""
        active, view = self._active, self._view
        if policy is None:
            from logstore.log.retention import RetentionPolicy

            policy = RetentionPolicy.of(view.config)
        leap_ms = 0
        if now is None:
            now = active.guarded_clock.now_ms()
            leap_ms = active.guarded_clock.leap_ms
        else:
            now = milliseconds(now)
        if dry_run:
            return self._decide(policy, now, leap_ms)
        active.require_writable()
        if active.failure is not None:
            active.refuse()
        # Read timestamps before the lock is taken: segments keep the answers.
        planned = self._decide(policy, now, leap_ms)
        if not any(decision.delete for decision in planned):
            return planned
        with view.lock:
            end = active.next_offset()
            decisions = self._decide(policy, now, leap_ms)
            count = sum(decision.delete for decision in decisions)
            if count:
                if decisions[count - 1].roll:
                    active.roll_locked(end)
                first = view.segments[count].base_offset
                self._forget_below_locked(max(first, view.start_offset))
        for decision in decisions[:count]:
            log.info("%s: deleted [%d, %d): %s", self._name, decision.base_offset,
                     decision.end_offset, decision.reason)  # fmt: skip
        return decisions

    def _decide(self, policy: RetentionPolicy, now: int, leap_ms: int) -> list[RetentionDecision]:
        """Return a policy's decisions.  A segment is deleted by age only if its log confirms it."""
        while True:
            segments = self._reader.segments
            try:
                decisions = policy.plan(segments, now, start_offset=self._view.start_offset,
                                        high_watermark=self._reader.readable_end,
                                        leap_ms=leap_ms)  # fmt: skip
                old = [segment for segment, decision in zip(segments, decisions, strict=True)
                       if decision.rule == "age"]  # fmt: skip
                before = [segment.max_timestamp for segment in old]
                if before == [segment.confirm_max_timestamp() for segment in old]:
                    return decisions
            except FileNotFoundError:
                # Another thread or process deleted a segment: then the list is another one now.
                if segments == self._reader.segments:
                    raise

    def _delete_segments(self, segments: Iterable[Segment]) -> None:
        """Rename the files, sync the directory, delete them.  Open files can be read to their end.

        After a crash the next open deletes the renamed files.
        """
        directory = self._directory
        names = []
        segments = tuple(segments)
        self._view.let_cool(segments)
        self._durability.forget({segment.base_offset for segment in segments})
        for segment in segments:
            segment.release()
            for suffix in SEGMENT_SUFFIXES:
                name = segment_name(segment.base_offset, suffix)
                if directory.exists(name):
                    directory.rename(name, f"{name}.deleted")
                    names.append(f"{name}.deleted")
            log.info("%s: deleted the segment at offset %d", self._name, segment.base_offset)
        if names:
            directory.sync()
            for name in names:
                directory.unlink(name)

    # ---- truncating ----

    def truncate(self, end_offset: int, *, whole_batches: bool = False) -> int:
        """See Partition.truncate; return the new end of the log.

        A batch with records on both sides of the cut is written again without those above it.  With
        `whole_batches` it is removed, and the log ends where it began, or at the start of the log:
        the copy of a follower has only batches of its leader.  A high watermark above the new end
        is lowered to it, and leader epochs without a record are removed, also if nothing is cut.
        """
        check_int("an offset", end_offset)
        view = self._view
        with view.lock:
            end = self._active.next_offset()
            if not view.start_offset <= end_offset <= end:
                raise OffsetOutOfRangeError(
                    end_offset, start=view.start_offset, end=end, where=self._name
                )
            if end_offset == end:
                self._cut_epoch_file_locked(end)
                self._active.leadership.cut(end)
                return end
            # Only reads: an error here does not end appends.
            cut = self._find_cut(end_offset, whole_batches)
            if whole_batches:
                end_offset = max(min(end_offset, cut[2]), view.start_offset)
            view.lower_high_watermark(end_offset)
            try:
                self._truncate_locked(end_offset, cut)
            except BaseException as error:
                # The plan may be on disk: then the next open finishes the cut.
                self._active.fail(error)
                raise
            finally:
                view.wake_followers()
        return end_offset

    def _find_cut(self, end_offset: int, whole_batches: bool) -> tuple[int, bytes, int]:
        number = self._view.number_of(end_offset)
        last = self._view.segments[number]
        if end_offset == last.base_offset and number > 0:
            # No record of this segment stays.  Keep it, empty: the log continues at its base.
            return 0, b"", end_offset
        return self._cut_at(last, end_offset, whole_batches)

    def _truncate_locked(self, end_offset: int, cut: tuple[int, bytes, int]) -> None:
        active, view, durability = self._active, self._view, self._durability
        number = view.number_of(end_offset)
        last = view.segments[number]
        position, batch, kept_end = cut
        later = view.segments[number + 1 :]
        # Lower the claims before the data is cut.  The new version makes readers look again.
        if active.cleaned_offset() > end_offset:
            # The records that follow the cut have not been compacted.
            CleanerCheckpoint.write(self._directory, end_offset)
        view.next_version()
        view.move_recovery_point(min(view.recovery_point, last.base_offset))
        durable_before = durability.commit.durable_offset
        durability.commit.lower(last.base_offset)
        durability.write_mark(sync=True)
        durability.write_state(sync=True)
        self._cut_epoch_file_locked(end_offset)
        plan = TruncationPlan(
            last.base_offset,
            position,
            batch,
            tuple(segment.base_offset for segment in later),
            end_offset,
        )
        plan.write(self._directory)
        file = last.file
        try:
            with self._directory.opening:
                file.end = position  # readers stop there before the bytes are removed
                plan.apply(self._directory)
                view.let_cool((last, *later))
                _end_writing((last, *later))
            last.next_base = None
            contents = last.walk()
            view.publish(view.segments[: number + 1])
            view.load_producers(
                contents.next_offset, self._directory.names(), readonly=False, clean=True
            )
            active.activate(last, contents)
        except BaseException:
            # The next open finishes the cut.  Until then readers see what no cut can change.
            last.end_at(file, kept_end)
            _end_writing(later)
            view.publish(view.segments[: number + 1])
            self._add_cut_locked(kept_end)
            raise
        self._add_cut_locked(end_offset)
        active.leadership.cut(end_offset)
        if durable_before >= last.base_offset:
            # The plan ended with a sync of the file: all that it kept is durable.
            durability.commit.raise_to(contents.next_offset)
        if contents.next_offset < end_offset:
            # The kept records end before `end_offset` (a gap): continue in a new segment.
            if contents.position:
                active.roll_locked(end_offset)
            else:
                self._replace_empty(last, end_offset)
        # Readers notice a cut by the plan, and after the plan is removed by the version.
        view.next_version()
        durability.write_state(sync=True)
        self._directory.unlink(TRUNCATION_PLAN)
        durability.names_changed()
        durability.commit.wait_for(end_offset, end_offset)

    def restart_at(self, offset: int) -> None:
        """Delete every record; the log is empty, and its next record gets `offset`.

        For a follower whose leader has deleted the records that it needs next.  `offset` may be
        anywhere: above the end, inside of the log or below its start.  Producers and the history of
        leader epochs are forgotten; the epoch that was begun stays.  A high watermark is `offset`
        then.  Safe against a crash at any point: the next open finds the old log or the new one.
        """
        check_int("an offset", offset)
        if not 0 <= offset < INT64_MAX:
            raise ValueError(f"an offset is an int from 0 to {INT64_MAX - 1}, not {offset}")
        view = self._view
        with view.lock:
            end = self._active.next_offset()
            try:
                self._restart_locked(offset)
            except BaseException as error:
                # The plan may be on disk: then the next open finishes it.
                self._active.fail(error)
                view.restart_at(end)  # readers find no record: files may be gone
                raise
            finally:
                view.wake_followers()
        log.info("%s: restarted at offset %d", self._name, offset)

    def _restart_locked(self, offset: int) -> None:
        active, view, durability = self._active, self._view, self._durability
        old = view.segments
        # Lower the claims before the data is deleted, as for a truncation.
        if active.cleaned_offset() > offset:
            CleanerCheckpoint.write(self._directory, offset)
        view.lower_high_watermark(offset)
        view.next_version()
        view.move_recovery_point(min(view.recovery_point, offset))
        durability.commit.lower(offset)
        durability.write_mark(sync=True)
        durability.write_state(sync=True)
        bases = tuple(segment.base_offset for segment in old)
        plan = TruncationPlan(offset, 0, b"", bases, offset, restart=True)
        plan.write(self._directory)
        with self._directory.opening:
            plan.apply(self._directory)
            view.let_cool(old)
            _end_writing(old)
        durability.forget(bases)
        new = view.make_segment(offset, offset >= view.dense_from)
        active.activate(new, empty_contents(offset))
        view.restart_at(offset)
        view.publish((new,))
        view.move_recovery_point(offset)
        view.load_producers(offset, self._directory.names(), readonly=False, clean=True)
        self._add_cut_locked(offset)
        active.leadership.restart()
        durability.commit.raise_to(offset)
        if view.high_watermark is not None:
            view.move_high_watermark(offset)
        view.next_version()
        durability.write_state(sync=True)
        self._directory.unlink(TRUNCATION_PLAN)
        durability.names_changed()
        durability.write_mark()
        if self._directory.room is not None:
            self._directory.room.restore()

    def _add_cut_locked(self, end_offset: int) -> None:
        cut = self._view.cut
        self._view.add_cut(Cut(end_offset, cut.number + 1, (*cut.recent, end_offset)))

    def _replace_empty(self, segment: Segment, base_offset: int) -> None:
        """Replace an empty segment by an empty one with another base offset."""
        active, view = self._active, self._view
        active.create_log_file(base_offset)
        new = view.make_segment(base_offset, base_offset >= view.dense_from)
        active.activate(new, empty_contents(base_offset))
        segment.writer = None
        view.publish((*view.segments[:-1], new))
        if view.segments[0] is new:
            # No record is left below the cut: compaction had removed them.
            view.advance_start(base_offset)
        view.producers.snapshot(base_offset)  # the one at the old base is deleted
        self._delete_segments([segment])

    def _cut_at(
        self, segment: Segment, end_offset: int, whole_batches: bool
    ) -> tuple[int, bytes, int]:
        """Return (position, batch, kept end): where to cut the file, and what to append then.

        `batch` is the kept part of a batch that has records on both sides of the cut.  `kept end`
        is the end offset of the log before `batch` is appended.
        """
        scan = segment.scan(end_offset, segment.end_offset)
        raw = scan.next_raw()
        if raw is None:
            return segment.size_bytes, b"", end_offset
        position = scan.position - len(raw)
        base = int.from_bytes(raw[:8], "big")
        if base >= end_offset:
            return position, b"", end_offset
        if whole_batches:
            return position, b"", base
        try:
            limit = self._view.config.max_decompressed_message_bytes
            kept = _native.batch_below(raw, end_offset, decompress, codecs.compress, limit)
        except UnsupportedFormatError:
            raise
        except ValueError as error:
            raise CorruptLogError(
                str(error),
                path=segment.path,
                position=position,
                start_offset=base,
                end_offset=base + int.from_bytes(raw[23:27], "big") + 1,
            ) from error
        return position, kept, base

    def truncate_to_epoch(self, answer: EpochEnd) -> bool:
        """See Partition.truncate_to_epoch."""
        with self._view.lock:
            leadership = self._active.leadership
            cut = leadership.history.cut_for(answer, self._active.next_offset())
            self.truncate(max(cut.offset, self._view.start_offset))
            return cut.agreed or leadership.history.latest is None

    def _cut_epoch_file_locked(self, end_offset: int) -> None:
        """Remove the epochs at or above the cut.  Before the cut, even if it cuts nothing."""
        if self._active.leadership.begins_at_or_above(end_offset):
            # The state file keeps the current epoch, whose entry may be removed.
            self._durability.write_state(sync=True)
            self._active.leadership.cut_file(end_offset)


def _end_writing(segments: Sequence[Segment]) -> None:
    """Close the files of segments that have none, or other ones, now."""
    for segment in segments:
        segment.writer = None
        segment.release()
