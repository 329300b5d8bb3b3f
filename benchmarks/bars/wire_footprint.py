"""W7, W8, W9: what a server needs to be there: memory, time to start, idle connections."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from benchmarks.bench import Bench
from benchmarks.figure import OURS, Figure, at_most
from benchmarks.process import isolated
from benchmarks.wire import raw
from benchmarks.wire.servers import KAFKA, Server, Servers, compared, serve, topic_of_each, wire_bar

MB = 1e6
STARTS = 5


@wire_bar("W7", "resident memory of the server")
def memory(bench: Bench, both: Servers) -> Iterator[Figure]:
    rest = {name: float(server.rest_bytes) for name, server in both.items()}
    yield compared("resident memory at rest", rest, at_most(0.2), "MB", MB)
    size = bench.sizes.wire_through_bytes
    with topic_of_each(both, "through") as topic:
        for server in both.values():
            records = raw.fill(server, topic, size, 1024)
            raw.drive([raw.Fetching(server, topic, records)])
        after = {name: float(server.resident_bytes()) for name, server in both.items()}
    name = f"resident memory after {size / 1e9:.1f} GB in and out"
    yield compared(name, after, at_most(0.25), "MB", MB)
    yield Figure(name=name, value=after[OURS] / MB, unit="MB", limit=at_most(150, "MB"))


@wire_bar("W8", "start of the server")
def start(bench: Bench, both: Servers) -> Iterator[Figure]:
    ours = [
        serve(bench, bench.workspace.kept(f"start-{number}"), "os").start_seconds
        for number in range(STARTS)
    ]
    times = {OURS: median(ours), KAFKA: both[KAFKA].start_seconds}
    yield compared("from exec to ready", times, at_most(0.05), "ms", 1e-3)
    home = bench.workspace.kept("start-in-process")
    taken = median(isolated(start_in_process, str(home / str(i))) for i in range(STARTS))
    limit = at_most(100, "ms")
    yield Figure(name="KafkaServer.start in process", value=taken * 1e3, unit="ms", limit=limit)


def start_in_process(home: str) -> float:
    """Return the seconds of `KafkaServer.start` in a process that has imported logstore."""
    import logstore

    with logstore.open(home, durability="os") as store:
        began = time.perf_counter()
        server = logstore.KafkaServer(store, "127.0.0.1:0")
        server.start()
        taken = time.perf_counter() - began
        server.close()
    return taken


@wire_bar("W9", "idle connections and long polls")
def idle(bench: Bench, both: Servers) -> Iterator[Figure]:
    count = bench.sizes.wire_connections
    grown, held, busy = {}, {}, {}
    for name, server in both.items():
        before = server.resident_bytes()
        links = [server.connect() for _ in range(count)]
        for link in links:
            link.ask(18, 0, {})
        held[name] = float(server.resident_bytes())
        grown[name] = held[name] - before
        busy[name] = cpu_share(bench, server)
        for link in links:
            link.socket.close()
    name = f"resident memory with {count} idle connections"
    yield compared(name, held, at_most(1.0), "MB", MB)
    name = f"memory of {count} idle connections"
    yield Figure(name=name, value=grown[OURS] / MB, unit="MB", limit=at_most(40, "MB"))
    yield of_one_cpu(f"CPU with {count} idle connections", busy, 1.0)
    with topic_of_each(both, "polled") as topic:
        polls = count // 5
        for name, server in both.items():
            streams = [raw.Fetching(server, topic, 1) for _ in range(polls)]
            busy[name] = cpu_share(bench, server, streams)
    yield of_one_cpu(f"CPU with {polls} long polls of 500 ms", busy, 2.0)


def cpu_share(bench: Bench, server: Server, streams: list[raw.Fetching] | None = None) -> float:
    """Return the share of a CPU that a server uses while nothing is produced."""
    time.sleep(bench.sizes.wire_seconds / 5)
    before, began = server.cpu_seconds(), time.perf_counter()
    if streams is None:
        time.sleep(bench.sizes.wire_seconds)
    else:
        raw.drive(streams, seconds=bench.sizes.wire_seconds)
    return (server.cpu_seconds() - before) / (time.perf_counter() - began)


def of_one_cpu(name: str, shares: dict[str, float], bound: float) -> Figure:
    peers = {KAFKA: shares[KAFKA] * 100}
    limit = at_most(bound, "%")
    ratio = shares[OURS] / shares[KAFKA] if shares[KAFKA] else None
    return Figure(
        name=name, value=shares[OURS] * 100, unit="%", limit=limit, peers=peers, ratio=ratio
    )
