"""After a failed fsync: no acknowledgement afterwards without proof from the device."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import logstore
from logstore import (
    ClosedError,
    FailedLogError,
    IndeterminateAppendError,
    OffsetOutOfRangeError,
    Partition,
    ProblemKind,
    Store,
)
from logstore.recovery.failed_sync import FailedSync
from logstore.testing import Fault, inject_io
from tests.kit import values

EIO = Fault.fail(errno.EIO, "datasync", "*.log")


def failed(path: Path, *, durable: int = 3) -> Partition:
    """An open partition of `durable` records, and one whose fsync failed."""
    log = Partition.open(path)
    log.extend([b"durable %d" % i for i in range(durable)])
    with inject_io(EIO), pytest.raises(IndeterminateAppendError) as caught:
        log.append(b"perhaps")
    assert caught.value.offsets == range(durable, durable + 1)
    return log


def test_everyone_who_waits_is_told_and_nobody_appends_afterwards(tmp_path: Path) -> None:
    log = failed(tmp_path / "orders-0")
    for act in (
        lambda: log.append(b"later"),
        lambda: log.append(b"later", durability="os"),
        lambda: log.extend([b"later"]),
        lambda: log.sync(),
        lambda: log.roll(),
    ):
        with pytest.raises(IndeterminateAppendError) as caught:
            act()
        assert isinstance(caught.value, FailedLogError | ClosedError)
    assert isinstance(log.failure, OSError)
    log.close()


def test_threads_that_share_the_failed_sync_all_hear_of_it(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "orders-0") as log:
        log.append(b"first")
        outcomes: list[object] = []

        def append() -> None:
            try:
                outcomes.append(log.append(b"shared"))
            except IndeterminateAppendError as error:
                outcomes.append(error)

        with inject_io(Fault.fail(errno.EIO, "datasync", "*.log", forever=True)):
            threads = [threading.Thread(target=append) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(outcomes) == 8
        assert all(isinstance(each, IndeterminateAppendError) for each in outcomes)
        assert log.durable_offset == 1


def test_readers_stay_below_what_is_durable(tmp_path: Path) -> None:
    log = failed(tmp_path / "orders-0")
    assert log.end_offset == log.durable_offset == 3
    assert values(log) == [b"durable 0", b"durable 1", b"durable 2"]
    assert log[-1].value == b"durable 2"
    assert [r.value for r in log.tail(5)] == values(log)
    with pytest.raises(OffsetOutOfRangeError):
        log[3]
    with Partition.open(log.path, readonly=True) as reader:
        assert reader.end_offset == 3
        assert values(reader) == values(log)
        kinds = [problem.kind for problem in reader.check()]
        assert ProblemKind.FAILED_SYNC in kinds
    log.close()


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_opening_again_writes_the_log_to_a_new_file(tmp_path: Path, durability: str) -> None:
    path = tmp_path / "orders-0"
    failed(path).close()
    file = path / f"{0:020d}.log"
    inode = file.stat().st_ino
    assert FailedSync.NAME in {p.name for p in path.iterdir()}
    with Partition.open(path, durability=durability) as log:
        assert log.recovery.rewritten == [file]
        assert values(log)[:3] == [b"durable 0", b"durable 1", b"durable 2"]
        assert log.durable_offset == log.end_offset
        assert log.append(b"next") == log.end_offset - 1
    assert file.stat().st_ino != inode
    assert FailedSync.NAME not in {p.name for p in path.iterdir()}
    with Partition.open(path) as log:
        assert log.recovery.rewritten == []
        assert log.check() == []


@pytest.mark.parametrize("page", ["zeros", "old", "shorter"])
def test_a_page_that_never_reached_the_disk_is_cut_off(tmp_path: Path, page: str) -> None:
    """What the device holds counts, not what the page cache had before."""
    path = tmp_path / "orders-0"
    log = failed(path)
    file = path / f"{0:020d}.log"
    size = file.stat().st_size
    start = size - 69  # inside the last batch
    log.close()
    content = file.read_bytes()
    reverted = {
        "zeros": content[:start] + bytes(size - start),
        "old": content[:start] + content[: size - start],
        "shorter": content[:start],
    }
    file.write_bytes(reverted[page])
    with Partition.open(path) as log:
        assert values(log) == [b"durable 0", b"durable 1", b"durable 2"]
        assert log.append(b"next") == 3
    with Partition.open(path) as log:
        assert log[3].value == b"next"


def test_the_mark_stays_until_all_of_it_is_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    failed(path).close()
    calls = ("datasync", "sync", "rename", "pwrite", "truncate", "unlink", "open", "pread")
    for kind in calls:
        for call in range(1, 40):
            fault = Fault.fail(errno.EIO, kind, "*orders-0/*", call=call)
            with inject_io(fault) as injected:
                try:
                    log = Partition.open(path)
                except OSError:
                    pass
                else:
                    log.parts.discard()
            if not injected.fired:
                break
            # In each case the log opens, and the records that were acknowledged are there.
            with Partition.open(path, readonly=True) as reader:
                assert values(reader)[:3] == [b"durable 0", b"durable 1", b"durable 2"]
            if FailedSync.NAME not in {p.name for p in path.iterdir()}:
                failed_again(path)
    with Partition.open(path) as log:
        assert values(log)[:3] == [b"durable 0", b"durable 1", b"durable 2"]
        assert FailedSync.NAME not in {p.name for p in path.iterdir()}


def failed_again(path: Path) -> None:
    with Partition.open(path) as log:
        end = log.end_offset
        log.append(b"x")
        with inject_io(EIO), pytest.raises(IndeterminateAppendError):
            log.append(b"y")
        assert log.durable_offset == end + 1


def test_a_mark_that_cannot_be_written_is_remembered_by_the_process(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    log = Partition.open(path)
    log.append(b"durable")
    with (
        inject_io(EIO, Fault.fail(errno.EIO, "open", f"*{FailedSync.NAME}*", forever=True)),
        pytest.raises(IndeterminateAppendError),
    ):
        log.append(b"perhaps")
    log.close()
    assert FailedSync.NAME not in {p.name for p in path.iterdir()}
    with Partition.open(path) as log:
        assert len(log.recovery.rewritten) == 1
        assert log[0].value == b"durable"
    with Partition.open(path) as log:
        assert log.recovery.rewritten == []


def test_a_mark_that_cannot_be_read_counts_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    with Partition.open(path) as log:
        log.append(b"durable")
    (path / FailedSync.NAME).write_bytes(b"nonsense")
    with Partition.open(path) as log:
        assert len(log.recovery.rewritten) == 1
        assert values(log) == [b"durable"]


def test_other_partitions_are_flushed_next(make_store: Callable[..., Store]) -> None:
    store = make_store(durability="os")
    topic = store.create_topic("orders", 2)
    bad, other = topic[0], topic[1]
    other.append(b"in memory")
    assert other.durable_offset == 0
    bad.append(b"x")
    with inject_io(Fault.fail(errno.EIO, "datasync", "*orders-0*")), pytest.raises(OSError):
        bad.sync()
    assert other.append(b"suspected") == 1
    assert other.durable_offset == 2
    other.append(b"trusted again")
    assert other.durable_offset == 2
    store.close()
    with logstore.open(store.path) as again:
        assert not again.recovery.clean
        assert list(again.recovery.partitions) == ["orders-0"]
        assert again["orders"][1].end_offset == 3
