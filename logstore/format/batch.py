"""BatchHeader: the 61 bytes at the start of every record batch; EndMarker: a control batch.

    0 base offset i64     16 magic i8              35 max timestamp i64    57 record count i32
    8 length i32          17 CRC-32C u32           43 producer id i64
   12 leader epoch i32    21 attributes i16        51 producer epoch i16
                          23 last offset delta i32 53 base sequence i32
                          27 base timestamp i64

All fields are big-endian.  The checksum covers the bytes from the attributes to the end of the
batch: base offset and leader epoch can be changed without a new checksum.

A batch is passed between functions as the bytes it has in the file, and its header is parsed where
a field is needed.  `split` checks that each batch is whole, `verify` that its checksum is right.
This module does not decode records, except for the one record of a marker.

An EndMarker ends a transaction: a control batch of one record, byte for byte as Kafka's coordinator
writes it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from logstore import _native
from logstore.errors import InvalidRecordError, UnsupportedFormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "BatchHeader",
    "EndMarker",
    "decrement_sequence",
    "increment_sequence",
    "read_varint",
    "split",
    "with_producer",
]

_HEADER = struct.Struct(">qiibIhiqqqhii")
_CRC = struct.Struct(">I")
_KEY = struct.Struct(">hh")
_VALUE = struct.Struct(">hi")

HEADER_BYTES = _HEADER.size
OVERHEAD_BYTES = 12  # base offset and length, which the length does not count
AT_LENGTH, AT_MAGIC, AT_CRC, AT_ATTRIBUTES, AT_PRODUCER_ID = 8, 16, 17, 21, 43
CODEC, LOG_APPEND_TIME, TRANSACTIONAL, CONTROL, DELETE_HORIZON = 0x07, 0x08, 0x10, 0x20, 0x40
SEQUENCE_MAX = (1 << 31) - 1


def increment_sequence(sequence: int, by: int) -> int:
    """Return the sequence `by` records later.  After 2**31 - 1 follows 0.

    >>> increment_sequence(2**31 - 1, 1)
    0
    """
    return (sequence + by) & SEQUENCE_MAX


def decrement_sequence(sequence: int, by: int) -> int:
    """Return the sequence `by` records earlier.  Before 0 is 2**31 - 1.

    >>> decrement_sequence(0, 1) == 2**31 - 1
    True
    """
    return (sequence - by) & SEQUENCE_MAX


class BatchHeader(NamedTuple):
    """The fields of a record batch's header, in the order of the file."""

    base_offset: int
    length: int  # bytes after this field
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int  # -1: none
    producer_epoch: int
    base_sequence: int
    record_count: int

    @classmethod
    def parse(cls, raw: bytes | memoryview, at: int = 0) -> BatchHeader:
        """Return the header at byte `at`.  The batch itself may be longer than `raw`.

        Raise InvalidRecordError if there are too few bytes or a length is impossible, and
        UnsupportedFormatError for message format 0 or 1.
        """
        if len(raw) - at < HEADER_BYTES:
            raise InvalidRecordError(
                f"a batch header takes {HEADER_BYTES} bytes; {len(raw) - at} are left"
            )
        header = cls(*_HEADER.unpack_from(raw, at))
        if header.magic in (0, 1):
            raise UnsupportedFormatError(
                f"message format {header.magic}: logstore takes record batches of format 2"
            )
        if header.magic != 2:
            raise InvalidRecordError(f"a batch of format {header.magic}; only 2 is known")
        if header.length < HEADER_BYTES - OVERHEAD_BYTES or header.last_offset_delta < 0:
            raise InvalidRecordError(
                f"a batch of length {header.length} with a last offset delta of "
                f"{header.last_offset_delta} is impossible"
            )
        return header

    @classmethod
    def of_checked(cls, raw: Buffer) -> BatchHeader:
        """As `parse`, of bytes whose header has been checked already."""
        return tuple.__new__(cls, _HEADER.unpack_from(raw))

    def placed(self, base_offset: int, leader_epoch: int) -> BatchHeader:
        """Return the header with another base offset and leader epoch."""
        fields = (base_offset, self.length, leader_epoch, *self[3:])
        return tuple.__new__(BatchHeader, fields)  # `_replace` takes four times as long

    def pack(self) -> bytes:
        """Return the 61 bytes of the header."""
        return _HEADER.pack(*self)

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole batch, header included."""
        return self.length + OVERHEAD_BYTES

    @property
    def last_offset(self) -> int:
        """Return the offset of its last record.

        Compaction may remove that record; the header then still holds its offset.
        """
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """Return the first offset after the batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def last_sequence(self) -> int:
        """Return the sequence of its last record, or -1 if it has no sequences."""
        if self.base_sequence < 0:
            return -1
        return increment_sequence(self.base_sequence, self.last_offset_delta)

    @property
    def has_producer(self) -> bool:
        """Return whether a producer with an id wrote the batch."""
        return self.producer_id >= 0

    @property
    def codec(self) -> int:
        """Return the codec: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd."""
        return self.attributes & CODEC

    @property
    def log_append_time(self) -> bool:
        """Return whether the log set the timestamps of the records."""
        return bool(self.attributes & LOG_APPEND_TIME)

    @property
    def transactional(self) -> bool:
        """Return whether the batch belongs to a transaction."""
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def control(self) -> bool:
        """Return whether this is a control batch.  Readers never get its records."""
        return bool(self.attributes & CONTROL)

    @property
    def has_delete_horizon(self) -> bool:
        """Return whether the base timestamp is a delete horizon.

        From that time on, compaction may remove the tombstones and markers of the batch.
        """
        return bool(self.attributes & DELETE_HORIZON)


