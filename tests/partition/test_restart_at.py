"""restart_at: an empty log that begins at an offset; the crash explorer has its crashes."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest

from logstore import LogTruncatedError, OffsetOutOfRangeError, Partition
from logstore.testing import Fault, ReferenceRecord, check_invariants, encode_batch, inject_io
from tests.conftest import MakeLog
from tests.kit import PATIENCE, bases, join, values

NOW = 1_700_000_000_000


def batch(*values: bytes, **options: Any) -> bytes:
    return encode_batch([ReferenceRecord(value, timestamp=NOW) for value in values], **options)


def filled(log: Partition) -> Partition:
    """Offsets 0 to 39 in several segments, of epochs 0 and 3, of a producer, started at 5."""
    for n in range(20):
        log.append(b"x" * 1000 + b"%d" % n)
    log.become_leader(3)
    log.append_batch(batch(b"p", producer_id=9, producer_epoch=0, base_sequence=0))
    for n in range(21, 40):
        log.append(b"x" * 1000 + b"%d" % n)
    log.trim(5)
    return log


@pytest.mark.parametrize("offset", [0, 5, 16, 39, 40, 1000])
@pytest.mark.parametrize("clean", [True, False])
def test_the_log_is_empty_and_begins_there(make_log: MakeLog, offset: int, clean: bool) -> None:
    log = filled(make_log(segment_bytes=1 << 14))
    assert len(log.segments) > 2
    log.parts.view.set_high_watermark(30)
    log.parts.cutter.restart_at(offset)
    seen = (log.start_offset, log.end_offset, log.high_watermark, log.durable_offset)
    assert seen == (offset, offset, offset, offset)
    assert values(log) == [] and bases(log) == [offset]
    assert log.leader_epochs.entries == [] and log.leader_epoch == 3
    assert log.parts.reader.producers() == ()
    assert log.parts.active.last_record_epoch() is None
    if not clean:
        log.parts.discard()
    log.close()
    again = make_log(segment_bytes=1 << 14)
    assert (again.start_offset, again.end_offset) == (offset, offset)
    assert again.leader_epoch == 3
    assert again.append(b"new") == offset
    assert values(again) == [b"new"]
    assert again.leader_epochs.entries == [(3, offset)]
    again.close()
    third = make_log(segment_bytes=1 << 14)
    assert values(third) == [b"new"]
    check_invariants(third)
    assert third.check() == []


def test_the_first_batch_of_a_leader_follows(log: Partition) -> None:
    filled(log)
    log.parts.cutter.restart_at(100)
    raw = batch(b"a", b"b", base_offset=100, leader_epoch=7)
    done = log.parts.appender.append_batch(raw, origin="follower", expect_end=100)
    assert done.offsets == range(100, 102)
    assert log.leader_epochs.entries == [(7, 100)]
    assert log.read_batches(100) == [raw]


def test_readers_of_the_old_records_are_told(log: Partition) -> None:
    filled(log)
    above, below = iter(log.scan(10)), iter(log.scan(10))
    assert next(above).offset == next(below).offset == 10
    log.parts.cutter.restart_at(50)
    with pytest.raises(OffsetOutOfRangeError):
        log[20]
    with pytest.raises(OffsetOutOfRangeError):
        list(log.scan(10))
    log.parts.cutter.restart_at(2)
    assert log.append(b"other") == 2
    with pytest.raises(OffsetOutOfRangeError):
        log.read_batches(10)


def test_a_scan_that_follows_raises(log: Partition) -> None:
    log.extend([b"a", b"b", b"c"])
    raised: list[BaseException] = []
    begun = threading.Event()

    def follow() -> None:
        try:
            for record in log.scan(follow=True, timeout=PATIENCE):
                if record.offset == 2:
                    begun.set()
        except OffsetOutOfRangeError as error:
            raised.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    assert begun.wait(PATIENCE)
    log.parts.cutter.restart_at(1)
    join([thread])
    assert isinstance(raised[0], LogTruncatedError) and raised[0].truncated_to == 1


def test_a_reader_of_another_process_sees_the_new_log(make_log: MakeLog) -> None:
    log = filled(make_log())
    reader = make_log(readonly=True)
    assert reader.end_offset == 40
    log.parts.cutter.restart_at(70)
    log.append(b"new")
    assert (reader.start_offset, reader.end_offset) == (70, 71)
    assert values(reader) == [b"new"]
    log.parts.cutter.restart_at(3)
    log.append(b"newer")
    assert values(reader) == [b"newer"]


def test_what_was_cleaned_is_forgotten(make_log: MakeLog) -> None:
    log = filled(make_log())
    log.roll()
    with log.parts.rewriter.rewriting() as rewrite:
        rewrite.note_cleaned(40)
        log.parts.cutter.restart_at(10)
        assert rewrite.is_stale()
    assert log.first_dirty_offset == 10
    for n in range(40):
        log.append(b"x", key=b"%d" % n)
    assert log.first_dirty_offset == 10


@pytest.mark.parametrize("kind", ["unlink", "rename", "sync"])
def test_after_a_failure_the_next_open_has_one_of_both(make_log: MakeLog, kind: str) -> None:
    for number in range(1, 4):
        log = filled(make_log(f"t-{number}"))
        with inject_io(Fault.fail(errno.EIO, kind, "*", call=number)), pytest.raises(OSError):
            log.parts.cutter.restart_at(90)
        with pytest.raises(ValueError, match="cannot be appended to"):
            log.append(b"x")
        with pytest.raises(OffsetOutOfRangeError):
            log[20]
        log.close()
        again = make_log(f"t-{number}")
        assert (again.start_offset, again.end_offset) in ((5, 40), (90, 90))
        assert again.append(b"x") in (40, 90)
        again.close()


def test_a_wrong_offset_changes_nothing(log: Partition) -> None:
    filled(log)
    for wrong in (-1, 1 << 63):
        with pytest.raises(ValueError, match="an offset is an int"):
            log.parts.cutter.restart_at(wrong)
    with pytest.raises(TypeError):
        log.parts.cutter.restart_at(True)
    assert log.end_offset == 40
