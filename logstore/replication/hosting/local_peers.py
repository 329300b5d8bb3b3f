"""LocalNetwork: connects the nodes of one process.

A fetch that waits at a leader is answered by the thread that appended: the records are copied to
the followers in that thread, without a change of threads.  A fetch that finds records at once
belongs to a follower that has to catch up: it is answered by a thread of the follower's node, so
that nothing else waits for a long copy.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from logstore.replication.hosting.later import run_later
from logstore.replication.peers import (
    Fetches,
    FetchRequest,
    LeaderOffsets,
    OffsetsRequest,
)

__all__ = ["LocalNetwork", "LocalPeers"]

log = logging.getLogger("logstore.replication")


class _Member(Protocol):
    def serve_fetch(
        self,
        request: FetchRequest,
        done: Callable[[Fetches], object],
        waits: Callable[[Callable[[], object]], object] | None = None,
    ) -> None: ...
    def serve_offsets(self, request: OffsetsRequest) -> LeaderOffsets: ...


class LocalNetwork:
    """The nodes that can be reached.

    For tests: links between two nodes may be `cut`, and with ``direct=False`` a node has one fetch
    under way to each leader, as over TCP.
    """

    def __init__(self, *, direct: bool = True) -> None:
        self.direct = direct
        self.members: dict[int, _Member] = {}
        self.cut: set[frozenset[int]] = set()

    def peers(self, node: int) -> LocalPeers:
        """Return the peers of a node."""
        return LocalPeers(self, node)

    def reach(self, source: int, target: int) -> _Member | None:
        """Return a node that can be reached from another, else None."""
        if frozenset((source, target)) in self.cut or source not in self.members:
            return None
        return self.members.get(target)


class LocalPeers:
    """The other nodes of this process; see `Peers`."""

    def __init__(self, network: LocalNetwork, node: int) -> None:
        self._network = network
        self._node = node
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._closed = False

    @property
    def direct(self) -> bool:
        """Whether each partition is fetched by a request of its own."""
        return self._network.direct

    def fetch(
        self, leader: int, request: FetchRequest, done: Callable[[Fetches | None], None]
    ) -> None:
        """Fetch from a leader of this process."""
        network, node = self._network, self._node
        target = network.reach(node, leader)
        if target is None or self._closed:
            done(None)
            return
        waited = False

        def waits(wake: Callable[[], object]) -> None:
            nonlocal waited
            waited = True

        def answered(answers: Fetches) -> None:
            # The link may have been cut, or the leader may have died, while the fetch waited.
            found = answers if network.reach(node, leader) is target else None
            if waited or found is None or not any(each.raw for each in found.values()):
                done(found)
            else:
                self._call(lambda: done(found))

        target.serve_fetch(request, answered, waits)

    def offsets(
        self, leader: int, request: OffsetsRequest, done: Callable[[LeaderOffsets | None], None]
    ) -> None:
        """Ask a leader of this process for its offsets."""
        target = self._network.reach(self._node, leader)
        done(None if target is None else target.serve_offsets(request))

    def _call(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"logstore node {self._node} fetcher", daemon=True
                )
                self._thread.start()  # with the lock held: `close` can join only a started thread
        self._calls.put(call)

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            try:
                call()
                run_later()
            except Exception:
                log.exception("node %d: the answer to a fetch failed", self._node)

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._calls.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
