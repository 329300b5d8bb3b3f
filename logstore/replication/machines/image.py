"""ClusterImage: the metadata tree as values, with the paths and the JSON of Kafka 2.x and 3.x.

The image follows the mirror of one session: `refresh` reads one path again and returns what it
concerns.  Contents that cannot be parsed count as absent and are listed in `unreadable`: they never
stop a process.  Keys of ours are below `logstore`, which Kafka's readers skip.

A partition is named by the key (topic, number).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from logstore.replication.machines.assignment import Assignment
from logstore.replication.machines.leader_and_isr import LeaderAndIsr
from logstore.replication.metadata import Metadata

__all__ = [
    "CONTROLLER",
    "CONTROLLER_EPOCH",
    "PREFERRED",
    "REASSIGN",
    "ROOTS",
    "ClusterImage",
    "Key",
    "Registration",
    "TopicImage",
    "as_json",
    "broker_path",
    "config_path",
    "delete_path",
    "deleted_path",
    "epoch_path",
    "state_path",
    "topic_path",
    "touches_node",
]

Key = tuple[str, int]

CLUSTER_ID = "/cluster/id"
CONTROLLER = "/controller"
CONTROLLER_EPOCH = "/controller_epoch"
REASSIGN = "/admin/reassign_partitions"
PREFERRED = "/admin/preferred_replica_election"
PRODUCER_IDS = "/latest_producer_id_block"
# What a session mirrors.
ROOTS = (
    *("/cluster", "/controller", "/controller_epoch", "/brokers", "/config", "/admin"),
    *("/latest_producer_id_block", "/logstore"),
)


def broker_path(node: int) -> str:
    """Return the path of a registration."""
    return f"/brokers/ids/{node}"


def touches_node(path: str) -> bool:
    """Return whether a path is a registration."""
    return path.startswith("/brokers/ids/")


def epoch_path(node: int) -> str:
    """Return the path whose version is the broker epoch of a node."""
    return f"/logstore/epochs/{node}"


def topic_path(topic: str) -> str:
    """Return the path of a topic's assignment."""
    return f"/brokers/topics/{topic}"


def state_path(key: Key) -> str:
    """Return the path of a partition's state."""
    return f"/brokers/topics/{key[0]}/partitions/{key[1]}/state"


def config_path(kind: str, name: str) -> str:
    """Return the path of the settings of a topic or broker: `kind` is topics or brokers."""
    return f"/config/{kind}/{name}"


def delete_path(topic: str) -> str:
    """Return the path that asks for the deletion of a topic."""
    return f"/admin/delete_topics/{topic}"


def deleted_path(topic_id: str) -> str:
    """Return the path that lists the nodes that may still have a deleted topic."""
    return f"/logstore/deleted/{topic_id}"


def as_json(fields: Mapping[str, object]) -> bytes:
    """Return JSON as Kafka writes it: without spaces, keys in the order given."""
    return json.dumps(fields, separators=(",", ":")).encode()


class Registration(NamedTuple):
    """A node that is alive, as it registered; frozen."""

    id: int
    epoch: int  # the number of this life of the node: its broker epoch
    version: int = 0  # of the path
    host: str = ""
    port: int = -1
    rack: str | None = None
    lossy: bool = False  # it may have lost records that it has acknowledged
    unwilling: bool = False  # it is shutting down, or its disk is full: it wants to lead nothing
    offline: frozenset[Key] = frozenset()  # partitions that it cannot read or write
    incarnation: str = ""
    boot: str = ""
    lock: tuple[int, int] = (0, 0)  # device and inode of the store's lock file

    def encode(self, timestamp_ms: int = 0) -> bytes:
        """Return the contents of the path ``/brokers/ids/N``."""
        return as_json(
            {
                "version": 5,
                "host": self.host,
                "port": self.port,
                "jmx_port": -1,
                "timestamp": str(timestamp_ms),
                "endpoints": [f"PLAINTEXT://{self.host}:{self.port}"],
                "listener_security_protocol_map": {"PLAINTEXT": "PLAINTEXT"},
                "rack": self.rack,
                "features": {},
                "logstore": {
                    "epoch": self.epoch,
                    "incarnation": self.incarnation,
                    "boot": self.boot,
                    "lock": self.lock,
                    "lossy": self.lossy,
                    "unwilling": self.unwilling,
                    "offline": sorted(self.offline),
                },
            }
        )

    @classmethod
    def decode(cls, node: int, data: bytes, version: int) -> Registration:
        """Parse a registration, of ours or of a Kafka broker."""
        fields = json.loads(data)
        ours = fields.get("logstore", {})
        device, inode = ours.get("lock", (0, 0))
        return cls(
            id=node,
            epoch=int(ours.get("epoch", -1)),
            version=version,
            host=str(fields["host"]),
            port=int(fields["port"]),
            rack=fields.get("rack"),
            lossy=bool(ours.get("lossy", False)),
            unwilling=bool(ours.get("unwilling", False)),
            offline=frozenset((str(topic), int(at)) for topic, at in ours.get("offline", ())),
            incarnation=str(ours.get("incarnation", "")),
            boot=str(ours.get("boot", "")),
            lock=(int(device), int(inode)),
        )


