"""Compaction's rules, one by one, under a clock that stands still."""

from __future__ import annotations

import dataclasses
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import logstore
from logstore import (
    Compactor,
    ConfigError,
    ManualClock,
    Partition,
    ReadOnlyError,
    Record,
    RecordNotFoundError,
    Segment,
)
from logstore.files.names import segment_name
from logstore.files.small_file import with_checksum
from logstore.log.segment import RELATIVE_MAX
from logstore.testing import (
    CompactionRules,
    ReferenceBatch,
    ReferenceRecord,
    check_invariants,
    decode_batch,
    encode_batch,
    read_log,
    reference_compaction,
)
from tests.conftest import MakeLog

DAY = 86_400_000
NOW = 1_700_000_000_000
Aborted = tuple[int, int, int]


def record(
    offset: int, key: bytes | None, value: bytes | None = b"v", time: int = 1000
) -> ReferenceRecord:
    return ReferenceRecord(value, key, (), time, offset)


def batch(*records: ReferenceRecord, **fields: object) -> bytes:
    return encode_batch(records, base_offset=records[0].offset, **fields)  # type: ignore[arg-type]


def marker(offset: int, producer: int, *, commit: bool, horizon: int | None = None) -> bytes:
    control = ReferenceRecord(
        struct.pack(">hi", 0, 0), struct.pack(">hh", 0, commit), (), 1000, offset
    )
    return encode_batch(
        [control], base_offset=offset, transactional=True, control=True, producer_id=producer,
        producer_epoch=0, delete_horizon=horizon,
    )  # fmt: skip


def write_log(
    path: Path, segments: Sequence[Sequence[bytes]], aborted: Iterable[Aborted] = ()
) -> None:
    """A directory as a broker would leave it: one .log file for each list of batches."""
    path.mkdir()
    bases = [int.from_bytes(batches[0][:8], "big") for batches in segments]
    for base, batches in zip(bases, segments, strict=True):
        (path / segment_name(base, ".log")).write_bytes(b"".join(batches))
    for producer, first, last in aborted:
        base = max(b for b in bases if b <= last)
        with open(path / segment_name(base, ".txnindex"), "ab") as index:
            index.write(struct.pack(">hqqqq", 0, producer, first, last, last + 1))


def open_log(path: Path, clock: ManualClock | None = None, **config: object) -> Partition:
    return Partition.open(path, durability="os", clock=clock or ManualClock(NOW), config=config)


def batches_of(path: Path) -> list[ReferenceBatch]:
    found = []
    for file in sorted(path.glob("*.log")):
        found += [dataclasses.replace(b, position=0, size=0) for b in read_log(file)]
    return found


def pairs(log: Iterable[Record]) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(r.offset, r.key, r.value) for r in log]


def passes(log: Partition, clock: ManualClock, between_ms: int) -> Iterator[None]:
    """Compact three times; each time give the log one more segment to compact."""
    for i in range(3):
        compact(log)
        clock.advance(between_ms)
        log.append(b"x", key=b"k%d" % i)
        log.roll()
        yield


def compact(log: Partition, **options: object) -> None:
    Compactor(log, min_cleanable_dirty_ratio=0, **options).run()  # type: ignore[arg-type]
    check_invariants(log)


# ---- which records stay ----


