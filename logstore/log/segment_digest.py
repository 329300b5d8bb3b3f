"""SegmentDigest: sizes and checksums of a sealed segment's files, in a side file Kafka ignores.

``<base offset>.sum`` holds size and CRC-32C of the .log file and of its indexes.  It finds damage
that a batch's own checksum cannot find: a flipped bit in the first bytes of a batch, a batch that
is missing from a segment whose offsets may have gaps, and a lost .txnindex file.

Invariant: a digest is written after its files are complete and durable, and is removed before one
of them changes.

A digest never overrules the log: `check` only reports the difference.  A digest that is missing or
damaged is no error.
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
    """The .sum file is damaged."""


def digest(content: bytes) -> FileDigest:
    """Return size and CRC-32C of a file with these contents."""
    return len(content), _native.crc32c(content)


def digest_of(
    directory: Directory, name: str, moved: Callable[[int], None] | None = None
) -> FileDigest | None:
    """Return size and CRC-32C of a file, or None if it does not exist.

    Call `moved` with the number of bytes of every piece read; it may raise to stop.
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
    indexes: dict[str, FileDigest]  # by suffix; a file without an entry did not exist

    @classmethod
    def of(
        cls,
        directory: Directory,
        base_offset: int,
        log: FileDigest | None = None,
        moved: Callable[[int], None] | None = None,
    ) -> SegmentDigest | None:
        """Return the digest of the present files, or None if the .log file does not exist.

        If `log` is given, it is used instead of reading the .log file.
        """
        # Given by a caller that has just written the file, and knows its checksum.
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
        """Write the .sum file.  Not synced: a torn file counts as missing."""
        name = segment_name(base_offset, DIGEST_SUFFIX)
        # A rename without a sync may leave an empty file after a power loss: its checksum is wrong.
        directory.replace(name, self.encode(), sync=False)

    @classmethod
    def read(cls, directory: Directory, base_offset: int) -> SegmentDigest | None:
        """Return the digest, or None if there is none; raise DamagedDigestError."""
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
            raise DamagedDigestError(f"it has entries for unknown files: {sorted(files)}")
        return cls(log, files)

    @classmethod
    def known(cls, directory: Directory, base_offset: int) -> SegmentDigest | None:
        """Return the digest, or None if it is missing or damaged."""
        with contextlib.suppress(DamagedDigestError):
            return cls.read(directory, base_offset)
        return None

    @staticmethod
    def remove(directory: Directory, base_offset: int) -> None:
        """Remove the .sum file.  Call this before one of the segment's files changes."""
        directory.unlink(segment_name(base_offset, DIGEST_SUFFIX))


def _file_digest(entry: object) -> FileDigest:
    if not isinstance(entry, list) or len(entry) != 2:
        raise DamagedDigestError(f"{entry!r} is not a size and a checksum")
    size, crc = entry
    if type(size) is not int or type(crc) is not int or size < 0 or not 0 <= crc < 1 << 32:
        raise DamagedDigestError(f"{entry!r} is not a size and a checksum")
    return size, crc
