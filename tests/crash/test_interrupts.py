"""Ctrl-C anywhere: an append has one of three outcomes, and the log stays usable.

First at every single place where a signal handler can run, one after the other; then in storms of
real signals and of exceptions from other threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import logstore
from logstore import (
    BatchEncoder,
    Compactor,
    InterruptedAppendError,
    Partition,
    with_producer,
)
from logstore.testing.interrupts import interrupt_at
from tests.conftest import new_files, open_files

CONFIG = {"segment.bytes": 1024, "cleanup.policy": "compact"}
SIGNALS = 10_000
PACKAGE = (str(Path(logstore.__file__).parent),)


def encoded(*values: bytes) -> bytes:
    encoder = BatchEncoder()
    for value in values:
        encoder.append(value, key=b"k")
    return encoder.take()


def of_producer(number: int, *values: bytes) -> bytes:
    return with_producer(
        encoded(*values), producer_id=number, producer_epoch=0, base_sequence=0, transactional=True
    )


def every_place(step: int = 1) -> Iterator[int]:
    """Numbers of places; bounded, so that a test that never gets through ends."""
    yield from range(1, 10_000, step)
    raise AssertionError("there is always one more place")


# ---- every place, one after the other: appends ----

APPENDS: dict[str, Callable[[Partition, bytes], object]] = {
    "append": lambda log, value: log.append(value),
    "append, durable": lambda log, value: log.append(value, durability="fsync"),
    "append, roll": lambda log, value: log.append(value, headers=[("h", b"x" * 300)]),
    "extend": lambda log, value: log.extend([value + b".0", value + b".1"]),
    "extend, durable": lambda log, value: log.extend([value + b".0"], durability="fsync"),
    "raw": lambda log, value: log.append_batch(encoded(value)),
    "raw, durable": lambda log, value: log.append_batch(encoded(value), durability="fsync"),
    "expected": lambda log, value: log.append(value, expect_offset=log.end_offset),
}


@pytest.mark.parametrize("name", APPENDS)
def test_an_append_that_is_interrupted_anywhere_has_one_of_three_outcomes(
    name: str, tmp_path: Path
) -> None:
    act = APPENDS[name]
    log = Partition.open(tmp_path / "orders-0", durability="os", config=CONFIG)
    done: dict[int, bytes] = {}
    interrupted = 0
    for number in every_place():
        value = b"%d" % number
        before = log.end_offset
        outcome: range | None = None
        try:
            ended = not interrupt_at(number, lambda: act(log, value), only=PACKAGE)  # noqa: B023
            outcome = range(before, log.end_offset)
            if ended:
                break
        except InterruptedAppendError as error:
            outcome = error.offsets
            assert len(outcome) > 0
            assert outcome == range(before, log.end_offset), "they are in the log, just there"
        except KeyboardInterrupt:
            # It names no offsets: then nothing is in the log.
            assert log.end_offset == before
        interrupted += 1
        for offset in outcome or ():
            assert log[offset].value.startswith(value)
            done[offset] = value
        assert log.failure is None
    assert interrupted > 10
    assert log.append(b"alive") == log.end_offset - 1
    stored = {record.offset: record.value for record in log}
    assert all(stored[offset].startswith(value) for offset, value in done.items())
    log.check()
    log.close()
    with Partition.open(tmp_path / "orders-0", config=CONFIG) as again:
        assert again.recovery.clean
        assert {record.offset: record.value for record in again} == stored


# ---- every place: everything else ----


def fill(path: Path) -> None:
    with Partition.open(path, durability="os", config=CONFIG) as log:
        for number in range(24):
            log.append(b"%d" % number * 20, key=b"k%d" % (number % 5))
        log.append_batch(of_producer(7, b"t1", b"t2"))
        log.end_transaction(7, 0, commit=False)


def read(log: Partition) -> dict[int, bytes | None]:
    return {record.offset: record.value for record in log}


def write_buffered(log: Partition) -> None:
    with log.writer(linger=None) as out:
        out.append(b"buffered")


OTHERS: dict[str, Callable[[Partition], object]] = {
    "iterate": lambda log: list(log),
    "committed": lambda log: list(log.scan(isolation="read_committed")),
    "columns": lambda log: [len(columns) for columns in log.scan().columns()],
    "random access": lambda log: (log[3], log[-2], log.tail(5), log.offset_for_time(0)),
    "roll": lambda log: log.roll(),
    "sync": lambda log: log.sync(),
    "trim": lambda log: log.trim(15),
    "truncate": lambda log: log.truncate(9),
    "writer": write_buffered,
    "transaction": lambda log: (
        log.append_batch(of_producer(8, b"t3")),
        log.end_transaction(8, 0, commit=True),
    ),
    "compaction": lambda log: Compactor(log).run(),
    "close": lambda log: log.close(),
}


# Every place, or every so many: coprime to the lengths of loops, so that all kinds are met.
STEPS = [pytest.param(1, marks=pytest.mark.slow, id="every place"), pytest.param(37, id="some")]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_interrupted_anywhere_leaves_a_sound_log_and_no_open_file(
    name: str, step: int, tmp_path: Path
) -> None:
    act = OTHERS[name]
    template = tmp_path / "template-0"
    fill(template)
    before = open_files()
    reached = True
    places = every_place(step)
    while reached:
        number = next(places)
        path = tmp_path / "orders-0"
        shutil.copytree(template, path)
        log = Partition.open(path, durability="os", config=CONFIG)
        was = read(log)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                reached = interrupt_at(number, lambda: act(log), only=PACKAGE)  # noqa: B023
            if not log.closed and log.failure is None:
                log.append(b"alive", key=b"k1")
                log.check()
                kept = read(log)
                assert kept.items() - was.items() or name == "close"
        finally:
            log.close()
        del log
        if new_files(before):
            gc.collect()
        # A segment that compaction removed may be held a little longer by what was interrupted.
        left = {fd: name for fd, name in new_files(before).items() if "(deleted)" not in name}
        assert not left, f"place {number}: left open {left}"
        with Partition.open(path, config=CONFIG) as again:
            assert not again.recovery.damage
            now = read(again)
            again.check()
        # The records are those of before, of after, or of a state between.
        if name != "truncate":
            assert all(was.get(offset, value) == value for offset, value in now.items())
        if name not in ("trim", "truncate", "compaction"):
            assert now.items() >= was.items(), f"place {number}"
        shutil.rmtree(path)
    assert number > 1


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_opening_that_is_interrupted_anywhere_leaves_neither_lock_nor_file(
    step: int, tmp_path: Path
) -> None:
    fill(tmp_path / "store" / "orders-0")
    before = open_files()
    for openable in (tmp_path / "store" / "orders-0", tmp_path / "store"):
        reached = True
        places = every_place(step)
        while reached:
            number = next(places)
            opened: list[Partition | logstore.Store] = []

            def act() -> None:
                if openable.name == "store":  # noqa: B023
                    opened.append(logstore.open(openable, durability="os"))  # noqa: B023
                    opened[0]["orders"][0].end_offset  # noqa: B018, B023
                else:
                    opened.append(Partition.open(openable, durability="os", config=CONFIG))  # noqa: B023

            with contextlib.suppress(KeyboardInterrupt):
                reached = interrupt_at(number, act, only=PACKAGE)
            for handle in opened:
                handle.close()
            del opened
            if new_files(before):
                gc.collect()  # an interrupt after the last step: no variable has the open handle
            left = new_files(before)
            assert not left, f"place {number} of {openable.name}: left open {left}"
        with Partition.open(tmp_path / "store" / "orders-0", config=CONFIG) as log:
            assert log.end_offset == 27
            log.check()
        assert number > 1


# ---- storms ----


class Storm:
    """Interrupts the main thread again and again, by a timer or from another thread."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.count = 0
        self.armed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._strike, daemon=True)
        self._main = threading.get_ident()

    def _handle(self, *_: object) -> None:
        self.count += 1
        if self.armed:
            raise KeyboardInterrupt

    def _strike(self) -> None:
        while not self._stop.wait(0.0002):
            if self.kind == "SIGINT":
                os.kill(os.getpid(), signal.SIGINT)
            elif self.armed:
                self.count += 1
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._main), ctypes.py_object(KeyboardInterrupt)
                )

    def __enter__(self) -> Storm:
        # An interrupt inside a finalizer goes to the hook.  One inside a hook written in Python
        # would be an error of the hook; `append` is one step for a signal handler.
        self._unraisable: list[sys.UnraisableHookArgs] = []
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable.append
        self._before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGALRM)
        }
        if self.kind == "SIGALRM":
            signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._stop.set()
        while self._thread.is_alive():
            with contextlib.suppress(KeyboardInterrupt):
                self._thread.join(10)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._hook
        kinds = {each.exc_type for each in self._unraisable}
        self._unraisable.clear()
        assert kinds <= {KeyboardInterrupt}


