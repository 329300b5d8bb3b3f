"""lz4 frames as in Kafka's batches.

A frame is a header, blocks with a length each, and an end mark of four zero bytes.  Before any
block is decompressed, the lengths of all blocks are checked.  Their number and the block size of
the header bound the output.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logstore import _native
from logstore.format.codec_ids import (
    LZ4,
    CodecError,
    CodecLimitError,
    check_level,
    is_default_lz4,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


_LZ4_MAGIC: Final = 0x184D2204


_LZ4_HC_MIN: Final = 3  # the library's lowest and highest level of lz4-hc

_LZ4_HC_MAX: Final = 12

_LZ4_STORED: Final = 0x80000000

_FLG_VERSION: Final = 0b1100_0000

_FLG_VERSION_1: Final = 0b0100_0000

_FLG_INDEPENDENT: Final = 0b0010_0000

_FLG_BLOCK_CHECKSUM: Final = 0b0001_0000

_FLG_CONTENT_SIZE: Final = 0b0000_1000

_FLG_CONTENT_CHECKSUM: Final = 0b0000_0100

_FLG_RESERVED: Final = 0b0000_0011  # the lower one is "dictionary id" in newer lz4; Kafka: reserved

# Magic, flags, block size 64 KiB, checksum: all that Kafka ever writes.
_LZ4_HEADER: Final = bytes.fromhex("04224d18604082")

_LZ4_END: Final = bytes(4)

_LZ4_BLOCK: Final = 64 * 1024

_u32_le: Final = struct.Struct("<I").unpack_from

_pack_u32_le: Final = struct.Struct("<I").pack


class _Lz4Frame(NamedTuple):
    """The positions of a frame's blocks, and the most bytes they can hold."""

    flags: int
    descriptor: int
    start: int  # position of the first block
    end: int  # position of the end mark
    bound: int  # no more bytes than this can result
    blocks: list[tuple[int, int, int]]  # position, length, nonzero if stored uncompressed
    usual: bool  # blocks of 64 KiB without checksums, as Kafka writes them
    plain: bool  # no content size, no content checksum: the library reads it as Kafka does


def lz4_compress(payload: Buffer, level: int | None) -> bytes:
    level = check_level(LZ4, level, range(1, 18))
    if is_default_lz4(LZ4, level):
        _lz4_block()
        framed = _native.lz4_frame(payload)
        if framed is not None:
            return framed
        how: dict[str, Any] = {"store_size": False}
    else:
        assert level is not None
        level = max(_LZ4_HC_MIN, min(level, _LZ4_HC_MAX))
        how = {"mode": "high_compression", "compression": level, "store_size": False}
    compress_block = _lz4_block().compress
    view = memoryview(payload).cast("B")
    parts: list[Buffer] = [_LZ4_HEADER]
    # The frame is built here: the library's frame API would copy the payload once more.
    for start in range(0, len(view), _LZ4_BLOCK):
        plain = view[start : start + _LZ4_BLOCK]
        block = compress_block(plain, **how)
        if len(block) < len(plain):
            parts += (_pack_u32_le(len(block)), block)
        else:
            parts += (_pack_u32_le(len(plain) | _LZ4_STORED), plain)
    parts.append(_LZ4_END)
    return b"".join(parts)


def lz4_decompress(payload: Buffer, view: memoryview, max_bytes: int) -> bytes:
    frame = _lz4_walk(view)
    if frame.usual:
        return _lz4_join(view, frame, max_bytes)
    source: Buffer = payload if frame.plain else _lz4_plain(view, frame)
    # One byte more than allowed, to notice a payload that is too large; never more than the blocks
    # can hold.
    room = min(frame.bound, max_bytes) + 1
    library = _lz4()
    context = library.create_decompression_context()
    try:
        content, _, finished = library.decompress_chunk(context, source, max_length=room)
    except RuntimeError as error:
        raise CodecError(LZ4, str(error)) from None
    if len(content) > max_bytes:
        raise CodecLimitError(LZ4, limit=max_bytes, produced=len(content))
    if not finished:
        raise CodecError(LZ4, f"ended early after {len(content)} bytes")
    assert isinstance(content, bytes)
    return content


def _lz4_join(view: memoryview, frame: _Lz4Frame, max_bytes: int) -> bytes:
    """Return the content of a usual frame, block by block: faster than the library's frame API."""
    library = _lz4_block()
    contents: list[bytes] = []
    produced = 0
    for position, length, stored in frame.blocks:
        block = view[position : position + length]
        if stored:
            content = bytes(block)
        else:
            try:
                content = library.decompress(block, uncompressed_size=_LZ4_BLOCK)
            except library.LZ4BlockError as error:
                raise CodecError(LZ4, str(error)) from None
        produced += len(content)
        if produced > max_bytes:
            raise CodecLimitError(LZ4, limit=max_bytes, produced=produced)
        contents.append(content)
    return contents[0] if len(contents) == 1 else b"".join(contents)


