"""Progress: how far a follower has copied, as its leader knows; and who counts as in sync.

A fetch offset is an acknowledgement: the follower has everything below it, durably if it promises
that.  A follower is *caught up* at a moment if it had the whole log then.  One that fetches all
the time but never reaches the end is caught up at its last fetch if it has now what was the end
of the log then.  So steady appends do not take it out of the in-sync set.
"""

from __future__ import annotations

from collections.abc import Mapping

from logstore.replication.machines.image import Key, Registration

__all__ = ["NEVER", "Progress", "is_eligible"]

NEVER = -(1 << 62)  # a time before every other


class Progress:
    """What a leader knows of one follower since its epoch began."""

    __slots__ = ("broker_epoch", "caught_up_ms", "end", "fetched_ms", "leader_end", "node", "start")

    def __init__(self, node: int, caught_up_ms: int) -> None:
        self.node = node
        self.end = -1  # the follower has not fetched in this epoch
        self.start = -1
        self.broker_epoch = -1
        self.fetched_ms = NEVER
        self.leader_end = -1  # the leader's end at the last fetch
        self.caught_up_ms = caught_up_ms

    def fetched(
        self, offset: int, *, start: int, broker_epoch: int, leader_end: int, now: int
    ) -> None:
        """Count a fetch at `offset`."""
        if offset >= leader_end:
            self.caught_up_ms = now
        elif self.end >= 0 and offset >= self.leader_end:
            self.caught_up_ms = max(self.caught_up_ms, self.fetched_ms)
        self.end = offset
        self.start = start
        self.broker_epoch = broker_epoch
        self.fetched_ms = now
        self.leader_end = leader_end

    def is_late(self, leader_end: int, now: int, lag_ms: int) -> bool:
        """Return whether it was not caught up within the last `lag_ms`."""
        return self.end != leader_end and now - self.caught_up_ms > lag_ms


def is_eligible(nodes: Mapping[int, Registration], progress: Progress, key: Key) -> bool:
    """Return whether a follower may join the in-sync set, as far as its registration tells.

    Its last fetch must be of its present life: a node that restarted may have lost records.
    """
    node = nodes.get(progress.node)
    return (
        node is not None
        and node.epoch == progress.broker_epoch
        and not node.lossy
        and not node.unwilling
        and key not in node.offline
    )
