"""GroupCoordinator: the groups of one store.

A GroupMachine decides, without I/O.  The coordinator gives it a lock, the time, timers and the log,
and delivers its replies.  A store that is open for writing has one coordinator.  Members are in the
same process and call it directly, so a member learns of a rebalance at once (a *nudge*) and not by
its next heartbeat.

A group is loaded from the log at its first use.  Members of a process that has ended are removed
then; static members are removed after their session's time-out.

Threads share it.  The lock of a group (`_Room.lock`) is taken before the coordinator's `_lock` and
before those of the OffsetBook.  Replies and nudges are called while no lock is held, because they
call back into the coordinator.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from logstore.clock import Clock, GuardedClock, SystemClock
from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.coordinators.group_events import (
    COORDINATOR_NOT_AVAILABLE,
    FENCED_INSTANCE_ID,
    GROUP_MAX_SIZE_REACHED,
    ILLEGAL_GENERATION,
    INCONSISTENT_GROUP_PROTOCOL,
    INVALID_SESSION_TIMEOUT,
    REBALANCE_IN_PROGRESS,
    UNKNOWN_MEMBER_ID,
    Answer,
    Arm,
    Disarm,
    Effect,
    GroupConfig,
    GroupState,
    JoinReply,
    Nudge,
    Request,
    StoreGroup,
    SyncReply,
)
from logstore.coordinators.group_machine import GroupMachine
from logstore.coordinators.group_protocol import PROTOCOL_TYPE, Subscription
from logstore.coordinators.offset_book import Guard, OffsetBook, Offsets
from logstore.coordinators.offset_records import TopicPartition, check_text
from logstore.errors import ClosedError, LogStoreError, ReadOnlyError, RebalanceError
from logstore.store.store import Store
from logstore.timers import Timeout, Timers
from logstore.waking import uninterrupted

__all__ = ["GroupCoordinator", "explain"]

log = logging.getLogger("logstore.groups")

# The client host of members of this process.  After a restart, members with this host are gone.
IN_PROCESS = "/in-process"
OFFSETS_RETENTION_MS = 7 * 86_400_000
EXPIRY_SECONDS = 600.0

_WORDS = {
    UNKNOWN_MEMBER_ID: "the member is not in the group any more",
    ILLEGAL_GENERATION: "a rebalance has begun a new generation since",
    REBALANCE_IN_PROGRESS: "a rebalance is under way; poll, and try again",
    FENCED_INSTANCE_ID: "another consumer has taken over the same instance_id",
    INCONSISTENT_GROUP_PROTOCOL: "no assignor that all its members know: give this one theirs",
    INVALID_SESSION_TIMEOUT: "session_timeout is outside of what the group allows",
    GROUP_MAX_SIZE_REACHED: "it is full",
    COORDINATOR_NOT_AVAILABLE: "it was deleted, or the store is being closed",
}


def explain(group: str, code: str, more: str = "") -> RebalanceError:
    """Return the exception for one of Kafka's error names."""
    reason = _WORDS.get(code, "refused")
    return RebalanceError(f"{reason}; {more}" if more else reason, group=group, code=code)


class _Room:
    """One group of the coordinator: its machine, lock and timers.  `lock` guards all fields."""

    def __init__(self, machine: GroupMachine) -> None:
        self.machine = machine
        self.lock = threading.RLock()
        self.timeouts: dict[tuple[str, str], Timeout] = {}
        self.nudges: dict[str, Callable[[], None]] = {}  # by member id
        self.expelled: dict[str, str] = {}  # why members were removed by `expel`, by member id


