"""Filters that Spark pushes down, converted to bounds and names for planning.

Spark pushes down a conjunction.  Filters on topics and partitions select names; filters on offsets
and times become half-open bounds.  These are exact, so Spark does not filter again.  Other filters
are returned to Spark, which applies them to the rows.  Kafka's times are in milliseconds, Spark's
in microseconds: a bound between two milliseconds is rounded to the millisecond that selects the
same records.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark_logstore.topics import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

__all__ = ["Pushed"]

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
MICROSECOND = datetime.timedelta(microseconds=1)
NEVER_NULL = frozenset({"topic", "partition", "offset", "timestamp", "timestampType"})

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "EqualTo": lambda a, b: a == b,
    "EqualNullSafe": lambda a, b: a == b,
    "GreaterThan": lambda a, b: a > b,
    "GreaterThanOrEqual": lambda a, b: a >= b,
    "LessThan": lambda a, b: a < b,
    "LessThanOrEqual": lambda a, b: a <= b,
    "In": lambda a, b: a in b,
    "StringStartsWith": lambda a, b: a.startswith(b),
    "StringEndsWith": lambda a, b: a.endswith(b),
    "StringContains": lambda a, b: b in a,
}


@dataclass(slots=True)
class Pushed:
    """What is known of the rows that are wanted."""

    start: int = 0
    end: int = INT64_MAX
    time_start: int = INT64_MIN  # ms
    time_end: int = INT64_MAX
    rows_max: int | None = None
    # (column, comparison, value, wanted outcome), for topic and partition
    names: list[tuple[str, str, Any, bool]] = field(default_factory=list)

    @property
    def timed(self) -> bool:
        """Whether times are bounded."""
        return self.time_start > INT64_MIN or self.time_end < INT64_MAX

    def wants(self, which: TopicPartition) -> bool:
        """Whether anything of a partition is wanted, by its name."""
        values = {"topic": which.topic, "partition": which.number}
        return all(
            COMPARISONS[comparison](values[column], value) is outcome
            for column, comparison, value, outcome in self.names
        )

    def push(self, filters: Iterable[Filter], columns: dict[str, str]) -> list[Filter]:
        """Take what can be taken; what Spark must still do is returned.

        `columns` leads from the query's names to the source's.
        """
        return [each for each in filters if not self._take(each, columns)]

    def _take(self, given: Any, columns: dict[str, str]) -> bool:
        outcome = True
        if type(given).__name__ == "Not":
            outcome, given = False, given.child
        kind = type(given).__name__
        attribute = tuple(getattr(given, "attribute", ()))
        column = columns.get(attribute[0]) if len(attribute) == 1 else None
        if column is None:
            return False
        if kind == "IsNotNull":
            return outcome and column in NEVER_NULL
        value = getattr(given, "value", None)
        if kind not in COMPARISONS or value is None:
            return False
        if column in ("topic", "partition"):
            if kind == "In" and None in value:
                return False
            self.names.append((column, kind, value, outcome))
            return True
        if not outcome:
            return False
        if column == "offset":
            return self._narrow_offsets(kind, value)
        return column == "timestamp" and self._narrow_times(kind, value)

    def _narrow_offsets(self, kind: str, value: Any) -> bool:
        if kind == "In":
            known = [each for each in value if each is not None]
            if known:
                self._cut(min(known), max(known) + 1)
            return False  # narrowed, but Spark picks the rows
        bounds = _bounds(kind, value, value)
        if bounds is None:
            return False
        self._cut(*bounds)
        return True

    def _cut(self, start: int, end: int) -> None:
        self.start, self.end = max(self.start, start), min(self.end, end)

    def _narrow_times(self, kind: str, value: Any) -> bool:
        values = value if kind == "In" else [value]
        if not all(isinstance(each, datetime.datetime) for each in values):
            return False
        # The last millisecond at or before, and the first at or after.
        floors = [_microseconds(each) // 1000 for each in values]
        ceilings = [-(-_microseconds(each) // 1000) for each in values]
        if kind == "In":
            if values:
                self._cut_times(min(ceilings), max(floors) + 1)
            return False
        bounds = _bounds(kind, floors[0], ceilings[0])
        if bounds is None:
            return False
        self._cut_times(*bounds)
        return True

    def _cut_times(self, start: int, end: int) -> None:
        self.time_start = max(self.time_start, start)
        self.time_end = min(self.time_end, end)


def _bounds(kind: str, floor: int, ceiling: int) -> tuple[int, int] | None:
    """The whole numbers that compare so with one between `floor` and `ceiling`: [start, end)."""
    if kind in ("EqualTo", "EqualNullSafe"):
        return ceiling, floor + 1
    if kind == "GreaterThan":
        return floor + 1, INT64_MAX
    if kind == "GreaterThanOrEqual":
        return ceiling, INT64_MAX
    if kind == "LessThan":
        return INT64_MIN, ceiling
    if kind == "LessThanOrEqual":
        return INT64_MIN, floor + 1
    return None


def _microseconds(when: datetime.datetime) -> int:
    """Since 1970; a time without a zone is UTC, as in a column of such times."""
    aware = when.replace(tzinfo=datetime.UTC) if when.tzinfo is None else when
    return (aware - EPOCH) // MICROSECOND
