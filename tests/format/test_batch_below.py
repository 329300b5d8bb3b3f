"""Cutting inside a batch: what stays of it is everything but the records that go."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore import Partition, _native
from logstore.format import codecs
from logstore.log.segment_contents import decompress
from logstore.testing import ReferenceRecord, decode_batch, encode_batch


def batch_below(raw: bytes, end: int) -> bytes:
    return _native.batch_below(raw, end, decompress, codecs.compress, 1 << 24)


def sample(times: list[int], offsets: list[int]) -> list[ReferenceRecord]:
    return [
        ReferenceRecord(b"%d" % offset, b"k", (("h", None),), time, offset)
        for time, offset in zip(times, offsets, strict=True)
    ]


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("append_time", [None, 77])
@pytest.mark.parametrize("horizon", [None, 5000])
def test_fields_of_a_cut_batch_stay(
    codec: int, append_time: int | None, horizon: int | None
) -> None:
    records = sample([-1, 20, 10, -1], [10, 12, 15, 16])
    raw = encode_batch(
        records,
        base_offset=10,
        last_offset=18,
        leader_epoch=4,
        codec=codec,
        append_time=append_time,
        transactional=True,
        delete_horizon=horizon,
        producer_id=9,
        producer_epoch=2,
        base_sequence=70,
    )
    whole, cut = decode_batch(raw), decode_batch(batch_below(raw, 14))
    assert cut == dataclasses.replace(
        whole,
        last_offset=13,
        records=whole.records[:2],
        size=cut.size,
        base_timestamp=cut.base_timestamp,
        max_timestamp=20 if append_time is None else append_time,
    )
    assert batch_below(raw, 19) == raw
    assert batch_below(raw, 11)[:8] == raw[:8]


def test_no_record_below_leaves_no_batch() -> None:
    raw = encode_batch(sample([1], [15]), base_offset=10, last_offset=18)
    assert batch_below(raw, 15) == b""
    with pytest.raises(ValueError, match="not a batch that holds this offset"):
        batch_below(raw, 10)


@given(
    st.lists(st.tuples(st.integers(-1, 1 << 62), st.integers(1, 9)), min_size=1, max_size=20),
    st.data(),
)
def test_records_below_are_the_same_records(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    offsets, offset = [], 0
    for _, gap in pairs:
        offset += gap
        offsets.append(offset)
    records = sample([time for time, _ in pairs], offsets)
    end = data.draw(st.integers(1, offset + 1))
    kept = batch_below(encode_batch(records), end)
    expected = tuple(record for record in records if record.offset < end)
    assert (decode_batch(kept).records if kept else ()) == expected


def test_truncate_keeps_producer_and_missing_times(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    path.mkdir()
    raw = encode_batch(
        sample([-1, -1, -1], [0, 1, 2]), producer_id=5, producer_epoch=1, base_sequence=30
    )
    (path / f"{0:020d}.log").write_bytes(raw)
    with Partition.open(path, durability="os") as log:
        log.truncate(2)
        assert [record.timestamp for record in log] == [-1, -1]
        cut = decode_batch(next(iter(log.scan().batches())))
        assert (cut.producer_id, cut.producer_epoch, cut.base_sequence) == (5, 1, 30)
        assert (cut.last_offset, cut.last_sequence) == (1, 31)
        assert log.append(b"next") == 2
