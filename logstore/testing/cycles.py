"""Cycles in a directed graph, given as node -> its successors.

A graph has a node per operation of a history, so the functions are iterative: recursion could
exceed Python's limit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

__all__ = ["circular", "way"]

Node = TypeVar("Node", bound=Hashable)


def circular(edges: Mapping[Node, Iterable[Node]]) -> list[list[Node]]:
    """Return the strongly connected components with more than one node (Tarjan)."""
    number: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    place: dict[Node, int] = {}  # position in the stack of each node on it
    parts: list[list[Node]] = []
    for root in list(edges):
        if root in number:
            continue
        work = [(root, iter(edges.get(root, ())))]
        number[root] = low[root] = len(number)
        place[root] = len(stack)
        stack.append(root)
        while work:
            node, successors = work[-1]
            for successor in successors:
                if successor not in number:
                    number[successor] = low[successor] = len(number)
                    place[successor] = len(stack)
                    stack.append(successor)
                    work.append((successor, iter(edges.get(successor, ()))))
                    break
                if successor in place:
                    low[node] = min(low[node], number[successor])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == number[node]:
                    part = stack[place[node] :]
                    del stack[place[node] :]
                    for member in part:
                        del place[member]
                    if len(part) > 1:
                        parts.append(part)
    return parts


def way(edges: Mapping[Node, Iterable[Node]], source: Node, target: Node) -> list[Node]:
    """Return a shortest path between two nodes, both included.  A path must exist."""
    came_from: dict[Node, Node] = {}
    ahead = [source]
    for node in ahead:
        if node == target:
            break
        for successor in edges.get(node, ()):
            if successor != source and successor not in came_from:
                came_from[successor] = node
                ahead.append(successor)
    path = [target]
    while path[-1] != source:
        path.append(came_from[path[-1]])
    path.reverse()
    return path
