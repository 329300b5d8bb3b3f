"""FailedSync: the mark that an fsync of a log failed.  The next open reads it.

After a failed fsync the kernel may have pages in its cache that it takes for clean and that are not
on the disk: every later read and fsync succeeds, also in a new process.  So the handle refuses
appends and leaves ``logstore.failed``.  The next open drops the cached pages, reads the log from
the device, writes the valid batches to new files, syncs these, and only then removes the mark.

A mark that could not be written is kept in the memory of this process.  For a later process,
recovery after a crash drops the cached pages above the durable mark before it reads a log that was
synced before.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading

from logstore.files.directory import Directory, copy_bytes
from logstore.files.names import segment_name
from logstore.files.small_file import MISREAD, with_checksum, without_checksum
from logstore.log.segment import Segment

__all__ = ["FailedSync", "forget_cached", "write_to_new_file"]

log = logging.getLogger("logstore.partition")

# By directory.  The failed disk may refuse the mark as well: then this process remembers it.
_unwritten: dict[str, FailedSync] = {}
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class FailedSync:
    """The durable offset at the moment of the failure, and the error of the system."""

    durable_offset: int
    reason: str

    NAME = "logstore.failed"

    def leave(self, directory: Directory) -> None:
        """Write the mark, durably if the disk allows it."""
        body = json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()
        content = with_checksum(body)
        with _lock:
            _unwritten[_identity(directory)] = self
        # Without a sync at the second attempt: the device that failed may fail this fsync, too.
        for sync in (True, False):
            try:
                directory.replace(self.NAME, content, sync=sync)
            except OSError as error:
                log.error("%s: the failed fsync could not be noted%s: %s", directory.path,
                          " durably" if sync else "", str(error))  # fmt: skip
            else:
                break

    @classmethod
    def read(cls, directory: Directory) -> FailedSync | None:
        """Return the mark; one that cannot be read counts, with a durable offset of 0."""
        with _lock:
            kept = _unwritten.get(_identity(directory))
        try:
            content = directory.read(cls.NAME, 65536)
        except FileNotFoundError:
            return kept
        try:
            found = cls(**json.loads(without_checksum(content)))
            if type(found.durable_offset) is int and found.durable_offset >= 0:
                return found
        except MISREAD:
            pass
        return cls(0, "its mark cannot be read")

    @classmethod
    def remove(cls, directory: Directory) -> None:
        """Remove the mark.  The caller has made the log durable in new files."""
        directory.unlink(cls.NAME)
        directory.sync()
        with _lock:
            _unwritten.pop(_identity(directory), None)


def forget_cached(segment: Segment, directory: Directory, durable: int) -> None:
    """Drop the cached pages of a segment above `durable`, so that they are read from the device.

    A page that was never written back stays in the cache.  A page that a failed fsync marked as
    clean is dropped.  With `durable` = -1 all pages are dropped.
    """
    position = 0
    if segment.base_offset < durable:
        # The index is a hint: too low a position only drops more pages.
        position = max(0, segment.offset_index.lookup(durable)[1])
    segment.release()
    file = directory.open(segment_name(segment.base_offset, ".log"))
    try:
        file.forget(position, max(0, file.size() - position))
    finally:
        file.close()


def write_to_new_file(segment: Segment, directory: Directory) -> None:
    """Copy the .log file of a segment to a new file, which no failed fsync has touched."""
    name = segment_name(segment.base_offset, ".log")
    unfinished = f"{name}.tmp"
    segment.release()
    directory.unlink(unfinished)
    source = directory.open(name)
    try:
        target = directory.open(unfinished, write=True, create=True, exclusive=True)
        try:
            copy_bytes(source, 0, source.size(), target, 0)
            target.sync()
        finally:
            target.close()
    finally:
        source.close()
    # The new file is synced: a crash before this line leaves the old one, and the mark.
    directory.rename(unfinished, name)
    directory.sync()
    logging.getLogger("logstore.recovery").warning(
        "%s: written to a new file after a failed fsync", segment.path
    )


def _identity(directory: Directory) -> str:
    return str(directory.path.absolute())
