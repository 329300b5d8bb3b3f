"""SwapPlan: replaces segments by a rewritten one, atomically with regard to a crash.

Invariant: the files of the new segment are complete and durable under ``.cleaned`` before the plan
is written.  The plan is the commit point: the next open after a crash finishes it.

Names change as in Kafka (``.cleaned``, ``.swap``, final; the old ones ``.deleted``).  A broker that
opens the directory half way, and ignores the plan, gets the new segment or the old ones.  The
directory is synced between the phases: otherwise a power cut could remove the old names before the
new ones are on the disk.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from logstore.files.directory import Directory
from logstore.files.names import SEGMENT_SUFFIXES, segment_name
from logstore.files.small_file import MISREAD, either_copy, twice

__all__ = ["SWAP_PLAN", "RewrittenSegment", "SwapPlan"]

SWAP_PLAN = "swap.plan"
_READ_BYTES = 1 << 20


class RewrittenSegment(NamedTuple):
    """A segment whose files are complete under ``.cleaned``."""

    base_offset: int
    suffixes: tuple[str, ...]  # the files it has, the log first
    size_bytes: int  # of the log
    crc: int  # CRC-32C of the log

    def names(self) -> list[str]:
        """Return the final names of its files."""
        return [segment_name(self.base_offset, suffix) for suffix in self.suffixes]


class SwapPlan(NamedTuple):
    """One new segment for adjacent old ones; its base offset is that of the first of them."""

    new: RewrittenSegment
    old: tuple[int, ...]  # base offsets, ascending

    def write(self, directory: Directory) -> None:
        """Write the plan.  This is the commit point: after a crash, the swap is finished."""
        body = json.dumps({"new": self.new._asdict(), "old": self.old}).encode()
        directory.replace(SWAP_PLAN, twice(body))

    @classmethod
    def read(cls, directory: Directory) -> SwapPlan | None:
        """Return the plan; None if there is none that was written in full."""
        try:
            body = either_copy(directory.read(SWAP_PLAN))
            if body is None:
                return None
            fields = json.loads(body)
            new = fields["new"] | {"suffixes": tuple(fields["new"]["suffixes"])}
            plan = cls(RewrittenSegment(**new), tuple(fields["old"]))
        except (FileNotFoundError, *MISREAD):
            return None
        return plan if plan._is_plausible() else None

    def _is_plausible(self) -> bool:
        """Check the numbers: a right checksum does not make a plan valid."""
        new = self.new
        numbers = (new.base_offset, new.size_bytes, new.crc, *self.old)
        return (
            all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
            and self.old[:1] == (new.base_offset,)
            and list(self.old) == sorted(set(self.old))
            and new.suffixes[:1] == (".log",)
            and all(suffix in SEGMENT_SUFFIXES for suffix in new.suffixes)
        )

    def is_sound(self, directory: Directory) -> bool:
        """Return whether the new log has the planned size and checksum, under any of its names."""
        name = self.new.names()[0]
        for candidate in (f"{name}.cleaned", f"{name}.swap", name):
            if directory.exists(candidate):
                return self._is_new(directory, candidate)
        return False

    def _is_new(self, directory: Directory, name: str) -> bool:
        from crc32c import crc32c  # slow to import, and only an interrupted swap needs it

        file = directory.open(name)
        try:
            if file.size() != self.new.size_bytes:
                return False
            crc = position = 0
            while position < self.new.size_bytes:
                piece = file.pread(_READ_BYTES, position)
                if not piece:
                    return False
                crc = crc32c(piece, crc)
                position += len(piece)
            return crc == self.new.crc
        finally:
            file.close()

    def apply(self, directory: Directory) -> None:
        """Rename the files.  May be called again after a crash at any point."""
        for name in self.new.names():
            if directory.exists(f"{name}.cleaned"):
                directory.rename(f"{name}.cleaned", f"{name}.swap")
        directory.sync()
        for name in self._superseded(directory):
            directory.rename(name, f"{name}.deleted")
        directory.sync()
        for name in self.new.names():
            if directory.exists(f"{name}.swap"):
                directory.rename(f"{name}.swap", name)
        directory.sync()

    def counts(self, directory: Directory) -> bool:
        """Return whether readers use the new files: old ones may be deleted from now on."""
        return not any(directory.exists(f"{name}.cleaned") for name in self.new.names())

    def _superseded(self, directory: Directory) -> list[str]:
        """Return the old files that still have their names."""
        names = set(directory.names())
        waiting = f"{self.new.names()[0]}.swap" in names
        found = []
        for base in self.old:
            for suffix in SEGMENT_SUFFIXES:
                name = segment_name(base, suffix)
                if base == self.new.base_offset:
                    if suffix == ".snapshot":
                        continue  # the state of producers at that offset is what it was
                    # The new file may have the name already: then there is no .swap file of it.
                    there = f"{name}.swap" in names if suffix in self.new.suffixes else waiting
                    if not there:
                        continue
                if name in names:
                    found.append(name)
        return found

    def revert(self, directory: Directory) -> None:
        """Delete the new files, which are damaged; all old files still exist."""
        names = set(directory.names())
        for base in self.old:
            for suffix in SEGMENT_SUFFIXES:
                name = segment_name(base, suffix)
                if f"{name}.deleted" in names:
                    directory.rename(f"{name}.deleted", name)
                elif base == self.new.base_offset and suffix in (".index", ".timeindex"):
                    directory.unlink(name)  # of the old or the new segment; made again from the log
        for name in self.new.names():
            directory.unlink(f"{name}.cleaned")
            directory.unlink(f"{name}.swap")
        directory.sync()

    def finish(self, directory: Directory) -> None:
        """Delete the plan and the old files."""
        directory.unlink(SWAP_PLAN)
        directory.sync()
        for base in self.old:
            for suffix in SEGMENT_SUFFIXES:
                directory.unlink(f"{segment_name(base, suffix)}.deleted")
