"""Every call to the disk fails, in every way, once and for good: nothing that was promised is lost.

Each workload is run as often as it makes calls, times the ways in which one can fail.  After each
run: an append was acknowledged, refused or indeterminate, and what the log holds agrees with that;
every error is of a documented class; no descriptor is left open; the log can be used again once the
fault is gone, or has a `failure`; and a second open finds everything that was acknowledged.

Two processes share the runs: this file run as a program is one of them.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import logstore
from logstore import (
    ClosedError,
    Compactor,
    IndeterminateAppendError,
    Partition,
    PartitionConfig,
    Record,
    RetentionPolicy,
)
from logstore.testing import encode_batch
from logstore.testing.io import inject_io
from logstore.testing.io_calls import KINDS, Fault, Operation
from tests.campaign import sized

if TYPE_CHECKING:
    from tests.conftest import RunShares

ERRNOS = (
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EINTR,
    errno.EMFILE,
    errno.ENOMEM,
)
EINTR_STORM = 25  # no kernel interrupts for ever
CONFIG = PartitionConfig(segment_bytes=1024, index_interval_bytes=100, min_compaction_lag_ms=0)
TIME = 1_600_000_000_000


class Surprise(AssertionError):
    """Something that the contract does not know."""


@dataclass
class Ledger:
    """The outcome that a caller got, by value; values are written once and never alike."""

    there: dict[bytes, int] = field(default_factory=dict)  # acknowledged, at this offset
    absent: set[bytes] = field(default_factory=set)  # refused, or deleted with success
    unknown: set[bytes] = field(default_factory=set)  # indeterminate, or a deletion failed
    aborted: set[bytes] = field(default_factory=set)  # never for committed readers

    def deleted(self, values: Iterable[bytes], done: bool) -> None:
        for value in list(values):
            if self.there.pop(value, None) is not None or value in self.unknown:
                self.unknown.discard(value)
                (self.absent if done else self.unknown).add(value)

    def below(self, offset: int) -> list[bytes]:
        return [value for value, at in self.there.items() if at < offset]

    def from_offset(self, offset: int) -> list[bytes]:
        return [value for value, at in self.there.items() if at >= offset]


@dataclass
class Run:
    """One pass of a workload over a directory of its own."""

    path: Path
    ledger: Ledger
    log: Partition | None = None
    store: logstore.Store | None = None

    def tolerate(self, act: Callable[[], object]) -> bool:
        """Whether it was done; an error that is documented is fine."""
        try:
            act()
        except (OSError, ClosedError):
            return False
        except ExceptionGroup as errors:  # several partitions were to be closed
            if errors.split((OSError, ClosedError))[1] is not None:
                raise
            return False
        return True

    def open(self, *, durability: str = "fsync", readonly: bool = False) -> Partition:
        self.log = Partition.open(
            self.path / "orders-0", durability=durability, readonly=readonly, config=CONFIG
        )
        return self.log

    def append(self, values: list[bytes], act: Callable[[], range | int | object]) -> bool:
        """An append of these values, and which of its three outcomes it had."""
        try:
            offsets = act()
        except IndeterminateAppendError:
            self.ledger.unknown.update(values)
            return False
        except (OSError, ClosedError):
            self.ledger.absent.update(values)
            return False
        if isinstance(offsets, int):
            offsets = range(offsets, offsets + 1)
        assert isinstance(offsets, range)
        assert len(offsets) == len(values)
        self.ledger.there.update(zip(values, offsets, strict=True))
        return True

    def append_one(self, value: bytes, **options: str) -> bool:
        assert self.log is not None
        log = self.log
        return self.append(
            [value], lambda: log.append(value, key=value[:2], timestamp=TIME, **options)
        )


# ---- what they start from -------------------------------------------------------------------


def values(name: bytes, count: int) -> list[bytes]:
    return [b"%b %02d" % (name, number) + bytes(150) for number in range(count)]


def fill(run: Run) -> None:
    """Twelve records in three segments."""
    log = run.open(durability="os")
    for number, value in enumerate(values(b"old", 12)):
        offset = log.append(value, key=b"k%d" % (number % 5), timestamp=TIME + number)
        run.ledger.there[value] = offset
    assert len(log.segments) >= 3


def nothing(run: Run) -> None:
    pass


def closed(run: Run) -> None:
    fill(run)
    assert run.log is not None
    run.log.close()


def killed(run: Run) -> None:
    """A process was killed while it wrote: the end is torn, nothing was closed."""
    fill(run)
    assert run.log is not None
    run.log.sync()
    left = run.path / "left"
    shutil.copytree(run.log.path, left)
    run.log.parts.discard()
    shutil.rmtree(run.path / "orders-0")
    left.rename(run.path / "orders-0")
    last = max((run.path / "orders-0").glob("*.log"))
    with last.open("ab") as file:
        file.write(b"half a batch, or less")


def transactional(values: list[bytes], sequence: int, producer_id: int = 7) -> bytes:
    return encode_batch(
        [Record(value, key=b"t", timestamp=TIME) for value in values],
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
        transactional=True,
    )


def with_transactions(run: Run) -> None:
    """One that was committed, one that was aborted, and one that is open."""
    log = run.open(durability="os")
    for producer_id, name in ((7, b"committed"), (8, b"aborted"), (9, b"pending")):
        written = values(name, 2)
        appended = log.append_batch(transactional(written, 0, producer_id))
        run.ledger.there.update(zip(written, appended.offsets, strict=True))
        if name != b"pending":
            log.end_transaction(producer_id, 0, commit=name == b"committed")
    run.ledger.aborted.update(values(b"aborted", 2))
    log.close()


def half_swapped(run: Run) -> None:
    """Killed in the middle of a compaction, after its plan was written."""
    closed(run)
    stop_at(run, lambda log: Compactor(log).run(), "rename", "*.swap")
    # superseded ones may be gone, or come back
    run.ledger.unknown.update(run.ledger.there)
    newest = {number % 5: value for number, value in enumerate(values(b"old", 12))}
    run.ledger.there = {v: at for v, at in run.ledger.there.items() if v in newest.values()}
    run.ledger.unknown -= set(run.ledger.there)


def half_truncated(run: Run) -> None:
    """Killed in the middle of a truncation, after its plan was written."""
    closed(run)
    stop_at(run, lambda log: log.truncate(6), "truncate", "*.log")
    run.ledger.deleted(run.ledger.from_offset(6), False)


def stop_at(run: Run, act: Callable[[Partition], object], kind: str, path: str) -> None:
    log = run.open(durability="os")
    with inject_io(Fault.fail(errno.EIO, path=path, kind=kind, forever=True), root=run.path) as io:
        with pytest.raises(OSError):
            act(log)
        assert io.fired
    log.parts.discard()
    assert any(name.endswith(".plan") for name in os.listdir(run.path / "orders-0"))


def stored(run: Run) -> None:
    with logstore.open(run.path / "store", durability="os") as store:
        store.create_topic("old", partitions=2)
        for number, value in enumerate(values(b"stored", 4)):
            position = store["old"].append(value, partition=number % 2)
            run.ledger.there[value] = position.offset


# ---- what they do ---------------------------------------------------------------------------


def create(run: Run) -> None:
    if run.tolerate(run.open):
        run.append_one(b"first")


def append_os(run: Run) -> None:
    for value in values(b"os", 4):
        run.append_one(value, durability="os")


def append_fsync(run: Run) -> None:
    for value in values(b"fs", 4):
        run.append_one(value)


def extend(run: Run) -> None:
    assert run.log is not None
    log = run.log
    for name in (b"one", b"two"):
        written = values(name, 5)
        run.append(written, lambda: log.extend(written))  # noqa: B023  called at once


def write(run: Run) -> None:
    """A buffered writer: what it could not hand over is not in the log."""
    assert run.log is not None
    log = run.log
    for name in (b"wa", b"wb", b"wc"):
        written = values(name, 6)
        first = log.end_offset

        def act() -> range:
            with log.writer(linger=None, batch_bytes=200, compression="lz4") as out:
                for value in written:  # noqa: B023
                    out.append(value, key=b"w", timestamp=TIME)
            return range(first, first + len(written))  # noqa: B023

        if not run.append(written, act):
            # Some of its batches may have been handed over, and closing the log tries again.
            run.ledger.unknown.update(written)
            run.ledger.absent.difference_update(written)


def roll(run: Run) -> None:
    assert run.log is not None
    for value in values(b"ro", 3):
        run.append_one(value)
        run.tolerate(run.log.roll)
    run.append_one(b"behind the rolls")


def truncate(run: Run) -> None:
    assert run.log is not None
    log = run.log
    run.ledger.deleted(run.ledger.from_offset(7), run.tolerate(lambda: log.truncate(7)))
    run.append_one(b"behind the cut")


def trim(run: Run) -> None:
    assert run.log is not None
    log = run.log
    run.ledger.deleted(run.ledger.below(6), run.tolerate(lambda: log.trim(6)))
    run.append_one(b"behind the trim")


def retain(run: Run) -> None:
    assert run.log is not None
    log = run.log
    end = log.segments[-1].base_offset
    done = run.tolerate(lambda: log.enforce(RetentionPolicy(max_bytes=1), now=TIME))
    run.ledger.deleted(run.ledger.below(end), done)
    run.ledger.deleted(run.ledger.from_offset(end), False)
    run.append_one(b"behind retention")


def compact(run: Run) -> None:
    assert run.log is not None
    log = run.log
    sealed = log.segments[-1].base_offset
    newest = {number % 5: value for number, value in enumerate(values(b"old", 12))}
    run.tolerate(lambda: Compactor(log).run())
    superseded = [v for v in run.ledger.below(sealed) if v not in newest.values()]
    run.ledger.deleted(superseded, False)
    run.append_one(b"behind compaction")


def purge(run: Run) -> None:
    assert run.log is not None
    log = run.log
    going = [v for number, v in enumerate(values(b"old", 12)) if number % 5 == 2]
    run.ledger.deleted(going, run.tolerate(lambda: Compactor(log).purge(b"k2")))
    run.append_one(b"behind the purge")


def transact(run: Run) -> None:
    assert run.log is not None
    log = run.log
    done = run.tolerate(lambda: log.end_transaction(9, 0, commit=False))
    if done:
        run.ledger.aborted.update(values(b"pending", 2))
    for producer_id, sequence, commit in ((7, 2, True), (8, 2, False)):
        written = values(b"txn %d" % producer_id, 2)
        raw = transactional(written, sequence, producer_id)
        if not run.append(written, lambda: log.append_batch(raw).offsets):  # noqa: B023
            return
        ended = run.tolerate(
            lambda: log.end_transaction(producer_id, 0, commit=commit)  # noqa: B023
        )
        if not commit:
            run.ledger.aborted.update(written)
        if not ended:
            return


def close(run: Run) -> None:
    assert run.log is not None
    run.append_one(b"before the close")
    run.tolerate(run.log.close)


def reopen(run: Run) -> None:
    if run.tolerate(run.open):
        run.append_one(b"after opening")


def read(run: Run) -> None:
    """All that is read is right; an error of the disk is raised, and is not called damage."""
    assert run.log is not None
    log = run.log
    wanted = {at: value for value, at in run.ledger.there.items()}

    def scan() -> None:
        found = {record.offset: record.value for record in log.scan()}
        if found != wanted:
            raise Surprise(f"read {found}")

    def columns() -> None:
        found = {}
        for chunk in log.scan().columns(rows=5):
            for number in range(len(chunk)):
                found[int(chunk.offsets[number])] = chunk.values[number]
        if found != wanted:
            raise Surprise(f"read {found}")

    def lookups() -> None:
        for offset in (0, 5, 11):
            if log[offset].value != wanted[offset]:
                raise Surprise(f"offset {offset} read as {log[offset].value}")
        if log.offset_for_time(TIME + 5) != 5:
            raise Surprise("another offset for a time")
        if [record.value for record in log.tail(2)] != [wanted[10], wanted[11]]:
            raise Surprise("another tail")

    for act in (scan, columns, lookups):
        run.tolerate(act)


def read_beside(run: Run) -> None:
    """The same through a reader's handle, which is opened meanwhile."""
    if run.tolerate(lambda: run.open(readonly=True)):
        read(run)


