"""Replica: one partition on one node, as leader, as follower or as neither.

It takes every new state of the tree and gives the partition its role: a node leads only in the
life (broker epoch) in which it was elected.  A leader that restarted waits for a new leader epoch,
because it may have lost records that followers copied: one offset of one epoch would name two
records.

A machine without I/O: see `actions`.  The owner serializes the calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from logstore.log.epochs import EpochEnd
from logstore.replication.machines.actions import Action, Notify, Offline
from logstore.replication.machines.assignment import Assignment
from logstore.replication.machines.follower import FollowerReplica
from logstore.replication.machines.image import Key, Registration
from logstore.replication.machines.leader import LeaderReplica
from logstore.replication.machines.leader_and_isr import NO_LEADER, LeaderAndIsr

__all__ = ["Replica", "ReplicaLog"]


class ReplicaLog(Protocol):
    """What the machines read of a log."""

    @property
    def start_offset(self) -> int:
        """The first offset."""

    @property
    def end_offset(self) -> int:
        """The offset of the next record."""

    @property
    def durable_offset(self) -> int:
        """The end of what is on stable storage."""

    @property
    def promised_epoch(self) -> int:
        """The greatest leader epoch that this log has been told of."""

    def epoch_end(self, epoch: int) -> EpochEnd | None:
        """Return where an epoch ends in this log."""

    def cut_for(self, ends: EpochEnd) -> int:
        """Return where this log is cut, after a leader's answer."""

    def last_epoch(self) -> int:
        """Return the epoch of the last record, or -1."""


class Replica:
    """The role of a partition on this node, and the machine of that role."""

    __slots__ = (
        *("_view", "backoff_ms", "broker_epoch", "follower", "fsync", "hw", "key", "lag_ms"),
        *("leader", "log", "me", "nodes", "offline"),
    )

    def __init__(
        self,
        key: Key,
        me: int,
        log: ReplicaLog,
        nodes: Mapping[int, Registration],
        *,
        hw: int,
        fsync: bool,
        lag_ms: int = 30_000,
        backoff_ms: int = 1000,
    ) -> None:
        """`hw` is the high watermark of the checkpoint: it bounds readers, and cuts nothing."""
        self.key = key
        self.me = me
        self.log = log
        self.nodes = nodes  # live: the owner changes it with the image
        self.broker_epoch = -1  # none yet: this node is not registered
        self.hw = max(log.start_offset, min(hw, log.end_offset))  # while it has no role
        self.fsync = fsync
        self.lag_ms = lag_ms
        self.backoff_ms = backoff_ms
        self.leader: LeaderReplica | None = None
        self.follower: FollowerReplica | None = None
        self.offline = ""  # the reason why the log is not used
        self._view: LeaderAndIsr | None = None

    @property
    def view(self) -> LeaderAndIsr | None:
        """Return the newest state that was seen."""
        return self._view

    @property
    def high_watermark(self) -> int:
        """Return the end of what readers may see."""
        if self.leader is not None:
            return self.leader.hw
        return self.follower.hw if self.follower is not None else self.hw

    def seen(
        self, view: LeaderAndIsr, assignment: Assignment, topic_version: int, now: int
    ) -> list[Action]:
        """The tree has this state and this assignment."""
        if self._view is not None and view.version < self._view.version:
            return []
        newer = self._view is None or view.version > self._view.version
        self._view = view
        if self.offline:
            return []
        if view.leader_epoch < self.log.promised_epoch:
            found = f"leader epoch {view.leader_epoch} is below {self.log.promised_epoch}"
            return self.fail(f"the metadata went back: {found}, which this log has seen")
        leads = view.leader == self.me and view.leader_broker_epoch == self.broker_epoch
        leader = self.leader
        if leads and leader is not None and leader.view.leader_epoch == view.leader_epoch:
            return leader.seen(view, assignment, topic_version, now)
        if not newer and (leader is not None or self.follower is not None):
            return []
        actions = self._leave()
        if self.me not in assignment.replicas:
            return actions
        if leads:
            return actions + self._lead(view, assignment, topic_version, now)
        return actions + self._follow(view)

    def _lead(
        self, view: LeaderAndIsr, assignment: Assignment, topic_version: int, now: int
    ) -> list[Action]:
        self.follower = None
        log = self.log
        self.leader = LeaderReplica(
            self.key,
            self.me,
            self.broker_epoch,
            view,
            assignment,
            topic_version,
            self.nodes,
            log.epoch_end,
            start=log.start_offset,
            end=log.end_offset,
            ack=log.durable_offset,
            hw=self.hw,
            fsync=self.fsync,
            lag_ms=self.lag_ms,
        )
        return self.leader.begin(now)

    def _follow(self, view: LeaderAndIsr) -> list[Action]:
        log = self.log
        if self.follower is None:
            self.follower = FollowerReplica(
                log.cut_for,
                log.last_epoch,
                start=log.start_offset,
                end=log.end_offset,
                ack=log.durable_offset,
                hw=self.hw,
                fsync=self.fsync,
                backoff_ms=self.backoff_ms,
            )
        if view.leader == self.me:
            # Elected in an earlier life: nobody leads until the controller elects again.
            self.follower.stop()
            return []
        return self.follower.follow(view)

    def leave(self) -> list[Action]:
        """Stop leading and following: this node does not have the partition any more."""
        actions = self._leave()
        if self.follower is not None:
            self.follower.stop()
        return actions

    @property
    def is_replaceable(self) -> bool:
        """Return whether an unusable log may be set aside and copied again from a leader.

        Only a log that does not count: while it may be the last copy, nothing replaces it.
        """
        view = self._view
        return (
            bool(self.offline)
            and view is not None
            and view.leader not in (NO_LEADER, self.me)
            and self.me not in view.isr
            and self.me not in view.elr
        )

    def _leave(self) -> list[Action]:
        """Stop to lead.  A follower stays one: `follow` tells it the new leader."""
        leader, self.leader = self.leader, None
        if leader is not None:
            self.hw = leader.hw
            return leader.resign()
        if self.follower is not None:
            self.hw = self.follower.hw
        return []

    def session_lost(self) -> list[Action]:
        """This node is not registered any more: it neither leads nor follows."""
        self.broker_epoch = -1
        self._view = None  # the next session reads everything again
        actions = self._leave()
        if self.follower is not None:
            self.follower.stop()
        return actions

    def fail(self, reason: str) -> list[Action]:
        """Stop using the log."""
        self.offline = reason
        leader, self.leader = self.leader, None
        self.follower = None
        if leader is not None:
            self.hw = leader.hw
            return leader.failed(reason)
        return [Offline(reason), Notify("role")]
