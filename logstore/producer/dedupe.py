"""DedupeWindow: ids that were sent lately, and where their records are.

A record that is sent with a `dedupe_id` carries it in a header.  Within the window, in time and in
number, the same id for the same topic is not sent again: it is answered with the first record's
place.  The log is the state: the window is read from it when it is first used after opening, so it
survives whatever the records survive, and a record and its id are never apart.

The window counts by the time of appending: an id is known as long as its record was appended not
longer ago than `window_ms` and is among the `records_max` newest ids of its partition.  A record
that is sent with a timestamp of its own carries the time of appending in a second header.  After
opening, such records are looked for among the `records_max` newest records of the partition.

An id whose record failed, was aborted with its transaction, or is not in the log any more
(truncated, deleted, compacted away), is not known.  The log is read again for a place that was
remembered before the log changed by more than an append.  The coordinator decides whether a
transaction is over, and not the producer, which may be fenced or gone.

Callers hold `lock` from looking for an id to noting it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from logstore.clock import GuardedClock
from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.coordinators.transaction_coordinator import Transactions
from logstore.errors import ConcurrentTransactionsError, OffsetOutOfRangeError
from logstore.format.batch import BatchHeader, EndMarker
from logstore.partition.partition import Partition
from logstore.producer.delivery import Delivery, Pack, Place
from logstore.record import Record
from logstore.store.store import Store
from logstore.store.topic import Topic

__all__ = ["HEADER", "TIME_HEADER", "DedupeWindow", "DedupeWindows"]

HEADER = "logstore.dedupe.id"
TIME_HEADER = "logstore.dedupe.time"  # of appending: milliseconds since 1970, 8 bytes big-endian
_NAME = HEADER.encode()


# A transaction: transactional id, producer id, epoch.
TransactionKey: TypeAlias = tuple[str, int, int]


class _Sent:
    """A record that was sent with an id."""

    __slots__ = ("appended_ms", "delivery", "generation", "transaction")

    def __init__(
        self,
        delivery: Delivery,
        appended_ms: int,
        generation: int,
        transaction: TransactionKey | None,
    ) -> None:
        self.delivery = delivery
        self.appended_ms = appended_ms
        self.generation = generation  # of the log: its place holds as long as this is the same
        self.transaction = transaction  # None: it was sent in none, or in one that is committed


class DedupeWindow:
    """The window of one topic."""

    def __init__(
        self,
        topic: Topic,
        window_ms: int,
        records_max: int,
        now_ms: int,
        outcome: Callable[[str, int, int], str],
    ) -> None:
        self.topic = topic
        self.window_ms = window_ms
        self.records_max = records_max
        self.lock = threading.RLock()
        self._outcome = outcome
        self._known: dict[bytes, _Sent] = {}
        # Ids of each partition, oldest first; one that was sent again is there twice.
        self._order: dict[int, collections.deque[tuple[bytes, _Sent]]] = {}
        for partition in topic:
            self._load(partition, now_ms)

    def _load(self, partition: Partition, now_ms: int) -> None:
        place = Place(partition.topic, partition.number)
        generation = partition.generation
        oldest = now_ms - self.window_ms
        start = min(
            partition.offset_for_time(max(0, oldest)),
            max(partition.start_offset, partition.end_offset - self.records_max),
        )
        for record in _settled_records(partition, start):
            headers = dict(reversed(record.headers))
            found = headers.get(HEADER)
            if found is not None:
                pack = Pack(place)
                pack.first_offset, pack.count, pack.done = record.offset, 1, True
                stamped = headers.get(TIME_HEADER)
                appended_ms = record.timestamp if stamped is None else int.from_bytes(stamped)
                sent = _Sent(Delivery(pack, 0), appended_ms, generation, None)
                # One that is too old counts, but must not hide one that is not.
                self._note(found, sent, known=appended_ms >= oldest)

    def __len__(self) -> int:
        return len(self._known)

    def generation(self, number: int) -> int:
        """Return the generation of a partition's log; for `note`, from before the record is put."""
        return self.topic[number].generation

    def find(self, dedupe_id: bytes, now_ms: int, asking: TransactionKey | None) -> Delivery | None:
        """Return what was sent with an id; None: nothing that counts.

        Raises ConcurrentTransactionsError when it was sent in another transaction that is open:
        whether it counts is not decided.
        """
        sent = self._known.get(dedupe_id)
        if sent is None or sent.appended_ms < now_ms - self.window_ms:
            return None
        delivery = sent.delivery
        done = delivery.done()
        if done and delivery.exception(0) is not None:
            return None
        outcome = "committed"
        if sent.transaction is not None and sent.transaction != asking:
            outcome = self._outcome(*sent.transaction)
            if outcome == "open":
                raise ConcurrentTransactionsError(
                    f"dedupe id {dedupe_id!r} was sent in a transaction that is open: ask again"
                )
            if outcome == "aborted" or not done:  # what is not written now never will be
                return None
        if not done:
            return delivery
        generation = self.generation(delivery.partition)
        if outcome and sent.generation == generation:
            return delivery
        # A transaction that is not over for the coordinator has no marker yet.
        decided = sent.transaction is None or not outcome
        if not _is_there(self.topic[delivery.partition], delivery.result(0).offset, dedupe_id,
                         decided=decided):  # fmt: skip
            return None
        if decided:
            sent.transaction = None
        sent.generation = generation
        return delivery

    def note(
        self,
        dedupe_id: bytes,
        delivery: Delivery,
        appended_ms: int,
        generation: int,
        transaction: TransactionKey | None,
    ) -> None:
        """It was sent."""
        self._note(dedupe_id, _Sent(delivery, appended_ms, generation, transaction))

    def _note(self, dedupe_id: bytes, sent: _Sent, *, known: bool = True) -> None:
        order = self._order.setdefault(sent.delivery.partition, collections.deque())
        order.append((dedupe_id, sent))
        if known:
            self._known[dedupe_id] = sent
        while len(order) > self.records_max:
            oldest, gone = order.popleft()
            if self._known.get(oldest) is gone:
                del self._known[oldest]


