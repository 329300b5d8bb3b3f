"""ProducerIds: ids for idempotent producers that nobody had before, in blocks.

``logstore.producers`` in the root says which id no block has reached; a block is written down there
before the first of its ids is given out, so a crash wastes ids and repeats none.

A broker counts its ids up from 0, in metadata that we never see.  Ours lie far above, from 2**48
on: a directory may go to a broker and come back, and a producer of the one is never taken for a
retry of the other.  The first block of a directory starts by the clock: what was made elsewhere and
copied here, or a side file that was lost, does not bring old ids back either.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from logstore.config import ConfigError
from logstore.files.directory import Directory
from logstore.files.small_file import MISREAD

__all__ = ["ProducerIds"]

FIRST = 1 << 48
PAST_LAST = 1 << 62  # from there on, whoever writes without a coordinator makes up ids
BLOCK = 1000


class ProducerIds:
    """Gives out ids.  Threads may share it.

    `check` is called before the file may change; it raises if the store is not writable.
    """

    NAME = "logstore.producers"

    def __init__(
        self,
        directory: Directory,
        time_ms: Callable[[], int],
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._time_ms = time_ms
        self._check = check
        self._lock = threading.Lock()
        self._next = self._end = 0  # what is left of the block

    def take(self, above: int = -1) -> int:
        """An id that was never given out; greater than `above`, if that could be one of these."""
        self._check()
        with self._lock:
            if self._next >= self._end:
                self._take_block()
            if FIRST <= self._next <= above < PAST_LAST - 2 * BLOCK:
                self._take_block(above + 1)
            taken = self._next
            self._next += 1
            return taken

    def _take_block(self, least: int = 0) -> None:
        start = max(self._read(), least)
        if start + BLOCK > PAST_LAST:
            raise ConfigError(f"{self._directory.path / self.NAME}: no producer ids are left")
        self._directory.replace(self.NAME, json.dumps({"next": start + BLOCK}).encode() + b"\n")
        self._next, self._end = start, start + BLOCK

    def _read(self) -> int:
        try:
            content = json.loads(self._directory.read(self.NAME, 4096))
            return max(FIRST, int(content["next"]))
        except FileNotFoundError:
            return FIRST + max(0, self._time_ms())
        except MISREAD:
            # Written atomically: this is someone's doing, or damage.  The clock is ahead of it.
            return FIRST + max(0, self._time_ms())
