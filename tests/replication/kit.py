"""A simulated cluster that a test drives by hand: no nemesis, no clients that act by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from logstore.log.epochs import EpochEnd
from logstore.replication.machines.assignment import Assignment
from logstore.replication.machines.image import Key, Registration, topic_path
from logstore.replication.machines.leader import LeaderReplica
from logstore.replication.machines.leader_and_isr import LeaderAndIsr
from logstore.replication.metadata import Set
from logstore.testing.simulation.clients import Pending
from logstore.testing.simulation.disk import SimulatedLog
from logstore.testing.simulation.node import SimulatedNode
from logstore.testing.simulation.settings import Settings
from logstore.testing.simulation.world import TOPIC, World

KEY: Key = (TOPIC, 0)


class Cluster:
    """Nodes 1 to n; partition 0 is on all of them."""

    def __init__(self, *, replicas: int = 3, **settings: Any) -> None:
        calm = {
            "nodes": replicas,
            "replicas": replicas,
            "nemesis": 0.0,
            "duplication": 0.0,
            "late": 0.0,
            "answers_lost": 0.0,
            "slow_tree": 0.0,
            "slow_syncs": 0.0,
            "chances": 0.0,
            **settings,
        }
        self.world = World(1, Settings(**calm))
        for node in self.world.nodes.values():
            node.start()
        self.until(lambda: self.state is not None and len(self.state.isr) == replicas)
        self.until(lambda: self.leader is not None)

    # ---- looking ----

    @property
    def state(self) -> LeaderAndIsr:
        return self.world.oracle.states.get(KEY)  # type: ignore[return-value]

    @property
    def leader(self) -> LeaderReplica | None:
        """The machine of the leader that the tree names, if it leads already."""
        node = self.world.nodes.get(self.state.leader)
        shell = node.shells.get(KEY) if node is not None else None
        machine = shell.machine.leader if shell is not None else None
        if machine is None or machine.view.leader_epoch != self.state.leader_epoch:
            return None
        return machine

    @property
    def followers(self) -> list[int]:
        return [node for node in self.world.nodes if node != self.state.leader]

    def node(self, number: int) -> SimulatedNode:
        return self.world.nodes[number]

    def log(self, number: int) -> SimulatedLog:
        return self.world.nodes[number].disk.logs[KEY]

    def hw(self, number: int) -> int:
        return self.world.nodes[number].shells[KEY].machine.high_watermark

    @property
    def truth(self) -> list[object]:
        return [v for batch in self.world.oracle.truths[KEY].batches for v in batch.values]

    def values(self, number: int) -> list[object]:
        return [value for batch in self.log(number).batches for value in batch.values]

    # ---- time ----

    def until(self, done: Callable[[], bool], limit_ms: int = 20_000) -> None:
        self.world.until(done, limit_ms)

    def run(self, duration_ms: int) -> None:
        self.world.run_for(duration_ms)

    def settle(self) -> None:
        """Repair everything and wait until all replicas are equal."""
        self.world.heal()
        self.until(lambda: not self.world.oracle.unsettled(), 30_000)
        self.world.oracle.finish()

    # ---- acts ----

    def send(
        self, *, acks: int = -1, to: int | None = None, producer: int | None = None
    ) -> Pending:
        """Send a batch of one record."""
        number = (0 if acks == -1 else 2) if producer is None else producer
        found = self.world.clients.producers[number]
        found.acks = acks
        return found.send(KEY, target=self.state.leader if to is None else to, count=1)

    def commit(self) -> object:
        """Send a batch and wait until it is acknowledged; return its value."""
        pending = self.send()
        self.until(lambda: pending not in self.world.clients.producers[0].sends)
        assert pending.values[0] in self.truth
        return pending.values[0]

    def append(self, to: int) -> object:
        """Append a batch at a leader that cannot commit it; return its value."""
        log = self.log(to)
        end = log.end_offset
        pending = self.send(acks=1, to=to)
        self.until(lambda: log.end_offset > end)
        return pending.values[0]

    def cut(self, one: int, *others: int) -> None:
        for other in others or [node for node in self.world.nodes if node != one]:
            self.world.network.cut |= {(one, other), (other, one)}

    def mend(self) -> None:
        self.world.network.cut.clear()

    def kill(self, number: int) -> None:
        self.node(number).crash(power=False)

    def cut_power(self, number: int) -> None:
        if not self.node(number).disk.fsync:
            for key in self.node(number).disk.logs:
                self.world.oracle.truths[key].lossy.add(number)
        self.node(number).crash(power=True)

    def start(self, number: int) -> None:
        self.node(number).start()

    def elect(self, number: int) -> None:
        """Elect a member of the in-sync set, and wait until it leads."""
        assert self.world.nemesis.elect_any(KEY, number) == number
        self.until(lambda: self.leader is not None)

    def reassign(self, replicas: tuple[int, ...]) -> None:
        """Change the assignment by hand, not by a request."""
        topic = self.world.oracle.assignments
        assert topic is not None
        changed = topic.with_assignment(0, Assignment(replicas))
        self.world.tree.apply([Set(topic_path(TOPIC), changed.encode(), topic.version)])


class Leading:
    """A LeaderReplica of node 1 with followers 2 and 3, for tests of single rows."""

    def __init__(self, *, end: int = 10, hw: int = 10, fsync: bool = False, **view: Any) -> None:
        self.nodes = {n: Registration(n, epoch=n * 10) for n in (1, 2, 3)}
        state = LeaderAndIsr(
            version=5, leader=1, leader_epoch=3, leader_broker_epoch=10, isr=(1, 2, 3), min_isr=2
        )._replace(**view)
        self.ends = {0: EpochEnd(0, 4), 2: EpochEnd(2, end)}
        self.machine = LeaderReplica(
            KEY,
            1,
            10,
            state,
            Assignment((1, 2, 3)),
            7,
            self.nodes,
            self.epoch_end,
            start=0,
            end=end,
            ack=end,
            hw=hw,
            fsync=fsync,
            lag_ms=1000,
        )
        self.begun = self.machine.begin(now=0)

    def epoch_end(self, epoch: int) -> EpochEnd | None:
        if epoch == 3:
            return EpochEnd(3, self.machine.end)
        return self.ends.get(epoch)

    def fetch(self, node: int, offset: int, *, now: int = 0, last_epoch: int = -1, epoch: int = 3,
              broker_epoch: int = -1) -> Any:  # fmt: skip
        life = self.nodes[node].epoch if broker_epoch < 0 and node in self.nodes else broker_epoch
        return self.machine.follower_fetch(node, life, epoch, offset, last_epoch, 0, now)
