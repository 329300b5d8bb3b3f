"""Registration of a node: the commits of its life, and the partitions it should have.

The broker epoch is the version of a path that is never deleted.  Registering raises it, so two
lives of one node never have the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from logstore.replication.machines.image import (
    ClusterImage,
    Key,
    Registration,
    as_json,
    broker_path,
    deleted_path,
    epoch_path,
)
from logstore.replication.metadata import Check, Create, Delete, Metadata, Op, Set

__all__ = ["LocalPlan", "changed_registration", "forget_deleted", "plan", "register"]


def register(
    metadata: Metadata, node: Registration, timestamp_ms: int
) -> tuple[Registration, tuple[Op, ...]] | Registration:
    """Return the registration with its broker epoch, and the commit that makes it.

    If another process is registered under this id, return that registration: the caller waits for
    its session to end.  A registration of the same boot and the same lock file is of a process that
    is dead, because we hold that lock: the commit deletes it.
    """
    path = epoch_path(node.id)
    found = metadata.read(path)
    data = as_json({"incarnation": node.incarnation})
    raised: Op = Create(path, data) if found is None else Set(path, data, found[1])
    made = node._replace(epoch=0 if found is None else found[1] + 1, version=0)
    ops: tuple[Op, ...] = (raised,)
    held = metadata.read(broker_path(node.id))
    if held is not None:
        other = Registration.decode(node.id, *held)
        if not other.boot or (other.boot, other.lock) != (node.boot, node.lock):
            return other
        ops += (Delete(broker_path(node.id), held[1]),)
    ops += (Create(broker_path(node.id), made.encode(timestamp_ms), ephemeral=True),)
    return made, ops


def changed_registration(
    node: Registration,
    timestamp_ms: int,
    *,
    unwilling: bool | None = None,
    offline: frozenset[Key] | None = None,
) -> tuple[Op, ...]:
    """Return the commit that changes flags of a registration, from the one in the image.

    It checks the broker epoch too: the versions of the path start again with each life of the node,
    and a commit of an earlier life may arrive late.
    """
    changed = node._replace(
        unwilling=node.unwilling if unwilling is None else unwilling,
        offline=node.offline if offline is None else offline,
    )
    return (
        Check(epoch_path(node.id), node.epoch),
        Set(broker_path(node.id), changed.encode(timestamp_ms), node.version),
    )


class LocalPlan(NamedTuple):
    """What a node has to change in its store so that it has the partitions assigned to it."""

    make: list[tuple[Key, str]]  # with the topic's id
    set_aside: list[Key]  # not assigned, or of another topic id: kept as a stray
    delete: list[tuple[Key, str]]  # of a topic that is deleted for certain


def plan(image: ClusterImage, me: int, local: Mapping[Key, str]) -> LocalPlan:
    """Compare the image with the partitions that the store has: key -> topic id.

    Only a topic id that the tree lists as deleted is deleted.  A partition that is merely not
    assigned is set aside: the image may be older than the tree.
    """
    make: list[tuple[Key, str]] = []
    set_aside: list[Key] = []
    delete: list[tuple[Key, str]] = []
    for key, topic_id in sorted(local.items()):
        topic = image.topics.get(key[0])
        assignment = image.assignment(key)
        ours = assignment is not None and me in assignment.replicas
        if ours and topic is not None and topic.topic_id == topic_id:
            continue
        if topic_id in image.deleted:
            delete.append((key, topic_id))
        else:
            set_aside.append(key)
    for name, topic in sorted(image.topics.items()):
        for number, assignment in sorted(topic.partitions.items()):
            key = name, number
            if me in assignment.replicas and local.get(key) != topic.topic_id:
                make.append((key, topic.topic_id))
    return LocalPlan(make, set_aside, delete)


def forget_deleted(image: ClusterImage, me: int, topic_id: str) -> tuple[Op, ...]:
    """Return the commit after this node has deleted a topic; the last node deletes the list."""
    found = image.deleted.get(topic_id)
    if found is None:
        return ()
    fields, version = found
    left = [node for node in fields.get("nodes", ()) if node != me]
    path = deleted_path(topic_id)
    if left == list(fields.get("nodes", ())):
        return ()
    if not left:
        return (Delete(path, version),)
    return (Set(path, as_json({**fields, "nodes": left}), version),)
