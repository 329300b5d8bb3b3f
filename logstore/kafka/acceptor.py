"""Acceptor: the listening sockets of a server.

It accepts while there is room for connections.  At the limit, and when the process has no file
descriptor left, it stops; peers wait in the kernel's backlog.  Connections that are served are not
affected.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterable

from logstore.config import ConfigError

__all__ = ["Acceptor", "Listener", "bind", "parse_address"]

log = logging.getLogger("logstore.kafka")

ACCEPT_MAX = 32  # sockets that one turn of the loop accepts
RETRY_FIRST, RETRY_LAST = 0.1, 5.0  # seconds without accepting after EMFILE


class Listener:
    """A bound socket with its name."""

    __slots__ = ("name", "socket")

    def __init__(self, name: str, bound: socket.socket) -> None:
        self.name = name
        self.socket = bound

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that it is bound to."""
        host, port = self.socket.getsockname()[:2]
        return str(host), int(port)


def parse_address(text: str) -> tuple[str, str, int]:
    """Return (name, host, port) of ``host:port``, ``[::1]:port`` or ``NAME://host:port``."""
    name, _, rest = text.rpartition("://")
    host, colon, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"an address is host:port, such as 127.0.0.1:9092, not {text!r}")
    return name or "PLAINTEXT", host, int(port)


def bind(addresses: Iterable[str], backlog: int) -> list[Listener]:
    """Bind all addresses, or none."""
    made: list[Listener] = []
    try:
        for text in addresses:
            name, host, port = parse_address(text)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                bound = socket.create_server((host, port), family=family, backlog=backlog)
            except OSError as error:
                raise OSError(error.errno, f"cannot listen on {text}: {error.strerror}") from error
            bound.setblocking(False)
            made.append(Listener(name, bound))
    except BaseException:
        for each in made:
            each.socket.close()
        raise
    return made


class Acceptor:
    """Accepts the connections of some listeners."""

    def __init__(
        self,
        listeners: Iterable[Listener],
        loop: asyncio.AbstractEventLoop,
        make: Callable[[str], asyncio.BaseProtocol],
        may_accept: Callable[[str], bool | None],
    ) -> None:
        """`may_accept` gets the peer's address: True, False to close it, None to wait."""
        self._listeners = list(listeners)
        self._loop = loop
        self._make = make
        self._may_accept = may_accept
        self._retry = RETRY_FIRST
        self._timer: asyncio.TimerHandle | None = None
        self._accepting = False
        self._connecting: set[asyncio.Task[object]] = set()

    def start(self) -> None:
        """Accept from now on.  In the thread of the loop."""
        if not self._accepting:
            self._accepting = True
            for each in self._listeners:
                self._loop.add_reader(each.socket, self._accept, each)

    def pause(self) -> None:
        """Leave peers in the backlog."""
        if self._accepting:
            self._accepting = False
            for each in self._listeners:
                self._loop.remove_reader(each.socket)

    def close(self) -> None:
        """Stop accepting for good and close the sockets."""
        self.pause()
        if self._timer is not None:
            self._timer.cancel()
        for each in self._listeners:
            each.socket.close()

    def _accept(self, listener: Listener) -> None:
        for _ in range(ACCEPT_MAX):
            if self._may_accept("") is None:
                self.pause()  # the server calls `start` when a connection has ended
                return
            try:
                accepted, peer = listener.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._wait(error)
                    return
                raise
            self._retry = RETRY_FIRST
            if not self._may_accept(peer[0]):
                accepted.close()
                continue
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(
                self._loop.connect_accepted_socket(lambda: self._make(listener.name), accepted)
            )
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _wait(self, error: OSError) -> None:
        log.warning("cannot accept connections for %.1f s: %s", self._retry, error.strerror)
        self.pause()
        self._timer = self._loop.call_later(self._retry, self.start)
        self._retry = min(RETRY_LAST, 2 * self._retry)
