"""Connection: frames in any chunks, answers in order, bounded memory, without a socket."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.kafka.config import KafkaConfig
from logstore.kafka.network.connection import PIPELINE_MAX, REST_BYTES, Connection, Slot
from logstore.kafka.network.memory import Memory
from logstore.kafka.network.outgoing import NotCachedError, Outgoing

PRODUCE, FETCH, OTHER = 0, 1, 3


def frame(key: int, body: bytes = b"") -> bytes:
    data = struct.pack(">hhih", key, 0, 1, 0) + body
    return struct.pack(">i", len(data)) + data


class Transport(asyncio.Transport):
    """Takes what is written, and notes whether the connection reads."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.chunks: list[int] = []
        self.buffered = 0
        self.reading = True
        self.closing = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        if self.closing:
            return  # as asyncio does
        self.written += data
        self.chunks.append(len(data))

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close


class Owner:
    """Keeps the requests that begin, until the test answers them."""

    def __init__(self, *, memory_bytes: int = 1 << 22, **config: Any) -> None:
        self.memory = Memory(memory_bytes)
        self.unsent_bytes = 0
        self.limits = KafkaConfig(**config)
        self.begun: list[tuple[Connection, Slot, bytes]] = []
        self.answer_at_once = False
        self.answer_quickly = False
        self.lost: list[str] = []
        self.loads: list[tuple[Outgoing, Callable[[BaseException | None], object]]] = []

    def connected(self, connection: Connection) -> None:
        pass

    def disconnected(self, connection: Connection, reason: str) -> None:
        self.lost.append(reason)

    def answer_now(
        self, connection: Connection, key: int, buffer: bytearray, at: int, size: int
    ) -> tuple[bytes, ...] | None:
        if not self.answer_quickly:
            return None
        body = bytes(buffer[at + 10 : at + size])
        return (b"quick " + body,) if key == PRODUCE else (b"head ", body, b" tail")

    def begin(self, connection: Connection, slot: Slot, data: memoryview) -> None:
        self.begun.append((connection, slot, bytes(data)))
        if self.answer_at_once:
            connection.answer(slot, (bytes(data),))
            connection.release()

    def load(self, outgoing: Outgoing, done: Callable[[BaseException | None], object]) -> None:
        self.loads.append((outgoing, done))


def connect(owner: Owner, now: Callable[[], float] = lambda: 0.0) -> tuple[Connection, Transport]:
    transport = Transport()
    connection = Connection(owner, "PLAINTEXT", now)
    connection.connection_made(transport)
    return connection, transport


def receive(connection: Connection, transport: Transport, data: bytes) -> bytes:
    """Give the connection bytes as far as it reads; return the rest."""
    while data and transport.reading and not transport.closing:
        buffer = connection.get_buffer(-1)
        assert len(buffer), "asyncio does not take an empty buffer"
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        connection.buffer_updated(size)
        data = data[size:]
    return data


sizes = st.lists(st.sampled_from([0, 1, 100, 4000, 4096, 5000, 70_000, 300_000]), max_size=6)


@settings(max_examples=150)
@given(sizes=sizes, chunks=st.lists(st.integers(1, 100_000), min_size=1, max_size=8))
def test_any_chunks_give_the_same_requests(sizes: list[int], chunks: list[int]) -> None:
    owner = Owner()
    owner.answer_at_once = True
    connection, transport = connect(owner)
    bodies = [bytes([number + 65]) * size for number, size in enumerate(sizes)]
    stream = b"".join(frame(OTHER, body) for body in bodies)
    turn = 0
    while stream:
        size = chunks[turn % len(chunks)] if turn < 200 else 1 << 16
        turn += 1
        assert receive(connection, transport, stream[:size]) == b""
        stream = stream[size:]
    assert [data[10:] for _, _, data in owner.begun] == bodies
    assert bytes(transport.written) == b"".join(frame(OTHER, body)[4:] for body in bodies)
    assert owner.memory.in_use_bytes == 0


