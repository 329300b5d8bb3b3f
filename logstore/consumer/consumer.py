"""Consumer: reads topics, alone or as a member of a group.

    with Consumer(store, "orders", group_id="billing") as consumer:
        for record in consumer:
            bill(record.value)

In a group its position is kept in the store: what was processed is committed from time to time, and
at the end, or when the user says so.  A record counts as processed when the loop asks for the next
one; if the block raises, the record that it was at is not committed, and comes again.

It wakes when something is appended, and polls nothing.  Its lease in the group is renewed by the
library for as long as it is used: a record that takes an hour is no reason to be thrown out, unless
`max_processing_time` says so.

Not for threads to share; each has its own.  Many consumers, in as many threads, share one store.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import itertools
import logging
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from logstore import _native
from logstore.clock import Clock, SystemClock
from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.consumer.assignors import Assign, Assignor, assignor_of
from logstore.consumer.membership import Membership, MembershipSettings
from logstore.consumer.source import Source
from logstore.consumer.wakeup import Bell
from logstore.coordinators.group_coordinator import GroupCoordinator, explain
from logstore.coordinators.group_events import REBALANCE_IN_PROGRESS, UNKNOWN_MEMBER_ID
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS, INTERNAL_TOPICS
from logstore.coordinators.lag import Lag, lag_of
from logstore.coordinators.offset_book import OffsetBook, Offsets
from logstore.coordinators.offset_records import CommittedOffset, TopicPartition, check_text
from logstore.errors import (
    ClosedError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    RebalanceError,
    UnknownTopicError,
)
from logstore.interceptors import InterceptorChain
from logstore.partition.reader import milliseconds
from logstore.record import Record
from logstore.serialization import Deserializer, SerializationError, deserializer
from logstore.store.store import Store

__all__ = ["ConsumedRecord", "Consumer", "ReceivedRecord"]

log = logging.getLogger("logstore.consumer")

RUN = 32_768  # offsets that an iteration takes from a partition before it looks around
LIST_RUN = 512  # the same, of records that go through the user's own code
LOOK_SECONDS = 0.02  # how often a consumer of a readonly store looks for appends
REFRESH_SECONDS = 1.0  # how often one without a group looks for new partitions
SECONDS_MAX = 2_147_483.0  # of what a group's record keeps, as int32 milliseconds
ID_ROOM = 37  # bytes that a member's id has behind its client_id or instance_id
COMMIT_SECONDS = 30.0  # how long a commit waits for a rebalance to be over

_numbers = itertools.count(1)

Topics: TypeAlias = "str | re.Pattern[str]"
Start: TypeAlias = "str | int | datetime.datetime"
AnyAssignor: TypeAlias = "str | Assign | Assignor"
Moved: TypeAlias = "Callable[[list[TopicPartition]], object]"


class ReceivedRecord(Protocol):
    """A record of a consumer: a Record, or with a deserializer a ConsumedRecord."""

    @property
    def value(self) -> Any:
        """The result of the value deserializer; without one bytes, or None."""

    @property
    def key(self) -> Any:
        """The result of the key deserializer; without one bytes, or None."""

    @property
    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        """Names and values."""

    @property
    def timestamp(self) -> int:
        """Milliseconds since 1970."""

    @property
    def offset(self) -> int:
        """Its place in the partition."""

    @property
    def partition(self) -> int:
        """The partition's number."""

    @property
    def topic(self) -> str:
        """The topic's name."""


class ConsumedRecord(NamedTuple):
    """A record whose key or value went through a deserializer."""

    value: Any
    key: Any
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int
    offset: int
    partition: int
    topic: str