@pytest.mark.parametrize("kind", ["SIGALRM", "SIGINT", "from a thread"])
def test_a_storm_of_interrupts_leaves_one_of_three_outcomes(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    config = {"segment.bytes": 20_000}
    rng = random.Random(kind)
    returned: dict[int, bytes] = {}
    maybe: dict[int, bytes] = {}
    refused: set[bytes] = set()
    log = Partition.open(path, durability="os", config=config)
    number = 0
    with Storm(kind) as storm:
        # A bound on the rounds, not on the time: how many signals a round sees is the machine's.
        while storm.count < SIGNALS // 3 and number < 400_000:
            number += 1
            value = b"%d" % number
            try:
                try:
                    storm.armed = True
                    choice = rng.random()
                    if choice < 0.02:
                        sum(1 for _ in log.scan(max(0, log.end_offset - 50)))
                    elif choice < 0.03:
                        log.close()
                    else:
                        durability = "fsync" if choice < 0.1 else None
                        returned[log.append(value, durability=durability)] = value
                finally:
                    storm.armed = False
            except InterruptedAppendError as error:
                storm.armed = False
                maybe.update(dict.fromkeys(error.offsets, value))
            except KeyboardInterrupt:
                storm.armed = False
                refused.add(value)
            if log.closed:
                log.close()  # finishes what an interrupt stopped
                log = Partition.open(path, durability="os", config=config)
                assert not log.recovery.damage
        assert storm.count >= SIGNALS // 3
    stored = {record.offset: record.value for record in log}
    for offset, value in (returned | maybe).items():
        assert stored[offset] == value
    # A value without an outcome: the interrupt came between the append and the ledger's own line.
    assert set(stored) >= set(returned) | set(maybe)
    values = list(stored.values())
    assert len(values) == len(set(values)), "nothing is there twice"
    log.check()
    log.close()
    with Partition.open(path, config=config) as again:
        assert {record.offset: record.value for record in again} == stored
