"""Processes race for the lock of a log: one gets in, also when the last holder was killed."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import logstore
from logstore import LockedError, Partition
from logstore.files.lock import _set_lock

RACES = 500
RACERS = 3


def spawn(act: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(300)
            ours.close()
            act(theirs)
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    return pid, ours


def racer(paths: list[Path], seed: int) -> Callable[[socket.socket], None]:
    """Wait for the start, try once, report; hold the lock until the parent asks for it."""

    def run(control: socket.socket) -> None:
        rng = random.Random(seed)
        while True:
            if control.recv(1) != b"s":
                return
            path = rng.choice(paths)
            try:
                log = Partition.open(path, durability="os")
            except LockedError as error:
                control.sendall(b"l" if error.pid != os.getpid() else b"?")
                continue
            control.sendall(b"w")
            log.append(b"%d" % os.getpid())
            order = control.recv(1)
            if order == b"k":
                control.sendall(b"k")
                os.kill(os.getpid(), signal.SIGKILL)
            log.close()
            control.sendall(b"c")

    return run


def test_of_racing_processes_one_gets_in(tmp_path: Path) -> None:
    path = tmp_path / "store" / "orders-0"
    path.parent.mkdir()
    (tmp_path / "link").symlink_to(path.parent)
    with Partition.open(path, durability="os"):
        pass
    # The same directory by other names; a link to the partition itself has its name.
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "orders-0").symlink_to(path)
    paths = [path, tmp_path / "link" / "orders-0", tmp_path / "aside" / "orders-0"]
    rng = random.Random(1)
    racers = [spawn(racer(paths, number)) for number in range(RACERS)]
    holders = kills = appended = 0
    try:
        for race in range(RACES):
            for _, control in racers:
                control.sendall(b"s")
            answers = [control.recv(1) for _, control in racers]
            assert set(answers) <= {b"w", b"l"}, answers
            # No child unlocks before all have tried: so just one can hold the lock.
            assert answers.count(b"w") == 1, f"race {race}: {answers}"
            winner = answers.index(b"w")
            holders += 1
            appended += 1
            if rng.random() < 0.1:
                kills += 1
                pid, control = racers[winner]
                control.sendall(b"k")
                assert control.recv(1) == b"k"
                os.waitpid(pid, 0)
                control.close()
                racers[winner] = spawn(racer(paths, RACERS + race))
            else:
                racers[winner][1].sendall(b"c")
                assert racers[winner][1].recv(1) == b"c"
    finally:
        for pid, control in racers:
            # Killed: children hold each other's sockets, and would not see them closed.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            control.close()
    assert holders == RACES
    assert kills > 10
    with Partition.open(path) as log:
        assert log.end_offset == appended
        log.check()


def test_who_let_go_is_not_named_as_the_holder(tmp_path: Path) -> None:
    """Between getting the lock and writing its name, a holder is unknown, and no other is named."""
    with Partition.open(tmp_path / "orders-0", durability="os"):
        pass
    with logstore.open(tmp_path / "store", durability="os") as store:
        store.create_topic("orders")
    opens: list[tuple[Path, Callable[[], object]]] = [
        (tmp_path / "orders-0", lambda: Partition.open(tmp_path / "orders-0")),
        (tmp_path / "store", lambda: logstore.open(tmp_path / "store")),
    ]
    for path, act in opens:
        with open(path / ".lock", "r+b") as file:
            assert _set_lock(file.fileno(), fcntl.F_WRLCK)
            with pytest.raises(LockedError, match="locked by another process") as raised:
                act()
            assert raised.value.pid is None


def test_a_store_and_a_partition_of_it_exclude_each_other(tmp_path: Path) -> None:
    """In one process, and through a link."""
    with logstore.open(tmp_path / "store", durability="os") as store:
        store.create_topic("orders")
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for name in ("store", "link"):
        with logstore.open(tmp_path / "store", durability="os"):
            assert locked(lambda: Partition.open(tmp_path / name / "orders-0"))  # noqa: B023
        with Partition.open(tmp_path / name / "orders-0", durability="os"):
            assert locked(lambda: logstore.open(tmp_path / "store"))


def locked(act: Callable[[], object]) -> bool:
    try:
        act()
    except LockedError:
        return True
    return False
