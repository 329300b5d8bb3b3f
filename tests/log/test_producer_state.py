"""Producer state: ids, epochs, sequences, transactions, and the snapshot that keeps them.

The rules are Kafka's; each test is one of them.  Snapshots are compared with bytes that a broker
wrote.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import (
    FencedError,
    InvalidRecordError,
    OutOfOrderSequenceError,
    UnsupportedFormatError,
)
from logstore.format.batch import (
    BatchHeader,
    EndMarker,
    decrement_sequence,
    increment_sequence,
    split,
)
from logstore.format.index import AbortedTransaction, TransactionIndex
from logstore.log.producer_state import (
    BatchSpan,
    CorruptSnapshotError,
    ProducerEntry,
    ProducerState,
)
from logstore.testing import ReferenceRecord, encode_batch

GOLDEN = Path(__file__).parent.parent / "golden"
MAX = 2**31 - 1


def data(
    producer_id: int,
    *,
    epoch: int = 0,
    sequence: int = 0,
    offset: int = 0,
    count: int = 1,
    timestamp: int = 1000,
    transactional: bool = False,
) -> BatchHeader:
    return BatchHeader(
        base_offset=offset,
        length=49,
        leader_epoch=0,
        magic=2,
        crc=0,
        attributes=0x10 if transactional else 0,
        last_offset_delta=count - 1,
        base_timestamp=timestamp,
        max_timestamp=timestamp,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        record_count=count,
    )


def marker(
    producer_id: int,
    *,
    epoch: int = 0,
    offset: int = 0,
    commit: bool = True,
    coordinator: int = 0,
    timestamp: int = 1000,
) -> tuple[BatchHeader, EndMarker]:
    end = EndMarker(commit, coordinator)
    raw = end.encode(
        producer_id=producer_id, producer_epoch=epoch, timestamp=timestamp, base_offset=offset
    )
    return BatchHeader.parse(raw), end


class Log:
    """A log that keeps only what producer state needs of it."""

    def __init__(self) -> None:
        self.state = ProducerState()
        self.end = 0
        self.aborted: list[AbortedTransaction] = []

    def append(self, header: BatchHeader, origin: str = "leader") -> BatchSpan | None:
        header = header._replace(base_offset=self.end)
        admission = self.state.admit([(header, None)], origin)  # type: ignore[arg-type]
        if admission.duplicate is None:
            self.aborted += self.state.commit(admission)
            self.end = header.next_offset
        return admission.duplicate

    def end_transaction(
        self, producer_id: int, *, commit: bool, epoch: int = 0, coordinator: int = 0,
        origin: str = "coordinator",
    ) -> int:  # fmt: skip
        header, end = marker(
            producer_id, epoch=epoch, offset=self.end, commit=commit, coordinator=coordinator
        )
        admission = self.state.admit([(header, end)], origin)  # type: ignore[arg-type]
        self.aborted += self.state.commit(admission)
        self.end += 1
        return self.end - 1


# ---- headers ----


def test_a_header_is_parsed_and_packed_field_by_field() -> None:
    raw = encode_batch(
        [ReferenceRecord(b"v", timestamp=5), ReferenceRecord(b"w", timestamp=9)],
        base_offset=40, leader_epoch=3, codec=4, transactional=True, producer_id=7,
        producer_epoch=2, base_sequence=100,
    )  # fmt: skip
    header = BatchHeader.parse(raw)
    assert (header.base_offset, header.last_offset, header.next_offset) == (40, 41, 42)
    assert (header.leader_epoch, header.codec, header.record_count) == (3, 4, 2)
    assert (header.producer_id, header.producer_epoch) == (7, 2)
    assert (header.base_sequence, header.last_sequence) == (100, 101)
    assert (header.base_timestamp, header.max_timestamp) == (5, 9)
    assert header.transactional
    assert header.has_producer
    assert not header.control
    assert not header.log_append_time
    assert not header.has_delete_horizon
    assert header.size_bytes == len(raw)
    assert header.pack() == raw[:61]


def test_several_batches_are_told_apart_by_their_sizes() -> None:
    one = encode_batch([ReferenceRecord(b"v", timestamp=5)])
    two = encode_batch([ReferenceRecord(b"longer", timestamp=5)], base_offset=1)
    assert [raw for _, raw in split(one + two)] == [one, two]
    assert list(split(b"")) == []


@pytest.mark.parametrize("cut", [1, 60, 61, 70])
def test_a_batch_that_is_not_whole_is_refused(cut: int) -> None:
    one = encode_batch([ReferenceRecord(b"v" * 20, timestamp=5)])
    with pytest.raises(InvalidRecordError):
        list(split(one + one[:cut]))


def test_other_message_formats_are_refused() -> None:
    raw = bytearray(encode_batch([ReferenceRecord(b"v", timestamp=5)]))
    raw[16] = 1
    with pytest.raises(UnsupportedFormatError):
        BatchHeader.parse(bytes(raw))
    raw[16] = 3
    with pytest.raises(InvalidRecordError, match="format 3"):
        BatchHeader.parse(bytes(raw))


def test_a_marker_has_the_bytes_that_kafka_writes() -> None:
    raw = EndMarker(commit=False, coordinator_epoch=9).encode(
        producer_id=7, producer_epoch=2, timestamp=5000, base_offset=10, leader_epoch=3
    )
    assert raw.hex() == (
        "000000000000000a00000042000000030212e67bf0003000000000000000000000138800000000000013880000"
        "0000000000070002ffffffff000000012000000008000000000c00000000000900"
    )
    assert EndMarker.parse(raw) == EndMarker(False, 9)


def test_control_batches_of_other_kinds_are_no_markers() -> None:
    def control(key: bytes, value: bytes) -> bytes:
        return encode_batch(
            [ReferenceRecord(value, key=key, timestamp=1)], control=True, transactional=True,
            producer_id=1, producer_epoch=0,
        )  # fmt: skip

    assert EndMarker.parse(control(b"\0\0\0\2", b"whatever")) is None
    assert EndMarker.parse(control(b"\0\0\0\1", b"\0\0\0\0\0\5extra")) == EndMarker(True, 5)
    assert EndMarker.parse(control(b"\0\3\0\1", b"\0\3\0\0\0\5")) == EndMarker(True, 5)
    assert EndMarker.parse(encode_batch([ReferenceRecord(b"v", timestamp=1)])) is None
    with pytest.raises(InvalidRecordError, match="cannot be read"):
        EndMarker.parse(control(b"\0\0\0\1", b"\0\0"))


# ---- sequences ----


@given(st.integers(0, MAX), st.integers(0, MAX))
def test_sequences_wrap_around_and_back(sequence: int, by: int) -> None:
    moved = increment_sequence(sequence, by)
    assert 0 <= moved <= MAX
    assert decrement_sequence(moved, by) == sequence


def test_a_sequence_follows_the_largest_with_zero() -> None:
    log = Log()
    log.append(data(1, sequence=MAX))
    with pytest.raises(OutOfOrderSequenceError) as error:
        log.append(data(1, sequence=1))
    assert (error.value.sequence, error.value.expected) == (1, 0)
    log.append(data(1, sequence=0))


def test_a_batch_over_the_wrap_keeps_both_ends() -> None:
    log = Log()
    log.append(data(1, sequence=MAX - 9, count=20))
    entry = log.state.get(1)
    assert entry is not None
    assert entry.batches[-1].first_sequence == MAX - 9
    assert entry.last_sequence == 9
    log.append(data(1, sequence=10))


def test_an_unknown_producer_may_start_anywhere() -> None:
    log = Log()
    log.append(data(1, epoch=1, sequence=3))
    with pytest.raises(OutOfOrderSequenceError):
        log.append(data(1, epoch=1, sequence=5))


def test_a_new_epoch_starts_at_zero_and_forgets_the_window() -> None:
    log = Log()
    log.append(data(1, sequence=0, count=3))
    with pytest.raises(OutOfOrderSequenceError) as error:
        log.append(data(1, epoch=1, sequence=3))
    assert error.value.expected == 0
    log.append(data(1, epoch=1, sequence=0))
    with pytest.raises(FencedError):
        log.append(data(1, epoch=0, sequence=0, count=3))


# ---- retries ----


def test_each_of_the_last_five_batches_is_recognised_and_the_sixth_is_not() -> None:
    log = Log()
    spans = []
    for number in range(6):
        first = log.end
        log.append(data(1, sequence=2 * number, count=2))
        spans.append(range(first, log.end))
    for number in range(1, 6):
        again = log.append(data(1, sequence=2 * number, count=2))
        assert again is not None
        assert again.offsets == spans[number]
    with pytest.raises(OutOfOrderSequenceError):
        log.append(data(1, sequence=0, count=2))
    assert log.end == 12


@pytest.mark.parametrize(("sequence", "count"), [(2, 1), (3, 2), (2, 4), (1, 3)])
def test_a_part_of_a_batch_is_no_retry(sequence: int, count: int) -> None:
    log = Log()
    log.append(data(1, sequence=0, count=2))
    log.append(data(1, sequence=2, count=2))
    with pytest.raises(OutOfOrderSequenceError):
        log.append(data(1, sequence=sequence, count=count))


def test_a_follower_takes_what_its_leader_took() -> None:
    log = Log()
    log.append(data(1, epoch=5, sequence=7), "follower")
    log.append(data(1, epoch=5, sequence=7), "follower")
    log.append(data(1, epoch=4, sequence=90), "follower")
    assert log.end == 3
    entry = log.state.get(1)
    assert entry is not None
    assert (entry.epoch, entry.last_sequence) == (4, 90)


def test_the_coordinator_needs_no_sequence_but_is_fenced() -> None:
    log = Log()
    log.append(data(1, epoch=2, sequence=0), "coordinator")
    log.append(data(1, epoch=2, sequence=0), "coordinator")
    assert log.end == 2
    with pytest.raises(FencedError):
        log.append(data(1, epoch=1, sequence=0), "coordinator")


def test_nothing_changes_until_it_is_committed() -> None:
    state = ProducerState()
    admission = state.admit([(data(1, transactional=True), None)], "leader")
    assert len(state) == 0
    assert state.first_unstable_offset is None
    state.commit(admission)
    assert state.first_unstable_offset == 0


def test_batches_of_one_append_are_checked_against_each_other() -> None:
    state = ProducerState()
    good = [(data(1, sequence=0, count=2), None), (data(1, sequence=2, offset=2), None)]
    bad = [(data(2, sequence=0, count=2), None), (data(2, sequence=3, offset=2), None)]
    state.commit(state.admit(good, "leader"))
    with pytest.raises(OutOfOrderSequenceError):
        state.admit(bad, "leader")
    assert [entry.producer_id for entry in state] == [1]


def test_batches_without_a_producer_leave_no_trace() -> None:
    log = Log()
    log.append(data(-1, epoch=-1, sequence=-1))
    assert len(log.state) == 0


# ---- transactions ----


def test_a_transaction_is_open_from_its_first_batch_to_its_marker() -> None:
    log = Log()
    log.append(data(-1, epoch=-1, sequence=-1))
    log.append(data(1, sequence=0, count=3, transactional=True))
    log.append(data(1, sequence=3, transactional=True, timestamp=2000))
    assert log.state.first_unstable_offset == 1
    (ongoing,) = log.state.ongoing
    assert ongoing == (1, 0, 1, 2000)
    assert log.end_transaction(1, commit=True) == 5
    assert log.state.first_unstable_offset is None
    assert log.aborted == []


def test_an_aborted_transaction_is_listed_with_what_was_stable_then() -> None:
    log = Log()
    log.append(data(1, count=2, transactional=True))  # 0, 1
    log.append(data(2, count=3, transactional=True))  # 2 to 4
    log.end_transaction(2, commit=False)  # 5
    log.end_transaction(1, commit=False)  # 6
    assert log.aborted == [(2, 2, 5, 0), (1, 0, 6, 7)]


def test_markers_copied_together_list_what_was_open_at_each() -> None:
    """As a follower sees it: the same entries as on the leader, in one append."""
    leader = Log()
    batches: list[tuple[BatchHeader, EndMarker | None]] = []
    for step in ("a", "b", "-a", "c", "+b", "-c"):
        producer_id = ord(step[-1])
        if len(step) == 1:
            header = data(producer_id, offset=leader.end, transactional=True)
            batches.append((header, None))
            leader.append(header)
        else:
            batches.append(marker(producer_id, offset=leader.end, commit=step[0] == "+"))
            leader.end_transaction(producer_id, commit=step[0] == "+")
    follower = ProducerState()
    assert follower.commit(follower.admit(batches, "follower")) == leader.aborted
    assert leader.aborted == [(ord("a"), 0, 2, 1), (ord("c"), 3, 5, 6)]


def test_an_empty_transaction_is_not_listed_but_moves_the_epochs() -> None:
    log = Log()
    log.end_transaction(1, commit=False, epoch=3, coordinator=8)
    assert log.aborted == []
    entry = log.state.get(1)
    assert entry is not None
    assert (entry.epoch, entry.coordinator_epoch, entry.batches) == (3, 8, ())


def test_a_marker_of_a_higher_epoch_fences_and_starts_sequences_anew() -> None:
    log = Log()
    log.append(data(1, sequence=0, count=5, transactional=True))
    log.end_transaction(1, commit=False, epoch=1)
    with pytest.raises(FencedError) as error:
        log.append(data(1, epoch=0, sequence=5, transactional=True))
    assert (error.value.epoch, error.value.current) == (0, 1)
    with pytest.raises(OutOfOrderSequenceError):
        log.append(data(1, epoch=1, sequence=5, transactional=True))
    log.append(data(1, epoch=1, sequence=0, transactional=True))


def test_a_marker_of_the_same_epoch_keeps_the_window() -> None:
    log = Log()
    log.append(data(1, sequence=0, count=5, transactional=True))
    log.end_transaction(1, commit=True)
    assert log.append(data(1, sequence=0, count=5, transactional=True)) is not None
    log.append(data(1, sequence=5, transactional=True))


def test_a_marker_of_a_lower_epoch_is_refused() -> None:
    log = Log()
    log.append(data(1, epoch=2, transactional=True))
    with pytest.raises(FencedError):
        log.end_transaction(1, commit=True, epoch=1)
    assert log.state.first_unstable_offset == 0


def test_a_coordinator_of_a_lower_epoch_is_refused_but_believed_in_the_log() -> None:
    log = Log()
    log.end_transaction(1, commit=True, coordinator=5)
    with pytest.raises(FencedError, match="epoch 4 of the coordinator"):
        log.end_transaction(1, commit=True, coordinator=4)
    log.end_transaction(1, commit=True, coordinator=4, origin="replay")
    entry = log.state.get(1)
    assert entry is not None
    assert entry.coordinator_epoch == 4


def test_only_a_marker_is_known_of_a_producer() -> None:
    log = Log()
    log.end_transaction(1, commit=True, epoch=2)
    with pytest.raises(FencedError):
        log.append(data(1, epoch=1, sequence=0))
    with pytest.raises(OutOfOrderSequenceError):
        log.append(data(1, epoch=2, sequence=17))
    log.append(data(1, epoch=2, sequence=0))


@pytest.mark.parametrize("origin", ["leader", "coordinator", "follower"])
def test_a_producer_in_a_transaction_appends_nothing_else(origin: str) -> None:
    log = Log()
    log.append(data(1, sequence=0, transactional=True))
    with pytest.raises(InvalidRecordError, match="open since offset 0"):
        log.append(data(1, sequence=1), origin)


# ---- expiry ----


def test_silent_producers_are_forgotten_unless_in_a_transaction() -> None:
    log = Log()
    log.append(data(1, timestamp=1000))
    log.append(data(2, timestamp=1000, transactional=True))
    log.append(data(3, timestamp=1001))
    assert log.state.expire(1999, 1000) == []
    assert log.state.expire(2000, 1000) == [1]
    assert [entry.producer_id for entry in log.state] == [2, 3]
    log.append(data(1, sequence=77))
    log.end_transaction(2, commit=True)
    assert log.state.expire(5000, 1000) == [2, 3, 1]


# ---- snapshots ----


def test_a_snapshot_has_the_bytes_that_kafka_writes() -> None:
    state = ProducerState([ProducerEntry(7, 2, 9, 7777, -1, (BatchSpan(104, 24, 4, 7777),))])
    assert state.encode().hex() == (
        "0001a76862e60000000100000000000000070002000000680000000000000018000000040000000000001e61"
        "00000009ffffffffffffffff"
    )
    assert ProducerState().encode().hex() == "000148674bc700000000"


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("*/*/*.snapshot")), ids=lambda p: f"{p.parent.name}-{p.stem[-3:]}"
)
def test_a_brokers_snapshot_is_read_and_written_again_byte_for_byte(path: Path) -> None:
    content = path.read_bytes()
    assert ProducerState.decode(content).encode() == content


def test_a_brokers_snapshot_says_what_its_producers_did() -> None:
    path = GOLDEN / "transactional" / "transactional-0" / "00000000000000000017.snapshot"
    state = ProducerState.decode(path.read_bytes())
    assert [(t.producer_id, t.first_offset) for t in state.ongoing] == [(0, 11), (1, 14)]
    assert state.first_unstable_offset == 11
    first = state.get(0)
    assert first is not None
    assert first.batches == (BatchSpan(9, 13, 2, first.timestamp),)
    assert first.coordinator_epoch == 0


def test_a_snapshot_keeps_one_batch_of_the_window() -> None:
    log = Log()
    for number in range(3):
        log.append(data(1, sequence=number))
    state = ProducerState.decode(log.state.encode())
    (entry,) = state
    assert entry.batches == (BatchSpan(2, 2, 0, 1000),)
    log.state = state
    assert log.append(data(1, sequence=2)) is not None
    with pytest.raises(OutOfOrderSequenceError):
        log.append(data(1, sequence=1))


@given(st.data())
def test_a_damaged_snapshot_is_never_believed(choice: st.DataObject) -> None:
    log = Log()
    log.append(data(1, count=3, transactional=True))
    log.append(data(2))
    good = log.state.encode()
    kind = choice.draw(st.sampled_from(["flip", "cut", "longer"]))
    if kind == "flip":
        bit = choice.draw(st.integers(0, len(good) * 8 - 1))
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
    elif kind == "cut":
        bad = bytearray(good[: choice.draw(st.integers(0, len(good) - 1))])
    else:
        bad = bytearray(good + choice.draw(st.binary(min_size=1, max_size=60)))
    with pytest.raises(CorruptSnapshotError):
        ProducerState.decode(bytes(bad))


# ---- the index of aborted transactions ----


def index_of(*entries: tuple[int, int, int, int], base: int = 0) -> TransactionIndex:
    index = TransactionIndex(base)
    for entry in entries:
        index.append(AbortedTransaction(*entry))
    return index


def test_an_entry_has_the_bytes_that_kafka_writes() -> None:
    assert index_of((7, 100, 110, 105), base=100).entries.hex() == (
        "000000000000000000070000000000000064000000000000006e0000000000000069"
    )


def test_a_brokers_index_is_read() -> None:
    paths = sorted((GOLDEN / "transactional" / "transactional-0").glob("*.txnindex"))
    found = [
        entry[:3] for path in paths for entry in TransactionIndex(int(path.stem), path.read_bytes())
    ]
    assert found
    for path in paths:
        assert TransactionIndex(int(path.stem), path.read_bytes()).fault() is None
    assert {(first, last) for _, first, last in found} >= {(5, 8)}


def test_collecting_stops_where_nothing_more_can_follow() -> None:
    entries = ((0, 0, 10, 11), (1, 5, 15, 13), (2, 18, 35, 25), (3, 32, 50, 40))
    index = index_of(*entries)
    assert index.collect(0, 100) == (list(entries), False)
    assert index.collect(0, 32) == (list(entries[:3]), True)
    assert index.collect(0, 35) == (list(entries), True)
    assert index.collect(10, 35) == (list(entries), True)
    assert index.collect(11, 35) == (list(entries[1:]), True)
    assert index.collect(20, 41) == (list(entries[2:]), False)


def test_truncating_keeps_the_markers_below() -> None:
    index = index_of((0, 0, 10, 2), (1, 5, 15, 16), (2, 18, 35, 25))
    index.truncate_to(35)
    assert [entry.last_offset for entry in index] == [10, 15]
    index.truncate_to(10)
    assert len(index) == 0


def test_a_torn_entry_is_none_and_a_strange_one_is_a_fault() -> None:
    good = index_of((0, 0, 10, 2), (1, 5, 15, 16))
    assert len(TransactionIndex(0, good.entries[:-1])) == 1
    assert good.fault() is None
    assert "out of order" in str(TransactionIndex(11, good.entries).fault())
    swapped = good.entries[34:] + good.entries[:34]
    assert "out of order" in str(TransactionIndex(0, swapped).fault())
    assert "version 1" in str(TransactionIndex(0, b"\1" + good.entries[1:]).fault())
    with pytest.raises(ValueError, match="not above"):
        good.append(AbortedTransaction(3, 1, 15, 16))
    with pytest.raises(IndexError):
        good[2]
