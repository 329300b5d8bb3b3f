"""Rewriter: replaces sealed segments by rewritten ones, and writes digests of sealed segments.

Compaction and purge rewrite segments.  `Rewriter.rewriting` admits one of them at a time.  Appends,
rolls, cuts and reads continue during it.  A truncation makes the work stale: each method of Rewrite
checks that under the log's lock.

A replacement is planned in a file first, so that the next open finishes it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import cast

from logstore.files.names import segment_name
from logstore.log.segment import Segment
from logstore.log.segment_digest import DIGEST_SUFFIX, SegmentDigest
from logstore.log.state import CleanerCheckpoint
from logstore.partition.active_log import ActiveLog
from logstore.partition.reader import Reader
from logstore.recovery.swap_plan import SWAP_PLAN, RewrittenSegment, SwapPlan

__all__ = ["Rewrite", "Rewriter"]

log = logging.getLogger("logstore.partition")


class Rewrite:
    """One compaction or purge of a log.  Made by `Rewriter.rewriting`.

    It is stale once the log was truncated: records that it has read may not exist any more.
    """

    def __init__(self, active: ActiveLog) -> None:
        self._active = active
        self._view = active.view
        self._directory = active.view.directory
        self._cut = active.view.cut  # the newest truncation when the rewrite began

    def is_stale(self) -> bool:
        """Whether the log was truncated since the rewrite began."""
        with self._view.lock:  # waits for the end of a truncation
            return self._view.cut is not self._cut

    def replace(self, old: Sequence[Segment], new: RewrittenSegment) -> bool:
        """Replace consecutive sealed segments by a rewritten one.

        False, with nothing changed, if the rewrite is stale or `old` are not segments of the log
        any more.  Scans that read the old files go on in them.  Safe against a crash at any point.
        """
        with self._view.lock:
            self._active.next_offset()
            if self._view.cut is not self._cut or not self._are_consecutive(old):
                return False
            plan = SwapPlan(new, tuple(segment.base_offset for segment in old))
            try:
                self._replace_locked(old, plan)
            except KeyboardInterrupt:
                try:
                    self._replace_locked(old, plan)  # finish it: a half replacement is of no use
                except BaseException as error:
                    self._active.fail(error)
                    raise
                raise
        log.info("%s: rewrote the segments from offset %d to %d", self._active.name,
                 new.base_offset, cast(int, old[-1].next_base))  # fmt: skip
        return True

    def _are_consecutive(self, segments: Sequence[Segment]) -> bool:
        """Whether these are sealed segments of the log, one after the other."""
        try:
            first = self._view.segments.index(segments[0])
        except ValueError:
            return False
        here = self._view.segments[first : first + len(segments)]
        return here == tuple(segments) and all(segment.sealed for segment in here)

    def _replace_locked(self, old: Sequence[Segment], plan: SwapPlan) -> None:
        active, view = self._active, self._view
        end = cast(int, old[-1].next_base)
        for segment in old:
            segment.retire()
        try:
            # Before a name changes: offsets below `end` may be missing now, and readers of other
            # processes must load the log again.
            view.next_version()
            view.allow_gaps_below(end)
            active.durability.write_state(sync=True)
            plan.write(self._directory)
        except OSError:
            self._directory.unlink(SWAP_PLAN)
            for segment in old:
                segment.reinstate()
            raise
        try:
            plan.apply(self._directory)
            new = view.make_segment(plan.new.base_offset, False)
            new.next_base = end
            view.let_cool(old)
            rest = [segment for segment in view.segments if segment.base_offset not in plan.old]
            view.producers.replaced(
                plan.old, plan.new.base_offset, indexed=".txnindex" in plan.new.suffixes
            )
            view.publish(sorted([*rest, new], key=lambda segment: segment.base_offset))
            view.next_version()
            active.durability.write_state(sync=True)
            plan.finish(self._directory)
        except OSError as error:
            active.fail(error)  # the plan is on disk: the next open finishes it
            raise

    def note_cleaned(self, offset: int) -> None:
        """Record that compaction has read everything below `offset`, unless this is stale."""
        with self._view.lock:
            if self._view.cut is self._cut and offset <= self._active.next_offset():
                CleanerCheckpoint.write(self._directory, offset)


class Rewriter:
    """Admits one rewrite of a log at a time; writes the digests of sealed segments."""

    def __init__(self, active: ActiveLog, reader: Reader) -> None:
        self._active = active
        self._view = active.view
        self._reader = reader
        # Held during a whole rewrite; taken without waiting, so it needs no place in a lock order.
        self._rewriting = threading.Lock()

    @property
    def first_dirty_offset(self) -> int:
        """The end of what compaction has cleaned; the start of the log if it has cleaned none."""
        start, end = self._reader.start_offset, self._reader.end_offset
        offset = self._active.cleaned_offset()
        return offset if start <= offset <= end else start

    def producer_ends(self) -> list[tuple[int, int, int]]:
        """Return (producer id, epoch, offset of its last data or -1) of each producer, by id."""
        with self._view.lock:
            return [
                (entry.producer_id, entry.epoch, entry.last_offset)
                for entry in self._view.known_producers().state
            ]

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[Rewrite]:
        """Begin a rewrite; no other one can begin until the block ends.

        Raises ReadOnlyError, ClosedError, or ValueError if another rewrite is under way.
        """
        with self._view.lock:
            self._active.next_offset()
            rewrite = Rewrite(self._active)
        if not self._rewriting.acquire(blocking=False):
            raise ValueError(f"{self._active.name} is being compacted or purged already")
        try:
            yield rewrite
        finally:
            self._rewriting.release()

    # ---- digests ----

    def write_digests(self, max_bytes: int | None = None) -> int:
        """Write digests of the files of sealed, durable segments; return how many were written.

        A segment that has its digest is left out.  With `max_bytes`, segments are left out once so
        many bytes have been read.  `check` then also finds changes that no checksum covers.
        """
        self._active.require_writable()
        return self.digest_sealed(max_bytes)

    def digest_sealed(self, max_bytes: int | None) -> int:
        """As `write_digests`, also for a log that is being closed."""
        names = set(self._view.directory.names())
        written = 0
        for segment in self._reader.segments:
            name = segment_name(segment.base_offset, DIGEST_SUFFIX)
            if name in names or not segment.sealed:
                continue
            if segment.end_offset > self._active.durable_offset:
                continue
            if max_bytes is not None:
                max_bytes -= segment.size_bytes
                if max_bytes < 0:
                    continue
            written += self._write_digest(segment)
        return written

    def _write_digest(self, segment: Segment) -> bool:
        view = self._view
        cut = view.cut
        with contextlib.suppress(FileNotFoundError):  # another thread deleted the segment
            digest = SegmentDigest.of(view.directory, segment.base_offset)
            with view.lock:
                # The digest fits the files unless the log was cut or rewritten during the read.
                same = view.cut is cut and segment in view.segments and segment.sealed
                if digest is not None and same and self._active.failure is None:
                    digest.write(view.directory, segment.base_offset)
                    return True
        return False
