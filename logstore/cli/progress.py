"""Progress: a line on stderr that is updated in place.  Prints nothing if stderr is no terminal.

It may be called for every batch: it reads the clock and writes at most five times a second.
"""

from __future__ import annotations

import sys
import time

from logstore.cli.text import size_text

__all__ = ["Progress"]

FIRST_AFTER = 0.5  # seconds: shorter work shows no line
EVERY = 0.2  # seconds between updates


class Progress:
    """A line such as ``reading 12.0 MiB of 1.0 GiB (340.1 MiB/s)``.  Use it in a ``with``."""

    def __init__(self, what: str, *, unit: str = "records", total: int | None = None) -> None:
        self.what = what
        self.unit = unit
        self.total = total
        self.done = 0
        self._shown = False
        self._began = time.monotonic()
        self._next = self._began + FIRST_AFTER
        self._live = sys.stderr.isatty()

    def add(self, count: int = 1) -> None:
        """Add `count` to the work done."""
        self.done += count
        if self._live:
            self._look()

    def reached(self, done: int, total: int) -> None:
        """Set the work done and the total."""
        self.done, self.total = done, total
        if self._live:
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY
        self._shown = True
        text = f"{self.what} {self._amount(self.done)}"
        if self.total:
            text += f" of {self._amount(self.total)}"
        text += f" ({self._amount(round(self.done / max(now - self._began, 1e-9)))}/s)"
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    def _amount(self, count: int) -> str:
        return size_text(count) if self.unit == "bytes" else f"{count:,} {self.unit}"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
