"""SegmentDigest: what a sealed segment's files were, in a side file that Kafka ignores.

``<base offset>.sum`` holds size and CRC-32C of the .log file and of its indexes.  Kafka's own
checksum leaves the first bytes of each batch out, and nothing else tells that a whole batch, or the
list of aborted transactions, is gone from a segment whose offsets may have gaps.

Invariant: a digest is written when the files it speaks of are complete and durable, and goes before
one of them changes.  It is never believed against the log: `check` reports where the two differ,
and one that is missing or cannot be read says nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import NamedTuple

from logstore import _native
from logstore.files.directory import Directory
from logstore.files.names import segment_name
from logstore.files.small_file import MISREAD, with_checksum, without_checksum

__all__ = ["DIGEST_SUFFIX", "DamagedDigestError", "SegmentDigest"]

DIGEST_SUFFIX = ".sum"
INDEXES = (".index", ".timeindex", ".txnindex")
_READ_BYTES = 1 << 20

FileDigest = tuple[int, int]  # size, CRC-32C


class DamagedDigestError(ValueError):
    """The side file is not what was written."""


def digest(content: bytes) -> FileDigest:
    """Of a file with these contents."""
    return len(content), _native.crc32c(content)


def digest_of(
    directory: Directory, name: str, moved: Callable[[int], None] | None = None
) -> FileDigest | None:
    """Size and CRC-32C of a file as it is now; None when there is none.

    `moved` is called with the bytes of every piece, and may raise to stop.
    """
    try:
        file = directory.open(name)
    except FileNotFoundError:
        return None
    try:
        crc = position = 0
        while piece := file.pread(_READ_BYTES, position):
            crc = _native.crc32c(piece, crc)
            position += len(piece)
            if moved is not None:
                moved(len(piece))
        return position, crc
    finally:
        file.close()


class SegmentDigest(NamedTuple):
    """Sizes and checksums of a sealed segment's files."""

    log: FileDigest
    indexes: dict[str, FileDigest]  # by suffix; one that is not in it was not there

    @classmethod
    def of(
        cls,
        directory: Directory,
        base_offset: int,
        log: FileDigest | None = None,
        moved: Callable[[int], None] | None = None,
    ) -> SegmentDigest | None:
        """Of the files as they are now; None when there is no log.  `log` is taken when known."""
        log = log or digest_of(directory, segment_name(base_offset, ".log"), moved)
        if log is None:
            return None
        indexes = {}
        for suffix in INDEXES:
            found = digest_of(directory, segment_name(base_offset, suffix))
            if found is not None:
                indexes[suffix] = found
        return cls(log, indexes)

    def encode(self) -> bytes:
        body = json.dumps({"log": self.log, **self.indexes}, separators=(",", ":")).encode()
        return with_checksum(body)

    def write(self, directory: Directory, base_offset: int) -> None:
        """Leave it beside the segment.  Not synced: one that a power cut tears says nothing."""
        name = segment_name(base_offset, DIGEST_SUFFIX)
        directory.replace(name, self.encode(), sync=False)

    @classmethod
    def read(cls, directory: Directory, base_offset: int) -> SegmentDigest | None:
        """The digest; None when there is none.  Raises DamagedDigestError."""
        try:
            content = directory.read(segment_name(base_offset, DIGEST_SUFFIX), 4096)
        except FileNotFoundError:
            return None
        try:
            body = without_checksum(content)
        except ValueError as error:
            raise DamagedDigestError(str(error)) from None
        try:
            files = {suffix: _file_digest(entry) for suffix, entry in json.loads(body).items()}
            log = files.pop("log")
        except DamagedDigestError:
            raise
        except MISREAD as error:
            raise DamagedDigestError(f"{type(error).__name__}: {error}") from None
        if not set(files) <= set(INDEXES):
            raise DamagedDigestError(f"it speaks of {sorted(files)}")
        return cls(log, files)

    @classmethod
    def known(cls, directory: Directory, base_offset: int) -> SegmentDigest | None:
        """The digest if there is one that can be read."""
        with contextlib.suppress(DamagedDigestError):
            return cls.read(directory, base_offset)
        return None

    @staticmethod
    def remove(directory: Directory, base_offset: int) -> None:
        """Before a file that it speaks of changes."""
        directory.unlink(segment_name(base_offset, DIGEST_SUFFIX))


def _file_digest(entry: object) -> FileDigest:
    if not isinstance(entry, list) or len(entry) != 2:
        raise DamagedDigestError(f"{entry!r} is not a size and a checksum")
    size, crc = entry
    if type(size) is not int or type(crc) is not int or size < 0 or not 0 <= crc < 1 << 32:
        raise DamagedDigestError(f"{entry!r} is not a size and a checksum")
    return size, crc
