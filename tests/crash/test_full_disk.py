"""A disk that is really full: small file systems, filled to the last block, again and again.

Nothing acknowledged is lost, what is there can be read, deleting and closing and opening again work
without a free block, and once there is space the same handle writes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import logstore
from logstore import Compactor, DiskFullError, Partition, PartitionConfig, Producer, Store
from logstore.files.disk_reserve import RESERVE_NAME, free_bytes
from logstore.testing import Fault, inject_io
from tests.kit import kill

MiB = 1 << 20

MakeDisk = Callable[[str, int], Path]


def run(*command: str) -> str | None:
    """Return None if the command worked, else its error text."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr or f"status {done.returncode}").strip()


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[MakeDisk]:
    """make_disk("tmpfs" | "ext4", size): an empty file system of its own; skips where it cannot."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    mounted: list[Path] = []

    def make(kind: str, size: int) -> Path:
        where = tmp_path / f"disk{len(mounted)}"
        where.mkdir()
        if kind == "tmpfs":
            fault = run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where))
        else:
            if shutil.which("mkfs.ext4") is None:
                pytest.skip("there is no mkfs.ext4 here")
            image = tmp_path / f"disk{len(mounted)}.image"
            with image.open("wb") as file:
                file.truncate(size)
            fault = run("mkfs.ext4", "-q", "-F", "-m", "0", str(image)) or run(
                "mount", "-o", "loop", str(image), str(where)
            )
        if fault is not None:
            pytest.skip(f"{kind} cannot be mounted here: {fault}")
        mounted.append(where)
        return where

    yield make
    for where in reversed(mounted):
        assert run("umount", str(where)) is None or run("umount", "-l", str(where)) is None


def fill(
    append: Callable[[bytes], int], rng: random.Random, sizes: tuple[int, ...]
) -> DiskFullError:
    """Append until the disk is full, to the last small record; return the last error."""
    last: DiskFullError | None = None
    for size in sizes:
        while True:
            try:
                append(rng.randbytes(size))
            except DiskFullError as error:
                last = error
                break
    assert last is not None
    return last


class Ledger:
    """What a partition has acknowledged."""

    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}

    def append_to(self, log: Partition) -> Callable[[bytes], int]:
        def append(value: bytes) -> int:
            offset = log.append(value, key=b"k%d" % (log.end_offset % 5))
            assert offset not in self.values
            self.values[offset] = value
            return offset

        return append

    def check(self, log: Partition, *, gaps: bool = False) -> None:
        start = log.start_offset
        self.values = {o: value for o, value in self.values.items() if o >= start}
        found = {record.offset: record.value for record in log.scan()}
        if gaps:
            assert all(self.values[offset] == value for offset, value in found.items())
            self.values = {offset: self.values[offset] for offset in found}
        else:
            assert found == self.values


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_refuses_with_numbers_and_a_way_out(make_disk: MakeDisk, kind: str) -> None:
    root = make_disk(kind, 16 * MiB if kind == "tmpfs" else 32 * MiB)
    config = {"segment.bytes": MiB, "retention.bytes": 3 * MiB}
    ledger, rng = Ledger(), random.Random(1)
    with logstore.open(root / "store", config=config) as store:
        log = store.create_topic("orders")[0]
        error = fill(ledger.append_to(log), rng, (100_000, 3000, 10))
        assert error.free_bytes is not None
        assert error.free_bytes < 100_000
        assert error.needed_bytes is not None
        assert 10 <= error.needed_bytes < 200
        deletable = sum(d.size_bytes for d in log.enforce(dry_run=True) if d.delete)
        assert error.reclaimable_bytes == deletable > 0
        assert f"enforce() of this partition would free {deletable} bytes" in str(error)
        ledger.check(log)
        before = log.end_offset
        store.enforce()
        ledger.check(log)
        assert log.append(b"there is room again") == before
        ledger.values[before] = b"there is room again"
        assert (store.path / RESERVE_NAME).stat().st_size == MiB
    with logstore.open(root / "store", config=config) as store:
        assert store.recovery.clean
        ledger.check(store["orders"][0])
        assert store.check() == []


def test_without_anything_to_reclaim_other_ways_out_are_named(make_disk: MakeDisk) -> None:
    root = make_disk("tmpfs", 4 * MiB)
    with Partition.open(root / "orders-0", config={"segment.bytes": MiB}) as log:
        error = fill(log.append, random.Random(2), (100_000, 1000))
        assert error.reclaimable_bytes == 0
        assert "trim() could free up to" in str(error)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_topic_can_be_deleted_when_not_a_block_is_free(make_disk: MakeDisk, kind: str) -> None:
    root = make_disk(kind, 8 * MiB if kind == "tmpfs" else 32 * MiB)
    rng = random.Random(3)
    with logstore.open(root / "store", config={"segment.bytes": MiB}) as store:
        store.create_topic("going").append(b"x" * 500_000)
        kept = store.create_topic("kept")[0]
        fill(kept.append, rng, (100_000, 3000, 10))
        exhaust(root)
        with pytest.raises(DiskFullError):
            store.create_topic("new")
        assert sorted(store) == ["going", "kept"]
        store.delete_topic("going")
        assert sorted(store) == ["kept"]
        end = kept.end_offset
        assert kept.append(b"again") == end


def exhaust(root: Path) -> None:
    """Take the last free blocks."""
    with (root / "ballast").open("ab", buffering=0) as file:
        for size in (1 << 20, 65536, 4096, 512):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_closing_and_recovering_work_when_not_a_block_is_free(
    make_disk: MakeDisk, kind: str
) -> None:
    root = make_disk(kind, 8 * MiB if kind == "tmpfs" else 32 * MiB)
    ledger, rng = Ledger(), random.Random(4)
    config = {"segment.bytes": MiB}
    store = logstore.open(root / "store", config=config)
    log = store.create_topic("orders", 2)[0]
    fill(ledger.append_to(log), rng, (100_000, 3000, 10))
    exhaust(root)
    store.close()
    with logstore.open(root / "store", config=config) as store:
        ledger.check(store["orders"][0])
        exhaust(root)
        kill(store)
    with logstore.open(root / "store", config=config) as store:
        assert not store.recovery.clean
        assert not store.recovery.failed
        log = store["orders"][0]
        ledger.check(log)
        log.trim(log.end_offset // 2)
        ledger.check(log)
        ledger.append_to(log)(b"again")
        (root / "ballast").unlink()
        ledger.append_to(log)(rng.randbytes(200_000))
        store.sync()
        assert (store.path / RESERVE_NAME).stat().st_size == MiB
        ledger.check(log)


def test_a_lone_partition_has_a_reserve_of_its_own(make_disk: MakeDisk) -> None:
    root = make_disk("tmpfs", 4 * MiB)
    ledger, rng = Ledger(), random.Random(5)
    log = Partition.open(root / "orders-0", config={"segment.bytes": 500_000})
    fill(ledger.append_to(log), rng, (50_000, 3000, 10))
    exhaust(root)
    log.trim(3)
    assert log.start_offset == 3
    exhaust(root)
    log.close()
    with Partition.open(root / "orders-0") as log:
        ledger.check(log)


def test_a_transaction_is_aborted_when_not_a_block_is_free(make_disk: MakeDisk) -> None:
    """The first aborted transaction of a segment makes a file, which needs a block."""
    root = make_disk("tmpfs", 8 * MiB)
    with logstore.open(root / "store") as store:
        topic = store.create_topic("orders", 3)
        with Producer(store, "payments") as producer:
            transaction = producer.transaction()
            for number in range(3):
                producer.send("orders", b"aborted", partition=number)
            producer.flush()
            exhaust(root)
            transaction.abort()
        (root / "ballast").unlink()
        for log in topic:
            log.append(b"kept")
            assert [r.value for r in log.scan(isolation="read_committed")] == [b"kept"]
    with logstore.open(root / "store", readonly=True) as store:
        assert store.check() == []


def test_no_reserve_is_kept_when_none_is_wanted(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "store", reserve_bytes=0) as store:
        store.create_topic("t").append(b"x")
        assert not (store.path / RESERVE_NAME).exists()


def deleted_but_open(folder: Path) -> list[str]:
    """Return the files of a folder that have no name and are open in this process."""
    held = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held.append(os.readlink(link))
    return [path for path in held if str(folder) in path and "(deleted)" in path]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_deleted_segment_gives_its_blocks_back_at_once(tmp_path: Path) -> None:
    """No object holds its files open, not even for a later sync."""
    with Partition.open(
        tmp_path / "t-0", config=PartitionConfig(segment_bytes=4096), durability="os"
    ) as log:
        for _ in range(4):
            log.append(bytes(3000))
            log.roll()
        log.trim(log.end_offset)
        held = deleted_but_open(tmp_path)
    assert held == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_an_error_that_is_kept_holds_no_file_of_a_deleted_segment(tmp_path: Path) -> None:
    """Its traceback has the frames of the append: what they refer to lives as long as it does."""
    kept: list[DiskFullError] = []
    with Partition.open(
        tmp_path / "t-0", config=PartitionConfig(segment_bytes=4096), durability="os"
    ) as log:
        for size in (3000, 10):  # the second fails with and without a roll before it
            log.append(bytes(3000))
            full = Fault.fail(errno.ENOSPC, "pwrite", "*.log", forever=True)
            with inject_io(full), pytest.raises(DiskFullError) as raised:
                log.append(bytes(size))
            kept.append(raised.value)
            log.roll()
        log.trim(log.end_offset)
        held = deleted_but_open(tmp_path)
    assert held == []


CYCLES = {"tmpfs": 170, "ext4": 30}


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_two_hundred_times_full_and_back(make_disk: MakeDisk, kind: str) -> None:
    """Fill, then append, compact, roll, delete, crash, close: nothing is lost."""
    size = 6 * MiB if kind == "tmpfs" else 32 * MiB
    root = make_disk(kind, size)
    rng = random.Random(f"full disk {kind}")
    config = {
        "segment.bytes": 1_000_000 if kind == "tmpfs" else 6_000_000,
        "retention.bytes": size // 4,
        "cleanup.policy": "compact,delete",
        "max.message.bytes": 4 * MiB,
    }
    piece = size // 30
    ledger = Ledger()
    durability = "os"
    store = logstore.open(root / "store", config=config, durability=durability)
    store.create_topic("orders")
    try:
        for cycle in range(CYCLES[kind]):
            log = store["orders"][0]
            fill(ledger.append_to(log), rng, (piece, 10_000, 100))
            if cycle % 3 == 0:
                exhaust(root)
            act = rng.choice(["roll", "compact", "close", "crash", "create", "none"])
            if act == "roll":
                try_roll(log)
            elif act == "compact":
                compact(log)
                ledger.check(log, gaps=True)
            elif act == "create":
                exhaust(root)
                create_whole_or_not_at_all(store)
            elif act in ("close", "crash"):
                kill(store) if act == "crash" else store.close()
                store = logstore.open(root / "store", config=config, durability=durability)
                assert not store.recovery.failed
                log = store["orders"][0]
            ledger.check(log)
            (root / "ballast").unlink(missing_ok=True)
            relief = rng.choice(["enforce", "trim"])
            if relief == "enforce":
                store.enforce()
            if relief == "trim" or free_bytes(log.parts.view.directory) < piece + 2 * MiB:
                log.trim(log.end_offset - 1)
                log.roll()
                log.trim(log.end_offset)
            ledger.check(log)
            ledger.append_to(log)(rng.randbytes(1000))
    finally:
        store.close()
    with logstore.open(root / "store", config=config, readonly=True) as reader:
        ledger.check(reader["orders"][0])
        assert reader.check() == []


def create_whole_or_not_at_all(store: Store) -> None:
    try:
        store.create_topic("more", 40)
    except DiskFullError:
        assert list(store) == ["orders"]
    else:
        store.delete_topic("more")


def try_roll(log: Partition) -> None:
    try:
        log.roll()
    except DiskFullError:
        return


def compact(log: Partition) -> None:
    try:
        Compactor(log, memory_bytes=1 << 16, min_cleanable_dirty_ratio=0).run()
    except DiskFullError:
        return