class TopicImage(NamedTuple):
    """The assignment of a topic; frozen."""

    version: int
    topic_id: str
    partitions: Mapping[int, Assignment]

    def encode(self) -> bytes:
        """Return the contents of the path ``/brokers/topics/T``."""
        rows = sorted(self.partitions.items())
        return as_json(
            {
                "version": 3,
                "topic_id": self.topic_id,
                "partitions": {str(number): each.replicas for number, each in rows},
                "adding_replicas": {
                    str(number): each.adding for number, each in rows if each.adding
                },
                "removing_replicas": {
                    str(number): each.removing for number, each in rows if each.removing
                },
            }
        )

    @classmethod
    def decode(cls, data: bytes, version: int) -> TopicImage:
        """Parse the contents of a path."""
        fields = json.loads(data)
        adding, removing = fields.get("adding_replicas", {}), fields.get("removing_replicas", {})
        return cls(
            version,
            str(fields.get("topic_id", "")),
            {
                int(number): Assignment(
                    tuple(map(int, replicas)),
                    tuple(map(int, adding.get(number, ()))),
                    tuple(map(int, removing.get(number, ()))),
                )
                for number, replicas in fields["partitions"].items()
            },
        )

    def with_assignment(self, number: int, assignment: Assignment) -> TopicImage:
        """Return the topic with another assignment of one partition."""
        return self._replace(partitions={**self.partitions, number: assignment})


class ClusterImage:
    """The tree as one session has seen it.  Not thread-safe: its owner serializes."""

    __slots__ = (
        *("cluster_id", "configs", "controller", "controller_epoch", "controller_epoch_version"),
        *("deleted", "deleting", "nodes", "preferred", "producer_ids", "reassign", "states"),
        *("topics", "unreadable"),
    )

    def __init__(self) -> None:
        self.cluster_id = ""
        self.controller: Mapping[str, Any] | None = None
        self.controller_epoch = 0
        self.controller_epoch_version = -1  # -1: the path does not exist
        self.nodes: dict[int, Registration] = {}
        self.topics: dict[str, TopicImage] = {}
        self.states: dict[Key, LeaderAndIsr] = {}
        self.configs: dict[tuple[str, str], tuple[Mapping[str, str], int]] = {}
        self.deleting: dict[str, int] = {}  # topic -> version of the request
        self.deleted: dict[str, tuple[Mapping[str, Any], int]] = {}  # by topic id
        self.reassign: tuple[Mapping[str, Any], int] | None = None
        self.preferred: tuple[Mapping[str, Any], int] | None = None
        self.producer_ids: tuple[Mapping[str, Any], int] | None = None
        self.unreadable: dict[str, str] = {}  # path -> reason

    # ---- lookups ----

    def assignment(self, key: Key) -> Assignment | None:
        """Return the assignment of a partition, or None if it does not exist."""
        topic = self.topics.get(key[0])
        return None if topic is None else topic.partitions.get(key[1])

    def keys(self) -> list[Key]:
        """Return every partition, in order."""
        return [
            (name, number)
            for name, topic in sorted(self.topics.items())
            for number in sorted(topic.partitions)
        ]

    def keys_of(self, topic: str) -> list[Key]:
        """Return the partitions of a topic: those that are assigned, and those with a state."""
        image = self.topics.get(topic)
        numbers = set() if image is None else set(image.partitions)
        return [(topic, number) for number in sorted(numbers)]

    def setting(self, topic: str, name: str, default: str) -> str:
        """Return a setting of a topic, else of all brokers, else `default`."""
        for kind, owner in (("topics", topic), ("brokers", "<default>")):
            settings = self.configs.get((kind, owner))
            if settings is not None and name in settings[0]:
                return settings[0][name]
        return default

    def minimum(self, key: Key) -> int:
        """Return the effective `min.insync.replicas` of a partition."""
        assignment = self.assignment(key)
        configured = int(self.setting(key[0], "min.insync.replicas", "1"))
        return max(1, min(configured, len(assignment.target) if assignment else 1))

    # ---- following the mirror ----

    def load(self, metadata: Metadata) -> None:
        """Read everything."""
        waiting = list(ROOTS)
        while waiting:
            path = waiting.pop()
            self.refresh(metadata.read, path)
            waiting.extend(f"{path}/{name}" for name in metadata.children(path))

    def refresh(
        self, read: Callable[[str], tuple[bytes, int] | None], path: str
    ) -> Iterable[Key] | None:
        """Read one path again.

        Return the partitions that the change concerns; None: it may concern all of them.
        """
        found = read(path)
        self.unreadable.pop(path, None)
        try:
            return self._refresh(path.split("/")[1:], found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.unreadable[path] = f"{type(error).__name__}: {error}"
            return self._refresh(path.split("/")[1:], None)

    def _refresh(self, parts: list[str], found: tuple[bytes, int] | None) -> Iterable[Key] | None:
        match parts:
            case ["brokers", "topics", topic, "partitions", number, "state"]:
                key = topic, int(number)
                _put(self.states, key, found, LeaderAndIsr.decode)
                return (key,)
            case ["brokers", "topics", topic]:
                before = self.keys_of(topic)
                _put(self.topics, topic, found, TopicImage.decode)
                return dict.fromkeys((*before, *self.keys_of(topic)))
            case ["brokers", "ids", node]:
                decode = Registration.decode
                _put(self.nodes, int(node), found, lambda *row: decode(int(node), *row))
                return None
            case ["config", kind, name]:
                _put(self.configs, (kind, name), found, _settings)
                return self.keys_of(name) if kind == "topics" else None
            case ["admin", "delete_topics", topic]:
                _put(self.deleting, topic, found, lambda _, version: version)
                return self.keys_of(topic)
            case ["logstore", "deleted", topic_id]:
                _put(self.deleted, topic_id, found, _fields)
                return ()
            case _:
                return self._refresh_single("/".join(["", *parts]), found)

    def _refresh_single(self, path: str, found: tuple[bytes, int] | None) -> Iterable[Key] | None:
        if path == CONTROLLER:
            self.controller = None if found is None else _fields(*found)[0]
            return None
        if path == CONTROLLER_EPOCH:
            self.controller_epoch = 0 if found is None else int(found[0])
            self.controller_epoch_version = -1 if found is None else found[1]
        elif path == CLUSTER_ID:
            self.cluster_id = "" if found is None else str(_fields(*found)[0]["id"])
        elif path == PRODUCER_IDS:
            self.producer_ids = None if found is None else _fields(*found)
        elif path in (REASSIGN, PREFERRED):
            request = None if found is None or not found[0] else _fields(*found)
            if path == REASSIGN:
                self.reassign = request
            else:
                self.preferred = request
            return None
        return ()


def _put(
    table: dict[Any, Any],
    key: object,
    found: tuple[bytes, int] | None,
    decode: Callable[[bytes, int], object],
) -> None:
    if found is None:
        table.pop(key, None)
        return
    try:
        table[key] = decode(*found)  # in one step: other threads look without a lock
    except BaseException:
        table.pop(key, None)  # contents that cannot be parsed count as absent
        raise


def _fields(data: bytes, version: int) -> tuple[Mapping[str, Any], int]:
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise ValueError(f"not a JSON object: {data[:100]!r}")
    return fields, version


def _settings(data: bytes, version: int) -> tuple[Mapping[str, str], int]:
    fields, _ = _fields(data, version)
    return {str(name): str(value) for name, value in fields.get("config", {}).items()}, version
