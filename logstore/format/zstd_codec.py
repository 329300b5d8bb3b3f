"""zstd frames as in Kafka's batches.

Before a frame is decompressed, the headers of all its blocks are read.  They bound the output, and
so the memory that the frame can cost.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logstore.format.codec_ids import (
    ZSTD,
    CodecError,
    CodecLimitError,
    check_level,
)
from logstore.format.codec_pool import borrow, give_back

if TYPE_CHECKING:
    from typing_extensions import Buffer


_ZSTD_MAGIC: Final = 0xFD2FB528

_ZSTD_SKIPPABLE: Final = 0x184D2A50  # and the fifteen after it

_ZSTD_LEVELS: Final = range(-131072, 23)

_ZSTD_DEFAULT_LEVEL: Final = 3

_ZSTD_BLOCK_MAX: Final = 128 * 1024

# The largest window that zstd, and so Kafka, reads by default.  Level 22 writes it.
_ZSTD_WINDOW_MAX: Final = 1 << 27

# A decoder allocates a buffer of the frame's window.  Levels up to 19 need no more than this.
_ZSTD_WINDOW_KEPT: Final = 8 << 20

_ZSTD_STEP: Final = 1 << 20


class _ZstdFrame(NamedTuple):
    """One frame of a payload: its position, what it declares, and the most it can hold."""

    start: int
    end: int
    window: int
    window_at: int | None  # position of the window descriptor; None if the content is the window
    declared: int | None  # content size
    bound: int  # no more bytes than this can result


def zstd_compress(payload: Buffer, level: int | None) -> bytes:
    level = _ZSTD_DEFAULT_LEVEL if level is None else level
    check_level(ZSTD, level, _ZSTD_LEVELS)
    pool = _zstd_compressors.setdefault(level, [])
    compressor = borrow(pool, functools.partial(_zstd_compressor, level))
    compressed: bytes = compressor.compress(payload)
    give_back(pool, compressor)
    return compressed


def _zstd_compressor(level: int) -> Any:
    import zstandard

    return zstandard.ZstdCompressor(level=level, write_content_size=False, write_checksum=False)


def _zstd_decompressor() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor()


def zstd_decompress(payload: Buffer, view: memoryview, max_bytes: int) -> bytes:
    frames = list(_zstd_frames(view))
    declared = sum(frame.declared or 0 for frame in frames)
    if declared > max_bytes:
        raise CodecLimitError(ZSTD, limit=max_bytes, declared=declared)
    if len(frames) == 1:
        return _zstd_decode(view, frames[0], max_bytes, 0)
    contents: list[bytes] = []
    produced = 0
    for frame in frames:
        contents.append(_zstd_decode(view, frame, max_bytes, produced))
        produced += len(contents[-1])
    return b"".join(contents)


def _zstd_decode(view: memoryview, frame: _ZstdFrame, max_bytes: int, before: int) -> bytes:
    import zstandard

    room = max_bytes - before
    source: Buffer = view[frame.start : frame.end]
    if frame.window > _ZSTD_WINDOW_KEPT and frame.window_at is not None:
        source = _zstd_narrow(view, frame, room)
    decompressor = borrow(_zstd_decompressors, _zstd_decompressor)
    try:
        if frame.bound <= room:
            # The library takes 0 for "not given".
            content: bytes = decompressor.decompress(source, max_output_size=frame.bound or 1)
        else:
            content = _zstd_read(decompressor, source, room + 1)
    except zstandard.ZstdError as error:
        raise CodecError(ZSTD, str(error)) from None
    if len(content) > room:
        raise CodecLimitError(ZSTD, limit=max_bytes, produced=before + len(content))
    if frame.declared is not None and len(content) != frame.declared:
        raise CodecError(ZSTD, f"declares {frame.declared} bytes and holds {len(content)}")
    give_back(_zstd_decompressors, decompressor)
    return content


def _zstd_read(decompressor: Any, source: Buffer, stop: int) -> bytes:
    """Return the first ``stop`` bytes of a frame, read in steps: it may hold far fewer."""
    contents: list[bytes] = []
    produced = 0
    with decompressor.stream_reader(source) as reader:
        while produced < stop:
            content = reader.read(min(_ZSTD_STEP, stop - produced))
            if not content:
                break
            contents.append(content)
            produced += len(content)
    return b"".join(contents)


def _zstd_narrow(view: memoryview, frame: _ZstdFrame, room: int) -> bytes:
    """Return the frame with a window no larger than the bytes that will be read of it.

    The window is the greatest distance of a match, and no match refers to a position before the
    start of the content.  So a smaller window that still covers the content decodes to the same
    bytes, and the decoder's buffer is about as large as the caller's limit, not the 128 MiB of
    level 22.
    """
    assert frame.window_at is not None
    needed = max(min(frame.bound, room + _ZSTD_BLOCK_MAX), _ZSTD_BLOCK_MAX)
    exponent = max(0, (needed - 1).bit_length() - 10)
    if 1 << (10 + exponent) >= frame.window:
        return bytes(view[frame.start : frame.end])
    at = frame.window_at
    return b"".join((view[frame.start : at], bytes((exponent << 3,)), view[at + 1 : frame.end]))


def _zstd_frames(view: memoryview) -> Iterator[_ZstdFrame]:
    """Yield the frames of a payload; raise CodecError if a block is not wholly inside it."""
    position = 0
    while position < len(view):
        if len(view) - position < 8:
            raise CodecError(ZSTD, f"cut short in the frame header at byte {position}")
        magic, length = struct.unpack_from("<II", view, position)
        if magic & ~0xF == _ZSTD_SKIPPABLE:
            position += 8
            if length > len(view) - position:
                raise CodecError(ZSTD, f"cut short in a skippable frame of {length} bytes")
            position += length
        elif magic == _ZSTD_MAGIC:
            frame = _zstd_walk(view, position)
            yield frame
            position = frame.end
        else:
            raise CodecError(ZSTD, f"magic {magic:08x} at byte {position}")


def _zstd_walk(view: memoryview, start: int) -> _ZstdFrame:
    # After the magic: flags, window descriptor (unless single segment), dictionary id of 0 to 4
    # bytes, content size of 0 to 8 bytes.
    flags = view[start + 4]
    single = bool(flags & 0x20)
    if flags & 0x08:
        raise CodecError(ZSTD, f"frame flags {flags:02x}")
    position = start + 5
    window_at = None if single else position
    size_at = position + (not single) + (0, 1, 2, 4)[flags & 3]
    position = size_at + (int(single), 2, 4, 8)[flags >> 6]
    if position > len(view):
        raise CodecError(ZSTD, f"cut short in the frame header at byte {start}")

    declared = None
    if position > size_at:
        declared = int.from_bytes(view[size_at:position], "little")
        declared += 256 if position - size_at == 2 else 0
    if window_at is None:
        assert declared is not None
        window = declared
    else:
        window = 1 << (10 + (view[window_at] >> 3))
        window += (window >> 3) * (view[window_at] & 7)
        if window > _ZSTD_WINDOW_MAX:
            raise CodecError(ZSTD, f"window of {window} bytes, at most {_ZSTD_WINDOW_MAX}")

    position, bound = _zstd_blocks(view, position, min(window, _ZSTD_BLOCK_MAX))
    if flags & 0x04:
        position += 4
        if position > len(view):
            raise CodecError(ZSTD, "cut short in the content checksum")
    if declared is not None and declared > bound:
        raise CodecError(ZSTD, f"declares {declared} bytes where its blocks hold {bound} at most")
    return _ZstdFrame(start, position, window, window_at, declared, bound)


def _zstd_blocks(view: memoryview, position: int, block_max: int) -> tuple[int, int]:
    """Return the end position of a frame's blocks and the most bytes they can hold."""
    end = len(view)
    bound = 0
    last = False
    while not last:
        if end - position < 3:
            raise CodecError(ZSTD, f"cut short at byte {end}, before the last block")
        # 1 bit: last block; 2 bits: 0 raw, 1 one repeated byte, 2 compressed; 21 bits: length
        word = view[position] | view[position + 1] << 8 | view[position + 2] << 16
        last = bool(word & 1)
        kind, length = word >> 1 & 3, word >> 3
        if kind == 3 or length > block_max:
            raise CodecError(ZSTD, f"block header {word:06x} at byte {position}")
        bound += block_max if kind == 2 else length
        position += 3 + (1 if kind == 1 else length)
        if position > end:
            raise CodecError(ZSTD, f"cut short at byte {end}, in a block")
    return position, bound


# The compressors by level.  A caller that failed does not give its context back: the state of the
# context is unknown.
_zstd_compressors: dict[int, list[Any]] = {}

_zstd_decompressors: list[Any] = []
