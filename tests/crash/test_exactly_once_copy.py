"""Read, process, write: exactly once under kill -9 (see copy_campaign)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run(kills: int, seed: int, records: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.crash.copy_campaign", "--kills", str(kills),
               "--seed", str(seed), "--records", str(records)]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_a_copy_is_exactly_once_over_twenty_two_kills() -> None:
    found = run(22, seed=1, records=8_000)
    assert found["kills"] == 22
    assert found["written"] >= found["records"] == 8_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_a_copy_is_exactly_once_over_three_hundred_kills(seed: int) -> None:
    assert run(300, seed=seed, records=60_000)["kills"] == 300
