"""Assignment: the nodes that have a replica of a partition; placement and reassignment.

The first replica is the preferred leader.  While replicas move, `replicas` has the old and the new
ones, `adding` those that are copied to, and `removing` those that leave when the copy is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Assignment", "PlacementError", "place"]


class PlacementError(ValueError):
    """Replicas cannot be placed on the nodes that there are."""


class Assignment(NamedTuple):
    """The replicas of one partition; frozen."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()

    @property
    def target(self) -> tuple[int, ...]:
        """Return the replicas after the move."""
        return tuple(node for node in self.replicas if node not in self.removing)

    @property
    def origin(self) -> tuple[int, ...]:
        """Return the replicas before the move."""
        return tuple(node for node in self.replicas if node not in self.adding)

    @property
    def moving(self) -> bool:
        """Return whether a reassignment is under way."""
        return bool(self.adding or self.removing)

    def towards(self, target: Sequence[int]) -> Assignment:
        """Begin a move; one that is under way is replaced, from the same origin."""
        origin = self.origin
        return Assignment(
            (*target, *(node for node in origin if node not in target)),
            tuple(node for node in target if node not in origin),
            tuple(node for node in origin if node not in target),
        )

    def completed(self) -> Assignment:
        """End a move at its target."""
        return Assignment(self.target)

    def cancelled(self) -> Assignment:
        """End a move at its origin."""
        return Assignment(self.origin)


def place(
    racks: Mapping[int, str | None],
    partitions: int,
    factor: int,
    *,
    start: int,
    shift: int,
    first: int = 0,
) -> list[tuple[int, ...]]:
    """Return the replicas of `partitions` partitions from number `first` on, as Kafka places them.

    `racks` has every node that is registered.  `start` and `shift` are random numbers: the node of
    the first replica of partition 0, and the distance to its second one.

    >>> place({1: None, 2: None, 3: None}, 4, 2, start=0, shift=0)
    [(1, 2), (2, 3), (3, 1), (1, 3)]
    >>> place({1: "a", 2: "a", 3: "b", 4: "b"}, 2, 2, start=0, shift=0)
    [(1, 3), (3, 2)]
    """
    if factor < 1 or partitions < 0:
        raise PlacementError(f"{partitions} partitions with {factor} replicas cannot be placed")
    if len(racks) < factor:
        raise PlacementError(f"{factor} replicas need {factor} nodes; {len(racks)} are registered")
    named = {rack for rack in racks.values() if rack is not None}
    if named and None in racks.values():
        without = sorted(node for node, rack in racks.items() if rack is None)
        raise PlacementError(f"nodes {without} have no rack, others have: set it for all or none")
    nodes = _interleaved(racks) if named else sorted(racks)
    count = len(nodes)
    placed = []
    for number in range(first, first + partitions):
        if number and number % count == 0:
            shift += 1
        leader = (number + start) % count
        chosen = [nodes[leader]]
        # A step over all racks at once keeps the distance to the leader's own rack.
        steps = shift * max(1, len(named))
        while len(chosen) < factor:
            node = nodes[(leader + 1 + steps % (count - 1)) % count]
            steps += 1
            used = {racks[each] for each in chosen}
            rack_is_used = bool(named) and racks[node] in used and len(used) < len(named)
            if node not in chosen and not rack_is_used:
                chosen.append(node)
        placed.append(tuple(chosen))
    return placed


def _interleaved(racks: Mapping[int, str | None]) -> list[int]:
    """Return the nodes, one of each rack in turn."""
    by_rack: dict[str, list[int]] = {}
    for node in sorted(racks):
        by_rack.setdefault(str(racks[node]), []).append(node)
    queues = [by_rack[rack] for rack in sorted(by_rack)]
    longest = max(map(len, queues))
    return [queue[at] for at in range(longest) for queue in queues if at < len(queue)]
