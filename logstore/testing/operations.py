"""Operations: the requests of the clients of a log, their results, and their order.

An operation begins with ``invoke`` and ends in one of three ways: ``ok``, it happened; ``fail``, it
provably did not happen; ``info``, the outcome is unknown.  Operations of different processes may
overlap.  The positions of the events in one list are the only clock.  An operation consists of
acts.  A transaction is an operation with many acts: ``ok`` is a commit, ``fail`` an abort.

A process runs one operation at a time.  A partition is any hashable name, such as
``("orders", 0)``.  Values are hashable; the checks find most if each value is sent only once.

No I/O, no clock.  A Recorder may be used by many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

from logstore.errors import IndeterminateAppendError, LogStoreError

__all__ = [
    "Act",
    "Assign",
    "Commit",
    "Committed",
    "End",
    "Event",
    "History",
    "MalformedHistoryError",
    "Operation",
    "Pending",
    "Poll",
    "Read",
    "Recorder",
    "Seek",
    "Send",
    "Snapshot",
    "reads_of",
]

COMMITTED = "read_committed"
UNCOMMITTED = "read_uncommitted"

Outcome: TypeAlias = Literal["ok", "fail", "info"]
Moment: TypeAlias = Literal["invoke", "prepare", "ok", "fail", "info"]
Offsets: TypeAlias = tuple[tuple[Hashable, int], ...]


class MalformedHistoryError(LogStoreError, ValueError):
    """The events are no valid history: ``.place`` is the first invalid event."""

    def __init__(self, reason: str, place: int) -> None:
        super().__init__(f"event {place}: {reason}")
        self.place = place


# ---- acts: the parts of an operation ----


@dataclass(frozen=True, slots=True)
class Read:
    """A value that was read at an offset."""

    partition: Hashable
    offset: int
    value: Hashable


@dataclass(frozen=True, slots=True)
class Send:
    """A value sent to a partition, and its offset if one was acknowledged.

    The checks ignore the offset if the operation is ``info`` and not a transaction.  In a
    transaction every offset was acknowledged.
    """

    partition: Hashable
    value: Hashable
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Poll:
    """The records that one call returned to a consumer, in their order."""

    consumer: Hashable
    reads: tuple[Read, ...] = ()
    isolation: str = UNCOMMITTED


@dataclass(frozen=True, slots=True)
class Seek:
    """A consumer changes its position in these partitions, or in all that it owns.

    ``positions`` has the new positions that are known: the consumer must read all records from
    there on.
    """

    consumer: Hashable
    partitions: frozenset[Hashable] | None = None
    positions: Offsets = ()


@dataclass(frozen=True, slots=True)
class Assign:
    """From here on a consumer owns exactly these partitions, in a generation of its group.

    It keeps its position in the ``retained`` partitions.  In the others its position is new.
    """

    consumer: Hashable
    partitions: frozenset[Hashable]
    group: Hashable = None
    generation: int | None = None
    retained: frozenset[Hashable] = frozenset()
    positions: Offsets = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """Offsets that a group commits; with ``reset`` they may be lower than before."""

    group: Hashable
    offsets: Offsets
    consumer: Hashable = None
    generation: int | None = None
    reset: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """Committed offsets of a group, as they were read."""

    group: Hashable
    offsets: Offsets


@dataclass(frozen=True, slots=True)
class End:
    """The end of a partition (its high watermark), as it was read."""

    partition: Hashable
    offset: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All records of a partition from ``start`` on, read by the test at one moment."""

    partition: Hashable
    reads: tuple[Read, ...]
    start: int = 0
    isolation: str = UNCOMMITTED


Act: TypeAlias = Send | Poll | Seek | Assign | Commit | Committed | End | Snapshot


class RecordLike(Protocol):
    """The attributes of a Record that `reads_of` needs."""

    @property
    def topic(self) -> str | None: ...
    @property
    def partition(self) -> int | None: ...
    @property
    def offset(self) -> int | None: ...
    @property
    def value(self) -> bytes | None: ...


