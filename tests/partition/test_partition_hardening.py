"""Faults that an attack on the engine found, each as the promise it broke."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from logstore import (
    CorruptLogError,
    DiskFullError,
    InvalidRecordError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    Partition,
    Record,
    RecordTooLargeError,
)
from logstore.files.directory import Directory
from logstore.files.small_file import with_checksum
from logstore.testing.reference import ReferenceRecord, encode_batch
from tests.conftest import MakeLog


def test_a_value_near_2_gib_is_refused_not_cut(make_log: MakeLog) -> None:
    largest = (1 << 31) - 1
    log = make_log(max_message_bytes=largest, segment_bytes=largest)
    huge = memoryview(mmap.mmap(-1, 3 << 30))  # pages that are not touched take no memory
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
        assert started.wait(60)
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
            patch.setattr(f"logstore.log.segment.Segment.{broken}", full)
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
    if act == "truncate":
        with pytest.raises(LogTruncatedError) as caught:
            next(records)
        records = iter(log.scan(caught.value.truncated_to, follow=True, timeout=5))
        assert [next(records).value for _ in range(5)] == [b"new"] * 5
    assert next(records).value == b"last"


def test_a_trim_that_cannot_be_written_down_did_not_happen(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    log.extend([b"x"] * 10)
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> None:
            raise DiskFullError(28, "No space left on device")

        patch.setattr("logstore.log.state.PartitionState.write", full)
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
        patch.setattr("logstore.log.state.PartitionState.write", full)
        patch.setattr("logstore.log.state.DurableMark.write", full)
        log.append(b"a")
        log.roll()
        log.parts.active.durability._mark_due = 0
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

        patch.setattr(log.parts.appender, "write_batches", full)
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


# ---- numbers that do not fit into 64 bits ----


def test_numbers_beyond_64_bits_are_clamped_or_refused_by_name(log: Partition) -> None:
    log.extend([b"a", b"b", b"c"])
    huge = 1 << 70
    assert [record.value for record in log.tail(huge)] == [b"a", b"b", b"c"]
    assert [record.value for record in log.scan(0, huge)] == [b"a", b"b", b"c"]
    assert [record.value for record in log[1:huge]] == [b"b", b"c"]
    assert [record.value for record in log[-huge:]] == [b"a", b"b", b"c"]
    assert list(log.scan(huge)) == list(log.scan(huge, huge + 1)) == []
    assert len(list(log.scan(max_records=huge))) == 3
    assert sum(len(columns) for columns in log.scan().columns(rows=huge)) == 3
    assert [columns.offsets.tolist() for columns in log.scan(1, huge).columns()] == [[1, 2]]
    assert len(list(log.scan(follow=True, timeout=1e300, max_records=3))) == 3
    assert log.offset_for_time(-1 << 63) == log.offset_for_time(-huge) == 0
    assert log.offset_for_time(huge) == log.offset_for_time((1 << 63) - 1) == 3
    for act in (lambda: log[huge], lambda: log[-huge], lambda: log.trim(huge),
                lambda: log.truncate(huge), lambda: log.read_batches(huge)):  # fmt: skip
        with pytest.raises(OffsetOutOfRangeError):
            act()


def test_the_last_offsets_there_are_are_given_out_once(make_log: MakeLog, tmp_path: Path) -> None:
    last = (1 << 63) - (1 << 31) - 1  # no batch starts above this: its last offset + 1 is an int64
    first = last - 3
    (tmp_path / "orders-0").mkdir()
    (tmp_path / "orders-0" / f"{first:020d}.log").touch()
    log = make_log()
    assert log.end_offset == first
    assert log.append(b"a") == first
    with pytest.raises(
        InvalidRecordError, match=f"no offsets are left for 3 records from offset {first + 1} on"
    ):
        log.extend([b"b", b"c", b"d"])
    assert list(log.extend([b"b", b"c"])) == [first + 1, first + 2]
    with pytest.raises(InvalidRecordError, match="no offsets are left"):
        log.append(b"d")
    log.close()
    log = make_log()
    assert log.end_offset == last
    assert [record.value for record in log] == [b"a", b"b", b"c"]
    assert log[-1].value == b"c"
    log.check()


# ---- side files with a right checksum and wrong contents ----


def forged(name: str, value: object) -> bytes:
    """A state file with the right checksum and a wrong field."""
    fields: dict[str, object] = {
        "clean": True, "version": 3, "boot": "", "recovery_point": 0, "start_offset": 0,
        "end_offset": 3, "dense_from": 0, "segments": 1, "active_base": 0, "active_bytes": 1,
        "active_indexes_crc": 0, "first_timestamp": -1,
    }  # fmt: skip
    fields[name] = value
    return json.dumps(fields).encode()


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        *(forged(name, "x") for name in ("clean", "version", "start_offset", "segments")),
        *(forged(name, None) for name in ("boot", "end_offset", "dense_from", "active_bytes")),
        *(forged(name, 1.5) for name in ("recovery_point", "first_timestamp")),
        *(forged(name, -5) for name in ("start_offset", "recovery_point", "dense_from")),
        *(forged(name, 1 << 70) for name in ("start_offset", "version", "dense_from")),
        *(forged(name, [1]) for name in ("active_base", "active_indexes_crc")),
        b"[" * 30_000,
        b"null",
        b"[]",
        b"{}",
    ],
)
def test_a_state_with_the_right_checksum_and_wrong_contents_is_no_state(
    make_log: MakeLog, body: bytes, readonly: bool
) -> None:
    log = make_log()
    log.extend([b"a", b"b", b"c"])
    log.close()
    path = log.path / "logstore.state"
    path.write_bytes(with_checksum(body))
    log = make_log(readonly=readonly)
    assert not log.recovery.clean
    assert [record.value for record in log] == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    "head",
    [b"[]", b"null", b"[" * 30_000, b'{"base": "x", "position": 0, "later": []}',
     b'{"base": 0, "position": -1, "later": []}', b'{"base": 0, "position": 0, "later": ["a"]}',
     b'{"base": 0, "position": 0, "later": 5}'],
)  # fmt: skip
def test_a_plan_with_the_right_checksum_and_wrong_contents_cuts_nothing(
    make_log: MakeLog, head: bytes
) -> None:
    log = make_log()
    log.extend([b"a", b"b", b"c"])
    log.close()
    body = head + b"\n"
    (log.path / "truncate.plan").write_bytes(b"%08x\n%b" % (crc32c(body), body))
    reader = make_log(readonly=True)
    assert [record.value for record in reader] == [b"a", b"b", b"c"]
    log = make_log()
    assert [record.value for record in log] == [b"a", b"b", b"c"]


# ---- a handle that is forgotten ----


def test_a_forgotten_partition_gives_its_lock_back_at_once(tmp_path: Path) -> None:
    """Without the garbage collector: nothing may keep a partition alive in a circle."""
    gc.disable()
    try:
        log = Partition.open(tmp_path / "orders-0")
        log.append(b"a")
        list(log.scan())
        list(log.scan().columns())
        with log.writer() as out:
            out.append(b"b")
        with pytest.warns(ResourceWarning, match="dropped without close"):
            del log, out
        Partition.open(tmp_path / "orders-0").close()
    finally:
        gc.enable()


# ---- numbers that are not ints ----


@pytest.mark.parametrize("act", ["trim", "truncate", "become_leader"])
@pytest.mark.parametrize("number", [3.0, 2.5, "3", None, True])
def test_offsets_and_epochs_are_ints_or_nothing_happens(
    tmp_path: Path, act: str, number: object
) -> None:
    with Partition.open(tmp_path / "t-0") as log:
        log.extend([b"x"] * 10)
        with pytest.raises(TypeError, match="int"):
            getattr(log, act)(number)
        assert (log.start_offset, log.end_offset, log.leader_epoch) == (0, 10, 0)
        assert len(list(log)) == 10


# ---- a cut while a reader opens the file ----


def test_a_cut_waits_for_a_reader_that_opens_the_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that was opened before the cut must not take the segment's place after it."""
    with Partition.open(tmp_path / "t-0", config={"segment.bytes": 1024}) as log:
        for i in range(20):
            log.append(b"v%d" % i + b"x" * 100)
        cold = log.segments[0]
        cold.release()
        opened, go_on = threading.Event(), threading.Event()
        real_open = Directory.open

        def slow_open(self: Directory, name: str, **how: bool) -> Any:
            file = real_open(self, name, **how)
            if threading.current_thread() is reader and name.endswith(".log"):
                opened.set()
                go_on.wait(0.5)
            return file

        monkeypatch.setattr(Directory, "open", slow_open)
        reader = threading.Thread(target=lambda: log[0])
        reader.start()
        assert opened.wait(60)
        log.truncate(4)
        go_on.set()
        reader.join(60)
        monkeypatch.undo()
        assert [record.value[:2] for record in log if record.value] == [b"v0", b"v1", b"v2", b"v3"]
        assert log.append(b"next") == 4
        log.check()


