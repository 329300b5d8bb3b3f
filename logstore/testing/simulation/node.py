"""SimulatedNode: one node of the cluster, with the shipped machines and a small shell around them.

What the shell of the product does on a store and on sockets, this one does on simulated parts: it
registers, follows the tree, gives each partition its views, carries out actions, runs one fetcher
for each leader, and runs the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from logstore.replication.machines.controller import Controller, Decided
from logstore.replication.machines.follower import Fetched, Rotation
from logstore.replication.machines.image import ROOTS, ClusterImage, Key, Registration
from logstore.replication.machines.registration import (
    changed_registration,
    forget_deleted,
    plan,
    register,
)
from logstore.replication.metadata import Commit, Committed, Op, Outcome, SessionState
from logstore.testing.simulation.disk import Disk, SimulatedLog
from logstore.testing.simulation.metadata import Session
from logstore.testing.simulation.network import MS
from logstore.testing.simulation.partition import PartitionShell
from logstore.testing.simulation.serving import Parked, Rows, Serving

if TYPE_CHECKING:
    from logstore.testing.simulation.world import World

__all__ = ["SimulatedNode"]


class Fetching:
    """The fetcher of one leader: the partitions in rotation, and the request under way."""

    __slots__ = ("request", "rotation")

    def __init__(self) -> None:
        self.rotation = Rotation()
        self.request = 0  # the number of the request under way; 0: none


class SimulatedNode(Serving):
    """One node, over all its lives."""

    __slots__ = (
        *("_registering", "_writing", "broker_epoch", "controller", "disk", "drift", "fetchers"),
        *("id", "image", "inbox", "life", "offset_ms", "parked", "paused", "session", "shells"),
        *("unwilling", "up", "world"),
    )

    def __init__(self, world: World, number: int, disk: Disk) -> None:
        self.world = world
        self.id = number
        self.disk = disk
        self.life = 0
        self.up = False
        self.paused = False
        self.inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.offset_ms = 0  # of this node's clock
        self.drift = 1.0
        self._clear()

    def __repr__(self) -> str:
        return f"node {self.id}"

    def _clear(self) -> None:
        self.session: Session | None = None
        self.image = ClusterImage()
        self.controller = Controller(self.id, "")
        self.shells: dict[Key, PartitionShell] = {}
        self.fetchers: dict[int, Fetching] = {}
        self.parked: list[Parked] = []
        self.broker_epoch = -1
        self._registering = False
        self._writing = False  # whether a change of the registration is under way
        self.unwilling = False  # whether this node wants to lead nothing

    # ---- time ----

    def clock(self) -> int:
        """Return the time of this node in milliseconds."""
        return int(self.world.now * self.drift) // MS + self.offset_ms

    def after(self, delay_ms: int, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function of this life of the node, later."""
        self.world.at(delay_ms * MS, self._later, self.life, call, arguments)

    def _later(self, life: int, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.up and self.life == life:
            if self.paused:
                self.inbox.append((self._later, (life, call, arguments)))
            else:
                call(*arguments)

    # ---- life ----

    def start(self) -> None:
        """Start the process."""
        self._clear()
        self.up = True
        self.life += 1
        self.disk.open(self.world.random)
        self._connect()
        self.after(self.world.settings.tick_ms, self._tick)

    def _connect(self) -> None:
        """Open a session, read the tree and register."""
        session = self.session = Session(self.world.tree, self.id)
        self.image = ClusterImage()
        session.start(ROOTS, self.changed, self._moved)
        self.image.load(session)
        self.controller = Controller(self.id, f"{self.id}.{self.life}.{self.world.number()}")
        for shell in self.shells.values():
            shell.machine.nodes = self.image.nodes
        if self.id in self.world.nemesis.apart:
            session.cut()
        self._register()

    def crash(self, *, power: bool) -> None:
        """End the process, or the machine."""
        self.up = False
        self.paused = False
        self.inbox.clear()
        if self.session is not None:
            self.session.go_silent()
        for parked in self.parked:
            parked.exchange.lost(1)
        for shell in self.shells.values():
            for wait in shell.waits:
                wait.exchange.lost(1)
        self.disk.crash(self.world.random, power=power)
        self._clear()

    def shut_down(self) -> None:
        """Close cleanly: the sessions ends at once."""
        for shell in self.shells.values():
            shell.log.checkpointed = shell.machine.high_watermark
            shell.log.synced(shell.log.end_offset, shell.log.cuts)
        if self.session is not None:
            self.session.close()
        self.crash(power=False)

    def pause(self) -> None:
        """Stop the process for a while; it notices nothing."""
        self.paused = True
        if self.session is not None:
            self.session.go_silent()
        for parked in self.parked:
            parked.exchange.lost()

    def resume(self) -> None:
        """Continue, with everything that happened meanwhile."""
        self.paused = False
        inbox, self.inbox = self.inbox, []
        if self.session is not None:
            self.session.resumed()
        for call, arguments in inbox:
            self.world.at(int(self.world.random() * 2 * MS), call, *arguments)

    # ---- the session ----

    @property
    def registered(self) -> bool:
        """Return whether this life is registered."""
        return self.broker_epoch >= 0

    def commit(self, ops: Sequence[Op], done: Callable[[Outcome], None]) -> None:
        """Commit in this node's session."""
        session = self.session
        assert session is not None

        def answered(outcome: Outcome) -> None:
            if session is self.session:
                done(outcome)

        session.commit(ops, answered)

    def _moved(self, state: SessionState) -> None:
        if state != "lost":
            return
        self.world.mark("N6")
        self.controller.resign()
        self.broker_epoch = -1
        self._registering = self._writing = False
        for shell in list(self.shells.values()):
            shell.do(shell.machine.session_lost())
        self._connect()

    def _register(self) -> None:
        if self.registered or self._registering or self.session is None:
            return
        node = Registration(
            self.id,
            -1,
            host=f"node{self.id}",
            port=9092,
            lossy=self.disk.lossy,
            offline=self.offline(),  # also what failed in an earlier session of this life
            incarnation=str(self.life),
            boot=str(self.disk.boot),
            lock=(1, self.id),
        )
        asked = register(self.session, node, 0)
        if isinstance(asked, Registration):
            self.world.mark("N2 waits")
            return  # tried again with each tick
        made, ops = asked
        self._registering = True

        def done(outcome: Outcome) -> None:
            self._registering = False
            if isinstance(outcome, Committed):
                self._registered(made)
            else:
                self.after(20, self._register)

        self.commit(ops, done)

    def _registered(self, made: Registration) -> None:
        self.broker_epoch = made.epoch
        if made.lossy:
            self.world.mark("lossy restart")
        for shell in self.shells.values():
            shell.machine.broker_epoch = made.epoch
        self._plan()
        self._show(None)

    def offline(self) -> frozenset[Key]:
        """Return the partitions whose logs are not used."""
        return frozenset(
            key
            for key, log in self.disk.logs.items()
            if log.damaged or (key in self.shells and self.shells[key].machine.offline)
        )

    def write_registration(self) -> None:
        """Let the registration show what is so on this node."""
        node = self.image.nodes.get(self.id)
        if self._writing or node is None or node.epoch != self.broker_epoch:
            return
        offline = self.offline()
        if (node.unwilling, node.offline) == (self.unwilling, offline):
            return
        self._writing = True

        def done(outcome: Outcome) -> None:
            self._writing = False
            if isinstance(outcome, Committed):
                self.write_registration()  # tried again with the next tick otherwise

        ops = changed_registration(node, 0, unwilling=self.unwilling, offline=offline)
        self.commit(ops, done)

    # ---- the tree has changed ----

    def changed(self, path: str) -> None:
        """The mirror has another content at a path."""
        assert self.session is not None
        keys = self.image.refresh(self.session.read, path)
        if not self.registered:
            self._register()
            return
        if path.startswith(("/brokers/topics/", "/logstore/deleted")):
            self._plan()
        self._show(keys)
        me = self.image.nodes.get(self.id)
        if me is not None and me.epoch == self.broker_epoch and not me.lossy:
            self.disk.lossy = False

    def _show(self, keys: Any) -> None:
        for key in list(self.shells) if keys is None else keys:
            shell = self.shells.get(key)
            if shell is not None:
                shell.seen()
                if shell.machine.offline:
                    self._replace_offline(shell)
        self.controller.touched(keys, self.image)
        self._control()

    def _plan(self) -> None:
        """Have the partitions that the tree assigns to this node."""
        local = {key: log.topic_id for key, log in self.disk.logs.items()}
        wanted = plan(self.image, self.id, local)
        for key in wanted.set_aside:
            self._drop(key)
            self.disk.set_aside(key)
        for key, topic_id in wanted.delete:
            self._drop(key)
            del self.disk.logs[key]
            self.commit(forget_deleted(self.image, self.id, topic_id), lambda outcome: None)
        for key, topic_id in wanted.make:
            self.disk.logs[key] = SimulatedLog(topic_id)
        for key, log in self.disk.logs.items():
            if key not in self.shells:
                shell = self.shells[key] = PartitionShell(self, key, log)
                if log.damaged:
                    shell.fail("the log is damaged")
                shell.seen()

    def _drop(self, key: Key) -> None:
        shell = self.shells.pop(key, None)
        if shell is not None:
            shell.do(shell.machine.leave())
            self._unassign_fetcher(shell)

    # ---- damage ----

    def take_offline(self, shell: PartitionShell) -> None:
        """A partition's log is not used any more."""
        self.world.mark("offline")
        self.write_registration()

    def _replace_offline(self, shell: PartitionShell) -> None:
        """Begin again with an empty log, when this replica does not count any more."""
        if not shell.machine.is_replaceable:
            return
        key = shell.key
        self._drop(key)
        self.disk.set_aside(key)
        log = self.disk.logs[key] = SimulatedLog(shell.log.topic_id)
        log.promised_epoch = shell.log.promised_epoch
        fresh = self.shells[key] = PartitionShell(self, key, log)
        self.world.mark("replaced")
        self.write_registration()
        fresh.seen()

    # ---- the controller ----

    def _control(self) -> None:
        if not self.registered:
            return
        campaign = self.controller.campaign(self.image, self.clock())
        controller = self.controller
        if campaign is not None:

            def campaigned(outcome: Outcome) -> None:
                if controller is self.controller:
                    controller.campaigned(outcome, self.image)
                    self._control()

            self.commit(campaign.ops, campaigned)
        for commit in controller.step(self.image):
            self._decide(controller, commit)

    def _decide(self, controller: Controller, commit: Commit) -> None:
        def decided(outcome: Outcome) -> None:
            if isinstance(outcome, Committed) and isinstance(commit.tag, Decided):
                self.world.oracle.decided(commit.tag)
            if controller is self.controller:
                controller.decided(commit.tag, outcome, self.image)
                self._control()

        self.commit(commit.ops, decided)

    # ---- ticks ----

    def _tick(self) -> None:
        now = self.clock()
        for shell in list(self.shells.values()):
            if shell.machine.leader is not None:
                shell.do(shell.machine.leader.tick(now))
        if self.world.random() < 0.3:
            for shell in self.shells.values():
                shell.log.checkpointed = shell.machine.high_watermark
        if not self.registered:
            self._register()
        else:
            self._control()
            self.write_registration()
        late = self.world.settings.tick_ms if self.world.chance("late tick") else 0
        self.after(self.world.settings.tick_ms + late, self._tick)

    # ---- fetching ----

    def assign_fetcher(self, shell: PartitionShell) -> None:
        """Have a partition in the fetcher of its leader, and in no other."""
        follower = shell.machine.follower
        leader = -1
        if shell.machine.leader is None and follower is not None and follower.view is not None:
            leader = follower.view.leader
        if leader != shell.fetched_from:
            self._unassign_fetcher(shell)
            if leader >= 0 and shell.key in self.shells:
                shell.fetched_from = leader
                fetching = self.fetchers.get(leader)
                if fetching is None:
                    fetching = self.fetchers[leader] = Fetching()
                fetching.rotation.add(shell.key)
        if leader >= 0 and follower is not None and follower.phase == "ready":
            self._wake(leader)

    def _unassign_fetcher(self, shell: PartitionShell) -> None:
        fetching = self.fetchers.get(shell.fetched_from)
        if fetching is not None:
            fetching.rotation.remove(shell.key)
        shell.fetched_from = -1

    def _wake(self, leader: int) -> None:
        """Send the next fetch to a leader, unless one is under way."""
        fetching = self.fetchers[leader]
        if fetching.request:
            return
        rows: Rows = []
        order = fetching.rotation.keys()
        for key in order:
            follower = self.shells[key].machine.follower
            if follower is not None and follower.phase == "ready":
                offer = follower.poll(self.world.number())
                if offer is not None:
                    rows.append((key, offer))
        if not rows:
            return
        number = fetching.request = self.world.number()
        self.world.oracle.fetching(self, leader, rows)

        def answered(answers: list[tuple[Key, int, Fetched]]) -> None:
            self._fetched(leader, number, answers)

        def broken() -> None:
            self._broken(leader, number, rows)

        request = (self.id, self.broker_epoch, rows)
        self.world.network.request(self.id, leader, "fetch", request, answered, broken)

    def _fetched(self, leader: int, number: int, answers: list[tuple[Key, int, Fetched]]) -> None:
        fetching = self.fetchers[leader]
        if fetching.request == number:
            fetching.request = 0
            fetching.rotation.served([key for key, _, answer in answers if answer.raw])
        for key, token, answer in answers:
            shell = self.shells.get(key)
            follower = shell.machine.follower if shell is not None else None
            if shell is not None and follower is not None:
                self.world.oracle.answered(shell, answer)
                shell.do(follower.fetched(token, answer))
        self._wake(leader)

    def _broken(self, leader: int, number: int, rows: Rows) -> None:
        fetching = self.fetchers[leader]
        if fetching.request != number:
            return
        fetching.request = 0
        self.world.mark("F12")
        for key, offer in rows:
            shell = self.shells.get(key)
            follower = shell.machine.follower if shell is not None else None
            if shell is not None and follower is not None:
                shell.do(follower.broken(offer.token))
        self._wake(leader)
