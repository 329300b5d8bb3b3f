"""P20: a producer's send, beside the bare writer that it stands on; transactions."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from benchmarks import engine
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least
from benchmarks.peers import confluent_mock, memory_queue, persist_queue
from benchmarks.values import random_values

RECORDS = "M records/s"
MILLION = 1e6
PER_TRANSACTION = 100


@bar("P20", "Producer.send, until all is answered")
def sends(bench: Bench) -> Iterator[Figure]:
    values = random_values(bench.sizes.records)
    some, few = values[: len(values) // 10], values[: bench.sizes.slow_puts]
    scratch = bench.workspace.scratch

    def ours() -> float:
        with scratch("store") as path, engine.open_store(path) as store:
            store.create_topic("bench")
            producer = engine.producer(store)
            send = producer.send
            started = perf_counter()
            for value in values:
                send("bench", value)
            producer.close()
            return len(values) / (perf_counter() - started)

    def keyed() -> float:
        with scratch("store") as path, engine.open_store(path) as store:
            store.create_topic("bench", partitions=4)
            producer = engine.producer(store)
            send = producer.send
            started = perf_counter()
            for value in values:
                send("bench", value, key=value[:8])
            producer.close()
            return len(values) / (perf_counter() - started)

    def writer() -> float:
        with scratch("store") as path, engine.open_store(path) as store:
            return engine.write_buffered(store.create_topic("bench")[0], values)

    def persisted() -> float:
        with scratch("queue") as path:
            return persist_queue.write(path, few)

    runs = {
        OURS: ours,
        "Writer.append": writer,
        "keys, 4 partitions": keyed,
        "queue.Queue": lambda: memory_queue.send(some),
        "confluent-kafka, mock cluster": lambda: confluent_mock.send(some),
        "persist-queue": persisted,
    }
    yield Figure.compared(
        "Producer.send, against the bare Writer",
        bench.race(runs, writes=True),
        against="Writer.append",
        beside=tuple(name for name in runs if name not in (OURS, "Writer.append")),
        limit=at_least(0.5),
        unit=RECORDS,
        scale=MILLION,
    )
    if bench.has_engine:
        yield transactions(bench)


def transactions(bench: Bench) -> Figure:
    """Committed transactions a second, each over two partitions, durable and not."""
    values = random_values(PER_TRANSACTION)
    count = max(10, bench.sizes.synced_appends // 10)

    def commits(durability: str) -> float:
        scratch = bench.workspace.scratch("store")
        with scratch as path, engine.open_store(path, durability=durability) as store:
            store.create_topic("bench", partitions=2)
            producer = engine.producer(store, "bench")
            started = perf_counter()
            for _ in range(count):
                with producer.transaction() as transaction:
                    for number, value in enumerate(values):
                        transaction.send("bench", value, partition=number % 2)
            elapsed = perf_counter() - started
            producer.close()
            return count / elapsed

    rates = bench.race({OURS: lambda: commits("fsync"), "durability os": lambda: commits("os")},
                       writes=True)  # fmt: skip
    return Figure(
        name=f"transactions of {PER_TRANSACTION} records in two partitions",
        value=rates[OURS],
        unit="commits/s",
        limit=None,
        peers={"durability os": rates["durability os"]},
    )
