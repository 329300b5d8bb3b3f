"""Control: the thread that reads, decides, commits and rebalances for one Workers.

One turn: take the outcomes that need a decision, commit if it is due, poll as much as there is room
for, and wait for the bell until the next time-out.  It owns the Consumer and the Producer, and
calls no handler.

A partition is held from `_load` to its release.  Before its first record starts, a commit marks it
as not closed cleanly: if the process ends without another commit, the next owner puts the records
on probation.

Other threads call `request_stop` and read `idle`, `ended` and `error`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, cast

from logstore.consumer.consumer import Consumer
from logstore.coordinators.offset_records import CommittedOffset, TopicPartition
from logstore.errors import CorruptLogError, UnknownTopicError
from logstore.record import Record
from logstore.store.store import Store
from logstore.work_errors import DrainTimeoutError, StuckWorkersError
from logstore.workers.committing import Committer
from logstore.workers.context import timed_out
from logstore.workers.deciding import Again, Policy
from logstore.workers.desk import Desk, Pool
from logstore.workers.items import Failed, Item, Work
from logstore.workers.progress import BadProgressError, Place, Progress, is_progress
from logstore.workers.running import RunningStrands

__all__ = ["Control", "Settings"]

log = logging.getLogger("logstore.workers")

POLL_RECORDS = 500
POLLS = 8  # in one turn; then outcomes are looked at again
RETRY_SECONDS = 0.1  # after the group refused a commit that records wait for
PROBATION_RECORDS = 16  # on probation at once
JUMP = 1000  # finished offsets for which a seek is worth it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one Workers; times are seconds."""

    group_id: str
    order: str
    key: Callable[[Record], Hashable] | None
    commit_interval: float
    commit_records: int
    timeout: float | None
    abandon_after: float | None
    stuck_max: int
    revoke_timeout: float
    drain_timeout: float
    committed_only: bool  # isolation="read_committed"


