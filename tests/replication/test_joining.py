"""Nodes that join a new cluster at the same time: all of them get the id of the fastest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import logstore
from logstore.errors import MetadataUnavailableError
from logstore.replication.embedded import EmbeddedMetadata, EmbeddedTree
from logstore.replication.hosting.local_peers import LocalNetwork
from logstore.replication.machines.image import CLUSTER_ID
from logstore.replication.node import Node


class LateSession(EmbeddedMetadata):
    """A session whose mirror gets the cluster id late: with the next sync, or never."""

    def __init__(self, tree: EmbeddedTree, *, never: bool = False) -> None:
        super().__init__(tree)
        self.never = never
        self.synced = False

    def read(self, path: str) -> tuple[bytes, int] | None:
        return None if path == CLUSTER_ID and not self.synced else super().read(path)

    def sync(self, done: Callable[[], None]) -> None:
        def synced() -> None:
            self.synced = not self.never
            done()

        super().sync(synced)


def started(directory: Path, session: Callable[[], EmbeddedMetadata], number: int) -> Node:
    store = logstore.open(directory / str(number), durability="os")
    peers = LocalNetwork().peers(number)
    node = Node(store, node_id=number, metadata=session, peers=peers)
    node.start(timeout=5)
    return node


def test_a_node_that_is_slower_gets_the_id_of_the_cluster_and_not_an_empty_one(
    tmp_path: Path,
) -> None:
    with EmbeddedTree() as tree:
        first = started(tmp_path, tree.session, 1)
        second = started(tmp_path, lambda: LateSession(tree), 2)
        assert second.store.identity.cluster_id == first.store.identity.cluster_id != ""
        for node in (first, second):
            node.close()
            node.store.close()


def test_a_node_that_cannot_read_the_id_does_not_start(tmp_path: Path) -> None:
    with EmbeddedTree() as tree:
        first = started(tmp_path, tree.session, 1)
        with pytest.raises(MetadataUnavailableError, match="did not show a cluster id"):
            started(tmp_path, lambda: LateSession(tree, never=True), 2)
        with logstore.open(tmp_path / "2", durability="os") as store:
            assert store.identity.cluster_id not in ("", first.store.identity.cluster_id)
        first.close()
        first.store.close()
