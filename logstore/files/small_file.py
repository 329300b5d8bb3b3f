"""Small files with a checksum: framed once, or twice so that one copy survives a torn write."""

from __future__ import annotations

from logstore import _native

__all__ = ["either_copy", "twice", "with_checksum", "without_checksum"]


# What a decoder of JSON may raise when the bytes are not what was written: a value of another kind,
# one that is missing, a number or a nesting that Python refuses.
MISREAD = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)


def with_checksum(body: bytes) -> bytes:
    """The contents of a small file that tells when it is not what was written."""
    return b"%08x %b\n" % (_native.crc32c(body), body)


def without_checksum(content: bytes) -> bytes:
    """What `with_checksum` was given; ValueError when it is that no more."""
    checksum, _, body = content.rstrip(b"\n").partition(b" ")
    if int(checksum, 16) != _native.crc32c(body):
        raise ValueError("the checksum is wrong")
    return body


def twice(body: bytes) -> bytes:
    """The contents of a file that stays readable when a byte of it is damaged: two copies."""
    return b"%08x\n%b" % (_native.crc32c(body), body) * 2


def either_copy(content: bytes) -> bytes | None:
    """What `twice` was given, from whichever copy is sound; also from one that stands alone."""
    half = len(content) // 2
    for copy in (content[:half], content[half:], content):
        checksum, _, body = copy.partition(b"\n")
        if checksum == b"%08x" % _native.crc32c(body):
            return body
    return None
