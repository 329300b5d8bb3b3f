"""SegmentSummary: facts that Kafka's files do not hold, in a side file that Kafka ignores.

``<base offset>.summary`` holds the least timestamp of a segment, and size and CRC-32C of its
.txnindex file.

Invariant: the summary is a hint, like an index.  It is used only if the .log file has exactly
`size_bytes` bytes.  A compaction or a truncation may leave other records in a file of that name and
size, but it only removes records: none is older than `min_timestamp`.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from logstore.config import INT64_MAX
from logstore.files.directory import Directory
from logstore.files.names import segment_name
from logstore.files.small_file import MISREAD, with_checksum, without_checksum
from logstore.log.segment_digest import FileDigest, SegmentDigest

__all__ = ["NO_TIME", "UNKNOWN_TIME", "SegmentSummary", "noted_transactions"]

NO_TIME = INT64_MAX  # the segment has no record: the time of the first one is lower
UNKNOWN_TIME = -INT64_MAX - 1  # there may be older records: no time is known to be the least

_SUFFIX = ".summary"


class SegmentSummary(NamedTuple):
    size_bytes: int  # of the .log file
    min_timestamp: int  # no record is older
    # Size and CRC-32C of the .txnindex file, which has no checksum; (0, 0): there is none.
    aborted: tuple[int, int] | None = None

    def write(self, directory: Directory, base_offset: int) -> None:
        """Write the .summary file, not synced, unless it would hold neither fact."""
        if UNKNOWN_TIME < self.min_timestamp < NO_TIME or self.aborted not in (None, (0, 0)):
            body = json.dumps(self._asdict(), separators=(",", ":")).encode()
            content = with_checksum(body)
            directory.write(segment_name(base_offset, _SUFFIX), content, sync=False)

    @classmethod
    def read(cls, directory: Directory, base_offset: int, size_bytes: int) -> SegmentSummary | None:
        """Return the summary of a segment of `size_bytes` bytes.

        Return None if it is missing, damaged, or of a .log file of another size.
        """
        try:
            content = directory.read(segment_name(base_offset, _SUFFIX), 4096)
            fields = json.loads(without_checksum(content))
            aborted = fields.pop("aborted", None)
            if aborted is not None:
                size, crc = map(int, aborted)
                aborted = (size, crc)
            found = cls(**fields, aborted=aborted)
        except (OSError, *MISREAD):
            return None
        if found.size_bytes != size_bytes or type(found.min_timestamp) is not int:
            return None
        return found

    @classmethod
    def read_min(cls, directory: Directory, base_offset: int, size_bytes: int) -> int:
        """Return the least timestamp in a segment of `size_bytes`, UNKNOWN_TIME or NO_TIME."""
        if size_bytes == 0:
            return NO_TIME
        found = cls.read(directory, base_offset, size_bytes)
        known = found is not None and UNKNOWN_TIME < found.min_timestamp < NO_TIME
        return found.min_timestamp if found is not None and known else UNKNOWN_TIME


def noted_transactions(
    directory: Directory, base_offset: int, size_bytes: int
) -> FileDigest | None:
    """Return size and CRC-32C that the .txnindex file had at the last roll or close.

    Return None if neither the summary nor the digest of a segment of `size_bytes` has them.  The
    file, which has no checksum of its own, is then used unchecked.
    """
    summary = SegmentSummary.read(directory, base_offset, size_bytes)
    if summary is not None and summary.aborted is not None:
        return summary.aborted
    files = SegmentDigest.known(directory, base_offset)
    if files is None or files.log[0] != size_bytes:
        return None
    return files.indexes.get(".txnindex", (0, 0))
