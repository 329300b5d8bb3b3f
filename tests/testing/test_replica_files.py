"""Replica files: equal logs are clean, and each kind of difference is found."""

from __future__ import annotations

from pathlib import Path

import pytest

import logstore
from logstore.testing.replica_files import committed_bytes, leftovers, replica_problems

KEY = ("orders", 0)


@pytest.fixture
def stores(tmp_path: Path) -> dict[int, Path]:
    """Three stores with the same batches: the first has one more."""
    made = {number: tmp_path / str(number) for number in (1, 2, 3)}
    with logstore.open(made[1], durability="os") as store:
        first = store.create_topic("orders")[0]
        for number in range(5):
            first.extend([b"%d" % number, b"more"])
        batches = first.read_batches(0)
        first.append(b"not committed")
    for number in (2, 3):
        with logstore.open(made[number], durability="os") as store:
            copy = store.create_topic("orders")[0]
            for batch in batches:
                copy.append_batch(batch, origin="follower")
    return made


def problems(stores: dict[int, Path], end: int = 10) -> list[str]:
    return replica_problems(stores, {KEY: (1, 2, 3)}, {KEY: end})


def test_equal_replicas_are_clean(stores: dict[int, Path]) -> None:
    assert problems(stores) == []
    with logstore.open(stores[1], readonly=True) as store:
        assert len(list(committed_bytes(store["orders"][0], 10))) == 5
        assert len(list(committed_bytes(store["orders"][0], 100))) == 6


def test_a_replica_that_is_short_is_found(stores: dict[int, Path]) -> None:
    found = problems(stores, 11)
    assert [line for line in found if "ends at 10, not at 11" in line and "node 2" in line]
    assert [line for line in found if "orders-0 differs below 11" in line]


def test_without_an_end_the_high_watermarks_of_the_checkpoints_count(
    stores: dict[int, Path],
) -> None:
    assert replica_problems(stores, {KEY: (1, 2, 3)}, {}) == []
    with logstore.open(stores[3], durability="os") as store:
        log = store["orders"][0]
        log.truncate(8)
        log.extend([b"4", b"else"])
    (found,) = replica_problems(stores, {KEY: (1, 2, 3)}, {})
    assert "orders-0 differs below 10" in found


def test_other_bytes_at_the_same_offsets_are_found(stores: dict[int, Path]) -> None:
    with logstore.open(stores[3], durability="os") as store:
        log = store["orders"][0]
        log.truncate(8)
        log.extend([b"4", b"else"])
    (found,) = problems(stores)
    assert "node 3 has [0, 10)" in found


def test_a_flipped_bit_is_found(stores: dict[int, Path]) -> None:
    (path,) = (stores[2] / "orders-0").glob("*.log")
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    assert [line for line in problems(stores) if line.startswith("node 2: ")]


def test_a_missing_replica_and_leftovers_are_found(stores: dict[int, Path]) -> None:
    (stores[1] / "orders-0" / "x.1.tmp").touch()
    (stores[2] / "orders-1.0123-stray").mkdir()
    assert leftovers(stores[1]) == ["orders-0/x.1.tmp"]
    found = replica_problems(stores, {KEY: (1, 2), ("orders", 7): (3,)}, {KEY: 10})
    assert "node 1: orders-0/x.1.tmp is left" in found
    assert "node 2: orders-1.0123-stray is left" in found
    assert "node 3: orders-7 is missing" in found
