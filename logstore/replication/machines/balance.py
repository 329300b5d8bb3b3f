"""balanced: an assignment of all partitions to a set of nodes, with few replicas moved.

Replicas on nodes of the set stay where they are.  Those on other nodes move, then as few more as
are needed until no node has two replicas more than another.  The first replica of each partition
leads; the order of replicas is changed, without a move, until the leaders are spread too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from logstore.replication.machines.assignment import PlacementError
from logstore.replication.machines.image import Key

__all__ = ["balanced", "moved_replicas", "without_node"]

Replicas = Mapping[Key, Sequence[int]]


def balanced(
    current: Replicas, racks: Mapping[int, str | None], factor: int | None = None
) -> dict[Key, tuple[int, ...]]:
    """Return the replicas of every partition on the nodes of `racks`, spread evenly.

    `factor`: how many replicas each of them is to have; as many as it has by default.

    >>> current = {("t", 0): (1, 2), ("t", 1): (1, 2), ("t", 2): (1, 2)}
    >>> balanced(current, {1: None, 2: None, 3: None})
    {('t', 0): (1, 3), ('t', 1): (3, 2), ('t', 2): (2, 1)}
    """
    if factor is not None:
        current = {key: _sized(replicas, factor, racks) for key, replicas in current.items()}
    plan = _Plan(current, racks)
    for key in plan.replicas:
        plan.fill(key)
    plan.level_replicas()
    plan.level_leaders()
    return plan.as_tuples()


def _sized(replicas: Sequence[int], factor: int, racks: Mapping[int, str | None]) -> list[int]:
    """Return `factor` replicas.  A number below 0 is a place for which `fill` chooses a node."""
    kept = sorted(replicas, key=lambda node: node not in racks)[:factor]
    return [*kept, *(-number for number in range(1, factor - len(kept) + 1))]


def without_node(
    current: Replicas, node: int, racks: Mapping[int, str | None]
) -> dict[Key, tuple[int, ...]]:
    """Return new replicas for the partitions on a node; all others stay as they are.

    `racks` has the nodes that may take them.

    >>> without_node({("t", 0): (1, 2), ("t", 1): (2, 3)}, 1, {2: None, 3: None})
    {('t', 0): (3, 2)}
    """
    others = {each: rack for each, rack in racks.items() if each != node}
    plan = _Plan(current, others)
    changed = [key for key, replicas in current.items() if node in replicas]
    for key in changed:
        plan.fill(key, only=(node,))
    return {key: tuple(plan.replicas[key]) for key in changed}


def moved_replicas(before: Replicas, after: Replicas) -> int:
    """Return how many replicas have to be copied to a node that does not have them."""
    return sum(len(set(replicas) - set(before[key])) for key, replicas in after.items())


class _Plan:
    def __init__(self, current: Replicas, racks: Mapping[int, str | None]) -> None:
        most = max(map(len, current.values()), default=0)
        if most > len(racks):
            topic, number = next(key for key in current if len(current[key]) == most)
            raise PlacementError(
                f"{topic}-{number}: {most} replicas need {most} nodes; there are {len(racks)}: "
                f"start another node first, or reassign it with fewer replicas"
            )
        self.racks = racks  # of the nodes that may have replicas
        self.replicas = {key: list(replicas) for key, replicas in sorted(current.items())}
        self.load = dict.fromkeys(racks, 0)  # replicas of each node
        for replicas in self.replicas.values():
            for node in replicas:
                if node in self.load:
                    self.load[node] += 1

    def as_tuples(self) -> dict[Key, tuple[int, ...]]:
        return {key: tuple(replicas) for key, replicas in self.replicas.items()}

    def _shared_racks(self, nodes: Iterable[int]) -> int:
        """How many replicas share their rack with another one; nodes without a rack do not."""
        named = [self.racks[node] for node in nodes if self.racks.get(node) is not None]
        return len(named) - len(set(named))

    def fill(self, key: Key, only: Sequence[int] | None = None) -> None:
        """Replace the replicas on nodes that are not ours (or only those on the nodes `only`)."""
        replicas = self.replicas[key]
        for at, node in enumerate(replicas):
            gone = node not in self.racks if only is None else node in only
            if gone:
                # At the same position: the first replica stays the preferred leader's place.
                rest = [each for each in replicas if each != node]
                free = [each for each in self.racks if each not in replicas]
                chosen = min(
                    free,
                    key=lambda each: (self._shared_racks([*rest, each]), self.load[each], each),
                )
                replicas[at] = chosen
                self.load[chosen] += 1

    # ---- even numbers ----

    def level_replicas(self) -> None:
        """Move replicas from nodes with many to nodes with few, one after the other."""
        while self._level_one():
            pass

    def _level_one(self) -> bool:
        rising = sorted(self.load, key=lambda node: (self.load[node], node))
        for full in reversed(rising):
            for empty in rising:
                if self.load[full] - self.load[empty] < 2:
                    break  # all that follow have even more
                for replicas in self.replicas.values():
                    if full in replicas and empty not in replicas:
                        # Evenness never makes two replicas share a rack.
                        after = [empty if node == full else node for node in replicas]
                        if self._shared_racks(after) <= self._shared_racks(replicas):
                            replicas[:] = after
                            self.load[full] -= 1
                            self.load[empty] += 1
                            return True
        return False

    def level_leaders(self) -> None:
        """Change the order of replicas until no node leads two partitions more than another."""
        while self._level_one_leader():
            pass

    def _level_one_leader(self) -> bool:
        leads = dict.fromkeys(self.racks, 0)
        for replicas in self.replicas.values():
            leads[replicas[0]] += 1
        for full in sorted(leads, key=lambda node: (-leads[node], node)):
            # A chain: partition by partition, each hands its leadership to another replica of it.
            chains: dict[int, list[tuple[Key, int]]] = {full: []}
            waiting = [full]
            for node in waiting:
                if leads[full] - leads[node] >= 2:
                    for key, to in chains[node]:
                        replicas = self.replicas[key]
                        replicas.remove(to)
                        replicas.insert(0, to)
                    return True
                for key, replicas in self.replicas.items():
                    if replicas[0] == node:
                        for to in replicas[1:]:
                            if to not in chains:
                                chains[to] = [*chains[node], (key, to)]
                                waiting.append(to)
        return False
