"""Follow with a directory as its source: the copy is a byte-exact prefix, whatever happens."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import logstore
from logstore import (
    Compactor,
    CorruptLogError,
    DivergedError,
    Follow,
    LockedError,
    Partition,
    Producer,
    Store,
)
from logstore.replication import source as source_module
from logstore.replication.source import DirectorySource, Place, whole_batches
from tests.kit import committed, flip, values
from tests.replication.copies import is_prefix, raw_log


@pytest.fixture
def src(tmp_path: Path) -> Iterator[Store]:
    with logstore.open(tmp_path / "src", durability="os") as store:
        yield store


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "dst"


def copied(src: Store, target: Path, **options: object) -> logstore.FollowStatus:
    """Copy what the source has now."""
    with Follow(src.path, target, **options) as follow:  # type: ignore[arg-type]
        return follow.catch_up()


def same(src: Store, target: Path, name: str) -> bool:
    return raw_log(src.path / name) == raw_log(target / name)


# ---- what is copied ----


def test_a_copy_has_the_same_bytes_offsets_and_settings(src: Store, target: Path) -> None:
    topic = src.create_topic("orders", 3, config={"segment.bytes": 20_000, "retention.ms": 77})
    for number in range(900):
        topic.append(b"value %d" % number, key=b"k", partition=number % 3)
    status = copied(src, target)
    assert (status.copied_records, status.lag_records, status.lag_bytes) == (900, 0, 0)
    assert status.lag_seconds == 0
    for number in range(3):
        assert same(src, target, f"orders-{number}")
    with logstore.open(target, readonly=True) as copy:
        assert copy["orders"].id == topic.id
        assert copy["orders"].config.changed() == topic.config.changed()
        assert values(copy["orders"][1]) == values(topic[1])
        assert copy.check() == []


def test_a_copy_continues_where_its_own_log_ends(src: Store, target: Path) -> None:
    log = src.create_topic("orders")[0]
    for first in (0, 100, 200):
        log.extend([b"%d" % number for number in range(first, first + 100)])
        assert copied(src, target).copied_records == 100
    assert copied(src, target).copied_records == 0
    assert same(src, target, "orders-0")


def test_leader_epochs_are_kept(src: Store, target: Path) -> None:
    log = src.create_topic("orders")[0]
    for epoch in (0, 4, 5, 9):
        log.become_leader(epoch)
        log.extend([b"a", b"b"])
    copied(src, target)
    with logstore.open(target, readonly=True) as copy:
        assert copy["orders"][0].leader_epochs == log.leader_epochs


def test_transactions_and_their_markers_are_copied_as_they_are(src: Store, target: Path) -> None:
    topic = src.create_topic("orders")
    with Producer(src, transactional_id="t") as producer:
        with producer.transaction():
            producer.send("orders", b"kept", partition=0)
        with pytest.raises(ZeroDivisionError), producer.transaction():
            producer.send("orders", b"aborted", partition=0)
            producer.flush()
            raise ZeroDivisionError
        with producer.transaction():
            producer.send("orders", b"open", partition=0)
            producer.flush()
            # The open transaction is copied too: it is durable, and committed readers skip it.
            copied(src, target)
            assert same(src, target, "orders-0")
            with logstore.open(target, readonly=True) as copy:
                assert committed(copy["orders"][0]) == [b"kept"]
                assert copy["orders"][0].last_stable_offset == topic[0].last_stable_offset
    copied(src, target)
    assert same(src, target, "orders-0")
    with logstore.open(target, readonly=True) as copy:
        assert committed(copy["orders"][0]) == [b"kept", b"open"]


def test_internal_topics_are_not_copied(src: Store, target: Path) -> None:
    src.create_topic("orders")
    with Producer(src, transactional_id="t") as producer, producer.transaction():
        producer.send("orders", b"x", partition=0)
    assert any(name.startswith("__") for name in src)
    copied(src, target)
    with logstore.open(target, readonly=True) as copy:
        assert list(copy) == ["orders"]


def test_a_compacted_source_is_copied_with_its_gaps(src: Store, target: Path) -> None:
    settings = {"cleanup.policy": "compact", "segment.bytes": 20_000}
    log = src.create_topic("state", config=settings)[0]
    for number in range(3000):
        log.append(b"v%d" % number, key=b"k%d" % (number % 7))
    log.roll()
    Compactor(log, min_cleanable_dirty_ratio=0).run()
    log.append(b"last", key=b"k0")
    offsets = [record.offset for record in log]
    assert len(offsets) < 2000
    copied(src, target)
    assert same(src, target, "state-0")
    with logstore.open(target, readonly=True) as copy:
        assert [record.offset for record in copy["state"][0]] == offsets


def test_compaction_of_the_source_after_the_copy_is_no_divergence(src: Store, target: Path) -> None:
    log = src.create_topic("state", config={"cleanup.policy": "compact"})[0]
    log.extend([logstore.Record(b"v%d" % number, key=b"k") for number in range(50)])
    log.roll()
    log.extend([logstore.Record(b"w%d" % number, key=b"k") for number in range(50)])
    log.roll()
    copied(src, target)
    Compactor(log, min_cleanable_dirty_ratio=0).run()
    log.append(b"last", key=b"k")
    assert copied(src, target).copied_records == 1


def test_a_batch_larger_than_one_step_is_copied_whole(
    src: Store, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logstore.replication.follow.CHUNK_BYTES", 1000)
    log = src.create_topic("orders")[0]
    for size in (10, 5000, 20, 100_000, 3):
        log.append(b"x" * size)
    copied(src, target)
    assert same(src, target, "orders-0")


def test_segments_smaller_than_a_step_are_copied(src: Store, target: Path) -> None:
    log = src.create_topic("orders", config={"segment.bytes": 16_384})[0]
    for number in range(2000):
        log.append(b"%d" % number * 20)
    assert len(log.segments) > 5
    copied(src, target)
    assert same(src, target, "orders-0")


# ---- only what is durable ----


def test_only_what_the_source_made_durable_is_copied(
    src: Store, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "SYNC_AFTER_SECONDS", 1e9)
    log = src.create_topic("orders")[0]
    log.extend([b"a", b"b"], durability="fsync")
    log.extend([b"c", b"d"], durability="os")
    with Follow(src.path, target) as follow:
        while follow.step(0.0):
            pass
        status = follow.status().partitions[0]
        assert (status.end_offset, status.source_end_offset, status.lag_records) == (2, 4, 2)
        assert status.lag_bytes == log.segments[0].size_bytes // 2
        log.sync()
        follow.catch_up()
        assert follow.status().lag_records == 0
    assert same(src, target, "orders-0")


def test_records_that_no_sync_covers_are_synced_by_the_copy(src: Store, target: Path) -> None:
    log = src.create_topic("orders")[0]
    log.extend([b"a", b"b", b"c"], durability="os")
    assert log.durable_offset == 0
    assert copied(src, target).copied_records == 3


def test_nothing_above_the_durable_offset_is_copied_after_a_failed_sync(
    src: Store, target: Path
) -> None:
    log = src.create_topic("orders")[0]
    log.extend([b"a", b"b"], durability="fsync")
    log.extend([b"c", b"d"], durability="os")
    log.parts.active.durability.fail(OSError(5, "planted"))
    source = DirectorySource(src.path)
    try:
        place = Place("orders", 0)
        assert source._sync(place, source._partition(place), 2, 4) == 2
    finally:
        source.close()
    with Follow(src.path, target) as follow:
        for _ in range(20):
            follow.step(0.05)
        assert follow.status().partitions[0].end_offset == 2


# ---- new topics, filters ----


def test_new_topics_and_partitions_are_picked_up(src: Store, target: Path) -> None:
    first = src.create_topic("first")
    first.append(b"1", partition=0)
    with Follow(src.path, target) as follow:
        follow.catch_up()
        first.add_partitions(2)
        first.append(b"2", partition=2)
        src.create_topic("second", 2).append(b"3", partition=1)
        assert follow.catch_up().lag_records == 0
    for name in ("first-0", "first-1", "first-2", "second-0", "second-1"):
        assert same(src, target, name)


def test_a_filter_selects_topics_by_name_or_pattern(src: Store, target: Path) -> None:
    for name in ("orders", "orders.eu", "users", "logs"):
        src.create_topic(name).append(b"x", partition=0)
    copied(src, target, topics=["orders*", "logs"])
    with logstore.open(target, readonly=True) as copy:
        assert sorted(copy) == ["logs", "orders", "orders.eu"]
    with pytest.raises(logstore.ConfigError, match="sequence"):
        Follow(src.path, target, topics="orders")


def test_a_topic_that_is_deleted_at_the_source_stays_in_the_copy(src: Store, target: Path) -> None:
    src.create_topic("gone").append(b"x", partition=0)
    src.create_topic("stays")
    with Follow(src.path, target) as follow:
        follow.catch_up()
        src.delete_topic("gone")
        src["stays"].append(b"y", partition=0)
        status = follow.catch_up()
        assert [each.topic for each in status.partitions] == ["stays"]
    with logstore.open(target, readonly=True) as copy:
        assert values(copy["gone"][0]) == [b"x"]


# ---- exclusion ----


def test_two_copies_of_one_target_exclude_each_other(src: Store, target: Path) -> None:
    src.create_topic("orders")
    with Follow(src.path, target) as first:
        with pytest.raises(LockedError):
            Follow(src.path, target)
        first.catch_up()
    copied(src, target)


def test_source_and_target_must_differ(src: Store, tmp_path: Path) -> None:
    with pytest.raises(logstore.ConfigError, match="two directories"):
        Follow(src.path, tmp_path / "dst" / ".." / "src")
    with pytest.raises(logstore.ConfigError, match="KafkaSource"):
        Follow("kafka://localhost:9092", tmp_path / "dst")
    with pytest.raises(FileNotFoundError):
        Follow(tmp_path / "none", tmp_path / "dst")


# ---- a source that was cut or replaced ----


def test_a_cut_of_the_source_stops_the_copy_and_names_numbers(src: Store, target: Path) -> None:
    log = src.create_topic("orders")[0]
    for number in range(10):
        log.append(b"%d" % number)
    copied(src, target)
    log.truncate(4)
    with pytest.raises(DivergedError, match="offset 4 only, and the target ends at 10") as caught:
        copied(src, target)
    assert (caught.value.common_offset, caught.value.end_offset) == (4, 10)
    assert caught.value.where == "orders-0"
    with logstore.open(target, readonly=True) as copy:
        assert copy["orders"][0].end_offset == 10
    status = copied(src, target, allow_truncate=True)
    assert status.truncated_records == 6
    assert same(src, target, "orders-0")


@pytest.mark.parametrize("epoch", [0, 3])
def test_other_records_at_the_same_offsets_are_noticed(
    src: Store, target: Path, epoch: int
) -> None:
    """With a new leader epoch by its number; within one epoch by the bytes of the last batch."""
    log = src.create_topic("orders")[0]
    for number in range(100):
        log.append(b"%d" % number)
    copied(src, target)
    log.truncate(37)
    log.become_leader(epoch)
    for number in range(37, 250):
        log.append(b"other %d" % number)
    with pytest.raises(DivergedError, match="same up to offset 37"):
        copied(src, target)
    assert copied(src, target, allow_truncate=True).truncated_records == 63
    assert same(src, target, "orders-0")


def test_a_cut_inside_of_a_batch_leaves_no_split_batch(src: Store, target: Path) -> None:
    log = src.create_topic("orders")[0]
    log.extend([b"a"] * 10)
    log.extend([b"b"] * 10)
    copied(src, target)
    log.truncate(15)  # the source rewrites the second batch
    log.append(b"c")
    with pytest.raises(DivergedError, match="same up to offset 10"):
        copied(src, target)
    assert copied(src, target, allow_truncate=True).truncated_records == 10
    assert same(src, target, "orders-0")


@pytest.mark.parametrize("allow", [False, True])
def test_a_cut_while_the_copy_runs_is_noticed(src: Store, target: Path, allow: bool) -> None:
    log = src.create_topic("orders")[0]
    for number in range(10):
        log.append(b"%d" % number)
    with Follow(src.path, target, allow_truncate=allow) as follow:
        follow.catch_up()
        log.truncate(5)
        for number in range(10):  # longer than before: the end alone shows nothing
            log.append(b"other %d" % number)
        if not allow:
            with pytest.raises(DivergedError, match="same up to offset 5"):
                follow.catch_up()
            return
        assert follow.catch_up().truncated_records == 5
    assert same(src, target, "orders-0")


def test_a_source_with_lower_epochs_only_is_noticed(src: Store, target: Path) -> None:
    log = src.create_topic("orders")[0]
    log.append(b"common")
    log.become_leader(8)
    log.append(b"of epoch 8")
    copied(src, target)
    log.truncate(1)
    # As if the directory was put back from an older copy: it has never heard of epoch 8.
    src.close()
    epochs = src.path / "orders-0" / "leader-epoch-checkpoint"
    epochs.write_text("0\n1\n0 0\n")
    with pytest.raises(DivergedError, match="same up to offset 1"):
        copied(src, target)
    copied(src, target, allow_truncate=True)
    assert same(src, target, "orders-0")


def test_a_topic_that_was_made_again_is_noticed_by_its_id(src: Store, target: Path) -> None:
    first = src.create_topic("orders", topic_id=uuid.UUID(int=1 << 64))
    first.append(b"x", partition=0)
    copied(src, target)
    src.delete_topic("orders")
    src.create_topic("orders", topic_id=uuid.UUID(int=2 << 64)).append(b"y", partition=0)
    with pytest.raises(DivergedError, match="AAAAAAAAAAIAAAAAAAAAAA there and AAAAAAAAAAEAAAA"):
        copied(src, target)
    copied(src, target, allow_truncate=True)
    assert same(src, target, "orders-0")


def test_records_that_another_writer_added_to_the_target_are_noticed(
    src: Store, target: Path
) -> None:
    log = src.create_topic("orders")[0]
    log.append(b"a")
    copied(src, target)
    with logstore.open(target) as copy:
        copy["orders"].append(b"foreign", partition=0)
    log.append(b"b")
    with pytest.raises(DivergedError, match="same up to offset 1"):
        copied(src, target)


# ---- retention ----


def test_retention_of_the_source_is_followed_only_with_trim(src: Store, target: Path) -> None:
    log = src.create_topic("orders")[0]
    for number in range(20):
        log.append(b"%d" % number)
    copied(src, target)
    log.trim(12)
    log.append(b"20")
    copied(src, target)
    with logstore.open(target, readonly=True) as copy:
        assert copy["orders"][0].start_offset == 0
    copied(src, target, trim=True)
    with logstore.open(target, readonly=True) as copy:
        assert (copy["orders"][0].start_offset, copy["orders"][0].end_offset) == (12, 21)
        assert values(copy["orders"][0]) == values(log)


def test_a_new_copy_begins_where_the_source_begins(src: Store, target: Path) -> None:
    log = src.create_topic("orders")[0]
    log.extend([b"a"] * 10)
    log.extend([b"b"] * 10)
    log.trim(13)  # inside of the second batch
    copied(src, target)
    with logstore.open(target, readonly=True) as copy:
        assert (copy["orders"][0].start_offset, copy["orders"][0].end_offset) == (13, 20)
        assert values(copy["orders"][0]) == values(log)


def test_records_deleted_before_they_were_copied_stop_the_copy(src: Store, target: Path) -> None:
    log = src.create_topic("orders")[0]
    log.extend([b"a"] * 10)
    copied(src, target)
    for number in range(20):
        log.append(b"%d" % number)
    log.trim(25)
    with pytest.raises(DivergedError, match="records 10 to 24 were deleted at the source"):
        copied(src, target)
    copied(src, target, trim=True)
    with logstore.open(target, readonly=True) as copy:
        assert (copy["orders"][0].start_offset, copy["orders"][0].end_offset) == (25, 30)
        assert values(copy["orders"][0]) == values(log)


# ---- damage ----


@pytest.mark.parametrize("byte", [0, 7, 9, 11, 17, 30, 65])
def test_a_damaged_batch_is_not_copied(src: Store, target: Path, byte: int) -> None:
    """Offset, length, checksum, header, records: the bytes of the fifth of ten batches."""
    log = src.create_topic("orders")[0]
    for number in range(10):
        log.append(b"%d" % number, durability="fsync")
    size = log.segments[0].size_bytes
    src.close()
    flip(src.path / "orders-0" / f"{0:020}.log", size // 2 + byte)
    with pytest.raises((CorruptLogError, DivergedError), match="orders-0"):
        copied(src, target)
    assert is_prefix(target / "orders-0", src.path / "orders-0")


# ---- running ----


def test_run_copies_until_it_is_stopped(src: Store, target: Path) -> None:
    log = src.create_topic("orders")[0]
    with Follow(src.path, target) as follow:
        seen: list[int] = []

        def tick() -> None:
            end = follow.status().partitions[0].end_offset
            seen.append(end)
            if end < 5:
                if end == log.end_offset:
                    log.append(b"next")
            else:
                follow.stop()

        assert follow.run(tick=tick).copied_records == 5
        assert seen == sorted(seen)
    assert same(src, target, "orders-0")


def test_a_copy_beside_a_writer_is_a_prefix_at_every_moment(src: Store, target: Path) -> None:
    topic = src.create_topic("orders", 2, config={"segment.bytes": 50_000})
    done = threading.Event()

    def write() -> None:
        for number in range(4000):
            topic.append(b"value %d" % number * 5, partition=number % 2)
            if number % 500 == 0:
                topic[number % 2].sync()
        done.set()

    writer = threading.Thread(target=write)
    with Follow(src.path, target) as follow:
        writer.start()

        def look() -> None:
            for number in range(2):
                name = f"orders-{number}"
                assert is_prefix(target / name, src.path / name)
            if done.is_set():
                follow.stop()

        try:
            follow.run(tick=look)
        finally:
            writer.join()
        with Follow(src.path, target.with_name("other")) as other:
            other.catch_up()
    copied(src, target)
    for number in range(2):
        assert same(src, target, f"orders-{number}")


def test_readers_see_the_copy_while_it_is_written(src: Store, target: Path) -> None:
    log = src.create_topic("orders")[0]
    log.append(b"a")
    with Follow(src.path, target) as follow:
        follow.catch_up()
        with logstore.open(target, readonly=True) as copy:
            assert values(copy["orders"][0]) == [b"a"]
            log.append(b"b")
            follow.catch_up()
            assert values(copy["orders"][0]) == [b"a", b"b"]


def test_many_partitions_share_the_steps(
    src: Store, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "FETCH_BYTES", 2000)
    topic = src.create_topic("orders", 30)
    for number in range(3000):
        topic.append(b"value %d" % number, partition=number % 30)
    assert copied(src, target).copied_records == 3000
    for number in range(30):
        assert same(src, target, f"orders-{number}")


# ---- the parts ----


def test_whole_batches_leaves_out_a_batch_that_is_cut_off(log: Partition) -> None:
    sizes = [len(each) for _ in range(3) for each in [_appended(log)]]
    data = memoryview(raw_log(log.path))
    assert whole_batches(data) == (sum(sizes), sum(sizes[:2]))
    assert whole_batches(data[:-1]) == (sum(sizes[:2]), sizes[0])
    assert whole_batches(data[: sizes[0] - 1]) == (0, 0)
    assert whole_batches(data, stop=log.end_offset - 1) == (sum(sizes[:2]), sizes[0])


def _appended(log: Partition) -> bytes:
    offset = log.extend([b"x" * 50, b"y"]).start
    return log.read_batches(offset)[0]


def test_a_copy_that_begins_above_the_end_of_its_source_is_noticed(
    src: Store, target: Path
) -> None:
    log = src.create_topic("orders")[0]
    log.extend([b"a"] * 10)
    log.trim(10)
    copied(src, target, trim=True)
    log.parts.cutter.restart_at(3)
    log.append(b"b")
    with pytest.raises(DivergedError, match="the source ends at 4, and the target begins at 10"):
        copied(src, target)
    copied(src, target, allow_truncate=True)
    with logstore.open(target, readonly=True) as copy:
        assert (copy["orders"][0].start_offset, values(copy["orders"][0])) == (3, [b"b"])
