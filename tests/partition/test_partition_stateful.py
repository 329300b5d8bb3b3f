"""A partition against the plain-list model, through random histories with rolls and crashes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from logstore import OffsetOutOfRangeError, Partition, PartitionConfig, Record
from logstore.testing import LogModel, ReferenceRecord, as_reference, check_invariants
from logstore.testing.strategies import record_lists, records, timestamps
from tests.machines import PartitionMachine

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
# Small enough that a handful of appends rolls the segment and fills an index.
TINY = PartitionConfig(segment_bytes=1 << 14, index_interval_bytes=100)


def plain(found: Iterable[Record]) -> list[ReferenceRecord]:
    return [as_reference(record) for record in found]


class LogMachine(PartitionMachine):
    """Every rule does the same to the log and to the model, and compares what both show."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LogModel()
        self.log = self.open()

    def open(self) -> Partition:
        return Partition.open(self.path, durability="os", config=TINY)

    def offset(self, fraction: float) -> int:
        """An offset from just below the log to just beyond it."""
        low, high = self.model.start_offset - 1, self.model.end_offset + 1
        return max(0, low + round(fraction * (high - low)))

    # ------------------------------------------------------------------------------------ writing

    @rule(record=records(), durability=st.sampled_from([None, None, "os", "fsync"]))
    def append(self, record: Record, durability: str | None) -> None:
        assert record.timestamp is not None
        offset = self.log.append(
            record.value,
            key=record.key,
            headers=record.headers,
            timestamp=record.timestamp,
            durability=durability,
        )
        expected = self.model.append(
            record.value, key=record.key, headers=record.headers, timestamp=record.timestamp
        )
        assert offset == expected
        if durability == "fsync":
            assert self.log.durable_offset == self.log.end_offset

    @rule(batch=record_lists(min_size=0))
    def extend(self, batch: list[Record]) -> None:
        assert self.log.extend(batch) == self.model.extend(batch)

    @rule(
        batches=st.lists(record_lists(max_value_size=2_000), min_size=1, max_size=3),
        compression=st.sampled_from(CODECS),
        batch_bytes=st.sampled_from([256, 1_024, 8_192]),
    )
    def write(self, batches: list[list[Record]], compression: str, batch_bytes: int) -> None:
        with self.log.writer(compression=compression, batch_bytes=batch_bytes) as out:
            for batch in batches:
                for record in batch:
                    out.append(
                        record.value,
                        key=record.key,
                        headers=record.headers,
                        timestamp=record.timestamp,
                    )
                self.model.extend(batch)
                out.flush()
                assert self.log.end_offset == self.model.end_offset

    @rule(size=st.integers(1_000, 9_000))
    def append_large(self, size: int) -> None:
        assert self.log.append(bytes(size), timestamp=7) == self.model.append(
            bytes(size), timestamp=7
        )

    # ------------------------------------------------------------------------- segments and crashes

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule()
    def sync(self) -> None:
        self.log.sync()
        assert self.log.durable_offset == self.log.end_offset

    @rule()
    def reopen(self) -> None:
        self.open_again()

    @rule()
    def crash(self) -> None:
        self.open_killed()

    @rule(junk=st.binary(min_size=1, max_size=100) | st.just(bytes(300)))
    def crash_in_a_write(self, junk: bytes) -> None:
        """The same with half a batch, or the zeros of a grown file, at the end."""
        self.open_killed(junk)

    @rule(fraction=st.floats(0, 1))
    def truncate(self, fraction: float) -> None:
        end = min(max(self.offset(fraction), self.model.start_offset), self.model.end_offset)
        self.log.truncate(end)
        self.model.truncate(end)

    @rule(fraction=st.floats(0, 1))
    def trim(self, fraction: float) -> None:
        start = min(max(self.offset(fraction), self.model.start_offset), self.model.end_offset)
        self.log.trim(start)
        self.model.trim(start)

    # ------------------------------------------------------------------------------------ reading

    @rule(low=st.floats(0, 1), high=st.floats(0, 1), open_ended=st.booleans())
    def scan(self, low: float, high: float, open_ended: bool) -> None:
        start = min(max(self.offset(low), self.model.start_offset), self.model.end_offset)
        stop = None if open_ended else self.offset(high)
        assert plain(self.log.scan(start, stop)) == self.model.scan(start, stop)

    @rule(fraction=st.floats(0, 1), negative=st.booleans())
    def index(self, fraction: float, negative: bool) -> None:
        offset = self.offset(fraction)
        inside = self.model.start_offset <= offset < self.model.end_offset
        index = offset - self.model.end_offset if negative and inside else offset
        if inside:
            assert as_reference(self.log[index]) == self.model[offset]
        else:
            with pytest.raises(OffsetOutOfRangeError):
                self.log[index]

    @precondition(lambda self: self.model.records)
    @rule(back=st.integers(1, 30), length=st.integers(0, 30))
    def negative_slice(self, back: int, length: int) -> None:
        back = min(back, len(self.model.records))
        low = self.model.end_offset - back
        stop = -back + length
        expected = self.model.scan(low, low + length)
        found = self.log[-back:] if stop >= 0 else self.log[-back:stop]
        assert plain(found) == (self.model.scan(low) if stop >= 0 else expected)

    @rule(timestamp=timestamps())
    def find_time(self, timestamp: int) -> None:
        assert self.log.offset_for_time(timestamp) == self.model.offset_for_time(timestamp)

    @rule(fraction=st.floats(0, 1))
    def find_time_of_a_record(self, fraction: float) -> None:
        if self.model.records:
            chosen = self.model.records[round(fraction * (len(self.model.records) - 1))]
            self.find_time(chosen.timestamp)
            self.find_time(chosen.timestamp + 1)

    @rule(count=st.integers(0, 50))
    def tail(self, count: int) -> None:
        assert plain(self.log.tail(count)) == self.model.tail(count)

    @rule()
    def read_from_outside(self) -> None:
        """Another handle, as another process would have it."""
        with Partition.open(self.path, readonly=True) as reader:
            assert reader.end_offset == self.model.end_offset
            assert plain(reader.scan()) == self.model.scan()

    @rule()
    def check(self) -> None:
        check_invariants(self.log)

    @invariant()
    def bounds_agree(self) -> None:
        assert self.log.start_offset == self.model.start_offset
        assert self.log.end_offset == self.model.end_offset
        assert self.log.start_offset <= self.log.durable_offset <= self.log.end_offset


