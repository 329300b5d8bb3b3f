"""Slice: whole batches of one .log file, by position and size; the bytes are read later.

A Slice refers to the open file.  So its bytes stay readable after the segment is released or
deleted, until the log is closed.  A truncation below the end of a slice makes the file shorter:
then `read` raises EOFError.
"""

from __future__ import annotations

from logstore import _native

__all__ = ["NotCachedError", "Slice"]


class NotCachedError(BlockingIOError):
    """The bytes are not in the page cache: a read has to wait for the disk."""


class Slice:
    """`size_bytes` bytes from `position` of a file: batches up to `end_offset`, exclusive."""

    __slots__ = ("_file", "end_offset", "position", "size_bytes")

    def __init__(self, file: _native.File, position: int, size_bytes: int, end_offset: int) -> None:
        self._file = file
        self.position = position
        self.size_bytes = size_bytes
        self.end_offset = end_offset

    def __repr__(self) -> str:
        return f"<Slice {self._file.path!r} {self.size_bytes} bytes at {self.position}>"

    def read(self, at: int, size: int, *, wait: bool) -> bytes:
        """Return `size` bytes from `at` on, counted from the start of the slice.

        Raise NotCachedError if ``wait=False`` and the disk has to be read, EOFError if the file has
        become shorter, ClosedError if the log was closed.
        """
        if not 0 <= at <= at + size <= self.size_bytes:
            raise ValueError(f"{size} bytes at {at} are not in a slice of {self.size_bytes} bytes")
        position = self.position + at
        if wait:
            read = self._file.pread(size, position)
            if len(read) < size:
                raise EOFError(f"{self._file.path} was truncated below {position + size} bytes")
            return read
        cached = self._file.pread_cached(size, position)
        if cached is None:
            raise NotCachedError
        return cached
