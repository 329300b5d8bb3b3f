"""B1 to B3, B6, B7: three nodes on one machine with a real ZooKeeper, by librdkafka."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from time import perf_counter, sleep
from typing import Any, NamedTuple

from benchmarks.bars.wire_latency import percentiles
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least, at_most
from benchmarks.wire import librdkafka

ONE, ALONE = "acks=1", "one replica"
RECORD_BYTES = 1000
SESSION_SECONDS = 2.0  # zookeeper.session.timeout.ms of the nodes
ROUNDS = 5  # of fail-overs


class _Target(NamedTuple):
    """What librdkafka connects to."""

    address: str


@contextlib.contextmanager
def cluster(bench: Bench, durability: str) -> Iterator[Any]:
    """Three nodes, and a ZooKeeper of one server."""
    from logstore.testing.cluster import ClusterUnderTest

    zookeeper = importlib.import_module("tests.interop.zookeeper")
    home = bench.workspace.kept(f"cluster-{durability}")
    with zookeeper.Ensemble(home / "zookeeper", 1) as servers:
        arguments = ("--durability", durability)
        with ClusterUnderTest(
            home, 3, zookeeper=servers, linked=False, arguments=arguments
        ) as nodes:
            yield nodes


def why_not() -> str | None:
    """Return why ZooKeeper cannot be run here; None if it can."""
    try:
        importlib.import_module("confluent_kafka")
        importlib.import_module("kazoo")
        zookeeper = importlib.import_module("tests.interop.zookeeper")
    except ImportError as error:
        return str(error)
    try:
        zookeeper.zookeeper_jar_directory()
    except zookeeper.KafkaUnavailableError as error:
        return str(error)
    return None


def create(nodes: Any, name: str, factor: int, partitions: int = 1) -> None:
    module: Any = importlib.import_module("confluent_kafka.admin")
    admin = module.AdminClient({"bootstrap.servers": nodes.bootstrap_servers})
    settings = {"min.insync.replicas": str(min(2, factor))}
    topic = module.NewTopic(name, partitions, factor, config=settings)
    for made in admin.create_topics([topic], request_timeout=120).values():
        made.result(180)


def leader(nodes: Any, topic: str) -> int:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": nodes.bootstrap_servers, "log_level": 0})
    return int(admin.list_topics(topic, timeout=30).topics[topic].partitions[0].leader)


@bar("B1", "acks=all on three replicas, durability fsync", needs_engine=True)
def replicated(bench: Bench) -> Iterator[Figure]:
    if bench.left_out("B1", why_not()):
        return
    records = bench.sizes.wire_singles * 50
    with cluster(bench, "fsync") as nodes:
        create(nodes, "three", 3)
        create(nodes, "one", 1)
        target = _Target(nodes.bootstrap_servers)

        def rate(topic: str, acks: str) -> Any:
            return lambda: (
                librdkafka.produce(target, topic, records, RECORD_BYTES, acks=acks),  # type: ignore[arg-type]
            )

        found = bench.medians(
            {OURS: rate("three", "all"), ONE: rate("three", "1"), ALONE: rate("one", "all")},
            writes=True,
        )
        rates = {name: values[0] for name, values in found.items()}
        for against, bound in ((ONE, 0.60), (ALONE, 0.20)):
            yield Figure.compared(
                f"produce 1 KB to three replicas, against {against}", rates,
                against=against, limit=at_least(bound), unit="k records/s", scale=1e3,
            )  # fmt: skip
        yield Figure.compared(
            "produce 1 KB with acks=1 to three replicas, against one replica", rates,
            against=ALONE, limit=at_least(0.70), unit="k records/s", scale=1e3, ours=ONE,
        )  # fmt: skip

        def single(acks: str) -> Any:
            count = bench.sizes.wire_singles // 4
            return lambda: percentiles(
                librdkafka.single_sends(target, "three", count, acks=acks)  # type: ignore[arg-type]
            )

        times = bench.medians({OURS: single("all"), ONE: single("1")}, writes=True)
        for number, (share, bound) in enumerate((("p50", 4.0), ("p99", 6.0))):
            yield Figure.compared(
                f"one record at a time, {share}", {k: v[number] for k, v in times.items()},
                against=ONE, limit=at_most(bound), unit="us", scale=1e-6,
            )  # fmt: skip


@bar("B6", "fail-over of a leader with a session of 2 s", needs_engine=True)
def fail_over(bench: Bench) -> Iterator[Figure]:
    if bench.left_out("B6", why_not()):
        return
    with cluster(bench, "os") as nodes:
        create(nodes, "three", 3)
        killed, ended = [], []
        for _ in range(ROUNDS):
            killed.append(_gap(nodes, nodes.kill) / SESSION_SECONDS)
            ended.append(_gap(nodes, nodes.terminate))
        worst, middle = max(killed), sorted(killed)[len(killed) // 2]
        limit = 1.0 + 1.0 / SESSION_SECONDS
        for name, value, unit, bound in (
            ("kill -9 to the next commit, median", middle, "sessions", limit),
            ("kill -9 to the next commit, longest", worst, "sessions", 1.5),
            ("controlled shutdown to the next commit, longest", max(ended), "s", 0.5),
        ):
            yield Figure(name=name, value=value, unit=unit, limit=at_most(bound, unit))


def _gap(nodes: Any, end: Any) -> float:
    """End the leader; return the seconds until a producer's next record is committed."""
    from confluent_kafka import Producer

    old = leader(nodes, "three")
    producer = Producer(
        {
            "bootstrap.servers": nodes.bootstrap_servers,
            "enable.idempotence": True,
            "retry.backoff.ms": 50,
            "topic.metadata.refresh.fast.interval.ms": 50,
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
        }
    )
    producer.produce("three", b"before", partition=0)
    assert producer.flush(60) == 0
    began = perf_counter()
    end(old)
    if end == nodes.terminate:
        began = perf_counter()
    producer.produce("three", b"after", partition=0)
    assert producer.flush(60) == 0
    gap = perf_counter() - began
    nodes.start(old)
    sleep(3)
    return gap
