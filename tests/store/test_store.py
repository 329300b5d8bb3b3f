"""A store: a directory of topics with one owner, left in order or recovered."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import logstore
from logstore import (
    ClosedError,
    ConfigError,
    ForkedHandleError,
    InvalidNameError,
    LockedError,
    NotALogError,
    Partition,
    ReadOnlyError,
    Record,
    Store,
    TopicExistsError,
    UnknownTopicError,
)
from logstore.files.directory import Directory
from logstore.root.checkpoints import read_offsets, write_offsets
from tests.kit import kill, values

MakeStore = Callable[..., Store]
CHECKPOINTS = (
    "recovery-point-offset-checkpoint",
    "log-start-offset-checkpoint",
    "replication-offset-checkpoint",
    "cleaner-offset-checkpoint",
)
MARKER = ".kafka_cleanshutdown"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


# ---- what it is to hold ----


def test_a_new_store_is_an_empty_mapping(store: Store, tmp_path: Path) -> None:
    assert store.path == tmp_path / "store"
    assert (store.closed, store.readonly, len(store), list(store)) == (False, False, 0, [])
    assert "orders" not in store
    assert store, "an empty store is still a store"
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(store)


def test_topics_are_found_by_name(store: Store) -> None:
    orders = store.create_topic("orders", 3)
    store.create_topic("customers")
    assert list(store) == ["customers", "orders"]
    assert store["orders"] is orders and store.get("orders") is orders
    assert store.get("nothing") is None
    assert {name: len(topic) for name, topic in store.items()} == {"customers": 1, "orders": 3}


def test_an_unknown_topic_is_named_with_those_that_look_alike(store: Store) -> None:
    store.create_topic("orders")
    with pytest.raises(
        UnknownTopicError, match=r"no topic 'oders' in .*did you mean 'orders'"
    ) as e:
        store["oders"]
    assert (e.value.topic, e.value.near) == ("oders", ("orders",))
    with pytest.raises(KeyError):
        store["xyz"]


def test_a_store_keeps_topics_records_and_settings(make_store: MakeStore) -> None:
    with make_store() as store:
        orders = store.create_topic("orders", 2, config={"retention.ms": 5, "segment_bytes": 9999})
        identity, topic_id = store.identity, orders.id
        orders.append(b"one", partition=0)
        orders.append(b"two", partition=1)
    with make_store() as store:
        orders = store["orders"]
        assert [values(partition) for partition in orders] == [[b"one"], [b"two"]]
        assert orders.config.changed() == {"retention.ms": 5, "segment.bytes": 9999}
        assert orders[1].config == orders.config
        assert (store.identity, orders.id) == (identity, topic_id)
        assert store.recovery.clean and not store.recovery.partitions
        store.check()


def test_nothing_works_after_close(make_store: MakeStore) -> None:
    store = make_store()
    topic = store.create_topic("orders")
    partition = topic[0]
    store.close()
    store.close()
    assert store.closed and partition.closed
    for use in (
        lambda: store["orders"],
        lambda: list(store),
        lambda: store.create_topic("x"),
        lambda: store.delete_topic("orders"),
        store.sync,
        store.check,
        lambda: topic.append(b"v"),
        lambda: partition.append(b"v"),
        topic.describe,
    ):
        with pytest.raises(ClosedError):
            use()


def test_topics_hold_the_settings_of_the_store_where_they_have_none(make_store: MakeStore) -> None:
    with make_store(config={"segment.bytes": 5000, "retention.ms": 7}) as store:
        topic = store.create_topic("t", config={"retention.ms": 9})
        assert topic.config.changed() == {"segment.bytes": 5000, "retention.ms": 9}
    with make_store() as store:
        assert store["t"].config.changed() == {"retention.ms": 9}, "the store's are not stored"


# ---- the directory ----


def test_a_closed_store_looks_like_a_brokers_directory(make_store: MakeStore) -> None:
    with make_store(durability="fsync") as store:
        path = store.path
        assert not (path / MARKER).exists()
        topic = store.create_topic("orders", 2)
        topic.extend([b"a", b"b", b"c"], partition=1)
        topic[1].trim(2)
        identifier = (path / "orders-0" / "partition.metadata").read_text()
    assert json.loads((path / MARKER).read_text()) == {"version": 0, "brokerEpoch": -1}
    recovery, starts, watermarks, cleaner = (lines(path / name) for name in CHECKPOINTS)
    assert recovery == watermarks
    assert set(recovery) == {"0", "1", "orders 1 3"}
    assert starts == ["0", "1", "orders 1 2"], "only where it lies inside the first segment"
    assert cleaner == ["0", "0"]
    assert identifier == (path / "orders-1" / "partition.metadata").read_text()
    version, topic_id = identifier.split("\n")
    assert version == "version: 0"
    assert topic_id.startswith("topic_id: ") and len(topic_id) == 10 + 22
    settings = dict(line.split("=") for line in lines(path / "meta.properties") if line[0] != "#")
    assert settings.keys() == {"version", "cluster.id", "node.id", "directory.id"}
    assert settings["version"] == "1" and len(settings["cluster.id"]) == 22
    directories = {entry.name for entry in path.iterdir() if entry.is_dir()}
    assert directories == {"orders-0", "orders-1"}, "a broker fails to start over any other"


def test_an_identity_that_is_not_read_whole_is_refused(make_store: MakeStore) -> None:
    with make_store() as store:
        file = store.path / "meta.properties"
    content = file.read_text()
    file.write_text("#" * 70_000 + "\n" + content)
    with pytest.raises(NotALogError, match=r"meta\.properties is longer than 65536 bytes"):
        make_store()
    file.write_text(content)


def test_the_marker_goes_before_anything_changes_and_comes_last(make_store: MakeStore) -> None:
    with make_store() as store:
        store.create_topic("t").append(b"v")
        path = store.path
    assert (path / MARKER).exists()
    with make_store():
        assert not (path / MARKER).exists()
    with make_store(readonly=True) as reader:
        assert (path / MARKER).exists(), "a reader changes nothing"
        assert values(reader["t"][0]) == [b"v"]
    assert (path / MARKER).exists()


def test_sync_writes_checkpoints_of_what_is_durable(make_store: MakeStore) -> None:
    store = make_store(durability="os")
    store.create_topic("t", 2).extend([b"1", b"2"], partition=0)
    assert store["t"][0].durable_offset == 0
    store.sync()
    assert store["t"][0].durable_offset == 2
    assert "t 0 2" in lines(store.path / CHECKPOINTS[0])
    store["t"].append(b"3", partition=0)
    store.checkpoint()
    assert "t 0 2" in lines(store.path / CHECKPOINTS[0]), "never more than is durable"
    assert "t 0 3" in lines(store.path / CHECKPOINTS[2])


def test_a_partition_is_opened_when_it_is_used_and_changed_when_it_is_written(
    make_store: MakeStore,
) -> None:
    with make_store() as store:
        store.create_topic("t", 3).extend([b"v"], partition=1)
    before = {
        file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in store.path.glob("t-*/*")
    }
    with make_store() as store:
        topic = store["t"]
        assert not topic._opened
        assert [partition.end_offset for partition in topic] == [0, 1, 0]
        assert values(topic[1]) == [b"v"] and topic[1].tail(1)[0].offset == 0
        assert all(partition.parts.active.asleep for partition in topic)
        topic.describe()
        store.sync()
        store.check()
    after = {
        file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in store.path.glob("t-*/*")
    }
    assert after == before, "reading and closing leave every file alone"
    with make_store() as store:
        assert store["t"].append(b"w", partition=1).offset == 1
        assert [partition.parts.active.asleep for partition in store["t"]] == [True, False, True]
        kill(store)
    with make_store() as store:
        assert not store.recovery.clean
        assert list(store.recovery.partitions) == ["t-1"], "the others were never touched"
        assert values(store["t"][1]) == [b"v", b"w"]


@pytest.mark.parametrize("change", ["append", "extend", "trim", "truncate", "roll", "writer"])
def test_every_change_wakes_a_sleeping_partition(make_store: MakeStore, change: str) -> None:
    with make_store() as store:
        store.create_topic("t").extend([b"a", b"b", b"c"])
    with make_store() as store:
        partition = store["t"][0]
        assert partition.parts.active.asleep
        if change == "append":
            assert partition.append(b"d") == 3
        elif change == "extend":
            assert partition.extend([b"d", b"e"]) == range(3, 5)
        elif change == "trim":
            partition.trim(2)
        elif change == "truncate":
            partition.truncate(1)
        elif change == "roll":
            partition.roll()
        else:
            with partition.writer() as out:
                out.append(b"d")
        assert not partition.parts.active.asleep
        expected = values(partition)
    with make_store() as store:
        assert store.recovery.clean
        assert values(store["t"][0]) == expected


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    with pytest.raises(NotALogError, match="holds 'src'"):
        logstore.open(tmp_path)
    assert os.listdir(tmp_path) == ["src"]
    with pytest.raises(FileNotFoundError):
        logstore.open(tmp_path / "none", create=False)
    with pytest.raises(FileNotFoundError):
        logstore.open(tmp_path / "none", readonly=True)
    assert not (tmp_path / "none").exists()


def test_a_partition_is_not_taken_for_a_store(make_log: Callable[..., Partition]) -> None:
    with make_log("orders-0") as log:
        log.append(b"v")
    with pytest.raises(NotALogError, match=r"a partition, not a store.*Partition\.open"):
        logstore.open(log.path)


def test_partitions_made_alone_become_a_store(tmp_path: Path) -> None:
    for name in ("orders-0", "orders-1", "other-3"):
        with Partition.open(tmp_path / name) as log:
            log.append(name.encode())
    with logstore.open(tmp_path) as store:
        assert {name: len(topic) for name, topic in store.items()} == {"orders": 2, "other": 1}
        assert values(store["orders"][1]) == [b"orders-1"]
        assert values(store["other"][3]) == [b"other-3"]
        store["orders"].append(b"more", partition=1)
    with Partition.open(tmp_path / "orders-1") as log:
        assert values(log) == [b"orders-1", b"more"]


def test_a_store_stays_where_it_is_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with logstore.open("data", durability="os") as store:
        store.create_topic("t", 2).append(b"1", partition=0)
        (tmp_path / "elsewhere" / "data").mkdir(parents=True)
        monkeypatch.chdir("elsewhere")
        store["t"].append(b"2", partition=1)
        store.create_topic("u").append(b"3")
        store["t"].add_partitions(1)
        store.create_topic("v")
        store.delete_topic("v")
        assert store["t"][0].check() == []
    assert os.listdir(tmp_path / "elsewhere" / "data") == []
    with logstore.open(tmp_path / "data") as store:
        assert [values(partition) for partition in store["t"]] == [[b"1"], [b"2"], []]
        assert values(store["u"][0]) == [b"3"]


def test_a_link_in_the_place_of_a_partition_is_not_followed(
    make_store: MakeStore, tmp_path: Path
) -> None:
    with make_store() as store:
        store.create_topic("t").append(b"v")
    (store.path / "t-0").rename(tmp_path / "t-0")
    (store.path / "t-0").symlink_to(tmp_path / "t-0")
    with make_store() as store, pytest.raises(NotALogError, match="t-0 is not a directory"):
        store["t"][0]


# ---- one owner ----


def test_a_store_is_locked_against_stores_and_partitions(store: Store) -> None:
    store.create_topic("t").append(b"v")
    with pytest.raises(LockedError, match="already open for writing in this process"):
        logstore.open(store.path)
    with pytest.raises(LockedError):
        Partition.open(store.path / "t-0")
    with Partition.open(store.path / "t-0", readonly=True) as reader:
        assert values(reader) == [b"v"]


@pytest.mark.parametrize("locked_before", [True, False])
def test_a_partition_open_alone_keeps_a_store_out(
    make_store: MakeStore, locked_before: bool
) -> None:
    with make_store() as store:
        store.create_topic("t").append(b"v")
    if not locked_before:
        (store.path / ".lock").unlink()  # as where no store has ever been
    with Partition.open(store.path / "t-0") as log:
        with pytest.raises(LockedError):
            make_store()
        log.append(b"w")
    with make_store() as store:
        assert values(store["t"][0]) == [b"v", b"w"]


def test_a_partition_written_alone_takes_the_stores_word_back(make_store: MakeStore) -> None:
    """A broker, too, would trust a marker that is older than a change of a partition."""
    with make_store() as store:
        topic = store.create_topic("t", 2)
        topic.append(b"v", partition=0)
        topic.append(b"v", partition=1)
    Partition.open(store.path / "t-0", readonly=True).close()
    assert (store.path / MARKER).exists()
    with Partition.open(store.path / "t-0", durability="os") as log:
        assert not (store.path / MARKER).exists()
        log.append(b"w")
        crashed = Path(shutil.copytree(store.path, store.path.with_name("crashed")))
    with logstore.open(crashed) as other:
        assert list(other.recovery.partitions) == ["t-0"], "the other is as it was left"
        assert values(other["t"][0]) == [b"v", b"w"]
    with make_store() as store:
        assert not store.recovery.clean and not store.recovery.partitions
        assert values(store["t"][0]) == [b"v", b"w"]


HOLD = """
    import fcntl, sys
    file = open(sys.argv[1], "r+")
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("ready", flush=True)
    sys.stdin.read()