def test_newest_record_of_every_key_stays_where_it_is(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([Record(b"%d" % i, key=b"k%d" % (i % 3)) for i in range(10)])
    log.roll()
    log.append(b"active", key=b"k0")
    report = Compactor(log).run()
    assert pairs(log) == [
        (7, b"k1", b"7"),
        (8, b"k2", b"8"),
        (9, b"k0", b"9"),
        (10, b"k0", b"active"),
    ]
    assert (report.records_before, report.records_after, report.superseded) == (10, 3, 7)
    assert report.end_offset == log.first_dirty_offset == 10
    assert report.bytes_after < report.bytes_before
    with pytest.raises(RecordNotFoundError):
        log[3]
    assert log[8].value == b"8"
    check_invariants(log)


def test_the_active_segment_is_never_touched(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([Record(b"%d" % i, key=b"k") for i in range(10)])
    report = Compactor(log).run()
    assert "nothing below offset 0 is new" in report.reason
    assert len(list(log)) == 10
    assert report.passes == 0 and not report.segments


def test_records_without_a_key_go_and_are_counted(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([b"keyless", Record(b"kept", key=b"k"), Record(b"empty key", key=b"")])
    log.roll()
    report = Compactor(log).run()
    assert pairs(log) == [(1, b"k", b"kept"), (2, b"", b"empty key")]
    assert report.keyless_dropped == 1


def test_a_dry_run_tells_and_changes_nothing(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    log.extend([Record(b"x" * 90, key=b"k%d" % (i % 5)) for i in range(8)])
    for i in range(60):
        log.append(b"x" * 90, key=b"k%d" % (i % 5))
    log.roll()
    files = {file.name: file.read_bytes() for file in log.path.iterdir()}
    told = Compactor(log).run(dry_run=True)
    assert {file.name: file.read_bytes() for file in log.path.iterdir()} == files
    assert told.dry_run and "would keep 5 of 68 records" in str(told)
    done = Compactor(log).run()
    assert (told.records_before, told.records_after, told.bytes_before, told.bytes_after) == (
        done.records_before, done.records_after, done.bytes_before, done.bytes_after,
    )  # fmt: skip
    assert done.records_after == len(list(log)) == 5
    assert "kept 5 of 68 records" in str(done)
    assert [str(line) for line in done.segments] == [str(line) for line in told.segments]


def test_a_batch_that_loses_nothing_is_copied_byte_for_byte(tmp_path: Path) -> None:
    whole = batch(record(0, b"a"), record(1, b"b"), producer_id=4, producer_epoch=0,
                  base_sequence=0, codec=1)  # fmt: skip
    other = batch(record(2, b"c"), record(3, b"c"))
    write_log(tmp_path / "t-0", [[whole, other], [batch(record(4, b"z"))]])
    with open_log(tmp_path / "t-0") as log:
        compact(log)
        first = next(iter(log.scan().batches()))
    assert first == whole


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("append_time", [None, 5555])
def test_a_batch_that_loses_records_keeps_all_else(
    tmp_path: Path, codec: int, append_time: int | None
) -> None:
    raw = encode_batch(
        [record(10, b"a", time=-1), record(11, b"b", time=70), record(13, b"a", time=60)],
        base_offset=9,
        last_offset=15,
        leader_epoch=3,
        codec=codec,
        append_time=append_time,
        producer_id=8,
        producer_epoch=2,
        base_sequence=40,
    )
    write_log(tmp_path / "t-0", [[raw], [batch(record(16, b"z"))]])
    with open_log(tmp_path / "t-0") as log:
        compact(log)
        cut = decode_batch(next(iter(log.scan().batches())))
    old = decode_batch(raw)
    assert cut == dataclasses.replace(
        old,
        size=cut.size,
        records=old.records[1:],
        base_timestamp=70 if append_time is None else append_time,
    )


# ---- what may be compacted, and when ----


def test_the_dirty_ratio_must_be_exceeded(make_log: MakeLog) -> None:
    log = make_log(min_cleanable_dirty_ratio=0.5)
    for i in range(40):
        log.append(b"x" * 50, key=b"k%d" % i)
    log.roll()
    Compactor(log).run()
    log.append(b"x", key=b"k0")
    log.roll()
    report = Compactor(log).run()
    assert 0 < report.dirty_ratio < 0.5
    assert "is not above min.cleanable.dirty.ratio 0.5" in report.reason
    assert log.first_dirty_offset == 40
    forced = Compactor(log, min_cleanable_dirty_ratio=0).run()
    assert forced.superseded == 1 and log.first_dirty_offset == 41


def test_young_records_wait_for_the_minimum_lag(make_log: MakeLog, fake_clock: ManualClock) -> None:
    log = make_log(clock=fake_clock, min_compaction_lag_ms=1000)
    for value in (b"old", b"new"):
        log.extend([Record(value, key=b"k"), Record(value, key=b"k")])
        log.roll()
        fake_clock.advance(600)
    report = Compactor(log).run()
    assert pairs(log) == [(1, b"k", b"old"), (2, b"k", b"new"), (3, b"k", b"new")]
    assert report.end_offset == 2
    fake_clock.advance(600)
    Compactor(log, min_cleanable_dirty_ratio=0).run()
    assert pairs(log) == [(3, b"k", b"new")]


def test_the_maximum_lag_makes_compaction_due(make_log: MakeLog, fake_clock: ManualClock) -> None:
    log = make_log(clock=fake_clock, max_compaction_lag_ms=5000, min_cleanable_dirty_ratio=1)
    log.extend([Record(b"1", key=b"k"), Record(b"2", key=b"k")])
    log.roll()
    fake_clock.advance(5000)
    assert "is not above" in Compactor(log).run().reason
    fake_clock.advance(1)
    assert Compactor(log).run().superseded == 1


def test_the_checkpoint_survives_a_reopen_and_is_lowered_by_a_cut(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([Record(b"%d" % i, key=b"k%d" % i) for i in range(10)])
    log.roll()
    Compactor(log).run()
    log.close()
    log = make_log()
    assert log.first_dirty_offset == 10
    log.truncate(4)
    assert log.first_dirty_offset == 4
    log.extend([Record(b"again", key=b"k%d" % i) for i in range(10)])
    log.roll()
    Compactor(log, min_cleanable_dirty_ratio=0).run()
    assert {r.key: r.value for r in log} == {b"k%d" % i: b"again" for i in range(10)}
    assert log.first_dirty_offset == 14


def test_a_checkpoint_beyond_the_end_or_below_the_start_is_the_start(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([b"x"] * 10)
    for content in (b"", b"garbage", b"00000000 5\n"):
        (log.path / "logstore.cleaner").write_bytes(content)
        assert log.first_dirty_offset == 0
    for offset in (11, 1 << 40):
        body = b"%d" % offset
        (log.path / "logstore.cleaner").write_bytes(with_checksum(body))
        assert log.first_dirty_offset == 0
    log.trim(3)
    assert log.first_dirty_offset == 3


def test_more_keys_than_the_map_holds_take_more_passes(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=2048)
    for i in range(300):
        log.append(b"%d" % i, key=b"k%d" % (i * 7 % 50))
    log.roll()
    newest = {r.key: (r.offset, r.value) for r in log}
    report = Compactor(log, memory_bytes=24 * 10).run()  # nine keys
    assert report.passes > 5
    assert {r.key: (r.offset, r.value) for r in log} == newest
    assert len(list(log)) == 50
    assert report.records_after == 50 and report.superseded == 250
    assert log.first_dirty_offset == 300
    check_invariants(log)


def test_a_value_goes_only_when_the_newer_one_is_durable(make_log: MakeLog) -> None:
    """Or a power cut could take the newer one, and compaction has taken the older."""
    log = make_log(durability="os")
    log.append(b"old", key=b"k")
    log.roll()
    log.append(b"new", key=b"k")
    log.roll()
    assert log.durable_offset < 2
    durable: list[int] = []
    report = Compactor(log, progress=lambda done, total: durable.append(log.durable_offset)).run()
    assert report.superseded == 1
    assert min(durable) >= report.end_offset == 2


# ---- tombstones ----


def test_a_tombstone_stays_for_its_time_after_compaction_met_it(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    log = make_log(clock=fake_clock, delete_retention_ms=DAY)
    log.append(b"value", key=b"k")
    log.append(None, key=b"k")
    log.roll()
    fake_clock.advance(10 * DAY)  # however old it is: only compaction starts its time
    compact(log)
    assert pairs(log) == [(1, b"k", None)]
    (met,) = [b for b in batches_of(log.path) if b.records]
    assert met.delete_horizon == fake_clock.time_ms() + DAY
    fake_clock.advance(DAY - 1)
    log.append(b"x", key=b"a")
    log.roll()
    compact(log)
    assert (1, b"k", None) in pairs(log)
    fake_clock.advance(1)
    log.append(b"x", key=b"b")
    log.roll()
    report = Compactor(log, min_cleanable_dirty_ratio=0).run()
    assert report.tombstones_dropped == 1
    assert [key for _, key, _ in pairs(log)] == [b"a", b"b"]
    check_invariants(log)


def test_a_deleted_key_never_comes_back(make_log: MakeLog, fake_clock: ManualClock) -> None:
    """The tombstone is in the dirty part, its value in a part compacted long ago."""
    log = make_log(clock=fake_clock, delete_retention_ms=0)
    log.append(b"value", key=b"k")
    log.roll()
    compact(log)
    log.append(None, key=b"k")
    log.roll()
    for i in range(3):
        compact(log)
        assert log.get(b"k") is None
        assert all(value is None for _, key, value in pairs(log) if key == b"k")
        log.append(b"x", key=b"other%d" % i)
        log.roll()
    assert b"k" not in {key for _, key, _ in pairs(log)}


# ---- where the next compaction starts ----


def test_all_superseded_leaves_a_header_that_tells_the_end(tmp_path: Path) -> None:
    write_log(
        tmp_path / "t-0",
        [
            [batch(record(0, b"a")), batch(record(1, b"b"), record(2, b"c"))],
            [batch(record(3, b"a"), record(4, b"b"), record(5, b"c"))],
            [batch(record(6, b"z"))],
        ],
    )
    with open_log(tmp_path / "t-0", segment_bytes=1024) as log:
        Compactor(log, memory_bytes=96).run()
        assert [offset for offset, _, _ in pairs(log)] == [3, 4, 5, 6]
        log.append(b"d", key=b"a")
        log.append(b"d", key=b"b")
        log.append(b"d", key=b"c")
        log.roll()
        log.trim(6)
        compact(log)
        log.extend([Record(b"e", key=k) for k in (b"a", b"b", b"c", b"z")])
        log.roll()
        compact(log)
        log.extend([Record(b"f", key=k) for k in (b"a", b"b", b"c", b"z")])
        log.roll()
        compact(log)
        assert len(list(log)) == 4


def test_segments_are_merged_up_to_the_configured_sizes(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=4096)
    for i in range(200):
        log.append(b"x" * 100, key=b"k%d" % i)
    log.roll()
    before = len(log.segments)
    Compactor(log).run()
    assert len(log.segments) == before  # each is full: nothing to merge
    for i in range(200):
        log.append(b"y" * 100, key=b"k%d" % i)
    log.roll()
    Compactor(log).run()  # the first half is empty now, but was full when it was grouped
    log.append(b"z", key=b"k0")
    log.roll()
    report = Compactor(log, min_cleanable_dirty_ratio=0).run()
    assert max(line.sources for line in report.segments) > 1
    assert all(line.bytes_after <= 4096 for line in report.segments)
    assert len(log.segments) < before * 2
    check_invariants(log)


def test_offsets_too_far_apart_are_not_merged(tmp_path: Path) -> None:
    far = RELATIVE_MAX + 3
    write_log(
        tmp_path / "t-0",
        [[batch(record(0, b"a"))], [batch(record(5, b"b"))], [batch(record(far, b"c"))],
         [batch(record(far + 1, b"d"))]],
    )  # fmt: skip
    with open_log(tmp_path / "t-0") as log:
        report = Compactor(log).run()
        assert [line.sources for line in report.segments] == [1, 2]
        assert [s.base_offset for s in log.segments] == [0, 5, far + 1]
        assert len(list(log)) == 4
        check_invariants(log)


def test_a_rewritten_file_is_as_old_as_the_last_it_replaces(make_log: MakeLog) -> None:
    log = make_log()
    for i in range(3):
        log.extend([Record(b"%d" % i, key=b"k")] * 2)
        log.roll()
        os.utime(log.segments[i].path, (1000 + i, 1000 + i))
    Compactor(log).run()
    assert log.segments[0].path.stat().st_mtime == 1002


def test_reading_by_time_goes_on_after_compaction(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    log = make_log(clock=fake_clock, index_interval_bytes=0)
    times = {}
    for i in range(100):
        fake_clock.advance(10)
        times[log.append(b"%d" % i, key=b"k%d" % (i % 10))] = fake_clock.time_ms()
    log.roll()
    Compactor(log).run()
    left = [r.offset for r in log]
    for offset, time in times.items():
        assert log.offset_for_time(time) == min((o for o in left if o >= offset), default=100)
    assert log.tail(3) == list(log)[-3:]


# ---- transactions ----


def test_aborted_data_goes_and_its_marker_stays_until_its_time(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    data = batch(record(0, b"a", b"aborted"), record(1, b"b", b"aborted"), transactional=True,
                 producer_id=7, producer_epoch=0, base_sequence=0)  # fmt: skip
    plain = batch(record(2, b"a", b"plain"))
    # The later batch of the producer has its last sequence.
    later = batch(record(4, b"z"), producer_id=7, producer_epoch=0, base_sequence=2)
    write_log(path, [[data, plain, marker(3, 7, commit=False)], [later]], aborted=[(7, 0, 3)])
    clock = ManualClock(NOW)
    with open_log(path, clock, delete_retention_ms=1000) as log:
        report = Compactor(log).run()
        assert report.aborted_dropped == 2 and report.markers_dropped == 0
        assert (2, b"a", b"plain") in pairs(log)
        index = path / segment_name(0, ".txnindex")
        assert index.stat().st_size == 34  # a batch of it was there in this pass
        horizons: list[list[int | None]] = []
        for i in range(3):
            clock.advance(600)
            log.append(b"x", key=b"k%d" % i)
            log.roll()
            compact(log)
            assert not index.exists()  # nothing of it is left
            horizons.append([b.delete_horizon for b in batches_of(path) if b.control])
        # Its time begins when compaction finds that, and is over when a later one sees it passed.
        assert horizons == [[NOW + 600 + 1000], [NOW + 600 + 1000], []]
        assert (2, b"a", b"plain") in pairs(log)


@pytest.mark.parametrize("commit", [True, False])
def test_a_marker_outlives_the_last_batch_of_its_producer(tmp_path: Path, commit: bool) -> None:
    """An emptied batch that keeps a producer's last sequence still belongs to its transaction."""
    path = tmp_path / "t-0"
    data = batch(record(0, b"a", b"gone"), transactional=True, producer_id=7, producer_epoch=0,
                 base_sequence=41)  # fmt: skip
    newer = batch(record(2, b"a", b"newer"))
    write_log(path, [[data, marker(1, 7, commit=commit), newer], [batch(record(3, b"z"))]],
              aborted=[] if commit else [(7, 0, 1)])  # fmt: skip
    clock = ManualClock(NOW)
    with open_log(path, clock, delete_retention_ms=0) as log:
        for _ in passes(log, clock, 10):
            header, end = batches_of(path)[:2]
            assert (header.records, header.last_sequence, header.transactional) == ((), 41, True)
            assert end.control and end.records and end.delete_horizon is None
        assert (path / segment_name(0, ".txnindex")).exists() == (not commit)
        assert [r.key for r in log.scan(isolation="read_committed")][:1] == [b"a"]
        check_invariants(log)


def test_nothing_of_an_open_transaction_is_compacted(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    opened = batch(record(2, b"a", b"open"), transactional=True, producer_id=7, producer_epoch=0,
                   base_sequence=0)  # fmt: skip
    write_log(
        path,
        [
            [batch(record(0, b"a")), batch(record(1, b"a"))],
            [opened],
            [batch(record(3, b"a", b"behind"))],
            [batch(record(4, b"z"))],
        ],
    )
    with open_log(path) as log:
        assert log.last_stable_offset == 2
        report = Compactor(log).run()
        assert report.end_offset == 2
        assert [offset for offset, _, _ in pairs(log)] == [1, 2, 3, 4]


def test_a_commit_marker_stays_while_its_data_does(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    data = batch(record(0, b"a", b"committed"), transactional=True, producer_id=7,
                 producer_epoch=0, base_sequence=0)  # fmt: skip
    write_log(path, [[data, marker(1, 7, commit=True)], [batch(record(2, b"z"))]])
    clock = ManualClock(NOW)
    with open_log(path, clock, delete_retention_ms=0) as log:
        for _ in passes(log, clock, 1):
            assert [b.delete_horizon for b in batches_of(path) if b.control] == [None]
        assert pairs(log)[0] == (0, b"a", b"committed")


def test_an_aborted_value_does_not_supersede_a_committed_one(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    kept = batch(record(0, b"a", b"committed"))
    aborted = batch(record(1, b"a", b"aborted"), transactional=True, producer_id=7,
                    producer_epoch=0, base_sequence=0)  # fmt: skip
    write_log(path, [[kept, aborted, marker(2, 7, commit=False)], [batch(record(3, b"z"))]],
              aborted=[(7, 1, 2)])  # fmt: skip
    with open_log(path) as log:
        compact(log)
        assert pairs(log) == [(0, b"a", b"committed"), (3, b"z", b"v")]


# ---- one key ----


@pytest.mark.parametrize("readonly", [False, True])
def test_get_finds_a_key_that_is_appended_and_compacted_while_it_searches(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch, readonly: bool
) -> None:
    log = make_log(cleanup_policy="compact", segment_bytes=2048)
    log.append(b"old", key=b"k")
    log.append(b"x" * 1500, key=b"x")  # two such segments are not merged
    log.roll()
    log.append(b"y" * 1500, key=b"y")
    reader = make_log(readonly=True) if readonly else log
    search = Segment.newest_of
    calls: list[int] = []

    def newest_of(segment: Segment, key: bytes, start: int = 0) -> int:
        found = search(segment, key, start)
        calls.append(found)
        if len(calls) == 1:  # the newest segment has been searched, and does not have it
            log.append(b"new", key=b"k")
            log.roll()
            Compactor(log, min_cleanable_dirty_ratio=0).run()
            assert [record.key for record in log] == [b"x", b"y", b"k"]
        return found

    monkeypatch.setattr(Segment, "newest_of", newest_of)
    found = reader.get(b"k")
    assert found is not None
    assert found.value == b"new"
    assert calls[0] == -1


def test_get_of_committed_records_only(make_log: MakeLog) -> None:
    log = make_log(cleanup_policy="compact")

    def transact(producer_id: int, value: bytes | None) -> None:
        record = ReferenceRecord(value, key=b"k", timestamp=log.clock.time_ms())
        log.append_batch(
            encode_batch(
                [record],
                producer_id=producer_id,
                producer_epoch=0,
                base_sequence=0,
                transactional=True,
            )
        )

    def committed() -> bytes | None:
        found = log.get(b"k", isolation="read_committed")
        return None if found is None else found.value

    assert committed() is None
    transact(1, b"aborted")
    log.end_transaction(1, 0, commit=False)
    assert committed() is None
    log.append(b"first", key=b"k")
    log.append(b"other", key=b"o")
    transact(2, b"second")
    assert (committed(), log.get(b"k")) == (b"first", log[-1])
    log.end_transaction(2, 0, commit=True)
    assert committed() == b"second"
    log.roll()
    transact(3, None)
    assert (committed(), log.get(b"k")) == (b"second", None)
    log.end_transaction(3, 0, commit=False)
    assert committed() == b"second"
    transact(4, None)
    log.end_transaction(4, 0, commit=True)
    assert committed() is None
    with pytest.raises(ConfigError, match="isolation"):
        log.get(b"k", isolation="committed")


def test_get_finds_the_newest_record_of_a_key(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024, compression_type="gzip")
    for i in range(60):
        log.append(b"%d" % i, key=b"k%d" % (i % 7), headers=[("h", b"x")])
    log.append(None, key=b"k3")
    log.append(b"no key")
    found = log.get(b"k2")
    assert found is not None and found == log[58]
    assert log.get(b"k3") is None  # a tombstone
    assert log.get(b"never") is None
    assert log.get(b"") is None
    log.trim(58)
    assert log.get(b"k1") is None and log.get(b"k2") is not None
    with pytest.raises(TypeError, match="a key is bytes, not str"):
        log.get("k2")  # type: ignore[arg-type]


@pytest.mark.parametrize("dry_run", [True, False])
def test_purge_removes_one_key_from_any_log(make_log: MakeLog, dry_run: bool) -> None:
    log = make_log(segment_bytes=1024)
    for i in range(60):
        log.append(b"%d" % i * 9, key=b"k%d" % (i % 6) if i % 5 else None)
    log.append(None, key=b"k1")
    before = pairs(log)
    report = Compactor(log).purge(b"k1", dry_run=dry_run)
    left = [entry for entry in before if entry[1] != b"k1"]
    assert pairs(log) == (before if dry_run else left)
    assert report.purged == len(before) - len(left)
    assert report.records_before - report.records_after == report.purged
    assert log.append(b"next") == 61
    check_invariants(log)
    assert Compactor(log).purge(b"never there").segments == []


def test_purge_keeps_what_tells_of_producers(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    data = batch(record(0, b"a"), record(1, b"a"), transactional=True, producer_id=7,
                 producer_epoch=0, base_sequence=5)  # fmt: skip
    write_log(path, [[data, marker(2, 7, commit=False)], [batch(record(3, b"z"))]],
              aborted=[(7, 0, 2)])  # fmt: skip
    with open_log(path) as log:
        assert Compactor(log).purge(b"a").purged == 2
        header = batches_of(path)[0]
        assert (header.records, header.last_sequence, header.producer_id) == ((), 6, 7)
        assert (path / segment_name(0, ".txnindex")).stat().st_size == 34
        check_invariants(log)


# ---- mistakes ----


def test_bad_arguments_are_refused(make_log: MakeLog) -> None:
    log = make_log()
    for options, message in (
        ({"memory_bytes": 47}, "memory_bytes must be at least 48"),
        ({"io_bytes": 0}, "io_bytes must be at least 1"),
        ({"min_lag_ms": -1}, "min_lag_ms must not be negative"),
        ({"min_cleanable_dirty_ratio": 1.5}, "from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Compactor(log, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a key is bytes"):
        Compactor(log).purge("k")  # type: ignore[arg-type]
    log.append(b"x", key=b"k")
    with pytest.raises(ReadOnlyError):
        Compactor(make_log(readonly=True)).run()


def test_progress_counts_every_byte_that_is_read(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    for i in range(60):
        log.append(b"x" * 50, key=b"k%d" % (i % 6))
    log.roll()
    seen: list[tuple[int, int]] = []
    Compactor(log, progress=lambda done, total: seen.append((done, total))).run()
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# ---- against the reference ----


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[list[bytes]], list[Aborted], int]:
    """Segments of batches of every kind, the aborted transactions in them, and where they end."""
    offset = 0
    open_transactions: dict[int, int] = {}
    aborted: list[Aborted] = []
    segments: list[list[bytes]] = []
    for _ in range(draw(st.integers(1, 4))):
        batches: list[bytes] = []
        for _ in range(draw(st.integers(1, 4))):
            kind = draw(st.sampled_from(["plain", "plain", "transactional", "marker"]))
            producer = draw(st.integers(1, 2))
            if kind == "marker":
                commit = draw(st.booleans())
                horizon = draw(st.sampled_from([None, None, NOW - 5, NOW + 5]))
                batches.append(marker(offset, producer, commit=commit, horizon=horizon))
                if producer in open_transactions:
                    first = open_transactions.pop(producer)
                    if not commit:
                        aborted.append((producer, first, offset))
                offset += 1
                continue
            base, records = offset, []
            for _ in range(draw(st.integers(1, 5))):
                offset += draw(st.sampled_from([0, 0, 0, 2]))
                key = draw(st.sampled_from([b"a", b"b", b"c", b"d", b"", None]))
                value = draw(st.sampled_from([b"v", b"", None])) if key is not None else b"v"
                records.append(record(offset, key, value, draw(st.sampled_from([-1, 5, NOW, 9]))))
                offset += 1
            offset += draw(st.sampled_from([0, 0, 3]))
            transactional = kind == "transactional"
            if transactional:
                open_transactions.setdefault(producer, base)
            batches.append(
                encode_batch(
                    records,
                    base_offset=base,
                    last_offset=offset - 1,
                    codec=draw(st.sampled_from([0, 0, 1, 4])),
                    append_time=draw(st.sampled_from([None, None, 7777])),
                    delete_horizon=draw(st.sampled_from([None, None, NOW - 5, NOW + 5])),
                    transactional=transactional,
                    producer_id=producer if transactional else -1,
                    producer_epoch=0 if transactional else -1,
                    base_sequence=3 if transactional else -1,
                )
            )
        segments.append(batches)
    for producer, first in list(open_transactions.items()):
        segments[-1].append(marker(offset, producer, commit=False))
        aborted.append((producer, first, offset))
        offset += 1
    return segments, sorted(aborted, key=lambda entry: entry[2]), offset


@settings(max_examples=40)
@given(logs(), st.sampled_from([None, 1, 2, 3]), st.sampled_from([300, 1 << 20]))
def test_what_is_left_is_what_the_reference_leaves(
    tmp_path_factory: pytest.TempPathFactory,
    log_of: tuple[list[list[bytes]], list[Aborted], int],
    key_limit: int | None,
    segment_bytes: int,
) -> None:
    segments, aborted, end = log_of
    path = tmp_path_factory.mktemp("log") / "t-0"
    write_log(path, [*segments, [batch(record(end, b"active"))]], aborted)
    expected = [
        dataclasses.replace(decode_batch(raw), size=0)
        for raw in [
            *(raw for batches in segments for raw in batches),
            batch(record(end, b"active")),
        ]
    ]
    # memory for `key_limit` keys, as the map counts: nine tenths of its slots
    memory = 1 << 20 if key_limit is None else 24 * -(-key_limit * 10 // 9)
    with open_log(path, segment_bytes=max(1024, segment_bytes), delete_retention_ms=100) as log:
        done = 0
        producers = {
            producer: (epoch, last) for producer, epoch, last in log.parts.rewriter.producer_ends()
        }
        bases = [segment.base_offset for segment in log.segments]
        passes = 0
        while done < end:
            rules = CompactionRules(
                first_dirty=done,
                end=end,
                now_ms=NOW,
                delete_retention_ms=100,
                bases=bases,
                key_limit=key_limit,
                aborted=aborted,
                producers=producers,
            )
            expected, done = reference_compaction(expected, rules)
            passes += 1
        report = Compactor(log, memory_bytes=memory, io_bytes=64).run()
        if passes == 1:  # several may merge segments between, which moves where a full map stops
            assert report.passes == 1
            assert batches_of(path) == expected
        newest = {r.key: r for b in expected if not b.control for r in b.records}
        assert {r.key: (r.offset, r.value) for r in log} == {
            key: (r.offset, r.value) for key, r in newest.items()
        }
        check_invariants(log)


# ---- the progress in the root's checkpoint ----

FORGETFUL = {"cleanup.policy": "compact", "segment.bytes": 1024, "delete.retention.ms": 0,
             "min.cleanable.dirty.ratio": 0.0}  # fmt: skip


def compact_thrice(log: Partition) -> None:
    for _ in range(3):
        for number in range(20):
            log.append(b"more" + b"x" * 100, key=b"g%d" % number, durability="os")
        log.roll()
        Compactor(log).run()


def test_a_new_topic_does_not_inherit_the_compaction_of_an_old_one(tmp_path: Path) -> None:
    store = logstore.open(tmp_path / "store")
    log = store.create_topic("t", config=FORGETFUL)[0]
    for number in range(100):
        log.append(b"old" + b"x" * 100, key=b"k%d" % (number % 7), durability="os")
    log.roll()
    Compactor(log).run()
    store.checkpoint()
    store.delete_topic("t")
    log = store.create_topic("t", config=FORGETFUL)[0]
    log.append(b"secret", key=b"alice")
    log.append(None, key=b"alice")
    for number in range(100):
        log.append(b"fill" + b"x" * 100, key=b"f%d" % number, durability="os")
    log.sync()
    copy = tmp_path / "as a crash leaves it"
    shutil.copytree(tmp_path / "store", copy)
    store.close()
    with logstore.open(copy) as again:
        log = again["t"][0]
        assert log.first_dirty_offset == 0
        compact_thrice(log)
        assert log.get(b"alice") is None


def test_a_cut_lowers_what_only_the_root_knows_of_compaction(tmp_path: Path) -> None:
    with logstore.open(tmp_path) as store:
        log = store.create_topic("t", config=FORGETFUL)[0]
        for number in range(101):
            log.append(b"old" + b"x" * 100, key=b"k%d" % number, durability="os")
        log.roll()
        Compactor(log).run()
    (tmp_path / "t-0" / "logstore.cleaner").unlink()  # a broker has only the root's
    with logstore.open(tmp_path) as store:
        log = store["t"][0]
        assert log.first_dirty_offset == 101
        log.truncate(10)
        log.append(b"secret", key=b"alice")
        log.append(None, key=b"alice")
        for number in range(150):
            log.append(b"f" + b"x" * 100, key=b"f%d" % number, durability="os")
        assert log.first_dirty_offset <= 10
        compact_thrice(log)
        assert log.get(b"alice") is None


def test_a_truncation_to_offsets_that_were_compacted_away_moves_the_start(
    make_log: MakeLog,
) -> None:
    """No record below the cut is left, and the segment that begins at the cut is the first."""
    log = make_log()
    log.extend([Record(b"1", key=b"a"), Record(b"2", key=b"a")])
    log.roll()
    Compactor(log).run()
    log.append(b"3", key=b"b")
    log.truncate(1)
    assert (log.start_offset, log.end_offset) == (1, 1)
    check_invariants(log)
    assert log.append(b"4", key=b"c") == 1
    log.close()
    with Partition.open(log.path) as again:
        assert (again.start_offset, again.end_offset) == (1, 2)
        check_invariants(again)
