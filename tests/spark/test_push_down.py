"""Filters that Spark hands down: exact, and proven by the bytes that were read."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

import logstore
from logstore import Partition, Record
from tests.spark import direct
from tests.spark.conftest import rows_of
from tests.spark.counting import CountingSource, counted

T0 = 1_700_000_000_000
HOUR = 3_600_000
PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"


def at(ms: float) -> datetime.datetime:
    return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(milliseconds=ms)


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A week of log: an hour in each segment, 200 kB an hour, 34 MB in all."""
    path = tmp_path_factory.mktemp("week") / "events-0"
    with Partition.open(path, durability="os") as log:
        for hour in range(7 * 24):
            start = T0 + hour * HOUR
            log.extend(Record(b"x" * 1000, timestamp=start + i * HOUR // 200) for i in range(200))
            log.roll()
    return path


def test_one_hour_of_a_week_reads_an_hour(spark: SparkSession, week: Path, tmp_path: Path) -> None:
    """By the kernel's count, in the process that plans and in those that read."""
    spark.dataSource.register(CountingSource)
    total = sum(file.stat().st_size for file in week.glob("*.log"))

    def counts_of(name: str, condition: str | None) -> dict[str, int]:
        (tmp_path / name).mkdir()
        frame = (
            spark.read.format("logstore_counting")
            .option("counts", str(tmp_path / name))
            .load(str(week))
        )
        if condition is not None:
            frame = frame.where(condition)
        assert frame.count() == (200 if condition else 200 * 7 * 24)
        return counted(tmp_path / name)

    start, end = (f"timestamp_millis({T0 + hour * HOUR})" for hour in (100, 101))
    hour = counts_of("hour", f"timestamp >= {start} AND timestamp < {end}")
    everything = counts_of("everything", None)
    spark.conf.set(PUSH_DOWN, "false")
    try:
        switched_off = counts_of("off", f"timestamp >= {start} AND timestamp < {end}")
    finally:
        spark.conf.set(PUSH_DOWN, "true")
    assert switched_off["task"] > total, "then Spark filters what was read"
    assert everything["task"] > total
    assert hour["task"] < total / 40, "an hour is a 168th; a segment more at most, and indexes"
    assert hour["plan"] < total / 40 and everything["plan"] < total / 40


def test_push_down_is_exact_and_off_by_default_means_the_same_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    with logstore.open(tmp_path / "store", durability="os") as store:
        topic = store.create_topic("orders", partitions=2)
        for number in range(2):
            topic[number].extend(
                Record(b"v", key=b"k%d" % i, timestamp=T0 + (i * 7919) % 1000) for i in range(500)
            )
    frame = spark.read.format("logstore").option("subscribe", "orders")
    condition = (
        "topic = 'orders' AND partition IN (1, 5) AND offset BETWEEN 100 AND 400 AND "
        f"timestamp >= timestamp_micros({T0 * 1000 + 250_500}) AND "
        f"timestamp < timestamp_micros({T0 * 1000 + 500_000}) AND key IS NOT NULL AND "
        "(offset = 101 OR length(key) > 2)"
    )
    wanted = [
        i for i in range(100, 401) if 251 <= (i * 7919) % 1000 < 500 and (i == 101 or i >= 10)
    ]
    assert len(wanted) > 20
    try:
        for switched in ("true", "false"):
            spark.conf.set(PUSH_DOWN, switched)
            found = rows_of(frame.load(str(tmp_path / "store")).where(condition))
            assert [(row[3], row[4]) for row in found] == [(1, i) for i in wanted]
    finally:
        spark.conf.set(PUSH_DOWN, "true")


# ---- the filters one by one, without Spark ----


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two topics; times out of order, across segments too."""
    path = tmp_path_factory.mktemp("shuffled") / "store"
    times = random.Random(7)
    with logstore.open(path, durability="os") as store:
        for name, partitions in (("alpha", 2), ("beta", 1)):
            topic = store.create_topic(name, partitions=partitions)
            for number in range(partitions):
                for segment in range(6):
                    topic[number].extend(
                        Record(b"v", timestamp=T0 + segment * 50 + times.randrange(-60, 60))
                        for _ in range(40)
                    )
                    topic[number].roll()
    return path


def pushed(path: Path, *filters: Filter) -> tuple[list[Filter], list[dict[str, Any]]]:
    """Return the filters that Spark gets back, and the rows of a scan."""
    made = direct.reader(path, subscribe="alpha,beta")
    left = list(made.pushFilters(list(filters)))
    return left, direct.table(made).to_pylist()


def satisfied(row: dict[str, Any], given: Filter) -> bool:
    """Return what the filter means, computed without the code under test."""
    if isinstance(given, Not):
        return not satisfied(row, given.child)
    value = row[given.attribute[0]]  # type: ignore[attr-defined]
    if isinstance(given, IsNull | IsNotNull):
        return (value is None) == isinstance(given, IsNull)
    compared = given.value  # type: ignore[attr-defined]
    outcomes = {
        EqualTo: lambda: value == compared,
        EqualNullSafe: lambda: value == compared,
        GreaterThan: lambda: value > compared,
        GreaterThanOrEqual: lambda: value >= compared,
        LessThan: lambda: value < compared,
        LessThanOrEqual: lambda: value <= compared,
        In: lambda: value in compared,
        StringStartsWith: lambda: value.startswith(compared),
        StringEndsWith: lambda: value.endswith(compared),
        StringContains: lambda: compared in value,
    }
    return outcomes[type(given)]()


EXACT = [
    EqualTo(("topic",), "beta"),
    Not(EqualTo(("topic",), "beta")),
    In(("topic",), ("beta", "gamma")),
    StringStartsWith(("topic",), "al"),
    StringEndsWith(("topic",), "ta"),
    StringContains(("topic",), "lph"),
    EqualTo(("partition",), 1),
    GreaterThan(("partition",), 0),
    In(("partition",), (1, 2)),
    EqualTo(("offset",), 77),
    EqualNullSafe(("offset",), 77),
    GreaterThan(("offset",), 100),
    GreaterThanOrEqual(("offset",), 100),
    LessThan(("offset",), 100),
    LessThanOrEqual(("offset",), 100),
    IsNotNull(("offset",)),
    *(
        comparison(("timestamp",), at(T0 + ms))
        for comparison in (*(EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual),)
        for ms in (100, 100.4, -500, 9999)
    ),
]


@pytest.mark.parametrize("given", EXACT, ids=str)
def test_an_exact_filter_brings_just_its_rows(given: Filter, shuffled: Path) -> None:
    every = direct.read(shuffled, subscribe="alpha,beta").to_pylist()
    left, rows = pushed(shuffled, given)
    assert left == []
    assert rows == [row for row in every if satisfied(row, given)]


@pytest.mark.parametrize(
    "given",
    [
        In(("offset",), (5, 90)),
        In(("timestamp",), (at(T0 + 3), at(T0 + 100.5))),
        Not(EqualTo(("offset",), 5)),
        Not(GreaterThan(("timestamp",), at(T0))),
        EqualTo(("value",), b"v"),
        IsNull(("offset",)),
        IsNotNull(("key",)),
        EqualTo(("timestampType",), 0),
        StringStartsWith(("key",), "k"),
    ],
    ids=str,
)
def test_what_is_not_exact_goes_back_to_spark_and_loses_no_row(
    given: Filter, shuffled: Path
) -> None:
    every = direct.read(shuffled, subscribe="alpha,beta").to_pylist()
    left, rows = pushed(shuffled, given)
    assert len(left) == 1 and left[0] is given, "the same object"
    if given.attribute if hasattr(given, "attribute") else False:
        kept = {(row["topic"], row["partition"], row["offset"]) for row in rows}
        if not isinstance(given, StringStartsWith):
            assert all(
                (row["topic"], row["partition"], row["offset"]) in kept
                for row in every
                if satisfied(row, given)
            )


def test_many_filters_at_once_against_the_plain_way(shuffled: Path) -> None:
    every = direct.read(shuffled, subscribe="alpha,beta").to_pylist()
    choices = random.Random(11)
    for _ in range(60):
        filters = choices.sample(EXACT, k=3)
        left, rows = pushed(shuffled, *filters)
        assert left == []
        wanted = [row for row in every if all(satisfied(row, given) for given in filters)]
        assert rows == wanted, filters


def test_segments_that_are_wholly_too_old_or_too_new_are_not_read(shuffled: Path) -> None:
    made = direct.reader(shuffled, assign='{"alpha":[0]}')
    made.pushFilters(
        [
            GreaterThanOrEqual(("timestamp",), at(T0 + 62)),
            LessThan(("timestamp",), at(T0 + 88)),
        ]
    )
    planned = [split.wanted for split in made.partitions()]  # type: ignore[attr-defined]
    assert planned, "some hold such times"
    assert min(wanted.start for wanted in planned) >= 40, "the first segment ends before"
    assert max(wanted.end for wanted in planned) <= 160, "from the fifth on all is later"