"""


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_running_broker_and_a_store_exclude_each_other(make_store: MakeStore) -> None:
    """A broker locks .lock with fcntl, as Java's FileChannel does."""
    make_store().close()
    lock = make_store("store").path / ".lock"
    broker = run(HOLD, lock)
    out, _ = broker.communicate()
    assert broker.returncode != 0 and "ready" not in out, "our lock keeps it out"
    shutil.copytree(lock.parent, lock.parent.parent / "other")
    broker = run(HOLD, lock.parent.parent / "other" / ".lock")
    assert broker.stdout is not None and broker.stdout.readline() == "ready\n"
    with pytest.raises(LockedError, match=f"process {broker.pid}"):
        make_store("other")
    broker.communicate("")
    make_store("other").close()


def test_a_reader_in_another_process_sees_topics_come_grow_and_go(make_store: MakeStore) -> None:
    script = """
        import sys, logstore
        with logstore.open(sys.argv[1], readonly=True) as store:
            for line in sys.stdin:
                print({name: [[r.value for r in p] for p in t] for name, t in store.items()},
                      flush=True)
    """
    store = make_store()
    reader = run(script, store.path)
    assert reader.stdin is not None and reader.stdout is not None

    def seen() -> object:
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdin.write("look\n")
        reader.stdin.flush()
        return eval(reader.stdout.readline())

    assert seen() == {}
    topic = store.create_topic("t")
    topic.append(b"1")
    assert seen() == {"t": [[b"1"]]}
    topic.add_partitions(1)
    topic.append(b"2", partition=1)
    store.create_topic("u")
    assert seen() == {"t": [[b"1"], [b"2"]], "u": [[]]}
    store.delete_topic("t")
    assert seen() == {"u": [[]]}
    topic = store.create_topic("t")
    topic.append(b"3")
    assert seen() == {"u": [[]], "t": [[b"3"]]}, "another topic of the same name"
    reader.communicate()


