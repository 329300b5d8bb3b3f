"""Behaviours that Kafka's own tests check, one test for each.

Where logstore differs on purpose (it keeps bytes that it cuts off), the docstring of the test has
the difference.  tests/log/test_producer_state.py and tests/partition/test_transactions_in_log.py
have those of producers and of aborted transactions.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import (
    Compactor,
    ConflictError,
    EpochEnd,
    FencedError,
    LeaderEpochs,
    LogStoreError,
    ManualClock,
    OffsetIndex,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    Partition,
    PartitionConfig,
    RecordNotFoundError,
    RetentionPolicy,
    TimeIndex,
)
from logstore.format.batch import BatchHeader, EndMarker
from logstore.testing import ReferenceRecord, encode_batch, read_log
from tests.conftest import MakeLog
from tests.kit import bases, with_crc

# ---- rolling ----

HOUR_MS = 3_600_000


def raw(*timestamps: int, offset: int = 0) -> bytes:
    """A batch as a leader sends it to its followers."""
    records = [
        ReferenceRecord(value=b"v%d" % number, timestamp=time)
        for number, time in enumerate(timestamps)
    ]
    return encode_batch(records, base_offset=offset)


def files(log: Partition, suffix: str) -> list[int]:
    return sorted(int(path.name.split(".")[0]) for path in log.path.glob("*" + suffix))


def test_an_empty_segment_is_never_too_old_and_untimed_records_go_by_the_clock(
    tmp_path: Path,
) -> None:
    clock = ManualClock(1_000)
    with Partition.open(tmp_path / "t-0", config={"segment.ms": HOUR_MS}, clock=clock) as log:
        clock.advance(HOUR_MS + 1)
        log.append_batch(raw(-1), origin="follower")
        assert bases(log) == [0], "nothing was in it"
        clock.advance(HOUR_MS + 1)
        log.append_batch(raw(-1, offset=1), origin="follower")
        assert bases(log) == [0, 1]


def test_a_segment_with_times_goes_by_them(tmp_path: Path) -> None:
    clock = ManualClock(1_000)
    with Partition.open(tmp_path / "t-0", config={"segment.ms": HOUR_MS}, clock=clock) as log:
        log.append(b"first", timestamp=1_000)
        clock.advance(2 * HOUR_MS)
        log.append(b"of the same time", timestamp=1_000)
        assert bases(log) == [0], "the wall clock does not count"
        log.extend([])
        assert bases(log) == [0], "nothing to append never rolls"
        log.append(b"an hour later", timestamp=1_001 + HOUR_MS)
        assert bases(log) == [0, 2]


def test_rolling_an_empty_segment_leaves_one_segment(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "t-0") as log:
        log.roll()
        assert bases(log) == [0] and files(log, ".log") == [0]
        assert log.append(b"x") == 0
        log.roll()
        log.roll()
        assert bases(log) == [0, 1]
        assert log.append(b"y") == 1


def test_no_segment_starts_below_the_active_one(tmp_path: Path) -> None:
    """roll() takes no offset; only a batch below the end could ask for such a segment."""
    with Partition.open(tmp_path / "t-0") as log:
        log.extend([b"x"] * 10)
        log.roll()
        with pytest.raises(ConflictError):
            log.append_batch(raw(1, offset=5), origin="follower")
        assert bases(log) == files(log, ".log") == [0, 10]
        assert log.end_offset == 10


def test_a_batch_out_of_its_segments_range_gets_a_segment_of_its_own(tmp_path: Path) -> None:
    """Old brokers could compact segments into one that spans more than 2^31 offsets."""
    (tmp_path / "t-0").mkdir()
    far = (1 << 31) + 5
    log_file = tmp_path / "t-0" / f"{0:020}.log"
    log_file.write_bytes(raw(1, 2) + raw(3, offset=far) + raw(4, 5, offset=far + 1))
    with Partition.open(tmp_path / "t-0") as log:
        assert bases(log) == [0, far]
        assert [record.offset for record in log] == [0, 1, far, far + 1, far + 2]
        assert not log.recovery.torn
        assert log.append(b"next") == far + 3
    # A crash after the tail had become a file of its own, before it was cut off.
    (tmp_path / "u-0").mkdir()
    (tmp_path / "u-0" / f"{0:020}.log").write_bytes(raw(1, 2) + raw(3, offset=far))
    (tmp_path / "u-0" / f"{far:020}.log").write_bytes(raw(3, offset=far))
    with Partition.open(tmp_path / "u-0") as log:
        assert bases(log) == [0, far]
        assert [record.offset for record in log] == [0, 1, far]
    (tmp_path / "s-0").mkdir()
    (tmp_path / "s-0" / f"{0:020}.log").write_bytes(raw(3, offset=far))
    with Partition.open(tmp_path / "s-0") as log:
        assert [record.offset for record in log] == [far]
        assert [segment.base_offset for segment in log.segments if segment.size_bytes] == [far]


def test_a_copy_out_of_the_segments_range_starts_the_next_one(tmp_path: Path) -> None:
    far = (1 << 31) + 1
    with Partition.open(tmp_path / "t-0") as log:
        log.append_batch(raw(1), origin="follower")
        log.append_batch(raw(2, offset=far), origin="follower")
        assert bases(log) == [0, far]
        assert files(log, ".snapshot") == [far]
    with Partition.open(tmp_path / "t-0") as log:
        assert [record.offset for record in log] == [0, far]


def test_what_does_not_fit_the_segments_range_is_refused_before_a_byte_is_written(
    tmp_path: Path,
) -> None:
    with Partition.open(tmp_path / "t-0") as log:
        log.append(b"x")
        size = log.segments[-1].size_bytes
        wide = bytearray(raw(1, 2, offset=1))
        wide[23:27] = (-1).to_bytes(4, "big", signed=True)  # the last offset delta
        with pytest.raises(LogStoreError):
            log.append_batch(with_crc(wide), origin="follower")
        assert log.segments[-1].size_bytes == size == log.segments[-1].path.stat().st_size
        assert log.end_offset == 1


# ---- reading ----


def test_a_gap_at_the_end_of_a_segment_is_read_from_the_next(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "t-0") as log:
        log.append_batch(raw(1), origin="follower")
        log.roll()
        log.append_batch(raw(2, offset=5), origin="follower")
        assert next(iter(log.scan(1))).offset == 5
        assert [BatchHeader.parse(batch).base_offset for batch in log.read_batches(1)] == [5]
        with pytest.raises(RecordNotFoundError):
            log[1]


@pytest.mark.parametrize("max_bytes", [0, 1])
def test_a_read_hands_out_one_whole_batch_however_little_was_asked_for(
    tmp_path: Path, max_bytes: int
) -> None:
    """A batch that is larger than max_bytes is returned whole; Kafka has an option for it."""
    with Partition.open(tmp_path / "t-0") as log:
        log.append(b"x" * 1000)
        log.append(b"y" * 1000)
        (batch,) = log.read_batches(0, max_bytes)
        assert BatchHeader.parse(batch).size_bytes == len(batch) > 1000


def test_reading_at_the_end_finds_nothing_and_beyond_is_an_error(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "t-0") as log:
        log.append_batch(raw(1, offset=1024), origin="follower")
        log.trim(1024)
        assert log.read_batches(1025) == []
        for offset in (0, 1026):
            with pytest.raises(OffsetOutOfRangeError):
                log.read_batches(offset)


# ---- indexes ----


def test_the_active_segments_indexes_are_files_once_it_is_flushed(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "t-0", durability="os") as log:
        log.append(b"x")
        log.roll()
        assert files(log, ".log") == [0, 1] and files(log, ".index") == [0]
        log.sync()
        assert files(log, ".index") == [0, 1]


def test_indexes_of_a_rolled_segment_are_trimmed_and_grow_again_after_a_cut(
    tmp_path: Path,
) -> None:
    config = {"index.interval.bytes": 1, "segment.index.bytes": 8 * 12}
    with Partition.open(tmp_path / "t-0", config=config) as log:
        for i in range(6):
            log.append(b"x", timestamp=i + 1)
        log.roll()
        assert (log.path / f"{0:020}.index").stat().st_size == 5 * 8
        assert (log.path / f"{0:020}.timeindex").stat().st_size == 5 * 12
        log.truncate(0)
        assert bases(log) == [0]
        for i in range(6):
            log.append(b"x", timestamp=i + 1)
        assert bases(log) == [0]


def test_a_cut_at_a_gap_removes_what_lies_behind_it(tmp_path: Path) -> None:
    clock = ManualClock(1_000)
    with Partition.open(tmp_path / "t-0", config={"segment.ms": HOUR_MS}, clock=clock) as log:
        log.append_batch(raw(1_000, offset=40), origin="follower")
        log.append_batch(raw(1_000, offset=43), origin="follower")
        log.truncate(41)
        assert [record.offset for record in log] == [40]
        assert log.append(b"x", timestamp=1_000) == 41
        log.truncate(40)
        clock.advance(2 * HOUR_MS)
        count = len(log.segments)
        log.append(b"y", timestamp=1_000 + 2 * HOUR_MS)
        assert len(log.segments) == count, "an emptied segment is as new"


def test_the_offset_index_at_its_extremes() -> None:
    index = OffsetIndex(50, max_bytes=8 * 8)
    assert index.lookup(50) == index.lookup(1 << 40) == (50, 0)
    for offset, position in ((51, 1), (52, 2), (53, 3), (54, 4)):
        index.append(offset, position)
    assert index.lookup(49) == index.lookup(50) == (50, 0)
    assert index.upper_bound(2) == (52, 2)
    index.truncate_to(1 << 30)
    assert len(index) == 4
    index.truncate_to(53)
    assert list(index) == [(51, 1), (52, 2)]
    index.truncate_to(50)
    assert len(index) == 0


def test_the_time_index_keeps_a_place_for_its_last_entry() -> None:
    index = TimeIndex(45, max_bytes=4 * 12)
    for number in range(3):
        index.maybe_append(number * 10 + 1, 46 + number)
    assert index.full and len(index) == 3
    with pytest.raises(ValueError, match="full"):
        index.maybe_append(100, 60)
    index.maybe_append(21, 60, final=True)
    assert len(index) == 3, "an equal time is ignored"
    with pytest.raises(ValueError, match="below the last"):
        index.maybe_append(100, 40, final=True)
    index.maybe_append(100, 60, final=True)
    assert index.last_entry == (100, 60)


# ---- opening a log with the root's checkpoints ----

SMALL = {"segment.bytes": 1024, "index.interval.bytes": 100}


def leave_as_broker(path: Path, records: int, *, recovery_point: int, start: int = 0) -> bytes:
    """A directory that a broker left in a crash: no state of ours, checkpoints at the root.

    Returns the offset index of the last segment.
    """
    with Partition.open(path / "t-0", durability="os", config=SMALL) as log:
        for i in range(records):
            log.append(b"%d" % i * 20, timestamp=1000 + i)
        index = log.segments[-1].offset_index.entries
    for name in ("logstore.state", "logstore.durable", ".lock"):
        (path / "t-0" / name).unlink()
    (path / "recovery-point-offset-checkpoint").write_text(f"0\n1\nt 0 {recovery_point}\n")
    if start:
        (path / "log-start-offset-checkpoint").write_text(f"0\n1\nt 0 {start}\n")
    return index


def recovery_points(path: Path) -> list[str]:
    return (path / "recovery-point-offset-checkpoint").read_text().splitlines()[2:]


def test_an_unclean_log_is_all_there_and_its_recovery_point_waits_for_a_flush(
    tmp_path: Path,
) -> None:
    index = leave_as_broker(tmp_path, 40, recovery_point=10)
    with logstore.open(tmp_path, config=SMALL) as store:
        partition = store["t"][0]
        assert [record.offset for record in partition] == list(range(40))
        assert partition.segments[-1].offset_index.entries == index, "rebuilt as it was"
        assert recovery_points(tmp_path) == ["t 0 10"]
        store.sync()
        assert recovery_points(tmp_path) == ["t 0 40"]


def test_random_bytes_behind_the_log_and_its_index_are_cut(tmp_path: Path) -> None:
    leave_as_broker(tmp_path, 30, recovery_point=0)
    seed = 23
    rng = random.Random(seed)
    last = max((tmp_path / "t-0").glob("*.log"))
    for file in (last, last.with_suffix(".index")):
        with file.open("ab") as out:
            out.write(rng.randbytes(rng.randrange(1, 200)))
    with logstore.open(tmp_path, config=SMALL) as store:
        partition = store["t"][0]
        assert [record.value for record in partition] == [b"%d" % i * 20 for i in range(30)]
        assert partition.end_offset == 30
        assert partition.recovery.torn, "logstore keeps the bytes aside and says so"


def test_a_log_that_ends_below_its_start_begins_anew_there(tmp_path: Path) -> None:
    leave_as_broker(tmp_path, 30, recovery_point=0, start=25)
    first = min((tmp_path / "t-0").glob("*.log"))
    content = bytearray(first.read_bytes())
    content[80] ^= 0xFF  # in the value of the first record, far below the start
    first.write_bytes(content)
    with logstore.open(tmp_path, config=SMALL) as store:
        partition = store["t"][0]
        assert (partition.start_offset, partition.end_offset) == (25, 25)
        assert [segment.base_offset for segment in partition.segments] == [25]
        assert store["t"].append(b"next").offset == 25
    kept = list((tmp_path / "t-0").glob("*.torn-*"))
    assert len(kept) == 5, "what Kafka deletes, logstore keeps aside: a tail, four segments"


def test_lost_indexes_are_rebuilt_and_orphans_removed(tmp_path: Path) -> None:
    index = leave_as_broker(tmp_path, 40, recovery_point=40)
    (tmp_path / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":3}')
    for file in (tmp_path / "t-0").glob("*.index"):
        file.unlink()
    orphan = tmp_path / "t-0" / "00000000000000000777.timeindex"
    orphan.write_bytes(bytes(12))
    with logstore.open(tmp_path, config=SMALL) as store:
        partition = store["t"][0]
        assert [record.offset for record in partition] == list(range(40))
        assert partition.segments[-1].offset_index.entries == index
        assert partition[3].value == b"3" * 20
        assert not orphan.exists()


def test_a_dirty_offset_beyond_the_end_starts_over(tmp_path: Path) -> None:
    leave_as_broker(tmp_path, 10, recovery_point=10)
    (tmp_path / "cleaner-offset-checkpoint").write_text("0\n1\nt 0 5000\n")
    settings = PartitionConfig(cleanup_policy="compact")
    with logstore.open(tmp_path, config=settings) as store:
        assert store["t"][0].first_dirty_offset == 0
    assert (tmp_path / "cleaner-offset-checkpoint").read_text() == "0\n0\n"


# ---- producers and transactions ----

NOW = 1_700_000_000_000


def produced(producer_id: int, sequence: int, *values: bytes, **options: Any) -> bytes:
    records = [ReferenceRecord(value, timestamp=NOW) for value in values]
    return encode_batch(
        records,
        **{"producer_id": producer_id, "producer_epoch": 0, "base_sequence": sequence} | options,
    )


def open_at(path: Path, **config: Any) -> Partition:
    return Partition.open(
        path / "t-0", durability="os", clock=ManualClock(NOW), config=config or None
    )


def killed(log: Partition, to: Path) -> Path:
    """A copy of the directory as a killed process leaves it; the path of its parent."""
    shutil.copytree(log.path, to / "t-0")
    return to


def snapshots(log: Partition) -> list[int]:
    return sorted(int(path.stem) for path in log.path.glob("*.snapshot"))


def test_a_follower_appends_the_same_sequences_again(tmp_path: Path) -> None:
    with open_at(tmp_path) as log:
        for offset in range(3):
            log.append_batch(produced(1, 0, b"a", base_offset=offset), origin="follower")
        assert log.end_offset == 3
        twice = produced(2, 5, b"b", base_offset=3) + produced(2, 5, b"b", base_offset=4)
        log.append_batch(twice, origin="follower")
        assert [record.value for record in log] == [b"a", b"a", b"a", b"b", b"b"]


def test_without_any_snapshot_an_open_writes_them_anew(tmp_path: Path) -> None:
    with open_at(tmp_path) as log:
        for number in range(4):
            log.append_batch(produced(1, number, b"v"))
            log.roll()
        log.append_batch(produced(1, 4, b"v"))
        unclean = killed(log, tmp_path / "killed")
    for path in (*log.path.glob("*.snapshot"), *unclean.glob("*/*.snapshot")):
        path.unlink()
    with open_at(tmp_path) as log:
        assert snapshots(log) == [3, 4, 5], "the last two bases and the end"
        assert log.append_batch(produced(1, 4, b"v")).duplicate, "Kafka would know nobody here"
    with open_at(unclean) as log:
        assert snapshots(log) == [1, 2, 3, 4, 5], "every base but the first, and the end"
        assert log.append_batch(produced(1, 4, b"v")).duplicate


def test_an_empty_batch_of_a_producer_still_tells_its_sequence(tmp_path: Path) -> None:
    emptied = encode_batch(
        [], base_offset=0, last_offset=4, producer_id=1, producer_epoch=0, base_sequence=10,
        max_timestamp=NOW,
    )  # fmt: skip
    with open_at(tmp_path) as log:
        log.append_batch(emptied, origin="follower")
        log.extend([b"x", b"y"])
        log.truncate(6)
        with pytest.raises(OutOfOrderSequenceError) as error:
            log.append_batch(produced(1, 17, b"v"))
        assert error.value.expected == 15
        log.append_batch(produced(1, 15, b"v"))


@pytest.mark.parametrize("codec", range(5))
def test_a_copy_below_the_end_of_an_empty_log_is_refused_with_its_offsets(
    tmp_path: Path, codec: int
) -> None:
    with open_at(tmp_path) as log:
        log.extend([b"x"] * 7)
        log.trim(7)
        with pytest.raises(ConflictError) as error:
            log.append_batch(
                produced(-1, -1, b"4", b"5", b"6", base_offset=4, producer_epoch=-1, codec=codec),
                origin="follower",
            )
        assert (error.value.expected, error.value.actual) == (4, 7)
        assert log.end_offset == 7


def test_an_open_transaction_is_stable_from_the_logs_start(tmp_path: Path) -> None:
    with open_at(tmp_path) as log:
        log.append_batch(produced(1, 0, *[b"t"] * 3, transactional=True))
        log.extend([b"x"] * 5)
        log.trim(5)
        assert log.last_stable_offset == 5
        log.roll()
        log.append(b"y")
        log.trim(8)
        assert len(log.segments) == 1
        assert log.last_stable_offset == 8
    with open_at(tmp_path) as log:
        assert log.last_stable_offset == 8


def test_of_stray_snapshots_only_the_newest_stays(tmp_path: Path) -> None:
    with open_at(tmp_path) as log:
        for number in range(2):
            log.append_batch(produced(1, number, b"v"))
            log.roll()
        log.extend([b"x", b"y"])
    assert snapshots(log) == [1, 2, 4]
    stray = log.path / f"{3:020}.snapshot"
    shutil.copy(log.path / f"{2:020}.snapshot", stray)
    with open_at(tmp_path) as log:
        assert snapshots(log) == [1, 2, 4]


def test_a_segment_behind_a_wide_gap_is_recovered_with_its_snapshot(tmp_path: Path) -> None:
    far = 2**31 + 1
    with open_at(tmp_path) as log:
        log.append_batch(produced(1, 0, b"near"), origin="follower")
        log.append_batch(produced(1, 1, b"far", base_offset=far), origin="follower")
        assert log.segments[-1].base_offset in (1, far)
        wanted = [(0, b"near"), (far, b"far")]
        assert [(record.offset, record.value) for record in log] == wanted
        again = killed(log, tmp_path / "killed")
    with open_at(again) as log:
        assert [(record.offset, record.value) for record in log] == wanted
        assert log.segments[-1].base_offset in snapshots(log)
        assert log.append_batch(produced(1, 1, b"far")).offsets == range(far, far + 1)


def test_a_lower_coordinator_epoch_in_the_log_is_tolerated(tmp_path: Path) -> None:
    with open_at(tmp_path) as log:
        log.append_batch(produced(1, 0, b"a", transactional=True))
        log.end_transaction(1, 0, commit=True, coordinator_epoch=5)
        log.append_batch(produced(1, 1, b"b", transactional=True))
        with pytest.raises(FencedError):
            log.end_transaction(1, 0, commit=True, coordinator_epoch=4)
        marker = EndMarker(commit=True, coordinator_epoch=4).encode(
            producer_id=1, producer_epoch=0, timestamp=NOW, base_offset=3, leader_epoch=0
        )
        log.append_batch(marker, origin="follower")
        unclean = killed(log, tmp_path / "killed")
    with open_at(unclean) as log:
        assert log.last_stable_offset == 4
        log.end_transaction(1, 0, commit=True, coordinator_epoch=4)


def test_interleaved_transactions_are_recovered_with_what_was_stable_then(
    tmp_path: Path,
) -> None:
    with open_at(tmp_path) as log:
        log.append_batch(produced(1, 0, b"0", b"1", transactional=True))
        log.append_batch(produced(2, 0, b"2", b"3", transactional=True))
        log.roll()
        log.append_batch(produced(1, 2, b"4", transactional=True))
        log.append_batch(produced(2, 2, b"5", transactional=True))
        log.end_transaction(2, 0, commit=False)  # 6
        log.end_transaction(1, 0, commit=False)  # 7
        unclean = killed(log, tmp_path / "killed")
    wanted = [(2, 2, 6, 0), (1, 0, 7, 8)]
    for path in unclean.glob("*/*.txnindex"):
        path.unlink()
    with open_at(unclean) as log:
        assert log.aborted_transactions() == wanted
        assert list(log.segments[-1].transaction_index) == wanted
        assert list(log.segments[0].transaction_index) == []


# ---- compaction ----

START_MS = 1_700_000_000_000


def from_producer(key: bytes, sequence: int, *, transactional: bool = False, pid: int = 7) -> bytes:
    """A batch of one record, as a client of an idempotent producer sends it."""
    return encode_batch(
        [ReferenceRecord(b"value %d" % sequence, key, (), START_MS)],
        transactional=transactional,
        producer_id=pid,
        producer_epoch=0,
        base_sequence=sequence,
    )


def compacted(path: Path, clock: ManualClock) -> Partition:
    return Partition.open(
        path, durability="os", clock=clock,
        config={"delete.retention.ms": 1000, "min.cleanable.dirty.ratio": 0},
    )  # fmt: skip


def compact_with_a_new_record(log: Partition, key: bytes) -> None:
    log.append(b"filler", key=key)
    log.roll()
    Compactor(log).run()


def batches_in(path: Path) -> list[tuple[int, int, bool]]:
    """(base offset, records, control) of every batch."""
    found = [batch for file in sorted(path.glob("*.log")) for batch in read_log(file)]
    return [(batch.base_offset, len(batch.records), batch.control) for batch in found]


def test_an_emptied_batch_tells_the_last_sequence_when_state_is_rebuilt(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    with compacted(path, ManualClock(START_MS)) as log:
        log.append_batch(from_producer(b"k", 0))
        log.append(b"newer", key=b"k")
        log.roll()
        Compactor(log).run()
        assert batches_in(path) == [(0, 0, False), (1, 1, False)]
        log.append(b"cut off", key=b"x")
        for snapshot in path.glob("*.snapshot"):
            snapshot.unlink()
        log.truncate(2)
        assert log.append_batch(from_producer(b"k", 0)).duplicate
        assert not log.append_batch(from_producer(b"k", 1)).duplicate


def test_a_read_at_a_gap_goes_on_in_the_next_segment(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    path.mkdir()
    for base in (0, 5):
        record = ReferenceRecord(b"v", b"k%d" % base, (), START_MS, base)
        (path / f"{base:020d}.log").write_bytes(encode_batch([record], base_offset=base))
    with compacted(path, ManualClock(START_MS)) as log:
        assert [record.offset for record in log.scan(1)] == [5]


@pytest.mark.parametrize("unfinished", [True, False])
def test_half_a_swap_is_undone_and_a_whole_one_finished(tmp_path: Path, unfinished: bool) -> None:
    path, clock = tmp_path / "t-0", ManualClock(START_MS)
    with compacted(path, clock) as log:
        for i in range(2):
            for _ in range(2):
                log.append(b"%d" % i, key=b"k")
            log.roll()
        before = [record.offset for record in log]
    after = encode_batch([ReferenceRecord(b"1", b"k", (), START_MS, 3)], base_offset=3)
    (path / f"{0:020d}.log.swap").write_bytes(after)
    if unfinished:
        (path / f"{0:020d}.log.cleaned").write_bytes(b"")
    with compacted(path, clock) as log:
        assert [record.offset for record in log] == (before if unfinished else [3])
        assert log.end_offset == 4


def test_a_cut_at_a_gap_keeps_what_is_below(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    with compacted(path, ManualClock(START_MS)) as log:
        for i in range(44):
            log.append(b"%d" % i, key=b"a" if i < 40 else b"b%d" % (i % 3))
        log.roll()
        Compactor(log).run()
        assert [record.offset for record in log] == [39, 41, 42, 43]
        log.truncate(40)
        assert [record.offset for record in log] == [39]
        assert log.append(b"on") == 40


def test_an_abort_marker_goes_after_its_data_and_its_time(tmp_path: Path) -> None:
    path, clock = tmp_path / "t-0", ManualClock(START_MS)
    with compacted(path, clock) as log:
        log.append_batch(from_producer(b"aborted", 0, transactional=True))
        log.end_transaction(7, 0, commit=False)
        log.append_batch(from_producer(b"later", 1))  # the producer is known by this one now
        log.roll()
        Compactor(log).run()
        # Pass 1: the data is deleted, the marker and its index entry stay.
        assert batches_in(path)[0] == (1, 1, True)
        assert (path / f"{0:020d}.txnindex").stat().st_size == 34
        # Pass 2: no batch of it was seen, so the entry is deleted and the marker's time begins.
        compact_with_a_new_record(log, b"x")
        assert not (path / f"{0:020d}.txnindex").exists()
        assert batches_in(path)[0] == (1, 1, True)
        clock.advance(999)
        compact_with_a_new_record(log, b"y")
        assert batches_in(path)[0] == (1, 1, True)
        clock.advance(1)
        compact_with_a_new_record(log, b"z")
        assert not any(control for _, _, control in batches_in(path))
        log.check()


@pytest.mark.parametrize("commit", [True, False])
def test_a_marker_stays_while_an_emptied_batch_of_its_transaction_does(
    tmp_path: Path, commit: bool
) -> None:
    path, clock = tmp_path / "t-0", ManualClock(START_MS)
    with compacted(path, clock) as log:
        log.append_batch(from_producer(b"k", 0, transactional=True))
        log.end_transaction(7, 0, commit=commit)
        log.append(b"newer", key=b"k")
        log.roll()
        Compactor(log).run()
        for key in (b"x", b"y", b"z"):
            assert batches_in(path)[:2] == [(0, 0, False), (1, 1, True)]
            clock.advance(5000)
            compact_with_a_new_record(log, key)
        # The producer continues; a newer batch has its last sequence, so both may be deleted.
        log.append_batch(from_producer(b"more", 1))
        for key in (b"x", b"y", b"z"):
            clock.advance(5000)
            compact_with_a_new_record(log, key)
        assert not any(control for _, _, control in batches_in(path))


def test_the_last_batch_of_a_round_survives_as_its_header(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    with compacted(path, ManualClock(START_MS)) as log:
        log.append(b"kept", key=b"k")
        log.append(b"has no key, and goes")
        log.roll()
        Compactor(log).run()
        assert batches_in(path) == [(0, 1, False), (1, 0, False)]
        log.check()
    assert (path / f"{0:020d}.log").read_bytes()[-61:][:8] == (1).to_bytes(8, "big")


@pytest.mark.parametrize("reopened", [True, False])
def test_a_repeated_batch_is_recognised_after_compaction(tmp_path: Path, reopened: bool) -> None:
    path, clock = tmp_path / "t-0", ManualClock(START_MS)
    log = compacted(path, clock)
    for sequence in range(3):
        log.append_batch(from_producer(b"k", sequence))
    log.append(b"newer", key=b"k")
    log.roll()
    Compactor(log).run()
    assert [record.offset for record in log] == [3]
    if reopened:
        log.close()
        for file in path.glob("*.snapshot"):
            file.unlink()
        (path / "logstore.state").unlink()
        log = compacted(path, clock)
    again = log.append_batch(from_producer(b"k", 2))
    assert again.duplicate and again.offsets == range(2, 3)
    assert log.append_batch(from_producer(b"k", 3)).offsets == range(4, 5)
    log.close()


# ---- retention and leader epochs ----

DAY_MS = 86_400_000


def test_truncating_to_the_end_drops_an_epoch_that_has_no_record(log: Partition) -> None:
    log.extend([b"a", b"b"])
    log.become_leader(5)
    log.truncate(log.end_offset)
    assert [record.value for record in log] == [b"a", b"b"]
    assert log.leader_epochs.entries == [(0, 0)]


def test_nothing_above_the_high_watermark_expires_and_the_end_keeps_one_empty_segment(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    log = make_log(clock=fake_clock)
    log.become_leader(3)
    for _ in range(10):
        log.extend([b"x"] * 10)
        log.roll()
    fake_clock.advance(10 * DAY_MS)
    policy = RetentionPolicy(max_age_ms=DAY_MS)
    for high_watermark, expected in ((0, 0), (25, 2), (100, 10)):
        decisions = policy.plan(log.segments, fake_clock.time_ms(), high_watermark=high_watermark)
        assert sum(decision.delete for decision in decisions) == expected
    log.extend([b"x"] * 10)
    fake_clock.advance(10 * DAY_MS)
    log.enforce(policy)
    assert [segment.base_offset for segment in log.segments] == [110]
    assert log.start_offset == log.end_offset == 110
    assert log.leader_epochs.entries == [(3, 110)]


def test_what_lies_below_the_start_frees_the_way_for_deletion_by_time(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    log = make_log(clock=fake_clock)
    log.append(b"young", timestamp=fake_clock.time_ms())
    log.roll()
    log.append(b"old", timestamp=fake_clock.time_ms() - 10 * DAY_MS)
    log.roll()
    log.append(b"last", timestamp=fake_clock.time_ms())
    policy = RetentionPolicy(max_age_ms=DAY_MS)
    assert not any(decision.delete for decision in log.enforce(policy))
    decisions = policy.plan(log.segments, fake_clock.time_ms(), start_offset=1)
    assert [decision.rule for decision in decisions] == ["start", "age", None]
    log.trim(1)
    assert [decision.rule for decision in log.enforce(policy)] == ["age", None]
    assert not any(decision.delete for decision in log.enforce(policy))


def test_the_epoch_cache() -> None:
    epochs = LeaderEpochs([(1, 5), (2, 6)])
    epochs.assign(1, 7)
    assert epochs.entries == [(1, 7)]
    epochs = LeaderEpochs([(2, 9)])
    epochs.assign(3, 9)
    assert epochs.entries == [(3, 9)]
    assert LeaderEpochs([(5, 11), (6, 20)]).end_offset_for(4, 30) == EpochEnd(4, 11)
    epochs = LeaderEpochs([(2, 6), (3, 8), (4, 11)])
    epochs.truncate_from_start(9)
    assert epochs.entries == [(3, 9), (4, 11)]
