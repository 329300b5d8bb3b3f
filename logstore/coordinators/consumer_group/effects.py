"""GroupEffects: carries out the effects of a group's machine: timers, records, answers.

A record of a group may be committed later, by other nodes.  Then the answers of the event that
wrote it wait for it.  Events of the consumer protocol (KIP-848) are *turns*: the next one runs
after the records of the one before are committed, so that `undo` takes back only the last, and no
answer has a state that could be lost.

All methods need the lock of the room, and return calls that the caller makes after it has released
the lock.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from logstore.clock import Clock
from logstore.coordinators.consumer_group.room import GroupRoom, Turn
from logstore.coordinators.group_events import (
    COORDINATOR_NOT_AVAILABLE,
    NOT_COORDINATOR,
    Answer,
    Arm,
    Disarm,
    Effect,
    JoinReply,
    Nudge,
    StoreGroup,
    StoreRecords,
    SyncReply,
)
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS
from logstore.coordinators.offset_book import OffsetBook
from logstore.coordinators.quorum.outcome import Outcome
from logstore.errors import LogStoreError, NotCoordinatorError
from logstore.timers import Timers

__all__ = ["GroupEffects"]

log = logging.getLogger("logstore.groups")

Calls = list[Callable[[], object]]


class GroupEffects:
    """Carries out effects; it has no state of its own.

    `expired` is called in the thread of the timers, with a room and the key of its timer.
    """

    def __init__(
        self,
        book: OffsetBook,
        timers: Timers,
        clock: Clock,
        expired: Callable[[GroupRoom, tuple[str, str]], object],
    ) -> None:
        self._book = book
        self._timers = timers
        self._clock = clock
        self._expired = expired

    def carry_out(self, room: GroupRoom, effects: list[Effect]) -> Calls:
        """Carry out effects of an event.  The caller holds the lock of the room."""
        calls: Calls = []
        answers: list[Answer] = []
        held = False
        queue = list(effects)
        while queue:
            effect = queue.pop(0)
            if isinstance(effect, Arm):
                self._disarm(room, effect.key)
                expired = functools.partial(self._expired, room, effect.key)
                room.timeouts[effect.key] = self._timers.after(effect.delay_ms / 1000, expired)
            elif isinstance(effect, Disarm):
                self._disarm(room, effect.key)
            elif isinstance(effect, StoreGroup):
                written, generation = self._write(room, effect), effect.metadata.generation
                if written.over:  # the effects of `stored` are after those that are here
                    queue += self._stored(room, written, generation)
                else:
                    room.held[written] = [] if held else answers  # with those that follow
                    held = True
                    later = functools.partial(self._stored_later, room, written, generation)
                    # Not under the lock: the append may end at any moment.
                    calls.append(functools.partial(written.then, later))
            elif isinstance(effect, Answer):
                answers.append(effect)
            elif isinstance(effect, Nudge):
                nudge = room.nudges.get(effect.member_id)
                if nudge is not None:
                    calls.append(nudge)
            else:
                assert not isinstance(effect, StoreRecords), "only a turn writes these"
        # A member that was removed is nudged once more: its heartbeat then gets the error.
        for member_id in [m for m in room.nudges if m not in room.machine.members]:
            calls.append(room.nudges.pop(member_id))
        if held:
            return calls
        return [functools.partial(each.request.done, each.reply) for each in answers] + calls

    def _disarm(self, room: GroupRoom, key: tuple[str, str]) -> None:
        timeout = room.timeouts.pop(key, None)
        if timeout is not None:
            self._timers.cancel(timeout)

    # ---- records of the classic protocol ----

    def _write(self, room: GroupRoom, effect: StoreGroup) -> Outcome[range]:
        try:
            return self._book.write_group(room.machine.group_id, effect.metadata)
        except (LogStoreError, OSError) as failure:
            return Outcome.failed(failure)

    def _stored(self, room: GroupRoom, written: Outcome[range], generation: int) -> list[Effect]:
        error = "" if written.error is None else str(written.error)
        if error:
            log.warning("group %s could not be written: %s", room.machine.group_id, error)
        return room.machine.stored(self._clock.time_ms(), error, generation=generation)

    def _stored_later(self, room: GroupRoom, written: Outcome[range], generation: int) -> None:
        with room.lock:
            answers = room.held.pop(written, None)
            if answers is None:
                return  # the node has lost the group since
            calls = self.carry_out(room, self._stored(room, written, generation))
        for answer in answers:
            failed = written.error is not None
            reply = _refusal(answer, COORDINATOR_NOT_AVAILABLE) if failed else answer.reply
            answer.request.done(reply)
        for call in calls:
            call()

    # ---- turns of the consumer protocol ----

    def take_turn(self, room: GroupRoom, turn: Turn[Any]) -> Calls:
        """Run a turn, or have it wait for those before it."""
        room.turns.append(turn)
        return self._run_turns(room)

    def _run_turns(self, room: GroupRoom) -> Calls:
        calls: Calls = []
        while room.turns and room.writing is None:
            turn = room.turns[0]
            try:
                room.check_alive()
                effects = turn.run(self._clock.time_ms())
                written = self._write_records(room, effects)
            except Exception as error:  # noqa: BLE001  the result of the turn
                written = Outcome.failed(error)
            except BaseException:
                room.turns.popleft()
                turn.undo()
                raise
            rest = [] if written.error else _without_records(effects)
            if written.over:
                calls += self._end_turn(room, written, rest)
            else:
                room.writing = written
                later = functools.partial(self._turn_written, room, written, rest)
                calls.append(functools.partial(written.then, later))
        return calls

    def _write_records(self, room: GroupRoom, effects: list[Effect]) -> Outcome[range]:
        stored = [effect for effect in effects if isinstance(effect, StoreRecords)]
        records = [record for effect in stored for record in effect.records]
        return self._book.write_consumer_group(room.machine.group_id, records)

    def _end_turn(self, room: GroupRoom, written: Outcome[range], rest: list[Effect]) -> Calls:
        turn = room.turns.popleft()
        calls: Calls = []
        result: object = None
        try:
            if written.error is not None:
                turn.undo()
                result = written.error
            else:
                calls = self.carry_out(room, rest)
                result = turn.ended()
        except Exception as error:  # noqa: BLE001  the result of the turn
            result = error
        return [*calls, functools.partial(turn.outcome.settle, result)]

    def _turn_written(self, room: GroupRoom, written: Outcome[range], rest: list[Effect]) -> None:
        with room.lock:
            if room.writing is not written:
                return  # the node has lost the group since
            room.writing = None
            calls = self._end_turn(room, written, rest) + self._run_turns(room)
        for call in calls:
            call()

    # ---- the end ----

    def lose(self, room: GroupRoom, partition: int) -> Calls:
        """End a group that another node coordinates now: refuse all that waits."""
        held = [answer for answers in room.held.values() for answer in answers]
        room.held.clear()
        effects = room.machine.kill(
            self._clock.time_ms(), "its partition was lost", NOT_COORDINATOR
        )
        calls = self.carry_out(room, effects)
        for answer in held:
            refused = _refusal(answer, NOT_COORDINATOR)
            calls.append(functools.partial(answer.request.done, refused))
        error = NotCoordinatorError(CONSUMER_OFFSETS, partition)
        calls += [functools.partial(turn.outcome.settle, error) for turn in room.turns]
        room.turns.clear()
        room.writing = None
        for key in list(room.timeouts):
            self._disarm(room, key)
        return calls


def _refusal(answer: Answer, error: str) -> JoinReply | SyncReply:
    """Return the reply to a request whose answer cannot be given."""
    if isinstance(answer.reply, JoinReply):
        return JoinReply(answer.reply.member_id, answer.reply.error or error)
    return SyncReply(error=answer.reply.error or error)


def _without_records(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, StoreRecords)]
