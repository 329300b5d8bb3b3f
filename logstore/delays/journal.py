"""Journal: the internal topic of delayed records, as rows for an Agenda.

The topic has three partitions, one for each generation: records that were due within an hour of
being scheduled, within a day, and later.  A record's key is its ticket's id and its timestamp is
the due time.  A delivery and a cancellation are tombstones of the same key with the same timestamp.
So the least and the greatest timestamp of a segment show which tickets it can hold.

Invariant: `rows` yields the records that count when the log ends at the place up to which `follow`
has read.  A record of a transaction counts from its marker on, and other records do not wait for
it.  Of an open transaction only the first offset is in memory: when its marker is read, the log is
read again from there.

It has no lock: the Scheduler's lock guards it, except `append` and `log`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from logstore.coordinators.internal_topics import DELAYED, internal_topic
from logstore.delays.agenda import Rows
from logstore.delays.ticket import GENERATIONS, ID_BYTES
from logstore.format.batch import BatchHeader, EndMarker
from logstore.partition.partition import Partition
from logstore.partition.scan import producer_batches
from logstore.record import Columns, Record
from logstore.store.store import Store

__all__ = ["Journal"]

FIELDS = ("offset", "key", "tombstone")
CHUNK_ROWS = 65536
RUN_GAP = 64  # records that are closer are read by one scan

Ranges = list[tuple[int, int]]


class _Followed:
    """One partition: the place up to which it was read, and the transactions open there."""

    def __init__(self, log: Partition, next_offset: int, opened: dict[int, int]) -> None:
        self.log = log
        self.next_offset = next_offset
        self.opened = opened  # producer id -> first offset

    @property
    def stable(self) -> int:
        """Return the offset below which every transaction has its marker before `next_offset`."""
        return min(self.opened.values(), default=self.next_offset)


class Journal:
    """The three partitions of the delayed records of one store."""

    def __init__(self, store: Store, heard: Callable[[], object]) -> None:
        self._store = store
        self._heard = heard  # called after every append; it must return at once
        self._followed: list[_Followed | None] = [None] * GENERATIONS

    # ---- writing ----

    def log(self, generation: int) -> Partition:
        """Return a partition; make it, durably, if it does not exist."""
        topic = internal_topic(self._store, DELAYED)
        log = self._store.topic_changes.make_partition(topic, generation)
        if self._followed[generation] is None:
            self._heard()  # nothing listens to it yet
        return log

    def append(self, generation: int, records: Sequence[Record]) -> Callable[[], None]:
        """Append records; the function that is returned makes them durable."""
        log = self.log(generation)
        if len(records) == 1:
            (record,) = records
            at = log.append(
                record.value, key=record.key, headers=record.headers, timestamp=record.timestamp,
                durability="os",
            )  # fmt: skip
            offsets = range(at, at + 1)
        else:
            offsets = log.extend(records, durability="os")

        def finish() -> None:
            if log.durability == "fsync":
                log.parts.appender.make_durable(offsets)

        return finish

    # ---- following ----

    def begin(self) -> None:
        """Set the place of each partition that is not followed yet to its end.

        `rows` reads up to there.  A partition that is made later is followed from its start.
        """
        for generation, followed in enumerate(self._followed):
            if followed is None and (log := self._existing(generation)) is not None:
                # The end first: a transaction that ends after it counts as ended, and its marker
                # then has no effect.
                end = log.end_offset
                opened = {
                    each.producer_id: each.first_offset
                    for each in log.ongoing_transactions
                    if each.first_offset < end
                }
                self._followed[generation] = _Followed(log, end, opened)

    def _existing(self, generation: int) -> Partition | None:
        topic = self._store.get(DELAYED)
        if topic is None or generation not in topic.partition_numbers:
            return None
        log = topic[generation]
        log.parts.view.listen(self._heard)
        return log

    def _here(self, generation: int) -> _Followed | None:
        """Return the state of a partition that is followed; None if it does not exist yet."""
        followed = self._followed[generation]
        if followed is None or followed.log.closed:
            log = self._existing(generation)
            if log is None:
                return None
            if followed is None:
                followed = self._followed[generation] = _Followed(log, log.start_offset, {})
            followed.log = log
        return followed

    def follow(self) -> Iterator[Rows]:
        """Yield the rows that began to count since the last call, or since `begin`.

        The place in a partition moves after its last rows were consumed.  If a call does not end,
        the next one yields the same rows again.
        """
        for generation in range(GENERATIONS):
            followed = self._here(generation)
            if followed is not None:
                yield from _news(followed)

    # ---- loading ----

    def rows(
        self, wanted: Callable[[int, int, int | None, int], bool], only: int | None = None
    ) -> Iterator[Rows]:
        """Yield all rows up to the place of `follow`, in the order of each partition.

        `wanted` gets the generation, the first offset, and the least and the greatest timestamp of
        a sealed segment; the least is None if it is not known.  If it returns False, the segment
        is not read.  `only` selects one generation.
        """
        for generation in range(GENERATIONS) if only is None else (only,):
            followed = self._here(generation)
            if followed is None:
                continue
            log, stable = followed.log, followed.stable
            for segment in log.segments:
                start = max(segment.base_offset, log.start_offset)
                stop = min(segment.end_offset, stable)
                if start >= stop or (
                    segment.sealed
                    and not wanted(
                        generation, start, segment.min_timestamp, segment.confirm_max_timestamp()
                    )
                ):
                    continue
                scan = log.scan(start, stop, isolation="read_committed", on_lost="skip")
                for columns in scan.columns(CHUNK_ROWS, fields=FIELDS):
                    yield _rows(columns)
            yield from _visible(log, stable, followed.next_offset)

    # ---- records ----

    def read(self, generation: int, offsets: Iterable[int]) -> dict[int, Record]:
        """Return records of a generation by their offsets; neighbours are read by one scan."""
        followed = self._here(generation)
        found: dict[int, Record] = {}
        for run in _runs(sorted(offsets)):
            assert followed is not None  # it has offsets
            wanted = set(run)
            for record in followed.log.scan(run[0], run[-1] + 1, on_lost="skip"):
                if record.offset in wanted:
                    found[record.offset] = record
        return found

    def trim(self, generation: int, first_live: int | None) -> None:
        """Delete whole segments before the first live offset and before open transactions."""
        followed = self._here(generation)
        if followed is None:
            return
        limit = followed.stable if first_live is None else min(first_live, followed.stable)
        log = followed.log
        # To the start of a segment: a trim into it would write a file and free nothing.
        start = max((s.base_offset for s in log.segments if s.base_offset <= limit), default=0)
        if start > log.start_offset:
            log.trim(start)

    def close(self) -> None:
        """Stop listening."""
        for followed in self._followed:
            if followed is not None and not followed.log.closed:
                followed.log.parts.view.unlisten(self._heard)


def _rows(columns: Columns, chosen: npt.NDArray[np.bool_] | None = None) -> Rows:
    """Return the rows of one chunk; records whose key is no id are left out."""
    keys = columns.keys
    lengths = keys.lengths
    if len(lengths) and not (lengths == ID_BYTES).all():
        whole = lengths == ID_BYTES
        chosen = whole if chosen is None else chosen & whole
        data = b"".join(key if key and len(key) == ID_BYTES else bytes(ID_BYTES) for key in keys)
    else:
        data = bytes(keys.data)
    ids = np.frombuffer(data, ">u8").reshape(-1, 2).astype(np.uint64)
    rows = Rows(ids[:, 0], ids[:, 1], columns.offsets, columns.tombstones)
    return rows if chosen is None else rows.where(chosen)


def _without(log: Partition, start: int, stop: int, left_out: Ranges) -> Iterator[Rows]:
    """Yield the rows of [start, stop) whose offsets are not in the ranges, which are sorted."""
    if start >= stop:
        return
    edges = np.array(left_out, np.int64).reshape(-1)
    for columns in log.scan(start, stop, on_lost="skip").columns(CHUNK_ROWS, fields=FIELDS):
        # An offset is in a range if an odd number of edges is at or below it.
        inside = np.searchsorted(edges, columns.offsets, "right") % 2 == 1
        yield _rows(columns, ~inside)


def _visible(log: Partition, start: int, stop: int) -> Iterator[Rows]:
    """Yield the rows of [start, stop) that count at `stop`.

    No transaction with records in the range began before it.
    """
    if start >= stop:
        return
    left_out: Ranges = []
    opened: dict[int, Ranges] = {}
    for header, commit in _producer_headers(log, start, stop):
        if commit is None:
            opened.setdefault(header.producer_id, []).append(
                (header.base_offset, header.next_offset)
            )
        else:
            ranges = opened.pop(header.producer_id, [])
            left_out += [] if commit else ranges
    left_out += [each for ranges in opened.values() for each in ranges]
    yield from _without(log, start, stop, sorted(left_out))


def _news(followed: _Followed) -> Iterator[Rows]:
    log, start, stop = followed.log, followed.next_offset, followed.log.end_offset
    if start >= stop:
        return
    opened = dict(followed.opened)
    left_out: Ranges = []
    committed: list[tuple[int, int, int]] = []  # producer id, first offset, offset of the marker
    for header, commit in _producer_headers(log, start, stop):
        if commit is None:
            opened.setdefault(header.producer_id, header.base_offset)
            left_out.append((header.base_offset, header.next_offset))
        else:
            first = opened.pop(header.producer_id, None)
            if commit and first is not None:
                committed.append((header.producer_id, first, header.base_offset))
    yield from _without(log, start, stop, left_out)
    for producer_id, first, marker in committed:
        yield from _committed(log, producer_id, first, marker, stop)
    followed.next_offset, followed.opened = stop, opened


def _committed(
    log: Partition, producer_id: int, first: int, marker: int, stop: int
) -> Iterator[Rows]:
    """Yield the rows of a transaction, and later plain tombstones.

    A ticket may have been cancelled before its transaction was committed.  The tombstone was read
    then, and had no effect.
    """
    own: Ranges = []
    others: Ranges = []
    for header, commit in _producer_headers(log, first, stop):
        if commit is None:
            mine = header.producer_id == producer_id and header.base_offset < marker
            (own if mine else others).append((header.base_offset, header.next_offset))
    edges = np.array(own, np.int64).reshape(-1)
    found: list[Rows] = []
    for rows in _without(log, first, stop, others):
        inside = np.searchsorted(edges, rows.offset, "right") % 2 == 1
        found.append(rows.where(inside | rows.dead))
    if found:
        # Together: the tombstone removes its record before an agenda gets it.
        joined = Rows.joined(found)
        yield joined


def _producer_headers(
    log: Partition, start: int, stop: int
) -> Iterator[tuple[BatchHeader, bool | None]]:
    """Yield the headers of transactional batches; for a marker, whether it commits, else None."""
    for raw in producer_batches(log.scan(start, stop, on_lost="skip")):
        header = BatchHeader.parse(raw)
        if header.control:
            marker = EndMarker.parse(raw)
            if marker is not None:
                yield header, marker.commit
        elif header.transactional:
            yield header, None


def _runs(offsets: list[int]) -> Iterator[list[int]]:
    """Split sorted offsets where the gap is wide."""
    run: list[int] = []
    for offset in offsets:
        if run and offset - run[-1] > RUN_GAP:
            yield run
            run = []
        run.append(offset)
    if run:
        yield run
