"""Something else in the place of a file: it is refused by its type, and nothing waits for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import logstore
from logstore import NotALogError, Partition, Producer
from logstore.files.directory import Directory

Plant = Callable[[Path], None]

BESIDE_SEGMENTS = (
    *("logstore.state", "logstore.durable", "logstore.cleaner", "logstore.start", ".lock"),
    *("logstore.failed", "logstore.reserve", "swap.plan", "truncate.plan"),
    *("leader-epoch-checkpoint", "partition.metadata", "left.tmp"),
    *("00000000000000000000.log.swap", "00000000000000000000.log.cleaned"),
    *("00000000000000000000.log.deleted", "00000000000000000003.snapshot"),
)
IN_ROOT = (
    *("logstore.topics", "meta.properties", "checkpoints.ls", ".lock", "logstore.reserve"),
    *("recovery-point-offset-checkpoint", "log-start-offset-checkpoint"),
    *("cleaner-offset-checkpoint", "replication-offset-checkpoint"),
    *(".kafka_cleanshutdown", "logstore.clean", "logstore.producers"),
)


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):
        listener.bind(path.name)  # a whole path may be too long


def make_full_directory(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


def make_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero: without an end
    except PermissionError:
        pytest.skip("only root makes devices")


def link_to(plant: Plant) -> Plant:
    def linked(path: Path) -> None:
        target = path.with_name("target of the link")
        plant(target)
        path.symlink_to(target)

    return linked


KINDS: dict[str, Plant] = {
    "fifo": os.mkfifo,
    "socket": bind_socket,
    "directory": Path.mkdir,
    "full directory": make_full_directory,
    "device": make_device,
    "link to a fifo": link_to(os.mkfifo),
    "link to a socket": link_to(bind_socket),
    "link to a directory": link_to(Path.mkdir),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to a file": link_to(Path.touch),
}


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Interrupt an open that waits for the other end."""

    def interrupt(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(10)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def closed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One partition with sealed segments, transactions, snapshots and a start offset."""
    path = tmp_path_factory.mktemp("types") / "store"
    with logstore.open(path) as store:
        log = store.create_topic("t", 1)[0]
        log.extend([b"%d" % i for i in range(5)])
        log.roll()
        with Producer(store, "transactional") as producer:
            transaction = producer.transaction()
            producer.send("t", b"aborted")
            transaction.abort()
        log.roll()
        log.append(b"last")
        log.trim(2)
    return path


def places(store: Path) -> list[str]:
    """Every file of the store, and the names that others have at other times."""
    there = [entry.relative_to(store).as_posix() for entry in store.rglob("*") if entry.is_file()]
    known = [*IN_ROOT, *(f"t-0/{name}" for name in BESIDE_SEGMENTS)]
    return sorted({*(name for name in there if name.startswith("t-0/") or "/" not in name), *known})


def planted(source: Path, target: Path, name: str, plant: Plant) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    (target / name).unlink(missing_ok=True)
    plant(target / name)
    return target


def write(path: Path) -> None:
    with logstore.open(path) as store:
        store["t"][0].append(b"more")
        list(store["t"][0].scan(2))
        store.sync()


def write_alone(path: Path) -> None:
    with Partition.open(path / "t-0") as log:
        log.append(b"more")
        log.sync()
        log.roll()


def read(path: Path) -> None:
    with logstore.open(path, readonly=True) as store:
        list(store["t"][0].scan(2))
        store.check(on_corrupt="report")


def repair(path: Path) -> None:
    logstore.repair(path, dry_run=False)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_by_type_and_by_name(
    closed_store: Path, tmp_path: Path, kind: str
) -> None:
    for name in places(closed_store):
        for act in (write, write_alone, read, repair):
            path = planted(closed_store, tmp_path / "store", name, KINDS[kind])
            raised: BaseException | None = None
            with no_waiting():
                try:
                    act(path)
                except (OSError, NotALogError) as error:
                    raised = error
            assert raised is None or name in str(raised), act
            assert raised is None or "not a regular file" in str(raised), act


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_reports_what_is_no_file(closed_store: Path, tmp_path: Path, kind: str) -> None:
    for name in places(closed_store):
        path = tmp_path / "store"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(closed_store, path)
        with logstore.open(path, readonly=True) as store:
            list(store["t"][0].scan(2))
            (path / name).unlink(missing_ok=True)
            KINDS[kind](path / name)
            with no_waiting():
                if name == "logstore.topics":  # a reader reads it again to list the topics
                    with pytest.raises(OSError, match=r"logstore\.topics"):
                        store.check(on_corrupt="report")
                    continue
                problems = store.check(on_corrupt="report")
            # A partition that cannot be looked at is a problem that names the file.
            assert any(str(path / name) in f"{p.path} {p.detail}" for p in problems), name


def test_a_file_is_opened_although_another_process_has_a_lease(tmp_path: Path) -> None:
    """A file server takes leases; an open that may not wait would fail."""
    path = tmp_path / "file"
    path.write_bytes(b"contents")
    holder = (
        "import fcntl, os, signal, sys\n"
        f"fd = os.open({str(path)!r}, os.O_RDWR)\n"
        "release = lambda *_: (fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK), sys.exit())\n"
        "signal.signal(signal.SIGIO, release)\n"
        "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "print('held', flush=True)\n"
        "signal.pause()\n"
    )
    if not hasattr(fcntl, "F_SETLEASE"):
        pytest.skip("leases are Linux's")
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert Directory(tmp_path).read("file") == b"contents"
