"""LeaderEpochs: which leader's reign each offset belongs to, and where two histories part.

An epoch is a number that grows with every change of leader.  Its entry says at which offset the
first record of that reign stands, or would stand.  Two replicas hold the same records up to the
point where their entries first differ: that, and not a high watermark, is what a follower may rely
on when it cuts its log to agree with a leader's (KIP-101, KIP-279).

Invariant: epochs and start offsets both strictly increase from entry to entry.

Sans I/O: the owner writes the entries down.  Not thread-safe: the owner's lock guards it.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from logstore.files.directory import Directory

__all__ = [
    "EpochCut",
    "EpochEnd",
    "LeaderEpochs",
    "parse_leader_epochs",
    "read_leader_epochs",
    "write_leader_epochs",
]


class EpochEnd(NamedTuple):
    """The answer to "where did epoch n end?": the greatest epoch up to n, and its end offset."""

    epoch: int
    end_offset: int


class EpochCut(NamedTuple):
    """What a follower does with such an answer: cut at `offset`; ask again unless `agreed`."""

    offset: int
    agreed: bool


class LeaderEpochs:
    """Ordered (epoch, start offset) pairs.

    >>> epochs = LeaderEpochs([(0, 0), (3, 150)])
    >>> epochs.epoch_for(149), epochs.epoch_for(150)
    (0, 3)
    >>> epochs.end_offset_for(2, 200)
    EpochEnd(epoch=0, end_offset=150)
    """

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        """Entries that break the invariant are treated as if assigned one after the other."""
        self._epochs: list[int] = []
        self._starts: list[int] = []
        for epoch, start in entries:
            self.assign(epoch, start)

    @property
    def entries(self) -> list[tuple[int, int]]:
        """(epoch, start offset) pairs, ascending."""
        return list(zip(self._epochs, self._starts, strict=True))

    @property
    def latest(self) -> int | None:
        """The greatest epoch; None when there is none."""
        return self._epochs[-1] if self._epochs else None

    def __repr__(self) -> str:
        return f"LeaderEpochs({self.entries})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeaderEpochs) and self.entries == other.entries

    __hash__ = None  # type: ignore[assignment]

    # ---- growing and cutting ----

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Records from `start_offset` on belong to `epoch`; whether that was news.

        Entries that contradict it go: a lower epoch or a lower offset ends a newer history.
        """
        if epoch < 0 or start_offset < 0:
            raise ValueError(
                f"an epoch and its start offset are at least 0, not {epoch} and {start_offset}"
            )
        if self._epochs and self._epochs[-1] == epoch and self._starts[-1] <= start_offset:
            return False
        while self._epochs and (self._epochs[-1] >= epoch or self._starts[-1] >= start_offset):
            self._epochs.pop()
            self._starts.pop()
        self._epochs.append(epoch)
        self._starts.append(start_offset)
        return True

    def truncate_from_end(self, end_offset: int) -> bool:
        """Drop the epochs that start at or above `end_offset`; whether there were any."""
        keep = bisect.bisect_left(self._starts, end_offset)
        changed = keep < len(self._starts)
        del self._epochs[keep:], self._starts[keep:]
        return changed

    def truncate_from_start(self, start_offset: int) -> bool:
        """Forget what lies below `start_offset`; whether anything changed.

        The epoch that holds at `start_offset` stays, and starts there.
        """
        passed = bisect.bisect_right(self._starts, start_offset)
        if passed == 0 or (passed == 1 and self._starts[0] == start_offset):
            return False
        del self._epochs[: passed - 1], self._starts[: passed - 1]
        self._starts[0] = start_offset
        return True

    # ---- asking ----

    def epoch_for(self, offset: int) -> int | None:
        """The epoch that the record at `offset` belongs to; None below the first entry."""
        number = bisect.bisect_right(self._starts, offset) - 1
        return self._epochs[number] if number >= 0 else None

    def end_offset_for(self, epoch: int, log_end: int) -> EpochEnd | None:
        """Where `epoch` ended in a log that goes on to `log_end`.

        An epoch that is not known here is answered by the greatest one below it, so that whoever
        asks can tell.  None: this history says nothing about it, because it is empty or does not
        reach that far.
        """
        if epoch < 0 or not self._epochs:
            return None
        if epoch == self._epochs[-1]:
            return EpochEnd(epoch, log_end)
        higher = bisect.bisect_right(self._epochs, epoch)
        if higher == len(self._epochs):
            return None
        floor = epoch if higher == 0 else self._epochs[higher - 1]
        return EpochEnd(floor, self._starts[higher])

    # ---- a follower's part ----

    def cut_for(self, answer: EpochEnd, log_end: int) -> EpochCut:
        """Where a follower with this history cuts, given a leader's answer about its last epoch.

        Each round that does not agree drops at least the latest epoch, so asking again with what
        is the last epoch then comes to an end.
        """
        own = self.end_offset_for(answer.epoch, log_end)
        if own is None:
            return EpochCut(min(answer.end_offset, log_end), True)
        if own.epoch != answer.epoch:
            # The leader never had that epoch, nor we the one it names: look further back.
            return EpochCut(min(own.end_offset, log_end), False)
        return EpochCut(min(own.end_offset, answer.end_offset, log_end), True)

    def common_end(self, log_end: int, leader: LeaderEpochs, leader_end: int) -> int | None:
        """The offset up to which this history and a leader's are the same; for both at hand.

        The same rounds of question and answer as over a wire.  None: nothing can be said, since
        the leader's history does not reach back to ours, or we have none.
        """
        mine = LeaderEpochs(self.entries)
        end = log_end
        while mine.latest is not None:
            answer = leader.end_offset_for(mine.latest, leader_end)
            if answer is None:
                return None
            cut = mine.cut_for(answer, end)
            mine.truncate_from_end(cut.offset)
            end = cut.offset
            if cut.agreed:
                return end
        return None if end == log_end else end


LEADER_EPOCHS = "leader-epoch-checkpoint"


def read_leader_epochs(directory: Directory) -> list[tuple[int, int]]:
    """(epoch, start offset) pairs, ascending; empty when the file is missing or unreadable."""
    with contextlib.suppress(FileNotFoundError):
        epochs = parse_leader_epochs(directory.read(LEADER_EPOCHS, 1 << 24))
        return [] if isinstance(epochs, str) else epochs
    return []


def parse_leader_epochs(content: bytes) -> list[tuple[int, int]] | str:
    """The pairs in a file, or why it cannot be read."""
    try:
        lines = content.decode("utf-8").split("\n")
        pairs = [line.split() for line in lines[2:] if line.strip()]
        epochs = [(int(epoch), int(start)) for epoch, start in pairs]
        if lines[0].strip() != "0" or len(epochs) != int(lines[1]):
            return f"version {lines[0]!r}, {len(epochs)} rows of {lines[1]!r}"
    except (IndexError, ValueError) as error:
        return str(error)
    if not all(0 <= epoch < 1 << 31 and 0 <= start < 1 << 63 for epoch, start in epochs):
        return "a number is out of range"
    return epochs


def write_leader_epochs(directory: Directory, epochs: list[tuple[int, int]]) -> None:
    """Kafka's text form: version, count, one pair a line."""
    lines = ["0", str(len(epochs)), *(f"{epoch} {start}" for epoch, start in epochs)]
    directory.replace(LEADER_EPOCHS, ("\n".join(lines) + "\n").encode())
