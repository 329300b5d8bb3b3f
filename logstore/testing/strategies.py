"""Hypothesis strategies for records and batches, biased towards edge cases of logs.

Sizes are small, so that a failing example is readable.  Edge cases are frequent: null and empty
keys, tombstones, repeated headers, decreasing timestamps, varints of every length.
"""

from __future__ import annotations

from typing import Any

from logstore import Record
from logstore.format import codecs
from logstore.testing.reference import ReferenceRecord, encode_batch

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        'logstore\'s strategies need the hypothesis package: pip install "logstore-engine[test]"'
    ) from error

__all__ = ["batches", "payloads", "record_lists", "records", "reference_records", "timestamps"]

_INT32_MAX = 2**31 - 1
_NOW = 1_700_000_000_000


def timestamps() -> st.SearchStrategy[int]:
    """Timestamps in ms: close together (some are equal), around now, and at both limits."""
    return st.one_of(
        st.integers(0, 20),
        st.integers(_NOW, _NOW + 1_000),
        st.integers(0, 2**48),
        st.sampled_from([0, 2**31 - 1, 2**31, 2**62]),
    )


def payloads(max_size: int = 200) -> st.SearchStrategy[bytes]:
    """Bytes of a key or a value: short, or around the lengths where a varint gets longer."""
    runs = st.builds(
        bytes.__mul__,
        st.sampled_from([b"\x00", b"a", b"\xff"]),
        st.sampled_from([size for size in (63, 64, 127, 128) if size <= max_size]),
    )
    return st.one_of(st.binary(max_size=min(20, max_size)), runs, st.binary(max_size=max_size))


def _fields(max_size: int) -> st.SearchStrategy[dict[str, Any]]:
    names = st.one_of(st.sampled_from(["", "h", "trace", "ü"]), st.text(max_size=10))
    header = st.tuples(names, st.none() | st.binary(max_size=10))
    return st.fixed_dictionaries(
        {
            "value": st.none() | payloads(max_size),
            "key": st.none() | payloads(min(max_size, 80)),
            "headers": st.just(()) | st.lists(header, max_size=4).map(tuple),
            "timestamp": timestamps(),
        }
    ).map(_tombstones_have_keys)


def _tombstones_have_keys(fields: dict[str, Any]) -> dict[str, Any]:
    if fields["value"] is None and fields["key"] is None:
        return {**fields, "key": b""}
    return fields


def records(max_size: int = 200) -> st.SearchStrategy[Record]:
    """Records with a timestamp that any partition accepts; values are at most ``max_size`` bytes.

    A record without a value always has a key.
    """
    return _fields(max_size).map(lambda fields: Record(**fields))


def record_lists(
    *, min_size: int = 1, max_size: int = 20, max_value_size: int = 200
) -> st.SearchStrategy[list[Record]]:
    """Lists of records, as for ``Partition.extend``; some repeat one record many times."""
    repeated = st.builds(
        lambda record, count: [record] * count,
        records(max_value_size),
        st.integers(min_size, max_size),
    )
    lists = st.lists(records(max_value_size), min_size=min_size, max_size=max_size)
    return lists | repeated


def reference_records(max_size: int = 200) -> st.SearchStrategy[ReferenceRecord]:
    """Records for the reference codec.  They may also have neither key nor value, and no timestamp
    (−1), as in a broker's file."""
    odd = st.sampled_from([ReferenceRecord(None), ReferenceRecord(b"", timestamp=-1)])
    return odd | _fields(max_size).map(lambda fields: ReferenceRecord(**fields))


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    base_offset: int | None = None,
    codec: int | None = None,
    gaps: bool = True,
    max_records: int = 20,
) -> bytes:
    """One valid data batch, as bytes.

    Any codec, either timestamp type, with or without a producer.  With ``gaps`` also batches as
    compaction leaves them: some or all records missing, and a delete horizon.
    """
    base = draw(st.integers(0, 2**40)) if base_offset is None else base_offset
    items = draw(st.lists(reference_records(), min_size=1, max_size=max_records))
    count = len(items)
    if gaps and draw(st.booleans()):
        steps = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
        deltas = [sum(steps[: index + 1]) - 1 for index in range(count)]
    else:
        deltas = list(range(count))
    records = [
        ReferenceRecord(item.value, item.key, item.headers, item.timestamp, base + delta)
        for item, delta in zip(items, deltas, strict=True)
    ]
    last_offset = base + deltas[-1]
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["append_time"] = draw(timestamps())
    if draw(st.booleans()):
        options["producer_id"] = draw(st.integers(0, 2**63 - 1))
        options["producer_epoch"] = draw(st.integers(0, 2**15 - 1))
        options["base_sequence"] = draw(st.integers(0, _INT32_MAX))
        options["transactional"] = draw(st.booleans())
    if gaps and draw(st.booleans()):
        last_offset += draw(st.integers(0, 3))
        options["delete_horizon"] = draw(st.integers(0, 2**48))
    elif gaps and draw(st.integers(0, 9)) == 0:
        records = []
        options["max_timestamp"] = draw(timestamps())
    return encode_batch(
        records,
        base_offset=base,
        last_offset=last_offset,
        leader_epoch=draw(st.integers(0, 100)),
        codec=draw(st.sampled_from(sorted(set(codecs.CODECS.values()))))
        if codec is None
        else codec,
        **options,
    )
