"""Topology: the nodes, who leads each partition, and changes of topics.

Handlers ask a topology and do not know whether the store is alone.  `Alone` is a store without a
cluster: this node leads every partition and has its only replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from logstore.config import PartitionConfig
from logstore.coordinators.internal_topics import INTERNAL_TOPICS, internal_partitions
from logstore.errors import TopicExistsError, UnknownTopicError
from logstore.kafka.protocol.errors import ErrorCode, KafkaError
from logstore.store.store import Store

if TYPE_CHECKING:
    from logstore.kafka.network.connection import Connection
    from logstore.replication.hosting.hosted import HostedReplica

__all__ = ["ZERO_ID", "Alone", "Created", "NodeRow", "Place", "Topology", "replica_id"]

ZERO_ID = bytes(16)


class NodeRow(NamedTuple):
    """A node, as Metadata lists it."""

    node_id: int
    host: str
    port: int
    rack: str | None = None
    fenced: bool = False  # not registered any more


class Place(NamedTuple):
    """The replicas of a partition, as Metadata lists them."""

    leader: int
    leader_epoch: int
    replicas: Sequence[int]
    isr: Sequence[int]
    elr: Sequence[int] = ()
    last_known: Sequence[int] = ()
    offline: Sequence[int] = ()
    code: ErrorCode = ErrorCode.NONE


class Created(NamedTuple):
    """A topic that was created."""

    topic_id: bytes
    partitions: int
    replication_factor: int
    config: PartitionConfig


class Topology(Protocol):
    """What handlers ask of a cluster, or of a store alone."""

    @property
    def node_id(self) -> int:
        """This node."""

    @property
    def cluster_id(self) -> str:
        """The cluster."""

    @property
    def controller_id(self) -> int:
        """The node that elects leaders; -1: none is known."""

    def nodes(self, connection: Connection) -> list[NodeRow]:
        """Return the nodes that are alive."""

    def names(self) -> list[str]:
        """Return the names of all topics, in order."""

    def topic_id(self, name: str) -> bytes | None:
        """Return the id of a topic, zero if it has none; None if there is no such topic."""

    def name_of(self, topic_id: bytes) -> str | None:
        """Return the topic with an id."""

    def numbers(self, name: str) -> Sequence[int]:
        """Return the numbers of a topic's partitions; none if there is no such topic."""

    def place(self, name: str, number: int) -> Place:
        """Return where a partition of a topic is."""

    def coordinator(self, kind: int, key: str, connection: Connection) -> NodeRow | ErrorCode:
        """Return the coordinator of a group (kind 0) or transactional id (kind 1)."""

    def replica(self, name: str, number: int) -> HostedReplica | None:
        """Return the replica of a partition here; None if the store is alone."""

    def leads(self, name: str, number: int) -> bool:
        """Return whether this node leads a partition."""

    def check_leads(self, name: str, number: int) -> None:
        """Raise KafkaError unless this node leads a partition."""

    def trim(self, name: str, number: int, offset: int) -> int:
        """Delete the records below `offset` of a log that this node leads; see `low_watermark`."""

    def low_watermark(self, name: str, number: int) -> int:
        """Return the least start of the logs of all live replicas; KafkaError: not led here."""

    def missing(self, name: str, number: int) -> ErrorCode:
        """Return the error for a partition that this store does not have."""

    def settings(self, name: str) -> PartitionConfig | None:
        """Return the settings of a topic; None if there is no such topic."""

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
        """Create a topic."""

    def delete(self, name: str, *, timeout: float) -> None:
        """Delete a topic."""

    def grow(
        self,
        name: str,
        count: int,
        assignment: Mapping[int, Sequence[int]] | None,
        *,
        timeout: float,
        validate_only: bool,
    ) -> None:
        """Add partitions to a topic, so that it has `count`."""

    def alter(self, name: str, changes: Mapping[str, Any]) -> None:
        """Change settings of a topic; None restores a default."""

    def throttle(self, kind: str, owner: str) -> Mapping[str, str] | None:
        """Return the settings of the throttle that a topic or a node has (topics, brokers).

        None: there are no replicas to throttle.
        """

    def alter_node(self, owner: str, changes: Mapping[str, str | None]) -> None:
        """Change settings of a node, or of all (``<default>``); None removes one."""

    def elect(
        self, keys: Iterable[tuple[str, int]], *, unclean: bool, timeout: float
    ) -> dict[tuple[str, int], tuple[ErrorCode, str | None]]:
        """Elect leaders; return the outcome for each partition."""

    def reassign(
        self, targets: Mapping[tuple[str, int], Sequence[int] | None], *, timeout: float
    ) -> dict[tuple[str, int], tuple[ErrorCode, str | None]]:
        """Move replicas, or cancel a move (None); return the outcome for each partition."""

    def moving(self) -> dict[tuple[str, int], tuple[Sequence[int], Sequence[int], Sequence[int]]]:
        """Return the partitions whose replicas move: replicas, those added, those removed."""


def replica_id(body: dict[str, Any]) -> int:
    """Return the node whose follower sends a Fetch; -1 for a consumer."""
    return int(max(body["replica_id"], body["replica_state"]["replica_id"]))


