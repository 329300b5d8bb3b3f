"""The columns of ``metadata=true``: the segment, position and batch of a record.

They are read from the batch headers in a second pass over the log, so this is for inspection, not
for speed.  One Python object is made per batch, none per record.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from logstore import BatchHeader, LocatedBatch, Partition
from pyspark_logstore.offsets import Range

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

__all__ = ["BatchMetadata"]

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
SEQUENCE_MAX = (1 << 31) - 1


class BatchMetadata:
    """The batches of a range, followed along with its rows."""

    def __init__(self, partition: Partition, wanted: Range) -> None:
        # Aborted batches too: a row finds its batch by offset, at any isolation level.
        self._batches = partition.scan(wanted.start, wanted.end, on_lost="skip").located_batches()
        self._known: list[tuple[LocatedBatch, BatchHeader]] = []

    def columns(self, offsets: npt.NDArray[np.int64]) -> dict[str, pa.Array]:
        """The metadata of rows by their offsets, which only grow from call to call."""
        import numpy
        import pyarrow as pa

        known = self._follow(int(offsets[0]), int(offsets[-1]))
        headers = [header for _, header in known]

        def of_batch(values: list[Any]) -> npt.NDArray[Any]:
            return numpy.array(values)[rows]

        bases = numpy.array([header.base_offset for header in headers], numpy.int64)
        rows = numpy.searchsorted(bases, offsets, side="right") - 1
        sequences = of_batch([header.base_sequence for header in headers]).astype(numpy.int64)
        counted = (sequences + offsets - bases[rows]) & SEQUENCE_MAX
        files = pa.array([Path(batch.path).name for batch, _ in known])
        codecs = pa.array([CODECS[header.codec] for header in headers])
        return {
            "leaderEpoch": pa.array(of_batch([header.leader_epoch for header in headers])),
            "batchOffset": pa.array(bases[rows]),
            "producerId": pa.array(of_batch([header.producer_id for header in headers])),
            "sequence": pa.array(numpy.where(sequences < 0, -1, counted)),
            "isControl": pa.repeat(pa.scalar(False), len(offsets)),
            "segment": files.take(pa.array(rows)),
            "position": pa.array(of_batch([batch.position for batch, _ in known])),
            "compressionType": codecs.take(pa.array(rows)),
        }

    def _follow(self, first: int, last: int) -> list[tuple[LocatedBatch, BatchHeader]]:
        """The batches that hold the offsets from `first` to `last`."""
        known = [each for each in self._known if each[1].next_offset > first]
        while not known or known[-1][1].next_offset <= last:
            batch = next(self._batches)
            header = BatchHeader.parse(batch.raw)
            if header.next_offset > first:
                known.append((batch, header))
        self._known = known
        return known
