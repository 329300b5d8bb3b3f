"""spark.read.format("logstore"): what is read, by which options, in which columns."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

import logstore
from logstore import Partition, Record
from tests.spark import direct
from tests.spark.conftest import rows_of

T0 = 1_700_000_000_000
EPOCH = datetime.datetime(1970, 1, 1)


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store: `orders` of three partitions with 10, 20 and 30 records a second apart."""
    path = tmp_path_factory.mktemp("orders") / "store"
    with logstore.open(path, durability="os") as store:
        topic = store.create_topic("orders", partitions=3)
        for number in range(3):
            topic[number].extend(
                Record(b"v%d" % i, key=b"k%d" % (i % 3), timestamp=T0 + i * 1000)
                for i in range(10 * (number + 1))
            )
        store.create_topic("other", partitions=1)[0].append(b"o", timestamp=T0)
        store.create_topic("other2", partitions=1)[0].append(b"p", timestamp=T0)
    return path


def load(spark: SparkSession, path: Path, **options: Any) -> DataFrame:
    return spark.read.format("logstore").options(**options).load(str(path))


def places(frame: DataFrame) -> list[tuple[str, int, int]]:
    return [tuple(row) for row in rows_of(frame.select("topic", "partition", "offset"))]


def expected(*ranges: tuple[int, int, int]) -> list[tuple[str, int, int]]:
    return [("orders", number, i) for number, start, end in ranges for i in range(start, end)]


ALL = expected((0, 0, 10), (1, 0, 20), (2, 0, 30))

# ---- the schema ----


def test_the_schema_is_the_one_of_sparks_kafka_source(spark: SparkSession, orders: Path) -> None:
    schema = load(spark, orders, subscribe="orders").schema
    assert schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    with_headers = load(spark, orders, subscribe="orders", includeHeaders=True).schema
    assert with_headers["headers"].dataType.simpleString() == (
        "array<struct<key:string,value:binary>>"
    )
    assert all(field.nullable for field in with_headers)


def test_every_column_of_every_type(spark: SparkSession, tmp_path: Path) -> None:
    """Null, empty and not empty; headers repeated, null, in order; a place in the files."""
    with Partition.open(tmp_path / "t-0", durability="os") as log:
        log.extend(
            [
                Record(b"v", key=b"k", timestamp=T0, headers=[("h", b"1"), ("h", None), ("", b"")]),
                Record(b"", key=b"", timestamp=T0 + 1),
                Record(None, key=b"\xff\x00", timestamp=T0 - 1),
            ]
        )
        log.extend([Record(b"second batch", timestamp=T0)])
    frame = load(spark, tmp_path / "t-0", includeHeaders="true", metadata="true")
    rows = rows_of(frame)
    when = [EPOCH + datetime.timedelta(milliseconds=T0 + i) for i in (0, 1, -1, 0)]
    assert [row[:7] for row in rows] == [
        (b"k", b"v", "t", 0, 0, when[0], 0),
        (b"", b"", "t", 0, 1, when[1], 0),
        (b"\xff\x00", None, "t", 0, 2, when[2], 0),
        (None, b"second batch", "t", 0, 3, when[3], 0),
    ]
    assert [row[7] for row in rows][1:] == [None, None, None]
    assert [(h.key, h.value and bytes(h.value)) for h in rows[0][7]] == [
        ("h", b"1"), ("h", None), ("", b"")]  # fmt: skip
    names = frame.columns[8:]
    assert names == ["leaderEpoch", "batchOffset", "producerId", "sequence", "isControl",
                     "segment", "position", "compressionType"]  # fmt: skip
    position = rows[3][14]
    assert position > 0
    segment = "00000000000000000000.log"
    assert [row[8:] for row in rows] == [
        (0, 0, -1, -1, False, segment, 0, "none"),
        (0, 0, -1, -1, False, segment, 0, "none"),
        (0, 0, -1, -1, False, segment, 0, "none"),
        (0, 3, -1, -1, False, segment, position, "none"),
    ]


def test_a_users_schema_chooses_columns_and_takes_bytes_as_text(
    spark: SparkSession, orders: Path
) -> None:
    frame = (
        spark.read.format("logstore")
        .schema("value string, offset bigint, KEY string, timestamp timestamp_ntz")
        .option("subscribe", "orders")
        .load(str(orders))
    )
    assert frame.columns == ["value", "offset", "KEY", "timestamp"]
    row = frame.where("offset = 25").collect()[0]
    when = EPOCH + datetime.timedelta(milliseconds=T0 + 25_000)
    assert tuple(row) == ("v25", 25, "k1", when)


