"""The judge itself: Kafka's dumper accepts what a broker wrote, and bites where it should."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .dumped import Printed, batches_of, parse_dump
from .kafka import DumpError, dump_log, require_kafka
from .rows import load_expected

pytestmark = pytest.mark.interop

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture(autouse=True)
def kafka() -> None:
    require_kafka()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "idempotent" / "idempotent-0", tmp_path / "idempotent-0"))


def test_a_cleanly_stopped_brokers_files_pass_every_check() -> None:
    unclean = GOLDEN / "unclean"
    directories = [path for path in GOLDEN.glob("*/*-0") if path.parent != unclean]
    dump_log(directories, index_sanity=True, allow_gaps=True)
    dump_log(directories, verify_index=True, allow_gaps=True)


def test_the_dump_shows_every_record() -> None:
    expected = load_expected(GOLDEN / "idempotent" / "expected.json")
    directory = GOLDEN / "idempotent" / "idempotent-0"
    batches = batches_of(parse_dump(dump_log([directory])), directory)
    printed = [record for batch in batches for record in batch.records]
    assert printed == [Printed.of(row) for row in expected.rows]


def test_a_flipped_byte_is_reported(copy: Path) -> None:
    log = min(copy.glob("*.log"))
    damaged = bytearray(log.read_bytes())
    damaged[70] ^= 1
    log.write_bytes(damaged)
    with pytest.raises(DumpError):
        dump_log([log])


def test_a_torn_tail_is_reported(copy: Path) -> None:
    log = max(copy.glob("*.log"))
    log.write_bytes(log.read_bytes()[:-5])
    with pytest.raises(DumpError, match="invalid bytes"):
        dump_log([log])


def test_an_index_entry_that_points_elsewhere_is_reported(copy: Path) -> None:
    index = min(copy.glob("*.index"))
    damaged = bytearray(index.read_bytes())
    damaged[3] += 1
    index.write_bytes(damaged)
    with pytest.raises(DumpError, match="Mismatches in"):
        dump_log([copy], verify_index=True)


def test_an_index_of_a_torn_length_is_reported(copy: Path) -> None:
    index = min(copy.glob("*.timeindex"))
    index.write_bytes(index.read_bytes() + b"\x00\x00\x00")
    with pytest.raises(DumpError):
        dump_log([copy], index_sanity=True)


def test_a_damaged_snapshot_is_reported(copy: Path) -> None:
    snapshot = max(copy.glob("*.snapshot"))
    damaged = bytearray(snapshot.read_bytes())
    damaged[12] ^= 1
    snapshot.write_bytes(damaged)
    with pytest.raises(DumpError):
        dump_log([copy])
