"""Fewer rows: the option where, maxRecords, limits and partitions that a query excludes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

from pyspark.sql import SparkSession
from pyspark.sql.datasource import EqualTo, In
from pyspark.sql.worker import plan_data_source_read
from pyspark_logstore.batch import BatchReader, PushDownReader, _tell_how_to_push_down, reader_class
from pyspark_logstore.plan import Chain

import logstore
from logstore import Compactor, Partition, Record, Topic, Where
from tests.spark import direct
from tests.spark.collected import Collected

T0 = 1_700_000_000_000


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two partitions of 300 records each; some with a header, some without a key or a value."""
    path = tmp_path_factory.mktemp("people") / "store"
    with logstore.open(path, durability="os") as store:
        topic = store.create_topic("people", partitions=2)
        for number in range(2):
            topic[number].extend(
                Record(
                    None if i % 51 == 48 else b'{"n": %d}' % i,
                    key=b"alice" if i % 3 == 0 else None if i % 3 == 1 else b"bob",
                    headers=[("source", b"web")] if i % 5 == 0 else [],
                    timestamp=T0 + i,
                )
                for i in range(300)
            )
    return path


CONDITIONS = [
    'key == "alice" and $.n > 3',
    "header.source =~ /^w/ or partition == 1",
    f"timestamp >= {T0 + 290}",
    "offset in [3, 7, 299]",
    "value == null",
    "not (length(value) > 8)",
    'topic == "others"',
]


@pytest.mark.parametrize("text", CONDITIONS)
def test_where_picks_what_the_condition_says_of_each_record(text: str, people: Path) -> None:
    with logstore.open(people, readonly=True) as store:
        where = Where(text)
        wanted = [
            (partition.number, record.offset)
            for partition in store["people"]
            for record in partition
            if where(record)
        ]
    found = direct.read(people, subscribe="people", where=text, rowsPerBatch=64)
    if not wanted:
        assert found.num_rows == 0
        return
    places = zip(found["partition"].to_pylist(), found["offset"].to_pylist(), strict=True)
    assert list(places) == wanted


def test_where_together_with_columns_and_pushed_filters(people: Path) -> None:
    """What a condition looks at need not be read by the query."""
    made = direct.reader(people, subscribe="people", where='key == "bob"', columns="offset")
    found = direct.table(made)
    assert found.column_names == ["offset"] and found.num_rows == 2 * 100
    made = direct.reader(people, subscribe="people", where='key == "bob"')
    made.pushFilters([EqualTo(("partition",), 0), In(("offset",), (2, 3, 5, 8))])
    assert direct.table(made)["offset"].to_pylist() == [2, 5, 8], "from 2 to 8, and bob's"


def test_where_in_a_stream_and_in_a_batch(
    spark: SparkSession, people: Path, collected: Collected
) -> None:
    condition = 'key == "alice" and partition == 1 and $.n < 20'
    wanted = [(1, offset) for offset in range(0, 20, 3)]
    options = {"subscribe": "people", "where": condition, "startingOffsets": "earliest"}
    progress = collected.run(
        spark.readStream.format("logstore").options(**options).load(str(people))
    )
    assert collected.rows == wanted
    assert sum(each["numInputRows"] for each in progress) == len(wanted), "before Spark has them"
    frame = spark.read.format("logstore").options(**options).load(str(people))
    assert sorted((row.partition, row.offset) for row in frame.collect()) == wanted


def test_max_records_bounds_the_whole_query_and_counts_records(
    spark: SparkSession, people: Path, tmp_path: Path
) -> None:
    def places(**options: Any) -> list[tuple[int, int]]:
        frame = spark.read.format("logstore").options(subscribe="people", **options)
        return [(row.partition, row.offset) for row in frame.load(str(people)).collect()]

    assert places(maxRecords=7) == [(0, offset) for offset in range(7)]
    assert len(places(maxRecords=301, maxRecordsPerPartition=10)) == 301
    assert len(places(maxRecords=5000)) == 600
    assert places(maxRecords=3, where="partition == 1") == [(1, 0), (1, 1), (1, 2)]
    with Partition.open(
        tmp_path / "t-0", durability="os", config={"cleanup.policy": "compact"}
    ) as log:
        for number in range(10):
            log.extend(Record(b"v", key=b"k%d" % (i if number == 9 else 0)) for i in range(10))
            log.roll()
        Compactor(log).run()
        left = [record.offset for record in log]
    assert left[0] > 50, "gaps"
    assert direct.offsets(tmp_path / "t-0", maxRecords=4) == left[:4]


def test_a_limit_that_is_pushed_down_is_one_task_that_stops(people: Path) -> None:
    made = direct.reader(people, subscribe="people", maxRecordsPerPartition=10)
    assert made.pushLimit(15) is True
    (chain,) = made.partitions()
    assert isinstance(chain, Chain)
    batches = list(made.read(chain))
    assert [batch.num_rows for batch in batches] == [10, 5], "the third split was not begun"
    made = direct.reader(people, subscribe="people", maxRecordsPerPartition=100, maxRecords=5)
    assert made.pushLimit(250) is True
    assert direct.table(made).num_rows == 5, "the lesser of the two"
    made = direct.reader(people, subscribe="people", maxRecordsPerPartition=100)
    assert made.pushLimit(10_000_000) is False
    assert len(made.partitions()) == 6, "so many are better read side by side"


def test_partitions_that_filters_exclude_are_not_opened(
    people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    really = Topic._open_partition

    def watched(self: Topic, number: int) -> Partition:
        opened.append(number)
        return really(self, number)

    monkeypatch.setattr(Topic, "_open_partition", watched)
    offsets = '{"people":{"0":1,"1":290}}'
    made = direct.reader(people, subscribe="people", startingOffsets=offsets)
    made.pushFilters([EqualTo(("partition",), 1)])
    (split,) = made.partitions()
    assert opened == [1]
    assert tuple(split.wanted) == (290, 300), "the map still names both"  # type: ignore[attr-defined]


def test_a_query_without_push_down_is_told_the_line_that_switches_it_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = plan_data_source_read._main.__code__.co_varnames
    assert "enable_pushdown" in names, "where Spark's planning keeps the switch"

    def _main(enable_pushdown: bool) -> type[BatchReader]:
        return reader_class()

    line = 'spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")'
    _tell_how_to_push_down.cache_clear()
    with caplog.at_level(logging.WARNING, "pyspark_logstore"):
        assert _main(True) in (BatchReader, PushDownReader)
        assert line not in caplog.text
        for _ in range(3):
            _main(False)
    assert caplog.text.count(line) == 1
