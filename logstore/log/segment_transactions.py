"""The .txnindex file of a segment: the aborted transactions whose markers are in the segment.

Most segments have none, and no file.  The file has no checksum of its own: its checksum is in the
summary or the digest of the segment.
"""

from __future__ import annotations

from logstore.errors import CorruptLogError
from logstore.files.directory import Directory
from logstore.files.names import segment_name
from logstore.format.index import AbortedTransaction, TransactionIndex
from logstore.log.segment_digest import SegmentDigest, digest
from logstore.log.segment_summary import noted_transactions

__all__ = ["append_entries", "read_transactions", "write_transactions"]


def read_transactions(
    directory: Directory, base_offset: int, name: str, size_bytes: int
) -> TransactionIndex:
    """Return the index in the file `name`; an empty one if there is no file.

    Raise CorruptLogError if the file is damaged.  `size_bytes` is the size of the log.
    """
    try:
        entries = directory.read(name)
    except FileNotFoundError:
        return TransactionIndex(base_offset)
    index = TransactionIndex(base_offset, entries)
    # The file is created with its first entry: an empty one has lost entries.
    fault = index.fault() if entries else "the file is empty"
    # None if the log has grown since the summary was written: entries may have been added, too.
    noted = noted_transactions(directory, base_offset, size_bytes)
    if fault is None and noted is not None and noted != digest(entries):
        fault = "its checksum is not the one noted at the last roll or close"
    if fault is not None:
        raise CorruptLogError(fault, path=directory.path / name, position=0)
    return index


def append_entries(directory: Directory, base_offset: int, entries: bytes, position: int) -> None:
    """Write entries at the end of the file.  Not synced."""
    name = segment_name(base_offset, ".txnindex")

    def act() -> None:
        file = directory.open(name, write=True, create=True)
        try:
            file.append_at(entries, position)
        finally:
            file.close()

    # The marker is in the log already: if the disk is full, use the reserve for the entry.
    directory.with_room(act)


def write_transactions(
    directory: Directory, base_offset: int, aborted: list[AbortedTransaction]
) -> bool:
    """Make the file list exactly `aborted`, synced; return whether it changed.

    The digest is removed before the file changes.
    """
    index = TransactionIndex(base_offset)
    for entry in aborted:
        index.append(entry)
    name = segment_name(base_offset, ".txnindex")
    try:
        if directory.read(name) == index.entries and aborted:
            return False
    except FileNotFoundError:
        if not aborted:
            return False
    # Before the file changes: a digest must never describe files that were replaced.
    SegmentDigest.remove(directory, base_offset)
    if aborted:
        directory.with_room(lambda: directory.write(name, index.entries, sync=True))
    else:
        directory.unlink(name)
    return True
