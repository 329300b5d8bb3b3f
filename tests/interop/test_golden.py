"""Directories written by a real broker are read as a real consumer read them.  No Java needed."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from logstore import Partition, RecordNotFoundError

from .rows import Expected, Row, load_expected, row_of

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))


@pytest.fixture(params=CASES)
def expected(request: pytest.FixtureRequest) -> Expected:
    return load_expected(GOLDEN / request.param / "expected.json")


@pytest.fixture
def golden(expected: Expected) -> Path:
    return GOLDEN / expected.topic / f"{expected.topic}-0"


@pytest.fixture
def copy(golden: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden, tmp_path / golden.name))


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


def test_all_cases_are_present() -> None:
    assert {"none", "gzip", "snappy", "lz4", "zstd", "transactional", "compacted"} <= set(CASES)


def test_readonly_open_shows_what_a_consumer_saw(golden: Path, expected: Expected) -> None:
    with Partition.open(golden, readonly=True) as log:
        assert [row_of(record) for record in log.scan()] == expected.rows
        assert (log.start_offset, log.end_offset) == (expected.start_offset, expected.end_offset)
        assert (log.topic, log.number) == (expected.topic, 0)


def test_readonly_open_changes_no_file(golden: Path) -> None:
    before = digests(golden)
    with Partition.open(golden, readonly=True) as log:
        assert list(log.scan())
    assert digests(golden) == before


def test_control_records_are_never_shown(golden: Path, expected: Expected) -> None:
    with Partition.open(golden, readonly=True) as log:
        shown = {record.offset for record in log.scan()}
    assert not shown & expected.control
    assert expected.aborted <= shown, "read_uncommitted shows aborted records"


def test_scan_from_any_offset_starts_at_the_first_record_not_before_it(
    golden: Path, expected: Expected
) -> None:
    with Partition.open(golden, readonly=True) as log:
        for start in range(expected.start_offset, expected.end_offset):
            wanted = next((row for row in expected.rows if row.offset >= start), None)
            found = next(iter(log.scan(start)), None)
            assert (found and row_of(found)) == wanted, f"from offset {start}"


def test_every_offset_is_found_or_known_to_be_gone(golden: Path, expected: Expected) -> None:
    rows = {row.offset: row for row in expected.rows}
    with Partition.open(golden, readonly=True) as log:
        for offset in range(expected.start_offset, expected.end_offset):
            if offset in rows:
                assert row_of(log[offset]) == rows[offset]
            else:
                with pytest.raises(RecordNotFoundError):
                    log[offset]


def test_offset_for_time_is_the_first_record_that_late(golden: Path, expected: Expected) -> None:
    if expected.control:
        pytest.skip("Kafka may answer with the offset of a marker, which is not in expected.json")
    times = sorted({row.timestamp for row in expected.rows})
    with Partition.open(golden, readonly=True) as log:
        for time in [0, *times, *(time + 1 for time in times)]:
            late = (row.offset for row in expected.rows if row.timestamp >= time)
            assert log.offset_for_time(time) == next(late, expected.end_offset), f"at {time}"


def test_writable_open_of_a_copy_shows_the_same_and_goes_on_from_there(
    copy: Path, expected: Expected
) -> None:
    with Partition.open(copy) as log:
        assert [row_of(record) for record in log.scan()] == expected.rows
        appended = log.append(b"ours", key=b"k", headers=[("h", None)], timestamp=1_800_000_000_000)
    assert appended == expected.end_offset
    ours = Row(
        offset=appended,
        timestamp=1_800_000_000_000,
        key=b"k",
        value=b"ours",
        headers=(("h", None),),
    )
    with Partition.open(copy) as log:
        assert [row_of(record) for record in log.scan()] == [*expected.rows, ours]
        assert log.end_offset == appended + 1
        log.check()


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_a_directory_without_its_indexes_is_read_all_the_same(
    copy: Path, expected: Expected, suffix: str
) -> None:
    for path in copy.glob(f"*{suffix}"):
        path.unlink()
    with Partition.open(copy, readonly=True) as log:
        assert [row_of(record) for record in log.scan()] == expected.rows
    with Partition.open(copy) as log:
        assert [row_of(record) for record in log.scan()] == expected.rows


def test_a_tail_torn_at_any_of_its_last_bytes_costs_only_the_last_batch(
    copy: Path, expected: Expected
) -> None:
    last = max(copy.glob("*.log"))
    whole = last.read_bytes()
    for cut in (1, 2, 17, 60):
        last.write_bytes(whole[:-cut])
        with Partition.open(copy, readonly=True) as log:
            shown = [row_of(record) for record in log.scan()]
        assert shown == expected.rows[: len(shown)]
        assert len(expected.rows) - len(shown) <= 30, "more than a batch is missing"
        assert len(shown) < len(expected.rows)
