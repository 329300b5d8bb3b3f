"""The network of the simulation: messages are lost, repeated, late and in any order.

A request has one answer, or none.  The network knows which message it lost: the node that sent the
request is told after a time-out that its connection broke.  A paused node reads its messages when
it continues; the senders may have given up by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logstore.testing.simulation.world import World

__all__ = ["CLIENT", "MS", "Exchange", "Network"]

CLIENT = 0  # the number of every client; nodes begin at 1
MS = 1000  # virtual time is counted in microseconds
BREAK_MS = 400  # a request without an answer is broken after this
REFUSED_MS = 5  # a connection to a process that does not exist


class Network:
    """Links between nodes, each in two directions."""

    __slots__ = ("cut", "duplication", "late", "loss", "world")

    def __init__(self, world: World, loss: float, duplication: float, late: float) -> None:
        self.world = world
        self.loss = loss
        self.duplication = duplication
        self.late = late  # share of the messages that are late
        self.cut: set[tuple[int, int]] = set()

    def heal(self) -> None:
        """Repair every link, for good."""
        self.cut.clear()
        self.loss = self.duplication = self.late = 0.0

    def deliver(
        self,
        source: int,
        target: int,
        call: Callable[..., None],
        arguments: tuple[Any, ...],
        once: bool = False,
    ) -> bool:
        """Call a function after the delay of a message, or twice; return whether it was sent."""
        world = self.world
        if (source, target) in self.cut or (self.loss and world.random() < self.loss):
            return False
        world.at(self._delay(), call, *arguments)
        if self.duplication and not once and world.random() < self.duplication:
            world.at(self._delay(), call, *arguments)
        return True

    def _delay(self) -> int:
        random = self.world.random
        if self.late and random() < self.late:
            return 3 * MS + int(random() * 147 * MS)
        return 200 + int(random() * 1800)

    def request(
        self,
        source: int,
        target: int,
        ask: str,
        arguments: tuple[Any, ...],
        answered: Callable[..., None],
        broken: Callable[[], None],
        *,
        once: bool = False,
    ) -> None:
        """Call the method `ask` of the target node with an Exchange for its answer.

        `answered` or `broken` is called; both may be, and `answered` more than once.  `once`: the
        request is not repeated.
        """
        exchange = Exchange(self, source, target, answered, broken)
        if not self.deliver(source, target, exchange.arrived, (ask, arguments), once):
            exchange.lost()


class Exchange:
    """One request and its answer."""

    __slots__ = ("answered", "broken", "life", "network", "source", "target")

    def __init__(
        self,
        network: Network,
        source: int,
        target: int,
        answered: Callable[..., None],
        broken: Callable[[], None],
    ) -> None:
        self.network = network
        self.source = source
        self.target = target
        self.life = network.world.life_of(source)
        self.answered = answered
        self.broken = broken

    def __repr__(self) -> str:
        return f"{self.source}->{self.target}"

    def arrived(self, ask: str, arguments: tuple[Any, ...]) -> None:
        """The request is at the target."""
        node = self.network.world.nodes[self.target]
        if not node.up:
            self.lost(REFUSED_MS)
        elif node.paused:
            self.lost()
            node.inbox.append((self.arrived, (ask, arguments)))
        else:
            getattr(node, ask)(*arguments, self)

    def answer(self, *answer: Any) -> None:
        """Send the answer."""
        arrival = self.answered, answer
        if not self.network.deliver(self.target, self.source, self._arrive, arrival):
            self.lost()

    def lost(self, after_ms: int = BREAK_MS) -> None:
        """No answer will arrive: the source learns it after a while."""
        self.network.world.at(after_ms * MS, self._arrive, self.broken, ())

    def _arrive(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.source != CLIENT:
            node = self.network.world.nodes[self.source]
            if not node.up or node.life != self.life:
                return  # an answer to an earlier life: its connection does not exist any more
            if node.paused:
                node.inbox.append((self._arrive, (call, arguments)))
                return
        call(*arguments)
