"""snappy: written in the xerial container of Kafka's Java client, read in it or as one raw block.

The container is a header, then any number of (length i32, raw snappy block).  It has no end mark.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from logstore.errors import CodecUnavailableError
from logstore.format.codec_ids import (
    SNAPPY,
    CodecError,
    CodecLimitError,
    check_level,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


# Magic, version 1, oldest compatible version 1.
_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"

_XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)

_XERIAL_MAGIC_AS_LENGTH: Final = struct.unpack(">i", _XERIAL_MAGIC[:4])[0]

_XERIAL_BLOCK: Final = 32 * 1024

_XERIAL_CHUNK_MAX: Final = 512 << 20

# The densest element of a snappy block is a 3-byte copy of 64 bytes: 64 / 3, rounded up.  A block
# that declares more is damaged, and no memory is allocated for it.
_SNAPPY_EXPANSION: Final = 22


def _cramjam() -> Any:
    try:
        import cramjam
    except ImportError:
        raise CodecUnavailableError("snappy", package="cramjam", extra="snappy") from None
    return cramjam


def snappy_compress(payload: Buffer, level: int | None) -> bytes:
    check_level(SNAPPY, level, range(0))
    compress_raw = _cramjam().snappy.compress_raw
    view = memoryview(payload).cast("B")
    parts: list[Buffer] = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK):
        block = compress_raw(view[start : start + _XERIAL_BLOCK])
        parts.append(struct.pack(">i", len(block)))
        parts.append(block)
    return b"".join(parts)


def snappy_decompress(payload: Buffer, view: memoryview, max_bytes: int) -> bytes:
    cramjam = _cramjam()
    blocks = list(_snappy_blocks(view))
    total = sum(size for _, size in blocks)
    if total > max_bytes:
        raise CodecLimitError(SNAPPY, limit=max_bytes, declared=total)
    out = bytearray(total)
    target = memoryview(out)
    position = 0
    for block, size in blocks:
        if not size:  # the library refuses an empty target
            if len(block) != 1:
                raise CodecError(SNAPPY, "an empty block holds data")
            continue
        try:
            written = cramjam.snappy.decompress_raw_into(block, target[position : position + size])
        except cramjam.DecompressionError as error:
            raise CodecError(SNAPPY, str(error)) from None
        if written != size:
            raise CodecError(SNAPPY, f"a block declares {size} bytes and holds {written}")
        position += size
    return bytes(out)


def _snappy_blocks(view: memoryview) -> Iterator[tuple[memoryview, int]]:
    """Yield each raw snappy block and the size it declares, every length checked."""
    end = len(view)
    header = len(_XERIAL_HEADER)
    if end < header or bytes(view[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        yield view, _snappy_block_size(view)
        return
    _check_xerial_version(view)
    position = header
    while position < end:
        if end - position < 4:
            raise CodecError(SNAPPY, f"cut short in a chunk length at byte {position}")
        (length,) = struct.unpack_from(">i", view, position)
        if length == _XERIAL_MAGIC_AS_LENGTH:  # another stream begins
            if end - position < header:
                raise CodecError(SNAPPY, f"cut short in a stream header at byte {position}")
            position += header
            continue
        if not 0 <= length <= _XERIAL_CHUNK_MAX:
            raise CodecError(SNAPPY, f"chunk length {length} at byte {position}")
        position += 4
        if length > end - position:
            raise CodecError(
                SNAPPY, f"chunk of {length} bytes at byte {position}, {end - position} are left"
            )
        block = view[position : position + length]
        yield block, _snappy_block_size(block)
        position += length


def _check_xerial_version(view: memoryview) -> None:
    (version,) = struct.unpack_from(">i", view, len(_XERIAL_MAGIC))
    if version < 1:
        raise CodecError(SNAPPY, f"stream version {version}, at least 1 is needed")


def _snappy_block_size(block: memoryview) -> int:
    """Return the uncompressed length at the start of a raw block: a varint of at most 32 bits."""
    size = 0
    for index, byte in enumerate(block[:5]):
        size |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if size > 0xFFFFFFFF:
                break
            if size > len(block) * _SNAPPY_EXPANSION:
                raise CodecError(SNAPPY, f"{len(block)} bytes cannot hold the {size} declared")
            return size
    raise CodecError(SNAPPY, "a block has no valid length")
