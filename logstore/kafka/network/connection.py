"""Connection: one socket of a peer.  Frames in, answers out, in order.

A connection works on one request at a time.  It reads at most what its buffer holds beyond that
request, and then stops reading: that is the back-pressure.  Produce requests are the exception: the
next one may begin when the bytes of the one before are in the log, while its answer waits for the
disk; at most PIPELINE_MAX answers are outstanding.  Answers leave in the order of the requests.

The connection knows no API but Produce and Fetch, by their keys.  It runs in the thread of the
event loop only.

Buffers: at rest a connection has REST_BYTES of its own.  A larger frame gets a buffer of the
server's Memory, which grows with the bytes that arrive, never by the size that a peer claims.  The
buffer is returned when the request is answered: until then handlers may hold views of it.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from logstore.errors import ClosedError
from logstore.kafka.network.memory import Memory
from logstore.kafka.network.outgoing import (
    CHUNK_BYTES,
    FileSlice,
    NotCachedError,
    Outgoing,
    Pieces,
)
from logstore.kafka.protocol.frames import HEADER_BYTES_MIN, SIZE_BYTES

__all__ = ["Connection", "ConnectionLimits", "ConnectionOwner", "Slot"]

REST_BYTES = 4096
GROWTH_BYTES = 1 << 20  # a buffer starts with at most this, and doubles
PIPELINE_MAX = 6
PRODUCE, FETCH = 0, 1
WRITE_BUFFER_BYTES = CHUNK_BYTES
# If the peers of a server leave more than this unread, each further answer is sent in small chunks.
UNSENT_BYTES_MAX = 64 << 20
SMALL_BYTES = 64 << 10
SEND_SECONDS = 60.0  # a peer that takes no byte for this long is closed
# Protocols by the first bytes that their clients send.
FOREIGN = {
    **dict.fromkeys((b"GET ", b"POST", b"HEAD", b"PUT ", b"DELE", b"OPTI", b"CONN"), "HTTP"),
    b"SSH-": "SSH",
}

_START = struct.Struct(">ih")  # the size of a frame, and the key of its API


def _foreign(start: bytes) -> str:
    """Return the protocol of a frame that is no frame, for the log."""
    name = "TLS" if start[:2] == b"\x16\x03" else FOREIGN.get(start, "")
    return f" (the client sends {name})" if name else ""


class Slot:
    """The place of one answer among those of its connection."""

    __slots__ = ("cancel", "pieces", "resting")

    def __init__(self) -> None:
        self.resting = False  # a request that the end of the connection does not harm
        self.pieces: Pieces | None = None
        self.cancel: Callable[[], object] | None = None  # called when the connection is lost


class ConnectionLimits(Protocol):
    """The settings that a connection obeys."""

    @property
    def socket_request_max_bytes(self) -> int: ...
    @property
    def logstore_control_request_max_bytes(self) -> int: ...
    @property
    def logstore_request_read_timeout_ms(self) -> int: ...
    @property
    def connections_max_idle_ms(self) -> int: ...


class ConnectionOwner(Protocol):
    """What a connection needs of its server."""

    memory: Memory
    unsent_bytes: int  # in the buffers of connections whose peers do not read

    @property
    def limits(self) -> ConnectionLimits: ...
    def connected(self, connection: Connection) -> None: ...
    def disconnected(self, connection: Connection, reason: str) -> None: ...
    def answer_now(
        self, connection: Connection, key: int, buffer: bytearray, at: int, size: int
    ) -> Pieces | None:
        """Carry out a Produce or Fetch request if that is quick, and return its answer.

        None if it is not: nothing is done then, and `begin` is called.  No view of the buffer is
        left.
        """

    def begin(self, connection: Connection, slot: Slot, frame: memoryview) -> None:
        """Work on a request.  Call `answer` and `release`, now or later."""

    def load(self, outgoing: Outgoing, done: Callable[[BaseException | None], object]) -> None:
        """Call ``outgoing.load()`` in another thread, then `done` in the loop's."""


