"""CompactionReport: counts of what a compaction kept and removed, in all and by segment."""

from __future__ import annotations

import dataclasses

__all__ = ["CompactedSegment", "CompactionReport"]


@dataclasses.dataclass(frozen=True, slots=True)
class CompactedSegment:
    """The segments in [base_offset, end_offset), which became one segment."""

    base_offset: int
    end_offset: int
    sources: int  # segments that were merged into one
    records_before: int
    records_after: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        return (
            f"[{self.base_offset}, {self.end_offset}): {self.sources} segments, "
            f"{self.records_before} -> {self.records_after} records, "
            f"{self.bytes_before} -> {self.bytes_after} bytes"
        )


@dataclasses.dataclass(slots=True)
class CompactionReport:
    """What a compaction or a purge did; with ``dry_run``, what it would do.

    Records before and after are those of the segments that the last pass read.
    """

    dry_run: bool = False
    # Why nothing, or not everything, was compacted; "" if everything that may be compacted was.
    reason: str = ""
    dirty_ratio: float = 0.0
    first_dirty_offset: int = 0  # start of the dirty part
    end_offset: int = 0  # everything below this offset is compacted
    passes: int = 0
    records_before: int = 0
    records_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    superseded: int = 0  # records that a newer one of their key replaced
    tombstones_dropped: int = 0
    keyless_dropped: int = 0
    aborted_dropped: int = 0
    markers_dropped: int = 0
    purged: int = 0
    segments: list[CompactedSegment] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        did = "would keep" if self.dry_run else "kept"
        if not self.segments:
            return f"nothing to do: {self.reason or 'no segment would change'}"
        passes = "1 pass" if self.passes == 1 else f"{self.passes} passes"
        text = (
            f"{did} {self.records_after} of {self.records_before} records, "
            f"{self.bytes_after} of {self.bytes_before} bytes, in {passes}: "
            f"{self.superseded} superseded, {self.tombstones_dropped} tombstones, "
            f"{self.keyless_dropped} without a key, {self.aborted_dropped} aborted, "
            f"{self.markers_dropped} markers, {self.purged} purged"
        )
        return f"{text}; {self.reason}" if self.reason else text
