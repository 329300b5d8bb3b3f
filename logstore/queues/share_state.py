"""Records of ``__share_group_state``: what a share group keeps of one partition.

The types are Kafka's (4.3): a key of type 0 has a snapshot of the whole state, a key of type 1 an
update.  An update has the start offset and the offsets whose state has changed since.  All updates
of a partition have one key, so the topic is not compacted: its ``cleanup.policy`` is ``delete``
without an age, and records before the last snapshots are trimmed.

Invariant: the state is a function of the last snapshot and of the updates after it, in the sequence
of the log.  Applying the same update twice has the effect of applying it once.

Acquired is not kept: a lease ends with its process.
"""

from __future__ import annotations

import base64
import bisect
import uuid
from collections.abc import Iterable
from typing import NamedTuple

from logstore.errors import InvalidRecordError
from logstore.format.wire_types import FieldReader, FieldWriter
from logstore.queues.share import Changes, StateBatch

__all__ = ["SHARE_GROUP_STATE", "ShareKey", "ShareState", "encode_snapshot", "encode_update"]

SHARE_GROUP_STATE = "__share_group_state"
SNAPSHOT, UPDATE = 0, 1  # types of a key
VALUE_VERSION = 0
# Nodes of a cluster and their changes of leader: a store has neither.
STATE_EPOCH = LEADER_EPOCH = 0
COMPLETE_TAG = 0  # of the tagged field with the number of finished offsets


class ShareKey(NamedTuple):
    """A share group, the id of a topic, and a partition of it."""

    group: str
    topic_id: uuid.UUID
    partition: int

    def encode(self, kind: int) -> bytes:
        """
        >>> ShareKey("g", uuid.UUID(int=1), 2).encode(SNAPSHOT).hex()
        '00000001670000000000000000000000000000000100000002'
        """
        out = FieldWriter().int16(kind).string(self.group).unique_id(self.topic_id)
        return out.int32(self.partition).take()

    @classmethod
    def decode(cls, raw: bytes) -> tuple[int, ShareKey] | None:
        """Return the type and the key of a record; None for a type that is not known."""
        fields = FieldReader(raw)
        kind = fields.int16()
        if kind not in (SNAPSHOT, UPDATE):
            return None
        return kind, cls(fields.string(), fields.unique_id(), fields.int32())

    @property
    def coordinator_key(self) -> str:
        """The text whose hash chooses the partition of ``__share_group_state``, as in Kafka."""
        topic = base64.urlsafe_b64encode(self.topic_id.bytes).decode().rstrip("=")
        return f"{self.group}:{topic}:{self.partition}"


def _batches(out: FieldWriter, batches: Iterable[StateBatch]) -> FieldWriter:
    def batch(fields: FieldWriter, each: StateBatch) -> None:
        fields.int64(each.first).int64(each.last).int8(each.state)
        fields.int16(min(each.attempts, 32767)).tags()

    return out.compact_array(batches, batch)


def encode_snapshot(
    changes: Changes, *, epoch: int, finished: int, created_ms: int, now_ms: int
) -> bytes:
    """Return the value of a snapshot; `finished` offsets at or above the start are finished."""
    out = FieldWriter().int16(VALUE_VERSION).int32(epoch).int32(STATE_EPOCH).int32(LEADER_EPOCH)
    out.int64(changes.start).int64(created_ms).int64(now_ms)
    return _batches(out, changes.batches).tags([(COMPLETE_TAG, finished.to_bytes(4))]).take()


def encode_update(changes: Changes, *, epoch: int, finished: int) -> bytes:
    """Return the value of an update; `epoch` is that of the snapshot before it."""
    out = FieldWriter().int16(VALUE_VERSION).int32(epoch).int32(LEADER_EPOCH).int64(changes.start)
    return _batches(out, changes.batches).tags([(COMPLETE_TAG, finished.to_bytes(4))]).take()


def _read_batches(fields: FieldReader) -> list[StateBatch]:
    def batch(each: FieldReader) -> StateBatch:
        found = StateBatch(each.int64(), each.int64(), each.int8(), each.int16())
        each.tags()
        if not 0 <= found.first <= found.last:
            raise InvalidRecordError(f"a state of the offsets {found.first} to {found.last}")
        return found

    return fields.compact_array(batch) or []


class ShareState:
    """The state of one partition, replayed from records."""

    def __init__(self) -> None:
        self.start = 0
        self.epoch = 0  # of the last snapshot
        self.created_ms = -1
        self.updates = 0  # since the last snapshot
        self.snapshot_at = -1  # the offset of the last snapshot in the log
        self._batches: list[StateBatch] = []  # sorted, without overlaps

    @property
    def batches(self) -> list[StateBatch]:
        """The states of the offsets at or above `start`, sorted and without overlaps."""
        return [each for each in self._batches if each.last >= self.start]

    def reset(self, start: int, batches: list[StateBatch]) -> None:
        """Replace the state."""
        self.start, self._batches = start, batches

    def see(self, kind: int, value: bytes, offset: int) -> None:
        """Take the value of a record at a log offset.  Raises InvalidRecordError."""
        fields = FieldReader(value)
        version = fields.int16()
        if version != VALUE_VERSION:
            raise InvalidRecordError(f"a state of version {version}; {VALUE_VERSION} is known")
        epoch = fields.int32()
        if kind == SNAPSHOT:
            fields.int32()  # the epoch of the state
            fields.int32()  # the epoch of the leader
            start, created, _ = fields.int64(), fields.int64(), fields.int64()
            batches = _read_batches(fields)
            self.epoch, self.start, self.created_ms = epoch, start, created
            self.updates, self.snapshot_at, self._batches = 0, offset, []
        else:
            fields.int32()  # the epoch of the leader
            start, batches = fields.int64(), _read_batches(fields)
            self.start = max(self.start, start)  # -1: it has not moved
            self.updates += 1
        for batch in batches:
            self._put(batch)

    def _put(self, new: StateBatch) -> None:
        """Set the state of the offsets of a batch."""
        held = self._batches
        # The batches from `low` to `high` overlap the new one; their parts outside of it stay.
        low = bisect.bisect_left(held, new.first, key=lambda each: each.last)
        high = bisect.bisect_right(held, new.last, key=lambda each: each.first)
        parts = [new]
        if low < high:
            first, last = held[low], held[high - 1]
            if first.first < new.first:
                parts.insert(0, first._replace(last=new.first - 1))
            if last.last > new.last:
                parts.append(last._replace(first=new.last + 1))
        held[low:high] = parts
