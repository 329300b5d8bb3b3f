"""A poll of some of the partitions, a bell that consumers share, and the durability of a commit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import logstore
from logstore import Consumer, Groups, Store, TopicPartition
from logstore.consumer.wakeup import Bell
from logstore.coordinators.offset_book import OffsetBook
from tests.kit import values, wait_until

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def filled(store: Store) -> Store:
    for log in store.create_topic("t", partitions=2):
        log.extend([b"%d-%d" % (log.number, n) for n in range(3)])
    return store


def test_a_poll_of_some_partitions_leaves_the_others_where_they_are(filled: Store) -> None:
    with Consumer(filled, "t", group_id="g") as consumer:
        assert values(consumer.poll(timeout=0, partitions=[T1])) == [b"1-0", b"1-1", b"1-2"]
        assert consumer.positions() == {T0: 0, T1: 3}
        assert consumer.poll(timeout=0, partitions=[T1]) == []
        assert consumer.poll(timeout=0, partitions=[]) == []
        assert values(consumer.poll(timeout=0, partitions=[("t", 0), ("t", 9)], max_records=2)) == [
            b"0-0", b"0-1",
        ]  # fmt: skip
        assert values(consumer.poll(timeout=0)) == [b"0-2"]


def test_a_poll_of_some_partitions_waits_for_these_only(filled: Store) -> None:
    with Consumer(filled, "t") as consumer:
        assert consumer.poll(timeout=0.01, partitions=[("t", 9)]) == []
        assert len(consumer.poll(timeout=0)) == 6


def test_a_poll_that_does_not_wait_keeps_the_ring_of_a_shared_bell(filled: Store) -> None:
    bell = Bell()
    filled.create_topic("u")
    with Consumer(filled, "t", bell=bell) as first, Consumer(filled, "u", bell=bell) as second:
        bell.clear()
        assert second.poll(timeout=0) == []
        filled["u"].append(b"after the poll of its consumer")
        assert len(first.poll(timeout=0)) == 6
        assert bell.wait(0)  # without it, the thread would sleep although `u` has a record
        bell.clear()
        assert len(second.poll(timeout=0)) == 1
        assert not bell.wait(0)
        second.wake()
        assert bell.wait(0)


def test_a_commit_with_os_durability_survives_a_kill_and_is_not_synced(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "data") as store:
        store.create_topic("t").extend([b"a", b"b"])
        with Consumer(store, "t", group_id="g", auto_commit=False) as consumer:
            consumer.poll(timeout=0)
            book = OffsetBook.of(store)
            log = book.log_of("g")
            synced = log.durable_offset
            consumer.commit({T0: 1}, durability="os")
            assert log.durable_offset == synced < log.end_offset
            assert book.committed("g") == {}  # a power cut may still remove it
            copy = Path(shutil.copytree(tmp_path / "data", tmp_path / "killed"))
            consumer.commit({T0: 2})
            assert log.durable_offset == log.end_offset
    with logstore.open(copy) as store:
        assert Groups(store).committed("g")[T0].offset == 1


def test_a_member_is_settled_after_it_has_taken_its_partitions(filled: Store) -> None:
    with Consumer(filled, "t") as alone:
        assert not alone.settled  # it is in no group
    with Consumer(filled, "t", group_id="g") as first:
        assert not first.settled
        first.poll(timeout=0)
        assert first.settled and first.assignment() == [T0, T1]
        with Consumer(filled, "t", group_id="g") as second:
            second.poll(timeout=0)
            assert not (first.settled and second.settled)  # a partition has to move

            def poll_both() -> None:
                first.poll(timeout=0)
                second.poll(timeout=0)

            wait_until(lambda: first.settled and second.settled, between=poll_both)
            assert sorted(first.assignment() + second.assignment()) == [T0, T1]
