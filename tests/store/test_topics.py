"""Topics: where records go, settings that change, and creations and deletions cut short."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy
import pytest

import logstore
from logstore import (
    Compactor,
    ConfigError,
    InvalidRecordError,
    KeyPartitioner,
    LogStoreError,
    PartitionConfig,
    Position,
    Record,
    RecordTooLargeError,
    Store,
    UnknownTopicError,
)
from logstore.clock import ManualClock
from logstore.files.directory import Directory
from logstore.partitioner import partition_for_key
from logstore.testing import Fault, inject_io
from tests.kit import kill

MakeStore = Callable[..., Store]


# ---- appending ----


def test_a_record_goes_to_the_partition_of_its_key(store: Store) -> None:
    topic = store.create_topic("t", 5)
    for i in range(40):
        key = b"key %d" % i
        position = topic.append(b"v", key=key, headers=[("h", b"1")], timestamp=1000 + i)
        assert position.partition == partition_for_key(key, 5)
        record = topic[position.partition][position.offset]
        assert (record.key, record.timestamp, record.headers) == (key, 1000 + i, (("h", b"1"),))
    assert sum(partition.end_offset for partition in topic) == 40


def test_a_named_partition_wins_over_the_key(store: Store) -> None:
    topic = store.create_topic("t", 3)
    for number in range(3):
        assert topic.append(b"v", key=b"k", partition=number) == Position("t", number, 0)
    with pytest.raises(IndexError, match="'t' has no partition 3: it has 0 to 2"):
        topic.append(b"v", partition=3)


def test_extend_keeps_the_order_within_each_partition(store: Store) -> None:
    topic = store.create_topic("t", 4)
    records = [Record(b"%d" % i, key=b"%d" % (i % 7)) for i in range(100)]
    positions = topic.extend(records)
    assert [topic[p.partition][p.offset].value for p in positions] == [r.value for r in records]
    for partition in topic:
        numbers = [int(record.value or b"") for record in partition]
        assert numbers == sorted(numbers)
    assert topic.extend([]) == []
    assert len({position.partition for position in topic.extend([b"x"] * 10)}) == 1, "sticky"
    assert topic.extend([b"y", b"z"], partition=2)[1].partition == 2


def test_extend_is_durable_in_every_partition_it_reached(make_store: MakeStore) -> None:
    topic = make_store(durability="fsync").create_topic("t", 3)
    records = [Record(b"v", key=b"%d" % i) for i in range(20)]
    topic.extend(records)
    assert [p.durable_offset for p in topic] == [p.end_offset for p in topic]
    topic.extend(records, durability="os")
    assert [p.durable_offset * 2 for p in topic] == [p.end_offset for p in topic]


def test_an_error_of_extend_names_what_is_in_the_log_already(store: Store) -> None:
    topic = store.create_topic("t", 2, config={"max.message.bytes": 500})
    topic.partitioner = lambda key, value, partitions: len(value or b"") > 400
    with pytest.raises(RecordTooLargeError) as raised:
        topic.extend([b"small", bytes(501)])
    assert raised.value.__notes__ == ["already in t-0: offsets 0 to 0"]
    assert [partition.end_offset for partition in topic] == [1, 0]


def test_what_cannot_be_stored_is_refused(store: Store) -> None:
    topic = store.create_topic("t", 2)
    with pytest.raises(TypeError, match="bytes"):
        topic.append("text")  # type: ignore[arg-type]
    with pytest.raises(InvalidRecordError, match="key"):
        topic.append(None)
    assert topic.append(None, key=b"k").offset == 0, "a tombstone"
    with pytest.raises(ConfigError, match="durability"):
        topic.append(b"v", durability="maybe")


def test_anything_callable_can_choose_partitions(make_store: MakeStore) -> None:
    def by_length(key: bytes | None, value: bytes | None, partitions: int) -> int:
        return len(value or b"") % partitions

    with make_store() as store:
        topic = store.create_topic("t", 3, partitioner=by_length)
        assert [topic.append(b"x" * n).partition for n in range(5)] == [0, 1, 2, 0, 1]
        topic.partitioner = lambda key, value, partitions: partitions
        with pytest.raises(ValueError, match="chose 3: it must be an int from 0 to 2"):
            topic.append(b"v")
    with make_store(partitioner=by_length) as store:
        assert store["t"].append(b"xx").partition == 2
        assert store.create_topic("u", 2).append(b"x").partition == 1
        seeded = KeyPartitioner(seed=1)
        assert store.create_topic("u", exist_ok=True, partitioner=seeded).partitioner is seeded


# ---- by key ----


def test_the_newest_record_of_a_key_is_found(store: Store) -> None:
    topic = store.create_topic("t", 3, config={"cleanup.policy": "compact"})
    for i in range(30):
        topic.append(b"%d" % i, key=b"k%d" % (i % 5))
    found = topic.get(b"k3")
    assert found is not None and (found.value, found.key) == (b"28", b"k3")
    topic.append(None, key=b"k3")
    assert topic.get(b"k3") is None, "a tombstone"
    assert topic.get(b"none") is None
    plain = store.create_topic("plain")
    with pytest.raises(ConfigError, match=r"cleanup\.policy=delete.*use cleanup\.policy=compact"):
        plain.get(b"k")


def test_compaction_is_written_down_where_a_broker_looks(make_store: MakeStore) -> None:
    with make_store() as store:
        topic = store.create_topic("t", config={"cleanup.policy": "compact"})
        for i in range(10):
            topic.append(b"%d" % i, key=b"k")
        topic[0].roll()
        Compactor(topic[0]).run()
        dirty = topic[0].first_dirty_offset
        assert dirty == 10
    checkpoint = store.path / "cleaner-offset-checkpoint"
    assert checkpoint.read_text() == "0\n1\nt 0 10\n"
    (store.path / "t-0" / "logstore.cleaner").unlink()  # a broker has none
    with make_store() as store:
        assert store["t"][0].first_dirty_offset == 10
        assert [record.value for record in store["t"][0]] == [b"9"]


# ---- as a sequence ----


def test_a_topic_is_a_sequence_of_partitions(store: Store) -> None:
    topic = store.create_topic("t", 3)
    assert len(topic) == 3
    assert [partition.number for partition in topic] == [0, 1, 2]
    assert topic[-1] is topic[2] and topic[1] in topic
    assert [partition.number for partition in topic[1:]] == [1, 2]
    assert repr(topic) == "<Topic 't' of 3 partitions>"
    for number in (3, -4):
        with pytest.raises(IndexError):
            topic[number]


def test_a_topic_with_some_of_its_partitions_says_so(tmp_path: Path) -> None:
    """A broker of several has only its share of the partitions."""
    for number in (1, 4):
        logstore.Partition.open(tmp_path / f"t-{number}").close()
    with logstore.open(tmp_path, durability="os") as store:
        topic = store["t"]
        assert len(topic) == 2
        assert [partition.number for partition in topic] == [1, 4]
        assert topic.append(b"v", partition=4) == Position("t", 4, 0)
        for use in (
            lambda: topic.append(b"v", key=b"k"),
            lambda: topic.add_partitions(1),
            lambda: topic.alter({"retention.ms": 5}),
        ):
            with pytest.raises(ConfigError, match="partitions"):
                use()
        with pytest.raises(IndexError, match="it has 1, 4"):
            topic[0]


# ---- settings ----


def test_altered_settings_hold_at_once_and_after_reopening(make_store: MakeStore) -> None:
    with make_store() as store:
        topic = store.create_topic("t", 2, config={"retention.ms": 5, "max.message.bytes": 500})
        with pytest.raises(RecordTooLargeError):
            topic.append(bytes(1000), partition=0)
        changed = topic.alter({"max_message_bytes": 5000, "retention.ms": None})
        assert changed == topic.config == topic[0].config
        assert changed == PartitionConfig(max_message_bytes=5000)
        topic.append(bytes(1000), partition=0)
        with pytest.raises(ConfigError, match=r"retention\.ms must be from"):
            topic.alter({"retention.ms": -5})
        with pytest.raises(ConfigError, match="did you mean"):
            store.alter_topic("t", {"retention.mss": 5})
        assert topic.config == changed
    with make_store() as store:
        assert store["t"].config == changed
        store["t"].alter({"message.timestamp.type": "LogAppendTime"})
        store["t"].append(b"v", partition=1, timestamp=5)
        assert store["t"][1][-1].timestamp > 5


def test_a_smaller_segment_starts_at_once(store: Store) -> None:
    topic = store.create_topic("t")
    topic.append(b"v")
    topic.alter({"segment.bytes": 2000})
    assert len(topic[0].segments) == 2
    for _ in range(10):
        topic.append(bytes(500))
    assert len(topic[0].segments) > 3
    before = len(topic[0].segments)
    topic.alter({"retention.ms": 7})
    assert len(topic[0].segments) == before
    assert {segment.config.retention_ms for segment in topic[0].segments} == {7}
    topic[0].check()


def test_compression_changes_with_the_next_append(store: Store) -> None:
    topic = store.create_topic("t")
    topic.append(bytes(1000))
    topic.alter({"compression.type": "zstd"})
    topic.append(bytes(1000))
    sizes = [len(batch) for batch in topic[0].scan().batches()]
    assert sizes[0] > 1000 > 200 > sizes[1]
    assert [record.value for record in topic[0]] == [bytes(1000)] * 2


def test_partitions_are_added_and_used(make_store: MakeStore) -> None:
    with make_store() as store:
        topic = store.create_topic("t", 2, config={"retention.ms": 5})
        topic.append(b"old", partition=1)
        topic.add_partitions(3)
        assert len(topic) == 5
        assert topic.append(b"new", partition=4) == Position("t", 4, 0)
        with pytest.raises(ConfigError, match="at least 1, not 0"):
            topic.add_partitions(0)
    with make_store() as store:
        topic = store["t"]
        assert [partition.end_offset for partition in topic] == [0, 1, 0, 0, 1]
        assert topic[4].config.retention_ms == 5
        identifiers = {(p.path / "partition.metadata").read_bytes() for p in topic}
        assert len(identifiers) == 1


@pytest.mark.parametrize("partitions", [0, -1, 1 << 20])
def test_a_topic_has_a_sensible_number_of_partitions(store: Store, partitions: int) -> None:
    with pytest.raises(ConfigError, match=f"partitions must be from 1 to 65536, not {partitions}"):
        store.create_topic("t", partitions)
    with pytest.raises(ConfigError, match="did you mean"):
        store.create_topic("t", config={"retention.m": 1})
    assert list(store) == [] and not (store.path / "t-0").exists()


# ---- figures ----


def test_a_description_has_sizes_offsets_and_times(make_store: MakeStore) -> None:
    clock = ManualClock(5000)
    store = make_store(clock=clock)
    topic = store.create_topic("t", 2, config={"segment.bytes": 1024})
    topic.extend([b"1", b"2"], partition=0)
    clock.advance(100)
    topic.append(b"3", partition=0, timestamp=9999)
    topic.append(b"4", partition=0)
    topic[0].trim(1)
    first, second = topic.describe().partitions
    assert (first.partition, first.start_offset, first.end_offset, first.segments) == (0, 1, 4, 1)
    assert (first.first_timestamp, first.last_timestamp) == (5000, 9999)
    assert first.size_bytes == os.path.getsize(topic[0].path / "00000000000000000000.log")
    assert (second.end_offset, second.first_timestamp, second.last_timestamp) == (0, -1, -1)
    described = store.describe()
    assert described["t"].size_bytes == first.size_bytes
    assert described["t"].config == {"segment.bytes": 1024}
    assert described["t"].id == topic.id


# ---- deletion ----


def test_a_deleted_topic_is_gone_with_its_handles(make_store: MakeStore) -> None:
    with make_store() as store:
        topic = store.create_topic("t", 2)
        topic.append(b"v", partition=0)
        partition = topic[0]
        scan = iter(partition)
        assert next(scan).value == b"v"
        store.create_topic("other").append(b"o")
        store.delete_topic("t")
        assert list(store) == ["other"]
        assert not list(store.path.glob("t-*"))
        with pytest.raises(UnknownTopicError, match="it was deleted"):
            topic.append(b"v")
        with pytest.raises(LogStoreError, match="closed"):
            partition.append(b"v")
        with pytest.raises(UnknownTopicError):
            store.delete_topic("t")
        again = store.create_topic("t")
        assert again.id != topic.id and again[0].end_offset == 0
    with make_store() as store:
        assert sorted(store) == ["other", "t"]
        checkpoint = (store.path / "recovery-point-offset-checkpoint").read_text()
        assert not re.search(r"^t 1 ", checkpoint, re.MULTILINE)


def test_leftovers_of_a_deletion_are_swept_and_others_kept(make_store: MakeStore) -> None:
    with make_store() as store:
        store.create_topic("t")
    suffix = "." + "0123456789abcdef" * 2
    for kind in ("delete", "future", "stray"):
        directory = store.path / f"t-7{suffix}-{kind}"
        directory.mkdir()
        (directory / "00000000000000000000.log").write_bytes(b"")
    (store.path / "__cluster_metadata-0").mkdir()
    with make_store() as store:
        assert list(store) == ["t"] and len(store["t"]) == 1
        kept = sorted(entry.name for entry in store.path.iterdir() if entry.is_dir())
        assert kept == sorted(["__cluster_metadata-0", "t-0", f"t-7{suffix}-future", f"t-7{suffix}-stray"])  # fmt: skip  # noqa: E501


# ---- dying half-way ----


class DiedError(BaseException):
    """The process is no more: nothing catches this."""


@contextmanager
def dying_at(monkeypatch: pytest.MonkeyPatch, operation: int) -> Iterator[list[str]]:
    """File operations up to a number happen; every later one fails, in each thread."""
    done: list[str] = []

    def mortal(function: Callable[..., object], name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            changes = name != "open" or kwargs.get("write")
            if changes:
                if len(done) >= operation:
                    raise DiedError
                done.append(name)
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("open", "rename", "unlink", "sync"):
            patch.setattr(Directory, name, mortal(getattr(Directory, name), name))
        for name in ("mkdir", "rmdir"):
            patch.setattr(os, name, mortal(getattr(os, name), name))
        yield done


def prepare(path: Path) -> None:
    with logstore.open(path, durability="os") as store:
        store.create_topic("kept", 2).append(b"kept", partition=0)
        store.create_topic("t", 2, config={"retention.ms": 5}).append(b"v", partition=0)


def create(store: Store) -> None:
    store.create_topic("new", 3, config={"retention.ms": 7})


def grow(store: Store) -> None:
    store["t"].add_partitions(2)


def delete(store: Store) -> None:
    store.delete_topic("t")


def alter(store: Store) -> None:
    store["t"].alter({"retention.ms": 6})


def close(store: Store) -> None:
    store["t"].append(b"w", partition=1)
    store.close()


def check_survivor(store: Store, act: Callable[[Store], None], finished: bool) -> None:
    assert [record.value for record in store["kept"][0]] == [b"kept"]
    directories = {entry.name for entry in store.path.iterdir() if entry.is_dir()}
    expected = {f"{name}-{p.number}" for name, topic in store.items() for p in topic}
    assert directories == expected, "no leftovers, nothing missing"
    if act is delete:
        assert not finished or "t" not in store
    else:
        assert [record.value for record in store["t"][0]] == [b"v"]
    if act is create:
        assert "new" in store or not finished
        if "new" in store:
            assert len(store["new"]) == 3 and store["new"].config.retention_ms == 7
            assert store["new"].append(b"first", partition=2).offset == 0
            assert store["new"].id is not None
    if act is grow:
        assert len(store["t"]) == 4 or (len(store["t"]) == 2 and not finished)
        assert store["t"].append(b"x", partition=len(store["t"]) - 1).offset == 0
    if act is alter:
        assert store["t"].config.retention_ms in ((6,) if finished else (5, 6))
    if act is close:
        assert [record.value for record in store["t"][1]] in (
            [[b"w"]] if finished else [[], [b"w"]]
        )
    store.check()


@pytest.mark.parametrize("act", [create, grow, delete, alter, close], ids=lambda act: act.__name__)
def test_dying_after_any_file_operation_leaves_a_whole_store(
    act: Callable[[Store], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, finished = 0, False
    prepare(tmp_path / "prepared")
    while not finished:
        path = Path(shutil.copytree(tmp_path / "prepared", tmp_path / str(operation)))
        store = logstore.open(path, durability="os")
        with dying_at(monkeypatch, operation) as done:
            try:
                act(store)
                finished = True
            except DiedError:
                pass
        kill(store)
        if finished or act is not close:
            assert (path / ".kafka_cleanshutdown").exists() == (act is close)
        # The next open may be killed as well, at any point, and the one after it finishes.
        for again in (operation % 7, 7 + operation % 13, 60):
            with dying_at(monkeypatch, again):
                try:
                    store = logstore.open(path, durability="os")
                except DiedError:
                    continue
            kill(store)
            break
        with logstore.open(path, durability="os") as store:
            check_survivor(store, act, finished)
        assert (path / ".kafka_cleanshutdown").exists()
        operation += 1
    assert operation > 3, done


def test_an_error_while_creating_leaves_nothing(store: Store) -> None:
    topic = store.create_topic("t", 2)
    topic.append(b"v", partition=0)
    with (
        inject_io(Fault.fail(errno.ENOSPC, "mkdir", "*new-1")) as injected,
        pytest.raises(OSError, match="No space"),
    ):
        store.create_topic("new", 3)
    assert injected.fired
    with (
        inject_io(Fault.fail(errno.ENOSPC, "mkdir", "*t-3")) as injected,
        pytest.raises(OSError, match="No space"),
    ):
        topic.add_partitions(2)
    assert injected.fired
    assert list(store) == ["t"] and len(topic) == 2
    assert sorted(entry.name for entry in store.path.iterdir() if entry.is_dir()) == ["t-0", "t-1"]
    assert [record.value for record in topic[0]] == [b"v"]
    store.create_topic("new", 3)
    topic.add_partitions(2)
    assert len(topic) == 4


# ---- what is not a number ----


@pytest.mark.parametrize("number", [True, False, 1.0, "1", None, b"1"])
def test_a_partition_is_told_by_an_int(store: Store, number: object) -> None:
    topic = store.create_topic("t", 2)
    with pytest.raises(TypeError, match="its number, an int"):
        topic[number]  # type: ignore[call-overload]
    if number is not None:
        with pytest.raises(TypeError, match="its number, an int"):
            topic.append(b"x", partition=number)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="its number, an int"):
            topic.extend([b"x"], partition=number)  # type: ignore[arg-type]
    assert [log.end_offset for log in topic] == [0, 0]


def test_an_int_of_another_kind_is_a_plain_one_in_a_position(store: Store) -> None:
    topic = store.create_topic("t", 2)
    position = topic.append(b"x", partition=numpy.int32(1))
    assert position == ("t", 1, 0)
    assert type(position.partition) is int


def test_creating_with_what_is_no_number_or_id_names_it(store: Store) -> None:
    with pytest.raises(ConfigError, match="'2'"):
        store.create_topic("t", "2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"uuid\.UUID, not 'x'"):
        store.create_topic("t", topic_id="x")  # type: ignore[arg-type]
    assert "t" not in store


@pytest.mark.parametrize("bound", ["0", 1.5, b""])
def test_a_bound_of_a_scan_is_an_int(store: Store, bound: object) -> None:
    log = store.create_topic("t")[0]
    with pytest.raises(TypeError, match="an offset is an int"):
        log.scan(bound)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an offset is an int"):
        log.scan(0, bound)  # type: ignore[arg-type]


@pytest.mark.parametrize("numbers", [(1 << 63, 0, 0), (1, 1 << 15, 0), (1, 0, 1 << 31), (1, 0, -1)])
def test_ending_a_transaction_with_impossible_numbers(
    store: Store, numbers: tuple[int, int, int]
) -> None:
    log = store.create_topic("t")[0]
    producer_id, epoch, coordinator = numbers
    with pytest.raises((InvalidRecordError, ValueError), match=r"transaction|coordinator"):
        log.end_transaction(producer_id, epoch, commit=True, coordinator_epoch=coordinator)
    assert log.end_offset == 0


def test_a_count_of_partitions_that_is_text_is_named_as_such(store: Store) -> None:
    with pytest.raises(ConfigError, match="partitions must be an int, not '3'"):
        store.create_topic("x", "3")  # type: ignore[arg-type]


# ---- an fsync of the directory that fails ----


def create_new(store: Store) -> None:
    store.create_topic("new", 3)


def delete_t(store: Store) -> None:
    store.delete_topic("t")


def grow_t(store: Store) -> None:
    store["t"].add_partitions(2)


@pytest.mark.parametrize("forever", [True, False])
@pytest.mark.parametrize("change", [create_new, delete_t, grow_t])
def test_a_topic_is_whole_or_absent_after_a_failed_sync_of_the_directory(
    tmp_path: Path, change: Callable[[Store], None], forever: bool
) -> None:
    for call in range(1, 30):
        path = tmp_path / str(call)
        prepare(path)
        with logstore.open(path, durability="os") as store:
            fault = Fault.fail(
                errno.EIO, "sync", f"*{path.relative_to('/')}", call=call, forever=forever
            )
            with inject_io(fault) as injected, suppress(OSError):
                change(store)
            if not injected.fired:
                assert call > 3
                return
            used = {name: len(topic) for name, topic in store.items()}
            if "t" in store:
                store["t"].append(b"later", partition=0)
        with logstore.open(path) as store:
            assert not store.check()
            found = {name: len(topic) for name, topic in store.items()}
            assert found["kept"] == 2 and found == used
            if "t" in store:
                assert [record.value for record in store["t"][0]] == [b"v", b"later"]
            assert not [name for name in os.listdir(path) if name.endswith("-delete")]
            change(store) if found == {"kept": 2, "t": 2} else None
            assert not store.check()
    raise AssertionError("every call failed")
