"""Every byte of a segment changed, every length of it cut: damage is seen, or does no harm."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from logstore import CorruptLogError, Partition, PartitionConfig
from logstore.files.disk_reserve import RESERVE_NAME
from logstore.testing import (
    ReferenceBatch,
    ReferenceRecord,
    as_reference,
    check_invariants,
    read_log,
)

HEADER_BYTES = 61
LOG = f"{0:020d}.log"
CONFIG = PartitionConfig(segment_bytes=1 << 20, index_interval_bytes=1_000)
EVERY = pytest.mark.parametrize(
    "step", [pytest.param(9, id="most"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)


@dataclass(frozen=True)
class Sample:
    """A partition of one segment, and what it holds."""

    path: Path
    contents: bytes
    batches: list[ReferenceBatch]

    @property
    def log(self) -> Path:
        return self.path / LOG

    @property
    def records(self) -> list[ReferenceRecord]:
        return [record for batch in self.batches for record in batch.records]

    def before(self, position: int) -> list[ReferenceBatch]:
        """The batches that lie wholly before a position."""
        return [batch for batch in self.batches if batch.position + batch.size <= position]

    def positions(self, step: int) -> list[int]:
        """Every byte of a header and of the seam before it; elsewhere one in ``step``."""
        seams = {
            at
            for batch in self.batches
            for at in range(max(0, batch.position - 8), batch.position + HEADER_BYTES + 1)
        }
        return sorted(seams | set(range(0, len(self.contents), step)))

    def at(self, position: int) -> ReferenceBatch:
        """The batch that a byte belongs to."""
        return [batch for batch in self.batches if batch.position <= position][-1]


@pytest.fixture
def root() -> Iterator[Path]:
    """In memory where that is possible: tens of thousands of opens are made here."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="logstore-damage-", dir=shm if shm.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def fill(log: Partition) -> None:
    """About 16 KiB in six batches, of every kind of payload."""
    for number, compression in enumerate(["none", "lz4", "none", "zstd", "gzip", "none"]):
        with log.writer(compression=compression, batch_bytes=1 << 20) as out:
            for index in range(34 if compression == "none" else 90):
                out.append(
                    b"record %d of batch %d " % (index, number) + bytes([index]) * 60,
                    key=b"key %d" % index,
                    headers=[("h", None), ("trace", b"%d" % index)],
                    timestamp=1_000 * number + index,
                )


def sample_of(path: Path) -> Sample:
    contents = (path / LOG).read_bytes()
    assert 14_000 < len(contents) < 20_000
    return Sample(path, contents, read_log(path / LOG))


@pytest.fixture
def closed(root: Path) -> Sample:
    """A partition that was closed cleanly."""
    path = root / "orders-0"
    with Partition.open(path, durability="os", config=CONFIG) as log:
        fill(log)
    return sample_of(path)


@pytest.fixture
def killed(root: Path) -> Sample:
    """What a killed process leaves of the same partition; nothing of it was ever synced."""
    path = root / "killed" / "orders-0"
    with Partition.open(root / "orders-0", durability="os", config=CONFIG) as log:
        fill(log)
        shutil.copytree(root / "orders-0", path)
    return sample_of(path)


def read(log: Partition) -> list[ReferenceRecord]:
    return [as_reference(record) for record in log.scan()]


def try_to_read(log: Partition) -> tuple[list[ReferenceRecord], CorruptLogError | None]:
    """The records, or the damage that was met."""
    try:
        return read(log), None
    except CorruptLogError as error:
        return [], error


def open_and_read(path: Path) -> list[ReferenceRecord]:
    with Partition.open(path, readonly=True, config=CONFIG) as log:
        return read(log)


# ------------------------------------------------------------------------------- a changed byte


