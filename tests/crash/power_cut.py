"""Power cuts on a real ext4: every flush, and parts of what was written after it.

    unshare -m python -m tests.crash.power_cut --images 300

A log is written on an ext4 on a loop device on a disk that remembers all writes and flushes (see
fuse_disk).  Each promise of durability is marked between them.  Then images are built as a power
cut would leave them, each is mounted, which replays ext4's own journal, the log is opened, and
every promise that was given before the cut must be kept.

Runs as root in a mount namespace of its own.  Exits with 77 and the reason where the machine does
not allow it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from logstore import Compactor, LogStoreError, Partition
from logstore.testing.io import inject_io
from logstore.testing.io_calls import Fault
from tests.crash.fuse_disk import DISK, Journal, Server, mount, unmount

NOT_HERE = 77
DISK_BYTES = 12 << 20
CONFIG = {"segment.bytes": 4096, "index.interval.bytes": 256, "cleanup.policy": "compact,delete"}


class NotHere(Exception):
    """The machine does not allow it: why."""


def command(*words: object) -> str:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotHere(f"{words[0]}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


def check_machine() -> None:
    if os.geteuid() != 0:
        raise NotHere("needs root, to mount")
    for device in ("/dev/fuse", "/dev/loop-control"):
        if not os.path.exists(device):
            raise NotHere(f"{device} is missing")
    for tool in ("mkfs.ext4", "losetup"):
        if shutil.which(tool) is None:
            raise NotHere(f"{tool} is missing")


@contextlib.contextmanager
def loop_on(path: Path) -> Iterator[str]:
    device = command("losetup", "--find", "--show", path)
    try:
        yield device
    finally:
        command("losetup", "--detach", device)


@contextlib.contextmanager
def mounted(device: str, target: Path) -> Iterator[Path]:
    try:
        mount(device, target, "ext4", "")
    except OSError as error:
        raise NotHere(str(error)) from error
    try:
        yield target
    finally:
        unmount(target)


# ---- the workload ----


class Promises:
    """What was promised to be durable; the marks in the journal count them."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.given: list[tuple[str, object]] = []

    def give(self, kind: str, what: object) -> None:
        self.given.append((kind, what))
        self.control.send(b"mark %d" % len(self.given))
        assert self.control.recv(16) == b"ok"


def work(root: Path, promises: Promises, seed: int) -> None:
    """Appends that wait for the disk, and everything else that moves files about."""
    rng = random.Random(seed)
    log = Partition.open(root / "orders-0", config=CONFIG)
    promises.give("open", 0)
    ledger: dict[int, tuple[bytes, bytes]] = {}
    for turn in range(90):
        key = b"k%d" % rng.randrange(8)
        if turn % 4 == 3:
            log.append(b"os %d" % turn, key=b"only os", durability="os")
        value = b"%d:" % turn + bytes(rng.randrange(256) for _ in range(rng.randrange(150)))
        offset = log.append(value, key=key)
        ledger[offset] = (key, value)
        promises.give("record", (offset, key, value))
        if turn % 30 == 17:
            end = log.end_offset - 2
            promises.give("may cut", end)
            log.truncate(end)
            promises.give("cut", end)
        if turn % 40 == 25:
            Compactor(log).run()
        if turn == 55:
            promises.give("may trim", 15)
            log.trim(15)
            promises.give("trimmed", 15)
        if turn == 70:
            log.close()
            promises.give("closed", 0)
            log = Partition.open(root / "orders-0", config=CONFIG)
    log.close()
    promises.give("closed", 0)


def expected(given: list[tuple[str, object]]) -> tuple[dict[int, tuple[bytes, bytes]], int, int]:
    """Records that must be there, the highest start, and from where on nothing is promised."""
    records: dict[int, tuple[bytes, bytes]] = {}
    start, unsure_from = 0, 1 << 62
    for kind, what in given:
        if kind == "record":
            offset, key, value = what  # type: ignore[misc]
            records[offset] = (key, value)
            unsure_from = 1 << 62
        elif kind in ("may cut", "cut"):
            records = {o: r for o, r in records.items() if o < what}  # type: ignore[operator]
            unsure_from = what  # type: ignore[assignment]
        elif kind in ("may trim", "trimmed"):
            start = what  # type: ignore[assignment]
    return records, start, unsure_from


def faults_of(root: Path, given: list[tuple[str, object]]) -> Iterator[str]:
    """What of the promises is not kept, in words."""
    if not given:
        # Nothing was promised; it must open all the same.
        Partition.open(root / "orders-0", config=CONFIG).close()
        return
    records, start, _ = expected(given)
    with Partition.open(root / "orders-0", config=CONFIG, create=False) as log:
        if log.recovery.damage:
            yield f"damage: {log.recovery.damage}"
        if log.start_offset > start:
            yield f"starts at {log.start_offset}, not at or below {start}"
        try:
            stored = {record.offset: (record.key, record.value) for record in log}
        except LogStoreError as error:
            yield f"cannot be read: {error}"
            return
        newest = {key: offset for offset, (key, _) in stored.items()}
        for offset, (key, value) in records.items():
            if offset < start:
                continue
            if offset in stored:
                if stored[offset] != (key, value):
                    yield f"offset {offset} holds {stored[offset]!r}"
            elif newest.get(key, -1) <= offset:
                # Compaction takes a record away only when a later one of its key is there.
                yield f"offset {offset} of {key!r} is gone, and nothing newer is there"
        if log.end_offset <= max(records, default=-1):
            yield f"ends at {log.end_offset}, below offset {max(records)}"
        log.check()
        end = log.append(b"alive", key=b"alive")
        if log[end].value != b"alive":
            yield "cannot be written to"


