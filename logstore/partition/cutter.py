"""RewritableLog: how records leave the log, and how segments are replaced.

From the start (trim, retention), from the end (truncate), and in the middle (what compaction puts
in the place of sealed segments).  Whatever takes more than one change of files is planned in a file
first, so that opening the log again finishes it; claims are lowered before the data goes.

`_rewriting` is held while segments are rewritten, so that there is one compaction or purge at a
time; it is taken without waiting.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from logstore import _native
from logstore.errors import CorruptLogError, OffsetOutOfRangeError, UnsupportedFormatError
from logstore.files.names import SEGMENT_SUFFIXES, segment_name
from logstore.format import codecs
from logstore.log.epochs import EpochEnd
from logstore.log.segment import Segment
from logstore.log.segment_contents import decompress, empty_contents
from logstore.log.segment_digest import DIGEST_SUFFIX, SegmentDigest
from logstore.log.state import CleanerCheckpoint, StartMark
from logstore.partition.appender import AppendableLog
from logstore.partition.reader import check_int, milliseconds
from logstore.partition.view import Cut, View
from logstore.recovery.loader import Claims
from logstore.recovery.swap_plan import SWAP_PLAN, RewrittenSegment, SwapPlan
from logstore.recovery.truncation_plan import TRUNCATION_PLAN, TruncationPlan

if TYPE_CHECKING:
    from logstore.log.retention import RetentionDecision, RetentionPolicy

__all__ = ["RewritableLog"]

log = logging.getLogger("logstore.partition")


class RewritableLog(AppendableLog):
    """A log that can be made shorter, at both ends and in between."""

    def __init__(self, view: View, durability: str, claims: Claims | None) -> None:
        super().__init__(view, durability)
        self._claims = claims
        self._rewriting = threading.Lock()

    def _abandon_in_child(self) -> None:
        """After fork: locks may be held by threads that do not exist here."""
        super()._abandon_in_child()
        self._rewriting = threading.Lock()

    # ---- trimming and retention ----

    def reclaimable_bytes(self) -> int:
        """What retention, by the partition's own settings, could delete now."""
        return sum(each.size_bytes for each in self.enforce(dry_run=True) if each.delete)

    def trim(self, start_offset: int) -> None:
        """Forget all records below `start_offset`; whole segments below it are deleted."""
        check_int("an offset", start_offset)
        with self._view.lock:
            end = self._next_offset()
            if not 0 <= start_offset <= end:
                raise OffsetOutOfRangeError(
                    start_offset, start=self._view.start_offset, end=end, where=self.name
                )
            if start_offset <= self._view.start_offset:
                return
            self._forget_below_locked(start_offset)

    def _forget_below_locked(self, start_offset: int) -> None:
        """Raise the start, durably; then the segments wholly below it lose their names."""
        view = self._view
        if start_offset > view.start_offset:
            before = view.start_offset, view.version, view.recovery_point
            try:
                view.start_offset = start_offset
                view.version += 1
                view.recovery_point = max(view.recovery_point, start_offset)
                if view.segments[view.number_of(start_offset)].base_offset < start_offset:
                    StartMark.write(self.directory, start_offset)
                self._stable.write_state(sync=True)
            except BaseException:
                view.start_offset, view.version, view.recovery_point = before
                raise
            self._stable.commit.raise_to(start_offset)
        keep = view.number_of(view.start_offset)
        dropped, kept = view.segments[:keep], view.segments[keep:]
        view.publish(kept)
        self._delete_segments(dropped)
        if self.directory.room is not None:
            self.directory.room.restore()
        self._leadership.forget_below(view.start_offset, self.name)

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
            from logstore.log.retention import RetentionPolicy

            policy = RetentionPolicy.of(self.config)
        leap_ms = 0
        if now is None:
            now = self._guarded_clock.now_ms()
            leap_ms = self._guarded_clock.leap_ms
        else:
            now = milliseconds(now)
        if dry_run:
            return self._decide(policy, now, leap_ms)
        self._view.check_usable()
        if self.readonly or self._failure is not None:
            self._refuse()
        # What costs reading happens before the lock is taken; the answers are kept.
        planned = self._decide(policy, now, leap_ms)
        if not any(decision.delete for decision in planned):
            return planned
        with self._view.lock:
            end = self._next_offset()
            decisions = self._decide(policy, now, leap_ms)
            going = sum(decision.delete for decision in decisions)
            if going:
                if decisions[going - 1].roll:
                    self._roll_locked(end)
                first = self._view.segments[going].base_offset
                self._forget_below_locked(max(first, self._view.start_offset))
        for decision in decisions[:going]:
            log.info("%s: deleted [%d, %d): %s", self.name, decision.base_offset,
                     decision.end_offset, decision.reason)  # fmt: skip
        return decisions

    def _decide(self, policy: RetentionPolicy, now: int, leap_ms: int) -> list[RetentionDecision]:
        """What a policy says; an age that would cost a segment is read from the log itself."""
        while True:
            segments = self.segments
            try:
                decisions = policy.plan(segments, now, start_offset=self._view.start_offset,
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
        segments = tuple(segments)
        self._view.let_cool(segments)
        self._stable.forget({segment.base_offset for segment in segments})
        for segment in segments:
            segment.release()
            for suffix in SEGMENT_SUFFIXES:
                name = segment_name(segment.base_offset, suffix)
                if self.directory.exists(name):
                    self.directory.rename(name, f"{name}.deleted")
                    names.append(f"{name}.deleted")
            log.info("%s: deleted the segment at offset %d", self.name, segment.base_offset)
        if names:
            self.directory.sync()
            for name in names:
                self.directory.unlink(name)

    # ---- truncating ----

    def truncate(self, end_offset: int) -> None:
        """Cut the log so that `end_offset` is the next offset.  Records below it stay, all of them.

        Safe against a crash at any point: the cut is planned in a file first.  A scan that has
        read beyond keeps what it has, and raises LogTruncatedError when it asks for more.
        """
        check_int("an offset", end_offset)
        with self._view.lock:
            end = self._next_offset()
            if not self._view.start_offset <= end_offset <= end:
                raise OffsetOutOfRangeError(
                    end_offset, start=self._view.start_offset, end=end, where=self.name
                )
            if end_offset == end:
                self._cut_epochs_locked(end)
                return
            cut = self._find_cut(end_offset)  # reads only: an error ends nothing
            try:
                self._truncate_locked(end_offset, cut)
            except BaseException as error:
                # Whatever stopped it half-way, the plan is on disk: opening again finishes the cut.
                self._fail(error)
                raise
            finally:
                self._view.wake_followers()

    def _find_cut(self, end_offset: int) -> tuple[int, bytes, int]:
        number = self._view.number_of(end_offset)
        last = self._view.segments[number]
        if end_offset == last.base_offset and number > 0:
            # Nothing of this segment stays, but its base is where the log goes on: keep it, empty.
            return 0, b"", end_offset
        return self._cut_at(last, end_offset)

    def _truncate_locked(self, end_offset: int, cut: tuple[int, bytes, int]) -> None:
        view, stable = self._view, self._stable
        number = view.number_of(end_offset)
        last = view.segments[number]
        position, batch, kept_end = cut
        later = view.segments[number + 1 :]
        # Claims are lowered before the data is cut, and readers told to look again.
        if self._cleaned_offset() > end_offset:
            # What comes behind the cut has not been compacted.
            CleanerCheckpoint.write(self.directory, end_offset)
        view.version += 1
        view.recovery_point = min(view.recovery_point, last.base_offset)
        durable_before = stable.commit.durable_offset
        stable.commit.lower(last.base_offset)
        stable.write_mark(sync=True)
        stable.write_state(sync=True)
        self._cut_epochs_locked(end_offset)
        plan = TruncationPlan(
            last.base_offset,
            position,
            batch,
            tuple(segment.base_offset for segment in later),
            end_offset,
        )
        plan.write(self.directory)
        file = last.file
        try:
            with self.directory.opening:
                file.end = position  # readers stop there before the bytes go
                plan.apply(self.directory)
                view.let_cool((last, *later))
                for segment in (last, *later):
                    segment.writer = None
                    segment.release()
            last.next_base = None
            contents = last.walk()
            view.publish(view.segments[: number + 1])
            view.load_producers(
                contents.next_offset, self.directory.names(), readonly=False, clean=True
            )
            self._activate(last, contents)
        except BaseException:
            # Opening again finishes it.  Until then readers see what no cut can change.
            last.end_at(file, kept_end)
            for segment in later:
                segment.writer = None
                segment.release()
            view.publish(view.segments[: number + 1])
            self._add_cut_locked(kept_end)
            raise
        self._add_cut_locked(end_offset)
        if durable_before >= last.base_offset:
            # The plan ended with a sync of the file: what it kept can be read whatever comes now.
            stable.commit.raise_to(contents.next_offset)
        if contents.next_offset < end_offset:
            # The kept records end before it (a gap): go on in a segment of its own.
            if contents.position:
                self._roll_locked(end_offset)
            else:
                self._replace_empty(last, end_offset)
        # Readers take the plan, and the version once it is gone, for the sign of a cut.
        view.version += 1
        stable.write_state(sync=True)
        self.directory.unlink(TRUNCATION_PLAN)
        stable.names_changed()
        stable.commit.wait_for(end_offset, end_offset)

    def _add_cut_locked(self, end_offset: int) -> None:
        cut = self._view.cut
        self._view.add_cut(Cut(end_offset, cut.number + 1, (*cut.recent, end_offset)))

    def _replace_empty(self, segment: Segment, base_offset: int) -> None:
        """An empty segment under another base offset."""
        view = self._view
        self._create_log_file(base_offset)
        new = view.make_segment(base_offset, base_offset >= view.dense_from)
        self._activate(new, empty_contents(base_offset))
        segment.writer = None
        view.publish((*view.segments[:-1], new))
        if view.segments[0] is new:
            # No record is left below the cut: compaction had removed them.
            view.start_offset = max(view.start_offset, base_offset)
        view.producers.snapshot(base_offset)  # one at the old base goes
        self._delete_segments([segment])

    def _cut_at(self, segment: Segment, end_offset: int) -> tuple[int, bytes, int]:
        """Where to cut a file, and the batch to put there: the kept part of a straddling one.

        Last, the offset that the log has before that batch is put there.
        """
        scan = segment.scan(end_offset, segment.end_offset)
        raw = scan.next_raw()
        if raw is None:
            return segment.size_bytes, b"", end_offset
        position = scan.position - len(raw)
        base = int.from_bytes(raw[:8], "big")
        if base >= end_offset:
            return position, b"", end_offset
        try:
            kept = _native.batch_below(raw, end_offset, decompress, codecs.compress,
                                       self.config.max_decompressed_message_bytes)  # fmt: skip
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
        """A follower's part: cut by what the leader answered about our last epoch.

        The epoch to ask for is ``leader_epochs.latest``.  False: histories still differ; ask again.
        """
        with self._view.lock:
            cut = self._leadership.history.cut_for(answer, self._next_offset())
            self.truncate(max(cut.offset, self._view.start_offset))
            return cut.agreed or self._leadership.history.latest is None

    def _cut_epochs_locked(self, end_offset: int) -> None:
        """Before the cut is made, even if it cuts nothing."""
        if self._leadership.begins_at_or_above(end_offset):
            self._stable.write_state(sync=True)  # what was promised outlives its entry
            self._leadership.cut(end_offset)

    # ---- digests ----

    def write_digests(self, max_bytes: int | None = None) -> int:
        """Note what the files of sealed, durable segments are; how many were noted.

        One that has its digest is passed over.  With `max_bytes`, segments are left out once so
        many bytes have been read.  `check` then also finds changes that no checksum covers.
        """
        self._view.check_usable()
        if self.readonly:
            self._refuse()
        return self._digest_sealed(max_bytes)

    def _digest_sealed(self, max_bytes: int | None) -> int:
        names = set(self.directory.names())
        written = 0
        for segment in self.segments:
            name = segment_name(segment.base_offset, DIGEST_SUFFIX)
            if name in names or not segment.sealed or segment.end_offset > self.durable_offset:
                continue
            if max_bytes is not None:
                max_bytes -= segment.size_bytes
                if max_bytes < 0:
                    continue
            written += self._write_digest(segment)
        return written

    def _write_digest(self, segment: Segment) -> bool:
        cut = self._view.cut
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            digest = SegmentDigest.of(self.directory, segment.base_offset)
            with self._view.lock:
                # Its files are those that were read, unless the log was cut or rewritten.
                same = self._view.cut is cut and segment in self._view.segments and segment.sealed
                if digest is not None and same and self._failure is None:
                    digest.write(self.directory, segment.base_offset)
                    return True
        return False

    # ---- rewriting ----

    @property
    def first_dirty_offset(self) -> int:
        """Compaction has been over everything below this; the start of the log when it has not."""
        start, end = self.start_offset, self.end_offset
        offset = self._cleaned_offset()
        return offset if start <= offset <= end else start

    def _cleaned_offset(self) -> int:
        """As written down here, else at the root, as a broker leaves it; -1 when nobody did."""
        offset = CleanerCheckpoint.read(self.directory)
        if offset < 0 and self._claims is not None:
            return self._claims.first_dirty_offset
        return offset

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[Cut]:
        """Nobody else rewrites segments meanwhile; for Compactor.

        Appends, rolls, cuts and reads go on; the Cut it yields is for `was_cut_since`.
        Raises ReadOnlyError, ClosedError, or ValueError when a compaction is under way.
        """
        with self._view.lock:
            self._next_offset()
            cut = self._view.cut
        if not self._rewriting.acquire(blocking=False):
            raise ValueError(f"{self.name} is being compacted or purged already")
        try:
            yield cut
        finally:
            self._rewriting.release()

    def was_cut_since(self, cut: Cut) -> bool:
        """Whether records that were read then may be gone now; for Compactor."""
        with self._view.lock:  # a truncation under way ends first
            return self._view.cut is not cut

    def replace_segments(self, old: Sequence[Segment], new: RewrittenSegment, cut: Cut) -> bool:
        """Put a rewritten segment in the place of sealed ones in a row; for Compactor.

        False, with nothing changed, when the log was cut since, or when `old` are not its segments
        any more.  Readers that are in the old files stay there.  Safe against a crash at any point.
        """
        with self._view.lock:
            self._next_offset()
            if self._view.cut is not cut or not self._has_in_a_row(old):
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
            first = self._view.segments.index(segments[0])
        except ValueError:
            return False
        here = self._view.segments[first : first + len(segments)]
        return here == tuple(segments) and all(segment.sealed for segment in here)

    def _replace_locked(self, old: Sequence[Segment], plan: SwapPlan) -> None:
        view = self._view
        end = cast(int, old[-1].next_base)
        for segment in old:
            segment.retire()
        try:
            # Before a name changes: offsets may be missing from here on, readers must look again.
            view.version += 1
            view.dense_from = max(view.dense_from, end)
            self._stable.write_state(sync=True)
            plan.write(self.directory)
        except OSError:
            self.directory.unlink(SWAP_PLAN)
            for segment in old:
                segment.reinstate()
            raise
        try:
            plan.apply(self.directory)
            new = view.make_segment(plan.new.base_offset, False)
            new.next_base = end
            view.let_cool(old)
            rest = [segment for segment in view.segments if segment.base_offset not in plan.old]
            view.producers.replaced(
                plan.old, plan.new.base_offset, indexed=".txnindex" in plan.new.suffixes
            )
            view.publish(sorted([*rest, new], key=lambda segment: segment.base_offset))
            view.version += 1
            self._stable.write_state(sync=True)
            plan.finish(self.directory)
        except OSError as error:
            self._fail(error)  # the plan is on disk: opening again finishes it
            raise

    def note_cleaned(self, offset: int, cut: Cut) -> None:
        """Write down that compaction has been over everything below an offset; for Compactor.

        Nothing is noted when the log was cut since.
        """
        with self._view.lock:
            if self._view.cut is cut and offset <= self._next_offset():
                CleanerCheckpoint.write(self.directory, offset)
