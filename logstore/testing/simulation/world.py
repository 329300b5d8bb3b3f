"""World: virtual time, the order of events, and the parts of a simulated cluster.

One seed is one run on every machine: all randomness is of one generator, time is a number, and no
order depends on hashes.  An event is a function and its arguments in a heap, by time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from logstore.replication.machines.assignment import Assignment, place
from logstore.replication.machines.image import Key, TopicImage, as_json, config_path, topic_path
from logstore.replication.metadata import Create
from logstore.testing.simulation.clients import Clients
from logstore.testing.simulation.disk import Disk
from logstore.testing.simulation.metadata import Tree, TreeFaults
from logstore.testing.simulation.nemesis import Nemesis
from logstore.testing.simulation.network import CLIENT, MS, Network
from logstore.testing.simulation.node import SimulatedNode
from logstore.testing.simulation.oracle import Oracle
from logstore.testing.simulation.settings import Settings

__all__ = ["TOPIC", "World"]

TOPIC = "t"
RECENT = 60  # events that a failure shows


class World:
    """A cluster, its clients and its faults."""

    __slots__ = (
        *("_heap", "_number", "clients", "keys", "marks", "nemesis", "network", "nodes", "now"),
        *("oracle", "random", "recent", "rng", "settings", "steps", "tree"),
    )

    def __init__(self, seed: int, settings: Settings, *, trace: bool = False) -> None:
        self.settings = settings
        self.rng = Random(f"world {seed}")
        self.random = self.rng.random
        self.now = 0  # in microseconds
        self.steps = 0
        self._number = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.marks: dict[str, int] = {}  # what happened in this run, for the coverage
        self.recent: deque[tuple[int, object, tuple[Any, ...]]] = deque(
            maxlen=None if trace else RECENT
        )
        self.keys: list[Key] = [(TOPIC, number) for number in range(settings.partitions)]
        self.oracle = Oracle(self)
        self.network = Network(self, settings.loss, settings.duplication, settings.late)
        faults = TreeFaults(settings.answers_lost, settings.slow_tree, settings.scattered)
        self.tree = Tree(self, faults, settings.session_ms)
        self.nemesis = Nemesis(self)
        self.nodes = {
            number: SimulatedNode(self, number, Disk(settings.fsync))
            for number in range(1, settings.nodes + 1)
        }
        self.clients = Clients(self)
        self._create_topic()

    def _create_topic(self) -> None:
        settings = self.settings
        placed = place(
            dict.fromkeys(self.nodes),
            settings.partitions,
            settings.replicas,
            start=int(self.random() * settings.nodes),
            shift=int(self.random() * settings.nodes),
        )
        topic = TopicImage(0, "id0", {n: Assignment(nodes) for n, nodes in enumerate(placed)})
        config = {"config": {"min.insync.replicas": str(settings.min_isr)}}
        self.tree.apply(
            [
                Create(topic_path(TOPIC), topic.encode()),
                Create(config_path("topics", TOPIC), as_json({"version": 1, **config})),
            ]
        )

    # ---- time ----

    def at(self, delay: int, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function after `delay` microseconds."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + delay, self._number, call, arguments))

    def number(self) -> int:
        """Return a number that was never used."""
        self._number += 1
        return self._number

    def step(self) -> None:
        """Take the next event."""
        self.now, _, call, arguments = heapq.heappop(self._heap)
        self.steps += 1
        self.recent.append((self.now, call, arguments))
        call(*arguments)

    def run(self, steps: int) -> None:
        """Take so many events."""
        for _ in range(steps):
            self.step()

    def run_for(self, duration_ms: int) -> None:
        """Take the events of a time."""
        until = self.now + duration_ms * MS
        while self._heap and self._heap[0][0] <= until:
            self.step()
        self.now = until

    def until(self, done: Callable[[], bool], limit_ms: int = 60_000) -> None:
        """Take events until something is so; fail if it is not within virtual time."""
        until = self.now + limit_ms * MS
        while not done():
            assert self._heap, "no event is left"
            assert self._heap[0][0] <= until, f"it is not so within {limit_ms} virtual ms"
            self.step()

    # ---- what the parts ask ----

    def life_of(self, source: int) -> int:
        """Return the life of a node; clients have one."""
        return 0 if source == CLIENT else self.nodes[source].life

    def mark(self, name: str) -> None:
        """Count that something happened."""
        self.marks[name] = self.marks.get(name, 0) + 1

    def note(self, *what: Any) -> None:
        """Add a line to the trace."""
        self.recent.append((self.now, "note", what))

    def chance(self, name: str) -> bool:
        """Return whether a shell does something legal and unusual now."""
        if self.random() < self.settings.chances:
            self.mark(name)
            return True
        return False

    # ---- a run ----

    def start(self) -> None:
        """Start every node, the clients and the nemesis."""
        for node in self.nodes.values():
            self.at(int(self.random() * 50 * MS), node.start)
        self.clients.start()
        self.nemesis.start()

    def heal(self) -> None:
        """Repair everything: no fault happens any more."""
        self.nemesis.heal()
        self.network.heal()
        self.tree.heal()

    def lines(self) -> list[str]:
        """Return the trace as text."""
        return [f"{now / MS:10.3f} ms  {_shown(call, what)}" for now, call, what in self.recent]


def _shown(call: object, arguments: tuple[Any, ...]) -> str:
    if call == "note":
        return "    " + " ".join(map(str, arguments))
    owner = getattr(call, "__self__", "")
    name = getattr(call, "__name__", str(call))
    shown = []
    for each in arguments:
        shown.append(getattr(each, "__qualname__", None) or repr(each))
    return f"{owner!r}.{name}({', '.join(shown)})"
