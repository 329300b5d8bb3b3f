"""Opening again: after a clean close, after a crash, and over damage.

A crash is played by copying the directory while it is open: what a killed process leaves.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from logstore import (
    CorruptLogError,
    InvalidNameError,
    NotALogError,
    OffsetOutOfRangeError,
    Partition,
    PartitionConfig,
    Record,
    UnsupportedFormatError,
    _native,
)
from logstore.log import state
from logstore.recovery import loader
from logstore.recovery.truncation_plan import TruncationPlan
from logstore.testing import check_invariants
from tests.conftest import MakeLog
from tests.kit import crash, flip, values, with_crc

SMALL = {"segment_bytes": 4096, "index_interval_bytes": 256}


def active_log(path: Path) -> Path:
    return max(path.glob("*.log"))


def open_log(path: Path, **config: int) -> Partition:
    return Partition.open(path, durability="os", config=config or None)


# ---- clean ----


def test_a_clean_reopen_reads_no_record_data(make_log: MakeLog) -> None:
    log = make_log(**SMALL)
    for _ in range(500):
        log.append(b"x" * 100)
    path = log.path
    log.close()
    script = (
        "import sys, logstore\n"
        "log = logstore.Partition.open(sys.argv[1])\n"
        "assert log.recovery.clean and log.end_offset == 500\n"
    )
    trace = path.parent / "trace"
    if shutil.which("strace") is None:
        # Damage that any look at the data would notice.
        for segment in path.glob("*.log"):
            segment.write_bytes(b"\xff" * segment.stat().st_size)
        subprocess.run([sys.executable, "-W", "ignore", "-c", script, path], check=True)
        return
    subprocess.run(
        ["strace", "-f", "-y", "-e", "trace=pread64,read", "-o", trace,
         sys.executable, "-W", "ignore", "-c", script, path],
        check=True,
    )  # fmt: skip
    assert ".log>" not in trace.read_text()


def test_closing_and_opening_keeps_everything(make_log: MakeLog) -> None:
    log = make_log(**SMALL)
    records = [Record(b"%d" % i, key=b"k" * (i % 50), timestamp=i) for i in range(300)]
    log.extend(records)
    log.trim(17)
    log.close()
    for _ in range(3):
        log = make_log(**SMALL)
        assert log.recovery.clean
        assert (log.start_offset, log.end_offset, log.durable_offset) == (17, 300, 300)
        assert values(log) == [b"%d" % i for i in range(17, 300)]
        assert log.offset_for_time(100) == 100
        check_invariants(log)
        log.close()


def test_a_clean_close_trims_indexes_and_writes_the_final_time_entry(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"x", timestamp=123)
    log.close()
    directory = log.path
    assert (directory / "00000000000000000000.timeindex").read_bytes() == struct.pack(">qi", 123, 0)
    assert (directory / "00000000000000000000.index").read_bytes() == b""


def test_files_are_private(make_log: MakeLog) -> None:
    log = make_log(**SMALL)
    for _ in range(100):
        log.append(b"x" * 100)
    log.close()
    assert log.path.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in log.path.iterdir()} == {
        path.name: 0o600 for path in log.path.iterdir()
    }


def test_a_stale_clean_mark_is_not_believed(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([b"a", b"b"])
    log.close()
    segment = active_log(log.path)
    segment.write_bytes(segment.read_bytes() + b"garbage that was appended behind our back")
    again = make_log()
    assert not again.recovery.clean
    assert values(again) == [b"a", b"b"]


# ---- unclean ----


def test_an_unclean_reopen_keeps_all_that_was_written(make_log: MakeLog) -> None:
    log = make_log(**SMALL)
    expected = [b"%d" % i * 20 for i in range(300)]
    log.extend(expected)
    again = open_log(crash(log), **SMALL)
    assert not again.recovery.clean
    assert again.recovery.torn == again.recovery.damage == []
    assert values(again) == expected
    assert again.durable_offset == again.end_offset == 300
    check_invariants(again)
    again.close()


def test_indexes_rebuilt_by_recovery_equal_the_originals(make_log: MakeLog) -> None:
    """The rebuilt index equals the index that it replaces."""
    log = make_log(**SMALL)
    for i in range(300):
        log.append(b"%d" % i, timestamp=i * 3 % 50)
    crashed = crash(log)
    log.close()
    for path in (*crashed.glob("*.index"), *crashed.glob("*.timeindex")):
        path.unlink()
    open_log(crashed, **SMALL).close()
    for suffix in ("*.index", "*.timeindex"):
        originals = {path.name: path.read_bytes() for path in log.path.glob(suffix)}
        assert originals == {path.name: path.read_bytes() for path in crashed.glob(suffix)}
        assert len(originals) > 3


JUNK = [b"\0" * 5000, b"\xff" * 100, random.Random(7).randbytes(3000), b"x"]


@pytest.mark.parametrize("junk", JUNK)
def test_garbage_behind_the_log_and_index_is_cut(make_log: MakeLog, junk: bytes) -> None:
    """Bytes after the last batch, or in an index, that are no records are cut off."""
    log = make_log()
    log.extend([b"%d" % i for i in range(100)])
    crashed = crash(log)
    segment = active_log(crashed)
    size = segment.stat().st_size
    segment.write_bytes(segment.read_bytes() + junk)
    (crashed / "00000000000000000000.index").write_bytes(os.urandom(77))
    again = open_log(crashed)
    (torn,) = again.recovery.torn
    assert (torn.position, torn.size_bytes, torn.offset) == (size, len(junk), 100)
    if junk.strip(b"\0"):
        assert torn.kept_as is not None
        assert torn.kept_as.read_bytes() == junk
    else:
        assert torn.kept_as is None
    assert values(again) == [b"%d" % i for i in range(100)]
    assert again.append(b"next") == 100
    again.close()
    assert open_close_values(crashed)[-1] == b"next"


def open_close_values(path: Path) -> list[bytes | None]:
    with open_log(path) as log:
        return values(log)


def test_sealed_segments_below_the_recovery_point_are_not_read(make_log: MakeLog) -> None:
    log = make_log(**SMALL)
    log.extend([b"x" * 100] * 300)
    log.sync()
    crashed = crash(log)
    again = open_log(crashed, **SMALL)
    assert again.recovery.segments_checked == 1
    assert len(again.segments) > 5
    again.close()


def test_progress_is_reported_and_can_stop_recovery(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([b"x" * 1000] * 1000)
    crashed = crash(log)
    seen: list[tuple[int, int]] = []
    Partition.open(crashed, durability="os", progress=lambda *now: seen.append(now)).close()
    assert seen[-1][0] == seen[-1][1] > 1_000_000

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    crashed = crash(log, "again-0")
    with pytest.raises(KeyboardInterrupt):
        Partition.open(crashed, progress=stop)
    with open_log(crashed) as again:
        assert again.end_offset == 1000


def test_a_crash_in_the_middle_of_a_truncation_is_finished(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log(**SMALL)
    log.extend([b"%d" % i * 30 for i in range(200)])

    class Killed(Exception):
        pass

    def die(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(TruncationPlan, "apply", die)
    with pytest.raises(Killed):
        log.truncate(77)
    with pytest.raises(ValueError, match="cannot be appended to"):
        log.append(b"no")
    crashed = crash(log)
    monkeypatch.undo()
    with open_log(crashed, **SMALL) as again:
        assert again.recovery.truncation_finished
        assert values(again) == [b"%d" % i * 30 for i in range(77)]
        check_invariants(again)


def test_truncate_leaves_nothing_unsynced_below_what_it_calls_durable(make_log: MakeLog) -> None:
    class Watched:
        """A file that still has to be synced."""

        def __init__(self, file: _native.File) -> None:
            self.file = file
            self.synced = False

        def datasync(self) -> None:
            self.file.datasync()
            self.synced = True

        def close(self) -> None:
            self.file.close()

    log = make_log(**SMALL)
    while len(log.segments) < 4:
        log.append(b"x" * 100)
    log.append(b"x" * 100)
    sealed = [Watched(file) for file in log.parts.active.durability._unsynced]
    assert len(sealed) == 3 * 3, "of each segment its log and two indexes"
    log.parts.active.durability._unsynced[:] = sealed  # type: ignore[assignment]
    log.truncate(log.end_offset - 1)
    assert log.durable_offset == log.end_offset
    assert all(file.synced for file in sealed)


@pytest.mark.parametrize("reopened", [False, True])
def test_truncate_reaches_into_sealed_segments(make_log: MakeLog, reopened: bool) -> None:
    log = make_log()
    for value in (b"x", b"y"):
        log.append(value)
    log.roll()
    log.append(b"z")
    if reopened:
        log.close()
        log = make_log()
    log.truncate(1)
    assert (values(log), log.end_offset) == ([b"x"], 1)
    assert log.append(b"w") == 1
    check_invariants(log)


# ---- what a directory may hold ----


def test_orphans_and_leftovers_are_swept(make_log: MakeLog) -> None:
    """An index without a .log file is deleted, a missing index is rebuilt."""
    log = make_log(**SMALL)
    log.extend([b"x" * 100] * 100)
    log.close()
    missing = sorted(log.path.glob("*.index"))[1]
    missing.unlink()
    for name in ("00000000000000099999.index", "00000000000000000000.log.deleted", "a.tmp"):
        (log.path / name).write_bytes(b"12345678")
    again = make_log(**SMALL)
    assert values(again) == [b"x" * 100] * 100
    assert missing.exists()
    assert not list(log.path.glob("*99999*"))
    assert not list(log.path.glob("*.deleted"))
    assert not list(log.path.glob("*.tmp"))
    check_invariants(again)


def test_an_unfinished_compaction_is_undone_and_a_finished_one_completed(
    make_log: MakeLog,
) -> None:
    log = make_log(**SMALL)
    for i in range(100):
        log.append(b"%d" % i, key=b"k" * 100)
    log.close()
    with make_log(**SMALL) as again:
        original = values(again)
    first, second = sorted(log.path.glob("*.log"))[:2]
    shutil.copy(second, first.with_name(first.name + ".cleaned"))
    again = open_log(crash(log, "undone-0"), **SMALL)
    assert values(again) == original
    again.close()
    undone = again.path
    shutil.copy(undone / first.name, undone / f"{first.name}.swap")
    again = open_log(undone, **SMALL)
    assert values(again) == original
    assert not list(undone.glob("*.swap"))
    again.close()


def test_a_directory_that_is_not_a_log_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "photos-1"
    foreign.mkdir()
    (foreign / "cat.jpg").write_bytes(b"meow")
    with pytest.raises(NotALogError, match=r"cat\.jpg"):
        Partition.open(foreign)
    assert (foreign / "cat.jpg").read_bytes() == b"meow"
    file = tmp_path / "file-0"
    file.write_bytes(b"")
    with pytest.raises(NotALogError, match="not a directory"):
        Partition.open(file)
    with pytest.raises(FileNotFoundError):
        Partition.open(tmp_path / "missing-0", create=False)
    with pytest.raises(FileNotFoundError):
        Partition.open(tmp_path / "missing-0", readonly=True)


@pytest.mark.parametrize(
    "name",
    ["orders", "orders-", "-0", "orders-x", "or ders-0", "o-99999999999", "a" * 250 + "-0", "..-0"],
)
def test_a_name_that_is_not_topic_n_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidNameError, match="topic-N"):
        Partition.open(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_no_symlink_inside_is_followed(make_log: MakeLog, tmp_path: Path) -> None:
    log = make_log()
    log.append(b"a")
    log.close()
    segment = active_log(log.path)
    moved = tmp_path / "elsewhere"
    segment.rename(moved)
    segment.symlink_to(moved)
    with pytest.raises((OSError, NotALogError)):
        make_log()


def test_message_formats_0_and_1_are_named_not_cut(make_log: MakeLog) -> None:
    log = make_log()
    log.close()
    body = (
        b"\x01\x00" + struct.pack(">q", 5) + struct.pack(">i", -1) + struct.pack(">i", 3) + b"old"
    )
    message = struct.pack(">I", zlib.crc32(body)) + body
    content = (struct.pack(">qi", 0, len(message)) + message) * 4
    segment = active_log(log.path)
    segment.write_bytes(content)
    with pytest.raises(UnsupportedFormatError, match="format 0 or 1"):
        make_log()
    assert segment.read_bytes() == content


def test_unknown_codec_bits_are_named(make_log: MakeLog) -> None:

    log = make_log()
    log.append(b"a")
    log.close()
    segment = active_log(log.path)
    content = bytearray(segment.read_bytes())
    content[22] |= 7
    segment.write_bytes(with_crc(content))
    with make_log() as again, pytest.raises(UnsupportedFormatError, match="unknown compression"):
        list(again)


# ---- damage ----


def three_batches(make_log: MakeLog, **config: int) -> tuple[Partition, list[int]]:
    """A log of three batches of ten, and where they start."""
    log = make_log(**config)
    positions = []
    for i in range(3):
        positions.append(log.segments[-1].size_bytes)
        log.extend([b"%d" % (10 * i + k) for k in range(10)])
    return log, positions


@pytest.mark.parametrize("clean", [True, False])
def test_damage_in_the_middle_hides_only_its_own_records(make_log: MakeLog, clean: bool) -> None:
    log, positions = three_batches(make_log)
    crashed = crash(log)
    log.close()
    path = log.path if clean else crashed
    flip(active_log(path), positions[1] + 80, 0x40)
    again = open_log(path)
    assert again.end_offset == 30
    with pytest.raises(CorruptLogError) as caught:
        list(again)
    error = caught.value
    assert error.path == str(active_log(path))
    assert (error.position, error.offsets) == (positions[1], range(10, 20))
    assert values(again.scan(20)) == [b"%d" % i for i in range(20, 30)]
    scan = again.scan(on_corrupt="skip")
    assert values(scan) == [b"%d" % i for i in [*range(10), *range(20, 30)]]
    (skipped,) = scan.skipped
    assert (skipped.position, skipped.end_position) == (positions[1], positions[2])
    assert skipped.offsets == range(10, 20)
    assert (again[5].value, again[25].value) == (b"5", b"25")
    with pytest.raises(CorruptLogError):
        again[15]
    with pytest.raises(CorruptLogError):
        again.check()
    if not clean:
        (damage,) = again.recovery.damage
        assert (damage.position, damage.offsets) == (positions[1], range(10, 20))
        assert again.recovery.torn == []
    assert again.append(b"30") == 30
    again.close()
    with open_log(path) as third:
        assert third[30].value == b"30"


@pytest.mark.parametrize("where", [0, 8, 11, 16, 17])
def test_a_damaged_header_is_walked_around(make_log: MakeLog, where: int) -> None:
    log, positions = three_batches(make_log)
    crashed = crash(log)
    flip(active_log(crashed), positions[1] + where, 0x40)
    with open_log(crashed) as again:
        assert again.end_offset == 30
        assert values(again.scan(on_corrupt="skip")) == [
            b"%d" % i for i in [*range(10), *range(20, 30)]
        ]
        with pytest.raises(CorruptLogError):
            list(again)


def test_a_damaged_durable_tail_is_not_taken_for_a_torn_one(make_log: MakeLog) -> None:
    log, positions = three_batches(make_log)
    log.sync()
    crashed = crash(log)
    flip(active_log(crashed), positions[2] + 80, 0x40)
    again = open_log(crashed)
    assert again.recovery.torn == []
    (damage,) = again.recovery.damage
    assert damage.offsets == range(20, 30)
    assert again.end_offset == 30, "its offsets are never given out again"
    assert values(again.scan(0, 20)) == [b"%d" % i for i in range(20)]
    with pytest.raises(CorruptLogError):
        again[25]
    assert again.append(b"30") == 30
    assert again[30].value == b"30"
    assert values(again.scan(on_corrupt="skip")) == [b"%d" % i for i in [*range(20), 30]]
    again.close()


def test_a_torn_tail_that_was_never_durable_is_cut(make_log: MakeLog) -> None:
    log, positions = three_batches(make_log)
    crashed = crash(log)
    segment = active_log(crashed)
    os.truncate(segment, segment.stat().st_size - 3)
    again = open_log(crashed)
    (torn,) = again.recovery.torn
    assert (torn.position, torn.offset) == (positions[2], 20)
    assert values(again) == [b"%d" % i for i in range(20)]
    assert again.append(b"20") == 20
    again.close()


def test_after_a_power_cut_the_log_is_a_prefix(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have kept a later page and lost an earlier one."""
    log, positions = three_batches(make_log)
    crashed = crash(log)
    content = bytearray(active_log(crashed).read_bytes())
    content[positions[1] : positions[2]] = bytes(positions[2] - positions[1])
    active_log(crashed).write_bytes(content)
    monkeypatch.setattr(loader, "boot_id", lambda: "another boot")
    again = open_log(crashed)
    assert values(again) == [b"%d" % i for i in range(10)]
    (torn,) = again.recovery.torn
    assert torn.kept_as is not None
    assert torn.kept_as.stat().st_size == len(content) - positions[1]
    again.close()


