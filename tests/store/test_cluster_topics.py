"""Topics of which only some partitions are here: made, dropped and set aside one by one."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import pytest

import logstore
from logstore import ConfigError, Store, TopicExistsError
from logstore.root.checkpoints import HIGH_WATERMARKS, read_offsets
from logstore.store.topic import Topic
from logstore.testing import record_io
from logstore.testing.crash_states import Crash, crash_states
from logstore.testing.sandbox import Sandbox
from tests.kit import values

ID = uuid.UUID("6b1f8a0e-3c53-4b59-9a2f-0d8f5f1f6a11")
MakeStore = Callable[..., Store]


def declare(store: Store, local: tuple[int, ...] = (1, 3), **options: object) -> Topic:
    given = {"topic_id": ID, "partitions": 5, "local": local, **options}
    return store.topic_changes.declare_topic("orders", **given)  # type: ignore[arg-type]


def made_directories(store: Store) -> list[str]:
    return sorted(path.name for path in store.path.glob("orders-?"))


def test_a_topic_has_the_id_of_the_cluster_and_some_partitions(make_store: MakeStore) -> None:
    store = make_store()
    topic = declare(store, config={"retention.bytes": 1000})
    assert topic.id == ID and topic.partition_numbers == (1, 3)
    assert store.topic_changes.declared_partitions(topic) == 5
    assert topic[3].append(b"x") == 0
    assert (store.path / "orders-3" / "partition.metadata").read_text().count("topic_id") == 1
    with pytest.raises(IndexError):
        topic[0]
    store.close()
    again = make_store()
    assert again["orders"].id == ID and again["orders"].partition_numbers == (1, 3)
    assert again["orders"].config.retention_bytes == 1000
    assert values(again["orders"][3]) == [b"x"]
    assert again.check() == []


def test_declaring_again_adds_what_is_missing(store: Store) -> None:
    topic = declare(store)
    topic[1].append(b"x")
    assert declare(store, local=(0, 1), partitions=7) is topic
    assert topic.partition_numbers == (0, 1, 3)
    assert store.topic_changes.declared_partitions(topic) == 7
    assert values(topic[1]) == [b"x"]
    assert declare(store, local=(), partitions=2) is topic
    assert store.topic_changes.declared_partitions(topic) == 7
    with pytest.raises(TopicExistsError):
        declare(store, topic_id=uuid.uuid4())
    with pytest.raises(ConfigError):
        declare(store, partitions=0)
    with pytest.raises(IndexError):
        declare(store, local=(9,))


def test_settings_of_a_topic_change_though_partitions_are_elsewhere(make_store: MakeStore) -> None:
    store = make_store()
    topic = declare(store)
    opened = topic[1]
    store.alter_topic("orders", {"retention.bytes": 77})
    assert opened.config.retention_bytes == topic.config.retention_bytes == 77
    store.topic_changes.raise_partitions(topic, 9)
    with pytest.raises(ConfigError):
        store.topic_changes.raise_partitions(topic, 8)
    store.close()
    again = make_store()["orders"]
    assert again.config.retention_bytes == 77
    assert again.partition_numbers == (1, 3)


def test_a_topic_of_all_partitions_can_lose_one(make_store: MakeStore) -> None:
    store = make_store()
    topic = store.create_topic("orders", 3)
    topic[1].append(b"gone")
    topic[2].append(b"stays")
    held = topic[1]
    store.topic_changes.drop_partition(topic, 1)
    assert held.closed and topic.partition_numbers == (0, 2)
    assert made_directories(store) == ["orders-0", "orders-2"]
    with pytest.raises(IndexError):
        store.topic_changes.drop_partition(topic, 1)
    store.alter_topic("orders", {"retention.bytes": 1})
    store.close()
    again = make_store()
    assert again["orders"].partition_numbers == (0, 2)
    assert values(again["orders"][2]) == [b"stays"]
    assert again.check() == []
    made = again.topic_changes.make_partition(again["orders"], 1)
    assert (made.start_offset, made.end_offset) == (0, 0)


def test_a_partition_is_set_aside_and_kept(make_store: MakeStore) -> None:
    store = make_store()
    topic = declare(store)
    topic[3].extend([b"a", b"b"])
    stray = store.topic_changes.set_aside_partition(topic, 3)
    assert stray.name.startswith("orders-3.") and stray.name.endswith("-stray")
    assert (stray.topic, stray.number, stray.topic_id) == ("orders", 3, ID)
    assert store.topic_changes.strays() == [stray]
    new = store.topic_changes.make_partition(topic, 3)
    assert new.end_offset == 0
    new.append(b"new")
    store.close()
    again = make_store()
    assert again.topic_changes.strays() == [stray]
    assert values(again["orders"][3]) == [b"new"]
    assert again.check() == []
    # A directory with its old name is the log as it was closed.
    (again.path / stray.name).rename(again.path.parent / "orders-3")
    with logstore.Partition.open(again.path.parent / "orders-3") as log:
        assert log.recovery.clean and values(log) == [b"a", b"b"]


def test_a_stray_is_deleted_when_asked(store: Store) -> None:
    topic = declare(store)
    stray = store.topic_changes.set_aside_partition(topic, 1)
    store.topic_changes.remove_stray(stray)
    assert store.topic_changes.strays() == []
    assert not (store.path / stray.name).exists()


def test_a_long_name_is_shortened(store: Store) -> None:
    name = "t" * 249
    topic = store.create_topic(name)
    stray = store.topic_changes.set_aside_partition(topic, 0)
    assert len(stray.name) == 255 and stray.topic == "t" * len(stray.topic)
    assert store.topic_changes.strays() == [stray]


def filled(sandbox: Sandbox, state: Crash) -> str:
    sandbox.put(state.tree)
    return sandbox.path


@pytest.mark.parametrize("act", ["drop_partition", "set_aside_partition"])
def test_a_crash_leaves_the_partition_or_nothing(make_store: MakeStore, act: str) -> None:
    store = make_store(durability="fsync")
    topic = declare(store)
    topic[1].append(b"stays")
    topic[3].append(b"goes")
    store.sync()
    with record_io(store.path) as trace:
        getattr(store.topic_changes, act)(topic, 3)
    seen = set()
    for state in crash_states(trace, per_step=1, shard=(0, 3)):
        with Sandbox() as sandbox, logstore.open(filled(sandbox, state)) as again:
            found = again["orders"]
            assert values(found[1]) == [b"stays"]
            there = 3 in found.partition_numbers
            strays = len(again.topic_changes.strays())
            assert strays == (not there and act == "set_aside_partition")
            if there:
                assert values(found[3]) == [b"goes"]
            else:
                assert again.topic_changes.make_partition(found, 3).end_offset == 0
            seen.add(there)
    assert seen == {True, False}


# ---- high watermarks ----


def test_a_high_watermark_is_checkpointed_as_it_is_set(make_store: MakeStore) -> None:
    store = make_store(durability="fsync")
    topic = declare(store, local=(0, 1))
    assert store.topic_changes.checkpointed_high_watermark("orders", 0) is None
    for log in topic:
        log.extend([b"a", b"b", b"c"])
    topic[0].parts.view.set_high_watermark(2)
    store.checkpoint()
    with logstore.open(store.path, readonly=True) as reader:
        assert reader.topic_changes.checkpointed_high_watermark("orders", 0) == 2
    topic[0].parts.view.set_high_watermark(1)
    store.close()
    again = make_store()
    assert again.topic_changes.checkpointed_high_watermark("orders", 0) == 1
    assert again.topic_changes.checkpointed_high_watermark("orders", 1) == 3
    assert again["orders"][0].end_offset == 3


def test_a_row_stays_until_the_high_watermark_is_set_again(make_store: MakeStore) -> None:
    store = make_store(durability="fsync")
    log = declare(store, local=(0,))[0]
    log.extend([b"a", b"b", b"c"])
    log.parts.view.set_high_watermark(2)
    store.close()
    for _ in range(2):
        store = make_store()
        store.topic_changes.keep_high_watermarks()
        log = store["orders"][0]
        log.append(b"d")
        store.checkpoint()
        assert read_rows(store) == {("orders", 0): 2}
        assert store.topic_changes.checkpointed_high_watermark("orders", 0) == 2
        store.close()
    store = make_store()
    assert store.topic_changes.checkpointed_high_watermark("orders", 0) == 2
    store.topic_changes.drop_partition(store["orders"], 0)
    assert store.topic_changes.checkpointed_high_watermark("orders", 0) is None


def read_rows(store: Store) -> dict[tuple[str, int], int]:
    return read_offsets(store._directory, HIGH_WATERMARKS)


# ---- producer ids ----


def test_producer_ids_from_elsewhere(store: Store) -> None:
    own = store.producer_ids.take()
    blocks = [range(1000, 1002), range(5000, 5002)]
    store.producer_ids.allocate_by(lambda: blocks.pop(0))
    assert [store.producer_ids.take(above=own) for _ in range(3)] == [1000, 1001, 5000]
    with logstore.Producer(store) as producer:
        assert producer.identity[0] == 5001
    store.producer_ids.allocate_by(lambda: range(3, 3))
    with pytest.raises(ConfigError):
        store.producer_ids.take()
    store.producer_ids.allocate_by(None)
    assert store.producer_ids.take() > own


def test_threads_never_get_the_same_id(store: Store) -> None:
    starts = iter(range(0, 10**6, 3))
    store.producer_ids.allocate_by(lambda: range(start := next(starts), start + 3))
    taken: list[int] = []

    def take() -> None:
        for _ in range(200):
            taken.append(store.producer_ids.take())

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(800))