class Consumer(Closeable):
    """Reads records of topics, in order for each partition.

    `topics`: names, or compiled patterns for names that match now or later.  Without `group_id` it
    reads all their partitions; in a group, those that the group assigns to it.

    `start`: where to begin without a committed offset, or when it is outside of the log:
    "earliest", "latest", "none" (raise), or a time (datetime, int milliseconds).  `timeout`:
    seconds after which iteration ends when nothing comes; None waits for ever.
    ``isolation="read_committed"`` shows no record of an open or aborted transaction.

    `auto_commit` is for groups: every `auto_commit_interval` seconds, when partitions are given
    back, and on closing.  `assignor`: a name of Kafka's (range, roundrobin, sticky,
    cooperative-sticky), a callable, or several in order of preference.  `instance_id` makes it a
    static member, which may be closed and come back within `session_timeout` without a rebalance.
    `max_processing_time`: seconds that a record, or a poll's worth of them, may take before the
    group goes on without this consumer; the error names the record.

    `on_assigned`, `on_revoked`, `on_lost` get lists of TopicPartition, in the thread that polls;
    offsets can still be committed in `on_revoked`, not in `on_lost`.
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
        self._store = store
        self._clock: Clock = store.clock or SystemClock()
        self.group_id = group_id
        self.timeout = timeout
        self._start = start
        self._committed_only = isolation == "read_committed"
        self._on_corrupt = on_corrupt
        self._auto_commit = auto_commit and group_id is not None
        self._auto_commit_interval = auto_commit_interval
        self._auto_commit_due = time.monotonic() + auto_commit_interval
        self._key_deserializer = deserializer(key_deserializer)
        self._value_deserializer = deserializer(value_deserializer)
        self._interceptors = InterceptorChain(interceptors)
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._max_processing_time = max_processing_time
        # Whether an iteration can hand out what the scan gives, and nothing has to look at it.
        self._plain = not (
            self._key_deserializer
            or self._value_deserializer
            or self._interceptors.receivers
            or max_processing_time is not None
        )
        self._bell = Bell()
        self._attention = False  # something else than records wants to be looked at
        self._sources: dict[TopicPartition, Source] = {}
        self._taken: dict[Source, int | None] = {}  # positions before the poll that is under way
        self._turn: list[Source] = []  # whose turn it is, first first
        self._manual = False  # assigned by hand
        self._subscription: tuple[Topics, ...] = ()
        self._refresh_due = 0.0
        # What was handed out last and may still be worked on: the partition, the record, where it
        # began, and since when.
        self._running: Source | None = None  # an iteration is in a run of it
        self._run: _native.SegmentScan | None = None  # that run
        self._run_began = 0
        self._current: Any = None
        self._handed: dict[TopicPartition, int] = {}
        self._handed_at: float | None = None
        self._thread: threading.Thread | None = None
        self._membership: Membership | None = None
        self._lost_reason = ""  # why it was last out of its group
        self._book: OffsetBook | None = None
        self._offsets_log: Any = None
        self._closed = False  # from here on __del__ finds all that it needs
        if group_id is not None:
            if isinstance(assignor, str | Assignor) or callable(assignor):
                assignor = [assignor]
            assignors = tuple(assignor_of(each) for each in assignor)
            if not assignors:
                raise ConfigError("a member of a group has an assignor: give it one")
            self._settings = MembershipSettings(
                group_id, client_id or f"consumer-{next(_numbers)}", instance_id, assignors,
                session_timeout, rebalance_timeout, heartbeat_interval,
            )  # fmt: skip
            self._coordinator = GroupCoordinator.of(store)
            self._book = self._coordinator.book
        if topics:
            self.subscribe(*topics)

    # ---- what is read ----

    def subscribe(self, *topics: Topics) -> None:
        """Read these topics from now on, instead of what was read before."""
        self._check_open()
        for topic in topics:
            if not isinstance(topic, str | re.Pattern):
                raise TypeError(f"a topic is a name or a compiled pattern, not {topic!r}")
            if isinstance(topic, str) and topic not in self._store:
                self._store[topic]  # raises, with names that look alike
        if self._membership is not None and self._settings.cooperative:
            # The group gives away what a member has not subscribed to, and may have it join as
            # soon as the new subscription is known: nothing of that may be read by then.
            names = self._topic_names(topics)
            left = [tp for tp in self._sources if tp.topic not in names]
            if left:
                self._give_back(self._membership, left)
        self._manual = False
        self._subscription = topics
        self._refresh_due = 0.0
        if self._book is None:
            self._refresh()
        elif self._membership is None:
            self._drop(list(self._sources))  # of its own choice: the group knows nothing of them
            self._membership = self._new_membership()
            self._offsets_log = self._book.log_of(self._settings.group_id)
            self._offsets_log.listen(self._bell.ring)
        else:
            self._membership.join_again("it subscribed to other topics")

    def _new_membership(self) -> Membership:
        this = weakref.ref(self)

        def attention() -> None:
            consumer = this()
            if consumer is not None:
                consumer._interrupt()

        def alive() -> bool:
            consumer = this()
            if consumer is None or consumer._closed:
                return False
            return consumer._thread is None or consumer._thread.is_alive()

        def overdue() -> str:
            consumer = this()
            if consumer is None:
                return ""
            if consumer._auto_commit and time.monotonic() >= consumer._auto_commit_due:
                consumer._interrupt()
            return consumer._overdue()

        def topics() -> tuple[str, ...]:
            consumer = this()
            return () if consumer is None else consumer._topic_names()

        store = self._store

        def partitions(topics: Sequence[str]) -> dict[str, list[int]]:
            found = {}
            for topic in topics:
                with contextlib.suppress(UnknownTopicError):
                    found[topic] = list(store[topic]._numbers)
            return found

        return Membership(self._coordinator, self._settings, attention=attention, alive=alive,
                          overdue=overdue, topics=topics, partitions=partitions)  # fmt: skip

    def _topic_names(self, subscription: tuple[Topics, ...] | None = None) -> tuple[str, ...]:
        """The names that the subscription, or another one, means now."""
        topics = self._subscription if subscription is None else subscription
        names = {topic for topic in topics if isinstance(topic, str)}
        patterns = [topic for topic in topics if not isinstance(topic, str)]
        if patterns:
            for name in self._store:
                if name not in INTERNAL_TOPICS and any(p.search(name) for p in patterns):
                    names.add(name)
        return tuple(sorted(names))

    def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Read just these partitions, whatever others of the group do."""
        self._check_open()
        wanted = [TopicPartition(*each) for each in partitions]
        for tp in wanted:
            if self._store[tp.topic][tp.partition].number != tp.partition:  # raises, too
                raise IndexError(f"topic {tp.topic!r} has no partition {tp.partition}")
        if self._membership is not None:
            self._membership.leave("it reads partitions of its own choice")
            self._membership = None
        self._manual = True
        self._subscription = ()
        self._drop([tp for tp in self._sources if tp not in wanted])
        self._add([tp for tp in wanted if tp not in self._sources])

    def assignment(self) -> list[TopicPartition]:
        """The partitions that it reads now, in order."""
        return sorted(self._sources)

    def subscription(self) -> list[str]:
        """The topics that it reads, or would."""
        return list(self._topic_names())

    def _refresh(self) -> None:
        """Without a group: all partitions of the topics, as they are now."""
        self._refresh_due = time.monotonic() + REFRESH_SECONDS
        wanted = []
        for name in self._topic_names():
            with contextlib.suppress(UnknownTopicError):
                wanted += [TopicPartition(name, number) for number in self._store[name]._numbers]
        gone = [tp for tp in self._sources if tp not in wanted]
        new = [tp for tp in wanted if tp not in self._sources]
        if gone:
            self._drop(gone)
        if new:
            self._add(new)

    def _add(self, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            log = self._store[tp.topic][tp.partition]
            source = Source(tp, log, committed=self._committed_only, on_corrupt=self._on_corrupt)
            source.log.listen(self._bell.ring)
            self._sources[tp] = source
            self._turn.append(source)
        if self._start != "none":
            self._place()

    def _drop(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            source = self._sources.pop(tp, None)
            if source is not None:
                self._turn.remove(source)
                source.log.unlisten(self._bell.ring)
                self._handed.pop(tp, None)
                if self._running is source:
                    self._running = self._current = self._run = None

    def _place(self) -> None:
        """Find the position of partitions that have none yet."""
        lost = [source for source in self._sources.values() if source.position is None]
        if not lost:
            return
        committed: Mapping[TopicPartition, CommittedOffset] = {}
        pending: set[TopicPartition] = set()
        if self._book is not None:
            pending = self._book.pending(self._settings.group_id)
            committed = self._book.committed(self._settings.group_id)
        for source in lost:
            tp = source.partition
            if tp in pending:
                continue  # a transaction decides soon where it starts: its marker rings the bell
            known = committed.get(tp)
            if known is not None:
                source.seek(known.offset)
                source.committed_offset = known.offset
            else:
                cut = source.log.cut
                source.seek(self._start_of(source), cut)

    def _start_of(self, source: Source) -> int:
        start = self._start
        if start == "earliest":
            return source.log.start_offset
        if start == "latest":
            return source.end
        if isinstance(start, int | datetime.datetime):
            return source.log.offset_for_time(start)
        raise ConfigError(
            f"no committed offset for {source.partition} of group {self.group_id!r}, and start is "
            f"'none': commit one, or say where to start"
        )

    # ---- the group ----

    def _coordinate(self) -> None:
        """Do what the group wants; does not wait."""
        self._attention = False
        membership = self._membership
        if membership is None:
            if self._subscription and time.monotonic() >= self._refresh_due:
                self._refresh()
            self._place()
            return
        while True:
            self._attention = False  # before looking: what comes from now on is seen later
            lost = membership.take_loss()
            if lost is not None:
                self._lose(lost)
            reason = membership.needs_to_join()
            if reason is not None:
                if not self._settings.cooperative and self._sources:
                    self._give_back(membership, list(self._sources))
                membership.join(reason)
            try:
                assigned = membership.take_assignment()
                if assigned is None:
                    break
                self._adopt(membership, assigned)
            except KeyboardInterrupt:
                membership.join_again("an interrupt kept it from taking its assignment")
                raise
        self._place()

    def _adopt(self, membership: Membership, assigned: tuple[TopicPartition, ...]) -> None:
        """Read what the assignment says, and nothing else, even if a callback raises."""
        names = self._topic_names()  # perhaps it was for those of another subscription
        there = [tp for tp in assigned if tp.topic in names and self._exists(tp)]
        gone = [tp for tp in self._sources if tp not in there]
        new = sorted(tp for tp in there if tp not in self._sources)
        try:
            if gone:
                self._give_back(membership, gone)
        finally:
            membership.release(tp for tp in assigned if tp not in there)
            self._add(new)
            if self._on_assigned is not None and new:
                self._on_assigned(new)

    def _exists(self, tp: TopicPartition) -> bool:
        try:
            self._store[tp.topic][tp.partition]
        except (UnknownTopicError, IndexError):
            return False
        return True

    def _give_back(self, membership: Membership, partitions: list[TopicPartition]) -> None:
        """Let go of partitions: what was processed is committed first.

        An error on the way does not keep them: the group has decided.  They are owned until the
        end of it.
        """
        partitions = sorted(partitions)
        with contextlib.ExitStack() as then:
            then.callback(self._let_go, membership, partitions)
            if self._on_revoked is not None:
                then.callback(self._on_revoked, partitions)
            if self._auto_commit:
                self._commit_positions(partitions, "before a rebalance")

    def _let_go(self, membership: Membership, partitions: list[TopicPartition]) -> None:
        self._drop(partitions)
        membership.release(partitions)
        if self._settings.cooperative:
            membership.join_again(f"it gave back {len(partitions)} partitions")

    def _lose(self, reason: str) -> None:
        partitions = sorted(self._sources)
        if partitions:
            log.warning("%s: lost %d partitions: %s", self.group_id, len(partitions), reason)
            self._drop(partitions)
            if self._on_lost is not None:
                self._on_lost(partitions)
        self._lost_reason = reason

    def _interrupt(self) -> None:
        """Have the consumer look around before the next record; by any thread."""
        self._attention = True
        run = self._run
        if run is not None:
            run.end()
        self._bell.ring()

    def _overdue(self) -> str:
        """What it has been at for longer than it may; called by the timers' thread."""
        limit, since, record = self._max_processing_time, self._handed_at, self._current
        if limit is None or since is None or record is None:
            return ""
        spent = time.monotonic() - since
        if spent <= limit:
            return ""
        where = f"{record.topic}-{record.partition} offset {record.offset}"
        return f"{where} is being processed for {spent:.1f} s; max_processing_time is {limit} s"

    # ---- reading ----

    def poll(self, *, max_records: int = 500, timeout: float | None = None) -> list[ReceivedRecord]:
        """The next records, at most `max_records`; none when `timeout` seconds bring none.

        None as `timeout` means the consumer's own.  What the poll before returned counts as
        processed from now on.
        """
        if max_records < 1:
            raise ValueError(f"max_records must be at least 1, not {max_records}")
        limit = self.timeout if timeout is None else timeout
        deadline = None if limit is None else time.monotonic() + limit
        self._taken = {}
        try:
            while True:
                records = self._try_poll(max_records)
                if records:
                    return records
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return []
                self._wait(left)
        except KeyboardInterrupt:
            # What was read is returned by the next poll.
            for source, at in self._taken.items():
                source.seek(at)
            raise

    def _try_poll(self, max_records: int) -> list[ReceivedRecord]:
        """What there is now, from several partitions if need be."""
        self._look_around()
        found: list[ReceivedRecord] = []
        began: dict[TopicPartition, int] = {}
        for source in list(self._turn):
            at = source.position
            self._taken[source] = at
            try:
                records = self._read(source, max_records - len(found))
            except BaseException as error:
                if not found or isinstance(error, KeyboardInterrupt):
                    raise
                break  # what was read is returned first; the error comes again
            if records:
                assert at is not None
                began[source.partition] = at
                found += records
            if len(found) >= max_records:
                break
            self._next_turn(source)
        if not found:
            return found
        given = self._intercepted(found, began)
        self._handed = began
        self._current = found[0]
        if self._max_processing_time is not None:
            self._handed_at = time.monotonic()
        return given

    def _next_turn(self, source: Source) -> None:
        """The others first, before it is this one's turn again."""
        if self._turn and self._turn[0] is source:
            self._turn = self._turn[1:] + self._turn[:1]

    def _look_around(self) -> None:
        """Between records: what was handed out is processed, and the group may want something."""
        self._check_open()
        self._thread = threading.current_thread()
        self._settle()
        self._handed = {}
        self._running = self._current = self._handed_at = None
        self._bell.clear()  # before looking: what comes from now on rings it
        self._coordinate()
        if self._auto_commit and time.monotonic() >= self._auto_commit_due:
            self._auto_commit_due = time.monotonic() + self._auto_commit_interval
            self._commit_positions(self._sources, "from time to time")

    def _read(self, source: Source, limit: int) -> list[ReceivedRecord]:
        """Records of one partition, deserialized; none when there are none."""
        at = source.position
        if source.paused or at is None:
            return []
        records = self._read_raw(source, limit)
        if not records or (self._key_deserializer is None and self._value_deserializer is None):
            return cast("list[ReceivedRecord]", records)  # a record of a log has all fields
        made: list[ReceivedRecord] = []
        try:
            made.extend(map(self._deserialized, records))
        except SerializationError as error:
            # Those before it first; it comes with the next call, and its offset is the position.
            source.seek(error.offset)
            if not made:
                raise
        except BaseException:
            source.seek(at)
            raise
        return made

    def _read_raw(self, source: Source, limit: int) -> list[Record]:
        """A position outside of the log, or past a truncation, is reset as `start` says."""
        try:
            return source.read(limit)
        except OffsetOutOfRangeError as error:
            if self._start == "none":
                raise
            cut = source.log.cut
            target = self._start_of(source)
            if isinstance(error, LogTruncatedError):
                # "latest" must not skip what was appended in the place of the truncated records.
                target = min(target, max(error.truncated_to, source.log.start_offset))
            log.warning("%s: %s; reading on from %d", source.partition, error, target)
            source.seek(target, cut)
            return source.read(limit)
        except (ClosedError, UnknownTopicError):
            if self._store.closed or self._exists(source.partition):
                raise
            self._drop([source.partition])  # its topic was deleted
            return []

    def _deserialized(self, record: Record) -> ConsumedRecord:
        topic, partition = record.topic or "", record.partition or 0
        made: list[Any] = []
        for part, call in (("value", self._value_deserializer), ("key", self._key_deserializer)):
            raw = getattr(record, part)
            if call is not None and raw is not None:
                try:
                    raw = call(raw)
                except Exception as error:
                    raise SerializationError(
                        error, part=part, topic=topic, data=getattr(record, part),
                        partition=partition, offset=record.offset,
                    ) from error  # fmt: skip
            made.append(raw)
        return ConsumedRecord(made[0], made[1], record.headers, record.timestamp, record.offset,
                              partition, topic)  # fmt: skip

    def _intercepted(
        self, records: list[ReceivedRecord], began: Mapping[TopicPartition, int]
    ) -> list[ReceivedRecord]:
        """As the interceptors want them; when one fails, it is as if nothing had been read."""
        if not self._interceptors.receivers:
            return records
        try:
            taken = self._interceptors.on_consume(cast("list[Record]", records))
            return cast("list[ReceivedRecord]", list(taken))
        except BaseException:
            for tp, at in began.items():
                self._sources[tp].seek(at)
            raise

    def _wait(self, left: float | None) -> None:
        """Sleep until there is something to do, or `left` seconds are over."""
        self._bell.wait(self._nap(left))

    def _nap(self, left: float | None) -> float | None:
        naps = [left]
        if self._store.readonly:
            naps.append(LOOK_SECONDS)  # nobody tells us of another process's appends
        elif self._book is None and not self._manual:
            naps.append(REFRESH_SECONDS)
        if self._auto_commit:
            naps.append(max(0.01, self._auto_commit_due - time.monotonic()))
        return min((nap for nap in naps if nap is not None), default=None)

    def __iter__(self) -> Iterator[ReceivedRecord]:
        """Records one by one; ends when nothing comes for `timeout` seconds.

        Leaving the loop leaves the position behind the last record that was taken.
        """
        # No Python frame for each record: the scan's own iterators, one after the other.
        return itertools.chain.from_iterable(self._runs())

    def _runs(self) -> Iterator[Iterable[ReceivedRecord]]:
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
                self._settle()
            deadline = None if self.timeout is None else time.monotonic() + self.timeout

    def _try_run(self) -> Iterable[ReceivedRecord] | None:
        """Records of one partition, as long as nothing else is to be done; None: none are there."""
        self._look_around()
        for source in list(self._turn):
            run = self._scan_run(source) if self._plain else self._list_run(source)
            self._next_turn(source)
            if run is not None:
                return run
        return None

    def _scan_run(self, source: Source) -> Iterable[ReceivedRecord] | None:
        if source.paused or source.position is None:
            return None
        try:
            run = source.run(RUN)
        except (OffsetOutOfRangeError, ClosedError, UnknownTopicError):
            run = None  # the longer way knows what to do
        if run is None:
            return self._list_run(source)
        self._running, self._run = source, run
        self._run_began = source.position
        if self._attention:
            run.end()
        return cast("Iterable[ReceivedRecord]", run)

    def _list_run(self, source: Source) -> Iterable[ReceivedRecord] | None:
        at = source.position
        records = self._read(source, LIST_RUN)
        if not records:
            return None
        assert at is not None
        given = self._intercepted(records, {source.partition: at})
        return self._each(source, given) if given else None

    def _each(self, source: Source, records: list[ReceivedRecord]) -> Iterator[ReceivedRecord]:
        """Give out a run one by one; whatever ends it, the position is right behind."""
        self._running = source
        timed = self._max_processing_time is not None
        record = None
        try:
            for record in records:
                self._current = record
                if timed:
                    self._handed_at = time.monotonic()
                yield record
                if self._attention:
                    break
        finally:
            # Not if somebody has moved the position meanwhile, or the partition is gone.
            if self._running is source and record is not records[-1]:
                source.seek(self._current.offset + 1)

    def _settle(self) -> None:
        """End the scan that is being iterated, if any; its partition is where that stands."""
        run, source = self._run, self._running
        if run is None or source is None:
            return
        run.end()
        self._run = None
        before = self._run_began
        source.seek(max(before, run.next_offset))
        if source.position != before:
            self._handed[source.partition] = max(before, run.next_offset - 1)
        self._running = None

    # ---- positions ----

    def seek(self, partition: tuple[str, int], offset: int | datetime.datetime | str) -> None:
        """Read on at an offset, "beginning", "end", or the first record at or after a datetime."""
        source = self._source(partition)
        log = source.log
        cut = log.cut
        if isinstance(offset, datetime.datetime):
            offset = log.offset_for_time(milliseconds(offset))
        elif offset == "beginning":
            offset = log.start_offset
        elif offset == "end":
            offset = source.end
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise TypeError(
                f"seek to an int offset, 'beginning', 'end' or a datetime, not {offset!r}"
            )
        if offset < 0:
            raise OffsetOutOfRangeError(
                offset, start=log.start_offset, end=log.end_offset, where=log.name
            )
        self._settle()  # a run under way ends here
        source.seek(offset, cut)
        self._handed.pop(source.partition, None)
        if self._running is source:
            self._running = self._current = None
        self._attention = True

    def seek_to_beginning(self, *partitions: tuple[str, int]) -> None:
        """Read from the first record on; all partitions when none is named."""
        for tp in partitions or self.assignment():
            self.seek(tp, "beginning")

    def seek_to_end(self, *partitions: tuple[str, int]) -> None:
        """Read only what comes from now on; all partitions when none is named."""
        for tp in partitions or self.assignment():
            self.seek(tp, "end")

    def seek_to_time(self, when: int | datetime.datetime, *partitions: tuple[str, int]) -> None:
        """Read from the first record at or after a time on, in all partitions or in those named."""
        for tp in partitions or self.assignment():
            source = self._source(tp)
            self.seek(tp, source.log.offset_for_time(when))

    def position(self, partition: tuple[str, int]) -> int:
        """The offset of the record that comes next: behind the last one that was handed out."""
        source = self._source(partition)
        if self._reached(source) is None:
            self._place()
        position = self._reached(source)
        if position is None:
            raise explain(
                self.group_id or "", "UNSTABLE_OFFSET_COMMIT",
                f"a transaction that is not over has committed an offset of {source.partition}",
            )  # fmt: skip
        return position

    def _reached(self, source: Source) -> int | None:
        """Return the offset after what was handed out; None: where it starts is not known yet."""
        if self._running is source:
            if self._run is not None:
                return max(self._run_began, self._run.next_offset)
            if self._current is not None:
                return int(self._current.offset) + 1
        return source.position

    def positions(self) -> dict[TopicPartition, int]:
        """The positions of all partitions that have one."""
        return {
            tp: self.position(tp)
            for tp, source in sorted(self._sources.items())
            if source.position is not None
        }

    def _source(self, partition: tuple[str, int]) -> Source:
        self._check_open()
        tp = TopicPartition(*partition)
        source = self._sources.get(tp)
        if source is None:
            held = ", ".join(map(str, self.assignment())) or "none"
            raise ValueError(f"{tp} is not assigned to this consumer; it reads {held}")
        return source

    def pause(self, *partitions: tuple[str, int]) -> None:
        """Hand out nothing of these, or of all, until `resume`; they stay assigned."""
        self._settle()
        for tp in partitions or self.assignment():
            self._source(tp).paused = True
        self._attention = True

    def resume(self, *partitions: tuple[str, int]) -> None:
        """Go on with these, or with all."""
        for tp in partitions or self.assignment():
            self._source(tp).paused = False
        self._bell.ring()

    def paused(self) -> list[TopicPartition]:
        """The partitions that are paused."""
        return [tp for tp, source in sorted(self._sources.items()) if source.paused]

    def lag(self) -> dict[TopicPartition, Lag]:
        """How far behind the end each partition is, and when it will have caught up."""
        now_ms, now = self._clock.time_ms(), self._clock.monotonic()
        found = {}
        for tp, position in self.positions().items():
            source = self._sources[tp]
            end = source.end
            rate = source.pace.note(now, max(0, end - position))
            found[tp] = lag_of(source.log, position, now_ms=now_ms, end=end, rate=rate)
        return found

    # ---- committing ----

    def commit(self, offsets: Offsets | None = None) -> None:
        """Commit where this consumer is, or the given offsets; durable when it returns.

        All that was handed out counts as processed.  Raises RebalanceError when the group has gone
        on without this consumer: then others process those records again.
        """
        self._in_group()
        self._commit(self.positions() if offsets is None else offsets)

    def commit_later(self, offsets: Offsets | None = None) -> concurrent.futures.Future[None]:
        """As `commit`, in the background; the future has the outcome.

        Commits of one store are carried out in the order in which they were asked for.
        """
        self._in_group()
        given = self.positions() if offsets is None else offsets
        member = self._member()
        return self._coordinator.in_background(lambda: self._commit(given, member))

    def _in_group(self) -> None:
        self._check_open()
        if self.group_id is None:
            raise ConfigError("a consumer without group_id has nowhere to commit to: give it one")

    def _member(self) -> tuple[str, int]:
        membership = self._membership
        if membership is None:
            return "", -1
        if not membership.member_id:
            why = membership.loss or self._lost_reason or "poll first"
            raise explain(self._settings.group_id, UNKNOWN_MEMBER_ID, why)
        return membership.member_id, membership.generation

    def _commit(
        self,
        offsets: Offsets,
        member: tuple[str, int] | None = None,
    ) -> None:
        if not offsets:
            return
        deadline = time.monotonic() + COMMIT_SECONDS
        while True:
            member_id, generation = self._member() if member is None else member
            try:
                self._coordinator.commit(
                    self._settings.group_id, offsets, member_id=member_id, generation=generation,
                    instance_id=self._settings.instance_id if member_id else None,
                    held=self._held(offsets, generation),
                )  # fmt: skip
            except RebalanceError as error:
                if error.code != REBALANCE_IN_PROGRESS or time.monotonic() > deadline:
                    raise
                self._bell.wait(0.01)  # the leader is about to assign
                continue
            break
        plain: dict[tuple[str, int], int] = {}
        for tp, offset in offsets.items():
            number = offset if isinstance(offset, int) else offset.offset
            plain[TopicPartition(*tp)] = number
            source = self._sources.get(TopicPartition(*tp))
            if source is not None:
                source.committed_offset = number
        self._interceptors.on_commit(plain)

    def _held(self, offsets: Offsets, generation: int) -> Callable[[], bool]:
        """Return a call that answers whether this member has held all of these since `generation`.

        Other members take a cooperative member along into the next generation, from their own
        threads, at any moment of a commit.
        """
        membership = self._membership
        return lambda: membership is not None and membership.holds(offsets, generation)

    def _commit_positions(
        self, partitions: Iterable[TopicPartition], when: str, *, everything: bool = True
    ) -> None:
        """Commit what has moved since the last time; `everything`: what is being processed, too.

        Log a warning if the group does not allow it: others process those records again.
        """
        moved: dict[TopicPartition, CommittedOffset | int] = {}
        for tp in partitions:
            source = self._sources.get(tp)
            if source is None or source.position is None:
                continue
            at = self._reached(source) if everything else self._processed(source)
            if at is not None and at != source.committed_offset:
                moved[tp] = at
        try:
            self._commit(moved)
        except (RebalanceError, ClosedError) as error:
            if isinstance(error, ClosedError) and not self._store.closed:
                raise
            what = ", ".join(f"{tp} at {at}" for tp, at in sorted(moved.items()))
            log.warning("%s: not committed %s: %s (%s)", self.group_id, when, error, what)

    def _processed(self, source: Source) -> int:
        """Where it was before what was handed out last."""
        if self._running is source and self._run is not None:
            return max(self._run_began, self._run.next_offset - 1)
        if self._running is source and self._current is not None:
            return int(self._current.offset)
        assert source.position is not None
        return self._handed.get(source.partition, source.position)

    def committed(
        self, *partitions: tuple[str, int]
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """What the group has committed, for its partitions here or for those named."""
        self._in_group()
        assert self._book is not None
        known = self._book.committed(self._settings.group_id)
        return {
            TopicPartition(*tp): known.get(TopicPartition(*tp))
            for tp in partitions or self.assignment()
        }

    # ---- in a transaction ----

    @property
    def offsets_partition(self) -> TopicPartition:
        """The partition that keeps its group's offsets: one of a transaction that commits them."""
        self._in_group()
        assert self._book is not None
        return TopicPartition(CONSUMER_OFFSETS, self._book.partition_of(self._settings.group_id))

    def commit_in_transaction(
        self,
        producer_id: int,
        producer_epoch: int,
        offsets: Offsets | None = None,
    ) -> None:
        """Commit as a part of a producer's transaction: it counts when that is committed.

        For who runs the transaction, which then has to end in `offsets_partition`, too.  Raises
        RebalanceError when the group has gone on without this consumer.
        """
        self._in_group()
        member_id, generation = self._member()
        given = self.positions() if offsets is None else offsets
        self._coordinator.commit_in_transaction(
            self._settings.group_id, given, producer_id=producer_id,
            producer_epoch=producer_epoch, member_id=member_id, generation=generation,
            instance_id=self._settings.instance_id if member_id else None,
            held=self._held(given, generation),
        )  # fmt: skip

    # ---- closing ----

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def member_id(self) -> str:
        """Its name in the group; empty while it is not in it."""
        return "" if self._membership is None else self._membership.member_id

    @property
    def generation(self) -> int:
        """The group's generation that it is in; -1 while it is in none."""
        return -1 if self._membership is None else self._membership.generation

    def wake(self) -> None:
        """End the wait of a poll in another thread early; the only method for other threads."""
        self._bell.ring()

    def close(self) -> None:
        """Commit what was handed out, if it commits by itself, and leave the group."""
        self._close(everything=True)

    def _close(self, *, everything: bool) -> None:
        if self._closed:
            return
        try:
            if self._auto_commit:
                self._commit_positions(self._sources, "on closing", everything=everything)
        finally:
            held = sorted(self._sources)
            membership, on_revoked = self._membership, self._on_revoked
            leaves = membership is not None and self._settings.instance_id is None
            self._on_revoked = None  # it may close the consumer, and is called once
            try:
                if leaves and held and on_revoked is not None:
                    on_revoked(held)
            finally:
                self._closed = True
                self._drop(held)
                if self._offsets_log is not None:
                    self._offsets_log.unlisten(self._bell.ring)
                if membership is not None:
                    membership.leave("it was closed")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            # What was being processed when the block failed comes again.
            self._close(everything=False)

    def __del__(self) -> None:
        """Dropped without close(): its session runs out, and nobody has to wake it any more."""
        if not self.__dict__.get("_closed", True):
            for source in self._sources.values():
                source.log.unlisten(self._bell.ring)
            if self._offsets_log is not None:
                self._offsets_log.unlisten(self._bell.ring)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the consumer is closed")
        self._store._check_usable()

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
