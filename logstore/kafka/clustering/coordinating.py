"""Coordinating: the coordinators of groups and transactions move with the leaders.

The coordinator of a group or a transactional id is the leader of the partition of an internal topic
that its name is hashed to.  A partition is loaded when this node leads it and everything that was
in its log when the epoch began is committed: then no record that was read can be cut.  It is
dropped when the leadership ends.  One thread loads and drops, so that a load does not keep the
listener or the node from their work.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS, TRANSACTION_STATE
from logstore.coordinators.quorum.quorum import Coordination
from logstore.coordinators.transaction_coordinator import Transactions
from logstore.errors import ClosedError, LogStoreError
from logstore.kafka.clustering.peers import TcpPeers
from logstore.kafka.clustering.replicated_quorum import ProducerIdBlocks, ReplicatedQuorum
from logstore.replication.machines.image import Key
from logstore.replication.node import Node

__all__ = ["Coordinating"]

log = logging.getLogger("logstore.kafka")

TOPICS = (CONSUMER_OFFSETS, TRANSACTION_STATE)
DELETED = -1  # in the place of a partition's number


class Coordinating:
    """Loads and drops the coordinators of one node."""

    def __init__(self, node: Node, peers: TcpPeers) -> None:
        self._node = node
        self.quorum = ReplicatedQuorum(node, peers)
        ids = ProducerIdBlocks(node)
        Coordination.of(node.store).replace(self.quorum, ids.take)
        self._loaded: dict[Key, int] = {}  # epochs; of the thread only
        # Ids of deleted topics that were seen; of the node's thread only.
        self._deleted: set[str] | None = None
        self._changed: queue.SimpleQueue[Key | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"logstore node {node.id} coordinators", daemon=True
        )
        node.listen(self._heard)

    def start(self) -> None:
        """Load what this node leads, from now on."""
        self._thread.start()
        for key in self._node.leads():
            self._heard(key, "role")

    def _heard(self, key: Key, what: str) -> None:
        if what == "deleted":
            self._see_deleted()
        elif key[0] in TOPICS and what in ("role", "hw") and self._is_due(key):
            self._changed.put(key)

    def _see_deleted(self) -> None:
        """Have the offsets of deleted topics forgotten: a new one with the name has none.

        Only once for each, and not for those that were listed before this node started: the tree
        lists a deleted topic until all of its nodes have deleted it, and there may be a new one.
        """
        listed = {each: str(row.get("name")) for each, (row, _) in self._node.image.deleted.items()}
        seen, self._deleted = self._deleted, set(listed)
        for topic_id in listed.keys() - (listed if seen is None else seen):
            self._changed.put((listed[topic_id], DELETED))

    def _is_due(self, key: Key) -> bool:
        """Whether a partition has to be loaded or dropped.  Cheap: called for every commit."""
        return self._wanted(key) != self._loaded.get(key)

    def _wanted(self, key: Key) -> int | None:
        """Return the epoch in which a partition is to be loaded; None if it is not to be."""
        replica = self._node.replica(key)
        leader = None if replica is None else replica.machine.leader
        if leader is None or not leader.is_settled:
            return None
        return leader.view.leader_epoch

    def _run(self) -> None:
        while True:
            key = self._changed.get()
            if key is None:
                return
            try:
                self._follow(key)
            except ClosedError:
                return
            except (LogStoreError, OSError) as error:
                log.error("%s-%d: its coordinator cannot be loaded: %s", *key, error)

    def _follow(self, key: Key) -> None:
        if key[1] == DELETED:
            GroupCoordinator.of(self._node.store).book.forget_topic(key[0])
            return
        wanted, loaded = self._wanted(key), self._loaded.get(key)
        if wanted == loaded:
            return
        load, drop = self._coordinator(key[0])
        if loaded is not None:
            drop(key[1], loaded)
            del self._loaded[key]
        if wanted is not None and load(key[1], wanted):
            self._loaded[key] = wanted
            if self._wanted(key) != wanted:  # it has changed during the load
                self._changed.put(key)

    def _coordinator(
        self, topic: str
    ) -> tuple[Callable[[int, int], bool], Callable[[int, int], bool]]:
        if topic == TRANSACTION_STATE:
            transactions = Transactions.of(self._node.store)
            return transactions.load, transactions.drop
        groups = GroupCoordinator.of(self._node.store)
        return groups.load, groups.drop

    def close(self) -> None:
        """End the thread."""
        self._changed.put(None)
        if self._thread.is_alive():
            self._thread.join()