def test_a_connection_at_rest_holds_no_shared_memory() -> None:
    owner = Owner()
    owner.answer_at_once = True
    connection, transport = connect(owner)
    receive(connection, transport, frame(OTHER, bytes(200_000)))
    assert owner.memory.in_use_bytes == 0
    assert len(connection.get_buffer(-1)) == REST_BYTES


def test_a_size_costs_nothing_before_its_bytes_arrive() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, struct.pack(">ih", 50 << 20, PRODUCE))
    assert owner.memory.in_use_bytes == 0
    receive(connection, transport, bytes(REST_BYTES))
    assert owner.memory.in_use_bytes <= 1 << 20


@pytest.mark.parametrize("size", [-1, 0, 9, (100 << 20) + 1, 2**31 - 1])
def test_a_frame_of_a_size_that_cannot_be_closes_the_connection(size: int) -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, struct.pack(">ih", size, PRODUCE))
    assert transport.closing
    assert not owner.begun


def test_only_produce_may_be_large() -> None:
    owner = Owner(logstore_control_request_max_bytes=1 << 20)
    connection, transport = connect(owner)
    receive(connection, transport, struct.pack(">ih", (1 << 20) + 1, OTHER))
    assert transport.closing
    connection, transport = connect(owner)
    receive(connection, transport, struct.pack(">ih", (1 << 20) + 1, PRODUCE))
    assert not transport.closing


def test_one_request_at_a_time_and_reading_stops() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    left = receive(connection, transport, frame(OTHER, b"a") + frame(OTHER, bytes(9000)))
    assert len(owner.begun) == 1
    assert left, "more was read than the buffer of a connection at rest"
    assert not transport.reading
    _, slot, _ = owner.begun[0]
    connection.answer(slot, (b"first",))
    connection.release()
    assert transport.reading
    receive(connection, transport, left)
    assert len(owner.begun) == 2


def test_produce_requests_are_pipelined_and_answered_in_order() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    for number in range(PIPELINE_MAX + 3):
        receive(connection, transport, frame(PRODUCE, bytes([number])))
        if connection._busy:
            connection.release()  # its bytes are in the log
    assert len(owner.begun) == PIPELINE_MAX
    for number in reversed(range(PIPELINE_MAX)):
        connection.answer(owner.begun[number][1], (bytes([number]),))
    assert bytes(transport.written) == bytes(range(PIPELINE_MAX))
    assert len(owner.begun) > PIPELINE_MAX


def test_answers_of_produce_requests_that_arrive_together_are_sent_together() -> None:
    owner = Owner()
    owner.answer_at_once = True
    connection, transport = connect(owner)
    requests = [frame(PRODUCE, bytes([number])) for number in range(PIPELINE_MAX)]
    receive(connection, transport, b"".join(requests))
    assert bytes(transport.written) == b"".join(request[4:] for request in requests)
    assert len(transport.chunks) == 1
    assert connection.quiet


def test_answers_that_are_quick_leave_with_one_call_and_in_order() -> None:
    owner = Owner()
    owner.answer_quickly = True
    connection, transport = connect(owner)
    requests = [frame(PRODUCE, bytes([number])) for number in range(3 * PIPELINE_MAX)]
    receive(connection, transport, b"".join(requests))
    assert not owner.begun
    assert bytes(transport.written) == b"".join(b"quick %c" % n for n in range(3 * PIPELINE_MAX))
    assert len(transport.chunks) == 1
    assert connection.quiet


def test_quick_answers_in_pieces_keep_the_order() -> None:
    owner = Owner()
    owner.answer_quickly = True
    connection, transport = connect(owner)
    kinds = [PRODUCE, FETCH, FETCH, PRODUCE, PRODUCE, FETCH]
    receive(connection, transport, b"".join(frame(key, b"%d" % n) for n, key in enumerate(kinds)))
    for number in range(len(kinds)):  # a Produce after a Fetch is begun before that is sent
        for _, slot, data in owner.begun:
            if data.endswith(b"%d" % number):
                connection.release()
                connection.answer(slot, (b"quick %d" % number,))
    expected = [b"quick %d" if key == PRODUCE else b"head %d tail" for key in kinds]
    assert bytes(transport.written) == b"".join(text % n for n, text in enumerate(expected))
    assert connection.quiet