@EVERY
def test_every_value_of_every_header_byte_is_seen_or_harmless(closed: Sample, step: int) -> None:
    first, _, _, compressed, _, last = closed.batches
    chosen = closed.batches if step == 1 else [first, compressed, last]
    with (
        closed.log.open("r+b", buffering=0) as file,
        Partition.open(closed.path, readonly=True, config=CONFIG) as log,
    ):
        assert read(log) == closed.records
        for batch in chosen:
            # from the record before the batch to the one after it
            around = slice(max(0, batch.base_offset - 1), batch.next_offset + 1)
            expected = closed.records[around]
            for position in range(batch.position, batch.position + HEADER_BYTES):
                original = closed.contents[position]
                for value in range(256):
                    if value == original:
                        continue
                    os.pwrite(file.fileno(), bytes([value]), position)
                    try:
                        found = [as_reference(record) for record in log[around]]
                    except CorruptLogError:
                        continue
                    assert found == expected, f"byte {position}: {original} read as {value}"
                    # only the leader epoch is neither checked nor needed
                    assert 12 <= position - batch.position < 16
                os.pwrite(file.fileno(), bytes([original]), position)
        assert read(log) == closed.records


def test_every_byte_behind_the_headers_is_seen(closed: Sample) -> None:
    with (
        closed.log.open("r+b", buffering=0) as file,
        Partition.open(closed.path, readonly=True, config=CONFIG) as log,
    ):
        for batch in closed.batches:
            for position in range(batch.position + HEADER_BYTES, batch.position + batch.size):
                original = closed.contents[position]
                for change in (0x01, 0x80, 0xFF):
                    os.pwrite(file.fileno(), bytes([original ^ change]), position)
                    with pytest.raises(CorruptLogError):
                        next(iter(log.scan(batch.base_offset)))
                os.pwrite(file.fileno(), bytes([original]), position)
        assert read(log) == closed.records


@EVERY
def test_opening_with_any_changed_byte_reports_it_or_reads_the_same(
    closed: Sample, step: int
) -> None:
    source = random.Random(1)
    with closed.log.open("r+b", buffering=0) as file:
        for position in closed.positions(step):
            original = closed.contents[position]
            value = (original + source.randrange(1, 256)) % 256
            os.pwrite(file.fileno(), bytes([value]), position)
            with Partition.open(closed.path, readonly=True, config=CONFIG) as log:
                found, error = try_to_read(log)
            if error is None:
                assert found == closed.records, f"byte {position}: {original} read as {value}"
            else:
                batch = closed.at(position)
                assert Path(error.path) == closed.log
                assert error.position == batch.position
                assert batch.base_offset in error.offsets
            os.pwrite(file.fileno(), bytes([original]), position)


def test_records_outside_the_damaged_batch_stay_readable(closed: Sample) -> None:
    with (
        closed.log.open("r+b", buffering=0) as file,
        Partition.open(closed.path, readonly=True, config=CONFIG) as log,
    ):
        for batch in closed.batches:
            kept = [record for record in closed.records if record not in batch.records]
            for position in [*range(batch.position, batch.position + HEADER_BYTES, 3),
                             batch.position + batch.size - 1]:  # fmt: skip
                if 12 <= position - batch.position < 16:
                    continue
                original = closed.contents[position]
                os.pwrite(file.fileno(), bytes([original ^ 0x55]), position)
                found = [as_reference(record) for record in log.scan(on_corrupt="skip")]
                assert found == kept, f"byte {position}"
                for record in (kept[0], kept[-1]):
                    assert as_reference(log[record.offset]) == record
                os.pwrite(file.fileno(), bytes([original]), position)


def test_damage_in_what_a_killed_process_left_never_invents_or_reorders(killed: Sample) -> None:
    """Without a clean close the last batch may be a torn write; all others may not."""
    source = random.Random(2)
    last = killed.batches[-1]
    pristine = killed.path.with_name("pristine")
    killed.path.rename(pristine)
    for position in sorted(source.sample(range(len(killed.contents)), 1_500)):
        shutil.copytree(pristine, killed.path)
        batch = killed.at(position)
        damaged = bytearray(killed.contents)
        damaged[position] ^= source.randrange(1, 256)
        killed.log.write_bytes(damaged)
        with Partition.open(killed.path, durability="os", config=CONFIG) as log:
            found, error = try_to_read(log)
            if error is not None:
                assert log.recovery.damage, f"byte {position}: not reported at open"
                assert error.position == batch.position
                assert batch.base_offset in error.offsets
            elif log.recovery.torn:
                assert batch is last, f"byte {position}: cut as a torn tail"
                assert found == [r for b in killed.batches[:-1] for r in b.records]
            else:
                assert found == killed.records, f"byte {position}"
        shutil.rmtree(killed.path)


