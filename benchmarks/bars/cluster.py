"""B10: appends to a cluster of three nodes in one process, beside a store without replicas."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from benchmarks import engine
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least
from benchmarks.values import chunked, random_values

LIST_RECORDS = 1000
PLAIN = "Topic of a Store"


@bar("B10", "Cluster(nodes=3), acks=all, durability os", needs_engine=True)
def cluster_appends(bench: Bench) -> Iterator[Figure]:
    values = random_values(bench.sizes.records)
    few = values[: bench.sizes.slow_puts]
    lists = chunked(values[:100_000], LIST_RECORDS)
    scratch = bench.workspace.scratch

    def each(topic: engine.Log) -> float:
        return engine.append_each(topic, few)

    def in_lists(topic: engine.Log) -> float:
        started = perf_counter()
        for records in lists:
            topic.extend(records, partition=0)
        return sum(map(len, lists)) / (perf_counter() - started)

    for name, work, bound in (
        ("one record a call", each, 0.10),
        (f"{LIST_RECORDS:,} records a call", in_lists, 0.30),
    ):

        def ours(work=work) -> float:  # type: ignore[no-untyped-def]
            with scratch("cluster") as path, engine.open_cluster(path) as cluster:
                return float(work(cluster.create_topic("bench", config={"min.insync.replicas": 2})))

        def plain(work=work) -> float:  # type: ignore[no-untyped-def]
            with scratch("store") as path, engine.open_store(path) as store:
                return float(work(store.create_topic("bench")))

        yield Figure.compared(
            f"append to three replicas, {name}",
            bench.race({OURS: ours, PLAIN: plain}, writes=True),
            against=PLAIN,
            limit=at_least(bound),
            unit="k records/s",
            scale=1e3,
        )
