"""Lane: the buffer of one producer for one partition.

`send` encodes a record into the lane.  All records of the lane become a *pack* if the lane is full,
if it has lingered, or if a caller waits for a delivery.  A pack gets the producer's id and the next
sequence.  The lane writes the pack with one call, syncs it if the producer uses fsync, and finishes
its deliveries.

Invariant: packs are written one at a time, in the order in which they were filled, and a pack is
finished after all earlier packs.  If a pack is certainly not in the log (a full disk), the lane
writes it again with the same sequence.  If that is unknown, the pack fails, and so does the
partition.

A lane does not retry by itself and has no thread: its producer calls `write_out` and `sync`.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from typing import Protocol, Self

from logstore import _native
from logstore.errors import (
    ClosedError,
    DiskFullError,
    IndeterminateAppendError,
    InterruptedAppendError,
)
from logstore.format.encoder import builder_settings, codec_number
from logstore.partition.partition import Partition
from logstore.partition.writer import WRITE_BYTES
from logstore.producer.delivery import Callbacks, Pack, answering

__all__ = ["Lane", "LaneOwner"]


class LaneOwner(Protocol):
    """What a lane needs of its producer."""

    @property
    def fsync(self) -> bool: ...
    @property
    def identity(self) -> tuple[int, int]:
        """The producer's id and epoch; (-1, -1) if the producer is not idempotent."""

    def enlist(self, lane: Lane, /) -> bool:
        """Add the lane's partition to the open transaction, before the lane writes.

        Return whether the batches are part of a transaction.
        """

    def make_room(self, lane: Lane, /) -> None:
        """Write a full lane, or set its records aside for the producer's thread."""

    def hurry(self) -> None: ...
    def note_failure(self, error: BaseException, /) -> None: ...
    def explain(self, error: BaseException, /) -> BaseException:
        """Return the error for the deliveries: the coordinator knows why an epoch has ended."""


