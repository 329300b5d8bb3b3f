"""Ledger: one partition of ``__consumer_offsets``, replayed.

Its state is what the log says and nothing else: records go in by their offsets, in order, and can
be replayed from any place at or before the last.  Offsets that were committed inside a transaction
wait, by producer, until its marker moves or drops them; of two offsets of one partition, the record
that lies further back in the log counts.

Pure: no file, no clock, no lock.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

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
    """A commit, and the log offset of the record that says so; None: a tombstone."""

    committed: CommittedOffset | None
    at: int


class GroupEntry:
    """What the log says of one group."""

    __slots__ = ("metadata", "offsets", "pending")

    def __init__(self) -> None:
        self.metadata: GroupMetadata | None = None
        self.offsets: dict[TopicPartition, _Noted] = {}
        self.pending: dict[int, dict[TopicPartition, _Noted]] = {}  # by producer id

    @property
    def empty(self) -> bool:
        """Whether there is nothing to say of it."""
        return self.metadata is None and not self.offsets and not self.pending

    def is_pending(self, partition: TopicPartition) -> bool:
        """Whether a transaction that is not over has an offset for it."""
        return any(partition in offsets for offsets in self.pending.values())


class Ledger:
    """The groups of one partition.  ``next_offset``: everything before it has been seen."""

    def __init__(self) -> None:
        self.groups: dict[str, GroupEntry] = {}
        self.next_offset = 0
        self._epochs: dict[int, int] = {}  # of producers whose transactions are open

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """The offsets of a group; those of transactions that are not over do not count."""
        entry = self.groups.get(group)
        if entry is None:
            return {}
        return {tp: noted.committed for tp, noted in entry.offsets.items() if noted.committed}

    def see(
        self, offset: int, key: bytes | None, value: bytes | None, *, producer_id: int = -1
    ) -> bool:
        """A record at a log offset; `producer_id` of a transactional one, -1 otherwise.

        Return False if it cannot be read.  Then it is logged and passed over: it stays in the log,
        and keeps nobody from the rest.
        """
        try:
            about = None if key is None else parse_key(key)
            if about is None:
                return True
            entry = self.groups.setdefault(about.group, GroupEntry())
            if isinstance(about, OffsetKey):
                committed = None if value is None else CommittedOffset.decode(value)
                self._note(entry, about, _Noted(committed, offset), producer_id)
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
        if producer_id >= 0:
            entry.pending.setdefault(producer_id, {})[partition] = noted
        else:
            _keep_newer(entry, partition, noted)

    def go_on(self, producer_id: int, epoch: int) -> None:
        """A producer appends to its transaction, or begins one.

        An epoch begins behind a marker.  Where offsets of an earlier one still wait, damage hides
        the marker: they may have been aborted, and do not count.
        """
        if epoch > self._epochs.get(producer_id, epoch):
            self.end_transaction(producer_id, commit=False)
        self._epochs[producer_id] = epoch

    def end_transaction(self, producer_id: int, commit: bool) -> None:
        """A marker: the producer's offsets count from now on, or never."""
        self._epochs.pop(producer_id, None)
        for group, entry in list(self.groups.items()):
            pending = entry.pending.pop(producer_id, None)
            if pending is not None and commit:
                for partition, noted in pending.items():
                    _keep_newer(entry, partition, noted)
            if entry.empty:
                del self.groups[group]


def _keep_newer(entry: GroupEntry, partition: TopicPartition, noted: _Noted) -> None:
    known = entry.offsets.get(partition)
    if known is not None and known.at > noted.at:
        return
    if noted.committed is None:
        # Older ones that come later, out of a transaction, would be wrong: but a tombstone is only
        # written when no transaction waits for the partition.
        entry.offsets.pop(partition, None)
    else:
        entry.offsets[partition] = noted
