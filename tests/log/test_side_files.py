"""Twins, marks and claims: the files next to Kafka's files, and when their contents are used."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import logstore
from logstore import Partition, ProblemKind, Store, UnsafeFileSystemError, with_producer
from logstore.files.directory import Directory
from logstore.files.filesystem import UNSAFE
from logstore.log.state import DurableMark, PartitionState
from logstore.recovery import failed_sync
from logstore.recovery.failed_sync import FailedSync
from logstore.root.checkpoint_twin import CheckpointTwin
from logstore.testing import Fault, inject_io
from tests.conftest import MakeLog
from tests.crash.decoder_fuzz import BEHIND_A_CHECKSUM
from tests.kit import kill

MakeStore = Callable[..., Store]

POINTS = "recovery-point-offset-checkpoint"


@pytest.fixture
def root(make_store: MakeStore) -> Path:
    store = make_store()
    topic = store.create_topic("orders", 2)
    for number in range(2):
        topic[number].extend([b"%d" % i for i in range(20)])
    store.sync()
    topic.append(b"not durable", partition=0)
    kill(store)
    return store.path


# ---- twins of the checkpoints ----


def test_a_crash_keeps_what_we_know_of_the_partitions(root: Path) -> None:
    with logstore.open(root) as store:
        assert not store._left.foreign
        assert store["orders"][0].end_offset == 21


@pytest.mark.parametrize("content", [b"", b"0\n", b"garbage", b"0\n2\norders 0 20\n", b"\xff\xfe"])
def test_a_torn_checkpoint_never_stops_opening(root: Path, content: bytes) -> None:
    (root / POINTS).write_bytes(content)
    with logstore.open(root) as store:
        assert [p.end_offset for p in store["orders"]] == [21, 20]
        assert store["orders"][0].check() == []


@pytest.mark.parametrize("content", [b"", b"garbage", b"00000000 {}\n", None])
def test_a_torn_twin_never_stops_opening(root: Path, content: bytes | None) -> None:
    twin = root / CheckpointTwin.NAME
    if content is None:
        twin.unlink()
    else:
        twin.write_bytes(content)
        with logstore.open(root, readonly=True) as reader:
            kinds = {p.path.name: p.kind for p in reader.check()}
        assert kinds[twin.name] is ProblemKind.DAMAGED_CHECKPOINT
    with logstore.open(root) as store:
        assert [p.end_offset for p in store["orders"]] == [21, 20]
    assert CheckpointTwin.NAME in {p.name for p in root.iterdir()}
    with logstore.open(root, readonly=True) as reader:
        assert reader.check() == []


def test_a_broker_that_came_after_a_crash_and_crashed_is_noticed(root: Path) -> None:
    """It leaves no marker, but has written the checkpoint in the meantime."""
    (root / POINTS).write_text("0\n2\norders 0 20\norders 1 25\n")
    with logstore.open(root, readonly=True) as reader:
        kinds = {p.path.name: p.kind for p in reader.check()}
        assert kinds[POINTS] is ProblemKind.STALE_CHECKPOINT
        assert reader._left.foreign
    with logstore.open(root) as store:
        assert store._left.foreign
        # The lower of both: the broker's claim of 25 is not used.
        assert store._checkpoints.recovery_points == {("orders", 0): 20, ("orders", 1): 20}
        assert [p.end_offset for p in store["orders"]] == [21, 20]


def test_between_twin_and_checkpoint_a_crash_is_no_brokers_visit(make_store: MakeStore) -> None:
    store = make_store()
    topic = store.create_topic("orders")
    topic.append(b"a")
    store.sync()
    topic.append(b"b")
    before = (store.path / POINTS).read_bytes()
    store.sync()
    kill(store)
    (store.path / POINTS).write_bytes(before)
    with logstore.open(store.path) as again:
        assert not again._left.foreign
        assert again._checkpoints.recovery_points == {("orders", 0): 1}


def test_compaction_by_a_broker_is_no_damage_to_a_partition_opened_alone(
    make_store: MakeStore,
) -> None:
    store = make_store()
    log = store.create_topic("orders", 2)[0]
    for i in range(9):
        log.append(b"%d" % i, key=b"k%d" % (i % 3))
        if i % 3 == 2:
            log.roll()
    other = store["orders"][1]
    other.append(b"x")
    store.close()
    # A broker owned it, took out what newer records supersede, and closed in order.
    (store.path / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":7}')
    first = store.path / "orders-0" / f"{0:020d}.log"
    content = first.read_bytes()
    size = 12 + int.from_bytes(content[8:12], "big")
    first.write_bytes(content[size:])
    with Partition.open(first.parent, durability="os") as alone:
        assert [record.offset for record in alone] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert alone.recovery.damage == []
    with logstore.open(store.path) as again:
        assert again._left.foreign  # the others know of the broker as well
        assert [record.offset for record in again["orders"][0]] == [1, 2, 3, 4, 5, 6, 7, 8]


# ---- claims that make no sense ----


# The result of reading a file that is not used; for the others it is None.
DISBELIEVED: dict[str, object] = {
    "logstore.start": -1,
    "logstore.cleaner": -1,
    "logstore.failed": FailedSync(0, "its mark cannot be read"),
    CheckpointTwin.NAME: CheckpointTwin({}, {}),
}


@pytest.mark.parametrize("name", BEHIND_A_CHECKSUM)
def test_no_other_digit_in_a_side_file_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The changed bytes decode as well as before: only the checksum is wrong."""
    monkeypatch.setattr(failed_sync, "_unwritten", {})
    (write, read), disbelieved = BEHIND_A_CHECKSUM[name], DISBELIEVED.get(name)
    directory = Directory(tmp_path / "orders-0", create=True)
    write(directory)
    (path,) = directory.path.iterdir()
    content = path.read_bytes()
    assert read(directory) != disbelieved
    digits = [at for at in range(9, len(content)) if content[at : at + 1].isdigit()]
    assert digits
    for at in digits:
        other = b"%d" % ((content[at] - ord("0") + 1) % 10)
        path.write_bytes(content[:at] + other + content[at + 1 :])
        assert read(directory) == disbelieved, f"{at}: {path.read_bytes()!r}"
    directory.close()


