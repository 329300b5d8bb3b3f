"""The disk of a simulated node: one log for each partition, with a durable and a volatile part.

A log has the engine's own LeaderEpochs and ProducerState.  A kill keeps everything, because the
page cache outlives the process.  A power cut keeps the durable part and any prefix of the rest.
A cut of the log is durable when it returns, as the engine's is.  The checkpoint of the high
watermark is as old as its last write.

Records are never encoded: a batch is an object, and every copy of it is the same object.  So two
logs agree at an offset if and only if they have the same object there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import Any, cast

from logstore.errors import FencedError
from logstore.format.batch import BatchHeader
from logstore.log.epochs import EpochEnd, LeaderEpochs
from logstore.log.producer_state import ProducerState
from logstore.replication.machines.image import Key

__all__ = ["Batch", "Disk", "DiskFullError", "InvalidAnswerError", "SimulatedLog"]


class DiskFullError(Exception):
    """There is no space: nothing was written."""


class InvalidAnswerError(Exception):
    """A leader's batches do not continue this log: nothing was written."""


class Batch:
    """A record batch; frozen.  It has the attributes of a header that ProducerState reads."""

    __slots__ = (
        *("base_offset", "base_sequence", "control", "has_producer", "last_offset"),
        *("last_offset_delta", "last_sequence", "leader_epoch", "max_timestamp", "next_offset"),
        *("producer_epoch", "producer_id", "transactional", "values"),
    )

    def __init__(
        self,
        base_offset: int,
        leader_epoch: int,
        values: tuple[object, ...],
        producer_id: int = -1,
        producer_epoch: int = -1,
        base_sequence: int = -1,
    ) -> None:
        count = len(values)
        self.base_offset = base_offset
        self.next_offset = base_offset + count
        self.last_offset = base_offset + count - 1
        self.last_offset_delta = count - 1
        self.leader_epoch = leader_epoch
        self.values = values
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.base_sequence = base_sequence
        self.last_sequence = base_sequence + count - 1
        self.has_producer = producer_id >= 0
        self.max_timestamp = 0
        self.control = False
        self.transactional = False

    def __repr__(self) -> str:
        return f"{self.base_offset}@{self.leader_epoch}{list(self.values)}"


