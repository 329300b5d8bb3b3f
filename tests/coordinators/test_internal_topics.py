"""Topics for coordinators, whose partitions are made on demand; companions of a store."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import logstore
from logstore import (
    ClosedError,
    Consumer,
    InvalidNameError,
    KafkaServer,
    Partition,
    Producer,
    Record,
    Store,
)
from logstore.closeable import Closeable
from logstore.coordinators.internal_topics import (
    CONSUMER_OFFSETS,
    DELAYED,
    RESERVED_TOPICS,
    TRANSACTION_STATE,
    coordinator_partition,
    internal_topic,
)
from logstore.testing import Fault, inject_io


def made(store: Store, name: str, number: int) -> Partition:
    return store.topic_changes.make_partition(store[name], number)


def test_the_partition_of_a_group_is_the_one_kafka_looks_in() -> None:
    assert coordinator_partition("group1", 50) == 40
    assert coordinator_partition("my-group", 50) == 12
    assert coordinator_partition("", 50) == 0
    # The one string hash whose absolute value is negative in Java: it counts as 0.
    assert coordinator_partition("polygenelubricants", 50) == 0
    # Characters beyond 16 bits count as the two that Java makes of them.
    assert coordinator_partition("\N{GRINNING FACE}", 1 << 31) == 31 * 0xD83D + 0xDE00


def test_a_declared_topic_has_only_the_partitions_that_were_needed(
    make_store: Callable[..., Store],
) -> None:
    store = make_store()
    topic = internal_topic(store, CONSUMER_OFFSETS)
    assert topic.config.compacts and len(topic) == 0
    assert store.topic_changes.declared_partitions(store[CONSUMER_OFFSETS]) == 50
    made(store, CONSUMER_OFFSETS, 12).append(b"x", key=b"k")
    assert made(store, CONSUMER_OFFSETS, 12) is topic[12]
    assert internal_topic(store, CONSUMER_OFFSETS) is topic
    with pytest.raises(IndexError):
        made(store, CONSUMER_OFFSETS, 50)
    store.close()
    store = make_store()
    assert store.recovery.clean
    topic = store[CONSUMER_OFFSETS]
    assert [log.number for log in topic] == [12]
    assert store.topic_changes.declared_partitions(store[CONSUMER_OFFSETS]) == 50
    made(store, CONSUMER_OFFSETS, 3)
    assert [log.number for log in topic] == [3, 12]
    assert topic[12][0].value == b"x"


def test_one_of_them_that_is_missing_is_damage(make_store: Callable[..., Store]) -> None:
    store = make_store()
    internal_topic(store, TRANSACTION_STATE)
    made(store, TRANSACTION_STATE, 7).append(b"x", key=b"k")
    store.close()
    shutil.rmtree(store.path / f"{TRANSACTION_STATE}-7")
    with pytest.raises(FileNotFoundError, match="put it back"):
        made(make_store(), TRANSACTION_STATE, 7)


def test_one_that_a_crash_left_unfinished_is_made_anew(
    make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic without its final name is deleted, one with it exists, whether catalogued or not."""
    store = make_store()
    internal_topic(store, CONSUMER_OFFSETS)

    def crash(*_: object) -> None:
        raise RuntimeError("crash")

    for broken in ("rename", "sync"):
        with monkeypatch.context() as patch:
            patch.setattr(type(store._directory), broken, crash)
            with pytest.raises(RuntimeError):
                made(store, CONSUMER_OFFSETS, 9)
    store.close()
    store = make_store()
    assert not [name for name in os.listdir(store.path) if name.endswith("-delete")]
    made(store, CONSUMER_OFFSETS, 9).append(b"x", key=b"k")
    assert [log.number for log in store[CONSUMER_OFFSETS]] == [9]


def test_readers_see_partitions_that_come(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "s", durability="os") as store:
        internal_topic(store, CONSUMER_OFFSETS)
        with logstore.open(tmp_path / "s", readonly=True) as reader:
            assert len(reader[CONSUMER_OFFSETS]) == 0
            made(store, CONSUMER_OFFSETS, 4).append(b"x", key=b"k")
            assert reader[CONSUMER_OFFSETS][4][0].value == b"x"
            assert reader.topic_changes.declared_partitions(reader[CONSUMER_OFFSETS]) == 50


class Friend(Closeable):
    def __init__(self, store: Store) -> None:
        self.store = store
        self.closed = 0

    def close(self) -> None:
        assert not self.store.closed
        self.store["last-words"].append(b"bye")
        self.closed += 1