def test_a_reader_beside_a_writer_keeps_up_with_topics_it_holds(make_store: MakeStore) -> None:
    store = make_store()
    store.create_topic("t").append(b"1")
    with make_store(readonly=True) as reader:
        topic, partition = reader["t"], reader["t"][0]
        assert len(topic) == 1
        store["t"].add_partitions(2)
        store["t"].append(b"2", partition=2)
        assert values(topic[2]) == [b"2"]
        assert len(topic) == 3 and [p.number for p in topic] == [0, 1, 2]
        store["t"].alter({"retention.ms": 5})
        assert reader["t"].config.retention_ms == 5
        store.delete_topic("t")
        assert "t" not in reader
        with pytest.raises(UnknownTopicError):
            topic[1]
        assert partition.closed


def test_readers_never_see_half_a_topic(make_store: MakeStore) -> None:
    store = make_store()
    store.create_topic("kept")
    done = threading.Event()
    seen: set[tuple[tuple[str, int], ...]] = set()
    failures: list[BaseException] = []

    def look() -> None:
        try:
            with logstore.open(store.path, readonly=True) as reader:
                while not done.is_set():
                    # Between the names and a topic it may go; the next look is another one.
                    with contextlib.suppress(UnknownTopicError):
                        seen.add(tuple((name, len(topic)) for name, topic in reader.items()))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(15):
        store.create_topic("t", 3)
        store["t"].add_partitions(2)
        store.delete_topic("t")
    done.set()
    thread.join()
    assert not failures
    assert seen and {dict(pairs).get("t") for pairs in seen} <= {None, 3, 5}


