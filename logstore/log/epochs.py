"""LeaderEpochs: the leader epoch of each offset, and the offset where two histories diverge.

An epoch is a number that increases with every change of leader.  Its entry holds the offset of the
first record of the epoch, or the log's end offset if the epoch has no record yet.  Two replicas
hold the same records up to the point where their entries first differ.  A follower truncates its
log at that point, and not at its high watermark (KIP-101, KIP-279).

Invariant: epochs and start offsets both strictly increase from entry to entry.

The class does no I/O: `read_leader_epochs` and `write_leader_epochs` below keep the entries in
Kafka's file.  It has no lock: the owner's lock guards it.
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
    """A leader's answer to "where did epoch n end?".

    `epoch` is the greatest epoch of the leader that is not above n.
    """

    epoch: int
    end_offset: int


class EpochCut(NamedTuple):
    """Where a follower truncates its log after such an answer.

    If `agreed` is false, the follower truncates and then asks for the end of its new latest epoch.
    """

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
        """Assign the entries one after the other: a later one replaces those it contradicts."""
        # Two lists with the same indexes, both strictly ascending: each is searched by bisection.
        self._epochs: list[int] = []
        self._starts: list[int] = []
        for epoch, start in entries:
            self.assign(epoch, start)

    @property
    def entries(self) -> list[tuple[int, int]]:
        """Return the (epoch, start offset) pairs, ascending."""
        return list(zip(self._epochs, self._starts, strict=True))

    @property
    def latest(self) -> int | None:
        """Return the greatest epoch, or None if there is no entry."""
        return self._epochs[-1] if self._epochs else None

    def __repr__(self) -> str:
        return f"LeaderEpochs({self.entries})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeaderEpochs) and self.entries == other.entries

    __hash__ = None  # type: ignore[assignment]

    # ---- growing and cutting ----

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Assign the records from `start_offset` on to `epoch`; return whether an entry changed.

        Entries with a greater or equal epoch or start offset are removed: they describe a history
        that a truncation has replaced.
        """
        if epoch < 0 or start_offset < 0:
            raise ValueError(
                f"an epoch and its start offset are at least 0, not {epoch} and {start_offset}"
            )
        # The usual case of an append: the latest epoch continues.
        if self._epochs and self._epochs[-1] == epoch and self._starts[-1] <= start_offset:
            return False
        while self._epochs and (self._epochs[-1] >= epoch or self._starts[-1] >= start_offset):
            self._epochs.pop()
            self._starts.pop()
        self._epochs.append(epoch)
        self._starts.append(start_offset)
        return True

    def truncate_from_end(self, end_offset: int) -> bool:
        """Remove the epochs that start at or above `end_offset`; return whether there were any."""
        keep = bisect.bisect_left(self._starts, end_offset)
        changed = keep < len(self._starts)
        del self._epochs[keep:], self._starts[keep:]
        return changed

    def truncate_from_start(self, start_offset: int) -> bool:
        """Remove the epochs that end at or below `start_offset`; return whether an entry changed.

        The epoch of the record at `start_offset` stays, and now starts there.
        """
        passed = bisect.bisect_right(self._starts, start_offset)
        if passed == 0 or (passed == 1 and self._starts[0] == start_offset):
            return False
        del self._epochs[: passed - 1], self._starts[: passed - 1]
        self._starts[0] = start_offset
        return True

    # ---- lookups ----

    def epoch_for(self, offset: int) -> int | None:
        """Return the epoch of the record at `offset`, or None below the first entry."""
        number = bisect.bisect_right(self._starts, offset) - 1
        return self._epochs[number] if number >= 0 else None

    def end_offset_for(self, epoch: int, log_end: int) -> EpochEnd | None:
        """Return the end offset of `epoch` in a log whose end offset is `log_end`.

        If `epoch` has no entry, the result holds the greatest epoch below it: the caller compares
        the epochs.  An epoch below the first entry ends where that entry starts.  Return None if
        there are no entries, or if `epoch` is above the latest.
        """
        # An epoch ends where the next one starts; the latest ends with the log.
        if epoch < 0 or not self._epochs:
            return None
        if epoch == self._epochs[-1]:
            return EpochEnd(epoch, log_end)
        higher = bisect.bisect_right(self._epochs, epoch)
        if higher == len(self._epochs):
            return None
        floor = epoch if higher == 0 else self._epochs[higher - 1]
        return EpochEnd(floor, self._starts[higher])

    # ---- for a follower ----

    def cut_for(self, answer: EpochEnd, log_end: int) -> EpochCut:
        """Return where a follower with this history truncates, given a leader's `answer`.

        The follower asked for its latest epoch.  A round that does not agree removes at least that
        epoch, so the number of rounds is bounded by the number of entries.
        """
        own = self.end_offset_for(answer.epoch, log_end)
        # The answer is above our latest epoch, or we have no epochs: only the ends can be compared.
        if own is None:
            return EpochCut(min(answer.end_offset, log_end), True)
        if own.epoch != answer.epoch:
            # The leader has no such epoch, and we have no entry for the epoch in its answer: the
            # histories diverge at an older epoch.
            return EpochCut(min(own.end_offset, log_end), False)
        return EpochCut(min(own.end_offset, answer.end_offset, log_end), True)

    def common_end(self, log_end: int, leader: LeaderEpochs, leader_end: int) -> int | None:
        """Return the offset up to which this history and the leader's are the same.

        For a caller that holds both histories: the rounds are those of a follower that asks over
        the network.  Return None if the leader has no entry at or above our latest epoch, or if
        this history is empty.
        """
        # A copy, which each round truncates as a follower truncates its log.
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
    """Return the (epoch, start offset) pairs of the file, or [] if it is missing or unreadable."""
    with contextlib.suppress(FileNotFoundError):
        epochs = parse_leader_epochs(directory.read(LEADER_EPOCHS, 1 << 24))
        return [] if isinstance(epochs, str) else epochs
    return []


def parse_leader_epochs(content: bytes) -> list[tuple[int, int]] | str:
    """Return the pairs in a file, or the reason why it cannot be parsed, as a str."""
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
    """Replace the file, in Kafka's text form: version, count, one pair a line."""
    lines = ["0", str(len(epochs)), *(f"{epoch} {start}" for epoch, start in epochs)]
    directory.replace(LEADER_EPOCHS, ("\n".join(lines) + "\n").encode())
