"""SegmentSummary: what Kafka's files do not tell of a segment, in a side file that Kafka ignores.

A hint like an index: it speaks for a .log file of exactly that many bytes, and for any other it is
silent.  What compaction or a cut leaves in a file of the same name and size is still no older.
"""

from __future__ import annotations

import dataclasses
import json

from logstore import _native
from logstore._files import Directory, segment_name
from logstore.config import INT64_MAX

__all__ = ["NO_TIME", "UNKNOWN_TIME", "SegmentSummary"]

NO_TIME = INT64_MAX  # there is no record yet: the next one's is the least
UNKNOWN_TIME = -INT64_MAX - 1

_SUFFIX = ".summary"


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentSummary:
    size_bytes: int
    min_timestamp: int  # no record is older

    def write(self, directory: Directory, base_offset: int) -> None:
        """Leave it beside the segment, unless there is nothing to tell."""
        if UNKNOWN_TIME < self.min_timestamp < NO_TIME:
            body = json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()
            content = b"%08x %b\n" % (_native.crc32c(body), body)
            directory.write(segment_name(base_offset, _SUFFIX), content, sync=False)

    @classmethod
    def read_min(cls, directory: Directory, base_offset: int, size_bytes: int) -> int:
        """The least time in the first `size_bytes` of a segment, UNKNOWN_TIME or NO_TIME."""
        if size_bytes == 0:
            return NO_TIME
        try:
            content = directory.read(segment_name(base_offset, _SUFFIX), 4096)
            checksum, _, body = content.rstrip(b"\n").partition(b" ")
            if int(checksum, 16) != _native.crc32c(body):
                return UNKNOWN_TIME
            found = cls(**json.loads(body))
        except (OSError, TypeError, ValueError):
            return UNKNOWN_TIME
        if found.size_bytes != size_bytes or type(found.min_timestamp) is not int:
            return UNKNOWN_TIME
        return found.min_timestamp if UNKNOWN_TIME < found.min_timestamp < NO_TIME else UNKNOWN_TIME
