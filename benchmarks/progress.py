"""Progress: what is being measured now, on stderr; one moving line on a terminal."""

from __future__ import annotations

import sys
from typing import TextIO


class Progress:
    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._moving = self._stream.isatty()
        self._heading = ""

    def start(self, heading: str) -> None:
        self._heading = heading
        if not self._moving:
            print(heading, file=self._stream, flush=True)

    def step(self, text: str) -> None:
        if self._moving:
            line = f"{self._heading}: {text}"
            self._stream.write(f"\r\x1b[K{line[:100]}")
            self._stream.flush()

    def note(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        if self._moving:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
