"""Producers: the producer state of one open partition, and the files that keep it.

``<offset>.snapshot`` holds the producer state after the records below that offset.  A roll writes
one at the base of the new segment, and a close writes one at the end of the log.
``<base>.txnindex`` lists the transactions whose ABORT marker is in the segment.

Invariant: the log is authoritative, and both kinds of file can be computed from it.  At load, only
a snapshot at or below the recovery point is used.  The log from that snapshot on is replayed, and
the .txnindex entries of the replayed offsets are computed again, even if a file has them.

Callers hold the partition's lock, except for `unstable` and `aborted`, which readers use without
it.
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
EXPIRY_CHECK_MS = 600_000  # Kafka's interval for expiring producers


class DiscardedSnapshot(NamedTuple):
    """A corrupt snapshot file.  The state was read from an older snapshot and from the log."""

    path: Path
    reason: str


class Unstable:
    """The first offset of the oldest open transaction.  Immutable, and compared by identity."""

    __slots__ = ("offset",)

    def __init__(self, offset: int) -> None:
        self.offset = offset


class _Pending(NamedTuple):
    """Admitted batches that are being written.  The log ends at `end_offset` after them."""

    admission: Admission
    end_offset: int


class Producers:
    """The producer state of an open partition and its files."""

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
        # Producer id -> wall time of its newest append to this handle.  The timestamps of its
        # records may be older, and must not expire a producer that is still appending.
        self._heard: dict[int, int] = {}
        self._pending: _Pending | None = None
        self._snapshots: set[int] = set()  # offsets of the snapshot files
        self._newest_snapshot = -1
        # Base offsets of the segments with a .txnindex file.
        self._indexed: frozenset[int] = frozenset()
        # A readonly handle writes no .txnindex: `_seen` lists the transactions aborted from
        # `_since` on.
        self._since = NEVER
        self._seen: list[AbortedTransaction] = []
        self.state = ProducerState()
        self.discarded: list[DiscardedSnapshot] = []
        # Readers use this without a lock: a read_committed reader stops before its offset.  It is
        # lowered before the first bytes of a transaction can be read, and raised only after the
        # marker is in the log and the aborted transaction is in the index.  Every change is a new
        # object: a reader that loads the same object before and after a read knows that no
        # transaction began or ended in between.
        self.unstable = Unstable(NEVER)

    @property
    def indexed(self) -> frozenset[int]:
        """Return the base offsets of the segments that have a .txnindex file."""
        return self._indexed

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
        """Load the state at `end`: the newest snapshot at or below `trusted`, then replay the log.

        With a snapshot at `end`, no segment is read.  Segments from `quiet_from` on are known to
        hold no batch of a producer, and are not read either.
        """
        names = list(names)
        self._snapshots = {base_offset_of(name) for name in names if name.endswith(".snapshot")}
        self._indexed = frozenset(base_offset_of(n) for n in names if n.endswith(".txnindex"))
        within = [s for s in segments if s.base_offset < min(trusted, end)][-1:]
        if within and within[0].base_offset in self._indexed and not within[0].transactions_noted:
            # The segment has a .txnindex but no checksum of it: for example, the process was
            # killed before it sealed the segment.  Rebuild the file from the log.
            trusted = min(trusted, within[0].base_offset)
        while True:
            found, self.state = self._newest(min(trusted, end))
            since = found if found >= 0 else segments[0].base_offset
            try:
                aborted = self._replay(segments, since, end, quiet_from, every_base=not clean)
                if segments[-1].base_offset in self._indexed:
                    # Raises if the file is damaged: an append would extend a damaged list.
                    segments[-1].transaction_index  # noqa: B018
                break
            except CorruptLogError as error:
                name = Path(error.path).name
                if not name.endswith(".txnindex"):
                    raise  # damage of the .log file: there is no other source
                # Remove the damaged index and replay its whole segment, which writes a new one.
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
        """Return the newest valid snapshot at or below `at_most`: its offset and its state.

        Return (-1, an empty state) if there is none.  A corrupt snapshot is removed, unless the
        handle is readonly.
        """
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
        """Apply the batches in [since, end) to the state; return the transactions they aborted.

        Unless readonly, write the .txnindex files of the replayed segments, and the snapshots at
        their bases.
        """
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
        """Replay one segment; yield the transactions that its markers aborted.

        Damaged batches are skipped: a transaction whose marker is damaged is not in the result.
        """
        state = self.state if state is None else state
        scan = segment.scan(max(since, segment.base_offset), end, on_corrupt="skip")
        while (raw := scan.next_producer()) is not None:
            header = BatchHeader.parse(raw)
            yield from state.replay(header, _marker(header, raw, segment.path))

    def see(self, segment: Segment, start: int, end: int) -> None:
        """Apply the records in [start, end), which another process appended.  Readonly handles."""
        self._seen += self._aborted_in(segment, start, end)
        self.recompute()

    def recompute(self) -> None:
        """Publish the first unstable offset of the state to the readers."""
        first = self.state.first_unstable_offset
        self.unstable = Unstable(NEVER if first is None else first)

    # ---- appending ----

    def admit(
        self, headers: Sequence[tuple[BatchHeader, EndMarker | None]], origin: Origin
    ) -> Admission:
        """Decide whether batches may be appended; see `ProducerState.admit`."""
        now = self._time_ms()
        # The second condition holds if the clock was set back: do not wait for the old due time.
        if now >= self._expiry_due or now < self._expiry_due - 2 * EXPIRY_CHECK_MS:
            self._expiry_due = now + EXPIRY_CHECK_MS
            self.expire(self._clock.now_ms())
        admission = self.state.admit(headers, origin)
        for producer_id in admission.entries:
            self._heard[producer_id] = now
        return admission

    def expire(self, now_ms: int) -> list[int]:
        """Remove producers idle for ``producer.id.expiration.ms``; return their ids."""
        gone = self.state.expire(now_ms, self._expiration_ms, self._heard)
        for producer_id in gone:
            self._heard.pop(producer_id, None)
        return gone

    def begin(self, admission: Admission, end_offset: int) -> None:
        """Note that admitted batches are about to be written, up to `end_offset`.

        `unstable` is lowered here, before the first byte of a new transaction is in the log.
        """
        if not admission.entries:
            return  # no producer has a batch among them: there is nothing to apply
        self._pending = _Pending(admission, end_offset)
        if admission.opened:
            self.unstable = Unstable(min(self.unstable.offset, *admission.opened))

    def settle(self, end_offset: int, segment: Segment) -> None:
        """Apply the pending batches if the log, which ends at `end_offset`, holds them.

        If the write failed, the pending batches are dropped.  May be called again after an
        interrupt: `_apply` leaves an entry alone that is in the index already.
        """
        pending = self._pending
        if pending is None:
            return
        if end_offset >= pending.end_offset:
            self._apply(pending, segment)
        self.recompute()
        # Last: an interrupt before this line leaves the work to the next call.
        self._pending = None

    def settle_written(self, end_offset: int, segment: Segment) -> None:
        """Apply the pending batches if they are in the log; keep them if not.

        Called before a roll: their aborted transactions belong to the index of the old segment.
        """
        pending = self._pending
        if pending is not None and end_offset >= pending.end_offset:
            self.settle(end_offset, segment)

    def _apply(self, pending: _Pending, segment: Segment) -> None:
        for entry in self.state.commit(pending.admission):
            segment.append_aborted(entry)
            self._note_indexed(segment.base_offset, True)

    def replaced(self, old: Iterable[int], new: int, *, indexed: bool) -> None:
        """Note that compaction replaced the segments at the bases `old` by the one at `new`."""
        for base in old:
            self._note_indexed(base, False)
        self._note_indexed(new, indexed)

    def _note_indexed(self, base: int, there: bool) -> None:
        self._indexed = self._indexed | {base} if there else self._indexed - {base}

    # ---- files ----

    def snapshot(self, offset: int) -> None:
        """Write the state as the snapshot at `offset`.

        Not synced: if a power loss tears or removes the file, only the next replay is longer.
        """
        if offset > 0:
            name = segment_name(offset, ".snapshot")
            self._directory.replace(name, self.state.encode(), sync=False)
            self._snapshots.add(offset)
        self._newest_snapshot = offset

    def close(self, segments: Sequence[Segment], end: int) -> list[_native.File]:
        """Write the snapshot at `end`, so that the next open reads no segment.

        Return the open files that the caller syncs before it marks the log as cleanly closed.
        """
        if self._newest_snapshot != end:
            self.snapshot(end)
        self._remove_strays(segments, end)
        return [*self._snapshot_files(end), *self._index_files(segments[-1])]

    def roll(self, old: Segment, base_offset: int) -> list[_native.File]:
        """Write the snapshot at a new segment's base; return the files to sync with `old`'s."""
        self.snapshot(base_offset)
        # A snapshot of no producers need not be durable: replay without it finds none either.
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
        """Remove snapshots by Kafka's rule.

        Kept are those at the base of a segment, and the newest if it is after all the bases.
        """
        bases = {segment.base_offset for segment in segments}
        newest = max((offset for offset in self._snapshots if offset <= end), default=-1)
        keep = bases | ({newest} if newest >= max(bases) else set())
        strays = [offset for offset in self._snapshots if offset > end or offset not in keep]
        for offset in strays:
            self._directory.unlink(segment_name(offset, ".snapshot"))
            self._snapshots.discard(offset)
        if any(offset > end for offset in strays):
            # Sync the removal: after a power loss such a file could reappear, and would describe
            # records that the log does not have.
            self._directory.sync()

    # ---- reading ----

    def aborted(
        self, segments: Sequence[Segment], start: int, stop: int
    ) -> list[AbortedTransaction]:
        """Return the aborted transactions with data or a marker in [start, stop).

        They are ordered by the offsets of their markers.  Readers call this without the lock.
        """
        found: list[AbortedTransaction] = []
        indexed = self._indexed  # once: every change publishes a new list
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
        """Raise CorruptLogError if a transaction that the log aborts below `end` is not listed."""
        since, state = self._newest(segments[0].base_offset)
        since = max(since, segments[0].base_offset)
        known = {
            (entry.producer_id, entry.last_offset): entry.first_offset
            for entry in self.aborted(segments, since, end)
        }
        for segment in segments:
            for entry in self._aborted_in(segment, since, end, state):
                first = known.get((entry.producer_id, entry.last_offset))
                # The listed first offset may be lower: compaction removes the first records of a
                # transaction from the log, but keeps its entry.
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
        """Return the index of a segment; if its file is damaged, rebuild it from the log."""
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
