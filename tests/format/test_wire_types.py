"""Fields: a written value is read again, and each length is checked before it is used."""

from __future__ import annotations

import uuid

import hypothesis.strategies as st
import pytest
from hypothesis import given

from logstore.errors import InvalidRecordError
from logstore.format.wire_types import FieldReader, FieldWriter

TEXT = st.text(max_size=20)
SOME_BYTES = st.binary(max_size=20)


@given(
    st.integers(-(1 << 63), (1 << 63) - 1),
    TEXT,
    st.none() | TEXT,
    st.none() | SOME_BYTES,
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1)),
)
def test_plain_fields_come_back(
    number: int, text: str, perhaps: str | None, raw: bytes | None, numbers: list[int]
) -> None:
    written = (
        FieldWriter()
        .int8(-1)
        .int64(number)
        .string(text)
        .nullable_string(perhaps)
        .nullable_blob(raw)
        .array(numbers, FieldWriter.int32)
        .take()
    )
    reader = FieldReader(written)
    assert reader.int8() == -1
    assert reader.int64() == number
    assert reader.string() == text
    assert reader.nullable_string() == perhaps
    assert reader.nullable_blob() == raw
    assert reader.array(FieldReader.int32) == numbers
    assert reader.left == 0


@given(
    st.none() | TEXT, st.none() | SOME_BYTES, st.none() | st.lists(TEXT), st.integers(0, 1 << 31)
)
def test_compact_fields_come_back(
    text: str | None, raw: bytes | None, texts: list[str] | None, number: int
) -> None:
    tag = uuid.UUID(int=7)
    written = (
        FieldWriter()
        .compact_string(text)
        .compact_blob(raw)
        .compact_array(texts, FieldWriter.compact_string)
        .varint(number)
        .unique_id(tag)
        .tags([(0, b"zero"), (3, b"")])
        .take()
    )
    reader = FieldReader(written)
    assert reader.compact_string() == text
    assert reader.compact_blob() == raw
    assert reader.compact_array(FieldReader.compact_string) == texts
    assert reader.varint() == number
    assert reader.unique_id() == tag
    assert reader.tags() == {0: b"zero", 3: b""}
    assert reader.left == 0


@given(st.binary(max_size=40))
def test_any_bytes_are_fields_or_refused(raw: bytes) -> None:
    for read in (
        FieldReader.string,
        FieldReader.nullable_blob,
        FieldReader.compact_string,
        FieldReader.varint,
        FieldReader.tags,
        lambda reader: reader.array(FieldReader.string),
        lambda reader: reader.compact_array(FieldReader.int8),
    ):
        reader = FieldReader(raw)
        try:
            read(reader)
        except InvalidRecordError:
            continue
        assert 0 <= reader.left <= len(raw)


def test_a_count_that_lies_costs_no_memory() -> None:
    with pytest.raises(InvalidRecordError, match="an array of 2147483647, with 1 bytes left"):
        FieldReader(b"\x7f\xff\xff\xff\x00").array(FieldReader.int8)


def test_a_string_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidRecordError, match="40000"):
        FieldWriter().string("x" * 40_000)
