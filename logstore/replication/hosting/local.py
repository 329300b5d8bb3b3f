"""LocalPartitions: the partitions that the store of a node has, and those that it should have.

A partition that the tree assigns to this node is made with the topic's id.  One that is not
assigned any more is set aside and kept; it is deleted only if the tree lists its topic id as
deleted.  A replica whose log is damaged is offline: when the tree shows that it does not count as
in sync any more, its directory is set aside, and an empty one is filled from the leader.

The thread of the node changes it; other threads read `replicas`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from logstore.config import PartitionConfig
from logstore.errors import LogStoreError
from logstore.log.topic_id import parse_uuid, uuid_text
from logstore.replication.hosting.hosted import Host, HostedReplica
from logstore.replication.hosting.replica_log import PartitionLog
from logstore.replication.machines.image import ClusterImage, Key
from logstore.replication.machines.leader_and_isr import NO_LEADER
from logstore.replication.machines.registration import forget_deleted, plan
from logstore.replication.machines.replica import Replica
from logstore.replication.metadata import Outcome

if TYPE_CHECKING:
    from logstore.replication.config import NodeConfig
    from logstore.store.store import Store

__all__ = ["LocalHost", "LocalPartitions"]

log = logging.getLogger("logstore.replication")


class LocalHost(Host, Protocol):
    """The node, as this module uses it."""

    id: int
    store: Store
    config: NodeConfig
    image: ClusterImage


class LocalPartitions:
    """The replicas of one node."""

    def __init__(self, node: LocalHost) -> None:
        self._node = node
        self.replicas: dict[Key, HostedReplica] = {}
        self._ids: dict[Key, str] = {}  # of all partitions that the store has
        self._offline: dict[Key, str] = {}  # with the reason
        self._settings: dict[str, dict[str, str]] = {}  # that the topics of the store have
        self._forgetting: set[str] = set()  # topic ids of commits that are under way
        self._broker_epoch = -1
        self.lossy = False

    def all(self) -> list[HostedReplica]:
        """Return all replicas."""
        return list(self.replicas.values())

    @property
    def offline_keys(self) -> frozenset[Key]:
        """The partitions that this node cannot use."""
        return frozenset(self._offline)

    def offline_reasons(self) -> Mapping[Key, str]:
        """Return why each of them is offline."""
        return dict(self._offline)

    def has_work(self, image: ClusterImage) -> bool:
        """Return whether `follow` has to be called although no partition changed."""
        me = self._node.id
        listed = any(me in fields.get("nodes", ()) for fields, _ in image.deleted.values())
        return bool(self._offline) or listed

    # ---- at the start, and with each life ----

    def open_all(self) -> None:
        """Open the partitions that the store has.  One that cannot be opened is offline."""
        store = self._node.store
        for name in store:
            for number in store[name].partition_numbers:
                key = name, number
                topic_id = store[name].id
                self._ids[key] = "" if topic_id is None else uuid_text(topic_id)
                self._host(key)

    def begin_life(self, broker_epoch: int, image: ClusterImage) -> None:
        """This node is registered: replicas may have a role."""
        self._broker_epoch = broker_epoch
        for replica in self.all():
            replica.machine.nodes = image.nodes
            replica.registered(broker_epoch)

    def _host(self, key: Key) -> None:
        node = self._node
        try:
            partition = node.store[key[0]][key[1]]
        except (OSError, LogStoreError) as error:
            log.error("%s-%d cannot be opened: %s", *key, error)
            self._offline[key] = str(error)
            return
        partition_log = PartitionLog(partition)
        if partition.recovery.damage:
            self._offline[key] = f"damage was found: {partition.recovery.damage[0].reason}"
            return
        self.lossy = self.lossy or partition.recovery.lossy
        machine = Replica(
            key,
            node.id,
            partition_log,
            node.image.nodes,
            hw=node.store.topic_changes.checkpointed_high_watermark(*key) or 0,
            fsync=partition_log.fsync,
            lag_ms=node.config.replica_lag_time_max_ms,
            backoff_ms=node.config.replica_fetch_backoff_ms,
        )
        machine.broker_epoch = self._broker_epoch
        self.replicas[key] = HostedReplica(node, self._ids[key], machine, partition_log)

    def _drop(self, key: Key) -> None:
        """Stop using a partition; its directory is about to be changed."""
        replica = self.replicas.pop(key, None)
        if replica is not None:
            replica.close()
        self._offline.pop(key, None)
        self._ids.pop(key, None)

    # ---- following the tree ----

    def set_offline(self, key: Key, reason: str) -> None:
        """Note that a log cannot be used."""
        self._offline.setdefault(key, reason)

    def follow(self, image: ClusterImage) -> None:
        """Make, set aside and delete partitions, so that the store has those of the image."""
        work = plan(image, self._node.id, self._ids)
        for key, topic_id in work.delete:
            self._delete(key, topic_id)
        for key in work.set_aside:
            self._set_aside(key, "it is not assigned to this node")
        self._delete_empty(image)
        self._forget(image)
        for key, topic_id in work.make:
            self._make(key, topic_id, image)
        for key in list(self._offline):
            self._refill(key, image)
        for name in {key[0] for key in self._ids}:
            self._configure(name, image)

    def _make(self, key: Key, topic_id: str, image: ClusterImage) -> None:
        name, number = key
        topic = image.topics[name]
        settings = image.configs.get(("topics", name), ({}, 0))[0]
        store = self._node.store
        try:
            store.topic_changes.declare_topic(
                name,
                topic_id=parse_uuid(topic_id),
                partitions=max(topic.partitions) + 1,
                local=(number,),
                config=engine_settings(settings),
            )
        except (OSError, LogStoreError, ValueError) as error:
            log.error("%s-%d cannot be made: %s", name, number, error)
            return
        self._settings.setdefault(name, engine_settings(settings))
        self._ids[key] = topic_id
        self._host(key)

    def _set_aside(self, key: Key, reason: str) -> bool:
        log.warning("%s-%d is set aside: %s", *key, reason)
        self._drop(key)
        store = self._node.store
        try:
            store.topic_changes.set_aside_partition(store[key[0]], key[1])
        except (OSError, LogStoreError) as error:
            log.error("%s-%d cannot be set aside: %s", *key, error)
            return False
        return True

    def _delete(self, key: Key, topic_id: str) -> None:
        log.info("%s-%d of the deleted topic %s is deleted", *key, topic_id)
        self._drop(key)
        store = self._node.store
        try:
            store.topic_changes.drop_partition(store[key[0]], key[1])
        except (OSError, LogStoreError) as error:
            log.error("%s-%d cannot be deleted: %s", *key, error)

    def _delete_empty(self, image: ClusterImage) -> None:
        """Delete topics that have no partition here and are gone from the image."""
        store = self._node.store
        for name in list(store):
            topic_id, known = store[name].id, image.topics.get(name)
            gone = known is None or topic_id is None or known.topic_id != uuid_text(topic_id)
            if gone and not store[name].partition_numbers:
                store.delete_topic(name)
                self._settings.pop(name, None)

    def _forget(self, image: ClusterImage) -> None:
        """Take this node off the lists of deleted topics that it has nothing of any more."""
        kept = set(self._ids.values())
        for topic_id in set(image.deleted) - kept - self._forgetting:
            ops = forget_deleted(image, self._node.id, topic_id)
            if ops:
                self._forgetting.add(topic_id)
                # Other nodes change the same list: it is tried again until this node is off it.
                self._node.commit(ops, self._forgotten(topic_id))

    def _forgotten(self, topic_id: str) -> Callable[[Outcome], None]:
        return lambda outcome: self._forgetting.discard(topic_id)

    def _refill(self, key: Key, image: ClusterImage) -> None:
        """Replace a log that cannot be used by an empty one, when it does not count as in sync."""
        state, mine = image.states.get(key), image.nodes.get(self._node.id)
        if state is None or mine is None or key not in mine.offline:
            return
        counts = self._node.id in (*state.isr, *state.elr)
        if counts or state.leader in (NO_LEADER, self._node.id):
            return
        topic_id, reason = self._ids[key], self._offline[key]
        if self._set_aside(key, reason):
            self._make(key, topic_id, image)

    def _configure(self, name: str, image: ClusterImage) -> None:
        """Use the settings that the tree has for a topic."""
        settings = engine_settings(image.configs.get(("topics", name), ({}, 0))[0])
        before = self._settings.get(name)
        if before == settings or name not in self._node.store:
            return
        changes: dict[str, str | None] = dict.fromkeys(before or {}, None)
        changes.update(settings)
        try:
            if changes:
                self._node.store.alter_topic(name, changes)
        except (OSError, LogStoreError) as error:
            log.error("topic %s: its settings cannot be used: %s", name, error)
        self._settings[name] = settings


def engine_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that a log has; the others are for replication only."""
    known = PartitionConfig().as_dict()
    return {name: value for name, value in settings.items() if name in known}
