"""SchedulerSettings: the settings of the one scheduler of a store, checked."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from logstore.config import ConfigError
from logstore.times import parse_duration
from logstore.work_errors import ScheduleError

__all__ = ["SchedulerSettings", "duration_ms"]

LATE = ("deliver", "skip")


_parsed = functools.lru_cache(maxsize=1024)(parse_duration)  # most calls give the same few texts


def duration_ms(given: float | str) -> int:
    """Return the milliseconds of a duration: seconds, or text such as "1h30m".

    Raises ScheduleError if it is neither.
    """
    try:
        # Rounded up: a delay is never shorter than it was given.
        return _parsed(given) if isinstance(given, str) else -int(-given * 1000 // 1)
    except (TypeError, ValueError, OverflowError) as error:
        raise ScheduleError(
            f"{given!r} is not a duration: give seconds, or text such as '30m' or '1h30m'"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """See `Scheduler.of`."""

    loaded_max: int = 500_000  # tickets in memory are at most twice as many, 24 bytes each
    lookahead: float = 2.0  # seconds before the end of the loaded tickets to load more
    batch_max: int = 1000  # records of one transaction; larger = faster, seen later
    batch_ms: int = 2  # wait for more due records; larger = fewer transactions, later
    late: str = "deliver"  # records that came due while no scheduler ran
    max_delay: str = "3650d"  # a longer delay is refused: it is a mistake in the unit

    def __post_init__(self) -> None:
        for name in ("loaded_max", "batch_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        for name in ("lookahead", "batch_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)!r}")
        for name in ("late", "max_delay"):
            given = getattr(self, name)
            if name == "late" and given in LATE:
                continue
            try:
                duration_ms(given)
            except ScheduleError as error:
                words = " or one of 'deliver', 'skip'" if name == "late" else ""
                raise ConfigError(f"{name} is a duration{words}, not {given!r}") from error

    @property
    def max_delay_ms(self) -> int:
        """Return `max_delay` in milliseconds."""
        return duration_ms(self.max_delay)

    def late_ms(self) -> int | None:
        """Return the age from which a late record is not delivered, or None if there is none."""
        if self.late in LATE:
            return 0 if self.late == "skip" else None
        return duration_ms(self.late)
