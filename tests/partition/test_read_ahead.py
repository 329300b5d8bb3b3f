"""Long scans read ahead in a thread of their own, and call lz4 without the interpreter.

None of it may be seen: every test compares with what a short, plain reading gives.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from logstore import ClosedError, CorruptLogError, Partition, Record, _native
from logstore.format import codecs, lz4_codec
from logstore.record import Columns
from tests.kit import with_crc

MIB = 1 << 20
LONG = 12 * MIB  # well beyond what a scan reads alone


def values(total: int, *, size: int | None, seed: int = 7) -> list[bytes]:
    rng = random.Random(seed)
    made: list[bytes] = []
    left = total
    while left > 0:
        made.append(rng.randbytes(size if size is not None else rng.randrange(1, 4_000)))
        left -= len(made[-1])
    return made


def write(path: Path, records: list[bytes], compression: str | None = None) -> None:
    with (
        Partition.open(path, durability="os") as log,
        log.writer(compression=compression) as out,
    ):
        for number, value in enumerate(records):
            out.append(value, key=b"k" if number % 1_000 == 3 else None, timestamp=number)


@pytest.mark.parametrize("size", [100, 300, None], ids=["alike", "longer", "unlike"])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_a_long_scan_gives_every_record_in_every_form(
    tmp_path: Path, size: int | None, compression: str | None
) -> None:
    wanted = values(LONG, size=size)
    write(tmp_path / "t-0", wanted, compression)
    with Partition.open(tmp_path / "t-0", readonly=True) as log:
        offset = 0
        for record in log.scan():
            assert record.offset == record.timestamp == offset
            assert record.value == wanted[offset]
            assert record.key == (b"k" if offset % 1_000 == 3 else None)
            offset += 1
        assert offset == len(wanted)
        offset = 0
        for chunk in log.scan().columns(1_000):
            assert list(chunk.offsets) == list(range(offset, offset + len(chunk)))
            assert list(chunk.timestamps) == list(range(offset, offset + len(chunk)))
            taken = chunk.to_arrow()
            assert taken["value"].to_pylist() == wanted[offset : offset + len(chunk)]
            assert [
                number for number, key in enumerate(taken["key"].to_pylist(), offset) if key
            ] == [number for number in range(offset, offset + len(chunk)) if number % 1_000 == 3]
            offset += len(chunk)
        assert offset == len(wanted)


def test_records_that_are_kept_stay_what_they_were(tmp_path: Path) -> None:
    wanted = values(6 * MIB, size=100)
    write(tmp_path / "t-0", wanted)
    with Partition.open(tmp_path / "t-0", readonly=True) as log:
        kept_records: list[Record] = []
        kept_values: list[bytes] = []
        hashes: list[int] = []
        for record in log.scan():
            if record.offset % 3 == 0:
                kept_records.append(record)
            elif record.offset % 3 == 1:
                assert record.value is not None
                kept_values.append(record.value)
                hashes.append(hash(record.value))
            else:
                hash(record.value)  # cached in an object that is used again
        assert [record.value for record in kept_records] == wanted[::3]
        assert kept_values == wanted[1::3]
        assert hashes == [hash(bytes(bytearray(value))) for value in wanted[1::3]]
        seen = {record.value for record in log.scan()}
        assert seen == set(wanted)


def test_damage_far_into_a_long_scan_is_found(tmp_path: Path) -> None:
    wanted = values(LONG, size=100)
    write(tmp_path / "t-0", wanted)
    file = tmp_path / "t-0" / f"{0:020}.log"
    with file.open("r+b") as log_file:
        log_file.seek(8 * MIB + 12_345)
        byte = log_file.read(1)[0]
        log_file.seek(8 * MIB + 12_345)
        log_file.write(bytes([byte ^ 0x10]))
    with Partition.open(tmp_path / "t-0", readonly=True) as log:
        seen = 0
        with pytest.raises(CorruptLogError) as caught:
            for record in log.scan():
                assert record.value == wanted[seen]
                seen += 1
        assert caught.value.position is not None and caught.value.position <= 8 * MIB + 12_345
        rows = 0
        with pytest.raises(CorruptLogError):
            for chunk in log.scan().columns(500):
                rows += len(chunk)
        assert rows <= seen < len(wanted)
        scan = log.scan(on_corrupt="skip")
        assert sum(1 for _ in scan) + len(scan.skipped[0].offsets) == len(wanted)


def half_read(log: Partition) -> tuple[Iterator[Columns], Iterator[Record]]:
    """Return two scans that have read a part of the log: one of columns, one of records."""
    chunks = log.scan().columns(2_000)
    records = iter(log.scan())
    for _ in range(20):
        next(chunks)
    for _ in range(20_000):
        next(records)
    return chunks, records


def test_closing_under_a_long_scan_ends_it(tmp_path: Path) -> None:
    write(tmp_path / "t-0", values(LONG, size=100))
    for _ in range(5):
        log = Partition.open(tmp_path / "t-0", readonly=True)
        chunks, records = half_read(log)
        log.close()
        with pytest.raises(ClosedError):
            for _ in chunks:
                pass
        with pytest.raises(ClosedError):
            for _ in records:
                pass


def test_dropped_scans_leave_neither_threads_nor_descriptors(tmp_path: Path) -> None:
    write(tmp_path / "t-0", values(LONG, size=100))
    with Partition.open(tmp_path / "t-0", readonly=True) as log:

        def look() -> tuple[int, int]:
            gc.collect()
            return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

        list(log.scan(0, 10).columns())  # imports numpy, which starts threads of its own
        before = look()
        for _ in range(10):
            chunks, records = half_read(log)
        del chunks, records
        # A thread that an earlier test left may end while this test runs: fewer is no leak.  The
        # kernel lists a thread that was joined for a moment longer.
        deadline = time.monotonic() + 10
        while any(now > was for now, was in zip(look(), before, strict=True)):
            assert time.monotonic() < deadline, (look(), before)
            time.sleep(0.01)


def test_a_child_process_may_drop_its_parents_scan(tmp_path: Path) -> None:
    write(tmp_path / "t-0", values(LONG, size=100))
    with Partition.open(tmp_path / "t-0", readonly=True) as log:
        chunks = log.scan().columns(2_000)
        for _ in range(20):
            next(chunks)
        child = os.fork()
        if child == 0:
            try:
                del chunks
                gc.collect()
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert sum(len(chunk) for chunk in chunks) > 0


def test_many_scans_at_once(tmp_path: Path) -> None:
    wanted = values(LONG, size=100)
    write(tmp_path / "t-0", wanted)
    with Partition.open(tmp_path / "t-0") as log, ThreadPoolExecutor(6) as pool:

        def count_rows() -> int:
            return sum(len(chunk) for chunk in log.scan(0, len(wanted)).columns())

        def count_equal() -> int:
            records = zip(log.scan(0, len(wanted)), wanted, strict=True)
            return sum(record.value == value for record, value in records)

        counts = [pool.submit(count) for count in (count_rows, count_equal) * 3]
        log.extend([b"x"] * 10_000)
        assert [count.result() for count in counts] == [len(wanted)] * 6


@pytest.fixture
def lz4_by_python_alone() -> Iterator[None]:
    """Scans as they are where the lz4 package keeps its C functions to itself."""
    codecs.decompress(codecs.LZ4, codecs.compress(codecs.LZ4, b"x"), 10)
    _native.lend_lz4(0, 0)
    yield
    lz4_codec._lz4_block.cache_clear()


def test_lz4_is_read_the_same_with_and_without_the_interpreter(
    tmp_path: Path, lz4_by_python_alone: None
) -> None:
    wanted = values(3 * MIB, size=None) + [bytes(300_000), b"", b"x"]
    write(tmp_path / "t-0", wanted, "lz4")
    with Partition.open(tmp_path / "t-0", readonly=True) as log:
        assert [record.value for record in log.scan()] == wanted
        lz4_codec._lz4_block.cache_clear()
        lz4_codec._lz4_block()
        assert [record.value for record in log.scan()] == wanted


def test_a_damaged_lz4_block_under_a_right_checksum_is_told(tmp_path: Path) -> None:
    codecs.decompress(codecs.LZ4, codecs.compress(codecs.LZ4, b"x"), 10)  # lent by now
    write(tmp_path / "t-0", [b"abc" * 100] * 50, "lz4")
    file = tmp_path / "t-0" / f"{0:020}.log"
    raw = bytearray(file.read_bytes())
    raw[61 + 7 + 4 + 2 : 61 + 7 + 4 + 12] = b"\xff" * 10
    file.write_bytes(with_crc(raw))
    with Partition.open(tmp_path / "t-0", readonly=True) as log:
        with pytest.raises(CorruptLogError, match="lz4"):
            list(log.scan())
        with pytest.raises(CorruptLogError, match="lz4"):
            list(log.scan().columns())
