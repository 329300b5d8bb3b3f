"""kill -9 of a process with workers; and a record that ends its process each time."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import logstore
from logstore import Groups, PoisonRecordError, TopicPartition, Workers
from logstore.workers.progress import Place, Progress
from tests.campaign import sized
from tests.workers.kill_campaign import KEYS, check_life

ROOT = Path(__file__).parent.parent.parent
KILLS = sized(10, 60, 600)


@pytest.mark.campaign
def test_w4_kills_lose_nothing_and_repeat_only_what_was_not_committed() -> None:
    command = [sys.executable, "-m", "tests.workers.kill_campaign", "--kills", str(KILLS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout)["kills"] == KILLS


# A ledger that cannot disagree proves nothing.


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ("s0 e0 s1 e1 s30", ""),
        ("s0 s30", "run at once"),
        ("s5 e5", "is started again"),
        ("s0 e0 s60 e60", "passed over"),
    ],
)
def test_the_ledger_disagrees_with_a_life_that_breaks_a_rule(events: str, fault: str) -> None:
    assert KEYS == 30
    life = [(each[:1].encode(), (0, int(each[1:]))) for each in events.split()]
    expected = pytest.raises(AssertionError, match=fault) if fault else contextlib.nullcontext()
    with expected:
        assert check_life(life, {(0, 5)}, {}) == 1


POISON = """
import os, signal, sys, logstore
from logstore import Workers
def handle(record):
    if record.value == b"poison":
        os.kill(os.getpid(), signal.SIGKILL)
    os.write(1, record.value + b"\\n")
with logstore.open(sys.argv[1]) as store:
    with Workers(store, "t", group_id="g", handler=handle, commit_interval=60) as workers:
        workers.wait(until="idle")
"""


def test_a_record_that_ends_the_process_is_found_after_three_starts(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with logstore.open(path) as store:
        store.create_topic("t", partitions=1)
        # The last owner ended cleanly: the first crash must be noticed all the same.
        with Workers(store, "t", group_id="g", handler=lambda record: None) as workers:
            assert workers.wait(timeout=60)
        store["t"][0].extend([b"a", b"poison", b"b"])
    lives = 0
    while True:
        lives += 1
        child = subprocess.run([sys.executable, "-c", POISON, str(path)], cwd=ROOT, check=False,
                               capture_output=True)  # fmt: skip
        if child.returncode != -signal.SIGKILL:
            break
        assert lives < 9, "a crash loop without end"
    assert b"PoisonRecordError: the process ended 3 times" in child.stderr, child.stderr
    # One life without probation, three whose starts were counted, and the last.
    assert lives == 5
    with logstore.open(path) as store:
        tp = TopicPartition("t", 0)
        found = Groups(store).committed("g")[tp]
        progress = Progress.decode(found.metadata, Place("g", store["t"].id, 0), found.offset)
        assert 0 not in progress and progress.starts[1] == 3
        assert progress.starts.get(2, 0) <= 1  # it ran beside the record in one life
        with pytest.raises(PoisonRecordError) as caught:
            Workers(store, "t", group_id="g", handler=print).run()
        assert caught.value.record.value == b"poison"  # type: ignore[attr-defined]
        # The record is not lost: a higher limit starts it again.
        seen: list[object] = []
        with Workers(store, "t", group_id="g", crash_limit=4,
                     handler=lambda record: seen.append(record.value)) as workers:  # fmt: skip
            assert workers.wait(timeout=60)
        assert seen == [b"poison"] or sorted(seen) == [b"b", b"poison"]  # type: ignore[type-var]
