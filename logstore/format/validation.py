"""Validation of raw batches before an append.

`check_produced` checks all of a client's batch: checksum, sizes, and the lengths, offsets and
timestamp of every record.  It runs before the log's lock is taken.  `place`, which runs under the
lock, only sets offsets and leader epoch; that needs no new checksum unless the log sets the time.

`check_in_place` is for the common case, one batch that is written as the client sent it: not
compressed, or by lz4.  The bytes stay in the client's buffer: the writer sets the 16 bytes that
change.

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
    read_varint,
    split,
    verify,
    with_header,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "AppendedBatches",
    "CopiedBatches",
    "check_copied",
    "check_in_place",
    "check_produced",
    "place",
    "plain_rules",
    "refused_records",
]

REFUSED_MAX = 1000  # records of a batch that `refused_records` returns
WINDOW = 5  # batches of a producer that the producer state keeps
LOOKED_AT_MAX = 100_000  # records of a batch that it looks at

_PLACE = struct.Struct(">qii")


class AppendedBatches(NamedTuple):
    """The result of an append of raw batches."""

    offsets: range
    # The time that the log set; -1 if the records keep theirs.  Of a duplicate: the newest
    # timestamp of the batch, as a broker answers it.
    timestamp: int
    duplicate: bool  # nothing was appended: the log had the batch already, at these offsets


def plain_rules(config: PartitionConfig) -> tuple[int, int, int, bool] | None:
    """Return what `SegmentWriter.append_plain` compares a batch with; None if it cannot be used.

    The greatest size, the greatest age and lead of a record's time, and whether every record needs
    a key.  Batches are not changed: no topic that sets the time or compresses has such rules.
    """
    if config.message_timestamp_type != "CreateTime":
        return None
    if config.compression_type not in ("producer", "uncompressed"):
        return None
    return (
        min(config.max_message_bytes, config.segment_bytes),
        config.message_timestamp_before_max_ms,
        config.message_timestamp_after_max_ms,
        "compact" in config.cleanup_policy,
    )


def check_in_place(
    data: Buffer, config: PartitionConfig, now_ms: int
) -> tuple[BatchHeader, int] | None:
    """Return the header of a client's batch and its oldest timestamp, without copying the batch.

    None if `data` is not one batch, is compressed otherwise than by lz4 or has to be changed, or if
    a check of the bytes fails: then `check_produced` has the result.  Raise as `check_produced` for
    the other checks.
    """
    found = _native.check_batch(data, config.max_decompressed_message_bytes)
    if found is None:
        return None
    least, greatest, keyless, oldest = found
    header = BatchHeader.of_checked(data)
    # The batch has to be changed, and `data` may be memory of the caller: it is copied first.
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
    # The checksum is right from here on, so a fault below is an error of the client.
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
    # The records stay as they are; only the header and its checksum are written again.
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
        reason = "size" if isinstance(error, codecs.CodecLimitError) else "codec"
        raise InvalidRecordError(
            f"the records cannot be decompressed: {error}", reason=reason
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


def refused_records(raw: bytes, config: PartitionConfig, now_ms: int) -> list[tuple[int, str, str]]:
    """Return the records of a batch that break a rule of the topic: place, reason and words.

    The batch is one that `check_produced` refused for its keys or times.  Python reads the records
    one by one: that takes long, and is bounded.  A record without a key is not asked for its time.
    """
    header = BatchHeader.parse(raw)
    payload = raw[HEADER_BYTES:]
    if header.codec:
        payload = _unpacked(header, payload, config)
    compacted = "compact" in config.cleanup_policy
    timed = config.message_timestamp_type == "CreateTime"
    found: list[tuple[int, str, str]] = []
    at = 0
    for place in range(min(header.record_count, LOOKED_AT_MAX)):
        size, at = read_varint(payload, at)
        end = at + size
        delta, at = read_varint(payload, at + 1)  # after one byte of attributes
        _, at = read_varint(payload, at)  # offset delta
        key_bytes, _ = read_varint(payload, at)
        at = end
        time_ms = header.base_timestamp + delta
        if compacted and key_bytes < 0:
            found.append((place, "key", "a compacted topic takes no record without a key"))
        elif timed and time_ms >= 0:
            try:
                _check_times(time_ms, time_ms, config, now_ms)
            except InvalidRecordError as error:
                found.append((place, error.reason, str(error)))
        if len(found) == REFUSED_MAX:
            break
    return found


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


class CopiedBatches(NamedTuple):
    """A leader's batches, one after the other, which a follower appends as they are."""

    offsets: range  # from the first batch to the end of the last; offsets may be missing
    dense: bool  # no offset is missing
    epochs: list[tuple[int, int]]  # (epoch, offset) of each batch with another epoch than before
    # What the producer state needs: headers, and the markers of control batches.
    producers: list[tuple[BatchHeader, EndMarker | None]]


def check_copied(data: bytes) -> CopiedBatches | None:
    """Return a leader's batches, after checking that they are whole and ordered; None for b"".

    C walks the batches.  Python looks only at those of producers: an answer with thousands of
    small batches is checked at the speed of its checksums.
    """
    found = _native.check_copied(data)
    if found is None:
        return _check_copied_slowly(data) if data else None
    first, stop, dense, epochs, producers = found
    recent: dict[int, int] = {}
    heads = []
    # The state keeps the newest batches of a producer: from the end, older ones are left out.  All
    # batches of a transaction, and markers, count: their producer id is -1 here.
    for position, producer_id in reversed(producers):
        if producer_id >= 0:
            seen = recent.get(producer_id, 0)
            if seen == WINDOW:
                continue
            recent[producer_id] = seen + 1
        header = BatchHeader.parse(data, position)
        raw = data[position : position + header.size_bytes] if header.control else b""
        heads.append((header, EndMarker.parse(raw) if header.control else None))
    heads.reverse()
    return CopiedBatches(range(first, stop), dense, epochs, heads)


def _check_copied_slowly(data: bytes) -> CopiedBatches:
    """As `check_copied`, batch by batch: it raises the reason why one is refused."""
    headers = _headers_of(data)
    starts = [(header.leader_epoch, header.base_offset) for header, _ in headers]
    ends = [header.next_offset for header, _ in headers]
    dense = [start for _, start in starts[1:]] == ends[:-1]
    return CopiedBatches(range(starts[0][1], ends[-1]), dense, starts, headers)


def _headers_of(data: bytes) -> list[tuple[BatchHeader, EndMarker | None]]:
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
        # A copied log has control batches, which a client must not send: see `_check_attributes`.
        headers.append((header, EndMarker.parse(raw) if header.control else None))
    return headers