# ------------------------------------------------------------------------------------- a cut file


@EVERY
def test_every_truncation_recovers_the_longest_valid_prefix(killed: Sample, step: int) -> None:
    others = {file.name: file.read_bytes() for file in killed.path.iterdir() if file.name != LOG}
    for size in [*killed.positions(step), len(killed.contents)]:
        for file in killed.path.iterdir():
            if file.name not in others:
                file.unlink()
        for name, contents in others.items():
            (killed.path / name).write_bytes(contents)
        killed.log.write_bytes(killed.contents[:size])

        whole = killed.before(size)
        valid = whole[-1].position + whole[-1].size if whole else 0
        end = whole[-1].next_offset if whole else 0
        with Partition.open(killed.path, durability="os", config=CONFIG) as log:
            assert log.end_offset == end, f"cut at {size}"
            if size % 61 == 0:  # reading is slower than opening
                assert read(log) == [record for batch in whole for record in batch.records]
                check_invariants(log)
            torn = log.recovery.torn
            assert not log.recovery.damage
        assert killed.log.read_bytes() == killed.contents[:valid]
        if size == valid:
            assert torn == [], f"cut at {size}"
            continue
        (tail,) = torn
        assert (tail.position, tail.size_bytes) == (valid, size - valid)
        kept = tail.kept_as
        if kept is None:
            assert not killed.contents[valid:size].strip(b"\0")  # zeros are not worth keeping
        else:
            assert kept.read_bytes() == killed.contents[valid:size]


def test_a_reader_of_a_cut_file_sees_the_same_prefix_and_changes_nothing(killed: Sample) -> None:
    for size in range(0, len(killed.contents) + 1, 7):
        os.truncate(killed.log, 0)
        killed.log.write_bytes(killed.contents[:size])
        before = {file.name: file.read_bytes() for file in killed.path.iterdir()}
        expected = [record for batch in killed.before(size) for record in batch.records]
        assert open_and_read(killed.path) == expected, f"cut at {size}"
        assert {file.name: file.read_bytes() for file in killed.path.iterdir()} == before


def test_a_cleanly_closed_log_that_is_cut_afterwards_is_noticed(closed: Sample) -> None:
    """What was closed cleanly was durable: a missing end is damage, not a torn write."""
    for size in [0, 1, 60, *(b.position for b in closed.batches[1:]), len(closed.contents) - 1]:
        closed.log.write_bytes(closed.contents[:size])
        whole = closed.before(size)
        with Partition.open(closed.path, readonly=True, config=CONFIG) as log:
            with pytest.raises(CorruptLogError):
                read(log)
            found = [as_reference(record) for record in log.scan(on_corrupt="skip")]
            assert found == [record for batch in whole for record in batch.records]


# ------------------------------------------------------------------------------ several segments


@pytest.fixture
def rolled(root: Path) -> Path:
    """A partition of seven segments of nine batches, closed cleanly."""
    path = root / "orders-0"
    config = PartitionConfig(segment_bytes=2_000, index_interval_bytes=200)
    with Partition.open(path, durability="os", config=config) as log:
        for number in range(60):
            log.append(b"%02d" % number + bytes(150), timestamp=number)
        assert len(log.segments) == 7
    return path


