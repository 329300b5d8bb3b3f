"""TcpPeers: the connections of a node to other nodes, and their end."""

from __future__ import annotations

import threading

import pytest

from logstore.kafka.clustering import peers as module
from logstore.kafka.clustering.peers import TcpPeers


class Connecting:
    """A connection that is made while the peers are closed, to a node that never answers."""

    made: list[Connecting]
    connecting: threading.Event
    may_go_on: threading.Event

    def __init__(self, host: str, port: int, *, timeout: float) -> None:
        self.host, self.port, self.timeout = host, port, timeout
        self.closed = False
        self.asked = False
        self.made.append(self)
        self.connecting.set()
        assert self.may_go_on.wait(10)

    def request(self, key: int, version: int, body: object) -> dict[str, object]:
        self.asked = True
        return {}

    def close(self) -> None:
        self.closed = True


def test_a_connection_that_is_made_during_the_close_is_closed_and_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its request would hold the close up for as long as an answer may take."""
    Connecting.made = []
    Connecting.connecting, Connecting.may_go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(module, "KafkaPeer", Connecting)
    peers = TcpPeers(1, lambda node: ("127.0.0.1", 1))
    answers: list[object] = []
    peers.request(2, 3, 0, {}, answers.append)
    assert Connecting.connecting.wait(10)
    closing = threading.Thread(target=peers.close)
    closing.start()
    closing.join(0.1)
    Connecting.may_go_on.set()
    closing.join(10)
    assert not closing.is_alive()
    (made,) = Connecting.made
    assert (made.closed, made.asked, answers) == (True, False, [None])
