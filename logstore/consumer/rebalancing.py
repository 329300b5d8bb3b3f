"""Rebalancer: what a consumer does as a member of a group, between two records.

It joins, takes the assignment, gives partitions back and commits what was processed of them first,
and calls the user's `on_assigned`, `on_revoked` and `on_lost`.  Membership keeps the lease
meanwhile, from a thread of its own; it holds the Rebalancer weakly, so that the lease of a consumer
that was dropped runs out.

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
    """The numbers of the partitions of topics, as they are now; without topics that are gone."""
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
        """The names that it means now."""
        topics = self.topics
        names = {topic for topic in topics if isinstance(topic, str)}
        patterns = [topic for topic in topics if not isinstance(topic, str)]
        if patterns:
            for name in self._store:
                if name not in INTERNAL_TOPICS and any(p.search(name) for p in patterns):
                    names.add(name)
        return tuple(sorted(names))


class Rebalancer:
    """The member of one consumer; `thread` is the one that polls."""

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
        """Become a member of the group."""
        this = weakref.ref(self)

        def attention() -> None:
            rebalancer = this()
            if rebalancer is not None:
                rebalancer._fetcher.interrupt()

        def alive() -> bool:
            rebalancer = this()
            if rebalancer is None or rebalancer.closed:
                return False
            return rebalancer.thread is None or rebalancer.thread.is_alive()

        def overdue() -> str:
            rebalancer = this()
            if rebalancer is None:
                return ""
            committer, fetcher = rebalancer._committer, rebalancer._fetcher
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
        """Give back what another subscription does not mean, if the group is cooperative.

        The group gives away what a member has not subscribed to, and may have it join as soon as
        the new subscription is known: nothing of that may be read by then.
        """
        membership = self._committer.membership
        if membership is not None and self._settings.cooperative:
            names = subscription.names()
            left = [tp for tp in self._positions.sources if tp.topic not in names]
            if left:
                self._give_back(membership, left)

    def subscribe(self, subscription: Subscription) -> bool:
        """Take part in the group with this subscription; return whether it is a new member."""
        self._subscription = subscription
        membership = self._committer.membership
        if membership is not None:
            membership.join_again("it subscribed to other topics")
            return False
        # Of the consumer's own choice: the group does not know of them.
        self._positions.drop(list(self._positions.sources))
        self._join()
        return True

    def leave(self, reason: str) -> None:
        """Leave the group, if it is a member; the partitions stay."""
        self._subscription = Subscription(self._store, ())
        if self._committer.membership is not None:
            self._committer.membership.leave(reason)
            self._committer.membership = None

    def revoke_on_closing(self, held: list[TopicPartition]) -> None:
        """Call `on_revoked` for the last time; not for a static member, which keeps its place."""
        on_revoked, self.on_revoked = self.on_revoked, None  # it may close the consumer
        leaves = self._committer.membership is not None and self._settings.instance_id is None
        if leaves and held and on_revoked is not None:
            on_revoked(held)

    def close(self) -> None:
        """Leave the group."""
        self.closed = True
        if self._committer.membership is not None:
            self._committer.membership.leave("it was closed")

    def coordinate(self, membership: Membership) -> None:
        """Do what the group wants; does not wait."""
        while True:
            self._fetcher.attention = False  # before looking: what comes from now on is seen later
            lost = membership.take_loss()
            if lost is not None:
                self._lose(lost)
            reason = membership.needs_to_join()
            if reason is not None:
                if not self._settings.cooperative and self._positions.sources:
                    self._give_back(membership, list(self._positions.sources))
                membership.join(reason)
            try:
                assigned = membership.take_assignment()
                if assigned is None:
                    break
                self._adopt(membership, assigned)
            except KeyboardInterrupt:
                membership.join_again("an interrupt kept it from taking its assignment")
                raise
        self._positions.place()

    def _adopt(self, membership: Membership, assigned: tuple[TopicPartition, ...]) -> None:
        """Read what the assignment says, and nothing else, even if a callback raises."""
        names = self._subscription.names()  # perhaps it was for those of another subscription
        there = [tp for tp in assigned if tp.topic in names and self._positions.exists(tp)]
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
        """Let go of partitions: what was processed is committed first.

        An error on the way does not keep them: the group has decided.  They are owned until the
        end of it.
        """
        partitions = sorted(partitions)
        with contextlib.ExitStack() as then:
            then.callback(self._let_go, membership, partitions)
            if self.on_revoked is not None:
                then.callback(self.on_revoked, partitions)
            if self._committer.auto:
                self._committer.commit_moved(partitions, "before a rebalance")

    def _let_go(self, membership: Membership, partitions: list[TopicPartition]) -> None:
        self._positions.drop(partitions)
        membership.release(partitions)
        if self._settings.cooperative:
            membership.join_again(f"it gave back {len(partitions)} partitions")

    def _lose(self, reason: str) -> None:
        partitions = sorted(self._positions.sources)
        if partitions:
            log.warning("%s: lost %d partitions: %s", self.group_id, len(partitions), reason)
            self._positions.drop(partitions)
            if self.on_lost is not None:
                self.on_lost(partitions)
        self._committer.lost_reason = reason
