"""`logstore bench`: measure a log on this disk.  Every row names its durability level."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from logstore.cli.output import Column, plain
from logstore.cli.session import Integer, Session, pass_session, verb

if TYPE_CHECKING:
    from logstore import Partition

__all__ = ["bench_verb"]

RECORDS = 1_000_000
APPENDS = 2_000


@verb("bench")
@click.option("-n", "--records", type=Integer(1), default=RECORDS, show_default=True)
@click.option(
    "--size",
    "value_bytes",
    type=Integer(0, 1 << 20),
    default=100,
    show_default=True,
    help="Size of a value in bytes.",
)
@click.option(
    "-z",
    "--compression",
    type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    default="none",
    show_default=True,
)
@pass_session  # fmt: skip
def bench_verb(session: Session, records: int, value_bytes: int, compression: str) -> None:
    """Measure appends and reads of a temporary log next to the store.  The log is removed."""
    # Not inside the store: a broker fails on a directory that it does not know.
    place = Path(session.path).absolute().parent
    while not place.is_dir():
        place = place.parent
    folder = Path(tempfile.mkdtemp(prefix="logstore-bench-", dir=place))
    try:
        rows = list(_measure(folder, records, value_bytes, compression))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    columns = (
        plain("work"),
        plain("durability"),
        Column("records_per_second", "records/s", _rounded, right=True),
        Column("mb_per_second", "MB/s", lambda v: "-" if v is None else f"{v:,.1f}", right=True),
        Column("p50_us", "p50 us", _rounded, right=True),
        Column("p99_us", "p99 us", _rounded, right=True),
    )
    session.output.rows(rows, columns)


def _rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _row(
    work: str, durability: str, records: int, value_bytes: int, spans: list[float] | float
) -> dict[str, Any]:
    total = spans if isinstance(spans, float) else sum(spans)
    rate = records / max(total, 1e-9)
    row: dict[str, Any] = {
        "work": work,
        "durability": durability,
        "records": records,
        "value_bytes": value_bytes,
        "seconds": round(total, 6),
        "records_per_second": round(rate, 1),
        "mb_per_second": round(rate * value_bytes / 1e6, 3),
        "p50_us": None,
        "p99_us": None,
    }
    if not isinstance(spans, float):
        ordered = sorted(spans)
        row["p50_us"] = round(ordered[len(ordered) // 2] * 1e6, 1)
        row["p99_us"] = round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e6, 1)
    return row


def _measure(
    folder: Path, records: int, value_bytes: int, compression: str
) -> Iterator[dict[str, Any]]:
    from logstore import Partition

    value = (b"0123456789abcdef" * (value_bytes // 16 + 1))[:value_bytes]
    with Partition.open(folder / "bench-0") as log:
        for durability in ("fsync", "os"):
            count = min(records, APPENDS if durability == "fsync" else APPENDS * 10)
            yield _row(
                "append, one a call", durability, count, value_bytes,
                _appends(log, value, count, durability),
            )  # fmt: skip
        began = time.perf_counter()
        with log.writer(compression=compression, linger=None) as out:
            append = out.append
            for _ in range(records):
                append(value)
        yield _row(
            f"writer ({compression})", "fsync", records, value_bytes, time.perf_counter() - began
        )
        began = time.perf_counter()
        count = sum(1 for _ in log)
        yield _row("read records", "-", count, value_bytes, time.perf_counter() - began)
        began = time.perf_counter()
        count = sum(len(chunk) for chunk in log.scan().columns(fields=["value"]))
        yield _row("read columns", "-", count, value_bytes, time.perf_counter() - began)


def _appends(log: Partition, value: bytes, count: int, durability: str) -> list[float]:
    spans = []
    for _ in range(count):
        began = time.perf_counter()
        log.append(value, durability=durability)
        spans.append(time.perf_counter() - began)
    return spans
