"""Rebalancer: the steps of a rebalance that run in the consumer's thread, between two records.

It joins the group, takes the assignment, and gives partitions back after it has committed their
processed records.  It calls the user's `on_assigned`, `on_revoked` and `on_lost`.  Membership does
the steps that must not wait for the consumer, such as heartbeats, from other threads.  It has only
weak references to the Rebalancer, so the lease of a dropped consumer is not renewed.

Invariant: a partition is released (`Membership.release`) after the consumer has stopped reading it.
The group assigns only released partitions to other members of a cooperative group.

Subscription: the topics that a consumer has subscribed to.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TypeAlias

from logstore.consumer.committing import Committer
from logstore.consumer.fetching import Fetcher
from logstore.consumer.membership import Membership, MembershipSettings
from logstore.consumer.positions import Positions
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.internal_topics import INTERNAL_TOPICS
from logstore.coordinators.offset_records import TopicPartition
from logstore.errors import UnknownTopicError
from logstore.store.store import Store

__all__ = ["Moved", "Rebalancer", "Subscription", "Topics", "partitions_of"]

log = logging.getLogger("logstore.consumer")

Topics: TypeAlias = "str | re.Pattern[str]"
Moved: TypeAlias = "Callable[[list[TopicPartition]], object]"


def partitions_of(store: Store, topics: Iterable[str]) -> dict[str, list[int]]:
    """Return the partition numbers of each topic now, without topics that do not exist."""
    found = {}
    for topic in topics:
        with contextlib.suppress(UnknownTopicError):
            found[topic] = list(store[topic].partition_numbers)
    return found


class Subscription:
    """Names of topics, and patterns for names."""

    def __init__(self, store: Store, topics: tuple[Topics, ...]) -> None:
        self._store = store
        self.topics = topics

    def names(self) -> tuple[str, ...]:
        """Return the names of the topics, including those that match a pattern now."""
        topics = self.topics
        names = {topic for topic in topics if isinstance(topic, str)}
        patterns = [topic for topic in topics if not isinstance(topic, str)]
        if patterns:
            for name in self._store:
                if name not in INTERNAL_TOPICS and any(p.search(name) for p in patterns):
                    names.add(name)
        return tuple(sorted(names))


class Rebalancer:
    """Rebalances one consumer; `thread` is the thread that polls."""

    def __init__(
        self,
        store: Store,
        coordinator: GroupCoordinator,
        settings: MembershipSettings,
        positions: Positions,
        fetcher: Fetcher,
        committer: Committer,
        *,
        on_assigned: Moved | None,
        on_revoked: Moved | None,
        on_lost: Moved | None,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._settings = settings
        self._positions = positions
        self._fetcher = fetcher
        self._committer = committer
        self.on_assigned, self.on_revoked, self.on_lost = on_assigned, on_revoked, on_lost
        self._subscription = Subscription(store, ())
        self.thread: threading.Thread | None = None
        self.closed = False

    def _join(self) -> None:
        """Make the Membership; the consumer's next poll joins the group with it."""
        # The timers keep the Membership alive: a strong reference would keep the consumer, too.
        this = weakref.ref(self)

        # These four may run in threads of other members, and of the timers.
        def attention() -> None:
            rebalancer = this()
            if rebalancer is not None:
                rebalancer._fetcher.interrupt()

        def alive() -> bool:
            rebalancer = this()
            if rebalancer is None or rebalancer.closed:
                return False
            # A thread that died without `close` cannot poll again: its partitions are given to
            # others after the session time-out.
            return rebalancer.thread is None or rebalancer.thread.is_alive()

        def overdue() -> str:
            rebalancer = this()
            if rebalancer is None:
                return ""
            committer, fetcher = rebalancer._committer, rebalancer._fetcher
            # Only wakes the consumer: a commit is done by its own thread, which knows the
            # positions.
            if committer.auto and time.monotonic() >= committer.due:
                fetcher.interrupt()
            return fetcher.overdue()

        def topics() -> tuple[str, ...]:
            rebalancer = this()
            return () if rebalancer is None else rebalancer._subscription.names()

        store = self._store
        self._committer.membership = Membership(
            self._coordinator, self._settings, attention=attention, alive=alive, overdue=overdue,
            topics=topics, partitions=lambda topics: partitions_of(store, topics),
        )  # fmt: skip

    @property
    def group_id(self) -> str:
        """The group's name."""
        return self._settings.group_id

    def release_all_but(self, subscription: Subscription) -> None:
        """Give back partitions of topics that a new subscription does not have, if cooperative.

        Another thread can make this member join as soon as the new subscription is set.  The group
        then assigns partitions of other topics to other members, so the consumer must have stopped
        reading them before.
        """
        membership = self._committer.membership
        if membership is not None and self._settings.cooperative:
            names = subscription.names()
            left = [tp for tp in self._positions.sources if tp.topic not in names]
            if left:
                self._give_back(membership, left)

    def subscribe(self, subscription: Subscription) -> bool:
        """Use this subscription in the group; return whether a Membership was made."""
        self._subscription = subscription
        membership = self._committer.membership
        if membership is not None:
            # The next `coordinate` joins, in the thread of the consumer.
            membership.join_again("it subscribed to other topics")
            return False
        # Partitions that were chosen with `assign`: the group does not know of them.
        self._positions.drop(list(self._positions.sources))
        self._join()
        return True

    def leave(self, reason: str) -> None:
        """Leave the group, if it is a member; the consumer keeps its partitions."""
        self._subscription = Subscription(self._store, ())
        if self._committer.membership is not None:
            self._committer.membership.leave(reason)
            self._committer.membership = None

    def revoke_on_closing(self, held: list[TopicPartition]) -> None:
        """Call `on_revoked` for the last time; not for a static member, which stays a member."""
        on_revoked, self.on_revoked = self.on_revoked, None  # it may close the consumer
        leaves = self._committer.membership is not None and self._settings.instance_id is None
        if leaves and held and on_revoked is not None:
            on_revoked(held)

    def close(self) -> None:
        """Leave the group."""
        # First: `alive` is False from now on, and no heartbeat renews the lease.
        self.closed = True
        if self._committer.membership is not None:
            self._committer.membership.leave("it was closed")

    def coordinate(self, membership: Membership) -> None:
        """Take losses and assignments, and join if necessary, until none is left; do not wait."""
        while True:
            # Before looking at the membership: a change after this line sets it again.
            self._fetcher.attention = False
            # A loss first: it also drops an assignment that was not taken.
            lost = membership.take_loss()
            if lost is not None:
                self._lose(lost)
            reason = membership.needs_to_join()
            if reason is not None:
                if not self._settings.cooperative and self._positions.sources:
                    self._give_back(membership, list(self._positions.sources))
                # Eager: the partitions are given back before the join, so none is read by two
                # members.
                membership.join(reason)
            try:
                assigned = membership.take_assignment()
                if assigned is None:
                    break
                self._adopt(membership, assigned)
            except KeyboardInterrupt:
                membership.join_again("an interrupt stopped it before it took its assignment")
                raise
        self._positions.place()

    def _adopt(self, membership: Membership, assigned: tuple[TopicPartition, ...]) -> None:
        """Read the assigned partitions, and no others, even if a callback raises."""
        names = self._subscription.names()  # it may have changed since the assignment was made
        there = [tp for tp in assigned if tp.topic in names and self._positions.exists(tp)]
        # As in Kafka, `on_revoked` is called before `on_assigned`.
        gone = [tp for tp in self._positions.sources if tp not in there]
        new = sorted(tp for tp in there if tp not in self._positions.sources)
        try:
            if gone:
                self._give_back(membership, gone)
        finally:
            membership.release(tp for tp in assigned if tp not in there)
            self._positions.add(new)
            if self.on_assigned is not None and new:
                self.on_assigned(new)

    def _give_back(self, membership: Membership, partitions: list[TopicPartition]) -> None:
        """Give partitions back: commit, call `on_revoked`, stop reading, release; in this order.

        Each step is done even if the one before raises: the group has already decided.  The
        partitions are owned until the last step, so that both commits are accepted.
        """
        partitions = sorted(partitions)
        with contextlib.ExitStack() as then:
            # Callbacks of an ExitStack run in reverse: the commit, `on_revoked`, `_let_go`.
            then.callback(self._let_go, membership, partitions)
            if self.on_revoked is not None:
                then.callback(self.on_revoked, partitions)
            if self._committer.auto:
                self._committer.commit_moved(partitions, "before a rebalance")

    def _let_go(self, membership: Membership, partitions: list[TopicPartition]) -> None:
        # `drop` before `release`: after `release` another member may read the partitions.
        self._positions.drop(partitions)
        membership.release(partitions)
        if self._settings.cooperative:
            membership.join_again(f"it gave back {len(partitions)} partitions")

    def _lose(self, reason: str) -> None:
        """Stop reading all partitions without a commit: other members may have them already."""
        partitions = sorted(self._positions.sources)
        if partitions:
            log.warning("%s: lost %d partitions: %s", self.group_id, len(partitions), reason)
            self._positions.drop(partitions)
            if self.on_lost is not None:
                self.on_lost(partitions)
        self._committer.lost_reason = reason
