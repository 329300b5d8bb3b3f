"""Nemesis: the faults of a run, and the acts of its administrators.

Half of the acts against a node are aimed at a leader or at the controller.  A promise is tested up
to its edge and not beyond: a replica loses acknowledged records only while fewer than
`min_isr` replicas have, and no administrator lowers the minimum meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from logstore.replication.machines.image import (
    CONTROLLER,
    PREFERRED,
    REASSIGN,
    Key,
    Registration,
    as_json,
    broker_path,
    config_path,
    state_path,
)
from logstore.replication.metadata import ANY, Create, Delete, Set
from logstore.testing.simulation.network import CLIENT, MS

if TYPE_CHECKING:
    from logstore.testing.simulation.node import SimulatedNode
    from logstore.testing.simulation.partition import PartitionShell
    from logstore.testing.simulation.world import World

__all__ = ["Nemesis"]


class Nemesis:
    """Chooses acts by their share, one each 0.1 to 2.5 s."""

    __slots__ = ("_acts", "_total", "apart", "failing", "healed", "minimum", "world")

    def __init__(self, world: World) -> None:
        self.world = world
        self.apart: set[int] = set()  # nodes that cannot reach the metadata service
        self.failing = 0  # the node whose next sync fails
        self.healed = False
        self.minimum = world.settings.min_isr  # as configured now
        shares: tuple[tuple[int, Callable[[], None]], ...] = (
            (12, self.kill_one),
            (13, self.cut_power),
            (12, self.pause_one),
            (13, self.cut_link),
            (10, self.isolate),
            (13, self.cut_metadata),
            (5, self.lose_controller),
            (10, self.reassign),
            (6, self.elect),
            (3, self.storm),
            (6, self.change_minimum),
            (1, self.fail_sync),
            (1, self.fill_disk),
            (1, self.flip_bit),
            (2, self.move_clock),
            (1, self.swizzle),
            (3, self.shut_down),
            (3, self.delete_records),
        )
        self._acts = [act for _, act in shares]
        self._total = [share for share, _ in shares]

    def start(self) -> None:
        """Begin after the cluster has had a moment to form."""
        if self.world.settings.nemesis:
            self._later(800, 2000, self._act)

    def _later(self, low_ms: float, high_ms: float, call: Callable[..., None], *of: object) -> None:
        world = self.world
        delay = low_ms + world.random() * (high_ms - low_ms)
        world.at(int(delay * MS), call, *of)

    def _act(self) -> None:
        if self.healed:
            return
        act = self.world.rng.choices(self._acts, self._total)[0]
        self.world.note("nemesis:", act.__name__)
        act()
        rate = self.world.settings.nemesis
        self._later(100 / rate, 2500 / rate, self._act)

    # ---- aims ----

    def any_key(self) -> Key:
        """Return some partition."""
        keys = self.world.keys
        return keys[int(self.world.random() * len(keys))]

    def target(self) -> SimulatedNode:
        """Return a node: every other time a leader or the controller."""
        world = self.world
        if world.random() < 0.5:
            number = self.controller() if world.random() < 0.3 else 0
            if not number:
                state = world.oracle.states.get(self.any_key())
                number = state.leader if state is not None else 0
            if number > 0:
                return world.nodes[number]
        return world.nodes[1 + int(world.random() * len(world.nodes))]

    def controller(self) -> int:
        """Return the node that is the controller, or 0."""
        found = self.world.tree.nodes.get(CONTROLLER)
        return 0 if found is None else int(json.loads(found[0])["brokerid"])

    def lossy(self) -> bool:
        """Return whether some replica has lost acknowledged records and is not back in sync."""
        return any(truth.lossy for truth in self.world.oracle.truths.values())

    def may_lose(self, node: SimulatedNode) -> bool:
        """Return whether a node may lose acknowledged records now."""
        oracle = self.world.oracle
        for key in node.disk.logs:
            state, lossy = oracle.states.get(key), oracle.truths[key].lossy | {node.id}
            if state is None or state.min_isr != min(self.minimum, self._target_size(key)):
                return False
            if len(lossy) > state.min_isr - 1 or not {*state.isr, *state.elr} - lossy:
                return False
        return True

    def _target_size(self, key: Key) -> int:
        assignments = self.world.oracle.assignments
        return 0 if assignments is None else len(assignments.partitions[key[1]].target)

    def _lost(self, node: SimulatedNode) -> None:
        for key in node.disk.logs:
            self.world.oracle.truths[key].lossy.add(node.id)

    # ---- processes and machines ----

    def kill_one(self) -> None:
        """Kill a process, and start it again."""
        self.crash(self.target(), power=False)

    def cut_power(self) -> None:
        """Cut the power of a machine; of all, if no replica acknowledges what is not durable."""
        world = self.world
        node = self.target()
        if world.settings.fsync and world.random() < 0.15:
            for each in world.nodes.values():
                self.crash(each, power=True)
        elif world.settings.fsync or self.may_lose(node):
            self.crash(node, power=True)

    def crash(self, node: SimulatedNode, *, power: bool) -> None:
        """End a process or a machine."""
        if not node.up:
            return
        if power and not node.disk.fsync:
            self._lost(node)
        self.world.note(node, "loses power" if power else "is killed")
        node.crash(power=power)
        self._later(20, 5000, self._restart, node, node.life)

    def _restart(self, node: SimulatedNode, life: int) -> None:
        if not node.up and node.life == life:
            node.start()

    def shut_down(self) -> None:
        """Close a node cleanly: first it hands its leaderships over."""
        node = self.target()
        if node.up and not node.paused and node.registered:
            node.unwilling = True
            node.write_registration()
            self._later(50, 1500, self._close, node, node.life)

    def _close(self, node: SimulatedNode, life: int) -> None:
        if node.up and node.life == life and not node.paused and not self.healed:
            if not node.registered:
                node.unwilling = False
                return
            self.world.mark("N7")
            node.shut_down()
            self._later(20, 3000, self._restart, node, node.life)

    def pause_one(self) -> None:
        """Pause a process, for longer than its session or not."""
        node = self.target()
        if node.up and not node.paused:
            node.pause()
            self._later(50, 6000, self._resume, node, node.life)

    def _resume(self, node: SimulatedNode, life: int) -> None:
        if node.up and node.paused and node.life == life:
            node.resume()

    # ---- links ----

    def cut_link(self) -> None:
        """Cut a link between two nodes, one way or both."""
        world = self.world
        one, other = self.target().id, 1 + int(world.random() * len(world.nodes))
        links = {(one, other), (other, one)} if world.random() < 0.5 else {(one, other)}
        world.network.cut |= links
        self._later(200, 5000, self._mend, links)

    def _mend(self, links: set[tuple[int, int]]) -> None:
        self.world.network.cut -= links

    def isolate(self) -> None:
        """Cut a node from all other nodes; sometimes from clients too."""
        world = self.world
        node = self.target().id
        links = {link for other in world.nodes for link in ((node, other), (other, node))}
        if world.random() < 0.3:
            links |= {(node, CLIENT), (CLIENT, node)}
        world.network.cut |= links
        self._later(500, 6000, self._mend, links)

    def swizzle(self) -> None:
        """Cut the links of a node one by one, and heal them in another order."""
        world = self.world
        node = self.target().id
        links = [link for other in world.nodes for link in ((node, other), (other, node))]
        for link in links:
            self._later(0, 600, world.network.cut.add, link)
            self._later(900, 4000, world.network.cut.discard, link)

    def cut_metadata(self) -> None:
        """Cut a node from the metadata service."""
        node = self.target()
        if node.id not in self.apart:
            self.apart.add(node.id)
            if node.session is not None:
                node.session.cut()
            self._later(200, 7000, self._mend_metadata, node)

    def _mend_metadata(self, node: SimulatedNode) -> None:
        self.apart.discard(node.id)
        if node.session is not None:
            node.session.mend()

    # ---- the controller and administrators ----

    def lose_controller(self) -> None:
        """Move the controllership by hand; writes of the old one arrive late."""
        world = self.world
        found = world.tree.nodes.get(CONTROLLER)
        if found is not None:
            if found[2] is not None:
                found[2].lag_until = world.now + 400 * MS
            world.at(int(world.random() * 200 * MS), self._delete_controller)

    def _delete_controller(self) -> None:
        self.world.mark("controller moved")
        self.world.tree.apply([Delete(CONTROLLER)])

    def reassign(self) -> None:
        """Move the replicas of a partition, or cancel the move."""
        world = self.world
        if self.lossy():
            return
        key = self.any_key()
        count = max(2, min(len(world.nodes), world.settings.replicas + int(world.random() * 3) - 1))
        target = world.rng.sample(sorted(world.nodes), count)
        cancel = world.random() < 0.25
        row = {"topic": key[0], "partition": key[1], "replicas": [] if cancel else target}
        self._put(REASSIGN, as_json({"version": 1, "partitions": [row]}))

    def _put(self, path: str, data: bytes) -> None:
        exists = path in self.world.tree.nodes
        self.world.tree.apply([Set(path, data, ANY) if exists else Create(path, data)])

    def elect(self) -> None:
        """Ask for the preferred leader, or elect a member of the in-sync set."""
        key = self.any_key()
        if self.world.random() < 0.5:
            row = {"topic": key[0], "partition": key[1]}
            self._put(PREFERRED, as_json({"version": 1, "partitions": [row]}))
        else:
            self.elect_any(key)

    def elect_any(self, key: Key, node: int = 0) -> int:
        """Elect a live member of the in-sync set, as a controller may; return it, or 0."""
        world = self.world
        state = world.oracle.states.get(key)
        if state is None:
            return 0
        live = {
            member: Registration.decode(member, *world.tree.nodes[broker_path(member)][:2])
            for member in state.isr
            if broker_path(member) in world.tree.nodes
        }
        if node:
            live = {node: live[node]}
        fit = [each for each in live.values() if not each.lossy and key not in each.offline]
        if not fit:
            return 0
        chosen = fit[int(world.random() * len(fit))]
        elected = state.led_by(chosen.id, chosen.epoch)
        world.tree.apply([Set(state_path(key), elected.encode(), state.version)])
        return chosen.id

    def storm(self) -> None:
        """Elect several leaders in a short time, cut from one another, with a write to each."""
        world = self.world
        key = self.any_key()
        links = {(a, b) for a in world.nodes for b in world.nodes if a != b}
        world.network.cut |= links
        self.world.mark("storm")
        at = 0
        for _ in range(3 + int(world.random() * 4)):
            self._later(at, at + 30, self._storm, key)
            at += 45
        self._later(at + 50, at + 900, self._mend, links)

    def _storm(self, key: Key) -> None:
        world = self.world
        chosen = self.elect_any(key) if not self.healed else 0
        if chosen and not world.clients.producers[-1].stopped:
            self._later(5, 15, self._write, key, chosen)

    def _write(self, key: Key, node: int) -> None:
        producer = self.world.clients.producers[-1]  # it does not wait for the last one
        if not producer.stopped:
            producer.send(key, target=node)

    def change_minimum(self) -> None:
        """Change min.insync.replicas."""
        world = self.world
        if self.lossy():
            return
        self.minimum = 1 + int(world.random() * 2)
        fields = {"version": 1, "config": {"min.insync.replicas": str(self.minimum)}}
        world.tree.apply([Set(config_path("topics", "t"), as_json(fields), ANY)])

    def delete_records(self) -> None:
        """Delete the first records of a partition."""
        world = self.world
        key = self.any_key()
        offset = int(world.random() * (world.oracle.truths[key].end + 1))
        world.network.request(
            CLIENT,
            world.clients.leader_of(key),
            "delete_records",
            (key, offset),
            lambda code: None,
            lambda: None,
        )

    # ---- disks and clocks ----

    def fail_sync(self) -> None:
        """Let the next sync of a node fail."""
        node = self.target()
        if node.up and self.may_lose(node):
            self.failing = node.id

    def sync_fails(self, shell: PartitionShell) -> bool:
        """Return whether a sync that ends now has failed."""
        if self.failing != shell.node.id or self.healed:
            return False
        self.failing = 0
        if not self.may_lose(shell.node):
            return False
        self.world.oracle.truths[shell.key].lossy.add(shell.node.id)
        self.world.mark("sync failed")
        return True

    def fill_disk(self) -> None:
        """Fill a disk for a while."""
        node = self.target()
        node.disk.full = True
        self._later(500, 4000, self._free, node)

    def _free(self, node: SimulatedNode) -> None:
        node.disk.full = node.unwilling = False

    def flip_bit(self) -> None:
        """Stop a node and damage one of its logs."""
        node = self.target()
        if node.up and node.disk.logs and self.may_lose(node):
            key = sorted(node.disk.logs)[int(self.world.random() * len(node.disk.logs))]
            self.world.oracle.truths[key].lossy.add(node.id)
            node.disk.logs[key].damaged = True
            self.world.mark("damage")
            self.crash(node, power=False)

    def move_clock(self) -> None:
        """Let a clock jump, and run fast or slow."""
        world = self.world
        node = self.target()
        if world.random() < 0.5:
            node.offset_ms += int((world.random() - 0.5) * 7_200_000)
        else:
            node.drift = 0.9 + 0.2 * world.random()

    # ---- the end ----

    def heal(self) -> None:
        """Undo every fault."""
        self.healed = True
        world = self.world
        for node in world.nodes.values():
            node.disk.full = node.unwilling = False
            self._resume(node, node.life)
            if not node.up:
                node.start()
        for number in sorted(self.apart):
            self._mend_metadata(world.nodes[number])
