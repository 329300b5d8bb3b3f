"""The codecs alone: lz4 and zstd on the bytes that our batches hold, batch by batch.

lz4 frames are made as Kafka makes them: independent 64 KiB blocks, no content checksum.
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
    decompress: Callable[[bytes], bytes]

    def compress_all(self, plain: Sequence[bytes]) -> float:
        """Plain bytes a second."""
        compress = self.compress
        started = perf_counter()
        for data in plain:
            compress(data)
        return sum(map(len, plain)) / (perf_counter() - started)

    def decompress_all(self, compressed: Sequence[bytes]) -> float:
        """Plain bytes a second."""
        decompress = self.decompress
        total = 0
        started = perf_counter()
        for data in compressed:
            total += len(decompress(data))
        return total / (perf_counter() - started)


def _lz4_compress(data: bytes) -> bytes:
    made: bytes = lz4.frame.compress(
        data, block_size=lz4.frame.BLOCKSIZE_MAX64KB, block_linked=False, store_size=False
    )
    return made


def _zstd_decompress(data: bytes) -> bytes:
    # Frames need not say how long their content is: then the stream interface is the only way.
    if zstandard.frame_content_size(data) > 0:
        return _zstd_decompressor.decompress(data)
    return _zstd_decompressor.decompressobj().decompress(data)


_zstd_decompressor = zstandard.ZstdDecompressor()

CODECS = (
    Codec("lz4", _lz4_compress, lz4.frame.decompress),
    Codec("zstd", zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress, _zstd_decompress),
)