class Connection(asyncio.BufferedProtocol):
    """A peer's connection."""

    def __init__(self, owner: ConnectionOwner, listener: str, now: Callable[[], float]) -> None:
        self.listener = listener
        self.local: tuple[str, int] = ("", 0)
        self.peer: tuple[str, int] = ("", 0)
        self.software = ""  # name and version, once the client has sent them
        self.client_id = ""
        self.requests = 0
        self._owner = owner
        self._now = now
        limits = owner.limits
        self._produce_max_bytes = limits.socket_request_max_bytes
        self._other_max_bytes = min(
            limits.socket_request_max_bytes, limits.logstore_control_request_max_bytes
        )
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(REST_BYTES)
        self._charged = False  # whether the buffer belongs to the Memory
        self._start = self._filled = 0
        # The size of the frame at `_start` if a part of it is missing, else 0.  Not a place in the
        # buffer: the bytes may be moved to another one before the frame is whole.
        self._frame_bytes = 0
        self._busy = False  # a request uses the buffer
        self._producing = False  # the last request that began is a Produce
        self._ended = False  # the peer sends no more
        self._working = False  # in `_work`
        self._wanting_since: float | None = None  # waits for memory
        self._paused = False  # does not read
        self._slots: deque[Slot] = deque()
        # In `_work` only: answers that are sent before those of the slots.
        self._ready: list[bytes] = []
        self._outgoing: Outgoing | None = None
        self._blocked = False  # the peer does not read
        self._unsent_bytes = 0  # while it is blocked: what it has in the owner's number
        self._high_bytes = WRITE_BUFFER_BYTES
        self._loading = False  # a chunk is being read from the disk
        self._reason = "peer"
        self._finishing = False  # no further request begins
        self.closed = False
        self.received = self.sent = 0  # bytes
        self.used_at = now()
        self._frame_began: float | None = None
        self._blocked_since: float | None = None
        self._closing_since: float | None = None

    def __repr__(self) -> str:
        return f"<Connection of {self.peer[0]}:{self.peer[1]} client {self.client_id!r}>"

    # ---- asyncio's calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        local, peer = (transport.get_extra_info(name) for name in ("sockname", "peername"))
        if local and peer:
            self.local, self.peer = (local[0], local[1]), (peer[0], peer[1])
        self._owner.connected(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._wanting_since is not None:
            self._owner.memory.withdraw(self._enlarge)
        for slot in self._slots:
            if slot.cancel is not None:
                slot.cancel()
        self._slots.clear()
        self._outgoing = None
        self._count_unsent(0)
        if not self._busy:
            self._give_back()
        self._owner.disconnected(self, self._reason)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        self.received += nbytes
        full = self._filled == len(self._buffer)
        if not self._busy and (full or self._filled - self._start >= self._frame_bytes):
            self._work()
            full = self._filled == len(self._buffer)
        if full:
            self._pause()

    def eof_received(self) -> bool:
        """The peer sends no more.  Append what it has produced; then close.

        A client with acks=0 closes its socket as soon as it has sent its records.
        """
        self._ended = True
        return self._producing and not self.quiet  # if False, asyncio closes the socket

    def pause_writing(self) -> None:
        self._blocked = True
        self._blocked_since = self._now()
        if self._transport is not None:
            self._count_unsent(self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._blocked = False
        self._blocked_since = None
        self._count_unsent(0)
        self._go_on()

    def _count_unsent(self, size: int) -> None:
        self._owner.unsent_bytes += size - self._unsent_bytes
        self._unsent_bytes = size

    # ---- requests ----

    def _work(self) -> None:
        """Begin the requests that are whole, as far as they may begin.

        Answers that are ready meanwhile are sent together: a send costs more than a small request.
        """
        if self._working:
            return
        self._working = True
        try:
            while True:
                while not self._busy and not self.closed and self._begin_next():
                    pass
                if self._ready:
                    self._send_ready()
                if not self._slots or self._slots[0].pieces is None or not self._may_send:
                    break
                self._send()
        finally:
            self._working = False
        if self._paused and not self._busy and not self.closed and self._wanting_since is None:
            self._resume()

    def _send_ready(self) -> None:
        ready = self._ready
        answers = ready[0] if len(ready) == 1 else b"".join(ready)
        ready.clear()
        assert self._transport is not None
        self.sent += len(answers)
        self._transport.write(answers)

    def _begin_next(self) -> bool:
        """Begin the next request; False if it is not whole or has to wait."""
        if self._finishing:
            return False
        start = self._start
        have = self._filled - start
        if have < _START.size:
            if not have and not self._charged:
                self._start = self._filled = 0
                return False
            if have and self._frame_began is None:
                self._frame_began = self._now()
            self._make_space(_START.size)
            return False
        size, key = _START.unpack_from(self._buffer, start)
        limit = self._produce_max_bytes if key == PRODUCE else self._other_max_bytes
        if not HEADER_BYTES_MIN <= size <= limit:
            first = bytes(self._buffer[start : start + SIZE_BYTES])
            self.close("size", f"a frame of {size} bytes; the limit is {limit}{_foreign(first)}")
            return False
        whole = SIZE_BYTES + size
        if have < whole:
            if self._frame_began is None:
                self._frame_began = self._now()
            self._make_space(whole)
            self._frame_bytes = whole
            return False
        if self._ended and key != PRODUCE:
            return False
        unsent = len(self._slots) + (self._outgoing is not None)
        if unsent and (key != PRODUCE or unsent >= PIPELINE_MAX):
            return False  # `_go_on` comes back here when an answer is sent
        self._frame_began = None
        self._frame_bytes = 0
        self.used_at = self._now()
        self.requests += 1
        at = start + SIZE_BYTES
        self._start = start + whole
        self._producing = key == PRODUCE
        slot = Slot()
        if key in (PRODUCE, FETCH) and not unsent and self._may_send:
            pieces = self._owner.answer_now(self, key, self._buffer, at, size)
            if pieces is not None:
                if len(pieces) == 1 and isinstance(pieces[0], bytes):
                    self._ready.append(pieces[0])
                else:
                    slot.pieces = pieces
                    self._slots.append(slot)
                return True
        self._slots.append(slot)
        self._busy = True
        self._owner.begin(self, slot, memoryview(self._buffer)[at : at + size])
        return True

    def release(self) -> None:
        """The bytes of the request are not needed any more: the next one may begin."""
        self._busy = False
        if self.closed:
            self._give_back()
        else:
            self._work()
            self._close_if_ended()

    def decoded(self) -> None:
        """No view of the request's bytes is left: return a large buffer while the request waits.

        Otherwise a few large requests that wait for records would hold the memory of all others.
        """
        ahead = self._filled - self._start
        if self._charged and ahead <= REST_BYTES:
            self._to_rest(ahead)

    # ---- the buffer ----

    def _to_rest(self, have: int) -> None:
        """Move what is not begun to a small buffer of the connection's own."""
        rest = bytearray(REST_BYTES)
        rest[:have] = memoryview(self._buffer)[self._start : self._filled]
        self._replace(rest, charged=False)
        self._start, self._filled = 0, have

    def _make_space(self, whole: int) -> None:
        """Have the buffer take the rest of a frame of `whole` bytes."""
        if self._wanting_since is not None:
            return  # `_enlarge` will be called; an answer that was sent has led here again
        have = self._filled - self._start
        if self._start and whole <= REST_BYTES:
            if self._charged:
                self._to_rest(have)
            else:
                self._buffer[:have] = self._buffer[self._start : self._filled]
                self._start, self._filled = 0, have
        elif whole > len(self._buffer) - self._start and (
            self._start or self._filled == len(self._buffer)
        ):
            if self._start and whole <= len(self._buffer):
                view = memoryview(self._buffer)
                view[:have] = view[self._start : self._filled]  # a memmove
                self._start, self._filled = 0, have
                return
            wanted = min(whole, max(GROWTH_BYTES, 2 * have))
            self._wanting_since = self._now()
            held = len(self._buffer) if self._charged else 0
            buffer = self._owner.memory.take(wanted, self._enlarge, held_bytes=held)
            if buffer is not None:
                self._enlarge(buffer)
            elif self._wanting_since is not None:
                self._pause()

    def _enlarge(self, buffer: bytearray) -> None:
        """Go on with a larger buffer.  The time that the connection waited is not the peer's."""
        if self._frame_began is not None and self._wanting_since is not None:
            self._frame_began += self._now() - self._wanting_since
        self._wanting_since = None
        self._copy_to(buffer)
        self._resume()

    def _copy_to(self, buffer: bytearray) -> None:
        have = self._filled - self._start
        buffer[:have] = memoryview(self._buffer)[self._start : self._filled]
        self._replace(buffer, charged=True)
        self._start, self._filled = 0, have

    def _replace(self, buffer: bytearray, *, charged: bool) -> None:
        before, was_charged = self._buffer, self._charged
        self._buffer, self._charged = buffer, charged
        if was_charged:
            self._owner.memory.give_back(before)

    def _give_back(self) -> None:
        if self._charged:
            self._replace(bytearray(), charged=False)

    def _pause(self) -> None:
        if not self._paused and self._transport is not None and not self.closed:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._finishing or self._ended:
            return
        if self._filled == len(self._buffer):
            return  # the next request is whole, and waits for the answers before it
        if self._paused and self._transport is not None and not self.closed:
            self._paused = False
            self._transport.resume_reading()

    # ---- answers ----

    def answer(self, slot: Slot, pieces: Pieces) -> None:
        """Send an answer when those before it are sent.  No pieces: there is none to send."""
        slot.pieces = pieces
        if not self.closed and not self._working:  # else `_work` sends it
            self._go_on()

    @property
    def _may_send(self) -> bool:
        return not self._blocked and not self._loading and not self.closed

    def _send(self) -> None:
        while self._may_send:
            if self._outgoing is None:
                ready: list[bytes | bytearray | FileSlice] = []
                while self._slots and (pieces := self._slots[0].pieces) is not None:
                    ready += pieces
                    self._slots.popleft()
                if not ready:
                    return
                self._outgoing = Outgoing(ready)
            self._bound_chunks(self._outgoing)
            try:
                chunk = self._outgoing.chunk()
            except (NotCachedError, EOFError, OSError, ClosedError):
                # What cannot be read at all is left to `_loaded`, too: asyncio calls `_send` in
                # places where a transport must not be closed.
                self._loading = True
                self._owner.load(self._outgoing, self._loaded)
                return
            if chunk is None:
                self._outgoing = None
                continue
            assert self._transport is not None
            self.sent += len(chunk)
            self._transport.write(chunk)

    def _bound_chunks(self, outgoing: Outgoing) -> None:
        """Take small chunks of files while many peers do not read: each holds one chunk, or two."""
        many = self._owner.unsent_bytes > UNSENT_BYTES_MAX
        outgoing.chunk_bytes = high = SMALL_BYTES if many else CHUNK_BYTES
        if high != self._high_bytes:
            assert self._transport is not None
            self._high_bytes = high
            self._transport.set_write_buffer_limits(high=high)

    def _loaded(self, error: BaseException | None) -> None:
        self._loading = False
        if self.closed:
            return
        if error is not None:
            self.close("error", f"records cannot be read: {error}")
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Send what can be sent; then begin the next request, if it waited for that."""
        self._send()
        if not self._busy and not self.closed:
            self._work()
            self._close_if_ended()

    def _close_if_ended(self) -> None:
        if self._ended and self.quiet:
            self.close("peer")

    # ---- ending ----

    def close(self, reason: str, detail: str = "") -> None:
        """Close the socket after what is being sent.  `reason` is a word for the metrics."""
        if self.closed or self._transport is None or self._transport.is_closing():
            return
        if self._ready:
            self._send_ready()
        self._reason = reason
        self.detail = detail
        self._finishing = True
        self._closing_since = self._now()
        self._transport.close()

    detail = ""

    @property
    def made(self) -> bool:
        """Whether asyncio has made the connection of the socket."""
        return self._transport is not None

    @property
    def quiet(self) -> bool:
        """Whether no request is under way and all answers are sent."""
        return not (self._busy or self._slots or self._outgoing)

    def finish(self) -> None:
        """Begin no further request: the server drains."""
        self._finishing = True
        self._pause()

    @property
    def finished(self) -> bool:
        """Whether the server may close the connection: no client loses an answer by it.

        A join or a sync that waits for other members is no reason to wait: its member stays.
        """
        if self._outgoing is not None:
            return False
        return all(slot.resting for slot in self._slots) if self._slots else not self._busy

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 if it is closed."""
        found = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if found is None else int(found.fileno())

    def abort(self, reason: str) -> None:
        """Close the socket at once."""
        if not self.closed and self._transport is not None:
            self._reason = reason
            self._finishing = True
            self._transport.abort()

    def check_time(self, now: float) -> None:
        """Close the connection if it is idle, or its peer too slow."""
        limits = self._owner.limits
        if self._blocked_since is not None and now - self._blocked_since > SEND_SECONDS:
            self.abort("slow")
        elif self._closing_since is not None:
            if now - self._closing_since > SEND_SECONDS:
                self.abort(self._reason)
        elif self._frame_began is not None and self._wanting_since is None:
            if (now - self._frame_began) * 1000 > limits.logstore_request_read_timeout_ms:
                self.close("slow", "a request was not whole in time")
        elif self.quiet and (now - self.used_at) * 1000 > limits.connections_max_idle_ms:
            self.close("idle")
