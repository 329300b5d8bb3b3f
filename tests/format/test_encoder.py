"""BatchEncoder: what it encodes is what a log would hold, and can be appended once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from logstore import (
    BatchEncoder,
    BatchHeader,
    BytesColumn,
    ConfigError,
    InvalidRecordError,
    KeyPartitioner,
    Partition,
    Record,
    RecordTooLargeError,
    with_producer,
)

pa = pytest.importorskip("pyarrow")

NOW = -(2**63)


def split(data: bytes) -> list[bytes]:
    batches, at = [], 0
    while at < len(data):
        size = BatchHeader.parse(data, at).size_bytes
        batches.append(data[at : at + size])
        at += size
    return batches


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_what_is_encoded_can_be_appended_and_read(tmp_path: Path, compression: str) -> None:
    records = [
        Record(b"v%d" % n, key=b"k%d" % (n % 7), headers=[("h", None), ("h", b"x")], timestamp=n)
        for n in range(5000)
    ]
    encoder = BatchEncoder(compression=compression, batch_bytes=4096)
    encoder.extend(records)
    data = encoder.take()
    assert encoder.take() == b""
    with Partition.open(tmp_path / "t-0") as log:
        for batch in split(data):
            log.append_batch(batch)
        assert [
            Record(r.value, key=r.key, headers=r.headers, timestamp=r.timestamp) for r in log
        ] == (records)
        log.check()


def test_columns_and_records_encode_to_the_same_bytes() -> None:
    values = [b"a", None, b"", b"dd" * 40_000, b"e"]
    keys = [b"k", b"tomb", None, b"", b"k2"]
    times = [5, 6, 7, 8, 9]
    one, other = BatchEncoder(batch_bytes=1000), BatchEncoder(batch_bytes=1000)
    for value, key, time in zip(values, keys, times, strict=True):
        one.append(value, key=key, timestamp=time)
    other.append_columns(
        BytesColumn.from_arrow(pa.array(values, pa.binary())),
        keys=BytesColumn.from_arrow(pa.array(keys, pa.binary())),
        timestamps=np.array(times, np.int64),
    )
    assert other.size_bytes == one.size_bytes > 80_000
    assert one.take() == other.take()


def test_rows_choose_and_order(tmp_path: Path) -> None:
    encoder = BatchEncoder()
    values = BytesColumn.from_arrow(pa.array([b"0", b"1", b"2", b"3"]))
    encoder.append_columns(values, rows=np.array([3, 1], np.int64))
    encoder.append_columns(values, rows=np.array([], np.int64))
    with Partition.open(tmp_path / "t-0") as log:
        log.append_batch(encoder.take())
        assert [record.value for record in log] == [b"3", b"1"]
    with pytest.raises(IndexError, match="row 4 of 4"):
        encoder.append_columns(values, rows=np.array([4], np.int64))
    with pytest.raises(TypeError, match="rows must be int64"):
        encoder.append_columns(values, rows=np.array([1], np.int32))


@pytest.mark.parametrize("kind", ["binary", "string", "large_binary", "large_string"])
@pytest.mark.parametrize("sliced", [False, True])
def test_a_column_comes_from_any_arrow_array_of_bytes(kind: str, sliced: bool) -> None:
    array = pa.array(["aa", None, "", "b", "é"], pa.string()).cast(getattr(pa, kind)())
    expected = [b"aa", None, b"", b"b", "é".encode()]
    if sliced:
        array, expected = array.slice(1, 3), expected[1:4]
    column = BytesColumn.from_arrow(array)
    assert list(column) == expected
    assert list(BytesColumn.from_arrow(array.slice(0, 0))) == []
    assert list(BytesColumn.from_arrow(pa.chunked_array([array, array]))) == expected * 2


def test_bad_rows_are_refused() -> None:
    encoder = BatchEncoder(config={"max.message.bytes": 1000})
    empty = BytesColumn.from_arrow(pa.array([None], pa.binary()))
    one = BytesColumn.from_arrow(pa.array([b"x"]))
    with pytest.raises(InvalidRecordError, match="row 0 has neither value nor key"):
        encoder.append_columns(empty)
    with pytest.raises(InvalidRecordError, match="not negative"):
        encoder.append_columns(one, timestamps=np.array([-5], np.int64))
    with pytest.raises(ValueError, match="different"):
        encoder.append_columns(one, timestamps=np.array([1, 2], np.int64))
    with pytest.raises(ValueError, match="different"):
        encoder.append_columns(one, keys=BytesColumn.from_arrow(pa.array([b"a", b"b"])))
    with pytest.raises(RecordTooLargeError):
        encoder.append_columns(BytesColumn.from_arrow(pa.array([bytes(2000)])))
    wild = BytesColumn((np.array([0, 100], np.int32), b"short", None, 0))
    with pytest.raises(ValueError, match="outside"):
        encoder.append_columns(wild)
    with pytest.raises(ValueError, match="outside"):
        KeyPartitioner().of_keys(wild, 3)
    with pytest.raises(ConfigError):
        BatchEncoder(compression="rar")
    with pytest.raises(ConfigError):
        BatchEncoder(batch_bytes=0)
    assert encoder.take() == b""


def test_a_missing_time_is_now(tmp_path: Path) -> None:
    encoder = BatchEncoder()
    column = BytesColumn.from_arrow(pa.array([b"a", b"b"]))
    encoder.append_columns(column, timestamps=np.array([NOW, 7], np.int64))
    header = BatchHeader.parse(encoder.take())
    assert header.max_timestamp > 1_600_000_000_000


def test_keys_of_a_column_go_where_single_keys_go() -> None:
    keys = [b"alice", b"", None, b"foobar", b"x" * 100]
    choose = KeyPartitioner()
    column = BytesColumn.from_arrow(pa.array(keys, pa.binary()))
    for partitions in (1, 3, 1000):
        expected = [-1 if key is None else choose(key, b"", partitions) for key in keys]
        assert choose.of_keys(column, partitions).tolist() == expected


def test_a_batch_of_a_producer_is_appended_once(tmp_path: Path) -> None:
    encoder = BatchEncoder()
    encoder.extend([b"a", b"b"])
    raw = with_producer(
        encoder.take(), producer_id=7, producer_epoch=1, base_sequence=0, transactional=True
    )
    assert BatchHeader.parse(raw).transactional
    with Partition.open(tmp_path / "t-0") as log:
        assert log.append_batch(raw).offsets == range(0, 2)
        assert log.append_batch(raw).duplicate
        assert log.last_stable_offset == 0
        log.end_transaction(7, 1, commit=True)
        assert [r.value for r in log.scan(isolation="read_committed")] == [b"a", b"b"]
        log.check()
    with pytest.raises(InvalidRecordError, match="takes"):
        with_producer(raw + b"x", producer_id=1, producer_epoch=0, base_sequence=0)
    with pytest.raises(InvalidRecordError, match="damaged"):
        with_producer(raw[:-1] + b"x", producer_id=1, producer_epoch=0, base_sequence=0)
