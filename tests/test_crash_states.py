"""Every protocol, crashed at every call, and again inside its recovery: see crash_campaign.

`make crash` takes the campaign to a million states and follows up every recovery.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATES = 100_000


def test_no_crash_and_no_second_crash_breaks_a_promise() -> None:
    options = {"states": STATES, "per-step": 11, "rounds": 2, "per-recovery": 1, "firsts": 12}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash_campaign", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["violations"] == 0
    assert counts["distinct"] >= STATES
    assert counts["inside_recovery"] >= 20_000
    assert counts["scenarios"] >= 30