def check(run: Run) -> None:
    """What cannot be read is reported as that, or raised; never as damage."""
    assert run.log is not None
    log = run.log

    def act() -> None:
        for problem in log.check(on_corrupt="report"):
            if problem.severity == "error" and problem.kind.name != "UNREADABLE_FILE":
                raise Surprise(f"{problem}")

    run.tolerate(act)


def use_store(run: Run) -> None:
    """Open a store, make a topic, append, delete the other one, close."""

    def act() -> None:
        with logstore.open(run.path / "store", durability="fsync") as store:
            run.store = store
            run.tolerate(lambda: store.create_topic("new", partitions=1))
            if "new" in store:
                topic = store["new"]
                run.append([b"n"], lambda: topic.append(b"n", partition=0).offset)
            if "old" in store:
                value = b"stored 99"
                run.append([value], lambda: store["old"].append(value, partition=1).offset)
                deleted = run.tolerate(lambda: store.delete_topic("old"))
                run.ledger.deleted([*values(b"stored", 4), value], deleted)
            run.tolerate(store.checkpoint)

    run.tolerate(act)


@dataclass(frozen=True)
class Workload:
    start: Callable[[Run], None]
    act: Callable[[Run], None]
    opened: bool = True  # before faults begin

    @property
    def name(self) -> str:
        return f"{self.start.__name__} {self.act.__name__}"


