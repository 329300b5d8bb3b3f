"""Frame: the envelope of a request and of a response.

    request:   size i32 | api key i16 | api version i16 | correlation id i32 | client id | [tags]
    response:  size i32 | correlation id i32 | [tags]

The client id is a nullable string with a length of two bytes, in every version.  Tagged fields
follow it when the version of the API is flexible.  The response of ApiVersions never has them: a
client that asks does not know our versions yet.
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

from logstore.kafka.protocol.codec import MalformedFrameError, read_uvarint
from logstore.kafka.protocol.schema import message

__all__ = ["API_VERSIONS", "SIZE_BYTES", "RequestHeader", "read_header", "response_head"]

SIZE_BYTES = 4
HEADER_BYTES_MIN = 10
API_VERSIONS = 18

_FIXED = struct.Struct(">hhih")
_HEAD = struct.Struct(">ii")


class RequestHeader(NamedTuple):
    """What precedes the body of a request."""

    key: int
    version: int
    correlation_id: int
    client_id: str


def read_header(frame: memoryview) -> tuple[RequestHeader, int]:
    """Return the header of a frame and the position of the body.

    The position is that of a version that is not flexible; call `skip_tags` for one that is.
    """
    key, version, correlation_id, length = _FIXED.unpack_from(frame, 0)
    at = _FIXED.size
    client_id = ""
    if length > 0:
        if length > len(frame) - at:
            raise MalformedFrameError("the client id is cut off")
        client_id = str(frame[at : at + length], "utf-8")
        at += length
    return RequestHeader(key, version, correlation_id, client_id), at


def skip_tags(frame: memoryview, at: int) -> int:
    """Return the position after the tagged fields of a header; none of them is known."""
    count, at = read_uvarint(frame, at)
    if not count:
        return at
    last = -1
    for _ in range(count):
        tag, at = read_uvarint(frame, at)
        size, at = read_uvarint(frame, at)
        at += size
        if at > len(frame) or tag <= last:
            raise MalformedFrameError("bad tagged field in the header")
        last = tag
    return at


@functools.cache
def is_flexible(key: int, version: int) -> bool:
    """Whether requests and responses of this version have tagged fields."""
    return version in message(key, "request").flexible


def response_head(size: int, correlation_id: int, *, tagged: bool) -> bytes:
    """Return the first bytes of a response whose body has `size` bytes."""
    if tagged:
        return _HEAD.pack(size + 5, correlation_id) + b"\0"
    return _HEAD.pack(size + 4, correlation_id)