# ---- cuts ----


def cuts(journal: Journal, rng: random.Random, images: int) -> Iterator[tuple[int, int, list[int]]]:
    """(flush, cut, writes that made it): spread over all flushes, each kind in turn."""
    flushes = [0, *(number + 1 for number in journal.flushes())]
    ends = [*flushes[1:], len(journal.entries)]
    spans = list(zip(flushes, ends, strict=True))
    made = 0
    while True:
        rng.shuffle(spans)
        for flush, end in spans:
            writes = journal.writes_between(flush, end)
            kind = made % 4
            cut = rng.randrange(flush, end + 1)
            before = [number for number in writes if number < cut]
            if kind == 0:
                chosen: list[int] = []
            elif kind == 1:
                chosen = before
            elif kind == 2:
                chosen = [number for number in before if rng.random() < 0.5]
            else:
                chosen = rng.sample(before, len(before))[: len(before) // 2]  # out of order
            yield flush, cut, chosen
            made += 1
            if made == images:
                return


def campaign(
    images: int, seed: int, work_directory: Path, progress: float, lie: str = ""
) -> dict[str, int]:
    """Write, cut, compare; `lie` names a kind of call that is left out, as if it had been made."""
    check_machine()
    disk = work_directory / "empty"
    disk.write_bytes(bytes(DISK_BYTES))
    command("mkfs.ext4", "-q", "-F", "-b", "1024", "-J", "size=1", "-m", "0", "-O", "^resize_inode",
            disk)  # fmt: skip
    fuse, root = work_directory / "fuse", work_directory / "root"
    fuse.mkdir()
    root.mkdir()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            try:
                server = Server(disk.read_bytes(), fuse, theirs)
            except OSError as error:
                theirs.send(f"no {error}".encode())
                os._exit(1)
            theirs.send(b"ok")
            server.run()
        finally:
            os._exit(0)
    theirs.close()
    promises = Promises(ours)
    try:
        answer = ours.recv(4096)
        if answer != b"ok":
            raise NotHere(f"FUSE: {answer.decode()[3:]}")
        with loop_on(fuse / DISK) as device, mounted(device, root), contextlib.ExitStack() as lies:
            if lie:
                forever = Fault.pretend(lie, forever=True)
                lies.enter_context(inject_io(forever, root=root, keep_calls=False))
            work(root, promises, seed)
        ours.send(f"end {work_directory / 'journal'}".encode())
        assert ours.recv(16) == b"ok"
        unmount(fuse)
    finally:
        ours.close()
        os.waitpid(pid, 0)
    with open(work_directory / "journal", "rb") as file:
        journal: Journal = pickle.load(file)
    return verify(journal, promises, images, random.Random(seed), work_directory, progress)


def verify(
    journal: Journal,
    promises: Promises,
    images: int,
    rng: random.Random,
    work_directory: Path,
    progress: float,
) -> dict[str, int]:
    root, path = work_directory / "root", work_directory / "image"
    flushes = len(journal.flushes())
    marks = [number for number, entry in enumerate(journal.entries) if isinstance(entry, int)]
    started = said = time.monotonic()
    for number, (flush, cut, chosen) in enumerate(cuts(journal, rng, images), 1):
        path.write_bytes(journal.image(flush, chosen))
        given = promises.given[: sum(1 for mark in marks if mark < cut)]
        with loop_on(path) as device, mounted(device, root):
            faults = list(faults_of(root, given))
        assert not faults, (
            f"cut at {cut} behind the flush at {flush}, with {len(chosen)} writes: "
            + "; ".join(faults[:5])
        )
        if progress and time.monotonic() - said >= progress:
            said = time.monotonic()
            print(f"cut     {number} of {images} in {said - started:.0f} s", flush=True)
    return {
        "images": images,
        "flushes": flushes,
        "writes": len(journal.writes_between(0, len(journal.entries))),
        "promises": len(promises.given),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--progress", type=float, default=10.0)
    parser.add_argument("--lie", default="", help="leave out calls of this kind: datasync, sync")
    arguments = parser.parse_args()
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        try:
            done = campaign(
                arguments.images,
                arguments.seed,
                Path(directory),
                arguments.progress,
                arguments.lie,
            )
        except NotHere as error:
            print(error)
            sys.exit(NOT_HERE)
    print(json.dumps(done))


if __name__ == "__main__":
    main()