def test_a_store_has_one_companion_of_a_kind_and_closes_it_first(
    make_store: Callable[..., Store],
) -> None:
    store = make_store()
    store.create_topic("last-words")
    friend = store.companions.of(Friend)
    assert store.companions.of(Friend) is friend
    store.close()
    store.close()
    assert friend.closed == 1
    with pytest.raises(ClosedError):
        store.companions.of(Friend)
    assert make_store()["last-words"][0][0].value == b"bye"


class Stubborn(Closeable):
    def __init__(self, store: Store) -> None:
        pass

    def close(self) -> None:
        raise OSError("not now")


def test_a_companion_that_cannot_be_closed_keeps_nobody_else_from_it(tmp_path: Path) -> None:
    store = logstore.open(tmp_path / "store")
    store.create_topic("last-words")
    friend, _ = store.companions.of(Friend), store.companions.of(Stubborn)
    with pytest.raises(OSError, match="not now"):
        store.close()
    assert store.closed and friend.closed == 1
    with logstore.open(tmp_path / "store") as again:
        assert again["last-words"][0][0].value == b"bye"


def test_who_listens_hears_every_kind_of_append(store: Store) -> None:
    log = store.create_topic("t")[0]
    heard: list[int] = []

    def hear() -> None:
        heard.append(log.parts.view.segments[-1].end_offset if not log.closed else -1)

    log.parts.view.listen(hear)
    log.append(b"a")
    log.extend([b"b", b"c"])
    with log.writer() as out:
        out.append(b"d")
    assert {1, 3, 4} <= set(heard)
    log.parts.view.unlisten(hear)
    log.parts.view.unlisten(hear)
    assert log.parts.view.followers == 0
    count = len(heard)
    log.append(b"e")
    assert len(heard) == count


def test_partitions_that_were_not_made_yet_are_not_missed(tmp_path: Path) -> None:
    with logstore.open(tmp_path, durability="os") as store:
        internal_topic(store, CONSUMER_OFFSETS)
        made(store, CONSUMER_OFFSETS, 7).append(b"v", key=b"k")
        store.check()


@pytest.mark.parametrize("call", [1, 2])
def test_a_partition_is_made_again_after_a_failed_sync_of_the_directory(
    tmp_path: Path, call: int
) -> None:
    with logstore.open(tmp_path / "s", durability="os") as store:
        internal_topic(store, CONSUMER_OFFSETS)
        with (
            inject_io(Fault.fail(errno.EIO, "sync", "*/s", call=call)),
            pytest.raises(OSError, match="Input/output"),
        ):
            made(store, CONSUMER_OFFSETS, 7)
        made(store, CONSUMER_OFFSETS, 7).append(b"v", key=b"k")
        store.check()
    with logstore.open(tmp_path / "s") as store:
        assert store[CONSUMER_OFFSETS][7][0].value == b"v"


@pytest.mark.parametrize("name", [*RESERVED_TOPICS])
def test_a_reserved_topic_is_refused_to_users_and_written_by_its_owner(
    store: Store, name: str
) -> None:
    topic = internal_topic(store, name)
    log = made(store, name, 2)
    with Producer(store, "id") as producer:
        with pytest.raises(InvalidNameError, match="written by logstore only"):
            producer.transaction().append(name, b"v", key=b"k")
        with producer.transaction() as tx:
            tx.send_internal(name, 2, Record(b"v", key=b"k", timestamp=5))
        # The route of the owner does not let a user in.
        with pytest.raises(InvalidNameError), producer.transaction() as tx:
            tx.send(name, b"v", key=b"k")
        with pytest.raises(RuntimeError), producer.transaction() as tx:
            tx.send_internal(name, 2, Record(b"aborted", key=b"k", timestamp=6))
            raise RuntimeError
    (record,) = log.scan(isolation="read_committed")
    assert (record.key, record.value, record.timestamp) == (b"k", b"v", 5)
    assert topic.config.compacts and topic.config.message_timestamp_type == "CreateTime"
    with Consumer(store, re.compile(".*"), timeout=0) as consumer:
        assert not list(consumer)


def test_the_listener_shows_a_reserved_topic_with_its_own_partition_count(store: Store) -> None:
    internal_topic(store, DELAYED)
    made(store, DELAYED, 1)
    with KafkaServer(store) as server:
        client = pytest.importorskip("confluent_kafka.admin").AdminClient(
            {"bootstrap.servers": server.bootstrap_servers}
        )
        assert [*client.list_topics(timeout=60).topics[DELAYED].partitions] == [0, 1, 2]
