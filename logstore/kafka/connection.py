"""Connection: one socket of a peer.  Frames in, answers out, in order.

A connection works on one request at a time.  It reads at most what its buffer holds beyond that
request, and then stops reading: that is the back-pressure.  Produce requests are the exception: the
next one may begin when the bytes of the one before are in the log, while its answer waits for the
disk; at most PIPELINE_MAX answers are outstanding.  Answers leave in the order of the requests.

The connection knows no API but Produce, by its key.  It runs in the thread of the event loop only.

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

from logstore.kafka.frames import HEADER_BYTES_MIN, SIZE_BYTES
from logstore.kafka.memory import Memory
from logstore.kafka.outgoing import NotCachedError, Outgoing, Pieces

__all__ = ["Connection", "ConnectionLimits", "ConnectionOwner", "Slot"]

REST_BYTES = 4096
GROWTH_BYTES = 1 << 20  # a buffer starts with at most this, and doubles
PIPELINE_MAX = 6
PRODUCE = 0
WRITE_BUFFER_BYTES = 1 << 20
SEND_SECONDS = 60.0  # a peer that takes no byte for this long is closed
# Protocols by the first bytes that their clients send.
FOREIGN = {
    **dict.fromkeys((b"GET ", b"POST", b"HEAD", b"PUT ", b"DELE", b"OPTI", b"CONN"), "HTTP"),
    b"SSH-": "SSH",
}

_SIZE = struct.Struct(">i")
_KEY = struct.Struct(">h")


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

    @property
    def limits(self) -> ConnectionLimits: ...
    def connected(self, connection: Connection) -> None: ...
    def disconnected(self, connection: Connection, reason: str) -> None: ...
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
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(REST_BYTES)
        self._charged = False  # whether the buffer belongs to the Memory
        self._start = self._filled = 0
        self._busy = False  # a request uses the buffer
        self._producing = False  # the last request that began is a Produce
        self._ended = False  # the peer sends no more
        self._working = False  # in `_work`
        self._wanting = False  # waits for memory
        self._paused = False  # does not read
        self._slots: deque[Slot] = deque()
        self._outgoing: Outgoing | None = None
        self._blocked = False  # the peer does not read
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
        if self._wanting:
            self._owner.memory.withdraw(self._enlarge)
        for slot in self._slots:
            if slot.cancel is not None:
                slot.cancel()
        self._slots.clear()
        self._outgoing = None
        if not self._busy:
            self._give_back()
        self._owner.disconnected(self, self._reason)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        self.received += nbytes
        if not self._busy:
            self._work()
        if self._filled == len(self._buffer):
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

    def resume_writing(self) -> None:
        self._blocked = False
        self._blocked_since = None
        self._go_on()

    # ---- requests ----

    def _work(self) -> None:
        """Begin the requests that are whole, as far as they may begin."""
        if self._working:
            return
        self._working = True
        try:
            while not self._busy and not self.closed and self._begin_next():
                pass
        finally:
            self._working = False
        if self._paused and not self._busy and not self.closed and not self._wanting:
            self._resume()

    def _begin_next(self) -> bool:
        """Begin the next request; False if it is not whole or has to wait."""
        if self._finishing:
            return False
        have = self._filled - self._start
        if have < SIZE_BYTES + _KEY.size:
            if have and self._frame_began is None:
                self._frame_began = self._now()
            self._make_space(SIZE_BYTES + _KEY.size)
            return False
        (size,) = _SIZE.unpack_from(self._buffer, self._start)
        (key,) = _KEY.unpack_from(self._buffer, self._start + SIZE_BYTES)
        limits = self._owner.limits
        limit = limits.socket_request_max_bytes
        if key != PRODUCE:
            limit = min(limit, limits.logstore_control_request_max_bytes)
        if not HEADER_BYTES_MIN <= size <= limit:
            start = bytes(self._buffer[self._start : self._start + SIZE_BYTES])
            self.close("size", f"a frame of {size} bytes; the limit is {limit}{_foreign(start)}")
            return False
        whole = SIZE_BYTES + size
        if have < whole:
            if self._frame_began is None:
                self._frame_began = self._now()
            self._make_space(whole)
            return False
        if self._ended and key != PRODUCE:
            return False
        if self._unsent and (key != PRODUCE or self._unsent >= PIPELINE_MAX):
            return False  # `_go_on` comes back here when an answer is sent
        self._frame_began = None
        self.used_at = self._now()
        self.requests += 1
        at = self._start + SIZE_BYTES
        self._start += whole
        slot = Slot()
        self._slots.append(slot)
        self._busy = True
        self._producing = key == PRODUCE
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

    # ---- the buffer ----

    def _make_space(self, whole: int) -> None:
        """Have the buffer take the rest of a frame of `whole` bytes."""
        have = self._filled - self._start
        if self._start and whole <= REST_BYTES:
            if self._charged:
                rest = bytearray(REST_BYTES)
                rest[:have] = memoryview(self._buffer)[self._start : self._filled]
                self._replace(rest, charged=False)
            else:
                self._buffer[:have] = self._buffer[self._start : self._filled]
            self._start, self._filled = 0, have
        elif whole > len(self._buffer) - self._start and (
            self._start or self._filled == len(self._buffer)
        ):
            if self._start and whole <= len(self._buffer):
                moved = bytes(memoryview(self._buffer)[self._start : self._filled])
                self._buffer[:have] = moved
                self._start, self._filled = 0, have
                return
            wanted = min(whole, max(GROWTH_BYTES, 2 * have))
            buffer = self._owner.memory.take(wanted, self._enlarge)
            if buffer is None:
                self._wanting = True
                self._pause()
            else:
                self._copy_to(buffer)

    def _enlarge(self, buffer: bytearray) -> None:
        """Go on with a buffer that was waited for."""
        self._wanting = False
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
        if self._paused and self._transport is not None and not self.closed:
            if self._filled == len(self._buffer):
                self._make_space(self._filled - self._start + 1)
                if self._filled == len(self._buffer):
                    return
            self._paused = False
            self._transport.resume_reading()

    # ---- answers ----

    def answer(self, slot: Slot, pieces: Pieces) -> None:
        """Send an answer when those before it are sent.  No pieces: there is none to send."""
        slot.pieces = pieces
        if not self.closed:
            self._go_on()

    def _send(self) -> None:
        while not self._blocked and not self._loading and not self.closed:
            if self._outgoing is None:
                if not self._slots or self._slots[0].pieces is None:
                    return
                self._outgoing = Outgoing(self._slots.popleft().pieces or ())
            try:
                chunk = self._outgoing.chunk()
            except NotCachedError:
                self._loading = True
                self._owner.load(self._outgoing, self._loaded)
                return
            except (EOFError, OSError) as error:
                self.close("error", f"records cannot be read: {error}")
                return
            if chunk is None:
                self._outgoing = None
                continue
            assert self._transport is not None
            self.sent += len(chunk)
            self._transport.write(chunk)

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

    @property
    def _unsent(self) -> int:
        """How many requests are not answered, or their answer is not sent."""
        return len(self._slots) + (self._outgoing is not None)

    # ---- ending ----

    def close(self, reason: str, detail: str = "") -> None:
        """Close the socket after what is being sent.  `reason` is a word for the metrics."""
        if self.closed or self._transport is None or self._transport.is_closing():
            return
        self._reason = reason
        self.detail = detail
        self._finishing = True
        self._closing_since = self._now()
        self._transport.close()

    detail = ""

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
        elif self._frame_began is not None and not self._wanting:
            if (now - self._frame_began) * 1000 > limits.logstore_request_read_timeout_ms:
                self.close("slow", "a request was not whole in time")
        elif self.quiet and (now - self.used_at) * 1000 > limits.connections_max_idle_ms:
            self.close("idle")
