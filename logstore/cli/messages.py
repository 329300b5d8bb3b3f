"""Convert records to text and back: lossless JSON lines, kcat's format strings, readable lines.

In JSON a key, a value or a header's value is null, a string if its bytes are UTF-8, or
``{"base64": "..."}`` if they are not.  Reading this JSON back gives the same bytes.  Any other JSON
value is stored as its JSON text, for input typed by hand: ``{"value": {"id": 1}}``.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from logstore.cli.text import bytes_text, json_text, printable
from logstore.errors import InvalidRecordError
from logstore.record import Record
from logstore.times import parse_time, time_text

__all__ = ["DECODERS", "Message", "formatter", "message_of", "record_to_json", "shown"]

DECODERS = ("auto", "utf8", "json", "hex", "base64")
FIELDS = {"topic", "partition", "offset", "timestamp", "key", "value", "headers"}


# ---- bytes as JSON ----


def field_of(data: bytes | None) -> Any:
    """Return bytes as a JSON value, without loss."""
    if data is None:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def bytes_of(field: Any, what: str) -> bytes | None:
    """Return the bytes of a JSON value: the reverse of `field_of`.  Other JSON becomes its text."""
    if field is None:
        return None
    if isinstance(field, str):
        return field.encode("utf-8", "surrogatepass")
    if isinstance(field, dict) and field.keys() == {"base64"} and isinstance(field["base64"], str):
        try:
            return base64.b64decode(field["base64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRecordError(f"{what} is not base64: {error}") from None
    return json.dumps(field, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def decoded(data: bytes | None, how: str) -> Any:
    """Return bytes as a JSON value by a decoder; bytes it cannot decode as `field_of` does."""
    if data is None:
        return None
    if how == "hex":
        return data.hex()
    if how == "base64":
        return base64.b64encode(data).decode("ascii")
    if how == "utf8":
        return data.decode("utf-8", "replace")
    if how == "json":
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            return field_of(data)
    return field_of(data)


def shown(data: bytes | None, how: str) -> str:
    """Return bytes as one line of readable text."""
    if data is None or how == "auto":
        return bytes_text(data)
    value = decoded(data, how)
    return printable(value) if isinstance(value, str) else json_text(value)


# ---- records as JSON ----


def _header_name(name: str) -> Any:
    raw = name.encode("utf-8", "surrogateescape")
    return field_of(raw)


def record_to_json(record: Record, *, key: str = "auto", value: str = "auto") -> dict[str, Any]:
    """Return a record as a JSON object.  With both decoders at "auto" nothing is lost."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": decoded(record.key, key),
        "value": decoded(record.value, value),
        "headers": [[_header_name(name), field_of(data)] for name, data in record.headers],
    }


class Message(NamedTuple):
    """A record to append, and its partition if the input names one."""

    record: Record
    partition: int | None


