"""Tickets and the records that wait: order, text, and what a log keeps of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore import Record, UnknownTicketError
from logstore.delays.ticket import (
    COUNTER_MAX,
    DelayedRecord,
    Ticket,
    generation_for,
    generation_of,
    number_of,
    ticket_number,
    tombstone,
)

NUMBERS = st.builds(
    ticket_number,
    st.integers(0, (1 << 62)),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, COUNTER_MAX),
    st.integers(0, 2),
)


@given(st.lists(NUMBERS, min_size=2))
def test_sorted_texts_are_sorted_ids(numbers: list[int]) -> None:
    tickets = [Ticket(number) for number in numbers]
    assert sorted(tickets) == [Ticket(number) for number in sorted(numbers)]
    assert [ticket.number for ticket in tickets] == numbers
    assert all(len(ticket.id) == 26 for ticket in tickets)


@given(st.integers(0, 1 << 50), st.integers(0, 10), st.data())
def test_of_one_due_time_the_longer_delay_is_first(due: int, run: int, data: st.DataObject) -> None:
    """It was scheduled earlier: generations do not break the order of scheduling."""
    delays = sorted(data.draw(st.lists(st.integers(0, 1 << 32))), reverse=True)
    numbers = [
        ticket_number(due, run, counter, generation_for(delay))
        for counter, delay in enumerate(delays)
    ]
    assert numbers == sorted(numbers)
    assert [generation_of(number) for number in numbers] == [*map(generation_for, delays)]


@pytest.mark.parametrize("text", ["", "x", "000032UG03FK0000000O0000000", "!" * 26, "é" * 26])
def test_a_text_that_is_no_ticket_is_unknown(text: str) -> None:
    with pytest.raises(UnknownTicketError) as caught:
        number_of(text)
    assert caught.value.ticket == text
    with pytest.raises(TypeError):
        number_of(5)  # type: ignore[arg-type]


HEADERS = st.lists(
    st.tuples(
        st.one_of(st.text(max_size=5), st.sampled_from(
            [f"logstore.delay.{name}" for name in ("topic", "key", "time", "null", "due", "id")])),
        st.one_of(st.none(), st.binary(max_size=5)),
    )
)  # fmt: skip


@given(
    NUMBERS, st.one_of(st.none(), st.binary(max_size=9)), st.one_of(st.none(), st.binary()), HEADERS
)
def test_a_waiting_record_is_read_back_whatever_its_headers_are(
    number: int, value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    delayed = DelayedRecord(Ticket(number, "t"), value, key, tuple(headers), 3, 12)
    record = delayed.encode()
    assert record.timestamp == number >> 64 and record.value is not None
    assert DelayedRecord.decode(record) == delayed


def test_a_tombstone_has_the_key_and_the_time_of_its_record() -> None:
    number = ticket_number(77, 1, 2, 0)
    record = DelayedRecord(Ticket(number, "t"), b"v").encode()
    dead = tombstone(number)
    assert (dead.key, dead.timestamp, dead.value) == (record.key, record.timestamp, None)
    assert isinstance(dead, Record)
