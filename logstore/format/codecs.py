"""Codecs: gzip, snappy, lz4 and zstd in the containers Kafka puts around a batch's records.

Invariant: a payload never becomes more than ``max_bytes`` bytes, and no buffer is sized by a number
that was only *claimed* by the payload.  Declared sizes are checked before anything is allocated;
where a container declares none, its block headers are walked first and bound the output.

What a writer makes is what Kafka's Java client makes, so that its readers, which accept less than
the general formats allow, accept it.  A reader accepts what Kafka accepts.  Damage is always a
``CodecError``, never a shorter result - except that xerial snappy has no end mark, so a cut between
two of its chunks shows only in the record count, which is the caller's to check.

Every function may be called from any thread.  Contexts that a library does not let two threads
share are lent out of a pool.  The codec packages are imported when first used.

Not here: dictionaries, the legacy framings of magic 0 and 1, and the batch around the payload.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logstore import _native
from logstore.errors import CodecUnavailableError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "CODECS",
    "CodecError",
    "CodecLimitError",
    "CodecUnavailableError",
    "compress",
    "decompress",
    "is_default_lz4",
]

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4

#: Names of codecs as Kafka's ``compression.type`` spells them, and their number in a batch.
CODECS: Final[Mapping[str, int]] = MappingProxyType(
    {"none": NONE, "uncompressed": NONE, "gzip": GZIP, "snappy": SNAPPY, "lz4": LZ4, "zstd": ZSTD}
)
_NAMES: Final = ("none", "gzip", "snappy", "lz4", "zstd")

_CONTEXTS_KEPT: Final = 8  # idle contexts kept per codec; more threads than this only cost time


class CodecError(ValueError):
    """The payload is not what its codec says it is: damaged, cut short, or never valid."""

    def __init__(self, codec: int, reason: str) -> None:
        super().__init__(f"{_name(codec)} payload: {reason}")
        self.codec = codec
        self.reason = reason


class CodecLimitError(CodecError):
    """The payload is, or says it is, larger than the caller allows.

    ``declared`` is the size it claims, or None when it claims none; ``produced`` is what had been
    decompressed when it was given up.
    """

    def __init__(self, codec: int, *, limit: int, produced: int = 0, declared: int | None = None):
        what = (
            f"declares {declared} bytes" if declared is not None else f"produced {produced} bytes"
        )
        super().__init__(codec, f"{what}, more than the limit of {limit}")
        self.limit = limit
        self.produced = produced
        self.declared = declared


def compress(codec: int, payload: Buffer, level: int | None = None) -> bytes:
    """Return ``payload`` in Kafka's container for ``codec``; ``level`` None is Kafka's default.

    ValueError for an unknown codec or a level Kafka's configuration would refuse,
    CodecUnavailableError when the codec's package is missing.
    """
    if not NONE <= codec <= ZSTD:
        raise ValueError(f"unknown compression codec {codec}")
    return _COMPRESS[codec](payload, level)


def decompress(codec: int, payload: Buffer, max_bytes: int) -> bytes:
    """Return the content of ``payload``, at most ``max_bytes`` long.

    CodecLimitError when it is longer, CodecUnavailableError when the codec's package is missing,
    CodecError when the payload is damaged or uses something Kafka does not read.
    """
    if max_bytes < 0:
        raise ValueError(f"max_bytes must not be negative, not {max_bytes}")
    if not NONE <= codec <= ZSTD:
        raise CodecError(codec, "unknown compression codec")
    view = memoryview(payload).cast("B")
    if not len(view) and codec != NONE:
        raise CodecError(codec, "empty")
    return _DECOMPRESS[codec](payload, view, max_bytes)


def _name(codec: int) -> str:
    return _NAMES[codec] if NONE <= codec <= ZSTD else f"codec {codec}"


def _check_level(codec: int, level: int | None, allowed: range) -> int | None:
    if level is not None and level not in allowed:
        valid = f"{allowed.start}..{allowed.stop - 1}" if allowed else "none"
        raise ValueError(f"compression level {level} is not valid for {_name(codec)} ({valid})")
    return level


# ------------------------------------------------------------------------------------------ none


def _none_compress(payload: Buffer, level: int | None) -> bytes:
    _check_level(NONE, level, range(0))
    return bytes(payload)  # the same object if it is bytes already


def _none_decompress(payload: Buffer, view: memoryview, max_bytes: int) -> bytes:
    if len(view) > max_bytes:
        raise CodecLimitError(NONE, limit=max_bytes, declared=len(view))
    return bytes(payload)


# ------------------------------------------------------------------------------------------ gzip

# As java.util.zip.GZIPOutputStream: no name, no time, no extra flags, operating system 0.
_GZIP_HEADER: Final = bytes.fromhex("1f8b0800000000000000")
_GZIP_STEP: Final = 16 * 1024


def _gzip_compress(payload: Buffer, level: int | None) -> bytes:
    if _check_level(GZIP, level, range(-1, 10)) == 0:
        raise ValueError("compression level 0 is not valid for gzip (1..9, or -1 for the default)")
    deflate = zlib.compressobj(-1 if level is None else level, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = deflate.compress(payload)
    size = memoryview(payload).nbytes
    trailer = struct.pack("<II", zlib.crc32(payload), size & 0xFFFFFFFF)
    return b"".join((_GZIP_HEADER, body, deflate.flush(), trailer))


def _gzip_decompress(payload: Buffer, view: memoryview, max_bytes: int) -> bytes:
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
        # The object copies what it was given beyond its member.  There is seldom a second member;
        # when there are thousands, that must not be the whole rest each time.
        step = _GZIP_STEP
    return contents[0] if len(contents) == 1 else b"".join(contents)


# ---------------------------------------------------------------------------------------- snappy

# xerial's container: magic, version 1, oldest compatible version 1; then (i32 length, block)*.
_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_MAGIC_AS_LENGTH: Final = struct.unpack(">i", _XERIAL_MAGIC[:4])[0]
_XERIAL_BLOCK: Final = 32 * 1024
_XERIAL_CHUNK_MAX: Final = 512 << 20
# The densest element of a snappy block is a 3-byte copy of 64 bytes.
_SNAPPY_EXPANSION: Final = 22


def _cramjam() -> Any:
    try:
        import cramjam
    except ImportError:
        raise CodecUnavailableError("snappy", package="cramjam", extra="snappy") from None
    return cramjam


def _snappy_compress(payload: Buffer, level: int | None) -> bytes:
    _check_level(SNAPPY, level, range(0))
    compress_raw = _cramjam().snappy.compress_raw
    view = memoryview(payload).cast("B")
    parts: list[Buffer] = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK):
        block = compress_raw(view[start : start + _XERIAL_BLOCK])
        parts.append(struct.pack(">i", len(block)))
        parts.append(block)
    return b"".join(parts)


def _snappy_decompress(payload: Buffer, view: memoryview, max_bytes: int) -> bytes:
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
    """The uncompressed length in front of a raw block: a varint of at most 32 bits."""
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


# ------------------------------------------------------------------------------------------- lz4

_LZ4_MAGIC: Final = 0x184D2204
_LZ4_DEFAULT_LEVEL: Final = 9  # Kafka's name for the fast compressor; all others are lz4-hc
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
    """Where the blocks of a frame lie, and the most they can hold."""

    flags: int
    descriptor: int
    start: int  # position of the first block
    end: int  # position of the end mark
    bound: int
    blocks: list[tuple[int, int, int]]  # position, length, whether it is stored as it is
    usual: bool  # small blocks without checksums, as Kafka writes them
    plain: bool  # the library reads these bytes just as Kafka does


def _lz4_compress(payload: Buffer, level: int | None) -> bytes:
    level = _check_level(LZ4, level, range(1, 18))
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
    # The frame is put together here: the library's own way copies everything once more.
    for start in range(0, len(view), _LZ4_BLOCK):
        plain = view[start : start + _LZ4_BLOCK]
        block = compress_block(plain, **how)
        if len(block) < len(plain):
            parts += (_pack_u32_le(len(block)), block)
        else:
            parts += (_pack_u32_le(len(plain) | _LZ4_STORED), plain)
    parts.append(_LZ4_END)
    return b"".join(parts)


def _lz4_decompress(payload: Buffer, view: memoryview, max_bytes: int) -> bytes:
    frame = _lz4_walk(view)
    if frame.usual:
        return _lz4_join(view, frame, max_bytes)
    source: Buffer = payload if frame.plain else _lz4_plain(view, frame)
    # One byte more than allowed, so that too much is seen; never more than the blocks can hold.
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
    """The content of a frame as Kafka writes it, block by block: quicker than the library's way."""
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
    """The frame without what Kafka steps over: the content's size and its checksum."""
    flags = frame.flags & ~(_FLG_CONTENT_SIZE | _FLG_CONTENT_CHECKSUM)
    checksum = _lz4_header_checksum(bytes((flags, frame.descriptor)))
    header = struct.pack("<IBBB", _LZ4_MAGIC, flags, frame.descriptor, checksum)
    return b"".join((header, view[frame.start : frame.end], bytes(4)))