def histories(count: int, steps: int) -> settings:
    return settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        report_multiple_bugs=False,
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def test_random_histories_match_the_model() -> None:
    run_state_machine_as_test(LogMachine, settings=histories(60, 40))


@pytest.mark.slow
def test_many_long_random_histories_match_the_model() -> None:
    run_state_machine_as_test(LogMachine, settings=histories(1_500, 80))


# ---------------------------------------------------------------------- what the machine found once


@pytest.mark.parametrize("readonly", [False, True])
def test_a_record_of_time_zero_is_found_after_reopening(tmp_path: Path, readonly: bool) -> None:
    """Its entry in the time index is all zeros, as is the unused room of a broker's index."""
    path = tmp_path / "orders-0"
    with Partition.open(path, durability="os") as log:
        log.append(b"sealed", timestamp=0)
        log.roll()
        log.append(b"active", timestamp=0)
    with Partition.open(path, durability="os", readonly=readonly) as log:
        assert log.recovery.clean
        assert [segment.max_timestamp for segment in log.segments] == [0, 0]
        assert log.offset_for_time(0) == 0
        assert [segment.offset_for_time(0) for segment in log.segments] == [0, 1]


def test_what_was_trimmed_away_counts_as_durable(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "orders-0", durability="os") as log:
        log.append(b"first", timestamp=1)
        log.trim(1)
        assert log.start_offset <= log.durable_offset <= log.end_offset
