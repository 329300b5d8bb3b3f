"""The clients of a simulated cluster: producers, consumers, and their history.

Producers with acks=all are idempotent: they repeat a batch with the same sequence at the node that
they take for the leader, until it is acknowledged or they give up; then they get a new producer id.
Producers with acks=0 and acks=1 send once.  Consumers read at leaders from the first offset on.
Each value is sent by one send only.

What they saw is recorded as operations of `logstore.testing.operations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logstore.replication.machines.image import Key
from logstore.testing.operations import Event, Poll, Read, Seek, Send
from logstore.testing.simulation.disk import Batch
from logstore.testing.simulation.network import CLIENT, MS

if TYPE_CHECKING:
    from logstore.testing.simulation.world import World

__all__ = ["Clients", "Producer"]

IN_FLIGHT_MAX = 3
ATTEMPTS_MAX = 12
# The leader appended nothing: the client may count the attempt as not done.
REFUSALS = frozenset({3, 6, 19, 45, 47, 56})


class Clients:
    """All clients of a run."""

    __slots__ = ("consumers", "events", "producers", "world")

    def __init__(self, world: World) -> None:
        self.world = world
        self.events: list[Event] = []
        settings = world.settings
        self.producers = [
            Producer(world, number, -1 if number % 3 < 2 else int(world.random() < 0.7))
            for number in range(settings.producers)
        ]
        self.consumers = [Consumer(world, number) for number in range(settings.consumers)]

    def start(self) -> None:
        """Start them all."""
        for act in [each.act for each in self.producers] + [each.act for each in self.consumers]:
            self.world.at(int(self.world.random() * 300 * MS), act)

    def stop(self) -> None:
        """Send nothing new.  What is under way is repeated until it has an outcome."""
        for producer in self.producers:
            producer.stopped = True

    @property
    def idle(self) -> bool:
        """Return whether every send has an outcome."""
        return not any(producer.sends for producer in self.producers)

    def leader_of(self, key: Key) -> int:
        """Guess the leader of a partition: mostly the one of the tree, sometimes any node."""
        world = self.world
        state = world.oracle.states.get(key)
        if state is not None and state.leader > 0 and world.random() < 0.8:
            return state.leader
        return 1 + int(world.random() * world.settings.nodes)


class Pending:
    """A batch that has no outcome yet."""

    __slots__ = ("attempt", "attempts", "key", "offset", "process", "refused", "sequence", "values")

    def __init__(self, key: Key, values: tuple[object, ...], sequence: int, process: str) -> None:
        self.key = key
        self.values = values
        self.sequence = sequence
        self.process = process
        self.attempts = 0
        self.attempt = 0  # the one that is waited for
        self.refused = 0


class Producer:
    """One producer."""

    __slots__ = (
        *("acks", "identity", "known", "number", "sends", "sequences", "stopped", "values"),
        "world",
    )

    def __init__(self, world: World, number: int, acks: int) -> None:
        self.world = world
        self.number = number
        self.acks = acks
        self.values = 0
        self.stopped = False
        self.identity = 100 * (number + 1)  # the producer id
        self.sequences: dict[Key, int] = {}
        self.known: set[Key] = set()  # partitions whose log has a batch of this producer id
        self.sends: list[Pending] = []

    def __repr__(self) -> str:
        return f"producer {self.number}"

    def act(self) -> None:
        """Send a batch, and again later."""
        world = self.world
        if self.stopped:
            return
        key = world.keys[int(world.random() * len(world.keys))]
        # A log takes any first sequence of a producer that it does not know: send one batch then.
        limit = IN_FLIGHT_MAX if self.acks != -1 or key in self.known else 1
        if sum(pending.key == key for pending in self.sends) < limit:
            self.send(key)
        world.at(int(30 * MS + world.random() * 900 * MS), self.act)

    def send(self, key: Key, target: int | None = None, count: int = 0) -> Pending:
        """Send a new batch."""
        world = self.world
        count = count or 1 + int(world.random() * 3)
        values = tuple(f"{self.number}.{self.values + n}" for n in range(count))
        self.values += count
        sequence = self.sequences.get(key, 0)
        self.sequences[key] = sequence + count
        process = f"producer {self.number}.{self.values}"
        pending = Pending(key, values, sequence, process)
        self.sends.append(pending)
        acts = tuple(Send(key, value) for value in values)
        world.clients.events.append(Event("invoke", process, acts))
        self._try(pending, target)
        return pending

    def _try(self, pending: Pending, target: int | None = None) -> None:
        world = self.world
        pending.attempts += 1
        number = pending.attempt = world.number()
        producer = (-1, -1, -1)
        if self.acks == -1:
            producer = (self.identity, 0, pending.sequence)

        def answered(code: int, offset: int) -> None:
            self._answered(pending, number, code, offset)

        def broken() -> None:
            self._answered(pending, number, 7, -1)

        world.network.request(
            CLIENT,
            world.clients.leader_of(pending.key) if target is None else target,
            "produce",
            (pending.key, pending.values, producer, self.acks),
            answered,
            broken,
            once=self.acks != -1,  # only a sequence lets a leader recognise a repeated batch
        )

    def _answered(self, pending: Pending, number: int, code: int, offset: int) -> None:
        if pending not in self.sends:
            return
        if code == 0:
            # An acknowledgement counts even if it is late.
            self._end(pending, "ok", offset)
            return
        if number != pending.attempt:
            return
        if code in REFUSALS:
            pending.refused += 1
        if self.acks == -1 and pending.attempts < ATTEMPTS_MAX:
            pending.attempt = -1
            delay = int(20 * MS + self.world.random() * 400 * MS)
            self.world.at(delay, self._again, pending, number)
        elif pending.refused == pending.attempts:
            self._end(pending, "fail", -1)
        else:
            self._end(pending, "info", -1)

    def _again(self, pending: Pending, number: int) -> None:
        if pending in self.sends:
            self._try(pending)

    def _end(self, pending: Pending, outcome: str, offset: int) -> None:
        world = self.world
        self.sends.remove(pending)
        key = pending.key
        if outcome == "ok":
            self.known.add(key)
        moment = outcome
        if outcome == "ok" and self.acks != -1:
            moment = "info"  # its leader had it; that is no promise for later
        acts = tuple(
            Send(key, value, offset + n if outcome == "ok" and self.acks == -1 else None)
            for n, value in enumerate(pending.values)
        )
        event = Event(moment, pending.process, acts)  # type: ignore[arg-type]
        world.clients.events.append(event)
        world.oracle.outcome(pending, outcome, offset, self.acks)
        if self.acks == -1 and outcome != "ok":
            # The next sequence is not known to any leader: begin again with another id.
            self._begin_again()

    def _begin_again(self) -> None:
        self.identity += 1
        self.sequences.clear()
        self.known.clear()
        for pending in list(self.sends):
            outcome = "fail" if pending.refused == pending.attempts else "info"
            self.sends.remove(pending)
            acts = tuple(Send(pending.key, value) for value in pending.values)
            # An answer that is still under way cannot be waited for: nothing is known.
            self.world.clients.events.append(Event("info", pending.process, acts))
            self.world.oracle.outcome(
                pending, "info" if pending.attempt != -1 else outcome, -1, self.acks
            )


class Consumer:
    """Reads every partition, at its leader, from the start on."""

    __slots__ = ("number", "positions", "waiting", "world")

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.positions: dict[Key, int] = dict.fromkeys(world.keys, 0)
        self.waiting = -1

    def __repr__(self) -> str:
        return f"consumer {self.number}"

    def act(self) -> None:
        """Read some records, and again later."""
        world = self.world
        key = world.keys[int(world.random() * len(world.keys))]
        position = self.positions[key]
        number = self.waiting = world.number()

        def answered(code: int, batches: tuple[Batch, ...], start: int, hw: int) -> None:
            if number == self.waiting:
                self.waiting = -1
                self._read(key, position, code, batches, start)

        world.network.request(
            CLIENT,
            world.clients.leader_of(key),
            "consume",
            (key, position, -1),
            answered,
            lambda: None,
        )
        world.at(int(200 * MS + world.random() * 800 * MS), self.act)

    def _read(
        self, key: Key, position: int, code: int, batches: tuple[Batch, ...], start: int
    ) -> None:
        name = f"consumer {self.number}"
        events = self.world.clients.events
        if code == 1 and start > position:  # the records were deleted
            self.positions[key] = start
            events.append(Event("invoke", name, ()))
            events.append(Event("ok", name, (Seek(name, frozenset([key]), ((key, start),)),)))
        if code or not batches:
            return
        reads = tuple(
            Read(key, batch.base_offset + n, value)
            for batch in batches
            for n, value in enumerate(batch.values)
            if batch.base_offset + n >= position
        )
        if not reads:
            return
        self.world.oracle.consumed(key, batches)
        self.positions[key] = batches[-1].next_offset
        events.append(Event("invoke", name, ()))
        events.append(Event("ok", name, (Poll(name, reads),)))
