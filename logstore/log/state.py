"""The small files of a partition directory that Kafka ignores.

    logstore.state    PartitionState: how the log was left; replaced atomically
    logstore.durable  DurableMark: the offset below which the log is durable; overwritten in place
                      after an fsync
    logstore.cleaner  CleanerCheckpoint: the offset up to which the log is compacted
    logstore.start    StartMark: a copy of the start offset

Invariant: each file has a checksum, and holds only what was true before it was written.  So a file
that is missing, torn or stale makes the next recovery longer, and never loses a record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import struct
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from logstore import _native
from logstore.files.directory import Directory
from logstore.files.small_file import MISREAD, with_checksum, without_checksum

__all__ = ["CleanerCheckpoint", "DurableMark", "PartitionState", "StartMark", "lists_of_aborts"]

log = logging.getLogger("logstore.checkpoint")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionState:
    """How a partition was left.

    `clean` counts only if the directory still has the segments and sizes that the state lists.
    """

    clean: bool  # the log was closed: no recovery is needed
    version: int  # incremented if the log changes by more than an append: readers load it again
    boot: str  # boot id of the machine when the partition was last opened for writing
    recovery_point: int  # everything below this offset was durable and checked
    start_offset: int
    end_offset: int
    dense_from: int  # every offset >= this exists unless the log is corrupt
    segments: int
    active_base: int
    active_bytes: int
    active_indexes_crc: int
    first_timestamp: int  # of the active segment, for rolling by time
    leader_epoch: int = 0  # the latest that began here, even if its records were truncated
    aborts: int = -1  # checksum of the list of .txnindex files: see `lists_of_aborts`
    cuts: int = 0  # number of truncations
    cut_offsets: tuple[int, ...] = ()  # of the newest truncations, oldest first
    lossy: bool = False  # records that a replica has acknowledged may be gone

    NAME = "logstore.state"

    @classmethod
    def of_new(cls) -> PartitionState:
        """Return the state of a new partition, which has one empty segment at offset 0."""
        return cls(
            clean=True,
            version=0,
            boot="",
            recovery_point=0,
            start_offset=0,
            end_offset=0,
            dense_from=0,
            segments=1,
            active_base=0,
            active_bytes=0,
            active_indexes_crc=_native.crc32c(b""),
            first_timestamp=-1,
            aborts=lists_of_aborts([(0, None)], set(), 0, 0, True),
        )

    def encode(self) -> bytes:
        # Not dataclasses.asdict: its deep copy takes longer than opening the file.
        fields = {name: getattr(self, name) for name in self.__slots__}
        if not self.lossy:
            del fields["lossy"]  # the file of a log that is not replicated stays as it was
        return with_checksum(json.dumps(fields, separators=(",", ":")).encode())

    def write(self, directory: Directory, *, sync: bool = True) -> None:
        directory.replace(self.NAME, self.encode(), sync=sync)

    @classmethod
    def read(cls, directory: Directory) -> PartitionState | None:
        """Return the state, or None if the file is missing, damaged or not plausible."""
        try:
            content = directory.read(cls.NAME, 65536)
        except FileNotFoundError:
            return None
        try:
            fields = json.loads(without_checksum(content))
            fields["cut_offsets"] = tuple(fields.get("cut_offsets", ()))
            state = cls(**fields)
        except MISREAD:
            return None
        return state if state._is_plausible() else None

    def _is_plausible(self) -> bool:
        """Return whether types and ranges are right; a valid checksum does not ensure that."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        names = ("clean", "boot", "cut_offsets", "lossy")
        clean, boot, cut_offsets, lossy = (values.pop(name) for name in names)
        numbers = (*values.values(), *cut_offsets)
        return (
            isinstance(clean, bool)
            and isinstance(lossy, bool)
            and isinstance(boot, str)
            and all(type(number) is int and -1 <= number < 1 << 63 for number in numbers)
            and min(self.recovery_point, self.dense_from, self.version) >= 0
            and 0 <= self.start_offset <= self.end_offset
        )


def lists_of_aborts(
    spans: Iterable[tuple[int, int | None]],
    indexed: Collection[int],
    start: int,
    recovery_point: int,
    clean: bool,
) -> int:
    """Return a checksum of the bases of the segments with a durable .txnindex file.

    Most segments have no such file, so a lost one would not be noticed without this.  `spans` are
    (base offset, base offset of the next segment) of all segments; None for the last.
    """
    bases = [
        base
        for base, following in spans
        if base in indexed and (clean if following is None else start < following <= recovery_point)
    ]
    return _native.crc32c(b"".join(b"%d\n" % base for base in bases))


class DurableMark:
    """The offset below which the log is durable, in one small file that stays open.

    The file is 12 bytes: the offset and its CRC-32C, big-endian.  A torn write fails the checksum,
    and the mark then counts as missing.
    """

    NAME = "logstore.durable"
    _LAYOUT = struct.Struct(">qI")

    def __init__(self, directory: Directory) -> None:
        self._file = directory.open(self.NAME, write=True, create=True)

    def write(self, offset: int, *, sync: bool = False) -> None:
        """Overwrite the mark.  Call this only after the fsync of the log up to `offset`.

        An old mark is still true after an append, so the write is not synced.  Before the log is
        truncated below the mark, the caller lowers it with `sync`.
        """
        packed = struct.pack(">q", offset)
        self._file.pwrite(packed + struct.pack(">I", _native.crc32c(packed)), 0)
        if sync:
            self._file.datasync()

    def close(self) -> None:
        self._file.close()

    @classmethod
    def read(cls, directory: Directory) -> int:
        """Return the offset, or -1 if the file is missing or damaged."""
        with contextlib.suppress(FileNotFoundError, struct.error):
            content = directory.read(cls.NAME, 64)
            offset, checksum = cls._LAYOUT.unpack(content)
            if _native.crc32c(content[:8]) == checksum and offset >= 0:
                return int(offset)
        return -1


class _OffsetFile:
    """One offset with a checksum, in a small file that is replaced atomically."""

    NAME: ClassVar[str]

    @classmethod
    def write(cls, directory: Directory, offset: int) -> None:
        body = b"%d" % offset
        directory.replace(cls.NAME, with_checksum(body))

    @classmethod
    def read(cls, directory: Directory) -> int:
        """Return the offset, or -1 if the file is missing or damaged."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(without_checksum(directory.read(cls.NAME, 64)))
        return -1


class StartMark(_OffsetFile):
    """A copy of the start offset, for a start offset that is inside a segment.

    No file name holds such an offset.  Without the copy, damage of the state file would make
    deleted records readable again.
    """

    NAME = "logstore.start"


class CleanerCheckpoint(_OffsetFile):
    """The first offset that no compaction has read.

    A value that is too low or missing makes the next compaction longer, and never loses a record.
    A broker keeps the number in one file for all of its partitions; here each partition has a file.
    """

    NAME = "logstore.cleaner"
