"""RetentionPolicy: which segments of a log may go, and why.

Pure: from facts about segments and the time, one decision per segment with its reason in words.
Kafka's rules: what lies below the log's start goes; then the oldest segments beyond the byte limit;
then those whose newest record is too old.  Each rule walks from the oldest segment on and stops at
the first it has to keep, so that a log never gets a hole.  A limit on records is logstore's own.

Nothing is deleted here; ``partition.enforce`` does that.

Time is looked at twice before data is thrown away for its age.  `ClockGuard` notices a clock that
leapt ahead of the time that really passed.  And a segment whose newest timestamp is no plausible
time of this computer's life (seconds taken for milliseconds, a zero) is judged by the time of its
file instead.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from logstore.config import INT64_MAX, ConfigError, PartitionConfig

__all__ = ["RetentionDecision", "RetentionPolicy", "SegmentFacts"]

Rule = Literal["start", "bytes", "records", "age"]

# 1980-01-01.  Every count of seconds until the year 11970 lies below it when read as milliseconds.
PLAUSIBLE_FROM_MS = 315_532_800_000


class Retainable(Protocol):
    """What a policy looks at: a Segment has it all."""

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
    """A segment as a policy sees it, by value."""

    base_offset: int
    end_offset: int
    size_bytes: int
    max_timestamp: int  # -1: its records carry no times
    modified_ms: int = -1  # of the .log file; counts where the records' times do not


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetentionDecision:
    """What becomes of one segment, and why."""

    base_offset: int
    end_offset: int
    size_bytes: int
    delete: bool
    rule: Rule | None  # which limit it is beyond; None for one that stays
    reason: str
    # For one that stays: when its age, and that of all before it, will let it go.
    eligible_at_ms: int | None = None
    roll: bool = False  # it is the active one: a new segment is started first

    def __str__(self) -> str:
        verb = "delete" if self.delete else "keep"
        return f"{verb} [{self.base_offset}, {self.end_offset}): {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """How much of a log to keep.  None is no limit; the first limit that is passed decides.

    >>> policy = RetentionPolicy(max_bytes=100)
    >>> old = SegmentFacts(base_offset=0, end_offset=5, size_bytes=90, max_timestamp=0)
    >>> new = SegmentFacts(base_offset=5, end_offset=9, size_bytes=120, max_timestamp=0)
    >>> for decision in policy.plan([old, new], now=1000):
    ...     print(decision)
    delete [0, 5): 210 bytes in all; without its 90 there are still 120, at least max_bytes 100
    keep [5, 9): without its 120 bytes of 120 there would be less than max_bytes 100
    """

    # Delete a segment when its newest record is older than this.
    max_age_ms: int | None = None
    # Delete from the old end while at least this much stays: between this and one segment more.
    max_bytes: int | None = None
    # The same by offsets; where compaction has removed records, fewer are left than it says.
    max_records: int | None = None
    # A newest timestamp below this is not believed; the file's own time counts.  0: believe all.
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
        """What ``retention.ms`` and ``retention.bytes`` say, if ``cleanup.policy`` deletes at all.

        Without "delete" in it nothing goes but what lies below the log's start.
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
        """One decision per segment, oldest first; the last segment is the active one.

        `now` is in milliseconds.  Nothing at or above `high_watermark` goes (None: the end).
        `leap_ms` is for the words only: how far the clock is ahead of `now`, which was corrected.
        """
        return _Plan(self, segments, now, start_offset, high_watermark, leap_ms).decide()


class _Plan:
    """One walk of each rule over the segments."""

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
        self.reasons: list[tuple[Rule, str]] = []  # of the segments that go, oldest first
        self.kept: list[str] = []  # why the first that stays does: what each rule says

    def decide(self) -> list[RetentionDecision]:
        self.pass_start()
        self.pass_amount("bytes", self.policy.max_bytes)
        self.pass_amount("records", self.policy.max_records)
        self.pass_age()
        return list(self.decisions())

    # ---- the rules: each goes on behind what the one before let go ----

    def candidates(self) -> Iterable[Retainable]:
        """Segments that the guards allow to go, from the first that stays so far."""
        while len(self.reasons) < len(self.segments):
            segment = self.segments[len(self.reasons)]
            if self.is_last(segment) and segment.size_bytes == 0:
                self.kept = ["it is empty, and where the next record goes"]
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
        self.kept = []  # it was about this one

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
                self.kept.append("neither its records nor its file tell how old it is")
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
                f"{self.leap_ms} ms ahead of the time that passed: pass now= to believe it"
            )
        if age < 0:
            return (
                f"{which} {_written(time)} lies {-age} ms in the future (max_age_ms is {limit}); "
                f"message.timestamp.after.max.ms would refuse such records"
            )
        return f"{which} {_written(time)} is {age} ms old, max_age_ms is {limit}"

    def time_of(self, segment: Retainable) -> tuple[int, str]:
        """When its newest record was made, and what says so."""
        newest = segment.max_timestamp
        floor = self.policy.plausible_from_ms
        if newest < 0:
            return segment.modified_ms, "its records have no times; its file's time"
        # A clock that is itself below the floor (a test's, a machine without one) proves nothing.
        if newest < floor <= self.now and segment.modified_ms >= floor:
            return segment.modified_ms, (
                f"its newest timestamp {newest} is no plausible time (below plausible_from_ms "
                f"{floor}); its file's time"
            )
        return newest, "its newest record's time"

    # ---- the outcome ----

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
    """A time as a person reads it, where the calendar knows it."""
    try:
        when = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return str(time_ms)
    return f"{time_ms} ({when:%Y-%m-%d %H:%M:%S} UTC)"