def test_a_partition_that_was_closed_is_opened_again(store: Store) -> None:
    topic = store.create_topic("t")
    topic.append(b"1")
    before = topic[0]
    before.close()
    assert topic.append(b"2").offset == 1
    assert topic[0] is not before and values(topic[0]) == [b"1", b"2"]


def test_half_written_files_at_the_root_are_swept(make_store: MakeStore) -> None:
    with make_store() as store:
        pass
    leftover = store.path / "logstore.topics.123.tmp"
    leftover.write_bytes(b"{")
    other = store.path / "somebody.tmp"
    other.write_bytes(b"")
    with make_store():
        assert not leftover.exists() and other.exists()


def test_a_readonly_store_refuses_to_write(make_store: MakeStore) -> None:
    with make_store() as store:
        store.create_topic("t").append(b"v")
    with make_store(readonly=True) as reader:
        for use in (
            lambda: reader.create_topic("x"),
            lambda: reader.delete_topic("t"),
            lambda: reader["t"].append(b"v"),
            lambda: reader["t"].alter({"retention.ms": 1}),
            lambda: reader["t"].add_partitions(1),
            reader.sync,
        ):
            with pytest.raises(ReadOnlyError):
                use()
        assert repr(reader) == f"<Store {str(store.path)!r} of 1 topics readonly>"


