"""Peer: a client that sends the requests it is told to, by the listener's own codec."""

from __future__ import annotations

import socket
import struct
from typing import Any, Self

from logstore import BatchEncoder, Record
from logstore.format.batch import with_producer
from logstore.kafka.protocol.codec import decoder, encoder
from logstore.kafka.protocol.frames import API_VERSIONS, is_flexible
from tests.kit import PATIENCE


def request(
    key: int, version: int, body: dict[str, Any], *, correlation_id: int = 1, client: str = "peer"
) -> bytes:
    """Return a whole frame."""
    out = bytearray(struct.pack(">hhih", key, version, correlation_id, len(client)))
    out += client.encode()
    if is_flexible(key, version):
        out.append(0)
    encoder(key, "request", version)(body, out, [])
    return struct.pack(">i", len(out)) + bytes(out)


def response(key: int, version: int, frame: bytes) -> tuple[int, dict[str, Any]]:
    """Return the correlation id and the body of a frame without its size."""
    (correlation_id,) = struct.unpack_from(">i", frame)
    at = 4
    if key != API_VERSIONS and is_flexible(key, version):
        assert frame[4] == 0
        at = 5
    body, end = decoder(key, "response", version)(memoryview(frame), at, len(frame))
    assert end == len(frame)
    return correlation_id, body


class Peer:
    """A connection.  One request at a time, unless `send` and `receive` are called apart."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        timeout: float = PATIENCE,
        through: socket.socket | None = None,
    ) -> None:
        """`through`: a socket that exists, for a process that may open no other."""
        if through is None:
            self.socket = socket.create_connection(address, timeout=timeout)
        else:
            through.settimeout(timeout)
            through.connect(address)
            self.socket = through
        self.correlation_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def send(self, key: int, version: int, body: dict[str, Any], *, client: str = "peer") -> None:
        self.correlation_id += 1
        self.socket.sendall(
            request(key, version, body, correlation_id=self.correlation_id, client=client)
        )

    def receive(self, key: int, version: int) -> dict[str, Any]:
        return response(key, version, self.frame())[1]

    def frame(self) -> bytes:
        """Return the next frame; EOFError if the server has closed the connection."""
        (size,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        got = bytearray()
        while len(got) < size:
            piece = self.socket.recv(size - len(got))
            if not piece:
                raise EOFError(f"closed after {len(got)} of {size} bytes")
            got += piece
        return bytes(got)

    def ask(self, key: int, version: int, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        self.send(key, version, body, **options)
        return self.receive(key, version)

    def is_closed(self) -> bool:
        """Wait until the server closes the connection."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


def batch(
    *values: bytes | Record | None,
    compression: str | None = None,
    producer: tuple[int, int, int] | None = None,
    transactional: bool = False,
) -> bytes:
    """Return one record batch, as a client sends it.

    `producer`: its id, its epoch and the sequence of the first record.
    """
    made = BatchEncoder(compression=compression)
    for value in values:
        if isinstance(value, Record):
            made.extend([value])
        else:
            made.append(value)
    raw = made.take()
    if producer is None:
        return raw
    producer_id, epoch, sequence = producer
    return with_producer(
        raw,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )


def produce_body(topic: str, records: bytes | None, *, partition: int = 0, acks: int = -1,
                 transactional_id: str | None = None) -> dict[str, Any]:  # fmt: skip
    return {
        "transactional_id": transactional_id,
        "acks": acks,
        "timeout_ms": 10_000,
        "topic_data": [
            {"name": topic, "partition_data": [{"index": partition, "records": records}]}
        ],
    }


def fetch_body(topic: str, offset: int, *, partition: int = 0, max_wait_ms: int = 0,
               min_bytes: int = 1, max_bytes: int = 1 << 20, isolation: int = 0,
               **more: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "max_wait_ms": max_wait_ms,
        "min_bytes": min_bytes,
        "max_bytes": max_bytes,
        "isolation_level": isolation,
        "topics": [
            {
                "topic": topic,
                "partitions": [
                    {
                        "partition": partition,
                        "fetch_offset": offset,
                        "partition_max_bytes": max_bytes,
                        "current_leader_epoch": -1,
                        "last_fetched_epoch": -1,
                    }
                    | more
                ],
            }
        ],
    }