def reads_of(records: Iterable[RecordLike], partition: Hashable = None) -> tuple[Read, ...]:
    """Return records as reads.  The partition is ``(topic, number)`` unless given."""
    reads = []
    for record in records:
        assert record.offset is not None, "only a record that was read has an offset"
        where = (record.topic, record.partition) if partition is None else partition
        reads.append(Read(where, record.offset, record.value))
    return tuple(reads)


# ---- events and operations ----


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a history.

    ``prepare`` is between the last send of a transaction and its commit request.  The acts of the
    last event count; an event without acts keeps those of the invocation.
    """

    moment: Moment
    process: Hashable
    acts: tuple[Act, ...] = ()
    transactional: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An invocation and its outcome.  Places are positions in the list of events.

    ``completed`` is None if the history ends before the operation.
    """

    number: int
    process: Hashable
    acts: tuple[Act, ...]
    outcome: Outcome
    invoked: int
    completed: int | None
    prepared: int | None = None
    transactional: bool = False

    def __str__(self) -> str:
        what = " ".join(map(_brief, self.acts[:4])) + (" ..." if len(self.acts) > 4 else "")
        kind = "transaction " if self.transactional else ""
        return f"#{self.number} {kind}of {self.process!r} {self.outcome}: {what or 'nothing'}"


def _brief(act: Act) -> str:
    if isinstance(act, Send):
        return f"send({act.partition!r}, {act.value!r}) -> {act.offset}"
    if isinstance(act, Poll | Snapshot):
        seen = ", ".join(f"{r.partition!r}@{r.offset}={r.value!r}" for r in act.reads[:4])
        more = ", ..." if len(act.reads) > 4 else ""
        return f"{type(act).__name__.lower()}({seen}{more})"
    return repr(act)