def test_no_answer_is_quick_while_one_before_it_waits() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, frame(PRODUCE, b"1"))
    connection.release()
    owner.answer_quickly = True
    receive(connection, transport, frame(PRODUCE, b"2"))
    assert len(owner.begun) == 2
    connection.release()
    connection.answer(owner.begun[1][1], (b"second",))
    assert not transport.written
    connection.answer(owner.begun[0][1], (b"first ",))
    assert bytes(transport.written) == b"first second"
    receive(connection, transport, frame(PRODUCE, b"3"))
    assert bytes(transport.written) == b"first secondquick 3"


def test_no_answer_is_quick_while_the_peer_does_not_read() -> None:
    owner = Owner()
    owner.answer_quickly = True
    connection, transport = connect(owner)
    connection.pause_writing()
    receive(connection, transport, frame(PRODUCE, b"1"))
    assert len(owner.begun) == 1
    assert not transport.written


def test_a_quick_answer_is_sent_before_a_wrong_frame_closes_the_connection() -> None:
    owner = Owner()
    owner.answer_quickly = True
    connection, transport = connect(owner)
    receive(connection, transport, frame(PRODUCE, b"1") + b"\x7f" * 20)
    assert bytes(transport.written) == b"quick 1"
    assert transport.closing


def test_another_request_waits_for_the_answers_of_produce() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, frame(PRODUCE) + frame(OTHER))
    connection.release()
    assert len(owner.begun) == 1
    connection.answer(owner.begun[0][1], (b"p",))
    assert len(owner.begun) == 2


def test_connections_wait_for_memory_in_turn() -> None:
    owner = Owner(memory_bytes=1 << 20)
    peers = [connect(owner) for _ in range(3)]
    large = frame(PRODUCE, bytes(900_000))
    left = [receive(connection, transport, large) for connection, transport in peers]
    assert [bool(rest) for rest in left] == [False, True, True]
    for number in range(3):
        connection, slot, _ = owner.begun[number]
        assert connection is peers[number][0]
        connection.answer(slot, ())
        connection.release()
        if number < 2:
            receive(*peers[number + 1], left[number + 1])
    assert len(owner.begun) == 3
    assert owner.memory.in_use_bytes == 0


def test_a_lost_connection_gives_its_memory_back_when_its_request_has_ended() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, frame(PRODUCE, bytes(200_000)))
    cancelled: list[bool] = []
    owner.begun[0][1].cancel = lambda: cancelled.append(True)
    connection.connection_lost(None)
    assert cancelled == [True]
    assert owner.memory.in_use_bytes > 0, "a handler may still read the bytes"
    connection.answer(owner.begun[0][1], (b"late",))
    connection.release()
    assert owner.memory.in_use_bytes == 0
    assert not transport.written


def test_a_waiting_connection_that_is_lost_lets_the_next_one_go_on() -> None:
    owner = Owner(memory_bytes=1 << 20)
    first, second, third = (connect(owner) for _ in range(3))
    large = frame(PRODUCE, bytes(900_000))
    receive(*first, large)
    receive(*second, large)
    left = receive(*third, large)
    second[0].connection_lost(None)
    first[0].answer(owner.begun[0][1], ())
    first[0].release()
    assert third[1].reading
    receive(*third, left)
    assert owner.begun[-1][0] is third[0]


def test_a_frame_above_the_whole_budget_is_read_alone() -> None:
    """Its buffer grows with its bytes: the smaller buffer that it holds must not stop it."""
    owner = Owner(memory_bytes=1 << 20)
    large, other = connect(owner), connect(owner)
    assert receive(*large, frame(PRODUCE, bytes(5 << 20))) == b""
    [(connection, slot, _)] = owner.begun
    left = receive(*other, frame(PRODUCE, bytes(100_000)))
    assert left, "nothing else is read in the meantime"
    connection.answer(slot, ())
    connection.release()
    assert receive(*other, left) == b""
    assert len(owner.begun) == 2


