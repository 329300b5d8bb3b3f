"""Follow with our listener as its source: a consumer that keeps offsets, epochs and bytes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import logstore
from logstore import DivergedError, Follow, KafkaServer, KafkaSource, Store
from logstore.replication.source import Place, Wanted
from tests.kit import committed, values, wait_until
from tests.replication.copies import is_prefix, raw_log

SERVE = """
import sys, time
import logstore

with logstore.open(sys.argv[1], durability="os") as store:
    topic = store.create_topic("orders", 2, exist_ok=True)
    with logstore.KafkaServer(store, "127.0.0.1:" + sys.argv[2]) as server:
        print(server.bootstrap_servers, flush=True)
        for number in range(10**6):
            topic.extend([b"record %d" % number] * 20, partition=number % 2)
            time.sleep(0.001)
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "copy"


@pytest.fixture
def source(server: KafkaServer) -> Callable[[], KafkaSource]:
    return lambda: KafkaSource(server.bootstrap_servers, refresh_seconds=0.05)


def copied(source: KafkaSource, target: Path, **options: bool) -> logstore.FollowStatus:
    with Follow(source, target, **options) as follow:
        return follow.catch_up()


def same(store: Store, target: Path, name: str) -> bool:
    return raw_log(store.path / name) == raw_log(target / name)


def test_a_copy_has_the_same_bytes_offsets_epochs_and_settings(
    store: Store, source: Callable[[], KafkaSource], target: Path
) -> None:
    topic = store.create_topic("orders", 3, config={"segment.bytes": 20_000, "retention.ms": 9})
    for number in range(600):
        if number == 300:
            topic[1].become_leader(7)
        topic.append(b"value %d" % number, partition=number % 3)
    status = copied(source(), target)
    assert (status.copied_records, status.lag_records) == (600, 0)
    for number in range(3):
        assert same(store, target, f"orders-{number}")
    with logstore.open(target, readonly=True) as copy:
        assert copy["orders"].id == topic.id
        assert copy["orders"].config.changed() == topic.config.changed()
        assert copy["orders"][1].leader_epochs == topic[1].leader_epochs


def test_transactions_are_copied_and_internal_topics_are_not(
    store: Store, source: Callable[[], KafkaSource], target: Path
) -> None:
    store.create_topic("orders")
    with logstore.Producer(store, transactional_id="t") as producer:
        with producer.transaction():
            producer.send("orders", b"kept", partition=0)
        with pytest.raises(ZeroDivisionError), producer.transaction():
            producer.send("orders", b"aborted", partition=0)
            producer.flush()
            raise ZeroDivisionError
    copied(source(), target)
    assert same(store, target, "orders-0")
    with logstore.open(target, readonly=True) as copy:
        assert list(copy) == ["orders"]
        assert committed(copy["orders"][0]) == [b"kept"]


def test_new_topics_and_partitions_are_picked_up(
    store: Store, source: Callable[[], KafkaSource], target: Path
) -> None:
    first = store.create_topic("first")
    with Follow(source(), target) as follow:
        follow.catch_up()
        first.add_partitions(1)
        first.append(b"x", partition=1)
        store.create_topic("second").append(b"y", partition=0)
        assert follow.catch_up().copied_records == 2
    assert same(store, target, "first-1")
    assert same(store, target, "second-0")


@pytest.mark.parametrize("epoch", [0, 3])
def test_another_history_is_noticed(
    store: Store, source: Callable[[], KafkaSource], target: Path, epoch: int
) -> None:
    log = store.create_topic("orders")[0]
    for number in range(50):
        log.append(b"%d" % number)
    copied(source(), target)
    log.truncate(20)
    log.become_leader(epoch)
    for number in range(100):
        log.append(b"other %d" % number)
    with pytest.raises(DivergedError, match="same up to offset 20"):
        copied(source(), target)
    assert copied(source(), target, allow_truncate=True).truncated_records == 30
    assert same(store, target, "orders-0")


def test_the_copy_is_cut_when_a_fetch_answers_with_a_diverging_epoch(
    store: Store, source: Callable[[], KafkaSource], target: Path
) -> None:
    log = store.create_topic("orders")[0]
    for number in range(10):
        log.append(b"%d" % number)
    with Follow(source(), target, allow_truncate=True) as follow:
        follow.catch_up()
        log.truncate(6)
        log.become_leader(4)
        for number in range(10):
            log.append(b"other %d" % number)
        wanted = Wanted(Place("orders", 0), 10, 0, 1 << 20)
        with_leader = KafkaSource(follow._source.name)
        try:
            (answer,) = with_leader.fetch([wanted], 0.0)
        finally:
            with_leader.close()
        assert answer.diverging == logstore.EpochEnd(0, 6)
        assert follow.catch_up().truncated_records == 4
    assert same(store, target, "orders-0")


