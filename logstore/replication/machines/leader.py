"""LeaderReplica: the leader of a partition, from one election to the next.

It admits appends, counts what followers have, moves the high watermark, answers producers that
wait, and changes the in-sync set by conditional writes to the metadata tree.

The high watermark is the least of what the leader has made durable and what every member of the
*maximal* in-sync set has: the set that the tree had last, and the one that is being written.  It
moves only while the set of the tree has `min_isr` members.  A change of the set counts only when a
state with a higher version was seen: the answer to the write may be lost.

A machine without I/O: see `actions`.  The owner serializes the calls.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import NamedTuple

from logstore.log.epochs import EpochEnd
from logstore.replication.machines.actions import (
    Action,
    Answer,
    BeginEpoch,
    Notify,
    Offline,
    Retry,
    SetHighWatermark,
    Sync,
)
from logstore.replication.machines.assignment import Assignment
from logstore.replication.machines.image import (
    Key,
    Registration,
    broker_path,
    epoch_path,
    state_path,
    topic_path,
)
from logstore.replication.machines.in_sync import NEVER, Progress, is_eligible
from logstore.replication.machines.leader_and_isr import LeaderAndIsr
from logstore.replication.metadata import Check, Commit, Committed, Op, Outcome, Refused, Set

__all__ = ["FetchVerdict", "LeaderReplica"]

# Error codes of Kafka.
OK = 0
OFFSET_OUT_OF_RANGE = 1
NOT_LEADER_OR_FOLLOWER = 6
REQUEST_TIMED_OUT = 7
NOT_ENOUGH_REPLICAS = 19
NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
FENCED_LEADER_EPOCH = 74
UNKNOWN_LEADER_EPOCH = 75
OFFSET_NOT_AVAILABLE = 78

RETRY_MS = 200  # between two tries of a write whose answer is lost


class FetchVerdict(NamedTuple):
    """The answer to a follower's fetch: an error, the point where it diverges, or records."""

    code: int = OK
    diverging: EpochEnd | None = None


SERVE = FetchVerdict()


class _Pending(NamedTuple):
    """A change of the in-sync set that is being written."""

    version: int  # of the state that it replaces
    state: LeaderAndIsr
    ops: tuple[Op, ...]


