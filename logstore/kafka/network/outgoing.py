"""Outgoing: one response on its way to a peer.

A response is bytes and holes: records in a file, which are read when they can be sent.  The size of
every hole is known before the first byte is sent, so the frame's length is right even if retention
deletes the segment meanwhile.  At most `chunk_bytes` of a hole are in memory at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from logstore.log.segment_slice import NotCachedError

__all__ = ["CHUNK_BYTES", "FileSlice", "NotCachedError", "Outgoing", "Pieces"]

CHUNK_BYTES = 1 << 20
JOINED_BYTES = 64 << 10  # a response up to this size is sent with one call


class FileSlice(Protocol):
    """Bytes of a file that stay readable while the object lives."""

    size_bytes: int

    def read(self, at: int, size: int, *, wait: bool) -> bytes:
        """Return `size` bytes from `at` on, counted from the start of the slice.

        Raise NotCachedError if ``wait=False`` and the disk would have to be read, EOFError if the
        file has become shorter.
        """


Pieces: TypeAlias = "Sequence[bytes | bytearray | FileSlice]"


class Outgoing:
    """The pieces of a response that are not sent yet."""

    __slots__ = ("_at", "_pieces", "_ready", "chunk_bytes")

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = deque(pieces)
        self._at = 0  # of the first piece, if it is a slice
        self._ready: bytes | None = None  # read ahead by `load`
        self.chunk_bytes = CHUNK_BYTES

    def chunk(self) -> bytes | bytearray | None:
        """Return the next bytes to send; None when all are.

        Raise NotCachedError if the disk would have to be read: call `load` in another thread then.
        """
        return self._next(wait=False)

    def load(self) -> None:
        """Read the next chunk from the disk."""
        self._ready = bytes(self._next(wait=True) or b"")

    def _next(self, *, wait: bool) -> bytes | bytearray | None:
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        if not self._pieces:
            return None
        piece = self._pieces[0]
        if isinstance(piece, bytes | bytearray):
            self._pieces.popleft()
            return self._joined(piece)
        size = min(self.chunk_bytes, piece.size_bytes - self._at)
        read = piece.read(self._at, size, wait=wait)
        self._at += size
        if self._at >= piece.size_bytes:
            self._pieces.popleft()
            self._at = 0
        return read

    def _joined(self, piece: bytes | bytearray) -> bytes | bytearray:
        """Return the bytes with the bytes and small slices that follow them."""
        if not self._pieces or len(piece) > JOINED_BYTES:
            return piece
        joined, size = [piece], len(piece)
        while self._pieces:
            following = self._pieces[0]
            if isinstance(following, bytes | bytearray):
                size += len(following)
            else:
                size += following.size_bytes
            if size > JOINED_BYTES:
                break
            if not isinstance(following, bytes | bytearray):
                try:
                    following = following.read(0, following.size_bytes, wait=False)
                except NotCachedError:
                    break
            joined.append(following)
            self._pieces.popleft()
        return b"".join(joined)