def _lz4_walk(view: memoryview) -> _Lz4Frame:
    """Check the frame by Kafka's rules without decompressing it."""
    if bytes(view[:7]) == _LZ4_HEADER:
        flags, descriptor, start = _LZ4_HEADER[4], _LZ4_HEADER[5], 7
    else:
        flags, descriptor, start = _lz4_read_header(view)
    size = len(view)
    block_max = 1 << (8 + 2 * (descriptor >> 4))
    suffix = 4 if flags & _FLG_BLOCK_CHECKSUM else 0
    position = start
    bound = 0
    blocks: list[tuple[int, int, int]] = []
    while True:
        if size - position < 4:
            raise CodecError(LZ4, f"cut short at byte {size}, before the end mark")
        (word,) = _u32_le(view, position)
        length = word & ~_LZ4_STORED
        if not length:
            break
        if length > block_max:
            raise CodecError(LZ4, f"block of {length} bytes at {position}, at most {block_max}")
        bound += length if word & _LZ4_STORED else block_max
        if length + suffix > size - position - 4:
            raise CodecError(LZ4, f"cut short in the block of {length} bytes at {position}")
        blocks.append((position + 4, length, word & _LZ4_STORED))
        position += 4 + length + suffix
    if flags & _FLG_CONTENT_CHECKSUM and size - position < 8:
        raise CodecError(LZ4, "cut short in the content checksum")
    plain = not flags & (_FLG_CONTENT_SIZE | _FLG_CONTENT_CHECKSUM) and not word
    usual = not suffix and block_max == _LZ4_BLOCK
    return _Lz4Frame(flags, descriptor, start, position, bound, blocks, usual, plain)


def _lz4_read_header(view: memoryview) -> tuple[int, int, int]:
    """Return flags, block descriptor and the position of the first block."""
    if len(view) < 7:
        raise CodecError(LZ4, "cut short in the frame header")
    magic, flags, descriptor = struct.unpack_from("<IBB", view, 0)
    if magic != _LZ4_MAGIC:
        raise CodecError(LZ4, f"magic {magic:08x}, not {_LZ4_MAGIC:08x}")
    if flags & _FLG_VERSION != _FLG_VERSION_1 or flags & _FLG_RESERVED:
        raise CodecError(LZ4, f"frame flags {flags:02x}")
    if not flags & _FLG_INDEPENDENT:
        raise CodecError(LZ4, "blocks depend on each other, which Kafka does not read")
    if descriptor & 0b1000_1111 or descriptor >> 4 < 4:
        raise CodecError(LZ4, f"block descriptor {descriptor:02x}")
    checksum_at = 6 + (8 if flags & _FLG_CONTENT_SIZE else 0)
    if len(view) <= checksum_at:
        raise CodecError(LZ4, "cut short in the frame header")
    expected = _lz4_header_checksum(bytes(view[4:checksum_at]))
    if view[checksum_at] != expected:
        raise CodecError(LZ4, f"header checksum {view[checksum_at]:02x}, not {expected:02x}")
    return flags, descriptor, checksum_at + 1


def _lz4_plain(view: memoryview, frame: _Lz4Frame) -> bytes:
    """Return the frame without content size and content checksum, which Kafka ignores."""
    flags = frame.flags & ~(_FLG_CONTENT_SIZE | _FLG_CONTENT_CHECKSUM)
    checksum = _lz4_header_checksum(bytes((flags, frame.descriptor)))
    header = struct.pack("<IBBB", _LZ4_MAGIC, flags, frame.descriptor, checksum)
    return b"".join((header, view[frame.start : frame.end], bytes(4)))


@functools.lru_cache(maxsize=64)
def _lz4_header_checksum(descriptor: bytes) -> int:
    """Return the second byte of the xxHash32 (seed 0) of a frame descriptor of < 16 bytes."""
    assert len(descriptor) < 16
    prime1, prime2, prime3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
    prime4, prime5 = 0x27D4EB2F, 0x165667B1
    mask = 0xFFFFFFFF

    def rotate(value: int, bits: int) -> int:
        return (value << bits | value >> (32 - bits)) & mask

    whole = len(descriptor) & ~3
    value = (prime5 + len(descriptor)) & mask
    for (word,) in struct.iter_unpack("<I", descriptor[:whole]):
        value = rotate((value + word * prime3) & mask, 17) * prime4 & mask
    for byte in descriptor[whole:]:
        value = rotate((value + byte * prime5) & mask, 11) * prime1 & mask
    value = (value ^ value >> 15) * prime2 & mask
    value = (value ^ value >> 13) * prime3 & mask
    return (value ^ value >> 16) >> 8 & 0xFF


@functools.cache
def _lz4() -> Any:
    import lz4.frame

    return lz4.frame


@functools.cache
def _lz4_block() -> Any:
    import lz4.block

    _lend_lz4(lz4.block)
    return lz4.block


def _lend_lz4(block: Any) -> None:
    """Give the addresses of the library's C functions to scans and writers, if it exports them.

    They then need neither the interpreter nor two copies per batch.  If the functions are not
    exported, they call this module, as for any other codec.  The loaded extension is never
    unloaded, so the addresses stay valid.
    """
    import ctypes

    try:
        library = ctypes.PyDLL(block._block.__file__)
        functions = (library.LZ4_decompress_safe, library.LZ4_compress_default)
    except (AttributeError, OSError):
        return
    decode, encode = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    _native.lend_lz4(decode or 0, encode or 0)
