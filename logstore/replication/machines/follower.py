"""FollowerReplica: copies the leader's log, byte for byte.

Its fetch offset is its acknowledgement, so it fetches only from the end of what it has durably.
An answer without a diverging epoch proves that everything below the fetch offset equals the
leader's log.  An answer counts only if it answers the fetch that is under way: token, leader epoch
and offset.  Tokens are never used twice.

It never cuts its log at its high watermark (KIP-101): only at the point that a leader's answer
names.  A cut may take several rounds: each removes at least the newest epoch that the leader does
not have (KIP-279).

Rotation is the order in which the partitions of one leader are asked for: those that were served
move to the end, so that a small answer cannot leave the same partitions out every time.

A machine without I/O: see `actions`.  The owner serializes the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from logstore.log.epochs import EpochEnd
from logstore.replication.machines.actions import (
    Action,
    Append,
    AskOffsets,
    Notify,
    Offline,
    RestartAt,
    Retry,
    SetHighWatermark,
    Sync,
    Trim,
    Truncate,
)
from logstore.replication.machines.image import Key
from logstore.replication.machines.leader_and_isr import NO_LEADER, LeaderAndIsr

__all__ = ["Fetched", "FollowerReplica", "Offer", "Phase", "Rotation"]

# Error codes of Kafka.
OFFSET_OUT_OF_RANGE = 1
FENCED_LEADER_EPOCH = 74

BACKOFF_FIRST_MS = 50
BAD_ANSWERS_MAX = 3  # answers in a row that cannot be appended, before the connection is closed

Phase = Literal["idle", "ready", "fetching", "working", "waiting", "failed"]


class Offer(NamedTuple):
    """What a follower asks for: one row of a Fetch request."""

    token: int
    leader: int
    leader_epoch: int
    offset: int
    last_epoch: int  # of the record before `offset`; -1: there is none
    start: int


class Fetched(NamedTuple):
    """One row of the answer."""

    code: int
    hw: int = -1
    start: int = -1
    diverging: EpochEnd | None = None
    raw: bytes = b""


class FollowerReplica:
    """The follower's half of one partition, over all leaders that it follows."""

    __slots__ = (
        *("_bad", "_cut_for", "_delay_ms", "_last_epoch", "_leader_hw", "_leader_start", "_offer"),
        *("ack", "backoff_ms", "committed_cut", "end", "fsync", "hw", "phase", "start", "view"),
    )

    def __init__(
        self,
        cut_for: Callable[[EpochEnd], int],
        last_epoch: Callable[[], int],
        *,
        start: int,
        end: int,
        ack: int,
        hw: int,
        fsync: bool,
        backoff_ms: int = 1000,
    ) -> None:
        """``cut_for(ends)`` is where this log is cut after a leader's answer.

        ``last_epoch()`` is the epoch of the last record, -1 if there is none.
        """
        self._cut_for = cut_for
        self._last_epoch = last_epoch
        self.start = start
        self.end = end
        self.fsync = fsync
        self.ack = ack if fsync else end
        self.hw = hw
        self.backoff_ms = backoff_ms
        self.view: LeaderAndIsr | None = None
        self.phase: Phase = "idle"
        self.committed_cut = 0  # records below the high watermark that were cut
        self._offer: Offer | None = None  # the fetch, or the question for offsets, under way
        self._leader_hw = -1  # of the answer that is being appended
        self._leader_start = -1
        self._delay_ms = 0  # of the last wait; doubles
        self._bad = 0

    # ---- whom to follow ----

    def follow(self, view: LeaderAndIsr) -> list[Action]:
        """Follow the leader of a state.  With a new leader epoch, forget what is under way."""
        same = self.view is not None and self.view.leader_epoch == view.leader_epoch
        self.view = view
        if self.phase == "failed" or (same and view.leader != NO_LEADER and self.phase != "idle"):
            return []
        self._offer = None
        self._delay_ms = self._bad = 0
        if view.leader == NO_LEADER:
            self.phase = "idle"
            return []
        return self._settle([])

    def stop(self) -> None:
        """Follow nobody, until a newer state is seen."""
        self._offer = None
        if self.phase != "failed":
            self.phase = "idle"

    def _settle(self, actions: list[Action]) -> list[Action]:
        """Be ready, after a sync of what is not durable yet."""
        if self.ack < self.end:
            self.phase = "working"
            actions.append(Sync(self.end))
        else:
            self.phase = "ready"
        return actions

    # ---- fetching ----

    def poll(self, token: int) -> Offer | None:
        """Return the next fetch, or None if there is nothing to fetch now."""
        if self.phase != "ready" or self.view is None:
            return None
        self._offer = Offer(
            token,
            self.view.leader,
            self.view.leader_epoch,
            self.end,
            self._last_epoch(),
            self.start,
        )
        self.phase = "fetching"
        return self._offer

    def fetched(self, token: int, answer: Fetched) -> list[Action]:
        """The leader answered."""
        offer = self._offer
        if self.phase != "fetching" or offer is None or offer.token != token:
            return []
        if answer.code:
            return self._refused(offer, answer.code)
        self._delay_ms = 0
        if answer.diverging is not None:
            # The answer's high watermark is of a log that differs from ours: it is not used.
            self._offer = None
            self.phase = "working"
            return [Truncate(min(self.end, self._cut_for(answer.diverging)))]
        self._offer = None
        self._leader_hw, self._leader_start = answer.hw, answer.start
        if answer.raw:
            self.phase = "working"
            return [Append(answer.raw, self.end)]
        self._bad = 0
        self.phase = "ready"
        return self._take_leaders_offsets()

    def _refused(self, offer: Offer, code: int) -> list[Action]:
        if code == OFFSET_OUT_OF_RANGE:
            return [AskOffsets(offer.token, offer.leader, offer.leader_epoch)]
        self._offer = None
        if code == FENCED_LEADER_EPOCH:
            self.phase = "idle"  # a newer state exists
            return []
        return self._wait()

    def _wait(self) -> list[Action]:
        self.phase = "waiting"
        self._delay_ms = min(self.backoff_ms, max(BACKOFF_FIRST_MS, 2 * self._delay_ms))
        return [Retry(self._delay_ms)]

    def retry(self) -> list[Action]:
        """The wait is over."""
        return self._settle([]) if self.phase == "waiting" else []

    def broken(self, token: int) -> list[Action]:
        """The connection broke, or no answer came in time."""
        if self.phase != "fetching" or self._offer is None or self._offer.token != token:
            return []
        self._offer = None
        return self._wait()

    def _take_leaders_offsets(self) -> list[Action]:
        """Everything below our end equals the leader's log: show what the leader has committed."""
        actions: list[Action] = []
        hw = min(self._leader_hw, self.end)
        if hw > self.hw:
            self.hw = hw
            actions += [SetHighWatermark(hw), Notify("hw")]
        if self.start < self._leader_start <= self.hw:
            actions.append(Trim(self._leader_start))
        return actions

    # ---- the log has changed ----

    def appended(self, end: int) -> list[Action]:
        """The batches of the answer are in the log, which ends at `end`."""
        self.end = end
        self._bad = 0
        if not self.fsync:
            self.ack = end
        return self._settle(self._take_leaders_offsets())

    def append_failed(self, reason: str, *, written: bool, invalid: bool = False) -> list[Action]:
        """The batches could not be appended.

        `written`: some bytes may be in the log.  `invalid`: the answer does not fit the log or
        does not pass its checksum.  Otherwise the disk is full.
        """
        if written:
            return self.failed(reason)
        if invalid and self.start < self.end <= self._leader_start:
            # The leader's log starts inside of a batch that has our end: it has deleted all of our
            # records, and cannot name the epoch in which they differ.
            self.phase = "working"
            return [RestartAt(self._leader_start)]
        self._bad += invalid
        return self._wait()

    @property
    def distrusts_connection(self) -> bool:
        """Return whether so many answers were invalid that the owner should connect again."""
        return self._bad >= BAD_ANSWERS_MAX

    @property
    def is_level(self) -> bool:
        """Return whether it has what was committed at the leader's last answer.

        Then it is about to join the in-sync set, and the leader may wait for it.
        """
        return 0 <= self._leader_hw <= self.end

    def synced(self, offset: int) -> list[Action]:
        """The log is durable up to `offset`."""
        if offset > self.ack:
            self.ack = min(offset, self.end)
        if self.phase == "working" and self.ack == self.end and self._offer is None:
            self.phase = "ready"
        return []

    def failed(self, reason: str) -> list[Action]:
        """Stop using the log: it is damaged, or a sync failed."""
        self.phase = "failed"
        self._offer = None
        return [Offline(reason)]

    def truncated(self, end: int) -> list[Action]:
        """The log was cut and ends at `end`."""
        self.end = end
        self.ack = min(self.ack, end)
        actions: list[Action] = []
        if end < self.hw:  # only after an unclean election
            self.committed_cut += self.hw - end
            self.hw = end
            actions += [SetHighWatermark(end), Notify("hw")]
        return self._settle(actions) if self.phase == "working" else actions

    def restarted(self, offset: int) -> list[Action]:
        """The log is empty and begins at `offset`."""
        self.start = self.end = self.ack = self.hw = offset
        actions: list[Action] = [SetHighWatermark(offset), Notify("start")]
        return self._settle(actions) if self.phase == "working" else actions

    def trimmed(self, start: int) -> list[Action]:
        """The log starts at `start` now."""
        self.start = max(self.start, start)
        return [Notify("start")]

    # ---- out of range ----

    def offsets(self, token: int, code: int, start: int, end: int) -> list[Action]:
        """The leader answered where its log starts and ends."""
        offer = self._offer
        if self.phase != "fetching" or offer is None or offer.token != token:
            return []
        self._offer = None
        if code:
            return self._wait()
        if start > self.end:
            self.phase = "working"
            return [RestartAt(start)]
        if end < self.end:
            self.phase = "working"
            return [Truncate(end)]
        return self._wait()


class Rotation:
    """The partitions that are copied from one leader, the one served last at the end.

    >>> turn = Rotation()
    >>> turn.add(("t", 0)); turn.add(("t", 1)); turn.add(("t", 2))
    >>> turn.served([("t", 0)])
    >>> turn.keys()
    [('t', 1), ('t', 2), ('t', 0)]
    """

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}  # a dict keeps the order of insertion

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        """Ask for a partition from now on."""
        self._keys.setdefault(key)

    def remove(self, key: Key) -> None:
        """Ask for it no longer."""
        self._keys.pop(key, None)

    def keys(self) -> list[Key]:
        """Return the partitions in the order in which they are asked for."""
        return list(self._keys)

    def served(self, keys: Iterable[Key]) -> None:
        """Records of these partitions were answered: they are asked for last."""
        for key in keys:
            if key in self._keys:
                del self._keys[key]
                self._keys[key] = None
