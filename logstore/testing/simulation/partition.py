"""PartitionShell: carries out the actions of one replica's machines, on a simulated log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from logstore.errors import FencedError, OutOfOrderSequenceError
from logstore.replication.machines.actions import (
    Action,
    Answer,
    Append,
    AskOffsets,
    BeginEpoch,
    Notify,
    Offline,
    RestartAt,
    Retry,
    SetHighWatermark,
    Sync,
    Trim,
    Truncate,
)
from logstore.replication.machines.follower import Fetched, Offer
from logstore.replication.machines.image import Key
from logstore.replication.machines.leader import FetchVerdict, LeaderReplica
from logstore.replication.machines.replica import Replica
from logstore.replication.metadata import Commit, Outcome, Refused
from logstore.testing.simulation.disk import Batch, DiskFullError, InvalidAnswerError, SimulatedLog
from logstore.testing.simulation.network import Exchange

if TYPE_CHECKING:
    from logstore.testing.simulation.node import SimulatedNode

__all__ = ["PartitionShell", "Wait"]

NOT_LEADER = 6
FETCH_BATCHES_MAX = 8


class Wait:
    """The token of a produce request: where its answer is sent to, and the offset that it has."""

    __slots__ = ("acks", "end", "exchange", "offset")

    def __init__(self, exchange: Exchange, acks: int, offset: int, end: int) -> None:
        self.exchange = exchange
        self.acks = acks
        self.offset = offset
        self.end = end


class PartitionShell:
    """One partition on one node: its machine and its log."""

    __slots__ = (
        *("_sync_again", "_syncing", "fetched_from", "key", "log", "machine", "node", "shown"),
        "waits",
    )

    def __init__(self, node: SimulatedNode, key: Key, log: SimulatedLog) -> None:
        self.node = node
        self.key = key
        self.log = log
        settings = node.world.settings
        self.machine = Replica(
            key,
            node.id,
            log,
            node.image.nodes,
            hw=log.checkpointed,
            fsync=node.disk.fsync,
            lag_ms=settings.lag_ms,
            backoff_ms=settings.backoff_ms,
        )
        self.machine.broker_epoch = node.broker_epoch
        self.waits: dict[Wait, None] = {}
        self.shown = -1  # the high watermark that readers were shown last
        self.fetched_from = -1  # the leader whose fetcher has this partition
        self._syncing = False
        self._sync_again = False

    def __repr__(self) -> str:
        return f"{self.node.id}:{self.key[0]}-{self.key[1]}"

    # ---- actions ----

    def do(self, actions: Iterable[Action]) -> None:
        """Carry out actions, and those that they lead to."""
        queue = list(actions)
        for action in queue:
            more = _DO[type(action)](self, action)
            if more:
                queue.extend(more)
        self.node.assign_fetcher(self)

    def _begin_epoch(self, action: BeginEpoch) -> None:
        self.log.begin_epoch(action.epoch)
        self.node.world.oracle.became_leader(self)

    def _append(self, action: Append) -> Sequence[Action]:
        follower = self.machine.follower
        assert follower is not None
        batches = cast("tuple[Batch, ...]", action.raw)
        try:
            if self.node.disk.full:
                raise DiskFullError
            end = self.log.append_copy(batches, action.expect_end)
        except DiskFullError:
            self.node.world.mark("F10")
            return follower.append_failed("the disk is full", written=False)
        except InvalidAnswerError as error:
            self.node.world.mark("F11")
            return follower.append_failed(str(error), written=False, invalid=True)
        return follower.appended(end)

    def _sync(self, action: Sync) -> None:
        if self._syncing:
            self._sync_again = True
            return
        self._syncing = True
        world = self.node.world
        log = self.log
        delay = world.settings.sync_delay(world.random)
        world.at(delay, self._synced, log, log.end_offset, log.cuts, self.node.life)

    def _synced(self, log: SimulatedLog, end: int, cuts: int, life: int) -> None:
        node = self.node
        if node.life != life or not node.up or log is not self.log:
            return
        if node.paused:
            node.inbox.append((self._synced, (log, end, cuts, life)))
            return
        self._syncing = False
        if node.world.nemesis.sync_fails(self):
            self.fail("a sync failed")
            return
        log.synced(end, cuts)
        if self._sync_again:
            self._sync_again = False
            self._sync(Sync(log.end_offset))
        leader, follower = self.machine.leader, self.machine.follower
        if leader is not None:
            self.do(leader.synced(log.durable_offset, node.clock()))
        elif follower is not None:
            self.do(follower.synced(log.durable_offset))

    def _truncate(self, action: Truncate) -> Sequence[Action]:
        follower = self.machine.follower
        assert follower is not None
        self.node.world.oracle.truncating(self, action.offset)
        return follower.truncated(self.log.truncate(action.offset))

    def _restart_at(self, action: RestartAt) -> Sequence[Action]:
        follower = self.machine.follower
        assert follower is not None
        self.log.restart_at(action.offset)
        self.node.world.mark("F8 restart")
        return follower.restarted(action.offset)

    def _trim(self, action: Trim) -> Sequence[Action]:
        follower = self.machine.follower
        assert follower is not None
        self.log.trim(action.offset)
        self.node.world.mark("F9")
        return follower.trimmed(action.offset)

    def _high_watermark(self, action: SetHighWatermark) -> None:
        self.node.world.oracle.high_watermark(self, action.offset)

    def _ask_offsets(self, action: AskOffsets) -> None:
        def answered(code: int, start: int, end: int) -> None:
            follower = self.machine.follower
            if follower is not None:
                self.do(follower.offsets(action.token, code, start, end))

        def broken() -> None:
            follower = self.machine.follower
            if follower is not None:
                self.do(follower.broken(action.token))

        self.node.world.mark("F8")
        self.node.world.network.request(
            self.node.id,
            action.leader,
            "list_offsets",
            (self.key, action.leader_epoch, self.node.id),
            answered,
            broken,
        )

    def _answer(self, action: Answer) -> None:
        wait = cast(Wait, action.token)
        del self.waits[wait]
        if action.code == 0:
            self.node.world.oracle.acknowledging(self, wait)
        wait.exchange.answer(action.code, wait.offset)

    def _notify(self, action: Notify) -> None:
        if action.what in ("end", "role"):
            self.node.wake_parked(self.key)

    def _retry(self, action: Retry) -> None:
        self.node.after(action.delay_ms, self._retried)

    def _retried(self) -> None:
        if self.machine.leader is not None:
            self.do(self.machine.leader.retry(self.node.clock()))
        elif self.machine.follower is not None:
            self.do(self.machine.follower.retry())

    def _offline(self, action: Offline) -> None:
        self.node.take_offline(self)

    def _commit(self, action: Commit) -> None:
        leader = self.machine.leader

        def done(outcome: Outcome) -> None:
            # The tag is of the leader that proposed: a later one drops it.
            if self.machine.leader is not None and self.machine.leader is leader:
                if isinstance(outcome, Refused):
                    self.node.world.mark("L10" if outcome.op else "L9")
                self.do(leader.altered(action.tag, outcome, self.node.clock()))

        self.node.commit(action.ops, done)

    def fail(self, reason: str) -> None:
        """Stop using the log."""
        if self.machine.leader is not None:
            self.node.world.mark("L13")
        self.do(self.machine.fail(reason))

    # ---- requests ----

    def seen(self) -> None:
        """Show the machine the state and the assignment that the image has."""
        image = self.node.image
        view, topic = image.states.get(self.key), image.topics.get(self.key[0])
        if view is None or topic is None or self.key[1] not in topic.partitions:
            return
        actions = self.machine.seen(
            view, topic.partitions[self.key[1]], topic.version, self.node.clock()
        )
        self.node.world.oracle.seen(self, view)
        self.do(actions)

    def produce(
        self,
        values: tuple[object, ...],
        producer: tuple[int, int, int],
        acks: int,
        exchange: Exchange,
    ) -> None:
        """Append a client's batch and answer, now or later."""
        world = self.node.world
        leader = self.machine.leader
        code = NOT_LEADER if leader is None else leader.admit(acks)
        if leader is None or code:
            world.mark("L1 refused")
            exchange.answer(code, -1)
            return
        try:
            if self.node.disk.full:
                raise DiskFullError
            offset, end = self.log.append(leader.view.leader_epoch, values, *producer)
        except DiskFullError:
            self.node.world.mark("N8")
            self.node.unwilling = True
            self.node.write_registration()
            exchange.answer(56, -1)
            return
        except OutOfOrderSequenceError:
            exchange.answer(45, -1)
            return
        except FencedError:
            exchange.answer(47, -1)
            return
        if end <= leader.end:
            world.mark("L2 duplicate")
        wait = Wait(exchange, acks, offset, end)
        self.waits[wait] = None
        self.do(leader.appended(wait, end, acks, self.node.clock()))
        if wait in self.waits:
            self.node.after(world.settings.produce_timeout_ms, self._timed_out, wait)

    def _timed_out(self, wait: Wait) -> None:
        if wait in self.waits and self.machine.leader is not None:
            self.node.world.mark("L14")
            self.do(self.machine.leader.timed_out(wait))

    def row(self, verdict: FetchVerdict, leader: LeaderReplica | None, offer: Offer) -> Fetched:
        """Return a row of the answer to a follower's fetch."""
        if leader is None or verdict.code:
            return Fetched(verdict.code or NOT_LEADER)
        if verdict.diverging is not None:
            return Fetched(0, leader.hw, leader.start, verdict.diverging)
        limit = FETCH_BATCHES_MAX
        if self.node.world.chance("short answer"):
            limit = 1
        raw = self.log.read(offer.offset, self.log.end_offset, limit)
        return Fetched(0, leader.hw, leader.start, None, cast(bytes, raw))


_DO: dict[type[Any], Callable[..., Sequence[Action] | None]] = {
    Answer: PartitionShell._answer,
    Append: PartitionShell._append,
    AskOffsets: PartitionShell._ask_offsets,
    BeginEpoch: PartitionShell._begin_epoch,
    Commit: PartitionShell._commit,
    Notify: PartitionShell._notify,
    Offline: PartitionShell._offline,
    RestartAt: PartitionShell._restart_at,
    Retry: PartitionShell._retry,
    SetHighWatermark: PartitionShell._high_watermark,
    Sync: PartitionShell._sync,
    Trim: PartitionShell._trim,
    Truncate: PartitionShell._truncate,
}
