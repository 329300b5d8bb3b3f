"""The reference codec: record batches, format 2, in plain Python, slow and strict.

It is the oracle of the tests.  It is written from the format's tables and shares no code with the
engine: it has its own checksum and varints, so an error must be made twice to pass the tests.
``decode_batch`` rejects everything that the format forbids, even if a lenient reader would accept
it, so every field that it returns is valid.

It does not assign offsets to a log, keep indexes or recover anything.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from logstore.format import codecs

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "FormatViolation",
    "ReferenceBatch",
    "ReferenceRecord",
    "crc32c",
    "decode_batch",
    "encode_batch",
    "read_log",
]

# baseOffset batchLength leaderEpoch magic crc | attributes lastOffsetDelta baseTimestamp
# maxTimestamp producerId producerEpoch baseSequence recordsCount; the crc covers what follows it.
_HEADER: Final = struct.Struct(">qiibI hiqqqhii")
_HEADER_BYTES: Final = 61
_LENGTH_ENDS: Final = 12  # batchLength counts the bytes from here
_CRC_COVERS: Final = 21
assert _HEADER.size == _HEADER_BYTES

_CODEC_MASK: Final = 0x07
_LOG_APPEND_TIME: Final = 0x08
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
_DELETE_HORIZON: Final = 0x40

_INT32_MAX: Final = 2**31 - 1
_DECOMPRESSED_MAX: Final = 1 << 28


class FormatViolation(ValueError):
    """The bytes break a rule of the format; the message names the rule."""


class RecordLike(Protocol):
    """The attributes that ``encode_batch`` needs: a ``logstore.Record`` or a ReferenceRecord."""

    @property
    def value(self) -> bytes | None: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[str, bytes | None]]: ...
    @property
    def timestamp(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class ReferenceRecord:
    """One record, by value.  ``offset`` is absolute; −1 if it has none yet."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp: int = -1
    offset: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceBatch:
    """A batch's header and its records; ``position`` is its position in the file."""

    base_offset: int
    last_offset: int
    leader_epoch: int
    codec: int
    log_append_time: bool
    transactional: bool
    control: bool
    delete_horizon: int | None
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    size: int
    records: tuple[ReferenceRecord, ...] = field(repr=False)
    position: int = 0

    @property
    def next_offset(self) -> int:
        """Return the offset after this batch."""
        return self.last_offset + 1

    @property
    def last_sequence(self) -> int:
        """Return the sequence of the last offset; sequences wrap to 0 after 2³¹−1."""
        if self.base_sequence < 0:
            return -1
        return (self.base_sequence + self.last_offset - self.base_offset) % (_INT32_MAX + 1)


# ------------------------------------------------------------------------------------ primitives


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CRC_TABLE: Final = _crc_table()