# ---- indexes of aborted transactions ----


def aborted_log(path: Path) -> None:
    with Partition.open(path) as log:
        for number in range(4):
            record = Record(b"T%d" % number, timestamp=int(time.time() * 1000))
            raw = encode_batch([record], transactional=True, producer_id=3, producer_epoch=0,
                               base_sequence=number)  # fmt: skip
            log.append_batch(raw)
            log.end_transaction(3, 0, commit=number % 2 == 0)
        log.roll()
        log.append(b"x")


@pytest.mark.parametrize("damage", [b"", b"hello world\n", "half"])
def test_a_short_index_of_aborted_transactions_is_rebuilt(
    tmp_path: Path, damage: bytes | str
) -> None:
    aborted_log(tmp_path / "t-0")
    index = tmp_path / "t-0" / f"{0:020}.txnindex"
    index.write_bytes(index.read_bytes()[:40] if isinstance(damage, str) else damage)
    for readonly in (True, False):
        with Partition.open(tmp_path / "t-0", readonly=readonly) as log:
            committed = [record.value for record in log.scan(isolation="read_committed")]
            assert committed == [b"T0", b"T2", b"x"]


def test_damage_of_the_log_is_not_taken_for_damage_of_its_transaction_index(
    tmp_path: Path,
) -> None:
    aborted_log(tmp_path / "t-0")
    file = tmp_path / "t-0" / f"{0:020}.log"
    content = bytearray(file.read_bytes())
    content[70] ^= 1
    file.write_bytes(content)
    for name in ("logstore.state", "logstore.durable"):
        (tmp_path / "t-0" / name).unlink()
    for snapshot in (tmp_path / "t-0").glob("*.snapshot"):
        snapshot.unlink()
    with contextlib.suppress(CorruptLogError), Partition.open(tmp_path / "t-0"):
        pass
    assert file.exists() and file.read_bytes()[:70] == content[:70]


