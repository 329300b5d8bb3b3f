"""Power cuts on a real ext4, where the machine allows it (see power_cut)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.power_cut import NOT_HERE

IMAGES = 120  # fewer miss a sync that is left out: the last test needs them


def cut_power(*arguments: object) -> subprocess.CompletedProcess[str]:
    """In a mount namespace of its own: no mount is left."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is missing")
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-m", "tests.crash.power_cut", *map(str, arguments)],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == NOT_HERE:
        pytest.skip(f"no power cuts on this machine: {done.stdout.strip()}")
    if "unshare:" in done.stderr:
        pytest.skip(f"no power cuts on this machine: {done.stderr.strip()}")
    return done


def test_what_was_promised_outlives_a_power_cut_on_ext4() -> None:
    done = cut_power("--images", IMAGES, "--progress", 0)
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout)
    assert figures["images"] == IMAGES
    assert figures["flushes"] > 100
    assert figures["promises"] > 90


@pytest.mark.parametrize("call", ["datasync", "sync"])
def test_a_sync_that_is_left_out_is_found_by_a_power_cut(call: str) -> None:
    """Else the cuts above prove nothing."""
    done = cut_power("--images", IMAGES, "--progress", 0, "--lie", call)
    assert done.returncode == 1, f"{call} was left out, and nothing was found: {done.stdout}"
    assert "AssertionError: cut at" in done.stderr, done.stderr[-4000:]
