"""Divergence: up to which offset a copy and its source have the same records.

The leader epochs are compared first (KIP-101, KIP-279).  A source may be truncated and written
again within one epoch, so the bytes of the last common batch are compared after that.  If they
differ, the first batch that differs is found by bisection: two logs that have a batch in common
have all batches before it in common.

Nothing is changed here.
"""

from __future__ import annotations

from logstore.format.batch import DELETE_HORIZON, BatchHeader
from logstore.partition.partition import Partition
from logstore.replication.source import Place, Source

__all__ = ["batch_start", "common_end"]


def common_end(source: Source, place: Place, mine: Partition) -> int:
    """Return the end of what the log `mine` and its source have in common; a start of a batch."""
    end = _epochs_end(source, place, mine)
    low = max(mine.start_offset, source.bounds(place)[0])
    if end <= low or _is_same(source, place, mine, end - 1):
        return batch_start(mine, end)
    high = end - 1
    while low < high:
        middle = (low + high) // 2
        if _is_same(source, place, mine, middle):
            low = middle + 1
        else:
            high = middle
    return batch_start(mine, low)


def _epochs_end(source: Source, place: Place, mine: Partition) -> int:
    """Return the end of the common leader epochs."""
    history, end = mine.leader_epochs, mine.end_offset
    if end == mine.start_offset:
        return end
    history.truncate_from_end(end)
    while (latest := history.latest) is not None:
        answer = source.end_of_epoch(place, latest)
        if answer is None:  # every epoch of the source is below this one
            end = min(end, history.entries[-1][1])
            history.truncate_from_end(end)
            continue
        cut = history.cut_for(answer, end)
        end = cut.offset
        history.truncate_from_end(end)
        if cut.agreed:
            break
    return max(end, mine.start_offset)


def _is_same(source: Source, place: Place, mine: Partition, offset: int) -> bool:
    """Whether both logs have the same batch at `offset`, as far as it can be known."""
    here = next(iter(mine.read_batches(offset, 1)), None)
    there = source.batch_at(place, offset)
    if here is None or there is None or here == there:
        return True
    if not mine.config.compacts:
        return False
    # Compaction at the source removes records and sets a horizon: then the bytes differ, and only
    # the epochs can be compared.
    ours, theirs = BatchHeader.parse(here), BatchHeader.parse(there)
    rewritten = theirs.record_count < ours.record_count or theirs.attributes & DELETE_HORIZON
    return bool(rewritten) or theirs.base_offset > ours.base_offset


def batch_start(mine: Partition, offset: int) -> int:
    """Return `offset`, or the start of the batch that it is inside of: no batch is split."""
    start, end = mine.start_offset, mine.end_offset
    if not start < offset < end:
        return max(start, min(offset, end))
    raw = next(iter(mine.read_batches(offset, 1)), None)
    base = offset if raw is None else BatchHeader.parse(raw).base_offset
    return max(min(base, offset), start)
