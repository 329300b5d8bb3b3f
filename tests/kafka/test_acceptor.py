"""Acceptor: limits of connections that hold for peers that connect at the same moment."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from unittest.mock import Mock

import pytest

from logstore import KafkaServer, Store
from logstore.kafka.network.acceptor import Acceptor, Pace, bind
from tests.kafka.peer import Peer
from tests.kafka.test_server import until

API_VERSIONS = 18


def connect_at_once(server: KafkaServer, count: int) -> list[Peer]:
    """Fill the backlog while the loop does not accept."""
    go = threading.Event()
    assert server._loop is not None
    server._loop.call_soon_threadsafe(go.wait, 20)
    peers = [Peer(server.address) for _ in range(count)]
    go.set()
    return peers


def answered(peer: Peer) -> bool:
    try:
        return bool(peer.ask(API_VERSIONS, 0, {})["error_code"] == 0)
    except (EOFError, OSError):
        return False


def test_the_limit_holds_for_peers_that_connect_at_the_same_moment(store: Store) -> None:
    with KafkaServer(store, config={"max.connections": 5}) as server:
        peers = connect_at_once(server, 40)
        assert server._broker is not None
        most = 0
        for peer in peers:  # each is accepted when one before it has ended
            assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
            most = max(most, server.connections)
            peer.socket.close()
        assert most <= 5
        assert server.metrics()["connections_accepted_total"] == 40


def test_the_limit_of_one_address_holds_for_peers_that_connect_at_the_same_moment(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logstore.kafka.server.is_loopback", lambda _: False)
    with KafkaServer(store, config={"max.connections.per.ip": 3}) as server:
        peers = connect_at_once(server, 20)
        assert sum(map(answered, peers)) == 3
        until(lambda: server.connections == 3)
        for peer in peers:
            peer.socket.close()
        until(lambda: server.connections == 0)
        with Peer(server.address) as peer:
            assert answered(peer), "there is place again"


def test_no_pause_outlives_the_acceptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that ends starts the acceptor before its pause is over; both are cancelled."""
    monkeypatch.setattr("logstore.kafka.network.acceptor.RETRY_FIRST", 0.01)

    class NoDescriptors:
        def __init__(self, real: socket.socket) -> None:
            self.real = real

        def accept(self) -> tuple[socket.socket, object]:
            raise OSError(errno.EMFILE, "Too many open files")

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

    loop = asyncio.new_event_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    try:
        [listener] = bind(["127.0.0.1:0"], 5)
        listener.socket = NoDescriptors(listener.socket)  # type: ignore[assignment]
        acceptor = Acceptor([listener], loop, Mock(), lambda _: True, Pace(10))
        for _ in range(2):
            acceptor.start()
            acceptor._accept(listener)
        acceptor.close()
        loop.run_until_complete(asyncio.sleep(0.1))
        acceptor.start()  # a connection that ends after the acceptor
    finally:
        loop.close()
    assert failures == []


def test_an_error_of_the_network_does_not_end_the_acceptor(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """accept reports errors of the connection that it would return: EPROTO, EHOSTUNREACH."""
    left = [errno.EPROTO, errno.EPERM]

    class Listening:
        def __init__(self, real: socket.socket) -> None:
            self.real = real

        def accept(self) -> tuple[socket.socket, object]:
            if left:
                raise OSError(left.pop(), "the network failed")
            return self.real.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

    start = Acceptor.start

    def started(acceptor: Acceptor) -> None:
        for listener in acceptor._listeners:
            if isinstance(listener.socket, socket.socket):
                listener.socket = Listening(listener.socket)  # type: ignore[assignment]
        start(acceptor)

    monkeypatch.setattr(Acceptor, "start", started)
    with KafkaServer(store) as server, Peer(server.address) as peer:
        assert answered(peer)
    assert not left
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []
