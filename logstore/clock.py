"""Clocks: every time that logstore looks at comes in through one of these.

Record timestamps and roll decisions use wall-clock milliseconds; waiting uses monotonic seconds.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]

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
