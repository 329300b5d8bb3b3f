"""The reference compaction: one pass over the batches of a log, in plain and slow Python.

Its input is the batches that ``read_log`` decodes; its output is compared with the batches that the
engine writes.  It follows Kafka's rules and shares no code with the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from logstore.testing.reference import ReferenceBatch, ReferenceRecord

__all__ = ["CompactionRules", "reference_compaction"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionRules:
    """The parameters of a pass."""

    first_dirty: int  # the map of keys is built from this offset on
    end: int  # exclusive: batches at or above it stay unchanged
    now_ms: int
    delete_retention_ms: int
    bases: Sequence[int]  # of the segments; a full map stops the pass after its segment
    key_limit: int | None = None  # keys that fit into the map; None: no limit
    # (producer id, first offset, offset of the marker) of every aborted transaction
    aborted: Sequence[tuple[int, int, int]] = ()
    # producer id -> (epoch, last offset of its data or -1)
    producers: dict[int, tuple[int, int]] = field(default_factory=dict)


def reference_compaction(
    batches: Iterable[ReferenceBatch], rules: CompactionRules
) -> tuple[list[ReferenceBatch], int]:
    """Return the remaining batches, and the offset up to which they are compacted.

    ``size`` and ``position`` of a rewritten batch are those of the old one.
    """
    batches = list(batches)
    newest, latest = _newest_offsets(batches, rules)
    done = rules.end if latest is None else latest + 1
    latest = rules.end - 1 if latest is None else latest
    rewritten = min((base for base in rules.bases if base >= done), default=rules.end)
    kept: list[ReferenceBatch] = []
    open_committed: set[int] = set()
    for batch in batches:
        if batch.base_offset >= rewritten:
            kept.append(batch)
            continue
        left = _compacted(batch, batches, rules, newest, latest, open_committed)
        if left is not None:
            kept.append(left)
    return kept, done


def _newest_offsets(
    batches: Sequence[ReferenceBatch], rules: CompactionRules
) -> tuple[dict[bytes, int], int | None]:
    """Return key -> newest offset, and the last offset read before the map was full."""
    newest: dict[bytes, int] = {}
    latest = rules.first_dirty - 1
    for batch in batches:
        if batch.last_offset < rules.first_dirty or batch.base_offset >= rules.end:
            continue
        if not batch.control and _aborted_by(batch, rules) is None:
            for record in batch.records:
                if record.key is None or record.offset < rules.first_dirty:
                    continue
                full = rules.key_limit is not None and len(newest) >= rules.key_limit
                if full and record.key not in newest:
                    return newest, latest
                newest[record.key] = record.offset
                latest = record.offset
        latest = batch.last_offset
    return newest, None


def _aborted_by(batch: ReferenceBatch, rules: CompactionRules) -> tuple[int, int, int] | None:
    if batch.transactional:
        for transaction in rules.aborted:
            producer, first, last = transaction
            if producer == batch.producer_id and first <= batch.base_offset <= last:
                return transaction
    return None


def _is_useless(
    batch: ReferenceBatch,
    batches: Sequence[ReferenceBatch],
    rules: CompactionRules,
    open_committed: set[int],
) -> bool:
    """Return whether no record of the marker's transaction is left."""
    if not batch.records:
        return True
    key = batch.records[0].key or b""
    kind = int.from_bytes(key[2:4], "big")
    if kind == 0:
        transaction = _aborted_by(batch, rules)
        return not any(
            transaction is not None
            and not other.control
            and other.base_offset < batch.base_offset
            and _aborted_by(other, rules) == transaction
            for other in batches
        )
    if kind == 1:
        observed = batch.producer_id in open_committed
        open_committed.discard(batch.producer_id)
        return not observed
    return False


def _must_stay(batch: ReferenceBatch, rules: CompactionRules) -> bool:
    if batch.next_offset == rules.end:
        return True
    if batch.producer_id not in rules.producers:
        return False
    epoch, last = rules.producers[batch.producer_id]
    return (
        batch.last_offset == last if last >= 0 else batch.control and epoch == batch.producer_epoch
    )


def _compacted(
    batch: ReferenceBatch,
    batches: Sequence[ReferenceBatch],
    rules: CompactionRules,
    newest: dict[bytes, int],
    latest: int,
    open_committed: set[int],
) -> ReferenceBatch | None:
    horizon = batch.delete_horizon
    passed = horizon is not None and horizon <= rules.now_ms
    useless = False
    records: list[ReferenceRecord] = []
    if batch.control:
        useless = _is_useless(batch, batches, rules, open_committed)
        records = [] if useless and passed else list(batch.records)
    elif _aborted_by(batch, rules) is None:
        if batch.transactional:
            open_committed.add(batch.producer_id)
        for record in batch.records:
            beyond = record.offset > latest
            is_newest = record.key is not None and record.offset >= newest.get(record.key, -1)
            if beyond or (is_newest and not (record.value is None and passed)):
                records.append(record)
    if not records:
        if not _must_stay(batch, rules):
            return None
        return replace(batch, records=(), codec=0, delete_horizon=None, base_timestamp=-1)
    if horizon is None and (useless or any(record.value is None for record in records)):
        horizon = rules.now_ms + rules.delete_retention_ms
    elif tuple(records) == batch.records:
        return batch
    times = [record.timestamp for record in records]
    return replace(
        batch,
        records=tuple(records),
        delete_horizon=horizon,
        base_timestamp=times[0] if horizon is None else horizon,
        max_timestamp=batch.max_timestamp if batch.log_append_time else max(times),
    )