def test_frames_that_grow_together_do_not_wait_for_each_other() -> None:
    """Each holds a part of the budget and wants more; one goes on alone, above the budget."""
    owner = Owner(memory_bytes=4 << 20)
    owner.answer_at_once = True
    size, peers = 3 << 20, [connect(owner) for _ in range(8)]
    left = {peer: frame(PRODUCE, bytes(size)) for peer in peers}
    for _ in range(1000):
        for peer in peers:
            chunk = left[peer][: 1 << 16]
            taken = len(chunk) - len(receive(*peer, chunk))
            left[peer] = left[peer][taken:]
        if len(owner.begun) == len(peers):
            break
    assert len(owner.begun) == len(peers)
    assert owner.memory.in_use_bytes == owner.memory.waiting == 0
    assert owner.memory.peak_bytes <= (4 << 20) + 2 * size, "one frame above the budget"


def test_a_thousand_connections_that_wait_for_memory_go_on_one_after_the_other() -> None:
    """Each gives a buffer back while it is served: that must not become a recursion."""
    memory = Memory(1 << 20)
    spent = memory.take(1 << 20, print)
    assert spent is not None
    for _ in range(1500):
        assert memory.take(5000, memory.give_back) is None
    memory.give_back(spent)
    assert memory.waiting == memory.in_use_bytes == 0


def test_the_time_that_a_connection_waits_for_memory_is_not_the_peers() -> None:
    owner = Owner(memory_bytes=1 << 20)
    time = 0.0
    first, second = (connect(owner, lambda: time) for _ in range(2))
    receive(*first, frame(PRODUCE, bytes(900_000)))
    left = receive(*second, frame(PRODUCE, bytes(900_000)))
    time = 100.0
    second[0].check_time(time)
    assert not second[1].closing, "it waits"
    first[0].answer(owner.begun[0][1], ())
    first[0].release()
    second[0].check_time(time + 29)
    assert not second[1].closing
    second[0].check_time(time + 31)
    assert second[1].closing, "now it is slow"
    assert left


def test_a_request_that_is_decoded_holds_no_shared_memory_while_it_waits() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, frame(OTHER, bytes(200_000)) + frame(OTHER, b"next")[:9])
    assert owner.memory.in_use_bytes
    connection.decoded()
    assert owner.memory.in_use_bytes == 0
    receive(connection, transport, frame(OTHER, b"next")[9:])
    assert len(owner.begun) == 1, "still one at a time"
    connection.answer(owner.begun[0][1], (b"first",))
    connection.release()
    assert owner.begun[1][2][10:] == b"next"


def test_what_is_read_ahead_does_not_grow_while_answers_wait() -> None:
    """Whole requests wait for the answers of Produce: the buffer is full, and stays as it is."""
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, frame(PRODUCE) + frame(OTHER, b"x" * 100) * 1000)
    for _ in range(3):
        connection.release()
        assert not transport.reading
    assert owner.memory.in_use_bytes == 0


