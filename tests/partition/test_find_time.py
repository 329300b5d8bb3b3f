"""find_time and latest_time: a record by its time, with its timestamp and leader epoch."""

from __future__ import annotations

import random
from typing import Any

import pytest

from logstore import ConfigError, Partition
from logstore.partition.reader import TimedOffset
from logstore.testing import ReferenceRecord, encode_batch
from tests.conftest import MakeLog


def find(log: Partition, when: int, **options: Any) -> TimedOffset | None:
    return log.parts.reader.find_time(when, **options)


def latest(log: Partition, **options: Any) -> TimedOffset | None:
    return log.parts.reader.latest_time(**options)


def test_the_record_that_a_scan_finds(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=2000, index_interval_bytes=200)
    rng = random.Random(5)
    for n in range(300):
        log.append(b"x" * rng.randrange(50), timestamp=n * 10 + rng.randrange(-200, 200) + 200)
    assert len(log.segments) > 5
    records = list(log.scan())
    for when in (0, 1, *rng.sample(range(4000), 100)):
        expected = next((each for each in records if each.timestamp >= when), None)
        found = find(log, when)
        if expected is None:
            assert found is None
        else:
            assert found == (expected.offset, expected.timestamp, 0)
    newest = max(records, key=lambda each: (each.timestamp, -each.offset))
    assert latest(log) == (newest.offset, newest.timestamp, 0)
    log.trim(150)
    assert find(log, 0) == (150, records[150].timestamp, 0)


def test_nothing_to_find(make_log: MakeLog) -> None:
    log = make_log()
    assert find(log, 0) is None
    assert latest(log) is None
    log.append(b"a", timestamp=5)
    assert find(log, 6) is None
    assert find(log, 1 << 70) is None
    assert find(log, -(1 << 70)) == (0, 5, 0)
    with pytest.raises(ConfigError):
        find(log, 0, isolation="dirty")


def test_the_first_of_equal_times_and_the_epoch_of_its_batch(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"a", timestamp=5)
    log.become_leader(3)
    log.extend([])
    log.append(b"b", timestamp=9)
    log.become_leader(4)
    log.append(b"c", timestamp=9)
    assert latest(log) == TimedOffset(offset=1, timestamp=9, leader_epoch=3)
    assert find(log, 5) == (0, 5, 0)


def test_records_of_an_open_transaction_are_not_found(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"a", timestamp=5)
    raw = encode_batch(
        [ReferenceRecord(b"b", timestamp=9)],
        producer_id=7, producer_epoch=0, base_sequence=0, transactional=True,
    )  # fmt: skip
    log.append_batch(raw)
    committed = {"isolation": "read_committed"}
    assert (find(log, 6), latest(log)) == ((1, 9, 0), (1, 9, 0))
    assert (find(log, 6, **committed), latest(log, **committed)) == (None, None)
    assert find(log, 5, **committed) == (0, 5, 0)
    log.end_transaction(7, 0, commit=True)
    assert find(log, 6, **committed) == (1, 9, 0)


@pytest.mark.parametrize("readonly", [False, True])
def test_a_log_that_was_opened_again(make_log: MakeLog, readonly: bool) -> None:
    log = make_log(segment_bytes=2000)
    for n in range(100):
        log.append(b"x" * 50, timestamp=n)
    log.close()
    with Partition.open(log.path, readonly=readonly) as again:
        assert find(again, 42) == (42, 42, 0)
        assert latest(again) == (99, 99, 0)
