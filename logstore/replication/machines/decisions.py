"""decide: the next state of a partition, as a function of the cluster's image.

The image is enough: nothing depends on the events that led to it, so a new controller continues
where the last one stopped.  A partition is decided again after each change that concerns it; the
first rule that applies gives the write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from logstore.replication.machines.assignment import Assignment
from logstore.replication.machines.image import (
    ClusterImage,
    Key,
    TopicImage,
    as_json,
    config_path,
    delete_path,
    deleted_path,
    state_path,
    topic_path,
)
from logstore.replication.machines.leader_and_isr import NO_LEADER, LeaderAndIsr
from logstore.replication.metadata import ANY, Check, Create, Delete, Op, Set

__all__ = [
    "Decision",
    "decide",
    "deletion",
    "holds_damaged",
    "is_move_done",
    "partition_state",
    "preferred_imbalance",
    "preferred_leaders",
]


class Decision(NamedTuple):
    """A write of the controller: its ops without the check of the controller epoch, and why."""

    ops: tuple[Op, ...]
    reason: str


class _Partition:
    """One partition of the image, with the questions that the rules ask."""

    def __init__(self, image: ClusterImage, key: Key, topic: TopicImage) -> None:
        self.image = image
        self.key = key
        self.topic = topic
        self.assignment: Assignment = topic.partitions[key[1]]

    def live(self, node: int) -> bool:
        """Whether a node is registered and can use this partition."""
        found = self.image.nodes.get(node)
        return found is not None and self.key not in found.offline

    def willing(self, node: int) -> bool:
        return self.live(node) and not self.image.nodes[node].unwilling

    def damaged(self, node: int) -> bool:
        """Whether a node may miss committed records of this partition."""
        found = self.image.nodes.get(node)
        return found is not None and (found.lossy or self.key in found.offline)

    def first(self, nodes: Collection[int], *, willing: bool = True) -> int | None:
        """Return the first of the assigned replicas that is in `nodes` and may lead."""
        may_lead = self.willing if willing else self.live
        for node in self.assignment.replicas:
            if node in nodes and may_lead(node):
                return node
        return None

    def lead(self, state: LeaderAndIsr, node: int) -> LeaderAndIsr:
        return state.led_by(node, self.image.nodes[node].epoch)

    # ---- writes ----

    def write(self, state: LeaderAndIsr, reason: str) -> Decision:
        state = state._replace(controller_epoch=self.image.controller_epoch)
        state.check(self.assignment.replicas)
        topic = Check(topic_path(self.key[0]), self.topic.version)
        return Decision((topic, self.set_state(state)), reason)

    def set_state(self, state: LeaderAndIsr) -> Set:
        return Set(state_path(self.key), state.encode(), state.version)

    def write_both(self, assignment: Assignment, state: LeaderAndIsr, reason: str) -> Decision:
        """Change assignment and state in one write: no reader sees one without the other."""
        state = state._replace(controller_epoch=self.image.controller_epoch)
        state.check(assignment.replicas)
        return Decision((self.set_assignment(assignment), self.set_state(state)), reason)

    def set_assignment(self, assignment: Assignment) -> Set:
        changed = self.topic.with_assignment(self.key[1], assignment)
        return Set(topic_path(self.key[0]), changed.encode(), self.topic.version)


def decide(
    image: ClusterImage, key: Key, *, preferred: bool = False, unclean: int | None = None
) -> Decision | None:
    """Return the next write for a partition, or None if it is as it should be.

    `preferred`: elect the preferred leader if it may lead.  `unclean`: elect this node even if it
    misses committed records, if no other may lead.
    """
    topic = image.topics.get(key[0])
    if topic is None or key[1] not in topic.partitions or key[0] in image.deleting:
        return None
    partition = _Partition(image, key, topic)
    state = image.states.get(key)
    if state is None:
        return _first_state(partition)
    # First: the other rules keep members within the replicas.  An image that has a new assignment
    # and an old state shows this too; then the write is refused.
    replicas = partition.assignment.replicas
    if not set(state.isr) | set(state.elr) <= set(replicas):
        return partition.write(_kept(partition, state, replicas), "replicas were removed")
    changed, reason = _repaired(partition, state, unclean)
    if changed != state:
        return partition.write(changed, reason)
    move = _moved(partition, state)
    if move is not None:
        return move
    minimum = image.minimum(key)
    if state.min_isr != minimum:
        return partition.write(state.with_minimum(minimum), f"min.insync.replicas is {minimum}")
    best = replicas[0]
    if preferred and state.leader != best and best in state.isr and partition.willing(best):
        return partition.write(partition.lead(state, best), "the preferred leader is elected")
    return None


def _first_state(partition: _Partition) -> Decision | None:
    replicas = partition.assignment.replicas
    live = tuple(node for node in replicas if partition.live(node))
    leader = partition.first(live)
    leader = partition.first(live, willing=False) if leader is None else leader
    if leader is None:
        return None
    image = partition.image
    state = LeaderAndIsr(
        version=0,
        leader=leader,
        leader_epoch=0,
        leader_broker_epoch=image.nodes[leader].epoch,
        isr=live,
        min_isr=image.minimum(partition.key),
        controller_epoch=image.controller_epoch,
    )
    state.check(replicas)
    topic = Check(topic_path(partition.key[0]), partition.topic.version)
    created = Create(state_path(partition.key), state.encode())
    return Decision((topic, created), "the partition is new")


def _repaired(
    partition: _Partition, state: LeaderAndIsr, unclean: int | None
) -> tuple[LeaderAndIsr, str]:
    """Remove members that lost records or are not registered; elect if the leader cannot lead."""
    reason = ""
    changed = state
    known = {*state.isr, *state.elr}
    damaged = _to_remove(partition, state)
    if damaged:
        changed = changed.without(damaged, lossy=damaged)
        reason = f"nodes {sorted(damaged)} may miss committed records"
        if damaged == known:
            changed = changed._replace(last_known=tuple(sorted(known)))
        if any(partition.key in partition.image.nodes[node].offline for node in damaged):
            # Such a node begins again with an empty log, in the same life.  In a new leader epoch a
            # late fetch of its old log does not count.
            changed = changed._replace(leader_epoch=changed.leader_epoch + 1)
    if not _leads(partition, changed):
        return _elected(partition, changed, unclean, reason)
    if partition.image.nodes[changed.leader].unwilling:
        others = [node for node in changed.isr if node != changed.leader]
        successor = partition.first(others)
        if successor is not None:
            left = changed.without({changed.leader})
            return partition.lead(left, successor), f"node {changed.leader} wants to lead nothing"
    gone = {node for node in changed.isr if node not in partition.image.nodes}
    if gone:
        changed = changed.without(gone)
        reason = f"nodes {sorted(gone)} are not registered"
    return changed, reason


def _to_remove(partition: _Partition, state: LeaderAndIsr) -> set[int]:
    """Return the members that may miss committed records.

    With min.insync.replicas=1 one copy was asked for: if all have lost records, they stay, so that
    the partition is available.  What they lost is reported.
    """
    known = {*state.isr, *state.elr}
    damaged = {node for node in known if partition.damaged(node)}
    return set() if damaged == known and state.min_isr == 1 else damaged


def holds_damaged(image: ClusterImage, key: Key, node: int) -> bool:
    """Return whether a partition still counts a node as in sync that may miss records."""
    topic, state = image.topics.get(key[0]), image.states.get(key)
    if topic is None or state is None or key[1] not in topic.partitions:
        return False
    return node in _to_remove(_Partition(image, key, topic), state)


def _leads(partition: _Partition, state: LeaderAndIsr) -> bool:
    """Whether the leader of a state is alive, in the same life in which it was elected."""
    leader = partition.image.nodes.get(state.leader)
    return (
        leader is not None
        and leader.epoch == state.leader_broker_epoch
        and partition.live(state.leader)
        and state.leader in state.isr
    )


def _elected(
    partition: _Partition, state: LeaderAndIsr, unclean: int | None, reason: str
) -> tuple[LeaderAndIsr, str]:
    known = {*state.isr, *state.elr}
    leader: int | None = None
    for pool, willing in ((state.isr, True), (state.elr, True), (known, False)):
        leader = partition.first(pool, willing=willing)
        if leader is not None:
            break
    gone = {node for node in state.isr if not partition.live(node)}
    if leader is not None:
        was = "the partition had no leader"
        if state.leader != NO_LEADER:
            was = f"node {state.leader} cannot lead in epoch {state.leader_epoch}"
        return partition.lead(state.without(gone), leader), reason or was
    if unclean is None and _allows_unclean(partition):
        unclean = partition.first(partition.assignment.replicas, willing=False)
    if unclean is not None and partition.live(unclean):
        # Even a member that lost records: the state must not say that it has them all.
        alone = state._replace(isr=(), elr=())
        return partition.lead(alone, unclean), f"unclean election of node {unclean}"
    if state.leader == NO_LEADER and not state.isr:
        return state, reason
    return state.without(state.isr).leaderless(), reason or "no replica in sync is alive"


def _allows_unclean(partition: _Partition) -> bool:
    name = "unclean.leader.election.enable"
    return partition.image.setting(partition.key[0], name, "false") == "true"


def _kept(partition: _Partition, state: LeaderAndIsr, replicas: Collection[int]) -> LeaderAndIsr:
    """Return the state within new replicas, with a leader among them."""
    kept = state.within(replicas)
    if kept.leader in kept.isr:
        return kept
    leader = partition.first([node for node in kept.isr if node in replicas])
    if leader is None:
        leader = partition.first(kept.isr, willing=False)
    if leader is None:
        return kept.without(kept.isr)._replace(leader=NO_LEADER, leader_broker_epoch=-1)
    return partition.lead(kept, leader)._replace(leader_epoch=kept.leader_epoch)


# ---- reassignment ----


def _moved(partition: _Partition, state: LeaderAndIsr) -> Decision | None:
    """Complete a move whose targets are all in sync, or begin, change or cancel one."""
    assignment = partition.assignment
    asked, wanted = _request(partition.image, partition.key)
    if asked and wanted is None and assignment.moving:
        origin = assignment.origin
        if partition.first([node for node in state.isr if node in origin], willing=False) is None:
            return None  # no replica of the origin is in sync and alive: it cannot be cancelled
        back = assignment.cancelled()
        return partition.write_both(back, _kept(partition, state, origin), "the move is cancelled")
    if wanted is not None and tuple(wanted) != assignment.target:
        begun = assignment.towards(wanted)
        reason = f"replicas move to {list(wanted)}"
        if set(assignment.replicas) <= set(begun.replicas):
            return Decision((partition.set_assignment(begun),), reason)
        # A replica of the last request is dropped.  It deletes its log, and may be added again: the
        # new leader epoch keeps a late fetch of the old log from counting.
        kept = [node for node in state.isr if node in begun.replicas]
        if partition.first(kept, willing=False) is None:
            return None
        return partition.write_both(begun, _kept(partition, state, begun.replicas), reason)
    if not assignment.moving:
        return None
    target = assignment.target
    if not set(target) <= set(state.isr) or len(target) < state.min_isr:
        return None
    done = assignment.completed()
    return partition.write_both(done, _kept(partition, state, target), "the move is complete")


def _request(image: ClusterImage, key: Key) -> tuple[bool, tuple[int, ...] | None]:
    """Return whether a reassignment of a partition is asked for, and its target; None: cancel."""
    if image.reassign is None:
        return False, None
    for row in image.reassign[0].get("partitions", ()):
        if (row.get("topic"), row.get("partition")) == key:
            replicas = row.get("replicas")
            return True, tuple(map(int, replicas)) if replicas else None
    return False, None


def is_move_done(image: ClusterImage, key: Key) -> bool:
    """Return whether nothing is left to do of a requested reassignment."""
    assignment = image.assignment(key)
    if assignment is None:
        return True
    _, wanted = _request(image, key)
    return not assignment.moving and (wanted is None or wanted == assignment.replicas)


# ---- deletion, names and balance ----


def deletion(image: ClusterImage, topic: str) -> Decision | None:
    """Return the write that deletes a topic, if its deletion is asked for."""
    if topic not in image.deleting:
        return None
    ops: list[Op] = []
    found = image.topics.get(topic)
    if found is not None:
        nodes = sorted({node for each in found.partitions.values() for node in each.replicas})
        if found.topic_id not in image.deleted:
            data = as_json({"name": topic, "nodes": nodes})
            ops.append(Create(deleted_path(found.topic_id), data))
        root = topic_path(topic)
        stated = [number for number in sorted(found.partitions) if (topic, number) in image.states]
        for number in stated:
            ops.append(Delete(state_path((topic, number)), image.states[topic, number].version))
            ops.append(Delete(f"{root}/partitions/{number}", ANY))
        if stated:
            ops.append(Delete(f"{root}/partitions", ANY))
        ops.append(Delete(root, found.version))
    if ("topics", topic) in image.configs:
        ops.append(Delete(config_path("topics", topic), ANY))
    ops.append(Delete(delete_path(topic), image.deleting[topic]))
    return Decision(tuple(ops), f"topic {topic} is deleted")


def partition_state(image: ClusterImage, key: Key) -> str:
    """Return Kafka's name for what the image shows of a partition."""
    if image.assignment(key) is None:
        return "NonExistentPartition"
    state = image.states.get(key)
    if state is None:
        return "NewPartition"
    topic = image.topics[key[0]]
    return "OnlinePartition" if _leads(_Partition(image, key, topic), state) else "OfflinePartition"


def preferred_imbalance(image: ClusterImage, keys: Iterable[Key]) -> dict[int, float]:
    """Return, for each node, the share of its preferred partitions that another node leads."""
    owned: dict[int, int] = {}
    elsewhere: dict[int, int] = {}
    for best, leads in preferred_leaders(image, keys):
        owned[best] = owned.get(best, 0) + 1
        elsewhere[best] = elsewhere.get(best, 0) + (not leads)
    return {node: elsewhere[node] / count for node, count in owned.items()}


def preferred_leaders(image: ClusterImage, keys: Iterable[Key]) -> Iterator[tuple[int, bool]]:
    """Yield the preferred leader of each partition that has a state, and whether it leads."""
    for key in keys:
        assignment, state = image.assignment(key), image.states.get(key)
        if assignment is not None and state is not None and assignment.replicas:
            yield assignment.replicas[0], state.leader == assignment.replicas[0]