def message_of(line: bytes | str) -> Message:
    """Return the record of one JSON line.  Raises InvalidRecordError if it is not a record."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRecordError(f"this is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRecordError(f"a record must be a JSON object, not {type(found).__name__}")
    if "value" not in found:
        raise InvalidRecordError('there is no "value"; use null for a tombstone')
    unknown = sorted(found.keys() - FIELDS)
    if unknown:
        raise InvalidRecordError(
            f"unknown {', '.join(map(repr, unknown))}; known are {', '.join(sorted(FIELDS))}"
        )
    partition = found.get("partition")
    if partition is not None and (not isinstance(partition, int) or isinstance(partition, bool)):
        raise InvalidRecordError(f"partition must be a number, not {partition!r}")
    record = Record(
        bytes_of(found["value"], "value"),
        key=bytes_of(found.get("key"), "key"),
        headers=_headers(found.get("headers")),
        timestamp=_timestamp(found.get("timestamp")),
    )
    return Message(record, partition)


def _timestamp(given: Any) -> int | None:
    if given is None or (isinstance(given, int) and not isinstance(given, bool)):
        return given
    if isinstance(given, str):
        try:
            return parse_time(given)
        except ValueError as error:
            raise InvalidRecordError(f"timestamp: {error}") from None
    raise InvalidRecordError(f"timestamp must be milliseconds or a time, not {given!r}")


def _headers(given: Any) -> list[tuple[str, bytes | None]]:
    pairs: list[Any] = []
    if isinstance(given, dict):
        pairs = [list(pair) for pair in given.items()]
    elif isinstance(given, list):
        pairs = given
    elif given is not None:
        raise InvalidRecordError("headers must be a list of [name, value], or an object")
    headers = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidRecordError(f"a header is [name, value], not {json_text(pair)[:80]}")
        name = bytes_of(pair[0], "a header's name")
        if name is None:
            raise InvalidRecordError("a header's name is null")
        headers.append((name.decode("utf-8", "surrogateescape"), bytes_of(pair[1], "a header")))
    return headers


# ---- lines to read ----


def line_of(record: Record, *, key: str, value: str) -> str:
    """Return a record as one line for a terminal."""
    when = time_text(record.timestamp) if record.timestamp >= 0 else "-"
    place = f"{record.partition}:{record.offset}"
    headers = "".join(f" {printable(name)}={shown(data, 'auto')}" for name, data in record.headers)
    return f"{place:<10} {when:<24} {shown(record.key, key)}\t{shown(record.value, value)}{headers}"


# ---- kcat's format strings ----

_PART = re.compile(rb"%(.)|\\(x[0-9a-fA-F]{2}|.)|[^%\\]+|.", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"0": b"\0", b"\\": b"\\"}

Piece = Callable[[Record], bytes]


def _size(data: bytes | None) -> int:
    return -1 if data is None else len(data)


def _flat_headers(record: Record) -> bytes:
    return b",".join(
        name.encode("utf-8", "surrogateescape") + b"=" + (b"NULL" if data is None else data)
        for name, data in record.headers
    )


_TOKENS: dict[bytes, Piece] = {
    b"s": lambda r: r.value or b"",
    b"S": lambda r: b"%d" % _size(r.value),
    b"R": lambda r: struct.pack(">i", _size(r.value)),
    b"k": lambda r: r.key or b"",
    b"K": lambda r: b"%d" % _size(r.key),
    b"t": lambda r: (r.topic or "").encode(),
    b"p": lambda r: b"%d" % (r.partition or 0),
    b"o": lambda r: b"%d" % r.offset,
    b"T": lambda r: b"%d" % r.timestamp,
    b"h": _flat_headers,
    b"%": lambda r: b"%",
}


def formatter(text: str, *, safe: bool = False) -> Piece:
    r"""Return a function that formats a record by kcat's format string: ``%t %p %o %k %s\n``.

    ``%s`` value, ``%S`` its size, ``%R`` its size as four bytes, ``%k`` key, ``%K`` its size,
    ``%T`` timestamp, ``%t`` topic, ``%p`` partition, ``%o`` offset, ``%h`` headers, ``%%``;
    ``\n``, ``\r``, ``\t``, ``\\``, ``\xNN``.  `safe` escapes control characters in
    the data, for a terminal.
    """
    pieces: list[Piece] = []
    for match in _PART.finditer(text.encode("utf-8", "surrogateescape")):
        token, escape = match[1], match[2]
        if token is not None:
            if token not in _TOKENS:
                known = " ".join(f"%{name.decode()}" for name in _TOKENS)
                raise ValueError(f"unknown {match[0].decode()!r} in the format; known are {known}")
            pieces.append(_safe(_TOKENS[token]) if safe and token in b"skhR" else _TOKENS[token])
        else:
            literal = match[0]
            if escape is not None:
                literal = (
                    bytes([int(escape[1:], 16)])
                    if len(escape) > 1
                    else _ESCAPES.get(escape, literal)
                )
            pieces.append(_constant(literal))
    return _joined(pieces)


def _safe(piece: Piece) -> Piece:
    return lambda record: bytes_text(piece(record)).encode()


def _constant(literal: bytes) -> Piece:
    return lambda record: literal


def _joined(pieces: Sequence[Piece]) -> Piece:
    return lambda record: b"".join([piece(record) for piece in pieces])
