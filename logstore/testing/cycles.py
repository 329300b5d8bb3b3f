"""Cycles in a directed graph, given as node -> its successors.

The graphs are made of operations and may be as long as a history: nothing here recurses.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

__all__ = ["circular", "way"]

Node = TypeVar("Node", bound=Hashable)


def circular(edges: Mapping[Node, Iterable[Node]]) -> list[list[Node]]:
    """The strongly connected parts with more than one member (Tarjan's)."""
    number: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    place: dict[Node, int] = {}  # in the stack, of what is on it
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
    """A shortest way from one node to another, both included.  There must be one."""
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
