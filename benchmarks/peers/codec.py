"""The codecs alone: lz4 and zstd on the bytes that our batches hold, batch by batch.

lz4 frames are made as Kafka makes them: independent 64 KiB blocks, no content checksum.
Frames do not say how long their content is, so the readers are told: guessing makes both slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import lz4.frame
import zstandard

ZSTD_LEVEL = 3


@dataclass(frozen=True, slots=True)
class Codec:
    name: str
    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes, int], bytes]  # the second is the most it may hold

    def compress_all(self, plain: Sequence[bytes]) -> float:
        """Plain bytes a second."""
        compress = self.compress
        started = perf_counter()
        for data in plain:
            compress(data)
        return sum(map(len, plain)) / (perf_counter() - started)

    def decompress_all(self, compressed: Sequence[bytes], sizes: Sequence[int]) -> float:
        """Plain bytes a second."""
        decompress = self.decompress
        total = 0
        started = perf_counter()
        for data, size in zip(compressed, sizes, strict=True):
            total += len(decompress(data, size))
        elapsed = perf_counter() - started
        assert total == sum(sizes)
        return total / elapsed


def _lz4_compress(data: bytes) -> bytes:
    made: bytes = lz4.frame.compress(
        data, block_size=lz4.frame.BLOCKSIZE_MAX64KB, block_linked=False, store_size=False
    )
    return made


def _lz4_decompress(data: bytes, size: int) -> bytes:
    content: bytes
    content, _, _ = lz4.frame.decompress_chunk(_lz4_context, data, max_length=size)
    return content


def _zstd_decompress(data: bytes, size: int) -> bytes:
    return _zstd_decompressor.decompress(data, max_output_size=size)


_lz4_context = lz4.frame.create_decompression_context()
_zstd_decompressor = zstandard.ZstdDecompressor()

CODECS = (
    Codec("lz4", _lz4_compress, _lz4_decompress),
    Codec("zstd", zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress, _zstd_decompress),
)
