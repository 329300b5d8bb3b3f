"""Compactor: rewrites sealed segments and keeps only the newest record of every key.

A pass has two loops, both in C and both with bounded memory.  The first reads the keys of the dirty
part, which no compaction has read yet, into a map of fixed size from key to newest offset.  The
second copies all segments up to that offset, without the records that a newer one supersedes.

Invariant: the newest record of a key is never lost.  A rewritten segment replaces the old ones by a
plan on disk (`recovery.swap_plan`), one group of segments at a time, oldest first.  After a crash
or an interrupt at any point, each group is either the old one or the new one: at worst an older
value is still there.

The rules are Kafka's.  The active segment and records at or above the last stable offset are not
rewritten.  Offsets and order are kept.  A tombstone is kept for delete.retention.ms after the first
compaction that read it.  Data of aborted transactions is removed, and their markers stay as long as
any of that data is left.

Appends and reads run concurrently with a compaction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence

from logstore import _native
from logstore.clock import GuardedClock
from logstore.config import INT64_MAX
from logstore.errors import CorruptLogError
from logstore.files.names import segment_name
from logstore.format import codecs
from logstore.log.segment import RELATIVE_MAX, Segment
from logstore.log.segment_contents import decompress
from logstore.log.segment_digest import DIGEST_SUFFIX, SegmentDigest, digest
from logstore.partition.partition import Partition
from logstore.partition.rewriter import Rewrite
from logstore.recovery.swap_plan import SWAP_PLAN, RewrittenSegment
from logstore.upkeep.compaction_report import CompactedSegment, CompactionReport

__all__ = ["CompactionProgress", "Compactor"]

# Called with (bytes read so far, bytes to read in all) of the pass that is running.
CompactionProgress = Callable[[int, int], None]

MAP_BYTES = 128 << 20
IO_BYTES = 512 << 10
STEP_BYTES = 8 << 20  # bytes read by one call into C; signals and progress are handled in between
GROUP_SEGMENTS = 256  # most segments that become one: a swap opens each of them
_KEY_BYTES = 24  # bytes of the map per key: a hash of 16 bytes and an offset


@dataclasses.dataclass(frozen=True, slots=True)
class _Bounds:
    """The input of a pass, read at one moment."""

    segments: tuple[Segment, ...]  # the sealed segments below `end`, clean and dirty
    first_dirty: int  # the first offset that no compaction has read
    end: int  # records at or above this are not rewritten
    ratio: float
    now_ms: int
    leap_ms: int  # how far the wall clock is ahead of `now_ms`
    overdue: bool  # max.compaction.lag.ms has passed

    @property
    def dirty(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.end_offset > self.first_dirty]


class _LogChangedError(Exception):
    """The log was truncated or its start moved while its segments were being read."""


class Compactor:
    """Compacts one partition.  ``Compactor(partition).run()``.

    `memory_bytes` is the size of the map of keys: 24 bytes for each key of the dirty part, plus a
    tenth.  If the keys do not fit, there are more passes.  Settings that are None are those of the
    partition's configuration.  `progress` is called with (bytes read, bytes to read) of the running
    pass.

    Use a Compactor from one thread.  Other threads may use the partition at the same time.
    """

    def __init__(
        self,
        partition: Partition,
        *,
        memory_bytes: int = MAP_BYTES,
        delete_retention_ms: int | None = None,
        min_lag_ms: int | None = None,
        max_lag_ms: int | None = None,
        min_cleanable_dirty_ratio: float | None = None,
        io_bytes: int = IO_BYTES,
        progress: CompactionProgress | None = None,
    ) -> None:
        if memory_bytes < 2 * _KEY_BYTES:
            raise ValueError(
                f"memory_bytes must be at least {2 * _KEY_BYTES}, the space of one key, "
                f"not {memory_bytes}"
            )
        if io_bytes < 1:
            raise ValueError(f"io_bytes must be at least 1, not {io_bytes}")
        config = partition.config
        self.partition = partition
        self.memory_bytes = memory_bytes
        self.delete_retention_ms = _given(delete_retention_ms, config.delete_retention_ms)
        self.min_lag_ms = _given(min_lag_ms, config.min_compaction_lag_ms)
        self.max_lag_ms = _given(max_lag_ms, config.max_compaction_lag_ms)
        for name in ("delete_retention_ms", "min_lag_ms", "max_lag_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        ratio = min_cleanable_dirty_ratio
        self.min_cleanable_dirty_ratio = (
            config.min_cleanable_dirty_ratio if ratio is None else ratio
        )
        if not 0 <= self.min_cleanable_dirty_ratio <= 1:
            raise ValueError(
                f"min_cleanable_dirty_ratio must be from 0 to 1, not {min_cleanable_dirty_ratio}"
            )
        self._io_bytes = io_bytes
        self._progress = progress
        self._current: Rewrite  # of the run or purge under way
        self._done = 0
        self._total = 0

    # ---- compaction ----

    def run(self, dry_run: bool = False) -> CompactionReport:
        """Compact the dirty part if its share is large enough, in as many passes as needed.

        With `dry_run` nothing is changed, and the report is that of the first pass.  Raise
        CorruptLogError, without changing the log, if a segment is damaged, and ValueError if the
        partition is being compacted already.  After an interrupt, each segment is either the old
        one or a compacted one.
        """
        report = CompactionReport(dry_run=dry_run)
        with self.partition.parts.rewriter.rewriting() as self._current:
            bounds = self._bounds()
            report.first_dirty_offset = report.end_offset = bounds.first_dirty
            report.dirty_ratio = bounds.ratio
            report.reason = self._why_not(bounds)
            if report.reason:
                return report
            report.bytes_before = sum(segment.size_bytes for segment in bounds.segments)
            if not dry_run:
                # A record may be removed only after the record that supersedes it is durable.
                self.partition.sync()
            try:
                while bounds.first_dirty < bounds.end:
                    report.end_offset = self._run_pass(bounds, report)
                    if dry_run:
                        if report.end_offset < bounds.end:
                            report.reason = "the map of keys is full: further passes would follow"
                        break
                    # The segments are replaced durably before this.  After a crash in between, the
                    # next pass finds nothing to remove.
                    self._current.note_cleaned(report.end_offset)
                    bounds = dataclasses.replace(
                        bounds,
                        segments=self._sealed_below(bounds.end),
                        first_dirty=report.end_offset,
                    )
            except (_LogChangedError, FileNotFoundError):
                if not self._has_changed(bounds.segments):
                    raise
                report.reason = "the log was truncated or trimmed during this run: run it again"
            if not dry_run:
                left = self._sealed_below(bounds.end)
                report.bytes_after = sum(segment.size_bytes for segment in left)
        return report

    def _has_changed(self, segments: Sequence[Segment]) -> bool:
        """Return whether a segment was deleted, or the log truncated, since `segments` was read."""
        here = {segment.base_offset for segment in self.partition.segments}
        gone = any(segment.base_offset not in here for segment in segments)
        return gone or self._current.is_stale()

    def _sealed_below(self, end: int) -> tuple[Segment, ...]:
        return tuple(
            segment
            for segment in self.partition.segments
            if segment.sealed and segment.base_offset < end
        )

    def _bounds(self) -> _Bounds:
        partition = self.partition
        guarded_clock = GuardedClock.of(partition.parts.view.clock)
        now = guarded_clock.now_ms()
        segments = partition.segments
        first_dirty = partition.first_dirty_offset
        # Never the active segment, nor records that a transaction may still abort.
        end = min(partition.last_stable_offset, partition.high_watermark, segments[-1].base_offset)
        dirty = [s for s in segments[:-1] if s.end_offset > first_dirty]
        if self.min_lag_ms > 0:
            # Stop at the first segment with a record that is too young.
            young = (s.base_offset for s in dirty if _newest_time(s) > now - self.min_lag_ms)
            end = min(end, next(young, end))
        # Round down to the start of a segment: the segment that holds `end` is not rewritten.
        end = max(first_dirty, end)
        end = max((s.base_offset for s in segments if s.base_offset <= end), default=end)
        below = tuple(s for s in segments[:-1] if s.base_offset < end)
        clean = sum(s.size_bytes for s in below if s.base_offset < first_dirty)
        cleanable = sum(s.size_bytes for s in below if s.end_offset > first_dirty)
        total = clean + cleanable
        overdue = (
            self.max_lag_ms < INT64_MAX
            and cleanable > 0
            and any(0 < self._first_time(segment) < now - self.max_lag_ms for segment in dirty)
        )
        return _Bounds(
            segments=below,
            first_dirty=first_dirty,
            end=end,
            ratio=cleanable / total if total else 0.0,
            now_ms=now,
            leap_ms=guarded_clock.leap_ms,
            overdue=overdue,
        )

    def _why_not(self, bounds: _Bounds) -> str:
        """Return why nothing is compacted; "" if there is work."""
        if bounds.ratio == 0.0 or bounds.first_dirty >= bounds.end:
            return (
                f"nothing below offset {bounds.end} is new since the last compaction (records of "
                f"the active segment, of open transactions and younger than the minimum lag wait)"
            )
        if bounds.ratio <= self.min_cleanable_dirty_ratio and not bounds.overdue:
            return (
                f"the dirty ratio {bounds.ratio:.3f} is not above "
                f"min.cleanable.dirty.ratio {self.min_cleanable_dirty_ratio:g}"
            )
        return ""

    def _run_pass(self, bounds: _Bounds, report: CompactionReport) -> int:
        """Compact with as many keys as the map holds; return the offset that it reached."""
        dirty_bytes = sum(segment.size_bytes for segment in bounds.dirty)
        self._done = 0
        self._total = dirty_bytes + sum(segment.size_bytes for segment in bounds.segments)
        keys, end = self._read_keys(bounds)
        rules = self._rules(bounds, keys)
        report.passes += 1
        lines: list[CompactedSegment] = []
        for group in self._groups([s for s in bounds.segments if s.base_offset < end], bounds.end):
            counts = self._rewrite(group, rules, report.dry_run)
            lines.append(_line(group, counts))
            report.superseded += counts["superseded"]
            report.tombstones_dropped += counts["tombstones"]
            report.keyless_dropped += counts["keyless"]
            report.aborted_dropped += counts["aborted"]
            report.markers_dropped += counts["markers"]
        report.segments += lines
        dropped = (report.superseded + report.tombstones_dropped + report.keyless_dropped
                   + report.aborted_dropped + report.markers_dropped)  # fmt: skip
        report.records_after = sum(line.records_after for line in lines)
        report.records_before = report.records_after + dropped
        report.bytes_after = report.bytes_before - sum(
            line.bytes_before - line.bytes_after for line in lines
        )
        return end

    def _read_keys(self, bounds: _Bounds) -> tuple[_native.OffsetMap, int]:
        """Return the newest offset of every key in the dirty part, and the end of that part.

        If the map is full, the end is before `bounds.end`.
        """
        # Not more memory than the keys can need: there are no more records than offsets.
        room = (bounds.end - bounds.first_dirty) * _KEY_BYTES * 10 // 9 + 2 * _KEY_BYTES
        # A random seed: keys that were chosen to collide cannot slow the map down.
        keys = _native.OffsetMap(min(self.memory_bytes, room), os.urandom(16))
        transactions = self._transactions(bounds.segments)
        payload_max = self.partition.config.max_decompressed_message_bytes
        for segment in bounds.dirty:
            with self._reading(segment) as file:
                size, position, expected = file.end, 0, segment.base_offset
                if segment.base_offset < bounds.first_dirty:
                    position = self._position_of(segment, file, bounds.first_dirty)
                while position < size:
                    before = position
                    position, expected, full = keys.read(
                        file, position, size, expected, segment.offset_max, STEP_BYTES,
                        bounds.first_dirty, transactions, decompress, payload_max, self._io_bytes,
                    )  # fmt: skip
                    self._advance(position - before)
                    if full:
                        return keys, keys.latest_offset + 1
        # Offsets may be missing before `end`: without this, they would stay dirty.
        keys.latest_offset = bounds.end - 1
        return keys, bounds.end

    def _first_time(self, segment: Segment) -> int:
        """Return the greatest timestamp of a segment's first batch, or -1."""
        with self._reading(segment) as file:
            header = file.pread(61, 0)
        return int.from_bytes(header[35:43], "big", signed=True) if len(header) == 61 else -1

    def _position_of(self, segment: Segment, file: _native.File, offset: int) -> int:
        """Return the position to read from for `offset`; 0 if the index entry is wrong."""
        last, position = segment.offset_index.lookup(offset)
        segment.release()
        # An index is a hint: the batch at `position` must be of magic 2 and end with the offset of
        # the entry.
        header = file.pread(27, position) if position else b""
        if len(header) < 27:
            return 0
        base, delta = int.from_bytes(header[:8], "big"), int.from_bytes(header[23:27], "big")
        return position if base + delta == last and header[16] == 2 else 0

    def _rules(self, bounds: _Bounds, keys: _native.OffsetMap) -> _Rules:
        return _Rules(
            keys=keys,
            key=None,
            transactions=self._transactions(bounds.segments),
            start_offset=0,
            end_offset=bounds.end,
            now_ms=bounds.now_ms,
            # `now_ms` was corrected for a leap of the clock, but the leap may have been right: a
            # new delete horizon counts from the later time, and keeps tombstones longer.
            delete_retention_ms=min(self.delete_retention_ms + bounds.leap_ms, INT64_MAX),
        )

    def _transactions(self, segments: Sequence[Segment]) -> _native.Transactions:
        """Return the aborted transactions in `segments`, from their index files."""
        return _native.Transactions(b"".join(map(_aborted_in, segments)))

    def _groups(self, segments: Sequence[Segment], end: int) -> Iterator[list[Segment]]:
        """Yield runs of neighbouring segments that together fit the configured segment size."""
        config = self.partition.config
        group: list[Segment] = []
        sizes = [0, 0, 0]
        for segment in segments:
            more = [
                segment.size_bytes,
                len(segment.offset_index.entries),
                len(segment.time_index.entries),
            ]
            limits = [config.segment_bytes, config.segment_index_bytes, config.segment_index_bytes]
            sums = [a + b for a, b in zip(sizes, more, strict=True)]
            last = min(segment.end_offset, end) - 1
            fits = all(a <= b for a, b in zip(sums, limits, strict=True)) and (
                more[0] == 0 or not group or last - group[0].base_offset <= RELATIVE_MAX
            )
            if group and (not fits or len(group) == GROUP_SEGMENTS):
                yield group
                group, sums = [], more
            group.append(segment)
            sizes = sums
            segment.release()
        if group:
            yield group

    # ---- purging ----

    def purge(self, key: bytes, *, dry_run: bool = False) -> CompactionReport:
        """Remove every record of one key, for any cleanup policy.  Other records do not change.

        If the active segment holds the key, it is rolled first.  Records that a writer still
        buffers, or that are appended during the purge, are not removed.
        """
        if not isinstance(key, bytes):
            raise TypeError(f"a key is bytes, not {type(key).__name__}")
        report = CompactionReport(dry_run=dry_run, passes=1)
        with self.partition.parts.rewriter.rewriting() as self._current:
            active = self.partition.segments[-1]
            rules = _Rules(
                keys=None,
                key=key,
                transactions=None,
                start_offset=self.partition.start_offset,
                end_offset=-1,
                now_ms=0,
                delete_retention_ms=0,
            )
            segments = self.partition.segments
            self._done, self._total = 0, sum(segment.size_bytes for segment in segments)
            try:
                held = [s for s in segments if self._count(s, rules)["purged"]]
                if active in held and not dry_run:
                    self.partition.roll()
                for segment in held:
                    ends = dataclasses.replace(rules, end_offset=segment.end_offset)
                    counts = self._rewrite([segment], ends, dry_run)
                    line = _line([segment], counts)
                    report.segments.append(line)
                    report.purged += counts["purged"]
                    report.records_before += line.records_before
                    report.records_after += line.records_after
                    report.bytes_before += line.bytes_before
                    report.bytes_after += line.bytes_after
            except (_LogChangedError, FileNotFoundError):
                if not self._has_changed(segments):
                    raise
                report.reason = "the log was truncated or trimmed during this run: run it again"
        return report

    def _count(self, segment: Segment, rules: _Rules) -> dict[str, int]:
        cleaner = self._cleaner(None, segment.base_offset, rules)
        self._feed(cleaner, segment)
        return cleaner.counts()

    # ---- rewriting ----

    def _cleaner(
        self, target: _native.File | None, base_offset: int, rules: _Rules
    ) -> _native.Cleaner:
        config = self.partition.config
        return _native.Cleaner(
            target,
            base_offset=base_offset,
            interval_bytes=config.index_interval_bytes,
            offset_map=rules.keys,
            key=rules.key,
            transactions=rules.transactions,
            producers=self.partition.parts.rewriter.producer_ends(),
            start_offset=rules.start_offset,
            end_offset=rules.end_offset,
            now_ms=rules.now_ms,
            delete_retention_ms=rules.delete_retention_ms,
            decompress=decompress,
            compress=codecs.compress,
            payload_max=config.max_decompressed_message_bytes,
            io_bytes=self._io_bytes,
        )

    @contextlib.contextmanager
    def _reading(self, segment: Segment) -> Iterator[_native.File]:
        """Open a descriptor of our own, so that the segment does not keep one open afterwards.

        Raise _LogChangedError if the file is missing, or damaged because of a truncation.
        """
        try:
            file = self.partition.parts.view.directory.open(
                segment_name(segment.base_offset, ".log")
            )
        except FileNotFoundError:
            raise _LogChangedError from None
        try:
            yield file
        except CorruptLogError:
            if self._current.is_stale():
                raise _LogChangedError from None
            raise
        finally:
            file.close()

    def _feed(self, cleaner: _native.Cleaner, segment: Segment) -> None:
        with self._reading(segment) as file:
            size = file.end if segment.sealed else segment.size_bytes
            position, expected = 0, segment.base_offset
            while position < size:
                before = position
                position, expected = cleaner.feed(
                    file, position, size, expected, segment.offset_max, STEP_BYTES
                )
                self._advance(position - before)

    def _advance(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, max(self._done, self._total))

    def _rewrite(self, group: list[Segment], rules: _Rules, dry_run: bool) -> dict[str, int]:
        """Replace a group by one new segment, unless nothing would change; return the counts.

        Order: write and sync all new files as .cleaned, sync the directory, then swap by a plan.
        """
        if dry_run:
            cleaner = self._cleaner(None, group[0].base_offset, rules)
            for segment in group:
                self._feed(cleaner, segment)
            return cleaner.counts()
        directory = self.partition.parts.view.directory
        base = group[0].base_offset
        name = segment_name(base, ".log")
        names = [f"{name}.cleaned"]
        directory.unlink(names[0])
        target = directory.open(names[0], write=True, create=True, exclusive=True)
        try:
            try:
                cleaner = self._cleaner(target, base, rules)
                for segment in group:
                    self._feed(cleaner, segment)
                size, crc, offsets, times, aborted = cleaner.finish()
                counts = cleaner.counts()
                before = b"".join(map(_aborted_in, group))
                if rules.transactions is None:
                    aborted = before
                if len(group) > 1 or _changes(counts) or aborted != before:
                    self._keep_time(names[0], group[-1])
                    target.sync()
                    files = {".index": offsets, ".timeindex": times}
                    if aborted:
                        files[".txnindex"] = aborted
                    digests = {each: digest(content) for each, content in files.items()}
                    files[DIGEST_SUFFIX] = SegmentDigest((size, crc), digests).encode()
                    for suffix, content in files.items():
                        names.append(f"{segment_name(base, suffix)}.cleaned")
                        directory.write(names[-1], content, sync=True)
                    directory.sync()
                    new = RewrittenSegment(base, (".log", *files), size, crc)
                    if not self._current.replace(group, new):
                        raise _LogChangedError
                    names = []
            finally:
                target.close()
        finally:
            # If there is a plan, it names these files: the recovery that finishes it needs them.
            for leftover in [] if directory.exists(SWAP_PLAN) else names:
                directory.unlink(leftover)
        return counts

    def _keep_time(self, name: str, segment: Segment) -> None:
        """Give the new file the times of the last one it replaces: retention may use them."""
        source = segment_name(segment.base_offset, ".log")
        directory = self.partition.parts.view.directory
        with contextlib.suppress(FileNotFoundError):
            directory.set_times_ns(name, directory.times_ns(source))


@dataclasses.dataclass(frozen=True, slots=True)
class _Rules:
    """Which records a cleaner removes: superseded ones (`keys`) or those of one `key`."""

    keys: _native.OffsetMap | None  # key to newest offset; None for a purge
    key: bytes | None  # None for a compaction
    transactions: _native.Transactions | None
    start_offset: int
    end_offset: int
    now_ms: int
    delete_retention_ms: int


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _aborted_in(segment: Segment) -> bytes:
    return segment.transaction_index.entries


def _newest_time(segment: Segment) -> int:
    newest = segment.max_timestamp
    segment.release()
    return newest


def _changes(counts: dict[str, int]) -> bool:
    return counts["batches_rewritten"] > 0 or counts["batches_kept"] != counts["batches_read"]


def _line(group: Sequence[Segment], counts: dict[str, int]) -> CompactedSegment:
    return CompactedSegment(
        group[0].base_offset,
        group[-1].end_offset,
        len(group),
        counts["records_read"],
        counts["records_kept"],
        counts["bytes_read"],
        counts["bytes_kept"],
    )
