"""Committer: commits the offsets of a consumer in its group.

`membership` is the member that commits.  It is None if the consumer reads partitions of its own
choice (`assign`).  Then it commits without a member id, which the group accepts only while it has
no members.

Only the consumer's thread calls its methods.  The background thread of the store runs the commit
that `commit_later` has prepared.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable, Iterable

from logstore.consumer.membership import Membership, MembershipSettings
from logstore.consumer.positions import Positions
from logstore.consumer.wakeup import Bell
from logstore.coordinators.group_coordinator import GroupCoordinator, explain
from logstore.coordinators.group_events import REBALANCE_IN_PROGRESS, UNKNOWN_MEMBER_ID
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS
from logstore.coordinators.offset_book import Offsets
from logstore.coordinators.offset_records import CommittedOffset, TopicPartition
from logstore.errors import ClosedError, RebalanceError
from logstore.interceptors import InterceptorChain
from logstore.store.store import Store

__all__ = ["Committer"]

log = logging.getLogger("logstore.consumer")

COMMIT_SECONDS = 30.0  # how long a commit waits for the end of a rebalance


class Committer:
    """The commits of one consumer.  `auto`: also every `interval` seconds, the next at `due`."""

    def __init__(
        self,
        store: Store,
        coordinator: GroupCoordinator,
        settings: MembershipSettings,
        positions: Positions,
        bell: Bell,
        interceptors: InterceptorChain,
        *,
        auto: bool,
        interval: float,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._book = coordinator.book
        self.group_id = settings.group_id
        self._instance_id = settings.instance_id
        self._positions = positions
        self._bell = bell
        self._interceptors = interceptors
        self.auto = auto
        self._interval = interval
        self.due = time.monotonic() + interval
        self.membership: Membership | None = None
        self.lost_reason = ""  # why the group removed the consumer the last time

    def commit_on_time(self) -> None:
        """Commit the processed records' offsets, and set the next `due`."""
        self.due = time.monotonic() + self._interval
        # `due` first: a commit that fails is not tried again at every poll.
        self.commit_moved(self._positions.sources, "from time to time")

    def commit(self, offsets: Offsets | None = None, durability: str | None = None) -> None:
        """Commit these offsets, or the positions; they are durable when it returns."""
        given = self._positions.known() if offsets is None else offsets
        self._carry_out(given, durability=durability)

    def commit_later(self, offsets: Offsets | None = None) -> concurrent.futures.Future[None]:
        """Like `commit`, in the background thread of the store."""
        given = self._positions.known() if offsets is None else offsets
        # Read now: the offsets belong to this generation, even if a rebalance is done first.
        member = self._member()
        return self._coordinator.in_background(lambda: self._carry_out(given, member))

    def _carry_out(
        self,
        offsets: Offsets,
        member: tuple[str, int] | None = None,
        *,
        durability: str | None = None,
    ) -> None:
        """Commit, and wait while a rebalance is in progress; `member` None: the current one."""
        if not offsets:
            return
        deadline = time.monotonic() + COMMIT_SECONDS
        while True:
            # Read in each round: the rebalance that was waited for gave this member a new
            # generation.
            member_id, generation = self._member() if member is None else member
            try:
                self._coordinator.commit(
                    self.group_id, offsets, member_id=member_id, generation=generation,
                    instance_id=self._instance_id if member_id else None,
                    held=self._held(offsets, generation), durability=durability,
                )  # fmt: skip
            except RebalanceError as error:
                if error.code != REBALANCE_IN_PROGRESS or time.monotonic() > deadline:
                    raise
                self._bell.wait(0.01)  # until the group's leader has assigned the partitions
                continue
            break
        plain: dict[tuple[str, int], int] = {}
        for tp, offset in offsets.items():
            number = offset if isinstance(offset, int) else offset.offset
            plain[TopicPartition(*tp)] = number
            # None if the partition was given back since.
            source = self._positions.sources.get(TopicPartition(*tp))
            if source is not None:
                source.committed_offset = number
        self._interceptors.on_commit(plain)

    def commit_moved(
        self, partitions: Iterable[TopicPartition], when: str, *, everything: bool = True
    ) -> None:
        """Commit the positions that moved since the last commit.

        `everything`: include the record that is being processed.  If the group refuses the commit,
        log a warning: other members process those records again.
        """
        moved = self._positions.moved(partitions, everything=everything)
        try:
            self._carry_out(moved)
        except (RebalanceError, ClosedError) as error:
            if isinstance(error, ClosedError) and not self._store.closed:
                raise
            what = ", ".join(f"{tp} at {at}" for tp, at in sorted(moved.items()))
            log.warning("%s: not committed %s: %s (%s)", self.group_id, when, error, what)

    def _member(self) -> tuple[str, int]:
        """Return member id and generation; ("", -1) without a group's assignment.

        Raises RebalanceError if the consumer is not a member now.
        """
        membership = self.membership
        if membership is None:
            return "", -1
        if not membership.member_id:
            why = membership.loss or self.lost_reason or "poll first"
            raise explain(self.group_id, UNKNOWN_MEMBER_ID, why)
        return membership.member_id, membership.generation

    def _held(self, offsets: Offsets, generation: int) -> Callable[[], bool]:
        """Return a function: whether this member has held all of these since `generation`.

        The threads of other members can move a cooperative member into the next generation at any
        moment of a commit.  A partition that it held before and holds still may be committed.
        """
        membership = self.membership
        # Called under the lock of the group, and takes the lock of the membership: in this order.
        return lambda: membership is not None and membership.holds(offsets, generation)

    def committed(
        self, *partitions: tuple[str, int]
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Return the group's committed offsets, for the assigned partitions or for the named."""
        known = self._book.committed(self.group_id)
        found = {}
        for tp in partitions or sorted(self._positions.sources):
            offset = known.get(TopicPartition(*tp))
            found[TopicPartition(*tp)] = offset if offset and offset.offset >= 0 else None
        return found

    # ---- in a transaction ----

    @property
    def offsets_partition(self) -> TopicPartition:
        """The partition of `__consumer_offsets` that stores the offsets of its group."""
        return TopicPartition(CONSUMER_OFFSETS, self._book.partition_of(self.group_id))

    def commit_in_transaction(
        self,
        producer_id: int,
        producer_epoch: int,
        offsets: Offsets | None = None,
    ) -> None:
        """Commit as a part of a producer's transaction; the offsets count after its commit."""
        member_id, generation = self._member()
        given = self._positions.known() if offsets is None else offsets
        self._coordinator.commit_in_transaction(
            self.group_id, given, producer_id=producer_id,
            producer_epoch=producer_epoch, member_id=member_id, generation=generation,
            instance_id=self._instance_id if member_id else None,
            held=self._held(given, generation),
        )  # fmt: skip
