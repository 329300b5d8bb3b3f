"""Serving: the requests that a simulated node answers, of other nodes and of clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from logstore.replication.machines.follower import Fetched, Offer
from logstore.replication.machines.image import ClusterImage, Key
from logstore.testing.simulation.network import Exchange
from logstore.testing.simulation.partition import NOT_LEADER, PartitionShell

if TYPE_CHECKING:
    from logstore.testing.simulation.world import World

__all__ = ["Parked", "Rows", "Serving"]

Rows = list[tuple[Key, Offer]]


class Parked:
    """A follower's fetch that waits for records."""

    __slots__ = ("broker_epoch", "exchange", "follower", "rows")

    def __init__(self, follower: int, broker_epoch: int, rows: Rows, exchange: Exchange) -> None:
        self.follower = follower
        self.broker_epoch = broker_epoch
        self.rows = rows
        self.exchange = exchange


class Serving:
    """The half of a node that answers.  The other half has the attributes."""

    __slots__ = ()

    if TYPE_CHECKING:
        world: World
        image: ClusterImage
        shells: dict[Key, PartitionShell]
        parked: list[Parked]

        def clock(self) -> int:
            """Return the time of this node."""

        def after(self, delay_ms: int, call: Callable[..., None], *arguments: Any) -> None:
            """Call a function later."""

    # ---- requests of other nodes ----

    def fetch(self, follower: int, broker_epoch: int, rows: Rows, exchange: Exchange) -> None:
        """A follower fetches."""
        now = self.clock()
        answers: list[tuple[Key, int, Fetched]] = []
        full = False
        for key, offer in rows:
            shell = self.shells.get(key)
            leader = shell.machine.leader if shell is not None else None
            if shell is None or leader is None:
                answers.append((key, offer.token, Fetched(NOT_LEADER)))
                full = True
                continue
            verdict, actions = leader.follower_fetch(
                follower,
                broker_epoch,
                offer.leader_epoch,
                offer.offset,
                offer.last_epoch,
                offer.start,
                now,
            )
            self.world.oracle.judged(verdict)
            if actions:
                shell.do(actions)
            row = shell.row(verdict, leader, offer)
            full = full or bool(row.code or row.diverging or row.raw)
            answers.append((key, offer.token, row))
        if full:
            exchange.answer(answers)
            return
        parked = Parked(follower, broker_epoch, rows, exchange)
        self.parked.append(parked)
        self.after(self.world.settings.fetch_wait_ms, self._unpark, parked)

    def wake_parked(self, key: Key) -> None:
        """Answer the fetches that wait for a partition."""
        for parked in [each for each in self.parked if any(row[0] == key for row in each.rows)]:
            self._unpark(parked)

    def _unpark(self, parked: Parked) -> None:
        if parked not in self.parked:
            return
        self.parked.remove(parked)
        self.world.mark("L6")
        answers = []
        for key, offer in parked.rows:
            shell = self.shells.get(key)
            leader = shell.machine.leader if shell is not None else None
            if shell is None or leader is None:
                answers.append((key, offer.token, Fetched(NOT_LEADER)))
                continue
            verdict = leader.judge_fetch(
                parked.follower,
                parked.broker_epoch,
                offer.leader_epoch,
                offer.offset,
                offer.last_epoch,
            )
            answers.append((key, offer.token, shell.row(verdict, leader, offer)))
        parked.exchange.answer(answers)

    def list_offsets(self, key: Key, epoch: int, replica: int, exchange: Exchange) -> None:
        """A follower, or a client with replica -1, asks where a log starts and ends."""
        shell = self.shells.get(key)
        leader = shell.machine.leader if shell is not None else None
        code = NOT_LEADER if leader is None else leader.fence(epoch)
        if leader is None or code:
            exchange.answer(code, -1, -1)
        elif replica >= 0:
            exchange.answer(0, leader.start, leader.end)
        elif not leader.is_settled:
            self.world.mark("L17 not yet")
            exchange.answer(78, -1, -1)
        else:
            self.world.mark("L17")
            exchange.answer(0, leader.start, leader.hw)

    # ---- requests of clients ----

    def produce(
        self,
        key: Key,
        values: tuple[object, ...],
        producer: tuple[int, int, int],
        acks: int,
        exchange: Exchange,
    ) -> None:
        """A client appends."""
        shell = self.shells.get(key)
        if shell is None:
            exchange.answer(NOT_LEADER, -1)
        else:
            shell.produce(values, producer, acks, exchange)

    def consume(self, key: Key, offset: int, epoch: int, exchange: Exchange) -> None:
        """A client reads below the high watermark."""
        shell = self.shells.get(key)
        leader = shell.machine.leader if shell is not None else None
        code = NOT_LEADER if leader is None else leader.fence(epoch)
        if shell is None or leader is None or code:
            exchange.answer(code, (), -1, -1)
            return
        hw = leader.hw  # once: a second look may be of a later moment
        if offset < leader.start or offset > leader.end:
            self.world.mark("L16 out of range")
            exchange.answer(1, (), leader.start, hw)
            return
        exchange.answer(0, shell.log.read(offset, hw), leader.start, hw)

    def delete_records(self, key: Key, offset: int, exchange: Exchange) -> None:
        """A client deletes the records below an offset."""
        shell = self.shells.get(key)
        leader = shell.machine.leader if shell is not None else None
        if shell is None or leader is None:
            exchange.answer(NOT_LEADER)
        elif offset > leader.hw:
            exchange.answer(1)
        else:
            self.world.mark("L18")
            shell.log.trim(offset)
            shell.do(leader.trimmed(shell.log.start_offset))
            exchange.answer(0)

    def metadata(self, key: Key, exchange: Exchange) -> None:
        """A client asks who leads a partition."""
        state = self.image.states.get(key)
        exchange.answer(-1 if state is None else state.leader)
