"""Open records, the starts of their handlers, and the partitions that are held.

Strands changes them; see there for the states and the order.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from logstore.coordinators.offset_records import CommittedOffset, TopicPartition
from logstore.interceptors import Outgoing
from logstore.record import Record
from logstore.work_errors import PoisonRecordError
from logstore.workers.progress import Place, Progress

__all__ = ["DONE", "SKIPPED", "Bucket", "Counts", "Failed", "Held", "Item", "Limits",
           "Outcome", "Outputs", "Probation", "Snapshot", "State", "Strand", "Work", "poison",
           "size_of"]  # fmt: skip


class State(enum.Enum):
    """The state of an open record."""

    WAITING = "waiting"
    RUNNING = "running"
    FAILED = "failed"
    BLOCKED = "blocked"
    LEAVING = "leaving"
    CLOSED = "closed"


class Failed(NamedTuple):
    """The outcome of a handler that raised."""

    error: BaseException


class Outputs(NamedTuple):
    """The outcome of a handler that returned records to send."""

    records: tuple[Outgoing, ...]


DONE, SKIPPED = "done", "skipped"
Outcome = str | Failed | Outputs


class Limits(NamedTuple):
    """The bounds of what is open."""

    records: int = 1000  # for each partition
    bytes: int = 32 << 20  # of all partitions
    crashes: int = 3  # starts without an end, after which a record is poison


class Counts:
    """Totals since the begin."""

    __slots__ = ("closed", "failed", "started")

    def __init__(self) -> None:
        self.started = 0
        self.failed = 0  # attempts
        self.closed = {DONE: 0, SKIPPED: 0}


class Strand:
    """Records that are processed one after the other.  `key` is None for a single record."""

    __slots__ = ("busy", "held", "key", "queue")

    def __init__(self, held: Held, key: Hashable) -> None:
        self.held = held
        self.key = key
        self.queue: deque[Item] = deque()  # waiting records, in the order of offsets
        self.busy = 0  # records that run, have failed or are blocked


class Item:
    """An open record."""

    __slots__ = ("attempts", "counted", "offset", "outputs", "probation", "record", "size",
                 "state", "strand", "work")  # fmt: skip

    def __init__(self, record: Record, strand: Strand, size: int, *, probation: bool) -> None:
        self.record = record
        self.offset = record.offset
        self.strand = strand
        self.size = size
        self.attempts = 0  # that have failed
        self.state = State.WAITING
        self.probation = probation
        self.counted = False  # the start is in the Progress, and in a commit
        self.work: Work | None = None
        self.outputs: tuple[Outgoing, ...] = ()

    @property
    def partition(self) -> TopicPartition:
        """The partition of the record."""
        return self.strand.held.partition

    def __repr__(self) -> str:
        return f"<Item {self.partition} {self.offset} {self.state.value}>"


class Work:
    """One start of a handler.  The thread of the handler sets the attributes below `item`."""

    __slots__ = ("attempt", "context", "foreign", "heir", "item", "outcome", "record",
                 "started_at", "timed_out", "where")  # fmt: skip

    def __init__(self, item: Item) -> None:
        self.item = item
        self.record = item.record
        self.attempt = item.attempts + 1
        self.started_at: float | None = None  # None: taken, and not begun
        self.where: Any = None  # the thread or task that runs it
        self.context: Any = None
        self.timed_out = False
        self.foreign = False  # stands for a start of the owner before
        # For RunningStrands, if the partition was released before the handler ended.
        self.heir: Callable[[Outcome], object] | None = None
        self.outcome: Outcome | None = None

    @property
    def may_begin(self) -> bool:
        """Whether its partition has not been paused or asked back since it was taken."""
        return not self.item.strand.held.closed

    def __repr__(self) -> str:
        return f"<Work {self.item.partition} {self.item.offset} attempt {self.attempt}>"


class Held:
    """A partition that is assigned to these workers."""

    def __init__(self, partition: TopicPartition, place: Place, progress: Progress) -> None:
        self.partition = partition
        self.place = place
        self.progress = progress
        self.items: dict[int, Item] = {}
        self.strands: dict[Hashable, Strand] = {}
        self.aside: list[Strand] = []  # ready ones, while it is paused or revoked
        self.paused = self.revoking = self.released = False
        self.read = progress.committed  # the next offset that the reader has
        # Open offsets of the commit that the reader has not reached yet.
        self.restored = deque(progress)
        self.foreign: dict[int, Work | Outcome] = {}  # of the owner before, or their outcomes
        self.running = 0
        self.waiting = 0
        self.changes = 1  # counts changes of the progress; 1: not committed by this owner
        self.saved = 0  # `changes` of the last commit
        self.probation_end = -1

    @property
    def closed(self) -> bool:
        """Whether no record of it may start now."""
        return self.paused or self.revoking or self.released

    @property
    def dirty(self) -> bool:
        """Whether its progress changed since the last commit."""
        return self.saved != self.changes


class Snapshot(NamedTuple):
    """Offsets to commit, and the state that they were computed from."""

    offsets: dict[TopicPartition, CommittedOffset]
    changes: dict[TopicPartition, int]


class Probation:
    """Records that may have ended the last process: each start is counted in a commit before it.

    Records that ran together when the process ended are all suspects.  A suspect is started while
    no other record on probation runs, so the next crash is the fault of one record.
    """

    def __init__(self, crash_limit: int) -> None:
        self._crash_limit = crash_limit
        self.gated: list[Strand] = []  # whose first record is not counted
        self._opened: list[Strand] = []  # counted, and not committed yet
        self._counted: dict[Item, bool] = {}  # that wait or run; whether it is a suspect

    @property
    def waits(self) -> bool:
        """Whether a record waits to be counted, or for its commit."""
        return bool(self.gated or self._opened)

    def poisoned(self) -> list[Strand]:
        """Remove and return the strands whose first record has started too often.

        Set strands of partitions aside that may not start a record now.
        """
        strands, self.gated = self.gated, []
        found = []
        for strand in strands:
            if strand.held.closed:
                strand.held.aside.append(strand)
            elif _starts(strand) >= self._crash_limit:
                found.append(strand)
            else:
                self.gated.append(strand)
        return found

    def count(self, limit: int) -> bool:
        """Count the next starts; return whether there is one to commit."""
        at_work = (State.WAITING, State.RUNNING)
        self._counted = {item: suspect for item, suspect in self._counted.items()
                         if item.counted and item.state in at_work}  # fmt: skip
        chosen = [strand for strand in self.gated if _starts(strand)]
        if chosen:
            chosen = chosen[: 0 if self._counted else 1]
        elif not any(self._counted.values()):
            chosen = self.gated[: max(0, limit - len(self._counted))]
        for strand in chosen:
            head, held = strand.queue[0], strand.held
            suspect = _starts(strand) > 0
            # A start that has no room in the text waits, unless no other one can make room.
            if held.progress.count_start(head.offset) or not self._counted:
                head.counted = True
                held.changes += 1
                self._counted[head] = suspect
                self.gated.remove(strand)
                self._opened.append(strand)
        return bool(self._opened)

    def opened(self) -> list[Strand]:
        """Return the strands that were counted: they may start."""
        opened, self._opened = self._opened, []
        return opened

    def uncount(self, held: Held) -> None:
        """Undo counted starts of a partition that did not begin."""
        for item in self._counted:
            if item.strand.held is held and item.counted and item.state is State.WAITING:
                item.counted = False
                held.progress.end_start(item.offset)

    def drop(self, held: Held) -> None:
        """Forget a partition."""
        self.gated = [strand for strand in self.gated if strand.held is not held]
        self._opened = [strand for strand in self._opened if strand.held is not held]

    def unlist(self, strand: Strand) -> None:
        """Forget a strand."""
        for listed in (self.gated, self._opened):
            if strand in listed:
                listed.remove(strand)


def _starts(strand: Strand) -> int:
    return strand.held.progress.starts.get(strand.queue[0].offset, 0)


class Bucket:
    """A token bucket: `rate` tokens a second, and at most a tenth of a second's at once."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._most = max(1.0, rate / 10)
        self._tokens = self._most
        self._at: float | None = None

    def take(self, now: float) -> bool:
        if self._at is not None:
            gained = max(0.0, now - self._at) * self._rate
            self._tokens = min(self._most, self._tokens + gained)
        self._at = now
        # A little less than one: the sum of many small gains is not exact.
        if self._tokens < 1 - 1e-9:
            return False
        self._tokens -= 1
        return True

    @property
    def due(self) -> float:
        """When there is a token."""
        return (self._at or 0.0) + max(0.0, 1 - self._tokens) / self._rate


def poison(item: Item) -> PoisonRecordError:
    """Return the error of a record that has ended its process too often."""
    starts = item.strand.held.progress.starts[item.offset]
    error = PoisonRecordError(
        f"the process ended {starts} times while a handler had {item.partition} offset "
        f"{item.offset}"
    )
    error.record = item.record
    return error


def size_of(record: Any) -> int:
    """Return the bytes of key, value and headers; for other objects an estimate."""
    size = 0
    for part in (record.key, record.value):
        if part is not None:
            size += len(part) if hasattr(part, "__len__") else 64
    for name, value in record.headers:
        size += len(name) + len(value or b"")
    return size
