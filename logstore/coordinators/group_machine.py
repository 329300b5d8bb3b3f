"""GroupMachine: one consumer group of Kafka's classic protocol, without I/O.

Each method is an event (`join`, `sync`, `heartbeat`, `leave`, `expire`, `stored`) and returns
effects: requests to answer, timers to set or cancel, a record to write, members to nudge.  The
machine calls no callback, writes nothing, and uses only the time that the caller passes.

    Empty --join--> PreparingRebalance --all joined, or time-out--> CompletingRebalance
      ^                   ^   |                                           |
      |  no member is left|   +<--- a member joins, leaves or expires <---+  the leader's
      +-------------------+------------- the same <----- Stable <---------+  assignment is stored

Invariants: the generation grows by one with each completed join phase.  In Stable every member has
the assignment of this generation, and that assignment is in the log.  A request is answered exactly
once.  Every change of state is in `history`, with its reason.

Threads must not share a machine: the coordinator has a lock for each group.
"""

from __future__ import annotations

import collections
import dataclasses
import uuid
from collections.abc import Callable, Iterable, Sequence

from logstore.coordinators.group_events import (
    ALLOWED_FROM,
    COORDINATOR_NOT_AVAILABLE,
    FENCED_INSTANCE_ID,
    GROUP_MAX_SIZE_REACHED,
    ILLEGAL_GENERATION,
    INCONSISTENT_GROUP_PROTOCOL,
    INVALID_SESSION_TIMEOUT,
    MEMBER_ID_REQUIRED,
    REBALANCE_IN_PROGRESS,
    UNKNOWN_MEMBER_ID,
    Answer,
    Arm,
    Disarm,
    Effect,
    GroupConfig,
    GroupState,
    JoinReply,
    JoinRequest,
    Member,
    Members,
    Nudge,
    Request,
    StoreGroup,
    SyncReply,
    Transition,
)
from logstore.coordinators.offset_records import GroupMetadata

__all__ = ["GroupMachine"]

HISTORY_KEPT = 200
JOIN = ("join", "")
SYNC = ("sync", "")


