"""Leadership: the epochs of a log that is written, and the file that keeps them.

The epoch that appends carry, which a leader was promised, and the history: which epoch began where.
An epoch is in the file before the first record that carries it can be seen.  A cut may take the
latest out of the history; what was promised stays, and the next append puts it back.

The caller holds the log's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from logstore.files.directory import Directory
from logstore.log.epochs import LeaderEpochs, read_leader_epochs, write_leader_epochs
from logstore.recovery.loader import LoadedLog

__all__ = ["EPOCH_MAX", "Leadership"]

log = logging.getLogger("logstore.partition")

EPOCH_MAX = (1 << 31) - 1


class Leadership:
    """The epoch of the next append, and how it came to that."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._take(LeaderEpochs(), 0)

    def _take(self, history: LeaderEpochs, epoch: int) -> None:
        self.history = history
        self.epoch = epoch
        # Whether the history has what appends carry: they may not go before it does.
        self.noted = history.latest == epoch

    def adopt(self, loaded: LoadedLog) -> None:
        """What loading found; nothing is written."""
        # What was promised stays so, even if no record of that epoch is there (yet, or any more).
        self._take(loaded.epochs, loaded.leader_epoch)

    def begin(self, loaded: LoadedLog) -> None:
        """Make history, promise and file agree with a log that will be appended to."""
        history = loaded.epochs
        history.truncate_from_end(loaded.contents.next_offset)
        history.truncate_from_start(loaded.start_offset)
        if history.latest != loaded.leader_epoch:
            history.assign(loaded.leader_epoch, loaded.contents.next_offset)
        if read_leader_epochs(self._directory) != history.entries:
            write_leader_epochs(self._directory, history.entries)
        self.adopt(loaded)

    def assign(self, epoch: int, offset: int) -> None:
        """Write down that `epoch` starts at `offset`: before the first record that carries it."""
        changed = LeaderEpochs(self.history.entries)
        if changed.assign(epoch, offset):
            write_leader_epochs(self._directory, changed.entries)
        self._take(changed, max(self.epoch, epoch))

    def note(self, starts: Iterable[tuple[int, int]]) -> None:
        """Batches with these epochs are about to be written, at these offsets."""
        for epoch, offset in starts:
            if epoch != self.history.latest:
                self.assign(epoch, offset)

    def begins_at_or_above(self, end_offset: int) -> bool:
        """Whether a cut there takes an epoch out of the history."""
        return LeaderEpochs(self.history.entries).truncate_from_end(end_offset)

    def cut(self, end_offset: int) -> None:
        """Forget epochs that start at or above a cut: before it is made, even if it cuts nothing.

        The next append puts its own back, at the offset it then has.
        """
        changed = LeaderEpochs(self.history.entries)
        if changed.truncate_from_end(end_offset):
            write_leader_epochs(self._directory, changed.entries)
            self._take(changed, self.epoch)

    def forget_below(self, start_offset: int, name: str) -> None:
        """The log starts there now."""
        if self.history.truncate_from_start(start_offset):
            try:
                write_leader_epochs(self._directory, self.history.entries)
            except OSError as error:  # the next open does the same to what it reads
                log.warning("%s: could not write its leader epochs: %s", name, str(error))
