"""Servers: `logstore serve` and a real Kafka, each a process of its own on the same disk.

Both start when the first W bar runs and stop when the run ends.  Kafka does not sync a record
before it answers, so the store is opened with durability="os".  The broker has the flags of its own
start script: 1 GiB of heap and G1.  The bars about fsync start a second store with
durability="fsync"; its peer is a topic of the same broker with flush.messages=1.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, Limit

KAFKA = "Apache Kafka"
JVM = ("-Xmx1G", "-Xms1G", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")
FLUSHED = {"flush.messages": "1"}  # of a topic: Kafka syncs each batch before it answers
PATIENCE = 60.0
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.  `start_seconds` is from its exec to its first connection."""

    name: str
    address: str
    pid: int
    start_seconds: float
    rest_bytes: int  # resident, before the first request

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process so far."""
        return sum(map(int, _stat(self.pid)[11:13])) / _TICK

    def resident_bytes(self) -> int:
        """Return VmRSS."""
        return _resident(self.pid)

    @property
    def host_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    def connect(self) -> Any:
        """Return a `Peer`: a connection that sends frames."""
        return peer().Peer(self.host_port, timeout=PATIENCE)

    def answer_times(self, frame: bytes, count: int) -> list[float]:
        """Send a request again and again; return the seconds that each takes to be answered."""
        taken = []
        with self.connect() as link:
            for _ in range(count):
                began = time.perf_counter()
                link.socket.sendall(frame)
                link.frame()
                taken.append(time.perf_counter() - began)
        return taken

    def create_topics(
        self, names: list[str], partitions: int = 1, settings: Mapping[str, str] | None = None
    ) -> None:
        """Create topics, and return when every partition has a leader."""
        configs = [{"name": name, "value": value} for name, value in (settings or {}).items()]
        with self.connect() as link:
            for start in range(0, len(names), 250):
                rows = [
                    {
                        "name": name,
                        "num_partitions": partitions,
                        "replication_factor": 1,
                        "configs": configs,
                    }
                    for name in names[start : start + 250]
                ]
                answer = link.ask(19, 5, {"topics": rows, "timeout_ms": 60_000})
                bad = [row for row in answer["topics"] if row["error_code"]]
                assert not bad, f"{self.name}: {bad[:3]}"
            deadline = time.monotonic() + PATIENCE
            while not self._led(link, names, partitions):
                assert time.monotonic() < deadline, f"{self.name}: no leader of {names[:3]}"
                time.sleep(0.01)

    def _led(self, link: Any, names: list[str], partitions: int) -> bool:
        rows = [
            {"partition_index": number, "timestamp": -1, "current_leader_epoch": -1}
            for number in range(partitions)
        ]
        body = {"topics": [{"name": name, "partitions": rows} for name in names]}
        answer = link.ask(2, 6, {"replica_id": -1, "isolation_level": 0, **body})
        return not any(
            row["error_code"] for topic in answer["topics"] for row in topic["partitions"]
        )

    @contextlib.contextmanager
    def topic(
        self, name: str, partitions: int = 1, settings: Mapping[str, str] | None = None
    ) -> Iterator[str]:
        """A topic that is deleted when the block ends."""
        self.create_topics([name], partitions, settings)
        try:
            yield name
        finally:
            self.delete_topics([name])

    def delete_topics(self, names: list[str]) -> None:
        with self.connect() as link:
            for start in range(0, len(names), 100):  # each takes a few fsyncs
                rows = names[start : start + 100]
                link.ask(20, 5, {"topic_names": rows, "timeout_ms": 60_000})


Servers = dict[str, Server]


@contextlib.contextmanager
def topic_of_each(servers: Servers, name: str, partitions: int = 1) -> Iterator[str]:
    """A topic of every server that is deleted when the block ends."""
    with contextlib.ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(server.topic(name, partitions))
        yield name


def wire_bar(
    id: str, title: str
) -> Callable[[Callable[[Bench, Servers], Iterator[Figure]]], object]:
    """Register a bar that is left out where Kafka cannot be run."""

    def register(measure: Callable[[Bench, Servers], Iterator[Figure]]) -> object:
        @bar(id, title, needs_engine=True)
        def run(bench: Bench) -> Iterator[Figure]:
            reason = why_not()
            if reason is None:
                yield from measure(bench, servers(bench))
            else:
                bench.progress.note(f"{id} is left out: {reason}")

        return run

    return register


def compared(
    name: str, values: Mapping[str, float], limit: Limit, unit: str, scale: float = 1.0
) -> Figure:
    """Ours over Kafka's."""
    return Figure.compared(name, values, against=KAFKA, limit=limit, unit=unit, scale=scale)


def column(results: Mapping[str, tuple[float, ...]], number: int = 0) -> dict[str, float]:
    """Return one of the numbers that every turn returned, by name."""
    return {name: values[number] for name, values in results.items()}


def why_not() -> str | None:
    """Return why Kafka cannot be run here; None if it can."""
    try:
        importlib.import_module("confluent_kafka")
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


def peer() -> Any:
    """The client of the listener's tests: it sends and receives frames."""
    return importlib.import_module("tests.kafka.peer")


@functools.cache
def servers(bench: Bench) -> Servers:
    """Both servers, started once for a run and warmed: a JVM compiles what it runs often."""
    from benchmarks.wire import raw

    home = bench.workspace.kept("wire")
    both = {
        OURS: serve(bench, home / "ours", "os"),
        KAFKA: _broker(bench, home / "kafka"),
    }
    with topic_of_each(both, "warm") as topic:
        for server in both.values():
            bench.progress.step(f"warming {server.name}")
            for record_bytes in (100, 1024):
                records = raw.fill(server, topic, 3 * bench.sizes.wire_bytes, record_bytes)
                raw.drive([raw.Fetching(server, topic, records)])
    return both


@functools.cache
def durable(bench: Bench) -> Server:
    """A second `logstore serve`, with durability="fsync"."""
    return serve(bench, bench.workspace.kept("wire-fsync"), "fsync")


def serve(bench: Bench, home: Path, durability: str) -> Server:
    """Start `logstore serve`; it stops when the run ends."""
    bench.progress.step("starting logstore serve")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "logstore", "serve", "-s", str(home)]
    command += ["--listen", "127.0.0.1:0", "--durability", durability]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    bench.workspace.until_end.callback(process.wait)
    bench.workspace.until_end.callback(process.send_signal, signal.SIGTERM)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    taken = time.perf_counter() - began
    address = ready["listeners"]["PLAINTEXT"]
    return Server(OURS, address, process.pid, taken, _resident(process.pid))


def _broker(bench: Bench, home: Path) -> Server:
    """Start Kafka.  The time to format its directory does not count."""
    bench.progress.step(f"starting {KAFKA}")
    settings = {
        "auto.create.topics.enable": "true",
        "log.segment.delete.delay.ms": "1000",
        "max.incremental.fetch.session.cache.slots": "1000",
    }
    running = interop().Broker(home, settings, timeout=120.0, jvm=JVM)
    bench.workspace.until_end.enter_context(running)
    ready = time.clock_gettime(time.CLOCK_BOOTTIME)
    taken = ready - int(_stat(running.pid)[19]) / _TICK
    return Server(KAFKA, running.bootstrap, running.pid, taken, _resident(running.pid))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"process {pid} has no VmRSS")
