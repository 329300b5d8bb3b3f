"""B4, B8, B9: a follower that was down, a controller that dies, and partitions without work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter, sleep
from typing import Any

from benchmarks import engine
from benchmarks.bars.cluster_wire import cluster, create, leader, why_not
from benchmarks.bars.follow import CP, cp_and_sync
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least, at_most
from benchmarks.sizes import MIB
from benchmarks.wire import librdkafka
from benchmarks.wire.servers import Server

WAIT_SECONDS = 300.0


def node_of(nodes: Any, number: int) -> Server:
    return Server(f"node {number}", nodes.address(number), nodes.nodes[number].pid, 0.0, 0)


@bar("B4", "catch-up of a follower that was down, durability fsync", needs_engine=True)
def catch_up(bench: Bench) -> Iterator[Figure]:
    if bench.left_out("B4", why_not()):
        return
    size = bench.sizes.unclean_bytes
    singles = bench.sizes.wire_singles * 50
    with cluster(bench, "fsync") as nodes:
        # Name, bytes of a record, records, settings of librdkafka, bound.
        for name, record, count, batch_bytes, bound in (
            ("64 KiB", 8000, size // 8000, 64 << 10, 0.35),
            ("16 KiB", 2000, size // 4 // 2000, 16 << 10, 0.25),
        ):
            settings = {"batch.size": batch_bytes, "linger.ms": 50}
            topic = f"batches-{batch_bytes}"
            seconds, copied = _down_and_up(nodes, topic, count, record, settings)
            with bench.workspace.scratch("cp") as home:
                source = nodes.store(leader(nodes, topic)) / f"{topic}-0"
                taken = cp_and_sync(source, home / "copy")
            yield Figure.compared(
                f"a follower copies {copied / MIB:,.0f} MiB in batches of {name}",
                {OURS: copied / seconds, CP: copied / taken},
                against=CP, limit=at_least(bound), unit="MB/s", scale=1e6,
            )  # fmt: skip
        settings = {"batch.num.messages": 1, "linger.ms": 0}
        seconds, _ = _down_and_up(nodes, "singles", singles, 100, settings)
        rate = singles / seconds / 1000
        unit = "k batches/s"
        name = f"a follower copies {singles:,} batches of one record of 100 B"
        yield Figure(name=name, value=rate, unit=unit, limit=at_least(60, unit))


def _down_and_up(
    nodes: Any, topic: str, count: int, record: int, settings: dict[str, Any]
) -> tuple[float, int]:
    """Produce while a follower is down; return the seconds of its copy, and its bytes.

    The clock starts with the first bytes that it writes, and ends when its log is as long as the
    leader's: the start of the process is not part of it.
    """
    create(nodes, topic, 3)
    _until(lambda: leader(nodes, topic) > 0, f"{topic} has a leader")
    first = leader(nodes, topic)
    down = next(number for number in nodes.numbers if number != first)
    nodes.kill(down)
    librdkafka.produce(node_of(nodes, first), topic, count, record, settings=settings)
    size = engine.log_bytes(nodes.store(first) / f"{topic}-0")
    copy = nodes.store(down) / f"{topic}-0"
    before = engine.log_bytes(copy)
    nodes.nodes[down].begin()
    _until(lambda: engine.log_bytes(copy) > before, f"{topic} is copied", 0.002)
    began = perf_counter()
    _until(lambda: engine.log_bytes(copy) >= size, f"{topic} is level", 0.002)
    taken = perf_counter() - began
    nodes.nodes[down].await_ready()
    return taken, size - before


def _until(holds: Callable[[], bool], what: str, pause: float = 0.01) -> None:
    until = perf_counter() + WAIT_SECONDS
    while not holds():
        assert perf_counter() < until, f"not within {WAIT_SECONDS:g} s: {what}"
        sleep(pause)


@bar("B8", "a controller with many partitions dies, and their cost at rest", needs_engine=True)
def many_partitions(bench: Bench) -> Iterator[Figure]:
    if bench.left_out("B8", why_not()):
        return
    count = bench.sizes.wire_topics
    with cluster(bench, "os") as nodes:
        bench.progress.step(f"{count:,} partitions of three replicas")
        create(nodes, "many", 3, count)
        _until(lambda: _leaders(nodes, 1, count).isdisjoint({-1}), "every partition has a leader")
        sleep(bench.sizes.wire_seconds)
        shares = [_share(node_of(nodes, n), bench.sizes.wire_seconds) for n in nodes.numbers]
        name = f"CPU of a node with {count:,} idle replicated partitions, the most"
        yield Figure(name=name, value=max(shares) * 100, unit="%", limit=at_most(5.0, "%"))
        bench.progress.step(f"{count:,} partitions more")
        create(nodes, "more", 3, count)
        _until(lambda: _leaders(nodes, 1, 2 * count).isdisjoint({-1}), "all have a leader")
        dead = nodes.tree.controller()
        alive = next(number for number in nodes.numbers if number != dead)
        nodes.kill(dead)
        # What follows the end of its session is the work of the next controller.
        _until(lambda: nodes.tree.controller() not in (None, dead), "another controller", 0.002)
        began = perf_counter()
        gone = {-1, dead}
        _until(lambda: _leaders(nodes, alive, 2 * count).isdisjoint(gone), "all have a live leader")
        name = f"all decisions about {2 * count:,} partitions after the controller died"
        taken = perf_counter() - began
        yield Figure(name=name, value=taken, unit="s", limit=at_most(3.0, "s"))


def _share(node: Server, seconds: float) -> float:
    before, began = node.cpu_seconds(), perf_counter()
    sleep(seconds)
    return (node.cpu_seconds() - before) / (perf_counter() - began)


def _leaders(nodes: Any, number: int, count: int) -> set[int]:
    """Return the leaders that a node has seen; -1 among them if it has not seen all partitions."""
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": nodes.address(number), "log_level": 0})
    topics = admin.list_topics(timeout=30).topics
    rows = [row for name in ("many", "more") if name in topics
            for row in topics[name].partitions.values()]  # fmt: skip
    return {row.leader for row in rows} | ({-1} if len(rows) < count else set())
