"""What append, extend and a writer admit, refuse, and promise."""

from __future__ import annotations

import datetime
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from logstore import (
    BatchEncoder,
    ClosedError,
    ConfigError,
    DiskFullError,
    IndeterminateAppendError,
    InterruptedAppendError,
    InvalidRecordError,
    ManualClock,
    Partition,
    PartitionConfig,
    Record,
    RecordTooLargeError,
)
from tests.conftest import MakeLog
from tests.kit import join

UTC = datetime.UTC


def test_offsets_count_up_from_zero(log: Partition) -> None:
    assert log.append(b"a") == 0
    assert log.extend([b"b", b"c"]) == range(1, 3)
    assert log.append(b"d") == 3
    assert log.end_offset == 4


def test_a_record_comes_back_as_it_went_in(log: Partition) -> None:
    headers = [("h", b"1"), ("h", None), ("ü", b""), ("", b"x")]
    log.append(b"value", key=b"key", headers=headers, timestamp=1234)
    record = log[0]
    assert (record.value, record.key, record.timestamp) == (b"value", b"key", 1234)
    assert record.headers == tuple(headers)
    assert (record.topic, record.partition, record.offset) == ("orders", 0, 0)


@pytest.mark.parametrize("value", [b"", b"x" * 500_000, bytearray(b"ba"), memoryview(b"mv")])
def test_any_bytes_like_value_is_stored_as_bytes(log: Partition, value: bytes) -> None:
    log.append(value)
    log.extend([value])
    assert [record.value for record in log] == [bytes(value)] * 2


def test_a_tombstone_needs_a_key(log: Partition) -> None:
    log.append(None, key=b"k")
    assert log[0].value is None
    for attempt in (
        lambda: log.append(None),
        lambda: log.extend([None]),  # type: ignore[list-item]
        lambda: Record(None),
    ):
        with pytest.raises(InvalidRecordError, match="needs a key"):
            attempt()
    assert log.end_offset == 1


@pytest.mark.parametrize(
    ("kwargs", "error", "hint"),
    [
        ({"value": "text"}, TypeError, "encode"),
        ({"value": 5}, TypeError, "bytes or None, not int"),
        ({"value": b"v", "key": "k"}, TypeError, "encode"),
        ({"value": b"v", "headers": {"a": b"b"}}, TypeError, "pairs"),
        ({"value": b"v", "headers": "ab"}, TypeError, "pairs"),
        ({"value": b"v", "headers": [("a",)]}, ValueError, "pair"),
        ({"value": b"v", "headers": [("a", b"1", 2)]}, ValueError, "pair"),
        ({"value": b"v", "headers": [(b"a", b"1")]}, TypeError, "name must be str"),
        ({"value": b"v", "headers": [("a", "1")]}, TypeError, "encode"),
        ({"value": b"v", "headers": [5]}, TypeError, "pair"),
        ({"value": b"v", "timestamp": -1}, ValueError, "negative"),
        ({"value": b"v", "timestamp": 1.5}, TypeError, "milliseconds"),
        ({"value": b"v", "timestamp": "now"}, TypeError, "milliseconds"),
        ({"value": b"v", "timestamp": 1 << 70}, OverflowError, "int too"),
        ({"value": b"v", "timestamp": datetime.datetime(2026, 1, 1)}, ValueError, "time zone"),
        ({"value": b"v", "durability": "maybe"}, ConfigError, "'fsync'"),
    ],
)
def test_bad_input_is_refused_with_a_hint_and_nothing_is_appended(
    log: Partition, kwargs: dict[str, object], error: type[Exception], hint: str
) -> None:
    with pytest.raises(error, match=hint):
        log.append(**kwargs)  # type: ignore[arg-type]
    assert log.end_offset == 0
    assert log.append(b"fine") == 0


def test_extend_is_all_or_nothing_when_a_record_is_bad(log: Partition) -> None:
    for bad in ("text", 5, None):
        with pytest.raises((TypeError, InvalidRecordError)):
            log.extend([b"a", b"b", bad])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="many records"):
        log.extend(b"bytes")  # type: ignore[arg-type]
    assert log.end_offset == 0
    assert log.extend([]) == range(0, 0)
    assert log.extend(iter([b"a"])) == range(0, 1)


