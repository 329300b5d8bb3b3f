"""Link: a TCP forwarder on loopback whose network can fail, without privileges.

A client connects to ``link.address`` and reaches the target.  Bytes have two ways: ``there``, from
the client to the target, and ``back``.  A link has these modes:

``pass``       bytes pass
``drop``       nothing passes, in one way or in both
``delay``      every piece arrives some time later
``reset``      every connection is reset, and new ones too
``half-open``  requests pass and answers do not: ``drop`` of the way back

Invariant: bytes of a connection are never lost or reordered, because TCP would send them again.  So
``drop`` keeps them, with the end of the connection, and `heal` delivers them.  A node that was cut
off may therefore get an old request late.  A connection that was opened during ``drop`` reaches the
target after `heal`, unless its client has closed it before.

All links of a `Links` run in one thread.  The methods of a Link may be called by any thread; the
new mode is in force when they return.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar, cast

__all__ = ["Link", "Links", "Way"]

T = TypeVar("T")

Way = Literal["both", "there", "back"]

HOST = "127.0.0.1"
TIMEOUT = 20.0  # s: for a call to the thread of the links
HELD_BYTES = 1 << 20  # above this, a connection is not read any more: the sender blocks
TURNS = 10  # of the loop, from accept() to connection_made()
RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST and drops what is left


class Links:
    """The links of one test, and the thread that runs them.  Close it after their clients."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Links: {len(self._links)}>"

    def link(self, target: str, name: str = "") -> Link:
        """Return a new link to an address such as ``127.0.0.1:9092``; it passes."""
        host, _, port = target.rpartition(":")
        link = Link(self, (host, int(port)), name)
        self.run(link._listen())
        self._links.append(link)
        return link

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread of the links; return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT)

    def call(self, act: Callable[[], T]) -> T:
        """Call a function in the thread of the links; return its result."""

        async def now() -> T:
            return act()

        return self.run(now())

    def close(self) -> None:
        """Reset every connection, stop listening, and end the thread."""
        if self._loop.is_closed():
            return
        for link in self._links:
            self.run(link._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT)
        self._loop.close()

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Direction:
    """One way of a link, for all its connections."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.delay = 0.0
        self.passed = 0  # bytes


class Link:
    """A forwarder to one address; made by `Links.link`.  See the module for the modes."""

    def __init__(self, links: Links, target: tuple[str, int], name: str) -> None:
        self.name = name
        self.target = target
        self.mode = "pass"
        self.accepted = 0  # connections so far
        self._links = links
        self._there = _Direction()
        self._back = _Direction()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._sides: set[_Side] = set()
        self.address = ""

    def __repr__(self) -> str:
        return f"<Link {self.name or self.address} to {self.target[1]}: {self.mode}>"

    @property
    def passed(self) -> tuple[int, int]:
        """The bytes that have passed: to the target, and back."""
        return self._there.passed, self._back.passed

    # ---- modes ----

    def heal(self) -> None:
        """Let bytes pass, those that were kept first."""
        self._set("pass", (), 0.0)

    def drop(self, way: Way = "both") -> None:
        """Let nothing pass in a way, or in both."""
        closed = ("there", "back") if way == "both" else (way,)
        self._set("half-open" if way == "back" else "drop", closed, 0.0)

    def half_open(self) -> None:
        """Let requests pass, but no answers."""
        self.drop("back")

    def delay(self, seconds: float) -> None:
        """Deliver every piece that arrives from now on `seconds` later, in either way."""
        self._set("delay", (), seconds)

    def reset(self) -> None:
        """Reset every connection now, and each new one until `heal`."""
        self._set("reset", (), 0.0)

    def _set(self, mode: str, closed: tuple[str, ...], delay: float) -> None:
        def change() -> None:
            self.mode = mode
            for name, way in (("there", self._there), ("back", self._back)):
                way.delay = delay
                if name in closed:
                    way.open.clear()
                else:
                    way.open.set()
            if mode == "reset":
                for side in list(self._sides):
                    side.reset()

        self._links.call(change)

    # ---- in the thread of the links ----

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Side(self._accept), HOST, 0)
        self.address = f"{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        assert self._server is not None
        self.mode = "reset"
        # A connection that the loop has accepted is given to `_accept` a few turns later; if the
        # server is closed before, asyncio leaks it.
        for listener in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self._server.close()
        for side in list(self._sides):
            side.reset()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()
        # A transport calls connection_lost in the next turn of the loop.
        while self._sides:
            await asyncio.sleep(0)

    def _accept(self, client: _Side) -> None:
        self.accepted += 1
        if self.mode == "reset":
            client.reset()
            return
        self._track(client)
        task = asyncio.get_running_loop().create_task(self._connect(client))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connect(self, client: _Side) -> None:
        """Connect to the target and forward, until both ways have ended."""
        # A handshake needs both ways.
        await self._there.open.wait()
        await self._back.open.wait()
        if client.ended:
            client.reset()
            return
        loop = asyncio.get_running_loop()
        try:
            _, target = await loop.create_connection(lambda: _Side(self._track), *self.target)
        except OSError:
            client.reset()  # the target is down
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(client, target, self._there))
                group.create_task(self._forward(target, client, self._back))
        finally:
            client.close()
            target.close()

    def _track(self, side: _Side) -> None:
        self._sides.add(side)
        side.on_lost = self._sides.discard

    async def _forward(self, source: _Side, sink: _Side, way: _Direction) -> None:
        """Forward one way of a connection, with its end."""
        loop = asyncio.get_running_loop()
        while True:
            came, piece = await source.take()
            await asyncio.sleep(max(0.0, came + way.delay - loop.time()))
            await way.open.wait()
            if piece is None:
                sink.reset()
                return
            if not piece:
                sink.end()
                return
            way.passed += len(piece)
            await sink.send(piece)


class _Side(asyncio.Protocol):
    """One end of a connection.  Its pieces wait in a queue; ``b""`` is the end, None a reset."""

    def __init__(self, made: Callable[[_Side], None]) -> None:
        self.ended = False
        self.on_lost: Callable[[_Side], None] = lambda side: None
        self._made = made
        self._pieces: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()
        self._held = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._made(self)

    def data_received(self, data: bytes) -> None:
        self._put(data)
        self._held += len(data)
        if self._held > HELD_BYTES:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self.ended = True
        self._put(b"")
        return True  # the other way may continue

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended:
            self.ended = True
            self._put(None)
        self._writable.set()
        self.on_lost(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _put(self, piece: bytes | None) -> None:
        self._pieces.put_nowait((asyncio.get_running_loop().time(), piece))

    async def take(self) -> tuple[float, bytes | None]:
        """Return the next piece and the time at which it arrived."""
        came, piece = await self._pieces.get()
        if piece:
            self._held -= len(piece)
            if self._held <= HELD_BYTES and not self._transport.is_closing():
                self._transport.resume_reading()
        return came, piece

    async def send(self, piece: bytes) -> None:
        """Write a piece; wait while the buffer is full."""
        if not self._transport.is_closing():
            self._transport.write(piece)
            await self._writable.wait()

    def end(self) -> None:
        """Send the end of this way."""
        with contextlib.suppress(OSError):  # the peer has closed both ways meanwhile
            if not self._transport.is_closing():
                self._transport.write_eof()

    def close(self) -> None:
        """Close the connection after what is buffered is sent."""
        self._transport.close()

    def reset(self) -> None:
        """Close the connection with RST."""
        connection = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        self._transport.abort()
