"""BatchEncoder: encode records into raw Kafka batches in memory, without a log.

For programs that encode records in one process and append them in another with
`Partition.append_batch`, such as the tasks of a Spark job.  The batches have offsets from 0, no
leader epoch and no producer.  The append sets offsets and leader epoch; `with_producer` sets a
producer.

An encoder has no lock: threads must not share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from logstore import _native
from logstore.config import ConfigError, PartitionConfig
from logstore.format import codecs
from logstore.record import BytesColumn

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["BatchEncoder", "Batches", "builder_settings", "codec_number"]

EXTEND_BYTES = 16 << 20  # extend() is all or nothing up to this many encoded bytes
ARENA_BYTES = 1 << 20  # records are encoded into batches when this many bytes are collected


class BatchEncoder(_native.Builder):
    """Collects records; `take` returns them as raw batches.

    ``append(value, *, key=None, headers=(), timestamp=None)`` and ``extend(records)`` are those of
    a Writer.  `config` limits the size of a batch.
    """

    def __new__(
        cls,
        *,
        batch_bytes: int = 1 << 18,
        compression: str | None = None,
        compression_level: int | None = None,
        config: PartitionConfig | Mapping[str, Any] | None = None,
    ) -> Self:
        of = PartitionConfig.of(config)
        settings = builder_settings(of, codec_number(compression, of), compression_level,
                                    batch_bytes=batch_bytes, write_bytes=ARENA_BYTES)  # fmt: skip
        return super().__new__(cls, **settings, clock=None)

    def __init__(
        self,
        *,
        batch_bytes: int = 1 << 18,
        compression: str | None = None,
        compression_level: int | None = None,
        config: PartitionConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self._full: list[bytes] = []
        self._full_bytes = 0

    def __repr__(self) -> str:
        return f"<BatchEncoder {self.size_bytes} bytes>"

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes collected: encoded batches, and records not yet compressed."""
        return self._full_bytes + self._size_bytes

    def append_columns(
        self,
        values: BytesColumn,
        *,
        keys: BytesColumn | None = None,
        timestamps: npt.NDArray[np.int64] | None = None,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Add a record for every row, or for the rows in `rows`, in their order.

        A timestamp of -2**63 means now.  Raise what `append` raises; the rows before the bad one
        are added.
        """
        if timestamps is not None and (timestamps.dtype != "int64" or timestamps.ndim != 1):
            raise TypeError(f"timestamps must be int64 milliseconds, not {timestamps.dtype}")
        if rows is not None and (rows.dtype != "int64" or rows.ndim != 1):
            raise TypeError(f"rows must be int64 numbers, not {rows.dtype}")
        self._append_columns(
            values.buffers,
            None if keys is None else keys.buffers,
            # A contiguous copy, which the C code can read as an array of int64.
            None if timestamps is None else timestamps.copy(order="C").data,
            None if rows is None else rows.copy(order="C").data,
        )

    def take(self) -> bytes:
        """Return all batches so far, back to back, and empty the encoder."""
        self._hand_over()
        batches = self._full[0] if len(self._full) == 1 else b"".join(self._full)
        self._full.clear()
        self._full_bytes = 0
        return batches

    def _hand_over(self) -> None:
        """Encode the collected records.  The C code calls this when the arena is full."""
        encoded = self._encoded()
        if encoded:
            self._full.append(encoded)
            self._full_bytes += len(encoded)


class Batches(_native.Builder):
    """The records of one append() or extend(), for a log.

    Batches that do not fit into one write wait in `full`: all are encoded before the first write.
    """

    full: list[_native.Builder]

    @classmethod
    def of(cls, config: PartitionConfig, codec: int, clock: Callable[[], int] | None) -> Batches:
        """Return an empty builder for a log of this configuration."""
        settings = builder_settings(
            config, codec, None, batch_bytes=config.max_message_bytes, write_bytes=EXTEND_BYTES
        )
        batches = cls(**settings, clock=clock)
        batches.full = []
        return batches

    def _hand_over(self) -> None:
        self._take(self.full)  # moves the arena; nothing is copied


def codec_number(name: str | None, config: PartitionConfig) -> int:
    """Return the number of the codec `name`, or of the partition's configuration if None."""
    if name is None:
        name = "none" if config.compression_type == "producer" else config.compression_type
    if name not in codecs.CODECS:
        raise ConfigError(f"compression must be one of {', '.join(codecs.CODECS)}, not {name!r}")
    return codecs.CODECS[name]


def builder_settings(
    config: PartitionConfig, codec: int, level: int | None, *, batch_bytes: int, write_bytes: int
) -> dict[str, Any]:
    """Return the arguments of a `_native.Builder` for a log of this configuration, but for `clock`.

    The batches fit into one segment, and are small enough to be decompressed again.  `level` None
    is the configuration's level.  A missing package or a bad level raises here, and not later in an
    append.
    """
    if batch_bytes <= 0:
        raise ConfigError(f"batch_bytes must be positive, not {batch_bytes}")
    largest = min(config.max_message_bytes, config.segment_bytes)
    if codec:
        largest = min(largest, config.max_decompressed_message_bytes)
    levels = {number: config.compression_level(name) for name, number in codecs.CODECS.items()}
    if level is not None:
        levels = dict.fromkeys(levels, level)

    def compress(number: int, payload: memoryview) -> bytes:
        return codecs.compress(number, payload, levels[number])

    # Once for each builder, not for each batch.
    if codec or level is not None:
        compress(codec, memoryview(b""))  # raises for a missing package or a bad level
    return {
        "batch_bytes": min(batch_bytes, largest),
        "batch_bytes_max": largest,
        # The builder hands its batches over when it holds more than this, so it holds at most this
        # plus one batch: together no more than a segment.
        "arena_bytes": max(1, min(write_bytes, config.segment_bytes - largest)),
        "codec": codec,
        "compress": compress,
        "lent_lz4": codecs.is_default_lz4(codec, levels[codec]),
        "before_max_ms": config.message_timestamp_before_max_ms,
        "after_max_ms": config.message_timestamp_after_max_ms,
    }
