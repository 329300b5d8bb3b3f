"""The examples run as they stand, each in a process of its own, and print what they promise.

Those that need Spark are tested with it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import logstore
from logstore import Partition

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SECONDS = 300  # for a machine with other work to do; each takes one or two


def run(example: str, *arguments: object) -> str:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("example", "promised"),
    [
        ("event_sourcing.py", "balance 5 after reopening"),
        ("outbox.py", '3: {"order": 4, "item": "jam", "amount": 5}'),
        ("time_travel.py", "Thursday 08:00: {'tea': 320, 'bread': 280}"),
        ("work_log.py", "every result once, in order"),
        ("exactly_once.py", "100 committed, 100 different"),
        ("worker_group.py", "400 jobs done; all committed: True"),
        ("parallel_workers.py", "400 receipts; each customer's in order: True"),
        ("three_nodes.py", "acknowledged, 0 lost, 0 twice"),
        ("job_queue.py", "50 jobs done, 50 different, 1 dead letter"),
        ("rewind.py", "from Tuesday on again, right tax: 2880"),
        ("kafka_server.py", "the group continues at offset 4"),
        ("reminders.py", "in order: call Alice, lunch, water the plants"),
        ("frames.py", "arrow: 50000 rows, total 24864583"),
    ],
)
def test_an_example_runs(example: str, promised: str, tmp_path: Path) -> None:
    assert promised in run(example, tmp_path / "data")


def test_tailing_shows_the_last_records(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "orders-0") as log:
        log.extend(b"order %d" % number for number in range(20))
        shown = run("tail.py", log.path, "--last", 3, "--idle", 0.1)
    assert [line.split("  ")[-1] for line in shown.splitlines()] == [
        "order 17", "order 18", "order 19",
    ]  # fmt: skip


def test_a_copy_is_level_after_following_once(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "data") as store:
        store.create_topic("orders").extend([b"order"] * 20, partition=0)
        shown = run("follow.py", tmp_path / "data", tmp_path / "copy", "--once")
    assert shown == "1 partitions, 20 records copied, 0 behind, 0.0 s\n"


def test_the_demo_runs() -> None:
    shown = run("demo.py", 20_000)
    assert "nothing lost" in shown
    assert "201 records, none of them lost" in shown
    assert "rows counted" in shown or "skipped: " in shown


def test_every_example_is_run_by_a_test() -> None:
    here = Path(__file__)
    tests = here.read_text() + (here.parent.parent / "spark" / "test_examples.py").read_text()
    others = "".join(path.read_text() for path in here.parent.parent.rglob("test_*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert path.name in tests or path.name in others, f"{path.name} is run by no test"