def test_a_store_is_useless_after_fork_and_unharmed(store: Store) -> None:
    topic = store.create_topic("t")
    topic.append(b"v")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        outcome = b"no error"
        try:
            store["t"]
        except ForkedHandleError:
            try:
                topic.append(b"w")
            except ForkedHandleError:
                outcome = b"refused"
        store.close()
        os.write(write, outcome)
        os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"refused"
    os.close(read)
    assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(LockedError):
        logstore.open(store.path)
    assert topic.append(b"w").offset == 1


def test_the_lock_lives_as_long_as_a_partition_does(tmp_path: Path) -> None:
    store = logstore.open(tmp_path / "store")
    partition = store.create_topic("t")[0]
    partition.append(b"v")
    del store
    with pytest.warns(ResourceWarning, match="dropped without close"):
        gc.collect()
    with pytest.raises(LockedError):
        logstore.open(tmp_path / "store")
    partition.close()
    del partition
    gc.collect()
    logstore.open(tmp_path / "store").close()


# ---- after a crash ----


def test_everything_appended_is_there_after_a_kill(tmp_path: Path) -> None:
    script = """
        import os, sys, logstore
        store = logstore.open(sys.argv[1])
        for name in ("a", "b", "c"):
            topic = store.create_topic(name, 3)
            for i in range(30):
                topic.append(b"%d" % i, key=b"k%d" % i)
        store["a"][0].append(b"os", durability="os")
        os.kill(os.getpid(), 9)
    """
    child = run(script, tmp_path / "store")
    child.communicate()
    calls: list[tuple[int, int]] = []
    lock = threading.Lock()

    def progress(done: int, total: int) -> None:
        with lock:
            calls.append((done, total))

    with logstore.open(tmp_path / "store", progress=progress) as store:
        assert not store.recovery.clean and not store.recovery.failed
        assert len(store.recovery.partitions) == 9
        assert sum(len(values(p)) for topic in store.values() for p in topic) == 91
        assert calls and all(done <= total for done, total in calls)
        assert max(done for done, _ in calls) == sum(
            segment.size_bytes for topic in store.values() for p in topic for segment in p.segments
        )
        store.check()
    with logstore.open(tmp_path / "store") as store:
        assert store.recovery.clean


