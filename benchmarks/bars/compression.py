"""P13: compressed batches, against the codec alone on the same bytes in the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

from benchmarks import engine
from benchmarks.bench import Bench, bar
from benchmarks.figure import OURS, Figure, at_least
from benchmarks.peers.codec import CODECS, Codec
from benchmarks.values import documents

STAND_IN_BATCH_RECORDS = 64
LARGEST_BATCH_BYTES = 16 << 20


@bar("P13", "lz4 and zstd batches")
def compressed_batches(bench: Bench) -> Iterator[Figure]:
    values = documents(bench.sizes.document_bytes)
    for codec in CODECS:
        yield from compared(bench, codec, values)


def compared(bench: Bench, codec: Codec, values: list[bytes]) -> Iterator[Figure]:
    with ExitStack() as stack:
        home = stack.enter_context(bench.workspace.scratch("kept"))
        path = home / "bench-0"
        if bench.has_engine:
            write_rate(path, codec, values)
            compressed = [batch.records for batch in engine.batches(path)]
            plain = [codec.decompress(data, LARGEST_BATCH_BYTES) for data in compressed]
        else:
            step = STAND_IN_BATCH_RECORDS
            plain = [b"".join(values[at : at + step]) for at in range(0, len(values), step)]
            compressed = [codec.compress(data) for data in plain]
        sizes = [len(data) for data in plain]
        plain_bytes = sum(sizes)
        log = stack.enter_context(engine.open_log(path)) if bench.has_engine else None

        def write() -> float:
            with bench.workspace.scratch("log") as scratch:
                return plain_bytes * write_rate(scratch / "bench-0", codec, values)

        def read() -> float:
            assert log is not None
            rows = 0
            started = perf_counter()
            for columns in log.scan().columns():
                rows += len(columns)
            elapsed = perf_counter() - started
            assert rows == len(values)
            return plain_bytes / elapsed

        alone = f"{codec.name} alone"
        works = {
            "write": ({OURS: write, alone: lambda: codec.compress_all(plain)}, True),
            "read": ({OURS: read, alone: lambda: codec.decompress_all(compressed, sizes)}, False),
        }
        for work, (entrants, writes) in works.items():
            yield Figure.compared(
                f"{codec.name}, {work}, {plain_bytes / len(plain) / 1024:.0f} KiB batches",
                bench.race(entrants, writes=writes),
                against=alone,
                limit=at_least(0.7),
                unit="MB/s",
                scale=1e6,
            )


def write_rate(path: Path, codec: Codec, values: list[bytes]) -> float:
    """Times a second that all `values` can be written."""
    with engine.open_log(path) as log:
        started = perf_counter()
        with log.writer(compression=codec.name) as out:
            append = out.append
            for value in values:
                append(value)
        return 1 / (perf_counter() - started)
