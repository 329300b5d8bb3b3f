"""HostedReplica: one partition on this node: its machine, its log and its lock.

Any thread may bring an event: a producer, a follower's fetch, the answer to a fetch, a sync that
has ended, a change of the metadata.  The thread takes the replica's lock, calls the machine, and
carries the actions out in order.  Requests to other objects and answers are made after the lock is
released (`later`).  A sync is done by another thread, and is an event when it has ended.

The lock is held while the log is appended to or cut, never during an fsync of an append.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from logstore.errors import (
    ConflictError,
    CorruptLogError,
    DiskFullError,
    IndeterminateAppendError,
    InvalidRecordError,
    LogStoreError,
)
from logstore.format.validation import AppendedBatches
from logstore.replication.hosting.later import later, run_later
from logstore.replication.hosting.metrics import Counts
from logstore.replication.hosting.produced import Produced, Waiter
from logstore.replication.hosting.replica_log import PartitionLog
from logstore.replication.machines import actions as act
from logstore.replication.machines.assignment import Assignment
from logstore.replication.machines.follower import Fetched, FollowerReplica, Offer
from logstore.replication.machines.image import Key
from logstore.replication.machines.leader import LeaderReplica
from logstore.replication.machines.leader_and_isr import LeaderAndIsr
from logstore.replication.machines.replica import Replica
from logstore.replication.metadata import Commit, Committed, Op, Outcome
from logstore.replication.peers import FetchRow, LeaderOffsets

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Host", "HostedReplica", "Served"]

log = logging.getLogger("logstore.replication")

# Error codes of Kafka.
OK = 0
OFFSET_OUT_OF_RANGE = 1
CORRUPT_MESSAGE = 2
NOT_LEADER_OR_FOLLOWER = 6
NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
KAFKA_STORAGE_ERROR = 56

KEPT_BYTES = 64 << 10  # of the last answer to a follower, for the other followers

_tokens = itertools.count(1)  # of fetches: never used twice in this process


class Served(NamedTuple):
    """What a follower's fetch finds; `leader` is None if there is only an error to answer."""

    answer: Fetched
    leader: LeaderReplica | None
    end: int
    late: bool = False  # nothing waits for the follower: a throttle may delay it


class Host(Protocol):
    """What a replica needs of its node.  `now` is of a monotonic clock, in milliseconds."""

    counts: Counts

    @property
    def listens(self) -> bool:
        """Whether `changed` has to be called."""

    def now(self) -> int: ...
    def after(self, ms: int, call: Callable[[], object]) -> Callable[[], object]:
        """Make a call in `ms` milliseconds; return a function that cancels it."""

    def commit(self, ops: Sequence[Op], done: Callable[[Outcome], None]) -> None: ...
    def fetch(self, replica: HostedReplica) -> None:
        """Fetch for a follower that is ready.  Called without a lock."""

    def ask_offsets(self, replica: HostedReplica, token: int, leader: int, epoch: int) -> None: ...
    def changed(self, replica: HostedReplica, what: str) -> None:
        """Wake what waits for a change of this partition.  Called without a lock."""

    def went_offline(self, replica: HostedReplica, reason: str) -> None: ...
    def disk_is_full(self) -> None: ...