def test_a_source_that_lost_an_epoch_is_noticed(
    store: Store, source: Callable[[], KafkaSource], target: Path
) -> None:
    log = store.create_topic("orders")[0]
    log.append(b"common")
    copied(source(), target)
    with logstore.open(target) as copy:  # the copy has an epoch that the source never had
        copy["orders"][0].become_leader(9)
        copy["orders"][0].append(b"of epoch 9")
    with pytest.raises(DivergedError, match="same up to offset 1"):
        copied(source(), target)
    copied(source(), target, allow_truncate=True)
    assert same(store, target, "orders-0")


def test_a_topic_that_was_made_again_is_noticed_by_its_id(
    store: Store, source: Callable[[], KafkaSource], target: Path
) -> None:
    store.create_topic("orders").append(b"x", partition=0)
    with Follow(source(), target) as follow:
        follow.catch_up()
        store.delete_topic("orders")
        store.create_topic("orders").append(b"y", partition=0)
        with pytest.raises(DivergedError, match="deleted and made again"):
            follow.run()
    copied(source(), target, allow_truncate=True)
    assert same(store, target, "orders-0")


def test_retention_is_followed_with_trim_only(
    store: Store, source: Callable[[], KafkaSource], target: Path
) -> None:
    log = store.create_topic("orders")[0]
    for number in range(10):
        log.append(b"%d" % number)
    log.trim(2)
    copied(source(), target)
    log.trim(6)
    copied(source(), target)

    def start() -> int:
        with logstore.open(target, readonly=True) as copy:
            return copy["orders"][0].start_offset

    assert start() == 2
    copied(source(), target, trim=True)
    assert start() == 6
    for number in range(10):
        log.append(b"%d" % number)
    log.trim(15)
    with pytest.raises(DivergedError, match="records 10 to 14 were deleted"):
        copied(source(), target)
    copied(source(), target, trim=True)
    assert start() == 15
    with logstore.open(target, readonly=True) as copy:
        assert values(copy["orders"][0]) == values(log)


def test_small_answers_and_large_batches_are_copied(
    store: Store, source: Callable[[], KafkaSource], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logstore.kafka.source.FETCH_BYTES", 3000)
    topic = store.create_topic("orders", 3)
    for number in range(300):
        topic.append(b"x" * (number * 17 % 2000), partition=number % 3)
    topic.append(b"y" * 100_000, partition=1)
    copied(source(), target)
    for number in range(3):
        assert same(store, target, f"orders-{number}")


def test_a_listener_that_is_started_after_the_copy_is_waited_for(
    store: Store, target: Path
) -> None:
    store.create_topic("orders")[0].append(b"a")
    with KafkaServer(store) as first:
        host, port = first.address
    with Follow(KafkaSource(f"{host}:{port}"), target) as follow:
        ended = threading.Thread(target=follow.run)
        ended.start()
        try:
            wait_until(lambda: follow.status().unreachable_seconds > 0)
            with KafkaServer(store, f"{host}:{port}"):
                wait_until(lambda: follow.status().copied_records == 1)
        finally:
            follow.stop()
            ended.join()


def test_a_listener_that_closes_and_comes_back_costs_only_time(
    tmp_path: Path, store: Store, target: Path
) -> None:
    log = store.create_topic("orders")[0]
    log.append(b"a")
    first = KafkaServer(store).start()
    host, port = first.address
    with Follow(KafkaSource(f"{host}:{port}"), target) as follow:
        follow.catch_up()
        first.close()
        ended = threading.Thread(target=follow.run)
        ended.start()
        try:
            wait_until(lambda: follow.status().unreachable_seconds > 0)
            log.append(b"b")
            with KafkaServer(store, f"{host}:{port}"):
                wait_until(lambda: follow.status().partitions[0].end_offset == 2)
                assert follow.status().unreachable_seconds == 0
        finally:
            follow.stop()
            ended.join()


def served(path: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, path, str(port)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    return process, process.stdout.readline().decode().strip()


def killed(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        killed(process)


def test_kills_of_the_listener_cost_only_time(
    tmp_path: Path, running: list[subprocess.Popen[bytes]], target: Path
) -> None:
    src = tmp_path / "src"
    process, address = served(src, 0)
    running.append(process)
    port = int(address.rpartition(":")[2])
    with Follow(KafkaSource(address, refresh_seconds=0.2), target) as follow:
        thread = threading.Thread(target=follow.run)
        thread.start()
        try:
            for _ in range(3):
                before = sum(each.end_offset for each in follow.status().partitions)

                def moved(before: int = before) -> bool:
                    rows = follow.status().partitions
                    return len(rows) == 2 and sum(each.end_offset for each in rows) > before

                wait_until(moved)
                killed(running[-1])
                for number in range(2):
                    name = f"orders-{number}"
                    assert is_prefix(target / name, src / name)
                running.append(served(src, port)[0])
            assert thread.is_alive()
        finally:
            follow.stop()
            thread.join()
