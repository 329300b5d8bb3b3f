"""Queue: a topic as a work queue.  A message is handed out until it is acknowledged.

Every message is a record of the topic, and every group gets every message.  A getter leases a
message for its `visibility` time; it acknowledges the message, gives it back, or rejects it.  After
`max_attempts` the message is a dead letter in ``<topic>-dlt``.

The guarantee is at least once.  A kill repeats the messages that were leased, and those whose
acknowledgement was not written yet: at most `ack_linger` old.

Threads may share a queue.  It has no lock of its own: see `ShareGroups`.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.consumer.wakeup import Bell
from logstore.coordinators.offset_records import check_text
from logstore.errors import ClosedError
from logstore.producer.producer import Producer
from logstore.queues.leasing import DUE_HEADER, TTL_HEADER, Share, ShareOptions
from logstore.queues.message import Message, duration_ms, one_turn
from logstore.queues.share_groups import ShareGroups
from logstore.record import Record
from logstore.serialization import Serializer, deserializer, serializer
from logstore.store.companions import expect_store
from logstore.store.store import Store
from logstore.store.topic import Position, check_topic_name

__all__ = ["Queue", "QueueSize"]

IN_FLIGHT_MAX = 25_000  # more would not fit into one record of the state
SETTINGS = {"retention.ms": -1, "retention.bytes": -1, "segment.bytes": 16 << 20}


class QueueSize(NamedTuple):
    """How many messages a queue has, for its group.

    `ready` counts the offsets that were not read yet: the markers of transactions in the topic
    count, too.  `dead` counts the records of ``<topic>-dlt``, of all groups.
    """

    ready: int
    delayed: int
    in_flight: int
    dead: int


class Queue(Closeable):
    """A work queue in a topic of a store.  The topic is made if it does not exist.

    - `group`: several groups each get every message.  A new group begins at the first record.
    - `visibility`: how long a message is leased; seconds, or a text such as "5m".
    - `max_attempts`: then the message is moved to ``<topic>-dlt``.
    - `nack_delay`: how long a message waits after it was given back.
    - `in_flight_max`: messages of a partition that are leased, delayed or read ahead, at most
      25,000.  It bounds the memory.
    - `order`: "none", or "key": one unacknowledged message of a key at a time, in their order.
    - `keep`: "acked" deletes whole segments that every group has finished; a duration keeps them
      for longer; "all" keeps all.
    - `ack_linger`: seconds that an acknowledgement may wait for others, to share an fsync.
    - `ttl`: the time to live of messages that are put without one.
    - `on_expired`: "skip", or "dead-letter", for messages whose time to live is over.
    - `partitions`, `priorities`: of a new topic.  Each priority has `partitions` partitions, and
      all messages of priority 0 are handed out before those of priority 1.
    - `value_serializer`, `value_deserializer`: as of Producer and Consumer.
    - `timeout`: iteration ends after this many seconds without a message.

    A topic that exists keeps its settings: with an age limit, retention may delete messages that
    are not acknowledged.  Queues of one group and topic share their settings.  ``close`` gives
    back the messages that this object has leased.
    """

    def __init__(
        self,
        store: Store,
        topic: str,
        *,
        group: str = "default",
        visibility: float | str = 30.0,
        max_attempts: int = 5,
        nack_delay: float | str = 1.0,
        in_flight_max: int = 20_000,
        order: str = "none",
        keep: float | str = "acked",
        ack_linger: float = 0.01,
        ttl: float | str | None = None,
        on_expired: str = "skip",
        partitions: int = 1,
        priorities: int = 1,
        value_serializer: str | Serializer | None = None,
        value_deserializer: Any = None,
        timeout: float | None = None,
    ) -> None:
        expect_store(store, "Queue")
        store.access.check_writable()
        check_text("a group's name", group)
        _check("order", order, ("none", "key"))
        _check("on_expired", on_expired, ("skip", "dead-letter"))
        _at_least_one(max_attempts=max_attempts, in_flight_max=in_flight_max,
                      partitions=partitions, priorities=priorities)  # fmt: skip
        if in_flight_max > IN_FLIGHT_MAX:
            raise ConfigError(f"in_flight_max is at most {IN_FLIGHT_MAX}, not {in_flight_max}")
        self._visibility_ms = duration_ms(visibility)
        if self._visibility_ms < 1:
            raise ConfigError(f"visibility is at least 1 ms, not {visibility!r}")
        self.nack_delay_ms = duration_ms(nack_delay)
        self._ttl_ms = None if ttl is None else duration_ms(ttl)
        keep_ms = {"acked": 0, "all": None}[keep] if keep in ("acked", "all") else duration_ms(keep)
        self.group = group
        self.timeout = timeout
        self._store = store
        self._serializer = serializer(value_serializer)
        self._deserializer = deserializer(value_deserializer)
        self._priorities = priorities
        check_topic_name(f"{topic}-dlt")
        self.topic = store.create_topic(
            topic, partitions * priorities, config=SETTINGS, exist_ok=True
        )
        if len(self.topic) % priorities:
            raise ConfigError(
                f"topic {topic!r} has {len(self.topic)} partitions, which {priorities} priorities "
                f"cannot share equally"
            )
        options = ShareOptions(
            max_attempts, in_flight_max, order == "key", keep_ms, on_expired, ack_linger
        )
        self._groups = ShareGroups.of(store)
        self._shares = [self._groups.share(group, self.topic, number, options)
                        for number in self.topic.partition_numbers]  # fmt: skip
        self.line = self._shares[0].line
        self._turns = itertools.count()
        self._producer: Producer | None = None  # of messages with a dedupe id
        self._closed = False

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<Queue {self.topic.name!r} of group {self.group!r}{state}>"

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    def _check_usable(self) -> None:
        self._store.access.check_usable()
        if self._closed:
            raise ClosedError(f"the queue {self.topic.name!r} is closed")

    # ---- putting ----

    def put(
        self,
        value: Any,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        delay: float | str | None = None,
        ttl: float | str | None = None,
        priority: int = 0,
        dedupe_id: str | bytes | None = None,
    ) -> Position:
        """Append a message; return its position when it is as durable as the store asks.

        It is not handed out for `delay`, nor after `ttl`, which begins after the delay.  A message
        with the `dedupe_id` of an earlier one is not appended again: see `Producer`.  Raises the
        errors of `Partition.append`.
        """
        self._check_usable()
        if self._serializer is not None:
            value = self._serializer(value)
        marked = [*headers, *self._marks(delay, ttl)]
        number = self._partition_of(key, value, priority)
        if dedupe_id is None:
            return self.topic.append(value, key=key, headers=marked, partition=number)
        if self._producer is None:
            self._producer = Producer(self._store)
        return self._producer.append(self.topic.name, value, key=key, headers=marked,
                                     partition=number, dedupe_id=dedupe_id)  # fmt: skip

    def put_many(self, values: Iterable[Any], *, key: bytes | None = None) -> list[Position]:
        """Append many messages, with one fsync for each partition."""
        self._check_usable()
        marks = list(self._marks(None, None))
        if self._serializer is not None:
            values = map(self._serializer, values)
        records = [Record(value, key=key, headers=marks) for value in values]
        if self._priorities > 1:
            return self.topic.extend(records, partition=self._partition_of(key, b"", 0))
        return self.topic.extend(records)

    def _marks(
        self, delay: float | str | None, ttl: float | str | None
    ) -> Iterator[tuple[str, bytes]]:
        ttl_ms = self._ttl_ms if ttl is None else duration_ms(ttl)
        if ttl_ms is not None:
            yield TTL_HEADER, b"%d" % ttl_ms
        if delay is not None and (delay_ms := duration_ms(delay)):
            yield DUE_HEADER, b"%d" % self.deadline_ms(delay_ms)

    def _partition_of(self, key: bytes | None, value: bytes, priority: int) -> int | None:
        if not 0 <= priority < self._priorities:
            raise ConfigError(f"priority is 0 to {self._priorities - 1}, not {priority!r}")
        if self._priorities == 1:
            return None  # the topic chooses
        width = len(self.topic) // self._priorities
        number: int = self.topic.partitioner(key, value, width)
        return priority * width + number

    # ---- getting ----

    def get(self, timeout: float | None = None) -> Message:
        """Lease the next message; wait for one, for at most `timeout` seconds.

        Raises queue.Empty after the timeout; 0 does not wait.
        """
        found = self.try_get()
        if found is not None:
            return found
        deadline = None if timeout is None else time.monotonic() + timeout
        bell = Bell()
        while True:
            # First the bell, then the look: an append after the look rings it.
            bell.clear()
            self.line.add(bell)
            try:
                found = self.try_get()
                if found is not None:
                    return found
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not bell.wait(left):
                    raise queue.Empty
            finally:
                self.line.leave(bell)

    def try_get(self) -> Message | None:
        """Lease the next message; return None if none is available now."""
        self._check_usable()
        for share in self._in_turn():
            found = share.acquire(self._visibility_ms, self)
            if found is not None:
                deadline = self.deadline_ms(self._visibility_ms)
                return Message(self, share, *found, deadline)
        return None

    def _in_turn(self) -> Iterator[Share]:
        """Yield the partitions, by priority; within a priority each is first in turn."""
        shares = self._shares
        if len(shares) == 1:
            yield shares[0]
            return
        width = len(shares) // self._priorities
        turn = next(self._turns)
        for level in range(0, len(shares), width):
            for at in range(width):
                yield shares[level + (turn + at) % width]

    def get_many(self, count: int, timeout: float | None = 0) -> list[Message]:
        """Lease up to `count` messages; wait only for the first one.  May return an empty list."""
        try:
            found = [self.get(timeout)] if count > 0 else []
        except queue.Empty:
            return []
        while len(found) < count and (more := self.try_get()) is not None:
            found.append(more)
        return found

    def __iter__(self) -> Iterator[Message]:
        """Yield messages; each is acknowledged when the loop asks for the next one.

        If the loop ends by ``break`` or an exception, its last message is given back.
        """
        while True:
            try:
                message = self.get(self.timeout)
            except queue.Empty:
                return
            with one_turn(message):
                yield message

    # ---- looking ----

    def peek(self, count: int = 1) -> list[Record]:
        """Return the records of the next messages, without a lease; at most `in_flight_max`."""
        self._check_usable()
        found: list[Record] = []
        for share in self._shares:
            if len(found) < count:
                found += share.ready_records(count - len(found))
        return found

    def size(self) -> QueueSize:
        """Return how many messages the queue has, for this group."""
        self._check_usable()
        counts = [share.counts() for share in self._shares]
        ready, delayed, in_flight = (sum(column) for column in zip(*counts, strict=True))
        name, dead = f"{self.topic.name}-dlt", 0
        if name in self._store:
            for log in self._store[name]:
                scan = log.scan(isolation="read_committed")
                dead += sum(len(chunk) for chunk in scan.columns(fields=("offset",)))
        return QueueSize(ready, delayed, in_flight, dead)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until every message is acknowledged or archived; return False after `timeout`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        bell = Bell()
        self.line.joining.append(bell)
        try:
            while True:
                bell.clear()
                self._check_usable()
                if not any(share.unfinished() for share in self._shares):
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not bell.wait(left):
                    return False
        finally:
            self.line.joining.remove(bell)

    # ---- keeping ----

    def purge(self, *, dry_run: bool = False) -> int:
        """Archive all messages that are not leased, for this group; return their number.

        With `dry_run` nothing is changed.  The records stay in the log until it is trimmed.
        """
        self._check_usable()
        return sum(share.purge(dry_run=dry_run) for share in self._shares)

    def flush(self) -> None:
        """Make all acknowledgements so far durable."""
        self._check_usable()
        self._groups.flush()

    def deserialize(self, value: bytes | None) -> Any:
        """Return what the `value_deserializer` makes of a value; for Message."""
        if self._deserializer is None or value is None:
            return value
        return self._deserializer(value)

    def deadline_ms(self, duration_ms: int) -> int:
        """Return the wall clock's time in `duration_ms`."""
        return self._groups.deadline_ms(duration_ms)

    def close(self) -> None:
        """Give back the leased messages, and make all acknowledgements durable."""
        if self._closed:
            return
        self._closed = True
        if self._producer is not None:
            self._producer.close()
        if not self._groups.closed:
            for share in self._shares:
                share.leave(self)
            self._groups.flush()
        self.line.wake_all()


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {' or '.join(map(repr, allowed))}, not {value!r}")


def _at_least_one(**settings: int) -> None:
    for name, value in settings.items():
        if value < 1:
            raise ConfigError(f"{name} is an int of at least 1, not {value!r}")
