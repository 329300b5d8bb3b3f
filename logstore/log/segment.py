"""Segment: the records from one base offset on, in files that are replaced and deleted together.

    <base>.log        the batches, back to back
    <base>.index      offset -> position, sparse
    <base>.timeindex  timestamp -> offset, sparse
    <base>.txnindex   the aborted transactions; only if there are any

Invariant: the .log file is authoritative and the .index and .timeindex files are hints.  An index
entry is added only after its batch is in the .log file.  After a power loss an index may be too
short or may point past the end of the log, because the kernel writes pages back in any order.  So
a read checks the batch that an index entry leads to, and a bad index costs only time.

A segment does not know its neighbours: Partition rolls, deletes and locks.  Reads take no lock.
File descriptor and indexes are loaded on first use and dropped by `release`, so that a partition
of many segments needs little memory and few descriptors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from logstore import _native
from logstore.config import PartitionConfig
from logstore.errors import CorruptLogError, UnsupportedFormatError
from logstore.files.directory import Directory
from logstore.files.names import segment_name
from logstore.format import codecs
from logstore.format.index import AbortedTransaction, OffsetIndex, TimeIndex, TransactionIndex
from logstore.log.segment_contents import READ_BYTES, SegmentContents, decompress, read_indexes
from logstore.log.segment_digest import SegmentDigest, digest
from logstore.log.segment_slice import Slice
from logstore.log.segment_summary import NO_TIME, UNKNOWN_TIME, SegmentSummary, noted_transactions
from logstore.log.segment_transactions import (
    append_entries,
    read_transactions,
    write_transactions,
)
from logstore.record import Record

__all__ = ["Segment"]

RELATIVE_MAX = (1 << 31) - 1
OFFSET_MAX = (1 << 63) - 2  # the end offset, which is one greater, still fits an int64
STEP_BYTES = 8 << 20  # bytes read by one call into C; Python handles signals between two calls
INDEX_BYTES_READ = 16 << 20  # of an index file that is longer than segment_index_bytes


class Segment:
    """One .log file and its indexes.  ``partition.segments`` lists the segments of a partition.

    Any thread may read.  The partition's lock serialises appends and changes of the files.
    """

    def __init__(
        self,
        directory: Directory,
        base_offset: int,
        *,
        topic: str,
        number: int,
        config: PartitionConfig,
        dense: bool,
    ) -> None:
        self._directory = directory
        self.base_offset = base_offset
        self._topic = topic
        self._number = number
        self.config = config
        self.dense = dense  # a missing offset is damage, because compaction removed none
        self._file: _native.File | None = None
        self._offset_index: OffsetIndex | None = None
        self._time_index: TimeIndex | None = None
        self._times_checked = False
        self._last_time: int | None = None  # of a sealed segment, once its time index was checked
        self._max_timestamp: int | None = None  # of a sealed segment, once compared with the log
        self._transactions: TransactionIndex | None = None
        self._flushed = (0, 0)  # bytes of the live .index and .timeindex that are in their files
        # New files take the names of this segment's files: never close what is open, because the
        # names no longer lead to it.
        self._retired = False
        # ".swap" if another process has not renamed the files of a swap yet.  Set by the loader of
        # a readonly view.
        self.stage = ""
        # Set while this process appends to this segment.
        self.writer: _native.SegmentWriter | None = None
        # Base offset of the next segment; None for the last one.
        self.next_base: int | None = None
        # End of the last segment if another process appends to it.  A readonly view advances it.
        self.seen_end_offset = base_offset
        # Everything below this offset was durable: if the file ends before it, records are lost.
        self.durable_end = -1

    # ---- attributes ----

    @property
    def path(self) -> Path:
        """Return the path of the .log file."""
        return self._directory.path / segment_name(self.base_offset, ".log")

    @property
    def sealed(self) -> bool:
        """Return whether a later segment exists.  A sealed segment is never appended to again."""
        return self.next_base is not None

    @property
    def end_offset(self) -> int:
        """Return the offset after its last record; if sealed, the next segment's base offset."""
        if self.next_base is not None:
            return self.next_base
        if self.writer is not None:
            return self.writer.next_offset
        return max(self.seen_end_offset, self.durable_end)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of whole batches in the .log file, or 0 if the file was deleted."""
        file = self._file
        if file is not None:
            return file.end
        try:
            return self._directory.size(self._name(".log"))
        except FileNotFoundError:
            return 0

    @property
    def max_timestamp(self) -> int:
        """Return the greatest timestamp of its records, or -1 if it has none."""
        writer = self.writer
        if writer is not None:
            return writer.max_timestamp
        known = self._max_timestamp
        return self.time_index.last_entry[0] if known is None else known

    @property
    def min_timestamp(self) -> int | None:
        """Return the least timestamp of its records; None if it has none or it is not known.

        Kafka's files do not hold it.  It is known for a segment that this library wrote and then
        rolled or closed.  After a compaction it may be lower than the least timestamp left.
        """
        writer = self.writer
        if writer is not None:
            known = writer.min_timestamp
        else:
            known = SegmentSummary.read_min(self._directory, self.base_offset, self.size_bytes)
        return known if UNKNOWN_TIME < known < NO_TIME else None

    @property
    def modified_ms(self) -> int:
        """Return the modification time of the .log file, in milliseconds."""
        return self._directory.modified_ms(segment_name(self.base_offset, ".log"))

    @property
    def offset_index(self) -> OffsetIndex:
        """Return the index from offset to position; of the active segment, a copy."""
        most = self.config.segment_index_bytes
        if self.writer is not None:
            return OffsetIndex(self.base_offset, self.writer.offset_entries(), max_bytes=most)
        index = self._offset_index  # once: another thread may release it
        return self._load_indexes()[0] if index is None else index

    @property
    def time_index(self) -> TimeIndex:
        """Return the index from timestamp to offset; of the active segment, a copy."""
        most = self.config.segment_index_bytes
        if self.writer is not None:
            return TimeIndex(self.base_offset, self.writer.time_entries(), max_bytes=most)
        index = self._time_index  # once, as above
        return self._load_indexes()[1] if index is None else index

    @property
    def transaction_index(self) -> TransactionIndex:
        """Return the aborted transactions whose markers are in this segment.

        Most segments have none, and no file.  Raise CorruptLogError if the file is damaged: it has
        no checksum of its own, so it is compared with the one in the summary or the digest.
        """
        index = self._transactions
        if index is None:
            name = self._name(".txnindex")
            index = read_transactions(self._directory, self.base_offset, name, self.size_bytes)
            self._transactions = index
        return index

    @property
    def transactions_noted(self) -> bool:
        """Return whether the checksum of the .txnindex file is known, so that damage is found."""
        return noted_transactions(self._directory, self.base_offset, self.size_bytes) is not None

    def adopt_transactions(self, index: TransactionIndex) -> None:
        """Use `index` instead of the .txnindex file, until `release`."""
        self._transactions = index

    def append_aborted(self, aborted: AbortedTransaction) -> None:
        """Add an aborted transaction to the .txnindex file, after its marker is in the log.

        Not synced here.  Does nothing if the entry is there: the caller repeats the call if an
        interrupt stopped it before it had noted the success.
        """
        index = self.transaction_index
        if index.find(aborted.last_offset) == aborted:
            return
        position = len(index.entries)
        added = TransactionIndex(self.base_offset, index.entries)
        added.append(aborted)
        append_entries(self._directory, self.base_offset, added.entries[position:], position)
        self._transactions = added

    def write_transactions(self, aborted: list[AbortedTransaction]) -> bool:
        """Make the .txnindex file list exactly `aborted`, synced; return whether it changed."""
        self._transactions = None
        return write_transactions(self._directory, self.base_offset, aborted)

    @property
    def file(self) -> _native.File:
        """Return the open .log file; open it on first use."""
        file = self._file
        if file is None:
            # The lock makes "open, then assign" one step.  A truncation changes the files and
            # calls `release` under the same lock: what was opened before must not be kept after.
            with self._directory.opening:
                file = self._file
                if file is None:
                    file = self._file = self._directory.open(self._name(".log"))
        return file

    @property
    def open_file(self) -> _native.File | None:
        """The .log file if it is open now, else None.  Opens nothing."""
        return self._file

    def _name(self, suffix: str) -> str:
        name = segment_name(self.base_offset, suffix)
        staged = f"{name}{self.stage}"
        return staged if self.stage and self._directory.exists(staged) else name

    def __repr__(self) -> str:
        state = "sealed" if self.sealed else "active"
        name = f"{self._topic}-{self._number}"
        return f"<Segment {name} [{self.base_offset}, {self.end_offset}) {state}>"

    # ---- reading ----

    def scan(
        self,
        start: int | None = None,
        stop: int | None = None,
        *,
        on_corrupt: str = "raise",
        aborted: bytes = b"",
    ) -> _native.SegmentScan:
        """Return an iterator over the records with offsets in [start, stop) of this segment.

        Records of the transactions in `aborted`, as packed by `pack_aborted`, are skipped.  The
        iterator keeps the file open: it stays valid after `release` and after a deletion.
        """
        return _native.SegmentScan(
            self.file,
            self.writer if self.writer is not None else self.offset_index.entries,
            self.base_offset,
            self.base_offset if start is None else max(start, self.base_offset),
            self.end_offset if stop is None else stop,
            self.offset_max,
            self._required_end(),
            self.dense,
            on_corrupt == "skip",
            self._topic,
            self._number,
            decompress,
            self.config.max_decompressed_message_bytes,
            aborted,
        )

    def get(self, offset: int) -> Record | None:
        """Return the record at an offset, or None.  O(log n), and one read of a few KiB."""
        try:
            record = _native.SegmentScan.get(
                self.file,
                self.writer if self.writer is not None else self.offset_index.entries,
                self.base_offset,
                offset,
                self._topic,
                self._number,
                decompress,
                self.config.max_decompressed_message_bytes,
            )
        except ValueError as error:
            if not isinstance(error, CorruptLogError | UnsupportedFormatError | codecs.CodecError):
                raise
            record = None
        if record is not None:
            return record
        # The record does not exist, or a batch before it is damaged.  A scan that skips damage
        # finds the record in the second case.  If it finds nothing, the strict scan raises if the
        # offset itself is damaged, and returns None if compaction removed it.
        for found in self.scan(offset, offset + 1, on_corrupt="skip"):
            return found
        return next(self.scan(offset, offset + 1), None)

    def slice(self, offset: int, stop: int, max_bytes: int, *, whole_first: bool) -> Slice | None:
        """Return the whole batches from the one that holds `offset` on; None if none reaches it.

        All are below the offset `stop` and fit into `max_bytes`; with `whole_first`, the first one
        is returned even if it is larger.  The slice is empty if no batch is left.  Headers are
        read, and only near the start and the end; no checksum is computed.
        """
        file = self.file
        found = _native.SegmentScan.span(
            file,
            self.writer if self.writer is not None else self.offset_index.entries,
            self.base_offset,
            offset,
            stop,
            max_bytes,
            whole_first,
        )
        return None if found is None else Slice(file, *found)

    def newest_of(self, key: bytes, start: int = 0) -> int:
        """Return the greatest offset >= `start` of a record with `key`, or -1.

        Reads the whole segment.
        """
        file, position, expected = self.file, 0, self.base_offset
        finder = _native.Cleaner(
            None,
            base_offset=self.base_offset,
            interval_bytes=self.config.index_interval_bytes,
            offset_map=None,
            key=key,
            transactions=None,
            producers=(),
            start_offset=start,
            end_offset=-1,
            now_ms=0,
            delete_retention_ms=0,
            decompress=decompress,
            compress=codecs.compress,
            payload_max=self.config.max_decompressed_message_bytes,
            io_bytes=READ_BYTES,
        )
        limit = file.end
        while position < limit:
            position, expected = finder.feed(
                file, position, limit, expected, self.offset_max, STEP_BYTES
            )
        return finder.counts()["last_purged_offset"]

    def offset_for_time(self, timestamp: int, start: int = 0) -> int | None:
        """Return the least offset >= `start` of a record not older than `timestamp`, or None."""
        if self.sealed and self._last_time is not None and self._last_time < timestamp:
            return None
        with self.visited():
            if self.writer is None and not self._times_checked:
                self._check_times()
            # If another process appends to this segment, the index file lags: it must not be used
            # to conclude that no record is so new.
            complete = self.sealed or self.writer is not None
            if complete and (newest := self.max_timestamp) < timestamp:
                self._last_time = newest if self.sealed else None
                return None
            from logstore.log.segment_check import is_reached_at  # at start-up it is not needed

            # Every record up to the offset of this entry is older than `timestamp`.
            entry = self.time_index.lookup(timestamp - 1)
            offset = entry[1] if is_reached_at(self, *entry) else self.base_offset
            return self.scan(max(offset, start), on_corrupt="skip").find_time(timestamp)

    def _check_times(self) -> None:
        """Rebuild the time index unless it agrees with the log."""
        from logstore.log.segment_check import times_agree

        if not times_agree(self):
            entries = self.walk().final_times(self.base_offset)
            most = self.config.segment_index_bytes
            self._time_index = TimeIndex(self.base_offset, entries, max_bytes=most)
        self._times_checked = True

    def confirm_max_timestamp(self) -> int:
        """Return `max_timestamp` after comparing it with the log.  Retention by age uses this.

        If an index has lost its last entry, the segment seems older than it is.  So the batches
        after the last entry are read, once for a sealed segment.
        """
        if self.writer is not None or not self.sealed:
            return self.max_timestamp
        if self._max_timestamp is None:
            from logstore.log.segment_check import greatest_time

            with self.visited():
                self._check_times()
                self._max_timestamp = greatest_time(self)
        return self._max_timestamp

    def _required_end(self) -> int:
        if not self.dense:
            return -1
        return self.durable_end if self.next_base is None else self.next_base

    @property
    def offset_max(self) -> int:
        """Return the greatest offset that a valid batch of this segment can hold."""
        if self.next_base is not None:
            return self.next_base - 1
        return min(self.base_offset + RELATIVE_MAX, OFFSET_MAX)

    def release(self) -> None:
        """Drop descriptor and indexes; they are loaded again on use.  Open scans stay valid.

        Does nothing for the active segment and for a retired one.
        """
        if self.writer is None and not self._retired:
            self._file = None
            self._offset_index = None
            self._time_index = None
            self._times_checked = False
            self._transactions = None

    @contextlib.contextmanager
    def visited(self) -> Iterator[None]:
        """Release a sealed segment at the end of the block, if nothing of it was open before.

        For loops over all segments: a log may have more of them than a process has descriptors.
        """
        cold = self.sealed and self._file is None
        try:
            yield
        finally:
            if cold:
                self.release()

    def end_at(self, file: _native.File, end_offset: int) -> None:
        """Make this segment readonly and end it at `file.end`: a truncation of it has begun."""
        self.writer = None
        self.release()
        self._file = file
        self.next_base, self.seen_end_offset, self.durable_end = None, end_offset, -1

    def reinstate(self) -> None:
        """Undo `retire`: the names still belong to this segment's files."""
        self._retired = False

    def retire(self) -> None:
        """Open and load everything, because other files are about to take this segment's names.

        A reader that still holds this object then continues to read the old files.
        """
        if not self._retired:
            self.file  # noqa: B018  opened while the name still leads to this segment's file
            self._load_indexes()
            self.transaction_index  # noqa: B018
            self._retired = True

    # ---- walking the file ----

    def walk(
        self,
        position: int = 0,
        *,
        limit: int | None = None,
        next_offset: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> SegmentContents:
        """Check the batches from `position` on; stop at the first that is not valid."""
        file = self.file
        return SegmentContents(
            **_native.scan_prefix(
                file,
                self.base_offset,
                position,
                file.size() if limit is None else limit,
                self.base_offset if next_offset is None else next_offset,
                self.config.index_interval_bytes,
                self.dense,
                progress,
            )
        )

    def _load_indexes(self) -> tuple[OffsetIndex, TimeIndex]:
        most = self.config.segment_index_bytes
        bound = max(most, INDEX_BYTES_READ)
        found = read_indexes(self._directory, self._name(".index"), self._name(".timeindex"), bound)
        if found is None:
            contents = self.walk()
            found = contents.offsets, contents.final_times(self.base_offset)
        offsets, times = found
        by_offset = OffsetIndex(self.base_offset, offsets, max_bytes=most)
        by_time = TimeIndex(self.base_offset, times, max_bytes=most)
        self._offset_index, self._time_index = by_offset, by_time
        return by_offset, by_time

    def write_indexes(self, contents: SegmentContents, *, sync: bool) -> None:
        """Replace the index files of a segment that is not active by those in `contents`."""
        times = contents.final_times(self.base_offset)
        # Before the files change: a digest must never describe files that were replaced.
        SegmentDigest.remove(self._directory, self.base_offset)
        self._directory.write(segment_name(self.base_offset, ".index"), contents.offsets, sync=sync)
        self._directory.write(segment_name(self.base_offset, ".timeindex"), times, sync=sync)
        self._offset_index = self._time_index = None

    def check(self) -> None:
        """Verify every batch, every record and every index entry; raise CorruptLogError."""
        from logstore.log.segment_check import verify  # at start-up it is not needed

        verify(self)

    # ---- the active segment ----

    def activate(self, contents: SegmentContents, *, now_ms: int, jitter_ms: int) -> None:
        """Make this the active segment: appends start at `contents.position`."""
        file = self._directory.open(segment_name(self.base_offset, ".log"), write=True)
        file.end = contents.position
        self._file = file
        self._offset_index = self._time_index = None
        self._last_time = self._max_timestamp = None
        self._times_checked = False
        self.next_base = None
        self._flushed = (0, 0)
        self.writer = _native.SegmentWriter(
            file,
            base_offset=self.base_offset,
            next_offset=contents.next_offset,
            interval_bytes=self.config.index_interval_bytes,
            segment_bytes=self.config.segment_bytes,
            segment_ms=max(0, self.config.segment_ms - jitter_ms),
            index_bytes=self.config.segment_index_bytes,
            created_ms=now_ms,
            offsets=contents.offsets,
            times=contents.times,
            first_timestamp=contents.first_timestamp,
            max_timestamp=contents.max_timestamp,
            max_timestamp_offset=contents.max_timestamp_offset,
            last_indexed_position=contents.last_indexed_position,
            min_timestamp=SegmentSummary.read_min(
                self._directory, self.base_offset, contents.position
            ),
        )

    def flush_indexes(self, *, sync: bool = False, final: bool = False) -> None:
        """Append the new entries of the live indexes to the index files.

        `final` adds the last time entry and writes the summary: no append follows.
        """
        writer = self.writer
        assert writer is not None
        if final:
            writer.finish()
        sizes = (writer.offset_bytes, writer.time_bytes)
        tails = (
            (".index", writer.offset_entries(self._flushed[0]), self._flushed[0]),
            (".timeindex", writer.time_entries(self._flushed[1]), self._flushed[1]),
        )
        for suffix, entries, position in tails:
            index = self._directory.open(
                segment_name(self.base_offset, suffix), write=True, create=True
            )
            try:
                if entries:
                    index.append_at(entries, position)
                if index.size() != position + len(entries):
                    # The file is longer than the live index: entries from before a crash.
                    index.truncate(position + len(entries))
                if sync:
                    index.sync()
            finally:
                index.close()
        self._flushed = sizes
        if final:
            aborted = self.transaction_index.entries
            SegmentSummary(
                writer.file.end, writer.min_timestamp, digest(aborted) if aborted else (0, 0)
            ).write(self._directory, self.base_offset)

    def index_files(self) -> list[_native.File]:
        """Return its existing .index and .timeindex files, open.  The caller syncs them."""
        names = (segment_name(self.base_offset, suffix) for suffix in (".index", ".timeindex"))
        return [
            self._directory.open(name, write=True) for name in names if self._directory.exists(name)
        ]

    def sync(self) -> None:
        """Sync a sealed segment: after a kill its bytes may be in the page cache only."""
        for file in (self.file, *self.index_files()):
            file.datasync()
        self.release()

    def seal(self, next_base: int) -> None:
        """End appends: the next segment starts at `next_base`.

        The caller has written the indexes to their files with ``flush_indexes(final=True)``.
        """
        self.next_base = next_base
        self.writer = None

    def indexes_crc(self) -> int:
        """Return a CRC-32C of the offset index and the time index."""
        return _native.crc32c(self.time_index.entries, _native.crc32c(self.offset_index.entries))
