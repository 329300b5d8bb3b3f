"""Ledger: the groups and offsets of one partition of ``__consumer_offsets``, in memory.

Invariant: the state is a function of the records below `next_offset`.  `see` takes records in the
sequence of the log.  They may be taken again from any earlier offset on, if all later ones follow.
Offsets that were committed in a transaction are pending, by producer id, until the transaction's
marker applies or drops them.  Of two commits for one partition, the one whose record is later in
the log is valid, even if the marker of the other one is later.

It has no file, no clock and no lock.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from logstore.coordinators.consumer_group.records import ConsumerGroupKey, ConsumerGroupState
from logstore.coordinators.offset_records import (
    CommittedOffset,
    GroupMetadata,
    OffsetKey,
    TopicPartition,
    parse_key,
)
from logstore.errors import InvalidRecordError

__all__ = ["GroupEntry", "Ledger"]

log = logging.getLogger("logstore.offsets")


class _Noted(NamedTuple):
    """A committed offset, or None for a tombstone, and the log offset of its record."""

    committed: CommittedOffset | None
    at: int


class GroupEntry:
    """One group in the log: its metadata, its offsets, and those of open transactions.

    `consumer` has the records of a group of the consumer protocol; None if there are none.
    """

    __slots__ = ("consumer", "metadata", "offsets", "pending")

    def __init__(self) -> None:
        self.metadata: GroupMetadata | None = None
        self.consumer: ConsumerGroupState | None = None
        self.offsets: dict[TopicPartition, _Noted] = {}
        self.pending: dict[int, dict[TopicPartition, _Noted]] = {}  # by producer id

    @property
    def empty(self) -> bool:
        """Whether the group has neither metadata nor offsets."""
        known = self.metadata is not None or self.consumer is not None
        return not known and not self.offsets and not self.pending

    def is_pending(self, partition: TopicPartition) -> bool:
        """Return whether an open transaction has committed an offset for the partition."""
        return any(partition in offsets for offsets in self.pending.values())


class Ledger:
    """The groups of one partition.  All records below ``next_offset`` have been seen."""

    def __init__(self) -> None:
        self.groups: dict[str, GroupEntry] = {}
        self.next_offset = 0  # set by the caller, after a run of `see`
        self._epochs: dict[int, int] = {}  # of producers whose transactions are open

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Return the offsets of a group, without those of open transactions."""
        entry = self.groups.get(group)
        if entry is None:
            return {}
        return {tp: noted.committed for tp, noted in entry.offsets.items() if noted.committed}

    def see(
        self, offset: int, key: bytes | None, value: bytes | None, *, producer_id: int = -1
    ) -> bool:
        """Take a record at a log offset; `producer_id` is -1 unless it is part of a transaction.

        Return False if the record cannot be decoded.  Then it is logged and skipped, so that the
        other groups can be used.
        """
        try:
            about = None if key is None else parse_key(key)
            if about is None:
                return True
            # A group has an entry from its first record on; the last tombstone removes the entry.
            entry = self.groups.setdefault(about.group, GroupEntry())
            if isinstance(about, OffsetKey):
                committed = None if value is None else CommittedOffset.decode(value)
                self._note(entry, about, _Noted(committed, offset), producer_id)
            elif isinstance(about, ConsumerGroupKey):
                state = entry.consumer or ConsumerGroupState()
                state.put(about.kind, about.name, None if value is None else about.decode(value))
                entry.consumer = state or None
            else:
                entry.metadata = None if value is None else GroupMetadata.decode(value)
        except InvalidRecordError as error:
            log.warning("a record of a group at offset %d cannot be read: %s", offset, str(error))
            return False
        if entry.empty:
            del self.groups[about.group]
        return True

    def _note(self, entry: GroupEntry, about: OffsetKey, noted: _Noted, producer_id: int) -> None:
        partition = TopicPartition(about.topic, about.partition)
        # Not visible until the marker: a `committed` in between returns the offset before.
        if producer_id >= 0:
            entry.pending.setdefault(producer_id, {})[partition] = noted
        else:
            _keep_newer(entry, partition, noted)

    def go_on(self, producer_id: int, epoch: int) -> None:
        """Note that a producer appends to its transaction, or begins one.

        A new epoch begins after the marker of the last transaction.  If offsets of an earlier epoch
        are still pending, their marker is unreadable.  They may have been aborted: drop them.
        """
        if epoch > self._epochs.get(producer_id, epoch):
            self.end_transaction(producer_id, commit=False)
        self._epochs[producer_id] = epoch

    def end_transaction(self, producer_id: int, commit: bool) -> None:
        """Take a marker: apply the producer's pending offsets, or drop them."""
        self._epochs.pop(producer_id, None)
        # A copy, because entries are deleted in the loop.  A producer may have committed for
        # several groups in one transaction.
        for group, entry in list(self.groups.items()):
            pending = entry.pending.pop(producer_id, None)
            if pending is not None and commit:
                for partition, noted in pending.items():
                    _keep_newer(entry, partition, noted)
            if entry.empty:
                del self.groups[group]


def _keep_newer(entry: GroupEntry, partition: TopicPartition, noted: _Noted) -> None:
    known = entry.offsets.get(partition)
    # As in Kafka, the place of the record in the log decides, not the place of its marker: a plain
    # commit after the record wins, although the marker is later.
    if known is not None and known.at > noted.at:
        return
    if noted.committed is None:
        # The offset of the tombstone is not kept.  A transaction that ends later could apply an
        # older offset; but a tombstone is written only if no offset of the partition is pending.
        entry.offsets.pop(partition, None)
    else:
        entry.offsets[partition] = noted
