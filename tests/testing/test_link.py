"""Link: what passes in each mode, and what a heal delivers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from logstore.testing.link import Link, Links

SHORT = 0.15  # s: nothing arrives in this time, if nothing is to pass
LONG = 20.0


class Echo:
    """A server that answers every piece with the same bytes; it remembers what arrived."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.got = bytearray()
        self.ends: list[str] = []
        self.connections: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            thread = threading.Thread(target=self._echo, args=[connection], daemon=True)
            self.threads.append(thread)
            thread.start()

    def _echo(self, connection: socket.socket) -> None:
        try:
            while piece := connection.recv(65536):
                self.got += piece
                connection.sendall(piece)
            self.ends.append("closed")
        except OSError:
            self.ends.append("reset")
        connection.close()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(LONG)


@pytest.fixture
def echo() -> Iterator[Echo]:
    started = Echo()
    yield started
    started.close()


@pytest.fixture
def links() -> Iterator[Links]:
    with Links() as made:
        yield made


@pytest.fixture
def link(links: Links, echo: Echo) -> Link:
    return links.link(echo.address)


def connect(link: Link) -> socket.socket:
    host, port = link.address.split(":")
    return socket.create_connection((host, int(port)), timeout=LONG)


def received(client: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        piece = client.recv(size - len(got))
        assert piece, f"closed after {got!r}"
        got += piece
    return got


def nothing_arrives(client: socket.socket) -> None:
    client.settimeout(SHORT)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(LONG)


def until(true: object, what: str) -> None:
    deadline = time.monotonic() + LONG
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_bytes_pass_both_ways_and_are_counted(link: Link, echo: Echo) -> None:
    data = bytes(range(256)) * 40_000  # more than a connection keeps
    with connect(link) as client:
        sender = threading.Thread(target=client.sendall, args=[data])
        sender.start()
        assert received(client, len(data)) == data
        sender.join()
    assert link.passed == (len(data), len(data))
    assert link.accepted == 1
    until(lambda: echo.ends == ["closed"], "the end passes too")


def test_the_answer_to_a_half_close_passes(link: Link) -> None:
    with connect(link) as client:
        client.sendall(b"last")
        client.shutdown(socket.SHUT_WR)
        assert received(client, 4) == b"last"
        assert client.recv(1) == b""


def test_a_drop_keeps_bytes_until_the_heal(link: Link, echo: Echo) -> None:
    with connect(link) as client:
        client.sendall(b"a")
        assert received(client, 1) == b"a"
        link.drop()
        client.sendall(b"b")
        nothing_arrives(client)
        assert echo.got == b"a"
        link.heal()
        assert received(client, 1) == b"b"


def test_a_drop_of_one_way(link: Link, echo: Echo) -> None:
    with connect(link) as client:
        client.sendall(b"a")
        assert received(client, 1) == b"a"
        link.drop("there")
        client.sendall(b"b")
        echo.connections[0].sendall(b"pushed")
        assert received(client, 6) == b"pushed"
        assert echo.got == b"a"
        link.heal()
        assert received(client, 1) == b"b"


def test_half_open_passes_requests_and_no_answers(link: Link, echo: Echo) -> None:
    with connect(link) as client:
        client.sendall(b"a")
        assert received(client, 1) == b"a"
        link.half_open()
        client.sendall(b"b")
        until(lambda: echo.got == b"ab", "the request")
        nothing_arrives(client)
        assert link.mode == "half-open"
        link.heal()
        assert received(client, 1) == b"b"


def test_the_end_of_a_target_is_kept_by_a_drop(link: Link, echo: Echo) -> None:
    with connect(link) as client:
        client.sendall(b"a")
        assert received(client, 1) == b"a"
        link.drop()
        echo.connections[0].shutdown(socket.SHUT_RDWR)
        nothing_arrives(client)
        link.heal()
        assert client.recv(1) == b""


def test_a_connection_made_during_a_drop_reaches_the_target_after_the_heal(
    link: Link, echo: Echo
) -> None:
    link.drop()
    with connect(link) as client, connect(link) as gone:
        client.sendall(b"late")
        gone.sendall(b"never")
        nothing_arrives(client)
        gone.close()
        assert echo.connections == []
        time.sleep(SHORT)  # the link notices that the second client has closed
        link.heal()
        assert received(client, 4) == b"late"
    assert echo.got == b"late"
    assert len(echo.connections) == 1


def test_a_delay_keeps_the_order_and_is_not_added_up(link: Link) -> None:
    with connect(link) as client:
        client.sendall(b"-")
        assert received(client, 1) == b"-"
        link.delay(0.2)
        began = time.monotonic()
        for number in range(20):
            client.sendall(b"%02d" % number)
            time.sleep(0.01)
        assert received(client, 40) == b"".join(b"%02d" % number for number in range(20))
        assert time.monotonic() - began >= 0.4  # there and back; no upper bound on a busy machine


def test_a_reset_ends_connections_and_refuses_new_ones(link: Link, echo: Echo) -> None:
    with connect(link) as client:
        client.sendall(b"a")
        assert received(client, 1) == b"a"
        link.reset()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        until(lambda: echo.ends == ["reset"], "the target is reset too")
    with pytest.raises(ConnectionError), connect(link) as other:
        other.sendall(b"x")
        assert other.recv(1) == b"", "an end is not a reset"
    link.heal()
    with connect(link) as client:
        client.sendall(b"b")
        assert received(client, 1) == b"b"


def test_a_target_that_is_down_resets_the_client(links: Links) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    link = links.link(address)
    with pytest.raises(ConnectionError), connect(link) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"", "an end is not a reset"


def test_a_close_resets_what_a_drop_keeps(echo: Echo) -> None:
    links = Links()
    link = links.link(echo.address)
    with connect(link) as old:
        old.sendall(b"a")
        assert received(old, 1) == b"a"
        link.drop()
        with connect(link) as waiting:
            links.close()
            links.close()
            for each in (old, waiting):
                with pytest.raises(ConnectionResetError):
                    each.recv(1)
