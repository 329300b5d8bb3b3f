"""Idempotence and transactions as a Partition keeps them: appended, rolled, cut, crashed, reopened.

`Producing` is one producer; its batches are made by the reference codec, as a client would.
"""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import (
    ConflictError,
    CorruptLogError,
    FencedError,
    IndeterminateAppendError,
    InvalidRecordError,
    OutOfOrderSequenceError,
    Partition,
    RecordTooLargeError,
    UnsupportedFormatError,
    repair,
)
from logstore.clock import ManualClock
from logstore.config import ConfigError
from logstore.format.batch import BatchHeader, EndMarker, split, with_header
from logstore.format.validation import AppendedBatches
from logstore.log.segment import Segment
from logstore.partition.reader import Reader
from logstore.testing import ReferenceRecord, check_invariants, decode_batch, encode_batch
from tests.kit import crash, values

MakeLog = Callable[..., Partition]
NOW = 1_700_000_000_000


def failing(number: int, text: str) -> Callable[..., None]:
    """Return a function that raises this OSError."""

    def fail(*_: object) -> None:
        raise OSError(number, text)

    return fail


def batch(*values: bytes, **options: Any) -> bytes:
    return encode_batch([ReferenceRecord(value, timestamp=NOW) for value in values], **options)


class Producing:
    """A producer that counts its sequences."""

    def __init__(self, log: Partition, producer_id: int, *, epoch: int = 0) -> None:
        self.log = log
        self.producer_id = producer_id
        self.epoch = epoch
        self.sequence = 0
        self.sent: list[bytes] = []

    def raw(self, *values: bytes, transactional: bool = False) -> bytes:
        return batch(
            *values,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=self.sequence,
            transactional=transactional,
        )

    def send(self, *values: bytes, transactional: bool = False) -> range:
        raw = self.raw(*values, transactional=transactional)
        done = self.log.append_batch(raw, verify_transaction=False)  # markers as the test wants
        assert not done.duplicate
        self.sent.append(raw)
        self.sequence += len(values)
        return done.offsets

    def transact(self, *values: bytes) -> range:
        return self.send(*values, transactional=True)

    def end(self, *, commit: bool) -> int:
        return self.log.end_transaction(self.producer_id, self.epoch, commit=commit)


def committed(log: Partition) -> list[bytes | None]:
    """What a committed reader sees, by every way of reading."""
    scan = log.scan(isolation="read_committed")
    seen = values(scan)
    table = log.scan(isolation="read_committed").to_arrow()
    assert table.column("value").to_pylist() == seen
    by_columns = [v for chunk in scan.columns(2, fields=["value"]) for v in chunk.values]
    assert by_columns == seen
    if seen:
        assert values(log.tail(len(seen), isolation="read_committed")) == seen
    raw = [decode_batch(raw) for raw in scan.batches()]
    offsets = range(log.start_offset, log.last_stable_offset)
    assert [r.value for b in raw if not b.control for r in b.records if r.offset in offsets] == seen
    return seen


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
def make_log(make_log: MakeLog, clock: ManualClock) -> MakeLog:
    """Logs whose clock shows the time of the batches."""
    return functools.partial(make_log, clock=clock)


# ---- raw batches ----


def test_a_batch_gets_its_place_and_keeps_the_rest(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"before")
    raw = batch(b"a", b"b", leader_epoch=-1, producer_id=5, producer_epoch=1, base_sequence=9)
    assert log.append_batch(raw) == AppendedBatches(range(1, 3), -1, False)
    stored = log.read_batches(1)[0]
    assert stored[:8] == (1).to_bytes(8, "big")
    assert stored[12:16] == bytes(4)
    assert stored[16:] == raw[16:]
    assert values(log) == [b"before", b"a", b"b"]
    check_invariants(log)


def test_batches_without_a_producer_may_come_together(make_log: MakeLog) -> None:
    log = make_log()
    assert log.append_batch(batch(b"a") + batch(b"b", b"c")).offsets == range(0, 3)
    assert values(log) == [b"a", b"b", b"c"]
    check_invariants(log)


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches_are_kept_as_they_are(make_log: MakeLog, codec: str) -> None:
    from logstore.format import codecs

    log = make_log()
    raw = batch(b"a" * 100, b"b" * 100, codec=codecs.CODECS[codec])
    log.append_batch(raw)
    assert log.read_batches(0)[0][16:] == raw[16:]
    assert values(log) == [b"a" * 100, b"b" * 100]


@pytest.mark.parametrize("wanted", ["none", "uncompressed", "zstd"])
def test_the_topic_decides_the_compression(make_log: MakeLog, wanted: str) -> None:
    log = make_log(compression_type=wanted)
    raw = batch(b"a" * 100, producer_id=3, producer_epoch=0, base_sequence=0, codec=1)
    log.append_batch(raw)
    (stored,) = log.read_batches(0)
    assert BatchHeader.parse(stored).codec == (4 if wanted == "zstd" else 0)
    assert decode_batch(stored).records[0].value == b"a" * 100
    assert log.append_batch(raw).duplicate
    check_invariants(log)


