"""W18: requests about a thousand topics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from benchmarks.bench import Bench
from benchmarks.figure import Figure, at_most
from benchmarks.wire.servers import Server, Servers, column, compared, peer, wire_bar

METADATA, FETCH = 3, 1
REPEATS = 10


@wire_bar("W18", "metadata and fetch of many topics")
def many_topics(bench: Bench, both: Servers) -> Iterator[Figure]:
    count = bench.sizes.wire_topics
    names = [f"many-{number:04}" for number in range(count)]
    for server in both.values():
        server.create_topics(names)
    try:
        yield asked(bench, both, f"Metadata of {count} topics", METADATA, 12, metadata(names))
        yield asked(bench, both, f"Fetch of {count} partitions", FETCH, 12, fetch(names))
    finally:
        for server in both.values():
            server.delete_topics(names)


def metadata(names: list[str]) -> dict[str, Any]:
    return {"topics": [{"name": name, "topic_id": bytes(16)} for name in names]}


def fetch(names: list[str]) -> dict[str, Any]:
    """A full fetch: no session."""
    body: dict[str, Any] = peer().fetch_body(names[0], 0)
    (first,) = body["topics"]
    topics = [{**first, "topic": name} for name in names]
    return {**body, "session_epoch": -1, "topics": topics}


def asked(
    bench: Bench, both: Servers, name: str, key: int, version: int, body: dict[str, Any]
) -> Figure:
    frame = peer().request(key, version, body)

    def turn(server: Server) -> Callable[[], tuple[float, ...]]:
        return lambda: (median(server.answer_times(frame, REPEATS)),)

    results = bench.medians({name: turn(server) for name, server in both.items()})
    return compared(f"{name}, raw", column(results), at_most(1.0), "ms", 1e-3)