class Alone:
    """A store without a cluster."""

    def __init__(self, store: Store, advertised: NodeRow | None) -> None:
        """`advertised`: the address that clients are sent to, if it is not the listener's."""
        self._store = store
        self._advertised = advertised

    @property
    def node_id(self) -> int:
        return self._store.identity.node_id

    @property
    def cluster_id(self) -> str:
        return self._store.identity.cluster_id

    @property
    def controller_id(self) -> int:
        return self.node_id

    def nodes(self, connection: Connection) -> list[NodeRow]:
        if self._advertised is not None:
            return [self._advertised]
        return [NodeRow(self.node_id, *connection.local)]

    def names(self) -> list[str]:
        return sorted(self._store)

    def topic_id(self, name: str) -> bytes | None:
        topic = self._store.get(name)
        if topic is None:
            return None
        return ZERO_ID if topic.id is None else topic.id.bytes

    def name_of(self, topic_id: bytes) -> str | None:
        for topic in self._store.values():
            if topic.id is not None and topic.id.bytes == topic_id:
                return topic.name
        return None

    def numbers(self, name: str) -> Sequence[int]:
        topic = self._store.get(name)
        if topic is None:
            return ()
        if name in INTERNAL_TOPICS:
            return range(internal_partitions(name))
        return topic.partition_numbers

    def place(self, name: str, number: int) -> Place:
        topic = self._store.get(name)
        opened = None if topic is None else topic.opened(number)
        node = self.node_id
        return Place(node, -1 if opened is None else opened.leader_epoch, (node,), (node,))

    def coordinator(self, kind: int, key: str, connection: Connection) -> NodeRow | ErrorCode:
        return self.nodes(connection)[0]

    def replica(self, name: str, number: int) -> HostedReplica | None:
        return None

    def leads(self, name: str, number: int) -> bool:
        return True

    def check_leads(self, name: str, number: int) -> None:
        pass

    def trim(self, name: str, number: int, offset: int) -> int:
        partition = self._store[name][number]
        partition.trim(offset)
        return partition.start_offset

    def low_watermark(self, name: str, number: int) -> int:
        return self._store[name][number].start_offset

    def missing(self, name: str, number: int) -> ErrorCode:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def settings(self, name: str) -> PartitionConfig | None:
        topic = self._store.get(name)
        return None if topic is None else topic.config

    # ---- changes ----

    def _check_only(self, assignment: Mapping[int, Sequence[int]] | None) -> None:
        for replicas in (assignment or {}).values():
            if list(replicas) != [self.node_id]:
                raise KafkaError(
                    ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                    f"{list(replicas)}: the only node is {self.node_id}",
                )

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
        self._check_only(assignment)
        if factor not in (-1, 1):
            raise KafkaError(
                ErrorCode.INVALID_REPLICATION_FACTOR, f"{factor} replicas, and there is 1 node"
            )
        if name in self._store:
            raise TopicExistsError(name)
        if validate_only:
            return Created(ZERO_ID, partitions, 1, PartitionConfig.of(settings))
        topic = self._store.create_topic(name, partitions=partitions, config=settings)
        return Created(self.topic_id(name) or ZERO_ID, partitions, 1, topic.config)

    def delete(self, name: str, *, timeout: float) -> None:
        self._store.delete_topic(name)

    def grow(
        self,
        name: str,
        count: int,
        assignment: Mapping[int, Sequence[int]] | None,
        *,
        timeout: float,
        validate_only: bool,
    ) -> None:
        self._check_only(assignment)
        topic = self._store[name]
        if not validate_only:
            topic.add_partitions(count - len(topic))

    def alter(self, name: str, changes: Mapping[str, Any]) -> None:
        topic = self._store.get(name)
        if topic is None:
            raise UnknownTopicError(name)
        topic.alter(changes)

    def throttle(self, kind: str, owner: str) -> Mapping[str, str] | None:
        return None

    def alter_node(self, owner: str, changes: Mapping[str, str | None]) -> None:
        raise KafkaError(ErrorCode.INVALID_CONFIG, "settings of the node are fixed")

    def elect(
        self, keys: Iterable[tuple[str, int]], *, unclean: bool, timeout: float
    ) -> dict[tuple[str, int], tuple[ErrorCode, str | None]]:
        done = ErrorCode.ELECTION_NOT_NEEDED, "the preferred replica leads already"
        gone = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such partition"
        return {key: done if key[1] in self._made(key[0]) else gone for key in keys}

    def _made(self, name: str) -> Sequence[int]:
        topic = self._store.get(name)
        return () if topic is None else topic.partition_numbers

    def reassign(
        self, targets: Mapping[tuple[str, int], Sequence[int] | None], *, timeout: float
    ) -> dict[tuple[str, int], tuple[ErrorCode, str | None]]:
        outcomes: dict[tuple[str, int], tuple[ErrorCode, str | None]] = {}
        for key, target in targets.items():
            if key[1] not in self._made(key[0]):
                gone = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                outcomes[key] = gone, "there is no such partition"
            elif target is None:
                outcomes[key] = ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, None
            elif list(target) != [self.node_id]:
                refused = ErrorCode.INVALID_REPLICA_ASSIGNMENT
                outcomes[key] = refused, f"the only node is {self.node_id}"
            else:
                outcomes[key] = ErrorCode.NONE, None
        return outcomes

    def moving(self) -> dict[tuple[str, int], tuple[Sequence[int], Sequence[int], Sequence[int]]]:
        return {}