class SimulatedLog:
    """One replica's log.  It is what the machines read of a log, and what a shell writes."""

    __slots__ = (
        *("_ends", "batches", "checkpointed", "cuts", "damaged", "durable_offset", "end_offset"),
        *("epochs", "producers", "promised_epoch", "start_offset", "topic_id"),
    )

    def __init__(self, topic_id: str = "") -> None:
        self.topic_id = topic_id
        self.batches: list[Batch] = []
        self._ends: list[int] = []  # the next offset of each batch, for bisection
        self.start_offset = 0
        self.end_offset = 0
        self.durable_offset = 0
        self.epochs = LeaderEpochs()
        self.promised_epoch = 0  # durable, as in the engine's state file
        self.producers = ProducerState()
        self.checkpointed = 0  # the high watermark of the last checkpoint
        self.damaged = False
        self.cuts = 0  # syncs that began before a cut must not count what was appended after it

    def __repr__(self) -> str:
        return (
            f"<log {self.start_offset}..{self.end_offset} durable {self.durable_offset} "
            f"epochs {self.epochs.entries}>"
        )

    # ---- what machines read ----

    def epoch_end(self, epoch: int) -> EpochEnd | None:
        """Return where an epoch ends in this log."""
        return self.epochs.end_offset_for(epoch, self.end_offset)

    def cut_for(self, ends: EpochEnd) -> int:
        """Return where this log is cut after a leader's answer."""
        return max(self.start_offset, self.epochs.cut_for(ends, self.end_offset).offset)

    def last_epoch(self) -> int:
        """Return the epoch of the last record, or -1."""
        return self.batches[-1].leader_epoch if self.batches else -1

    # ---- reading ----

    def read(self, offset: int, bound: int, limit: int = 1 << 30) -> tuple[Batch, ...]:
        """Return up to `limit` batches that end at or below `bound`, from `offset` on."""
        first = bisect_right(self._ends, offset)
        last = bisect_right(self._ends, bound)
        return tuple(self.batches[first : min(last, first + limit)])

    def batch_ending_at(self, offset: int) -> Batch | None:
        """Return the batch before an offset, or None."""
        at = bisect_left(self._ends, offset)
        return self.batches[at] if at < len(self._ends) and self._ends[at] == offset else None

    # ---- writing ----

    def begin_epoch(self, epoch: int) -> None:
        """Record durably that an epoch begins at the end of the log."""
        if epoch < self.promised_epoch:
            raise FencedError(epoch, self.promised_epoch, where="a simulated log")
        if epoch > self.promised_epoch or self.epochs.latest != epoch:
            self.epochs.assign(epoch, self.end_offset)
            self.promised_epoch = epoch

    def append(
        self,
        epoch: int,
        values: tuple[object, ...],
        producer_id: int = -1,
        producer_epoch: int = -1,
        sequence: int = -1,
    ) -> tuple[int, int]:
        """Append a client's batch; return its first offset and its end.

        A retry that the producer state knows has the offsets of its first copy.
        """
        if epoch != self.promised_epoch:
            raise FencedError(epoch, self.promised_epoch, where="a simulated log")
        batch = Batch(self.end_offset, epoch, values, producer_id, producer_epoch, sequence)
        admission = self.producers.admit([(cast(BatchHeader, batch), None)], "leader")
        if admission.duplicate is not None:
            offsets = admission.duplicate.offsets
            return offsets.start, offsets.stop
        self._add(batch)
        self.producers.commit(admission)
        return batch.base_offset, batch.next_offset

    def append_copy(self, batches: Iterable[Batch], expect_end: int) -> int:
        """Append a leader's batches as they are; return the new end."""
        if self.end_offset != expect_end:
            raise InvalidAnswerError(f"the log ends at {self.end_offset}, not at {expect_end}")
        for batch in batches:
            # Only the first batch of an empty log may have offsets below the start.
            if batch.base_offset < self.end_offset and self.end_offset > self.start_offset:
                raise InvalidAnswerError(f"{batch} is below {self.end_offset}")
            self._add(batch)
            header = cast(BatchHeader, batch)
            self.producers.commit(self.producers.admit([(header, None)], "follower"))
        return self.end_offset

    def _add(self, batch: Batch) -> None:
        if self.epochs.latest != batch.leader_epoch:
            self.epochs.assign(batch.leader_epoch, batch.base_offset)
            self.promised_epoch = max(self.promised_epoch, batch.leader_epoch)
        self.batches.append(batch)
        self._ends.append(batch.next_offset)
        self.end_offset = batch.next_offset

    def truncate(self, offset: int) -> int:
        """Cut the log; a batch that has `offset` is cut whole.  Return the new end."""
        keep = bisect_right(self._ends, offset)
        end = offset if offset >= self.end_offset else self._ends[keep - 1] if keep else 0
        end = min(max(end, self.start_offset), self.end_offset)
        self.epochs.truncate_from_end(end)
        if end < self.end_offset:
            self._keep(0 if end == self.start_offset else keep)
            self.end_offset = end
            self.durable_offset = min(self.durable_offset, end)
            self.cuts += 1
            self.producers = self.replayed(0)
        return end

    def _keep(self, count: int) -> None:
        del self.batches[count:], self._ends[count:]

    def restart_at(self, offset: int) -> None:
        """Delete everything and begin at `offset`."""
        self._keep(0)
        self.epochs = LeaderEpochs()
        self.producers = ProducerState()
        self.start_offset = self.end_offset = self.durable_offset = self.checkpointed = offset
        self.cuts += 1

    def trim(self, offset: int) -> None:
        """Delete the records below `offset`.  The batches stay here, unread, for the oracle."""
        self.start_offset = max(self.start_offset, offset)
        self.epochs.truncate_from_start(self.start_offset)

    def synced(self, end: int, cuts: int) -> None:
        """Record that a sync which began at `end` is done."""
        if cuts == self.cuts:
            self.durable_offset = max(self.durable_offset, end)

    def replayed(self, snapshot: int) -> ProducerState:
        """Return the producer state of the batches, by way of a snapshot after the first few."""
        state = ProducerState()
        for number, batch in enumerate(self.batches):
            if number == snapshot and number:
                state = ProducerState.decode(state.encode())
            state.replay(cast(BatchHeader, batch), None)
        return state

    # ---- crashes ----

    def lose_power(self, random: Callable[[], float]) -> None:
        """Keep the durable part, and some prefix of the rest."""
        durable = bisect_right(self._ends, self.durable_offset)
        volatile = len(self.batches) - durable
        self._keep(durable + int(random() * (volatile + 1)))

    def open(self, random: Callable[[], float]) -> None:
        """Open the log after a restart, as the engine does."""
        if self._ends and self._ends[-1] <= self.start_offset:
            self._keep(0)
        self.end_offset = self._ends[-1] if self._ends else self.start_offset
        self.durable_offset = min(self.durable_offset, self.end_offset)
        self.epochs.truncate_from_end(self.end_offset)
        self.epochs.truncate_from_start(self.start_offset)
        if self.epochs.latest != self.promised_epoch:
            self.epochs.assign(self.promised_epoch, self.end_offset)
        self.producers = self.replayed(int(random() * (len(self.batches) + 1)))
        self.cuts += 1


class Disk:
    """The logs of a node, and what its restart finds."""

    __slots__ = ("boot", "fsync", "full", "logs", "lossy", "strays")

    def __init__(self, fsync: bool) -> None:
        self.fsync = fsync
        self.boot = 0
        self.logs: dict[Key, SimulatedLog] = {}
        self.lossy = False  # until the controller has taken this node out of every set
        self.full = False
        self.strays: list[tuple[Key, SimulatedLog]] = []

    def crash(self, random: Callable[[], float], *, power: bool) -> None:
        """End the process; with `power`, end the machine."""
        if power:
            self.boot += 1
            self.lossy |= not self.fsync
            for log in self.logs.values():
                log.lose_power(random)

    def open(self, random: Callable[[], float]) -> None:
        """Open every log."""
        for log in self.logs.values():
            log.open(random)

    def set_aside(self, key: Key) -> None:
        """Keep a log that is not used any more."""
        log: Any = self.logs.pop(key)
        self.strays.append((key, log))
