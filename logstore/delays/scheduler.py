"""Scheduler: records that are delivered to their topics at a later time.

`schedule` appends a record to the internal topic and returns a Ticket.  While the scheduler runs, a
thread delivers each record when it is due, in a transaction that also ends its ticket.  Tickets of
the near future are in memory, in an Agenda; all others are in the log only.

Invariant: pending tickets = scheduled - delivered - cancelled, by the log alone.  So a restart
needs nothing but a load.

A record is due by the guarded time, which is never after the wall clock: it is never delivered
early, also if the clock leaps ahead.

Threads may share a scheduler.  `_lock` guards the agenda and the journal.  `_delivering` is held by
the thread that delivers or moves a ticket; it is taken first.
"""

from __future__ import annotations

import datetime
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from logstore.clock import Clock, GuardedClock, SystemClock
from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.coordinators.internal_topics import DELAYED, INTERNAL_TOPICS
from logstore.coordinators.transaction_coordinator import Transactions
from logstore.delays.agenda import EVERYTHING, LOW, Agenda
from logstore.delays.courier import Courier
from logstore.delays.journal import Journal
from logstore.delays.settings import SchedulerSettings, duration_ms
from logstore.delays.ticket import (
    COUNTER_MAX,
    DelayedRecord,
    Ticket,
    generation_for,
    generation_of,
    number_of,
    ticket_number,
    tombstone,
)
from logstore.errors import InvalidNameError, InvalidRecordError
from logstore.notes import Notes
from logstore.producer.transaction import Transaction
from logstore.record import Record
from logstore.store.companions import expect_store
from logstore.store.store import Store
from logstore.waking import Gate, Wake, uninterrupted
from logstore.work_errors import ScheduleError, UnknownTicketError

__all__ = ["Scheduler"]

log = logging.getLogger("logstore.delays")

LONGEST_SLEEP = 1.0  # seconds; the thread then looks at the wall clock, which may have been set
RETRY = 1.0  # seconds after a failed delivery, for example on a full disk
RECLAIM_EVERY = 10_000  # deliveries between two attempts to delete old segments
MANY = 10_000  # records of one append of `schedule_many`
NOTE = ("scheduler", "run")  # the note that numbers the runs


