"""Directories that a real broker wrote, as DataFrames: row for row what a consumer saw."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

from pyspark.sql import SparkSession

from tests.interop.rows import Expected, load_expected
from tests.spark.conftest import rows_of

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
LOG_DIRECTORY = GOLDEN.parent / "golden-log-directory"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
EPOCH = datetime.datetime(1970, 1, 1)


def at(ms: int) -> datetime.datetime:
    """A time as Spark hands it to Python, in a session whose zone is UTC."""
    return EPOCH + datetime.timedelta(milliseconds=ms)


def expected_rows(expected: Expected, *, kind: int, hidden: frozenset[int] = frozenset()) -> object:
    return [
        (
            *(row.key, row.value, expected.topic, 0, row.offset, at(row.timestamp), kind),
            [tuple(header) for header in row.headers] or None,
        )
        for row in expected.rows
        if row.offset not in hidden
    ]


def plain(rows: list[tuple[object, ...]]) -> object:
    """Header structs as tuples."""
    return [
        (
            *row[:-1],
            row[-1]
            and [(name, None if value is None else bytes(value)) for name, value in row[-1]],
        )
        for row in rows
    ]


@pytest.mark.parametrize("case", CASES)
def test_a_partition_that_a_broker_wrote_is_a_frame(spark: SparkSession, case: str) -> None:
    expected = load_expected(GOLDEN / case / "expected.json")
    frame = (
        spark.read.format("logstore")
        .option("includeHeaders", "true")
        .load(str(GOLDEN / case / f"{case}-0"))
    )
    kind = int(case == "log-append-time")
    assert plain(rows_of(frame)) == expected_rows(expected, kind=kind)


def test_committed_reading_hides_what_was_aborted(spark: SparkSession) -> None:
    expected = load_expected(GOLDEN / "transactional" / "expected.json")
    assert expected.aborted
    frame = (
        spark.read.format("logstore")
        .option("includeHeaders", "true")
        .option("kafka.isolation.level", "read_committed")
        .load(str(GOLDEN / "transactional" / "transactional-0"))
    )
    assert plain(rows_of(frame)) == expected_rows(expected, kind=0, hidden=expected.aborted)


def test_a_brokers_log_directory_is_read_by_subscription(spark: SparkSession) -> None:
    records = json.loads((LOG_DIRECTORY / "expected.json").read_text())["records"]
    frame = (
        spark.read.format("logstore")
        .option("subscribePattern", "(orders|trimmed|empty|__.*)")
        .load(str(LOG_DIRECTORY / "log"))
    )
    assert rows_of(frame) == [
        (
            *(row["key"].encode(), row["value"].encode(), topic, int(number), row["offset"]),
            *(at(row["timestamp"]), 0),
        )
        for topic, number, row in sorted(
            (
                (*name.rsplit("-", 1), row)
                for name, rows in records.items()
                for row in rows
                if not name.startswith("__")
            ),
            key=lambda each: (each[0], int(each[1]), each[2]["offset"]),
        )
    ], "and none of Kafka's internal topics"


def test_one_partition_of_a_log_directory_starts_where_the_broker_says(
    spark: SparkSession,
) -> None:
    """Its records below 4 were deleted, which only a file at the root records."""
    frame = spark.read.format("logstore").load(str(LOG_DIRECTORY / "log" / "trimmed-0"))
    assert [row[4] for row in rows_of(frame)] == list(range(4, 10))
