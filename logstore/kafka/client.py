"""KafkaPeer: a client's connection to one broker, Kafka's or ours.

One request is under way at a time.  `request` sends one and waits for its answer; `send` and
`receive` are its halves, for a caller that asks several peers at once.  Answers come in the order
of the requests.  An error of the connection, a time-out and bytes that are no answer all end in
PeerGoneError, and the connection is closed: an answer that arrives late would be taken for that of
the next request.

The codec is the listener's.  Memory is bounded by `answer_bytes_max`.  One thread at a time uses a
peer; `close` may be called from another thread, and ends a wait.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Any

from logstore.closeable import Closeable
from logstore.kafka.protocol.codec import MALFORMED, decoder, encoder
from logstore.kafka.protocol.errors import ErrorCode
from logstore.kafka.protocol.frames import API_VERSIONS, SIZE_BYTES, is_flexible, skip_tags

__all__ = ["KafkaPeer", "PeerGoneError", "parse_servers"]

ANSWER_BYTES_MAX = 256 << 20
TIMEOUT_SECONDS = 30.0
_REQUEST = struct.Struct(">hhih")
_SIZE = struct.Struct(">i")


class PeerGoneError(ConnectionError):
    """The peer cannot be reached, or its connection has ended: ``.host``, ``.port``, ``.reason``.

    It is not known whether the peer has acted on the request under way.
    """

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"{host}:{port}: {reason}")
        self.host = host
        self.port = port
        self.reason = reason


def parse_servers(text: str) -> list[tuple[str, int]]:
    """Return the addresses of ``kafka://host:port[,host:port]``; the scheme may be left out.

    >>> parse_servers("kafka://a:9092,[::1]:9093")
    [('a', 9092), ('::1', 9093)]
    """
    servers = []
    for each in text.removeprefix("kafka://").rstrip("/").split(","):
        host, colon, port = each.strip().rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"{each!r} is no address of a server: host:port, as in kafka://h:9092")
        servers.append((host.strip("[]"), int(port)))
    return servers


class KafkaPeer(Closeable):
    """A connection.  It is made, and the versions of the peer are asked for, when it is created.

    ``versions`` maps the key of an API to the lowest and the highest version that the peer serves.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout: float = TIMEOUT_SECONDS,
        client_id: str = "logstore",
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ) -> None:
        self.host = host
        self.port = port
        self.timeout = timeout
        self._client_id = client_id.encode()
        self._answer_bytes_max = answer_bytes_max
        self._correlation_id = 0
        self._under_way: tuple[int, int, float] | None = None  # key, version, deadline
        self.versions: dict[int, tuple[int, int]] = {}
        try:
            self._socket = socket.create_connection((host, port), timeout)
        except OSError as error:
            raise PeerGoneError(host, port, str(error)) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.closed = False
        try:
            self._ask_versions()
        except BaseException:
            self.close()
            raise

    def _ask_versions(self) -> None:
        about = {"client_software_name": "logstore", "client_software_version": "0"}
        answer = self.request(API_VERSIONS, 3, about)
        if answer["error_code"]:
            raise self._gone(f"it refuses ApiVersions: {_code_text(answer['error_code'])}")
        for each in answer["api_keys"]:
            self.versions[each["api_key"]] = each["min_version"], each["max_version"]

    def close(self) -> None:
        """Close the connection.  A second call does nothing."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a `recv` of another thread
        self._socket.close()

    def __repr__(self) -> str:
        return f"<KafkaPeer {self.host}:{self.port}{' closed' if self.closed else ''}>"

    def version(self, key: int, first: int, last: int) -> int:
        """Return the newest version from `first` to `last` that the peer serves."""
        lowest, highest = self.versions.get(key, (1, 0))
        chosen = min(last, highest)
        if chosen < max(first, lowest):
            raise self._gone(
                f"it serves versions {lowest} to {highest} of API {key}, not {first} to {last}"
            )
        return chosen

    # ---- requests ----

    def request(
        self, key: int, version: int, body: dict[str, Any], *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Send a request and return its answer; `records` in it are views of the answer."""
        self.send(key, version, body, timeout=timeout)
        return self.receive()

    def send(
        self, key: int, version: int, body: dict[str, Any], *, timeout: float | None = None
    ) -> None:
        """Send a request; `receive` returns its answer, within `timeout` seconds from now on."""
        assert self._under_way is None, "a request is under way"
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        out = bytearray(SIZE_BYTES)
        out += _REQUEST.pack(key, version, self._correlation_id, len(self._client_id))
        out += self._client_id
        if is_flexible(key, version):
            out.append(0)  # no tagged fields
        encoder(key, "request", version)(body, out, [])
        _SIZE.pack_into(out, 0, len(out) - SIZE_BYTES)
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        if self.closed:
            raise self._gone("the connection is closed")
        try:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self._socket.sendall(out)
        except OSError as error:
            raise self._gone(str(error)) from error
        self._under_way = key, version, deadline

    def receive(self) -> dict[str, Any]:
        """Return the answer to the request that was sent."""
        assert self._under_way is not None, "no request is under way"
        key, version, deadline = self._under_way
        self._under_way = None
        try:
            (size,) = _SIZE.unpack(self._exactly(SIZE_BYTES, deadline))
            if not SIZE_BYTES <= size <= self._answer_bytes_max:
                raise self._gone(
                    f"an answer of {size} bytes; the limit is {self._answer_bytes_max}"
                )
            frame = self._exactly(size, deadline)
        except TimeoutError as error:
            raise self._gone("no answer in time") from error
        except OSError as error:
            if isinstance(error, PeerGoneError):
                raise
            raise self._gone(str(error)) from error
        return self._decoded(memoryview(frame), key, version)

    def _decoded(self, frame: memoryview, key: int, version: int) -> dict[str, Any]:
        (correlation_id,) = _SIZE.unpack_from(frame)
        if correlation_id != self._correlation_id:
            raise self._gone(f"answer {correlation_id} to request {self._correlation_id}")
        at = SIZE_BYTES
        try:
            if key != API_VERSIONS and is_flexible(key, version):
                at = skip_tags(frame, at)
            body, end = decoder(key, "response", version)(frame, at, len(frame))
        except MALFORMED as error:
            raise self._gone(f"an answer that cannot be read: {error}") from error
        if end != len(frame):
            raise self._gone(f"an answer with {len(frame) - end} bytes after its end")
        return body

    def _exactly(self, size: int, deadline: float) -> bytearray:
        got = bytearray(size)
        view, filled = memoryview(got), 0
        while filled < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            count = self._socket.recv_into(view[filled:])
            if not count:
                raise self._gone("it closed the connection")
            filled += count
        return got

    def _gone(self, reason: str) -> PeerGoneError:
        self.close()
        return PeerGoneError(self.host, self.port, reason)


def _code_text(code: int) -> str:
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"error {code}"
