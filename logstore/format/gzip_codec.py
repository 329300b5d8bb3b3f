"""gzip as in Kafka's batches: written as one member, as Java does, and read as one or more."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

from logstore.format.codec_ids import (
    GZIP,
    CodecError,
    CodecLimitError,
    check_level,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


# As java.util.zip.GZIPOutputStream: no name, no time, no extra flags, operating system 0.
_GZIP_HEADER: Final = bytes.fromhex("1f8b0800000000000000")

_GZIP_STEP: Final = 16 * 1024


def gzip_compress(payload: Buffer, level: int | None) -> bytes:
    if check_level(GZIP, level, range(-1, 10)) == 0:
        raise ValueError("compression level 0 is not valid for gzip (1..9, or -1 for the default)")
    deflate = zlib.compressobj(-1 if level is None else level, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = deflate.compress(payload)
    size = memoryview(payload).nbytes
    trailer = struct.pack("<II", zlib.crc32(payload), size & 0xFFFFFFFF)
    return b"".join((_GZIP_HEADER, body, deflate.flush(), trailer))


def gzip_decompress(payload: Buffer, view: memoryview, max_bytes: int) -> bytes:
    contents: list[bytes] = []
    produced = 0
    position = 0
    step = len(view)
    while position < len(view):
        inflate = zlib.decompressobj(16 + zlib.MAX_WBITS)
        while not inflate.eof:
            if position == len(view):
                raise CodecError(GZIP, f"cut short at byte {position}")
            source = view[position : position + step]
            try:
                content = inflate.decompress(source, max_bytes - produced + 1)
            except zlib.error as error:
                raise CodecError(GZIP, str(error)) from None
            produced += len(content)
            if produced > max_bytes:
                raise CodecLimitError(GZIP, limit=max_bytes, produced=produced)
            contents.append(content)
            position += len(source) - len(inflate.unused_data)
        # zlib copies the input after the end of a member into `unused_data`.  For thousands of
        # members that must not be the whole rest each time, so read on in small steps.
        step = _GZIP_STEP
    return contents[0] if len(contents) == 1 else b"".join(contents)
