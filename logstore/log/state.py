"""Small files beside the log: the partition's own state, the durable mark, Kafka's text files.

``logstore.state``, ``logstore.durable``, ``logstore.cleaner`` and ``logstore.start`` are ours, and
Kafka ignores them.  The first is replaced atomically and says how the log was left; the second is
overwritten in place after every fsync and says how much of the log is known to be on stable
storage; the third says how far compaction got; the fourth repeats where the log starts.  All are
checksummed, and only ever claim what was true before they were written: one that is missing, torn
or stale costs a longer recovery, never a record.
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
    """How a partition was left.  `clean` speaks only for a directory that still looks the same."""

    clean: bool
    version: int  # moves when the log changed by more than an append: readers start over
    boot: str  # the machine's boot in which it was last opened for writing
    recovery_point: int  # everything below this offset was durable and checked
    start_offset: int
    end_offset: int
    dense_from: int  # no offset at or above this is missing, unless by damage
    segments: int
    active_base: int
    active_bytes: int
    active_indexes_crc: int
    first_timestamp: int  # of the active segment, for rolling by time
    leader_epoch: int = 0  # the last that was begun here, even if a cut took its records
    aborts: int = -1  # which segments list aborted transactions: see `lists_of_aborts`
    cuts: int = 0  # truncations so far
    cut_offsets: tuple[int, ...] = ()  # of the newest truncations, oldest first

    NAME = "logstore.state"

    @classmethod
    def of_new(cls) -> PartitionState:
        """Of a partition that is made complete, with an empty segment at offset 0."""
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
        # By hand: dataclasses.asdict copies deeply, and takes longer than opening the file.
        fields = {name: getattr(self, name) for name in self.__slots__}
        return with_checksum(json.dumps(fields, separators=(",", ":")).encode())

    def write(self, directory: Directory, *, sync: bool = True) -> None:
        directory.replace(self.NAME, self.encode(), sync=sync)

    @classmethod
    def read(cls, directory: Directory) -> PartitionState | None:
        """The state, or None when there is none that can be trusted."""
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
        """A right checksum says who wrote it, not that it makes sense."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        clean, boot, cut_offsets = (values.pop(n) for n in ("clean", "boot", "cut_offsets"))
        numbers = (*values.values(), *cut_offsets)
        return (
            isinstance(clean, bool)
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
    """A checksum over which segments have a .txnindex, as far as these were durable.

    `spans` are (base offset, base of the next) of all segments.  Most have no such file, and a lost
    one would look the same.
    """
    bases = [
        base
        for base, following in spans
        if base in indexed and (clean if following is None else start < following <= recovery_point)
    ]
    return _native.crc32c(b"".join(b"%d\n" % base for base in bases))


class DurableMark:
    """The offset below which all is known to be durable, kept in one small file."""

    NAME = "logstore.durable"
    _LAYOUT = struct.Struct(">qI")

    def __init__(self, directory: Directory) -> None:
        self._file = directory.open(self.NAME, write=True, create=True)

    def write(self, offset: int, *, sync: bool = False) -> None:
        """Call only after the fsync that makes it true.  Itself needs none, unless it goes down."""
        packed = struct.pack(">q", offset)
        self._file.pwrite(packed + struct.pack(">I", _native.crc32c(packed)), 0)
        if sync:
            self._file.datasync()

    def close(self) -> None:
        self._file.close()

    @classmethod
    def read(cls, directory: Directory) -> int:
        """The recorded offset, or -1 when there is none that can be trusted."""
        with contextlib.suppress(FileNotFoundError, struct.error):
            content = directory.read(cls.NAME, 64)
            offset, checksum = cls._LAYOUT.unpack(content)
            if _native.crc32c(content[:8]) == checksum and offset >= 0:
                return int(offset)
        return -1


class _OffsetFile:
    """One offset behind its checksum, in a small file that is replaced atomically."""

    NAME: ClassVar[str]

    @classmethod
    def write(cls, directory: Directory, offset: int) -> None:
        body = b"%d" % offset
        directory.replace(cls.NAME, with_checksum(body))

    @classmethod
    def read(cls, directory: Directory) -> int:
        """The recorded offset, or -1 when there is none that can be trusted."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(without_checksum(directory.read(cls.NAME, 64)))
        return -1


class StartMark(_OffsetFile):
    """The start offset once more, where it lies inside a segment and no file name tells it.

    Without it, a damaged state file would bring records back that were trimmed.
    """

    NAME = "logstore.start"


class CleanerCheckpoint(_OffsetFile):
    """The first offset that has not been through compaction, kept in one small file.

    A value that is too low, or missing, costs a longer compaction, never a record.  A broker keeps
    the same number in a file beside its partitions; a partition that stands alone keeps its own.
    """

    NAME = "logstore.cleaner"


# ---- offsets of many partitions, at the root of a store ----


# ---- the identity of a topic, in each of its partitions ----
