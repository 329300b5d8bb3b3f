"""W16: Kafka's own perf tools, which are the Java clients."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator

from benchmarks.bench import Bench
from benchmarks.figure import Figure, at_least
from benchmarks.wire.servers import (
    Server,
    Servers,
    column,
    compared,
    interop,
    topic_of_each,
    wire_bar,
)

PRODUCER = "org.apache.kafka.tools.ProducerPerformance"
CONSUMER = "org.apache.kafka.tools.ConsumerPerformance"
AHEAD = 1.5


def tool(main: str, *arguments: str) -> str:
    jars = interop().jar_directory()
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=off"
    command = ["java", "-Xmx512m", quiet, "-cp", f"{jars}/*", main, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def produce(server: Server, topic: str, records: int, record_bytes: int) -> float:
    """Return MB (10^6) of records a second."""
    printed = tool(
        PRODUCER,
        *("--topic", topic, "--num-records", str(records), "--record-size", str(record_bytes)),
        *("--throughput", "-1", "--bootstrap-server", server.address),
        *("--command-property", "acks=all"),
    )
    found = re.findall(r"^(\d+) records sent, ([\d.,]+) records/sec", printed, re.MULTILINE)
    assert [int(sent) for sent, _ in found[-1:]] == [records], printed
    return float(found[-1][1].replace(",", ".")) * record_bytes / 1e6


def consume(server: Server, topic: str, records: int, record_bytes: int) -> float:
    """Return MB (10^6) of records a second, without the time to join the group."""
    printed = tool(
        CONSUMER,
        *("--topic", topic, "--num-records", str(records), "--bootstrap-server", server.address),
        *("--timeout", "60000"),
    )
    heading, *rows = [line.split(", ") for line in printed.splitlines() if ", " in line]
    row = dict(zip(heading, rows[-1], strict=True))
    assert int(row["data.consumed.in.nMsg"]) >= records, printed
    return float(row["fetch.nMsg.sec"]) * record_bytes / 1e6


@wire_bar("W16", "Kafka's perf tools, with the Java clients")
def java(bench: Bench, both: Servers) -> Iterator[Figure]:
    for record_bytes, text in ((100, "100 B"), (1024, "1 KB")):
        records = 4 * bench.sizes.wire_bytes // record_bytes

        def producing(
            server: Server, records: int = records, size: int = record_bytes
        ) -> Callable[[], tuple[float, ...]]:
            return lambda: (produce(server, topic, records, size),)

        def consuming(
            server: Server, records: int = records, size: int = record_bytes
        ) -> Callable[[], tuple[float, ...]]:
            return lambda: (consume(server, topic, records, size),)

        with topic_of_each(both, f"java-{record_bytes}") as topic:
            entrants = {name: producing(server) for name, server in both.items()}
            rates = column(bench.medians(entrants, writes=True, rounds=3))
            yield compared(f"produce {text}, Java perf tool", rates, at_least(AHEAD), "MB/s")
            entrants = {name: consuming(server) for name, server in both.items()}
            rates = column(bench.medians(entrants, rounds=3))
            yield compared(f"consume {text}, Java perf tool", rates, at_least(AHEAD), "MB/s")
