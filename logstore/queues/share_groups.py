"""ShareGroups: the share groups of one store, and what they keep in ``__share_group_state``.

The log is the only state.  It is replayed when the first queue of the store is made.  A Share is
one partition for one group: a SharePartition with a lock and the log of its messages.

Acknowledgements share an fsync: changes are written by one thread at a time, and all changes that
were made before it began are in one write.  A dead letter and the state that archives its message
are one transaction.

Invariant: the state of an offset is written after the message at that offset is durable.  Otherwise
a power cut could leave the acknowledgement of a message that is lost, and the next message would
get its offset and be taken for finished.

Locks: `_writing`, then a Share's `lock`, then those of the log; `_lock` is a leaf.  `_writing` is
held during an fsync and a transaction; a Share's `lock` only while messages are read.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import uuid
from collections.abc import Iterable

from logstore.clock import GuardedClock, SystemClock
from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.coordinators.internal_topics import PARTITIONS, SEGMENT_BYTES, coordinator_partition
from logstore.errors import (
    ClosedError,
    InvalidRecordError,
    LogStoreError,
)
from logstore.partition.partition import Partition
from logstore.producer.producer import Producer
from logstore.queues.leasing import RETRY, Line, Share, ShareOptions
from logstore.queues.share import ARCHIVED, Changes, StateBatch
from logstore.queues.share_state import (
    SHARE_GROUP_STATE,
    SNAPSHOT,
    UPDATE,
    ShareKey,
    ShareState,
    encode_snapshot,
    encode_update,
)
from logstore.record import Record
from logstore.store.store import Store
from logstore.store.topic import Topic
from logstore.timers import Timers

__all__ = ["ShareGroups"]

log = logging.getLogger("logstore.queue")

SNAPSHOT_UPDATES = 500  # as Kafka's share.coordinator.snapshot.update.records.per.snapshot
UPDATE_BATCHES = 20_000  # of one record: 400 kB
SETTINGS = {
    "cleanup.policy": "delete",
    "retention.ms": -1,
    "compression.type": "uncompressed",
    "segment.bytes": SEGMENT_BYTES,
}


class ShareGroups(Closeable):
    """The share groups of a store; each store has one: `ShareGroups.of`."""

    def __init__(self, store: Store) -> None:
        """Use `ShareGroups.of`."""
        store.access.check_writable()
        self._store = store
        self._clock = store.clock or SystemClock()
        self.guarded = GuardedClock.of(store.clock)
        self.timers = Timers(self._clock, name="logstore queues")
        self._writing = threading.RLock()  # held to write the state, or a transaction of letters
        self._lock = threading.Lock()
        self._states: dict[ShareKey, ShareState] = {}
        self._shares: dict[ShareKey, Share] = {}
        self._lines: dict[tuple[str, uuid.UUID], Line] = {}
        self._dirty: dict[Share, None] = {}
        self._armed = False  # a timer will flush
        self._producer: Producer | None = None
        self.closed = False
        self._load()
        # With an injected clock, a test runs the timers: `timers.run_due`.
        if isinstance(self._clock, SystemClock):
            self.timers.start()

    @classmethod
    def of(cls, store: Store) -> ShareGroups:
        """Return the share groups of a store; they are closed with the store."""
        return store.companions.of(cls)

    def now(self) -> int:
        """Return the time of leases: monotonic milliseconds."""
        return math.floor(self._clock.monotonic() * 1000)

    def deadline_ms(self, visibility_ms: int) -> int:
        """Return the wall clock's time at the end of a lease that begins now."""
        return self._clock.time_ms() + visibility_ms

    def _load(self) -> None:
        if SHARE_GROUP_STATE not in self._store:
            return
        topic = self._store[SHARE_GROUP_STATE]
        for number in topic.partition_numbers:
            for record in topic[number].scan(isolation="read_committed", on_lost="skip"):
                try:
                    found = ShareKey.decode(record.key or b"")
                    if found is None:
                        continue
                    kind, key = found
                    if record.value is None:
                        self._states.pop(key, None)
                    else:
                        state = self._states.setdefault(key, ShareState())
                        state.see(kind, record.value, record.offset)
                except InvalidRecordError as error:
                    log.warning("%s-%d: the record at offset %d cannot be read: %s",
                                topic.name, number, record.offset, str(error))  # fmt: skip

    def share(self, group: str, topic: Topic, number: int, options: ShareOptions) -> Share:
        """Return the one Share of a group and a partition; raise ConfigError if settings differ."""
        assert topic.id is not None
        key = ShareKey(group, topic.id, number)
        with self._writing:
            if self.closed:
                raise ClosedError(f"the store {self._store.path} is closed")
            known = self._shares.get(key)
            if known is None:
                known = self._shares[key] = self._open(key, topic, options)
            if known.options != options:
                raise ConfigError(
                    f"the queue {topic.name!r} with group {group!r} is open with other settings, "
                    f"which its queues share: {known.options}"
                )
            return known

    def _open(self, key: ShareKey, topic: Topic, options: ShareOptions) -> Share:
        source = topic[key.partition]
        state = self._states.get(key)
        new = state is None
        if state is None:
            state = ShareState()
            state.start, state.created_ms = source.start_offset, self._clock.time_ms()
        # A log that ends before its state lost records in a power cut: durability="os".
        lost = max([state.start - 1, *(batch.last for batch in state.batches)]) >= source.end_offset
        if lost:
            kept = [batch for batch in state.batches if batch.last < source.end_offset]
            state.reset(min(state.start, source.end_offset), kept)
        crashed = not new and not self._store.recovery.clean
        end = source.last_stable_offset if crashed else 0
        line = self._lines.setdefault((key.group, key.topic_id), Line())
        share = Share(self, key, topic, options, state, line, end)
        if new or lost:
            # At once: it keeps other groups from trimming, and replaces the state of lost records.
            share.machine.needs_snapshot = True
            self._states[key] = state
            self._write([share])
        share.log.parts.view.listen(line.wake)
        return share

    # ---- the state in the log ----

    def mark(self, share: Share) -> None:
        """Have the changes of a share written within its `ack_linger`."""
        with self._lock:
            self._dirty[share] = None
            if self._armed or self.closed:
                return
            self._armed = True
        self.timers.after(share.options.ack_linger, self._flush_later)

    def _flush_later(self) -> None:
        with self._lock:
            self._armed = False
        try:
            self.flush()
        except (LogStoreError, OSError) as error:
            log.warning("acknowledgements were not written, trying again: %s", str(error))
            with self._lock:
                self._armed = True
            self.timers.after(RETRY, self._flush_later)

    def flush(self, *, sync: bool = True) -> None:
        """Write all changes; with `sync` they are as durable as the store asks."""
        with self._writing:
            with self._lock:
                dirty = list(self._dirty)
            try:
                self._write(dirty, sync=sync)
            except BaseException:
                # It is unknown what the log has: the next write is of the whole state.
                for share in dirty:
                    share.machine.needs_snapshot = True
                    with self._lock:
                        self._dirty[share] = None
                raise

    def _write(self, shares: Iterable[Share], *, sync: bool = True) -> None:
        written: dict[Partition, int] = {}
        done: list[Share] = []
        for share in shares:
            with share.lock:
                if sync:
                    with self._lock:
                        self._dirty.pop(share, None)
                records = self._records_of(share) if share.machine.changed else []
            if records:
                self._make_durable(share.log)
                target = self._log_of(share.key)
                offsets = target.extend(records, durability="os")
                if records[-1].key == share.key.encode(SNAPSHOT):
                    share.state.snapshot_at = offsets.start
                written[target] = offsets.stop
            done.append(share)
        if sync and self._store.durability == "fsync":
            for share in done:
                target = self._log_of(share.key)
                if target.durable_offset < target.end_offset:
                    target.sync()
        for target in written:
            self._prune(target)
        for share in done:
            if sync:
                self._trim(share)

    def _make_durable(self, source: Partition) -> None:
        if self._store.durability == "fsync" and source.durable_offset < source.end_offset:
            source.sync()

    def _records_of(self, share: Share) -> list[Record]:
        """Return the records of the changes of a share, whose lock is held."""
        machine, state = share.machine, share.state
        if machine.needs_snapshot or state.updates >= SNAPSHOT_UPDATES or state.epoch == 0:
            return [self._snapshot(share.key, state, machine.snapshot(), machine.finished)]
        changes = machine.take_changes()
        state.start = changes.start
        name = share.key.encode(UPDATE)
        found = []
        for at in range(0, max(1, len(changes.batches)), UPDATE_BATCHES):
            part = Changes(changes.start, changes.batches[at : at + UPDATE_BATCHES])
            state.updates += 1
            value = encode_update(part, epoch=state.epoch, finished=machine.finished)
            found.append(Record(value, key=name))
        return found

    def _snapshot(self, key: ShareKey, state: ShareState, whole: Changes, finished: int) -> Record:
        state.epoch += 1
        state.updates, state.start = 0, whole.start
        value = encode_snapshot(whole, epoch=state.epoch, finished=finished,
                                created_ms=state.created_ms,
                                now_ms=self._clock.time_ms())  # fmt: skip
        return Record(value, key=key.encode(SNAPSHOT))

    def _number_of(self, key: ShareKey) -> int:
        topic = self._store.topic_changes.declare(SHARE_GROUP_STATE, PARTITIONS, config=SETTINGS)
        count = self._store.topic_changes.declared_partitions(topic)
        return coordinator_partition(key.coordinator_key, count)

    def _log_of(self, key: ShareKey) -> Partition:
        number = self._number_of(key)
        topic = self._store[SHARE_GROUP_STATE]
        return self._store.topic_changes.make_partition(topic, number)

    def _prune(self, target: Partition) -> None:
        """Trim the state to its active segment, after a snapshot of everything before it."""
        segments = target.segments
        if len(segments) < 2:
            return
        base = segments[-1].base_offset
        topics = {topic.id for topic in self._store.values()}
        for key, state in list(self._states.items()):
            if state.snapshot_at >= base or self._number_of(key) != target.number:
                continue
            if key.topic_id not in topics:
                del self._states[key]  # the topic was deleted
                continue
            share = self._shares.get(key)
            if share is None:
                record = self._snapshot(key, state, Changes(state.start, state.batches), 0)
            else:
                with share.lock:
                    record = self._snapshot(key, state, share.machine.snapshot(),
                                            share.machine.finished)  # fmt: skip
            state.snapshot_at = target.extend([record], durability="os").start
        if self._store.durability == "fsync":
            target.sync()  # the snapshots, before what they replace is deleted
        target.trim(base)

    def _trim(self, share: Share) -> None:
        """Delete the segments that every group has finished, unless they are kept for longer."""
        keep_ms = share.options.keep_ms
        segments = share.log.segments
        if keep_ms is None or len(segments) < 2:
            return
        wanted = (share.key.topic_id, share.key.partition)
        slowest = min(state.start for key, state in self._states.items() if key[1:] == wanted)
        oldest = self.guarded.now_ms() - keep_ms
        base = 0
        for segment, after in itertools.pairwise(segments):
            if after.base_offset > slowest or (keep_ms and segment.max_timestamp >= oldest):
                break
            base = after.base_offset
        if base > share.log.start_offset:
            share.log.trim(base)

    # ---- dead letters ----

    def write_letters(self, share: Share) -> None:
        """Write the dead letters of a share, in one transaction with the end of the messages."""
        with self._writing:
            with share.lock:
                dying = dict(share.machine.dying)
                found = {offset: share.read(offset) for offset in dying}
            letters = {offset: record for offset, record in found.items() if record is not None}
            if letters:
                self._write_letters(share, letters, dying)
            with share.lock:
                for offset in dying:
                    share.machine.archive(offset)
                share.watch()
        share.line.wake()  # the next message of its key is available

    def _write_letters(
        self, share: Share, letters: dict[int, Record], reasons: dict[int, str]
    ) -> None:
        name, number = f"{share.topic.name}-dlt", share.key.partition
        dead = self._store.create_topic(
            name, len(share.topic), config={"retention.ms": -1}, exist_ok=True
        )
        self._make_durable(share.log)
        target = self._log_of(share.key)
        states = [StateBatch(offset, offset, ARCHIVED, share.machine.attempts(offset))
                  for offset in letters]  # fmt: skip
        if self._producer is None:
            self._producer = Producer(self._store, "logstore.queues")
        tx = self._producer.transaction()
        try:
            with tx:
                for state in states:
                    record = letters[state.first]
                    tx.append(
                        name, record.value, key=record.key, timestamp=record.timestamp,
                        headers=[*record.headers, *_letter_headers(share, state,
                                                                   reasons[state.first])],
                        partition=number % len(dead),
                    )  # fmt: skip
                value = encode_update(
                    Changes(-1, states), epoch=share.state.epoch, finished=share.machine.finished
                )
                tx.append(SHARE_GROUP_STATE, value, key=share.key.encode(UPDATE),
                          partition=target.number)  # fmt: skip
        except BaseException as error:
            # A decided transaction is committed, even if its markers are missing.
            if tx.over != "committed" or not isinstance(error, LogStoreError | OSError):
                self._producer = None  # a new one fences it
                raise
        share.state.updates += 1

    def close(self) -> None:
        """Write all changes, and end the leases: the store is closing."""
        if self.closed:
            return
        self.timers.close()
        try:
            if not self._store.closed:
                self.flush()
        finally:
            self.closed = True
            for share in self._shares.values():
                share.log.parts.view.unlisten(share.line.wake)
                share.line.wake_all()
            if self._producer is not None:
                self._producer.close()


def _letter_headers(share: Share, state: StateBatch, reason: str) -> list[tuple[str, bytes]]:
    """Return the headers of KIP-1191: where a dead letter is from, and why it is one."""
    return [
        ("__dlq.errors.topic", share.topic.name.encode()),
        ("__dlq.errors.partition", b"%d" % share.key.partition),
        ("__dlq.errors.offset", b"%d" % state.first),
        ("__dlq.errors.group", share.key.group.encode()),
        ("__dlq.errors.delivery.count", b"%d" % state.attempts),
        ("__dlq.errors.message", reason.encode()),
    ]
