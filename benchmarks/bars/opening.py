"""P8: opening a cleanly closed partition of many segments, and a store of many partitions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks import engine, process
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_most
from benchmarks.peers import syscalls
from benchmarks.sizes import MIB
from benchmarks.values import random_values

PARTITIONS = 4  # of a topic
SMALL_RECORDS, LARGE_RECORDS = 10, 2_500  # a segment: some 1 KiB, some 256 KiB

# Read besides the side files: /proc itself.  Less than one batch header of every segment.
READ_ALLOWANCE_BYTES = 4 << 10

# Memory is given out in arenas: what two equal opens may differ by.
MEMORY_NOISE_MIB = 1


@bar("P8", "clean open of many segments, of many partitions", needs_engine=True)
def clean_open(bench: Bench) -> Iterator[Figure]:
    with bench.workspace.scratch("small") as small, bench.workspace.scratch("large") as large:
        for home, records in ((small, SMALL_RECORDS), (large, LARGE_RECORDS)):
            bench.progress.step("writing segments")
            write_segments(home / "bench-0", bench.sizes.segments, records)
        path = large / "bench-0"
        bench.workspace.settle()
        # The race wants rates: opens a second.
        rates = bench.race(
            {
                OURS: lambda: open_rate(path),
                "scandir+stat": lambda: syscalls.list_and_stat(path),
            },
            rounds=2 * bench.sizes.rounds,
        )
        seconds = {name: 1e3 / rate for name, rate in rates.items()}
        yield Figure.compared(
            f"open, {bench.sizes.segments:,} segments",
            seconds,
            against="scandir+stat",
            limit=at_most(3.0),
            unit="ms",
        )
        small_grown, _ = process.isolated(open_cost, small / "bench-0")
        large_grown, read = process.isolated(open_cost, path)
        allowed = engine.side_bytes(path) + READ_ALLOWANCE_BYTES
        yield Figure(
            name="bytes read by open",
            value=read / MIB,
            unit="MiB",
            peers={
                "side files": engine.side_bytes(path) / MIB,
                "log": engine.log_bytes(path) / MIB,
            },
            limit=at_most(round(allowed / MIB, 3), "MiB"),
        )
        yield Figure(
            name="memory of open, 256 KiB segments over 1 KiB",
            value=(large_grown - small_grown) / MIB,
            unit="MiB",
            peers={"256 KiB": large_grown / MIB, "1 KiB": small_grown / MIB},
            limit=at_most(MEMORY_NOISE_MIB, "MiB"),
        )
    yield from open_stores(bench)


def open_stores(bench: Bench) -> Iterator[Figure]:
    """The root alone, and with the end of every partition asked for."""
    topics = bench.sizes.topics
    with bench.workspace.scratch("store") as home:
        bench.progress.step("creating topics")
        write_topics(home / "store", topics)
        bench.workspace.settle()
        # The bar is that of opening; asking every partition for its end opens each of them as well,
        # which is shown with a bound of its own.
        for what, touch, bound in (("open", False, 3.0), ("open, every end_offset", True, 10.0)):
            rates = bench.race(
                {
                    OURS: partial(store_open_rate, home / "store", touch),
                    "scandir+stat": lambda: syscalls.list_and_stat_below(home / "store"),
                },
                rounds=2 * bench.sizes.rounds,
            )
            yield Figure.compared(
                f"{what}, {topics} topics of {PARTITIONS}",
                {name: 1e3 / rate for name, rate in rates.items()},
                against="scandir+stat",
                limit=at_most(bound),
                unit="ms",
            )


def write_topics(path: Path, topics: int) -> None:
    values = random_values(SMALL_RECORDS)
    with engine.open_store(path) as store:
        for number in range(topics):
            topic = store.create_topic(f"topic-{number}", PARTITIONS)
            for partition in range(PARTITIONS):
                topic.extend(values, partition=partition)


def store_open_rate(path: Path, touch: bool) -> float:
    started = perf_counter()
    store = engine.open_store(path)
    if touch:
        ends = sum(partition.end_offset for topic in store.values() for partition in topic)
        assert ends == len(store) * PARTITIONS * SMALL_RECORDS
    elapsed = perf_counter() - started
    store.close()
    return 1 / elapsed


def write_segments(path: Path, segments: int, records: int) -> None:
    values = random_values(records)
    with engine.open_log(path) as log:
        for _ in range(segments - 1):
            log.extend(values)
            log.roll()
        log.extend(values)
    assert len(engine.log_files(path)) == segments


def open_rate(path: Path) -> float:
    started = perf_counter()
    log = engine.open_log(path)
    elapsed = perf_counter() - started
    log.close()
    return 1 / elapsed


def open_cost(path: Path) -> tuple[int, int]:
    """Resident bytes and read bytes that one open adds to this process."""
    with engine.open_log(path.parent / "warm-0") as warm:  # imports are not the open's
        warm.append(b"warm")
    memory, read = process.resident_bytes(), process.bytes_read()
    with engine.open_log(path):
        read = process.bytes_read() - read
        return process.resident_bytes() - memory, read
