"""Membership: one consumer as a member of its group.

It joins the group, runs the assignor if it is the leader, gets its assignment, and renews its
lease (heartbeats).  Threads of other members and of the timers do most of that.  An assignment, or
its loss, is kept here until the consumer's own thread takes it.  So the user's callbacks run in the
consumer's thread, and a record that takes long to process does not cost the membership.

With a cooperative assignor a member joins again from any thread when another member joins or
leaves, and sends the partitions that it still holds.  The group assigns none of these to another
member before the consumer has given it back.  With an eager assignor the consumer's thread gives
all partitions back before it joins, and the group waits for it, up to the rebalance time-out.

Invariant: `_owned` contains every partition that the consumer may be reading.

`_lock` guards the state.  It is taken last: only `timers.after` is called while it is held.  The
coordinator calls `_joined`, `_synced` and `_look` from any thread, and never under its own lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from logstore.consumer.assignors import Assignor
from logstore.coordinators.group_coordinator import GroupCoordinator, explain
from logstore.coordinators.group_events import (
    FENCED_INSTANCE_ID,
    GROUP_MAX_SIZE_REACHED,
    INCONSISTENT_GROUP_PROTOCOL,
    INVALID_SESSION_TIMEOUT,
    REBALANCE_IN_PROGRESS,
    JoinReply,
    SyncReply,
)
from logstore.coordinators.group_protocol import Assignment, Subscription
from logstore.coordinators.offset_records import TopicPartition
from logstore.errors import ClosedError
from logstore.timers import Timeout
from logstore.waking import uninterrupted

__all__ = ["Membership", "MembershipSettings"]

log = logging.getLogger("logstore.groups")

OUT, JOINING, SYNCING, MEMBER = "out", "joining", "syncing", "member"
FATAL = {
    FENCED_INSTANCE_ID,
    GROUP_MAX_SIZE_REACHED,
    INCONSISTENT_GROUP_PROTOCOL,
    INVALID_SESSION_TIMEOUT,
}


@dataclasses.dataclass(frozen=True, slots=True)
class MembershipSettings:
    """What a consumer sends to its group when it joins; times are seconds."""

    group_id: str
    client_id: str
    instance_id: str | None
    assignors: tuple[Assignor, ...]
    session_timeout: float
    rebalance_timeout: float
    heartbeat_interval: float

    @property
    def cooperative(self) -> bool:
        """Whether all of its assignors move a partition in two rebalances."""
        return all(assignor.cooperative for assignor in self.assignors)


class Membership:
    """One consumer in one group.

    `attention` is called by any thread if there is an assignment or a loss for the consumer to
    take.  `alive` returns whether the consumer is still used; if not, the lease is not renewed.
    `overdue` returns a text if a record is processed for too long, or "".  `topics` returns the
    names of the subscribed topics, `partitions` the partition numbers of given topics.
    """

    def __init__(
        self,
        coordinator: GroupCoordinator,
        settings: MembershipSettings,
        *,
        attention: Callable[[], None],
        alive: Callable[[], bool],
        overdue: Callable[[], str],
        topics: Callable[[], tuple[str, ...]],
        partitions: Callable[[Sequence[str]], dict[str, list[int]]],
    ) -> None:
        self.coordinator = coordinator
        self.settings = settings
        self.member_id = ""
        self.generation = -1
        self._attention = attention
        self._alive = alive
        self._overdue = overdue
        self._topics = topics
        self._partitions = partitions
        self._lock = threading.Lock()
        self._phase = OUT
        self._attempt = 0  # of the latest join; a reply to an earlier one is ignored
        self._closed = False
        # The partitions that the consumer reads, is about to read or is giving back, each with the
        # generation since which it holds it.  Only the consumer's thread changes it.
        # `_owned_generation` is the generation of the latest assignment in it.
        self._owned: dict[TopicPartition, int] = {}
        self._owned_generation = -1
        self._subscribed: tuple[str, ...] = ()
        self._led: dict[str, list[int]] | None = None  # partitions of its last assignment as leader
        self._rejoin: str | None = None  # why the consumer's thread has to join again
        self._assigned: tuple[TopicPartition, ...] | None = None  # of `generation`, not taken yet
        self._lost: str | None = None  # why the group removed this member, not taken yet
        self._failure: BaseException | None = None  # raised by every poll from now on
        self._beat: Timeout | None = None  # set under the lock; `leave` cancels it

    # ---- for the consumer's thread ----

    def needs_to_join(self) -> str | None:
        """Return why the consumer has to join now; None if it need not."""
        with self._lock:
            # An assignment that waits is taken first: a join would drop it.
            if self._closed or self._phase in (JOINING, SYNCING) or self._assigned is not None:
                return None
            if self._phase == OUT:
                return self._rejoin or "a new consumer"
            return self._rejoin

    def take_assignment(self) -> tuple[TopicPartition, ...] | None:
        """Return a new assignment, once, and add its partitions to those that are held.

        Both happen under the lock: if another thread makes this member join again, the member
        claims the new partitions as well as the old ones.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            assigned, self._assigned = self._assigned, None
            if assigned is not None:
                # Partitions that it held before keep their older generation: see `holds`.
                self._owned = {**dict.fromkeys(assigned, self.generation), **self._owned}
                self._owned_generation = self.generation
            return assigned

    def take_loss(self) -> str | None:
        """Return why the member lost all its partitions, once; None if it did not."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            lost, self._lost = self._lost, None
            if lost is not None:
                self._owned = {}
                self._assigned = None
            return lost

    @property
    def loss(self) -> str:
        """Why the member lost its partitions, until the consumer takes it; "" otherwise."""
        return self._lost or ""

    def release(self, partitions: Iterable[TopicPartition]) -> None:
        """Give up partitions that the consumer has stopped reading: the group may reassign them."""
        released = set(partitions)
        with self._lock:
            self._owned = {tp: since for tp, since in self._owned.items() if tp not in released}

    def holds(self, partitions: Iterable[tuple[str, int]], generation: int) -> bool:
        """Return whether it is a member and has held all of these since `generation` or before."""
        with self._lock:
            owned = self._owned if self.member_id else {}
            return all(
                owned.get(TopicPartition(*tp), generation + 1) <= generation for tp in partitions
            )

    def join_again(self, reason: str) -> None:
        """Make the consumer's thread join again, since its subscription or partitions changed."""
        with self._lock:
            self._rejoin = reason

    @property
    def settled(self) -> bool:
        """Whether it is a member, and neither an assignment nor a loss waits for the consumer."""
        with self._lock:
            return self._phase == MEMBER and self._assigned is None and self._lost is None

    @property
    def joined(self) -> bool:
        """Whether it is a member now."""
        return self._phase == MEMBER

    # ---- joining ----

    def join(self, reason: str) -> None:
        """Ask to be in the next generation; `take_assignment` returns the result later."""
        topics = self._topics()
        # `_phase` is set before the request: an interrupt in between would leave this member
        # waiting for a reply that never arrives.
        uninterrupted(lambda: self._join(reason, topics))

    def _join(self, reason: str, topics: tuple[str, ...]) -> None:
        settings = self.settings
        with self._lock:
            if self._closed or self._lost is not None or self._phase in (JOINING, SYNCING):
                return
            self._phase = JOINING
            self._rejoin = None
            self._assigned = None  # it was not taken, so it is not owned: drop it
            self._attempt += 1
            attempt, member_id = self._attempt, self.member_id
            owned, generation = tuple(sorted(self._owned)), self._owned_generation
            self._subscribed = topics
            if self._beat is None:
                self._beat = self.coordinator.timers.after(
                    settings.heartbeat_interval, self._heartbeat
                )
        # Without the lock from here on: `user_data` is code of the user; and the order is the lock
        # of the group, then this one: the coordinator calls `holds` under its lock.
        protocols = [
            (
                assignor.name,
                Subscription(
                    topics,
                    assignor.user_data(owned, generation),
                    owned if settings.cooperative else (),
                    generation,
                ).encode(),
            )
            for assignor in settings.assignors
        ]
        self.coordinator.join(
            settings.group_id,
            lambda reply: self._joined(attempt, reply),
            member_id=member_id,
            instance_id=settings.instance_id,
            client_id=settings.client_id,
            session_timeout_ms=round(settings.session_timeout * 1000),
            rebalance_timeout_ms=round(settings.rebalance_timeout * 1000),
            protocols=protocols,
            nudge=self._look,
            reason=reason,
        )

    def _joined(self, attempt: int, reply: JoinReply) -> None:
        """Handle the reply to a join: assign if this is the leader, then ask for the assignment.

        A reply to an earlier attempt is ignored.
        """
        with self._lock:
            # Read once: `leave` may close the membership between the two uses.
            closed = self._closed
            if attempt != self._attempt and not closed:
                return
            if closed:
                pass
            elif reply.error:
                self._refused(reply.error)
            else:
                self.member_id, self.generation = reply.member_id, reply.generation
                self._phase = SYNCING
        if closed:
            # `leave` was called before this reply, without a member id: leave now.
            if not reply.error and self.settings.instance_id is None:
                self.coordinator.leave(
                    self.settings.group_id, member_id=reply.member_id, reason="closed while joining"
                )
            return
        if reply.error:
            self._attention()
            return
        assignments: list[tuple[str, bytes]] = []
        if reply.leader == reply.member_id and not reply.skip_assignment:
            try:
                # In the thread that completed the join phase, without any lock: an assignor is code
                # of the user.
                assignments = self._assign(reply)
            except BaseException as error:  # noqa: BLE001  of the user's assignor: `poll` raises it
                with self._lock:
                    self._failure = error
                    self._phase = OUT
                self.coordinator.leave(
                    self.settings.group_id, member_id=reply.member_id, reason=f"assignor: {error}"
                )
                self._attention()
                return
        self.coordinator.sync(
            self.settings.group_id,
            lambda answer: self._synced(attempt, answer),
            member_id=reply.member_id,
            generation=reply.generation,
            instance_id=self.settings.instance_id,
            assignments=assignments,
        )

    def _assign(self, reply: JoinReply) -> list[tuple[str, bytes]]:
        """Run the assignor, as the leader; return the encoded assignment of each member."""
        assignor = next(a for a in self.settings.assignors if a.name == reply.protocol)
        members = [assignor.member(*member) for member in reply.members]
        topics = sorted({topic for member in members for topic in member.topics})
        partitions = self._partitions(topics)
        given = assignor.run(partitions, members)
        with self._lock:
            # `_what_changed` compares it: a partition that was added makes the leader join again.
            self._led = partitions
        return [(m, Assignment(tuple(held)).encode()) for m, held in given.items()]

    def _synced(self, attempt: int, reply: SyncReply) -> None:
        with self._lock:
            if attempt != self._attempt or self._closed:
                return
            if reply.error:
                self._refused(reply.error)
            else:
                self._assigned = Assignment.decode(reply.assignment).partitions
                self._phase = MEMBER
        self._attention()

    def _refused(self, error: str) -> None:
        """Handle an error reply.  With the lock held."""
        if error == REBALANCE_IN_PROGRESS:
            self._phase = MEMBER
            self._rejoin = "another rebalance has begun"
        elif error in FATAL:
            self._phase = OUT
            self._failure = explain(self.settings.group_id, error)
        else:
            self._lose(error)

    def _lose(self, error: str) -> None:
        """Note that the group has removed this member.  With the lock held."""
        self._phase = OUT
        self._lost = error
        self._assigned = None
        self._rejoin = None
        # The next join is that of a new member.  `_owned` stays until the consumer takes the loss:
        # it still reads these partitions.
        self.member_id, self.generation, self._owned_generation = "", -1, -1
        self._led = None

    # ---- the lease ----

    def _look(self) -> None:
        """Send a heartbeat, and handle a rebalance or the loss of the membership.

        The timers call it, and the thread that changed the group: the one of a member that joins or
        leaves, or of the coordinator that removed this member.
        """
        with self._lock:
            if self._closed or self._phase != MEMBER:
                return
            # The heartbeat is sent without the lock; `_over` below finds out if the answer is
            # outdated.
            member_id, generation = self.member_id, self.generation
        error = self._renew(member_id, generation, self._alive())
        if error == REBALANCE_IN_PROGRESS and not self._alive():
            return  # the consumer was dropped: it would not take its assignment
        why = self.coordinator.why_out(self.settings.group_id, member_id) if error else ""
        with self._lock:
            if self._over(generation):
                return
            if error == REBALANCE_IN_PROGRESS:
                self._rejoin = "a rebalance is under way"
            elif error == FENCED_INSTANCE_ID:
                self._failure = explain(self.settings.group_id, error)
            elif error:
                self._lose(f"{error}: {why}" if why else error)
            else:
                return
        # A cooperative member joins in this thread, and its consumer continues to read.  Otherwise
        # the consumer has to give its partitions back first: its own thread joins.
        if error == REBALANCE_IN_PROGRESS and self.settings.cooperative:
            self.join("a rebalance is under way")
        self._attention()

    def _over(self, generation: int) -> bool:
        """Return whether it is not a member of that generation any more.  With the lock held."""
        return self._closed or self._phase != MEMBER or self.generation != generation

    def _renew(self, member_id: str, generation: int, alive: bool) -> str:
        """Send a heartbeat; return the coordinator's error, or ""."""
        try:
            return self.coordinator.heartbeat(
                self.settings.group_id,
                member_id=member_id,
                generation=generation,
                instance_id=self.settings.instance_id,
                renew=alive,
            )
        except ClosedError as error:
            with self._lock:
                self._failure = error
            return ""

    def _heartbeat(self) -> None:
        """Renew the lease, and look for changes; the timers call it every `heartbeat_interval`."""
        with self._lock:
            if self._closed:
                return
            self._beat = self.coordinator.timers.after(
                self.settings.heartbeat_interval, self._heartbeat
            )
            # The next beat is armed before the work: an exception below does not end the
            # heartbeats.
            member, member_id = self._phase == MEMBER, self.member_id
        if not self._alive():
            return  # the consumer was dropped: its session times out
        too_long = self._overdue()
        if too_long and member:
            log.warning("%s of group %s: %s", member_id, self.settings.group_id, too_long)
            self.coordinator.expel(self.settings.group_id, member_id, too_long)
            return
        self._look()
        changed = self._what_changed()
        if changed:
            with self._lock:
                self._rejoin = changed
            if self.settings.cooperative:
                self.join(changed)
            self._attention()

    def _what_changed(self) -> str:
        """Return why the member has to join again: topics or partitions changed; "" if not."""
        with self._lock:
            if self._phase != MEMBER:
                return ""
            led, subscribed = self._led, self._subscribed
        if self._topics() != subscribed:
            return "other topics match its subscription"
        if led is not None and self._partitions(list(led)) != led:
            return "a topic it reads has other partitions"
        return ""

    def leave(self, reason: str) -> None:
        """Leave the group.  A static member stays in it until its session times out."""
        with self._lock:
            if self._closed:
                return
            # First: a heartbeat or a reply that arrives from now on begins nothing.
            self._closed = True
            member_id, beat = self.member_id, self._beat
            self._attempt += 1
        if beat is not None:
            self.coordinator.timers.cancel(beat)
        if member_id and self.settings.instance_id is None:
            with contextlib.suppress(ClosedError):  # the store was closed first
                self.coordinator.leave(self.settings.group_id, member_id=member_id, reason=reason)
