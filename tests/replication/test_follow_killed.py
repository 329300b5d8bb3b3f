"""Follow with real processes that are killed: neither side loses anything but time."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import logstore
from logstore import Follow, Partition
from tests.kit import PATIENCE, wait_until
from tests.replication.copies import is_prefix, raw_log

WRITER = """
import sys, time
import logstore

with logstore.open(sys.argv[1], durability="os", config={"segment.bytes": 200_000}) as store:
    topic = store.create_topic("orders", 2, exist_ok=True)
    print("ready", flush=True)
    for number in range(10**6):
        topic.extend([b"record %d" % number] * 20, partition=number % 2,
                     durability="fsync" if number % 16 == 0 else "os")
        time.sleep(0.001)
"""


def writer(path: Path) -> subprocess.Popen[bytes]:
    """Start a process that appends until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def follower(src: Path, dst: Path) -> subprocess.Popen[bytes]:
    """Start the command; return when it copies, or has ended."""
    shown = dst.with_name("shown.jsonl")
    with shown.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "logstore", "follow", src, dst, "--every", "0.1"],
            stdout=out,
            stderr=subprocess.PIPE,
        )
    wait_until(lambda: shown.stat().st_size > 0 or process.poll() is not None)
    return process


def killed(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def end_of(path: Path) -> int:
    try:
        with Partition.open(path, readonly=True) as log:
            return log.end_offset
    except (FileNotFoundError, logstore.NotALogError):
        return 0


def grows(following: subprocess.Popen[bytes], dst: Path) -> None:
    """Return when the copy has more records than now, or its process has ended."""
    before = end_of(dst / "orders-0")
    wait_until(lambda: end_of(dst / "orders-0") > before or following.poll() is not None)


def sides(src: Path, dst: Path) -> list[tuple[Path, Path]]:
    return [(dst / f"orders-{number}", src / f"orders-{number}") for number in range(2)]


@pytest.mark.parametrize("seed", range(2))
def test_kills_of_either_side_cost_nothing_but_time(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    src, dst = tmp_path / "src", tmp_path / "dst"
    writing = writer(src)
    following = follower(src, dst)
    try:
        for _ in range(5):
            grows(following, dst)
            time.sleep(chance.random() * 0.3)
            assert following.poll() is None, following.communicate()
            for copy, source in sides(src, dst):
                assert is_prefix(copy, source)
            if chance.random() < 0.5:
                killed(following)
                # As the kill left it, before recovery: still a prefix.
                for copy, source in sides(src, dst):
                    assert is_prefix(copy, source)
                following = follower(src, dst)
            else:
                killed(writing)
                writing = writer(src)
    finally:
        killed(writing)
        following.send_signal(signal.SIGINT)
        _, error = following.communicate(timeout=PATIENCE)
    assert (following.returncode, error) == (0, b"")
    with Follow(src, dst) as follow:
        assert follow.catch_up().lag_records == 0
    with logstore.open(dst, readonly=True) as copied:
        assert copied.check() == []
    for copy, source in sides(src, dst):
        with Partition.open(source, readonly=True) as log:
            assert end_of(copy) == log.end_offset
        assert raw_log(source).startswith(raw_log(copy))


def test_ctrl_c_ends_the_copy_cleanly(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    writing = writer(src)
    try:
        following = follower(src, dst)
        grows(following, dst)
        following.send_signal(signal.SIGINT)
        _, error = following.communicate(timeout=PATIENCE)
        assert (following.returncode, error) == (0, b"")
        # Closed cleanly: the next open recovers nothing.
        with logstore.open(dst) as copied:
            assert copied.recovery.clean
        for copy, source in sides(src, dst):
            assert is_prefix(copy, source)
    finally:
        killed(writing)


def test_a_second_process_on_the_same_target_is_refused(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    with logstore.open(src) as store:
        store.create_topic("orders", 2).append(b"x", partition=0)
        first = follower(src, dst)
        try:
            second = follower(src, dst)
            _, error = second.communicate(timeout=PATIENCE)
            assert second.returncode == 3
            assert f"locked by process {first.pid}" in error.decode()
        finally:
            killed(first)