class Scheduler(Closeable):
    """The delayed records of a store.  A store has one scheduler: `Scheduler.of`.

    ``with scheduler:`` delivers due records in a thread during the block; so do `start` and `stop`.
    Without a thread it only accepts records, and `run_once` delivers those that are due.
    """

    def __init__(self, store: Store) -> None:
        """Use `Scheduler.of`."""
        # Made before this object is, so that the store closes them after it.
        Transactions.of(store)
        self._notes = Notes.of(store)
        self._store = store
        self._clock: Clock = store.clock or SystemClock()
        self._guarded = GuardedClock.of(store.clock)
        self._settings: SchedulerSettings | None = None
        self._wake = Wake()
        self._journal = Journal(store, self._wake.set)
        self._courier = Courier(store)
        self._agenda: Agenda | None = None  # None until it is needed, and after an interrupt
        self._lock = threading.RLock()
        self._delivering = threading.RLock()
        self._numbering = threading.Lock()  # guards the next two
        self._run = 0
        self._counter = COUNTER_MAX  # the first number begins a run
        self._since: int | None = None  # the time since which due records are delivered
        self._reclaimed = 0  # deliveries since the last attempt to delete segments
        self._stopped = Gate()
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None  # of the thread's last round

    @classmethod
    def of(cls, store: Store, **settings: Any) -> Scheduler:
        """Return the scheduler of a store; it is closed with the store.

        - `loaded_max`: tickets in memory; at most twice as many are.
        - `lookahead`: seconds before the loaded tickets end, at which more are loaded.
        - `batch_max`, `batch_ms`: records of one transaction; milliseconds to wait for more.
        - `late`: records that came due while no scheduler ran are delivered ("deliver"), dropped
          ("skip"), or, with a duration, set aside in ``logstore-undelivered`` if they are older.
        - `max_delay`: a longer delay is refused.

        The first call with settings decides; a later call with others raises ConfigError.
        """
        scheduler = expect_store(store, "Scheduler.of").companions.of(cls)
        try:
            wanted = SchedulerSettings(**settings)
        except TypeError as error:
            raise ConfigError(f"no such setting of a scheduler: {error}") from error
        with scheduler._lock:
            if scheduler._settings is None:
                scheduler._settings = wanted
            elif settings and scheduler._settings != wanted:
                raise ConfigError(
                    f"the scheduler of this store has other settings: {scheduler._settings}"
                )
        return scheduler

    @property
    def settings(self) -> SchedulerSettings:
        """The settings of the first `Scheduler.of`."""
        assert self._settings is not None
        return self._settings

    def __repr__(self) -> str:
        state = "running" if self.running else "not running"
        return f"<Scheduler of {str(self._store.path)!r}, {state}>"

    # ---- scheduling ----

    def schedule(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        deliver_after: float | str | None = None,
        deliver_at: int | datetime.datetime | None = None,
        transaction: Transaction | None = None,
    ) -> Ticket:
        """Deliver a record after a delay, or at a time; it is durable when this returns.

        `deliver_after` is seconds, or text such as "30m".  `deliver_at` is milliseconds since 1970
        or an aware datetime; a time in the past is due at once.  With a `transaction` the record
        counts when the transaction commits.  Raises ScheduleError or UnknownTopicError.
        """
        delayed = self._delayed(topic, value, key, headers, partition, deliver_after, deliver_at)
        number = delayed.ticket.number
        generation = generation_of(number)
        if transaction is None:
            self._journal.append(generation, [delayed.encode()])()
        else:
            # Made now: a transaction writes only to partitions that exist.
            self._journal.log(generation)
            transaction.send_internal(DELAYED, generation, delayed.encode())
        return delayed.ticket

    def schedule_many(self, records: Iterable[Mapping[str, Any]]) -> list[Ticket]:
        """Schedule many records with few fsyncs; each is a mapping of the keywords of `schedule`.

        All are durable when this returns.  After an error or a crash, some may be scheduled.
        """
        tickets: list[Ticket] = []
        waiting: dict[int, list[Record]] = {}
        unsynced: dict[int, Callable[[], None]] = {}

        def write(generation: int) -> None:
            unsynced[generation] = self._journal.append(generation, waiting.pop(generation))

        try:
            for each in records:
                delayed = self._delayed(**_filled(each))
                generation = generation_of(delayed.ticket.number)
                waiting.setdefault(generation, []).append(delayed.encode())
                tickets.append(delayed.ticket)
                if len(waiting[generation]) >= MANY:
                    write(generation)
            for generation in [*waiting]:
                write(generation)
        finally:
            for finish in unsynced.values():
                finish()  # an fsync makes all earlier records of the partition durable
        return tickets

    def _delayed(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: Iterable[tuple[str, bytes | None]],
        partition: int | None,
        deliver_after: float | str | None,
        deliver_at: int | datetime.datetime | None,
    ) -> DelayedRecord:
        if topic in INTERNAL_TOPICS:
            raise InvalidNameError(f"{topic!r} is written by logstore only")
        _ = self._store[topic]  # raises UnknownTopicError
        if value is None and key is None:
            raise InvalidRecordError("a record without value is a tombstone, and needs a key")
        now = self._clock.time_ms()
        due = self._due(now, deliver_after, deliver_at)
        number = self._number(due, generation_for(due - now))
        made = Record(value, key=key, headers=headers, timestamp=0)  # checks the types
        return DelayedRecord(
            Ticket(number, topic), made.value, made.key, made.headers, partition, now
        )

    def _due(self, now: int, after: float | str | None, at: int | datetime.datetime | None) -> int:
        if (after is None) == (at is None):
            raise ScheduleError("give either deliver_after= or deliver_at=")
        due = now + duration_ms(after) if after is not None else time_ms(at)
        if after is not None and due < now:
            raise ScheduleError(f"a delay is not negative: {after!r}")
        if due - now > self.settings.max_delay_ms:
            raise ScheduleError(
                f"the delay of {due - now} ms is longer than max_delay={self.settings.max_delay!r}:"
                f" times are milliseconds, durations are seconds or text"
            )
        return max(0, due)

    def _number(self, due: int, generation: int) -> int:
        with self._numbering:
            if self._counter >= COUNTER_MAX:
                # Durable before the first id: no two runs give the same id.
                run = int(self._notes.get(*NOTE) or b"0") + 1
                self._notes.put(*NOTE, b"%d" % run)
                self._run, self._counter = run & 0xFFFFFFFF, -1
            self._counter += 1
            return ticket_number(due, self._run, self._counter, generation)

    # ---- pending records ----

    def cancel(self, ticket: Ticket | str) -> bool:
        """Cancel a ticket; return False if it is delivered, being delivered, or cancelled already.

        After True the record is never delivered.  True is also the answer for a ticket that is far
        in the future and was cancelled before or never existed: its log is not searched.  A ticket
        of an open transaction can be cancelled after the commit.
        """
        number = number_of(ticket)
        with self._lock, _Whole(self):
            agenda = self._caught_up()
            live = agenda.cancel(number)
            now = self._guarded.now_ms()
            if live is None and (number <= agenda.highest or number >> 64 <= now):
                live = self._search(number) is not None
            if live is False:
                return False
            # Under the lock: between the two steps, no load can read the ticket as live.
            finish = self._journal.append(generation_of(number), [tombstone(number)])
        finish()
        return True

    def reschedule(
        self,
        ticket: Ticket | str,
        *,
        deliver_after: float | str | None = None,
        deliver_at: int | datetime.datetime | None = None,
    ) -> Ticket:
        """Change the time of a pending record; return its new ticket.  The old one ends.

        Both happen in one transaction.  Raises UnknownTicketError if the record is not pending.
        """
        number = number_of(ticket)
        # No record is being delivered while this lock is held.
        with self._delivering:
            with self._lock:
                old = self._find(number)
            new = self._delayed(
                old.topic, old.value, old.key, old.headers, old.partition, deliver_after, deliver_at
            )
            for each in (number, new.ticket.number):
                self._journal.log(generation_of(each))
            with self._lock:
                live = self._caught_up().cancel(number)
            if live is False:
                raise UnknownTicketError(Ticket(number).id)  # cancelled by another thread
            with _Whole(self):
                self._courier.replace(old, new)
        return new.ticket

    def get(self, ticket: Ticket | str) -> DelayedRecord:
        """Return a pending record.  Raises UnknownTicketError if it is not pending.

        A record of the far future is found by a scan of the segments with its due time.
        """
        number = number_of(ticket)
        with self._lock:
            return self._find(number)

    def _find(self, number: int) -> DelayedRecord:
        """Return a pending record.  With the lock held."""
        agenda = self._caught_up()
        offset = agenda.find(number)
        if offset is None and number >= agenda.end:
            offset = self._search(number)
        record = None
        if offset is not None:
            record = self._journal.read(generation_of(number), [offset]).get(offset)
        if record is None:
            raise UnknownTicketError(Ticket(number).id)
        return DelayedRecord.decode(record)

    def _search(self, number: int) -> int | None:
        """Return the offset of a live ticket, by the log; None if there is none."""
        due, serial, found = number >> 64, number & LOW, None
        mine = generation_of(number)

        def wanted(generation: int, start: int, least: int | None, greatest: int) -> bool:
            return generation == mine and greatest >= due and (least is None or least <= due)

        for rows in self._journal.rows(wanted, mine):
            rows = rows.where((rows.due == due) & (rows.serial == serial))
            if rows.dead.any():
                return None
            found = int(rows.offset[0]) if len(rows) else found
        return found

    def count(self) -> int:
        """Return how many records are pending.  It reads the log once per `loaded_max` of them."""
        with self._lock:
            return sum(map(len, self._windows()))

    def pending(
        self,
        topic: str | None = None,
        before: int | datetime.datetime | None = None,
        limit: int = 100,
    ) -> list[DelayedRecord]:
        """Return at most `limit` pending records, in the order of delivery.

        `topic` selects those of one topic, `before` those that are due before a time.
        """
        end = EVERYTHING if before is None else max(0, time_ms(before)) << 64
        found: list[DelayedRecord] = []
        with self._lock:
            for agenda in self._windows():
                for number, offset in agenda:
                    if number >= end or len(found) >= limit:
                        return found
                    record = self._journal.read(generation_of(number), [offset])[offset]
                    delayed = DelayedRecord.decode(record)
                    if topic is None or delayed.topic == topic:
                        found.append(delayed)
        return found

    def _windows(self) -> Iterator[Agenda]:
        """Yield all live tickets, window by window.  With the lock held."""
        self._caught_up()
        window = Agenda(self.settings.loaded_max)
        while window.end < EVERYTHING:
            end = window.end
            window = Agenda(self.settings.loaded_max)
            window.end = end
            self._load(window)
            yield window

    # ---- the agenda ----

    def _caught_up(self, now: int | None = None) -> Agenda:
        """Return the agenda after it has taken in all new rows.  With the lock held."""
        self._store.access.check_usable()
        agenda = self._agenda
        with _Whole(self):
            if agenda is None or agenda.end == 0:
                self._journal.begin()
                agenda = agenda or Agenda(self.settings.loaded_max)
            for rows in self._journal.follow():
                agenda.take_in(rows)
            until = (self._guarded.now_ms() if now is None else now) + round(
                self.settings.lookahead * 1000
            )
            if agenda.wants_load(until):
                self._load(agenda)
            self._agenda = agenda
        return agenda

    def _forget(self) -> None:
        """Make the agenda again at its next use; what is being delivered stays known."""
        with self._lock:
            if self._agenda is not None:
                fresh = Agenda(self.settings.loaded_max)
                fresh.adopt(self._agenda)
                self._agenda = fresh

    def _load(self, agenda: Agenda) -> None:
        first = agenda.end >> 64

        def wanted(generation: int, start: int, least: int | None, greatest: int) -> bool:
            if least is not None and least > agenda.end >> 64:
                agenda.skip(generation, start)
                return False
            return greatest >= first

        agenda.load(self._journal.rows(wanted))

    # ---- delivering ----

    def run_once(self, now: int | None = None) -> int:
        """Deliver all records that are due at `now`, by default the guarded time; return how many.

        For tests with a ManualClock, and for programs that have their own loop.
        """
        now = self._guarded.now_ms() if now is None else now
        delivered = 0
        with self._delivering:
            if self._since is None:
                self._since = now
            while True:
                taken = self._deliver_batch(now)
                if not taken:
                    return delivered
                delivered += taken

    def _deliver_batch(self, now: int) -> int:
        taken: list[int] = []
        try:
            with self._lock:
                agenda = self._caught_up(now)
                agenda.give_back_all()  # of a round that an interrupt stopped
                rows = agenda.take(now, self.settings.batch_max)
                taken = [number for number, _ in rows]
                records = self._read(rows)
            if records:
                self._courier.deliver(records, self._refused)
        except BaseException:
            with self._lock:
                if self._agenda is not None:
                    self._agenda.give_back(taken)
            raise
        with self._lock:
            agenda.settle(taken)
            if self._agenda is not None:
                self._agenda.settle(taken)
            self._reclaimed += len(taken)
            if self._reclaimed >= RECLAIM_EVERY:
                self._reclaim()
        return len(taken)

    def _read(self, rows: list[tuple[int, int]]) -> list[DelayedRecord]:
        """Return the records of tickets, in their order.  With the lock held."""
        offsets: dict[int, list[int]] = {}
        for number, offset in rows:
            offsets.setdefault(generation_of(number), []).append(offset)
        found = {each: self._journal.read(each, wanted) for each, wanted in offsets.items()}
        return [
            DelayedRecord.decode(found[generation_of(number)][offset]) for number, offset in rows
        ]

    def _refused(self, record: DelayedRecord) -> str | None:
        """Return the reason for which a late record is not delivered; see `Courier.deliver`."""
        late_ms = self.settings.late_ms()
        since = self._since
        if late_ms is None or since is None or record.due_ms >= since - late_ms:
            return None
        if self.settings.late == "skip":
            return ""
        return f"late: it was due {since - record.due_ms} ms before the scheduler ran"

    def _reclaim(self) -> None:
        """Delete segments that have only ended tickets.  With the lock held."""
        self._reclaimed = 0
        agenda = self._caught_up()
        for generation in range(3):
            self._journal.trim(generation, agenda.first_live(generation))

    # ---- the thread ----

    @property
    def running(self) -> bool:
        """Return whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> Self:
        """Deliver due records in a thread until `stop`.  Does nothing if the thread runs."""
        if not self.running:
            self._store.access.check_writable()
            self._stopped = Gate()
            self._since = self._guarded.now_ms()
            thread = threading.Thread(
                target=_run, args=(weakref.ref(self), self._stopped, self._wake),
                name="logstore scheduler", daemon=True,
            )  # fmt: skip
            uninterrupted(thread.start)
            self._thread = thread
        return self

    def stop(self) -> None:
        """End the thread and wait for it; a batch that is being delivered is finished first."""
        self._stopped.open()
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            self._thread = None
        self._since = None

    def close(self) -> None:
        """Stop delivering.  The store calls it when it is closed."""
        self.stop()
        with self._delivering:
            self._courier.close()
        self._journal.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.stop()

    def _round(self) -> float:
        """Deliver what is due; return the seconds until the next round.  For the thread."""
        try:
            self.run_once()
            self.failure = None
        except Exception as error:
            if self._store.closed:
                self._stopped.open()
            else:
                self.failure = error
                log.exception("delivering failed; it is tried again in %g s", RETRY)
            return RETRY
        with self._lock:
            due = None if self._agenda is None else self._agenda.next_due_ms()
        if due is None:
            return LONGEST_SLEEP
        # Records that become due within batch_ms are delivered in the same transaction.
        left = due + self.settings.batch_ms - self._guarded.now_ms()
        return min(max(0.0, left / 1000), LONGEST_SLEEP)


class _Whole:
    """Makes the scheduler forget its agenda if the block raises: a change may be half made."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._scheduler._forget()


