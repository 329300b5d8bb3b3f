"""Validation of raw batches before an append.

`check_produced` checks all of a client's batch: checksum, sizes, and the lengths, offsets and
timestamp of every record.  It runs before the log's lock is taken.  `place`, which runs under the
lock, only sets offsets and leader epoch; that needs no new checksum unless the log sets the time.

`check_in_place` is for the common case, one uncompressed batch that is written as the client sent
it.  The bytes stay in the client's buffer: the writer sets the 16 bytes that change.

`check_copied` checks what a follower gets from its leader: the leader has validated the records, so
only checksum, order and leader epoch are checked, and the bytes are kept.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from logstore import _native
from logstore.config import PartitionConfig
from logstore.errors import InvalidRecordError, RecordTooLargeError, UnsupportedFormatError
from logstore.format import codecs
from logstore.format.batch import (
    CODEC,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    BatchHeader,
    EndMarker,
    split,
    verify,
    with_header,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["AppendedBatches", "check_copied", "check_in_place", "check_produced", "place"]

_PLACE = struct.Struct(">qii")


class AppendedBatches(NamedTuple):
    """The result of an append of raw batches."""

    offsets: range
    timestamp: int  # the time that the log set; -1 if the records keep theirs
    duplicate: bool  # nothing was appended: the log had the batch already, at these offsets


def check_in_place(
    data: Buffer, config: PartitionConfig, now_ms: int
) -> tuple[BatchHeader, int] | None:
    """Return the header of a client's batch and its oldest timestamp, without copying the batch.

    None if `data` is not one batch, is compressed or has to be changed, or if a check of the bytes
    fails: then `check_produced` has the result.  Raise as `check_produced` for the other checks.
    """
    found = _native.check_batch(data)
    if found is None:
        return None
    least, greatest, keyless, oldest = found
    header = BatchHeader.parse(memoryview(data).cast("B"))
    if greatest != header.max_timestamp or _target_codec(header, config) != header.codec:
        return None
    _check_size(header.size_bytes, config)
    _check_attributes(header)
    _check_records(least, greatest, keyless, config, now_ms)
    return header, oldest


def check_produced(
    data: bytes, config: PartitionConfig, now_ms: int
) -> list[tuple[BatchHeader, bytes]]:
    """Return a client's batches, validated for an append by a leader.  Offsets are not set yet.

    A batch is recompressed if the topic's ``compression.type`` is another codec.  Raise
    InvalidRecordError, RecordTooLargeError or UnsupportedFormatError.
    """
    batches = [_checked(header, raw, config, now_ms) for header, raw in split(data)]
    if not batches:
        raise InvalidRecordError("no batch to append")
    if len(batches) > 1 and any(header.has_producer for header, _ in batches):
        # A retry is recognised by batch, and its answer is one range of offsets.
        raise InvalidRecordError(
            f"{len(batches)} batches of an idempotent producer at once: append them one by one"
        )
    return batches


def _checked(
    header: BatchHeader, raw: bytes, config: PartitionConfig, now_ms: int
) -> tuple[BatchHeader, bytes]:
    verify(header, raw)
    _check_size(len(raw), config)
    _check_attributes(header)
    payload = raw[HEADER_BYTES:]
    if header.codec:
        payload = _unpacked(header, payload, config)
    least, greatest, keyless = _native.check_records(raw, payload)
    _check_records(least, greatest, keyless, config, now_ms)
    # A client may send a wrong maximum, and retention and the time index rely on it.
    changed = header
    if greatest != header.max_timestamp:
        changed = header._replace(max_timestamp=greatest)
    codec = _target_codec(header, config)
    if codec != header.codec:
        changed = changed._replace(attributes=header.attributes & ~CODEC | codec)
        raw = with_header(changed, codecs.compress(codec, payload) if codec else payload)
        _check_size(len(raw), config)
    elif changed is not header:
        raw = with_header(changed, raw[HEADER_BYTES:])
    return (header, raw) if changed is header else (BatchHeader.parse(raw), raw)


def _check_size(size_bytes: int, config: PartitionConfig) -> None:
    limit = min(config.max_message_bytes, config.segment_bytes)
    if size_bytes > limit:
        raise RecordTooLargeError(size_bytes, limit)


def _check_records(
    least: int, greatest: int, keyless: int, config: PartitionConfig, now_ms: int
) -> None:
    if keyless and "compact" in config.cleanup_policy:
        raise InvalidRecordError(
            f"{keyless} records without a key in a compacted topic", reason="key"
        )
    if config.message_timestamp_type == "CreateTime":
        _check_times(least, greatest, config, now_ms)


def _check_attributes(header: BatchHeader) -> None:
    if header.attributes == 0 and header.producer_id < 0 < header.record_count:
        return  # the common case: no flag is set, and no producer
    if header.control:
        raise InvalidRecordError("a control batch from a client; use end_transaction()")
    if header.log_append_time or header.has_delete_horizon:
        raise InvalidRecordError(
            f"attributes {header.attributes:#06x}: only the log sets LogAppendTime and a delete "
            f"horizon"
        )
    if header.has_producer and (header.base_sequence < 0 or header.producer_epoch < 0):
        raise InvalidRecordError(
            f"producer {header.producer_id} without an epoch or a sequence "
            f"({header.producer_epoch}, {header.base_sequence})"
        )
    if header.transactional and not header.has_producer:
        raise InvalidRecordError("a transactional batch without a producer id")
    if header.record_count < 1:
        raise InvalidRecordError(f"a batch of {header.record_count} records")


def _unpacked(header: BatchHeader, payload: bytes, config: PartitionConfig) -> bytes:
    if header.codec not in codecs.CODECS.values():
        raise UnsupportedFormatError(f"unknown compression {header.codec}")
    try:
        return codecs.decompress(header.codec, payload, config.max_decompressed_message_bytes)
    except codecs.CodecError as error:
        raise InvalidRecordError(
            f"the records cannot be decompressed: {error}", reason="codec"
        ) from error


def _check_times(least: int, greatest: int, config: PartitionConfig, now_ms: int) -> None:
    before, after = config.message_timestamp_before_max_ms, config.message_timestamp_after_max_ms
    if least >= 0 and now_ms - least > before:
        raise InvalidRecordError(
            f"a record's time {least} is {now_ms - least} ms in the past; "
            f"message.timestamp.before.max.ms is {before}",
            reason="timestamp",
        )
    if greatest - now_ms > after:
        raise InvalidRecordError(
            f"a record's time {greatest} is {greatest - now_ms} ms in the future; "
            f"message.timestamp.after.max.ms is {after}",
            reason="timestamp",
        )


def _target_codec(header: BatchHeader, config: PartitionConfig) -> int:
    if config.compression_type == "producer":
        return header.codec
    return codecs.CODECS["none" if config.compression_type == "uncompressed" else
                         config.compression_type]  # fmt: skip


def place(
    batches: list[tuple[BatchHeader, bytes]], offset: int, leader_epoch: int, append_time: int
) -> tuple[bytes, list[tuple[BatchHeader, EndMarker | None]]]:
    """Return the batches with offsets from `offset` on, and their headers.

    If `append_time` >= 0, it becomes the timestamp of all records.
    """
    pieces: list[bytes] = []
    headers: list[tuple[BatchHeader, EndMarker | None]] = []
    for header, raw in batches:
        placed = header._replace(base_offset=offset, leader_epoch=leader_epoch)
        if append_time >= 0:
            # The checksum covers attributes and timestamps: it is computed again.
            placed = placed._replace(
                attributes=header.attributes | LOG_APPEND_TIME,
                max_timestamp=append_time,
            )
            pieces.append(with_header(placed, raw[HEADER_BYTES:]))
        else:
            # The checksum does not cover the first 16 bytes: base offset, length, leader epoch.
            pieces += (_PLACE.pack(offset, header.length, leader_epoch), raw[_PLACE.size :])
        headers.append((placed, None))
        offset = placed.next_offset
    return b"".join(pieces), headers


def check_copied(data: bytes) -> list[tuple[BatchHeader, EndMarker | None]]:
    """Return the headers of a leader's batches, after checking that they are whole and ordered."""
    headers: list[tuple[BatchHeader, EndMarker | None]] = []
    for header, raw in split(data):
        verify(header, raw)
        if header.leader_epoch < 0:
            raise InvalidRecordError(
                f"the batch of offset {header.base_offset} has no leader epoch: it is from no log"
            )
        if headers and header.base_offset < headers[-1][0].next_offset:
            raise InvalidRecordError(
                f"a batch of offset {header.base_offset} after one that ends at "
                f"{headers[-1][0].last_offset}"
            )
        headers.append((header, EndMarker.parse(raw) if header.control else None))
    return headers
