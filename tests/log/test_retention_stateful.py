"""Retention against a model: appends, time that passes, policies, readers, reopening, crashes.

The model knows every record that was ever appended, and Kafka's rules in their plainest form,
applied to the files in the directory.  What is left must be exactly what the model has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from logstore import (
    ManualClock,
    OffsetOutOfRangeError,
    Partition,
    PartitionConfig,
    Record,
    RetentionPolicy,
)
from tests.machines import PartitionMachine
from tests.partition.test_partition_stateful import histories

HOUR = 3_600_000
CONFIG = PartitionConfig(segment_bytes=4096, index_interval_bytes=200, segment_ms=1 << 50)

ages = st.none() | st.integers(0, 50 * HOUR)
sizes = st.none() | st.integers(0, 20_000)
counts = st.none() | st.integers(0, 100)


@dataclasses.dataclass
class Reader:
    """An iteration that is under way, and the offset it must give next."""

    records: Iterator[Record]
    offset: int
    fresh: bool = True  # a scan is lazy: it may begin where the log does when it is first asked


class RetentionMachine(PartitionMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.times: list[int] = []  # of every record ever, by offset
        self.start = 0
        self.epoch = 0
        self.readers: list[Reader] = []
        self.log = self.open()

    def open(self) -> Partition:
        return Partition.open(self.path, durability="os", config=CONFIG, clock=self.clock)

    def teardown(self) -> None:
        self.readers.clear()
        super().teardown()

    # ---- writing, and time ----

    @rule(
        batches=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=9)
    )
    def append(self, batches: list[tuple[int, int]]) -> None:
        """Batches of `count` records, `late` hours old: their order in time is not the log's."""
        for count, late in batches:
            time = self.clock.time_ms() - late * HOUR
            first = len(self.times)
            offsets = self.log.extend(
                [Record(b"%d:" % (first + i) + bytes(200), timestamp=time) for i in range(count)]
            )
            assert offsets == range(first, first + count)
            self.times += [time] * count

    @rule(days=st.integers(1, 3))
    def append_for_days(self, days: int) -> None:
        """A segment every four hours."""
        for _ in range(days):
            for _ in range(6):
                self.append([(3, 0), (1, 0)])
                self.let_time_pass(4)
                self.log.roll()

    @rule(hours=st.integers(1, 40))
    def let_time_pass(self, hours: int) -> None:
        self.clock.advance(hours * HOUR)

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule()
    def begin_epoch(self) -> None:
        self.epoch += 1
        self.log.become_leader(self.epoch)

    # ---- retention ----

    def segments(self) -> list[tuple[int, int, int, int]]:
        """(base, end, bytes, newest time) of every segment, from the directory and the model."""
        files = sorted(self.path.glob("*.log"))
        bases = [int(path.stem) for path in files]
        ends = [*bases[1:], len(self.times)]
        return [
            (base, end, path.stat().st_size, max(self.times[base:end], default=-1))
            for path, base, end in zip(files, bases, ends, strict=True)
        ]

    def expected_start(self, policy: RetentionPolicy, now: int) -> int:
        """Kafka's passes, one after the other, each over what the last one left."""
        left = self.segments()
        last = left[-1]
        start = self.start
        gone = 0

        def may_go() -> bool:
            return bool(left) and (left[0] is not last or last[2] > 0)

        while len(left) > 1 and left[1][0] <= start:
            left.pop(0)
        if policy.max_bytes is not None:
            excess = sum(size for _, _, size, _ in left) - policy.max_bytes
            while may_go() and excess - left[0][2] >= 0:
                gone = left[0][1]
                excess -= left.pop(0)[2]
        if policy.max_records is not None:
            excess = len(self.times) - max(start, gone) - policy.max_records
            while may_go() and excess - (left[0][1] - max(left[0][0], start)) >= 0:
                gone = left[0][1]
                excess -= left[0][1] - max(left[0][0], start)
                left.pop(0)
        if policy.max_age_ms is not None:
            while may_go() and now - left[0][3] > policy.max_age_ms:
                gone = left.pop(0)[1]
        return max(start, gone)

    @rule(age=ages, size=sizes, records=counts, dry_run=st.booleans())
    def enforce(
        self, age: int | None, size: int | None, records: int | None, dry_run: bool
    ) -> None:
        policy = RetentionPolicy(max_age_ms=age, max_bytes=size, max_records=records)
        expected = self.expected_start(policy, self.clock.time_ms())
        decisions = self.log.enforce(policy, dry_run=dry_run)
        assert max([self.start, *(d.end_offset for d in decisions if d.delete)]) == expected
        if not dry_run:
            self.start = expected
            assert not list(self.path.glob("*.deleted"))

    @rule(age=st.integers(0, 50 * HOUR), days=st.integers(1, 10_000))
    def enforce_while_the_clock_is_wrong(self, age: int, days: int) -> None:
        """The guard needs to have seen the right time not long before."""
        policy = RetentionPolicy(max_age_ms=age)
        self.log.enforce(RetentionPolicy(), dry_run=True)
        expected = self.expected_start(policy, self.clock.time_ms())
        self.clock.leap(days * 24 * HOUR)
        self.log.enforce(policy)
        self.clock.leap(-days * 24 * HOUR)
        self.log.enforce(RetentionPolicy(), dry_run=True)
        self.start = expected

    @rule(part=st.floats(0, 1))
    def trim(self, part: float) -> None:
        self.start += round(part * (len(self.times) - self.start))
        self.log.trim(self.start)

    # ---- reading ----

    @precondition(lambda self: self.start < len(self.times))
    @rule()
    def start_reading(self) -> None:
        self.readers.append(Reader(iter(self.log.scan()), self.start))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 9), count=st.integers(1, 20))
    def read_on(self, which: int, count: int) -> None:
        reader = self.readers[which % len(self.readers)]
        for _ in range(count):
            try:
                record = next(reader.records)
            except StopIteration:
                self.readers.remove(reader)
                return
            except OffsetOutOfRangeError as error:
                # Its records were deleted: it got an error, so none was skipped silently.
                assert reader.offset < self.start == error.start  # noqa: PT017
                assert error.offset == reader.offset  # noqa: PT017
                self.readers.remove(reader)
                return
            if reader.fresh and record.offset == self.start:
                reader.offset = self.start
            reader.fresh = False
            assert record.offset == reader.offset
            assert record.value is not None
            assert record.value.startswith(b"%d:" % record.offset)
            assert record.timestamp == self.times[record.offset]
            reader.offset += 1

    @rule()
    def read_all(self) -> None:
        found = [(record.offset, record.timestamp) for record in self.log]
        assert found == list(enumerate(self.times))[self.start :]

    @rule()
    def read_from_outside(self) -> None:
        with Partition.open(self.path, readonly=True) as reader:
            assert reader.start_offset == self.start
            assert [record.offset for record in reader] == list(range(self.start, len(self.times)))

    # ---- closing and crashing ----

    @rule()
    def reopen(self) -> None:
        self.readers.clear()
        self.open_again()

    @rule()
    def crash(self) -> None:
        self.readers.clear()
        self.open_killed()

    @invariant()
    def bounds_agree(self) -> None:
        assert (self.log.start_offset, self.log.end_offset) == (self.start, len(self.times))
        epochs = self.log.leader_epochs
        assert epochs.latest == self.log.leader_epoch == self.epoch
        assert all(self.start <= offset <= len(self.times) for _, offset in epochs.entries)


def test_what_stays_is_what_the_model_keeps() -> None:
    run_state_machine_as_test(RetentionMachine, settings=histories(60, 40))


@pytest.mark.slow
def test_what_stays_is_what_the_model_keeps_in_many_long_histories() -> None:
    run_state_machine_as_test(RetentionMachine, settings=histories(1_000, 80))
