"""SwapPlan: rewritten segments take the place of others, all at once as far as a crash can tell.

The files of the new segment are complete and durable under ``.cleaned`` before the plan is written.
From then on the new ones count: whoever finds the plan, after a crash, finishes what it says.

Names change in Kafka's way (``.cleaned``, ``.swap``, final; the old ones ``.deleted``), so that a
broker that finds the directory half-way, and knows nothing of a plan, comes to the same result or
to the old one.  Between its phases the directory is synced: without that a power cut could leave
the old names gone and the new ones not yet there.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from logstore import _native
from logstore.files.directory import Directory
from logstore.files.names import SEGMENT_SUFFIXES, segment_name
from logstore.files.small_file import MISREAD, either_copy, twice

__all__ = ["SWAP_PLAN", "RewrittenSegment", "SwapPlan"]

SWAP_PLAN = "swap.plan"
_READ_BYTES = 1 << 20


class RewrittenSegment(NamedTuple):
    """A segment whose files wait under ``.cleaned``."""

    base_offset: int
    suffixes: tuple[str, ...]  # the files it has, the log first
    size_bytes: int  # of the log
    crc: int  # CRC-32C of the log

    def names(self) -> list[str]:
        """Its files, by their final names."""
        return [segment_name(self.base_offset, suffix) for suffix in self.suffixes]


class SwapPlan(NamedTuple):
    """One segment for one or more in a row; the first of them has the new one's base offset."""

    new: RewrittenSegment
    old: tuple[int, ...]  # base offsets, ascending

    def write(self, directory: Directory) -> None:
        """The commit point: from here on a crash is finished, not undone."""
        body = json.dumps({"new": self.new._asdict(), "old": self.old}).encode()
        directory.replace(SWAP_PLAN, twice(body))

    @classmethod
    def read(cls, directory: Directory) -> SwapPlan | None:
        """The plan, or None when there is none that was written in full."""
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
        """A right checksum says who wrote it, not that it makes sense."""
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
        """Whether the new log, under whichever name it has now, is what was planned."""
        name = self.new.names()[0]
        for candidate in (f"{name}.cleaned", f"{name}.swap", name):
            if directory.exists(candidate):
                return self._is_new(directory, candidate)
        return False

    def _is_new(self, directory: Directory, name: str) -> bool:
        file = directory.open(name)
        try:
            if file.size() != self.new.size_bytes:
                return False
            crc = position = 0
            while position < self.new.size_bytes:
                piece = file.pread(_READ_BYTES, position)
                if not piece:
                    return False
                crc = _native.crc32c(piece, crc)
                position += len(piece)
            return crc == self.new.crc
        finally:
            file.close()

    def apply(self, directory: Directory) -> None:
        """Change the names.  May be repeated from any point it was stopped at."""
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
        """Whether old files may be on their way out: from here on readers go by the new ones."""
        return not any(directory.exists(f"{name}.cleaned") for name in self.new.names())

    def _superseded(self, directory: Directory) -> list[str]:
        """The old files that still have their names."""
        names = set(directory.names())
        waiting = f"{self.new.names()[0]}.swap" in names
        found = []
        for base in self.old:
            for suffix in SEGMENT_SUFFIXES:
                name = segment_name(base, suffix)
                if base == self.new.base_offset:
                    if suffix == ".snapshot":
                        continue  # the state of producers at that offset is what it was
                    # The name may be the new file's already: then nothing waits for it any more.
                    there = f"{name}.swap" in names if suffix in self.new.suffixes else waiting
                    if not there:
                        continue
                if name in names:
                    found.append(name)
        return found

    def revert(self, directory: Directory) -> None:
        """The new files are not what was planned, and the old ones are all still here: go back."""
        names = set(directory.names())
        for base in self.old:
            for suffix in SEGMENT_SUFFIXES:
                name = segment_name(base, suffix)
                if f"{name}.deleted" in names:
                    directory.rename(f"{name}.deleted", name)
                elif base == self.new.base_offset and suffix in (".index", ".timeindex"):
                    directory.unlink(name)  # whichever it belongs to, it can be made again
        for name in self.new.names():
            directory.unlink(f"{name}.cleaned")
            directory.unlink(f"{name}.swap")
        directory.sync()

    def finish(self, directory: Directory) -> None:
        """Forget the plan, and the old files with it."""
        directory.unlink(SWAP_PLAN)
        directory.sync()
        for base in self.old:
            for suffix in SEGMENT_SUFFIXES:
                directory.unlink(f"{segment_name(base, suffix)}.deleted")
