"""Clocks: every time that logstore looks at comes in through one of these.

Record timestamps and roll decisions use wall-clock milliseconds; waiting uses monotonic seconds.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ClockGuard", "ManualClock", "SystemClock"]

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """What a clock must offer."""

    def time_ms(self) -> int:
        """Milliseconds since 1970."""

    def monotonic(self) -> float:
        """Seconds that never go back."""


class SystemClock:
    """The machine's own clock."""

    def time_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        # Counts the time that a machine sleeps, where that can be had: waking up is no leap.
        return time.clock_gettime(_STEADY)

    def __repr__(self) -> str:
        return "SystemClock()"


class ManualClock:
    """A clock that stands still until told: for tests.

    >>> clock = ManualClock(1000)
    >>> clock.advance(500)
    >>> clock.time_ms()
    1500
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms
        self._leapt_ms = 0

    def time_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return (self.now_ms - self._leapt_ms) / 1000

    def advance(self, ms: int) -> None:
        """Let `ms` milliseconds pass."""
        self.now_ms += ms

    def leap(self, ms: int) -> None:
        """Set the wall clock ahead (or back) by `ms`, while no time passes."""
        self.now_ms += ms
        self._leapt_ms += ms

    def __repr__(self) -> str:
        return f"ManualClock({self.now_ms})"


class ClockGuard:
    """Wall time that does not run ahead of steady time.

    A clock that leaps forward (a wrong server, a typing error) would make every record look old at
    once.  Each look compares how far the wall clock and the steady clock moved since the last one;
    what the wall clock is ahead by more than the tolerance is a leap, and is taken off until it has
    lasted for `believe_after_ms` of steady time.  A clock that goes back is always believed: it
    makes records look younger.
    """

    def __init__(
        self,
        wall_ms: int,
        steady: float,
        *,
        tolerance_ms: int = 300_000,
        believe_after_ms: int = 86_400_000,
    ) -> None:
        self._wall_ms = wall_ms
        self._steady_ms = round(steady * 1000)
        self._tolerance_ms = tolerance_ms
        self._believe_after_ms = believe_after_ms
        self._leapt_at_ms = 0  # steady time of the leap that is taken off
        self.leap_ms = 0  # how far the wall clock is ahead, as of the last look

    def look(self, wall_ms: int, steady: float) -> int:
        """The time to judge ages by, in milliseconds."""
        steady_ms = round(steady * 1000)
        passed = max(0, steady_ms - self._steady_ms)
        moved = wall_ms - self._wall_ms
        self._wall_ms, self._steady_ms = wall_ms, steady_ms
        ahead = moved - passed
        if abs(ahead) > max(self._tolerance_ms, passed // 100):
            if ahead > 0 and not self.leap_ms:
                self._leapt_at_ms = steady_ms
            self.leap_ms = max(0, self.leap_ms + ahead)
        if self.leap_ms and steady_ms - self._leapt_at_ms >= self._believe_after_ms:
            self.leap_ms = 0
        if self.leap_ms <= self._tolerance_ms:
            self.leap_ms = 0
        return wall_ms - self.leap_ms
