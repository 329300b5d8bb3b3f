"""Notes: small durable facts by kind and name, read from ``__logstore_notes``.

A note is a value of bytes.  Its key in the log is ``kind/name`` in UTF-8.  The log is the only
state: a partition is replayed into memory at the first use of one of its notes, and every later
read first replays the records that were appended since.  So the notes of a transaction take effect
when its marker is in the log, and no other message is needed.

Invariant: with durability="fsync" a read returns only durable notes.  So a power cut does not take
back a note that a caller has seen.

All notes are in memory after they are read.  The owner of a kind removes the notes that it no
longer needs.  Threads share one Notes; a page's lock is not held during an fsync.
"""

from __future__ import annotations

import threading
from typing import Protocol

from logstore.closeable import Closeable
from logstore.coordinators.internal_topics import (
    NOTES,
    coordinator_partition,
    internal_partitions,
    internal_topic,
    plain_records,
)
from logstore.errors import InvalidNameError
from logstore.partition.partition import Partition
from logstore.record import Record
from logstore.store.companions import expect_store
from logstore.store.store import Store

__all__ = ["Notes"]


class SendsInternally(Protocol):
    """What Notes needs of a transaction."""

    def send_internal(self, topic: str, partition: int, record: Record, /) -> None: ...


class _Noted:
    """A value and the offset of its record; the value is None if the note was removed."""

    __slots__ = ("at", "value")

    def __init__(self, at: int, value: bytes | None) -> None:
        self.at = at
        self.value = value


class _Page:
    """The notes of one partition.  `lock` guards all."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.RLock()
        self.log: Partition | None = None
        self.next_offset = 0  # all records below it have been seen
        self.notes: dict[bytes, _Noted] = {}
        self._pending: dict[int, dict[bytes, _Noted]] = {}  # by producer, until its marker
        self._epochs: dict[int, int] = {}

    def see(
        self, offset: int, key: bytes | None, value: bytes | None, *, producer_id: int = -1
    ) -> None:
        """Take a record; `producer_id` is -1 unless it is part of a transaction."""
        if key is not None:
            noted = self.notes if producer_id < 0 else self._pending.setdefault(producer_id, {})
            noted[key] = _Noted(offset, value)

    def go_on(self, producer_id: int, epoch: int) -> None:
        """Drop pending notes of an earlier epoch: their marker is unreadable."""
        if epoch > self._epochs.get(producer_id, epoch):
            self.end_transaction(producer_id, commit=False)
        self._epochs[producer_id] = epoch

    def end_transaction(self, producer_id: int, commit: bool) -> None:
        """Take a marker: apply the producer's pending notes, or drop them."""
        self._epochs.pop(producer_id, None)
        for key, noted in self._pending.pop(producer_id, {}).items() if commit else ():
            known = self.notes.get(key)
            # The place of the record decides, not that of its marker: a later plain record wins.
            if known is None or known.at < noted.at:
                self.notes[key] = noted
        if not commit:
            self._pending.pop(producer_id, None)

    def replay(self, log: Partition, end: int) -> None:
        """Take all records below `end` that were not seen yet."""
        start = max(self.next_offset, log.start_offset)
        for record in plain_records(log, self, start, end):
            self.see(record.offset, record.key, record.value)
        self.next_offset = end
        if not self._pending:
            # A removed note is kept only while an open transaction may hold an older value.
            for key in [key for key, noted in self.notes.items() if noted.value is None]:
                del self.notes[key]


class Notes(Closeable):
    """The notes of a store.  A store has one: `Notes.of`."""

    def __init__(self, store: Store) -> None:
        """Use `Notes.of`."""
        self._store = store
        self._pages = [_Page(number) for number in range(internal_partitions(NOTES))]

    @classmethod
    def of(cls, store: Store) -> Notes:
        """Return the notes of a store; they are closed with the store."""
        return expect_store(store, "Notes.of").companions.of(cls)

    def close(self) -> None:
        """Do nothing: the store closes the partitions."""

    # ---- reading ----

    def get(self, kind: str, name: str) -> bytes | None:
        """Return the value of a note, or None if there is none."""
        key = _key(kind, name)
        page = self._page(key)
        with page.lock:
            noted = self._taken_in(page).get(key)
            return None if noted is None else noted.value

    def items(self, kind: str, prefix: str = "") -> dict[str, bytes]:
        """Return the notes of a kind whose names begin with `prefix`, by name, sorted."""
        first = _key(kind, prefix)
        skipped = len(_key(kind, ""))
        found: dict[str, bytes] = {}
        for page in self._pages:
            with page.lock:
                for key, noted in self._taken_in(page).items():
                    if noted.value is not None and key.startswith(first):
                        found[key[skipped:].decode()] = noted.value
        return dict(sorted(found.items()))

    def _page(self, key: bytes) -> _Page:
        return self._pages[coordinator_partition(key.decode(), len(self._pages))]

    def _taken_in(self, page: _Page) -> dict[bytes, _Noted]:
        """Replay new records, and return the notes of a page.  With the page's lock held."""
        self._store.access.check_usable()
        log = page.log
        if log is None or log.closed:
            topic = self._store.get(NOTES)
            if topic is None or page.number not in topic.partition_numbers:
                return page.notes
            log = page.log = topic[page.number]
        end = log.high_watermark
        if not log.readonly and log.durability == "fsync":
            end = min(end, log.durable_offset)
        if end > page.next_offset:
            page.replay(log, end)
        return page.notes

    # ---- writing ----

    def put(
        self, kind: str, name: str, value: bytes, *, transaction: SendsInternally | None = None
    ) -> None:
        """Set a note.  It is durable when this returns; with a transaction, when that commits."""
        if not isinstance(value, bytes):
            raise TypeError(f"the value of a note is bytes, not {type(value).__name__}")
        self._write(_key(kind, name), value, transaction)

    def remove(self, kind: str, name: str, *, transaction: SendsInternally | None = None) -> None:
        """Remove a note.  Removing a note that does not exist is harmless."""
        self._write(_key(kind, name), None, transaction)

    def _write(self, key: bytes, value: bytes | None, transaction: SendsInternally | None) -> None:
        page = self._page(key)
        topic = internal_topic(self._store, NOTES)
        # Made before the transaction knows it: a marker is written only to a partition that exists.
        log = self._store.topic_changes.make_partition(topic, page.number)
        if transaction is None:
            log.append(value, key=key)
        else:
            transaction.send_internal(NOTES, page.number, Record(value, key=key))


def _key(kind: str, name: str) -> bytes:
    """Return the key of a note; raise InvalidNameError for a kind that has a slash or is empty."""
    for part in (kind, name):
        told: object = part
        if not isinstance(told, str):
            raise TypeError(f"kind and name of a note are str, not {told!r}")
    if not kind or "/" in kind:
        raise InvalidNameError(f"the kind of a note is not empty and has no slash, not {kind!r}")
    return f"{kind}/{name}".encode()
