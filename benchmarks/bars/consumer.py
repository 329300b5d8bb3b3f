"""P16 to P19: consumers beside the bare scan, from append to consume, commits, timers."""

from __future__ import annotations

import functools
import heapq
import queue
import statistics
from collections.abc import Iterator
from time import perf_counter

from benchmarks import engine
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least
from benchmarks.peers import handing_over
from benchmarks.values import random_values

MILLION = 1e6
TIMERS = 100_000
MOCK_RECORDS = 20_000  # librdkafka's mock broker keeps 5 MiB of a partition


@bar("P16", "Consumer, record by record")
def iteration(bench: Bench) -> Iterator[Figure]:
    values = random_values(bench.sizes.records)
    few = values[: bench.sizes.single_appends]
    cluster = handing_over.MockCluster()
    held = few[:MOCK_RECORDS]
    cluster.fill("bench", held)
    with bench.workspace.scratch("consumer") as home, engine.open_store(home) as store:
        log = store.create_topic("bench")[0]
        with log.writer() as out:
            for value in values:
                out.append(value)

        def counted(records: Iterator[engine.Log]) -> float:
            total = count = 0
            started = perf_counter()
            for record in records:
                total += len(record.value)
                count += 1
            elapsed = perf_counter() - started
            assert count == len(values)
            return count / elapsed

        def alone() -> float:
            with engine.consumer(store, "bench", timeout=0) as consumer:
                return counted(consumer)

        def in_group() -> float:
            with engine.consumer(store, "bench", group_id="bench", auto_commit=False,
                                 timeout=0) as consumer:  # fmt: skip
                return counted(consumer)

        def polled() -> float:
            total = count = 0
            with engine.consumer(store, "bench", timeout=0) as consumer:
                started = perf_counter()
                while records := consumer.poll(max_records=500):
                    for record in records:
                        total += len(record.value)
                    count += len(records)
                elapsed = perf_counter() - started
            assert count == len(values)
            return count / elapsed

        def through_queue() -> float:
            held: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            for value in few:
                held.put(value)
            started = perf_counter()
            total = 0
            for _ in few:
                total += len(held.get())
            return len(few) / (perf_counter() - started)

        bench.workspace.settle()
        rates = bench.race({
            OURS: alone, f"{OURS} in a group": in_group, f"{OURS} poll": polled,
            "bare scan": lambda: counted(log.scan()), "queue.SimpleQueue": through_queue,
            "confluent-kafka, mock": lambda: cluster.scan("bench", len(held)),
        })  # fmt: skip
    for name, ours, bound in (
        ("alone", OURS, 0.5),
        ("in a group", f"{OURS} in a group", 0.5),
        ("poll of 500", f"{OURS} poll", None),
    ):
        shown = ("queue.SimpleQueue", "confluent-kafka, mock") if name == "alone" else ()
        yield Figure(
            name=f"Consumer {name}, against the bare scan",
            value=rates[ours] / MILLION,
            unit="M records/s",
            limit=None if bound is None else at_least(bound),
            peers={peer: rates[peer] / MILLION for peer in ("bare scan", *shown)},
            ratio=rates[ours] / rates["bare scan"],
        )


@bar("P17", "from append to consume, between two threads")
def latency(bench: Bench) -> Iterator[Figure]:
    count = bench.sizes.slow_puts
    found: dict[str, list[float]] = {"queue.Queue": handing_over.through_queue(count)}
    found["confluent-kafka, mock"] = handing_over.MockCluster().handing_over(count)
    with bench.workspace.scratch("latency") as home, engine.open_store(home) as store:
        log = store.create_topic("bench")[0]
        with engine.consumer(store, "bench") as consumer:
            records = iter(consumer)
            found[OURS] = handing_over.measure(log.append, lambda: next(records).value, count)
    for name, part in (("p50", 50), ("p99", 99)):
        cut = {who: statistics.quantiles(times, n=100)[part - 1] for who, times in found.items()}
        yield Figure(
            name=f"append to consume, {name}",
            value=cut[OURS] * MILLION,
            unit="us",
            peers={who: seconds * MILLION for who, seconds in cut.items() if who != OURS},
            ratio=cut[OURS] / cut["queue.Queue"],
        )


@bar("P18", "offset commits")
def commits(bench: Bench) -> Iterator[Figure]:
    for durability, count in (
        ("os", bench.sizes.slow_puts),
        ("fsync", max(50, bench.sizes.synced_appends // 10)),
    ):
        scratch = bench.workspace.scratch("commits")
        with scratch as home, engine.open_store(home, durability=durability) as store:
            topic = store.create_topic("bench")
            topic.append(b"x")
            with engine.consumer(store, "bench", group_id="bench", auto_commit=False) as consumer:
                consumer.poll()

                def ours(consumer: engine.Log = consumer, count: int = count) -> float:
                    started = perf_counter()
                    for _ in range(count):
                        consumer.commit()
                    return count / (perf_counter() - started)

                def append(topic: engine.Log = topic, count: int = count) -> float:
                    started = perf_counter()
                    for _ in range(count):
                        topic.append(b"x", key=b"k")
                    return count / (perf_counter() - started)

                rates = bench.race({OURS: ours, "append": append}, writes=True)
        yield Figure(
            name=f"commit of a consumer, durability {durability}",
            value=rates[OURS] / 1000,
            unit="k commits/s",
            peers={"append": rates["append"] / 1000},
            ratio=rates[OURS] / rates["append"],
        )


@bar("P19", "timers")
def timers(bench: Bench) -> Iterator[Figure]:
    """Leases and time-outs: nearly all are cancelled before they are due."""
    count = TIMERS
    delays = [(number * 7919) % 300_000 for number in range(count)]

    def nothing() -> None:
        pass

    def wheel(cancel: bool) -> float:
        held = engine.timing_wheel()
        started = perf_counter()
        timeouts = [held.add(delay, nothing) for delay in delays]
        if cancel:
            for timeout in timeouts:
                held.cancel(timeout)
        return count / (perf_counter() - started)

    def heap(cancel: bool) -> float:
        held: list[list[object]] = []
        started = perf_counter()
        entries = [[delay, number, nothing] for number, delay in enumerate(delays)]
        for entry in entries:
            heapq.heappush(held, entry)
        if cancel:  # marked, and thrown away when they come up: the usual way
            for entry in entries:
                entry[2] = None
            while held and heapq.heappop(held)[2] is None:
                pass
        return count / (perf_counter() - started)

    for name, cancel in (("added", False), ("added and cancelled", True)):
        rates = bench.race(
            {OURS: functools.partial(wheel, cancel), "heapq": functools.partial(heap, cancel)}
        )
        yield Figure(
            name=f"100,000 time-outs {name}",
            value=rates[OURS] / MILLION,
            unit="M/s",
            peers={"heapq": rates["heapq"] / MILLION},
            ratio=rates[OURS] / rates["heapq"],
        )
