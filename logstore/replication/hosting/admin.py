"""Admin: changes of topics, as writes to the metadata tree.

Each checks its request against the image, writes the tree conditionally, and ends when the image
shows the effect: every partition of a new topic has a leader, a deleted topic is gone.  The
controller does the rest.  A conflict with another write is tried again.

A function calls ``done(error)`` once: None, or what a caller should raise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from logstore.config import ConfigError, PartitionConfig
from logstore.errors import (
    LogStoreError,
    MetadataUnavailableError,
    TopicExistsError,
    UnknownTopicError,
)
from logstore.log.topic_id import new_uuid, uuid_text
from logstore.replication.hosting.membership import wall_ms
from logstore.replication.machines.assignment import Assignment, place
from logstore.replication.machines.decisions import is_move_done, partition_state
from logstore.replication.machines.image import (
    PREFERRED,
    REASSIGN,
    ClusterImage,
    Key,
    TopicImage,
    as_json,
    config_path,
    delete_path,
    topic_path,
)
from logstore.replication.machines.throttle import (
    LISTS,
    RATES,
    alter_settings,
    begin_throttle,
    checked_rate,
    parse_replicas,
)
from logstore.replication.metadata import Committed, Create, Op, Outcome, Refused, Set
from logstore.store.topic import check_topic_name

__all__ = ["Admin", "Changer", "Done"]

Done = Callable[[BaseException | None], object]


class Changer(Protocol):
    """A session with the tree, of a node or of a tool."""

    @property
    def image(self) -> ClusterImage: ...
    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Guards the image."""

    def after(self, ms: int, call: Callable[[], object]) -> Callable[[], object]: ...
    def commit(self, ops: Sequence[Op], done: Callable[[Outcome], None]) -> None:
        """Change the tree; `done` is called when the image has the change."""

    def when(
        self, holds: Callable[[], bool], done: Callable[[bool], object], timeout: float
    ) -> None:
        """Call ``done(True)`` when `holds` is true after a change of the tree, else done(False)."""


