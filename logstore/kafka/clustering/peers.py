"""TcpPeers: the other nodes of a cluster, over Kafka's protocol.

Each node that is asked has a few channels: a thread with one connection and one request under way.
Fetches, which wait at the leader, have a channel of their own.  The answer is passed on by the
channel's thread.  A connection that fails is made again with the next request; the request that
failed is answered with None.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from logstore.kafka.client import KafkaPeer, PeerGoneError
from logstore.kafka.clustering.replica_fetch import FETCH_VERSION, fetch_answers, fetch_body
from logstore.replication.hosting.later import run_later
from logstore.replication.peers import (
    Fetches,
    FetchRequest,
    LeaderOffsets,
    OffsetsRequest,
)

__all__ = ["TcpPeers"]

log = logging.getLogger("logstore.kafka")

FETCH, LIST_OFFSETS = 1, 2
LIST_OFFSETS_VERSION = 7
LATEST, EARLIEST = -1, -2
CONNECT_SECONDS = 5.0
LATE_SECONDS = 5.0  # that the answer to a fetch may be late

Call = Callable[[KafkaPeer | None], None]


class _Channel:
    """One connection to a node, and the thread that uses it."""

    def __init__(
        self, name: str, address: Callable[[], tuple[str, int] | None], timeout: float
    ) -> None:
        self._address = address
        self._timeout = timeout
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._peer: KafkaPeer | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, call: Call) -> None:
        """Have a call made with the connection, or with None if there is none."""
        self._calls.put(call)

    def _connected(self) -> KafkaPeer | None:
        address = self._address()
        peer = self._peer
        if peer is not None and not peer.closed and address == (peer.host, peer.port):
            return peer
        if peer is not None:
            peer.close()
        self._peer = None
        if address is None or self._closed:
            return None
        try:
            made = KafkaPeer(*address, timeout=min(self._timeout, CONNECT_SECONDS))
        except PeerGoneError as error:
            log.info("%s", error)
            return None
        made.timeout = self._timeout
        self._peer = made
        # `close` sets `_closed` before it looks at `_peer`, so one of both sees the other.
        if self._closed:
            made.close()  # type: ignore[unreachable]
            return None
        return made

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                break
            try:
                call(None if self._closed else self._connected())
                run_later()
            except Exception:
                log.exception("the answer of another node could not be used")
        if self._peer is not None:
            self._peer.close()

    def close(self) -> None:
        """End the request under way and the thread; calls that wait get None."""
        self._closed = True
        peer = self._peer
        if peer is not None:
            peer.close()
        self._calls.put(None)

    def join(self) -> None:
        """Wait for the thread."""
        if self._thread is not threading.current_thread():
            self._thread.join()


class TcpPeers:
    """Sends the requests of one node to the others; see `Peers`."""

    direct = False

    def __init__(
        self, node: int, address: Callable[[int], tuple[str, int] | None], timeout: float = 30.0
    ) -> None:
        """``address(node)`` is where another node listens; None: it is not registered."""
        self._node = node
        self._address = address
        self._timeout = timeout
        self._lock = threading.Lock()
        self._channels: dict[tuple[int, str], _Channel] = {}
        self._closed = False

    def _channel(self, node: int, purpose: str) -> _Channel | None:
        with self._lock:
            if self._closed:
                return None
            found = self._channels.get((node, purpose))
            if found is None:
                name = f"logstore node {self._node} {purpose} {node}"
                found = _Channel(name, lambda: self._address(node), self._timeout)
                self._channels[node, purpose] = found
            return found

    def _ask(
        self,
        node: int,
        purpose: str,
        ask: Callable[[KafkaPeer], Any],
        done: Callable[[Any], None],
    ) -> None:
        """Have `ask` called with a connection, and `done` with its result, or with None."""

        def call(peer: KafkaPeer | None) -> None:
            found = None
            if peer is not None:
                try:
                    found = ask(peer)
                except PeerGoneError as error:
                    log.warning("node %d: %s", self._node, error)
            done(found)

        channel = self._channel(node, purpose)
        if channel is None:
            done(None)
        else:
            channel.call(call)

    def fetch(
        self, leader: int, request: FetchRequest, done: Callable[[Fetches | None], None]
    ) -> None:
        """Fetch from a leader."""

        def ask(peer: KafkaPeer) -> Fetches:
            version = peer.version(FETCH, FETCH_VERSION, FETCH_VERSION)
            # A leader answers after `max_wait_ms`.  One that does not is asked again soon, because
            # the high watermark of all its partitions waits for this follower.
            timeout = min(self._timeout, request.max_wait_ms / 1000 + LATE_SECONDS)
            answer = peer.request(FETCH, version, fetch_body(request), timeout=timeout)
            return fetch_answers(request, answer)

        self._ask(leader, "fetches from", ask, done)

    def offsets(
        self, leader: int, request: OffsetsRequest, done: Callable[[LeaderOffsets | None], None]
    ) -> None:
        """Ask a leader for the offsets of its log."""

        def ask(peer: KafkaPeer) -> LeaderOffsets:
            found = []
            for when in (EARLIEST, LATEST):
                row = {
                    "partition_index": request.key[1],
                    "current_leader_epoch": request.leader_epoch,
                    "timestamp": when,
                }
                body = {
                    "replica_id": request.node,
                    "isolation_level": 0,
                    "topics": [{"name": request.key[0], "partitions": [row]}],
                }
                answer = peer.request(LIST_OFFSETS, LIST_OFFSETS_VERSION, body)
                (answered,) = answer["topics"][0]["partitions"]
                if answered["error_code"]:
                    return LeaderOffsets(answered["error_code"])
                found.append(answered["offset"])
            return LeaderOffsets(0, *found)

        self._ask(leader, "asks", ask, done)

    def request(
        self,
        node: int,
        key: int,
        version: int,
        body: dict[str, Any],
        done: Callable[[dict[str, Any] | None], None],
    ) -> None:
        """Send any request to a node; `done` gets the answer, or None."""
        self._ask(node, "asks", lambda peer: peer.request(key, version, body), done)

    def close(self) -> None:
        """Break all requests."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()
        for channel in channels:
            channel.join()
