"""FetchSessions: the partitions that a client fetches again and again (KIP-227).

A session keeps the partitions of a client and the offsets that the client fetches from.  A request
names only the partitions that changed; the answer has only the partitions with news: records, an
error, or an end or start offset that moved.

Invariant: a row that is not in `FetchSession.dirty` has no news, and its partition is watched.  A
change of the partition puts the row into `dirty`, so a fetch looks at these rows only.

Everything here runs in the loop's thread.  A session is not bound to a connection.  Memory is
bounded by the number of sessions and by ROWS_MAX.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeAlias

from logstore.kafka.protocol.errors import ErrorCode, KafkaError
from logstore.kafka.waiting import Waiting, Watch
from logstore.partition.partition import Partition

__all__ = ["FINAL_EPOCH", "INITIAL_EPOCH", "FetchRow", "FetchSession", "FetchSessions", "RowKey"]

INITIAL_EPOCH, FINAL_EPOCH = 0, -1  # of a request that makes a session, and of one that ends it
EPOCH_MAX = ID_MAX = (1 << 31) - 1
EVICTION_SECONDS = 120.0  # a session may be removed for another one if it is unused for this long
COLD_SECONDS = 60.0  # an unused session releases its partitions after this
ROWS_MAX = 200_000  # of all sessions; about 500 bytes each, without what watching takes

RowKey: TypeAlias = "tuple[str | bytes, int]"  # name or id of the topic, number of the partition


class FetchRow:
    """A partition that a client fetches from, with the client's last request for it."""

    __slots__ = (
        *("end", "error", "fetch_offset", "fetched_epoch", "leader_epoch", "max_bytes", "name"),
        *("number", "partition", "start", "topic", "turn"),
    )

    def __init__(self, topic: str | bytes, asked: dict[str, Any]) -> None:
        self.topic = topic
        self.number: int = asked["partition"]
        self.fetch_offset: int = asked["fetch_offset"]
        self.max_bytes: int = asked["partition_max_bytes"]
        self.leader_epoch: int = asked["current_leader_epoch"]
        self.fetched_epoch: int = asked["last_fetched_epoch"]
        self.name: str | None = None  # of the topic, if it was found
        self.partition: Partition | None = None
        self.error: ErrorCode | None = None  # why it has no partition
        self.end = self.start = -1  # the offsets that the client was sent last
        self.turn = 0  # rows are read in this order

    @property
    def key(self) -> RowKey:
        return self.topic, self.number

    @property
    def weight(self) -> int:
        """Return what counts for ROWS_MAX: a client may send names of any length."""
        return 1 + (len(self.topic) >> 8)


class FetchSession:
    """The rows of one client, and those of them with news."""

    def __init__(self, session_id: int, by_id: bool, now: float, waiting: Waiting) -> None:
        self.id = session_id
        self.by_id = by_id  # whether topics are named by id
        self.epoch = 1  # of the next request; 0 after the session was removed
        self.created = self.used = now
        self.watch = Watch()
        self.rows: dict[RowKey, FetchRow] = {}
        self.dirty: dict[FetchRow, None] = {}
        self.weight = 0
        self._waiting = waiting
        self._by_partition: dict[Partition, FetchRow] = {}
        self._turns = 0

    def add(self, row: FetchRow) -> None:
        """Take a row that the session does not have."""
        self.rows[row.key] = row
        self.weight += row.weight
        self._turn(row)
        self.dirty[row] = None
        partition, row.partition = row.partition, None
        self.attach(row, partition)

    def forget(self, key: RowKey) -> None:
        """Drop a row, if there is one."""
        row = self.rows.pop(key, None)
        if row is not None:
            self.weight -= row.weight
            self.dirty.pop(row, None)
            self.attach(row, None)

    def attach(self, row: FetchRow, partition: Partition | None) -> None:
        """Watch the partition of a row, instead of the one that it had."""
        if row.partition is partition:
            return
        if row.partition is not None:
            del self._by_partition[row.partition]
            self._waiting.unwatch(row.partition, self.watch)
        row.partition = partition
        if partition is not None:
            self._by_partition[partition] = row
            self._waiting.watch(partition, self.watch)

    @property
    def idle(self) -> bool:
        """Return whether partitions are watched and no fetch waits for them."""
        return bool(self._by_partition) and (self.watch.wait is None or self.watch.wait.over)

    def cool(self) -> None:
        """Release the partitions, so that they can be closed.  The next fetch looks at all rows."""
        for row in list(self._by_partition.values()):
            self.attach(row, None)
        self.dirty = dict.fromkeys(self.rows.values())

    def note_changes(self) -> list[FetchRow]:
        """Put the rows whose partitions changed into `dirty`, and return them."""
        changed, self.watch.changed = self.watch.changed, {}
        rows = [self._by_partition[partition] for partition in changed]
        self.dirty.update(dict.fromkeys(rows))
        return rows

    def to_read(self) -> list[FetchRow]:
        """Return the rows that may have news.  A row that was just answered is the last."""
        return sorted(self.dirty, key=attrgetter("turn"))

    def selects(self, row: FetchRow, answer: Mapping[str, Any]) -> bool:
        """Return whether an answer has news for the client, and note what the client is sent."""
        failed = bool(answer.get("error_code"))
        end, start = answer["high_watermark"], answer.get("log_start_offset", -1)
        news = (
            failed
            or bool(answer["records"])
            or "diverging_epoch" in answer
            or (end, start) != (row.end, row.start)
        )
        row.end, row.start = end, start
        if news:
            self._turn(row)
        return news

    def _turn(self, row: FetchRow) -> None:
        self._turns += 1
        row.turn = self._turns


