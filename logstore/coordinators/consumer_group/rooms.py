"""GroupRooms: the groups of one store in memory, and the partitions that they are loaded from.

A group is loaded from the log at its first use.  Members of a process that has ended are removed
then; static members are removed after their session's time-out.  In a cluster the groups of a
partition are loaded when this node becomes its leader, and dropped when it is not any more.

The lock of a group (`GroupRoom.lock`) is taken before `_lock` and before those of the OffsetBook.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from logstore.clock import Clock, SystemClock
from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.coordinators.consumer_group.effects import GroupEffects
from logstore.coordinators.consumer_group.machine import (
    ConsumerGroupConfig,
    ConsumerGroupMachine,
)
from logstore.coordinators.consumer_group.room import GroupRoom, StoreTopics, Turn, explain
from logstore.coordinators.group_events import (
    INCONSISTENT_GROUP_PROTOCOL,
    Arm,
    Effect,
    GroupConfig,
    GroupState,
)
from logstore.coordinators.group_machine import GroupMachine
from logstore.coordinators.offset_book import OffsetBook
from logstore.coordinators.offset_records import check_text
from logstore.coordinators.quorum.outcome import Outcome
from logstore.errors import ClosedError, CoordinatorError, ReadOnlyError
from logstore.store.store import Store
from logstore.timers import Timers
from logstore.waking import uninterrupted

__all__ = ["GroupRooms"]

log = logging.getLogger("logstore.groups")

# The client host of members of this process.  After a restart, members with this host are gone.
IN_PROCESS = "/in-process"


class GroupRooms(Closeable):
    """The groups that a GroupCoordinator has; threads share it.

    `config` and `consumer_config` may be replaced at any time; groups that are loaded later use
    them.
    """

    def __init__(self, store: Store) -> None:
        if store.readonly:
            raise ReadOnlyError(
                f"{store.path} was opened with readonly=True: a consumer without group_id can read "
                f"it, members of a group need the store open for writing"
            )
        self.store = store
        self.book = OffsetBook.of(store)
        self.clock: Clock = store.clock or SystemClock()
        self.timers = Timers(self.clock, name="logstore groups")
        self.config = GroupConfig(initial_rebalance_delay_ms=0, min_session_timeout_ms=10)
        self.consumer_config = ConsumerGroupConfig()
        self.topics = StoreTopics(store)
        self._lock = threading.Lock()
        self._rooms: dict[str, GroupRoom] = {}
        self._closed = False
        self._effects = GroupEffects(self.book, self.timers, self.clock, self._expired)
        self.book.when_lost = self.drop

    def close(self) -> None:
        """End all groups in memory and answer their waiting requests; the log keeps the groups."""
        with self._lock:
            self._closed = True
            rooms = list(self._rooms.values())
        # Without `_lock`: `close` waits for the running timer, which may want the lock.
        self.timers.close()
        for room in rooms:
            with room.lock:
                if room.machine.state is not GroupState.DEAD:
                    effects = room.machine.kill(self.clock.time_ms(), "the store is being closed")
                    later = self._effects.carry_out(room, effects)
                else:
                    later = []
            for call in later:
                call()
        self.book.drop_all()  # in a cluster: another node has the groups then

    # ---- partitions that move ----

    def load(self, partition: int, epoch: int) -> bool:
        """Load the groups of a partition that this node leads in `epoch`; see `OffsetBook.load`.

        Return False if that epoch is over.  The sessions of members begin now.
        """
        self.drop(partition, epoch - 1)
        if not self.book.load(partition, epoch):
            return False
        with contextlib.suppress(CoordinatorError):  # the partition was lost again
            for group_id in self.book.groups_of(partition):
                self._room(group_id)
        return True

    def drop(self, partition: int, epoch: int) -> bool:
        """Forget the groups of a partition that this node has lost; return if it was loaded.

        All requests that wait are answered NOT_COORDINATOR at once, or with NotCoordinatorError.
        """
        # The rooms first: an assignment whose record waits is not "could not be written".
        return self.book.drop(partition, epoch, lambda: self._lose_rooms(partition))

    def _lose_rooms(self, partition: int) -> None:
        # A room is listed before it is loaded from the book, which refuses by now: none is missed.
        with self._lock:
            lost = [name for name in self._rooms if self.book.partition_of(name) == partition]
            rooms = [self._rooms.pop(name) for name in lost]
        for room in rooms:
            with room.lock:
                calls = self._effects.lose(room, partition)
            for call in calls:
                call()

    # ---- groups ----

    def _room(self, group_id: str) -> GroupRoom:
        """Return a group; load it from the log at its first use."""
        if not check_text("a group's name", group_id):
            raise ConfigError("a group has a name, not ''")
        self.book.check_here(group_id)
        with self._lock:
            if self._closed:
                raise ClosedError(f"the store {self.store.path} is closed")
            room = self._rooms.get(group_id)
        return uninterrupted(lambda: self._load_room(group_id)) if room is None else room

    def _load_room(self, group_id: str) -> GroupRoom:
        with self._lock:
            room = self._rooms.get(group_id)
            if room is not None:
                return room
            machine = GroupMachine(group_id, self.config, now_ms=self.clock.time_ms())
            room = self._rooms[group_id] = GroupRoom(machine)
            room.lock.acquire()
        # The group is visible, and locked until it is loaded.  Its lock was taken under `_lock`,
        # against the order of locks, but no other thread could hold it yet.  Now `_lock` is free:
        # other threads can use other groups, and a thread that wants this one waits.
        calls: list[Callable[[], object]] = []
        try:
            metadata = self.book.metadata(group_id)
            saved = self.book.consumer_group(group_id)
            if saved is not None:
                room.consumer = ConsumerGroupMachine(
                    group_id, self.topics, self.consumer_config, saved
                )
                self._effects.carry_out(room, room.consumer.load())
            elif metadata is not None:
                now = self.clock.time_ms()
                calls = self._effects.carry_out(room, room.machine.load(metadata, now))
                for member in metadata.members:
                    if member.client_host == IN_PROCESS and member.instance_id is None:
                        _, effects = room.machine.leave(
                            now, member_id=member.member_id, reason="its process is gone"
                        )
                        calls += self._effects.carry_out(room, effects)
        except BaseException:
            with self._lock:
                self._rooms.pop(group_id, None)
            raise
        finally:
            room.lock.release()
        for call in calls:
            call()
        return room

    def _act(self, group_id: str, event: Callable[[GroupMachine, int], list[Effect]]) -> None:
        # An interrupt between two effects would leave members waiting for ever for a reply.
        uninterrupted(lambda: self._act_now(group_id, event))

    def _act_now(self, group_id: str, event: Callable[[GroupMachine, int], list[Effect]]) -> None:
        room = self._room(group_id)
        with room.lock:
            later = self._effects.carry_out(room, event(room.machine, self.clock.time_ms()))
        for call in later:
            call()

    def _expired(self, room: GroupRoom, key: tuple[str, str]) -> None:
        turn: Turn[None] | None = None
        with room.lock:
            timeout = room.timeouts.get(key)
            if timeout is None or timeout.pending:
                return  # cancelled or set again before this thread got the lock
            del room.timeouts[key]
            if room.consumer is not None:
                machine = room.consumer
                turn = Turn(lambda now: machine.expire(key, now), machine.undo, lambda: None)
                later = self._effects.take_turn(room, turn)
            else:
                event = room.machine.expire(key, self.clock.time_ms())
                later = self._effects.carry_out(room, event)
        for call in later:
            call()
        if turn is not None:
            turn.outcome.then(lambda: self._expiry_ended(room, key, turn.outcome.error))

    def _expiry_ended(
        self, room: GroupRoom, key: tuple[str, str], failure: BaseException | None
    ) -> None:
        if failure is not None and room.consumer is not None:
            log.warning("group %s could not be written: %s", room.machine.group_id, failure)
            with room.lock:
                if room.machine.state is not GroupState.DEAD:
                    # The member is still there: try again after the same time.
                    again = Arm(key, room.consumer.config.session_timeout_ms)
                    self._effects.carry_out(room, [again])

    # ---- looking ----

    def knows(self, group_id: str) -> bool:
        """Return whether there is such a group: in memory, or with a record in the log."""
        self.book.check_here(group_id)
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
        with self.locked_room(group_id) as room:
            yield room.machine

    def _is_consumer_group(self, room: GroupRoom) -> bool:
        with room.lock:  # it may be being loaded
            return room.consumer is not None

    @contextlib.contextmanager
    def locked_room(self, group_id: str) -> Iterator[GroupRoom]:
        """Like `locked`, for a group of either protocol."""
        room = self._room(group_id)
        with room.lock:
            yield room

    def group_ids(self) -> list[str]:
        """Return the names of all groups: with members now, or with a record in the log."""
        with self._lock:
            live = [name for name, room in self._rooms.items() if room.member_count]
        return sorted({*live, *self.book.groups()})

    def states(self) -> dict[str, int]:
        """Return how many groups in memory are in each state, by Kafka's names of the states."""
        with self._lock:
            rooms = list(self._rooms.values())
        return dict(collections.Counter(str(room.machine.state.value) for room in rooms))

    # ---- groups of the consumer protocol ----

    def consume(
        self, room: GroupRoom, event: Callable[[ConsumerGroupMachine, int], list[Effect]]
    ) -> None:
        """Carry out an event of a consumer group; it is in the log, durably, when this returns."""
        self.consume_later(room, event).result()

    def consume_later(
        self, room: GroupRoom, event: Callable[[ConsumerGroupMachine, int], list[Effect]]
    ) -> Outcome[None]:
        """Carry out an event of a consumer group, after those before it; undo it if that fails."""

        def run(now: int) -> list[Effect]:
            if room.consumer is None:
                raise explain(room.machine.group_id, INCONSISTENT_GROUP_PROTOCOL)
            return event(room.consumer, now)

        def undo() -> None:
            if room.consumer is not None:
                room.consumer.undo()

        turn: Turn[None] = Turn(run, undo, lambda: None)
        self.take_turn(room, turn)
        return turn.outcome

    def take_turn(self, room: GroupRoom, turn: Turn[Any]) -> None:
        """Run a turn of a consumer group, or have it wait for those before it."""
        with room.lock:
            calls = self._effects.take_turn(room, turn)
        for call in calls:
            call()