def check_missing(path: Path, missing: range) -> None:
    """A reader of missing records gets an error; all other records are there."""
    for readonly in (True, False):
        copy = path.with_name(f"copy{readonly}") / "orders-0"
        shutil.copytree(path, copy)
        with Partition.open(copy, readonly=readonly, durability="os") as log:
            with pytest.raises(CorruptLogError) as caught:
                read(log)
            assert set(missing) <= set(caught.value.offsets)
            with pytest.raises(CorruptLogError):
                log[missing[0]]
            scan = log.scan(on_corrupt="skip")
            found = [record.offset for record in scan]
            assert found == [offset for offset in range(60) if offset not in missing]
            assert [set(missing) <= set(skipped.offsets) for skipped in scan.skipped] == [True]
            assert log[missing.stop].offset == missing.stop
        shutil.rmtree(copy.parent)


@pytest.mark.parametrize("kept", [0, 1, 8], ids=["all", "all but one", "one"])
def test_batches_missing_from_the_end_of_a_sealed_segment_are_noticed(
    rolled: Path, kept: int
) -> None:
    """The cut is clean: every batch that is left is valid."""
    second = sorted(rolled.glob("*.log"))[1]
    batches = read_log(second)
    os.truncate(second, batches[kept].position)
    check_missing(rolled, range(batches[kept].base_offset, batches[-1].next_offset))


def test_a_missing_segment_is_noticed(rolled: Path) -> None:
    second = sorted(rolled.glob("*.log"))[1]
    batches = read_log(second)
    second.unlink()
    check_missing(rolled, range(batches[0].base_offset, batches[-1].next_offset))


# --------------------------------------------------------------------------------- other files


def changed(file: Path) -> Iterator[str]:
    """Change one byte of a file after another, several ways; afterwards all is as it was."""
    original = file.read_bytes()
    # The reserve is a quarter of a MiB of zeros that are never read.
    step = 4096 if file.name == RESERVE_NAME else 1
    for position in range(0, len(original), step):
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(original)
            damaged[position] ^= change
            file.write_bytes(damaged)
            yield f"{file.name} byte {position} ^ {change:02x}"
    file.write_bytes(original)


def test_a_damaged_offset_index_never_changes_what_is_read(closed: Sample) -> None:
    """Indexes are hints: a wrong one costs time."""
    records = closed.records
    for what in changed(closed.log.with_suffix(".index")):
        with Partition.open(closed.path, readonly=True, config=CONFIG) as log:
            assert read(log) == records, what
            for record in [*records[::40], *(batch.records[-1] for batch in closed.batches)]:
                assert as_reference(log[record.offset]) == record, f"{what}: {record.offset}"
                found = next(iter(log.scan(record.offset)), None)
                assert found is not None, f"{what}: nothing from {record.offset} on"
                assert as_reference(found) == record, f"{what}: {record.offset}"
            assert as_reference(log.tail(1)[0]) == records[-1], what


def test_a_damaged_time_index_never_changes_what_is_found(closed: Sample) -> None:
    for what in changed(closed.log.with_suffix(".timeindex")):
        with Partition.open(closed.path, readonly=True, config=CONFIG) as log:
            for batch in closed.batches:
                for record in (batch.records[0], batch.records[-1]):
                    found = log.offset_for_time(record.timestamp)
                    assert found == record.offset, f"{what}: time {record.timestamp}"
            assert log.offset_for_time(closed.records[-1].timestamp + 1) == log.end_offset, what


def test_damaged_side_files_never_change_a_record(closed: Sample) -> None:
    """They only make claims; one that cannot be true, or read, costs a longer recovery."""
    data = {LOG, Path(LOG).with_suffix(".index").name, Path(LOG).with_suffix(".timeindex").name}
    files = [file for file in closed.path.iterdir() if file.name not in data]
    assert files
    for file in files:
        for what in changed(file):
            with Partition.open(closed.path, readonly=True, config=CONFIG) as log:
                assert (log.start_offset, log.end_offset) == (0, len(closed.records)), what
                assert as_reference(log[0]) == closed.records[0], what
                assert as_reference(log.tail(1)[0]) == closed.records[-1], what


def test_missing_side_files_never_change_a_record(closed: Sample) -> None:
    for file in [file for file in closed.path.iterdir() if file.name != LOG]:
        hidden = file.rename(closed.path.parent / file.name)
        assert open_and_read(closed.path) == closed.records, file.name
        hidden.rename(file)
