"""SharePartition: which messages of one partition a share group may hand out, without I/O.

The states are those of Kafka's share groups (KIP-932): a message is Available, Acquired until a
deadline, Acknowledged or Archived.  Every time is an argument, in milliseconds of one monotonic
clock.  The caller reads the log, and calls `take_in` for each record.

Invariant: `_live` has every offset of [start, end) that is neither acknowledged nor archived, in
the order of the log.  So `start` is the first key of `_live`, or `end`, and it never decreases.  An
offset of [start, end) that is not in `_live` is finished.  At most `in_flight_max` offsets are in
`_live`: the memory depends on this setting and not on the length of the log.

A lease is a number that no other acquisition has.  A request with an old lease raises
LeaseLostError and changes nothing.

Threads must not share it; the caller has a lock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from logstore.work_errors import LeaseLostError

__all__ = ["ACKNOWLEDGED", "ARCHIVED", "AVAILABLE", "Changes", "Lease", "SharePartition",
           "StateBatch"]  # fmt: skip

# Kafka's numbers of the states that are kept in the log.
AVAILABLE, ACKNOWLEDGED, ARCHIVED = 0, 2, 4


class StateBatch(NamedTuple):
    """The state of the offsets from `first` to `last`, both included."""

    first: int
    last: int
    state: int
    attempts: int


class Changes(NamedTuple):
    """The changes since the last ones: the start offset, and the states of offsets at or above."""

    start: int
    batches: list[StateBatch]


class Lease(NamedTuple):
    """One acquisition of one message."""

    offset: int
    attempts: int  # this one included
    number: int


class _Is(IntEnum):
    """The state of a message that is not finished."""

    READY = 0
    WAITING = 1  # until `due`
    BLOCKED = 2  # by an earlier message of its key
    ACQUIRED = 3  # until `due`
    DYING = 4  # until its dead letter is written


class _Entry:
    __slots__ = ("attempts", "due", "kept", "key", "lease", "owner", "state")

    def __init__(self, state: _Is, attempts: int, key: bytes | None, due: int) -> None:
        self.state = state
        self.attempts = attempts
        self.kept = attempts  # the attempts that a restart finds: those of ended leases
        self.key = key  # None unless messages of a key are ordered
        self.due = due
        self.lease = 0
        self.owner: object = None


class SharePartition:
    """The messages of one partition for one share group.

    `start` and `batches` are the state in the log.  With `ordered`, a message is Available only
    after every earlier message of its key is finished.
    """

    def __init__(
        self,
        start: int = 0,
        batches: Iterable[StateBatch] = (),
        *,
        max_attempts: int = 5,
        in_flight_max: int = 20_000,
        ordered: bool = False,
    ) -> None:
        self.max_attempts = max_attempts
        self.in_flight_max = in_flight_max
        self.ordered = ordered
        self._end = start
        self._known = deque(sorted(batches))  # of offsets at or above `_end`
        self._live: OrderedDict[int, _Entry] = OrderedDict()
        self._fresh: list[int] = []  # a heap of ready offsets that were never given back
        self._returned: list[tuple[int, int]] = []  # a heap of (ready since, offset)
        self._times: list[tuple[int, int]] = []  # a heap of (due, offset); may have outdated pairs
        self._strands: dict[bytes, deque[int]] = {}  # offsets after the first live one of a key
        self._changes: dict[int, tuple[int, int]] = {}  # offset -> (state, attempts)
        self._written_start = start
        self._leases = 0
        self._now = 0  # the newest time that was given
        self.needs_snapshot = False  # the changes alone do not have the whole state
        self._turn = False  # whether the next place is for a message that was given back
        self.dying: dict[int, str] = {}  # offset -> why it gets a dead letter
        self.acquired = 0

    def __repr__(self) -> str:
        return f"<SharePartition [{self.start}, {self._end}) with {len(self._live)} unfinished>"

    # ---- reading ----

    @property
    def start(self) -> int:
        """The first offset that is not finished."""
        return next(iter(self._live), self._end)

    @property
    def end(self) -> int:
        """The offset to read next; finished offsets from there on are passed over."""
        known = self._known
        while known and known[0].first <= self._end and known[0].state != AVAILABLE:
            self._end = max(self._end, known.popleft().last + 1)
        return self._end

    @property
    def room(self) -> int:
        """How many more messages may be taken in."""
        return self.in_flight_max - len(self._live)

    @property
    def ready(self) -> int:
        """Messages that were taken in, and may be acquired now or after an earlier one of a key."""
        return len(self._live) - self.acquired - self.delayed - len(self.dying)

    @property
    def delayed(self) -> int:
        """Messages that wait for their time."""
        return sum(entry.state == _Is.WAITING for entry in self._live.values())

    @property
    def changed(self) -> int:
        """How many changes are not in the log yet; the start offset counts as one."""
        return len(self._changes) + (self.needs_snapshot or self.start != self._written_start)

    def ready_offsets(self) -> Iterator[int]:
        """Yield the offsets that may be acquired now, in the order of the log."""
        return (offset for offset, entry in self._live.items() if entry.state == _Is.READY)

    def has_fresh(self) -> bool:
        """Return whether a message is ready that was never given back."""
        return self._first(self._fresh) is not None

    def attempts(self, offset: int) -> int:
        """Return how often a message was acquired."""
        return self._live[offset].attempts

    def has_ready(self) -> bool:
        """Return whether `acquire` would return a lease."""
        return self._first(self._fresh) is not None or self._first_returned() is not None

    def next_due(self) -> int | None:
        """Return the time of the next useful `advance`, or None."""
        times = self._times
        while times and not self._is_due(times[0]):
            heapq.heappop(times)
        return times[0][0] if times else None

    # ---- messages of the log ----

    def take_in(self, offset: int, now: int, *, key: bytes | None = None, due: int = 0) -> bool:
        """Take a record of the log in; offsets before it without a record are finished.

        `due` is the time before which it is not Available.  Return False if it is finished.
        """
        assert offset >= self.end
        assert self.room > 0
        self._now = max(self._now, now)
        self._end = offset + 1
        attempts = 0
        known = self._known
        while known and known[0].last < offset:
            known.popleft()
        if known and known[0].first <= offset:
            if known[0].state != AVAILABLE:
                return False
            attempts = known[0].attempts
        entry = _Entry(_Is.READY, attempts, key if self.ordered else None, due)
        self._live[offset] = entry
        if entry.key is not None:
            strand = self._strands.get(entry.key)
            if strand is not None:
                entry.state = _Is.BLOCKED
                strand.append(offset)
                return True
            self._strands[entry.key] = deque()
        self._offer(offset, entry)
        return True

    def pass_over(self, end: int) -> None:
        """Finish the offsets below `end` that were not taken in: they have no record."""
        self._end = max(self._end, end)

    def trim(self, start: int) -> None:
        """Archive every message below `start`: the log does not have it any more."""
        for offset in [each for each in self._live if each < start]:
            self.archive(offset)
        self.pass_over(start)

    def purge(self, end: int) -> int:
        """Archive every message below `end` that is not acquired; return how many were known."""
        gone = [offset for offset, entry in self._live.items()
                if entry.state not in (_Is.ACQUIRED, _Is.DYING)]  # fmt: skip
        for offset in gone:
            self.archive(offset)
        if end > self.end:
            self._end = end
            # The new finished offsets are not in `_changes`, which has one item for each offset.
            self.needs_snapshot = True
        return len(gone)

    def _offer(self, offset: int, entry: _Entry) -> None:
        """Make an entry available: at its time, or now."""
        if entry.attempts >= self.max_attempts:
            self._die(offset, entry, f"{entry.attempts} attempts failed")
        elif entry.due > self._now:
            entry.state = _Is.WAITING
            self._add_time(entry.due, offset)
        else:
            entry.state = _Is.READY
            if entry.attempts:
                heapq.heappush(self._returned, (entry.due, offset))
            else:
                heapq.heappush(self._fresh, offset)

    # ---- leases ----

    def acquire(self, now: int, deadline: int, owner: object = None) -> Lease | None:
        """Lease the next message until `deadline`; return None if none is available.

        A message that was given back gets every second place: it does not hold up new messages, and
        new messages do not hold it up for ever.
        """
        self.advance(now)
        fresh, returned = self._first(self._fresh), self._first_returned()
        if fresh is None and returned is None:
            return None
        if returned is not None and (self._turn or fresh is None):
            offset = heapq.heappop(self._returned)[1]
            self._turn = False
        else:
            offset = heapq.heappop(self._fresh)
            self._turn = True
        entry = self._live[offset]
        self._leases += 1
        entry.lease = self._leases
        entry.attempts += 1
        entry.owner = owner
        entry.state = _Is.ACQUIRED
        entry.due = deadline
        self.acquired += 1
        self._add_time(deadline, offset)
        return Lease(offset, entry.attempts, entry.lease)

    def check(self, lease: Lease) -> _Entry:
        """Return the entry of a lease that is valid; raise LeaseLostError otherwise."""
        entry = self._live.get(lease.offset)
        if entry is None or entry.state != _Is.ACQUIRED or entry.lease != lease.number:
            raise LeaseLostError(lease.offset, attempts=lease.attempts)
        return entry

    def acknowledge(self, lease: Lease) -> None:
        """Finish a message."""
        self.check(lease)
        self._finish(lease.offset, ACKNOWLEDGED)

    def release(self, lease: Lease, now: int, delay: int = 0, reason: str = "") -> bool:
        """Give a message back; return whether it has to get a dead letter instead."""
        entry = self.check(lease)
        self._now = max(self._now, now)
        return self._release(lease.offset, entry, now + delay, reason)

    def reject(self, lease: Lease, reason: str) -> None:
        """Have a message archived with a dead letter, at any number of attempts."""
        entry = self.check(lease)
        self.acquired -= 1
        self._die(lease.offset, entry, reason)

    def extend(self, lease: Lease, deadline: int) -> None:
        """Set another deadline."""
        self.check(lease).due = deadline
        self._add_time(deadline, lease.offset)

    def note_attempt(self, lease: Lease) -> None:
        """Count the attempt in the log now, and not at the end of the lease."""
        entry = self.check(lease)
        entry.kept = entry.attempts
        self._changes[lease.offset] = (AVAILABLE, entry.attempts)

    def leave(self, owner: object, now: int) -> None:
        """Give back every message that `owner` holds: it is gone."""
        self._now = max(self._now, now)
        for offset, entry in list(self._live.items()):
            if entry.state == _Is.ACQUIRED and entry.owner is owner:
                self._release(offset, entry, now, "its owner was closed")

    def advance(self, now: int) -> None:
        """End the leases whose deadline has passed, and the delays that are over."""
        self._now = max(self._now, now)
        while self._times and self._times[0][0] <= now:
            pair = heapq.heappop(self._times)
            if not self._is_due(pair):
                continue
            due, offset = pair
            entry = self._live[offset]
            if entry.state == _Is.ACQUIRED:
                self._release(offset, entry, due, "its visibility time-out passed")
            else:
                entry.state = _Is.READY
                heapq.heappush(self._returned, (due, offset))

    def archive(self, offset: int) -> None:
        """Finish a message without an acknowledgement: its letter is written, or it is expired."""
        if offset in self._live:
            self._finish(offset, ARCHIVED)

    def _release(self, offset: int, entry: _Entry, due: int, reason: str) -> bool:
        self.acquired -= 1
        entry.owner = None
        entry.kept = entry.attempts
        entry.due = due
        self._changes[offset] = (AVAILABLE, entry.attempts)
        if entry.attempts >= self.max_attempts:
            self._die(offset, entry, reason)
            return True
        self._offer(offset, entry)
        return False

    def _die(self, offset: int, entry: _Entry, reason: str) -> None:
        # `kept` stays for a rejected message: after a crash before its letter it is delivered
        # again, and not counted as failed `max_attempts` times.
        entry.state = _Is.DYING
        self.dying[offset] = reason

    def _finish(self, offset: int, state: int) -> None:
        entry = self._live[offset]
        self._changes[offset] = (state, entry.attempts)
        self.acquired -= entry.state == _Is.ACQUIRED
        self.dying.pop(offset, None)
        blocked = entry.state == _Is.BLOCKED
        del self._live[offset]
        if entry.key is not None and not blocked:
            self._unblock(entry.key)

    def _unblock(self, key: bytes) -> None:
        """Offer the next live message of a key."""
        strand = self._strands[key]
        while strand:
            offset = strand.popleft()
            entry = self._live.get(offset)  # None if it was purged or trimmed
            if entry is not None:
                self._offer(offset, entry)
                return
        del self._strands[key]

    # ---- heaps with outdated items ----

    def _first(self, heap: list[int]) -> int | None:
        while heap:
            entry = self._live.get(heap[0])
            if entry is not None and entry.state == _Is.READY:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _first_returned(self) -> int | None:
        heap = self._returned
        while heap:
            entry = self._live.get(heap[0][1])
            if entry is not None and entry.state == _Is.READY:
                return heap[0][1]
            heapq.heappop(heap)
        return None

    def _is_due(self, pair: tuple[int, int]) -> bool:
        """Return whether the pair is the time of an entry that has one."""
        entry = self._live.get(pair[1])
        timed = entry is not None and entry.state in (_Is.WAITING, _Is.ACQUIRED)
        return timed and entry is not None and entry.due == pair[0]

    def _add_time(self, due: int, offset: int) -> None:
        heapq.heappush(self._times, (due, offset))
        # Acknowledged leases leave their pairs in the heap.  Without this their number would depend
        # on the acknowledgements within a visibility time-out.
        if len(self._times) > 64 + 2 * len(self._live):
            self._times = [pair for pair in set(self._times) if self._is_due(pair)]
            heapq.heapify(self._times)

    # ---- the state in the log ----

    def take_changes(self) -> Changes:
        """Return the changes since the last call, and forget them."""
        changes, self._changes = self._changes, {}
        start = self._written_start = self.start
        # Offsets below the start are finished: the start alone has that.
        return Changes(start, _merged(
            StateBatch(offset, offset, *changes[offset])
            for offset in sorted(changes) if offset >= start
        ))  # fmt: skip

    def snapshot(self) -> Changes:
        """Return the whole state, and forget the changes."""
        self._changes = {}
        self.needs_snapshot = False
        start = self._written_start = self.start
        return Changes(start, _merged(self._states(start)))

    @property
    def finished(self) -> int:
        """The offsets from `start` to `end` that are finished."""
        return self._end - self.start - len(self._live)

    def _states(self, start: int) -> Iterator[StateBatch]:
        at = start
        for offset, entry in self._live.items():
            if at < offset:
                yield StateBatch(at, offset - 1, ACKNOWLEDGED, 1)
            if entry.kept:
                yield StateBatch(offset, offset, AVAILABLE, entry.kept)
            at = offset + 1
        if at < self._end:
            yield StateBatch(at, self._end - 1, ACKNOWLEDGED, 1)
        for batch in self._known:
            if batch.last >= self._end:
                yield batch._replace(first=max(batch.first, self._end))


def _merged(batches: Iterable[StateBatch]) -> list[StateBatch]:
    """Join neighbours of the same state."""
    found: list[StateBatch] = []
    for batch in batches:
        last = found[-1] if found else None
        if last and last.last + 1 == batch.first and last[2:] == batch[2:]:
            found[-1] = last._replace(last=batch.last)
        else:
            found.append(batch)
    return found