def test_extend_from_a_failing_iterator_appends_nothing(log: Partition) -> None:
    def records():  # type: ignore[no-untyped-def]
        yield b"a"
        raise LookupError("my own")

    with pytest.raises(LookupError, match="my own"):
        log.extend(records())
    assert log.end_offset == 0


def test_a_datetime_with_a_zone_is_a_timestamp(log: Partition) -> None:
    log.append(b"v", timestamp=datetime.datetime(2026, 1, 1, 12, tzinfo=UTC))
    assert log[0].timestamp == 1_767_268_800_000


def test_without_a_timestamp_a_record_gets_the_clock_of_the_append(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    log = make_log(clock=fake_clock)
    fake_clock.now_ms = 5000
    log.append(b"a")
    fake_clock.now_ms = 6000
    log.extend([b"b", Record(b"c", timestamp=7)])
    with log.writer() as out:
        out.append(b"d")
    assert [record.timestamp for record in log] == [5000, 6000, 7, 6000]


def test_the_system_clock_is_the_default(log: Partition) -> None:
    before = time.time_ns() // 1_000_000
    log.append(b"v")
    assert before <= log[0].timestamp <= time.time_ns() // 1_000_000


def test_log_append_time_overrides_and_never_goes_back(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    log = make_log(clock=fake_clock, message_timestamp_type="LogAppendTime")
    fake_clock.now_ms = 5000
    log.append(b"a", timestamp=1)
    fake_clock.now_ms = 4000
    log.extend([Record(b"b", timestamp=9_999_999)])
    assert [record.timestamp for record in log] == [5000, 5000]


def test_timestamps_far_from_now_are_refused_when_configured(
    make_log: MakeLog, fake_clock: ManualClock
) -> None:
    log = make_log(
        clock=fake_clock,
        message_timestamp_before_max_ms=1000,
        message_timestamp_after_max_ms=2000,
    )
    now = fake_clock.now_ms
    log.append(b"a", timestamp=now - 1000)
    log.append(b"a", timestamp=now + 2000)
    with pytest.raises(InvalidRecordError, match=r"before\.max\.ms allows 1000"):
        log.append(b"a", timestamp=now - 1001)
    with pytest.raises(InvalidRecordError, match=r"after\.max\.ms allows 2000"):
        log.extend([b"b", Record(b"a", timestamp=now + 2001)])
    assert log.end_offset == 2


def test_a_record_too_large_is_refused_with_both_numbers(make_log: MakeLog) -> None:
    log = make_log(max_message_bytes=1000)
    with pytest.raises(RecordTooLargeError, match=r"takes \d+ bytes .* allows 1000") as caught:
        log.append(b"x" * 1000)
    assert caught.value.limit == 1000
    assert caught.value.size > 1000
    with pytest.raises(RecordTooLargeError), log.writer() as out:
        out.append(b"x" * 1000)
    assert log.end_offset == 0
    largest = 1000 - 61 - 2 - 1 - 1 - 1 - 1 - 2 - 1
    log.append(b"x" * largest)
    assert log.segments[0].path.stat().st_size == 1000


def test_extend_larger_than_a_batch_keeps_order_and_range(make_log: MakeLog) -> None:
    log = make_log(max_message_bytes=2000, segment_bytes=16384)
    values = [b"%06d" % i * 10 for i in range(5000)]
    assert log.extend(values) == range(5000)
    assert [record.value for record in log] == values
    assert len(log.segments) > 10
    log.check()


def test_use_after_close_raises_closed_error(log: Partition) -> None:
    log.append(b"a")
    out = log.writer()
    log.close()
    log.close()
    for attempt in (
        lambda: log.append(b"b"),
        lambda: log.extend([b"b"]),
        lambda: log[0],
        lambda: list(log.scan()),
        lambda: log.writer(),
        lambda: log.roll(),
        lambda: log.sync(),
        lambda: log.truncate(0),
    ):
        with pytest.raises(ClosedError):
            attempt()
    with pytest.raises(ClosedError):
        out.append(b"held")


def test_closing_the_log_hands_over_what_its_writers_hold(make_log: MakeLog) -> None:
    log = make_log()
    out = log.writer(linger=None)
    out.extend([b"a", b"b"])
    log.close()
    assert (out.closed, out.pending) == (True, 0)
    assert [record.value for record in make_log()] == [b"a", b"b"]


def test_durable_offset_follows_fsync_only(make_log: MakeLog) -> None:
    log = make_log(durability="os")
    log.append(b"a")
    assert log.durable_offset == 0
    log.append(b"b", durability="fsync")
    assert log.durable_offset == 2
    log.append(b"c")
    assert log.durable_offset == 2
    log.sync()
    assert log.durable_offset == 3


def test_fsync_is_the_default_durability(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "orders-0") as log:
        assert log.durability == "fsync"
        log.append(b"a")
        assert log.durable_offset == 1
        log.append(b"b", durability="os")
        assert log.durable_offset == 1
        with log.writer() as out:
            out.append(b"c")
        assert log.durable_offset == 3


@pytest.mark.parametrize(("codec", "weak", "strong"), [("gzip", 1, 9), ("zstd", -20, 19)])
def test_the_level_of_a_codec_is_a_setting(
    make_log: MakeLog, codec: str, weak: int, strong: int
) -> None:
    value = b"".join(b"%d squared is %d; " % (i, i * i) for i in range(2000))
    sizes = []
    for number, level in enumerate((weak, strong)):
        settings = {"compression_type": codec, f"compression_{codec}_level": level}
        log = make_log(f"{codec}-{number}", **settings)
        log.append(value)
        with log.writer(compression=codec) as out:
            out.append(value)
        with log.writer(compression=codec, compression_level=weak) as out:
            out.append(value)
        sizes.append([len(batch) for batch in log.scan().batches()])
        assert [record.value for record in log] == [value] * 3
    (weak_one, *weak_others), (strong_one, strong_other, asked) = sizes
    assert weak_others == [weak_one] * 2 and strong_other == strong_one
    assert strong_one < weak_one == asked, "a writer may ask for another level"


def test_unknown_settings_name_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'segment\.byte'.*segment\.bytes"):
        Partition.open(tmp_path / "t-0", config={"segment.byte": 1})
    with pytest.raises(ConfigError, match=r"segment\.bytes must be from"):
        PartitionConfig(segment_bytes=3)
    assert PartitionConfig.of({"segment.bytes": 4096}) == PartitionConfig(segment_bytes=4096)
    assert PartitionConfig().as_dict()["max.message.bytes"] == 1_048_588


# ---- writer ----


def test_a_writer_holds_records_until_it_is_flushed(log: Partition) -> None:
    with log.writer(linger=None) as out:
        out.append(b"a")
        out.extend([b"b", Record(b"c", key=b"k")])
        assert (log.end_offset, out.pending) == (0, 3)
        out.flush()
        assert (log.end_offset, out.pending) == (3, 0)
        out.append(b"d")
    assert [record.value for record in log] == [b"a", b"b", b"c", b"d"]
    with pytest.raises(ClosedError):
        out.append(b"e")


def test_a_writer_flushes_even_if_the_block_raises(log: Partition) -> None:
    with pytest.raises(LookupError), log.writer(linger=None) as out:
        out.append(b"a")
        raise LookupError
    assert log.end_offset == 1


def test_a_full_buffer_is_handed_over_in_batches(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1 << 20)
    with log.writer(batch_bytes=4096, linger=None) as out:
        for i in range(30_000):
            out.append(b"%050d" % i)
        assert log.end_offset > 0
    sizes = [len(batch) for batch in log.scan().batches()]
    assert max(sizes) <= 4096
    assert len(sizes) > 300
    assert [record.value for record in log] == [b"%050d" % i for i in range(30_000)]


def test_linger_hands_over_a_partial_buffer(log: Partition) -> None:
    with log.writer(linger=0.05) as out:
        out.append(b"a")
        assert [record.value for record in log.scan(follow=True, timeout=10, max_records=1)] == [
            b"a"
        ]
        assert out.pending == 0


def test_a_dropped_writer_with_records_warns(log: Partition) -> None:
    out = log.writer(linger=None)
    out.append(b"a")
    with pytest.warns(ResourceWarning, match="1 records that are not in the log"):
        del out


def test_a_writer_that_meets_a_full_disk_keeps_its_records(
    log: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log.writer(linger=None) as out:
        out.append(b"a")
        with monkeypatch.context() as patch:

            def full(batches: object) -> range:
                raise DiskFullError(28, "No space left on device")

            patch.setattr(log.parts.appender, "write_batches", full)
            with pytest.raises(DiskFullError):
                out.flush()
            assert out.pending == 1
        out.append(b"b")
    assert [record.value for record in log] == [b"a", b"b"]


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec_round_trips_in_writers_and_by_config(make_log: MakeLog, codec: str) -> None:
    values = [b"value %d " % i * 20 for i in range(2000)]
    log = make_log("by-writer-0")
    with log.writer(compression=codec) as out:
        out.extend(values)
    by_config = make_log("by-config-0", compression_type=codec)
    by_config.extend(values[:1000])
    for value in values[1000:]:
        by_config.append(value)
    for partition in (log, by_config):
        assert [record.value for record in partition] == values
        assert partition[1234].value == values[1234]
        assert {batch[22] & 7 for batch in partition.scan().batches()} == {
            ["none", "gzip", "snappy", "lz4", "zstd"].index(codec)
        }
        partition.check()


def test_an_unknown_codec_is_refused(log: Partition) -> None:
    with pytest.raises(ConfigError, match="gzip"):
        log.writer(compression="brotli")


# ---- threads and signals ----


def test_threads_share_a_partition_and_every_record_is_there_once(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=50_000, durability="fsync")
    taken: list[list[int]] = [[] for _ in range(8)]

    def work(number: int) -> None:
        for i in range(50):
            taken[number].append(log.append(b"%d-%d" % (number, i)))
            taken[number].extend(log.extend([b"%d-x%d-%d" % (number, i, k) for k in range(10)]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(offset for offsets in taken for offset in offsets) == list(range(8 * 50 * 11))
    assert all(offsets == sorted(offsets) for offsets in taken)
    assert log.durable_offset == log.end_offset
    log.check()


def test_threads_share_a_writer_with_scans_beside_it(log: Partition) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                seen = [record.offset for record in log.scan()]
                assert seen == list(range(len(seen)))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    with log.writer(batch_bytes=2000, linger=0.01) as out:
        threads = [
            threading.Thread(target=lambda: [out.append(b"x" * 30) for _ in range(5000)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    stop.set()
    reader.join()
    assert not failures
    assert log.end_offset == 20_000
    assert sum(1 for _ in log) == 20_000


def test_close_while_others_append_and_scan_is_safe(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=20_000)
    log.extend([b"x" * 100] * 1000)
    unexpected: list[BaseException] = []

    def work(act: object) -> None:
        try:
            while True:
                act()  # type: ignore[operator]
        except ClosedError:
            pass
        except BaseException as error:  # noqa: BLE001
            unexpected.append(error)

    acts = [lambda: log.append(b"y"), lambda: list(log), lambda: log[5], lambda: log.tail(3)]
    threads = [threading.Thread(target=work, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    log.close()
    join(threads)
    assert not unexpected
    again = make_log(segment_bytes=20_000)
    assert again.recovery.clean
    again.check()


@pytest.mark.parametrize("act", ["close", "truncate", "trim", "sync"])
def test_fsync_appends_beside_other_acts_do_not_deadlock(make_log: MakeLog, act: str) -> None:
    log = make_log(durability="fsync", segment_bytes=5000)
    log.extend([b"x"] * 50)
    unexpected: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                try:
                    log.append(b"y" * 100)
                except IndeterminateAppendError:
                    if act != "truncate":  # which may cut it off before it is durable
                        raise
        except ClosedError:
            pass
        except BaseException as error:  # noqa: BLE001
            unexpected.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(20):
        if act == "truncate":
            log.truncate(
                max(log.start_offset, log.end_offset - 10) if i % 2 else min(10, log.end_offset)
            )
        elif act == "trim":
            log.trim(i)
        elif act == "sync":
            log.sync()
        time.sleep(0.005)
    log.close()
    join(threads)
    assert not unexpected
    make_log(segment_bytes=5000).check()


def test_an_append_that_is_cut_off_before_it_is_durable_leaves_the_log_usable(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log(durability="fsync")
    log.append(b"a")
    wait_for = log.parts.active.durability.commit.wait_for

    def cut_first(end_offset: int, first_offset: int) -> None:
        monkeypatch.undo()
        log.truncate(first_offset)
        wait_for(end_offset, first_offset)

    encoder = BatchEncoder()
    encoder.append(b"b")
    raw = encoder.take()
    for act in (
        lambda: log.append(b"b"),
        lambda: log.extend([b"b", b"c"]),
        lambda: log.append_batch(raw),
    ):
        monkeypatch.setattr(log.parts.active.durability.commit, "wait_for", cut_first)
        with pytest.raises(IndeterminateAppendError, match="truncated before they were durable"):
            act()
        assert log.failure is None
        assert log.append(b"d") == log.end_offset - 1
    log.check()


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_one_append_waits_for_is_not_confused_with_the_next(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """Another thread fills a batch while the first waits for the disk, and is cut off there."""
    log = make_log(durability="fsync")
    log.append(b"a")
    begun = threading.Event()

    def headers() -> Iterator[tuple[str, bytes]]:
        begun.set()
        yield "h", b"v"

    def append_another() -> None:
        log.append(b"c", headers=headers(), durability="os")

    def cut_off(end_offset: int, first_offset: int) -> None:
        monkeypatch.undo()
        other.start()  # and stops at the lock, its batch complete
        begun.wait()
        time.sleep(0.1)
        if interrupted:
            raise KeyboardInterrupt
        raise IndeterminateAppendError("truncated", offsets=range(first_offset, end_offset))

    for act in (lambda: log.append(b"b"), lambda: log.extend([b"b"])):
        begun.clear()
        other = threading.Thread(target=append_another)
        monkeypatch.setattr(log.parts.active.durability.commit, "wait_for", cut_off)
        with (
            log.parts.view.lock,
            pytest.raises(InterruptedAppendError if interrupted else IndeterminateAppendError),
        ):
            act()
        other.join()
        assert log.failure is None
    assert [record.value for record in log] == [b"a", b"b", b"c", b"b", b"c"]


def test_interrupts_leave_one_of_three_outcomes(make_log: MakeLog) -> None:
    log = make_log(durability="os", segment_bytes=100_000)
    returned: dict[int, bytes] = {}
    maybe: set[int] = set()
    refused: set[bytes] = set()
    armed = True

    def interrupt(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
    count = 0
    enough = time.monotonic() + 2

    def is_enough() -> bool:
        now = time.monotonic()
        return now >= enough and (bool(maybe) or now >= enough + 60)

    def append_until_interrupted() -> None:
        nonlocal count
        while not is_enough():
            value = b"%d" % count
            count += 1
            try:
                offset = log.append(value, durability="fsync" if count % 3 == 0 else None)
                returned[offset] = value
            except KeyboardInterrupt as error:
                offsets = getattr(error, "offsets", None)
                if offsets is None:
                    refused.add(value)
                else:
                    maybe.update(offsets)

    try:
        while not is_enough():
            try:
                append_until_interrupted()
            except KeyboardInterrupt:
                continue  # it came between two appends
    except KeyboardInterrupt:
        pass
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    stored = {record.offset: record.value for record in log}
    assert all(stored[offset] == value for offset, value in returned.items())
    assert maybe
    assert maybe <= set(stored)
    log.check()
    log.close()
    assert make_log(segment_bytes=100_000).end_offset == len(stored)
