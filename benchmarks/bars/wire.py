"""W1: the Kafka listener beside a real broker, with the same client and the same settings.

Both are processes of their own on the same disk.  Kafka does not sync a record before it answers,
so the store is opened with durability="os".  The broker has the flags of its own start script, with
1 GiB of heap and G1.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least, at_most

KAFKA = "Apache Kafka"
JVM = ("-Xmx1G", "-Xms1G", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")
SIZES = (100, 1024)
SINGLE = 2000  # records that are sent one at a time


@bar("W1", "the Kafka listener beside a broker", needs_engine=True)
def listener(bench: Bench) -> Iterator[Figure]:
    reason = why_not()
    if reason is not None:
        bench.progress.note(f"W1 is left out: {reason}")
        return
    with bench.workspace.scratch("wire") as home, contextlib.ExitStack() as stack:
        started: dict[str, float] = {}
        servers: dict[str, tuple[str, int]] = {}
        for name, start in ((OURS, serve), (KAFKA, broker)):
            bench.progress.step(f"starting {name}")
            begun = perf_counter()
            servers[name] = start(home / name.replace(" ", "-"), stack)
            started[name] = perf_counter() - begun
        yield shown("from start to ready", started, "ms", 1e3, at_most(0.05))
        memory = {name: resident(pid) for name, (_, pid) in servers.items()}
        yield shown("resident memory at rest", memory, "MB", 1e-6, at_most(0.2))
        for size in SIZES:
            yield from throughput(bench, servers, size)
        yield from latency(bench, servers)
        memory = {name: resident(pid) for name, (_, pid) in servers.items()}
        yield shown("resident memory at the end", memory, "MB", 1e-6, at_most(0.25))


def why_not() -> str | None:
    try:
        import confluent_kafka  # noqa: F401

        kafka = interop()
    except ImportError as error:
        return str(error)
    try:
        kafka.jar_directory()
    except kafka.KafkaUnavailableError as error:
        return str(error)
    return None


def interop() -> Any:
    """The module that gets and starts a real Kafka for the tests; it has no stubs."""
    return importlib.import_module("tests.interop.kafka")


def shown(name: str, values: dict[str, float], unit: str, scale: float, limit: Any) -> Figure:
    ratio = values[OURS] / values[KAFKA]
    peers = {KAFKA: values[KAFKA] * scale}
    return Figure(
        name=name, value=values[OURS] * scale, unit=unit, limit=limit, peers=peers, ratio=ratio
    )


def serve(home: Path, stack: contextlib.ExitStack) -> tuple[str, int]:
    """Start `logstore serve`; return its address and process id."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "logstore", "serve", "-s", str(home)]
    command += ["--listen", "127.0.0.1:0", "--durability", "os"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    stack.callback(process.wait)
    stack.callback(process.send_signal, signal.SIGTERM)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    address: str = ready["listeners"]["PLAINTEXT"]
    return address, process.pid


def broker(home: Path, stack: contextlib.ExitStack) -> tuple[str, int]:
    """Start Kafka, formatted before; return its address and process id."""
    running = interop().Broker(home, {"auto.create.topics.enable": "true"}, timeout=120.0, jvm=JVM)
    stack.enter_context(running)
    return running.bootstrap, running.pid


def resident(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1]) * 1024
    raise LookupError(f"process {pid} has no VmRSS")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def throughput(bench: Bench, servers: dict[str, tuple[str, int]], size: int) -> Iterator[Figure]:
    records = bench.sizes.wire_bytes // size
    turn = dict.fromkeys(servers, 0)
    used: dict[str, list[float]] = {name: [] for name in servers}

    def producing(name: str) -> Callable[[], float]:
        def run() -> float:
            address, pid = servers[name]
            turn[name] += 1
            before = cpu_seconds(pid)
            rate = produce(address, f"bench-{size}-{turn[name]}", records, size)
            used[name].append(cpu_seconds(pid) - before)
            return rate

        return run

    rates = bench.race({name: producing(name) for name in servers}, writes=True)
    yield compared(f"produce, {size} B", rates, 1.5)
    spent = {name: min(times) / bench.sizes.wire_bytes * 1e9 for name, times in used.items()}
    yield shown(f"server CPU for a GB produced, {size} B", spent, "s", 1.0, at_most(0.5))

    def consuming(name: str) -> Callable[[], float]:
        return lambda: consume(servers[name][0], f"bench-{size}-1", records)

    rates = bench.race({name: consuming(name) for name in servers})
    yield compared(f"consume, {size} B", rates, 1.5)


def compared(name: str, rates: dict[str, float], bound: float) -> Figure:
    return Figure.compared(
        name, rates, against=KAFKA, limit=at_least(bound), unit="M records/s", scale=1e6
    )


def produce(address: str, topic: str, records: int, size: int) -> float:
    """Records a second, until the last one is acknowledged."""
    from confluent_kafka import Producer

    value = os.urandom(size)
    producer = Producer(
        {
            "bootstrap.servers": address,
            "acks": "all",
            "linger.ms": 5,
            "queue.buffering.max.messages": 1_000_000,
            "queue.buffering.max.kbytes": 1 << 20,
            "log_level": 0,
        }
    )
    producer.list_topics(topic, timeout=30)
    began = perf_counter()
    for _ in range(records):
        while True:
            try:
                producer.produce(topic, value, partition=0)
                break
            except BufferError:
                producer.poll(0.01)
    left = producer.flush(300)
    assert left == 0, f"{left} records were not acknowledged"
    return records / (perf_counter() - began)


def consume(address: str, topic: str, records: int) -> float:
    """Records a second, from the first one on."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "bench",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
            "queued.min.messages": 1_000_000,
            "queued.max.messages.kbytes": 1 << 20,
            "fetch.message.max.bytes": 8 << 20,
            "log_level": 0,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        began = perf_counter()
        got = 0
        while got < records:
            # Returns what there is after this time, if there are fewer.
            got += len(consumer.consume(10_000, timeout=0.2))
            assert perf_counter() - began < 300, f"{got} of {records} records came"
        return records / (perf_counter() - began)
    finally:
        consumer.close()


def latency(bench: Bench, servers: dict[str, tuple[str, int]]) -> Iterator[Figure]:
    taken: dict[str, list[float]] = {name: [] for name in servers}

    def sending(name: str) -> Callable[[], float]:
        def run() -> float:
            times = sorted(single_sends(servers[name][0]))
            taken[name] += times
            return len(times) / sum(times)

        return run

    bench.race({name: sending(name) for name in servers}, writes=True)
    for share, bound in ((0.5, 0.7), (0.99, 1.0)):
        values = {name: sorted(times)[int(len(times) * share)] for name, times in taken.items()}
        name = f"one record at a time, p{share * 100:g}"
        yield shown(name, values, "us", 1e6, at_most(bound))


def single_sends(address: str) -> Iterator[float]:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": address, "linger.ms": 0, "log_level": 0})
    value = os.urandom(100)
    for number in range(SINGLE + 100):
        began = perf_counter()
        producer.produce("single", value, partition=0)
        producer.flush(60)
        if number >= 100:
            yield perf_counter() - began
