"""Raw: streams of requests that were encoded before the clock started.

A client costs more CPU time than the server does.  A stream costs next to nothing: it sends frames
that are ready, and reads of an answer only if it is an error and, of a fetch, where the next one
starts.  One thread drives many streams.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

from benchmarks import engine
from benchmarks.wire.servers import Server, peer

PRODUCE, FETCH = 0, 1
PRODUCE_VERSION, FETCH_VERSION = 11, 12
FETCH_BYTES = 1 << 20  # the default of clients, for a partition
SECONDS_MAX = 120.0
_SIZE = struct.Struct(">i")
_ERROR = struct.Struct(">h")
_OFFSET = struct.Struct(">q")
_BATCH = struct.Struct(">qi11xi")  # base offset, length, last offset delta
_HEADER_BYTES = 61
_MARKED = 0x0123456789ABCDEF  # an offset that is found in an encoded request


def batch(size_bytes: int, record_bytes: int) -> tuple[bytes, int]:
    """Return a batch of about this size, of random records, and how many records it has."""
    count = max(1, size_bytes // (record_bytes + 8))
    return engine.encoded([os.urandom(record_bytes)] * count), count


class Stream:
    """A connection with at most `in_flight` requests that are not answered."""

    def __init__(self, server: Server, in_flight: int) -> None:
        self.socket = socket.create_connection(server.host_port)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._in_flight = in_flight
        self._outstanding = 0
        self._buffer = bytearray(FETCH_BYTES + (64 << 10))
        self._filled = 0
        self.records = 0  # that were acknowledged or received

    def request(self) -> bytes | bytearray | None:
        """Return the next request; None if there is none."""
        raise NotImplementedError

    def answered(self, frame: memoryview) -> None:
        """Look at an answer."""
        raise NotImplementedError

    def fill(self) -> bool:
        """Send as many requests as may be outstanding; return whether any is."""
        while self._outstanding < self._in_flight:
            request = self.request()
            if request is None:
                break
            self._outstanding += 1
            self.socket.sendall(request)
        return self._outstanding > 0

    def read(self) -> bool:
        """Read what has arrived and send the next requests; return whether more is to come."""
        self.receive()
        return self.fill()

    def receive(self) -> None:
        """Read what has arrived."""
        got = self.socket.recv_into(memoryview(self._buffer)[self._filled :])
        if not got:
            raise EOFError("the server closed the connection")
        self._filled += got
        at = 0
        with memoryview(self._buffer) as view:
            while self._filled - at >= 4:
                size = 4 + _SIZE.unpack_from(view, at)[0]
                if self._filled - at < size:
                    break
                self._outstanding -= 1
                self.answered(view[at + 4 : at + size])
                at += size
            if at:
                rest = bytes(view[at : self._filled])
                view[: len(rest)] = rest
                self._filled -= at
        if _missing(self._buffer, self._filled) > len(self._buffer):
            self._buffer += bytes(_missing(self._buffer, self._filled) - len(self._buffer))


def _missing(buffer: bytearray, filled: int) -> int:
    """The bytes of the frame that has begun."""
    return 4 + int(_SIZE.unpack_from(buffer)[0]) if filled >= 4 else 0


class Producing(Stream):
    """Produces one batch again and again."""

    def __init__(
        self,
        server: Server,
        topic: str,
        batch: tuple[bytes, int],
        batches: int,
        *,
        partition: int = 0,
        in_flight: int = 5,
    ) -> None:
        super().__init__(server, in_flight)
        raw, self._count = batch
        body = peer().produce_body(topic, raw, partition=partition)
        self._frame = peer().request(PRODUCE, PRODUCE_VERSION, body)
        self._left = batches
        # correlation id, tags, topics, name, partitions, index
        self._error_at = 4 + 1 + 1 + 1 + len(topic) + 1 + 4

    def request(self) -> bytes | None:
        if not self._left:
            return None
        self._left -= 1
        return bytes(self._frame)

    def answered(self, frame: memoryview) -> None:
        (code,) = _ERROR.unpack_from(frame, self._error_at)
        assert code == 0, f"error {code}: {peer().response(0, PRODUCE_VERSION, bytes(frame))}"
        self.records += self._count


class Fetching(Stream):
    """Fetches from an offset on until it has got some records."""

    def __init__(
        self,
        server: Server,
        topic: str,
        records: int,
        *,
        partition: int = 0,
        offset: int = 0,
        wait_ms: int = 500,
    ) -> None:
        super().__init__(server, 1)
        self._wanted = records
        self.offset = self._start = offset
        body = peer().fetch_body(
            topic, _MARKED, partition=partition, max_wait_ms=wait_ms, max_bytes=FETCH_BYTES
        )
        body["max_bytes"] = 50 << 20
        body["session_epoch"] = -1
        self._frame = bytearray(peer().request(FETCH, FETCH_VERSION, body))
        self._offset_at = self._frame.index(_OFFSET.pack(_MARKED))

    def request(self) -> bytearray | None:
        if self.records >= self._wanted:
            return None
        _OFFSET.pack_into(self._frame, self._offset_at, self.offset)
        return self._frame

    def answered(self, frame: memoryview) -> None:
        body: dict[str, Any] = peer().response(FETCH, FETCH_VERSION, frame)[1]
        row = body["responses"][0]["partitions"][0]
        assert body["error_code"] == row["error_code"] == 0, row["error_code"]
        records, at = row["records"] or b"", 0
        while at + _HEADER_BYTES <= len(records):
            base, length, delta = _BATCH.unpack_from(records, at)
            at += 12 + length
            if at <= len(records):
                self.offset = base + delta + 1
        self.records = self.offset - self._start


def drive(streams: Iterable[Stream], *, seconds: float = SECONDS_MAX) -> float:
    """Run streams to their end, or for some seconds; return the time that it took."""
    streams = list(streams)
    began = time.perf_counter()
    try:
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                if stream.fill():
                    selector.register(stream.socket, selectors.EVENT_READ, stream)
            while selector.get_map():
                if time.perf_counter() - began >= seconds:
                    assert seconds < SECONDS_MAX, "the answers take too long"
                    break
                for key, _ in selector.select(0.1):
                    if not key.data.read():
                        selector.unregister(key.fileobj)
        return time.perf_counter() - began
    finally:
        for stream in streams:
            stream.socket.close()


def fill(server: Server, topic: str, size_bytes: int, record_bytes: int) -> int:
    """Produce records in batches of 64 KiB; return how many there are."""
    made = batch(64 << 10, record_bytes)
    stream = Producing(server, topic, made, max(1, size_bytes // len(made[0])))
    drive([stream])
    return stream.records
