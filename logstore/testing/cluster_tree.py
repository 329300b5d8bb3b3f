"""ClusterTree: what the metadata tree of a cluster has, read by a test with a session of its own.

The test needs the truth, so it connects to ZooKeeper itself and not through a link of a node.
Needs the kazoo package.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

__all__ = ["ClusterTree", "PartitionState"]

T = TypeVar("T")
Key = tuple[str, int]

TIMEOUT = 60.0  # s
LOOK_SECONDS = 0.02
ANSWER_SECONDS = 5.0


class PartitionState(NamedTuple):
    """The state of a partition, as the tree has it; no leader is -1."""

    version: int
    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    elr: tuple[int, ...]


class ClusterTree:
    """Reads nodes, the controller and the states of partitions."""

    def __init__(self, connect: str, root: str) -> None:
        """`connect` is ZooKeeper's, without a chroot; `root` is the chroot of the cluster."""
        from kazoo.client import KazooClient
        from kazoo.retry import KazooRetry

        self.root = root
        self._errors = _session_errors()
        retry = KazooRetry(max_tries=-1, delay=0.05, max_delay=0.5)
        self._client = KazooClient(connect, timeout=10.0, connection_retry=retry)
        self._client.start(timeout=TIMEOUT)
        self._client.ensure_path(root)

    def __repr__(self) -> str:
        return f"<ClusterTree {self.root}>"

    def close(self) -> None:
        """End the session."""
        self._client.stop()
        self._client.close()

    # ---- what is there ----

    def nodes(self) -> set[int]:
        """Return the nodes that are registered."""
        return {int(name) for name in self._children("/brokers/ids")}

    def controller(self) -> int | None:
        """Return the node that is the controller."""
        found = self._json("/controller")
        return None if found is None else int(found[0]["brokerid"])

    def controller_epoch(self) -> int:
        """Return how many controllers there have been; 0 if there is none."""
        found = self._data(f"{self.root}/controller_epoch")
        return 0 if found is None else int(found[0])

    def partitions(self) -> dict[Key, tuple[int, ...]]:
        """Return the replicas of every partition."""
        found: dict[Key, tuple[int, ...]] = {}
        for topic in self._children("/brokers/topics"):
            row = self._json(f"/brokers/topics/{topic}")
            for number, replicas in (row[0]["partitions"] if row else {}).items():
                found[topic, int(number)] = tuple(replicas)
        return found

    def state(self, topic: str, partition: int = 0) -> PartitionState | None:
        """Return the state of a partition, or None if it has none yet."""
        row = self._json(f"/brokers/topics/{topic}/partitions/{partition}/state")
        if row is None:
            return None
        state, version = row
        elr = state.get("logstore", {}).get("elr", ())
        return PartitionState(
            version, state["leader"], state["leader_epoch"], tuple(state["isr"]), tuple(elr)
        )

    # ---- waiting ----

    def wait(self, look: Callable[[], T | None], what: str, timeout: float = TIMEOUT) -> T:
        """Return the first result of `look` that is not None or False.

        A look that fails because ZooKeeper is down counts as None.  Raise TimeoutError with `what`.
        """
        deadline = time.monotonic() + timeout
        while True:
            found: T | None
            try:
                found = look()
            except self._errors:
                found = None
            if found is not None and found is not False:
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}, after {timeout:g} s: {self.summary()}")
            time.sleep(LOOK_SECONDS)

    def await_leader(
        self, topic: str, partition: int = 0, *, after: int = -1, timeout: float = TIMEOUT
    ) -> PartitionState:
        """Wait until a partition has a leader of an epoch above `after`; return its state."""

        def look() -> PartitionState | None:
            state = self.state(topic, partition)
            led = state is not None and state.leader >= 0 and state.leader_epoch > after
            return state if led else None

        return self.wait(look, f"{topic}-{partition} has no leader above epoch {after}", timeout)

    def await_in_sync(self, timeout: float = TIMEOUT) -> None:
        """Wait until every partition has a leader and all its replicas in the ISR."""
        self.wait(lambda: not list(self.lagging()), "replicas are not in sync", timeout)

    def lagging(self) -> Iterator[tuple[Key, tuple[int, ...], PartitionState | None]]:
        """Yield the partitions without a leader or with a replica that is not in the ISR."""
        for key, replicas in self.partitions().items():
            state = self.state(*key)
            if state is None or state.leader < 0 or set(state.isr) != set(replicas):
                yield key, replicas, state

    def summary(self) -> str:
        """Return a line about the nodes, the controller and partitions that are not in sync."""
        try:
            rows = [f"{key} on {on}: {state}" for key, on, state in list(self.lagging())[:5]]
            return f"nodes {sorted(self.nodes())}, controller {self.controller()}, {rows}"
        except self._errors as error:
            return f"the tree cannot be read: {error!r}"

    # ---- reading ----

    def _data(self, path: str) -> tuple[bytes, int] | None:
        from kazoo.exceptions import NoNodeError

        try:
            # A call waits while the servers are down: give it an end.
            data, stat = self._client.get_async(path).get(timeout=ANSWER_SECONDS)
        except NoNodeError:
            return None
        return data, stat.version

    def _json(self, path: str) -> tuple[dict[str, Any], int] | None:
        found = self._data(self.root + path)
        return None if found is None else (json.loads(found[0]), found[1])

    def _children(self, path: str) -> list[str]:
        from kazoo.exceptions import NoNodeError

        try:
            answer = self._client.get_children_async(self.root + path)
            return sorted(answer.get(timeout=ANSWER_SECONDS))
        except NoNodeError:
            return []


def _session_errors() -> tuple[type[BaseException], ...]:
    """Return the errors of a session whose servers are down."""
    from kazoo.exceptions import ConnectionClosedError, ConnectionLoss, SessionExpiredError
    from kazoo.handlers.threading import KazooTimeoutError

    return ConnectionLoss, ConnectionClosedError, SessionExpiredError, KazooTimeoutError