def test_one_partition_that_cannot_be_opened_leaves_the_others(make_store: MakeStore) -> None:
    store = make_store()
    store.create_topic("good").append(b"v")
    store.create_topic("bad", 2).append(b"v", partition=0)
    kill(store)
    log = store.path / "bad-0" / "00000000000000000000.log"
    log.rename(log.with_suffix(".kept"))
    log.mkdir()
    with make_store() as store:
        assert list(store.recovery.failed) == ["bad-0"]
        assert values(store["good"][0]) == [b"v"]
        assert store["bad"].append(b"w", partition=1).offset == 0
        with pytest.raises(NotALogError):
            store["bad"][0]
    assert not (store.path / MARKER).exists(), "nobody vouches for what was not loaded"
    log.rmdir()
    log.with_suffix(".kept").rename(log)
    with make_store() as store:
        assert not store.recovery.failed
        assert values(store["bad"][0]) == [b"v"]


def test_a_lost_partition_is_damage_and_never_made_anew(make_store: MakeStore) -> None:
    with make_store() as store:
        store.create_topic("t", 2).append(b"v", partition=0)
    shutil.rmtree(store.path / "t-0")
    with make_store() as store:
        with pytest.raises(FileNotFoundError, match="this partition's directory is gone"):
            store["t"][0]
        with pytest.raises(FileNotFoundError):
            store.check()
        assert store["t"].append(b"w", partition=1).offset == 0
        assert not (store.path / "t-0").exists()
        store.delete_topic("t")
        assert list(store) == []


def test_unreadable_settings_are_an_error_not_the_defaults(make_store: MakeStore) -> None:
    with make_store() as store:
        store.create_topic("t", config={"retention.ms": -1})
    catalogue = store.path / "logstore.topics"
    good = catalogue.read_text()
    for bad in (good[:40], good.replace('"retention.ms": -1', '"retention.ms": -9'), "[]", ""):
        catalogue.write_text(bad)
        with pytest.raises(ConfigError, match=r"logstore\.topics cannot be read"):
            make_store()
    catalogue.write_text(good.replace('"retention.ms": -1', '"retention.ms": 123'))
    with make_store() as store:
        assert store["t"].config.retention_ms == 123, "it may be edited by hand"


@pytest.mark.parametrize(
    "content", [b"", b"0\n", b"\xff\xfe", b"1\n0\n", b"0\n2\nt 0 1\n", b"0\nx"]
)
def test_a_torn_checkpoint_never_stops_opening(make_store: MakeStore, content: bytes) -> None:
    with make_store() as store:
        store.create_topic("t").extend([b"1", b"2"])
    for name in CHECKPOINTS:
        (store.path / name).write_bytes(content)
    (store.path / MARKER).unlink()
    with make_store() as store:
        assert values(store["t"][0]) == [b"1", b"2"]
    assert "t 0 2" in lines(store.path / CHECKPOINTS[0])


