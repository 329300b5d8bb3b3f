"""Producers: the producer state of one open partition, and the files that keep it.

``<offset>.snapshot`` holds the state of everything below its offset: one at every segment's base,
taken when the log rolls, and one at the end, taken when it is closed.  ``<base>.txnindex`` lists
the transactions whose ABORT marker lies in the segment.  Both can be computed from the log, and
are, wherever they were not known to be durable: what lies behind the recovery point is replayed
from the newest snapshot at or below it, whatever other files say.

Callers hold the partition's lock, but for `unstable` and `aborted`, which readers use.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from logstore import _native
from logstore.clock import GuardedClock
from logstore.errors import CorruptLogError, InvalidRecordError
from logstore.files.directory import Directory
from logstore.files.names import base_offset_of, segment_name
from logstore.format.batch import BatchHeader, EndMarker
from logstore.format.index import AbortedTransaction, TransactionIndex
from logstore.log.producer_state import Admission, CorruptSnapshotError, Origin, ProducerState
from logstore.log.segment import Segment

__all__ = ["DiscardedSnapshot", "Producers"]

log = logging.getLogger("logstore.producers")

NEVER = (1 << 63) - 1
EXPIRY_CHECK_MS = 600_000  # as often as Kafka looks


class DiscardedSnapshot(NamedTuple):
    """A snapshot file that could not be believed; the state came from an older one and the log."""

    path: Path
    reason: str


class Unstable:
    """The first offset of the oldest open transaction.  Not changed: compared by identity."""

    __slots__ = ("offset",)

    def __init__(self, offset: int) -> None:
        self.offset = offset


class _Pending(NamedTuple):
    """Batches on their way into the log."""

    admission: Admission
    end_offset: int


class Producers:
    """What an open partition knows of its producers."""

    def __init__(
        self,
        directory: Directory,
        *,
        readonly: bool,
        expiration_ms: int,
        clock: GuardedClock,
    ) -> None:
        self._directory = directory
        self._readonly = readonly
        self._expiration_ms = expiration_ms
        self._clock = clock
        self._time_ms = clock.clock.time_ms
        self._expiry_due = 0
        # Wall time of a producer's newest append to this handle: its records may carry older times.
        self._heard: dict[int, int] = {}
        self._pending: _Pending | None = None
        self._snapshots: set[int] = set()  # offsets of the snapshot files
        self._newest_snapshot = -1
        # Bases of segments with a .txnindex file; what aborted since `_since` without one.
        self._indexed: list[int] = []
        self._since = NEVER
        self._seen: list[AbortedTransaction] = []
        self.state = ProducerState()
        self.discarded: list[DiscardedSnapshot] = []
        # No committed reader goes there or beyond.  Moves before the bytes of a transaction
        # can be seen, and back only when its marker and its entry in the index are there.  A new
        # object each time: who finds the same one twice knows that none began or ended between.
        self.unstable = Unstable(NEVER)

    @property
    def indexed(self) -> frozenset[int]:
        """Bases of the segments that list aborted transactions."""
        return frozenset(self._indexed)

    # ---- loading ----

    def load(
        self,
        segments: Sequence[Segment],
        *,
        end: int,
        trusted: int,
        names: Iterable[str],
        clean: bool,
        quiet_from: int = NEVER,
    ) -> None:
        """The state at `end`: the newest snapshot at or below `trusted`, and the log behind it.

        With a snapshot at `end`, no segment is looked at; segments from `quiet_from` on are known
        to hold no batch of a producer.
        """
        names = list(names)
        self._snapshots = {base_offset_of(name) for name in names if name.endswith(".snapshot")}
        self._indexed = sorted(base_offset_of(name) for name in names if name.endswith(".txnindex"))
        within = [s for s in segments if s.base_offset < min(trusted, end)][-1:]
        if within and within[0].base_offset in self._indexed and not within[0].transactions_noted:
            # A killed process left it: its list of aborted transactions is made anew, not believed.
            trusted = min(trusted, within[0].base_offset)
        while True:
            found, self.state = self._newest(min(trusted, end))
            since = found if found >= 0 else segments[0].base_offset
            try:
                aborted = self._replay(segments, since, end, quiet_from, every_base=not clean)
                if segments[-1].base_offset in self._indexed:
                    segments[-1].transaction_index  # noqa: B018  # appends need it sound
                break
            except CorruptLogError as error:
                name = Path(error.path).name
                if not name.endswith(".txnindex"):
                    raise  # the log itself: nothing to rebuild it from
                # Replay its whole segment as well.
                log.warning("%s: rebuilt from the log", str(error))
                self._note_indexed(base_offset_of(name), False)
                if not self._readonly:
                    self._directory.unlink(name)
                trusted = min(trusted, base_offset_of(name))
        self._since, self._seen = (since, aborted) if self._readonly else (NEVER, [])
        self._pending = None
        self.recompute()
        if not self._readonly:
            if found != end:
                self.snapshot(end)
            self._newest_snapshot = end
            self._remove_strays(segments, end)

    def _newest(self, at_most: int) -> tuple[int, ProducerState]:
        """The newest sound snapshot at or below an offset: (-1, nothing known) without one."""
        for offset in sorted((o for o in self._snapshots if o <= at_most), reverse=True):
            name = segment_name(offset, ".snapshot")
            try:
                state = ProducerState.decode(self._directory.read(name))
            except FileNotFoundError:
                continue
            except CorruptSnapshotError as error:
                path = self._directory.path / name
                if not any(known.path == path for known in self.discarded):
                    self.discarded.append(DiscardedSnapshot(path, str(error)))
                    log.warning("%s discarded: %s", path, str(error))
                if not self._readonly:
                    self._directory.unlink(name)
                continue
            state.expire(self._clock.now_ms(), self._expiration_ms)
            return offset, state
        return -1, ProducerState()

    def _replay(
        self,
        segments: Sequence[Segment],
        since: int,
        end: int,
        quiet_from: int,
        *,
        every_base: bool,
    ) -> list[AbortedTransaction]:
        """Take in the batches in [since, end); the transactions they aborted, also in the files."""
        aborted: list[AbortedTransaction] = []
        late = {segment.base_offset for segment in segments[-2:]}
        for segment in segments:
            segment_end = end if segment.next_base is None else segment.next_base
            if segment_end <= since:
                continue
            base = segment.base_offset
            if base > since and not self._readonly and (every_base or base in late):
                self.snapshot(base)
            believed = []
            if base < since and base in self._indexed:
                believed = [e for e in segment.transaction_index if e.last_offset < since]
            found = [] if base >= quiet_from else list(self._aborted_in(segment, since, end))
            aborted += found
            if not self._readonly and segment.write_transactions([*believed, *found]):
                self._note_indexed(base, bool(believed or found))
        return aborted

    def _aborted_in(
        self, segment: Segment, since: int, end: int, state: ProducerState | None = None
    ) -> Iterable[AbortedTransaction]:
        """Replay one segment; what its markers aborted.  Damage hides what it hides."""
        state = self.state if state is None else state
        scan = segment.scan(max(since, segment.base_offset), end, on_corrupt="skip")
        while (raw := scan.next_producer()) is not None:
            header = BatchHeader.parse(raw)
            yield from state.replay(header, _marker(header, raw, segment.path))

    def see(self, segment: Segment, start: int, end: int) -> None:
        """Readonly: another process appended these offsets."""
        self._seen += self._aborted_in(segment, start, end)
        self.recompute()

    def recompute(self) -> None:
        """Readers may go as far as the state says."""
        first = self.state.first_unstable_offset
        self.unstable = Unstable(NEVER if first is None else first)

    # ---- appending ----

    def admit(
        self, headers: Sequence[tuple[BatchHeader, EndMarker | None]], origin: Origin
    ) -> Admission:
        """Whether batches may be appended; see `ProducerState.admit`."""
        now = self._time_ms()
        if now >= self._expiry_due or now < self._expiry_due - 2 * EXPIRY_CHECK_MS:
            self._expiry_due = now + EXPIRY_CHECK_MS
            self.expire(self._clock.now_ms())
        admission = self.state.admit(headers, origin)
        for producer_id in admission.entries:
            self._heard[producer_id] = now
        return admission

    def expire(self, now_ms: int) -> list[int]:
        """Forget producers silent for ``producer.id.expiration.ms``; return their ids."""
        gone = self.state.expire(now_ms, self._expiration_ms, self._heard)
        for producer_id in gone:
            self._heard.pop(producer_id, None)
        return gone

    def begin(self, admission: Admission, end_offset: int) -> None:
        """Admitted batches are about to be written, and end there."""
        self._pending = _Pending(admission, end_offset)
        if admission.opened:
            self.unstable = Unstable(min(self.unstable.offset, *admission.opened))

    def settle(self, end_offset: int, segment: Segment) -> None:
        """The log ends there now: apply what has begun, if it was written.  May be repeated."""
        pending = self._pending
        if pending is None:
            return
        if end_offset >= pending.end_offset:
            self._apply(pending, segment)
        self.recompute()
        self._pending = None  # last: what an interrupt stops is repeated by the next call

    def settle_written(self, end_offset: int, segment: Segment) -> None:
        """Apply what has begun, if it was written; before a roll, which takes the segment away."""
        pending = self._pending
        if pending is not None and end_offset >= pending.end_offset:
            self.settle(end_offset, segment)

    def _apply(self, pending: _Pending, segment: Segment) -> None:
        for entry in self.state.commit(pending.admission):
            segment.append_aborted(entry)
            self._note_indexed(segment.base_offset, True)

    def replaced(self, old: Iterable[int], new: int, *, indexed: bool) -> None:
        """Segments of these bases gave way to one."""
        for base in old:
            self._note_indexed(base, False)
        self._note_indexed(new, indexed)

    def _note_indexed(self, base: int, there: bool) -> None:
        known = [other for other in self._indexed if other != base]
        self._indexed = sorted([*known, base]) if there else known

    # ---- files ----

    def snapshot(self, offset: int) -> None:
        """Write the state as the one at `offset`.

        Not synced: one that a power cut tears or loses costs a longer replay, and nothing else.
        """
        if offset > 0:
            name = segment_name(offset, ".snapshot")
            self._directory.replace(name, self.state.encode(), sync=False)
            self._snapshots.add(offset)
        self._newest_snapshot = offset

    def close(self, segments: Sequence[Segment], end: int) -> list[_native.File]:
        """Leave the state at `end`, so that the next open need not look at the log.

        Returns the files to sync before anyone is told that the log was closed.
        """
        if self._newest_snapshot != end:
            self.snapshot(end)
        self._remove_strays(segments, end)
        return [*self._snapshot_files(end), *self._index_files(segments[-1])]

    def roll(self, old: Segment, base_offset: int) -> list[_native.File]:
        """Leave the state at a new segment's base; the files to sync with the old segment's."""
        self.snapshot(base_offset)
        # One that says "nobody" need not be durable: without it, nobody is what is found.
        known = self._snapshot_files(base_offset) if len(self.state) else []
        return [*known, *self._index_files(old)]

    def _snapshot_files(self, offset: int) -> list[_native.File]:
        if offset not in self._snapshots:
            return []
        return [self._directory.open(segment_name(offset, ".snapshot"), write=True)]

    def _index_files(self, segment: Segment) -> list[_native.File]:
        if segment.base_offset not in self._indexed:
            return []
        name = segment_name(segment.base_offset, ".txnindex")
        return [self._directory.open(name, write=True)]

    def _remove_strays(self, segments: Sequence[Segment], end: int) -> None:
        """Kafka's rule: those at a segment's base, and the newest if it lies behind them all."""
        bases = {segment.base_offset for segment in segments}
        newest = max((offset for offset in self._snapshots if offset <= end), default=-1)
        keep = bases | ({newest} if newest >= max(bases) else set())
        strays = [offset for offset in self._snapshots if offset > end or offset not in keep]
        for offset in strays:
            self._directory.unlink(segment_name(offset, ".snapshot"))
            self._snapshots.discard(offset)
        if any(offset > end for offset in strays):
            # One that came back after a power cut could speak of records that are not there.
            self._directory.sync()

    # ---- reading ----

    def aborted(
        self, segments: Sequence[Segment], start: int, stop: int
    ) -> list[AbortedTransaction]:
        """The aborted transactions with data or a marker in [start, stop), by their markers."""
        found: list[AbortedTransaction] = []
        indexed = self._indexed
        if indexed:
            bases = [segment.base_offset for segment in segments]
            first = max(0, bisect.bisect_right(bases, start) - 1)
            for segment in segments[first:]:
                if segment.base_offset not in indexed:
                    continue
                entries, complete = self._index_of(segments, segment).collect(start, stop)
                found += [entry for entry in entries if entry.last_offset < self._since]
                if complete:
                    break
        found += [e for e in self._seen if e.last_offset >= start and e.first_offset < stop]
        return found

    def check(self, segments: Sequence[Segment], end: int) -> None:
        """Raise CorruptLogError when the log below `end` aborts what is not known as aborted."""
        since, state = self._newest(segments[0].base_offset)
        since = max(since, segments[0].base_offset)
        known = {
            (entry.producer_id, entry.last_offset): entry.first_offset
            for entry in self.aborted(segments, since, end)
        }
        for segment in segments:
            for entry in self._aborted_in(segment, since, end, state):
                first = known.get((entry.producer_id, entry.last_offset))
                # An earlier one is right as well: compaction takes the data, not the entry.
                if first is None or first > entry.first_offset:
                    name = segment_name(segment.base_offset, ".txnindex")
                    raise CorruptLogError(
                        f"producer {entry.producer_id} aborted {entry.first_offset} to "
                        f"{entry.last_offset}, but that is not in the index",
                        path=self._directory.path / name,
                        position=0,
                        start_offset=entry.first_offset,
                        end_offset=entry.last_offset + 1,
                    )

    def _index_of(self, segments: Sequence[Segment], segment: Segment) -> TransactionIndex:
        """The index of a segment; when its file is damaged, what the log says instead."""
        try:
            return segment.transaction_index
        except CorruptLogError as error:
            log.warning("%s: rebuilt from the log", str(error))
        since, state = self._newest(segment.base_offset)
        index = TransactionIndex(segment.base_offset)
        for other in segments:
            if other.end_offset <= since or other.base_offset > segment.base_offset:
                continue
            for entry in self._aborted_in(other, since, other.end_offset, state):
                if other is segment:
                    index.append(entry)
        segment.adopt_transactions(index)
        return index


def _marker(header: BatchHeader, raw: bytes, path: Path) -> EndMarker | None:
    if not header.control:
        return None
    try:
        return EndMarker.parse(raw)
    except InvalidRecordError as error:
        log.warning("%s: %s", path, str(error))
        return None