def crc32c(data: Iterable[int]) -> int:
    """Return the CRC-32C (Castagnoli) of ``data``."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def encode_varint(value: int, bits: int = 32) -> bytes:
    """Return ``value`` as a zig-zag varint of a ``bits``-bit signed integer."""
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise FormatViolation(f"{value} does not fit into {bits} bits")
    rest = value << 1 if value >= 0 else ~value << 1 | 1
    out = bytearray()
    while rest >= 0x80:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


class _Reader:
    """A cursor over bytes.  Reading past the end raises FormatViolation."""

    def __init__(self, data: bytes, position: int = 0, end: int | None = None) -> None:
        self.data = data
        self.position = position
        self.end = len(data) if end is None else end

    @property
    def remaining(self) -> int:
        return self.end - self.position

    def take(self, count: int) -> bytes:
        if count > self.remaining:
            raise FormatViolation(f"{count} bytes wanted, {self.remaining} are left")
        self.position += count
        return self.data[self.position - count : self.position]

    def varint(self, bits: int = 32) -> int:
        rest = shift = 0
        while True:
            byte = self.take(1)[0]
            rest |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift >= bits:
                raise FormatViolation(f"a varint of {bits} bits is longer than {shift // 7} bytes")
        if rest >> bits:
            raise FormatViolation(f"a varint does not fit into {bits} bits")
        return rest >> 1 ^ -(rest & 1)

    def nullable(self) -> bytes | None:
        length = self.varint()
        return None if length < 0 else self.take(length)


# --------------------------------------------------------------------------------------- records


def _encode_nullable(data: bytes | None) -> bytes:
    return encode_varint(-1) if data is None else encode_varint(len(data)) + data


def _encode_record(record: RecordLike, timestamp_delta: int, offset_delta: int) -> bytes:
    body = bytearray(1)  # attributes
    body += encode_varint(timestamp_delta, 64)
    body += encode_varint(offset_delta)
    body += _encode_nullable(record.key)
    body += _encode_nullable(record.value)
    body += encode_varint(len(record.headers))
    for name, value in record.headers:
        body += _encode_nullable(name.encode())
        body += _encode_nullable(value)
    return encode_varint(len(body)) + body


def _decode_record(reader: _Reader) -> tuple[int, int, ReferenceRecord]:
    """Return timestamp delta, offset delta, and the record without either."""
    length = reader.varint()
    if not 0 <= length <= reader.remaining:
        raise FormatViolation(f"a record of {length} bytes where {reader.remaining} are left")
    body = _Reader(reader.data, reader.position, reader.position + length)
    reader.take(length)
    body.take(1)  # attributes: unused, any value
    timestamp_delta = body.varint(64)
    offset_delta = body.varint()
    key = body.nullable()
    value = body.nullable()
    count = body.varint()
    if not 0 <= count <= body.remaining:
        raise FormatViolation(f"{count} headers in {body.remaining} bytes")
    headers = tuple(_decode_header(body) for _ in range(count))
    if body.remaining:
        raise FormatViolation(f"{body.remaining} bytes follow the last field of a record")
    return timestamp_delta, offset_delta, ReferenceRecord(value, key, headers)


def _decode_header(reader: _Reader) -> tuple[str, bytes | None]:
    name = reader.nullable()
    if name is None:
        raise FormatViolation("a header without a name")
    try:
        return name.decode(), reader.nullable()
    except UnicodeDecodeError as error:
        raise FormatViolation(f"a header's name is not UTF-8: {error}") from None


# --------------------------------------------------------------------------------------- batches


def encode_batch(
    records: Iterable[RecordLike],
    *,
    base_offset: int = 0,
    last_offset: int | None = None,
    leader_epoch: int = 0,
    codec: int = 0,
    level: int | None = None,
    append_time: int | None = None,
    transactional: bool = False,
    control: bool = False,
    delete_horizon: int | None = None,
    max_timestamp: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> bytes:
    """Encode one batch as Kafka's builder would.

    A record with an offset (≥ 0) keeps it, so that gaps can be made; another gets the offset after
    the record before it.  ``append_time`` makes a LogAppendTime batch.  ``last_offset`` after the
    last record, or without any record, makes a batch as compaction leaves it; ``max_timestamp`` is
    needed only without records.
    """
    records = list(records)
    offsets: list[int] = []
    for record in records:
        offset = getattr(record, "offset", -1)
        after = offsets[-1] + 1 if offsets else base_offset
        offsets.append(after if offset is None or offset < 0 else offset)
    timestamps = [-1 if record.timestamp is None else record.timestamp for record in records]
    if min(timestamps, default=0) < -1:
        raise FormatViolation(f"timestamp {min(timestamps)}")
    if last_offset is None:
        last_offset = offsets[-1] if offsets else base_offset
    base_timestamp = delete_horizon if delete_horizon is not None else [*timestamps, -1][0]
    if append_time is not None:
        max_timestamp = append_time
    elif max_timestamp is None:
        max_timestamp = max(timestamps, default=-1)

    payload = b"".join(
        _encode_record(record, timestamp - base_timestamp, offset - base_offset)
        for record, timestamp, offset in zip(records, timestamps, offsets, strict=True)
    )
    attributes = (
        (codec if records else 0)
        | (_LOG_APPEND_TIME if append_time is not None else 0)
        | (_TRANSACTIONAL if transactional else 0)
        | (_CONTROL if control else 0)
        | (_DELETE_HORIZON if delete_horizon is not None else 0)
    )
    if attributes & _CODEC_MASK:
        payload = codecs.compress(codec, payload, level)
    size = _HEADER_BYTES + len(payload)

    def header(crc: int) -> bytes:
        return _HEADER.pack(
            base_offset, size - _LENGTH_ENDS, leader_epoch, 2, crc,
            attributes, last_offset - base_offset, base_timestamp, max_timestamp,
            producer_id, producer_epoch, base_sequence, len(records),
        )  # fmt: skip

    return header(crc32c(header(0)[_CRC_COVERS:] + payload)) + payload


def decode_batch(data: Buffer) -> ReferenceBatch:
    """Decode exactly one batch.  Raises FormatViolation if the format forbids it."""
    data = bytes(data)
    if len(data) < _HEADER_BYTES:
        raise FormatViolation(f"{len(data)} bytes are less than a header")
    (
        base_offset, length, leader_epoch, magic, crc,
        attributes, last_delta, base_timestamp, max_timestamp,
        producer_id, producer_epoch, base_sequence, count,
    ) = _HEADER.unpack_from(data)  # fmt: skip

    def require(truth: bool, what: str) -> None:
        if not truth:
            raise FormatViolation(what)

    require(magic == 2, f"magic {magic}")
    require(length == len(data) - _LENGTH_ENDS, f"batchLength {length} in {len(data)} bytes")
    computed = crc32c(data[_CRC_COVERS:])
    require(crc == computed, f"crc {crc:08x} is stored, {computed:08x} computed")
    require(base_offset >= 0, f"baseOffset {base_offset}")
    require(leader_epoch >= -1, f"partitionLeaderEpoch {leader_epoch}")
    codec = attributes & _CODEC_MASK
    require(codec <= codecs.ZSTD, f"codec {codec}")
    require(0 <= attributes < 0x80, f"attributes {attributes:04x}")
    require(last_delta >= 0, f"lastOffsetDelta {last_delta}")
    require(0 <= count <= last_delta + 1, f"{count} records in {last_delta + 1} offsets")
    require(max_timestamp >= -1, f"maxTimestamp {max_timestamp}")
    require(producer_id >= -1, f"producerId {producer_id}")
    require(producer_epoch >= -1, f"producerEpoch {producer_epoch}")
    require(base_sequence >= -1, f"baseSequence {base_sequence}")
    control = bool(attributes & _CONTROL)
    transactional = bool(attributes & _TRANSACTIONAL)
    require(not transactional or producer_id >= 0, "transactional, but without a producer id")
    require(not control or base_sequence == -1, f"control batch with sequence {base_sequence}")

    payload = data[_HEADER_BYTES:]
    if count == 0:
        require(not payload, f"no records, but {len(payload)} bytes of them")
        require(codec == 0, "no records, but compressed")
        require(base_timestamp == -1, f"no records, but baseTimestamp {base_timestamp}")
    elif codec:
        try:
            payload = codecs.decompress(codec, payload, _DECOMPRESSED_MAX)
        except codecs.CodecError as error:
            raise FormatViolation(str(error)) from error
    append_time = bool(attributes & _LOG_APPEND_TIME)
    records = _decode_records(
        payload, count, base_offset, base_timestamp, max_timestamp if append_time else None
    )
    for record in records:
        require(record.offset <= base_offset + last_delta, f"offset {record.offset} past the last")
        require(record.timestamp >= -1, f"timestamp {record.timestamp} at offset {record.offset}")
    if records and not append_time:
        highest = max(record.timestamp for record in records)
        require(max_timestamp == highest, f"maxTimestamp {max_timestamp}, the records {highest}")
    if control:
        _check_control(records, transactional)
    return ReferenceBatch(
        base_offset=base_offset,
        last_offset=base_offset + last_delta,
        leader_epoch=leader_epoch,
        codec=codec,
        log_append_time=append_time,
        transactional=transactional,
        control=control,
        delete_horizon=base_timestamp if attributes & _DELETE_HORIZON else None,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        size=len(data),
        records=records,
    )


def _decode_records(
    payload: bytes, count: int, base_offset: int, base_timestamp: int, append_time: int | None
) -> tuple[ReferenceRecord, ...]:
    records: list[ReferenceRecord] = []
    reader = _Reader(payload)
    previous = -1
    for _ in range(count):
        timestamp_delta, offset_delta, record = _decode_record(reader)
        if offset_delta <= previous:
            raise FormatViolation(f"offset delta {offset_delta} follows {previous}")
        previous = offset_delta
        timestamp = base_timestamp + timestamp_delta if append_time is None else append_time
        records.append(replace(record, offset=base_offset + offset_delta, timestamp=timestamp))
    if reader.remaining:
        raise FormatViolation(f"{reader.remaining} bytes follow the last of {count} records")
    return tuple(records)


def _check_control(records: Sequence[ReferenceRecord], transactional: bool) -> None:
    for record in records:
        if record.key is None or len(record.key) < 4:
            raise FormatViolation(f"control record with the key {record.key!r}")
        version, kind = struct.unpack_from(">hh", record.key)
        if version < 0:
            raise FormatViolation(f"control record of version {version}")
        if transactional and kind in (0, 1) and len(record.value or b"") < 6:
            raise FormatViolation(f"transaction marker with the value {record.value!r}")
    if transactional and len(records) > 1:
        raise FormatViolation(f"{len(records)} records in a transaction marker batch")


def read_log(path: str | os.PathLike[str]) -> list[ReferenceBatch]:
    """Decode a whole ``.log`` file, whose name is its base offset if it is a number.

    Raises FormatViolation, with the position of the batch, unless the whole file is valid batches
    with increasing offsets.
    """
    path = Path(path)
    data = path.read_bytes()
    batches: list[ReferenceBatch] = []
    stem = path.name.split(".")[0]
    expected = int(stem) if stem.isdecimal() else 0
    position = 0
    while position < len(data):
        try:
            if len(data) - position < _HEADER_BYTES:
                raise FormatViolation(f"{len(data) - position} bytes are less than a header")
            (length,) = struct.unpack_from(">i", data, position + 8)
            end = position + _LENGTH_ENDS + max(length, 0)
            if end > len(data):
                raise FormatViolation(f"a batch of {end - position} bytes runs past the end")
            batch = replace(decode_batch(data[position:end]), position=position)
            if batch.base_offset < expected:
                raise FormatViolation(f"offset {batch.base_offset} where {expected} is next")
        except FormatViolation as error:
            raise FormatViolation(f"{path.name} at byte {position}: {error}") from error
        batches.append(batch)
        expected = batch.next_offset
        position = end
    return batches
