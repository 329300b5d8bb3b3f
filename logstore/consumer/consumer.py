"""Consumer: reads topics, alone or as a member of a group.

    with Consumer(store, "orders", group_id="billing") as consumer:
        for record in consumer:
            bill(record.value)

In a group, the offsets of processed records are committed to the store: every
`auto_commit_interval`, at `close`, and by `commit`.  A record is processed when the loop asks for
the next one.  If the block raises, its record is not committed and is read again.

An append wakes a waiting consumer; it does not poll.  The store's timers renew its lease in the
group while the thread that polls is alive.  So a record may take an hour to process, unless
`max_processing_time` is set.

Threads must not share a consumer, except for `wake`.  Many consumers, in as many threads, share one
store.  This class only connects the parts: Positions, Fetcher, Committer, Rebalancer.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import itertools
import math
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from logstore.clock import Clock, SystemClock
from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.consumer.assignors import Assignor, assignor_of
from logstore.consumer.committing import Committer
from logstore.consumer.fetching import Fetcher
from logstore.consumer.membership import Membership, MembershipSettings
from logstore.consumer.positions import Positions, Start
from logstore.consumer.rebalancing import Moved, Rebalancer, Subscription, Topics, partitions_of
from logstore.consumer.received import ReceivedRecord
from logstore.consumer.source import Source
from logstore.consumer.wakeup import Bell
from logstore.coordinators.consumer_group.assignment import Assign
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.lag import Lag, lag_of
from logstore.coordinators.offset_book import Offsets
from logstore.coordinators.offset_records import CommittedOffset, TopicPartition, check_text
from logstore.errors import ClosedError
from logstore.interceptors import InterceptorChain
from logstore.partition.reader import milliseconds
from logstore.serialization import Deserializer, deserializer
from logstore.store.companions import expect_store
from logstore.store.store import Store

__all__ = ["Consumer"]

LOOK_SECONDS = 0.02  # how often a consumer of a readonly store looks for appends
REFRESH_SECONDS = 1.0  # how often a consumer without a group looks for new partitions
SECONDS_MAX = 2_147_483.0  # time-outs are int32 milliseconds in a group's record
ID_ROOM = 37  # bytes of a member's id after its client_id or instance_id: "-" and a UUID

_numbers = itertools.count(1)

AnyAssignor: TypeAlias = "str | Assign | Assignor"


class Consumer(Closeable):
    """Reads records of topics, in order for each partition.

    `topics`: names, or compiled patterns for names that match now or later.  Without `group_id` it
    reads all their partitions; in a group, those that the group assigns to it.

    `start`: the position if there is no committed offset, or if it is outside of the log:
    "earliest", "latest", "none" (raise), or a time (datetime, int milliseconds).  `timeout`:
    seconds without a record after which iteration ends; None waits for ever.
    ``isolation="read_committed"`` returns no record of an open or aborted transaction.

    `auto_commit`: a member of a group commits every `auto_commit_interval` seconds, before it gives
    partitions back, and at `close`.  `assignor`: a name of Kafka's (range, roundrobin, sticky,
    cooperative-sticky), a callable, or several, the preferred one first.  `instance_id` makes it a
    static member, which may be closed and opened again within `session_timeout` without a
    rebalance.  `max_processing_time`: seconds that a record, or the records of one poll, may take
    before the group removes this consumer; the error names the record.

    `on_assigned`, `on_revoked`, `on_lost` get lists of TopicPartition, in the thread that polls.
    `on_revoked` can still commit offsets, `on_lost` cannot.  `bell` is rung by every event that
    a poll waits for; consumers of one thread that only poll with ``timeout=0`` may share it.
    """

    def __init__(
        self,
        store: Store,
        *topics: Topics,
        group_id: str | None = None,
        start: Start = "earliest",
        isolation: str = "read_uncommitted",
        timeout: float | None = None,
        auto_commit: bool = True,
        auto_commit_interval: float = 5.0,
        assignor: AnyAssignor | Sequence[AnyAssignor] = "cooperative-sticky",
        instance_id: str | None = None,
        client_id: str | None = None,
        session_timeout: float = 45.0,
        heartbeat_interval: float = 3.0,
        rebalance_timeout: float = 300.0,
        max_processing_time: float | None = None,
        key_deserializer: str | Deserializer | None = None,
        value_deserializer: str | Deserializer | None = None,
        interceptors: Iterable[object] = (),
        on_assigned: Moved | None = None,
        on_revoked: Moved | None = None,
        on_lost: Moved | None = None,
        on_corrupt: str = "raise",
        bell: Bell | None = None,
    ) -> None:
        if isolation not in ("read_uncommitted", "read_committed"):
            raise ConfigError(
                f"isolation must be 'read_uncommitted' or 'read_committed', not {isolation!r}"
            )
        if on_corrupt not in ("raise", "skip"):
            raise ConfigError(f"on_corrupt must be 'raise' or 'skip', not {on_corrupt!r}")
        _check_start(start)
        for name, seconds, most in (
            ("session_timeout", session_timeout, SECONDS_MAX),
            ("heartbeat_interval", heartbeat_interval, SECONDS_MAX),
            ("rebalance_timeout", rebalance_timeout, SECONDS_MAX),
            ("auto_commit_interval", auto_commit_interval, math.inf),
            ("max_processing_time", max_processing_time, math.inf),
        ):
            if seconds is not None:
                _check_seconds(name, seconds, most)
        for name, text, room in (
            ("group_id", group_id, 0),
            ("instance_id", instance_id, ID_ROOM),
            ("client_id", client_id or None, ID_ROOM),
        ):
            if text is not None and not check_text(name, text, room=room):
                raise ConfigError(f"{name} is a name or None, not ''")
        self._store = expect_store(store, "Consumer")
        self._clock: Clock = store.clock or SystemClock()
        self.group_id = group_id
        self.timeout = timeout
        chain = InterceptorChain(interceptors)
        self._bell = Bell() if bell is None else bell
        self._positions = Positions(
            store, self._bell, start=start, committed_only=isolation == "read_committed",
            on_corrupt=on_corrupt,
        )  # fmt: skip
        self._fetcher = Fetcher(
            store, self._positions, self._bell, key_deserializer=deserializer(key_deserializer),
            value_deserializer=deserializer(value_deserializer), interceptors=chain,
            max_processing_time=max_processing_time,
        )  # fmt: skip
        self._manual = False  # partitions were chosen with `assign`
        self._subscription = Subscription(store, ())
        self._refresh_due = 0.0
        self._committer: Committer | None = None
        self._rebalancer: Rebalancer | None = None
        self._offsets_log: Any = None
        self._closed = False  # from here on `__del__` finds every attribute that it uses
        if group_id is not None:
            if isinstance(assignor, str | Assignor) or callable(assignor):
                assignor = [assignor]
            assignors = tuple(assignor_of(each) for each in assignor)
            if not assignors:
                raise ConfigError("a member of a group has an assignor: give it one")
            settings = MembershipSettings(
                group_id, client_id or f"consumer-{next(_numbers)}", instance_id, assignors,
                session_timeout, rebalance_timeout, heartbeat_interval,
            )  # fmt: skip
            self._coordinator = GroupCoordinator.of(store)
            self._positions.start_from(group_id, self._coordinator.book)
            self._committer = Committer(
                store, self._coordinator, settings, self._positions, self._bell, chain,
                auto=auto_commit, interval=auto_commit_interval,
            )  # fmt: skip
            self._rebalancer = Rebalancer(
                store, self._coordinator, settings, self._positions, self._fetcher, self._committer,
                on_assigned=on_assigned, on_revoked=on_revoked, on_lost=on_lost,
            )  # fmt: skip
        if topics:
            self.subscribe(*topics)

    # ---- what is read ----

    def subscribe(self, *topics: Topics) -> None:
        """Read these topics from now on; they replace the earlier ones."""
        self._check_open()
        for topic in topics:
            if not isinstance(topic, str | re.Pattern):
                raise TypeError(f"a topic is a name or a compiled pattern, not {topic!r}")
            if isinstance(topic, str) and topic not in self._store:
                self._store[topic]  # raises UnknownTopicError, which names similar topics
        subscription = Subscription(self._store, topics)
        # Give partitions back before the group learns the new subscription: it may assign them
        # to another member at once.
        if self._rebalancer is not None:
            self._rebalancer.release_all_but(subscription)
        self._manual = False
        self._subscription = subscription
        self._refresh_due = 0.0
        if self._rebalancer is None:
            self._refresh()
        elif self._rebalancer.subscribe(subscription):
            self._offsets_log = self._coordinator.book.log_of(self._rebalancer.group_id)
            # The end of a transaction is appended there: it may decide a position (see `place`).
            self._offsets_log.parts.view.listen(self._bell.ring)

    def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Read only these partitions, independently of the group; leave the group if in it."""
        self._check_open()
        wanted = [TopicPartition(*each) for each in partitions]
        for tp in wanted:
            # The lookup raises as well; the comparison refuses negative numbers.
            if self._store[tp.topic][tp.partition].number != tp.partition:
                raise IndexError(f"topic {tp.topic!r} has no partition {tp.partition}")
        if self._rebalancer is not None:
            self._rebalancer.leave("it reads partitions of its own choice")
        self._manual = True
        self._subscription = Subscription(self._store, ())
        self._positions.drop([tp for tp in self._positions.sources if tp not in wanted])
        self._positions.add([tp for tp in wanted if tp not in self._positions.sources])

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that it reads now, sorted."""
        return sorted(self._positions.sources)

    def subscription(self) -> list[str]:
        """Return the names of the subscribed topics, including those that match a pattern now."""
        return list(self._subscription.names())

    def _refresh(self) -> None:
        """Read all partitions that the topics have now.  For a consumer without a group."""
        self._refresh_due = time.monotonic() + REFRESH_SECONDS
        there = partitions_of(self._store, self._subscription.names())
        wanted = [TopicPartition(name, each) for name, all_ in there.items() for each in all_]
        sources = self._positions.sources
        gone = [tp for tp in sources if tp not in wanted]
        new = [tp for tp in wanted if tp not in sources]
        if gone:
            self._positions.drop(gone)
        if new:
            self._positions.add(new)

    # ---- reading ----

    def poll(
        self,
        *,
        max_records: int = 500,
        timeout: float | None = None,
        partitions: Iterable[tuple[str, int]] | None = None,
    ) -> list[ReceivedRecord]:
        """Return the next records, at most `max_records`; an empty list after `timeout` seconds.

        If `timeout` is None, the consumer's own `timeout` is used.  The records of the poll before
        count as processed from now on.  `partitions`: return records of these only; a partition
        that is not assigned at the moment has none.
        """
        if max_records < 1:
            raise ValueError(f"max_records must be at least 1, not {max_records}")
        limit = self.timeout if timeout is None else timeout
        deadline = None if limit is None else time.monotonic() + limit
        wanted = None if partitions is None else frozenset(TopicPartition(*p) for p in partitions)
        self._fetcher.taken = {}  # filled by `take`; read if an interrupt discards its records
        try:
            while True:
                # A poll that does not wait leaves the bell as it is: the thread may have looked for
                # other work, or polled another consumer of this bell, since it cleared the bell.
                if limit is None or limit > 0:
                    self._bell.clear()
                self._look_around()
                records = self._fetcher.take(max_records, wanted)
                if records:
                    return records
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return []
                self._wait(left)
        except KeyboardInterrupt:
            # The caller gets no records: set the positions back, so that the next poll reads them.
            for source, at in self._fetcher.taken.items():
                source.seek(at)
            raise

    def _try_poll(self, max_records: int) -> list[ReceivedRecord]:
        """Return the records that are available now, without waiting; of several partitions."""
        self._bell.clear()
        self._look_around()
        return self._fetcher.take(max_records)

    def _look_around(self) -> None:
        """Do what is due between records: note them as processed, rebalance, auto-commit.

        The caller clears the bell before: a change after that rings it again.
        """
        self._check_open()
        self._positions.finish()
        self._fetcher.handed_at = None
        # Before looking at the state: a change after this line sets it again.
        self._fetcher.attention = False
        committer, rebalancer = self._committer, self._rebalancer
        membership = None if committer is None else committer.membership
        if rebalancer is not None:
            # The lease depends on it: see `alive` in Rebalancer._join.
            rebalancer.thread = threading.current_thread()
        if membership is None or rebalancer is None:
            if self._subscription.topics and time.monotonic() >= self._refresh_due:
                self._refresh()
            self._positions.place()
        else:
            rebalancer.coordinate(membership)
        if committer is not None and committer.auto and time.monotonic() >= committer.due:
            committer.commit_on_time()

    def _wait(self, left: float | None) -> None:
        """Sleep until the bell rings, for at most `left` seconds."""
        self._bell.wait(self._nap(left))

    def _nap(self, left: float | None) -> float | None:
        """Return how long to sleep if the bell does not ring."""
        naps = [left]
        if self._store.readonly:
            naps.append(LOOK_SECONDS)  # appends of another process do not ring the bell
        elif self._committer is None and not self._manual:
            naps.append(REFRESH_SECONDS)  # a new topic or partition does not ring the bell
        if self._committer is not None and self._committer.auto:
            naps.append(max(0.01, self._committer.due - time.monotonic()))
        return min((nap for nap in naps if nap is not None), default=None)

    def __iter__(self) -> Iterator[ReceivedRecord]:
        """Yield records one by one; end after `timeout` seconds without a record.

        After the loop is left, the position is after the last record that the loop got.
        """
        # Chain the scans' own iterators, in C: no Python frame runs for each record.
        return itertools.chain.from_iterable(self._runs())

    def _runs(self) -> Iterator[Iterable[ReceivedRecord]]:
        """Yield runs of records; after each, copy its position, even if the loop is left."""
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        while True:
            run = self._try_run()
            if run is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._wait(left)
                continue
            try:
                yield run
            finally:
                self._positions.settle()
            deadline = None if self.timeout is None else time.monotonic() + self.timeout

    def _try_run(self) -> Iterable[ReceivedRecord] | None:
        """Return the next run of records of one partition; None if there is none now."""
        self._bell.clear()
        self._look_around()
        return self._fetcher.next_run()

    # ---- positions ----

    def seek(self, partition: tuple[str, int], offset: int | datetime.datetime | str) -> None:
        """Read on at an offset, "beginning", "end", or the first record at or after a datetime."""
        self._positions.seek(self._source(partition), offset)  # ends the run that is iterated
        self._fetcher.attention = True

    def seek_to_beginning(self, *partitions: tuple[str, int]) -> None:
        """Read from the first record on, in the named partitions or in all."""
        for tp in partitions or self.assignment():
            self.seek(tp, "beginning")

    def seek_to_end(self, *partitions: tuple[str, int]) -> None:
        """Read only later records, in the named partitions or in all."""
        for tp in partitions or self.assignment():
            self.seek(tp, "end")

    def seek_to_time(self, when: int | datetime.datetime, *partitions: tuple[str, int]) -> None:
        """Read from the first record at or after a time on, in the named partitions or in all."""
        for tp in partitions or self.assignment():
            source = self._source(tp)
            self.seek(tp, source.log.offset_for_time(when))

    def position(self, partition: tuple[str, int]) -> int:
        """Return the offset that is read next: the offset after the last returned record."""
        return self._positions.of(self._source(partition))

    def positions(self) -> dict[TopicPartition, int]:
        """Return the positions of all partitions that have one."""
        return {
            tp: self.position(tp)
            for tp, source in sorted(self._positions.sources.items())
            if source.position is not None
        }

    def _source(self, partition: tuple[str, int]) -> Source:
        self._check_open()
        return self._positions.source(partition)

    def pause(self, *partitions: tuple[str, int]) -> None:
        """Return no records of the named partitions, or of all, until `resume`; keep them."""
        self._positions.settle()
        for tp in partitions or self.assignment():
            self._source(tp).paused = True
        self._fetcher.attention = True

    def resume(self, *partitions: tuple[str, int]) -> None:
        """Return records of the named partitions, or of all, again."""
        for tp in partitions or self.assignment():
            self._source(tp).paused = False
        self._bell.ring()

    def paused(self) -> list[TopicPartition]:
        """Return the partitions that are paused."""
        return [tp for tp, source in sorted(self._positions.sources.items()) if source.paused]

    def lag(self) -> dict[TopicPartition, Lag]:
        """Return the distance of each partition's position to its end, and the expected time."""
        now_ms, now = self._clock.time_ms(), self._clock.monotonic()
        found = {}
        for tp, position in self.positions().items():
            source = self._positions.sources[tp]
            end = source.end
            rate = source.pace.note(now, max(0, end - position))
            found[tp] = lag_of(source.log, position, now_ms=now_ms, end=end, rate=rate)
        return found

    # ---- committing ----

    def commit(self, offsets: Offsets | None = None, *, durability: str | None = None) -> None:
        """Commit the positions, or the given offsets; they are durable when it returns.

        All records that were returned so far count as processed.  Raises RebalanceError if this
        consumer is not a member any more: then other members process those records again.
        `durability` is "fsync" or "os"; the store's by default.
        """
        self._in_group().commit(offsets, durability)

    def commit_later(self, offsets: Offsets | None = None) -> concurrent.futures.Future[None]:
        """Like `commit`, in the background thread of the store; the future has the result.

        The thread does the commits of a store one after the other, in the order of the calls.
        """
        return self._in_group().commit_later(offsets)

    def _in_group(self) -> Committer:
        self._check_open()
        if self._committer is None:
            raise ConfigError("a consumer without group_id cannot commit: give it a group_id")
        return self._committer

    def committed(
        self, *partitions: tuple[str, int]
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Return the group's committed offsets, for the assigned partitions or for the named."""
        return self._in_group().committed(*partitions)

    # ---- in a transaction ----

    @property
    def offsets_partition(self) -> TopicPartition:
        """The partition of `__consumer_offsets` that stores the offsets of its group."""
        return self._in_group().offsets_partition

    def commit_in_transaction(
        self,
        producer_id: int,
        producer_epoch: int,
        offsets: Offsets | None = None,
    ) -> None:
        """Commit as a part of a producer's transaction; the offsets count after its commit.

        Called by the producer, which has to add `offsets_partition` to the transaction first.
        Raises RebalanceError if this consumer is not a member any more.
        """
        self._in_group().commit_in_transaction(producer_id, producer_epoch, offsets)

    # ---- closing ----

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def member_id(self) -> str:
        """Its id in the group; empty while it is not a member."""
        membership = self._membership
        return "" if membership is None else membership.member_id

    @property
    def generation(self) -> int:
        """The generation of the group in which it is a member; -1 while it is not a member."""
        membership = self._membership
        return -1 if membership is None else membership.generation

    @property
    def settled(self) -> bool:
        """Whether it is a member and has its partitions: no rebalance is under way."""
        membership = self._membership
        if membership is None or membership.needs_to_join() is not None:
            return False
        return membership.settled

    @property
    def _membership(self) -> Membership | None:
        return None if self._committer is None else self._committer.membership

    def wake(self) -> None:
        """End the wait of a poll early.  This is the only method that other threads may call."""
        self._bell.ring()

    def close(self) -> None:
        """Commit the returned records' offsets if `auto_commit` is set, and leave the group."""
        self._close(everything=True)

    def _close(self, *, everything: bool) -> None:
        """Close; `everything`: also commit the record that is being processed."""
        if self._closed:
            return
        # Commit while still a member; then `on_revoked`, which may commit as well; leave last.
        # Each step is done even if the one before raises.
        try:
            if self._committer is not None and self._committer.auto:
                sources = self._positions.sources
                self._committer.commit_moved(sources, "on closing", everything=everything)
        finally:
            held = sorted(self._positions.sources)
            try:
                if self._rebalancer is not None:
                    self._rebalancer.revoke_on_closing(held)
            finally:
                self._closed = True
                self._positions.drop(held)
                if self._offsets_log is not None:
                    self._offsets_log.parts.view.unlisten(self._bell.ring)
                if self._rebalancer is not None:
                    self._rebalancer.close()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            # The record that was being processed when the block raised is not committed.
            self._close(everything=False)

    def __del__(self) -> None:
        """Stop listening for appends; the consumer was dropped without `close`.

        It does not leave the group: its session times out.
        """
        if not self.__dict__.get("_closed", True):
            for source in self._positions.sources.values():
                source.log.parts.view.unlisten(self._bell.ring)
            if self._offsets_log is not None:
                self._offsets_log.parts.view.unlisten(self._bell.ring)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the consumer is closed")
        self._store.access.check_usable()

    def __repr__(self) -> str:
        group = "" if self.group_id is None else f" of group {self.group_id!r}"
        what = ", ".join(map(str, self.assignment())) or "nothing yet"
        return f"<Consumer{group} reading {what}{' closed' if self._closed else ''}>"


def _check_seconds(name: str, seconds: object, most: float) -> None:
    if not isinstance(seconds, int | float):
        raise TypeError(f"{name} is a number of seconds, not {seconds!r}")
    if not seconds > 0:
        raise ConfigError(f"{name} must be more than 0 seconds, not {seconds!r}")
    if seconds > most:
        raise ConfigError(f"{name} must be at most {most:.0f} seconds, not {seconds!r}")


def _check_start(start: object) -> None:
    if isinstance(start, datetime.datetime) or (
        isinstance(start, int) and not isinstance(start, bool)
    ):
        milliseconds(start)
    elif start not in ("earliest", "latest", "none"):
        raise ConfigError(
            f"start must be 'earliest', 'latest', 'none', a datetime or int milliseconds, "
            f"not {start!r}"
        )