class SlowSlice:
    """Bytes that are in no cache the first time."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)
        self.cached = False

    def read(self, at: int, size: int, *, wait: bool) -> bytes:
        if not self.cached and not wait:
            raise NotCachedError
        return self.data[at : at + size]


def test_records_that_are_not_cached_are_read_by_another_thread() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, frame(OTHER))
    connection.answer(owner.begun[0][1], (b"head", SlowSlice(b"x" * 100_000), b"tail"))
    assert bytes(transport.written) == b"head"
    while owner.loads:
        outgoing, done = owner.loads.pop()
        outgoing.load()
        done(None)
    assert bytes(transport.written) == b"head" + b"x" * 100_000 + b"tail"


def test_a_peer_that_does_not_read_holds_one_chunk() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, frame(OTHER))
    slice_ = SlowSlice(b"x" * (5 << 20))
    slice_.cached = True
    connection.pause_writing()
    connection.answer(owner.begun[0][1], (b"head", slice_))
    assert not transport.written
    connection.resume_writing()
    assert len(transport.written) == (5 << 20) + 4


def test_many_peers_that_do_not_read_hold_small_chunks() -> None:
    owner = Owner()
    stuck = [connect(owner) for _ in range(3)]
    for connection, transport in stuck:
        transport.buffered = 30 << 20
        connection.pause_writing()
    assert owner.unsent_bytes == 90 << 20
    connection, transport = connect(owner)
    large = SlowSlice(b"x" * (1 << 20))
    large.cached = True
    for expected in (64 << 10, 1 << 20):
        transport.chunks.clear()
        receive(connection, transport, frame(OTHER))
        connection.answer(owner.begun[-1][1], (b"head", large))
        connection.release()
        assert max(transport.chunks) == expected
        stuck[0][0].resume_writing()
        stuck[1][0].connection_lost(None)
        assert owner.unsent_bytes == 30 << 20
    assert bytes(transport.written) == (b"head" + large.data) * 2


BEGUN = struct.pack(">ih", 256, OTHER)  # a frame that is not whole


@pytest.mark.parametrize(
    ("began", "later", "closes"),
    [(b"", 599.0, False), (b"", 601.0, True), (BEGUN, 29.0, False), (BEGUN, 31.0, True)],
)
def test_idle_and_slow_peers_are_closed(began: bytes, later: float, closes: bool) -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, began)
    connection.check_time(later)
    assert transport.closing is closes


def test_a_connection_that_finishes_begins_no_further_request() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, frame(OTHER, b"a") + frame(OTHER, b"b"))
    assert not connection.finished
    connection.finish()
    assert not transport.reading
    connection.answer(owner.begun[0][1], (b"first",))
    connection.release()
    assert len(owner.begun) == 1
    assert bytes(transport.written) == b"first"
    assert connection.finished
    assert not transport.reading


def test_a_request_that_rests_does_not_hold_the_end_up() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, frame(OTHER))
    assert not connection.finished
    owner.begun[0][1].resting = True
    assert connection.finished
    assert not connection.quiet, "it is not idle either"


def test_a_closed_connection_gives_the_memory_of_a_refused_request_back() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, frame(PRODUCE, bytes(200_000)) + frame(OTHER))
    connection.close("malformed")
    connection.release()
    assert len(owner.begun) == 1, "what follows is not begun"
    connection.connection_lost(None)
    assert owner.memory.in_use_bytes == 0


@pytest.mark.parametrize(("later", "lets_go"), [(59.0, False), (61.0, True)])
def test_a_closed_connection_whose_peer_does_not_read_is_let_go(
    later: float, lets_go: bool
) -> None:
    aborted: list[bool] = []
    owner = Owner()
    connection, transport = connect(owner)
    transport.abort = lambda: aborted.append(True)  # type: ignore[method-assign]
    connection.close("size")
    connection.check_time(later)
    assert bool(aborted) is lets_go


def test_what_a_peer_has_produced_is_appended_after_it_has_closed() -> None:
    """A client with acks=0 closes its socket as soon as it has sent its records."""
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, frame(PRODUCE, b"a") + frame(PRODUCE, b"b"))
    assert connection.eof_received()
    for number in range(2):
        _, slot, data = owner.begun[number]
        assert data[10:] == (b"a", b"b")[number]
        assert not transport.closing
        connection.answer(slot, ())
        connection.release()
    assert transport.closing
    assert len(owner.begun) == 2


def test_a_peer_that_has_closed_waits_for_no_other_request() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    receive(connection, transport, frame(OTHER))
    assert not connection.eof_received(), "asyncio closes the socket"
    connection, transport = connect(owner)
    receive(connection, transport, frame(PRODUCE) + frame(OTHER))
    assert connection.eof_received()
    connection.answer(owner.begun[-1][1], ())
    connection.release()
    assert transport.closing
    assert len(owner.begun) == 2
