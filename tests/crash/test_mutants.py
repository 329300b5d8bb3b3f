"""Protocols with one step taken out: each must be noticed by some test.

A mutant leaves out a barrier (a call is pretended to have been made) or a check (one named function
is replaced).  Its killer is the cheapest check that fails with it; the same check passes
without.  A mutant that survives is a missing test.

Barriers are killed by power cuts on the worst disk (see worst_disk), checks by plain use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import (
    BatchEncoder,
    ClosedError,
    Compactor,
    ConflictError,
    CorruptLogError,
    FencedError,
    ForkedHandleError,
    IndeterminateAppendError,
    InvalidRecordError,
    LockedError,
    LogStoreError,
    ManualClock,
    OutOfOrderSequenceError,
    Partition,
    RecordTooLargeError,
    RetentionPolicy,
    with_producer,
)
from logstore.format.batch import with_header
from logstore.testing.io import inject_io, record_io
from logstore.testing.io_calls import Fault
from tests.crash.worst_disk import power_cuts, put
from tests.kit import committed

CONFIG = {"segment.bytes": 1024, "index.interval.bytes": 128}
Promise = Callable[..., None]
Promised = list[tuple[Any, ...]]


# ---- killers that cut the power ----


@dataclass(frozen=True)
class Protocol:
    """Something done to a directory, with its promises; and what must hold of them after a cut."""

    act: Callable[[Path, Promise], None]
    judge: Callable[[Path, Promised], None]


def value_of(number: int) -> bytes:
    return b"%03d" % number * 30


def appends(root: Path, promise: Promise) -> None:
    with Partition.open(root / "orders-0", config=CONFIG) as log:
        for number in range(12):
            promise("record", log.append(value_of(number)), value_of(number))


def cuts_off(root: Path, promise: Promise) -> None:
    with Partition.open(root / "orders-0", config=CONFIG) as log:
        for number in range(14):
            promise("record", log.append(value_of(number)), value_of(number))
        promise("may end", 5)
        log.truncate(5)
        promise("end", 5)
        for number in range(20, 24):
            promise("record", log.append(value_of(number)), value_of(number))


def cuts_a_batch(root: Path, promise: Promise) -> None:
    """The kept records of the batch are encoded again: for a moment only the plan has them."""
    with Partition.open(root / "orders-0", config=CONFIG) as log:
        for first in (0, 6):
            log.extend([value_of(number) for number in range(first, first + 6)])
            for number in range(first, first + 6):
                promise("record", number, value_of(number))
        promise("may end", 10)
        log.truncate(10)
        promise("end", 10)
        promise("record", log.append(value_of(20)), value_of(20))


def trims(root: Path, promise: Promise) -> None:
    with Partition.open(root / "orders-0", config=CONFIG) as log:
        for number in range(14):
            promise("record", log.append(value_of(number)), value_of(number))
        promise("may start", 9)
        log.trim(9)
        promise("start", 9)
        promise("record", log.append(value_of(14)), value_of(14))


def reopens(root: Path, promise: Promise) -> None:
    for turn in range(3):
        with Partition.open(root / "orders-0", config=CONFIG) as log:
            for number in range(turn * 4, turn * 4 + 4):
                promise("record", log.append(value_of(number)), value_of(number))


def judge_log(root: Path, promised: Promised) -> None:
    records: dict[int, bytes] = {}
    end = start_max = start_min = 0
    for kind, *what in promised:
        if kind == "record":
            records[what[0]] = what[1]
            end = max(end, what[0] + 1)
        elif kind == "may end":
            records = {offset: value for offset, value in records.items() if offset < what[0]}
            end = what[0]
        elif kind == "end":
            end = what[0]
        elif kind == "may start":
            start_max = what[0]
        elif kind == "start":
            start_min = what[0]
    with Partition.open(root / "orders-0", config=CONFIG) as log:
        assert not log.recovery.damage, log.recovery.damage
        stored = {record.offset: record.value for record in log}
        assert list(stored) == list(range(log.start_offset, log.end_offset)), "a gap"
        assert log.end_offset >= end, f"ends at {log.end_offset}, not {end}"
        assert start_min <= log.start_offset <= start_max, f"starts at {log.start_offset}"
        for offset, value in records.items():
            assert offset < log.start_offset or stored.get(offset) == value, f"offset {offset}"
        log.append(b"alive")
        log.check()


def compacts(root: Path, promise: Promise) -> None:
    config = {**CONFIG, "cleanup.policy": "compact"}
    with Partition.open(root / "orders-0", config=config) as log:
        for number in range(20):
            key = b"k%d" % (number % 4)
            promise("key", key, log.append(value_of(number), key=key))
        log.roll()
        Compactor(log).run()
        promise("key", b"k9", log.append(value_of(90), key=b"k9"))


def judge_table(root: Path, promised: Promised) -> None:
    config = {**CONFIG, "cleanup.policy": "compact"}
    newest = {key: offset for kind, key, offset in promised if kind == "key"}
    with Partition.open(root / "orders-0", config=config) as log:
        assert not log.recovery.damage, log.recovery.damage
        stored = {record.offset: record for record in log}
        for key, offset in newest.items():
            assert offset in stored, f"{key!r} at {offset} is gone"
            assert stored[offset].key == key
        log.append(b"alive", key=b"alive")
        log.check()


def makes_topics(root: Path, promise: Promise) -> None:
    with logstore.open(root / "store", config=CONFIG) as store:
        promise("store")
        for number in range(2):
            name = f"topic{number}"
            topic = store.create_topic(name, config={"retention.ms": 1000 + number})
            promise("topic", name, 1000 + number)
            topic[0].append(value_of(number))
            promise("in topic", name, value_of(number))


def judge_store(root: Path, promised: Promised) -> None:
    with logstore.open(root / "store", config=CONFIG) as store:
        for kind, *what in promised:
            if kind == "topic":
                assert what[0] in store, f"{what[0]} is gone"
                assert store[what[0]].config.retention_ms == what[1]
            elif kind == "in topic":
                assert [record.value for record in store[what[0]][0]] == [what[1]]


def leads(root: Path, promise: Promise) -> None:
    with Partition.open(root / "orders-0", config=CONFIG) as log:
        log.append(b"a")
        for epoch in (3, 5):
            log.become_leader(epoch)
            promise("epoch", epoch)


def judge_epochs(root: Path, promised: Promised) -> None:
    epochs = [what[0] for kind, *what in promised if kind == "epoch"]
    with Partition.open(root / "orders-0", config=CONFIG) as log:
        assert log.leader_epoch >= max(epochs, default=0), f"epoch {log.leader_epoch} of {epochs}"


PROTOCOLS = {
    "append": Protocol(appends, judge_log),
    "truncate": Protocol(cuts_off, judge_log),
    "truncate in a batch": Protocol(cuts_a_batch, judge_log),
    "trim": Protocol(trims, judge_log),
    "reopen": Protocol(reopens, judge_log),
    "compact": Protocol(compacts, judge_table),
    "topics": Protocol(makes_topics, judge_store),
    "epochs": Protocol(leads, judge_epochs),
}


@contextlib.contextmanager
def another_boot(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A power cut ends a boot: what the page cache would have kept is not claimed."""
    with monkeypatch.context() as patch:
        for module in ("recovery.loader", "partition.durability", "files.lock"):
            patch.setattr(f"logstore.{module}.boot_id", lambda: "after the power cut")
        yield


