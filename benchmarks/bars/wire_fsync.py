"""W10, W11: records that are on the disk before they are acknowledged.

The peer is a topic with flush.messages=1, with which Kafka syncs each batch that it appends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from benchmarks.bars.wire_latency import percentiles, raw_sends
from benchmarks.bench import Bench
from benchmarks.figure import OURS, Figure, at_least, at_most
from benchmarks.wire import librdkafka, raw
from benchmarks.wire.servers import FLUSHED, KAFKA, Server, Servers, column, compared, wire_bar
from benchmarks.wire.servers import durable as durable_server

SMALL, LARGE = 100, 1024
UNSYNCED = "Apache Kafka without fsync"
ALONE, MANY, AHEAD = "one connection", f"{OURS}, 16 connections", f"{OURS}, 5 in flight"


@wire_bar("W10", "durability fsync, against Kafka with flush.messages=1")
def durable(bench: Bench, both: Servers) -> Iterator[Figure]:
    ours, kafka = durable_server(bench), both[KAFKA]
    with contextlib.ExitStack() as stack:
        topics = {
            OURS: (ours, stack.enter_context(ours.topic("synced"))),
            KAFKA: (kafka, stack.enter_context(kafka.topic("flushed", settings=FLUSHED))),
            UNSYNCED: (kafka, stack.enter_context(kafka.topic("unsynced"))),
        }

        def producing(name: str, record_bytes: int) -> Callable[[], tuple[float, ...]]:
            server, topic = topics[name]
            records = bench.sizes.wire_bytes // record_bytes

            def run() -> tuple[float, ...]:
                rate = librdkafka.produce(server, topic, records, record_bytes)
                return (rate * record_bytes,)

            return run

        def sending(name: str) -> Callable[[], tuple[float, ...]]:
            server, topic = topics[name]
            return lambda: percentiles(raw_sends(server, topic, bench.sizes.wire_singles // 2))

        for size, text in ((SMALL, "100 B"), (LARGE, "1 KB")):
            entrants = {name: producing(name, size) for name in topics}
            rates = column(bench.medians(entrants, writes=True, rounds=3))
            name = f"produce {text} with fsync, librdkafka"
            yield compared(name, rates, at_least(1.5), "MB/s", 1e6)
        yield Figure.compared(
            f"{name}, over no fsync", rates, against=UNSYNCED, limit=at_least(0.5), unit="MB/s",
            scale=1e6,
        )  # fmt: skip
        entrants = {name: sending(name) for name in (OURS, KAFKA)}
        results = bench.medians(entrants, writes=True, rounds=3)
        name = "one record at a time with fsync, raw, p50"
        yield compared(name, column(results), at_most(0.8), "us", 1e-6)


@wire_bar("W11", "fsyncs that connections and requests share")
def shared(bench: Bench, both: Servers) -> Iterator[Figure]:
    ours, kafka = durable_server(bench), both[KAFKA]
    batch = raw.batch(1, SMALL)
    count = max(20, bench.sizes.wire_singles // 4)

    def sending(
        server: Server, topic: str, connections: int, in_flight: int, requests: int
    ) -> Callable[[], tuple[float, ...]]:
        def run() -> tuple[float, ...]:
            streams = [
                raw.Producing(server, topic, batch, requests, in_flight=in_flight)
                for _ in range(connections)
            ]
            return (connections * requests / raw.drive(streams),)

        return run

    with ours.topic("shared") as topic, kafka.topic("shared", settings=FLUSHED):
        results = bench.medians(
            {
                ALONE: sending(ours, topic, 1, 1, count),
                MANY: sending(ours, topic, 16, 1, count),
                AHEAD: sending(ours, topic, 1, 5, 2 * count),
                f"{KAFKA}, 16 connections": sending(kafka, topic, 16, 1, count // 4),
                f"{KAFKA}, 5 in flight": sending(kafka, topic, 1, 5, count // 2),
            },
            rounds=3,
        )
    rates = column(results)
    for name, bound in ((MANY, 6.0), (AHEAD, 2.0)):
        work = name.removeprefix(f"{OURS}, ")
        yield Figure.compared(
            f"requests with fsync, {work}",
            rates,
            against=ALONE,
            limit=at_least(bound),
            unit="requests/s",
            beside=(f"{KAFKA}, {work}",),
            ours=name,
        )