class Control:
    """The control thread of one Workers.  `run` is its body."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        desk: Desk,
        policy: Policy,
        registry: RunningStrands,
        number: int,
        make_consumer: Callable[..., Consumer],
    ) -> None:
        self._store = store
        self._settings = settings
        self._desk = desk
        self._strands = desk.strands
        self._bell = desk.bell
        self._clock = desk.clock
        self._policy = policy
        self._registry = registry
        self._consumer = make_consumer(
            auto_commit=False, bell=desk.bell, on_assigned=self._assigned,
            on_revoked=self._revoked, on_lost=self._lost,
        )  # fmt: skip
        self._committer = Committer(
            store, desk, self._consumer, f"logstore.workers.{settings.group_id}.{number}"
        )
        self.pool: Pool
        self._unloaded: set[TopicPartition] = set()  # assigned, and not held yet
        self._paused: set[TopicPartition] = set()
        self.stopped: dict[TopicPartition, str] = {}  # damaged partitions, with the reason
        self._commit_due = 0.0
        self._mean_size = 100.0
        self._refused = False  # the last commit of starts on probation
        self._more = False  # the last turn stopped polling although there were records
        self._busy: list[Work] = []  # handlers that still ran at the end
        self.last_error = ""
        self.paces = (0.0, 0, 0.0)  # time and count of finished records, and their rate
        self.turn = 0  # the number of the turn that was begun last
        self.idle = False
        self.idle_turn = 0  # of the last turn that has set `idle`
        self.stopping = self.hurried = self.ended = False
        self.drain_deadline: float | None = None
        self.error: BaseException | None = None

    # ---- for other threads ----

    def request_stop(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """End after the handlers that run, or without waiting for them."""
        if timeout is not None:
            self.drain_deadline = time.monotonic() + timeout
        if not drain:
            self.hurried = True
        # Threads look at it before each record.  No lock: a signal handler may call this.
        self.stopping = self._strands.stopping = True
        self._bell.ring()

    def set_paused(self, partitions: Iterable[TopicPartition], *, paused: bool) -> None:
        """Start no record of these partitions, or again; also if they are assigned later."""
        with self._desk.lock:
            chosen = set(partitions)
            self._paused = self._paused | chosen if paused else self._paused - chosen
            self._strands.pause(chosen, paused=paused)
        self._bell.ring()

    # ---- the thread ----

    def run(self) -> None:
        """Turn until a stop is requested or an error is raised; then drain, commit and leave."""
        try:
            try:
                self._commit_due = self._clock.monotonic() + self._settings.commit_interval
                while not self.stopping:
                    self._bell.clear()
                    wait = self._turn()
                    self._desk.tell_waiters()
                    if not self.stopping:
                        self._bell.wait(wait)
            except BaseException as error:  # noqa: BLE001  `close` and `wait` raise it
                self.error = error
            self._end()
        except BaseException as error:  # noqa: BLE001
            if self.error is None:
                self.error = error
        finally:
            self.ended = True
            self._desk.tell_waiters()

    def _turn(self) -> float | None:
        """Do all that can be done now; return for how long to sleep unless the bell rings."""
        self.turn += 1
        now = self._clock.monotonic()
        self._settle(now)
        self._commit_if_due(now)
        self._read()
        self._count_starts()
        watch = self.pool.reclaim(now)
        self.pool.nudge()  # after all that makes strands ready
        self._look_if_idle()
        self._note_pace(now)
        if self._more:
            return 0.0
        with self._desk.lock:
            due = [watch, self._next_time_out(), self._strands.next_due()]
            if self._refused:
                due.append(now + RETRY_SECONDS)
            if self._strands.leaving or any(held.dirty for held in self._strands.held.values()):
                due.append(self._commit_due)
        times = [each for each in due if each is not None]
        return max(0.0, min(times) - self._clock.monotonic()) if times else None

    def _settle(self, now: float) -> None:
        """Take outcomes that need a decision, time-outs, and records whose delay is over."""
        strands, inherited = self._strands, self._desk.inherited
        with self._desk.lock:
            while inherited:
                strands.inherit(*inherited.popleft())
            strands.wake(now)
        self._end_late(now)
        with self._desk.lock:
            failures = strands.collect()
        for item, error in failures:
            self._decide(item, error, now)

    def _decide(self, item: Item, error: BaseException, now: float) -> None:
        self.last_error = f"{item.partition} offset {item.offset}: {type(error).__name__}: {error}"
        verdict = self._policy.decide(item.record, error, item.attempts + 1)
        if isinstance(verdict, Again):
            log.info("%s; attempt %d, again after %g s",
                     self.last_error, item.attempts + 1, verdict.after)  # fmt: skip
            with self._desk.lock:
                self._strands.retry(item, now + verdict.after)
        else:
            self.error = self.error or verdict.error
            self.stopping = self._strands.stopping = True

    # ---- time-outs ----

    def _end_late(self, now: float) -> None:
        limit, abandon = self._settings.timeout, self._settings.abandon_after
        if limit is None:
            return
        with self._desk.lock:
            running = [(work, work.started_at) for work in self._strands.running]
        for work, since in running:
            if since is None or now - since < limit:
                continue
            if not work.timed_out:
                # Before the context is looked for: the handler's thread looks at it after that.
                work.timed_out = True
                if work.context is not None:
                    work.context.cancel()
                if not work.foreign:
                    self.pool.overdue(work)
            if abandon is not None and now - since >= limit + abandon:
                log.warning("%s: abandoned after %.1f s; its handler may still run",
                            work, now - since)  # fmt: skip
                with self._desk.lock:
                    self._strands.finish(work, Failed(timed_out(work, limit)))
        stuck = len(self.pool.stuck)
        if stuck > self._settings.stuck_max:
            raise StuckWorkersError(
                f"{stuck} handlers took longer than {limit:g} s and did not return; stuck_max is "
                f"{self._settings.stuck_max}: see stuck()"
            )

    def _next_time_out(self) -> float | None:
        limit, abandon = self._settings.timeout, self._settings.abandon_after
        if limit is None:
            return None
        times = []
        for work in self._strands.running:
            if not work.timed_out:
                times.append((work.started_at or self._clock.monotonic()) + limit)
            elif abandon is not None and work.started_at is not None:
                times.append(work.started_at + limit + abandon)
        return min(times, default=None)

    # ---- reading ----

    def _read(self) -> None:
        """Poll while there is room, and hand the records to the strands."""
        self._more = False
        for _ in range(POLLS):
            partitions, most = self._room()
            records = self._poll(partitions, most)
            self._load()
            if not records:
                break
            for partition, group in itertools.groupby(records, _partition_of):
                self._offer(partition, list(group))
            self.pool.nudge()
        else:
            self._more = True
        self._note_positions()

    def _room(self) -> tuple[list[TopicPartition], int]:
        """Return the partitions to read, and how many records there is room for in each."""
        strands = self._strands
        rooms: dict[TopicPartition, int] = {}
        with self._desk.lock:
            least = max(1, strands.limits.records // 4)
            for partition, held in strands.held.items():
                room = strands.room(partition)
                # Not for every single record: wait for a quarter, unless nothing waits.
                if partition not in self.stopped and (room >= least or (room and not held.waiting)):
                    rooms[partition] = room
            self._desk.hungry = len(rooms) < len(strands.held)
            left = strands.limits.bytes - strands.bytes
        most = min(rooms.values(), default=1)
        return list(rooms), max(1, min(POLL_RECORDS, most, int(left / self._mean_size)))

    def _poll(self, partitions: list[TopicPartition], most: int) -> list[Record]:
        try:
            found = self._consumer.poll(partitions=partitions, max_records=most, timeout=0)
            return cast("list[Record]", found)
        except CorruptLogError:
            # Find the damaged partition: the others go on.
            for partition in partitions:
                try:
                    found = self._consumer.poll(partitions=[partition], max_records=most, timeout=0)
                except CorruptLogError as error:
                    log.error("%s: stopped reading: %s", partition, error)
                    self.stopped[partition] = str(error)
                else:
                    if found:
                        return cast("list[Record]", found)
            return []

    def _offer(self, partition: TopicPartition, records: list[Record]) -> None:
        order, key = self._settings.order, self._settings.key
        rows: list[tuple[Record, Any]]
        if order == "none":
            rows = [(record, None) for record in records]
        elif order == "partition":
            rows = [(record, "") for record in records]
        elif key is None:
            rows = [(record, record.key) for record in records]
        else:
            rows = [(record, key(record)) for record in records]
        with self._desk.lock:
            before = self._strands.bytes
            refused = self._strands.offer(partition, rows)
            size = max(0, self._strands.bytes - before) / len(records)
        self._mean_size += (max(1.0, size) - self._mean_size) / 8
        if refused is not None:
            self._consumer.seek(partition, refused)

    def _note_positions(self) -> None:
        """Pass gaps without records, and jump over records that are finished."""
        for partition, position in self._consumer.positions().items():
            with self._desk.lock:
                if partition not in self._strands.held:
                    continue
                needed = self._strands.read_to(partition, position)
            if needed - position > JUMP:
                self._consumer.seek(partition, needed)
                self._more = True

    def _look_if_idle(self) -> None:
        """Set `idle`: no record is open, and every partition was read to its end."""
        with self._desk.lock:
            held = {tp: each.read for tp, each in self._strands.held.items()
                    if not each.paused}  # fmt: skip
            busy = len(self._strands) or any(
                each.restored and not each.paused for each in self._strands.held.values()
            )
        if busy or self._unloaded or self._more or not self._consumer.settled:
            self.idle = False
            return
        self.idle = all(
            read >= self.end_of(tp) for tp, read in held.items() if tp not in self.stopped
        )
        if self.idle:
            self.idle_turn = self.turn

    def end_of(self, partition: TopicPartition) -> int:
        """Return the end of the records of a partition that may be read; 0 if it was deleted."""
        try:
            found = self._store[partition.topic][partition.partition]
        except (UnknownTopicError, IndexError):
            return 0
        if self._settings.committed_only:
            return found.last_stable_offset
        return found.high_watermark

    def _note_pace(self, now: float) -> None:
        since, before, _ = self.paces
        if now - since >= 1.0:
            count = sum(self._strands.counts.closed.values())
            self.paces = now, count, (count - before) / (now - since) if since else 0.0

    # ---- committing ----

    def _commit_if_due(self, now: float) -> None:
        strands, settings = self._strands, self._settings
        with self._desk.lock:
            enough = strands.unsaved + strands.leaving >= settings.commit_records
            # Outputs must not take all the room until the next commit.
            crowded = strands.leaving and (
                2 * strands.leaving >= strands.limits.records * len(strands.held)
                or 2 * strands.bytes >= strands.limits.bytes
                # A caller of `wait` waits for these outputs, and for nothing else.
                or (self._desk.waiters and not strands.running and not strands.waiting)
            )
        if enough or crowded or now >= self._commit_due:
            self._commit_due = now + settings.commit_interval
            self._committer.commit()

    def _count_starts(self) -> None:
        """Let records on probation start, after a commit that counts their starts."""
        with self._desk.lock:
            if not self._strands.probation.waits:
                return
            counted = self._strands.count_starts(PROBATION_RECORDS)
        self._refused = counted and not self._committer.commit(durability="os")
        if not self._refused:
            with self._desk.lock:
                self._strands.open_gate()
            self._settle(self._clock.monotonic())  # records with too many starts have failed

    # ---- partitions ----

    def _assigned(self, partitions: list[TopicPartition]) -> None:
        self._unloaded.update(partitions)

    def _load(self) -> None:
        """Hold the assigned partitions whose positions are known."""
        if not self._unloaded:
            return
        positions = self._consumer.positions()
        self._unloaded &= set(self._consumer.assignment())
        for partition in sorted(self._unloaded & set(positions)):
            committed = self._consumer.committed(partition)[partition]
            topic = self._store[partition.topic]
            place = Place(self._settings.group_id, topic.id, partition.partition)
            progress, unclean = _restored(
                committed, place, positions[partition], topic[partition.partition].end_offset
            )
            works = self._registry.claim(
                self._settings.group_id, partition, self._desk,
                functools.partial(self._desk.inherit, partition),
            )  # fmt: skip
            with self._desk.lock:
                self._strands.assign(partition, place, progress, probation=unclean)
                self._strands.pause([partition] if partition in self._paused else [], paused=True)
                self._strands.adopt(partition, works)
            self.stopped.pop(partition, None)
            self._unloaded.discard(partition)
            # Before a record of it starts: not closed cleanly from now on.
            self._committer.commit(durability="os")

    def _revoked(self, partitions: list[TopicPartition]) -> None:
        """Wait for the handlers of these partitions, commit, and give the partitions up."""
        with self._desk.lock:
            self._strands.revoke(partitions)
        self._wait_for_handlers(partitions, time.monotonic() + self._settings.revoke_timeout)
        if not self._committer.commit(clean=partitions):
            log.warning("%s: records are processed again: %s",
                        self._settings.group_id, ", ".join(map(str, partitions)))  # fmt: skip
        self._lost(partitions)
        self._bell.ring()  # `_wait_for_handlers` cleared it: the turn must not sleep now

    def _wait_for_handlers(
        self, partitions: list[TopicPartition] | None, deadline: float
    ) -> list[Work]:
        """Wait until our handlers of these partitions, or all, have ended; return those that run.

        Taken starts that did not begin are given back by their threads.
        """
        with self._desk.lock:
            self._desk.ring_always = True
        try:
            while True:
                self._bell.clear()
                now = self._clock.monotonic()
                self._settle(now)
                watch = self.pool.reclaim(now)
                self.pool.nudge()  # other partitions go on
                with self._desk.lock:
                    running = self._strands.own_running(partitions)
                    due = self._next_time_out()
                left = min(deadline, self.drain_deadline or deadline) - time.monotonic()
                if not running or left <= 0 or self.hurried:
                    return running
                naps = [each - now for each in (watch, due) if each is not None]
                self._bell.wait(max(0.0, min([left, *naps])))
        finally:
            with self._desk.lock:
                self._desk.ring_always = False

    def _lost(self, partitions: list[TopicPartition]) -> None:
        """Give partitions up without a commit."""
        self._unloaded.difference_update(partitions)
        for partition in partitions:
            self._registry.leave(self._settings.group_id, partition, self._desk)

    # ---- the end ----

    def _end(self) -> None:
        """Wait for handlers, commit, give all partitions up, and leave the group."""
        try:
            with self._desk.lock:
                self._strands.stopping = True
            try:
                deadline = time.monotonic() + self._settings.drain_timeout
                self._busy = self._wait_for_handlers(None, deadline)
            except StuckWorkersError as error:
                self.error = self.error or error
                with self._desk.lock:
                    self._busy = self._strands.own_running()
            if not self._store.closed:
                with self._desk.lock:
                    held = list(self._strands.held)
                self._committer.commit(clean=held)
                self._lost(held)
        finally:
            self.pool.close()
            try:
                self._committer.close()
            finally:
                self._consumer.close()

    def raise_error(self) -> None:
        """Raise the error that ended the thread, or DrainTimeoutError if handlers still ran."""
        if self.error is not None:
            raise self.error
        if self._busy and not self.hurried:
            names = ", ".join(f"{w.item.partition} offset {w.item.offset}" for w in self._busy)
            error = DrainTimeoutError(
                f"{len(self._busy)} handlers still run: {names}; these records are processed again"
            )
            error.records = tuple(work.record for work in self._busy)
            raise error


def _partition_of(record: Record) -> TopicPartition:
    return TopicPartition(cast(str, record.topic), cast(int, record.partition))


def _restored(
    committed: CommittedOffset | None, place: Place, position: int, end: int
) -> tuple[Progress, bool]:
    """Return the progress to start from, and whether the owner before did not end cleanly."""
    if committed is None or committed.offset != position or not is_progress(committed.metadata):
        return Progress(position), False
    try:
        progress = Progress.decode(committed.metadata, place, committed.offset, end=end)
    except BadProgressError as error:
        log.warning("%s: the progress of partition %d at offset %d is ignored: %s; records may be "
                    "processed again", place.group, place.partition, position, error)  # fmt: skip
        return Progress(position), True
    return progress, not progress.clean
