"""DedupeWindow: the dedupe ids of a topic that were sent recently, and their records' positions.

A record that is sent with a `dedupe_id` has the id in a header.  While the id is in the window, a
record with the same id is not sent to the topic again: `send` returns the delivery of the first
record.  The log is the only state.  The window is read from the log at its first use after the
store was opened, so an id is known exactly as long as its record exists.

An id is in the window if its record was appended at most `window_ms` ago and is among the
`records_max` newest ids of its partition.  A record that is sent with a timestamp has the time of
its append in a second header.  After the store was opened, such records are searched for among the
`records_max` newest records of the partition.

An id is not known if its record failed, was aborted with its transaction, or is not in the log any
more (truncated, deleted, compacted away).  A partition's `generation` changes with every change of
the log that is not an append.  If it has changed since an id was noted, the log is read again.  The
transaction coordinator decides whether a transaction has ended, and not the producer, which may be
fenced or closed.

Invariant: a caller holds `lock` from `find` to `note`, so that two threads cannot both send an id.
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
        self.generation = generation  # of the log; the position is valid while it is the same
        self.transaction = transaction  # None: sent without transaction, or known as committed


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
        self.lock = threading.RLock()  # held from `find` to `note`: an id is sent once
        self._outcome = outcome
        self._known: dict[bytes, _Sent] = {}
        # The ids of each partition, oldest first.  An id that was sent again is in it twice.
        self._order: dict[int, collections.deque[tuple[bytes, _Sent]]] = {}
        for partition in topic:
            self._load(partition, now_ms)

    def _load(self, partition: Partition, now_ms: int) -> None:
        place = Place(partition.topic, partition.number)
        oldest = now_ms - self.window_ms
        while True:
            # Read the generation first: a record is noted with one that is not newer than the scan.
            generation = partition.parts.view.generation
            # The lower of the two starts: the window is both a time and a number of records.
            start = min(
                partition.offset_for_time(max(0, oldest)),
                max(partition.start_offset, partition.end_offset - self.records_max),
            )
            try:
                records = _settled_records(partition, start)
                break
            except OffsetOutOfRangeError:
                if not partition.parts.view.moved_since(generation):
                    raise
                # The log was truncated or trimmed during the scan: read it again.
        for record in records:
            headers = dict(reversed(record.headers))  # the first header of a name counts
            found = headers.get(HEADER)
            if found is not None:
                pack = Pack(place)
                pack.first_offset, pack.count, pack.done = record.offset, 1, True
                stamped = headers.get(TIME_HEADER)
                appended_ms = record.timestamp if stamped is None else int.from_bytes(stamped)
                sent = _Sent(Delivery(pack, 0), appended_ms, generation, None)
                # An id that is too old counts for `records_max`, but it must not replace a newer
                # record with the same id: timestamps of the user need not grow with the offset.
                self._note(found, sent, known=appended_ms >= oldest)

    def __len__(self) -> int:
        return len(self._known)

    def generation(self, number: int) -> int:
        """Return the generation of a partition's log.

        Read it before the record is put, and pass it to `note`: a truncation in between is noticed.
        """
        return self.topic[number].parts.view.generation

    def find(self, dedupe_id: bytes, now_ms: int, asking: TransactionKey | None) -> Delivery | None:
        """Return the delivery of an id; None if the id is not known.  With `lock` held.

        `asking` is the transaction of the caller.  Raises ConcurrentTransactionsError if the id was
        sent in another transaction that is open: it is undecided whether the record will count.
        """
        sent = self._known.get(dedupe_id)
        if sent is None or sent.appended_ms < now_ms - self.window_ms:
            return None
        delivery = sent.delivery
        done = delivery.done()
        # A failed send does not block the id: the caller sends it again.
        if done and delivery.exception(0) is not None:
            return None
        outcome = "committed"
        if sent.transaction is not None and sent.transaction != asking:
            # Takes the lock of Transactions, which is after this one in the lock order.
            outcome = self._outcome(*sent.transaction)
            if outcome == "open":
                raise ConcurrentTransactionsError(
                    f"dedupe id {dedupe_id!r} was sent in a transaction that is open: ask again"
                )
            # The transaction has ended: a record that is not written yet will not be written.
            if outcome == "aborted" or not done:
                return None
        if not done:
            return delivery
        generation = self.generation(delivery.partition)
        # The same generation: nothing was truncated since, so the record is still at its offset.
        if outcome and sent.generation == generation:
            return delivery
        # A transaction that the coordinator has not ended yet has no marker in the log.
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
        """Note that a record with an id was sent.  With `lock` held since `find`."""
        self._note(dedupe_id, _Sent(delivery, appended_ms, generation, transaction))

    def _note(self, dedupe_id: bytes, sent: _Sent, *, known: bool = True) -> None:
        order = self._order.setdefault(sent.delivery.partition, collections.deque())
        order.append((dedupe_id, sent))
        if known:
            self._known[dedupe_id] = sent
        while len(order) > self.records_max:
            oldest, gone = order.popleft()
            # Not if the id was sent again since: then a later entry of `order` removes it.
            if self._known.get(oldest) is gone:
                del self._known[oldest]


def _is_there(partition: Partition, offset: int, dedupe_id: bytes, *, decided: bool) -> bool:
    """Return whether the log has the record of an id at `offset`.

    If `decided`, its transaction has a marker in the log, and the marker has to be a commit.
    """
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
    """Return the records with headers from `start` on, without aborted and open transactions."""
    end = partition.end_offset  # fixed: other producers may append during the scan
    waiting: dict[int, list[Record]] = {}  # by producer id, until the scan finds its marker
    found: list[Record] = []
    for raw in partition.scan(start, end, on_lost="skip").batches():
        header = BatchHeader.parse(raw)
        if header.control:
            marker = EndMarker.parse(raw)
            # Without a marker the records stay in `waiting`, and are not returned: the end is
            # undecided.
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
    """The windows of a store; all its producers share them.

    `_lock` is held while a window is loaded, and released before the window's own `lock` is taken.
    """

    def __init__(self, store: Store) -> None:
        """Use `DedupeWindows.of`."""
        self._store = store
        self._guarded_clock = GuardedClock.of(store.clock)
        self._lock = threading.Lock()
        self._windows: dict[str, DedupeWindow] = {}

    @classmethod
    def of(cls, store: Store) -> DedupeWindows:
        """Return the windows of a store."""
        return store.companions.of(cls)

    def window(self, topic: Topic, window_ms: int, records_max: int) -> DedupeWindow:
        """Return the window of a topic; the first call reads it from the log."""
        with self._lock:
            found = self._windows.get(topic.name)
            # Another object: the topic was deleted and made again, and has none of these ids.
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
        """Return the delivery of the record that has the id; if there is none, `put` the record.

        `choose` returns the partition number; `put` takes headers, timestamp and partition number.
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
        """Do nothing: the log is the only state."""
