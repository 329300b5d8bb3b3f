"""Share: one partition for one share group; the lock, the log and the timers of a SharePartition.

A Share reads messages from the log in chunks, and decides whether one has expired when it is
acquired.  A Line has the threads and tasks that wait for a message.  Nothing polls: an append, the
end of a lease or of a delay rings a bell.

Lock order: see `ShareGroups`.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from typing import NamedTuple, Protocol

from logstore.clock import GuardedClock
from logstore.consumer.wakeup import Bell
from logstore.errors import LogStoreError, OffsetOutOfRangeError, RecordNotFoundError
from logstore.partition.partition import Partition
from logstore.queues.share import Lease, SharePartition
from logstore.queues.share_state import ShareKey, ShareState
from logstore.record import Record
from logstore.store.topic import Topic
from logstore.timers import Timers

__all__ = ["DUE_HEADER", "RETRY", "TTL_HEADER", "Line", "Share", "ShareOptions"]

log = logging.getLogger("logstore.queue")

TTL_HEADER = "logstore.ttl.ms"  # milliseconds from the timestamp, or from the due time
DUE_HEADER = "logstore.due.ms"  # milliseconds since 1970 before which it is not handed out
CHANGES_MAX = 20_000  # then the thread that acknowledges writes them itself
CHUNK_RECORDS, CHUNK_BYTES = 256, 1 << 20  # of messages that are read ahead
RETRY = 1.0  # seconds after a write that failed


class ShareOptions(NamedTuple):
    """The settings that all queues of one group and topic have to share."""

    max_attempts: int
    in_flight_max: int
    ordered: bool
    keep_ms: int | None  # 0: trim what every group has finished; None: keep all
    on_expired: str
    ack_linger: float


class Line:
    """The threads and tasks that wait for a message of one group and topic.

    `wake` rings one of them.  A getter that takes a message while more are ready calls `wake`
    again, and so does a getter that was rung and leaves.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[Bell] = collections.deque()
        self.joining: collections.deque[Bell] = collections.deque()

    def wake(self) -> None:
        """Ring the bell that has waited longest.  It may run under the lock of a log."""
        with contextlib.suppress(IndexError):  # no getter waits
            self._waiting.popleft().ring()

    def wake_all(self) -> None:
        """Ring all bells: the queue is closed."""
        for bells in (self._waiting, self.joining):
            for bell in list(bells):
                bell.ring()

    def add(self, bell: Bell) -> None:
        """Have a later `wake` ring a bell."""
        self._waiting.append(bell)

    def leave(self, bell: Bell) -> None:
        """Remove a bell; if it was rung, ring the next one: the message may be for it."""
        try:
            self._waiting.remove(bell)
        except ValueError:
            self.wake()


class Keeper(Protocol):
    """What a Share needs of the ShareGroups of its store."""

    timers: Timers
    guarded: GuardedClock
    closed: bool

    def now(self) -> int: ...
    def mark(self, share: Share) -> None: ...
    def flush(self, *, sync: bool = True) -> None: ...
    def write_letters(self, share: Share) -> None: ...


