"""kill -9 of a writer under load: what was acknowledged is there (see kill_campaign)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign import sized
from tests.conftest import MakeLog
from tests.crash.kill_campaign import Lane

KILLS, LANES = sized(60, 500, 5_000), 2


@pytest.mark.campaign
def test_kills_lose_no_acknowledged_record() -> None:
    command = [sys.executable, "-m", "tests.crash.kill_campaign", "--kills", str(KILLS // LANES)]
    lanes = [
        subprocess.Popen(
            [*command, "--seed", str(number), "--progress", "0"],
            cwd=Path(__file__).parent.parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(1, LANES + 1)
    ]
    done = []
    for lane in lanes:
        output, errors = lane.communicate()
        assert lane.returncode == 0, errors[-4000:]
        done.append(json.loads(output))
    assert sum(lane["kills"] for lane in done) == KILLS
    assert sum(lane["acknowledged"] for lane in done) > KILLS
    assert all(lane["checks"] > 0 for lane in done)


# A ledger that cannot disagree proves nothing.


@pytest.mark.parametrize(
    ("values", "ledger", "fault"),
    [
        ([b"1:0:0:x", b"1:0:1:x"], {0: b"1:0:0:x", 1: b"1:0:1:x"}, ""),
        ([b"1:0:0:x"], {0: b"1:0:0:x", 1: b"1:0:1:x"}, "offset 1 was b'1:0:1:x' and is None"),
        ([b"1:0:0:x", b"1:0:1:y"], {1: b"1:0:1:x"}, "offset 1 was b'1:0:1:x' and is b'1:0:1:y'"),
        ([b"1:0:0:x", b"1:0:0:x"], {}, "a value is there twice"),
        ([b"1:0:0:x", b"1:1:0:x", b"1:0:2:x"], {}, "b'1:0' goes on with 2, not 1"),
    ],
)
def test_the_ledger_disagrees_with_what_is_not_as_acknowledged(
    make_log: MakeLog, values: list[bytes], ledger: dict[int, bytes], fault: str
) -> None:
    log = make_log()
    log.extend(values)
    faults = list(Lane.compare("events", log, ledger, 0))
    assert (fault in faults[0]) if fault else not faults


def test_a_transaction_that_is_there_in_part_is_told() -> None:
    assert not list(Lane.torn({b"1:2:0.0", b"1:2:0.1", b"1:2:1.0"}))
    assert list(Lane.torn({b"1:2:0.0", b"1:2:0.2"}))
