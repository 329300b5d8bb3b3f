"""Clocks: logstore reads every time through one of these.

Record timestamps and roll decisions use wall-clock milliseconds; waiting uses monotonic seconds.
Every decision that deletes or expires something because of its age uses `GuardedClock.now_ms`:
retention, compaction, and the expiry of producers, transactions, transactional ids, committed
offsets and dedupe windows.  New timestamps are always those of the wall clock.

Invariant: the guarded time is never later than the wall clock.  So a timestamp that was written
during a leap makes a record younger, and never older.
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
    """The two times that a clock has."""

    def time_ms(self) -> int:
        """Return milliseconds since 1970."""

    def monotonic(self) -> float:
        """Return seconds that never decrease."""


class SystemClock:
    """The machine's own clock."""

    def time_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        # CLOCK_BOOTTIME, where it exists, counts the time that a machine is suspended: a resume is
        # then no leap.
        return time.clock_gettime(_STEADY)

    def __repr__(self) -> str:
        return "SystemClock()"


class ManualClock:
    """A clock that moves only by `advance` and `leap`: for tests.

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
        """Advance both times by `ms` milliseconds."""
        self.now_ms += ms

    def leap(self, ms: int) -> None:
        """Set the wall clock ahead (or back) by `ms`; the monotonic time does not change."""
        self.now_ms += ms
        self._leapt_ms += ms

    def __repr__(self) -> str:
        return f"ManualClock({self.now_ms})"


class _Seen(NamedTuple):
    """The state of a guard.  Immutable: one assignment replaces it.

    So no lock is needed, and an interrupt or another thread never sees half of a change.
    """

    wall_ms: int
    steady_ms: int
    room_ms: float  # how much more the wall clock may gain before it counts as a leap
    leap_ms: int = 0  # how far the wall clock is ahead of the guarded time
    leapt_at_ms: int = 0  # steady time of the last leap


class ClockGuard:
    """Wall time without leaps ahead of steady (monotonic) time.

    If the wall clock leaps forward (a wrong time server, a typing error), every record seems old at
    once.  Each `look` compares how far the wall clock and the steady clock moved since the last
    one.  The wall clock may gain 1 % of the steady time, plus `tolerance_ms`.  A gain uses up the
    tolerance, and steady time restores it.  A larger gain is a leap.  A leap is subtracted until it
    has lasted for `believe_after_ms` of steady time.  If the clock is set back, the new time counts
    at once, because it makes records younger.
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
        """Return how far the wall clock was ahead of the guarded time at the last `look`."""
        return self._seen.leap_ms

    def look(self, wall_ms: int, steady: float) -> int:
        """Return the guarded time in milliseconds: ages are computed with it."""
        seen = self._seen
        steady_ms = round(steady * 1000)
        # Another thread may have looked with a later time since `steady` was read.
        passed = max(0, steady_ms - seen.steady_ms)
        ahead = wall_ms - seen.wall_ms - passed
        # Steady time restores the tolerance at 1 %.
        room = min(self._tolerance_ms, seen.room_ms + passed / 100)
        leap, leapt_at = seen.leap_ms, seen.leapt_at_ms
        if -self._tolerance_ms <= ahead <= max(room, passed // 100):
            room -= ahead  # a drift; one back gives tolerance back
        else:
            # A leap.  One back shortens an earlier one, and does not start its time again.
            leap, leapt_at = max(0, leap + ahead), steady_ms if ahead > 0 else leapt_at
        if leap and steady_ms - leapt_at >= self._believe_after_ms:
            leap = 0
        # What is left of a leap that was almost undone counts as drift.
        if leap <= room:
            room, leap = room - leap, 0
        room = min(max(0.0, room), self._tolerance_ms)
        # Two threads may both replace the state: one look is lost, which is as if it had not been
        # made.
        self._seen = _Seen(wall_ms, steady_ms, room, leap, leapt_at)
        return wall_ms - leap


class GuardedClock:
    """A clock and its guard: the time that decides what is old enough to be deleted.

    `GuardedClock.of` returns the one of a clock.  All SystemClocks share one, which starts with the
    process.  It finds a leap that happens during the process.  It cannot find an earlier one: the
    machine may have been off for that time.

    Threads may share it.

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
        # `_guarded` holds its values weakly.  While the value lives it keeps its clock alive, so no
        # other clock can have the same id.
        guarded = _guarded.get(id(clock))
        if guarded is None:
            guarded = _guarded.setdefault(id(clock), cls(clock))
        return guarded

    @property
    def leap_ms(self) -> int:
        """Return how far the wall clock was ahead of the last `now_ms`."""
        return self._guard.leap_ms

    def now_ms(self) -> int:
        """Return the wall clock's time without the leap, if there is one."""
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