def _run(scheduler: weakref.ref[Scheduler], stopped: Gate, wake: Wake) -> None:
    """Deliver until stopped.  The function of the thread.

    While it sleeps it holds only the weak reference, so that the Scheduler can be collected.
    """
    while not stopped.opened:
        this = scheduler()
        if this is None:
            return
        seconds, pause = this._round(), this.settings.batch_ms / 1000
        del this
        if wake.wait(seconds):
            stopped.wait(pause)  # many appends, and our own tombstones, cause one round


def _filled(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of `_delayed`."""
    filled = {
        "topic": None, "value": None, "key": None, "headers": (), "partition": None,
        "deliver_after": None, "deliver_at": None, **given,
    }  # fmt: skip
    if len(filled) > 7 or not {"topic", "value"} <= given.keys():
        raise TypeError(f"a record is a mapping of the keywords of schedule, not {given!r}")
    return filled


def time_ms(when: object) -> int:
    """Return a time as milliseconds; raise ScheduleError if it is neither int nor aware."""
    if isinstance(when, datetime.datetime) and when.tzinfo is not None:
        epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        # Rounded up: a record is never delivered early.
        return -((epoch - when) // datetime.timedelta(milliseconds=1))
    if isinstance(when, int) and not isinstance(when, bool):
        return when
    raise ScheduleError(f"a time is milliseconds since 1970 or an aware datetime, not {when!r}")
