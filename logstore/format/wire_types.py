"""FieldWriter, FieldReader: Kafka's wire types, as in the records of its internal topics.

Integers are big-endian; a string or an array starts with its length.  In the *compact* form a
length is an unsigned varint, plus one, and 0 means null.

Invariant: a FieldReader checks every length against the bytes that are left before it allocates
memory, and raises InvalidRecordError if they do not suffice.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Iterable
from typing import TypeVar

from logstore.errors import InvalidRecordError

__all__ = ["FieldReader", "FieldWriter"]

T = TypeVar("T")

_INT8, _INT16 = struct.Struct(">b"), struct.Struct(">h")
_INT32, _INT64 = struct.Struct(">i"), struct.Struct(">q")
STRING_MAX = (1 << 15) - 1


class FieldWriter:
    """Encodes fields into bytes.  Methods return the writer, so that calls can be chained.

    >>> FieldWriter().int16(1).string("g").int32(3).take().hex()
    '000100016700000003'
    """

    __slots__ = ("_out",)

    def __init__(self) -> None:
        self._out = bytearray()

    def take(self) -> bytes:
        """Return the bytes written so far."""
        return bytes(self._out)

    def int8(self, value: int) -> FieldWriter:
        self._out += _INT8.pack(value)
        return self

    def int16(self, value: int) -> FieldWriter:
        self._out += _INT16.pack(value)
        return self

    def int32(self, value: int) -> FieldWriter:
        self._out += _INT32.pack(value)
        return self

    def int64(self, value: int) -> FieldWriter:
        self._out += _INT64.pack(value)
        return self

    def unique_id(self, value: uuid.UUID) -> FieldWriter:
        self._out += value.bytes
        return self

    def string(self, value: str) -> FieldWriter:
        raw = value.encode()
        if len(raw) > STRING_MAX:
            raise InvalidRecordError(f"a string of {len(raw)} bytes; at most {STRING_MAX} fit")
        self._out += _INT16.pack(len(raw))
        self._out += raw
        return self

    def nullable_string(self, value: str | None) -> FieldWriter:
        return self.int16(-1) if value is None else self.string(value)

    def blob(self, value: bytes) -> FieldWriter:
        self._out += _INT32.pack(len(value))
        self._out += value
        return self

    def nullable_blob(self, value: bytes | None) -> FieldWriter:
        return self.int32(-1) if value is None else self.blob(value)

    def array(self, values: Iterable[T], each: Callable[[FieldWriter, T], object]) -> FieldWriter:
        """Write a count and the values with `each`: ``writer.array([1, 2], FieldWriter.int32)``."""
        held = list(values)
        self._out += _INT32.pack(len(held))
        for value in held:
            each(self, value)
        return self

    # ---- compact ----

    def varint(self, value: int) -> FieldWriter:
        """Write an unsigned varint, not zig-zag."""
        while value >= 0x80:
            self._out.append(value & 0x7F | 0x80)
            value >>= 7
        self._out.append(value)
        return self

    def compact_string(self, value: str | None) -> FieldWriter:
        if value is None:
            return self.varint(0)
        return self.compact_blob(value.encode())

    def compact_blob(self, value: bytes | None) -> FieldWriter:
        if value is None:
            return self.varint(0)
        self.varint(len(value) + 1)
        self._out += value
        return self

    def compact_array(
        self, values: Iterable[T] | None, each: Callable[[FieldWriter, T], object]
    ) -> FieldWriter:
        if values is None:
            return self.varint(0)
        held = list(values)
        self.varint(len(held) + 1)
        for value in held:
            each(self, value)
        return self

    # A tagged field is its number, its size and its bytes: a reader can skip one that it does not
    # know.
    def tags(self, tagged: Iterable[tuple[int, bytes]] = ()) -> FieldWriter:
        """Write the tagged fields at the end of a compact structure, by ascending number."""
        held = list(tagged)
        self.varint(len(held))
        for number, raw in held:
            self.varint(number).varint(len(raw))
            self._out += raw
        return self


class FieldReader:
    """Decodes fields from bytes, one after the other.

    >>> reader = FieldReader(bytes.fromhex("000100016700000003"))
    >>> reader.int16(), reader.string(), reader.int32(), reader.left
    (1, 'g', 3, 0)
    """

    __slots__ = ("_at", "_raw")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    @property
    def left(self) -> int:
        """Return the number of bytes that have not been read."""
        return len(self._raw) - self._at

    def _take(self, count: int) -> bytes:
        if not 0 <= count <= self.left:
            raise InvalidRecordError(
                f"a field of {count} bytes at byte {self._at} of {len(self._raw)}"
            )
        raw = self._raw[self._at : self._at + count]
        self._at += count
        return raw

    def int8(self) -> int:
        return int(_INT8.unpack(self._take(1))[0])

    def int16(self) -> int:
        return int(_INT16.unpack(self._take(2))[0])

    def int32(self) -> int:
        return int(_INT32.unpack(self._take(4))[0])

    def int64(self) -> int:
        return int(_INT64.unpack(self._take(8))[0])

    def unique_id(self) -> uuid.UUID:
        return uuid.UUID(bytes=self._take(16))

    def string(self) -> str:
        return self._text(self.int16())

    def nullable_string(self) -> str | None:
        length = self.int16()
        return None if length == -1 else self._text(length)

    def blob(self) -> bytes:
        return self._take(self.int32())

    def nullable_blob(self) -> bytes | None:
        length = self.int32()
        return None if length == -1 else self._take(length)

    def array(self, each: Callable[[FieldReader], T]) -> list[T]:
        """Read a count, then each item: ``reader.array(FieldReader.int32)``.  Null is empty."""
        return self._items(max(0, self.int32()), each)

    # ---- compact ----

    def varint(self) -> int:
        """Read an unsigned varint, not zig-zag."""
        # Five bytes hold 32 bits: a longer varint is damage.
        number = 0
        for shift in range(0, 35, 7):
            byte = self._take(1)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
        raise InvalidRecordError(f"a length of more than five bytes at byte {self._at - 5}")

    def compact_string(self) -> str | None:
        length = self.varint()
        return None if length == 0 else self._text(length - 1)

    def compact_blob(self) -> bytes | None:
        length = self.varint()
        return None if length == 0 else self._take(length - 1)

    def compact_array(self, each: Callable[[FieldReader], T]) -> list[T] | None:
        count = self.varint()
        return None if count == 0 else self._items(count - 1, each)

    def tags(self) -> dict[int, bytes]:
        """Read the tagged fields; return their bytes by number."""
        found = {}
        for _ in range(self._bounded(self.varint())):
            number = self.varint()
            found[number] = self._take(self.varint())
        return found

    # ---- checks ----

    def _text(self, length: int) -> str:
        raw = self._take(length)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise InvalidRecordError(f"a string that is not UTF-8: {raw[:40]!r}") from error

    def _bounded(self, count: int) -> int:
        # Each item has at least one byte.  A greater count is damage, and would cost memory.
        if count > self.left:
            raise InvalidRecordError(f"an array of {count}, with {self.left} bytes left")
        return count

    def _items(self, count: int, each: Callable[[FieldReader], T]) -> list[T]:
        return [each(self) for _ in range(self._bounded(count))]
