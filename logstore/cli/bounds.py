"""Bound: a start or an end of a range of records, as it is written on the command line.

A bound is ``start``, ``end``, an offset, ``-10`` (ten offsets before the end), or a time: ``now``,
``-15m``, an ISO time, milliseconds since 1970.  A plain number is an offset below 100,000,000,000
and a time (in 1973 or later) from there on; ``offset:N`` and ``@N`` force one or the other.

A bound is parsed once and resolved to an offset in each partition separately.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import click

from logstore.times import parse_time

if TYPE_CHECKING:
    from logstore import Partition

    Parameter = click.ParamType[Any]
else:
    Parameter = click.ParamType  # generic in later versions only

__all__ = ["BOUND", "DURATION", "TIME", "Bound"]

TIMES_FROM = 10**11  # a plain number from here on is a time in ms, below it an offset


@dataclasses.dataclass(frozen=True)
class Bound:
    """The start, the end, an offset, a count back from the end, or a time."""

    kind: str
    number: int = 0

    @classmethod
    def parse(cls, text: str, now_ms: int | None = None) -> Bound:
        """Parse a bound.  Raises ValueError if `text` is none of the forms above."""
        text = text.strip()
        if text in ("start", "earliest", "beginning"):
            return cls("start")
        if text in ("end", "latest"):
            return cls("end")
        if re.fullmatch(r"-[0-9]{1,18}", text):
            return cls("back", int(text[1:]))
        if re.fullmatch(r"offset:[0-9]{1,18}", text):
            return cls("offset", int(text[7:]))
        if re.fullmatch(r"[0-9]{1,18}", text) and int(text) < TIMES_FROM:
            return cls("offset", int(text))
        return cls("time", parse_time(text, now_ms))

    def of(self, log: Partition) -> int:
        """Return the offset of this bound in a partition."""
        if self.kind == "start":
            return log.start_offset
        if self.kind == "end":
            return log.end_offset
        if self.kind == "back":
            return max(log.start_offset, log.end_offset - self.number)
        if self.kind == "time":
            return log.offset_for_time(self.number)
        return self.number


class BoundType(Parameter):
    name = "where"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, Bound):
            return value
        try:
            return Bound.parse(value)
        except ValueError as error:
            self.fail(f"{error}; or start, end, an offset, -N", param, ctx)


class TimeType(Parameter):
    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, int):
            return value
        try:
            return parse_time(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class DurationType(Parameter):
    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        from logstore.times import parse_duration

        if isinstance(value, int):
            return value
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


BOUND = BoundType()
TIME = TimeType()
DURATION = DurationType()