class FetchSessions:
    """The sessions of a listener, the one that was used last at the end."""

    def __init__(self, slots: int, waiting: Waiting, time: Callable[[], float]) -> None:
        self._slots = slots
        self._waiting = waiting
        self._time = time
        self._sessions: dict[int, FetchSession] = {}
        self._weight = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def create(
        self, by_id: bool, answers: Iterable[tuple[FetchRow, Mapping[str, Any]]], weight: int
    ) -> int:
        """Return the id of a session with the rows of a full fetch; 0 if there is no place."""
        now = self._time()
        if not self._make_place(weight, now):
            return 0
        session_id = random.randint(1, ID_MAX)
        while session_id in self._sessions:
            session_id = random.randint(1, ID_MAX)
        session = self._sessions[session_id] = FetchSession(session_id, by_id, now, self._waiting)
        for row, answer in answers:
            session.add(row)
            row.end, row.start = answer["high_watermark"], answer.get("log_start_offset", -1)
        self._weight += session.weight
        return session_id

    def begin(
        self,
        session_id: int,
        epoch: int,
        by_id: bool,
        rows: Mapping[RowKey, FetchRow],
        forgotten: Iterable[RowKey],
    ) -> FetchSession | None:
        """Return the session of an incremental fetch, with the rows as the request changes them.

        None: no row is left, and the session has ended.  A fetch of the session that still waits
        is answered with an error: its epoch is not the last one any more.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise KafkaError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        if session.epoch != epoch:
            raise KafkaError(ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        if session.by_id != by_id:
            raise KafkaError(ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
        session.epoch = 1 if epoch == EPOCH_MAX else epoch + 1
        session.used = self._time()
        self._sessions[session_id] = self._sessions.pop(session_id)
        self._waiting.end(session.watch.wait)
        before = session.weight
        for key, row in rows.items():
            known = session.rows.get(key)
            if known is None:
                session.add(row)
                continue
            known.fetch_offset, known.max_bytes = row.fetch_offset, row.max_bytes
            known.leader_epoch, known.fetched_epoch = row.leader_epoch, row.fetched_epoch
            session.dirty[known] = None
        for key in forgotten:
            session.forget(key)
        self._weight += session.weight - before
        if not session.rows:
            self.remove(session_id)
            return None
        if self._weight > ROWS_MAX:
            self.remove(session_id)
            raise KafkaError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        self._waiting.wake()
        session.note_changes()
        return session

    def remove(self, session_id: int) -> None:
        """End a session, if there is one.  Its fetch that waits is answered with an error."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._weight -= session.weight
            session.epoch = 0
            session.cool()
            self._waiting.end(session.watch.wait)

    def cool_unused(self) -> None:
        """Release the partitions of sessions that are not used.  Called once a second."""
        now = self._time()
        for session in self._sessions.values():
            if now - session.used < COLD_SECONDS:
                break
            if session.idle:
                session.cool()

    def _make_place(self, weight: int, now: float) -> bool:
        """Remove sessions by Kafka's rule until a new one has a place; return whether it has.

        First the ones that are unused for long.  Then one that is not new and smaller.
        """
        for session in list(self._sessions.values()):
            if self._has_place(weight) or now - session.used <= EVICTION_SECONDS:
                break
            self.remove(session.id)
        if not self._has_place(weight):
            old = [
                each for each in self._sessions.values() if now - each.created > EVICTION_SECONDS
            ]
            smallest = min(old, key=attrgetter("weight"), default=None)
            if smallest is not None and smallest.weight < weight:
                self.remove(smallest.id)
        return self._has_place(weight)

    def _has_place(self, weight: int) -> bool:
        return len(self._sessions) < self._slots and self._weight + weight <= ROWS_MAX
