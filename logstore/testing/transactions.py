"""The model of a log with producers: its batches, and which readers see them.

A test makes the same calls on a ``Partition`` and a ``TransactionModel`` and compares the results.
The model keeps every batch in a list and computes each answer from the start of the list.  It has
no files and no snapshots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

__all__ = ["ModelBatch", "ModelProducer", "TransactionModel"]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelBatch:
    """Values at consecutive offsets, or (``ends`` is not None) the marker of a transaction."""

    base_offset: int
    values: tuple[bytes, ...]
    producer_id: int = -1
    epoch: int = -1
    sequence: int = -1
    transactional: bool = False
    ends: str | None = None  # "commit" or "abort"

    @property
    def end_offset(self) -> int:
        return self.base_offset + (1 if self.ends else len(self.values))


@dataclasses.dataclass(slots=True)
class ModelProducer:
    """The state that the log must have of a producer."""

    epoch: int = -1
    next_sequence: int | None = None  # None: unknown, any sequence is accepted
    last: ModelBatch | None = None  # the last batch of this epoch
    transaction: int | None = None  # the first offset of the open transaction


class TransactionModel:
    """Batches in offset order in ``[start_offset, end_offset)``."""

    def __init__(self) -> None:
        self.start_offset = 0
        self.end_offset = 0
        self.batches: list[ModelBatch] = []

    def __repr__(self) -> str:
        return f"<TransactionModel [{self.start_offset}, {self.end_offset})>"

    # ---- changes ----

    def append(
        self,
        values: Sequence[bytes],
        *,
        producer_id: int = -1,
        epoch: int = -1,
        sequence: int = -1,
        transactional: bool = False,
    ) -> range:
        """Add a batch and return its offsets."""
        batch = ModelBatch(
            self.end_offset, tuple(values), producer_id, epoch, sequence, transactional
        )
        return self._add(batch)

    def end(self, producer_id: int, epoch: int, *, commit: bool) -> int:
        """Add a marker and return its offset."""
        ends = "commit" if commit else "abort"
        return self._add(ModelBatch(self.end_offset, (), producer_id, epoch, ends=ends)).start

    def _add(self, batch: ModelBatch) -> range:
        self.batches.append(batch)
        self.end_offset = batch.end_offset
        return range(batch.base_offset, batch.end_offset)

    def truncate(self, end_offset: int) -> None:
        """Delete the values at and above an offset; a batch across it keeps its first values."""
        kept = []
        for batch in self.batches:
            if batch.end_offset <= end_offset:
                kept.append(batch)
            elif batch.base_offset < end_offset:
                size = end_offset - batch.base_offset
                kept.append(dataclasses.replace(batch, values=batch.values[:size]))
        self.batches = kept
        self.end_offset = end_offset

    def trim(self, start_offset: int) -> None:
        """Hide the records below an offset.  The state of producers does not change."""
        self.start_offset = max(self.start_offset, start_offset)

    # ---- results ----

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, value) of every record."""
        for batch in self.batches:
            for number, value in enumerate(batch.values):
                if batch.base_offset + number >= self.start_offset:
                    yield batch.base_offset + number, value

    def committed(self) -> list[tuple[int, bytes]]:
        """Return (offset, value) of the records that a read_committed reader sees."""
        hidden = {
            offset
            for producer_id, first, last in self.aborted()
            for batch in self.batches
            if batch.producer_id == producer_id and first <= batch.base_offset <= last
            for offset in range(batch.base_offset, batch.end_offset)
        }
        stable = self.last_stable_offset
        return [(o, value) for o, value in self.records() if o not in hidden and o < stable]

    def aborted(self) -> list[tuple[int, int, int]]:
        """Return (producer id, first offset, marker offset), in the order of the markers."""
        found = []
        open_since: dict[int, int] = {}
        for batch in self.batches:
            if batch.ends:
                first = open_since.pop(batch.producer_id, None)
                if batch.ends == "abort" and first is not None:
                    found.append((batch.producer_id, first, batch.base_offset))
            elif batch.transactional:
                open_since.setdefault(batch.producer_id, batch.base_offset)
        return found

    @property
    def last_stable_offset(self) -> int:
        """Return the first offset of the oldest open transaction, or the end."""
        first = min(self.ongoing().values(), default=self.end_offset)
        return max(first, self.start_offset)

    def ongoing(self) -> dict[int, int]:
        """Return producer id -> first offset of its open transaction."""
        return {
            producer_id: producer.transaction
            for producer_id, producer in self.producers().items()
            if producer.transaction is not None
        }

    def producers(self) -> dict[int, ModelProducer]:
        """Return the state of every producer, which decides about its next batch."""
        known: dict[int, ModelProducer] = {}
        for batch in self.batches:
            if batch.producer_id < 0:
                continue
            producer = known.setdefault(batch.producer_id, ModelProducer())
            if batch.epoch != producer.epoch:
                producer.epoch, producer.next_sequence, producer.last = batch.epoch, 0, None
            if batch.ends:
                producer.transaction = None
                continue
            producer.next_sequence = (batch.sequence + len(batch.values)) & 0x7FFFFFFF
            producer.last = batch
            if batch.transactional and producer.transaction is None:
                producer.transaction = batch.base_offset
        return known
