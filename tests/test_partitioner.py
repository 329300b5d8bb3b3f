"""The partition of a record: Kafka's choice for a key, one per batch without a key."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore import _native
from logstore.partitioner import KeyPartitioner, partition_for_key

with warnings.catch_warnings():  # its own business
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka.partitioner.default import murmur2

# From the tests of Kafka's own clients: a Java int.
KAFKA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("key", KAFKA)
def test_a_key_hashes_as_in_kafka(key: bytes) -> None:
    assert _native.murmur2(key) == KAFKA[key] % (1 << 32)
    assert partition_for_key(key, 7) == (KAFKA[key] & 0x7FFFFFFF) % 7


@given(st.binary(max_size=40), st.integers(1, 1000))
def test_a_key_goes_where_another_client_sends_it(key: bytes, partitions: int) -> None:
    assert _native.murmur2(key) == murmur2(key) % (1 << 32)
    chosen = partition_for_key(key, partitions)
    assert chosen == (murmur2(key) & 0x7FFFFFFF) % partitions
    assert KeyPartitioner(seed=0)(key, b"value", partitions) == chosen


def test_any_buffer_can_be_a_key_and_nothing_else() -> None:
    assert _native.murmur2(memoryview(b"xfoobar")[1:]) == _native.murmur2(b"foobar")
    with pytest.raises(TypeError):
        _native.murmur2("foobar")  # type: ignore[arg-type]


def test_without_a_key_records_stay_together_for_a_batch() -> None:
    choose = KeyPartitioner(batch_bytes=1000, seed=7)
    chosen = [choose(None, bytes(100), 4) for _ in range(400)]
    runs = [(partition, len(list(run))) for partition, run in itertools.groupby(chosen)]
    assert [length for _, length in runs] == [10] * 40, "ten records fill a batch, then another"
    assert set(Counter(chosen)) == {0, 1, 2, 3}


def test_a_seed_repeats_the_choices() -> None:
    seed = random.randrange(1 << 32)
    runs = []
    for _ in range(2):
        choose = KeyPartitioner(batch_bytes=10, seed=seed)
        runs.append([choose(None, b"12345", 8) for _ in range(100)])
    assert runs[0] == runs[1], seed


def test_more_partitions_are_used_when_they_appear_and_one_is_enough() -> None:
    choose = KeyPartitioner(batch_bytes=1, seed=1)
    assert {choose(None, None, 1) for _ in range(10)} == {0}
    assert {choose(None, b"", 2) for _ in range(100)} == {0, 1}
    assert {choose(None, b"v", 3) for _ in range(100)} == {0, 1, 2}
    assert choose(None, b"v", 1) == 0, "never one that is not there"
    with pytest.raises(ValueError, match="batch_bytes"):
        KeyPartitioner(batch_bytes=0)
