"""Every fsync fails, and the pages it was for are gone: what was acknowledged is still there.

After a failed fsync the kernel calls the pages clean, so a second one succeeds without having
written them.  What the file holds then differs by file system: the new bytes for as long as they
are cached, the old ones, or none.  Each workload is run once for every fsync it makes; that one
fails, and the file it was for is made to look each of these ways before the log is opened again.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from logstore import (
    ClosedError,
    IndeterminateAppendError,
    Partition,
    PartitionConfig,
)
from logstore.testing import check_invariants
from logstore.testing.io import record_io
from logstore.testing.io_calls import SYNCS, Fault, Operation

CONFIG = PartitionConfig(segment_bytes=1024, index_interval_bytes=100)
TIME = 1_600_000_000_000
BEHAVIOURS = ("kept", "zeros", "old")


class Caller:
    """Appends, and remembers what it was promised."""

    def __init__(self, log: Partition) -> None:
        self.log = log
        self.promised: dict[int, bytes] = {}
        self.starts = {0}  # where the log may start
        self.number = 0

    def append(self, count: int = 1) -> None:
        for _ in range(count):
            self.number += 1
            value = b"value %d" % self.number + bytes(150)
            try:
                offset = self.log.append(value, timestamp=TIME)
            except (OSError, ClosedError):
                continue
            self.promised[offset] = value

    def attempt(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except (OSError, ClosedError):
            return False
        return True


def appends(caller: Caller) -> None:
    caller.append(3)


def appends_that_roll(caller: Caller) -> None:
    caller.append(9)
    caller.attempt(caller.log.roll)
    caller.append(2)


def syncs(caller: Caller) -> None:
    log = caller.log
    for number in range(3):
        value = b"synced %d" % number
        offset = log.append(value, timestamp=TIME, durability="os") if not log.failure else -1
        if caller.attempt(log.sync) and offset >= 0:
            caller.promised[offset] = value


def trims(caller: Caller) -> None:
    caller.append(8)
    if caller.attempt(lambda: caller.log.trim(5)):
        caller.starts = {5}
    else:
        caller.starts = {0, 5}
    caller.append(1)


def truncates(caller: Caller) -> None:
    caller.append(8)
    caller.attempt(lambda: caller.log.truncate(3))
    caller.promised = {at: value for at, value in caller.promised.items() if at < 3}
    caller.append(2)


def closes(caller: Caller) -> None:
    caller.append(2)
    caller.attempt(caller.log.close)


WORKLOADS = (appends, appends_that_roll, syncs, trims, truncates, closes)


class Device:
    """What is on it for certain, by the calls that were made: what a successful fsync covered."""

    def __init__(self) -> None:
        self.cached: dict[str, bytes] = {}
        self.durable: dict[str, bytes] = {}
        self.failed: str | None = None

    def take(self, call: Operation) -> None:
        path = call.path
        if call.kind == "pwrite" and call.data:
            held = self.cached.get(path, b"").ljust(call.position, b"\0")
            self.cached[path] = (
                held[: call.position] + call.data + held[call.position + call.done :]
            )
        elif call.kind == "truncate" and call.result == 0:
            self.cached[path] = self.cached.get(path, b"")[: call.size].ljust(call.size, b"\0")
        elif call.kind == "rename" and call.result == 0 and call.target is not None:
            for layer in (self.cached, self.durable):
                if path in layer:
                    layer[call.target] = layer.pop(path)
        elif call.kind == "unlink" and call.result == 0:
            for layer in (self.cached, self.durable):
                layer.pop(path, None)
        elif call.kind in SYNCS and call.result == 0 and path != self.failed:
            # Of a file whose fsync failed once nothing that came before is ever written.
            self.durable[path] = self.cached.get(path, b"")
        elif call.kind in SYNCS and call.result < 0:
            self.failed = path

    def lose(self, root: Path, behaviour: str) -> None:
        """Make the file whose fsync failed look as it may once its pages are evicted."""
        if behaviour == "kept" or self.failed is None or not (root / self.failed).is_file():
            return
        path = root / self.failed
        durable = self.durable.get(self.failed, b"")
        size = path.stat().st_size
        path.write_bytes(
            durable[:size] if behaviour == "old" else durable[:size].ljust(size, b"\0")
        )


def run(path: Path, workload: Callable[[Caller], None], fail_at: int) -> tuple[Caller, Device, int]:
    """One pass in which the n-th fsync fails (0: none): promises, device, calls to fsync."""
    path.mkdir()
    fault = Fault.fail(errno.EIO, SYNCS, call=max(1, fail_at))
    device = Device()
    with record_io(path, *((fault,) if fail_at else ())) as trace:
        try:
            log = Partition.open(path / "orders-0", config=CONFIG)
        except OSError:
            log = None
        caller = Caller(log) if log is not None else Caller.__new__(Caller)
        if log is None:
            caller.promised, caller.starts = {}, {0}
        else:
            workload(caller)
    for call in trace.operations:
        device.take(call)
    if log is not None and not log.closed:
        log.parts.discard()
    return caller, device, sum(call.kind in SYNCS for call in trace.operations)


@pytest.fixture
def unlogged() -> Iterator[None]:
    """A captured warning holds its error, and that the files of the frames it came through."""
    logger = logging.getLogger("logstore")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.mark.usefixtures("unlogged")
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_nothing_is_acknowledged_on_the_word_of_an_fsync_that_failed(
    tmp_path: Path, workload: Callable[[Caller], None]
) -> None:
    caller, _, sites = run(tmp_path / "sound", workload, 0)
    assert caller.promised
    assert sites > 3
    for site in range(1, sites + 1):
        path = tmp_path / str(site)
        caller, device, _ = run(path, workload, site)
        assert device.failed is not None
        for behaviour in BEHAVIOURS:
            copy = tmp_path / f"{site} {behaviour}"
            shutil.copytree(path, copy)
            device.lose(copy, behaviour)
            what = f"fsync {site} of {sites}, {device.failed} {behaviour}"
            with Partition.open(copy / "orders-0", durability="os", config=CONFIG) as log:
                assert not log.recovery.damage, what
                found = {record.offset: record.value for record in log.scan()}
                assert log.start_offset in caller.starts, what
                kept = {at for at in caller.promised if at >= log.start_offset}
                lost = {at for at in kept if found.get(at) != caller.promised[at]}
                assert not lost, f"{what}: acknowledged, and not there: {lost}"
                check_invariants(log)


def test_no_append_is_acknowledged_after_an_fsync_failed(tmp_path: Path) -> None:
    """Neither by a second try, nor by another thread's fsync, nor as a duplicate."""
    with Partition.open(tmp_path / "orders-0") as log:
        log.append(b"durable")
        fault = Fault.fail(errno.EIO, "datasync", "*.log")
        with record_io(tmp_path, fault) as trace:
            for number in range(3):
                with pytest.raises((IndeterminateAppendError, ClosedError)):
                    log.append(b"number %d" % number)
            with pytest.raises((OSError, ClosedError)):
                log.sync()
        synced = [c for c in trace.operations if c.kind == "datasync" and c.path.endswith(".log")]
        assert [call.result for call in synced] == [-errno.EIO], (
            "the same file is never asked twice"
        )
        assert log.failure is not None
        assert log.durable_offset == 1
