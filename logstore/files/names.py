"""Names: partition directories, segment files and the suffixes of their side files.

The names are Kafka's, except for .summary and .sum, which Kafka ignores.
"""

from __future__ import annotations

import re
from pathlib import Path

from logstore.errors import InvalidNameError, NotALogError

__all__ = ["directory_name", "parse_partition_name", "segment_name"]


TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}\Z")

SEGMENT_SUFFIXES = (".log", ".index", ".timeindex", ".txnindex", ".snapshot", ".summary", ".sum")

# Appended to the names above: a file that is deleted soon, one that compaction is writing, and one
# that compaction has completed and that replaces others.
TEMPORARY_SUFFIXES = (".deleted", ".cleaned", ".swap", ".tmp")


def directory_name(path: Path) -> str:
    """Return the directory's own name, also if the path is relative or ends in a dot."""
    return path.name or path.absolute().name


def parse_partition_name(name: str) -> tuple[str, int]:
    """Return topic and number of a directory named ``topic-N``.

    >>> parse_partition_name("my-orders-3")
    ('my-orders', 3)
    """
    topic, dash, number = name.rpartition("-")
    if (
        not dash
        or not TOPIC.match(topic)
        or topic in (".", "..")
        or not re.fullmatch(r"0|[1-9]\d{0,9}", number)
        or int(number) > 0x7FFFFFFF
    ):
        raise InvalidNameError(
            f"{name!r} is not a partition directory: name it topic-N, such as 'orders-0' "
            f"(topic: 1 to 249 of a-z A-Z 0-9 . _ -; N: a number)"
        )
    return topic, int(number)


def segment_name(base_offset: int, suffix: str) -> str:
    """Return the name of a segment's file: the base offset in 20 digits, then the suffix."""
    return f"{base_offset:020d}{suffix}"


def base_offset_of(name: str) -> int:
    """Return the offset before the first dot of a file's name; raise NotALogError if none."""
    digits, dot, _ = name.partition(".")
    plain = dot and len(digits) <= 20 and digits.isascii() and digits.isdigit()
    if not plain or int(digits) > (1 << 63) - 1:
        raise NotALogError(
            f"{name!r} has the suffix of a segment file but no offset in front of it"
        )
    return int(digits)
