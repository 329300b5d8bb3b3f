"""LocalPeers: the thread that copies what a follower has to catch up."""

from __future__ import annotations

import threading

import pytest

from logstore.replication.hosting.local_peers import LocalNetwork
from logstore.replication.machines.follower import Fetched
from logstore.replication.peers import FetchRequest, LeaderOffsets


class Leader:
    """Answers every fetch at once, with bytes."""

    def serve_fetch(self, request, done, waits=None):
        done({("orders", 0): Fetched(0, raw=b"batches")})

    def serve_offsets(self, request):
        return LeaderOffsets(0)


def test_peers_can_be_closed_while_their_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    network = LocalNetwork()
    network.members = {1: Leader(), 2: Leader()}
    peers = network.peers(2)
    errors: list[BaseException] = []
    closing: list[threading.Thread] = []
    start = threading.Thread.start

    def close() -> None:
        try:
            peers.close()
        except RuntimeError as error:
            errors.append(error)

    def closed_before_it_starts(thread: threading.Thread) -> None:
        other = threading.Thread(target=close)
        closing.append(other)
        start(other)
        other.join(0.2)
        start(thread)

    answered = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", closed_before_it_starts)
        peers.fetch(1, FetchRequest(2, 0, 0, 1 << 20, ()), lambda found: answered.set())
    (closer,) = closing
    closer.join(10)
    assert not closer.is_alive()
    assert not errors
