"""Tree: the nodes of a metadata tree in memory, and what ops do to them.

A tree is a dict from path to Node, with "/" always in it.  `outcome_of` and `ending_of` change
nothing: they return the nodes that differ, which `apply` then puts into a dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from logstore.replication.metadata import (
    ANY,
    Check,
    Committed,
    Create,
    Delete,
    Op,
    Outcome,
    Refused,
    Set,
    Why,
)

__all__ = [
    "EMPTY",
    "Changes",
    "Node",
    "Nodes",
    "apply",
    "ending_of",
    "is_below",
    "outcome_of",
    "parent_of",
    "place",
]


class Node(NamedTuple):
    """One path of a tree; frozen."""

    data: bytes
    version: int
    owner: object  # the session, if the path is ephemeral, or None
    names: frozenset[str]  # of the children


Nodes = dict[str, Node]
Changes = dict[str, Node | None]  # None: the path is deleted
EMPTY = Node(b"", 0, None, frozenset())


def parent_of(path: str) -> str:
    """Return the path above `path`; that of "/" is "/"."""
    return path.rpartition("/")[0] or "/"


def is_below(path: str, roots: Sequence[str]) -> bool:
    """Return whether `path` is one of `roots`, or below one."""
    return any(
        root in ("/", path) or (path.startswith(root) and path[len(root)] == "/") for root in roots
    )


def place(nodes: Nodes, path: str, node: Node) -> None:
    """Put a node into a tree that has its parent; raise KeyError if it has not."""
    parent = parent_of(path)
    nodes[parent] = nodes[parent]._replace(names=nodes[parent].names | {_name(path)})
    nodes[path] = node


def apply(nodes: Nodes, changes: Changes) -> list[str]:
    """Apply changes; return the paths whose contents, version or existence changed."""
    differ = []
    for path, node in changes.items():
        old = nodes.get(path)
        if node is None:
            nodes.pop(path, None)
        else:
            nodes[path] = node
        if (old and old[:3]) != (node and node[:3]):
            differ.append(path)
    return differ


def outcome_of(nodes: Nodes, ops: Sequence[Op], owner: object) -> tuple[Outcome, Changes]:
    """Return the outcome of a commit, and the nodes that it changes.

    `owner` is the session.
    """
    draft = _Draft(nodes, owner)
    versions = []
    for number, op in enumerate(ops):
        done = draft.do(op)
        if isinstance(done, str):
            return Refused(number, done), {}
        versions.append(done)
    return Committed(tuple(versions)), draft.changes


def ending_of(nodes: Nodes, owner: object) -> Changes:
    """Return the nodes that the end of a session changes: its ephemeral paths are deleted."""
    draft = _Draft(nodes, owner)
    for path, node in nodes.items():
        if node.owner is owner:
            draft.do(Delete(path))
    return draft.changes


class _Draft:
    """A tree with the ops of one commit."""

    def __init__(self, nodes: Nodes, owner: object) -> None:
        self._nodes = nodes
        self._owner = owner
        self.changes: Changes = {}

    def _get(self, path: str) -> Node | None:
        return self.changes[path] if path in self.changes else self._nodes.get(path)

    def do(self, op: Op) -> int | Why:
        """Do one op; return the version, or the reason why it cannot be done."""
        if isinstance(op, Create):
            return self._create(op)
        node = self._get(op.path)
        if node is None:
            return "missing"
        if op.version not in (ANY, node.version):
            return "version"
        if isinstance(op, Check):
            return op.version
        if isinstance(op, Set):
            self.changes[op.path] = node._replace(data=op.data, version=node.version + 1)
            return node.version + 1
        if node.names:
            return "not empty"
        self._put(op.path, None)
        return -1

    def _create(self, op: Create) -> int | Why:
        if self._get(op.path) is not None:
            return "exists"
        missing = []
        path = parent_of(op.path)
        while (parent := self._get(path)) is None:
            missing.append(path)
            path = parent_of(path)
        if parent.owner is not None:
            return "no parent"
        for path in reversed(missing):
            self._put(path, EMPTY)
        self._put(op.path, Node(op.data, 0, self._owner if op.ephemeral else None, frozenset()))
        return 0

    def _put(self, path: str, node: Node | None) -> None:
        self.changes[path] = node
        above = parent_of(path)
        parent = self._get(above)
        assert parent is not None
        name = {_name(path)}
        names = parent.names - name if node is None else parent.names | name
        self.changes[above] = parent._replace(names=names)


def _name(path: str) -> str:
    return path.rpartition("/")[2]