def cut_power(
    protocol: Protocol, directory: Path, monkeypatch: pytest.MonkeyPatch, *faults: Fault
) -> str:
    """The first promise that is broken, in words; empty when all are kept."""
    promised: Promised = []
    work = directory / "work"
    work.mkdir()
    with record_io(work, *faults) as trace:

        def promise(*what: Any) -> None:
            promised.append(what)
            trace.mark(len(promised))

        protocol.act(work, promise)
        operations = trace.operations
    seen: set[tuple[int, int]] = set()
    with another_boot(monkeypatch):
        for number, name, tree, marks in power_cuts(operations):
            digest = (hash(frozenset(tree.items())), marks)
            if digest in seen:
                continue
            seen.add(digest)
            root = directory / "cut"
            put(tree, root)
            try:
                protocol.judge(root, promised[:marks])
            except (AssertionError, LogStoreError, OSError) as error:
                return f"after {number} calls ({name}): {type(error).__name__}: {error}"
            finally:
                shutil.rmtree(root)
    return ""


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory without a disk below it, where there is one: the disk here is the model's."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_with_all_its_steps_keeps_its_promises(
    name: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cut_power(PROTOCOLS[name], memory, monkeypatch) == ""


# Left out: (protocol, kind of call, which files).
BARRIERS = {
    "create: the directory above is not synced": ("append", "sync", ""),
    "append: the directory is not synced": ("append", "sync", "orders-0"),
    "append: the log is not synced": ("append", "datasync", "orders-0/*.log"),
    "roll: the snapshot of producers is not put in its place": (
        "append",
        "rename",
        "orders-0/*.snapshot.*.tmp",
    ),
    "truncate: the plan is not synced": (
        "truncate in a batch",
        "sync",
        "orders-0/truncate.plan.*.tmp",
    ),
    "truncate: the plan is not put in its place": (
        "truncate in a batch",
        "rename",
        "orders-0/truncate.plan.*.tmp",
    ),
    "truncate: the plan stays": ("truncate", "unlink", "orders-0/truncate.plan"),
    "truncate: later segments stay": ("truncate", "unlink", "orders-0/*.log"),
    # Two files have it, so that one may be damaged.
    "trim: the new start is not synced": ("trim", "sync", "orders-0/logstore.*.tmp"),
    "trim: the new start is not put in its place": (
        "trim",
        "rename",
        "orders-0/logstore.*.tmp",
    ),
    "reopen: the log is not synced": ("reopen", "datasync", "orders-0/*.log"),
    "compact: new segments are not synced": ("compact", "sync", "orders-0/*.log.cleaned"),
    "compact: new indexes are not synced": ("compact", "sync", "orders-0/*.index.cleaned"),
    "compact: the directory is not synced": ("compact", "sync", "orders-0"),
    "epochs: a new one is not synced": (
        "epochs",
        "sync",
        "orders-0/leader-epoch-checkpoint.*.tmp",
    ),
    "epochs: a new one is not put in its place": (
        "epochs",
        "rename",
        "orders-0/leader-epoch-checkpoint.*.tmp",
    ),
    "epochs: the directory is not synced": ("epochs", "sync", "orders-0"),
    "store: the directory above is not synced": ("topics", "sync", ""),
    "store: its directory is not synced": ("topics", "sync", "store"),
    "store: the catalogue is not synced": ("topics", "sync", "store/logstore.topics.*.tmp"),
    "store: the catalogue is not put in its place": (
        "topics",
        "rename",
        "store/logstore.topics.*.tmp",
    ),
    "store: a partition is not synced": ("topics", "sync", "store/topic1-0"),
    "store: a log is not synced": ("topics", "datasync", "store/topic1-0/*.log"),
}


