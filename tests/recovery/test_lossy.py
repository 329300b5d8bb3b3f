"""RecoveryReport.lossy: whether records that a replica has acknowledged may be gone."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from logstore import IndeterminateAppendError, Partition
from logstore.files import boot
from logstore.testing import Fault, inject_io
from tests.kit import crash, flip


def written(path: Path, durability: str) -> Partition:
    log = Partition.open(path, durability=durability)
    for n in range(4):
        log.append(b"%d" % n * 50)
    return log


def opened_lossy(path: Path, durability: str) -> bool:
    with Partition.open(path, durability=durability) as log:
        return log.recovery.lossy


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_clean_close_is_not(tmp_path: Path, durability: str) -> None:
    assert not opened_lossy(tmp_path / "t-0", durability)  # a new log
    written(tmp_path / "t-0", durability).close()
    assert not opened_lossy(tmp_path / "t-0", durability)


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_kill_is_not(tmp_path: Path, durability: str) -> None:
    with written(tmp_path / "t-0", durability) as log:
        killed = crash(log, "u-0")
    assert not opened_lossy(killed, durability)


@pytest.mark.parametrize(("durability", "lossy"), [("os", True), ("fsync", False)])
def test_a_power_cut_is_if_no_fsync_covered_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, lossy: bool
) -> None:
    with written(tmp_path / "t-0", durability) as log:
        killed = crash(log, "u-0")
    monkeypatch.setattr(boot, "boot_override", "another boot")
    assert opened_lossy(killed, durability) is lossy


def test_it_stays_until_it_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with written(tmp_path / "t-0", "os") as log:
        killed = crash(log, "u-0")
    monkeypatch.setattr(boot, "boot_override", "another boot")
    with Partition.open(killed, durability="os") as log:
        assert log.recovery.lossy
        again = crash(log, "v-0")  # killed in the new boot, before it was filled again
        log.append(b"more")
    for path in (killed, killed, again):
        assert opened_lossy(path, "os")
        assert opened_lossy(path, "fsync")
    with Partition.open(killed, durability="os") as log:
        log.parts.active.clear_lossy()
        assert not log.recovery.lossy
        cleared = crash(log, "w-0")
    assert not opened_lossy(killed, "os")
    assert not opened_lossy(cleared, "os")


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_damage_is(tmp_path: Path, durability: str) -> None:
    log = written(tmp_path / "t-0", "fsync")
    log.sync()
    killed = crash(log, "u-0")
    log.close()
    (segment,) = killed.glob("*.log")
    flip(segment, 100)
    with Partition.open(killed, durability=durability) as log:
        assert log.recovery.damage and log.recovery.lossy
    assert opened_lossy(killed, durability)  # though the second open finds a clean log


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_missing_segments_are(tmp_path: Path, durability: str) -> None:
    written(tmp_path / "t-0", "fsync").close()
    for path in (tmp_path / "t-0").glob("*.log"):
        path.unlink()
    assert opened_lossy(tmp_path / "t-0", durability)


@pytest.mark.parametrize(("durability", "lossy"), [("os", True), ("fsync", False)])
def test_a_failed_fsync_is_if_more_was_acknowledged(
    tmp_path: Path, durability: str, lossy: bool
) -> None:
    log = written(tmp_path / "t-0", durability)
    with (
        inject_io(Fault.fail(errno.EIO, "datasync", "*.log", forever=True)),
        pytest.raises(IndeterminateAppendError),
    ):
        log.append(b"x", durability="fsync")
    log.close()
    shutil.copytree(tmp_path / "t-0", tmp_path / "u-0")
    assert opened_lossy(tmp_path / "u-0", durability) is lossy
