"""A store against kills at bad moments, foreign things in it and a planted catalogue."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import logstore
from logstore import (
    Compactor,
    ConfigError,
    FencedError,
    OffsetOutOfRangeError,
    Partition,
    Producer,
    Store,
    Transactions,
)
from logstore.files.directory import Directory
from logstore.root.clean_shutdown import CleanShutdown
from tests.kit import kill, values

MakeStore = Callable[..., Store]
MARKER, TWIN = ".kafka_cleanshutdown", "logstore.clean"
BROKERS = '{"version":0,"brokerEpoch":17}'
LOG = "00000000000000000000.log"


# ---- half of a marker ----


def make_promise(path: Path) -> None:
    """A closed store whose partition promised epoch 7 and knows that all its records are durable.

    Only its own state has either: no record of epoch 7 is left.
    """
    with logstore.open(path) as store:
        log = store.create_topic("t")[0]
        log.extend([b"1", b"2", b"3"])
        log.become_leader(7)
        log.append(b"of epoch 7")
        log.truncate(3)


def check_promise(path: Path) -> None:
    with logstore.open(path) as store:
        assert store["t"][0].leader_epoch == 7
        with pytest.raises(FencedError):
            store["t"][0].become_leader(3)


def set_marker(path: Path, marker: bool, twin: bool) -> None:
    for name, there in ((MARKER, marker), (TWIN, twin)):
        if not there:
            (path / name).unlink(missing_ok=True)


@contextlib.contextmanager
def watching_the_marker(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    """What happens to the two files, in order: (name, is there afterwards); ("", _) is a sync."""
    done: list[tuple[str, bool]] = []
    unlink, rename, sync = Directory.unlink, Directory.rename, Directory.sync

    def watched_unlink(self: Directory, name: str) -> None:
        unlink(self, name)
        if name in (MARKER, TWIN):
            done.append((name, False))

    def watched_rename(self: Directory, source: str, target: str) -> None:
        rename(self, source, target)
        if target in (MARKER, TWIN):
            done.append((target, True))

    def watched_sync(self: Directory) -> None:
        sync(self)
        if (self.path / "logstore.topics").exists():
            done.append(("", True))

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "unlink", watched_unlink)
        patch.setattr(Directory, "rename", watched_rename)
        patch.setattr(Directory, "sync", watched_sync)
        yield done


def states_after_a_crash(
    before: tuple[bool, bool], done: list[tuple[str, bool]]
) -> set[tuple[bool, bool]]:
    """(marker, twin) as any kill or power cut may leave them.

    What was not synced may have reached the disk or not, each change for itself.
    """
    durable = {MARKER: before[0], TWIN: before[1]}
    waiting: list[tuple[str, bool]] = []
    found = {before}
    for name, there in done:
        if name:
            waiting.append((name, there))
        for kept in itertools.product((False, True), repeat=len(waiting)):
            there_now = dict(durable)
            there_now.update(itertools.compress(waiting, kept))
            found.add((there_now[MARKER], there_now[TWIN]))
        if not name:
            durable.update(waiting)
            waiting.clear()
    return found


def opening(path: Path) -> tuple[bool, bool]:
    store = logstore.open(path)
    kill(store)
    return True, True


def closing(path: Path) -> tuple[bool, bool]:
    set_marker(path, False, False)
    logstore.open(path).close()
    return False, False


def a_partition_alone(path: Path) -> tuple[bool, bool]:
    Partition.open(path / "t-0").close()
    return True, True


@pytest.mark.parametrize("act", [opening, closing, a_partition_alone], ids=lambda a: a.__name__)
def test_half_a_marker_of_ours_is_not_taken_for_a_brokers_visit(
    act: Callable[[Path], tuple[bool, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_promise(tmp_path / "closed")
    watched = Path(shutil.copytree(tmp_path / "closed", tmp_path / "watched"))
    with watching_the_marker(monkeypatch) as done:
        before = act(watched)
    states = states_after_a_crash(before, done)
    assert {(True, True), (True, False), (False, False)} <= states, "all of it was seen"
    for number, state in enumerate(sorted(states)):
        path = Path(shutil.copytree(tmp_path / "closed", tmp_path / str(number)))
        set_marker(path, *state)
        check_promise(path)
        check_promise(path)


@pytest.mark.parametrize("state", [(True, False), (False, False)])
def test_damage_in_durable_records_is_no_torn_tail_after_half_a_marker(
    state: tuple[bool, bool], make_store: MakeStore
) -> None:
    with make_store(durability="fsync") as store:
        store.create_topic("t")[0].extend([b"1"])
        store["t"][0].extend([b"2"])
    log = store.path / "t-0" / LOG
    damaged = bytearray(log.read_bytes())
    damaged[-1] ^= 1
    log.write_bytes(damaged)
    set_marker(store.path, *state)
    with make_store() as store:
        assert not store.recovery.clean
        assert store["t"][0].end_offset == 2, "an offset that was given out is not given again"


def test_a_topic_that_lost_its_directory_is_still_known_after_half_a_marker(
    make_store: MakeStore,
) -> None:
    with make_store() as store:
        store.create_topic("t")
    shutil.rmtree(store.path / "t-0")
    set_marker(store.path, True, False)
    with make_store() as store:
        assert list(store) == ["t"] and list(store.recovery.failed) == ["t-0"]


@pytest.mark.parametrize("twin", [True, False])
@pytest.mark.parametrize("brokers", [BROKERS, "", None])
def test_a_broker_is_noticed_whatever_it_found_and_however_it_left(
    twin: bool, brokers: str | None, make_store: MakeStore
) -> None:
    """It removes the marker as it starts, and writes its own as it ends; before 3.7, an empty one.

    A broker that started after a crash and crashed itself is not noticed: it leaves no trace.
    """
    with make_store() as store:
        store.create_topic("t").append(b"v")
    set_marker(store.path, False, twin)
    if brokers is not None:
        (store.path / MARKER).write_text(brokers)
    directory = Directory(store.path)
    left = CleanShutdown.read(directory)
    directory.close()
    assert left == CleanShutdown(clean=brokers is not None, foreign=twin or brokers is not None)
    with make_store() as store:
        assert store.recovery.clean == (brokers is not None)
        assert values(store["t"][0]) == [b"v"]


@pytest.mark.parametrize("look", [1, 2, 3])
@pytest.mark.parametrize("writer_closes", [True, False])
def test_a_reader_does_not_take_a_writer_that_comes_or_goes_for_a_broker(
    writer_closes: bool, look: int, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before any look of the reader, the writer does all it has to do."""
    store = make_store()
    if not writer_closes:
        store.close()
    reading = Directory(store.path)
    looks = 0
    read = Directory.read

    def meanwhile(self: Directory, name: str, max_bytes: int = 1 << 31) -> bytes:
        nonlocal looks
        looks += self is reading
        if self is reading and looks == look:
            if writer_closes:
                store.close()
            else:
                make_store()
        return read(self, name, max_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "read", meanwhile)
        assert not CleanShutdown.read(reading).foreign
    reading.close()
    assert looks == 3


