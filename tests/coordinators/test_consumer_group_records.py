"""Records of groups of the consumer protocol: the bytes of Kafka 4.3.1."""

from __future__ import annotations

import uuid

import pytest

from logstore.coordinators.consumer_group.records import (
    ConsumerGroupKey,
    ConsumerGroupState,
    CurrentAssignment,
    GroupEpoch,
    MemberState,
    MemberSubscription,
    ResolvedRegex,
    TargetAssignment,
    TargetEpoch,
    Value,
)
from logstore.coordinators.offset_records import parse_key
from logstore.errors import InvalidRecordError

T = uuid.UUID("fe0ad148-c75e-4e3e-b49c-63cedc552342")
U = uuid.UUID("b2592956-d744-41f7-9eec-a167ad8c0351")

# Written by a broker: the kind of the key, the value, and what it means.
WRITTEN: list[tuple[int, str, Value]] = [
    (3, "000000000002010008591688fcac6c6684", GroupEpoch(2, 6419468937669142148)),
    (
        5,
        "00000369310005706565720b2f3132372e302e302e310209742d38626461643401000013880001000100",
        MemberSubscription("i1", None, "peer", "/127.0.0.1", ("t-8bdad4",), "", 5000, None),
    ),
    (6, "000000000002010008000001a1e79388d4", TargetEpoch(2, 1794886568148)),
    (
        7,
        "000002fe0ad148c75e4e3eb49c63cedc55234205000000000000000100000002000000030000",
        TargetAssignment(frozenset((T, number) for number in range(4))),
    ),
    (
        8,
        "000000000002000000000002fe0ad148c75e4e3eb49c63cedc55234205000000000000000100000002000000"
        "0301001105000000020000000200000002000000020100",
        CurrentAssignment(2, 0, MemberState.STABLE, {(T, number): 2 for number in range(4)}),
    ),
    (
        8,
        "00000000000300000003010102b2592956d74441f79eeca167ad8c035107000000000000000100000002000000"
        "0300000004000000050100190700000002000000020000000200000002000000030000000300",
        CurrentAssignment(
            3, 3, MemberState.UNREVOKED_PARTITIONS, {},
            {(U, number): 2 if number < 4 else 3 for number in range(6)},
        ),
    ),
    (16, "0000010000000000000133000001a1e794169300", ResolvedRegex((), 307, 1794886604435)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "raw", "value"), WRITTEN)
def test_the_bytes_are_kafkas(kind: int, raw: str, value: Value) -> None:
    key = ConsumerGroupKey(kind, "g", "m" if kind in (5, 7, 8, 16) else "")
    assert parse_key(key.encode()) == key
    assert key.decode(bytes.fromhex(raw)) == value
    assert value.encode().hex() == raw


def test_an_assignment_of_an_older_broker_has_the_epoch_of_its_member() -> None:
    raw = "000000000002000000000002fe0ad148c75e4e3eb49c63cedc5523420200000001000100"
    decoded = ConsumerGroupKey(8, "g", "m").decode(bytes.fromhex(raw))
    assert decoded == CurrentAssignment(2, 0, MemberState.STABLE, {(T, 1): 2})


@pytest.mark.parametrize("raw", ["", "0001", "00000000", "0000000000020100"])
def test_a_damaged_value_is_refused(raw: str) -> None:
    with pytest.raises(InvalidRecordError):
        ConsumerGroupKey(3, "g").decode(bytes.fromhex(raw))


def test_a_state_without_values_is_false() -> None:
    state = ConsumerGroupState()
    assert not state
    assert state.put(3, "", GroupEpoch(1)) is None
    copy = state.copy()
    assert state and list(state) == [(3, "")] and copy == state
    assert state.put(3, "", None) == GroupEpoch(1)
    assert not state and copy != state
