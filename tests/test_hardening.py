"""Faults that an attack on the engine found, each as the promise it broke."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

import pytest

from logstore import (
    DiskFullError,
    OffsetOutOfRangeError,
    Partition,
    Record,
    RecordTooLargeError,
)
from logstore.testing.reference import ReferenceRecord, encode_batch
from tests.conftest import MakeLog


def test_a_value_near_2_gib_is_refused_not_cut(make_log: MakeLog) -> None:
    largest = (1 << 31) - 1
    log = make_log(max_message_bytes=largest, segment_bytes=largest)
    huge = memoryview(mmap.mmap(-1, 3 << 30))  # pages that nobody touches take no memory
    with pytest.raises(RecordTooLargeError, match=str(3 << 30)):
        log.append(huge)  # type: ignore[arg-type]
    huge.release()
    assert log.end_offset == 0


def test_headers_of_threads_that_share_a_writer_do_not_mix(log: Partition) -> None:
    started = threading.Event()

    def slowly():  # type: ignore[no-untyped-def]
        yield ("a", b"A")
        started.set()
        time.sleep(0.1)

    with log.writer(linger=None) as out:
        other = threading.Thread(target=lambda: out.append(b"first", headers=slowly()))
        other.start()
        started.wait(5)
        out.append(b"second", headers=[("b", b"B" * 10)])
        other.join()
    assert {record.value: record.headers for record in log} == {
        b"first": (("a", b"A"),),
        b"second": (("b", b"B" * 10),),
    }


def test_a_roll_that_fails_half_way_changes_nothing(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    log.append(b"before")

    def full(*_: object, **__: object) -> None:
        raise DiskFullError(28, "No space left on device")

    for broken in ("flush_indexes", "activate"):
        with monkeypatch.context() as patch:
            patch.setattr(f"logstore.segment.Segment.{broken}", full)
            with pytest.raises(DiskFullError):
                log.roll()
        assert len(list(log.path.glob("*.log"))) == 1
    assert log.append(b"after") == 1
    log.close()
    assert [record.value for record in make_log()] == [b"before", b"after"]


def test_an_empty_file_left_inside_the_last_segment_is_dropped(make_log: MakeLog) -> None:
    log = make_log()
    for i in range(5):
        log.append(b"%d" % i)
    log.close()
    (log.path / f"{3:020d}.log").touch()
    again = make_log()
    assert [record.value for record in again] == [b"%d" % i for i in range(5)]
    assert again.append(b"5") == 5


@pytest.mark.parametrize("act", ["truncate", "reopen", "trim"])
def test_a_follower_goes_on_after_the_log_was_cut_or_loaded_anew(
    make_log: MakeLog, act: str
) -> None:
    log = make_log()
    log.extend([b"%d" % i for i in range(10)])
    reader = log if act == "truncate" else make_log(readonly=True)
    records = iter(reader.scan(follow=True, timeout=5))
    assert [next(records).offset for _ in range(10)] == list(range(10))
    if act == "truncate":
        log.truncate(5)
        log.extend([b"new"] * 5)
    elif act == "reopen":
        log.close()
        log = make_log()
    else:
        log.trim(3)
    threading.Timer(0.1, lambda: log.append(b"last")).start()
    assert next(records).value == b"last"


def test_a_trim_that_cannot_be_written_down_did_not_happen(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    log.extend([b"x"] * 10)
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> None:
            raise DiskFullError(28, "No space left on device")

        patch.setattr("logstore.checkpoint.PartitionState.write", full)
        with pytest.raises(DiskFullError):
            log.trim(5)
        assert (log.start_offset, log[1].value) == (0, b"x")
    log.trim(5)
    assert log.start_offset == 5


def test_a_mark_that_cannot_be_written_does_not_fail_the_append(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log(durability="fsync")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("logstore.checkpoint.PartitionState.write", full)
        patch.setattr("logstore.checkpoint.DurableMark.write", full)
        log.append(b"a")
        log.roll()
        log._mark_due = 0
        assert log.append(b"b") == 1
    assert log.append(b"c") == 2
    assert log.durable_offset == 3


def test_truncate_keeps_the_offsets_of_a_compacted_batch(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    path.mkdir()
    records = [
        ReferenceRecord(offset=offset, timestamp=1, key=b"k", value=b"%d" % offset, headers=())
        for offset in (0, 5, 9)
    ]
    (path / f"{0:020d}.log").write_bytes(encode_batch(records))
    with Partition.open(path, durability="os") as log:
        assert [record.offset for record in log] == [0, 5, 9]
        log.truncate(7)
        assert [(record.offset, record.value) for record in log] == [(0, b"0"), (5, b"5")]
        assert log.append(b"next") == 7


def test_what_could_not_be_read_again_is_not_written(make_log: MakeLog) -> None:
    log = make_log(compression_type="gzip", max_decompressed_message_bytes=2048)
    with pytest.raises(RecordTooLargeError):
        log.append(b"x" * 5000)
    log.extend([b"x" * 500] * 20)
    assert sum(1 for _ in log) == 20


def test_columns_of_a_log_with_a_huge_gap_are_quick(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    path.mkdir()
    for base in (0, 10**13):
        record = ReferenceRecord(offset=base, timestamp=1, key=None, value=b"v", headers=())
        (path / f"{base:020d}.log").write_bytes(encode_batch([record], base_offset=base))
    with Partition.open(path, durability="os") as log:
        assert [offset for c in log.scan().columns() for offset in c.offsets] == [0, 10**13]


def test_a_writer_on_a_full_disk_does_not_grow(
    log: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = log.writer(batch_bytes=1000, linger=None)
    with monkeypatch.context() as patch:

        def full(_: object) -> range:
            raise DiskFullError(28, "No space left on device")

        patch.setattr(log, "write_batches", full)
        failures = 0
        for _ in range(20_000):
            try:
                out.append(b"x" * 200)
            except DiskFullError:
                failures += 1
        assert failures > 10_000
        held = out.pending
        assert held < 20_000 - failures + 1
    out.close()
    assert log.end_offset == held


def test_records_beyond_the_trimmed_start_are_out_of_range(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([b"a", Record(b"b")])
    log.trim(1)
    with pytest.raises(OffsetOutOfRangeError):
        log[0]