@functools.lru_cache(maxsize=64)
def _lz4_header_checksum(descriptor: bytes) -> int:
    """Second byte of the xxHash32 (seed 0) of a frame descriptor, which is under 16 bytes long."""
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
    """Let scans and writers call the library's C functions, where its extension exports them.

    That spares them the interpreter and two copies for every batch.  Without it nothing is lost but
    that: they come here as for any other codec.
    """
    import ctypes

    try:
        library = ctypes.PyDLL(block._block.__file__)
        functions = (library.LZ4_decompress_safe, library.LZ4_compress_default)
    except (AttributeError, OSError):
        return
    decode, encode = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    _native.lend_lz4(decode or 0, encode or 0)


def is_default_lz4(codec: int, level: int | None) -> bool:
    """Whether this is lz4 as Kafka does it when no level is given."""
    return codec == LZ4 and level in (None, _LZ4_DEFAULT_LEVEL)


# ------------------------------------------------------------------------------------------ zstd

_ZSTD_MAGIC: Final = 0xFD2FB528
_ZSTD_SKIPPABLE: Final = 0x184D2A50  # and the fifteen after it
_ZSTD_LEVELS: Final = range(-131072, 23)
_ZSTD_DEFAULT_LEVEL: Final = 3
_ZSTD_BLOCK_MAX: Final = 128 * 1024
# What zstd, and so Kafka, reads without being told otherwise.  Level 22 writes just that.
_ZSTD_WINDOW_MAX: Final = 1 << 27
# A decoder holds a buffer of the frame's window.  Levels up to 19 need no more than this.
_ZSTD_WINDOW_KEPT: Final = 8 << 20
_ZSTD_STEP: Final = 1 << 20


