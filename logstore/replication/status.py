"""ClusterStatus: what a cluster has at one moment, for people; it prints as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from logstore.replication.machines.decisions import partition_state
from logstore.replication.machines.image import ClusterImage, Key

__all__ = ["ClusterStatus", "NodeStatus", "PartitionStatus", "status_of"]


class NodeStatus(NamedTuple):
    """A node: whether it is registered, and what it is registered with."""

    node: int
    alive: bool
    broker_epoch: int
    rack: str | None
    leads: int  # partitions
    replicas: int  # assigned to it
    lossy: bool
    unwilling: bool
    offline: int  # partitions that it cannot use


class PartitionStatus(NamedTuple):
    """A partition: its leader and replicas.  `ends` has the end offset of each log that is known.

    `state` is Kafka's name: OnlinePartition has a leader that is alive.
    """

    topic: str
    partition: int
    state: str
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    elr: tuple[int, ...]
    minimum: int
    high_watermark: int
    ends: Mapping[int, int]

    @property
    def is_under_replicated(self) -> bool:
        """Whether a replica is not in sync."""
        return len(self.isr) < len(self.replicas)


class ClusterStatus(NamedTuple):
    """A cluster: its controller, its nodes and its partitions."""

    cluster_id: str
    controller: int  # -1: there is none
    nodes: tuple[NodeStatus, ...]
    partitions: tuple[PartitionStatus, ...]

    @property
    def under_replicated(self) -> tuple[PartitionStatus, ...]:
        """The partitions with a replica that is not in sync."""
        return tuple(each for each in self.partitions if each.is_under_replicated)

    @property
    def offline(self) -> tuple[PartitionStatus, ...]:
        """The partitions without a leader that is alive."""
        return tuple(each for each in self.partitions if each.state != "OnlinePartition")

    def __str__(self) -> str:
        controller = "none" if self.controller < 0 else f"node {self.controller}"
        head = f"cluster {self.cluster_id}, controller: {controller}\n"
        nodes = _table(
            ("node", "alive", "epoch", "rack", "leads", "replicas", "notes"),
            (
                (
                    *(
                        each.node,
                        "yes" if each.alive else "no",
                        each.broker_epoch,
                        each.rack or "-",
                    ),
                    *(each.leads, each.replicas, _notes(each)),
                )
                for each in self.nodes
            ),
        )
        partitions = _table(
            ("partition", "leader", "replicas", "isr", "elr", "high watermark", "ends"),
            (
                (
                    f"{each.topic}-{each.partition}",
                    "none" if each.leader < 0 else f"{each.leader}@{each.leader_epoch}",
                    _numbers(each.replicas),
                    _numbers(each.isr),
                    _numbers(each.elr),
                    each.high_watermark,
                    " ".join(f"{node}:{end}" for node, end in sorted(each.ends.items())),
                )
                for each in self.partitions
            ),
        )
        return f"{head}\n{nodes}\n{partitions}".rstrip()


def status_of(
    image: ClusterImage, ends: Mapping[Key, Mapping[int, int]], watermarks: Mapping[Key, int]
) -> ClusterStatus:
    """Return the status that an image shows.  The caller holds the lock of the image."""
    leads: dict[int, int] = {}
    has: dict[int, int] = {}
    rows = []
    keys = image.keys()
    for key in keys:
        assignment, state = image.assignment(key), image.states.get(key)
        assert assignment is not None
        for node in assignment.replicas:
            has[node] = has.get(node, 0) + 1
        if state is not None:
            leads[state.leader] = leads.get(state.leader, 0) + 1
        rows.append(
            PartitionStatus(
                topic=key[0],
                partition=key[1],
                state=partition_state(image, key),
                leader=-1 if state is None else state.leader,
                leader_epoch=-1 if state is None else state.leader_epoch,
                replicas=assignment.replicas,
                isr=() if state is None else state.isr,
                elr=() if state is None else state.elr,
                minimum=image.minimum(key) if state is None else state.min_isr,
                high_watermark=watermarks.get(key, -1),
                ends=dict(ends.get(key, {})),
            )
        )
    nodes = []
    for number in sorted({*image.nodes, *has}):
        found = image.nodes.get(number)
        nodes.append(
            NodeStatus(
                node=number,
                alive=found is not None,
                broker_epoch=-1 if found is None else found.epoch,
                rack=None if found is None else found.rack,
                leads=leads.get(number, 0),
                replicas=has.get(number, 0),
                lossy=found is not None and found.lossy,
                unwilling=found is not None and found.unwilling,
                offline=0 if found is None else len(found.offline),
            )
        )
    controller = -1 if image.controller is None else int(image.controller.get("brokerid", -1))
    return ClusterStatus(image.cluster_id, controller, tuple(nodes), tuple(rows))


def _notes(node: NodeStatus) -> str:
    notes = [name for name in ("lossy", "unwilling") if getattr(node, name)]
    if node.offline:
        notes.append(f"{node.offline} offline")
    return ", ".join(notes) or "-"


def _numbers(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers)) or "-"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(str(line[at])) for line in lines) for at in range(len(head))]
    return "".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )
