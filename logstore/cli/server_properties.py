"""A broker's server.properties: which of its settings `logstore serve` uses, and where.

Kafka's broker names of topic settings, such as ``log.retention.hours``, set the defaults of topics.
Names of Kafka that mean nothing for one node are left out and reported.  All other names are
settings of the listener; KafkaConfig refuses those that it does not know.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import click

from logstore.config import ConfigError, PartitionConfig, dotted
from logstore.replication.config import NodeConfig

if TYPE_CHECKING:
    from logstore.replication.metadata import Metadata

__all__ = ["ServerProperties", "read_properties"]

HOUR, MINUTE = 3_600_000, 60_000  # milliseconds
# Kafka's broker names of topic settings, and the factor of their units.  The last one counts.
OF_TOPICS = (
    ("log.segment.bytes", "segment.bytes", 1),
    ("log.roll.hours", "segment.ms", HOUR),
    ("log.roll.ms", "segment.ms", 1),
    ("log.roll.jitter.hours", "segment.jitter.ms", HOUR),
    ("log.roll.jitter.ms", "segment.jitter.ms", 1),
    ("log.index.size.max.bytes", "segment.index.bytes", 1),
    ("log.index.interval.bytes", "index.interval.bytes", 1),
    ("log.flush.interval.messages", "flush.messages", 1),
    ("log.flush.scheduler.interval.ms", "flush.ms", 1),
    ("log.flush.interval.ms", "flush.ms", 1),
    ("log.retention.bytes", "retention.bytes", 1),
    ("log.retention.hours", "retention.ms", HOUR),
    ("log.retention.minutes", "retention.ms", MINUTE),
    ("log.retention.ms", "retention.ms", 1),
    ("log.cleaner.delete.retention.ms", "delete.retention.ms", 1),
    ("log.cleaner.min.compaction.lag.ms", "min.compaction.lag.ms", 1),
    ("log.cleaner.max.compaction.lag.ms", "max.compaction.lag.ms", 1),
    ("log.cleaner.min.cleanable.ratio", "min.cleanable.dirty.ratio", 1),
    ("log.cleanup.policy", "cleanup.policy", 1),
    ("log.segment.delete.delay.ms", "file.delete.delay.ms", 1),
    ("log.preallocate", "preallocate", 1),
    ("log.message.timestamp.type", "message.timestamp.type", 1),
    ("log.message.timestamp.before.max.ms", "message.timestamp.before.max.ms", 1),
    ("log.message.timestamp.after.max.ms", "message.timestamp.after.max.ms", 1),
    ("message.max.bytes", "max.message.bytes", 1),
    *(
        (name, name, 1)
        for name in ("compression.type", "min.insync.replicas", "unclean.leader.election.enable",
                     "producer.id.expiration.ms", "compression.gzip.level",
                     "compression.lz4.level", "compression.zstd.level")
    ),
)  # fmt: skip
# Names of a broker's server.properties that mean nothing for one node: accepted and not used.
IGNORED = (
    *("broker.id", "node.id", "process.roles", "log.dir", "log.dirs", "broker.rack"),
    *("zookeeper.", "controller.", "inter.broker.", "offsets.topic.", "transaction.state.log."),
    *("controlled.shutdown.", "logstore.peer."),
    *("replica.", "num.network.threads", "num.recovery.threads", "num.replica.", "socket.send."),
    *("socket.receive.", "group.coordinator.", "share.", "metadata.", "quota.", "background."),
    *("listener.security.protocol.map", "default.replication.factor", "early.start.listeners"),
    *("log.retention.check.", "log.cleaner.", "log.flush.", "log.initial.", "auto.leader."),
    *("leader.imbalance.", "metric", "queued.max.requests", "request.timeout.ms"),
)


@dataclasses.dataclass(frozen=True)
class Membership:
    """The settings of a node of a cluster."""

    node_id: int
    zookeeper: str  # host:port[,host:port][/chroot]
    settings: dict[str, str]  # for NodeConfig

    def session(self) -> Metadata:
        """Return a new session with the metadata of the cluster."""
        from logstore.replication.zookeeper import ZooKeeperMetadata  # slow to import

        config = NodeConfig.of(self.settings)
        return ZooKeeperMetadata(
            self.zookeeper, session_timeout_ms=config.zookeeper_session_timeout_ms
        )


@dataclasses.dataclass(frozen=True)
class ServerProperties:
    """The settings of a server.properties, sorted by what they are for."""

    listener: dict[str, str]  # for KafkaConfig
    topics: dict[str, str]  # for PartitionConfig: the defaults of topics
    addresses: tuple[str, ...]  # to listen on
    unused: tuple[str, ...]  # names that mean nothing here
    member: Membership | None = None  # of a cluster, if zookeeper.connect is set

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> ServerProperties:
        """Sort settings by their names.  Values are checked later."""
        given = dict(settings)
        controllers = set(_listed(given.get("controller.listener.names", "")))
        addresses = _without(controllers, given.pop("listeners", ""))
        _check_protocols(addresses, given.get("listener.security.protocol.map", ""))
        advertised = _without(controllers, given.pop("advertised.listeners", ""))
        if advertised:
            given["advertised.listeners"] = advertised[0]
        topics: dict[str, str] = {}
        for broker_name, name, factor in OF_TOPICS:
            if broker_name in given:
                value = given.pop(broker_name)
                number = value.removeprefix("-").isdigit()
                if number and factor > 1 and int(value) > 0:
                    value = str(int(value) * factor)
                topics[name] = value
        member = _membership(given)
        unused = tuple(sorted(name for name in given if name.startswith(IGNORED)))
        listener = {name: value for name, value in given.items() if name not in unused}
        _check_names(listener)
        known = {dotted(each.name) for each in dataclasses.fields(PartitionConfig)}
        assert topics.keys() <= known, topics
        return cls(listener, topics, addresses, unused, member)


def _check_names(listener: Iterable[str]) -> None:
    """Refuse an unknown name that is like a known one of any kind.  KafkaConfig refuses others."""
    from logstore.kafka.config import KafkaConfig  # slow to import

    served = {dotted(each.name) for each in dataclasses.fields(KafkaConfig)}
    by_topic_name = {name: broker_name for broker_name, name, _ in OF_TOPICS}
    of_topics = [broker_name for broker_name, _, _ in OF_TOPICS]
    for name in listener:
        if name in served or name.replace("_", ".") in served:
            continue
        near = [by_topic_name[name]] if name in by_topic_name else difflib.get_close_matches(
            name, [*served, *of_topics, "listeners", "zookeeper.connect", "node.id"], n=1
        )  # fmt: skip
        if near:
            raise ConfigError(f"unknown setting {name!r}; did you mean {near[0]!r}?")


def _check_protocols(addresses: Iterable[str], protocols: str) -> None:
    """Refuse a listener that a broker would protect."""
    from logstore.kafka.network.acceptor import check_protocol  # slow to import

    known = dict(each.split(":", 1) for each in _listed(protocols) if ":" in each)
    for name in (each.partition("://")[0] for each in addresses):
        check_protocol(name, known.get(name, name))


def _membership(given: dict[str, str]) -> Membership | None:
    """Take the settings of a node of a cluster out of `given`, if it names a ZooKeeper."""
    zookeeper = given.pop("zookeeper.connect", "")
    if not zookeeper:
        return None
    number = given.pop("node.id", given.get("broker.id", "1"))
    given.pop("broker.id", None)
    if not number.isdigit():
        raise click.UsageError(f"node.id is a number from 0 on, not {number!r}")
    names = {dotted(each.name) for each in dataclasses.fields(NodeConfig)}
    settings = {name: given.pop(name) for name in list(given) if name in names}
    return Membership(int(number), zookeeper, settings)


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _without(controllers: set[str], text: str) -> tuple[str, ...]:
    """Return the addresses of a list, without those of a broker's controller."""
    return tuple(each for each in _listed(text) if each.partition("://")[0] not in controllers)


def read_properties(text: str) -> dict[str, str]:
    r"""Return the settings of a server.properties: ``name=value``, ``#``, ``\`` at a line's end."""
    found: dict[str, str] = {}
    line = ""
    for piece in [*text.removesuffix("\\").splitlines(), ""]:
        line += piece.strip() if line else piece.lstrip()
        if line.startswith(("#", "!")) or not line:
            line = ""
            continue
        if line.endswith("\\"):
            line = line[:-1]
            continue
        name, separator, value = line.partition("=")
        if not separator:
            name, separator, value = line.partition(":")
        if not separator:
            raise click.UsageError(f"a setting is name=value, not {line!r}")
        found[name.strip()] = value.strip()
        line = ""
    return found