class GroupCoordinator(Closeable):
    """The groups of one store: `GroupCoordinator.of`.

    `config` may be replaced at any time; groups that are loaded later use it.
    """

    def __init__(self, store: Store) -> None:
        """Use `GroupCoordinator.of`."""
        if store.readonly:
            raise ReadOnlyError(
                f"{store.path} was opened with readonly=True: a consumer without group_id can read "
                f"it, members of a group need the store open for writing"
            )
        self.store = store
        self.book = OffsetBook.of(store)
        self.clock: Clock = store.clock or SystemClock()
        self._guarded_clock = GuardedClock.of(store.clock)
        self.timers = Timers(self.clock, name="logstore groups")
        self.config = GroupConfig(initial_rebalance_delay_ms=0, min_session_timeout_ms=10)
        self.offsets_retention_ms = OFFSETS_RETENTION_MS
        self._lock = threading.Lock()
        self._rooms: dict[str, _Room] = {}
        self._closed = False
        self._worker: concurrent.futures.ThreadPoolExecutor | None = None
        self.timers.after(EXPIRY_SECONDS, self._expire_regularly)
        if isinstance(self.clock, SystemClock):
            self.timers.start()

    @classmethod
    def of(cls, store: Store) -> GroupCoordinator:
        """Return the coordinator of a store; it is closed with the store."""
        return store.companions.of(cls)

    def close(self) -> None:
        """End all groups in memory and answer their waiting requests; the log keeps the groups."""
        with self._lock:
            self._closed = True
            rooms = list(self._rooms.values())
            worker = self._worker
        self.timers.close()
        for room in rooms:
            with room.lock:
                if room.machine.state is not GroupState.DEAD:
                    effects = room.machine.kill(self.clock.time_ms(), "the store is being closed")
                    later = self._carry_out(room, effects)
                else:
                    later = []
            for call in later:
                call()
        if worker is not None:
            worker.shutdown(wait=True)

    def in_background(self, act: Callable[[], None]) -> concurrent.futures.Future[None]:
        """Call `act` in the background thread; calls are done one by one, in the order given."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"the store {self.store.path} is closed")
            if self._worker is None:
                self._worker = concurrent.futures.ThreadPoolExecutor(1, "logstore commits")
            return self._worker.submit(act)

    # ---- groups ----

    def _room(self, group_id: str) -> _Room:
        """Return a group; load it from the log at its first use."""
        if not check_text("a group's name", group_id):
            raise ConfigError("a group has a name, not ''")
        with self._lock:
            if self._closed:
                raise ClosedError(f"the store {self.store.path} is closed")
            room = self._rooms.get(group_id)
        return uninterrupted(lambda: self._load_room(group_id)) if room is None else room

    def _load_room(self, group_id: str) -> _Room:
        with self._lock:
            room = self._rooms.get(group_id)
            if room is not None:
                return room
            machine = GroupMachine(group_id, self.config, now_ms=self.clock.time_ms())
            room = self._rooms[group_id] = _Room(machine)
            room.lock.acquire()
        # The group is visible, and locked until it is loaded.  Its lock was taken under `_lock`,
        # against the order of locks, but no other thread could hold it yet.  Now `_lock` is free:
        # other threads can use other groups, and a thread that wants this one waits.
        try:
            metadata = self.book.metadata(group_id)
            if metadata is not None:
                now = self.clock.time_ms()
                self._carry_out(room, room.machine.load(metadata, now))
                for member in metadata.members:
                    if member.client_host == IN_PROCESS and member.instance_id is None:
                        _, effects = room.machine.leave(
                            now, member_id=member.member_id, reason="its process is gone"
                        )
                        self._carry_out(room, effects)
        except BaseException:
            with self._lock:
                del self._rooms[group_id]
            raise
        finally:
            room.lock.release()
        return room

    def _act(self, group_id: str, event: Callable[[GroupMachine, int], list[Effect]]) -> None:
        # An interrupt between two effects would leave members waiting for ever for a reply.
        uninterrupted(lambda: self._act_now(group_id, event))

    def _act_now(self, group_id: str, event: Callable[[GroupMachine, int], list[Effect]]) -> None:
        room = self._room(group_id)
        with room.lock:
            later = self._carry_out(room, event(room.machine, self.clock.time_ms()))
        for call in later:
            call()

    def _carry_out(self, room: _Room, effects: list[Effect]) -> list[Callable[[], object]]:
        """Carry out effects, with the group's lock held.

        Return the calls of members that the caller has to make after it has released the lock.
        """
        later: list[Callable[[], object]] = []
        queue = list(effects)
        while queue:
            effect = queue.pop(0)
            if isinstance(effect, Arm):
                self._disarm(room, effect.key)
                expired = functools.partial(self._expired, room, effect.key)
                room.timeouts[effect.key] = self.timers.after(effect.delay_ms / 1000, expired)
            elif isinstance(effect, Disarm):
                self._disarm(room, effect.key)
            elif isinstance(effect, StoreGroup):
                queue += self._write(room, effect)
            elif isinstance(effect, Answer):
                later.append(functools.partial(effect.request.done, effect.reply))
            elif isinstance(effect, Nudge):
                nudge = room.nudges.get(effect.member_id)
                if nudge is not None:
                    later.append(nudge)
        # A member that was removed is nudged once more: its heartbeat then gets the error.
        for member_id in [m for m in room.nudges if m not in room.machine.members]:
            later.append(room.nudges.pop(member_id))
        return later

    def _disarm(self, room: _Room, key: tuple[str, str]) -> None:
        timeout = room.timeouts.pop(key, None)
        if timeout is not None:
            self.timers.cancel(timeout)

    def _write(self, room: _Room, effect: StoreGroup) -> list[Effect]:
        """Write the group's record, and return the effects of `stored`."""
        error = ""
        try:
            self.book.write_group(room.machine.group_id, effect.metadata)
        except (LogStoreError, OSError) as failure:
            error = str(failure)
            log.warning("group %s could not be written: %s", room.machine.group_id, error)
        return room.machine.stored(self.clock.time_ms(), error)

    def _expired(self, room: _Room, key: tuple[str, str]) -> None:
        with room.lock:
            timeout = room.timeouts.get(key)
            if timeout is None or timeout.pending:
                return  # cancelled or set again before this thread got the lock
            del room.timeouts[key]
            now = self.clock.time_ms()
            later = self._carry_out(room, room.machine.expire(key, now))
        for call in later:
            call()

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
                    if reply.member_id in room.machine.members:
                        room.nudges[reply.member_id] = nudge
            done(reply)

        room = self._room(group_id)
        self._act(
            group_id,
            lambda machine, now: machine.join(
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
            ),
        )

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
        error = ""

        def event(machine: GroupMachine, now: int) -> list[Effect]:
            nonlocal error
            error, effects = machine.leave(
                now, member_id=member_id, instance_id=instance_id, reason=reason
            )
            return effects

        self._act(group_id, event)
        return error

    def expel(self, group_id: str, member_id: str, reason: str) -> None:
        """Remove a member, and keep the reason for its next heartbeat or commit."""
        room = self._room(group_id)
        with room.lock:
            room.expelled[member_id] = reason
        self.leave(group_id, member_id=member_id, reason=reason)

    def rebalance(self, group_id: str, reason: str) -> None:
        """Have all members of a group join again."""
        self._act(group_id, lambda machine, now: machine.rebalance(now, reason))

    def why_out(self, group_id: str, member_id: str) -> str:
        """Return why `expel` removed a member; "" if it did not."""
        return self._room(group_id).expelled.get(member_id, "")

    # ---- offsets ----

    def _may_commit(self, group_id: str, member_id: str, generation: int, instance_id: str | None,
                    transactional: bool, held: Callable[[], bool]) -> Guard:  # fmt: skip
        """Return the guard of a commit: the book calls `check` and appends under the lock.

        So no rebalance can begin between the check and the append.
        """
        room = self._room(group_id)

        def check() -> None:
            error = room.machine.check_commit(
                member_id, generation, instance_id, transactional=transactional, held=held()
            )
            if error:
                more = room.expelled.get(member_id, "")
                if not member_id and not more:
                    count = len(room.machine.members)
                    more = f"it has {count} members: only they commit; stop them first"
                raise explain(group_id, error, more)

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
    ) -> None:
        """Commit offsets for a member, or without a member id for a group that has no members.

        `held` is called under the group's lock; it returns whether the member has held all these
        partitions since `generation`.  Raises RebalanceError if the group does not allow the
        commit; then nothing was committed.
        """
        guard = self._may_commit(group_id, member_id, generation, instance_id, False, held)
        self.book.commit(group_id, offsets, guard=guard)

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
        guard = self._may_commit(group_id, member_id, generation, instance_id, True, held)
        self.book.commit_in_transaction(
            group_id, offsets, producer_id=producer_id, producer_epoch=producer_epoch, guard=guard
        )

    # ---- administration ----

    def knows(self, group_id: str) -> bool:
        """Return whether there is such a group: in memory, or with a record in the log."""
        with self._lock:
            if group_id in self._rooms:
                return True
        return self.book.knows(group_id)

    def machine(self, group_id: str) -> GroupMachine:
        """Return the group's machine; use it only under `locked`."""
        return self._room(group_id).machine

    @contextlib.contextmanager
    def locked(self, group_id: str) -> Iterator[GroupMachine]:
        """Hold the group's lock, and yield its machine: no other thread changes it."""
        room = self._room(group_id)
        with room.lock:
            yield room.machine

    def group_ids(self) -> list[str]:
        """Return the names of all groups: with members now, or with a record in the log."""
        with self._lock:
            live = [name for name, room in self._rooms.items() if room.machine.members]
        return sorted({*live, *self.book.groups()})

    def delete_group(self, group_id: str) -> None:
        """Remove a group and its offsets.  Raises RebalanceError if it has members."""
        room = self._room(group_id)
        with room.lock:
            if room.machine.state is not GroupState.EMPTY:
                raise RebalanceError(
                    f"it has {len(room.machine.members)} members: close them first",
                    group=group_id, code="NON_EMPTY_GROUP",
                )  # fmt: skip
            self.book.delete_group(group_id)
            self._carry_out(room, room.machine.kill(self.clock.time_ms(), "deleted"))
            with self._lock:
                self._rooms.pop(group_id, None)

    def delete_offsets(self, group_id: str, partitions: Iterable[tuple[str, int]]) -> None:
        """Delete committed offsets.  Raises RebalanceError if a member reads one of the topics."""
        wanted = [TopicPartition(*each) for each in partitions]
        with self.locked(group_id) as machine:
            read = self.subscribed(machine)
            taken = sorted({tp.topic for tp in wanted if read is None or tp.topic in read})
            if machine.members and taken:
                raise RebalanceError(
                    f"its members read {', '.join(taken)}: close them first",
                    group=group_id, code="GROUP_SUBSCRIBED_TO_TOPIC",
                )  # fmt: skip
            self.book.delete_offsets(group_id, wanted)

    @staticmethod
    def subscribed(machine: GroupMachine) -> set[str] | None:
        """Return the topics that the members subscribed to; None if they cannot be decoded."""
        if machine.protocol_type != PROTOCOL_TYPE:
            return None
        topics: set[str] = set()
        for member in machine.members.values():
            for _, raw in member.protocols:
                try:
                    topics.update(Subscription.decode(raw).topics)
                except LogStoreError:
                    return None
        return topics

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
            with self.locked(group_id) as machine:
                expired = self._expired_offsets(machine, now)
                if expired:
                    gone[group_id] = expired
                    self.book.delete_offsets(group_id, expired)
                if self._is_over(machine, now, bool(expired)):
                    self.book.write_group(group_id, None)
                    machine.kill(now, "nothing is left of it")
                    with self._lock:
                        self._rooms.pop(group_id, None)
        return gone

    def _is_over(self, machine: GroupMachine, now: int, expired: bool) -> bool:
        """Return whether a group has neither members nor offsets, for the retention time."""
        if machine.state is not GroupState.EMPTY or machine.members.pending:
            return False
        if self.book.committed(machine.group_id) or self.book.pending(machine.group_id):
            return False
        return expired or machine.state_since_ms + self.offsets_retention_ms <= now

    def _expired_offsets(self, machine: GroupMachine, now: int) -> list[TopicPartition]:
        retention = self.offsets_retention_ms
        pending = self.book.pending(machine.group_id)
        read = self.subscribed(machine) if machine.members else set()
        found = []
        for tp, committed in self.book.committed(machine.group_id).items():
            if tp in pending:
                continue
            if committed.expires >= 0:
                over = now >= committed.expires
            elif machine.state is GroupState.EMPTY:
                known = machine.protocol_type is not None
                since = machine.state_since_ms if known else committed.timestamp
                over = max(since, committed.timestamp) + retention <= now
            elif machine.state is GroupState.STABLE and read is not None:
                over = tp.topic not in read and committed.timestamp + retention <= now
            else:
                over = False
            if over:
                found.append(tp)
        return sorted(found)

    def __repr__(self) -> str:
        return f"<GroupCoordinator of {len(self._rooms)} groups in {str(self.store.path)!r}>"