# ---- a deletion that cannot be finished ----


def test_what_cannot_be_deleted_does_not_keep_the_store_from_opening(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    with make_store() as store:
        store.create_topic("t", 2).append(b"x", partition=0)
        store.create_topic("other").append(b"precious")
        (store.path / "t-0" / "backup").mkdir()
        (store.path / "t-0" / "backup" / "photo").write_bytes(b"meow")
        with pytest.raises(OSError, match="t-0") as caught:
            store.delete_topic("t")
        assert "topic 't' is deleted" in caught.value.__notes__[0]
        assert list(store) == ["other"]
        store.delete_topic("other")  # what is left of another is not its concern
        store.create_topic("t").append(b"anew")
        store.create_topic("other").append(b"precious")
    (left,) = store.path.glob("*-delete")
    for _ in range(2):
        with caplog.at_level(logging.WARNING), make_store() as store:
            assert list(store.recovery.unfinished) == [left.name]
            assert store.recovery.clean, "it stands in nobody's way"
            assert values(store["t"][0]) == [b"anew"] and values(store["other"][0]) == [b"precious"]
        assert left.name in caplog.text
        caplog.clear()
        assert [entry.name for entry in left.iterdir()] == ["backup"], "the records are gone"
        assert (left / "backup" / "photo").read_bytes() == b"meow"
    shutil.rmtree(left / "backup")
    with make_store() as store:
        assert not store.recovery.unfinished and not left.exists()


@pytest.mark.parametrize("change", ["deleting", "creating_from"])
def test_a_directory_that_cannot_be_set_aside_does_not_keep_the_store_from_opening(
    change: str, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that something is mounted on: it is busy as long as that lasts."""
    with make_store() as store:
        store.create_topic("t").append(b"x")
        store.create_topic("other").append(b"precious")
    catalogue = store.path / "logstore.topics"
    content = json.loads(catalogue.read_text())
    content["topics"]["t"][change] = {"deleting": True, "creating_from": 0}[change]
    catalogue.write_text(json.dumps(content))
    rename = Directory.rename

    def busy(self: Directory, source: str, target: str) -> None:
        if source == "t-0":
            raise OSError(16, os.strerror(16), source)
        rename(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "rename", busy)
        with make_store() as store:
            assert list(store) == ["other"] and values(store["other"][0]) == [b"precious"]
            assert list(store.recovery.unfinished) == ["t"] and not store.recovery.removed
    with make_store() as store:
        assert store.recovery.removed == ["t"] and not store.recovery.unfinished
        assert list(store) == ["other"] and not list(store.path.glob("t-0*"))


# ---- settings and handles that are closed ----


def test_altering_passes_over_partitions_that_someone_closed(make_store: MakeStore) -> None:
    with make_store() as store:
        topic = store.create_topic("t", 3)
        for partition in topic:
            partition.append(b"x")
        topic[1].close()
        after = topic.alter({"retention.ms": 1000, "segment.bytes": 4096})
        assert after.retention_ms == 1000
        assert [partition.config for partition in topic] == [after] * 3
    with make_store() as store:
        assert store["t"].config.retention_ms == 1000


def test_settings_that_are_refused_change_nothing(make_store: MakeStore) -> None:
    with make_store() as store:
        topic = store.create_topic("t", 2, config={"retention.ms": 5})
        before = [partition.config for partition in topic]
        for wrong in ({"retention.ms": -9}, {"no.such.setting": 1}):
            with pytest.raises(ConfigError):
                topic.alter(wrong)
        assert [partition.config for partition in topic] == before == [topic.config] * 2
    with make_store() as store:
        assert store["t"].config.retention_ms == 5


# ---- figures of a log that changes meanwhile ----


def trim(log: Partition) -> None:
    log.trim(log.segments[1].base_offset)


def trim_inside_a_segment(log: Partition) -> None:
    log.trim(log.start_offset + 1)


def compact(log: Partition) -> None:
    assert Compactor(log).run().segments


@pytest.mark.parametrize("by_reader", [False, True])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("act", [trim, trim_inside_a_segment, compact], ids=lambda a: a.__name__)
def test_a_topic_is_described_while_its_records_go(
    act: Callable[[Partition], None],
    call: int,
    by_reader: bool,
    make_store: MakeStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_store() as store:
        config = {"segment.bytes": 1024, "cleanup.policy": "compact"}
        log = store.create_topic("t", config=config)[0]
        for i in range(30):
            log.append(b"x" * 100, key=b"k%d" % (i % 7))
    store = make_store()  # again: no file of a segment is open
    log = store["t"][0]
    topic = (make_store(readonly=True) if by_reader else store)["t"]
    assert len(topic[0].segments) > 2
    partition, calls = topic[0], 0
    scan = partition.scan

    def meanwhile(*args: Any, **kwargs: Any) -> logstore.Scan:
        nonlocal calls
        found = scan(*args, **kwargs)
        calls += 1
        if calls == call:
            calls += 1  # the act itself may scan
            act(log)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(partition, "scan", meanwhile)
        topic.describe()
    (described,) = topic.describe().partitions
    assert (described.start_offset, described.end_offset) == (log.start_offset, 30)


def test_a_file_that_is_lost_is_an_error_to_describe(make_store: MakeStore) -> None:
    with make_store() as store:
        store.create_topic("t").append(b"x")
        store["t"][0].roll()
    store = make_store()
    assert len(store["t"][0].segments) == 2
    (store.path / "t-0" / LOG).unlink()
    with pytest.raises((FileNotFoundError, OffsetOutOfRangeError)):
        store["t"].describe()


# ---- a planted catalogue ----


@pytest.mark.parametrize(
    "name", ["../elsewhere/victim", "..", ".", "", "a/b", "x" * 250, "__cluster_metadata", "é"]
)
@pytest.mark.parametrize("readonly", [False, True])
def test_a_name_in_the_catalogue_leads_nowhere_but_into_the_store(
    name: str, readonly: bool, make_store: MakeStore
) -> None:
    with make_store("elsewhere") as victim:
        victim.create_topic("victim").append(b"precious")
    with make_store() as store:
        store.create_topic("t")
    catalogue = store.path / "logstore.topics"
    content = json.loads(catalogue.read_text())
    content["topics"][name] = {**content["topics"]["t"], "deleting": True}
    catalogue.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"logstore\.topics cannot be read.*mend it"):
        make_store(readonly=readonly)
    with make_store("elsewhere") as victim:
        assert victim.recovery.clean and values(victim["victim"][0]) == [b"precious"]


@pytest.mark.parametrize(
    "fault",
    [
        {"partitions": 1 << 40},
        {"partitions": -1},
        {"partitions": float("inf")},
        {"creating_from": 1 << 40},
        {"creating_from": -2},
    ],
)
def test_a_number_in_the_catalogue_that_cannot_be_is_an_error(
    fault: dict[str, float], make_store: MakeStore
) -> None:
    with make_store() as store:
        store.create_topic("t")
    catalogue = store.path / "logstore.topics"
    content = json.loads(catalogue.read_text())
    content["topics"]["t"].update(fault)
    catalogue.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"logstore\.topics cannot be read"):
        make_store()


def test_a_catalogue_nested_too_deeply_is_an_error(make_store: MakeStore) -> None:
    make_store().close()
    (make_store().path / "logstore.topics").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"logstore\.topics cannot be read"):
        make_store(readonly=True)


# ---- an interrupt while closing ----


def _interrupt_in(function: Any) -> None:
    """Ctrl-C as soon as this is called, once."""

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is function.__code__ and event == "call":
            sys.settrace(None)
            raise KeyboardInterrupt

    sys.settrace(trace)


def test_a_close_that_was_interrupted_is_finished_by_the_next(make_store: MakeStore) -> None:
    store = make_store()
    store.create_topic("orders")
    _interrupt_in(Store._drop)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    store.close()
    with logstore.open(store.path) as again:
        assert list(again) == ["orders"]


def test_an_interrupted_close_does_not_forget_open_transactions(make_store: MakeStore) -> None:
    store = make_store()
    store.create_topic("orders")
    transaction = Producer(store, "P").transaction()
    transaction.__enter__()
    transaction.send("orders", b"x").result()
    _interrupt_in(Transactions.recover)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    assert not store.closed
    store.close()
    with logstore.open(store.path) as again:
        log = again["orders"][0]
        assert log.ongoing_transactions == []
        assert log.last_stable_offset == log.end_offset