class LeaderReplica:
    """The leader's half of one partition, in one leader epoch."""

    __slots__ = (
        *("_count", "_epoch_end", "_pending", "_progress", "_waiting", "_waits_ack", "_waits_hw"),
        *("ack", "assignment", "broker_epoch", "end", "epoch_start", "fsync", "hw", "key"),
        *("lag_ms", "me", "nodes", "start", "topic_version", "view"),
    )

    def __init__(
        self,
        key: Key,
        me: int,
        broker_epoch: int,
        view: LeaderAndIsr,
        assignment: Assignment,
        topic_version: int,
        nodes: Mapping[int, Registration],
        epoch_end: Callable[[int], EpochEnd | None],
        *,
        start: int,
        end: int,
        ack: int,
        hw: int,
        fsync: bool,
        lag_ms: int,
    ) -> None:
        """`nodes` is live: the owner changes it with the image.

        ``epoch_end(epoch)`` is where an epoch ends in this log.  `ack` is the end of what the log
        has durably; with ``fsync=False`` the end of the log counts instead.
        """
        self.key = key
        self.me = me
        self.broker_epoch = broker_epoch
        self.view = view
        self.assignment = assignment
        self.topic_version = topic_version
        self.nodes = nodes
        self._epoch_end = epoch_end
        self.start = start
        self.end = end
        self.epoch_start = end  # what was in the log when the epoch began
        self.fsync = fsync
        self.ack = ack if fsync else end
        self.hw = hw
        self.lag_ms = lag_ms
        self._progress: dict[int, Progress] = {}
        self._pending: _Pending | None = None
        self._waiting: dict[object, int] = {}  # token -> the end that it waits for
        # Heaps of (end, number, token).  A token that is not in `_waiting` was answered.
        self._waits_hw: list[tuple[int, int, object]] = []
        self._waits_ack: list[tuple[int, int, object]] = []
        self._count = 0

    # ---- the epoch begins and ends ----

    def begin(self, now: int) -> list[Action]:
        """Start to lead.  Nothing is assumed of followers: each must fetch in this epoch."""
        actions: list[Action] = [BeginEpoch(self.view.leader_epoch)]
        for node in self.assignment.replicas:
            if node != self.me:
                self._progress[node] = Progress(node, now if node in self.view.isr else NEVER)
        if self.ack < self.end:
            actions.append(Sync(self.end))
        self._advance(now, actions)
        actions.append(Notify("role"))
        return actions

    def resign(self) -> list[Action]:
        """Stop leading.  What producers wait for may be committed by the next leader, or cut."""
        self._pending = None
        actions = self._answer_all(NOT_ENOUGH_REPLICAS_AFTER_APPEND)
        actions.append(Notify("role"))
        return actions

    def failed(self, reason: str) -> list[Action]:
        """Stop using the log: it is damaged, or a sync failed."""
        actions = self._answer_all(NOT_ENOUGH_REPLICAS_AFTER_APPEND)
        actions.append(Offline(reason))
        return actions

    def _answer_all(self, code: int) -> list[Action]:
        actions: list[Action] = [Answer(token, code) for token in self._waiting]
        self._waiting.clear()
        self._waits_hw.clear()
        self._waits_ack.clear()
        return actions

    # ---- producers ----

    def admit(self, acks: int) -> int:
        """Return 0 if a batch may be appended now, else the error code.  Nothing is written yet."""
        if acks == -1 and len(self.view.isr) < self.view.min_isr:
            return NOT_ENOUGH_REPLICAS
        return OK

    def appended(self, token: object, end: int, acks: int, now: int) -> list[Action]:
        """A batch that ends at `end` is in the log.  A duplicate waits like the first copy."""
        actions: list[Action] = []
        if end > self.end:
            self.end = end
            if self.fsync:
                actions.append(Sync(end))
            else:
                self.ack = end
            actions.append(Notify("end"))
        if acks == 0 or (acks == 1 and end <= self.ack) or (acks == -1 and end <= self.hw):
            actions.append(Answer(token, OK))
        else:
            self._waiting[token] = end
            self._count += 1
            heap = self._waits_ack if acks == 1 else self._waits_hw
            heapq.heappush(heap, (end, self._count, token))
        self._advance(now, actions)
        return actions

    def synced(self, offset: int, now: int) -> list[Action]:
        """The log is durable up to `offset`."""
        actions: list[Action] = []
        if offset > self.ack:
            self.ack = min(offset, self.end)
            self._release(self._waits_ack, self.ack, actions)
            self._advance(now, actions)
        return actions

    def timed_out(self, token: object) -> list[Action]:
        """A producer does not wait longer.  Its records stay in the log."""
        if self._waiting.pop(token, None) is None:
            return []
        return [Answer(token, REQUEST_TIMED_OUT)]

    def _release(
        self, heap: list[tuple[int, int, object]], end: int, actions: list[Action]
    ) -> None:
        while heap and heap[0][0] <= end:
            token = heapq.heappop(heap)[2]
            if self._waiting.pop(token, None) is not None:
                actions.append(Answer(token, OK))

    # ---- readers ----

    def fence(self, epoch: int) -> int:
        """Return 0 if a request for this leader epoch may be served; -1 is any epoch."""
        if epoch < 0 or epoch == self.view.leader_epoch:
            return OK
        return FENCED_LEADER_EPOCH if epoch < self.view.leader_epoch else UNKNOWN_LEADER_EPOCH

    @property
    def is_settled(self) -> bool:
        """Return whether everything that was in the log when the epoch began is committed."""
        return self.hw >= self.epoch_start

    def low_watermark(self) -> int:
        """Return the least start offset of the live replicas, for DeleteRecords."""
        return min(
            [self.start]
            + [each.start for each in self._progress.values() if each.node in self.nodes]
        )

    def trimmed(self, start: int) -> list[Action]:
        """The log starts at `start` now."""
        if start <= self.start:
            return []
        self.start = start
        return [Notify("start")]

    # ---- followers ----

    def judge_fetch(
        self, node: int, broker_epoch: int, epoch: int, offset: int, last_epoch: int
    ) -> FetchVerdict:
        """Judge a follower's fetch.  Changes nothing: a fetch that waited is judged again."""
        code = self.fence(epoch) if epoch >= 0 else UNKNOWN_LEADER_EPOCH
        if code:
            return FetchVerdict(code)
        progress = self._progress.get(node)
        if progress is None:  # not a replica, as far as this leader has seen
            return FetchVerdict(UNKNOWN_LEADER_EPOCH)
        known = self.nodes.get(node)
        if broker_epoch < progress.broker_epoch or (known and broker_epoch < known.epoch):
            return FetchVerdict(NOT_LEADER_OR_FOLLOWER)
        if offset < self.start:
            return FetchVerdict(OFFSET_OUT_OF_RANGE)
        if last_epoch >= 0:
            ends = self._epoch_end(last_epoch)
            if ends is None:
                return FetchVerdict(OFFSET_OUT_OF_RANGE)
            if ends.epoch < last_epoch or ends.end_offset < offset:
                return FetchVerdict(diverging=ends)
        if offset > self.end:
            return FetchVerdict(OFFSET_OUT_OF_RANGE)
        return SERVE

    def follower_fetch(
        self,
        node: int,
        broker_epoch: int,
        epoch: int,
        offset: int,
        last_epoch: int,
        start: int,
        now: int,
    ) -> tuple[FetchVerdict, list[Action]]:
        """Judge a follower's fetch, and count it if it is valid."""
        verdict = self.judge_fetch(node, broker_epoch, epoch, offset, last_epoch)
        actions: list[Action] = []
        if verdict is SERVE:
            progress = self._progress[node]
            progress.fetched(
                offset, start=start, broker_epoch=broker_epoch, leader_end=self.end, now=now
            )
            self._expand(progress, actions)
            self._advance(now, actions)
        return verdict, actions

    def progress_of(self, node: int) -> Progress | None:
        """Return what is known of a follower."""
        return self._progress.get(node)

    # ---- the in-sync set ----

    def _expand(self, progress: Progress, actions: list[Action]) -> None:
        node = progress.node
        if (
            self._pending is not None
            or node in self.view.isr
            or progress.end < self.hw
            or progress.end < self.epoch_start
            or not is_eligible(self.nodes, progress, self.key)
        ):
            return
        self._propose(
            self.view.with_member(node),
            (
                Check(topic_path(self.key[0]), self.topic_version),
                Check(epoch_path(node), progress.broker_epoch),
                Check(broker_path(node), self.nodes[node].version),
            ),
            actions,
        )

    def tick(self, now: int) -> list[Action]:
        """Propose to remove members that are late.  To be called every half of the lag time."""
        actions: list[Action] = []
        if self._pending is None:
            late = [
                each.node
                for each in self._progress.values()
                if each.node in self.view.isr and each.is_late(self.end, now, self.lag_ms)
            ]
            if late:
                self._propose(self.view.without(late), (), actions)
        return actions

    def _propose(self, state: LeaderAndIsr, checks: tuple[Op, ...], actions: list[Action]) -> None:
        # Set is the first op.  If a check fails, the version was still ours, so no earlier try
        # with a lost answer was applied: the proposal may be dropped.
        version = self.view.version
        ops = (Set(state_path(self.key), state.encode(), version), *checks)
        self._pending = _Pending(version, state, ops)
        actions.append(Commit(ops, self._pending))

    @property
    def is_changing(self) -> bool:
        """Return whether a change of the in-sync set is being written."""
        return self._pending is not None

    @property
    def maximal_isr(self) -> frozenset[int]:
        """Return the nodes in sync, and those that are being added or removed."""
        pending = () if self._pending is None else self._pending.state.isr
        return frozenset((*self.view.isr, *pending))

    def altered(self, tag: object, outcome: Outcome, now: int) -> list[Action]:
        """The proposal `tag` has an outcome.  Only a newer state ends one that may be applied."""
        actions: list[Action] = []
        if self._pending is None or tag is not self._pending:
            return actions
        if isinstance(outcome, Refused) and outcome.op > 0:
            self._pending = None
            self._advance(now, actions)
        elif not isinstance(outcome, Committed | Refused):
            actions.append(Retry(RETRY_MS))
        return actions

    def retry(self, now: int) -> list[Action]:
        """Write a proposal again whose answer was lost."""
        return [] if self._pending is None else [Commit(self._pending.ops, self._pending)]

    def seen(
        self, view: LeaderAndIsr, assignment: Assignment, topic_version: int, now: int
    ) -> list[Action]:
        """The tree has another state in which this replica still leads in the same epoch."""
        actions: list[Action] = []
        if view.version > self.view.version:
            self.view = view
            self._pending = None
            actions.append(Notify("role"))  # waiting produce requests see a set that is too small
        self.topic_version = topic_version
        self.assignment = assignment
        # An assignment may be seen before the state of the same write: a member of the in-sync
        # set counts until a state without it is seen.
        counted = {*assignment.replicas, *self.maximal_isr}
        for node in [node for node in self._progress if node not in counted]:
            del self._progress[node]
        for node in assignment.replicas:
            if node != self.me and node not in self._progress:
                self._progress[node] = Progress(node, NEVER)
        self._advance(now, actions)
        return actions

    # ---- the high watermark ----

    def _counts(self, progress: Progress, now: int) -> bool:
        """Return whether the high watermark waits for this follower.

        One out of the set that was caught up lately counts too: else it could never join under
        steady appends.
        """
        node = progress.node
        if node in self.view.isr or (self._pending and node in self._pending.state.isr):
            return True
        return (
            progress.end >= 0
            and now - progress.caught_up_ms <= self.lag_ms
            and is_eligible(self.nodes, progress, self.key)
        )

    def waits_for(self, node: int, now: int) -> bool:
        """Return whether the high watermark waits for a follower: it must not be delayed."""
        progress = self._progress.get(node)
        return progress is not None and self._counts(progress, now)

    def is_deserted(self, now: int) -> bool:
        """Return whether others are in sync, and none of them has fetched for `lag_ms`."""
        others = [self._progress.get(node) for node in self.view.isr if node != self.me]
        return bool(others) and not any(
            each is not None and now - each.fetched_ms <= self.lag_ms for each in others
        )

    def _advance(self, now: int, actions: list[Action]) -> None:
        if len(self.view.isr) < self.view.min_isr:
            return
        bound = self.ack
        for progress in self._progress.values():
            if progress.end < bound and self._counts(progress, now):
                bound = progress.end
        if bound > self.hw:
            self.hw = bound
            actions.append(SetHighWatermark(bound))
            actions.append(Notify("hw"))
            self._release(self._waits_hw, bound, actions)
