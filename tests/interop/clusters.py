"""A cluster under load: real clients, faults one after the other, and what must hold at the end.

`Loaded` starts the clients of `tests.kafka.recorded_clients` and carries out faults.  After each
fault at least `LEAST_ACKED` further records must be acknowledged, and the leader must have changed
if the fault is meant to change it; otherwise the run is void, and fails as such.

`finish` heals everything and checks: the history of the clients is clean, with a snapshot of every
partition from every node; the logs of all replicas are equal byte by byte below the high
watermark; every store passes its check; nothing is left over.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import confluent_kafka
import confluent_kafka.admin

import logstore
from logstore.testing import Copy
from logstore.testing.cluster import ClusterUnderTest, ZooKeeperServers
from logstore.testing.cluster_tree import PartitionState
from logstore.testing.history import assert_clean
from logstore.testing.replica_files import replica_problems
from tests.kafka.peer import Peer
from tests.kafka.recorded_clients import Clients, JavaCopier, Work

LEAST_ACKED = 50  # records for each fault
TIMEOUT = 180.0
PARTITIONS = 2
REPLICAS = 3
MINIMUM = 2  # min.insync.replicas

# A client whose leader is paused or cut off gives up after seconds, not after a minute.
IMPATIENT: Mapping[str, Any] = {
    "socket.timeout.ms": 3000,
    "request.timeout.ms": 2000,
    "topic.metadata.refresh.interval.ms": 500,
    "topic.metadata.refresh.fast.interval.ms": 50,
    "retry.backoff.ms": 50,
    "retry.backoff.max.ms": 200,
    "batch.size": 32768,  # several batches in a small segment
}

Act = Callable[..., None]
Key = tuple[str, int]


class VoidRun(AssertionError):
    """A fault that did not have its intended effect: the run proves nothing."""


class Fault(NamedTuple):
    """A fault that was carried out."""

    name: str
    acked: int  # records that were acknowledged from its beginning on, until the next
    seconds: float  # until LEAST_ACKED of them


class Loaded:
    """A cluster, its clients, and the faults so far.  Use it in a `with` block."""

    def __init__(
        self,
        directory: Path,
        zookeeper: ZooKeeperServers,
        *,
        topics: Sequence[str] = ("in",),
        settings: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        disk_bytes: Mapping[int, int] | None = None,
        topic_config: Mapping[str, str] | None = None,
        pace: float = 0.02,
    ) -> None:
        self.cluster = ClusterUnderTest(
            directory,
            nodes=REPLICAS,
            zookeeper=zookeeper,
            settings={"min.insync.replicas": str(MINIMUM), **(settings or {})},
            arguments=arguments,
            disk_bytes=disk_bytes,
        )
        self.topics = topics
        self.tree = self.cluster.tree
        # Consumers must keep up: a poll gets all that was produced during a transaction.
        self.clients = Clients(
            self.cluster.bootstrap_servers, PARTITIONS, IMPATIENT, pace=pace, most=1000
        )
        self.producers: list[Work] = []
        self.readers: list[Work] = []
        self.faults: list[Fault] = []
        try:
            self._create(topics, {"min.insync.replicas": str(MINIMUM), **(topic_config or {})})
        except BaseException:
            self.cluster.close()
            raise

    def _create(self, topics: Iterable[str], config: dict[str, str]) -> None:
        admin = confluent_kafka.admin.AdminClient(
            {"bootstrap.servers": self.cluster.bootstrap_servers, "log_level": 0}
        )
        self.tree.wait(
            lambda: self.tree.nodes() == set(self.cluster.numbers), "nodes are not registered"
        )
        new = [
            confluent_kafka.admin.NewTopic(topic, PARTITIONS, REPLICAS, config=config)
            for topic in topics
        ]
        for made in admin.create_topics(new).values():
            made.result(TIMEOUT)
        self.tree.await_in_sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for each in (*self.producers, *self.readers):
            each.ended.set()
        self.cluster.close()

    # ---- the load ----

    def produce(self, act: Act | None = None, **options: Any) -> None:
        """Start a producer; one of confluent-kafka, if none is given."""
        self.producers.append(self._work(act or self.clients.produce, options))

    def read(self, act: Act | None = None, **options: Any) -> None:
        """Start a client that reads, and perhaps copies; a watcher, if none is given."""
        self.readers.append(self._work(act or self.clients.watch, options))

    def _work(self, act: Act, options: dict[str, Any]) -> Work:
        number = len(self.producers) + len(self.readers)
        made = Work(f"{act.__name__} {number}", functools.partial(act, **options))
        made.start()
        return made

    def check_clients(self) -> None:
        """Raise the error of a client that has one."""
        for each in (*self.producers, *self.readers):
            if each.error is not None:
                raise each.error

    def await_acked(self, since: int, least: int = LEAST_ACKED, what: str = "the load") -> int:
        """Wait until `least` more than `since` records are acknowledged; return how many."""
        deadline = time.monotonic() + TIMEOUT
        while self.clients.acked - since < least:
            self.check_clients()
            if time.monotonic() > deadline:
                raise VoidRun(
                    f"{what}: {self.clients.acked - since} records were acknowledged in "
                    f"{TIMEOUT:g} s, not {least}; {self.clients}; {self.tree.summary()}"
                )
            time.sleep(0.01)
        return self.clients.acked - since

    def await_committed(self, since: int, what: str, least: int = 3) -> None:
        """Wait until `least` more than `since` transactions are committed."""
        deadline = time.monotonic() + TIMEOUT
        while len(self.clients.committed) - since < least:
            self.check_clients()
            if time.monotonic() > deadline:
                raise VoidRun(f"{what}: the copy does not continue: {self.clients}")
            time.sleep(0.01)

    # ---- faults ----

    def fault(
        self, name: str, act: Callable[..., object], *arguments: Any, moves: Key | None = None
    ) -> PartitionState | None:
        """Carry out a fault, `act` of the arguments, and wait until the clients have continued.

        `moves`: the partition whose leader must change; its new state is returned.
        """
        before = self.tree.await_leader(*moves) if moves else None
        acked = self.clients.acked
        began = time.monotonic()
        act(*arguments)
        after = None
        if moves is not None and before is not None:
            try:
                after = self.tree.await_leader(*moves, after=before.leader_epoch)
            except TimeoutError as error:
                raise VoidRun(f"{name}: the leader has not changed: {error}") from None
            if after.leader == before.leader:
                raise VoidRun(f"{name}: node {after.leader} leads again: {before}, {after}")
            # Count only what the new leader acknowledged.
            acked = self.clients.acked
        count = self.await_acked(acked, what=name)
        self.faults.append(Fault(name, count, time.monotonic() - began))
        return after

    def leader(self, topic: str = "in", partition: int = 0) -> int:
        """Return the node that leads a partition."""
        return self.tree.await_leader(topic, partition).leader

    def elect_preferred(self, topic: str, partition: int) -> None:
        """Have the first replica of a partition lead it."""
        wanted = self.tree.partitions()[topic, partition][0]
        admin = confluent_kafka.admin.AdminClient(
            {"bootstrap.servers": self.cluster.bootstrap_servers, "log_level": 0}
        )
        place = confluent_kafka.TopicPartition(topic, partition)
        admin.elect_leaders(confluent_kafka.ElectionType.PREFERRED, [place]).result(TIMEOUT)
        self.tree.wait(lambda: self.leader(topic, partition) == wanted, f"{wanted} does not lead")

    def coordinator(self, key: str, kind: int) -> int:
        """Return the node of the coordinator of a group (0) or of a transactional id (1)."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            host, _, port = self.cluster.address(self.cluster.up[0]).rpartition(":")
            with Peer((host, int(port))) as peer:
                answer = peer.ask(10, 3, {"key": key, "key_type": kind})
            if answer["error_code"] == 0:
                node: int = answer["node_id"]
                return node
            if time.monotonic() > deadline:
                raise VoidRun(f"no coordinator of {key!r}: {answer}")
            time.sleep(0.05)

    # ---- the end ----

    def heal(self, *, in_sync: bool = True) -> None:
        """End every fault; wait until all replicas are in sync, unless told not to."""
        self.cluster.heal()
        for number, node in self.cluster.nodes.items():
            if node.paused:
                self.cluster.resume(number)
            elif not node.running:
                self.cluster.start(number)
        if in_sync:
            self.tree.await_in_sync()

    def finish(
        self,
        *,
        least: int = 1,
        read: Sequence[str] = (),
        copies: Mapping[str, str] | None = None,
        java: JavaCopier | None = None,
        strays: bool = False,
    ) -> None:
        """Heal, stop the clients, and check what they saw and what the nodes have.

        `least`: how many faults there must be.  `read`: topics whose watchers must get every
        record.  `copies`: a topic that must hold each record of another one once.  `java`: a copier
        from "in" to "java".  `strays`: whether nodes have set damaged logs aside; they must have.
        """
        if len(self.faults) < least:
            raise VoidRun(f"{len(self.faults)} faults, not {least}: {self.faults}")
        self.heal()
        for each in self.producers:
            each.stop()
        self.check_clients()
        ends = self._ends()
        self._await_read(read, ends, copies or {}, java)
        for each in self.readers:
            each.stop()
        copied = dict(copies or {})
        if java is not None:
            java.stop()
            copied["java"] = "in"
        refused = [(value[:40], str(error)) for value, error in self.clients.unacked]
        assert not refused, f"{len(refused)} records were not acknowledged: {refused[:5]}"
        ends = self._ends()
        replicas = self.tree.partitions()
        self.tree.await_in_sync()
        self.cluster.terminate_all()
        stores = {number: self.cluster.store(number) for number in self.cluster.numbers}
        problems = replica_problems(stores, replicas, ends)
        aside = [line for line in problems if line.endswith("-stray is left")]
        if strays:
            problems = [line for line in problems if line not in aside]
            if not aside:
                raise VoidRun("no damaged log was set aside")
        assert not problems, "\n".join(problems)
        self._snapshots(stores, replicas, ends)
        assert_clean(
            self.clients.recorder.history(),
            caught_up=True,
            copies=[Copy(_all(source), _all(target)) for target, source in copied.items()],
        )
        for each in self.faults:
            print(f"{each.name}: {each.acked} acknowledged, {each.seconds:.1f} s")
        print(self.clients)

    def _ends(self) -> dict[Key, int]:
        """Return the high watermark of every partition of the topics."""
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.cluster.bootstrap_servers,
                "group.id": "ends",
                "log_level": 0,
            }
        )
        try:
            return {
                (topic, number): consumer.get_watermark_offsets(
                    confluent_kafka.TopicPartition(topic, number), TIMEOUT
                )[1]
                for topic in self.topics
                for number in range(PARTITIONS)
            }
        finally:
            consumer.close()

    def _await_read(
        self,
        read: Sequence[str],
        ends: Mapping[Key, int],
        copies: Mapping[str, str],
        java: JavaCopier | None,
    ) -> None:
        """Wait until the watchers have got what they must get."""
        deadline = time.monotonic() + TIMEOUT
        acked = self.clients.acked

        def missing() -> str:
            for target in copies:
                count = sum(list(self.clients.committed.values()))
                if count != acked:
                    return f"{count} of {acked} records are copied to {target}"
                if len(self.clients.read.get(target, ())) != acked:
                    return f"{len(self.clients.read[target])} of {acked} of {target} are read"
            if java is not None:
                java.check()
                if sum(list(java.committed.values())) != acked:
                    return f"{java}, not {acked}"
            for topic in read:
                count = len(self.clients.read.get(topic, ()))
                wanted = sum(end for key, end in ends.items() if key[0] == topic)
                if count != wanted:
                    return f"{count} of {wanted} records of {topic} are read"
            return ""

        while words := missing():
            self.check_clients()
            assert time.monotonic() < deadline, f"{words}: {self.clients}"
            time.sleep(0.05)

    def _snapshots(
        self,
        stores: Mapping[int, Path],
        replicas: Mapping[Key, Sequence[int]],
        ends: Mapping[Key, int],
    ) -> None:
        for path in stores.values():
            with logstore.open(path, readonly=True) as store:
                for (topic, number), end in ends.items():
                    for isolation in ("read_uncommitted", "read_committed"):
                        rows = store[topic][number].scan(stop=end, isolation=isolation)
                        self.clients.recorder.snapshot((topic, number), rows, isolation=isolation)


def _all(topic: str) -> frozenset[Key]:
    return frozenset((topic, number) for number in range(PARTITIONS))