def test_a_start_beyond_the_end_does_not_cost_the_log(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([b"%d" % i for i in range(10)])
    state = log.parts.active.durability._state(False)
    log.parts.discard()
    fields = {name: getattr(state, name) for name in state.__slots__}
    far = 1 << 60
    PartitionState(**{**fields, "start_offset": far, "end_offset": far}).write(Directory(log.path))
    with Partition.open(log.path) as again:
        assert [record.value for record in again] == [b"%d" % i for i in range(10)]
        assert again.append(b"next") == 10


def test_a_stores_claim_of_a_start_beyond_the_end_is_ignored(root: Path) -> None:
    starts = root / "log-start-offset-checkpoint"
    starts.write_text("0\n1\norders 0 999999999\n")
    (root / CheckpointTwin.NAME).unlink()
    (root / "orders-0" / "logstore.state").unlink()
    with logstore.open(root) as store:
        assert store["orders"][0].start_offset == 0
        assert store["orders"][0].end_offset == 21


# ---- lists of aborted transactions ----


def aborted_log(path: Path) -> Path:
    with Partition.open(path, durability="os", config={"segment.bytes": 1024}) as log:
        encoder = logstore.BatchEncoder()
        for number in range(6):
            encoder.append(b"aborted" + bytes(300))
            raw = with_producer(encoder.take(), producer_id=number, producer_epoch=0,
                                base_sequence=0, transactional=True)  # fmt: skip
            log.append_batch(raw)
            log.end_transaction(number, 0, commit=False)
            log.append(b"shown" + bytes(300))
    return path


@pytest.mark.parametrize("how", ["clean", "crash"])
def test_a_lost_list_of_aborts_never_shows_what_was_aborted(tmp_path: Path, how: str) -> None:
    path = aborted_log(tmp_path / "orders-0")
    if how == "crash":
        log = Partition.open(path)
        log.append(b"shown")
        log.parts.discard()
    lists = sorted(path.glob("*.txnindex"))
    assert len(lists) > 2
    for lost in lists:
        copy = shutil.copytree(path, tmp_path / "copy" / "orders-0")
        (copy / lost.name).unlink()
        with Partition.open(copy, readonly=True) as reader:
            check_committed(reader)
        with Partition.open(copy) as log:
            check_committed(log)
        assert (copy / lost.name).read_bytes() == lost.read_bytes()
        shutil.rmtree(copy)


def check_committed(log: Partition) -> None:
    shown = [r.value for r in log.scan(isolation="read_committed")]
    assert len(shown) >= 6
    assert all(value is not None and value.startswith(b"shown") for value in shown)


# ---- file systems ----


@pytest.mark.parametrize("name", sorted(UNSAFE))
def test_a_network_file_system_is_refused_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("LOGSTORE_ALLOW_UNSAFE_FS", raising=False)
    monkeypatch.setattr("logstore._native.filesystem_name", lambda fd: name)
    with pytest.raises(UnsafeFileSystemError, match="allow_unsafe_fs=True") as caught:
        logstore.open(tmp_path / "store")
    assert caught.value.filesystem == name
    with pytest.raises(UnsafeFileSystemError):
        Partition.open(tmp_path / "orders-0")
    assert list((tmp_path / "orders-0").iterdir()) == []
    with logstore.open(tmp_path / "store", allow_unsafe_fs=True) as store:
        store.create_topic("t").append(b"x")
    with logstore.open(tmp_path / "store", readonly=True) as reader:
        assert reader["t"][0][0].value == b"x"
    monkeypatch.setenv("LOGSTORE_ALLOW_UNSAFE_FS", "1")
    Partition.open(tmp_path / "orders-0").close()


def test_a_disk_in_memory_is_mentioned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("logstore._native.filesystem_name", lambda fd: "tmpfs")
    monkeypatch.setattr("logstore.files.filesystem._mentioned", set())
    with caplog.at_level(logging.WARNING, "logstore.filesystem"):
        for number in range(3):
            Partition.open(tmp_path / f"orders-{number}").close()
    assert len([r for r in caplog.records if r.name == "logstore.filesystem"]) == 1


# ---- the durable mark ----


def test_a_failed_write_of_the_durable_mark_leaves_the_old_one(make_log: MakeLog) -> None:
    log = make_log()
    with log:
        log.append(b"a")
        log.sync()
        mark = log.parts.active.durability._mark
        assert mark is not None
        mark.write(1)
        for error in (errno.ENOSPC, errno.EIO):
            with (
                inject_io(Fault.fail(error, "pwrite", "*/logstore.durable")),
                pytest.raises(OSError, match=r"logstore\.durable"),
            ):
                mark.write(0)
            assert DurableMark.read(log.parts.view.directory) == 1
