"""DedupeWindow: ids that were sent lately, and where their records are.

A record that is sent with a `dedupe_id` carries it in a header.  Within the window, in time and in
number, the same id for the same topic is not sent again: it is answered with the first record's
place.  The log is the state: the window is read from it when it is first used after opening, so it
survives whatever the records survive, and a record and its id are never apart.

The window counts by the records' own timestamps: an id is known as long as its record is not older
than `window_ms` and among the `records_max` newest ids of its partition.  Both are the same before
and after a crash.  An id whose record failed, or was aborted with its transaction, is not known.

Callers hold `lock` from looking for an id to noting it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator
from typing import NamedTuple

from logstore.batch import BatchHeader, EndMarker
from logstore.clock import GuardedClock
from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.errors import ConcurrentTransactionsError
from logstore.partition import Partition
from logstore.record import Record
from logstore.store import Store
from logstore.topic import Topic
from logstore.transactions.delivery import Delivery, Pack
from logstore.transactions.transaction import Transaction

__all__ = ["HEADER", "DedupeWindow", "DedupeWindows"]

HEADER = "logstore.dedupe.id"


class _Place:
    """A partition, for a record that was sent by someone who is gone."""

    def __init__(self, topic: str, number: int) -> None:
        self.topic = topic
        self.number = number

    def hurry(self) -> None:
        """Nothing is on its way."""


class _Sent(NamedTuple):
    delivery: Delivery
    timestamp: int
    transaction: Transaction | None


class DedupeWindow:
    """The window of one topic."""

    def __init__(self, topic: Topic, window_ms: int, records_max: int, now_ms: int) -> None:
        self.topic = topic
        self.window_ms = window_ms
        self.records_max = records_max
        self.lock = threading.RLock()
        self._known: dict[bytes, _Sent] = {}
        # Ids of each partition, oldest first; one that was sent again is there twice.
        self._order: dict[int, collections.deque[tuple[bytes, _Sent]]] = {}
        for partition in topic:
            self._load(partition, now_ms)

    def _load(self, partition: Partition, now_ms: int) -> None:
        place = _Place(partition.topic, partition.number)
        oldest = now_ms - self.window_ms
        start = partition.offset_for_time(max(0, oldest))
        for record in _settled_records(partition, start):
            found = next((value for name, value in record.headers if name == HEADER), None)
            if found is not None:
                pack = Pack(place)
                pack.first_offset, pack.count, pack.done = record.offset, 1, True
                sent = _Sent(Delivery(pack, 0), record.timestamp, None)
                # One that is too old counts, but must not hide one that is not.
                self._note(found, sent, known=record.timestamp >= oldest)

    def __len__(self) -> int:
        return len(self._known)

    def find(self, dedupe_id: bytes, now_ms: int, asking: Transaction | None) -> Delivery | None:
        """What was sent with an id; None: nothing, or too long ago.

        Raises ConcurrentTransactionsError when it belongs to someone's transaction that is open:
        whether it counts is not decided.
        """
        sent = self._known.get(dedupe_id)
        if sent is None or sent.timestamp < now_ms - self.window_ms:
            return None
        if sent.delivery.done() and sent.delivery.exception(0) is not None:
            return None
        if sent.transaction is not None:
            if sent.transaction.over.startswith("aborted"):
                return None
            if not sent.transaction.over and sent.transaction is not asking:
                raise ConcurrentTransactionsError(
                    f"dedupe id {dedupe_id!r} was sent in a transaction that is open: ask again"
                )
        return sent.delivery

    def note(
        self, dedupe_id: bytes, delivery: Delivery, timestamp: int, transaction: Transaction | None
    ) -> None:
        """It was sent."""
        self._note(dedupe_id, _Sent(delivery, timestamp, transaction))

    def _note(self, dedupe_id: bytes, sent: _Sent, *, known: bool = True) -> None:
        order = self._order.setdefault(sent.delivery.partition, collections.deque())
        order.append((dedupe_id, sent))
        if known:
            self._known[dedupe_id] = sent
        while len(order) > self.records_max:
            oldest, gone = order.popleft()
            if self._known.get(oldest) is gone:
                del self._known[oldest]


def _settled_records(partition: Partition, start: int) -> Iterator[Record]:
    """Records from `start` on, but for those of transactions that were aborted or are open."""
    end = partition.end_offset
    records = iter(partition.scan(start, end))
    record = next(records, None)
    waiting: dict[int, list[Record]] = {}  # by producer, until its marker comes
    found: list[Record] = []
    for raw in partition.scan(start, end).batches():
        header = BatchHeader.parse(raw)
        if header.control:
            marker = EndMarker.parse(raw)
            held = waiting.pop(header.producer_id, [])
            if marker is not None and marker.commit:
                found += held
        target = waiting.setdefault(header.producer_id, []) if header.transactional else found
        while record is not None and record.offset < header.next_offset:
            if record.headers:
                target.append(record)
            record = next(records, None)
    yield from sorted(found, key=lambda each: each.offset)


class DedupeWindows(Closeable):
    """The windows of a store: all its producers share them."""

    def __init__(self, store: Store) -> None:
        """Use `DedupeWindows.of`."""
        self._guarded_clock = GuardedClock.of(store.clock)
        self._lock = threading.Lock()
        self._windows: dict[str, DedupeWindow] = {}

    @classmethod
    def of(cls, store: Store) -> DedupeWindows:
        """The windows of a store."""
        return store.companion(cls)

    def window(self, topic: Topic, window_ms: int, records_max: int) -> DedupeWindow:
        """The window of a topic; read from the log when it is first asked for."""
        with self._lock:
            found = self._windows.get(topic.name)
            if found is None or found.topic is not topic:
                found = DedupeWindow(topic, window_ms, records_max, self.now_ms())
                self._windows[topic.name] = found
        if (found.window_ms, found.records_max) != (window_ms, records_max):
            raise ConfigError(
                f"the dedupe window of {topic.name!r} is {found.window_ms / 1000} s and "
                f"{found.records_max} ids: producers of one store share it"
            )
        return found

    def now_ms(self) -> int:
        """Return the time that decides which ids are too old."""
        return self._guarded_clock.now_ms()

    def time_ms(self) -> int:
        """Return the time that a new record gets."""
        return self._guarded_clock.clock.time_ms()

    def close(self) -> None:
        """Nothing to do: the log has it all."""
