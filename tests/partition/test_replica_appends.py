"""What a leader and a follower may append: conditions on the epoch and on the end of the log."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from logstore import ConfigError, ConflictError, FencedError, NotLeaderError, Partition
from logstore.format.batch import BatchHeader
from logstore.log.epochs import EpochEnd
from logstore.testing import ReferenceRecord, encode_batch
from tests.conftest import MakeLog
from tests.kit import crash, join, values

NOW = 1_700_000_000_000


def batch(*values: bytes, **options: Any) -> bytes:
    return encode_batch([ReferenceRecord(value, timestamp=NOW) for value in values], **options)


# ---- a leader ----


def test_a_leader_appends_in_the_epoch_that_it_has_begun(log: Partition) -> None:
    appender = log.parts.appender
    assert log.parts.active.begin_epoch(3) == 0
    done = appender.append_batch(batch(b"a"), leader_epoch=3, durability="os")
    assert done.offsets == range(1)
    assert BatchHeader.parse(log.read_batches(0)[0]).leader_epoch == 3
    log.parts.active.begin_epoch(5)
    for stale in (3, 4, 6):
        with pytest.raises(NotLeaderError) as caught:
            appender.append_batch(batch(b"b"), leader_epoch=stale, durability="os")
        assert (caught.value.partition, caught.value.epoch) == ("orders-0", 5)
        assert caught.value.asked == stale and caught.value.leader is None
        with pytest.raises(NotLeaderError):
            appender.end_transaction(1, 0, commit=True, leader_epoch=stale)
    assert log.end_offset == 1


def test_a_leader_is_deposed_by_a_record_of_a_higher_epoch(log: Partition) -> None:
    log.parts.active.begin_epoch(3)
    log.append_batch(batch(b"a", leader_epoch=7), origin="follower")
    with pytest.raises(NotLeaderError):
        log.parts.appender.append_batch(batch(b"b"), leader_epoch=3)
    with pytest.raises(FencedError):
        log.parts.active.begin_epoch(6)


def test_an_epoch_without_a_record_outlives_a_crash(make_log: MakeLog, tmp_path: Path) -> None:
    log = make_log()
    log.append(b"a")
    assert log.parts.active.begin_epoch(9) == 1
    with Partition.open(crash(log, tmp_path / "crashed-0")) as again:
        assert again.leader_epoch == 9
        with pytest.raises(FencedError):
            again.parts.active.begin_epoch(8)


def test_a_client_without_a_thread_gets_the_same_refusal(log: Partition) -> None:
    log.parts.active.begin_epoch(2)
    with pytest.raises(NotLeaderError):
        log.parts.appender.append_batch(batch(b"a"), leader_epoch=1, durability="os", wait=False)
    done = log.parts.appender.append_batch(batch(b"a"), leader_epoch=2, durability="os", wait=False)
    assert done.offsets == range(1)


# ---- a follower ----


def test_a_follower_appends_at_the_end_that_it_asked_for(log: Partition) -> None:
    appender = log.parts.appender
    copied = batch(b"a", b"b", leader_epoch=4)
    done = appender.append_batch(copied, origin="follower", expect_end=0, durability="os")
    assert done.offsets == range(2)
    later = batch(b"c", base_offset=2, leader_epoch=4)
    for wrong in (0, 1, 3):
        with pytest.raises(ConflictError) as caught:
            appender.append_batch(later, origin="follower", expect_end=wrong)
        assert (caught.value.expected, caught.value.actual) == (wrong, 2)
    assert log.end_offset == 2
    appender.append_batch(later, origin="follower", expect_end=2)
    assert log.read_batches(0) == [copied, later]


def test_an_answer_may_begin_after_a_gap_but_only_at_its_own_question(log: Partition) -> None:
    appender = log.parts.appender
    appender.append_batch(batch(b"a", leader_epoch=4), origin="follower", expect_end=0)
    gap = batch(b"z", base_offset=20, leader_epoch=4)
    with pytest.raises(ConflictError):
        appender.append_batch(gap, origin="follower", expect_end=20)
    assert appender.append_batch(gap, origin="follower", expect_end=1).offsets == range(20, 21)
    assert values(log) == [b"a", b"z"]


def test_each_condition_is_for_one_side(log: Partition) -> None:
    for options in ({"leader_epoch": 0, "origin": "follower"}, {"expect_end": 0}):
        with pytest.raises(ConfigError, match="expect_end for a follower"):
            log.parts.appender.append_batch(batch(b"a", leader_epoch=0), **options)


# ---- epochs without the lock ----


def test_the_epoch_of_the_last_record(log: Partition) -> None:
    active = log.parts.active
    assert active.last_record_epoch() is None
    active.begin_epoch(2)
    assert active.last_record_epoch() is None
    log.append(b"a")
    active.begin_epoch(5)
    assert active.last_record_epoch() == 2
    log.append(b"b")
    assert active.last_record_epoch() == 5
    log.truncate(1)
    assert active.last_record_epoch() == 2
    log.trim(1)
    assert active.last_record_epoch() is None


def test_epochs_are_looked_up_while_another_thread_has_the_lock(log: Partition) -> None:
    log.append(b"a")
    log.become_leader(3)
    log.append(b"b")
    found: list[object] = []

    def look() -> None:
        active = log.parts.active
        found.extend([active.end_offset_for_epoch(0), active.last_record_epoch()])
        found.append(log.leader_epochs.entries)

    with log.parts.view.lock:
        thread = threading.Thread(target=look)
        thread.start()
        join([thread])
    assert found == [EpochEnd(0, 1), 3, [(0, 0), (3, 1)]]


def test_an_answer_about_an_epoch_never_reaches_into_the_next(log: Partition) -> None:
    """Epoch n has the offsets [2n, 2n + 2): a look at any moment says so, or that it has not ended.

    The end of the latest epoch is the end of the log at that moment.
    """
    rounds, wrong = 400, []
    done = threading.Event()

    def look() -> None:
        active = log.parts.active
        while not done.is_set():
            for epoch in range(max(0, log.leader_epoch - 1), log.leader_epoch + 1):
                found = active.end_offset_for_epoch(epoch)
                if found is not None and not 2 * epoch <= found.end_offset <= 2 * epoch + 2:
                    wrong.append((epoch, found))

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for epoch in range(rounds):
        log.parts.active.begin_epoch(epoch)
        log.append(b"x")
        log.append(b"y")
    done.set()
    join(threads)
    assert not wrong
