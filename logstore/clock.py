"""Clocks: logstore reads every time through one of these.

Record timestamps and roll decisions use wall-clock milliseconds; waiting uses monotonic seconds.
Every decision that forgets something because of its age uses `GuardedClock.now_ms`: retention,
compaction, and the expiry of producers, transactions, transactional ids, committed offsets and
dedupe windows.  A new timestamp still is the time of the wall clock.  The guarded time is never
later than the wall clock, so a timestamp that was written during a leap only makes its owner
younger.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import NamedTuple, Protocol

__all__ = ["Clock", "ClockGuard", "GuardedClock", "ManualClock", "SystemClock"]

log = logging.getLogger("logstore.clock")

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


class _Seen(NamedTuple):
    """What a guard knows.  One assignment replaces it: an interrupt or a thread splits no look."""

    wall_ms: int
    steady_ms: int
    room_ms: float  # how far the wall clock may still run ahead without a leap
    leap_ms: int = 0  # how far the wall clock is ahead of the time that is used
    leapt_at_ms: int = 0  # steady time of the last leap


class ClockGuard:
    """Wall time that does not run ahead of steady time.

    A clock that leaps forward (a wrong time server, a typing error) would make every record look
    old at once.  Each look compares how far the wall clock and the steady clock moved since the
    last look.  The wall clock may gain 1 % of the steady time, and `tolerance_ms` on top: a gain
    uses the tolerance up, and steady time restores it.  A larger gain is a leap.  A leap is
    subtracted until it has lasted for `believe_after_ms` of steady time.  A clock that is set back
    is used at once: it makes records look younger.
    """

    def __init__(
        self,
        wall_ms: int,
        steady: float,
        *,
        tolerance_ms: int = 300_000,
        believe_after_ms: int = 86_400_000,
    ) -> None:
        self._tolerance_ms = tolerance_ms
        self._believe_after_ms = believe_after_ms
        self._seen = _Seen(wall_ms, round(steady * 1000), tolerance_ms)

    @property
    def leap_ms(self) -> int:
        """How far the wall clock is ahead, as of the last look."""
        return self._seen.leap_ms

    def look(self, wall_ms: int, steady: float) -> int:
        """Return the time to judge ages by, in milliseconds."""
        seen = self._seen
        steady_ms = round(steady * 1000)
        passed = max(0, steady_ms - seen.steady_ms)
        ahead = wall_ms - seen.wall_ms - passed
        room = min(self._tolerance_ms, seen.room_ms + passed / 100)
        leap, leapt_at = seen.leap_ms, seen.leapt_at_ms
        if -self._tolerance_ms <= ahead <= max(room, passed // 100):
            room -= ahead
        else:
            leap, leapt_at = max(0, leap + ahead), steady_ms if ahead > 0 else leapt_at
        if leap and steady_ms - leapt_at >= self._believe_after_ms:
            leap = 0
        if leap <= room:
            room, leap = room - leap, 0
        room = min(max(0.0, room), self._tolerance_ms)
        self._seen = _Seen(wall_ms, steady_ms, room, leap, leapt_at)
        return wall_ms - leap


class GuardedClock:
    """A clock and its guard: the time that decides what is old enough to be forgotten.

    `GuardedClock.of` returns the one of a clock; all SystemClocks share one, which is as old as the
    process.  A leap inside of a process is noticed.  A process that starts has nothing to compare
    its clock with: the machine may have been off for that long.

    Threads share it.

    >>> clock = ManualClock(1000)
    >>> guarded = GuardedClock.of(clock)
    >>> clock.advance(500)
    >>> clock.leap(86_400_000)
    >>> guarded.now_ms(), guarded.leap_ms
    (1500, 86400000)
    """

    def __init__(self, clock: Clock) -> None:
        """Use `GuardedClock.of`."""
        self.clock = clock
        self._guard = ClockGuard(clock.time_ms(), clock.monotonic())

    @classmethod
    def of(cls, clock: Clock | None) -> GuardedClock:
        """Return the guarded clock of a clock; None: of the machine's own."""
        if clock is None or isinstance(clock, SystemClock):
            return _system
        # The value keeps the clock alive, so no other clock can have its id.
        guarded = _guarded.get(id(clock))
        if guarded is None:
            guarded = _guarded.setdefault(id(clock), cls(clock))
        return guarded

    @property
    def leap_ms(self) -> int:
        """How far the wall clock is ahead of `now_ms`, as of the last look."""
        return self._guard.leap_ms

    def now_ms(self) -> int:
        """Return the wall clock's time, less what it leapt ahead."""
        before = self._guard.leap_ms
        now = self._guard.look(self.clock.time_ms(), self.clock.monotonic())
        leap = self._guard.leap_ms
        if leap and not before:
            log.warning(
                "the clock leapt %d ms ahead of the time that passed: no age is judged by it until "
                "it is set back, or has lasted for a day",
                leap,
            )
        return now

    def __repr__(self) -> str:
        return f"GuardedClock({self.clock!r})"


_system = GuardedClock(SystemClock())
_guarded: weakref.WeakValueDictionary[int, GuardedClock] = weakref.WeakValueDictionary()
