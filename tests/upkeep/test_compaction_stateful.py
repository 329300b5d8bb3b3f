"""Compaction against a dictionary, through random histories with tiny maps, cuts and crashes.

The model remembers every record ever appended and not cut, trimmed or purged.  What the log shows
must be a part of that: never another record at an offset, never less than the newest value of every
key, and nothing missing at or above the offset up to which it has been compacted.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from logstore import Compactor, ManualClock, Partition, PartitionConfig, Record
from tests.machines import PartitionMachine

CONFIG = PartitionConfig(segment_bytes=1024, delete_retention_ms=100, index_interval_bytes=64)
KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b""])
VALUES = st.one_of(st.none(), st.binary(max_size=40))


class CompactionMachine(PartitionMachine):
    """Every rule changes the log and the model alike; the invariants compare."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.model: dict[int, tuple[bytes, bytes | None]] = {}
        self.log = self.open()

    def open(self) -> Partition:
        return Partition.open(self.path, durability="os", config=CONFIG, clock=self.clock)

    # ---- what happens to it ----

    @rule(records=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=12))
    def extend(self, records: list[tuple[bytes, bytes | None]]) -> None:
        offsets = self.log.extend([Record(value, key=key) for key, value in records])
        self.model.update(zip(offsets, records, strict=True))

    @rule(
        records=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=12),
        compression=st.sampled_from(["none", "gzip", "zstd"]),
    )
    def write(self, records: list[tuple[bytes, bytes | None]], compression: str) -> None:
        start = self.log.end_offset
        with self.log.writer(compression=compression, batch_bytes=256) as out:
            for key, value in records:
                out.append(value, key=key)
        self.model.update(zip(range(start, self.log.end_offset), records, strict=True))

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule(ms=st.integers(1, 150))
    def wait(self, ms: int) -> None:
        self.clock.advance(ms)

    @rule(keys=st.sampled_from([1, 2, 3, 1000]), io_bytes=st.sampled_from([1, 4096]))
    def compact(self, keys: int, io_bytes: int) -> None:
        told = Compactor(self.log, min_cleanable_dirty_ratio=0, memory_bytes=24 * (keys + 1)).run(
            dry_run=True
        )
        report = Compactor(
            self.log, min_cleanable_dirty_ratio=0, memory_bytes=24 * (keys + 1), io_bytes=io_bytes
        ).run()
        if report.passes:
            assert report.end_offset == self.log.segments[-1].base_offset
            assert self.log.first_dirty_offset == report.end_offset
        if report.passes == 1:
            assert told.records_after == report.records_after
            assert told.bytes_after == report.bytes_after

    @rule(key=KEYS)
    def purge(self, key: bytes) -> None:
        visible = sum(record.key == key for record in self.log)
        assert Compactor(self.log).purge(key).purged == visible
        self.model = {o: record for o, record in self.model.items() if record[0] != key}

    @rule(fraction=st.floats(0, 1))
    def truncate(self, fraction: float) -> None:
        start, end = self.log.start_offset, self.log.end_offset
        cut = start + round(fraction * (end - start))
        self.log.truncate(cut)
        self.model = {o: record for o, record in self.model.items() if o < cut}
        # A key whose newest record was cut may have lost its older ones to compaction before.
        shown = {record.offset for record in self.log}
        self.model = {
            o: record for o, record in self.model.items()
            if o in shown or any(other > o and self.model[other][0] == record[0] and other in shown
                                 for other in self.model)
        }  # fmt: skip

    @rule(fraction=st.floats(0, 1))
    def trim(self, fraction: float) -> None:
        start, end = self.log.start_offset, self.log.end_offset
        cut = start + round(fraction * (end - start))
        self.log.trim(cut)
        self.model = {o: record for o, record in self.model.items() if o >= cut}

    @rule()
    def reopen(self) -> None:
        self.open_again()
        assert self.log.recovery.clean

    @rule()
    def crash(self) -> None:
        self.open_killed()
        assert not self.log.recovery.damage and not self.log.recovery.torn

    # ---- what must hold ----

    @invariant()
    def every_record_is_one_that_was_appended(self) -> None:
        offsets = []
        for record in self.log:
            offsets.append(record.offset)
            assert self.model[record.offset] == (record.key, record.value)
        assert offsets == sorted(set(offsets))

    @invariant()
    def the_newest_value_of_every_key_is_there(self) -> None:
        newest: dict[bytes, tuple[int, bytes | None]] = {}
        for offset, (key, value) in sorted(self.model.items()):
            newest[key] = (offset, value)
        for key, (offset, value) in newest.items():
            found = self.log.get(key)
            if value is None:
                assert found is None  # and no older value has come back
            else:
                assert found is not None and (found.offset, found.value) == (offset, value)

    @invariant()
    def nothing_is_missing_where_it_has_not_been_compacted(self) -> None:
        dirty = self.log.first_dirty_offset
        assert [r.offset for r in self.log.scan(dirty)] == [
            o for o in sorted(self.model) if o >= dirty
        ]

    @precondition(lambda self: self.log.first_dirty_offset > 0)
    @invariant()
    def no_key_is_there_twice_where_it_has_been_compacted(self) -> None:
        dirty = self.log.first_dirty_offset
        if dirty > self.log.start_offset:
            keys = [record.key for record in self.log.scan(None, dirty)]
            assert len(keys) == len(set(keys))


CompactionMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
)
TestCompaction = CompactionMachine.TestCase