def test_checkpoints_are_read_as_they_are_written(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    offsets = {("a.b-c_d", 0): 5, ("a.b-c_d", 12): 1 << 60, ("z", 3): 0}
    write_offsets(directory, "name", offsets)
    assert (tmp_path / "name").read_text() == f"0\n3\na.b-c_d 0 5\na.b-c_d 12 {1 << 60}\nz 3 0\n"
    assert read_offsets(directory, "name") == offsets
    (tmp_path / "name").write_text("0\n1\n  z\t 3   7 \n")
    assert read_offsets(directory, "name") == {("z", 3): 7}
    assert read_offsets(directory, "none") == {}
    directory.close()


def test_a_failing_partition_does_not_keep_others_from_closing(make_store: MakeStore) -> None:
    store = make_store()
    topic = store.create_topic("t", 3)
    for number in range(3):
        topic.append(b"v", partition=number)
    for number in (0, 2):
        topic[number].segments[-1].file.close()  # its fsync will fail
    with pytest.raises(ExceptionGroup, match="2 errors") as raised:
        store.close()
    assert len(raised.value.exceptions) == 2
    assert store.closed and all(partition.closed for partition in topic._opened.values())
    assert not (store.path / MARKER).exists()
    with make_store() as store:
        assert sorted(store.recovery.partitions) == ["t-0", "t-2"], "partition 1 was closed cleanly"
        assert [values(partition) for partition in store["t"]] == [[b"v"]] * 3


def test_what_a_writer_holds_is_handed_over_by_closing_the_store(make_store: MakeStore) -> None:
    with make_store() as store:
        out = store.create_topic("t")[0].writer(linger=None)
        out.append(b"v")
        assert store["t"][0].end_offset == 0
    with make_store() as store:
        assert values(store["t"][0]) == [b"v"]


# ---- a broker in between ----


def as_broker(path: Path) -> None:
    """What a broker leaves of the marker when it opens and closes the directory."""
    (path / MARKER).write_text('{"version":0,"brokerEpoch":17}')


def test_a_broker_that_came_in_between_is_noticed(make_store: MakeStore, tmp_path: Path) -> None:
    """It deletes the first segment, appends, deletes a topic, creates it again: all is legal."""
    with make_store(config={"segment.bytes": 1024}) as store:
        topic = store.create_topic("t", config={"retention.ms": -1})
        for i in range(3):
            topic.extend([bytes(300), b"%d" % i])
            topic[0].roll()
        topic.append(b"last")
        for name in ("gone", "again"):
            store.create_topic(name, config={"retention.ms": 5})
    path = store.path
    for suffix in ("log", "index", "timeindex"):
        (path / "t-0" / f"{0:020d}.{suffix}").unlink()
    shutil.rmtree(path / "gone-0")
    metadata = path / "again-0" / "partition.metadata"
    metadata.write_text("version: 0\ntopic_id: AAAAAAAAQACAAAAAAAAABQ")
    as_broker(path)
    with make_store() as store:
        partition = store["t"][0]
        assert not partition.recovery.damage, "retention is no damage"
        assert (partition.start_offset, partition.end_offset) == (2, 7)
        assert values(partition)[-1] == b"last"
        assert sorted(store) == ["again", "t"]
        assert store["t"].config.retention_ms == -1
        assert store["again"].config.changed() == {}, "settings of a topic that is no more"
        store["t"].append(b"more")
    with make_store() as store:
        assert store.recovery.clean
        assert store["t"][0].end_offset == 8


def test_a_broker_that_crashed_in_between_is_noticed(make_store: MakeStore) -> None:
    with make_store() as store:
        store.create_topic("t").extend([b"1", b"2"])
    (store.path / MARKER).unlink()  # it removes ours and does not come to write its own
    with make_store() as store:
        assert not store.recovery.clean
        assert list(store.recovery.partitions) == ["t-0"], "our own word is not taken"
        assert values(store["t"][0]) == [b"1", b"2"]


# ---- many ----


def test_many_partitions_need_few_descriptors_until_they_are_written(make_store: MakeStore) -> None:
    with make_store() as store:
        for number in range(20):
            store.create_topic(f"topic-{number}", 4)
    with make_store() as store:
        before = len(os.listdir("/proc/self/fd"))
        ends = [partition.end_offset for topic in store.values() for partition in topic]
        assert ends == [0] * 80
        assert len(os.listdir("/proc/self/fd")) - before == 80, "one each: its directory"


def test_the_limit_of_open_files_is_raised_when_it_must_be(tmp_path: Path) -> None:
    script = """
        import resource, sys, logstore
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096))
        with logstore.open(sys.argv[1], durability="os") as store:
            topic = store.create_topic("t", 150)
            for number in range(150):
                topic.append(b"v", partition=number)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            assert 450 < soft <= hard == 4096, (soft, hard)
        with logstore.open(sys.argv[1]) as store:
            assert sum(p.end_offset for p in store["t"]) == 150
        print("done")
    """
    out, _ = run(script, tmp_path / "store").communicate()
    assert out == "done\n"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0


def test_threads_share_a_store(make_store: MakeStore) -> None:
    store = make_store()
    topic = store.create_topic("t", 4)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            store.create_topic("shared", 2, exist_ok=True)
            own = store.create_topic(f"own-{number}")
            for i in range(50):
                topic.append(b"%d" % i, key=b"%d-%d" % (number, i))
                store["shared"].append(b"v", partition=i % 2)
                own.append(b"v")
            if number % 2:
                store.delete_topic(own.name)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(store) == ["own-0", "own-2", "own-4", "shared", "t"]
    assert sum(p.end_offset for p in topic) == 300
    assert [p.end_offset for p in store["shared"]] == [150, 150]
    store.check()


def test_exist_ok_takes_a_topic_as_it_is(store: Store) -> None:
    topic = store.create_topic("t", 3)
    assert store.create_topic("t", 5, exist_ok=True) is topic
    assert len(topic) == 3
    with pytest.raises(TopicExistsError, match=r"'t' exists in .*exist_ok=True"):
        store.create_topic("t")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "1 to 249 characters, not 0"),
        ("x" * 250, "1 to 249 characters, not 250"),
        (".", "cannot be named '.'"),
        ("..", "cannot be named '..'"),
        ("a/b", "not '/'"),
        ("grüße", "not 'ß' 'ü'"),
        ("a\n", r"not '\\n'"),
        ("__cluster_metadata", "cannot be named"),
        ("my.topic", r"collides with 'my_topic'"),
        (7, "is a str, not 7"),
    ],
)
def test_a_name_follows_kafkas_rules(store: Store, name: str, message: str) -> None:
    store.create_topic("my_topic")
    with pytest.raises(InvalidNameError, match=message):
        store.create_topic(name)
    assert list(store) == ["my_topic"]


def test_the_longest_name_lives_and_dies(make_store: MakeStore) -> None:
    name = "x" * 249
    with make_store() as store:
        store.create_topic(name).append(b"v")
    with make_store() as store:
        assert values(store[name][0]) == [b"v"]
        store.delete_topic(name)
        assert not [entry for entry in store.path.iterdir() if entry.is_dir()]


def test_records_of_a_topic_know_where_they_are_from(store: Store) -> None:
    topic = store.create_topic("t", 2)
    position = topic.append(b"v", key=b"k")
    record = topic[position.partition][position.offset]
    assert (record.topic, record.partition, record.offset) == position
    assert isinstance(record, Record)
