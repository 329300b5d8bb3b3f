"""W5, W13: one record at a time, to its acknowledgement and to a consumer that waits for it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter

from benchmarks.bench import Bench
from benchmarks.figure import Figure, at_most
from benchmarks.wire import librdkafka, raw
from benchmarks.wire.servers import (
    Server,
    Servers,
    column,
    compared,
    peer,
    topic_of_each,
    wire_bar,
)

PAUSE = 0.002  # 500 records a second


def percentiles(times: Iterable[float]) -> tuple[float, float]:
    """Return the 50th and the 99th."""
    taken = sorted(times)
    return taken[len(taken) // 2], taken[len(taken) * 99 // 100]


def latency(
    bench: Bench, name: str, entrants: dict[str, Callable[[], tuple[float, ...]]], p50: float
) -> Iterator[Figure]:
    results = bench.medians(entrants, writes=True)
    for number, (share, bound) in enumerate((("p50", p50), ("p99", 1.0))):
        values = column(results, number)
        yield compared(f"{name}, {share}", values, at_most(bound), "us", 1e-6)


def raw_sends(server: Server, topic: str, count: int) -> list[float]:
    """Send one record at a time; return how long each takes to be acknowledged."""
    body = peer().produce_body(topic, raw.batch(1, 100)[0])
    frame = peer().request(raw.PRODUCE, raw.PRODUCE_VERSION, body)
    return server.answer_times(frame, count)


@wire_bar("W5", "one record at a time through the Kafka listener")
def single(bench: Bench, both: Servers) -> Iterator[Figure]:
    count = bench.sizes.wire_singles
    with topic_of_each(both, "single") as topic:

        def client(server: Server) -> Callable[[], tuple[float, ...]]:
            return lambda: percentiles(librdkafka.single_sends(server, topic, count))

        def stream(server: Server) -> Callable[[], tuple[float, ...]]:
            return lambda: percentiles(raw_sends(server, topic, count))

        entrants = {name: client(server) for name, server in both.items()}
        yield from latency(bench, "one record at a time, librdkafka", entrants, 0.7)
        entrants = {name: stream(server) for name, server in both.items()}
        yield from latency(bench, "one record at a time, raw", entrants, 0.7)


def raw_end_to_end(server: Server, topic: str, count: int) -> list[float]:
    """Return how long records take to a fetch that waits for them."""
    batch = raw.batch(1, 100)
    taken = []
    with server.connect() as link:
        rows = {"partition_index": 0, "timestamp": -1, "current_leader_epoch": -1}
        body = {"replica_id": -1, "topics": [{"name": topic, "partitions": [rows]}]}
        end = link.ask(2, 6, body)["topics"][0]["partitions"][0]["offset"]
        waiting = raw.Fetching(server, topic, count, offset=end)
        frame = peer().request(
            raw.PRODUCE, raw.PRODUCE_VERSION, peer().produce_body(topic, batch[0])
        )
        for number in itertools.count(1):
            waiting.fill()
            time.sleep(PAUSE)
            began = perf_counter()
            link.socket.sendall(frame)
            while waiting.records < number:
                waiting.receive()
            taken.append(perf_counter() - began)
            link.frame()
            if number == count:
                waiting.socket.close()
                return taken
    raise AssertionError


@wire_bar("W13", "from a producer to a consumer that waits, 500 a second")
def to_consumer(bench: Bench, both: Servers) -> Iterator[Figure]:
    count = bench.sizes.wire_singles // 4
    with topic_of_each(both, "waited") as topic:

        def client(server: Server) -> Callable[[], tuple[float, ...]]:
            return lambda: percentiles(librdkafka.end_to_end(server, topic, count, PAUSE))

        def stream(server: Server) -> Callable[[], tuple[float, ...]]:
            return lambda: percentiles(raw_end_to_end(server, topic, count))

        entrants = {name: client(server) for name, server in both.items()}
        yield from latency(bench, "producer to consumer, librdkafka", entrants, 0.8)
        entrants = {name: stream(server) for name, server in both.items()}
        yield from latency(bench, "producer to fetch, raw", entrants, 0.8)
