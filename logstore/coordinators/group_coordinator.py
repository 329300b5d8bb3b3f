"""GroupCoordinator: the groups of one store.

It gives each GroupMachine what that does not have: a lock, the time, timers, the log, and a way to
answer.  There is one for each store that is open for writing; members live in the same process and
call it directly, so that nobody has to wait for a heartbeat to learn of a rebalance.

A group is loaded from the log when it is first asked for.  Members of a process that is gone are
taken out then, static ones after their session's time-out.

Threads share it.  Locks: one for each group, taken before those of the OffsetBook; answers and
nudges are given when none is held.
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

# Members of this process say so as their host: a process that ends takes them with it.
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
    """The exception for one of Kafka's error names."""
    reason = _WORDS.get(code, "refused")
    return RebalanceError(f"{reason}; {more}" if more else reason, group=group, code=code)


class _Room:
    """A group with what belongs to it here."""

    def __init__(self, machine: GroupMachine) -> None:
        self.machine = machine
        self.lock = threading.RLock()
        self.timeouts: dict[tuple[str, str], Timeout] = {}
        self.nudges: dict[str, Callable[[], None]] = {}  # by member id
        self.expelled: dict[str, str] = {}  # members that were put out, and why


class GroupCoordinator(Closeable):
    """The groups of one store: `GroupCoordinator.of`.

    `config` may be replaced at any time; groups that are loaded later go by it.
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
        """The coordinator of a store; closed with it."""
        return store.companions.of(cls)

    def close(self) -> None:
        """End all groups here; what they are is in the log."""
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
        """Have something done by the one thread for that, in the order of asking."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"the store {self.store.path} is closed")
            if self._worker is None:
                self._worker = concurrent.futures.ThreadPoolExecutor(1, "logstore commits")
            return self._worker.submit(act)

    # ---- groups ----

    def _room(self, group_id: str) -> _Room:
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
        try:  # outside of the coordinator's lock: others may go on with other groups
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
        # What the machine wants is done to the end: the group would wait for ever for the rest.
        uninterrupted(lambda: self._act_now(group_id, event))

    def _act_now(self, group_id: str, event: Callable[[GroupMachine, int], list[Effect]]) -> None:
        room = self._room(group_id)
        with room.lock:
            later = self._carry_out(room, event(room.machine, self.clock.time_ms()))
        for call in later:
            call()

    def _carry_out(self, room: _Room, effects: list[Effect]) -> list[Callable[[], object]]:
        """Do what the machine wants, under the group's lock; what is left to do without it."""
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
        for member_id in [m for m in room.nudges if m not in room.machine.members]:
            later.append(room.nudges.pop(member_id))
        return later

    def _disarm(self, room: _Room, key: tuple[str, str]) -> None:
        timeout = room.timeouts.pop(key, None)
        if timeout is not None:
            self.timers.cancel(timeout)

    def _write(self, room: _Room, effect: StoreGroup) -> list[Effect]:
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
                return  # cancelled, or set anew, while we came
            del room.timeouts[key]
            now = self.clock.time_ms()
            later = self._carry_out(room, room.machine.expire(key, now))
        for call in later:
            call()

    # ---- what members ask for ----

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
        nudge: Callable[[], None],
        reason: str = "",
    ) -> None:
        """Join; `done` gets the answer, perhaps in another thread, when the others have joined.

        `nudge` is called from then on whenever the member should look after itself: to join again,
        or because it was taken out.
        """

        def answer(reply: JoinReply | SyncReply) -> None:
            assert isinstance(reply, JoinReply)
            if not reply.error:
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
                client_host=IN_PROCESS,
                session_timeout_ms=session_timeout_ms,
                rebalance_timeout_ms=rebalance_timeout_ms,
                protocol_type=PROTOCOL_TYPE,
                protocols=protocols,
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
        """Ask for the assignment; `done` gets it when the leader has brought it."""

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
        """Renew the member's lease; "" or what it has to know.  ``renew=False`` only asks."""
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
        """Take a member out; "" or why that cannot be."""
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
        """Take a member out that does not do its part; it is told why when it comes back."""
        room = self._room(group_id)
        with room.lock:
            room.expelled[member_id] = reason
        self.leave(group_id, member_id=member_id, reason=reason)

    def why_out(self, group_id: str, member_id: str) -> str:
        """Why a member was put out; "" when nobody said."""
        return self._room(group_id).expelled.get(member_id, "")

    # ---- offsets ----

    def _may_commit(self, group_id: str, member_id: str, generation: int, instance_id: str | None,
                    transactional: bool, held: Callable[[], bool]) -> Guard:  # fmt: skip
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
        """Commit offsets for a member, or from outside of a group without members.

        `held` is called under the group's lock; it returns whether the member has held all these
        partitions since `generation`.  Raises RebalanceError when the group does not allow the
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
        """As `OffsetBook.commit_in_transaction`, when the group allows it."""
        guard = self._may_commit(group_id, member_id, generation, instance_id, True, held)
        self.book.commit_in_transaction(
            group_id, offsets, producer_id=producer_id, producer_epoch=producer_epoch, guard=guard
        )

    # ---- administration ----

    def machine(self, group_id: str) -> GroupMachine:
        """The group's state; look at it under `locked`."""
        return self._room(group_id).machine

    @contextlib.contextmanager
    def locked(self, group_id: str) -> Iterator[GroupMachine]:
        """The group's state, which nobody changes meanwhile."""
        room = self._room(group_id)
        with room.lock:
            yield room.machine

    def group_ids(self) -> list[str]:
        """All groups, those without members and those that never wrote anything yet, too."""
        with self._lock:
            live = [name for name, room in self._rooms.items() if room.machine.members]
        return sorted({*live, *self.book.groups()})

    def delete_group(self, group_id: str) -> None:
        """Remove a group and its offsets.  RebalanceError while it has members."""
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
        """Forget committed offsets; those of topics that a member reads are refused."""
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
        """The topics that members of a group read; None when they cannot be known."""
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
        """Forget what nobody has committed for the time of retention; what went, by group.

        Offsets of a group with members stay while it reads their topics; those of a group without
        members count from when the last one left.  `now_ms` is used as it is; by default it is the
        clock's time, less what the clock may have leapt ahead.
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
        """Whether a group has neither members nor offsets, and had none for long enough."""
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
