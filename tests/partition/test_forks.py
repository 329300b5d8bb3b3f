"""Forks at any moment: the child's handles refuse, its death harms nothing, the parent works."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import logstore
from logstore import ForkedHandleError, LockedError, Partition
from tests.campaign import sized

FORKS = sized(100, 1000, 5000)
BATCH = 50  # forks on one log


class Family:
    """A log that threads write to and read from while children are forked off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = logstore.open(path, durability="os", config={"segment.bytes": 20_000})
        self.log = self.store.create_topic("orders")[0]
        self.acknowledged: dict[int, bytes] = {}
        self.unexpected: list[BaseException] = []
        self.stop = threading.Event()
        self.iterator = iter(self.log.scan())
        self.out = self.log.writer(linger=None)
        self.threads = [threading.Thread(target=self.write), threading.Thread(target=self.read)]

    def write(self) -> None:
        number = 0
        try:
            while not self.stop.is_set():
                value = b"%d" % number + b"x" * (number % 200)
                durability = "fsync" if number % 97 == 0 else None
                self.acknowledged[self.log.append(value, durability=durability)] = value
                number += 1
                self.stop.wait(0.0005)  # the children want the processor as well
        except BaseException as error:  # noqa: BLE001
            self.unexpected.append(error)

    def read(self) -> None:
        try:
            while not self.stop.is_set():
                end = self.log.end_offset
                for record in self.log.scan(max(0, end - 30), end):
                    assert record.offset < end
                self.stop.wait(0.0005)
        except BaseException as error:  # noqa: BLE001
            self.unexpected.append(error)


def use_append(family: Family) -> None:
    family.log.append(b"from a child")


def use_read(family: Family) -> None:
    list(family.log.scan(0, 5))


def use_iterator(family: Family) -> None:
    next(family.iterator)


def use_writer(family: Family) -> None:
    family.out.append(b"from a child")
    family.out.flush()


def use_store(family: Family) -> None:
    family.store.create_topic("other")


def use_sync(family: Family) -> None:
    family.log.sync()


def close_all(family: Family) -> None:
    """Closing is allowed, and changes nothing; what a writer holds is not the child's."""
    with contextlib.suppress(ForkedHandleError):
        family.out.close()
    family.log.close()
    family.store.close()


def collect(family: Family) -> None:
    """Finalizers run in the child."""
    family.__dict__.clear()
    gc.collect()


def open_beside(family: Family) -> None:
    """A handle of its own, to read."""
    with logstore.open(family.path, readonly=True) as store:
        sum(1 for _ in store["orders"][0].scan(0, 5))


def open_to_write(family: Family) -> None:
    try:
        logstore.open(family.path).close()
    except LockedError:
        return
    raise AssertionError("the parent has it open")


REFUSED: list[Callable[[Family], None]] = [
    *(use_append, use_read, use_iterator, use_writer, use_store, use_sync)
]
ALLOWED: list[Callable[[Family], None]] = [close_all, collect, open_beside, open_to_write]


def in_child(act: Callable[[Family], None], family: Family) -> int:
    """What a child makes of it: 0 as it should be, 1 something else; killed when it hangs."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)  # this kills a child that waits for a lock without an owner
        code = 1
        try:
            act(family)
            code = 0 if act in ALLOWED else 1
        except ForkedHandleError:
            code = 0 if act in REFUSED else 1
        except BaseException as error:  # noqa: BLE001
            os.write(2, f"{act.__name__}: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # 3.12 warns of forks with threads
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the child that drops everything
@pytest.mark.campaign
def test_forks_harm_nothing(tmp_path: Path) -> None:
    rng = random.Random(1)
    for number in range(FORKS // BATCH):
        path = tmp_path / f"store-{number}"
        family = Family(path)
        for thread in family.threads:
            thread.start()
        try:
            for _ in range(BATCH):
                act = rng.choice(REFUSED + ALLOWED)
                assert in_child(act, family) == 0, act.__name__
        finally:
            family.stop.set()
            for thread in family.threads:
                thread.join(60)
        assert not family.unexpected
        family.out.append(b"of the parent")
        family.out.close()
        assert family.log.append(b"the parent goes on") == family.log.end_offset - 1
        stored = {record.offset: record.value for record in family.log}
        assert all(stored[offset] == value for offset, value in family.acknowledged.items())
        assert b"from a child" not in stored.values()
        assert "other" not in family.store
        family.log.check()
        del family.iterator
        family.store.close()
        with logstore.open(path, readonly=True) as again:
            assert {r.offset: r.value for r in again["orders"][0]} == stored


def test_a_lock_is_given_back_although_a_child_has_not_run_yet(tmp_path: Path) -> None:
    """It shares the open file, and lets go of it only when it runs."""
    log = Partition.open(tmp_path / "orders-0", durability="os")
    assert log.parts.active.owner is not None
    held = [os.dup(file.fileno()) for file in log.parts.active.owner._files]  # as a child has it
    try:
        log.close()
        Partition.open(tmp_path / "orders-0").close()
    finally:
        for fd in held:
            os.close(fd)


def descriptors_of(path: Path) -> list[int]:
    """Return the descriptors of this process that refer to a file."""
    wanted, found = path.stat(), []
    for fd in range(os.sysconf("SC_OPEN_MAX") if sys.platform != "linux" else 1024):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), wanted):
                found.append(fd)
    return found


@pytest.mark.parametrize("kind", ["partition", "store"])
def test_a_child_lets_go_of_the_lock_of_its_parent(tmp_path: Path, kind: str) -> None:
    """An open descriptor would keep the lock after the parent's death."""
    if kind == "partition":
        handle: Partition | logstore.Store = Partition.open(tmp_path / "orders-0", durability="os")
        lock = tmp_path / "orders-0" / ".lock"
    else:
        handle = logstore.open(tmp_path, durability="os")
        handle.create_topic("orders")
        lock = tmp_path / ".lock"
    assert len(descriptors_of(lock)) == 1
    pid = os.fork()
    if pid == 0:
        left = 99
        try:
            left = len(descriptors_of(lock))
        finally:
            os._exit(left)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(descriptors_of(lock)) == 1, "the parent keeps its own"
    handle.close()
