"""Connection: whatever comes in between, every request begins and every answer leaves, in order."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.kafka.network.connection import Connection, Slot
from tests.kafka.test_connection import FETCH, OTHER, PRODUCE, Owner, Transport, connect, frame

PEERS = 3
SIZES = (0, 90, 1000, 3000, 4080, 4200, 9000, 70_000)

requests = st.lists(
    st.tuples(st.sampled_from([PRODUCE, PRODUCE, FETCH, OTHER]), st.sampled_from(SIZES)),
    min_size=1,
    max_size=12,
)
acts = st.lists(
    st.tuples(
        st.sampled_from(
            ["receive", "receive", "answer", "early", "decode", "block", "unblock", "quick", "slow"]
        ),
        st.integers(0, PEERS - 1),
        st.integers(0, 1 << 14),
    ),
    max_size=60,
)


class Client:
    """A peer with its requests, the bytes that are not received yet, and what it was answered."""

    def __init__(self, owner: Owner, asked: list[tuple[int, int]], number: int) -> None:
        self.connection, self.transport = connect(owner)
        bodies = [f"{number}.{place}.".encode() + b"x" * size
                  for place, (_, size) in enumerate(asked)]  # fmt: skip
        keys = [key for key, _ in asked]
        self.bodies = bodies
        self.stream = b"".join(frame(key, body) for key, body in zip(keys, bodies, strict=True))
        self.begun: deque[tuple[Slot, int, bytes]] = deque()
        self.busy: tuple[Slot, int, bytes] | None = None  # uses the buffer

    def receive(self, most: int) -> bool:
        """Receive at most so many bytes; return whether there were any."""
        if not self.stream or not self.transport.reading:
            return False
        buffer = self.connection.get_buffer(-1)
        size = min(len(buffer), len(self.stream), most)
        assert size
        buffer[:size] = self.stream[:size]
        self.stream = self.stream[size:]
        self.connection.buffer_updated(size)
        return True

    def answer(self) -> bool:
        """Answer the oldest request, and end it."""
        if not self.begun:
            return False
        slot, _, body = self.begun.popleft()
        busy = self.busy is not None and self.busy[0] is slot
        if busy:
            self.busy = None
        self.connection.answer(slot, (b"<" + body + b">",))
        if busy:
            self.connection.release()
        return True

    def release_early(self) -> None:
        if self.busy is not None and self.busy[1] == PRODUCE:
            self.busy = None
            self.connection.release()

    def decode(self) -> None:
        if self.busy is not None and self.busy[1] != PRODUCE:
            self.connection.decoded()

    def block(self, *, blocked: bool) -> None:
        if blocked is not self.transport.blocked:
            self.transport.blocked = blocked
            (self.connection.pause_writing if blocked else self.connection.resume_writing)()


class Many(Owner):
    """Gives each request to the client that it belongs to."""

    def __init__(self, memory_bytes: int) -> None:
        super().__init__(memory_bytes=memory_bytes)
        self.clients: dict[Connection, Client] = {}

    def answer_now(self, connection: Any, key: int, buffer: bytearray, at: int, size: int) -> Any:
        if not self.answer_quickly:
            return None
        body = bytes(buffer[at + 10 : at + size])
        return (b"<" + body + b">",) if key == PRODUCE else (b"<", body, b">")

    def begin(self, connection: Connection, slot: Slot, data: memoryview) -> None:
        client = self.clients[connection]
        assert client.busy is None, "a request began while another one uses the buffer"
        key = int.from_bytes(data[:2], "big")
        client.busy = (slot, key, bytes(data[10:]))
        client.begun.append(client.busy)


@settings(max_examples=300)
@given(
    asked=st.lists(requests, min_size=PEERS, max_size=PEERS),
    acts=acts,
    memory_bytes=st.sampled_from([1 << 22, 100_000, 20_000]),
)
def test_every_request_is_answered_in_order(
    asked: list[list[tuple[int, int]]], acts: list[tuple[str, int, int]], memory_bytes: int
) -> None:
    owner = Many(memory_bytes)
    Transport.blocked = False  # type: ignore[attr-defined]
    clients = [Client(owner, each, number) for number, each in enumerate(asked)]
    for client in clients:
        owner.clients[client.connection] = client
    for act, who, size in acts:
        client = clients[who]
        if act == "receive":
            client.receive(size + 1)
        elif act == "answer":
            client.answer()
        elif act == "early":
            client.release_early()
        elif act == "decode":
            client.decode()
        elif act in ("block", "unblock"):
            client.block(blocked=act == "block")
        else:
            owner.answer_quickly = act == "quick"
    for client in clients:
        client.block(blocked=False)
    going_on = True
    while going_on:
        going_on = False
        for client in clients:
            going_on |= client.receive(1 << 20)
            going_on |= client.answer()
    for client in clients:
        assert not client.stream, "bytes of a request were never read"
        wanted = b"".join(b"<" + body + b">" for body in client.bodies)
        assert bytes(client.transport.written) == wanted
    assert owner.memory.in_use_bytes == 0
