"""parse_time, parse_duration, time_text: times in text, in UTC, to the millisecond.

A time is ``now``, ``-15m``, ``+2h30m``, an ISO date or time (UTC unless it has a zone), or
milliseconds since 1970.  `parse_time` reads what `time_text` writes.
"""

from __future__ import annotations

import datetime
import re
import time

__all__ = ["parse_duration", "parse_time", "time_text"]

_UNITS_MS = {
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 7 * 86_400_000,
}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhdw])")
_DURATION = re.compile(rf"(?:{_PART.pattern})+\Z")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def parse_duration(text: str) -> int:
    """Return the milliseconds of a duration.

    >>> parse_duration("1h30m")
    5400000
    """
    if not _DURATION.match(text):
        raise ValueError(f"{text!r} is not a duration: write 500ms, 15m, 1h30m, 7d")
    return round(sum(float(number) * _UNITS_MS[unit] for number, unit in _PART.findall(text)))


def parse_time(text: str, now_ms: int | None = None) -> int:
    """Return a time as milliseconds since 1970.

    >>> parse_time("2026-01-31")
    1769817600000
    >>> parse_time("-15m", now_ms=1_000_000)
    100000
    """
    text = text.strip()
    if now_ms is None:
        now_ms = time.time_ns() // 1_000_000
    if text == "now":
        return now_ms
    if text[:1] in ("-", "+") and _DURATION.match(text[1:]):
        moved = parse_duration(text[1:])
        return now_ms - moved if text[0] == "-" else now_ms + moved
    if re.fullmatch(r"@?[0-9]{1,18}", text):
        return int(text.lstrip("@"))
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time: write now, -15m, 2026-01-31T12:00:00Z, or milliseconds since "
            f"1970 such as 1769817600000"
        ) from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return (when - _EPOCH) // datetime.timedelta(milliseconds=1)


def time_text(time_ms: int) -> str:
    """Return a time as ISO text in UTC, or the number if `datetime` cannot express it.

    >>> time_text(1769817600123)
    '2026-01-31T00:00:00.123Z'
    """
    try:
        when = _EPOCH + datetime.timedelta(milliseconds=time_ms)
    except OverflowError:
        return str(time_ms)
    return when.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
