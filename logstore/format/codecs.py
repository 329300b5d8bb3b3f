"""Codecs: gzip, snappy, lz4 and zstd in Kafka's containers for the records of a batch.

Invariant: a decompressed payload has at most ``max_bytes`` bytes, and no buffer gets its size from
an unchecked number in the payload.  A declared size is checked before memory is allocated.  If a
container declares none, its block headers are read first and bound the output.

`compress` writes what Kafka's Java client writes, because Kafka's readers accept less than the
general formats allow.  `decompress` accepts what Kafka accepts.  Damage always raises
``CodecError``, with one exception: xerial snappy has no end mark, so a payload that is cut between
two chunks gives a shorter result.  The caller finds that by the record count.

Every function may be called from any thread.  A context that two threads must not share is borrowed
from a pool.  A codec's package is imported when the codec is first used.

Not here: dictionaries, the legacy framings of magic 0 and 1, and the batch around the payload.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from logstore.errors import CodecUnavailableError
from logstore.format.codec_ids import (
    CODECS,
    GZIP,
    LZ4,
    NONE,
    SNAPPY,
    ZSTD,
    CodecError,
    CodecLimitError,
    check_level,
    is_default_lz4,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "CODECS",
    "GZIP",
    "LZ4",
    "NONE",
    "SNAPPY",
    "ZSTD",
    "CodecError",
    "CodecLimitError",
    "CodecUnavailableError",
    "compress",
    "decompress",
    "is_default_lz4",
]


def compress(codec: int, payload: Buffer, level: int | None = None) -> bytes:
    """Return ``payload`` in Kafka's container for ``codec``; ``level`` None is Kafka's default.

    Raise ValueError for an unknown codec or a level that Kafka's configuration refuses, and
    CodecUnavailableError if the codec's package is missing.
    """
    if not NONE <= codec <= ZSTD:
        raise ValueError(f"unknown compression codec {codec}")
    return _codec(codec)[0](payload, level)


def decompress(codec: int, payload: Buffer, max_bytes: int) -> bytes:
    """Return the content of ``payload``, at most ``max_bytes`` long.

    Raise CodecLimitError if it is longer, CodecUnavailableError if the codec's package is missing,
    and CodecError if the payload is damaged or uses a feature that Kafka does not read.
    """
    if max_bytes < 0:
        raise ValueError(f"max_bytes must not be negative, not {max_bytes}")
    if not NONE <= codec <= ZSTD:
        raise CodecError(codec, "unknown compression codec")
    view = memoryview(payload).cast("B")
    # Every container has a header or a length: an empty payload is damage.
    if not len(view) and codec != NONE:
        raise CodecError(codec, "empty")
    return _codec(codec)[1](payload, view, max_bytes)


def _none_compress(payload: Buffer, level: int | None) -> bytes:
    check_level(NONE, level, range(0))
    return bytes(payload)  # the same object if it is bytes already


def _none_decompress(payload: Buffer, view: memoryview, max_bytes: int) -> bytes:
    if len(view) > max_bytes:
        raise CodecLimitError(NONE, limit=max_bytes, declared=len(view))
    return bytes(payload)


_Compress: TypeAlias = "Callable[[Buffer, int | None], bytes]"
_Decompress: TypeAlias = "Callable[[Buffer, memoryview, int], bytes]"


@functools.cache
def _codec(number: int) -> tuple[_Compress, _Decompress]:
    """Return both directions of a codec; its module is imported the first time."""
    if number == NONE:
        return _none_compress, _none_decompress
    if number == GZIP:
        from logstore.format import gzip_codec

        return gzip_codec.gzip_compress, gzip_codec.gzip_decompress
    if number == SNAPPY:
        from logstore.format import snappy_codec

        return snappy_codec.snappy_compress, snappy_codec.snappy_decompress
    if number == LZ4:
        from logstore.format import lz4_codec

        return lz4_codec.lz4_compress, lz4_codec.lz4_decompress
    from logstore.format import zstd_codec

    return zstd_codec.zstd_compress, zstd_codec.zstd_decompress