@pytest.mark.parametrize("mutant", BARRIERS)
def test_a_protocol_without_one_of_its_calls_is_found_out(
    mutant: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol, kind, files = BARRIERS[mutant]
    try:
        broken = cut_power(PROTOCOLS[protocol], memory, monkeypatch, Fault.pretend(kind, files))
    except (LogStoreError, OSError) as error:
        broken = f"not even done: {error}"  # it stumbles over what was left out
    assert broken, "nothing noticed it: a test is missing"


# ---- killers that use it ----


def log_in(directory: Path, **options: Any) -> Partition:
    settings: dict[str, Any] = {"durability": "os", "config": CONFIG, **options}
    return Partition.open(directory / "orders-0", **settings)


def raw(*values: bytes, producer: int = -1, epoch: int = 0, sequence: int = 0) -> bytes:
    encoder = BatchEncoder()
    for value in values:
        encoder.append(value, key=b"k")
    if producer < 0:
        return encoder.take()
    return with_producer(
        encoder.take(),
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=True,
    )


def refused(kind: type[BaseException], act: Callable[[], object], what: str) -> None:
    try:
        act()
    except kind:
        return
    raise AssertionError(f"{what} was not refused")


def two_writers(directory: Path) -> None:
    with log_in(directory):
        refused(LockedError, lambda: log_in(directory).close(), "a second writer")


def store_beside_partition(directory: Path) -> None:
    with logstore.open(directory, durability="os") as store:
        store.create_topic("orders")
        refused(LockedError, lambda: log_in(directory).close(), "a partition of a store")


def closed_handle(directory: Path) -> None:
    log = log_in(directory)
    log.append(b"a")
    log.close()
    refused(ClosedError, lambda: list(log), "reading a closed log")


def forked_handle(directory: Path) -> None:
    with log_in(directory) as log:
        log.append(b"a")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                log.append(b"b")
            except ForkedHandleError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "a child may append"


def expected_offset(directory: Path) -> None:
    with log_in(directory) as log:
        refused(ConflictError, lambda: log.append(b"a", expect_offset=7), "a wrong offset")


def retried_batch(directory: Path) -> None:
    with log_in(directory) as log:
        first = log.append_batch(raw(b"a", producer=5)).offsets
        again = log.append_batch(raw(b"a", producer=5))
        assert again.duplicate, "a retry was appended again"
        assert again.offsets == first
        assert log.end_offset == 1


def sequence_gap(directory: Path) -> None:
    with log_in(directory) as log:
        log.append_batch(raw(b"a", producer=5))
        gap = raw(b"c", producer=5, sequence=7)
        refused(OutOfOrderSequenceError, lambda: log.append_batch(gap), "a gap")


def old_epoch(directory: Path) -> None:
    with log_in(directory) as log:
        log.append_batch(raw(b"a", producer=5, epoch=3))
        refused(FencedError, lambda: log.append_batch(raw(b"b", producer=5, epoch=2)), "a zombie")


def old_leader(directory: Path) -> None:
    with log_in(directory) as log:
        log.become_leader(4)
        refused(FencedError, lambda: log.become_leader(3), "an old leader")


def aborted_is_hidden(directory: Path) -> None:
    with log_in(directory) as log:
        log.append_batch(raw(b"a", producer=5))
        log.end_transaction(5, 0, commit=False)
        log.append(b"b")
        assert committed(log) == [b"b"], "what was aborted is shown"


def open_is_hidden(directory: Path) -> None:
    with log_in(directory) as log:
        log.append_batch(raw(b"a", producer=5))
        log.append(b"b")
        assert committed(log) == [], "what is open is shown"


def torn_tail(directory: Path) -> None:
    with log_in(directory) as log:
        log.append(b"a")
        log.append(b"b")
        content = (log.path / "00000000000000000000.log").read_bytes()
        shutil.copytree(log.path, directory / "copy" / "orders-0")
    path = directory / "copy" / "orders-0" / "00000000000000000000.log"
    path.write_bytes(content[:-3])
    with Partition.open(path.parent, config=CONFIG) as log:
        assert log.recovery.torn, "the torn tail is not reported"
        assert log.append(b"c") == 1
        assert [record.value for record in log] == [b"a", b"c"]
        kept = [name for name in log.path.iterdir() if "torn" in name.name]
        assert kept, "what was cut is not kept"


def flipped_byte(directory: Path) -> None:
    with log_in(directory) as log:
        for number in range(30):
            log.append(value_of(number))
    path = directory / "orders-0" / "00000000000000000000.log"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with log_in(directory) as log:
        refused(CorruptLogError, lambda: list(log), "a flipped byte")


def broken_batch(directory: Path) -> None:
    batch = bytearray(raw(b"abc"))
    batch[-2] ^= 1  # in the value: only the checksum shows it
    with log_in(directory) as log:
        refused(InvalidRecordError, lambda: log.append_batch(bytes(batch)), "a broken batch")


def large_batch(directory: Path) -> None:
    batch = raw(b"a" * 4000)
    config = {**CONFIG, "segment.bytes": 1 << 20, "max.message.bytes": 1000}
    with log_in(directory, config=config) as log:
        refused(RecordTooLargeError, lambda: log.append_batch(batch), "a large batch")


def keyless_in_compacted(directory: Path) -> None:
    encoder = BatchEncoder()
    encoder.append(b"a")
    with log_in(directory, config={**CONFIG, "cleanup.policy": "compact"}) as log:
        refused(InvalidRecordError, lambda: log.append_batch(encoder.take()), "no key")


def strange_attributes(directory: Path) -> None:
    batch = bytearray(raw(b"a"))
    batch[21:23] = (1 << 6).to_bytes(2)  # a control batch, which only a coordinator writes
    header = logstore.BatchHeader.parse(bytes(batch))
    with log_in(directory) as log:
        sound = with_header(header, bytes(batch[61:]))
        refused(InvalidRecordError, lambda: log.append_batch(sound), "a control batch")


def far_future(directory: Path) -> None:
    encoder = BatchEncoder()
    encoder.append(b"a", timestamp=ManualClock().time_ms() + 10**10)
    config = {**CONFIG, "message.timestamp.after.max.ms": 1000}
    with log_in(directory, config=config, clock=ManualClock()) as log:
        refused(InvalidRecordError, lambda: log.append_batch(encoder.take()), "a far future")


def failed_sync(directory: Path) -> None:
    with log_in(directory) as log, inject_io(Fault.fail(5, "datasync", "*.log"), root=directory):
        refused(
            IndeterminateAppendError, lambda: log.append(b"a", durability="fsync"), "a failed sync"
        )
        # The kernel may report success the next time, although the data is lost.
        refused(LogStoreError, lambda: log.append(b"b", durability="fsync"), "an append after it")


def failed_write(directory: Path) -> None:
    log = log_in(directory)
    log.append(b"a")
    size = (log.path / "00000000000000000000.log").stat().st_size
    faults = [Fault.short(10, "pwrite", "*.log"), Fault.fail(28, "pwrite", "*.log", call=2)]
    with inject_io(*faults, root=directory):
        refused(OSError, lambda: log.append(b"b"), "a full disk")
    assert (log.path / "00000000000000000000.log").stat().st_size == size, "bytes stay behind"
    log.append(b"c")
    assert [record.value for record in log] == [b"a", b"c"]
    log.close()


def leaping_clock(directory: Path) -> None:
    clock = ManualClock()
    with log_in(directory, clock=clock) as log:
        for number in range(30):
            log.append(value_of(number))
        clock.leap(10 * 365 * 86_400_000)
        log.enforce(RetentionPolicy(max_age_ms=1000))
        assert log.start_offset == 0, "a leap of the clock emptied the log"


def retention_keeps_the_active(directory: Path) -> None:
    with log_in(directory) as log:
        for number in range(30):
            log.append(value_of(number))
        log.enforce(RetentionPolicy(max_bytes=1))
        assert log[-1].value == value_of(29), "the newest records are gone"


def compaction_below_open(directory: Path) -> None:
    with log_in(directory, config={**CONFIG, "cleanup.policy": "compact"}) as log:
        log.append(b"old", key=b"k")
        log.append_batch(raw(b"open", producer=5))
        log.roll()
        Compactor(log).run()
        assert log[0].value == b"old", "what is not decided replaced what is committed"


def newest_of_a_key(directory: Path) -> None:
    with log_in(directory, config={**CONFIG, "cleanup.policy": "compact"}) as log:
        for number in range(30):
            log.append(value_of(number), key=b"k%d" % (number % 3))
        log.roll()
        Compactor(log).run()
        assert {r.key: r.value for r in log} == {
            b"k%d" % (n % 3): value_of(n) for n in (27, 28, 29)
        }


def durable_means_synced(directory: Path) -> None:
    with inject_io(root=directory) as calls, log_in(directory, durability="fsync") as log:
        before = sum(call.kind == "datasync" for call in calls.calls)
        log.append(b"a")
        assert sum(call.kind == "datasync" for call in calls.calls) > before, "no sync was made"


def durable_offset_after_a_cut(directory: Path) -> None:
    with log_in(directory, durability="fsync") as log:
        log.extend([b"a", b"b", b"c"])
        log.truncate(1)
        log.append(b"d", durability="os")
        assert log.durable_offset <= 1, "claimed durable, and nobody synced it"


def reader_sees_a_cut(directory: Path) -> None:
    with log_in(directory) as log, log_in(directory, readonly=True) as reader:
        log.extend([b"a", b"b", b"c"])
        assert reader.end_offset == 3
        log.truncate(1)
        assert [record.value for record in reader] == [b"a"], "a reader shows what is gone"


def stale_clean_mark(directory: Path) -> None:
    """A clean close, then more records and a crash: the next open must look."""
    with log_in(directory) as log:
        log.append(b"a")
    log = log_in(directory)
    log.append(b"b")
    shutil.copytree(log.path, directory / "copy" / "orders-0")
    log.close()
    with Partition.open(directory / "copy" / "orders-0", config=CONFIG) as again:
        assert not again.recovery.clean, "recovery was skipped after a crash"
        assert [record.value for record in again] == [b"a", b"b"]


def unfinished_cut(directory: Path) -> None:
    """Killed after the plan of a cut was written: the next open finishes it."""
    with log_in(directory) as log:
        for number in range(20):
            log.append(value_of(number))
        with (
            contextlib.suppress(OSError),
            inject_io(Fault.fail(5, ("unlink", "truncate"), "*.log", forever=True), root=directory),
        ):
            log.truncate(3)
    with log_in(directory) as log:
        assert log.end_offset == 3, "the cut was not finished"


def gap_between_segments(directory: Path) -> None:
    with log_in(directory) as log:
        for number in range(30):
            log.append(value_of(number))
        gone = log.segments[1].base_offset
    for path in (directory / "orders-0").glob(f"{gone:020d}.*"):
        path.unlink()
    with log_in(directory) as log:
        refused(CorruptLogError, lambda: list(log), "a missing segment")


def foreign_directory(directory: Path) -> None:
    (directory / "orders-0").mkdir()
    (directory / "orders-0" / "thesis.doc").write_bytes(b"years of work")
    refused(LogStoreError, lambda: log_in(directory).close(), "somebody else's directory")


def link_inside(directory: Path) -> None:
    with log_in(directory) as log:
        log.append(b"a")
    (directory / "elsewhere").write_bytes(b"precious")
    path = directory / "orders-0" / "00000000000000000000.log"
    path.unlink()
    path.symlink_to(directory / "elsewhere")
    with contextlib.suppress(LogStoreError, OSError), log_in(directory) as log:
        log.append(b"b")
    assert (directory / "elsewhere").read_bytes() == b"precious", "written through a link"


def nothing(*_: Any, **__: Any) -> None:
    """In place of what must not be left out."""


def yes(*_: Any, **__: Any) -> bool:
    return True


def no(*_: Any, **__: Any) -> bool:
    return False


def believe(commit: Any, end_offset: int) -> int:
    """In place of a sync whose failure is final."""
    with contextlib.suppress(OSError):
        commit._sync()
    commit.durable_offset = end_offset
    return end_offset


# Replaced: (killer, what, by what).
CHECKS: dict[str, tuple[Callable[[Path], None], str, Any]] = {
    "lock: always given": (two_writers, "logstore.files.lock._set_lock", yes),
    "lock: a partition does not ask for the store's": (
        store_beside_partition,
        "logstore.files.lock.DirectoryLock._take_part",
        nothing,
    ),
    "close: not noticed": (closed_handle, "logstore.partition.view.LogView.check_usable", nothing),
    "append: any offset will do": (
        expected_offset,
        "logstore.partition.active_log.ActiveLog.expect",
        nothing,
    ),
    "producer: a retry is new": (
        retried_batch,
        "logstore.log.producer_state.ProducerEntry.find",
        nothing,
    ),
    "producer: any sequence will do": (
        sequence_gap,
        "logstore.log.producer_state._check_data",
        nothing,
    ),
    "producer: any epoch will do": (old_epoch, "logstore.log.producer_state._check_data", nothing),
    "leader: any epoch will do": (
        old_leader,
        "logstore.partition.active_log.ActiveLog.become_leader",
        nothing,
    ),
    "transactions: aborted ones are not noted": (
        aborted_is_hidden,
        "logstore.log.producer_state.ProducerState.commit",
        lambda *_: [],
    ),
    "transactions: none is ever open": (
        open_is_hidden,
        "logstore.log.producer_files.Producers.begin",
        nothing,
    ),
    "append: a broken batch is taken": (broken_batch, "logstore.format.validation.verify", nothing),
    "append: any attributes": (
        strange_attributes,
        "logstore.format.validation._check_attributes",
        nothing,
    ),
    "append: from any time": (far_future, "logstore.format.validation._check_times", nothing),
    "append: of any size": (large_batch, "logstore.format.validation._check_size", nothing),
    "sync: a failed one counts": (
        failed_sync,
        "logstore.partition.durability.GroupCommit._lead",
        believe,
    ),
    "clock: every leap is believed": (
        leaping_clock,
        "logstore.clock.ClockGuard.look",
        lambda self, wall_ms, steady: wall_ms,
    ),
    "compaction: beyond what is stable": (
        compaction_below_open,
        "logstore.partition.reader.Reader.last_stable_offset",
        property(lambda self: self.end_offset),
    ),
    "append: durable without a sync": (
        durable_means_synced,
        "logstore.partition.durability.GroupCommit.wait_for",
        nothing,
    ),
    "append: durability is not asked for": (
        durable_means_synced,
        "logstore.partition.durability.wants_fsync",
        no,
    ),
    "truncate: still durable": (
        durable_offset_after_a_cut,
        "logstore.partition.durability.GroupCommit.lower",
        nothing,
    ),
    "open: a planned cut is not finished": (
        unfinished_cut,
        "logstore.recovery.loader._Loader.finish_truncation",
        nothing,
    ),
    "open: a torn tail stays": (
        torn_tail,
        "logstore.recovery.torn_tail.SegmentRecovery.cut",
        nothing,
    ),
    "open: a torn tail is not kept": (
        torn_tail,
        "logstore.recovery.torn_tail.SegmentRecovery.copy_aside",
        nothing,
    ),
    "open: anybody's directory": (
        foreign_directory,
        "logstore.partition.partition.refuse_foreign",
        nothing,
    ),
}
# These have no single function that could be taken out: their checks are in the core.
UNTOUCHED = [
    *(forked_handle, flipped_byte, failed_write, retention_keeps_the_active, newest_of_a_key),
    *(reader_sees_a_cut, stale_clean_mark, gap_between_segments, link_inside),
    keyless_in_compacted,
]


@pytest.mark.parametrize(
    "killer", dict.fromkeys([*(check[0] for check in CHECKS.values()), *UNTOUCHED])
)
def test_with_all_checks_in_place_each_killer_is_content(
    killer: Callable[[Path], None], tmp_path: Path
) -> None:
    killer(tmp_path)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mutant", CHECKS)
def test_a_log_without_one_of_its_checks_is_found_out(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer, what, by = CHECKS[mutant]
    with monkeypatch.context() as patch:
        patch.setattr(what, by)
        with pytest.raises((AssertionError, LogStoreError, OSError)):
            killer(tmp_path)


def test_there_are_at_least_forty_mutants() -> None:
    assert len(BARRIERS) + len(CHECKS) >= 40
