"""W1 to W4, W6, W12, W19: produce and consume, through the listener and through a real broker.

Each line is measured twice: with librdkafka, whose own CPU time is often the limit, and with raw
streams, which leave the server as the limit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from time import perf_counter

from benchmarks import engine
from benchmarks.bench import Bench
from benchmarks.figure import OURS, Figure, at_least, at_most
from benchmarks.wire import librdkafka, raw
from benchmarks.wire.servers import (
    KAFKA,
    Server,
    Servers,
    column,
    compared,
    servers,
    topic_of_each,
    wire_bar,
)

SMALL, LARGE = 100, 1024
BATCH_BYTES = 16 << 10  # the default of the Java producer
LARGE_BATCH_BYTES = 1_000_000  # the default of librdkafka
AHEAD = 1.5  # what produce and consume are to be over Kafka
MB = 1e6

Results = dict[str, tuple[float, ...]]  # by server: bytes of records a second, CPU seconds of a GB


def measured(
    bench: Bench,
    topic: str,
    act: Callable[[Server, str], float],
    size_bytes: int,
    *,
    writes: bool = False,
) -> Results:
    """Run `act`, which moves `size_bytes` and returns bytes a second, in turns on both servers."""

    def turn(server: Server) -> Callable[[], tuple[float, ...]]:
        def run() -> tuple[float, ...]:
            before = server.cpu_seconds()
            rate = act(server, topic)
            return rate, (server.cpu_seconds() - before) / size_bytes * 1e9

        return run

    entrants = {name: turn(server) for name, server in servers(bench).items()}
    return bench.medians(entrants, writes=writes)


@functools.cache
def produced(bench: Bench, record_bytes: int, compression: str = "none") -> Results:
    """With librdkafka."""
    records = bench.sizes.wire_bytes // record_bytes

    def act(server: Server, topic: str) -> float:
        rate = librdkafka.produce(server, topic, records, record_bytes, compression)
        return rate * record_bytes

    with topic_of_each(servers(bench), f"produce-{record_bytes}-{compression}") as topic:
        return measured(bench, topic, act, bench.sizes.wire_bytes, writes=True)


@functools.cache
def raw_produced(bench: Bench, record_bytes: int, batch_bytes: int = BATCH_BYTES) -> Results:
    """With one raw stream, five requests in flight."""
    batch = raw.batch(batch_bytes, record_bytes)
    count = max(10, bench.sizes.wire_bytes // len(batch[0]))

    def act(server: Server, topic: str) -> float:
        seconds = raw.drive([raw.Producing(server, topic, batch, count)])
        return count * batch[1] * record_bytes / seconds

    with topic_of_each(servers(bench), f"raw-{record_bytes}-{batch_bytes}") as topic:
        return measured(bench, topic, act, bench.sizes.wire_bytes, writes=True)


@functools.cache
def consumed(bench: Bench, record_bytes: int) -> tuple[Results, Results]:
    """With librdkafka, and with one raw stream: the same topic."""
    with topic_of_each(servers(bench), f"consume-{record_bytes}") as topic:
        # Large records are read so fast that a turn of the usual size is too short.
        size = bench.sizes.wire_bytes * (4 if record_bytes == LARGE else 1)
        for server in servers(bench).values():
            records = raw.fill(server, topic, size, record_bytes)

        def act(server: Server, topic: str) -> float:
            return librdkafka.consume(server, topic, records) * record_bytes

        def raw_act(server: Server, topic: str) -> float:
            seconds = raw.drive([raw.Fetching(server, topic, records)])
            return records * record_bytes / seconds

        return measured(bench, topic, act, size), measured(bench, topic, raw_act, size)


def million_records(name: str, results: Results, record_bytes: int) -> Figure:
    return compared(name, column(results), at_least(AHEAD), "M records/s", record_bytes * 1e6)


@wire_bar("W1", "produce 100 B through the Kafka listener")
def produce_small(bench: Bench, both: Servers) -> Iterator[Figure]:
    yield million_records("produce 100 B, librdkafka", produced(bench, SMALL), SMALL)
    yield million_records("produce 100 B, raw, 16 KB batches", raw_produced(bench, SMALL), SMALL)
    results = raw_produced(bench, SMALL, LARGE_BATCH_BYTES)
    yield million_records("produce 100 B, raw, 1 MB batches", results, SMALL)


@wire_bar("W2", "produce 1 KB through the Kafka listener")
def produce_large(bench: Bench, both: Servers) -> Iterator[Figure]:
    rates = column(produced(bench, LARGE))
    yield compared("produce 1 KB, librdkafka", rates, at_least(AHEAD), "MB/s", MB)
    rates = column(produced(bench, LARGE, "lz4"))
    yield compared("produce 1 KB, librdkafka, lz4", rates, at_least(AHEAD), "MB/s", MB)
    rates = column(raw_produced(bench, LARGE))
    yield compared("produce 1 KB, raw, 16 KB batches", rates, at_least(AHEAD), "MB/s", MB)


@wire_bar("W3", "consume 100 B through the Kafka listener")
def consume_small(bench: Bench, both: Servers) -> Iterator[Figure]:
    client, stream = consumed(bench, SMALL)
    yield million_records("consume 100 B, librdkafka", client, SMALL)
    yield million_records("consume 100 B, raw", stream, SMALL)


@wire_bar("W4", "consume 1 KB through the Kafka listener")
def consume_large(bench: Bench, both: Servers) -> Iterator[Figure]:
    client, stream = consumed(bench, LARGE)
    yield compared("consume 1 KB, librdkafka", column(client), at_least(AHEAD), "MB/s", MB)
    yield compared("consume 1 KB, raw", column(stream), at_least(AHEAD), "MB/s", MB)


@wire_bar("W6", "CPU seconds of the server for a GB")
def cpu_time(bench: Bench, both: Servers) -> Iterator[Figure]:
    lines = (
        ("produced, 100 B", produced(bench, SMALL), 0.35),
        ("produced, 1 KB", produced(bench, LARGE), 0.5),
        ("produced raw, 100 B in 16 KB batches", raw_produced(bench, SMALL), 1.0),
        ("consumed, 100 B", consumed(bench, SMALL)[0], 0.8),
        ("consumed, 1 KB", consumed(bench, LARGE)[0], 0.8),
        ("consumed raw, 1 KB", consumed(bench, LARGE)[1], 1.0),
    )
    for name, results, bound in lines:
        used = column(results, 1)
        if min(used.values()) > 0:  # a short turn is less than one tick of the clock
            yield compared(f"server CPU for a GB {name}", used, at_most(bound), "s")


@wire_bar("W12", "four producers and four consumers, eight partitions")
def crowd(bench: Bench, both: Servers) -> Iterator[Figure]:
    batch = raw.batch(BATCH_BYTES, LARGE)
    count = max(10, bench.sizes.wire_bytes // len(batch[0]) // 8)
    ends = dict.fromkeys(both, 0)  # records of each partition so far

    def turn(name: str) -> Callable[[], tuple[float, ...]]:
        def run() -> tuple[float, ...]:
            server, streams = both[name], []
            for number in range(8):
                # Each client has two partitions: one connection for each.
                streams += [
                    raw.Producing(server, topic, batch, count, partition=number),
                    raw.Fetching(
                        server, topic, count * batch[1], partition=number, offset=ends[name]
                    ),
                ]
            seconds = raw.drive(streams)
            ends[name] += count * batch[1]
            return (8 * count * batch[1] * LARGE / seconds,)

        return run

    with topic_of_each(both, "crowd", 8) as topic:
        results = bench.medians({name: turn(name) for name in both}, writes=True)
    name = "4 producers, 4 consumers, 8 partitions, 1 KB, raw"
    yield compared(name, column(results), at_least(1.0), "MB/s", MB)


@wire_bar("W19", "the listener against append_batch in process")
def beside_engine(bench: Bench, both: Servers) -> Iterator[Figure]:
    batch = raw.batch(LARGE_BATCH_BYTES, LARGE)
    count = max(10, bench.sizes.wire_bytes // len(batch[0]))

    def in_process() -> tuple[float, ...]:
        with bench.workspace.scratch("in-process") as home, engine.open_log(home / "t-0") as log:
            began = perf_counter()
            for _ in range(count):
                log.append_batch(batch[0])
            return (count * len(batch[0]) / (perf_counter() - began),)

    def streamed(server: Server) -> Callable[[], tuple[float, ...]]:
        return lambda: (
            count * len(batch[0]) / raw.drive([raw.Producing(server, topic, batch, count)]),
        )

    with topic_of_each(both, "engine") as topic:
        entrants = {name: streamed(server) for name, server in both.items()}
        results = bench.medians({**entrants, "append_batch": in_process}, writes=True)
    yield Figure.compared(
        "produce 1 MB batches, raw, over append_batch",
        column(results),
        against="append_batch",
        limit=at_least(0.6),
        unit="MB/s",
        scale=MB,
        beside=(KAFKA,),
        ours=OURS,
    )