class Share:
    """One partition for one share group.  Threads share it."""

    def __init__(
        self, groups: Keeper, key: ShareKey, topic: Topic, options: ShareOptions,
        state: ShareState, line: Line, probation_end: int,
    ) -> None:  # fmt: skip
        self.key = key
        self.topic = topic
        self.options = options
        self.state = state  # as it is in the log; under `_writing`
        self.line = line
        self.log: Partition = topic[key.partition]
        self.lock = threading.RLock()
        self.machine = SharePartition(
            state.start, state.batches, max_attempts=options.max_attempts,
            in_flight_max=options.in_flight_max, ordered=options.ordered,
        )  # fmt: skip
        self.expired = 0
        self._groups = groups
        self._cache: dict[int, Record] = {}  # records of the last chunk
        self._alarm: int | None = None
        # Messages below it may have been handed out when the last process was killed.  Their
        # attempts are written before they are handed out again.
        self._probation_end = probation_end

    # ---- getting ----

    def acquire(self, visibility_ms: int, owner: object) -> tuple[Record, Lease] | None:
        """Lease the next message; return None if none is available now."""
        with self.lock:
            found = self._acquire(visibility_ms, owner)
            more = self._has_more()
            noted = found is not None and found[1].offset < self._probation_end
            if noted and found is not None:
                self.machine.note_attempt(found[1])
            self.watch()
        if noted:
            self._groups.flush(sync=False)
        if found is not None and more:
            self.line.wake()
        return found

    def _acquire(self, visibility_ms: int, owner: object) -> tuple[Record, Lease] | None:
        machine = self.machine
        while True:
            now = self._groups.now()
            if not machine.has_fresh():
                self._fill(now)
            lease = machine.acquire(now, now + visibility_ms, owner)
            if lease is None:
                return None
            record = self.read(lease.offset)
            if record is None:
                machine.archive(lease.offset)
            elif not self._is_expired(record):
                return record, lease
            elif self.options.on_expired == "skip":
                self.expired += 1
                machine.archive(lease.offset)
            else:
                self.expired += 1
                machine.reject(lease, "its time to live is over")

    def _fill(self, now: int) -> None:
        """Take the next messages of the log in."""
        machine, source = self.machine, self.log
        if source.start_offset > machine.start:
            machine.trim(source.start_offset)
        stop = source.last_stable_offset
        while machine.end < stop and machine.room > 0:
            scan = source.scan(machine.end, stop, isolation="read_committed",
                               max_records=min(machine.room, CHUNK_RECORDS),
                               on_lost="skip")  # fmt: skip
            self._cache = {}
            size = 0
            for record in scan:
                if record.offset < machine.end:
                    continue  # finished
                due = self._due(record, now)
                if machine.take_in(record.offset, now, key=record.key, due=due):
                    self._cache[record.offset] = record
                    size += len(record.value or b"") + len(record.key or b"")
                    if size > CHUNK_BYTES:
                        break
            else:
                machine.pass_over(min(scan.next_offset, stop))
            if self._cache:
                return

    def read(self, offset: int) -> Record | None:
        """Return the record of a message; None if the log does not have it any more."""
        return self._cache.pop(offset, None) or self._at(offset)

    def _at(self, offset: int) -> Record | None:
        try:
            return self.log[offset]
        except (OffsetOutOfRangeError, RecordNotFoundError):
            return None

    def ready_records(self, count: int) -> list[Record]:
        """Return the first messages that are available, without a lease."""
        with self.lock:
            self._fill(self._groups.now())
            self.machine.advance(self._groups.now())
            found: list[Record] = []
            for offset in self.machine.ready_offsets():
                record = self._at(offset)
                if record is not None and not self._is_expired(record):
                    found.append(record)
                if len(found) >= count:
                    break
            self.watch()
            return found

    def _due(self, record: Record, now: int) -> int:
        """Return the monotonic time before which a record is not handed out; 0 for none."""
        wanted = _number(record, DUE_HEADER)
        left = 0 if wanted is None else wanted - self._groups.guarded.now_ms()
        return now + left if left > 0 else 0

    def _is_expired(self, record: Record) -> bool:
        ttl = _number(record, TTL_HEADER) if record.headers else None
        if ttl is None:
            return False
        since = max(record.timestamp, _number(record, DUE_HEADER) or 0)
        return since + ttl <= self._groups.guarded.now_ms()

    # ---- settling ----

    def _has_more(self) -> bool:
        return self.machine.has_ready() or self.log.last_stable_offset > self.machine.end

    def acknowledge(self, lease: Lease) -> None:
        with self.lock:
            self.machine.acknowledge(lease)
            self.watch()
            full = self.machine.changed >= CHANGES_MAX
            more = self._has_more()
        if more:  # there is room for it now, or its key is free
            self.line.wake()
        if full:
            self._groups.flush()

    def release(self, lease: Lease, delay_ms: int, reason: str) -> None:
        """Give a message back, or write its dead letter if this was the last attempt."""
        with self.lock:
            dies = self.machine.release(lease, self._groups.now(), delay_ms, reason)
            self.watch()
        if dies:
            self._groups.write_letters(self)
        else:
            self.line.wake()

    def reject(self, lease: Lease, reason: str) -> None:
        with self.lock:
            self.machine.reject(lease, reason)
        self._groups.write_letters(self)

    def extend(self, lease: Lease, duration_ms: int) -> None:
        with self.lock:
            self.machine.extend(lease, self._groups.now() + duration_ms)
            self.watch()

    def leave(self, owner: object) -> None:
        """Give back the messages of a queue that is closed."""
        with self.lock:
            self.machine.leave(owner, self._groups.now())
            self.watch()
        self.line.wake()

    def purge(self, *, dry_run: bool) -> int:
        """Archive all messages that are not leased; return their number."""
        with self.lock:
            machine, stop = self.machine, self.log.last_stable_offset
            waiting = machine.ready + machine.delayed + max(0, stop - machine.end)
            if not dry_run:
                machine.purge(stop)
                self.watch()
        if not dry_run:
            self._groups.flush()
        return waiting

    def counts(self) -> tuple[int, int, int]:
        """Return how many messages are ready, delayed, and leased or about to be dead letters."""
        with self.lock:
            machine = self.machine
            self._fill(self._groups.now())
            machine.advance(self._groups.now())
            self.watch()
            beyond = max(0, self.log.last_stable_offset - machine.end)
            return machine.ready + beyond, machine.delayed, machine.acquired + len(machine.dying)

    def unfinished(self) -> bool:
        """Return whether a message is not acknowledged or archived."""
        with self.lock:
            self._fill(self._groups.now())
            return max(self.machine.start, self.log.start_offset) < self.log.last_stable_offset

    def watch(self) -> None:
        """After a change, with `lock` held: have it written, and set the next alarm."""
        machine = self.machine
        if machine.changed:
            self._groups.mark(self)
            for bell in list(self.line.joining):
                bell.ring()
        if machine.dying:
            self._groups.timers.after(0, self._on_time)
        due = machine.next_due()
        if due is not None and (self._alarm is None or due < self._alarm):
            self._alarm = due
            self._groups.timers.after(max(0, due - self._groups.now()) / 1000, self._on_time)

    def _on_time(self) -> None:
        with self.lock:
            self._alarm = None
            self.machine.advance(self._groups.now())
            dying = bool(self.machine.dying)
            if not dying:
                self.watch()
        if dying:
            try:
                self._groups.write_letters(self)
            except (LogStoreError, OSError) as error:
                if self._groups.closed:
                    return
                log.warning("%s: a dead letter was not written, trying again: %s",
                            self.topic.name, str(error))  # fmt: skip
                self._groups.timers.after(RETRY, self._on_time)
        self.line.wake()


def _number(record: Record, name: str) -> int | None:
    for header, value in record.headers:
        if header == name and value is not None and value.isdigit():
            return int(value)
    return None
