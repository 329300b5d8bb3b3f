"""Lag: how far behind a reader is, in records, bytes and seconds, and when it will have caught up.

Exact, because the log can be asked: the record at the reader's position says how old the oldest
unread record is, and the index how many bytes lie behind it.  Nothing is interpolated.
"""

from __future__ import annotations

import collections
import dataclasses
import math

from logstore.errors import LogStoreError
from logstore.partition.partition import Partition

__all__ = ["Lag", "Pace", "lag_of"]

PACE_SECONDS = 30.0  # how far back a rate looks


@dataclasses.dataclass(frozen=True, slots=True)
class Lag:
    """How far behind.

    `records` counts offsets, some of which compaction or markers may have left without a record.
    `bytes` is what lies between here and the end, as stored, to the next index entry.  `seconds` is
    how old the oldest unread record is.  `rate` is records a second by which the reader has come
    closer to the end of late (negative: the end runs away), None before that can be known;
    `catch_up_seconds` follows from it: 0 when there is nothing left, infinite when it never will.
    """

    records: int
    bytes: int
    seconds: float
    rate: float | None = None
    catch_up_seconds: float | None = None


class Pace:
    """Where a reader was, and the end, over the last half minute."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[float, int]] = collections.deque()

    def note(self, now: float, left: int) -> float | None:
        """`left` records are unread now; the rate at which they become fewer."""
        samples = self._samples
        samples.append((now, left))
        while len(samples) > 2 and samples[0][0] < now - PACE_SECONDS:
            samples.popleft()
        began, before = samples[0]
        return None if now <= began else (before - left) / (now - began)


def lag_of(log: Partition, position: int, *, now_ms: int, end: int | None = None,
           rate: float | None = None) -> Lag:  # fmt: skip
    """The lag of a reader that wants the record at `position` next."""
    last = log.end_offset if end is None else end
    position = max(position, log.start_offset)
    records = max(0, last - position)
    if records == 0:
        return Lag(0, 0, 0.0, rate, 0.0)
    oldest = next(iter(log.scan(position, last, max_records=1, on_lost="skip")), None)
    seconds = 0.0 if oldest is None else max(0.0, (now_ms - oldest.timestamp) / 1000)
    catch_up = None if rate is None else records / rate if rate > 0 else math.inf
    return Lag(records, _bytes_behind(log, position), seconds, rate, catch_up)


def _bytes_behind(log: Partition, position: int) -> int:
    """Bytes from the batch of a position to the end, by the index: a hint that can be early."""
    total = 0
    for segment in reversed(log.segments):
        if segment.base_offset > position:
            total += segment.size_bytes
            continue
        try:
            _, at = segment.offset_index.lookup(position)
        except (LogStoreError, OSError):
            at = 0  # deleted just now, or not readable: then all of it
        return total + max(0, segment.size_bytes - at)
    return total
