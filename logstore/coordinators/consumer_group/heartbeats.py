"""ConsumerGroups: the groups of the consumer protocol (KIP-848) of a GroupCoordinator.

A ConsumerGroupMachine decides, without I/O.  Here it gets the lock of its group, the time, the
topics of the store and the log.  The timers of its members are those of the coordinator.  The
class has no state.
"""

from __future__ import annotations

from logstore.coordinators.consumer_group.machine import (
    ConsumerGroupMachine,
    Heartbeat,
    HeartbeatReply,
)
from logstore.coordinators.consumer_group.room import GroupRoom, Turn
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.group_events import Effect
from logstore.coordinators.group_machine import GroupMachine
from logstore.coordinators.quorum.outcome import Outcome
from logstore.errors import RebalanceError
from logstore.waking import uninterrupted

__all__ = ["ConsumerGroups"]


class ConsumerGroups:
    """Heartbeats of members.  Threads may share one."""

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    def heartbeat(self, group_id: str, beat: Heartbeat) -> HeartbeatReply:
        """Handle a heartbeat.  Its effects are in the log, durably, when it returns.

        The first member of a group without members gives it the consumer protocol; the committed
        offsets stay.  Raises RebalanceError with Kafka's name of the error; then nothing changed.
        """
        # An interrupt between the machine and the log would leave a state that is in no record.
        return uninterrupted(lambda: self.heartbeat_later(group_id, beat).result())

    def heartbeat_later(self, group_id: str, beat: Heartbeat) -> Outcome[HeartbeatReply]:
        """Handle a heartbeat, after those before it; the outcome is there when it is committed."""
        groups, joins = self._groups, beat.epoch == 0
        if not joins and not groups.knows(group_id):
            raise _not_found(group_id, f"Group {group_id} not found.")
        reply: HeartbeatReply | None = None
        classic: GroupMachine | None = None  # what the group had before this heartbeat

        def run(now: int) -> list[Effect]:
            nonlocal reply, classic
            if room.consumer is None:
                before = room.machine
                machine = self._begin(room, joins)
                classic = before
            else:
                machine = room.consumer
            reply, effects = machine.heartbeat(beat, now)
            return effects

        def undo() -> None:
            if classic is not None:
                room.consumer, room.machine = None, classic
            elif room.consumer is not None:
                room.consumer.undo()

        def ended() -> HeartbeatReply:
            if classic is not None and groups.book.metadata(group_id) is not None:
                # If the process ends before the tombstone is written, the group has records of both
                # protocols.  Then those of the consumer protocol count.
                groups.book.write_group(group_id, None)
            assert reply is not None
            return reply

        with groups.locked_room(group_id) as room:
            turn: Turn[HeartbeatReply] = Turn(run, undo, ended)
        groups.take_turn(room, turn)
        return turn.outcome

    def _begin(self, room: GroupRoom, joins: bool) -> ConsumerGroupMachine:
        """Give a group without members the consumer protocol."""
        groups, group_id = self._groups, room.machine.group_id
        if not joins or not room.empty or room.machine.members.pending:
            raise _not_found(group_id, f"Group {group_id} is not a consumer group.")
        room.machine = GroupMachine(group_id, groups.config, now_ms=room.machine.state_since_ms)
        machine = ConsumerGroupMachine(group_id, groups.topics, groups.consumer_config)
        room.consumer = machine
        return machine

    def check_member(self, group_id: str, member_id: str | None, epoch: int) -> None:
        """Raise RebalanceError unless a member with this epoch may fetch committed offsets."""
        if (member_id is None and epoch < 0) or not self._groups.knows(group_id):
            return
        with self._groups.locked_room(group_id) as room:
            if room.consumer is not None:
                room.consumer.check_member(member_id or "", epoch)


def _not_found(group_id: str, text: str) -> RebalanceError:
    return RebalanceError(text, group=group_id, code="GROUP_ID_NOT_FOUND")
