"""Small files with a CRC-32C: one copy, or two so that damage of one copy loses nothing.

with_checksum:  checksum in 8 hex digits, space, body, newline
twice:          (checksum in 8 hex digits, newline, body), two times
"""

from __future__ import annotations

from logstore import _native

__all__ = ["either_copy", "twice", "with_checksum", "without_checksum"]


# What decoding JSON may raise if the bytes are damaged: a value has another type or is missing, or
# Python refuses a number or the depth of the nesting.
MISREAD = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)


def with_checksum(body: bytes) -> bytes:
    """Return the contents of a file that holds `body` and its checksum."""
    return b"%08x %b\n" % (_native.crc32c(body), body)


def without_checksum(content: bytes) -> bytes:
    """Return the body that `with_checksum` framed; raise ValueError if it is damaged."""
    checksum, _, body = content.rstrip(b"\n").partition(b" ")
    if int(checksum, 16) != _native.crc32c(body):
        raise ValueError("the checksum is wrong")
    return body


def twice(body: bytes) -> bytes:
    """Return two copies of `body` with checksums: the file is readable if either is undamaged."""
    return b"%08x\n%b" % (_native.crc32c(body), body) * 2


def either_copy(content: bytes) -> bytes | None:
    """Return the body that `twice` framed, from the first valid copy, or None if none is.

    A file of one copy is valid, too.
    """
    half = len(content) // 2
    for copy in (content[:half], content[half:], content):
        checksum, _, body = copy.partition(b"\n")
        if checksum == b"%08x" % _native.crc32c(body):
            return body
    return None
