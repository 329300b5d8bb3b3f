"""RetentionPolicy: which segments of a log to delete, and the reason for each.

Input are the facts of the segments and the time; output is one decision per segment.  Kafka's rules
apply in this order.  First, segments below the log's start offset are deleted; then the oldest
segments while the log is larger than the byte limit; then segments whose newest record is too old.
The limit on records is an addition of logstore.

Invariant: only a prefix of the segments is deleted.  Each rule walks from the oldest segment on and
stops at the first segment it keeps, so a log never gets a hole.

This module does no I/O: ``partition.enforce`` deletes the segments.

A wrong time must not delete records.  Two checks guard against one.  `ClockGuard` corrects a clock
that advanced by more than the time that passed.  If the newest timestamp of a segment is not
plausible (seconds instead of milliseconds, or zero), the modification time of its file is used.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from logstore.config import INT64_MAX, ConfigError, PartitionConfig

__all__ = ["RetentionDecision", "RetentionPolicy", "SegmentFacts"]

Rule = Literal["start", "bytes", "records", "age"]

# 1980-01-01.  A time in seconds is below this number until the year 11968, so it is never taken
# for a plausible time in milliseconds.
PLAUSIBLE_FROM_MS = 315_532_800_000


class Retainable(Protocol):
    """The attributes that a policy reads.  Segment and SegmentFacts have them."""

    @property
    def base_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def max_timestamp(self) -> int: ...
    @property
    def modified_ms(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFacts:
    """The facts of one segment by value: a plan for segments that do not exist."""

    base_offset: int
    end_offset: int
    size_bytes: int
    max_timestamp: int  # -1: its records have no timestamps
    modified_ms: int = -1  # of the .log file; used if max_timestamp is missing or not plausible


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetentionDecision:
    """Whether one segment is deleted or kept, and the reason."""

    base_offset: int
    end_offset: int
    size_bytes: int
    delete: bool
    rule: Rule | None  # the rule that deletes it; None if it is kept
    reason: str
    # For a segment that is kept: the time from which on it, and all before it, are too old.
    eligible_at_ms: int | None = None
    roll: bool = False  # it is the active segment: roll the log before the deletion

    def __str__(self) -> str:
        verb = "delete" if self.delete else "keep"
        return f"{verb} [{self.base_offset}, {self.end_offset}): {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """How much of a log to keep.  None is no limit; the first limit exceeded deletes a segment.

    >>> policy = RetentionPolicy(max_bytes=100)
    >>> old = SegmentFacts(base_offset=0, end_offset=5, size_bytes=90, max_timestamp=0)
    >>> new = SegmentFacts(base_offset=5, end_offset=9, size_bytes=120, max_timestamp=0)
    >>> for decision in policy.plan([old, new], now=1000):
    ...     print(decision)
    delete [0, 5): 210 bytes in all; without its 90 there are still 120, at least max_bytes 100
    keep [5, 9): without its 120 bytes of 120 there would be less than max_bytes 100
    """

    # Delete a segment if its newest record is older than this.
    max_age_ms: int | None = None
    # Delete the oldest segment while at least this much remains: the log keeps this size plus up
    # to one segment.
    max_bytes: int | None = None
    # The same for offsets.  After a compaction fewer records than this may remain.
    max_records: int | None = None
    # If the newest timestamp is below this, use the file's modification time.  0: never.
    plausible_from_ms: int = PLAUSIBLE_FROM_MS

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name != "plausible_from_ms":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{field.name} must be an int or None, not {value!r}")
            if not 0 <= value <= INT64_MAX:
                raise ConfigError(
                    f"{field.name} must be from 0 to {INT64_MAX}, not {value}; None is no limit"
                )

    @classmethod
    def of(cls, config: PartitionConfig) -> RetentionPolicy:
        """Return the policy of ``retention.ms`` and ``retention.bytes``.

        If ``cleanup.policy`` has no "delete", only segments below the log's start are deleted.
        """
        if not config.deletes:
            return cls()
        return cls(
            max_age_ms=config.retention_ms if config.retention_ms >= 0 else None,
            max_bytes=config.retention_bytes if config.retention_bytes >= 0 else None,
        )

    def plan(
        self,
        segments: Sequence[Retainable],
        now: int,
        *,
        start_offset: int = 0,
        high_watermark: int | None = None,
        leap_ms: int = 0,
    ) -> list[RetentionDecision]:
        """Return one decision per segment, oldest first; the last segment is the active one.

        `now` is in milliseconds.  A segment that ends above `high_watermark` is kept (None: the
        end of the log).  `leap_ms` is used in the reasons only: how far the clock is ahead of
        `now`, which was corrected.
        """
        return _Plan(self, segments, now, start_offset, high_watermark, leap_ms).decide()


class _Plan:
    """One plan: each rule walks over the segments once."""

    def __init__(
        self,
        policy: RetentionPolicy,
        segments: Sequence[Retainable],
        now: int,
        start_offset: int,
        high_watermark: int | None,
        leap_ms: int,
    ) -> None:
        self.policy = policy
        self.segments = segments
        self.now = now
        self.start_offset = start_offset
        end = segments[-1].end_offset if segments else 0
        self.high_watermark = end if high_watermark is None else high_watermark
        self.leap_ms = leap_ms
        # One entry per deleted segment, oldest first: segments[len(reasons)] is the first kept.
        self.reasons: list[tuple[Rule, str]] = []
        # Why the first kept segment is kept: one reason per rule that stopped at it.
        self.kept: list[str] = []

    def decide(self) -> list[RetentionDecision]:
        self.pass_start()
        self.pass_amount("bytes", self.policy.max_bytes)
        self.pass_amount("records", self.policy.max_records)
        self.pass_age()
        return list(self.decisions())

    # ---- the rules: each continues at the first segment that the rules before it kept ----

    def candidates(self) -> Iterable[Retainable]:
        """Yield the first kept segment until a rule keeps it or it must not be deleted.

        After each `let_go` the next segment is the first kept one.
        """
        while len(self.reasons) < len(self.segments):
            segment = self.segments[len(self.reasons)]
            if self.is_last(segment) and segment.size_bytes == 0:
                self.kept = ["it is empty, and the next record is appended to it"]
                return
            if segment.end_offset > self.high_watermark:
                self.kept = [
                    f"it ends at {segment.end_offset}, above the high watermark "
                    f"{self.high_watermark}"
                ]
                return
            yield segment

    def let_go(self, rule: Rule, reason: str) -> None:
        self.reasons.append((rule, reason))
        self.kept = []  # those were reasons for this segment

    def is_last(self, segment: Retainable) -> bool:
        return segment is self.segments[-1]

    def pass_start(self) -> None:
        for segment in self.candidates():
            if self.is_last(segment) or segment.end_offset > self.start_offset:
                return
            self.let_go(
                "start", f"it ends at {segment.end_offset}; the log starts at {self.start_offset}"
            )

    def amount(self, segment: Retainable, unit: Rule) -> int:
        if unit == "bytes":
            return segment.size_bytes
        return segment.end_offset - max(segment.base_offset, self.start_offset)

    def pass_amount(self, unit: Rule, limit: int | None) -> None:
        if limit is None:
            return
        total = sum(self.amount(s, unit) for s in self.segments[len(self.reasons) :])
        for segment in self.candidates():
            size = self.amount(segment, unit)
            if total - size < limit:
                self.kept.append(
                    f"without its {size} {unit} of {total} there would be less than "
                    f"max_{unit} {limit}"
                )
                return
            self.let_go(
                unit,
                f"{total} {unit} in all; without its {size} there are still {total - size}, "
                f"at least max_{unit} {limit}",
            )
            total -= size

    def pass_age(self) -> None:
        limit = self.policy.max_age_ms
        if limit is None:
            return
        for segment in self.candidates():
            time, which = self.time_of(segment)
            age = self.now - time
            if time < 0:
                self.kept.append("neither its records nor its file have a time")
                return
            if age <= limit:
                self.kept.append(self.young(which, time, age, limit))
                return
            self.let_go("age", f"{which} {_written(time)} is {age} ms old, max_age_ms is {limit}")

    def young(self, which: str, time: int, age: int, limit: int) -> str:
        if self.leap_ms and age + self.leap_ms > limit:
            return (
                f"{which} {_written(time)} is {age} ms old; by the clock it would be "
                f"{age + self.leap_ms} and beyond max_age_ms {limit}, but the clock leapt "
                f"{self.leap_ms} ms ahead of the time that passed: pass now= to use its time"
            )
        if age < 0:
            return (
                f"{which} {_written(time)} is {-age} ms in the future (max_age_ms is {limit}); "
                f"message.timestamp.after.max.ms would refuse such records"
            )
        return f"{which} {_written(time)} is {age} ms old, max_age_ms is {limit}"

    def time_of(self, segment: Retainable) -> tuple[int, str]:
        """Return the time of its newest record, and a text that names the source of that time."""
        newest = segment.max_timestamp
        floor = self.policy.plausible_from_ms
        if newest < 0:
            return segment.modified_ms, "its records have no times; its file's time"
        # If `now` is itself below the floor (a manual clock, a machine without a battery), the
        # timestamps may be right: use them.
        if newest < floor <= self.now and segment.modified_ms >= floor:
            return segment.modified_ms, (
                f"its newest timestamp {newest} is no plausible time (below plausible_from_ms "
                f"{floor}); its file's time"
            )
        return newest, "its newest record's time"

    # ---- the decisions ----

    def decisions(self) -> Iterable[RetentionDecision]:
        going = len(self.reasons)
        eligible: int | None = 0
        for number, segment in enumerate(self.segments):
            gone = number < going
            if not gone:
                eligible = self.eligible_after(segment, eligible)
            rule, reason = self.reasons[number] if gone else (None, self.stays(number, going))
            yield RetentionDecision(
                base_offset=segment.base_offset,
                end_offset=segment.end_offset,
                size_bytes=segment.size_bytes,
                delete=gone,
                rule=rule,
                reason=reason,
                eligible_at_ms=None if gone else eligible,
                roll=gone and self.is_last(segment),
            )

    def stays(self, number: int, going: int) -> str:
        if number == going:
            return "; ".join(self.kept) or "no limit is set"
        return f"the segment at {self.segments[going].base_offset} before it stays"

    def eligible_after(self, segment: Retainable, before: int | None) -> int | None:
        limit = self.policy.max_age_ms
        if limit is None or before is None or (self.is_last(segment) and not segment.size_bytes):
            return None
        time, _ = self.time_of(segment)
        if time < 0 or time + limit + 1 > INT64_MAX:
            return None
        return max(before, time + limit + 1)


def _written(time_ms: int) -> str:
    """Return a time in milliseconds, with its date if `datetime` can express it."""
    try:
        when = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return str(time_ms)
    return f"{time_ms} ({when:%Y-%m-%d %H:%M:%S} UTC)"