def _is_there(partition: Partition, offset: int, dedupe_id: bytes, *, decided: bool) -> bool:
    """Whether the log has the record of an id at `offset`, committed if that is `decided`."""
    try:
        records = list(partition.scan(offset, offset + 1))
        if not any((HEADER, dedupe_id) in record.headers for record in records):
            return False
        producer_id = -1
        for raw in partition.scan(offset).batches():
            header = BatchHeader.parse(raw)
            if not decided or (producer_id < 0 and not header.transactional):
                return True
            if producer_id < 0:
                producer_id = header.producer_id
            elif header.control and header.producer_id == producer_id:
                marker = EndMarker.parse(raw)
                return marker is not None and marker.commit
    except OffsetOutOfRangeError:
        pass  # truncated, or deleted
    return False


def _settled_records(partition: Partition, start: int) -> list[Record]:
    """Records with an id from `start` on, but for transactions that were aborted or are open."""
    end = partition.end_offset
    waiting: dict[int, list[Record]] = {}  # by producer, until its marker comes
    found: list[Record] = []
    for raw in partition.scan(start, end, on_lost="skip").batches():
        header = BatchHeader.parse(raw)
        if header.control:
            marker = EndMarker.parse(raw)
            held = waiting.pop(header.producer_id, [])
            if marker is not None and marker.commit:
                found += held
        elif header.codec or _NAME in raw:
            target = waiting.setdefault(header.producer_id, []) if header.transactional else found
            first = max(start, header.base_offset)
            records = partition.scan(first, header.next_offset, on_lost="skip")
            target += [record for record in records if record.headers]
    return sorted(found, key=lambda each: each.offset)


class DedupeWindows(Closeable):
    """The windows of a store: all its producers share them."""

    def __init__(self, store: Store) -> None:
        """Use `DedupeWindows.of`."""
        self._store = store
        self._guarded_clock = GuardedClock.of(store.clock)
        self._lock = threading.Lock()
        self._windows: dict[str, DedupeWindow] = {}

    @classmethod
    def of(cls, store: Store) -> DedupeWindows:
        """The windows of a store."""
        return store.companions.of(cls)

    def window(self, topic: Topic, window_ms: int, records_max: int) -> DedupeWindow:
        """The window of a topic; read from the log when it is first asked for."""
        with self._lock:
            found = self._windows.get(topic.name)
            if found is None or found.topic is not topic:
                found = DedupeWindow(topic, window_ms, records_max, self.now_ms(), self._outcome)
                self._windows[topic.name] = found
        if (found.window_ms, found.records_max) != (window_ms, records_max):
            raise ConfigError(
                f"the dedupe window of {topic.name!r} is {found.window_ms / 1000} s and "
                f"{found.records_max} ids: producers of one store share it"
            )
        return found

    def once(
        self,
        topic: Topic,
        dedupe_id: str | bytes,
        window_ms: int,
        records_max: int,
        owner: TransactionKey | None,
        headers: Iterable[tuple[str, bytes | None]],
        timestamp: Any,
        *,
        choose: Callable[[], int],
        put: Callable[[list[tuple[str, bytes | None]], Any, int], Delivery],
    ) -> Delivery:
        """Return the delivery of the record that has the id, or `put` one that gets it.

        `choose` returns its partition; `put` takes its headers, its timestamp and its partition.
        """
        try:
            name: object = dedupe_id.encode() if isinstance(dedupe_id, str) else dedupe_id
        except UnicodeEncodeError:
            raise ConfigError(f"a dedupe id has to be Unicode text, not {dedupe_id!r}") from None
        if not isinstance(name, bytes) or not name:
            raise TypeError(f"a dedupe id is a str or bytes, and not empty: {dedupe_id!r}")
        window = self.window(topic, window_ms, records_max)
        with window.lock:
            now = self.now_ms()
            known = window.find(name, now, owner)
            if known is not None:
                return known
            marked = [*headers, (HEADER, name)]
            if timestamp is not None:
                marked.append((TIME_HEADER, now.to_bytes(8)))
            number = choose()
            generation = window.generation(number)
            delivery = put(marked, self.time_ms() if timestamp is None else timestamp, number)
            window.note(name, delivery, now, generation, owner)
            return delivery

    def now_ms(self) -> int:
        """Return the time that decides which ids are too old."""
        return self._guarded_clock.now_ms()

    def time_ms(self) -> int:
        """Return the time that a new record gets."""
        return self._guarded_clock.clock.time_ms()

    def _outcome(self, transactional_id: str, producer_id: int, epoch: int) -> str:
        return Transactions.of(self._store).outcome(transactional_id, producer_id, epoch)

    def close(self) -> None:
        """Nothing to do: the log has it all."""
