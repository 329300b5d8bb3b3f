"""Clustered: the topology of a node of a cluster, from the node's image of the metadata tree.

The image may be older than the tree.  A client that is sent to the wrong node gets
NOT_LEADER_OR_FOLLOWER there, asks for the metadata again, and finds the leader.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from logstore.config import ConfigError, PartitionConfig
from logstore.coordinators.internal_topics import (
    CONSUMER_OFFSETS,
    INTERNAL_TOPICS,
    TRANSACTION_STATE,
    coordinator_partition,
)
from logstore.errors import TopicExistsError, UnknownTopicError
from logstore.kafka.clustering.topology import ZERO_ID, Created, NodeRow, Place
from logstore.kafka.protocol.errors import ErrorCode, KafkaError, error_code, error_message
from logstore.log.topic_id import parse_uuid
from logstore.replication.hosting.admin import Admin
from logstore.replication.hosting.hosted import HostedReplica
from logstore.replication.hosting.local import engine_settings
from logstore.replication.machines.assignment import PlacementError, place
from logstore.replication.machines.decisions import partition_state
from logstore.replication.machines.image import Key
from logstore.replication.machines.leader_and_isr import NO_LEADER
from logstore.replication.machines.throttle import LISTS, RATES
from logstore.replication.node import Node

if TYPE_CHECKING:
    from logstore.kafka.network.connection import Connection

__all__ = ["Clustered"]

TOPIC_OF_KIND = {0: CONSUMER_OFFSETS, 1: TRANSACTION_STATE}

# A node that is gone is listed for so long: librdkafka 2.16 never ends a request for a coordinator
# whose node has left the list while its connection was being made again.
LISTED_SECONDS = 30.0

Outcomes = dict[Key, tuple[ErrorCode, str | None]]


class Clustered:
    """What handlers ask; see Topology."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._admin = Admin(node)
        self._making: set[str] = set()  # internal topics whose creation is under way
        node.listen(self._changed)

    def _changed(self, key: Key, what: str) -> None:
        """Wake the fetches that wait for a partition which this node leads no more."""
        replica = self._node.replica(key) if what == "role" else None
        if replica is not None and not replica.log.partition.closed:
            replica.log.partition.parts.view.wake_followers()

    @property
    def node_id(self) -> int:
        return self._node.id

    @property
    def cluster_id(self) -> str:
        return self._node.image.cluster_id

    @property
    def controller_id(self) -> int:
        controller = self._node.image.controller
        return -1 if controller is None else int(controller.get("brokerid", -1))

    def nodes(self, connection: Connection) -> list[NodeRow]:
        node, since = self._node, time.monotonic() - LISTED_SECONDS
        with node.lock:
            gone = {key: each for key, (each, at) in node.departed.items() if at > since}
            found = {**gone, **node.image.nodes}
            alive = set(node.image.nodes)
        rows = sorted(found.values())
        return [
            NodeRow(each.id, each.host, each.port, each.rack, each.id not in alive) for each in rows
        ]

    def names(self) -> list[str]:
        with self._node.lock:
            image = self._node.image
            return sorted(name for name in image.topics if name not in image.deleting)

    def topic_id(self, name: str) -> bytes | None:
        topic = self._node.image.topics.get(name)
        if topic is None or name in self._node.image.deleting:
            return None
        return _id_bytes(topic.topic_id)

    def name_of(self, topic_id: bytes) -> str | None:
        with self._node.lock:
            for name, topic in self._node.image.topics.items():
                if _id_bytes(topic.topic_id) == topic_id:
                    return name
        return None

    def numbers(self, name: str) -> Sequence[int]:
        topic = self._node.image.topics.get(name)
        return () if topic is None else sorted(topic.partitions)

    def place(self, name: str, number: int) -> Place:
        image = self._node.image
        assignment, state = image.assignment((name, number)), image.states.get((name, number))
        replicas = () if assignment is None else assignment.replicas
        offline = [
            node
            for node in replicas
            if node not in image.nodes or (name, number) in image.nodes[node].offline
        ]
        if state is None:
            missing = ErrorCode.LEADER_NOT_AVAILABLE
            return Place(NO_LEADER, -1, replicas, (), offline=offline, code=missing)
        live = state.leader in image.nodes
        return Place(
            state.leader if live else NO_LEADER,
            state.leader_epoch,
            replicas,
            state.isr,
            state.elr,
            state.last_known,
            offline,
            ErrorCode.NONE if live else ErrorCode.LEADER_NOT_AVAILABLE,
        )

    def coordinator(self, kind: int, key: str, connection: Connection) -> NodeRow | ErrorCode:
        topic = TOPIC_OF_KIND[kind]
        if topic not in self._node.image.topics:
            self.make_internal(topic)
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        found = self.place(topic, coordinator_partition(key, len(self.numbers(topic))))
        node = self._node.image.nodes.get(found.leader)
        if node is None:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        return NodeRow(node.id, node.host, node.port, node.rack)

    def make_internal(self, topic: str) -> None:
        """Begin to create an internal topic, unless that is under way."""
        assert topic in INTERNAL_TOPICS
        if topic in self._making or topic in self._node.image.topics:
            return
        self._making.add(topic)
        config, settings = self._node.config, dict(INTERNAL_TOPICS[topic])
        partitions, factor = (
            config.offsets_topic_num_partitions, config.offsets_topic_replication_factor
        )  # fmt: skip
        if topic == TRANSACTION_STATE:
            partitions = config.transaction_state_log_num_partitions
            factor = config.transaction_state_log_replication_factor
        factor = min(factor, len(self._node.image.nodes))
        if topic == TRANSACTION_STATE:
            settings["min.insync.replicas"] = min(factor, config.transaction_state_log_min_isr)
        self._admin.create_topic(
            topic, partitions, factor, lambda _: self._making.discard(topic), config=settings
        )

    def replica(self, name: str, number: int) -> HostedReplica | None:
        return self._node.replica((name, number))

    def leads(self, name: str, number: int) -> bool:
        replica = self._node.replica((name, number))
        return replica is not None and replica.machine.leader is not None

    def check_leads(self, name: str, number: int) -> None:
        if not self.leads(name, number):
            raise KafkaError(self.missing(name, number))

    def trim(self, name: str, number: int, offset: int) -> int:
        replica = self._node.replica((name, number))
        code = ErrorCode.NOT_LEADER_OR_FOLLOWER if replica is None else replica.trim(offset)
        if code:
            raise KafkaError(ErrorCode(code))
        return self.low_watermark(name, number)

    def low_watermark(self, name: str, number: int) -> int:
        replica = self._node.replica((name, number))
        found = None if replica is None else replica.low_watermark()
        if found is None:
            raise KafkaError(self.missing(name, number))
        return found

    def missing(self, name: str, number: int) -> ErrorCode:
        if self._node.image.assignment((name, number)) is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return ErrorCode.NOT_LEADER_OR_FOLLOWER

    def settings(self, name: str) -> PartitionConfig | None:
        image = self._node.image
        if name not in image.topics:
            return None
        return PartitionConfig.of(engine_settings(image.configs.get(("topics", name), ({}, 0))[0]))

    # ---- changes: called by workers' threads, which may wait ----

    def _wait(self, act: Callable[[Callable[[BaseException | None], object]], None]) -> None:
        """Make a change and wait for it; raise what it failed with."""
        ended = threading.Event()
        errors: list[BaseException | None] = []

        def done(error: BaseException | None) -> None:
            errors.append(error)
            ended.set()

        act(done)
        ended.wait()
        error = errors[0]
        if isinstance(error, PlacementError):
            raise KafkaError(ErrorCode.INVALID_REPLICATION_FACTOR, str(error)) from error
        if error is not None:
            raise error

    def create(
        self,
        name: str,
        partitions: int,
        factor: int,
        assignment: Mapping[int, Sequence[int]] | None,
        settings: Mapping[str, Any],
        *,
        timeout: float,
        validate_only: bool,
    ) -> Created:
        factor = self._node.config.default_replication_factor if factor == -1 else factor
        if assignment is not None:
            factor = len(next(iter(assignment.values())))
        image = self._node.image
        if name in image.topics:
            raise TopicExistsError(name)
        if validate_only:
            config = PartitionConfig.of(settings)
            self._check_placement(partitions, factor, assignment)
            return Created(ZERO_ID, partitions, factor, config)
        try:
            self._wait(
                lambda done: self._admin.create_topic(
                    name,
                    partitions,
                    factor,
                    done,
                    config=settings,
                    assignment=assignment,
                    timeout=timeout,
                )
            )
        except ConfigError as error:
            if assignment is not None:
                raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, str(error)) from error
            raise
        config = self.settings(name) or PartitionConfig.of(settings)
        return Created(self.topic_id(name) or ZERO_ID, partitions, factor, config)

    def _check_placement(
        self, partitions: int, factor: int, assignment: Mapping[int, Sequence[int]] | None
    ) -> None:
        racks = {node.id: node.rack for node in self._node.image.nodes.values()}
        for replicas in (assignment or {}).values():
            unknown = sorted(set(replicas) - set(racks))
            if unknown:
                text = f"nodes {unknown} are not registered"
                raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
        if assignment is None:
            try:
                place(racks, partitions, factor, start=0, shift=0)
            except PlacementError as error:
                raise KafkaError(ErrorCode.INVALID_REPLICATION_FACTOR, str(error)) from error

    def delete(self, name: str, *, timeout: float) -> None:
        self._wait(functools.partial(self._admin.delete_topic, name, timeout=timeout))

    def grow(
        self,
        name: str,
        count: int,
        assignment: Mapping[int, Sequence[int]] | None,
        *,
        timeout: float,
        validate_only: bool,
    ) -> None:
        if validate_only:
            self._check_placement(0, 1, assignment)
            return
        self._wait(
            functools.partial(
                self._admin.create_partitions, name, count, assignment=assignment, timeout=timeout
            )
        )

    def alter(self, name: str, changes: Mapping[str, Any]) -> None:
        self._wait(functools.partial(self._admin.alter_config, name, changes))

    def throttle(self, kind: str, owner: str) -> Mapping[str, str] | None:
        names = (LISTS if kind == "topics" else RATES).values()
        settings = self._node.image.configs.get((kind, owner), ({}, 0))[0]
        return {name: settings[name] for name in names if name in settings}

    def alter_node(self, owner: str, changes: Mapping[str, str | None]) -> None:
        self._wait(functools.partial(self._admin.alter_node, owner, changes))

    def elect(self, keys: Iterable[Key], *, unclean: bool, timeout: float) -> Outcomes:
        outcomes: Outcomes = {}
        wanted: list[Key] = []
        image = self._node.image
        for key in keys:
            assignment, state = image.assignment(key), image.states.get(key)
            if assignment is None or state is None:
                gone = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                outcomes[key] = gone, "there is no such partition"
            elif unclean and partition_state(image, key) == "OnlinePartition":
                outcomes[key] = ErrorCode.ELECTION_NOT_NEEDED, "the partition has a leader"
            elif not unclean and state.leader == assignment.replicas[0]:
                done = "the preferred replica leads already"
                outcomes[key] = ErrorCode.ELECTION_NOT_NEEDED, done
            else:
                wanted.append(key)
        for key in wanted:
            outcomes[key] = self._elect_one(key, unclean=unclean, timeout=timeout)
        return outcomes

    def _elect_one(
        self, key: Key, *, unclean: bool, timeout: float
    ) -> tuple[ErrorCode, str | None]:
        image = self._node.image
        assignment = image.assignment(key)
        assert assignment is not None
        node = None
        if unclean:
            live = [each for each in assignment.replicas if each in image.nodes]
            if not live:
                return ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, "no replica is alive"
            node = live[0]
        try:
            self._wait(lambda done: self._admin.elect([key], done, unclean=node, timeout=timeout))
        except Exception as error:  # noqa: BLE001  answered with its code
            return error_code(error), error_message(error)
        state = self._node.image.states.get(key)
        if state is not None and state.leader == (node if unclean else assignment.replicas[0]):
            return ErrorCode.NONE, None
        if unclean:
            return ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, "no replica could be elected"
        return ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "the preferred replica is not in sync"

    def reassign(self, targets: Mapping[Key, Sequence[int] | None], *, timeout: float) -> Outcomes:
        outcomes: Outcomes = {}
        image = self._node.image
        valid: dict[Key, Sequence[int] | None] = {}
        for key, target in targets.items():
            assignment = image.assignment(key)
            if assignment is None:
                gone = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                outcomes[key] = gone, "there is no such partition"
            elif target is None and not assignment.moving:
                outcomes[key] = ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, None
            else:
                valid[key] = target
        for key, target in valid.items():
            try:
                self._wait(functools.partial(self._admin.reassign, {key: target}, timeout=timeout))
            except ConfigError as error:
                outcomes[key] = ErrorCode.INVALID_REPLICA_ASSIGNMENT, str(error)
            except (UnknownTopicError, IndexError):
                outcomes[key] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such partition"
            except Exception as error:  # noqa: BLE001  answered with its code
                outcomes[key] = error_code(error), error_message(error)
            else:
                outcomes[key] = ErrorCode.NONE, None
        return outcomes

    def moving(self) -> dict[Key, tuple[Sequence[int], Sequence[int], Sequence[int]]]:
        with self._node.lock:
            image = self._node.image
            rows = [(key, image.assignment(key)) for key in image.keys()]  # noqa: SIM118
        return {
            key: (each.replicas, each.adding, each.removing)
            for key, each in rows
            if each is not None and each.moving
        }


def _id_bytes(text: str) -> bytes:
    """Return a topic id as it is sent; zero for a topic of an old broker, which has none."""
    return parse_uuid(text).bytes if text else ZERO_ID
