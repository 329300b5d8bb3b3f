"""Codec ids: Kafka's numbers and names of codecs, and the errors that all codecs raise.

Separate from `codecs`, so that the module of a codec can import them without a cycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["CODECS", "CodecError", "CodecLimitError"]


NONE: Final = 0

GZIP: Final = 1

SNAPPY: Final = 2

LZ4: Final = 3

ZSTD: Final = 4
LZ4_DEFAULT_LEVEL: Final = 9  # in Kafka this level is the fast compressor; all others are lz4-hc

#: Names of codecs as Kafka's ``compression.type`` spells them, and their number in a batch.
CODECS: Final[Mapping[str, int]] = MappingProxyType(
    {"none": NONE, "uncompressed": NONE, "gzip": GZIP, "snappy": SNAPPY, "lz4": LZ4, "zstd": ZSTD}
)

_NAMES: Final = ("none", "gzip", "snappy", "lz4", "zstd")


class CodecError(ValueError):
    """A compressed payload cannot be decompressed: it is damaged, cut short, or was never valid."""

    def __init__(self, codec: int, reason: str) -> None:
        super().__init__(f"{_name(codec)} payload: {reason}")
        self.codec = codec
        self.reason = reason


class CodecLimitError(CodecError):
    """The decompressed payload is larger than the caller allows.

    ``declared`` is the size in the payload's header, or None if it has none; ``produced`` is the
    number of bytes decompressed before the limit was reached.
    """

    def __init__(self, codec: int, *, limit: int, produced: int = 0, declared: int | None = None):
        what = (
            f"declares {declared} bytes" if declared is not None else f"produced {produced} bytes"
        )
        super().__init__(codec, f"{what}, more than the limit of {limit}")
        self.limit = limit
        self.produced = produced
        self.declared = declared


def _name(codec: int) -> str:
    return _NAMES[codec] if NONE <= codec <= ZSTD else f"codec {codec}"


def check_level(codec: int, level: int | None, allowed: range) -> int | None:
    if level is not None and level not in allowed:
        valid = f"{allowed.start}..{allowed.stop - 1}" if allowed else "none"
        raise ValueError(f"compression level {level} is not valid for {_name(codec)} ({valid})")
    return level


def is_default_lz4(codec: int, level: int | None) -> bool:
    """Return whether this is lz4 with Kafka's default level, which the C code can do itself."""
    return codec == LZ4 and level in (None, LZ4_DEFAULT_LEVEL)
