"""Cluster: several nodes in one process: replicas in several directories, without a network.

Each node has a store of its own, in ``node-N`` below the cluster's directory.  The metadata tree is
in the same directory.  An append goes to the leader of its partition; the followers copy it.

A record that ``append(acks="all")`` has returned is in the log of every replica that is in sync, as
durable as the stores make it.

Nodes do their work in threads of their own, and in the threads of callers.  In the main thread an
interrupt could stop that work at any point, so calls of the main thread are made by a thread of the
cluster.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.errors import (
    ClosedError,
    IndeterminateAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    TopicExistsError,
    UnknownTopicError,
)
from logstore.partition.partition import Partition
from logstore.replication.cluster_topic import Acks, ClusterPartition, ClusterTopic, Reassignment
from logstore.replication.config import NodeConfig
from logstore.replication.embedded import EmbeddedTree
from logstore.replication.hosting.admin import Admin
from logstore.replication.hosting.hosted import HostedReplica
from logstore.replication.hosting.later import run_later
from logstore.replication.hosting.local_peers import LocalNetwork
from logstore.replication.hosting.produced import Produced
from logstore.replication.machines.image import ClusterImage, Key
from logstore.replication.node import Node
from logstore.replication.status import ClusterStatus, status_of
from logstore.store.store import open_store
from logstore.waking import Gate, uninterrupted

__all__ = ["Cluster"]

T = TypeVar("T")

NOT_LEADER_OR_FOLLOWER = 6
REQUEST_TIMED_OUT = 7
NOT_ENOUGH_REPLICAS = 19


class Cluster(Mapping[str, ClusterTopic], Closeable):
    """A directory with several nodes, in one process.  ``with`` closes it.

    ``cluster["orders"]`` is a ClusterTopic; iterating gives the names.  `durability` is that of all
    stores; `config` are the settings of all nodes: see NodeConfig.  Threads may share it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        nodes: int = 3,
        *,
        durability: str = "fsync",
        config: NodeConfig | Mapping[str, Any] | None = None,
        timeout: float = 30.0,
        network: LocalNetwork | None = None,
    ) -> None:
        """`network` is for tests: see LocalNetwork."""
        if nodes < 1:
            raise ConfigError(f"a cluster has at least 1 node, not {nodes}")
        settings = NodeConfig.of(config)
        if settings.default_replication_factor == 1:
            settings = settings.with_settings({"default.replication.factor": min(3, nodes)})
        self.path = Path(path)
        self.config = settings
        self.durability = durability
        self.timeout = timeout
        self._lock = threading.RLock()  # starting and stopping of nodes
        self._nodes: dict[int, Node] = {}
        self._topics: dict[str, ClusterTopic] = {}
        self._closed = False
        self.network = network or LocalNetwork()
        self._calls = _Caller("logstore cluster")
        self._tree: EmbeddedTree | None = None
        try:
            self._tree = EmbeddedTree(self.path)
            for number in range(1, nodes + 1):
                self.start(number)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Cluster {str(self.path)!r} of nodes {sorted(self._nodes)}>"

    # ---- nodes ----

    @property
    def nodes(self) -> Mapping[int, Node]:
        """The nodes that run, by their number."""
        return dict(self._nodes)

    def start(self, number: int) -> Node:
        """Start a node that does not run: a new one, or one that was stopped or killed."""
        return uninterrupted(lambda: self._start(number))

    def _start(self, number: int) -> Node:
        with self._lock:
            if number in self._nodes:
                return self._nodes[number]
            if self._closed or self._tree is None:
                raise ClosedError("the cluster is closed")
            store = open_store(
                self.path / f"node-{number}", readonly=False, create=True,
                durability=self.durability, config=None, clock=None, partitioner=None,
                progress=None, reserve_bytes=0, allow_unsafe_fs=False,
            )  # fmt: skip
            node = Node(
                store,
                node_id=number,
                metadata=self._tree.session,
                peers=self.network.peers(number),
                config=self.config,
            )
            self.network.members[number] = node
            try:
                node.start(self.timeout)
            except BaseException:
                self.network.members.pop(number, None)
                raise
            self._nodes[number] = node
            self._introduce(node)
            return node

    def _introduce(self, node: Node) -> None:
        """Return when all nodes have seen that a node is registered."""
        epoch = node.status()["broker_epoch"]
        until = time.monotonic() + self.timeout

        def known(other: Node) -> bool:
            found = other.image.nodes.get(node.id)
            return found is not None and found.epoch >= epoch

        while not all(map(known, list(self._nodes.values()))):
            if time.monotonic() >= until:
                raise TimeoutError(f"node {node.id} is not known to all after {self.timeout:g} s")
            time.sleep(0.002)

    def stop(self, number: int) -> None:
        """Stop a node cleanly: its leaderships move first."""
        with self._lock:
            node = self._running(number)
            try:
                node.close()
            finally:
                self._forget(number)

    def kill(self, number: int) -> None:
        """Stop a node as if its process were killed: nothing more is written."""
        with self._lock:
            node = self._running(number)
            self._forget(number)
            node.kill()

    def _running(self, number: int) -> Node:
        node = self._nodes.get(number)
        if node is None:
            raise ConfigError(f"node {number} does not run; those that run: {sorted(self._nodes)}")
        return node

    def _forget(self, number: int) -> None:
        self.network.members.pop(number, None)
        self._nodes.pop(number, None)

    def close(self) -> None:
        """Stop all nodes and close their stores cleanly.  A second call does nothing."""
        if not self._closed:
            uninterrupted(self._close)

    def _close(self) -> None:
        errors: list[Exception] = []
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
            # All at once: no node takes the others out of the in-sync sets, so the next start
            # finds them as they are now.
            for node in nodes:
                node.halt()
            for node in nodes:
                try:
                    node.end()
                except Exception as error:  # noqa: BLE001  raised after the other nodes are closed
                    errors.append(error)
                self._forget(node.id)
            self._calls.close()
            if self._tree is not None:
                self._tree.close()
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup(f"{len(errors)} errors while closing {self.path}", errors)

    def _any(self) -> Node:
        """Return a node that runs."""
        for node in list(self._nodes.values()):
            return node
        raise ClosedError(f"no node of the cluster {self.path} runs")

    @property
    def image(self) -> ClusterImage:
        """What a node has seen of the metadata tree."""
        return self._any().image

    # ---- topics ----

    def _names(self) -> list[str]:
        node = self._any()
        with node.lock:
            return sorted(set(node.image.topics) - set(node.image.deleting))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, name: object) -> bool:
        return name in self._any().image.topics

    def __bool__(self) -> bool:
        return True

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> ClusterTopic:
        found = self._any().image.topics.get(name)
        if found is None:
            raise UnknownTopicError(name, where=f"the cluster {self.path}")
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics.setdefault(name, ClusterTopic(self, name))
        return topic

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        replication_factor: int | None = None,
        config: Mapping[str, Any] | None = None,
        assignment: Mapping[int, Sequence[int]] | None = None,
        exist_ok: bool = False,
    ) -> ClusterTopic:
        """Create a topic; return it when each partition has a leader.

        `assignment` names the nodes of each partition instead of `replication_factor`; the first
        one is the preferred leader.  With ``exist_ok=True`` a topic that exists is returned as it
        is.  Raises TopicExistsError, ConfigError.
        """
        factor = replication_factor
        if factor is None:
            factor = self.config.default_replication_factor
        _check_count("partitions", partitions)
        _check_count("replication_factor", factor)
        try:
            self.admin(
                lambda admin, done: admin.create_topic(
                    name, partitions, factor, done, config=config, assignment=assignment,
                    timeout=self.timeout,
                )
            )  # fmt: skip
        except TopicExistsError:
            if not exist_ok or name not in self._names():
                raise
        return self[name]

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its records on all nodes.  Its name can be used again at once."""
        self.admin(lambda admin, done: admin.delete_topic(name, done, timeout=self.timeout))
        self._topics.pop(name, None)

    def create_partitions(self, name: str, count: int) -> None:
        """Add partitions, so that a topic has `count`."""
        _check_count("count", count)
        self.admin(lambda admin, done: admin.create_partitions(name, count, done))

    def alter_topic(self, name: str, config: Mapping[str, Any]) -> None:
        """Change settings of a topic on all nodes; a value of None restores the default."""
        self.admin(lambda admin, done: admin.alter_config(name, config, done))

    # ---- leaders and replicas ----

    def metrics(self) -> dict[int, dict[str, float]]:
        """Return the metrics of replication of each node that runs, by name."""
        return {number: node.metrics() for number, node in sorted(self.nodes.items())}

    def partition(self, topic: str, number: int) -> ClusterPartition:
        """Return a partition: its leader, its replicas, and its records at the leader."""
        partition: ClusterPartition = self[topic][number]
        return partition

    def elect(
        self, topic: str, partition: int, *, kind: str = "preferred", node: int | None = None
    ) -> None:
        """Elect the first replica as the leader if it is in sync; ``kind="unclean"``: any `node`.

        An unclean election loses the committed records that the node does not have.  It is refused
        with ConfigError while the partition has a leader, and for a node that has no replica of it
        or does not run.
        """
        if kind not in ("preferred", "unclean") or (kind == "unclean") != (node is not None):
            raise ConfigError("kind is 'preferred', or 'unclean' with the node that is to lead")
        self.admin(lambda admin, done: admin.elect([(topic, partition)], done, unclean=node))

    def reassign(
        self, targets: Mapping[Key, Sequence[int] | None], *, throttle_bytes: int | None = None
    ) -> Reassignment:
        """Begin to move replicas: ``{("orders", 0): [2, 3, 1]}``.  None cancels a move.

        `throttle_bytes`: at most so many bytes per second are sent and copied by each node for new
        replicas.  Replicas in sync are not delayed.  It ends with the last move.
        """
        self.admin(lambda admin, done: admin.reassign(targets, done, throttle_bytes=throttle_bytes))
        return Reassignment(self, list(targets))

    def moving(self, keys: Sequence[Key]) -> list[Key]:
        """Return those of the partitions whose replicas are still being moved."""
        return Admin(self._any()).moving(keys)

    def status(self) -> ClusterStatus:
        """Return controller, nodes and partitions; ``print(cluster.status())`` is a table."""
        ends: dict[Key, dict[int, int]] = {}
        watermarks: dict[Key, int] = {}
        for number, node in self.nodes.items():
            for replica in node.partitions.all():
                ends.setdefault(replica.key, {})[number] = replica.log.end_offset
                if replica.machine.leader is not None:
                    watermarks[replica.key] = replica.machine.leader.hw
        node = self._any()
        with node.lock:
            return status_of(node.image, ends, watermarks)

    def admin(self, act: Callable[[Admin, Callable[[BaseException | None], object]], None]) -> None:
        """Make a change through a node that runs, and wait for it; raise its error."""
        node = self._any()
        gate = Gate()
        errors: list[BaseException | None] = []

        def done(error: BaseException | None) -> None:
            errors.append(error)
            gate.open()

        def begin() -> None:
            try:
                act(Admin(node), done)
            except Exception as error:  # noqa: BLE001  raised below, by the caller's thread
                done(error)

        self._calls.call(begin)
        gate.wait(self.timeout + 10)
        if not errors:
            raise TimeoutError(f"no answer within {self.timeout + 10:g} s")
        if errors[0] is not None:
            raise errors[0]

    # ---- appending ----

    def leader(self, key: Key) -> HostedReplica | None:
        """Return the replica that leads a partition, if its node runs."""
        for node in list(self._nodes.values()):
            state = node.image.states.get(key)
            if state is not None and state.leader in self._nodes:
                replica = self._nodes[state.leader].partitions.replicas.get(key)
                if replica is not None and replica.machine.leader is not None:
                    return replica
        return None

    def produce(
        self,
        key: Key,
        append: Callable[[Partition], range],
        acks: Acks,
        timeout: float | None,
    ) -> range:
        """Append at the leader; return the offsets, or raise the outcome."""
        until = time.monotonic() + (self.timeout if timeout is None else timeout)
        number = _acks(acks)
        while True:
            replica = self.leader(key)
            outcome = None if replica is None else self._produce(replica, append, number, until)
            if outcome is not None and outcome.code != NOT_LEADER_OR_FOLLOWER:
                return _offsets(outcome, key, replica, number)
            # Nothing was written: the next leader is tried.
            if time.monotonic() >= until:
                state = self._any().image.states.get(key)
                raise NotLeaderError(f"{key[0]}-{key[1]}",
                                     leader=None if state is None else state.leader,
                                     epoch=-1 if state is None else state.leader_epoch)  # fmt: skip
            time.sleep(0.005)

    def _produce(
        self,
        replica: HostedReplica,
        append: Callable[[Partition], range],
        acks: int,
        until: float,
    ) -> Produced:
        gate = Gate()
        outcomes: list[Produced] = []
        failed: list[Exception] = []
        waiters: list[object] = []

        def done(outcome: Produced) -> None:
            outcomes.append(outcome)
            gate.open()

        def act() -> None:
            partition = replica.log.partition
            try:
                waiters.append(replica.append(lambda: append(partition), acks, done))
            except Exception as error:  # noqa: BLE001  raised below, by the caller's thread
                failed.append(error)
                gate.open()

        self._calls.call(act)
        if not gate.wait(max(0.0, until - time.monotonic())):
            self._calls.call(lambda: replica.timed_out(waiters[0] if waiters else None))
            gate.wait(self.timeout)
        if failed:
            raise failed[0]
        if not outcomes:
            raise ClosedError(f"the cluster {self.path} is closed")
        return outcomes[0]


def _check_count(name: str, count: int) -> None:
    if not hasattr(count, "__index__"):
        raise ConfigError(f"{name} must be an int, not {count!r}")
    if count < 1:
        raise ConfigError(f"{name} must be at least 1, not {count}")


def _acks(acks: Acks) -> int:
    if acks == "all":
        return -1
    if acks not in (0, 1, -1) or isinstance(acks, bool):
        raise ConfigError(f"acks must be 'all', 1 or 0, not {acks!r}")
    return acks


def _offsets(outcome: Produced, key: Key, replica: HostedReplica | None, acks: int) -> range:
    """Return the offsets of an append that was acknowledged, else raise its outcome."""
    if outcome.code == 0:
        return outcome.offsets
    where = f"{key[0]}-{key[1]}"
    if outcome.error is not None:
        raise outcome.error
    if outcome.code == NOT_ENOUGH_REPLICAS:
        view = None if replica is None else replica.machine.view
        raise NotEnoughReplicasError(
            0 if view is None else len(view.isr), 0 if view is None else view.min_isr, where=where
        )
    reason = "the time is up" if outcome.code == REQUEST_TIMED_OUT else "the leader has changed"
    raise IndeterminateAppendError(
        f"{where}: {reason} before the records were committed",
        offsets=outcome.offsets,
        leader_epoch=outcome.leader_epoch,
    )


class _Caller:
    """Makes calls of the main thread in another one, which no interrupt stops."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._main = threading.main_thread()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, act: Callable[[], object]) -> None:
        """Make a call: at once, or soon if this is the main thread."""
        if threading.current_thread() is self._main:
            self._calls.put(act)
        else:
            act()
            run_later()

    def _run(self) -> None:
        while True:
            act = self._calls.get()
            if act is None:
                return
            act()
            run_later()

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()
