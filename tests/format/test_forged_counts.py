"""A batch whose header counts other records than it holds, with the right checksum."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from logstore import (
    Compactor,
    CorruptLogError,
    Partition,
    PartitionConfig,
    ProblemKind,
    _native,
    repair,
)
from logstore.format import codecs
from logstore.format.batch import EndMarker
from logstore.log.segment_contents import decompress
from logstore.testing import ReferenceRecord, encode_batch
from tests.kit import with_crc

LARGEST = (1 << 31) - 1


def forged(raw: bytes, count: int, base_offset: int = 0) -> bytes:
    """The batch with another count and the offsets that such a count needs."""
    batch = bytearray(raw)
    struct.pack_into(">q", batch, 0, base_offset)
    struct.pack_into(">i", batch, 23, count - 1)
    struct.pack_into(">i", batch, 57, count)
    return with_crc(batch)


def one_record(codec: int = 0) -> bytes:
    return encode_batch([ReferenceRecord(b"v" * 100, b"k", (), 1, 0)], base_offset=0, codec=codec)


def log_of(path: Path, *batches: bytes) -> Path:
    path.mkdir()
    (path / f"{0:020d}.log").write_bytes(b"".join(batches))
    return path


@pytest.mark.parametrize("codec", [0, 1])
def test_no_memory_is_taken_for_records_that_are_not_there(codec: int) -> None:
    raw = forged(one_record(codec), LARGEST)
    with pytest.raises(ValueError, match="more records than its bytes can hold"):
        _native.batch_below(raw, 1, decompress, codecs.compress, 1000)


@pytest.mark.parametrize("codec", [0, 1])
def test_truncate_in_a_forged_batch_names_the_place_and_changes_nothing(
    tmp_path: Path, codec: int
) -> None:
    good, bad = one_record(), forged(one_record(codec), 3, base_offset=1)
    path = log_of(tmp_path / "t-0", good, bad)
    with Partition.open(path) as log:
        with pytest.raises(CorruptLogError) as raised:
            log.truncate(2)
        assert raised.value.path == str(path / f"{0:020d}.log")
        assert (raised.value.position, raised.value.offsets) == (len(good), range(1, 4))
        assert log.end_offset == 4
        assert log.append(b"next") == 4
        log.truncate(1)
        assert [record.offset for record in log] == [0]


def test_more_records_than_the_bytes_can_hold_are_no_batch(tmp_path: Path) -> None:
    path = log_of(tmp_path / "t-0", forged(one_record(), LARGEST))
    with Partition.open(path) as log:
        assert log.end_offset == 0


def test_check_finds_and_repair_cuts_a_forged_control_batch(tmp_path: Path) -> None:
    marker = EndMarker(True, 0).encode(producer_id=7, producer_epoch=0, timestamp=1)
    record = [ReferenceRecord(b"v", b"k", (), 1, 3)]
    path = log_of(
        tmp_path / "t-0",
        one_record(),
        forged(marker, 2, base_offset=1),
        encode_batch(record, base_offset=3),
    )
    config = PartitionConfig(cleanup_policy="compact")
    with Partition.open(path, config=config) as log:
        log.roll()
        problems = log.check(on_corrupt="report")
        assert [(p.kind, p.offsets) for p in problems] == [(ProblemKind.DAMAGED_BATCH, range(1, 3))]
        with pytest.raises(CorruptLogError):
            list(log)
        assert [r.offset for r in log.scan(on_corrupt="skip")] == [0, 3]
    assert repair(path, dry_run=False, accept_loss=True).left == []
    with Partition.open(path, config=config) as log:
        Compactor(log).run()
        assert [(r.offset, r.value) for r in log] == [(3, b"v")]
        assert [p.kind for p in log.check()] == [ProblemKind.KEPT_ASIDE]


def test_a_batch_whose_end_offset_is_no_int64_is_no_batch(tmp_path: Path) -> None:
    """`last_offset + 1` must not wrap around to a negative number."""
    base = (1 << 63) - 1 - LARGEST
    batch = bytearray(one_record())
    struct.pack_into(">q", batch, 0, base)
    struct.pack_into(">i", batch, 23, LARGEST)
    struct.pack_into(">I", batch, 17, _native.crc32c(bytes(batch[21:])))
    path = log_of(tmp_path / "t-0")
    (path / "x.log").write_bytes(batch)
    file = _native.File(-1, str(path / "x.log"), "x.log")
    found = _native.scan_prefix(file, base, 0, len(batch), base, 4096, False, None)
    assert (found["position"], found["next_offset"]) == (0, base)
