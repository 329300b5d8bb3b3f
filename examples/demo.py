"""The engine at work: append, scan, columns, topics, a crash, three nodes, a DataFrame.

    make demo          (or: python examples/demo.py [records])

Everything happens in a temporary directory, which is gone afterwards.
"""

from __future__ import annotations

import logging
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import logstore
from logstore import Cluster, Partition

try:  # now, so that no figure below contains the time of an import
    import pyarrow
except ImportError:
    pyarrow = None

VALUE = b'{"order": 4711, "customer": "alice", "amount": "12.00", "currency": "EUR"}'.ljust(100)

# Run by a child process: appends, and says what append() has acknowledged, until it is killed.
CRASHING_WRITER = """
import sys
from logstore import Partition
with Partition.open(sys.argv[1]) as log:
    while True:
        print(log.append(b"x" * 100), flush=True)
"""


def say(what: str, figure: str = "") -> None:
    print(f"  {what:<58}{figure:>20}".rstrip(), flush=True)


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Yields a list that holds the seconds of the block, once it is over."""
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - start)


def millions(count: int, seconds: float) -> str:
    return f"{count / seconds / 1e6:.2f} M records/s"


def microseconds(count: int, seconds: float) -> str:
    return f"{seconds / count * 1e6:.0f} us each"


def append(path: Path, count: int) -> None:
    print("Append")
    with Partition.open(path) as log:
        with stopwatch() as t:
            for _ in range(200):
                log.append(VALUE, key=b"alice")
        say("200 x append(), on disk before each returns", microseconds(200, t[0]))
        with stopwatch() as t:
            log.extend([VALUE] * 10_000)
        say("extend() with 10,000 records, one fsync", millions(10_000, t[0]))
        with stopwatch() as t, log.writer() as out:
            for _ in range(count):
                out.append(VALUE)
        say(f"writer: {count:,} records, one call each", millions(count, t[0]))
        size = sum(file.stat().st_size for file in path.iterdir())
        say(f"offsets [{log.start_offset}, {log.end_offset}), durable up to {log.durable_offset}")
        say(f"{len(log.segments)} segment(s) in Kafka's own format", f"{size / 1e6:,.0f} MB")


def read(path: Path) -> None:
    print("Read")
    with Partition.open(path, readonly=True) as log:
        count = log.end_offset
        with stopwatch() as t:
            total = sum(1 for _ in log.scan())
        assert total == count
        say(f"scan: {count:,} Record objects, checksums verified", millions(count, t[0]))
        with stopwatch() as t:
            value_bytes = sum(int(columns.values.lengths.sum()) for columns in log.scan().columns())
        say(f"columns: numpy arrays, {value_bytes / 1e6:,.0f} MB of values", millions(count, t[0]))
        if pyarrow is None:
            say("to_arrow() needs pyarrow: pip install 'logstore-engine[arrow]'")
        else:
            with stopwatch() as t:
                table = log.scan().to_arrow()
            say(f"to_arrow(): a table of {table.num_rows:,} rows", millions(count, t[0]))
        offsets = [random.randrange(count) for _ in range(5_000)]
        with stopwatch() as t:
            for offset in offsets:
                assert log[offset].offset == offset
        say("log[offset], 5,000 at random", microseconds(len(offsets), t[0]))
        newest = log[-1]
        say(f"log[-1] is offset {newest.offset}; log.tail(3): {[r.offset for r in log.tail(3)]}")
        first = log.offset_for_time(newest.timestamp)
        say(f"offset_for_time(...) of its millisecond is {first}")


def topics(path: Path) -> None:
    print("Topics")
    with logstore.open(path) as store:
        with stopwatch() as t:
            orders = store.create_topic("orders", partitions=4, config={"retention.ms": -1})
        say("create_topic(): 4 partitions, all or nothing", f"{t[0] * 1e3:.0f} ms")
        position = orders.append(VALUE, key=b"alice")
        say(f"append(key=b'alice') went to {position.topic}-{position.partition}, as in Kafka")
        with stopwatch() as t:
            for i in range(20_000):
                orders.append(VALUE, key=b"customer %d" % i, durability="os")
        say("20,000 x append() by key, durability='os'", millions(20_000, t[0]))
        ends = [partition.end_offset for partition in orders]
        say(f"records in each partition: {ends}")
    with stopwatch() as t, logstore.open(path) as store:
        assert [partition.end_offset for partition in store["orders"]] == ends
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("logstore"))
    say("opened, looked at and closed again", f"{t[0] * 1e3:.0f} ms")
    say(f"a broker's log directory: {', '.join(names[:4])}, ...")


def acknowledged_before_kill(path: Path, seconds: float) -> int:
    """Lets a child append for a while, kills it, returns the last offset that it was given."""
    command = [sys.executable, "-c", CRASHING_WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(seconds)
        child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().split("\n")
    return int(lines[-2])  # what follows the last newline may be cut


def leave_half_a_batch(path: Path, end_offset: int) -> None:
    """What a write cut short leaves behind: the start of a batch, and nothing after it."""
    newest = max(path.glob("*.log"))
    batch = newest.read_bytes()[:100]
    with newest.open("ab") as file:
        file.write(struct.pack(">q", end_offset) + batch[8:])


def crash(path: Path) -> None:
    print("Crash")
    last = acknowledged_before_kill(path, seconds=0.5)
    say(f"a child appended up to offset {last:,}, then kill -9")
    with stopwatch() as t, Partition.open(path) as log:
        end = log.end_offset
        assert end > last
        log.check()
    say(f"reopened and checked: [0, {end:,}), nothing lost", f"{t[0] * 1e3:.0f} ms")

    acknowledged_before_kill(path, seconds=0.1)
    with Partition.open(path, readonly=True) as log:
        end = log.end_offset
    leave_half_a_batch(path, end)
    with stopwatch() as t, Partition.open(path) as log:
        assert log.append(b"and on we go") == end
        log.check()
        (torn,) = log.recovery.torn
    say(f"killed in mid-write: [0, {end:,}) kept", f"{t[0] * 1e3:.0f} ms")
    say(f"cut off and set aside: {torn.size_bytes} bytes, {torn.reason}")


def fail_over(path: Path) -> None:
    print("Three nodes")
    with Cluster(path, nodes=3) as cluster:
        settings = {"min.insync.replicas": 2}
        orders = cluster.create_topic("orders", replication_factor=3, config=settings)
        with stopwatch() as t:
            for _ in range(200):
                orders.append(VALUE)
        say("200 x append(acks='all'), on the disks of three nodes", microseconds(200, t[0]))
        leader = orders[0].leader
        cluster.kill(leader)
        with stopwatch() as t:
            orders.append(b"after the fail-over")
        say(f"node {leader} killed; node {orders[0].leader} leads, next append",
            f"{t[0] * 1e3:.0f} ms")  # fmt: skip
        kept = sum(1 for _ in orders[0].scan())
        assert kept == 201
        cluster.start(leader)
        while leader not in orders[0].isr:
            time.sleep(0.001)
        say(f"{kept} records, none of them lost; node {leader} is in sync again")


def frame(path: Path) -> None:
    """Ends with a word instead where Spark cannot run."""
    print("Spark")
    try:
        from pyspark_logstore import local_session, register

        spark = local_session(spark__log__level="OFF", spark__ui__showConsoleProgress="false")
    except (ImportError, RuntimeError) as error:
        say(f"skipped: {error}")
        return
    register(spark)
    orders = spark.read.format("logstore").option("subscribe", "orders").load(str(path))
    orders.count()  # the first query starts the workers
    with stopwatch() as t:
        count = orders.count()
    say(f"format('logstore'): {count:,} rows counted", f"{t[0] * 1e3:.0f} ms")
    by_partition = orders.groupBy("partition").count().orderBy("partition")
    say(f"a DataFrame by partition: {[tuple(row) for row in by_partition.collect()]}")
    spark.stop()


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    logging.getLogger("logstore").setLevel(logging.ERROR)  # the repair is told below
    with tempfile.TemporaryDirectory(prefix="logstore-demo-") as directory:
        path = Path(directory)
        append(path / "orders-0", count)
        read(path / "orders-0")
        topics(path / "store")
        crash(path / "payments-0")
        fail_over(path / "cluster")
        frame(path / "store")


if __name__ == "__main__":
    main()
