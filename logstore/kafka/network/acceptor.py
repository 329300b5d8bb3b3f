"""Acceptor: the listening sockets of a server.

It accepts while there is room for connections.  At the limit, and when the process has no file
descriptor left, it stops; peers wait in the kernel's backlog.  Connections that are served are not
affected.  A peer that connects too often is accepted and served later: its socket is held.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable

from logstore.config import ConfigError
from logstore.kafka.network.connection import Connection

__all__ = [
    *("Acceptor", "Listener", "Pace", "bind", "check_protocol", "is_loopback"),
    *("parse_address", "parse_advertised"),
]

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
    several = "," in text or ":" in name
    if several or not colon or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"an address is host:port, such as 127.0.0.1:9092, not {text!r}")
    return name or "PLAINTEXT", host, int(port)


def parse_advertised(text: str) -> tuple[str, int]:
    """Return the host and port that clients are sent to."""
    _, host, port = parse_address(text)
    if not host or not port or host in ("0.0.0.0", "::"):
        raise ConfigError(f"advertised.listeners: clients cannot connect to {text!r}")
    return host, port


def check_protocol(name: str, protocol: str) -> None:
    """Refuse a listener that a broker would protect."""
    if protocol in ("SSL", "SASL_PLAINTEXT", "SASL_SSL"):
        raise ConfigError(
            f"listener {name} is {protocol}, and there is neither TLS nor SASL yet: use PLAINTEXT, "
            "on an address that only trusted clients reach"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address is of this machine only."""
    return host.startswith("127.") or host == "::1"


def bind(addresses: Iterable[str | socket.socket], backlog: int) -> list[Listener]:
    """Bind all addresses, or none.  A socket is listening already and is used as it is.

    The names of listeners differ: the second ``PLAINTEXT`` is ``PLAINTEXT_2``.
    """
    made: list[Listener] = []
    try:
        for address in addresses:
            if isinstance(address, socket.socket):
                name, bound = "PLAINTEXT", address
            else:
                name, host, port = parse_address(address)
                check_protocol(name, name)
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                try:
                    bound = socket.create_server((host, port), family=family, backlog=backlog)
                except OSError as error:
                    text = f"cannot listen on {address}: {error.strerror}"
                    raise OSError(error.errno, text) from error
            bound.setblocking(False)
            same = sum(each.name.partition("_")[0] == name for each in made)
            made.append(Listener(f"{name}_{same + 1}" if same else name, bound))
    except BaseException:
        for each in made:
            each.socket.close()
        raise
    return made


class Pace:
    """How often each address may connect: `rate` times a second, and `rate` times at once.

    >>> pace = Pace(2)
    >>> [pace.delay("10.0.0.1", now=5.0) for _ in range(4)]
    [0.0, 0.0, 0.5, 1.0]
    >>> pace.delay("10.0.0.2", now=5.0), pace.delay("127.0.0.1", now=5.0)
    (0.0, 0.0)
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._due: dict[str, float] = {}  # when the allowance of an address is full again

    def delay(self, peer: str, now: float) -> float:
        """Return the seconds that a new connection of `peer` has to wait.  Counts it."""
        if is_loopback(peer):
            return 0.0
        due = self._due[peer] = max(now, self._due.get(peer, now)) + 1 / self._rate
        return max(0.0, due - now - 1.0)

    def forget(self, now: float) -> None:
        """Forget the addresses that have their full allowance."""
        for peer in [peer for peer, due in self._due.items() if due <= now]:
            del self._due[peer]


class Acceptor:
    """Accepts the connections of some listeners."""

    def __init__(
        self,
        listeners: Iterable[Listener],
        loop: asyncio.AbstractEventLoop,
        make: Callable[[str], Connection],
        may_accept: Callable[[str], bool | None],
        pace: Pace,
    ) -> None:
        """`may_accept` gets the peer's address: True, False to close it, None to wait."""
        self._listeners = list(listeners)
        self._loop = loop
        self._make = make
        self._may_accept = may_accept
        self._pace = pace
        self._held: dict[socket.socket, asyncio.TimerHandle] = {}
        self.held_by_ip: Counter[str] = Counter()  # sockets that are accepted and not served yet
        self._retry = RETRY_FIRST
        self._timer: asyncio.TimerHandle | None = None
        self._accepting = False
        # asyncio makes the connection of an accepted socket a few turns of the loop later.
        self._connecting: dict[asyncio.Task[object], tuple[Connection, str]] = {}

    def connecting(self, peer: str = "") -> int:
        """Return how many accepted sockets are not connected yet; of one address, if given."""
        held = self.held_by_ip[peer] if peer else self.held_by_ip.total()
        return held + sum(
            not connection.made and peer in ("", ip) for connection, ip in self._connecting.values()
        )

    def start(self) -> None:
        """Accept from now on.  In the thread of the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
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
        self._listeners.clear()  # `start`, when a connection ends later, adds none of them again
        for held, timer in self._held.items():
            timer.cancel()
            held.close()
        self._held.clear()
        self.held_by_ip.clear()

    def _accept(self, listener: Listener) -> None:
        for _ in range(ACCEPT_MAX):
            if self._may_accept("") is None:
                self.pause()  # the server calls `start` when a connection has ended
                return
            try:
                accepted, peer = listener.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or memory left, or the network failed
                self._wait(error)
                return
            self._retry = RETRY_FIRST
            if not self._may_accept(peer[0]):
                accepted.close()
                continue
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            delay = self._pace.delay(peer[0], self._loop.time())
            if delay:
                self.held_by_ip[peer[0]] += 1
                self._held[accepted] = self._loop.call_later(
                    delay, self._serve_held, listener, accepted, peer[0]
                )
            else:
                self._connect(self._make(listener.name), accepted, peer[0])

    def _serve_held(self, listener: Listener, accepted: socket.socket, ip: str) -> None:
        del self._held[accepted]
        self.held_by_ip[ip] -= 1
        if not self.held_by_ip[ip]:
            del self.held_by_ip[ip]
        self._connect(self._make(listener.name), accepted, ip)

    def _connect(self, connection: Connection, accepted: socket.socket, ip: str) -> None:
        task: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: connection, accepted)
        )
        self._connecting[task] = connection, ip
        task.add_done_callback(self._connecting.pop)

    def _wait(self, error: OSError) -> None:
        log.warning("cannot accept connections for %.1f s: %s", self._retry, error.strerror)
        self.pause()
        self._timer = self._loop.call_later(self._retry, self.start)
        self._retry = min(RETRY_LAST, 2 * self._retry)
