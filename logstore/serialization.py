"""Serializers: turn objects into the bytes of a key or a value, and back.

A serializer is any callable from an object to bytes, a deserializer any callable from bytes to an
object: ``str.encode``, ``json.loads``, a method of a class.  None means no key, or a tombstone: it
is passed to neither and stays None.  Some serializers of Kafka have a name: "string", "integer"
(4 bytes), "long" (8 bytes), "double", "json".

If a call fails, SerializationError names the topic, partition and offset of the key or value; the
original error is its cause.  Nothing was sent, and no record that was read is lost.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from logstore.config import ConfigError
from logstore.errors import LogStoreError

__all__ = [
    "SERDES",
    "Deserializer",
    "SerializationError",
    "Serde",
    "Serializer",
    "deserializer",
    "serializer",
]

# A serializer may return None, which makes the record a tombstone or one without a key.
Serializer: TypeAlias = Callable[[Any], bytes | None]
Deserializer: TypeAlias = Callable[[bytes], Any]


class SerializationError(LogStoreError, ValueError):
    """A key or a value could not be serialized or deserialized.

    ``.part`` is "key" or "value"; ``.topic`` its topic; ``.partition`` and ``.offset`` are those of
    the record that was read, or -1.  ``.data`` is the object or the bytes.
    """

    def __init__(
        self,
        error: BaseException,
        *,
        part: str,
        topic: str,
        data: object,
        partition: int = -1,
        offset: int = -1,
    ) -> None:
        if offset >= 0:
            where, hint = f"{topic}-{partition} offset {offset}", f"; seek to {offset + 1} to skip"
        else:
            where, hint = topic, "; nothing was sent"
        super().__init__(
            f"the {part} of a record of {where} ({type(data).__name__}): "
            f"{type(error).__name__}: {error}{hint}"
        )
        self.part = part
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.data = data


class Serde(NamedTuple):
    """A serializer and its deserializer."""

    serialize: Callable[[Any], bytes]
    deserialize: Callable[[bytes], Any]


def _packed(layout: str, kind: str) -> Serde:
    """Return the Serde of one big-endian number, as in Kafka's serializers of the same name."""
    number = struct.Struct(layout)

    def decode(data: bytes) -> Any:
        if len(data) != number.size:
            raise ValueError(f"{kind} takes {number.size} bytes, not {len(data)}")
        return number.unpack(data)[0]

    return Serde(number.pack, decode)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


SERDES: Mapping[str, Serde] = {
    "bytes": Serde(bytes, bytes),
    "string": Serde(str.encode, bytes.decode),
    "integer": _packed(">i", "integer"),
    "long": _packed(">q", "long"),
    "double": _packed(">d", "double"),
    "json": Serde(_json, json.loads),
}


def serializer(given: str | Serializer | None) -> Serializer | None:
    """Return the serializer: `given` itself if it is a callable, or that of its name in SERDES.

    >>> serializer("json")({"a": 1})
    b'{"a":1}'
    """
    if given is None or callable(given):
        return given
    return _named(given).serialize


def deserializer(given: str | Deserializer | None) -> Deserializer | None:
    """Return the deserializer: `given` itself if it is a callable, or that of its name in SERDES.

    >>> deserializer("integer")(b"\\x00\\x00\\x00\\x07")
    7
    """
    if given is None or callable(given):
        return given
    return _named(given).deserialize


def _named(name: object) -> Serde:
    if isinstance(name, str) and name in SERDES:
        return SERDES[name]
    raise ConfigError(
        f"no serializer {name!r}: pass a callable, or one of {', '.join(map(repr, SERDES))}"
    )
