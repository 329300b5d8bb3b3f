"""Strands: which record is processed next, and which are finished.

A *strand* is a queue of records that must be processed one after the other: those of a key, of a
partition, or a single record.  Each key has a strand of its own, so a slow key delays no other.

    state of a record   waiting -> running -> closed
                        running -> failed -> blocked until a time -> waiting
                        running -> leaving -> closed, when the transaction of its outputs commits
    state of a strand   idle (forgotten) | ready (once in `_ready`) | busy (a record runs, has
                        failed, or is blocked)

Order: a strand is in `_ready` at most once, and leaves it to be busy.  Only the end of its running
record makes it ready again.  Its queue is filled in the order of offsets, by the one reader of the
partition.  If the partition is released while a handler runs, the next owner gets that start with
`adopt`, and keeps the strand busy until the handler ends.

No record is lost: a record is open in the Progress of its partition from `offer` until its handler
has returned; a record with outputs until the transaction that has the outputs and the Progress.

Pure: no I/O, no thread, and the time is an argument.  Threads that share it hold one lock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence

from logstore.coordinators.offset_records import CommittedOffset, TopicPartition
from logstore.record import Record
from logstore.workers.items import (
    DONE,
    Bucket,
    Counts,
    Failed,
    Held,
    Item,
    Limits,
    Outcome,
    Outputs,
    Probation,
    Snapshot,
    State,
    Strand,
    Work,
    poison,
    size_of,
)
from logstore.workers.progress import Place, Progress

__all__ = ["Strands"]


class Strands:
    """The open records of all partitions that are assigned to one Workers."""

    def __init__(self, limits: Limits, *, rate: float | None = None) -> None:
        self.limits = limits
        self.counts = Counts()
        self.bytes = 0  # of open records and of outputs
        self.waiting = 0
        self.running: dict[Work, None] = {}
        self.unsaved = 0  # records that were closed since the last commit
        self.stopping = False  # no record starts any more
        self.held: dict[TopicPartition, Held] = {}
        self._ready: deque[Strand] = deque()
        self.probation = Probation(limits.crashes)
        self._blocked: list[tuple[float, int, Item]] = []  # a heap by time
        self._failed: deque[tuple[Item, BaseException]] = deque()
        self._leaving: dict[Item, None] = {}  # in the order in which their handlers ended
        self._numbers = itertools.count()
        self._bucket = None if rate is None else Bucket(rate)

    # ---- partitions ----

    def assign(self, partition: TopicPartition, place: Place, progress: Progress, *,
               probation: bool = False) -> None:  # fmt: skip
        """Take a partition.  `probation`: count each start of the records that may have ended the
        last process."""
        assert partition not in self.held
        held = self.held[partition] = Held(partition, place, progress)
        if probation:
            held.probation_end = progress.seen + self.limits.records

    def adopt(self, partition: TopicPartition, works: Iterable[Work]) -> None:
        """Keep the strands of these records busy until `inherit`: their handlers still run."""
        held = self.held[partition]
        for work in works:
            held.foreign[work.item.offset] = work
            key = work.item.strand.key
            if key is not None:
                # From now on: a record before it may have to be processed again.
                held.strands.setdefault(key, Strand(held, key)).busy += 1

    def inherit(self, partition: TopicPartition, offset: int, outcome: Outcome) -> None:
        """Take the outcome of a handler that the owner before us had started."""
        held = self.held.get(partition)
        if held is None or offset not in held.foreign:
            return
        item = held.items.get(offset)
        if item is not None:
            assert item.work is not None
            self.finish(item.work, outcome)
            return
        self._free(held, held.foreign.pop(offset))
        if offset >= held.read:
            held.foreign[offset] = outcome  # taken when the reader reaches the record

    def _free(self, held: Held, foreign: Work | Outcome) -> None:
        """Undo what `adopt` did to a strand."""
        if isinstance(foreign, Work) and foreign.item.strand.key is not None:
            self._step(held.strands[foreign.item.strand.key])

    def pause(self, partitions: Iterable[TopicPartition], *, paused: bool) -> None:
        """Start no record of these partitions, or again."""
        for partition in partitions:
            held = self.held.get(partition)
            if held is None:
                continue
            held.paused = paused
            if not held.closed:
                strands, held.aside = held.aside, []
                for strand in strands:
                    self._make_ready(strand)

    def revoke(self, partitions: Iterable[TopicPartition]) -> None:
        """Start no record of these partitions: `release` follows when their handlers have ended."""
        for partition in partitions:
            if partition in self.held:
                self.held[partition].revoking = True

    def own_running(self, partitions: Collection[TopicPartition] | None = None) -> list[Work]:
        """Return the starts of our own handlers, for all or for these partitions."""
        return [work for work in self.running if not work.foreign
                and (partitions is None or work.item.partition in partitions)]  # fmt: skip

    def release(self, partition: TopicPartition) -> list[Work]:
        """Forget a partition; return the starts whose handlers still run, also adopted ones."""
        held = self.held.pop(partition, None)
        if held is None:
            return []
        held.released = True
        works = []
        for item in held.items.values():
            self._forget(item)
            if item.work is not None:
                del self.running[item.work]
                if item.offset not in held.foreign:
                    works.append(item.work)
            item.work = None  # `finish` refuses the start from now on
            item.state = State.CLOSED
        works += [each for each in held.foreign.values() if isinstance(each, Work)]
        self.waiting -= held.waiting
        self._ready = deque(strand for strand in self._ready if strand.held is not held)
        self.probation.drop(held)
        return works

    def _forget(self, item: Item) -> None:
        """Subtract what an open record counts for."""
        self.bytes -= item.size
        self._leaving.pop(item, None)

    # ---- reading ----

    def room(self, partition: TopicPartition) -> int:
        """Return how many records of a partition may be offered; bytes are counted by `offer`."""
        held = self.held.get(partition)
        if held is None or held.closed or self.stopping or self.bytes >= self.limits.bytes:
            return 0
        return max(0, self.limits.records - len(held.items))

    def offer(
        self, partition: TopicPartition, records: Iterable[tuple[Record, Hashable]]
    ) -> int | None:
        """Add records of a partition, each with its key; in the order of offsets, as read.

        Return None, or the offset of the first record for which there is no room: the reader has
        to read it again later.
        """
        held = self.held[partition]
        progress = held.progress
        for record, key in records:
            offset = record.offset
            if offset < held.read:
                self._rewind(held, offset)
            self._pass(held, offset)
            size = size_of(record)
            listed = offset < progress.seen
            if listed and offset not in progress:
                held.read = offset + 1  # finished before the commit that we started from
                continue
            # A record that is larger than all the room is processed alone.
            if self.bytes and self.bytes + size > self.limits.bytes:
                return offset
            if len(held.items) >= self.limits.records:
                return offset
            if listed:
                held.restored.popleft()
            elif progress.fits(offset):
                progress.add(offset)
            else:
                return offset
            held.read = offset + 1
            self._enter(held, record, key, size)
        return None

    def _pass(self, held: Held, offset: int) -> None:
        """Close listed offsets below `offset`: the log has no record there any more."""
        while held.restored and held.restored[0] < offset:
            gone = held.restored.popleft()
            held.progress.finish(gone)
            held.changes += 1

    def _rewind(self, held: Held, offset: int) -> None:
        """Forget the records from `offset` on: the log was truncated, and has others there."""
        strands = {}
        for gone in held.progress.cut(offset):
            item = held.items.pop(gone, None)
            if item is None:
                continue
            self._forget(item)
            strand = item.strand
            strands[id(strand)] = strand
            if item.state is State.WAITING:
                strand.queue.remove(item)
                held.waiting -= 1
                self.waiting -= 1
            elif item.state is not State.LEAVING:
                self._stop_work(item)
                strand.busy -= 1
            item.state = State.CLOSED
        for strand in strands.values():
            self._unlist(strand)
            strand.busy += 1
            self._step(strand)
        held.restored = deque(each for each in held.restored if each < offset)
        held.read = offset
        held.changes += 1

    def _unlist(self, strand: Strand) -> None:
        """Remove a strand from the lists of those that may start."""
        self.probation.unlist(strand)
        for listed in (self._ready, strand.held.aside):
            if strand in listed:
                listed.remove(strand)

    def read_to(self, partition: TopicPartition, position: int) -> int:
        """Note the reader's position; return the offset from which on it has to read.

        The returned offset is greater if all records up to it are finished.
        """
        held = self.held[partition]
        if position > held.read:
            self._pass(held, position)
            held.read = position
            if position > held.progress.seen:
                held.progress.advance(position)
                held.changes += 1
        return held.progress.next_open(held.read) if held.read < held.progress.seen else position

    def _enter(self, held: Held, record: Record, key: Hashable, size: int) -> None:
        strand = None if key is None else held.strands.get(key)
        if strand is None:
            strand = Strand(held, key)
            if key is not None:
                held.strands[key] = strand
        # A record with counted starts is on probation even if the last owner ended cleanly.
        probation = record.offset < held.probation_end or record.offset in held.progress.starts
        item = Item(record, strand, size, probation=probation)
        held.items[item.offset] = item
        self.bytes += size
        foreign = held.foreign.get(item.offset)
        if foreign is not None:
            self._enter_running(item, foreign)
            return
        held.waiting += 1
        self.waiting += 1
        strand.queue.append(item)
        if len(strand.queue) == 1 and not strand.busy:
            self._make_ready(strand)

    def _enter_running(self, item: Item, foreign: Work | Outcome) -> None:
        """Enter a record whose handler runs, or has ended, for the owner before us."""
        work = item.work = Work(item)
        work.foreign = True
        item.state = State.RUNNING
        self._unlist(item.strand)
        item.strand.busy += 1
        item.strand.held.running += 1
        self.running[work] = None
        self._free(item.strand.held, foreign)
        if isinstance(foreign, Work):
            work.started_at, work.where = foreign.started_at, foreign.where
            work.context, work.timed_out = foreign.context, foreign.timed_out
        else:
            self.finish(work, foreign)

    # ---- starting ----

    def _make_ready(self, strand: Strand) -> None:
        head = strand.queue[0]
        if strand.held.closed:
            strand.held.aside.append(strand)
        elif head.probation and not head.counted:
            self.probation.gated.append(strand)
        else:
            self._ready.append(strand)

    def take(self, limit: int, now: float) -> list[Work]:
        """Return up to `limit` starts.  Those of one strand have to run in this order."""
        works: list[Work] = []
        if self.stopping:
            return works
        while self._ready and len(works) < limit:
            strand = self._ready[0]
            if strand.held.closed:
                strand.held.aside.append(self._ready.popleft())
                continue
            if self._bucket is not None and not self._bucket.take(now):
                break
            self._ready.popleft()
            self._start_head(strand, works)
            queue = strand.queue
            while queue and len(works) < limit and self._bucket is None:
                if queue[0].probation:
                    break  # its start is not counted
                self._start_head(strand, works)
        return works

    def _start_head(self, strand: Strand, works: list[Work]) -> None:
        item = strand.queue.popleft()
        strand.busy += 1
        strand.held.waiting -= 1
        strand.held.running += 1
        self.waiting -= 1
        work = item.work = Work(item)
        item.state = State.RUNNING
        self.running[work] = None
        self.counts.started += 1
        works.append(work)

    def put_back(self, works: Sequence[Work]) -> None:
        """Undo `take` for starts that did not begin."""
        for work in works:
            item = work.item
            if item.work is not work:
                continue  # its partition was released
            self._stop_work(item)
            self.counts.started -= 1
            self._wait_first(item)

    def _stop_work(self, item: Item) -> None:
        """Note that no handler has the item now."""
        if item.work is not None:
            del self.running[item.work]
            item.work = None
            item.strand.held.running -= 1
            item.strand.held.foreign.pop(item.offset, None)
        if item.counted:
            item.counted = False
            if item.offset in item.strand.held.progress:
                item.strand.held.progress.end_start(item.offset)
                item.strand.held.changes += 1

    def _wait_first(self, item: Item) -> None:
        """Put a record back to its place in its strand, which is the head or near to it."""
        strand, queue = item.strand, item.strand.queue
        item.state = State.WAITING
        at = next((i for i, each in enumerate(queue) if each.offset > item.offset), len(queue))
        queue.insert(at, item)
        strand.held.waiting += 1
        self.waiting += 1
        self._step(strand)

    def _step(self, strand: Strand) -> None:
        """One record of a strand is not busy any more: make the strand ready, or forget it."""
        strand.busy -= 1
        if strand.busy:
            return
        if strand.queue:
            self._make_ready(strand)
        elif strand.key is not None:
            strand.held.strands.pop(strand.key, None)

    # ---- ending ----

    def finish(self, work: Work, outcome: Outcome) -> bool:
        """Take the outcome of a start; return False if the start is not known here any more.

        A failed record keeps its strand busy until `retry` or `close`; see `collect`.
        """
        item = work.item
        if item.work is not work:
            return False
        if isinstance(outcome, Failed):
            self._stop_work(item)
            item.state = State.FAILED
            self.counts.failed += 1
            self._failed.append((item, outcome.error))
        elif isinstance(outcome, Outputs):
            self._stop_work(item)
            item.state = State.LEAVING
            item.outputs = outcome.records
            grown = sum(map(size_of, outcome.records))
            item.size += grown
            self.bytes += grown
            self._leaving[item] = None
            self._step(item.strand)
        else:
            self._close_running(item, outcome)
        return True

    def _close_running(self, item: Item, how: str) -> None:
        item.counted = False  # the progress forgets the start with the offset
        self._stop_work(item)
        self._close(item, how)
        self._step(item.strand)

    def _close(self, item: Item, how: str) -> None:
        held = item.strand.held
        held.progress.finish(item.offset)
        del held.items[item.offset]
        held.changes += 1
        self._forget(item)
        item.state = State.CLOSED
        self.counts.closed[how] += 1
        self.unsaved += 1

    def collect(self) -> list[tuple[Item, BaseException]]:
        """Return the records whose handlers failed since the last call, each with its error."""
        found = [(item, error) for item, error in self._failed if item.state is State.FAILED]
        self._failed.clear()
        return found

    def retry(self, item: Item, due: float) -> None:
        """Start a failed record again at `due`; its strand waits."""
        if item.state is State.FAILED:
            item.attempts += 1
            item.state = State.BLOCKED
            heapq.heappush(self._blocked, (due, next(self._numbers), item))

    def close(self, item: Item, how: str) -> None:
        """End a failed record without another start."""
        if item.state is State.FAILED:
            self._close(item, how)
            self._step(item.strand)

    def wake(self, now: float) -> int:
        """Make blocked records ready whose time has come; return how many."""
        count = 0
        while self._blocked and self._blocked[0][0] <= now:
            item = heapq.heappop(self._blocked)[2]
            if item.state is State.BLOCKED:
                self._wait_first(item)
                count += 1
        return count

    def next_due(self) -> float | None:
        """Return when a blocked record or a token of the rate is due; None if nothing waits."""
        while self._blocked and self._blocked[0][2].state is not State.BLOCKED:
            heapq.heappop(self._blocked)
        times = [self._blocked[0][0]] if self._blocked else []
        if self._bucket is not None and self._ready and not self.stopping:
            times.append(self._bucket.due)
        return min(times, default=None)

    # ---- probation ----

    def count_starts(self, limit: int) -> bool:
        """Count the next starts of records on probation; return whether there is one to commit.

        `open_gate` lets them start, after the commit.  A record with too many starts has failed.
        """
        for strand in self.probation.poisoned():
            head = strand.queue[0]
            self._start_head(strand, [])
            assert head.work is not None
            self.finish(head.work, Failed(poison(head)))
        return self.probation.count(limit)

    def open_gate(self) -> None:
        """Let the counted records start: their starts are committed."""
        for strand in self.probation.opened():
            self._make_ready(strand)

    @property
    def ready(self) -> int:
        """Strands that `take` can start."""
        return len(self._ready)

    # ---- committing ----

    def snapshot(self, *, clean: Collection[TopicPartition] = ()) -> Snapshot:
        """Return what to commit: of the partitions that changed since their last commit.

        `clean`: no record of these will start any more.  They are committed in any case.
        """
        made = Snapshot({}, {})
        for partition, held in self.held.items():
            ends = partition in clean
            if not held.dirty and not ends:
                continue
            if ends:
                self.probation.uncount(held)
            text = held.progress.encode(held.place, clean=ends and not held.running)
            made.offsets[partition] = CommittedOffset(held.progress.committed, text)
            made.changes[partition] = held.changes
        return made

    def saved(self, snapshot: Snapshot) -> None:
        """Note that a snapshot is committed."""
        for partition, changes in snapshot.changes.items():
            held = self.held.get(partition)
            if held is not None:
                held.saved = changes

    @property
    def leaving(self) -> int:
        """Records whose outputs wait for a transaction."""
        return len(self._leaving)

    def depart(self) -> list[Item]:
        """Count the leaving records as finished, for the next snapshot; return them in order."""
        items = list(self._leaving)
        for item in items:
            item.strand.held.progress.finish(item.offset)
            item.strand.held.changes += 1
        return items

    def stay(self, items: Iterable[Item]) -> None:
        """Undo `depart`: the transaction was aborted."""
        for item in items:
            item.strand.held.progress.reopen(item.offset)

    def gone(self, items: Iterable[Item]) -> None:
        """Close the records of a transaction that is committed."""
        for item in items:
            del item.strand.held.items[item.offset]
            self._forget(item)
            item.state = State.CLOSED
            self.counts.closed[DONE] += 1

    def fail_leaving(self, item: Item, error: BaseException) -> None:
        """Fail a record whose outputs cannot be sent.  Its strand waits for the decision."""
        if item.state is State.LEAVING:
            del self._leaving[item]
            grown = sum(map(size_of, item.outputs))
            item.size -= grown
            self.bytes -= grown
            item.outputs = ()
            item.state = State.FAILED
            # The strand has gone on, and may have been forgotten since.
            if item.strand.key is not None:
                strands = item.strand.held.strands
                item.strand = strands.setdefault(item.strand.key, item.strand)
            self._unlist(item.strand)
            item.strand.busy += 1
            self.counts.failed += 1
            self._failed.append((item, error))

    # ---- numbers ----

    def __len__(self) -> int:
        """Return how many records are open and have been read."""
        return sum(len(held.items) for held in self.held.values())

    @property
    def blocked(self) -> int:
        """Records that wait for their next attempt."""
        return sum(item.state is State.BLOCKED for _, _, item in self._blocked)