class _ZstdFrame(NamedTuple):
    """One frame of a payload: where it lies, what it declares, and the most it can hold."""

    start: int
    end: int
    window: int
    window_at: int | None  # position of the window descriptor; None if the content is the window
    declared: int | None  # content size
    bound: int


def _zstd_compress(payload: Buffer, level: int | None) -> bytes:
    level = _ZSTD_DEFAULT_LEVEL if level is None else level
    _check_level(ZSTD, level, _ZSTD_LEVELS)
    pool = _zstd_compressors.setdefault(level, [])
    compressor = _borrow(pool, functools.partial(_zstd_compressor, level))
    compressed: bytes = compressor.compress(payload)
    _give_back(pool, compressor)
    return compressed


def _zstd_compressor(level: int) -> Any:
    import zstandard

    return zstandard.ZstdCompressor(level=level, write_content_size=False, write_checksum=False)


def _zstd_decompressor() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor()


def _zstd_decompress(payload: Buffer, view: memoryview, max_bytes: int) -> bytes:
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
    decompressor = _borrow(_zstd_decompressors, _zstd_decompressor)
    try:
        if frame.bound <= room:
            # 0 would mean "not given" to the library
            content: bytes = decompressor.decompress(source, max_output_size=frame.bound or 1)
        else:
            content = _zstd_read(decompressor, source, room + 1)
    except zstandard.ZstdError as error:
        raise CodecError(ZSTD, str(error)) from None
    if len(content) > room:
        raise CodecLimitError(ZSTD, limit=max_bytes, produced=before + len(content))
    if frame.declared is not None and len(content) != frame.declared:
        raise CodecError(ZSTD, f"declares {frame.declared} bytes and holds {len(content)}")
    _give_back(_zstd_decompressors, decompressor)
    return content


def _zstd_read(decompressor: Any, source: Buffer, stop: int) -> bytes:
    """The first ``stop`` bytes of a frame, in steps, for it may hold far fewer."""
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
    """The frame with a window no larger than what will be read of it.

    The window says how far back a match may reach, and nothing reaches back beyond the start of
    the content; so a smaller window that still covers the content means the same and lets a
    decoder that has a limit hold a buffer of about that limit, not the 128 MiB of level 22.
    """
    assert frame.window_at is not None
    needed = max(min(frame.bound, room + _ZSTD_BLOCK_MAX), _ZSTD_BLOCK_MAX)
    exponent = max(0, (needed - 1).bit_length() - 10)
    if 1 << (10 + exponent) >= frame.window:
        return bytes(view[frame.start : frame.end])
    at = frame.window_at
    return b"".join((view[frame.start : at], bytes((exponent << 3,)), view[at + 1 : frame.end]))


def _zstd_frames(view: memoryview) -> Iterator[_ZstdFrame]:
    """Yield the frames of a payload that is whole: every block lies inside it."""
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
    """Step over a frame's blocks; return where they end and the most they can hold."""
    end = len(view)
    bound = 0
    last = False
    while not last:
        if end - position < 3:
            raise CodecError(ZSTD, f"cut short at byte {end}, before the last block")
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


# ------------------------------------------------------------------------------- lending contexts

# list.pop and list.append are atomic: a context is in one pool or in one caller's hands.  A caller
# that failed does not give its context back, for its state is unknown.
_zstd_compressors: dict[int, list[Any]] = {}
_zstd_decompressors: list[Any] = []


def _borrow(pool: list[Any], create: Callable[[], Any]) -> Any:
    try:
        return pool.pop()
    except IndexError:
        return create()


def _give_back(pool: list[Any], context: Any) -> None:
    if len(pool) < _CONTEXTS_KEPT:
        pool.append(context)


_COMPRESS: Final[tuple[Callable[[Buffer, int | None], bytes], ...]] = (
    _none_compress,
    _gzip_compress,
    _snappy_compress,
    _lz4_compress,
    _zstd_compress,
)
_DECOMPRESS: Final[tuple[Callable[[Buffer, memoryview, int], bytes], ...]] = (
    _none_decompress,
    _gzip_decompress,
    _snappy_decompress,
    _lz4_decompress,
    _zstd_decompress,
)