class Admin:
    """Changes topics of the cluster, from any node, or from a tool."""

    def __init__(self, node: Changer) -> None:
        self._node = node

    # ---- topics ----

    def create_topic(
        self,
        name: str,
        partitions: int,
        replication_factor: int,
        done: Done,
        *,
        config: Mapping[str, Any] | None = None,
        assignment: Mapping[int, Sequence[int]] | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Create a topic; `done` is called when every partition has a leader."""
        settings = _checked_settings(config or {})

        def write(image: ClusterImage) -> Sequence[Op]:
            check_topic_name(name, image.topics)
            if name in image.topics or name in image.deleting:
                raise TopicExistsError(name, where="the cluster")
            placed = _placed(image, partitions, replication_factor, assignment)
            topic = TopicImage(0, uuid_text(new_uuid()), placed)
            return (
                Create(topic_path(name), topic.encode()),
                Create(config_path("topics", name), as_json({"version": 1, "config": settings})),
            )

        self._write(write, lambda image: _all_lead(image, name), done, timeout,
                    f"topic {name!r}: not every partition has a leader")  # fmt: skip

    def delete_topic(self, name: str, done: Done, *, timeout: float = 30.0) -> None:
        """Delete a topic; `done` is called when its name can be used again."""

        def write(image: ClusterImage) -> Sequence[Op]:
            if name not in image.topics:
                raise UnknownTopicError(name, where="the cluster")
            return () if name in image.deleting else (Create(delete_path(name), b""),)

        def gone(image: ClusterImage) -> bool:
            return name not in image.topics and name not in image.deleting

        self._write(write, gone, done, timeout, f"topic {name!r} is not deleted yet")

    def create_partitions(
        self,
        name: str,
        count: int,
        done: Done,
        *,
        assignment: Mapping[int, Sequence[int]] | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Add partitions, so that a topic has `count`."""

        def write(image: ClusterImage) -> Sequence[Op]:
            topic = _topic(image, name)
            have = len(topic.partitions)
            if count <= have:
                raise ConfigError(f"topic {name!r} has {have} partitions, not fewer than {count}")
            factor = len(topic.partitions[min(topic.partitions)].target)
            added = _placed(image, count - have, factor, assignment, first=have)
            changed = topic._replace(partitions={**topic.partitions, **added})
            return (Set(topic_path(name), changed.encode(), topic.version),)

        def led(image: ClusterImage) -> bool:
            found = image.topics.get(name)
            return found is not None and len(found.partitions) >= count and _all_lead(image, name)

        self._write(write, led, done, timeout, f"topic {name!r}: not every partition has a leader")

    def alter_config(
        self, name: str, changes: Mapping[str, Any], done: Done, *, timeout: float = 30.0
    ) -> None:
        """Change settings of a topic; a value of None restores the default."""

        def write(image: ClusterImage) -> Sequence[Op]:
            _topic(image, name)
            before = image.configs.get(("topics", name), ({}, None))[0]
            after = {
                key: value for key, value in {**before, **changes}.items() if value is not None
            }
            settings: dict[str, str | None] = {**dict.fromkeys(before), **_checked_settings(after)}
            return (alter_settings(image, "topics", name, settings),)

        self._write(write, lambda image: True, done, timeout, f"topic {name!r} was not changed")

    def alter_node(
        self, owner: str, changes: Mapping[str, str | None], done: Done, *, timeout: float = 30.0
    ) -> None:
        """Change the rates of a node, or of all (``<default>``); None removes one."""

        def write(image: ClusterImage) -> Sequence[Op]:
            for name, value in changes.items():
                if name not in RATES.values():
                    known = " and ".join(RATES.values())
                    raise ConfigError(f"{name} is fixed while a node runs; {known} can be changed")
                if value is not None:
                    checked_rate(name, value)
            return (alter_settings(image, "brokers", owner, changes),)

        self._write(write, lambda image: True, done, timeout, f"node {owner!r} was not changed")

    # ---- leaders and replicas ----

    def elect(
        self,
        keys: Iterable[Key],
        done: Done,
        *,
        unclean: int | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Elect the preferred leaders, or a node even if it misses committed records."""
        wanted = list(keys)

        def write(image: ClusterImage) -> Sequence[Op]:
            for key in wanted:
                _partition(image, key)
                if unclean is not None:
                    _check_unclean(image, key, unclean)
            ours: dict[str, object] = {} if unclean is None else {"logstore": {"unclean": unclean}}
            rows = [{"topic": topic, "partition": at, **ours} for topic, at in wanted]
            return _requested(PREFERRED, rows, image.preferred, wanted)

        def elected(image: ClusterImage) -> bool:
            return image.preferred is None

        self._write(write, elected, done, timeout, "the election is not done yet")

    def reassign(
        self,
        targets: Mapping[Key, Sequence[int] | None],
        done: Done,
        *,
        throttle_bytes: int | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Begin to move replicas; None as a target cancels a move that is under way.

        `throttle_bytes` bounds the copying, in bytes per second on each node, until every move that
        was asked for is complete or cancelled.  `done` is called when the request is written; see
        `moving`.
        """

        def write(image: ClusterImage) -> Sequence[Op]:
            rows = []
            for key, target in targets.items():
                _check_key(key)
                _partition(image, key)
                if target is not None:
                    _check_replicas(image, key, target)
                rows.append({"topic": key[0], "partition": key[1],
                             "replicas": None if target is None else list(target)})  # fmt: skip
            if throttle_bytes is None:
                return _requested(REASSIGN, rows, image.reassign, targets)
            rate = checked_rate("throttle_bytes", throttle_bytes)
            bounds, note = begin_throttle(image, targets, rate)
            return (*_requested(REASSIGN, rows, image.reassign, targets, note), *bounds)

        self._write(write, lambda image: True, done, timeout, "the request was not written")

    def moving(self, keys: Iterable[Key]) -> list[Key]:
        """Return those of the partitions whose replicas are still being moved."""
        node = self._node
        with node.lock:
            return [key for key in keys if not is_move_done(node.image, key)]

    # ---- writing ----

    def _write(
        self,
        write: Callable[[ClusterImage], Sequence[Op]],
        holds: Callable[[ClusterImage], bool],
        done: Done,
        timeout: float,
        late: str,
        tries: int = 10,
    ) -> None:
        """Write the ops of ``write(image)``, and wait until ``holds(image)``."""
        node = self._node

        def waited(held: bool) -> None:
            done(None if held else TimeoutError(f"{late} after {timeout:g} s"))

        def written(outcome: Outcome) -> None:
            if isinstance(outcome, Committed):
                node.when(lambda: holds(node.image), waited, timeout)
            elif tries <= 0:
                reason = "it is changed by others" if isinstance(outcome, Refused) else "no answer"
                done(MetadataUnavailableError(f"{late}: {reason}", since=wall_ms() / 1000))
            else:
                # The image is that of the tree now: a name that was taken since raises there.
                node.after(20, lambda: self._write(write, holds, done, timeout, late, tries - 1))

        try:
            with node.lock:
                ops = write(node.image)
        except (LogStoreError, ValueError, TypeError) as error:
            done(error)
            return
        node.commit(ops, written)


def _topic(image: ClusterImage, name: str) -> TopicImage:
    topic = image.topics.get(name)
    if topic is None or name in image.deleting:
        raise UnknownTopicError(name, where="the cluster")
    return topic


def _partition(image: ClusterImage, key: Key) -> Assignment:
    topic = _topic(image, key[0])
    if key[1] not in topic.partitions:
        raise IndexError(f"topic {key[0]!r} has no partition {key[1]}")
    return topic.partitions[key[1]]


def _check_key(key: object) -> None:
    if not isinstance(key, tuple) or len(key) != 2:
        raise ConfigError(f"a partition is (topic, number), such as ('orders', 0), not {key!r}")


def _check_unclean(image: ClusterImage, key: Key, node: int) -> None:
    """Refuse an unclean election that would lose records without need, or could not be done."""
    if partition_state(image, key) == "OnlinePartition":
        leader = image.states[key].leader
        raise ConfigError(f"{key[0]}-{key[1]} has a leader, node {leader}: nothing has to be lost")
    if node not in _partition(image, key).replicas or node not in image.nodes:
        raise ConfigError(f"node {node} is not alive, or has no replica of {key[0]}-{key[1]}")


def _check_replicas(image: ClusterImage, key: Key, replicas: Sequence[int]) -> None:
    if isinstance(replicas, (str, int)):
        raise ConfigError(f"{key[0]}-{key[1]}: replicas are a list of nodes, not {replicas!r}")
    if not replicas or len(set(replicas)) != len(replicas):
        raise ConfigError(f"{key[0]}-{key[1]}: replicas must be different nodes, not {replicas}")
    known = {*image.nodes, *_partition(image, key).replicas}
    unknown = sorted(set(replicas) - known)
    if unknown:
        raise ConfigError(f"{key[0]}-{key[1]}: nodes {unknown} are not registered")


def _placed(
    image: ClusterImage,
    partitions: int,
    factor: int,
    assignment: Mapping[int, Sequence[int]] | None,
    *,
    first: int = 0,
) -> dict[int, Assignment]:
    if assignment is not None:
        if sorted(assignment) != list(range(first, first + len(assignment))):
            raise ConfigError(f"an assignment names partitions {first} and up, without a gap")
        for number, replicas in assignment.items():
            if not replicas or len(set(replicas)) != len(replicas):
                raise ConfigError(f"partition {number}: replicas must be different nodes")
            unknown = sorted(set(replicas) - set(image.nodes))
            if unknown:
                raise ConfigError(f"partition {number}: nodes {unknown} are not registered")
        return {number: Assignment(tuple(each)) for number, each in assignment.items()}
    if partitions < 1:
        raise ConfigError(f"a topic has at least 1 partition, not {partitions}")
    racks = {node.id: node.rack for node in image.nodes.values()}
    start, shift = random.randrange(1 << 16), random.randrange(1 << 16)
    placed = place(racks, partitions, factor, start=start, shift=shift, first=first)
    return {first + number: Assignment(each) for number, each in enumerate(placed)}


def _checked_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as text, by Kafka's names; raise ConfigError for one that is not valid."""
    named = {str(name).replace("_", "."): value for name, value in config.items()}
    lists = set(LISTS.values())
    PartitionConfig.of({name: value for name, value in named.items() if name not in lists})
    for name in lists & named.keys():
        parse_replicas(name, str(named[name]))
    text = {True: "true", False: "false"}
    return {
        name: text[value] if isinstance(value, bool) else str(value)
        for name, value in named.items()
        if value is not None
    }


def _all_lead(image: ClusterImage, name: str) -> bool:
    """Return whether every partition has a leader, and the minimum that the settings name.

    The controller may see a new topic before its settings, and corrects the minimum later.
    """
    keys = image.keys_of(name)
    return bool(keys) and all(
        partition_state(image, key) == "OnlinePartition"
        and image.states[key].min_isr == image.minimum(key)
        for key in keys
    )


def _requested(
    path: str,
    rows: Sequence[Mapping[str, object]],
    before: tuple[Mapping[str, Any], int] | None,
    keys: Iterable[Key],
    note: Mapping[str, Any] | None = None,
) -> Sequence[Op]:
    """Return the op that adds rows to a request; rows of the same partitions are replaced.

    `note` is for the controller; without one, that of the request is kept.
    """
    note = note or ({} if before is None else before[0].get("logstore", {}))
    ours = {"logstore": note} if note else {}
    if before is None:
        return (Create(path, as_json({"version": 1, "partitions": list(rows), **ours})),)
    replaced = set(keys)
    kept = [
        row for row in before[0].get("partitions", ())
        if (row.get("topic"), row.get("partition")) not in replaced
    ]  # fmt: skip
    data = as_json({"version": 1, "partitions": [*kept, *rows], **ours})
    return (Set(path, data, before[1]),)
