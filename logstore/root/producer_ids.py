"""ProducerIds: new ids for idempotent producers, reserved in blocks.

``logstore.producers`` in the root has the first id after the last reserved block.  A block is
written there before the first of its ids is given out, so a crash wastes ids and repeats none.

A broker counts its ids up from 0, in metadata that logstore never reads.  Ours start at 2**48.  So
if a broker owns the directory for a while, a producer of the broker is never taken for a retry of
one of ours.  The first block of a directory starts at the clock's time: ids do not repeat either if
the file is lost, or if partitions are copied from another store.
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
PAST_LAST = 1 << 62  # ids from here on are for writers without a coordinator
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
        self._allocate: Callable[[], range] | None = None
        self._lock = threading.Lock()
        self._next = self._end = 0  # the ids of the block that are not taken yet

    def allocate_by(self, allocate: Callable[[], range] | None) -> None:
        """Take blocks of ids from `allocate` from now on, and not from the file; None: the file.

        For a node of a cluster, which shares the ids with other nodes.  `allocate` returns a block
        that no other caller ever gets.  It may wait for the network; threads that take an id wait
        for it.  The rest of the present block is not used.
        """
        with self._lock:
            self._allocate = allocate
            self._next = self._end = 0

    def take(self, above: int = -1) -> int:
        """Return an id that was never given out.

        It is greater than `above`, if `above` is in the range of these ids.
        """
        self._check()
        with self._lock:
            if self._next >= self._end:
                self._take_block()
            # `allocate` alone is responsible that ids of a cluster do not repeat.
            if self._allocate is None and FIRST <= self._next <= above < PAST_LAST - 2 * BLOCK:
                self._take_block(above + 1)
            taken = self._next
            self._next += 1
            return taken

    def _take_block(self, least: int = 0) -> None:
        if self._allocate is not None:
            block = self._allocate()
            if not block or block.step != 1 or block.start < 0:
                raise ConfigError(f"{block} is no block of producer ids")
            self._next, self._end = block.start, block.stop
            return
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
            # The file is replaced atomically, so it was edited or damaged.  Ids by the clock are
            # above those that were given out.
            return FIRST + max(0, self._time_ms())
