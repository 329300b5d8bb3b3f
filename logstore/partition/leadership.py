"""Leadership: the leader epochs of a log that is written, and the file that holds them.

State: the epoch that appends carry, and the history (which epoch began at which offset).  An epoch
is in the file before the first record that carries it can be read.  A cut may remove the latest
epoch from the history.  `epoch` stays, and the next append adds it to the history again.

A history is never changed after it is published: a change publishes another object.  So readers use
`history` without a lock.  The caller of every method that changes it holds the log's lock.
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
    """The epoch of the next append, and the history of epochs."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._take(LeaderEpochs(), 0)

    def _take(self, history: LeaderEpochs, epoch: int) -> None:
        self.history = history
        self.epoch = epoch
        # Whether the history has `epoch`.  If not, `assign` is called before the next append.
        self.noted = history.latest == epoch

    def adopt(self, loaded: LoadedLog) -> None:
        """Take the epochs that loading found.  Write nothing."""
        # The epoch counts even if the log has no record of it, or none any more.
        self._take(loaded.epochs, loaded.leader_epoch)

    def begin(self, loaded: LoadedLog) -> None:
        """Make history, epoch and file agree with a log that will be appended to."""
        history = LeaderEpochs(loaded.epochs.entries)  # a sleeping log has published the other
        # Epochs of records that recovery cut, or that retention deleted.
        history.truncate_from_end(loaded.contents.next_offset)
        history.truncate_from_start(loaded.start_offset)
        if history.latest != loaded.leader_epoch:
            history.assign(loaded.leader_epoch, loaded.contents.next_offset)
        if read_leader_epochs(self._directory) != history.entries:
            write_leader_epochs(self._directory, history.entries)
        self._take(history, loaded.leader_epoch)

    def assign(self, epoch: int, offset: int) -> None:
        """Record that `epoch` starts at `offset`, before the first record that carries it."""
        changed = LeaderEpochs(self.history.entries)
        if changed.assign(epoch, offset):
            write_leader_epochs(self._directory, changed.entries)
        # After the file: if the write fails, memory has the old history, and the append is refused.
        self._take(changed, max(self.epoch, epoch))

    def note(self, starts: Iterable[tuple[int, int]]) -> None:
        """Record the epochs of batches that are about to be written: (epoch, offset) of each."""
        for epoch, offset in starts:
            if epoch != self.history.latest:
                self.assign(epoch, offset)

    def begins_at_or_above(self, end_offset: int) -> bool:
        """Whether a cut there removes an epoch from the history."""
        return LeaderEpochs(self.history.entries).truncate_from_end(end_offset)

    def cut_file(self, end_offset: int) -> None:
        """Remove epochs that start at or above a cut from the file.  Call it before the cut."""
        changed = LeaderEpochs(self.history.entries)
        if changed.truncate_from_end(end_offset):
            write_leader_epochs(self._directory, changed.entries)

    def cut(self, end_offset: int) -> None:
        """Remove them from memory.  Call it after the cut, even an empty one.

        Not before: a reader would see the log's old end with the epochs of the new one.  The next
        append adds its own epoch again, at its offset.
        """
        changed = LeaderEpochs(self.history.entries)
        if changed.truncate_from_end(end_offset):
            self._take(changed, self.epoch)

    def restart(self) -> None:
        """Forget the history: the log is empty, and its file has no epoch.  `epoch` stays."""
        self._take(LeaderEpochs(), self.epoch)

    def forget_below(self, start_offset: int, name: str) -> None:
        """Remove epochs that end at or below the new start of the log."""
        changed = LeaderEpochs(self.history.entries)
        if changed.truncate_from_start(start_offset):
            self._take(changed, self.epoch)
            try:
                write_leader_epochs(self._directory, changed.entries)
            except OSError as error:  # the next open removes them again
                log.warning("%s: could not write its leader epochs: %s", name, str(error))
