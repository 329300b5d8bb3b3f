"""PartitionLog: the log of a replica, as the machines read it and as actions change it.

A thin layer over one open Partition.  The owner serializes the methods that change the log; those
that read take no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from logstore import _native
from logstore.format.validation import AppendedBatches, check_copied
from logstore.log.epochs import EpochEnd
from logstore.partition.partition import Partition
from logstore.partition.reader import LOG_END

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["PartitionLog"]


class PartitionLog:
    """One open Partition; see `machines.replica.ReplicaLog`."""

    __slots__ = ("_active", "_appender", "_cutter", "_reader", "_view", "partition")

    def __init__(self, partition: Partition) -> None:
        parts = partition.parts
        self.partition = partition
        self._active = parts.active
        self._appender = parts.appender
        self._cutter = parts.cutter
        self._reader = parts.reader
        self._view = parts.view

    # ---- what the machines read ----

    @property
    def start_offset(self) -> int:
        """The first offset."""
        return self._view.start_offset

    @property
    def end_offset(self) -> int:
        """The offset of the next record."""
        return self._reader.end_offset

    @property
    def durable_offset(self) -> int:
        """The end of what is on stable storage."""
        return min(self._active.durability.durable_offset, self.end_offset)

    @property
    def fsync(self) -> bool:
        """Whether an append is acknowledged only after an fsync."""
        return self._active.durability.level == "fsync"

    @property
    def failed(self) -> bool:
        """Whether an fsync has failed: nothing more becomes durable."""
        return self._active.durability.commit.failed

    @property
    def promised_epoch(self) -> int:
        """The greatest leader epoch that this log has been told of."""
        return self._active.leadership.epoch

    def epoch_end(self, epoch: int) -> EpochEnd | None:
        """Return where an epoch ends in this log."""
        return self._active.end_offset_for_epoch(epoch)

    def cut_for(self, ends: EpochEnd) -> int:
        """Return where this log is cut, after a leader's answer."""
        cut = self._active.leadership.history.cut_for(ends, self.end_offset)
        return max(cut.offset, self.start_offset)

    def last_epoch(self) -> int:
        """Return the epoch of the last record, or -1."""
        epoch = self._active.last_record_epoch()
        return -1 if epoch is None else epoch

    # ---- what actions change ----

    def begin_epoch(self, epoch: int) -> None:
        """Record that an epoch begins, durably."""
        self._active.begin_epoch(epoch)

    def append(self, raw: Buffer, epoch: int, origin: str, *, wait: bool) -> AppendedBatches:
        """Append a producer's batches as their leader.  The disk is not waited for."""
        return self._appender.append_batch(
            raw, origin=origin, durability="os", wait=wait, leader_epoch=epoch
        )

    def copy(self, raw: bytes, expect_end: int) -> int:
        """Append a leader's batches as they are; return the end of the log."""
        self._appender.append_batch(raw, origin="follower", durability="os", expect_end=expect_end)
        return self.end_offset

    def truncate(self, offset: int) -> int:
        """Cut the log at a batch, at or below `offset`; return its end."""
        return self._cutter.truncate(max(offset, self.start_offset), whole_batches=True)

    def restart_at(self, offset: int) -> None:
        """Delete all records, and begin an empty log at `offset`."""
        self._cutter.restart_at(offset)

    def trim(self, offset: int) -> int:
        """Delete the records below `offset`; return the start of the log."""
        self._cutter.trim(offset)
        return self.start_offset

    def set_high_watermark(self, offset: int) -> None:
        """Show readers the records below `offset`."""
        self._view.set_high_watermark(offset)

    def when_durable(self, end: int, done: Callable[[BaseException | None], object]) -> None:
        """Call `done` when the log is durable up to `end`, or with the reason why it is not."""
        self._active.durability.when_durable(end, done)

    def clear_lossy(self) -> None:
        """Note that a leader has filled this log again."""
        if self.partition.recovery.lossy:
            self._active.clear_lossy()

    # ---- what followers read ----

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Return whole batches from `offset` on, also above the high watermark; at least one.

        Their checksums are verified: raise InvalidRecordError or CorruptLogError for damage.
        """
        found = self._reader.read_slice(offset, max_bytes, isolation=LOG_END)
        if found is None:
            return b""
        raw = found.read(0, found.size_bytes, wait=True)
        if _native.check_copied(raw) is None:
            check_copied(raw)  # raises the reason
        return raw