def split(data: bytes | memoryview) -> Iterator[tuple[BatchHeader, bytes]]:
    """Yield the batches in `data`, each with its header.

    Raise InvalidRecordError if the length of a batch exceeds the bytes that are left.
    """
    at = 0
    while at < len(data):
        header = BatchHeader.parse(data, at)
        if header.size_bytes > len(data) - at:
            raise InvalidRecordError(
                f"the batch at byte {at} takes {header.size_bytes} bytes; {len(data) - at} are left"
            )
        yield header, bytes(data[at : at + header.size_bytes])
        at += header.size_bytes


def verify(header: BatchHeader, raw: bytes | memoryview) -> None:
    """Raise InvalidRecordError if the checksum of the batch is wrong."""
    crc = _native.crc32c(memoryview(raw)[AT_ATTRIBUTES:])
    if crc != header.crc:
        raise InvalidRecordError(
            f"the batch of offset {header.base_offset} has checksum {crc:08x}, but its header has "
            f"{header.crc:08x}: the batch is damaged",
            reason="crc",
        )


def with_header(header: BatchHeader, payload: bytes | memoryview) -> bytes:
    """Return a batch of these fields and this payload, with the right length and checksum."""
    sized = header._replace(length=HEADER_BYTES - OVERHEAD_BYTES + len(payload))
    head = sized.pack()
    crc = _native.crc32c(payload, _native.crc32c(head[AT_ATTRIBUTES:]))
    return b"".join((head[:AT_CRC], _CRC.pack(crc), head[AT_ATTRIBUTES:], payload))


def with_producer(
    raw: bytes | memoryview,
    *,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    transactional: bool = False,
) -> bytes:
    """Return the batch `raw` with the id, epoch and sequence of a producer.

    `append_batch` then appends it once: a repeated append returns the offsets of the first.

    >>> with_producer(b"", producer_id=1, producer_epoch=0, base_sequence=0)
    Traceback (most recent call last):
    logstore.errors.InvalidRecordError: a batch header takes 61 bytes; 0 are left
    """
    header = BatchHeader.parse(raw)
    if header.size_bytes != len(raw):
        raise InvalidRecordError(f"{len(raw)} bytes, but the batch takes {header.size_bytes}")
    verify(header, raw)  # a new checksum must not hide damage
    attributes = header.attributes & ~TRANSACTIONAL | (TRANSACTIONAL if transactional else 0)
    changed = header._replace(
        attributes=attributes,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence & SEQUENCE_MAX,
    )
    return with_header(changed, memoryview(raw)[HEADER_BYTES:])


# ---- markers ----


class EndMarker(NamedTuple):
    """The control record that ends a transaction: COMMIT or ABORT."""

    commit: bool
    coordinator_epoch: int

    @classmethod
    def parse(cls, raw: bytes) -> EndMarker | None:
        """Return the marker in a whole control batch, or None if it holds no COMMIT or ABORT.

        Raise InvalidRecordError if the control record cannot be parsed.
        """
        header = BatchHeader.parse(raw)
        if not header.control or header.record_count == 0:
            return None  # compaction removes the record of a control batch, and may keep the batch
        try:
            key, value = _only_record(raw)
            version, kind = _KEY.unpack_from(key)
            if version < 0 or kind not in (0, 1):
                return None
            return cls(kind == 1, _VALUE.unpack_from(value)[1])
        except (struct.error, IndexError, ValueError) as error:
            raise InvalidRecordError(
                f"the control record at offset {header.base_offset} cannot be read: {error}"
            ) from error

    def encode(
        self,
        *,
        producer_id: int,
        producer_epoch: int,
        timestamp: int,
        base_offset: int = 0,
        leader_epoch: int = -1,
    ) -> bytes:
        """Return the control batch of this marker: 78 bytes."""
        # attributes, timestamp delta, offset delta, key length 4, key, value length 6, value,
        # number of headers; lengths are zig-zag varints
        record = b"\x00\x00\x00\x08%b\x0c%b\x00" % (
            _KEY.pack(0, int(self.commit)),
            _VALUE.pack(0, self.coordinator_epoch),
        )
        header = BatchHeader(
            base_offset=base_offset,
            length=0,
            leader_epoch=leader_epoch,
            magic=2,
            crc=0,
            attributes=TRANSACTIONAL | CONTROL,
            last_offset_delta=0,
            base_timestamp=timestamp,
            max_timestamp=timestamp,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=-1,
            record_count=1,
        )
        return with_header(header, bytes((len(record) << 1,)) + record)


def _only_record(raw: bytes) -> tuple[bytes, bytes]:
    """Return key and value of the first record of an uncompressed batch."""
    _, at = read_varint(raw, HEADER_BYTES)  # length of the record
    _, at = read_varint(raw, at + 1)  # timestamp delta, after one byte of attributes
    _, at = read_varint(raw, at)  # offset delta
    size, at = read_varint(raw, at)
    key, at = raw[at : at + max(0, size)], at + max(0, size)
    size, at = read_varint(raw, at)
    return key, raw[at : at + max(0, size)]


def read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the zig-zag number at byte `at`, and the position after it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
    raise ValueError("a number of more than ten bytes")