def test_a_power_cut_in_a_sealed_segment_sets_later_ones_aside(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log(segment_bytes=1024)
    for i in range(30):
        log.append(b"%d" % i, key=b"x" * 200)
    crashed = crash(log)
    second = sorted(crashed.glob("*.log"))[1]
    os.truncate(second, 100)
    monkeypatch.setattr(loader, "boot_id", lambda: "another boot")
    again = open_log(crashed, segment_bytes=1024)
    end = again.end_offset
    assert values(again) == [b"%d" % i for i in range(end)]
    assert end < 10
    assert len(again.recovery.set_aside) > 3
    assert again.append(b"x") == end
    again.close()


def test_a_read_error_is_never_taken_for_a_torn_tail(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = three_batches(make_log)
    crashed = crash(log)
    before = active_log(crashed).read_bytes()

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("logstore._native.scan_prefix", fail)
    with pytest.raises(OSError, match="Input/output"):
        open_log(crashed)
    monkeypatch.undo()
    assert active_log(crashed).read_bytes() == before
    with open_log(crashed) as again:
        assert again.end_offset == 30


def test_a_misleading_index_costs_time_not_records(make_log: MakeLog) -> None:
    log = make_log(index_interval_bytes=100)
    for i in range(200):
        log.append(b"%d" % i)
    log.close()
    index = log.path / "00000000000000000000.index"
    entries = [list(entry) for entry in struct.iter_unpack(">ii", index.read_bytes())]
    assert len(entries) > 50
    for entry in entries[::2]:
        entry[1] += 7
    index.write_bytes(b"".join(struct.pack(">ii", *entry) for entry in entries))
    again = make_log(index_interval_bytes=100)
    for offset in range(200):
        assert again[offset].value == b"%d" % offset
        assert next(iter(again.scan(offset))).offset == offset


@pytest.mark.parametrize("name", [state.PartitionState.NAME, state.DurableMark.NAME])
@pytest.mark.parametrize("content", [b"", b"garbage", b"00000000 {}", None])
def test_unreadable_side_files_only_cost_a_check(
    make_log: MakeLog, name: str, content: bytes | None
) -> None:
    log, _ = three_batches(make_log)
    crashed = crash(log)
    if content is None:
        (crashed / name).unlink()
    else:
        (crashed / name).write_bytes(content)
    with open_log(crashed) as again:
        assert values(again) == [b"%d" % i for i in range(30)]


@pytest.mark.parametrize("state", ["there", "lost"])
def test_offsets_of_a_log_whose_files_are_gone_are_not_given_out_again(
    make_log: MakeLog, state: str
) -> None:
    log = make_log()
    log.extend([b"%d" % i for i in range(10)])
    log.close()
    (log.path / f"{0:020d}.log").unlink()
    if state == "lost":
        (log.path / "logstore.state").unlink()
    with make_log(readonly=True) as reader:
        assert [damage.offsets for damage in reader.recovery.damage] == [range(10)]
    log = make_log()
    assert not log.recovery.clean
    assert [damage.offsets for damage in log.recovery.damage] == [range(10)]
    assert "missing" in log.recovery.damage[0].reason
    with pytest.raises(OffsetOutOfRangeError):
        log[5]
    assert log.append(b"next") == 10
    log.close()
    log = make_log()
    assert log.recovery.clean
    assert [record.offset for record in log] == [10]
    log.check()


def test_a_log_that_ends_below_its_start_begins_anew(make_log: MakeLog) -> None:
    """A log whose checkpointed start is above its end starts again, empty, at that offset."""
    log, _ = three_batches(make_log)
    log.trim(25)
    crashed = crash(log)
    segment = active_log(crashed)
    os.truncate(segment, 100)
    (crashed / state.DurableMark.NAME).unlink()
    again = open_log(crashed)
    assert (again.start_offset, again.end_offset, values(again)) == (25, 25, [])
    assert again.append(b"x") == 25
    again.close()


def test_a_bomb_is_an_error_and_can_be_skipped(make_log: MakeLog) -> None:
    config = {"compression_type": "zstd", "max_decompressed_message_bytes": 100_000}
    log = make_log(**config)
    log.extend([b"before"])
    with make_log("bomb-0", compression_type="zstd") as source:
        source.extend([b"\0" * 500_000])
        (bomb,) = source.scan().batches()
    log.close()
    segment = active_log(log.path)
    segment.write_bytes(segment.read_bytes() + struct.pack(">q", 1) + bomb[8:])
    again = make_log(**config)
    with pytest.raises(CorruptLogError, match="100000"):
        list(again)
    assert values(again.scan(on_corrupt="skip")) == [b"before"]
    assert isinstance(PartitionConfig.of(config), PartitionConfig)