def test_log_append_time_is_the_logs(make_log: MakeLog, clock: ManualClock) -> None:
    log = make_log(clock=clock, message_timestamp_type="LogAppendTime")
    raw = batch(b"a", producer_id=3, producer_epoch=0, base_sequence=0)
    assert log.append_batch(raw) == (range(0, 1), NOW, False)
    clock.advance(1000)
    assert log.append_batch(raw) == (range(0, 1), NOW, True)
    decoded = decode_batch(log.read_batches(0)[0])
    assert (decoded.log_append_time, decoded.max_timestamp) == (True, NOW)


def test_a_wrong_greatest_time_is_put_right(make_log: MakeLog) -> None:
    log = make_log()
    log.append_batch(batch(b"a", max_timestamp=NOW + 5))
    assert decode_batch(log.read_batches(0)[0]).max_timestamp == NOW


def change(raw: bytes, **fields: int) -> bytes:
    """The batch with other header fields, and a checksum that is right for them."""
    return with_header(BatchHeader.parse(raw)._replace(**fields), raw[61:])


def flipped(raw: bytes) -> bytes:
    return raw[:-1] + bytes((raw[-1] ^ 1,))


GOOD = batch(b"a", b"b")
REFUSED: dict[str, tuple[bytes, type[Exception]]] = {
    "nothing": (b"", InvalidRecordError),
    "torn": (GOOD[:-1], InvalidRecordError),
    "a flipped bit": (flipped(GOOD), InvalidRecordError),
    "format 1": (GOOD[:16] + b"\1" + GOOD[17:], UnsupportedFormatError),
    "a control batch": (
        EndMarker(True, 0).encode(producer_id=1, producer_epoch=0, timestamp=NOW),
        InvalidRecordError,
    ),
    "too few records": (change(GOOD, record_count=1), InvalidRecordError),
    "too many records": (change(GOOD, record_count=3, last_offset_delta=2), InvalidRecordError),
    "no records": (change(GOOD, record_count=0), InvalidRecordError),
    "a gap": (change(GOOD, last_offset_delta=2), InvalidRecordError),
    "bytes behind the records": (with_header(BatchHeader.parse(GOOD), GOOD[61:] + b"\0"),
                                 InvalidRecordError),
    "a producer without a sequence": (change(GOOD, producer_id=1, producer_epoch=0),
                                      InvalidRecordError),
    "a producer without an epoch": (change(GOOD, producer_id=1, base_sequence=0),
                                    InvalidRecordError),
    "a transaction of nobody": (change(GOOD, attributes=0x10), InvalidRecordError),
    "LogAppendTime": (change(GOOD, attributes=0x08), InvalidRecordError),
    "a delete horizon": (change(GOOD, attributes=0x40), InvalidRecordError),
    "an unknown codec": (change(GOOD, attributes=5), UnsupportedFormatError),
    "no gzip": (change(GOOD, attributes=1), InvalidRecordError),
    "two batches of a producer": (
        batch(b"a", producer_id=1, producer_epoch=0, base_sequence=0)
        + batch(b"b", producer_id=1, producer_epoch=0, base_sequence=1),
        InvalidRecordError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_client_may_not_append_leaves_no_trace(make_log: MakeLog, what: str) -> None:
    raw, error = REFUSED[what]
    log = make_log()
    log.append(b"before")
    with pytest.raises(error):
        log.append_batch(raw)
    assert log.end_offset == 1
    log.append(b"after")
    assert values(log) == [b"before", b"after"]
    check_invariants(log)


def test_limits_hold_for_raw_batches(make_log: MakeLog, clock: ManualClock) -> None:
    log = make_log(
        clock=clock,
        max_message_bytes=200,
        message_timestamp_before_max_ms=1000,
        message_timestamp_after_max_ms=1000,
        cleanup_policy="compact",
    )
    with pytest.raises(RecordTooLargeError):
        log.append_batch(batch(b"a" * 200))
    with pytest.raises(InvalidRecordError, match="without a key"):
        log.append_batch(batch(b"a"))
    for time in (NOW - 1001, NOW + 1001):
        with pytest.raises(InvalidRecordError, match=r"max\.ms"):
            log.append_batch(encode_batch([ReferenceRecord(b"v", b"k", timestamp=time)]))
    log.append_batch(encode_batch([ReferenceRecord(b"v", b"k", timestamp=NOW - 1000)]))


def test_an_origin_that_is_none_is_refused(make_log: MakeLog) -> None:
    with pytest.raises(ConfigError, match="origin"):
        make_log().append_batch(GOOD, origin="client")


# ---- as a follower ----


def test_a_follower_keeps_every_byte(make_log: MakeLog) -> None:
    leader = make_log("leader-0")
    producer = Producing(leader, 1)
    producer.transact(b"a", b"b")
    leader.append(b"plain")
    producer.end(commit=False)
    producer.send(b"c")
    raw = b"".join(leader.read_batches(0))
    follower = make_log("follower-0")
    assert follower.append_batch(raw, origin="follower").offsets == range(0, 5)
    assert b"".join(follower.read_batches(0)) == raw
    assert committed(follower) == committed(leader) == [b"plain", b"c"]
    assert list(follower.aborted_transactions()) == list(leader.aborted_transactions())
    assert follower.append_batch(producer.sent[-1]).duplicate
    check_invariants(follower)


def test_a_follower_takes_gaps_and_survives_them(make_log: MakeLog, tmp_path: Path) -> None:
    log = make_log(segment_bytes=1024)
    log.append(b"before")
    following = log.scan(follow=True, timeout=0.0)
    assert values(following) == [b"before"]
    for offset in (5, 9, 10):
        log.append_batch(batch(b"x%d" % offset, base_offset=offset), origin="follower")
    log.append_batch(batch(b"y", base_offset=20) + batch(b"z", base_offset=30), origin="follower")
    wanted = [b"before", b"x5", b"x9", b"x10", b"y", b"z"]
    assert values(log) == values(log.scan(follow=True, timeout=0.0)) == wanted
    assert log.end_offset == 31
    with Partition.open(crash(log, tmp_path / "orders-1"), durability="os") as again:
        assert values(again) == wanted
        assert not again.recovery.damage
        check_invariants(again)
    log.close()
    with make_log() as again:
        assert values(again) == wanted
        assert again.append(b"after") == 31


def test_a_scan_under_way_goes_on_over_a_gap(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"a")
    records = iter(log.scan(follow=True, timeout=0.0))
    assert next(records).value == b"a"
    log.append_batch(batch(b"b", base_offset=7), origin="follower")
    assert values(records) == [b"b"]


def test_a_follower_learns_its_leaders_epochs(make_log: MakeLog) -> None:
    log = make_log()
    raw = batch(b"a") + batch(b"b", base_offset=1, leader_epoch=3)
    log.append_batch(raw + batch(b"c", base_offset=2, leader_epoch=3), origin="follower")
    assert log.leader_epochs.entries == [(0, 0), (3, 1)]
    assert log.leader_epoch == 3
    log.append_batch(batch(b"d", leader_epoch=-1))
    assert BatchHeader.parse(log.read_batches(3)[0]).leader_epoch == 3
    with pytest.raises(InvalidRecordError, match="leader epoch"):
        log.append_batch(batch(b"e", base_offset=4, leader_epoch=-1), origin="follower")


def test_an_empty_follower_may_start_behind_a_gap(make_log: MakeLog) -> None:
    log = make_log()
    log.append_batch(batch(b"a", base_offset=100), origin="follower")
    assert values(log) == [b"a"]
    log.close()
    assert values(make_log()) == [b"a"]


def test_a_copy_that_goes_back_is_a_conflict(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([b"a", b"b"])
    with pytest.raises(ConflictError) as error:
        log.append_batch(batch(b"c", base_offset=1), origin="follower")
    assert (error.value.expected, error.value.actual) == (1, 2)
    with pytest.raises(InvalidRecordError, match="after one"):
        log.append_batch(batch(b"c", base_offset=3) + batch(b"d", base_offset=3), origin="follower")
    assert log.append_batch(b"", origin="follower").offsets == range(2, 2)


# ---- expecting an offset ----


def test_appending_where_one_expects_it(make_log: MakeLog) -> None:
    log = make_log()
    assert log.append(b"a", expect_offset=0) == 0
    assert log.extend([b"b", b"c"], expect_offset=1) == range(1, 3)
    for attempt in (
        lambda: log.append(b"x", expect_offset=2),
        lambda: log.extend([b"x"], expect_offset=4),
    ):
        with pytest.raises(ConflictError) as error:
            attempt()
        assert error.value.actual == 3
        assert "orders-0 ends at offset 3" in str(error.value)
    assert values(log) == [b"a", b"b", b"c"]
    assert log.append(b"d") == 3
    assert values(log)[-1] == b"d"


def test_of_many_who_expect_the_same_offset_one_wins(make_log: MakeLog) -> None:
    log = make_log()
    won: list[int] = []
    lost: list[int] = []
    start = threading.Barrier(4)

    def race(number: int) -> None:
        start.wait()
        for _ in range(50):
            end = log.end_offset
            try:
                won.append(log.append(b"%d" % number, expect_offset=end))
            except ConflictError as error:
                lost.append(error.actual - error.expected)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(log.end_offset))
    assert len(won) + len(lost) == 200
    assert all(by > 0 for by in lost)


# ---- idempotence ----


def test_a_retry_is_answered_with_its_offsets_and_not_appended(make_log: MakeLog) -> None:
    log = make_log()
    one, two = Producing(log, 1), Producing(log, 2)
    spans = [one.send(b"a", b"b"), two.send(b"c"), one.send(b"d")]
    log.append(b"plain")
    assert log.append_batch(one.sent[0]) == (spans[0], NOW, True)
    assert log.append_batch(two.sent[0]) == (spans[1], NOW, True)
    assert log.append_batch(one.sent[1]) == (spans[2], NOW, True)
    assert log.end_offset == 5
    with pytest.raises(OutOfOrderSequenceError):
        log.append_batch(batch(b"x", producer_id=1, producer_epoch=0, base_sequence=4))
    check_invariants(log)


@pytest.mark.parametrize("how", ["close", "crash", "rolled", "no snapshots"])
def test_a_retry_is_recognised_after_reopening(
    make_log: MakeLog, tmp_path: Path, clock: ManualClock, how: str
) -> None:
    log = make_log(segment_bytes=1024, clock=clock)
    producer = Producing(log, 1)
    for number in range(8 if how == "rolled" else 3):
        log.append(b"x" * 100)
        last = producer.send(b"v%d" % number * 50)
    path = crash(log, tmp_path / "crashed" / "orders-0")
    if how in ("close", "no snapshots"):
        log.close()
        path = log.path
    if how == "no snapshots":
        for snapshot in path.glob("*.snapshot"):
            snapshot.unlink()
    with Partition.open(
        path, durability="os", clock=clock, config={"segment.bytes": 1024}
    ) as again:
        assert again.append_batch(producer.sent[-1]) == (last, NOW, True)
        producer.log = again
        producer.send(b"goes on")
        check_invariants(again)


def test_producers_are_forgotten_in_time(make_log: MakeLog, clock: ManualClock) -> None:
    log = make_log(clock=clock, producer_id_expiration_ms=10_000_000)
    producer = Producing(log, 1)
    producer.send(b"a")
    clock.advance(9_999_999)
    assert log.append_batch(producer.sent[0]).duplicate
    clock.advance(700_000)
    assert not log.append_batch(producer.sent[0]).duplicate


def test_a_fenced_producer_appends_nothing(make_log: MakeLog) -> None:
    log = make_log()
    old, new = Producing(log, 1), Producing(log, 1, epoch=1)
    old.transact(b"lost")
    log.end_transaction(1, 1, commit=False)
    new.transact(b"kept")
    with pytest.raises(FencedError):
        old.transact(b"zombie")
    with pytest.raises(FencedError):
        log.end_transaction(1, 0, commit=True)
    new.end(commit=True)
    assert committed(log) == [b"kept"]


# ---- transactions ----


def test_committed_readers_see_whole_committed_transactions_only(make_log: MakeLog) -> None:
    log = make_log()
    one, two = Producing(log, 1), Producing(log, 2)
    log.append(b"plain 1")
    one.transact(b"one", b"one too")
    assert (log.last_stable_offset, committed(log)) == (1, [b"plain 1"])
    two.transact(b"two")
    log.append(b"plain 2")
    two.end(commit=False)
    assert (log.last_stable_offset, committed(log)) == (1, [b"plain 1"])
    one.end(commit=True)
    assert log.last_stable_offset == log.end_offset == log.high_watermark
    assert committed(log) == [b"plain 1", b"one", b"one too", b"plain 2"]
    assert values(log) == [b"plain 1", b"one", b"one too", b"two", b"plain 2"]
    check_invariants(log)


def test_one_producer_may_commit_and_abort_in_turn(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    producer = Producing(log, 9)
    for number in range(20):
        producer.transact(b"t%d" % number, b"x" * 50)
        producer.end(commit=number % 3 != 0)
    wanted = [b"t%d" % n for n in range(20) if n % 3]
    assert [v for v in committed(log) if v != b"x" * 50] == wanted
    assert len(log.aborted_transactions()) == 7
    assert len(log.segments) > 2
    check_invariants(log)


def test_transactions_that_nobody_ended_can_be_found_and_aborted(
    make_log: MakeLog, clock: ManualClock
) -> None:
    log = make_log(clock=clock)
    Producing(log, 4, epoch=3).transact(b"abandoned")
    log.append(b"waits")
    assert log.ongoing_transactions == [(4, 3, 0, NOW)]
    (abandoned,) = log.ongoing_transactions
    log.end_transaction(abandoned.producer_id, abandoned.producer_epoch + 1, commit=False)
    assert log.ongoing_transactions == []
    assert committed(log) == [b"waits"]


def test_only_a_coordinator_of_the_newest_epoch_ends_transactions(make_log: MakeLog) -> None:
    log = make_log()
    Producing(log, 4).transact(b"a")
    log.end_transaction(4, 0, commit=True, coordinator_epoch=5)
    with pytest.raises(FencedError):
        log.end_transaction(4, 0, commit=True, coordinator_epoch=4)
    with pytest.raises(InvalidRecordError):
        log.end_transaction(-1, 0, commit=True)


def test_a_follower_of_the_log_wakes_when_a_transaction_ends(make_log: MakeLog) -> None:
    log = make_log()
    producer = Producing(log, 1)
    seen: list[bytes | None] = []
    got = threading.Event()

    def follow() -> None:
        for record in log.scan(isolation="read_committed", follow=True, max_records=3):
            seen.append(record.value)
            got.set()

    thread = threading.Thread(target=follow)
    thread.start()
    log.append(b"plain")
    assert got.wait(60)
    producer.transact(b"aborted")
    producer.end(commit=False)
    producer.transact(b"committed")
    assert seen == [b"plain"]
    log.append(b"behind")
    assert seen == [b"plain"]
    producer.end(commit=True)
    thread.join(60)
    assert seen == [b"plain", b"committed", b"behind"]


def test_following_over_rolls_sees_each_committed_record_once(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    producer = Producing(log, 1)
    records = iter(log.scan(isolation="read_committed", follow=True, timeout=0.0))
    scan = log.scan(isolation="read_committed", follow=True, timeout=0.0)
    seen: list[bytes | None] = []
    wanted: list[bytes | None] = []
    for number in range(12):
        producer.transact(b"%d" % number * 60, b"%d" % -number * 60)
        producer.end(commit=number % 2 == 0)
        if number % 2 == 0:
            wanted += [b"%d" % number * 60, b"%d" % -number * 60]
        rest = log.scan(scan.next_offset, isolation="read_committed", follow=True, timeout=0.0)
        seen += values(rest)
        scan = rest
    assert seen == wanted == values(records)
    assert len(log.segments) > 3


def test_raw_batches_for_consumers_end_at_the_last_stable_offset(make_log: MakeLog) -> None:
    log = make_log()
    producer = Producing(log, 1)
    producer.transact(b"aborted")
    producer.end(commit=False)
    log.append(b"plain")
    producer.transact(b"open")
    offsets = [BatchHeader.parse(raw).base_offset
               for raw in log.read_batches(0, isolation="read_committed")]  # fmt: skip
    assert offsets == [0, 1, 2]
    assert log.aborted_transactions(0, 3) == [(1, 0, 1, 2)]
    assert log.aborted_transactions(2) == []


# ---- files ----


def names(log: Partition, suffix: str) -> list[int]:
    return sorted(int(path.stem) for path in log.path.glob(f"*{suffix}"))


def test_the_files_are_kafkas(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    producer = Producing(log, 1)
    producer.transact(b"x" * 300)  # 0
    producer.end(commit=True)  # 1
    log.roll()
    assert names(log, ".snapshot") == [2]
    assert names(log, ".txnindex") == []
    producer.transact(b"y" * 300)  # 2
    log.roll()
    producer.end(commit=False)  # 3, in the next segment
    assert names(log, ".txnindex") == [3]
    log.close()
    assert names(log, ".snapshot") == [2, 3, 4]
    with make_log() as again:
        assert names(again, ".snapshot") == [2, 3, 4]
        again.append(b"z")
    assert names(again, ".snapshot") == [2, 3, 5]


def test_trimming_takes_a_segments_files_along(make_log: MakeLog) -> None:
    log = make_log()
    producer = Producing(log, 1)
    for _ in range(3):
        producer.transact(b"x")
        producer.end(commit=False)
        log.roll()
    assert names(log, ".txnindex") == [0, 2, 4]
    log.trim(4)
    assert names(log, ".txnindex") == [4]
    assert names(log, ".snapshot") == [4, 6]
    assert log.aborted_transactions() == [(1, 4, 5, 6)]
    assert log.append_batch(producer.sent[-1]).duplicate
    check_invariants(log)


def test_a_log_with_an_open_transaction_is_stable_from_its_start_at_least(
    make_log: MakeLog,
) -> None:
    log = make_log()
    Producing(log, 1).transact(b"a", b"b", b"c")
    log.extend([b"d", b"e"])
    log.trim(4)
    assert log.last_stable_offset == 4
    assert committed(log) == []
    log.end_transaction(1, 0, commit=False)
    assert committed(log) == [b"e"]


@pytest.mark.parametrize("cut", range(8))
def test_truncating_gives_the_state_of_that_moment(make_log: MakeLog, cut: int) -> None:
    log = make_log()
    one, two = Producing(log, 1), Producing(log, 2)
    one.transact(b"0")
    two.transact(b"1")
    log.roll()
    one.end(commit=False)  # 2
    one.transact(b"3")
    log.roll()
    two.end(commit=True)  # 4
    two.transact(b"5")
    two.end(commit=False)  # 6
    log.truncate(cut)
    stable = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 3, 6: 3, 7: 3}[cut]
    assert log.last_stable_offset == stable
    assert [t.first_offset for t in log.aborted_transactions()] == [0][: cut > 2] + [5][: cut > 6]
    for ongoing in log.ongoing_transactions:
        log.end_transaction(ongoing.producer_id, ongoing.producer_epoch, commit=True)
    wanted = {0: [], 1: [b"0"], 2: [b"0", b"1"], 3: [b"1"], 4: [b"1", b"3"], 5: [b"1", b"3"],
              6: [b"1", b"3", b"5"], 7: [b"1", b"3"]}  # fmt: skip
    assert committed(log) == wanted[cut]
    check_invariants(log)
    log.close()
    with make_log() as again:
        assert committed(again) == wanted[cut]


@pytest.mark.parametrize("rolls", [False, True])
def test_a_transaction_whose_marker_was_cut_off_is_aborted_by_the_next_epoch(
    make_log: MakeLog, rolls: bool
) -> None:
    log = make_log()
    other, first = Producing(log, 8), Producing(log, 7, epoch=3)
    first.transact(b"aborted")
    other.transact(b"open")
    first.end(commit=False)
    beside = make_log(readonly=True)
    assert committed(beside) == []
    log.truncate(2)
    assert log.ongoing_transactions == beside.ongoing_transactions
    if rolls:
        log.roll()
    wrong = Producing(log, 7, epoch=4)
    wrong.sequence = 3
    with pytest.raises(OutOfOrderSequenceError):
        wrong.transact(b"refused")
    assert [each.first_offset for each in log.ongoing_transactions] == [0, 1]
    second = Producing(log, 7, epoch=4)
    assert second.transact(b"kept") == range(3, 4)  # after the marker that was missing
    assert (committed(log), log.last_stable_offset) == ([], 1)
    second.end(commit=True)
    other.end(commit=True)
    expected = [b"open", b"kept"]
    assert committed(log) == expected
    assert committed(beside) == expected
    assert committed(make_log(readonly=True)) == expected
    assert log.aborted_transactions() == beside.aborted_transactions()
    assert log.check() == []
    log.close()
    again = make_log()
    assert committed(again) == expected
    assert again.check() == []


def test_a_cut_through_a_batch_keeps_its_producer(make_log: MakeLog) -> None:
    log = make_log()
    producer = Producing(log, 1)
    producer.transact(b"a", b"b", b"c")
    log.truncate(2)
    (raw,) = log.read_batches(0)
    header = BatchHeader.parse(raw)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (1, 0, 0)
    assert header.transactional
    assert log.last_stable_offset == 0
    log.append_batch(
        batch(b"C", producer_id=1, producer_epoch=0, base_sequence=2, transactional=True)
    )
    log.end_transaction(1, 0, commit=True)
    assert committed(log) == [b"a", b"b", b"C"]
    check_invariants(log)


# ---- crashes and damage ----


def history(log: Partition) -> None:
    one, two = Producing(log, 1), Producing(log, 2)
    for number in range(6):
        one.transact(b"one %d" % number * 10)
        two.transact(b"two %d" % number * 10)
        one.end(commit=number % 2 == 0)
        log.append(b"plain %d" % number * 10)
        two.end(commit=number % 3 == 0)
    one.transact(b"open" * 10)


def facts(log: Partition) -> tuple[object, ...]:
    return (
        committed(log),
        log.last_stable_offset,
        log.aborted_transactions(),
        [t[:3] for t in log.ongoing_transactions],
    )


@pytest.mark.parametrize("lost", ["nothing", ".txnindex", ".snapshot", "both", "torn"])
def test_after_a_crash_the_log_alone_tells_what_was_aborted(
    make_log: MakeLog, tmp_path: Path, clock: ManualClock, lost: str
) -> None:
    log = make_log(segment_bytes=1024, clock=clock)
    history(log)
    wanted = facts(log)
    assert len(log.segments) > 3
    path = crash(log, tmp_path / "crashed" / "orders-0")
    for suffix in (".txnindex", ".snapshot"):
        for file in path.glob(f"*{suffix}"):
            if lost in (suffix, "both"):
                file.unlink()
            elif lost == "torn":
                file.write_bytes(file.read_bytes()[:-7])
    with Partition.open(path, readonly=True, clock=clock) as reader:
        assert facts(reader) == wanted
    with Partition.open(path, durability="os", clock=clock) as again:
        assert facts(again) == wanted
        check_invariants(again)
        index = {p.name: p.read_bytes() for p in path.glob("*.txnindex")}
    assert index == {p.name: p.read_bytes() for p in log.path.glob("*.txnindex")}
    assert set(names(log, ".snapshot")) <= {int(p.stem) for p in path.glob("*.snapshot")}


@pytest.mark.parametrize("content", [b"", b"\0\1torn", bytes(56)])
def test_a_bad_snapshot_is_discarded_with_its_reason_and_an_older_one_used(
    make_log: MakeLog, content: bytes
) -> None:
    log = make_log(segment_bytes=1024)
    history(log)
    wanted = facts(log)
    log.close()
    newest = max(log.path.glob("*.snapshot"))
    good = newest.read_bytes()
    newest.write_bytes(content)
    with make_log(readonly=True) as reader:
        assert facts(reader) == wanted
        assert newest.read_bytes() == content
    with make_log() as again:
        (discarded,) = again.recovery.snapshots_discarded
        assert discarded.path == newest
        assert discarded.reason
        assert facts(again) == wanted
        assert newest.read_bytes() == good


def test_a_damaged_index_of_aborted_transactions_is_rebuilt(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    history(log)
    wanted = facts(log)
    log.close()
    for path in log.path.glob("*.txnindex"):
        path.write_bytes(b"\7" + path.read_bytes()[1:])
    with make_log(readonly=True) as reader:
        assert facts(reader) == wanted
    with make_log() as again:
        assert facts(again) == wanted
        Producing(again, 3).transact(b"more")
        again.end_transaction(3, 0, commit=False)
        again.end_transaction(1, 0, commit=False)
        assert len(again.aborted_transactions()) == len(wanted[2]) + 2  # type: ignore[arg-type]


def test_a_clean_open_reads_no_batches(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    log = make_log(segment_bytes=1024, clock=clock)
    history(log)
    wanted = facts(log)
    log.close()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a segment was read")

    with monkeypatch.context() as patched:
        patched.setattr(Segment, "scan", refuse)
        patched.setattr(Segment, "walk", refuse)
        again = make_log(clock=clock)
    assert facts(again) == wanted


def test_a_failed_write_leaves_the_producer_as_it_was(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    producer = Producing(log, 1)
    producer.transact(b"a")
    with monkeypatch.context() as patched:
        patched.setattr(log.parts.active, "roll_locked", failing(28, "no space left on device"))
        patched.setattr(log.parts.active, "writer", Reluctant(log.parts.active.writer))
        with pytest.raises(OSError, match="no space"):
            producer.transact(b"b")
    assert log.end_offset == 1
    assert log.last_stable_offset == 0
    producer.transact(b"b")
    producer.end(commit=True)
    assert committed(log) == [b"a", b"b"]


class Reluctant:
    """A writer that always asks for a roll."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def append_raw(self, *_: object) -> bool:
        return False

    append_placed = append_raw


# ---- other processes ----


def test_a_reader_follows_transactions_of_a_writer(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    producer = Producing(log, 1)
    producer.transact(b"aborted" * 20)
    with make_log(readonly=True) as reader:
        assert (reader.last_stable_offset, committed(reader)) == (0, [])
        producer.end(commit=False)
        for number in range(10):
            producer.transact(b"%d" % number * 200)
            log.append(b"plain %d" % number)
            assert reader.last_stable_offset == log.last_stable_offset < log.end_offset
            producer.end(commit=number % 2 == 0)
            assert committed(reader) == committed(log)
            assert reader.aborted_transactions() == log.aborted_transactions()
        assert len(log.segments) > 3
        log.truncate(5)
        assert committed(reader) == committed(log)
        assert reader.last_stable_offset == log.last_stable_offset
        log.trim(4)
        assert committed(reader) == committed(log)


def test_a_brokers_transactions_are_read(tmp_path: Path) -> None:
    import json

    golden = Path(__file__).parent.parent / "golden" / "transactional"
    expected = json.loads((golden / "expected.json").read_text())
    wanted = [r["offset"] for r in expected["records"] if r["offset"] not in expected["aborted"]]
    path = tmp_path / "transactional-0"
    shutil.copytree(golden / "transactional-0", path)
    with Partition.open(path, readonly=True) as log:
        assert [r.offset for r in log.scan(isolation="read_committed")] == wanted
    before = {p.name: p.read_bytes() for p in path.glob("*.txnindex")}
    with Partition.open(path) as log:
        assert [r.offset for r in log.scan(isolation="read_committed")] == wanted
        assert log.last_stable_offset == expected["end_offset"]
    assert {p.name: p.read_bytes() for p in path.glob("*.txnindex")} == before


def test_splitting_what_was_read_gives_the_batches(make_log: MakeLog) -> None:
    log = make_log()
    history(log)
    raw = b"".join(log.read_batches(0, 1 << 20))
    assert [header.base_offset for header, _ in split(raw)][:3] == [0, 1, 2]


def test_a_failed_note_of_an_abort_holds_committed_readers_back(
    make_log: MakeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    producer = Producing(log, 1)
    producer.transact(b"aborted")
    with monkeypatch.context() as patched:
        patched.setattr(Segment, "append_aborted", failing(5, "input/output error"))
        with pytest.raises(IndeterminateAppendError) as error:
            producer.end(commit=False)
    assert error.value.offsets == range(1, 2)
    assert log.end_offset == 2
    assert log.last_stable_offset == 0
    assert committed(log) == []
    log.close()
    with make_log() as again:
        assert again.last_stable_offset == 2
        assert again.aborted_transactions() == [(1, 0, 1, 2)]
        assert committed(again) == []


def test_damage_that_hides_a_marker_keeps_the_transaction_open(
    make_log: MakeLog, tmp_path: Path
) -> None:
    log = make_log()
    producer = Producing(log, 1)
    producer.transact(b"a")
    position = log.segments[-1].size_bytes
    producer.end(commit=True)
    log.append(b"b")
    path = crash(log, tmp_path / "crashed" / "orders-0")
    (file,) = path.glob("*.log")
    content = bytearray(file.read_bytes())
    content[position + 70] ^= 1
    file.write_bytes(content)
    with Partition.open(path, durability="os") as again:
        assert again.recovery.damage
        assert again.last_stable_offset == 0
        again.end_transaction(1, 0, commit=True)
        with pytest.raises(CorruptLogError):
            values(again.scan(isolation="read_committed"))
        skipping = again.scan(isolation="read_committed", on_corrupt="skip")
        assert values(skipping) == [b"a", b"b"]


@pytest.mark.parametrize("how", ["killed", "repaired"])
def test_damage_that_hides_an_abort_shows_nothing_of_it(
    make_log: MakeLog, tmp_path: Path, how: str
) -> None:
    """The next transaction of the producer is of another epoch: this one must have ended."""
    log = make_log()
    log.append(b"before")
    Producing(log, 1, epoch=0).transact(b"aborted")
    position = log.segments[-1].size_bytes
    log.end_transaction(1, 1, commit=False)
    later = Producing(log, 1, epoch=1)
    later.transact(b"committed")
    later.end(commit=True)
    if how == "killed":
        path = crash(log, tmp_path / "crashed" / "orders-0")
    else:
        path = log.path
        log.close()
    (file,) = path.glob("*.log")
    content = bytearray(file.read_bytes())
    content[position + 70] ^= 1
    file.write_bytes(content)
    if how == "repaired":
        repair(path, dry_run=False, accept_loss=True)
    with Partition.open(path, durability="os") as again:
        skipping = again.scan(isolation="read_committed", on_corrupt="skip")
        assert values(skipping) == [b"before", b"committed"]
        assert again.aborted_transactions() == [(1, 1, 2, 3)]
        assert again.ongoing_transactions == []
        again.close()
    with Partition.open(path, durability="os") as again:
        skipping = again.scan(isolation="read_committed", on_corrupt="skip")
        assert values(skipping) == [b"before", b"committed"]


def test_what_a_broker_wrote_gives_the_brokers_files(make_log: MakeLog) -> None:
    """Its batches, copied and rolled where it rolled: every snapshot and index, byte for byte."""
    golden = Path(__file__).parent.parent / "golden" / "transactional" / "transactional-0"
    log = make_log("transactional-0")
    for path in sorted(golden.glob("*.log")):
        log.roll()
        log.append_batch(path.read_bytes(), origin="follower")
    log.close()
    for suffix in (".log", ".snapshot", ".txnindex"):
        wanted = {p.name: p.read_bytes() for p in golden.glob(f"*{suffix}")}
        assert {p.name: p.read_bytes() for p in log.path.glob(f"*{suffix}")} == wanted
        assert wanted


def test_checking_finds_an_aborted_transaction_that_is_not_listed(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    history(log)
    log.check()
    log.close()
    listed = min(log.path.glob("*.txnindex"))
    content = listed.read_bytes()
    other = bytearray(content)
    other[9] ^= 0x40  # another producer: nothing that reading it alone would find
    with make_log() as again:  # opening would find it by what was noted of it
        listed.write_bytes(other)
        for suffix in (".summary", ".sum"):
            listed.with_suffix(suffix).unlink()
        with pytest.raises(CorruptLogError, match="not in the index"):
            again.check()
    listed.unlink()  # noticed by opening already, and made again
    with make_log() as again:
        again.check()
    assert listed.read_bytes() == content


@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_that_ends_while_a_reader_looks_is_whole_or_not_there(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch, commit: bool
) -> None:
    """The transaction ends right after the reader asked for the end of the log."""
    log = make_log()
    producer = Producing(log, 1)
    plain = Reader.end_offset
    assert isinstance(plain, property) and plain.fget is not None
    ask = plain.fget
    todo = [lambda: producer.transact(b"a"), lambda: producer.transact(b"b", b"c")]
    todo.append(lambda: producer.end(commit=commit))

    def end_offset(self: Reader) -> int:
        end: int = ask(self)
        monkeypatch.setattr(Reader, "end_offset", plain)
        while todo:
            todo.pop(0)()
        return end

    todo.pop(0)()
    monkeypatch.setattr(Reader, "end_offset", property(end_offset))
    seen = log.last_stable_offset
    assert not todo
    assert seen in (0, 4)
    assert values(log.scan(isolation="read_committed")) == ([b"a", b"b", b"c"] if commit else [])


def test_committed_readers_beside_a_busy_writer_see_whole_transactions(make_log: MakeLog) -> None:
    """Each transaction is three values; the even ones commit."""
    log = make_log(segment_bytes=1 << 14)
    reader = make_log(readonly=True)
    done = threading.Event()
    faults: list[object] = []

    def read(source: Partition) -> None:
        while not done.is_set():
            seen: dict[int, int] = {}
            for record in source.scan(isolation="read_committed"):
                number = int(record.value or b"")
                seen[number] = seen.get(number, 0) + 1
            faults.extend((n, count) for n, count in seen.items() if n % 2 or count != 3)

    threads = [threading.Thread(target=read, args=(source,)) for source in (log, log, reader)]
    for thread in threads:
        thread.start()
    try:
        pair = Producing(log, 1), Producing(log, 2)
        for number in range(300):
            producer = pair[number // 2 % 2]
            producer.transact(b"%d" % number)
            producer.transact(b"%d" % number, b"%d" % number)
            producer.end(commit=number % 2 == 0)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert faults == []
    assert len(log.segments) > 3
    assert len(committed(log)) == 450


def test_a_sleeping_partition_of_a_store_knows_its_transactions(
    tmp_path: Path, clock: ManualClock
) -> None:
    with logstore.open(tmp_path / "data", clock=clock) as store:
        log = store.create_topic("orders")[0]
        producer = Producing(log, 1)
        producer.transact(b"aborted")
        producer.end(commit=False)
        producer.transact(b"open")
    with logstore.open(tmp_path / "data", clock=clock) as store:
        log = store["orders"][0]
        assert log.last_stable_offset == 2
        assert [t.first_offset for t in log.ongoing_transactions] == [2]
        assert committed(log) == []
        assert log.append_batch(producer.sent[-1], verify_transaction=False).duplicate
        log.end_transaction(1, 0, commit=True)
        assert committed(log) == [b"open"]
        assert log.aborted_transactions() == [(1, 0, 1, 2)]
    with logstore.open(tmp_path / "data", readonly=True, clock=clock) as store:
        assert committed(store["orders"][0]) == [b"open"]


def test_the_stable_offset_waits_before_a_transactions_bytes_are_there_and_until_it_is_listed(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reader would see who looks at the worst moments of an append."""
    log = make_log()
    log.append(b"before")
    producer = Producing(log, 1)
    stable: list[tuple[str, int, int]] = []

    class Watched(Reluctant):
        def append_raw(self, *arguments: Any) -> bool:
            done = bool(self._writer.append_raw(*arguments))
            stable.append(("written", log.end_offset, log.last_stable_offset))
            return done

        def append_placed(self, *arguments: Any) -> bool:
            done = bool(self._writer.append_placed(*arguments))
            stable.append(("written", log.end_offset, log.last_stable_offset))
            return done

    note = Segment.append_aborted

    def watched(segment: Segment, aborted: Any) -> None:
        stable.append(("not listed yet", log.end_offset, log.last_stable_offset))
        note(segment, aborted)

    with monkeypatch.context() as patched:
        patched.setattr(log.parts.active, "writer", Watched(log.parts.active.writer))
        patched.setattr(Segment, "append_aborted", watched)
        producer.transact(b"a")
        producer.end(commit=False)
    assert stable == [("written", 2, 1), ("written", 3, 1), ("not listed yet", 3, 1)]
    assert log.last_stable_offset == 3