WORKLOADS = [
    Workload(nothing, create, opened=False),
    Workload(closed, append_os),
    Workload(closed, append_fsync),
    Workload(closed, extend),
    Workload(closed, write),
    Workload(closed, roll),
    Workload(closed, truncate),
    Workload(closed, trim),
    Workload(closed, retain),
    Workload(closed, compact),
    Workload(closed, purge),
    Workload(with_transactions, transact),
    Workload(closed, close),
    Workload(closed, reopen, opened=False),
    Workload(with_transactions, reopen, opened=False),
    Workload(killed, reopen, opened=False),
    Workload(half_swapped, reopen, opened=False),
    Workload(half_truncated, reopen, opened=False),
    Workload(closed, read),
    Workload(killed, read_beside, opened=False),
    Workload(closed, check),
    Workload(stored, use_store, opened=False),
]


# ---- running them ---------------------------------------------------------------------------


def ways(calls: list[Operation]) -> Iterator[tuple[str, tuple[Fault, ...]]]:
    """Every call of a run without faults, spoiled in every way."""
    for number, call in enumerate(calls, 1):
        where = f"call {number} of {len(calls)}, {call}"
        closes = sum(other.kind == "close" for other in calls[: number - 1])
        # A descriptor is gone even where close reports an error: that one fails late.
        first = {"close": closes + 1, "others": number - closes}
        own = "close" if call.kind == "close" else "others"
        for code, forever in itertools.product(ERRNOS, (False, True)):
            how = f"{errno.errorcode[code]} {'for ever' if forever else 'once'} at {where}"
            if code == errno.EINTR and forever:
                storm = range(EINTR_STORM)
                yield how, tuple(failing(code, own, first[own] + more) for more in storm)
            elif forever:
                yield how, tuple(failing(code, kind, first[kind], True) for kind in first)
            else:
                yield how, (failing(code, own, first[own]),)
        if call.kind in ("pread", "pwrite") and call.size > 1:
            kinds = ("pread", "pwrite")
            before = sum(other.kind in kinds for other in calls[: number - 1])
            for count, forever in itertools.product((1, call.size // 2), (False, True)):
                how = f"{count} bytes {'for ever' if forever else 'once'} at {where}"
                yield how, (Fault.short(count, kinds, call=before + 1, forever=forever),)


def failing(code: int, kind: str, call: int, forever: bool = False) -> Fault:
    kinds = ("close",) if kind == "close" else tuple(k for k in KINDS if k != "close")
    return Fault.fail(code, kinds, call=call, forever=forever, late=kind == "close")


class Campaign:
    """All runs of one workload."""

    def __init__(self, workload: Workload, root: Path) -> None:
        self.workload = workload
        self.root = root
        self.counts: Counter[str] = Counter()
        template = Run(root / "template", Ledger())
        template.path.mkdir()
        workload.start(template)
        self.ledger = template.ledger
        self.folders = [p.relative_to(template.path) for p in template.path.rglob("*/")]
        self.files = {
            path.relative_to(template.path): path.read_bytes()
            for path in template.path.rglob("*")
            if path.is_file() and path.name not in (".lock", "logstore.reserve")
        }
        self.descriptors = self.open_files()

    def fresh(self) -> Run:
        path = self.root / "run"
        if path.exists():
            shutil.rmtree(path)
        path.mkdir()
        for folder in sorted(self.folders):
            (path / folder).mkdir(exist_ok=True)
        for name, contents in self.files.items():
            (path / name).write_bytes(contents)
        known = self.ledger
        return Run(path, Ledger(dict(known.there), set(), set(known.unknown), set(known.aborted)))

    def calls(self) -> list[Operation]:
        return self.once(())

    def once(self, faults: tuple[Fault, ...]) -> list[Operation]:
        run = self.fresh()
        try:
            if self.workload.opened:
                run.open()
            with inject_io(*faults, root=run.path, keep_calls=not faults) as io:
                self.workload.act(run)
            self.counts["fired"] += bool(io.fired)
            self.afterwards(run)
        finally:
            if run.log is not None and not run.log.closed:
                run.log.parts.discard()
            run.log = run.store = None
        self.verify(run)
        self.counts["runs"] += 1
        for _ in range(3):  # what a traceback held, and what that held
            if self.open_files() <= self.descriptors:
                break
            gc.collect()
        if left := self.open_files() - self.descriptors:
            raise Surprise(f"left open: {left}")
        return io.calls

    @staticmethod
    def open_files() -> set[str]:
        """Descriptors by number and path, but for the one that lists them."""
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        return found

    def afterwards(self, run: Run) -> None:
        """The fault is gone: the handle can be used, or has a `failure`."""
        log = run.log
        if log is None or log.closed or log.readonly:
            return
        if run.append_one(b"when all is well again"):
            self.counts["usable"] += 1
        elif log.failure is None:
            raise Surprise("it neither takes an append nor has it failed")
        else:
            self.counts["failed"] += 1
        found = {record.value: record.offset for record in log.scan()}
        self.compare(run.ledger, found)
        if self.counts["runs"] % 4 == 0 and not run.tolerate(log.close) and log.failure is None:
            raise Surprise("it cannot be closed")

    def verify(self, run: Run) -> None:
        """After a second open, all is there."""
        if (run.path / "store").exists():
            self.verify_store(run)
            return
        log = Partition.open(run.path / "orders-0", durability="os", config=CONFIG)
        try:
            if log.recovery.damage:
                raise Surprise(f"damage: {log.recovery.damage}")
            found = {record.value: record.offset for record in log.scan()}
            self.compare(run.ledger, found)
            if run.ledger.aborted:
                committed = {record.value for record in log.scan(isolation="read_committed")}
                if seen := committed & run.ledger.aborted:
                    raise Surprise(f"aborted, yet read: {seen}")
            if self.counts["runs"] % 4 == 1:
                log.check()
            end = log.end_offset
            if log.append(b"the last") != end or log[end].value != b"the last":
                raise Surprise("the next append went wrong")
        finally:
            log.parts.discard()
        if left := [name for name in os.listdir(run.path / "orders-0") if name.endswith(".tmp")]:
            raise Surprise(f"left behind: {left}")

    def verify_store(self, run: Run) -> None:
        with logstore.open(run.path / "store", durability="os") as store:
            found = {
                record.value: record.offset
                for topic in store.values()
                for partition in topic
                for record in partition.scan()
            }
            self.compare(run.ledger, found)
            store.check()

    def compare(self, ledger: Ledger, found: dict[bytes | None, int]) -> None:
        lost = {v[:9]: (at, found.get(v)) for v, at in ledger.there.items() if found.get(v) != at}
        if lost:
            raise Surprise(f"acknowledged, and not there: {lost}")
        if there := ledger.absent & found.keys():
            raise Surprise(f"refused or deleted, and yet there: {there}")
        known = ledger.there.keys() | ledger.unknown | ledger.absent
        if more := found.keys() - known:
            raise Surprise(f"never written: {more}")


def run_share(share: int, shares: int, root: Path, only: str = "") -> dict[str, int]:
    """Every run that falls to this share; how many there were of each workload."""
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for workload in WORKLOADS:
        if only not in workload.name:
            continue
        place = Path(tempfile.mkdtemp(dir=root))
        campaign = Campaign(workload, place)
        calls = campaign.calls()
        for number, (how, faults) in enumerate(ways(calls)):
            if number % shares != share:
                continue
            try:
                campaign.once(faults)
            except Exception as error:  # noqa: BLE001  any other error is a finding
                frames = traceback.extract_tb(error.__traceback__)
                at = [f"{Path(f.filename).name}:{f.lineno}" for f in frames][-3:]
                failures[f"{workload.name}: {type(error).__name__}: {error} {at}"] += 1
                print(f"{workload.name}: {how}: {type(error).__name__}: {error} {at}",
                      file=sys.stderr)  # fmt: skip
                campaign.descriptors = campaign.open_files()
        counts[workload.name] += campaign.counts["runs"]
        counts += campaign.counts
        counts["calls"] += len(calls) if share == 0 else 0
        shutil.rmtree(place)
    counts["violations"] = failures.total()
    return dict(counts)


ONE_RUN_IN = sized(10, 1, 1)


@pytest.mark.campaign
def test_every_call_may_fail_in_every_way(run_shares: RunShares) -> None:
    counts = run_shares(__file__, shares=2 * ONE_RUN_IN, chosen=(0, ONE_RUN_IN))
    assert counts["violations"] == 0
    assert counts["runs"] >= 30_000 // ONE_RUN_IN
    assert counts["fired"] > 0.95 * counts["runs"]
    assert counts["usable"] > 0
    assert counts["failed"] > 0
    assert all(counts[workload.name] > 100 // ONE_RUN_IN for workload in WORKLOADS)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore", ResourceWarning)  # writers that cannot be closed any more
    only = sys.argv[4] if len(sys.argv) > 4 else ""
    with tempfile.TemporaryDirectory(dir=sys.argv[3]) as directory:
        print(json.dumps(run_share(int(sys.argv[1]), int(sys.argv[2]), Path(directory), only)))
