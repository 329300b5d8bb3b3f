"""Lag: the distance from a reader to the end of a log, in records, bytes and seconds.

The values are read from the log and not interpolated: the timestamp of the oldest unread record
gives the seconds, and the offset index gives the bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import math

from logstore.errors import LogStoreError
from logstore.partition.partition import Partition

__all__ = ["Lag", "Pace", "lag_of"]

PACE_SECONDS = 30.0  # a rate is measured over this time


@dataclasses.dataclass(frozen=True, slots=True)
class Lag:
    """The distance from a reader to the end of a partition.

    `records` counts offsets; some of them may have no record, because of compaction or markers.
    `bytes` is the stored size from the index entry at or before the position to the end.  `seconds`
    is the age of the oldest unread record.  `rate` is by how many records a second the distance
    became smaller recently; it is negative if the distance grows, and None if it is not known yet.
    `catch_up_seconds` is `records` / `rate`: 0 at the end, infinite if `rate` is not positive.
    """

    records: int
    bytes: int
    seconds: float
    rate: float | None = None
    catch_up_seconds: float | None = None


class Pace:
    """The number of unread records of a reader, sampled over the last 30 seconds."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[float, int]] = collections.deque()

    def note(self, now: float, left: int) -> float | None:
        """Add a sample: `left` records are unread now.  Return the rate at which it decreases."""
        samples = self._samples
        samples.append((now, left))
        while len(samples) > 2 and samples[0][0] < now - PACE_SECONDS:
            samples.popleft()
        began, before = samples[0]
        return None if now <= began else (before - left) / (now - began)


def lag_of(log: Partition, position: int, *, now_ms: int, end: int | None = None,
           rate: float | None = None) -> Lag:  # fmt: skip
    """Return the lag of a reader whose next offset to read is `position`."""
    last = log.high_watermark if end is None else end
    position = max(position, log.start_offset)
    records = max(0, last - position)
    if records == 0:
        return Lag(0, 0, 0.0, rate, 0.0)
    oldest = next(iter(log.scan(position, last, max_records=1, on_lost="skip")), None)
    seconds = 0.0 if oldest is None else max(0.0, (now_ms - oldest.timestamp) / 1000)
    catch_up = None if rate is None else records / rate if rate > 0 else math.inf
    return Lag(records, _bytes_behind(log, position), seconds, rate, catch_up)


def _bytes_behind(log: Partition, position: int) -> int:
    """Return the bytes from a position to the end.

    The index is sparse: its entry can be before the batch of the position, and the result larger.
    """
    total = 0
    for segment in reversed(log.segments):
        if segment.base_offset > position:
            total += segment.size_bytes
            continue
        try:
            _, at = segment.offset_index.lookup(position)
        except (LogStoreError, OSError):
            at = 0  # the segment was deleted or cannot be read: count all of it
        return total + max(0, segment.size_bytes - at)
    return total
