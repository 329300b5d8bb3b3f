"""Reading: by offset, slices, scans, time, tail, following, columns."""

from __future__ import annotations

import datetime
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from logstore import (
    ConfigError,
    ManualClock,
    OffsetOutOfRangeError,
    Partition,
    PartitionConfig,
    Record,
    RecordNotFoundError,
)
from logstore.log.segment import Segment
from logstore.testing.reference import ReferenceRecord, encode_batch
from logstore.waking import Gate
from tests.conftest import MakeLog
from tests.kit import values


@pytest.fixture
def ten(make_log: MakeLog) -> Partition:
    """Ten records in several segments; record i has the value b"i" and the timestamp 100 * i."""
    log = make_log(segment_bytes=1024, index_interval_bytes=0)
    for i in range(10):
        log.append(b"%d" % i, key=b"x" * 300, timestamp=100 * i)
    assert len(log.segments) > 2
    return log


def test_an_index_counts_from_either_end(ten: Partition) -> None:
    assert values([ten[0], ten[9], ten[-1], ten[-10]]) == [b"0", b"9", b"9", b"0"]
    for offset in (10, -11, 1 << 40):
        with pytest.raises(OffsetOutOfRangeError) as caught:
            ten[offset]
        assert (caught.value.start, caught.value.end) == (0, 10)
    with pytest.raises(IndexError):
        ten[10]


@pytest.mark.parametrize(
    "part",
    [
        slice(None), slice(3, 6), slice(-3, None), slice(None, -8), slice(5, 5), slice(8, 3),
        slice(7, 100), slice(-100, 2), slice(20, None),
    ],
)  # fmt: skip
def test_slices_are_those_of_a_list(ten: Partition, part: slice) -> None:
    assert values(ten[part]) == [b"%d" % i for i in range(10)][part]


def test_a_slice_has_no_step(ten: Partition) -> None:
    with pytest.raises(ValueError, match="step"):
        ten[::2]


def test_a_scan_can_be_iterated_again_and_sees_what_came_since(ten: Partition) -> None:
    scan = ten.scan(8)
    assert values(scan) == [b"8", b"9"]
    assert scan.next_offset == 10
    ten.append(b"10")
    assert values(scan) == [b"8", b"9", b"10"]
    assert values(ten.scan(2, 4)) == [b"2", b"3"]
    assert values(ten.scan(max_records=3)) == [b"0", b"1", b"2"]
    assert values(ten.scan(max_records=0)) == []


def test_next_offset_resumes_a_scan(ten: Partition) -> None:
    scan = ten.scan(max_records=4)
    assert values(scan) == [b"0", b"1", b"2", b"3"]
    assert values(ten.scan(scan.next_offset)) == [b"%d" % i for i in range(4, 10)]


def test_a_scan_without_follow_ends_although_records_arrive(log: Partition) -> None:
    log.append(b"0")
    seen = []
    for record in log.scan():
        seen.append(record.value)
        log.append(b"more")
        assert len(seen) < 5
    assert seen == [b"0"]


def test_wrong_scan_arguments_say_so(ten: Partition) -> None:
    with pytest.raises(OffsetOutOfRangeError):
        ten.scan(-1)
    with pytest.raises(ConfigError):
        ten.scan(isolation="dirty")
    with pytest.raises(ValueError, match="on_corrupt"):
        ten.scan(on_corrupt="ignore")
    with pytest.raises(ValueError, match="max_records"):
        ten.scan(max_records=-1)
    with pytest.raises(ValueError, match="timeout"):
        ten.scan(follow=True).to_arrow()


@pytest.mark.parametrize("n", [0, 1, 3, 10, 50])
def test_tail_gives_the_last_n_in_order(ten: Partition, n: int) -> None:
    assert values(ten.tail(n)) == [b"%d" % i for i in range(10)][max(0, 10 - n) :][: n or None]


def test_tail_of_nothing_is_empty(log: Partition) -> None:
    assert log.tail(5) == []
    with pytest.raises(ValueError, match="negative"):
        log.tail(-1)


def test_an_empty_log_has_nothing_anywhere(log: Partition) -> None:
    assert (list(log), log.start_offset, log.end_offset) == ([], 0, 0)
    assert log.offset_for_time(0) == 0
    assert log.scan().to_arrow().num_rows == 0
    assert list(log.scan().columns()) == []
    with pytest.raises(OffsetOutOfRangeError):
        log[0]


# ---- time ----