class GroupMachine:
    """One group.  Every event returns its effects; the caller carries them out in this order."""

    def __init__(
        self,
        group_id: str,
        config: GroupConfig | None = None,
        *,
        now_ms: int = 0,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self.group_id = group_id
        self.config = config or GroupConfig()
        self.state = GroupState.EMPTY
        self.state_since_ms = now_ms
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.members = Members()
        self.history: collections.deque[Transition] = collections.deque(maxlen=HISTORY_KEPT)
        self._new_id = new_id
        self._join_deadline_ms = 0  # until when a first join phase may be extended
        self.unsynced: set[str] = set()  # members of this generation that have not sent a sync yet
        self._initial_waits = False  # a first join phase waits for more members
        self._storing = False  # a StoreGroup with the leader's assignment was returned
        self._effects: list[Effect] = []  # of the current event; `_take` returns them

    # ---- loading ----

    def load(self, metadata: GroupMetadata, now_ms: int) -> list[Effect]:
        """Set the state from the group's record: Stable if it has members, otherwise Empty."""
        self.protocol_type = metadata.protocol_type or None
        self.generation = metadata.generation
        self.protocol = metadata.protocol
        self.state_since_ms = metadata.timestamp if metadata.timestamp >= 0 else now_ms
        self.members.load(metadata)
        for member in self.members.values():
            self._arm_session(member)
        if self.members:
            self.state = GroupState.STABLE
        return self._take()

    def metadata(self) -> GroupMetadata:
        """Return the group's record."""
        return GroupMetadata(
            self.protocol_type or "", self.generation, self.protocol, self.members.leader,
            self.state_since_ms, self.members.saved(self.protocol),
        )  # fmt: skip

    # ---- join ----

    def join(
        self,
        request: Request,
        now_ms: int,
        *,
        member_id: str,
        instance_id: str | None,
        client_id: str,
        client_host: str,
        session_timeout_ms: int,
        rebalance_timeout_ms: int,
        protocol_type: str,
        protocols: Sequence[tuple[str, bytes]],
        id_first: bool = False,
        reason: str = "",
    ) -> list[Effect]:
        """Handle the join of a member, which wants to be in the next generation.

        `id_first`: a new member only gets an id and joins again with it, as Kafka's clients do.  If
        it does not join again, the id is dropped after the session's time-out.
        """
        config = self.config
        told = JoinRequest(instance_id, client_id, client_host, session_timeout_ms,
                           rebalance_timeout_ms, tuple(protocols))  # fmt: skip
        if self.state is GroupState.DEAD:
            return self._refuse(request, member_id, COORDINATOR_NOT_AVAILABLE)
        if not config.min_session_timeout_ms <= session_timeout_ms <= config.max_session_timeout_ms:
            return self._refuse(request, member_id, INVALID_SESSION_TIMEOUT)
        of_group = None if self.state is GroupState.EMPTY else self.protocol_type
        if not self.members.allow(member_id, told, protocol_type, of_group=of_group):
            return self._refuse(request, member_id, INCONSISTENT_GROUP_PROTOCOL)
        preparing = self.state is GroupState.PREPARING_REBALANCE
        if self.members.is_full(config.max_size, member_id, instance_id, preparing=preparing):
            return self._refuse(request, member_id, GROUP_MAX_SIZE_REACHED)
        if instance_id is not None and instance_id in self.members.static:
            known = self.members.static[instance_id]
            if not member_id:
                return self._replace_static(request, now_ms, known, told, reason)
            if member_id != known:
                return self._refuse(request, member_id, FENCED_INSTANCE_ID)
        if not member_id:
            member_id = f"{instance_id if instance_id is not None else client_id}-{self._new_id()}"
            if id_first and instance_id is None:
                self.members.pending[member_id] = None
                self._effects.append(Arm(("pending", member_id), session_timeout_ms))
                self._answer(request, JoinReply(member_id, MEMBER_ID_REQUIRED))
                return self._take()
            self._add(request, now_ms, member_id, told, protocol_type, reason)
            return self._take()
        if member_id in self.members.pending:
            self._forget_pending(member_id)
            self._add(request, now_ms, member_id, told, protocol_type, reason)
            return self._take()
        member = self.members.get(member_id)
        if member is None:
            return self._refuse(request, member_id, UNKNOWN_MEMBER_ID)
        self._join_again(request, now_ms, member, told, reason)
        return self._take()

    def _add(self, request: Request, now_ms: int, member_id: str, told: JoinRequest,
             protocol_type: str, reason: str) -> None:  # fmt: skip
        if not self.members:
            self.protocol_type = protocol_type
        member = Member(member_id, *told, joining=request)
        first_ever = not self.members and self.state is GroupState.EMPTY
        self.members.add(member)
        self._effects.append(Arm(("session", member_id), self.config.new_member_timeout_ms))
        why = f"{member_id} joined" + (f" ({reason})" if reason else "")
        if first_ever:
            self._begin_initial(now_ms, why)
        elif self.state is GroupState.PREPARING_REBALANCE:
            self._extend_initial(now_ms)
            self._try_complete_join(now_ms)
        else:
            self._prepare(now_ms, why)

    def _join_again(self, request: Request, now_ms: int, member: Member, told: JoinRequest,
                    reason: str) -> None:  # fmt: skip
        changed = member.protocols != told.protocols
        member.client_id, member.client_host = told.client_id, told.client_host
        member.session_timeout_ms = told.session_timeout_ms
        member.rebalance_timeout_ms = told.rebalance_timeout_ms
        follower = member.member_id != self.members.leader
        # A follower that repeats its join, because it missed the reply, causes no rebalance.  A
        # join of the leader does: Kafka's leader joins again to have the partitions assigned again.
        nothing_new = not changed and (
            self.state is GroupState.COMPLETING_REBALANCE
            or (self.state is GroupState.STABLE and follower)
        )
        why = f"{member.member_id} joined again" + (f" ({reason})" if reason else "")
        if self.state is GroupState.PREPARING_REBALANCE:
            self._park(member, request, told)
            self._try_complete_join(now_ms)
        elif self.state is GroupState.EMPTY:
            self._answer(request, JoinReply(member.member_id, UNKNOWN_MEMBER_ID))
        elif nothing_new:
            self._answer(request, self._join_reply(member))
            self._arm_session(member)
        else:
            self._park(member, request, told)
            self._prepare(now_ms, why + (", with another subscription" if changed else ""))

    def _park(self, member: Member, request: Request, told: JoinRequest) -> None:
        # Each request is answered once: the earlier join of the same member ends here.
        if member.joining is not None:
            self._answer(member.joining, JoinReply(member.member_id, REBALANCE_IN_PROGRESS))
        member.joining = request
        member.protocols = told.protocols
        # No session time-out while its join waits: the member cannot send heartbeats then.
        self._effects.append(Disarm(("session", member.member_id)))

    def _replace_static(self, request: Request, now_ms: int, old_id: str, told: JoinRequest,
                        reason: str) -> list[Effect]:  # fmt: skip
        """Give a static member that joins again a new id; keep its assignment, fence the old id."""
        instance_id = told.instance_id
        assert instance_id is not None
        old = self.members[old_id]
        new_id = f"{instance_id}-{self._new_id()}"
        was_joining = old.joining is not None
        self._turn_away(old, FENCED_INSTANCE_ID)
        new = Member(new_id, *told, assignment=old.assignment, is_new=old.is_new)
        self.members.replace(old_id, new)
        if old_id in self.unsynced:
            self.unsynced = {*self.unsynced, new_id} - {old_id}
        self._effects.append(Disarm(("session", old_id)))
        why = f"static member {instance_id} came back as {new_id}" + (f" ({reason})" * bool(reason))
        protocol = self.members.choose_protocol(self.protocol or "")
        if self.state is GroupState.STABLE and protocol == self.protocol:
            # No rebalance: the assignment stays valid, only the record needs the new id.
            self._arm_session(new)
            self._effects.append(StoreGroup(self.metadata()))
            reply_now = dataclasses.replace(self._join_reply(new), skip_assignment=True)
            self._answer(request, reply_now)
        elif self.state is GroupState.PREPARING_REBALANCE:
            new.joining = request
            if was_joining:
                self._effects.append(Disarm(("session", new_id)))
            self._try_complete_join(now_ms)
        elif self.state is GroupState.EMPTY:  # an empty group has no members to replace
            raise AssertionError("an empty group with a static member")
        else:
            new.joining = request
            self._prepare(now_ms, why)
        return self._take()

    # ---- the join phase ----

    def _begin_initial(self, now_ms: int, reason: str) -> None:
        self._move(GroupState.PREPARING_REBALANCE, now_ms, reason)
        delay = min(self.config.initial_rebalance_delay_ms, self.members.rebalance_timeout_ms())
        self._join_deadline_ms = now_ms + self.members.rebalance_timeout_ms()
        if delay > 0:
            self._effects.append(Arm(JOIN, delay))
            self._initial_waits = True
        else:
            self._effects.append(Arm(JOIN, self.members.rebalance_timeout_ms()))
            self._try_complete_join(now_ms)

    def _extend_initial(self, now_ms: int) -> None:
        """Extend the first join phase of a group after a new member has joined."""
        if self._initial_waits:
            left = max(0, self._join_deadline_ms - now_ms)
            self._effects.append(Arm(JOIN, min(self.config.initial_rebalance_delay_ms, left)))

    def _prepare(self, now_ms: int, reason: str) -> None:
        """Begin a join phase: all members have to join again."""
        if self.state is GroupState.COMPLETING_REBALANCE:
            for member in self.members.values():
                member.assignment = b""
                self._end_sync(member, SyncReply(error=REBALANCE_IN_PROGRESS))
        self._effects.append(Disarm(SYNC))
        self.unsynced.clear()
        self._storing = False
        self._initial_waits = False
        self._move(GroupState.PREPARING_REBALANCE, now_ms, reason)
        self._effects.append(Arm(JOIN, self.members.rebalance_timeout_ms()))
        for member in self.members.values():
            if member.joining is None:
                self._effects.append(Nudge(member.member_id))
        self._try_complete_join(now_ms)

    def _try_complete_join(self, now_ms: int) -> None:
        if self.state is not GroupState.PREPARING_REBALANCE or self._initial_waits:
            return
        if self.members.all_joined():
            self._complete_join(now_ms, "all members joined")

    def _complete_join(self, now_ms: int, reason: str) -> None:
        """End the join phase: the members that have joined are the next generation.

        Members that have not joined are removed, except static ones, which keep their place until
        their sessions time out.
        """
        self._initial_waits = False
        late = [m for m in self.members.values() if m.joining is None and m.instance_id is None]
        for member in late:
            self._forget(member)
        if late:
            reason = f"{reason}; without {', '.join(m.member_id for m in late)}, which did not join"
        present = self.members.joined()
        if not present and self.members:
            # Only static members are left, and none has joined: wait until their sessions end.
            self._effects.append(Arm(JOIN, self.members.rebalance_timeout_ms()))
            return
        self._effects.append(Disarm(JOIN))
        self.unsynced.clear()
        self.generation += 1
        if not self.members:
            self.protocol = self.members.leader = None
            self._move(GroupState.EMPTY, now_ms, reason if late else "the last member is gone")
            self._effects.append(StoreGroup(self.metadata()))
            return
        leader = self.members.get(self.members.leader or "")
        if leader is None or leader.joining is None:
            self.members.leader = present[0].member_id
        self.protocol = self.members.choose_protocol(self.protocol or "")
        self._move(GroupState.COMPLETING_REBALANCE, now_ms, reason)
        self._effects.append(Arm(SYNC, self.members.rebalance_timeout_ms()))
        for member in present:
            assert member.joining is not None
            self._answer(member.joining, self._join_reply(member))
            member.joining = None
            member.is_new = False
            self.unsynced.add(member.member_id)
            self._arm_session(member)

    def _join_reply(self, member: Member) -> JoinReply:
        """Return the reply to a member's join, and note that the member is in this generation."""
        member.generation = self.generation
        members = self.members.subscriptions(self.protocol)
        return JoinReply(member.member_id, "", self.generation, self.protocol,
                         self.members.leader or "",
                         members if member.member_id == self.members.leader else ())  # fmt: skip

    # ---- sync ----

    def sync(
        self,
        request: Request,
        now_ms: int,
        *,
        member_id: str,
        generation: int,
        instance_id: str | None = None,
        assignments: Iterable[tuple[str, bytes]] = (),
    ) -> list[Effect]:
        """Handle the sync of a member: it asks for its assignment; the leader sends all of them."""
        error = self._check(member_id, generation, instance_id)
        if not error and self.state is GroupState.EMPTY:
            error = UNKNOWN_MEMBER_ID
        if not error and self.state is GroupState.PREPARING_REBALANCE:
            error = REBALANCE_IN_PROGRESS
        if error:
            self._answer(request, SyncReply(error=error))
            return self._take()
        member = self.members[member_id]
        self.unsynced.discard(member_id)
        if self.state is GroupState.STABLE:
            if not self.unsynced:
                self._effects.append(Disarm(SYNC))
            self._answer(request, SyncReply(member.assignment, "", self.protocol))
            self._arm_session(member)
            return self._take()
        self._end_sync(member, SyncReply(error=REBALANCE_IN_PROGRESS))
        member.syncing = request
        self._effects.append(Disarm(("session", member_id)))
        # Other members wait until the assignment is in the log: see `stored`.
        if member_id == self.members.leader and not self._storing:
            given = dict(assignments)
            for each in self.members.values():
                each.assignment = given.get(each.member_id, b"")
            self._storing = True
            self._effects.append(StoreGroup(self.metadata()))
        return self._take()

    def stored(self, now_ms: int, error: str = "", generation: int = -1) -> list[Effect]:
        """Handle the end of a StoreGroup: the record is in the log, or `error` is the reason.

        `generation`: that of the record; -1 is the group's.  The record may be of an earlier one.
        """
        late = not self._storing or generation not in (-1, self.generation)
        if self.state is not GroupState.COMPLETING_REBALANCE or late:
            return self._take()
        self._storing = False
        if error:
            for member in self.members.values():
                member.assignment = b""
                self._end_sync(member, SyncReply(error=COORDINATOR_NOT_AVAILABLE))
            self._prepare(now_ms, f"the assignment could not be stored: {error}")
            return self._take()
        self._move(GroupState.STABLE, now_ms, f"{self.members.leader} assigned by {self.protocol}")
        for member in self.members.values():
            self._end_sync(member, SyncReply(member.assignment, "", self.protocol))
        if not self.unsynced:
            self._effects.append(Disarm(SYNC))
        return self._take()

    def _end_sync(self, member: Member, reply: SyncReply) -> None:
        if member.syncing is not None:
            self._answer(member.syncing, reply)
            member.syncing = None
            self._arm_session(member)

    # ---- heartbeat, leave, commit ----

    def heartbeat(
        self, now_ms: int, *, member_id: str, generation: int, instance_id: str | None = None
    ) -> tuple[str, list[Effect]]:
        """Handle a heartbeat: renew the session; return "" or an error."""
        error = self._check(member_id, generation, instance_id)
        if not error and self.state is GroupState.EMPTY:
            error = UNKNOWN_MEMBER_ID
        if error:
            return error, []
        self._arm_session(self.members[member_id])
        if self.state is GroupState.PREPARING_REBALANCE:
            error = REBALANCE_IN_PROGRESS
        return error, self._take()

    def leave(
        self, now_ms: int, *, member_id: str = "", instance_id: str | None = None, reason: str = ""
    ) -> tuple[str, list[Effect]]:
        """Remove a member; an instance id without a member id removes a static member."""
        if self.state is GroupState.DEAD:
            return COORDINATOR_NOT_AVAILABLE, []
        if not member_id and instance_id is not None:
            member_id = self.members.static.get(instance_id, "")
        if instance_id is not None and self.members.static.get(instance_id, member_id) != member_id:
            return FENCED_INSTANCE_ID, []
        if member_id in self.members.pending:
            self._forget_pending(member_id)
            self._try_complete_join(now_ms)
            return "", self._take()
        member = self.members.get(member_id)
        if member is None:
            return UNKNOWN_MEMBER_ID, []
        if instance_id is not None and self.members.static.get(instance_id) != member_id:
            return FENCED_INSTANCE_ID, []
        self._remove(member, now_ms, f"{member_id} left" + (f" ({reason})" if reason else ""))
        return "", self._take()

    def check_commit(
        self, member_id: str, generation: int, instance_id: str | None = None, *,
        transactional: bool = False, held: bool = False,
    ) -> str:  # fmt: skip
        """Return "" if offsets may be committed, or an error.

        A commit without a generation is allowed if the group has no members.  One without a member
        id, too, is not of a member.

        `held`: the member has held the partitions since `generation` or before.  It has claimed
        them in every join since, and a cooperative assignor gives a claimed partition to no other
        member.  So the commit is valid even if the member has not received the reply to its latest
        join, or the leader has not assigned yet.  It is refused if the member missed the latest
        generation.
        """
        if self.state is GroupState.DEAD:
            return COORDINATOR_NOT_AVAILABLE
        if generation < 0 and self.state is GroupState.EMPTY:
            return ""
        if generation < 0 and not member_id and instance_id is None:
            return "" if transactional else UNKNOWN_MEMBER_ID
        error = self._check(member_id, generation, instance_id)
        if not error and self.state is GroupState.COMPLETING_REBALANCE and not transactional:
            error = REBALANCE_IN_PROGRESS
        if (
            held
            and error in (ILLEGAL_GENERATION, REBALANCE_IN_PROGRESS)
            and self.members[member_id].generation == self.generation
        ):
            return ""
        return error

    def _check(self, member_id: str, generation: int, instance_id: str | None) -> str:
        if self.state is GroupState.DEAD:
            return COORDINATOR_NOT_AVAILABLE
        error = self.members.check(member_id, instance_id)
        if error:
            return error
        if generation != self.generation:
            return ILLEGAL_GENERATION
        return ""

    # ---- time ----

    def expire(self, key: tuple[str, str], now_ms: int) -> list[Effect]:
        """Handle a timer that has expired."""
        kind, member_id = key
        if kind == "pending":
            if member_id in self.members.pending:
                del self.members.pending[member_id]
                self._try_complete_join(now_ms)
        elif kind == "session":
            member = self.members.get(member_id)
            waits = member is not None and (member.joining or member.syncing)
            # A member whose request waits is alive, except a new one: its client may have gone
            # before it learned its id.
            if member is not None and (member.is_new or not waits):
                self._remove(member, now_ms, f"{member_id} was not heard of for "
                             f"{member.session_timeout_ms} ms")  # fmt: skip
        elif key == JOIN and self.state is GroupState.PREPARING_REBALANCE:
            first, self._initial_waits = self._initial_waits, False
            if first and not self.members.all_joined():
                # A pending id has not joined yet: wait for it until the deadline.
                self._effects.append(Arm(JOIN, max(1, self._join_deadline_ms - now_ms)))
            else:
                self._complete_join(
                    now_ms, "the first members joined" if first else "the time to join is up"
                )
        elif key == SYNC and self.state in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE):
            late = [m for m in self.members.values() if m.member_id in self.unsynced]
            for member in late:
                self._forget(member)
            if late:
                names = ", ".join(member.member_id for member in late)
                self._prepare(now_ms, f"{names} did not ask for an assignment in time")
        return self._take()

    def rebalance(self, now_ms: int, reason: str) -> list[Effect]:
        """Have all members of a group join again.  Does nothing while they do."""
        if self.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
            self._prepare(now_ms, reason)
        return self._take()

    def kill(self, now_ms: int, reason: str, error: str = "") -> list[Effect]:
        """End the group: remove all members, answer their requests with an error."""
        for member in list(self.members.values()):
            self._forget(member, error or COORDINATOR_NOT_AVAILABLE)
        for member_id in list(self.members.pending):
            self._forget_pending(member_id)
        self._effects += [Disarm(JOIN), Disarm(SYNC)]
        self._move(GroupState.DEAD, now_ms, reason)
        return self._take()

    # ---- steps of the events above; they add to `_effects` ----

    def _remove(self, member: Member, now_ms: int, reason: str) -> None:
        self._forget(member)
        if self.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
            self._prepare(now_ms, reason)
        elif self.state is GroupState.PREPARING_REBALANCE:
            if not self.members and not self.members.pending:
                self._complete_join(now_ms, reason)
            else:
                self._try_complete_join(now_ms)

    def _forget(self, member: Member, error: str = UNKNOWN_MEMBER_ID) -> None:
        """Remove a member, and answer its waiting requests with an error."""
        self._turn_away(member, error)
        self.unsynced.discard(member.member_id)
        self.members.remove(member)
        self._effects.append(Disarm(("session", member.member_id)))

    def _turn_away(self, member: Member, error: str) -> None:
        """Answer the waiting requests of a member with an error."""
        if member.joining is not None:
            self._answer(member.joining, JoinReply(member.member_id, error))
            member.joining = None
        if member.syncing is not None:
            self._answer(member.syncing, SyncReply(error=error))
            member.syncing = None

    def _forget_pending(self, member_id: str) -> None:
        del self.members.pending[member_id]
        self._effects.append(Disarm(("pending", member_id)))

    def _refuse(self, request: Request, member_id: str, error: str) -> list[Effect]:
        self._answer(request, JoinReply(member_id, error))
        return self._take()

    def _answer(self, request: Request, reply: JoinReply | SyncReply) -> None:
        self._effects.append(Answer(request, reply))

    def _arm_session(self, member: Member) -> None:
        self._effects.append(Arm(("session", member.member_id), member.session_timeout_ms))

    def _move(self, target: GroupState, now_ms: int, reason: str) -> None:
        source, self.state, self.state_since_ms = self.state, target, now_ms
        assert source in ALLOWED_FROM[target], f"{source} -> {target}: {reason}"
        self.history.append(Transition(now_ms, source, target, self.generation, reason))

    def _take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def __repr__(self) -> str:
        members = f"{len(self.members)} members in generation {self.generation}"
        return f"<GroupMachine {self.group_id!r} {self.state} with {members}>"
