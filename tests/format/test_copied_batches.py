"""check_copied: C checks a leader's batches; the walk in Python, batch by batch, is the oracle."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore import InvalidRecordError, Partition, UnsupportedFormatError
from logstore.format import validation
from logstore.format.batch import EndMarker
from logstore.log.producer_state import ProducerState
from logstore.testing import ReferenceRecord, encode_batch
from tests.kit import values

NOW = 1_700_000_000_000


@st.composite
def answers(draw: st.DrawFn) -> list[bytes]:
    """Batches of a leader's log: gaps, epochs, producers, transactions and their markers."""
    offset, epoch = draw(st.integers(0, 1 << 40)), draw(st.integers(0, 5))
    sequences: dict[int, int] = {}
    batches = []
    for _ in range(draw(st.integers(1, 25))):
        offset += draw(st.sampled_from([0, 0, 0, 0, 3]))
        epoch += draw(st.sampled_from([0, 0, 0, 1]))
        producer = draw(st.integers(-1, 2))
        kind = draw(st.sampled_from(["plain", "plain", "plain", "transaction", "marker"]))
        if kind == "marker" and producer >= 0:
            marker = EndMarker(draw(st.booleans()), 0)
            batches.append(
                marker.encode(
                    producer_id=producer,
                    producer_epoch=0,
                    timestamp=NOW,
                    base_offset=offset,
                    leader_epoch=epoch,
                )
            )
            offset += 1
            continue
        count = draw(st.integers(1, 3))
        given_id = {}
        if producer >= 0:
            given_id = {
                "producer_id": producer,
                "producer_epoch": 0,
                "base_sequence": sequences.get(producer, 0),
                "transactional": kind == "transaction",
            }
            sequences[producer] = sequences.get(producer, 0) + count
        records = [ReferenceRecord(b"x", timestamp=NOW)] * count
        batches.append(
            encode_batch(records, base_offset=offset, leader_epoch=epoch, **given_id)  # type: ignore[arg-type]
        )
        offset += count
    return batches


def state_after(headers: list[tuple[validation.BatchHeader, EndMarker | None]]) -> ProducerState:
    state = ProducerState()
    state.commit(state.admit(headers, "replay"))
    return state


@given(answers())
@settings(max_examples=150)
def test_it_finds_what_a_walk_in_python_finds(batches: list[bytes]) -> None:
    data = b"".join(batches)
    fast, slow = validation.check_copied(data), validation._check_copied_slowly(data)
    assert fast is not None
    assert (fast.offsets, fast.dense) == (slow.offsets, slow.dense)
    changes = [next(group) for _, group in itertools.groupby(slow.epochs, lambda each: each[0])]
    assert fast.epochs == changes
    # Fewer headers, and the same producers, open transactions and windows of batches.
    assert set(fast.producers) <= set(slow.producers)
    left, right = state_after(fast.producers), state_after(slow.producers)
    assert list(left) == list(right) and left.ongoing == right.ongoing


@given(answers(), st.data())
@settings(max_examples=150)
def test_it_refuses_what_the_walk_refuses(batches: list[bytes], data: st.DataObject) -> None:
    raw = bytearray(b"".join(batches))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.sampled_from([0, 0, 1, 30]))
    given_bytes = bytes(raw[: len(raw) - cut])
    errors: list[type[BaseException] | None] = []
    for check in (validation.check_copied, validation._check_copied_slowly):
        try:
            check(given_bytes)
            errors.append(None)
        except (InvalidRecordError, UnsupportedFormatError) as error:
            errors.append(type(error))
    assert errors[0] is errors[1]


def test_the_order_of_batches_is_checked() -> None:
    first = encode_batch([ReferenceRecord(b"a", timestamp=NOW)] * 3, base_offset=5, leader_epoch=1)
    second = encode_batch([ReferenceRecord(b"b", timestamp=NOW)], base_offset=7, leader_epoch=1)
    with pytest.raises(InvalidRecordError, match="offset 7 after one that ends at 7"):
        validation.check_copied(first + second)
    without = encode_batch([ReferenceRecord(b"b", timestamp=NOW)], leader_epoch=-1)
    with pytest.raises(InvalidRecordError, match="no leader epoch"):
        validation.check_copied(without)
    assert validation.check_copied(b"") is None


def test_a_whole_answer_is_appended_in_one_call(log: Partition) -> None:
    batches = [
        encode_batch(
            [ReferenceRecord(b"%d" % n, timestamp=NOW)],
            base_offset=n,
            leader_epoch=n // 400,
            producer_id=n % 3,
            producer_epoch=0,
            base_sequence=n // 3,
        )
        for n in range(1000)
    ]
    appender = log.parts.appender
    done = appender.append_batch(b"".join(batches), origin="follower", expect_end=0)
    assert done.offsets == range(1000)
    assert log.read_batches(0, 1 << 30) == batches
    assert log.leader_epochs.entries == [(0, 0), (1, 400), (2, 800)]
    # A retry of each of the newest five batches is recognised after a fail-over.
    log.parts.active.begin_epoch(3)
    for n in range(985, 1000):
        assert appender.append_batch(batches[n]).duplicate
    assert values(log) == [b"%d" % n for n in range(1000)]


def test_damage_in_the_last_batch_appends_nothing(log: Partition) -> None:
    batches = [
        encode_batch([ReferenceRecord(b"x", timestamp=NOW)], base_offset=n, leader_epoch=0)
        for n in range(50)
    ]
    raw = bytearray(b"".join(batches))
    raw[-1] ^= 1
    with pytest.raises(InvalidRecordError) as caught:
        log.append_batch(bytes(raw), origin="follower")
    assert caught.value.reason == "crc"
    assert log.end_offset == 0