@pytest.mark.parametrize(
    ("when", "offset"), [(0, 0), (1, 1), (100, 1), (850, 9), (900, 9), (901, 10)]
)
def test_offset_for_time_is_the_first_record_not_older(
    ten: Partition, when: int, offset: int
) -> None:
    assert ten.offset_for_time(when) == offset
    moment = datetime.datetime.fromtimestamp(when / 1000, datetime.UTC)
    assert ten.offset_for_time(moment) == offset


def test_offset_for_time_with_times_out_of_order(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=2000, index_interval_bytes=100)
    times = [(i * 7919) % 1000 for i in range(300)]
    for moment in times:
        log.append(b"x" * 20, timestamp=moment)
    for target in range(0, 1001, 13):
        expected = next((i for i, moment in enumerate(times) if moment >= target), len(times))
        assert log.offset_for_time(target) == expected


def test_offset_for_time_respects_a_trimmed_start(ten: Partition) -> None:
    ten.trim(4)
    assert ten.offset_for_time(0) == 4
    with pytest.raises(ValueError, match="time zone"):
        ten.offset_for_time(datetime.datetime(2026, 1, 1))


# ---- follow ----


def test_follow_wakes_up_without_polling(log: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader waits without a time-out, once for each append, and the append wakes it."""
    wait, timeouts, waiting = Gate.wait, [], threading.Semaphore(0)

    def waits(gate: Gate, timeout: float | None = None) -> bool:
        if threading.current_thread() is reader:
            timeouts.append(timeout)
            waiting.release()
        return wait(gate, timeout)

    monkeypatch.setattr(Gate, "wait", waits)
    seen: list[bytes | None] = []
    reader = threading.Thread(
        target=lambda: seen.extend(r.value for r in log.scan(follow=True, max_records=3)),
        daemon=True,
    )
    reader.start()
    for i in range(3):
        assert waiting.acquire(timeout=30), "the reader does not wait for appends"
        log.append(b"%d" % i)
    reader.join(30)
    assert not reader.is_alive(), "an append does not wake the reader"
    assert seen == [b"0", b"1", b"2"]
    assert timeouts == [None] * 3


def test_follow_ends_after_an_idle_timeout(log: Partition) -> None:
    log.extend([b"a", b"b"])
    assert values(log.scan(follow=True, timeout=0.05)) == [b"a", b"b"]
    assert values(log.scan(5, follow=True, timeout=0.05)) == []


def test_follow_goes_on_over_rolls(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    got: list[int] = []
    reader = threading.Thread(
        target=lambda: got.extend(r.offset for r in log.scan(follow=True, max_records=500))
    )
    reader.start()
    for _ in range(500):
        log.append(b"x" * 100)
    reader.join(60)
    assert got == list(range(500))


def test_a_follower_is_told_when_the_log_is_closed(log: Partition) -> None:
    errors: list[BaseException] = []

    def read() -> None:
        try:
            list(log.scan(follow=True))
        except ValueError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.05)
    log.close()
    reader.join(60)
    assert not reader.is_alive()
    assert errors


def test_following_columns_hands_out_what_is_there(log: Partition) -> None:
    log.extend([b"a", b"b"])
    chunks = list(log.scan(follow=True, timeout=0.05).columns())
    assert sum(map(len, chunks)) == 2


# ---- columns ----


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("rows", [1, 7, 1000, 65536])
def test_columns_equal_records(make_log: MakeLog, rows: int, codec: str) -> None:
    log = make_log(segment_bytes=30_000)
    with log.writer(compression=codec, batch_bytes=3000) as out:
        for i in range(1500):
            out.append(
                b"v" * (i % 300) if i % 5 else None,
                key=None if i % 3 == 0 and i % 5 else b"k%d" % i,
                headers=[("h", b"%d" % i), ("n", None)] if i % 4 == 0 else (),
                timestamp=i,
            )
    records = list(log)
    chunks = list(log.scan().columns(rows))
    assert all(len(chunk) <= rows for chunk in chunks)
    assert [o for c in chunks for o in c.offsets.tolist()] == [r.offset for r in records]
    assert [t for c in chunks for t in c.timestamps.tolist()] == [r.timestamp for r in records]
    assert [v for c in chunks for v in c.values] == [r.value for r in records]
    assert [k for c in chunks for k in c.keys] == [r.key for r in records]
    assert [c.headers(i) for c in chunks for i in range(len(c))] == [r.headers for r in records]
    lengths = np.concatenate([c.values.lengths for c in chunks])
    assert lengths.tolist() == [len(r.value or b"") for r in records]
    nulls = np.concatenate([c.keys.is_null for c in chunks])
    assert nulls.tolist() == [r.key is None for r in records]


def test_tombstones_are_a_field_that_copies_no_value(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=30_000)
    with log.writer(batch_bytes=3000) as out:
        for i in range(1500):
            # Runs of records of one shape, and records of changing shapes: two paths in C.
            dead = i % 3 == 0 if i < 700 else i // 200 % 2 == 0
            out.append(None if dead else b"v" * 20, key=b"%d" % i)
    chunks = list(log.scan(5).columns(100, fields=["offset", "tombstone"]))
    told = [(o, t) for c in chunks for o, t in zip(c.offsets, c.tombstones, strict=True)]
    assert told == [(r.offset, r.value is None) for r in log.scan(5)]
    with pytest.raises(ValueError, match="no values"):
        _ = chunks[0].values
    with pytest.raises(ValueError, match="no tombstones"):
        _ = next(log.scan().columns()).tombstones
    table = log.scan(0, 4).to_arrow(fields=["tombstone"])
    assert table.to_pydict() == {"tombstone": [True, False, False, True]}


def test_columns_respect_bounds_and_fields(ten: Partition) -> None:
    (chunk,) = ten.scan(3, 7).columns(fields=["value"])
    for field in ("offset", "timestamp", "key"):
        with pytest.raises(ValueError, match=f"no {field}s: add '{field}' to fields="):
            getattr(chunk, f"{field}s")
    assert list(chunk.values) == [b"3", b"4", b"5", b"6"]
    assert [len(c) for c in ten.scan(max_records=5).columns(rows=2)] == [2, 2, 1]
    with pytest.raises(ValueError, match="unknown fields"):
        list(ten.scan().columns(fields=["colour"]))
    with pytest.raises(ValueError, match="rows"):
        list(ten.scan().columns(rows=-1 << 40))


def test_arrow_and_pandas_have_all_fields(log: Partition) -> None:
    log.append(b"v", key=b"k", headers=[("h", b"1"), ("h", None)], timestamp=5)
    log.append(None, key=b"", timestamp=6)
    table = log.scan().to_arrow()
    assert table.column_names == ["offset", "timestamp", "key", "value", "headers"]
    assert table.column("value").to_pylist() == [b"v", None]
    assert table.column("key").to_pylist() == [b"k", b""]
    assert table.column("headers").to_pylist() == [
        [{"key": "h", "value": b"1"}, {"key": "h", "value": None}],
        [],
    ]
    table.validate(full=True)
    frame = log.scan().to_pandas()
    assert frame["offset"].tolist() == [0, 1]
    assert log.scan().to_arrow(fields=["value"]).column_names == ["value"]


def test_columns_outlive_their_scan_and_log(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([b"%d" % i for i in range(100)])
    (chunk,) = log.scan().columns()
    log.close()
    assert chunk.values[57] == b"57"


# ---- records ----


def test_a_record_shows_what_you_would_type() -> None:
    record = Record(b"v", key=b"k", headers=[("h", b"1")], timestamp=5)
    assert repr(record) == "Record(b'v', key=b'k', headers=(('h', b'1'),), timestamp=5)"
    assert record == Record(b"v", key=b"k", headers=(("h", b"1"),), timestamp=5)
    assert record != Record(b"v")
    assert len({record, Record(b"v", key=b"k", headers=[("h", b"1")], timestamp=5)}) == 1
    with pytest.raises(AttributeError):
        record.value = b"x"  # type: ignore[misc]
    assert (Record(b"v").offset, Record(b"v").timestamp) == (None, None)


def test_records_of_one_log_can_be_extended_into_another(make_log: MakeLog) -> None:
    source, target = make_log("source-0"), make_log("target-0")
    source.append(b"v", key=b"k", headers=[("h", None)], timestamp=77)
    target.append(b"first")
    assert target.extend(source) == range(1, 2)
    assert (target[1].timestamp, target[1].headers) == (77, (("h", None),))


# ---- trimming and truncating ----


def test_trim_moves_the_start_and_deletes_whole_segments(ten: Partition) -> None:
    before = len(ten.segments)
    ten.trim(5)
    assert (ten.start_offset, ten.end_offset) == (5, 10)
    assert len(ten.segments) < before
    assert values(ten) == [b"5", b"6", b"7", b"8", b"9"]
    with pytest.raises(OffsetOutOfRangeError):
        ten[4]
    assert values(ten.scan(0, on_lost="skip")) == values(ten)
    ten.trim(3)
    assert ten.start_offset == 5
    with pytest.raises(OffsetOutOfRangeError):
        ten.trim(11)


def test_a_scan_from_below_the_start_raises_unless_told(ten: Partition) -> None:
    ready = ten.scan(2)  # made before, iterated after
    done = ten.scan(0, 4)
    assert values(done) == [b"0", b"1", b"2", b"3"]
    ten.trim(5)
    assert (ready.next_offset, done.next_offset) == (2, 4)
    for read in (
        lambda: ten.scan(4),
        lambda: ten.scan(0, 3),
        lambda: ten[0:],
        lambda: ten[4:8],
        lambda: list(ready),
        lambda: list(ready.columns()),
        lambda: list(ready.batches()),
        lambda: ten.scan(done.next_offset),
    ):
        with pytest.raises(OffsetOutOfRangeError) as caught:
            read()
        assert (caught.value.start, caught.value.end) == (5, 10)
    rest = [b"5", b"6", b"7", b"8", b"9"]
    assert values(ten.scan(5)) == values(ten[5:]) == values(ten[:]) == values(ten.scan()) == rest
    assert values(ten[-100:]) == values(ten[-100:10]) == rest
    assert values(ten.scan(0, on_lost="skip")) == rest
    assert values(ten.scan(0, 3, on_lost="skip")) == []
    with pytest.raises(ValueError, match="on_lost must be 'raise' or 'skip', not 'ignore'"):
        ten.scan(on_lost="ignore")


def test_a_scan_that_skips_what_is_lost_is_overtaken_by_a_trim(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    for _ in range(30):
        log.append(b"x" * 200)
    for reader in (log, make_log(readonly=True)):
        records = iter(reader.scan(0 if reader is log else 5, on_lost="skip"))
        seen = [next(records).offset]
        log.trim(5 if reader is log else 25)
        seen += [record.offset for record in records]
        assert seen == sorted(seen)
        assert seen[-5:] == list(range(25, 30))


def test_a_reader_that_falls_behind_a_trim_learns_the_new_start(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    log.extend([b"x" * 200 for _ in range(3)])
    for _ in range(30):
        log.append(b"x" * 200)
    reader = iter(log.scan())
    next(reader)
    log.trim(25)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        list(reader)
    assert caught.value.start == 25


def test_trim_of_everything_leaves_an_empty_log_that_goes_on(
    ten: Partition, make_log: MakeLog
) -> None:
    ten.trim(10)
    assert (list(ten), ten.start_offset, ten.end_offset) == ([], 10, 10)
    ten.close()
    again = make_log(segment_bytes=1024, index_interval_bytes=0)
    assert again.append(b"10") == 10


@pytest.mark.parametrize("end", range(11))
def test_truncate_keeps_every_record_below(make_log: MakeLog, end: int) -> None:
    log = make_log(segment_bytes=1024, index_interval_bytes=0)
    log.append(b"0", timestamp=0)
    log.extend([Record(b"%d" % i, key=b"x" * 100, timestamp=i) for i in range(1, 7)])
    log.extend([Record(b"%d" % i, key=b"x" * 100, timestamp=i) for i in range(7, 10)])
    log.truncate(end)
    assert log.end_offset == end
    assert values(log) == [b"%d" % i for i in range(end)]
    assert [record.timestamp for record in log] == list(range(end))
    log.check()
    assert log.append(b"new", timestamp=50) == end
    assert log.offset_for_time(50) == end
    log.close()
    again = make_log(segment_bytes=1024, index_interval_bytes=0)
    assert values(again) == [b"%d" % i for i in range(end)] + [b"new"]
    again.check()
    with pytest.raises(OffsetOutOfRangeError):
        again.truncate(end + 2)


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_truncate_inside_a_compressed_batch_keeps_codec_and_records(
    make_log: MakeLog, codec: str
) -> None:
    log = make_log(compression_type=codec)
    log.extend([b"%d" % i * 50 for i in range(100)])
    log.truncate(42)
    assert values(log) == [b"%d" % i * 50 for i in range(42)]
    assert [batch[22] & 7 for batch in log.scan().batches()] != [0]


def test_truncate_of_log_append_time_keeps_the_time(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    log = make_log(clock=fake_clock, message_timestamp_type="LogAppendTime")
    fake_clock.now_ms = 5000
    log.extend([b"a", b"b", b"c"])
    fake_clock.now_ms = 9000
    log.truncate(2)
    assert [record.timestamp for record in log] == [5000, 5000]


def test_read_batches_gives_whole_batches_around_an_offset(log: Partition) -> None:
    log.extend([b"a", b"b"])
    log.extend([b"c", b"d"])
    first, second = log.read_batches(0)
    assert log.read_batches(1, max_bytes=1) == [first]
    assert log.read_batches(2) == [second]
    assert log.read_batches(4) == []
    with pytest.raises(OffsetOutOfRangeError):
        log.read_batches(5)


def test_a_control_record_is_not_found_and_not_scanned(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    path.mkdir()
    marker = ReferenceRecord(offset=0, timestamp=1, key=bytes([0, 0, 0, 1]), value=bytes(6))
    data = ReferenceRecord(offset=1, timestamp=1, key=None, value=b"data")
    (path / f"{0:020d}.log").write_bytes(
        encode_batch([marker], control=True, transactional=True, producer_id=7, producer_epoch=0)
        + encode_batch([data], base_offset=1)
    )
    with Partition.open(path, durability="os") as log:
        assert values(log) == [b"data"]
        assert values(log.tail(2)) == [b"data"]
        with pytest.raises(RecordNotFoundError) as caught:
            log[0]
        assert caught.value.offset == 0


def test_random_access_again_and_again_in_batches_of_uneven_records(make_log: MakeLog) -> None:
    """A batch that was valid once is read in part the next time, by its size now."""
    log = make_log(index_interval_bytes=500)
    batches = [
        [b"%d" % i * (1 + (i * 7919) % 997) for i in range(k, k + 60)] for k in range(0, 600, 60)
    ]
    batches[3][0] = b"huge" * 50_000
    for batch in batches:
        log.extend(batch)
    expected = [value for batch in batches for value in batch]
    for _ in range(3):
        assert [log[offset].value for offset in range(600)] == expected
    log.truncate(200)
    log.extend([b"new %d" % i for i in range(200, 600)])
    for _ in range(2):
        assert [log[offset].value for offset in range(200, 600)] == [
            b"new %d" % i for i in range(200, 600)
        ]


def test_a_chunk_of_columns_holds_one_kind_of_timestamps(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([Record(b"ours", timestamp=5)] * 10)
    path = log.path
    log.close()
    by_log = PartitionConfig(message_timestamp_type="LogAppendTime")
    with Partition.open(path, config=by_log, clock=ManualClock(1_000)) as again:
        again.extend([Record(b"the log's", timestamp=5)] * 10)
        again.append(b"one more")
    with Partition.open(path) as once_more:
        once_more.extend([Record(b"ours", timestamp=6)] * 3)
        chunks = list(once_more.scan().columns())
        kinds = [(chunk.timestamp_type, len(chunk)) for chunk in chunks]
        assert kinds == [(0, 10), (1, 11), (0, 3)]
        times = [t for chunk in chunks for t in chunk.timestamps]
        assert times == [5] * 10 + [1_000] * 11 + [6] * 3
        assert once_more.scan().to_arrow().num_rows == 24


def test_a_located_batch_lies_where_it_says(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1 << 14)
    for number in range(40):
        log.extend([b"x" * 400, b"%d" % number])
    assert len(log.segments) > 1
    located = list(log.scan(3, 70).located_batches())
    assert [batch.raw for batch in located] == list(log.scan(3, 70).batches())
    for path, position, raw in located:
        with open(path, "rb") as file:
            file.seek(position)
            assert file.read(len(raw)) == raw


def test_get_ends_if_the_segments_below_it_are_deleted_meanwhile(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    for _ in range(4):
        log.extend([Record(b"v", key=b"k")] * 5)
        log.roll()
    log.append(b"v", key=b"k")
    newest_of, looks = Segment.newest_of, 0

    def newest_of_after_a_trim(segment: Segment, key: bytes, start: int = 0) -> int:
        nonlocal looks
        looks += 1
        assert looks < 50, "get looks at the same segment again and again"
        if looks == 1:
            log.trim(15)
        return newest_of(segment, key, start)

    monkeypatch.setattr(Segment, "newest_of", newest_of_after_a_trim)
    assert log.get(b"absent") is None
    assert log.get(b"k") is not None
