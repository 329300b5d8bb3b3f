"""A hostile environment: read-only media, lost permission, no directory, clocks that jump."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import logstore
from logstore import InvalidRecordError, ManualClock, Partition, RetentionPolicy
from tests.conftest import MakeLog

YEAR_MS = 365 * 86_400_000
NOW = 1_700_000_000_000


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """read_only(path): the same directory through a mount that refuses every change."""
    mounted: list[Path] = []

    def bind(path: Path) -> Path:
        where = tmp_path / "media"
        where.mkdir()
        steps = (["mount", "--bind", str(path), str(where)],
                 ["mount", "-o", "remount,ro,bind", str(where)])  # fmt: skip
        for step in steps:
            try:
                done = subprocess.run(step, capture_output=True, text=True, check=False)
            except OSError as error:
                pytest.skip(f"nothing can be mounted here: {error}")
            if done.returncode:
                if step is steps[1]:
                    subprocess.run(["umount", str(where)], check=False)
                pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        mounted.append(where)
        return where

    yield bind
    for where in mounted:
        subprocess.run(["umount", "-l", str(where)], check=False)


def test_read_only_media_are_read_and_refuse_a_writer(
    tmp_path: Path, read_only: Callable[[Path], Path]
) -> None:
    with logstore.open(tmp_path / "store", durability="os") as store:
        topic = store.create_topic("orders", config={"segment.bytes": 2000})
        for i in range(100):
            topic.append(b"%d" % i + bytes(40))
    for index in (tmp_path / "store" / "orders-0").glob("*.index"):
        index.unlink()  # rebuilt in memory
    media = read_only(tmp_path / "store")
    with logstore.open(media, readonly=True) as reader:
        log = reader["orders"][0]
        assert [record.offset for record in log] == list(range(100))
        assert log[57].value == b"57" + bytes(40)
        assert {problem.kind.value for problem in log.check()} == {"missing-index"}
    with pytest.raises(OSError):
        logstore.open(media)
    with pytest.raises(OSError):
        Partition.open(media / "orders-0")
    with logstore.open(media, readonly=True) as reader:
        assert reader["orders"][0].end_offset == 100


def test_permission_lost_while_writing_loses_nothing(tmp_path: Path) -> None:
    """Without root the directory's mode refuses new files; with it, an immutable directory does."""
    path = tmp_path / "orders-0"
    log = Partition.open(path, config={"segment.bytes": 2000})
    for i in range(10):
        log.append(b"%d" % i + bytes(40))
    restore = refuse_new_files(path)
    try:
        kept = 10
        for i in range(10, 60):
            try:
                log.append(b"%d" % i + bytes(40))
            except OSError:
                break
            kept += 1
        assert kept < 60  # a roll needs a new file
        assert [record.offset for record in log] == list(range(kept))
    finally:
        restore()
    assert log.append(b"allowed again") == kept
    log.close()
    with Partition.open(path) as log:
        assert log.end_offset == kept + 1
        assert log.check() == []


def refuse_new_files(path: Path) -> Callable[[], object]:
    if os.geteuid() != 0:
        path.chmod(0o500)
        return lambda: path.chmod(0o700)
    done = subprocess.run(["chattr", "+i", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"root is refused nothing here: {done.stderr.strip()}")
    return lambda: subprocess.run(["chattr", "-i", str(path)], check=True)


def test_a_directory_removed_under_us_is_an_error_and_no_crash(tmp_path: Path) -> None:
    store = logstore.open(tmp_path / "store")
    log = store.create_topic("orders", config={"segment.bytes": 2000})[0]
    for i in range(40):
        log.append(b"%d" % i + bytes(40))
    shutil.rmtree(tmp_path / "store")
    # What is open stays readable and, up to the next new file, writable; then it is an error.
    assert log[39].value == b"39" + bytes(40)
    with pytest.raises((OSError, logstore.LogStoreError)):
        for i in range(100):
            log.append(b"%d" % i + bytes(40))
    with pytest.raises((OSError, logstore.LogStoreError, BaseExceptionGroup)):
        store.close()
    with pytest.raises(FileNotFoundError):
        logstore.open(tmp_path / "store", create=False)


@pytest.mark.parametrize("jump", [-YEAR_MS, 15 * YEAR_MS, 0], ids=["-1y", "+15y", "frozen"])
def test_a_clock_that_jumps_empties_no_log(make_log: MakeLog, jump: int) -> None:
    clock = ManualClock(NOW)
    log = make_log(clock=clock, segment_bytes=2000, retention_ms=YEAR_MS // 52)
    for i in range(100):
        log.append(b"%d" % i + bytes(40))
    clock.leap(jump)  # without as many seconds having passed
    log.enforce()
    assert log.start_offset == 0
    assert [record.offset for record in log] == list(range(100))
    # A time that the caller gives is used.
    log.enforce(RetentionPolicy(max_age_ms=1), now=NOW + 15 * YEAR_MS)
    assert log.start_offset > 0


@pytest.mark.parametrize("jump", [-YEAR_MS, 15 * YEAR_MS, 0], ids=["-1y", "+15y", "frozen"])
def test_log_append_time_never_goes_back(make_log: MakeLog, jump: int) -> None:
    clock = ManualClock(NOW)
    log = make_log(clock=clock, message_timestamp_type="LogAppendTime")
    log.append(b"a", timestamp=5)
    clock.leap(jump)
    log.extend([b"b", b"c"])
    clock.leap(-jump)
    log.append(b"d")
    times = [record.timestamp for record in log]
    assert times == sorted(times)
    assert times[0] == NOW


def test_a_time_too_far_ahead_is_refused(make_log: MakeLog) -> None:
    log = make_log(clock=ManualClock(NOW), message_timestamp_after_max_ms=60_000)
    log.append(b"near", timestamp=NOW + 60_000)
    with pytest.raises(InvalidRecordError):
        log.append(b"far", timestamp=NOW + 60_001)
    assert log.end_offset == 1


def test_no_file_of_ours_is_inherited_or_stands_in_for_a_standard_stream(tmp_path: Path) -> None:
    script = """
import os, sys, subprocess
os.close(0); os.close(2)
import logstore
with logstore.open(sys.argv[1]) as store:
    log = store.create_topic("t")[0]
    log.append(b"x")
    log.roll()
    ours = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(sys.argv[1]):
            ours[int(name)] = target
    assert ours and min(ours) >= 3, ours
    assert not any(os.get_inheritable(fd) for fd in ours), ours
"""
    done = subprocess.run(
        [sys.executable, "-c", script,
         str(tmp_path / "store")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
