"""GroupCoordinator: the groups of one store.

A GroupMachine decides, without I/O.  The coordinator gives it a lock, the time, timers and the log,
and delivers its replies.  A store that is open for writing has one coordinator.  Members are in the
same process and call it directly, so a member learns of a rebalance at once (a *nudge*) and not by
its next heartbeat.

GroupRooms, its base, has the groups in memory.  Here are the requests: of members, for offsets, and
of operators.  Methods that end in ``_later`` return before other nodes have committed the records.

Threads share it.  Replies and nudges are called while no lock is held, because they call back into
the coordinator.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Sequence

from logstore.clock import GuardedClock, SystemClock
from logstore.coordinators.consumer_group.room import GroupRoom, explain
from logstore.coordinators.consumer_group.rooms import IN_PROCESS, GroupRooms
from logstore.coordinators.group_events import (
    COORDINATOR_LOAD_IN_PROGRESS,
    INCONSISTENT_GROUP_PROTOCOL,
    Answer,
    Effect,
    JoinReply,
    Request,
    SyncReply,
)
from logstore.coordinators.group_machine import GroupMachine
from logstore.coordinators.group_protocol import PROTOCOL_TYPE
from logstore.coordinators.offset_book import Guard, Offsets
from logstore.coordinators.offset_records import TopicPartition
from logstore.coordinators.quorum.outcome import Outcome
from logstore.errors import ClosedError, CoordinatorError, RebalanceError
from logstore.store.store import Store

__all__ = ["GroupCoordinator", "explain"]

OFFSETS_RETENTION_MS = 7 * 86_400_000
EXPIRY_SECONDS = 600.0


class GroupCoordinator(GroupRooms):
    """The groups of one store: `GroupCoordinator.of`."""

    def __init__(self, store: Store) -> None:
        """Use `GroupCoordinator.of`."""
        super().__init__(store)
        self._guarded_clock = GuardedClock.of(store.clock)
        self.offsets_retention_ms = OFFSETS_RETENTION_MS
        self._worker: concurrent.futures.ThreadPoolExecutor | None = None
        self.timers.after(EXPIRY_SECONDS, self._expire_regularly)
        # With an injected clock, a test runs the timers: `timers.run_due`.
        if isinstance(self.clock, SystemClock):
            self.timers.start()

    @classmethod
    def of(cls, store: Store) -> GroupCoordinator:
        """Return the coordinator of a store; it is closed with the store."""
        return store.companions.of(cls)

    def close(self) -> None:
        """End all groups in memory, and wait for commits of the background thread."""
        super().close()
        if self._worker is not None:
            self._worker.shutdown(wait=True)  # commits that were handed over are written

    def in_background(self, act: Callable[[], None]) -> concurrent.futures.Future[None]:
        """Call `act` in the background thread; calls are done one by one, in the order given."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"the store {self.store.path} is closed")
            if self._worker is None:
                self._worker = concurrent.futures.ThreadPoolExecutor(1, "logstore commits")
            return self._worker.submit(act)

    # ---- requests of members ----

    def join(
        self,
        group_id: str,
        done: Callable[[JoinReply], object],
        *,
        member_id: str,
        instance_id: str | None,
        client_id: str,
        session_timeout_ms: int,
        rebalance_timeout_ms: int,
        protocols: Sequence[tuple[str, bytes]],
        nudge: Callable[[], None] | None = None,
        reason: str = "",
        client_host: str = IN_PROCESS,
        protocol_type: str = PROTOCOL_TYPE,
        id_first: bool = False,
    ) -> None:
        """Join a group; `done` gets the reply, in any thread, after all members have joined.

        After a successful join, `nudge` is called if the member has to join again or was removed.
        A member of another process has none: it learns that from its heartbeats.  `id_first`: a new
        member gets its id only, and joins again with it.
        """

        def answer(reply: JoinReply | SyncReply) -> None:
            assert isinstance(reply, JoinReply)
            if not reply.error and nudge is not None:
                with room.lock:
                    if reply.member_id in room.machine.members:  # not removed since
                        room.nudges[reply.member_id] = nudge
            done(reply)

        room = self._room(group_id)

        def event(machine: GroupMachine, now: int) -> list[Effect]:
            refused = self._make_classic(room)
            if refused:
                return [Answer(Request(answer), JoinReply(member_id, refused))]
            return machine.join(
                Request(answer),
                now,
                member_id=member_id,
                instance_id=instance_id,
                client_id=client_id,
                client_host=client_host,
                session_timeout_ms=session_timeout_ms,
                rebalance_timeout_ms=rebalance_timeout_ms,
                protocol_type=protocol_type,
                protocols=protocols,
                id_first=id_first,
                reason=reason,
            )

        self._act(group_id, event)

    def sync(
        self,
        group_id: str,
        done: Callable[[SyncReply], object],
        *,
        member_id: str,
        generation: int,
        instance_id: str | None,
        assignments: Iterable[tuple[str, bytes]] = (),
    ) -> None:
        """Ask for the assignment; `done` gets it after the leader has sent the assignments."""

        def answer(reply: JoinReply | SyncReply) -> None:
            assert isinstance(reply, SyncReply)
            done(reply)

        self._act(
            group_id,
            lambda machine, now: machine.sync(
                Request(answer),
                now,
                member_id=member_id,
                generation=generation,
                instance_id=instance_id,
                assignments=assignments,
            ),
        )

    def heartbeat(
        self,
        group_id: str,
        *,
        member_id: str,
        generation: int,
        instance_id: str | None,
        renew: bool = True,
    ) -> str:
        """Renew the member's lease; return "" or an error.  ``renew=False`` only checks."""
        error = ""

        def event(machine: GroupMachine, now: int) -> list[Effect]:
            nonlocal error
            error, effects = machine.heartbeat(
                now, member_id=member_id, generation=generation, instance_id=instance_id
            )
            return effects if renew else []

        self._act(group_id, event)
        return error

    def leave(
        self,
        group_id: str,
        *,
        member_id: str = "",
        instance_id: str | None = None,
        reason: str = "",
    ) -> str:
        """Remove a member; return "" or an error."""
        return self.leave_later(
            group_id, member_id=member_id, instance_id=instance_id, reason=reason
        ).result()

    def leave_later(
        self,
        group_id: str,
        *,
        member_id: str = "",
        instance_id: str | None = None,
        reason: str = "",
    ) -> Outcome[str]:
        """Remove a member; the outcome is "" or an error."""
        error = ""

        def event(machine: GroupMachine, now: int) -> list[Effect]:
            nonlocal error
            error, effects = machine.leave(
                now, member_id=member_id, instance_id=instance_id, reason=reason
            )
            return effects

        room = self._room(group_id)
        if self._is_consumer_group(room):
            left: Outcome[str] = Outcome()
            turn = self.consume_later(
                room, lambda m, _: m.remove(member_id=member_id, instance_id=instance_id)
            )

            def ended() -> None:
                error = turn.error
                left.settle(error.code if isinstance(error, RebalanceError) else error or "")

            turn.then(ended)
            return left
        self._act(group_id, event)
        return Outcome.of(error)

    def expel(self, group_id: str, member_id: str, reason: str) -> None:
        """Remove a member, and keep the reason for its next heartbeat or commit."""
        room = self._room(group_id)
        with room.lock:
            room.expelled[member_id] = reason  # before the member can ask why
        self.leave(group_id, member_id=member_id, reason=reason)

    def rebalance(self, group_id: str, reason: str) -> None:
        """Have all members of a group join again, or the server's assignor run again."""
        room = self._room(group_id)
        if self._is_consumer_group(room):
            self.consume(room, lambda machine, now: machine.rebalance())
            return
        self._act(group_id, lambda machine, now: machine.rebalance(now, reason))

    def why_out(self, group_id: str, member_id: str) -> str:
        """Return why `expel` removed a member; "" if it did not."""
        return self._room(group_id).expelled.get(member_id, "")  # one lookup: no lock

    # ---- groups of the consumer protocol; their heartbeats are in `ConsumerGroups` ----

    def _make_classic(self, room: GroupRoom) -> str:
        """Give a group without members the classic protocol; return "" or an error."""
        if room.consumer is not None:
            if room.turns:
                return COORDINATOR_LOAD_IN_PROGRESS  # its members are not known yet: try again
            if room.consumer.members:
                return INCONSISTENT_GROUP_PROTOCOL
            # Records that follow are after the tombstones in the log: they are not waited for.
            self.book.delete_group(room.machine.group_id, with_offsets=False).check()
            room.consumer = None
        return ""

    # ---- offsets ----

    def _may_commit(self, group_id: str, offsets: Offsets, member_id: str, generation: int,
                    instance_id: str | None, transactional: bool,
                    held: Callable[[], bool]) -> Guard:  # fmt: skip
        """Return the guard of a commit: the book calls `check` and appends under the lock.

        So no rebalance can begin between the check and the append.
        """
        room = self._room(group_id)

        def check() -> None:
            room.check_commit(
                member_id, generation, instance_id, offsets, transactional=transactional,
                held=held(),
            )  # fmt: skip

        return Guard(room.lock, check)

    def commit(
        self,
        group_id: str,
        offsets: Offsets,
        *,
        member_id: str = "",
        generation: int = -1,
        instance_id: str | None = None,
        held: Callable[[], bool] = lambda: False,
        durability: str | None = None,
    ) -> None:
        """Commit offsets for a member, or without a member id for a group that has no members.

        `held` is called under the group's lock; it returns whether the member has held all these
        partitions since `generation`.  Raises RebalanceError if the group does not allow the
        commit; then nothing was committed.
        """
        self.commit_later(
            group_id, offsets, member_id=member_id, generation=generation, instance_id=instance_id,
            held=held, durability=durability,
        ).result()  # fmt: skip

    def commit_later(
        self,
        group_id: str,
        offsets: Offsets,
        *,
        member_id: str = "",
        generation: int = -1,
        instance_id: str | None = None,
        held: Callable[[], bool] = lambda: False,
        producer: tuple[int, int] | None = None,
        durability: str | None = None,
    ) -> Outcome[range]:
        """Like `commit`, or with `producer` like `commit_in_transaction`, without waiting."""
        within = producer is not None
        guard = self._may_commit(
            group_id, offsets, member_id, generation, instance_id, within, held
        )
        if producer is None:
            return self.book.commit_later(group_id, offsets, guard=guard, durability=durability)
        return self.book.commit_in_transaction_later(
            group_id, offsets, producer=producer, guard=guard
        )

    def commit_in_transaction(
        self,
        group_id: str,
        offsets: Offsets,
        *,
        producer_id: int,
        producer_epoch: int,
        member_id: str = "",
        generation: int = -1,
        instance_id: str | None = None,
        held: Callable[[], bool] = lambda: False,
    ) -> None:
        """Like `OffsetBook.commit_in_transaction`; raise RebalanceError if the group refuses."""
        self.commit_later(
            group_id, offsets, member_id=member_id, generation=generation, instance_id=instance_id,
            held=held, producer=(producer_id, producer_epoch),
        ).result()  # fmt: skip

    # ---- administration ----

    def delete_group(self, group_id: str) -> Outcome[range]:
        """Remove a group and its offsets.  Raises RebalanceError if it has members."""
        room = self._room(group_id)
        with room.lock:
            if not room.empty:
                raise RebalanceError(
                    f"it has {room.member_count} members: close them first",
                    group=group_id, code="NON_EMPTY_GROUP",
                )  # fmt: skip
            # The tombstones first: if the append fails, the group stays as it was.
            deleted = self.book.delete_group(group_id)
            killed = room.machine.kill(self.clock.time_ms(), "deleted")
            calls = self._effects.carry_out(room, killed)
            with self._lock:
                self._rooms.pop(group_id, None)
        for call in calls:
            call()
        return deleted

    def delete_offsets(
        self, group_id: str, partitions: Iterable[tuple[str, int]]
    ) -> Outcome[range]:
        """Delete committed offsets.  Raises RebalanceError if a member reads one of the topics."""
        wanted = [TopicPartition(*each) for each in partitions]
        room = self._room(group_id)
        with room.lock:
            read = room.subscribed()
            taken = sorted({tp.topic for tp in wanted if read is None or tp.topic in read})
            if taken:
                raise RebalanceError(
                    f"its members read {', '.join(taken)}: close them first",
                    group=group_id, code="GROUP_SUBSCRIBED_TO_TOPIC",
                )  # fmt: skip
            return self.book.delete_offsets(group_id, wanted)

    # ---- expiry ----

    def _expire_regularly(self) -> None:
        self.timers.after(EXPIRY_SECONDS, self._expire_regularly)
        self.expire_offsets()

    def expire_offsets(self, now_ms: int | None = None) -> dict[str, list[TopicPartition]]:
        """Delete offsets that are older than the retention time; return them by group.

        The age of an offset is counted from its commit.  If the group has no members, it is counted
        from the time when the last member left, if that is later.  Offsets of topics that a member
        reads are kept.  By default `now_ms` is the clock's time, corrected if the clock has jumped.
        """
        now = self._guarded_clock.now_ms() if now_ms is None else now_ms
        gone: dict[str, list[TopicPartition]] = {}
        for group_id in self.book.groups():
            with contextlib.suppress(CoordinatorError):  # another node coordinates it by now
                expired = self._expire_group(self._room(group_id), now)
                if expired:
                    gone[group_id] = expired
        return gone

    def _expire_group(self, room: GroupRoom, now: int) -> list[TopicPartition]:
        group_id = room.machine.group_id
        with room.lock:
            expired = room.expired_offsets(self.book, now, self.offsets_retention_ms)
            if expired:
                self.book.delete_offsets(group_id, expired)
            if room.is_over(self.book, now, self.offsets_retention_ms, bool(expired)):
                self.book.delete_group(group_id, with_offsets=False)
                room.machine.kill(now, "nothing is left of it")
                with self._lock:
                    self._rooms.pop(group_id, None)
        return expired

    def __repr__(self) -> str:
        return f"<GroupCoordinator of {len(self._rooms)} groups in {str(self.store.path)!r}>"
