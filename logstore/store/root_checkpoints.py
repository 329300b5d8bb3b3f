"""RootCheckpoints: the offsets of a store's partitions in Kafka's four checkpoint files.

Invariant: an offset is durable in the files of its partition before it is written to a checkpoint.
Offsets are taken from the partitions that are open; those of the other partitions are kept.  The
twin is written before the checkpoints, with their new contents: a checkpoint with other contents
was written by a broker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping

from logstore._native import crc32c
from logstore.files.directory import Directory
from logstore.partition.partition import Partition
from logstore.recovery.loader import Claims
from logstore.root.catalogue import Catalogue
from logstore.root.checkpoint_twin import CheckpointTwin
from logstore.root.checkpoints import (
    CLEANER_OFFSETS,
    HIGH_WATERMARKS,
    RECOVERY_POINTS,
    START_OFFSETS,
    TopicPartition,
    offsets_text,
    write_offsets,
)

__all__ = ["RootCheckpoints"]

WRITING_ORDER = (HIGH_WATERMARKS, CLEANER_OFFSETS, RECOVERY_POINTS, START_OFFSETS)

Offsets = dict[TopicPartition, int]


class RootCheckpoints:
    """Recovery points, start offsets, high watermarks and cleaner offsets of a store.

    The Store holds its lock for every call that changes them.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.recovery_points: Offsets = {}
        self._start_offsets: Offsets = {}
        self._high_watermarks: Offsets = {}
        self._cleaner_offsets: Offsets = {}
        self._written: dict[str, Offsets] = {}  # as they are on disk
        self._left_watermarks: Offsets = {}  # as the files had them when the store was opened
        # In a cluster: the row of a partition without a high watermark of its own stays as it is.
        self.keep_watermarks = False
        self._had_catalogue = False

    @property
    def _by_name(self) -> dict[str, Offsets]:
        return {
            RECOVERY_POINTS: self.recovery_points,
            START_OFFSETS: self._start_offsets,
            HIGH_WATERMARKS: self._high_watermarks,
            CLEANER_OFFSETS: self._cleaner_offsets,
        }

    def read(self) -> bool:
        """Read the files; return whether a broker has written one of them since."""
        twin = CheckpointTwin.read(self._directory)
        self._had_catalogue = twin is not None and twin.has_catalogue
        foreign = False
        for name, own in self._by_name.items():
            found = CheckpointTwin.reconcile(twin, self._directory, name)
            foreign = foreign or found.foreign
            own.clear()
            own.update(found.offsets)
            if own and twin is not None and not found.foreign and not found.fault:
                # A copy: `note` changes `own` in place, and `write` compares the two.
                self._written[name] = dict(own)
        self._left_watermarks = dict(self._high_watermarks)
        return foreign

    def left_watermark(self, key: TopicPartition) -> int | None:
        """Return the high watermark that the files had when the store was opened."""
        return self._left_watermarks.get(key)

    @property
    def lost_catalogue(self) -> bool:
        """Whether the catalogue of topics is gone although the twin records that there was one."""
        return self._had_catalogue and not self._directory.exists(Catalogue.NAME)

    def claims(self, key: TopicPartition, *, only: bool) -> Claims:
        """Return the offsets of one partition; `only`: its own state file is ignored."""
        return Claims(
            self.recovery_points.get(key, 0),
            self._start_offsets.get(key, 0),
            self._cleaner_offsets.get(key, -1),
            only=only,
        )

    def note(self, partition: Partition) -> None:
        """Set the offsets of a partition to those that are durable now."""
        key = (partition.topic, partition.number)
        start = partition.start_offset
        self.recovery_points[key] = partition.durable_offset
        if not self.keep_watermarks or partition.parts.view.high_watermark is not None:
            self._high_watermarks[key] = partition.high_watermark
        # As Kafka: a start at a segment boundary is clear from the file names, and has no row.
        inside = start > partition.segments[0].base_offset
        _put(self._start_offsets, key, start if inside else None)
        dirty = partition.first_dirty_offset if partition.config.compacts else start
        _put(self._cleaner_offsets, key, dirty if dirty > start else None)

    def note_closed(self, partition: Partition) -> None:
        """Update the offsets of a noted partition: closing has made its records durable."""
        key = (partition.topic, partition.number)
        # After a failed fsync the closed partition makes no claim: its row stays the lower one.
        if key in self.recovery_points and partition.failure is None:
            self.recovery_points[key] = partition.durable_offset
            # Not of a replica: its high watermark is what the leader knows to be in sync.
            if not self.keep_watermarks and partition.parts.view.high_watermark is None:
                self._high_watermarks[key] = partition.durable_offset

    def forget(self, keys: Collection[TopicPartition]) -> bool:
        """Remove the offsets of deleted partitions; return whether files on disk have some.

        The files must not have them when a new partition of that name is made.
        """
        gone = set(keys)
        for offsets in (*self._by_name.values(), self._left_watermarks):
            for key in gone & offsets.keys():
                del offsets[key]
        # If a file on disk kept the row, a new partition of that name would start at an old offset.
        return any(gone & written.keys() for written in self._written.values())

    def write(self, opened: Iterable[Partition]) -> None:
        """Note the open partitions and write the files that have changed."""
        for partition in opened:
            if not partition.closed and partition.failure is None:
                self.note(partition)
        changed = {
            name: offsets
            for name, offsets in self._by_name.items()
            if self._written.get(name) != offsets
        }
        if not changed:
            return
        # The twin first, with both checksums of each file: after a crash at any line below, each
        # file has one of them, and is recognised as ours.
        self._announce(changed)
        for name in WRITING_ORDER:
            if name in changed:
                write_offsets(self._directory, name, changed[name])
                self._written[name] = dict(changed[name])

    def _announce(self, changed: Mapping[str, Offsets]) -> None:
        """Write the twin, with the present and the new checksums of the files."""
        checksums, offsets = {}, {}
        for name, now in self._by_name.items():
            known = []
            with contextlib.suppress(FileNotFoundError):
                known.append(crc32c(self._directory.read(name)))
            if name in changed:
                known.append(crc32c(offsets_text(now)))
            checksums[name], offsets[name] = tuple(known), dict(now)
        # Kept also after the catalogue is lost, so that its loss stays visible.
        if self._had_catalogue or self._directory.exists(Catalogue.NAME):
            self._had_catalogue = True
            checksums[Catalogue.NAME], offsets[Catalogue.NAME] = (), {}
        CheckpointTwin(checksums, offsets).write(self._directory)


def _put(offsets: Offsets, key: TopicPartition, offset: int | None) -> None:
    if offset is None:
        offsets.pop(key, None)
    else:
        offsets[key] = offset
