"""Lane: the records of one producer on their way into one partition.

A lane is a buffer of records, encoded as they come.  When it is full, or has lingered, or someone
waits, all it holds becomes a pack: it is stamped with the producer's id and the next sequence,
written in one piece, synced if that was asked for, and answered.

Invariant: packs are written in the order in which they were filled, one at a time, and a pack is
answered only after all before it.  A pack that provably is not in the log (a full disk) is tried
again, with the same sequence; one of which that cannot be known fails, and so does the partition.
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
        """The producer's id and epoch; (-1, -1): none, and batches are not numbered."""

    def enlist(self, lane: Lane, /) -> bool:
        """Before anything is written: whether it belongs to a transaction, which knows now."""

    def make_room(self, lane: Lane, /) -> None:
        """A lane is full: have it written, or take it away for later."""

    def hurry(self) -> None: ...
    def note_failure(self, error: BaseException, /) -> None: ...
    def explain(self, error: BaseException, /) -> BaseException:
        """Return the error to answer with: the coordinator knows why an epoch is over."""


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
        return super().__new__(cls, **settings, clock=partition._ask_time)

    def __init__(self, owner: LaneOwner, partition: Partition, **options: object) -> None:
        self.owner = owner
        self.partition = partition
        self.topic = partition.topic
        self.number = partition.number
        self.sequence = 0
        self.end_offset = 0  # of what is written
        self._order = threading.RLock()  # one hand-over at a time, in order
        self._settling = threading.RLock()  # one thread answers, in order
        self.callbacks = Callbacks()
        self._unwritten: list[_native.Builder] = []
        self._unsettled: collections.deque[Pack] = collections.deque()  # written, not answered
        # Where the first of `_unwritten` is written, if it is: known before, so that an interrupt
        # cannot lose it.
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
        """Whether some records are not answered yet."""
        return bool(self._records or self._unwritten or self._unsettled)

    def hurry(self) -> None:
        """Someone waits for an answer."""
        self.owner.hurry()

    # ---- writing ----

    def _hand_over(self) -> None:
        """Called when a record finds no room."""
        self.owner.make_room(self)

    def set_aside(self) -> None:
        """Make what is held a pack, to be written by another thread."""
        if self._records:
            self._take_pack(self._unwritten, Pack(self))

    @answering
    def write_out(self) -> None:
        """Write all that is held.  DiskFullError: nothing is lost, try again."""
        with self._order:
            self.set_aside()
            while self._unwritten:
                taken = self._unwritten[0]
                try:
                    self._write(taken)
                except (DiskFullError, InterruptedAppendError):
                    raise  # it is still here; empty, if it was written
                except (Exception, IndeterminateAppendError) as error:  # noqa: BLE001
                    self._fail_first(error)
                else:
                    self._put_back(taken)

    def _write(self, taken: _native.Builder) -> None:
        pack: Pack = taken._pack
        if pack.done:  # it has failed, and an interrupt came before it was taken away
            self._fail_first(pack.error)
            return
        records = taken._records
        if records == 0:  # an interrupt came between writing and noting it
            self._written(taken)
            return
        pack.count = records
        transactional = self.owner.enlist(self)
        producer_id, epoch = self.owner.identity
        if producer_id < 0:
            self.partition.write_batches(taken, tried=self._tried)
        else:
            self.partition.write_produced(
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
        """It is in the log: before anything else, so that it is never written twice.

        No interrupt comes between these lines: see `logstore.waking`.
        """
        pack: Pack = taken._pack
        first = self._tried[0]
        unsettled = self._unsettled
        pack.first_offset = first
        self.end_offset = first + pack.count
        self.sequence = (self.sequence + pack.count) & 0x7FFFFFFF
        del self._unwritten[0]
        unsettled.append(pack)

    def _fail_first(self, error: BaseException | None) -> None:
        """The oldest pack is not in the log, or nobody can tell, and will not be tried again."""
        pack: Pack = self._unwritten[0]._pack
        if error is not None and not pack.done:
            error = self.owner.explain(error)
            self.owner.note_failure(error)
        with self._settling:
            self.callbacks.finish(pack, error)
        del self._unwritten[0]

    @answering
    def fail_unwritten(self, error: BaseException) -> None:
        """Give up what is not in the log yet."""
        with self._order:
            self.set_aside()
            while self._unwritten:
                taken = self._unwritten[0]
                if taken._records == 0 and not taken._pack.done:
                    self._written(taken)  # an interrupt came before that
                    continue
                with self._settling:
                    self.callbacks.finish(taken._pack, error)
                del self._unwritten[0]

    # ---- answering ----

    @answering
    def settle(self, end_offset: int | None = None) -> None:
        """Answer the packs below an offset; by default all that are written."""
        with self._settling:
            while self._unsettled:
                pack = self._unsettled[0]
                if end_offset is not None and pack.end_offset > end_offset:
                    return
                self.callbacks.finish(pack)
                del self._unsettled[0]

    def settle_interrupted(self) -> None:
        """Answer what an interrupt kept from being answered.  For the thread of the producer."""
        if self._unsettled and not self.owner.fsync:
            self.settle()
        self.callbacks.call()

    @answering
    def sync(self) -> None:
        """Make durable what is written, and answer it."""
        unsettled = list(self._unsettled)
        if not unsettled:
            return
        end = unsettled[-1].end_offset
        try:
            self.partition.make_durable(range(unsettled[0].first_offset, end))
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
        """A new epoch of its producer: sequences start again."""
        self.sequence = 0

    def make_durable(self) -> None:
        """Wait until all that is written is on disk."""
        self.partition.make_durable(range(self.end_offset, self.end_offset))

    def close(self) -> None:
        """Write and answer all; for the partition, which is about to be closed."""
        with contextlib.suppress(ClosedError):
            self._deliver()
            self._close()
            self._deliver()  # what came in since, perhaps from callbacks
        self._close()

    def _deliver(self) -> None:
        self.write_out()
        if self.owner.fsync:
            self.sync()
        self.settle()