class History:
    """Operations in the order of their invocations, paired from events."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.operations: list[Operation] = []
        self.events = 0
        pending: dict[Hashable, list[Any]] = {}
        order: list[list[Any]] = []
        for place, event in enumerate(events):
            self.events = place + 1
            begun = pending.get(event.process)
            if event.moment == "invoke":
                if begun is not None:
                    raise MalformedHistoryError(
                        f"process {event.process!r} begins, but its last operation has not ended",
                        place,
                    )
                pending[event.process] = begun = [event, place, None, None, place]
                order.append(begun)
                continue
            if begun is None:
                raise MalformedHistoryError(
                    f"process {event.process!r} has nothing under way that could be "
                    f"{event.moment!r}",
                    place,
                )
            if event.moment == "prepare":
                begun[2] = place
                continue
            begun[3], begun[4] = event, place
            del pending[event.process]
        for number, (first, invoked, prepared, last, ended) in enumerate(order):
            acts = last.acts if last is not None and last.acts else first.acts
            outcome: Outcome = "info" if last is None else last.moment
            completed = None if last is None else ended
            self.operations.append(
                Operation(
                    number,
                    first.process,
                    acts,
                    outcome,
                    invoked,
                    completed,
                    prepared,
                    first.transactional,
                )
            )

    def __len__(self) -> int:
        return len(self.operations)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __repr__(self) -> str:
        return f"<History of {len(self.operations)} operations, {self.events} events>"


# ---- recording ----


@dataclass(slots=True)
class Pending:
    """An operation in progress.  As a context manager it ends by the exception of the block.

    No exception: ``ok``.  IndeterminateAppendError, or an exception that is not a result of the log
    (KeyboardInterrupt, OSError): ``info``.  Another LogStoreError, or a ValueError or TypeError of
    a refused call: ``fail``.
    """

    recorder: Recorder
    process: Hashable
    acts: list[Act] = field(default_factory=list)
    transactional: bool = False
    ended: bool = False

    def acknowledged(self, offset: int) -> None:
        """Set the offset of the first send that has none."""
        for number, act in enumerate(self.acts):
            if isinstance(act, Send) and act.offset is None:
                self.acts[number] = replace(act, offset=offset)
                return
        raise ValueError(f"no send waits for offset {offset}")

    def add(self, *acts: Act) -> None:
        """Add acts to this operation."""
        self.acts.extend(acts)

    def prepare(self) -> None:
        """Record that all is sent and that the commit is requested now."""
        self.recorder.note(Event("prepare", self.process))

    def ok(self) -> None:
        """End it: it happened."""
        self._end("ok")

    def fail(self) -> None:
        """End it: it provably did not happen."""
        self._end("fail")

    def info(self) -> None:
        """End it: the outcome is unknown."""
        self._end("info")

    def _end(self, outcome: Outcome) -> None:
        if not self.ended:
            self.ended = True
            self.recorder.note(Event(outcome, self.process, tuple(self.acts), self.transactional))

    def __enter__(self) -> Pending:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.ok()
        elif isinstance(error, IndeterminateAppendError):
            self.info()
        elif isinstance(error, LogStoreError | ValueError | TypeError):
            self.fail()
        else:
            self.info()


class Recorder:
    """Records events of any number of threads, in the order of the calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []

    def __repr__(self) -> str:
        return f"<Recorder of {len(self._events)} events>"

    def note(self, event: Event) -> None:
        """Add an event."""
        with self._lock:
            self._events.append(event)

    @property
    def events(self) -> list[Event]:
        """Return a copy of the events so far."""
        with self._lock:
            return list(self._events)

    def history(self) -> History:
        """Return the operations so far.  One that has not ended is ``info``."""
        return History(self.events)

    def invoke(self, process: Hashable, *acts: Act) -> Pending:
        """Begin an operation."""
        pending = Pending(self, process, list(acts))
        self.note(Event("invoke", process, tuple(acts)))
        return pending

    def transaction(self, process: Hashable, *acts: Act) -> Pending:
        """Begin a transaction.  Add its acts with `Pending.add`, then end it."""
        pending = Pending(self, process, list(acts), transactional=True)
        self.note(Event("invoke", process, tuple(acts), True))
        return pending

    def send(self, process: Hashable, partition: Hashable, *values: Hashable) -> Pending:
        """Begin a send of values.  Set each offset with `Pending.acknowledged`."""
        return self.invoke(process, *(Send(partition, value) for value in values))

    def done(self, process: Hashable, *acts: Act) -> None:
        """Record an operation that has ended already; its beginning is recorded as now."""
        self.invoke(process, *acts).ok()

    def polled(
        self,
        consumer: Hashable,
        records: Iterable[RecordLike],
        *,
        isolation: str = UNCOMMITTED,
        partition: Hashable = None,
    ) -> None:
        """Record the records that a consumer got.  The consumer is its own process."""
        self.done(consumer, Poll(consumer, reads_of(records, partition), isolation))

    def snapshot(
        self,
        partition: Hashable,
        records: Iterable[RecordLike],
        *,
        start: int = 0,
        isolation: str = UNCOMMITTED,
    ) -> None:
        """Record all records of a partition from `start` on."""
        pending = self.invoke(("snapshot", partition))
        pending.add(Snapshot(partition, reads_of(records, partition), start, isolation))
        pending.ok()

    def assigned(
        self,
        consumer: Hashable,
        partitions: Iterable[Hashable],
        *,
        group: Hashable = None,
        generation: int | None = None,
        retained: Iterable[Hashable] = (),
        positions: Mapping[Hashable, int] | None = None,
    ) -> None:
        """Record that a consumer owns these partitions."""
        self.done(
            consumer,
            Assign(
                consumer,
                frozenset(partitions),
                group,
                generation,
                frozenset(retained),
                tuple((positions or {}).items()),
            ),
        )

    def commit(
        self,
        process: Hashable,
        group: Hashable,
        offsets: Mapping[Hashable, int],
        *,
        generation: int | None = None,
        reset: bool = False,
    ) -> Pending:
        """Begin to commit the offsets of a group."""
        pairs = tuple(offsets.items())
        return self.invoke(process, Commit(group, pairs, process, generation, reset))