class HostedReplica:
    """A replica of this node.  Threads may share it."""

    def __init__(self, host: Host, topic_id: str, machine: Replica, partition_log: PartitionLog):
        self.key: Key = machine.key
        self.topic_id = topic_id
        self.log = partition_log
        self.machine = machine
        self.lock = threading.Lock()
        self.closed = False
        self._host = host
        self._waiting: dict[Callable[[], object], None] = {}  # fetches of followers, under the lock
        # (leader, offset, end, max bytes, records): of one reign, in which no offset changes.
        self._last_read: tuple[LeaderReplica, int, int, int, bytes] | None = None
        partition_log.set_high_watermark(machine.hw)

    def __repr__(self) -> str:
        leader, follower = self.machine.leader, self.machine.follower
        role = "leads" if leader else "follows" if follower else "has no role"
        return f"<HostedReplica {self.key[0]}-{self.key[1]} {role}>"

    @property
    def shows_committed(self) -> bool:
        """Whether readers see everything that was committed before this replica led.

        A new leader learns it from its followers.  With too few in sync it cannot: then readers
        see what it knows.
        """
        with self.lock:  # the actions that follow from the machine's state are carried out
            leader = self.machine.leader
            if leader is None:
                return False
            return leader.is_settled or len(leader.view.isr) < leader.view.min_isr

    # ---- carrying actions out ----

    def _do(self, actions: Sequence[act.Action]) -> None:
        """Carry actions out, and those that they cause.  The caller holds the lock."""
        self._do_all(actions)
        follower = self.machine.follower
        if follower is not None and follower.phase == "ready" and not self.closed:
            later(self._fetch)

    def _do_all(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            more = _CARRY_OUT[type(action)](self, action)
            if more:
                self._do_all(more)  # before the next one; the depth is that of a few causes

    def _fetch(self) -> None:
        self._host.fetch(self)

    def _set_high_watermark(self, action: act.SetHighWatermark) -> None:
        self.log.set_high_watermark(action.offset)

    def _answer(self, action: act.Answer) -> None:
        waiter, code = action
        assert isinstance(waiter, Waiter)
        waiter.code = code
        if code:
            self._host.counts.add("indeterminate_appends_total")
        later(waiter.answer)

    def _sync(self, action: act.Sync) -> None:
        later(lambda: self.log.when_durable(action.end, self._synced))

    def _retry_later(self, action: act.Retry) -> None:
        self._host.after(action.delay_ms, self.retry)

    def _commit(self, action: Commit) -> None:
        ops, tag = action
        later(lambda: self._host.commit(ops, lambda outcome: self.altered(tag, outcome)))

    def _ask_offsets(self, action: act.AskOffsets) -> None:
        later(lambda: self._host.ask_offsets(self, *action))

    def _go_offline(self, action: act.Offline) -> None:
        log.error("%s-%d is offline on this node: %s", *self.key, action.reason)
        later(lambda: self._host.went_offline(self, action.reason))

    def _change_log(self, action: act.Action) -> Sequence[act.Action]:
        """Carry out an action that is rare and changes the log; an error takes it offline."""
        follower = self.machine.follower
        try:
            match action:
                case act.BeginEpoch(epoch):
                    self.log.begin_epoch(epoch)
                    return ()
                case act.Truncate(offset):
                    before = self.log.end_offset
                    end = self.log.truncate(offset)
                    self._host.counts.add("truncated_records_total", before - end)
                    log.info("%s-%d: cut %d records from offset %d on, as its leader asked",
                             *self.key, before - end, end)  # fmt: skip
                    return () if follower is None else self._follower_cut(follower, end)
                case act.RestartAt(offset):
                    self.log.restart_at(offset)
                    log.info("%s-%d: begins again at offset %d of its leader", *self.key, offset)
                    return () if follower is None else follower.restarted(offset)
                case act.Trim(offset):
                    start = self.log.trim(offset)
                    return () if follower is None else follower.trimmed(start)
        except (OSError, LogStoreError) as error:
            return self.machine.fail(f"{type(action).__name__}: {error}")
        raise AssertionError(action)

    def _follower_cut(self, follower: FollowerReplica, end: int) -> Sequence[act.Action]:
        before = follower.committed_cut
        actions = follower.truncated(end)
        cut = follower.committed_cut - before
        self._host.counts.add("committed_records_cut_total", cut)
        return actions

    def _append_copy(self, action: act.Append) -> Sequence[act.Action]:
        raw, expect_end = action
        follower = self.machine.follower
        assert follower is not None
        try:
            end = self.log.copy(raw, expect_end)
            self._host.counts.add("replication_bytes_in_total", len(raw))
            return follower.appended(end)
        except DiskFullError as error:
            later(self._host.disk_is_full)
            return follower.append_failed(str(error), written=False)
        except (ConflictError, CorruptLogError, InvalidRecordError) as error:
            log.warning("%s-%d: an answer of its leader was refused: %s", *self.key, error)
            return follower.append_failed(str(error), written=False, invalid=True)
        except (OSError, LogStoreError) as error:
            return self.machine.fail(f"the log cannot be appended to: {error}")

    def _notify(self, action: act.Notify) -> None:
        what = action.what
        if self._waiting and (what == "end" or what == "role"):
            waiting, self._waiting = self._waiting, {}
            for wake in waiting:
                later(wake)
        if self._host.listens:
            later(lambda: self._host.changed(self, what))

    # ---- the metadata ----

    def seen(self, view: LeaderAndIsr, assignment: Assignment, topic_version: int) -> None:
        """The tree has this state and this assignment."""
        with self.lock:
            if not self.closed:
                machine = self.machine
                before, old = machine.leader, machine.view
                self._do(machine.seen(view, assignment, topic_version, self._host.now()))
                if machine.leader is not before:
                    self._log_role(view)
                elif before is not None and old is not None:
                    self._host.counts.add_change(old.isr, view.isr)
        run_later()

    def _log_role(self, view: LeaderAndIsr) -> None:
        role = "leads" if self.machine.leader is not None else "does not lead"
        log.info("%s-%d: node %d %s in epoch %d, from offset %d; in sync: %s", *self.key,
                 self.machine.me, role, view.leader_epoch, self.log.end_offset,
                 list(view.isr))  # fmt: skip

    def registered(self, broker_epoch: int) -> None:
        """This node has a new life: `seen` is called next."""
        with self.lock:
            self.machine.broker_epoch = broker_epoch

    def session_lost(self) -> None:
        """This node is not registered any more."""
        with self.lock:
            self._do(self.machine.session_lost())
        run_later()

    def altered(self, tag: object, outcome: Outcome) -> None:
        """A change of the in-sync set has an outcome."""
        with self.lock:
            if self.machine.leader is not None:
                if not isinstance(outcome, Committed):
                    self._host.counts.add("failed_isr_updates_total")
                self._do(self.machine.leader.altered(tag, outcome, self._host.now()))
        run_later()

    def retry(self) -> None:
        """A wait that a machine asked for has ended."""
        with self.lock:
            machine = self.machine
            if self.closed:
                return
            if machine.leader is not None:
                self._do(machine.leader.retry(self._host.now()))
            elif machine.follower is not None:
                self._do(machine.follower.retry())
        run_later()

    def tick(self) -> None:
        """Remove followers that are late from the in-sync set."""
        with self.lock:
            if self.machine.leader is not None and not self.closed:
                self._do(self.machine.leader.tick(self._host.now()))
        run_later()

    # ---- the disk ----

    def _synced(self, error: BaseException | None) -> None:
        """A sync has ended."""
        if error is not None and self.log.failed:
            self.fail(f"an fsync failed: {error}")
            return
        # Else the log was cut or closed meanwhile, and what is durable is lower.
        with self.lock:
            machine = self.machine
            if self.closed:
                return
            durable = self.log.durable_offset
            if machine.leader is not None:
                self._do(machine.leader.synced(durable, self._host.now()))
            elif machine.follower is not None:
                self._do(machine.follower.synced(durable))
        run_later()

    def fail(self, reason: str) -> None:
        """Stop using the log: an fsync failed, or damage was found."""
        with self.lock:
            if not self.closed and not self.machine.offline:
                self._do(self.machine.fail(reason))
        run_later()

    def close(self) -> None:
        """Answer all that wait.  The log stays open: it is the store's."""
        with self.lock:
            if not self.closed:
                self._do(self.machine.session_lost())
                self.closed = True
        run_later()

    # ---- producers ----

    def produce(
        self,
        raw: Buffer,
        acks: int,
        done: Callable[[Produced], object],
        *,
        origin: str = "leader",
        timeout_ms: int | None = None,
        wait: bool = True,
        leader_epoch: int | None = None,
    ) -> None:
        """Append batches as the leader; call `done` with the outcome.

        With ``wait=False`` raise BlockingIOError, with nothing appended, if a lock or the disk
        would have to be waited for.  `leader_epoch`: refuse in any other epoch.
        """

        def append(leader: LeaderReplica) -> AppendedBatches:
            return self.log.append(raw, leader.view.leader_epoch, origin, wait=wait)

        self._produce(append, acks, done, timeout_ms, wait, leader_epoch)

    def append(
        self,
        append: Callable[[], range],
        acks: int,
        done: Callable[[Produced], object],
    ) -> object:
        """As `produce`, for records that ``append()`` writes into the log.

        Return a token for `timed_out`.
        """
        return self._produce(
            lambda leader: AppendedBatches(append(), -1, False), acks, done, None, True, None
        )

    def _produce(
        self,
        append: Callable[[LeaderReplica], AppendedBatches],
        acks: int,
        done: Callable[[Produced], object],
        timeout_ms: int | None,
        wait: bool,
        leader_epoch: int | None,
    ) -> object:
        token: object = None
        if not self.lock.acquire(blocking=wait):
            raise BlockingIOError(f"{self.key[0]}-{self.key[1]} is being changed")
        try:
            leader = None if self.closed else self.machine.leader
            if leader is None or leader_epoch not in (None, leader.view.leader_epoch):
                later(lambda: done(self._not_leader()))
            else:
                token = self._append_locked(leader, append, acks, done, timeout_ms)
        finally:
            self.lock.release()
        run_later()
        return token

    def _append_locked(
        self,
        leader: LeaderReplica,
        append: Callable[[LeaderReplica], AppendedBatches],
        acks: int,
        done: Callable[[Produced], object],
        timeout_ms: int | None,
    ) -> object:
        epoch = leader.view.leader_epoch
        code = leader.admit(acks)
        if code:
            later(lambda: done(Produced(code, leader_epoch=epoch)))
            return None
        try:
            appended = append(leader)
        except BlockingIOError:
            raise
        except IndeterminateAppendError as failure:
            error = failure  # `failure` is unbound after this block
            left = Produced(NOT_ENOUGH_REPLICAS_AFTER_APPEND if error.offsets else
                            KAFKA_STORAGE_ERROR, error.offsets, -1, epoch, error)  # fmt: skip
            later(lambda: done(left))
            self._do(self.machine.fail(f"an append failed: {error}"))
            return None
        except (OSError, LogStoreError, ValueError) as refusal:
            if isinstance(refusal, DiskFullError):
                later(self._host.disk_is_full)
            refused = Produced(KAFKA_STORAGE_ERROR, range(0), -1, epoch, refusal)
            later(lambda: done(refused))
            return None
        waiter = Waiter(done, appended, epoch, leader.start)
        if timeout_ms is not None and acks:
            waiter.timer = self._host.after(timeout_ms, lambda: self.timed_out(waiter))
        self._do(leader.appended(waiter, appended.offsets.stop, acks, self._host.now()))
        return waiter

    def _not_leader(self) -> Produced:
        view = self.machine.view
        epoch = -1 if view is None else view.leader_epoch
        return Produced(NOT_LEADER_OR_FOLLOWER, leader_epoch=epoch)

    def timed_out(self, waiter: object) -> None:
        """An append does not wait longer."""
        with self.lock:
            if self.machine.leader is not None:
                self._do(self.machine.leader.timed_out(waiter))
        run_later()

    def trim(self, offset: int) -> int:
        """Delete the records below `offset`, as the leader; return an error code of Kafka."""
        with self.lock:
            leader = self.machine.leader
            if leader is None:
                return NOT_LEADER_OR_FOLLOWER
            if offset > leader.hw:
                return OFFSET_OUT_OF_RANGE
            self._do(leader.trimmed(self.log.trim(max(offset, leader.start))))
        run_later()
        return OK

    def low_watermark(self) -> int | None:
        """Return the least start of the logs of all live replicas; None if this is no leader."""
        with self.lock:
            leader = self.machine.leader
            return None if leader is None else leader.low_watermark()

    # ---- followers of this leader ----

    def serve(self, node: int, broker_epoch: int, row: FetchRow, *, again: bool) -> Served:
        """Judge a follower's fetch, and count it unless it is looked at `again`."""
        offer = row.offer
        with self.lock:
            leader = None if self.closed else self.machine.leader
            if leader is None or row.topic_id != self.topic_id:
                return Served(Fetched(NOT_LEADER_OR_FOLLOWER), None, -1)
            if self.log.start_offset > leader.start:  # retention has deleted segments
                self._do(leader.trimmed(self.log.start_offset))
            if again:
                verdict = leader.judge_fetch(
                    node, broker_epoch, offer.leader_epoch, offer.offset, offer.last_epoch
                )
            else:
                verdict, actions = leader.follower_fetch(
                    *(node, broker_epoch, offer.leader_epoch, offer.offset, offer.last_epoch),
                    *(offer.start, self._host.now()),
                )
                self._do(actions)
            if verdict.code or verdict.diverging is not None:
                return Served(Fetched(verdict.code, diverging=verdict.diverging), None, -1)
            late = not leader.waits_for(node, self._host.now())
            return Served(Fetched(OK, leader.hw, leader.start), leader, leader.end, late)

    def read(self, served: Served, offset: int, max_bytes: int) -> Fetched:
        """Return the answer with the records from `offset` on.  Reads without the lock."""
        if served.leader is None or served.end <= offset:
            return served.answer
        # The other followers ask for the same records at the same time.
        last = self._last_read
        if last is not None and last[:4] == (served.leader, offset, served.end, max_bytes):
            raw = last[4]
            if self.machine.leader is served.leader:
                return self._sent(served, raw)
        try:
            raw = self.log.read(offset, max_bytes)
        except (CorruptLogError, InvalidRecordError) as error:
            if self.machine.leader is not served.leader:
                return Fetched(NOT_LEADER_OR_FOLLOWER)
            self.fail(f"damage was found: {error}")
            return Fetched(CORRUPT_MESSAGE)
        except (OSError, EOFError, LogStoreError) as error:
            if not self.closed:
                log.warning("%s-%d: cannot be read for a follower: %s", *self.key, error)
            return Fetched(NOT_LEADER_OR_FOLLOWER)
        # A leader that was deposed since may have cut its log, and may have copied other records to
        # these offsets.  It gives up the role before it cuts.
        if self.machine.leader is not served.leader:
            return Fetched(NOT_LEADER_OR_FOLLOWER)
        if len(raw) <= KEPT_BYTES:
            self._last_read = served.leader, offset, served.end, max_bytes, raw
        return self._sent(served, raw)

    def _sent(self, served: Served, raw: bytes) -> Fetched:
        self._host.counts.add("replication_bytes_out_total", len(raw))
        return served.answer._replace(raw=raw)

    def wait(self, leader: LeaderReplica, offset: int, wake: Callable[[], object]) -> bool:
        """Have `wake` called once, without a lock, when the log grows or the role changes.

        Return False if that has happened since: then it is not called.
        """
        with self.lock:
            if self.machine.leader is not leader or leader.end > offset:
                return False
            self._waiting[wake] = None
            return True

    def stop_waiting(self, wake: Callable[[], object]) -> None:
        """Do not call `wake` any more."""
        with self.lock:
            self._waiting.pop(wake, None)

    def offsets(self, topic_id: str, epoch: int) -> LeaderOffsets:
        """Return where the log starts and ends, for a follower."""
        with self.lock:
            leader = None if self.closed else self.machine.leader
            if leader is None or topic_id != self.topic_id:
                return LeaderOffsets(NOT_LEADER_OR_FOLLOWER)
            code = leader.fence(epoch)
            return LeaderOffsets(code) if code else LeaderOffsets(OK, leader.start, leader.end)

    # ---- as a follower ----

    def poll(self) -> Offer | None:
        """Return the fetch of a follower that is ready, else None."""
        with self.lock:
            follower = None if self.closed else self.machine.follower
            if follower is None:
                return None
            if self.log.start_offset > follower.start:
                self._do(follower.trimmed(self.log.start_offset))
            return follower.poll(next(_tokens))

    def fetched(self, token: int, answer: Fetched | None) -> None:
        """The leader answered; None: it did not."""
        with self.lock:
            follower = None if self.closed else self.machine.follower
            if follower is not None:
                if answer is None:
                    self._do(follower.broken(token))
                else:
                    self._do(follower.fetched(token, answer))
        run_later()

    def leader_offsets(self, token: int, answer: LeaderOffsets | None) -> None:
        """The leader answered where its log starts and ends; None: it did not."""
        with self.lock:
            follower = None if self.closed else self.machine.follower
            if follower is not None and answer is None:
                self._do(follower.broken(token))
            elif follower is not None and answer is not None:
                self._do(follower.offsets(token, *answer))
        run_later()


_CARRY_OUT: dict[type, Callable[..., Sequence[act.Action] | None]] = {
    act.SetHighWatermark: HostedReplica._set_high_watermark,
    act.Answer: HostedReplica._answer,
    act.Notify: HostedReplica._notify,
    act.Sync: HostedReplica._sync,
    act.Append: HostedReplica._append_copy,
    act.Retry: HostedReplica._retry_later,
    act.AskOffsets: HostedReplica._ask_offsets,
    act.Offline: HostedReplica._go_offline,
    act.BeginEpoch: HostedReplica._change_log,
    act.Truncate: HostedReplica._change_log,
    act.RestartAt: HostedReplica._change_log,
    act.Trim: HostedReplica._change_log,
    Commit: HostedReplica._commit,
}
