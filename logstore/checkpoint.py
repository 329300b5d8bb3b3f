"""Small files beside the log: the partition's own state, the durable mark, leader epochs.

``logstore.state`` and ``logstore.durable`` are ours; Kafka ignores them.  The first is replaced
atomically and says how the log was left; the second is overwritten in place after every fsync and
says how much of the log is known to be on stable storage.  Both are checksummed, and both only ever
claim what was true before they were written: one that is missing, torn or stale costs a longer
recovery, never a record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct

from logstore import _native
from logstore._files import Directory

__all__ = ["DurableMark", "PartitionState", "read_leader_epochs", "write_leader_epochs"]


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

    NAME = "logstore.state"

    def write(self, directory: Directory, *, sync: bool = True) -> None:
        body = json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()
        directory.replace(self.NAME, b"%08x %b\n" % (_native.crc32c(body), body), sync=sync)

    @classmethod
    def read(cls, directory: Directory) -> PartitionState | None:
        """The state, or None when there is none that can be trusted."""
        try:
            content = directory.read(cls.NAME, 65536)
        except FileNotFoundError:
            return None
        checksum, space, body = content.rstrip(b"\n").partition(b" ")
        try:
            if not space or int(checksum, 16) != _native.crc32c(body):
                return None
            return cls(**json.loads(body))
        except (TypeError, ValueError):
            return None


class DurableMark:
    """The offset below which all is known to be durable, kept in one small file."""

    NAME = "logstore.durable"
    _LAYOUT = struct.Struct(">qI")

    def __init__(self, directory: Directory) -> None:
        self._file = directory.open(self.NAME, write=True, create=True)

    def write(self, offset: int) -> None:
        """Call only after the fsync that makes it true.  Itself needs none."""
        packed = struct.pack(">q", offset)
        self._file.pwrite(packed + struct.pack(">I", _native.crc32c(packed)), 0)

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


LEADER_EPOCHS = "leader-epoch-checkpoint"


def read_leader_epochs(directory: Directory) -> list[tuple[int, int]]:
    """(epoch, start offset) pairs, ascending; empty when the file is missing or unreadable."""
    try:
        lines = directory.read(LEADER_EPOCHS, 1 << 24).decode("utf-8").split("\n")
    except (FileNotFoundError, UnicodeDecodeError):
        return []
    try:
        if lines[0].strip() != "0":
            return []
        pairs = [line.split() for line in lines[2:] if line.strip()]
        epochs = [(int(epoch), int(start)) for epoch, start in pairs]
        sound = all(0 <= epoch < 1 << 31 and 0 <= start < 1 << 63 for epoch, start in epochs)
        return epochs if sound and len(epochs) == int(lines[1]) else []
    except (IndexError, ValueError):
        return []


def write_leader_epochs(directory: Directory, epochs: list[tuple[int, int]]) -> None:
    """Kafka's text form: version, count, one pair a line."""
    lines = ["0", str(len(epochs)), *(f"{epoch} {start}" for epoch, start in epochs)]
    directory.replace(LEADER_EPOCHS, ("\n".join(lines) + "\n").encode())
