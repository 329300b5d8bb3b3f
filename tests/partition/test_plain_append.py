"""append_plain: what it takes is in the log as `append_batch` would have written it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from logstore import BatchEncoder, ManualClock, Partition, Record
from logstore.errors import (
    IndeterminateAppendError,
    InvalidRecordError,
    LogStoreError,
    RecordTooLargeError,
)
from logstore.format.batch import BatchHeader, with_header, with_producer
from logstore.partition.raw.plain_append import append_plain
from tests.campaign import sized

NOW = 1_700_000_000_000


def encoded(*records: Record | bytes, compression: str | None = None) -> bytes:
    made = BatchEncoder(compression=compression)
    made.extend(records)
    return made.take()


def record(value: bytes = b"x", *, time: int = NOW, key: bytes | None = b"k") -> Record:
    return Record(value, key=key, timestamp=time)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
def log(tmp_path: Path, clock: ManualClock) -> Iterator[Partition]:
    with Partition.open(tmp_path / "t-0", clock=clock, durability="os") as opened:
        opened.append(b"first", timestamp=NOW)
        yield opened
        opened.check()


def test_a_plain_batch_is_in_the_log_at_the_offsets_that_are_returned(log: Partition) -> None:
    raw = encoded(record(b"a"), record(b"b"))
    assert append_plain(log.parts.active, memoryview(raw)) == range(1, 3)
    assert append_plain(log.parts.active, bytearray(raw)) == range(3, 5)
    assert [each.value for each in log] == [b"first", b"a", b"b", b"a", b"b"]
    assert log.end_offset == 5


def test_the_bytes_are_those_of_append_batch(tmp_path: Path, clock: ManualClock) -> None:
    """Also in the indexes: batches of many sizes, over several segments."""
    files = []
    dice = random.Random(5)
    batches = [
        encoded(*[record(dice.randbytes(dice.randrange(3000)), time=NOW + n) for n in range(4)])
        for _ in range(60)
    ]
    for name in ("one-0", "two-0"):
        config = {"segment.bytes": 1 << 16, "index.interval.bytes": 1024}
        with Partition.open(tmp_path / name, clock=clock, config=config, durability="os") as log:
            log.append(b"first", timestamp=NOW)
            for raw in batches:
                plain = name == "one-0" and append_plain(log.parts.active, raw) is not None
                if not plain:
                    log.append_batch(raw)
            log.check()
        endings = (".log", ".index", ".timeindex")
        files.append(
            {
                each.name: each.read_bytes()
                for each in sorted((tmp_path / name).iterdir())
                if each.suffix in endings
            }
        )
    assert len(files[0]) > 6
    assert files[0] == files[1]


def damaged(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


def late_maximum(raw: bytes) -> bytes:
    """A batch whose header has a greater time than its records."""
    header = BatchHeader.parse(raw)
    return with_header(header._replace(max_timestamp=NOW + 5), raw[61:])


OTHERS = {
    "empty": b"",
    "a wrong checksum": damaged(encoded(record())),
    "cut": encoded(record())[:-1],
    "two batches": encoded(record()) * 2,
    "compressed": encoded(record(), compression="gzip"),
    "of a producer": with_producer(
        encoded(record()), producer_id=1, producer_epoch=0, base_sequence=0
    ),
    "a wrong maximum": late_maximum(encoded(record())),
    "too large": encoded(record(b"x" * 2000)),
    "too old": encoded(record(time=NOW - 10_001)),
    "too far ahead": encoded(record(time=NOW + 10_001)),
    "without a key": encoded(record(key=None)),
}
RULES = {
    "max.message.bytes": 1000,
    "message.timestamp.before.max.ms": 10_000,
    "message.timestamp.after.max.ms": 10_000,
    "cleanup.policy": "compact",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_batches_are_left_to_append_batch(
    tmp_path: Path, clock: ManualClock, name: str
) -> None:
    path = tmp_path / "t-0"
    with Partition.open(path, clock=clock, config=RULES, durability="os") as log:
        log.append(b"first", key=b"k", timestamp=NOW)
        assert append_plain(log.parts.active, OTHERS[name]) is None
        assert log.end_offset == 1
        assert append_plain(log.parts.active, encoded(record(time=NOW - 10_000))) == range(1, 2)
        assert append_plain(log.parts.active, encoded(record(time=NOW + 10_000))) == range(2, 3)


@pytest.mark.parametrize(
    "config",
    [{"message.timestamp.type": "LogAppendTime"}, {"compression.type": "gzip"}],
)
def test_a_topic_that_changes_batches_has_no_plain_ones(
    log: Partition, config: dict[str, str]
) -> None:
    raw = encoded(record())
    assert append_plain(log.parts.active, raw) == range(1, 2)
    log.parts.appender.reconfigure(log.config.with_settings(config))
    assert append_plain(log.parts.active, raw) is None
    assert log.append_batch(raw).offsets == range(2, 3)


def test_mutated_batches_are_taken_only_if_append_batch_takes_them(
    tmp_path: Path, clock: ManualClock
) -> None:
    """The checksum is made right again: the checks after it are asked."""
    dice = random.Random(11)
    whole = encoded(*[record(b"v" * n, key=b"k" if n % 2 else None) for n in range(5)])
    taken = 0
    with (
        Partition.open(tmp_path / "a-0", clock=clock, durability="os") as one,
        Partition.open(tmp_path / "b-0", clock=clock, durability="os") as other,
    ):
        for log in (one, other):
            log.append(b"first", timestamp=NOW)
        for _ in range(sized(2000, 20_000, 500_000)):
            changed = bytearray(whole)
            for _ in range(dice.randint(1, 3)):
                changed[dice.randrange(21, len(changed))] = dice.randrange(256)
            try:
                raw = with_header(BatchHeader.parse(bytes(changed)), bytes(changed[61:]))
            except LogStoreError:
                continue
            found = append_plain(one.parts.active, raw)
            if found is None:
                continue
            taken += 1
            appended = other.append_batch(raw)
            assert appended.offsets == found
            assert not appended.duplicate
        assert taken > 10
        assert list(one.read_batches(0, 1 << 30)) == list(other.read_batches(0, 1 << 30))


def test_another_thread_with_the_lock_is_not_waited_for(log: Partition) -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with log.parts.view.lock:
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    assert append_plain(log.parts.active, encoded(record())) is None
    release.set()
    thread.join()
    assert append_plain(log.parts.active, encoded(record())) == range(1, 2)


def test_a_segment_that_is_full_is_not_rolled_here(tmp_path: Path, clock: ManualClock) -> None:
    config = {"segment.bytes": 1 << 14}
    with Partition.open(tmp_path / "t-0", clock=clock, config=config, durability="os") as log:
        log.append(b"x" * 16_000, timestamp=NOW)
        raw = encoded(record(b"y" * 1000))
        assert append_plain(log.parts.active, raw) is None
        assert log.append_batch(raw).offsets == range(1, 2)
        assert append_plain(log.parts.active, raw) == range(2, 3)


def test_another_leader_epoch_appends_nothing(log: Partition) -> None:
    log.become_leader(3)
    raw = encoded(record())
    assert append_plain(log.parts.active, raw, leader_epoch=2) is None
    assert append_plain(log.parts.active, raw, leader_epoch=3) == range(1, 2)
    assert BatchHeader.parse(next(iter(log.read_batches(1, 1 << 20)))).leader_epoch == 3


def test_followers_are_woken(log: Partition) -> None:
    heard: list[bool] = []
    log.parts.view.listen(lambda: heard.append(True))
    append_plain(log.parts.active, encoded(record()))
    append_plain(log.parts.active, b"none")
    assert heard == [True]


def test_a_write_that_may_be_in_the_log_ends_the_appends(
    log: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        next_offset = 1

        def append_plain(self, *args: object) -> int:
            raise IndeterminateAppendError("half of it", offsets=range(1, 2))

    with monkeypatch.context() as patch:
        patch.setattr(log.parts.active, "writer", Broken())
        with pytest.raises(IndeterminateAppendError):
            append_plain(log.parts.active, encoded(record()))
        assert log.parts.active.writer is None
        assert append_plain(log.parts.active, encoded(record())) is None


def test_the_reasons_are_those_of_append_batch(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "t-0"
    with Partition.open(path, clock=clock, config=RULES, durability="os") as log:
        for name, error in (("too large", RecordTooLargeError), ("too old", InvalidRecordError)):
            with pytest.raises(error):
                log.append_batch(OTHERS[name])