def test_the_columns_option_chooses_columns_without_a_schema(
    spark: SparkSession, orders: Path
) -> None:
    frame = load(spark, orders, subscribe="orders", columns="offset, partition")
    assert frame.schema.simpleString() == "struct<offset:bigint,partition:int>"
    assert sorted(tuple(row) for row in frame.collect()) == sorted((i, n) for _, n, i in ALL)


def test_only_the_columns_that_are_named_are_decoded(orders: Path) -> None:
    made = direct.reader(orders, StructType().add("partition", "integer"), subscribe="orders")
    assert direct.table(made).num_rows == 60
    made = direct.reader(orders, StructType().add("value", "binary"), subscribe="orders")
    assert direct.table(made).schema.names == ["value"]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (StructType().add("value", "integer"), "'value' cannot be int: it is binary or string"),
        (StructType().add("offset", "integer"), "'offset' cannot be int: it is bigint"),
        (
            StructType().add("amount", "integer"),
            "there is no 'amount': known are key, value, topic",
        ),
        (StructType().add("key", "binary").add("KEY", "binary"), "names a column twice"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(schema: StructType, said: str, orders: Path) -> None:
    with pytest.raises(ValueError, match=said):
        direct.reader(orders, schema, subscribe="orders")


# ---- what is subscribed ----


def test_a_path_may_be_a_store_a_topic_or_a_partition(spark: SparkSession, orders: Path) -> None:
    assert places(load(spark, orders, subscribe="orders")) == ALL
    assert places(load(spark, orders / "orders")) == ALL
    assert places(load(spark, orders / "orders-1")) == expected((1, 0, 20))


def test_subscribing_by_pattern_and_by_assignment(spark: SparkSession, orders: Path) -> None:
    found = places(load(spark, orders, subscribePattern="other[0-9]?"))
    assert found == [("other", 0, 0), ("other2", 0, 0)]
    found = places(load(spark, orders, assign='{"orders":[2,0]}'))
    assert found == expected((0, 0, 10), (2, 0, 30))
    assert places(load(spark, orders, subscribePattern="nothing.*")) == []


def test_topics_that_are_not_there_are_named(orders: Path) -> None:
    with pytest.raises(ValueError, match=r"no topic 'ordres'; it has orders, other, other2"):
        direct.splits(orders, subscribe="ordres")
    with pytest.raises(ValueError, match=r"no partition 3.*assign only what is there"):
        direct.splits(orders, assign='{"orders":[3]}')
    with pytest.raises(ValueError, match=r"subscribe: is missing: .* is a directory of topics"):
        direct.splits(orders)
    with pytest.raises(ValueError, match=r"is one partition, which leaves nothing to choose"):
        direct.splits(orders / "orders-0", subscribe="orders")


# ---- from where to where ----


def test_offsets_by_partition_as_json(spark: SparkSession, orders: Path) -> None:
    frame = load(
        spark,
        orders,
        subscribe="orders",
        startingOffsets='{"orders":{"0":8,"1":-2,"2":25}}',
        endingOffsets='{"orders":{"0":-1,"1":3,"2":25}}',
    )
    assert places(frame) == expected((0, 8, 10), (1, 0, 3))


def test_times_for_all_and_by_partition(spark: SparkSession, orders: Path) -> None:
    frame = load(
        spark,
        orders,
        subscribe="orders",
        startingTimestamp=T0 + 8_500,
        endingOffsetsByTimestamp=f'{{"orders":{{"0":{T0},"1":{T0 + 11_000},"2":{T0 + 99_000}}}}}',
    )
    assert places(frame) == expected((1, 9, 11), (2, 9, 30)), "no record that late: to the end"
    frame = load(
        spark,
        orders,
        subscribe="orders",
        startingOffsetsByTimestamp=f'{{"orders":{{"0":{T0 + 9_000},"1":{T0 + 19_000},"2":0}}}}',
        endingTimestamp="2023-11-14T22:13:22Z",  # two seconds after T0
    )
    assert places(frame) == expected((2, 0, 2))


def test_the_last_offsets_of_each_partition(spark: SparkSession, orders: Path) -> None:
    found = places(load(spark, orders, subscribe="orders", startingOffsets="last:4"))
    assert found == expected((0, 6, 10), (1, 16, 20), (2, 26, 30))


def test_an_end_before_its_start_is_refused(orders: Path) -> None:
    with pytest.raises(ValueError, match=r"orders-0 ends at 2, before its start at 5"):
        direct.splits(
            orders / "orders-0",
            startingOffsets='{"orders":{"0":5}}',
            endingOffsets='{"orders":{"0":2}}',
        )


def test_an_empty_topic_is_an_empty_frame(spark: SparkSession, tmp_path: Path) -> None:
    with logstore.open(tmp_path / "store", durability="os") as store:
        store.create_topic("empty", partitions=2)
    frame = load(spark, tmp_path / "store", subscribe="empty")
    assert frame.count() == 0
    assert frame.columns[0] == "key"


# ---- splits ----


def covered(splits: list[Any]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for split in splits:
        found.setdefault(str(split.which), []).append(tuple(split.wanted))
    return found


def test_min_partitions_and_max_records_make_more_tasks(spark: SparkSession, orders: Path) -> None:
    frame = load(spark, orders, subscribe="orders", minPartitions=12)
    assert frame.rdd.getNumPartitions() >= 12
    assert places(frame) == ALL
    frame = load(spark, orders, subscribe="orders", maxRecordsPerPartition=7)
    assert frame.rdd.getNumPartitions() == 2 + 3 + 5
    assert places(frame) == ALL


def test_splits_touch_and_never_overlap(orders: Path) -> None:
    for options in ({"minPartitions": 17}, {"maxRecordsPerPartition": 4}, {}):
        for pieces in covered(direct.splits(orders, subscribe="orders", **options)).values():
            assert pieces[0][0] == 0
            for (_, end), (start, _) in itertools.pairwise(pieces):
                assert end == start


def test_a_large_partition_is_split_by_bytes_within_and_across_segments(tmp_path: Path) -> None:
    with Partition.open(
        tmp_path / "t-0", durability="os", config={"segment.bytes": 1 << 20}
    ) as log:
        for i in range(0, 3000, 10):
            log.extend(b"x" * (100 if i < 1500 else 2000) for _ in range(10))
        sizes = [segment.size_bytes for segment in log.segments]
        assert len(sizes) > 3
        total = sum(sizes)
    splits = direct.splits(tmp_path / "t-0", maxBytesPerPartition="300k")
    assert len(splits) == -(-total // (300 << 10))
    ((pieces),) = covered(splits).values()
    assert pieces[0][0] == 0 and pieces[-1][1] == 3000
    spans = [end - start for start, end in pieces]
    assert spans[0] > 4 * spans[-1], "the small records of the first half share a task"
    bytes_read = [
        sum(len(v) for v in direct.read(tmp_path / "t-0", **only)["value"].to_pylist())
        for only in (
            {
                "startingOffsets": f'{{"t":{{"0":{start}}}}}',
                "endingOffsets": f'{{"t":{{"0":{end}}}}}',
            }
            for start, end in pieces
        )
    ]
    assert max(bytes_read) < 2 * min(bytes_read)


# ---- other options, and errors ----


def test_rows_per_batch_bounds_the_arrow_batches(orders: Path) -> None:
    made = direct.reader(orders / "orders-2", rowsPerBatch=7)
    (split,) = made.partitions()
    assert [batch.num_rows for batch in made.read(split)] == [7, 7, 7, 7, 2]


def test_damage_is_an_error_or_is_passed_over(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "t-0", durability="os") as log:
        for i in range(3):
            log.extend([b"batch %d" % i, b"x"])
        positions = [batch.position for batch in log.scan().located_batches()]
    data = bytearray((tmp_path / "t-0" / "00000000000000000000.log").read_bytes())
    data[positions[1] + 70] ^= 0xFF
    (tmp_path / "t-0" / "00000000000000000000.log").write_bytes(data)
    with pytest.raises(logstore.CorruptLogError):
        direct.offsets(tmp_path / "t-0")
    assert direct.offsets(tmp_path / "t-0", onCorrupt="skip") == [0, 1, 4, 5]


def test_an_error_reaches_the_user_with_its_remedy(spark: SparkSession, orders: Path) -> None:
    with pytest.raises(PySparkException, match="did you mean startingOffsets"):
        load(spark, orders, subscribe="orders", startingOffset="earliest").count()
    with pytest.raises(PySparkException, match="startingOffsets: is not JSON"):
        load(spark, orders, subscribe="orders", startingOffsets='{"orders"').count()
    with pytest.raises(PySparkException, match=r"the driver on host .* cannot see /no/such/store"):
        load(spark, Path("/no/such/store"), subscribe="orders").count()


def test_a_reader_sees_what_a_writer_has_appended_meanwhile(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "t-0", durability="os") as log:
        log.extend([b"a", b"b"])
        assert direct.offsets(tmp_path / "t-0") == [0, 1]
        log.extend([b"c"])
        assert direct.offsets(tmp_path / "t-0") == [0, 1, 2]