# ---- side files with a right checksum and nonsense ----


def planted(path: Path, body: object) -> None:
    text = json.dumps(body).encode()
    path.write_bytes(b"%08x\n%b" % (crc32c(text), text))


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ({"base_offset": 0, "suffixes": ["/../../victim"], "size_bytes": 1, "crc": 0}, [0]),
        ({"base_offset": 0, "suffixes": [], "size_bytes": 1, "crc": 0}, [0]),
        ({"base_offset": "0", "suffixes": [".log"], "size_bytes": 1, "crc": 0}, [0]),
        ({"base_offset": 0, "suffixes": [".log"], "size_bytes": -1, "crc": 0}, [0]),
        ({"base_offset": 0, "suffixes": [".log"], "size_bytes": 1, "crc": 0}, []),
        ({"base_offset": 0, "suffixes": [".log"], "size_bytes": 1, "crc": 0}, [0, None]),
        ({"base_offset": 5, "suffixes": [".log"], "size_bytes": 1, "crc": 0}, [0, 3]),
    ],
)
def test_a_swap_plan_that_makes_no_sense_is_ignored(
    tmp_path: Path, new: dict[str, object], old: list[object]
) -> None:
    with Partition.open(tmp_path / "t-0") as log:
        log.extend([b"x"] * 5)
    planted(tmp_path / "t-0" / "swap.plan", {"new": new, "old": old})
    for readonly in (True, False):
        with Partition.open(tmp_path / "t-0", readonly=readonly) as log:
            assert len(list(log)) == 5


def test_a_state_that_ends_before_it_starts_is_ignored(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "t-0") as log:
        log.extend([b"x"] * 10)
    state = tmp_path / "t-0" / "logstore.state"
    fields = json.loads(state.read_bytes().partition(b" ")[2])
    body = json.dumps(fields | {"start_offset": 5, "end_offset": 3}).encode()
    state.write_bytes(with_checksum(body))
    with Partition.open(tmp_path / "t-0") as log:
        assert len(list(log)) == 10 and log.append(b"y") == 10
