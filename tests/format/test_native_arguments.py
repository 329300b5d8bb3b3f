"""The C extension with arguments and callbacks that the engine never passes: an error, no more."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logstore import _native
from logstore.format import codecs
from logstore.log.segment_contents import decompress
from logstore.testing import ReferenceRecord, encode_batch

OFFSET_MAX = (1 << 62) - 1


def batches(count: int, *, codec: int = 0) -> bytes:
    """`count` batches of one record with a header."""
    return b"".join(
        encode_batch(
            [ReferenceRecord(b"%05d" % n * 2000, b"k", (("name", b"%05d" % n),), 1, n)],
            base_offset=n,
            codec=codec,
        )
        for n in range(count)
    )


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def file_of(directory: int, content: bytes, name: str = "0.log") -> _native.File:
    file = _native.File(directory, name, name, write=True, create=True)
    file.append_at(content, 0)
    file.end = len(content)
    return file


def scan_of(file: _native.File, unpack: Any = decompress) -> _native.SegmentScan:
    return _native.SegmentScan(
        file, None, 0, 0, OFFSET_MAX, OFFSET_MAX, -1, True, False, None, 0, unpack, 1 << 20
    )


def test_a_finalizer_cannot_move_the_scan_that_makes_a_record(directory: int) -> None:
    """Allocating a record may run the garbage collector, whose finalizers are any Python code."""
    scan = scan_of(file_of(directory, batches(60)))
    outcomes: list[object] = []

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            if scanning:
                try:
                    outcomes.append(next(scan))
                except ValueError as error:
                    outcomes.append(error)

    seen = []
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(60):
            Cycle()
            scanning = True
            record = next(scan)
            scanning = False
            seen.append((record.offset, record.value, record.headers))
    finally:
        gc.set_threshold(*thresholds)
    assert seen == [(n, b"%05d" % n * 2000, (("name", b"%05d" % n),)) for n in range(60)]
    assert all(isinstance(outcome, ValueError) for outcome in outcomes)


@pytest.mark.parametrize("fails", [False, True])
def test_a_view_that_a_codec_keeps_cannot_be_read_later(directory: int, fails: bool) -> None:
    kept: list[memoryview] = []

    def keep(codec: int, payload: memoryview, limit: int) -> bytes:
        kept.append(payload)
        if fails:
            raise ValueError("no such codec")
        return codecs.decompress(codec, payload, limit)

    file = file_of(directory, batches(1, codec=1))
    try:
        next(scan_of(file, keep))
    except ValueError:
        assert fails
    with pytest.raises(ValueError, match="released"):
        bytes(kept[0])


def test_a_file_is_not_cut_to_a_negative_size(directory: int) -> None:
    file = file_of(directory, b"content")
    with pytest.raises(ValueError):
        file.truncate(-1)
    assert (file.end, file.size()) == (7, 7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base_offset", -1),
        ("next_offset", 4),
        ("segment_bytes", -(1 << 63)),
        ("segment_ms", -1),
        ("index_bytes", -1),
        ("created_ms", -(1 << 63)),
        ("last_indexed_position", -(1 << 63)),
        ("max_timestamp_offset", -(1 << 63)),
    ],
)
def test_a_segment_writer_refuses_numbers_that_overflow(
    directory: int, name: str, value: int
) -> None:
    numbers = {
        **{"base_offset": 5, "next_offset": 5, "interval_bytes": 4096, "segment_bytes": 1 << 30},
        **{"segment_ms": 1000, "index_bytes": 4096, "created_ms": 0, "first_timestamp": -1},
        **{"max_timestamp": -1, "max_timestamp_offset": -1, "last_indexed_position": 0},
        **{"min_timestamp": 0, name: value},
    }
    file = file_of(directory, b"")
    with pytest.raises(ValueError):
        _native.SegmentWriter(file, offsets=b"", times=b"", **numbers)


LEAST, GREATEST = -(1 << 63), (1 << 63) - 1


def test_readers_refuse_numbers_that_overflow(directory: int) -> None:
    file = file_of(directory, batches(1))
    unused = (None, 0, decompress, 1 << 20)
    for base, start, offset_max in ((LEAST, 5, 9), (5, LEAST, 9), (0, 0, GREATEST)):
        with pytest.raises(ValueError):
            _native.SegmentScan(
                file, None, base, start, OFFSET_MAX, offset_max, -1, True, False, *unused
            )
    for base, offset in ((LEAST, 5), (5, LEAST)):
        with pytest.raises(ValueError):
            _native.SegmentScan.get(file, None, base, offset, *unused)
    for position, limit in ((LEAST, 100), (GREATEST, 100), (0, LEAST)):
        with pytest.raises(ValueError):
            _native.find_batch(file, position, limit, 0, OFFSET_MAX)
    for base, position, limit, next_offset in (
        *((LEAST, 0, 100, 0), (0, LEAST, 100, 0)),
        *((0, 0, LEAST, 0), (0, 0, 100, LEAST)),
        *((0, 101, 100, 0), (0, GREATEST, 0, 0)),
    ):
        with pytest.raises(ValueError):
            _native.scan_prefix(file, base, position, limit, next_offset, 4096, True, None)


def test_a_map_refuses_an_offset_that_has_no_next(directory: int) -> None:
    file = file_of(directory, b"no batch" * 20)
    unused = (1 << 20, 0, _native.Transactions(b""), decompress, 1 << 20, 4096)
    with pytest.raises(ValueError, match="cannot read"):
        _native.OffsetMap(4096, b"s" * 16).read(file, 0, file.end, 0, GREATEST, *unused)


def test_a_file_is_not_read_up_to_a_negative_size(directory: int) -> None:
    file_of(directory, b"content")
    with pytest.raises(ValueError, match="-1 bytes"):
        _native.read_file(directory, "0.log", "0.log", -1)


def test_a_cleaner_refuses_offsets_below_its_base(directory: int) -> None:
    file = file_of(directory, batches(1))
    cleaner = _native.Cleaner(
        file_of(directory, b"", "1.log"),
        **{"base_offset": 5, "interval_bytes": 4096, "offset_map": None, "key": b"x"},
        **{"transactions": None, "producers": [], "start_offset": 0, "end_offset": 9},
        **{"now_ms": 0, "delete_retention_ms": 0, "decompress": decompress},
        **{"compress": codecs.compress, "payload_max": 1 << 20, "io_bytes": 4096},
    )
    with pytest.raises(ValueError, match="offsets 0 to"):
        cleaner.feed(file, 0, file.end, 0, OFFSET_MAX, 1 << 20)


def test_a_span_of_any_numbers(directory: int) -> None:
    content = batches(20)
    file = file_of(directory, content)
    span = _native.SegmentScan.span
    size = len(content) // 20
    assert span(file, None, 0, 3, 5, 1 << 62, True) == (3 * size, 2 * size, 5)
    assert span(file, None, 0, 3, 5, -(1 << 63), False) == (3 * size, 0, 3)
    assert span(file, None, 0, 3, -(1 << 63), 1, True) == (3 * size, 0, 3)
    assert span(file, None, 0, 20, (1 << 63) - 1, 1, True) is None
    for index in (b"\xff" * 80, b"\x7f" * 80, b"\x00" * 7, bytes(range(240))):
        assert span(file, index, 0, 3, 20, 1 << 40, True) == (3 * size, 17 * size, 20)
    for arguments in (
        (file,),
        (None,) * 7,
        (file, 1, 0, 0, 1, 1, True),
        (file, None, -1) + (0,) * 4,
    ):
        with pytest.raises((TypeError, ValueError)):
            span(*arguments)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        span(file, None, 0, 3, 5, 100, True)


def test_a_batch_that_is_checked_and_placed_from_any_buffer(directory: int) -> None:
    raw = batches(1)
    assert _native.check_batch(memoryview(raw)) == (1, 1, 0, 1)
    for wrong in (b"", raw[:60], raw[:-1], raw + b"x", batches(1, codec=1), bytes(len(raw))):
        assert _native.check_batch(wrong) is None
    with pytest.raises(TypeError):
        _native.check_batch(None)  # type: ignore[arg-type]
    file = file_of(directory, b"")
    writer = _native.SegmentWriter(
        file, base_offset=0, next_offset=7, interval_bytes=0, segment_bytes=len(raw) + 1,
        segment_ms=1 << 60, index_bytes=1000, created_ms=0, offsets=b"", times=b"",
        first_timestamp=-1, max_timestamp=-1, max_timestamp_offset=-1, last_indexed_position=0,
        min_timestamp=(1 << 63) - 1,
    )  # fmt: skip
    for wrong, offset in ((raw, 6), (raw[:-1], 7), (b"", 7), (raw, -1), (bytes(100), 7)):
        with pytest.raises(ValueError, match="no batch"):
            writer.append_placed(wrong, offset, 0, 0, 0)
    assert writer.append_placed(bytearray(raw), 9, 4, 1, 0)
    assert (writer.next_offset, file.end) == (10, len(raw))
    placed = (9).to_bytes(8, "big") + raw[8:12] + (4).to_bytes(4, "big") + raw[16:]
    assert file.pread(1 << 20, 0) == placed
    assert not writer.append_placed(raw, 10, 4, 1, 0)
    file.close()
