"""Every protocol, crashed at every call, and again inside its recovery: see crash_campaign.

`make crash` extends the campaign to a million states and crashes every recovery again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign import sized

ROOT = Path(__file__).resolve().parent.parent.parent
STATES = sized(3_000, 50_000, 100_000)
INSIDE_RECOVERY = sized(500, 10_000, 20_000)


@pytest.mark.campaign
def test_no_crash_and_no_second_crash_breaks_a_promise() -> None:
    options = {
        "states": STATES,
        "one-in": sized(8, 1, 1),  # of the calls
        "per-step": sized(1, 5, 11),
        "rounds": 2,
        "per-recovery": 1,
        "firsts": sized(1, 6, 12),
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.crash_campaign", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["violations"] == 0
    assert counts["distinct"] >= STATES
    assert counts["inside_recovery"] >= INSIDE_RECOVERY
    assert counts["scenarios"] >= 30