class Lane(_native.Builder):
    """Records of one producer for one partition.  Threads may add records at any time."""

    def __new__(
        cls,
        owner: LaneOwner,
        partition: Partition,
        *,
        batch_bytes: int,
        compression: str | None,
        compression_level: int | None,
    ) -> Self:
        config = partition.config
        codec = codec_number(compression, config)
        settings = builder_settings(
            config, codec, compression_level, batch_bytes=batch_bytes, write_bytes=WRITE_BYTES
        )
        return super().__new__(cls, **settings, clock=partition.parts.active.ask_time)

    def __init__(self, owner: LaneOwner, partition: Partition, **options: object) -> None:
        self.owner = owner
        self.partition = partition  # also keeps it from being closed as idle
        self._appender = partition.parts.appender
        self.topic = partition.topic
        self.number = partition.number
        self.sequence = 0
        self.end_offset = 0  # the offset after the last record that was written
        # Two locks, so that one thread can write while another waits for an fsync.  `_order` is
        # held to write a pack, `_settling` to finish one; `_settling` is taken after `_order`.
        self._order = threading.RLock()
        self._settling = threading.RLock()
        self.callbacks = Callbacks()
        self._unwritten: list[_native.Builder] = []  # packs, oldest first; changed under `_order`
        self._unsettled: collections.deque[Pack] = collections.deque()  # written, not finished
        # The offset at which the first of `_unwritten` is being written.  The partition sets it
        # before the write, so that an interrupt after the write cannot lose it.
        self._tried = [-1]
        self._pack = Pack(self)

    def __repr__(self) -> str:
        return f"<Lane to {self.topic}-{self.number}, {self.pending} pending>"

    @property
    def pending(self) -> int:
        """Records that are not in the log yet."""
        return self._records + sum(taken._records for taken in list(self._unwritten))

    @property
    def held_bytes(self) -> int:
        """Bytes of records that are not in the log yet."""
        return self._size_bytes + sum(taken._size_bytes for taken in list(self._unwritten))

    @property
    def unsettled(self) -> bool:
        """Whether deliveries of some records are not done."""
        return bool(self._records or self._unwritten or self._unsettled)

    def hurry(self) -> None:
        """Make the producer write without lingering: a caller waits for a delivery."""
        self.owner.hurry()

    # ---- writing ----

    def _hand_over(self) -> None:
        """Called by the C half if a record does not fit into the lane."""
        self.owner.make_room(self)

    def set_aside(self) -> None:
        """Move the records of the lane into a pack at the end of `_unwritten`."""
        if self._records:
            self._take_pack(self._unwritten, Pack(self))

    @answering
    def write_out(self) -> None:
        """Write all records.  Raises DiskFullError if the rest is still here and can be retried."""
        with self._order:
            self.set_aside()
            while self._unwritten:
                taken = self._unwritten[0]
                try:
                    self._write(taken)
                except (DiskFullError, InterruptedAppendError):
                    raise  # `taken` stays the first of `_unwritten`; it is empty if it was written
                except (Exception, IndeterminateAppendError) as error:  # noqa: BLE001
                    self._fail_first(error)
                else:
                    self._put_back(taken)

    def _write(self, taken: _native.Builder) -> None:
        """Write the first pack.  The caller holds `_order`.

        An interrupt may have stopped an earlier call at any line.  The pack's state shows where:
        `done` means that the pack failed, an empty builder means that the pack is in the log.
        """
        pack: Pack = taken._pack
        if pack.done:  # interrupted before `_fail_first` deleted it
            self._fail_first(pack.error)
            return
        records = taken._records
        if records == 0:  # interrupted between the write and `_written`
            self._written(taken)
            return
        pack.count = records
        transactional = self.owner.enlist(self)
        producer_id, epoch = self.owner.identity
        if producer_id < 0:
            self._appender.write_batches(taken, tried=self._tried)
        else:
            self._appender.write_produced(
                taken,
                producer_id=producer_id,
                producer_epoch=epoch,
                sequence=self.sequence,
                transactional=transactional,
                tried=self._tried,
            )
        self._written(taken)
        if transactional or not self.owner.fsync:
            self.settle()

    def _written(self, taken: _native.Builder) -> None:
        """Move the first pack from `_unwritten` to `_unsettled`, right after it was written.

        The lines after the comment contain no call until the last one, so no interrupt can stop
        between them (see `logstore.waking`): a pack is never written twice.
        """
        pack: Pack = taken._pack
        first = self._tried[0]
        unsettled = self._unsettled
        # One step for a signal handler from here on.
        pack.first_offset = first
        self.end_offset = first + pack.count
        self.sequence = (self.sequence + pack.count) & 0x7FFFFFFF
        del self._unwritten[0]
        unsettled.append(pack)

    def _fail_first(self, error: BaseException | None) -> None:
        """Fail the oldest pack for good: it is not in the log, or that is unknown."""
        pack: Pack = self._unwritten[0]._pack
        if error is not None and not pack.done:
            error = self.owner.explain(error)
            self.owner.note_failure(error)
        with self._settling:
            self.callbacks.finish(pack, error)
        del self._unwritten[0]

    @answering
    def fail_unwritten(self, error: BaseException) -> None:
        """Fail all records that are not in the log."""
        with self._order:
            self.set_aside()
            while self._unwritten:
                taken = self._unwritten[0]
                if taken._records == 0 and not taken._pack.done:
                    self._written(taken)  # it is in the log: interrupted before `_written`
                    continue
                with self._settling:
                    self.callbacks.finish(taken._pack, error)
                del self._unwritten[0]

    # ---- finishing deliveries ----

    @answering
    def settle(self, end_offset: int | None = None) -> None:
        """Finish the packs that end at or before an offset; by default all that are written."""
        with self._settling:
            while self._unsettled:
                pack = self._unsettled[0]
                if end_offset is not None and pack.end_offset > end_offset:
                    return
                self.callbacks.finish(pack)
                del self._unsettled[0]

    def settle_interrupted(self) -> None:
        """Finish packs and call callbacks that an interrupt left.  For the producer's thread."""
        if self._unsettled and not self.owner.fsync:
            self.settle()
        self.callbacks.call()

    @answering
    def sync(self) -> None:
        """Make the written packs durable, and finish them."""
        # A copy, and no lock during the fsync: other threads go on writing packs after `end`.
        unsettled = list(self._unsettled)
        if not unsettled:
            return
        end = unsettled[-1].end_offset
        try:
            self._appender.make_durable(range(unsettled[0].first_offset, end))
        except InterruptedAppendError:
            raise
        except (IndeterminateAppendError, ClosedError) as error:
            self.owner.note_failure(error)
            with self._settling:
                while self._unsettled and self._unsettled[0].end_offset <= end:
                    self.callbacks.finish(self._unsettled[0], error)
                    del self._unsettled[0]
        else:
            self.settle(end)

    def begin(self) -> None:
        """Start the sequences at 0: the producer has a new epoch."""
        self.sequence = 0

    def make_durable(self) -> None:
        """Wait until all records that the lane wrote are durable."""
        self._appender.make_durable(range(self.end_offset, self.end_offset))

    def close(self) -> None:
        """Write all records and finish them; called by the partition before it closes."""
        with contextlib.suppress(ClosedError):
            self._deliver()
            self._close()
            self._deliver()  # records that were added before `_close`, perhaps by callbacks
        self._close()

    def _deliver(self) -> None:
        self.write_out()
        if self.owner.fsync:
            self.sync()
        self.settle()
