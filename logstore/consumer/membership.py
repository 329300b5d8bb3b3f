"""Membership: a consumer's side of its group.

It joins, runs the assignor when it leads, asks for its assignment, and renews its lease.  Most of
that happens in other threads: those of other members, or of the timers.  What it comes to, an
assignment or the loss of one, waits here until the consumer's own thread takes it, so that the
user's callbacks run there and a record that takes long to process throws nobody out.

With a cooperative assignor it joins again by itself when others come and go, and says what it still
holds: no partition is handed on before the consumer has given it back.  With an eager one the
consumer gives everything back first, and the group waits for it, for the rebalance time-out.

State under `_lock`, a leaf: nobody is called while it is held.
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
    """What a consumer says about itself; times are seconds."""

    group_id: str
    client_id: str
    instance_id: str | None
    assignors: tuple[Assignor, ...]
    session_timeout: float
    rebalance_timeout: float
    heartbeat_interval: float

    @property
    def cooperative(self) -> bool:
        """Whether all of its assignors hand over in two steps."""
        return all(assignor.cooperative for assignor in self.assignors)


class Membership:
    """One consumer in one group.

    `attention` is called, by any thread, when there is something for the consumer to take.
    `alive` tells whether somebody still uses the consumer: without that no lease is renewed.
    `overdue` tells, in words, what it has been at for too long.  `topics` and `partitions` tell
    what is subscribed to now, and which partitions there are.
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
        self._attempt = 0
        self._closed = False
        # What the consumer reads, or may take up or give back now, each with the generation since
        # which it does; and the generation of the latest assignment in it.  Only the consumer's
        # thread changes it, apart from a loss.
        self._owned: dict[TopicPartition, int] = {}
        self._owned_generation = -1
        self._subscribed: tuple[str, ...] = ()
        self._led: dict[str, list[int]] | None = None  # partitions when it last led an assignment
        self._rejoin: str | None = None  # why the consumer's thread has to join again
        self._assigned: tuple[TopicPartition, ...] | None = None  # of `generation`, not taken yet
        self._lost: str | None = None
        self._failure: BaseException | None = None
        self._beat: Timeout | None = None

    # ---- for the consumer's thread ----

    def needs_to_join(self) -> str | None:
        """Why the consumer should join now; None: it need not."""
        with self._lock:
            if self._closed or self._phase in (JOINING, SYNCING) or self._assigned is not None:
                return None
            if self._phase == OUT:
                return self._rejoin or "a new consumer"
            return self._rejoin

    def take_assignment(self) -> tuple[TopicPartition, ...] | None:
        """The assignment that has come, once; it is held from now on, besides what was before.

        In one step: whoever has this member join meanwhile says that it owns all of that.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            assigned, self._assigned = self._assigned, None
            if assigned is not None:
                self._owned = {**dict.fromkeys(assigned, self.generation), **self._owned}
                self._owned_generation = self.generation
            return assigned

    def take_loss(self) -> str | None:
        """Why everything that was held is lost; None: it is not.  Once."""
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
        """Why what was held is lost, while the consumer has not taken note; "" otherwise."""
        return self._lost or ""

    def release(self, partitions: Iterable[TopicPartition]) -> None:
        """The consumer does not hold these any more: the group may give them to others."""
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
        """The consumer has changed what it says about itself: the group has to know."""
        with self._lock:
            self._rejoin = reason

    @property
    def settled(self) -> bool:
        """Whether it is a member, with nothing to take."""
        with self._lock:
            return self._phase == MEMBER and self._assigned is None and self._lost is None

    @property
    def joined(self) -> bool:
        """Whether it is a member now."""
        return self._phase == MEMBER

    # ---- joining ----

    def join(self, reason: str) -> None:
        """Ask to be in the next generation; what comes of it is for `take_assignment`."""
        topics = self._topics()
        # Once it has begun it is done to the end: otherwise this member waits for ever for a reply.
        uninterrupted(lambda: self._join(reason, topics))

    def _join(self, reason: str, topics: tuple[str, ...]) -> None:
        settings = self.settings
        with self._lock:
            if self._closed or self._lost is not None or self._phase in (JOINING, SYNCING):
                return
            self._phase = JOINING
            self._rejoin = None
            self._assigned = None  # not taken, so not owned: it counts no longer
            self._attempt += 1
            attempt, member_id = self._attempt, self.member_id
            owned, generation = tuple(sorted(self._owned)), self._owned_generation
            self._subscribed = topics
            if self._beat is None:
                self._beat = self.coordinator.timers.after(
                    settings.heartbeat_interval, self._heartbeat
                )
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
        with self._lock:
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
            # It left while it waited to be let in, and did not know its id then.
            if not reply.error and self.settings.instance_id is None:
                self.coordinator.leave(
                    self.settings.group_id, member_id=reply.member_id, reason="closed meanwhile"
                )
            return
        if reply.error:
            self._attention()
            return
        assignments: list[tuple[str, bytes]] = []
        if reply.leader == reply.member_id and not reply.skip_assignment:
            try:
                assignments = self._assign(reply)
            except BaseException as error:  # noqa: BLE001  the user's: it is raised by poll
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
        """As the leader: who gets what."""
        assignor = next(a for a in self.settings.assignors if a.name == reply.protocol)
        members = [assignor.member(*member) for member in reply.members]
        topics = sorted({topic for member in members for topic in member.topics})
        partitions = self._partitions(topics)
        given = assignor.run(partitions, members)
        with self._lock:
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
        """Under the lock."""
        if error == REBALANCE_IN_PROGRESS:
            self._phase = MEMBER
            self._rejoin = "a rebalance began meanwhile"
        elif error in FATAL:
            self._phase = OUT
            self._failure = explain(self.settings.group_id, error)
        else:
            self._lose(error)

    def _lose(self, error: str) -> None:
        """Under the lock: the group goes on without this member."""
        self._phase = OUT
        self._lost = error
        self._assigned = None
        self._rejoin = None
        self.member_id, self.generation, self._owned_generation = "", -1, -1
        self._led = None

    # ---- the lease ----

    def _look(self) -> None:
        """Somebody came or went, or this member was taken out; called by whoever did it."""
        with self._lock:
            if self._closed or self._phase != MEMBER:
                return
            member_id, generation = self.member_id, self.generation
        error = self._renew(member_id, generation, self._alive())
        if error == REBALANCE_IN_PROGRESS and not self._alive():
            return  # nobody would take up what it gets
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
        if error == REBALANCE_IN_PROGRESS and self.settings.cooperative:
            self.join("a rebalance is under way")
        self._attention()

    def _over(self, generation: int) -> bool:
        """Under the lock: whether it is not a member of that generation any more."""
        return self._closed or self._phase != MEMBER or self.generation != generation

    def _renew(self, member_id: str, generation: int, alive: bool) -> str:
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
        """From time to time, by the timers' thread."""
        with self._lock:
            if self._closed:
                return
            self._beat = self.coordinator.timers.after(
                self.settings.heartbeat_interval, self._heartbeat
            )
            member, member_id = self._phase == MEMBER, self.member_id
        if not self._alive():
            return  # nobody uses it any more: its session runs out
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
        """What a member has to tell its group by joining again; "" for nothing."""
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
        """Go, and tell the group; a static member does not, and has until its session ends."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            member_id, beat = self.member_id, self._beat
            self._attempt += 1
        if beat is not None:
            self.coordinator.timers.cancel(beat)
        if member_id and self.settings.instance_id is None:
            with contextlib.suppress(ClosedError):  # the store went first, and the group with it
                self.coordinator.leave(self.settings.group_id, member_id=member_id, reason=reason)
